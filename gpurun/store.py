"""What the node keeps: contents by their hash, trees by theirs, and the runs' folders made from them.

    cache/contents/ab/cdef…    a file's bytes, named by their SHA-256; never written again once in place
    cache/trees/<tree id>      a listing (`manifest.encode`), checked line by line, all of whose contents were here when it was put in place
    cache/incoming/            what is on its way, and the workdir of a tree that is; emptied when the agent starts, but for
    cache/incoming/journal-1   small contents one behind the other, as they came: their files are made a moment later (`settle`)
    cache/spare/               the next run's workdir, made ahead (`spare`)
    runs/<run id>/work/        a run's workdir: copies (reflinks where the file system can), never links, so a job can't write into the cache

A content's hash is checked before its name is given. It isn't synced to the disk one by one (2,000 small files would wait for 2,000
syncs); instead what was verified gets a time of last use that nobody else gives a file: its nanosecond part is MARK_NS. A content is
trusted unseen only with that mark, with its size, and when it isn't older than the node's last boot. Any write to it changes the time.
All others are hashed before they are used: marked anew, or thrown away and asked for again. (A file system that keeps no fractions of
a second so hashes them each time.) A listing is hashed whenever a run begins. What of cache/ is missing is made again when it's needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

from gpurun import manifest
from gpurun.errors import TransferError, WorkspaceError
from gpurun.files import FULL, atomic_write, exact_bytes, free_bytes, make_private_dir, remove_tree, write_all
from gpurun.spare import Ahead, Journal, Spare

COPY_BYTES = 1 << 20
SMALL_BYTES = 256 << 10         # a content up to this size is checked in memory and written in one go
FICLONE = 0x40049409            # linux/fs.h: share the blocks of another file, copied when either is written
CACHE_CAP_BYTES = 20 << 30      # beyond this the contents that were used longest ago go
RESERVE_BYTES = 64 << 20        # left free on the disk, for logs and records
KNOWN_S = 60.0                  # a tree that was found whole is taken to be so for this long: several parts of a run ask one after the other
USED_EVERY_S = 3600             # a content's time of last use is exact to this: an unchanged workspace shouldn't cost a write a file
QUIET_S = 600.0                 # nothing is trimmed that soon after a push: what was found here may not be gone when the workdir is made
KEEP_PARTIALS = 4
RESUME_BYTES = 64 << 10         # what broke off below this size is sent again whole: a bad link brings no more at a time
MARK_NS = 271828000             # whole microseconds: there are file systems that keep no more
SECOND_NS = 10 ** 9
JOURNAL = "journal-"
SETTLE_S = 1.0                  # after a push, until the files of its contents are made: its run comes first
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
        make_private_dir(self._incoming)
        self._journals: List[Journal] = []                      # of pushes that have ended: contents whose files aren't made yet
        for name in os.listdir(self._incoming):
            path = os.path.join(self._incoming, name)
            if name.startswith(JOURNAL) and name[len(JOURNAL):].isdigit():
                self._journals.append(Journal(path))
            else:
                remove_tree(path)
        self._settling = threading.Lock()
        self._no_room: Optional[OSError] = None                 # why files of the last journal's contents weren't made
        self._number = max([int(journal.path.rpartition("-")[2]) for journal in self._journals], default=0)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._in_use = threading.Condition()
        self._users = 0
        self._reflink = True
        self._partials: Dict[str, Incoming] = {}
        self._known: Dict[str, Tuple[float, int, int]] = {}     # tree: when it was found whole, its listing's mtime and size
        self._touched = -QUIET_S
        self._booted = self._mark_boot()
        self.spare = Spare(os.path.join(root, "cache", "spare"), lambda entries, where: self._fill(entries, where, [0, 0]))

    def _mark_boot(self) -> int:
        """The time, in whole seconds, before which contents are not trusted unseen."""
        mark, boot_id = os.path.join(self.root, "cache", "boot"), _boot_id()
        try:
            with open(mark) as stream:
                known = stream.read()
        except OSError:
            known = None
        if known != boot_id or not boot_id:
            make_private_dir(os.path.dirname(mark))
            atomic_write(mark, boot_id.encode())
            os.utime(mark, ns=(time.time_ns(), time.time_ns()))  # by the clock that the contents get their time from, not a file server's
        return os.stat(mark).st_mtime_ns // SECOND_NS

    # ---- contents ------------------------------------------------------------------------------------------------------

    def _path(self, sha256: str) -> str:
        return f"{self._contents}/{sha256[:2]}/{sha256[2:]}"     # not os.path.join: asked for every file of a workspace

    def has(self, sha256: str, size: int) -> bool:
        """Whether the content is here and whole."""
        path = self._path(sha256)
        try:
            found = os.stat(path)
            whole = found.st_size == size
            if whole and not self._trusted(found):
                whole = manifest.hash_file(path)[0] == sha256
                if whole:
                    _mark_verified(path)
            elif whole and time.time() - found.st_mtime > USED_EVERY_S:
                _mark_verified(path)
            if not whole:
                self._throw_away(path, found)
            return whole
        except (OSError, WorkspaceError):
            return False            # not here, or a bad block, say: it is sent again, and replaced

    def _throw_away(self, path: str, found: os.stat_result) -> None:
        """Removes what was found damaged; not what another thread has meanwhile put in its place."""
        with self._lock:
            now = os.stat(path)
            if (now.st_ino, now.st_mtime_ns, now.st_size) == (found.st_ino, found.st_mtime_ns, found.st_size):
                os.unlink(path)

    def _trusted(self, found: os.stat_result) -> bool:
        """Whether nobody but us has touched it since it was verified, and no power loss lies between."""
        return found.st_mtime_ns % SECOND_NS == MARK_NS and found.st_mtime_ns // SECOND_NS >= self._booted

    def lacks(self, entries: Iterable[manifest.Entry], others: Callable[[manifest.Entry], None] = lambda entry: None) -> Iterator[Tuple[int, manifest.Entry]]:
        """(index, entry) of those whose contents have to be sent: each content once, none for empty files. `others` is told of all other entries."""
        self.settle()
        asked = set()
        for index, entry in enumerate(entries):
            if entry.size and entry.sha256 not in asked:
                asked.add(entry.sha256)
                if not self.has(entry.sha256, entry.size):
                    yield index, entry
                    continue
            others(entry)

    def ahead(self) -> Ahead:
        """For the workdir of a tree that comes."""
        with self._lock:
            self._number += 1
            return Ahead(os.path.join(self._incoming, f"work-{self._number}"), os.path.join(self._incoming, f"{JOURNAL}{self._number}"))

    def ended(self, ahead: Ahead) -> None:
        """Its push is over, well or not."""
        ahead.drop_unless_whole()
        with contextlib.suppress(OSError):      # then what wasn't written of its journal is asked for again
            self._take_over(ahead)

    def _take_over(self, ahead: Ahead) -> None:
        """What is in its journal counts as being here; the files are made a moment later, or as soon as somebody asks for them."""
        journal, ahead.journal = ahead.journal, None
        if journal is None:
            return
        try:
            journal.end()
        finally:
            with self._lock:
                self._journals.append(journal)
            later = threading.Timer(SETTLE_S, self.settle)
            later.daemon = True
            with contextlib.suppress(RuntimeError):             # no more threads: then whoever asks waits for it
                later.start()

    def settle(self) -> None:
        """Makes the files of contents that came in a journal. Whoever asks for contents waits for it."""
        if not self._journals:
            return
        with self._settling:
            while self._journals:
                journal = self._journals[0]
                try:
                    if free_bytes(self.root) < os.path.getsize(journal.path) + RESERVE_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), journal.path)
                    for sha256, data in journal.contents():
                        incoming = Incoming(self)
                        try:
                            incoming.write(data)
                            if not incoming.keep(sha256, len(data)):
                                raise OSError(errno.EIO, "a journal that isn't whole", journal.path)
                        finally:
                            incoming.drop()
                    self._no_room = None
                except OSError as error:
                    self.forget()               # what isn't here now is asked for again
                    self._no_room = error if error.errno in FULL else None
                with contextlib.suppress(OSError):
                    os.unlink(journal.path)
                with self._lock:
                    self._journals.pop(0)

    def incoming(self) -> "Incoming":
        self._touched = time.monotonic()
        return Incoming(self)

    def _open_incoming(self) -> Tuple[str, int]:
        """A new file on the way, for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._lock:
            self._number += 1
            path = os.path.join(self._incoming, str(self._number))
            try:
                return path, os.open(path, flags, 0o400)
            except FileNotFoundError:           # somebody emptied the cache under us
                make_private_dir(self._incoming)
                return path, os.open(path, flags, 0o400)

    def _put(self, sha256: str, parts: List[bytes]) -> bool:
        """Writes a small content, which was checked, in its place: a rename would take as long as all the rest. Without its mark it isn't trusted, so
        what a kill leaves here of it is no harm; the lock keeps others from throwing it away meanwhile. False when something is there."""
        path = self._path(sha256)
        with self._lock:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            except (FileExistsError, FileNotFoundError):
                return False
            try:
                for part in parts:
                    write_all(fd, part)
                _mark_verified(fd)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
        return True

    def take_partial(self, sha256: str) -> Optional["Incoming"]:
        """A content where its push broke off; the caller keeps, drops or gives it back."""
        with self._lock:
            return self._partials.pop(sha256, None)

    def keep_partial(self, sha256: str, incoming: "Incoming") -> None:
        """The push broke off in the middle of this one; the next one goes on there."""
        with self._lock:
            known = self._partials.get(sha256)
            if incoming.size < RESUME_BYTES or (known is not None and known.size >= incoming.size):
                spare = [incoming]
            else:
                spare = [self._partials.pop(sha256)] if known is not None else []
                self._partials[sha256] = incoming
                if len(self._partials) > KEEP_PARTIALS:
                    spare.append(self._partials.pop(next(iter(self._partials))))
        for one in spare:
            one.drop()

    # ---- trees ---------------------------------------------------------------------------------------------------------

    def tree(self, tree_id: str) -> Optional["Tree"]:
        """The entries of a tree if all of it is here; None when something has to be sent."""
        with self._asking:                      # a push and its run ask at the same time: the second one has the first one's answer
            return self._find_tree(tree_id)

    def _find_tree(self, tree_id: str) -> Optional["Tree"]:
        tree = Tree(os.path.join(self._trees, tree_id))
        try:
            found = os.stat(tree.path)
            with self._lock:
                self._touched = time.monotonic()
                since, mtime_ns, size = self._known.get(tree_id, (-KNOWN_S, 0, 0))
                if self._touched - since < KNOWN_S and (found.st_mtime_ns, found.st_size) == (mtime_ns, size):
                    return tree
            if not tree.is_whole(tree_id):
                self._throw_away(tree.path, found)
                return None
            if not self.spare.is_of(tree) and any(True for _ in self.lacks(tree)):
                return None
            os.utime(tree.path)
            self._knows(tree)
        except OSError:                         # not here, or it can't be read: it is sent again
            return None
        return tree

    def _knows(self, tree: "Tree") -> None:
        found = os.stat(tree.path)
        with self._lock:
            self._known = {os.path.basename(tree.path): (time.monotonic(), found.st_mtime_ns, found.st_size)}

    def forget(self) -> None:
        """What was found whole is looked at anew from now on: a run has its workdir, and the next one may come in a year. (Not when the next one
        begins: its push may have come before it, and would have been answered by what is known of the last.)"""
        with self._lock:
            self._known = {}

    def check_room(self, needed_bytes: int, what: str) -> None:
        """Raises TransferError unless the disk has room for `needed_bytes` more."""
        free = free_bytes(self.root)
        if needed_bytes and free < needed_bytes + RESERVE_BYTES:
            self.spare.clear()
            free = free_bytes(self.root)
        if needed_bytes and free < needed_bytes + RESERVE_BYTES:
            raise TransferError(f"no room for {what} on the node: {self.root} has {exact_bytes(free)} free, needed are "
                                f"{exact_bytes(needed_bytes + RESERVE_BYTES)}. Free some, or use a node with a larger disk.")

    def not_stored(self, what: str, error: OSError, needed: int) -> TransferError:
        text = f"{what} could not be stored on the node in {self.root}: {error.strerror or error}"
        if error.errno in FULL:
            text += (f"; {exact_bytes(free_bytes(self.root))} are free" + (f" and {exact_bytes(needed)} still needed" if needed else "")
                     + ". Free some, or use a node with a larger disk.")
        return TransferError(text)

    # ---- workdirs ------------------------------------------------------------------------------------------------------

    def materialize(self, entries: Iterable[manifest.Entry], workdir: str) -> Tuple[int, int]:
        """Makes `workdir` from the entries, whole or not at all; (files, bytes). Replaces what an earlier try left there and beside it.
        Of a tree of the cache one more is made ahead then, for the next run."""
        with self._in_use:
            self._users += 1
        fresh, made = workdir + ".new", [0, 0]
        try:
            remove_tree(fresh)
            taken = self.spare.take_arrived(entries, fresh) or self.spare.take(entries, fresh) if isinstance(entries, Tree) else None
            if taken is not None:
                made = list(taken)
            else:
                remove_tree(fresh)
                os.mkdir(fresh, 0o700)
                manifest.finish_folders(fresh, self._fill(entries, fresh, made))
            remove_tree(workdir)
            os.rename(fresh, workdir)
            if isinstance(entries, Tree):
                self.spare.prepare(entries, *made)
            return made[0], made[1]
        except OSError as error:
            free = free_bytes(self.root)
            needed = sum(entry.size for entry in entries) - made[1] if error.errno in FULL else 0
            remove_tree(fresh)
            raise TransferError(f"the workspace could not be written to {workdir} on the node: {error.strerror or error}"
                                + (f" ({manifest.quote_name(str(error.filename))})" if error.filename else "")
                                + (f"; {exact_bytes(free)} were free and {exact_bytes(needed)} still needed. Free some, or use a node "
                                   "with a larger disk." if needed else "")) from None
        except BaseException:
            remove_tree(fresh)
            raise
        finally:
            with self._in_use:
                self._users -= 1
            self.forget()

    def _fill(self, entries: Iterable[manifest.Entry], fresh: str, made: List[int]) -> List[manifest.Entry]:
        """Makes what is in them; the folders, whose modes and times come last. One after the other: with two threads on two cores the same files took
        a sixth less time and a quarter more of the CPU, with four as long as with one."""
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
                made[0] += 1
                made[1] += entry.size
        return folders

    def _copy(self, entry: manifest.Entry, path: str) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if entry.size:
                try:
                    source = os.open(self._path(entry.sha256), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    self.settle()
                    try:
                        source = os.open(self._path(entry.sha256), os.O_RDONLY | os.O_CLOEXEC)
                    except FileNotFoundError as missing:
                        raise self._no_room or missing from None
                try:
                    found = os.fstat(source)    # it may have changed since it was asked for
                    if not (found.st_size == entry.size and self._trusted(found)) and not self.has(entry.sha256, entry.size):
                        raise FileNotFoundError(errno.ENOENT, "a content of the node's cache was damaged and is thrown away; run again",
                                                self._path(entry.sha256))
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
                if error.errno in FULL:
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
        """Removes what was used longest ago until the cache is below its cap; bytes removed. Not while a run uses it or soon after."""
        with self._in_use:
            with self._lock:
                if self._users or time.monotonic() - self._touched < QUIET_S:
                    return 0
                self._known = {}
                partials, self._partials = list(self._partials.values()), {}
            self.settle()
            for partial in partials:
                partial.drop()
            if self.spare.one is None:
                self.spare.clear()
            ages: Dict[int, int] = {}                            # hour: bytes. Millions of files may be here, so they aren't listed
            for kept in self._kept():
                ages[kept.hour] = ages.get(kept.hour, 0) + kept.size
            too_much = sum(ages.values()) - self.cap_bytes
            removed, last = 0, None
            for hour in sorted(ages):
                if too_much <= 0:
                    break
                too_much, last = too_much - ages[hour], hour
            if last is None:
                return 0
            spared = -too_much                                   # of the newest hour that goes, as much as may stay
            for kept in self._kept():
                if kept.hour == last and kept.size <= spared:
                    spared -= kept.size
                elif kept.hour <= last:
                    _unlink(kept.path)
                    removed += kept.size
            return removed

    def _kept(self) -> Iterator["_Kept"]:
        for top in (self._contents, self._trees):
            for folder, _, names in os.walk(top):
                for name in names:
                    path = os.path.join(folder, name)
                    try:
                        state = os.lstat(path)
                    except FileNotFoundError:
                        continue
                    yield _Kept(int(state.st_mtime // 3600), state.st_size, path)


class _Kept(NamedTuple):
    hour: int
    size: int
    path: str


class Tree:
    """The entries of a listing in the cache, read from the disk each time: 100,000 of them would take 40 MB of memory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _parts(self) -> Iterator[bytes]:
        with open(self.path, "rb") as stream:
            while True:
                part = stream.read(COPY_BYTES)
                if not part:
                    return
                yield part

    def is_whole(self, tree_id: str) -> bool:
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part)
        return digest.hexdigest() == tree_id

    def __iter__(self) -> Iterator[manifest.Entry]:
        return manifest.reread(self._parts())


class Incoming:
    """A content or a listing on its way: given its name only when size and hash are right. A large one is written beside the cache."""

    def __init__(self, store: Store) -> None:
        self._store, self._path, self._fd = store, "", -1
        self.parts: List[bytes] = []            # as long as it is small
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        if self._fd < 0 and self.size + len(data) <= SMALL_BYTES:
            self.parts.append(bytes(data))
        else:
            self._spill()
            write_all(self._fd, data)
        self._hash.update(data)
        self.size += len(data)

    def _spill(self) -> None:
        if self._fd < 0:
            self._path, self._fd = self._store._open_incoming()
            for part in self.parts:
                write_all(self._fd, part)
            self.parts = []

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def keep(self, sha256: str, size: int, journal: Optional[Journal] = None) -> bool:
        """Ends it: True when it is the content that was announced and is in place now, or in the journal."""
        if self.sha256() != sha256 or self.size != size:
            self.drop()
            return False
        if self._fd < 0 and journal is not None:
            journal.add(sha256, size, self.parts)
        elif self._fd >= 0 or not self._store._put(sha256, self.parts):
            self._spill()
            _mark_verified(self._fd)
            self._place(self._store._path(sha256))
        self.parts = []
        return True

    def keep_tree(self, ahead: Optional[Ahead] = None) -> None:
        """Ends a listing that `manifest.decode` has passed, once all of its contents are here, and were put into what is made `ahead`. It isn't synced
        either: of what a power loss leaves of it the hash is another."""
        tree_id = self.sha256()
        self._spill()
        place = os.path.join(self._store._trees, tree_id)
        if ahead is not None:
            self._store._take_over(ahead)
            self._store.spare.arrived(place, ahead)             # first: a run that sees the listing takes it
        self._place(place)
        self._store._knows(Tree(place))

    def _place(self, place: str) -> None:
        self._close()
        with self._store._lock:
            try:
                os.rename(self._path, place)
            except FileNotFoundError:
                make_private_dir(os.path.dirname(place))
                os.rename(self._path, place)

    def drop(self) -> None:
        """Ends it and leaves nothing; may come after all else."""
        self._close()
        self.parts = []
        if self._path:
            _unlink(self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _mark_verified(path: Union[str, int]) -> None:
    """Sets its time of last use, with our mark: in whole seconds now."""
    now = int(time.time()) * SECOND_NS + MARK_NS
    os.utime(path, ns=(now, now))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
