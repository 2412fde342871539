"""The runs of this node that Slurm has: submit them, find them again, follow them to their end.

`Slurm` is one for each agent. One thread of it asks for all jobs that are followed, with one squeue, and with one sacct for those that squeue
has no word of: sites forbid more. It asks often while something happens and ever less often while nothing does; a job that has ended says so by
its exit record, which costs Slurm nothing to look at. `SlurmJob` is one run's job. What the answers mean is for slurm.py to say.

Files in the run's folder, beside those of the batch script (slurm.py):
    run.sh                          the script
    run.sbatch, run.sbatch.err      what sbatch answered: an agent that was killed meanwhile leaves the answer to the next one
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from gpurun import slurm, supervise
from gpurun.errors import GpurunError
from gpurun.files import TEMP_PREFIX, atomic_write
from gpurun.slurm import Exit, Facts, Word

SUBMIT_S, POLL_S = 30.0, 15.0 # bounds of sbatch and of a question, when the plan has none
PENDING_S = 7 * 24 * 3600.0
FIRST_S, MOST_S = 2.0, 60.0   # between two questions
GROWTH = 1.5
LEAST_S = 0.5                 # between two questions, however much is poked
NO_ACCOUNTING_S = 600.0       # a cluster without accounting is asked for it as seldom as this
LOOK_S, LATER_LOOK_S = 0.3, 1.0   # how often the run's folder is looked at, in the first minute and later
NUDGE_S = 2.0                 # a network file system that may be behind is woken as often as this
LOGS_S = 30.0                 # for the logs to have all that the exit record counts
SUBMIT_PATIENCE_S = 120.0     # a controller that is being restarted costs no run
SETTLE_S = 12.0               # a submission that may be under way has come through by then (Slurm's MessageTimeout is 10 s)
FIND_PATIENCE_S = 600.0
OLD_S = 60.0                  # a submission older than this may have ended and be forgotten by squeue
CANCEL_AGAIN_S, KILL_AGAIN_S = 30.0, 5.0
BACKSTOP_S = 5.0              # an agent that is there ends a job at its hard limit before the job's own script does
PROGRAM_SAID = 64 << 10       # of a program's errors


class DeletedError(GpurunError):
    """The run's folder is gone: nothing can be known of its job any more, and nothing is left to be had from it."""


class Done(NamedTuple):
    """What a program did; `code` None: it was ended at its bound."""

    code: Optional[int]
    out: str
    err: str


class _Watched:
    """What is known of a job that is followed. Words are replaced as a whole, so they can be read without a lock."""

    def __init__(self, job_id: str, poll_s: float) -> None:
        self.job_id, self.poll_s = job_id, poll_s
        self.squeue: Optional[Word] = None
        self.sacct: Optional[Word] = None
        self.asked = 0.0          # when the question began whose answers these are; 0: never
        self.error = ""           # why there is no answer


class Slurm:
    """Slurm, as a login shell of this node has it."""

    def __init__(self, environment: Callable[[], Dict[str, str]]) -> None:
        self._login = environment
        self._changed = threading.Condition()
        self._watched: Dict[str, List[_Watched]] = {}
        self._due = 0.0
        self._interval = FIRST_S
        self._last = -LEAST_S
        self._no_accounting_until = 0.0
        self._thread: Optional[threading.Thread] = None

    def job(self, folder: str, workdir: str, name: str, plan: Dict[str, Any]) -> "SlurmJob":
        """A run's job, whether it has been submitted or not. `name`: the run's id; `plan`: the backend of RunJob."""
        return SlurmJob(self, folder, workdir, name, plan)

    def environment(self) -> Dict[str, str]:
        return slurm.environment(self._login())

    @property
    def no_accounting(self) -> bool:
        """Whether this cluster keeps no accounts, as far as is known."""
        return time.monotonic() < self._no_accounting_until

    def poke(self) -> None:
        """Something may have happened: ask soon."""
        with self._changed:
            self._interval = FIRST_S
            self._due = min(self._due, time.monotonic())
            self._changed.notify_all()

    # ---- programs --------------------------------------------------------------------------------------------------------------

    def program(self, name: str) -> str:
        """Where a program of Slurm is. GpurunError when a login shell doesn't know it."""
        path = self._login().get("PATH", os.defpath)
        found = shutil.which(name, path=path)
        if found is None:
            raise GpurunError(f"there is no {name} on this node: it was looked for in {path}, the PATH of a login shell. Name a login node of Slurm in the "
                              "cluster file, or have the shell's start files (~/.bash_profile) add Slurm's folder to PATH (or load its module)")
        return found

    def ask(self, argv: List[str], bound_s: float) -> Done:
        """Runs a program of Slurm that only asks or cancels."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = run([self.program(argv[0]), *argv[1:]], slurm.asking(self.environment()), "/", out.fileno(), err.fileno(), bound_s)
            out.seek(0)
            err.seek(0)
            text = err.read(PROGRAM_SAID).decode("utf-8", "replace")
            if code is None:
                text += f"\n{argv[0]} gave no answer in {bound_s:g} s (timed out)"
            return Done(code, out.read().decode("utf-8", "replace"), text)

    # ---- one question for all ----------------------------------------------------------------------------------------------------

    def watch(self, job_id: str, poll_s: float) -> _Watched:
        """From now on the job is asked for; `unwatch` ends that."""
        watched = _Watched(job_id, poll_s)
        with self._changed:
            self._watched.setdefault(job_id, []).append(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="slurm", daemon=True)
                self._thread.start()
        self.poke()
        return watched

    def unwatch(self, watched: _Watched) -> None:
        with self._changed:
            rest = [one for one in self._watched.get(watched.job_id, []) if one is not watched]
            if rest:
                self._watched[watched.job_id] = rest
            else:
                self._watched.pop(watched.job_id, None)

    def _poll(self) -> None:
        while True:
            with self._changed:
                while True:
                    now = time.monotonic()
                    ready = max(self._due, self._last + LEAST_S)
                    if self._watched and now >= ready:
                        break
                    self._changed.wait(ready - now if self._watched else None)
                watched = [one for some in self._watched.values() for one in some]
                self._last = now
                self._due = now + self._interval   # said before it is asked: a poke meanwhile holds
            try:
                changed = self._round(watched)
            except Exception as error:             # no PATH, no room for a temporary file: the jobs go on, and so does this
                changed = False
                for one in watched:
                    one.squeue = one.sacct = None
                    one.error = str(error) or type(error).__name__
            with self._changed:
                self._interval = FIRST_S if changed else min(self._interval * GROWTH, MOST_S)
                self._due = min(self._due, time.monotonic() + self._interval) if changed else max(self._due, self._last + LEAST_S)

    def _round(self, watched: List[_Watched]) -> bool:
        """Asks for all of them; whether anything is another than before."""
        began = time.monotonic()
        ids = sorted({one.job_id for one in watched})
        bound_s = max(one.poll_s for one in watched)
        queue, error = self._squeue(ids, bound_s)
        silent = [job_id for job_id in ids if job_id not in queue or not queue[job_id].state]
        accounts, trouble = self._sacct(silent, bound_s) if silent and not self.no_accounting else ({}, "")
        changed = False
        for one in watched:
            before = (one.squeue and one.squeue[:3], one.sacct and one.sacct[:3], one.error)
            one.squeue, one.sacct, one.error = queue.get(one.job_id), accounts.get(one.job_id), error or trouble
            one.asked = began
            changed = changed or before[:2] != (one.squeue and one.squeue[:3], one.sacct and one.sacct[:3])
        return changed

    def _squeue(self, ids: List[str], bound_s: float) -> Tuple[Dict[str, Word], str]:
        """Words of those that it answered for, and why it didn't answer."""
        done = self.ask(slurm.squeue(ids), bound_s)
        if done.code == 0:
            found = slurm.parse_squeue(done.out)
            return {job_id: found.get(job_id, Word()) for job_id in ids}, ""
        if slurm.error(done.err) == slurm.UNKNOWN_ID:
            if len(ids) == 1:
                return {ids[0]: Word()}, ""
            both = [self._squeue([job_id], bound_s) for job_id in ids]   # no Slurm that we know does that to several
            return {job_id: word for words, _ in both for job_id, word in words.items()}, next((error for _, error in both if error), "")
        return {}, slurm.said(done.err) or f"squeue ended with {done.code}"

    def _sacct(self, ids: List[str], bound_s: float) -> Tuple[Dict[str, Word], str]:
        try:
            done = self.ask(slurm.sacct(ids), bound_s)
        except GpurunError:           # no sacct here: as good as no accounting
            self._no_accounting_until = time.monotonic() + NO_ACCOUNTING_S
            return {}, ""
        if done.code == 0:
            found = slurm.parse_sacct(done.out)
            return {job_id: found.get(job_id, Word()) for job_id in ids}, ""
        if slurm.error(done.err) == slurm.DISABLED:
            self._no_accounting_until = time.monotonic() + NO_ACCOUNTING_S
            return {}, ""
        return {}, slurm.said(done.err) or f"sacct ended with {done.code}"


def run(argv: List[str], environ: Dict[str, str], folder: str, out: int, err: int, bound_s: float) -> Optional[int]:
    """A program in its own session, without input; its exit code, None when it was killed, with all that it had started there, at its bound."""
    process = subprocess.Popen(argv, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
    try:
        return process.wait(timeout=bound_s)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        process.wait()
        return None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


class SlurmJob:
    """One run's job."""

    def __init__(self, cluster: Slurm, folder: str, workdir: str, name: str, plan: Dict[str, Any]) -> None:
        self._slurm, self.folder, self.workdir, self.name = cluster, folder, workdir, name
        self._options = [str(option) for option in plan.get("options", [])]
        self._submit_s, self._poll_s = float(plan.get("submit_s") or SUBMIT_S), float(plan.get("poll_s") or POLL_S)
        self._pending_s = float(plan.get("pending_s") or PENDING_S)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    # ---- submit and find -----------------------------------------------------------------------------------------------------------

    def submit(self, command: str, env: Dict[str, str], stopped: Callable[[], bool] = lambda: False, hard_s: float = 0.0, limit: str = "") -> str:
        """Gives the job to Slurm; its id, "" when it was `stopped` while Slurm didn't have it yet. `env` is the job's whole environment or what comes
        to a login shell's, and goes to sbatch as its environment and in no other way. GpurunError when Slurm refuses it, or doesn't answer
        for a good while. To call it for a run that has a job already does no harm: the second one ends without doing anything. `hard_s`: the batch
        script ends the command that long after its start and a little, for the reason `limit`, if no agent has."""
        program = self._slurm.program("sbatch")
        login = self._slurm._login()
        environ = self._slurm.environment()
        environ.update({name: value for name, value in env.items() if name in environ or login.get(name) != value})
        environ = slurm.without_traps(environ)
        atomic_write(self._path("run.sh"), slurm.script(self.folder, self.workdir, command, hard_s and hard_s + BACKSTOP_S, limit).encode("ascii"))
        for name in ("run.out", "run.err"):        # made here: Slurm would make them readable for others
            os.close(os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        argv = [program] + slurm.arguments(self._options, self.name, self.workdir, self._path("run.out"), self._path("run.err"))[1:] + [self._path("run.sh")]
        deadline, pause = time.monotonic() + SUBMIT_PATIENCE_S, 2.0
        while True:
            done = self._sbatch(argv, environ)
            job_id = slurm.parse_sbatch(done.out)
            if job_id:
                return job_id
            kind = slurm.error(done.err)
            if done.code is not None and done.code > 0 and kind != slurm.UNREACHABLE and (done.err + done.out).strip():
                raise GpurunError(f"Slurm refused the job: {slurm.said(done.err) or slurm.said(done.out)}. What it was asked for stands in the "
                                  f"cluster file: {' '.join(self._options) or 'no options'}")
            if not (done.code and slurm.unsent(done.err)):
                job_id = self.find() or ""
                if job_id:
                    return job_id
            if time.monotonic() > deadline:
                raise GpurunError(f"the job could not be submitted: {self._no_answer(done)}. Nothing of it is in Slurm; run again when Slurm answers "
                                  "(scontrol ping shows it)")
            again = min(time.monotonic() + pause, deadline)
            while time.monotonic() < again:
                if stopped():
                    return ""
                time.sleep(0.1)
            pause = min(pause * 2, 30.0)

    def _no_answer(self, done: Done) -> str:
        if done.code is None:
            return f"sbatch gave no answer in {self._submit_s:g} s"
        return slurm.said(done.err) or slurm.said(done.out) or "sbatch said nothing"

    def _sbatch(self, argv: List[str], environ: Dict[str, str]) -> Done:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        err = os.open(self._path("run.sbatch.err"), flags, 0o600)
        try:
            out = os.open(self._path("run.sbatch"), flags, 0o600)
            try:
                code = run(argv, environ, self.workdir, out, err, self._submit_s)
            finally:
                os.close(out)
        except OSError as error:
            advice = ": the values in its env are too long together" if error.errno == errno.E2BIG else ""
            raise GpurunError(f"sbatch could not be started: {error.strerror or error}{advice}") from None
        finally:
            os.close(err)
        return Done(code, self._read("run.sbatch"), self._read("run.sbatch.err"))

    def _read(self, name: str) -> str:
        try:
            with open(self._path(name), "rb") as stream:
                return stream.read(PROGRAM_SAID).decode("utf-8", "replace")
        except OSError:
            return ""

    def _holder(self) -> str:
        """The job that has claimed this run's folder."""
        text = self._read("run.job").strip()
        return text if text.isdigit() else ""

    def find(self) -> Optional[str]:
        """The id of this run's job, if one was submitted, by whatever agent; None when certainly none was. GpurunError when nobody can tell."""
        if not os.path.exists(self._path("run.sbatch")):
            return self._holder() or None
        self._await_sbatch()
        found = self._holder() or slurm.parse_sbatch(self._read("run.sbatch"))
        if found:
            return found
        refused = self._read("run.sbatch.err")
        if "error:" in refused and (slurm.error(refused) == slurm.REFUSED or slurm.unsent(refused)):
            return None
        return self._find_by_name()

    def _await_sbatch(self) -> None:
        """An sbatch of an agent that was killed works on: its answer is waited for, as long as it would have been."""
        deadline = time.monotonic() + self._submit_s
        while True:
            pids = self._living_sbatch()
            if not pids:
                return
            if time.monotonic() > deadline:
                for pid in pids:
                    _kill_group(pid)
            time.sleep(0.1)

    def _living_sbatch(self) -> Set[int]:
        found = set()
        for pid in supervise.of_run(self.name):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as stream:
                    if b"--job-name=" + os.fsencode(self.name) in stream.read().split(b"\0"):
                        found.add(pid)
            except OSError:
                continue
        return found

    def _find_by_name(self) -> Optional[str]:
        """Asks for the run's id, which is the job's name, until it has come through if it ever was sent."""
        began = time.monotonic()
        submitted = os.stat(self._path("run.sbatch")).st_mtime
        since = time.strftime("%Y-%m-%d", time.localtime(submitted - 24 * 3600))
        old = time.time() - submitted > OLD_S
        settled: Optional[float] = None
        trouble = ""
        while time.monotonic() - began < FIND_PATIENCE_S:
            done = self._slurm.ask(slurm.squeue_by_name(self.name), self._poll_s)
            words = slurm.parse_squeue(done.out)
            if done.code:
                settled, trouble = None, slurm.said(done.err)
            elif done.code is None:
                settled, trouble = None, f"squeue gave no answer in {self._poll_s:g} s"
            elif settled is None:
                settled = time.monotonic()
            if not any(word.name == self.name for word in words.values()) and done.code == 0 and (old or not words):
                words = self._accounts_by_name(since)
            mine = sorted((job_id for job_id, word in words.items() if word.name == self.name), key=int)
            if mine or self._holder():
                return self._only(mine)
            if settled is not None and time.monotonic() - settled >= SETTLE_S:
                return None
            time.sleep(FIRST_S)
        raise GpurunError(f"nobody can tell whether Slurm has the job of {self.name}: {trouble or 'no answer'}. If squeue --name={self.name} shows it, it goes "
                          f"on there, and its logs and workdir are in {self.folder}; end it with scancel")

    def _accounts_by_name(self, since: str) -> Dict[str, Word]:
        if self._slurm.no_accounting:
            return {}
        try:
            done = self._slurm.ask(slurm.sacct_by_name(self.name, since), self._poll_s)
        except GpurunError:
            return {}
        return slurm.parse_sacct(done.out) if done.code == 0 else {}

    def _only(self, job_ids: List[str]) -> str:
        """The job of this run; others of the same name, of which only one can have run the command, are taken out of the queue."""
        chosen = self._holder() or job_ids[0]
        for job_id in job_ids:
            if job_id != chosen:
                self._slurm.ask(slurm.scancel(job_id), self._poll_s)
        return chosen

    # ---- follow --------------------------------------------------------------------------------------------------------------------

    def follow(self, job_id: str, control: Any) -> Dict[str, Any]:
        """Waits for the job's end; its exit record. GpurunError when it ended and nobody knows how.

        `control.stop()`: None, or the grace in seconds once the job is to be ended. `control.limit(running_s)`: why it must end now, or "".
        `control.tell(news)`: something is another than before. `control.wait(timeout_s)`: returns early when something was said."""
        return _Following(self._slurm, self, job_id, control).result()

    def began(self) -> Tuple[Tuple[Exit, ...], int]:
        """The exit records that are whole, and the highest restart count whose script has begun (-1: none)."""
        records, begun = [], -1
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            if error.errno == errno.ENOENT and os.path.isdir(os.path.dirname(self.folder)):
                raise DeletedError(f"the run's folder {self.folder} was deleted on the node while its job was in Slurm: it was cancelled there") from None
            return (), -1                          # a file system that is away for a while
        for name in names:
            match = re.match(r"run\.code\.(\d+)(\.next)?$", name)
            if match:
                begun = max(begun, int(match.group(1)))
                if not match.group(2):
                    try:
                        with open(self._path(name), "rb") as stream:
                            found = slurm.parse_exit(stream.read(PROGRAM_SAID))
                    except OSError:
                        continue
                    if found is not None:
                        records.append(found)
        return tuple(sorted(records, key=lambda one: one.restarts)), begun

    def nudge(self) -> None:
        """Makes a network file system look anew at what is in the folder: a client that changes it drops what it had remembered."""
        path = self._path(TEMP_PREFIX + "look")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.unlink(path)
        except OSError:
            pass

    def await_logs(self, record: Dict[str, Any]) -> None:
        """Until the logs have all that the job had written: on a network file system they may come later than the exit record."""
        deadline = time.monotonic() + LOGS_S
        for name, size in (("run.out", record["stdout_bytes"]), ("run.err", record["stderr_bytes"])):
            while time.monotonic() < deadline:
                try:
                    fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)   # opened: that is when NFS asks how long it is
                    try:
                        if os.fstat(fd).st_size >= size:
                            break
                    finally:
                        os.close(fd)
                except OSError:
                    break
                self.nudge()
                time.sleep(0.2)


class _Following:
    """A job on its way to its end: what was seen when."""

    def __init__(self, cluster: Slurm, job: SlurmJob, job_id: str, control: Any) -> None:
        self._slurm, self._job, self._id, self._control = cluster, job, job_id, control
        self._watched = cluster.watch(job_id, job._poll_s)
        self._squeue: Optional[Word] = None
        self._sacct: Optional[Word] = None
        self._asked = 0.0
        now = time.monotonic()
        self._started = now
        self._records: Tuple[Exit, ...] = ()
        self._begun = -1
        self._record_at = self._begun_at = now
        self._pokes: List[float] = []
        self._nudged = now
        self._held: Tuple[Any, float] = (None, now)
        self._extra: Dict[str, Optional[Word]] = {}
        self._told: Dict[str, Any] = {}
        self._trouble = ""            # what went wrong with a scancel
        self._stop = False
        self._limit = ""
        self._grace_s = supervise.GRACE_S
        self._cancel_at = now         # when the next scancel is due, once it is to be stopped
        self._cancelled: Optional[float] = None
        self._stop_poked = self._kill_at = 0.0
        self._limit_asked = 0.0
        self._ran = (-1, 0.0)         # of which start of it, and how long
        self._waits_since: Optional[float] = None

    def result(self) -> Dict[str, Any]:
        try:
            while True:
                try:
                    self._look()
                except DeletedError:
                    self._scancel(slurm.scancel(self._id))
                    raise
                verdict = slurm.judge(self._facts())
                if verdict.ask and verdict.ask not in self._extra:
                    self._ask(verdict.ask)
                    continue
                if verdict.fault or verdict.record is not None:
                    self._tell()               # the last word: what ended it, for whoever asks later
                if verdict.fault:
                    raise GpurunError(verdict.fault)
                if verdict.record is not None:
                    self._job.await_logs(verdict.record)
                    verdict.record["hint"] = _named(verdict.record["hint"])
                    return verdict.record
                self._tell()
                self._keep_limits()
                self._keep_stopping()
                self._control.wait(LOOK_S if time.monotonic() - self._started < 60.0 else LATER_LOOK_S)
        finally:
            self._slurm.unwatch(self._watched)

    def _look(self) -> None:
        """Slurm's word first, then the folder: what Slurm says of the end of a start of the job is then never older than the record of that."""
        now = time.monotonic()
        self._asked = self._watched.asked
        self._squeue, self._sacct = self._watched.squeue, self._watched.sacct
        holder = self._job._holder()
        if holder and holder != self._id:          # sbatch was asked twice, and the other one was first
            self._slurm.ask(slurm.scancel(self._id), self._job._poll_s)
            self._slurm.unwatch(self._watched)
            self._id = holder
            self._watched = self._slurm.watch(holder, self._job._poll_s)
        records, begun = self._job.began()
        if begun > self._begun:
            self._begun, self._begun_at = begun, now
            self._slurm.poke()
        if [one.restarts for one in records] != [one.restarts for one in self._records]:
            self._record_at = now
            self._pokes = [now, now + 0.7, now + 1.5, now + slurm.RECORD_S]
        self._records = records
        if self._pokes and now >= self._pokes[0]:
            del self._pokes[0]
            self._slurm.poke()
        word = self._word()
        if word.kind == slurm.ENDED and not records and now - self._nudged > NUDGE_S:
            self._nudged = now
            self._job.nudge()
        if word.kind == slurm.WAITS:
            if self._waits_since is None:
                self._waits_since = now if self._begun >= 0 else min(now, now - (time.time() - self._submitted()))
        elif word.kind:
            self._waits_since = None

    def _submitted(self) -> float:
        try:
            return os.stat(self._job._path("run.sbatch")).st_mtime
        except OSError:
            return time.time()

    def _word(self) -> Word:
        for word in (self._squeue, self._sacct):
            if word is not None and word.state:
                return word
        return Word()

    def _facts(self) -> Facts:
        now = time.monotonic()
        fresh = self._asked > self._record_at or not self._records
        squeue, sacct = (self._squeue, self._sacct) if fresh else (None, None)
        words = (squeue and squeue.state, sacct and sacct.state, len(self._records), self._begun)
        if words != self._held[0]:
            self._held = (words, now)
            self._extra = {}
        return Facts(self._id, self._job.folder, self._records, self._begun, now - self._record_at, squeue,
                     sacct if sacct is not None else self._extra.get("sacct"), self._extra.get("scontrol"), self._slurm.no_accounting, now - self._held[1],
                     self._stop, self._limit)

    def _ask(self, program: str) -> None:
        """One more witness; what doesn't answer is taken for one that knows nothing. The accounting may hear of an end a moment after the controller."""
        argv = slurm.scontrol(self._id) if program == "scontrol" else slurm.sacct([self._id])
        self._extra[program], deadline = Word(), time.monotonic() + slurm.RECORD_S
        while True:
            try:
                done = self._slurm.ask(argv, self._job._poll_s)
            except GpurunError:
                return
            if done.code != 0:
                return
            word = slurm.parse_scontrol(done.out) if program == "scontrol" else slurm.parse_sacct(done.out).get(self._id, Word())
            self._extra[program] = word
            if program == "scontrol" or word.kind == slurm.ENDED or time.monotonic() > deadline:
                return
            time.sleep(0.3)

    def _tell(self) -> None:
        watched, word = self._watched, self._word()
        news = {"kind": "slurm", "job_id": self._id, "state": word.state or self._told.get("state", ""), "reason": word.reason, "nodes": word.nodes}
        trouble = self._trouble or (watched.error if self._squeue is None and watched.error else "")
        if trouble:
            news["reason"] = f"Slurm doesn't answer: {trouble}" if not self._trouble else trouble
            news["nodes"] = news["nodes"] or self._told.get("nodes", "")
        if news != self._told:
            self._told = news
            self._control.tell(dict(news, seconds=int(word.seconds or 0)))

    def _running_s(self) -> Optional[float]:
        word, now = self._squeue, time.monotonic()
        if self._records and self._records[-1].restarts >= self._begun:
            return None
        if word is not None and word.kind == slurm.RUNS and word.seconds is not None:
            return word.seconds + (now - self._asked if word.state == "RUNNING" else 0.0)
        return now - self._begun_at if self._begun >= 0 and (word is None or word.kind == slurm.RUNS) else None

    def _keep_limits(self) -> None:
        now = time.monotonic()
        if self._stop or now - self._limit_asked < 1.0:
            return
        self._limit_asked = now
        running_s = self._running_s()
        if running_s is not None:
            start = max(self._begun, 0)
            running_s = max(running_s, self._ran[1]) if self._ran[0] == start else running_s   # Slurm counts whole seconds, and takes its time to say them
            self._ran = (start, running_s)
            self._limit = self._control.limit(running_s) or ""
        elif self._waits_since is not None and now - self._waits_since > self._job._pending_s:
            reason = self._word().reason
            self._limit = f"it waited {_long(self._job._pending_s)} in Slurm's queue" + (f" ({reason})" if reason else "")
        if self._limit:
            self._stop, self._cancel_at = True, now

    def _keep_stopping(self) -> None:
        grace, now = self._control.stop(), time.monotonic()
        if grace is not None:
            self._grace_s = float(grace)
            if not self._stop:
                self._stop, self._cancel_at = True, now
        if not self._stop:
            return
        if now - self._stop_poked > FIRST_S:
            self._stop_poked = now
            self._slurm.poke()
        if self._cancelled is None:
            if now >= self._cancel_at:
                done = self._begin_stop()
                self._cancelled = time.monotonic() if done else None
                self._cancel_at = time.monotonic() + (CANCEL_AGAIN_S if done else 3.0)
        elif now - self._cancelled >= self._grace_s and now >= self._kill_at:
            self._kill_at = now + KILL_AGAIN_S
            self._kill()
        elif now >= self._cancel_at and self._word().kind == slurm.WAITS:   # requeued in just that moment
            self._cancel_at = now + CANCEL_AGAIN_S
            self._scancel(slurm.scancel(self._id))

    def _begin_stop(self) -> bool:
        """A plain scancel is what everybody expects to see, but after it KILL comes when the site's KillWait is over, and not sooner by any means:
        a longer grace is given by ourselves, and no grace at all is no scancel's at first."""
        if self._begun >= 0 and (self._word().kind != slurm.WAITS or self._asked < self._begun_at):
            if self._grace_s <= 0:
                return self._kill()
            if self._grace_s > self._kill_wait() and self._scancel(slurm.scancel_term(self._id), told=False):
                return True
        return self._scancel(slurm.scancel(self._id))

    def _kill(self) -> bool:
        """Alone where it does: a scancel right behind it would leave nobody who knows what ended the job."""
        return self._scancel(slurm.scancel_kill(self._id), told=False) or self._scancel(slurm.scancel(self._id))

    def _kill_wait(self) -> float:
        try:
            done = self._slurm.ask(["scontrol", "show", "config"], self._job._poll_s)
        except GpurunError:
            return slurm.KILL_WAIT_S
        return slurm.parse_kill_wait(done.out)

    def _scancel(self, argv: List[str], told: bool = True) -> bool:
        try:
            done = self._slurm.ask(argv, self._job._poll_s)
        except GpurunError as error:
            self._trouble = str(error)
            return False
        if told:
            self._trouble = "" if done.code == 0 else f"scancel could not end it: {slurm.said(done.err) or f'exit code {done.code}'}"
        return done.code == 0


def _named(hint: str) -> str:
    """With the name of a uid, where this machine knows it."""
    def name(match: Any) -> str:
        try:
            return f"{match.group()} ({pwd.getpwuid(int(match.group(1))).pw_name})"
        except (KeyError, OverflowError):
            return str(match.group())
    return re.sub(r"\buid (\d+)", name, hint)


def _long(seconds: float) -> str:
    for unit, one in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= one:
            count = round(seconds / one, 1)
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:g} s"
