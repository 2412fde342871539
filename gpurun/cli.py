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

from gpurun import __version__, cli_jobs, cli_nodes, cli_runs
from gpurun.cli_shared import (
    Command, Heard, LazyLink, Time, find_cluster, loaded_all, nodes_named, operator_name, options, print_line, status_object, way_to,
)
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, ConfigError, GpurunError

DOCTOR_S = 10.0
BUDGETS = ("quick", "medium", "unknown", "long_compute")   # budgets.TABLE's, which --help needn't load
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
    for option in (click.option("--limit", metavar="TIME", type=Time(), help="The budget's hard limit (90, 90s, 10m, 2h): then the job is stopped, exit code 124."),
                   click.option("--budget", metavar="NAME", type=click.Choice(BUDGETS),
                                help="How long it should take: quick, medium, unknown, or long_compute, which submits it."),
                   click.option("--keep", metavar="N", type=click.IntRange(min=1), default=KEEP, show_default=True,
                                help="How many of your runs the node keeps; the oldest go, once their outputs are home."),
                   options("cluster", "node", "runs_dir", "json", "quiet"), click.argument("job", metavar="JOB.toml")):
        function = option(function)
    return function


@cli.command(short_help="Run a job: gpurun run job.toml (or just: gpurun job.toml)")
@_job_options
@click.option("--wait", is_flag=True, help="Wait for a busy node instead of failing.")
@click.option("--detach", is_flag=True, help="The same as: gpurun submit JOB.toml")
@click.option("--up", is_flag=True, help="Bring the cluster up first; with --down a machine for this run alone.")
@click.option("--down", is_flag=True, help="End the machines when the run is over, however it went.")
@click.option("--yes", "-y", is_flag=True, help="Rent without asking.")
@click.option("--keep-on-failure", metavar="TIME", type=Time(), help="With --down: a run that failed leaves the machine for so long (30m), to be looked at.")
@click.option("--dry-run", is_flag=True, help="The same as: gpurun plan JOB.toml")
def run(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, keep: int, budget: str | None,
        limit: float | None, wait: bool, detach: bool, up: bool, down: bool, yes: bool, keep_on_failure: float | None, dry_run: bool) -> int:
    """Run a job on a node and bring its outputs home. The exit code is the job's own.

    \b
    Example: gpurun run train.toml --cluster gpus.toml
    Others:  2 usage or config, 125 gpurun or the node failed, 128+n ended by signal n, 130 stopped by you.
    """
    if dry_run:
        return _plan(job, cluster, node, runs_dir, as_json)
    if down and detach:
        raise ConfigError("--down ends the machine once the run is over, and --detach doesn't wait for that. Leave one out: a machine that is idle ends "
                          "itself (idle_minutes), and `gpurun wait RUN && gpurun down` does it sooner")
    if keep_on_failure is not None and not down:
        raise ConfigError("--keep-on-failure is for a machine that goes with the run: it needs --down")
    return _run(job, cluster, node, runs_dir, as_json, quiet, keep, {"runtime_budget": budget, "hard_limit_s": limit}, wait=wait or detach,
                detach=detach, up=up, down=down, yes=yes, keep_on_failure=keep_on_failure or 0.0)


@cli.command(short_help="Give a job to a node and go: gpurun submit job.toml")
@_job_options
@click.option("--wait", is_flag=True, hidden=True, expose_value=False)   # as with run; here it is always so
@click.option("--up", is_flag=True, help="Bring the cluster up first.")
@click.option("--yes", "-y", is_flag=True, help="Rent without asking.")
@click.option("--plan", metavar="ID", help="Write a manifest for the plan that this job is for (the async-job contract); with --phase and --verify.")
@click.option("--phase", metavar="N", help="The plan's phase.")
@click.option("--expected", metavar="P1,P2", help="The outputs that the job must make; else all that it declares.")
@click.option("--verify", metavar="CMD", help="The command that proves the outputs.")
@click.option("--resume", metavar="CMD", help="The command that goes on with the plan; else `gpurun poll JOB_ID`.")
@click.option("--backend", type=click.Choice(["node", "slurm"]), help="Who is to have the job; an error if the cluster is another's.")
def submit(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, keep: int, budget: str | None,
           limit: float | None, up: bool, yes: bool, plan: str | None, phase: str | None, expected: str | None, verify: str | None,
           resume: str | None, backend: str | None) -> int:
    """Bring a job to its node and return as soon as the node has all that it takes to end it alone; stdout is the run's id.

    The job waits its turn there if the node is busy. Come back with `gpurun attach`, `wait`, `logs`, `fetch` or `stop`.
    With --plan (or `plan` in [external_job]) a manifest says so to others, and stdout says external_job_waiting: see `gpurun poll`.

    \b
    Example: gpurun submit train.toml
    """
    given = {"runtime_budget": budget, "hard_limit_s": limit, "plan": plan, "phase": phase, "verify": verify, "resume": resume, "backend": backend,
             "expected": tuple(expected.split(",")) if expected is not None else None}
    return _run(job, cluster, node, runs_dir, as_json, quiet, keep, given, wait=True, detach=True, up=up, yes=yes)


def _run(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, keep: int, given: dict[str, Any],
         wait: bool, detach: bool, up: bool = False, down: bool = False, yes: bool = False, keep_on_failure: float = 0.0) -> int:
    """`given`: what the command line says in the place of [external_job]; None: nothing."""
    from gpurun import config, signals
    from gpurun.orchestrator import Orchestrator
    from gpurun.records import RunFolder, choose_runs_dir
    from gpurun.screen import Screen
    loaded, found, nodes = _load(job, cluster, node)
    external = config.external_with(loaded, given)
    budget = _budget(external)
    backend = "slurm" if found.slurm is not None else "node"
    if external.backend not in ("", backend):
        raise ConfigError(f"the backend is to be {external.backend}, and {found.path or 'this machine'} is of kind {found.kind}, whose jobs are backend {backend}. "
                          f"Name another cluster file with --cluster, or say --backend {backend}")
    alone = [f"--{key}" for key in ("phase", "expected", "verify", "resume") if given.get(key)]
    if alone and not external.plan:
        raise ConfigError(f"{' and '.join(alone)} would go into the manifest of a plan, and no plan is named: add --plan ID, or `plan` in [external_job]")
    submission = None
    if external.runtime_budget == "long_compute" or detach and external.plan:
        from gpurun.submitting import Submission
        if down:
            raise ConfigError("--down ends the machine once the run is over, and a job of budget long_compute isn't waited for; leave --down out")
        wait = detach = True
        submission = Submission(loaded, external, found, choose_runs_dir(runs_dir, os.environ))
    if not nodes and not up:
        raise ConfigError(f"no machine of {found.path} is up: `gpurun up` rents one, and `gpurun {job} --up --down` one for this run alone")
    if up:
        _check_room(loaded, found, runs_dir)
    screen = Screen.choose(json=as_json, quiet=quiet)
    if up and found.kind != "vastai":
        screen.say(f"--up rents nothing: {found.path} is of kind {found.kind}" if found.path else
                   "--up rents nothing: no cluster file was found, so this machine is the node; name one with --cluster")
    names = {"name": loaded.name, "file": str(loaded.path), "run": loaded.run, "setup": loaded.setup, "outputs": list(loaded.outputs),
             "env": sorted(loaded.env), "workdir": loaded.workdir, "exclude": list(loaded.exclude), "budget": budget}
    if submission is not None:
        submission.check(way_to(None), screen, operator_name())
    rental = None
    signals.keep()                            # a record that is begun must be closed: `Orchestrator.run` takes what comes meanwhile
    folder, record = RunFolder.create(choose_runs_dir(runs_dir, os.environ), loaded.name, job=names, node={"kind": found.kind},
                                      first=submission.reserve if submission is not None else lambda run_id: None)
    try:
        folder.try_lock()
        screen.say(f"run {folder.run_id}")
        loaded_all()
        link = LazyLink(found)
        if up or down or found.kind == "vastai":
            from gpurun.renting import Rental
            rental = Rental(found, folder, record, screen, LazyLink(found), operator_name())   # the run closes its own link

        def on(nodes: list[Any]) -> dict[str, Any]:
            return Orchestrator(loaded, found, nodes, link, folder, record, screen, wait=wait, operator=operator_name(), detach=detach, keep=keep,
                                ends=down, submits=submission is not None).run()

        def fetch() -> None:
            from gpurun.fetching import fetch as bring
            bring(folder, (), "", way_to(None), screen, operator_name())

        result, left = (on(nodes), []) if rental is None else rental.run(on, nodes, up, down, yes, keep_on_failure, fetch)
        written = submission.end(record, screen) if submission is not None else {}
    except GpurunError as error:
        if submission is not None:
            submission.end(record, screen)
        if as_json:
            screen.error(str(error))
            screen.result(_no_run(folder, str(error), error.exit_code))
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        screen.close()
    code = int(result["exit_code"])
    if written:
        print_line(json.dumps(dict(written, type="external_job")) if as_json else "\n".join(f"{key}: {value}" for key, value in written.items()))
        return 0
    if detach and code == 0:
        screen.say(f"the node has all that it needs: come back with `gpurun attach {folder.run_id}`")
        screen.close()
        print_line(json.dumps(status_object(folder, folder.load(), "")) if as_json else folder.run_id)
        return 0
    screen.summary(result)
    for line in left:
        screen.error(line)
        code = EXIT_FAILED
    screen.result({key: value for key, value in dict(result, exit_code=code, **({"left": left} if left else {})).items() if key != "bytes"})
    screen.close()
    return code


def _budget(external: Any) -> dict[str, Any]:
    """What goes to the node: the limits that are set, {} for none."""
    from gpurun import budgets
    return {key: value for key, value in budgets.budget(external.runtime_budget, **external.settings())._asdict().items() if value}


def _check_room(loaded: Any, cluster: Any, runs_dir: str | None) -> None:
    """Before anything is rented: a disk that can't hold the workspace twice, in the cache and in the run's folder."""
    from gpurun import workspace
    from gpurun.files import human_bytes
    from gpurun.records import choose_runs_dir
    if cluster.kind == "vastai" and loaded.workdir:
        size = workspace.survey(str(loaded.workdir), loaded.exclude, choose_runs_dir(runs_dir, os.environ)).total_bytes
        if 2 * size > cluster.disk_gb * 1e9:
            raise ConfigError(f"the workspace {loaded.workdir} has {human_bytes(size)} and is on a node twice, in the cache and in the run's folder; disk_gb = "
                              f"{cluster.disk_gb} of {cluster.path} can't hold that. Raise it, or exclude what the job doesn't need: `gpurun plan` shows what goes")


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
    from gpurun import config, workspace
    from gpurun.files import human_bytes
    from gpurun.manifest import quote_name
    from gpurun.records import choose_runs_dir
    from gpurun.screen import counted
    loaded, found, nodes = _load(job, cluster, node)
    survey = workspace.survey(str(loaded.workdir), loaded.exclude, choose_runs_dir(runs_dir, os.environ)) if loaded.workdir else None
    answer: dict[str, Any] = {
        "type": "plan", "job": loaded.name, "nodes": [one.describe() for one in nodes], "setup": loaded.setup, "run": loaded.run,
        "outputs": list(loaded.outputs), "env": sorted(loaded.env), "budget": _budget(loaded.external_job or config.External()), "workspace": None}
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
    where = ", ".join(f"{one.name}" for one in nodes) or "none is up yet"
    lines = [f"job        {loaded.name} ({loaded.path})",
             f"node       {where} ({found.kind}{f', {found.path}' if found.path else ', no cluster file: this machine'})"]
    lines += [f"sbatch     {' '.join(one.backend['options']) or 'as Slurm has it'}" for one in nodes if one.backend]
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
        ("env", ", ".join(sorted(loaded.env))), ("budget", ", ".join(f"{key} {value}" for key, value in answer["budget"].items()))) if value]
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


for command in cli_runs.COMMANDS + cli_jobs.COMMANDS + cli_nodes.COMMANDS:
    cli.add_command(command)


# ---- what they need ------------------------------------------------------------------------------------------------------------------

def _load(job: str, cluster: str | None, node: str | None) -> tuple[Any, Any, list[Any]]:
    from gpurun import config
    loaded = config.load_job(job, os.environ)
    if loaded.exclude:
        _check_exclude(job, loaded)
    found = find_cluster(cluster, loaded.folder)
    if found.slurm is not None:
        found = _with_timeouts(found)
    return loaded, found, nodes_named(found, node)


def _with_timeouts(cluster: Any) -> Any:
    """A cluster of Slurm with the bounds that the environment or a GSD project sets (the async-job contract), where they do."""
    from gpurun.asyncjobs import Settings, find_project, settings
    files = Settings(submit_timeout_ms=cluster.slurm.submit_timeout_s * 1000, poll_timeout_ms=cluster.slurm.poll_timeout_s * 1000)
    found = settings(find_project(os.getcwd(), os.getcwd()), os.environ, files)
    return cluster._replace(slurm=cluster.slurm._replace(submit_timeout_s=found.submit_timeout_ms / 1000, poll_timeout_s=found.poll_timeout_ms / 1000))


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
        _say_left_over()
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
    screen = _screen()
    screen.error(text)
    screen.close()
    return code


def _screen() -> Any:
    from gpurun.screen import Screen
    return Screen("plain" if "--json" not in sys.argv else "json")


def _say_left_over() -> None:
    """First of all what costs money and shouldn't, if anything does. Costs nothing where nothing was ever rented."""
    from gpurun.paths import config_dir
    if os.path.isdir(os.path.join(config_dir(), "machines")):
        from gpurun.machines import Store
        for line in Store().left_over():
            _screen().warn(line)
