"""gpurun, with what its operator did in the file that $COUNTS names: round trips, bytes, connections, files hashed, peak memory. For test_counts.py.

A round trip is counted when what the operator writes may depend on what it has read since it last wrote. The handshake is one, and so is the goodbye
if its acknowledgement came before the end. On a link so long that all of a flight has left before any answer comes, these are what a run waits for.
With $LANES a transfer that goes on for a while has so many connections, whatever they bring.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from gpurun import lanes, link, manifest
from gpurun.__main__ import main

counts: dict[str, Any] = {"trips": 0, "wrote": 0, "read": 0, "connections": 0, "hashed": 0, "most_lanes": 1}
lock, read_since = threading.Lock(), False


def before(owner: Any, name: str, note: Any) -> None:
    real = getattr(owner, name)

    def noted(*args: Any, **keys: Any) -> Any:
        with lock:
            note(*args, **keys)
        return real(*args, **keys)

    setattr(owner, name, noted)


def dials(_link: Any, _peer_id: str, _addresses: Any, alpns: Any, *_: Any, **__: Any) -> None:
    global read_since
    counts["trips"] += 1
    counts["connections"] += len(alpns)
    read_since = True


def writes(_stream: Any, data: bytes, _timeout_s: float) -> None:
    global read_since
    if data.startswith(b'{"type":"Ping"'):    # nobody waits for that one
        return
    counts["wrote"] += len(data)
    if read_since:
        counts["trips"] += 1
        read_since = False


def adds(bundle: Any, number: int, *_: Any, **__: Any) -> None:
    counts["connections"] += number not in (0, lanes.NEAR)    # the agent's own socket is none
    counts["most_lanes"] = max(counts["most_lanes"], bundle.lanes + 1)


def hashes(_path: str) -> None:
    counts["hashed"] += 1


def ends(_code: int) -> None:
    with open("/proc/self/status") as stream:
        counts["peak_kib"] = int(stream.read().partition("VmHWM:")[2].split()[0])
    with open(os.environ["COUNTS"], "w") as out:
        json.dump(counts, out)


real_read, real_call = link.Stream.read, link._Loop.call


def read(*args: Any, **keys: Any) -> bytes:
    global read_since
    data = real_read(*args, **keys)
    with lock:
        counts["read"] += len(data)
        read_since = read_since or not data.startswith((b'{"type":"Pong"', b'{"type":"Sample"')) and b'"early":true' not in data
    return data                               # those come while more is sent, and nobody waits for them


def call(loop: Any, work: Any, timeout_s: float, what: str) -> Any:
    value = real_call(loop, work, timeout_s, what)
    counts["trips"] += what == "closing the link"
    return value


link.Stream.read, link._Loop.call = read, call
before(link.Link, "dial_all", dials)
before(link.Stream, "write", writes)
before(lanes.Bundle, "add", adds)
before(manifest, "hash_file", hashes)
before(os, "_exit", ends)                     # so ends every command of gpurun's
if os.environ.get("LANES"):
    lanes.TICK_S = 0.02
    lanes.Growth.look = lambda self, *_: int(os.environ["LANES"])
main()
