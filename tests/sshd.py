"""A real OpenSSH sshd on 127.0.0.1 for tests: `with Sshd(tmp_path) as sshd: …`.

It has its own port, host key, client key and ssh config file (`sshd.config`, host alias `node`; give it to gpurun as
$GPURUN_SSH_CONFIG). Where a private mount namespace may be made (root), its sessions have `sshd.home` for the user's home folder: an
empty one, as on a host that has never seen gpurun. Elsewhere they have the user's own.
"""

from __future__ import annotations

import functools
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
PYENV = Path(f"~{getpass.getuser()}/.pyenv").expanduser()

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/pid
LogLevel VERBOSE
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
"""


@functools.cache
def own_home_possible() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def keygen(path: Path, *options: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path, *options], check=True)
    return path


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(type=kind) as sock:
        sock.bind(("127.0.0.1" if kind == socket.SOCK_STREAM else "0.0.0.0", 0))
        return int(sock.getsockname()[1])


class Sshd:
    def __init__(self, folder: Path, options: Sequence[str] = (), port: int = 0, hidden: Sequence[str] = ()) -> None:
        """`options`: lines for sshd_config that win over ours. No sftp subsystem: gpurun must not need one. Where `own_home_possible`:
        sessions don't have the programs in `hidden`, and have ~/.pyenv, where test machines keep their Pythons."""
        self.folder, self.options, self.port, self.hidden = Path(folder), options, port or free_port(), hidden
        self._fixed = bool(port)
        self.user = getpass.getuser()
        self.home = self.folder / "home"
        self.key = self.folder / "client_key"
        self.config = self.folder / "ssh_config"
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sshd:
        self.home.mkdir(parents=True, exist_ok=True)
        if PYENV.is_dir():
            (self.home / ".pyenv").mkdir(exist_ok=True)
        for name in ("host_key", "client_key"):
            if not (self.folder / name).exists():
                keygen(self.folder / name)
        for folder in (self.folder, *self.folder.parents[:3]):   # sshd reads authorized_keys as the user who logs in
            if folder.stat().st_uid == os.getuid() and len(folder.parts) > 2:
                folder.chmod(folder.stat().st_mode | 0o011)
        shutil.copy(f"{self.key}.pub", self.folder / "authorized_keys")
        (self.folder / "sshd_config").write_text("".join(line + "\n" for line in self.options)   # of a repeated keyword the first counts
                                                 + SERVER.format(port=self.port, folder=self.folder))
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {self.host_key}\n")
        self.config.write_text(self.config_for("node", StrictHostKeyChecking="yes"))
        argv = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        if own_home_possible():
            mounts = " && ".join([*([f'mount --bind {shlex.quote(str(PYENV))} "$0"/.pyenv'] if PYENV.is_dir() else []),
                                  f'mount --rbind "$0" ~{self.user}',
                                  *(f"mount --bind /dev/null {shlex.quote(path)}" for path in self.hidden)])
            argv = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', str(self.home), *argv]
        else:
            self.home = Path(f"~{self.user}").expanduser()
        if os.getuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)   # Debian's sshd wants it and makes it only as a service
        with open(self.log, "ab") as log:
            began = log.tell()                                # an earlier server of this folder has left its words
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)
        for _ in range(1200):
            if self.process.poll() is None and b"Server listening" in self.log.read_bytes()[began:]:
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.025)
        self.close()
        if not self._fixed and b"Address already in use" in self.log.read_bytes()[began:]:   # another process was quicker
            self.port = free_port()
            return self.__enter__()
        raise RuntimeError(f"sshd did not start:\n{self.log.read_text(errors='replace')}")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the listener and the sessions that it still has. What a session put into the background goes on, as it does on a host."""
        if self.process is None:
            return
        sessions = _descendants(self.process.pid)
        self.process.terminate()
        for pid in sessions:
            try:
                os.kill(pid, 15)
            except OSError:
                pass
        self.process.wait(60)
        self.process = None

    @property
    def host_key(self) -> str:
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def config_for(self, alias: str, **options: str) -> str:
        """A `Host` block of an ssh config. An option that is "" is left out."""
        words = {"HostName": "127.0.0.1", "Port": str(self.port), "User": self.user, "IdentityFile": str(self.key), "IdentitiesOnly": "yes",
                 "IdentityAgent": "none", "UserKnownHostsFile": str(self.folder / "known_hosts"), "GlobalKnownHostsFile": "/dev/null"}
        words.update(options)
        return f"Host {alias}\n" + "".join(f"    {key} {value}\n" for key, value in words.items() if value)

    def config_and(self, alias: str, **options: str) -> None:
        """One more `Host` block in our ssh config file."""
        self.config.write_text(self.config.read_text() + self.config_for(alias, **options))

    @property
    def connections(self) -> int:
        """How many TCP connections there have been so far."""
        return self.log.read_text(errors="replace").count("Connection from ")

    @property
    def logins(self) -> int:
        """How many connections have logged in so far."""
        return self.log.read_text(errors="replace").count("Accepted publickey")


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found
