"""A job to be watched: real files, at moments that the test makes up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun import watch
from gpurun.budgets import STOP, Budget
from gpurun.watch import Watch

SILENCE = Budget(silence_s=1e6, review_s=1e6)     # asks about growth and has nothing to say
PATTERN = Budget(abort_pattern=r"Error: (\d+)")


class Job:
    """A folder with logs and outputs, and a watch on them."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.out, self.err, self.work = tmp_path / "run.out", tmp_path / "run.err", tmp_path / "work"
        self.work.mkdir()
        self.outputs = ["result"]
        self.watched = None
        self.alive = 1
        self.asked = 0

    def watch(self, one, earlier=None):
        self.close()
        self.watched = Watch(one, [str(self.out), str(self.err)], [str(self.work / path) for path in self.outputs], self.processes, earlier)
        return self.watched

    def close(self):
        if self.watched is not None:
            self.watched.close()

    def processes(self):
        self.asked += 1
        if isinstance(self.alive, Exception):
            raise self.alive
        return self.alive

    def look(self, elapsed_s):
        return self.watched.look(elapsed_s)

    def acts(self, *moments):
        return [self.look(elapsed_s).act for elapsed_s in moments]

    def silent(self, elapsed_s):
        self.look(elapsed_s)
        return self.watched.state()["silent_s"]

    def write(self, text, log=None):
        with open(log or self.out, "ab") as stream:
            stream.write(text if isinstance(text, bytes) else text.encode())

    def put(self, name, data="x"):
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data)
        return path


@pytest.fixture
def job(tmp_path, request, monkeypatch):
    """What a look may cost is a matter of the tests with `clock` or `bounds`: else on a busy machine one look might leave the rest to the next."""
    if not {"clock", "bounds"} & set(request.fixturenames):
        monkeypatch.setattr(watch, "MOST_S", 600.0)
        monkeypatch.setattr(watch, "READ_S", 600.0)
    one = Job(tmp_path)
    yield one
    one.close()


@pytest.fixture
def bounds():
    """A look has the bounds of every day, on the real clock."""


def said(decision):
    """The line that a job was stopped for."""
    assert decision.act == STOP
    return decision.text.partition("pattern: ")[2]


@pytest.fixture
def clock(monkeypatch):
    """`clock.now` is the time of the walks; each look at it costs `clock.cost`."""
    one = SimpleNamespace(now=1000.0, cost=0.0)

    def monotonic():
        one.now += one.cost
        return one.now
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=monotonic))
    return one


@contextlib.contextmanager
def unreadable(folder):
    """Nobody may look into it meanwhile; for root that holds only if it is somebody else."""
    os.chmod(folder, 0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            os.listdir(folder)
        yield
    finally:
        if root:
            os.seteuid(0)
        os.chmod(folder, 0o700)
