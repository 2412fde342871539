"""One run on its node: what was asked, what has been done, its events and its processes.

    runs/<run id>/state.json     what is done, and which supervisor is at work; never a value of the job's env
    runs/<run id>/events.jsonl   every event, as it went over the wire; written and synced before it is sent
    runs/<run id>/work/          the workdir and outputs root
    runs/<run id>/setup.out …    the logs; <phase>.exit from the supervisor

A run has one thread that goes from step to step: workspace, setup, job, each as soon as what it needs has been said. Commands only set
facts, so they may come twice, early, or again after the agent was restarted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from gpurun import manifest, messages, supervise, wire
from gpurun.errors import GpurunError, TransferError, WireError
from gpurun.files import append_line, atomic_write, exact_bytes, free_bytes, make_private_dir, read_json
from gpurun.messages import CollectOutputs, JobExited, MaterializeWorkspace, NodeFault, OutputsCollected, RunJob, RunSetup, StopJob
from gpurun.messages import SetupCompleted, WorkspaceMaterialized
from gpurun.store import Store
from gpurun.transfer import Pulled

VERSION = 1
FULL_BYTES = 1 << 20          # with less free than this, what the phase wrote last may be missing
ADOPTED_POLL_S = 0.1          # a supervisor that an earlier agent started can't be waited for, only looked at


class StoppedError(GpurunError):
    """The run was stopped while none of its processes was at work."""


class Supervisors:
    """Keeps one supervisor waiting, so that starting a phase doesn't cost the start of a Python."""

    def __init__(self, command: List[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._spare: Optional[subprocess.Popen] = None

    def prepare(self) -> None:
        with self._lock:
            if self._spare is None:
                self._spare = self._launch()

    def start(self, spec: Dict[str, Any]) -> subprocess.Popen:
        """A supervisor that has its work. The spec goes over a pipe: it has the values of the job's env."""
        with self._lock:
            process, self._spare = self._spare, None
        if process is None or process.poll() is not None:
            process = self._launch()
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec).encode("ascii") + b"\n")
        process.stdin.close()
        return process

    def _launch(self) -> subprocess.Popen:
        # It inherits what this thread blocks: a stop may come before it has read its own first line.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, supervise.BLOCKED)
        try:
            return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    start_new_session=True, close_fds=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        with self._lock:
            if self._spare is not None and self._spare.stdin is not None:
                self._spare.stdin.close()
                self._spare.wait()
                self._spare = None


class NodeRun:
    """One run. `changed` is notified, under its lock, at every event and every step."""

    def __init__(self, store: Store, folder: str, state: Dict[str, Any], supervisors: Supervisors,
                 environment: Callable[[], Dict[str, str]], ended: Callable[["NodeRun"], None]) -> None:
        self.folder = folder
        self.workdir = os.path.join(folder, "work")
        self.run_id: str = state["run_id"]
        self.job: str = state["job"]
        self.operator: str = state["operator"]
        self.name: str = state["operator_name"]
        self.changed = threading.Condition()
        self.events: List[Any] = []
        self.listeners: List[Callable[[], None]] = []
        self._touched = time.monotonic()
        self._store, self._state = store, state
        self._supervisors, self._environment, self._ended = supervisors, environment, ended
        self._tree: Optional[str] = None
        self._arrived = ""
        self._setup: Optional[RunSetup] = None
        self._job: Optional[RunJob] = None
        self._stop = False
        self._gone = ""

    @classmethod
    def create(cls, store: Store, run_id: str, job: str, operator: str, operator_name: str, **parts: Any) -> "NodeRun":
        """A new run with its folder; GpurunError when the disk won't have it."""
        folder = os.path.join(store.runs, run_id)
        state = {"version": VERSION, "run_id": run_id, "job": job, "operator": operator, "operator_name": operator_name,
                 "created": time.time(), "workspace": False, "setup": None, "over": False, "collected": False, "pulled": None,
                 "asked_outputs": False, "supervised": None}
        try:
            make_private_dir(folder)
        except OSError as error:
            raise TransferError(f"the run's folder {folder} could not be made on the node: {error.strerror} "
                                f"({exact_bytes(free_bytes(store.root))} free)") from None
        store.forget()
        run = cls(store, folder, state, **parts)
        if not run._save():
            raise TransferError(f"nothing can be written in {folder} on the node ({exact_bytes(free_bytes(store.root))} free): make room there")
        return run

    @classmethod
    def load(cls, store: Store, folder: str, **parts: Any) -> Optional["NodeRun"]:
        """The run of a folder that an earlier agent left; None when it isn't one."""
        state = read_json(os.path.join(folder, "state.json"))
        if state is None or state.get("version") != VERSION:
            return None
        run = cls(store, folder, state, **parts)
        try:
            with open(os.path.join(folder, "events.jsonl"), "rb") as stream:
                for line in stream:
                    if line.endswith(b"\n"):   # a last line without its end was never sent
                        run.events.append(wire.decode(line, messages.NODE_EVENTS))
        except FileNotFoundError:
            pass
        return run

    def begin(self) -> None:
        """Starts the run's thread, or leaves an ended run as it is."""
        if not self._state["over"]:
            threading.Thread(target=self._drive, name=f"run {self.run_id}", daemon=True).start()

    # ---- what an operator says -------------------------------------------------------------------------------------------

    def handle(self, command: Any) -> None:
        with self.changed:
            self._touched = time.monotonic()
            {MaterializeWorkspace: self._materialize_workspace, RunSetup: self._run_setup, RunJob: self._run_job,
             CollectOutputs: self._collect_outputs, StopJob: self._stop_job}[type(command)](command)
            self.changed.notify_all()

    def _materialize_workspace(self, command: MaterializeWorkspace) -> None:
        if command.tree and not manifest.is_hash(command.tree):
            raise WireError("MaterializeWorkspace.tree must be a SHA-256")
        if not self._state["workspace"]:
            self._tree = command.tree          # another tree than before: a file changed while it was sent

    def _run_setup(self, command: RunSetup) -> None:
        self._setup = self._setup or command

    def _run_job(self, command: RunJob) -> None:
        self._job = self._job or command

    def _collect_outputs(self, _command: CollectOutputs) -> None:
        self._state["asked_outputs"] = True
        self._report_collected()

    def _stop_job(self, command: StopJob) -> None:
        if self._state["over"]:
            return
        self._stop = True
        supervised = self._state["supervised"]
        if supervised and self._alive(supervised):
            try:
                atomic_write(os.path.join(self.folder, "stop"), f"{command.grace_s}".encode("ascii"))
            except OSError:                    # a full disk, a deleted folder: then the usual grace has to do
                pass
            supervise.send(supervised["pid"], signal.SIGTERM)

    def pulled(self, pulled: Pulled) -> None:
        """An operator has acknowledged all outputs."""
        with self.changed:
            self._state["pulled"] = [pulled.files, pulled.size_bytes, pulled.missing]
            self._report_collected()
            self._save()

    def _report_collected(self) -> None:
        if self._state["pulled"] and self._state["asked_outputs"] and not self._state["collected"]:
            files, size, missing = self._state["pulled"]
            self._state["collected"] = True
            self._emit(OutputsCollected, files=files, size_bytes=size, missing=missing)
            self._save()

    def give_up(self, reason: str) -> None:
        """Ends a run that nobody drives any more and that has no process."""
        with self.changed:
            self._gone = reason
            self.changed.notify_all()

    # ---- what others ask ---------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """No process is left and none will be started."""
        return bool(self._state["over"])

    @property
    def collected(self) -> bool:
        return bool(self._state["collected"]) or (self.over and not self._state["asked_outputs"])

    @property
    def created(self) -> float:
        return float(self._state["created"])

    @property
    def touched(self) -> float:
        """When an operator was last there. A run that never starts is given up some time after that."""
        return time.monotonic() if self.listeners else self._touched

    @property
    def has_process(self) -> bool:
        return self._state["supervised"] is not None

    def wait_over(self, timeout_s: float) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.over, timeout_s)
            return self.over

    def wait_change(self, timeout_s: float) -> None:
        with self.changed:
            if not self.over:
                self.changed.wait(timeout_s)

    def tree_arrived(self, tree: str) -> None:
        with self.changed:
            self._arrived = tree
            self._touched = time.monotonic()
            self.changed.notify_all()

    # ---- the run's own thread ----------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        fault = ""
        try:
            self._make_workspace()
            if self._state["setup"] is None:
                self._await(lambda: self._setup or self._job or self._state["supervised"])
            if self._state["setup"] is None and (self._setup or self._was_at("setup")):
                self._do_setup()
            if not self._state["setup"]:       # None: there is no setup; 0: it went well
                self._do_job()
        except StoppedError:
            with self.changed:
                self._emit(JobExited, code=128 + signal.SIGTERM, signal=int(signal.SIGTERM), stopped=True)
        except GpurunError as error:
            fault = str(error)
        except OSError as error:
            fault = f"{error.strerror or error} ({error.filename}; {exact_bytes(free_bytes(self._store.root))} free in {self._store.root})"
        except Exception as error:             # else the node would be busy for ever
            fault = f"{type(error).__name__}: {error}. This is a bug in gpurun"
        with self.changed:
            if fault:
                self._emit(NodeFault, reason=fault)
            self._state["over"] = True
            self._state["supervised"] = None
            self._setup = self._job = None     # with them go the values of the job's env
            self._save()
            self.changed.notify_all()
        self._tell()
        self._ended(self)

    def _await(self, ready: Callable[[], Any]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: ready() or self._stop or self._gone)
            if self._stop:
                raise StoppedError("stopped")
            if not ready():
                raise GpurunError(self._gone)

    def _make_workspace(self) -> None:
        if self._state["workspace"]:
            return
        entries = None
        while entries is None:
            self._await(lambda: self._tree is not None or self._setup or self._job)
            tree = self._tree
            if not tree:
                entries = []
                break
            entries = self._store.tree(tree)
            if entries is None:
                with self.changed:             # a push of it wakes us, another tree, or a stop
                    if self._tree == tree and not self._stop and not self._gone and not self._store.tree(tree):
                        if self._arrived == tree:   # nobody sends it again
                            raise TransferError(f"the workspace was removed or damaged in {self._store.root}/cache on the node while the run began; "
                                                "run again")
                        self.changed.wait(1.0)
        files, size = self._store.materialize(entries, self.workdir)
        with self.changed:
            self._state["workspace"] = True
            if self._tree is not None:
                self._emit(WorkspaceMaterialized, files=files, size_bytes=size)
            self._save()

    def _was_at(self, phase: str) -> bool:
        return bool(self._state["supervised"]) and self._state["supervised"]["phase"] == phase

    def _do_setup(self) -> None:
        record = self._phase("setup", self._setup)
        with self.changed:
            # A setup that was stopped and exits 0 all the same has no job behind it either.
            self._state["setup"] = record["code"] or (128 + signal.SIGTERM if record["stopped"] else 0)
            self._state["supervised"] = None
            self._emit(SetupCompleted, **record)
            self._save()

    def _do_job(self) -> None:
        if not self._was_at("run"):
            self._await(lambda: self._job)
        record = self._phase("run", self._job)
        with self.changed:
            self._state["over"] = True
            self._emit(JobExited, **record)

    def _phase(self, phase: str, command: Any) -> Dict[str, Any]:
        """Runs a phase, or waits for the one that an earlier agent started; its exit record."""
        process = None
        if not self._was_at(phase):
            environment = dict(self._environment())
            environment.update({"PYTHONUNBUFFERED": "1", **command.env})
            environment.update(GPURUN_RUN_ID=self.run_id, GPURUN_JOB=self.job, GPURUN_OUTPUTS=self.workdir, PWD=self.workdir)
            with self.changed:
                if self._stop:
                    raise StoppedError("stopped")
                try:
                    process = self._supervisors.start({"folder": self.folder, "phase": phase, "command": command.command, "umask": 0o022,
                                                       "workdir": self.workdir, "env": environment})
                except OSError as error:
                    raise GpurunError(f"the node could not start a process for the {phase}: {error.strerror}") from None
                self._state["supervised"] = {"phase": phase, "pid": process.pid, "start": supervise.start_time(process.pid)}
                if not self._save():           # an agent after this one would start it a second time
                    supervise.send(process.pid, signal.SIGTERM)
                    process.wait()
                    raise GpurunError(f"the {phase} was ended again: that it runs couldn't be written in {self.folder} "
                                      f"({exact_bytes(free_bytes(self._store.root))} free)")
                self.changed.notify_all()
        supervised = self._state["supervised"]
        if process is not None:
            process.wait()
        else:
            while self._alive(supervised):
                time.sleep(ADOPTED_POLL_S)
        record = read_json(os.path.join(self.folder, phase + ".exit"))
        if record is None:
            raise GpurunError(self._lost(phase))
        if "fault" in record:
            raise GpurunError(str(record["fault"]))
        return self._judged(record)

    def _judged(self, record: Dict[str, Any]) -> Dict[str, Any]:
        """The exit record with what only the agent knows: whether a stop was asked for, and how the disk is."""
        hints = [record["hint"]] if record["hint"] else []
        if record["stopped"] and not self._stop and not os.path.exists(os.path.join(self.folder, "stop")):
            record["stopped"] = False
            if not record["code"]:             # it took the TERM for its end: nobody may take that for a success
                record.update(code=128 + signal.SIGTERM, signal=int(signal.SIGTERM))
            hints.append("something on the node ended its supervisor")
        free = free_bytes(self.folder)
        if free < FULL_BYTES:
            hints.append(f"the node's disk is full ({self.folder}: {exact_bytes(free)} free): its logs and outputs may be cut short")
        record["hint"] = "; ".join(hints)
        return record

    def _lost(self, phase: str) -> str:
        """The supervisor is gone without a record: ends what it left behind and waits for that, says what is known."""
        known: Dict[int, str] = {}
        for number, patience in ((signal.SIGTERM, supervise.LEFTOVER_GRACE_S), (signal.SIGKILL, supervise.KILL_S)):
            deadline, signalled = time.monotonic() + patience, set()
            left = supervise.remains(self.run_id, known)
            while left and time.monotonic() < deadline:
                for pid in left if number == signal.SIGKILL else left - signalled:   # KILL again and again: a fork may be quicker
                    supervise.send(pid, number)
                signalled |= left
                time.sleep(0.02)
                left = supervise.remains(self.run_id, known)
        if not os.path.isdir(self.folder):
            return f"the run's folder {self.folder} was deleted on the node while the {phase} ran: how it ended isn't known"
        return (f"the supervisor of the {phase} is gone and left no exit record (killed, or the node was restarted): how the {phase} "
                f"ended isn't known; its logs so far and its workdir are in {self.folder} on the node")

    @staticmethod
    def _alive(supervised: Dict[str, Any]) -> bool:
        return bool(supervised["start"]) and supervise.start_time(supervised["pid"]) == supervised["start"]

    # ---- on disk -------------------------------------------------------------------------------------------------------------

    def _emit(self, cls: type, **fields: Any) -> None:
        """Writes an event to the node's disk, then shows it. Called under the lock. A disk that is full keeps nobody from hearing how
        the job ended: only after a restart of the agent it would be told again, from the exit record."""
        event = cls(run_id=self.run_id, seq=len(self.events) + 1, **fields)
        try:
            fd = os.open(os.path.join(self.folder, "events.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                append_line(fd, wire.encode(event))
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            pass
        self.events.append(event)
        self.changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _save(self) -> bool:
        """Whether the disk took it. Where it didn't, an agent after this one knows an earlier state and asks the processes again."""
        try:
            atomic_write(os.path.join(self.folder, "state.json"), json.dumps(self._state).encode("ascii"))
        except OSError:
            return False
        return True


def supervisor_command() -> List[str]:
    """How this agent file is started as a supervisor; isolated from the user's Python settings and packages."""
    return [sys.executable, "-I", "-S", sys.argv[0], "supervise"]
