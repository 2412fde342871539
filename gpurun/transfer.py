"""The transfer protocol `gpurun/transfer/1`: bulk bytes between operator and node.

One bidirectional stream a request, frames both ways (`wire.Reader.frame`: one byte of kind, four of length, at most 1 MiB of payload).
J frames hold a JSON object; the operator's first one is the request. Nothing is held whole in memory; what arrives is checked by length
and SHA-256 and renamed into place; who reads last says so. A `!` frame instead of the expected one ends the request with its text as
the reason. A side that has to wait sends an empty K frame every few seconds, so that a dead peer is noticed. Listings are
`manifest.encode`, compressed by zlib, in L frames that an l frame ends.

Push, operator to node: the contents of a tree into the node's cache.
    > J {"type":"Push","tree":"<tree id>","listing":true}   `listing`: L frames follow at once
    < J {"have":"tree"}                                   all of it is there: done
    < J {"have":"nothing"}                                only when `listing` was false: now send the listing, then read the next J
    < J {"have":"listing","contents":12,"bytes":4096}     W frames: a bitmap by zlib, one bit an entry, of what the node lacks; w ends them
    > for each wanted entry in order: D frames with the bytes, E with the SHA-256 of what was sent;
      or X with a reason when the file isn't any more what the listing says (then the operator lists and pushes again)
    > Z
    < J {"stored":12,"bytes":4096}

Pull, node to operator: the outputs of a run, once none of its processes is left.
    > J {"type":"Pull","run_id":"…","outputs":["a","b"]}; L frames: what is here already (it may be nothing), not hashed
    < J {"entries":3,"bytes":1024,"missing":["b"],"refused":[["a/x","leads out of the outputs"]]}; L frames: the outputs, not hashed
    < for each file in order: D frames, E with its SHA-256; or S: the one that is here already is the same; or X with a reason
    < Z
    > J {"collected":2,"bytes":1024}                      all is on the operator's disk: the node reports OutputsCollected

Follow, node to operator: the logs of a run as they grow.
    > J {"type":"Follow","run_id":"…","offsets":{"setup.out":0,"setup.err":0,"run.out":0,"run.err":0}}
    < frames 1, 2, 3, 4: bytes of setup.out, setup.err, run.out, run.err from the offset on
    < Z with {"setup.out":10,…}: the final sizes; all of it has been sent
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from gpurun import manifest
from gpurun.errors import GpurunError, LinkError, TransferError, UnsafeNameError, WireError, WorkspaceError
from gpurun.files import exact_bytes, free_bytes, fsync_dir, make_private_dir, write_all
from gpurun.manifest import Entry, quote_name
from gpurun.store import Store
from gpurun.wire import Reader, Writer, decode_object

IO_S = 40.0                     # no byte for this long: the link is broken. QUIC notices a dead peer after about 12 s, a laptop's sleep may take longer
KEEPALIVE_S = 5.0
BLOCK = 512 << 10
REFUSED_SHOWN = 200
INLINE_LISTING = 128 << 10      # a listing up to this size goes without asking first: it is cheaper than a round trip
MAX_LISTING = 1 << 30
LOGS = {"setup.out": b"1", "setup.err": b"2", "run.out": b"3", "run.err": b"4"}
_LOG_OF = {kind: name for name, kind in LOGS.items()}

Progress = Callable[[int, int, str], None]     # bytes done, bytes in all, name of the current file


class ChangedError(TransferError):
    """A file of the workspace was not any more what the listing says when it was sent: list it again, push again."""


class Pushed(NamedTuple):
    files: int
    size_bytes: int


class Pulled(NamedTuple):
    files: int
    size_bytes: int
    missing: List[str]
    refused: List[Tuple[str, str]]


class Channel:
    """A stream with its reader and writer, and the errors that the other side reports."""

    def __init__(self, stream: Any, reader: Optional[Reader] = None) -> None:
        self.stream = stream
        self.reader = reader or Reader(stream)
        self.writer = Writer(stream, IO_S)

    def put(self, fields: Dict[str, Any]) -> None:
        self.writer.frame(b"J", json.dumps(fields, separators=(",", ":")).encode("ascii"))

    def say(self, **fields: Any) -> None:
        self.put(fields)
        self.writer.flush()

    def answer(self) -> Dict[str, Any]:
        """The next frame, which must be a J."""
        kind, payload = self.frame()
        if kind != b"J":
            raise WireError(f"a frame {kind!r} where a JSON object belongs")
        return decode_object(payload)

    def listing(self) -> List[Entry]:
        """A listing of files that aren't hashed."""
        return manifest.decode(self.read_packed(b"L", MAX_LISTING), hashed=False)

    def keep_alive(self) -> None:
        self.writer.frame(b"K")
        self.writer.flush()

    def frame(self) -> Tuple[bytes, bytes]:
        """The next frame that isn't a keepalive."""
        while True:
            kind, payload = self.reader.frame(IO_S)
            if kind == b"!":
                raise TransferError(payload.decode("utf-8", "replace"))
            if kind != b"K":
                return kind, payload

    def send_packed(self, kind: bytes, data: bytes) -> None:
        packed = zlib.compress(data, 1)
        for start in range(0, len(packed), BLOCK):
            self.writer.frame(kind, packed[start:start + BLOCK])
        self.writer.frame(kind.lower())

    def read_packed(self, kind: bytes, limit: int) -> bytes:
        unpack, parts, size = zlib.decompressobj(), [], 0
        while True:
            got, payload = self.frame()
            if got == kind.lower():
                break
            if got != kind:
                raise WireError(f"a frame {got!r} where {kind!r} belongs")
            try:
                parts.append(unpack.decompress(payload, limit - size + 1))
            except zlib.error as error:
                raise WireError(f"compressed bytes that aren't: {error}") from None
            size += len(parts[-1])
            if size > limit or unpack.unconsumed_tail:
                raise WireError(f"more than {exact_bytes(limit)} where at most that much is allowed")
        return b"".join(parts)


def _count(fields: Dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise WireError(f"{name} must be a number, not {str(value)[:40]!r}")
    return value


def _text(fields: Dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 4096:
        raise WireError(f"{name} must be a text, not {str(value)[:40]!r}")
    return value


# ---- push --------------------------------------------------------------------------------------------------------------------

def push(stream: Any, root: str, entries: Sequence[Entry], encoded: bytes, progress: Progress) -> Pushed:
    """Operator: brings what the node lacks of a tree. Raises ChangedError when a file changed since it was listed.

    `encoded` is the listing of `entries`, which are hashed; `root` is where their files are.
    """
    channel = Channel(stream)
    sends_listing = len(encoded) <= INLINE_LISTING
    channel.put({"type": "Push", "tree": manifest.tree_id(encoded), "listing": sends_listing})
    if sends_listing:
        channel.send_packed(b"L", encoded)
    channel.writer.flush()
    answer = channel.answer()
    if answer.get("have") == "nothing" and not sends_listing:
        channel.send_packed(b"L", encoded)
        channel.writer.flush()
        answer = channel.answer()
    if answer.get("have") == "tree":
        channel.stream.finish(IO_S)
        return Pushed(0, 0)
    lacking, size = _count(answer, "contents"), _count(answer, "bytes")
    wanted = channel.read_packed(b"W", len(entries) // 8 + 1)
    done, files, changed = 0, 0, ""
    progress(0, size, "")
    for index, entry in enumerate(entries):
        if index >> 3 < len(wanted) and wanted[index >> 3] & (1 << (index & 7)):
            if entry.kind != "file":
                raise WireError("the node asked for the contents of something that is no file")
            files += 1
            sent = _send_file(channel.writer, manifest.local_path(root, entry.path), entry.size, entry.sha256,
                              lambda more, name=entry.path: progress(done + more, size, name))
            changed = changed or sent
            done += entry.size
    if files != lacking:
        raise WireError(f"the node asked for {lacking} contents and named {files}")
    channel.writer.frame(b"Z")
    channel.writer.flush()
    answer = channel.answer()
    channel.stream.finish(IO_S)
    if changed:
        raise ChangedError(changed)
    if _count(answer, "stored") != files:
        raise TransferError(f"{files - _count(answer, 'stored')} of {files} files arrived broken on the node (SHA-256 differs); run again")
    return Pushed(files, size)


def _send_file(writer: Writer, path: str, size: int, sha256: str, moved: Callable[[int], None]) -> str:
    """D frames and E, or X; returns why it was X, "" when all went. With a `sha256` the bytes must be those."""
    digest, left = hashlib.sha256(), size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while left:
                block = os.read(fd, min(left, BLOCK))
                if not block:
                    break
                digest.update(block)
                left -= len(block)
                writer.frame(b"D", block)
                moved(size - left)
            more = os.read(fd, 1)
        finally:
            os.close(fd)
        if left or more or sha256 and digest.hexdigest() != sha256:
            why = f"'{quote_name(path)}' changes while it is sent"
        else:
            why = ""
    except OSError as error:
        why = f"'{quote_name(path)}' can't be read: {error.strerror}"
    if why:
        writer.frame(b"X", why.encode("utf-8", "replace")[:4096])
    else:
        writer.frame(b"E", digest.digest())
    return why


def serve_push(channel: Channel, header: Dict[str, Any], store: Store, arrived: Callable[[str], None]) -> None:
    """Node: takes what is lacking into the cache; `arrived(tree id)` once all of it is there."""
    tree = _text(header, "tree")
    known = store.tree(tree) if manifest.is_hash(tree) else None
    sends_listing = header.get("listing") is True
    if not sends_listing and known is None:
        channel.say(have="nothing")
    if sends_listing or known is None:
        encoded = channel.read_packed(b"L", MAX_LISTING)
    if known is not None:
        arrived(tree)
        channel.say(have="tree")
        return
    if manifest.tree_id(encoded) != tree:
        raise WireError("the listing isn't the one that was announced")
    entries = manifest.decode(encoded)
    lacking = store.missing(entries)
    size = sum(entries[index].size for index in lacking)
    store.check_room(size, "the workspace in the node's cache")
    bitmap = bytearray(len(entries) // 8 + 1)
    for index in lacking:
        bitmap[index >> 3] |= 1 << (index & 7)
    channel.put({"have": "listing", "contents": len(lacking), "bytes": size})
    channel.send_packed(b"W", bytes(bitmap))
    channel.writer.flush()
    stored = stored_bytes = 0
    for index in lacking:
        if _take_content(channel, store, entries[index]):
            stored += 1
            stored_bytes += entries[index].size
    if channel.frame()[0] != b"Z":
        raise WireError("more contents than were asked for")
    if stored == len(lacking):
        store.put_tree(encoded)
        arrived(tree)
    channel.say(stored=stored, bytes=stored_bytes)


def _take_content(channel: Channel, store: Store, entry: Entry) -> bool:
    incoming = store.incoming()
    try:
        while True:
            kind, payload = channel.frame()
            if kind == b"D":
                incoming.write(payload)
            elif kind == b"E":
                return incoming.keep(entry.sha256, entry.size)
            elif kind == b"X":
                incoming.drop()
                return False
            else:
                raise WireError(f"a frame {kind!r} inside a file")
    except OSError as error:
        incoming.drop()
        raise TransferError(f"'{quote_name(entry.path)}' could not be stored on the node: {error.strerror} ({store.root} has "
                            f"{exact_bytes(free_bytes(store.root))} free)") from None
    except GpurunError:
        incoming.drop()
        raise


# ---- pull --------------------------------------------------------------------------------------------------------------------

class Output(NamedTuple):
    """One entry of the outputs and where its file is on the node."""

    entry: Entry
    source: str


def find_outputs(root: str, declared: Sequence[str]) -> Tuple[List[Output], List[str], List[Tuple[str, str]]]:
    """(outputs, missing, refused) under the outputs root. What lies outside it after following links is refused, never read."""
    real_root = os.path.realpath(root)
    outputs: List[Output] = []
    missing: List[str] = []
    refused: List[Tuple[str, str]] = []
    names = sorted({manifest.clean_output(name) for name in declared})
    above = set()
    for name in names:
        if any(name.startswith(other + "/") for other in names):
            continue                                            # comes with the folder that it is in
        manifest.check_name(name)
        source = os.path.realpath(manifest.local_path(real_root, name))
        if not source.startswith(real_root + os.sep):
            refused.append((name, "leads out of the outputs root"))
            continue
        try:
            state = os.stat(source)
            for at in [at for at, char in enumerate(name) if char == "/"]:
                folder = name[:at]
                if folder not in above:                         # a listing has the folders above what it lists
                    above.add(folder)
                    parent = os.stat(manifest.local_path(real_root, folder))
                    outputs.append(Output(Entry(folder, "dir", parent.st_mode & 0o777, parent.st_mtime_ns), ""))
            if os.path.isdir(source):
                outputs.append(Output(Entry(name, "dir", state.st_mode & 0o777, state.st_mtime_ns), source))
                skipped = lambda skip, name=name: refused.append((f"{name}/{skip.path}", skip.reason))
                for entry in manifest.walk(source, on_skip=skipped):
                    path = f"{name}/{entry.path}"
                    try:
                        manifest.check_name(path)
                        if entry.kind == "link":
                            manifest.check_link(path, entry.target)
                    except UnsafeNameError as error:
                        refused.append((path, str(error)))
                        continue
                    outputs.append(Output(entry._replace(path=path), manifest.local_path(source, entry.path)))
            elif os.path.isfile(source):
                outputs.append(Output(Entry(name, "file", state.st_mode & 0o777, state.st_mtime_ns, state.st_size), source))
            else:
                refused.append((name, "is neither a file nor a folder"))
        except FileNotFoundError:
            missing.append(name)
        except (OSError, WorkspaceError) as error:
            refused.append((name, str(getattr(error, "strerror", None) or error)))
    return outputs, missing, refused


def serve_pull(channel: Channel, header: Dict[str, Any], root: str, over: Callable[[float], bool]) -> Pulled:
    """Node: sends the outputs once `over(timeout_s)` says that no process of the run is left. Returns what the operator acknowledged."""
    declared = header.get("outputs")
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in declared):
        raise WireError("outputs must be a list of texts")
    here = {entry.path: entry for entry in channel.listing()}
    while not over(KEEPALIVE_S):
        channel.keep_alive()
    outputs, missing, refused = find_outputs(root, declared)
    size = sum(output.entry.size for output in outputs)
    channel.put({"entries": len(outputs), "bytes": size, "missing": missing, "refused": refused[:REFUSED_SHOWN]})
    channel.send_packed(b"L", manifest.encode(output.entry for output in outputs))
    for entry, source in outputs:
        if entry.kind == "file":
            known = here.get(entry.path)
            if known and (known.size, known.mtime_ns) == (entry.size, entry.mtime_ns):
                channel.writer.frame(b"S")
            else:
                _send_file(channel.writer, source, entry.size, "", lambda moved: None)
    channel.writer.frame(b"Z")
    channel.writer.flush()
    answer = channel.answer()
    return Pulled(_count(answer, "collected"), _count(answer, "bytes"), missing, refused)


def pull(stream: Any, run_id: str, declared: Sequence[str], target: str, progress: Progress) -> Pulled:
    """Operator: waits for the run's end on the node and brings its outputs into `target`, each at its declared path.

    The node isn't trusted: every name passes `manifest.Guard`, files are written under temporary names and renamed, links are made
    last, nothing leaves `target`. Files that an earlier try brought are not sent again. Raises TransferError (a full disk here; the
    outputs are still on the node then), UnsafeNameError, LinkError.
    """
    channel = Channel(stream)
    channel.put({"type": "Pull", "run_id": run_id, "outputs": list(declared)})
    here = list(manifest.walk(target)) if os.path.isdir(target) else []
    channel.send_packed(b"L", manifest.encode(here))
    channel.writer.flush()
    summary = channel.answer()
    missing, refused = summary.get("missing"), summary.get("refused")
    if not isinstance(missing, list) or not set(map(str, missing)) <= {manifest.clean_output(name) for name in declared}:
        raise WireError("the node calls outputs missing that nobody declared")
    if not isinstance(refused, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in refused):
        raise WireError("the node's list of refused outputs isn't one")
    entries = channel.listing()
    make_private_dir(target)
    guard = manifest.Guard(declared, *manifest.folds(target))
    for entry in entries:
        guard.admit(entry)
    size = sum(entry.size for entry in entries)
    brought = sum(entry.size for entry in here)
    free = free_bytes(target)
    if size - brought > free:
        raise TransferError(f"no room for the outputs here: {target} has {exact_bytes(free)} free, needed are {exact_bytes(size - brought)}. "
                            "They are still on the node: make room and fetch them again.")
    landing = _Landing(target, entries, size, progress)
    files = landing.take(channel)
    channel.say(collected=files, bytes=size)
    channel.stream.finish(IO_S)
    return Pulled(files, size, [str(name) for name in missing], [(str(path), str(why)) for path, why in refused] + landing.refused)


class _Landing:
    """Puts the files of one pull in place."""

    def __init__(self, target: str, entries: Sequence[Entry], total: int, progress: Progress) -> None:
        self._target, self._entries, self._total, self._progress = target, entries, total, progress
        self._temp = os.path.join(os.path.dirname(target), ".incoming-" + os.path.basename(target))
        self._done = 0
        self.refused: List[Tuple[str, str]] = []

    def take(self, channel: Channel) -> int:
        """Reads all files off the channel; how many are in place now."""
        name, files = "", 0
        folders, links = [], []
        try:
            for entry in self._entries:
                name = entry.path
                path = manifest.local_path(self._target, name)
                if entry.kind == "dir":
                    self._make_folder(path)
                    folders.append(entry)
                elif entry.kind == "link":
                    links.append((entry, path))
                else:
                    files += self._take_file(channel, entry, path)
            if channel.frame()[0] != b"Z":
                raise WireError("more outputs than were listed")
            for entry, path in links:                           # last: nothing is ever written through one
                self._clear(path)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                manifest.make_link(entry, path)
            manifest.finish_folders(self._target, folders, also_mode=0o700)
            for folder in {os.path.dirname(manifest.local_path(self._target, entry.path)) for entry in self._entries}:
                fsync_dir(folder)
        except OSError as error:
            raise TransferError(f"the output '{quote_name(name)}' could not be written below {self._target}: {error.strerror} "
                                f"({exact_bytes(free_bytes(self._target))} free). The outputs are still on the node.") from None
        finally:
            if os.path.exists(self._temp):
                os.unlink(self._temp)
        return files

    def _make_folder(self, path: str) -> None:
        if os.path.islink(path) or not os.path.isdir(path):
            self._clear(path)
            os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o700)

    @staticmethod
    def _clear(path: str) -> None:
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)

    def _take_file(self, channel: Channel, entry: Entry, path: str) -> int:
        kind, payload = channel.frame()
        if kind == b"S":
            self._moved(entry.size, entry.path)
            return 1
        fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            digest, size = hashlib.sha256(), 0
            while kind == b"D":
                size += len(payload)
                if size > entry.size:
                    raise WireError(f"'{quote_name(entry.path)}' is longer than the node said")
                write_all(fd, payload)
                digest.update(payload)
                self._moved(len(payload), entry.path)
                kind, payload = channel.frame()
            if kind == b"X":
                self.refused.append((entry.path, payload.decode("utf-8", "replace")))
                return 0
            if kind != b"E":
                raise WireError(f"a frame {kind!r} inside a file")
            if size != entry.size or digest.digest() != payload:
                raise TransferError(f"the output '{quote_name(entry.path)}' arrived broken (length or SHA-256 differ); it is still on the node")
            os.fchmod(fd, entry.mode & 0o777)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            os.fsync(fd)
        finally:
            os.close(fd)
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            os.makedirs(folder)
        os.replace(self._temp, path)
        return 1

    def _moved(self, size: int, name: str) -> None:
        self._done += size
        self._progress(self._done, self._total, name)


# ---- follow ------------------------------------------------------------------------------------------------------------------

def serve_follow(channel: Channel, header: Dict[str, Any], folder: str, over: Callable[[], bool], wait: Callable[[float], None]) -> None:
    """Node: sends the logs as they grow. `over()`: nothing will be written any more; `wait(s)` returns early when that changes."""
    offsets = header.get("offsets")
    if not isinstance(offsets, dict) or not set(offsets) <= set(LOGS):
        raise WireError("offsets must name the logs")
    at = {name: _count(offsets, name) for name in offsets}
    files: Dict[str, int] = {}
    spoken, pause = time.monotonic(), 0.0
    try:
        while True:
            last_round = over()                                 # asked before reading: what was written before is read in this round
            moved = False
            for name in at:
                moved = _send_growth(channel.writer, folder, name, at, files) or moved
            if moved:
                channel.writer.flush()
                spoken, pause = time.monotonic(), 0.0
            elif last_round:
                break
            else:
                if time.monotonic() - spoken > KEEPALIVE_S:
                    channel.keep_alive()
                    spoken = time.monotonic()
                pause = min(pause + 0.01, 0.2)                  # a busy log is looked at often, a silent one five times a second
                wait(pause)
    finally:
        for fd in files.values():
            os.close(fd)
    channel.writer.frame(b"Z", json.dumps(at).encode("ascii"))
    channel.writer.flush()
    channel.stream.finish(IO_S)


def _send_growth(writer: Writer, folder: str, name: str, at: Dict[str, int], files: Dict[str, int]) -> bool:
    """One block of what a log has grown by."""
    if name not in files:
        try:
            files[name] = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
    block = os.pread(files[name], BLOCK, at[name])
    if block:
        writer.frame(LOGS[name], block)
        at[name] += len(block)
    return bool(block)


def follow(stream: Any, run_id: str, offsets: Dict[str, int], take: Callable[[str, bytes], None]) -> Dict[str, int]:
    """Operator: `take(log, bytes)` for every piece from `offsets` on, until the node says that nothing more comes; the final sizes."""
    channel = Channel(stream)
    channel.say(type="Follow", run_id=run_id, offsets=offsets)
    while True:
        kind, payload = channel.frame()
        if kind == b"Z":
            sizes = decode_object(payload)
            return {name: _count(sizes, name) for name in offsets}
        if kind not in _LOG_OF:
            raise WireError(f"a frame {kind!r} in a log")
        take(_LOG_OF[kind], payload)


def read_request(channel: Channel, timeout_s: float) -> Dict[str, Any]:
    """Node: the first frame of a transfer stream. Waits less patiently than inside a transfer."""
    kind, payload = channel.reader.frame(timeout_s)
    if kind != b"J":
        raise WireError("a transfer stream begins with a J frame")
    return decode_object(payload)


def report(channel: Channel, error: GpurunError) -> None:
    """Node: tells the operator why the request ends."""
    channel.writer.frame(b"!", str(error).encode("utf-8", "replace")[:4096])
    channel.writer.flush()
    channel.stream.finish(IO_S)
