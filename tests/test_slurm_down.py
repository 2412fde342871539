"""A Slurm whose controller or database isn't there for a while: jobs go on, and so do the runs that have them."""

from __future__ import annotations

import signal

from conftest import eventually
from slurm_cluster import slurm             # noqa: F401 (a fixture)
from slurm_site import COUNTED, NEWS_S, failed, ran, site, site_of_file   # noqa: F401 (fixtures)


def test_a_job_goes_on_and_ends_while_the_controller_is_down(site):
    with site.slurm.alone():
        cluster = site.with_keys("down", poll_timeout_s=1)
        run = site.start(site.job(f"echo up; {site.until('down')}; echo x > x; exit 7", "down", outputs=["x"]), "--cluster", cluster)
        run.until("up")
        eventually(lambda: site.record("down")["backend"].get("state") == "RUNNING", NEWS_S)
        with site.slurm.stop_controller():
            eventually(lambda: "Slurm doesn't answer: " in run.err, NEWS_S)
            site.go("down")
            assert run.end() == 7 and site.record("down")["outputs"] == ["x"]
            failed(site, "down", 7, "exited 7")


def test_a_job_is_submitted_as_soon_as_the_controller_is_there(site):
    with site.slurm.stop_controller():
        number = len(site.calls("sbatch"))
        site.shims.shim("sbatch", '"$REAL" "$@"; code=$?; touch $HOME/sbatch-ended; exit $code')
        run = site.start(site.job(f"{COUNTED.format(name='restart')}; exit 8", "restart"))
        eventually((site.here.home / "sbatch-ended").exists, 60)
        assert run.process.poll() is None
        site.slurm.start_controller()
        assert run.end() == 8 and len(ran(site, "restart")) == 1 and len(site.calls("sbatch")) > number + 1


def test_a_stop_is_carried_out_when_the_controller_is_there_again(site):
    with site.slurm.alone():
        run_id = site.submit(site.job("echo up; while :; do sleep 0.05; done", "stopdown"))
        site.until_printed("stopdown", "up")
        job = site.job_id("stopdown")
        with site.slurm.stop_controller():
            number = len(site.calls("scancel"))
            stop = site.start("stop", run_id)
            eventually(lambda: len(site.calls("scancel")) > number, NEWS_S)
            site.slurm.start_controller()
            assert stop.end() == 0, stop.err
        failed(site, "stopdown", 130, "stopped by the operator")
        assert site.slurm.state(job) not in ("RUNNING", "PENDING")


def test_without_the_database_runs_end_as_they_ended(site):
    with site.slurm.stop_database():
        assert site.gpurun(site.job("exit 255", "nodb")).returncode == 255
        run = site.start(site.job("echo up; while :; do sleep 0.05; done", "nodbc"))
        run.until("up")
        site.slurm.run("scancel", site.job_id("nodbc"))
        assert run.end() == 143
        failed(site, "nodbc", 143, "cancelled in Slurm")
        other = site.start(site.job("echo up; while :; do sleep 0.05; done", "nodbs"))
        other.until("up")
        assert other.signal(signal.SIGINT).end() == 130
