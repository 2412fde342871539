"""gpurun fetch: outputs and any path below the workdir, of a run in any state."""

from __future__ import annotations

import json
import os
import signal

import pytest
from conftest import eventually
from test_attach import go, nothing_goes_on, on_node, submit, until   # noqa: F401 (a fixture)
from running import Running


def fetched(done) -> list[str]:
    return done.stdout.decode().splitlines()


def test_fetch_while_it_runs_brings_what_there_is_now(warm):
    run_id = submit(warm, warm.job(f"mkdir out; echo 1 > out/a; echo up; {until(warm, 'now')}; echo 2 > out/b; echo 3 > last; exit 3", name="now",
                                   outputs=["out", "last"]))
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    outputs = warm.runs / run_id / "outputs"
    done = warm.gpurun("fetch", run_id)
    assert done.returncode == 0 and b"as they are now" in done.stderr and b"'last' doesn't exist yet" in done.stderr
    assert fetched(done) == [f"gpurun-runs/{run_id}/outputs/out"] and os.listdir(outputs / "out") == ["a"]
    assert warm.record()["state"] in ("PENDING", "RUNNING")
    go(warm, "now")
    eventually((warm.node_dir / "runs" / run_id / "run.exit").exists)
    done = warm.gpurun("fetch", run_id)                             # has ended: now the record is closed too
    assert done.returncode == 0 and sorted(os.listdir(outputs / "out")) == ["a", "b"] and (outputs / "last").read_text() == "3\n"
    record = warm.record()
    assert (record["state"], record["exit_code"], record["outputs"], record["logs_complete"]) == ("FAILED", 3, ["out", "last"], True)
    assert (warm.runs / run_id / "stdout.log").read_text() == "up\n"


def test_a_log_that_grows_is_whole_after_each_fetch_and_at_the_end(warm):
    run_id = submit(warm, warm.job(f"head -c 300000 /dev/urandom > log; cp log first; echo up; {until(warm, 'grow')}; cat first >> log; "
                                   f"{until(warm, 'end')}; echo end >> log; rm first", name="grow", outputs=["log"]))
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    outputs, workdir = warm.runs / run_id / "outputs", warm.node_dir / "runs" / run_id / "work"
    assert warm.gpurun("fetch", run_id).returncode == 0
    first = (outputs / "log").read_bytes()
    go(warm, "grow")
    eventually(lambda: (workdir / "log").stat().st_size == 600_000)
    assert warm.gpurun("fetch", run_id).returncode == 0
    assert (outputs / "log").read_bytes() == first + first and os.listdir(outputs) == ["log"]
    go(warm, "end")
    assert warm.gpurun("wait", run_id).returncode == 0
    assert (outputs / "log").read_bytes() == first + first + b"end\n" and not list((warm.runs / run_id).glob(".incoming*"))


def test_fetch_beside_the_gpurun_that_drives_the_run(warm):
    run = Running(warm, warm.job(f"echo 1 > x; echo up; {until(warm, 'beside')}; echo 2 > x", name="beside", outputs=["x"]))
    run.until("up")
    done = warm.gpurun("fetch", "latest")
    assert done.returncode == 0 and (warm.latest / "outputs/x").read_text() == "1\n"
    go(warm, "beside")
    assert run.end() == 0 and (warm.latest / "outputs/x").read_text() == "2\n" and not list(warm.latest.glob(".incoming*"))


def test_fetch_of_paths_brings_what_exists_and_names_what_does_not(warm):
    run_id = submit(warm, warm.job(f"mkdir -p ck/deep; echo 1 > ck/deep/a; echo 2 > ck/b; echo log > my.log; echo up; {until(warm, 'paths')}", name="paths"))
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    done = warm.gpurun("fetch", run_id, "nothing", "./ck//deep/", "my.log")
    outputs = warm.runs / run_id / "outputs"
    assert done.returncode == 125 and b"'nothing' doesn't exist" in done.stderr
    assert fetched(done) == [f"gpurun-runs/{run_id}/outputs/ck/deep", f"gpurun-runs/{run_id}/outputs/my.log"]
    assert (outputs / "ck/deep/a").read_text() == "1\n" and not (outputs / "ck/b").exists() and (outputs / "my.log").read_text() == "log\n"
    elsewhere = warm.work / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("stays")
    done = warm.gpurun("fetch", run_id, "ck", "--to", "elsewhere", "--json")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert objects[-1] == {"type": "fetched", "path": "ck", "files": 2, "bytes": 4, "to": str(elsewhere / "ck")}
    assert (elsewhere / "ck/b").read_text() == "2\n" and (elsewhere / "mine").read_text() == "stays"
    done = warm.gpurun("fetch", run_id, ".", "--to", warm.work / "all")
    assert done.returncode == 0 and sorted(os.listdir(warm.work / "all")) == ["ck", "my.log"]
    go(warm, "paths")
    assert warm.gpurun("wait", run_id).returncode == 0


@pytest.mark.parametrize("path, said", [("/etc/passwd", "absolute"), ("../x", ".."), ("a/../../x", ".."), ("", "blank"), (" ", "blank")])
def test_paths_that_lead_elsewhere_are_refused_before_anything_is_asked(warm, path, said):
    warm.gpurun(warm.job("true", name="lead"))
    done = warm.gpurun("fetch", "latest", path)
    assert done.returncode == 2 and said in done.stderr.decode() and done.stdout == b""


def test_a_link_out_of_the_workdir_is_not_followed(warm):
    warm.gpurun(warm.job("ln -s /etc etc; echo 1 > x", name="links"))
    assert b"no declared outputs" in warm.gpurun("fetch", "latest").stderr
    done = warm.gpurun("fetch", "latest", "etc/hostname", "x")
    assert done.returncode == 125 and b"'etc/hostname'" in done.stderr and fetched(done) == [f"gpurun-runs/{warm.latest.name}/outputs/x"]


def test_fetch_of_a_run_that_was_stopped_or_failed_or_collected(warm):
    warm.gpurun(warm.job("echo 1 > x; echo 2 > y; exit 3", name="collected", outputs=["x"]))
    before = warm.record()
    done = warm.gpurun("fetch", "latest")
    assert done.returncode == 0 and b"were collected" in done.stderr and fetched(done) == [f"gpurun-runs/{warm.latest.name}/outputs/x"]
    (warm.latest / "outputs/x").unlink()
    done = warm.gpurun("fetch", "latest")                           # somebody deleted it, and the node has it still
    assert done.returncode == 0 and (warm.latest / "outputs/x").read_text() == "1\n" and b"again" in done.stderr
    assert warm.gpurun("fetch", "latest", "y").returncode == 0 and (warm.latest / "outputs/y").read_text() == "2\n" and warm.record() == before
    run = Running(warm, warm.job("echo 1 > z; echo up; exec sleep 600", name="stopped"))
    run.until("up")
    assert run.signal(signal.SIGTERM).end() == 130
    assert warm.gpurun("fetch", "latest", "z").returncode == 0 and (warm.latest / "outputs/z").read_text() == "1\n"


@pytest.mark.parametrize("command", ["fetch", "attach", "wait"])
def test_a_run_that_was_declared_lost_is_brought_home_once_its_node_is_back(warm, command):
    run = Running(warm, warm.job(f"echo 1 > x; echo up; {until(warm, command)}; echo end; exit 3", name=command, outputs=["x"]))
    run.until("up")
    run.signal(signal.SIGKILL).process.wait(10)
    path = warm.latest / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(dict(record, state="FAILED", phase="", exit_code=125, reason="the node was lost",
                                    fsm=dict(record["fsm"], state="FAILED", phase="", failed_phase="run", reason="the node was lost"))))
    if command == "fetch":
        done = warm.gpurun("fetch", "latest")                       # it is back and still at it
        assert done.returncode == 0 and b"as they are now" in done.stderr and (warm.latest / "outputs/x").read_text() == "1\n"
    go(warm, command)
    eventually((warm.node_dir / "runs" / warm.latest.name / "run.exit").exists)
    done = warm.gpurun(command, "latest")
    assert done.returncode == (0 if command == "fetch" else 3), done.stderr
    record = warm.record()
    assert (record["state"], record["exit_code"], record["reason"], record["outputs"]) == ("FAILED", 3, "exited 3", ["x"])
    assert (warm.latest / "stdout.log").read_text() == "up\nend\n"


def test_fetch_of_a_run_that_its_node_no_longer_has(warm):
    warm.gpurun(warm.job("echo 1 > x", name="removed", outputs=["x"]))
    record, outputs = (warm.latest / "run.json").read_bytes(), warm.latest
    assert warm.gpurun("rm", "latest").returncode == 0
    outputs.mkdir()
    (outputs / "run.json").write_bytes(record)
    done = warm.gpurun("fetch", outputs.name)
    assert done.returncode == 125 and f"doesn't have {outputs.name} any more" in done.stderr.decode()
    assert warm.gpurun("rm", "--here", outputs.name).returncode == 0


def test_fetch_of_a_run_that_no_node_got(warm):
    warm.gpurun(warm.job("exit 0", name="unsent"))
    path = warm.latest / "run.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), state="PENDING", node={"kind": "local"}, fsm={}, node_dir="")))
    done = warm.gpurun("fetch", "latest", "x")
    assert done.returncode == 2 and b"never given to a node" in done.stderr


def test_fetch_goes_on_after_the_loss_of_the_agent(here):
    done = here.gpurun("submit", here.job(f"truncate -s 500M big; echo up; {until(here, 'lost')}", name="lost"))
    run_id = done.stdout.decode().strip()
    eventually(lambda: on_node(here, run_id, "run.out") == "up\n")
    run = Running(here, "fetch", run_id, "big")
    eventually(lambda: any(path.stat().st_size > 20 << 20 for path in (here.runs / run_id).glob(".incoming*/*")))
    assert run.process.poll() is None
    os.kill(here.agent()["pid"], signal.SIGKILL)
    run.process.wait(60)
    assert run.end() == 0 and "connecting again" in run.err and (here.runs / run_id / "outputs/big").stat().st_size == 500 << 20
    go(here, "lost")
    assert here.gpurun("wait", run_id).returncode == 0


def test_to_a_file_is_an_error_before_anything_is_asked(warm):
    run_id = submit(warm, warm.job("echo 1 > x", name="to-file", outputs=["x"]))
    (warm.work / "a-file").write_text("mine")
    done = warm.gpurun("fetch", run_id, "x", "--to", "a-file")
    assert done.returncode == 2 and b"a-file is a file" in done.stderr and (warm.work / "a-file").read_text() == "mine"
    assert warm.gpurun("wait", run_id).returncode == 0
