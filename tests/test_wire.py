"""The control protocol's lines and the frames: what its document says is what the code reads, and no peer's bytes do anything else."""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any

from typing import List

import pytest
from hypothesis import given, settings, strategies as st

from gpurun import messages, wire
from gpurun.errors import LinkError, LinkTimeoutError, WireError
from gpurun.messages import Hello, JobExited, NodeReady, OutputsCollected, Ping, RunJob, Sample, StopJob

ALL = messages.OPERATOR_SAYS + messages.NODE_SAYS
SAMPLES = re.findall(r"^    (\{.*\})$", wire.__doc__, re.M)


class Pieces:
    """A stream that gives these pieces, one a read; None stands for a wait that runs out. At its end it stays ended."""

    def __init__(self, pieces: list[bytes | None]) -> None:
        self.pieces = list(pieces)

    def read(self, timeout_s: float, least: int = 1) -> bytes:
        if not self.pieces:
            return b""
        piece = self.pieces.pop(0)
        if piece is None:
            raise LinkTimeoutError("nothing")
        return piece


def patiently(call: Any, *args: Any) -> Any:
    """What a caller does that may wait for ever."""
    while True:
        try:
            return call(*args, 1.0)
        except LinkTimeoutError:
            pass


def cut(data: bytes, at: list[int], silences: list[bool]) -> list[bytes | None]:
    """`data` in pieces, with waits between them that run out."""
    places = sorted({place % (len(data) + 1) for place in at} | {0, len(data)})
    pieces: list[bytes | None] = []
    for number, (start, end) in enumerate(zip(places, places[1:])):
        if silences and silences[number % len(silences)]:
            pieces.append(None)
        pieces.append(data[start:end])
    return pieces


# ---- messages --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line", SAMPLES)
def test_a_line_of_the_document_is_read_and_written_again_as_the_same_message(line):
    message = wire.decode(line.encode(), ALL)
    assert wire.decode(wire.encode(message)[:-1], ALL) == message
    said = json.loads(line)
    written = json.loads(wire.encode(message))
    assert {key: written[key] for key in said} == said, "the document has a field that the code doesn't know"


def test_the_document_shows_every_message_of_the_protocol():
    shown = {json.loads(line)["type"] for line in SAMPLES}
    assert shown == {cls.__name__ for cls in ALL}


def test_what_only_the_operator_side_makes_is_not_taken_off_the_wire():
    for cls in messages.OPERATOR_EVENTS:
        with pytest.raises(WireError, match=cls.__name__):
            wire.decode(wire.encode(cls(run_id="r"))[:-1], messages.NODE_SAYS)


def test_a_newer_peers_unknown_keys_are_ignored_and_an_older_peers_missing_ones_have_defaults():
    assert wire.decode(b'{"type":"Ping","number":3,"mood":"good","later":[{}]}', ALL) == Ping(3)
    assert wire.decode(b'{"type":"Hello"}', ALL) == Hello()


@pytest.mark.parametrize("line, why", [
    (b'{"type":"Reboot"}', "'Reboot'"), (b'{"type":7}', "no text"), (b'{"type":["Ping"]}', "no text"), (b"{}", "no text"),
    (b'{"type":"NodeLost","run_id":"r"}', "'NodeLost'"),
    (b"nonsense", "not a line of JSON"), (b"[1]", "not a JSON object"), (b"1", "not a JSON object"), (b"", "not a line of JSON"),
    (b'{"type":"Ping"} {"type":"Ping"}', "not a line of JSON"), (b'{"type":"Hello","job":"\xff"}', "not a line of JSON"),
    (b'\xef\xbb\xbf{"type":"Ping"}', "not a line of JSON"), (b'{"type":"Ping","number":1', "not a line of JSON"),
    (b"[" * 500_000, "not a line of JSON"), (b'{"a":' * 200_000, "not a line of JSON"),
    (b'{"type":"StopJob","grace_s":NaN}', "not a line of JSON"), (b'{"type":"StopJob","grace_s":-Infinity}', "not a line of JSON"),
    (b'{"type":"StopJob","grace_s":1e999}', "grace_s"), (b'{"type":"StopJob","grace_s":' + b"9" * 1000 + b"}", "grace_s"),
    (b'{"type":"StopJob","grace_s":true}', "grace_s"), (b'{"type":"StopJob","grace_s":"1"}', "grace_s"),
    (b'{"type":"Ping","number":1.0}', "number"), (b'{"type":"Ping","number":true}', "number"), (b'{"type":"Ping","number":null}', "number"),
    (b'{"type":"Ping","number":9223372036854775808}', "number"), (b'{"type":"Hello","claim":1}', "claim"),
    (b'{"type":"RunJob","env":{"A":1}}', "env"), (b'{"type":"RunJob","env":[]}', "env"), (b'{"type":"RunJob","command":null}', "command"),
    (b'{"type":"CollectOutputs","outputs":"all"}', "outputs"), (b'{"type":"CollectOutputs","outputs":[1]}', "outputs"),
    (b'{"type":"Sample","values":[]}', "values"), (b'{"type":"Sample","values":{"a":1e999}}', "values"),
    (b'{"type":"NodeReady","facts":{"a":' + b"[" * 300 + b"]" * 300 + b"}}", "facts"),
])
def test_a_line_that_the_protocol_does_not_allow_is_refused_with_the_reason(line, why):
    with pytest.raises(WireError, match=why) as caught:
        wire.decode(line, ALL)
    assert len(str(caught.value)) < 400, "a peer could fill our screen"


def test_a_deeply_nested_type_is_refused_however_deep():
    for depth in (10, 300, 900, 990, 5000):
        with pytest.raises(WireError):
            wire.decode(b'{"type":' + b"[" * depth + b"]" * depth + b"}", ALL)


def test_a_message_that_no_peer_would_take_is_not_sent():
    fits = wire.MAX_LINE - len(wire.encode(RunJob("r")))
    assert len(wire.encode(RunJob("r", "x" * fits))) == wire.MAX_LINE
    with pytest.raises(WireError, match="RunJob takes 1048577 bytes"):
        wire.encode(RunJob("r", "x" * (fits + 1)))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(line):
    try:
        message = wire.decode(line, ALL)
    except WireError:
        return
    assert isinstance(message, ALL)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=8)
names = st.sampled_from(sorted({name for cls in ALL for name in cls._fields}))


@given(st.sampled_from([cls.__name__ for cls in ALL]), st.dictionaries(names | st.text(max_size=8), values, max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_fields_are_a_well_typed_message_or_a_wire_error(kind, fields):
    line = json.dumps(dict(fields, type=kind)).encode()
    try:
        message = wire.decode(line, ALL)
    except WireError:
        return
    for name, wanted in type(message).__annotations__.items():
        value = getattr(message, name)
        assert isinstance(value, {str: str, bool: bool, int: int, float: (int, float), List[str]: list}.get(wanted, dict))
        assert not isinstance(value, float) or math.isfinite(value)
    assert wire.decode(wire.encode(message)[:-1], ALL) == message


texts = st.text(max_size=30)
made = st.one_of(
    st.builds(Hello, texts, texts, texts, texts, st.booleans(), st.booleans(), st.integers(-2**63, 2**63 - 1), st.integers(-2**63, 2**63 - 1)),
    st.builds(RunJob, texts, texts, st.dictionaries(texts, texts, max_size=3), st.dictionaries(texts, texts, max_size=3), st.just({"kind": "slurm"})),
    st.builds(OutputsCollected, texts, st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**62), st.lists(texts, max_size=3)),
    st.builds(JobExited, texts, st.integers(0, 9), st.integers(0, 255), st.integers(0, 64), st.booleans(), st.integers(0, 2**62),
              st.integers(0, 2**62), st.floats(allow_nan=False, allow_infinity=False), texts, texts),
    st.builds(StopJob, texts, st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(Sample, texts, st.dictionaries(texts, st.lists(st.integers(-9, 9)), max_size=2)),
    st.builds(NodeReady, texts, st.integers(0, 9), st.dictionaries(texts, texts, max_size=3)))


@settings(deadline=None)
@given(st.lists(made, max_size=6), st.lists(st.integers(0, 10_000), max_size=12), st.lists(st.booleans(), max_size=5))
def test_messages_arrive_the_same_however_the_stream_cuts_them(sent, at, silences):
    reader = wire.Reader(Pieces(cut(b"".join(map(wire.encode, sent)), at, silences)))
    assert [wire.decode(patiently(reader.line), ALL) for _ in sent] == sent
    assert patiently(reader.line) == b""


# ---- the reader ------------------------------------------------------------------------------------------------------------------

@given(st.lists(st.one_of(st.tuples(st.just("line"), st.binary(min_size=1, max_size=40).filter(lambda line: b"\n" not in line)),
                          st.tuples(st.just("exactly"), st.binary(max_size=40)),
                          st.tuples(st.just("frame"), st.binary(max_size=40))), max_size=10),
       st.lists(st.integers(0, 10_000), max_size=30), st.lists(st.booleans(), max_size=5))
@settings(max_examples=300, deadline=None)
def test_lines_frames_and_bytes_come_out_in_order_whatever_the_pieces_and_silences(parts, at, silences):
    sent = b"".join(data + b"\n" if kind == "line" else struct.pack(">cI", b"D", len(data)) + data if kind == "frame" else data
                    for kind, data in parts)
    reader = wire.Reader(Pieces(cut(sent, at, silences)))
    for kind, data in parts:
        if kind == "line":
            assert patiently(reader.line) == data
        elif kind == "exactly":
            assert patiently(reader.exactly, len(data)) == data
        else:
            assert patiently(reader.frame) == (b"D", data)
    assert patiently(reader.line) == b""


def test_a_wait_that_runs_out_in_the_middle_of_a_frame_loses_nothing():
    reader = wire.Reader(Pieces([b"D\0\0", None, b"\0\4ab", None, b"cdrest\n"]))
    for _ in range(2):
        with pytest.raises(LinkTimeoutError):
            reader.frame(1.0)
    assert reader.frame(1.0) == (b"D", b"abcd")
    assert reader.line(1.0) == b"rest"


def test_the_longest_line_is_read_and_one_byte_more_is_refused_however_it_arrives():
    longest = b"x" * (wire.MAX_LINE - 1)
    for pieces in ([longest + b"\n"], [longest, b"\n"], [b"x", longest[1:] + b"\n{}\n"]):
        assert wire.Reader(Pieces(pieces)).line(1.0) == longest
    for pieces in ([longest + b"x\n"], [longest, b"x\n"], [longest + b"x"], [longest, b"x" * wire.MAX_LINE + b"\n"], [b"x" * 2 * wire.MAX_LINE]):
        with pytest.raises(WireError, match="more than 1048576 bytes"):
            wire.Reader(Pieces(pieces)).line(1.0)


def test_an_over_long_line_is_refused_as_soon_as_it_is_too_long_and_not_at_its_end():
    stream = Pieces([b"x" * 65536] * 1000)
    with pytest.raises(WireError):
        wire.Reader(stream).line(1.0)
    assert len(stream.pieces) > 980, "it went on reading"


def test_a_frame_of_4_gib_is_refused_at_its_header():
    stream = Pieces([struct.pack(">cI", b"D", 0xFFFFFFFF), b"x" * 100])
    with pytest.raises(WireError, match="a frame of 4294967295 bytes"):
        wire.Reader(stream).frame(1.0)
    assert stream.pieces == [b"x" * 100]
    assert wire.Reader(Pieces([struct.pack(">cI", b"D", wire.MAX_FRAME), b"x" * wire.MAX_FRAME])).frame(1.0)[1] == b"x" * wire.MAX_FRAME


def test_a_stream_that_ends_in_the_middle_says_so():
    with pytest.raises(WireError, match="middle of a line"):
        wire.Reader(Pieces([b'{"type"'])).line(1.0)
    for pieces in ([b"D\0"], [b"D\0\0\0\5abcd"], []):
        with pytest.raises(LinkError, match="ended the stream too early"):
            wire.Reader(Pieces(pieces)).frame(1.0)


def test_an_empty_line_is_refused_and_not_taken_for_the_end():
    with pytest.raises(WireError, match="empty line"):
        wire.Reader(Pieces([b"\n"])).line(1.0)


# ---- the writer ------------------------------------------------------------------------------------------------------------------

class Sink:
    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes, timeout_s: float) -> None:
        self.writes.append(data)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"D", b"J", b"Z"]), st.binary(max_size=100)), max_size=10))
def test_frames_are_read_as_they_were_written(frames):
    sink = Sink()
    writer = wire.Writer(sink, 1.0)
    for kind, payload in frames:
        writer.frame(kind, payload)
    writer.flush()
    reader = wire.Reader(Pieces(sink.writes))
    assert [reader.frame(1.0) for _ in frames] == frames


def test_small_frames_share_a_write_and_nothing_is_held_beyond_a_good_size():
    sink = Sink()
    writer = wire.Writer(sink, 1.0)
    for _ in range(100):
        writer.frame(b"D", b"x" * 100)
    assert sink.writes == []
    writer.flush()
    assert len(sink.writes) == 1
    writer.frame(b"D", b"x" * wire.SMALL_WRITE)
    assert len(sink.writes) == 2
    writer.flush()
    assert len(sink.writes) == 2


def test_a_frame_that_no_peer_would_take_is_not_written():
    sink = Sink()
    with pytest.raises(WireError, match="1048577 bytes"):
        wire.Writer(sink, 1.0).frame(b"J", b"x" * (wire.MAX_FRAME + 1))
    assert sink.writes == []
