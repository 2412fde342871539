"""The agent's supply of supervisors (see supervise.py): one is kept waiting, so that starting a phase doesn't cost the start of a Python."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any, Dict, List, Optional

from gpurun import supervise


def supervisor_command() -> List[str]:
    """How this agent file is started as a supervisor; isolated from the user's Python settings and packages."""
    return [sys.executable, "-I", "-S", sys.argv[0], "supervise"]


class Supervisors:
    """Keeps one waiting. Any thread may take it."""

    def __init__(self, command: List[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._spare: Optional[subprocess.Popen] = None

    def prepare(self) -> None:
        with self._lock:
            if self._spare is None:
                self._spare = self._launch()

    def take(self) -> subprocess.Popen:
        """A supervisor without work: it ends when `give` doesn't follow, or when this agent ends before that."""
        with self._lock:
            process, self._spare = self._spare, None
        if process is None or process.poll() is not None:
            process = self._launch()
        return process

    @staticmethod
    def give(process: subprocess.Popen, spec: Dict[str, Any]) -> None:
        """The spec goes over a pipe: it has the values of the job's env. One that is gone meanwhile takes nothing: that shows in its end."""
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(spec).encode("ascii") + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass

    @staticmethod
    def send_home(process: subprocess.Popen) -> None:
        """Ends one that was taken and gets no work after all."""
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    def _launch(self) -> subprocess.Popen:
        # It inherits what this thread blocks: a stop may come before it has read its own first line.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, supervise.BLOCKED)
        try:
            return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    start_new_session=True, close_fds=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        with self._lock:
            if self._spare is not None:
                self.send_home(self._spare)
                self._spare = None
