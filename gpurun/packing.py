"""Compression that pays: which bytes of a transfer go packed, and the packing.

Packed bytes are one stream a direction (a C frame holds a block of it, flushed to its end), so that many small files share what was
learnt of the ones before. Two methods: "deflate" (raw, zlib's; every Python has it) and "zstd" where both sides have it (Python 3.14, or
its `backports.zstd`); the receiver names what it can undo, the sender what it uses.

Nobody knows a link's rate beforehand, so the sender looks at itself: while it mostly waits for the link, the link is what is slow, and
what it took meanwhile is its rate. `best` then weighs: raw bytes go at the link's rate; packed ones at the link's rate over what is left of
them, but no faster than this machine packs. So a fast link gets raw bytes and a slow one dense ones. Until there is a measurement the
round trip decides: a near link is taken to be faster than any packing, a far one to have 100 Mbit/s. On one machine, or where nothing is
known of the way, nothing is packed: a sender that waits there waits for the other side's disk. A file whose sample doesn't shrink goes
raw whatever the link.
"""

from __future__ import annotations

import time
import zlib
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from gpurun.errors import WireError

try:
    from compression import zstd as _zstd               # Python 3.14
except ImportError:
    try:
        from backports import zstd as _zstd             # the same for older ones
    except ImportError:
        _zstd = None

BLOCK = 512 << 10            # of unpacked bytes in a C frame, at most: what a peer can make us hold
HERE_S = 0.001               # a round trip below this is this machine or the next one: who waits there waits for a disk, and a core is missed
NEAR_S = 0.005               # and one below this a LAN
ASSUMED_BYTES_S = 12.5e6     # of a far link, until it has been measured
GAIN = 1.1                   # packing must be so much faster than going raw: it costs a core
WAITS = 0.5                  # a sender that waits this share of its time is held up by the link
IDLES = 0.1                  # and one that waits less isn't
LOOK_S = 0.25
LOOK_BYTES = 1 << 20
PROBE_BYTES = 16 << 20       # went packed without a wait (more than any buffer between us takes unseen): is the link faster than the packing?
PROBE_AGAIN_BYTES = 64 << 20     # the same for a link that has been measured once; a look costs a quarter of a second
SAMPLED = 64 << 10           # a block of at least this size is tried on a small piece first
SAMPLE = 16 << 10
POOR = 0.9                   # what shrinks to no less than this goes raw
RAW_BYTES = 8 << 20          # after a poor sample, before the next one
RAW_FILES = 15               # of small files, which are too small for a sample: so many go raw after two that didn't shrink
TELLING = 512                # a file of fewer bytes says nothing of those that follow
RAW = 0                      # the level that means: not at all
FAST = float("inf")


class Way(NamedTuple):
    """One way to send: at a level of a method; how many bytes a second it takes in, and to what part of themselves they shrink."""

    level: int
    bytes_s: float
    ratio: float


# What a core does with text, about; replaced by what is measured. Dense first: on a slow link it is ahead from the first byte on.
_WAYS = {"deflate": (Way(1, 80e6, 0.40), Way(4, 55e6, 0.34)), "zstd": (Way(1, 250e6, 0.36), Way(3, 150e6, 0.32))}


def known() -> List[str]:
    """The methods that this Python can undo, the best first."""
    return (["zstd"] if _zstd is not None else []) + ["deflate"]


def chosen(offered: Any) -> str:
    """The best method of those that the other side says it can undo; "" for none (an older peer says nothing)."""
    if not isinstance(offered, list):
        return ""
    return next((method for method in known() if method in offered), "")


def best(link_bytes_s: float, ways: Sequence[Way]) -> int:
    """The level at which a link of this rate takes the most; RAW unless that is clearly more than raw bytes."""
    level, most = RAW, link_bytes_s * GAIN
    for way in ways:
        rate = min(way.bytes_s, link_bytes_s / way.ratio)
        if rate > most:
            level, most = way.level, rate
    return level


class Packer:
    """Packs the blocks of one direction of one stream where that pays.

    `sent()` is (bytes that were written to the link, seconds that writing waited), since the stream began; `rate()` is what the link
    itself knows of its rate, in bytes a second, or None.
    """

    def __init__(self, method: str, rtt_s: Optional[float], sent: Callable[[], Any], rate: Callable[[], Optional[float]] = lambda: None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._method, self._sent, self._rate, self._clock = method, sent, rate, clock
        self._ways = list(_WAYS[method])
        self._never = rtt_s is None or rtt_s < HERE_S
        self._link = FAST if rtt_s is None or rtt_s < NEAR_S else rate() or ASSUMED_BYTES_S
        self._measured = False
        self._level = best(self._link, self._ways)
        self._packing: Any = None                # the compressor that is at work, and its level
        self._packs_at = RAW
        self._raw_left = 0                       # bytes that go unseen: a sample was poor
        self._raw_files = self._poor_files = 0   # small files that go unseen, since so many in a row didn't shrink
        self._sampled = False
        self._looked_at, (self._looked_sent, self._looked_waited) = clock(), sent()
        self._unwaited = 0                       # bytes that were written packed since the sender last waited

    @property
    def packs(self) -> bool:
        """Whether it does, as things are."""
        return self._level != RAW

    def begin(self) -> None:
        """The next block is another file's: a poor sample says nothing of it."""
        self._raw_left, self._sampled = 0, False

    def pack(self, block: bytes) -> Optional[bytes]:
        """The block packed, at most BLOCK bytes of it; None: it goes as it is."""
        if self._never:
            return None
        self._look()
        if self._level == RAW or not block:
            return None
        if self._raw_left > 0:
            self._raw_left -= len(block)
            return None
        if not self._sampled and len(block) < SAMPLED and self._raw_files > 0:
            self._raw_files -= 1
            return None
        if not self._sampled and len(block) >= SAMPLED:
            middle = len(block) // 2
            if len(zlib.compress(block[middle:middle + SAMPLE], 1)) >= POOR * min(SAMPLE, len(block) - middle):
                self._raw_left = RAW_BYTES - len(block)
                return None
        self._sampled = True
        began = self._clock()
        packed = self._packed(block)
        self._learn(len(block), len(packed), self._clock() - began)
        return packed

    def _packed(self, block: bytes) -> bytes:
        if self._method == "zstd":
            if self._packing is None or self._packs_at != self._level:
                ended = self._packing.flush(_zstd.ZstdCompressor.FLUSH_FRAME) if self._packing is not None else b""
                self._packing, self._packs_at = _zstd.ZstdCompressor(self._level), self._level
                return ended + self._packing.compress(block, _zstd.ZstdCompressor.FLUSH_BLOCK)
            return self._packing.compress(block, _zstd.ZstdCompressor.FLUSH_BLOCK)
        if self._packing is None or self._packs_at != self._level:
            # What was flushed ends at a whole byte, so that another compressor may go on there: the receiver doesn't notice.
            self._packing, self._packs_at = zlib.compressobj(self._level, zlib.DEFLATED, -15, 9), self._level
        return self._packing.compress(block) + self._packing.flush(zlib.Z_SYNC_FLUSH)

    def _learn(self, size: int, packed: int, took_s: float) -> None:
        """What was measured counts by its size: a tiny file says little."""
        weight = min(1.0, size / (4 * BLOCK))
        for at, way in enumerate(self._ways):
            if way.level == self._level:
                bytes_s = size / max(took_s, 1e-9)
                self._ways[at] = Way(way.level, way.bytes_s + (bytes_s - way.bytes_s) * weight,
                                     max(0.01, way.ratio + (packed / size - way.ratio) * weight))
        if packed >= POOR * size and size >= SAMPLED:
            self._raw_left = RAW_BYTES
            self._sampled = False
        elif size >= TELLING:
            self._poor_files = self._poor_files + 1 if packed >= POOR * size else 0
            self._raw_files = RAW_FILES if self._poor_files > 1 else 0

    def _look(self) -> None:
        """Now and then: has sending waited for the link, and what did that take?"""
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return
        sent, waited = self._sent()
        written, waits = sent - self._looked_sent, (waited - self._looked_waited) / (now - self._looked_at)
        if written < LOOK_BYTES and waits < WAITS:
            return
        if waits >= WAITS:
            self._link, self._measured, self._unwaited = max(1.0, self._rate() or written / (now - self._looked_at)), True, 0
        elif waits <= IDLES and self._level != RAW:
            self._unwaited += written
            if self._unwaited >= (PROBE_AGAIN_BYTES if self._measured else PROBE_BYTES):
                self._link, self._unwaited = FAST, 0     # until raw bytes wait for it, which measures it
        self._level = best(self._link, self._ways)
        self._looked_at, self._looked_sent, self._looked_waited = now, sent, waited


class Unpacker:
    """Undoes what a Packer of the other side did, and gives out no more than BLOCK bytes a frame, whatever it is sent."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._unpacking: Any = self._fresh()

    def _fresh(self) -> Any:
        return _zstd.ZstdDecompressor() if self._method == "zstd" else zlib.decompressobj(-15)

    def unpack(self, packed: bytes) -> bytes:
        """WireError for what nobody packed, or for more than one block."""
        try:
            data = self._unpacked(packed)
        except (zlib.error, ValueError, EOFError, getattr(_zstd, "ZstdError", zlib.error)) as error:
            raise WireError(f"packed bytes that aren't: {error}") from None
        if len(data) > BLOCK:
            raise WireError(f"a frame of packed bytes that holds more than {BLOCK} of them")
        return data

    def _unpacked(self, packed: bytes) -> bytes:
        """No more than a byte too much of it."""
        if self._method == "deflate":
            data: bytes = self._unpacking.decompress(packed, BLOCK + 1)
            if self._unpacking.eof:
                raise WireError("packed bytes that end, which no sender's do")
            return data
        parts, size = [], 0
        while True:
            if self._unpacking.eof:                      # the sender goes on at another level
                packed, self._unpacking = self._unpacking.unused_data, self._fresh()
            parts.append(self._unpacking.decompress(packed, BLOCK + 1 - size))
            size += len(parts[-1])
            if size > BLOCK or not self._unpacking.eof or not self._unpacking.unused_data:
                return b"".join(parts)
