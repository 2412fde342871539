"""The logs of one run on this disk: four files, each at every moment a prefix of the node's.

So a file's size says where to go on, after a kill too, and nothing else has to be kept in step with it. Names are those of the node,
`transfer.LOGS`; `RunFolder.logs` has their paths here. One process writes (the one with the run's lock); any may read meanwhile.
"""

from __future__ import annotations

import os
import time
from typing import Callable

from gpurun.records import RunFolder
from gpurun.transfer import BLOCK, tail_start

PAUSE_S = 0.1                   # grows by itself up to the longest while nothing comes
LONGEST_PAUSE_S = 0.5

Take = Callable[[str, bytes], None]


class Logs:
    """Keeps what comes. A disk that is full is no error here: what is lacking is filled by a second follow, from `behind` on.

    `kept` has the bytes of each log that are here; `trouble` why a log's last piece couldn't be kept, until one can again.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._paths = folder.logs
        self._fds: dict[str, int] = {}
        self.kept = {name: _size(path) for name, path in self._paths.items()}
        self.trouble: dict[str, OSError] = {}

    def take(self, name: str, position: int, data: bytes) -> None:
        """Writes what of a piece lies beyond what is here. A piece that begins later would leave a hole: it is left out."""
        kept = self.kept[name]
        if not position <= kept < position + len(data):
            return
        view = memoryview(data)[kept - position:]
        try:
            if name not in self._fds:
                self._fds[name] = os.open(self._paths[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            while view:
                written = os.write(self._fds[name], view)       # a disk that fills takes a part: it counts
                self.kept[name] += written
                view = view[written:]
            self.trouble.pop(name, None)
        except OSError as error:
            self.trouble[name] = error

    def behind(self, sizes: dict[str, int]) -> dict[str, int]:
        """The offsets to follow from again: of each log that is shorter here than `sizes` says."""
        return {name: kept for name, kept in self.kept.items() if kept < sizes.get(name, 0)}

    def show(self, take: Take, tail: int | None = None) -> None:
        """Gives `take(log, bytes)` what is here, setup's first; with `tail` only the last so many lines of each log."""
        for name, path in self._paths.items():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                size = os.fstat(fd).st_size
                _give(name, fd, size, 0 if tail is None else tail_start(fd, size, tail), take)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Lets go of the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


def follow_local(folder: RunFolder, take: Take, ended: Callable[[], bool], tail: int | None = None) -> dict[str, int]:
    """Gives `take(log, bytes)` what another process writes to the logs, until `ended()` says that it is done, and what is there then.
    From the beginning on, or with `tail` from the last so many lines of each log that there is now. Returns how far each was read."""
    fds: dict[str, int] = {}
    at: dict[str, int] = {}
    first, pause = True, PAUSE_S
    try:
        while True:
            last_round = ended()                                # asked before reading: what was written before is read in this round
            moved = False
            for name, path in folder.logs.items():
                if name not in fds:
                    try:
                        fds[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    except FileNotFoundError:
                        continue
                    at[name] = tail_start(fds[name], os.fstat(fds[name]).st_size, tail) if first and tail is not None else 0
                end = _give(name, fds[name], os.fstat(fds[name]).st_size, at[name], take)
                moved = moved or end > at[name]
                at[name] = end
            if last_round:
                return at
            first, pause = False, PAUSE_S if moved else min(pause + PAUSE_S, LONGEST_PAUSE_S)
            time.sleep(pause)
    finally:
        for fd in fds.values():
            os.close(fd)


def _give(name: str, fd: int, size: int, at: int, take: Take) -> int:
    """The bytes from `at` up to `size` in pieces; where they end."""
    while at < size:
        block = os.pread(fd, min(BLOCK, size - at), at)
        if not block:
            break
        take(name, block)
        at += len(block)
    return at


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
