"""Stopping: Ctrl-C in every state, `gpurun stop`, closed terminals and killed processes. What was told to end ends, nothing else does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import eventually, toml
from running import BOUND_S, Running, gone, nothing_goes_on

from gpurun import supervise
from gpurun.records import RunFolder
from gpurun.screen import Screen
from gpurun.stopping import stop_run

pytestmark = pytest.mark.usefixtures(nothing_goes_on.__name__)

PACKAGE = re.escape(os.path.dirname(supervise.__file__))   # a Python may be in a folder that is called gpurun too
COUNTER = "i=0; while :; do i=$((i+1)); echo $i; echo $i >> count; sleep 0.02; done"


def last(counted: Path) -> int:
    """The last number that the counter wrote to its own file."""
    return int(counted.read_text().split()[-1])


def big_workspace(warm, name: str, size: int) -> Path:
    folder = warm.work / name
    path = warm.job("sleep 600; touch ran", name=name, folder=folder, workspace={"workdir": "."}, outputs=["ran"])
    with open(folder / "big", "wb") as stream:
        stream.truncate(size)
    return path


# ---- Ctrl-C, state by state ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_the_workspace_is_read(warm, number):
    run = Running(warm, big_workspace(warm, "reading", 200 << 30))
    run.until("read: the workspace")
    assert run.signal(number).end() == 130
    record = warm.record()
    assert (record["state"], record["reason"]) == ("FAILED", "stopped by the operator before anything was begun")
    assert not (warm.node_dir / "runs" / warm.latest.name).exists()


def test_as_early_as_there_is_a_record_it_is_closed(warm):
    """At any moment of the first quarter of a second: no record is left that says that something is still to come."""
    for delay_ms in range(60, 300, 12):
        known = set(warm.runs.glob("early-*"))
        run = Running(warm, warm.job("true", name="early"))
        time.sleep(delay_ms / 1000)
        run.signal(signal.SIGINT).process.wait(BOUND_S)
        for reader in run.readers:
            reader.join(10)
        if "KeyboardInterrupt" not in run.err or re.search(PACKAGE + "/(?!__main__|__init__)", run.err):   # else it hit Python's own start
            run.end()
        for path in set(warm.runs.glob("early-*")) - known:
            assert json.loads((path / "run.json").read_text())["state"] in ("FAILED", "COMPLETED"), (delay_ms, run.err)


def test_while_the_agent_is_deployed(here):
    slow = here.work / "slow-python"
    slow.write_text(f"#!/bin/sh\necho $$ > {here.work}/started\nexec sleep 600\n")
    slow.chmod(0o755)
    (here.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\npython = {json.dumps(str(slow))}\n')
    run = Running(here, here.job("true"))
    started = here.work / "started"
    pid = int(eventually(lambda: started.exists() and started.read_text()))
    try:
        assert run.signal(signal.SIGINT).end() == 130
    finally:
        os.kill(pid, signal.SIGKILL)
    assert here.record()["state"] == "FAILED"


def test_while_the_workspace_is_pushed(warm):
    run = Running(warm, big_workspace(warm, "pushing", 1 << 30))
    run.until("push: to local")
    eventually(lambda: warm.record()["phase"] == "workspace")
    assert run.signal(signal.SIGINT).end() == 130
    record = warm.record()
    assert (record["state"], record["reason"], record["missing"]) == ("FAILED", "stopped by the operator", ["ran"])
    assert warm.gpurun(warm.job("echo free")).stdout == b"free\n"   # the node is the next one's


def test_while_waiting_for_a_busy_node(warm):
    holder = Running(warm, warm.job("echo up; exec sleep 600", name="holder"))
    holder.until("up")
    run = Running(warm, warm.job("echo never", name="waiter"), "--wait")
    run.until("is busy with holder-")
    assert run.signal(signal.SIGINT).end() == 130
    assert warm.record()["reason"] == "stopped by the operator before anything was begun" and run.out == ""
    state = warm.node_dir / "runs" / warm.latest.name / "state.json"
    eventually(lambda: json.loads(state.read_text())["over"])       # it is told a moment before it is written
    assert holder.process.poll() is None and holder.signal(signal.SIGINT).end() == 130
    assert warm.gpurun(warm.job("echo free")).stdout == b"free\n"


def test_in_the_setup(warm):
    run = Running(warm, warm.job("echo never > x", name="setup", setup="echo 1 > y; echo begun; exec sleep 600", outputs=["x", "y"]))
    run.until("begun")
    assert run.signal(signal.SIGINT).end() == 130
    record = warm.record()
    assert (record["state"], record["reason"], record["outputs"], record["missing"]) == ("FAILED", "stopped by the operator", ["y"], ["x"])
    assert gone(warm.latest.name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_job_everything_so_far_comes_home(warm, number):
    run = Running(warm, warm.job(COUNTER, name="counter", outputs=["count"]))
    run.until("20")
    assert run.signal(number).end() == 130
    assert run.out == (warm.latest / "stdout.log").read_text()
    numbers = run.out.split()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    written = last(warm.latest / "outputs/count")
    assert int(numbers[-1]) - written in (0, 1)                     # the signal may come between the echo and the file
    assert gone(warm.latest.name) and warm.record()["reason"] == "stopped by the operator"


def test_a_job_that_says_good_bye_is_heard(warm):
    script = "trap 'echo saving; echo last > x; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    run = Running(warm, warm.job(script, name="bye", outputs=["x"]))
    run.until("up")
    assert run.signal(signal.SIGINT).end() == 130                   # stopped is stopped, whatever code it chose
    assert run.out == "up\nsaving\n" and (warm.latest / "outputs/x").read_text() == "last\n"
    assert warm.record()["exit_code"] == 130 and warm.record()["state"] == "FAILED"


def test_twice_in_the_job_leaves_at_once_and_says_what_still_runs(warm):
    run = Running(warm, warm.job(f"trap '' TERM; echo up; while [ ! -e {warm.work}/stubborn.go ]; do sleep 0.02; done", name="stubborn"))
    run.until("up")
    run.signal(signal.SIGINT).until("Ctrl-C again leaves")
    began = time.monotonic()
    assert run.signal(signal.SIGINT).end() == 130
    assert time.monotonic() - began < 8 and f"gpurun stop {warm.latest.name}" in run.err
    (warm.work / "stubborn.go").touch()
    done = warm.gpurun("stop", "latest")                            # what it said works
    assert done.returncode == 0 and gone(warm.latest.name) and warm.record()["state"] == "FAILED"
    assert (warm.latest / "stdout.log").read_text() == "up\n"


def test_once_in_the_collection_changes_nothing(warm):
    run = Running(warm, warm.job("truncate -s 200M big", name="once", outputs=["big"]))
    run.until("collect: from local")
    assert run.signal(signal.SIGINT).end() == 0
    assert "has ended already" in run.err and (warm.latest / "outputs/big").stat().st_size == 200 << 20


def test_twice_in_the_collection_leaves_and_says_where_the_outputs_are(warm):
    run = Running(warm, warm.job("truncate -s 2G big; exit 3", name="twice", outputs=["big"]))
    run.until("collect: from local")
    run.signal(signal.SIGINT).until("has ended already")
    assert run.signal(signal.SIGINT).end() == 130
    assert "exited 3" in run.err and f"gpurun fetch {warm.latest.name}" in run.err
    os.truncate(warm.node_dir / "runs" / warm.latest.name / "work/big", 10)
    assert warm.gpurun("stop", "latest").returncode == 0            # closes the record with the job's own end
    record = warm.record()
    assert (record["state"], record["exit_code"], record["outputs"]) == ("FAILED", 3, ["big"])
    assert (warm.latest / "outputs/big").stat().st_size == 10


def test_many_signals_at_once_in_any_moment_end_cleanly(warm):
    """Whatever line of gpurun they hit: 130 or, when the job was quicker, its own 0; no traceback; nothing left running."""
    path = warm.job("echo up; sleep 0.2", name="burst", setup="true", outputs=["x"])
    for pause in (0.0, 0.1, 0.2, 0.3, 0.4):
        run = Running(warm, path)
        eventually(lambda: run.said or run.process.poll() is not None)   # before that, no handler is there yet
        time.sleep(pause)                                            # no event to wait for: any moment will do
        for _ in range(3):
            run.signal(signal.SIGINT)
        assert run.end() in (0, 130), run.err
        eventually(lambda: gone(warm.latest.name))
        warm.gpurun("stop", "latest")


def test_a_reader_that_hangs_does_not_hold_gpurun(warm):
    """With --json all goes into one pipe; nobody reads it, so every thread that says something hangs."""
    read, write = os.pipe()
    run = Running(warm, warm.job("head -c 3000000 /dev/zero; exec sleep 600", name="hanging"), "--json", stdout=write)
    os.close(write)
    eventually(lambda: warm.runs.exists() and warm.latest.name.startswith("hanging") and (warm.latest / "stdout.log").exists()
               and (warm.latest / "stdout.log").stat().st_size > 100_000)
    for _ in range(6):
        if run.process.poll() is None:
            run.signal(signal.SIGINT)
            time.sleep(0.2)                                         # as a person would
    assert run.end() == 130
    os.close(read)
    assert warm.gpurun("stop", "latest").returncode == 0 and gone(warm.latest.name)


# ---- the whole tree, and nothing but it -----------------------------------------------------------------------------------------------

DAEMON = """import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True:
            time.sleep(0.1)
    os._exit(0)
os._exit(0)
"""


def test_the_whole_tree_ends_and_nothing_else(warm):
    """A daemon (double fork, setsid, TERM ignored), a setsid child that ignores TERM; a stranger with the same command line lives."""
    daemon = warm.work / "daemon.py"
    daemon.write_text(DAEMON)
    stubborn = "trap '' TERM; while :; do sleep 0.05; done # tree"
    stranger = subprocess.Popen(["bash", "-c", stubborn], start_new_session=True)
    try:
        run = Running(warm, warm.job(f"{sys.executable} {daemon} {warm.work}/daemon.pid; setsid bash -c \"{stubborn}\" & "
                                     f"echo $! > {warm.work}/child.pid; touch {warm.work}/up; wait", name="tree"))
        eventually((warm.work / "up").exists)
        pids = [int(eventually(lambda name=name: (warm.work / name).exists() and (warm.work / name).read_text().strip()))
                for name in ("daemon.pid", "child.pid")]
        assert all(supervise.start_time(pid) for pid in pids)
        assert run.signal(signal.SIGINT).end() == 130
        assert not any(supervise.start_time(pid) for pid in pids) and gone(warm.latest.name)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_job_that_ends_does_not_leave_its_daemon(warm):
    daemon = warm.work / "daemon2.py"
    daemon.write_text(DAEMON)
    done = warm.gpurun(warm.job(f"{sys.executable} {daemon} {warm.work}/daemon2.pid; while [ ! -s {warm.work}/daemon2.pid ]; do sleep 0.02; done"))
    assert done.returncode == 0 and not supervise.start_time(int((warm.work / "daemon2.pid").read_text()))


# ---- gpurun stop ------------------------------------------------------------------------------------------------------------------------

def test_stop_from_another_shell_while_attached(warm):
    run = Running(warm, warm.job(COUNTER, name="attached", outputs=["count"]))
    run.until("5")
    done = warm.gpurun("stop", "latest", "--json")
    assert done.returncode == 0 and run.end() == 130
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["type"], result["state"], result["reason"], result["driven"]) == ("result", "FAILED", "stopped by the operator", False)
    assert (warm.latest / "outputs/count").exists() and run.out == (warm.latest / "stdout.log").read_text()


def test_stop_of_a_run_that_still_waits_for_its_node(warm):
    holder = Running(warm, warm.job("echo up; exec sleep 600", name="holder"))
    holder.until("up")
    holder_id = warm.latest.name
    waiter = Running(warm, warm.job("echo never", name="waiter"), "--wait")
    waiter.until("is busy with")
    assert warm.gpurun("stop", "latest").returncode == 0 and waiter.end() == 130
    assert warm.record()["state"] == "FAILED" and holder.process.poll() is None
    assert warm.gpurun("stop", holder_id).returncode == 0 and holder.end() == 130


def test_stop_of_a_run_whose_gpurun_was_killed(warm):
    run = Running(warm, warm.job(COUNTER, name="orphan", outputs=["count"]))
    run.until("10")
    assert run.signal(signal.SIGKILL).process.wait(10) == -signal.SIGKILL
    known = warm.record()
    assert known["state"] == "RUNNING"
    counted = warm.node_dir / "runs" / warm.latest.name / "work/count"
    then = last(counted)
    eventually(lambda: last(counted) > then + 5)     # the job goes on
    status = warm.gpurun("status").stdout.decode()
    assert "no gpurun here drives it" in next(line for line in status.splitlines() if line.startswith(warm.latest.name))
    assert json.loads(warm.gpurun("status", "latest", "--json").stdout)["driven"] is False
    assert not [path for path in warm.latest.iterdir() if path.name.startswith(".gpurun-tmp-")]

    done = warm.gpurun("stop", "latest")
    assert done.returncode == 0 and done.stdout == b"" and gone(warm.latest.name)
    record = warm.record()
    assert (record["state"], record["reason"], record["outputs"]) == ("FAILED", "stopped by the operator", ["count"])
    numbers = (warm.latest / "stdout.log").read_text().split()       # the rest of the log came too, every byte once
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert int(numbers[-1]) - last(warm.latest / "outputs/count") in (0, 1)


def test_stop_of_a_run_that_ended_while_nobody_watched_keeps_its_exit_code(warm):
    run = Running(warm, warm.job(f"echo up; while [ ! -e {warm.work}/alone.go ]; do sleep 0.02; done; echo 7 > x; echo end", name="alone", outputs=["x"]))
    run.until("up")
    run.signal(signal.SIGKILL).process.wait(10)
    (warm.work / "alone.go").touch()
    eventually((warm.node_dir / "runs" / warm.latest.name / "run.exit").exists)
    done = warm.gpurun("stop", "latest")
    assert done.returncode == 0 and warm.record()["state"] == "COMPLETED" and warm.record()["exit_code"] == 0
    assert (warm.latest / "outputs/x").read_text() == "7\n" and (warm.latest / "stdout.log").read_text() == "up\nend\n"


def test_stop_in_the_setup_of_a_run_whose_gpurun_was_killed_starts_no_job(warm):
    run = Running(warm, warm.job("touch ran", name="presetup", setup="echo begun; exec sleep 600", outputs=["ran"]))
    run.until("begun")
    run.signal(signal.SIGKILL).process.wait(10)
    assert warm.gpurun("stop", "latest").returncode == 0
    assert warm.record()["reason"] == "stopped by the operator" and warm.record()["missing"] == ["ran"]


def test_stop_of_a_run_that_no_node_got_closes_its_record(warm):
    run = Running(warm, big_workspace(warm, "unsent", 200 << 30))
    run.until("read: the workspace")
    run.signal(signal.SIGKILL).process.wait(10)
    done = warm.gpurun("stop", "latest")
    assert done.returncode == 0 and b"never given to a node" in done.stderr and warm.record()["state"] == "FAILED"


def test_stop_of_a_run_that_another_gpurun_has_just_begun_to_drive_ends_that_one(tmp_path):
    """It has the lock already and hasn't written yet who it is."""
    folder, _ = RunFolder.create(str(tmp_path), "begun")
    code = ("import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(fd, fcntl.LOCK_EX); print(flush=True)\n"
            "sys.stdin.readline(); os.write(fd, b'%d\\n' % os.getpid()); sys.stdin.read()")
    driver = subprocess.Popen([sys.executable, "-c", code, folder.lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    driver.stdout.readline()
    assert folder.driver() == 0
    stop = threading.Thread(target=stop_run, args=(RunFolder(folder.path), None, Screen("quiet"), "me"), daemon=True)
    stop.start()
    driver.stdin.write(b"\n")
    driver.stdin.flush()
    try:
        assert driver.wait(BOUND_S) == -signal.SIGTERM
        stop.join(BOUND_S)
        assert not stop.is_alive()
    finally:
        driver.kill()
        driver.communicate()


def test_stop_of_an_ended_run_says_so(warm):
    warm.gpurun(warm.job("exit 3"))
    before = warm.record()
    done = warm.gpurun("stop", "latest")
    assert done.returncode == 0 and b"had ended already" in done.stderr and b"exit code 3" in done.stderr and warm.record() == before
    done = warm.gpurun("stop", "nonsense")
    assert done.returncode == 2 and b"nonsense" in done.stderr


# ---- closed terminals --------------------------------------------------------------------------------------------------------------------

def test_a_closed_terminal_leaves_the_run_going(warm):
    run = Running(warm, warm.job(COUNTER, name="hangup"))
    run.until("5")
    assert run.signal(signal.SIGHUP).end() == 130
    assert f"gpurun stop {warm.latest.name}" in run.err and warm.record()["state"] == "RUNNING"
    assert not gone(warm.latest.name)
    assert warm.gpurun("stop", "latest").returncode == 0 and gone(warm.latest.name)


def test_nohup_means_what_it_says(warm):
    path = warm.job(f"echo up; while [ ! -e {warm.work}/nohup.go ]; do sleep 0.02; done; echo end", name="nohup")
    process = subprocess.Popen(["nohup", sys.executable, "-m", "gpurun", str(path)], cwd=warm.work, env=warm.env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGHUP)
    (warm.work / "nohup.go").touch()
    out, _ = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out) == (0, b"end\n")


# ---- killed agents -----------------------------------------------------------------------------------------------------------------------

def test_a_killed_agent_costs_nothing(here):
    """The agent is killed in the push, the setup, the job and the collection of four runs at the same time: each reconnects to a new agent,
    gets every byte of the logs once, and the job's own exit code."""
    from conftest import end_agents
    runs = {}
    for name in ("push", "setup", "run", "collect"):
        folder = here.work / name
        folder.mkdir()
        if name == "push":
            with open(folder / "big", "wb") as stream:
                stream.truncate(600 << 20)
        until = f"until [ -e {folder}/go ]; do sleep 0.02; done"              # on a busy machine nothing is over before its turn has come
        step = f"for i in $(seq 300); do echo $i; if [ $i = 60 ]; then {until}; fi; sleep 0.01; done"
        script = {"push": "stat -c %s big; exit 7", "setup": "echo job; exit 7", "run": f"{step}; echo end; exit 7", "collect": f"{until}; truncate -s 600M big; echo end; exit 7"}[name]
        keys = {"setup": {"setup": f"{step}; echo set"}, "push": {"workspace": {"workdir": ".", "exclude": ["node"]}}}.get(name, {})
        path = here.job(script, name=name, folder=folder, outputs=["big"] if name == "collect" else ["none"], **keys)
        (folder / "cluster.toml").write_text(f'[provider]\nkind = "local"\nnode_dir = {toml(str(folder / "node"))}\n')
        runs[name] = (folder, Running(here, path, cwd=folder))
    for name, (folder, run) in runs.items():
        if name == "collect":
            (folder / "go").touch()
        run.until({"push": "push: to local", "setup": "50", "run": "50", "collect": "collect: from local"}[name])
        if name == "push":
            eventually(lambda: json.loads((folder / "gpurun-runs/latest/run.json").read_text())["phase"] == "workspace")
        if name == "collect":
            eventually(lambda: list((folder / "gpurun-runs/latest").glob(".incoming*")))
        os.kill(here.agent(folder / "node")["pid"], signal.SIGKILL)
        (folder / "go").touch()
    counted = "".join(f"{number}\n" for number in range(1, 301))
    for name, (folder, run) in runs.items():
        latest = folder / "gpurun-runs/latest"
        try:
            assert run.process.wait(120) == 7, run.err
        finally:
            end_agents(folder)
        run.end()
        assert "local is back after" in run.err
        assert run.out == (latest / "stdout.log").read_text() == {"push": f"{600 << 20}\n", "setup": "job\n", "run": counted + "end\n", "collect": "end\n"}[name]
        if name == "setup":
            assert (latest / "setup-stdout.log").read_text() == counted + "set\n"
        if name == "collect":
            assert (latest / "outputs/big").stat().st_size == 600 << 20
            (latest / "outputs/big").unlink()
        assert json.loads((latest / "run.json").read_text())["reason"] == "exited 7"


def test_a_stop_waits_for_the_return_of_a_killed_agent(here):
    holder = Running(here, here.job("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done", name="holder"))
    holder.until("up")
    os.kill(here.agent()["pid"], signal.SIGKILL)
    holder.until("can't be reached")
    assert holder.signal(signal.SIGINT).end() == 130 and "Ctrl-C again leaves" in holder.err and holder.out == "up\nbye\n"


def test_a_killed_supervisor_is_a_fault_and_leaves_nothing(warm):
    run = Running(warm, warm.job("echo up; setsid sleep 4713 & sleep 4714", name="headless"))
    run.until("up")
    supervisor = json.loads((warm.node_dir / "runs" / warm.latest.name / "state.json").read_text())["supervised"]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    assert run.end() == 125 and "no exit record" in warm.record()["reason"] and gone(warm.latest.name)
    assert run.out == "up\n" and warm.gpurun(warm.job("echo free")).stdout == b"free\n"
