"""The operator's side of the connections to one node: the control session, and transfer streams beside it.

`reach` gets them: by the way that is known if there is one, else by deploying the agent first. What the node says lands in
an inbox as `("said", session, message)`; when the session breaks, `("broken", session, error)` is the last word of it.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any, Callable, NamedTuple

from gpurun import transfer, ways, wire
from gpurun.agentfile import agent_file
from gpurun.errors import GpurunError, LinkError, RefusedError, SSHError, WireError
from gpurun.link import Link, Stream
from gpurun.messages import NODE_SAYS, Hello
from gpurun.provider import Endpoint, Node, Progress
from gpurun.screen import Screen

ALPNS = [wire.CONTROL_ALPN, wire.TRANSFER_ALPN]
SAY_S = 20.0


class Session:
    """A control session with its inbox, and the connection for transfers."""

    def __init__(self, way: ways.Way, inbox: "SimpleQueue[Any]", here: bool) -> None:
        """`way`: to both ALPNS."""
        (control, data), self.endpoint = way.connections, way.endpoint
        self.note = ways.note(way, here)   # what the user should know of the way, "" for the usual one
        self._control, self._data, self._inbox = control, data, inbox
        try:
            self._stream = control.open(SAY_S)
        except LinkError:
            control.close()
            data.close()
            raise
        self._lock = threading.Lock()
        self._closed = False

    def say(self, *messages: Any) -> None:
        """Sends messages in one write. LinkError when the session is broken (the inbox says so too)."""
        data = b"".join(map(wire.encode, messages))
        with self._lock:
            self._stream.write(data, SAY_S)

    def begin(self, hello: Hello, *more: Any) -> None:
        """Opens the session: Hello and what may go in the same flight."""
        self.say(hello, *more)
        threading.Thread(target=self._listen, name="session", daemon=True).start()

    def _listen(self) -> None:
        reader = wire.Reader(self._stream)
        error: GpurunError = LinkError("the node ended the session")
        try:
            while True:
                line = reader.line(transfer.IO_S)   # the orchestrator pings: a silence of this length is a broken link
                if not line:
                    break
                self._inbox.put(("said", self, wire.decode(line, NODE_SAYS)))
        except (LinkError, WireError) as broken:
            error = broken
        if not self._closed:
            self._inbox.put(("broken", self, error))

    def transfer(self) -> Stream:
        return self._data.open(SAY_S)

    def path(self) -> str:
        """"direct", "relay" or "ssh"."""
        return self._control.path()

    def connections(self) -> int:
        """How many a transfer of this session has had at once, at most."""
        return self._data.most_lanes

    def rtt_s(self) -> float:
        """Of the path that is in use, 0 where it isn't known (yet, or any more)."""
        return self._control.rtt_s() or 0.0

    def close(self) -> None:
        self._closed = True
        self._control.close()
        self._data.close()


def dial(link: Link, node: Node, endpoint: Endpoint, inbox: "SimpleQueue[Any]", timeout_s: float) -> Session:
    """To an agent that should be up, by the way that is known."""
    return Session(ways.dial(link, node, endpoint, ALPNS, timeout_s), inbox, node.cluster.here)


def bring(link: Link, node: Node, inbox: "SimpleQueue[Any]", say: Callable[[str], None], progress: Progress, tried: ways.Attempt | None = None,
          udp_s: float = 0.0, deployed: Callable[[], None] = lambda: None) -> Session:
    """As `ways.bring`: the agent is looked after first, and started where none runs."""
    return Session(ways.bring(link, node, ALPNS, say, progress, tried, udp_s, deployed), inbox, node.cluster.here)


def current(node: Node) -> Endpoint | None:
    """What is known of the node's agent, if that is an agent of this version; else deploying decides (a busy one is used as it is)."""
    known = node.known_endpoint()
    return known if known is not None and known.agent == agent_file().hash else None


class Tried(NamedTuple):
    """The quick way was of no use (so far)."""

    error: GpurunError
    attempt: ways.Attempt | None = None


def dial_known(link: Callable[[], Link], node: Node, inbox: "SimpleQueue[Any]") -> Session | Tried | None:
    """Only the quick way, and quietly: all that a second run needs. None: going there the long way says what it is."""
    try:
        known = current(node)
        if known is None:
            return None
        if ways.by_socket(known):
            return dial(link(), node, known, inbox, ways.KNOWN_S)
        attempt = ways.Attempt(link(), node, known, ALPNS)
        way = attempt.result(ways.BESIDE_S)
        if way is not None:
            return Session(way, inbox, node.cluster.here)
        return Tried(attempt.error or LinkError(f"no answer within {ways.BESIDE_S:g} s"), attempt)
    except GpurunError as error:
        return Tried(error)
    except Exception:
        return None


def reach_any(link: Link, nodes: list[Node], inbox: "SimpleQueue[Any]", screen: Screen, tried: Tried | None = None) -> Session:
    """A session with the first of `nodes` that can be had, the agent deployed where it must be; those before it are taken out of the list.
    `tried`: what `dial_known` said of the first one."""
    while True:
        node = nodes[0]
        screen.phase("connect", f"to {node.name}")
        try:
            session = reach(link, node, inbox, screen.say, lambda name, done, total: screen.progress(done, total, "B", name),
                            lambda: screen.phase("deploy", f"to {node.name}"), tried, lambda: screen.phase("connect", f"to {node.name}"))
            screen.phase("")
            return session
        except GpurunError as error:
            if len(nodes) == 1:
                raise
            screen.warn(f"{node.name} can't be used: {error}")
            del nodes[0]
            tried = None


def reach(link: Link, node: Node, inbox: "SimpleQueue[Any]", say: Callable[[str], None], progress: Progress,
          deploying: Callable[[], None] = lambda: None, tried: Tried | None = None, deployed: Callable[[], None] = lambda: None) -> Session:
    """A session with the node's agent, deployed first where that is needed. Raises LinkError, SSHError, DeployError. `tried`: what
    `dial_known` said just now."""
    found = tried or dial_known(lambda: link, node, inbox)
    if isinstance(found, Session):
        return found
    attempt = None
    if found is not None:
        attempt = found.attempt
        if isinstance(found.error, SSHError) and not node.rented:   # a second login would say the same; a machine's provider may know another address
            raise found.error
        if not isinstance(found.error, RefusedError):   # else our key isn't in its list yet: deploying adds it
            say(f"the agent on {node.name} doesn't answer ({found.error}); looking after it")
    deploying()
    try:
        return bring(link, node, inbox, say, progress, attempt, deployed=deployed)
    finally:
        if attempt is not None:
            attempt.leave()
