"""The folder of manifests: nothing is submitted beside a file that can't be trusted, no plan's job twice, whoever is at work or was killed at it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun import asyncjobs, external
from gpurun.asyncjobs import SUPERSEDED, TRACE, Change, Settings, conflict, find, find_project, left_overs, read_all, reserve, settings, update
from gpurun.errors import RecordError
from gpurun.external import Own, Plan, build

ROOT = Path(__file__).resolve().parents[1]
AT = "2026-11-30T10:15:00.000Z"


def plan(plan_id="3.1") -> Plan:
    return Plan(plan_id, "3", "node", "gpurun submit job.toml", ("out.txt",), "test -s out.txt", "/gsd:execute-phase 3")


def own(run_id="run-1") -> Own:
    return Own(run_id, "/runs", "", "/project")


def manifest(job_id="run-1", status="submitted", plan_id="3.1", **more):
    return build(plan(plan_id), job_id, status, AT, {"reason": "x"}, own(job_id))._replace(**more)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "p" / ".planning" / "async-jobs").mkdir(parents=True)
    return find_project(str(tmp_path / "p"), str(tmp_path / "runs"))


def put(project, job_id="run-1", *args, **more) -> str:
    path = os.path.join(project.jobs, f"{job_id}.json")
    Path(path).write_bytes(manifest(job_id, *args, **more).encode())
    return path


def names(project) -> set[str]:
    return set(os.listdir(project.jobs))


def submit(project, run_id, plan_id="3.1"):
    """What a submitter does that nothing happens to."""
    reserved = reserve(project, plan(plan_id), own(run_id))
    return reserved, reserved.write(build(reserved.trace.plan, run_id, "submitted", reserved.trace.submitted_at, own=reserved.trace.own))


# ---- where ---------------------------------------------------------------------------------------------------------------------------------

def test_a_project_is_found_from_ten_folders_and_no_more(tmp_path):
    deep = tmp_path
    for number in range(12):
        deep = deep / f"d{number}"
    deep.mkdir(parents=True)
    folder = deep
    for level in range(12):
        (folder / ".planning").mkdir()
        found = find_project(str(deep), str(tmp_path / "runs"))
        (folder / ".planning").rmdir()
        if level < 10:
            assert found == (str(folder), str(folder / ".planning"), str(folder / ".planning" / "async-jobs"))
        else:
            assert found == ("", "", str(tmp_path / "runs" / "async-jobs"))
        folder = folder.parent


def test_the_nearest_project_counts_and_a_file_of_that_name_is_none(tmp_path):
    (tmp_path / "outer" / ".planning").mkdir(parents=True)
    inner = tmp_path / "outer" / "inner"
    inner.mkdir()
    (inner / ".planning").write_text("")
    assert find_project(str(inner), "runs").root == str(tmp_path / "outer")
    (inner / ".planning").unlink()
    (inner / ".planning").symlink_to(tmp_path / "outer" / ".planning")
    assert find_project(str(inner), "runs").root == str(inner)


# ---- settings ------------------------------------------------------------------------------------------------------------------------------

def config(project, value) -> None:
    Path(project.planning, "config.json").write_text(value if isinstance(value, str) else json.dumps({"external_job": value}))


def test_the_environment_counts_before_the_project_s_config_and_that_before_the_default(project):
    assert settings(project, {}) == Settings(False, "slurm", "Artifacts/jobs", 30000.0, 15000.0)
    config(project, {"enabled": True, "backend": "lsf", "artifact_dir": "a/b", "submit_timeout_ms": 45000, "poll_timeout_ms": 1.5})
    assert settings(project, {}) == Settings(True, "lsf", "a/b", 45000.0, 1.5)
    environ = {"GSD_EXTERNAL_JOB_ARTIFACT_DIR": "/scratch/x", "GSD_SLURM_SUBMIT_TIMEOUT_MS": "1000", "GSD_SLURM_POLL_TIMEOUT_MS": " 2000.5 "}
    assert settings(project, environ) == Settings(True, "lsf", "/scratch/x", 1000.0, 2000.5)
    assert settings(find_project("/", "/nowhere"), environ).artifact_dir == "/scratch/x"


@pytest.mark.parametrize("wrong", ["45000", None, [], {}, True, -1, 0, 1e12, float("nan"), float("inf")])
def test_a_time_out_of_another_kind_falls_back_to_the_default(project, wrong):
    config(project, {"submit_timeout_ms": wrong, "poll_timeout_ms": wrong})
    assert settings(project, {})[3:] == (30000.0, 15000.0)


@pytest.mark.parametrize("wrong", ["", "abc", "NaN", "-5", "0", "1e3", "0x10", "Infinity", "٣", "9" * 400, "1_000"])
def test_a_variable_that_is_no_number_counts_as_unset(project, wrong):
    config(project, {"poll_timeout_ms": 7})
    found = settings(project, {"GSD_SLURM_SUBMIT_TIMEOUT_MS": wrong, "GSD_SLURM_POLL_TIMEOUT_MS": wrong, "GSD_EXTERNAL_JOB_ARTIFACT_DIR": " "})
    assert found == Settings(poll_timeout_ms=7.0)


@pytest.mark.parametrize("wrong", [{"enabled": 1, "backend": 3, "artifact_dir": ["x"]}, {"enabled": "true", "backend": "", "artifact_dir": "a\0b"}, [], "x", None])
def test_values_of_another_kind_fall_back_to_the_default(project, wrong):
    config(project, wrong if isinstance(wrong, (dict, list)) or wrong is None else json.dumps({"external_job": wrong}))
    assert settings(project, {}) == Settings()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00", "[" * 50000])
def test_a_config_that_is_no_json_object_has_no_settings(project, text):
    config(project, text)
    assert settings(project, {}) == Settings()


# ---- reading, fail closed --------------------------------------------------------------------------------------------------------------------

def _link(path, project):
    put(project, "real", plan_id="9")
    os.rename(os.path.join(project.jobs, "real.json"), os.path.join(project.planning, "real"))
    path.symlink_to(os.path.join(project.planning, "real"))


BAD = {
    "truncated": lambda path, project: path.write_bytes(manifest("bad").encode()[:-30]),
    "empty": lambda path, project: path.write_bytes(b""),
    "not json": lambda path, project: path.write_bytes(b"hello"),
    "not utf-8": lambda path, project: path.write_bytes(manifest("bad").encode().replace(b"gpurun submit", b"\xff\xfe")),
    "a key twice": lambda path, project: path.write_bytes(manifest("bad").encode().replace(b"{", b'{"status": "failed",', 1)),
    "wrong type": lambda path, project: path.write_bytes(manifest("bad").encode().replace(b'"3"', b"3")),
    "other version": lambda path, project: path.write_bytes(manifest("bad").encode().replace(b'"1.0"', b'"2.0"')),
    "unknown status": lambda path, project: path.write_bytes(manifest("bad").encode().replace(b'"submitted"', b'"done"')),
    "another job's": lambda path, project: path.write_bytes(manifest("other").encode()),
    "huge": lambda path, project: path.write_bytes(manifest("bad").encode() + b" " * (1 << 20)),
    "endless": lambda path, project: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    "a symlink": _link,
    "a dangling symlink": lambda path, project: path.symlink_to("nowhere"),
    "a symlink to itself": lambda path, project: path.symlink_to(path),
    "a folder": lambda path, project: path.mkdir(),
    "a pipe": lambda path, project: os.mkfifo(path),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["bad.json", ".bad.json"])
def test_a_file_that_can_not_be_trusted_stops_everything_and_is_named(project, bad, name):
    good = put(project)
    path = Path(project.jobs, name)
    reserved = reserve(project, plan("other"), own("run-2"))
    BAD[bad](path, project)
    before = {one: Path(one).read_bytes() for one in (good,)}, names(project)
    for act in (lambda: read_all(project), lambda: find(project, "run-1"), lambda: reserve(project, plan("new"), own("run-3")),
                lambda: update(project, [Change(good, "running")]), lambda: reserved.write(manifest("run-2", plan_id="other"))):
        with pytest.raises(RecordError) as error:
            act()
        assert str(path) in str(error.value) and "run-1.json" not in str(error.value)
    assert ({one: Path(one).read_bytes() for one in (good,)}, names(project)) == before          # the trace of run-2 among them
    reserved.drop()


def test_a_manifest_that_can_not_be_read_stops_everything(project, monkeypatch):
    path = put(project, "bad")
    real = os.open
    monkeypatch.setattr(os, "open", lambda name, *args, **more: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied", name))
                        if name == path else real(name, *args, **more))
    with pytest.raises(RecordError, match="Permission denied"):
        reserve(project, plan(), own())


def test_each_file_that_is_wrong_is_named_at_once(project):
    for name in ("a", "b"):
        Path(project.jobs, f"{name}.json").write_text("x")
    with pytest.raises(RecordError, match="(?s)a.json.*b.json"):
        read_all(project)


def test_what_is_no_manifest_s_name_is_left_alone(project):
    put(project)
    for name in ("notes.txt", "x.json.bak", "json", ".hidden"):
        Path(project.jobs, name).write_text("not ours")
    Path(project.jobs, "superseded").mkdir()
    Path(project.jobs, "superseded", "old.json").write_text("whatever")
    assert [one.manifest.job_id for one in read_all(project)] == ["run-1"]


def test_a_folder_that_is_not_there_has_no_jobs_and_one_that_is_a_file_is_an_error(tmp_path):
    assert read_all(find_project("/", str(tmp_path / "runs"))) == []
    (tmp_path / "async-jobs").write_text("")
    with pytest.raises(RecordError, match="async-jobs"):
        read_all(find_project("/", str(tmp_path)))


def test_two_manifests_of_a_plan_are_a_conflict_and_neither_is_picked(project):
    put(project, "a", "failed"), put(project, "b"), put(project, "c", plan_id="3.10")
    for job in ("a", "b"):
        with pytest.raises(RecordError, match="(?s)2 manifests.*a.json.*b.json"):
            find(project, job)
    assert find(project, "c").manifest.job_id == "c" and conflict(read_all(project), "3.10") == ""


def test_a_job_is_found_by_its_id_or_its_run_s(project):
    Path(project.jobs, "17.json").write_bytes(build(plan(), "17", "running", AT, own=own("train-1")).encode())
    assert find(project, "17") == find(project, "train-1")
    for name in ("1", "", "train", "17.json", "../17"):
        with pytest.raises(RecordError, match="The jobs there are 17"):
            find(project, name)
    os.unlink(os.path.join(project.jobs, "17.json"))
    with pytest.raises(RecordError, match="submit"):
        find(project, "17")


# ---- reserving and writing -------------------------------------------------------------------------------------------------------------------

def test_a_submitted_job_leaves_its_manifest_and_nothing_else(project):
    reserved, path = submit(project, "run-1")
    assert names(project) == {"run-1.json"} and path == os.path.join(project.jobs, "run-1.json") and os.stat(path).st_mode & 0o777 == 0o644
    assert external.decode(Path(path).read_bytes(), path, "run-1").submitted_at == reserved.trace.submitted_at


def test_the_folder_is_made_where_there_is_none(tmp_path):
    project = find_project("/", str(tmp_path / "runs"))
    submit(project, "run-1")
    assert names(project) == {"run-1.json"} and os.stat(project.jobs).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("status", ["submitted", "running"])
def test_a_plan_whose_job_is_not_over_gets_no_second_one(project, status):
    put(project, "run-0", status)
    with pytest.raises(RecordError, match="run-0"):
        reserve(project, plan(), own("run-1"))
    assert names(project) == {"run-0.json"}
    submit(project, "run-2", "3.10")                       # another plan, though it begins alike
    submit(project, "run-3", " 3.1")


@pytest.mark.parametrize("status", ["completed-unverified", "failed", "cancelled", "timeout"])
def test_a_job_that_is_over_does_not_stand_in_the_way_and_is_put_aside_once_the_next_one_exists(project, status):
    before = Path(put(project, "run-0", status)).read_bytes()
    reserved = reserve(project, plan(), own("run-1"))
    assert read_all(project)[0].manifest.job_id == "run-0"                                    # nothing was submitted yet
    reserved.write(manifest("run-1"))
    assert [one.manifest.job_id for one in read_all(project)] == ["run-1"]
    assert reserved.moved == os.path.join(project.jobs, SUPERSEDED, "run-0.json") and Path(reserved.moved).read_bytes() == before


def test_what_was_put_aside_is_never_overwritten(project):
    for number in range(3):
        put(project, "17", "failed", submitted_at=f"2026-11-30T10:15:0{number}Z")
        reserved = reserve(project, plan(), own(f"run-{number}"))
        reserved.write(manifest(f"run-{number}"))
        os.unlink(os.path.join(project.jobs, f"run-{number}.json"))
    folder = Path(project.jobs, SUPERSEDED)
    assert sorted(os.listdir(folder)) == ["17.2.json", "17.3.json", "17.json"]
    assert {json.loads((folder / name).read_text())["submitted_at"][-3:] for name in os.listdir(folder)} == {"00Z", "01Z", "02Z"}


def test_a_job_id_that_another_plan_s_manifest_has_is_refused_and_the_trace_stays(project):
    put(project, "17", "failed", plan_id="other")
    reserved = reserve(project, plan(), own("run-1"))
    with pytest.raises(RecordError, match="another run"):
        reserved.write(build(plan(), "17", "submitted", AT, own=own("run-1")))
    reserved.release()
    assert [one.left_over.own.run_id for one in left_overs(project).claimed] == ["run-1"]


def test_what_can_not_be_a_manifest_is_refused_before_anything_is_submitted(project):
    for wrong in (plan()._replace(phase=""), plan()._replace(expected_artifacts=()), plan()._replace(verification_command="x" * (1 << 20))):
        with pytest.raises(RecordError):
            reserve(project, wrong, own())
    assert names(project) == set()


def test_a_folder_that_can_not_be_written_in_is_refused_before_anything_is_submitted(project, monkeypatch):
    real = os.open
    monkeypatch.setattr(os, "open", lambda name, flags, *args, **more: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system", name))
                        if flags & os.O_CREAT else real(name, flags, *args, **more))
    with pytest.raises(RecordError, match="Read-only"):
        reserve(project, plan(), own())


def test_a_full_disk_leaves_the_trace_of_a_job_that_was_submitted(project, monkeypatch):
    put(project, "run-0", "failed")
    reserved = reserve(project, plan(), own())

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", path)
    monkeypatch.setattr(asyncjobs, "atomic_write", full)
    with pytest.raises(RecordError, match="No space left"):
        reserved.write(manifest())
    monkeypatch.undo()
    with pytest.raises(RecordError, match="being submitted just now"):
        reserve(project, plan(), own("run-2"))
    reserved.write(manifest())                             # the same again, once there is room
    assert names(project) == {"run-1.json", SUPERSEDED}


def test_a_trace_with_no_room_for_it_goes_again(project, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(asyncjobs, "write_all", full)
    with pytest.raises(RecordError, match="No space left"):
        reserve(project, plan(), own())
    assert names(project) == set()


def test_a_plan_is_free_again_once_its_submit_is_dropped(project):
    reserve(project, plan(), own("run-1")).drop()
    assert names(project) == set()
    reserved = reserve(project, plan(), own("run-2"))
    reserved.drop()
    reserved.drop()


# ---- changing --------------------------------------------------------------------------------------------------------------------------------

def test_a_change_keeps_the_time_of_the_submit_and_the_keys_of_others(project):
    path = put(project, more={"note": {"of": "others"}, "gpurun": {"run_id": "run-1", "runs_dir": "/runs", "later": 1}})
    os.chmod(path, 0o640)
    new = update(project, [Change(path, "failed", {"reason": "exited 3", "exit_code": 3}, {"gpurun": {"run_state": "ended"}, "seen": 3})])[0]
    found = json.loads(Path(path).read_text())
    assert found["submitted_at"] == AT and found["note"] == {"of": "others"} and found["seen"] == 3
    assert found["gpurun"] == {"run_id": "run-1", "runs_dir": "/runs", "later": 1, "run_state": "ended"}
    assert found["terminal_details"] == {"reason": "exited 3", "exit_code": 3} and new.status == "failed" and os.stat(path).st_mode & 0o777 == 0o640
    update(project, [Change(path, "running", {"reason": "left over"})])
    assert json.loads(Path(path).read_text())["terminal_details"] is None


def test_what_another_process_has_decided_meanwhile_stands(project):
    path = put(project)
    update(project, [Change(path, "completed-unverified")])
    assert update(project, [Change(path, "running", was="submitted")])[0].status == "completed-unverified"
    assert read_all(project)[0].manifest.status == "completed-unverified"


def test_a_change_that_changes_nothing_writes_nothing(project):
    path = put(project)
    before = os.stat(path)
    update(project, [Change(path, "submitted")])
    update(project, [])
    assert os.stat(path).st_ino == before.st_ino


def test_a_manifest_that_is_gone_is_not_made_again(project):
    path = put(project)
    os.unlink(path)
    with pytest.raises(RecordError, match="isn't there any more"):
        update(project, [Change(path, "running")])
    assert names(project) == set()


def test_a_job_that_was_over_is_not_taken_back_beside_another_one_of_its_plan(project):
    path, _ = put(project, "a", "failed"), put(project, "b", "running")
    with pytest.raises(RecordError, match="isn't over: b"):
        update(project, [Change(path, "running")])


def test_many_changes_are_made_in_one_go(project):
    paths = [put(project, f"run-{number}", plan_id=str(number)) for number in range(300)]
    assert {one.status for one in update(project, [Change(path, "running") for path in paths])} == {"running"}


# ---- two at once, in processes of their own -----------------------------------------------------------------------------------------------------

RACER = """
import os, sys
from gpurun import asyncjobs
from gpurun.errors import RecordError
from gpurun.external import Own, Plan, build
root, run_id, plan_id = sys.argv[1:]
project = asyncjobs.find_project(root, root + "/runs")
plan = Plan(plan_id, "3", "node", "gpurun submit job.toml", ("out.txt",), "true", "/gsd")
print("ready", flush=True)
sys.stdin.readline()
try:
    reserved = asyncjobs.reserve(project, plan, Own(run_id, "/runs"))
except RecordError as error:
    print("refused", error, flush=True)
    raise SystemExit
print("submitted", flush=True)
sys.stdin.readline()
reserved.write(build(plan, run_id, "submitted", reserved.trace.submitted_at, own=reserved.trace.own))
print("written", flush=True)
"""


class Racer:
    def __init__(self, project, run_id, plan_id="3.1", code=RACER, **env):
        self.process = subprocess.Popen([sys.executable, "-c", code, project.root, run_id, plan_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **env})

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


def test_of_many_submitters_at_once_one_submits_and_the_others_are_refused(project):
    racers = [Racer(project, f"run-{number}") for number in range(8)]
    assert {racer.says() for racer in racers} == {"ready"}
    for racer in racers:
        racer.go()
    said = [racer.says() for racer in racers]
    assert sorted(text.split()[0] for text in said) == ["refused"] * 7 + ["submitted"], said
    winner = next(racer for racer, text in zip(racers, said) if text == "submitted")
    assert all("being submitted just now" in text for text in said if text != "submitted")
    winner.go()
    assert winner.says() == "written" and [racer.end() for racer in racers] == [0] * 8
    assert len(read_all(project)) == 1 and len(names(project)) == 1


def test_submitters_of_different_plans_are_in_nobody_s_way(project):
    racers = [Racer(project, f"run-{number}", str(number)) for number in range(6)]
    for racer in racers:
        racer.says(), racer.go()
    for racer in racers:
        assert racer.says() == "submitted"
        racer.go()
    assert [racer.end() for racer in racers] == [0] * 6 and len(read_all(project)) == 6 and len(names(project)) == 6


def test_a_submit_that_is_at_work_is_named_to_the_next_one_and_is_not_left_over(project):
    racer = Racer(project, "run-1")
    racer.says(), racer.go()
    assert racer.says() == "submitted"
    with pytest.raises(RecordError, match=f"run-1.*process {racer.process.pid}"):
        reserve(project, plan(), own("run-2"))
    claimed, at_work, said = left_overs(project)
    assert claimed == said == [] and len(at_work) == 1 and "run-1" in at_work[0]
    racer.process.kill()
    racer.process.wait()
    with pytest.raises(RecordError, match="cut short.*run-1.*poll --all"):
        reserve(project, plan(), own("run-2"))
    (left,), at_work, said = left_overs(project)
    assert at_work == said == [] and (left.left_over.plan, left.left_over.own.run_id) == (plan()._replace(verification_command="true", resume_command="/gsd"), "run-1")
    assert left_overs(project).claimed == [] and left_overs(project, "another").claimed == []          # claimed: nobody else settles it meanwhile
    left.drop()
    reserve(project, plan(), own("run-2")).drop()


# ---- killed at each point ------------------------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, fcntl
from gpurun import asyncjobs
left = int(os.environ["AT"])
def counted(real):
    def call(*args, **more):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    return call
for name in ("open", "write", "pwrite", "fsync", "close", "replace", "rename", "unlink", "ftruncate", "mkdir", "link"):
    setattr(os, name, counted(getattr(os, name)))
fcntl.flock = counted(fcntl.flock)
"""
SUBMITTED = KILLED + RACER.replace("sys.stdin.readline()", "").replace('print("submitted", flush=True)', 'open(root + "/job-exists", "w")')


@pytest.mark.parametrize("earlier", ["", "failed"])
def test_a_submitter_that_is_killed_at_any_point_never_lets_the_job_be_submitted_twice_or_be_forgotten(tmp_path, earlier):
    survived, seen = False, set()
    for at in range(200):
        root = tmp_path / str(at)
        (root / ".planning").mkdir(parents=True)
        project = find_project(str(root), str(root / "runs"))
        if earlier:
            os.mkdir(project.jobs)
            old = Path(put(project, "run-0", earlier)).read_bytes()
        code = Racer(project, "run-1", code=SUBMITTED, AT=str(at)).end()
        survived = code == 0
        assert survived or code == -signal.SIGKILL
        exists = (root / "job-exists").exists()
        found = {one.manifest.job_id for one in read_all(project)}                            # never half a manifest
        assert len(found) <= 1 and ("run-1" not in found or exists)
        if earlier and "run-0" not in found:
            assert Path(project.jobs, SUPERSEDED, "run-0.json").read_bytes() == old
        try:
            reserve(project, plan(), own("run-2")).drop()
            refused = ""
        except RecordError as error:
            refused = str(error)
        if exists:
            assert "run-1" in refused, at
        claimed, at_work, said = left_overs(project)
        assert not at_work and not said
        seen.add((exists, bool(claimed), "run-1" in found))
        for one in claimed:                                                                   # what a poll does then
            assert one.left_over.own.run_id == "run-1"
            if exists:
                one.write(build(one.trace.plan, "run-1", "running", one.trace.submitted_at, own=one.trace.own))
            else:
                one.drop()
        assert {one.manifest.job_id for one in read_all(project)} == ({"run-1"} if exists else {"run-0"} if earlier else set())
        assert not [name for name in names(project) if name.startswith(TRACE)] if project.jobs and os.path.isdir(project.jobs) else True
        if survived:
            break
    assert survived and at > 15
    assert {(False, False, False), (False, True, False), (True, True, False), (True, True, True), (True, False, True)} <= seen, seen


UPDATED = KILLED + """
from gpurun.asyncjobs import Change
root = sys.argv[1]
project = asyncjobs.find_project(root, root + "/runs")
asyncjobs.update(project, [Change(project.jobs + "/run-1.json", "failed", {"reason": "x"}), Change(project.jobs + "/run-2.json", "running")])
"""


def test_a_poll_that_is_killed_at_any_point_leaves_each_manifest_as_it_was_or_as_it_is_to_be(project):
    for at in range(100):
        for number in (1, 2):
            put(project, f"run-{number}", plan_id=str(number))
        code = Racer(project, "", code=UPDATED, AT=str(at)).end()
        found = [one.manifest.status for one in read_all(project)]
        assert found in (["submitted", "submitted"], ["failed", "submitted"], ["failed", "running"])
        if code == 0:
            break
    assert code == 0 and found == ["failed", "running"] and at > 5
    update(project, [Change(os.path.join(project.jobs, "run-1.json"), "running")])
    assert names(project) == {"run-1.json", "run-2.json"}                                     # what was half-written is swept


# ---- traces of every kind --------------------------------------------------------------------------------------------------------------------------

def trace_of(project, **changed) -> Path:
    """A trace as a process that is gone has left it."""
    reserve(project, plan(), own("run-1")).release()
    path = next(Path(project.jobs, name) for name in names(project) if name.startswith(TRACE))
    if changed:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}) + "\n")
    return path


def test_a_trace_says_who_is_submitting_what_and_nobody_else_reads_it(project):
    path = trace_of(project)
    value = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600 and value["pid"] == os.getpid() and value["plan"]["plan_id"] == "3.1"
    assert value["own"] == {"run_id": "run-1", "runs_dir": "/runs", "cluster": "", "folder": "/project", "run_state": ""}


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_trace_that_was_cut_short_is_of_a_submit_that_never_was(project, length):
    path = trace_of(project)
    path.write_bytes(path.read_bytes()[:length])
    reserve(project, plan(), own("run-2")).drop()
    path.write_bytes(b"{")
    assert left_overs(project) == ([], [], []) and names(project) == set()


@pytest.mark.parametrize("content", [b"\n", b"{}\n", b"[]\n", b"null\n", b"\xff\n", b"[" * 50000 + b"\n", b'{"plan": 3, "own": {}}\n'])
def test_a_trace_that_says_nothing_stops_the_submit_and_is_named(project, content):
    path = trace_of(project)
    path.write_bytes(content)
    with pytest.raises(RecordError, match=path.name):
        reserve(project, plan(), own("run-2"))
    claimed, _, said = left_overs(project)
    assert claimed == [] and path.name in said[0] and path.read_bytes() == content


@pytest.mark.parametrize("changed", [{"pid": "x"}, {"host": 3}, {"own": {"run_id": "../x", "runs_dir": "/r"}}, {"own": {"run_id": "x", "runs_dir": "r"}},
                                     {"plan": {"plan_id": "3.1"}}, {"submitted_at": "then"}])
def test_a_trace_whose_fields_can_not_be_used_stops_the_submit(project, changed):
    path = trace_of(project, **changed)
    with pytest.raises(RecordError, match=path.name):
        reserve(project, plan(), own("run-2"))


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/passwd"), lambda path: path.mkdir(), os.mkfifo])
def test_a_trace_that_is_no_plain_file_stops_the_submit(project, make):
    path = trace_of(project)
    path.unlink()
    make(path)
    with pytest.raises(RecordError, match=path.name):
        reserve(project, plan(), own("run-2"))
    assert path.name in left_overs(project).unclear[0]


def test_a_trace_of_another_machine_is_settled_there_since_a_lock_may_not_show_here(project):
    path = trace_of(project, host="login7")
    with pytest.raises(RecordError, match=f"login7.*poll --all.*{path.name}"):
        reserve(project, plan(), own("run-2"))
    claimed, _, said = left_overs(project)
    assert claimed == [] and "login7" in said[0]


def test_without_locks_a_submit_that_lives_is_told_by_its_process(project, monkeypatch):
    path = trace_of(project)

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(RecordError, match="being submitted just now"):                        # this process is the one that it names
        reserve(project, plan(), own("run-2"))
    path.write_text(path.read_text().replace(f'"start": "{json.loads(path.read_text())["start"]}"', '"start": "1"'))
    with pytest.raises(RecordError, match="cut short"):                                       # another one with the same number
        reserve(project, plan(), own("run-2"))
    path.write_bytes(b"")
    with pytest.raises(RecordError, match="just about to"):                                   # it may be writing
        reserve(project, plan(), own("run-2"))
    os.utime(path, (1, 1))
    reserve(project, plan(), own("run-2")).drop()


def test_a_file_is_locked_where_a_folder_can_not_be(project, monkeypatch):
    real, folders = fcntl.flock, []

    def nfs(fd, how):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            folders.append(fd)
            raise OSError(errno.EBADF, "Bad file descriptor")
        return real(fd, how)
    monkeypatch.setattr(fcntl, "flock", nfs)
    submit(project, "run-1")
    assert folders and names(project) == {"run-1.json", asyncjobs.LOCK_FILE} and len(read_all(project)) == 1


def test_a_lock_that_somebody_keeps_is_waited_for_and_then_named(project, monkeypatch):
    fd = os.open(project.jobs, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(asyncjobs, "LOCK_S", 0.1)
    with pytest.raises(RecordError, match="lock of"):
        reserve(project, plan(), own())
    os.close(fd)
    reserve(project, plan(), own()).drop()


def test_no_descriptor_is_left_open(project):
    for number in range(5):
        submit(project, f"run-{number}", str(number))
        with pytest.raises(RecordError):
            reserve(project, plan(str(number)), own("x"))
        trace_of(project)
        for one in left_overs(project).claimed:
            one.drop()
        Path(project.jobs, "bad.json").mkdir()
        with pytest.raises(RecordError):
            reserve(project, plan(), own("x"))
        Path(project.jobs, "bad.json").rmdir()
    left = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):         # another thread's, closed just now
            left.append(os.readlink(f"/proc/self/fd/{name}"))
    assert not [path for path in left if path.startswith(project.root)]


def test_a_config_that_is_a_fifo_is_none_and_is_not_waited_for(tmp_path):
    (tmp_path / ".planning").mkdir()
    os.mkfifo(tmp_path / ".planning/config.json")
    project = asyncjobs.find_project(str(tmp_path), str(tmp_path / "runs"))
    assert asyncjobs.settings(project, {}) == asyncjobs.Settings()
