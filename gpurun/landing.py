"""The operator's half of a pull: what a node's run made, put in place on this disk.

The node's half and the protocol are in `transfer.py`. Everything is received beside the target, checked by length and SHA-256, synced
and renamed into place; a file that broke off goes on where it was, in this process or a later one, and of a file that is here and has
grown since (a log) only the rest comes: it is put behind a copy of what is here. The target may be a folder of the user's: nothing in it is
looked at or changed but what is declared, no file of it is written into, and no folder of it gives way to a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import queue
import stat
import threading
from typing import Any, Callable, Iterator, Sequence

from gpurun import manifest, packing
from gpurun.errors import LinkError, TransferError, UnkeptError, WireError
from gpurun.files import FULL, exact_bytes, free_bytes, fsync_dir, make_private_dir, write_all
from gpurun.manifest import Entry, quote_name
from gpurun.store import RESUME_BYTES
from gpurun.transfer import BLOCK, MAX_LISTING, Channel, Progress, Pulled, key_of

INCOMING = ".incoming-"         # with the target's name: the folder that a pull receives in
EARLIER = "-earlier"            # with the target's name: what was fetched while the job ran and is no output of it
BEHIND = "-behind"              # with the key of a file: what is behind the bytes that are here, which are still to be copied before it
TAILS = 2000                    # files whose ends are looked at: a hash for each goes to the node
LOOKED_AT = 200_000             # of what is here already, at most; not to know of the rest only costs time


def pull(stream: Any, run_id: str, declared: Sequence[str], target: str, progress: Progress, live: bool = False) -> Pulled:
    """Operator: waits for the run's end on the node (not if `live`) and brings its outputs into `target`, each at its declared path.

    The node isn't trusted: every name passes `manifest.Guard`, files are written under temporary names and renamed, links are made
    last, nothing leaves `target`. What an earlier try brought, of a large file too, is not sent again. Raises TransferError (a full
    disk here; the outputs are still on the node then; a name that is of another kind here), UnsafeNameError, LinkError.
    """
    channel, landing = Channel(stream), _Landing(run_id, declared, target, progress, live)
    try:
        try:
            with channel.at_work():
                begun = landing.begun()
            request = {"type": "Pull", "run_id": run_id, "outputs": list(declared), "begun": begun, "packs": packing.known(), "rtt_s": channel.rtt_s(),
                       "tails": True}
            channel.put(dict(request, live=True) if live else request)
            channel.send_packed(b"L", manifest.encode_parts(landing.look()))
            channel.writer.flush()
            summary = channel.answer()
            channel.unpacks(summary.get("packs"))
            refused = summary.get("refused")
            if not isinstance(refused, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in refused):
                raise WireError("the node's list of refused outputs isn't one")
            missing = _missing(channel, declared)
            landing.expect(list(channel.listing()))
            files = landing.take(channel)
        except OSError as error:
            raise landing.failed(error) from None
        channel.say(collected=files, bytes=landing.total)
        channel.finish()
        return Pulled(files, landing.total, missing, [(str(path), str(why)) for path, why in refused] + landing.refused)
    finally:
        channel.leave()
        landing.close()


def _missing(channel: Channel, declared: Sequence[str]) -> list[str]:
    try:
        missing = json.loads(b"".join(channel.read_packed(b"M", MAX_LISTING)).decode("ascii"))
    except (ValueError, RecursionError):
        raise WireError("the node's list of missing outputs isn't one") from None
    known = {manifest.clean_output(name) for name in declared}
    if not isinstance(missing, list) or not all(isinstance(name, str) and name in known for name in missing):
        raise WireError("the node calls outputs missing that nobody declared")
    return missing


class _Incoming:
    """The folder that one pull receives in: beside the target, since who looks into that should see whole files only; in it where
    beside is another disk or not ours to write. It stays, with the parts of large files, when a pull breaks off.

    It is locked. A second pull into the same target at the same time takes the next name; each finds again what an earlier one of its
    name left."""

    def __init__(self, target: str) -> None:
        parent, name = os.path.split(target)
        if os.path.isdir(target) and not os.path.isdir(os.path.join(parent, INCOMING + name)) and not _may_move(target, parent):
            parent = target
        number = 1
        while True:
            self.path = os.path.join(parent, INCOMING + name + (f"-{number}" if number > 1 else ""))
            if self._take():
                return
            number += 1

    def _take(self) -> bool:
        try:
            make_private_dir(self.path)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileExistsError, FileNotFoundError):     # a file of that name; or whoever had it removes it just now
            return False
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                return False
            raise
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._fd)
                return False
            # A disk without locks (some network mounts): two pulls at once into one target are seldom enough.
        mine = os.fstat(self._fd)
        try:
            same = mine.st_uid == os.geteuid() and os.path.samestat(mine, os.lstat(self.path))
        except FileNotFoundError:
            same = False
        if not same:
            os.close(self._fd)
        return same

    def clear(self) -> None:
        """Removes what an earlier pull that was killed left and what is of no use now: files that lack what was to be put before them."""
        for name in os.listdir(self.path):
            if name.endswith(BEHIND):
                os.unlink(os.path.join(self.path, name))

    def parts(self) -> Iterator[tuple[str, str]]:
        """(key, path) of the parts of files that earlier pulls left."""
        for name in os.listdir(self.path):
            if manifest.is_hash(name):
                yield name, os.path.join(self.path, name)

    def close(self, everything: bool) -> None:
        """Leaves nothing behind but the parts of large files; `everything`: not even these."""
        try:
            self.clear()
            for _, path in self.parts():
                if everything or os.path.getsize(path) < RESUME_BYTES:
                    os.unlink(path)
            os.rmdir(self.path)
        except OSError:
            pass                                                # parts are in there, or the whole run's folder is gone
        finally:
            os.close(self._fd)


def _may_move(target: str, parent: str) -> bool:
    """Whether something can be renamed from `parent` into `target`. Tried, since mode, mounts and quotas all have a say."""
    probe = INCOMING + os.urandom(8).hex()
    try:
        os.mkdir(os.path.join(parent, probe), 0o700)
    except OSError:
        return False
    try:
        os.rename(os.path.join(parent, probe), os.path.join(target, probe))
    except OSError:
        os.rmdir(os.path.join(parent, probe))
        return False
    os.rmdir(os.path.join(target, probe))
    return True


class _Landing:
    """Puts the files of one pull in place. A file is written in a folder beside the target, synced and renamed by one of a few threads:
    a disk syncs several at once in the time of one (5,000 small files here: 0.6 s, one after the other 1.6 s)."""

    def __init__(self, run_id: str, declared: Sequence[str], target: str, progress: Progress, live: bool) -> None:
        self._again = f"`gpurun fetch {run_id}`" if not live else "the same command"
        self._live, self._declared, self._target, self._progress = live, declared, os.path.abspath(target), progress
        self._incoming: _Incoming | None = None
        self._entries: list[Entry] = []
        self._here: dict[str, Entry] = {}
        self._parts: dict[str, tuple[Any, int]] = {}            # key of a file that broke off: the hash so far, the bytes
        self._settler = _Settler()
        self._unlike: list[str] = []                            # files that aren't what is here, or that with more behind it: asked for again, whole
        self._name = ""
        self._done = 0
        self._whole = False
        self.total = 0
        self.refused: list[tuple[str, str]] = []

    def begun(self) -> dict[str, tuple[int, str]]:
        """The parts of files that an earlier try left. They are hashed before the node is asked, so that nobody waits for that."""
        self._incoming = _Incoming(self._target)
        self._incoming.clear()
        for key, path in self._incoming.parts():
            digest, size = hashlib.sha256(), 0
            with open(path, "rb") as stream:
                while True:
                    block = stream.read(BLOCK)
                    if not block:
                        break
                    digest.update(block)
                    size += len(block)
            self._parts[key] = (digest, size)
        return {key: (size, digest.hexdigest()) for key, (digest, size) in self._parts.items() if size}

    def look(self) -> Iterator[Entry]:
        """What of the declared outputs is in the target already, with the folders above them; of large files with the hash of their end."""
        ends = 0
        for entry in itertools.islice(_here(self._target, self._declared), LOOKED_AT):
            if entry.kind == "file" and entry.size >= manifest.TAIL_FROM and ends < TAILS:
                ends += 1
                entry = entry._replace(sha256=manifest.end_hash(manifest.local_path(self._target, entry.path), entry.size))
            self._here[entry.path] = entry
            yield entry

    def _is_here(self, entry: Entry) -> bool:
        here = self._here.get(entry.path)
        return here is not None and (here.kind, here.size, here.mtime_ns) == (entry.kind, entry.size, entry.mtime_ns)

    def expect(self, entries: list[Entry]) -> None:
        """Checks what the node will send: all names, what is in their place, and the room for it."""
        make_private_dir(self._target)
        if not self._live:
            self._move_stale({entry.path: entry.kind for entry in entries})
        guard = manifest.Guard(self._declared, *manifest.folds(self._target))
        for entry in entries:
            guard.admit(entry)
            here = self._here.get(entry.path)
            if here is not None and (here.kind == "dir") != (entry.kind == "dir"):
                raise self._other_kind(entry)
        self._entries, self.total = entries, sum(entry.size for entry in entries)
        lacking = [entry for entry in entries if entry.kind == "file" and not self._is_here(entry)]
        needed = sum(entry.size - min(entry.size, self._parts.get(key_of(entry.path), (None, 0))[1]) for entry in lacking)
        if needed > free_bytes(self._target):
            raise self._full("the outputs have no room", needed)
        if needed and needed == self.total:                     # else what is here counts first, and the rate from there
            self._progress(0, self.total, "")

    def _other_kind(self, entry: Entry) -> TransferError:
        kinds = {"dir": "a folder", "file": "a file", "link": "a link"}
        return TransferError(f"the output '{quote_name(entry.path)}' is {kinds[entry.kind]} on the node, and here "
                             f"'{quote_name(manifest.local_path(self._target, entry.path))}' is {'none' if entry.kind == 'dir' else 'a folder'}. "
                             f"It is still on the node: move yours away and run {self._again} again, or fetch to another folder.")

    def _full(self, what: str, needed: int) -> UnkeptError:
        return UnkeptError(f"{what} here: {self._target} has {exact_bytes(free_bytes(self._target))} free, needed are {exact_bytes(needed)}"
                             f". They are still on the node: make room, then {self._again} brings them.")

    def failed(self, error: OSError) -> UnkeptError:
        """What to tell the user of an error of this disk."""
        what = f"the output '{quote_name(self._name)}'" if self._name else "the outputs"
        if error.errno in FULL:
            return self._full(f"{what} could not be written: {error.strerror}", max(0, self.total - self._done))
        return UnkeptError(f"{what} could not be written below {self._target}: {error.strerror or error}. They are still on the node: once "
                           f"that is set right, {self._again} brings them.")

    def take(self, channel: Channel) -> int:
        """Reads all files off the channel; how many are in place now."""
        files = 0
        folders = [entry for entry in self._entries if entry.kind == "dir"]
        links = [entry for entry in self._entries if entry.kind == "link"]
        for entry in self._entries:
            if entry.kind == "link":
                continue
            self._name = entry.path
            path = manifest.local_path(self._target, entry.path)
            if entry.kind == "dir":
                self._make_folder(entry, path)
            else:
                files += self._take_file(channel, entry, path)
        self._name = ""
        if channel.frame()[0] != b"Z":
            raise WireError("more outputs than were listed")
        with channel.at_work():
            self._settler.wait()
        if self._unlike:
            files += self._take_again(channel)
        for entry in links:                                     # last: nothing is ever written through one
            self._name = entry.path
            self._make_link(entry, manifest.local_path(self._target, entry.path))
        self._name = ""
        manifest.finish_folders(self._target, folders, also_mode=0o700)
        with channel.at_work():
            for folder in {self._target} | {manifest.local_path(self._target, entry.path) for entry in folders}:
                self._settler.add(fsync_dir, folder)
            self._settler.wait()
        self._whole = True
        return files

    def _take_again(self, channel: Channel) -> int:
        """The files that were not what is here, whole now; by how many there are fewer or more than counted before."""
        channel.say(again=self._unlike)
        again, self._unlike, files = set(self._unlike), [], 0
        for entry in self._entries:
            if entry.kind == "file" and entry.path in again:
                self._done -= entry.size
                self._name = entry.path
                files += self._take_file(channel, entry, manifest.local_path(self._target, entry.path), whole=True) - 1
        self._name = ""
        if channel.frame()[0] != b"Z":
            raise WireError("more outputs than were asked for again")
        with channel.at_work():
            self._settler.wait()
        return files

    def _move_stale(self, kinds: dict[str, str]) -> None:
        """What a fetch brought while the job ran, and what is no output at its end or one of another kind, goes beside, into `…-earlier`: it may be
        all that is left of it, or somebody's own."""
        stale = [path for path, here in self._here.items() if path not in kinds or (kinds[path] == "dir") != (here.kind == "dir")]
        for path in sorted(stale, reverse=True):
            local, beside = (manifest.local_path(root, path) for root in (self._target, self._target + EARLIER))
            if self._here.pop(path).kind == "dir":
                with contextlib.suppress(OSError):              # something is in there that wasn't looked at
                    os.rmdir(local)
            else:
                make_private_dir(os.path.dirname(beside))
                os.replace(local, beside)

    def _make_folder(self, entry: Entry, path: str) -> None:
        try:
            os.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):        # nor a link to one: it may lead anywhere
                raise self._other_kind(entry) from None
        os.chmod(path, 0o700)

    def _make_link(self, entry: Entry, path: str) -> None:
        temp = self._temp(entry)
        manifest.make_link(entry, temp)
        try:
            os.replace(temp, path)
        except IsADirectoryError:
            raise self._other_kind(entry) from None
        finally:
            if os.path.lexists(temp):
                os.unlink(temp)

    def _temp(self, entry: Entry) -> str:
        assert self._incoming is not None
        return os.path.join(self._incoming.path, key_of(entry.path))

    def _take_file(self, channel: Channel, entry: Entry, path: str, whole: bool = False) -> int:
        """One file off the channel: 1 if it came (it is in place once the settler is done with it), 0 if the node had a reason. `whole`: it
        was asked for without regard to what is here."""
        kind, payload = channel.frame()
        if kind == b"S" and not whole:
            if not self._is_here(entry) or len(payload) != hashlib.sha256().digest_size:
                raise WireError(f"'{quote_name(entry.path)}' isn't here and the node doesn't send it")
            self._moved(entry.size, entry.path)
            self._settler.add(self._check_here, path, entry, payload)
            return 1
        key, temp = key_of(entry.path), self._temp(entry)
        digest, size, behind = hashlib.sha256(), 0, 0
        if kind == b"R" and not whole:
            if key not in self._parts:
                raise WireError(f"the node goes on in the middle of '{quote_name(entry.path)}', which isn't here")
            digest, size = self._parts[key]
            self._moved(size, entry.path)
            kind, payload = channel.frame()
        elif kind == b"P" and not whole:
            here = self._here.get(entry.path)
            if here is None or not here.sha256 or here.size > entry.size:
                raise WireError(f"the node goes on behind '{quote_name(entry.path)}', which isn't the beginning of it")
            size = behind = here.size
            temp += BEHIND
            self._moved(size, entry.path)
            kind, payload = channel.frame()
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        done = keep = False
        try:
            os.ftruncate(fd, size)
            os.lseek(fd, size, os.SEEK_SET)
            while kind == b"D":
                size += len(payload)
                if size > entry.size:
                    raise WireError(f"'{quote_name(entry.path)}' is longer than the node said")
                write_all(fd, payload)
                if not behind:                                  # else all of it is hashed at the end, the bytes before it too
                    digest.update(payload)
                self._moved(len(payload), entry.path)
                kind, payload = channel.frame()
            if kind == b"X":
                self.refused.append((entry.path, payload.decode("utf-8", "replace")))
                return 0
            if kind != b"E":
                raise WireError(f"a frame {kind!r} inside a file")
            if size != entry.size or not behind and digest.digest() != payload:
                raise TransferError(f"the output '{quote_name(entry.path)}' arrived broken (length or SHA-256 differ); it is still on the node")
            done = True
        except (LinkError, KeyboardInterrupt):
            keep = size - behind >= RESUME_BYTES
            if keep and behind:
                _copy_before(path, fd, behind)
                os.rename(temp, self._temp(entry))
            raise
        finally:
            if not done:
                os.close(fd)
                if not keep:
                    os.unlink(temp)
        if behind:
            self._settler.add(self._settle_behind, fd, temp, path, entry, behind, payload)
        else:
            self._settler.add(_settle, fd, temp, path, entry)
        return 1

    def _check_here(self, path: str, entry: Entry, sha256: bytes) -> None:
        """What has the size and the time of the node's file may be another all the same, whose time was set."""
        if manifest.hash_if(path, entry.size) != sha256:
            self._unlike.append(entry.path)

    def _settle_behind(self, fd: int, temp: str, path: str, entry: Entry, behind: int, sha256: bytes) -> None:
        """Puts the bytes that are here before those that came; if that isn't the node's file, it is asked for again."""
        try:
            _copy_before(path, fd, behind)
            digest = hashlib.sha256()
            for at in range(0, entry.size, BLOCK):
                digest.update(os.pread(fd, BLOCK, at))
            alike = digest.digest() == sha256
        except OSError as error:
            if error.errno in FULL:
                os.close(fd)
                raise
            alike = False                                       # gone, say, or another kind of file: somebody else is at work here
        if alike:
            _settle(fd, temp, path, entry)
        else:
            os.close(fd)
            os.unlink(temp)
            self._unlike.append(entry.path)

    def _moved(self, size: int, name: str) -> None:
        self._done += size
        self._progress(self._done, self.total, name)

    def close(self) -> None:
        """Leaves nothing behind but the part of a large file that broke off."""
        self._settler.close()
        if self._incoming is not None:
            self._incoming.close(everything=self._whole)


def _here(target: str, declared: Sequence[str]) -> Iterator[Entry]:
    """The entries of what is declared. Nothing beside it is read: the target may be a home with a million files."""
    names = {manifest.clean_output(name) for name in declared}
    if "" in names:
        yield from manifest.walk(target, lenient=True) if os.path.isdir(target) else ()
        return
    kinds: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name.split("/")):
        if any(char == "/" and name[:at] in names for at, char in enumerate(name)):
            continue                                            # comes with the folder that it is in
        for path in [name[:at] for at, char in enumerate(name) if char == "/"] + [name]:
            if path not in kinds:
                entry = _entry(target, path)
                kinds[path] = entry.kind if entry is not None else ""
                if entry is not None:
                    yield entry
            if kinds[path] != "dir":                            # a link to a folder is none: what it leads to isn't ours
                break
        else:
            for below in manifest.walk(manifest.local_path(target, name), lenient=True):
                yield below._replace(path=f"{name}/{below.path}")


def _entry(target: str, path: str) -> Entry | None:
    local = manifest.local_path(target, path)
    try:
        state = os.lstat(local)
        if stat.S_ISDIR(state.st_mode):
            return Entry(path, "dir", stat.S_IMODE(state.st_mode), state.st_mtime_ns)
        if stat.S_ISLNK(state.st_mode):
            return Entry(path, "link", 0o777, state.st_mtime_ns, target="?")           # the node asks for files only
        return Entry(path, "file", stat.S_IMODE(state.st_mode), state.st_mtime_ns, state.st_size)
    except OSError:
        return None


def _copy_before(source: str, fd: int, size: int) -> None:
    """The first `size` bytes of the file at `source` into the same place of `fd`, as many as there are. By the kernel where it can: some
    file systems then only share the blocks."""
    at = 0
    source_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while at < size:
            try:
                copied = os.copy_file_range(source_fd, fd, size - at, at, at)
            except (AttributeError, OSError) as error:          # macOS; two file systems
                if getattr(error, "errno", None) in FULL:
                    raise
                copied = os.pwrite(fd, os.pread(source_fd, min(BLOCK, size - at), at), at)
            if not copied:
                return
            at += copied
    finally:
        os.close(source_fd)


def _settle(fd: int, temp: str, path: str, entry: Entry) -> None:
    try:
        os.fchmod(fd, entry.mode & 0o777)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.replace(temp, path)
    except IsADirectoryError:                                   # made since it was looked at; the error would name `temp`
        raise IsADirectoryError(errno.EISDIR, f"'{quote_name(path)}' is a folder here", path) from None


class _Settler:
    """Threads that do what waits for the disk."""

    THREADS = 8

    def __init__(self) -> None:
        self._work: "queue.Queue[Any]" = queue.Queue(4 * self.THREADS)
        self._threads: list[threading.Thread] = []
        self._error: OSError | None = None

    def add(self, function: Callable[..., None], *args: Any) -> None:
        """Has it done; an OSError of anything that was added before is raised here or in `wait`."""
        if self._error is not None:
            raise self._error
        if len(self._threads) < self.THREADS and self._work.unfinished_tasks >= len(self._threads):
            self._threads.append(threading.Thread(target=self._run, name="settle", daemon=True))
            self._threads[-1].start()
        self._work.put((function, args))

    def wait(self) -> None:
        self._work.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            item = self._work.get()
            try:
                if item is None:
                    return
                item[0](*item[1])
            except OSError as error:
                self._error = self._error or error
            finally:
                self._work.task_done()

    def close(self) -> None:
        """Ends the threads when all is done."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
