"""What a run's folder on the node says of it: events.jsonl and state.json, written so that state.json never says more than the events do."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List

from gpurun import messages, wire
from gpurun.files import append_line, atomic_write


class RunDisk:
    """The two files of one run. Its caller sees to it that one thread at a time is in here."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.events: List[Any] = []
        self.unsaved = False                   # facts that an agent after this one wouldn't know
        self._unwritten: List[bytes] = []      # events that a full disk didn't take; in order, before any later one

    def read_events(self) -> None:
        """A last line that was cut short was never sent. It goes: the next event must not be written behind half of another one."""
        path, size = os.path.join(self.folder, "events.jsonl"), 0
        try:
            with open(path, "rb") as stream:
                for line in stream:
                    if not line.endswith(b"\n"):
                        os.truncate(path, size)
                        break
                    self.events.append(wire.decode(line, messages.NODE_EVENTS))
                    size += len(line)
        except FileNotFoundError:
            pass

    def add(self, event: Any) -> None:
        """The next event. On a disk that is full it is written when there is room."""
        self._unwritten.append(wire.encode(event))
        self._write_events()
        self.events.append(event)

    def _write_events(self) -> bool:
        """Whether all events are on the disk now, in their order and without a gap."""
        try:
            if self._unwritten:
                fd = os.open(os.path.join(self.folder, "events.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                try:
                    while self._unwritten:
                        append_line(fd, self._unwritten[0])
                        del self._unwritten[0]
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError:
            return False
        return True

    def save(self, state: Dict[str, Any]) -> bool:
        """Whether the disk took it, the events first. Where it didn't, an agent after this one knows an earlier state and asks the
        processes again."""
        try:
            if not self._write_events():
                self.unsaved = True
                return False
            atomic_write(os.path.join(self.folder, "state.json"), json.dumps(state).encode("ascii"))
        except OSError:
            self.unsaved = True
            return False
        self.unsaved = False
        return True
