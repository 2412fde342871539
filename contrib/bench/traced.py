"""gpurun, with the time of each message of its operator in the file that $GPURUN_BENCH_TRACE names. For roundtrips.py.

Loads nothing that gpurun wouldn't load: when the first packet leaves is a part of what is looked at.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable

from gpurun import link, session, wire
from gpurun.__main__ import main

TRACE = open(os.environ["GPURUN_BENCH_TRACE"], "a", buffering=1)


def note(text: str) -> None:
    TRACE.write(json.dumps([time.time(), text]) + "\n")


def wrap(owner: Any, name: str, before: "Callable[..., str] | None", after: "Callable[[Any], str] | None" = None) -> None:
    real = getattr(owner, name, None)
    if real is None:
        note(f"  (no {name} to be seen in this gpurun: traced.py has to learn its new name)")
        return

    def seen(*args: Any, **keys: Any) -> Any:
        if before is not None:
            note(before(*args, **keys))
        value = real(*args, **keys)
        if after is not None:
            note(after(value))
        return value

    setattr(owner, name, seen)


def frame(kind: bytes, payload: bytes) -> str:
    return f"{kind.decode(errors='replace')} {payload[:60].decode(errors='replace') if kind == b'J' else f'({len(payload)} B)'}"


wrap(link.Link, "dial_all", lambda *_, **__: "> dial", lambda made: f"< connected ({len(made)})")
wrap(link.Link, "close", lambda *_, **__: "  the link is closed here", lambda _: "  closed")
wrap(session.Session, "say", lambda _, *messages: "> " + " ".join(type(one).__name__ for one in messages))
wrap(wire, "decode", None, lambda message: f"< {type(message).__name__}")
wrap(wire.Writer, "frame", lambda _, kind, payload=b"": f"> {frame(kind, payload)}")
wrap(wire.Reader, "frame", None, lambda value: f"< {frame(*value)}")
note("  Python is up, gpurun's link is loaded")
main()
