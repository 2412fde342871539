"""Runs that last: clocks that are wrong or jump, many at once, other versions, long waits, and what of old runs stays on the node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here, eventually

import gpurun
from gpurun import supervise

HOURS = 2 * 3600
QUIET_S = 15.0                # of a wait that is measured
BUSY = 0.02                   # of a processor, at most, for doing nothing

# A Python whose clock shows what a file says beside the time. It is its own sys.executable, so the agent and the supervisors have that clock too.
OTHER_CLOCK = """\
#!{python} -I
import runpy, sys, time
now, now_ns = time.time, time.time_ns
def shift():
    with open({shift!r}) as stream:
        return int(stream.read())
time.time = lambda: now() + shift()
time.time_ns = lambda: now_ns() + shift() * 10 ** 9
sys.executable = sys.argv[0]
while sys.argv[1].startswith("-"):
    del sys.argv[1]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The same for the operator's Python, which looks for this module at its start.
SITECUSTOMIZE = """\
import datetime, time
now, now_ns, SHIFT = time.time, time.time_ns, {shift}
class Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(now() + SHIFT, tz)
datetime.datetime = Datetime
time.time = lambda: now() + SHIFT
time.time_ns = lambda: now_ns() + SHIFT * 10 ** 9
"""


class Clocks:
    """A machine as a node whose clock can be set, and operators with clocks of their own."""

    def __init__(self, here: Here) -> None:
        self.here, self.go = here, here.folder / "go"
        self._shift = here.folder / "shift"
        self.set_node(0)
        python = here.folder / "python"
        python.write_text(OTHER_CLOCK.format(python=sys.executable, shift=str(self._shift)))
        python.chmod(0o755)
        (here.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\npython = "{python}"\n')

    def set_node(self, shift_s: int) -> None:
        """Sets the clock of the node, also of an agent that is up."""
        temp = self._shift.with_suffix(".new")
        temp.write_text(str(shift_s))
        temp.replace(self._shift)

    def operator(self, shift_s: int) -> dict[str, str]:
        """The environment of an operator with another clock."""
        folder = self.here.folder / f"clock{shift_s}"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(shift=shift_s))
        return dict(self.here.env, PYTHONPATH=os.pathsep.join([str(folder), *filter(None, [self.here.env.get("PYTHONPATH")])]))

    def until_go(self) -> str:
        return f"while [ ! -e '{self.go}' ]; do sleep 0.02; done"

    def submit(self, name: str, run: str, *options: Any, env: dict[str, str] | None = None, **keys: Any) -> str:
        done = self.here.gpurun("submit", self.here.job(run, name=name, **keys), *options, env=env or self.here.env)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def state(self, run_id: str) -> dict[str, Any]:
        return json.loads((self.here.node_dir / "runs" / run_id / "state.json").read_text())


@pytest.fixture
def clocks(here: Here) -> Iterator[Clocks]:
    one = Clocks(here)
    yield one
    one.go.touch()


# ---- clocks --------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("node_s, operator_s", [(HOURS, 0), (-HOURS, 0), (0, HOURS), (0, -HOURS), (-HOURS, HOURS)])
def test_two_hours_between_the_clocks_change_no_duration_no_limit_and_no_status(clocks, node_s, operator_s):
    here, env = clocks.here, clocks.operator(operator_s)
    clocks.set_node(node_s)
    job = here.job(f"echo up; {clocks.until_go()}; sleep 0.3; exit 3", name="skewed", setup="sleep 0.2", folder=here.work / "skewed",
                   workspace={"workdir": "."})
    shutil.copy(here.work / "cluster.toml", job.parent)
    began = time.monotonic()
    process = here.start(job, env=env)
    assert process.stdout.readline() == b"up\n"
    assert abs(clocks.state(here.latest.name)["created"] - time.time() - node_s) < 60      # or this would test nothing
    refreshed = here.gpurun("status", "--refresh", "--json", env=env)
    seen = json.loads(refreshed.stdout)["seen"]
    assert seen["phase"] == "run" and 0 <= seen["seconds"] < 30
    clocks.go.touch()
    process.communicate(timeout=60)
    took, record = time.monotonic() - began, here.record()
    assert process.returncode == record["exit_code"] == 3
    assert 0.2 <= record["seconds"]["setup"] < took and 0.3 <= record["seconds"]["run"] < took
    assert record["seconds"]["run"] + record["seconds"]["setup"] <= record["seconds"]["total"] <= took
    times = record["times"]
    assert times["created"] <= times["started"] <= times["ended"]
    shown = time.strftime("%Y-%m-%dT%H", time.gmtime(time.time() + operator_s - 60)), time.strftime("%Y-%m-%dT%H", time.gmtime(time.time() + operator_s))
    assert times["created"][:13] in shown                          # the operator's own, whatever the node's shows
    assert here.result(job, env=env)["exit_code"] == 3             # a second run, by an agent that is up
    clocks.go.unlink()
    left = clocks.submit("limited", clocks.until_go(), env=env)
    began = time.monotonic()
    assert here.gpurun("wait", left, "--timeout", "1s", env=env).returncode == 124
    assert 1.0 <= time.monotonic() - began < 60
    assert here.gpurun("stop", left, "--grace", "1", env=env).returncode == 0


def test_clocks_that_jump_change_neither_the_order_of_the_queue_nor_of_what_goes(clocks):
    """The node's clock jumps between one submit and the next, the operator's too, and the agent is killed in the middle."""
    here, order = clocks.here, clocks.here.folder / "order"
    jumps = [(0, 0), (HOURS, -HOURS), (-HOURS, HOURS), (0, -2 * HOURS), (-3 * HOURS, 0)]
    ids = []
    for number, (node_s, operator_s) in enumerate(jumps):
        clocks.set_node(node_s)
        ids.append(clocks.submit(f"turn{number}", f"{clocks.until_go() + ';' if not number else ''} echo $GPURUN_RUN_ID >> '{order}'", "--keep", 2,
                                 env=clocks.operator(operator_s)))
    clocks.set_node(-HOURS)
    os.kill(here.agent()["pid"], signal.SIGKILL)
    assert here.gpurun("status", "--refresh").returncode == 0
    waits = here.start("wait", *ids)                                # starts the agent again
    eventually(lambda: here.agent()["start"] == supervise.start_time(here.agent()["pid"]))
    clocks.set_node(HOURS)
    clocks.go.touch()
    out, err = waits.communicate(timeout=60)
    assert waits.returncode == 0, err.decode()
    assert order.read_text().split() == ids == [line.split()[0] for line in out.decode().splitlines()]
    assert all(0 <= json.loads((here.runs / one / "run.json").read_text())["seconds"]["run"] < 60 for one in ids)
    eventually(lambda: sorted(path.name for path in (here.node_dir / "runs").iterdir()) == sorted(ids[-2:]), 60)


def test_a_clock_that_jumps_while_a_job_runs_is_no_duration(clocks):
    here = clocks.here
    process = here.start(here.job(f"echo up; {clocks.until_go()}", name="jump"))
    assert process.stdout.readline() == b"up\n"
    began = time.monotonic()
    clocks.set_node(HOURS)
    assert json.loads(here.gpurun("status", "--refresh", "--json").stdout)["seen"]["seconds"] < 30
    clocks.set_node(-HOURS)
    assert 0 <= json.loads(here.gpurun("status", "--refresh", "--json").stdout)["seen"]["seconds"] < 30
    clocks.go.touch()
    process.communicate(timeout=60)
    assert process.returncode == 0 and 0 < here.record()["seconds"]["run"] < time.monotonic() - began + 10


# ---- many at once --------------------------------------------------------------------------------------------------------------------------

def vitals(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return {"rss_kib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]), "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
            "fds": len(os.listdir(f"/proc/{pid}/fd"))}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def side_by_side(here: Here, count: int, job: Path) -> list[str]:
    """Submits a job so often at the same moment; the ids of the runs."""
    submits = [here.start("submit", job) for _ in range(count)]
    ids = []
    for one in submits:
        out, err = one.communicate(timeout=100)
        assert one.returncode == 0 and b"Traceback" not in err, err.decode()
        ids.append(out.decode().strip())
    assert len(set(ids)) == count and all(ids)
    return ids


def test_20_submits_side_by_side_land_once_and_run_one_after_the_other_in_the_nodes_order_and_30_more_let_nothing_grow(here):
    """The first of them start the agent."""
    book = here.folder / "book"
    job = here.job(f"echo begin $GPURUN_RUN_ID >> '{book}'; echo out > out; seq 100; echo end $GPURUN_RUN_ID >> '{book}'", name="crowd", outputs=["out"])
    ids = side_by_side(here, 20, job)
    states = {one: json.loads((here.node_dir / "runs" / one / "state.json").read_text()) for one in ids}
    assert {path.name for path in (here.node_dir / "runs").iterdir()} == set(ids)
    assert sorted(state["place"] for state in states.values()) == list(range(1, 21))
    done = here.gpurun("wait", *ids)
    assert done.returncode == 0, done.stderr.decode()
    in_order = sorted(ids, key=lambda one: states[one]["place"])
    assert book.read_text().splitlines() == [f"{word} {one}" for one in in_order for word in ("begin", "end")]
    assert len({path.name for path in here.runs.glob("crowd-*")}) == 20
    for one in ids:
        record = json.loads((here.runs / one / "run.json").read_text())
        assert (record["run_id"], record["state"], record["exit_code"], record["outputs"]) == (one, "COMPLETED", 0, ["out"])
        assert (here.runs / one / "stdout.log").read_text() == "".join(f"{number}\n" for number in range(1, 101))
        assert (here.runs / one / "outputs/out").read_text() == "out\n"
    pid = here.agent()["pid"]
    eventually(lambda: len(supervise.descendants(pid)) <= 1)        # the supervisor that waits for the next one
    before = vitals(pid)
    more = [one for _ in range(3) for one in side_by_side(here, 10, job)]
    assert here.gpurun("wait", *more).returncode == 0
    assert here.agent()["pid"] == pid
    eventually(lambda: len(supervise.descendants(pid)) <= 1
               and all(vitals(pid)[name] <= before[name] + more for name, more in (("threads", 1), ("fds", 4), ("rss_kib", 8 * 1024))), 60)
    after = vitals(pid)
    print("an agent after 20 runs and after 50:", before, after)
    zombies = [name for name in os.listdir("/proc") if name.isdigit() and (supervise._stat_fields(int(name)) or ["?", "0"])[:2] == ["Z", str(pid)]]
    assert not zombies
    eventually(lambda: len(list((here.node_dir / "runs").iterdir())) == 20)      # --keep's default
    assert (here.node_dir / "agent/log").read_text() == ""


def test_two_operators_who_wait_have_the_node_in_the_order_they_came(here, tmp_path):
    other, go, order = Here(tmp_path / "other"), here.folder / "go", here.folder / "order"
    for one in (here, other):
        (one.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\nnode_dir = "{here.node_dir}"\n')
    first = here.start(here.job(f"echo up; while [ ! -e '{go}' ]; do sleep 0.02; done", name="first"))
    assert first.stdout.readline() == b"up\n"
    refused = other.gpurun(other.job("true", name="impatient"))
    assert refused.returncode == 125 and b"busy with first-" in refused.stderr and b"--wait" in refused.stderr
    waiting = []
    for number, one in enumerate((other, here, other, here)):
        waiting.append(one.start(one.job(f"echo {number} >> '{order}'; exit {number}", name=f"n{number}"), "--wait"))
        eventually(lambda: list((here.node_dir / "runs").glob(f"n{number}-*/state.json")))
    mine = next(here.runs.glob("n1-*")).name
    shutil.copytree(here.runs / mine, other.runs / mine)            # as if he knew all about it
    for command in ("stop", "attach", "fetch"):
        other.gpurun(command, mine)                                 # whatever it answers: nothing comes of it
    go.touch()
    assert [one.communicate(timeout=60) and one.returncode for one in waiting] == [0, 1, 2, 3]
    assert order.read_text().split() == ["0", "1", "2", "3"] and first.wait(60) == 0


@pytest.mark.parametrize("command", ["attach", "wait", "fetch", "stop"])
def test_several_shells_that_do_the_same_to_one_run_at_the_same_moment_have_one_truth(here, command):
    go = here.folder / "go"
    run = f"seq 50000; head -c 20000000 /dev/zero > big; echo up > up; while [ ! -e '{go}' ]; do sleep 0.02; done; echo end; exit 7"
    run_id = here.gpurun("submit", here.job(run, name="same", outputs=["big"])).stdout.decode().strip()
    there = here.node_dir / "runs" / run_id
    eventually((there / "work/up").exists)
    if command == "fetch":                                          # also of a run that has ended
        go.touch()
        eventually((there / "run.exit").exists)
    books = [[open(here.folder / f"{number}.{end}", "w+b") for end in ("out", "err")] for number in range(4)]
    shells = [here.start(command, run_id, stdout=out, stderr=err) for out, err in books]   # pipes that are read one by one would hold up the others
    if command in ("attach", "wait"):
        eventually(lambda: b'"driven": true' in here.gpurun("status", run_id, "--json").stdout)
        go.touch()
    code = 130 if command == "stop" else 7
    for shell, book in zip(shells, books):
        ended = shell.wait(60)
        out, err = [(stream.seek(0), stream.read(), stream.close())[1] for stream in book]
        assert b"Traceback" not in err and b"fault in gpurun" not in err, err.decode()
        assert ended == (0 if command in ("stop", "fetch") else code), err.decode()
        if command == "attach":
            assert out.decode() == "".join(f"{number}\n" for number in range(1, 50001)) + "end\n"
    assert here.gpurun("attach", run_id).returncode == code
    record = here.record()
    assert (record["state"], record["exit_code"], record["outputs"], record["logs_complete"]) == ("FAILED", code, ["big"], True)
    assert (here.latest / "outputs/big").stat().st_size == 20_000_000
    assert (here.latest / "stdout.log").read_bytes() == (there / "run.out").read_bytes()
    assert not list(here.runs.rglob(".incoming-*")) and not supervise.of_run(run_id)


# ---- another version -----------------------------------------------------------------------------------------------------------------------

def another_version(folder: Path, **replace: tuple[str, str]) -> str:
    """PYTHONPATH of a gpurun whose agent is another file; `module=(old, new)` changes it further."""
    copy = folder / "version" / "gpurun"
    shutil.copytree(Path(gpurun.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / "errors.py", "a") as stream:
        stream.write(f"\n# {folder}\n")
    for module, (old, new) in replace.items():
        text, count = re.subn(old, new, (copy / f"{module}.py").read_text(), flags=re.M)
        assert count, f"{old} isn't in {module}.py"
        (copy / f"{module}.py").write_text(text)
    return str(copy.parent)


def test_a_new_gpurun_beside_a_job_and_a_queue_of_the_old_one_disturbs_neither_and_its_agent_comes_after_them(here):
    go = here.folder / "go"
    new = dict(here.env, PYTHONPATH=another_version(here.folder))
    ids = []
    for name, run in (("old", f"echo up; while [ ! -e '{go}' ]; do sleep 0.02; done; echo old > out; exit 3"), ("queued", "echo queued > out; exit 4")):
        ids.append(here.gpurun("submit", here.job(run, name=name, outputs=["out"])).stdout.decode().strip())
    agent = here.agent()
    done = here.gpurun("submit", here.job("echo new > out; exit 5", name="new", outputs=["out"]), env=new)
    assert done.returncode == 0, done.stderr.decode()
    ids.append(done.stdout.decode().strip())
    assert here.agent() == agent
    refreshed = here.gpurun("status", "--refresh", env=new).stdout.decode().splitlines()
    assert [("run for" in row, "behind" in row) for row in refreshed] == [(False, True), (False, True), (True, False)], refreshed
    go.touch()
    assert here.gpurun("wait", *ids, env=new).returncode == 3
    for run_id, name, code in zip(ids, ("old", "queued", "new"), (3, 4, 5)):
        record = json.loads((here.runs / run_id / "run.json").read_text())
        assert (record["exit_code"], record["logs_complete"]) == (code, True) and (here.runs / run_id / "outputs/out").read_text() == f"{name}\n"
    result = here.result(here.job("echo fresh", name="fresh"), env=new)
    after = here.agent()
    assert result["exit_code"] == 0 and after["agent"] != agent["agent"] and supervise.start_time(agent["pid"]) != agent["start"]
    done = here.gpurun("fetch", ids[0], ".", "--to", here.work / "all", env=new)            # what the old one left is the new one's
    assert done.returncode == 0 and (here.work / "all/out").read_text() == "old\n", done.stderr.decode()


def test_a_run_that_was_left_in_the_queue_and_is_gone_there_is_not_called_one_that_never_came(here):
    go = here.folder / "go"
    holder = here.gpurun("submit", here.job(f"while [ ! -e '{go}' ]; do sleep 0.02; done", name="holder")).stdout.decode().strip()
    left = here.gpurun("submit", here.job("true", name="left")).stdout.decode().strip()
    os.kill(here.agent()["pid"], signal.SIGKILL)
    shutil.rmtree(here.node_dir / "runs" / left)
    done = here.gpurun("attach", left)
    assert done.returncode == 125 and b"has the run no more" in done.stderr and b"never came" not in done.stderr, done.stderr.decode()
    go.touch()
    assert here.gpurun("wait", holder).returncode == 0


# ---- a long wait -----------------------------------------------------------------------------------------------------------------------------

def test_waiting_for_a_quiet_job_costs_next_to_nothing_on_both_sides_and_nothing_grows(here):
    """One shell drives the run, others watch it. An hour of it would be more of the same: pings, a look at the disk."""
    job = here.job("echo up; echo up >&2; sleep 1000", name="quiet", outputs=["x"])
    run_id = here.gpurun("submit", job).stdout.decode().strip()
    said = here.folder / "said"
    watch = {"stdout": subprocess.DEVNULL, "stderr": open(said, "ab")}
    shells = {"attach": here.start("attach", run_id, **watch)}
    eventually(lambda: (here.latest / "stderr.log").exists())       # it drives the run
    shells.update({"watching attach": here.start("attach", run_id, **watch), "wait": here.start("wait", run_id, **watch),
                   "logs -f": here.start("logs", "-f", run_id, **watch)})
    supervisor = json.loads((here.node_dir / "runs" / run_id / "state.json").read_text())["supervised"]["pid"]
    pids = {name: shell.pid for name, shell in shells.items()}
    pids.update(agent=here.agent()["pid"], supervisor=supervisor)
    time.sleep(3)                                                   # nothing tells when a Python has done its last of the start
    events = here.latest / "events.jsonl"
    for _ in range(3):                                              # a machine that has other work beside it makes a wait cost more
        before = {name: (cpu_s(pid), vitals(pid)) for name, pid in pids.items()}
        told = events.stat().st_size
        time.sleep(QUIET_S)                                         # this is what is measured
        if all((cpu_s(pid) - before[name][0]) / QUIET_S < BUSY for name, pid in pids.items()):
            break
    for name, pid in pids.items():
        used, now, then = (cpu_s(pid) - before[name][0]) / QUIET_S, vitals(pid), before[name][1]
        print(f"{name:<16} {used:.2%} of a processor, {then} then, {now} now")
        assert used < BUSY, name
        # iroh's runtime starts a thread or two for a while, and a page is used for the first time
        assert now["threads"] <= then["threads"] + 3 and now["fds"] <= then["fds"] + 2 and now["rss_kib"] <= then["rss_kib"] + 3072, (name, then, now)
    print(f"events.jsonl     {events.stat().st_size - told} bytes more")
    assert events.stat().st_size - told < 2000
    stopped = here.gpurun("stop", run_id, "--grace", "0")
    assert stopped.returncode == 0, stopped.stderr.decode() + said.read_text()
    for name, shell in shells.items():
        assert shell.wait(60) == (0 if name == "logs -f" else 130), name + said.read_text()


# ---- 200 runs --------------------------------------------------------------------------------------------------------------------------------

# What a gpurun opens and whom it calls, a line each. Links are iroh's: no audit event tells of them.
WATCHED = """\
import os, sys
book = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(what):
    os.write(book, (what + "\\n").encode("utf-8", "backslashreplace"))
def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        note("open " + arguments[0])
    elif event.startswith(("socket.", "subprocess.")):
        note(event)
if "--refresh" in sys.argv:
    from gpurun.link import Link
    def dial_all(self, peer, addresses, alpns, *arguments, was=Link.dial_all):
        note("connect " + " ".join(alpn.decode() if isinstance(alpn, bytes) else alpn for alpn in alpns))
        return was(self, peer, addresses, alpns, *arguments)
    Link.dial_all = dial_all                                        # `dial` is this for one protocol
sys.addaudithook(audit)
from gpurun.cli import main
main()
"""


def watched(here: Here, *args: Any) -> tuple[list[dict[str, Any]], list[str], float]:
    """The objects that `gpurun … --json` prints, what it did meanwhile, and how long it took."""
    book = here.folder / "book"
    book.unlink(missing_ok=True)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WATCHED, book, *args, "--json"], cwd=here.work, env=here.env, capture_output=True, timeout=60)
    took = time.monotonic() - began
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()], book.read_text().splitlines(), took


def test_200_detached_runs_are_listed_from_their_records_alone_and_asked_for_over_one_connection(here):
    run_id = here.gpurun("submit", here.job("echo out > out", name="real", outputs=["out"])).stdout.decode().strip()
    eventually((here.node_dir / "runs" / run_id / "run.exit").exists)
    record = here.record()
    for number in range(199):
        folder = here.runs / f"copy-20260101-{number:06d}-0000"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(dict(record, run_id=folder.name)))
        (folder / "lock").write_text("1\n")
    listed, did, took = watched(here, "status")
    print(f"gpurun status of 200 runs: {took:.3f} s")
    assert len(listed) == 200 and all(one["detached"] and not one["driven"] for one in listed)
    opened = [line for line in did if line.startswith(f"open {here.runs}")]
    assert len(opened) == 400 and sum(line.endswith("/run.json") for line in opened) == 200      # and each lock: who drives it
    assert not [line for line in did if line.split()[0] != "open"]
    assert not [line for line in did if "iroh" in line]
    listed, did, took = watched(here, "status", "--refresh")
    print(f"gpurun status --refresh of 200 runs: {took:.3f} s")
    assert [line for line in did if line.startswith("connect")] == ["connect gpurun/control/1"]
    seen = {one["run_id"]: one["seen"] for one in listed}
    assert seen.pop(run_id)["phase"] == "ended" and {one["phase"] for one in seen.values()} == {"unknown"}


# ---- what stays ------------------------------------------------------------------------------------------------------------------------------

def test_keep_leaves_the_newest_runs_on_the_node_and_each_that_is_not_collected(here):
    left = here.gpurun("submit", here.job("echo out > out", name="left", outputs=["out"]), "--keep", 3).stdout.decode().strip()
    eventually((here.node_dir / "runs" / left / "run.exit").exists)
    ids = []
    for number in range(6):
        assert here.gpurun(here.job(f"echo {number} > out", name=f"n{number}", outputs=["out"]), "--keep", 3).returncode == 0
        ids.append(here.latest.name)
    eventually(lambda: {path.name for path in (here.node_dir / "runs").iterdir()} == {left, *ids[-3:]})
    assert {path.name for path in here.runs.glob("*-*")} == {left, *ids}           # here nothing goes by itself
    done = here.gpurun("fetch", ids[0], "out", "--to", here.work / "again")
    assert done.returncode == 125 and b"--keep" in done.stderr
    assert here.gpurun("fetch", left).returncode == 0 and (here.runs / left / "outputs/out").read_text() == "out\n"
    eventually(lambda: {path.name for path in (here.node_dir / "runs").iterdir()} == set(ids[-3:]))


def test_the_cap_of_the_contents_takes_nothing_from_runs_that_wait(here):
    """An agent that would keep nothing in its cache and looks after that all the time."""
    go = here.folder / "go"
    env = dict(here.env, PYTHONPATH=another_version(here.folder, store=(r"^CACHE_CAP_BYTES = .*", "CACHE_CAP_BYTES = 0"),
                                                    agent=(r"^HOUSEKEEPING_S = .*|^TRIM_EVERY_S = .*", "HOUSEKEEPING_S = TRIM_EVERY_S = 0.05")))
    path = Path(env["PYTHONPATH"]) / "gpurun/store.py"
    path.write_text(path.read_text().replace("QUIET_S = 600.0", "QUIET_S = 0.3"))
    ids = [here.gpurun("submit", here.job(f"while [ ! -e '{go}' ]; do sleep 0.02; done", name="holder"), env=env).stdout.decode().strip()]
    for number in range(2):
        job = here.job("cat data; cat big* | wc -c", name=f"has{number}", folder=here.work / f"has{number}", workspace={"workdir": "."})
        (job.parent / "data").write_text(f"data {number}\n")
        for part in range(30):                                      # a push that takes longer than a look at the cache
            (job.parent / f"big{part}").write_bytes(bytes([number, part]) * (1 << 19))
        ids.append(here.gpurun("submit", job, env=env).stdout.decode().strip())
        assert ids[-1]
    time.sleep(1)                                                   # for what must not happen: a look at the cache takes a twentieth of this
    go.touch()
    assert here.gpurun("wait", *ids, env=env).returncode == 0
    for number, run_id in enumerate(ids[1:]):
        assert (here.runs / run_id / "stdout.log").read_text() == f"data {number}\n{30 << 20}\n"
    eventually(lambda: not [path for path in (here.node_dir / "cache/contents").rglob("*") if path.is_file()])
    assert here.gpurun(job, env=env).stdout.decode() == f"data 1\n{30 << 20}\n"      # sent again
