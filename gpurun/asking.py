"""A session with a node that claims nothing: how are these runs, remove one, and transfers beside it. Nothing on the node changes by asking."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Sequence

from gpurun import __version__, wire
from gpurun.errors import DeployError, GpurunError, LinkError, SSHError, WireError
from gpurun.link import Link, Stream
from gpurun.messages import NODE_SAYS, Hello, Ping, QueryRuns, Refused, Removed, RemoveRun, RunStates
from gpurun.provider import Endpoint, Node
from gpurun.screen import Screen
from gpurun.session import DIAL_S, reach

ANSWER_S = 20.0
REMOVE_S = 600.0              # a workdir of millions of files, on a slow disk
AT_ONCE = 500                 # runs in one question, as many as a node takes
PING_S = 2.0                  # a node lets a session go that is silent for long
TICK_S = 0.2
UNREACHED = (LinkError, SSHError, DeployError)   # a network that is away for a while may show as any of them


class Asked:
    """A session for questions about `run_ids`, which are asked at once: `states` is what the node said. An agent is deployed where none runs."""

    def __init__(self, link: Link, node: Node, run_ids: Sequence[str], screen: Screen, operator: str) -> None:
        self.node, self._screen, self._link = node, screen, link   # a link that nobody holds ends, and its connections with it
        self._inbox: "SimpleQueue[Any]" = SimpleQueue()
        self.session = reach(link, node, self._inbox, screen.say, lambda name, done, total: screen.progress(done, total, "B", name),
                             lambda: screen.phase("deploy", f"to {node.name}"))
        screen.phase("")
        try:
            self.session.begin(hello(operator), QueryRuns(list(run_ids)))
            self.states: dict[str, Any] = self._answer(RunStates, "QueryRuns", ANSWER_S).states
        except GpurunError:
            self.session.close()
            raise

    def remove(self, run_id: str) -> None:
        """Has the node delete the run's folder. GpurunError with its reason when it refuses."""
        self.session.say(RemoveRun(run_id))
        self._answer(Removed, "RemoveRun", REMOVE_S)

    def _answer(self, kind: type, of: str, within_s: float) -> Any:
        began = pinged = time.monotonic()
        while time.monotonic() - began < within_s:
            try:
                what, _, item = self._inbox.get(timeout=TICK_S)
            except Empty:
                self._screen.live_tick()
                if time.monotonic() - pinged > PING_S:
                    pinged = time.monotonic()
                    self.session.say(Ping(1))
                continue
            if what == "broken":
                raise item
            if isinstance(item, kind):
                return item
            raise_refusal(item, of, self.node.name)
        raise LinkError(f"{self.node.name} was connected to and didn't answer for {within_s:g} s; try again")

    def during(self, work: Callable[[Stream], Any]) -> Any:
        """`work` with a new transfer stream, in a thread; the session and the screen are kept alive meanwhile."""
        done: "SimpleQueue[tuple[Any, Exception | None]]" = SimpleQueue()

        def body() -> None:
            try:
                done.put((work(self.session.transfer()), None))
            except Exception as error:        # raised again below, in the thread that waits
                done.put((None, error))

        threading.Thread(target=body, name="transfer", daemon=True).start()
        pinged = time.monotonic()
        while True:
            try:
                value, error = done.get(timeout=TICK_S)
            except Empty:
                self._screen.live_tick()
                if time.monotonic() - pinged > PING_S:
                    pinged = time.monotonic()
                    self._ping()
                    if self.node.kind == "local" and self.node.cached_endpoint() is None:
                        self.session.close()  # its agent has ended: here that can be seen, long before QUIC's own time is up
                continue
            if error is not None:
                raise error
            return value

    def _ping(self) -> None:
        try:
            self.session.say(Ping(1))
        except LinkError:
            pass                              # the transfer says so itself
        while not self._inbox.empty():        # nobody waits for what the node says now
            self._inbox.get()

    def close(self) -> None:
        self.session.close()


def hello(operator: str) -> Hello:
    """A Hello that claims nothing and follows no run."""
    return Hello(version=__version__, operator=operator)


def raise_refusal(item: Any, of: str, node: str) -> None:
    """GpurunError if the node's message refuses what was asked, or anything of it: an older agent ends a session by that."""
    if isinstance(item, Refused) and item.of == "":
        raise GpurunError(f"{node}: {item.reason}. An agent of an older gpurun doesn't know the question; it is replaced as soon as nothing "
                          "runs there")
    if isinstance(item, Refused) and item.of == of:
        raise GpurunError(f"{node} refused: {item.reason}")


def ask_once(link: Link, endpoint: Endpoint, run_ids: Sequence[str], operator: str) -> dict[str, Any]:
    """The states of these runs from an agent that should be up, over one connection. Deploys nothing; LinkError when it doesn't answer."""
    connection = link.dial(endpoint.agent_id, endpoint.addresses, wire.CONTROL_ALPN, DIAL_S, endpoint.node, endpoint.relay_url or None)
    try:
        stream = connection.open(DIAL_S)
        reader, states = wire.Reader(stream), {}
        stream.write(wire.encode(hello(operator)), DIAL_S)
        for start in range(0, len(run_ids), AT_ONCE):
            stream.write(wire.encode(QueryRuns(list(run_ids[start:start + AT_ONCE]))), DIAL_S)
            states.update(_states(reader, endpoint.node))
        return states
    finally:
        connection.close()


def _states(reader: wire.Reader, node: str) -> dict[str, Any]:
    while True:
        line = reader.line(ANSWER_S)
        if not line:
            raise WireError(f"{node} ended the session without an answer; its agent is of another version")
        item = wire.decode(line, NODE_SAYS)
        if isinstance(item, RunStates):
            return item.states
        raise_refusal(item, "QueryRuns", node)
