"""The job's workspace: which of its files go to the node (`exclude`), and their hashes.

`exclude` has gitignore's rules exactly: the last pattern that matches decides, `!` takes back, a pattern with a "/" in front or
inside is anchored, a folder that is left out isn't walked into. `.git` is left out unless a pattern that names it takes it back
("!.git"; the "!*/" of the usual "only these kinds of files" list doesn't). gpurun's own runs folder never goes.

pathspec translates wildcards, one part of a path at a time. Its whole patterns aren't used, because they differ from git (1.1.1 and
0.12.1 against `git check-ignore`): they also match everything below what they match, so that after "*" "!src" all of src/ comes back;
"a/**/" matches a/ itself; a line break at the end of a name is overlooked; "?" is a character, in git a byte. Brackets are read here and
handed to it spelled out, because it knows neither [[:alpha:]] nor a backslash in them, and fails on [z-a]. Patterns that git takes
and never matches (an open bracket, a backslash at the end) are an error here: nobody means them.
"""

from __future__ import annotations

import os
import string
import subprocess
import threading
from typing import Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from gpurun import manifest, statcache
from gpurun.errors import ConfigError, WorkspaceError
from gpurun.manifest import Entry, Skipped, quote_name

RUNS_FOLDER = "gpurun-runs"
DEFAULT_EXCLUDE = (".git",)
LARGEST = 5                     # folders that `survey` names
GIT_IGNORED = 10                # paths that `survey` names
GIT_TIMEOUT_S = 10              # a plan doesn't wait longer for a hint
THREADS = 4                     # they share the files from BIG_FILE on, if those are BIG_BYTES together; on small files they only wait
BIG_FILE = 256 << 10            # for each other (2,000 of 4 KB: 0.05 s with one, 0.10 s with two)
BIG_BYTES = 16 << 20


# ---- patterns ----------------------------------------------------------------------------------------------------------------

_ANY, _ONE = "*", "?"
_BYTES = frozenset(map(chr, range(256)))
_CLASSES = {
    "alnum": string.ascii_letters + string.digits, "alpha": string.ascii_letters, "blank": " \t", "digit": string.digits,
    "cntrl": "".join(map(chr, range(32))) + "\x7f", "graph": "".join(map(chr, range(33, 127))), "lower": string.ascii_lowercase,
    "print": "".join(map(chr, range(32, 127))), "punct": string.punctuation, "space": " \t\n\v\f\r", "upper": string.ascii_uppercase,
    "xdigit": string.hexdigits,
}
# A part of a pattern: a name, a test of a name, or None for "**" (any number of folders).
_Part = Union[str, Callable[[str], object], None]


class _Pattern(NamedTuple):
    text: str
    negated: bool
    folders_only: bool
    anchored: bool                     # otherwise it is about the last part of a path alone
    ways: Tuple[Tuple[_Part, ...], ...]


def _bytewise(text: str) -> str:
    """A str with a character per byte: git's wildcards count bytes."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("latin-1")


def _compile(text: str) -> Optional[_Pattern]:
    """A pattern; None for a comment or a blank; ValueError says what is wrong with it."""
    if "\n" in text or "\0" in text:
        raise ValueError("it has a line break or a NUL; give one pattern an item")
    rest = _trim(_bytewise(text))
    if not rest or rest.startswith("#"):
        return None
    negated = rest.startswith("!")
    rest = rest[1:] if negated else rest
    folders_only = rest.endswith("/")
    rest = rest[:-1] if folders_only else rest
    anchored = "/" in rest
    rest = rest[1:] if rest.startswith("/") else rest
    spellings = [rest]
    plain = min((rest.index(char) for char in "*?[\\" if char in rest), default=len(rest))
    wild = rest[plain:].lstrip("*")
    if anchored and plain and rest[plain - 1] != "/" and len(rest) - plain - len(wild) > 1 and (not wild or wild[0] == "/"):
        # git compares what stands before the first wildcard by itself, and takes the "**" of "ab**/c" for one at the start.
        spellings = [rest[:plain] + wild[1:], rest[:plain] + "*/**" + wild] if wild else [rest[:plain] + "*", rest[:plain] + "*/**"]
    return _Pattern(text, negated, folders_only, anchored, tuple(tuple(_parts(one, anchored)) for one in spellings))


def _trim(text: str) -> str:
    """Without the spaces at the end, unless a backslash stands before them."""
    end = i = 0
    while i < len(text):
        step = 2 if text[i] == "\\" else 1
        if text[i] != " ":
            end = i + step
        i += step
    return text[:end]


def _parts(text: str, anchored: bool) -> List[_Part]:
    parts: List[_Part] = []
    tokens: List[Union[str, FrozenSet[str]]] = []
    stars = i = 0
    while i <= len(text):
        char = text[i:i + 1]
        escaped = char == "\\"
        if escaped:
            i += 1
            char = text[i:i + 1]
            if not char:
                raise ValueError("it ends in a backslash")
        if char in ("", "/"):                        # an escaped "/" separates as well
            parts.append(None if anchored and stars > 1 and stars == len(tokens) else _part(tokens))
            tokens, stars = [], 0
        elif escaped or char not in "*?[":
            tokens.append(frozenset(char))
        elif char == "[":
            i, chars = _bracket(text, i + 1)
            tokens.append(chars)
        else:
            stars += char == "*"
            tokens.append(char)
        i += 1
    return parts


def _bracket(text: str, i: int) -> Tuple[int, FrozenSet[str]]:
    """The end and the characters of the bracket whose inside starts at `i`."""
    negated = text[i:i + 1] in ("!", "^")
    i += negated
    chars, before, first = set(), "", True
    while first or text[i:i + 1] != "]":
        first = False
        char = text[i:i + 1]
        if char == "-" and before and text[i + 1:i + 2] not in ("", "]"):
            i += 1 + (text[i + 1] == "\\")
            chars.update(map(chr, range(ord(before), ord(text[i:i + 1] or "\0") + 1)))
            char = ""                                # "a-c-e" has no second range
        elif text.startswith("[:", i) and text.find("]", i + 2) > i + 2 and text[text.find("]", i + 2) - 1] == ":":
            end = text.find("]", i + 2)
            if text[i + 2:end - 1] not in _CLASSES:
                raise ValueError("it has no [:class:] of that name; there are " + ", ".join(sorted(_CLASSES)))
            chars.update(_CLASSES[text[i + 2:end - 1]])
            i, char = end, ""
        else:
            if char == "\\":
                i += 1
                char = text[i:i + 1]
            chars.add(char)
        before = char
        i += 1
        if i >= len(text):
            raise ValueError("it opens a bracket and doesn't close it; for a plain one write \\[")
    return i, frozenset(_BYTES - chars if negated else chars) - {"/", "\0"}


def _part(tokens: Sequence[Union[str, FrozenSet[str]]]) -> _Part:
    if all(len(token) == 1 and not isinstance(token, str) for token in tokens):
        return "".join(char for token in tokens for char in token)       # a plain name, and pathspec isn't imported
    import pathspec
    glob = ""
    for token in tokens:
        if isinstance(token, str):
            glob += "" if token == _ANY and glob.endswith("*") and not glob.endswith("\\*") else token
        elif not token:
            return _never
        elif len(token) == 1:
            glob += "\\" + next(iter(token))
        else:
            # As "none of the others", with the NUL that no name has: then nothing in it can be read in another way.
            others = _BYTES - token - set("/\0]-")
            glob += "[!%s\0%s%s]" % ("" if "]" in token else "]", "".join(sorted(others)), "" if "-" in token else "-")
    # The letter behind pattern and name keeps pathspec from trimming blanks or seeing a special case in a lone "*".
    match = pathspec.GitIgnoreSpec.from_lines(["/" + glob + "x"]).patterns[0].regex.fullmatch
    return lambda name: match(name + "x")


def _never(name: str) -> bool:
    return False


def _matches(parts: Sequence[_Part], names: Sequence[str]) -> bool:
    for at, part in enumerate(parts):
        if part is None:
            rest = parts[at + 1:]
            if not rest:
                return at < len(names)
            return any(_matches(rest, names[i:]) for i in range(at, len(names)))
        if at >= len(names) or not (part == names[at] if isinstance(part, str) else part(names[at])):
            return False
    return len(parts) == len(names)


class Exclude:
    """The patterns of `job.workspace.exclude` as a `keep` for `manifest.walk`; counts what each of them left out."""

    def __init__(self, exclude: Sequence[str], root: str, runs_dir: Optional[str] = None):
        self.counts: Dict[str, int] = {}
        self._patterns: List[_Pattern] = []
        for number, text in enumerate((*DEFAULT_EXCLUDE, *exclude), -len(DEFAULT_EXCLUDE)):
            try:
                pattern = _compile(text)
            except ValueError as err:
                raise ConfigError("job.workspace.exclude[%d], '%s', is not a pattern: %s. The rules are gitignore's."
                                  % (number, quote_name(text), err)) from err
            if pattern:
                self._patterns.insert(0, pattern)              # the last one decides
        self._never = set()
        for real in (os.path.abspath, os.path.realpath):
            inside = os.path.relpath(real(runs_dir), real(root)) if runs_dir else ".."
            if inside == ".":
                raise ConfigError("the runs folder '%s' is the workspace itself: every push would take all earlier runs along. "
                                  "Give another one with --runs-dir." % quote_name(str(runs_dir)))
            self._never.add(inside)

    def keep(self, path: str, is_dir: bool) -> bool:
        name = path[path.rfind("/") + 1:]
        if (is_dir and name == RUNS_FOLDER) or path in self._never:
            return False
        plain = path.isascii()
        name = name if plain else _bytewise(name)
        names: List[str] = []
        for pattern in self._patterns:
            if (pattern.folders_only and not is_dir) or (name == ".git" and pattern.ways[0][-1] != ".git"):
                continue
            if not pattern.anchored:
                part = pattern.ways[0][0]
                if not (part == name if isinstance(part, str) else part(name)):
                    continue
            else:
                names = names or (path if plain else _bytewise(path)).split("/")
                if not any(_matches(way, names) for way in pattern.ways):
                    continue
            if not pattern.negated:
                self.counts[pattern.text] = self.counts.get(pattern.text, 0) + 1
            return pattern.negated
        return True


# ---- scan and survey -----------------------------------------------------------------------------------------------------------

class Workspace(NamedTuple):
    entries: List[Entry]                # with hashes, in a listing's order
    skipped: List[Skipped]              # sockets, FIFOs, devices
    excluded_count: int                 # paths that a pattern left out; a folder counts once
    total_bytes: int
    crlf: List[str]    # shell scripts whose first line ends in CR LF: bash on the node will stumble over them


class Survey(NamedTuple):
    """What `scan` would take, without a look into any file."""

    files: int                          # and links
    folders: int
    total_bytes: int
    largest: List[Tuple[str, int, int]]         # top folders: name, bytes, files
    excluded: Dict[str, int]                    # pattern: paths that it left out
    skipped: List[Skipped]
    git_ignored: List[Tuple[str, int]]          # git ignores it, it would go: path, bytes; the largest
    git_ignored_count: int

    @property
    def excluded_count(self) -> int:
        return sum(self.excluded.values())


_scanned: Set[str] = set()


def scan(root: str, exclude: Sequence[str], runs_dir: Optional[str] = None,
         on_progress: Optional[Callable[[int, int, str], None]] = None) -> Workspace:
    """The workspace with the hash of every file, which `statcache` may know. A second scan of a root by one process doesn't ask it: that comes
    when the node was sent something that isn't what the first one said. `on_progress(files, bytes, name)`: so many are hashed, and `name` is
    begun ("" at the end); it may come from several threads, one at a time."""
    chosen, skipped = Exclude(exclude, root, runs_dir), []
    cache, first = statcache.StatCache(root), root not in _scanned
    _scanned.add(root)
    entries = list(manifest.walk(root, chosen.keep, skipped.append, known=cache.known if first else None))
    entries = _hash_all(root, entries, cache, on_progress)
    cache.save()
    crlf = [entry.path for entry in entries if entry.kind == "file" and entry.path.endswith(".sh") and _has_crlf(root, entry.path)]
    return Workspace(entries, skipped, sum(chosen.counts.values()), sum(entry.size for entry in entries), crlf)


def _has_crlf(root: str, path: str) -> bool:
    try:
        with open(manifest.local_path(root, path), "rb") as stream:
            return stream.readline(4096).endswith(b"\r\n")
    except OSError:
        return False


def _hash_all(root: str, entries: List[Entry], cache: statcache.StatCache,
              on_progress: Optional[Callable[[int, int, str], None]]) -> List[Entry]:
    """Hashes the files among `entries` whose hash isn't known."""
    files = [at for at, entry in enumerate(entries) if entry.kind == "file" and not entry.sha256]
    small, big = (iter([at for at in files if (entries[at].size >= BIG_FILE) == is_big]) for is_big in (False, True))
    alone = sum(entries[at].size for at in files if entries[at].size >= BIG_FILE) < BIG_BYTES
    lock, gone, failed = threading.Lock(), set(), []
    known = [entry.size for entry in entries if entry.sha256]
    done = [len(known), sum(known)]

    def work(queue: Iterator[int]) -> None:
        finished = None
        while True:
            with lock:
                if finished is not None:
                    done[0] += 1
                    done[1] += finished.st_size
                    cache.learn(entry.path, finished, sha256, began_ns)
                at = None if failed else next(queue, None)
                if on_progress and at is not None:
                    on_progress(done[0], done[1], entries[at].path)
            if at is None:
                return
            entry = entries[at]
            try:
                began_ns = statcache.now_ns()
                sha256, finished = manifest.hash_file(manifest.local_path(root, entry.path))
                entries[at] = Entry(entry.path, "file", entry.mode, finished.st_mtime_ns, finished.st_size, sha256)
            except WorkspaceError as err:
                if not isinstance(err.__cause__, FileNotFoundError):
                    raise
                gone.add(at)
                finished = None

    def helper() -> None:
        try:
            work(big)
        except BaseException as err:
            failed.append(err)

    threads = [] if alone else [threading.Thread(target=helper, daemon=True) for _ in range(min(THREADS, os.cpu_count() or 1) - 1)]
    for thread in threads:
        thread.start()
    try:
        work(small)
        work(big)
    except BaseException as err:
        failed.append(err)          # the threads end after the file that they are at; Ctrl-C doesn't wait for that
        raise
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    if on_progress:
        on_progress(done[0], done[1], "")
    return [entry for at, entry in enumerate(entries) if at not in gone] if gone else entries


def survey(root: str, exclude: Sequence[str], runs_dir: Optional[str] = None) -> Survey:
    chosen, skipped = Exclude(exclude, root, runs_dir), []
    ignored = dict.fromkeys(_git_ignores(root))              # path: None, or the bytes that would go
    top: Dict[str, List[int]] = {}
    files = folders = total = 0
    for entry in manifest.walk(root, chosen.keep, skipped.append):
        if entry.kind == "dir":
            folders += 1
            continue
        files += entry.kind == "file"                        # as a run counts them: without links
        total += entry.size
        name, slash, _ = entry.path.partition("/")
        if slash:
            sums = top.setdefault(name, [0, 0])
            sums[0] += entry.size
            sums[1] += entry.kind == "file"
        at = len(entry.path) if ignored else 0
        while at > 0:
            if entry.path[:at] in ignored:
                ignored[entry.path[:at]] = (ignored[entry.path[:at]] or 0) + entry.size
                break
            at = entry.path.rfind("/", 0, at)
    largest = sorted(((name, size, count) for name, (size, count) in top.items()), key=lambda row: (-row[1], -row[2], row[0]))
    going = sorted(((path, size) for path, size in ignored.items() if size is not None), key=lambda row: (-row[1], row[0]))
    return Survey(files, folders, total, largest[:LARGEST], dict(chosen.counts), skipped, going[:GIT_IGNORED], len(going))


def _git_ignores(root: str) -> List[str]:
    """What git ignores under `root`, a wholly ignored folder as one; nothing where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "ls-files", "-z", "-o", "-i", "--exclude-standard", "--directory"], cwd=root, timeout=GIT_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = done.stdout.decode("utf-8", "surrogateescape").split("\0") if done.returncode == 0 else []
    return [name.rstrip("/") for name in names if name.strip("/.")]
