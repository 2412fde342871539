"""Contact with one node, kept through losses: watches the session, and connects again when it is gone.

`membership` decides; here is what it asks for: pings, the line for a loss and the one for the return, new sessions by threads. The direct way is
tried first, then the indirect one beside it: SSH (or, for this machine, its processes), which looks after the agent and starts it again, and by
which the run goes on where no UDP gets through. All methods but the threads' run in the owner's thread; the threads' news lands in the owner's inbox as `("reconnected", None, session)`,
`("vouched", …)`, `("unreached", None, error)` and `("gone", None, reason)`, and the owner hands them to `connected` and the methods of those names.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any, Callable

from gpurun import membership
from gpurun.errors import GpurunError, LinkError, MachineGoneError, RefusedError
from gpurun.link import Link
from gpurun.messages import Notice, Ping, Sample
from gpurun.provider import Node
from gpurun.screen import Screen
from gpurun.session import Session, bring, dial
from gpurun.ways import by_socket

RETRY_S = (0.5, 1.0, 2.0, 5.0)
REFUSALS = 2                  # by an agent that was told each time to take us
DIAL_AGAIN_S = 4.0            # and three round trips: QUIC sends its first packet after 0, 1 and 3 s, and then too seldom
DIAL_LEAST_S = 2.0
DIRECT_PAUSE_S = 1.0
INDIRECT_AFTER_S = 10.0       # a login may ask somebody for a code, so a short loss must do without
INDIRECT_AT_ONCE_S = 60.0     # with less patience than this, that wait would leave no time to ask on the other way
LOOK_S = 1.0
VAIN = 10                     # times in a row; with the pauses between them a minute
GONE_TOLD = 10                # times, a second apart, before the provider is asked again whether the machine is gone


class Contact:
    """`lost(reason, gone)`: every way was silent for too long, or the machine is gone for good. `hopeless(reason)`: the node is there and will never serve us."""

    def __init__(self, node: Node, link: Callable[[], Link], inbox: "SimpleQueue[Any]", screen: Screen, lost_after_s: float,
                 lost: Callable[[str, bool], None], hopeless: Callable[[str], None]) -> None:
        self.node = node
        self.session: Session | None = None
        self._link, self._inbox, self._screen, self._lost, self._hopeless = link, inbox, screen, lost, hopeless
        self._member = membership.Member(time.monotonic(), membership.Limits(lost_after_s=lost_after_s))
        self._lost_after_s = lost_after_s
        self._refusals = 0
        self._rtt_s = 0.0                     # as it was last
        self._noted = ""                      # what was said of the way that is in use
        self._answered = False                # something has come over the session of now
        self._vouched, self._in_vain = False, 0   # the machine answered, and no session has come of it (yet); so often in a row
        self._over = threading.Event()        # nobody wants to know of this node any more
        self._looked_after = not node.rented  # its provider is asked from the first session on

    def connected(self, session: Session) -> None:
        self.session = session
        if session.note and session.note != self._noted:
            self._screen.say(session.note)
        self._noted, self._answered = session.note, False
        self._see(membership.Connected(time.monotonic()))
        if not self._looked_after:
            self._looked_after = True
            threading.Thread(target=self._look_after, name="provider", daemon=True).start()

    def _look_after(self) -> None:
        """What its provider and its records say of a rented machine: that it is gone, that a limit is reached."""
        reached, gone, told = "", "", 0
        while not self._over.wait(LOOK_S):
            if gone and told % GONE_TOLD:     # a machine that still answers may do so no more in a second
                self._inbox.put(("gone", None, gone))
                told += 1
                continue
            try:
                gone, limit = self.node.trouble()
            except Exception:                 # of a library, whatever it was: not known just now
                continue
            if limit and limit != reached:
                self._inbox.put(("reached", None, limit))
                reached = limit
            if gone:
                self._inbox.put(("gone", None, gone))
                told += 1

    def close(self) -> None:
        self._over.set()
        self.drop()

    def say(self, *messages: Any) -> None:
        """A broken session is no error here: its own thread reports it, and the next one begins with all that is needed."""
        if self.session is not None:
            try:
                self.session.say(*messages)
            except LinkError:
                pass

    def heard(self, message: Any) -> None:
        """The node said something over the session of now. Its first word there answers ours, and each step of the run what we sent; what it says by
        itself now and then answers nothing."""
        self._in_vain, self._vouched = 0, False
        self._see(membership.Heard(time.monotonic(), not self._answered or not isinstance(message, (Sample, Notice))))
        self._answered = True

    def tick(self) -> None:
        """Several times a second."""
        if self.session is not None:
            self._rtt_s = self.session.rtt_s() or self._rtt_s
        self._see(membership.Tick(time.monotonic(), self._rtt_s))

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

    def vouched(self, _nothing: None = None) -> None:
        """The machine is there, and its agent too, which was started if need was. Not if nothing ever comes of it: what is there then isn't our agent."""
        self._vouched = True
        if self._in_vain < VAIN:
            self._see(membership.Indirect(time.monotonic(), True))

    def gone(self, reason: str) -> None:
        """Its provider says that the machine doesn't exist any more."""
        self._see(membership.Gone(time.monotonic(), reason))

    def unreached(self, error: GpurunError) -> None:
        """A try failed. An agent that refuses us and a host that doesn't let us in to tell it: nothing more will come."""
        self._in_vain, self._vouched = self._in_vain + self._vouched, False
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
                self._seek()
            elif action == membership.LOST:
                self._lost(self._member.reason, isinstance(event, membership.Gone))

    def _ping(self) -> None:
        if self.node.cluster.here and self.node.cached_endpoint() is None:
            self.broken(LinkError("its agent has ended"))   # here that can be seen, long before QUIC's own time is up
        else:
            self.say(Ping(1))

    def _seek(self) -> None:
        """Looks for the node until there is a session or the process ends, on both ways at once: one that is blocked holds up no other. An agent
        that refuses us must be told to take us before it is asked again."""
        over, lock = threading.Event(), threading.Lock()
        known = self.node.cached_endpoint()
        by_ssh = known is None or by_socket(known)   # then the direct way is none
        at_once = self._refusals or by_ssh or self._lost_after_s < INDIRECT_AT_ONCE_S
        ways = [(True, RETRY_S[0] if at_once else RETRY_S[0] + INDIRECT_AFTER_S)]
        if not self._refusals and not by_ssh:
            ways.append((False, RETRY_S[0]))
        for indirect, first_s in ways:
            threading.Thread(target=self._try, args=(indirect, first_s, over, lock), name="reconnect", daemon=True).start()

    def _try(self, indirect: bool, first_s: float, over: threading.Event, lock: threading.Lock) -> None:
        """One way, again and again. Short patience makes short tries: the node must have its say several times before it is spent."""
        node, tries, pause_s = self.node, 0, first_s
        dial_s = (min(DIAL_AGAIN_S, max(self._lost_after_s / 5, DIAL_LEAST_S)) if indirect else DIAL_AGAIN_S) + min(3 * self._rtt_s, 10.0)

        def tell(kind: str, item: Any) -> bool:
            """Puts news into the inbox, unless the other way was faster."""
            with lock:
                if over.is_set():
                    return False
                if kind == "reconnected":
                    over.set()
                self._inbox.put((kind, None, item))
                return True

        while not over.wait(pause_s):
            try:
                endpoint = node.cached_endpoint()
                session = None
                if indirect:
                    session = bring(self._link(), node, self._inbox, lambda text: None, lambda name, done, total: None, udp_s=dial_s,
                                    deployed=lambda: tell("vouched", None))
                elif endpoint is not None and not by_socket(endpoint):
                    session = dial(self._link(), node, endpoint, self._inbox, dial_s)
                if session is not None:
                    if not tell("reconnected", session):
                        session.close()
                    return
            except MachineGoneError as error:
                tell("gone", str(error))
                return
            except GpurunError as error:
                tell("unreached", error)
            except Exception as error:        # of a library, whatever it was: a way that is given up would never be tried again
                tell("unreached", LinkError(f"{type(error).__name__}: {error}"))
            pause_s = min(RETRY_S[min(tries, len(RETRY_S) - 1)], self._lost_after_s / 10 if indirect else DIRECT_PAUSE_S)
            tries += 1
