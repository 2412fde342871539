"""What the node keeps: contents by their hash, trees by theirs, and the runs' folders made from them.

    cache/contents/ab/cdef…    a file's bytes, named by their SHA-256; never written again once in place
    cache/trees/<tree id>      a listing (`manifest.encode`) all of whose contents were here when it was put in place
    cache/incoming/            what is on its way; emptied when the agent starts
    runs/<run id>/work/        a run's workdir: copies (reflinks where the file system can), never links, so a job can't write into the cache

A content's hash is checked before its name is given. It isn't synced to the disk one by one (2,000 small files would wait for 2,000
syncs); instead a content that is older than the node's last boot is hashed again before it is used, and thrown away if it differs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
from typing import List, Optional, Tuple

from gpurun import manifest
from gpurun.errors import TransferError
from gpurun.files import atomic_write, exact_bytes, free_bytes, make_private_dir, write_all

COPY_BYTES = 1 << 20
FICLONE = 0x40049409            # linux/fs.h: share the blocks of another file, copied when either is written
CACHE_CAP_BYTES = 20 << 30      # beyond this the contents that were used longest ago go
RESERVE_BYTES = 64 << 20        # left free on the disk, for logs and records
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def _boot_id() -> str:
    try:
        with open(BOOT_ID) as stream:
            return stream.read().strip()
    except OSError:
        return ""               # no such thing here (macOS): then each start of the agent counts as a boot


class Store:
    """The node's folder `root` (`~/.gpurun`). Used by several threads: what they share is made by rename."""

    def __init__(self, root: str, cap_bytes: int = CACHE_CAP_BYTES) -> None:
        self.root = root
        self.cap_bytes = cap_bytes
        self.runs = make_private_dir(os.path.join(root, "runs"))
        self._contents = make_private_dir(os.path.join(root, "cache", "contents"))
        self._trees = make_private_dir(os.path.join(root, "cache", "trees"))
        self._incoming = os.path.join(root, "cache", "incoming")
        shutil.rmtree(self._incoming, ignore_errors=True)
        make_private_dir(self._incoming)
        self._number = 0
        self._lock = threading.Lock()
        self._in_use = threading.Condition()
        self._users = 0
        self._reflink = True
        self._booted_ns = self._mark_boot()

    def _mark_boot(self) -> int:
        """The time, by this file system's clock, before which contents are not trusted unseen."""
        mark, boot_id = os.path.join(self.root, "cache", "boot"), _boot_id()
        try:
            with open(mark) as stream:
                known = stream.read()
        except OSError:
            known = None
        if known != boot_id or not boot_id:
            atomic_write(mark, boot_id.encode())
        return os.stat(mark).st_mtime_ns

    # ---- contents ------------------------------------------------------------------------------------------------------

    def _path(self, sha256: str) -> str:
        return os.path.join(self._contents, sha256[:2], sha256[2:])

    def has(self, sha256: str, size: int) -> bool:
        """Whether the content is here and whole."""
        path = self._path(sha256)
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return False
        if found.st_size == size and found.st_mtime_ns >= self._booted_ns:
            return True
        if found.st_size == size and manifest.hash_file(path)[0] == sha256:
            os.utime(path)
            return True
        os.unlink(path)
        return False

    def missing(self, entries: List[manifest.Entry]) -> List[int]:
        """The indices of the entries whose contents have to be sent: each content once, none for empty files."""
        lacking, asked = [], set()
        for index, entry in enumerate(entries):
            if entry.kind == "file" and entry.size and entry.sha256 not in asked:
                asked.add(entry.sha256)
                if not self.has(entry.sha256, entry.size):
                    lacking.append(index)
        return lacking

    def incoming(self) -> "Incoming":
        with self._lock:
            self._number += 1
            return Incoming(self, os.path.join(self._incoming, str(self._number)))

    # ---- trees ---------------------------------------------------------------------------------------------------------

    def tree(self, tree_id: str) -> Optional[List[manifest.Entry]]:
        """The entries of a tree if all of it is here; None when something has to be sent."""
        path = os.path.join(self._trees, tree_id)
        try:
            with open(path, "rb") as stream:
                encoded = stream.read()
        except FileNotFoundError:
            return None
        if manifest.tree_id(encoded) != tree_id:
            os.unlink(path)
            return None
        entries = manifest.decode(encoded)
        if self.missing(entries):
            return None
        os.utime(path)
        return entries

    def put_tree(self, encoded: bytes) -> None:
        """Makes a listing known, once all of its contents are here."""
        atomic_write(os.path.join(self._trees, manifest.tree_id(encoded)), encoded)

    def check_room(self, needed_bytes: int, what: str) -> None:
        """Raises TransferError unless the disk has room for `needed_bytes` more."""
        free = free_bytes(self.root)
        if free < needed_bytes + RESERVE_BYTES:
            raise TransferError(f"no room for {what} on the node: {self.root} has {exact_bytes(free)} free, needed are "
                                f"{exact_bytes(needed_bytes + RESERVE_BYTES)}. Free some, or use a node with a larger disk.")

    # ---- workdirs ------------------------------------------------------------------------------------------------------

    def materialize(self, entries: List[manifest.Entry], workdir: str) -> Tuple[int, int]:
        """Makes `workdir` from the entries, whole or not at all; (files, bytes). Replaces what an earlier try left beside it."""
        with self._in_use:
            self._users += 1
        try:
            return self._materialize(entries, workdir)
        except OSError as error:
            free = free_bytes(self.root)
            raise TransferError(f"the workspace could not be written to {workdir}: {error.strerror or error} "
                                f"({manifest.quote_name(str(error.filename or ''))}; {exact_bytes(free)} free)") from None
        finally:
            with self._in_use:
                self._users -= 1

    def _materialize(self, entries: List[manifest.Entry], workdir: str) -> Tuple[int, int]:
        fresh = workdir + ".new"
        remove_tree(fresh)
        os.mkdir(fresh, 0o700)
        files = size = 0
        folders: List[manifest.Entry] = []
        for entry in entries:                                   # parents come before children; nothing lies below a link
            path = manifest.local_path(fresh, entry.path)
            if entry.kind == "dir":
                os.mkdir(path, 0o700)
                folders.append(entry)
            elif entry.kind == "link":
                manifest.make_link(entry, path)
            else:
                self._copy(entry, path)
                files += 1
                size += entry.size
        manifest.finish_folders(fresh, folders)
        os.rename(fresh, workdir)
        return files, size

    def _copy(self, entry: manifest.Entry, path: str) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if entry.size:
                source = os.open(self._path(entry.sha256), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._copy_bytes(source, target, entry.size)
                finally:
                    os.close(source)
            os.fchmod(target, entry.mode)
            os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(target)

    def _copy_bytes(self, source: int, target: int, size: int) -> None:
        if self._reflink:
            try:
                fcntl.ioctl(target, FICLONE, source)
                return
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                self._reflink = False                           # this file system can't; ask once, not once a file
        while size:
            block = os.read(source, min(size, COPY_BYTES))
            if not block:
                raise TransferError("a content of the cache is shorter than it was: the node's disk lost it; run again")
            write_all(target, block)
            size -= len(block)

    # ---- keeping the cache small ---------------------------------------------------------------------------------------

    def trim(self) -> int:
        """Removes the contents used longest ago until the cache is below its cap; bytes removed. Not while a workdir is being made."""
        with self._in_use:
            if self._users:
                return 0
            found, total = [], 0
            for folder, _, names in os.walk(self._contents):
                for name in names:
                    path = os.path.join(folder, name)
                    state = os.lstat(path)
                    found.append((max(state.st_atime_ns, state.st_mtime_ns), state.st_size, path))
                    total += state.st_size
            removed = 0
            for _, size, path in sorted(found):
                if total - removed <= self.cap_bytes:
                    break
                os.unlink(path)
                removed += size
            return removed


class Incoming:
    """One content on its way: written beside the cache, given its name only when size and hash are right."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        write_all(self._fd, data)
        self._hash.update(data)
        self._size += len(data)

    def keep(self, sha256: str, size: int) -> bool:
        """Ends it: True when it is the content that was announced and is in place now."""
        os.close(self._fd)
        if self._hash.hexdigest() != sha256 or self._size != size:
            os.unlink(self._path)
            return False
        place = self._store._path(sha256)
        try:
            os.rename(self._path, place)
        except FileNotFoundError:
            make_private_dir(os.path.dirname(place))
            os.rename(self._path, place)
        return True

    def drop(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)


def remove_tree(path: str) -> None:
    """Removes a folder and all below it, folders without write permission too; nothing when it isn't there."""
    def allow(function, name, _error) -> None:
        parent = os.path.dirname(name)
        for folder in (parent, name):
            if not os.path.islink(folder) and os.path.isdir(folder):
                os.chmod(folder, stat.S_IRWXU)
        if function in (os.rmdir, os.unlink):
            function(name)
        elif os.path.isdir(name):
            shutil.rmtree(name)

    if os.path.lexists(path):
        shutil.rmtree(path, onerror=allow)
