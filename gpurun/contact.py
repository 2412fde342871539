"""Contact with one node, kept through losses: watches the session, and connects again when it is gone.

`membership` decides; here is what it asks for: pings, the line for a loss and the one for the return, new sessions in a thread. The direct way is
tried first, then the indirect one: SSH (or, for this machine, its processes), which looks after the agent and starts it again. All methods
but the thread's run in the owner's thread; the thread's news lands in the owner's inbox as `("reconnected", None, session)`, `("vouched", …)`
and `("unreached", None, error)`, and the owner hands them to the methods of those names.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any, Callable

from gpurun import membership
from gpurun.errors import GpurunError, LinkError, RefusedError
from gpurun.link import Link
from gpurun.messages import Ping
from gpurun.provider import Node
from gpurun.screen import Screen
from gpurun.session import Session, dial

RETRY_S = (0.5, 1.0, 2.0, 5.0)
REFUSALS = 2                  # by an agent that was told each time to take us
REDEPLOY_AFTER = 1            # failed dials before the indirect way is gone
DIAL_AGAIN_S = 10.0


class Contact:
    """`lost(reason)`: every way was silent for too long. `hopeless(reason)`: the node is there and will never serve us."""

    def __init__(self, node: Node, link: Callable[[], Link], inbox: "SimpleQueue[Any]", screen: Screen, lost_after_s: float,
                 lost: Callable[[str], None], hopeless: Callable[[str], None]) -> None:
        self.node = node
        self.session: Session | None = None
        self._link, self._inbox, self._screen, self._lost, self._hopeless = link, inbox, screen, lost, hopeless
        self._member = membership.Member(time.monotonic(), membership.Limits(lost_after_s=lost_after_s))
        self._refusals = 0

    def connected(self, session: Session) -> None:
        self.session = session
        self._see(membership.Connected(time.monotonic()))

    def say(self, *messages: Any) -> None:
        """A broken session is no error here: its own thread reports it, and the next one begins with all that is needed."""
        if self.session is not None:
            try:
                self.session.say(*messages)
            except LinkError:
                pass

    def heard(self) -> None:
        """The node said something over the session of now."""
        self._see(membership.Heard(time.monotonic()))

    def tick(self) -> None:
        """Several times a second."""
        self._see(membership.Tick(time.monotonic(), self.session.rtt_s() if self.session is not None else 0.0))

    def hurry(self, patience_s: float) -> None:
        """Something has to be delivered, and only for so long."""
        self._see(membership.Hurry(time.monotonic(), patience_s))

    def broken(self, error: GpurunError) -> None:
        """The session of now is of no use any more."""
        if isinstance(error, RefusedError):   # its list of operators was lost; a deploy puts our key there
            self._refusals += 1
            if self._refusals > REFUSALS:
                self._hopeless(f"{error}; putting it there over SSH didn't help")
                return
        self._see(membership.Broken(time.monotonic(), str(error)))

    def drop(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def reconnected(self, session: Session) -> None:
        self.connected(session)

    def vouched(self) -> None:
        """The machine is there, and its agent too, which was started if need was."""
        self._see(membership.Indirect(time.monotonic(), True))

    def unreached(self, error: GpurunError) -> None:
        """A try failed. An agent that refuses us and a host that doesn't let us in to tell it: nothing more will come."""
        self._see(membership.Indirect(time.monotonic(), False, str(error)))
        if self._refusals and not isinstance(error, LinkError):
            self._hopeless(f"{self.node.name} refused this operator, and the agent there could not be told of it: {error}")

    def _see(self, event: Any) -> None:
        """One step of the detector, and what it asks for."""
        self._member, actions = membership.step(self._member, event)
        for action in actions:
            if action == membership.PING:
                self._ping()
            elif action == membership.SAY_SUSPECT:
                self._screen.warn(f"{self.node.name} can't be reached ({self._member.reason}); the run goes on there, connecting again")
            elif action == membership.SAY_BACK:
                self._screen.say(f"{self.node.name} is back after {self._member.back_after_s:.0f} s")
            elif action == membership.DROP:
                self.drop()
                threading.Thread(target=self._reconnect, name="reconnect", daemon=True).start()
            elif action == membership.LOST:
                self._lost(self._member.reason)

    def _ping(self) -> None:
        if self.node.kind == "local" and self.node.cached_endpoint() is None:
            self.broken(LinkError("its agent has ended"))   # here that can be seen, long before QUIC's own time is up
        else:
            self.say(Ping(1))

    def _reconnect(self) -> None:
        """Tries until it works or the process ends."""
        node, attempt = self.node, REDEPLOY_AFTER if self._refusals else 0
        while True:
            time.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            try:
                endpoint = node.cached_endpoint()
                if endpoint is None or attempt >= REDEPLOY_AFTER:
                    endpoint = node.deploy(lambda text: None, lambda name, done, total: None)
                    self._inbox.put(("vouched", None, None))
                self._inbox.put(("reconnected", None, dial(self._link(), endpoint, self._inbox, DIAL_AGAIN_S)))
                return
            except (GpurunError, OSError) as error:
                attempt += 1
                self._inbox.put(("unreached", None, error if isinstance(error, GpurunError) else LinkError(str(error.strerror or error))))
