"""The agent file's commands on the node: `start` puts an agent to work and says where it is, `serve` is the agent, `supervise` a phase,
`join` a way to the agent's socket for an SSH server that forwards none.

    python3 agent-<hash>.pyz start --node-dir ~/.gpurun --authorize ID --bind 0.0.0.0:0 --lib DIR [--relay disabled] [--idle-exit-s N]
    python3 agent-<hash>.pyz join --socket PATH

`start` prints one line, `GPURUN-ENDPOINT {…}` or `GPURUN-FAILED {"reason": …}`; the word in front makes it findable in whatever login
shells print. Where iroh can't be loaded, or with `--carrier ssh` isn't to be, the agent has its socket alone. It may be called again at any time, by several at once: an agent of the same file that lives answers at once, an idle one
of another file (or bound where the caller can't reach it) is replaced, a busy one that speaks the same protocol is used as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

EXIT_OLD_PYTHON, EXIT_NO_IROH, EXIT_NO_FOLDER, EXIT_BUSY_OTHER, EXIT_NOT_UP = 10, 11, 12, 13, 14
START_S = 30.0                # for the agent to come up: loading iroh from a cold disk takes a few seconds
REPLACE_S = 10.0
HUNG_AFTER_S = 45.0           # an agent shows every 10 s that it works; on a machine that is out of breath less often
HUNG_LOOK_S = 15.0            # and then it is watched for so long: a machine that was suspended wakes up with old times
LOG_CAP_BYTES = 4 << 20
START_BYTES = 1 << 20         # what an agent writes until it is up, generously
LOGIN_S = 15.0                # a login shell whose start files hang longer than this isn't waited for
PROTOCOL = 2                  # wire.PROTOCOL; `start` doesn't import what it doesn't need


def main(argv: Optional[List[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["supervise"]:
        from gpurun import supervise
        return supervise.main()
    if arguments[:2] == ["join", "--socket"] and len(arguments) == 3:
        from gpurun import sockets
        return sockets.join(arguments[2])
    parser = argparse.ArgumentParser(prog="gpurun agent")
    parser.add_argument("command", choices=["start", "serve"])
    parser.add_argument("--node-dir", required=True)
    parser.add_argument("--authorize", default="")
    parser.add_argument("--bind", default="0.0.0.0:0")
    parser.add_argument("--lib", default="")
    parser.add_argument("--relay", default="disabled")
    parser.add_argument("--carrier", choices=["any", "ssh"], default="any")
    parser.add_argument("--idle-exit-s", type=float, default=86400.0)
    parser.add_argument("--ready-fd", type=int, default=-1)
    options = parser.parse_args(arguments)
    options.node_dir = os.path.abspath(os.path.expanduser(options.node_dir))
    return _start(options) if options.command == "start" else _serve(options)


def _fail(code: int, reason: str) -> int:
    print("GPURUN-FAILED " + json.dumps({"reason": reason}), flush=True)
    return code


def _unwritable(error: OSError, where: str) -> str:
    """What to say of a file that can't be written; of a full disk, how much it lacks."""
    from gpurun.files import FULL, room
    return f"{error.filename or where} can't be written: {error.strerror}" + (f" ({room(where, START_BYTES)})" if error.errno in FULL else "")


# ---- start -----------------------------------------------------------------------------------------------------------------------

def _start(options: argparse.Namespace) -> int:
    from gpurun.files import make_private_dir
    folder = os.path.join(options.node_dir, "agent")
    try:
        make_private_dir(folder)
        # One `start` at a time: the second finds the first one's agent, and no entry of `authorized` is lost between them.
        if not _lock(os.path.join(folder, "start.lock"), START_S):
            return _fail(EXIT_NOT_UP, f"another start of the agent in {folder} hasn't ended yet; try again, or look for its process there")
        if options.authorize:
            _authorize(os.path.join(folder, "authorized"), options.authorize)
    except OSError as error:
        return _fail(EXIT_NO_FOLDER, _unwritable(error, folder))
    known = _living(folder)
    if known is not None and _hung(folder):
        _end(known, (signal.SIGKILL,))       # what runs there outlives it, as ever
        known = None
    if known is not None:
        busy, same = _claimed(folder), known["agent"] == _own_hash()
        if same and _serves(known, options):
            return _found(known, "")
        if busy and known["protocol"] == PROTOCOL:
            return _found(known, f"an agent {'with other settings' if same else 'of another version'} is busy with {busy} and is used as it is")
        if busy:
            return _fail(EXIT_BUSY_OTHER, f"an agent that speaks protocol {known['protocol']} (this one: {PROTOCOL}) is busy with {busy}; "
                                          "wait for it to end, or use the gpurun version that started it")
        _end(known)
    return _launch(options, folder)


def _found(known: Dict[str, Any], note: str) -> int:
    print("GPURUN-ENDPOINT " + json.dumps(dict(known, note=note)), flush=True)
    return 0


def _serves(known: Dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether the living agent can be reached as this `start` asks for: one that was started for this machine only hears nobody else."""
    if known.get("iroh") is not None:        # that one has none: another start would find it as little, unless it was brought meanwhile
        return known.get("carrier") == options.carrier and known.get("lib") == options.lib
    host, _, port = options.bind.rpartition(":")
    bound = str(known.get("bind") or "").rpartition(":")[0]
    return bound in (host, "0.0.0.0") and port in ("0", str(known["port"])) and known.get("relay") == options.relay


def _authorize(path: str, operator_id: str) -> None:
    """Adds an operator's id to the list, one a line; the list only ever grows here."""
    from gpurun.files import atomic_write
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            ids = stream.read().split()
    except FileNotFoundError:
        ids = []
    if operator_id not in ids:
        atomic_write(path, "".join(f"{known}\n" for known in ids + [operator_id]).encode("ascii", "replace"))


def _read(path: str) -> Dict[str, Any]:
    """A small file of the agent's own; one that is missing or broken (a crash, a full disk) says nothing."""
    from gpurun.errors import GpurunError
    from gpurun.files import read_json
    try:
        return read_json(path) or {}
    except GpurunError:
        return {}


def _living(folder: str) -> Optional[Dict[str, Any]]:
    """What the last agent said of itself, if that process still lives."""
    from gpurun import supervise
    known = _read(os.path.join(folder, "endpoint.json"))
    whole = all(type(known.get(name)) is kind for name, kind in (("pid", int), ("start", str), ("port", int), ("agent", str), ("protocol", int)))
    return known if whole and known["start"] and supervise.start_time(known["pid"]) == known["start"] else None


def _claimed(folder: str) -> str:
    return str(_read(os.path.join(folder, "claim.json")).get("run_id") or "")


def _hung(folder: str) -> bool:
    """Whether the agent that lives there has stopped working (a process that was stopped, a machine's fault). One of an older version doesn't show it."""
    def shown() -> int:
        try:
            return os.stat(os.path.join(folder, "alive")).st_mtime_ns
        except OSError:
            return 0

    before, deadline = shown(), time.monotonic() + HUNG_LOOK_S
    if not before or time.time() - before / 1e9 < HUNG_AFTER_S:
        return False
    while shown() == before:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def _end(known: Dict[str, Any], numbers: Sequence[int] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    from gpurun import supervise
    for number in numbers:
        deadline = time.monotonic() + REPLACE_S
        supervise.send(known["pid"], number)
        while time.monotonic() < deadline:
            if supervise.start_time(known["pid"]) != known["start"]:
                return
            time.sleep(0.02)


def _launch(options: argparse.Namespace, folder: str) -> int:
    """Starts `serve` in a session of its own, without our descriptors, and waits for its word on a pipe."""
    log = os.path.join(folder, "log")
    try:
        if os.path.exists(log) and os.path.getsize(log) > LOG_CAP_BYTES:
            os.replace(log, log + ".old")
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _fail(EXIT_NO_FOLDER, _unwritable(error, log))
    logged = os.fstat(output).st_size
    ready, child_end = os.pipe()
    command = [sys.executable, "-I", os.path.abspath(sys.argv[0]), "serve", "--node-dir", options.node_dir, "--bind", options.bind,
               "--lib", options.lib, "--relay", options.relay, "--carrier", options.carrier, "--idle-exit-s", str(options.idle_exit_s), "--ready-fd", str(child_end)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                                   pass_fds=[child_end], cwd="/")
    except OSError as error:
        return _fail(EXIT_NOT_UP, f"{sys.executable} can't be started again as the agent: {error.strerror}")
    os.close(child_end)
    said, deadline = b"", time.monotonic() + START_S
    while not said.endswith(b"\n"):
        if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            process.kill()                   # or it would come up later, unknown to everybody
            return _fail(EXIT_NOT_UP, f"the agent said nothing for {START_S:g} s; its log ({log}) ends: {_tail(log, logged)}")
        more = os.read(ready, 65536)
        if not more:
            return _fail(EXIT_NOT_UP, f"the agent ended while it started; its log ({log}) ends: {_tail(log, logged)}")
        said += more
    answer = json.loads(said.decode("utf-8"))
    if "reason" in answer:
        return _fail(int(answer["code"]), answer["reason"])
    return _found(answer, "")


def _tail(path: str, start: int) -> str:
    """The last lines that were written after `start`."""
    with open(path, "rb") as stream:
        stream.seek(max(start, os.path.getsize(path) - 2000))
        return " | ".join(stream.read().decode("utf-8", "replace").splitlines()[-10:]) or "(empty)"


def _own_hash() -> str:
    """The hash in the name that the operator gave this file: agent-<hash>.pyz."""
    return os.path.basename(sys.argv[0]).rpartition(".")[0].rpartition("-")[2]


# ---- serve -----------------------------------------------------------------------------------------------------------------------

def _serve(options: argparse.Namespace) -> int:
    def tell(fields: Dict[str, Any]) -> None:
        if options.ready_fd >= 0:
            os.write(options.ready_fd, json.dumps(fields).encode("ascii") + b"\n")
            os.close(options.ready_fd)

    sys.stderr = _Log()                      # type: ignore[assignment]
    link, no_iroh = _load_link(options)
    from gpurun import __version__, sockets, supervise, wire
    from gpurun.agent import Agent
    from gpurun.errors import GpurunError
    from gpurun.files import atomic_write
    from gpurun.supervisors import supervisor_command

    folder = os.path.join(options.node_dir, "agent")
    if not _lock(os.path.join(folder, "lock"), REPLACE_S):   # one that is just ending has it for a moment longer
        tell({"code": EXIT_BUSY_OTHER, "reason": f"another agent holds {folder}: of a machine that shares this folder, or one whose "
                                                 "endpoint.json was lost. End it, or use another node_dir"})
        return EXIT_BUSY_OTHER
    try:
        before, endpoint = _read(os.path.join(folder, "endpoint.json")), None
        key_path = os.path.join(folder, "key")
        if link is not None:
            relay: Any = options.relay if options.relay in ("n0", "disabled") else options.relay.split(",")
            endpoint = _bind(link.Link, link.load_key(key_path), options.bind, relay, before)
        # An agent that had iroh keeps its name without: it has the same runs.
        own_id = endpoint.id if endpoint is not None else str(before.get("id") or sockets.own_id(key_path))
        door, no_door = _open_door(folder, own_id)
        if door is not None and endpoint is not None:
            door.take_lane = endpoint.take_lane
        if endpoint is None and door is None:
            tell({"code": EXIT_NO_IROH, "reason": f"{no_iroh}; and no socket can be made for SSH: {no_door}"})
            return EXIT_NO_IROH
        about = {"fast_writes": link.FAST_WRITES} if link is not None else {"iroh": no_iroh}
        agent = Agent(options.node_dir, [one for one in (endpoint, door) if one is not None], _own_hash(), supervisor_command(), LoginEnvironment(), about)
    except (GpurunError, OSError) as error:
        tell({"code": EXIT_NOT_UP, "reason": _unwritable(error, options.node_dir) if isinstance(error, OSError) else str(error)})
        return EXIT_NOT_UP

    def leave(number: int, frame: Any) -> None:   # jobs are in sessions of their own and go on
        if door is not None:
            door.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    known = {"id": own_id, "addresses": endpoint.addresses() if endpoint is not None else [], "port": endpoint.port() if endpoint is not None else 0,
             "port6": endpoint.port6() if endpoint is not None else 0,
             "relay_url": endpoint.relay_url() if endpoint is not None else None, "socket": door.path if door is not None else "",
             "join": [sys.executable, "-I", os.path.abspath(sys.argv[0]), "join", "--socket", door.path] if door is not None else [],
             "iroh": None if endpoint is not None else no_iroh, "lib": options.lib, "carrier": options.carrier, "pid": os.getpid(), "start": supervise.start_time(os.getpid()), "agent": _own_hash(), "version": __version__,
             "protocol": wire.PROTOCOL, "python": ".".join(map(str, sys.version_info[:3])), "bind": options.bind, "relay": options.relay}
    try:
        agent.begin()
        atomic_write(os.path.join(folder, "endpoint.json"), json.dumps(known).encode("ascii"))
    except OSError as error:
        tell({"code": EXIT_NOT_UP, "reason": _unwritable(error, folder)})
        return EXIT_NOT_UP
    tell(known)
    if agent.serve(options.idle_exit_s):
        try:                                 # the port is remembered; that this process lives is no longer of use to anybody
            atomic_write(os.path.join(folder, "endpoint.json"), json.dumps(dict(known, start="")).encode("ascii"))
        except OSError:
            pass
    agent.close()
    return 0


def _load_link(options: argparse.Namespace) -> Tuple[Any, str]:
    """The module that has iroh; or None, and why it can't be had."""
    if options.carrier == "ssh":
        return None, "iroh was not to be loaded on this node"
    if options.lib:
        sys.path.insert(0, options.lib)
    try:
        from gpurun import link
        return link, ""
    except Exception as error:               # an ImportError, an OSError of the loader, whatever generated code raises
        return None, f"iroh can't be loaded on this node from {options.lib or 'its Python'}: {error}"


def _open_door(folder: str, own_id: str) -> Tuple[Any, str]:
    """The socket that SSH leads to; or None, and why it can't be had. An agent that UDP gets through to does without."""
    from gpurun import sockets
    from gpurun.wire import CONTROL_ALPN, TRANSFER_ALPN
    try:
        return sockets.open_door(folder, own_id, [CONTROL_ALPN, TRANSFER_ALPN]), ""
    except OSError as error:
        print(f"no socket for SSH: {error}", file=sys.stderr)
        return None, f"{error.filename or folder}: {error.strerror}"


class _Log:
    """The agent's log, in the place of stderr. What a full disk doesn't take of it is lost: nothing may end because it can't be told."""

    def write(self, text: str) -> int:
        try:
            os.write(2, text.encode("utf-8", "backslashreplace"))
        except OSError:
            pass
        return len(text)

    def flush(self) -> None:
        pass


def _lock(path: str, patience_s: float) -> bool:
    """Holds a file's lock until this process ends; False when another one still has it after `patience_s`."""
    import fcntl
    fd, deadline = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                return False
        except OSError:
            return True                      # a file system without locks: go on without
        time.sleep(0.02)


def _bind(make: Any, key: bytes, bind: str, relay: Any, before: Dict[str, Any]) -> Any:
    """The endpoint, on the ports of the agent before if any will do: operators have them in their caches. And one that was just talking to that agent
    goes on sending to the path that it took then, for half a minute, also what is to open a new connection (iroh 1.2.0)."""
    from gpurun.errors import LinkError
    from gpurun.wire import CONTROL_ALPN, TRANSFER_ALPN
    alpns = [CONTROL_ALPN, TRANSFER_ALPN]
    host, _, port = bind.rpartition(":")
    last, last6 = (before.get(name) if type(before.get(name)) is int else 0 for name in ("port", "port6"))
    if port == "0" and last:
        try:
            return make(key, f"{host}:{last}", alpns, relay, port6=last6)
        except LinkError:
            pass                             # taken meanwhile
    try:
        return make(key, bind, alpns, relay, port6=int(port) or last6)
    except LinkError as error:
        if port == "0":
            raise
        raise LinkError(f"{error}. Most likely another program, or the agent of another node_dir, has UDP port {port} here: end that, or use another "
                        "`udp_port`") from None


class LoginEnvironment:
    """The environment that jobs start from: a login shell's and, in a container, what its first process has besides.

    CUDA's and conda's PATH is set in one of these and nowhere else. Asked once, in the background, when the agent starts.
    """

    MARK = b"GPURUN-ENVIRONMENT\0"
    KEEP = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "SLURM_CONF")   # the last says where the cluster is, as no other SLURM_* does

    def __init__(self) -> None:
        base = {name: os.environ[name] for name in self.KEEP if name in os.environ}
        base["PATH"] = os.environ.get("PATH") or os.defpath
        self._base = base
        self._found: Optional[Dict[str, str]] = None
        self._lock = threading.Lock()
        command = ["bash", "-l", "-c", "printf 'GPURUN-ENVIRONMENT\\0'; exec env -0"]
        # Into a file that has no name, not a pipe: a daemon that a start file leaves running would keep a pipe open for ever.
        self._printed = tempfile.TemporaryFile()
        try:
            self._shell: Optional[subprocess.Popen] = subprocess.Popen(command, env=dict(base, TERM="dumb"), stdin=subprocess.DEVNULL,
                                                                       stdout=self._printed, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError:
            self._shell = None               # no bash: the job itself will say so

    def __call__(self) -> Dict[str, str]:
        with self._lock:
            if self._found is None:
                self._found = self._ask()
            return self._found

    def _ask(self) -> Dict[str, str]:
        found = dict(self._base)
        if self._shell is not None:
            try:
                self._shell.wait(timeout=LOGIN_S)
            except subprocess.TimeoutExpired:
                _end_group(self._shell)
        self._printed.seek(0)
        _, mark, printed = self._printed.read().rpartition(self.MARK)
        self._printed.close()
        found.update(_variables(printed) if mark else {})   # without the mark a start file went another way
        for name in ("SHLVL", "_", "PWD", "OLDPWD", "TERM"):
            found.pop(name, None)
        return _with_container(found)


def _end_group(shell: subprocess.Popen) -> None:
    """TERM first: a start file may hold a lock (pyenv's rehash does) that only it can take away."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(shell.pid, number)
            shell.wait(timeout=2.0)
            return
        except subprocess.TimeoutExpired:
            pass
        except ProcessLookupError:
            shell.wait()
            return


def _variables(printed: bytes) -> Dict[str, str]:
    pairs = (item.partition(b"=") for item in printed.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _with_container(found: Dict[str, str]) -> Dict[str, str]:
    """Adds what only the container's first process has; its PATH entries come behind those that are there."""
    if not (os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")):
        return found
    try:
        with open("/proc/1/environ", "rb") as stream:
            first = _variables(stream.read())
    except OSError:
        return found
    entries = found.get("PATH", "").split(":")
    merged = dict(first, **found)
    merged["PATH"] = ":".join(entries + [entry for entry in first.get("PATH", "").split(":") if entry and entry not in entries])
    return merged
