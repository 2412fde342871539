"""What a job's budget has to be told: whether its logs and its declared outputs grow, and whether a line of a log is the one to stop at.

`Watch.look(elapsed)` reads what it may in a moment and asks `budgets.decide`. One thread looks, again after `next_s` seconds at the latest;
nothing here waits, or ends anything. What can't be read hasn't grown: no file, however strange, makes a look fail.

Growth of the outputs: more bytes, more files, or a file that was written to (a checkpoint that takes an older one's place). A walk through a
folder of any size takes no more than SHARE of the time, so it may need many looks; until it is through, what it hasn't seen counts neither as
growth nor as silence. No symlink is followed.

Logs are searched line by line, each as far as MAX_LINE; a line ends with LF or CR, as a progress bar's does. One that isn't ended is searched
once nothing more comes. A pattern that takes for ever on a line is given up, and that is told.
"""

from __future__ import annotations

import os
import re
import stat
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from gpurun import budgets
from gpurun.budgets import Budget, Decision, Signals
from gpurun.searching import Search

SHARE = 0.02                  # of the time, for walks
MOST_S = 0.1                  # of one look's walk, so that nobody else in this process waits for it
CLOCK_EVERY = 16              # entries between two looks at the clock: on a slow network disk each takes its time
MAX_DEPTH = 64                # folders in folders; one descriptor each while a walk is in there
BLOCK = 16 << 10
MAX_READ, READ_S = 1 << 20, 0.05   # of each log in one look, whichever comes first; the rest is read in the next ones, and nothing is left out
BEHIND_S = 0.25               # to the next look, if there was more
WALKING_S = MOST_S / SHARE    # the same for a walk that isn't through
ANEW_S = 10.0                 # a clock that goes back by more is another attempt's, and one that begins with more was begun without us
# Of a line, that is searched. A pattern as plain as `(?i).*error` takes a time that grows with the square of a line that has none: 0.07 s for
# 4 KiB, 25 s for 64 KiB.
MAX_LINE = 4 << 10
LINE_END = re.compile("[\r\n]+")


class Watch:
    """One command's. Make it before the command is started: what is there by then is no progress. `outputs`: absolute paths, files or folders.
    `processes`: asked for the health check; how many of the job live, None where nobody knows. None left is believed when it is so at the next
    look too: a job that has ended by itself meanwhile isn't looked at any more.
    `earlier`: the `kept()` of the watch that an agent before this one had, so that nothing is told twice and no silence begins anew."""

    def __init__(self, budget: Budget, logs: Sequence[str], outputs: Sequence[str], processes: Callable[[], Optional[int]],
                 earlier: Optional[Dict[str, Any]] = None) -> None:
        try:
            self._search = Search(budget.abort_pattern) if budget.abort_pattern else None
        except ValueError as error:
            raise ValueError(f"abort_pattern {budget.abort_pattern!r} {error}") from None
        self._budget, self._processes = budget, processes
        # Where no rule asks about growth, a walk would be for nothing.
        asked = budget.progress_s or budget.silence_s or budget.review_s or budget.health_s and budget.expect_output
        self._logs = [_Log(path) for path in logs]
        self._outputs = _Outputs(list(outputs) if asked else [])
        self._made = time.monotonic()
        self._elapsed_s = 0.0
        self._grew_s: Optional[float] = None     # elapsed at the last progress; None: not looked yet
        self._signals = Signals()
        self._none = False                       # no process was left, at the last look
        self._stop: Optional[Decision] = None
        self._told = ""
        self._given_up = False                   # the pattern was, and that was told
        if not earlier or not self._resume(earlier):
            self._outputs.look(0.0)
        self.next_s = budgets.next_s(budget, 0.0, self._signals)

    def look(self, elapsed_s: float) -> Decision:
        """What is to be done now. A STOP stays one, whatever comes after it."""
        if elapsed_s < self._elapsed_s - ANEW_S:   # the command was begun anew, as Slurm does with one that it requeues
            self._grew_s, self._signals = elapsed_s, self._signals._replace(told_s=-1.0)
            self._outputs.begin_anew()
        self._elapsed_s = elapsed_s
        matched, behind = self._look_at(elapsed_s)
        before, health_s = self._signals, self._budget.health_s
        due = bool(health_s) and not before.checked and elapsed_s >= health_s
        if due and self._budget.expect_output and not before.produced:
            due = self._outputs.seen_until(elapsed_s) >= health_s   # else a walk isn't through: it may find the output yet
        count = self._count() if due else None
        self._none, due = count == 0, due and (count != 0 or self._none)
        signals = before._replace(matched=matched, checked=not due, processes=count)
        decision = self._stop or budgets.decide(self._budget, elapsed_s, signals)
        self._signals = signals._replace(checked=before.checked or due, reviewed=before.reviewed or decision.act == budgets.REVIEW)
        if decision.act in (budgets.TELL, budgets.REVIEW):          # a review tells of a silence too
            self._signals, self._told = self._signals._replace(told_s=elapsed_s), decision.text
        elif decision.act == budgets.STOP:
            self._stop = decision
        self.next_s = budgets.next_s(self._budget, elapsed_s, self._signals)
        if self._outputs.walking:                # no limit is reached before it is through, so there is no hurry either
            self.next_s = max(BEHIND_S, min(self.next_s, WALKING_S))
        if behind or self._none:
            self.next_s = BEHIND_S
        if decision.act == budgets.GO_ON and self._search is not None and self._search.given_up and not self._given_up:
            self._given_up = True
            return Decision(budgets.TELL, f"the abort pattern {budgets.shown(self._search.pattern)} is given up: {self._search.given_up}")
        return decision

    def close(self) -> None:
        """The command is over: nothing more is searched for."""
        self._given_up = True
        if self._search is not None:
            self._search.close()

    def state(self) -> Dict[str, Any]:
        """How the run did at the last look, for who asks. "told": what was told last, unless it has made progress since."""
        return {"silent_s": round(self._signals.silent_s, 1), "produced": self._signals.produced, "told": self._told}

    def review(self) -> str:
        """The review that was had, in words of the last look: for an operator that may have missed it. "" where none was."""
        had = self._budget._replace(health_s=0.0, silence_s=0.0, abort_pattern="")
        decision = budgets.decide(had, self._elapsed_s, self._signals._replace(reviewed=False))
        return decision.text if self._signals.reviewed and decision.act == budgets.REVIEW else ""

    def kept(self) -> Dict[str, Any]:
        """Plain JSON, for the `earlier` of a watch that goes on after this one."""
        signals = self._signals
        return {"elapsed_s": self._elapsed_s, "grew_s": self._grew_s, "produced": signals.produced, "checked": signals.checked, "reviewed": signals.reviewed,
                "told_s": signals.told_s, "told": self._told, "stop": self._stop.text if self._stop else "", "logs": [log.size for log in self._logs],
                "outputs": self._outputs.kept()}

    def _resume(self, earlier: Dict[str, Any]) -> bool:
        """False where it is another version's."""
        try:
            signals = Signals(produced=bool(earlier["produced"]), checked=bool(earlier["checked"]), reviewed=bool(earlier["reviewed"]),
                              told_s=float(earlier["told_s"]))
            elapsed_s, grew_s = float(earlier["elapsed_s"]), None if earlier["grew_s"] is None else float(earlier["grew_s"])
            told, stop, sizes = str(earlier["told"]), str(earlier["stop"]), [int(size) for size in earlier["logs"]]
            outputs = tuple(int(number) for number in earlier["outputs"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        self._signals, self._elapsed_s, self._grew_s, self._told = signals, elapsed_s, grew_s, told
        self._stop = Decision(budgets.STOP, stop) if stop else None
        self._outputs.resume(outputs)
        for log, size in zip(self._logs, sizes):
            log.size = size
        return True

    def _look_at(self, elapsed_s: float) -> Tuple[str, bool]:
        """Notes what has grown; the first line that matched, and whether there is more to be read."""
        matched, grew, behind = self._signals.matched, False, False
        for log in self._logs:
            searches = self._search is not None and not self._search.given_up and not matched
            found = log.look(self._search if searches else None)
            matched, grew, behind = matched or found.matched, grew or found.grew, behind or found.behind
        grew = self._outputs.look(elapsed_s) or grew
        if grew:
            self._grew_s, self._told = elapsed_s, ""   # what was said before it is no news any more
        elif self._grew_s is None:               # silent for as long as this watch was there; of the time before that it can say nothing
            self._grew_s = max(0.0, elapsed_s - (time.monotonic() - self._made))
            grew = self._grew_s > ANEW_S
        silent_s = max(0.0, self._outputs.seen_until(elapsed_s) - self._grew_s)
        self._signals = self._signals._replace(silent_s=silent_s, produced=self._signals.produced or grew or self._outputs.unsure)
        return matched, behind and not matched

    def _count(self) -> Optional[int]:
        try:
            return self._processes()
        except OSError:
            return None


class _Found(NamedTuple):
    grew: bool = False
    matched: str = ""
    behind: bool = False          # there is more to be read


class _Log:
    """One log, read from where the last look ended. Another file in its place, or one that is shorter than it was, is read from its start."""

    def __init__(self, path: str) -> None:
        self.size = 0
        self._path = path
        self._file: Optional[Tuple[int, int]] = None   # device and inode
        self._at = 0
        self._rest = b""              # of a line that isn't ended
        self._over = False            # it is longer than MAX_LINE, its beginning was searched and the rest of it isn't
        self._searched = False        # as far as it goes

    def look(self, search: Optional[Search]) -> _Found:
        """`search`: None where nothing is searched for."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError):
            return _Found()
        try:
            return self._look(fd, search)
        except OSError:
            return _Found()
        finally:
            os.close(fd)

    def _look(self, fd: int, search: Optional[Search]) -> _Found:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return _Found()
        another = self._file not in (None, (status.st_dev, status.st_ino))
        grew = status.st_size > (0 if another or status.st_size < self.size else self.size)
        if another or status.st_size < self._at:
            self._at, self._rest, self._over, self._searched = 0, b"", False, False
        self._file, self.size = (status.st_dev, status.st_ino), status.st_size
        if search is None:
            return _Found(grew)
        matched, read, began = "", 0, time.monotonic()
        while not matched and read < MAX_READ and (not read or time.monotonic() - began < READ_S):
            block = os.pread(fd, BLOCK, self._at)
            if not block:
                break
            self._at += len(block)
            read += len(block)
            matched = _match(search, self._lines(block))
        if not matched and not read and self._rest and not self._searched:
            self._searched = True     # it has stood since the last look: a question, or the last that a job that hangs could say
            matched = _match(search, [self._rest.decode("utf-8", "replace")])
        return _Found(grew, matched, self._at < self.size)

    def _lines(self, block: bytes) -> List[str]:
        """Those that `block` ends, as far as they are searched; what is left of it is kept."""
        data = self._rest + block
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        lines = LINE_END.split(data[:end].decode("utf-8", "replace")) if end else []
        if lines and self._over:
            lines, self._over = lines[1:], False
        self._rest, self._searched = b"" if self._over else data[end:], False
        if len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE].decode("utf-8", "replace"))
            self._rest, self._over = b"", True
        return [line[:MAX_LINE] for line in lines if line]


def _match(search: Search, lines: Sequence[str]) -> str:
    """The first line that matches, without what would hide the match from a reader who sees only its beginning; "" where none does."""
    found = search.first(lines)
    if found is None:
        return ""
    number, start, end = found
    line = lines[number]
    return (line if end <= budgets.SHOWN else line[start:]) or line[-budgets.SHOWN:]


class _Outputs:
    """The declared outputs: one walk after the other, a piece at each look. What the first one finds was there before, unless an earlier watch
    says what there was."""

    def __init__(self, paths: List[str]) -> None:
        self.walking = False          # one isn't through
        self.unsure = False           # there was too much to tell what the job has added to it
        self._paths = paths
        self._walk: Iterator[Optional[os.stat_result]] = iter(())
        self._began_s = 0.0
        self._through_s = 0.0         # elapsed when the last walk that is through was begun
        self._known: Optional[Tuple[int, int]] = None   # bytes and files at the end of that
        self._newest = 0
        self._bytes = self._files = 0
        self._credit_s = MOST_S
        self._when = time.monotonic()

    def resume(self, numbers: Tuple[int, ...]) -> None:
        if len(numbers) == 3:
            self._known, self._newest = numbers[:2], numbers[2]

    def kept(self) -> List[int]:
        return [*self._known, self._newest] if self._known is not None else []

    def begin_anew(self) -> None:
        """The elapsed time starts again."""
        self._walk, self.walking, self._through_s = iter(()), False, 0.0

    def seen_until(self, elapsed_s: float) -> float:
        """Growth until this moment would be known."""
        return min(elapsed_s, self._through_s) if self._paths else elapsed_s

    def look(self, elapsed_s: float) -> bool:
        """Walks on, for as long as it may; whether something has grown."""
        if not self._paths:
            return False
        began = time.monotonic()
        self._credit_s = min(MOST_S, self._credit_s + SHARE * (began - self._when))
        self._when = began
        if self._credit_s <= 0:
            return False
        if not self.walking:
            self.walking, self._walk, self._began_s, self._bytes, self._files = True, _walk(self._paths), elapsed_s, 0, 0
        grew, count = False, 0
        for status in self._walk:
            count += 1
            if status is not None:
                self._bytes += status.st_size
                self._files += 1
                if status.st_mtime_ns > self._newest:
                    grew, self._newest = grew or self._known is not None, status.st_mtime_ns
            if count % CLOCK_EVERY == 0 and time.monotonic() - began >= self._credit_s:
                self.unsure = self.unsure or self._known is None
                break
        else:
            if self._known is not None:
                grew = grew or self._bytes > self._known[0] or self._files > self._known[1]
            self.walking, self._through_s, self._known = False, self._began_s, (self._bytes, self._files)
        self._credit_s -= time.monotonic() - began
        return grew


def _walk(paths: Sequence[str]) -> Iterator[Optional[os.stat_result]]:
    """Every regular file at or below `paths`; None for everything else that takes its time."""
    for path in paths:
        try:
            status = os.lstat(path)
        except (OSError, ValueError):
            yield None
            continue
        if stat.S_ISREG(status.st_mode):
            yield status
        elif stat.S_ISDIR(status.st_mode):
            yield from _below(path)


def _below(folder: str) -> Iterator[Optional[os.stat_result]]:
    """Level by level with one open folder each: a list of a folder's folders may be long."""
    inside: List[Any] = []
    try:
        inside.append(os.scandir(folder))
    except OSError:
        pass
    try:
        while inside:
            try:
                entry = next(inside[-1], None)
                if entry is None:
                    inside.pop().close()
                elif entry.is_dir(follow_symlinks=False):
                    if len(inside) < MAX_DEPTH:
                        inside.append(os.scandir(entry.path))
                    yield None
                elif entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False)
                else:
                    yield None
            except OSError:           # gone meanwhile, or not ours to read
                yield None
    finally:
        for one in inside:
            one.close()
