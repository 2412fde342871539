"""A session with a node that claims nothing: how are these runs, remove one, and transfers beside it. Nothing on the node changes by asking."""

from __future__ import annotations

import contextlib
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Iterator, Sequence

from gpurun import __version__, wire
from gpurun.errors import DeployError, GpurunError, LinkError, SSHError, WireError
from gpurun.link import Link, Stream
from gpurun.messages import NODE_SAYS, Arm, Armed, Hello, NodeReady, Ping, QueryRuns, Refused, Removed, RemoveRun, RunStates
from gpurun.provider import Endpoint, Node
from gpurun.screen import Screen
from gpurun.session import reach
from gpurun.ways import KNOWN_S, Way, bring, dial

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
        if self.session.note:
            screen.say(self.session.note)
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
                    if self.node.cluster.here and self.node.cached_endpoint() is None:
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


def ask_once(link: Link, node: Node, endpoint: Endpoint, run_ids: Sequence[str], operator: str) -> dict[str, Any]:
    """The states of these runs from an agent that should be up, over one connection. Deploys nothing; LinkError when it doesn't answer."""
    states: dict[str, Any] = {}
    with _answers(dial(link, node, endpoint, [wire.CONTROL_ALPN], KNOWN_S), operator) as answer:
        for start in range(0, len(run_ids), AT_ONCE):
            states.update(answer(QueryRuns(list(run_ids[start:start + AT_ONCE])), RunStates).states)
    return states


def facts_once(link: Link, node: Node, endpoint: Endpoint, operator: str, dial_s: float = KNOWN_S, over: Any = None) -> dict[str, Any]:
    """What an agent that should be up says of itself and its machine. LinkError when it doesn't answer. `over`: an ssh.Connection to go by,
    which is closed."""
    with _answers(dial(link, node, endpoint, [wire.CONTROL_ALPN], dial_s, over), operator) as answer:
        return answer(None, NodeReady).facts


def arm_once(link: Link, node: Node, endpoint: Endpoint, arm: Arm | None, operator: str) -> Armed:
    """Tell an agent when its machine is to be ended; what it says to that. With None there is nothing to tell: it answers, and that is all. One that
    UDP doesn't get to is looked after over SSH, and the way that works is remembered."""
    try:
        way = dial(link, node, endpoint, [wire.CONTROL_ALPN], KNOWN_S)
    except LinkError:
        way = bring(link, node, [wire.CONTROL_ALPN], lambda text: None, lambda name, done, total: None)
    with _answers(way, operator) as answer:
        if arm is None:
            answer(None, NodeReady)
            return Armed()
        return answer(arm, Armed)


@contextlib.contextmanager
def _answers(way: Way, operator: str) -> Iterator[Callable[[Any, type], Any]]:
    """A function that says a message (or nothing) and returns the first answer of a kind, over a connection of its own."""
    (connection,), node = way.connections, way.endpoint.node
    try:
        stream = connection.open(ANSWER_S)
        reader = wire.Reader(stream)
        stream.write(wire.encode(hello(operator)), ANSWER_S)

        def answer(message: Any, kind: type) -> Any:
            if message is not None:
                stream.write(wire.encode(message), ANSWER_S)
            while True:
                line = reader.line(ANSWER_S)
                if not line:
                    raise WireError(f"{node} ended the session without an answer; its agent is of another version")
                item = wire.decode(line, NODE_SAYS)
                if isinstance(item, kind):
                    return item
                raise_refusal(item, type(message).__name__, node)

        yield answer
    finally:
        connection.close()
