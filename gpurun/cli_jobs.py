"""The commands on async jobs: see cli.py. JOB_ID is the id in a manifest's name, or that of the job's run.

The three commands that a manifest holds are others' text. They are shown with everything escaped that could deceive a terminal, and one
of them is run only by `verify`, after a person has typed `yes` under it, or has given exactly its text to --confirm.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

import click

from gpurun.cli_shared import Command, loaded_all, operator_name, options, print_line, way_to
from gpurun.errors import EXIT_FAILED, ConfigError, GpurunError

COMMAND_FIELDS = ("submit_command", "verification_command", "resume_command")
UNTRUSTED = "untrusted: anybody who can write the manifest can write these. Look at one before you run it."
ANSWER_BYTES = 1024
LOOK_S = 0.1


def _cluster_option(function: Any) -> Any:
    return click.option("--cluster", metavar="FILE", help="The cluster file that has the job's node, if the one that it was submitted with is gone.")(function)


def _project(runs_dir: str | None) -> Any:
    from gpurun.asyncjobs import find_project
    from gpurun.records import choose_runs_dir
    return find_project(os.getcwd(), choose_runs_dir(runs_dir, os.environ))


# ---- poll ------------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="How async jobs are, a JSON line each: gpurun poll --all")
@click.argument("job_ids", metavar="[JOB_ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All jobs that have a manifest; the same as naming none.")
@_cluster_option
@options("runs_dir", "json")
def poll(job_ids: tuple[str, ...], everything: bool, cluster: str | None, runs_dir: str | None, as_json: bool) -> int:
    """Ask how jobs are, each node once, and keep it in their manifests. Nothing is submitted, stopped or fetched.

    What nobody can say is `unknown`, leaves the manifest as it is, and makes the exit code 125.

    \b
    Example: gpurun poll --all
    """
    from gpurun.polling import poll as ask
    from gpurun.screen import Screen
    if everything and job_ids:
        raise ConfigError("--all and job ids say two different things; give one of them")
    loaded_all()
    screen = Screen("quiet" if as_json else "plain")          # stdout has the answers in both
    try:
        rows, said = ask(_project(runs_dir), job_ids, way_to(cluster), screen, operator_name())
        for row in rows:
            print_line(json.dumps(row.object()))
        for text in said:
            screen.error(text)
        if not rows and not said:
            screen.say("no job has a manifest here: `gpurun submit JOB.toml --plan ID --phase N --verify CMD` makes one")
    finally:
        screen.close()
    return EXIT_FAILED if said or any(row.problem for row in rows) else 0


# ---- show ------------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="An async job's manifest, its commands escaped: gpurun show JOB_ID")
@click.argument("job_id", metavar="JOB_ID")
@options("runs_dir", "json")
def show(job_id: str, runs_dir: str | None, as_json: bool) -> int:
    """Show what the manifest of a job says. Asks nobody, runs nothing: its commands are untrusted text.

    \b
    Example: gpurun show train-20261130-101500-3f2a
    """
    from gpurun.asyncjobs import find
    found = find(_project(runs_dir), job_id)
    if as_json:
        print_line(json.dumps({"type": "manifest", "path": found.path, "untrusted": list(COMMAND_FIELDS), "manifest": json.loads(found.manifest.encode())}))
        return 0
    print_line("\n".join(_shown(found)))
    return 0


def _shown(found: Any) -> list[str]:
    from gpurun.external import FAILURES, own, printable
    from gpurun.polling import recovery
    manifest = found.manifest
    try:
        run = own(manifest)
        where = os.path.join(run.runs_dir, run.run_id) if run else "none: gpurun didn't submit it"
    except GpurunError as error:
        where = str(error)
    rows = [("job", manifest.job_id), ("plan", manifest.plan_id), ("phase", manifest.phase), ("backend", manifest.backend), ("status", manifest.status),
            ("submitted", manifest.submitted_at), ("details", json.dumps(manifest.terminal_details) if manifest.terminal_details else ""),
            *(("expects", path) for path in manifest.expected_artifacts), ("verified", _verified(manifest.more.get("verification"))), ("run", where),
            ("manifest", found.path)]
    lines = [f"{name:<22} {printable(value)}" for name, value in rows if value]
    lines += ["", UNTRUSTED] + [f"  {name:<20} {printable(getattr(manifest, name))}" for name in COMMAND_FIELDS]
    if manifest.status in FAILURES:
        lines += ["", "what can be done:"] + [f"  {line}" for line in recovery(manifest)]
    return lines


def _verified(value: Any) -> str:
    """The result that `verify` kept."""
    if not isinstance(value, dict):
        return ""
    if value.get("missing"):
        return f"no: {json.dumps(value['missing'])} didn't exist ({value.get('at')})"
    return f"{'yes' if value.get('exit_code') == 0 else 'no'}: exit code {value.get('exit_code')} ({value.get('at')})"


# ---- verify ----------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="Prove what an async job has made: gpurun verify JOB_ID")
@click.argument("job_id", metavar="JOB_ID")
@click.option("--confirm", metavar="TEXT", help="Run the verification command if it is exactly this. Else it is asked for on the terminal.")
@_cluster_option
@options("runs_dir", "json")
def verify(job_id: str, confirm: str | None, cluster: str | None, runs_dir: str | None, as_json: bool) -> int:
    """Bring home what a job has made, check that all that was expected is there, and run its verification command once you have confirmed it.

    The exit code is that of the command; of a job that failed, its own. Nothing is submitted again.

    \b
    Example: gpurun verify train-20261130-101500-3f2a
    """
    from gpurun import polling
    from gpurun.screen import Screen
    loaded_all()
    project, screen = _project(runs_dir), Screen.choose(json=as_json)
    try:
        row, verifying = polling.prepare(project, job_id, way_to(cluster), screen, operator_name())
        screen.close()
        if verifying is None:
            return _not_verified(row, screen, as_json)
        code = None
        if verifying.missing:
            screen.error(f"the job has ended well and did not make what was expected of it: {', '.join(map(json.dumps, verifying.missing))}. The verification "
                         "command was not run")
        else:
            _confirm(verifying, confirm, screen, as_json)
            screen.close()
            code = polling.run_command(verifying, row.object()["run_id"])
        manifest = polling.note_verified(project, verifying, code)
        answer = {"type": "verified", "job_id": manifest.job_id, "plan_id": manifest.plan_id, "manifest_status": manifest.status, "path": verifying.found.path,
                  **manifest.more["verification"], "outputs_dir": verifying.outputs, "artifact_dir": verifying.link}
        print_line(json.dumps(answer) if as_json else _result(answer))
        return EXIT_FAILED if code is None else code
    finally:
        screen.close()


def _result(answer: dict[str, Any]) -> str:
    from gpurun.external import printable
    job = printable(answer["job_id"])
    if answer["exit_code"] is None:
        return f"{job}: not verified, {len(answer['missing'])} of what was expected is missing"
    return f"{job}: " + ("verified; its plan can be closed" if answer["exit_code"] == 0 else f"not verified, the command exited {answer['exit_code']}")


def _not_verified(row: Any, screen: Any, as_json: bool) -> int:
    """Of a job that isn't over, or that failed."""
    from gpurun.external import printable
    from gpurun.polling import exit_code_of, recovery
    manifest = row.found.manifest
    if row.problem or manifest.waiting:
        raise GpurunError(f"job {printable(manifest.job_id)} can't be verified: " + (row.problem or f"it isn't over ({manifest.status}: {row.backend_state}). "
                          f"`gpurun wait {row.object()['run_id']}` waits for it"))
    if as_json:
        print_line(json.dumps(row.object()))
    else:
        print_line("\n".join([f"{printable(manifest.job_id)}: {manifest.status}; {printable(json.dumps(manifest.terminal_details))}", "what can be done:",
                              *(f"  {line}" for line in recovery(manifest))]))
    return exit_code_of(manifest)


def _confirm(verifying: Any, confirmed: str | None, screen: Any, as_json: bool) -> None:
    """Shows the command; returns if it may be run. ConfigError where nobody can be asked."""
    from gpurun.external import printable
    from gpurun.polling import Refused, check_command
    shown = printable(verifying.command)
    sure = check_command(verifying, confirmed)
    lines = [f"all that was expected of job {printable(verifying.found.manifest.job_id)} is in {verifying.outputs}: "
             + ", ".join(map(printable, verifying.artifacts)),
             f"its manifest, which others can write, asks for this command ($GPURUN_OUTPUTS is that folder; it would run in {verifying.folder})"
             + (", written here as bash would since it has letters that can't be seen:" if shown != verifying.command else ":"), f"    {shown}"]
    for line in lines:
        screen.say(line)
    if sure:
        return
    if as_json or not (os.isatty(0) and os.isatty(2)):
        raise ConfigError(f"nobody can be asked here, so nothing was run. To run it, give exactly this text to --confirm: {shown}")
    screen.close()
    if not _typed_yes():
        raise Refused("it was not confirmed, so nothing was run and nothing was noted")


def _typed_yes() -> bool:
    """Whether a person types the word, after the question has come: what was typed before it answers something else."""
    import termios
    termios.tcflush(0, termios.TCIFLUSH)
    sys.stderr.write("type yes to run it: ")
    sys.stderr.flush()
    answer, more = b"", b"-"
    while more and not answer.endswith(b"\n") and len(answer) < ANSWER_BYTES:
        while not select.select([0], [], [], LOOK_S)[0]:
            pass                              # a Ctrl-C that comes right before a read would wait as long as that does
        more = os.read(0, ANSWER_BYTES)
        answer += more
    return answer.strip() == b"yes"


COMMANDS = (poll, show, verify)
