"""Which machines are there, which should be, and what is to be done next: `reconcile(observed, desired, now)` gives the plan.

Pure and level-triggered: it looks at what is and not at what changed, so that a driver may be killed at any line and the next one goes on.
A plan has at most one step for a machine, asked twice it is the same, and a machine that waits (its step failed, or is being carried out)
holds up no other. What isn't known is never taken for absent: without a complete listing nothing is created and nothing is called gone, and
a machine is ended only if it was just seen. `note` puts what a listing says into the record of a machine; the driver saves that and acts.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

# How a machine looks to its provider.
COMING, UP, DOUBTFUL, BROKEN = "coming", "up", "doubtful", "broken"


class Machine(NamedTuple):
    """The record of a machine: what was meant and what is known of it. Written before it is asked for; times are the wall clock's."""

    label: str                       # unique, ours, given to the provider with the request
    index: int = 1                   # its place among the nodes of its cluster, from 1
    shape: str = ""                  # what was asked for; "" fits whatever is wanted (of a machine that was found)
    begun: float = 0.0               # when its intent was written
    id: str = ""                     # the provider's, "" until it is known
    wanted: bool = True
    why: str = ""                    # why it isn't wanted (any more)
    sighted: bool = False            # it was in a listing once
    ready: bool = False              # its agent answered and knows the limits
    unready: float = 0.0             # when it ceased to, of one that was ready before
    failed: str = ""                 # why this machine can't be made to work
    ended: float = 0.0               # when the provider last took the request to end it
    absent: float = 0.0              # since when complete listings don't show it
    doubted: float = 0.0             # since when the provider can't say how it is
    tries: int = 0                   # of its next step, which failed
    not_before: float = 0.0          # for the next try
    facts: Dict[str, Any] = {}       # what else is known: cluster, price, GPU, where; decides nothing here


class Seen(NamedTuple):
    """A machine as its provider shows it. `fault`: whose fault it is that it is broken."""

    id: str
    label: str
    state: str = UP
    why: str = ""
    fault: str = ""


class Observed(NamedTuple):
    """`complete`: the provider was asked for all machines and answered; else `seen` are a few that were asked for one by one, or none.
    `busy`: labels of machines whose last step is still being carried out. `held`: for an index until when nothing is created there, without
    end while one is being asked for. `asked`: when the provider was, whose answer may be old by the time that it is here."""

    machines: Tuple[Machine, ...] = ()
    seen: Tuple[Seen, ...] = ()
    complete: bool = False
    busy: Tuple[str, ...] = ()
    held: Mapping[int, float] = {}
    asked: float = float("inf")


class Desired(NamedTuple):
    """So many nodes of this shape, for one cluster. Of the provider's rows those count whose label begins with `prefix`."""

    count: int = 0
    shape: str = ""
    prefix: str = ""
    settle_s: float = 90.0           # a request whose answer was lost shows in a listing within this time, or was never heard
    confirm_s: float = 6.0           # a machine that was ended has been seen to come back some seconds later
    again_s: float = 15.0            # after a request to end it that was taken, before it is asked for once more
    doubt_s: float = 120.0           # a host may be out of its provider's sight for a moment
    longest_s: float = 120.0         # that a machine waits for the next try
    ready_within_s: float = 1200.0


class Create(NamedTuple):
    index: int
    shape: str


class Adopt(NamedTuple):
    """A machine of ours that no record here knows: it gets one, wanted or not."""

    label: str
    id: str
    index: int
    wanted: bool


class Prepare(NamedTuple):
    """It runs: make its agent answer."""

    label: str


class Destroy(NamedTuple):
    label: str
    id: str
    why: str
    fault: str = ""


class Forget(NamedTuple):
    """It doesn't exist, or never did: the record goes."""

    label: str
    why: str


Step = Union[Create, Adopt, Prepare, Destroy, Forget]


def note(observed: Observed, now: float) -> Observed:
    """The same with records that say what was observed of them."""
    rows = _Rows(observed)
    return observed._replace(machines=tuple(_noted(machine, rows.of(machine), observed.complete, now) for machine in observed.machines))


def _noted(machine: Machine, row: Optional[Seen], complete: bool, now: float) -> Machine:
    if row is None:
        return machine._replace(absent=min(machine.absent or now, now)) if complete else machine
    doubted = min(machine.doubted or now, now) if row.state == DOUBTFUL else 0.0
    return machine._replace(id=row.id, sighted=True, absent=0.0, doubted=doubted, ready=machine.ready and row.state != BROKEN)


def reconcile(observed: Observed, desired: Desired, now: float) -> Tuple[Step, ...]:
    """The next step of each machine that has one. `observed.machines` have been noted already."""
    kept, rows, plan = keep(observed.machines, desired.count), _Rows(observed), []
    for machine in observed.machines:
        waits = 0 < machine.not_before - now <= desired.longest_s   # later than that is what a clock said that has been set back since
        if machine.label not in observed.busy and not waits:
            step = _next(machine, machine.label in kept, rows, observed, desired, now)
            if step is not None:
                plan.append(step)
    strays = _strays(observed, desired, len(kept))
    return tuple(plan) + strays + _creations(observed, desired, strays, now)


def keep(machines: Tuple[Machine, ...], count: int) -> Dict[str, Machine]:
    """The machines that stay: those that are wanted, `count` of them, the lowest indices first; but one that no list shows comes last."""
    wanted = sorted((machine for machine in machines if machine.wanted),
                    key=lambda machine: (machine.absent > 0, machine.index, machine.begun, machine.label))
    return {machine.label: machine for machine in wanted[:max(0, count)]}


class _Rows:
    """What was seen, to be found by label."""

    def __init__(self, observed: Observed) -> None:
        self.by_label: Dict[str, List[Seen]] = {}
        for row in sorted(observed.seen, key=lambda row: row.id):
            self.by_label.setdefault(row.label, []).append(row)

    def of(self, machine: Machine) -> Optional[Seen]:
        """The row of this machine: the one with its label and id, or while that isn't known the first with its label."""
        return next((row for row in self.by_label.get(machine.label, ()) if machine.id in ("", row.id)), None)

    def twin(self, machine: Machine) -> Optional[Seen]:
        """Another machine under its label."""
        return next((row for row in self.by_label.get(machine.label, ()) if machine.id and row.id != machine.id), None)


def _next(machine: Machine, stays: bool, rows: _Rows, observed: Observed, desired: Desired, now: float) -> Optional[Step]:
    row, twin = rows.of(machine), rows.twin(machine)
    if twin is not None:
        return Destroy(machine.label, twin.id, "a second machine under one label")
    if row is None:
        return _absent(machine, observed.complete, desired, min(now, observed.asked))
    reason, fault = _must_go(machine, row, stays, desired, now)
    if reason and machine.ended and 0 <= now - machine.ended < desired.again_s:
        return None                           # it was taken; a listing shows it for some seconds more
    if reason:
        return Destroy(machine.label, row.id, reason, fault)
    return Prepare(machine.label) if row.state == UP and not machine.ready else None


def _absent(machine: Machine, complete: bool, desired: Desired, asked: float) -> Optional[Step]:
    """No listing shows it. One that was seen or ended is gone once that is confirmed, by a listing that was asked for late enough; a young one may
    not be shown yet."""
    if not complete or not machine.absent or asked - machine.absent < desired.confirm_s:
        return None
    if machine.ended:
        return Forget(machine.label, machine.why or "ended")
    if machine.sighted:
        return Forget(machine.label, "it is gone, and not by us")
    return Forget(machine.label, "it was never made") if asked - machine.begun >= desired.settle_s else None


def _must_go(machine: Machine, row: Seen, stays: bool, desired: Desired, now: float) -> Tuple[str, str]:
    """Why it is to be ended and whose fault that is, or two empty texts."""
    if not stays:
        return machine.why or "it isn't wanted any more", ""
    if machine.failed:
        return machine.failed, "host"
    if row.state == BROKEN:
        return row.why or "it is broken", row.fault
    if machine.doubted and now - machine.doubted >= desired.doubt_s:
        return row.why or f"its provider has had no sight of it for {now - machine.doubted:.0f} s", "host"
    if machine.shape and machine.shape != desired.shape:
        return "what is wanted has changed", ""
    if not machine.ready and now - max(machine.begun, machine.unready) >= desired.ready_within_s:
        return f"it wasn't ready within {desired.ready_within_s:.0f} s" + (f" ({row.why})" if row.why else ""), "host"
    return "", ""


def _strays(observed: Observed, desired: Desired, kept: int) -> Tuple[Adopt, ...]:
    """Machines of ours that no record here knows."""
    known = {machine.label for machine in observed.machines}
    taken = {machine.index for machine in observed.machines}
    rows: Dict[str, Seen] = {}
    for row in sorted(observed.seen, key=lambda row: row.id):
        if desired.prefix and row.label.startswith(desired.prefix) and row.label not in known:
            rows.setdefault(row.label, row)
    plan = []
    for label in sorted(rows):
        index = index_of(label)
        if index < 1 or index in taken:
            index = _free(taken)
        taken.add(index)
        plan.append(Adopt(label, rows[label].id, index, kept + len(plan) < desired.count))
    return tuple(plan)


def _creations(observed: Observed, desired: Desired, strays: Tuple[Adopt, ...], now: float) -> Tuple[Step, ...]:
    """Only with a complete listing, and only as many as leave no more than were asked for, those included that are still ending."""
    if not observed.complete:
        return ()
    taken = {machine.index for machine in observed.machines} | {step.index for step in strays}
    coming = {index for index, until in observed.held.items() if until == float("inf")} - taken
    taken |= coming
    plan, index = [], 0
    for _ in range(desired.count - len(observed.machines) - len(strays) - len(coming)):
        index = next(number for number in range(index + 1, index + len(taken) + 2) if number not in taken)
        if observed.held.get(index, 0.0) <= now:
            plan.append(Create(index, desired.shape))
    return tuple(plan)


def _free(taken: Any) -> int:
    return next(number for number in range(1, len(taken) + 2) if number not in taken)


# ---- labels --------------------------------------------------------------------------------------------------------------------------

def label_for(prefix: str, index: int, nonce: str) -> str:
    """`prefix` is `gpurun-<operator>-<scope>-`; a label with it is ours and this cluster's."""
    return f"{prefix}{index}-{nonce}"


def index_of(label: str) -> int:
    """The node's place in a label of ours; 0 where it has none."""
    parts = label.split("-")
    return int(parts[-2]) if len(parts) >= 5 and parts[-2].isdecimal() and len(parts[-2]) < 6 else 0
