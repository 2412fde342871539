"""The commands on runs that exist: see cli.py. RUN is a whole id, the beginning of just one, `latest`, or the path of a run's folder."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from gpurun.cli_shared import Command, Time, loaded_all, operator_name, options, print_line, status_object, way_to
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_TIME_LIMIT, ConfigError, GpurunError

REASON_COLUMNS = 100   # of a reason in the list of runs; `gpurun status RUN` has all of it
GRACE_S = 10.0         # between TERM and KILL


def _run_option(function: Any) -> Any:
    """Of a command that may have to reach a run's node."""
    return click.option("--cluster", metavar="FILE", help="The cluster file that has the run's node, if the one that it was started with is gone.")(function)


def _find(runs_dir: str | None, name: str) -> Any:
    from gpurun.records import choose_runs_dir, find
    return find(choose_runs_dir(runs_dir, os.environ), name)


def _find_all(runs_dir: str | None, names: tuple[str, ...]) -> list[Any]:
    """Each once, in the order given; or an error before anything is begun."""
    folders = [_find(runs_dir, name) for name in names]
    return list({folder.path: folder for folder in folders}.values())


def _end(screen: Any, result: dict[str, Any], left: list[str]) -> int:
    """The last words of a run that was watched to its end; `left`: of machines that couldn't be ended."""
    screen.summary(result)
    for line in left:
        screen.error(line)
    code = EXIT_FAILED if left else int(result["exit_code"])
    screen.result({key: value for key, value in dict(result, exit_code=code).items() if key != "bytes"})
    screen.close()
    return code


def _end_machine(folder: Any, cluster: str | None, screen: Any) -> list[str]:
    """Of a run that rented a machine to go with it, and that is over and home now: that machine. Words for what couldn't be ended."""
    if not folder.load().rented:
        return []
    from gpurun.renting import end_with
    return end_with(folder, way_to(cluster), screen, operator_name())


# ---- status ------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="The runs of this folder, or one of them: gpurun status latest")
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--refresh", is_flag=True, help="Ask the nodes of the runs that aren't over, each node once.")
@_run_option
@options("runs_dir", "json")
def status(run_name: str | None, refresh: bool, cluster: str | None, runs_dir: str | None, as_json: bool) -> int:
    """List the runs kept here, newest first, or show one. Asks no node unless you say --refresh.

    \b
    Example: gpurun status latest
    """
    from gpurun.records import Listed, all_runs, choose_runs_dir
    from gpurun.screen import Screen
    where = choose_runs_dir(runs_dir, os.environ)
    folder = _find(runs_dir, run_name) if run_name is not None else None
    listed = all_runs(where) if folder is None else [Listed(folder, folder.load(), "")]
    if refresh:
        from gpurun.housekeeping import refresh as ask
        ask(listed, way_to(cluster), operator_name(), Screen("plain").warn)
    if as_json:
        for one in listed:
            print_line(json.dumps(status_object(one.folder, one.record, one.problem)))
    elif folder is not None:
        _show_one(folder, listed[0].record)
    elif not listed:
        Screen("plain").say(f"no runs in {where} yet")
    else:
        print_line("\n".join(map(_row, listed)))
    return 0


def _row(one: Any) -> str:
    from gpurun.screen import printable
    record = one.record
    if record is None:
        return f"{one.folder.run_id:<44} {printable(one.problem)}"
    said = printable(record.reason or _seen(record) or _slurm(record.backend))
    if len(said) > REASON_COLUMNS:
        said = said[:REASON_COLUMNS - 1].rstrip() + "…"
    return f"{record.run_id:<44} {record.state:<9} {_alive(one.folder, record):<22} {record.node.get('name', ''):<16} {said}".rstrip()


def _show_one(folder: Any, record: Any) -> None:
    from gpurun.limits import dollars
    seconds = ", ".join(f"{name} {value:g} s" for name, value in record.seconds.items())
    rows = [("run", record.run_id), ("state", f"{record.state} {_alive(folder, record)}".strip()), ("reason", record.reason),
            ("exit code", "" if record.exit_code is None else str(record.exit_code)), ("the node", _seen(record)), ("slurm", _slurm(record.backend)),
            ("node", f"{record.node.get('name', '')} ({record.node.get('kind', '')}, {record.path or 'not connected'})"),
            ("there", record.node_dir), ("created", record.times.get("created", "")), ("ended", record.times.get("ended", "")),
            ("cost", f"about {dollars(record.cost)}" if record.rented else ""), ("seconds", seconds), ("outputs", ", ".join(record.outputs)),
            ("missing", ", ".join(record.missing)), ("folder", folder.path)]
    print_line("\n".join(f"{name:<10} {value}" for name, value in rows if value))


def _alive(folder: Any, record: Any) -> str:
    if record.state in ("COMPLETED", "FAILED"):
        return ""
    if folder.driver() is not None:
        return record.phase
    return "detached" if record.detached else f"{record.phase} (no gpurun here drives it)".strip()


def _seen(record: Any) -> str:
    """What the node said when it was last asked, of a run whose record doesn't say more."""
    from gpurun.screen import duration
    seen = record.seen
    if not seen or record.state in ("COMPLETED", "FAILED") and seen.get("at", "") < record.times.get("ended", ""):
        return ""
    phase, seconds = seen.get("phase"), seen.get("seconds")
    since = f" for {duration(seconds, whole=True)}" if isinstance(seconds, (int, float)) else ""
    if phase == "ended":
        code = seen.get("code")
        how = "ended" + (f" with exit code {code}" if isinstance(code, int) else "") + (f": {seen['reason']}" if seen.get("reason") else "")
        how = f"stopped, {seen['limit']}" if seen.get("limit") else how
        how += "" if seen.get("collected") else "; what it made is still there: gpurun fetch"
    elif phase == "queued":
        how = f"waits there behind {seen.get('ahead', 'others')}"
    elif phase == "unknown":
        how = "its node doesn't have it (any more)"
    else:
        how = f"{phase}{since}"
        if isinstance(seen.get("backend"), dict) and phase == "run":
            how = _slurm(seen["backend"])
        if isinstance(seen.get("watch"), dict) and seen["watch"].get("told"):
            how += f"; {seen['watch']['told']}"
    return f"{how}{_ago(seen.get('at', ''))}"


def _slurm(backend: Any) -> str:
    """What Slurm said of a run's job."""
    if not backend or not backend.get("job_id"):
        return ""
    why = f" ({backend['reason']})" if backend.get("reason") not in (None, "", "None") else ""
    return f"job {backend['job_id']}, {backend.get('state') or 'submitted'}{why}" + (f" on {backend['nodes']}" if backend.get("nodes") else "")


def _ago(at: str) -> str:
    """How old a time of this machine's own clock is."""
    from datetime import datetime, timezone
    from gpurun.screen import duration
    try:
        seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(at.replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError, AttributeError):
        return ""
    return f" (asked {duration(seconds, whole=True)} ago)"


# ---- logs --------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="What a run has printed so far: gpurun logs latest")
@click.argument("run_name", metavar="RUN")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@click.option("--tail", metavar="N", type=click.IntRange(min=0), help="Only the last N lines of each log, and what comes then.")
@click.option("--setup", is_flag=True, help="The setup's output instead of the job's.")
@_run_option
@options("runs_dir", "json")
def logs(run_name: str, follow: bool, tail: int | None, setup: bool, cluster: str | None, runs_dir: str | None, as_json: bool) -> int:
    """Print a run's stdout to stdout and its stderr to stderr. What isn't here yet is asked of the node. Reading stops nothing.

    \b
    Example: gpurun logs latest | grep loss
    """
    from gpurun.attaching import Reading
    from gpurun.screen import Screen
    loaded_all()
    folder = _find(runs_dir, run_name)
    folder.load()
    screen = Screen("json" if as_json else "plain")
    streams = {"setup.out": screen.setup_output if as_json else screen.job_stdout, "setup.err": screen.setup_output if as_json else screen.job_stderr,
               "run.out": screen.job_stdout, "run.err": screen.job_stderr}
    try:
        reading = Reading(folder, ("setup.out", "setup.err") if setup else ("run.out", "run.err"), lambda name, data: streams[name](data),
                          way_to(cluster), screen, operator_name())
        (reading.follow if follow else reading.read)(tail)
        record = folder.load()
        if not record.node.get("agent_id") and not record.node_dir:
            screen.say(f"{record.run_id} never came to a node, so it has printed nothing")
        if not follow and record.state not in ("COMPLETED", "FAILED"):
            screen.say(f"{record.run_id} isn't over: this is what there is so far")
    finally:
        screen.close()
    return EXIT_FAILED if screen.stdout_failed else 0


# ---- attach, wait ------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="Back to a run, as if you had never left: gpurun attach latest")
@click.argument("run_name", metavar="RUN")
@click.option("--tail", metavar="N", type=click.IntRange(min=0), help="Of what it printed so far only the last N lines of each log.")
@click.option("--since-here", is_flag=True, help="Of what it printed so far nothing: only what comes.")
@_run_option
@options("runs_dir", "json", "quiet")
def attach(run_name: str, tail: int | None, since_here: bool, cluster: str | None, runs_dir: str | None, as_json: bool, quiet: bool) -> int:
    """Show a run's logs from the beginning and go on with them, then bring its outputs home. The exit code is the job's own.

    Ctrl-C asks what to do on a terminal (stop, detach, go on); elsewhere it stops the run.

    \b
    Example: gpurun attach latest --tail 20
    """
    if since_here and tail is not None:
        raise ConfigError("--tail and --since-here say two different things; give one of them")
    from gpurun.attaching import attach as watch
    from gpurun.screen import Screen
    loaded_all()
    folder = _find(runs_dir, run_name)
    screen = Screen.choose(json=as_json, quiet=quiet)
    try:
        result = watch(folder, way_to(cluster), screen, operator_name(), 0 if since_here else tail)
        return _end(screen, result, _end_machine(folder, cluster, screen))
    finally:
        screen.close()


@click.command(cls=Command, short_help="Until runs have ended and their outputs are home: gpurun wait latest")
@click.argument("run_names", metavar="RUN...", nargs=-1, required=True)
@click.option("--timeout", metavar="TIME", type=Time(), help="At most so long (90, 90s, 10m, 2h), then exit code 124. The runs go on.")
@_run_option
@options("runs_dir", "json", "quiet")
def wait(run_names: tuple[str, ...], timeout: float | None, cluster: str | None, runs_dir: str | None, as_json: bool, quiet: bool) -> int:
    """Wait for one run after the other; a line on stdout for each that has ended. Ctrl-C ends the waiting and nothing else.

    The exit code is 0 if all of theirs are, else the first that isn't, in the order given.

    \b
    Example: gpurun wait latest --timeout 2h
    """
    from gpurun.attaching import wait as wait_for
    from gpurun.screen import Screen
    loaded_all()
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    screen, worst = Screen.choose(json=as_json, quiet=quiet), 0
    try:
        for folder in _find_all(runs_dir, run_names):
            try:
                result = wait_for(folder, way_to(cluster), screen, operator_name(), deadline)
            except GpurunError as error:
                screen.error(f"{folder.run_id}: {error}")
                worst = worst or error.exit_code
                continue
            code = int(result["exit_code"])
            if result["state"] in ("COMPLETED", "FAILED"):
                screen.phase("")
                print_line(json.dumps(status_object(folder, folder.load(), "")) if as_json else
                           f"{folder.run_id:<44} {result['state']:<9} exit code {code}" + (f": {result['reason']}" if code else ""))
                worst = worst or code
                for line in _end_machine(folder, cluster, screen):
                    screen.error(line)
                    worst = EXIT_FAILED
            elif code == EXIT_TIME_LIMIT:
                worst = code
            else:
                return code                    # a signal
    finally:
        screen.close()
    return worst


# ---- fetch -------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="What a run has made, also while it runs: gpurun fetch latest model.pt")
@click.argument("run_name", metavar="RUN")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--to", metavar="DIR", help="Where to, instead of the run's folder `outputs`.")
@_run_option
@options("runs_dir", "json", "quiet")
def fetch(run_name: str, paths: tuple[str, ...], to: str | None, cluster: str | None, runs_dir: str | None, as_json: bool, quiet: bool) -> int:
    """Bring a run's outputs, or any PATH below its workdir (`.` is all of it); stdout names each that is here now.

    Of a run that still works, failed, was stopped or lost as well, as long as its node has it.

    \b
    Example: gpurun fetch latest checkpoints/last.pt --to /tmp
    """
    from gpurun.fetching import fetch as bring
    from gpurun.screen import Screen
    if to is not None and not to.strip():
        raise ConfigError("--to is empty; name a folder, or leave it out")
    if to is not None and os.path.exists(to) and not os.path.isdir(to):
        raise ConfigError(f"--to {to} is a file; name a folder, or one that is to be made")
    loaded_all()
    folder = _find(runs_dir, run_name)
    screen = Screen.choose(json=as_json, quiet=quiet)
    try:
        outcome = bring(folder, paths, os.path.abspath(to) if to else "", way_to(cluster), screen, operator_name())
        screen.close()
        for one in outcome.fetched:
            print_line(json.dumps({"type": "fetched", "path": one.path, "files": one.files, "bytes": one.size_bytes, "to": one.to}) if as_json
                       else _near(one.to))
        for text in outcome.failed:
            screen.error(text)
    finally:
        screen.close()
    return EXIT_FAILED if outcome.failed else 0


def _near(path: str) -> str:
    """As one would type it from here."""
    here = os.path.join(os.getcwd(), "")
    return path[len(here):] if path.startswith(here) else path


# ---- stop, rm ----------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="End a run's job: gpurun stop latest")
@click.argument("run_name", metavar="RUN")
@click.option("--grace", metavar="SECONDS", type=click.FloatRange(min=0, max=3600), default=GRACE_S, show_default=True,
              help="Between TERM and KILL.")
@_run_option
@options("runs_dir", "json", "quiet")
def stop(run_name: str, grace: float, cluster: str | None, runs_dir: str | None, as_json: bool, quiet: bool) -> int:
    """End a run: its whole process tree on the node (TERM, some seconds, KILL). What exists of its outputs is collected.

    \b
    Example: gpurun stop latest
    """
    from gpurun.screen import Screen
    from gpurun.stopping import stop_run
    loaded_all()
    folder = _find(runs_dir, run_name)
    screen = Screen.choose(json=as_json, quiet=quiet)
    try:
        record = stop_run(folder, way_to(cluster), screen, operator_name(), grace)
        folder.close()
        left = _end_machine(folder, cluster, screen)
        if record.rented:
            record = folder.load()            # with what it has cost
        answer = status_object(folder, record, "")
        screen.summary(dict(answer, outputs_dir=folder.outputs))
        for line in left:
            screen.error(line)
        screen.result(answer)
    finally:
        screen.close()
    if left:
        return EXIT_FAILED
    return 0 if record.state in ("COMPLETED", "FAILED") or answer["driven"] else EXIT_STOPPED


@click.command(cls=Command, short_help="Remove runs, here and on their nodes: gpurun rm latest")
@click.argument("run_names", metavar="RUN...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also what isn't home yet.")
@click.option("--here", "only_here", is_flag=True, help="Only the folder here: for a node that is gone.")
@_run_option
@options("runs_dir", "json", "quiet")
def rm(run_names: tuple[str, ...], force: bool, only_here: bool, cluster: str | None, runs_dir: str | None, as_json: bool, quiet: bool) -> int:
    """Remove runs that have ended: their records, logs and outputs here, their folders on the node. What runs is never removed.

    \b
    Example: gpurun rm latest
    """
    from gpurun.housekeeping import remove
    from gpurun.screen import Screen
    loaded_all()
    screen, worst = Screen.choose(json=as_json, quiet=quiet), 0
    try:
        for folder in _find_all(runs_dir, run_names):
            try:
                remove(folder, way_to(cluster), screen, operator_name(), force, only_here)
            except GpurunError as error:
                screen.error(str(error))
                worst = worst or error.exit_code
                continue
            if as_json:
                print_line(json.dumps({"type": "removed", "run_id": folder.run_id}))
            else:
                screen.say(f"removed {folder.run_id}" + (" here; what its node has of it stays there" if only_here else ""))
    finally:
        screen.close()
    return worst


COMMANDS = (status, attach, wait, logs, fetch, stop, rm)
