"""A `--up --down` that is brought to a phase and signalled there, and a gpurun that has a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
import time

from renter import Renter
from running import Running

END_S = 90.0
OUTPUT = "echo kept > out.txt; echo at-work; sleep 120"
HEAVY = "yes 0123456789abcdef | head -c 150M > out.txt; echo made"
SLOW = ((0.1, "st_loading"), (600.0, "st_running"))
# Where gpurun is when the signals come: how it gets there, and what is known then.
PHASES = ("renting", "coming up", "preparing", "push", "setup", "run", "collect", "down")


class Signalled:
    """One `--up --down`, brought to a phase."""

    def __init__(self, renter: Renter, phase: str, *more: str, **options) -> None:
        self.renter, self.phase = renter, phase
        if phase == "coming up":
            renter.server.script(steps=SLOW)
        keys = {"outputs": ["out.txt"]}
        if phase == "setup":
            keys["setup"] = "echo at-work; sleep 120"
        if phase == "push":
            (renter.work / "big").mkdir()
            for number in range(4):
                (renter.work / "big" / f"file{number}").write_bytes(os.urandom(24 << 20))
            keys["workspace"] = {"workdir": "big"}
        job = renter.job(HEAVY if phase == "collect" else "echo kept > out.txt" if phase == "down" else OUTPUT, **keys)
        self.reached = None
        if phase in ("renting", "preparing", "down"):
            endpoint = {"renting": "create", "preparing": "ssh_attach", "down": "destroy"}[phase]
            renter.server.hook = lambda request: self._at(endpoint, request)
        self.numbers: list[int] = []
        self.run = Running(renter, job, "--up", "--down", *more, **options)

    def _at(self, endpoint, request):
        if request.endpoint == endpoint and self.reached is None:
            self.reached = time.monotonic()
            for number in self.numbers:
                self._send(number)
        return None

    def _send(self, number: int) -> None:
        self.run.signal(number)
        time.sleep(0.15)          # two at once are one to a process

    def send(self, *numbers: int) -> int:
        """gpurun's exit code after these."""
        self.numbers += numbers
        if self.phase not in ("renting", "preparing", "down"):
            if self.phase == "coming up":
                self.renter.server.wait_for(lambda server: server.calls("create") and server.calls("list")[-1].time > server.calls("create")[0].time)
            elif self.phase in ("push", "collect"):
                self.run.until(f"{self.phase}:")
            else:
                self.run.until("at-work")
            for number in numbers:
                self._send(number)
        try:
            self.run.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.run.err) from None
        return self.run.end()

    @property
    def output(self) -> str | None:
        path = self.renter.latest / "outputs/out.txt"
        return path.read_text()[:5] if path.exists() else None


class Terminal:
    """A gpurun that has a terminal of its own."""

    def __init__(self, renter: Renter, *args) -> None:
        self.master, slave = pty.openpty()
        env = {**{name: value for name, value in renter.env.items() if name != "CI"}, "TERM": "xterm"}

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = renter.start(*args, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal, env=env)
        os.close(slave)
        self.seen = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            assert self._read(), self.seen.decode()

    def _read(self) -> bool:
        try:
            data = os.read(self.master, 65536)
        except OSError:
            data = b""
        self.seen += data
        return bool(data)

    def write(self, data: bytes) -> None:
        os.write(self.master, data)

    def close(self) -> None:
        """As when a window is closed."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def end(self) -> int:
        while self.master >= 0 and self._read():
            pass
        return self.process.wait(END_S)
