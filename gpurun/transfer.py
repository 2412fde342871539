"""The transfer protocol `gpurun/transfer/1`: bulk bytes between operator and node.

One bidirectional stream a request, frames both ways (`wire.Reader.frame`: one byte of kind, four of length, at most 1 MiB of payload).
J frames hold a JSON object; the operator's first one is the request. Nothing is held whole in memory; what arrives is checked by length
and SHA-256 and renamed into place; who reads last says so. A `!` frame instead of the expected one ends the request with its text as
the reason. A side that has to wait sends an empty K frame every few seconds, so that a dead peer is noticed. Listings are
`manifest.encode`, compressed by zlib, in L frames that an l frame ends.

A C frame holds the bytes of a D frame packed, where that pays (`packing.py`: one stream of packed bytes for each direction of a stream, at most
512 KiB of bytes in a frame); frames 5 to 8 likewise those of 1 to 4. What is hashed, counted and gone on from are the bytes, never the packed ones.
The receiver says in `packs` which methods it can undo, the sender which one it uses ("" or nothing: none); who doesn't know the field gets
no such frames. In a push, where the operator sends, it offers both ways and the node has the choice. `rtt_s`: the round trip as the operator
knows it, in seconds or null; a node that is reached through SSH can't know it.

Push, operator to node: the contents of a tree into the node's cache.
    > J {"type":"Push","tree":"<tree id>","listing":true,"packs":["deflate"],"base":"<tree id>","along":true,"early":true}   `listing`: L frames
      follow at once. `base`: they are the difference to that tree's listing (`listings.py`); a node that hasn't that answers "nothing". `along` (only
      with a listing): A frames behind it, a bitmap by zlib, one bit an entry, of contents that the operator thinks the node lacks, a; then these, as
      below but without Z, packed by "deflate" if at all. `early`: the answer isn't to wait for them, and names them too
    < J {"have":"tree","along":true,"came":2,"came_bytes":812}   all of it is there: done. `along`: this agent knows `along` and `base`; `came`: so
                                                          many of the contents that came along were taken, the rest was here
    < J {"have":"nothing"}                                now send the whole listing, nothing along, and read the next J
    < J {"have":"listing","contents":12,"bytes":4096,"begun":{"3":8388608},"packs":"deflate","along":true,"came":2,"came_bytes":812}
                                                          W frames: a bitmap by zlib, one bit an entry, of what the node still lacks; w ends them.
                                                          `begun`: of entry 3 the node has that many bytes
    > for each wanted entry in order: D frames with the bytes, E when that was all (the listing has its hash);
      or X with a reason when the file isn't any more what the listing says (then the operator lists and pushes again)
    > Z (after an early answer only if some were still to be sent)
    < J {"stored":12,"bytes":4096}

Pull, node to operator: the outputs of a run, once none of its processes is left.
    > J {"type":"Pull","run_id":"…","outputs":["a","b"],"begun":{"<key>":[8388608,"<SHA-256>"]},"packs":["deflate"],"rtt_s":0.02,"tails":true}; L frames:
      what is here already (it may be nothing), not hashed. `begun`: of the file with this key (SHA-256 of its path) so many bytes are here, with
      this hash. `tails`: files of 64 KiB and more may have a hash in the listing, that of their last 4 KiB; P is understood
      `"live":true`: the run needn't be over; a file that grows while it is sent goes as long as it was when it was listed
    < J {"entries":3,"bytes":1024,"packs":"deflate","refused":[["a/x","leads out of the outputs root"]]}; M frames: the missing outputs, a JSON list, packed
      as listings are; L frames: the outputs, not hashed
    < for each file in order: D frames, E with its SHA-256; or S with that, when the one that is here has its size and mtime (it is the same if
      its hash is this; times can be set); or R, when it begins with the bytes that are here, then D frames with what is behind them, E with
      the SHA-256 of the whole; or P, when it seems to begin with the file that is here (a log that grew: the 4 KiB at that file's end are the
      same), then D frames and E likewise; or X with a reason
    < Z
    > J {"again":["a"]}, once at most: what is here, or was put behind it, isn't what S or E says: these whole, in the same order
    < for each of them: D frames and E, or X; then Z
    > J {"collected":2,"bytes":1024}                      all is on the operator's disk: the node reports OutputsCollected

Follow, node to operator: the logs of a run as they grow.
    > J {"type":"Follow","run_id":"…","offsets":{"setup.out":0,"setup.err":0,"run.out":0,"run.err":0},"packs":["deflate"],"rtt_s":0.02}
      `"tail":20`: from the last 20 lines of each of these logs on, whatever their offsets are (0: from the present ends on).
      `"live":false`: only up to the present ends. `"keeps":true`: the operator keeps what comes, and will say whether it could
    < with `tail` only: J {"offsets":{"run.out":812,…}}: where each begins
    < if the request has `packs`: J {"packs":"deflate"}
    < frames 1, 2, 3, 4: bytes of setup.out, setup.err, run.out, run.err from the offset on
    < Z with {"setup.out":10,…}: the final sizes (with `"live":false` those at the beginning); all of it has been sent
    > with `keeps` only: J {"kept":true}                  all is on the operator's disk
    < with `keeps` only: Z                                and the node knows it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from gpurun import listings, manifest, packing
from gpurun.errors import GpurunError, LinkError, TransferError, WireError
from gpurun.files import exact_bytes
from gpurun.manifest import Entry, quote_name
from gpurun.spare import Ahead
from gpurun.store import RESERVE_BYTES, RESUME_BYTES, Incoming, Store
from gpurun.wire import SMALL_WRITE, Reader, Writer, decode_object

IO_S = 40.0                     # no byte for this long: the link is broken. QUIC notices a dead peer after about 12 s, a laptop's sleep may take longer
KEEPALIVE_S = 5.0
LAST_WORD_S = 3.0               # a peer that stops reading has said why before
BLOCK = packing.BLOCK
PACKED_WRITE = 128 << 10        # packed bytes are gathered up to this size
STALLED_S = 5.0                 # a push from which nothing comes for so long may be that of an operator who was killed
WORTH_BYTES = 4 << 20           # of a content, that it pays to find that out for
WORK_BYTES = 64 << 20           # hashing more may take long enough for the other side to wonder
REFUSED_SHOWN = 200
REFUSED_LENGTH = 400
LONGEST_PAUSE_S = 0.2           # a busy log is looked at often, a silent one five times a second
LOOKED_FOR_IN = 3               # rounds of such pauses: a log that doesn't exist yet is looked for less often
TAIL_BLOCK = 256 << 10
ALONG_PACKED = "deflate"         # what goes along with a listing is packed by this: nobody could be asked yet
MAX_LISTING = 512 << 20         # of the million entries that a listing may have
LOGS = {"setup.out": b"1", "setup.err": b"2", "run.out": b"3", "run.err": b"4"}
_LOG_OF = {kind: name for name, kind in LOGS.items()}
PACKED = {b"D": b"C", b"1": b"5", b"2": b"6", b"3": b"7", b"4": b"8"}      # kind of a frame: the kind for the same bytes packed
_UNPACKED = {packed: kind for kind, packed in PACKED.items()}

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
        self.writer = Writer(self, IO_S)
        self._sent = (0, 0.0)                   # bytes written to the stream, seconds that writing them waited
        self._packer: Optional[packing.Packer] = None
        self._unpacker: Optional[packing.Unpacker] = None
        self.heard_at = time.monotonic()        # when the last frame came
        self._finished = False

    def write(self, data: bytes, timeout_s: float) -> None:
        """What the writer has gathered, to the stream; how long that takes says what is slow: the link, or we."""
        began = time.perf_counter()
        self.stream.write(data, timeout_s)
        self._sent = (self._sent[0] + len(data), self._sent[1] + time.perf_counter() - began)

    def rtt_s(self) -> Optional[float]:
        """The round trip of the link in seconds, where this side knows it."""
        connection = getattr(self.stream, "connection", None)
        return None if connection is None else connection.rtt_s()

    def packs(self, offered: Any, rtt_s: Any = None) -> str:
        """From now on `data` packs where that pays, by a method that the other side offers to undo; its name, "" for none. `rtt_s`: the
        round trip as the other side says it is."""
        method = packing.chosen(offered)
        if method:
            said = float(rtt_s) if isinstance(rtt_s, (int, float)) else None
            self._packer = packing.Packer(method, self.rtt_s() or said, lambda: self._sent, getattr(self.stream, "rate", lambda: None))
        return method

    def unpacks(self, method: Any) -> None:
        """From now on what comes may be packed like that ("" or None: it isn't)."""
        if method and method not in packing.known():
            raise WireError(f"what comes is packed by {str(method)[:40]!r}, which isn't known here")
        self._unpacker = packing.Unpacker(method) if method else None

    def begin_file(self) -> None:
        if self._packer is not None:
            self._packer.begin()

    def data(self, block: bytes, kind: bytes = b"D") -> None:
        """A frame with at most BLOCK bytes, packed if that pays."""
        packed = None
        if self._packer is not None:
            packed = self._packer.pack(block)
            self.writer.gathers = PACKED_WRITE if self._packer.packs else SMALL_WRITE
        if packed is None:
            self.writer.frame(kind, block)
        else:
            self.writer.frame(PACKED[kind], packed)

    def finish(self) -> None:
        """The regular end of what this side says."""
        self.stream.finish(IO_S)
        self._finished = True

    def leave(self) -> None:
        """The operator is done: unless that was the regular end, the node shouldn't wait for more."""
        if not self._finished:
            self.stream.abort()

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

    def listing(self) -> Iterator[Entry]:
        """The entries of a listing of files that aren't hashed, as they come."""
        return manifest.decode_parts(self.read_packed(b"L", MAX_LISTING), hashed=False)

    def keep_alive(self) -> None:
        self.writer.frame(b"K")
        self.writer.flush()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around what may take long and writes nothing here: the other side hears that this one lives."""
        done = threading.Event()

        def speak() -> None:
            with contextlib.suppress(LinkError):                # whoever works here finds out when it has something to say
                while not done.wait(KEEPALIVE_S):
                    self.keep_alive()

        speaker = threading.Thread(target=speak, name="keepalive", daemon=True)
        speaker.start()
        try:
            yield
        finally:
            done.set()
        speaker.join()                                          # not two writers at once; after an error nothing more is written

    def frame(self) -> Tuple[bytes, bytes]:
        """The next frame that isn't a keepalive; what was packed is unpacked."""
        return self.frame_within(IO_S)

    def frame_within(self, timeout_s: float) -> Tuple[bytes, bytes]:
        while True:
            kind, payload = self.reader.frame(timeout_s)
            self.heard_at = time.monotonic()
            if kind == b"!":
                raise TransferError(payload.decode("utf-8", "replace"))
            if kind in _UNPACKED and self._unpacker is not None:
                return _UNPACKED[kind], self._unpacker.unpack(payload)
            if kind != b"K":
                return kind, payload

    def send_packed(self, kind: bytes, parts: Iterable[bytes]) -> None:
        rtt_s = self.rtt_s()
        pack = zlib.compressobj(1 if rtt_s is None or rtt_s >= packing.HERE_S else 0)   # where nothing waits for bytes, packing is what takes long
        for part in parts:
            for start in range(0, len(part), BLOCK):
                packed = pack.compress(part[start:start + BLOCK])
                if packed:
                    self.writer.frame(kind, packed)
        self.writer.frame(kind, pack.flush())
        self.writer.frame(kind.lower())

    def read_packed(self, kind: bytes, limit: int) -> Iterator[bytes]:
        """The bytes in pieces of a size that a peer can't drive up; more than `limit` of them is an error."""
        unpack, size = zlib.decompressobj(), 0
        while True:
            got, payload = self.frame()
            if got == kind.lower():
                part = unpack.flush()
                if not unpack.eof or size + len(part) > limit:
                    raise WireError("compressed bytes that end too early")
                yield part
                return
            if got != kind:
                raise WireError(f"a frame {got!r} where {kind!r} belongs")
            while payload:
                try:
                    part = unpack.decompress(payload, BLOCK)
                except zlib.error as error:
                    raise WireError(f"compressed bytes that aren't: {error}") from None
                size += len(part)
                if size > limit:
                    raise WireError(f"more than {exact_bytes(limit)} where at most that much is allowed")
                if part:
                    yield part
                if unpack.unused_data:
                    raise WireError("bytes behind the end of what is compressed")
                payload = unpack.unconsumed_tail

    def reason(self, broken: LinkError) -> GpurunError:
        """Why writing failed: the other side's own word, if it gave one."""
        try:
            while True:
                self.frame_within(LAST_WORD_S)
        except LinkError:
            return broken
        except GpurunError as said:
            return said


def number_in(fields: Dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise WireError(f"{name} must be a number, not {str(value)[:40]!r}")
    return value


# ---- push --------------------------------------------------------------------------------------------------------------------

def send_file(channel: Channel, path: str, size: int, sha256: str, moved: Callable[[int], None], start: int = 0, part: str = "",
               inode: Optional[int] = None) -> str:
    """D frames and E, or X; returns why it was X, "" when all went. With a `sha256` the bytes must be those. The other side has the
    bytes before `start`: they count for the hash and don't go. With a `part`, their hash, that is so if the file begins with them: R
    says it, else all of it goes. With an `inode` it is a file that may grow, so that more bytes behind `size` are no fault; but another
    file that was put in its place meanwhile (as programs save a checkpoint) is: its first `size` bytes would be half of it. One that was
    written to while it was read is read a second time: what went must still be its beginning."""
    writer, digest, left, spoken = channel.writer, hashlib.sha256(), size, time.monotonic()
    channel.begin_file()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            before = os.fstat(fd)
            while left or part:
                if part and size - left == start:
                    if digest.hexdigest() == part:
                        writer.frame(b"R")
                    else:
                        os.lseek(fd, 0, os.SEEK_SET)
                        digest, left, start = hashlib.sha256(), size, 0
                    part = ""
                    continue
                skipping = size - left < start
                block = os.read(fd, min(left, start - size + left if skipping else left, BLOCK))
                if not block:
                    break
                digest.update(block)
                left -= len(block)
                if not skipping:
                    channel.data(block)
                elif time.monotonic() - spoken > KEEPALIVE_S:
                    channel.keep_alive()
                    spoken = time.monotonic()
                moved(size - left)
            more = os.read(fd, 1) if inode is None else before.st_ino != inode
            if not (left or more or sha256) and manifest.was_written(before, os.fstat(fd)):
                with channel.at_work():
                    more = manifest.beginning(fd, size) != digest.digest()
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
        writer.frame(b"E", b"" if sha256 else digest.digest())
    return why


def serve_push(channel: Channel, header: Dict[str, Any], store: Store, arrived: Callable[[str], None]) -> None:
    """Node: takes what is lacking into the cache; `arrived(tree id)` once all of it is there."""
    tree = header.get("tree")
    if not isinstance(tree, str) or not manifest.is_hash(tree):
        raise WireError(f"tree must be a SHA-256, not {str(tree)[:40]!r}")
    lists, along = header.get("listing") is True, header.get("listing") is True and header.get("along") is True
    base: Optional[Iterator[bytes]] = None
    with channel.at_work():                                     # after a boot of the node all of it is hashed
        whole = store.tree(tree) is not None
    if whole:
        arrived(tree)
        channel.say(have="tree", along=True, came=0, came_bytes=0)
        if lists:
            _drop_listing(channel, along)
        return
    if lists and header.get("base"):
        if manifest.is_hash(str(header["base"])):
            base = listings.lines_of(os.path.join(store.root, "cache", "trees", header["base"]))
        if base is None:
            _drop_listing(channel, along)
            lists = along = False
    if not lists:
        channel.say(have="nothing")
    try:
        listing, ahead = store.incoming(), store.ahead()
        try:
            _take_tree(channel, tree, store, listing, ahead, base, packing.chosen(header.get("packs")), along, along and header.get("early") is True, arrived)
        finally:
            listing.drop()
            store.ended(ahead)
    except OSError as error:
        raise store.not_stored("the workspace's listing", error, RESERVE_BYTES) from None


def _come_along(channel: Channel) -> Iterator[int]:
    """The numbers of the entries whose contents come unasked; each is to be read before the next is asked for."""
    bitmap = b"".join(channel.read_packed(b"A", manifest.MAX_ENTRIES // 8 + 1))
    channel.unpacks(ALONG_PACKED)
    for at, byte in enumerate(bitmap):
        for bit in range(8) if byte else ():
            if byte & (1 << bit):
                yield 8 * at + bit


def _drop_listing(channel: Channel, along: bool) -> None:
    for _ in channel.read_packed(b"L", MAX_LISTING):
        pass
    for _ in _come_along(channel) if along else ():
        _drop_content(channel)


def _drop_content(channel: Channel) -> None:
    while True:
        kind, _ = channel.frame()
        if kind in (b"E", b"X"):
            return
        if kind != b"D":
            raise WireError(f"a frame {kind!r} inside a file")


def _take_tree(channel: Channel, tree: str, store: Store, listing: Incoming, ahead: Ahead, base: Optional[Iterator[bytes]], packs: str, along: bool,
               early: bool, arrived: Callable[[str], None]) -> None:
    count = 0

    def entries() -> Iterator[Entry]:
        nonlocal count
        parts = channel.read_packed(b"L", MAX_LISTING)
        for entry in manifest.decode_parts(kept(parts if base is None else listings.whole(parts, base))):
            count += 1
            yield entry

    def kept(parts: Iterable[bytes]) -> Iterator[bytes]:
        for part in parts:
            listing.write(part)
            yield part

    def ask() -> None:
        bitmap = bytearray(count // 8 + 1)
        for index in lacking:
            bitmap[index >> 3] |= 1 << (index & 7)
        channel.put({"have": "listing", "contents": len(lacking), "bytes": size, "packs": packs, "along": True, "early": early, "came": came,
                     "came_bytes": came_bytes, "begun": {str(index): begun[index].size for index in begun if index in lacking}})
        channel.send_packed(b"W", (bytes(bitmap),))
        channel.writer.flush()

    came = came_bytes = stored = stored_bytes = broken = 0
    begun: Dict[int, Incoming] = {}
    try:
        with channel.at_work():
            lacking = dict(store.lacks(entries(), ahead.here))
            if listing.sha256() != tree:
                raise WireError("the listing isn't the one that was announced")
            for index, entry in lacking.items():
                partial = _begun(store, entry.sha256) if entry.size >= RESUME_BYTES else None
                if partial is not None:
                    begun[index] = partial
        size = sum(entry.size for entry in lacking.values())
        store.check_room(size - sum(partial.size for partial in begun.values()), "the workspace in the node's cache")
        ahead.begin(lacking.values())
        early = early and bool(lacking)
        if early:
            ask()
        for index in _come_along(channel) if along else ():
            if index not in lacking:
                _drop_content(channel)
            elif _take_content(channel, store, lacking[index], None, lacking[index].size, ahead):
                came, came_bytes = came + 1, came_bytes + lacking[index].size
                del lacking[index]
            elif early:                                         # and asked for already
                broken += 1
                del lacking[index]
        if early:
            stored, stored_bytes = came, came_bytes
        elif lacking:
            size -= came_bytes
            ask()
        channel.unpacks(packs)
        for index, entry in lacking.items():
            if _take_content(channel, store, entry, begun.pop(index, None), size - stored_bytes, ahead):
                stored, stored_bytes = stored + 1, stored_bytes + entry.size
            else:
                broken += 1
    finally:
        for index, partial in begun.items():
            if index in lacking:
                store.keep_partial(lacking[index].sha256, partial)
            else:
                partial.drop()                                  # it came along, whole
    if lacking and channel.frame()[0] != b"Z":
        raise WireError("more contents than were asked for")
    if not broken:
        listing.keep_tree(ahead)
        arrived(tree)
    if lacking or early:
        channel.say(stored=stored, bytes=stored_bytes)
    else:
        channel.say(have="tree", along=True, came=came, came_bytes=came_bytes)


_arriving: Dict[Tuple[str, str], Tuple[Channel, Incoming]] = {}     # (the store's folder, SHA-256): the content that comes just now, and how
_arriving_lock = threading.Lock()


def _begun(store: Store, sha256: str) -> Optional[Incoming]:
    """A content where its push broke off. Of a push whose operator was killed nobody here knows yet that it broke: one that has been silent
    for long gives up what it has to whoever asks for it now. (One that lives keeps it, and the content comes twice.)"""
    deadline, heard_at = time.monotonic() + 2 * STALLED_S, None
    while time.monotonic() < deadline:
        with _arriving_lock:
            other, incoming = _arriving.get((store.root, sha256), (None, None))
        if other is None or incoming is None:
            return store.take_partial(sha256)
        if incoming.size < WORTH_BYTES or heard_at not in (None, other.heard_at):
            return None
        heard_at = other.heard_at
        if time.monotonic() - heard_at > STALLED_S:
            other.stream.abort()                                # its thread lets go of what it has
        time.sleep(0.02)
    return None


def _take_content(channel: Channel, store: Store, entry: Entry, incoming: Optional[Incoming], needed: int, ahead: Ahead) -> bool:
    key, arriving, resumes = (store.root, entry.sha256), None, entry.size >= RESUME_BYTES
    try:
        incoming = incoming or store.incoming()
        if resumes:
            arriving = (channel, incoming)
            with _arriving_lock:
                _arriving[key] = arriving                       # before an earlier one, which may be that of a killed operator
        while True:
            kind, payload = channel.frame()
            if kind == b"X":
                return False
            if kind == b"E":
                parts = incoming.parts
                kept = incoming.keep(entry.sha256, entry.size, ahead.journal)
                if kept:
                    ahead.add(entry, parts)
                return kept
            if kind != b"D":
                raise WireError(f"a frame {kind!r} inside a file")
            if incoming.size + len(payload) > entry.size:
                raise WireError(f"'{quote_name(entry.path)}' is longer than the listing says")
            incoming.write(payload)
    except LinkError:
        if incoming is not None:
            store.keep_partial(entry.sha256, incoming)
            incoming = None
        raise
    except OSError as error:
        raise store.not_stored(f"'{quote_name(entry.path)}'", error, needed) from None
    finally:
        if incoming is not None:
            incoming.drop()
        if resumes:
            with _arriving_lock:
                if _arriving.get(key) is arriving:
                    del _arriving[key]


# ---- pull --------------------------------------------------------------------------------------------------------------------

def serve_pull(channel: Channel, header: Dict[str, Any], root: str, over: Callable[[float], bool]) -> Pulled:
    """Node: sends the outputs once `over(timeout_s)` says that no process of the run is left; a live pull doesn't ask. Returns what the
    operator acknowledged."""
    declared = header.get("outputs")
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in declared):
        raise WireError("outputs must be a list of texts")
    begun, live = header.get("begun", {}), header.get("live") is True
    if not isinstance(begun, dict):
        raise WireError("begun must say which files are there in part")
    here = {entry.path: (entry.size, entry.mtime_ns, entry.sha256) for entry in channel.listing() if entry.kind == "file"}
    while not live and not over(KEEPALIVE_S):
        channel.keep_alive()
    with channel.at_work():
        outputs, missing, refused = manifest.find_outputs(root, declared)
    inodes = {source: _inode(source) for entry, source in outputs if entry.kind == "file"} if live else {}
    size = sum(output.entry.size for output in outputs)
    shown = [(path[:REFUSED_LENGTH], why[:REFUSED_LENGTH]) for path, why in refused[:REFUSED_SHOWN]]
    if len(refused) > REFUSED_SHOWN:
        shown.append(("…", f"and {len(refused) - REFUSED_SHOWN} more"))
    channel.put({"entries": len(outputs), "bytes": size, "refused": shown, "packs": channel.packs(header.get("packs"), header.get("rtt_s"))})
    channel.send_packed(b"M", (json.dumps(missing).encode("ascii"),))
    channel.send_packed(b"L", manifest.encode_parts(output.entry for output in outputs))
    for entry, source in outputs:
        if entry.kind == "file":
            size_here, mtime_ns, end = here.get(entry.path, (0, 0, ""))
            if entry.path in here and (size_here, mtime_ns) == (entry.size, entry.mtime_ns):
                with channel.at_work() if entry.size > WORK_BYTES else contextlib.nullcontext():
                    alike = manifest.hash_if(source, entry.size)
                if alike:
                    channel.writer.frame(b"S", alike)
                    continue
            start, part = _part(begun, entry)
            if header.get("tails") is True and end and start < size_here <= entry.size and manifest.end_hash(source, size_here) == end:
                channel.writer.frame(b"P")
                start, part = size_here, ""
            send_file(channel, source, entry.size, "", lambda moved: None, start, part, inodes.get(source))
    channel.writer.frame(b"Z")
    channel.writer.flush()
    answer = channel.answer()
    if "again" in answer:
        if not isinstance(answer["again"], list) or not all(isinstance(path, str) for path in answer["again"]):
            raise WireError("again must be a list of texts")
        for entry, source in outputs:
            if entry.kind == "file" and entry.path in answer["again"]:
                send_file(channel, source, entry.size, "", lambda moved: None, inode=inodes.get(source))
        channel.writer.frame(b"Z")
        channel.writer.flush()
        answer = channel.answer()
    return Pulled(number_in(answer, "collected"), number_in(answer, "bytes"), missing, refused)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0                                                # gone since it was listed


def _part(begun: Dict[str, Any], entry: Entry) -> Tuple[int, str]:
    """What the operator has of a file: how many bytes, their hash; (0, "") when that is nothing, or nothing worth the asking."""
    said = begun.get(key_of(entry.path))
    if said is None or entry.size < RESUME_BYTES:
        return 0, ""
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[1], str) or not manifest.is_hash(said[1]):
        raise WireError("begun must say how many bytes of a file are there, and their SHA-256")
    start = number_in({"begun": said[0]}, "begun")
    return (start, said[1]) if 0 < start <= entry.size else (0, "")


def key_of(path: str) -> str:
    """What the part of a file is filed under: a name that any disk takes. Not made from the file's size and time: one that grew since
    goes on all the same, if it begins with the part."""
    return hashlib.sha256(json.dumps(path).encode("ascii")).hexdigest()


# ---- follow ------------------------------------------------------------------------------------------------------------------

def serve_follow(channel: Channel, header: Dict[str, Any], folder: str, over: Callable[[], bool], wait: Callable[[float], None]) -> bool:
    """Node: sends the logs as they grow. `over()`: nothing will be written any more; `wait(s)` returns early when that changes.
    With `"live": false` in the header neither is asked. Returns whether the operator said that all of it is on its disk."""
    offsets = header.get("offsets")
    if not isinstance(offsets, dict) or not set(offsets) <= set(LOGS):
        raise WireError("offsets must name the logs")
    at = {name: number_in(offsets, name) for name in offsets}
    files, packs = _LogFiles(folder, at), channel.packs(header.get("packs"), header.get("rtt_s"))
    try:
        if header.get("tail") is not None:
            lines = number_in(header, "tail")
            at.update((name, tail_start(files.fd(name), files.size(name), lines)) for name in at)
            channel.say(offsets=at)
        if packs:
            channel.put({"packs": packs})
        if header.get("live", True) is False:
            ends = {name: files.size(name) for name in at}
            while files.send_growth(channel, at, ends):
                pass
        else:
            _send_live(channel, files, at, over, wait)
    finally:
        files.close()
    channel.writer.frame(b"Z", json.dumps(at).encode("ascii"))
    channel.writer.flush()
    kept = header.get("keeps") is True and channel.answer().get("kept") is True
    if header.get("keeps") is True:
        channel.writer.frame(b"Z")
        channel.writer.flush()
    channel.finish()
    return kept


def _send_live(channel: Channel, files: "_LogFiles", at: Dict[str, int], over: Callable[[], bool], wait: Callable[[float], None]) -> None:
    spoken, pause, silent_rounds = time.monotonic(), 0.0, 0
    while True:
        last_round = over()                                     # asked before reading: what was written before is read in this round
        if last_round or pause < LONGEST_PAUSE_S or silent_rounds % LOOKED_FOR_IN == 0:
            files.look()
        if files.send_growth(channel, at):
            channel.writer.flush()
            spoken, pause, silent_rounds = time.monotonic(), 0.0, 0
        elif last_round:
            return
        else:
            if time.monotonic() - spoken > KEEPALIVE_S:
                channel.keep_alive()
                spoken = time.monotonic()
            pause = min(pause + 0.01, LONGEST_PAUSE_S)
            silent_rounds += 1
            wait(pause)


class _LogFiles:
    """The logs of a run on the node, open as soon as they exist. A silent one costs one system call a look: hours of them add up."""

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self._folder = folder
        self._fds: Dict[str, int] = {}
        self._absent = list(names)
        self.look()

    def look(self) -> None:
        """Opens what has come into being."""
        for name in list(self._absent):
            try:
                self._fds[name] = os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_CLOEXEC)
                self._absent.remove(name)
            except FileNotFoundError:
                pass

    def fd(self, name: str) -> int:
        return self._fds.get(name, -1)

    def size(self, name: str) -> int:
        return os.fstat(self._fds[name]).st_size if name in self._fds else 0

    def send_growth(self, channel: Channel, at: Dict[str, int], ends: Optional[Dict[str, int]] = None) -> bool:
        """A block of each log that reaches beyond `at`, which moves on, and not beyond `ends`; False: there was none."""
        moved = False
        for name, fd in self._fds.items():
            left = (os.fstat(fd).st_size if ends is None else ends[name]) - at[name]
            block = os.pread(fd, min(left, BLOCK), at[name]) if left > 0 else b""
            if block:
                channel.data(block, LOGS[name])
                at[name] += len(block)
                moved = True
        return moved

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def tail_start(fd: int, size: int, lines: int) -> int:
    """Where the last `lines` lines of the file's first `size` bytes begin. A last one without a line feed counts. Read from the end, so
    that a long log takes no longer than a short one."""
    at, wanted = size, lines
    if lines == 0:
        return size
    while at > 0:
        start = max(0, at - TAIL_BLOCK)
        block = os.pread(fd, at - start, start)
        end = len(block) - (at == size and block.endswith(b"\n"))   # the last line's own end is no beginning
        found = block.count(b"\n", 0, end)
        if found >= wanted:
            for _ in range(wanted):
                end = block.rindex(b"\n", 0, end)
            return start + end + 1
        wanted, at = wanted - found, start
    return 0


def follow(stream: Any, run_id: str, offsets: Dict[str, int], take: Callable[[str, int, bytes], None], tail: Optional[int] = None,
           live: bool = True, kept: Optional[Callable[[Dict[str, int]], bool]] = None) -> Dict[str, int]:
    """Operator: `take(log, position, bytes)` for every piece from `offsets` on, until the node says that nothing more comes; the final
    sizes. With `tail` each log named in `offsets` begins at its last `tail` lines instead, and a first `take` without bytes tells where
    that is; without `live` it ends at its present end. `kept(sizes)` says whether all of it is on this disk; the node knows the answer
    when this returns. It costs a round trip, and is for a run whose logs the node would keep else."""
    channel = Channel(stream)
    try:
        request: Dict[str, Any] = {"type": "Follow", "run_id": run_id, "offsets": offsets, "packs": packing.known(), "rtt_s": channel.rtt_s()}
        if tail is not None:
            request["tail"] = tail
        if not live:
            request["live"] = False
        if kept is not None:
            request["keeps"] = True
        channel.say(**request)
        begins = offsets if tail is None else channel.answer().get("offsets")
        if not isinstance(begins, dict):
            raise WireError("offsets must say where each log begins")
        at = {name: number_in(begins, name) for name in offsets}
        if tail is not None:
            for name in at:
                take(name, at[name], b"")     # who breaks off before anything comes knows where to go on
        while True:
            kind, payload = channel.frame()
            if kind == b"Z":
                sizes = decode_object(payload)
                if any(number_in(sizes, name) != at[name] for name in at):
                    raise WireError("the final sizes of the logs aren't what was sent of them")
                if kept is not None:
                    channel.say(kept=kept(at))
                    if channel.frame()[0] != b"Z":
                        raise WireError("more of the logs than their final sizes")
                with contextlib.suppress(LinkError):            # its end, so that a connection closed now doesn't look broken to the node
                    channel.frame_within(LAST_WORD_S)
                channel.finish()
                return at
            if kind == b"J":
                channel.unpacks(decode_object(payload).get("packs"))
                continue
            name = _LOG_OF.get(kind, "")
            if name not in at:
                raise WireError(f"a frame {kind!r} in a log")
            take(name, at[name], payload)
            at[name] += len(payload)
    finally:
        channel.leave()


def read_request(channel: Channel, timeout_s: float) -> Dict[str, Any]:
    """Node: the first frame of a transfer stream. Waits less patiently than inside a transfer."""
    kind, payload = channel.frame_within(timeout_s)             # keepalives may come before it: the operator hashes what it has
    if kind != b"J":
        raise WireError("a transfer stream begins with a J frame")
    return decode_object(payload)


def report(channel: Channel, error: GpurunError) -> None:
    """Node: tells the operator why the request ends."""
    channel.writer.frame(b"!", str(error).encode("utf-8", "replace")[:4096])
    channel.writer.flush()
    channel.finish()
