"""kill -9 at every point of a run's life, of every process that has a part in it, and a reboot of the node: the next command ends with the truth.

Each cell of the matrix brings a real run to a point, kills, and asks for the exit code, every byte of the logs once, the outputs whole, the
record, no process left and no half-written file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any, Callable

import pytest
from conftest import Here, eventually

from gpurun import supervise
from gpurun.files import TEMP_PREFIX

CODE = 7
BIG = 40 << 20                # takes long enough to be killed in the middle of it, here
LINES = "".join(f"{number}\n" for number in range(200))
COUNT = "for i in $(seq 0 99); do echo $i; echo $i >&2; done"
MORE = "for i in $(seq 100 199); do echo $i; echo $i >&2; done"


class Cell:
    """One run, brought to a point."""

    def __init__(self, here: Here, point: str) -> None:
        self.here, self.point = here, point
        self.go, self.halfway = here.folder / "go", here.folder / "halfway"
        for path in (self.go, self.halfway):
            path.unlink(missing_ok=True)
        self.holder: Any = None
        if point == "queue":
            self.holder = here.start(here.job(self.until_go("echo up"), name="holder"))
            eventually(lambda: self.holder.stdout.readline() == b"up\n")
        folder = here.work / "crash"
        waits = {"setup": [point == "setup", False], "run": [False, point == "run"]}.get(point, [False, False])
        setup = self.until_go("echo set") if waits[0] else "echo set"
        middle = self.until_go(f"touch '{self.halfway}'") if waits[1] else ":"
        job = here.job(f"{COUNT}; echo half > o; cat big > copy; {middle}; {MORE}; echo whole > o; echo ran >> ran; exit {CODE}", name="crash",
                       folder=folder, setup=f"{setup}; echo up >> set-up", workspace={"workdir": ".", "exclude": ["/go"]},
                       outputs=["o", "ran", "set-up", "copy"])
        with open(folder / "big", "wb") as stream:
            stream.truncate(BIG if point in ("push", "collect") else 1000)
            stream.seek(0)
            stream.write(os.urandom(BIG) if point == "push" else b"x")        # or the node would have it from an earlier cell
        self.process = here.start(job, *(["--wait"] if self.holder else []), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.run = eventually(lambda: next(iter(here.runs.glob("crash-*")), None))
        self.run_id = self.run.name
        self.there = here.node_dir / "runs" / self.run_id
        eventually(self.reached, 60)
        if point == "push":                   # it goes on once something was killed: a quick machine would be at the job by then
            self.process.send_signal(signal.SIGSTOP)
            if self.state()["supervised"]:
                self.process.kill()
                raise AssertionError("the push was over already")

    def until_go(self, text: str) -> str:
        return f"{text}; while [ ! -e '{self.go}' ]; do sleep 0.02; done"

    def record(self) -> dict[str, Any]:
        return json.loads((self.run / "run.json").read_text())

    def state(self) -> dict[str, Any]:
        return json.loads((self.there / "state.json").read_text())

    def reached(self) -> bool:
        try:
            phase = self.record()["phase"]
            return {"push": lambda: phase == "workspace" and any((self.here.node_dir / "cache").rglob("*")),
                    "queue": lambda: self.there.exists() and (self.there / "state.json").exists(),
                    "setup": lambda: (self.there / "setup.out").read_bytes() == b"set\n",
                    "run": lambda: phase == "run" and self.halfway.exists() and (self.there / "run.err").read_text().endswith("\n99\n"),
                    "collect": lambda: phase == "collect"}[self.point]()
        except FileNotFoundError:
            return False

    # ---- what is killed ------------------------------------------------------------------------------------------------------

    def kill_orchestrator(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_agent(self) -> None:
        kill(self.here.agent()["pid"])

    def kill_supervisor(self) -> None:
        supervised = self.state()["supervised"]
        if supervised:
            kill(supervised["pid"])

    def kill_both(self) -> None:
        self.kill_orchestrator()
        self.kill_agent()

    def kill_all(self) -> None:
        self.kill_orchestrator()
        self.kill_agent()
        self.kill_supervisor()

    def kill_agent_and_supervisor(self) -> None:
        self.kill_agent()
        self.kill_supervisor()

    def reboot(self) -> None:
        """Of the node: nothing of it lives, its disk is as it is, and its kernel has another boot id."""
        self.kill_all()
        for pid in supervise.of_run(self.run_id) | (supervise.of_run(self.holder_id) if self.holder else set()):
            kill(pid)
        state = self.state()
        if state["supervised"]:
            state["supervised"]["boot"] = "11111111-2222-3333-4444-555555555555"
            (self.there / "state.json").write_text(json.dumps(state))

    @property
    def holder_id(self) -> str:
        return next(self.here.runs.glob("holder-*")).name

    # ---- what is asked for -----------------------------------------------------------------------------------------------------

    def end(self, goes_on: bool) -> int:
        """Lets a job that lives go on, and the next command pick the run up if gpurun is gone; the exit code."""
        if goes_on:
            self.go.touch()
        self.process.send_signal(signal.SIGCONT)
        if self.process.poll() is None:
            return self.process.wait(120)
        return self.here.gpurun("attach", self.run_id).returncode

    def check(self, code: int, reason: str, lines: str, outputs: dict[str, str]) -> None:
        assert self.end(code == CODE) == code
        record = self.record()
        assert (record["state"], record["exit_code"]) == ("FAILED", code) and reason in record["reason"], record["reason"]
        assert record["logs_complete"]
        for name in ("stdout.log", "stderr.log"):
            path = self.run / name
            kept = path.read_text() if path.exists() else ""
            if code != CODE and name == "stderr.log":
                kept = kept[:len(lines)]      # a shell that is ended may say so behind them
            assert kept == lines
        assert (self.run / "setup-stdout.log").read_text() == "set\n"
        assert record["outputs"] == sorted(outputs, key=["o", "ran", "set-up", "copy"].index)
        for name, content in outputs.items():
            if name == "copy":
                assert (self.run / "outputs/copy").read_bytes() == (self.here.work / "crash/big").read_bytes()
            else:
                assert (self.run / "outputs" / name).read_text() == content
        eventually(lambda: not supervise.of_run(self.run_id))
        eventually(lambda: self.state()["over"])
        self.go.touch()
        eventually(lambda: not [path for where in (self.run, self.there) for path in where.rglob("*")
                                if path.name.startswith((TEMP_PREFIX, ".incoming-")) or path.name.endswith(".next")])
        assert self.here.gpurun("attach", self.run_id).returncode == code      # and it stays that way
        assert self.here.gpurun(self.here.job("echo free", name="free")).stdout == b"free\n"   # the node is the next one's


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


WHOLE = {"o": "whole\n", "ran": "ran\n", "set-up": "up\n", "copy": ""}
AS_IF_NOTHING = (CODE, f"exited {CODE}", LINES, WHOLE)
IN_THE_SETUP = (125, "{} how the setup ended isn't known", "", {})
IN_THE_RUN = (125, "how the run ended isn't known", "".join(f"{number}\n" for number in range(100)), {"o": "half\n", "set-up": "up\n", "copy": ""})
POINTS = ("queue", "push", "setup", "run", "collect")
KILLS: dict[str, Callable[[Cell], None]] = {
    "orchestrator": Cell.kill_orchestrator, "agent": Cell.kill_agent, "supervisor": Cell.kill_supervisor, "both ends": Cell.kill_both,
    "agent and supervisor": Cell.kill_agent_and_supervisor, "all three": Cell.kill_all, "reboot": Cell.reboot}


@pytest.mark.parametrize("what", KILLS)
@pytest.mark.parametrize("point", POINTS)
def test_what_is_killed_and_when_changes_nothing_that_can_be_known(here, point, what):
    cell = Cell(here, point)
    try:
        KILLS[what](cell)
        if point not in ("setup", "run") or what in ("orchestrator", "agent", "both ends"):
            cell.check(*AS_IF_NOTHING)
        elif what == "reboot":
            phase = {"setup": "setup", "run": "job"}[point]
            lines, outputs = ("", {}) if point == "setup" else IN_THE_RUN[2:]
            cell.check(125, f"the node restarted while the {phase} ran: no exit status", lines, outputs)
        else:
            code, _, lines, outputs = IN_THE_SETUP if point == "setup" else IN_THE_RUN
            cell.check(code, "no exit record", lines, outputs)
    finally:
        cell.go.touch()
        for process in (cell.process, cell.holder):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for run in (here.node_dir / "runs").glob("*"):
            for pid in supervise.of_run(run.name):
                kill(pid)


# ---- gpurun itself, at each of its steps ---------------------------------------------------------------------------------------------

KILLED_AT = """
import itertools, os, signal, sys
from gpurun import {module}
whole, calls, last = {module}.{cls}.{method}, itertools.count(1), int(sys.argv.pop(1))

def cut(*args, **options):
    mine = next(calls)                   # several threads write: each call has a number of its own
    if mine == last and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    value = whole(*args, **options)
    if mine == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return value

{module}.{cls}.{method} = cut
from gpurun.cli import main
main()
"""


DEAF = """
from gpurun import landing, orchestrator

class Dead(landing.Channel):
    "A connection that died after the last thing that came: what is said over it is heard nowhere, and nobody knows that yet."
    said = 0

    def say(self, **fields):
        Dead.said += "collected" in fields
        if Dead.said != 1:
            super().say(**fields)

    def finish(self):
        if Dead.said != 1:
            super().finish()

    def leave(self):
        pass

landing.Channel, orchestrator.AGAIN_S = Dead, 0.5
from gpurun.cli import main
main()
"""


def test_outputs_that_are_home_end_the_run_though_the_connection_they_came_over_died_before_our_word_for_it(warm):
    job = warm.job("echo some > o; exit 7", name="deaf", outputs=["o"])
    done = subprocess.run([sys.executable, "-c", DEAF, str(job)], cwd=warm.work, env=warm.env, capture_output=True, timeout=120)
    assert done.returncode == 7 and warm.record()["fsm"]["collected"] and (warm.latest / "outputs/o").read_text() == "some\n", done.stderr


MUTE = """
from gpurun import landing, orchestrator
from gpurun.errors import LinkTimeoutError

class Mute(landing.Channel):
    "A connection over which nothing comes any more, and that is as far as anybody knows."
    connections = set()

    def answer(self):
        Mute.connections.add(self.stream.connection)
        if len(Mute.connections) == 1:
            raise LinkTimeoutError("nothing from node for 40 s")
        return super().answer()

landing.Channel, orchestrator.AGAIN_S = Mute, 0.0
from gpurun.cli import main
main()
"""


def test_a_transfer_over_a_connection_on_which_nothing_comes_goes_on_over_another(warm):
    job = warm.job("echo some > o; exit 7", name="mute", outputs=["o"])
    done = subprocess.run([sys.executable, "-c", MUTE, str(job)], cwd=warm.work, env=warm.env, capture_output=True, timeout=60)
    assert done.returncode == 7 and (warm.latest / "outputs/o").read_text() == "some\n", done.stderr
    assert b"nothing from node for 40 s" in done.stderr and b"is back" in done.stderr, done.stderr


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("module, cls, method", [("records", "RunFolder", "save"), ("link", "Stream", "write")])
def test_a_gpurun_that_is_killed_at_any_of_its_steps_is_gone_on_with(warm, module, cls, method, before):
    """At each save of the record, and at each thing that it says to the node: the first, the second, … until one run ends untouched."""
    folder = warm.work / f"steps-{method}-{before}"
    job = warm.job(f"cat in; echo err >&2; echo ran >> ran; exit {CODE}", name="steps", folder=folder, setup="echo up", workspace={"workdir": "."},
                   outputs=["ran", "in"])
    (folder / "in").write_bytes(os.urandom(200_000))
    script = KILLED_AT.format(module=module, cls=cls, method=method, before=before)
    for step in range(1, 100):
        known = set(warm.runs.glob("steps-*"))
        argv = [sys.executable, "-c", script, str(step), str(job)]
        done = subprocess.run(argv, cwd=warm.work, env=warm.env, capture_output=True, timeout=120)
        if done.returncode != -signal.SIGKILL:
            assert done.returncode == CODE and step > 4, done.stderr
            return
        run = next((path for path in warm.runs.glob("steps-*") if path not in known and (path / "run.json").exists()), None)
        if run is None:
            continue                          # nothing was promised yet
        before_node = not json.loads((run / "run.json").read_text())["node"].get("agent_id")
        code = warm.gpurun("attach", run.name).returncode
        record = json.loads((run / "run.json").read_text())
        told = (step, record["reason"])
        if code == 125 and (before_node or "never came to" in record["reason"]):
            assert record["state"] == "FAILED" and "Nothing was run" in record["reason"], told
            continue
        assert (code, record["state"], record["exit_code"], record["reason"]) == (CODE, "FAILED", CODE, f"exited {CODE}"), told
        assert record["outputs"] == ["ran", "in"] and (run / "outputs/ran").read_text() == "ran\n", told
        assert (run / "stdout.log").read_bytes() == (folder / "in").read_bytes() == (run / "outputs/in").read_bytes(), told
        assert (run / "stderr.log").read_text() == "err\n" and (run / "setup-stdout.log").read_text() == "up\n", told
    raise AssertionError("no run ended by itself")
