"""One run on its node: what was asked, what has been done, its events and its processes.

    runs/<run id>/state.json     the plan, what is done, which supervisor is at work; the names of the job's env, never a value of it
    runs/<run id>/events.jsonl   every event, as it went over the wire; written and synced before it is sent
    runs/<run id>/work/          the workdir and outputs root
    runs/<run id>/setup.out …    the logs; <phase>.exit from the supervisor, or run.code.<n> from a job of Slurm

A run has one thread that goes from step to step: workspace, its turn on the node, setup, job, each as soon as what it needs has been
said. Commands only set facts, so they may come twice, early, or again after the agent was restarted.

state.json never says more than events.jsonl does, and lags behind it by one step at most: an agent that was killed between the two
writes finds the rest in the events. A phase's supervisor stands in state.json before it gets its work. So at whatever moment the agent
is killed, the next one neither starts a phase a second time, nor leaves one out, nor tells an event twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from gpurun import budgets, manifest, runstate, supervise
from gpurun.budgets import Budget
from gpurun.errors import GpurunError, TransferError, WireError
from gpurun.files import TEMP_PREFIX, atomic_write, exact_bytes, free_bytes, make_private_dir, read_json, room
from gpurun.messages import CollectOutputs, Detach, JobExited, MaterializeWorkspace, NodeFault, OutputsCollected, RunJob, RunSetup
from gpurun.messages import Notice, SetupCompleted, StopJob, WorkspaceMaterialized
from gpurun.rundisk import RunDisk
from gpurun.slurmjobs import Slurm
from gpurun.store import Store
from gpurun.supervisors import Supervisors
from gpurun.transfer import Pulled
from gpurun.watch import Watch

VERSION = 1
FULL_BYTES = 1 << 20          # with less free than this, what the phase wrote last may be missing
WATCHED_POLL_S = 0.5          # so late is seen what a budget asks to be seen
ADOPTED_POLL_S = 0.1          # a supervisor that an earlier agent started can't be waited for, only looked at
STARTS = 3                    # of a phase whose supervisor is gone each time before it has begun the command
RECORDS_BYTES = 64 << 10      # what a run writes about itself, generously
KEPT_EVERY_S = 30.0           # so old may be what an agent after this one knows of a job's progress


class StoppedError(GpurunError):
    """The run was stopped while none of its processes was at work."""


class NodeRun:
    """One run. `changed` is notified, under its lock, at every event and every step."""

    def __init__(self, store: Store, folder: str, state: Dict[str, Any], supervisors: Supervisors, slurm: Slurm,
                 environment: Callable[[], Dict[str, str]], ended: Callable[["NodeRun"], None]) -> None:
        self.folder = folder
        self.workdir = os.path.join(folder, "work")
        self.run_id: str = state["run_id"]
        self.job: str = state["job"]
        self.operator: str = state["operator"]
        self.name: str = state["operator_name"]
        self.changed = threading.Condition()
        self.listeners: List[Callable[..., None]] = []   # called at news, with a message that isn't one of its events or without
        self.settled = threading.Event()       # over, and its thread has written its last word: the folder may go
        self._touched = time.monotonic()
        self._store, self._state, self._disk = store, state, RunDisk(folder)
        self._supervisors, self._slurm, self._environment, self._ended = supervisors, slurm, environment, ended
        self._boot = supervise.boot_id()
        self._turn = False
        self._logs_read = False                # an agent after this one takes it for granted: a sync for each run would be dear
        self._arrived: Set[str] = set()
        self._commands: Dict[str, Any] = {}    # "setup" and "run", each with the values of its env
        self._stop = False
        self._grace_s = StopJob().grace_s
        self._watch: Optional[Watch] = None    # of a job that has a budget
        self._looked_s = self._kept_s = 0.0    # when it was asked last, and when what it said was last kept, in the job's time
        self._gone = ""

    @classmethod
    def create(cls, store: Store, run_id: str, job: str, operator: str, operator_name: str, place: int, keep: int, shared: bool = False,
               **parts: Any) -> "NodeRun":
        """A new run with its folder; GpurunError when the disk won't have it. `place` numbers the runs in the order they came. `shared`: it
        needs no turn, since its job is no work of this node."""
        folder = os.path.join(store.runs, run_id)
        state = runstate.complete({"version": VERSION, "run_id": run_id, "job": job, "operator": operator, "operator_name": operator_name,
                                   "created": time.time(), "place": place, "keep": keep, "turn": False, "shared": shared})
        def begin() -> "NodeRun":
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

        try:
            return begin()
        except TransferError:
            store.spare.clear()              # what was made ahead goes first
            return begin()

    @classmethod
    def load(cls, store: Store, folder: str, **parts: Any) -> Optional["NodeRun"]:
        """The run of a folder that an earlier agent left; None when it isn't one."""
        state = read_json(os.path.join(folder, "state.json"))
        if state is None or state.get("version") != VERSION:
            return None
        run = cls(store, folder, runstate.complete(state), **parts)
        run._logs_read = True
        run._stop = bool(run._state["stopped"])
        run._disk.read_events()
        for event in run.events:
            run._catch_up(event)
        if run._state["boot"] != run._boot or not run._boot:
            run._began_phase()                 # the clock began anew, or may have
        plan = run._state["plan"]
        for phase in ("setup", "run"):
            if plan[phase] is not None and not plan[phase]["env"]:   # the values of an env were in the earlier agent's memory, and only there
                run._commands[phase] = run._planned(phase, {})
        run._sweep()
        return run

    def _catch_up(self, event: Any) -> None:
        """What an event says was done, although the agent was killed before it wrote that into state.json."""
        state = self._state
        if isinstance(event, WorkspaceMaterialized):
            state["made"] = state["made"] or {"files": event.files, "size_bytes": event.size_bytes, "boot": ""}
            state["workspace"] = state["turn"] = True
        elif isinstance(event, SetupCompleted):
            state["setup"] = runstate.setup_code(event)
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
            if self._disk.unsaved and self.made and not self._turn and not self.over:
                self._save()                   # in the queue no other save may come for hours
            self.changed.notify_all()
        self._tell()

    def _materialize_workspace(self, command: MaterializeWorkspace) -> None:
        if command.tree and not manifest.is_hash(command.tree):
            raise WireError("MaterializeWorkspace.tree must be a SHA-256")
        if self._state["made"] is None:
            self._state["plan"]["tree"] = command.tree   # another tree than before: a file changed while it was sent
            self._disk.unsaved = True

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
            budgets.from_wire(command.budget)  # or a WireError, before anything is begun
            backend = getattr(command, "backend", {})
            if backend and backend.get("kind") != "slurm":
                raise WireError(f"a job for {str(backend.get('kind'))[:40]!r} isn't known here: the agent is of an older version, and is replaced once it is idle")
            plan[phase] = {"command": command.command, "env": names, "budget": command.budget, "backend": backend}
            self._disk.unsaved = True
        elif names != plan[phase]["env"]:
            if begun:
                return
            raise WireError(f"the values of {_listed(plan[phase]['env'])} in its env went with an agent that was ended, and what was sent now brings "
                            f"{_listed(names)}")
        self._commands[phase] = self._planned(phase, command.env)

    def _planned(self, phase: str, env: Dict[str, str]) -> Any:
        """The phase's command as it was first said, with these values."""
        plan = self._state["plan"][phase]
        command = RunSetup(self.run_id, plan["command"], env, plan.get("budget") or {})
        return command if phase == "setup" else RunJob(*command, backend=plan.get("backend") or {})

    def _collect_outputs(self, command: CollectOutputs) -> None:
        if self._state["plan"]["outputs"] is None:
            self._state["plan"]["outputs"], self._disk.unsaved = list(command.outputs), True
        self._state["asked_outputs"] = True
        self._report_collected()

    def _detach(self, _command: Detach) -> None:
        self._state["detached"], self._disk.unsaved = True, True   # written before it is promised: see `may_leave`

    def _stop_job(self, command: StopJob) -> None:
        if self._state["over"]:
            return
        self._stop, self._grace_s = True, command.grace_s
        if self._state["slurm"] is not None and not self._state["stopped"]:   # before Slurm hears of it: what ended the job must be known after us
            self._state["stopped"] = True
            self._save()
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

    def stop_by_node(self, limit: str) -> None:
        """What StopJob does, by the node itself; its end tells which limit that was, whichever agent is there then."""
        with self.changed:
            if not self._stop and not self.over:
                self._state["limit"], self._disk.unsaved = limit, True
                self._save()
        self.handle(StopJob(self.run_id))

    def give_up(self, reason: str) -> None:
        """Ends a run that nobody drives any more and that has no process."""
        with self.changed:
            self._gone = reason
            self.changed.notify_all()

    # ---- what others ask ---------------------------------------------------------------------------------------------------

    @property
    def events(self) -> List[Any]:
        return self._disk.events

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
        """Whether something of it runs, here or in Slurm, or may."""
        return self._state["supervised"] is not None or self._state["slurm"] is not None

    @property
    def shared(self) -> bool:
        """Whether it needs no turn."""
        return bool(self._state["shared"])

    @property
    def bound(self) -> bool:
        """Whether an agent after this one may be unable to go on with it: of a shared run, until Slurm has its job."""
        return not self.over and not (self._state["slurm"] or {}).get("job_id")

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
            if self._disk.unsaved and not self.over and not self._save():
                raise TransferError(f"the plan can't be written in {self.folder} on the node ({room(self._store.root, RECORDS_BYTES)}): "
                                    "stay with the run, or make room there and detach again")
            return True

    def report(self) -> Dict[str, Any]:
        """How it is, for RunStates."""
        with self.changed:
            return runstate.report(self._state, self.events, self.collected, self._turn, self._watch.state() if self._watch is not None else None)

    @property
    def backend(self) -> Dict[str, Any]:
        """What Slurm last said of its job; {} for a run that isn't Slurm's."""
        return runstate.backend(self._state)

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
                self._emit(JobExited, code=128 + signal.SIGTERM, signal=int(signal.SIGTERM), stopped=True, limit=self._state["limit"])
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
                state["made"], self._disk.unsaved = {"files": files, "size_bytes": size, "boot": self._boot}, True
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
        supervised = self._state["supervised"]
        return bool(supervised) and supervised["phase"] == phase or phase == "run" and self._state["slurm"] is not None

    def _do_setup(self) -> None:
        record = self._phase("setup")
        with self.changed:
            self._emit(SetupCompleted, **record)
            self._state["setup"] = runstate.setup_code(self.events[-1])
            self._state["supervised"] = None
            self._began_phase()
            self._save()

    def _do_job(self) -> None:
        plan = self._state["plan"]
        if not self._was_at("run"):            # a stop doesn't make nothing of a job that is at work
            self._await(lambda: plan["run"] is not None)
        self._begin_watch()
        try:
            record = self._slurm_job() if (plan["run"] or {}).get("backend") else self._phase("run")
        finally:
            if self._watch is not None:
                self._watch.close()
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
        command, environment = self._commands[phase], self._environment_of(phase)
        budget = budgets.from_wire(command.budget)
        with self.changed:
            if self._stop:
                raise StoppedError("stopped")
            try:
                process = self._supervisors.take()
            except OSError as error:
                raise GpurunError(f"the node could not start a process for the {phase}: {error.strerror}") from None
            self._state["supervised"] = {"phase": phase, "pid": process.pid, "start": supervise.start_time(process.pid), "boot": self._boot}
            self._began_phase()                # an agent after this one counts the job's time from here
            if not self._save():               # an agent after this one would start it a second time
                self._state["supervised"] = None
                self._supervisors.send_home(process)
                raise GpurunError(f"the {phase} was not started: that it runs couldn't be written in {self.folder} on the "
                                  f"node ({room(self._store.root, RECORDS_BYTES)}). Make room there, and run again")
            self._supervisors.give(process, {"folder": self.folder, "phase": phase, "command": command.command, "umask": 0o022, "workdir": self.workdir,
                                             "hard_s": budget.hard_s, "limit": budgets.hard_limit(budget), "env": environment})
            self._began_phase()                # and this one no earlier than the supervisor does, or nearly so
            self.changed.notify_all()
        return process

    def _environment_of(self, phase: str) -> Dict[str, str]:
        """What the phase's command starts from: a login shell's, the job's own values, and what is ours."""
        environment = dict(self._environment())
        environment.update({"PYTHONUNBUFFERED": "1", **self._commands[phase].env})
        environment.update(GPURUN_RUN_ID=self.run_id, GPURUN_JOB=self.job, GPURUN_OUTPUTS=self.workdir, PWD=self.workdir)
        return environment

    def _outcome(self, phase: str, process: Optional["subprocess.Popen[bytes]"]) -> Optional[Dict[str, Any]]:
        """Waits for a phase's supervisor; its exit record, None when the command never began. GpurunError when nobody knows how it ended."""
        supervised = self._state["supervised"]
        self._wait_for(phase, process, supervised)
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
        if record["stopped"]:
            record["limit"] = self._state["limit"]
        free = free_bytes(self.folder)
        if free < FULL_BYTES:
            hints.append(f"the node's disk is full ({self.folder}: {exact_bytes(free)} free): its logs and outputs may be cut short")
        record["hint"] = "; ".join(hints)
        return record

    def _wait_for(self, phase: str, process: Optional["subprocess.Popen[bytes]"], supervised: Dict[str, Any]) -> None:
        """Until a supervisor has ended; the budget of its job is looked after meanwhile."""
        watched = phase == "run" and self._watch is not None
        while True:
            if process is None:
                if not self._alive(supervised):
                    return
                time.sleep(ADOPTED_POLL_S)
            else:
                try:
                    process.wait(min(WATCHED_POLL_S, self._watch.next_s) if self._watch is not None and watched else None)
                    return
                except subprocess.TimeoutExpired:
                    pass
            if watched and not self._stop:
                limit = self._look_after(time.monotonic() - self._state["since"])
                if limit:
                    self.stop_by_node(limit)

    def _begin_watch(self) -> None:
        """Before the job is started, or taken up again: what is there by then is no progress of it."""
        plan = self._state["plan"]
        budget = budgets.from_wire((plan["run"] or {}).get("budget") or {})
        if self._watch is None and budget != Budget():
            try:
                self._watch = Watch(budget, [os.path.join(self.folder, name) for name in ("run.out", "run.err")],
                                    [os.path.join(self.workdir, name) for name in plan["outputs"] or ()], self._count, self._state["watch"])
            except ValueError as error:        # the node's Python is an older one than the operator's
                raise GpurunError(f"the job was not started: {error}") from None

    def _count(self) -> Optional[int]:
        """The job's processes, where they are here."""
        supervised = self._state["supervised"]
        return len(supervise.descendants(supervised["pid"])) if supervised else None

    def _look_after(self, elapsed_s: float) -> str:
        """Has the job's budget looked at if that is due: what there is to tell is told; why the job must end now, or ""."""
        watch = self._watch
        if watch is None or 0 <= elapsed_s - self._looked_s < watch.next_s:
            return ""
        self._looked_s = elapsed_s
        decision = watch.look(elapsed_s)
        if decision.act != budgets.GO_ON or not elapsed_s - self._kept_s < KEPT_EVERY_S:
            self._kept_s = elapsed_s
            with self.changed:
                self._state["watch"] = watch.kept()
                self._save()
        if decision.act != budgets.GO_ON:
            about = {budgets.TELL: "silence", budgets.REVIEW: "review", budgets.STOP: "limit"}[decision.act]
            self._notice(about, f"stopping the job: {decision.text}" if about == "limit" else decision.text, watch.state())
        return decision.text if decision.act == budgets.STOP else ""

    def notices(self) -> List[Notice]:
        """For an operator that comes: how its job is in Slurm, and a review that it may have missed ("had")."""
        found = [Notice(self.run_id, "backend", "", self.backend)] if self.backend else []
        with self.changed:
            text = self._watch.review() if self._watch is not None and not self._stop and not self.over else ""
        return found + ([Notice(self.run_id, "review", text, {"had": True})] if text else [])

    def _notice(self, about: str, text: str, values: Dict[str, Any]) -> None:
        for listener in list(self.listeners):
            listener(Notice(self.run_id, about, text, values))

    # ---- a job of Slurm's -------------------------------------------------------------------------------------------------------

    def _slurm_job(self) -> Dict[str, Any]:
        """Submits the job, or takes up the one that an earlier agent submitted; its exit record. That it is about to be submitted is on the
        disk before it is, so it never is a second time."""
        if self._state["slurm"] is None:
            self._await(lambda: "run" in self._commands)
        job = self._slurm.job(self.folder, self.workdir, self.run_id, self._state["plan"]["run"]["backend"])
        found = self._state["slurm"]
        job_id = found["job_id"] if found else ""
        if found and not job_id:               # an agent was ended while it submitted
            job_id = job.find() or ""
            if not job_id:
                with self.changed:
                    self._state["slurm"] = None
                    self._save()
        if not job_id:
            self._await(lambda: "run" in self._commands)
            environment = self._environment_of("run")
            with self.changed:
                if self._stop:
                    raise StoppedError("stopped")
                self._state["slurm"] = {"job_id": ""}
                if not self._save():           # an agent after this one would submit it a second time
                    self._state["slurm"] = None
                    raise GpurunError(f"the job was not submitted: that it is couldn't be written in {self.folder} on the node "
                                      f"({room(self._store.root, RECORDS_BYTES)}). Make room there, and run again")
            budget = budgets.from_wire(self._commands["run"].budget)
            job_id = job.submit(self._commands["run"].command, environment, lambda: self._stop, budget.hard_s, budgets.hard_limit(budget))
            if not job_id:
                raise StoppedError("stopped")
        with self.changed:
            self._state["slurm"]["job_id"] = job_id
            self._began_phase()
            self._save()
        record = job.follow(job_id, self)
        return dict(record, limit=record["limit"] or self._state["limit"])   # which an agent before this one may have ended it for

    def stop(self) -> Optional[float]:
        """For Slurm's job: the grace period once it is to end."""
        return self._grace_s if self._stop else None

    def tell(self, news: Dict[str, Any]) -> None:
        """For Slurm's job: what Slurm says of it now."""
        with self.changed:
            known = self._state["slurm"]
            before = known.get("state", "")
            known.update(news, state=news["state"] or before)   # an agent that has just begun hasn't heard of it yet
            if known["state"] != before:
                self._save()
        self._notice("backend", "", self.backend)

    def limit(self, running_s: float) -> str:
        """For Slurm's job, asked each second while it runs: why it must end now."""
        text = self._look_after(running_s)
        if text:
            with self.changed:
                self._state["limit"] = text
                self._save()
        return text

    def wait(self, timeout_s: float) -> None:
        """For Slurm's job: returns early when an operator said something."""
        with self.changed:
            self.changed.wait(timeout_s)

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
        self._disk.add(cls(run_id=self.run_id, seq=len(self.events) + 1, **fields))
        self.changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _save(self) -> bool:
        """Whether the disk took the state."""
        return self._disk.save(dict(self._state, boot=self._boot))

    def write_rest(self) -> None:
        """Of an ended run, what a full disk didn't take: else an agent after this one would go on with it."""
        with self.changed:
            if self._disk.unsaved and self.over:
                self._save()


def _listed(names: List[str]) -> str:
    return ", ".join(names) or "nothing"
