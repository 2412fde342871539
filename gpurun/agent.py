"""The agent: serves operators on the node, whose runs go on whether they are there or not.

It gives the node to one run at a time (a claim; the others stand in a queue, whether their operators are there or not; a run whose job
goes to Slurm is no work of this node and has no claim), hands each session's commands to its run and the run's events to the session, and
serves the transfers. Jobs are children of supervisors, or Slurm's, not of the agent: killing or replacing it touches none of them, and a
new agent takes up the runs that it finds in its folder.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

from gpurun import __version__, transfer, wire
from gpurun.errors import GpurunError, LinkError, LinkTimeoutError, WireError
from gpurun.files import atomic_write, free_bytes, read_json
from gpurun.guard import Ending, Guard
from gpurun.messages import (
    COMMANDS, OPERATOR_SAYS, Arm, Armed, Busy, Detach, Detached, Hello, JobExited, NodeFault, NodeReady, Ping, Pong, QueryRuns, Refused,
    Removed, RemoveRun, RunStates, Sample, SetupCompleted,
)
from gpurun.noderun import NodeRun
from gpurun.slurmjobs import Slurm
from gpurun.sockets import Stream   # or the link's, which does the same
from gpurun.store import Store, remove_tree
from gpurun.supervisors import Supervisors

HELLO_S = 20.0                # a session or transfer that says nothing at first is let go
SILENCE_S = 60.0              # an operator pings every few seconds; a session silent for so long is over
NO_RUN_S = 60.0               # a transfer may be asked for before its run's claim is given
NEVER_STARTED_S = 300.0       # a run whose operator vanished before its job could start is given up
HOUSEKEEPING_S = 5.0
AWAY_S = 30.0                 # an operator whose link broke may be coming back: at a deadline it counts as there for so much longer
STOP_RUNS_S = 60.0            # a job that was stopped has ended by then (10 s of grace, 10 s for KILL); the machine isn't kept for longer
BEAT_S = 10.0                 # how often the agent shows that it works: `start` takes one that has long stopped doing so for hung
SAMPLE_S, SAMPLE_MOST_S = 5.0, 60.0   # at first, and once a run has gone on for long: each asks nvidia-smi, which takes a second or more
SAMPLE_GROWTH = 1.25
RELEASE_S = 10.0              # between a run's last word and the node being free: a sync of its state
MAX_WAITING = 500             # runs in the queue: each has a thread
MAX_ASKED = 500               # runs in one question: their states must go into one line
MAX_UNSENT = 10000            # answers to an operator that asks and doesn't read
TRIM_EVERY_S = 600.0
SWOLLEN_S = 60.0              # after a transfer: connections whose end nobody heard last for half a minute more
REMOVED = ".removed-"         # what a run's folder is called while it is being deleted; no run id begins with a dot
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch


class Agent:
    """One agent: one node folder, one identity, one claim."""

    def __init__(self, node_dir: str, doors: Sequence[Any], agent_hash: str, supervisor: List[str], environment: Callable[[], Dict[str, str]],
                 about: Optional[Dict[str, Any]] = None) -> None:
        """`doors`: by which operators come, a `link.Link` and a `sockets.Door` or one of them. `about`: more facts."""
        self.store = Store(node_dir)
        self._doors = doors
        self.agent_hash = agent_hash
        self._folder = os.path.join(node_dir, "agent")
        self._supervisors = Supervisors(supervisor)
        self._slurm = Slurm(environment)
        self._environment = environment
        self._lock = threading.Condition()
        self._runs: Dict[str, NodeRun] = {}
        self._damaged: Dict[str, str] = {}   # folders that an earlier agent left and that nothing can be read from
        self._claim: Optional[NodeRun] = None
        self._claimed_at = time.monotonic()
        self._queue: Deque[NodeRun] = collections.deque()
        self._fetched: Dict[str, int] = {}   # how many transfers are reading a run's folder
        self._sessions = self._transfers = 0
        self._swollen_until = 0.0            # a transfer has ended, and what it took of memory may not be the system's again
        self._lost_at = -AWAY_S              # when an operator's link broke last
        self._guard = Guard(self._folder)
        self._look = threading.Event()       # there is something to look at in the house, before its time
        self._used_at = time.monotonic()
        self._authorized: Tuple[int, frozenset] = (0, frozenset())
        self._gpus: List[Dict[str, Any]] = []
        self._trimmed = time.monotonic()
        self._sampled, self._sample_pause = time.monotonic(), SAMPLE_S
        self._facts = dict(_facts(), **(about or {}))
        self._claim_said: Optional[str] = ""  # what claim.json says; "": nothing of ours yet
        self._write_claim()

    # ---- life ------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Takes up what an earlier agent left and accepts operators from now on."""
        self._show_life()                    # one that hangs before its first beat would never be taken for hung
        self._take_up_runs()
        self._supervisors.prepare()
        threading.Thread(target=self._ask_gpus, name="gpus", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        for door in self._doors:
            door.serve(self.authorized, self.handle)

    def serve(self, idle_exit_s: float) -> bool:
        """Keeps house until the node has been idle for `idle_exit_s`; False when the folder is no longer ours."""
        self._trimmed = time.monotonic()
        while True:
            self._look.wait(min(HOUSEKEEPING_S, max(idle_exit_s, 0.1), self._guard.next_in(self._idle_for())))
            self._look.clear()
            for task in (self._keep_house, self._keep_limits):
                try:
                    task()
                except Exception:            # a disk that is full, a file that went: nothing that may end the agent
                    traceback.print_exc()
            if self._idle_for() > idle_exit_s and not self._guard.armed:   # else nobody would be left to end the machine
                return True
            if self._claim is None and self._displaced():
                return False

    def _beat(self) -> None:
        """Shows, by the time of a file, that this is more than a process that exists: its packets are dealt with."""
        while True:
            if all(door.answers(BEAT_S) for door in self._doors):
                self._show_life()
            time.sleep(BEAT_S)

    def _show_life(self) -> None:
        path = os.path.join(self._folder, "alive")
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.utime(path)

    def _displaced(self) -> bool:
        """The folder was deleted, and perhaps made again for another agent: nobody will be sent to this one any more."""
        try:
            known = read_json(os.path.join(self._folder, "endpoint.json")) or {}
            return known.get("pid") != os.getpid() and bool(known or not self._guard.armed)
        except (GpurunError, OSError):
            return False                     # not readable for now; what isn't there reads as {}

    def _keep_house(self) -> None:
        now, claim = time.monotonic(), self._claim
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            if run.over:
                run.write_rest()
            elif not run.has_process and not run.can_finish_alone and now - run.touched > NEVER_STARTED_S:
                run.give_up(_deserted(run))
        with self._lock:
            swollen = now < self._swollen_until and not self._transfers
        if swollen:
            _give_memory_back()
        with self._lock:
            self._write_claim()              # a shared run that Slurm has now doesn't need this agent any more
        if claim is not None and now - self._sampled > self._sample_pause - HOUSEKEEPING_S / 2:
            self._sampled, self._sample_pause = now, min(self._sample_pause * SAMPLE_GROWTH, SAMPLE_MOST_S)
            self._sample(claim)
        if claim is None and now - self._trimmed > TRIM_EVERY_S:
            self._trimmed = now
            self.store.trim()
            self._prune()

    def _idle_for(self) -> float:
        """Seconds since the last run, operator or transfer. A run that waits or is quiet for long is no idleness."""
        with self._lock:
            if self._claim is not None or self._queue or self._sessions or self._transfers or any(self._shared()):
                self._used_at = time.monotonic()
            return time.monotonic() - self._used_at

    def _keep_limits(self) -> None:
        ending = self._guard.begin_if_due(self._idle_for(), bool(self._sessions) or time.monotonic() - self._lost_at < AWAY_S)
        if ending is not None:
            try:
                threading.Thread(target=self._end_machine, args=(ending,), name="end", daemon=True).start()
            except RuntimeError:             # no more threads: then the house isn't kept any more, it goes anyway
                self._end_machine(ending)

    def _end_machine(self, ending: Ending) -> None:
        """Stops what runs, so that its logs are whole, and has the machine ended. Those in the queue first: none of them gets the node."""
        with self._lock:
            runs = sorted((run for run in self._runs.values() if not run.over), key=lambda run: run is self._claim)
        for run in runs:
            try:
                run.stop_by_node(f"the node is being ended: {ending.why}")
            except Exception:                # nothing keeps the machine from its end
                traceback.print_exc()
        deadline = time.monotonic() + STOP_RUNS_S
        for run in runs:
            run.settled.wait(max(0.0, deadline - time.monotonic()))
        self._guard.end_machine(ending)

    def arm(self, message: Arm) -> Armed:
        """The limits of this machine, from now on."""
        armed = self._guard.arm(message)
        with self._lock:
            self._next()                     # an end that had begun may have kept the node from a run
        self._look.set()
        return armed

    def close(self) -> None:
        self._supervisors.close()
        for door in self._doors:
            door.close()

    def authorized(self, peer_id: str) -> bool:
        """Whether the key is one of those in the `authorized` file, which may have grown since the last time."""
        path = os.path.join(self._folder, "authorized")
        try:
            changed = os.stat(path).st_mtime_ns
            if changed != self._authorized[0]:
                with open(path) as stream:
                    self._authorized = (changed, frozenset(stream.read().split()))
        except (OSError, ValueError):
            return False
        return peer_id in self._authorized[1]

    def _take_up_runs(self) -> None:
        """The runs of an earlier agent: the one that had the node has it again, the others queue as they did."""
        for name in sorted(os.listdir(self.store.runs)):
            path = os.path.join(self.store.runs, name)
            try:
                if name.startswith(REMOVED):
                    remove_tree(path)
                    continue
                run = NodeRun.load(self.store, path, **self._parts())
            except (GpurunError, OSError, KeyError, TypeError, ValueError) as error:
                traceback.print_exc()
                self._damaged[name] = str(error)   # it stays, for a person to look at
                continue
            if run is not None:
                self._runs[run.run_id] = run
            elif os.path.isdir(path) and os.listdir(path):
                self._damaged[name] = "its state.json is missing or of another version"
        with self._lock:
            self._queue.extend(sorted((run for run in self._runs.values() if not run.over and not run.shared),
                                      key=lambda run: (not run.had_turn, run.place, run.created)))
            for run in self._shared():
                run.grant()
            self._next()
            self._write_claim()
        for run in list(self._runs.values()):
            run.begin()

    def _parts(self) -> Dict[str, Any]:
        return {"supervisors": self._supervisors, "slurm": self._slurm, "environment": self._environment, "ended": self._release}

    def _shared(self) -> Iterator[NodeRun]:
        """Under our lock: the runs that aren't over and that no turn is for."""
        return (run for run in self._runs.values() if run.shared and not run.over)

    def _prune(self) -> None:
        """Forgets each operator's oldest runs that are home whole, but for as many as it last asked to keep. A run that nobody collected is
        never touched, nor one that somebody is looking at."""
        with self._lock:
            of: Dict[str, List[NodeRun]] = {}
            for run in sorted(self._runs.values(), key=lambda run: (run.place, run.created)):
                of.setdefault(run.operator, []).append(run)
            paths = []
            for runs in of.values():
                done = [run for run in runs if run.settled.is_set() and run.may_go]
                spare = done[:max(0, len(done) - runs[-1].keep)]
                for run in spare:
                    if not run.listeners and not self._fetched.get(run.run_id):
                        with _may_fail():
                            paths.append(self._forget(run))
        for path in paths:
            with _may_fail():                # a folder that the job made somebody else's: the next agent tries again
                remove_tree(path)

    def _forget(self, run: NodeRun) -> str:
        """Under our lock: the run isn't known any more; what is left to be deleted. A kill in the middle leaves nothing that looks like a run."""
        path = os.path.join(self.store.runs, f"{REMOVED}{run.run_id}-{os.urandom(4).hex()}")
        try:
            os.rename(run.folder, path)
        except FileNotFoundError:
            pass                             # somebody deleted it already
        del self._runs[run.run_id]
        return path

    def unknown(self, run_id: str) -> str:
        """Why there is no such run for this operator."""
        if run_id in self._damaged:
            return (f"the folder of {run_id} on this node, {os.path.join(self.store.runs, run_id)}, is damaged ({self._damaged[run_id]}): look at it there, "
                    "and delete it by hand")
        return f"this node has no run {run_id[:100]} of this operator"

    def remove(self, run_id: str, peer_id: str) -> Any:
        """Deletes an ended run; Removed, or why not as Refused. Takes as long as the disk does."""
        refused = Refused(run_id=run_id, of="RemoveRun")
        with self._lock:
            run = self._runs.get(run_id)
        if run is None:
            return refused._replace(reason=self.unknown(run_id)) if run_id in self._damaged else Removed(run_id=run_id)
        if run.operator != peer_id:
            return refused._replace(reason=f"the run {run_id} is another operator's")
        if not run.settled.wait(RELEASE_S if _said_all(run) else 0.0):
            return refused._replace(reason=f"{run_id} hasn't ended yet ({run.report()['phase']}): stop it first")
        try:
            with self._lock:
                if self._runs.get(run_id) is not run:
                    return Removed(run_id=run_id)
                if self._fetched.get(run_id):
                    return refused._replace(reason=f"the logs or outputs of {run_id} are being fetched just now: try again when that is over")
                path = self._forget(run)
            remove_tree(path)
        except OSError as error:
            return refused._replace(reason=f"its folder on the node could not be deleted whole: {error.filename}: {error.strerror}")
        return Removed(run_id=run_id)

    def states(self, run_ids: List[str], peer_id: str) -> Any:
        """How those of the runs are that the node has and that are this operator's."""
        if len(run_ids) > MAX_ASKED:
            return Refused(of="QueryRuns", reason=f"{len(run_ids)} runs in one question; at most {MAX_ASKED} are allowed")
        states = {}
        for run_id in run_ids:
            run = self.find(run_id, peer_id)
            if run is not None:
                states[run_id] = run.report()
                ahead = self._ahead(run)
                if ahead:
                    states[run_id]["ahead"] = ahead
        return RunStates(states=states)

    # ---- claims ------------------------------------------------------------------------------------------------------------

    def find(self, run_id: str, peer_id: str) -> Optional[NodeRun]:
        """The run, if it is this operator's."""
        with self._lock:
            run = self._runs.get(run_id)
        return run if run is not None and run.operator == peer_id else None

    def wait_for(self, run_id: str, peer_id: str) -> NodeRun:
        """The run as soon as it is claimed; WireError when it isn't in time."""
        with self._lock:
            self._lock.wait_for(lambda: run_id in self._runs, NO_RUN_S)
        run = self.find(run_id, peer_id)
        if run is None:
            raise WireError(self.unknown(run_id))
        return run

    def claim(self, hello: Hello, peer_id: str) -> Tuple[Optional[NodeRun], Optional[Busy]]:
        """The run, new or known, and the Busy to answer when it isn't its turn; no run where the node is another one's and this one won't wait."""
        if not RUN_ID(hello.run_id):
            raise WireError("run_id must be letters, digits, '.', '_' and '-'")
        with self._lock:
            run = self._known(hello, peer_id)
            if run is None and not hello.shared:
                # An operator that has just heard how its run ended may come with the next one before our thread has given the node up.
                self._lock.wait_for(lambda: self._claim is None or not _said_all(self._claim), RELEASE_S)
                run = self._known(hello, peer_id)   # another session may have brought it meanwhile
            if run is None and self._claim is not None and not hello.wait and not hello.shared:
                return None, self._busy()
            if run is None:
                run = self._create(hello, peer_id)
            return run, self.busy(run)

    def _known(self, hello: Hello, peer_id: str) -> Optional[NodeRun]:
        run = self._runs.get(hello.run_id)
        if run is not None:
            if run.operator != peer_id:
                raise WireError(f"the run {hello.run_id} is another operator's")
            run.kept_with(hello.keep)
        return run

    def _create(self, hello: Hello, peer_id: str) -> NodeRun:
        if len(self._queue) >= MAX_WAITING:
            raise GpurunError(f"{len(self._queue)} runs wait for this node already; try again when some of them have ended")
        if self._guard.ending:
            able = self._guard.state().get("able")
            how = "is being ended" if able else "is past its limit, can't end itself (`gpurun down` ends it)"
            raise GpurunError(f"this node {how} and takes no more runs: {self._guard.ending}")
        place = 1 + max((run.place for run in self._runs.values()), default=0)
        run = NodeRun.create(self.store, hello.run_id, hello.job, peer_id, hello.operator[:100], place, hello.keep, hello.shared, **self._parts())
        self._runs[run.run_id] = run
        if run.shared:
            run.grant()
            self._write_claim()
        else:
            self._queue.append(run)
            self._next()
        self._lock.notify_all()
        run.begin()
        return run

    def _next(self) -> None:
        """Under our lock: gives the node, if it is free, to the run that has waited longest."""
        while self._claim is None and self._queue and not self._guard.ending:
            run = self._queue.popleft()
            if not run.over:                 # else it was stopped a moment ago, and its thread is about to tell us
                self._claim, self._claimed_at = run, time.monotonic()
                self._sampled, self._sample_pause = time.monotonic(), SAMPLE_S
                self._write_claim()
                run.grant()

    def _write_claim(self) -> None:
        """Says on disk whether this agent may be replaced: `start` of another version looks at it. One with shared runs may be once Slurm has all
        of them."""
        run = self._claim or next((run for run in self._shared() if run.bound), None)
        said = run.run_id if run else None
        if said == self._claim_said:
            return
        try:
            atomic_write(os.path.join(self._folder, "claim.json"), json.dumps({"run_id": said}).encode("ascii"))
            self._claim_said = said
        except OSError:                      # a full disk: the claim holds all the same, and a job outlives a replaced agent
            traceback.print_exc()

    def _release(self, run: NodeRun) -> None:
        """A run's last process is gone: the node is the next one's. Or it ended while it waited for the node."""
        with self._lock:
            if run in self._queue:
                self._queue.remove(run)
            if self._claim is run:
                self._claim = None
                self._next()
            if self._claim is None:
                self._write_claim()
            self._used_at = time.monotonic()
            self._lock.notify_all()
        try:
            self._supervisors.prepare()
        except OSError:                      # no more processes just now: the next phase starts its own, or says so
            traceback.print_exc()

    def _ahead(self, run: NodeRun) -> int:
        """How many runs have the node before this one, the one that has it now included; 0 when none does."""
        with self._lock:
            return 1 + self._queue.index(run) if run in self._queue else 0

    def busy(self, run: NodeRun) -> Optional[Busy]:
        """What a run that waits for its turn waits for; None for one that doesn't."""
        with self._lock:
            ahead = self._ahead(run)
            return self._busy()._replace(ahead=ahead) if ahead else None

    def _busy(self) -> Busy:
        run = self._claim
        if run is None:
            return Busy()
        return Busy(run_id=run.run_id, job=run.job, operator=run.name, seconds=round(time.monotonic() - self._claimed_at, 1))

    # ---- streams -------------------------------------------------------------------------------------------------------------

    def handle(self, stream: Stream) -> None:
        """One stream of an authorized operator, in a thread of its own."""
        if stream.connection.alpn == wire.CONTROL_ALPN:
            with self._lock:
                self._sessions += 1
            try:
                Session(self, stream).serve()
            finally:
                with self._lock:
                    self._sessions -= 1
                    self._used_at = time.monotonic()
                self._look.set()
                self._prune()
        else:
            with self._lock:
                self._transfers += 1
            try:
                self._transfer(stream)
            finally:
                with self._lock:
                    self._transfers -= 1
                    self._swollen_until = time.monotonic() + SWOLLEN_S
                    self._used_at = time.monotonic()

    def lost(self, stream: Stream) -> None:
        """An operator's session broke; unless it closed the connection itself, it may be dialling already."""
        if not stream.connection.was_closed:
            self._lost_at = time.monotonic()

    def _transfer(self, stream: Stream) -> None:
        channel = transfer.Channel(stream)
        peer_id = stream.connection.peer_id
        try:
            header = transfer.read_request(channel, HELLO_S)
            kind = header.get("type")
            if kind == "Push":
                transfer.serve_push(channel, header, self.store, self._tree_arrived)
            elif kind in ("Pull", "Follow"):
                run = self.wait_for(str(header.get("run_id")), peer_id)
                with self._fetching(run):
                    if kind == "Follow":
                        self._follow(channel, header, run)
                    else:
                        self._pull(channel, header, run)
                self._prune()
            else:
                raise WireError(f"a transfer of type {str(kind)[:40]!r} isn't known here")
        except LinkError:
            stream.abort()
        except GpurunError as error:
            transfer.report(channel, error)
        except OSError as error:
            transfer.report(channel, GpurunError(f"the node failed at {error.filename or 'a file'}: {error.strerror or error}"))

    @contextlib.contextmanager
    def _fetching(self, run: NodeRun) -> Iterator[None]:
        """Meanwhile the run's folder stays."""
        with self._lock:
            self._fetched[run.run_id] = self._fetched.get(run.run_id, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._fetched[run.run_id] -= 1
                if not self._fetched[run.run_id]:
                    del self._fetched[run.run_id]

    def _follow(self, channel: transfer.Channel, header: Dict[str, Any], run: NodeRun) -> None:
        over = run.over                      # asked before the logs are read: then what is read is all of them
        kept = transfer.serve_follow(channel, header, run.folder, lambda: run.over, run.wait_change)
        to_the_end = over or header.get("live", True) is not False
        if kept or to_the_end and "tail" not in header and set(header["offsets"]) == set(transfer.LOGS):
            run.logs_taken(kept)

    def _pull(self, channel: transfer.Channel, header: Dict[str, Any], run: NodeRun) -> None:
        pulled = transfer.serve_pull(channel, header, run.workdir, run.wait_over)
        if header.get("live") is not True:     # else what came was of a moment before the end
            run.pulled(pulled, header["outputs"])

    def _tree_arrived(self, tree: str) -> None:
        with self._lock:
            runs = [run for run in self._runs.values() if not run.made]
        for run in runs:
            run.tree_arrived(tree)

    # ---- facts and samples ---------------------------------------------------------------------------------------------------

    def facts(self, peer_id: str) -> Dict[str, Any]:
        """What the node is and does now, and this operator's runs."""
        with self._lock:
            claim = self._claim.run_id if self._claim else None
            runs = [{"run_id": run.run_id, "over": run.over, "collected": run.collected}
                    for run in self._runs.values() if run.operator == peer_id][-50:]
        return dict(self._facts, version=__version__, agent=self.agent_hash, protocol=wire.PROTOCOL,
                    node_dir=self.store.root, free_bytes=free_bytes(self.store.root), gpus=self._gpus, claim=claim, runs=runs,
                    guard=self._guard.state())

    def _ask_gpus(self) -> None:
        self._gpus = _gpus()

    def _sample(self, run: NodeRun) -> None:
        if run.listeners:
            values = {"load_1m": os.getloadavg()[0], "memory_free_bytes": _memory()[1], "disk_free_bytes": free_bytes(self.store.root)}
            if self._gpus:
                values["gpus"] = _gpus()
            for listener in list(run.listeners):
                listener(Sample(run_id=run.run_id, values=values))


class Session:
    """One control session: a thread reads what the operator says, another writes answers and the run's events."""

    def __init__(self, agent: Agent, stream: Stream) -> None:
        self.closed = False
        self.peer_id = stream.connection.peer_id
        self._agent, self._stream = agent, stream
        self._reader = wire.Reader(stream)
        self._wake = threading.Condition()
        self._outbox: Deque[Any] = collections.deque()
        self._run: Optional[NodeRun] = None
        self._news = False                   # of the run: what it is, the writer asks it
        self._ready = False                  # NodeReady was said
        self._waits = False                  # it is to be said when the run's turn comes
        self._leaving = False                # Detached is to be said as soon as that is so
        self._after = 0

    def serve(self) -> None:
        writer = threading.Thread(target=self._write, name="session writer", daemon=True)
        writer.start()
        try:
            self._read()
        except WireError as error:
            self.say(Refused(reason=str(error)))
        except LinkError:
            self._agent.lost(self._stream)
            self._stream.abort()             # the operator is gone; its run isn't
        except GpurunError as error:
            self.say(Refused(reason=str(error)))
        except OSError as error:
            self.say(Refused(reason=f"the node failed at {error.filename or 'a file'}: {error.strerror or error}"))
        finally:
            with self._wake:
                self.closed = True
                self._wake.notify()
            writer.join(transfer.IO_S)
            if self._run is not None and self._listen in self._run.listeners:
                self._run.listeners.remove(self._listen)

    def _read(self) -> None:
        line = self._reader.line(HELLO_S)
        if not line:
            return
        self._greet(wire.decode(line, [Hello]))
        while True:
            try:
                line = self._reader.line(SILENCE_S)
            except LinkTimeoutError:
                return
            if not line:
                self._agent.lost(self._stream)   # at a socket nobody says goodbye: it may be that one was killed, or its SSH broke
                return
            message = wire.decode(line, OPERATOR_SAYS)
            if isinstance(message, Ping):
                self.say(Pong(number=message.number))
            elif isinstance(message, Arm):
                self.say(self._agent.arm(message))
            elif isinstance(message, QueryRuns):
                self.say(self._agent.states(message.run_ids, self.peer_id))
            elif isinstance(message, RemoveRun):
                # In a thread: a large workdir takes its time, and pings are to be answered meanwhile.
                threading.Thread(target=self._remove, args=(message.run_id,), name="remove", daemon=True).start()
            elif isinstance(message, COMMANDS):
                self._command(message)
            else:
                raise WireError("Hello is a session's first line and no later one")

    def _greet(self, hello: Hello) -> None:
        self._after = max(0, hello.after)
        if not hello.run_id:
            self.say(NodeReady(facts=self._agent.facts(self.peer_id)))
            return
        if hello.claim:
            run, busy = self._agent.claim(hello, self.peer_id)
        else:
            run = self._agent.find(hello.run_id, self.peer_id)
            busy = self._agent.busy(run) if run is not None else None
            if run is None:
                self.say(Refused(run_id=hello.run_id, of="Hello", reason=self._agent.unknown(hello.run_id)))
        if busy is not None:
            self.say(busy)                   # before the writer can see that the run's turn has come
        if run is not None:
            self._waits = busy is not None
            self._run = run
            run.listeners.append(self._listen)
            for notice in [None, *run.notices()]:
                self._listen(notice)

    def _command(self, command: Any) -> None:
        run = self._run
        if run is None or run.run_id != command.run_id:
            self.say(Refused(run_id=command.run_id, of=type(command).__name__, reason="this session has no claim on that run"))
            return
        run.handle(command)
        if isinstance(command, Detach):
            self._leaving = True
            self._listen()

    def _remove(self, run_id: str) -> None:
        self.say(self._agent.remove(run_id, self.peer_id))

    def _listen(self, message: Any = None) -> None:
        with self._wake:
            self._news = True
            if message is not None:
                self._outbox.append(message)
            self._wake.notify()

    def say(self, message: Any) -> None:
        with self._wake:
            if len(self._outbox) > MAX_UNSENT:
                raise LinkError("the operator asks and doesn't read")
            self._outbox.append(message)
            self._wake.notify()

    def _write(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._outbox or self._news or self.closed)
                    messages, closing = list(self._outbox), self.closed
                    self._outbox.clear()
                    self._news = False
                messages += self._of_run()   # not under our lock: the run calls us under its own
                if messages:
                    self._stream.write(b"".join(map(wire.encode, messages)), transfer.IO_S)
                elif closing:
                    self._stream.finish(transfer.IO_S)
                    return
        except LinkError:
            self._stream.abort()             # the operator is gone: the reader notices too

    def _of_run(self) -> List[Any]:
        """What there is to say of the run: that its turn has come, before any event of it; its events; that it can be left alone. A run
        that ended while it waited has events and no turn."""
        run = self._run
        if run is None:
            return []
        said: List[Any] = []
        over = run.over                      # asked first: what follows is then complete
        if not self._ready and (run.has_turn or not self._waits):
            self._ready = True
            said.append(NodeReady(run_id=run.run_id, facts=self._agent.facts(self.peer_id)))
        if self._ready or over:
            new = run.events[self._after:]
            self._after += len(new)
            said += new
        if self._leaving:
            try:
                if run.may_leave():
                    self._leaving = False
                    said.append(Detached(run_id=run.run_id))
            except GpurunError as error:
                self._leaving = False
                said.append(Refused(run_id=run.run_id, of="Detach", reason=str(error)))
        return said


def _deserted(run: NodeRun) -> str:
    """Why a run whose operator is gone doesn't go on."""
    if run.lost_values:
        return (f"the agent was restarted before the job began, and the values of its env ({', '.join(run.lost_values)}) were only in its "
                "memory: run the job again")
    return f"the operator was silent for {NEVER_STARTED_S:g} s before the job could start"


def _give_memory_back() -> None:
    """glibc keeps what is free for later, in pieces: after each transfer over many connections it was 18 MB more."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):        # another C library
        pass


@contextlib.contextmanager
def _may_fail() -> Iterator[None]:
    """For the disk's refusals that concern nobody but who reads the log."""
    try:
        yield
    except OSError:
        traceback.print_exc()


def _said_all(run: NodeRun) -> bool:
    """Whether the run's operator can know that it is over."""
    last = run.events[-1] if run.events else None
    return run.over or isinstance(last, (JobExited, NodeFault)) or isinstance(last, SetupCompleted) and bool(last.code or last.stopped)


# ---- what the node is ------------------------------------------------------------------------------------------------------------

def _facts() -> Dict[str, Any]:
    libc = " ".join(platform.libc_ver())
    return {"hostname": socket.gethostname(), "os": platform.system(), "arch": platform.machine(), "libc": libc,
            "python": platform.python_version(), "python_path": sys.executable, "cpus": os.cpu_count(), "memory_bytes": _memory()[0]}


def _memory() -> Tuple[int, int]:
    """(total, available) bytes; zeros where /proc doesn't tell."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    try:
        with open("/proc/meminfo") as stream:
            for line in stream:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return found["MemTotal"], found["MemAvailable"]


def _gpus() -> List[Dict[str, Any]]:
    """What nvidia-smi says of each GPU; nothing where there is none or it doesn't answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = ("name", "memory.total", "memory.used", "utilization.gpu")
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [{"name": row[0], "memory_mib": row[1], "used_mib": row[2], "util_percent": row[3]} for row in rows if len(row) == len(fields)]
