"""The command line: parse, call, print. stdout carries the job's stdout or the answer asked for, stderr all talk.

This is the one place that prints an error and exits. What a command needs is imported inside it: a warm run loads neither Fabric nor SSH,
and `gpurun --help` loads nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from gpurun import __version__, cli_runs
from gpurun.cli_shared import (
    Command, Heard, LazyLink, find_cluster, loaded_all, nodes_named, operator_name, options, print_line, status_object,
)
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, ConfigError, GpurunError

DOCTOR_S = 10.0
KEEP = 20              # runs of this operator that a node keeps, once their outputs are home


class Commands(Heard, click.Group):
    """`gpurun JOB.toml` is `gpurun run JOB.toml`."""

    command_class = Command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None:
            if name.endswith(".toml") or os.path.exists(name):
                return super().resolve_command(ctx, ["run"] + args)
            import difflib
            near = difflib.get_close_matches(name, self.list_commands(ctx), 1)
            raise ConfigError(f"'{name}' is neither a job file nor a command{f'; did you mean {near[0]}?' if near else '.'} "
                              f"The commands are {', '.join(self.list_commands(ctx))}; see gpurun --help.")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            try:
                click.echo(ctx.get_help(), err=True)
            except OSError:
                pass
            ctx.exit(EXIT_USAGE)
        # `gpurun --json job.toml` and `gpurun job.toml --json` are the same: an option in front goes to `run`.
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version"):
            args = ["run"] + args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:                # not stdout, which is dealt with where it is written; click would exit 1 and say nothing
            raise RuntimeError(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpurun")
def cli() -> None:
    """Run one command job on a GPU node: push the workspace, setup, run, collect the outputs.

    \b
      gpurun job.toml                 run the job; its exit code is gpurun's
      gpurun job.toml --json          the same for a program to read
      gpurun plan job.toml            what would be sent, and where to; touches nothing
      gpurun submit job.toml          the same as run, and you may go: the node ends it alone
      gpurun attach latest            back to it, as if you had never left
      gpurun status                   the runs of this folder
    """


def _job_options(function: Any) -> Any:
    """Of the commands that start a job."""
    for option in (click.option("--keep", metavar="N", type=click.IntRange(min=1), default=KEEP, show_default=True,
                                help="How many of your runs the node keeps; the oldest go, once their outputs are home."),
                   options("cluster", "node", "runs_dir", "json", "quiet"), click.argument("job", metavar="JOB.toml")):
        function = option(function)
    return function


@cli.command(short_help="Run a job: gpurun run job.toml (or just: gpurun job.toml)")
@_job_options
@click.option("--wait", is_flag=True, help="Wait for a busy node instead of failing.")
@click.option("--detach", is_flag=True, help="The same as: gpurun submit JOB.toml")
@click.option("--dry-run", is_flag=True, help="The same as: gpurun plan JOB.toml")
def run(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, keep: int, wait: bool, detach: bool,
        dry_run: bool) -> int:
    """Run a job on a node and bring its outputs home. The exit code is the job's own.

    \b
    Example: gpurun run train.toml --cluster gpus.toml
    Others:  2 usage or config, 125 gpurun or the node failed, 128+n ended by signal n, 130 stopped by you.
    """
    if dry_run:
        return _plan(job, cluster, node, runs_dir, as_json)
    return _run(job, cluster, node, runs_dir, as_json, quiet, keep, wait=wait or detach, detach=detach)


@cli.command(short_help="Give a job to a node and go: gpurun submit job.toml")
@_job_options
@click.option("--wait", is_flag=True, hidden=True, expose_value=False)   # as with run; here it is always so
def submit(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, keep: int) -> int:
    """Bring a job to its node and return as soon as the node has all that it takes to end it alone; stdout is the run's id.

    The job waits its turn there if the node is busy. Come back with `gpurun attach`, `wait`, `logs`, `fetch` or `stop`.

    \b
    Example: gpurun submit train.toml
    """
    return _run(job, cluster, node, runs_dir, as_json, quiet, keep, wait=True, detach=True)


def _run(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, keep: int, wait: bool,
         detach: bool) -> int:
    import signal
    from gpurun.orchestrator import SIGNALS, Orchestrator
    from gpurun.records import RunFolder, choose_runs_dir
    from gpurun.screen import Screen
    loaded, found, nodes = _load(job, cluster, node)
    screen = Screen.choose(json=as_json, quiet=quiet)
    names = {"name": loaded.name, "file": str(loaded.path), "run": loaded.run, "setup": loaded.setup, "outputs": list(loaded.outputs),
             "env": sorted(loaded.env), "workdir": loaded.workdir, "exclude": list(loaded.exclude)}
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)   # a record that is begun must be closed: `Orchestrator.run` takes what comes meanwhile
    folder, record = RunFolder.create(choose_runs_dir(runs_dir, os.environ), loaded.name, job=names, node={"kind": found.kind})
    try:
        folder.try_lock()
        screen.say(f"run {folder.run_id}")
        loaded_all()
        orchestrator = Orchestrator(loaded, found, nodes, LazyLink(found), folder, record, screen, wait=wait, operator=operator_name(),
                                    detach=detach, keep=keep)
        result = orchestrator.run()
    except GpurunError as error:
        if as_json:
            screen.error(str(error))
            screen.result(_no_run(folder, str(error), error.exit_code))
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        screen.close()
    code = int(result["exit_code"])
    if detach and code == 0:
        screen.say(f"the node has all that it needs: come back with `gpurun attach {folder.run_id}`")
        screen.close()
        print_line(json.dumps(status_object(folder, folder.load(), "")) if as_json else folder.run_id)
        return 0
    screen.summary(result)
    screen.result({key: value for key, value in result.items() if key != "bytes"})
    screen.close()
    return code


def _no_run(folder: Any, reason: str, exit_code: int) -> dict[str, Any]:
    """The result object of a run that the node never had."""
    return {"run_id": folder.run_id, "state": "FAILED", "exit_code": exit_code, "reason": reason, "node": "", "outputs_dir": folder.outputs,
            "outputs": [], "missing": [], "seconds": dict.fromkeys(("push", "setup", "run", "collect", "total"), 0.0)}


@cli.command(short_help="What would be sent, and where: gpurun plan job.toml")
@click.argument("job", metavar="JOB.toml")
@options("cluster", "node", "runs_dir", "json")
def plan(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool) -> int:
    """Say what a run would send and where it would run. Nothing is sent, nothing is written.

    \b
    Example: gpurun plan train.toml
    """
    return _plan(job, cluster, node, runs_dir, as_json)


def _plan(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool) -> int:
    from gpurun import workspace
    from gpurun.files import human_bytes
    from gpurun.manifest import quote_name
    from gpurun.records import choose_runs_dir
    from gpurun.screen import counted
    loaded, found, nodes = _load(job, cluster, node)
    survey = workspace.survey(str(loaded.workdir), loaded.exclude, choose_runs_dir(runs_dir, os.environ)) if loaded.workdir else None
    answer: dict[str, Any] = {
        "type": "plan", "job": loaded.name, "nodes": [one.describe() for one in nodes], "setup": loaded.setup, "run": loaded.run,
        "outputs": list(loaded.outputs), "env": sorted(loaded.env), "workspace": None}
    if survey is not None:
        answer["workspace"] = {
            "workdir": str(loaded.workdir), "files": survey.files, "folders": survey.folders, "size_bytes": survey.total_bytes,
            "largest": [{"path": name, "size_bytes": size, "files": files} for name, size, files in survey.largest],
            "excluded": survey.excluded, "skipped": [{"path": one.path, "reason": one.reason} for one in survey.skipped],
            "git_ignored": [{"path": path, "size_bytes": size} for path, size in survey.git_ignored],
            "git_ignored_count": survey.git_ignored_count}
    if as_json:
        print_line(json.dumps(answer))
        return 0
    where = ", ".join(f"{one.name}" for one in nodes)
    lines = [f"job        {loaded.name} ({loaded.path})",
             f"node       {where} ({found.kind}{f', {found.path}' if found.path else ', no cluster file: this machine'})"]
    if survey is None:
        lines.append("workspace  none: the job starts in an empty folder")
    else:
        lines.append(f"workspace  {loaded.workdir}: {counted(survey.files, 'files')}, {counted(survey.folders, 'folders')}, "
                     f"{human_bytes(survey.total_bytes)}")
        lines += [f"             {human_bytes(size):>9}  {files:>6} {'file ' if files == 1 else 'files'}  {quote_name(name)}"
                  for name, size, files in survey.largest]
        for pattern, count in survey.excluded.items():
            lines.append(f"excluded   {pattern}: {counted(count, 'paths')}")
        for one in survey.skipped:
            lines.append(f"skipped    {quote_name(one.path)}: {one.reason}")
        if survey.git_ignored_count:
            shown = ", ".join(quote_name(path) for path, _ in survey.git_ignored)
            lines.append(f"note       git ignores {survey.git_ignored_count} of these and they would go (use exclude): {shown}")
    lines += [f"{name:<10} {value}" for name, value in (
        ("setup", _first_line(loaded.setup)), ("run", _first_line(loaded.run)), ("outputs", ", ".join(loaded.outputs)),
        ("env", ", ".join(sorted(loaded.env)))) if value]
    print_line("\n".join(lines))
    return 0


@cli.command(short_help="Check this machine and the nodes: gpurun doctor")
@options("cluster", "node", "json")
@click.argument("job", metavar="[JOB.toml]", required=False)
def doctor(cluster: str | None, node: str | None, as_json: bool, job: str | None) -> int:
    """Check Python, iroh, keys and SSH here, and what each node of the cluster answers. Starts nothing on a node.

    \b
    Example: gpurun doctor --cluster gpus.toml
    """
    from gpurun.doctor import checks
    found = find_cluster(cluster, os.path.dirname(os.path.abspath(job)) if job else os.getcwd())
    worst = 0
    for check in checks(found, nodes_named(found, node), LazyLink(found), DOCTOR_S, operator_name()):
        if as_json:
            print_line(json.dumps(dict(check, type="check")))
        else:
            print_line(f"{'ok  ' if check['ok'] else 'FAIL' if check['ok'] is False else 'note'}  {check['name']}: {check['text']}")
        worst = 125 if check["ok"] is False else worst
    return worst


for command in cli_runs.COMMANDS:
    cli.add_command(command)


# ---- what they need ------------------------------------------------------------------------------------------------------------------

def _load(job: str, cluster: str | None, node: str | None) -> tuple[Any, Any, list[Any]]:
    from gpurun import config
    loaded = config.load_job(job, os.environ)
    if loaded.external_job is not None:
        raise config.error_at(job, ("external_job",), "is not in this version yet; run the job without the table [external_job]")
    if loaded.exclude:
        _check_exclude(job, loaded)
    found = find_cluster(cluster, loaded.folder)
    return loaded, found, nodes_named(found, node)


def _check_exclude(job: str, loaded: Any) -> None:
    """Before there is a run: a pattern that isn't one is an error of the job file, with its place there."""
    from gpurun import config, workspace
    try:
        workspace.Exclude(loaded.exclude, loaded.workdir)
    except ConfigError as error:
        import re
        match = re.fullmatch(r"job\.workspace\.exclude\[(\d+)\], (.*)", str(error), re.DOTALL)
        if not match:
            raise ConfigError(f"{job}: {error}") from None
        raise config.error_at(job, ("job", "workspace", "exclude", int(match[1])), match[2]) from None


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] + (f" … ({len(lines)} lines)" if len(lines) > 1 else "") if lines else ""


def main() -> None:
    """The command `gpurun`."""
    from gpurun.screen import claim_standard_fds, end_on_ctrl_c
    claim_standard_fds()
    end_on_ctrl_c()
    sys.stdout.reconfigure(errors="backslashreplace")   # a name that this terminal can't show must not end the command
    code = 0
    try:
        code = cli.main(standalone_mode=False) or 0
        sys.stdout.flush()
    except GpurunError as error:
        code = _say_error(str(error), error.exit_code)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        code = _say_error(error.format_message(), EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_STOPPED
    except BrokenPipeError:
        pass                                            # whoever read the answer has had enough of it
    except OSError as error:
        code = _say_error(f"{error.filename or 'stdout'} can't be written or read: {error.strerror}", EXIT_FAILED)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except Exception as error:                          # a fault of gpurun's own: said in a line that can be reported
        if os.environ.get("GPURUN_DEBUG"):
            raise
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        where = f"{os.path.basename(at.tb_frame.f_code.co_filename)}:{at.tb_lineno}" if at else "?"
        code = _say_error(f"this is a fault in gpurun itself: {type(error).__name__}: {error} ({where}). GPURUN_DEBUG=1 shows all of it. "
                          "A run that was begun goes on: see `gpurun status`.", EXIT_FAILED)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    # Threads of the link are still there and have nothing left to do; unwinding them costs more than the run did.
    os._exit(code)


def _say_error(text: str, code: int) -> int:
    from gpurun.screen import Screen
    screen = Screen("plain" if "--json" not in sys.argv else "json")
    screen.error(text)
    screen.close()
    return code
