"""Runtime budgets: how long a job may run, and what has it looked at, told of or stopped before that. `decide(budget, elapsed, signals)`.

Pure: no clock, no disk, no process. `watch.py` looks at the logs and outputs, on the node, and carries out nothing either: it says what was
decided to who has the job. Progress is a log byte, or growth of a declared output. Times are seconds since the command was started; 0, "" and
False: not set. The budgets, by name (TABLE), and the settings that a job file may change in each of them:

    quick           hard limit after 2 min
    medium          hard limit after 30 min; told of each 5 min without progress
    unknown         first-health check after 1 min, review after 15 min, hard limit after 60 min
    long_compute    nothing: it is submitted, and nobody waits for it

    hard_s          hard_limit_s      it is stopped when it has run for so long
    progress_s      progress_every_s  told when there was no progress for so long, and again each time that it was as long once more
    health_s        health_check_s    once, after so long: stopped if no process of it is left, or if it has written nothing (expect_output)
    review_s        soft_review_s     once, after so long: its user is asked, or told where nobody can be asked; it goes on meanwhile
    silence_s       abort_silence_s   stopped when there was no progress for so long
    abort_pattern   abort_pattern     stopped when a line of its logs matches (Python's `re`, searched anywhere in the line), whenever that is
    expect_output   expect_output     the health check wants to see progress
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

from gpurun.errors import ConfigError, WireError

GO_ON, TELL, REVIEW, STOP = "go_on", "tell", "review", "stop"

SHOWN = 120                   # of a line of a log, in a reason
SOONEST_S = 0.05              # between two looks: a limit that is a rounding error away isn't worth a spin
LATEST_S = 60.0               # with nothing to wait for: what a run's state says about its silence is as old as that at most
LATE_S = 30.0                 # for a node to say that it has ended what is over its hard limit
AWAKE_S = 1.0                 # a longer time between two looks of who looks several times a second was sleep
PATTERN_S = 1.0               # a line that has a job stopped is seen so soon
FINE = 20                     # a silence is measured to this part of its limit
FINEST_S, COARSEST_S = 0.5, 10.0
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Budget(NamedTuple):
    name: str = ""
    hard_s: float = 0.0
    progress_s: float = 0.0
    health_s: float = 0.0
    review_s: float = 0.0
    silence_s: float = 0.0
    abort_pattern: str = ""
    expect_output: bool = False


TABLE = {one.name: one for one in (
    Budget("quick", hard_s=120.0),
    Budget("medium", hard_s=1800.0, progress_s=300.0),
    Budget("unknown", hard_s=3600.0, health_s=60.0, review_s=900.0),
    Budget("long_compute"),
)}


class Signals(NamedTuple):
    """What is known about a job at one moment."""

    silent_s: float = 0.0             # since the last progress, or since the start; never more than what was really looked at
    produced: bool = False            # there was progress at all, or nobody can tell
    processes: Optional[int] = None   # of the job; None: not known
    matched: str = ""                 # the first line that the abort pattern has matched
    checked: bool = False             # the health check was made
    reviewed: bool = False            # the review was had
    told_s: float = -1.0              # elapsed when silence was last told of; -1: never


class Decision(NamedTuple):
    """`act`: one of GO_ON, TELL, REVIEW, STOP. `text`: what the user reads; of a STOP, the limit that ended the run ("stopped, <text>")."""

    act: str = GO_ON
    text: str = ""


def budget(name: str = "", **settings: Any) -> Budget:
    """The named one ("": none of them) with its settings changed, those that aren't None. A default of the table gives way to a hard limit
    that was set: a review that it would overtake is had at half of it, a health check that it would overtake is none."""
    if name and name not in TABLE:
        raise ConfigError(f"there is no runtime budget {name!r}: it is one of {', '.join(TABLE)}")
    given = {key: value for key, value in settings.items() if value is not None}
    whole = (TABLE[name] if name else Budget())._replace(**given)
    for key, type_of, ok in _FIELDS:
        if not ok(getattr(whole, key)):
            raise ConfigError(f"{key} of a runtime budget is {type_of}, not {getattr(whole, key)!r}")
    if whole.hard_s and "review_s" not in given and whole.review_s >= whole.hard_s:
        whole = whole._replace(review_s=whole.hard_s / 2)
    if whole.hard_s and "health_s" not in given and whole.health_s >= whole.hard_s:
        whole = whole._replace(health_s=0.0)
    return whole


def from_wire(fields: Dict[str, Any]) -> Budget:
    """What an operator sent (`Budget._asdict()`; {}: none). Keys of a later version are ignored, values that can't be are a WireError."""
    if not isinstance(fields, dict):
        raise WireError(f"a budget must be an object; this {type(fields).__name__} isn't")
    known = {}
    for key, type_of, ok in _FIELDS:
        if key in fields:
            if not ok(fields[key]):
                raise WireError(f"budget.{key} must be {type_of}; this {type(fields[key]).__name__} isn't")
            known[key] = fields[key]
    return Budget(**known)


def _seconds(value: Any) -> bool:
    """Bounded, so that no sum of them is ever infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 63


_FIELDS = tuple(
    (key, "text", lambda value: isinstance(value, str)) if isinstance(default, str) else
    (key, "true or false", lambda value: isinstance(value, bool)) if isinstance(default, bool) else
    (key, "a number of seconds, 0 or more", _seconds)
    for key, default in Budget()._asdict().items())


# ---- the rules -----------------------------------------------------------------------------------------------------------------

def decide(budget: Budget, elapsed_s: float, signals: Signals) -> Decision:
    """What the first rule that has something to say says; else it goes on."""
    for rule in RULES:
        decision = rule(budget, elapsed_s, signals)
        if decision is not None:
            return decision
    return Decision()


def hard_limit(budget: Budget) -> str:
    """What is said when the hard limit has ended the job; "" where there is none."""
    return f"the hard limit of {_limit(budget.hard_s)}{_named(budget)} was reached" if budget.hard_s else ""


def _hard(budget: Budget, elapsed_s: float, signals: Signals) -> Optional[Decision]:
    return Decision(STOP, hard_limit(budget)) if budget.hard_s and elapsed_s >= budget.hard_s else None


def _abort(budget: Budget, elapsed_s: float, signals: Signals) -> Optional[Decision]:
    if not budget.abort_pattern or not signals.matched:
        return None
    return Decision(STOP, f"its log matched the abort pattern: {shown(signals.matched)}")


def _silence(budget: Budget, elapsed_s: float, signals: Signals) -> Optional[Decision]:
    if not budget.silence_s or signals.silent_s < budget.silence_s:
        return None
    return Decision(STOP, f"the limit of {_limit(budget.silence_s)} without progress was reached: {NO_GROWTH}")


def _health(budget: Budget, elapsed_s: float, signals: Signals) -> Optional[Decision]:
    if not budget.health_s or signals.checked or elapsed_s < budget.health_s:
        return None
    when = f"the health check after {_limit(budget.health_s)}{_named(budget)}"
    if signals.processes is not None and signals.processes <= 0:
        return Decision(STOP, f"{when} found no process of it")
    if budget.expect_output and not signals.produced:
        return Decision(STOP, f"{when} found no output, where output is expected: {NO_GROWTH}")
    return None


def _review(budget: Budget, elapsed_s: float, signals: Signals) -> Optional[Decision]:
    if not budget.review_s or signals.reviewed or elapsed_s < budget.review_s:
        return None
    last = f"its last progress was {_about(signals.silent_s)} ago" if signals.produced else "it has made no progress yet"
    end = f"the hard limit comes in {_about(budget.hard_s - elapsed_s + 0.5)}" if budget.hard_s else "it has no hard limit"
    return Decision(REVIEW, f"it has run for {_about(elapsed_s)}{_named(budget)}; {last}; {end}")


def _progress(budget: Budget, elapsed_s: float, signals: Signals) -> Optional[Decision]:
    if not budget.progress_s or signals.silent_s < budget.progress_s or 0 <= signals.told_s and elapsed_s - signals.told_s < budget.progress_s:
        return None
    return Decision(TELL, f"no progress for {_about(signals.silent_s)}: {NO_GROWTH}")


Rule = Callable[[Budget, float, Signals], Optional[Decision]]
# In this order: what ends the job before what is only said about it, and the limit that nothing moves before all.
RULES: Sequence[Rule] = (_hard, _abort, _silence, _health, _review, _progress)
NO_GROWTH = "neither its log nor a declared output has grown"


def next_s(budget: Budget, elapsed_s: float, signals: Signals) -> float:
    """In how many seconds to look again, at the latest; always within SOONEST_S and LATEST_S."""
    waits = [LATEST_S]
    if budget.hard_s:
        waits.append(budget.hard_s - elapsed_s)
    if budget.health_s and not signals.checked:
        waits.append(budget.health_s - elapsed_s)
    if budget.review_s and not signals.reviewed:
        waits.append(budget.review_s - elapsed_s)
    if budget.abort_pattern:
        waits.append(PATTERN_S)
    for limit_s in (budget.silence_s, budget.progress_s):
        if limit_s:                   # progress is dated by the look that found it, so looks must be close to each other
            waits.append(max(FINEST_S, min(COARSEST_S, limit_s / FINE)))
    if budget.silence_s:
        waits.append(budget.silence_s - signals.silent_s)
    if budget.progress_s:
        told_ago_s = elapsed_s - signals.told_s if signals.told_s >= 0 else math.inf
        waits.append(max(budget.progress_s - signals.silent_s, budget.progress_s - told_ago_s))
    return max(SOONEST_S, min(waits))


class Late:
    """The operator's own look at the hard limit, should its node's not work. A node ends what is over it by itself, TERM and KILL included, so
    that is waited for; and what a process that slept has not heard yet is no reason: only time in which it listened counts."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.since = math.inf             # when the phase that the limit is for began, on the clock of `look`
        self._late_s, self._looked = 0.0, math.inf

    def look(self, now: float, listening: bool) -> str:
        """Several times a second; why the job must be ended, or ""."""
        late = bool(self._budget.hard_s) and listening and now - self.since > self._budget.hard_s
        self._late_s, self._looked = self._late_s + max(0.0, min(now - self._looked, AWAKE_S)) if late else 0.0, now
        return hard_limit(self._budget) if self._late_s > LATE_S else ""


# ---- words ---------------------------------------------------------------------------------------------------------------------

def _named(budget: Budget) -> str:
    return f" (budget {budget.name})" if budget.name else ""


def _limit(seconds: float) -> str:
    """A limit, exactly as it was set: `120 s`, `30 min`, `1 h`, `90.5 s`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds > 120 and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.15g} s"


def _about(seconds: float) -> str:
    """How long something lasted, without what nobody reads: `35 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    seconds = max(0.0, seconds) if seconds < 1 << 63 else float(1 << 63)   # anything that isn't a number is a long time
    for size, unit, part, of_it in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= 2 * size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {of_it}" if rest else "")
    return f"{int(seconds // 60)} min" if seconds > 120 else f"{int(seconds)} s"


def shown(line: str) -> str:
    """A line of a job's log as one short line that no terminal takes for more."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in COLOURS.sub("", line)).split())
    return text if len(text) <= SHOWN else text[:SHOWN - 1] + "…"
