"""What Slurm is told and what its answers mean: command lines, the batch script, parsers, and `judge`, which says how a job ended.

Nothing here asks or runs anything (slurmjobs.py does), so each rule can be read and tested by itself. What holds throughout:

The job's own word comes first. The script writes `run.code.<restart count>` in the run's folder when the command has ended: that is the only
place with the true exit code (sacct makes 127:0 of 255, 2:0 of 130, 0:0 of 128) and it needs no accounting and no controller that remembers.
Slurm's word says why there is no such record, or that there will be another one (a requeued job is no end). An answer that didn't come,
in whatever words, is never a failure of the job: nothing is concluded from it.

The script's files in the run's folder:
    run.job             the id of the one job that may run the command; a second job of the same run finds it and ends without doing anything
    run.code.N.next     this start of the job has begun (N: how often Slurm has requeued it), with room for the record
    run.code.N          the record: lines `key value`, the last one `end`
"""

from __future__ import annotations

import math
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from gpurun.errors import GpurunError

# ---- states --------------------------------------------------------------------------------------------------------------------

WAITS, RUNS, ENDED = "waits", "runs", "ended"
# What they mean for a follower; what they are called in the async-job contract is for external.py to say.
STATES: Dict[str, str] = {
    "PENDING": WAITS,
    "CONFIGURING": WAITS,     # its nodes are being booted
    "RUNNING": RUNS,
    "COMPLETING": RUNS,       # processes are being ended, an epilog works
    "COMPLETED": ENDED,
    "FAILED": ENDED,
    "OUT_OF_MEMORY": ENDED,
    "BOOT_FAIL": ENDED,
    "NODE_FAIL": ENDED,       # may be requeued a moment later
    "PREEMPTED": ENDED,       # may be requeued a moment later
    "CANCELLED": ENDED,
    "TIMEOUT": ENDED,
    # not in the contract's table, but of one meaning only:
    "DEADLINE": ENDED,        # ended because its --deadline came
    "REQUEUED": WAITS,        # it is back in the queue
    "REQUEUE_FED": WAITS,     # the same, by a federation
    "REQUEUE_HOLD": WAITS,    # the same, and somebody has to release it
    "SPECIAL_EXIT": WAITS,    # the same, with a mark (scontrol requeuehold state=SpecialExit)
    "RESV_DEL_HOLD": WAITS,   # held: its reservation was deleted
    "SUSPENDED": RUNS,        # it has its nodes and will go on
    "STOPPED": RUNS,          # the same, by SIGSTOP, and keeps its CPUs
    "RESIZING": RUNS,
    "SIGNALING": RUNS,
    "STAGE_OUT": RUNS,        # its burst buffer is being written back
    "EXPEDITING": WAITS,      # requeued at once, with the highest priority (25.05)
    "POWER_UP_NODE": WAITS,   # its node is being switched on
    # seen in Slurm's sources, and not certain in what it means for the job:
    "REVOKED": ENDED,         # another cluster of the federation runs it: nothing of it is known here
    "LAUNCH_FAILED": RUNS,    # a flag beside another state: a prolog failed; what follows says more
    "RECONFIG_FAIL": RUNS,    # the same for the node's configuration
    "UPDATE_DB": RUNS,        # the same: the database is told
}
LIMITS = ("TIMEOUT", "DEADLINE")
SHAKY = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")        # final only when they stay

# How long something must have been so before it is believed. Slurm's own lags were measured at 2 s and less, NFS caches names for up to 60 s.
RECORD_S = 3.0                # a record is there and the job still shows as running: an epilog may take minutes, a requeue shows by then
LAG_S = 10.0                  # the job is over by Slurm's word: a record may still be on its way through the file system
MISSING_S = 60.0              # the same, for a job that by Slurm's word ended by itself and so must have written one
SHAKY_S = 15.0
FORGOTTEN_S = 60.0            # nobody knows the job (a new one is in sacct after 2 s)
LOST_S = 180.0                # the controller doesn't know it, the accounting believes that it is there
SIGTERM, SIGKILL = 15, 9
SCRIPT_GRACE_S = 10           # between TERM and KILL, when the script itself ends the command
NO_LAUNCH = 53                # the signal in ExitCode of a job whose log can't be opened
KILL_WAIT_S = 30.0
CODE_LINE = 400               # of what a program of Slurm says, in an error


class Word(NamedTuple):
    """What one program of Slurm says of a job; `state` "": it answered and doesn't know it."""

    state: str = ""
    reason: str = ""
    nodes: str = ""
    seconds: Optional[int] = None       # that it has run
    time_limit: str = ""
    exit_code: Optional[int] = None
    exit_signal: int = 0
    derived_signal: int = 0             # the worst of its steps; 125 says: out of memory
    by_uid: str = ""                    # CANCELLED by
    restarts: int = 0                   # scontrol alone says it
    name: str = ""

    @property
    def kind(self) -> str:
        """WAITS, RUNS, ENDED; "" for one that isn't known, or that this program never heard of."""
        return STATES.get(self.state, "")


def normal(text: str) -> Tuple[str, str]:
    """`cancelled by 1001 ` → ("CANCELLED", "1001")."""
    words = text.strip().upper().rstrip("+").split()
    return (words[0] if words else "", words[2] if len(words) > 2 and words[1] == "BY" else "")


# ---- what goes in ----------------------------------------------------------------------------------------------------------------

SQUEUE = "%i|%T|%M|%l|%N|%r|%j"         # the name last: nothing escapes a | in it
SACCT = "JobID,State,ExitCode,DerivedExitCode,Elapsed,Timelimit,NodeList,JobName"
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
# A user's own settings for srun and sbatch, as long as no allocation can have made them.
USERS_OWN = ("SLURM_MPI_TYPE", "SLURM_EXIT_ERROR", "SLURM_EXIT_IMMEDIATE", "SLURM_UNBUFFEREDIO", "SLURM_BITSTR_LEN", "SLURM_TIME_FORMAT")
# What would make another thing of our sbatch: wait for the job, many jobs, no job, another environment.
SBATCH_DROPPED = ("SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_EXPORT", "SBATCH_EXPORT_FILE", "SBATCH_GET_USER_ENV", "SBATCH_TEST_ONLY", "SBATCH_OPEN_MODE",
                  "SBATCH_JOB_NAME", "SBATCH_INPUT", "SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_CHDIR", "SBATCH_PARSABLE", "SBATCH_WRAP", "SBATCH_QUIET",
                  "SBATCH_HELP", "SBATCH_USAGE", "SBATCH_VERSION", "SBATCH_BATCH", "SBATCH_UID", "SBATCH_GID")
# Of an allocation that gpurun itself runs in, beside SLURM_*: they belong to its devices and its folders.
OF_ALLOCATION = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TMPDIR", "ENVIRONMENT",
                 "KRB5CCNAME")


def environment(login: Dict[str, str]) -> Dict[str, str]:
    """A login environment without what an allocation left in it, and without what changes what sbatch does. Defaults like
    SBATCH_ACCOUNT stay: they are the user's."""
    inside = "SLURM_JOB_ID" in login or "SLURM_JOBID" in login
    found = {}
    for name, value in login.items():
        if name in KEPT or name in USERS_OWN and not inside:
            found[name] = value
        elif name.startswith(("SLURM_", "SLURMD_")) or inside and (name in OF_ALLOCATION or name.startswith(("PMI_", "PMIX_", "PMI2_", "SRUN_"))):
            continue
        else:
            found[name] = value
    if found.get("SBATCH_CLUSTERS"):            # the job is asked for where it went
        found["SLURM_CLUSTERS"] = found["SBATCH_CLUSTERS"]
    return without_traps(found)


def without_traps(environ: Dict[str, str]) -> Dict[str, str]:
    """What may not be in the environment of our sbatch, whoever put it there."""
    return {name: value for name, value in environ.items() if name not in SBATCH_DROPPED}


def asking(environ: Dict[str, str]) -> Dict[str, str]:
    """The environment for questions: SQUEUE_STATES, SCANCEL_INTERACTIVE and their like would make other questions of them."""
    mine = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SBATCH_")
    found = {name: value for name, value in environ.items() if not name.startswith(mine) and name != "SLURM_TIME_FORMAT"}
    found["LC_ALL"] = "C"
    return found


def arguments(options: List[str], name: str, workdir: str, out: str, err: str) -> List[str]:
    """sbatch, without the script's path. Ours come last: of two the last one holds."""
    return ["sbatch", *options, "--parsable", f"--job-name={name}", f"--chdir={workdir}", "--input=/dev/null", f"--output={_pattern(out)}",
            f"--error={_pattern(err)}", "--open-mode=append", "--export=ALL"]


def _pattern(path: str) -> str:
    """A path for --output, as it is. With a backslash anywhere in it sbatch takes no % for a pattern, and one backslash away."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def squeue(job_ids: List[str]) -> List[str]:
    return ["squeue", "-h", "-t", "all", "-o", SQUEUE, "-j", ",".join(job_ids)]


def squeue_by_name(name: str) -> List[str]:
    return ["squeue", "-h", "-t", "all", "-o", SQUEUE, "-n", name]


def sacct(job_ids: List[str]) -> List[str]:
    return ["sacct", "-X", "-P", "-n", "-o", SACCT, "-j", ",".join(job_ids)]


def sacct_by_name(name: str, since: str) -> List[str]:
    """`since`: a day, 2026-11-30. Without one sacct shows today's jobs only."""
    return ["sacct", "-X", "-P", "-n", "-o", SACCT, "-S", since, "--name=" + name]


def scontrol(job_id: str) -> List[str]:
    return ["scontrol", "-o", "-d", "show", "job", job_id]


def scancel(job_id: str) -> List[str]:
    return ["scancel", job_id]


def scancel_term(job_id: str) -> List[str]:
    """TERM to every process of a running job and nothing more: a plain scancel brings KILL when KillWait is over, which is the site's."""
    return ["scancel", "--signal=TERM", "--full", job_id]


def scancel_kill(job_id: str) -> List[str]:
    """KILL to the batch script, with which the job ends at once. KILL to all of it would be a plain scancel, with its KillWait."""
    return ["scancel", "--signal=KILL", "--batch", job_id]


# ---- the batch script --------------------------------------------------------------------------------------------------------------

COMMAND_BYTES = (128 << 10) - 1         # what Linux takes as one argument

# Bash alone: a compute node may have no Python. -p: a BASH_ENV is the command's business. Its variables have names that nobody exports, since
# a variable that comes with the environment would reach the command with another value.
#
# Signals: scancel, a time limit and a preemption send TERM to all processes of the job, so the command has it and the script only waits.
# --signal=B:USR1@60 and scancel --batch send to this script alone, which passes it on; so does scancel where Slurm knows a job's processes by their
# group (proctrack/pgid), for the command has one of its own: bash takes INT and QUIT from what it starts in the background of its own. Which of the
# two it was shows in the watcher, a process beside the command that heeds no signal: if it is dead, all got it. It also ends the command when this
# script was killed and Slurm can't.
#
# The command's exit code comes through a pipe from a shell that has it in its foreground. `wait` would be simpler, and in bash 5.2 it hangs or
# answers -1 in one of twenty cases where a signal for which there is a trap comes with the end of the process that it waits for. For the
# same reason a trap only notes its signal.
SCRIPT = r"""#!/bin/bash -p
# Made by gpurun for one run. What it does and why stands in gpurun/slurm.py.
gpurun_folder=@FOLDER@
gpurun_workdir=@WORKDIR@
gpurun_command=@COMMAND@
gpurun_hard_s=@HARD_S@ gpurun_why=@LIMIT@ gpurun_limit= gpurun_kill_s=
gpurun_n=${SLURM_RESTART_COUNT:-0}
gpurun_record=$gpurun_folder/run.code.$gpurun_n
gpurun_began=$SECONDS gpurun_pid= gpurun_watcher= gpurun_termed=0 gpurun_got= gpurun_code=143 gpurun_fault= gpurun_gone=0 gpurun_line=
exec 7>&1 8>&2 2>/dev/null 6<> <(:) 9<> <(:)    # 7, 8: the job's logs; 6: nothing ever comes through it; 9: what the command's shell says
export -n SHELLOPTS BASHOPTS
umask 022
for gpurun_name in TERM HUP INT QUIT USR1 USR2; do
    trap "gpurun_got+='$gpurun_name '" "$gpurun_name"
done

gpurun_pause() {
    read -rt "$1" -u 6 gpurun_none
    (($? > 128)) || command -p sleep "$1"
}

if ! (set -C; printf '%s\n' "$SLURM_JOB_ID" >"$gpurun_folder/run.job"); then
    gpurun_holder=
    for gpurun_try in 1 2 3 4 5; do
        read -r gpurun_holder <"$gpurun_folder/run.job"
        [[ -n $gpurun_holder ]] && break
        gpurun_pause 1
    done
    [[ -n $gpurun_holder ]] || exit 1
    [[ $gpurun_holder == "$SLURM_JOB_ID" ]] || exit 0
fi
printf '%4095s\n' '' >"$gpurun_record.next"

gpurun_run() {
    trap : TERM HUP INT QUIT USR1 USR2
    (
        printf 'pid %s\n' "$BASHPID" >&9
        exec "$gpurun_bash" -c "$gpurun_command" </dev/null >&7 2>&8 6>&- 7>&- 8>&- 9>&-
    )
    printf 'code %s\n' "$?" >&9
}

gpurun_watch() {
    trap - TERM HUP INT QUIT USR1 USR2
    exec </dev/null >/dev/null 7>&- 8>&- 9>&-
    while kill -0 "$$"; do
        gpurun_pause 3
    done
    kill -KILL -- "-$gpurun_group"
}

gpurun_signals() {
    gpurun_pause 0.2                            # a signal to all of a job's processes doesn't reach them at one moment
    while [[ -n $gpurun_got ]]; do
        gpurun_name=${gpurun_got%% *} gpurun_got=${gpurun_got#* }
        [[ $gpurun_name == TERM ]] && gpurun_termed=1
        [[ -n $gpurun_pid ]] && kill -0 "$gpurun_watcher" && kill -s "$gpurun_name" "$gpurun_pid"
    done
    kill -0 "$gpurun_watcher" || gpurun_watcher=
}

gpurun_size() {
    gpurun_bytes=$(command -p wc -c <"$1")
    [[ $gpurun_bytes =~ ^[\ ]*([0-9]+) ]] && gpurun_bytes=${BASH_REMATCH[1]} || gpurun_bytes=0
}

gpurun_write() {
    printf 'job %s\nrestarts %s\ncode %s\ntermed %s\nseconds %s\nstdout_bytes %s\nstderr_bytes %s\nnodes %s\nfault %s\nlimit %s\nend\n' "$SLURM_JOB_ID" \
        "$gpurun_n" "$gpurun_code" "$gpurun_termed" "$((SECONDS - gpurun_began))" "$gpurun_out" "$gpurun_err" "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}" \
        "$gpurun_fault" "$gpurun_limit"
}

gpurun_bash=$(type -P bash) || gpurun_bash=$BASH
if ! cd -- "$gpurun_workdir"; then
    gpurun_code=125 gpurun_fault=workdir
elif [[ $gpurun_got != *TERM* ]]; then
    set -m
    gpurun_run &
    gpurun_group=$!
    set +m
    while :; do
        if [[ -z $gpurun_watcher ]]; then
            set -m
            gpurun_watch &
            gpurun_watcher=$!
            set +m
        fi
        gpurun_part=
        IFS= read -rt 0.5 -u 9 gpurun_part
        gpurun_read=$? gpurun_line+=$gpurun_part     # a timeout may come in the middle of a line
        if ((gpurun_read == 0)); then
            case $gpurun_line in
                pid\ *) gpurun_pid=${gpurun_line#* } ;;
                code\ *) gpurun_code=${gpurun_line#* }; break ;;
            esac
            gpurun_line=
        elif ((gpurun_read == 1)); then
            command -p sleep 0.5
        fi
        if ! kill -0 "$gpurun_group" && ((gpurun_gone++ > 3)); then
            gpurun_code=137                         # somebody killed the command's shell
            break
        fi
        [[ -z $gpurun_got ]] || gpurun_signals
        gpurun_ran=$((SECONDS - gpurun_began))
        if ((gpurun_hard_s)) && [[ -z $gpurun_limit ]] && ((gpurun_ran >= gpurun_hard_s)); then
            gpurun_limit=$gpurun_why gpurun_kill_s=$((gpurun_ran + @GRACE_S@))
            kill -TERM -- "-$gpurun_group"
        elif [[ -n $gpurun_kill_s ]] && ((gpurun_ran >= gpurun_kill_s)); then
            kill -KILL -- "-$gpurun_group"
            gpurun_code=137
            break
        fi
    done
    kill -KILL "$gpurun_watcher"
    kill -TERM -- "-$gpurun_group"
    gpurun_pause 0.1                                # a TERM that ended the command may be on its way to this script
fi

[[ $gpurun_got != *TERM* ]] || gpurun_termed=1
gpurun_size "$gpurun_folder/run.out"; gpurun_out=$gpurun_bytes
gpurun_size "$gpurun_folder/run.err"; gpurun_err=$gpurun_bytes
if [[ -e $gpurun_record.next ]] && gpurun_write 1<>"$gpurun_record.next"; then
    command -p mv -f "$gpurun_record.next" "$gpurun_record"
fi
[[ -e $gpurun_record ]] || gpurun_write >"$gpurun_record"
exit "$gpurun_code"
"""


def script(folder: str, workdir: str, command: str, hard_s: float = 0.0, limit: str = "") -> str:
    """The batch script of a run: plain ASCII, its user's text in one line each, so that nothing in it is taken for `#SBATCH` or for a DOS line. It ends the
    command by itself at `hard_s` (0: never), for this reason, should nobody else have done so: an agent may be gone."""
    if "\0" in command:
        raise GpurunError("the command has a NUL character in it, which no shell can take: remove it from `run` in the job file")
    if len(command.encode("utf-8", "surrogateescape")) > COMMAND_BYTES:
        raise GpurunError("a command of bash -c has at most 128 KiB: put a long script into a file of the workspace")
    texts = {"@FOLDER@": folder, "@WORKDIR@": workdir, "@COMMAND@": command, "@LIMIT@": limit or "its hard limit was reached"}
    numbers = {"@HARD_S@": math.ceil(hard_s), "@GRACE_S@": SCRIPT_GRACE_S}
    return re.sub("@(?:FOLDER|WORKDIR|COMMAND|LIMIT|HARD_S|GRACE_S)@",
                  lambda match: quoted(texts[match.group()]) if match.group() in texts else str(numbers[match.group()]), SCRIPT)


def quoted(text: str) -> str:
    """As one word for bash, on one line, in ASCII."""
    said = []
    for byte in text.encode("utf-8", "surrogateescape"):
        said.append("\\" + chr(byte) if byte in b"\\'" else chr(byte) if 0x20 <= byte < 0x7f else "\\%03o" % byte)
    return "$'" + "".join(said) + "'"


# ---- what comes out ----------------------------------------------------------------------------------------------------------------

class Exit(NamedTuple):
    """What the job itself wrote when its command had ended."""

    job_id: str
    restarts: int
    code: int
    termed: bool
    seconds: int
    stdout_bytes: int
    stderr_bytes: int
    nodes: str
    fault: str
    limit: str = ""                     # that the script itself ended the command for


def parse_exit(data: bytes) -> Optional[Exit]:
    """A record; None when it isn't all there (yet)."""
    head, end, _ = data.partition(b"\nend\n")
    if not end:
        return None
    found = dict(line.partition(" ")[::2] for line in head.decode("utf-8", "replace").split("\n"))
    try:
        return Exit(found["job"], int(found["restarts"]), int(found["code"]), found["termed"] == "1", int(found["seconds"]),
                    int(found["stdout_bytes"]), int(found["stderr_bytes"]), found["nodes"], found["fault"], found.get("limit", ""))
    except (KeyError, ValueError):
        return None


def parse_sbatch(text: str) -> str:
    """The job's id, "" when there is none. What start files and a site's own sbatch print besides doesn't matter."""
    for line in reversed(text.split("\n")):
        match = re.match(r"(?:Submitted batch job )?([0-9]+)(?:;[^ ;]*)?(?: on cluster \S+)?$", line.strip())
        if match:
            return match.group(1)
    return ""


def parse_squeue(text: str) -> Dict[str, Word]:
    """Job id → its word."""
    found = {}
    for line in text.split("\n"):
        parts = line.split("|", 6)
        if len(parts) == 7 and parts[0].strip().isdigit():
            state, by_uid = normal(parts[1])
            reason = "" if parts[5] in ("None", "(null)") else parts[5]
            found[parts[0].strip()] = Word(state, reason, _nodes(parts[4]), duration(parts[2]), parts[3], by_uid=by_uid, name=parts[6])
    return found


def parse_sacct(text: str) -> Dict[str, Word]:
    """Job id → its word. Its exit code is only good for `judge`, which knows what sacct does to it."""
    found = {}
    for line in text.split("\n"):
        parts = line.split("|", 7)
        if len(parts) == 8 and parts[0].isdigit():
            state, by_uid = normal(parts[1])
            code, number = _pair(parts[2])
            found[parts[0]] = Word(state, "", _nodes(parts[6]), duration(parts[4]), parts[5], code, number, _pair(parts[3])[1], by_uid, name=parts[7])
    return found


def parse_scontrol(text: str) -> Word:
    """The first job in what `scontrol -o show job` says."""
    found = {}
    for name in ("JobState", "Reason", "ExitCode", "DerivedExitCode", "Restarts", "RunTime", "TimeLimit", "NodeList", "JobName"):
        match = re.search(r"(?:^|\s)%s=(\S*)" % name, text)
        found[name] = match.group(1) if match else ""
    state, by_uid = normal(found["JobState"])
    code, number = _pair(found["ExitCode"])
    return Word(state, "" if found["Reason"] == "None" else found["Reason"], _nodes(found["NodeList"]), duration(found["RunTime"]), found["TimeLimit"],
                code, number, _pair(found["DerivedExitCode"])[1], by_uid, int(found["Restarts"]) if found["Restarts"].isdigit() else 0, found["JobName"])


def parse_kill_wait(text: str) -> float:
    """How long Slurm waits between TERM and KILL, of `scontrol show config`; its default where that isn't told."""
    match = re.search(r"^KillWait\s*=\s*(\d+) sec", text, re.MULTILINE)
    return float(match.group(1)) if match else KILL_WAIT_S


def duration(text: str) -> Optional[int]:
    """Slurm's times: `0:12`, `1:02:03`, `1-02:03:04`."""
    match = re.match(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)$", text.strip())
    if not match:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _nodes(text: str) -> str:
    return "" if text in ("None assigned", "(null)", "N/A") else text


def _pair(text: str) -> Tuple[Optional[int], int]:
    match = re.match(r"(\d+):(\d+)$", text)
    return (int(match.group(1)), int(match.group(2))) if match else (None, 0)


UNKNOWN_ID, DISABLED, UNREACHABLE, REFUSED = "unknown id", "disabled", "unreachable", "refused"
# Only the text tells them apart: the exit code is 1 for all of them.
TELLS = (
    (UNKNOWN_ID, ("Invalid job id specified", "already completing or completed")),
    (DISABLED, ("accounting storage is disabled", "not running a supported accounting_storage plugin")),
    (UNREACHABLE, ("Unable to contact slurm controller", "connect failure", "Connection refused", "Connection reset", "timed out",
                   "Zero Bytes were transmitted", "Transport endpoint", "Communication connection failure", "Problem talking to the database",
                   "Unable to establish controller machine", "Unable to resolve", "Network is unreachable", "No route to host", "Header lengths",
                   "Unexpected message received", "Unexpected missing socket", "Insane message length", "Protocol authentication error", "munge", "Munge",
                   "temporarily un", "standby mode", "Slurm backup controller", "SlurmDBD", "Rate limit exceeded", "Unable to connect")),
)
# Of a submission that was not clearly refused: here it never came so far.
UNSENT = ("Unable to contact slurm controller (connect failure)", "Connection refused", "Unable to establish controller machine", "Unable to resolve",
          "temporarily unable to accept job", "standby mode", "Network is unreachable", "No route to host")


def error(text: str) -> str:
    """What kind of error a program of Slurm has written; REFUSED for what isn't one of the others."""
    for kind, tells in TELLS:
        if any(tell in text for tell in tells):
            return kind
    return REFUSED


def unsent(text: str) -> bool:
    """Whether a submission that failed like this certainly is none."""
    return any(tell in text for tell in UNSENT)


def said(text: str) -> str:
    """What is worth repeating of a program's words: without `sbatch: error:`, one line, printable, not long."""
    lines = []
    for line in text.split("\n"):
        line = re.sub(r"^(?:sbatch|squeue|sacct|scancel|scontrol): (?:error: |fatal: )?", "", line.strip())
        line = "".join(char if char.isprintable() else "?" for char in line)
        if line and line not in lines:
            lines.append(line)
    text = "; ".join(lines)
    return text if len(text) <= CODE_LINE else text[:CODE_LINE] + "…"


# ---- how it ended ------------------------------------------------------------------------------------------------------------------

class Facts(NamedTuple):
    """What is known of a job. A word is None when that program wasn't asked or didn't answer."""

    job_id: str
    folder: str = ""
    records: Tuple[Exit, ...] = ()
    begun: int = -1                     # the highest restart count whose script has begun
    record_s: float = 0.0               # since when the newest record has been seen
    squeue: Optional[Word] = None       # never older than the newest record
    sacct: Optional[Word] = None
    scontrol: Optional[Word] = None
    no_accounting: bool = False         # there is none on this cluster
    held_s: float = 0.0                 # how long these words have been the same
    stop: bool = False                  # we have cancelled it, because it was asked for or for the limit
    limit: str = ""


class Verdict(NamedTuple):
    """`record`: it ended so. `fault`: nobody knows how it ended, or no code of its own says it. Neither: go on waiting; `ask`: this program may know more."""

    record: Optional[Dict[str, Any]] = None
    fault: str = ""
    ask: str = ""


WAIT = Verdict()


def judge(facts: Facts) -> Verdict:
    """How the job ended, if it has."""
    own = max(facts.records, key=lambda one: one.restarts, default=None)
    if own is not None and own.restarts < max(facts.begun, facts.scontrol.restarts if facts.scontrol is not None else 0):
        own = None                      # it was requeued and has begun again since, whether that can be seen in its folder or not yet
    word = _word(facts)
    if own is not None:
        return _with_record(facts, own, word)
    if word is None:
        return WAIT
    if not word.state:
        return _forgotten(facts)
    if not word.kind:
        return _unknown_state(facts, word)
    if word.kind != ENDED:
        return _lost(facts, word)
    return _without_record(facts, word)


def _word(facts: Facts) -> Optional[Word]:
    """The word that counts: squeue's, then the accounting's; one without a state when those that there are don't know the job; None: nobody can tell."""
    for word in (facts.squeue, facts.sacct):
        if word is not None and word.state:
            return word
    if facts.squeue is not None and (facts.sacct is not None or facts.no_accounting):
        return Word()
    return None


def _with_record(facts: Facts, own: Exit, word: Optional[Word]) -> Verdict:
    state = word.state if word is not None else ""
    if facts.squeue is not None and facts.squeue.kind == WAITS:
        return WAIT                     # requeued: this was the end of one start of it. The accounting may say so of a job that it heard of late
    if word is None or word.kind in (WAITS, RUNS) or state and not word.kind:
        sure = not own.termed or facts.stop   # one that got a TERM may be about to be requeued, or has reached a limit
        if not sure or facts.record_s < RECORD_S:
            return WAIT
    if state in SHAKY and own.termed and facts.held_s < SHAKY_S:
        return WAIT
    if own.fault:
        return Verdict(fault=f"Slurm ran the job on {own.nodes or 'its nodes'}, where its workdir can't be entered: is node_dir on a file system that the "
                             "compute nodes share? Set node_dir in the cluster file to a folder on one")
    code, hints = own.code, []
    if word is not None and word.kind == ENDED:
        if (code or own.termed) and facts.scontrol is None and facts.squeue is not None and facts.squeue.state:
            return Verdict(ask="scontrol")
        if state == "OUT_OF_MEMORY" or code and any(one is not None and one.derived_signal == 125 for one in (facts.scontrol, facts.sacct)):
            hints.append(OUT_OF_MEMORY if code else SHORT_OF_MEMORY)
        if state == "PREEMPTED" and own.termed:
            hints.append("Slurm preempted it: another job got its nodes")
        if state == "CANCELLED" and own.termed and not facts.stop:
            if facts.sacct is None and not facts.no_accounting:
                return Verdict(ask="sacct")
            hints.append(_cancelled_by(facts))
        if not code and own.termed and not facts.stop and state in (*SHAKY, "CANCELLED", *LIMITS):
            code = 128 + SIGTERM        # it took the TERM for its end: nobody may take that for a success
    limit = facts.limit or own.limit or (_limit(word) if word is not None and state in LIMITS and own.termed else "")
    return _ended(code, own.seconds, stopped=facts.stop and own.termed, limit=limit, hint="; ".join(hints), own=own)


def _without_record(facts: Facts, word: Word) -> Verdict:
    """Slurm says that it is over."""
    ran = bool(word.seconds)
    if word.state in SHAKY:
        if facts.held_s < SHAKY_S:
            return WAIT
        if not facts.stop:
            return Verdict(fault=f"Slurm ended the job {facts.job_id}: {FAULTS[word.state]} ({word.state}{_at(word)}), and didn't put it back into its queue. "
                                 "Run it again")
    if facts.held_s < (RECORD_S if facts.stop else LAG_S) and (word.state != "CANCELLED" or ran):
        return WAIT
    if facts.stop:
        return _ended(_killed(facts), word.seconds, stopped=True, limit=facts.limit)
    if word.state == "CANCELLED":
        if facts.sacct is None and not facts.no_accounting:
            return Verdict(ask="sacct")
        return _ended(_killed(facts), word.seconds, hint=_cancelled_by(facts))
    if word.state in LIMITS:
        return _ended(_killed(facts), word.seconds, limit=_limit(word))
    if word.state == "OUT_OF_MEMORY":
        return _ended(128 + SIGKILL, word.seconds, hint=OUT_OF_MEMORY)
    if word.state == "REVOKED":
        return Verdict(fault=f"Slurm's federation runs the job {facts.job_id} on another cluster (REVOKED), where it can't be followed. Set SLURM_CLUSTERS "
                             "to one cluster in the login shell's start files")
    launched = word.reason != "JobLaunchFailure" or word.state != "FAILED" or bool(facts.records) or facts.begun >= 0
    if not launched and ran and facts.scontrol is None:
        return Verdict(ask="scontrol")         # its start and its end may fall into two seconds: 0:53 is what says that there was nothing between them
    if not launched and (not ran or facts.scontrol is not None and facts.scontrol.exit_signal == NO_LAUNCH):
        return Verdict(fault=f"Slurm could not start the job {facts.job_id}{_at(word)} (JobLaunchFailure): most often its log can't be made there. {SHARED} "
                             f"(it is {facts.folder})")
    if facts.held_s < MISSING_S:
        return WAIT
    if word.state == "COMPLETED":
        return Verdict(fault=f"Slurm says that the job {facts.job_id} ended well{_at(word)}, but it left no exit record in {facts.folder}. {SHARED}")
    return _failed(facts, word)


def _failed(facts: Facts, word: Word) -> Verdict:
    """FAILED, and no record: then the code is Slurm's, where it is unambiguous and can be the command's."""
    if facts.scontrol is None and facts.squeue is not None and facts.squeue.state:
        return Verdict(ask="scontrol")
    if facts.begun < (facts.scontrol.restarts if facts.scontrol is not None else 0):   # seen: "Job credential revoked" of one requeued in a hurry
        return Verdict(fault=f"the job {facts.job_id} failed{_at(word)} before its command began{f' ({word.reason})' if word.reason else ''}. {SHARED} (it is "
                             f"{facts.folder})")
    for one, exact in ((facts.scontrol, True), (facts.sacct, False)):
        if one is None and not exact and not facts.no_accounting:
            return Verdict(ask="sacct")
        if one is None or one.exit_code is None:
            continue
        if one.exit_signal and not one.exit_code and one.exit_signal < 32:
            return _ended(128 + one.exit_signal, word.seconds, hint="something ended its script on the compute node" + _at(word))
        if one.exit_code and not one.exit_signal and (exact or one.exit_code > 127):
            return _ended(one.exit_code, word.seconds, hint="the code is Slurm's: the job left no exit record")
        if not exact and not one.exit_signal:
            return Verdict(fault=f"the job {facts.job_id} failed{_at(word)} and left no exit record; by Slurm's accounting, which confuses the two, "
                                 f"its exit code was {one.exit_code} or {one.exit_code + 128}")
    return Verdict(fault=f"Slurm says that the job {facts.job_id} failed{_at(word)}{f' ({word.reason})' if word.reason else ''}, and it left no exit record in "
                         f"{facts.folder}: its exit code isn't known. {SHARED}")


def _forgotten(facts: Facts) -> Verdict:
    if facts.held_s < FORGOTTEN_S:
        return WAIT
    if facts.stop:
        return _ended(128 + SIGTERM, 0, stopped=True, limit=facts.limit)
    return Verdict(fault=f"Slurm knows no job {facts.job_id} any more and it left no exit record in {facts.folder}: how it ended isn't known; its logs "
                         "so far and its workdir are there")


def _lost(facts: Facts, word: Word) -> Verdict:
    """By somebody's word it still waits or runs. When that is only the accounting's, whom a controller that lost its memory never told, it isn't so."""
    if facts.squeue is not None and not facts.squeue.state and facts.held_s >= LOST_S:
        return Verdict(fault=f"Slurm's controller knows no job {facts.job_id} any more, while its accounting has it as {word.state}: how it ended isn't known; "
                             f"its logs so far and its workdir are in {facts.folder}")
    return WAIT


def _unknown_state(facts: Facts, word: Word) -> Verdict:
    """A Slurm that has a state more than we know: as long as it may change, it is waited for."""
    if facts.held_s < 24 * 3600:
        return WAIT
    return Verdict(fault=f"the job {facts.job_id} has been in the Slurm state {word.state[:40]!r} for a day, which gpurun doesn't know. Look at it with "
                         f"scontrol show job {facts.job_id}, and end it with scancel")


SHARED = "Is node_dir on a file system that the compute nodes share?"
OUT_OF_MEMORY = "Slurm ended it for lack of memory (OUT_OF_MEMORY): ask for more, with `extra = [\"--mem=…\"]` in the cluster file"
SHORT_OF_MEMORY = "Slurm killed a process of it for lack of memory (OUT_OF_MEMORY)"
FAULTS = {"NODE_FAIL": "one of its nodes failed", "PREEMPTED": "another job got its nodes", "BOOT_FAIL": "its nodes could not be started"}


def _at(word: Word) -> str:
    return f" on {word.nodes}" if word.nodes else ""


def _limit(word: Word) -> str:
    if word.state == "DEADLINE":
        return "Slurm's deadline for the job was reached"
    return f"Slurm's time limit of {word.time_limit} was reached" if word.time_limit else "Slurm's time limit was reached"


def _cancelled_by(facts: Facts) -> str:
    """`uid 0`: slurmjobs.py knows the name."""
    uid = next((one.by_uid for one in (facts.sacct, facts.squeue) if one is not None and one.by_uid), "")
    return f"cancelled in Slurm by uid {uid}" if uid else "cancelled in Slurm by somebody else"


def _killed(facts: Facts) -> int:
    """The code of a job that was ended and has no record. Its script takes every TERM and writes one: if it had begun, KILL ended it."""
    return 128 + (SIGKILL if facts.begun >= 0 else SIGTERM)


def _ended(code: int, seconds: Optional[int], stopped: bool = False, limit: str = "", hint: str = "", own: Optional[Exit] = None) -> Verdict:
    return Verdict({"code": code, "signal": code - 128 if 128 < code < 160 else 0, "stopped": stopped or bool(limit), "limit": limit, "hint": hint,
                    "seconds": seconds or 0, "stdout_bytes": own.stdout_bytes if own else 0, "stderr_bytes": own.stderr_bytes if own else 0})
