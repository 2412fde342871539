"""What a Slurm does whose settings are others: no accounting, jobs that are forgotten at once, and jobs that make room for more important ones."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Iterator

import pytest
from conftest import Here, end_agents, eventually
from slurm_cluster import Slurm, own_slurm
from slurm_site import COUNTED, NEWS_S, Site, failed, ran

from gpurun import supervise


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Iterator[Site]:
    """No accounting, and squeue forgets a job 2 s after its end."""
    folder = tmp_path_factory.mktemp("bare")
    with own_slurm(minjobage=2, killwait=2, accounting=False, preempt="requeue") as slurm:
        yield Site(Here(folder / "here"), slurm)
        end_agents(folder)


@pytest.fixture
def usual(here) -> Iterator[Site]:
    """One that remembers its jobs as long as most do."""
    with own_slurm(killwait=2, accounting=False) as slurm:
        made = Site(here, slurm)
        yield made
        made.end()


@pytest.fixture
def site(bare: Site) -> Iterator[Site]:
    yield bare
    bare.end()


def again_now(slurm: Slurm, job: str) -> None:
    """Slurm lets a requeued job wait for two minutes. In less than two seconds its nodes take it for the start that they have just ended."""
    slurm.until(job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


# ---- no accounting ------------------------------------------------------------------------------------------------------------------------------

def test_runs_end_as_they_ended(site):
    codes = [0, 3, 255]
    ids = [site.submit(site.job(f"echo {code}; exit {code}", f"code{code}")) for code in codes]
    rows = site.gpurun("wait", *ids).stdout.decode().splitlines()
    assert [row.split("exit code ")[1].split(":")[0] for row in rows] == ["0", "3", "255"]


def test_a_job_that_somebody_else_cancels_is_told_as_that_without_a_name(site):
    run = site.start(site.job("echo up; while :; do sleep 0.05; done", "taken"))
    run.until("up")
    site.slurm.run("scancel", site.job_id("taken"))
    assert run.end() == 143
    failed(site, "taken", 143, "cancelled in Slurm")


def test_a_stop_of_a_job_that_waits_and_of_one_that_runs(site):
    waits = site.submit(site.job("echo never", "waits"), "--cluster", site.with_keys("waits", extra=["--hold"]))
    runs = site.submit(site.job("echo up; while :; do sleep 0.05; done", "runs"))
    site.until_printed("runs", "up")
    site.job_id("waits")
    for run_id in (waits, runs):
        assert site.gpurun("stop", run_id).returncode == 0
    failed(site, "waits", 130, "stopped by the operator")
    failed(site, "runs", 130, "stopped by the operator")


# ---- forgotten ----------------------------------------------------------------------------------------------------------------------------------

def test_a_job_that_slurm_has_forgotten_before_anybody_asked_is_told_by_its_own_word(site):
    run_id = site.submit(site.job(f"{COUNTED.format(name='forgotten')}; {site.until('forgotten')}; echo end; exit 255", "forgotten"))
    eventually(lambda: ran(site, "forgotten"), NEWS_S)
    job = site.job_id("forgotten")
    site.kill_agent()
    site.go("forgotten")
    eventually(lambda: site.slurm.job(job) == {}, 60)
    done = site.ends(run_id)
    assert done.returncode == 255 and done.stdout == b"end\n" and ran(site, "forgotten") == [job]
    failed(site, "forgotten", 255, "exited 255")


# ---- Slurm starts it again ------------------------------------------------------------------------------------------------------------------------

TWICE = COUNTED + "; n=$(wc -l < $HOME/ran-{name}); echo start $n; [ $n -gt 1 ] && exit 7; while :; do sleep 0.05; done"


def test_a_job_that_is_preempted_is_started_again_and_its_last_end_counts(site):
    run = site.start(site.job(TWICE.format(name="preempted"), "preempted"), "--cluster", site.with_keys("low", partition="low", extra=["--exclusive"]))
    run.until("start 1")
    job = site.job_id("preempted")
    high = site.slurm.submit("sleep 600", "--partition=high", "--nodes=2", "--exclusive", "--job-name=high")
    site.slurm.until(high, "RUNNING", timeout_s=60)
    eventually(lambda: "PENDING" in run.err.split("start 1")[0] and site.record("preempted")["backend"].get("state") == "PENDING", NEWS_S)
    assert run.process.poll() is None
    site.slurm.run("scancel", high)
    again_now(site.slurm, job)
    assert run.end() == 7 and run.out == "start 1\nstart 2\n" and ran(site, "preempted") == [job, job], run.err
    failed(site, "preempted", 7, "exited 7")


def test_a_job_that_an_operator_requeues_is_started_again_and_its_last_end_counts(site):
    """Twice, and its agent is killed in between."""
    run = site.start(site.job(TWICE.format(name="requeued").replace("-gt 1", "-gt 2"), "requeued"))
    run.until("start 1")
    job = site.job_id("requeued")
    site.slurm.run("scontrol", "requeue", job)
    again_now(site.slurm, job)
    run.until("start 2")
    site.kill_agent()
    site.slurm.run("scontrol", "requeue", job)
    again_now(site.slurm, job)
    assert run.end() == 7 and run.out == "start 1\nstart 2\nstart 3\n" and ran(site, "requeued") == [job] * 3


def test_a_stop_of_a_job_that_was_requeued_ends_it(site):
    run_id = site.submit(site.job(TWICE.format(name="requeuestop"), "requeuestop"))
    site.until_printed("requeuestop", "start 1")
    job = site.job_id("requeuestop")
    site.slurm.run("scontrol", "requeuehold", job)
    site.slurm.until(job, "PENDING")
    assert site.gpurun("stop", run_id).returncode == 0
    failed(site, "requeuestop", 130, "stopped by the operator")
    assert site.slurm.state(job) in ("CANCELLED", "") and ran(site, "requeuestop") == [job]


# ---- a node is lost --------------------------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def lost(site: Site, *names: str) -> Iterator[None]:
    """The node n2, on which these run, has lost its power, and Slurm knows; afterwards it is back."""
    site.slurm._script("slurm-down", "--only", "slurmd-n2")
    for name in names:
        pids = supervise.of_run(site.folder(name).name)
        stepds = {parent(pid) for pid in pids} - pids - {0}       # first: it would tell how the job ended
        for pid in [pid for pid in stepds if b"slurmstepd" in Path(f"/proc/{pid}/cmdline").read_bytes()] + list(pids):
            supervise.send(pid, signal.SIGKILL)
    site.slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        yield
    finally:
        site.slurm._script("slurm-up")
        site.slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_node_that_is_lost_is_told_unless_slurm_starts_the_job_again(usual):
    site = usual
    cluster = {name: site.with_keys(name, extra=["--nodelist=n2", *more]) for name, more in (("lost", ["--no-requeue"]), ("moved", []))}
    fixed = site.start(site.job("echo up; echo x > x; while :; do sleep 0.05; done", "lost", outputs=["x"]), "--cluster", cluster["lost"])
    moved = site.start(site.job(TWICE.format(name="moved"), "moved"), "--cluster", cluster["moved"])
    fixed.until("up")
    moved.until("start 1")
    job = site.job_id("moved")
    with lost(site, "lost", "moved"):
        site.slurm.until(site.job_id("lost"), "NODE_FAIL")
        again_now(site.slurm, job)
    assert moved.end() == 7 and ran(site, "moved") == [job, job]
    assert fixed.end() == 125
    failed(site, "lost", 125, "NODE_FAIL", "Run it again")
