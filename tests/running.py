"""A gpurun in a process of its own that a test watches and signals, and the end of what a test left running."""

from __future__ import annotations

import signal
import threading

import pytest
from conftest import Here, eventually

from gpurun import supervise

BOUND_S = 60.0   # nothing here takes its job longer than the grace period; a busy machine does the rest in its own time


class Running:
    """A gpurun in a process of its own, whose stderr is read as it comes."""

    alive: list["Running"] = []

    def __init__(self, here: Here, *args, **options) -> None:
        # A shell that starts the tests in the background makes them ignore SIGINT, and what they start with them.
        self.process = here.start(*args, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)
        self.said, self.printed = [], []
        self.alive.append(self)
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in
                        ((self.process.stderr, self.said), (self.process.stdout, self.printed)) if pair[0] is not None]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, lines) -> None:
        for line in iter(stream.readline, b""):
            lines.append(line.decode(errors="replace"))

    def until(self, text: str) -> None:
        """Returns as soon as gpurun said something with `text`, or the job printed the line `text`."""
        def there() -> bool:
            return any(text in line for line in self.said[1:]) or text + "\n" in self.said + self.printed
        eventually(lambda: there() or self.process.poll() is not None, BOUND_S)
        eventually(lambda: there() or not any(reader.is_alive() for reader in self.readers), BOUND_S)   # what an ended one said is still read
        assert there(), self.err

    def signal(self, number: int) -> "Running":
        self.process.send_signal(number)
        return self

    def end(self) -> int:
        code = self.process.wait(BOUND_S)
        for reader in self.readers:
            reader.join(30)
        assert "Traceback" not in self.err, self.err
        return code

    @property
    def err(self) -> str:
        return "".join(self.said)

    @property
    def out(self) -> str:
        return "".join(self.printed)


def gone(run_id: str) -> bool:
    return not supervise.of_run(run_id)


def end_all() -> None:
    """No gpurun of a test that failed half-way goes on."""
    for run in Running.alive:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
    Running.alive.clear()


@pytest.fixture
def nothing_goes_on(warm):
    """A test that fails half-way must not keep the node from the next one."""
    yield
    end_all()
    for folder in (warm.node_dir / "runs").iterdir() if (warm.node_dir / "runs").exists() else ():
        for pid in supervise.of_run(folder.name):
            supervise.send(pid, signal.SIGKILL)
