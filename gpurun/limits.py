"""What machines cost and when they must be ended: pure sums over their records. Times are seconds, the wall clock's; money is US dollars.

A machine costs its price from the moment that it was asked for, whatever state it is in: that is never less than what its provider bills
for time and disk. Traffic isn't in it. Two limits have a moment: `max_hours` of each machine, and `max_cost` of all machines of a cluster
together, those that have been ended since it was last brought up included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, NamedTuple, Sequence

from gpurun.reconcile import Machine

if TYPE_CHECKING:
    from gpurun.config import Limits

HOUR_S = 3600.0


class End(NamedTuple):
    """When a machine must be ended and by which limit; `in_s` is infinite where none has a moment."""

    in_s: float = float("inf")
    why: str = ""


def price(machine: Machine) -> float:
    """Dollars an hour; 0 for a machine that costs nothing, or was never made as far as we know."""
    value = machine.facts.get("price_per_hour")
    return float(value) if machine.id and isinstance(value, (int, float)) else 0.0


def cost(machine: Machine, now: float) -> float:
    """What it has cost until now, or until it was ended."""
    return price(machine) * max(0.0, (machine.ended or now) - machine.begun) / HOUR_S


def spent(machines: Iterable[Machine], before: float, now: float) -> float:
    """What a cluster has cost: `before` by machines that are gone."""
    return before + sum(cost(machine, now) for machine in machines)


def end_of(machine: Machine, machines: Sequence[Machine], limits: Limits, before: float, now: float) -> End:
    """When this one of a cluster's `machines` must be ended."""
    ends = [End()]
    if limits.max_hours is not None:
        ends.append(End(max(0.0, machine.begun + limits.max_hours * HOUR_S - now), f"max_hours {limits.max_hours:g}"))
    rate = sum(price(one) for one in machines if not one.ended)
    if limits.max_cost is not None and rate > 0:
        left = limits.max_cost - spent(machines, before, now)
        ends.append(End(max(0.0, left / rate * HOUR_S), f"max_cost {dollars(limits.max_cost)}"))
    return min(ends)


def dollars(amount: float) -> str:
    """`$1.25`; small amounts keep what they are made of."""
    amount = max(amount, 0.0001) if amount > 0 else amount   # not nothing
    return f"${amount:.2f}" if amount >= 0.995 or amount == 0 else f"${amount:.3f}" if amount >= 0.0995 else f"${amount:.4f}"
