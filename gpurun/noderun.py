"""One run on its node: what was asked, what has been done, its events and its processes.

    runs/<run id>/state.json     the plan, what is done, which supervisor is at work; the names of the job's env, never a value of it
    runs/<run id>/events.jsonl   every event, as it went over the wire; written and synced before it is sent
    runs/<run id>/work/          the workdir and outputs root
    runs/<run id>/setup.out …    the logs; <phase>.exit from the supervisor

A run has one thread that goes from step to step: workspace, its turn on the node, setup, job, each as soon as what it needs has been
said. Commands only set facts, so they may come twice, early, or again after the agent was restarted.

state.json never says more than events.jsonl does, and lags behind it by one step at most: an agent that was killed between the two
writes finds the rest in the events. A phase's supervisor stands in state.json before it gets its work. So at whatever moment the agent
is killed, the next one neither starts a phase a second time, nor leaves one out, nor tells an event twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from gpurun import manifest, messages, supervise, wire
from gpurun.errors import GpurunError, TransferError, WireError
from gpurun.files import TEMP_PREFIX, append_line, atomic_write, exact_bytes, free_bytes, make_private_dir, read_json, room
from gpurun.messages import CollectOutputs, Detach, JobExited, MaterializeWorkspace, NodeFault, OutputsCollected, RunJob, RunSetup
from gpurun.messages import SetupCompleted, StopJob, WorkspaceMaterialized
from gpurun.store import Store
from gpurun.transfer import Pulled

VERSION = 1
FULL_BYTES = 1 << 20          # with less free than this, what the phase wrote last may be missing
ADOPTED_POLL_S = 0.1          # a supervisor that an earlier agent started can't be waited for, only looked at
STARTS = 3                    # of a phase whose supervisor is gone each time before it has begun the command
RECORDS_BYTES = 64 << 10      # what a run writes about itself, generously
REASON_SHOWN = 200            # of a fault, in a list of many runs


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

    def take(self) -> subprocess.Popen:
        """A supervisor without work: it ends when `give` doesn't follow, or when this agent ends before that."""
        with self._lock:
            process, self._spare = self._spare, None
        if process is None or process.poll() is not None:
            process = self._launch()
        return process

    @staticmethod
    def give(process: subprocess.Popen, spec: Dict[str, Any]) -> None:
        """The spec goes over a pipe: it has the values of the job's env. One that is gone meanwhile takes nothing: that shows in its end."""
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(spec).encode("ascii") + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass

    @staticmethod
    def send_home(process: subprocess.Popen) -> None:
        """Ends one that was taken and gets no work after all."""
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

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
            if self._spare is not None:
                self.send_home(self._spare)
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
        self.settled = threading.Event()       # over, and its thread has written its last word: the folder may go
        self._touched = time.monotonic()
        self._store, self._state = store, state
        self._supervisors, self._environment, self._ended = supervisors, environment, ended
        self._boot = supervise.boot_id()
        self._unwritten: List[bytes] = []      # events that a full disk didn't take; in order, before any later one
        self._unsaved = False                  # facts that an agent after this one wouldn't know
        self._turn = False
        self._logs_read = False                # an agent after this one takes it for granted: a sync for each run would be dear
        self._arrived: Set[str] = set()
        self._commands: Dict[str, Any] = {}    # "setup" and "run", each with the values of its env
        self._stop = False
        self._gone = ""

    @classmethod
    def create(cls, store: Store, run_id: str, job: str, operator: str, operator_name: str, place: int, keep: int, **parts: Any) -> "NodeRun":
        """A new run with its folder; GpurunError when the disk won't have it. `place` numbers the runs in the order they came."""
        folder = os.path.join(store.runs, run_id)
        state = _complete({"version": VERSION, "run_id": run_id, "job": job, "operator": operator, "operator_name": operator_name,
                           "created": time.time(), "place": place, "keep": keep, "turn": False})
        try:
            make_private_dir(folder)
        except OSError as error:
            raise TransferError(f"the run's folder {folder} could not be made on the node: {error.strerror} "
                                f"({room(store.root, RECORDS_BYTES)})") from None
        run = cls(store, folder, state, **parts)
        run._began_phase()
        if not run._save():
            raise TransferError(f"nothing can be written in {folder} on the node ({room(store.root, RECORDS_BYTES)}): make room there")
        return run

    @classmethod
    def load(cls, store: Store, folder: str, **parts: Any) -> Optional["NodeRun"]:
        """The run of a folder that an earlier agent left; None when it isn't one."""
        state = read_json(os.path.join(folder, "state.json"))
        if state is None or state.get("version") != VERSION:
            return None
        run = cls(store, folder, _complete(state), **parts)
        run._logs_read = True
        run._read_events()
        for event in run.events:
            run._catch_up(event)
        if run._state["boot"] != run._boot or not run._boot:
            run._began_phase()                 # the clock began anew, or may have
        plan = run._state["plan"]
        for phase, kind in (("setup", RunSetup), ("run", RunJob)):
            if plan[phase] is not None and not plan[phase]["env"]:   # the values of an env were in the earlier agent's memory, and only there
                run._commands[phase] = kind(run.run_id, plan[phase]["command"], {})
        run._sweep()
        return run

    def _read_events(self) -> None:
        """A last line that was cut short was never sent. It goes: the next event must not be written behind half of another one."""
        path, size = os.path.join(self.folder, "events.jsonl"), 0
        try:
            with open(path, "rb") as stream:
                for line in stream:
                    if not line.endswith(b"\n"):
                        os.truncate(path, size)
                        break
                    self.events.append(wire.decode(line, messages.NODE_EVENTS))
                    size += len(line)
        except FileNotFoundError:
            pass

    def _catch_up(self, event: Any) -> None:
        """What an event says was done, although the agent was killed before it wrote that into state.json."""
        state = self._state
        if isinstance(event, WorkspaceMaterialized):
            state["made"] = state["made"] or {"files": event.files, "size_bytes": event.size_bytes, "boot": ""}
            state["workspace"] = state["turn"] = True
        elif isinstance(event, SetupCompleted):
            state["setup"] = _setup_code(event)
            state["over"] = state["over"] or bool(state["setup"])
            if self._was_at("setup"):
                state["supervised"] = None
        elif isinstance(event, (JobExited, NodeFault)):
            state["over"] = True
        elif isinstance(event, OutputsCollected):
            state["collected"] = state["asked_outputs"] = True
        if state["over"]:
            state["supervised"] = None

    def begin(self) -> None:
        """Starts the run's thread, or leaves an ended run as it is."""
        if self._state["over"]:
            self.settled.set()
        else:
            threading.Thread(target=self._drive, name=f"run {self.run_id}", daemon=True).start()

    def grant(self) -> None:
        """Its turn has come: the node is this run's."""
        with self.changed:
            if self._turn or self.over:
                return
            self._turn = self._state["turn"] = True
            if not self._state["workspace"]:
                self._began_phase()
            self.changed.notify_all()
        self._tell()

    # ---- what an operator says -------------------------------------------------------------------------------------------

    def handle(self, command: Any) -> None:
        """Takes a command. Raises WireError for one that can't be this run's."""
        with self.changed:
            self._touched = time.monotonic()
            {MaterializeWorkspace: self._materialize_workspace, RunSetup: self._run_setup, RunJob: self._run_job,
             CollectOutputs: self._collect_outputs, StopJob: self._stop_job, Detach: self._detach}[type(command)](command)
            if self._unsaved and self.made and not self._turn and not self.over:
                self._save()                   # in the queue no other save may come for hours
            self.changed.notify_all()
        self._tell()

    def _materialize_workspace(self, command: MaterializeWorkspace) -> None:
        if command.tree and not manifest.is_hash(command.tree):
            raise WireError("MaterializeWorkspace.tree must be a SHA-256")
        if self._state["made"] is None:
            self._state["plan"]["tree"] = command.tree   # another tree than before: a file changed while it was sent
            self._unsaved = True

    def _run_setup(self, command: RunSetup) -> None:
        self._plan_phase("setup", command, self._state["setup"] is not None or self.has_process)

    def _run_job(self, command: RunJob) -> None:
        self._plan_phase("run", command, self._was_at("run"))

    def _plan_phase(self, phase: str, command: Any, begun: bool) -> None:
        """What was said first holds; after a restart of the agent the values of its env, which only an operator has, are taken once more."""
        if phase in self._commands or self.over:
            return
        plan, names = self._state["plan"], sorted(command.env)
        if plan[phase] is None:
            plan[phase] = {"command": command.command, "env": names}
            self._unsaved = True
        elif names != plan[phase]["env"]:
            if begun:
                return
            raise WireError(f"the values of {_listed(plan[phase]['env'])} in its env went with an agent that was ended, and what was sent now brings "
                            f"{_listed(names)}")
        self._commands[phase] = command._replace(command=plan[phase]["command"])

    def _collect_outputs(self, command: CollectOutputs) -> None:
        if self._state["plan"]["outputs"] is None:
            self._state["plan"]["outputs"], self._unsaved = list(command.outputs), True
        self._state["asked_outputs"] = True
        self._report_collected()

    def _detach(self, _command: Detach) -> None:
        self._state["detached"], self._unsaved = True, True   # written before it is promised: see `may_leave`

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

    def pulled(self, pulled: Pulled, outputs: List[str]) -> None:
        """An operator has acknowledged all of these. Unless they are all that the run has, some are still nowhere but here."""
        with self.changed:
            declared = self._state["plan"]["outputs"]
            if declared is None or set(declared) <= set(outputs):
                self._state["pulled"] = [pulled.files, pulled.size_bytes, pulled.missing]
                self._report_collected()
                self._save()

    def _report_collected(self) -> None:
        if self._state["pulled"] and self._state["asked_outputs"] and not self._state["collected"]:
            files, size, missing = self._state["pulled"]
            self._state["collected"] = True
            self._emit(OutputsCollected, files=files, size_bytes=size, missing=missing)
            self._save()

    def logs_taken(self, kept: bool) -> None:
        """An operator has read all of the logs, and says that they are on its disk (`kept`) or doesn't say. Of a run that it never left
        reading is enough: who drives a run keeps its logs."""
        with self.changed:
            if self.over:
                self._logs_read = True
                if kept and self._state["detached"] and not self._state["logs_taken"]:
                    self._state["logs_taken"] = True
                    self._save()

    def kept_with(self, keep: int) -> None:
        """How many collected runs its operator wants to be kept, said anew."""
        with self.changed:
            self._state["keep"] = keep

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
        """Its outputs are with its operator, or none were asked for; then of a run whose operator left, the logs are."""
        state = self._state
        return bool(state["collected"] or self.over and not state["asked_outputs"] and (state["logs_taken"] or not state["detached"]))

    @property
    def may_go(self) -> bool:
        """Whether nothing of it is here and nowhere else."""
        return self.collected and bool(self._state["logs_taken"] if self._state["detached"] else self._logs_read)

    @property
    def created(self) -> float:
        return float(self._state["created"])

    @property
    def place(self) -> int:
        return int(self._state["place"])

    @property
    def keep(self) -> int:
        return max(0, int(self._state["keep"]))

    @property
    def had_turn(self) -> bool:
        """Whether this agent or an earlier one has given it the node."""
        return bool(self._state["turn"])

    @property
    def has_turn(self) -> bool:
        return self._turn

    @property
    def made(self) -> bool:
        """Whether the workdir is there, whole."""
        return self._state["made"] is not None

    @property
    def touched(self) -> float:
        """When an operator was last there; of a run whose values are lost, one that said anything: it is given up some time after that."""
        return time.monotonic() if self.listeners and not self.lost_values else self._touched

    @property
    def has_process(self) -> bool:
        return self._state["supervised"] is not None

    @property
    def lost_values(self) -> List[str]:
        """The names in its env whose values an earlier agent had in its memory, and nobody has now."""
        with self.changed:
            plan, lost = self._state["plan"], set()
            for phase, ahead in (("setup", self._state["setup"] is None and not self.has_process), ("run", not self._was_at("run"))):
                if ahead and plan[phase] is not None and phase not in self._commands:
                    lost.update(plan[phase]["env"])
            return [] if self.over else sorted(lost)

    @property
    def can_finish_alone(self) -> bool:
        """Whether nobody is needed for it to go on to its end."""
        with self.changed:
            planned = self._state["plan"]["run"] is not None and not self.lost_values
            return self.over or self._was_at("run") or self.made and planned

    def may_leave(self) -> bool:
        """Whether its operator may leave it: it can finish alone, and an agent after this one could go on as well. Raises TransferError
        when the disk doesn't take what that one would have to know."""
        with self.changed:
            if not self.can_finish_alone:
                return False
            if self._unsaved and not self.over and not self._save():
                raise TransferError(f"the plan can't be written in {self.folder} on the node ({room(self._store.root, RECORDS_BYTES)}): "
                                    "stay with the run, or make room there and detach again")
            return True

    def report(self) -> Dict[str, Any]:
        """How it is, for RunStates; `ahead` is the queue's to say."""
        with self.changed:
            state = self._state
            last = next((event for event in reversed(self.events) if not isinstance(event, OutputsCollected)), None)
            said: Dict[str, Any] = {"over": self.over, "collected": self.collected, "detached": bool(state["detached"]),
                                    "seconds": round(max(0.0, time.monotonic() - state["since"]), 1)}
            if self.over:
                said.update(phase="ended", code=None, signal=0, stopped=False, reason="")
                if isinstance(last, JobExited):
                    said.update(code=last.code, signal=last.signal, stopped=last.stopped, reason=last.hint[:REASON_SHOWN])
                elif isinstance(last, SetupCompleted):
                    said.update(code=_setup_code(last), signal=last.signal, stopped=last.stopped, reason=(last.hint or "the setup failed")[:REASON_SHOWN])
                elif isinstance(last, NodeFault):
                    said.update(reason=last.reason[:REASON_SHOWN])
            elif self.has_process:
                said["phase"] = state["supervised"]["phase"]
            elif not self._turn:
                said["phase"] = "queued"
            elif not state["workspace"]:
                said["phase"] = "workspace"
            else:
                said["phase"] = "setup" if state["plan"]["setup"] is not None and state["setup"] is None else "run"
            return said

    def wait_over(self, timeout_s: float) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.over, timeout_s)
            return self.over

    def wait_change(self, timeout_s: float) -> None:
        with self.changed:
            if not self.over:
                self.changed.wait(timeout_s)

    def tree_arrived(self, tree: str) -> None:
        """All of a tree is in the store: this run's, perhaps."""
        with self.changed:
            if self.made or self.over:
                return
            self._arrived.add(tree)
            if self._state["plan"]["tree"] in (None, tree):
                self._touched = time.monotonic()
            self.changed.notify_all()

    # ---- the run's own thread ----------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        fault = ""
        plan = self._state["plan"]
        try:
            self._make_workspace()
            if not self.has_process:
                self._await(lambda: plan["setup"] or plan["run"])
            if self._state["setup"] is None and (plan["setup"] or self._was_at("setup")):
                self._do_setup()
            if not self._state["setup"]:       # None: there is no setup; 0: it went well
                self._do_job()
        except StoppedError:
            with self.changed:
                self._emit(JobExited, code=128 + signal.SIGTERM, signal=int(signal.SIGTERM), stopped=True)
        except GpurunError as error:
            fault = str(error)
        except OSError as error:
            fault = f"{error.filename or 'the run'} failed on the node: {error.strerror or error} ({room(self._store.root, RECORDS_BYTES)})"
        except Exception as error:             # else the node would be busy for ever
            fault = f"{type(error).__name__}: {error}. This is a bug in gpurun"
        with self.changed:
            if fault:
                self._emit(NodeFault, reason=fault)
            self._state["over"] = True
            self._state["supervised"] = None
            self._commands = {}                # with them go the values of the job's env
            self._began_phase()
            if self._save():
                self._sweep()
            self.changed.notify_all()
        self._tell()
        self._ended(self)
        self.settled.set()

    def _sweep(self) -> None:
        """Removes what a kill left half-written. The mark that a phase was begun goes only once nothing will be begun any more."""
        try:
            for name in os.listdir(self.folder):
                if name.startswith(TEMP_PREFIX) or self.over and name.endswith(".exit.next"):
                    os.unlink(os.path.join(self.folder, name))
        except OSError:                        # the folder was deleted, or isn't ours to write in: it is no worse than before
            pass

    def _began_phase(self) -> None:
        self._state["since"] = time.monotonic()

    def _await(self, ready: Callable[[], Any]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: ready() or self._stop or self._gone)
            if self._stop:
                raise StoppedError("stopped")
            if not ready():
                raise GpurunError(self._gone)

    def _make_workspace(self) -> None:
        """The workdir at once, and the word of it as soon as it is the run's turn."""
        state = self._state
        if not self.made or self._may_be_torn():
            files, size = self._store.materialize(self._contents(), self.workdir)
            with self.changed:
                state["made"], self._unsaved = {"files": files, "size_bytes": size, "boot": self._boot}, True
                self._gone = ""                # said while it was being made, and not true any more
                self._arrived = set()
                if not self._turn:
                    self._save()
                self.changed.notify_all()
            self._tell()
        if not self.has_process:
            self._await(lambda: self._turn)
        if not state["workspace"]:
            with self.changed:
                state["workspace"] = True
                self._began_phase()
                if state["plan"]["tree"] is not None:
                    self._emit(WorkspaceMaterialized, files=state["made"]["files"], size_bytes=state["made"]["size_bytes"])
                self._save()

    def _may_be_torn(self) -> bool:
        """Whether the workdir was made before the node's last boot and nothing has begun in it: its files weren't synced one by one, so
        they are made again, if the tree is still here to make them from."""
        made, plan = self._state["made"], self._state["plan"]
        return bool(made["boot"] != self._boot and not self.has_process and self._state["setup"] is None
                    and plan["tree"] and self._store.tree(plan["tree"]) is not None)

    def _contents(self) -> Iterable[manifest.Entry]:
        """The entries of the run's tree, once all of it is here; none for a run without a workspace."""
        plan = self._state["plan"]
        while True:
            self._await(lambda: plan["tree"] is not None or plan["setup"] or plan["run"])
            tree = plan["tree"]
            if not tree:
                return []
            entries = self._store.tree(tree)
            if entries is not None:
                return entries
            with self.changed:                 # a push of it wakes us, another tree, or a stop
                if plan["tree"] == tree and not self._stop and not self._gone and not self._store.tree(tree):
                    if tree in self._arrived:  # nobody sends it again
                        raise TransferError(f"the workspace was removed or damaged in {self._store.root}/cache on the node while the run began; "
                                            "run again")
                    self.changed.wait(1.0)

    def _was_at(self, phase: str) -> bool:
        return bool(self._state["supervised"]) and self._state["supervised"]["phase"] == phase

    def _do_setup(self) -> None:
        record = self._phase("setup")
        with self.changed:
            self._emit(SetupCompleted, **record)
            self._state["setup"] = _setup_code(self.events[-1])
            self._state["supervised"] = None
            self._began_phase()
            self._save()

    def _do_job(self) -> None:
        record = self._phase("run")
        with self.changed:
            self._state["over"] = True
            self._emit(JobExited, **record)

    def _phase(self, phase: str) -> Dict[str, Any]:
        """Runs a phase, or takes up the one that an earlier agent started; its exit record."""
        for _ in range(STARTS):
            process = None
            if not self._was_at(phase):
                self._await(lambda: phase in self._commands)
                process = self._start(phase)
            record = self._outcome(phase, process)
            if record is not None:
                return self._judged(record)
            with self.changed:
                self._state["supervised"] = None   # it never began: as if nothing had been
        raise GpurunError(f"the {phase} could not be started: its supervisor was gone {STARTS} times before it could begin. "
                          "Look at what ends processes on the node, and run again")

    def _start(self, phase: str) -> "subprocess.Popen[bytes]":
        """A supervisor at work. That it is the one is on the disk before it knows what to do."""
        command = self._commands[phase]
        environment = dict(self._environment())
        environment.update({"PYTHONUNBUFFERED": "1", **command.env})
        environment.update(GPURUN_RUN_ID=self.run_id, GPURUN_JOB=self.job, GPURUN_OUTPUTS=self.workdir, PWD=self.workdir)
        with self.changed:
            if self._stop:
                raise StoppedError("stopped")
            try:
                process = self._supervisors.take()
            except OSError as error:
                raise GpurunError(f"the node could not start a process for the {phase}: {error.strerror}") from None
            self._state["supervised"] = {"phase": phase, "pid": process.pid, "start": supervise.start_time(process.pid), "boot": self._boot}
            if not self._save():               # an agent after this one would start it a second time
                self._state["supervised"] = None
                self._supervisors.send_home(process)
                raise GpurunError(f"the {phase} was not started: that it runs couldn't be written in {self.folder} on the "
                                  f"node ({room(self._store.root, RECORDS_BYTES)}). Make room there, and run again")
            self._supervisors.give(process, {"folder": self.folder, "phase": phase, "command": command.command, "umask": 0o022,
                                             "workdir": self.workdir, "env": environment})
            self._began_phase()
            self.changed.notify_all()
        return process

    def _outcome(self, phase: str, process: Optional["subprocess.Popen[bytes]"]) -> Optional[Dict[str, Any]]:
        """Waits for a phase's supervisor; its exit record, None when the command never began. GpurunError when nobody knows how it ended."""
        supervised = self._state["supervised"]
        if process is not None:
            process.wait()
        else:
            while self._alive(supervised):
                time.sleep(ADOPTED_POLL_S)
        record = read_json(os.path.join(self.folder, phase + ".exit"))
        if record is None:
            if self._other_boot(supervised):   # its files may be of any age: only what was synced is sure to be here
                raise GpurunError(f"the node restarted while the {'job' if phase == 'run' else 'setup'} ran: no exit status; its logs so far and "
                                  f"its workdir are in {self.folder} on the node")
            if os.path.isdir(self.folder) and not os.path.exists(os.path.join(self.folder, phase + ".exit.next")):
                return None
            raise GpurunError(self._lost(phase))
        if "fault" in record:
            raise GpurunError(str(record["fault"]))
        return record

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

    def _other_boot(self, supervised: Dict[str, Any]) -> bool:
        return bool(supervised.get("boot", self._boot) != self._boot)   # an agent of an older version didn't say

    def _alive(self, supervised: Dict[str, Any]) -> bool:
        return (bool(supervised["start"]) and not self._other_boot(supervised)
                and supervise.start_time(supervised["pid"]) == supervised["start"])

    # ---- on disk -------------------------------------------------------------------------------------------------------------

    def _emit(self, cls: type, **fields: Any) -> None:
        """Writes an event to the node's disk, then shows it. Called under the lock. A disk that is full keeps nobody from hearing how
        the job ended: it is written when there is room, and an agent after this one would find it anew, in the exit record."""
        event = cls(run_id=self.run_id, seq=len(self.events) + 1, **fields)
        self._unwritten.append(wire.encode(event))
        self._write_events()
        self.events.append(event)
        self.changed.notify_all()
        self._tell()

    def _write_events(self) -> bool:
        """Whether all events are on the disk now, in their order and without a gap."""
        try:
            if self._unwritten:
                fd = os.open(os.path.join(self.folder, "events.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                try:
                    while self._unwritten:
                        append_line(fd, self._unwritten[0])
                        del self._unwritten[0]
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError:
            return False
        return True

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _save(self) -> bool:
        """Whether the disk took it, the events first. Where it didn't, an agent after this one knows an earlier state and asks the
        processes again."""
        try:
            if not self._write_events():
                self._unsaved = True
                return False
            atomic_write(os.path.join(self.folder, "state.json"), json.dumps(dict(self._state, boot=self._boot)).encode("ascii"))
        except OSError:
            self._unsaved = True
            return False
        self._unsaved = False
        return True

    def write_rest(self) -> None:
        """Of an ended run, what a full disk didn't take: else an agent after this one would go on with it."""
        with self.changed:
            if self._unsaved and self.over:
                self._save()


def _complete(state: Dict[str, Any]) -> Dict[str, Any]:
    """A run's state with all its keys: those that an agent of an older version didn't know have the value that fits what it did."""
    began = {"boot": supervise.boot_id(), "since": time.monotonic(), "place": 0, "keep": 20, "turn": True, "workspace": False, "made": None,
             "setup": None, "over": False, "collected": False, "pulled": None, "asked_outputs": False, "supervised": None, "detached": False,
             "logs_taken": False, "plan": {"tree": None, "setup": None, "run": None, "outputs": None}}
    if state.get("workspace"):
        began["made"] = {"files": 0, "size_bytes": 0, "boot": began["boot"]}
    return dict(began, **state)


def _setup_code(event: SetupCompleted) -> int:
    """0 when the job may follow. A setup that was stopped and exits 0 all the same has no job behind it either."""
    return event.code or (128 + signal.SIGTERM if event.stopped else 0)


def _listed(names: List[str]) -> str:
    return ", ".join(names) or "nothing"


def supervisor_command() -> List[str]:
    """How this agent file is started as a supervisor; isolated from the user's Python settings and packages."""
    return [sys.executable, "-I", "-S", sys.argv[0], "supervise"]
