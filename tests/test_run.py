"""A run from start to end, by the real command on this machine: exit codes, steps, environment, claims, the result and the record."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import eventually

from gpurun import supervise
from gpurun.messages import MaterializeWorkspace
from gpurun.noderun import NodeRun
from gpurun.store import Store

RESULT_KEYS = {"type", "run_id", "state", "exit_code", "reason", "node", "outputs_dir", "outputs", "missing", "seconds"}


def text(data: bytes) -> str:
    return data.decode(errors="replace")


def content(file: Path) -> bytes:
    """b"" of one that has gone meanwhile: a record's next version has its name for a moment."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


# ---- exit codes --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [0, 1, 2, 3, 126, 127, 137, 255])
def test_the_jobs_exit_code_is_gpuruns(warm, code):
    done = warm.gpurun(warm.job(f"exit {code}"))
    assert done.returncode == code
    assert warm.record()["exit_code"] == code and warm.record()["state"] == ("COMPLETED" if code == 0 else "FAILED")


@pytest.mark.parametrize("name", ["TERM", "KILL", "SEGV"])
def test_death_by_a_signal_is_128_and_its_number(warm, name):
    result = warm.result(warm.job(f"kill -{name} $$"))
    assert result["exit_code"] == 128 + getattr(signal, f"SIG{name}") and f"SIG{name}" in result["reason"]
    assert ("out of memory" in result["reason"] or "lack of memory" in result["reason"]) == (name == "KILL")


def test_137_from_a_shell_whose_child_was_killed_has_the_hint_too(warm):
    assert "memory" in warm.result(warm.job("bash -c 'kill -KILL $$'"))["reason"]


@pytest.mark.parametrize("script, code", [
    ("false; true", 0), ("false\ntrue", 0), ("set -e\nfalse\ntrue", 1), ("false | tee log", 0), ("set -o pipefail\nfalse | tee log", 1),
    ("no-such-command-here", 127), ("touch f; ./f", 126)])
def test_the_script_means_what_it_means_to_bash(warm, script, code):
    assert warm.gpurun(warm.job(script)).returncode == code == subprocess.run(
        ["bash", "-c", script], cwd=warm.folder, capture_output=True).returncode


def test_a_script_with_windows_line_ends_runs(warm):
    path = warm.job("x")
    path.write_bytes(b'[job]\r\nname = "crlf"\r\nrun = """\r\nif true; then\r\n  echo ok\r\nfi\r\n"""\r\n')
    done = warm.gpurun(path)
    assert (done.returncode, done.stdout) == (0, b"ok\n")


# ---- setup, workspace, outputs --------------------------------------------------------------------------------------------------------

def test_a_failed_setup_is_the_result_and_outputs_come_home(warm):
    done = warm.gpurun(warm.job("touch ran", setup="echo one > log.txt; echo the reason >&2; exit 4", outputs=["log.txt", "ran"]))
    assert done.returncode == 4 and b"the reason" in done.stderr and done.stdout == b""
    record = warm.record()
    assert (record["state"], record["exit_code"], record["reason"]) == ("FAILED", 4, "setup exited 4")
    assert (record["outputs"], record["missing"]) == (["log.txt"], ["ran"])
    assert (warm.latest / "outputs/log.txt").read_text() == "one\n" and not (warm.latest / "outputs/ran").exists()
    assert "RunJob" not in [command for event in warm.events() for command in event.get("command", ())]


def test_setup_output_is_talk_and_has_a_log_of_its_own(warm):
    done = warm.gpurun(warm.job("echo job", setup="echo out; echo err >&2"))
    assert done.stdout == b"job\n" and b"out\n" in done.stderr and b"err\n" in done.stderr
    assert (warm.latest / "setup-stdout.log").read_bytes() == b"out\n" and (warm.latest / "setup-stderr.log").read_bytes() == b"err\n"
    assert (warm.latest / "stdout.log").read_bytes() == b"job\n"


def test_a_blank_setup_is_none(warm):
    assert warm.gpurun(warm.job("echo hi", setup=" \n ")).returncode == 0
    assert "setup" not in [event.get("to_phase") for event in warm.events()]


def test_without_a_workspace_the_job_starts_in_an_empty_folder(warm):
    assert warm.gpurun(warm.job("ls -A; echo done")).stdout == b"done\n"


def test_the_workspace_is_there_for_setup_and_job(warm):
    folder = warm.work / "with workspace"
    path = warm.job("cat b.txt sub/a.txt", folder=folder, setup="cp sub/a.txt b.txt", workspace={"workdir": "."})
    (folder / "sub").mkdir()
    (folder / "sub/a.txt").write_text("A\n")
    assert warm.gpurun(path).stdout == b"A\nA\n"
    assert not (folder / "b.txt").exists()


def test_missing_outputs_are_listed_and_change_nothing(warm):
    result = warm.result(warm.job("mkdir d; echo 1 > d/x", outputs=["d", "nothing", "no/where"]))
    assert (result["state"], result["exit_code"], result["outputs"], sorted(result["missing"])) == ("COMPLETED", 0, ["d"], ["no/where", "nothing"])
    assert (Path(result["outputs_dir"]) / "d/x").read_text() == "1\n"
    result = warm.result(warm.job("exit 5", outputs=["nothing"]))
    assert (result["state"], result["exit_code"], result["missing"]) == ("FAILED", 5, ["nothing"])


def test_outputs_of_a_failed_job_come_home(warm):
    result = warm.result(warm.job("echo 1 > x; exit 9", outputs=["x"]))
    assert (result["exit_code"], result["outputs"]) == (9, ["x"]) and (Path(result["outputs_dir"]) / "x").read_text() == "1\n"


def test_odd_names_of_folder_job_and_outputs(warm):
    folder = warm.work / "ü 'q\" $(x) \n n"
    path = warm.job("cat '-i n'; echo x > \"ö '\"", name="A.b_c-9", folder=folder, workspace={"workdir": "."}, outputs=["ö '"])
    (folder / "-i n").write_text("in\n")
    result_line = warm.gpurun(path, "--json", cwd=folder)
    result = json.loads(result_line.stdout.splitlines()[-1])
    assert result["state"] == "COMPLETED" and result["outputs"] == ["ö '"]
    assert (folder / "gpurun-runs" / result["run_id"] / "outputs/ö '").read_text() == "x\n"


# ---- environment ----------------------------------------------------------------------------------------------------------------------

def test_env_reaches_setup_and_job_and_its_values_are_nowhere(warm):
    secret = "s3cr3t-7f41"
    path = warm.job('ps -eo args | grep "$(echo 7f41)" | grep -v grep; echo "$TOKEN $PLAIN $LIT"; touch up; while [ ! -e "$GO" ]; do sleep 0.02; done',
                    setup='echo "setup $TOKEN"', outputs=["up"],
                    env={"TOKEN": "${MY_TOKEN}", "PLAIN": "p q", "LIT": "$${X}", "GO": str(warm.work / "go")})
    process = warm.start(path, env=dict(warm.env, MY_TOKEN=secret))
    work = lambda: next((warm.node_dir / "runs").glob(f"{warm.latest.name}/work/up"), None)
    eventually(lambda: warm.runs.exists() and (warm.latest / "stdout.log").exists() and work())
    argv = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    run_dir = work().parent.parent
    on_disk = [file for root in (warm.latest, run_dir, warm.node_dir / "agent", warm.home / ".config") for file in root.rglob("*") if file.is_file()]
    with_value = {file.name for file in on_disk if secret.encode() in content(file)}
    (warm.work / "go").touch()
    out, err = process.communicate(timeout=60)
    assert out == f"{secret} p q ${{X}}\n".encode() and f"setup {secret}".encode() in err
    assert secret not in argv
    # What the job itself prints is in its logs: these are the user's. gpurun's own files have names only.
    assert with_value <= {"stdout.log", "setup-stdout.log", "run.out", "setup.out"}
    assert warm.record()["job"]["env"] == ["GO", "LIT", "PLAIN", "TOKEN"]


def test_what_a_job_finds_in_its_environment(warm):
    done = warm.gpurun(warm.job('echo "$GPURUN_RUN_ID $GPURUN_JOB $GPURUN_OUTPUTS $PYTHONUNBUFFERED"; pwd; umask', name="envs"))
    first, pwd, umask = done.stdout.decode().splitlines()
    assert first == f"{warm.latest.name} envs {pwd} 1" and Path(pwd).parent.name == warm.latest.name and umask == "0022"
    done = warm.gpurun(warm.job("echo $PYTHONUNBUFFERED", env={"PYTHONUNBUFFERED": "no"}))
    assert done.stdout == b"no\n", text(done.stderr)


def test_the_operators_own_variables_do_not_leak(warm):
    assert warm.gpurun(warm.job('echo "[$ONLY_HERE]"'), env=dict(warm.env, ONLY_HERE="x")).stdout == b"[]\n"


def test_an_unset_variable_is_an_error_before_anything_is_sent(here):
    done = here.gpurun(here.job("true", env={"A": "${NOT_SET_ANYWHERE}"}))
    assert done.returncode == 2 and b"NOT_SET_ANYWHERE" in done.stderr and not here.runs.exists() and not here.node_dir.exists()


# ---- descriptors and leftovers -----------------------------------------------------------------------------------------------------------

def test_a_job_that_reads_stdin_gets_the_end_of_file(warm):
    reader = warm.start(warm.job("cat; echo read"), stdin=subprocess.PIPE)   # gpurun's own stdin stays open and silent
    assert reader.stdout.read() == b"read\n" and reader.wait(30) == 0
    reader.communicate()


def test_a_loop_that_reads_lines_keeps_its_stdin(warm):
    path = warm.job("cat; echo ran")
    script = f"printf 'a\\nb\\nc\\n' | while read line; do {sys.executable} -m gpurun {path} --quiet; done"
    assert subprocess.run(["bash", "-c", script], cwd=warm.work, env=warm.env, capture_output=True).stdout == b"ran\n" * 3


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_change_nothing(warm, closed):
    path = warm.job("echo out; echo err >&2; echo 1 > x; exit 6", outputs=["x"])
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m gpurun {path} {closed}"], cwd=warm.work, env=warm.env, capture_output=True)
    assert done.returncode == 6 and b"Traceback" not in done.stderr
    assert (warm.latest / "stdout.log").read_bytes() == b"out\n" and (warm.latest / "stderr.log").read_bytes() == b"err\n"
    assert (warm.latest / "outputs/x").read_text() == "1\n" and warm.record()["state"] == "FAILED"


def test_what_a_job_leaves_running_is_ended_and_said(warm):
    result = warm.result(warm.job("sleep 4711 & setsid sleep 4712 & echo $$", outputs=[]))
    assert result["exit_code"] == 0 and "2 processes that it left running were ended" in result["reason"]
    assert not supervise.of_run(warm.latest.name)


def test_a_leftover_that_holds_the_output_open_does_not_hold_the_run(warm):
    done = warm.gpurun(warm.job("(trap '' TERM; while :; do sleep 0.05; done) & echo bye"), timeout=30)
    assert done.stdout == b"bye\n" and not supervise.of_run(warm.latest.name)


@pytest.mark.parametrize("script, code", [("kill -TERM $PPID; sleep 60", 143), ("trap 'exit 0' TERM; kill -TERM $PPID; sleep 60 & wait", 143),
                                          ("trap 'exit 7' TERM; kill -TERM $PPID; sleep 60 & wait", 7)])
def test_a_supervisor_that_something_on_the_node_ended_is_a_failure_and_no_stop(warm, script, code):
    result = warm.result(warm.job(script), timeout=30)
    assert (result["state"], result["exit_code"]) == ("FAILED", code)
    assert "something on the node ended its supervisor" in result["reason"] and "operator" not in result["reason"]
    assert not supervise.of_run(warm.latest.name)


def test_a_job_that_deletes_its_own_folder_is_told_so(warm):
    result = warm.result(warm.job('rm -rf "$(dirname "$GPURUN_OUTPUTS")"; exit 3'), timeout=30)
    folder = warm.node_dir / "runs" / warm.latest.name
    assert result["exit_code"] == 125 and not folder.exists()
    assert f"the run's folder {folder} was deleted on the node while the run ran: how it ended isn't known" in result["reason"]
    assert warm.gpurun(warm.job("echo next")).stdout == b"next\n"


def test_nothing_is_left_of_a_job_when_the_end_of_its_supervisor_is_reported(warm):
    """Not the ones that ignore TERM, nor those with another environment."""
    mark = f"4721.{os.getpid()}"
    script = (f"trap '' TERM; env -i sleep {mark}1 & env -i setsid sleep {mark}2 & sleep 0.2; kill -KILL $PPID; "
              "while :; do sleep 0.05; done")
    done = warm.gpurun(warm.job(script), timeout=40)
    assert done.returncode == 125 and b"left no exit record" in done.stderr, text(done.stderr)
    assert not subprocess.run(["pgrep", "-f", f"^sleep {mark}"], capture_output=True).stdout
    assert not supervise.of_run(warm.latest.name)


def test_a_damaged_cache_costs_a_push_and_no_run(warm):
    folder = warm.work / "damaged"
    path = warm.job("cat data", folder=folder, workspace={"workdir": "."})
    (folder / "data").write_bytes(b"the right bytes\n")
    assert warm.gpurun(path).stdout == b"the right bytes\n"
    cache = warm.node_dir / "cache"
    content, = (one for one in (cache / "contents").glob("*/*") if one.read_bytes() == b"the right bytes\n")
    tree = max((cache / "trees").iterdir(), key=lambda one: one.stat().st_mtime_ns)

    def overwrite(one):
        one.chmod(0o600)
        one.write_bytes(bytes(one.stat().st_size))

    for damage in (lambda: overwrite(content), lambda: overwrite(tree), lambda: shutil.rmtree(cache / "contents"), lambda: shutil.rmtree(cache)):
        damage()
        done = warm.gpurun(path)
        assert done.stdout == b"the right bytes\n", text(done.stderr)


def test_a_tree_that_is_gone_after_its_push_is_a_fault_and_holds_no_node(tmp_path):
    run = NodeRun.create(Store(str(tmp_path / "node")), "r", "job", "operator", "name", 1, 20, supervisors=None, slurm=None, environment=dict, ended=lambda _: None)
    run.tree_arrived("0" * 64)
    run.handle(MaterializeWorkspace("r", "0" * 64))
    run.begin()
    assert run.wait_over(20) and "run again" in run.events[-1].reason


# ---- claims --------------------------------------------------------------------------------------------------------------------------------

def holder(warm, name="holder"):
    """A run that has the node until `name`.go exists."""
    process = warm.start(warm.job(f"echo up; while [ ! -e {warm.work}/{name}.go ]; do sleep 0.02; done", name=name))
    assert process.stdout.readline() == b"up\n"
    return process, warm.latest.name


def test_a_busy_node_names_the_run_and_wait_waits_in_order(warm):
    first, run_id = holder(warm)
    done = warm.gpurun(warm.job("echo no", name="refused"))
    assert done.returncode == 125 and run_id.encode() in done.stderr and b"--wait" in done.stderr
    assert warm.record()["state"] == "FAILED" and run_id in warm.record()["reason"]
    assert not (warm.node_dir / "runs" / warm.latest.name).exists()

    waiting = []
    for name in ("second", "third"):
        waiting.append(warm.start(warm.job(f"echo {name} >> {warm.work}/order; echo {name}", name=name), "--wait"))
        line = next(line for line in iter(waiting[-1].stderr.readline, b"") if b"busy" in line)
        assert run_id.encode() in line
    (warm.work / "holder.go").touch()
    assert first.wait(30) == 0
    assert [process.communicate(timeout=30)[0] for process in waiting] == [b"second\n", b"third\n"]
    assert [process.returncode for process in waiting] == [0, 0]
    assert (warm.work / "order").read_text() == "second\nthird\n"
    first.communicate()


def test_runs_at_the_same_time_share_nothing(warm):
    jobs = [warm.job(f"cat in; pwd; sleep 0.1; echo {name} > out", name=name, folder=warm.work / name, workspace={"workdir": "."}, outputs=["out"])
            for name in ("p1", "p2", "p3")]
    for job in jobs:
        (job.parent / "in").write_text(job.stem + "\n")
    processes = [warm.start(job, "--wait", "--json") for job in jobs]
    workdirs = set()
    for name, process in zip(("p1", "p2", "p3"), processes):
        out, _ = process.communicate(timeout=60)
        objects = [json.loads(line) for line in out.splitlines()]
        printed = "".join(item["text"] for item in objects if item["type"] == "stdout").splitlines()
        assert printed[0] == name and objects[-1]["exit_code"] == 0
        assert (Path(objects[-1]["outputs_dir"]) / "out").read_text() == name + "\n"
        workdirs.add(printed[1])
    assert len(workdirs) == 3


# ---- the result and the record -------------------------------------------------------------------------------------------------------------

def test_the_result_object_has_these_keys(warm):
    result = warm.result(warm.job("echo 1 > x", setup="true", workspace={"workdir": "."}, folder=warm.work / "keys", outputs=["x"]))
    assert set(result) == RESULT_KEYS and set(result["seconds"]) == {"push", "setup", "run", "collect", "total"}
    assert result["node"] == "local" and result["outputs_dir"] == str(warm.latest / "outputs")
    assert all(value > 0 for value in result["seconds"].values()), result["seconds"]


def test_the_result_of_a_run_that_no_node_had_has_the_same_keys(here):
    (here.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\nnode_dir = "{here.work}/file/x"\n')
    (here.work / "file").touch()
    result = here.result(here.job("true"))
    assert set(result) == RESULT_KEYS and (result["exit_code"], result["state"]) == (125, "FAILED") and "file" in result["reason"]
    assert here.record()["state"] == "FAILED" and here.events()[-1]["event"] == "NodeFault"


def test_every_transition_is_in_the_events(warm):
    warm.gpurun(warm.job("echo 1 > x", setup="true", workspace={"workdir": "."}, folder=warm.work / "events", outputs=["x"]))
    steps = [event for event in warm.events() if "event" in event]
    assert [(step["event"], step["from"], step["from_phase"], step["to"], step["to_phase"], step["command"]) for step in steps] == [
        ("NodeReady", "PENDING", "", "RUNNING", "workspace", ["MaterializeWorkspace"]),
        ("WorkspaceMaterialized", "RUNNING", "workspace", "RUNNING", "setup", ["RunSetup"]),
        ("SetupCompleted", "RUNNING", "setup", "RUNNING", "run", ["RunJob"]),
        ("JobExited", "RUNNING", "run", "RUNNING", "collect", ["CollectOutputs"]),
        ("OutputsCollected", "RUNNING", "collect", "COMPLETED", "", [])]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", step["time"]) for step in steps)
    assert [step["time"] for step in steps] == sorted(step["time"] for step in steps)


def test_the_record_says_it_all_and_is_whole_at_every_moment(warm):
    bad, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            for path in warm.runs.glob("watched-*/run.json"):
                try:
                    assert json.loads(path.read_bytes())["version"] == 1
                except (OSError, ValueError, AssertionError) as error:
                    bad.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        assert warm.gpurun(warm.job("echo hi; echo 12345 > x", name="watched", outputs=["x", "y"])).returncode == 0
    stop.set()
    watcher.join()
    record = warm.record()
    assert not bad
    assert record["run_id"] == warm.latest.name and record["state"] == "COMPLETED" and record["exit_code"] == 0
    assert record["offsets"] == {"run.out": 3, "run.err": 0, "setup.out": 0, "setup.err": 0} and record["logs_complete"] and record["bytes"] == {"pushed": 0, "pulled": 6}
    assert record["outputs"] == ["x"] and record["missing"] == ["y"] and record["path"] == "direct"
    assert record["times"]["created"] <= record["times"]["started"] <= record["times"]["ended"]
    assert record["node"]["agent_id"] == warm.agent()["id"] and record["node_dir"] == str(warm.node_dir / "runs" / warm.latest.name)
    assert not [path for path in warm.latest.iterdir() if path.name.startswith(".gpurun-tmp-")]


def test_samples_of_the_node_are_telemetry(warm):
    process = warm.start(warm.job(f"while [ ! -e {warm.work}/sampled ]; do sleep 0.05; done", name="sampled"))
    sample = eventually(lambda: warm.runs.exists() and (warm.latest / "events.jsonl").exists() and warm.latest.name.startswith("sampled")
                        and next((event["sample"] for event in warm.events() if "sample" in event), None))
    (warm.work / "sampled").touch()
    assert process.wait(30) == 0
    process.communicate()
    assert sample["memory_free_bytes"] > 0 and sample["disk_free_bytes"] > 0


def test_runs_dir_by_option_and_variable(warm):
    path = warm.job("true")
    assert warm.gpurun(path, "--runs-dir", "here/deep").returncode == 0
    assert warm.gpurun(path, env=dict(warm.env, GPURUN_RUNS=str(warm.work / "by variable"))).returncode == 0
    for folder in (warm.work / "here/deep", warm.work / "by variable"):
        assert (folder / "latest/run.json").exists() and (folder / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/runs"])
def test_a_runs_dir_that_cant_be_written_is_an_error_before_anything_is_sent(here, where):
    (here.work / "file").touch()
    done = here.gpurun(here.job("true"), "--runs-dir", where)
    assert done.returncode == 2 and b"--runs-dir" in done.stderr and where.removesuffix("/below").encode() in done.stderr
    assert not here.node_dir.exists()


def test_a_home_that_cant_be_written_is_an_error_that_names_it(here):
    done = here.gpurun(here.job("true"), env=dict(here.env, HOME="/proc/nobody"))
    assert done.returncode in (2, 125) and b"/proc/nobody" in done.stderr


def test_a_node_dir_that_cant_be_written_is_an_error_that_names_it(here):
    (here.work / "cluster.toml").write_text('[provider]\nkind = "local"\nnode_dir = "/proc/node"\n')
    done = here.gpurun(here.job("true"))
    assert done.returncode == 125 and b"/proc/node" in done.stderr and b"node_dir" in done.stderr


def test_a_full_disk_on_the_node_costs_neither_the_exit_code_nor_the_next_run(here):
    disk = here.work / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        (here.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\nnode_dir = "{disk}/node"\n')
        done = here.gpurun(here.job("echo some; dd if=/dev/zero of=fill bs=4k; sync; exit 3", name="filler"), timeout=60)
        assert done.returncode == 3 and done.stdout == b"some\n", text(done.stderr)
        record = here.record()["reason"]
        assert "the node's disk is full" in record and str(disk) in record and "may be cut short" in record
        done = here.gpurun(here.job("true", name="next"), timeout=60)
        assert done.returncode == 125 and str(disk).encode() in done.stderr and b"free" in done.stderr
        (disk / "node/runs" / next(path.name for path in (disk / "node/runs").iterdir() if path.name.startswith("filler")) / "work/fill").unlink()
        assert here.gpurun(here.job("echo ok", name="after"), timeout=60).stdout == b"ok\n"
    finally:
        from conftest import end_agents
        end_agents(here.work)
        subprocess.run(["umount", "-l", str(disk)])


def test_without_any_network_but_loopback(here):
    script = f"ip link set lo up && {sys.executable} -m gpurun {here.job('echo alone > x; cat x', outputs=['x'])}"
    done = subprocess.run(["unshare", "-n", "bash", "-c", script], cwd=here.work, env=here.env, capture_output=True, timeout=60)
    if b"unshare" in done.stderr and done.returncode == 1:
        pytest.skip("a network namespace takes root")
    assert (done.returncode, done.stdout) == (0, b"alone\n"), text(done.stderr)


def test_twenty_runs_on_one_agent_leave_nothing_behind(warm):
    path = warm.job("sleep 0.01 & true", name="many")
    warm.gpurun(path)
    pid = warm.agent()["pid"]
    before = memory(pid)
    for _ in range(20):
        assert warm.gpurun(path, "--quiet").returncode == 0
    states = [supervise._stat_fields(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    assert not [fields for fields in states if fields and fields[0] == "Z" and int(fields[1]) == pid]
    eventually(lambda: memory(pid) - before < 5_000 and len(os.listdir(f"/proc/{pid}/fd")) < 60)    # what was free is given back in its time
    assert len(supervise.descendants(pid)) <= 1   # the supervisor that waits for the next one


def memory(pid):
    """Resident kB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1))
