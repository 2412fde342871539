"""One key of the terminal, waited for while everything else goes on: no Enter, and Ctrl-C stays a signal.

A `Question` has changed the terminal's settings (no line editing, no echo) and puts them back however it ends: by a key, by `end`,
because the terminal hung up or because this process went into the background. Ctrl-Z and Ctrl-\\ come as keys, so that the settings are
back before the signal that they stand for is sent.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import time
from typing import Callable, Iterable

LOOK_S = 0.1            # so late is seen that the question was ended, or that a shell has brought us back with settings of its own
STOPPED_S = 0.1         # from sending SIGTSTP until it holds: all threads of this process have stopped by then
END_OF_INPUT = b"\x04"  # Ctrl-D, which is a key like others here
ESCAPE = b"\x1b"


class Question:
    """See the module. `keys` are single letters in lower case. Any thread may call any method, `end` also a signal handler."""

    def __init__(self, terminal: int, keys: Iterable[str]) -> None:
        self._fd, self._keys = terminal, set(keys)
        self._over = False
        self._lock = threading.RLock()        # a handler may come while its own thread is in here; nothing under it waits
        self._before = termios.tcgetattr(terminal)
        controls = self._before[6]
        self._signals = {controls[termios.VSUSP]: signal.SIGTSTP, controls[termios.VQUIT]: signal.SIGQUIT}
        self._signals.pop(b"\0", None)        # how a terminal says that it has no such key
        self._listen()

    @classmethod
    def put(cls, keys: Iterable[str], err_fd: int = 2) -> "Question | None":
        """None where nobody can answer: no terminal to read from or to show it on, or it isn't ours at the moment."""
        try:
            if not (os.isatty(0) and os.isatty(err_fd)):
                return None
            # Non-blocking, and with an open file of its own: stdin's flag is shared with whoever else has it.
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if _is_ours(terminal):
                return cls(terminal, keys)
        except termios.error:
            pass
        os.close(terminal)
        return None

    def wait(self, again: Callable[[], None], away: Callable[[], None], back: Callable[[], None]) -> str | None:
        """The key; "" if nobody can answer any more; None if `end` was called. Enter calls `again`. `away` comes before the process
        is stopped by Ctrl-Z, `back` after it was brought back."""
        try:
            key = self._read(again, away, back)
        except (OSError, termios.error):      # hung up
            key = ""
        won = self.end()
        with self._lock:                      # nobody uses the number any more: all who do look at `_over` under this lock
            os.close(self._fd)
        return key if won else None

    def end(self) -> bool:
        """Puts the settings back and lets `wait` return. Never waits. False if the question had ended already."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            self._restore()
            return True

    def _read(self, again: Callable[[], None], away: Callable[[], None], back: Callable[[], None]) -> str:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not self._over:
            if not _is_ours(self._fd):
                return ""                     # `bg`: reading would stop us, and the run has no reason to wait for it
            if self._listen():
                back()
            if not poll.poll(LOOK_S * 1000) or self._over:
                continue
            try:
                data = os.read(self._fd, 256)
            except BlockingIOError:
                continue
            if not data:
                return ""
            for byte in _single(data):
                if byte.decode("latin-1").lower() in self._keys:
                    return byte.decode("latin-1").lower()
                if byte == END_OF_INPUT:
                    return ""
                if byte in b"\r\n":
                    again()
                if byte in self._signals:
                    away()
                    self._stop(self._signals[byte])
        return ""

    def _listen(self) -> bool:
        """Key by key and without an echo. False if it is so already."""
        with self._lock:
            now = termios.tcgetattr(self._fd)
            if self._over or not now[3] & termios.ICANON:
                return False
            now[3] &= ~(termios.ICANON | termios.ECHO)
            now[6][termios.VMIN], now[6][termios.VTIME] = 1, 0
            for control in (termios.VSUSP, termios.VQUIT):
                now[6][control] = b"\0"
            termios.tcflush(self._fd, termios.TCIFLUSH)      # what was typed before the question doesn't answer it
            termios.tcsetattr(self._fd, termios.TCSANOW, now)
            return True

    def _restore(self) -> None:
        try:
            if _is_ours(self._fd):            # from the background this would stop us; and there a shell has its own settings in place
                termios.tcsetattr(self._fd, termios.TCSANOW, self._before)   # not DRAIN: the output may be held by Ctrl-S
        except termios.error:                 # hung up
            pass

    def _stop(self, number: int) -> None:
        """What the terminal does for this key: the whole group gets it."""
        with self._lock:
            if self._over:
                return
            self._restore()
        os.kill(0, number)
        time.sleep(STOPPED_S)


def _single(data: bytes) -> list[bytes]:
    """The keys among what was read. An arrow is an escape and letters, which are no answer."""
    return [bytes((byte,)) for byte in data.partition(ESCAPE)[0]]


def _is_ours(terminal: int) -> bool:
    """Whether this process is in the terminal's foreground."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
