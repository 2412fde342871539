"""A job that a plan gives to Slurm: what its manifest is called, and what becomes of one that never came there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import slurm             # noqa: F401 (a fixture)

from gpurun import cli, config


@pytest.fixture
def project(here, slurm):                   # noqa: F811
    slurm.here(here)
    (here.work / ".planning").mkdir()
    return here


def job(here, name: str, run: str = "echo made > out", external: str = "", **keys) -> Path:
    path = here.job(run, name, outputs=["out"], **keys)
    path.write_text(path.read_text() + f'\n[external_job]\nruntime_budget = "long_compute"\nplan = "{name}"\nphase = "3"\nverify = "true"\n{external}')
    return path


def manifests(here) -> list[str]:
    return sorted(path.name for path in (here.work / ".planning/async-jobs").iterdir())


def test_its_manifest_has_slurms_number_and_is_there_when_gpurun_returns(project, slurm):   # noqa: F811
    done = project.gpurun(job(project, "plan-a"), "--cluster", slurm.cluster_file(project), "--json")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and answer["state"] == "external_job_waiting" and answer["job_id"].isdigit()
    assert slurm.job(answer["job_id"])["JobName"] == answer["run_id"] and manifests(project) == [f"{answer['job_id']}.json"]
    manifest = json.loads(Path(answer["manifest"]).read_text())
    assert (manifest["backend"], manifest["status"], manifest["plan_id"], manifest["expected_artifacts"]) == ("slurm", "submitted", "plan-a", ["out"])
    assert project.gpurun("wait", answer["run_id"]).returncode == 0
    row = json.loads(project.gpurun("poll", answer["job_id"]).stdout)
    assert row["backend_state"] in ("COMPLETED", "COMPLETING") and row["manifest_status"] == "completed-unverified"


@pytest.mark.parametrize("why, code, keys, options", [
    ("Slurm refused the job", 125, {}, {"partition": "nope"}), ("setup exited 7", 7, {"setup": "echo no; exit 7"}, {})])
def test_one_that_never_comes_to_slurm_is_told_of_at_once_comes_home_and_leaves_its_plan_free(project, slurm, why, code, keys, options):   # noqa: F811
    done = project.gpurun(job(project, "plan-b", **keys), "--cluster", slurm.cluster_file(project, **options))
    assert done.returncode == code and why in done.stderr.decode() and not done.stdout
    record = project.record()
    assert record["state"] == "FAILED" and why in record["reason"] and record["missing"] == ["out"] and record["logs_complete"]
    assert manifests(project) == []
    assert project.gpurun(job(project, "plan-b"), "--cluster", slurm.cluster_file(project)).returncode == 0
    assert project.gpurun("wait", "latest").returncode == 0


def test_the_bounds_of_a_gsd_project_and_of_the_environment_count_more_than_the_cluster_files(project, slurm, monkeypatch):   # noqa: F811
    cluster = config.load_cluster(slurm.cluster_file(project, submit_timeout_s=20, poll_timeout_s=9))
    monkeypatch.chdir(project.work)
    assert cli._with_timeouts(cluster) == cluster
    (project.work / ".planning/config.json").write_text(json.dumps({"external_job": {"submit_timeout_ms": 700, "poll_timeout_ms": "soon"}}))
    assert cli._with_timeouts(cluster).slurm == cluster.slurm._replace(submit_timeout_s=0.7)
    monkeypatch.setenv("GSD_SLURM_SUBMIT_TIMEOUT_MS", "30000")
    assert cli._with_timeouts(cluster).slurm == cluster.slurm._replace(submit_timeout_s=30)
