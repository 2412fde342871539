"""The command line: parse, call, print. stdout carries the job's stdout or the answer asked for, stderr all talk.

This is the one place that prints an error and exits. What a command needs is imported inside it: a warm run loads neither Fabric nor SSH,
and `gpurun --help` loads nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable

import click

from gpurun import __version__
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, ConfigError, GpurunError

STATUS_S = 10.0
REASON_COLUMNS = 100   # of a reason in the list of runs; `gpurun status RUN` has all of it


class _Heard:
    """Of click, which would exit 1 when nobody reads a help text to its end."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*args, **options)   # type: ignore[misc]
        except BrokenPipeError:
            raise click.exceptions.Exit(0) from None


class Command(_Heard, click.Command):
    pass


class Commands(_Heard, click.Group):
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
      gpurun status                   the runs of this folder
    """


def _options(*names: str) -> Callable:
    known = {
        "cluster": click.option("--cluster", metavar="FILE", help="Where to run. Else $GPURUN_CLUSTER, cluster.toml beside the job, "
                                                                  "~/.config/gpurun/cluster.toml, this machine."),
        "node": click.option("--node", metavar="NAME", help="One node of the cluster file."),
        "runs_dir": click.option("--runs-dir", metavar="DIR", help="Where runs are kept. Else $GPURUN_RUNS, else ./gpurun-runs."),
        "json": click.option("--json", "as_json", is_flag=True, help="One JSON object a line on stdout, each with a type."),
        "quiet": click.option("--quiet", "-q", is_flag=True, help="Only the job's own output, warnings and errors."),
    }

    def add(function: Callable) -> Callable:
        for name in reversed(names):
            function = known[name](function)
        return function
    return add


@cli.command(short_help="Run a job: gpurun run job.toml (or just: gpurun job.toml)")
@click.argument("job", metavar="JOB.toml")
@_options("cluster", "node", "runs_dir", "json", "quiet")
@click.option("--wait", is_flag=True, help="Wait for a busy node instead of failing.")
@click.option("--dry-run", is_flag=True, help="The same as: gpurun plan JOB.toml")
def run(job: str, cluster: str | None, node: str | None, runs_dir: str | None, as_json: bool, quiet: bool, wait: bool, dry_run: bool) -> int:
    """Run a job on a node and bring its outputs home. The exit code is the job's own.

    \b
    Example: gpurun run train.toml --cluster gpus.toml
    Others:  2 usage or config, 125 gpurun or the node failed, 128+n ended by signal n, 130 stopped by you.
    """
    if dry_run:
        return _plan(job, cluster, node, runs_dir, as_json)
    from gpurun.records import RunFolder, choose_runs_dir
    from gpurun.screen import Screen
    loaded, found, nodes = _load(job, cluster, node)
    screen = Screen.choose(json=as_json, quiet=quiet)
    names = {"name": loaded.name, "file": str(loaded.path), "run": loaded.run, "setup": loaded.setup, "outputs": list(loaded.outputs),
             "env": sorted(loaded.env)}
    folder, record = RunFolder.create(choose_runs_dir(runs_dir, os.environ), loaded.name, job=names, node={"kind": found.kind})
    try:
        folder.try_lock()
        screen.say(f"run {folder.run_id}")
        from gpurun.orchestrator import Orchestrator
        loaded_all()
        orchestrator = Orchestrator(loaded, found, nodes, LazyLink(found), folder, record, screen, wait=wait, operator=_operator())
        result = orchestrator.run()
    except GpurunError as error:
        if as_json:
            screen.error(str(error))
            screen.result(_no_run(folder, str(error), error.exit_code))
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        screen.close()
    screen.summary(result)
    screen.result({key: value for key, value in result.items() if key != "bytes"})
    screen.close()
    return int(result["exit_code"])


def _no_run(folder: Any, reason: str, exit_code: int) -> dict[str, Any]:
    """The result object of a run that the node never had."""
    return {"run_id": folder.run_id, "state": "FAILED", "exit_code": exit_code, "reason": reason, "node": "", "outputs_dir": folder.outputs,
            "outputs": [], "missing": [], "seconds": dict.fromkeys(("push", "setup", "run", "collect", "total"), 0.0)}


@cli.command(short_help="What would be sent, and where: gpurun plan job.toml")
@click.argument("job", metavar="JOB.toml")
@_options("cluster", "node", "runs_dir", "json")
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
        _print(json.dumps(answer))
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
    _print("\n".join(lines))
    return 0


@cli.command(short_help="The runs of this folder, or one of them: gpurun status latest")
@click.argument("run_name", metavar="[RUN]", required=False)
@_options("runs_dir", "json")
def status(run_name: str | None, runs_dir: str | None, as_json: bool) -> int:
    """List the runs kept here, or show one (its id, the beginning of it, or `latest`). Asks no node.

    \b
    Example: gpurun status latest
    """
    from gpurun.records import all_runs, choose_runs_dir, find
    from gpurun.screen import Screen, printable
    where = choose_runs_dir(runs_dir, os.environ)
    if run_name is None:
        listed = all_runs(where)
        if as_json:
            for one in listed:
                _print(json.dumps(_status_object(one.folder, one.record, one.problem)))
            return 0
        if not listed:
            Screen("plain").say(f"no runs in {where} yet")
        for one in listed:
            record = one.record
            said = printable(record.reason if record else one.problem)
            if record and len(said) > REASON_COLUMNS:
                said = said[:REASON_COLUMNS - 1].rstrip() + "…"
            _print(f"{one.folder.run_id:<44} {said}" if record is None else
                   f"{record.run_id:<44} {record.state:<9} {_alive(one.folder, record):<22} {record.node.get('name', ''):<16} {said}".rstrip())
        return 0
    folder = find(where, run_name)
    record = folder.load()
    if as_json:
        _print(json.dumps(_status_object(folder, record, "")))
        return 0
    seconds = ", ".join(f"{name} {value:g} s" for name, value in record.seconds.items())
    rows = [("run", record.run_id), ("state", f"{record.state} {_alive(folder, record)}".strip()), ("reason", record.reason),
            ("exit code", "" if record.exit_code is None else str(record.exit_code)),
            ("node", f"{record.node.get('name', '')} ({record.node.get('kind', '')}, {record.path or 'not connected'})"),
            ("there", record.node_dir), ("created", record.times.get("created", "")), ("ended", record.times.get("ended", "")),
            ("seconds", seconds), ("outputs", ", ".join(record.outputs)), ("missing", ", ".join(record.missing)), ("folder", folder.path)]
    _print("\n".join(f"{name:<10} {value}" for name, value in rows if value))
    return 0


def _status_object(folder: Any, record: Any, problem: str) -> dict[str, Any]:
    if record is None:
        return {"type": "run", "run_id": folder.run_id, "problem": problem}
    return {"type": "run", "run_id": record.run_id, "state": record.state, "phase": record.phase, "exit_code": record.exit_code,
            "reason": record.reason, "node": record.node.get("name", ""), "driven": folder.driver() is not None, "times": record.times,
            "seconds": record.seconds, "bytes": record.bytes, "outputs": record.outputs, "missing": record.missing, "folder": folder.path,
            "node_dir": record.node_dir}


def _alive(folder: Any, record: Any) -> str:
    if record.state in ("COMPLETED", "FAILED"):
        return ""
    return record.phase if folder.driver() is not None else f"{record.phase} (no gpurun here drives it)".strip()


@cli.command(short_help="What a run printed: gpurun logs latest")
@click.argument("run_name", metavar="RUN")
@click.option("--setup", is_flag=True, help="The setup's output instead of the job's.")
@_options("runs_dir", "json")
def logs(run_name: str, setup: bool, runs_dir: str | None, as_json: bool) -> int:
    """Print a run's stdout to stdout and its stderr to stderr, as far as they are here.

    \b
    Example: gpurun logs latest | grep loss
    """
    from gpurun.records import choose_runs_dir, find
    from gpurun.screen import Screen
    folder = find(choose_runs_dir(runs_dir, os.environ), run_name)
    record = folder.load()
    screen = Screen("json" if as_json else "plain")
    parts = [(folder.setup, screen.setup_output if as_json else screen.job_stdout)] if setup else [
        (folder.stdout, screen.job_stdout), (folder.stderr, screen.job_stderr)]
    for path, show in parts:
        if os.path.exists(path):
            with open(path, "rb") as stream:
                while not screen.stdout_gone and (block := stream.read(1 << 20)):
                    show(block)
    if record.state not in ("COMPLETED", "FAILED"):
        screen.say(f"the run is {record.state} ({record.phase or 'not begun'}): this is what is here so far")
    screen.close()
    return 0


@cli.command(short_help="End a run's job: gpurun stop latest")
@click.argument("run_name", metavar="RUN")
@click.option("--cluster", metavar="FILE", help="The cluster file that the run was started with, where it isn't found by itself.")
@_options("runs_dir", "json", "quiet")
def stop(run_name: str, cluster: str | None, runs_dir: str | None, as_json: bool, quiet: bool) -> int:
    """End a run: its whole process tree on the node (TERM, 10 s, KILL). What exists of its outputs is collected.

    \b
    Example: gpurun stop latest
    """
    from gpurun.records import choose_runs_dir, find
    from gpurun.screen import Screen
    from gpurun.stopping import stop_run
    loaded_all()
    folder = find(choose_runs_dir(runs_dir, os.environ), run_name)
    screen = Screen.choose(json=as_json, quiet=quiet)

    def nodes_of(record: Any) -> tuple[Any, list[Any], LazyLink]:
        found, nodes = _cluster_of(record, cluster)
        return found, nodes, LazyLink(found)

    try:
        record = stop_run(folder, nodes_of, screen, _operator())
        folder.close()
        answer = _status_object(folder, record, "")
        screen.summary(dict(answer, outputs_dir=folder.outputs))
        screen.result(answer)
    finally:
        screen.close()
    return 0 if record.state in ("COMPLETED", "FAILED") or answer["driven"] else EXIT_STOPPED


@cli.command(short_help="Check this machine and the nodes: gpurun doctor")
@_options("cluster", "node", "json")
@click.argument("job", metavar="[JOB.toml]", required=False)
def doctor(cluster: str | None, node: str | None, as_json: bool, job: str | None) -> int:
    """Check Python, iroh, keys and SSH here, and what each node of the cluster answers. Starts nothing on a node.

    \b
    Example: gpurun doctor --cluster gpus.toml
    """
    from gpurun.doctor import checks
    found = _cluster(cluster, os.path.dirname(os.path.abspath(job)) if job else os.getcwd())
    worst = 0
    for check in checks(found, _nodes(found, node), LazyLink(found), STATUS_S, _operator()):
        if as_json:
            _print(json.dumps(dict(check, type="check")))
        else:
            _print(f"{'ok  ' if check['ok'] else 'FAIL' if check['ok'] is False else 'note'}  {check['name']}: {check['text']}")
        worst = 125 if check["ok"] is False else worst
    return worst


# ---- what several commands need ---------------------------------------------------------------------------------------------------

def loaded_all() -> None:
    """What lasts comes now: garbage is looked for again, and not among what was loaded."""
    import gc
    gc.freeze()
    gc.enable()


class LazyLink:
    """Makes this process's link when it is first needed: loading iroh takes a tenth of a second. Called from two threads."""

    def __init__(self, cluster: Any) -> None:
        import threading
        self._cluster, self._lock, self._link = cluster, threading.Lock(), None

    def __call__(self) -> Any:
        with self._lock:
            if self._link is None:
                from gpurun.link import Link, load_key
                from gpurun.paths import config_dir
                bind = "127.0.0.1:0" if self._cluster.kind == "local" else "0.0.0.0:0"
                self._link = Link(load_key(os.path.join(config_dir(), "key")), bind, relay=self._cluster.relay)
            return self._link


def _load(job: str, cluster: str | None, node: str | None) -> tuple[Any, Any, list[Any]]:
    from gpurun import config
    loaded = config.load_job(job, os.environ)
    if loaded.external_job is not None:
        raise config.error_at(job, ("external_job",), "is not in this version yet; run the job without the table [external_job]")
    if loaded.exclude:
        _check_exclude(job, loaded)
    found = _cluster(cluster, loaded.folder)
    return loaded, found, _nodes(found, node)


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


def _home() -> str:
    """The home folder, for a command that keeps something there: "" or a relative one would make folders in odd places."""
    home = os.path.expanduser("~") if os.environ.get("HOME", "/") else ""
    if not os.path.isabs(home):
        raise ConfigError(f"HOME is '{home}', which is not an absolute path, and gpurun keeps its key and more below it; "
                          "set HOME to your home folder.")
    return home


def _cluster(option: str | None, folder: str) -> Any:
    from gpurun import config
    return config.load_cluster(config.find_cluster(option, folder, os.environ, _home()))


def _nodes(cluster: Any, name: str | None) -> list[Any]:
    from gpurun import config, provider
    nodes = provider.nodes(cluster)
    if name is None:
        return nodes
    host = config.pick_host(cluster, name)
    return nodes if host is None else [one for one in nodes if one.name == host.text]


def _cluster_of(record: Any, option: str | None) -> tuple[Any, list[Any]]:
    """The cluster and node that a run was given."""
    _home()
    path = option or record.node.get("cluster")
    from gpurun import config
    cluster = config.load_cluster(path or None)
    return cluster, _nodes(cluster, record.node["name"])


def _operator() -> str:
    import pwd
    import socket
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] + (f" … ({len(lines)} lines)" if len(lines) > 1 else "") if lines else ""


def _print(text: str) -> None:
    """An answer, to stdout, at once. Whoever reads it may leave (`| head -1`): the command goes on to its own exit code, unheard."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)                                # what the stream still holds goes there too
        os.close(null)


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
