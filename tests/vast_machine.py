"""A machine as Vast.ai rents it out: a container with an sshd of its own, reached by two TCP ways that can be made to fail.

The container is a PID and a mount namespace: its own /root, its own processes, `/proc/1/environ` as the service fills it, and the network of
this host. Its first process ends when this process does, however that ends, and everything in it with it.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import re
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from sshd import PYENV, SSHD, keygen

BANNER = "Welcome to vast.ai. If authentication fails, try again after a few seconds, and double check your ssh key.\nHave fun!\n"
PYTHONS = [path for folder in ("/usr/bin", "/usr/local/bin", "/opt/conda/bin", "/venv/main/bin", "/opt/python-venv/bin")
           for path in sorted(Path(folder).glob("python3*")) if re.fullmatch(r"python3(\.\d+)?", path.name)]
START_S = 30.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The first process. It lives until its stdin ends. Of a start of the container before this one only /root is left. `set -m`: what a shell
# puts into the background ignores SIGINT otherwise, and so would every job.
INIT = """\
set -em
{mounts}
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
: > /run/.containerenv
{sshd} -D -e -f {folder}/sshd_config </dev/null &
cd /root
if [ -s /root/onstart.sh ]; then {shell} /root/onstart.sh </dev/null & fi
cat > /dev/null
"""

SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile .ssh/authorized_keys
PidFile none
LogLevel VERBOSE
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
"""

# As the service's hook in .bashrc does it, seen by two clients: without a terminal there is nothing to attach to, and the command is lost.
TMUX = """\
#!/bin/sh
if [ ! -e /root/.no_auto_tmux ]; then echo "no sessions"; exit 0; fi
if [ -n "$SSH_ORIGINAL_COMMAND" ]; then exec /bin/bash -c "$SSH_ORIGINAL_COMMAND"; fi
exec /bin/bash -l
"""

APT_GET = """\
#!/bin/sh
echo "$*" >> {folder}/apt-get.log
case " $* " in *" install "*python3*) for file in {hidden}; do umount "$file"; done ;; esac
"""


@functools.cache
def possible() -> bool:
    """Whether machines can be made here: root, and namespaces of its own."""
    tries = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", "mount -t tmpfs tmpfs /run"]
    return bool(SSHD and shutil.which("unshare")) and os.getuid() == 0 and subprocess.run(tries, capture_output=True).returncode == 0


@dataclass
class Quirks:
    """How a machine differs from a good one."""

    direct: str = "pass"                      # what its two ways in do at first: "pass", "refuse", "reset", "close", "stall"
    proxy: str = "pass"
    account_keys: bool = True                 # whether the account's keys were put in when it was made
    attach_after: float | None = 0.0          # seconds until an attached key is in; None: never
    bad_ownership: bool = False               # sshd won't read authorized_keys
    banner: bool = True
    tmux: bool = False                        # commands are swallowed until /root/.no_auto_tmux exists
    new_host_key: bool = False                # at each start; else one for its life, until it is recycled
    python: bool = True                       # False: no python3 is found
    apt: bool = False                         # an apt-get that can bring python3 back
    without: tuple[str, ...] = ()             # what its first process' environment lacks, as ("CONTAINER_API_KEY",)
    etc_environment: bool = False             # the environment is in /etc/environment too, as in the service's own images
    onstart: bool = True                      # False: the text is stored and not run
    shell: str = "/bin/bash"                  # what runs onstart
    ssh_after: float = 0.0                    # seconds between running and an sshd; connections until then end at once
    files: dict[str, str] = field(default_factory=dict)   # in /root from the start: name to text
    home: Path | None = None                  # a folder whose contents are in /root from the start, as an image would bring them


# ---- the ways in ---------------------------------------------------------------------------------------------------------------

class Way:
    """A TCP port of this process that leads to the machine's sshd, or does what `mode` says.

    "refuse": nobody listens. "reset": accepted and reset. "close": accepted and closed, as by a proxy without a machine. "stall": accepted
    and silent for good. "pass" holds a connection until the machine's sshd listens. What passes already is not touched by a change to
    "refuse" or "stall"; `cut()` ends it.
    """

    def __init__(self, target: Callable[[], int], mode: str = "pass", port: int = 0, host: str = "127.0.0.1") -> None:
        """`target` waits for the machine and gives its sshd's port, 0 for none."""
        self.target, self.host, self.connections = target, host, 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._mode = mode
        self._bind(port)
        self.port: int = self._listener.getsockname()[1]
        self._serve()

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if (mode == "refuse") != (self._mode == "refuse"):
            _shut(self._listener)       # a listening socket can't stop listening and keep its port
            self._bind(self.port)
        self._mode = mode
        self._serve()

    def _bind(self, port: int) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((self.host, port))
        self._listening = False

    def _serve(self) -> None:
        if self._mode != "refuse" and not self._listening:
            self._listening = True
            self._listener.listen(64)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open.add(sock)
            if self._closed:
                return self._end(sock)
            if self._mode == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._end(sock)
            else:
                does = {"pass": self._join, "stall": self._listen_on}.get(self._mode, self._hang_up)
                threading.Thread(target=does, args=(sock,), daemon=True).start()

    def _join(self, sock: socket.socket) -> None:
        other = socket.socket()
        with self._lock:
            self._open.add(other)
        try:
            other.connect(("127.0.0.1", self.target()))
            for one in (sock, other):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._end(other)
            return self._hang_up(sock)
        back = threading.Thread(target=_copy, args=(other, sock), daemon=True)
        back.start()
        _copy(sock, other)
        back.join()
        self._end(sock, other)

    def _hang_up(self, sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self._listen_on(sock)

    def _listen_on(self, sock: socket.socket) -> None:
        """Until the client leaves. Closed with something unread it would be reset."""
        try:
            while sock.recv(1 << 16):
                pass
        except OSError:
            pass
        self._end(sock)

    def _end(self, *socks: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(socks)
        for sock in socks:
            sock.close()

    def cut(self) -> None:
        """Ends every connection that there is."""
        with self._lock:
            socks = list(self._open)
        for sock in socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)      # wakes who copies; close() wouldn't
            except OSError:
                pass

    def close(self) -> None:
        self._closed = True
        _shut(self._listener)
        self.cut()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 18):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _shut(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)     # wakes accept()
    except OSError:
        pass
    listener.close()


_given: "collections.deque[int]" = collections.deque(maxlen=500)
_giving = threading.Lock()


def free_ports(count: int, kind: int = socket.SOCK_STREAM) -> list[int]:
    """Ports below those that the kernel hands out by itself: nobody gets one by chance before its user binds it. Each process of `tests/run` has
    a range of its own, and none gives one out again soon."""
    found: list[int] = []
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 9) % 10
    while len(found) < count:
        port = 12000 + 2000 * worker + random.randrange(2000)
        with _giving, socket.socket(socket.AF_INET, kind) as sock:
            if port in _given:
                continue
            try:
                sock.bind(("0.0.0.0", port))
            except OSError:
                continue
            found.append(port)
            _given.append(port)
    return found


# ---- the machine ---------------------------------------------------------------------------------------------------------------

class Machine:
    """One container. `start` and `stop` as often as wanted; `close` takes its disk away too. Its own thread-safety: one caller at a time."""

    def __init__(self, env: dict[str, str], onstart: str, keys: list[str], quirks: Quirks | None = None) -> None:
        self.env, self.onstart, self.quirks = env, onstart, quirks or Quirks()
        self.folder = Path(tempfile.mkdtemp(prefix="vast-machine-"))      # not below a test's folder: process ids in there mean nothing outside
        self.folder.chmod(0o755)
        self.home = self.folder / "root"
        self.log: list[str] = []               # what the container's own processes said: the first, onstart, sshd
        self.starts = 0
        self._keys = [key.strip() for key in keys] if self.quirks.account_keys else []
        self._attached: list[threading.Timer] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._said = threading.Condition()
        self._up = False                       # its sshd listens
        self.port = free_ports(1)[0]

    # -- its life --

    def start(self) -> None:
        """Returns when its sshd listens."""
        self.starts += 1
        self._started = time.monotonic()
        self._furnish()
        env = {key: value for key, value in {"PATH": PATH, "HOME": "/root", **self.env}.items() if key not in self.quirks.without}
        argv = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", str(self.folder / "init")]
        process = self._process = subprocess.Popen(argv, env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                                   start_new_session=True)
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        with self._said:
            self._said.wait_for(lambda: self._up or not self._reader.is_alive(), START_S)
        if not self._up:
            self.stop()
            raise RuntimeError("the machine did not start:\n" + self.text)

    def stop(self) -> None:
        """Ends all that runs in it, at once, as the service does. Its disk stays."""
        process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()          # ends its first process; the kernel ends the rest and only then is that one gone
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        self._reader.join(10)
        process.stdout.close()
        with self._said:
            self._up = False

    def close(self) -> None:
        for timer in self._attached:
            timer.cancel()
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wipe(self) -> None:
        """A new disk and a new host key, as after a recycle. Only when it is stopped."""
        shutil.rmtree(self.home)
        (self.folder / "host_key").unlink(missing_ok=True)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    def said(self, what: str, timeout_s: float = 20.0) -> bool:
        """Waits for a text in its log."""
        with self._said:
            return self._said.wait_for(lambda: what in self.text, timeout_s)

    def ready(self, timeout_s: float = 20.0) -> int:
        """Waits until its sshd listens; its port, or 0."""
        with self._said:
            up = self._said.wait_for(lambda: self._up, timeout_s)
        return self.port if up and time.monotonic() - self._started >= self.quirks.ssh_after else 0

    def processes(self) -> dict[int, str]:
        """What runs in it: process ids as this host has them, and command lines."""
        return descendants(self._process.pid) if self._process else {}

    # -- keys --

    def attach(self, key: str) -> None:
        after = self.quirks.attach_after
        if after is None:
            return
        if after:
            timer = threading.Timer(after, self._add, (key,))
            timer.daemon = True
            self._attached.append(timer)
            timer.start()
        else:
            self._add(key)

    def _add(self, key: str) -> None:
        self._keys.append(key.strip())
        if self.home.exists():
            self._write_keys()

    def detach(self, key: str) -> None:
        path = self.home / ".ssh" / "authorized_keys"
        self._keys = [one for one in self._keys if one != key.strip()]
        if path.exists():
            path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if line.strip() != key.strip()))

    def _write_keys(self) -> None:
        path = self.home / ".ssh" / "authorized_keys"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        old = path.read_text().splitlines() if path.exists() else []       # onstart may have added some
        path.write_text("".join(line + "\n" for line in dict.fromkeys([*old, *self._keys])))
        path.chmod(0o666 if self.quirks.bad_ownership else 0o600)

    # -- what is in it --

    def _furnish(self) -> None:
        quirks, quoted = self.quirks, shlex.quote
        if quirks.new_host_key:
            (self.folder / "host_key").unlink(missing_ok=True)
        if not (self.folder / "host_key").exists():
            keygen(self.folder / "host_key")
        if not self.home.exists():
            if quirks.home:
                shutil.copytree(quirks.home, self.home, symlinks=True)
            self.home.mkdir(mode=0o700, exist_ok=True)
            for name, text in quirks.files.items():
                (self.home / name).parent.mkdir(parents=True, exist_ok=True)
                (self.home / name).write_text(text)
        (self.home / ".vast_containerlabel").write_text(self.env.get("VAST_CONTAINERLABEL", "") + "\n")
        (self.home / "onstart.sh").write_text(self.onstart if quirks.onstart else "")
        self._write_keys()
        options = SSHD_CONFIG.format(port=self.port, folder=self.folder)
        if quirks.banner:
            (self.folder / "banner").write_text(BANNER)
            options += f"Banner {self.folder}/banner\n"
        if quirks.tmux:
            _program(self.folder / "tmux-hook", TMUX)
            options += f"ForceCommand {self.folder}/tmux-hook\n"
        (self.folder / "sshd_config").write_text(options)
        mounts = [f"mount --rbind {self.home} /root"]
        if quirks.python and PYENV.is_dir():      # before the line above: it hides the folder
            (self.home / ".pyenv").mkdir(exist_ok=True)
            mounts.insert(0, f"mount --bind {quoted(str(PYENV))} {self.home}/.pyenv")
        if not quirks.python:
            hidden = sorted({str(path.resolve()) for path in PYTHONS})
            mounts += [f"mount --bind /dev/null {quoted(path)}" for path in hidden]
            if quirks.apt:
                _program(self.folder / "apt-get", APT_GET.format(folder=self.folder, hidden=" ".join(map(quoted, hidden))))
                mounts.append(f"mount --bind {self.folder}/apt-get {shutil.which('apt-get')}")
        if quirks.etc_environment and os.path.exists("/etc/environment"):
            (self.folder / "environment").write_text("".join(f"{key}={value}\n" for key, value in self.env.items() if key not in quirks.without))
            mounts.append(f"mount --bind {self.folder}/environment /etc/environment")
        (self.folder / "init").write_text(INIT.format(mounts="\n".join(mounts), sshd=SSHD, folder=self.folder, shell=quirks.shell))

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        for line in process.stdout:
            with self._said:
                self.log.append(line.decode(errors="replace").rstrip("\r\n"))
                self._up = self._up or "Server listening" in self.log[-1]
                self._said.notify_all()
        with self._said:
            self._up = False
            self._said.notify_all()


def descendants(pid: int) -> dict[int, str]:
    """Process ids and command lines."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found: dict[int, str] = {}
    for one in parents:
        above = parents[one]
        while above and above != pid:
            above = parents.get(above, 0)
        if above:
            try:
                found[one] = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                pass
    return found


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])   # a name may be half of a letter
    except (OSError, IndexError):
        return 0


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def environment(contract: int, api_key: str, direct_port: int, udp: dict[int, int], asked: dict[str, Any]) -> dict[str, str]:
    """What the service gives to a container's first process. `udp`: the port asked for to the real one; `asked`: the create body's `env`."""
    given = {"CONTAINER_ID": str(contract), "VAST_CONTAINERLABEL": f"C.{contract}", "CONTAINER_API_KEY": api_key, "PUBLIC_IPADDR": "127.0.0.1",
             "GPU_COUNT": "1", "DATA_DIRECTORY": "/workspace", **({"VAST_TCP_PORT_22": str(direct_port)} if direct_port else {})}
    given.update({f"VAST_UDP_PORT_{port}": str(real) for port, real in udp.items()})
    return {**{key: str(value) for key, value in asked.items() if not key.startswith("-")}, **given}
