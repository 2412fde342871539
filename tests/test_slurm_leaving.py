"""Runs of a Slurm that outlive the laptop: left, come back to, and stopped."""

from __future__ import annotations

import json
import signal

import pytest
from conftest import eventually
from slurm_cluster import slurm             # noqa: F401 (a fixture)
from slurm_site import NEWS_S, STUBBORN, pending, site, site_of_file, stopped, within   # noqa: F401 (fixtures)


# ---- leave and come back --------------------------------------------------------------------------------------------------------------------

def test_a_submitted_run_is_ended_without_us_and_fetched_later(site):
    path = site.job(f"echo one; {site.until('alone')}; echo x > x; exit 4", "alone", outputs=["x"], setup="echo set")
    run_id = site.submit(path)
    site.until_printed("alone", "one")
    asked = json.loads(site.gpurun("status", run_id, "--refresh", "--json").stdout)
    assert asked["state"] in ("PENDING", "RUNNING") and asked["detached"]
    eventually(lambda: f"job {site.job_id('alone')}, RUNNING on n" in site.gpurun("status", run_id, "--refresh").stdout.decode(), NEWS_S)
    assert site.gpurun("logs", run_id).stdout == b"one\n" and site.gpurun("rm", run_id).returncode != 0
    site.go("alone")
    eventually((site.there("alone") / "run.code.0").exists)
    done = site.ends(run_id)
    assert done.returncode == 4 and done.stdout == b"one\n" and b"set\n" in done.stderr and (site.folder("alone") / "outputs/x").read_text() == "x\n"
    there = site.there("alone")
    assert site.gpurun("rm", run_id).returncode == 0 and not there.exists() and not site.here.runs.joinpath(run_id).exists()


def test_logs_follow_and_fetch_while_it_runs(site):
    run_id = site.submit(site.job(f"echo half > part; echo one; {site.until('mid')}; echo two; echo whole > part", "mid", outputs=["part"]))
    reader = site.start("logs", "-f", run_id)
    reader.until("one")
    done = site.gpurun("fetch", run_id, "part", "--to", site.here.work / "early")
    assert done.returncode == 0 and (site.here.work / "early/part").read_text() == "half\n", done.stderr.decode()
    assert site.gpurun("wait", run_id, "--timeout", "1").returncode == 124 and site.slurms("mid")["JobState"] == "RUNNING"
    site.go("mid")
    assert reader.end() == 0 and reader.out == "one\ntwo\n"
    assert site.gpurun("wait", run_id).returncode == 0 and (site.folder("mid") / "outputs/part").read_text() == "whole\n"


def test_a_gpurun_that_is_killed_is_gone_on_with_by_attach(site):
    run = site.start(site.job(f"seq 100; {site.until('killed')}; echo end; exit 9", "killed"))
    run.until("100")
    run.signal(signal.SIGKILL).process.wait(10)
    other = site.start("attach", site.folder("killed").name)
    other.until("100")
    site.go("killed")
    assert other.end() == 9 and other.out == "".join(f"{number}\n" for number in range(1, 101)) + "end\n"
    assert (site.folder("killed") / "stdout.log").read_text() == other.out and len(site.jobs("killed")) == 1


def test_a_hangup_leaves_and_the_job_goes_on(site):
    run = site.start(site.job(f"echo up; {site.until('hup')}; exit 3", "hup"))
    run.until("up")
    assert run.signal(signal.SIGHUP).end() == 130 and "goes on" in run.err
    site.go("hup")
    assert site.ends(site.folder("hup").name).returncode == 3


# ---- stop ---------------------------------------------------------------------------------------------------------------------------------------


def test_ctrl_c_cancels_the_job_and_what_it_made_comes_home(site):
    run = site.start(site.job(STUBBORN, "ctrlc", outputs=["saved"]))
    run.until("up")
    assert run.signal(signal.SIGINT).end() == 130
    assert run.out == "up\nbye\n" and (site.folder("ctrlc") / "outputs/saved").read_text() == "saved\n"
    stopped(site, "ctrlc")
    assert site.slurm.until(site.job_id("ctrlc"), "CANCELLED", "COMPLETED", "FAILED") and site.record("ctrlc")["outputs"] == ["saved"]


def test_ctrl_c_while_slurm_has_it_wait_ends_it_at_once(site):
    run = site.start(site.job("echo never", "ctrlq"), "--cluster", pending(site, "ctrlq"))
    job = site.job_id("ctrlq")
    eventually(lambda: "JobHeldUser" in run.err, NEWS_S)
    with within(25):
        assert run.signal(signal.SIGINT).end() == 130
    assert site.slurm.state(job) == "CANCELLED" and run.out == ""
    stopped(site, "ctrlq")


def test_stop_of_a_job_that_waits_and_of_one_that_is_over(site):
    run_id = site.submit(site.job("echo never", "stopq"), "--cluster", pending(site, "stopq"))
    job = site.job_id("stopq")
    with within(25):
        assert site.gpurun("stop", run_id).returncode == 0
    assert site.slurm.state(job) == "CANCELLED"
    stopped(site, "stopq")
    again = site.gpurun("stop", run_id)
    assert again.returncode == 0 and b"had ended already" in again.stderr
    assert site.ends(run_id).returncode == 130


@pytest.mark.parametrize("grace", ["0", "1"])
def test_stop_kills_what_heeds_no_term(site, grace):
    """At once without a grace; else Slurm does it when its own KillWait, 5 s here, is over."""
    name = f"deaf{grace}"
    run_id = site.submit(site.job("trap '' TERM; echo x > x; echo up; while :; do sleep 0.02; done", name, outputs=["x"]))
    site.until_printed(name, "up")
    site.until_running(name)
    assert site.gpurun("stop", run_id, "--grace", grace).returncode == 0
    stopped(site, name)
    assert (site.folder(name) / "outputs/x").read_text() == "x\n" and site.slurms(name)["JobState"] not in ("RUNNING", "COMPLETING")


def test_a_grace_that_is_longer_than_slurms_own_is_given_whole(site):
    """Slurm's KillWait is 5 s here, after which a plain scancel kills."""
    run_id = site.submit(site.job("trap 'sleep 7; echo saved > saved; exit 0' TERM; echo up; while :; do sleep 0.02; done", "slow", outputs=["saved"]))
    site.until_printed("slow", "up")
    site.until_running("slow")
    assert site.gpurun("stop", run_id, "--grace", "20").returncode == 0
    stopped(site, "slow")
    assert (site.folder("slow") / "outputs/saved").read_text() == "saved\n"


def test_a_job_that_ended_by_itself_while_it_was_stopped_has_its_own_code(site):
    run_id = site.submit(site.job("echo over; exit 6", "raced"))
    eventually((lambda: site.there("raced") / "run.code.0")().exists, NEWS_S)
    site.gpurun("stop", run_id)
    assert site.record("raced")["exit_code"] == 6 and site.ends(run_id).returncode == 6
