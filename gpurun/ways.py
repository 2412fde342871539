"""The ways to a node's agent, and the one place that chooses: UDP (directly or by a relay), else the same streams over SSH, or on this
machine over the agent's socket.

UDP comes first, and SSH within a bounded time where nothing comes back, or where the node's agent has no iroh. What was found is kept with
what is known of the node: the next command goes over SSH at once, and UDP is tried again beside it after a while, for the one after that.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Callable, NamedTuple, Sequence

from gpurun import sockets
from gpurun.errors import GpurunError, LinkError, RefusedError, SSHError
from gpurun.link import Link
from gpurun.provider import Endpoint, Node, Progress, Say

KNOWN_S = 6.0                 # for an agent whose address we know; one that is gone answers nothing
BESIDE_S = 3.0                # after that it is looked after over SSH meanwhile
DEPLOYED_S = 4.0              # and three round trips, for one that has just said that it is up: QUIC's first packets go after 0, 1 and 3 s
RELAYED_S = 12.0              # by a relay: that must be found and logged in to, on both sides
SURE_S = 1.0                  # at least, for one that had its time before
OPEN_S = 20.0                 # for a stream over SSH
NEAR_S = 2.0                  # for the agent's socket on this machine
RETRY_S = 600.0               # UDP is tried again so long after it was found blocked


class Way(NamedTuple):
    """A connection for each ALPN that was asked for, and the agent that they lead to."""

    connections: list[Any]
    endpoint: Endpoint
    new: bool = False                         # it was just found that UDP is blocked


def by_socket(endpoint: Endpoint) -> bool:
    """Whether UDP is known to be of no use."""
    return endpoint.blocked or not endpoint.addresses


def note(way: Way, here: bool) -> str:
    """What a user should know of a way that isn't UDP, in a line; "" for one that is."""
    node, over = way.endpoint.node, "its socket" if here else "SSH"
    if not by_socket(way.endpoint):
        return ""
    if not way.endpoint.addresses:
        return f"{node}: going over {over}, as {way.endpoint.no_iroh or 'its agent has no iroh'}"
    if not way.new:
        return f"{node}: going over {over}, as no UDP got through to it"
    return (f"no UDP gets through to {node}: going over {over} ({'' if here else 'slower for bulk; '}UDP is tried again now and then). To have it, "
            "let this machine reach that UDP port of the node (`udp_port` in the cluster file fixes its number), or set `relay`")


def dial(link: Link, node: Node, endpoint: Endpoint, alpns: Sequence[bytes], timeout_s: float, over: Any = None) -> Way:
    """To an agent that should be up; nothing is deployed. By the way that is known, which isn't left. `over`: an ssh.Connection that is to be used, and
    closed in the end. LinkError, RefusedError, SSHError."""
    if over is not None or by_socket(endpoint):
        _look_at_udp(link, node, endpoint)
        return _over_socket(link, node, endpoint, alpns, over, check=True)
    return Way(_over_udp(link, node, endpoint, alpns, timeout_s), endpoint)


def bring(link: Link, node: Node, alpns: Sequence[bytes], say: Say, progress: Progress, tried: "Attempt | None" = None, udp_s: float = 0.0,
          deployed: Callable[[], None] = lambda: None) -> Way:
    """Has an agent run there, and goes to it by the way that works. `tried`: UDP, that is under way to the agent that was known. `udp_s`: at most, for
    UDP; 0 for the usual time. `deployed` is called between the two. LinkError, RefusedError, SSHError, DeployError."""
    kept: list[Any] = []
    try:
        endpoint = node.deploy(say, progress, kept.append)
        deployed()
        if by_socket(endpoint):
            _look_at_udp(link, node, endpoint)
            return _over_socket(link, node, endpoint, alpns, kept.pop() if kept else None, check=True)
        way = tried.result(0.0) if tried is not None else None
        if way is not None and way.endpoint.process == endpoint.process:
            return way
        if way is not None:
            _close(way)                       # to one that is gone by now
        usual_s = RELAYED_S if endpoint.relay != "disabled" else DEPLOYED_S + 3 * (kept[0].rtt_s if kept else 0.0)
        if tried is not None and endpoint.process == tried.endpoint.process:   # the very same agent, which didn't answer all the while
            usual_s = max(SURE_S + 3 * (kept[0].rtt_s if kept else 0.0), usual_s - tried.for_s)
        try:
            return Way(_over_udp(link, node, endpoint, alpns, min(usual_s, udp_s or usual_s)), endpoint)
        except RefusedError:
            raise
        except LinkError as error:
            if not endpoint.socket:
                raise LinkError(f"the agent runs on {node.name}, but no UDP gets through to it: {error}; and it has no socket that SSH could lead to. Let this "
                                "machine reach that UDP port of the node (`udp_port` in the cluster file fixes its number), or set `relay`.") from None
            way = _over_socket(link, node, endpoint, alpns, kept.pop() if kept else None, check=True)
            return way._replace(endpoint=blocked(node, endpoint), new=True)
    finally:
        for connection in kept:
            connection.close()


def blocked(node: Node, endpoint: Endpoint) -> Endpoint:
    """Remembers that the agent is there and no UDP gets through to it; what is known of it with that."""
    return node.remember(endpoint, blocked=True, retry_at=time.time() + RETRY_S)


class Attempt:
    """A dial over UDP to a known agent, under way in a thread of its own."""

    def __init__(self, link: Link, node: Node, endpoint: Endpoint, alpns: Sequence[bytes]) -> None:
        self.endpoint = endpoint
        self.error: GpurunError | None = None
        self._began = time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._way: Way | None = None
        self._left = False
        threading.Thread(target=self._dial, args=(link, node, alpns), name="dial", daemon=True).start()

    def _dial(self, link: Link, node: Node, alpns: Sequence[bytes]) -> None:
        try:
            way = Way(_over_udp(link, node, self.endpoint, alpns, KNOWN_S), self.endpoint)
            with self._lock:
                if not self._left:
                    self._way = way
                    return
            _close(way)
        except GpurunError as error:
            self.error = error
        except Exception as error:            # of a library, whatever it was: the other way says more
            self.error = LinkError(f"{type(error).__name__}: {error}")
        finally:
            self._ended.set()

    @property
    def for_s(self) -> float:
        return time.monotonic() - self._began

    def result(self, within_s: float) -> Way | None:
        """The way, once; None where there is none (yet)."""
        self._ended.wait(max(0.0, within_s))
        with self._lock:
            way, self._way = self._way, None
            return way

    def leave(self) -> None:
        """What comes now isn't wanted any more."""
        with self._lock:
            self._left = True
            way, self._way = self._way, None
        if way is not None:
            _close(way)


def _close(way: Way) -> None:
    for connection in way.connections:
        connection.close()


def _over_udp(link: Link, node: Node, endpoint: Endpoint, alpns: Sequence[bytes], timeout_s: float) -> list[Any]:
    """All handshakes at the same time: one round trip for all of them."""
    connections = link.dial_all(endpoint.agent_id, endpoint.addresses, alpns, timeout_s, endpoint.node, endpoint.relay_url or None)
    if endpoint.socket and (node.cluster.here or "".join(endpoint.addresses[:1]).startswith(("127.", "[::1]:"))):
        for connection in connections:
            connection.near = lambda: _near(link, endpoint)
    return connections


def _near(link: Link, endpoint: Endpoint) -> socket.socket:
    """On one machine, for bulk: the agent's socket, if it is one of this user's. LinkError, RefusedError."""
    connection = sockets.Connection(sockets.LANE_ALPN, link.id, endpoint.agent_id, endpoint.node, dial=_straight(endpoint, ours=True))
    return connection.open(NEAR_S).detach(NEAR_S)


def _over_socket(link: Link, node: Node, endpoint: Endpoint, alpns: Sequence[bytes], ssh: Any, check: bool = False) -> Way:
    """Over an ssh.Connection, which ends with the last of these connections, or straight on this machine. `check`: the first stream waits for the agent's
    word that it is the one that we mean, and takes us."""
    if not endpoint.socket:
        raise LinkError(f"the agent on {node.name} has no socket that SSH could lead to")
    if node.cluster.here:
        dial, way, closed = _straight(endpoint), "direct", lambda: None
    else:
        ssh = ssh if ssh is not None else node.log_in(lambda text: None)
        dial, way, closed = _through(ssh, endpoint), "ssh", _last_of(len(alpns), ssh.close)
    return Way([sockets.Connection(alpn, link.id, endpoint.agent_id, endpoint.node, way, dial, closed, check) for alpn in alpns], endpoint)


def _straight(endpoint: Endpoint, ours: bool = False) -> Callable[[float], socket.socket]:
    """`ours`: only to a process of this user's."""
    def dial(timeout_s: float) -> socket.socket:
        try:
            return sockets.connect(endpoint.socket, timeout_s, ours)
        except OSError as error:
            raise LinkError(f"nobody is at the agent's socket {endpoint.socket}: {error.strerror or error}") from None
    return dial


def _through(ssh: Any, endpoint: Endpoint) -> Callable[[float], Any]:
    def dial(timeout_s: float) -> Any:
        try:
            return ssh.open_socket(endpoint.socket, endpoint.join, sockets.JOINED, timeout_s)
        except SSHError as error:
            raise LinkError(str(error)) from None
    return dial


def _last_of(users: int, close: Callable[[], None]) -> Callable[[], None]:
    """To be called by each of so many; the last one closes."""
    left, lock = [users], threading.Lock()

    def closed() -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        close()
    return closed


def _look_at_udp(link: Link, node: Node, endpoint: Endpoint) -> None:
    """Whether UDP is blocked still, looked at in a thread when it is time; this command goes its way meanwhile."""
    if not endpoint.addresses or not endpoint.blocked or time.time() < endpoint.retry_at:
        return

    def look() -> None:
        from gpurun.wire import CONTROL_ALPN
        try:
            for connection in _over_udp(link, node, endpoint, [CONTROL_ALPN], RELAYED_S if endpoint.relay != "disabled" else KNOWN_S):
                connection.close()
            found = {"blocked": False, "retry_at": 0.0}
        except GpurunError:
            found = {"retry_at": time.time() + RETRY_S}
        try:
            node.remember(endpoint, **found)
        except OSError:                       # a full disk: it is looked at again
            pass

    threading.Thread(target=look, name="udp", daemon=True).start()
