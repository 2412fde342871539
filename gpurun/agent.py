"""The agent: serves operators on the node, whose runs go on whether they are there or not.

It gives the node to one run at a time (a claim), hands each session's commands to its run and the run's events to the session, and
serves the transfers. Jobs are children of supervisors, not of the agent: killing or replacing it touches none of them, and a new agent
takes up the runs that it finds in its folder.
"""

from __future__ import annotations

import collections
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
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from gpurun import __version__, transfer, wire
from gpurun.errors import GpurunError, LinkError, LinkTimeoutError, WireError
from gpurun.files import atomic_write, free_bytes, read_json
from gpurun.link import FAST_WRITES, Link, Stream
from gpurun.messages import (
    COMMANDS, OPERATOR_SAYS, Busy, Hello, JobExited, NodeFault, NodeReady, Ping, Pong, Refused, Sample, SetupCompleted,
)
from gpurun.noderun import NodeRun, Supervisors
from gpurun.store import Store, remove_tree

HELLO_S = 20.0                # a session or transfer that says nothing at first is let go
SILENCE_S = 60.0              # an operator pings every few seconds; a session silent for so long is over
NO_RUN_S = 60.0               # a transfer may be asked for before its run's claim is given
NEVER_STARTED_S = 300.0       # a run whose operator vanished before its job could start is given up
HOUSEKEEPING_S = 5.0
RELEASE_S = 10.0              # between a run's last word and the node being free: a sync of its state
MAX_WAITING = 200             # sessions in line, before those that have gone are sorted out
MAX_UNSENT = 10000            # answers to an operator that asks and doesn't read
TRIM_EVERY_S = 600.0
KEEP_RUNS = 20                # collected runs beyond this lose their folder, oldest first
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch


class Agent:
    """One agent: one node folder, one endpoint, one claim."""

    def __init__(self, node_dir: str, link: Link, agent_hash: str, supervisor: List[str], environment: Callable[[], Dict[str, str]]) -> None:
        self.store = Store(node_dir)
        self.link = link
        self.agent_hash = agent_hash
        self._folder = os.path.join(node_dir, "agent")
        self._supervisors = Supervisors(supervisor)
        self._environment = environment
        self._lock = threading.Condition()
        self._runs: Dict[str, NodeRun] = {}
        self._claim: Optional[NodeRun] = None
        self._claimed_at = time.monotonic()
        self._waiting: Deque[Tuple["Session", Hello]] = collections.deque()
        self._sessions = 0
        self._used_at = time.monotonic()
        self._authorized: Tuple[int, frozenset] = (0, frozenset())
        self._gpus: List[Dict[str, Any]] = []
        self._trimmed = time.monotonic()
        self._facts = _facts()
        self._write_claim()

    # ---- life ------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Takes up what an earlier agent left and accepts operators from now on."""
        self._take_up_runs()
        self._supervisors.prepare()
        threading.Thread(target=self._ask_gpus, name="gpus", daemon=True).start()
        self.link.serve(self.authorized, self.handle)

    def serve(self, idle_exit_s: float) -> bool:
        """Keeps house until the node has been idle for `idle_exit_s`; False when the folder is no longer ours."""
        self._trimmed = time.monotonic()
        while True:
            time.sleep(min(HOUSEKEEPING_S, max(idle_exit_s, 0.1)))
            try:
                self._keep_house()
            except Exception:                # a disk that is full, a file that went: nothing that may end the agent
                traceback.print_exc()
            if time.monotonic() - self._used_at > idle_exit_s:
                return True
            if self._claim is None and self._displaced():
                return False

    def _displaced(self) -> bool:
        """The folder was deleted, and perhaps made again for another agent: nobody will be sent to this one any more."""
        try:
            return (read_json(os.path.join(self._folder, "endpoint.json")) or {}).get("pid") != os.getpid()
        except (GpurunError, OSError):
            return False                     # not readable for now; what isn't there reads as {}

    def _keep_house(self) -> None:
        now, run = time.monotonic(), self._claim
        if run is not None or self._sessions:
            self._used_at = now
        if run is not None:
            if not run.has_process and now - run.touched > NEVER_STARTED_S:
                run.give_up(f"the operator was silent for {NEVER_STARTED_S:g} s before the job could start")
            self._sample(run)
        elif now - self._trimmed > TRIM_EVERY_S:
            self._trimmed = now
            self.store.trim()
            self._prune()

    def close(self) -> None:
        self._supervisors.close()
        self.link.close()

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
        for name in sorted(os.listdir(self.store.runs)):
            try:
                run = NodeRun.load(self.store, os.path.join(self.store.runs, name), **self._parts())
            except (GpurunError, OSError, KeyError, TypeError, ValueError):
                traceback.print_exc()
                continue                     # a folder that nothing can be read from; it stays, for a person to look at
            if run is not None:
                self._runs[run.run_id] = run
                if not run.over and self._claim is None:
                    self._take(run)
                run.begin()

    def _parts(self) -> Dict[str, Any]:
        return {"supervisors": self._supervisors, "environment": self._environment, "ended": self._release}

    def _prune(self) -> None:
        """Forgets the oldest runs whose outputs are home. A run that nobody collected is never touched."""
        with self._lock:
            done = sorted((run for run in self._runs.values() if run.over and run.collected), key=lambda run: run.created)
            for run in done[:max(0, len(done) - KEEP_RUNS)]:
                remove_tree(run.folder)
                del self._runs[run.run_id]

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
            raise WireError(f"this node has no run {run_id[:100]} of this operator")
        return run

    def claim(self, session: "Session", hello: Hello) -> Any:
        """The run, new or known; or the Busy to answer; or None, with `wait`: the session's `granted` is called when its turn comes."""
        with self._lock:
            known = self._runs.get(hello.run_id)
            if known is not None:
                if known.operator != session.peer_id:
                    raise WireError(f"the run {hello.run_id} is another operator's")
                return known
            if not RUN_ID(hello.run_id):
                raise WireError("run_id must be letters, digits, '.', '_' and '-'")
            # An operator that has just heard how its run ended may come with the next one before our thread has given the node up.
            self._lock.wait_for(lambda: self._claim is None or not _said_all(self._claim), RELEASE_S)
            if self._claim is None and not self._waiting:
                return self._create(session, hello)
            busy = self.busy()
            if not hello.wait:
                return busy
            session.wait(hello.run_id, busy)   # said under our lock: the claim may come the moment after
            for place, (waiting, asked) in enumerate(self._waiting):
                if asked.run_id == hello.run_id and waiting.peer_id == session.peer_id:
                    self._waiting[place] = (session, hello)   # it lost its connection and keeps its place
                    return None
            if len(self._waiting) >= MAX_WAITING:
                self._waiting = collections.deque(pair for pair in self._waiting if not pair[0].closed)
            self._waiting.append((session, hello))
            return None

    def _create(self, session: "Session", hello: Hello) -> NodeRun:
        run = NodeRun.create(self.store, hello.run_id, hello.job, session.peer_id, hello.operator[:100], **self._parts())
        self._runs[run.run_id] = run
        self._take(run)
        self._lock.notify_all()
        run.begin()
        return run

    def _take(self, run: NodeRun) -> None:
        self._claim, self._claimed_at = run, time.monotonic()
        self._write_claim()

    def _write_claim(self) -> None:
        """Says on disk whether this agent may be replaced: `start` of another version looks at it."""
        run = self._claim
        try:
            atomic_write(os.path.join(self._folder, "claim.json"), json.dumps({"run_id": run.run_id if run else None}).encode("ascii"))
        except OSError:                      # a full disk: the claim holds all the same, and a job outlives a replaced agent
            traceback.print_exc()

    def _release(self, run: NodeRun) -> None:
        """A run's last process is gone: the node is the next one's."""
        with self._lock:
            if self._claim is run:
                self._claim = None
            self._used_at = time.monotonic()
            while self._claim is None and self._waiting:
                session, hello = self._waiting.popleft()
                if session.closed:
                    continue                 # it vanished while it waited
                try:
                    session.granted(self._create(session, hello))
                except (GpurunError, OSError) as error:
                    session.say(Refused(run_id=hello.run_id, of="Hello", reason=str(error)))
            if self._claim is None:
                self._write_claim()
            self._lock.notify_all()
        try:
            self._supervisors.prepare()
        except OSError:                      # no more processes just now: the next phase starts its own, or says so
            traceback.print_exc()

    def busy(self) -> Busy:
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
        else:
            self._transfer(stream)

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
                if kind == "Follow":
                    transfer.serve_follow(channel, header, run.folder, lambda: run.over, run.wait_change)
                else:
                    run.pulled(transfer.serve_pull(channel, header, run.workdir, run.wait_over))
            else:
                raise WireError(f"a transfer of type {str(kind)[:40]!r} isn't known here")
        except LinkError:
            stream.abort()
        except GpurunError as error:
            transfer.report(channel, error)
        except OSError as error:
            transfer.report(channel, GpurunError(f"the node failed at {error.filename or 'a file'}: {error.strerror or error}"))

    def _tree_arrived(self, tree: str) -> None:
        run = self._claim
        if run is not None:
            run.tree_arrived(tree)

    # ---- facts and samples ---------------------------------------------------------------------------------------------------

    def facts(self, peer_id: str) -> Dict[str, Any]:
        """What the node is and does now, and this operator's runs."""
        with self._lock:
            claim = self._claim.run_id if self._claim else None
            runs = [{"run_id": run.run_id, "over": run.over, "collected": run.collected}
                    for run in self._runs.values() if run.operator == peer_id][-50:]
        return dict(self._facts, version=__version__, agent=self.agent_hash, protocol=wire.PROTOCOL, fast_writes=FAST_WRITES,
                    node_dir=self.store.root, free_bytes=free_bytes(self.store.root), gpus=self._gpus, claim=claim, runs=runs)

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
        self._waits_for = ""
        self._held: Dict[str, Any] = {}      # what was sent while it waited for the claim, the last of each type
        self._after = 0

    def serve(self) -> None:
        writer = threading.Thread(target=self._write, name="session writer", daemon=True)
        writer.start()
        try:
            self._read()
        except WireError as error:
            self.say(Refused(reason=str(error)))
        except LinkError:
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
        hello = wire.decode(line, [Hello])
        self._after = max(0, hello.after)
        if not hello.run_id:
            self.say(NodeReady(facts=self._agent.facts(self.peer_id)))
        elif hello.claim:
            answer = self._agent.claim(self, hello)
            if isinstance(answer, Busy):
                self.say(answer)
            elif answer is not None:
                self.granted(answer)
        else:
            run = self._agent.find(hello.run_id, self.peer_id)
            if run is None:
                self.say(Refused(run_id=hello.run_id, of="Hello", reason=f"this node has no run {hello.run_id[:100]} of this operator"))
            else:
                self.granted(run)
        while True:
            try:
                line = self._reader.line(SILENCE_S)
            except LinkTimeoutError:
                return
            if not line:
                return
            message = wire.decode(line, OPERATOR_SAYS)
            if isinstance(message, Ping):
                self.say(Pong(number=message.number))
            elif isinstance(message, COMMANDS):
                self._command(message)
            else:
                raise WireError("Hello is a session's first line and no later one")

    def _command(self, command: Any) -> None:
        with self._wake:
            if self._waits_for == command.run_id and command.run_id:
                self._held[type(command).__name__] = command
                return
        run = self._run
        if run is None or run.run_id != command.run_id:
            self.say(Refused(run_id=command.run_id, of=type(command).__name__, reason="this session has no claim on that run"))
            return
        run.handle(command)

    def wait(self, run_id: str, busy: Busy) -> None:
        """The claim comes later. A plan that came with Hello is kept until then, whole: half of one would be another plan."""
        with self._wake:
            self._waits_for = run_id
            self._outbox.append(busy)
            self._wake.notify()

    def granted(self, run: NodeRun) -> None:
        """The run is this session's: its events from `after` on, and a NodeReady before them."""
        facts = self._agent.facts(self.peer_id)
        with self._wake:
            self._outbox.append(NodeReady(run_id=run.run_id, facts=facts))
            self._run = run
            if self.closed:
                return                       # it went a moment ago; the run waits for it for a while
            try:
                for command in self._held.values():   # before any later one: those wait for our lock
                    run.handle(command)
            except WireError as error:
                self._outbox.append(Refused(run_id=run.run_id, of=type(command).__name__, reason=str(error)))
            self._waits_for, self._held = "", {}
            run.listeners.append(self._listen)
            self._wake.notify()

    def _listen(self, sample: Any = None) -> None:
        with self._wake:
            if sample is not None:
                self._outbox.append(sample)
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
                    self._wake.wait_for(lambda: self._outbox or self._behind() or self.closed)
                    messages = list(self._outbox)
                    self._outbox.clear()
                    if self._run is not None:
                        new = self._run.events[self._after:]
                        self._after += len(new)
                        messages += new
                    closing = self.closed and not messages
                if closing:
                    self._stream.finish(transfer.IO_S)
                    return
                self._stream.write(b"".join(map(wire.encode, messages)), transfer.IO_S)
        except LinkError:
            self._stream.abort()             # the operator is gone: the reader notices too

    def _behind(self) -> bool:
        return self._run is not None and len(self._run.events) > self._after


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
