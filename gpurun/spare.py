"""A workdir made ahead, of two kinds. A spare: a moment after a run has its own, one more of the same tree, which the next run takes over by a rename.
And of a tree that is new here, while its contents come (`Ahead`), for the run that waits for it.

Making 100,000 files takes seconds, and the next run's tree is most often the same, or the same but for a few files. The spare is made from
the cache like any workdir. Before it is used everything in it is looked at (not read): names, sizes, times and modes must be those of its listing, and
no file's ctime, which nobody can set back, may be later than the end of its making. Else it is thrown away and the workdir is made anew.
What differs between the two trees is then removed and copied. One spare is kept, of many small files only, and only while the agent lives:
what an earlier one left may have been torn by a power loss.

What `Ahead` makes is used as it is: it takes as long as the push, and the run takes it over at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
from typing import TYPE_CHECKING, Callable, Collection, Iterable, Iterator, List, Optional, Sequence, Tuple

from gpurun import manifest
from gpurun.errors import GpurunError
from gpurun.files import remove_tree, write_all
from gpurun.manifest import Entry

if TYPE_CHECKING:
    from gpurun.store import Tree

FEWEST_FILES = 500              # fewer are copied faster than a spare could be of use
MOST_BYTES = 256 << 20          # it takes this much of the disk, and the disk must have
FREE_TIMES = 10                 # times as much free
PAUSE_S = 0.25                  # the run that has just begun comes first
MOST_CHANGED = 4                # a tree of which more than this part (a fourth) is another is made anew
MOST_HELD = 10000               # entries that are held in memory while the contents of the others come
JOURNAL_BYTES = 256 << 10       # are gathered for one write
RECORD = struct.Struct(">32sI")
LARGEST = 1 << 20               # no content in a journal has more bytes
FILE_BYTES = 4096               # of a file, beside its own bytes: the end of its last block, and what the file system keeps of it
FRESH_S = 60.0                  # what was made ahead of a run that doesn't come goes

Fill = Callable[[Iterable[Entry], str], object]     # makes the entries, files in private folders, in a folder that is there


class _Unwanted(Exception):
    pass


class _Made:
    """One that is being made, or is."""

    def __init__(self, tree: "Tree", path: str) -> None:
        self.tree, self.path = tree, path
        self.unwanted = threading.Event()
        self.begun = False
        self.made_ns = 0                        # when it was whole, by the clock of its disk
        self.thread: Optional[threading.Thread] = None


def _fits(folder: str, files: int, size: int) -> bool:
    """Whether the disk has so many times as much free, of bytes and of files (some file systems count none)."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= (size + files * FILE_BYTES) * FREE_TIMES and (not found.f_files or found.f_favail >= files * FREE_TIMES)


class Journal:
    """Contents one behind the other in a file, each with its hash and size: to append one takes a tenth of the time that a file of its own does. They get
    that (`Store.settle`) when the run has its workdir, and are hashed for it once more."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd, self._size = -1, 0
        self._due: List[bytes] = []

    def add(self, sha256: str, size: int, parts: Sequence[bytes]) -> None:
        self._due.append(RECORD.pack(bytes.fromhex(sha256), size))
        self._due.extend(parts)
        self._size += RECORD.size + size
        if self._size >= JOURNAL_BYTES:
            self.flush()

    def flush(self) -> None:
        data, self._due, self._size = b"".join(self._due), [], 0
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        write_all(self._fd, data)

    def end(self) -> None:
        """No more comes."""
        try:
            self.flush()
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def contents(self) -> Iterator[Tuple[str, bytes]]:
        """(SHA-256, bytes) of each; after a kill or a power loss the last may be anything."""
        with open(self.path, "rb") as stream:
            while True:
                head = stream.read(RECORD.size)
                if len(head) < RECORD.size:
                    return
                sha256, size = RECORD.unpack(head)
                if size > LARGEST:
                    return
                yield sha256.hex(), stream.read(size)


class Ahead:
    """A tree's workdir while its contents come: each is written there too, from memory, once it is checked. Used by the push alone until it is whole."""

    def __init__(self, path: str, journal: str) -> None:
        """Makes nothing yet. `journal`: the path of one, for the same contents, if there is to be any."""
        self.path, self.off = path, False       # off: it isn't worth it, or can't be had
        self.journal: Optional[Journal] = None
        self._journal = journal
        self.folders: List[Entry] = []
        self.rest: List[Entry] = []             # what doesn't come: it is here, or has no contents
        self.files = self.size = 0
        self.made_at = 0.0
        self._begun = False

    def here(self, entry: Entry) -> None:
        """One whose contents won't come."""
        self.files += entry.kind == "file"
        self.size += entry.size
        if not self.off:
            (self.folders if entry.kind == "dir" else self.rest).append(entry)
            self.off = len(self.folders) + len(self.rest) > MOST_HELD
            if self.off:
                self.folders, self.rest = [], []

    def begin(self, coming: Collection[Entry]) -> None:
        """All others, whose contents come now. If it is worth it."""
        self.files += len(coming)
        self.size += sum(entry.size for entry in coming)
        try:
            if (self.off or len(coming) < FEWEST_FILES or len(self.rest) * MOST_CHANGED > self.files or self.size > MOST_BYTES
                    or not _fits(os.path.dirname(self.path), self.files, self.size)):
                self.off = True
                return
            os.mkdir(self.path, 0o700)
            self._begun = True
            for folder in self.folders:
                os.mkdir(manifest.local_path(self.path, folder.path), 0o700)
            self.journal = Journal(self._journal)
        except OSError:
            self.off = True

    def add(self, entry: Entry, parts: Sequence[bytes]) -> None:
        """One whose contents have come; no `parts` where they aren't in memory."""
        if self.off:
            return
        if not parts:
            self.rest.append(entry)
            return
        try:
            fd = os.open(manifest.local_path(self.path, entry.path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                for part in parts:
                    write_all(fd, part)
                os.fchmod(fd, entry.mode)
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)
        except OSError:
            self.off = True

    def drop_unless_whole(self) -> None:
        if not self.made_at:
            self.drop()

    def drop(self) -> None:
        self.off = True
        if self._begun:
            with contextlib.suppress(OSError):
                remove_tree(self.path)


class Spare:
    """Keeps it in `folder`. Used by several threads; never a reason for a run to fail."""

    def __init__(self, folder: str, fill: Fill) -> None:
        self._folder, self._fill = folder, fill
        self._lock = threading.Lock()
        self._number = 0
        self.one: Optional[_Made] = None
        self._arrived: Tuple[str, Optional[Ahead]] = ("", None)      # of the tree whose listing is in this file

    def arrived(self, listing: str, ahead: Ahead) -> None:
        """All contents are in the cache, and in what was made ahead; its run takes it next."""
        if ahead.off:
            return
        ahead.made_at = time.monotonic()
        with self._lock:
            (_, last), self._arrived = self._arrived, (listing, ahead)
        if last is not None:
            last.drop()
        later = threading.Timer(FRESH_S, self._expire, [ahead])
        later.daemon = True
        with contextlib.suppress(RuntimeError):                 # no more threads: then it goes with the next one
            later.start()

    def _expire(self, ahead: Ahead) -> None:
        """Another run took that tree's spare, or none has come."""
        with self._lock:
            if self._arrived[1] is not ahead:
                return
            self._arrived = ("", None)
        ahead.drop()

    def take_arrived(self, wanted: "Tree", workdir: str) -> Optional[Tuple[int, int]]:
        """As `take`, for a tree that has just come."""
        with self._lock:
            (listing, ahead), self._arrived = self._arrived, ("", None)
        try:
            if ahead is None or listing != wanted.path or time.monotonic() - ahead.made_at > FRESH_S:
                return None
            os.rename(ahead.path, workdir)
            self._fill(ahead.rest, workdir)
            manifest.finish_folders(workdir, ahead.folders)
            return ahead.files, ahead.size
        except (OSError, GpurunError):
            return None
        finally:
            if ahead is not None:
                ahead.drop()

    def prepare(self, tree: "Tree", files: int, size: int) -> None:
        """Begins to make one of this tree, in a thread, if it is worth it. `size` in bytes."""
        if files < FEWEST_FILES or size > MOST_BYTES:
            return
        with self._lock:
            if self.one is not None:
                self.one.unwanted.set()
            self._number += 1
            self.one = one = _Made(tree, os.path.join(self._folder, str(self._number)))
            one.thread = threading.Thread(target=self._make, args=(one, files, size), name="spare", daemon=True)
            try:
                one.thread.start()
            except RuntimeError:                # no more threads: then there is none
                self.one = None

    def _make(self, one: _Made, files: int, size: int) -> None:
        try:
            if one.unwanted.wait(PAUSE_S) or not _fits(os.path.dirname(self._folder), files, size):
                return
            with self._lock:
                if one.unwanted.is_set():
                    return
                one.begun = True
            remove_tree(self._folder)
            os.mkdir(self._folder, 0o700)       # not what is above it: a node's folder that was deleted isn't made again
            os.mkdir(one.path, 0o700)
            self._fill(_while_wanted(one), one.path)
            os.chmod(one.path, 0o700)           # its ctime is now
            one.made_ns = os.stat(one.path).st_ctime_ns
        except (OSError, GpurunError, _Unwanted):
            pass                                # what there is of it goes when the next one is made

    def clear(self) -> None:
        """Removes what is there, for its room, or because an earlier agent left it."""
        with self._lock:
            one, self.one = self.one, None
            (_, ahead), self._arrived = self._arrived, ("", None)
        if ahead is not None:
            ahead.drop()
        if one is not None and one.thread is not None:
            one.unwanted.set()
            one.thread.join()
        with contextlib.suppress(OSError):
            remove_tree(self._folder)

    def is_of(self, tree: "Tree") -> bool:
        """Whether the spare is of this very tree, so that nothing of the cache is needed for it."""
        one = self.one
        return one is not None and one.made_ns > 0 and one.tree.path == tree.path

    def take(self, wanted: "Tree", workdir: str) -> Optional[Tuple[int, int]]:
        """Makes `workdir` of the spare, if there is one; (files, bytes). None, and perhaps something there, when it has to be made anew. One that is
        being made is waited for: what is there of it need not be made again."""
        with self._lock:
            one, self.one = self.one, None
            if one is not None and not one.begun:
                one.unwanted.set()
        if one is None or one.thread is None or not one.begun:
            return None
        try:
            gone, new, folders, files, size = _changes(one.tree, wanted)
            one.thread.join()
            os.rename(one.path, workdir)
            if not _untouched(one, workdir):
                return None
            for entry in reversed(gone):        # what is in a folder before the folder
                path = manifest.local_path(workdir, entry.path)
                os.rmdir(path) if entry.kind == "dir" else os.unlink(path)
            self._fill(new, workdir)
            manifest.finish_folders(workdir, folders)
            return files, size
        except (OSError, GpurunError, _Unwanted):
            return None
        finally:
            one.unwanted.set()


def _changes(old: "Tree", new: "Tree") -> Tuple[List[Entry], List[Entry], List[Entry], int, int]:
    """To come from one tree to the other: what has to go, what has to be made; and of the new one all folders, how many files, how many bytes.
    _Unwanted when so much differs that all of it is better made anew."""
    gone: List[Entry] = []
    made: List[Entry] = []
    folders: List[Entry] = []
    files = size = 0
    for one, other in ((entry, entry) for entry in new) if old.path == new.path else _side_by_side(iter(old), iter(new)):
        if other is not None and other.kind == "dir":
            folders.append(other)
        elif other is not None:
            files += other.kind == "file"
            size += other.size
        if one == other or one is not None and other is not None and one.kind == other.kind == "dir":
            continue                            # a folder's mode and time come last
        if one is not None:
            gone.append(one)
        if other is not None:
            made.append(other)
        if len(gone) + len(made) > FEWEST_FILES and (len(gone) + len(made)) * MOST_CHANGED > files:
            raise _Unwanted
    return gone, made, folders, files, size


def _side_by_side(olds: Iterator[Entry], news: Iterator[Entry]) -> Iterator[Tuple[Optional[Entry], Optional[Entry]]]:
    """The entries of two listings, those of one name together. Neither is ever whole in memory."""
    one, other = next(olds, None), next(news, None)
    while one is not None or other is not None:
        if one is not None and other is not None and one.path == other.path:
            yield one, other
            one, other = next(olds, None), next(news, None)
        elif other is None or one is not None and one.path.split("/") < other.path.split("/"):
            yield one, None
            one = next(olds, None)
        else:
            yield None, other
            other = next(news, None)


def _untouched(one: _Made, path: str) -> bool:
    """Whether the spare, which is at `path` now, is still what was made."""
    latest_ns = 0

    def look(_path: str, found: os.stat_result) -> str:
        nonlocal latest_ns
        latest_ns = max(latest_ns, found.st_ctime_ns)
        return ""

    for found, made in itertools.zip_longest(manifest.walk(path, known=look), one.tree):
        if found is None or made is None or found.path != made.path or found.kind != made.kind:
            return False
        if found.kind != "dir" and (found[:5] != made[:5] or found.target != made.target):    # all but the hash
            return False
    return latest_ns <= one.made_ns


def _while_wanted(one: _Made) -> Iterator[Entry]:
    for entry in one.tree:
        if one.unwanted.is_set():
            raise _Unwanted
        yield entry
