"""Transfers for tests: both sides in one process, on streams in memory that break where a test wants, or on real ones."""

import contextlib
import hashlib
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun import landing, manifest, pushing, transfer, wire, workspace
from gpurun.errors import GpurunError, LinkError, LinkTimeoutError
from gpurun.link import Link
from gpurun.store import Store

ROOT = Path(__file__).resolve().parent.parent
IN_FLIGHT = 2 << 20


class Pipe:
    """One end of a stream in memory. It breaks, for both ends, when this end has written `cut` bytes. Its connection is as
    long as is said, and leads to whom is said; to nobody, nothing is remembered of it."""

    def __init__(self, rtt_s=None, peer_id=""):
        self.connection = SimpleNamespace(rtt_s=lambda: rtt_s, peer_id=peer_id)
        self.peer = None
        self.ready = threading.Condition()
        self.parts, self.size = [], 0
        self.ended = self.broken = self.stopped = False
        self.writes = self.written = 0
        self.cut = None

    def read(self, timeout_s, least=1):
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
                self.peer.ready.wait_for(lambda: not self.peer.parts or self.peer.broken, 20)
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


def pipes(rtt_s=None, peer_id=""):
    one, two = Pipe(rtt_s, peer_id), Pipe(rtt_s)
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
def node(work, cut=None, cut_answers=None, rtt_s=None, peer_id=""):
    """The operator's end of a stream whose other end is served by `work(channel, header)`; it breaks after so many bytes either way."""
    mine, its = pipes(rtt_s, peer_id)
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
    with contextlib.ExitStack() as until:
        def opened():
            push.stream = until.enter_context(node(lambda channel, header: transfer.serve_push(channel, header, store, trees.append), **cuts))
            return push.stream

        return pushing.push(opened, str(root), entries, encoded, progress)


def pull(work, declared, target, progress=quiet, over=lambda timeout_s: True, live=False, **cuts):
    acknowledged = []
    serve = lambda channel, header: acknowledged.append(transfer.serve_pull(channel, header, str(work), over))
    with node(serve, **cuts) as stream:
        try:
            pulled = landing.pull(stream, "run-1", declared, str(target), progress, live)
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


def change(path):
    path.write_bytes(b"CHANGED".ljust(path.stat().st_size))


CHANGES = {
    "other bytes": change, "shorter": lambda path: path.write_bytes(b"s"), "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"), "gone": os.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()), "a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """Where a push writes down what it brought to which agent; not the place of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpurun" / "pushed"


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


def peak_mb():
    """Of this process. (ru_maxrss would count what the process was before its exec: pytest.)"""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1000


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
