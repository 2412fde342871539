"""What a tree of files is: walk one, hash its files, write it as a listing, read a listing back, decide which names are safe to write.

A path is a `str` relative to the tree's root with "/" between its parts. It is the name's bytes read as UTF-8 with
`surrogateescape`, whatever the locale says, so that one tree has one listing on every machine; `local_path` turns it into what
`open` takes here. Root itself isn't part of a tree.

A listing has a line an entry, in the order of `walk`: sorted by name in each folder, a folder before what is in it.

    ["d",493,1700000000000000000,0,"","src"]                              folder: mode, mtime_ns, 0, "", path
    ["f",420,1700000000000000000,5,"<64 hex digits of SHA-256>","src/a"]   file: mode, mtime_ns, size, hash, path
    ["l",511,1700000000000000000,0,"../a","src/b"]                        link: mode, mtime_ns, 0, target, path

Lines are ASCII (JSON escapes the rest), end in a line feed and have exactly one form, so that a tree's id is the hash of its listing.
A listing and every name in it come from the other side and aren't trusted: `decode` and `Guard` check all of it.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import stat
import sys
import unicodedata
from json.encoder import encode_basestring_ascii as _json_string
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from gpurun.errors import TransferError, UnsafeNameError, WireError, WorkspaceError

BLOCK = 1 << 20
MAX_COMPONENT = 255      # bytes, what Linux and macOS file systems take
MAX_PATH = 4096          # bytes, Linux's PATH_MAX
MAX_ENTRIES = 1000000    # a listing is held in memory, about 400 bytes an entry; the other side may not make us hold more
MAX_LINE = 64 * 1024     # a name and a target of 4096 bytes each, every byte as \uXXXX
MAX_NUMBER = 2 ** 63
LINES_AT_ONCE = 500
TAIL_FROM = 64 << 10     # a file of this size that is here already is looked at as the beginning of the node's
END_BYTES = 4 << 10      # at its end, that is
READS = 3                # how often a file that changes while it is read is read


class Entry(NamedTuple):
    path: str
    kind: str            # "file", "dir" or "link"
    mode: int = 0        # permission bits
    mtime_ns: int = 0
    size: int = 0        # 0 for folders and links
    sha256: str = ""     # "" when not hashed, or not a file
    target: str = ""     # links only


class Skipped(NamedTuple):
    path: str
    reason: str


_LETTERS = {"file": "f", "dir": "d", "link": "l"}
_HASH = re.compile("[0-9a-f]{64}").fullmatch
_scan = json.JSONDecoder().scan_once       # json.loads without the search for blanks, which no line has
_FS_IS_UTF8 = sys.getfilesystemencoding().lower().replace("-", "") == "utf8"


# ---- names -----------------------------------------------------------------------------------------------------------------

def quote_name(path: str, limit: int = 200) -> str:
    """A name for a message: what a terminal would act on or couldn't show is escaped, a very long one is cut."""
    cut = path if len(path) <= limit else path[:limit] + "…"
    if cut.isprintable():
        return cut
    out = []
    for char in cut:
        if 0xdc80 <= ord(char) <= 0xdcff:
            out.append("\\x%02x" % (ord(char) - 0xdc00))
        elif char == "\\" or not char.isprintable():
            out.append(char.encode("unicode_escape").decode("ascii"))
        else:
            out.append(char)
    return "".join(out)


def local_path(root: str, path: str) -> str:
    """The file of `path` under `root` as this machine's `open` takes it."""
    if not _FS_IS_UTF8:
        path = os.fsdecode(path.encode("utf-8", "surrogateescape"))
    return os.path.join(root, path)


def check_name(path: str) -> None:
    """Raise UnsafeNameError unless `path` names something strictly below the root, in the one form that it has."""
    why = _name_fault(path)
    if why:
        raise UnsafeNameError("the other side named the path '%s', which may not be used: %s"
                              % (quote_name(path) if isinstance(path, str) else "?", why))


def _name_fault(path: str) -> str:
    if not isinstance(path, str):
        return "it is not text"
    if not path:
        return "it is empty"
    raw = path.encode("ascii") if path.isascii() else _raw(path)
    if raw is None:
        return "it is not the UTF-8 form of a file name"
    if len(raw) > MAX_PATH:
        return "it is longer than %d bytes" % MAX_PATH
    if b"\0" in raw:
        return "it has a NUL byte"
    if raw[0] == 47:
        return "it is absolute"
    for part in raw.split(b"/"):
        if part in (b"", b".", b".."):
            return "it has the part '%s'" % part.decode("ascii")
        if len(part) > MAX_COMPONENT:
            return "a part of it is longer than %d bytes" % MAX_COMPONENT
    return ""


def _raw(text: str) -> Optional[bytes]:
    """The bytes of a name; None for a str that no name decodes to. Without the second check "\\udcc3\\udca9" would be a second
    spelling of "é": a link under one and a file below it under the other would pass as two different names."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None
    return raw if raw.decode("utf-8", "surrogateescape") == text else None


def _target_fault(target: str) -> bool:
    raw = _raw(target) if isinstance(target, str) else None
    return not raw or b"\0" in raw or len(raw) >= MAX_PATH


def check_link(path: str, target: str) -> None:
    """Raise UnsafeNameError unless a link at `path` leads to a place inside the root.

    ".." is fine in front (`../blobs/x`), never behind a name: what stands there may be another link, and `deep/link/../..` is then
    somewhere else than it looks.
    """
    why = "its target is not a path" if _target_fault(target) else "its target is absolute" if target.startswith("/") else ""
    depth, named = path.count("/"), False
    for part in () if why else target.split("/"):
        if part == "..":
            depth -= 1
            if named or depth < 0:
                why = "its target leads out of the outputs" if depth < 0 else "its target has '..' behind a name"
                break
        elif part not in ("", "."):
            named, depth = True, depth + 1
    if why:
        raise UnsafeNameError("the link '%s' -> '%s' may not be made here: %s"
                              % (quote_name(path), quote_name(target) if isinstance(target, str) else "?", why))


# ---- walk and hash -----------------------------------------------------------------------------------------------------------

def walk(root: str, keep: Optional[Callable[[str, bool], bool]] = None,
         on_skip: Optional[Callable[[Skipped], None]] = None, lenient: bool = False,
         known: Optional[Callable[[str, os.stat_result], str]] = None) -> Iterator[Entry]:
    """Everything below `root` in a listing's order, not hashed; `known(path, state)` may know a file's hash ("": it doesn't).
    `keep(path, is_dir)` is asked before anything is looked at; a folder that it drops isn't opened. Sockets, FIFOs and devices go to `on_skip`; a folder below `root` that can't be read is an error or, with
    `lenient`, goes there as well. What vanishes meanwhile was never there.

    `root` may be a symlink; below it none is followed.
    """
    root = os.fspath(root)
    stack = [iter(_folder(root, "", keep, on_skip, False, known))]
    while stack:
        for entry in stack[-1]:
            yield entry
            if entry.kind == "dir":
                stack.append(iter(_folder(root, entry.path, keep, on_skip, lenient, known)))
                break
        else:
            stack.pop()


def _folder(root: str, folder: str, keep: Optional[Callable[[str, bool], bool]],
            on_skip: Optional[Callable[[Skipped], None]], lenient: bool,
            known: Optional[Callable[[str, os.stat_result], str]]) -> List[Entry]:
    where = local_path(root, folder) if folder else root
    prefix = folder + "/" if folder else ""
    entries = []
    path = folder
    try:
        with os.scandir(where) as found:
            for item in found:
                name = item.name if _FS_IS_UTF8 else os.fsencode(item.name).decode("utf-8", "surrogateescape")
                path = prefix + name
                try:
                    if keep is not None and not keep(path, item.is_dir(follow_symlinks=False)):
                        continue
                    st = item.stat(follow_symlinks=False)
                    kind = stat.S_IFMT(st.st_mode)
                    if kind == stat.S_IFREG:
                        entries.append(Entry(path, "file", stat.S_IMODE(st.st_mode), st.st_mtime_ns, st.st_size,
                                             known(path, st) if known is not None else ""))
                    elif kind == stat.S_IFDIR:
                        entries.append(Entry(path, "dir", stat.S_IMODE(st.st_mode), st.st_mtime_ns))
                    elif kind == stat.S_IFLNK:
                        target = os.readlink(item.path)
                        if not _FS_IS_UTF8:
                            target = os.fsencode(target).decode("utf-8", "surrogateescape")
                        # A link's own mode means nothing; Linux says 0777, macOS what the umask left.
                        entries.append(Entry(path, "link", 0o777, st.st_mtime_ns, target=target))
                    elif on_skip is not None:
                        on_skip(Skipped(path, _special(kind)))
                except FileNotFoundError:
                    continue
                except OSError as err:
                    if err.errno == errno.EINVAL:       # a link that became something else: gone as well
                        continue
                    raise
    except OSError as err:
        if folder and isinstance(err, (FileNotFoundError, NotADirectoryError)):
            return []
        if not lenient:
            raise _unreadable(local_path(root, path) if path else root, err) from err
        if on_skip is not None:
            on_skip(Skipped(path, "can't be read: %s" % (err.strerror or err)))
    entries.sort()
    return entries


def _special(kind: int) -> str:
    return {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a FIFO", stat.S_IFBLK: "a device", stat.S_IFCHR: "a device"}.get(
        kind, "not a file, folder or link")


def _unreadable(path: str, err: OSError) -> WorkspaceError:
    advice = {errno.ENOENT: "Check the path.", errno.ENOTDIR: "Give a folder.",
              errno.ENAMETOOLONG: "Shorten the path, or leave it out (`exclude`).",
              errno.EIO: "Check the disk."}.get(err.errno or 0, "Make it readable to your user, or leave it out (`exclude`).")
    return WorkspaceError("can't read '%s': %s. %s" % (quote_name(path, MAX_PATH), err.strerror or err, advice))


def hash_if(path: str, size: int) -> bytes:
    """The SHA-256 of the file if it has this size and comes to rest; b"" else."""
    try:
        sha256, found = hash_file(path)
    except WorkspaceError:
        return b""
    return bytes.fromhex(sha256) if found.st_size == size else b""


def hash_file(path: str) -> Tuple[str, os.stat_result]:
    """(SHA-256 in hex, what `stat` said before and after) of one state of a file: when it changes meanwhile it is read again.

    Raises WorkspaceError; its `__cause__` is a FileNotFoundError when the file is gone.
    """
    for _ in range(READS):
        try:
            # NONBLOCK: a FIFO put in the file's place may not hang us.
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
                         | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        except OSError as err:
            raise _unreadable(path, err) from err
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                continue
            digest, left = hashlib.sha256(), before.st_size
            while left > 0:
                block = os.read(fd, min(BLOCK, left))
                if not block:
                    break
                digest.update(block)
                left -= len(block)
            after = os.fstat(fd)
        except OSError as err:
            raise _unreadable(path, err) from err
        finally:
            os.close(fd)
        if left == 0 and (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (after.st_size, after.st_mtime_ns, after.st_ctime_ns):
            return digest.hexdigest(), after
    raise WorkspaceError("'%s' changes while it is read (tried %d times). Wait until nothing writes it, or leave it out (`exclude`)."
                         % (quote_name(path, MAX_PATH), READS))


# ---- listings ----------------------------------------------------------------------------------------------------------------

def _line(entry: Entry) -> str:
    path, kind, mode, mtime_ns, size, sha256, target = entry
    return '["%s",%d,%d,%d,%s,%s]\n' % (_LETTERS[kind], mode, mtime_ns, size, _json_string(target or sha256), _json_string(path))


def encode(entries: Iterable[Entry]) -> bytes:
    """The listing of `entries`, which stand in the order of `walk`."""
    return b"".join(encode_parts(entries))


def encode_parts(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The listing in pieces of some hundred lines: 100,000 of them as separate strings would take twice the memory of the rest."""
    entries, count = iter(entries), 0
    while True:
        lines = [_line(entry) for entry in itertools.islice(entries, LINES_AT_ONCE)]
        count += len(lines)
        if count > MAX_ENTRIES:
            raise WorkspaceError("the folder has %d files and folders; gpurun takes %d. Leave some out (`exclude`), or pack them."
                                 % (count + sum(1 for _ in entries), MAX_ENTRIES))
        if not lines:
            return
        yield "".join(lines).encode("ascii")


def decode(data: bytes, hashed: bool = True) -> List[Entry]:
    """The entries of a listing, every field checked; WireError otherwise. `hashed`: every file must carry its hash, else none need."""
    return list(decode_parts((data,), hashed))


def decode_parts(parts: Iterable[bytes], hashed: bool = True) -> Iterator[Entry]:
    """The same for a listing that comes in pieces, cut anywhere. What is wrong further on is raised when that is reached."""
    seen, folders = set(), {""}
    for line in _lines(parts):
        try:
            if len(seen) == MAX_ENTRIES:
                raise WireError("the listing has more than %d entries" % MAX_ENTRIES)
            entry = _read_line(line, hashed)
            path = entry.path
            if path in seen:
                raise ValueError("a second entry of this name")
            if path.rpartition("/")[0] not in folders:
                raise ValueError("no folder of the listing holds this name")
        except ValueError as err:
            raise WireError("line %d of the listing ('%s'): %s" % (len(seen) + 1, quote_name(line.rstrip("\n")), err)) from None
        seen.add(path)
        if entry.kind == "dir":
            folders.add(path)
        yield entry


def reread(parts: Iterable[bytes]) -> Iterator[Entry]:
    """The entries of a listing that `decode` has passed before and that is known, by its hash, to be the same."""
    for line in _lines(parts):
        letter, mode, mtime_ns, size, extra, path = _scan(line, 0)[0]
        if letter == "l":
            yield Entry(path, "link", mode, mtime_ns, 0, "", extra)
        else:
            yield Entry(path, "file" if letter == "f" else "dir", mode, mtime_ns, size, extra)


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    rest = ""
    for part in parts:
        try:
            text = rest + part.decode("ascii")
        except UnicodeDecodeError:
            raise WireError("the listing is not ASCII") from None
        start = 0
        while True:
            end = text.find("\n", start) + 1
            if (end or len(text)) - start > MAX_LINE:
                raise WireError("a line of the listing is longer than %d bytes" % MAX_LINE)
            if not end:
                break
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        raise WireError("the listing ends in the middle of a line")


def _read_line(line: str, hashed: bool) -> Entry:
    """One line's entry, or ValueError with the reason."""
    try:
        fields, _ = _scan(line, 0)
    except (ValueError, StopIteration, RecursionError):
        raise ValueError("not JSON") from None
    if type(fields) is not list or len(fields) != 6:
        raise ValueError("not a list of six")
    letter, mode, mtime_ns, size, extra, path = fields
    if not type(mode) is type(mtime_ns) is type(size) is int or not type(letter) is type(extra) is type(path) is str:
        raise ValueError("a field of the wrong type")
    if not 0 <= mode <= 0o7777 or not -MAX_NUMBER <= mtime_ns < MAX_NUMBER or not 0 <= size < MAX_NUMBER:
        raise ValueError("a number out of its range")
    why = _name_fault(path)
    if why:
        raise ValueError("a name that may not be used: " + why)
    if letter == "f":
        if not _HASH(extra) and (hashed or extra):
            raise ValueError("not a SHA-256")
        entry = Entry(path, "file", mode, mtime_ns, size, extra)
    elif letter == "d" and not size and not extra:
        entry = Entry(path, "dir", mode, mtime_ns)
    elif letter == "l" and not size:
        if _target_fault(extra):
            raise ValueError("a link without a proper target")
        entry = Entry(path, "link", mode, mtime_ns, 0, "", extra)
    else:
        raise ValueError("neither a file nor an empty folder or link entry")
    if _line(entry) != line:
        raise ValueError("not in the one form that a line has")
    return entry


def is_hash(text: str) -> bool:
    """Whether `text` is a SHA-256 as listings write it."""
    return bool(_HASH(text))


def tree_id(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


# ---- making what a listing says ----------------------------------------------------------------------------------------------

def make_link(entry: Entry, path: str) -> None:
    """The symlink of `entry` at `path`, with its time where the system can set it."""
    os.symlink(entry.target if _FS_IS_UTF8 else os.fsdecode(entry.target.encode("utf-8", "surrogateescape")), path)
    if os.utime in os.supports_follow_symlinks:
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)


def finish_folders(root: str, folders: Sequence[Entry], also_mode: int = 0) -> None:
    """Modes and times of folders, children first and after all that is in them: a folder may be read-only, and each change moves its time."""
    for entry in reversed(folders):
        path = local_path(root, entry.path)
        os.chmod(path, entry.mode | also_mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


# ---- outputs: what a node sends, and what of it an operator writes ------------------------------------------------------------------------------

def clean_output(path: str) -> str:
    """A declared output without "./", "//" and a trailing "/"; "" is the whole root."""
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def output_filter(declared: Sequence[str]) -> Callable[[str, bool], bool]:
    """A `keep` for `walk`: the declared outputs, what is below them, and the folders on the way to them."""
    wanted = {clean_output(path) for path in declared}
    on_the_way = {path[:i] for path in wanted for i, char in enumerate(path) if char == "/"}

    def keep(path: str, is_dir: bool) -> bool:
        if "" in wanted or path in wanted or (is_dir and path in on_the_way):
            return True
        at = path.rfind("/")
        while at > 0:
            if path[:at] in wanted:
                return True
            at = path.rfind("/", 0, at)
        return False
    return keep


class Output(NamedTuple):
    """One entry of the outputs and where its file is on the node."""

    entry: Entry
    source: str


def find_outputs(root: str, declared: Sequence[str]) -> Tuple[List[Output], List[str], List[Tuple[str, str]]]:
    """(outputs, missing, refused) under the outputs root; "." is all of it. What lies outside it after following links is refused, never
    read."""
    real_root = os.path.realpath(root)
    outputs: List[Output] = []
    missing: List[str] = []
    refused: List[Tuple[str, str]] = []
    names = {clean_output(name) for name in declared}
    if "" in names:
        names = {""}
    for name in names - {""}:
        check_name(name)
    above = set()
    for name in sorted(names, key=lambda name: name.split("/")):
        if any(char == "/" and name[:at] in names for at, char in enumerate(name)):
            continue                                            # comes with the folder that it is in
        source = os.path.realpath(local_path(real_root, name))
        if name and not source.startswith(real_root + os.sep):
            refused.append((name, "leads out of the outputs root"))
            continue
        try:
            state = os.stat(source)
            for at in [at for at, char in enumerate(name) if char == "/"]:
                folder = name[:at]
                if folder not in above:                         # a listing has the folders above what it lists
                    above.add(folder)
                    parent = os.stat(local_path(real_root, folder))
                    outputs.append(Output(Entry(folder, "dir", parent.st_mode & 0o777, parent.st_mtime_ns), ""))
            if os.path.isdir(source):
                prefix = f"{name}/" if name else ""
                if name:                                        # the root itself is no entry
                    outputs.append(Output(Entry(name, "dir", state.st_mode & 0o777, state.st_mtime_ns), source))
                skipped = lambda skip, prefix=prefix: refused.append((prefix + skip.path, skip.reason))
                for entry in walk(source, on_skip=skipped, lenient=True):
                    path = prefix + entry.path
                    try:
                        check_name(path)
                        if entry.kind == "link":
                            check_link(path, entry.target)
                    except UnsafeNameError as error:
                        refused.append((path, str(error)))
                        continue
                    outputs.append(Output(entry._replace(path=path), local_path(source, entry.path)))
            elif os.path.isfile(source):
                outputs.append(Output(Entry(name, "file", state.st_mode & 0o777, state.st_mtime_ns, state.st_size), source))
            else:
                refused.append((name, "is neither a file nor a folder"))
        except FileNotFoundError:
            missing.append(name)
        except (OSError, WorkspaceError) as error:
            refused.append((name, str(getattr(error, "strerror", None) or error)))
    return outputs, missing, refused


# Default-ignorable characters that HFS+ drops when it compares names (git's CVE-2014-9390 is about them).
_IGNORABLE = dict.fromkeys([0x200c, 0x200d, 0x200e, 0x200f, 0xfeff] + list(range(0x202a, 0x202f)) + list(range(0x206a, 0x2070)))
_WINDOWS = (r'[\x00-\x1f<>:"|?*\\]|[. ](?:/|$)|(?:^|/)(?:con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])\s*(?:\.|/|$)')


class Guard:
    """Decides on the entries of one run's outputs, one after the other, whether they may be written on this side.

    Once all are admitted, no write can leave the outputs folder: parents are folders of the same listing, never links; no two names
    are one file here; links stay inside. `folds_case` and `normalises` are what `folds` says of the file system.
    """

    def __init__(self, declared: Sequence[str], folds_case: bool, normalises: bool, windows: bool = os.name == "nt"):
        self._wanted = output_filter(declared)
        self._folds_case, self._normalises, self._windows = folds_case, normalises, windows
        self._kinds: Dict[str, str] = {}      # "way": a folder that only follows from what is below it
        self._folded: Dict[str, str] = {}
        self._count = 0

    def admit(self, entry: Entry) -> None:
        path = entry.path
        check_name(path)
        self._count += 1
        if self._count > MAX_ENTRIES:
            self._refuse(path, "the outputs have more than %d files and folders" % MAX_ENTRIES)
        if entry.kind not in _LETTERS:
            self._refuse(path, "it is neither a file nor a folder nor a link")
        if not 0 <= entry.size < MAX_NUMBER:
            self._refuse(path, "its size can't be")
        if self._windows and (re.search(_WINDOWS, path, re.I) or "\\" in entry.target or ":" in entry.target):
            self._refuse(path, "Windows gives this name another meaning")
        if not self._wanted(path, entry.kind == "dir"):
            self._refuse(path, "it is not a declared output")
        if entry.kind == "link":
            check_link(path, entry.target)
        known = self._kinds.get(path)
        if known == "way" and entry.kind != "dir":
            self._refuse(path, "it is no folder, but has contents")
        if known and known != "way":
            self._refuse(path, "it comes a second time")
        self._folder_of(path)
        self._claim(path)
        self._kinds[path] = entry.kind

    def _folder_of(self, path: str) -> None:
        """Every folder above `path` must be a folder, and the only one of its name."""
        new = []                              # noted only when all is well: a refused entry may not open the way for the next one
        at = path.rfind("/")
        while at > 0:
            parent = path[:at]
            kind = self._kinds.get(parent)
            if kind in ("dir", "way"):
                break                         # and so is everything above it
            if kind:
                self._refuse(path, "it is below '%s', which is a %s" % (quote_name(parent), kind))
            new.append(parent)
            at = path.rfind("/", 0, at)
        for parent in new:
            self._claim(parent)
            self._kinds[parent] = "way"

    def _claim(self, path: str) -> None:
        if not (self._folds_case or self._normalises):
            return
        key = unicodedata.normalize("NFD", path)
        if self._folds_case:
            key = unicodedata.normalize("NFD", key.casefold())
        if self._normalises:
            key = key.translate(_IGNORABLE)
        other = self._folded.setdefault(key, path)
        if other != path:
            self._refuse(path, "this disk can't tell its name from '%s'" % quote_name(other))

    @staticmethod
    def _refuse(path: str, why: str) -> None:
        raise UnsafeNameError("the node sent the output '%s', which may not be written here: %s" % (quote_name(path), why))


def folds(folder: str) -> Tuple[bool, bool]:
    """(folds case, treats NFC and NFD as one) of the file system under `folder`, found out with an empty file that is removed again."""
    base = os.fsencode(folder)
    stem = b".gpurun-probe-" + os.urandom(6).hex().encode("ascii")
    name = os.path.join(base, stem + "aé".encode("utf-8"))
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as err:
        if err.errno == errno.EILSEQ:         # a file system that takes no such name can't mix two of them up
            return True, True
        raise TransferError("can't write in '%s': %s. Give another folder (--runs-dir), or make it writable."
                            % (quote_name(folder, MAX_PATH), err.strerror or err)) from err
    try:
        return (os.path.lexists(os.path.join(base, stem + "Aé".encode("utf-8"))),
                os.path.lexists(os.path.join(base, stem + "ae\u0301".encode("utf-8"))))
    finally:
        try:
            os.unlink(name)
        except OSError:
            pass


def end_hash(path: str, size: int) -> str:
    """The SHA-256 of the last 4 KiB of the file's first `size` bytes; "" for what can't be read, or isn't of a size that is worth it."""
    if size < TAIL_FROM:
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return hashlib.sha256(os.pread(fd, END_BYTES, size - END_BYTES)).hexdigest()
        finally:
            os.close(fd)
    except OSError:
        return ""


def was_written(before: os.stat_result, now: os.stat_result) -> bool:
    """Whether a file was written to between two looks at it."""
    return (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def beginning(fd: int, size: int) -> bytes:
    """The SHA-256 of the first `size` bytes of an open file, or of all where there are fewer."""
    digest, at = hashlib.sha256(), 0
    while at < size:
        block = os.pread(fd, min(BLOCK, size - at), at)
        if not block:
            break
        digest.update(block)
        at += len(block)
    return digest.digest()
