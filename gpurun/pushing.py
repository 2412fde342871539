"""The operator's half of a push: what the node lacks of a tree goes there.

The node's half and the protocol are in `transfer.py`. The operator remembers, for each agent, which trees it brought there last and the
listing of the last one: a tree that is there already costs one round trip and no listing; of another one the difference to the last goes, and
contents that weren't in that go along unasked, as long as it costs about what the round trip would that it saves. All of it is a guess that
the node puts right: what it has is thrown away there, what it lacks it asks for, before that has come. The memory may be lost at any time; an agent of
which nothing is remembered is taken to have nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from typing import Any, Callable, Iterator, Sequence

from gpurun import listings, manifest, packing
from gpurun.errors import LinkError, TransferError, WireError
from gpurun.files import atomic_write, make_private_dir
from gpurun.manifest import Entry
from gpurun.paths import cache_dir
from gpurun.transfer import ALONG_PACKED, BLOCK, ChangedError, Channel, Progress, Pushed, number_in, send_file

INLINE_LISTING = 4 << 20        # a listing up to this size (30,000 files) goes at once too to an agent of which nothing is known: most likely it hasn't the tree
ALONG_BYTES = 1 << 20           # of contents that go unasked, at most: a connection's window takes longer to open so far than the node's answer to come
ALONG_LEAST = 32 << 10
SMALL_BYTES = 64 << 10          # a file up to this size is read at once
TOLD_BYTES = 64 << 10           # of small files that went, between two words of progress
ALONG_BYTES_S = 12.5e6          # what a link is taken to do when the cost of a round trip is weighed
TREES = 16                      # remembered for an agent
LONGEST_LISTING = 24 << 20      # of some 150,000 entries, packed to a third; of larger trees none is remembered
AGENTS = 20                     # remembered at all
VERSION = 1
_doubted: set[str] = set()      # where it is remembered what went to the agents that this process met and that didn't understand a guess


class _MisunderstoodError(LinkError):
    """Perhaps nothing but a guess that the agent didn't understand. The next push goes without."""


def push(open_stream: Callable[[], Any], root: str, entries: Sequence[Entry], encoded: bytes, progress: Progress) -> Pushed:
    """Brings what the node lacks of a tree. Raises ChangedError when a file changed since it was listed, TransferError, LinkError.

    `encoded` is the listing of `entries`, which are hashed; `root` is where their files are. More than one stream is opened where the first guess
    was a wrong one.
    """
    try:
        return _push(open_stream(), root, entries, encoded, progress)
    except _MisunderstoodError:
        return _push(open_stream(), root, entries, encoded, progress)


def _push(stream: Any, root: str, entries: Sequence[Entry], encoded: bytes, progress: Progress) -> Pushed:
    channel = Channel(stream)
    memory = _Memory(getattr(getattr(stream, "connection", None), "peer_id", ""))
    try:
        return _Push(channel, memory, root, entries, encoded, progress).run()
    except _MisunderstoodError:
        raise
    except LinkError as broken:
        raise channel.reason(broken) from None
    finally:
        channel.leave()


class _Push:
    def __init__(self, channel: Channel, memory: "_Memory", root: str, entries: Sequence[Entry], encoded: bytes, progress: Progress) -> None:
        self._channel, self._memory, self._root, self._progress = channel, memory, root, progress
        self._entries, self._encoded, self._tree = entries, encoded, manifest.tree_id(encoded)
        self._changed = ""

    def run(self) -> Pushed:
        channel, memory, tree = self._channel, self._memory, self._tree
        lists = tree not in memory.trees and (bool(memory.trees) or len(self._encoded) <= INLINE_LISTING)
        old, contents = memory.last() if lists else ({}, set())
        along = self._along(contents) if old or memory.is_new and lists else []
        request: dict[str, Any] = {"type": "Push", "tree": tree, "listing": lists, "packs": packing.known(), "along": bool(along), "early": True}
        if old:
            request["base"] = memory.trees[0]
        channel.put(request)
        if lists:
            channel.send_packed(b"L", listings.difference(old, self._encoded) if old else self._blocks())
        del old, contents
        if along:
            self._send_along(along)
        channel.writer.flush()
        try:
            answer = channel.answer()
        except TransferError as error:
            if along or "base" in request:
                memory.doubt()                  # if that was it: next time nothing is guessed
                raise _MisunderstoodError(str(error)) from None
            raise
        if answer.get("have") == "nothing":
            self._changed, along = "", []
            channel.send_packed(b"L", self._blocks())
            channel.writer.flush()
            answer = channel.answer()
        elif along and answer.get("along") is not True:
            memory.doubt()
            raise _MisunderstoodError("the agent there is another one than last time, and of an older version: it didn't expect what went along")
        early = along if answer.get("early") is True else []
        came, came_bytes = (number_in(answer, "came"), number_in(answer, "came_bytes")) if along and not early else (0, 0)
        files = size = 0
        if answer.get("have") == "tree":
            if came:
                self._progress(came_bytes, came_bytes, "")
        else:
            files, size = self._send_wanted(answer, came_bytes, early)
        channel.finish()
        if self._changed:
            raise ChangedError(self._changed)
        memory.keep(tree, self._encoded, answer.get("along") is True)
        return Pushed(files + came, size + came_bytes)

    def _blocks(self) -> Iterator[bytes]:
        return (self._encoded[at:at + BLOCK] for at in range(0, len(self._encoded), BLOCK))

    def _along(self, contents: set[bytes]) -> list[int]:
        """Which entries' contents go unasked: the node is known to take such, and they weren't in the last tree."""
        rtt_s = self._channel.rtt_s() or 0.0
        left, seen, chosen = max(ALONG_LEAST, min(ALONG_BYTES, int(rtt_s * ALONG_BYTES_S))), set(), []
        for index, entry in enumerate(self._entries):
            if entry.size and entry.sha256 not in seen:
                seen.add(entry.sha256)
                if entry.size <= left and _prefix(entry.sha256) not in contents:
                    left -= entry.size
                    chosen.append(index)
        return chosen

    def _send_along(self, indices: list[int]) -> None:
        bitmap = bytearray(len(self._entries) // 8 + 1)
        for index in indices:
            bitmap[index >> 3] |= 1 << (index & 7)
        self._channel.send_packed(b"A", (bytes(bitmap),))
        self._channel.packs([ALONG_PACKED])
        for index in indices:
            self._send(self._entries[index], lambda more: None)

    def _send(self, entry: Entry, moved: Callable[[int], None], start: int = 0) -> None:
        path, channel = manifest.local_path(self._root, entry.path), self._channel
        block = _small(path, entry.size) if entry.size <= SMALL_BYTES else b""
        if block and hashlib.sha256(block).hexdigest() == entry.sha256:
            channel.begin_file()
            channel.data(block)
            channel.writer.frame(b"E")
        else:
            sent = send_file(channel, path, entry.size, entry.sha256, moved, start)
            self._changed = self._changed or sent

    def _send_wanted(self, answer: dict[str, Any], done: int, along: list[int]) -> tuple[int, int]:
        """What the node asks for; how many contents, how many bytes. `done` bytes are there already; what went `along` it may name too."""
        channel = self._channel
        lacking, size = number_in(answer, "contents"), number_in(answer, "bytes")
        channel.packs([answer.get("packs")])
        begun = answer.get("begun", {})
        if not isinstance(begun, dict):
            raise WireError("begun must say which contents are there in part")
        wanted = b"".join(channel.read_packed(b"W", len(self._entries) // 8 + 1))
        files, sent, total, gone, told = 0, 0, done + size, set(along), done
        self._progress(done, total, "")
        for index, entry in enumerate(self._entries):
            if index >> 3 < len(wanted) and wanted[index >> 3] & (1 << (index & 7)):
                if entry.kind != "file":
                    raise WireError("the node asked for the contents of something that is no file")
                files += 1
                if done - told >= TOLD_BYTES:
                    self._progress(done, total, entry.path)
                    told = done
                if index not in gone:
                    start = number_in(begun, str(index)) if str(index) in begun else 0
                    self._send(entry, lambda more, name=entry.path: self._progress(done + more, total, name), start)
                    sent += 1
                done += entry.size
        if files != lacking:
            raise WireError(f"the node asked for {lacking} contents and named {files}")
        self._progress(done, total, "")
        if sent or not along:
            channel.writer.frame(b"Z")
        channel.writer.flush()
        stored = number_in(channel.answer(), "stored")
        if stored != files and not self._changed:
            raise TransferError(f"{files - stored} of {files} files arrived broken on the node (SHA-256 differs); run again")
        return files, size


def _small(path: str, size: int) -> bytes:
    """A file that has this size, in as few system calls as can be; b"" for any other, and for one that can't be read: `send_file` finds out why."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            block = os.read(fd, size + 1)
        finally:
            os.close(fd)
    except OSError:
        return b""
    return block if len(block) == size else b""


def _prefix(sha256: str) -> bytes:
    """Of a content's hash, enough for a guess."""
    return bytes.fromhex(sha256[:16])


class _Memory:
    """What was brought to one agent: a line of JSON, and the last tree's listing behind it, by zlib."""

    def __init__(self, agent_id: str) -> None:
        """Without an id nothing is remembered."""
        self._path = os.path.join(cache_dir(), "pushed", agent_id) if manifest.is_hash(agent_id) else ""
        self.trees: list[str] = []              # the last one first
        self.is_new = bool(self._path) and self._path not in _doubted       # nothing is known of this agent: most likely it has nothing of ours
        self._has_listing = False               # of the last one; and the agent knows what to do with a difference to it
        try:
            with open(self._path, "rb") as stream:
                known = json.loads(stream.readline(64 << 10))
            if known.get("version") == VERSION and all(isinstance(tree, str) for tree in known["trees"]):
                self.trees, self._has_listing, self.is_new = known["trees"], known.get("listing") is True, False
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass                                # nothing is remembered

    def last(self) -> tuple[dict[int, int], set[bytes]]:
        """The numbers of the last tree's lines, by their hash, and its contents; nothing where that isn't known."""
        numbers: dict[int, int] = {}
        contents: set[bytes] = set()
        if not self._has_listing:
            return numbers, contents
        unpack, rest = zlib.decompressobj(), b""
        try:
            with open(self._path, "rb") as stream:
                stream.readline(64 << 10)
                while not unpack.eof:
                    block = stream.read(BLOCK)
                    if not block:
                        return {}, set()
                    *lines, rest = (rest + unpack.decompress(block)).split(b"\n")
                    for line in lines:
                        numbers[hash(line + b"\n")] = len(numbers)
                        if line.startswith(b'["f"'):
                            contents.add(_prefix(line.split(b'"', 4)[3].decode("ascii")))
        except (OSError, zlib.error, ValueError, IndexError):
            return {}, set()
        return numbers, contents

    def keep(self, tree: str, encoded: bytes, guesses: bool) -> None:
        """All of this tree is there; `guesses`: the agent knows `along` and `base`. Not to be able to write this down is no fault."""
        if not self._path or self.trees[:1] == [tree]:
            return
        listed = guesses and len(encoded) <= LONGEST_LISTING
        trees = ([tree] + [known for known in self.trees if known != tree])[:TREES]
        head = json.dumps({"version": VERSION, "trees": trees, "listing": listed}).encode("ascii") + b"\n"
        try:
            folder = make_private_dir(os.path.dirname(self._path))
            atomic_write(self._path, head + zlib.compress(encoded, 1) if listed else head)
            others = sorted((os.path.join(folder, name) for name in os.listdir(folder)), key=os.path.getmtime)
            for path in others[:-AGENTS]:
                os.unlink(path)
        except OSError:
            pass

    def doubt(self) -> None:
        """The next push goes without guesses."""
        _doubted.add(self._path)
        try:
            os.unlink(self._path)
        except OSError:
            pass
