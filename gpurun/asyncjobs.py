"""The folder of async-job manifests: `<.planning or runs>/async-jobs/<job_id>.json`, one for each job, so that no plan's job runs twice.

Everything here fails closed: a file that can't be read may be the manifest of a job that runs, so nothing is submitted beside it. Before
a job is submitted its plan is reserved. A reservation is the check for duplicates and a trace on the disk, `.submit-<hash of the plan>`,
held (flock) as long as its process lives; it goes when the manifest is there. One that its process has left behind says that a submit was
cut short: what became of its job has to be settled before the plan can have another.

    async-jobs/<job_id>.json         the manifests, and nothing else that ends so
    async-jobs/.submit-<hash>        traces
    async-jobs/superseded/           manifests of jobs that are over and whose plan got another job: a reader would stop at two

All changes are made under a lock of the folder, which holds between processes, and each file is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import time
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from gpurun import external, supervise
from gpurun.errors import RecordError
from gpurun.external import FAILURES, MANIFEST_VERSION, Manifest, Own, Plan, printable
from gpurun.files import FULL, TEMP_PREFIX, atomic_write, fsync_dir, make_private_dir, room, write_all
from gpurun.records import ASYNC_JOBS, utc_now

PLANNING, FOLDER, SUPERSEDED, TRACE = ".planning", ASYNC_JOBS, "superseded", ".submit-"
ARTIFACT_DIR = "GSD_EXTERNAL_JOB_ARTIFACT_DIR"
LEVELS = 10                   # folders that are looked into for a .planning, the first one included
MAX_BYTES = 1 << 20           # a manifest has some hundred bytes; what is longer is something else
ROOM_BYTES = 1 << 16          # for what is added to it later
LOCK_S = 20.0                 # who has the lock reads and writes a few small files
LOCK_FILE = ".gpurun-lock"    # only where a folder itself can't be locked (NFS)
NO_LOCKS = (errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)   # flock's errors on a file system that has none
MAX_MS = 86_400_000.0         # a time-out of more than a day is none


class Project(NamedTuple):
    """Where the manifests are. `root`: the project's folder, the one that has .planning; "" outside of a GSD project, as `planning` is."""

    root: str
    planning: str
    jobs: str


class Settings(NamedTuple):
    """`external_job` of .planning/config.json."""

    enabled: bool = False
    backend: str = "slurm"
    artifact_dir: str = "Artifacts/jobs"
    submit_timeout_ms: float = 30000.0
    poll_timeout_ms: float = 15000.0


class Found(NamedTuple):
    """A manifest and its file."""

    path: str
    manifest: Manifest


class Trace(NamedTuple):
    """What a reservation says of the submit that made it."""

    plan: Plan
    own: Own
    submitted_at: str
    pid: int
    start: str
    host: str


def find_project(start: str, runs_dir: str) -> Project:
    """The GSD project that `start` is in; outside of one the manifests are with the runs."""
    folder = os.path.abspath(start)
    for _ in range(LEVELS):
        if os.path.isdir(os.path.join(folder, PLANNING)):
            planning = os.path.join(folder, PLANNING)
            return Project(folder, planning, os.path.join(planning, FOLDER))
        folder = os.path.dirname(folder)
    return Project("", "", os.path.join(os.path.abspath(runs_dir), FOLDER))


def settings(project: Project, environ: Mapping[str, str], default: Settings = Settings()) -> Settings:
    """The environment, then .planning/config.json, then the default; a value of a wrong kind counts as if it weren't there."""
    nested: Any = {}
    config = os.path.join(project.planning, "config.json")
    if project.planning and os.path.isfile(config):   # a FIFO of that name would be waited for
        try:
            with open(config, "rb") as file:
                nested = json.loads(file.read(MAX_BYTES + 1).decode())
        except (OSError, ValueError, RecursionError):
            pass
    nested = nested.get("external_job") if isinstance(nested, dict) else {}
    nested = nested if isinstance(nested, dict) else {}
    found = {}
    for name, variable, convert in (("enabled", "", _flag), ("backend", "", _word), ("artifact_dir", ARTIFACT_DIR, _word),
                                    ("submit_timeout_ms", "GSD_SLURM_SUBMIT_TIMEOUT_MS", _milliseconds),
                                    ("poll_timeout_ms", "GSD_SLURM_POLL_TIMEOUT_MS", _milliseconds)):
        said = environ.get(variable) if variable else None
        if said is not None and convert is _milliseconds:
            said = float(said) if re.fullmatch(r"\d{1,12}(\.\d{1,12})?", said.strip(), re.ASCII) else None
        for value in (convert(said), convert(nested.get(name))):
            if value is not None:
                found[name] = value
                break
    return default._replace(**found)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() and "\0" not in value else None


def _milliseconds(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_MS else None


# ---- reading ---------------------------------------------------------------------------------------------------------------------------

def read_all(project: Project) -> list[Found]:
    """Every manifest, by its file's name. RecordError that names each file that can't be trusted: one of them may hide a duplicate."""
    found, wrong = [], []
    for name in _names(project.jobs):
        path = os.path.join(project.jobs, name)
        try:
            found.append(Found(path, external.decode(_content(path), path, name[:-len(".json")])))
        except RecordError as error:
            wrong.append(str(error))
    if wrong:
        raise RecordError("\n".join(wrong))
    return found


def conflict(found: list[Found], plan_id: str) -> str:
    """Words for a plan that has two manifests; "" for one that hasn't."""
    paths = [one.path for one in found if one.manifest.plan_id == plan_id]
    if len(paths) < 2:
        return ""
    return (f"plan {printable(plan_id)} has {len(paths)} manifests: {', '.join(map(printable, paths))}. None of them is picked: look at each job, and "
            f"move the manifests of those that are over into {SUPERSEDED}/ beside them")


def find(project: Project, job_id: str) -> Found:
    """The manifest of a job, by its id or that of its run. RecordError when there is none, or two of its plan."""
    found = read_all(project)
    chosen = [one for one in found if one.manifest.job_id == job_id] or [one for one in found if job_id and _run_id(one.manifest) == job_id]
    if len(chosen) != 1:
        known = ", ".join(printable(one.manifest.job_id) for one in found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
        raise RecordError(f"{'no' if not chosen else 'more than one'} job {printable(job_id)} has a manifest in {project.jobs}. "
                          + (f"The jobs there are {known}" if found else "There is none at all: `gpurun submit JOB.toml --plan ID …` makes one"))
    twice = conflict(found, chosen[0].manifest.plan_id)
    if twice:
        raise RecordError(twice)
    return chosen[0]


def _run_id(manifest: Manifest) -> str:
    value = manifest.more.get(external.OWN)
    return str(value.get("run_id", "")) if isinstance(value, dict) else ""


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{folder} can't be read: {error.strerror}. It may have the manifest of a job that runs, so nothing is decided without it") from error


def _content(path: str) -> bytes:
    """The bytes of a manifest's file, if it is a plain file of a sensible size. A link isn't followed: what it leads to is anybody's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else f"it can't be read: {error.strerror}"
        raise external.malformed(path, what) from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise external.malformed(path, "it is a folder" if stat.S_ISDIR(mode) else "it is no plain file")
        data = b""
        while len(data) <= MAX_BYTES:
            piece = os.read(fd, MAX_BYTES + 1 - len(data))
            if not piece:
                return data
            data += piece
        raise external.malformed(path, f"it has more than {MAX_BYTES:,} bytes")
    except OSError as error:
        raise external.malformed(path, f"it can't be read: {error.strerror}") from None
    finally:
        os.close(fd)


# ---- writing ---------------------------------------------------------------------------------------------------------------------------

class Change(NamedTuple):
    """A manifest's next status and keys of gpurun's own (`more`; one that is an object already is added to). `was`: the status that it was decided
    on; where another process has written another one meanwhile, that stands."""

    path: str
    status: str
    details: dict[str, Any] | None = None
    more: dict[str, Any] = {}
    was: str = ""


def update(project: Project, changes: Sequence[Change]) -> list[Manifest]:
    """The manifests as they are then, in the order of `changes`. `submitted_at` and the keys of others stay as they are in the file.
    RecordError, and nothing written, if any manifest of the folder can't be trusted or is gone."""
    if not changes:
        return []
    with _locked(project.jobs):
        found = read_all(project)
        known = {one.path: one.manifest for one in found}
        gone = [change.path for change in changes if change.path not in known]
        if gone:
            raise RecordError(f"{', '.join(gone)} isn't there any more; nothing was written")
        new = []
        for change in changes:
            now = known[change.path]
            if change.was and now.status != change.was:
                new.append(now)
                continue
            if change.status in external.WAITING and not now.waiting:
                _refuse_duplicate(found, now)
            new.append(_with(now, change))
            if new[-1] != now:
                _replace(change.path, new[-1])
        return new


def _with(manifest: Manifest, change: Change) -> Manifest:
    before = manifest.more
    added = {key: {**before[key], **value} if isinstance(before.get(key), dict) and isinstance(value, dict) else value for key, value in change.more.items()}
    new = manifest._replace(status=change.status, terminal_details=(change.details or None) if change.status in FAILURES else None,
                            more={**before, **added})
    wrong = external.problems(json.loads(new.encode()))
    if wrong:
        raise RecordError(f"the manifest of job {printable(manifest.job_id)} can't be written: {'; '.join(wrong)}")
    return new


def _refuse_duplicate(found: list[Found], manifest: Manifest) -> None:
    """Another job of the same plan that isn't over."""
    for one in found:
        other = one.manifest
        if other.plan_id == manifest.plan_id and other.job_id != manifest.job_id and other.waiting:
            raise _duplicate(one)


def _duplicate(one: Found) -> RecordError:
    job = printable(one.manifest.job_id)
    return RecordError(f"plan {printable(one.manifest.plan_id)} has a job that isn't over: {job} ({one.manifest.status}, {one.path}). Another one would do "
                       f"its work twice. See how it is with `gpurun poll {job}`; `gpurun stop` ends it")


def _replace(path: str, manifest: Manifest) -> None:
    try:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
    except FileNotFoundError:
        mode = 0o644                              # as the project's other files: it is committed with them
    data = _check_size(manifest)
    try:
        atomic_write(path, data, mode)
    except OSError as error:
        raise _unwritten(path, error, len(data)) from error


def _check_size(manifest: Manifest, spare: int = 0) -> bytes:
    data = manifest.encode()
    if len(data) + spare > MAX_BYTES:
        raise RecordError(f"the manifest of plan {printable(manifest.plan_id)} would have {len(data):,} bytes, and one may have {MAX_BYTES - spare:,}: "
                          "shorten its commands or its list of artifacts")
    return data


def _unwritten(path: str, error: OSError, size: int = 0) -> RecordError:
    full = f" ({room(os.path.dirname(path), max(size, 1))})" if error.errno in FULL else ""
    return RecordError(f"{path} can't be written: {error.strerror}{full}. {'Make room' if full else 'Check the owner and mode of its folder'}, then do "
                       "the same again")


# ---- reserving a plan --------------------------------------------------------------------------------------------------------------------

class Reservation:
    """A plan that is this process's to submit a job for; or, with a `left_over`, the trace of a submit that was cut short, to be settled."""

    def __init__(self, project: Project, trace: Trace, path: str, fd: int, left_over: Trace | None) -> None:
        self.project, self.trace, self.left_over = project, trace, left_over
        self._path, self._fd = path, fd
        self.moved = ""                           # the file of the plan's earlier job, once `write` has put it aside

    def write(self, manifest: Manifest) -> str:
        """The job exists: its manifest, and its file's path. An earlier job of the plan, which is over, is put aside (`moved`). After an error
        the trace stays, so that the job isn't forgotten: `gpurun poll --all` settles it."""
        project = self.project
        path = os.path.join(project.jobs, manifest.job_id + ".json")
        with _locked(project.jobs):
            found = read_all(project)
            _refuse_duplicate(found, manifest)
            for one in found:
                other = one.manifest
                if one.path == path and _run_id(other) == _run_id(manifest):     # written already, by a submit that was killed right after it
                    manifest = manifest._replace(submitted_at=other.submitted_at, more={**other.more, **manifest.more})
                elif one.path == path and (other.waiting or other.plan_id != manifest.plan_id):
                    raise RecordError(f"{path} is there and is of another run (plan {printable(other.plan_id)}, {other.status}); it was left as it is. "
                                      "Move it away, then settle this one with `gpurun poll --all`")
                elif other.plan_id == manifest.plan_id:
                    self.moved = _put_aside(one.path)
            _replace(path, manifest)
            self._remove()
        return path

    def drop(self) -> None:
        """Nothing was submitted, and nothing will be: the plan is free again."""
        if self._fd >= 0:
            with _locked(self.project.jobs):
                self._remove()

    def release(self) -> None:
        """Lets go of the trace and leaves it to whoever comes next, as if this process had ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        fsync_dir(self.project.jobs)
        self.release()


def reserve(project: Project, plan: Plan, own: Own) -> Reservation:
    """Makes `plan` this process's, before anything is submitted; `own` says which run it will be. RecordError when the plan has a job that isn't
    over, when another process is about to submit one or was cut short at it (see `left_overs`), when a file of the folder can't be trusted, and
    when the manifest could not be written."""
    _check_size(external.build(plan, own.run_id, external.SUBMITTED, utc_now(), own=own), ROOM_BYTES)   # what can't be written later is said now
    trace = Trace(plan, own, utc_now(), os.getpid(), _start(os.getpid()), socket.gethostname())
    _make(project)
    path = _trace_path(project, plan.plan_id)
    with _locked(project.jobs):
        found = read_all(project)
        for one in found:
            if one.manifest.plan_id == plan.plan_id and one.manifest.waiting:
                raise _duplicate(one)
        if any(one.manifest.plan_id == plan.plan_id for one in found):
            _make_superseded(project.jobs)
        fd = _create(path)
        if fd is None:
            fd, left = _claim(path)
            if left is not None:
                os.close(fd)
                raise RecordError(f"a submit of plan {printable(plan.plan_id)} was cut short (at {left.submitted_at}), and its job, run "
                                  f"{printable(left.own.run_id)}, may exist: `gpurun poll --all` finds out")
        try:
            _fill(fd, path, trace)
        except RecordError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return Reservation(project, trace, path, fd, None)


class LeftOvers(NamedTuple):
    """What submits have left. `claimed`, of those that were cut short: `write` if its job exists, `drop` if it never will, `release` if nobody can tell.
    And words for the others: whose submit is `at_work`, and of which that is `unclear`."""

    claimed: list[Reservation]
    at_work: list[str]
    unclear: list[str]


class AtWorkError(RecordError):
    """Another process is submitting a job of this plan just now."""


def left_overs(project: Project, plan_id: str | None = None) -> LeftOvers:
    """The traces of one plan's submits, or of all."""
    found = LeftOvers([], [], [])
    try:
        names = sorted(name for name in os.listdir(project.jobs) if name.startswith(TRACE))
    except OSError:
        return found
    if plan_id is not None:
        names = [name for name in names if name == os.path.basename(_trace_path(project, plan_id))]
    if not names:
        return found
    with _locked(project.jobs):
        for name in names:
            path = os.path.join(project.jobs, name)
            try:
                fd, left = _claim(path)
            except AtWorkError as error:
                found.at_work.append(str(error))
                continue
            except RecordError as error:
                if os.path.lexists(path):         # else its submit has just ended
                    found.unclear.append(str(error))
                continue
            if left is None:                      # cut short before it had submitted anything
                with contextlib.suppress(OSError):
                    os.unlink(path)
                os.close(fd)
            else:
                found.claimed.append(Reservation(project, left, path, fd, left))
    return found


def _trace_path(project: Project, plan_id: str) -> str:
    return os.path.join(project.jobs, TRACE + hashlib.sha256(plan_id.encode()).hexdigest()[:32])


def _create(path: str) -> int | None:
    """A new trace, locked; None if there is one."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        raise _unwritten(path, error) from error
    _flock(fd)
    return fd


def _fill(fd: int, path: str, trace: Trace) -> None:
    """One object and a newline, on the disk before anything is submitted: a trace without its newline is that of a submit that never was."""
    value = {"version": MANIFEST_VERSION, **trace._asdict(), "plan": trace.plan._asdict(), "own": trace.own._asdict()}
    try:
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, json.dumps(value).encode() + b"\n")
        os.fsync(fd)
    except OSError as error:
        raise _unwritten(path, error) from error
    fsync_dir(os.path.dirname(path))


def _claim(path: str) -> tuple[int, Trace | None]:
    """The trace of a process that is gone, locked for this one; no Trace if it had not come to submit anything. RecordError if it lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unclear(path, error.strerror) from None
    try:
        locked = _flock(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unclear(path, "it is no plain file")
        data = os.pread(fd, MAX_BYTES, 0)
        if not data.endswith(b"\n"):
            if locked is False or locked is None and time.time() - os.fstat(fd).st_mtime < LOCK_S:
                raise AtWorkError(f"another process is just about to submit a job of this plan ({path}). Try again in {LOCK_S:g} s")
            return fd, None
        trace = _decoded(path, data)
        plan, run_id = printable(trace.plan.plan_id), printable(trace.own.run_id)
        who = f"process {trace.pid} on {printable(trace.host)}, since {printable(trace.submitted_at)}"
        here = trace.host == socket.gethostname()
        if locked is False or locked is None and here and trace.start and _start(trace.pid) == trace.start:
            raise AtWorkError(f"plan {plan} is being submitted just now, as run {run_id} ({who}). Wait for it, then look with `gpurun poll --all`")
        if not here:                              # a lock of another machine may not show on this one
            raise RecordError(f"plan {plan} is being submitted, or was when that was cut short: {who}. Whether that lives shows only there: say "
                              f"`gpurun poll --all` on that machine, or remove {path} once you know that there is no run {run_id}")
        return fd, trace
    except OSError as error:
        os.close(fd)
        raise _unclear(path, error.strerror) from error
    except BaseException:
        os.close(fd)
        raise


def _unclear(path: str, what: Any) -> RecordError:
    return RecordError(f"{path} says that a job was being submitted, and not which: {what}. Nothing is submitted beside it: see `gpurun status` for what "
                       "runs, then remove it")


def _decoded(path: str, data: bytes) -> Trace:
    try:
        value = json.loads(data.decode())
        plan, own = Plan(**dict(value["plan"], expected_artifacts=tuple(value["plan"]["expected_artifacts"]))), Own(**value["own"])
        trace = Trace(plan, own, value["submitted_at"], value["pid"], value["start"], value["host"])
        if [type(item) for item in trace[2:]] != [str, int, str, str]:
            raise ValueError("its fields are of other kinds")
        checked = external.build(plan, own.run_id, external.SUBMITTED, trace.submitted_at, own=own)
        external.own(checked)
        return trace
    except (ValueError, KeyError, TypeError, RecursionError, RecordError) as error:
        raise _unclear(path, error) from None


def _start(pid: int) -> str:
    return str(supervise.start_time(pid) or "")


def _flock(fd: int) -> bool | None:
    """Whether this process has the lock now; None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise


# ---- the folder --------------------------------------------------------------------------------------------------------------------------

def _make(project: Project) -> None:
    try:
        if project.planning:
            os.makedirs(project.jobs, exist_ok=True)
        else:
            make_private_dir(project.jobs)
    except OSError as error:
        raise RecordError(f"{project.jobs} can't be made: {error.strerror}; the manifest of a job is kept there. Check the owner and mode of the "
                          "folder above it") from error


def _make_superseded(jobs: str) -> str:
    """Before a job is submitted whose manifest takes the place of another."""
    folder = os.path.join(jobs, SUPERSEDED)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{folder} can't be made: {error.strerror}; the manifest of the plan's earlier job is put aside there") from error
    return folder


def _put_aside(path: str) -> str:
    """Moves a manifest out of the readers' way; nothing that is there already is overwritten."""
    folder = _make_superseded(os.path.dirname(path))
    stem, number = os.path.basename(path)[:-len(".json")], 1
    target = os.path.join(folder, stem + ".json")
    while os.path.lexists(target):
        number += 1
        target = os.path.join(folder, f"{stem}.{number}.json")
    try:
        os.rename(path, target)
    except OSError as error:
        raise _unwritten(target, error) from error
    fsync_dir(folder)
    return target


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """The folder is this process's alone. The folder itself is locked, so that nothing is left in a repository; where that can't be, a file in
    it. What a writer that was killed left half-written goes."""
    try:
        fd = _lock(folder)
    except OSError as error:
        raise RecordError(f"{folder} can't be locked: {error.strerror}. Without that two submits could start one job twice") from error
    try:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith(TEMP_PREFIX):
                    os.unlink(os.path.join(folder, name))
        yield
    finally:
        os.close(fd)


def _lock(folder: str) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_S
    in_file = False
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    if time.monotonic() > deadline:
                        raise RecordError(f"another process has had the lock of {folder} for {LOCK_S:g} s, and needs it for milliseconds: "
                                          f"`fuser {folder}` shows which") from None
                    time.sleep(0.02)
                elif not in_file and error.errno in (errno.EBADF, *NO_LOCKS):   # NFS locks what is open for writing, which no folder can be
                    file = os.open(os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                    os.close(fd)
                    fd, in_file = file, True
                elif error.errno in NO_LOCKS:     # none at all: the traces are made with O_EXCL, which holds there too
                    return fd
                else:
                    raise
    except BaseException:
        os.close(fd)
        raise
