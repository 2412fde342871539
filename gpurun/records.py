"""Run folders on the operator's disk: `<runs>/<run id>/`, and in each a record that outlives every process.

    run.json       the record: what was asked, where it runs, how far it is. Versioned, replaced atomically at every step.
    events.jsonl   telemetry, one object a line: each transition (time, from, event, to, command), each sample. Never read to decide.
    stdout.log  stderr.log  setup-stdout.log  setup-stderr.log     the logs, each a prefix of the node's, byte for byte
    outputs/       the declared outputs, each at its declared path
    lock           held (flock) by the one process that drives this run; its content is that process's id

`<runs>/.gitignore` keeps all of it out of the user's repository; `<runs>/latest` points to the newest run. Values of the job's
environment are in none of these files: a record has their names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, Callable, Iterator, Mapping, NamedTuple

from gpurun import __version__
from gpurun.errors import GpurunError, RecordError
from gpurun.files import FULL, TEMP_PREFIX, append_line, atomic_write, make_private_dir, open_append, read_json, room
from gpurun.messages import PENDING

VERSION = 1
DEFAULT_RUNS_DIR = "gpurun-runs"
LATEST = "latest"
ASYNC_JOBS = "async-jobs"     # beside the runs: the manifests of asyncjobs.py, outside of a GSD project
# What the node calls each log, and its file here; setup comes first in time.
LOG_FILES = {"setup.out": "setup-stdout.log", "setup.err": "setup-stderr.log", "run.out": "stdout.log", "run.err": "stderr.log"}


def utc_now() -> str:
    """RFC 3339, UTC, milliseconds: sorts as text. For people and other tools; durations come from a monotonic clock."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_run_id(name: str, now: datetime, suffix: str) -> str:
    """`<job name>-<yyyymmdd-hhmmss>-<4 hex>`; `now` is local time, since people read it."""
    return f"{name}-{now:%Y%m%d-%H%M%S}-{suffix}"


def choose_runs_dir(option: str | None, environ: Mapping[str, str]) -> str:
    """The folder that holds the run folders: `--runs-dir`, else `$GPURUN_RUNS`, else `gpurun-runs` under the current folder."""
    return os.path.abspath(os.path.expanduser(option or environ.get("GPURUN_RUNS") or DEFAULT_RUNS_DIR))


@dataclass
class Record:
    """The content of run.json. Facts and intentions only, never "connected": what is true after the process that wrote it is gone."""

    run_id: str = ""
    job: dict[str, Any] = field(default_factory=dict)        # name, file, run, setup, outputs, env (names only)
    node: dict[str, Any] = field(default_factory=dict)       # name, kind, and what it takes to reach its agent again
    node_dir: str = ""                                       # the run's folder on the node
    state: str = PENDING
    phase: str = ""
    exit_code: int | None = None
    reason: str = ""
    fsm: dict[str, Any] = field(default_factory=dict)        # the fields of fsm.Run
    seq: int = 0                                             # the last event of the node that was handled and saved
    offsets: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOG_FILES, 0))   # bytes of each log on this disk
    detached: bool = False                                   # the node was told to end the run alone
    logs_complete: bool = False                              # all four logs are here to their end
    seen: dict[str, Any] = field(default_factory=dict)       # what the node said when `status --refresh` last asked
    times: dict[str, str] = field(default_factory=lambda: {"created": "", "started": "", "ended": ""})
    seconds: dict[str, float] = field(default_factory=dict)  # push, setup, run, collect, total
    bytes: dict[str, int] = field(default_factory=lambda: {"pushed": 0, "pulled": 0})
    outputs: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    rented: dict[str, Any] = field(default_factory=dict)     # of a rented node: its label, whether it ends with the run, which limit was reached
    backend: dict[str, Any] = field(default_factory=dict)    # of a job of Slurm's, what that said last: job_id, state, reason, nodes, seconds
    cost: float = 0.0                                        # dollars, about: of the machine that was rented for it, or its time on one that stood
    path: str = ""                                           # direct, relay or ssh
    connections: int = 0                                     # of one transfer, the most at once
    agent: str = ""                                          # the agent's version

    def encode(self) -> bytes:
        return (json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n").encode()

    def result(self, outputs_dir: str, exit_code: int) -> dict[str, Any]:
        """What `gpurun` says at the end of a run."""
        return {"run_id": self.run_id, "state": self.state, "exit_code": exit_code, "reason": self.reason, "node": self.node.get("name", ""),
                "outputs_dir": outputs_dir, "outputs": self.outputs, "missing": self.missing,
                "seconds": {name: self.seconds.get(name, 0.0) for name in ("push", "setup", "run", "collect", "total")}, "bytes": dict(self.bytes),
                **({"cost": self.cost} if self.rented else {})}

    @classmethod
    def decode(cls, value: dict[str, Any], where: str) -> "Record":
        version = value.get("version")
        if version != VERSION or isinstance(version, bool):
            raise RecordError(f"{where} is a record of version {version!r}; gpurun {__version__} reads version {VERSION}. "
                              "Use the gpurun that wrote it, or a newer one.")
        record = cls()
        for item in fields(cls):
            if item.name not in value:   # an older gpurun of the same version; unknown keys of a newer one are left out below
                continue
            given, kind = value[item.name], type(getattr(record, item.name))
            if not (isinstance(given, kind) or item.name == "exit_code" and type(given) is int):
                raise RecordError(f"{where}: {item.name!r} is a {type(given).__name__}. Move the folder away to go on without it.")
            setattr(record, item.name, given)
        # An older gpurun counted setup's two logs as one: that number says nothing of either.
        record.offsets = {name: record.offsets.get(name, 0) for name in LOG_FILES}
        if not record.run_id:
            raise RecordError(f"{where} has no run_id. Move the folder away to go on without it.")
        return record


class RunFolder:
    """One run's folder: knows all its paths, and is the only thing that does."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        self.run_id = os.path.basename(self.path)
        self.record, self.events, self.lock = (os.path.join(self.path, name) for name in ("run.json", "events.jsonl", "lock"))
        self.logs = {name: os.path.join(self.path, file) for name, file in LOG_FILES.items()}   # by the node's names
        self.stdout, self.stderr = self.logs["run.out"], self.logs["run.err"]
        self.outputs = os.path.join(self.path, "outputs")
        self._events_fd = self._lock_fd = -1

    @classmethod
    def create(cls, runs_dir: str, name: str, now: datetime | None = None, first: Callable[[str], None] = lambda run_id: None,
               **given: Any) -> tuple["RunFolder", Record]:
        """A new run's folder with its first record (`given` are fields of it), and `latest` pointing to it. `first(run_id)` comes before the
        record; with its error there is no run."""
        now = now or datetime.now()
        try:
            make_private_dir(runs_dir)
            ignore = os.path.join(runs_dir, ".gitignore")
            if not os.path.lexists(ignore):
                atomic_write(ignore, b"*\n", 0o644)
            while True:
                folder = cls(os.path.join(runs_dir, new_run_id(name, now, os.urandom(2).hex())))
                try:
                    os.mkdir(folder.path, 0o700)
                    break
                except FileExistsError:
                    continue
            record = Record(run_id=folder.run_id, **given)
            record.times["created"] = utc_now()
            try:
                first(folder.run_id)
                folder.save(record)
            except (GpurunError, OSError):
                os.rmdir(folder.path)         # else it would look like a run
                raise
        except OSError as error:
            full = f" ({room(runs_dir, len(Record(**given).encode()))})" if error.errno in FULL else ""
            raise RecordError(f"{error.filename or runs_dir}: {error.strerror}{full}; the run's record can't be kept there. "
                              f"{'Make room, or name' if full else 'Name'} another folder with --runs-dir or GPURUN_RUNS.") from error
        point_latest(runs_dir, folder.run_id)
        return folder, record

    def save(self, record: Record) -> None:
        atomic_write(self.record, record.encode())

    def load(self) -> Record:
        value = read_json(self.record)
        if value is None:
            raise RecordError(f"{self.path} has no run.json: not a run's folder, or its first second was cut short. It can be deleted.")
        return Record.decode(value, self.record)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """One line of telemetry; the time is added. A full disk loses telemetry, not the run: the caller need not care."""
        try:
            if self._events_fd < 0:
                self._events_fd = open_append(self.events)
            append_line(self._events_fd, json.dumps({"time": utc_now(), **event}, separators=(",", ":")).encode())
        except OSError:
            pass

    def read_events(self) -> Iterator[dict[str, Any]]:
        """What events.jsonl holds; a line that a crash cut short is left out."""
        try:
            with open(self.events, "rb") as file:
                for line in file:
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(event, dict):
                        yield event
        except FileNotFoundError:
            return

    def try_lock(self) -> bool:
        """Become the one process that drives this run; False when there is one. It ends with the process, however that ends."""
        if self._lock_fd >= 0:
            return True
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sweep()
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(fd)
                return False
            # A file system without locks (some network mounts): driving the run unguarded is better than not at all.
        self._lock_fd = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except OSError:   # a full disk: that somebody has the lock still shows, only not who
            pass
        return True

    def _sweep(self) -> None:
        """Removes what a driver that was killed left half-written: nobody else writes here."""
        with contextlib.suppress(OSError):   # a folder that can't be written in: it is no worse than before
            for name in os.listdir(self.path):
                if name.startswith(TEMP_PREFIX):
                    os.unlink(os.path.join(self.path, name))

    def driver(self) -> int | None:
        """The id of the process that drives this run, if there is one."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if self._lock_fd >= 0:
                return os.getpid()
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except OSError:
                return int(os.pread(fd, 20, 0).split()[0])
        except (IndexError, ValueError):   # it has just taken the lock and not yet said who it is
            return 0
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the lock and the descriptors."""
        for fd in (self._events_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._events_fd = self._lock_fd = -1


class Listed(NamedTuple):
    """A folder among the runs: its record, or the problem that kept it from being read."""

    folder: RunFolder
    record: Record | None
    problem: str


def all_runs(runs_dir: str) -> list[Listed]:
    """Every run, the newest first. One that can't be read is reported in its place and hides no other."""
    found = []
    for folder in _folders(runs_dir):
        try:
            record = folder.load()
            found.append((record.times.get("created", ""), Listed(folder, record, "")))
        except RecordError as error:
            try:
                made = datetime.fromtimestamp(os.stat(folder.path).st_mtime, timezone.utc).isoformat()
            except OSError:   # deleted meanwhile
                continue
            found.append((made, Listed(folder, None, str(error))))
    return [listed for _, listed in sorted(found, key=lambda item: (item[0], item[1].folder.run_id), reverse=True)]


def find(runs_dir: str, text: str) -> RunFolder:
    """The run that the user means: a whole id, the beginning of just one, `latest`, or the path of a run's folder."""
    if "/" in text and os.path.isfile(os.path.join(text, "run.json")):
        return RunFolder(os.path.realpath(text))
    folders = {folder.run_id: folder for folder in _folders(runs_dir)}
    if not folders:
        raise RecordError(f"No runs in {runs_dir} yet: `gpurun JOB.toml` makes one, --runs-dir looks elsewhere.")
    if text == LATEST:
        try:
            target = os.readlink(os.path.join(runs_dir, LATEST))
        except OSError:
            target = ""
        return folders.get(target) or all_runs(runs_dir)[0].folder
    if text in folders:
        return folders[text]
    matches = [listed.folder for listed in all_runs(runs_dir) if text and listed.folder.run_id.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(folder.run_id for folder in matches[:5]) + (f" and {len(matches) - 5} more" if len(matches) > 5 else "")
        raise RecordError(f"{text!r} is the beginning of {len(matches)} runs: {names}. Type more of it; `gpurun status` lists them all.")
    newest = ", ".join(listed.folder.run_id for listed in all_runs(runs_dir)[:3])
    raise RecordError(f"No run {text!r} in {runs_dir}. The newest: {newest}. `gpurun status` lists them all; --runs-dir looks elsewhere.")


def _folders(runs_dir: str) -> list[RunFolder]:
    try:
        with os.scandir(runs_dir) as entries:
            return [RunFolder(entry.path) for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name != ASYNC_JOBS]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RecordError(f"{runs_dir} can't be read: {error.strerror}. Check its owner and mode.") from error


def point_latest(runs_dir: str, run_id: str | None) -> None:
    """Has `latest` mean this run; with None it means none."""
    if run_id is None:
        try:
            os.unlink(os.path.join(runs_dir, LATEST))
        except OSError:   # there is none, or it is a folder of somebody's
            pass
        return
    temp = os.path.join(runs_dir, TEMP_PREFIX + os.urandom(8).hex())
    try:
        os.symlink(run_id, temp)
        os.replace(temp, os.path.join(runs_dir, LATEST))
    except OSError:   # no links on this file system, or a real folder of that name: a convenience, and `find` does without it
        try:
            os.unlink(temp)
        except OSError:
            pass
