"""Push, pull, follow: what arrives, what is sent twice, links that break anywhere, files that change, and peers that lie."""

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
from pathlib import Path

import pytest

from gpurun import manifest, store as store_module, transfer, wire, workspace
from gpurun.errors import GpurunError, LinkError, LinkTimeoutError, TransferError, UnsafeNameError, WireError, WorkspaceError
from gpurun.link import Link
from gpurun.manifest import Entry
from gpurun.store import Store
from trees import as_nobody, looks, make_odd_tree, rsync_differences, tiny_disk

ROOT = Path(__file__).resolve().parent.parent
IN_FLIGHT = 2 << 20


class Pipe:
    """One end of a stream in memory. It breaks, for both ends, when this end has written `cut` bytes."""

    def __init__(self):
        self.peer = None
        self.ready = threading.Condition()
        self.parts, self.size = [], 0
        self.ended = self.broken = self.stopped = False
        self.writes = self.written = 0
        self.cut = None

    def read(self, timeout_s):
        with self.ready:
            if not self.ready.wait_for(lambda: self.parts or self.ended or self.broken, min(timeout_s, 20)):
                raise LinkTimeoutError("nothing came")
            if self.broken:
                raise LinkError("the link broke")
            if not self.parts:
                return b""
            part = self.parts.pop(0)
            self.size -= len(part)
            self.ready.notify_all()
            return part

    def write(self, data, timeout_s):
        self.writes += 1
        if self.cut is not None and self.written + len(data) > self.cut:
            self._give(data[:self.cut - self.written], timeout_s)
            with self.peer.ready:          # what was on its way before still arrives
                self.peer.ready.wait_for(lambda: not self.peer.parts or self.peer.broken, 5)
            self.abort()
            raise LinkError("the link broke")
        self._give(data, timeout_s)
        self.written += len(data)

    def _give(self, data, timeout_s):
        peer = self.peer
        with peer.ready:
            if not peer.ready.wait_for(lambda: peer.size < IN_FLIGHT or peer.broken or peer.stopped, min(timeout_s, 20)):
                raise LinkTimeoutError("nothing was taken")
            if peer.broken or self.broken or peer.stopped:
                raise LinkError("the link broke")
            if data:
                peer.parts.append(bytes(data))
                peer.size += len(data)
                peer.ready.notify_all()

    def finish(self, timeout_s):
        with self.peer.ready:
            self.peer.ended = True
            self.peer.ready.notify_all()

    def stop(self):
        """This end reads no more: what the other one writes fails, as on a QUIC stream whose reader is gone."""
        with self.ready:
            self.stopped = True
            self.ready.notify_all()

    def abort(self):
        for end in (self, self.peer):
            with end.ready:
                end.broken = True
                end.ready.notify_all()


def pipes():
    one, two = Pipe(), Pipe()
    one.peer, two.peer = two, one
    return one, two


def as_agent(stream, work):
    """What agent.py does around a request."""
    channel = transfer.Channel(stream)
    try:
        work(channel, transfer.read_request(channel, 20))
    except LinkError:
        stream.abort()
    except GpurunError as error:
        with contextlib.suppress(LinkError):
            transfer.report(channel, error)
        if isinstance(stream, Pipe):
            stream.stop()


@contextlib.contextmanager
def node(work, cut=None, cut_answers=None):
    """The operator's end of a stream whose other end is served by `work(channel, header)`; it breaks after so many bytes either way."""
    mine, its = pipes()
    mine.cut, its.cut = cut, cut_answers
    thread = threading.Thread(target=as_agent, args=(its, work), daemon=True)
    thread.start()
    try:
        yield mine
    finally:
        thread.join(20)
        assert not thread.is_alive(), "the node's side still waits"


def quiet(done, total, name):
    pass


def listed(root):
    entries = workspace.scan(str(root), ()).entries
    return entries, manifest.encode(entries)


def push(store, root, entries=None, encoded=None, progress=quiet, arrived=None, **cuts):
    if entries is None:
        entries, encoded = listed(root)
    trees = [] if arrived is None else arrived
    with node(lambda channel, header: transfer.serve_push(channel, header, store, trees.append), **cuts) as stream:
        try:
            pushed = transfer.push(stream, str(root), entries, encoded, progress)
        finally:
            push.stream = stream
    return pushed


def pull(work, declared, target, progress=quiet, over=lambda timeout_s: True, **cuts):
    acknowledged = []
    serve = lambda channel, header: acknowledged.append(transfer.serve_pull(channel, header, str(work), over))
    with node(serve, **cuts) as stream:
        try:
            pulled = transfer.pull(stream, "run-1", declared, str(target), progress)
        finally:
            pull.stream = stream
    assert acknowledged == [] or acknowledged[0].files == pulled.files
    return pulled


def write_files(root, files):
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "node"))


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def target(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "outputs"


def cache_is_sound(store):
    for path in Path(store.root, "cache", "contents").rglob("*"):
        if path.is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.parent.name + path.name


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


def test_a_long_listing_goes_only_when_the_node_does_not_know_the_tree(store, tree):
    write_files(tree, {f"{number:05}-{'long' * 20}": b"" for number in range(2000)})
    _, encoded = listed(tree)
    assert len(encoded) > transfer.INLINE_LISTING
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


def change(path):
    path.write_bytes(b"CHANGED".ljust(path.stat().st_size))


CHANGES = {
    "other bytes": change, "shorter": lambda path: path.write_bytes(b"s"), "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"), "gone": os.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()), "a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}


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


@pytest.fixture
def iroh_pair():
    """`serve(work)` makes `work(stream)` the other end of real streams; it gives a function that opens one."""
    links = [Link(os.urandom(32), "127.0.0.1:0", [wire.TRANSFER_ALPN]) for _ in range(2)]

    def serve(work):
        links[1].serve(lambda peer: peer == links[0].id, work)
        return links[0].dial(links[1].id, [f"127.0.0.1:{links[1].port()}"], wire.TRANSFER_ALPN, 10).open

    yield serve
    for link in links:
        link.close()


def test_over_a_real_link_the_reason_of_a_node_that_stops_taking_reaches_an_operator_who_is_still_sending(tmp_path, tree, iroh_pair, monkeypatch):
    write_files(tree, {f"f{number:02}": os.urandom(1 << 20) for number in range(48)})
    entries, encoded = listed(tree)
    monkeypatch.setattr(Store, "check_room", lambda *args: None)
    with tiny_disk(tmp_path / "disk", "3m") as disk:
        store = Store(str(disk / "node"))
        opened = iroh_pair(lambda stream: as_agent(stream, lambda channel, header: transfer.serve_push(channel, header, store, lambda tree: None)))
        began = time.monotonic()
        with pytest.raises(TransferError, match="No space left on device"):
            transfer.push(opened(), str(tree), entries, encoded, quiet)
        assert time.monotonic() - began < 15


def test_over_a_real_link_an_operator_that_gives_up_frees_the_node_at_once(tmp_path, work, iroh_pair):
    write_files(work, {f"out/f{number:02}": os.urandom(1 << 20) for number in range(48)})
    ended = threading.Event()

    def serve(stream):
        as_agent(stream, lambda channel, header: transfer.serve_pull(channel, header, str(work), lambda timeout_s: True))
        ended.set()

    opened = iroh_pair(serve)
    with tiny_disk(tmp_path / "disk", "3m") as disk:
        with pytest.raises(TransferError, match="no room here"):
            transfer.pull(opened(), "run-1", ["out"], str(disk / "outputs"), quiet)
        assert ended.wait(15)


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
    transfer.push(opened(), str(tree), entries, encoded, quiet)
    (tmp_path / "work").mkdir()
    store.materialize(store.tree(arrived[0]), str(tmp_path / "work" / "out"))
    transfer.pull(opened(), "run-1", ["out"], str(tmp_path / "outputs"), quiet)
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
    (request(file_line("a"), tree=7), "tree must be a text"),
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
            transfer.push(stream, str(tree), entries, encoded, quiet)
        stream.abort()


# ---- find_outputs ----------------------------------------------------------------------------------------------------------------

def found(work, *declared):
    outputs, missing, refused = transfer.find_outputs(str(work), declared)
    return [output.entry.path for output in outputs], missing, refused


def test_outputs_are_found_with_the_folders_above_them(work):
    write_files(work, {"metrics.json": b"{}", "out/a/b": b"", "deep/er/file": b"x", "a-b/z": b"", "not/declared": b"", "a/z": b""})
    paths, missing, refused = found(work, "metrics.json", "out/", "./deep//er/file", "none", "deep/none", "a", "a-b")
    assert sorted(paths) == sorted(["metrics.json", "out", "out/a", "out/a/b", "deep", "deep/er", "deep/er/file", "a", "a/z", "a-b", "a-b/z"])
    assert missing == ["deep/none", "none"] and refused == []
    assert manifest.decode(manifest.encode(output.entry for output in transfer.find_outputs(str(work), ["a", "a-b", "deep/er/file"])[0]), hashed=False)


def test_an_output_inside_another_one_comes_once(work):
    write_files(work, {"out/a/b": b"x", "out/c": b"y"})
    assert found(work, "out", "out/a", "out/a/b") == (["out", "out/a", "out/a/b", "out/c"], [], [])


def test_a_declared_link_inside_brings_what_it_leads_to(work, target):
    write_files(work, {"runs/7/model": b"weights", "real": b"file"})
    (work / "latest").symlink_to("runs/7")
    (work / "one").symlink_to(work / "real")
    pulled = pull(work, ["latest", "one"], target)
    assert (target / "latest" / "model").read_bytes() == b"weights" and not (target / "latest").is_symlink()
    assert (target / "one").read_bytes() == b"file" and not (target / "one").is_symlink() and pulled.refused == []


def test_what_lies_outside_is_refused_and_never_read(work, tmp_path, target):
    secret = write_files(tmp_path / "secret", {"key": b"PRIVATE"})
    (work / "out").symlink_to(secret)
    (work / "file").symlink_to(secret / "key")
    (work / "folder").mkdir()
    (work / "folder" / "up").symlink_to("../../secret/key")
    (work / "folder" / "absolute").symlink_to(secret / "key")
    (work / "parent").symlink_to(secret)
    (work / "sideways").symlink_to("../secret/../work/folder")       # ends inside
    pulled = pull(work, ["out", "file", "folder", "parent/key", "sideways"], target)
    assert {path for path, _ in pulled.refused} == {"out", "file", "parent/key", "folder/up", "folder/absolute", "sideways/up", "sideways/absolute"}
    assert all("out" in why or "absolute" in why for _, why in pulled.refused)
    assert all(b"PRIVATE" not in path.read_bytes() for path in target.rglob("*") if path.is_file())
    assert sorted(os.listdir(target)) == ["folder", "sideways"]


def test_a_parent_that_is_a_link_to_a_folder_inside_becomes_a_folder(work, target):
    write_files(work, {"real/data/x": b"1"})
    (work / "way").symlink_to("real")
    pulled = pull(work, ["way/data/x"], target)
    assert (target / "way" / "data" / "x").read_bytes() == b"1" and pulled.missing == [] and not (target / "way").is_symlink()


def test_what_is_neither_file_nor_folder_is_refused_and_the_rest_comes(work, target):
    os.mkfifo(work / "fifo")
    write_files(work, {"out/a": b"x"})
    os.mkfifo(work / "out" / "pipe")
    (work / "loop").symlink_to("loop")
    (work / "dangling").symlink_to("nowhere")
    pulled = pull(work, ["fifo", "out", "loop", "dangling"], target)
    assert dict(pulled.refused)["fifo"] == "is neither a file nor a folder" and dict(pulled.refused)["out/pipe"] == "a FIFO"
    assert "loop" in dict(pulled.refused) and pulled.missing == ["dangling"] and pulled.files == 1


def test_an_output_that_cannot_be_read_is_refused_and_what_is_beside_it_comes(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/") and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)

    def check():
        work = write_files(tmp_path / "mine", {"out/a": b"a", "out/closed/x": b"x", "out/secret": b"s", "out/z": b"z", "shut/x": b"x"})
        for name in ("out/closed", "out/secret", "shut"):
            (work / name).chmod(0)
        target = tmp_path / "run" / "outputs"
        target.parent.mkdir()
        pulled = pull(work, ["out", "shut", "shut/x"], target)
        assert {"out/closed", "out/secret", "shut"} <= {path for path, _ in pulled.refused}
        assert all("Permission denied" in why for _, why in pulled.refused)
        assert (target / "out" / "a").read_bytes() == b"a" and (target / "out" / "z").read_bytes() == b"z"
        assert not (target / "out" / "secret").exists()

    as_nobody(check)


def test_no_workdir_means_that_all_outputs_are_missing(tmp_path):
    assert found(tmp_path / "never", "a", "b/c") == ([], ["a", "b/c"], [])


# ---- pull ------------------------------------------------------------------------------------------------------------------------

def test_outputs_are_what_rsync_would_have_brought(tmp_path, work, target):
    make_odd_tree(work / "out")
    (work / "out" / "absolute").unlink()                     # leads out
    pulled = pull(work, ["out"], target)
    assert pulled.refused == [] and pulled.missing == []
    (work / "out" / "closed").chmod(0o755)                   # folders stay writable to their owner here, so that they can be removed
    (target / "out" / "closed").chmod(0o755)
    theirs, ours = looks(work / "out"), looks(target / "out")
    assert ours == {path: (mode.replace("0o101644", "0o100644").replace("0o102755", "0o100755"), *rest) for path, (mode, *rest) in theirs.items()}


def test_a_second_pull_sends_nothing_that_is_here(work, target):
    write_files(work, {"out/a": os.urandom(1 << 20), "out/b": b"b"})
    pull(work, ["out"], target)
    assert pull(work, ["out"], target) == (2, (1 << 20) + 1, [], [])
    assert pull.stream.peer.written < 2000
    (target / "out" / "b").write_bytes(b"touched here")
    pull(work, ["out"], target)
    assert (target / "out" / "b").read_bytes() == b"b"


def test_a_pull_cut_anywhere_shows_only_whole_files_and_the_next_one_brings_the_rest(tmp_path, work):
    write_files(work, {"out/a": b"a" * 50, "out/b/c": b"c" * 700, "out/d": b"d" * 200, "out/e": b""})
    (work / "out" / "l").symlink_to("a")
    (tmp_path / "all").mkdir()
    pull(work, ["out", "none"], tmp_path / "all" / "outputs")
    size, requests = pull.stream.peer.written, pull.stream.written
    for cuts in [{"cut_answers": at} for at in range(0, size, 19)] + [{"cut": at} for at in range(0, requests, 17)]:
        run = tmp_path / f"{next(iter(cuts))}-{next(iter(cuts.values()))}"
        run.mkdir()
        with pytest.raises(LinkError):
            pull(work, ["out", "none"], run / "outputs", **cuts)
        for path in (run / "outputs").rglob("*"):
            if path.is_file():
                assert path.read_bytes() == (work / path.relative_to(run / "outputs")).read_bytes(), cuts
        assert os.listdir(run) in ([], ["outputs"])
        assert pull(work, ["out", "none"], run / "outputs").missing == ["none"]
        assert looks(run / "outputs" / "out") == looks(work / "out"), cuts
        assert os.listdir(run) == ["outputs"]


def test_a_large_output_goes_on_where_its_pull_broke_off(work, target):
    write_files(work, {"large": random.Random(2).randbytes(8 << 20), "z": b"z"})
    with pytest.raises(LinkError):
        pull(work, ["large", "z"], target, cut_answers=6 << 20)
    assert not (target / "large").exists()
    seen = []
    pull(work, ["large", "z"], target, progress=lambda *args: seen.append(args))
    assert pull.stream.peer.written < 3 << 20 and seen[-1][:2] == ((8 << 20) + 1, (8 << 20) + 1)
    assert (target / "large").read_bytes() == (work / "large").read_bytes() and os.listdir(target.parent) == ["outputs"]


def test_the_part_of_an_output_that_was_damaged_is_noticed_and_the_next_pull_brings_it_whole(work, target):
    write_files(work, {"large": random.Random(2).randbytes(8 << 20)})
    with pytest.raises(LinkError):
        pull(work, ["large"], target, cut_answers=6 << 20)
    part, = (target.parent / ".incoming-outputs").iterdir()
    with open(part, "r+b") as stream:
        stream.write(b"zeros after a power loss")
    with pytest.raises(TransferError, match="arrived broken"):
        pull(work, ["large"], target)
    assert not (target / "large").exists()
    pull(work, ["large"], target)
    assert (target / "large").read_bytes() == (work / "large").read_bytes()


def test_a_pull_waits_for_the_end_of_the_run_and_tells_that_it_lives(work, target):
    write_files(work, {"out": b"early"})
    asked = []

    def over(timeout_s):
        asked.append(timeout_s)
        if len(asked) == 3:
            write_files(work, {"out": b"late"})
        return len(asked) > 2

    pull(work, ["out"], target, over=over)
    assert (target / "out").read_bytes() == b"late" and len(asked) == 3


def test_a_full_disk_here_is_named_with_free_and_needed_bytes_and_a_second_pull_completes(tmp_path, work, monkeypatch):
    write_files(work, {f"out/f{number}": os.urandom(1 << 20) for number in range(8)})
    with tiny_disk(tmp_path / "disk", "6m") as disk:
        target = disk / "run" / "outputs"
        target.parent.mkdir()
        with pytest.raises(TransferError) as caught:
            pull(work, ["out"], target)
        assert str(target) in str(caught.value) and "8,388,608 bytes" in str(caught.value) and "still on the node" in str(caught.value)
        really, lie = transfer.free_bytes, [1 << 30]
        monkeypatch.setattr(transfer, "free_bytes", lambda path: lie.pop() if lie else really(path))     # another takes the room meanwhile
        with pytest.raises(TransferError) as caught:
            pull(work, ["out"], target)
        text = str(caught.value)
        assert "'out/f" in text and "No space left" in text and "free, needed are" in text and "still on the node" in text
        assert os.listdir(target.parent) == ["outputs"]
        here = [path for path in target.rglob("*") if path.is_file()]
        assert 3 <= len(here) <= 6 and all(path.read_bytes() == (work / path.relative_to(target)).read_bytes() for path in here)
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert pull(work, ["out"], target).files == 8
        assert pull.stream.peer.written < (9 - len(here)) << 20
        assert looks(target / "out") == looks(work / "out")


def test_thousands_of_outputs_need_few_open_files_on_either_side(tmp_path):
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.path[:0] = [{str(ROOT / "tests")!r}]
import test_transfer as t
from pathlib import Path
work, run = Path({str(tmp_path)!r}) / "work", Path({str(tmp_path)!r}) / "run"
run.mkdir()
t.write_files(work, {{f"out/{{n // 500}}/{{n}}": b"%d" % n for n in range(4000)}})
assert t.pull(work, ["out"], run / "outputs").files == 4000
store = t.Store(str(Path({str(tmp_path)!r}) / "node"))
assert t.push(store, run / "outputs").files == 4000
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, cwd=ROOT)
    assert looks(tmp_path / "run" / "outputs" / "out") == looks(tmp_path / "work" / "out")


# ---- pull: a node that lies -------------------------------------------------------------------------------------------------------

def node_says(tmp_path, entries, frames=(), declared=("out",), summary=None, missing=(), listing=None, error=(TransferError, WireError), target=None):
    """The error of a pull from a node that answers with these; nothing outside the outputs folder may have changed."""
    target = target or tmp_path / "run" / "outputs"
    target.parent.mkdir(exist_ok=True)
    write_files(tmp_path, {"victim/.bashrc": b"mine", "run/run.json": b"{}"})
    before = {path: look for path, look in looks(tmp_path).items() if not path.startswith(("run/outputs", "run/.incoming"))}

    def lies(channel, header):
        list(channel.read_packed(b"L", 1 << 20))
        channel.put({"entries": len(entries), "bytes": 0, "refused": []} if summary is None else summary)
        channel.send_packed(b"M", (json.dumps(missing).encode(),))
        if listing is None:
            channel.send_packed(b"L", (b"".join(map(manifest._line, entries)).encode(),) if entries and isinstance(entries[0], str) else
                                (manifest.encode(entries),))
        else:
            for kind, payload in listing:
                channel.writer.frame(kind, payload)
        for kind, payload in frames:
            channel.writer.frame(kind, payload)
        channel.writer.flush()
        with contextlib.suppress(LinkError):
            channel.frame()

    with node(lies) as stream:
        try:
            with pytest.raises(error) as caught:
                transfer.pull(stream, "run-1", list(declared), str(target), quiet)
        finally:
            stream.abort()
    after = {path: look for path, look in looks(tmp_path).items() if not path.startswith(("run/outputs", "run/.incoming"))}
    changed = {path for path in before | after if before.get(path, ())[::2] != after.get(path, ())[::2]}      # the times of folders move
    assert changed == set()
    assert not (target.parent / ".incoming-outputs").exists()
    return str(caught.value)


def out(name, kind="file", size=4, target=""):
    return Entry(name, kind, 0o755, 1, size if kind == "file" else 0, "", target)


DATA = [(b"D", b"data"), (b"E", SHA)]


@pytest.mark.parametrize("entries, says", [
    ([out("../victim/.bashrc")], "may not be used"),
    ([out("/etc/cron.d/evil")], "may not be used"),
    ([out("out", "dir"), out("out/../../victim/.bashrc")], "may not be used"),
    ([out("out", "dir"), out("out/.")], "may not be used"),
    ([out("out", "dir"), out("out//x")], "may not be used"),
    ([out("other")], "not a declared output"),
    ([out("outside")], "not a declared output"),
    ([out("out", "link", target="../../victim"), out("out/.bashrc")], "no folder of the listing"),
    ([out("out", "link", target="../../victim")], "leads out"),
    ([out("out", "link", target="/etc/passwd")], "absolute"),
    ([out("out", "dir"), out("out/a", "link", target="b/../../..")], "'..' behind a name"),
    ([out("out", "dir"), out("out/a"), out("out/a")], "a second entry"),
    ([out("out"), out("out/x")], "no folder of the listing"),
    ([out("out", "file", size=1 << 62)], "no room here"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_name_that_an_evil_node_sends_is_refused_before_anything_is_written(tmp_path, entries, says):
    assert says in node_says(tmp_path, entries, DATA * len(entries) + [(b"Z", b"")]).replace("the outputs have no room here", "no room here")
    assert not list((tmp_path / "run" / "outputs").rglob("*"))


@pytest.mark.parametrize("frames, says", [
    ([(b"D", b"data and more"), (b"E", SHA), (b"Z", b"")], "longer than the node said"),
    ([(b"D", b"dat"), (b"E", hashlib.sha256(b"dat").digest()), (b"Z", b"")], "arrived broken"),
    ([(b"D", b"DATA"), (b"E", SHA), (b"Z", b"")], "arrived broken"),
    ([(b"D", b"data"), (b"E", b""), (b"Z", b"")], "arrived broken"),
    ([(b"S", b""), (b"Z", b"")], "isn't here and the node doesn't send it"),
    ([(b"R", b""), *DATA, (b"Z", b"")], "which isn't here"),
    ([(b"D", b"da"), (b"Z", b"")], "inside a file"),
    ([*DATA, *DATA, (b"Z", b"")], "more outputs than were listed"),
    ([(b"Z", b"")], "inside a file"),
    ([(b"!", b"the node's own words")], "the node's own words"),
    ([(b"?", b"")], "inside a file"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_contents_that_are_not_what_the_node_said_never_get_their_name(tmp_path, frames, says):
    assert says in node_says(tmp_path, [out("out")], frames)
    assert not [path for path in (tmp_path / "run" / "outputs").rglob("*") if path.read_bytes() != b"data"]


@pytest.mark.parametrize("parts, says", [
    ({"listing": [(b"L", b"[\"p\",420,1,0,\"\",\"out\"]\n"), (b"l", b"")]}, "compressed bytes that aren't"),
    ({"listing": [(b"L", zlib.compress(b'["p",420,1,0,"","out"]\n')), (b"l", b"")]}, "neither a file nor"),      # a device, say
    ({"listing": [(b"L", zlib.compress(b"x" * (1 << 20))), (b"l", b"")]}, "longer than"),
    ({"summary": {"refused": "all"}}, "list of refused"),
    ({"summary": {"refused": [["a"]]}}, "list of refused"),
    ({"missing": ["never declared"]}, "nobody declared"),
    ({"missing": {"a": 1}}, "nobody declared"),
    ({"missing": [["out"]]}, "nobody declared"),
])
def test_an_answer_that_makes_no_sense_is_an_error(tmp_path, parts, says):
    assert says in node_says(tmp_path, [out("out")], DATA + [(b"Z", b"")], **parts)


def test_a_listing_that_unpacks_to_far_more_than_it_is_ends_with_an_error_and_takes_little_memory(tmp_path):
    script = f"""
import resource, sys, zlib
sys.path[:0] = [{str(ROOT / "tests")!r}]
import test_transfer as t
from pathlib import Path
pack = zlib.compressobj(9)
bomb = b"".join([pack.compress(bytes(1 << 20)) for _ in range(300)] + [pack.flush()])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(t.node_says(Path({str(tmp_path)!r}), [], listing=[(b"L", bomb[at:at + 500000]) for at in range(0, len(bomb), 500000)] + [(b"l", b"")]))
pack = zlib.compressobj(9)
bomb = b"".join([pack.compress(b"".join(t.manifest._line(t.out("out/%d" % (n * 1000 + m))).encode() for m in range(1000))) for n in range(3)] + [pack.flush()])
t.manifest.MAX_ENTRIES = 2000
print(t.node_says(Path({str(tmp_path)!r}), [], listing=[(b"L", t.zlib.compress(t.manifest._line(t.out("out", "dir")).encode() + t.zlib.decompress(bomb))), (b"l", b"")]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1000)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=100, cwd=ROOT)
    bomb, many, grown = done.stdout.decode().splitlines()
    assert "longer than" in bomb and "more than 2000 entries" in many and int(grown) < 30


def test_names_that_this_disk_cannot_tell_apart_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "folds", lambda folder: (True, True))
    says = node_says(tmp_path, [out("out", "dir"), out("out/Model"), out("out/model")], DATA * 2 + [(b"Z", b"")])
    assert "can't tell its name from" in says
    says = node_says(tmp_path, [out("out", "dir"), out("out/é"), out("out/e\u0301")], DATA * 2 + [(b"Z", b"")])
    assert "can't tell its name from" in says


def test_a_link_of_an_earlier_pull_is_never_written_through(tmp_path, work, target):
    write_files(work, {"out/folder/file": b"data", "out/plain": b"data"})
    write_files(tmp_path, {"victim/file": b"mine"})
    (target / "out").mkdir(parents=True)
    (target / "out" / "folder").symlink_to(tmp_path / "victim")
    (target / "out" / "plain").symlink_to(tmp_path / "victim" / "file")
    pull(work, ["out"], target)
    assert (tmp_path / "victim" / "file").read_bytes() == b"mine"
    assert looks(target) == looks(work)


def test_a_folder_where_an_output_file_or_link_belongs_is_an_error_that_names_it(work, target):
    for kind in ("file", "link"):
        name = f"out-{kind}"
        write_files(work, {"data": b"data"})
        os.link(work / "data", work / name) if kind == "file" else None
        (work / "folder").mkdir(exist_ok=True)
        if kind == "link":
            (work / "folder" / "l").symlink_to("../data")
        place = target / name if kind == "file" else target / "folder" / "l"
        place.mkdir(parents=True)
        with pytest.raises(TransferError, match=f"{place.name}' could not be written|could not be written below"):
            pull(work, [name] if kind == "file" else ["folder"], target)
        assert place.is_dir() and not place.is_symlink()


# ---- memory ----------------------------------------------------------------------------------------------------------------------

def test_one_large_file_takes_no_more_memory_than_a_small_one(tmp_path):
    """600 MB pushed and pulled; both sides in one process."""
    script = f"""
import resource, sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import test_transfer as t
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
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=110, cwd=ROOT)
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

    def follow(self, offsets=None, **cuts):
        self.got = {name: b"" for name in transfer.LOGS}
        self.pieces = []

        def take(name, data):
            self.got[name] += data
            self.pieces.append((name, data))

        with node(lambda channel, header: transfer.serve_follow(channel, header, str(self.folder), self.over, self.wait), **cuts) as stream:
            return transfer.follow(stream, "run-1", offsets or {name: 0 for name in transfer.LOGS}, take)


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


@pytest.mark.parametrize("frames", [[(b"5", b"x")], [(b"Z", b"[]")], [(b"Z", b'{"run.out":"many"}')], [(b"Z", b"{}")]])
def test_a_node_that_sends_nonsense_for_a_log_is_an_error(frames):
    def lies(channel, header):
        for kind, payload in frames:
            channel.writer.frame(kind, payload)
        channel.writer.flush()

    with node(lies) as stream, pytest.raises(WireError):
        transfer.follow(stream, "run-1", {"run.out": 0}, lambda name, data: None)


def test_a_single_line_of_50_mb_passes_in_pieces(tmp_path):
    with open(tmp_path / "run.out", "wb") as stream:
        stream.truncate(50 << 20)
    largest, total = 0, 0

    def take(name, data):
        nonlocal largest, total
        largest, total = max(largest, len(data)), total + len(data)

    with node(lambda channel, header: transfer.serve_follow(channel, header, str(tmp_path), lambda: True, lambda pause: None)) as stream:
        assert transfer.follow(stream, "run-1", {"run.out": 0}, take) == {"run.out": 50 << 20}
    assert total == 50 << 20 and largest <= 1 << 20
