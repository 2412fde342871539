"""Jobs of a real Slurm, from their submission to their end: what Slurm does to a job, and what Slurm's own programs do to us."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import eventually
from slurm_cluster import Shims, own_slurm, slurm

from gpurun import slurmjobs
from gpurun import slurm as words
from gpurun.errors import GpurunError
from gpurun.slurmjobs import Slurm


class Control:
    """What an agent is for a job that it follows."""

    def __init__(self) -> None:
        self.grace, self.news, self.limits, self.ran = None, [], None, []
        self._said = threading.Event()

    def stop(self):
        return self.grace

    def tell(self, news):
        self.news.append(news)

    def limit(self, running_s):
        self.ran.append(running_s)
        return f"it ran {running_s:.0f} s" if self.limits is not None and running_s >= self.limits else ""

    def wait(self, timeout_s):
        self._said.wait(timeout_s)
        self._said.clear()

    def end(self, grace):
        self.grace = grace
        self._said.set()

    @property
    def states(self):
        return [news["state"] for news in self.news]


class Run:
    """One run: its folder, its job, and somebody who follows it in a thread of his own."""

    def __init__(self, cluster: Slurm, runs: Path, name: str, options: list[str], **plan) -> None:
        self.folder, self.name = runs / name, name
        (self.folder / "work").mkdir(parents=True)
        self.plan = {"kind": "slurm", "options": options, **plan}
        self.cluster, self.control = cluster, Control()
        self.job = cluster.job(str(self.folder), str(self.folder / "work"), name, self.plan)

    def submit(self, command: str, **env: str) -> "Run":
        self.id = self.job.submit(command, {"GPURUN_RUN_ID": self.name, **env})
        return self

    def follow(self) -> "Run":
        self._end: list = []
        self._thread = threading.Thread(target=self._follow, args=(self.job, self.id, self.control), daemon=True)
        self._thread.start()
        return self

    def _follow(self, job, job_id, control) -> None:
        try:
            self._end.append(job.follow(job_id, control))
        except GpurunError as error:
            self._end.append(error)

    def end(self, timeout_s: float = 60.0) -> dict:
        self._thread.join(timeout_s)
        assert self._end, f"it hasn't ended in {timeout_s} s: {self.control.news}"
        if isinstance(self._end[0], GpurunError):
            raise self._end[0]
        return self._end[0]

    @property
    def out(self) -> str:
        return (self.folder / "run.out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "run.err").read_text()

    def runs(self) -> None:
        eventually(lambda: (self.folder / "run.job").exists() and self.out, timeout_s=40)


class Runs:
    def __init__(self, folder: Path, mine) -> None:
        self.shims = Shims(folder / "bin", mine)
        self.login = {"HOME": str(folder), "LANG": "C.UTF-8", **self.shims.env}
        self.cluster = Slurm(lambda: self.login)
        self.runs, self.mine, self.made = folder / "runs", mine, []

    def __call__(self, command: str, *options: str, env: dict | None = None, follow: bool = True, **plan) -> Run:
        run = self.new(*options, **plan).submit(command, **(env or {}))
        return run.follow() if follow else run

    def new(self, *options: str, **plan) -> Run:
        self.made.append(Run(self.cluster, self.runs, f"jobs-{os.urandom(4).hex()}", list(options), **plan))
        return self.made[-1]

    def close(self) -> None:
        for run in self.made:
            self.mine.run("scancel", "--name", run.name, check=False)
            run.control.end(0)


@pytest.fixture
def job(slurm, tmp_path):
    """Starts a run: job("echo hi", "--time=1")."""
    runs = Runs(tmp_path, slurm)
    yield runs
    runs.close()


UNTIL_TERM = "trap 'echo term; exit 9' TERM; echo on; while :; do sleep 0.1; done"
NEVER = "trap '' TERM; echo on; while :; do sleep 0.1; done"
TWICE = "echo start ${SLURM_RESTART_COUNT:-0}; [ \"$SLURM_RESTART_COUNT\" = 1 ] && exit 7; sleep 100"


# ---- its own end ---------------------------------------------------------------------------------------------------------------------

def test_the_exit_code_is_the_jobs_own_also_where_sacct_has_another(job):
    codes = (0, 3, 128, 130, 255)
    runs = [job(f"exit {code}") for code in codes]
    assert [run.end()["code"] for run in runs] == list(codes)
    assert not any(run.end()["stopped"] or run.end()["hint"] for run in runs)


def test_a_command_that_a_signal_ended_and_what_it_said(job):
    run = job("echo out; echo err >&2; kill -9 $$")
    assert (run.end()["code"], run.end()["signal"]) == (137, 9)
    assert (run.out, run.err) == ("out\n", "err\n") and run.end()["stdout_bytes"] == 4


def test_a_short_job_is_known_to_have_ended_within_seconds(job):
    began = time.monotonic()
    job("true").end()
    assert time.monotonic() - began < slurmjobs.MOST_S / 3       # two, on a machine with nothing else to do


def test_the_logs_are_there_while_it_runs_and_only_for_their_user(job):
    run = job("umask; echo here; until [ -e go ]; do sleep 0.1; done; : > made")
    run.runs()
    assert {stat.S_IMODE((run.folder / name).stat().st_mode) for name in ("run.out", "run.err", "run.sh")} == {0o600}
    (run.folder / "work" / "go").touch()
    assert run.end()["code"] == 0 and run.out == "0022\nhere\n" and stat.S_IMODE((run.folder / "work" / "made").stat().st_mode) == 0o644


def test_the_values_of_env_reach_the_job_and_stand_nowhere_else(job):
    secret, lines = "s3cr3t-" + os.urandom(8).hex(), "one\n'two' \"x\"\n$HOME `id` \\ ü\n"
    run = job("printf '%s|%s' \"$SECRET\" \"$LINES_\"; echo \" $GPURUN_RUN_ID\"; sleep 1", env={"SECRET": secret, "LINES_": lines})
    shown = job.mine.run("scontrol", "show", "job", run.id).stdout + job.mine.run("squeue", "-h", "-j", run.id, "-o", "%all", check=False).stdout
    assert run.end()["code"] == 0 and run.out == f"{secret}|{lines} {run.name}\n"
    kept = "".join(path.read_text() for path in run.folder.iterdir() if path.is_file() and path.name != "run.out")
    assert secret not in kept + shown + str(job.shims.calls("sbatch")) + job.mine.run("sacct", "-j", run.id, "-P", "-o", "ALL").stdout


def test_two_nodes_work_together_by_srun(job):
    run = job("srun bash -c 'echo $SLURMD_NODENAME $SLURM_PROCID' | sort", "--nodes=2", "--gres=gpu:h200:1")
    assert run.end()["code"] == 0 and run.out == "n1 0\nn2 1\n" and (run.folder / "run.code.0").read_text().splitlines()[7] == "nodes n[1-2]"


def test_a_run_in_a_folder_of_any_name(job, tmp_path):
    job.runs = tmp_path / "a %j%% \\ 'b' \"c\" $HOME é"
    run = job("pwd; cat; echo end")
    assert run.end()["code"] == 0 and run.out == f"{run.folder}/work\nend\n"


def test_an_allocation_that_the_agent_runs_in_does_not_leak_into_the_job(job):
    job.login.update(SLURM_JOB_ID="1", SLURM_NTASKS="7", SLURM_JOB_NAME="outer", SLURM_MEM_PER_CPU="1", SLURM_EXPORT_ENV="NONE", CUDA_VISIBLE_DEVICES="5",
                     SBATCH_WAIT="1", SBATCH_ARRAY_INX="0-3")
    run = job("echo $SLURM_JOB_ID [$SLURM_NTASKS] [$CUDA_VISIBLE_DEVICES] [$SLURM_ARRAY_TASK_ID]; V=x srun bash -c 'echo $V'", "--mem=300")
    assert run.end()["code"] == 0 and run.out == f"{run.id} [] [] []\nx\n"


# ---- ended by us ---------------------------------------------------------------------------------------------------------------------

def test_a_stop_cancels_it_and_it_has_its_grace(job):
    run = job(UNTIL_TERM)
    run.runs()
    run.control.end(4)
    assert (run.end()["code"], run.end()["stopped"]) == (9, True)
    assert run.out == "on\nterm\n" and job.mine.until(run.id, "CANCELLED")


def test_a_stop_of_a_job_that_waits_is_at_once(job):
    run = job("true", "--hold")
    eventually(lambda: "JobHeldUser" in [news["reason"] for news in run.control.news])
    began = time.monotonic()
    run.control.end(60)
    assert run.end()["stopped"] and run.end()["code"] == 143 and time.monotonic() - began < 30 and not (run.folder / "run.job").exists()


def test_a_job_that_heeds_no_term_is_killed(job):
    at_once, later = job(NEVER), job(NEVER)
    at_once.runs()
    later.runs()
    at_once.control.end(0)
    later.control.end(1)
    assert (at_once.end()["code"], at_once.end()["signal"], at_once.end()["stopped"]) == (137, 9, True)
    assert (later.end()["code"], later.end()["signal"], later.end()["stopped"]) == (137, 9, True)


def test_a_grace_longer_than_slurms_own_is_given(job):
    """KillWait is 5 s here."""
    run = job("trap 'echo term; sleep 6; echo saved; exit 0' TERM; echo on; while :; do sleep 0.1; done")
    run.runs()
    run.control.end(20)
    assert run.end()["code"] == 0 and run.end()["stopped"] and run.out == "on\nterm\nsaved\n"


def test_a_limit_of_ours_ends_it_and_is_the_reason(job):
    run = job(UNTIL_TERM)
    run.runs()                                   # else it may not have come to its trap in that time
    run.control.limits = 2
    assert re.fullmatch(r"it ran \d+ s", run.end()["limit"]) and run.end()["stopped"] and run.end()["code"] == 9
    assert run.control.ran[-1] >= 2 and run.control.ran == sorted(run.control.ran), "the time that it has run never goes back"


@pytest.mark.parametrize(("options", "reason"), [(("--nodes=3",), "PartitionNodeLimit"), (("--partition=short", "--time=10"), "PartitionTimeLimit"),
                                                 (("--hold",), "JobHeldUser")])
def test_a_job_that_waits_for_ever_says_why_and_has_a_limit_for_that(job, options, reason):
    run = job("true", *options, pending_s=3.0)
    assert run.end()["limit"] == f"it waited 3 s in Slurm's queue ({reason})" and run.end()["stopped"]
    assert reason in [news["reason"] for news in run.control.news]
    assert job.mine.until(run.id, "CANCELLED")


def test_the_time_that_it_waits_is_no_time_that_it_runs(job):
    run = job.new("--hold")
    run.control.limits = 1
    run.submit("sleep 100").follow()
    eventually(lambda: "PENDING" in run.control.states)
    time.sleep(2)
    assert run.control.ran == []
    job.mine.run("scontrol", "release", run.id)
    assert run.end()["limit"]


# ---- ended by others -------------------------------------------------------------------------------------------------------------------

def test_a_job_that_somebody_else_cancelled_says_who(job):
    run, waits = job(UNTIL_TERM), job("true", "--hold")
    run.runs()
    job.mine.run("scancel", run.id, waits.id)
    assert (run.end()["code"], run.end()["stopped"]) == (9, False) and run.end()["hint"] == "cancelled in Slurm by uid 0 (root)"
    assert (waits.end()["code"], waits.end()["signal"]) == (143, 15) and waits.end()["hint"] == "cancelled in Slurm by uid 0 (root)"


def test_an_accounting_that_hears_of_a_cancel_a_moment_later_is_asked_again(job):
    job.shims.shim("sacct", '[ $N -gt 2 ] && exec "$REAL" "$@"\necho "${@: -1}|RUNNING|0:0|0:0|00:00:01|01:00:00|n1|x"')
    run = job(UNTIL_TERM)
    run.runs()
    job.mine.run("scancel", run.id)
    assert run.end()["hint"] == "cancelled in Slurm by uid 0 (root)" and len(job.shims.calls("sacct")) >= 3


def test_a_job_that_took_the_term_of_somebody_else_for_its_end_is_no_success(job):
    run = job("trap 'exit 0' TERM; echo on; while :; do sleep 0.1; done")
    run.runs()
    job.mine.run("scancel", run.id)
    assert (run.end()["code"], run.end()["signal"], run.end()["stopped"]) == (143, 15, False)


def test_a_signal_for_the_batch_script_reaches_the_command(job):
    run = job(UNTIL_TERM)
    run.runs()
    job.mine.run("scancel", "--batch", "--signal=TERM", run.id)
    assert run.end()["code"] == 9 and not run.end()["stopped"] and run.out == "on\nterm\n"


def test_slurms_own_time_limit_is_one(job):
    run, deaf = job(UNTIL_TERM, "--time=5"), job(NEVER, "--time=5")
    run.runs()
    deaf.runs()
    job.mine.time_out(run.id)
    job.mine.time_out(deaf.id)
    for one, code in ((run, 9), (deaf, 137)):
        assert one.end(90)["limit"].startswith("Slurm's time limit of ") and one.end()["code"] == code


def test_a_job_over_its_memory_says_so(job):
    if not job.mine.cgroups:
        pytest.skip("no cgroups: no job is held to its memory here")
    eat = "python3 -c 'x = bytearray(400 << 20)'"
    all_of_it, a_step = job(eat, "--mem=60"), job(f"srun --mem=60 {eat}; exit 4", "--mem=300")
    assert all_of_it.end()["code"] == 137 and "OUT_OF_MEMORY" in all_of_it.end()["hint"]
    assert a_step.end()["code"] == 4 and "OUT_OF_MEMORY" in a_step.end()["hint"]


def test_a_script_that_somebody_killed_leaves_slurms_word(job, monkeypatch):
    monkeypatch.setattr(words, "MISSING_S", 1.0)
    monkeypatch.setattr(words, "LAG_S", 1.0)
    run = job(NEVER)
    run.runs()
    job.mine.run("scancel", "--batch", "--signal=KILL", run.id)
    assert (run.end()["code"], run.end()["signal"]) == (137, 9) and "something ended its script" in run.end()["hint"]


def test_a_log_that_cannot_be_made_is_a_fault_that_says_so(job, monkeypatch):
    monkeypatch.setattr(words, "LAG_S", 1.0)
    run = job("true", "--hold")
    (run.folder / "run.out").unlink()
    (run.folder / "run.out").mkdir()
    job.mine.run("scontrol", "release", run.id)
    with pytest.raises(GpurunError, match="JobLaunchFailure.*file system that the compute nodes share"):
        run.end()


def test_a_success_that_left_no_record_is_a_fault(job, monkeypatch):
    monkeypatch.setattr(words, "MISSING_S", 1.0)
    monkeypatch.setattr(words, "LAG_S", 1.0)
    job.shims.shim("sbatch", 'exec "$REAL" "${@:1:$#-1}" --wrap true')       # what a node sees that has another folder of this name
    with pytest.raises(GpurunError, match="ended well.* left no exit record in .*file system that the compute nodes share"):
        job("true").end()


def test_a_claim_that_nobody_holds_is_a_fault_and_no_exit_code(job, monkeypatch):
    monkeypatch.setattr(words, "MISSING_S", 1.0)
    monkeypatch.setattr(words, "LAG_S", 1.0)
    run = job("true", "--hold")
    (run.folder / "run.job").touch()
    job.mine.run("scontrol", "release", run.id)
    with pytest.raises(GpurunError, match=r"failed on n\d before its command began"):
        run.end()


@pytest.mark.parametrize("command", [TWICE, TWICE.replace("sleep 100", "trap 'exit 0' TERM; while :; do sleep 0.1; done"),
                                     TWICE.replace("sleep 100", "scontrol requeue $SLURM_JOB_ID; exit 0")], ids=["killed", "heeds TERM", "by itself"])
def test_a_job_that_was_requeued_is_followed_to_the_end_of_its_last_start(job, command):
    run = job(command)
    run.runs()
    if "scontrol" not in command:
        job.mine.run("scontrol", "requeue", run.id)
    eventually(lambda: job.mine.job(run.id)["Restarts"] == "1" and job.mine.state(run.id) == "PENDING", timeout_s=40)
    time.sleep(1.5)             # a node that is given the job anew within the second refuses it ("Job credential revoked")
    job.mine.run("scontrol", "update", f"JobId={run.id}", "StartTime=now+2", check=False)   # else it waits for two minutes
    assert run.end()["code"] == 7 and run.out == "start 0\nstart 1\n"


def test_a_job_that_was_requeued_can_be_stopped_while_it_waits(job):
    run = job(TWICE)
    run.runs()
    job.mine.run("scontrol", "requeuehold", run.id)
    eventually(lambda: run.control.news[-1]["state"] == "PENDING" and (run.folder / "run.code.0").exists(), timeout_s=40)
    run.control.end(5)
    assert run.end()["stopped"] and run.out == "start 0\n"


@pytest.mark.parametrize("how", ["requeue", "cancel"])
def test_a_preempted_job_goes_on_when_it_is_requeued_and_else_says_what_happened(tmp_path, how, monkeypatch):
    monkeypatch.setattr(words, "SHAKY_S", 3.0)
    with own_slurm(accounting=False, preempt=how, killwait=1) as mine:
        runs = Runs(tmp_path, mine)
        low = runs(TWICE, "--partition=low", "--nodes=2", "--exclusive")
        low.runs()
        high = runs("echo on; until [ -e go ]; do sleep 0.1; done", "--partition=high", "--nodes=2", "--exclusive")
        high.runs()
        if how == "requeue":
            eventually(lambda: low.control.news[-1]["state"] == "PENDING", timeout_s=40)
            (high.folder / "work" / "go").touch()
            assert high.end()["code"] == 0
            mine.run("scontrol", "update", f"JobId={low.id}", "StartTime=now+2", check=False)
            assert low.end(90)["code"] == 7
        else:
            assert low.end()["code"] == 143 and "Slurm preempted it" in low.end()["hint"]
        runs.close()


def test_a_job_whose_node_failed_is_a_fault_that_says_to_run_it_again(job, monkeypatch):
    monkeypatch.setattr(words, "SHAKY_S", 3.0)
    with job.mine.alone():
        run = job("trap '' TERM; echo on; while :; do sleep 0.1; done", "--no-requeue", "--nodelist=n2")
        run.runs()
        with job.mine.node_down("n2"):
            with pytest.raises(GpurunError, match=r"one of its nodes failed \(NODE_FAIL.*Run it again"):
                run.end()


def test_a_suspended_job_goes_on(job):
    run = job("echo on; until [ -e go ]; do sleep 0.1; done; exit 6")
    run.runs()
    job.mine.run("scontrol", "suspend", run.id)
    run.cluster.poke()
    eventually(lambda: "SUSPENDED" in run.control.states)
    (run.folder / "work" / "go").touch()
    job.mine.run("scontrol", "resume", run.id)
    assert run.end()["code"] == 6


def test_a_run_whose_folder_is_deleted_is_cancelled(job):
    run = job(UNTIL_TERM)
    run.runs()
    subprocess.run(["rm", "-rf", str(run.folder)], check=True)
    with pytest.raises(GpurunError, match="was deleted on the node"):
        run.end()
    job.mine.until(run.id, "CANCELLED", "FAILED")


# ---- Slurm's programs, and its daemons ---------------------------------------------------------------------------------------------------

def test_a_refused_job_has_the_words_of_sbatch_and_the_options_of_the_cluster_file(job):
    with pytest.raises(GpurunError, match=r"Slurm refused the job: invalid partition specified: nope; Batch job submission failed: .*cluster file: --partition=nope"):
        job("true", "--partition=nope")
    with pytest.raises(GpurunError, match="Invalid --time specification"):
        job("true", "--time=never")
    assert job.made[0].job.find() is None and len(job.shims.calls("sbatch")) == 2


def test_a_node_without_sbatch_says_where_it_was_looked_for(job):
    job.shims.hide("sbatch")
    with pytest.raises(GpurunError, match=f"there is no sbatch on this node: it was looked for in {re.escape(job.shims.path)}"):
        job("true")


def test_a_controller_that_is_away_for_a_moment_costs_no_submission(job):
    job.shims.shim("sbatch", '[ $N -gt 1 ] && exec "$REAL" "$@"\n'
                   'echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2; exit 1')
    assert job("exit 3").end()["code"] == 3 and len(job.shims.calls("sbatch")) == 2


def test_a_controller_that_stays_away_is_said_and_a_stop_ends_the_waiting(job, monkeypatch):
    monkeypatch.setattr(slurmjobs, "SUBMIT_PATIENCE_S", 1.0)
    job.shims.shim("sbatch", 'echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2; exit 1')
    with pytest.raises(GpurunError, match="could not be submitted: .*Unable to contact slurm controller.*Nothing of it is in Slurm"):
        job("true")
    assert job.new().job.submit("true", {}, stopped=lambda: True) == ""


@pytest.mark.parametrize("then", ["sleep 100", 'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1', "kill -9 $$"],
                         ids=["hangs", "timed out", "killed"])
def test_a_submission_whose_answer_was_lost_is_found_and_not_made_twice(job, then):
    job.shims.shim("sbatch", f'"$REAL" "$@" >/dev/null\n{then}')
    run = job("echo once; exit 3", submit_s=5.0)
    assert run.end()["code"] == 3 and run.out == "once\n" and job.mine.jobs(run.name) == [run.id] and len(job.shims.calls("sbatch")) == 1


def test_a_submission_that_never_arrived_is_made_again(job, monkeypatch):
    monkeypatch.setattr(slurmjobs, "SETTLE_S", 2.0)
    job.shims.shim("sbatch", '[ $N -gt 1 ] && exec "$REAL" "$@"\nsleep 100')
    run = job("exit 3", submit_s=4.0)
    assert run.end()["code"] == 3 and len(job.shims.calls("sbatch")) == 2 and job.mine.jobs(run.name) == [run.id]


def test_an_answer_that_did_not_come_is_no_failure_of_the_job(job):
    job.shims.shim("squeue", '[ $N -gt 3 ] && exec "$REAL" "$@"\necho "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1')
    run = job("sleep 4; exit 3")
    eventually(lambda: any("Slurm doesn't answer: slurm_load_jobs error: Socket timed out" in news["reason"] for news in run.control.news))
    assert run.end()["code"] == 3


def test_a_squeue_that_hangs_is_ended_and_the_job_ends_all_the_same(job):
    job.shims.shim("squeue", "echo $$ >> $0.pids; sleep 100")
    run = job("exit 3", poll_s=1.0)
    assert run.end()["code"] == 3
    from gpurun import supervise
    assert not any(supervise.start_time(int(pid)) for pid in (job.shims.folder / "squeue.pids").read_text().split()[:-1])


def test_an_old_squeue_and_no_accounting_leave_the_jobs_own_record(job):
    job.shims.shim("squeue", "echo \"squeue: unrecognized option '-t'\" >&2; exit 1")
    job.shims.hide("sacct", "scontrol")
    assert job("exit 255").end()["code"] == 255


def test_a_job_goes_on_and_ends_while_the_controller_is_down(job):
    with job.mine.alone():
        run = job("echo on; until [ -e go ]; do sleep 0.1; done; exit 6")
        run.runs()
        with job.mine.stop_controller():
            run.cluster.poke()
            (run.folder / "work" / "go").touch()
            assert run.end()["code"] == 6


def test_a_stop_that_the_controller_did_not_hear_is_said_again(job):
    with job.mine.alone():
        run = job(UNTIL_TERM)
        run.runs()
        job.shims.shim("scancel", '[ $N -gt 1 ] && exec "$REAL" "$@"\necho "scancel: error: Kill job error: Unable to contact slurm controller (connect failure)" >&2; exit 1')
        run.control.end(4)
        eventually(lambda: any("scancel could not end it: Kill job error: Unable to contact" in news["reason"] for news in run.control.news))
        assert run.end()["stopped"] and run.end()["code"] == 9


def test_a_database_that_is_down_matters_to_nobody(job):
    with job.mine.stop_database():
        assert job("exit 130").end()["code"] == 130


def test_without_accounting_and_after_the_controller_forgot_it_the_record_is_the_truth(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "FORGOTTEN_S", 2.0)
    with own_slurm(minjobage=2, accounting=False) as mine:
        runs = Runs(tmp_path, mine)
        kept, lost = runs("exit 255", follow=False), runs("exit 3", follow=False)
        eventually(lambda: mine.job(kept.id) == {} == mine.job(lost.id), timeout_s=60)
        assert kept.follow().end()["code"] == 255
        for name in ("run.code.0", "run.job"):
            (lost.folder / name).unlink()
        with pytest.raises(GpurunError, match="knows no job .* any more and it left no exit record"):
            lost.follow().end()
        assert runs.shims.calls("sacct"), "it was asked"


def test_one_question_serves_all_jobs_and_is_asked_ever_less_often(job):
    runs = [job("echo on; until [ -e go ]; do sleep 0.1; done", "--mem=50") for _ in range(12)]
    for run in runs:
        run.runs()
    eventually(lambda: all(run.control.news[-1]["state"] == "RUNNING" for run in runs))
    before = len(job.shims.calls("squeue"))
    time.sleep(10)
    asked = job.shims.calls("squeue")[before:]
    assert 1 <= len(asked) <= 5 and {len(call[-1].split(",")) for call in asked} == {12} and not job.shims.calls("sacct")[:1]
    for run in runs:
        (run.folder / "work" / "go").touch()
    assert {run.end()["code"] for run in runs} == {0}


# ---- after an agent that was killed --------------------------------------------------------------------------------------------------------

def again(run: Run) -> Run:
    """The same run, in the hands of another agent."""
    other = Run.__new__(Run)
    other.folder, other.name, other.plan, other.control = run.folder, run.name, run.plan, Control()
    other.cluster = Slurm(run.cluster._login)
    other.job = other.cluster.job(str(run.folder), str(run.folder / "work"), run.name, run.plan)
    return other


def test_a_run_that_was_never_submitted_is_known_as_one_without_asking_anybody(job):
    assert job.new().job.find() is None and not job.shims.calls("squeue")


def test_the_next_agent_finds_the_job_and_its_end(job):
    run = job("echo on; until [ -e go ]; do sleep 0.1; done; exit 6", follow=False)
    other = again(run)
    other.id = other.job.find()
    assert other.id == run.id
    other.follow()
    (run.folder / "work" / "go").touch()
    assert other.end()["code"] == 6
    third = again(run)
    third.id = third.job.find()
    assert third.follow().end() == other.end()


def test_an_sbatch_whose_agent_was_killed_is_waited_for(job):
    job.shims.shim("sbatch", 'until [ -e "$0.go" ]; do sleep 0.05; done; exec "$REAL" "$@"')
    run = job.new()
    thread = threading.Thread(target=run.submit, args=("exit 3",), daemon=True)
    thread.start()
    eventually(lambda: (run.folder / "run.sbatch").exists() and run.job._living_sbatch())
    threading.Timer(0.5, (job.shims.folder / "sbatch.go").touch).start()
    other = again(run)
    other.id = other.job.find()
    assert other.id and other.follow().end()["code"] == 3 and job.mine.jobs(run.name) == [other.id]
    thread.join()


def test_a_job_whose_id_nobody_noted_is_found_by_its_name(job):
    run = job("true", "--hold", follow=False)
    (run.folder / "run.sbatch").write_text("")
    assert again(run).job.find() == run.id


def test_a_submission_that_was_cut_short_before_it_began_is_none_after_a_while(job, monkeypatch):
    monkeypatch.setattr(slurmjobs, "SETTLE_S", 2.0)
    run = job.new()
    (run.folder / "run.sbatch").touch()
    assert run.job.find() is None and len(job.shims.calls("squeue")) >= 2


def test_nobody_can_tell_while_slurm_does_not_answer(job, monkeypatch):
    monkeypatch.setattr(slurmjobs, "FIND_PATIENCE_S", 1.0)
    job.shims.shim("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1')
    run = job.new()
    (run.folder / "run.sbatch").touch()
    with pytest.raises(GpurunError, match=f"nobody can tell whether Slurm has the job of {run.name}: .*Unable to contact"):
        run.job.find()


def test_of_two_jobs_of_one_run_only_one_runs_the_command(job):
    run = job("echo once; sleep 2; exit 3", "--begin=now+3", follow=False)
    first, second = run.id, again(run).submit("echo once; sleep 2; exit 3").id
    run.follow()
    assert first != second and run.end()["code"] == 3 and run.out == "once\n"
    assert run.control.news[-1]["job_id"] == (run.folder / "run.job").read_text().strip()
    for job_id in (first, second):
        job.mine.until(job_id, "FAILED", "CANCELLED", "COMPLETED")
    assert run.out == "once\n"


# ---- a file system that lags ---------------------------------------------------------------------------------------------------------------

def test_logs_that_come_later_than_the_record_are_waited_for(job):
    run = job.new()
    for name in ("run.out", "run.err"):
        (run.folder / name).touch()
    threading.Timer(0.5, lambda: (run.folder / "run.out").write_text("x" * 10)).start()
    run.job.await_logs({"stdout_bytes": 10, "stderr_bytes": 0})
    assert len(run.out) == 10


def test_a_record_that_comes_later_than_slurms_word_is_waited_for(job):
    run = job("exit 3", "--hold")
    hidden = run.folder / "hidden"
    job.mine.run("scontrol", "release", run.id)
    run.control.wait = lambda timeout_s: time.sleep(0.01)
    eventually(lambda: (run.folder / "run.code.0").exists())
    try:
        (run.folder / "run.code.0").rename(hidden)
    except FileNotFoundError:
        pass
    time.sleep(1)
    if hidden.exists():
        hidden.rename(run.folder / "run.code.0")
    assert run.end()["code"] == 3
