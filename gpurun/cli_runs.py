"""The commands on runs that exist: see cli.py. Each takes RUN: a whole id, the beginning of just one, `latest`, or the path of its folder."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from gpurun.cli_shared import Command, loaded_all, operator_name, options, print_line, status_object, way_to
from gpurun.errors import EXIT_STOPPED

REASON_COLUMNS = 100   # of a reason in the list of runs; `gpurun status RUN` has all of it


@click.command(cls=Command, short_help="The runs of this folder, or one of them: gpurun status latest")
@click.argument("run_name", metavar="[RUN]", required=False)
@options("runs_dir", "json")
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
                print_line(json.dumps(status_object(one.folder, one.record, one.problem)))
            return 0
        if not listed:
            Screen("plain").say(f"no runs in {where} yet")
        for one in listed:
            record = one.record
            said = printable(record.reason if record else one.problem)
            if record and len(said) > REASON_COLUMNS:
                said = said[:REASON_COLUMNS - 1].rstrip() + "…"
            print_line(f"{one.folder.run_id:<44} {said}" if record is None else
                   f"{record.run_id:<44} {record.state:<9} {_alive(one.folder, record):<22} {record.node.get('name', ''):<16} {said}".rstrip())
        return 0
    folder = find(where, run_name)
    record = folder.load()
    if as_json:
        print_line(json.dumps(status_object(folder, record, "")))
        return 0
    seconds = ", ".join(f"{name} {value:g} s" for name, value in record.seconds.items())
    rows = [("run", record.run_id), ("state", f"{record.state} {_alive(folder, record)}".strip()), ("reason", record.reason),
            ("exit code", "" if record.exit_code is None else str(record.exit_code)),
            ("node", f"{record.node.get('name', '')} ({record.node.get('kind', '')}, {record.path or 'not connected'})"),
            ("there", record.node_dir), ("created", record.times.get("created", "")), ("ended", record.times.get("ended", "")),
            ("seconds", seconds), ("outputs", ", ".join(record.outputs)), ("missing", ", ".join(record.missing)), ("folder", folder.path)]
    print_line("\n".join(f"{name:<10} {value}" for name, value in rows if value))
    return 0


def _alive(folder: Any, record: Any) -> str:
    if record.state in ("COMPLETED", "FAILED"):
        return ""
    return record.phase if folder.driver() is not None else f"{record.phase} (no gpurun here drives it)".strip()


@click.command(cls=Command, short_help="What a run printed: gpurun logs latest")
@click.argument("run_name", metavar="RUN")
@click.option("--setup", is_flag=True, help="The setup's output instead of the job's.")
@options("runs_dir", "json")
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


@click.command(cls=Command, short_help="End a run's job: gpurun stop latest")
@click.argument("run_name", metavar="RUN")
@click.option("--cluster", metavar="FILE", help="The cluster file that the run was started with, where it isn't found by itself.")
@options("runs_dir", "json", "quiet")
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

    try:
        record = stop_run(folder, way_to(cluster), screen, operator_name())
        folder.close()
        answer = status_object(folder, record, "")
        screen.summary(dict(answer, outputs_dir=folder.outputs))
        screen.result(answer)
    finally:
        screen.close()
    return 0 if record.state in ("COMPLETED", "FAILED") or answer["driven"] else EXIT_STOPPED


COMMANDS = (status, logs, stop)
