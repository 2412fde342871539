"""A node at the end of a slow, lossy or broken link: a namespace of tests/wan with an sshd, and operators who know it as `node`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here, end_agents
from sshd import SSHD

WAN = Path(__file__).parent / "wan"
needs_a_network = pytest.mark.skipif(
    not SSHD or not shutil.which("ssh") or os.getuid() != 0 or not shutil.which("ip") or not os.path.exists("/dev/net/tun"),
    reason="needs root, OpenSSH, iproute2 and /dev/net/tun for a network of its own")


class Wan:
    """A link with an sshd at its end. `home` is the home folder there, and can be looked into from here."""

    def __init__(self, folder: Path, suffix: str, *sshd_options: str, **shape: str) -> None:
        self.folder, self.name, self.home = folder, f"gpurun{os.getpid()}{suffix}", folder / "home"
        shape = {"rtt": "50ms", **shape}
        wan("up", self.name, "--seed", "1", *(word for key, value in shape.items() for word in (f"--{key}", value)))
        self.config = wan("sshd", self.name, "2222", "--home", self.home, *(word for option in sshd_options for word in ("-o", option)))

    def set(self, **shape: str) -> None:
        """Holds once this returns; what isn't named stays as it was."""
        wan("set", self.name, *(word for key, value in shape.items() for word in (f"--{key}", value)))

    def operator(self, name: str, lib: Path | None = None, **provider: Any) -> Here:
        """One with a home and a node folder of his own; `provider` are keys of his cluster file. `lib`: that of another node folder, which
        is the most of what a first use has to bring."""
        here = Here(self.folder / name)
        if lib is not None:
            (self.home / name).mkdir(mode=0o700)
            subprocess.run(["cp", "-rl", lib, self.home / name / "lib"], check=True)
        here.env.update(GPURUN_SSH_CONFIG=self.config, XDG_CACHE_HOME=str(self.folder.parent / "cache"))   # iroh is packed there once
        use(here, f"~/{name}", **provider)
        return here

    @property
    def logins(self) -> int:
        return Path(self.config).with_name("log").read_text().count("Accepted publickey")


def use(here: Here, node_dir: str, **provider: Any) -> None:
    keys = "".join(f"{key} = {value}\n" for key, value in provider.items())
    (here.work / "cluster.toml").write_text(f'[provider]\nkind = "ssh"\nnode_dir = "{node_dir}"\n{keys}[[provider.hosts]]\nhost = "node"\n')


def wan(*words: Any) -> str:
    return subprocess.check_output([WAN, *map(str, words)], text=True).strip()


@contextlib.contextmanager
def linked(folder: Path, suffix: str, *sshd_options: str, **shape: str) -> Iterator[Wan]:
    """Takes the link down at the end, with all that still runs behind it."""
    made = Wan(folder, suffix, *sshd_options, **shape)
    try:
        yield made
    finally:
        end_agents(folder)
        wan("down", "--kill", made.name)
