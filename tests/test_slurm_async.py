"""Jobs of a Slurm for a plan, by the async-job contract: a manifest that names Slurm's job, polls, and a submit that is killed."""

from __future__ import annotations

import json
import os
import signal

import pytest
from conftest import eventually
from slurm_cluster import slurm             # noqa: F401 (a fixture)
from slurm_site import COUNTED, NEWS_S, STUBBORN, pending, ran, site, site_of_file   # noqa: F401 (fixtures)


@pytest.fixture
def project(site, request):
    root = site.here.work / f"p{abs(hash(request.node.name)) % 10**10}"
    (root / ".planning").mkdir(parents=True)
    return Project(site, root)


class Project:
    """A GSD project of the test's own, in whose folder gpurun is run."""

    def __init__(self, site, root) -> None:
        self.site, self.root, self.folder = site, root, root / ".planning" / "async-jobs"

    def options(self, path, plan: str, *more):
        return ["submit", path, "--plan", plan, "--phase", "3", "--verify", "test -s $GPURUN_OUTPUTS/out", "--runs-dir", self.site.here.runs, *more]

    def submit(self, path, plan: str, *more) -> str:
        done = self.site.gpurun(*self.options(path, plan, *more), cwd=self.root)
        assert done.returncode == 0 and b"external_job_waiting" in done.stdout, done.stderr.decode()
        return dict(line.split(": ", 1) for line in done.stdout.decode().splitlines())["job_id"]

    def poll(self, *args, code: int = 0):
        done = self.site.gpurun("poll", *args, "--runs-dir", self.site.here.runs, cwd=self.root)
        assert done.returncode == code, done.stderr.decode()
        return {row["job_id"]: row for row in map(json.loads, done.stdout.splitlines())}

    def manifest(self, job_id: str):
        return json.loads((self.folder / f"{job_id}.json").read_text())

    def until(self, job_id: str, status: str):
        """The manifest, once a poll has brought it to this status."""
        eventually(lambda: self.poll(job_id)[job_id]["manifest_status"] == status, 2 * NEWS_S)
        return self.manifest(job_id)


def test_a_submit_for_a_plan_names_slurms_job_and_polls_follow_it_to_its_end(site, project):
    path = site.job(f"echo up; {site.until('plan')}; echo 1 > out", "plan", outputs=["out"])
    job = project.submit(path, "3.1", "--backend", "slurm", "--cluster", pending(site, "plan"))
    manifest = project.manifest(job)
    assert job == site.job_id("plan") and site.slurm.state(job) == "PENDING"
    assert (manifest["backend"], manifest["job_id"], manifest["status"], manifest["plan_id"]) == ("slurm", job, "submitted", "3.1")
    assert manifest["expected_artifacts"] == ["out"] and manifest["terminal_details"] is None and "gpurun submit" in manifest["submit_command"]
    row = eventually(lambda: [row for row in project.poll(job).values() if row["backend_state"] == "PENDING"], NEWS_S)[0]
    assert (row["manifest_status"], row["backend"]) == ("submitted", "slurm")
    refused = site.gpurun(*project.options(path, "3.1"), cwd=project.root)
    assert refused.returncode != 0 and job in refused.stderr.decode() and len(site.jobs("plan")) == 1
    site.slurm.run("scontrol", "release", job)
    project.until(job, "running")
    site.go("plan")
    assert project.until(job, "completed-unverified")["terminal_details"] is None
    done = site.gpurun("verify", job, "--confirm", "test -s $GPURUN_OUTPUTS/out", "--runs-dir", site.here.runs, cwd=project.root)
    assert done.returncode == 0 and project.manifest(job)["verification"]["exit_code"] == 0, done.stderr.decode()


def test_polls_of_jobs_that_ended_in_each_way_say_which(site, project):
    ways = {"failed": "exit 255", "completed-unverified": "echo 1 > out", "cancelled": STUBBORN, "timeout": STUBBORN}
    jobs = {status: project.submit(site.job(run, f"way-{status}", outputs=["out"]), f"4.{number}", *(["--limit", "1"] if status == "timeout" else []))
            for number, (status, run) in enumerate(ways.items())}
    site.until_printed("way-cancelled", "up")
    site.gpurun("stop", site.folder("way-cancelled").name)
    for status, job in jobs.items():
        project.until(job, status)
    before = len(site.calls("squeue")) + len(site.calls("sacct"))
    rows = project.poll("--all")
    assert {row["manifest_status"]: job for job, row in rows.items()} == jobs and len(site.calls("squeue")) + len(site.calls("sacct")) <= before + 2
    assert "255" in json.dumps(project.manifest(jobs["failed"])["terminal_details"]), project.manifest(jobs["failed"])["terminal_details"]
    assert "limit" in json.dumps(project.manifest(jobs["timeout"])["terminal_details"])
    assert not [path for path in project.folder.iterdir() if path.name.startswith(".submit")]


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
def test_a_submit_that_is_killed_at_sbatch_is_settled_by_the_next_poll(site, project, sent):
    """The gpurun on the laptop is killed, before or after Slurm has the job: the agent goes on with it, and the manifest is written by whoever looks."""
    name = f"cut{int(sent)}"
    pid = project.root / "pid"
    wait = f"until [ -s {pid} ]; do sleep 0.02; done; kill -KILL $(cat {pid}); sleep 0.3"
    site.shims.shim("sbatch", f'{wait}; exec "$REAL" "$@"' if not sent else f'"$REAL" "$@"; {wait}')
    path = site.job(f"{COUNTED.format(name=name)}; echo 1 > out", name, outputs=["out"])
    process = site.here.start(*project.options(path, f"5.{int(sent)}"), cwd=project.root)
    (project.root / "pid.new").write_text(str(process.pid))
    os.rename(project.root / "pid.new", pid)
    assert process.wait(60) == -signal.SIGKILL
    site.shims.shim("sbatch")
    job = site.job_id(name)
    assert set(project.poll("--all")) == {job}
    assert project.until(job, "completed-unverified")["plan_id"] == f"5.{int(sent)}" and ran(site, name) == [job]
