"""Coming back to a run: submit, attach, wait, logs. Whoever comes back sees every byte once, the job's own exit code and its outputs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import sys
import time

import pytest
from conftest import eventually, toml
from running import BOUND_S, Running, gone, nothing_goes_on


pytestmark = pytest.mark.usefixtures(nothing_goes_on.__name__)


def until(warm, name: str) -> str:
    """Shell that waits for `go(warm, name)`."""
    return f"while [ ! -e {warm.work}/{name}.go ]; do sleep 0.02; done"


def go(warm, name: str) -> None:
    (warm.work / f"{name}.go").touch()


def submit(warm, path, *args) -> str:
    done = warm.gpurun("submit", path, *args)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def says(run: Running, text: str) -> None:
    """Returns as soon as it was said, on the first line as well."""
    eventually(lambda: text in run.err, BOUND_S)


def followed(warm, run_id: str) -> int:
    """How often the node has a run's output open to send it: each has its offsets by then."""
    folder, count = f"/proc/{warm.agent()['pid']}/fd", 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            count += os.readlink(f"{folder}/{name}") == str(warm.node_dir / "runs" / run_id / "run.out")
    return count


def on_node(warm, run_id: str, name: str) -> str:
    path = warm.node_dir / "runs" / run_id / name
    return path.read_text() if path.exists() else ""


# ---- submit ---------------------------------------------------------------------------------------------------------------------------

def test_submit_prints_the_run_id_alone_and_the_node_ends_the_run_without_us(warm):
    path = warm.job("cat data; echo out > made; exit 4", name="alone", folder=warm.work / "alone", setup="echo set", outputs=["made"],
                    workspace={"workdir": "."})
    (path.parent / "data").write_text("from the workspace\n")
    run_id = submit(warm, path)
    assert run_id == warm.latest.name and warm.record()["state"] in ("PENDING", "RUNNING") and warm.record()["detached"] is True
    eventually((warm.node_dir / "runs" / run_id / "run.exit").exists)
    assert not list(warm.latest.glob("outputs/*")) and "detached" in warm.gpurun("status").stdout.decode()
    (path.parent / "data").unlink()                                # nothing here is needed any more
    done = warm.gpurun("attach", run_id)
    assert done.returncode == 4 and done.stdout == b"from the workspace\n" and b"set\n" in done.stderr
    record = warm.record()
    assert (record["state"], record["exit_code"], record["outputs"], record["logs_complete"]) == ("FAILED", 4, ["made"], True)
    assert (warm.latest / "outputs/made").read_text() == "out\n"


def test_run_detach_is_submit_and_json_ends_with_the_record(warm):
    done = warm.gpurun("run", "--detach", warm.job("exit 0", name="detached"), "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and (last["type"], last["run_id"], last["detached"], last["driven"]) == ("run", warm.latest.name, True, False)
    assert warm.gpurun("wait", "latest").returncode == 0


def test_submit_to_a_busy_node_returns_and_the_run_has_its_turn(warm):
    first = submit(warm, warm.job(f"{until(warm, 'busy')}; echo first", name="busy"))
    second = submit(warm, warm.job("echo second", name="queued"))
    assert not on_node(warm, second, "run.out")
    go(warm, "busy")
    done = warm.gpurun("wait", second, first)
    assert done.returncode == 0 and [line.split()[:2] for line in done.stdout.decode().splitlines()] == [[second, "COMPLETED"], [first, "COMPLETED"]]
    assert (warm.runs / second / "stdout.log").read_text() == "second\n" and (warm.runs / first / "stdout.log").read_text() == "first\n"


def test_a_job_that_can_not_be_sent_is_no_submit(warm):
    (warm.work / "gone").mkdir()
    path = warm.job("true", name="nothere", folder=warm.work / "gone", workspace={"workdir": "missing"})
    done = warm.gpurun("submit", path)
    assert done.returncode == 2 and done.stdout == b"" and b"missing" in done.stderr


# ---- attach: nobody drives the run -----------------------------------------------------------------------------------------------------

def test_attach_shows_all_from_the_beginning_then_live_then_collects(warm):
    run_id = submit(warm, warm.job(f"echo one; echo err >&2; {until(warm, 'live')}; echo two; echo x > x", name="live", setup="echo set", outputs=["x"]))
    eventually(lambda: on_node(warm, run_id, "run.out") == "one\n")
    run = Running(warm, "attach", run_id)
    run.until("one")
    says(run, "err\n")
    assert run.process.poll() is None and "set\n" in run.err
    go(warm, "live")
    assert run.end() == 0 and run.out == "one\ntwo\n" and "COMPLETED" in run.err
    assert (warm.latest / "outputs/x").read_text() == "x\n" and (warm.latest / "stdout.log").read_text() == "one\ntwo\n"


def test_a_tail_whose_agent_is_killed_goes_on_where_it_was(warm):
    run_id = submit(warm, warm.job(f"seq 9; {until(warm, 'more')}; echo 10; {until(warm, 'torn')}; echo end", name="torn"))
    eventually(lambda: on_node(warm, run_id, "run.out").endswith("9\n"))
    run = Running(warm, "attach", run_id, "--tail", "1")
    eventually(lambda: run.out == "9\n")
    go(warm, "more")
    eventually(lambda: run.out == "9\n10\n")
    os.kill(warm.agent()["pid"], signal.SIGKILL)
    says(run, "is back after")
    go(warm, "torn")
    assert run.end() == 0 and run.out == "9\n10\nend\n"
    assert (warm.runs / run_id / "stdout.log").read_text() == "".join(f"{number}\n" for number in range(1, 11)) + "end\n"


@pytest.mark.parametrize("option, shown", [(("--tail", "2"), "9\n10\nend\n"), (("--since-here",), "end\n"), (("--tail", "0"), "end\n")])
def test_attach_with_a_tail_shows_less_and_keeps_all(warm, option, shown):
    name = "tail" + option[-1].strip("-")
    run_id = submit(warm, warm.job(f"seq 10; {until(warm, name)}; echo end", name=name))
    eventually(lambda: on_node(warm, run_id, "run.out").endswith("10\n"))
    run = Running(warm, "attach", run_id, *option)
    eventually(lambda: warm.gpurun("status", run_id, "--json").stdout.find(b'"driven": true') > 0)
    says(run, "run: on local")
    if option[-1] == "2":
        run.until("10")
    else:
        eventually(lambda: followed(warm, run_id) == 2)            # for what is shown, and for what is kept
    go(warm, name)
    assert run.end() == 0 and run.out == shown
    assert (warm.latest / "stdout.log").read_text() == "".join(f"{i}\n" for i in range(1, 11)) + "end\n" and warm.record()["logs_complete"]


def test_attach_after_the_driver_was_killed_shows_every_byte_once(warm):
    run = Running(warm, warm.job(f"for i in $(seq 200); do echo $i; sleep 0.01; done; {until(warm, 'killed')}; echo end; exit 9", name="killed"))
    run.until("20")
    run.signal(signal.SIGKILL).process.wait(10)
    go(warm, "killed")
    done = warm.gpurun("attach", "latest")
    assert done.returncode == 9 and done.stdout.decode() == "".join(f"{i}\n" for i in range(1, 201)) + "end\n"
    assert (warm.latest / "stdout.log").read_bytes() == done.stdout


def test_attach_to_a_settled_run_shows_it_and_exits_as_it_did(warm):
    warm.gpurun(warm.job("seq 5; exit 7", name="settled", setup="echo set"))
    before = warm.record()
    done = warm.gpurun("attach", "latest")
    assert done.returncode == 7 and done.stdout == b"1\n2\n3\n4\n5\n" and b"set\n" in done.stderr and warm.record() == before
    assert warm.gpurun("attach", "latest", "--tail", "1").stdout == b"5\n" and warm.gpurun("attach", "latest", "--since-here").stdout == b""
    assert warm.result("attach", "latest")["state"] == "FAILED"


def test_attach_to_a_settled_run_brings_the_end_of_its_logs_if_that_is_not_here(warm):
    warm.gpurun(warm.job("seq 1000; exit 7", name="cut"))
    path = warm.latest / "run.json"
    os.truncate(warm.latest / "stdout.log", 500)                    # as if the disk here had been full
    path.write_text(json.dumps(dict(json.loads(path.read_text()), logs_complete=False)))
    done = warm.gpurun("attach", "latest")
    assert done.returncode == 7 and done.stdout.decode() == "".join(f"{i}\n" for i in range(1, 1001)) and warm.record()["logs_complete"] is True


def test_twenty_submits_side_by_side_all_land_once(warm):
    path = warm.job("echo $GPURUN_RUN_ID >> $HOME/landed; exit 0", name="twenty")
    processes = [warm.start("submit", path) for _ in range(20)]
    ids = [process.communicate(timeout=120)[0].decode().strip() for process in processes]
    assert len(set(ids)) == 20 and all(process.returncode == 0 for process in processes)
    done = warm.gpurun("wait", *ids)
    assert done.returncode == 0 and sorted((warm.home / "landed").read_text().split()) == sorted(ids)


def test_attach_to_a_run_that_no_node_got_says_so_and_closes_it(warm):
    warm.gpurun(warm.job("exit 0", name="unsent"))
    path = warm.latest / "run.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), state="PENDING", phase="", exit_code=None, node={"kind": "local"}, fsm={}, node_dir="")))
    done = warm.gpurun("attach", "latest")
    assert done.returncode == 125 and b"never came to a node" in done.stderr and b"run the job again" in done.stderr
    assert warm.record()["state"] == "FAILED" and warm.gpurun("attach", "latest").returncode == 125


def test_attach_where_the_cluster_file_is_gone_says_what_to_do(warm):
    run_id = submit(warm, warm.job("exit 0", name="moved"))
    path = warm.latest / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(dict(record, node=dict(record["node"], cluster=str(warm.work / "no.toml")))))
    done = warm.gpurun("attach", run_id)
    assert done.returncode == 2 and b"no.toml" in done.stderr and b"--cluster" in done.stderr
    (warm.work / "other.toml").write_text('[provider]\nkind = "local"\n')
    assert warm.gpurun("attach", run_id, "--cluster", "other.toml").returncode == 0


def test_the_job_file_is_read_again_only_if_it_says_the_same(warm):
    from gpurun.attaching import job_again
    from gpurun.records import RunFolder
    path = warm.job("echo $A", name="again", folder=warm.work / "again", env={"A": "${AGAIN}"}, workspace={"workdir": ".", "exclude": ["*.tmp"]})
    warm.gpurun(path, env=dict(warm.env, AGAIN="secret"))
    record = RunFolder(str(warm.latest)).load()
    job, lacking = job_again(record, {"AGAIN": "other"})
    assert not lacking and job.env == {"A": "other"} and job.workdir == str(path.parent)
    for content in (path.read_text().replace("echo", "printf"), path.read_text().replace("*.tmp", "*.log"), path.read_text().replace('"A"', '"B"')):
        kept = path.read_text()
        path.write_text(content)
        job, lacking = job_again(record, {"AGAIN": "other"})
        assert lacking and job.env == {} and job.run == "echo $A" and job.exclude == ("*.tmp",)
        path.write_text(kept)
    assert "$AGAIN" in job_again(record, {})[1]
    path.unlink()
    assert str(path) in job_again(record, {"AGAIN": "x"})[1]


# ---- attach: another process drives it ---------------------------------------------------------------------------------------------------

def test_two_watch_one_run(warm):
    run = Running(warm, warm.job(f"echo one; {until(warm, 'both')}; echo two; exit 5", name="both", outputs=["x"]))
    run.until("one")
    other = Running(warm, "attach", "latest")
    other.until("one")
    go(warm, "both")
    assert run.end() == other.end() == 5 and run.out == other.out == "one\ntwo\n" and "drives" in other.err


def test_a_watcher_takes_the_run_over_when_its_driver_dies(warm):
    run = Running(warm, warm.job(f"for i in $(seq 100); do echo $i; sleep 0.01; done; {until(warm, 'heir')}; echo end; exit 6", name="heir", outputs=["x"]))
    run.until("10")
    other = Running(warm, "attach", "latest")
    other.until("20")
    run.signal(signal.SIGKILL).process.wait(10)
    other.until("100")
    go(warm, "heir")
    assert other.end() == 6 and other.out == "".join(f"{i}\n" for i in range(1, 101)) + "end\n"
    assert warm.record()["state"] == "FAILED" and (warm.latest / "stdout.log").read_text() == other.out


def test_ctrl_c_of_a_watcher_without_a_terminal_stops_the_run_and_hup_leaves(warm):
    run = Running(warm, warm.job("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done", name="watched"))
    run.until("up")
    leaver, other = Running(warm, "attach", "latest"), Running(warm, "attach", "latest")
    leaver.until("up")
    other.until("up")
    assert leaver.signal(signal.SIGHUP).end() == 130 and "goes on" in leaver.err and run.process.poll() is None
    other.signal(signal.SIGINT)
    assert other.end() == 130 and run.end() == 130 and other.out == "up\nbye\n" and gone(warm.latest.name)


def on_a_terminal(warm, *args):
    """gpurun on a terminal of its own: its process id and the terminal."""
    env = dict({name: value for name, value in warm.env.items() if name != "CI"}, TERM="xterm")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(warm.work)
        os.execve(sys.executable, [sys.executable, "-m", "gpurun", *args], env)
    return pid, terminal


def read_until(terminal: int, text: bytes, got: bytes = b"") -> bytes:
    while text not in got:
        assert select.select([terminal], [], [], 60)[0], got
        got += os.read(terminal, 65536)
    return got


@pytest.mark.parametrize("key, code, said", [("g", 5, b"FAILED"), ("d", 130, b"left"), ("s", 130, b"stopped by the operator")])
def test_ctrl_c_of_a_watcher_on_a_terminal_asks(warm, key, code, said):
    run = Running(warm, warm.job(f"trap 'exit 0' TERM; echo up; {until(warm, 'asks' + key)}; exit 5", name="asks" + key))
    run.until("up")
    pid, terminal = on_a_terminal(warm, "attach", "latest")
    read_until(terminal, b"up\r\n")
    os.write(terminal, b"\x03")
    got = read_until(terminal, b"go on watching")
    os.write(terminal, key.encode())
    if key == "g":
        go(warm, "asksg")
    while True:
        try:
            got += os.read(terminal, 65536)
        except OSError:
            break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code and said in got and b"Traceback" not in got
    if key == "d":
        assert run.process.poll() is None
        go(warm, "asksd")
    assert run.end() == (130 if key == "s" else 5)


# ---- wait ----------------------------------------------------------------------------------------------------------------------------------

def test_wait_gives_the_first_exit_code_that_is_not_0_in_the_order_given(warm):
    ids = [submit(warm, warm.job(f"exit {code}", name=f"code{code}", outputs=["x"])) for code in (0, 3, 4)]
    done = warm.gpurun("wait", ids[2], ids[0], ids[1])
    assert done.returncode == 4 and [line.split()[0] for line in done.stdout.decode().splitlines()] == [ids[2], ids[0], ids[1]]
    assert warm.gpurun("wait", ids[0]).returncode == 0 and warm.gpurun("wait", ids[1], ids[0]).returncode == 3
    objects = [json.loads(line) for line in warm.gpurun("wait", ids[0], "--json").stdout.splitlines()]
    assert objects[-1]["type"] == "run" and objects[-1]["exit_code"] == 0


def test_wait_with_a_timeout_ends_with_124_and_the_run_goes_on(warm):
    run_id = submit(warm, warm.job(f"{until(warm, 'late')}; exit 3", name="late"))
    began = time.monotonic()
    done = warm.gpurun("wait", run_id, "--timeout", "1s")
    assert done.returncode == 124 and b"goes on" in done.stderr and done.stdout == b"" and time.monotonic() - began < 60
    driver = Running(warm, "attach", run_id)
    eventually(lambda: b'"driven": true' in warm.gpurun("status", run_id, "--json").stdout)
    done = warm.gpurun("wait", run_id, "--timeout", "0.5")          # another process drives it
    assert done.returncode == 124 and b"goes on" in done.stderr
    go(warm, "late")
    assert driver.end() == 3 and warm.gpurun("wait", run_id, "--timeout", "1m").returncode == 3


def test_ctrl_c_ends_the_waiting_and_nothing_else(warm):
    run_id = submit(warm, warm.job(f"{until(warm, 'patient')}; exit 3", name="patient"))
    run = Running(warm, "wait", run_id)
    says(run, "run: on local")
    assert run.signal(signal.SIGINT).end() == 130 and "goes on" in run.err
    go(warm, "patient")
    assert warm.gpurun("wait", run_id).returncode == 3


@pytest.mark.parametrize("value", ["", "x", "-1", "1w", "10ms", "nan", "1e9d"])
def test_a_timeout_that_is_no_time(warm, value):
    done = warm.gpurun("wait", "latest", "--timeout", value)
    assert done.returncode == 2 and b"10m" in done.stderr


# ---- logs ----------------------------------------------------------------------------------------------------------------------------------

def test_logs_brings_what_is_on_the_node_and_fetches_nothing_twice(warm):
    run_id = submit(warm, warm.job(f"seq 1000; echo err >&2; {until(warm, 'logs')}; echo end", name="logs", setup="echo set; echo warn >&2"))
    eventually(lambda: "err" in on_node(warm, run_id, "run.err"))
    done = warm.gpurun("logs", run_id)
    assert done.returncode == 0 and done.stdout.decode() == "".join(f"{i}\n" for i in range(1, 1001)) and done.stderr.startswith(b"err\n")
    assert b"so far" in done.stderr and (warm.runs / run_id / "stdout.log").read_bytes() == done.stdout
    assert warm.gpurun("logs", run_id, "--tail", "2").stdout == b"999\n1000\n"
    done = warm.gpurun("logs", run_id, "--setup")
    assert done.stdout == b"set\n" and done.stderr.startswith(b"warn\n")
    assert warm.record()["state"] in ("PENDING", "RUNNING") and not gone(run_id)
    go(warm, "logs")
    eventually((warm.node_dir / "runs" / run_id / "run.exit").exists)
    assert warm.gpurun("logs", run_id).stdout.endswith(b"1000\nend\n")
    attached = warm.gpurun("attach", run_id)
    assert attached.returncode == 0 and attached.stdout.endswith(b"1000\nend\n") and attached.stdout.count(b"\n") == 1001


def test_a_tail_of_a_run_on_the_node_brings_only_the_tail(warm):
    run_id = submit(warm, warm.job(f"seq 200000; {until(warm, 'short')}", name="short"))
    eventually(lambda: on_node(warm, run_id, "run.out").endswith("200000\n"))
    assert warm.gpurun("logs", run_id, "--tail", "3").stdout == b"199998\n199999\n200000\n"
    assert not (warm.runs / run_id / "stdout.log").exists()
    go(warm, "short")
    assert warm.gpurun("wait", run_id).returncode == 0


@pytest.mark.parametrize("tail", [(), ("--tail", "1")])
def test_logs_f_goes_on_until_the_run_has_ended_and_stops_nothing(warm, tail):
    name = f"follow{len(tail)}"
    run_id = submit(warm, warm.job(f"echo one; echo two; {until(warm, name)}; echo three; exit 3", name=name, outputs=["x"]))
    eventually(lambda: on_node(warm, run_id, "run.out") == "one\ntwo\n")
    first, second = Running(warm, "logs", "-f", run_id, *tail), Running(warm, "logs", "-f", run_id, *tail)
    first.until("two")
    second.until("two")
    assert first.signal(signal.SIGINT).end() == 130 and not gone(run_id)
    go(warm, name)
    assert second.end() == 0 and second.out == ("two\nthree\n" if tail else "one\ntwo\nthree\n")
    assert warm.record()["state"] != "FAILED" and warm.gpurun("attach", run_id).stdout == b"one\ntwo\nthree\n"


def test_logs_f_goes_on_with_a_run_whose_driver_went(warm):
    run = Running(warm, warm.job(f"seq 50; {until(warm, 'widow')}; echo end", name="widow"))
    run.until("50")
    reader = Running(warm, "logs", "-f", "latest")
    reader.until("50")
    run.signal(signal.SIGKILL).process.wait(10)
    time.sleep(1)                                                  # until the reader has found another way; nothing says so
    go(warm, "widow")
    assert reader.end() == 0 and reader.out == "".join(f"{i}\n" for i in range(1, 51)) + "end\n"
    assert warm.gpurun("wait", "latest").returncode == 0


def test_logs_f_survives_the_loss_of_the_agent(here):
    done = here.gpurun("submit", here.job(f"echo zero; {until(here, 'first')}; echo one; {until(here, 'agent')}; echo two", name="agent"))
    run_id = done.stdout.decode().strip()
    reader = Running(here, "logs", "-f", run_id)
    reader.until("zero")
    go(here, "first")
    reader.until("one")                                            # came live
    os.kill(here.agent()["pid"], signal.SIGKILL)
    says(reader, "broke")
    says(reader, "is back")
    go(here, "agent")
    assert reader.end() == 0 and reader.out == "zero\none\ntwo\n" and "is back" in reader.err


def test_logs_of_a_run_whose_node_is_gone_shows_what_is_here(here):
    folder = here.work / "far"
    folder.mkdir()
    (folder / "cluster.toml").write_text(f'[provider]\nkind = "local"\nnode_dir = {toml(str(here.folder / "node"))}\npython = "/none/python"\n')
    done = here.gpurun("submit", here.job("echo one; sleep 300", name="far"))
    run_id = done.stdout.decode().strip()
    eventually(lambda: here.gpurun("logs", run_id).stdout == b"one\n")
    done = here.gpurun("logs", run_id, "--cluster", "far/cluster.toml")
    assert done.returncode == 0 and done.stdout == b"one\n" and b"can't be asked" in done.stderr
    assert here.gpurun("stop", run_id, "--grace", "0").returncode == 0


def test_a_reader_that_has_had_enough_ends_logs_quietly(warm):
    warm.gpurun(warm.job("seq 100000", name="enough"))
    for args in (("logs", "latest"), ("logs", "-f", "latest"), ("logs", "latest", "--json"), ("attach", "latest")):
        reader, writer = os.pipe()
        os.close(reader)
        done = warm.gpurun(*args, stdout=writer)
        os.close(writer)
        assert done.returncode == 0 and b"error" not in done.stderr and b"warning" not in done.stderr, args


def test_values_of_env_that_went_with_the_agent_are_asked_for_and_attach_brings_them(here):
    here.env["TOKEN"] = "t0ken"
    path = here.job(f"echo $TOKEN > out; {until(here, 'env')}; exit 5", name="env", setup=f"echo up; {until(here, 'env')}", outputs=["out"],
                    env={"TOKEN": "${TOKEN}"})
    run_id = submit(here, path)
    eventually(lambda: on_node(here, run_id, "setup.out") == "up\n")
    os.kill(here.agent()["pid"], signal.SIGKILL)
    del here.env["TOKEN"]
    done = here.gpurun("attach", run_id)
    assert done.returncode == 125 and b"TOKEN" in done.stderr and b"attach again" in done.stderr and b"job.env" in done.stderr
    record = json.loads((here.runs / run_id / "run.json").read_text())
    assert (record["state"], record["phase"], record["exit_code"]) == ("RUNNING", "setup", None)
    go(here, "env")
    here.env["TOKEN"] = "t0ken"
    assert here.gpurun("attach", run_id).returncode == 5
    assert (here.runs / run_id / "outputs/out").read_text() == "t0ken\n"
    assert here.gpurun("stop", run_id).returncode == 0 and here.gpurun("attach", run_id).returncode == 5


# ---- from elsewhere --------------------------------------------------------------------------------------------------------------------------

def test_with_another_key_nothing_is_learned_and_the_record_stays_as_it_is(here):
    run_id = submit(here, here.job(f"echo up; {until(here, 'elsewhere')}; exit 4", name="elsewhere", outputs=["x"]))
    eventually(lambda: on_node(here, run_id, "run.out") == "up\n")
    record, key = here.runs / run_id / "run.json", here.home / ".config/gpurun/key"
    before, own = record.read_text(), key.read_bytes()
    key.unlink()
    for command in ("attach", "stop", "wait"):
        done = here.gpurun(command, run_id)
        assert done.returncode == 125 and b"another key" in done.stderr, done.stderr
        now = json.loads(record.read_text())
        assert {name: now[name] for name in ("state", "phase", "reason", "fsm", "times")} == {
            name: json.loads(before)[name] for name in ("state", "phase", "reason", "fsm", "times")}
    key.write_bytes(own)
    go(here, "elsewhere")
    assert here.gpurun("attach", run_id).returncode == 4
