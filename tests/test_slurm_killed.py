"""The agent on the login host is killed, at each step of sbatch and later: the job runs once, and what is told of it is how it ended."""

from __future__ import annotations

import pytest
from conftest import eventually
from slurm_cluster import slurm             # noqa: F401 (a fixture)
from slurm_site import COUNTED, NEWS_S, STUBBORN, pending, ran, site, site_of_file, stopped   # noqa: F401 (fixtures)

SBATCH = {
    # What the first sbatch does to the agent that has started it, which is its parent. Behind it comes the real one.
    "before it was sent": '[ $N = 1 ] && { kill -KILL $PPID; exit 1; }; exec "$REAL" "$@"',
    "before it was sent, and it says so": '[ $N = 1 ] && { kill -KILL $PPID; echo "sbatch: error: Batch job submission failed: Invalid account" >&2; '
                                          'exit 1; }; exec "$REAL" "$@"',
    "while it is under way": '[ $N = 1 ] && { kill -KILL $PPID; sleep 2; }; exec "$REAL" "$@"',
    "before its answer is written": '[ $N = 1 ] && { answer=$("$REAL" "$@"); kill -KILL $PPID; sleep 1; echo "$answer"; exit 0; }; exec "$REAL" "$@"',
    "before its answer is read": '[ $N = 1 ] && { "$REAL" "$@"; kill -KILL $PPID; sleep 0.2; exit 0; }; exec "$REAL" "$@"',
    "and its answer is lost": '[ $N = 1 ] && { "$REAL" "$@" >/dev/null; kill -KILL $PPID; exit 1; }; exec "$REAL" "$@"',
}


@pytest.mark.parametrize("moment", SBATCH)
def test_an_agent_that_is_killed_at_sbatch_submits_once(site, moment):
    """The gpurun that watches brings the next agent up; the values of the env, which died with the first one, are its to give again."""
    name = f"sbatch{list(SBATCH).index(moment)}"
    number = len(site.calls("sbatch"))
    site.shims.shim("sbatch", f"N=$((N - {number}))\n{SBATCH[moment]}")
    run = site.start(site.job(f"{COUNTED.format(name=name)}; echo $VALUE; exit 5", name, env={"VALUE": "kept"}))
    assert run.end() == 5, run.err
    assert run.out == "kept\n" and "is back after" in run.err and site.record(name)["reason"] == "exited 5"
    assert len(ran(site, name)) == 1 and ran(site, name) == [site.job_id(name)]
    site.slurm.cancel_all(site.folder(name).name)
    assert ran(site, name) == [site.job_id(name)] and site.jobs(name) == ran(site, name)


def test_an_agent_that_is_killed_before_it_was_told_the_values_needs_them_again(site):
    """Nobody watches: the run waits for its operator, and attach gives what the job file gives."""
    name, number = "values", len(site.calls("sbatch"))
    site.shims.shim("sbatch", f"[ $N = {number + 1} ] && {{ kill -KILL $PPID; echo 'sbatch: error: Unable to resolve' >&2; exit 1; }}; exec \"$REAL\" \"$@\"")
    path = site.job(f"{COUNTED.format(name=name)}; echo $VALUE", name, env={"VALUE": "${OF_VALUE}"})
    run_id = site.submit(path, env=dict(site.env, OF_VALUE="given"))
    eventually(lambda: len(site.calls("sbatch")) > number, NEWS_S)
    done = site.gpurun("attach", run_id, env=dict(site.env, OF_VALUE="given"))
    assert done.returncode == 0 and done.stdout == b"given\n" and len(ran(site, name)) == 1, done.stderr.decode()


def test_an_agent_that_is_killed_while_the_job_waits_finds_it_again(site):
    run_id = site.submit(site.job(f"{COUNTED.format(name='waits')}; echo ran; exit 3", "waits"), "--cluster", pending(site, "waits"))
    job = site.job_id("waits")
    site.kill_agent()
    site.slurm.run("scontrol", "release", job)
    site.slurm.until(job, "FAILED")
    done = site.ends(run_id)
    assert done.returncode == 3 and done.stdout == b"ran\n" and ran(site, "waits") == [job] == site.jobs("waits")


def test_an_agent_that_is_killed_while_the_job_runs_takes_it_up(site):
    run = site.start(site.job(f"{COUNTED.format(name='runs')}; echo one; {site.until('runs')}; echo two; echo x > x; exit 8", "runs", outputs=["x"]))
    run.until("one")
    site.kill_agent()
    eventually(lambda: "is back after" in run.err, NEWS_S)
    site.kill_agent()
    site.go("runs")
    assert run.end() == 8 and run.out == "one\ntwo\n" and ran(site, "runs") == site.jobs("runs") and len(ran(site, "runs")) == 1
    assert (site.folder("runs") / "outputs/x").read_text() == "x\n"


def test_a_job_that_ended_while_there_was_no_agent_is_told_as_it_ended(site):
    run_id = site.submit(site.job(f"{COUNTED.format(name='away')}; {site.until('away')}; echo end; exit 255", "away"))
    eventually(lambda: ran(site, "away"), NEWS_S)
    job = site.job_id("away")
    site.kill_agent()
    site.go("away")
    site.slurm.until(job, "FAILED")
    done = site.ends(run_id)
    assert done.returncode == 255 and done.stdout == b"end\n" and ran(site, "away") == [job]


def test_a_stop_that_an_agent_was_killed_in_is_taken_up_by_the_next_stop(site):
    run_id = site.submit(site.job(f"{COUNTED.format(name='halted')}; {STUBBORN}", "halted"))
    site.until_printed("halted", "up")
    number = len(site.calls("scancel"))
    site.shims.shim("scancel", "kill -KILL $PPID; exit 1")
    done = site.start("stop", run_id)
    eventually(lambda: len(site.calls("scancel")) > number, NEWS_S)
    site.shims.shim("scancel")
    assert done.end() == 0, done.err
    stopped(site, "halted")
    assert site.slurm.state(site.job_id("halted")) not in ("RUNNING", "PENDING")


def test_a_limit_that_an_agent_was_killed_in_is_still_the_reason(site):
    """The job takes its time to end, and no agent is there when it does."""
    run_id = site.submit(site.job("trap 'echo TERM; sleep 2; exit 9' TERM; echo up; while :; do sleep 0.05; done", "limited"), "--budget", "quick", "--limit", "4")
    site.until_printed("limited", "TERM")
    site.kill_agent()
    site.slurm.until(site.job_id("limited"), "CANCELLED", "FAILED", "COMPLETED")
    assert site.ends(run_id).returncode == 124
    assert "stopped, the hard limit of 4 s (budget quick) was reached" in site.record("limited")["reason"]


def test_a_hard_limit_holds_although_no_agent_is_there_to_keep_it(site):
    run_id = site.submit(site.job(f"{COUNTED.format(name='nobody')}; while :; do sleep 0.05; done", "nobody"), "--budget", "quick", "--limit", "3")
    eventually(lambda: ran(site, "nobody"), NEWS_S)
    site.kill_agent()
    site.slurm.until(site.job_id("nobody"), "CANCELLED", "FAILED", "COMPLETED")
    assert site.ends(run_id).returncode == 124
    assert "stopped, the hard limit of 3 s (budget quick) was reached" in site.record("nobody")["reason"]


def test_a_stop_is_one_although_agent_and_stop_were_killed_behind_it(site):
    """The job takes the TERM for its end and exits 0: nobody may take that for a success."""
    run_id = site.submit(site.job("trap 'echo TERM; sleep 1; exit 0' TERM; echo up; while :; do sleep 0.05; done", "orphan"))
    site.until_printed("orphan", "up")
    stop = site.start("stop", run_id, "--grace", "20")
    site.until_printed("orphan", "TERM")
    site.kill_agent()
    stop.process.kill()
    site.slurm.until(site.job_id("orphan"), "CANCELLED", "FAILED", "COMPLETED")
    assert site.ends(run_id).returncode == 130 and site.record("orphan")["reason"].startswith("stopped by the operator")
