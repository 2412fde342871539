"""Several connections under one stream: what comes is what was written, whatever happens to the connections; and no more of them than help."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import random
import socket
import threading
from typing import Any, Callable, Coroutine

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import eventually

from gpurun import lanes, sockets
from gpurun.errors import LinkError
from gpurun.lanes import CHUNK, FRAME, NEAR, WINDOW, Bundle, Growth, Known, SocketLane
from gpurun.link import Link
from gpurun.wire import TRANSFER_ALPN

LIMIT_S = 30.0


class End:
    """One end of a lane in memory. It breaks, both ways, once `cut` bytes were written here; while `held`, nothing of it arrives."""

    def __init__(self, cut: int | None = None) -> None:
        self.peer: End
        self.cut, self.written, self.held = cut, 0, False
        self.parts: list[bytes] = []
        self.reads = 0
        self.ended = self.broken = False
        self.news = asyncio.Event()

    async def read(self, size: int) -> bytes:
        """What has arrived. Where what was written at once comes apart is nobody's choice; often right behind a frame's head."""
        while not self.parts or self.peer.held:
            if self.broken:
                raise OSError("this lane broke")
            if self.ended and not self.parts:
                return b""
            self.news.clear()
            await self.news.wait()
        part = self.parts.pop(0)
        self.reads += 1
        size = min(size, (len(part), FRAME.size, 1000)[self.reads % 3])
        if len(part) > size:
            self.parts.insert(0, part[size:])
        return part[:size]

    async def read_exact(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            more = await self.read(size - len(got))
            if not more:
                raise OSError("it ended too early")
            got += more
        return got

    async def write_all(self, data: bytes) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise OSError("this lane broke")
        self.written += len(data)
        if self.cut is not None and self.written > self.cut:
            data = data[:max(0, len(data) - (self.written - self.cut))]
            self.peer.parts += [data] if data else []
            await self.reset(1)
            raise OSError("this lane broke")
        self.peer.parts.append(bytes(data))
        self.peer.news.set()

    async def finish(self) -> None:
        self.peer.ended = True
        self.peer.news.set()

    async def reset(self, _code: int) -> None:
        for end in (self, self.peer):
            end.broken = True
            end.news.set()

    stop = reset


def lane(cut: int | None = None, cut_there: int | None = None) -> tuple[End, End]:
    here, there = End(cut), End(cut_there)
    here.peer, there.peer = there, here
    return here, there


def broken(error: BaseException) -> LinkError:
    return LinkError(f"the connection broke: {error}")


def pair(pairs: list[tuple[End, End]], rtt_s: float = 0.0) -> tuple[Bundle, Bundle]:
    """The bundle that dialled and its other side, over these lanes."""
    async def no_more(_number: int) -> Any:
        raise OSError("no more")

    ours, theirs = Bundle(broken, lambda: rtt_s, no_more), Bundle(broken, lambda: rtt_s)
    for number, (here, there) in enumerate(pairs):
        ours.add(number, here)
        theirs.add(number, there)
    return ours, theirs


async def read_all(bundle: Bundle) -> bytes:
    parts = []
    while True:
        part = await bundle.read(1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


async def write(bundle: Bundle, data: bytes, sizes: Callable[[], int]) -> None:
    at = 0
    while at < len(data):
        size = sizes()
        await bundle.write_all(data[at:at + size])
        at += size
    await bundle.finish()


def run(work: Callable[[], Coroutine]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), LIMIT_S)

    return asyncio.run(bounded())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 6), sizes=st.tuples(st.integers(0, 3 << 20), st.integers(0, 1 << 20)), dying=st.integers(0, 5))
def test_bytes_arrive_once_and_in_order_both_ways_whatever_lanes_die_as_long_as_one_lives(seed, count, sizes, dying):
    rng = random.Random(seed)
    there, back = (rng.randbytes(size) for size in sizes)

    async def work() -> None:
        pairs = [lane(*(rng.randrange(sum(sizes) + 1000) if at < min(dying, count - 1) else None for _ in range(2))) for at in range(count)]
        ours, theirs = pair(rng.sample(pairs, len(pairs)))
        got, had, _, _ = await asyncio.gather(
            read_all(theirs), read_all(ours), write(ours, there, lambda: rng.randrange(1, 1 << 20)), write(theirs, back, lambda: rng.randrange(1, 1 << 19)))
        assert got == there and had == back
        await ours.over.wait()
        await theirs.over.wait()              # nothing of it is left

    run(work)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_lanes_that_come_and_go_all_the_while_lose_nothing_and_leave_nothing(seed):
    """Also at the very end, where one side knows earlier than the other that all is said."""
    rng = random.Random(seed)
    there, back = rng.randbytes(rng.randrange(2 << 20)), rng.randbytes(rng.choice([0, 10, rng.randrange(1 << 19)]))

    async def work() -> None:
        theirs = Bundle(broken, lambda: 0.0)

        async def dial(number: int) -> Any:
            here, other = lane(*(rng.randrange(400_000) if rng.random() < 0.3 else None for _ in range(2)))
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            if theirs.over.is_set() or rng.random() < 0.1:
                raise OSError("nobody there")
            theirs.add(number, other)
            return here, lambda: asyncio.ensure_future(here.reset(1)), b""

        ours = Bundle(broken, lambda: 0.0, dial)
        here, other = lane()
        ours.add(0, here)
        theirs.add(0, other)

        async def steer() -> None:
            while not ours.over.is_set():
                for _ in range(rng.randrange(1, 40)):
                    await asyncio.sleep(0)
                if not ours._settled():
                    ours._steer(rng.choice([1, 2, 5, 9]))

        async def serve() -> bytes:
            got = await read_all(theirs)
            await write(theirs, back, lambda: rng.randrange(1, 1 << 18))
            await theirs.stop(1)              # as the serving side does when its handler is done
            return got

        async def ask() -> bytes:
            await write(ours, there, lambda: rng.randrange(1, 1 << 18))
            return await read_all(ours)

        steering = asyncio.ensure_future(steer())
        got, had = await asyncio.gather(serve(), ask())
        assert got == there and had == back
        await ours.over.wait()
        await theirs.over.wait()
        await steering

    run(work)


def test_the_stream_breaks_with_its_last_lane_and_says_why():
    async def work() -> None:
        ours, theirs = pair([lane(cut=100_000), lane(cut=200_000)])
        with pytest.raises(LinkError, match="this lane broke"):
            await write(ours, bytes(3 << 20), lambda: 300_000)
            await ours.read(1)
        with pytest.raises(LinkError):
            await read_all(theirs)

    run(work)


def test_a_writer_waits_for_a_reader_that_pauses_and_no_more_than_the_window_is_held():
    async def work() -> None:
        ours, theirs = pair([lane(), lane()])
        data = os.urandom(WINDOW + (4 << 20))
        writing = asyncio.ensure_future(write(ours, data, lambda: 1 << 18))
        while theirs._came + sum(map(len, theirs._early.values())) < WINDOW:
            await asyncio.sleep(0)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert theirs._came == WINDOW and not writing.done()
        assert await read_all(theirs) == data
        await writing

    run(work)


def test_a_reader_that_has_had_enough_ends_the_writing_and_what_it_writes_itself_still_arrives():
    async def work() -> None:
        ours, theirs = pair([lane()])
        assert await asyncio.gather(theirs.write_all(b"enough"), ours.write_all(b"x")) and await theirs.read(1) == b"x"
        await theirs.stop(1)
        await theirs.finish()
        with pytest.raises(LinkError, match="stopped reading"):
            while True:
                await ours.write_all(bytes(100_000))
        assert await read_all(ours) == b"enough"
        await ours.finish()                   # who has heard all can still end it as one should
        await theirs.over.wait()

    run(work)


def test_what_is_given_up_here_breaks_there():
    async def work() -> None:
        ours, theirs = pair([lane(), lane()])
        await ours.write_all(b"half")
        await ours.reset(1)
        with pytest.raises(LinkError):
            await read_all(theirs)
        with pytest.raises(LinkError):
            await ours.write_all(b"more")

    run(work)


def test_what_a_lane_holds_up_comes_over_another_one(monkeypatch):
    """Its connection isn't broken, as far as anybody knows; nothing gets through."""
    monkeypatch.setattr(lanes, "LATE_S", 0.02)
    monkeypatch.setattr(lanes, "OVERDUE_S", 0.05)
    monkeypatch.setattr(lanes, "TICK_S", 0.01)
    data = os.urandom(3 << 20)

    async def work() -> None:
        stuck = lane()
        stuck[0].held = True
        ours, theirs = pair([stuck, lane(), lane()])
        got, _ = await asyncio.gather(read_all(theirs), write(ours, data, lambda: 1 << 18))
        assert got == data

    run(work)


def test_of_what_is_late_only_what_all_wait_for_goes_twice(monkeypatch):
    """At 1 % loss half of all bytes went twice, for each chunk was late sooner or later."""
    for name, value in (("LATE_S", 0.0), ("OVERDUE_S", 0.0), ("TICK_S", 0.01), ("STILL_S", 60.0), ("ROOM", 4 << 20)):
        monkeypatch.setattr(lanes, name, value)
    data = os.urandom(6 << 20)

    async def work() -> tuple[int, int]:
        stuck, (here, there) = lane(), lane()
        stuck[0].held = True
        ours, theirs = pair([stuck])
        writing = asyncio.ensure_future(write(ours, data, lambda: 1 << 18))
        while ours._lanes[0].flying_bytes < 4 << 20:               # all that it has room for is on its way over the one that holds it up
            await asyncio.sleep(0.001)
        here.held = True                      # and nothing that goes twice arrives
        ours.add(1, here)
        theirs.add(1, there)
        ours._lanes[1].rate = 1e9
        for _ in range(20):
            ours._lanes[1].wake.set()
            await asyncio.sleep(0.001)
        count, furthest = len(ours._doubled), max(ours._doubled, default=0)
        for end, other in (stuck, (here, there)):
            end.held = False
            other.news.set()
        assert (await asyncio.gather(read_all(theirs), writing))[0] == data
        return count, furthest

    count, furthest = run(work)
    assert count > 0 and furthest <= 1 << 19


def test_what_is_said_of_the_whole_stream_does_not_wait_for_a_lane_that_nothing_comes_back_over(monkeypatch):
    """The writer waited for the reader's word that there is room, for as long as QUIC takes to notice that a connection is dead."""
    for name, value in (("LATE_S", 0.02), ("OVERDUE_S", 0.05), ("TICK_S", 0.01), ("STILL_S", 60.0)):
        monkeypatch.setattr(lanes, name, value)
    data = os.urandom(2 * WINDOW)

    async def work() -> None:
        silent = lane()
        silent[1].held = True
        ours, theirs = pair([silent, lane(), lane()])
        reading = asyncio.ensure_future(read_all(theirs))
        writing = asyncio.ensure_future(write(ours, data, lambda: 1 << 18))
        assert await reading == data
        await writing

    run(work)


def test_a_lane_that_stands_still_while_others_move_is_given_up(monkeypatch):
    for name, value in (("LATE_S", 60.0), ("OVERDUE_S", 60.0), ("TICK_S", 0.01), ("STILL_S", 0.1)):
        monkeypatch.setattr(lanes, name, value)
    data = os.urandom(40 << 20)

    async def work() -> None:
        stuck = lane()
        stuck[0].held = True
        ours, theirs = pair([stuck, lane(), lane()])
        reading = asyncio.ensure_future(read_all(theirs))
        writing = asyncio.ensure_future(write(ours, data, lambda: 1 << 18))
        assert await reading == data
        await writing
        assert stuck[0].broken

    run(work)


def test_what_went_twice_and_is_lost_twice_goes_a_third_time(monkeypatch):
    """Two lanes with the same chunks break one after the other; once the sender broke at that, and what else the second one had was lost."""
    for name, value in (("LATE_S", 0.02), ("OVERDUE_S", 0.05), ("TICK_S", 0.01), ("STILL_S", 60.0)):
        monkeypatch.setattr(lanes, name, value)
    data = os.urandom(64 << 10)               # a chunk for each lane, and room for one more

    async def work() -> None:
        pairs = [lane(), lane()]
        for here, _ in pairs:
            here.held = True
        ours, theirs = pair(pairs)
        reading, writing = asyncio.ensure_future(read_all(theirs)), asyncio.ensure_future(write(ours, data, lambda: 1 << 18))
        while len(ours._doubled) < 2:
            await asyncio.sleep(0.01)
        here, there = lane()
        here.held = True
        ours.add(2, here)
        theirs.add(2, there)
        for stuck, _ in pairs:
            await stuck.reset(1)
        here.held = False
        there.news.set()
        assert await reading == data and ours.lanes == 1
        await writing

    run(work)


def test_lanes_that_are_too_many_are_used_up_and_ended_without_losing_a_byte():
    async def work() -> None:
        pairs = [lane() for _ in range(4)]
        ours, theirs = pair(pairs)
        data = os.urandom(6 << 20)
        reading = asyncio.ensure_future(read_all(theirs))
        writing = asyncio.ensure_future(write(ours, data, lambda: 1 << 18))
        while theirs._came < 1 << 20:
            await asyncio.sleep(0)
        ours._steer(1)
        assert await reading == data
        await writing
        assert sum(end.ended and not end.broken for end, _ in pairs) == 3 and ours.lanes == 1
        await theirs.finish()
        assert await read_all(ours) == b""
        await ours.over.wait()

    run(work)


HOSTILE = {
    "unknown": FRAME.pack(b"?", 0, 0), "too long": FRAME.pack(b"D", 0, CHUNK + 1), "empty": FRAME.pack(b"D", 0, 0),
    "beyond the window": FRAME.pack(b"D", WINDOW, 5) + b"12345", "acknowledges what wasn't sent": FRAME.pack(b"A", 7, 0),
    "two ends": FRAME.pack(b"F", 5, 0) + FRAME.pack(b"F", 6, 0), "longer than its end": FRAME.pack(b"F", 2, 0) + FRAME.pack(b"D", 0, 5) + b"12345",
    "an end inside": FRAME.pack(b"D", 0, 5) + b"12345" + FRAME.pack(b"F", 2, 0), "cut short": FRAME.pack(b"D", 0, 5) + b"12", "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nonsense_breaks_that_stream_with_a_reason_and_nothing_else(what, capsys):
    async def work() -> None:
        here, there = lane()
        bundle = Bundle(broken, lambda: 0.0)
        bundle.add(0, here)
        there.peer.parts.append(HOSTILE[what])
        here.ended = True
        here.news.set()
        with pytest.raises(LinkError):
            await read_all(bundle)
        await bundle.over.wait()

    run(work)
    assert capsys.readouterr().err == ""


# ---- how many ----------------------------------------------------------------------------------------------------------------------

def steer(growth: Growth, rate_of: Callable[[int], float], looks: int, rtt_s: float = 0.1, busy: bool = True) -> list[int]:
    """What it wants at each look, on a link that gives at once `rate_of(lanes)`."""
    wanted = [growth.lanes]
    for look in range(looks):
        wanted.append(growth.look(look * 0.5, busy, rate_of(wanted[-1]), rtt_s))
    return wanted


def test_one_lane_is_enough_where_more_bring_nothing():
    wanted = steer(Growth(), lambda count: 8e6, 40)
    assert wanted[-1] == 1 and wanted.count(1) > len(wanted) / 2    # it looks again from time to time, ever more seldom


def test_a_link_that_is_full_keeps_one_lane_though_its_rate_seems_to_change():
    """A queue before a narrow link lets what arrives come in bursts."""
    bursts = itertools.cycle([0.6, 1.0, 1.5, 0.8, 1.1, 1.4, 0.7])
    wanted = steer(Growth(), lambda count: 2e6 * next(bursts), 200)
    assert max(wanted) == 4 and wanted.count(1) > len(wanted) / 2


def test_lanes_are_added_as_long_as_it_gets_faster_and_no_longer():
    assert steer(Growth(), lambda count: 1e6 * min(count, 16), 9)[-1] == 64              # a trial
    assert steer(Growth(), lambda count: 1e6 * min(count, 16), 14)[-1] == 16
    assert steer(Growth(), lambda count: 1e6 * min(count, 4), 14)[-1] == 4


def test_windows_as_small_as_loss_makes_them_get_many_lanes_at_once():
    assert steer(Growth(), lambda count: 6e4 * count, 4)[-2:] == [64, 64]


def test_a_link_that_begins_to_lose_packets_gets_many_lanes_whatever_the_first_moments_were_like():
    """A window that happened to open far before its first loss says nothing of what comes: 40 MB took 18 s with one lane, and take 8."""
    for lucky in (4, 6, 8, 12):
        looks = itertools.count()
        wanted = steer(Growth(), lambda count: 2e6 if next(looks) < lucky else 6e4 * count, lucky + 16)
        assert 64 in wanted and wanted[-1] == 64, lucky


def test_a_link_that_became_slow_gets_one_lane_again_and_not_all_of_them_in_its_queue():
    growth = Growth()
    assert steer(growth, lambda count: 6e4 * count, 6)[-1] == 64
    assert [growth.look(3 + look * 0.5, True, 3e4, 0.1) for look in range(6)][-1] == 1


def test_a_cap_is_kept_and_one_means_no_second_connection():
    assert max(steer(Growth(5), lambda count: 1e5 * count, 30)) == 5
    assert max(steer(Growth(1), lambda count: 1e5 * count, 30)) == 1


def test_a_near_network_and_a_stream_that_has_little_to_say_keep_one_lane():
    assert max(steer(Growth(), lambda count: 1e8 * count, 30, rtt_s=0.001)) == 1
    assert max(steer(Growth(), lambda count: 1e3 * count, 30, busy=False)) == 1


def test_what_one_stream_learnt_the_next_one_to_that_peer_begins_with():
    known = Known()
    steer(Growth(known=known), lambda count: 6e4 * min(count, 16), 14)
    assert known.lanes == 16
    assert steer(Growth(known=known), lambda count: 1e6 * min(count, 16), 2)[-1] == 16


# ---- on one machine ------------------------------------------------------------------------------------------------------------------

def near(dialled: list[int], get: Callable[[int], Any]) -> Callable[[int], Coroutine]:
    async def dial(number: int) -> Any:
        dialled.append(number)
        return get(number), lambda: None, b""

    return dial


def test_on_one_machine_all_goes_over_the_socket_once_there_is_more_than_a_moments_work(monkeypatch):
    monkeypatch.setattr(lanes, "TICK_S", 0.01)
    piece = os.urandom(1 << 18)

    async def work() -> tuple[list[int], int, int]:
        (here, there), (one, other), dialled = lane(), lane(), []
        theirs = Bundle(broken, lambda: 0.0)

        def get(number: int) -> Any:
            theirs.add(number, other)
            return one

        ours, pieces = Bundle(broken, lambda: 0.0, near=near(dialled, get)), 0
        ours.add(0, here)
        theirs.add(0, there)
        reading = asyncio.ensure_future(read_all(theirs))
        while not dialled:
            await ours.write_all(piece)
            pieces += 1
        far = here.written
        await write(ours, 80 * piece, lambda: 1 << 18)
        await theirs.finish()
        assert await reading == (pieces + 80) * piece and await ours.read(1) == b""
        await asyncio.gather(ours.over.wait(), theirs.over.wait())
        return dialled, here.written - far, one.written

    dialled, far, close = run(work)
    assert dialled == [NEAR] and far < 2 << 20 < close


def test_a_stream_that_is_over_before_anybody_looks_takes_no_socket(monkeypatch):
    monkeypatch.setattr(lanes, "TICK_S", LIMIT_S)                     # it may take its time on a busy machine

    async def work() -> list[int]:
        (here, there), dialled = lane(), []
        ours, theirs = Bundle(broken, lambda: 0.0, near=near(dialled, lambda number: None)), Bundle(broken, lambda: 0.0)
        ours.add(0, here)
        theirs.add(0, there)
        await asyncio.gather(write(ours, bytes(1 << 20), lambda: 1 << 16), theirs.finish(), read_all(theirs))
        await asyncio.gather(ours.over.wait(), theirs.over.wait())
        return dialled

    assert run(work) == []


def test_a_socket_that_leads_nowhere_costs_nothing_and_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(lanes, "TICK_S", 0.01)

    async def work() -> list[int]:
        (here, there), dialled = lane(), []

        def nobody(_number: int) -> Any:
            raise OSError("nobody is there")

        ours, theirs = Bundle(broken, lambda: 0.0, near=near(dialled, nobody)), Bundle(broken, lambda: 0.0)
        ours.add(0, here)
        theirs.add(0, there)
        data = os.urandom(30 << 20)
        got = (await asyncio.gather(read_all(theirs), write(ours, data, lambda: 1 << 16), theirs.finish()))[0]
        assert got == data
        return dialled

    assert run(work) == [NEAR]


def test_a_lane_that_comes_when_the_stream_is_over_is_closed_on_both_sides():
    async def work() -> None:
        (here, there), (late, far), closed = lane(), lane(), []
        ours, theirs = pair([(here, there)])
        await ours.reset(1)
        await theirs.over.wait()
        for bundle, end in ((ours, late), (theirs, far)):
            bundle.add(1, end, lambda: closed.append(True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(closed) == 2 and late.broken and far.broken and ours.lanes == theirs.lanes == 0

    run(work)


def test_a_socket_that_ends_without_a_word_has_not_delivered_what_was_under_way():
    """As when the process at its other end is killed: the kernel ends its sockets as if it had meant to."""
    async def work() -> bool:
        (here, there), (end, peer) = lane(), socket.socketpair()
        ours, theirs = Bundle(broken, lambda: 0.0), Bundle(broken, lambda: 0.0)
        ours.add(NEAR, SocketLane(end))
        data = os.urandom(1 << 20)
        writing = asyncio.ensure_future(write(ours, data, lambda: 1 << 16))
        peer.setblocking(False)
        await asyncio.get_event_loop().sock_recv(peer, 1000)
        peer.close()
        ours.add(0, here)
        theirs.add(0, there)
        got, *_ = await asyncio.gather(read_all(theirs), writing, theirs.finish())
        return got == data

    assert run(work)


def test_what_goes_over_a_socket_is_whole_both_ways_and_it_is_closed():
    async def work() -> None:
        one, other = socket.socketpair()
        data = os.urandom(30 << 20)
        ours, theirs = Bundle(broken, lambda: 0.0), Bundle(broken, lambda: 0.0)
        for bundle, end in ((ours, one), (theirs, other)):
            made = SocketLane(end)
            bundle.add(NEAR, made, made.close)
        got = await asyncio.gather(read_all(theirs), read_all(ours), write(ours, data, lambda: 100_000), write(theirs, data[::-1], lambda: 1 << 20))
        assert got[0] == data and got[1] == data[::-1]
        await asyncio.gather(ours.over.wait(), theirs.over.wait())
        await asyncio.sleep(0)
        assert one.fileno() == other.fileno() == -1

    run(work)


# ---- over iroh -----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def peer():
    """A node that echoes, and what it knows."""
    server = Link(os.urandom(32), "127.0.0.1:0", [TRANSFER_ALPN])

    def echo(stream: Any) -> None:
        while True:
            part = stream.read(LIMIT_S)
            if not part:
                break
            stream.write(part, LIMIT_S)
        stream.finish(LIMIT_S)

    server.serve(lambda peer_id: True, echo)
    yield server
    server.close()


def exchange(stream: Any, data: bytes, enough: Callable[[], bool] = lambda: True) -> bool:
    """Whether all of it came back, and as much more as it took until `enough()`."""
    there, back = hashlib.sha256(), hashlib.sha256()

    def write() -> None:
        pieces = [data[at:at + (1 << 18)] for at in range(0, len(data), 1 << 18)]
        for count, piece in enumerate(itertools.cycle(pieces)):
            if count >= len(pieces) and (enough() or count > 10_000):
                break
            stream.write(piece, LIMIT_S)
            there.update(piece)
        stream.finish(LIMIT_S)

    writer = threading.Thread(target=write)
    writer.start()
    while True:
        part = stream.read(LIMIT_S, 1 << 18)
        if not part:
            writer.join()
            return there.digest() == back.digest()
        back.update(part)


@pytest.mark.parametrize("many", [1, 5])
def test_a_transfer_over_real_connections_is_the_same_over_one_and_over_several(peer, many, monkeypatch):
    monkeypatch.setattr(lanes, "TICK_S", 0.02)
    monkeypatch.setattr(Growth, "look", lambda self, *_: many)
    client = Link(os.urandom(32), "127.0.0.1:0")
    data = os.urandom(40 << 20)
    stream = client.dial(peer.id, [f"127.0.0.1:{peer.port()}"], TRANSFER_ALPN, 10).open(10)
    seen = []
    monkeypatch.setattr(lanes.Bundle, "_steer", lambda self, wanted, steer=lanes.Bundle._steer: (seen.append(self.lanes), steer(self, wanted)))
    assert exchange(stream, data, lambda: max(seen, default=1) >= many)
    assert max(seen, default=1) == many
    client.close()


@pytest.mark.parametrize("quiet_s, here", [(0.05, True), (0.0, False)], ids=["this machine", "near"])
def test_what_was_near_while_all_was_quiet_keeps_one_lane_however_long_its_round_trips_are_when_all_is_busy(peer, quiet_s, here, monkeypatch):
    """Of less than a millisecond iroh says that it is none: that was taken for not known, and a busy machine got 64 connections to itself."""
    trips, looks, look = itertools.chain([quiet_s], itertools.repeat(0.05)), [], Growth.look
    monkeypatch.setattr(lanes, "TICK_S", 0.02)
    monkeypatch.setattr(Growth, "look", lambda self, *said: (looks.append(said), look(self, *said))[1])
    client = Link(os.urandom(32), "127.0.0.1:0")
    connection = client.dial(peer.id, [f"127.0.0.1:{peer.port()}"], TRANSFER_ALPN, 10)
    if not here:
        connection._known.rtt_s = float("inf")
    monkeypatch.setattr(type(connection), "rtt_s", lambda self: next(trips))
    assert exchange(connection.open(10), os.urandom(20 << 20), lambda: sum(busy for _, busy, _, _ in looks) > 8)
    assert connection.most_lanes == 1
    client.close()


@pytest.fixture
def door(peer, tmp_path):
    """The same node's socket."""
    made = sockets.open_door(str(tmp_path), peer.id, [])
    made.take_lane = peer.take_lane
    made.serve(lambda who: True, lambda stream: None)
    yield made
    made.close()


def straight(door: sockets.Door, operator_id: str) -> socket.socket:
    connection = sockets.Connection(sockets.LANE_ALPN, operator_id, door.id, "node", dial=lambda timeout_s: sockets.connect(door.path, timeout_s, True))
    return connection.open(10).detach(10)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_transfer_on_one_machine_goes_on_over_the_socket_and_over_udp_again_if_that_breaks(peer, door, breaks, monkeypatch):
    monkeypatch.setattr(lanes, "TICK_S", 0.02)
    client = Link(os.urandom(32), "127.0.0.1:0")
    connection = client.dial(peer.id, [f"127.0.0.1:{peer.port()}"], TRANSFER_ALPN, 10)
    taken = []
    connection.near = lambda: (taken.append(straight(door, client.id)), taken[-1])[1]
    stream = connection.open(10)
    wrote, broke = [], []

    async def write_all(self: Any, data: bytes, write: Any = lanes.SocketLane.write_all) -> None:
        wrote.append(len(data))
        if breaks and sum(wrote) > 20 << 20 and not broke:
            broke.append(True)
            self._sock.shutdown(socket.SHUT_RDWR)
        await write(self, data)

    monkeypatch.setattr(lanes.SocketLane, "write_all", write_all)
    data = os.urandom(80 << 20)
    assert exchange(stream, data, lambda: sum(wrote) > 20 << 20 and bool(broke) == breaks)
    assert len(taken) == 1 and connection.most_lanes == 2 and bool(broke) == breaks
    eventually(lambda: taken[0].fileno() == -1 and not peer._bundles)
    client.close()


@pytest.mark.parametrize("close", [False, True])
def test_the_end_of_a_connection_is_that_of_its_streams_over_whatever_lanes_they_go(peer, door, close, monkeypatch):
    """Who gives a session up begins its transfers anew over the next one: the old ones must not go on writing beside them."""
    monkeypatch.setattr(lanes, "TICK_S", 0.02)
    monkeypatch.setattr(Growth, "look", lambda self, *_: 3)
    client = Link(os.urandom(32), "127.0.0.1:0")
    connection = client.dial(peer.id, [f"127.0.0.1:{peer.port()}"], TRANSFER_ALPN, 10)
    connection.near = (lambda: straight(door, client.id)) if close else None
    stream = connection.open(10)

    def endless() -> None:
        with contextlib.suppress(LinkError):
            for _ in range(10_000):
                stream.write(bytes(1 << 18), LIMIT_S)

    writer = threading.Thread(target=endless)
    writer.start()
    stream.read(LIMIT_S)
    (there,) = peer._bundles.values()
    while there.lanes < (4 if close else 3):
        stream.read(LIMIT_S)
    connection.close()
    with pytest.raises(LinkError):
        for _ in range(100_000):              # what was there already
            stream.read(LIMIT_S)
    writer.join(LIMIT_S)
    assert not writer.is_alive()
    eventually(lambda: not peer._bundles)
    client.close()


@pytest.mark.parametrize("said", [lanes.HEAD.pack(bytes(16), NEAR), lanes.HEAD.pack(bytes(16), 1), b"short", b""])
def test_a_socket_that_belongs_to_no_stream_of_that_operator_is_closed(peer, door, said):
    sock = straight(door, "ab" * 32)
    sock.sendall(said)
    sock.shutdown(socket.SHUT_WR)
    sock.settimeout(10)
    assert sock.recv(1) == b""


def test_nobody_gets_into_a_stream_of_another_operator(peer):
    """Its id isn't secret: it is the key of who dials that counts."""
    client, other = Link(os.urandom(32), "127.0.0.1:0"), Link(os.urandom(32), "127.0.0.1:0")
    addresses = [f"127.0.0.1:{peer.port()}"]
    stream = client.dial(peer.id, addresses, TRANSFER_ALPN, 10).open(10)
    stream.write(b"mine", 10)
    assert stream.read(10) == b"mine"
    (_, bundle_id), = peer._bundles

    async def intrude() -> bytes:
        bi = await other_connection._connection.open_bi()
        await bi.send().write_all(lanes.HEAD.pack(bundle_id, 1) + FRAME.pack(b"D", 4, 5) + b"yours")
        return await bi.recv().read(100)

    other_connection = other.dial(peer.id, addresses, TRANSFER_ALPN, 10)
    with pytest.raises(Exception):
        other._loop.call(intrude(), 10, "intruding")
    stream.write(b", mine", 10)
    assert stream.read(10) == b", mine"
    for link in (client, other):
        link.close()
