"""An operator that speaks the protocol by hand, and the agent's `start` in a node folder, as bootstrap calls it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import end_agents, eventually

from gpurun import bootstrap, supervise, transfer, wire
from gpurun.agentfile import agent_file
from gpurun.link import Connection, Link, public_id
from gpurun.messages import NODE_SAYS, Busy, Hello, JobExited, NodeFault, Refused, RunJob

WAIT_S = 20.0
PACKAGE = Path(bootstrap.__file__).parent


class Talk:
    """A control session, message by message."""

    def __init__(self, operator: "Operator", known: dict[str, Any], *first: Any) -> None:
        self.connection = operator.dial(known, wire.CONTROL_ALPN)
        self.stream = self.connection.open(WAIT_S)
        self.reader = wire.Reader(self.stream)
        self.say(*first)

    def say(self, *messages: Any) -> None:
        if messages:
            self.stream.write(b"".join(map(wire.encode, messages)), WAIT_S)

    def hear(self, *kinds: type) -> Any:
        """The next message of one of these classes; None when the node ends the session before."""
        while True:
            line = self.reader.line(WAIT_S)
            if not line:
                return None
            message = wire.decode(line, NODE_SAYS)
            if not kinds or isinstance(message, kinds):
                return message

    def close(self) -> None:
        self.connection.close()


class Operator:
    def __init__(self, key: bytes | None = None) -> None:
        self.key = key or os.urandom(32)
        self.id = public_id(self.key)
        self.link = Link(self.key, "127.0.0.1:0")

    def dial(self, known: dict[str, Any], alpn: bytes) -> Connection:
        return self.link.dial(known["id"], [f"127.0.0.1:{known['port']}"], alpn, WAIT_S)

    def talk(self, known: dict[str, Any], *first: Any) -> Talk:
        return Talk(self, known, *first)

    def run(self, known: dict[str, Any], run_id: str, command: str, env: dict[str, str] | None = None) -> Any:
        """One whole run without workspace and outputs; the event that ended it."""
        talk = self.talk(known, Hello(run_id=run_id, job="job", claim=True), RunJob(run_id, command, env or {}))
        ended = talk.hear(JobExited, NodeFault, Refused, Busy)
        talk.close()
        return ended

    def logs(self, known: dict[str, Any], run_id: str, keeps: bool = False) -> bytes:
        connection, out = self.dial(known, wire.TRANSFER_ALPN), []
        transfer.follow(connection.open(WAIT_S), run_id, dict.fromkeys(transfer.LOGS, 0), lambda name, position, data: name == "run.out" and out.append(data),
                        kept=(lambda sizes: True) if keeps else None)
        connection.close()
        return b"".join(out)


class NodeDir:
    """A node folder and `start` in it, as bootstrap calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, operator_id: str, python: str = sys.executable, package: Path | None = None, lib: str | None = None,
              bind: str = "127.0.0.1:0", idle_exit_s: float = 3600, **options: Any) -> tuple[int, dict[str, Any]]:
        """(exit code, what it said) of `start`."""
        process = self.starting(operator_id, python, package, lib, bind, idle_exit_s, **options)
        out, err = process.communicate(timeout=60)
        words = re.findall(rb"^GPURUN-(ENDPOINT|FAILED) (\{.*\})$", out, re.M)
        assert len(words) == 1, (out, err)
        assert (words[0][0] == b"ENDPOINT") == (process.returncode == 0) and b"Traceback" not in err, err
        return process.returncode, json.loads(words[0][1])

    def starting(self, operator_id: str, python: str = sys.executable, package: Path | None = None, lib: str | None = None,
                 bind: str = "127.0.0.1:0", idle_exit_s: float = 3600, **options: Any) -> "subprocess.Popen[bytes]":
        agent = agent_file(str(package or PACKAGE))
        there = self.folder / "agent" / agent.name
        with contextlib.suppress(OSError):
            there.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another start may read the file at this moment: as a deploy does it, moved in whole.
            os.replace(shutil.copy(agent.path, f"{there}.part"), there)
        file = there if there.exists() else agent.path
        argv = [python, *([] if python.endswith("python2.7") else ["-I"]), str(file), "start", "--node-dir", str(self.folder), "--authorize",
                operator_id, "--bind", bind, "--lib", str(bootstrap.iroh_folder().parent) if lib is None else lib, "--relay", "disabled",
                "--idle-exit-s", str(idle_exit_s)]
        home = self.folder.parent / "home"                  # the start files of whoever runs the tests are his business
        with contextlib.suppress(OSError):
            home.mkdir(exist_ok=True)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=dict(os.environ, HOME=str(home)), **options)

    def up(self, operator: Operator, **options: Any) -> dict[str, Any]:
        code, said = self.start(operator.id, **options)
        assert code == 0, said
        return said

    def authorize(self, operator_id: str) -> None:
        with open(self.folder / "agent" / "authorized", "a") as stream:
            stream.write(operator_id + "\n")

    def log(self) -> str:
        return (self.folder / "agent" / "log").read_text()

    def state(self, run_id: str) -> dict[str, Any]:
        return json.loads((self.folder / "runs" / run_id / "state.json").read_text())

    def end(self, known: dict[str, Any]) -> None:
        """kill -9."""
        os.kill(known["pid"], signal.SIGKILL)
        eventually(lambda: gone(known))


def gone(known: dict[str, Any]) -> bool:
    return supervise.start_time(known["pid"]) != known["start"]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeDir]:
    yield NodeDir(tmp_path / "node")
    end_agents(tmp_path)


@pytest.fixture
def operator() -> Iterator[Operator]:
    one = Operator()
    yield one
    one.link.close()


def changed_package(tmp_path: Path, **replace: list[tuple[str, str]]) -> Path:
    """A copy of the sources with changes (module=[(pattern, new text)]): an agent of another version."""
    copy = tmp_path / f"package{len(list(tmp_path.glob('package*')))}"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "errors.py").write_text((copy / "errors.py").read_text() + f"\n# {copy.name}\n")
    for module, changes in replace.items():
        for old, new in changes:
            text, count = re.subn(old, new, (copy / f"{module}.py").read_text(), flags=re.M)
            assert count, f"{old} isn't in {module}.py"
            (copy / f"{module}.py").write_text(text)
    return copy
