"""gpurun poll, show and verify: on real runs of a real agent, whose manifests are written as `gpurun submit --plan` writes them."""

from __future__ import annotations

import json
import os
import select
import signal
import time

import pytest
import signalled
from conftest import eventually
from running import Running, gone
from test_attach import go, nothing_goes_on, on_node, submit, until   # noqa: F401 (a fixture)

from gpurun import asyncjobs, external, supervise
from gpurun.external import Own, Plan

pytestmark = pytest.mark.usefixtures(nothing_goes_on.__name__)


@pytest.fixture
def project(warm, request):
    """A GSD project of the test's own, in the folder that gpurun is run in."""
    root = warm.work / f"p{abs(hash(request.node.name)) % 10**10}"
    (root / ".planning").mkdir(parents=True)
    return Jobs(warm, root)


class Jobs:
    """Async jobs of one project."""

    def __init__(self, here, root, planning=True):
        self.here, self.root, self.env = here, root, here.env
        self.project = asyncjobs.find_project(str(root), str(here.runs))
        self.folder = root / ".planning" / "async-jobs" if planning else here.runs / "async-jobs"

    def job(self, run, name, plan="3.1", verify="test -s $GPURUN_OUTPUTS/out.txt", expected=("out.txt",), outputs=("out.txt",), run_id="", **keys):
        """The id of a run that was submitted and has a manifest."""
        run_id = run_id or submit(self.here, self.here.job(run, name=name, outputs=list(outputs), **keys))
        reserved = self.reserve(run_id, plan, verify, expected)
        reserved.write(external.build(reserved.trace.plan, run_id, "submitted", reserved.trace.submitted_at, own=reserved.trace.own))
        return run_id

    def reserve(self, run_id, plan="3.1", verify="true", expected=("out.txt",), backend="node"):
        what = Plan(plan, "3", backend, "gpurun submit job.toml --plan 3.1", tuple(expected), verify, "/gsd:execute-phase 3")
        return asyncjobs.reserve(self.project, what, Own(run_id, str(self.here.runs), "", str(self.root)))

    def ended_job(self, run, name, **keys):
        run_id = self.job(run, name, **keys)
        self.ended(run_id)
        return run_id

    def ended(self, run_id, agent=True):
        """Until its process is over, and the agent has heard of it if there is one."""
        folder = self.here.node_dir / "runs" / run_id
        eventually((folder / "run.exit").exists, 60)
        if agent:
            eventually(lambda: json.loads((folder / "state.json").read_text())["over"])

    def manifest(self, job_id):
        return json.loads((self.folder / f"{job_id}.json").read_text())

    def change(self, job_id, **fields):
        """As somebody else might who can write the folder."""
        (self.folder / f"{job_id}.json").write_text(json.dumps({**self.manifest(job_id), **fields}))

    def start(self, *args, **options):
        return self.here.start(*args, "--runs-dir", self.here.runs, **{"cwd": self.root, **options})

    def gpurun(self, *args, **options):
        return self.here.gpurun(*args, "--runs-dir", self.here.runs, **{"cwd": self.root, **options})

    def poll(self, *args, code=0):
        done = self.gpurun("poll", *args)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]


# ---- poll ------------------------------------------------------------------------------------------------------------------------------------

def test_poll_follows_a_job_to_its_end(project, warm):
    run_id = project.job(f"echo up; {until(warm, 'follow')}; echo 1 > out.txt", "follow")
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    row = project.poll(run_id)[0]
    assert row == {"type": "job", "job_id": run_id, "backend_state": "run", "manifest_status": "running", "path": str(project.folder / f"{run_id}.json"),
                   "plan_id": "3.1", "backend": "node", "run_id": run_id}
    submitted = project.manifest(run_id)["submitted_at"]
    assert project.manifest(run_id)["status"] == "running" and project.manifest(run_id)["terminal_details"] is None
    go(warm, "follow")
    project.ended(run_id)
    assert project.poll("--all")[0]["manifest_status"] == "completed-unverified"
    assert (project.manifest(run_id)["status"], project.manifest(run_id)["submitted_at"]) == ("completed-unverified", submitted)
    assert project.manifest(run_id)["terminal_details"] is None and external.decode((project.folder / f"{run_id}.json").read_bytes(), "f", run_id)


def test_poll_of_a_job_that_failed_says_why_and_keeps_it(project):
    run_id = project.ended_job("exit 3", "failed")
    row = project.poll()[0]                                           # naming none is --all
    assert (row["backend_state"], row["manifest_status"], row["terminal_details"]) == ("ended", "failed", {"reason": "exited 3", "exit_code": 3})
    assert project.manifest(run_id)["terminal_details"] == {"reason": "exited 3", "exit_code": 3}
    before = (project.folder / f"{run_id}.json").stat()
    assert project.poll("--all")[0] == row and (project.folder / f"{run_id}.json").stat().st_ino == before.st_ino   # nothing changed, nothing written


def test_poll_of_a_job_that_was_stopped_says_cancelled(project, warm):
    run_id = project.job("echo up; exec sleep 600", "stopped")
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    assert project.gpurun("stop", run_id).returncode == 0
    row = project.poll(run_id)[0]
    assert (row["manifest_status"], row["terminal_details"]["reason"]) == ("cancelled", "stopped by the operator")
    assert warm.record()["state"] == "FAILED"                         # this one came from the record: its last word was there


def test_a_job_that_waits_for_its_turn_is_submitted(project, warm):
    first = submit(warm, warm.job(f"echo up; {until(warm, 'turn')}", name="first"))
    run_id = project.job("echo 1 > out.txt", "second")
    row = project.poll(run_id)[0]
    assert (row["backend_state"], row["manifest_status"]) == ("queued", "submitted")
    go(warm, "turn")
    project.ended(run_id)
    assert project.poll(run_id)[0]["manifest_status"] == "completed-unverified" and warm.gpurun("wait", first).returncode == 0


def test_poll_keeps_what_the_node_said_for_status(project, warm):
    run_id = project.ended_job("exit 3", "seen")
    project.poll(run_id)
    assert json.loads((warm.runs / run_id / "run.json").read_text())["seen"]["code"] == 3
    assert "ended with exit code 3" in warm.gpurun("status", run_id).stdout.decode()


def test_poll_says_json_lines_to_stdout_and_nothing_else_whatever_is_asked_for(project):
    run_ids = [project.ended_job("echo 1 > out.txt", f"lines{number}", plan=str(number)) for number in range(2)]
    for args in ((), ("--all",), ("--json",), run_ids, (run_ids[0], run_ids[0], run_ids[1])):
        rows = project.poll(*args)
        assert [row["job_id"] for row in rows] == (run_ids if args else sorted(run_ids)) and {row["type"] for row in rows} == {"job"}


def test_poll_where_there_is_nothing_says_so(project):
    done = project.gpurun("poll", "--all")
    assert done.returncode == 0 and done.stdout == b"" and b"no job has a manifest here" in done.stderr
    assert project.gpurun("poll", "x").returncode == 2 and b"no job x" in project.gpurun("poll", "x").stderr
    assert project.gpurun("poll", "x", "--all").returncode == 2


def test_poll_finds_out_how_a_job_ended_whose_agent_was_killed(here):
    (here.work / ".planning").mkdir()
    project = Jobs(here, here.work)
    run_id = project.job(f"echo up; {until(here, 'killed')}; exit 4", "killed")
    eventually(lambda: on_node(here, run_id, "run.out") == "up\n")
    os.kill(here.agent()["pid"], signal.SIGKILL)
    assert project.poll(run_id)[0]["manifest_status"] == "running"    # asked of a new one
    os.kill(here.agent()["pid"], signal.SIGKILL)
    go(here, "killed")
    project.ended(run_id, agent=False)
    assert project.poll(run_id)[0]["terminal_details"] == {"reason": "exited 4", "exit_code": 4}
    agent = here.agent()
    os.kill(agent["pid"], signal.SIGKILL)
    assert project.poll(run_id)[0]["manifest_status"] == "failed" and here.agent() == agent   # it is over: nobody was asked any more


def test_a_node_that_can_not_be_reached_leaves_its_jobs_as_they_are(project, warm):
    run_id = project.job(f"echo up; {until(warm, 'away')}", "away")
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    cluster, path = warm.work / "away.toml", warm.runs / run_id / "run.json"
    cluster.write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "nobody@127.0.0.1:1"\n')
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "node": {**record["node"], "name": "nobody@127.0.0.1:1", "kind": "ssh", "cluster": str(cluster)}}))
    row = project.poll("--all", code=125)[0]
    assert (row["backend_state"], row["manifest_status"]) == ("unknown", "submitted") and "127.0.0.1" in row["problem"]
    cluster.unlink()
    assert "gone" in project.poll(run_id, code=125)[0]["problem"]
    path.write_text(json.dumps(record))
    assert project.poll(run_id)[0]["manifest_status"] == "running"
    go(warm, "away")
    assert warm.gpurun("wait", run_id).returncode == 0


def test_a_manifest_that_came_to_another_machine_says_what_is_lacking(project, warm):
    run_id = project.ended_job("exit 0", "copied")
    os.rename(warm.runs / run_id, warm.work / "elsewhere")
    row = project.poll(run_id, code=125)[0]
    assert row["backend_state"] == "unknown" and row["manifest_status"] == "submitted"
    assert str(warm.runs) in row["problem"] and str(project.root) in row["problem"] and "key" in row["problem"]
    done = project.gpurun("verify", run_id)
    assert done.returncode == 125 and b"isn't in" in done.stderr and project.gpurun("show", run_id).returncode == 0
    os.rename(warm.work / "elsewhere", warm.runs / run_id)


def test_a_job_of_another_producer_is_shown_and_left_alone(project):
    run_id = project.ended_job("exit 0", "other")
    manifest = {key: value for key, value in project.manifest(run_id).items() if key != "gpurun"}
    project.change(run_id, status="completed-unverified", plan_id="other")
    (project.folder / "4711.json").write_text(json.dumps({**manifest, "job_id": "4711", "backend": "lsf"}))
    row = next(row for row in project.poll("--all") if row["job_id"] == "4711")
    assert (row["backend_state"], row["manifest_status"], row["run_id"]) == ("unknown", "submitted", "") and "lsf" in row["note"]
    assert b"gpurun didn't submit it" in project.gpurun("show", "4711").stdout
    done = project.gpurun("verify", "4711", "--confirm", manifest["verification_command"])
    assert done.returncode == 2 and b"didn't submit" in done.stderr


@pytest.mark.parametrize("own", [{"run_id": "../x", "runs_dir": "/etc"}, "x", {"run_id": "x", "runs_dir": "/nowhere"}])
def test_a_manifest_that_names_no_run_of_ours_changes_nothing(project, own):
    run_id = project.ended_job("exit 0", "forged")
    project.change(run_id, gpurun=own)
    row = project.poll(run_id, code=125)[0]
    assert row["backend_state"] == "unknown" and row["manifest_status"] == "submitted" and project.manifest(run_id)["gpurun"] == own
    assert project.gpurun("verify", run_id, "--confirm", "x").returncode in (2, 125)


@pytest.mark.parametrize("status", ["submitted", "completed-unverified"])
def test_a_repository_that_brings_its_own_records_starts_nothing(project, warm, status):
    """A manifest names a record, a record a cluster file, and that the program that the agent is started with."""
    run_id = project.ended_job("echo 1 > out.txt", "bait")
    evil = project.root / "evil"
    evil.write_text("#!/bin/sh\ntouch ~/started\n")
    evil.chmod(0o755)
    cluster = project.root / "cluster.toml"
    cluster.write_text(f'[provider]\nkind = "local"\nnode_dir = "{project.root}/node"\npython = "{evil}"\n')
    record = json.loads((warm.runs / run_id / "run.json").read_text())
    (project.root / "runs/forged-1").mkdir(parents=True)
    (project.root / "runs/forged-1/run.json").write_text(json.dumps({**record, "run_id": "forged-1", "node": {
        **record["node"], "cluster": "/proc/self/cwd/cluster.toml", "operator": "0" * 64}}))
    project.change(run_id, status=status, gpurun={"run_id": "forged-1", "runs_dir": "/proc/self/cwd/runs"})
    for args in (("poll", "--all"), ("verify", run_id)):
        done = project.gpurun(*args)
        assert done.returncode == (0 if args[0] == "poll" and status != "submitted" else 125) and b"\x1b" not in done.stdout
        assert done.returncode == 0 or b"another key" in done.stdout + done.stderr
    assert not (warm.home / "started").exists() and not (project.root / "node").exists()


def test_a_file_that_can_not_be_trusted_stops_every_command_and_is_named(project):
    run_id = project.ended_job("echo 1 > out.txt", "beside")
    (project.folder / "bad.json").write_bytes(b'{"version": "1.0"')
    for args in (("poll", "--all"), ("poll", run_id), ("show", run_id), ("verify", run_id)):
        done = project.gpurun(*args)
        assert done.returncode == 2 and b"bad.json" in done.stderr and done.stdout == b""
    assert project.manifest(run_id)["status"] == "submitted"


def test_two_manifests_of_a_plan_are_surfaced_and_the_other_plans_polled(project):
    run_id, other = project.ended_job("exit 0", "twice"), project.ended_job("exit 0", "once", plan="4")
    (project.folder / "copy.json").write_text(json.dumps({**project.manifest(run_id), "job_id": "copy"}))
    done = project.gpurun("poll", "--all")
    assert done.returncode == 125 and b"2 manifests" in done.stderr and [json.loads(line)["job_id"] for line in done.stdout.splitlines()] == [other]
    assert project.manifest(run_id)["status"] == "submitted"
    for args in (("poll", run_id), ("show", run_id), ("verify", "copy")):
        assert project.gpurun(*args).returncode == 2


def test_outside_of_a_gsd_project_the_manifests_are_with_the_runs(here):
    project = Jobs(here, here.work, planning=False)
    run_id = project.ended_job("echo 1 > out.txt; pwd", "outside", verify="pwd > where")
    assert project.poll("--all")[0]["path"] == str(here.runs / "async-jobs" / f"{run_id}.json")
    done = here.gpurun("verify", run_id, "--confirm", "pwd > where", cwd=here.home, env={**here.env, "GPURUN_RUNS": str(here.runs)})
    assert done.returncode == 0 and (here.work / "where").read_text() == f"{here.work}\n"      # where it was submitted
    assert not (here.work / "Artifacts").exists()
    listed = here.gpurun("status").stdout.decode()
    assert run_id in listed and "async-jobs" not in listed


# ---- show ------------------------------------------------------------------------------------------------------------------------------------

HOSTILE = "rm -rf /tmp/x # \x1b[2K\rpytest -q\n\u202eecho"


def test_show_marks_the_commands_untrusted_and_escapes_what_could_deceive_a_terminal(project):
    run_id = project.ended_job("exit 0", "show", verify=HOSTILE)
    project.change(run_id, resume_command="/gsd\x07", submit_command="ok\nverification_command true", plan_id="3.1\x1b[31m", phase="3\r", note="\x1b")
    done = project.gpurun("show", run_id)
    shown = done.stdout.decode()
    assert done.returncode == 0 and all(line.isprintable() for line in shown.splitlines()) and "untrusted" in shown
    assert "$'rm -rf /tmp/x # \\e[2K\\rpytest -q\\n\\u202eecho'" in shown and "$'/gsd\\x07'" in shown and "$'3.1\\e[31m'" in shown
    assert sum(line.lstrip().startswith("verification_command") for line in shown.splitlines()) == 1
    value = json.loads(project.gpurun("show", run_id, "--json").stdout)
    assert value["type"] == "manifest" and value["manifest"] == project.manifest(run_id) and value["untrusted"] == list(
        ("submit_command", "verification_command", "resume_command"))
    assert project.gpurun("show", run_id, "--json").stdout.decode().strip().isprintable()


def test_show_of_a_failure_has_its_details_and_what_can_be_done_and_asks_nobody(here):
    (here.work / ".planning").mkdir()
    project = Jobs(here, here.work)
    run_id = project.ended_job("exit 3", "details")
    project.poll(run_id)
    agent = here.agent()
    os.kill(agent["pid"], signal.SIGKILL)
    shown = project.gpurun("show", run_id).stdout.decode()
    assert '{"reason": "exited 3", "exit_code": 3}' in shown and "submit it again" in shown and "/gsd:execute-phase 3" in shown
    assert here.agent() == agent and len(list(here.runs.glob("details-*"))) == 1


# ---- verify ------------------------------------------------------------------------------------------------------------------------------------

def test_verify_runs_the_command_that_was_confirmed_by_its_exact_text(project):
    verify = "echo to-stdout; echo to-stderr >&2; read x; echo \"[$x]\" >&2; grep -q 1 \"$GPURUN_OUTPUTS/out.txt\" && pwd > here"
    run_id = project.ended_job("echo 1 > out.txt", "verify", verify=verify)
    done = project.gpurun("verify", run_id, "--confirm", verify)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"{run_id}: verified; its plan can be closed\n"
    assert b"to-stdout\n" in done.stderr and b"to-stderr\n" in done.stderr and b"[]" in done.stderr and verify.encode() in done.stderr
    assert (project.root / "here").read_text() == f"{project.root}\n"
    manifest = project.manifest(run_id)
    assert manifest["status"] == "completed-unverified" and manifest["verification"]["exit_code"] == 0
    assert manifest["verification"]["artifacts"] == ["out.txt"] and manifest["verification"]["missing"] == []
    assert (project.root / "Artifacts/jobs" / run_id / "out.txt").read_text() == "1\n"
    assert b"yes: exit code 0" in project.gpurun("show", run_id).stdout
    value = json.loads(project.gpurun("verify", run_id, "--json", "--confirm", verify).stdout.splitlines()[-1])
    assert value["type"] == "verified" and value["exit_code"] == 0 and value["manifest_status"] == "completed-unverified"


@pytest.mark.parametrize("command, code", [("exit 7", 7), ("kill -9 $$", 137), ("no-such-program", 127), ("if", 2), ("exit 0", 0)])
def test_verify_exits_with_the_code_of_the_command_and_keeps_it(project, command, code):
    run_id = project.ended_job("echo 1 > out.txt", "codes", verify=command)
    done = project.gpurun("verify", run_id, "--confirm", command)
    assert done.returncode == code and project.manifest(run_id)["verification"]["exit_code"] == code
    assert project.manifest(run_id)["status"] == "completed-unverified"


def test_nothing_runs_unconfirmed_not_by_a_pipe_that_says_yes_nor_by_nearly_the_text(project):
    verify = "touch ran\x1b[2K"
    run_id = project.ended_job("echo 1 > out.txt", "unconfirmed", verify=verify)
    yes, writer = os.pipe()
    os.write(writer, b"yes\n" * 100)
    os.close(writer)
    done = project.gpurun("verify", run_id, stdin=yes)
    assert done.returncode == 2 and b"nobody can be asked" in done.stderr and b"$'touch ran\\e[2K'" in done.stderr and b"\x1b" not in done.stderr
    for wrong in ("touch ran", "touch ran\x1b[2K ", "", "yes", "$'touch ran\\e[2K'", "touch ran\x1b[2k"):
        done = project.gpurun("verify", run_id, "--confirm", wrong)
        assert done.returncode == 2 and b"another text" in done.stderr
    assert not list(project.root.glob("ran*")) and "verification" not in project.manifest(run_id)
    assert project.gpurun("verify", run_id, "--confirm", verify).returncode == 0 and list(project.root.glob("ran*"))


def test_a_command_that_was_changed_after_it_was_looked_at_is_not_the_one_that_was_confirmed(project):
    run_id = project.ended_job("echo 1 > out.txt", "changed", verify="true")
    project.change(run_id, verification_command="touch ran")
    assert project.gpurun("verify", run_id, "--confirm", "true").returncode == 2 and not (project.root / "ran").exists()


def test_a_command_with_a_nul_is_no_command(project):
    run_id = project.ended_job("echo 1 > out.txt", "nul")
    project.change(run_id, verification_command="true\0false")
    done = project.gpurun("verify", run_id)
    assert done.returncode == 2 and b"NUL" in done.stderr and b"$'true\\x00false'" in done.stderr


def test_verify_of_a_job_that_is_not_over_runs_nothing(project, warm):
    run_id = project.job(f"echo up; {until(warm, 'early')}", "early", verify="touch ran")
    eventually(lambda: on_node(warm, run_id, "run.out") == "up\n")
    done = project.gpurun("verify", run_id, "--confirm", "touch ran")
    assert done.returncode == 125 and b"isn't over" in done.stderr and f"gpurun wait {run_id}".encode() in done.stderr and not (project.root / "ran").exists()
    go(warm, "early")
    assert warm.gpurun("wait", run_id).returncode == 0


def test_verify_of_a_job_that_failed_shows_why_and_what_can_be_done_and_submits_nothing(project, warm):
    run_id = project.ended_job("echo 1 > out.txt; exit 3", "lost", verify="touch ran")
    before = set(os.listdir(warm.runs))
    done = project.gpurun("verify", run_id, "--confirm", "touch ran")
    assert done.returncode == 3 and b'"exit_code": 3' in done.stdout and b"nothing is submitted again by itself" in done.stdout
    assert json.loads(project.gpurun("verify", run_id, "--json").stdout.splitlines()[-1])["terminal_details"]["exit_code"] == 3
    assert not (project.root / "ran").exists() and set(os.listdir(warm.runs)) == before and "verification" not in project.manifest(run_id)


@pytest.mark.parametrize("status, code", [("timeout", 124), ("cancelled", 130), ("failed", 125)])
def test_verify_exits_as_wait_would_for_each_kind_of_failure(project, status, code):
    run_id = project.ended_job("exit 0", "kinds")
    project.poll(run_id)
    project.change(run_id, status=status, terminal_details={"reason": "x"})
    assert project.gpurun("verify", run_id).returncode == code


def test_what_was_expected_and_is_not_there_is_named_and_the_command_not_run(project):
    run_id = project.ended_job("mkdir d; echo 1 > d/a; ln -s /etc/passwd link", "missing", verify="touch ran", expected=("d/a", "d/b", "link"), outputs=("d", "link"))
    done = project.gpurun("verify", run_id, "--confirm", "touch ran")
    assert done.returncode == 125 and b'"d/b"' in done.stderr and b'"link"' in done.stderr and b'"d/a"' not in done.stderr.splitlines()[-1]
    result = project.manifest(run_id)["verification"]
    assert (result["exit_code"], result["artifacts"], result["missing"]) == (None, ["d/a"], ["d/b", "link"]) and not (project.root / "ran").exists()
    assert b"no: [" in project.gpurun("show", run_id).stdout


def test_a_link_that_leads_out_of_the_outputs_proves_nothing(project, warm):
    run_id = project.ended_job("echo 1 > out.txt; mkdir d; echo 2 > d/real; ln -s real d/inside", "links", expected=("out.txt", "d/inside"), outputs=("out.txt", "d"), verify="true")
    assert project.gpurun("verify", run_id, "--confirm", "true").returncode == 0               # one that stays within does
    outputs = warm.runs / run_id / "outputs"
    (outputs / "d/inside").unlink()
    (outputs / "d/inside").symlink_to("/etc/passwd")
    (warm.node_dir / "runs" / run_id / "work/d/inside").unlink()      # else it would be brought home again
    done = project.gpurun("verify", run_id, "--confirm", "true")
    assert done.returncode == 125 and b'"d/inside"' in done.stderr and project.manifest(run_id)["verification"]["missing"] == ["d/inside"]


def test_what_is_expected_comes_home_though_it_was_not_declared_or_was_deleted(project, warm):
    run_id = project.ended_job("echo 1 > out.txt; echo 2 > undeclared", "home", expected=("out.txt", "undeclared"), verify="true")
    assert project.gpurun("verify", run_id, "--confirm", "true").returncode == 0
    outputs = warm.runs / run_id / "outputs"
    assert (outputs / "undeclared").read_text() == "2\n"
    (outputs / "out.txt").unlink()
    assert project.gpurun("verify", run_id, "--confirm", "true").returncode == 0 and (outputs / "out.txt").read_text() == "1\n"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_an_expected_path_that_leads_elsewhere_is_refused(project, path):
    run_id = project.ended_job("echo 1 > out.txt", "paths")
    project.change(run_id, expected_artifacts=[path])
    done = project.gpurun("verify", run_id, "--confirm", "test -s $GPURUN_OUTPUTS/out.txt")
    assert done.returncode == 2 and path.encode() in done.stderr and "verification" not in project.manifest(run_id)


def test_the_artifact_folder_is_the_project_s_own_and_nothing_in_it_is_replaced(project, warm):
    run_id = project.ended_job("echo 1 > out.txt", "artifacts", verify="true")
    (project.root / ".planning/config.json").write_text('{"external_job": {"artifact_dir": "made/here"}}')
    assert project.gpurun("verify", run_id, "--confirm", "true").returncode == 0
    assert (project.root / "made/here" / run_id).resolve() == warm.runs / run_id / "outputs"
    mine = project.root / "env" / run_id
    mine.mkdir(parents=True)
    (mine / "mine").write_text("stays")
    env = {**warm.env, "GSD_EXTERNAL_JOB_ARTIFACT_DIR": "env"}
    value = json.loads(project.gpurun("verify", run_id, "--confirm", "true", "--json", env=env).stdout.splitlines()[-1])
    assert os.listdir(mine) == ["mine"] and not mine.is_symlink() and value["artifact_dir"] == ""
    (project.root / "file").write_text("")
    done = project.gpurun("verify", run_id, "--confirm", "true", env={**env, "GSD_EXTERNAL_JOB_ARTIFACT_DIR": "file/x"})
    assert done.returncode == 0 and b"can't be made" in done.stderr


@pytest.mark.parametrize("folder", ["../config", "/tmp/elsewhere-{pid}", "leads-out"])
def test_a_project_s_config_can_not_have_a_link_made_outside_of_it(project, warm, folder):
    folder = folder.format(pid=os.getpid())
    run_id = project.ended_job("echo 1 > out.txt", "outside-of-it", verify="true")
    (project.root / "leads-out").symlink_to(warm.home)
    (project.root / ".planning/config.json").write_text(json.dumps({"external_job": {"artifact_dir": folder}}))
    done = project.gpurun("verify", run_id, "--confirm", "true")
    assert done.returncode == 0 and b"leads out" in done.stderr and not os.path.lexists(project.root / folder / run_id)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=str)
def test_a_verification_that_is_ended_ends_whole_and_keeps_no_result(project, numbers):
    stubborn = "trap '' TERM; " if len(numbers) > 1 else ""
    command = f"{stubborn}sleep 600.{os.getpid()} & echo $! > child; echo at-work >&2; wait; wait"
    run_id = project.ended_job("echo 1 > out.txt", "signals", verify=command)
    run = Running(project, "verify", run_id, "--confirm", command)
    eventually(lambda: "at-work\n" in run.err.splitlines(keepends=True))
    for number in numbers:
        run.signal(number)
        time.sleep(0.2)
    assert run.end() == 130
    child = int((project.root / "child").read_text())
    eventually(lambda: not supervise.start_time(child))
    assert "verification" not in project.manifest(run_id)


# ---- verify, on a terminal -----------------------------------------------------------------------------------------------------------------------

QUESTION = b"type yes to run it: "


class Terminal(signalled.Terminal):
    """Nothing is waited for without a bound."""

    def _read(self) -> bool:
        assert select.select([self.master], [], [], 60)[0], self.seen.decode(errors="replace")
        return super()._read()


def on_terminal(project, run_id) -> Terminal:
    terminal = Terminal(project, "verify", run_id)
    terminal.until(QUESTION)
    return terminal


def test_on_a_terminal_the_word_yes_runs_the_command_that_was_shown(project):
    command = "touch ran; echo \x1b[2Khidden"
    run_id = project.ended_job("echo 1 > out.txt", "typed", verify=command)
    with on_terminal(project, run_id) as terminal:
        assert b"$'touch ran; echo \\e[2Khidden'" in terminal.seen and b"\x1b[2Khidden" not in terminal.seen and not (project.root / "ran").exists()
        terminal.write(b"yes\n")
        assert terminal.end() == 0
    assert (project.root / "ran").exists() and project.manifest(run_id)["verification"]["exit_code"] == 0


@pytest.mark.parametrize("typed", [b"no\n", b"\n", b"y\n", b"YES\n", b"yes please\n", b"\x04", b"ye\x04\x04", b"\x03", b"x" * 2000 + b"\n"])
def test_on_a_terminal_anything_but_the_word_runs_nothing(project, typed):
    run_id = project.ended_job("echo 1 > out.txt", "declined", verify="touch ran")
    with on_terminal(project, run_id) as terminal:
        terminal.write(typed)
        assert terminal.end() == 130
    assert not (project.root / "ran").exists() and "verification" not in project.manifest(run_id)


def test_on_a_terminal_what_was_typed_before_the_question_does_not_answer_it(project):
    run_id = project.ended_job("echo 1 > out.txt", "ahead", verify="touch ran")
    with Terminal(project, "verify", run_id) as terminal:
        terminal.write(b"yes\n")
        terminal.until(QUESTION)
        time.sleep(0.3)
        assert terminal.process.poll() is None and not (project.root / "ran").exists()
        terminal.write(b"no\n")
        assert terminal.end() == 130
    assert not (project.root / "ran").exists()


def test_on_a_terminal_that_hangs_up_nothing_is_run(project):
    run_id = project.ended_job("echo 1 > out.txt", "hangup", verify="touch ran")
    with on_terminal(project, run_id) as terminal:
        terminal.close()
        terminal.process.wait(60)
    assert not (project.root / "ran").exists()


# ---- submits that were cut short -----------------------------------------------------------------------------------------------------------------

def traces(project) -> list[str]:
    return [name for name in os.listdir(project.folder) if name.startswith(asyncjobs.TRACE)]


def test_a_submit_that_was_cut_short_after_the_node_had_the_job_gets_its_manifest(project, warm):
    run_id = submit(warm, warm.job("exit 3", name="cut", outputs=["out.txt"]))
    trace = project.reserve(run_id)
    trace.release()
    project.ended(run_id)
    done = project.gpurun("poll", "--all")
    row = json.loads(done.stdout)
    assert done.returncode == 0 and (row["job_id"], row["manifest_status"]) == (run_id, "failed") and b"its job exists" in done.stderr
    assert traces(project) == [] and project.manifest(run_id)["submitted_at"] == trace.trace.submitted_at


def test_a_submit_that_was_cut_short_before_a_node_had_the_job_leaves_the_plan_free(project, warm):
    run_id = submit(warm, warm.job("exit 3", name="never"))
    project.ended(run_id)
    path = warm.runs / run_id / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "state": "PENDING", "node": {"kind": "local"}, "fsm": {}, "node_dir": ""}))
    project.reserve(run_id).release()
    done = project.gpurun("poll", "--all")
    assert done.returncode == 0 and done.stdout == b"" and b"plan is free again" in done.stderr and traces(project) == []
    path.write_text(json.dumps(record))
    project.reserve("gone-20261130-101500-0000").release()            # its run was removed, or never had a record
    assert project.gpurun("poll", "--all").returncode == 0 and traces(project) == []


def test_a_submit_that_was_cut_short_and_whose_node_is_away_stays_open_and_blocks_its_plan(project, warm):
    run_id = submit(warm, warm.job("exit 3", name="open"))
    path = warm.runs / run_id / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "node": {**record["node"], "cluster": "/nowhere/cluster.toml"}}))
    project.reserve(run_id).release()
    done = project.gpurun("poll", "--all")
    assert done.returncode == 125 and b"isn't known" in done.stderr and run_id.encode() in done.stderr and len(traces(project)) == 1
    with pytest.raises(asyncjobs.RecordError, match="cut short"):
        project.reserve("another")
    path.write_text(json.dumps(record))
    project.ended(run_id)
    assert project.poll(run_id)[0]["manifest_status"] == "failed" and traces(project) == []   # asked for by its run's id as well


def test_a_submit_that_is_at_work_is_said_and_left_alone(project):
    trace = project.reserve("at-work-1")
    done = project.gpurun("poll", "--all")
    assert done.returncode == 0 and b"being submitted just now" in done.stderr and len(traces(project)) == 1
    done = project.gpurun("submit", project.here.job("true", name="at-work", outputs=["out.txt"]), "--plan", "3.1", "--phase", "3", "--verify", "true")
    assert done.returncode == 2 and b"being submitted just now" in done.stderr and not list(project.here.runs.glob("at-work-*"))
    trace.drop()


@pytest.mark.parametrize("point", ["trace", "named", "there", "late"])
def test_gpurun_submit_that_is_killed_leaves_a_plan_that_is_free_or_has_its_one_job(project, warm, point):
    path = warm.job(f"echo up >> {warm.work}/ran-{point}; {until(warm, 'point-' + point)}; echo 1 > out.txt", name=f"at-{point}", outputs=["out.txt"])
    args = ("submit", path, "--plan", "7.1", "--phase", "7", "--verify", "true")
    process = project.start(*args)
    project.folder.mkdir(exist_ok=True)

    def reached():
        runs = list(warm.runs.glob(f"at-{point}-*"))
        record = json.loads((runs[0] / "run.json").read_text()) if runs and (runs[0] / "run.json").exists() else {}
        return process.poll() is not None or {"trace": bool(traces(project)), "named": bool(record.get("node", {}).get("name")),
                                              "there": bool(runs) and (warm.node_dir / "runs" / runs[0].name).exists(), "late": bool(record.get("detached"))}[point]
    deadline = time.monotonic() + 60
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    done = project.gpurun("poll", "--all")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) <= 1 and traces(project) == []
    again = project.gpurun(*args, "--json")
    assert again.returncode == (2 if rows else 0), again.stderr
    run_ids = [one.name for one in warm.runs.glob(f"at-{point}-*")]
    go(warm, f"point-{point}")
    for run_id in run_ids:
        project.gpurun("wait", run_id)
    assert (warm.work / f"ran-{point}").read_text() == "up\n"
    assert [row["manifest_status"] for row in project.poll("--all")] == ["completed-unverified"]
    eventually(lambda: gone(run_ids[0]))


def test_of_several_gpurun_submit_at_once_for_one_plan_one_submits(project, warm):
    path = warm.job(f"echo up >> {warm.work}/ran-at-once; echo 1 > out.txt", name="at-once", outputs=["out.txt"])
    started = [project.start("submit", path, "--plan", "8", "--phase", "8", "--verify", "true", "--json") for _ in range(4)]
    ended = [(process.communicate(timeout=120), process.returncode) for process in started]
    assert sorted(code for _, code in ended) == [0, 2, 2, 2], ended
    assert all(b"plan 8" in err + out and b"Traceback" not in err for (out, err), code in ended if code)
    runs = list(warm.runs.glob("at-once-*"))
    assert len(runs) == 1 and project.gpurun("wait", runs[0].name).returncode == 0
    assert (warm.work / "ran-at-once").read_text() == "up\n" and [row["job_id"] for row in project.poll("--all")] == [runs[0].name] and traces(project) == []
