"""records.py: a run's folder survives kills, is found by what people type, and is driven by one process."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from conftest import eventually

from gpurun import records, transfer
from gpurun.errors import RecordError
from gpurun.files import TEMP_PREFIX
from gpurun.records import Record, RunFolder, all_runs, choose_runs_dir, find, new_run_id

NOW = datetime(2025, 6, 1, 14, 3, 9)


@pytest.fixture
def runs(tmp_path):
    return str(tmp_path / "runs")


def make(runs, name="hello", **given):
    return RunFolder.create(runs, name, NOW, **given)[0]


def test_run_id():
    assert new_run_id("hello", NOW, "0a1f") == "hello-20250601-140309-0a1f"


def test_choose_runs_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/h")
    assert choose_runs_dir("x", {"GPURUN_RUNS": "/y"}) == str(tmp_path / "x")
    assert choose_runs_dir(None, {"GPURUN_RUNS": "~/y"}) == "/h/y"
    assert choose_runs_dir(None, {"GPURUN_RUNS": ""}) == str(tmp_path / "gpurun-runs")


def test_create_makes_a_private_folder_that_git_ignores(runs):
    folder, record = RunFolder.create(runs, "hello", NOW, job={"name": "hello", "env": ["TOKEN"]})
    assert re.fullmatch(r"hello-20250601-140309-[0-9a-f]{4}", folder.run_id) and record.run_id == folder.run_id
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700 and stat.S_IMODE(os.stat(folder.record).st_mode) == 0o600
    assert open(os.path.join(runs, ".gitignore")).read() == "*\n"
    assert os.readlink(os.path.join(runs, "latest")) == folder.run_id
    assert folder.load() == record and record.times["created"].endswith("Z")
    assert sorted(os.listdir(runs)) == sorted([".gitignore", "latest", folder.run_id])


def test_create_leaves_the_users_gitignore_and_a_real_folder_named_latest(runs):
    os.makedirs(os.path.join(runs, "latest"))
    with open(os.path.join(runs, ".gitignore"), "w") as file:
        file.write("mine\n")
    folder = make(runs)
    assert open(os.path.join(runs, ".gitignore")).read() == "mine\n" and os.path.isdir(os.path.join(runs, "latest"))
    assert sorted(os.listdir(runs)) == sorted([".gitignore", "latest", folder.run_id])


def test_create_takes_another_name_when_one_is_taken(runs, monkeypatch):
    real, tokens = os.urandom, iter([b"\xaa\xaa", b"\xaa\xaa", b"\xaa\xaa", b"\xbb\xbb"])
    monkeypatch.setattr(records.os, "urandom", lambda size: next(tokens) if size == 2 else real(size))
    assert make(runs).run_id.endswith("aaaa") and make(runs).run_id.endswith("bbbb")


def test_create_where_it_cannot_be_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="--runs-dir"):
        make(str(tmp_path / "file"))


def test_record_comes_back_as_it_was(runs):
    folder, record = RunFolder.create(runs, "hello")
    record.state, record.exit_code, record.seq, record.outputs = "FAILED", 137, 9, ["a b\n", "é\udcff"]
    record.offsets["run.out"] = 2**40
    record.detached, record.seen = True, {"phase": "run"}
    folder.save(record)
    assert folder.load() == record
    record.exit_code = None
    folder.save(record)
    assert folder.load().exit_code is None


def broken(folder, **changes):
    value = json.load(open(folder.record))
    with open(folder.record, "w") as file:
        json.dump({key: item for key, item in {**value, **changes}.items() if item is not ...}, file)


@pytest.mark.parametrize("changes, text", [({"version": 2}, "version 2; gpurun .* reads version 1"), ({"version": ...}, "version None"),
                                           ({"version": True}, "version True"), ({"state": 3}, "'state' is a int"),
                                           ({"outputs": {}}, "'outputs'"), ({"exit_code": "0"}, "exit_code"), ({"run_id": ""}, "run_id")])
def test_a_record_of_another_make_is_refused_by_name(runs, changes, text):
    folder = make(runs)
    broken(folder, **changes)
    with pytest.raises(RecordError, match=text) as caught:
        folder.load()
    assert folder.record in str(caught.value)


def test_unknown_and_missing_keys_do_no_harm(runs):
    folder = make(runs)
    broken(folder, future="x", missing=...)
    assert folder.load().missing == []


def test_a_record_of_before_the_four_logs_loads(runs):
    folder = make(runs)
    broken(folder, offsets={"stdout": 5, "stderr": 1, "setup": 7}, detached=..., logs_complete=..., seen=...)
    record = folder.load()
    assert record.offsets == {"setup.out": 0, "setup.err": 0, "run.out": 0, "run.err": 0}
    assert (record.detached, record.logs_complete, record.seen) == (False, False, {})


def test_the_logs_here_are_the_nodes_by_their_names(runs):
    folder = make(runs)
    assert list(folder.logs) == list(transfer.LOGS) == list(Record().offsets)
    assert [os.path.basename(path) for path in folder.logs.values()] == ["setup-stdout.log", "setup-stderr.log", "stdout.log", "stderr.log"]
    assert (folder.stdout, folder.stderr) == (folder.logs["run.out"], folder.logs["run.err"])


def test_a_record_killed_at_any_moment_is_whole(runs):
    folder, record = RunFolder.create(runs, "hello")
    code = ("import sys; from gpurun.records import RunFolder\nfolder = RunFolder(sys.argv[1]); record = folder.load(); print(flush=True)\n"
            "while True: record.seq += 1; record.reason = 'x' * record.seq; folder.save(record)")
    last = 0
    for pause in (0.0, 0.013, 0.029):
        process = subprocess.Popen([sys.executable, "-c", code, folder.path], stdout=subprocess.PIPE)
        process.stdout.readline()
        eventually(lambda: folder.load().seq > last)
        time.sleep(pause)
        process.kill()
        process.wait()
        process.stdout.close()
        now = folder.load()
        assert now.seq > last and now.reason == "x" * now.seq
        last = now.seq
    assert len(all_runs(runs)) == 1


def test_events_are_whole_lines_with_a_time(runs):
    folder = make(runs)
    assert list(folder.read_events()) == []
    folder.append_event({"from": "PENDING", "event": "NodeReady", "to": "RUNNING", "command": ["RunJob"]})
    folder.close()
    with open(folder.events, "ab") as file:
        file.write(b'{"torn": ')
    folder.append_event({"event": "x\ny"})
    first, second = folder.read_events()
    assert (first["from"], first["to"], second["event"]) == ("PENDING", "RUNNING", "x\ny")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    folder.close()


def test_only_one_process_drives_a_run(runs):
    folder = make(runs)
    assert folder.driver() is None
    code = ("import sys; from gpurun.records import RunFolder\nfolder = RunFolder(sys.argv[1])\n"
            "print(folder.try_lock() and folder.try_lock(), folder.driver(), flush=True); sys.stdin.read()")
    process = subprocess.Popen([sys.executable, "-c", code, folder.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline().split() == [b"True", b"%d" % process.pid]
    assert not folder.try_lock() and folder.driver() == process.pid
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert folder.driver() is None and folder.try_lock() and folder.driver() == os.getpid()
    folder.close()
    assert RunFolder(folder.path).try_lock()


def test_the_lock_is_not_left_to_children(runs):
    folder = make(runs)
    assert folder.try_lock()
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    folder.close()
    try:
        other = RunFolder(folder.path)
        assert other.try_lock()
        other.close()
    finally:
        child.kill()
        child.wait()


def test_find_by_id_prefix_latest_and_path(runs, monkeypatch):
    first, second, other = make(runs), make(runs), make(runs, "train")
    assert find(runs, first.run_id).path == first.path and find(runs, "tr").path == other.path
    assert find(runs, "latest").path == other.path
    assert find("/nowhere", first.path + "/").path == first.path and find("/nowhere", runs + "/latest").path == other.path
    with pytest.raises(RecordError, match="beginning of 2 runs.*gpurun status") as caught:
        find(runs, "hello")
    assert first.run_id in str(caught.value) and second.run_id in str(caught.value)
    for text in ("nope", "", "..", "../runs", "."):
        with pytest.raises(RecordError, match="gpurun status"):
            find(runs, text)
    with pytest.raises(RecordError, match="No runs in .*JOB.toml"):
        find(runs + "-not", "latest")


def test_latest_without_its_link_is_the_newest(runs):
    first = make(runs)
    time.sleep(0.005)
    second = make(runs)
    os.unlink(os.path.join(runs, "latest"))
    assert find(runs, "latest").path == second.path
    os.symlink("gone", os.path.join(runs, "latest"))
    assert find(runs, "latest").path == second.path != first.path


def test_all_runs_reports_broken_ones_among_the_others(runs):
    assert all_runs(runs) == []
    first = make(runs)
    time.sleep(0.005)
    second = make(runs)
    os.mkdir(os.path.join(runs, "empty"))
    os.mkdir(os.path.join(runs, "bad"))
    with open(os.path.join(runs, "bad", "run.json"), "w") as file:
        file.write("{")
    listed = all_runs(runs)
    assert [item.folder.path for item in listed if item.record] == [second.path, first.path]
    assert {item.folder.run_id: bool(item.problem) for item in listed if not item.record} == {"empty": True, "bad": True}


def test_a_record_has_no_place_for_values_of_the_environment():
    assert not {"env", "environ", "environment"} & set(Record().__dict__)


def test_who_takes_a_run_over_removes_what_a_killed_driver_left_half_written_and_a_reader_does_not(tmp_path):
    folder, _ = RunFolder.create(str(tmp_path), "job")
    half = Path(folder.path, TEMP_PREFIX + "0123456789abcdef")
    half.write_bytes(b'{"version": 1, "ru')
    other = RunFolder(folder.path)
    assert other.driver() is None and half.exists()
    assert other.try_lock() and not half.exists() and other.load().run_id == folder.run_id
    half.write_bytes(b"of the driver of now")
    assert not folder.try_lock() and half.exists()
    other.close()
