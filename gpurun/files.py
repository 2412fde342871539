"""Put bytes on a disk so that a crash, a kill or a full disk leaves the old file or the new one whole, never half of one.

Everything here works on plain paths of this machine and is used on both sides. Names from the other side are checked in `manifest.py`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, Dict, Optional, Union

from gpurun.errors import RecordError

FULL = (errno.ENOSPC, errno.EDQUOT)
TEMP_PREFIX = ".gpurun-tmp-"   # what a kill in the middle may leave behind; safe to delete when its writer is gone


def write_all(fd: int, data) -> None:
    """Write every byte; `os.write` may take fewer than it was given."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view):]


def fsync_dir(path: str) -> None:
    """Make names that were created, renamed or removed in this folder survive a power loss."""
    if os.name == "nt":   # a folder can't be opened there; NTFS journals names itself
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:   # some network and FUSE file systems refuse it; the content was synced, more can't be had there
        pass
    finally:
        os.close(fd)


def atomic_write(path: Union[str, "os.PathLike[str]"], data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by a file with exactly `data` and `mode`. On an error the old file stays and nothing else is left."""
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    # Not made from the target's name: that may already have all of the 255 bytes that a name can have.
    temp = os.path.join(folder, TEMP_PREFIX + os.urandom(8).hex())
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o600)
    try:
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(fd, mode)   # the mode given to open() is cut by the umask
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, path)
    except BaseException:
        try:
            os.unlink(temp)
        except OSError:
            pass
        raise
    fsync_dir(folder)


def make_private_dir(path: Union[str, "os.PathLike[str]"]) -> str:
    """The folder `path`; what is missing of it, parents included, is made with mode 0700. What exists is left as it is."""
    path = os.fspath(path)
    if not os.path.isdir(path):
        parent = os.path.dirname(path.rstrip("/"))
        if parent and parent != path:
            make_private_dir(parent)
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)   # a umask like 0777 would leave a folder that its owner can't enter
        except FileExistsError:   # somebody else made it meanwhile; a file in its place is an error
            if not os.path.isdir(path):
                raise
    return path


def remove_tree(path: str) -> None:
    """Removes a folder and all below it, folders without write permission too; nothing when it isn't there."""
    import shutil                                                # every command loads this file, few remove a tree
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except PermissionError:
        os.chmod(path, stat.S_IRWXU)
        for folder, names, _ in os.walk(path):                   # a folder is opened after it was made so here, from above
            for name in names:
                below = os.path.join(folder, name)
                if not os.path.islink(below):
                    os.chmod(below, stat.S_IRWXU)
        shutil.rmtree(path)


def open_append(path: Union[str, "os.PathLike[str]"], mode: int = 0o600) -> int:
    """A descriptor for `append_line`, for a file's only writer. A last line that a crash cut short is ended, so that it can't swallow
    the next one. (With other writers about, a line that is still being written would look the same.)"""
    fd = os.open(os.fspath(path), os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), mode)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            write_all(fd, b"\n")
    except BaseException:
        os.close(fd)
        raise
    return fd


def append_line(where: Union[int, str, "os.PathLike[str]"], line: bytes) -> None:
    """Append one line to a file (its path, or a descriptor with O_APPEND): all of it or, on a full disk, nothing.

    One write with O_APPEND, so lines of several processes don't mix. Not synced: the caller decides when that is worth its time.
    """
    if not line.endswith(b"\n"):
        line += b"\n"
    if line.count(b"\n") != 1:
        raise ValueError("append_line takes one line, not several: %r" % line[:80])
    fd = where if isinstance(where, int) else os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        written = os.write(fd, line)
        try:
            write_all(fd, line[written:])   # a short write means a disk or a quota that is just full: this one raises
        except OSError:
            os.ftruncate(fd, os.fstat(fd).st_size - written)
            raise
    finally:
        if fd is not where:
            os.close(fd)


def read_json(path: Union[str, "os.PathLike[str]"]) -> Optional[Dict[str, Any]]:
    """The JSON object in a file; None when there is no such file. Anything else is a RecordError that names the file."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecordError("%s can't be read: %s. Check its owner and mode." % (path, error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise RecordError("%s isn't valid JSON (%s). Move it away to go on without it." % (path, error)) from error
    if not isinstance(value, dict):
        raise RecordError("%s holds a %s where a JSON object belongs. Move it away to go on without it." % (path, "null" if value is None else type(value).__name__))
    return value


def free_bytes(path: Union[str, "os.PathLike[str]"]) -> int:
    """Bytes that this user may still write where `path` is, or will be: the nearest folder that exists is asked."""
    path = os.path.abspath(os.fspath(path))
    while not os.path.exists(path):
        path = os.path.dirname(path)
    disk = os.statvfs(path)   # not shutil: it imports three compressors, and the agent and every command load this file
    return disk.f_bavail * disk.f_frsize


def room(path: Union[str, "os.PathLike[str]"], needed: int) -> str:
    """What there is to say of a disk that is full: `/data has 0 bytes free, needed are 4,096 bytes (4.1 kB)`."""
    return "%s has %s free, needed are %s" % (os.fspath(path), exact_bytes(free_bytes(path)), exact_bytes(needed))


def human_bytes(count: int) -> str:
    """A size for people: `999 B`, `1.2 MB`, `123 GB` (powers of 1000, as disks and networks are sold)."""
    if count < 1000:
        return "%d B" % count
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 99.95:
            return "%.1f %s" % (value, unit)
        if value < 999.5:
            return "%.0f %s" % (value, unit)
    return "%.0f %s" % (value, unit)


def exact_bytes(count: int) -> str:
    """A size beside a limit, where `2.1 MB exceeds 2.1 MB` would say nothing: `2,100,001 bytes (2.1 MB)`."""
    return "{:,} bytes".format(count) + (" (%s)" % human_bytes(count) if count >= 1000 else "")
