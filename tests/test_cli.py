"""The command line: what is typed, what is said, what is touched, what is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ("run", "submit", "plan", "status", "attach", "wait", "logs", "fetch", "stop", "rm", "doctor")


def snapshot(*roots: Path) -> dict[str, tuple]:
    """Every path below the roots with what a write would change."""
    found = {}
    for root in roots:
        for path in [root, *root.rglob("*")]:
            state = path.lstat()
            found[str(path)] = (state.st_mode, state.st_size, state.st_mtime_ns)
    return found


def modules(here, *args, env=None) -> set[str]:
    """What a gpurun command imports."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "gpurun", *map(str, args)], cwd=here.work, env=env or here.env,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def loaded(names: set[str], *packages: str) -> set[str]:
    return {package for package in packages if any(name == package or name.startswith(package + ".") for name in names)}


# ---- commands and options -----------------------------------------------------------------------------------------------------------------

def test_a_job_file_alone_is_run(warm):
    path = warm.job("echo hi; exit 3")
    first, second = warm.gpurun(path), warm.gpurun("run", path)
    assert first.returncode == second.returncode == 3 and first.stdout == second.stdout == b"hi\n"
    assert warm.gpurun("--quiet", path).returncode == 3            # an option in front is run's as well


def test_a_job_file_with_another_name(warm):
    path = warm.job("echo hi", name="odd").rename(warm.work / "jobfile")
    assert warm.gpurun(path).stdout == b"hi\n"


@pytest.mark.parametrize("typed, near", [("statsu", "status"), ("log", "logs"), ("docter", "doctor")])
def test_an_unknown_command_is_answered_with_the_nearest(here, typed, near):
    done = here.gpurun(typed)
    assert done.returncode == 2 and f"did you mean {near}?" in done.stderr.decode() and done.stdout == b""
    assert all(command in done.stderr.decode() for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(here, command):
    done = here.gpurun(command, "--help")
    assert done.returncode == 0 and f"Example: gpurun {command}" in done.stdout.decode() and done.stderr == b""


def test_help_names_every_command_and_shows_how_to_begin(here):
    for option in ("--help", "-h"):
        text = here.gpurun(option).stdout.decode()
        assert "gpurun job.toml" in text and all(re.search(rf"^  {command}\b", text, re.M) for command in COMMANDS)
    assert here.gpurun("--version").stdout.startswith(b"gpurun, version ")
    assert not list(here.home.iterdir())


@pytest.mark.parametrize("args", [["run"], ["run", "--nonsense"], ["job.toml", "--nope"], ["status", "a", "b"], ["logs"], ["plan", "job.toml", "--wait"],
                                  ["run", "job.toml", "--node"], ["--cluster"], ["submit"], ["run", "job.toml", "--keep", "0"], ["attach"],
                                  ["attach", "latest", "--tail", "2", "--since-here"], ["attach", "latest", "--tail", "x"], ["wait"], ["fetch"], ["rm"],
                                  ["fetch", "latest", "--to", ""], ["logs", "latest", "--tail", "-1"], ["stop", "latest", "--grace", "-1"], ["attach", "latest"]])
def test_bad_options_exit_2_on_stderr(here, args):
    here.job("true")
    done = here.gpurun(*args)
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.startswith(b"gpurun: error: ") and not here.runs.exists()


def test_gpurun_alone_shows_its_help(here):
    done = here.gpurun()
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.startswith(b"Usage: ") and b"gpurun job.toml" in done.stderr


def unread(here, *args):
    """gpurun with a stdout whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return here.gpurun(*args, stdout=writer)
    finally:
        os.close(writer)


def test_a_reader_that_leaves_is_no_failure(here):
    path = here.job("true")
    for args in (["plan", path], ["plan", path, "--json"], ["doctor"], ["--help"], ["run", "--help"], ["--version"]):
        done = unread(here, *args)
        assert (done.returncode, done.stderr) == (0, b""), args
    here.gpurun(path)
    for args in (["status"], ["status", "--json"], ["status", "latest"], ["logs", "latest"]):
        done = unread(here, *args)
        assert (done.returncode, done.stderr) == (0, b""), args
    (here.home / ".config/gpurun/key").chmod(0o644)
    assert unread(here, "doctor").returncode == 125            # what it found is true whether or not somebody reads it


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_what_cant_be_written_to_stdout_is_said(warm):
    path = warm.job("echo hi; exit 3", name="full")
    for args in ([path], [path, "--json"], ["logs", "latest"], ["logs", "latest", "--json"]):
        with open("/dev/full", "wb") as full:
            done = warm.gpurun(*args, stdout=full)
        said = [line for line in done.stderr.decode().splitlines() if "stdout" in line]
        assert len(said) == 1 and said[0].endswith("; the whole output is in the run's folder") and "No space left" in said[0], args
        assert done.returncode == (3 if args[0] == path else 125)   # the job's own; the answer that was asked for isn't there
    with open("/dev/full", "wb") as full:
        done = warm.gpurun("plan", path, stdout=full)
    assert done.returncode == 125 and b"stdout can't be written" in done.stderr
    with open("/dev/full", "wb") as full:
        done = warm.gpurun("nothing.toml", "--json", stdout=full)
    assert done.returncode == 2 and b"nothing.toml" in done.stderr


@pytest.mark.parametrize("home", ["", "odd"])
def test_a_home_that_is_no_absolute_path_is_an_error_and_makes_no_folder(here, home):
    path = here.job("true")
    before = snapshot(here.folder)
    for args in ([path], ["plan", path], ["doctor"]):
        done = here.gpurun(*args, env=dict(here.env, HOME=home))
        assert done.returncode == 2 and f"HOME is '{home}'" in done.stderr.decode(), args
    assert here.gpurun("status", env=dict(here.env, HOME=home)).returncode == 0
    assert snapshot(here.folder) == before


# ---- errors in the files ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("content, where, what", [
    ('[job]\nname = "a"\nrun = "x\n', "job.toml:3:", ""),
    ('[job]\nname = "a"\nrun = "true"\nrnu = 1\n', "job.toml:4:1", "run"),
    ('[job]\nname = "a"\nrun = 3\n', "job.toml:3:", "run"),
    ('[job]\nname = "a b"\nrun = "true"\n', "job.toml:2:", "name"),
    ('[job]\nname = "a"\nrun = "true"\ngpu = "H100"\n', "job.toml:4:1", "cluster"),
    ('[job]\nname = "a"\nrun = "true"\noutputs = ["../x"]\n', "job.toml:4:", ".."),
    ('[job]\nname = "a"\nrun = "true"\n[job.workspace]\nworkdir = "."\nexclude = [\n  "ok",\n  "\\\\"]\n', "job.toml:8:3: job.workspace.exclude[1]: ", "pattern"),
    ('[job]\nname = "a"\nrun = "true"\n[external_job]\nplan = 3.1\n', "job.toml:5:", "quote it"),
    ('[job]\nname = "a"\nrun = "true"\nworkspace = { workdir = "missing" }\n', "job.toml:4:", "missing")])
def test_errors_of_the_job_file_say_where_and_touch_nothing(here, content, where, what):
    (here.work / "job.toml").write_text(content)
    before = snapshot(here.folder)
    for command in ([], ["run"], ["plan"]):
        done = here.gpurun(*command, "job.toml")
        assert done.returncode == 2 and done.stdout == b"" and where in done.stderr.decode() and what in done.stderr.decode()
    done = here.gpurun("job.toml", "--json")
    assert done.returncode == 2 and json.loads(done.stdout.splitlines()[-1])["type"] == "error" and where in done.stdout.decode()
    assert snapshot(here.folder) == before


@pytest.mark.parametrize("name", ["nothing.toml", "folder.toml"])
def test_a_job_file_that_isnt_there(here, name):
    (here.work / "folder.toml").mkdir()
    done = here.gpurun(name)
    assert done.returncode == 2 and name.encode() in done.stderr and not here.runs.exists()


def test_a_job_that_is_to_be_given_away_needs_what_its_manifest_needs_before_anything_begins(here):
    path = here.job("true")
    path.write_text(path.read_text() + '\n[external_job]\nruntime_budget = "long_compute"\nphase = "3"\n')
    done = here.gpurun(path)
    assert done.returncode == 2 and b"job.toml: to be waited for by others the job needs plan, verify" in done.stderr and not here.runs.exists()
    done = here.gpurun("submit", path, "--plan", "3.1", "--verify", "test -s a")
    assert done.returncode == 2 and b"declares no outputs" in done.stderr and not here.runs.exists()
    path = here.job("true", outputs=["a"])
    done = here.gpurun("submit", path, "--phase", "3", "--verify", "test -s a")
    assert done.returncode == 2 and b"--phase and --verify would go into the manifest of a plan" in done.stderr and not here.runs.exists()
    done = here.gpurun("submit", path, "--plan", "3.1", "--phase", "3", "--verify", "test -s a", "--expected", "a,b")
    assert done.returncode == 2 and b'--expected: "b" would not come home' in done.stderr and not here.runs.exists()
    done = here.gpurun("submit", path, "--plan", "3.1", "--phase", "3", "--verify", "test -s a", "--backend", "slurm")
    assert done.returncode == 2 and b"this machine is of kind local" in done.stderr and b"--backend node" in done.stderr and not here.runs.exists()


def test_a_node_that_the_cluster_hasnt_got(here):
    (here.work / "cluster.toml").write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "gpu1"\n')
    done = here.gpurun(here.job("true"), "--node", "gpu2")
    assert done.returncode == 2 and b"gpu1" in done.stderr and b"gpu2" in done.stderr and not here.runs.exists()


# ---- plan ----------------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def planned(here):
    folder = here.work / "project"
    path = here.job("python train.py\nsecond line", name="train", folder=folder, setup="pip install x", outputs=["m.json"], env={"TOKEN": "${SECRET}"},
                    workspace={"workdir": ".", "exclude": ["*.tmp"]})
    (folder / "data").mkdir()
    (folder / "data/big.bin").write_bytes(b"x" * 5_000)
    (folder / "a.tmp").write_text("no")
    os.mkfifo(folder / "pipe")
    here.env["SECRET"] = "value-of-it"
    return path


@pytest.mark.parametrize("kind", ["local", "ssh"])
def test_plan_says_what_would_go_where_and_touches_nothing(here, planned, kind):
    if kind == "ssh":
        (planned.parent / "cluster.toml").write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "me@gpu1:2222"\n')
    before = snapshot(here.folder)
    done = here.gpurun("plan", planned)
    text = done.stdout.decode()
    assert done.returncode == 0 and done.stderr == b""
    assert all(word in text for word in ("train", "me@gpu1:2222" if kind == "ssh" else "this machine", "data", "*.tmp: 1 path", "pipe", "m.json", "TOKEN"))
    assert "value-of-it" not in text
    assert here.gpurun(planned, "--dry-run").stdout == done.stdout
    plan = json.loads(here.gpurun("plan", planned, "--json").stdout)
    assert plan["type"] == "plan" and plan["workspace"]["files"] == (3 if kind == "ssh" else 2) and plan["workspace"]["size_bytes"] > 5_000
    assert plan["workspace"]["excluded"] == {"*.tmp": 1} and [skip["path"] for skip in plan["workspace"]["skipped"]] == ["pipe"]
    assert plan["nodes"][0]["node"] == ("me@gpu1:2222" if kind == "ssh" else "local")
    assert snapshot(here.folder) == before


def test_plan_names_what_git_ignores_and_would_go(here):
    folder = here.work / "repo"
    path = here.job("true", folder=folder, workspace={"workdir": "."})
    subprocess.run(["git", "init", "-q", str(folder)], check=True, env=here.env)
    (folder / ".gitignore").write_text("secrets/\n")
    (folder / "secrets").mkdir()
    (folder / "secrets/key").write_text("k")
    text = here.gpurun("plan", path).stdout.decode()
    assert "1 files" not in text and "1 folders" not in text and "1 folder," in text and "1 file " in text
    assert "git ignores 1" in text and "secrets" in text


# ---- status ----------------------------------------------------------------------------------------------------------------------------------

def test_status_lists_whole_broken_and_foreign_folders(here):
    assert here.gpurun("status").returncode == 0 and not here.runs.exists()
    here.gpurun(here.job("exit 3", name="failed"))
    failed = here.latest.name
    here.gpurun(here.job("echo 1 > x", name="fine", outputs=["x", "y"]))
    fine = here.latest.name
    path = here.latest / "run.json"
    path.write_text(json.dumps(dict(json.loads(path.read_text()), reason="exited 0\x1b[2J, " + "and much more " * 30)))
    (here.runs / "notes").mkdir()
    broken = here.runs / "broken-20260101-000000-0000"
    broken.mkdir()
    (broken / "run.json").write_text('{"version": 1, "run')
    newer = here.runs / "newer-20260101-000000-0000"
    newer.mkdir()
    (newer / "run.json").write_text('{"version": 99}')
    done = here.gpurun("status")
    lines = {line.split()[0]: line for line in done.stdout.decode().splitlines()}
    assert done.returncode == 0 and set(lines) == {failed, fine, "notes", broken.name, newer.name}
    assert "FAILED" in lines[failed] and "exited 3" in lines[failed] and "COMPLETED" in lines[fine]
    assert lines[fine].endswith("…") and len(lines[fine]) < 200 and "\x1b" not in lines[fine]
    assert "not a run" in lines["notes"] and "JSON" in lines[broken.name] and "99" in lines[newer.name]
    objects = {item["run_id"]: item for item in map(json.loads, here.gpurun("status", "--json").stdout.splitlines())}
    assert set(objects) == set(lines) and objects[failed]["exit_code"] == 3 and objects[broken.name]["problem"]
    one = json.loads(here.gpurun("status", fine[:6], "--json").stdout)
    assert (one["type"], one["state"], one["outputs"], one["missing"], one["driven"]) == ("run", "COMPLETED", ["x"], ["y"], False)
    text = here.gpurun("status", "latest").stdout.decode()
    assert fine in text and "missing    y" in text and str(here.latest) in text
    for name in ("notes", broken.name, "nonsense"):
        done = here.gpurun("status", name)
        assert done.returncode == 2 and name.encode() in done.stderr


# ---- doctor ----------------------------------------------------------------------------------------------------------------------------------

def test_doctor_on_this_machine(here):
    done = here.gpurun("doctor")
    text = done.stdout.decode()
    assert done.returncode == 0 and "FAIL" not in text and "no agent runs yet" in text and not (here.node_dir / "agent").exists()
    here.gpurun(here.job("true"))
    checks = {check["name"]: check for check in map(json.loads, here.gpurun("doctor", "--json").stdout.splitlines())}
    assert all(check["type"] == "check" for check in checks.values())
    assert checks["iroh"]["ok"] and checks["iroh fast writes"]["ok"] and checks["key"]["ok"]
    assert checks["node local"]["ok"] and "idle" in checks["node local"]["text"] and str(here.node_dir) in checks["node local"]["text"]


def test_doctor_names_a_key_that_others_may_read(here):
    here.gpurun(here.job("true"))
    key = here.home / ".config/gpurun/key"
    key.chmod(0o644)
    done = here.gpurun("doctor")
    assert done.returncode == 125 and f"chmod 600 {key}" in done.stdout.decode()


def test_doctor_says_when_a_host_cant_be_reached(here):
    (here.work / "cluster.toml").write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "nobody@127.0.0.1:1"\n')
    done = here.gpurun("doctor")
    assert done.returncode == 125 and b"FAIL  node nobody@127.0.0.1:1" in done.stdout


# ---- what is loaded --------------------------------------------------------------------------------------------------------------------------

HEAVY = ("fabric", "paramiko", "invoke", "cryptography", "iroh", "pathspec", "asyncio")


def test_light_commands_load_nothing_heavy(here):
    assert not loaded(modules(here, "--help"), *HEAVY, "gpurun.config", "gpurun.orchestrator")
    assert not loaded(modules(here, "--version"), *HEAVY)
    assert not loaded(modules(here, "status"), *HEAVY)
    assert not loaded(modules(here, "plan", here.job("true")), *HEAVY)
    path = here.job("true", folder=here.work / "with", workspace={"workdir": "."})
    assert loaded(modules(here, "plan", path), *HEAVY) <= {"pathspec"}   # that is what reads exclude


def test_a_warm_run_loads_no_ssh(warm):
    warm.gpurun(warm.job("true"))
    assert not loaded(modules(warm, warm.job("true")), "fabric", "paramiko", "invoke", "cryptography", "gpurun.ssh")
