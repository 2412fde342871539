"""Push and follow: what arrives, what is sent twice, links that break anywhere, files that change, and peers that lie."""

import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import zlib

import pytest

from gpurun import landing, manifest, pushing, store as store_module, transfer
from gpurun.errors import LinkError, TransferError, WireError, WorkspaceError
from gpurun.manifest import Entry
from gpurun.store import Store
from streams import CHANGES, ROOT, as_agent, cache_is_sound, iroh_pair, listed, node, peak_mb, pull, push, quiet, remembered, store, target, tree, work, write_files
from trees import as_nobody, looks, make_odd_tree, rsync_differences, tiny_disk


pytestmark = pytest.mark.usefixtures("remembered")


# ---- push ------------------------------------------------------------------------------------------------------------------------

def test_an_odd_tree_arrives_as_rsync_would_bring_it_and_again_costs_no_byte(store, tmp_path):
    tree = make_odd_tree(tmp_path / "tree")
    entries, encoded = listed(tree)
    arrived = []
    pushed = push(store, tree, arrived=arrived)
    contents = {entry.sha256: entry.size for entry in entries if entry.size}
    assert pushed == (len(contents), sum(contents.values()))          # each content once, "twin" not again, empty files never
    assert arrived == [manifest.tree_id(encoded)]
    store.materialize(store.tree(arrived[0]), str(tmp_path / "work"))
    assert looks(tmp_path / "work") == looks(tree) and rsync_differences(tree, tmp_path / "work") == ""
    assert push(store, tree, arrived=arrived) == (0, 0) and len(arrived) == 2
    assert push.stream.written < len(encoded) + 200


def test_an_empty_tree_is_a_tree(store, tree, tmp_path):
    arrived = []
    assert push(store, tree, arrived=arrived) == (0, 0)
    assert store.materialize(store.tree(arrived[0]), str(tmp_path / "work")) == (0, 0) and os.listdir(tmp_path / "work") == []


def test_2000_files_of_4_kb_go_in_a_few_dozen_writes_and_twins_once(store, tree):
    chance = random.Random(1)
    write_files(tree, {f"d{number % 10}/f{number}": chance.randbytes(4096) for number in range(2000)})
    write_files(tree, {f"twins/f{number}": (tree / "d0" / "f0").read_bytes() for number in range(50)})
    assert push(store, tree) == (2000, 2000 * 4096)
    assert push.stream.writes <= 36


def test_a_long_listing_goes_only_when_the_node_does_not_know_the_tree(store, tree, monkeypatch):
    monkeypatch.setattr(pushing, "INLINE_LISTING", 128 << 10)
    write_files(tree, {f"{number:05}-{'long' * 20}": b"" for number in range(2000)})
    _, encoded = listed(tree)
    assert len(encoded) > pushing.INLINE_LISTING
    push(store, tree)
    assert push.stream.written > 10_000
    assert push(store, tree) == (0, 0)
    assert push.stream.written < 200


def test_after_a_change_only_the_changed_file_goes(store, tree):
    write_files(tree, {f"f{number}": b"%d" % number * 1000 for number in range(100)})
    push(store, tree)
    write_files(tree, {"f7": b"changed"})
    assert push(store, tree) == (1, 7)
    os.rename(tree / "f8", tree / "moved")
    assert push(store, tree) == (0, 0)


def test_progress_names_the_file_that_is_being_sent_and_counts_its_bytes(store, tree):
    write_files(tree, {"large.bin": os.urandom(3 << 20), "small": b"x"})
    seen = []
    push(store, tree, progress=lambda *args: seen.append(args))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen) and seen[-1][0] == (3 << 20) + 1
    assert {total for _, total, _ in seen} == {(3 << 20) + 1}
    assert len([name for _, _, name in seen if name == "large.bin"]) >= 6


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changed_after_it_was_listed_is_named_and_a_second_push_works(store, tree, how):
    write_files(tree, {"before": b"b" * 100, "it": b"i" * 700_000, "zlast": b"z" * 100})
    entries, encoded = listed(tree)
    CHANGES[how](tree / "it")
    arrived = []
    with pytest.raises(transfer.ChangedError, match="tree/it'"):
        push(store, tree, entries, encoded, arrived=arrived)
    assert arrived == []
    cache_is_sound(store)
    expected = (1, (tree / "it").stat().st_size) if how in ("other bytes", "shorter", "longer") else (0, 0)
    assert push(store, tree, arrived=arrived) == expected                  # what arrived the first time isn't sent again
    assert len(arrived) == 1


def test_an_unreadable_file_is_named(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/") and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)

    def work():
        tree = write_files(tmp_path / "mine", {"secret": b"s" * 10})
        entries, encoded = listed(tree)
        (tree / "secret").chmod(0)
        with pytest.raises(transfer.ChangedError, match="secret' can't be read: Permission denied"):
            push(Store(str(tmp_path / "its")), tree, entries, encoded)
        with pytest.raises(WorkspaceError, match="secret"):
            listed(tree)

    as_nobody(work)


def test_a_push_cut_anywhere_leaves_only_whole_contents_and_the_next_one_brings_the_rest(tmp_path):
    tree = write_files(tmp_path / "tree", {"a": b"a" * 50, "b/c": b"c" * 700, "d": b"d" * 200, "e": b""})
    push(Store(str(tmp_path / "all")), tree)
    size, answers = push.stream.written, push.stream.peer.written
    for cuts in [{"cut": at} for at in range(0, size, 23)] + [{"cut_answers": at} for at in range(0, answers, 7)]:
        store = Store(str(tmp_path / f"node-{next(iter(cuts))}-{next(iter(cuts.values()))}"))
        with pytest.raises(LinkError):
            push(store, tree, **cuts)
        cache_is_sound(store)
        arrived = []
        push(store, tree, arrived=arrived)
        store.materialize(store.tree(arrived[0]), str(tmp_path / "work"))
        assert looks(tmp_path / "work") == looks(tree), cuts
        assert os.listdir(os.path.join(store.root, "cache", "incoming")) == []


def test_a_large_file_goes_on_where_its_push_broke_off(store, tree):
    write_files(tree, {"large": random.Random(2).randbytes(8 << 20), "z": b"z"})
    with pytest.raises(LinkError):
        push(store, tree, cut=6 << 20)
    assert push(store, tree) == (2, (8 << 20) + 1)
    assert push.stream.written < 3 << 20
    cache_is_sound(store)


@pytest.fixture
def half_pushed(store, tree):
    """A push of 16 MB that stops after some 9 and says no more, as of an operator who was killed: its stream. The node waits on."""
    write_files(tree, {"large": random.Random(2).randbytes(16 << 20)})
    stopped, on = threading.Event(), threading.Event()

    def progress(done, total, name):
        if done >= 9 << 20 and not on.is_set():
            stopped.set()
            on.wait(60)

    with node(lambda channel, header: transfer.serve_push(channel, header, store, lambda tree: None)) as stream:
        def operator():
            with contextlib.suppress(LinkError):
                pushing.push(lambda: stream, str(tree), *listed(tree), progress)

        thread = threading.Thread(target=operator, daemon=True)
        thread.start()
        assert stopped.wait(60)
        yield stream
        on.set()
        thread.join(60)
        stream.abort()


def test_a_push_goes_on_where_that_of_a_killed_operator_was_though_the_node_still_waits_for_him(store, tree, half_pushed, monkeypatch):
    monkeypatch.setattr(transfer, "STALLED_S", 2.0)                      # and as long for the other thread to let go
    assert push(store, tree) == (1, 16 << 20) and push.stream.written < 9 << 20
    assert half_pushed.broken
    cache_is_sound(store)


def test_a_push_of_an_operator_who_lives_is_not_taken_over(store, tree, half_pushed, monkeypatch):
    monkeypatch.setattr(transfer, "STALLED_S", 30)
    over = threading.Event()

    def lives():
        while not over.wait(0.2):
            half_pushed.write(b"K" + bytes(4), 20)

    operator = threading.Thread(target=lives)
    operator.start()
    try:
        assert push(store, tree) == (1, 16 << 20) and push.stream.written > 16 << 20
    finally:
        over.set()
        operator.join()
    assert not half_pushed.broken
    cache_is_sound(store)


def test_a_large_file_that_changed_after_its_push_broke_off_is_sent_whole(store, tree):
    write_files(tree, {"large": random.Random(2).randbytes(8 << 20)})
    with pytest.raises(LinkError):
        push(store, tree, cut=6 << 20)
    write_files(tree, {"large": random.Random(3).randbytes(8 << 20)})
    push(store, tree)
    assert push.stream.written > 8 << 20
    cache_is_sound(store)


def test_a_full_disk_on_the_node_half_way_is_named_with_free_and_needed_bytes_though_the_operator_is_still_sending(tmp_path, tree, monkeypatch):
    monkeypatch.setattr(store_module, "RESERVE_BYTES", 0)
    write_files(tree, {f"f{number}": os.urandom(1 << 20) for number in range(12)})
    with tiny_disk(tmp_path / "disk", "6m") as disk:
        store = Store(str(disk / "node"))
        with pytest.raises(TransferError) as caught:
            push(store, tree)
        assert "no room for the workspace" in str(caught.value) and "12,582,912 bytes" in str(caught.value)
        monkeypatch.setattr(Store, "check_room", lambda *args: None)             # the room is taken by another meanwhile
        with pytest.raises(TransferError) as caught:
            push(store, tree)
        text = str(caught.value)
        assert re.search(r"'f\d' could not be stored", text), text
        assert str(disk) in text and "are free" in text and "still needed" in text and "No space left" in text
        cache_is_sound(store)
        assert os.listdir(disk / "node" / "cache" / "incoming") == []


def test_over_a_real_link_the_reason_of_a_node_that_stops_taking_reaches_an_operator_who_is_still_sending(tmp_path, tree, iroh_pair, monkeypatch):
    write_files(tree, {f"f{number:02}": os.urandom(1 << 20) for number in range(48)})
    entries, encoded = listed(tree)
    monkeypatch.setattr(Store, "check_room", lambda *args: None)
    with tiny_disk(tmp_path / "disk", "3m") as disk:
        store = Store(str(disk / "node"))
        opened = iroh_pair(lambda stream: as_agent(stream, lambda channel, header: transfer.serve_push(channel, header, store, lambda tree: None)))
        began = time.monotonic()
        with pytest.raises(TransferError, match="No space left on device"):
            pushing.push(opened, str(tree), entries, encoded, quiet)
        assert time.monotonic() - began < 0.9 * transfer.IO_S


def test_over_a_real_link_everything_arrives(tmp_path, iroh_pair):
    tree = make_odd_tree(tmp_path / "tree")
    (tree / "absolute").unlink()
    write_files(tree, {"large": os.urandom(9 << 20)})
    entries, encoded = listed(tree)
    store, arrived = Store(str(tmp_path / "node")), []

    def serve(stream):
        as_agent(stream, lambda channel, header: transfer.serve_push(channel, header, store, arrived.append) if header["type"] == "Push" else
                 transfer.serve_pull(channel, header, str(tmp_path / "work"), lambda timeout_s: True))

    opened = iroh_pair(serve)
    pushing.push(opened, str(tree), entries, encoded, quiet)
    (tmp_path / "work").mkdir()
    store.materialize(store.tree(arrived[0]), str(tmp_path / "work" / "out"))
    landing.pull(opened(), "run-1", ["out"], str(tmp_path / "outputs"), quiet)
    assert looks(tmp_path / "work" / "out") == looks(tree)
    (tree / "closed").chmod(0o755)
    for path in (tree / "sticky", tree / "setgid"):
        path.chmod(path.stat().st_mode & 0o777)              # a node has no say in those
    assert looks(tmp_path / "outputs" / "out") == looks(tree)


# ---- push: an operator who lies ---------------------------------------------------------------------------------------------------

def operator_says(store, frames):
    """The node's `!` after these frames; what it had stored."""
    arrived = []
    with node(lambda channel, header: transfer.serve_push(channel, header, store, arrived.append)) as stream:
        channel = transfer.Channel(stream)
        for kind, payload in frames:
            channel.writer.frame(kind, payload)
        channel.writer.flush()
        stream.finish(1)
        try:
            while True:
                channel.frame()
        except TransferError as error:
            assert arrived == []
            cache_is_sound(store)
            assert os.listdir(os.path.join(store.root, "cache", "incoming")) == []
            return str(error)


def request(encoded, **fields):
    return [(b"J", json.dumps({"type": "Push", "tree": manifest.tree_id(encoded), "listing": True, **fields}).encode()),
            (b"L", zlib.compress(encoded)), (b"l", b"")]


def file_line(name, data=b"data", **changed):
    return manifest.encode([Entry(name, "file", 0o644, 1, len(data), hashlib.sha256(data).hexdigest())._replace(**changed)])


SHA = hashlib.sha256(b"data").digest()


@pytest.mark.parametrize("frames, says", [
    (request(file_line("a"), tree="0" * 64), "isn't the one that was announced"),
    (request(file_line("a"), tree="../../x"), "tree must be a SHA-256"),
    (request(file_line("a"), tree=7), "tree must be a SHA-256"),
    (request(file_line("../a")), "may not be used"),
    (request(file_line("/a")), "may not be used"),
    (request(file_line("a") * 2), "second entry"),
    (request(file_line("a/b")), "no folder of the listing"),
    (request(manifest.encode([Entry("l", "link", 0o777, 1, target="/etc")]) + file_line("l/passwd")), "no folder of the listing"),
    (request(file_line("a", sha256="../../../../tmp/evil")), "not a SHA-256"),
    (request(b"[1]\n"), "a list of six"),
    (request(file_line("a")[:-5]), "ends in the middle"),
    (request(file_line("a")) + [(b"D", b"data, and more"), (b"E", SHA)], "longer than the listing says"),
    (request(file_line("a")) + [(b"Z", b"")], "inside a file"),
    (request(file_line("a")) + [(b"D", b"data"), (b"E", SHA), (b"D", b"more"), (b"Z", b"")], "more contents"),
    (request(file_line("a"))[:1] + [(b"L", b"no zlib"), (b"l", b"")], "compressed bytes that aren't"),
    (request(file_line("a"))[:1] + [(b"L", zlib.compress(file_line("a"))[:-6]), (b"l", b"")], "end too early"),
    (request(file_line("a"))[:2] + [(b"L", b"behind"), (b"l", b"")], "behind the end"),
    (request(file_line("a"))[:1] + [(b"D", b"")], "where b'L' belongs"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_push_that_is_not_what_it_says_is_refused_with_the_reason_and_changes_nothing(store, tmp_path, frames, says):
    before = looks(tmp_path / "node")
    assert says in operator_says(store, frames)
    assert {path for path in looks(tmp_path / "node") if "contents" not in path} == {path for path in before if "contents" not in path}


def test_a_content_with_wrong_bytes_or_too_few_is_not_stored_and_the_tree_not_known(store):
    for data in (b"dat", b"DATA", b""):
        arrived = []
        with node(lambda channel, header: transfer.serve_push(channel, header, store, arrived.append)) as stream:
            channel = transfer.Channel(stream)
            for kind, payload in request(file_line("a")) + [(b"D", data), (b"E", hashlib.sha256(data).digest()), (b"Z", b"")]:
                channel.writer.frame(kind, payload)
            channel.writer.flush()
            assert channel.answer()["contents"] == 1
            assert list(channel.read_packed(b"W", 10))
            assert channel.answer() == {"stored": 0, "bytes": 0}
        assert arrived == [] and not store.has(SHA.hex(), 4)


def test_a_frame_larger_than_allowed_is_refused_before_it_is_read(store):
    with node(lambda channel, header: transfer.serve_push(channel, header, store, lambda tree: None)) as stream:
        stream.write(b"J" + (2 << 20).to_bytes(4, "big"), 1)
        with pytest.raises(TransferError, match="at most 1048576 are allowed"):
            transfer.Channel(stream).frame()


@pytest.mark.parametrize("answer, says", [
    ({"have": "listing", "contents": 2, "bytes": 8}, "asked for 2 contents and named 1"),
    ({"have": "listing", "contents": -1, "bytes": 8}, "contents must be a number"),
    ({"have": "listing", "contents": 1, "bytes": "many"}, "bytes must be a number"),
    ({"have": "listing", "contents": 1, "bytes": 4, "begun": [1]}, "begun must say"),
    ({}, "contents must be a number"),
])
def test_a_node_that_asks_for_nonsense_gets_an_error_not_files(tree, answer, says):
    write_files(tree, {"a": b"data"})

    def lies(channel, header):
        list(channel.read_packed(b"L", 1000))
        channel.put(answer)
        channel.send_packed(b"W", (b"\1",))
        channel.writer.flush()
        with contextlib.suppress(LinkError):
            while channel.frame()[0] != b"Z":
                pass
            channel.say(stored=1, bytes=4)

    entries, encoded = listed(tree)
    with node(lies) as stream:
        with pytest.raises(WireError, match=says):
            pushing.push(lambda: stream, str(tree), entries, encoded, quiet)
        stream.abort()


# ---- packed ----------------------------------------------------------------------------------------------------------------------

FAR = 0.1
LINES = b"".join(b"step %d: loss %f\n" % (step, random.Random(step).random()) for step in range(40000))


def packs_to(stream):
    """What a side wrote, in parts of what was to be written."""
    return stream.written / len(LINES)


def test_text_goes_packed_over_a_far_link_both_ways_and_as_it_is_over_a_near_one(tmp_path, tree):
    write_files(tree, {"out/log": LINES, "out/noise": b""})
    for rtt_s, least, most in ((FAR, 0.1, 0.5), (0.0005, 1, 1.1)):
        store = Store(str(tmp_path / f"node-{rtt_s}"))
        seen = []
        assert push(store, tree, rtt_s=rtt_s, progress=lambda *args: seen.append(args)) == (1, len(LINES))
        assert least < packs_to(push.stream) < most and seen[-1][:2] == (len(LINES), len(LINES))
        cache_is_sound(store)
        target = tmp_path / f"run-{rtt_s}" / "outputs"
        target.parent.mkdir()
        assert pull(tree, ["out"], target, rtt_s=rtt_s).size_bytes == len(LINES)
        assert least < packs_to(pull.stream.peer) < most and (target / "out" / "log").read_bytes() == LINES


def test_a_node_that_cannot_know_how_far_the_operator_is_is_told(tmp_path, work, target, monkeypatch):
    write_files(work, {"out": LINES})
    monkeypatch.setattr(transfer.Channel, "rtt_s", lambda self: FAR if self.stream.connection.peer_id == "node" else None)
    for peer_id, most in (("", 1.1), ("node", 0.5)):
        (target / "out").unlink(missing_ok=True)
        pull(work, ["out"], target, peer_id=peer_id)
        assert most - 0.5 < packs_to(pull.stream.peer) < most


def test_what_does_not_shrink_goes_as_it_is_over_a_far_link_too(store, tree):
    write_files(tree, {"noise": random.Random(1).randbytes(3 << 20)})
    push(store, tree, rtt_s=FAR)
    assert push.stream.written < (3 << 20) + 2000


def test_many_small_files_of_the_same_kind_go_packed_together(store, tree):
    write_files(tree, {f"f{number:03}.py": b"import os\n\n\ndef run_%d(folder, options):\n    return os.path.join(folder, str(%d))\n" % (number, number)
                       for number in range(500)})
    push(store, tree, rtt_s=FAR)
    listing = len(zlib.compress(listed(tree)[1], 1))
    assert push.stream.written - listing < 500 * 45          # 100 bytes each, with the frames around them; each alone takes 90
    cache_is_sound(store)


@pytest.mark.parametrize("cut", [30_000, 700_000, 1_200_000])
def test_a_packed_transfer_that_broke_off_goes_on_at_the_byte_of_the_file_where_it_was(tmp_path, store, tree, target, cut):
    data = b"".join(random.Random(step).randbytes(20).hex().encode() for step in range(200_000))        # 8 MB that shrink to half of that
    write_files(tree, {"large": data})
    with pytest.raises(LinkError):
        push(store, tree, rtt_s=FAR, cut=cut * 3)
    with pytest.raises(LinkError):
        pull(tree, ["large"], target, rtt_s=FAR, cut_answers=cut * 3)
    push(store, tree, rtt_s=FAR)
    pull(tree, ["large"], target, rtt_s=FAR)
    cache_is_sound(store)
    assert (target / "large").read_bytes() == data
    if cut > 1_000_000:
        assert push.stream.written < 3_000_000 and pull.stream.peer.written < 3_000_000


def test_logs_go_packed_over_a_far_link(tmp_path):
    (tmp_path / "run.out").write_bytes(LINES)
    log = Log(tmp_path, [("run.out", b"more\n"), ("run.err", b"E")])
    log.follow(rtt_s=FAR)
    assert log.got["run.out"] == LINES + b"more\n" and log.got["run.err"] == b"E"
    assert packs_to(log.stream.peer) < 0.5


def test_a_peer_that_does_not_know_packed_frames_gets_none(tmp_path, tree, target, monkeypatch):
    """As one of an older version: it says nothing of `packs`, and takes no notice of it."""
    write_files(tree, {"out": LINES})
    store, arrived = Store(str(tmp_path / "node")), []
    really = transfer.Channel.put
    monkeypatch.setattr(transfer.Channel, "put", lambda self, fields: really(self, {name: fields[name] for name in fields if name != "packs"}))
    assert push(store, tree, rtt_s=FAR, arrived=arrived) == (1, len(LINES)) and packs_to(push.stream) > 1
    assert pull(tree, ["out"], target, rtt_s=FAR).files == 1 and packs_to(pull.stream.peer) > 1
    (tmp_path / "run.out").write_bytes(LINES)
    log = Log(tmp_path)
    log.follow(rtt_s=FAR)
    assert log.got["run.out"] == LINES and packs_to(log.stream.peer) > 1


def test_packed_frames_that_nobody_offered_or_that_hold_too_much_are_refused(store):
    pack = zlib.compressobj(1, zlib.DEFLATED, -15)
    bomb = pack.compress(bytes(100 << 20)) + pack.flush(zlib.Z_SYNC_FLUSH)
    large = file_line("a", size=100 << 20)
    assert "a frame b'C' inside a file" in operator_says(store, request(large) + [(b"C", bomb)])
    assert "holds more than" in operator_says(store, request(large, packs=["deflate"]) + [(b"C", bomb)])
    assert "packed bytes that aren't" in operator_says(store, request(large, packs=["deflate"]) + [(b"C", b"\xff\xff")])


# ---- memory ----------------------------------------------------------------------------------------------------------------------

def test_one_large_file_takes_no_more_memory_than_a_small_one(tmp_path):
    """600 MB pushed and pulled; both sides in one process."""
    script = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import streams as t
from pathlib import Path
base = Path({str(tmp_path)!r})
for name, size in (("small", 1 << 20), ("large", 600 << 20)):
    root = base / name
    root.mkdir()
    with open(root / "sparse", "wb") as stream:
        stream.truncate(size)
    store = t.Store(str(base / ("node-" + name)))
    assert t.push(store, root).size_bytes == size
    (base / ("run-" + name)).mkdir()
    assert t.pull(root, ["sparse"], base / ("run-" + name) / "outputs").size_bytes == size
    print(t.peak_mb())
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=300, cwd=ROOT)
    small, large = map(int, done.stdout.split())
    assert large < small + 25 and large < 150, (small, large)
    assert (tmp_path / "run-large" / "outputs" / "sparse").stat().st_size == 600 << 20
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            path.unlink()


# ---- follow ----------------------------------------------------------------------------------------------------------------------

class Log:
    """The logs of a run that grows step by step: each time the node has sent all and waits, the next step is taken."""

    def __init__(self, folder, steps=()):
        self.folder, self.steps = folder, list(steps)

    def over(self):
        return not self.steps

    def wait(self, pause):
        if self.steps:
            name, data = self.steps.pop(0)
            with open(self.folder / name, "ab") as stream:
                stream.write(data)

    def follow(self, offsets=None, tail=None, live=True, **cuts):
        self.got = {name: b"" for name in transfer.LOGS}
        self.pieces, self.begins = [], {}

        def take(name, position, data):
            assert position == self.begins.setdefault(name, position) + len(self.got[name])
            self.got[name] += data
            self.pieces.append((name, data))

        with node(lambda channel, header: transfer.serve_follow(channel, header, str(self.folder), self.over, self.wait), **cuts) as stream:
            self.stream = stream
            return transfer.follow(stream, "run-1", offsets or {name: 0 for name in transfer.LOGS}, take, tail, live)


def test_logs_arrive_as_they_grow_each_byte_once_whatever_it_is(tmp_path):
    odd = b"\xed\xee\xef \x00\r\n\xff"
    half, rest = "é".encode()[:1], "é".encode()[1:]
    log = Log(tmp_path, [("run.out", odd), ("run.err", b"E"), ("run.out", half), ("run.out", rest + b"\n"), ("setup.out", b"S" * 700_000)])
    sizes = log.follow()
    assert log.got == {"run.out": odd + half + rest + b"\n", "run.err": b"E", "setup.out": b"S" * 700_000, "setup.err": b""}
    assert sizes == {"run.out": len(odd) + 3, "run.err": 1, "setup.out": 700_000, "setup.err": 0}
    assert [data for name, data in log.pieces if name == "run.out"] == [odd, half, rest + b"\n"]       # at once, not at the end of a line


def test_following_goes_on_at_the_offsets_and_a_log_that_never_appears_is_empty(tmp_path):
    (tmp_path / "run.out").write_bytes(b"0123456789")
    log = Log(tmp_path)
    assert log.follow({"run.out": 4, "setup.err": 0}) == {"run.out": 10, "setup.err": 0}
    assert log.got["run.out"] == b"456789"
    assert log.follow({"run.out": 10}) == {"run.out": 10} and log.got["run.out"] == b""


@pytest.mark.parametrize("log, lines, begins", [
    (b"a\nb\nc\n", 2, 2), (b"a\nb\nc", 2, 2), (b"a\nb\nc\n", 3, 0), (b"a\nb\nc\n", 4, 0), (b"a\nb\nc\n", 0, 6), (b"a\nb\nc", 1, 4),
    (b"", 0, 0), (b"", 5, 0), (b"\n", 1, 0), (b"\n\n", 1, 1), (b"\n\n\nx", 2, 2), (b"x", 1, 0), (b"x", 0, 1), (b"a\r\nb\r\n", 1, 3),
    (b"x" * 700_000 + b"\ny\n", 1, 700_001), (b"x" * 700_000 + b"\n" + b"y" * 700_000, 1, 700_001), (b"x\n" * 500_000, 400_000, 200_000),
    (b"x" * (transfer.TAIL_BLOCK - 1) + b"\n", 1, 0), (b"a\n" + b"x" * (transfer.TAIL_BLOCK - 1) + b"\n", 1, 2),
    (b"a\n" + b"x" * transfer.TAIL_BLOCK, 1, 2), (b"a\n" + b"x" * (transfer.TAIL_BLOCK - 2) + b"\n", 2, 0),
], ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else str(value))
def test_a_tail_begins_at_the_last_lines(tmp_path, log, lines, begins):
    (tmp_path / "run.out").write_bytes(log)
    one = Log(tmp_path)
    assert one.follow({"run.out": 0}, tail=lines) == {"run.out": len(log)}
    assert one.got["run.out"] == log[begins:] and one.begins.get("run.out", len(log)) == begins


def test_a_tail_goes_on_with_what_grows_and_has_all_of_a_log_that_began_later(tmp_path):
    (tmp_path / "run.out").write_bytes(b"1\n2\n3\n")
    log = Log(tmp_path, [("run.out", b"4\n"), ("run.err", b"e1\ne2\ne3\n")])
    log.follow({"run.out": 2, "run.err": 0}, tail=1)
    assert log.got["run.out"] == b"3\n4\n" and log.begins["run.out"] == 4 and log.got["run.err"] == b"e1\ne2\ne3\n"


def test_a_tail_tells_at_once_where_each_log_begins(tmp_path):
    """Else a connection that breaks before a silent log's first byte would bring the whole of it the next time."""
    (tmp_path / "run.out").write_bytes(b"1\n2\n3\n")
    log = Log(tmp_path, [("run.err", b"e")])
    log.follow({"run.out": 0, "run.err": 0}, tail=0)
    assert log.pieces == [("run.out", b""), ("run.err", b""), ("run.err", b"e")] and log.begins == {"run.out": 6, "run.err": 0}


@pytest.mark.parametrize("answer", [True, False, None])
def test_the_node_knows_whether_the_logs_are_kept_when_the_operator_goes_on(tmp_path, answer):
    (tmp_path / "run.out").write_bytes(b"0123456789")
    said, asked = [], []
    serve = lambda channel, header: said.append(transfer.serve_follow(channel, header, str(tmp_path), lambda: True, lambda pause: None))
    with node(serve) as stream:
        kept = None if answer is None else lambda sizes: asked.append(sizes) or answer
        transfer.follow(stream, "run-1", {"run.out": 4}, lambda name, position, data: None, kept=kept)
    assert said == [answer is True] and asked == ([] if answer is None else [{"run.out": 10}])


def test_an_operator_that_goes_before_it_says_so_keeps_nothing(tmp_path):
    (tmp_path / "run.out").write_bytes(b"0123456789")
    said = []
    serve = lambda channel, header: said.append(transfer.serve_follow(channel, header, str(tmp_path), lambda: True, lambda pause: None))
    with node(serve) as stream:
        channel = transfer.Channel(stream)
        channel.say(type="Follow", run_id="run-1", offsets={"run.out": 0}, keeps=True)
        while channel.frame()[0] != b"Z":
            pass
        channel.leave()
    assert said == []


def test_the_tail_of_a_log_of_2_gb_is_there_at_once(tmp_path, monkeypatch):
    with open(tmp_path / "run.out", "wb") as stream:
        stream.truncate(2 << 30)
        stream.seek(0, 2)
        stream.write(b"\nlast\n")
    read, really = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or really(fd, size, at))
    log = Log(tmp_path)
    log.follow({"run.out": 0}, tail=1)
    assert log.got["run.out"] == b"last\n" and 0 < sum(read) < 8 << 20


def test_the_tail_of_64_mb_without_a_line_feed_is_all_of_it(tmp_path):
    with open(tmp_path / "run.out", "wb") as stream:
        stream.truncate(64 << 20)
    with open(tmp_path / "run.out", "rb") as stream:
        assert transfer.tail_start(stream.fileno(), 64 << 20, 3) == 0
    log = Log(tmp_path)
    assert log.follow({"run.out": 0}, tail=0) == {"run.out": 64 << 20} and log.got["run.out"] == b""


def test_a_follow_that_is_not_live_ends_where_the_logs_end_now(tmp_path):
    (tmp_path / "run.out").write_bytes(b"0123456789" * 100_000)
    grows = Log(tmp_path, [("run.out", b"never asked for")])
    assert grows.follow({"run.out": 4, "run.err": 0}, live=False) == {"run.out": 1_000_000, "run.err": 0}
    assert grows.got["run.out"] == (b"0123456789" * 100_000)[4:] and grows.steps
    assert grows.follow(tail=2, live=False)["run.out"] == 1_000_000 and len(grows.got["run.out"]) == 1_000_000
    assert grows.follow({"run.out": 2_000_000}, live=False) == {"run.out": 2_000_000}      # nothing is there


def test_a_silent_log_costs_almost_nothing(tmp_path):
    """It is looked at five times a second, for hours: what counts is what a round costs, the waiting itself apart."""
    (tmp_path / "run.out").write_bytes(b"x")
    clocks, pauses = [], []

    def wait(pause):
        clocks.append(time.thread_time())
        pauses.append(pause)

    serve = lambda channel, header: transfer.serve_follow(channel, header, str(tmp_path), lambda: len(pauses) > 2000, wait)
    with node(serve) as stream:
        transfer.follow(stream, "run-1", {name: 0 for name in transfer.LOGS}, lambda name, position, data: None)
    assert pauses[0] < 0.05 and pauses[-1] == 0.2                      # a pause grows, and never so long that a line comes late
    assert (clocks[-1] - clocks[0]) / sum(pauses) < 0.001


@pytest.mark.parametrize("header", [{"tail": -1}, {"tail": "5"}, {"tail": True}, {"tail": 1.5}])
def test_a_tail_that_makes_no_sense_is_refused(tmp_path, header):
    with node(lambda channel, header: transfer.serve_follow(channel, header, str(tmp_path), lambda: True, lambda pause: None)) as stream:
        channel = transfer.Channel(stream)
        channel.say(type="Follow", run_id="run-1", offsets={"run.out": 0}, **header)
        with pytest.raises(TransferError, match="tail must be a number"):
            channel.frame()


def test_a_follow_cut_anywhere_goes_on_without_losing_or_doubling_a_byte(tmp_path):
    data = bytes(range(256)) * 4
    for cut in range(0, 1200, 41):
        folder = tmp_path / str(cut)
        folder.mkdir()
        log = Log(folder, [("run.out", data[at:at + 100]) for at in range(0, len(data), 100)])
        with contextlib.suppress(LinkError):
            log.follow(cut_answers=cut)
        first = log.got["run.out"]
        log.follow({"run.out": len(first)})
        assert first + log.got["run.out"] == data


@pytest.mark.parametrize("offsets", [{"../secret": 0}, {"run.out": -1}, {"run.out": "0"}, [], {"run.out": True}])
def test_offsets_that_make_no_sense_are_refused(tmp_path, offsets):
    with node(lambda channel, header: transfer.serve_follow(channel, header, str(tmp_path), lambda: True, lambda pause: None)) as stream:
        channel = transfer.Channel(stream)
        channel.say(type="Follow", run_id="run-1", offsets=offsets)
        with pytest.raises(TransferError, match="offsets must|must be a number"):
            channel.frame()


@pytest.mark.parametrize("frames", [[(b"5", b"x")], [(b"1", b"x")], [(b"Z", b"[]")], [(b"Z", b'{"run.out":"many"}')], [(b"Z", b"{}")],
                                    [(b"3", b"x"), (b"Z", b'{"run.out":2}')]])
def test_a_node_that_sends_nonsense_for_a_log_is_an_error(frames):
    def lies(channel, header):
        for kind, payload in frames:
            channel.writer.frame(kind, payload)
        channel.writer.flush()

    with node(lies) as stream, pytest.raises(WireError):
        transfer.follow(stream, "run-1", {"run.out": 0}, lambda name, position, data: None)


def test_a_single_line_of_50_mb_passes_in_pieces(tmp_path):
    with open(tmp_path / "run.out", "wb") as stream:
        stream.truncate(50 << 20)
    largest, total = 0, 0

    def take(name, position, data):
        nonlocal largest, total
        largest, total = max(largest, len(data)), total + len(data)

    with node(lambda channel, header: transfer.serve_follow(channel, header, str(tmp_path), lambda: True, lambda pause: None)) as stream:
        assert transfer.follow(stream, "run-1", {"run.out": 0}, take) == {"run.out": 50 << 20}
    assert total == 50 << 20 and largest <= 1 << 20
