"""The operator's side of the connections to one node: the control session, and transfer streams beside it.

`reach` gets them: over the addresses that are known if there are any, else by deploying the agent first. What the node says lands in
an inbox as `("said", session, message)`; when the session breaks, `("broken", session, error)` is the last word of it.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any, Callable

from gpurun import transfer, wire
from gpurun.agentfile import agent_file
from gpurun.errors import GpurunError, LinkError, RefusedError, WireError
from gpurun.link import Connection, Link, Stream
from gpurun.messages import NODE_SAYS, Hello
from gpurun.provider import Endpoint, Node, Progress
from gpurun.screen import Screen

DIAL_S = 6.0                  # for an agent whose address we know; one that is gone answers nothing, then the slower way is tried
DIAL_DEPLOYED_S = 12.0        # for one that has just said that it is up: three tries of QUIC at a lossy start, or a round trip of 3 s
SAY_S = 20.0


class Session:
    """A control session with its inbox, and the connection for transfers."""

    def __init__(self, control: Connection, data: Connection, endpoint: Endpoint, inbox: "SimpleQueue[Any]") -> None:
        self.endpoint = endpoint
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
        """"direct" or "relay"."""
        return self._control.path()

    def rtt_s(self) -> float:
        """Of the path that is in use, 0 where it isn't known (yet, or any more)."""
        return self._control.rtt_s() or 0.0

    def close(self) -> None:
        self._closed = True
        self._control.close()
        self._data.close()


def dial(link: Link, endpoint: Endpoint, inbox: "SimpleQueue[Any]", timeout_s: float) -> Session:
    """Both connections to an agent that should be up, handshakes at the same time."""
    control, data = link.dial_all(endpoint.agent_id, endpoint.addresses, [wire.CONTROL_ALPN, wire.TRANSFER_ALPN], timeout_s, endpoint.node,
                                  endpoint.relay_url or None)
    return Session(control, data, endpoint, inbox)


def current(node: Node) -> Endpoint | None:
    """What is known of the node's agent, if that is an agent of this version; else deploying decides (a busy one is used as it is)."""
    known = node.known_endpoint()
    return known if known is not None and known.agent == agent_file().hash else None


def dial_known(link: Callable[[], Link], node: Node, inbox: "SimpleQueue[Any]") -> tuple[Session | None, GpurunError | None]:
    """Only the quick way, and quietly: all that a second run needs. None and None: going there the long way says what it is."""
    try:
        known = current(node)
        return None if known is None else dial(link(), known, inbox, DIAL_S), None
    except GpurunError as error:
        return None, error
    except Exception:
        return None, None


def reach_any(link: Link, nodes: list[Node], inbox: "SimpleQueue[Any]", screen: Screen, first_error: GpurunError | None = None) -> Session:
    """A session with the first of `nodes` that can be had, the agent deployed where it must be; those before it are taken out of the list.
    `first_error`: the agent of the first one was just dialled, in vain."""
    while True:
        node, dialled = nodes[0], first_error is not None
        if dialled:
            screen.say(f"the agent on {node.name} doesn't answer ({first_error}); looking after it")
            first_error = None
        screen.phase("connect", f"to {node.name}")
        try:
            session = reach(link, node, inbox, screen.say, lambda name, done, total: screen.progress(done, total, "B", name),
                            lambda: screen.phase("deploy", f"to {node.name}"), dialled)
            screen.phase("")
            return session
        except GpurunError as error:
            if len(nodes) == 1:
                raise
            screen.warn(f"{node.name} can't be used: {error}")
            del nodes[0]


def reach(link: Link, node: Node, inbox: "SimpleQueue[Any]", say: Callable[[str], None], progress: Progress,
          deploying: Callable[[], None] = lambda: None, dialled: bool = False) -> Session:
    """A session with the node's agent, deployed first where that is needed. Raises LinkError, SSHError, DeployError. `dialled`: the
    agent that we know of was just tried, in vain."""
    known = None if dialled else current(node)
    if known is not None:
        try:
            return dial(link, known, inbox, DIAL_S)
        except RefusedError:
            pass                              # our key isn't in its list yet: deploying adds it
        except LinkError as error:
            say(f"the agent on {node.name} doesn't answer ({error}); starting it again")
    deploying()
    endpoint = node.deploy(say, progress)
    try:
        return dial(link, endpoint, inbox, DIAL_DEPLOYED_S)
    except LinkError as error:
        raise LinkError(f"the agent runs on {node.name}, but no UDP gets through to it: {error}. Let this machine reach that UDP "
                        "port of the node (`udp_port` in the cluster file fixes its number), or set `relay`.") from None
