"""Compression that pays: what goes packed over which link, round trips of any bytes, and packed bytes that lie."""

import os
import random
import zlib

import pytest
from hypothesis import given, settings, strategies as st

from gpurun import packing
from gpurun.errors import WireError
from gpurun.packing import BLOCK, FAST, RAW, Packer, Unpacker, Way, best

METHODS = packing.known()
CHANCE = random.Random(1)
NOISE = CHANCE.randbytes(2 << 20)
TEXT = b"".join(b"step %d: loss %f, accuracy %f\n" % (step, CHANCE.random(), CHANCE.random()) for step in range(60000))[:2 << 20]


class Link:
    """A link whose clock only goes on when it is written to or when something is packed; nothing here takes real time."""

    def __init__(self, bytes_s, packs_bytes_s=80e6, buffer=4 << 20):
        self.bytes_s, self.packs_bytes_s, self.buffer = bytes_s, packs_bytes_s, buffer
        self.now = self.drained_at = self.waited = 0.0
        self.written = self.ticks = 0

    def clock(self):
        return self.now

    def sent(self):
        return self.written, self.waited

    def write(self, data):
        self.drained_at = max(self.drained_at, self.now) + len(data) / self.bytes_s
        wait = self.drained_at - self.now - self.buffer / self.bytes_s
        if wait > 0:
            self.now += wait
            self.waited += wait
        self.written += len(data)

    def packer(self, method="deflate", rtt_s=0.003):
        packer = Packer(method, rtt_s, self.sent, clock=self.clock)
        really = packer._packed

        def packed(block):
            self.now += len(block) / self.packs_bytes_s
            return really(block)

        packer._packed = packed
        return packer

    def send(self, packer, data, read_bytes_s=1e9):
        """Bytes of it that went packed."""
        packer.begin()
        before = 0
        for at in range(0, len(data), BLOCK):
            block = data[at:at + BLOCK]
            self.now += len(block) / read_bytes_s
            packed = packer.pack(block)
            self.write(block if packed is None else packed)
            before += 0 if packed is None else len(block)
        return before

    @property
    def ends_at(self):
        return max(self.now, self.drained_at)


# ---- what pays -------------------------------------------------------------------------------------------------------------------

WAYS = (Way(1, 100e6, 0.35), Way(4, 60e6, 0.30))


@pytest.mark.parametrize("link, level", [(FAST, RAW), (1e9, RAW), (95e6, RAW), (50e6, 1), (12.5e6, 4), (1e5, 4)])
def test_the_slower_the_link_the_denser_it_is_packed(link, level):
    assert best(link, WAYS) == level


@settings(deadline=None)
@given(st.floats(1e3, 1e11), st.lists(st.tuples(st.floats(1e4, 1e10), st.floats(0.01, 1.2)), min_size=1, max_size=3))
def test_nothing_is_chosen_that_is_slower_than_raw_bytes(link, ways):
    ways = [Way(level, bytes_s, ratio) for level, (bytes_s, ratio) in enumerate(ways, 1)]
    level = best(link, ways)
    assert level == RAW or min(ways[level - 1].bytes_s, link / ways[level - 1].ratio) > link


def test_a_near_link_gets_raw_bytes_and_a_far_one_packed_ones_before_anything_is_known():
    for rtt_s, packed in ((0.0001, 0), (0.003, 0), (None, 0), (0.02, len(TEXT))):
        link = Link(12.5e6)
        assert link.send(link.packer(rtt_s=rtt_s), TEXT) == packed


def test_a_link_that_looked_near_and_is_slow_gets_packed_bytes_once_that_shows():
    link = Link(5e6)
    packer = link.packer(rtt_s=0.003)
    sent = [link.send(packer, TEXT) for _ in range(20)]
    assert sent[0] == 0 and sent[-1] == len(TEXT)
    assert link.ends_at < 0.65 * 20 * len(TEXT) / 5e6


def test_a_far_link_that_is_faster_than_the_packing_gets_raw_bytes_once_that_shows():
    link = Link(1e9, packs_bytes_s=50e6)
    packer = link.packer(rtt_s=0.1)
    sent = [link.send(packer, TEXT) for _ in range(100)]
    assert sent[0] == len(TEXT) and sum(sent[-30:]) == 0


def test_on_one_machine_nothing_is_packed_though_the_other_side_is_slow():
    link = Link(5e6)
    packer = link.packer(rtt_s=0.0002)
    assert sum(link.send(packer, TEXT) for _ in range(20)) == 0


def test_a_link_that_gets_slower_in_the_middle_gets_packed_bytes_from_then_on():
    link = Link(1e9)
    packer = link.packer()
    assert link.send(packer, TEXT) == 0
    link.bytes_s = 5e6
    assert [link.send(packer, TEXT) for _ in range(20)][-1] == len(TEXT)


@pytest.mark.parametrize("bytes_s", [1e6, 12.5e6, 60e6, 125e6, 1e9])
@pytest.mark.parametrize("rtt_s", [0.0001, 0.003, 0.05])
@pytest.mark.parametrize("what", ["text", "noise"])
def test_sending_takes_no_longer_than_without_compression(bytes_s, rtt_s, what):
    data = TEXT if what == "text" else NOISE
    link, raw, turns = Link(bytes_s, packs_bytes_s=50e6), Link(bytes_s), 60
    packer = link.packer(rtt_s=rtt_s)
    for _ in range(turns):
        link.send(packer, data)
        for at in range(0, len(data), BLOCK):
            raw.now += BLOCK / 1e9
            raw.write(data[at:at + BLOCK])
    head_start = packing.PROBE_BYTES / 0.1 / 50e6 if what == "text" and rtt_s > packing.NEAR_S and bytes_s > 60e6 else 0
    assert link.ends_at <= 1.05 * raw.ends_at + head_start + packing.LOOK_S


def test_what_does_not_shrink_goes_raw_and_costs_a_sample_in_8_mb(monkeypatch):
    samples = []
    really = zlib.compress
    monkeypatch.setattr(packing.zlib, "compress", lambda data, level: samples.append(len(data)) or really(data, level))
    link = Link(1e6)
    packer = link.packer(rtt_s=0.1)
    assert sum(link.send(packer, NOISE) for _ in range(2)) == 0 and len(samples) == 2              # each file is tried
    samples.clear()
    packer.begin()
    for _ in range(64):
        assert packer.pack(NOISE[:BLOCK]) is None
    assert len(samples) == 4 and max(samples) <= packing.SAMPLE


def test_a_file_that_shrinks_further_on_only_goes_packed_from_there():
    link = Link(1e6)
    packer = link.packer(rtt_s=0.1)
    assert link.send(packer, NOISE * 3 + TEXT * 4) >= 3 * len(TEXT)
    assert link.send(packer, TEXT + NOISE * 4) <= len(TEXT) + 2 * BLOCK


@pytest.mark.parametrize("size", [1000, 4096])
def test_of_small_files_that_do_not_shrink_few_are_tried_and_text_among_them_is_found_again(size):
    link = Link(1e6)
    packer = link.packer(rtt_s=0.1)
    files = [NOISE[at:at + size] for at in range(0, 400 * size, size)]
    assert sum(link.send(packer, data) for data in files) < 40 * size
    texts = [TEXT[at:at + size] for at in range(0, 100 * size, size)]
    assert sum(link.send(packer, data) for data in texts) > 80 * size


def test_small_files_share_what_was_learnt_of_the_ones_before():
    line = NOISE[:3000].hex().encode()
    for method in METHODS:
        packer = Packer(method, 0.1, lambda: (0, 0.0))
        first, *others = [len(packer.pack(b"%d" % number + line)) for number in range(20)]
        assert max(others) < first / 10, method


# ---- round trips -----------------------------------------------------------------------------------------------------------------

def test_the_methods_are_chosen_by_what_both_sides_have():
    assert packing.chosen(["deflate"]) == "deflate" and packing.chosen(METHODS) == METHODS[0]
    for nothing in (None, [], ["lzma"], "deflate", 7, [[]]):
        assert packing.chosen(nothing) == ""


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(blocks=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=3000), st.integers(1, 60)), min_size=1, max_size=12))
def test_what_was_packed_comes_out_again_at_whatever_level_the_packer_goes_on(method, blocks):
    packer, unpacker = Packer(method, 0.1, lambda: (0, 0.0)), Unpacker(method)
    levels = [way.level for way in packer._ways]
    for which, data, times in blocks:
        packer._level = levels[which - 1]
        block = (data * times)[:BLOCK]
        packer.begin()
        packed = packer.pack(block)
        assert packed is None or unpacker.unpack(packed) == block


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [TEXT, NOISE, bytes(2 << 20)], ids=["text", "noise", "zeros"])
def test_whole_blocks_come_out_again(method, data):
    packer, unpacker = Packer(method, 0.1, lambda: (0, 0.0)), Unpacker(method)
    for level in [way.level for way in packer._ways] * 2:
        packer._level = level
        for at in range(0, len(data), BLOCK):
            assert unpacker.unpack(packer._packed(data[at:at + BLOCK])) == data[at:at + BLOCK]


# ---- packed bytes that lie -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", METHODS)
def test_a_frame_that_unpacks_to_more_than_a_block_is_refused_before_it_is_held(method, tmp_path):
    packer = Packer(method, 0.1, lambda: (0, 0.0))
    bomb = packer._packed(bytes(256 << 20))
    assert len(bomb) < 1 << 20
    with pytest.raises(WireError, match="more than"):
        Unpacker(method).unpack(bomb)
    assert len(Unpacker(method).unpack(Packer(method, 0.1, lambda: (0, 0.0))._packed(bytes(BLOCK)))) == BLOCK
    with pytest.raises(WireError, match="more than"):
        Unpacker(method).unpack(Packer(method, 0.1, lambda: (0, 0.0))._packed(bytes(BLOCK + 1)))


@pytest.mark.parametrize("method", METHODS)
def test_what_nobody_packed_is_refused(method):
    for data in (b"no such thing", os.urandom(1000), b"\xff" * 9):
        try:
            assert len(Unpacker(method).unpack(data)) <= BLOCK        # chance may make a beginning of it
        except WireError:
            pass
    with pytest.raises(WireError):
        Unpacker(method).unpack(b"\xff" * 900)
    if method == "deflate":
        with pytest.raises(WireError, match="end"):
            Unpacker(method).unpack(zlib.compress(b"data")[2:-4])
