"""What the tests share: a home of their own for each test, gpurun as a user runs it, and nothing left running.

`here` is an isolated machine: HOME, settings, caches and runs of its own, on which `gpurun(...)` runs the real command in a process of
its own. Agents that it started are ended when the test ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from hypothesis import HealthCheck, settings

from agents import end_agents

# A caller may ignore these (`nohup tests/run &`), and what is ignored stays so in each process that we start: Ctrl-C would end no gpurun.
# A handler of our own becomes the default in them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# On a busy machine an example takes as long as it likes, and so does the making of one.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

CLEAN = ("PATH", "LANG", "TMPDIR", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS", "XDG_CONFIG_DIRS")
LIMIT_S = 120
# The longest files. They begin first: one that is begun last goes on alone when the other processes of `tests/run` have nothing left to do.
LONGEST = ("test_vast_leaks", "test_outages", "test_vast_coming_up", "test_crash", "test_vast_ssh", "test_vast_alone", "test_vast_ending",
           "test_slurmjobs", "test_vast_creating", "test_slurm_trouble", "test_budget_runs", "test_slurm_private", "test_slurm_down", "test_slurm_leaving", "test_vast_asking", "test_vast_chaos",
           "test_vast_signals", "test_long", "test_ssh_run", "test_fleet", "test_agent", "test_jobs", "test_attach", "test_slurm_cluster",
           "test_badnet", "test_sshway", "test_counts")          # after test_outages: on a busy machine each would take the other's time for a fault


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


class Here:
    """One operator on one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.work = folder / "work"
        self.runs = self.work / "gpurun-runs"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        self.env = {name: os.environ[name] for name in CLEAN if name in os.environ}
        self.env.update(HOME=str(self.home), CI="true", LANG=self.env.get("LANG", "C.UTF-8"))

    def job(self, run: str, name: str = "job", folder: Path | None = None, **keys: Any) -> Path:
        """A job file; `keys` are further keys of [job], as Python values."""
        folder = folder or self.work
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.toml"
        lines = ["[job]", f"name = {json.dumps(name)}", f"run = {json.dumps(textwrap.dedent(run))}"]
        lines += [f"{key} = {toml(value)}" for key, value in keys.items()]
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self, *args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("env", self.env)
        return subprocess.Popen([sys.executable, "-m", "gpurun", *map(str, args)], cwd=options.pop("cwd", self.work), **options)

    def gpurun(self, *args: Any, timeout: float = LIMIT_S, **options: Any) -> "subprocess.CompletedProcess[bytes]":
        """Runs gpurun to its end. No traceback may ever reach a user."""
        process = self.start(*args, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"gpurun {args} didn't end within {timeout} s:\n{(err or b'').decode(errors='replace')}") from None
        assert b"Traceback" not in (err or b""), err.decode(errors="replace")
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def result(self, *args: Any, **options: Any) -> dict[str, Any]:
        """The result object of `gpurun … --json`."""
        done = self.gpurun(*args, "--json", **options)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines and lines[-1]["type"] == "result", done.stderr.decode(errors="replace")
        assert lines[-1]["exit_code"] == done.returncode
        return lines[-1]

    @property
    def latest(self) -> Path:
        return (self.runs / "latest").resolve()

    def record(self) -> dict[str, Any]:
        return json.loads((self.latest / "run.json").read_text())

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.latest / "events.jsonl").read_text().splitlines()]

    @property
    def node_dir(self) -> Path:
        return self.home / ".gpurun"

    def agent(self, node_dir: Path | None = None) -> dict[str, Any]:
        return json.loads(((node_dir or self.node_dir) / "agent" / "endpoint.json").read_text())


def toml(value: Any) -> str:
    """A Python value as TOML: JSON but for tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(value)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    """An isolated operator and machine."""
    yield Here(tmp_path / "here")
    end_agents(tmp_path)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """The same for a whole file: the agent is up already, as for a user's second run. Tests share it, so each brings its own names."""
    folder = tmp_path_factory.mktemp("warm")
    yield Here(folder / "here")
    end_agents(folder)


def eventually(what: Any, timeout_s: float = 20.0) -> Any:
    """The first true value of `what()`. For what another process does and nobody can wait on; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)
