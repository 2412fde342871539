"""Several connections under one stream, for links on which one connection's congestion window is too small.

QUIC's window collapses at every lost packet: at 100 ms and 1 % loss one connection makes 2 Mbit/s, sixty-four make 37. So a `Bundle` is
one stream, bytes in order both ways, over one or more lanes: bidirectional streams, each on a connection of its own. The bytes are cut
into chunks, each lane takes the next one when it has room, the other side puts them in order. A lane that breaks, or stands still while
others move, gives its chunks to them; the stream breaks with its last lane. How many lanes there are decides the side that dialled
(`Growth`): more while that makes it faster, no more than that, and one on a link where one is enough.

On one machine there is a nearer way than a connection, a socket of the peer's. As a lane (NEAR) it takes all that is sent from then on.

On the wire a lane begins with HEAD: the bundle's id (16 bytes) and the lane's number. Then frames both ways: one byte of kind, eight of
a number, four of a length.

    D offset length, the bytes     a chunk; its sender has more waiting. d: a chunk, and nothing more just now
    N offset length, the bytes     as D, to be acknowledged at once
    F length                       the stream is so long
    A count                        so many D, d, N and F have come whole over this lane
    G offset                       bytes up to there may be under way
    E                              over NEAR: what ends now is meant to end. A process that is killed ends its sockets too
    X                              from the side that dialled this lane: it is used no more, and ends when all on it is acknowledged
    S                              nothing more is read here
    W                              all of it has come, up to its end

Nothing here knows iroh: a lane's stream has `read(n)`, `read_exact(n)`, `write_all(data)`, `finish()`, `reset(code)` and `stop(code)`, all
coroutines, as a Bundle has but for the second. All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import socket
import struct
from typing import Any, Awaitable, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from gpurun.errors import LinkError

HEAD = struct.Struct(">16sB")
FRAME = struct.Struct(">cQI")
READ_BYTES = 256 << 10        # asked for at once; iroh clears a buffer of this size first, and returns what has arrived, mostly less
WINDOW = 12 << 20             # under way at most, and kept here out of order: 1 Gbit/s at 100 ms takes as much
BUFFER = 1 << 20              # of a lane that is a socket
QUEUE = 512 << 10             # taken from the writer ahead of the lanes
CHUNK, CHUNK_LEAST = 512 << 10, 8 << 10
CHUNK_S = 0.1                 # a chunk is what its lane takes in this time: the one that all others wait for is never far
ROOM, ROOM_LEAST, ROOM_MOST = 64 << 10, 16 << 10, 8 << 20   # what may be under way on one lane: at first, and then twice its rate by its trip
ROOM_S = 0.05                 # added to the trip: an end that is busy answers later
ACK_BYTES = 1 << 20
ACK_S = 0.02                  # and half a round trip: an acknowledgement that nobody waits for waits so long for company
STILL_S = 3.0                 # and eight trips: a lane without a sign for so long, while others move, is given up
SURE_BYTES = 2 << 20          # a rate that fewer bytes made says little
MOST = 64                     # lanes: beyond that nothing was gained anywhere
GREW = 1.2                    # more lanes are kept if the rate is so many times what it was, at two looks: one alone is noise on a link with a queue
GREW_SURELY = 3.0             # for this one look is enough
FELL = 2                      # a rate that is so many times less than before the last trial is that of another link
TIMES, TIMES_LOSSY = 4, 16    # so many times as many are tried; where each lane's window is no more than LOSSY_BYTES
LOSSY_BYTES = 64 << 10        # windows of a link without loss don't stop there
TRIAL_S = 2.0                 # and ten round trips: for dialling and for windows to open
COLLAPSED = 16                # a rate that is so much less than it was, look after look, begins again with one lane
HOLD_S, HOLD_MOST_S = 8.0, 60.0   # after a trial that brought nothing
TICK_S = 0.2                  # and two round trips: between two looks at the rate
LATE_S = 0.3                  # and two trips: what is under way for so long goes a second time over a lane that has nothing else to do
OVERDUE_S = 0.6               # over one that has as well
LATE_BYTES = 256 << 10        # no further behind what all others wait for: at 1 % loss half of all was sent twice, and that much slower it was
NEAR = 255                    # the number of the lane that is a socket on this machine
NEAR_S = 0.005                # a round trip below this is a network on which one lane is enough
BUSY = 0.7                    # of what moved said that more was waiting


class Known:
    """What the streams to one peer have learnt of the way there: so many lanes were worth having; the shortest round trip."""

    lanes = 1
    rtt_s = float("inf")


Dial = Callable[[int], Awaitable[Tuple[Any, Callable[[], None], bytes]]]


class Growth:
    """How many lanes are worth having, from the rate that they make. Pure: `look` is told what was, and says how many there should be."""

    def __init__(self, most: int = MOST, known: Optional[Known] = None) -> None:
        """`most`: never more lanes. What is `known` already is tried first, and what this one learns is left there."""
        self.lanes = 1
        self._most, self._known = max(1, most), known or Known()
        self._rate = self._best = 0.0         # of the last look; the highest one
        self._recent: Deque[float] = collections.deque(maxlen=4)   # of the looks since there are so many lanes
        self._fewer, self._before = 0, 0.0    # lanes before the trial that goes on (0: there is none), and their rate
        self._hold_s, self._until = HOLD_S, 0.0

    def look(self, now: float, busy: bool, rate: float, rtt_s: float) -> int:
        """`rate`: bytes a second since the last look. `busy`: there was always more to send."""
        self._known.rtt_s = min(self._known.rtt_s, rtt_s)       # on a machine that is busy itself it is long for another reason
        if not busy or self._known.rtt_s < NEAR_S:
            self._rate = 0.0
            return self.lanes
        last, self._rate = self._rate, rate
        self._recent.append(rate)
        self._best = max(self._best, rate)
        if self.lanes > 1 and len(self._recent) > 2 and max(self._recent) * COLLAPSED < self._best:
            self.lanes, self._fewer, self._best, self._until = 1, 0, rate, now + self._hold_s   # another link than it was: all of them fill its queue
            self._known.lanes = 1
            self._recent.clear()
            return self.lanes
        lossy = rate * rtt_s < self.lanes * LOSSY_BYTES
        if lossy and len(self._recent) == 4 and sum(self._recent) / 4 * FELL < self._before and self.lanes < self._most:
            self._try(self._fewer or self.lanes, TIMES_LOSSY, now, rtt_s)   # packets are lost by now: of that the rate before knew nothing
        elif self._fewer and (rate >= self._before * GREW_SURELY or min(last, rate) >= self._before * GREW):
            self._fewer, self._hold_s, self._until = 0, HOLD_S, now
            self._known.lanes = self.lanes
            if not lossy:
                return self.lanes             # and as soon as it grows no more by itself, on
        elif self._fewer and now > self._until:
            self.lanes, self._fewer, self._until = self._fewer, 0, now + self._hold_s
            self._known.lanes, self._hold_s = self.lanes, min(2 * self._hold_s, HOLD_MOST_S)
        elif rate > last * GREW:
            return self.lanes                 # its windows open by themselves
        if not self._fewer and now >= self._until and self.lanes < self._most:
            self._try(self.lanes, TIMES_LOSSY if lossy else TIMES, now, rtt_s)
        return self.lanes

    def _try(self, fewer: int, times: int, now: float, rtt_s: float) -> None:
        """So many times as many lanes, for a while."""
        self._fewer, self._before, self._until = fewer, max(self._recent), now + TRIAL_S + 10 * rtt_s
        self._recent.clear()
        self.lanes = min(self._most, max(self.lanes * times, self._known.lanes))


class _Chunk(NamedTuple):
    offset: int
    data: Any                                 # a memoryview
    sent_at: float


class _Lane:
    """One of a bundle's streams: what is under way on it, and what it can do."""

    def __init__(self, stream: Any, close: Callable[[], None], says_end: bool) -> None:
        self.stream, self.close = stream, close
        self.says_end, self.said_end = says_end, False
        self.due: List[bytes] = []            # control frames
        self.flying: Deque[_Chunk] = collections.deque()   # sent and not acknowledged, in their order
        self.flying_bytes = self.since_now = 0
        self.acknowledged = 0
        self.room, self.rate, self.trip_s = float(ROOM), 0.0, 0.0
        self.span_from, self.span_bytes, self.sure_bytes = 0.0, 0, 0
        self.sign_at = 0.0                    # when it last gave a sign of life
        self.came = self.told = self.came_bytes = 0   # chunks that came whole, those that were acknowledged, bytes between
        self.ack_due: Optional[asyncio.TimerHandle] = None
        self.retired = self.ended = False     # used no more; the other side has ended it
        self.wake = asyncio.Event()
        self.tasks: "List[asyncio.Task[None]]" = []

    def sent(self, chunk: _Chunk) -> None:
        if not self.flying:
            self.span_from, self.span_bytes, self.sign_at = chunk.sent_at, 0, chunk.sent_at
        self.flying.append(chunk)
        self.flying_bytes += len(chunk.data)

    def heard_of(self, count: int, now: float, waiting: bool) -> List[_Chunk]:
        """So many chunks are there in all; those that weren't known to be. With nothing waiting, how long it took says nothing of the lane."""
        if not self.acknowledged <= count <= self.acknowledged + len(self.flying):
            raise LinkError("more was acknowledged than was sent")
        chunks = [self.flying.popleft() for _ in range(count - self.acknowledged)]
        size, sent_at = sum(len(chunk.data) for chunk in chunks), chunks[-1].sent_at if chunks else now
        self.acknowledged = count
        self.flying_bytes -= size
        self.span_bytes += size
        self.sign_at = now
        if size:
            trip_s = max(now - sent_at, 1e-4)
            self.trip_s = min(self.trip_s, trip_s) if self.trip_s else trip_s
            span_s = max(now - self.span_from, 1e-4)
            if waiting and span_s >= self.trip_s:   # else it is the end of a burst, and seems faster than it is
                rate = self.span_bytes / span_s
                self.rate = max(rate, (self.rate + rate) / 2)
                self.room = min(max(self.room / 2, 2 * self.rate * (self.trip_s + ROOM_S) + ROOM_LEAST), ROOM_MOST)
                self.sure_bytes += self.span_bytes
                self.span_from, self.span_bytes = now, 0
        return chunks


class Bundle:
    """One stream over its lanes. To its user it is both halves of a bidirectional stream of iroh's."""

    def __init__(self, broken: Callable[[BaseException], LinkError], rtt_s: Callable[[], float],
                 dial: Optional[Dial] = None, growth: Optional[Growth] = None, near: Optional[Dial] = None) -> None:
        """`broken` makes the error of the last lane's. `dial(number)`: a new lane's stream, what closes its connection, and its HEAD;
        only on the side that decides about lanes, with `growth`; `near` dials NEAR."""
        self._broken, self._rtt_s, self._dial, self._growth = broken, rtt_s, dial, growth
        self._loop = asyncio.get_event_loop()
        self._lanes: Dict[int, _Lane] = {}
        self._last_number = 0
        self._near = near                     # until it was tried
        self._error: Optional[LinkError] = None
        self._wakers: "List[asyncio.Future[None]]" = []         # of the stream's own reader and writer
        self._dialling = 0
        self._tasks: "set[asyncio.Future[Any]]" = set()
        self._watching = False
        self.over = asyncio.Event()           # no lane is left
        # out: every byte that isn't acknowledged is in the queue or on one lane
        self._queue: List[Tuple[int, int, Any]] = []            # (offset, a number of its own, memoryview), the lowest first
        self._numbered = 0
        self._queued = self._written = 0
        self._allowed = WINDOW
        self._final = self._final_sent = False                  # no more is written; F has gone
        self._deaf = self._there = False      # the other side reads no more; it has all of it
        self._doubled: Dict[int, float] = {}  # when the chunks at these offsets went once more
        self._landed: Dict[int, int] = {}     # and so many bytes of them have come by one way or the other
        # in
        self._early: Dict[int, Any] = {}      # by offset, what came before its turn
        self._early_at: List[int] = []        # the same offsets, the lowest first
        self._came = 0                        # in order, up to here
        self._ready: Deque[Any] = collections.deque()
        self._taken = self._granted = 0
        self._ends_at = -1
        self._stopped = False
        self._moved = self._waiting = 0       # bytes since the last look; those that said that more was waiting

    def send(self) -> "Bundle":
        return self

    def recv(self) -> "Bundle":
        return self

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def rate(self) -> Optional[float]:
        """Bytes a second that the lanes take together; None while too little was sent to say."""
        lanes = list(self._lanes.values())
        return sum(lane.rate for lane in lanes) if sum(lane.sure_bytes for lane in lanes) >= SURE_BYTES else None

    # ---- as a stream ---------------------------------------------------------------------------------------------------------

    async def read(self, size: int) -> bytes:
        """Some of what has come, at most `size` bytes; b"" at the end."""
        while not self._ready:
            if self._ends_at == self._came:
                return b""
            if self._error is not None:
                raise self._error
            await self._change()
        part = self._ready.popleft()
        if len(part) > size:
            self._ready.appendleft(memoryview(part)[size:])
            part = part[:size]
        self._taken += len(part)
        if self._taken - self._granted >= WINDOW // 4:
            self._granted = self._taken
            self._say(b"G", self._granted + WINDOW)
        return part if isinstance(part, bytes) else bytes(part)

    async def write_all(self, data: bytes) -> None:
        if self._final:
            raise LinkError("the stream was ended already")
        self._raise()
        if data:
            self._enqueue(self._written, memoryview(data))
            self._written += len(data)
            self._wake()
        while self._queued > QUEUE:
            await self._change()
            self._raise()

    async def finish(self) -> None:
        """Nothing more will be written. Returns when all is on its way."""
        self._final = True
        self._wake()
        while not self._final_sent and not self._deaf:
            if self._error is not None:
                raise self._error
            await self._change()

    async def stop(self, _code: int) -> None:
        """Nothing more is read."""
        if not self._stopped and self._ends_at != self._came:
            self._say(b"S", 0)
        self._stopped = True
        self._ready.clear()
        self._early, self._early_at = {}, []
        self._wake()

    async def reset(self, _code: int) -> None:
        """Gives it up, both ways, at once."""
        if self._settled():
            return
        self._fail(LinkError("the stream was given up"))
        for lane in list(self._lanes.values()):
            await _give_up(lane.stream)
            self._end(lane)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._deaf:
            raise LinkError("the other side stopped reading")

    def _enqueue(self, offset: int, data: Any) -> None:
        self._numbered += 1
        heapq.heappush(self._queue, (offset, self._numbered, data))
        self._queued += len(data)

    async def _change(self) -> None:
        waker = self._loop.create_future()
        self._wakers.append(waker)
        await waker

    def _wake_user(self) -> None:
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            if not waker.done():
                waker.set_result(None)

    def _wake(self) -> None:
        self._wake_user()
        for lane in self._lanes.values():
            lane.wake.set()

    def _settled(self) -> bool:
        """Whether nothing is left to be done, on this side."""
        out = self._deaf or self._there or self._final_sent and not self._queue and not any(lane.flying for lane in self._lanes.values())
        return out and (self._stopped or self._ends_at == self._came)

    # ---- lanes ---------------------------------------------------------------------------------------------------------------

    def add(self, number: int, stream: Any, close: Callable[[], None] = lambda: None, head: bytes = b"") -> None:
        """One more lane. `head`: what is to be said on it first, by the side that dialled."""
        if self._error is not None or self.over.is_set():       # it came too late
            self._task(_give_up(stream))
            close()
            return
        lane = _Lane(stream, close, number == NEAR)
        if head:
            lane.due.append(head)
        self._lanes[number] = lane
        if number != NEAR:
            self._last_number = max(self._last_number, number)
        lane.tasks = [self._task(self._feed(lane)), self._task(self._hear(lane))]

    def _task(self, work: Awaitable[Any]) -> "asyncio.Future[Any]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)                 # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return task

    def _say(self, kind: bytes, number: int) -> None:
        """Something about all of them, over each: one that nothing gets through may not be known as such for half a minute."""
        for lane in self._lanes.values():
            if not lane.retired and not lane.ended:
                lane.due.append(FRAME.pack(kind, number, 0))
                lane.wake.set()

    async def _feed(self, lane: _Lane) -> None:
        """Everything that goes over one lane."""
        try:
            while True:
                lane.wake.clear()
                parts, lane.due = lane.due, []
                chunk = self._next_for(lane)
                if chunk is not None:
                    parts += [FRAME.pack(self._kind_of(chunk, lane), chunk.offset, len(chunk.data)), chunk.data]
                if parts:
                    await lane.stream.write_all(b"".join(parts))
                elif self._may_end(lane):
                    if lane.says_end:
                        await lane.stream.write_all(FRAME.pack(b"E", 0, 0))
                    await lane.stream.finish()
                    return
                else:
                    await lane.wake.wait()
        except Exception as error:            # iroh's, whatever it was: this lane's end
            self._lost(lane, error)

    def _may_end(self, lane: _Lane) -> bool:
        """Whether this side has nothing more to say over it. Of a retired lane the side that was told ends first: the other one still has to
        acknowledge what comes."""
        if lane.flying or lane.came > lane.told:
            if lane.came > lane.told and (lane.retired or self._settled()):
                self._acknowledge(lane)
            return False
        return self._settled() or lane.retired and (self._dial is None or lane.ended)

    def _next_for(self, lane: _Lane) -> Optional[_Chunk]:
        if lane.retired or lane.ended or self._deaf or self._error is not None or self._lanes.get(NEAR, lane) is not lane:
            return None
        now = self._loop.time()
        chunk = self._old_for(lane, now, OVERDUE_S) or self._new_for(lane, now) or self._old_for(lane, now, LATE_S)
        if chunk is None:
            return None
        lane.sent(chunk)
        if self._queued <= QUEUE or self._final_sent:
            self._wake_user()
        return chunk

    def _new_for(self, lane: _Lane, now: float) -> Optional[_Chunk]:
        if not self._queue:
            if not self._final or self._final_sent:
                return None
            self._final_sent = True           # counted and acknowledged as a chunk is
            return _Chunk(self._written, memoryview(b""), now)
        offset, number, data = self._queue[0]
        if lane.flying and lane.flying_bytes >= lane.room:
            return None
        fair = max(CHUNK_LEAST, int(lane.rate * CHUNK_S if lane.rate else lane.room / 4))
        size = min(len(data), CHUNK, fair, self._allowed - offset)
        if size <= 0:
            return None
        if size < len(data):
            heapq.heapreplace(self._queue, (offset + size, number, data[size:]))
        else:
            heapq.heappop(self._queue)
        self._queued -= size
        self._watch()
        return _Chunk(offset, data[:size], now)

    def _old_for(self, lane: _Lane, now: float, late_s: float) -> Optional[_Chunk]:
        """What is under way on another lane for too long, and holds up all behind it: once more. It may come sooner over this one."""
        lanes = self._lanes.values()
        if len(lanes) == 1 or lane.flying_bytes >= lane.room or lane.rate * len(lanes) < sum(one.rate for one in lanes):
            return None
        late = now - late_s - 2 * lane.trip_s
        missing = [(one, chunk) for one in lanes for chunk in one.flying if not self._has_landed(chunk)]
        last = min((chunk.offset for _, chunk in missing), default=0) + LATE_BYTES
        old = [chunk for one, chunk in missing
               if one is not lane and chunk.offset <= last and max(chunk.sent_at, self._doubled.get(chunk.offset, 0.0)) < late]
        if not old:
            return None
        first = min(old, key=lambda chunk: chunk.offset)
        self._doubled[first.offset] = now
        return first._replace(sent_at=now)

    def _has_landed(self, chunk: _Chunk) -> bool:
        return self._landed.get(chunk.offset, -1) >= len(chunk.data)

    def _kind_of(self, chunk: _Chunk, lane: _Lane) -> bytes:
        if not len(chunk.data):
            return b"F"
        lane.since_now += len(chunk.data)
        if lane.since_now >= lane.room / 2:
            lane.since_now = 0
            return b"N"
        return b"D" if self._queue else b"d"

    async def _hear(self, lane: _Lane) -> None:
        """Everything that comes over one lane."""
        buffer = b""
        try:
            while True:
                more = await lane.stream.read(READ_BYTES)
                if not more:
                    break
                buffer, at = buffer + more if buffer else more, 0
                while len(buffer) - at >= FRAME.size:
                    kind, number, length = FRAME.unpack_from(buffer, at)
                    at += FRAME.size
                    if kind not in (b"D", b"d", b"N"):
                        self._control(lane, kind, number)
                        continue
                    if not 0 < length <= CHUNK:
                        raise LinkError("a chunk of a size that isn't allowed")
                    got = memoryview(buffer)[at:at + length]
                    at += len(got)
                    self._arrived(lane, number, got, kind)
                    missing = length - len(got)
                    if missing:               # a chunk is as long as its lane's rate makes worth waiting for: one call instead of many
                        self._arrived(lane, number + len(got), await lane.stream.read_exact(missing), kind)
                        buffer, at = b"", 0
                    self._count(lane, length, kind == b"N")
                buffer = buffer[at:]
            if lane.says_end and not lane.said_end:
                raise LinkError("a lane ended without a word")
            lane.ended = True
            if not lane.retired:              # then that side has nothing to do any more: all of ours is there, or it reads no more
                self._done(deaf=not self._final_sent)
            self._wake()
            self._fail_if_alone(LinkError("the other side ended the stream too early"))
            await asyncio.wait([lane.tasks[0]])
            self._end(lane)
        except Exception as error:
            self._lost(lane, error)

    def _arrived(self, lane: _Lane, offset: int, data: Any, kind: bytes) -> None:
        lane.sign_at = self._loop.time()
        self._moved += len(data)
        self._waiting += 0 if kind == b"d" else len(data)
        self._watch()
        end = offset + len(data)
        if end > self._granted + WINDOW or 0 <= self._ends_at < end:
            raise LinkError("more came than was allowed")
        if self._stopped or end <= self._came or not len(data):    # nothing of it: a read may end with a chunk's head
            return
        if offset > self._came:
            known = self._early.get(offset, b"")
            if not known:
                heapq.heappush(self._early_at, offset)
            if len(data) > len(known):        # else it came twice
                self._early[offset] = data
            return
        while True:
            data = data[self._came - offset:]
            if len(data):
                self._ready.append(data)
                self._came += len(data)
            if not self._early_at or self._early_at[0] > self._came:
                break
            offset = heapq.heappop(self._early_at)
            data = self._early.pop(offset)
        self._wake_user()
        self._whole()

    def _whole(self) -> None:
        if self._ends_at == self._came:
            self._say(b"W", 0)                # or a lane that is slow would be waited for
            self._wake()

    def _count(self, lane: _Lane, size: int, at_once: bool) -> None:
        """A chunk has come whole."""
        lane.came += 1
        lane.came_bytes += size
        if at_once or lane.came_bytes >= ACK_BYTES:
            self._acknowledge(lane)
        elif lane.ack_due is None:
            lane.ack_due = self._loop.call_later(ACK_S + self._rtt_s() / 2, self._acknowledge, lane)

    def _acknowledge(self, lane: _Lane) -> None:
        if lane.ack_due is not None:
            lane.ack_due.cancel()
            lane.ack_due = None
        if lane.came > lane.told:
            lane.told, lane.came_bytes = lane.came, 0
            lane.due.append(FRAME.pack(b"A", lane.came, 0))
            lane.wake.set()

    def _control(self, lane: _Lane, kind: bytes, number: int) -> None:
        if kind == b"A" and (self._deaf or self._there):
            pass                              # nothing is counted any more
        elif kind == b"A":
            for chunk in lane.heard_of(number, self._loop.time(), bool(self._queue)):
                self._moved += len(chunk.data)
                if chunk.offset in self._doubled:
                    self._landed[chunk.offset] = max(len(chunk.data), self._landed.get(chunk.offset, 0))
            self._wake() if self._settled() else lane.wake.set()
        elif kind == b"G":
            self._allowed = max(self._allowed, number)
            self._wake()
        elif kind == b"F":
            if number < self._came or 0 <= self._ends_at != number:
                raise LinkError("the stream is longer than its end")
            self._ends_at = number
            self._count(lane, 0, True)
            self._whole()
            self._wake()
        elif kind == b"E":
            lane.said_end = True
        elif kind == b"X":
            lane.retired = True
            lane.wake.set()
        elif kind in (b"S", b"W"):
            self._done(deaf=kind == b"S")
        else:
            raise LinkError(f"a frame {kind!r} that isn't known")

    def _done(self, deaf: bool) -> None:
        """Nothing that was written here is wanted there any more: all of it has come, or nobody reads it."""
        self._deaf, self._there = self._deaf or deaf, self._there or not deaf
        self._queue, self._queued = [], 0
        for one in self._lanes.values():
            one.flying.clear()
            one.flying_bytes = 0
        self._wake()

    def _lost(self, lane: _Lane, error: BaseException) -> None:
        """Its chunks go to the others; the stream's end if there are none."""
        if not any(one is lane for one in self._lanes.values()):
            return
        lost, lane.flying = lane.flying, collections.deque()
        for chunk in lost:
            if not len(chunk.data):
                self._final_sent = False
            elif not self._has_landed(chunk) and not self._is_elsewhere(chunk):
                self._enqueue(chunk.offset, chunk.data)
        settled = self._settled()
        self._end(lane)
        self._task(_give_up(lane.stream))     # or the other side would go on waiting for this one
        if not settled:
            self._fail_if_alone(error)
        if self._error is None:
            self._say(b"G", self._granted + WINDOW)             # it may have been on its way over that one
            if self._stopped:
                self._say(b"S", 0)
            elif self._ends_at == self._came:
                self._say(b"W", 0)
        self._wake()

    def _is_elsewhere(self, chunk: _Chunk) -> bool:
        """Whether it went twice, and so is on another lane or waits for one all the same."""
        others = [(one.offset, len(one.data)) for lane in self._lanes.values() for one in lane.flying]
        others += [(offset, len(data)) for offset, _, data in self._queue]
        return any(offset == chunk.offset and size >= len(chunk.data) for offset, size in others)

    def _end(self, lane: _Lane) -> None:
        number = next((number for number, one in self._lanes.items() if one is lane), None)
        if number is None:
            return                            # by another way already
        del self._lanes[number]
        if lane.ack_due is not None:
            lane.ack_due.cancel()
        current = asyncio.current_task()
        for task in lane.tasks:
            if task is not current:
                task.cancel()
        lane.close()
        if not self._lanes:
            self.over.set()

    def _fail_if_alone(self, error: BaseException) -> None:
        """No lane is left that something could come over, and something has to."""
        if not self._settled() and all(lane.ended for lane in self._lanes.values()):
            self._fail(error if isinstance(error, LinkError) else self._broken(error))
            for lane in list(self._lanes.values()):
                self._end(lane)

    def _fail(self, error: LinkError) -> None:
        self._error = self._error or error
        self._wake()

    # ---- how many ------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._task(self._look_on())

    async def _look_on(self) -> None:
        """Looks at the rate as long as something moves. A log that is followed for hours costs nothing between its lines."""
        silent = 0
        while self._lanes and silent < 3:
            self._moved = self._waiting = 0
            began = self._loop.time()
            await asyncio.sleep(TICK_S + 2 * self._rtt_s())
            now = self._loop.time()
            silent = 0 if self._moved else silent + 1
            if any(lane.flying for lane in self._lanes.values()):
                silent = 0
            if len(self._lanes) > 1:
                self._give_up_still_lanes(now)
                self._wake()                  # for what is late
            if self._error is None and not self._settled():
                full = sum(map(len, self._ready)) > WINDOW // 4            # this side's reader is what holds it up
                busy = not full and (self._moved > 0 if self._queue else 0 < BUSY * self._moved <= self._waiting)
                if self._growth is not None:
                    self._steer(self._growth.look(now, busy, self._moved / (now - began), self._rtt_s()))
                if busy and self._near is not None:             # what is over sooner isn't worth it
                    self._task(self._dial_one(NEAR, self._near))
                    self._near = None
        self._watching = False

    def _give_up_still_lanes(self, now: float) -> None:
        """One that stands still while others don't would hold all of them up in the end."""
        for lane in list(self._lanes.values()):
            patience = STILL_S + 8 * lane.trip_s
            if lane.flying and now - lane.sign_at > patience and any(
                    one.sign_at > lane.sign_at and (not one.flying or now - one.sign_at < patience) for one in self._lanes.values()):
                self._lost(lane, LinkError("a lane stood still"))

    def _steer(self, wanted: int) -> None:
        working = [lane for number, lane in self._lanes.items() if number != NEAR and not lane.retired]
        for _ in range(wanted - len(working) - self._dialling):
            assert self._dial is not None
            self._dialling += 1
            self._last_number += 1
            self._task(self._dial_one(self._last_number, self._dial))
        for lane in sorted(working, key=lambda one: one.rate)[:max(0, len(working) - wanted)]:
            lane.retired = True
            lane.due.append(FRAME.pack(b"X", 0, 0))
            lane.wake.set()

    async def _dial_one(self, number: int, dial: Dial) -> None:
        try:
            stream, close, head = await dial(number)
        except Exception:                     # it does without; the next look may try another connection
            return
        finally:
            self._dialling -= number != NEAR
        if self._lanes and self._error is None and not self._settled():
            self.add(number, stream, close, head)
        else:
            close()


async def _give_up(stream: Any) -> None:
    for step in (stream.reset, stream.stop):
        try:
            await step(1)
        except Exception:                     # of iroh: it has ended already, that is what was wanted
            pass


class SocketLane:
    """A socket of this machine as a lane's stream. It belongs to the running loop from now on."""

    def __init__(self, sock: socket.socket, first: bytes = b"") -> None:
        """`first`: what was read of it already."""
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        self._sock, self._first = sock, first
        self._loop = asyncio.get_event_loop()

    async def read(self, size: int) -> bytes:
        if self._first:
            first, self._first = self._first[:size], self._first[size:]
            return first
        return await self._loop.sock_recv(self._sock, size)

    async def read_exact(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(await self.read(size))
            if not parts[-1]:
                raise LinkError("a lane ended in the middle of a chunk")
            size -= len(parts[-1])
        return b"".join(parts)

    async def write_all(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def finish(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    async def reset(self, _code: int) -> None:
        self.close()

    stop = reset

    def close(self) -> None:
        self._loop.call_soon(self._let_go)

    def _let_go(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)   # whoever waits in it may be ended a moment later, and would look for a number that isn't its own any more
            self._loop.remove_writer(self._sock)
            self._sock.close()
