"""What the files of a workspace hashed to, so that a tree that didn't change is listed without a look into its files.

One file a workspace root, `<cache>/stat/<hash of the real root>`: for each file its path, its state as `stat` gives it (size, mtime, ctime,
inode, device) and its SHA-256. A file whose state is still the same, every part of it to the nanosecond, has the hash that is noted.
Anything wrong with the cache (damaged, of another version, unwritable, no room, deleted) is as if there were none: files are hashed.

**What is trusted.** Any change to a file's bytes or name moves its ctime, and no program can set that back: a restored mtime (`cp -p`,
`touch -d`, `tar`, `rsync -t`), another file moved onto this one, a write through another hard link or a bind mount all show. A file that
gave way to a link, a folder or a FIFO isn't asked about. But a clock ticks, and two changes within a tick leave one state (git tells of it in
"racy-git"): a file that is hashed between the two would keep the wrong hash for ever. So a hash is noted only when both times lay clearly
before the moment at which the hashing began, by the clock of this machine: by SETTLED_NS, or COARSE_NS where both times are in whole
seconds, as they are on disks with a slow clock. What is younger, or dated in the future (a clock that was set back), is hashed again next time. A
cache that was written in the future is not read.

**What is not seen**, here as by git, rsync and make. A program that maps a file into memory and writes to a page once more before the
system has written that page to the disk (up to half a minute; on a tmpfs, at any time): the state moves with the first of these writes only.
A network disk whose server's clock is behind ours by more than the margin, if a file changes twice within one tick of it and is hashed
between. A disk that keeps no ctime (sshfs), if another file of the same size, time and inode number takes the place. A network disk that
tells of another machine's change late. A disk that gives neither inode numbers nor ctimes isn't trusted at all. `touch` on a file, or deleting
the cache, settles each of these.

A hash that is wrong can't make a wrong workspace out of right bytes: what is sent is hashed on its way (`transfer`), a difference ends the
push, and the second listing of the same process asks nothing here. It can only hide a change: the node then runs with the bytes that the file had
when it was hashed, which it has from an earlier push.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
from typing import Dict, List

from gpurun.files import atomic_write, make_private_dir
from gpurun.manifest import local_path
from gpurun.paths import cache_dir

VERSION = b"gpurun-stat-1\n"
FOLDER = "stat"
KEPT = 50                       # roots; the ones used longest ago go
SETTLED_NS = 2 * 10 ** 9        # covers FAT's clock, which ticks every two seconds
COARSE_NS = 600 * 10 ** 9       # whole seconds twice: FAT, old network disks, sftp. Their clock may be a server's, so a wider margin
SECOND_NS = 10 ** 9
WORTH_BYTES = 64 << 10          # hashing so many bytes takes about as long as opening one more file
WORTH_PART = 16                 # noted is what would otherwise cost a sixteenth of it again: five files of 100,000 aren't worth writing all
_HEAD = struct.Struct("<qqq")   # when it was written (ns), files, bytes of the paths
_STATE = struct.Struct("<QqqQQ")
_HASH_BYTES = 32
_RECORD_BYTES = _STATE.size + _HASH_BYTES
_UNSEEN, _SEEN, _STALE = range(3)


def now_ns() -> int:
    return time.time_ns()


def _state(found: os.stat_result) -> bytes:
    """A file's state in one form; b"" for one that says too little to know the file by."""
    if found.st_ino <= 0 or found.st_ctime_ns <= 0:
        return b""
    try:
        return _STATE.pack(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
    except struct.error:        # a time beyond the year 2262
        return b""


def _settled(found: os.stat_result, began_ns: int) -> bool:
    """Whether a change after `began_ns` can't leave the file in the state in which it was found."""
    whole_seconds = found.st_mtime_ns % SECOND_NS == 0 and found.st_ctime_ns % SECOND_NS == 0
    return max(found.st_mtime_ns, found.st_ctime_ns) < began_ns - (COARSE_NS if whole_seconds else SETTLED_NS)


class StatCache:
    """The hashes of one workspace root. Raises nothing; two processes at once cost a hash or two. `learn` is called by one thread at a time."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)
        self._paths: List[str] = []
        self._at: Dict[str, int] = {}
        self._records = b""
        self._new_paths: List[str] = []
        self._new_records = bytearray()
        self._worth = 0
        self._path = ""
        with contextlib.suppress(OSError):      # not there, or it can't be read
            name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
            self._path = os.path.join(cache_dir(), FOLDER, name)
            with open(self._path, "rb") as stream:
                data = stream.read()
            os.utime(self._path)                # by which it is known which are used
            self._read(data)
        self._marks = bytearray(len(self._paths))

    def _read(self, data: bytes) -> None:
        start = len(VERSION) + _HEAD.size
        body, digest = memoryview(data)[:-_HASH_BYTES], data[-_HASH_BYTES:]
        if data[:len(VERSION)] != VERSION or len(data) < start + _HASH_BYTES or hashlib.sha256(body).digest() != digest:
            return
        written_ns, count, size = _HEAD.unpack_from(data, len(VERSION))
        if written_ns > now_ns():
            return
        self._paths = data[start:start + size].decode("utf-8", "surrogateescape").split("\0")
        self._records = data[start + size:-_HASH_BYTES]
        self._at = dict(zip(self._paths, range(count)))

    def known(self, path: str, found: os.stat_result) -> str:
        """The SHA-256 of a file that was just found so, in hex; "" when it has to be hashed."""
        at = self._at.get(path)
        if at is None:
            return ""
        start = at * _RECORD_BYTES
        if self._records[start:start + _STATE.size] != _state(found):
            self._marks[at] = _STALE
            return ""
        self._marks[at] = _SEEN
        return self._records[start + _STATE.size:start + _RECORD_BYTES].hex()

    def learn(self, path: str, found: os.stat_result, sha256: str, began_ns: int) -> None:
        """`found` is the state, before and after, of a file whose hashing began at `began_ns`."""
        if path in self._at:
            self._marks[self._at[path]] = _STALE
        state = _state(found)
        if state and _settled(found, began_ns):
            self._new_paths.append(path)
            self._new_records += state + bytes.fromhex(sha256)
            self._worth += 1 + found.st_size // WORTH_BYTES

    def save(self) -> None:
        """Writes it, if what is new is worth that. What is gone from the disk goes; what wasn't asked for (another job's `exclude`) stays."""
        if not self._path or not self._new_paths or self._worth * WORTH_PART < len(self._paths):
            return
        with contextlib.suppress(OSError):
            make_private_dir(os.path.dirname(self._path))
            atomic_write(self._path, self._encoded())
            _trim(os.path.dirname(self._path))

    def _encoded(self) -> bytearray:
        kept = [at for at, (path, mark) in enumerate(zip(self._paths, self._marks))
                if mark == _SEEN or mark == _UNSEEN and os.path.lexists(local_path(self._root, path))]
        paths = "\0".join([self._paths[at] for at in kept] + self._new_paths).encode("utf-8", "surrogateescape")
        data = bytearray(VERSION + _HEAD.pack(now_ns(), len(kept) + len(self._new_paths), len(paths)) + paths)
        for at in kept:
            data += self._records[at * _RECORD_BYTES:(at + 1) * _RECORD_BYTES]
        data += self._new_records
        data += hashlib.sha256(data).digest()
        return data


def _trim(folder: str) -> None:
    caches = sorted((os.stat(item.path).st_mtime_ns, item.path) for item in os.scandir(folder))
    for _, path in caches[:-KEPT]:
        os.unlink(path)
