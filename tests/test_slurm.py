"""Slurm's words: command lines, answers recorded from a real 22.05, the batch script run by bash alone, and each way that a job can end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually

from gpurun import slurm, supervise
from gpurun.errors import GpurunError
from gpurun.slurm import ENDED, STATES, WAIT, Exit, Facts, Word, judge

DATA = Path(__file__).parent / "data" / "slurm"
SQUEUE, SACCT = slurm.parse_squeue((DATA / "squeue.txt").read_text()), slurm.parse_sacct((DATA / "sacct.txt").read_text())
SCONTROL = {re.match(r"JobId=(\d+)", line).group(1): slurm.parse_scontrol(line) for line in (DATA / "scontrol.txt").read_text().splitlines()}
NAMES = {word.name: job_id for job_id, word in SACCT.items()}


# ---- answers that a real Slurm gave ----------------------------------------------------------------------------------------------------

def test_squeue_says_state_time_limit_nodes_and_reason_of_each_job():
    assert len(SQUEUE) == 18
    assert SQUEUE[NAMES["rec-ok"]] == Word("COMPLETED", "", "n1", 0, "1:00:00", name="rec-ok")
    assert SQUEUE[NAMES["rec-cancel"]][:4] == ("CANCELLED", "", "n1", 3)
    assert SQUEUE[NAMES["rec-held"]][:4] == ("PENDING", "JobHeldUser", "", 0)
    assert SQUEUE[NAMES["rec-limit"]].reason == "PartitionTimeLimit" and SQUEUE[NAMES["rec-full"]].reason == "PartitionNodeLimit"
    assert SQUEUE[NAMES["rec-dep"]].reason == "DependencyNeverSatisfied"
    assert SQUEUE[NAMES["rec|pipe"]][:4] == ("RUNNING", "", "n[1-2]", 6), "nothing escapes the | in a job's name"
    assert SQUEUE[NAMES["rec-oom"]].reason == "OutOfMemory"


def test_sacct_says_who_cancelled_a_job_and_takes_128_off_its_exit_code():
    for name, code in (("rec-ok", 0), ("rec-3", 3), ("rec-255", 127), ("rec-130", 2), ("rec-128", 0), ("rec-segv", 11)):
        assert (SACCT[NAMES[name]].exit_code, SACCT[NAMES[name]].exit_signal) == (code, 0)
    assert (SACCT[NAMES["rec-kill9"]].exit_code, SACCT[NAMES["rec-kill9"]].exit_signal) == (0, 9)
    assert SACCT[NAMES["rec-cancel"]].state == "CANCELLED" and SACCT[NAMES["rec-cancel"]].by_uid == "0"
    assert SACCT[NAMES["rec-oomstep"]].derived_signal == 125 and SACCT[NAMES["rec-held"]].nodes == ""
    assert SACCT[NAMES["rec|pipe"]].state == "RUNNING" and SACCT[NAMES["rec-time"]].time_limit == "00:01:00"


def test_scontrol_has_the_exit_code_as_it_was():
    assert SCONTROL[NAMES["rec-255"]].exit_code == 255 and SCONTROL[NAMES["rec-3"]].exit_code == 3
    assert SCONTROL[NAMES["rec-cancel"]][:1] == ("CANCELLED",) and SCONTROL[NAMES["rec-cancel"]].exit_signal == 15
    assert SCONTROL[NAMES["rec-oomstep"]].exit_code == 4 and SCONTROL[NAMES["rec-oomstep"]].derived_signal == 125
    assert SCONTROL[NAMES["rec-noout"]].reason == "JobLaunchFailure"
    assert slurm.parse_scontrol("") == Word(name="")


@pytest.mark.parametrize("text", ["", "\n", "garbage\n", "1|RUNNING\n", "|||||||||\n", "x|RUNNING|0:01|1:00|n1|None|name\n", "CLUSTER: one\n", "\0\xff|"])
def test_what_is_no_answer_is_no_word_of_any_job(text):
    assert slurm.parse_squeue(text) == slurm.parse_sacct(text) == {}


def test_a_line_that_names_a_cluster_is_passed_over():
    assert list(slurm.parse_squeue("CLUSTER: a\n7|PENDING|0:00|1:00|(null)|Priority|x\nCLUSTER: b\n")) == ["7"]


@pytest.mark.parametrize(("text", "state", "uid"), [("CANCELLED by 1001", "CANCELLED", "1001"), (" cancelled ", "CANCELLED", ""), ("CANCELLED+", "CANCELLED", ""),
                                                    ("COMPLETED", "COMPLETED", ""), ("", "", "")])
def test_a_state_is_read_with_all_that_stands_around_it(text, state, uid):
    assert slurm.normal(text) == (state, uid)


@pytest.mark.parametrize(("text", "seconds"), [("0:12", 12), ("1:02:03", 3723), ("1-02:03:04", 93784), ("00:00:00", 0), ("INVALID", None), ("UNLIMITED", None), ("", None)])
def test_the_times_of_slurm(text, seconds):
    assert slurm.duration(text) == seconds


@pytest.mark.parametrize(("text", "job_id"), [
    ("17\n", "17"), ("17;cluster\n", "17"), ("Submitted batch job 17\n", "17"), ("Submitted batch job 17 on cluster a\n", "17"), ("Welcome!\n  12 users\n17\n\n", "17"),
    ("17\nsbatch: thanks for using this machine\n", "17"), ("", ""), ("17a\n", ""), ("job 17\n", ""), ("-1\n", "")])
def test_the_job_id_is_found_in_whatever_a_sites_sbatch_prints(text, job_id):
    assert slurm.parse_sbatch(text) == job_id


def recorded_errors() -> dict[str, str]:
    parts = re.split(r"^\$ (.*)\n", (DATA / "errors.txt").read_text(), flags=re.MULTILINE)[1:]
    return {command: text.rpartition("= ")[0] for command, text in zip(parts[::2], parts[1::2])}


def test_every_recorded_refusal_of_sbatch_is_one_and_is_said_in_its_words():
    errors = {command: text for command, text in recorded_errors().items() if command.startswith("sbatch")}
    assert len(errors) == 7
    for text in errors.values():
        assert slurm.error(text) == slurm.REFUSED and not slurm.unsent(text)
    assert slurm.said(errors["sbatch -p nope --wrap true"]) == ("invalid partition specified: nope; Batch job submission failed: Invalid partition name specified")
    assert slurm.said(errors["sbatch --bogus --wrap true"]) == "unrecognized option '--bogus'; Try \"sbatch --help\" for more information"


@pytest.mark.parametrize(("text", "kind", "unsent"), [
    ("slurm_load_jobs error: Invalid job id specified", slurm.UNKNOWN_ID, False),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", slurm.UNREACHABLE, True),
    ("slurm_load_jobs error: Socket timed out on send/recv operation", slurm.UNREACHABLE, False),
    ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", slurm.UNREACHABLE, False),
    ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", slurm.UNREACHABLE, True),
    ("slurm_load_jobs error: Zero Bytes were transmitted or received", slurm.UNREACHABLE, False),
    ("sacct: error: Problem talking to the database: Connection refused", slurm.UNREACHABLE, True),
    ("sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:h:1: Connection refused", slurm.UNREACHABLE, True),
    ("Slurm accounting storage is disabled", slurm.DISABLED, False),
    ("squeue: unrecognized option '--me'", slurm.REFUSED, False),
    ("", slurm.REFUSED, False),
])
def test_only_the_text_tells_an_unknown_job_from_a_controller_that_is_away(text, kind, unsent):
    assert slurm.error(text) == kind and slurm.unsent(text) == unsent


def test_what_a_program_says_is_one_printable_line_and_not_long():
    assert slurm.said("sbatch: error: a\x1b[31m\nsbatch: error: a\x1b[31m\n\n" + "x" * 1000) == "a?[31m; " + "x" * 392 + "…"


# ---- what sbatch is told -----------------------------------------------------------------------------------------------------------------

def test_our_options_come_behind_those_of_the_cluster_file_and_none_of_them_has_a_value_of_env():
    argv = slurm.arguments(["--partition=main", "--mem=1G"], "train-1", "/w/work", "/w/run.out", "/w/run.err")
    assert argv == ["sbatch", "--partition=main", "--mem=1G", "--parsable", "--job-name=train-1", "--chdir=/w/work", "--input=/dev/null", "--output=/w/run.out",
                    "--error=/w/run.err", "--open-mode=append", "--export=ALL"]


def test_a_path_is_no_pattern():
    assert "--output=/a%%j/b" in slurm.arguments([], "n", "/w", "/a%j/b", "/e")
    assert "--output=/a%j\\\\x/b" in slurm.arguments([], "n", "/w", "/a%j\\x/b", "/e"), "with a backslash in it sbatch expands nothing"


def test_nothing_of_an_allocation_that_gpurun_runs_in_reaches_the_job():
    inside = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8", "SLURMD_NODENAME": "n9", "SLURM_CONF": "/c", "SLURM_CPU_BIND": "x", "PMI_RANK": "0", "PMIX_RANK": "0",
              "CUDA_VISIBLE_DEVICES": "1", "TMPDIR": "/tmp/job3", "PATH": "/bin", "SLURM_MPI_TYPE": "pmix", "SLURM_EXPORT_ENV": "NONE", "SLURM_JWT": "t"}
    assert slurm.environment(inside) == {"SLURM_CONF": "/c", "PATH": "/bin", "SLURM_JWT": "t"}


def test_a_users_own_settings_reach_it():
    outside = {"SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "p", "SLURM_MPI_TYPE": "pmix", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": "/t", "SLURM_CLUSTERS": "c"}
    assert slurm.environment(outside) == outside


def test_nothing_in_a_login_shell_makes_another_thing_of_sbatch():
    assert slurm.environment({"SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "1-9", "SBATCH_EXPORT": "NONE", "SBATCH_GET_USER_ENV": "1", "SLURM_EXPORT_ENV": "NONE",
                              "SBATCH_TEST_ONLY": "1", "SLURM_GET_USER_ENV": "1", "HOME": "/h"}) == {"HOME": "/h"}


def test_nothing_in_a_login_shell_makes_another_question_of_ours():
    asked = slurm.asking({"SQUEUE_STATES": "PD", "SCANCEL_INTERACTIVE": "1", "SACCT_FORMAT": "x", "SLURM_TIME_FORMAT": "%s", "SLURM_CONF": "/c", "LANG": "de_DE"})
    assert asked == {"SLURM_CONF": "/c", "LANG": "de_DE", "LC_ALL": "C"}


# ---- the batch script, by bash alone -------------------------------------------------------------------------------------------------------

class Batch:
    """Runs the script as slurmd would."""

    def __init__(self, folder: Path, command: str, hard_s: float = 0.0, **env: str) -> None:
        self.folder = folder
        (folder / "work").mkdir(parents=True, exist_ok=True)
        path = folder / "script"
        path.write_text(slurm.script(str(folder), str(folder / "work"), command, hard_s, f"the hard limit of {hard_s} s was reached"))
        path.chmod(0o700)
        environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", **env}
        with open(folder / "run.out", "ab") as out, open(folder / "run.err", "ab") as err:
            self.process = subprocess.Popen(["/bin/bash", "-p", str(path)], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)

    def wait(self) -> "Batch":
        self.code = self.process.wait(30)
        return self

    @property
    def out(self) -> str:
        return (self.folder / "run.out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "run.err").read_text()

    def watched(self) -> bool:
        """Whether the command runs, and beside it both of the script's own: the shell that waits for it, and the watcher."""
        lines = [cmdline(pid) for pid in supervise.descendants(self.process.pid)]
        mine = str(self.folder / "script").encode()
        return sum(mine in line for line in lines) >= 2 and any(line and mine not in line for line in lines)

    def record(self, restarts: int = 0) -> Exit:
        found = slurm.parse_exit((self.folder / f"run.code.{restarts}").read_bytes())
        assert found is not None
        return found

    def signal(self, number: int, everybody: bool = False) -> None:
        others = supervise.descendants(self.process.pid) if everybody else set()
        for pid in [self.process.pid, *others]:          # the script first, which Slurm signals with the others: this process may be held up in between
            supervise.send(pid, number)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def batch(tmp_path):
    started = []

    def start(command: str, folder: str = "run", **env: Any) -> Batch:
        started.append(Batch(tmp_path / folder, command, **env))
        return started[-1]
    yield start
    for one in started:
        one.signal(signal.SIGKILL, everybody=True)
        one.process.wait()


@pytest.mark.parametrize("code", [0, 1, 3, 126, 127, 128, 130, 255])
def test_the_record_has_the_commands_own_exit_code(batch, code):
    done = batch(f"echo out; echo err >&2; exit {code}").wait()
    assert done.code == code and done.record() == Exit("17", 0, code, False, done.record().seconds, 4, 4, "n[1-2]", "")
    assert not (done.folder / "run.code.0.next").exists()


@pytest.mark.parametrize("number", [9, 11, 15])
def test_a_command_that_a_signal_ended_has_128_more_and_nothing_is_said_into_its_logs(batch, number):
    done = batch(f"kill -{number} $$").wait()
    assert done.record().code == 128 + number and not done.record().termed and done.out == done.err == ""


def test_the_command_arrives_as_it_was_written(batch, tmp_path):
    done = batch("#!/bin/sh\n#SBATCH --time=1\nprintf '%s|' \"it's ü $((1+1))\"\r\n# ${A}\tend").wait()
    assert (done.folder / "run.out").read_bytes() == "it's ü 2\r|".encode()
    text = (done.folder / "script").read_bytes()
    assert b"\r" not in text and not re.search(rb"^#SBATCH", text, re.MULTILINE) and max(text) < 128 and text.startswith(b"#!/bin/bash")


@pytest.mark.parametrize("command", ["echo 'a'\\''b'", "echo \"$'x'\"", "echo a\\\\b", "echo @FOLDER@ @COMMAND@", "printf '\\x41%s\\n' \"`echo hi`\"", "echo -n \udcff\udcfe", "x=1\n\necho $x # end"])
def test_a_command_does_the_same_as_under_bash_c(batch, command):
    plain = subprocess.run([b"bash", b"-c", os.fsencode(command)], stdout=subprocess.PIPE)
    done = batch(command).wait()
    assert (done.folder / "run.out").read_bytes() == plain.stdout and done.code == plain.returncode


def test_a_command_that_no_argument_can_hold_is_refused_before_anything_is_submitted():
    with pytest.raises(GpurunError, match="at most 128 KiB"):
        slurm.script("/f", "/w", "#" * (128 << 10))
    with pytest.raises(GpurunError, match="NUL"):
        slurm.script("/f", "/w", "a\0b")


def test_a_folder_of_any_name_will_do(batch):
    done = batch("pwd; echo x > made", folder="a %j 'b' \"c\" $HOME `x` \\ é").wait()
    assert done.code == 0 and done.out == f"{done.folder}/work\n" and (done.folder / "work" / "made").exists() and done.record().stdout_bytes == len(os.fsencode(done.out))


def test_the_command_has_the_environment_and_nothing_of_the_script(batch, tmp_path):
    (tmp_path / "start").write_text("echo started\n")
    done = batch("env -0 | grep -zc ^gpurun; env -0 | grep -z ^MULTI; echo; f; read x; echo \"[$x]\"; ls /proc/self/fd; grep SigIgn /proc/self/status; umask",
                 MULTI="a\n'b'\t\"c\"", BASH_ENV=str(tmp_path / "start"), SECONDS="x", **{"BASH_FUNC_f%%": "() {  echo function\n}"}).wait()
    assert done.out.replace("\0", "") == ("started\n0\nMULTI=a\n'b'\t\"c\"\nfunction\n[]\n0\n1\n2\n3\nSigIgn:\t0000000000000000\n0022\n")


def test_a_second_job_of_the_same_run_never_runs_the_command(batch):
    batch("echo once").wait()
    second = batch("echo twice", SLURM_JOB_ID="18").wait()
    assert second.code == 0 and second.out == "once\n" and second.record().job_id == "17"


def test_the_same_job_runs_again_when_slurm_has_requeued_it(batch):
    batch("exit 1").wait()
    again = batch("echo again; exit 4", SLURM_RESTART_COUNT="1").wait()
    assert again.record(0).code == 1 and again.record(1).code == 4 and again.out == "again\n"


def test_a_claim_without_an_owner_lets_nobody_run(batch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.job").touch()
    done = batch("echo never").wait()
    assert done.code == 1 and done.out == "" and not (tmp_path / "run" / "run.code.0.next").exists()


def test_the_mark_that_it_began_stands_before_the_command_does_and_has_room_for_the_record(batch):
    done = batch("stat -c %s ../run.code.0.next; cat ../run.job").wait()
    assert done.out == "4096\n17\n"


def test_a_workdir_that_is_not_there_is_no_success(batch, tmp_path):
    batch("true").wait()
    (tmp_path / "run" / "work").rmdir()
    subprocess.run([str(tmp_path / "run" / "script")], env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"})
    assert slurm.parse_exit((tmp_path / "run" / "run.code.1").read_bytes()).fault == "workdir"


def test_what_the_command_left_running_is_ended(batch):
    done = batch("sleep 1000 & echo $!").wait()
    eventually(lambda: not supervise.start_time(int(done.out)))


def test_a_path_without_anything_costs_nobody_the_record(batch):
    done = batch("exit 5", PATH="/nonexistent").wait()
    assert done.code == 5 and done.record().code == 5


SAYS = "for s in TERM HUP INT QUIT USR1 USR2; do trap \"echo $s\" $s; done; exec 5<> <(:); echo on; while [ ! -e ../go ]; do read -rt 0.05 -u 5; done; exit 6"


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT", "QUIT", "USR1", "USR2"])
@pytest.mark.parametrize("everybody", [False, True], ids=["the script alone", "every process"])
def test_a_signal_reaches_the_command_once_whoever_else_has_it(batch, name, everybody):
    """`--signal=B:` and `scancel --batch` on the one hand, `scancel`, a time limit and a preemption on the other."""
    job = batch(SAYS)
    eventually(lambda: job.out == "on\n" and job.watched())
    job.signal(signal.Signals[f"SIG{name}"], everybody)
    eventually(lambda: name in job.out)
    time.sleep(0.5)             # a second one would come within 0.2 s
    (job.folder / "go").touch()
    job.wait()
    assert job.out == f"on\n{name}\n" and job.err == "" and job.record().code == 6 and job.record().termed == (name == "TERM")


def test_without_an_agent_the_script_itself_ends_a_command_at_its_hard_limit(batch):
    heeds = batch("trap 'echo term; exit 3' TERM; echo on; while :; do sleep 0.05; done", hard_s=3).wait()   # bash's first second may be over at once
    assert heeds.code == heeds.record().code == 3 and heeds.out == "on\nterm\n" and heeds.record().limit == "the hard limit of 3 s was reached"
    in_time = batch("echo done; exit 4", folder="in-time", hard_s=60).wait()
    assert in_time.code == 4 and in_time.record().limit == ""


def test_what_heeds_no_term_of_the_scripts_is_killed_after_its_grace(batch, monkeypatch):
    monkeypatch.setattr(slurm, "SCRIPT_GRACE_S", 1)
    deaf = batch("trap '' TERM; echo on; while :; do sleep 0.05; done", hard_s=3).wait()
    assert deaf.record().code == 137 and deaf.record().limit and not supervise.descendants(deaf.process.pid)
    ended(judge(facts(deaf.record(), squeue=word("FAILED"), scontrol=GONE)), 137, 9, stopped=True, limit="the hard limit of 3 s was reached")


def test_no_end_is_missed_that_comes_with_a_signal_to_everybody(batch):
    """With bash's `wait` and a trap one of twenty scripts hung here, or wrote -1."""
    command = "trap 'exit 9' TERM; exec 5<> <(:); echo on; while :; do read -rt 0.01 -u 5; done"
    for several in range(8):
        jobs = [batch(command, folder=f"run{several}-{number}") for number in range(6)]
        for job in jobs:
            eventually(lambda job=job: job.out == "on\n")
            job.signal(signal.SIGTERM, everybody=True)
        assert [(job.wait().code, job.record().code, job.record().termed) for job in jobs] == [(9, 9, True)] * 6


def test_a_job_that_is_suspended_goes_on_as_if_nothing_had_been(batch):
    job = batch(SAYS)
    eventually(lambda: job.out == "on\n")
    job.signal(signal.SIGSTOP, everybody=True)
    job.signal(signal.SIGCONT, everybody=True)
    (job.folder / "go").touch()
    assert job.wait().record().code == 6


def test_a_command_ends_with_its_script_where_slurm_cannot_end_it(batch):
    job = batch("echo $$; trap '' TERM; while :; do sleep 0.1; done")
    eventually(lambda: job.out and job.watched())
    supervise.send(job.process.pid, signal.SIGKILL)
    job.process.wait()
    eventually(lambda: not supervise.start_time(int(job.out)), timeout_s=20)


def test_half_a_record_is_none():
    whole = b"job 1\nrestarts 0\ncode 3\ntermed 0\nseconds 1\nstdout_bytes 0\nstderr_bytes 0\nnodes n1\nfault \nend\n"
    assert slurm.parse_exit(whole + b"   \n") == Exit("1", 0, 3, False, 1, 0, 0, "n1", "")
    assert not any(slurm.parse_exit(whole[:size]) for size in range(len(whole)))
    assert slurm.parse_exit(whole.replace(b"code 3", b"code x")) is None


# ---- how a job ended -------------------------------------------------------------------------------------------------------------------

def own(code: int = 0, termed: bool = False, restarts: int = 0, fault: str = "") -> Exit:
    return Exit("17", restarts, code, termed, 12, 100, 5, "n1", fault)


def word(state: str, **more) -> Word:
    return Word(state, **{"nodes": "n1", "seconds": 12, "time_limit": "1:00", **more})


def facts(*records: Exit, **more) -> Facts:
    more.setdefault("begun", max([one.restarts for one in records], default=-1))
    return Facts("17", "/runs/x", tuple(records), **more)


def ended(verdict, code: int, signal_: int = 0, stopped: bool = False, limit: str = "", hint: str = "") -> None:
    assert verdict.record is not None, verdict
    assert (verdict.record["code"], verdict.record["signal"], verdict.record["stopped"], verdict.record["limit"]) == (code, signal_, stopped, limit)
    assert hint in verdict.record["hint"] and bool(hint) == bool(verdict.record["hint"])


GONE = Word()
LONG = {"held_s": 1e5, "record_s": 1e5}


@pytest.mark.parametrize("code", [0, 1, 128, 130, 255])
def test_the_jobs_own_record_is_believed_before_anybody_else(code):
    for state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
        number = 2 if code == 130 else 0
        ended(judge(facts(own(code), squeue=word(state), sacct=GONE, scontrol=GONE)), code, number)


def test_a_record_needs_no_slurm_at_all():
    for so in ({"squeue": GONE, "no_accounting": True}, {"squeue": GONE, "sacct": GONE}):
        ended(judge(facts(own(3), **so)), 3)
        ended(judge(facts(own(143, termed=True), **so)), 143, 15)
    assert judge(facts(own(3))) == WAIT
    ended(judge(facts(own(3), record_s=10)), 3)


def test_a_job_that_runs_by_an_old_word_has_ended_by_its_record():
    for state in ("RUNNING", "COMPLETING"):
        assert judge(facts(own(0), squeue=word(state))) == WAIT
        ended(judge(facts(own(0), squeue=word(state), record_s=slurm.RECORD_S)), 0)


@pytest.mark.parametrize("state", [name for name, kind in STATES.items() if kind == slurm.WAITS])
def test_a_job_that_was_requeued_has_not_ended(state):
    for record in (own(143, termed=True), own(0, termed=True), own(0), own(3)):
        assert judge(facts(record, squeue=word(state), **LONG)) == WAIT
    assert judge(facts(own(3), begun=1, squeue=word("COMPLETED"))) == WAIT, "the record of an earlier start"


def test_of_several_starts_the_last_one_counts():
    ended(judge(facts(own(143, termed=True), own(7, restarts=1), squeue=word("FAILED"), scontrol=GONE)), 7)


def test_one_that_got_a_term_may_be_about_to_be_requeued_and_is_waited_for():
    for so in ({}, {"squeue": word("COMPLETING")}, {"squeue": word("RUNNING")}):
        assert judge(facts(own(143, termed=True), **so, **LONG)) == WAIT
        ended(judge(facts(own(143, termed=True), stop=True, **so, **LONG)), 143, 15, stopped=True)


@pytest.mark.parametrize("state", slurm.SHAKY)
def test_a_failed_node_and_a_preemption_are_believed_when_they_stay(state):
    assert judge(facts(squeue=word(state))) == WAIT
    assert judge(facts(own(143, termed=True), squeue=word(state))) == WAIT
    assert state in judge(facts(squeue=word(state), **LONG)).fault and "Run it again" in judge(facts(squeue=word(state), **LONG)).fault
    ended(judge(facts(own(0, termed=True), squeue=word(state), scontrol=GONE, **LONG)), 143, 15, hint="preempted" if state == "PREEMPTED" else "")


def test_a_job_that_we_cancelled_was_stopped():
    ended(judge(facts(own(9, termed=True), squeue=word("CANCELLED"), scontrol=GONE, stop=True)), 9, stopped=True)
    ended(judge(facts(squeue=word("CANCELLED"), begun=0, stop=True, **LONG)), 137, 9, stopped=True)
    ended(judge(facts(squeue=word("CANCELLED", seconds=0), stop=True)), 143, 15, stopped=True)
    ended(judge(facts(squeue=word("CANCELLED"), scontrol=GONE, stop=True, limit="the hard limit", **LONG)), 143, 15, stopped=True, limit="the hard limit")
    ended(judge(facts(own(3), squeue=word("CANCELLED"), scontrol=GONE, stop=True)), 3)


def test_a_job_that_somebody_else_cancelled_says_who():
    sacct = word("CANCELLED", by_uid="1001")
    assert judge(facts(squeue=word("CANCELLED"), **LONG)).ask == "sacct"
    ended(judge(facts(squeue=word("CANCELLED"), sacct=sacct, **LONG)), 143, 15, hint="cancelled in Slurm by uid 1001")
    ended(judge(facts(own(5, termed=True), squeue=word("CANCELLED"), sacct=sacct, scontrol=GONE)), 5, hint="cancelled in Slurm by uid 1001")
    ended(judge(facts(own(0, termed=True), squeue=word("CANCELLED"), sacct=sacct, scontrol=GONE)), 143, 15, hint="cancelled in Slurm by uid 1001")
    ended(judge(facts(squeue=word("CANCELLED"), no_accounting=True, **LONG)), 143, 15, hint="cancelled in Slurm by somebody else")


@pytest.mark.parametrize(("state", "limit"), [("TIMEOUT", "Slurm's time limit of 1:00 was reached"), ("DEADLINE", "Slurm's deadline for the job was reached")])
def test_a_time_limit_of_slurms_is_one(state, limit):
    ended(judge(facts(own(143, termed=True), squeue=word(state), scontrol=GONE)), 143, 15, stopped=True, limit=limit)
    ended(judge(facts(squeue=word(state), begun=0, **LONG)), 137, 9, stopped=True, limit=limit)
    ended(judge(facts(own(3), squeue=word(state), scontrol=GONE)), 3)
    ended(judge(facts(sacct=word(state), squeue=GONE, **LONG)), 143, 15, stopped=True, limit=limit)


def test_lack_of_memory_is_said():
    ended(judge(facts(squeue=word("OUT_OF_MEMORY"), **LONG)), 137, 9, hint="OUT_OF_MEMORY")
    ended(judge(facts(own(1), squeue=word("OUT_OF_MEMORY"), scontrol=GONE)), 1, hint="OUT_OF_MEMORY")
    assert judge(facts(own(4), squeue=SQUEUE[NAMES["rec-oomstep"]])).ask == "scontrol"
    ended(judge(facts(own(4), squeue=SQUEUE[NAMES["rec-oomstep"]], scontrol=SCONTROL[NAMES["rec-oomstep"]])), 4, hint="OUT_OF_MEMORY")


def test_a_success_without_a_record_is_none():
    assert judge(facts(squeue=word("COMPLETED"), held_s=30)) == WAIT
    assert "is node_dir on a file system that the compute nodes share?" in judge(facts(squeue=word("COMPLETED"), **LONG)).fault.replace("Is", "is")


def test_a_failure_without_a_record_has_slurms_code_where_that_is_sure():
    began = {"begun": 0, **LONG}
    failed = word("FAILED")
    assert judge(facts(squeue=failed, begun=0, held_s=30)) == WAIT
    assert judge(facts(squeue=failed, **began)).ask == "scontrol"
    ended(judge(facts(squeue=failed, scontrol=word("FAILED", exit_code=255), **began)), 255, hint="the code is Slurm's")
    ended(judge(facts(squeue=failed, scontrol=word("FAILED", exit_code=0, exit_signal=9), **began)), 137, 9, hint="something ended its script")
    ended(judge(facts(squeue=GONE, sacct=word("FAILED", exit_code=0, exit_signal=9), **began)), 137, 9, hint="something ended its script")
    for code in (0, 2, 127):
        assert f"its exit code was {code} or {code + 128}" in judge(facts(squeue=GONE, sacct=word("FAILED", exit_code=code), **began)).fault
    assert "its exit code isn't known" in judge(facts(squeue=failed, scontrol=GONE, no_accounting=True, **began)).fault


def test_a_failure_before_the_command_began_is_no_exit_code_of_it():
    assert "failed on n1 before its command began" in judge(facts(squeue=word("FAILED"), scontrol=word("FAILED", exit_code=1), **LONG)).fault


def test_a_record_of_an_earlier_start_is_none_of_the_last_one_although_that_cannot_be_seen_yet():
    assert judge(facts(own(143, termed=True), squeue=word("FAILED"))).ask == "scontrol"
    assert judge(facts(own(143, termed=True), squeue=word("FAILED"), scontrol=word("FAILED", restarts=1, exit_code=7), held_s=5)) == WAIT
    assert "before its command began" in judge(facts(own(143, termed=True), squeue=word("FAILED"), scontrol=word("FAILED", restarts=1, exit_code=1), **LONG)).fault


def test_a_job_whose_log_could_not_be_made_says_so():
    fault = judge(facts(squeue=SQUEUE[NAMES["rec-noout"]], held_s=20)).fault
    assert "JobLaunchFailure" in fault and "on a file system that the compute nodes share" in fault and "/runs/x" in fault


def test_one_that_slurm_counts_a_second_for_says_it_as_soon():
    """Its start and its end fell into two seconds."""
    second = SQUEUE[NAMES["rec-noout"]]._replace(seconds=1)
    assert judge(facts(squeue=second, held_s=20)).ask == "scontrol"
    assert "JobLaunchFailure" in judge(facts(squeue=second, scontrol=SCONTROL[NAMES["rec-noout"]], held_s=20)).fault
    killed = second._replace(exit_signal=9)
    assert judge(facts(squeue=killed, scontrol=killed, held_s=20)) == WAIT, "a death by a signal has that reason too: its record may be on its way"


def test_a_workdir_that_its_node_does_not_have_is_a_fault_and_no_exit_code():
    assert "file system that the compute nodes share" in judge(facts(own(125, fault="workdir"), squeue=word("FAILED"))).fault


def test_a_controller_that_does_not_answer_ends_no_job():
    for so in ({}, {"sacct": GONE}, {"sacct": word("RUNNING")}, {"no_accounting": True}):
        assert judge(facts(**so, **LONG)) == WAIT


def test_a_database_that_does_not_answer_ends_no_job_that_squeue_has_forgotten():
    assert judge(facts(squeue=GONE, **LONG)) == WAIT


def test_a_job_that_everybody_has_forgotten_is_a_fault_after_a_while():
    for so in ({"squeue": GONE, "sacct": GONE}, {"squeue": GONE, "no_accounting": True}):
        assert judge(facts(**so, held_s=5)) == WAIT
        assert "left no exit record in /runs/x" in judge(facts(**so, **LONG)).fault
        ended(judge(facts(**so, **LONG, stop=True)), 143, 15, stopped=True)


def test_an_accounting_that_lags_behind_the_controller_ends_nothing():
    assert judge(facts(squeue=word("RUNNING"), sacct=word("PENDING"), **LONG)) == WAIT
    assert judge(facts(squeue=GONE, sacct=word("PENDING"), held_s=30)) == WAIT
    assert "has it as RUNNING" in judge(facts(squeue=GONE, sacct=word("RUNNING"), **LONG)).fault


def test_what_sacct_alone_still_knows_is_taken():
    assert judge(facts(squeue=GONE, sacct=SACCT[NAMES["rec-cancel"]], held_s=0)) == WAIT
    ended(judge(facts(squeue=GONE, sacct=SACCT[NAMES["rec-cancel"]], **LONG)), 143, 15, hint="by uid 0")
    ended(judge(facts(squeue=GONE, sacct=SACCT[NAMES["rec-heldcancel"]], held_s=0)), 143, 15, hint="by uid 0")


def test_a_state_that_is_new_is_waited_for_and_named():
    assert judge(facts(squeue=word("BRAND_NEW"), held_s=3600)) == WAIT
    assert "BRAND_NEW" in judge(facts(squeue=word("BRAND_NEW"), held_s=90000)).fault
    ended(judge(facts(own(3), squeue=word("BRAND_NEW"), record_s=10)), 3)


@pytest.mark.parametrize("state", STATES)
def test_every_state_leads_somewhere_and_no_active_one_to_an_end(state):
    verdict = judge(facts(squeue=word(state), sacct=GONE, scontrol=GONE, **LONG))
    assert (verdict == WAIT) == (STATES[state] != ENDED)


def test_an_accounting_that_is_behind_holds_up_no_end_that_the_job_itself_has_told():
    """The controller is away, and the database still has what it heard last."""
    for stale in ("PENDING", "RUNNING", "REQUEUED"):
        assert judge(facts(own(7), sacct=word(stale), record_s=1)) == WAIT
        assert judge(facts(own(7), sacct=word(stale), record_s=20)).record["code"] == 7
        assert judge(facts(own(7), squeue=GONE, sacct=word(stale), record_s=20)).record["code"] == 7
    assert judge(facts(own(7), squeue=word("PENDING"), record_s=20)) == WAIT, "Slurm has queued it again"
    assert judge(facts(own(143, termed=True), sacct=word("PENDING"), record_s=20)) == WAIT, "it may have been requeued"


def test_a_process_that_lacked_memory_in_a_job_that_went_on_is_no_end_of_the_job():
    verdict = judge(facts(own(0), squeue=word("OUT_OF_MEMORY"), scontrol=GONE))
    ended(verdict, 0, hint="Slurm killed a process of it for lack of memory")
