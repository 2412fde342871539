"""What goes wrong in a Slurm, and in asking it, ends in the truth: a job's own word where it has one, else Slurm's, and no guess where there is neither."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import eventually
from slurm_cluster import slurm                             # noqa: F401 (a fixture)
from slurm_site import COUNTED, NEWS_S, failed, ran, site, site_of_file   # noqa: F401 (fixtures)

TIMED_OUT = "slurm_load_jobs error: Socket timed out on send/recv operation"


# ---- questions that fail ----------------------------------------------------------------------------------------------------------------------

def test_a_controller_that_is_too_busy_to_answer_costs_nothing(site):
    number = len(site.calls("squeue"))
    site.shims.shim("squeue", f'[ $N -le {number + 3} ] && {{ echo "{TIMED_OUT}" >&2; exit 1; }}; exec "$REAL" "$@"')
    run = site.start(site.job(f"echo up; {site.until('busy')}; exit 3", "busy"))
    run.until("up")
    eventually(lambda: len(site.calls("squeue")) > number + 3, NEWS_S)
    eventually(lambda: "Slurm doesn't answer: " in run.err and "Socket timed out" in run.err)
    eventually(lambda: "RUNNING" in str(site.record("busy")["backend"]), NEWS_S)
    site.go("busy")
    assert run.end() == 3 and len(site.jobs("busy")) == 1
    failed(site, "busy", 3, "exited 3")


def test_questions_that_are_never_answered_are_ended_at_their_bound_and_a_job_ends_by_its_own_word(site):
    site.shims.shim("squeue", "sleep 600 & sleep 600")
    run = site.start(site.job(f"echo up; {site.until('hang')}; exit 4", "hang"), "--cluster", site.with_keys("hang", poll_timeout_s=1))
    run.until("up")
    eventually(lambda: "gave no answer in 1 s" in run.err, NEWS_S)
    site.go("hang")
    assert run.end() == 4
    failed(site, "hang", 4, "exited 4")


def test_an_sbatch_that_hangs_when_slurm_has_the_job_is_ended_at_its_bound_and_the_job_runs_once(site):
    number = len(site.calls("sbatch"))
    site.shims.shim("sbatch", f'[ $N = {number + 1} ] && {{ "$REAL" "$@" >/dev/null; sleep 600; }}; exec "$REAL" "$@"')
    done = site.gpurun(site.job(f"{COUNTED.format(name='hung')}; exit 5", "hung"), "--cluster", site.with_keys("hung", submit_timeout_s=1))
    assert done.returncode == 5 and ran(site, "hung") == [site.job_id("hung")] == site.jobs("hung"), done.stderr.decode()


def test_a_site_whose_sbatch_talks(site):
    site.shims.shim("sbatch", 'echo "Welcome to the cluster, 3 news"; echo "sbatch: lua: your account has 17 hours left" >&2; '
                              '"$REAL" "$@"; code=$?; echo; exit $code')
    assert site.gpurun(site.job("exit 6", "talks")).returncode == 6


def test_an_env_as_long_as_a_job_file_may_have_reaches_the_job(site):
    values = {f"OF_{number}": f"{number}" * 100_000 for number in range(8)}
    path = site.job("for i in {0..7}; do name=A$i; printf %s \"${!name}\" | wc -c; done | sort -u", "long",
                    env={f"A{number}": f"${{OF_{number}}}" for number in range(8)})
    done = site.gpurun(path, env=dict(site.env, **values))
    assert done.returncode == 0 and done.stdout == b"100000\n", done.stderr.decode()


def test_without_any_question_answered_nothing_of_a_pending_job_is_guessed(site):
    """The run goes on, whatever words they find."""
    kinds = [TIMED_OUT, "squeue: error: Unable to contact slurm controller (connect failure)", "Segmentation fault", "squeue: error: some new words", ""]
    number = len(site.calls("squeue"))
    script = "".join(f'[ $((($N - {number}) % {len(kinds)})) = {index} ] && echo "{text}" >&2\n' for index, text in enumerate(kinds))
    site.shims.shim("squeue", script + "exit 1")
    site.shims.shim("sacct", "exit 1")
    run = site.start(site.job("echo ran; exit 2", "nothing"), "--cluster", site.with_keys("nothing", extra=["--hold"]))
    job = site.job_id("nothing")
    eventually(lambda: len(site.calls("squeue")) > number + 2, NEWS_S)
    eventually(lambda: site.record("nothing")["state"] == "RUNNING")
    assert run.process.poll() is None
    site.slurm.run("scontrol", "release", job)
    assert run.end() == 2 and run.out == "ran\n"


# ---- what others do --------------------------------------------------------------------------------------------------------------------------------

def test_a_job_that_somebody_else_cancels_is_told_as_that(site):
    run = site.start(site.job("echo x > x; echo up; while :; do sleep 0.05; done", "taken", outputs=["x"]))
    run.until("up")
    site.slurm.run("scancel", site.job_id("taken"))
    assert run.end() == 143
    failed(site, "taken", 143, "cancelled in Slurm by uid 0 (root)")
    assert site.record("taken")["outputs"] == ["x"]


def test_a_job_that_somebody_else_cancels_before_it_ran_is_told_as_that(site):
    run_id = site.submit(site.job("echo never", "takenq"), "--cluster", site.with_keys("takenq", extra=["--hold"]))
    site.slurm.run("scancel", site.job_id("takenq"))
    done = site.ends(run_id)
    assert done.returncode == 143 and done.stdout == b""
    failed(site, "takenq", 143, "cancelled in Slurm by uid 0 (root)")


def test_a_job_that_takes_a_scancel_for_its_end_is_no_success(site):
    run = site.start(site.job("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done", "graceful"))
    run.until("up")
    site.slurm.run("scancel", site.job_id("graceful"))
    assert run.end() == 143 and run.out == "up\nsaved\n"
    failed(site, "graceful", 143, "cancelled in Slurm")


def test_a_suspended_job_goes_on(site):
    run = site.start(site.job(f"echo up; {site.until('suspended')}; exit 3", "suspended"))
    run.until("up")
    job = site.job_id("suspended")
    site.slurm.run("scontrol", "suspend", job)
    eventually(lambda: "SUSPENDED" in run.err, NEWS_S)
    site.slurm.run("scontrol", "resume", job)
    site.go("suspended")
    assert run.end() == 3


def test_a_job_that_can_never_start_shows_why_and_ends_at_its_pending_limit(site):
    run = site.start(site.job("echo never", "never"), "--cluster", site.with_keys("never", nodes=3, pending_limit_s=6))
    eventually(lambda: re.search("Partition(Config|NodeLimit)", run.err), NEWS_S)
    assert run.end() == 124
    failed(site, "never", 124, "Slurm's queue", "Partition")
    assert site.slurms("never")["JobState"] == "CANCELLED" and run.out == ""


# ---- limits ------------------------------------------------------------------------------------------------------------------------------------------

def test_slurms_time_limit_is_a_time_limit(site):
    run = site.start(site.job("trap 'echo saved > saved; exit 0' TERM; echo up; while :; do sleep 0.05; done", "limit", outputs=["saved"]))
    run.until("up")
    site.slurm.time_out(site.job_id("limit"))
    assert run.end() == 124
    failed(site, "limit", 124, "Slurm's time limit of ")
    assert (site.folder("limit") / "outputs/saved").read_text() == "saved\n"


def test_a_budgets_hard_limit_counts_from_when_slurm_starts_the_job(site):
    cluster = site.with_keys("hard", extra=["--hold"])
    run = site.start(site.job("echo x > x; echo up; while :; do sleep 0.05; done", "hard", outputs=["x"]), "--limit", "4", "--cluster", cluster)
    job = site.job_id("hard")
    eventually(lambda: "JobHeldUser" in run.err, NEWS_S)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(5)                       # longer than the limit: Slurm's queue is nobody's runtime
    site.slurm.run("scontrol", "release", job)
    assert run.end() == 124 and run.out == "up\n"
    failed(site, "hard", 124, "the hard limit of 4 s")
    assert site.record("hard")["outputs"] == ["x"] and site.slurm.until(job, "CANCELLED", "FAILED", "COMPLETED")


def test_a_budgets_abort_pattern_and_silence_end_a_job_of_slurms(site):
    path = site.job("echo x > x; echo step 1; echo 'CUDA error: device-side assert' >&2; while :; do sleep 0.05; done", "abort", outputs=["x"])
    path.write_text(path.read_text() + '[external_job]\nabort_pattern = "CUDA error"\n')
    silent = site.job("echo one; while :; do sleep 0.05; done", "silent")
    silent.write_text(silent.read_text() + "[external_job]\nabort_silence_s = 3\n")
    runs = [site.start(one) for one in (path, silent)]
    assert [run.end() for run in runs] == [124, 124], [run.err for run in runs]
    failed(site, "abort", 124, "CUDA error: device-side assert")
    failed(site, "silent", 124, "3 s")
    assert site.record("abort")["outputs"] == ["x"]


def test_a_job_over_its_memory_is_told_as_that(site):
    if not site.slurm.cgroups:
        pytest.skip("only one cluster of a machine has cgroups, and another one has them")
    run = "echo x > x; exec python3 -c 'data = bytearray(400 << 20); data[::4096] = bytes(len(data[::4096])); print(len(data))'"
    done = site.gpurun(site.job(run, "memory", outputs=["x"]), "--cluster", site.with_keys("memory", extra=["--mem=60M"]))
    assert done.returncode == 137 and done.stdout == b"", done.stderr.decode()
    failed(site, "memory", 137, "OUT_OF_MEMORY", "--mem=")
    assert site.record("memory")["outputs"] == ["x"]
