"""The logs of a run as they come from its node: kept on this disk, shown on the screen, each from where it was."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from gpurun import transfer
from gpurun.files import room
from gpurun.logs import Logs
from gpurun.records import RunFolder
from gpurun.screen import Screen
from gpurun.session import Session


class Following:
    """One run's logs. `follow` is called again with each new session; the rest may be asked from any thread."""

    def __init__(self, folder: RunFolder, screen: Screen, warn_once: Callable[[str, str], None]) -> None:
        """`warn_once(about, text)` says a text unless one about the same was said."""
        self._folder, self._screen, self._warn_once = folder, screen, warn_once
        self._logs = Logs(folder)
        self._shown = dict(self._logs.kept)   # where the node's logs go on
        self._echo = True                     # whether the job's output is shown as well as kept
        self._tail: int | None = None         # lines of each log that a taker-over wants to see of the past, None: all
        self._past_shown = True               # what is here already is on the screen
        self._leaving = False                 # the node keeps the run until it knows that its logs are here
        self.writing = False                  # a reader of ours may be pausing
        self.moved = time.monotonic()

    def take_over(self, echo: bool, tail: int | None, past: bool) -> None:
        """Of a run that somebody else has followed so far: its logs from the beginning, or the last `tail` lines of each; without `past` only
        what isn't on this disk yet."""
        self._echo, self._tail, self._leaving = echo, tail if echo else None, True
        self._past_shown = not past or tail is not None

    @property
    def kept(self) -> dict[str, int]:
        """Bytes of each log on this disk."""
        return dict(self._logs.kept)

    def follow(self, session: Session, run_id: str) -> bool:
        """To the end of the logs; whether all of them are on this disk. LinkError when the connection breaks."""
        if self._echo and self._tail is None and not self._past_shown:
            self._past_shown = True
            self._logs.show(self._screen.log)
        kept = (lambda sizes: not self._logs.behind(sizes)) if self._leaving else None
        if self._tail is None and self._shown == self._logs.kept:
            sizes = transfer.follow(session.transfer(), run_id, self._shown, self._take, kept=kept)
        else:                                 # what is shown and what is kept are at different places: a tail, a disk that was full
            showing = ThreadPoolExecutor(1, "show").submit(
                lambda: transfer.follow(session.transfer(), run_id, self._shown, self._show, self._tail))
            sizes = transfer.follow(session.transfer(), run_id, dict(self._logs.kept), self._keep, kept=kept)
            showing.result()
        behind = self._logs.behind(sizes)     # a disk that was full for a while
        if behind:
            transfer.follow(session.transfer(), run_id, behind, self._keep, live=False, kept=kept)
        return not self._logs.behind(sizes)

    def _take(self, name: str, position: int, data: bytes) -> None:
        self._keep(name, position, data)
        self._show(name, position, data)

    def _show(self, name: str, position: int, data: bytes) -> None:
        """A reader that pauses holds us up here, and through the stream the node's sending: never the job."""
        self.writing = True
        self._tail, self._shown[name] = None, position + len(data)
        if self._echo:
            self._screen.log(name, data)
        self.moved, self.writing = time.monotonic(), False

    def _keep(self, name: str, position: int, data: bytes) -> None:
        self.moved = time.monotonic()
        self._logs.take(name, position, data)
        if name in self._logs.trouble:
            path = self._folder.logs[name]
            self._warn_once(path, f"{path} can't be written: {self._logs.trouble[name].strerror} ({room(self._folder.path, len(data))} and more). The "
                                  f"job goes on and so does its log on the node; make room, and `gpurun fetch {self._folder.run_id}` brings the rest")

    def close(self) -> None:
        self._logs.close()
