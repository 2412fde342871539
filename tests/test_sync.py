"""The workspace there and the outputs back, through the real command and a real agent on this machine."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conftest import end_agents
from trees import looks, make_odd_tree, rsync_differences, tiny_disk


def workdir(here, result):
    """The run's workdir on the node, which is this machine."""
    return here.node_dir / "runs" / result["run_id"] / "work"


def ran(here, job, *args, **options):
    result = here.result(job, *args, **options)
    assert result["state"] == "COMPLETED", result
    return result


def rsynced(source, target):
    if shutil.which("rsync") is None:
        pytest.skip("no rsync, which is the oracle here")
    subprocess.run(["rsync", "-a", f"{source}/", f"{target}/"], check=True)
    return target


@pytest.fixture
def ws(warm, request):
    """A workspace of the test's own."""
    folder = warm.work / re.sub(r"[^a-z0-9_]+", "-", request.node.name)
    folder.mkdir()
    return folder


def job_in(warm, ws, run="true", **keys):
    keys.setdefault("workspace", {"workdir": "."})
    return warm.job(run, "job", ws.parent / f"{ws.name}-job", **{**keys, "workspace": {**keys["workspace"], "workdir": f"../{ws.name}"}})


# ---- the workspace ---------------------------------------------------------------------------------------------------------------

def test_the_job_sees_what_rsync_would_have_brought(warm, ws, tmp_path):
    make_odd_tree(ws)
    result = ran(warm, job_in(warm, ws))
    oracle = rsynced(ws, tmp_path / "oracle")
    assert looks(workdir(warm, result)) == looks(oracle)
    assert rsync_differences(ws, workdir(warm, result)) == ""


def test_the_workspace_root_may_be_a_link(warm, ws, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "data").write_text("x")
    ws.rmdir()
    ws.symlink_to(tmp_path / "real")
    result = ran(warm, job_in(warm, ws, "cat data"))
    assert os.listdir(workdir(warm, result)) == ["data"] and not workdir(warm, result).is_symlink()


def test_a_workspace_without_files_is_an_empty_workdir(warm, ws):
    assert os.listdir(workdir(warm, ran(warm, job_in(warm, ws, "test -z \"$(ls -A)\"")))) == []


@pytest.mark.parametrize("runs_dir", [None, "my runs/\u00e9 *[x]", "gpurun-runs", "./deep/../plain/"])
def test_gpuruns_own_runs_folder_never_goes(warm, ws, runs_dir):
    (ws / "keep").write_text("x")
    job = warm.job("true", "job", ws, workspace={"workdir": "."}, outputs=["keep"])
    args = ["--runs-dir", runs_dir] if runs_dir else []
    for _ in range(2):
        result = ran(warm, job, *args, cwd=ws)
        assert Path(result["outputs_dir"]).is_relative_to(ws)
        there = {path.relative_to(workdir(warm, result)).as_posix() for path in workdir(warm, result).rglob("*")}
        assert not [path for path in there if "run.json" in path or "outputs" in path]
        assert {"keep", "job.toml"} <= there <= {"keep", "job.toml", "my runs", "deep"}


def test_sockets_and_fifos_stay_here_and_a_line_says_so(warm, ws):
    (ws / "a file").write_text("x")
    os.mkfifo(ws / "my pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(ws)                       # the path of a socket has to be short
        try:
            sock.bind("a.sock")
        finally:
            os.chdir(here)
        done = warm.gpurun(job_in(warm, ws, "ls"))
    assert done.returncode == 0 and done.stdout == b"a file\n"
    assert b"'my pipe' doesn't go: it is a FIFO" in done.stderr and b"'a.sock' doesn't go: it is a socket" in done.stderr


def test_exclude_decides_what_goes_and_git_stays_unless_it_is_asked_for(warm, ws):
    for name in ("data/raw/x", "src/data/keep", ".git/HEAD", "__pycache__/m.pyc", "src/__pycache__/m.pyc", "logs/a.log", "logs/important.log"):
        (ws / name).parent.mkdir(parents=True, exist_ok=True)
        (ws / name).write_text("x")
    list_all = "find . -type f | sort"
    exclude = ["/data/*", "__pycache__", "*.log", "!important.log"]
    done = warm.gpurun(job_in(warm, ws, list_all, workspace={"exclude": exclude}))
    assert done.stdout.decode().split() == ["./logs/important.log", "./src/data/keep"]
    done = warm.gpurun(job_in(warm, ws, list_all, workspace={"exclude": exclude + ["!.git"]}))
    assert done.stdout.decode().split() == ["./.git/HEAD", "./logs/important.log", "./src/data/keep"]


def test_a_second_run_sends_nothing_and_after_a_change_only_what_changed(warm, ws):
    for number in range(50):
        (ws / f"f{number}").write_text(f"file {number} of {ws.name}")
    job = job_in(warm, ws)
    total = sum(path.stat().st_size for path in ws.iterdir())
    pushed = []
    for change in (None, None, ("f7", "new bytes"), None, ("added", "one more")):
        if change:
            (ws / change[0]).write_text(change[1])
        ran(warm, job)
        pushed.append(warm.record()["bytes"]["pushed"])
    assert pushed == [total, 0, 9, 0, 8]
    remembered, = (warm.home / ".cache" / "gpurun" / "pushed").iterdir()          # so that only what is new goes, without being asked for
    assert remembered.name == warm.agent()["id"] and remembered.stat().st_size < 5000


def test_another_workspace_with_the_same_contents_sends_nothing(warm, ws):
    (ws / "one").write_text("shared by two workspaces")
    ran(warm, job_in(warm, ws))
    copy = ws.parent / "copy-of-it"
    (copy / "sub").mkdir(parents=True)
    shutil.copy(ws / "one", copy / "sub" / "other name")
    ran(warm, job_in(warm, copy))
    assert warm.record()["bytes"]["pushed"] == 0


def test_a_job_that_changes_its_workdir_changes_no_other_run(warm, ws):
    (ws / "data").write_text("as pushed")
    job = job_in(warm, ws, "cat data; echo scribble > data; touch left-behind; ls")
    first, second = warm.gpurun(job), warm.gpurun(job)
    assert first.stdout == second.stdout == b"as pusheddata\nleft-behind\n"
    assert (ws / "data").read_text() == "as pushed" and os.listdir(ws) == ["data"]


def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_runs(warm, ws):
    with open(ws / "busy.log", "wb") as stream:
        stream.truncate(256 << 20)                # so that whoever writes it has his turn while it is read, on a busy machine too
    stop = threading.Event()

    def scribble():
        with open(ws / "busy.log", "ab", buffering=0) as stream:
            while not stop.is_set():
                stream.write(b"x")

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        done = warm.gpurun(job_in(warm, ws, "echo ran"))
    finally:
        stop.set()
        writer.join()
    assert done.returncode == 2 and done.stdout == b""
    assert b"busy.log' changes while it is read" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file; test_transfer.py does this as another user")
def test_a_file_that_cannot_be_read_is_named_and_nothing_runs(warm, ws):
    (ws / "secret").touch(mode=0)
    done = warm.gpurun(job_in(warm, ws, "echo ran"))
    assert done.returncode == 2 and done.stdout == b"" and b"secret" in done.stderr


def test_a_huge_file_is_named_while_it_goes(warm, ws):
    with open(ws / "huge.bin", "wb") as stream:
        stream.write(os.urandom(16))
        stream.truncate(200 << 20)
    code = "from gpurun import screen; screen.JSON_S = 0.0; from gpurun.cli import main; main()"       # it may be there within the second
    job = job_in(warm, ws, "stat -c %s huge.bin; rm huge.bin")
    done = subprocess.run([sys.executable, "-c", code, job, "--json"], cwd=warm.work, env=warm.env, capture_output=True, timeout=60)
    progress = [line for line in map(json.loads, done.stdout.splitlines()) if line["type"] == "progress"]
    named = {line["name"] for line in progress if line["phase"] == "push" and 0 < line["done"] < line["total"]}
    assert done.returncode == 0 and named == {"huge.bin"}, done.stderr


def test_modes_survive_a_umask_of_077_on_both_sides(here):
    ws = here.work / "ws"
    ws.mkdir()
    (ws / "run.sh").write_text("#!/bin/sh\necho ran; mkdir out; echo x > out/made; chmod 755 out/made\n")
    (ws / "run.sh").chmod(0o755)
    (ws / "shared").mkdir(mode=0o755)
    job = here.job("./run.sh", "job", workspace={"workdir": "ws"}, outputs=["out"])
    done = here.gpurun(job, preexec_fn=lambda: os.umask(0o077))          # the agent is started by it, too
    assert done.returncode == 0 and done.stdout == b"ran\n"
    run_id = os.path.basename(here.latest)
    work = here.node_dir / "runs" / run_id / "work"
    assert stat.S_IMODE((work / "run.sh").stat().st_mode) == 0o755 and stat.S_IMODE((work / "shared").stat().st_mode) == 0o755
    assert stat.S_IMODE((here.latest / "outputs" / "out" / "made").stat().st_mode) == 0o755
    for private in (here.node_dir, here.node_dir / "runs" / run_id, here.latest):
        assert stat.S_IMODE(private.stat().st_mode) & 0o077 == 0


def test_a_script_with_crlf_arrives_as_it_is(warm, ws):
    (ws / "dos.sh").write_bytes(b"echo hello\r\n")
    assert warm.gpurun(job_in(warm, ws, "od -c dos.sh | head -1")).stdout.split()[-2:] == [b"\\r", b"\\n"]


def test_a_link_that_a_job_replaces_by_a_folder_blocks_no_later_push(warm, ws):
    (ws / "artifacts").symlink_to("/srv/artifacts-that-do-not-exist")
    job = job_in(warm, ws, "test -L artifacts && rm artifacts && mkdir artifacts && echo $GPURUN_RUN_ID > artifacts/model", outputs=["artifacts"])
    for _ in range(2):
        result = ran(warm, job)
        assert (Path(result["outputs_dir"]) / "artifacts" / "model").read_text().strip() == result["run_id"]


# ---- outputs ---------------------------------------------------------------------------------------------------------------------

MAKE_ODD = r"""
python3 - <<'END'
import os
for path in (b"out/deep/er", b"out/empty", b"other", b"out/ro"):
    os.makedirs(path)
for name in (b"plain", b"two words", b"line\nbreak", b"-rf", b"back\\slash", b"caf\xe9", b"'q' \"q\"", b"deep/er/x", b"ro/x"):
    open(b"out/" + name, "wb").write(name)
open("other/wanted", "w").write("w"); open("other/unwanted", "w").write("u"); open("line\nbreak", "w").write("n")
os.symlink("plain", "out/link"); os.symlink("nowhere", "out/dangling"); os.symlink("../other/wanted", "out/across")
os.chmod("out/plain", 0o755); os.chmod("out/two words", 0o444); os.utime("out/plain", ns=(1, 1600000000123456789))
END
"""


def test_outputs_are_what_rsync_would_have_brought_each_at_its_declared_path(warm, ws):
    result = ran(warm, job_in(warm, ws, MAKE_ODD, outputs=["out", "other/wanted", "line\nbreak", "never made"]))
    outputs, work = Path(result["outputs_dir"]), workdir(warm, result)
    assert result["missing"] == ["never made"] and sorted(result["outputs"]) == sorted(["out", "other/wanted", "line\nbreak"])
    assert sorted(os.listdir(outputs)) == ["line\nbreak", "other", "out"] and os.listdir(outputs / "other") == ["wanted"]
    assert looks(outputs / "out") == looks(work / "out") and rsync_differences(work / "out", outputs / "out") == ""
    assert (outputs / "line\nbreak").read_text() == "n"


@pytest.mark.parametrize("keys, code", [({"run": "echo part > metrics; exit 7"}, 7), ({"run": "true", "setup": "echo part > metrics; exit 9"}, 9),
                                        ({"run": "echo part > metrics; kill -KILL $$"}, 137)])
def test_outputs_come_back_when_the_job_or_its_setup_failed(warm, ws, keys, code):
    result = warm.result(job_in(warm, ws, outputs=["metrics", "model"], **keys))
    assert (result["state"], result["exit_code"], result["missing"]) == ("FAILED", code, ["model"])
    assert (Path(result["outputs_dir"]) / "metrics").read_text() == "part\n"


def test_missing_outputs_are_listed_and_change_nothing(warm, ws):
    result = warm.result(job_in(warm, ws, "true", outputs=["a", "b/c"]))
    assert (result["state"], result["exit_code"], result["missing"], result["outputs"]) == ("COMPLETED", 0, ["a", "b/c"], [])


def test_what_leads_out_of_the_workdir_is_not_collected_and_a_line_says_so(warm, ws, tmp_path):
    (tmp_path / "secret").write_text("PRIVATE")
    done = warm.gpurun(job_in(warm, ws, f"ln -s {tmp_path}/secret stolen; mkdir out; ln -s ../../../../key out/key; echo x > out/x",
                              outputs=["stolen", "out"]))
    outputs = warm.latest / "outputs"
    assert b"'stolen' was not collected" in done.stderr and b"'out/key' was not collected" in done.stderr
    assert sorted(path.name for path in outputs.rglob("*")) == ["out", "x"]


def test_an_output_that_is_not_declared_stays_on_the_node(warm, ws):
    ran(warm, job_in(warm, ws, "echo a > declared; echo b > other", outputs=["declared"]))
    assert os.listdir(warm.latest / "outputs") == ["declared"]


def test_two_runs_share_no_path(warm, ws):
    job = job_in(warm, ws, "test ! -e mark; echo $GPURUN_RUN_ID > mark; echo $GPURUN_OUTPUTS; pwd", outputs=["mark"])
    results = [ran(warm, job) for _ in range(2)]
    assert len({result["run_id"] for result in results}) == len({result["outputs_dir"] for result in results}) == 2
    for result in results:
        assert (Path(result["outputs_dir"]) / "mark").read_text().strip() == result["run_id"]
        assert (Path(result["outputs_dir"]).parent / "stdout.log").read_text().split() == [str(workdir(warm, result))] * 2


# ---- full disks ------------------------------------------------------------------------------------------------------------------

def test_a_full_disk_here_leaves_the_outputs_on_the_node_and_says_so(warm, ws, tmp_path):
    with tiny_disk(tmp_path / "disk", "4m") as disk:
        result = warm.result(job_in(warm, ws, "head -c 8000000 /dev/urandom > big", outputs=["big"]), "--runs-dir", disk / "runs")
        assert (result["state"], result["exit_code"]) == ("FAILED", 125)
        assert "8,000,000 bytes" in result["reason"] and str(disk) in result["reason"] and "still on the node" in result["reason"]
        assert (workdir(warm, result) / "big").stat().st_size == 8_000_000
        again = warm.gpurun("stop", result["run_id"], "--runs-dir", disk / "runs")
        assert b"the job itself exited 0" in again.stderr           # no room has been made yet
        subprocess.run(["mount", "-o", "remount,size=40m", disk], check=True)
        done = warm.gpurun("stop", result["run_id"], "--runs-dir", disk / "runs")
        record = json.loads((disk / "runs" / result["run_id"] / "run.json").read_text())
        assert done.returncode == 0 and (record["state"], record["exit_code"], record["outputs"]) == ("COMPLETED", 0, ["big"])
        assert (disk / "runs" / result["run_id"] / "outputs" / "big").stat().st_size == 8_000_000


def test_a_workspace_that_the_nodes_disk_cannot_hold_is_refused_with_the_numbers(here, tmp_path):
    with tiny_disk(tmp_path / "disk", "180m") as disk:
        cluster = here.work / "cluster.toml"
        cluster.write_text(f'[provider]\nkind = "local"\nnode_dir = "{disk}/node"\n')
        (here.work / "ws").mkdir()
        with open(here.work / "ws" / "large", "wb") as stream:
            stream.truncate(200_000_000)
        try:
            result = here.result(here.job("true", "job", workspace={"workdir": "ws"}), "--cluster", cluster)
            assert (result["state"], result["exit_code"]) == ("FAILED", 125)
            assert "no room for the workspace" in result["reason"] and "free, needed are 267,108,864 bytes" in result["reason"]
        finally:
            end_agents(disk)
