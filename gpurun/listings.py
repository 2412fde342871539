"""A listing as its difference to one that the other side has: of 10,000 entries with 5 changed, five lines go.

Both are in the order of `manifest.walk`, so what they share comes in the same order. A difference is lines: `=<skip> <count>` leaves out so many lines
of the old listing and takes the next ones; any other line is one of the new listing. Nobody has to trust it: the new listing's hash is known.
"""

from __future__ import annotations

import itertools
import re
from typing import Dict, Iterable, Iterator, Optional

from gpurun import manifest
from gpurun.errors import WireError

LINES_AT_ONCE = 500
_RUN = re.compile(rb"=(\d{1,9}) (\d{1,9})").fullmatch


def lines(data: bytes) -> Iterator[bytes]:
    """With their line feeds, one after the other: a list of 100,000 would take twice the memory of the listing."""
    at = 0
    while at < len(data):
        end = data.find(b"\n", at) + 1 or len(data)
        yield data[at:end]
        at = end


def difference(old: Dict[int, int], new: bytes) -> Iterator[bytes]:
    """The parts of what makes `new` of a listing whose lines' numbers are in `old`, by their hash. (Two lines of one hash would make another
    listing of it, which the other side refuses.)"""
    position = count = 0
    skip, gathered = 0, []
    for line in itertools.chain(lines(new), (b"",)):
        number = old.get(hash(line), -1) if line else -1
        if count and number != position:
            gathered.append(b"=%d %d\n" % (skip, count))
            count = 0
        if count:
            count, position = count + 1, position + 1
        elif number >= position:
            skip, count, position = number - position, 1, number + 1
        else:
            gathered.append(line)
        if len(gathered) >= LINES_AT_ONCE:
            yield b"".join(gathered)
            gathered = []
    yield b"".join(gathered)


def whole(parts: Iterable[bytes], old: Iterator[bytes]) -> Iterator[bytes]:
    """The parts of the listing that a difference, which comes in `parts`, makes of the lines of `old`."""
    rest = b""
    for part in parts:
        *came, rest = (rest + part).split(b"\n")
        if len(rest) > manifest.MAX_LINE:
            raise WireError(f"a line of the listing is longer than {manifest.MAX_LINE} bytes")
        for line in came:
            if not line.startswith(b"="):
                yield line + b"\n"
                continue
            run = _RUN(line)
            if run is None:
                raise WireError("a line of the listing that is neither an entry nor a run of old ones")
            skip, count = int(run[1]), int(run[2])
            next(itertools.islice(old, skip, skip), None)
            while count:
                taken = list(itertools.islice(old, min(count, LINES_AT_ONCE)))
                if not taken:
                    raise WireError("the listing takes more of the old one than there is")
                count -= len(taken)
                yield b"".join(taken)
    if rest:
        raise WireError("the listing ends in the middle of a line")


def lines_of(path: str) -> Optional[Iterator[bytes]]:
    """Those of the listing in a file; None if it can't be read."""
    try:
        stream = open(path, "rb")
    except OSError:
        return None
    return iter(stream)
