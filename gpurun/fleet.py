"""The driver of the reconciler: looks, asks `reconcile` what is next, carries it out, until what is wanted is so.

It owns the waiting and the records (machines.Store); the executors are the providers' (provider.Machines). Each step runs in a thread and
ends in an item of one queue, so that one machine that takes long holds up no other. What is meant is on the disk before a machine is asked
for, and each pass looks anew: whatever kills this process, the next one goes on from there.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any, Callable, NamedTuple, Sequence

from gpurun import limits
from gpurun.asking import arm_once, facts_once
from gpurun.config import Cluster
from gpurun.errors import AccountError, ConfigError, GpurunError, LinkError, NoOfferError, OfferGoneError, ProviderError, RecordError, TemporaryError, UnclearError, UnfitError
from gpurun.limits import dollars
from gpurun.link import Link
from gpurun.machines import Store
from gpurun.paths import config_dir
from gpurun.provider import Machines, Node
from gpurun.reconcile import Adopt, Create, Desired, Destroy, Forget, Machine, Observed, Prepare, keep, note, reconcile
from gpurun.screen import Screen

FOR_ALL = (AccountError, NoOfferError, ConfigError, UnfitError, RecordError)   # what no other machine would help against
THREADS = 80                         # a machine that is logged in to holds one for minutes, and another one may be ended meanwhile


class Pace(NamedTuple):
    """How long is waited for what, in seconds."""

    look_s: float = 5.0              # between two looks: a listing may be asked for once a second, by all that use the key
    ending_s: float = 1.5
    create_s: float = 5.0            # between two requests for machines: they are limited to one in 4.5 s
    offer_s: float = 5.0             # after an offer that was gone
    failed_s: float = 10.0           # after a machine that failed
    later_s: float = 15.0            # after a request for one that the provider didn't take for now
    again_s: tuple[float, ...] = (3.0, 6.0, 12.0, 30.0)   # after a request to end one that wasn't taken
    patience_s: float = 600.0        # for the end of machines
    room_s: float = 600.0            # for outputs that have no room here, before their machine goes all the same
    in_flight_s: float = 60.0        # for requests that are on their way when it is stopped
    refused_s: float = 30.0          # after this long of being refused by the account, more of it is of no use
    tell_s: float = 60.0             # a machine that is at the same thing is mentioned again after so long


PACE = Pace()
HOSTS_S = 0.5                        # between two looks at hosts of one's own
OFFERS = 20                          # that were gone, in a row, before a node is given up


class Stopped(GpurunError):
    """The operator stopped it."""

    exit_code = 130


class Fleet:
    """The machines of one cluster, or of one run. `prefix`: of their labels."""

    def __init__(self, cluster: Cluster, machines: Machines, store: Store, prefix: str, screen: Screen, link: Callable[[], Link], operator: str,
                 about: dict[str, Any] | None = None) -> None:
        """`about`: facts for the records of machines that are made."""
        self.cluster, self.machines, self.store, self.prefix, self.screen = cluster, machines, store, prefix, screen
        self._link, self._operator, self._about = link, operator, about or {}
        self.stopping = threading.Event()    # set by a signal: what is being brought up is ended again
        self.giving_up = threading.Event()   # set by more of them: what couldn't be ended so far is left
        self.seen: tuple[Any, ...] = ()      # at the last look, of all this operator's clusters and runs
        self._pool, self._looks = ThreadPoolExecutor(THREADS, "machine"), ThreadPoolExecutor(1, "look")
        self._outcomes: "SimpleQueue[tuple[Any, Any, GpurunError | None]]" = SimpleQueue()
        self._busy: dict[str, Any] = {}      # label: the step that is being carried out
        self._ending = False                 # nothing is asked for any more
        self._making: set[int] = set()       # indices for which a machine is being asked for
        self._held: dict[int, float] = {}
        self._failures: dict[int, list[str]] = {}
        self._gone_offers: dict[int, int] = {}
        self._faults: list[str] = []
        self._said: dict[str, tuple[str, float]] = {}
        self._unknown, self._unknown_since, self._refused_since = "", 0.0, 0.0   # why nothing is known just now
        self._blamed: set[str] = set()       # machines whose failure has been counted
        self._later_since = 0.0              # since when requests for machines aren't taken
        self._next_create = 0.0
        self._full_since = 0.0               # since when as many are ready as were wanted

    def beside(self, prefix: str) -> "Fleet":
        """The machines of another cluster or run, by the same account."""
        return Fleet(self.cluster, self.machines, self.store, prefix, self.screen, self._link, self._operator, self._about)

    def ask(self, node: Node) -> dict[str, Any]:
        """What its agent says of itself; LinkError when it doesn't answer."""
        endpoint = node.known_endpoint()
        if endpoint is None:
            raise LinkError(f"{node.name}: no agent is known there")
        return facts_once(self._link(), node, endpoint, self._operator)

    # ---- looking -------------------------------------------------------------------------------------------------------------

    def all(self) -> list[Machine]:
        return self.store.all(self.prefix)

    def look(self) -> Observed:
        """What is there now, put into the records."""
        records = tuple(self.all())
        asked = self.store.clock()
        try:
            seen, complete = self._ask_provider()
            self._refused_since = 0.0
            self._unknown = "" if complete else self._unknown or ("it was left before its end was sure" if self.giving_up.is_set() else
                                                                  "the list of machines can't be had, or not whole")
        except ProviderError as error:
            if isinstance(error, AccountError) and not records:
                raise                         # nothing was rented, and nothing can be
            if isinstance(error, AccountError):
                self._refused_since = self._refused_since or time.monotonic()
            seen, complete = [], False
            if not self._unknown:
                self.screen.warn(f"nothing is known of the machines just now: {error}")
            self._unknown = str(error)
        self.seen = tuple(seen)
        self._unknown_since = (self._unknown_since or time.monotonic()) if self._unknown else 0.0
        now = self.store.clock()
        held = {**self._held, **dict.fromkeys(self._making, float("inf"))}
        observed = note(Observed(records, tuple(seen), complete, tuple(self._busy), held, asked), now)
        for before, after in zip(records, observed.machines):
            if after != before:
                self.store.change(before.label, **{name: value for name, value in after._asdict().items()
                                                   if name != "facts" and value != getattr(before, name)})
        return observed

    def _ask_provider(self) -> tuple[list[Any], bool]:
        """In a thread: a call may take half a minute, and the screen and a signal don't wait for it."""
        asked = self._looks.submit(self.machines.look)
        while not asked.done():
            self.screen.live_tick()
            if self.giving_up.is_set():
                return [], False
            wait([asked], timeout=0.1)
        return asked.result()

    def adopt(self) -> Observed:
        """Looks, and gives a record to each machine of ours that has none."""
        observed = self.look()
        steps = reconcile(observed, Desired(len(observed.machines) + len(observed.seen), "", self.prefix), self.store.clock())
        for step in [step for step in steps if isinstance(step, Adopt)]:
            self._start(step)
        return self.look() if any(isinstance(step, Adopt) for step in steps) else observed

    def spent(self) -> float:
        """Dollars, by all machines since the cluster was last brought up."""
        return limits.spent(self.all(), self.store.spent(self.prefix), self.store.clock())

    def end_of(self, machine: Machine) -> limits.End:
        """When it must be ended."""
        return limits.end_of(machine, self.all(), self.cluster.limits, self.store.spent(self.prefix), self.store.clock())

    # ---- up ------------------------------------------------------------------------------------------------------------------

    def up(self, count: int) -> list[Machine]:
        """Until `count` machines are ready; they are returned. What this call has made and what isn't ready is ended again when that can't be, with
        the reason as the error, and when it is stopped."""
        before = {one.label for one in self.all() if one.ready}
        if not self.all():
            self.store.begin_spending(self.prefix)
        try:
            self._recheck()
            ready = self._bring_up(count)
            self._arm_all(ready)
            if self.stopping.is_set():
                raise Stopped("stopped by the operator")
            return ready
        except GpurunError as error:
            self._in_flight()
            made = [one.label for one in self.all() if one.label not in before or not one.wanted]
            if made:
                self.screen.say(f"ending {_counted(len(made))} again: {error}" if not isinstance(error, Stopped) else f"ending {_counted(len(made))} again")
                left = self.down(made, str(error).splitlines()[0])
                if left:
                    raise LeftOver(str(error), self.words(left)) from None
            raise

    def _recheck(self) -> None:
        """One that stands may have lost its agent: then it is made ready again. A doubt counts from when it is seen to last."""
        for one in self.all():
            self.store.change(one.label, doubted=0.0)
        ready = [one for one in self.all() if one.ready and one.wanted]

        def silent(one: Machine) -> bool:
            try:
                self.ask(self.machines.node(one))
                return False
            except GpurunError:
                return True

        for one, lost in zip(ready, self._pool.map(silent, ready)):
            if lost:
                self.store.change(one.label, ready=False, unready=self.store.clock())

    def _bring_up(self, count: int) -> list[Machine]:
        desired = Desired(count, self.machines.shape(), self.prefix, **self.machines.times)
        ours: set[str] = set()               # what we have seen as wanted: if that changes and we didn't do it, another gpurun has its say
        while True:
            observed = self.look()
            self._check(observed, ours)
            kept = keep(observed.machines, count)
            ready = [one for one in kept.values() if one.ready and one.shape in ("", desired.shape)]
            if self._enough(observed, ready, count):
                self.screen.progress(count, count, "nodes")
                return sorted(ready, key=lambda one: one.index)
            ours = {one.label for one in kept.values()}
            for step in reconcile(observed, desired, self.store.clock()):
                if not isinstance(step, Create) or self._in_turn():
                    self._start(step)
            self._tell(observed)
            self.screen.progress(len(ready), count, "nodes")
            self._wait(PACE.look_s, self.stopping)

    def _in_turn(self) -> bool:
        """Whether the next machine may be asked for by now."""
        now = time.monotonic()
        if self.machines.paid and now < self._next_create:
            return False
        self._next_create = now + PACE.create_s
        return True

    def _enough(self, observed: Observed, ready: Sequence[Machine], count: int) -> bool:
        """All are ready, and none is left of those that failed, or not for want of patience."""
        if len(ready) < count or not observed.complete:
            self._full_since = 0.0
            return False
        self._full_since = self._full_since or time.monotonic()
        rest = [one for one in observed.machines if one not in ready]
        if rest and time.monotonic() - self._full_since > PACE.patience_s:
            for one in self._leave(rest):
                self.screen.warn(f"machine {one.id} could not be ended: {one.facts['stuck']}")
            return True
        return not rest

    def _check(self, observed: Observed, ours: set[str]) -> None:
        if self.stopping.is_set():
            raise Stopped("stopped by the operator")
        if self._unknown_since and time.monotonic() - self._unknown_since > PACE.patience_s:
            raise ProviderError(f"for {PACE.patience_s:.0f} s nothing could be learned of the machines: {self._unknown}")
        for one in observed.machines:
            if one.label in ours and not one.wanted and not one.failed and not one.facts.get("replaced"):
                raise GpurunError(f"{self._name(one.index)} was brought down by another gpurun; run it again if that isn't what you want")
            end = self.end_of(one)
            if end.in_s <= 0 and one.wanted:
                self.store.change(one.label, wanted=False, why=f"{end.why} is reached")
                raise GpurunError(f"{self._name(one.index)}: {end.why} is reached ({dollars(self.spent())} so far)")

    # ---- down ----------------------------------------------------------------------------------------------------------------

    def down(self, labels: Sequence[str] | None = None, why: str = "by gpurun down") -> list[Machine]:
        """Until these machines (None: all) are known to be gone; those that aren't are returned, and their records say so."""
        self._ending = True
        deadline = time.monotonic() + PACE.patience_s
        targets = set(labels) if labels is not None else None
        for one in self.all():
            if (targets is None or one.label in targets) and one.wanted:
                self.store.change(one.label, wanted=False, why=one.why or why, not_before=0.0)
        while True:
            observed = self.look()
            left = [one for one in observed.machines if targets is None or one.label in targets]
            strays = [row for row in observed.seen if row.label.startswith(self.prefix)] if targets is None else []
            going = self._making or any(isinstance(step, Destroy) for step in self._busy.values())
            if not left and not strays and not going and (targets is not None or observed.complete):
                return []
            refused = self._refused_since and time.monotonic() - self._refused_since > PACE.refused_s
            if self.giving_up.is_set():
                return self._leave(left)
            stay = 0 if targets is None else sum(one.wanted and one.label not in targets for one in observed.machines)
            desired = Desired(stay, self.machines.shape(), self.prefix, **self.machines.times)
            # What is being prepared needn't be waited for.
            ending = observed._replace(busy=tuple(label for label, step in self._busy.items() if not isinstance(step, Prepare)))
            for step in reconcile(ending, desired, self.store.clock()):
                if isinstance(step, (Destroy, Forget)) and (targets is None or step.label in targets) or isinstance(step, Adopt) and targets is None:
                    self._start(step)
            self._tell(observed)
            if time.monotonic() > deadline or refused:   # not before what there was to do was begun
                return self._leave(left)
            self.screen.live_tick()
            self._wait(PACE.ending_s, self.giving_up)

    def _leave(self, left: Sequence[Machine]) -> list[Machine]:
        """Writes down what couldn't be ended, so that every later gpurun says it."""
        for one in left:
            self.store.change(one.label, facts={"stuck": one.facts.get("problem") or self._unknown or "its end couldn't be confirmed"})
        return [one for one in map(self.store.get, (one.label for one in left)) if one is not None]

    def words(self, left: Sequence[Machine]) -> list[str]:
        """The last lines of a command that couldn't end these."""
        return [f"machine {one.id or 'labelled ' + one.label} could not be ended and may go on costing {dollars(limits.price(one))} an hour: "
                f"{one.facts.get('stuck')}. Try `gpurun down` again, or end it by hand: {self.machines.by_hand(one)}" for one in left]

    # ---- steps ---------------------------------------------------------------------------------------------------------------

    def _start(self, step: Any) -> None:
        """Carries it out, in a thread where it takes long."""
        now = self.store.clock()
        if isinstance(step, Create):
            self._making.add(step.index)
            self._in_thread(step, lambda: self._create(step))
        elif isinstance(step, Adopt):
            self.store.add(Machine(step.label, step.index, "", now, step.id, step.wanted, "" if step.wanted else "found without a record here", True,
                                   ready=not self.machines.paid, facts=dict(self._about)))   # a host that shows has an agent that answers
            if self.machines.paid:
                self.screen.say(f"{self._name(step.index)}: machine {step.id} is ours and has no record here; it is {'used' if step.wanted else 'ended'}")
        elif isinstance(step, Forget) and self._promised(step.label):
            ending = self._busy[step.label] = Destroy(step.label, self._promised(step.label), step.why)
            self._in_thread(ending, lambda: self._destroy(ending))
        elif isinstance(step, Forget):
            self._forget(step)
        elif isinstance(step, Prepare):
            self._busy[step.label] = step
            self._in_thread(step, lambda: self._prepare(step))
        else:
            self._blame(step)
            self._busy[step.label] = step
            self._in_thread(step, lambda: self._destroy(step))

    def _promised(self, label: str) -> str:
        """The id of a machine that the provider gave us and never showed: it may show later, so its end is asked for before it is forgotten."""
        machine = self.store.get(label)
        return machine.id if machine is not None and self.machines.paid and not machine.sighted and not machine.ended else ""

    def _blame(self, step: Destroy) -> None:
        """Counts the failure of a machine that was wanted. An image that can't be had, or doesn't fit the disk, fails everywhere: a second host is
        asked, since the first may have been at its registry's limit."""
        machine = self.store.get(step.label)
        if not step.fault or machine is None or not machine.wanted or step.label in self._blamed:
            return
        self._blamed.add(step.label)
        self.screen.warn(f"{self._name(machine.index)}: machine {machine.id} is of no use: {step.why}")
        if step.fault in ("image", "disk") and any(step.fault in blame for blame in self._faults):
            raise UnfitError(f"{self._name(machine.index)}: on two hosts: {step.why}. Correct `{'image' if step.fault == 'image' else 'disk_gb'}` in "
                             f"{self.cluster.path or 'the cluster file'}")
        self._faults.append(step.fault)
        self._failed(machine.index, f"machine {machine.id}: {step.why}")

    def _in_thread(self, step: Any, work: Callable[[], Any]) -> None:
        def body() -> None:
            try:
                self._outcomes.put((step, work(), None))
            except GpurunError as error:
                self._outcomes.put((step, None, error))
            except OSError as error:          # of this machine: a disk that is full, a folder that can't be written. No host is to blame
                where = f"on this machine, below {config_dir()} or in the cache of gpurun"
                self._outcomes.put((step, None, RecordError(f"{error.filename or where}: {error.strerror or error}. Set that right, and try again")))
            except Exception as error:        # of a library, whatever it was: the main thread waits for a word
                self._outcomes.put((step, None, ProviderError(f"{type(error).__name__}: {error}")))

        self._pool.submit(body)

    def _create(self, step: Create) -> None:
        facts = self.machines.pick()
        label = self.machines.label(self.prefix, step.index)
        if self.stopping.is_set():
            raise Stopped("stopped by the operator")
        machine = Machine(label, step.index, step.shape, self.store.clock(), facts={**self._about, **facts})
        if not self.store.add(machine):       # from here on it may exist, whatever happens to us
            return
        try:
            made = self.machines.create(machine, self._say(step.index), lambda name, done, total: None)
        except UnclearError as error:         # the record stays: a listing tells
            self.store.change(label, id=error.contract_id, facts={"problem": str(error)}, **({"failed": str(error)} if error.contract_id else {}))
            raise
        except GpurunError:
            self.store.drop(label)
            raise
        self.store.change(label, id=made.id, facts={**made.facts, "made": self.store.clock()})

    def _prepare(self, step: Prepare) -> None:
        machine = self.store.get(step.label)
        if machine is None:
            return
        node = self.machines.prepare(machine, self._say(machine.index), lambda name, done, total: None)
        self._arm(machine, node)
        took_s = round(self.store.clock() - machine.begun, 1)
        if self.store.change(step.label, ready=True, tries=0, facts={"ready_s": took_s}) is None:
            raise ProviderError("it was ended meanwhile")

    def _arm(self, machine: Machine, node: Node) -> None:
        """Its agent learns the limits, and that it answers is proven by it."""
        endpoint = node.cached_endpoint()
        if endpoint is None:
            raise ProviderError("its agent has ended again")
        end = self.end_of(machine)
        arm = self.machines.arm(end.in_s, end.why)
        armed = arm_once(self._link(), node, endpoint, arm, self._operator)
        if arm is None:
            return
        if not armed.able:
            self.screen.warn(f"{self._name(machine.index)} can't end itself when nobody else does ({armed.reason}): it must be ended from here")
        self.store.change(machine.label, facts={"guarded": armed.able, "ends_at": self.store.clock() + end.in_s if end.why else None})

    def keep(self, machine: Machine, node: Node, seconds: float) -> None:
        """Has its agent end it after so long, idle or not."""
        endpoint, arm = node.cached_endpoint(), self.machines.arm(min(seconds, self.end_of(machine).in_s), f"kept for {seconds:g} s after a failed run")
        if endpoint is not None and arm is not None:
            arm_once(self._link(), node, endpoint, arm._replace(idle_s=0.0), self._operator)

    def _arm_all(self, machines: Sequence[Machine]) -> None:
        """Once all are up: what they cost together decides when each must go."""
        if self.cluster.limits.max_cost is not None and len(machines) > 1:
            for machine in machines:
                self._arm(machine, self.machines.node(machine))

    def _destroy(self, step: Destroy) -> None:
        machine = self.store.get(step.label)
        if machine is None:
            return
        if step.fault == "host" and machine.facts.get("host"):
            self.store.avoid(str(machine.facts["host"]), step.why)
        self.store.change(step.label, **({} if not machine.wanted else {"why": step.why, "facts": {"replaced": True}, "wanted": False}))
        self.machines.destroy(machine, step.id)
        self.store.change(step.label, ended=self.store.clock(), tries=0, not_before=0.0)

    def _forget(self, step: Forget) -> None:
        machine = self.store.get(step.label)
        if machine is None:
            return
        now = self.store.clock()
        cost, ends_at = limits.cost(machine, now), machine.facts.get("ends_at")
        if not machine.ended and isinstance(ends_at, (int, float)) and now >= ends_at:
            step = step._replace(why="it ended itself: its limit was reached")
        self.store.drop(step.label)
        self._said.pop(step.label, None)
        if machine.sighted and self.machines.paid:
            self.screen.say(f"{self._name(machine.index)}: machine {machine.id} is gone ({step.why}); it has cost about {dollars(cost)}")
            missed = f"machine {machine.id}: {step.why}"
        elif machine.sighted:
            self.screen.say(f"{self._name(machine.index)}: its agent is stopped")
            return
        elif machine.id or machine.facts.get("problem"):
            self.screen.say(f"{self._name(machine.index)}: {step.why}" + (f" (machine {machine.id} was promised and never came)" if machine.id else ""))
            missed = f"{machine.id or 'a machine'} never came"
        else:
            return
        if machine.wanted:                    # one that is being ended is no failure, and must not keep others from their end
            self._failed(machine.index, missed)

    # ---- what comes of them ----------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float, event: threading.Event) -> None:
        """For outcomes: the first one wakes, with all others that are there, and so does the event."""
        deadline, came = time.monotonic() + (seconds if self.machines.paid else min(seconds, HOSTS_S)), False
        while True:
            try:
                step, _, error = self._outcomes.get(timeout=0.0 if came else max(0.0, min(0.2, deadline - time.monotonic())))
            except Empty:
                self.screen.live_tick()
                if came or time.monotonic() >= deadline or event.is_set():
                    return
                continue
            came = True
            self._came(step, error)

    def _came(self, step: Any, error: GpurunError | None) -> None:
        now = self.store.clock()
        if isinstance(step, Create):
            self._making.discard(step.index)
            if self._ending:
                return                        # it has a record or was refused; no refusal may keep others from their end
            if error is None:
                self._gone_offers[step.index], self._later_since = 0, 0.0
                self._tell_rented(step.index)
            elif isinstance(error, OfferGoneError):
                self._gone_offers[step.index] = self._gone_offers.get(step.index, 0) + 1
                self._held[step.index] = now + PACE.offer_s
                self.screen.say(f"{self._name(step.index)}: {error}; trying the next offer")
                if self._gone_offers[step.index] >= OFFERS:
                    raise ProviderError(f"{self._name(step.index)}: {OFFERS} offers in a row were gone when they were asked for; try again later")
            elif isinstance(error, UnclearError):
                self.screen.warn(f"{self._name(step.index)}: {error}; its list of machines will tell")
            elif isinstance(error, TemporaryError):
                self._later_since = self._later_since or time.monotonic()
                if time.monotonic() - self._later_since > PACE.patience_s:
                    raise error
                self._held[step.index] = now + PACE.later_s
                self.screen.warn(f"{self._name(step.index)}: {error}; trying again")
            elif isinstance(error, NoOfferError) and self._failures.get(step.index):
                raise NoOfferError("\n".join([f"{self._name(step.index)}: {error}. Before that:", *(f"  {one}" for one in self._failures[step.index])]))
            elif isinstance(error, (Stopped, *FOR_ALL)):
                raise error
            else:
                self._held[step.index] = now + PACE.failed_s
                self._failed(step.index, str(error), error)
            return
        self._busy.pop(step.label, None)
        if error is None:
            return
        machine = self.store.get(step.label)
        if machine is None:
            return
        if isinstance(step, Prepare):
            if not machine.wanted:
                return
            if machine.unready:               # it had been ready, so what a run has made may be on it
                raise ProviderError(f"{self._name(machine.index)} stands, but its agent can't be had: {error}. If nothing on it is of use any more: gpurun down "
                                    f"{self._name(machine.index)}")
            if isinstance(error, RecordError):
                raise error                   # ours, and not the machine's
            self.store.change(step.label, failed=str(error).splitlines()[0][:300])
            self._blamed.add(step.label)
            self.screen.warn(f"{self._name(machine.index)}: machine {machine.id} is of no use: {error}")
            self._failed(machine.index, f"machine {machine.id}: {error}", error)
            if isinstance(error, FOR_ALL):
                raise error
        else:
            tries = machine.tries + 1
            self.store.change(step.label, tries=tries, not_before=now + PACE.again_s[min(tries, len(PACE.again_s)) - 1], facts={"problem": str(error)})
            if tries in (1, 5, 20):
                self.screen.warn(f"{self._name(machine.index)}: machine {machine.id} could not be ended yet: {error}; trying again")

    def _failed(self, index: int, why: str, error: GpurunError | None = None) -> None:
        failures = self._failures.setdefault(index, [])
        failures.append(why)
        if len(failures) >= self.machines.tries:
            if len(failures) == 1:
                raise error or ProviderError(why)
            raise ProviderError(f"{self._name(index)}: {len(failures)} machines failed, so no more are tried:\n" + "\n".join(f"  {one}" for one in failures))

    def _in_flight(self) -> None:
        """Requests for machines that are on their way: what comes of them is written down before anything is ended."""
        deadline = time.monotonic() + PACE.in_flight_s
        while self._making and time.monotonic() < deadline:
            try:
                step, _, error = self._outcomes.get(timeout=0.2)
            except Empty:
                self.screen.live_tick()
                continue
            if isinstance(step, Create):
                self._making.discard(step.index)
            else:
                self._busy.pop(step.label, None)

    # ---- talk ------------------------------------------------------------------------------------------------------------------

    def _say(self, index: int) -> Callable[[str], None]:
        name = self._name(index)
        return lambda text: self.screen.say(text if text.startswith(name) else f"{name}: {text}")

    def _name(self, index: int) -> str:
        return self.machines.name(index)

    def _tell_rented(self, index: int) -> None:
        for one in self.all():
            if one.index == index and one.id and self.machines.paid:
                facts = one.facts
                self.screen.say(f"{self._name(index)}: rented machine {one.id}: {facts.get('gpus') or 1} × {facts.get('gpu') or 'GPU'}"
                                f"{' in ' + facts['place'] if facts.get('place') else ''}, {dollars(limits.price(one))}/h")

    def _tell(self, observed: Observed) -> None:
        """One line for each change of a machine; now and then one for what lasts."""
        rows = {row.id: row for row in observed.seen}
        now = time.monotonic()
        for one in self.all():
            if one.index in self._making:
                continue                      # that it was rented, and for how much, is said first
            row = rows.get(one.id)
            text = self._doing(one, row.state if row else "")
            said, at = self._said.get(one.label, ("", 0.0))
            if text and (text.partition(" (")[0] != said.partition(" (")[0] or now - at > PACE.tell_s):
                self._said[one.label] = (text, now)
                self.screen.say(f"{self._name(one.index)}: {text}")

    def _doing(self, machine: Machine, state: str) -> str:
        """What a person reads of a machine that comes or goes; "" of one that was just asked for."""
        facts = machine.facts
        if not self.machines.paid:
            return "stopping its agent" if not machine.wanted else "its agent answers" if machine.ready else ""
        if not machine.wanted:
            return f"ending machine {machine.id}" if machine.id else "ending what may have been rented"
        if machine.ready:
            return "ready" + (f" after {facts['ready_s']:.0f} s" if facts.get("ready_s") else "")
        if isinstance(self._busy.get(machine.label), Prepare) and "status" in facts:
            return "running; connecting over SSH"
        return f"{facts.get('status', state)}" + (f" ({' '.join(str(facts['message']).split())[:80]})" if facts.get("message") else "") if state else ""


class LeftOver(GpurunError):
    """Something that costs money couldn't be ended: its id, its price and how to end it by hand are the last of the message."""

    def __init__(self, message: str, words: Sequence[str]) -> None:
        super().__init__("\n".join([message, *words]))


def _counted(number: int) -> str:
    return "the machine" if number == 1 else f"{number} machines"
