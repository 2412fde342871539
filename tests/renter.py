"""An operator who rents from the loopback server: `renter.server` is the provider, `renter.gpurun(...)` the real command with tests/quick.py's times.

    def test_…(renter):
        renter.server.fault("create", "lost_answer")
        done = renter.gpurun("up")
        assert renter.server.alive() == [] …

At the end of each test everything that gpurun and the server started has ended. What is alive then is the test's to assert, before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
from agents import end_agents
from conftest import Here, toml

from gpurun import bootstrap

TESTS = Path(__file__).resolve().parent


class Renter(Here):
    """Here with a provider. `here.server` is a VastServer with machines."""

    def __init__(self, folder: Path, server: Any) -> None:
        super().__init__(folder)
        self.server = server
        self.env.update(VAST_URL=server.url, VAST_API_KEY=server.key, NO_PROXY="127.0.0.1,localhost", PYTHONPATH=str(TESTS.parent),
                        XDG_CACHE_HOME=str(folder.parent.parent / "cache"))           # iroh is packed there once
        self.cluster()

    def cluster(self, **keys: Any) -> Path:
        """Writes cluster.toml beside the jobs; `keys` of [provider] replace or add."""
        known: dict[str, Any] = {"kind": "vastai", "image": "vastai/base-image:cuda-12.8.1-cudnn-devel-ubuntu22.04-py310", "gpu": {"name": "RTX 4090"},
                                 "selection": {"max_price_per_hour": 0.5}, "limits": {"max_hours": 2}}
        path = self.work / "cluster.toml"
        path.write_text("[provider]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in {**known, **keys}.items() if value is not None))
        return path

    def start(self, *args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        env = dict(options.pop("env", self.env))
        if "pace" in options:
            env["GPURUN_TEST_PACE"] = options.pop("pace")
        return subprocess.Popen([sys.executable, str(TESTS / "quick.py"), *map(str, args)], cwd=options.pop("cwd", self.work), env=env, **options)

    def said(self, *args: Any, **options: Any) -> "tuple[int, str]":
        """Runs gpurun to its end; its exit code, and what it said on stderr."""
        done = self.gpurun(*args, **options)
        return done.returncode, done.stderr.decode()

    @property
    def asked(self) -> list[Any]:
        """The bodies of all requests for a machine, in their order. Without one that was cut off, as its gpurun was killed: nothing is rented for that."""
        return [one.body for one in self.server.calls("create") if one.body is not None]

    @property
    def records(self) -> list[Path]:
        """The records of machines that gpurun keeps."""
        return sorted((self.home / ".config/gpurun/machines").glob("gpurun-*.json"))

    def ended(self) -> None:
        """Asserts that nothing is left: no machine, no record, and nothing was ever without a label."""
        assert self.server.alive() == [], [one.label for one in self.server.alive()]
        assert self.server.unlabelled() == []
        assert self.records == []
        labels = [one["label"] for one in self.asked]
        assert all(labels) and len(set(labels)) == len(labels), labels   # no request for a machine was sent again
        assert self.server.leaks() == []


def image(folder: Path) -> Path:
    """A home with iroh, which is the most of what gpurun has to bring to a new machine. Made once for all tests of a process."""
    if not folder.exists():
        lib = folder.with_name(folder.name + ".new") / ".gpurun/lib" / f"iroh-{bootstrap.iroh_version()}-{bootstrap._own_tags()[0]}"
        shutil.copytree(bootstrap.iroh_folder(), lib / "iroh", ignore=shutil.ignore_patterns("__pycache__"))
        for made in (lib, *lib.parents[:2]):
            made.chmod(0o700)
        os.replace(folder.with_name(folder.name + ".new"), folder)
    return folder


@pytest.fixture
def renter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Renter]:
    """An operator, and four offers whose machines are containers with an sshd. They have iroh already, but for files with FRESH = True, whose
    matter is how a new machine comes up, and for a test that says what its machines are like."""
    import vast_machine
    from vast_server import VastServer, offer
    if not vast_machine.possible():
        pytest.skip("containers need root and namespaces")
    with VastServer(offers=[offer(machine_id=number) for number in range(1, 5)], machines=True) as server:
        if not getattr(request.module, "FRESH", False):
            server.script(machine=vast_machine.Quirks(home=image(tmp_path.parent / "image")))
        yield Renter(tmp_path / "here", server)
    end_agents(tmp_path)


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Renter]:
    """The same with machines that are only rows of a list: for what ends before one could be logged in to."""
    from vast_server import VastServer, offer
    with VastServer(offers=[offer(machine_id=number) for number in range(1, 5)]) as server:
        yield Renter(tmp_path / "here", server)
