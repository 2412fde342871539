"""What the user sees. stdout carries the job's stdout, byte for byte, and nothing else; all talk of gpurun goes to stderr.

Four modes. `terminal`: one live line on stderr (phase, progress, elapsed time), erased before anything else is written and drawn
again only when the cursor is at the start of a line. `plain` (a pipe, CI, TERM=dumb): whole lines, few of them. `quiet`: the job's
output, warnings and errors. `json`: stdout carries one object a line instead, each with a `type`:

    {"type": "phase", "name": "push", "detail": "to gpu1"}
    {"type": "progress", "phase": "push", "done": 5, "total": 9, "unit": "B", "name": "data/a.bin"}
    {"type": "message", "text": "…"}      also "warning" and "error"
    {"type": "stdout", "text": "…"}       also "stderr" and "setup"; "data_base64" in place of "text" where a chunk isn't UTF-8
    {"type": "result", …}                 always the last one

A question (`ask`) takes the live line's place until a key answers it; the job's output waits so long with whoever brings it.

The chunks of one type, put together in order (`text` as UTF-8), are that log exactly. A reader that goes away (`| head -1`), a
descriptor that isn't open or a terminal that hung up ends the writing there, not the run. Any thread may call any method.
"""

from __future__ import annotations

import binascii
import codecs
import json
import os
import select
import signal
import stat
import sys
import threading
import time
import unicodedata
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

from gpurun.errors import EXIT_STOPPED
from gpurun.files import human_bytes

if TYPE_CHECKING:
    from gpurun.question import Question

REDRAW_S = 0.1          # the live line moves at most this often
PLAIN_S = 10.0          # a plain log gets a progress line at most this often: CI keeps every line for ever
JSON_S = 1.0            # the same for progress objects
PIPE_HOLD_S = 0.3       # what reads our stdout may write to this terminal too, unseen by us: stay away from its lines
RATE_WINDOW_S = 5.0     # the rate shown is that of the last seconds, so that a stall shows and a resumed pull isn't flattered
NOTABLE_S = 1.0         # a phase that moved nothing and was shorter than this leaves no line behind
HELD_S = 0.05           # the job's output looks so often whether a question still stands: a signal handler may end it, which rules out locks
ERASE = b"\r\x1b[K"


def claim_standard_fds() -> None:
    """Call first of all: put /dev/null where stdin, stdout or stderr isn't open. Otherwise the next file or socket that is opened gets
    that number, and what is meant for the user (or a library's panic text) lands in a record or on the wire."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)   # gets the lowest free number, which is `fd`: those below are open
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            if fd and getattr(sys, ("stdout", "stderr")[fd - 1]) is None:   # Python found it closed when it started
                setattr(sys, ("stdout", "stderr")[fd - 1], open(fd, "w", closefd=False))


def end_on_ctrl_c() -> None:
    """Ctrl-C ends this process at once, until a run takes the signal over. Python's own way is an exception in whatever line is at work:
    in the middle of an import it is printed and lost, or becomes an error of another kind."""
    restore = remember_terminal()

    def end(_number: int, _frame: Any) -> None:
        try:
            restore()
            if os.isatty(2):
                os.write(2, ERASE)
        finally:
            os._exit(EXIT_STOPPED)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)


def remember_terminal() -> Callable[[], None]:
    """A function that puts the terminal's settings back: for the case that we leave while a thread asks for a passphrase, without echo."""
    try:
        import termios
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except (ImportError, OSError):
        return lambda: None
    try:
        before = termios.tcgetattr(fd)
    except termios.error:
        return lambda: None

    def restore() -> None:
        try:
            if os.tcgetpgrp(fd) == os.getpgrp():   # from the background this would stop us
                termios.tcsetattr(fd, termios.TCSADRAIN, before)
        except (OSError, termios.error):
            pass
    return restore


def duration(seconds: float, whole: bool = False) -> str:
    """A time for people: `4.2 s`, `3 min 12 s`, `2 h 5 min`. `whole` leaves the tenths out, for a clock that ticks."""
    seconds = max(seconds, 0.0)
    if seconds < 59.95:
        return f"{int(seconds)} s" if whole else f"{seconds:.2f} s" if seconds < 0.095 else f"{seconds:.1f} s"
    seconds = int(seconds if whole else seconds + 0.5)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def counted(number: int, unit: str) -> str:
    """`2 files`, `1 file`: `unit` is a plural in s."""
    return f"{number} {unit[:-1] if number == 1 else unit}"


def printable(text: str, keep: str = "") -> str:
    """`text` with everything that could move a cursor, recolour a terminal or hide a letter written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else f"\\x{ord(c) - 0xDC00:02x}" if 0xDC80 <= ord(c) <= 0xDCFF
                   else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def columns(text: str) -> int:
    """Cells that `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` cells. The middle goes: a path is known by its top folder and its file name."""
    if columns(text) <= width:
        return text
    if width < 5:
        return "." * max(width, 0)
    head, tail = (width - 3) // 2, width - 3 - (width - 3) // 2
    first, last = text[:head], text[-tail:]
    while columns(first) > head:
        first = first[:-1]
    while columns(last) > tail:
        last = last[1:]
    return f"{first}...{last}"


class Screen:
    """See the module. `clock` is there for the tests."""

    def __init__(self, mode: str, out_fd: int = 1, err_fd: int = 2, clock=time.monotonic):
        if mode not in ("terminal", "plain", "quiet", "json"):
            raise ValueError(f"no such screen mode: {mode}")
        self.mode, self._out, self._err, self._clock = mode, out_fd, err_fd, clock
        self._gone: set[int] = set()
        self.stdout_failed = False             # what was meant for it couldn't be written, and not because its reader left
        out, err = self._stat(out_fd), self._stat(err_fd)
        # The same terminal, file or pipe twice: what one stream wrote says where the cursor is for the other.
        self._shared = out is not None and err is not None and (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
        self._piped = out is not None and (stat.S_ISFIFO(out.st_mode) or stat.S_ISSOCK(out.st_mode))
        # RLock: a signal handler of the main thread may talk while that thread is in here. stdout has a lock of its own where it can:
        # a reader that pauses (`| less`) blocks the thread that writes the log and not the one that answers the node.
        self._lock = threading.RLock()
        self._out_lock = self._lock if self._shared or mode == "json" else threading.RLock()
        self._colour = mode == "terminal" and not os.environ.get("NO_COLOR")
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._drawn = self._mid_line = self._dimmed = False
        self._last_draw = self._last_note = self._hold_until = float("-inf")
        self._question: Question | None = None
        self._prompt = ""
        self._rest: dict[str, bytes] = {}      # json: the first bytes of a character whose others are still to come
        self._phase, self._detail, self._began = "", "", clock()
        self._forget_progress()

    @classmethod
    def choose(cls, json: bool = False, quiet: bool = False) -> "Screen":
        """The screen for this process: what was asked for, else what stderr is."""
        if json or quiet:
            return cls("json" if json else "quiet")
        lively = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
        try:
            return cls("terminal" if lively and os.isatty(2) else "plain")
        except OSError:
            return cls("plain")

    @property
    def stdout_gone(self) -> bool:
        """Nobody reads stdout any more. The run goes on: its logs are on disk."""
        return self._out in self._gone

    # ---- the phases of a run -------------------------------------------------------------------------------------------------

    def phase(self, name: str, detail: str = "") -> None:
        """`name` begins, what was before it ends; with an empty name nothing begins."""
        with self._lock:
            self._end_phase()
            if not name:
                return
            self._phase, self._detail, self._began = name, detail, self._clock()
            self._last_note = self._began
            if self.mode == "json":
                self._object("phase", name=name, detail=detail)
            elif self.mode == "plain":
                self._talk(f"{name}{': ' if detail else ''}{printable(detail)}")
            self._draw(force=True)

    def phase_since(self, seconds: float) -> None:
        """The phase that is on has lasted so long already: it was begun before we came."""
        with self._lock:
            self._began = self._clock() - seconds

    def progress(self, done: int, total: int | None, unit: str = "B", name: str = "") -> None:
        """How far the phase is, in bytes or files; `name` is what is moving now. Cheap: call it as often as there is news, first with
        what was there before (0, or where a pull resumes): the rate counts from it."""
        with self._lock:
            now = self._clock()
            if self._first is None:
                self._first = done
            self._done, self._total, self._unit, self._name, self._told = done, total, unit, name, False
            if not self._samples or now - self._samples[-1][0] >= REDRAW_S:
                self._samples.append((now, done))
                while now - self._samples[0][0] > RATE_WINDOW_S and len(self._samples) > 2:
                    self._samples.popleft()
            if self.mode == "terminal":
                self._draw()
            elif self.mode == "json" and now - self._last_note >= JSON_S:
                self._last_note = now
                self._progress_object()
            elif self.mode == "plain" and now - self._last_note >= PLAIN_S:
                self._last_note = now
                self._talk(f"{self._phase}: " + ", ".join(self._facts(now)))

    def live_tick(self) -> None:
        """Let the elapsed time move. Never waits: a terminal that is held by Ctrl-S must not hold the main loop."""
        if self.mode == "terminal" and self._lock.acquire(blocking=False):
            try:
                self._draw()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Leave the terminal as a program should: no question, no live line, no colour, the cursor at the start of a line."""
        self.stop_asking()
        with self._lock:
            self._flush_rest()
            self._phase = ""
            before = self._lead()
            if self.mode == "terminal" and self._mid_line:
                before += b"\n"
                self._mid_line = False
            self._put(self._err, before)

    # ---- talk ----------------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if self.mode == "json":
            self._object("message", text=text)
        elif self.mode != "quiet":
            self._talk(printable(text, keep="\n\t"))

    def warn(self, text: str) -> None:
        self._loud("warning", "33", text)

    def workspace(self, root: str, found: Any) -> None:
        """What of a workspace.Workspace goes, and what doesn't."""
        from gpurun.manifest import quote_name
        files = sum(entry.kind == "file" for entry in found.entries)
        left_out = f"; {found.excluded_count} left out by exclude" if found.excluded_count else ""
        self.say(f"workspace {quote_name(root)}: {counted(files, 'files')}, {human_bytes(found.total_bytes)}{left_out}")
        for skipped in found.skipped[:10]:
            self.warn(f"'{quote_name(skipped.path)}' doesn't go: it is {skipped.reason}")
        if len(found.skipped) > 10:
            self.warn(f"{len(found.skipped) - 10} more sockets, FIFOs and devices don't go")
        for name in found.crlf[:10]:
            self.warn(f"'{quote_name(name)}' has Windows line ends (CR LF): bash on the node will stumble over them")

    def error(self, text: str) -> None:
        self._loud("error", "31", text)

    def summary(self, result: dict[str, Any]) -> None:
        """The one line at the end. In quiet mode only what went wrong is worth it."""
        with self._lock:
            self._end_phase()
            state, missing = result.get("state", ""), [printable(str(path)) for path in result.get("missing") or ()]
            if self.mode == "json" or self.mode == "quiet" and state == "COMPLETED" and not missing or state not in ("COMPLETED", "FAILED"):
                return                             # of a run that goes on there is no last line
            seconds, moved = dict(result.get("seconds") or {}), result.get("bytes") or {}
            code, reason = result.get("exit_code"), printable(str(result.get("reason") or ""))
            if reason.partition(":")[0] == f"exited {code}":   # said already
                reason = reason.partition(":")[2].lstrip()
            total = seconds.pop("total", None)
            steps = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
            parts = [self._coloured(state, "32" if state == "COMPLETED" else "31") + ("" if code is None else f", exit code {code}")
                     + (f": {reason}" if reason else "")]
            if total is not None:
                parts.append(f"{duration(total)}{f' ({steps})' if steps else ''}")
            if result.get("cost"):
                from gpurun.limits import dollars
                parts.append(f"about {dollars(result['cost'])}")
            parts += [f"{human_bytes(moved[key])} {key}" for key in ("pushed", "pulled") if moved.get(key)]
            if result.get("outputs"):
                parts.append(f"outputs in {printable(_short_path(str(result.get('outputs_dir', ''))))}")
            if missing:
                parts.append(f"missing: {', '.join(missing)}")
            self._talk("; ".join(parts))

    def result(self, result: dict[str, Any]) -> None:
        """The last object of the json mode; nothing elsewhere."""
        if self.mode == "json":
            with self._lock:
                self._end_phase()
                self._flush_rest()
                self._object("result", **{key: value for key, value in result.items() if key != "type"})

    # ---- questions -----------------------------------------------------------------------------------------------------------

    def ask(self, question: str, keys: Mapping[str, str], answered: Callable[[str], None]) -> bool:
        """Shows the question, and below it the keys (lower case) with what they mean, and returns. `answered` is called once, in
        another thread: with the key, or with "" when nobody can answer any more (the terminal hung up, Ctrl-D, the background). Not
        after `stop_asking`, and a new question takes the place of one that stands. False: nobody can be asked, nothing was shown."""
        if self.mode != "terminal" or self._err in self._gone:
            return False
        try:
            from gpurun.question import Question
        except ImportError:                   # a system without such terminals
            return False
        self.stop_asking()
        asked = Question.put(keys, self._err)
        if asked is None:
            return False
        self._prompt = "   ".join(f"[{key}] {meaning}" for key, meaning in keys.items())
        self._question = asked
        threading.Thread(target=self._await_key, args=(asked, question, answered), name="ask", daemon=True).start()
        return True

    def stop_asking(self) -> None:
        """Takes a question back: the terminal as it was, the job's output goes on. Call it before os._exit. Any thread may, and a signal
        handler: it never waits for a terminal that takes nothing."""
        asked, self._question = self._question, None
        if asked is not None and asked.end() and self._lock.acquire(timeout=HELD_S):
            try:
                writable = select.poll()
                writable.register(self._err, select.POLLOUT)
                if writable.poll(0):
                    self._put(self._err, self._lead())
            finally:
                self._lock.release()

    def _await_key(self, asked: "Question", question: str, answered: Callable[[str], None]) -> None:
        def show(text: str = "") -> None:
            with self._lock:
                if self._question is asked:
                    if text:
                        self._talk(printable(text, keep="\n\t"))
                    self._draw(force=not self._drawn)

        def hide() -> None:
            with self._lock:
                self._put(self._err, self._lead())

        show(question)
        key = asked.wait(again=lambda: show(question), away=hide, back=show)
        if key is not None:
            with self._lock:
                if self._question is asked:
                    self._put(self._err, self._lead())
                    self._question = None
            answered(key)

    # ---- what the job writes -------------------------------------------------------------------------------------------------

    def job_stdout(self, data: bytes) -> None:
        if not data or self._out in self._gone:
            return
        if self.mode == "json":
            self._log("stdout", data)
        elif self._shared:
            self._pass_on(self._out, data)
        else:
            if self._piped and self.mode == "terminal":
                with self._unasked(self._lock):
                    self._put(self._err, self._lead())
                    self._hold_until = self._clock() + PIPE_HOLD_S
            with self._unasked(self._out_lock):
                self._put(self._out, data)

    def job_stderr(self, data: bytes) -> None:
        if self.mode == "json":
            self._log("stderr", data)
        elif data:
            self._pass_on(self._err, data)

    def setup_output(self, data: bytes) -> None:
        """Both streams of the setup, as they are (no prefix: a progress bar that a prefix cuts in two fills a screen)."""
        if self.mode == "json":
            self._log("setup", data)
        elif data and self.mode != "quiet":
            self._pass_on(self._err, data, dim=True)

    def log(self, name: str, data: bytes) -> None:
        """A piece of the log that the node calls so."""
        {"run.out": self.job_stdout, "run.err": self.job_stderr}.get(name, self.setup_output)(data)

    @contextmanager
    def _unasked(self, lock: Any) -> Iterator[None]:
        """The lock, at a moment when no question stands."""
        while True:
            while self._question is not None:
                time.sleep(HELD_S)
            with lock:
                if self._question is None:
                    yield
                    return

    # ---- inside; the lock is held from here on -------------------------------------------------------------------------------

    def _pass_on(self, fd: int, data: bytes, dim: bool = False) -> None:
        with self._unasked(self._lock):
            lead = self._lead(keep_dim=dim)
            if dim and self._colour and not self._dimmed:
                lead += b"\x1b[2m"
                self._dimmed = True
            self._put(self._err, lead)
            self._put(fd, data)
            self._mid_line = data[-1:] != b"\n"
            self._draw()

    def _loud(self, kind: str, colour: str, text: str) -> None:
        if self.mode == "json":
            self._object(kind, text=text)
        if self.mode != "json" or self.stdout_gone:
            self._talk(self._coloured(f"{kind}:", colour) + " " + printable(text, keep="\n\t"))

    def _talk(self, text: str) -> None:
        with self._lock:
            was_drawn = self._drawn
            lead = self._lead() + (b"\n" if self._mid_line else b"")
            self._mid_line = False
            self._put(self._err, lead + f"gpurun: {text}\n".encode(self._encoding, "backslashreplace"))
            self._draw(force=was_drawn)

    def _coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def _lead(self, keep_dim: bool = False) -> bytes:
        """What has to be written before anything else is: the live line goes, and the setup's looks."""
        lead = ERASE if self._drawn else b""
        self._drawn = False
        if self._dimmed and not keep_dim:
            lead += b"\x1b[0m"
            self._dimmed = False
        return lead

    def _draw(self, force: bool = False) -> None:
        now, asking = self._clock(), self._question is not None
        if self.mode != "terminal" or self._mid_line:
            return
        if asking:                            # the text stands still, so it is drawn once
            if self._drawn and not force:
                return
        elif not self._phase or now < self._hold_until or not force and now - self._last_draw < REDRAW_S:
            return
        try:
            width = os.get_terminal_size(self._err).columns or 80
        except OSError:
            width = 80
        self._last_draw = now
        # No colour in the live line: it would end one that the job's own lines are in the middle of.
        text = shorten(self._prompt, width - 1) if asking else self._live_text(now, width - 1)
        self._put(self._err, b"\r" + text.encode(self._encoding, "backslashreplace") + b"\x1b[K")
        self._drawn = True

    def _live_text(self, now: float, width: int) -> str:
        facts = [self._phase, *self._facts(now), duration(now - self._began, whole=True)]
        tail = printable(self._name or self._detail)
        if self._total and width >= 79:
            filled = min(20 * self._done // self._total, 20)
            facts.insert(1, f"[{'=' * filled}{' ' * (20 - filled)}]")
        line = "  ".join(facts)
        room = width - columns(line) - 2
        if tail and room >= 8:
            line += "  " + shorten(tail, room)
        return line if columns(line) <= width else line[:max(width, 0)]

    def _facts(self, now: float) -> list[str]:
        if self._first is None:
            return []
        amount = human_bytes if self._unit == "B" else str
        whole = human_bytes if self._unit == "B" else lambda number: counted(number, self._unit)
        if not self._total:
            facts = [whole(self._done)]
        else:   # rounded down: 100 % is said when it is true
            facts = [f"{min(100 * self._done // self._total, 100)} %", f"{amount(self._done)} of {whole(self._total)}"]
        if self._unit == "B" and len(self._samples) > 1 and now > self._samples[0][0]:
            facts.append(f"{human_bytes(int(max(self._done - self._samples[0][1], 0) / (now - self._samples[0][0])))}/s")
        return facts

    def _end_phase(self) -> None:
        if not self._phase:
            self._forget_progress()
            return
        name, took = self._phase, self._clock() - self._began
        if self.mode == "json" and self._first is not None and not self._told:
            self._progress_object()
        self._phase = ""
        if self.mode == "terminal" or self.mode == "plain":
            if self._done:
                moved = self._done - (self._first if self._first != self._done else 0)
                rate = f" ({human_bytes(int(moved / took))}/s)" if self._unit == "B" and took > 0 else ""
                self._talk(f"{name}: {human_bytes(self._done) if self._unit == 'B' else counted(self._done, self._unit)}"
                           f" in {duration(took)}{rate}")
            elif took >= NOTABLE_S and name != "run":   # how long the job ran is in the summary
                self._talk(f"{name}: {duration(took)}")
            elif self._drawn:
                self._put(self._err, self._lead())
        self._forget_progress()

    def _forget_progress(self) -> None:
        self._first, self._done, self._total, self._unit, self._name, self._told = None, 0, None, "B", "", False
        self._samples: deque[tuple[float, int]] = deque()

    def _progress_object(self) -> None:
        self._told = True
        self._object("progress", phase=self._phase, done=self._done, total=self._total, unit=self._unit, name=self._name)

    def _object(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._put(self._out, json.dumps({"type": kind, **fields}).encode() + b"\n")

    def _log(self, kind: str, data: bytes) -> None:
        with self._lock:
            data = self._rest.pop(kind, b"") + data
            try:
                text, used = codecs.utf_8_decode(data, "strict", False)
            except UnicodeDecodeError:
                self._object(kind, data_base64=_base64(data))
                return
            if used < len(data):
                self._rest[kind] = data[used:]
            if text:
                self._object(kind, text=text)

    def _flush_rest(self) -> None:
        for kind, data in self._rest.items():
            self._object(kind, data_base64=_base64(data))
        self._rest.clear()

    def _put(self, fd: int, data: bytes) -> None:
        """Write all of it, or remember that nobody is there any more."""
        if not data or fd in self._gone:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view):]
            except BlockingIOError:   # somebody who shares this descriptor made it non-blocking (ssh and node do)
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(1000)
            except OSError as error:
                self._gone.add(fd)
                if fd == self._out and not isinstance(error, BrokenPipeError):
                    self.stdout_failed = True
                    self._talk(self._coloured("warning:", "33")
                               + f" stdout can't be written ({error.strerror}); the whole output is in the run's folder")
                return

    def _stat(self, fd: int) -> os.stat_result | None:
        try:
            return os.fstat(fd)
        except OSError:   # not open: whatever is opened at this number later is not ours to write to
            self._gone.add(fd)
            return None


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _short_path(path: str) -> str:
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):   # another drive; a current folder that was removed
        return path
    return relative if len(relative) < len(path) else path
