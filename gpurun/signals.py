"""Signals while money may be at stake: between two that deal with them in their own ways nothing may be ended by one, and none may be lost.

Blocking them would not do: they are delivered to any thread, and what the handler of that moment is decides."""

from __future__ import annotations

import signal
from typing import Any, Callable, Iterable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_kept: list[int] = []


def handle(handler: Callable[[int, Any], None]) -> None:
    """From now on `handler` gets them; but what is ignored stays so: nohup, and a shell's `&` in a script, have their reasons."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def keep(numbers: Iterable[int] = ()) -> None:
    """From now on they are kept for whoever asks next, and these with them."""
    handle(lambda number, _frame: _kept.append(number))
    _kept.extend(numbers)


def kept() -> list[int]:
    """What came meanwhile; it is the caller's now."""
    numbers = _kept[:]
    del _kept[:len(numbers)]
    return numbers
