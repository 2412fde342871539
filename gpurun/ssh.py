"""SSH to a host, as OpenSSH would go there. The only file that imports Fabric; its callers import it when they need it.

What the user's ssh config means is asked from OpenSSH itself (`ssh -G`), since paramiko's parser knows neither Include nor all of
Match. paramiko does the connection, Fabric holds it and goes through jump hosts. Two things of theirs are replaced: which host key is
accepted (an error must name file and line; a host never seen is pinned in a file of gpurun's own), and which keys are offered in
which order (OpenSSH's order, IdentitiesOnly, a passphrase asked for on the terminal or not at all).

Every wait has a bound. Nothing is read from a terminal but a key's passphrase, and no remote terminal is ever asked for.
"""

from __future__ import annotations

import base64
import getpass
import logging
import os
import posixpath
import re
import selectors
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurun import known_hosts
from gpurun.errors import HostKeyError, SSHError
from gpurun.files import atomic_write, make_private_dir
from gpurun.paths import config_dir

if TYPE_CHECKING:
    from gpurun.config import Host

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # a newer cryptography calls ciphers of paramiko deprecated, on the user's screen
        import fabric
        import paramiko
        from paramiko.agent import AgentSSH
        from paramiko.auth_strategy import AuthStrategy
        from gpurun import channels
except ImportError as error:
    raise SSHError(f"Fabric, which gpurun needs for SSH, can't be loaded here: {error}. Another package of this Python has probably "
                   "replaced something it needs; install gpurun in an environment of its own (pipx install gpurun).") from error

# paramiko logs a traceback for each broken connection, and without a handler Python prints it on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_S = 15            # to open a TCP connection, unless ConnectTimeout says otherwise
BANNER_S = 30             # a busy sshd, or one that looks up our address, takes its time to say hello
HANDSHAKE_S = 60          # banner and key exchange together
AUTH_S = 30
CHANNEL_S = 30            # for the answer to "open a channel"
KEEPALIVE_S = 15          # keeps NAT entries alive
DEAD_S = 45               # what we sent stays unacknowledged for this long: the connection is dead (TCP_USER_TIMEOUT)
NO_PROGRESS_S = 120       # of an upload: the last 2 MiB may sit in the window, and take a minute at 256 kbit/s
LINGER_S = 1.0            # for the end of the output after the exit code: a process left behind may hold it open for ever
MAX_OUTPUT = 8 << 20      # of one command; ours write a few KB
MAX_HOPS = 8
SEND_BYTES = 1 << 15      # paramiko's largest packet
PASSPHRASE_TRIES = 3

connections_opened = 0    # by this process, jump hosts included


def _quiet(_text: str) -> None:
    pass


# ---- what the ssh config says ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Target:
    """Where and how to connect: the ssh config's word on one host, all tokens and `~` expanded."""

    text: str                                # what the user wrote
    hostname: str
    user: str
    port: int = 22
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str = ""                 # path of the agent's socket, "" for none
    proxy_jump: str = ""
    proxy_command: str = ""
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    host_key_alias: str = ""
    strict: str = "ask"                      # StrictHostKeyChecking: yes, no, accept-new, ask
    connect_timeout_s: float = CONNECT_S
    alive_interval_s: float = 0
    pins: str = ""                           # where the key of a host never seen before is kept; "" for gpurun's own file
    source: str = field(default="ssh -G", compare=False)   # or why OpenSSH wasn't asked

    @property
    def key_name(self) -> str:
        return known_hosts.lookup_name(self.hostname, self.port, self.host_key_alias)

    @property
    def where(self) -> str:
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}" + (f":{self.port}" if self.port != 22 else "")

    def __str__(self) -> str:
        return self.text if self.text in (self.where, self.hostname) else f"{self.text} ({self.where})"


def resolve(host: Host) -> Target:
    """What `ssh HOST` would use. $GPURUN_SSH_CONFIG names another config file, as `ssh -F` does."""
    return _resolve(host.text, host.hostname, host.user, host.port)


def _resolve(text: str, name: str, user: str = "", port: int = 0) -> Target:
    client = shutil.which("ssh")
    if client:
        words, source = _ask_openssh(client, text, name, user, port), "ssh -G"
    else:
        words, source = _ask_paramiko(text, name), "no ssh client here: read by paramiko, which knows no Include and little of Match"

    def one(key: str, default: str = "") -> str:
        return words.get(key, [default])[0]

    def off(value: str) -> str:
        return "" if value.lower() in ("none", "") else value

    target = Target(text=text, hostname=one("hostname", name), user=user or one("user") or getpass.getuser(),
                    port=port or int(one("port", "22")), identities_only=one("identitiesonly") in ("yes", "true"),
                    proxy_jump=off(one("proxyjump")), host_key_alias=one("hostkeyalias"), source=source,
                    strict={"true": "yes", "false": "no", "off": "no"}.get(one("stricthostkeychecking", "ask"),
                                                                            one("stricthostkeychecking", "ask")),
                    connect_timeout_s=_seconds(one("connecttimeout")) or CONNECT_S,
                    alive_interval_s=_seconds(one("serveraliveinterval")))
    known = {"h": target.hostname, "p": str(target.port), "r": target.user, "n": name, "k": target.host_key_alias or name,
             "u": _local_user(), "d": _home(), "l": socket.gethostname(), "L": socket.gethostname().split(".")[0],
             "i": str(os.getuid()) if hasattr(os, "getuid") else "", "%": "%"}

    def path(value: str) -> str:
        value = re.sub(r"%(.)", lambda found: known.get(found[1], found[0]), value)
        value = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], ""), value)
        return _home() + value[1:] if value == "~" or value.startswith("~/") else os.path.expanduser(value)

    def paths(key: str) -> tuple[str, ...]:
        found = []
        for value in words.get(key, []):   # -G prints a list of files on one line without quotes
            found += [value] if os.path.exists(path(value)) else value.split()
        return tuple(path(value) for value in found if off(value))

    agent = one("identityagent", "SSH_AUTH_SOCK")
    agent = os.environ.get(agent.removeprefix("$"), "") if re.fullmatch(r"\$\w+|SSH_AUTH_SOCK", agent) else path(off(agent))
    command = off(one("proxycommand"))
    return replace(target, identity_agent=agent, proxy_command=re.sub(r"%(.)", lambda found: known.get(found[1], found[0]), command),
                   identity_files=tuple(path(value) for value in words.get("identityfile", []) if off(value)),
                   certificate_files=tuple(path(value) for value in words.get("certificatefile", []) if off(value)),
                   user_known_hosts=paths("userknownhostsfile"), global_known_hosts=paths("globalknownhostsfile"))


def _ask_openssh(client: str, text: str, name: str, user: str, port: int) -> dict[str, list[str]]:
    argv = [client, "-G"]
    if os.environ.get("GPURUN_SSH_CONFIG"):
        argv += ["-F", os.environ["GPURUN_SSH_CONFIG"]]
    argv += (["-l", user] if user else []) + (["-p", str(port)] if port else []) + ["--", name]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise SSHError(f"{shlex.join(argv)} did not answer in 30 s: a 'Match exec' or 'CanonicalizeHostname' in the ssh config "
                       "waits for something. Run it by hand to see.") from None
    except OSError as error:
        raise SSHError(f"{client} can't be started: {error.strerror}") from None
    if done.returncode:
        raise SSHError(f"the ssh config for {text} can't be read:\n{_last_lines(done.stderr)}\n"
                       f"({shlex.join(argv)} says so, exit code {done.returncode})")
    words: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        words.setdefault(key.lower(), []).append(value)
    return words


def _ask_paramiko(text: str, name: str) -> dict[str, list[str]]:
    own = os.environ.get("GPURUN_SSH_CONFIG")
    words: dict[str, list[str]] = {}
    for file in [own] if own else [f"{_home()}/.ssh/config", "/etc/ssh/ssh_config"]:
        if not os.path.exists(file):
            continue
        try:
            found = paramiko.SSHConfig.from_path(file).lookup(name)
        except Exception as error:   # a parser's own errors, and what it meets on the way; all of them mean this file
            raise SSHError(f"the ssh config {file} can't be read for {text}: {error}") from None
        for key, value in found.items():
            if key != "hostname" or value != name:
                words.setdefault(key, value if isinstance(value, list) else [value])
    words.setdefault("identityfile", [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")])
    words.setdefault("userknownhostsfile", ["~/.ssh/known_hosts ~/.ssh/known_hosts2"])
    words.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"])
    return words


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):   # a container that runs with a uid of nobody
        return str(os.getuid())


def _home() -> str:
    """OpenSSH asks the user database and not $HOME; with a config file of its own the paths in it are usually absolute anyway."""
    try:
        import pwd
        return pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        return os.path.expanduser("~")


def _seconds(value: str) -> float:
    return float(value) if value.isdigit() else 0.0


def _last_lines(output: bytes, count: int = 10) -> str:
    return "\n".join("  " + line for line in output.decode("utf-8", "replace").split("\n")[-count - 1:] if line.strip())


def _hops(jump: str) -> list[tuple[str, str, int]]:
    """ProxyJump's value to (host, user, port) in the order of travel."""
    hops = []
    for text in jump.split(","):
        text = text.strip().removeprefix("ssh://").rstrip("/")
        user, _, rest = text.rpartition("@")
        found = re.fullmatch(r"\[([^]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?", rest)
        if not found:
            raise SSHError(f"ProxyJump {jump!r}: {text!r} isn't user@host:port")
        hops.append((found[1] or found[3], user, int(found[2] or found[4] or 0)))
    return hops


# ---- host keys ---------------------------------------------------------------------------------------------------------------

class _HostKeys(paramiko.MissingHostKeyPolicy):
    """Decides on the key that the host shows. paramiko is given no known keys of its own, so it asks here each time, before it logs in."""

    def __init__(self, target: Target, say: Callable[[str], None]) -> None:
        self.target, self.say = target, say
        self.pins = Path(target.pins or os.path.join(config_dir(), "known_hosts"))
        # Who has set "check nothing, remember nothing" for a pool of hosts behind one name can't be served by a pin.
        self.forgetful = target.strict == "no" and all(path == os.devnull for path in target.user_known_hosts)
        paths = [*target.user_known_hosts, *target.global_known_hosts] + ([] if self.forgetful else [str(self.pins)])
        self.known = known_hosts.find(target.key_name, paths)
        # As OpenSSH: for a host on another port a key filed under the plain name is good too, but says nothing if it differs.
        self.also_good = [] if target.host_key_alias or target.port == 22 else known_hosts.find(target.hostname.lower(), paths)

    def transport(self, sock: Any, **options: Any) -> paramiko.Transport:
        """Ask for a key of a type that is known, or a second key of that host would look like a changed one."""
        transport = channels.Transport(sock, **options)
        names = {line.key_type for line in [*self.known, *self.also_good] if not line.revoked}
        if "ssh-rsa" in names:
            names |= {"rsa-sha2-512", "rsa-sha2-256"}
        security = transport.get_security_options()
        security.key_types = sorted(security.key_types, key=lambda name: name not in names)
        return transport

    def missing_host_key(self, _client: Any, _hostname: str, key: paramiko.PKey) -> None:
        target, shown = self.target, key.get_base64()
        seen = f"{key.get_name()} {known_hosts.fingerprint(shown)}"
        for line in [*self.known, *self.also_good]:
            if line.revoked and line.key == shown:
                raise HostKeyError(f"{target} shows the host key {seen}, which {line.path} line {line.line} calls revoked. "
                                   "Nothing was sent. Ask who runs this host.")
        good = [line for line in self.known if not line.revoked]
        if any(line.key == shown for line in [*good, *self.also_good]):
            return
        if good:
            lines = "\n".join(f"  known: {line.key_type} {known_hosts.fingerprint(line.key)}  ({line.path} line {line.line})"
                              for line in good)
            files = dict.fromkeys(line.path for line in good)
            remove = "\n".join(f"  ssh-keygen -R {shlex.quote(target.key_name)} -f {shlex.quote(path)}" for path in files)
            raise HostKeyError(f"the host key of {target} has changed. Nothing was sent to it.\n{lines}\n  shown: {seen}\n"
                               "Either the host was set up anew, or something stands between. If you know that it was set up anew:\n"
                               f"{remove}\nand run the same command again.")
        if target.strict == "yes":
            raise HostKeyError(f"{target} shows the host key {seen}, no known_hosts file has one for {target.key_name}, and the ssh "
                               "config says 'StrictHostKeyChecking yes'. Check the fingerprint and add the key with "
                               f"'ssh-keyscan', or run 'ssh {target.text}' without that setting once.")
        if self.forgetful:
            self.say(f"{target}: host key {seen} not checked ('StrictHostKeyChecking no' and no known_hosts file in the ssh config)")
            return
        known_hosts.pin(self.pins, target.key_name, key.get_name(), shown)
        self.say(f"{target}: host key {seen} pinned" if target.pins else
                 f"{target}: never seen before, host key {seen} accepted and pinned in {self.pins}")


# ---- logging in --------------------------------------------------------------------------------------------------------------

class _Agent(AgentSSH):
    """The ssh-agent at one socket; paramiko's own class knows only $SSH_AUTH_SOCK and not IdentityAgent."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if not path or not hasattr(socket, "AF_UNIX"):
            return
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(60)   # an agent may ask its owner before it signs
        try:
            sock.connect(path)
            self._connect(sock)
        except (OSError, paramiko.SSHException):
            sock.close()
            self._keys = ()


class _Encrypted(Exception):
    """This key needs a passphrase."""


_unlocked: dict[str, paramiko.PKey] = {}   # so that a retry, or a second host, doesn't ask again


def _load_key(path: str, passphrase: str | None = None) -> paramiko.PKey:
    """The private key in a file; _Encrypted, or SSHError with what is wrong with the file."""
    if path in _unlocked:
        return _unlocked[path]
    try:
        mode = os.stat(path).st_mode
        Path(path).read_bytes()
    except OSError as error:
        raise SSHError(f"key {path} can't be read: {error.strerror}") from None
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077 and os.stat(path).st_uid == os.getuid():
        raise SSHError(f"key {path} may be read by others (mode {stat.S_IMODE(mode):04o}) and isn't used, as in OpenSSH: "
                       f"chmod 600 {path}")
    problem = ""
    for kind in (paramiko.Ed25519Key, paramiko.RSAKey, paramiko.ECDSAKey):
        try:
            return kind.from_private_key_file(path, passphrase)
        except paramiko.PasswordRequiredException:
            raise _Encrypted(path) from None
        except Exception as error:   # cryptography and bcrypt have errors of their own for what they can't read
            problem = problem or str(error)
    raise SSHError(f"key {path} can't be used: {'wrong passphrase, or ' if passphrase else ''}{problem or 'unknown format'}")


def own_key(path: str) -> str:
    """The public key, as one line of text, of gpurun's own key in this file; made (0600) when it isn't there yet. For machines that are
    rented, which know no key of the user's. SSHError with what is wrong with the file."""
    if not os.path.lexists(path):
        from cryptography.hazmat.primitives import serialization as form   # what paramiko stands on
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        key = Ed25519PrivateKey.generate().private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        try:
            make_private_dir(os.path.dirname(path))
            atomic_write(path, key)
        except OSError as error:
            raise SSHError(f"{error.filename or path} can't be written: {error.strerror}; gpurun's SSH key for rented machines belongs there") from None
    known = _load_key(path)
    return f"{known.get_name()} {known.get_base64()} gpurun@{socket.gethostname()}"


def _public_part(path: str) -> bytes:
    """The public key that belongs to an identity file, without a passphrase: from FILE.pub, FILE itself, or OpenSSH's private format."""
    for candidate in (path + ".pub", path):
        try:
            text = Path(candidate).read_text("ascii", "replace")
        except OSError:
            continue
        fields = text.split()
        try:
            if len(fields) >= 2 and re.match(r"(ssh|ecdsa|sk)-", fields[0]):
                return base64.b64decode(fields[1])
            if "BEGIN OPENSSH PRIVATE KEY" in text:   # magic, then cipher, kdf, its options, a count, the public key
                raw = base64.b64decode("".join(text.split("-----")[2].split()))[len(b"openssh-key-v1\0"):]
                for _ in range(3):
                    raw = raw[4 + int.from_bytes(raw[:4], "big"):]
                return raw[8:8 + int.from_bytes(raw[4:8], "big")]
        except (ValueError, IndexError):
            continue
    return b""


def _ask_passphrase(path: str) -> str | None:
    """None: there is no terminal to ask on."""
    if os.name == "posix":
        try:
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))   # getpass would read stdin instead, which may be the job list
        except OSError:
            return None
    return getpass.getpass(f"Passphrase for {path}: ")


class _Login(AuthStrategy):
    """Offers keys in OpenSSH's order: the agent's keys that the config names, its other keys unless IdentitiesOnly, then the files."""

    def __init__(self, target: Target) -> None:
        super().__init__(ssh_config=None)
        self.target = target
        self.tried: list[str] = []
        self.notes: list[str] = []

    def get_sources(self) -> Iterator[tuple[str, paramiko.PKey]]:
        target = self.target
        named = {path: _public_part(path) for path in target.identity_files}
        agent_keys = list(_Agent(target.identity_agent).get_keys())
        wanted = [blob for blob in named.values() if blob]
        mine = sorted((key for key in agent_keys if key.asbytes() in wanted), key=lambda key: wanted.index(key.asbytes()))
        others = [] if target.identities_only else [key for key in agent_keys if key not in mine]
        for key in mine + others:
            yield f"{key.comment or key.get_name()} of the agent", key
        held = {key.asbytes() for key in agent_keys}
        encrypted = []
        for path, blob in named.items():
            if not os.path.lexists(path) or path.endswith(".pub") or (blob and blob in held):
                continue
            try:
                key = _load_key(path)
            except _Encrypted:
                encrypted.append(path)
            except SSHError as error:
                self.notes.append(str(error))
            else:
                yield from self._with_certificates(path, key)
        for path in encrypted:   # last, so that nobody is asked for a passphrase that isn't needed
            key = self._unlock(path)
            if key is not None:
                yield from self._with_certificates(path, key)

    def _with_certificates(self, path: str, key: paramiko.PKey) -> Iterator[tuple[str, paramiko.PKey]]:
        for certificate in [path + "-cert.pub", *self.target.certificate_files]:
            if not os.path.exists(certificate):
                continue
            try:
                key.load_certificate(certificate)
            except (paramiko.SSHException, ValueError, OSError):
                continue   # of another key, or none that paramiko can read
            yield f"{path} with {certificate}", key
            key.public_blob = None
        yield path, key

    def _unlock(self, path: str) -> paramiko.PKey | None:
        for _ in range(PASSPHRASE_TRIES):
            passphrase = _ask_passphrase(path)
            if passphrase is None:
                self.notes.append(f"key {path} has a passphrase and there is no terminal to ask for it: run 'ssh-add {path}' first")
                return None
            if not passphrase:
                break
            try:
                _unlocked[path] = _load_key(path, passphrase)
                return _unlocked[path]
            except SSHError as error:
                problem = str(error)
                continue
        self.notes.append(problem if passphrase else f"key {path}: no passphrase was given")
        return None

    def authenticate(self, transport: paramiko.Transport) -> None:
        target = self.target
        try:   # OpenSSH begins with this too: some servers let in whom the network vouches for
            if not transport.auth_none(target.user):
                return
        except paramiko.BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                raise SSHError(f"{target} doesn't take keys, only {', '.join(error.allowed_types)}. gpurun logs in with a key: "
                               "ask who runs this host to allow publickey.") from None
        except paramiko.AuthenticationException:
            pass
        for what, key in self.get_sources():
            self.tried.append(what)
            try:
                more = transport.auth_publickey(target.user, key)
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error).lower():
                    raise SSHError(f"{target} did not answer within {AUTH_S} s to the login with key {what}") from None
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not transport.is_active():
                    raise SSHError(self._refusal("hung up after")) from error
                self.notes.append(f"key {what}: {error}")
            else:
                if more:
                    raise SSHError(f"{target} takes the key {what} and then wants {', '.join(more)} too, which gpurun can't give. "
                                   "Ask who runs this host for a login that a key is enough for.")
                return
        raise SSHError(self._refusal("refused"))

    def _refusal(self, did: str) -> str:
        target = self.target
        text = f"login as {target.user} on {target} failed: it {did} "
        text += (f"{len(self.tried)} key(s): {', '.join(self.tried)}." if self.tried
                 else "everybody without a key, and there was none to offer.")
        text += "".join(f"\n  {note}" for note in self.notes)
        if len(self.tried) > 4 and not target.identities_only:
            text += "\n  Many agent keys were offered first: 'IdentityFile' with 'IdentitiesOnly yes' in the ssh config offers one."
        if not self.tried:
            text += "".join(f"\n  no such file: {path}" for path in target.identity_files if not os.path.lexists(path))
        if target.pins:                       # a rented machine: nobody ever puts a key there by hand
            return text + "\n  That key is gpurun's own, and gpurun registers it with the provider by itself: the machine hasn't taken it, or not yet."
        return text + f"\n  'ssh {target.text} true' should work without a question; 'ssh-copy-id {target.text}' puts a key there."


# ---- the connection ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Result:
    """What a remote command left: its exit code (-1 where a signal ended it) and all it wrote."""

    code: int
    stdout: bytes
    stderr: bytes

    def last_lines(self) -> str:
        """For an error: the last ten lines of stderr, or of stdout where there are none."""
        return _last_lines(self.stderr) or _last_lines(self.stdout) or "  (no output)"


class _NotYet(Exception):
    """Not there, or not yet: worth another try while a machine boots."""


def remote_path(path: str) -> str:
    """A path for a POSIX shell on the host; `~` is the home folder there."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path[1:] else "")
    return shlex.quote(path)


class Connection:
    """One SSH connection to a host, through its jump hosts. `with Connection(host) as ssh: ssh.run(…)`.

    `connect_within_s`: how long to try again while the port is closed, silent or resets, as on a machine that boots; 0: one attempt.
    `say` is told what the user should know (a key that was pinned).
    """

    def __init__(self, host: Host | Target, say: Callable[[str], None] = _quiet, connect_within_s: float = 0.0) -> None:
        self.target = host if isinstance(host, Target) else resolve(host)
        self.say, self.connect_within_s = say, connect_within_s
        self._fabrics: list[fabric.Connection] = []
        self._proxies: list[tuple[subprocess.Popen[bytes], Any]] = []
        self._forwards = True                 # it isn't known yet that the server opens no channels to sockets
        self.rtt_s = 0.0                      # of what was asked so far the quickest answer; 0 before

    def __enter__(self) -> Connection:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Connection:
        """Connect and log in, once. HostKeyError, or SSHError with the host, what was tried and what to look at."""
        if self._fabrics:
            return self
        deadline, pause = time.monotonic() + self.connect_within_s, 0.2
        while True:
            try:
                self._open_hop(self.target, deadline, 0)
                return self
            except _NotYet as error:
                self.close()
                left = deadline - time.monotonic()
                if left <= 0:
                    tried = f" (tried for {self.connect_within_s:.0f} s)" if self.connect_within_s else ""
                    raise SSHError(str(error) + tried) from None
                time.sleep(min(pause, left))
                pause = min(pause * 2, 3.0)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        for opened in reversed(self._fabrics):
            opened.close()
            opened.client.close()   # Fabric closes only what it has seen open; a login that failed has a socket and a thread too
        self._fabrics.clear()
        for process, stderr in self._proxies:
            process.terminate()   # it sees its stdin close as well, but may not care
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            stderr.close()
        self._proxies.clear()

    def _open_hop(self, target: Target, deadline: float, depth: int,
                  before: Sequence[tuple[str, str, int]] | None = None) -> fabric.Connection:
        """Open the connection to `target`, after those of its jump hosts. `before`: the hops on the way, where a chain gave them."""
        global connections_opened
        if depth > MAX_HOPS:
            raise SSHError(f"ProxyJump of {self.target}: more than {MAX_HOPS} hosts on the way; does one of them lead back to itself?")
        hops = before if before is not None else _hops(target.proxy_jump) if target.proxy_jump else []
        # `Host *` with a ProxyJump is about the jump host too, which OpenSSH then reaches directly.
        hops = hops if hops and hops[-1][0] not in (target.text, target.hostname) else []
        gateway, options = None, {}
        if hops:
            name, user, port = hops[-1]
            gateway = self._open_hop(_resolve(name, name, user, port), deadline, depth + 1, hops[:-1] or None)
        elif target.proxy_command and before is None:
            options["sock"] = self._start_proxy(target)
        else:
            options["sock"] = self._dial(target)
        connections_opened += 1
        banner_s = max(1.0, min(BANNER_S, deadline - time.monotonic())) if self.connect_within_s else BANNER_S
        policy, login = _HostKeys(target, self.say), _Login(target)
        config = fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig(),   # lazy, with an ssh config: Fabric reads no file itself
                               overrides={"authentication": {"strategy_class": lambda **_: login}})
        opened = fabric.Connection(target.hostname, user=target.user, port=target.port, config=config, gateway=gateway,
                                   forward_agent=False, connect_timeout=HANDSHAKE_S,
                                   connect_kwargs=dict(options, banner_timeout=banner_s, auth_timeout=AUTH_S, channel_timeout=CHANNEL_S,
                                                       transport_factory=policy.transport))
        self._fabrics.append(opened)
        opened.client.set_missing_host_key_policy(policy)
        try:
            opened.open()
        except (SSHError, KeyboardInterrupt):
            raise
        except paramiko.ChannelException as error:
            raise SSHError(f"the jump host {gateway.host} can't reach {target}: {error.text}") from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _NotYet(self._no_session(target, error)) from None
        opened.transport.set_keepalive(int(min(KEEPALIVE_S, target.alive_interval_s or KEEPALIVE_S)))
        return opened

    def _no_session(self, target: Target, error: BaseException) -> str:
        for process, stderr in self._proxies:
            stderr.seek(0)
            said = stderr.read()
            if said.strip() or process.poll() is not None:
                return (f"the ProxyCommand for {target} gave no SSH session (exit code {process.poll()}): {target.proxy_command}\n"
                        f"{_last_lines(said)}")
        problem = str(error) or "the connection was closed"
        if "banner" in problem.lower():
            problem = f"something listens there but doesn't say hello as SSH does ({problem})"
        return f"no SSH session with {target}: {problem}. Is sshd up on that port?"

    def _dial(self, target: Target) -> socket.socket:
        try:
            sock = socket.create_connection((target.hostname, target.port), target.connect_timeout_s)
        except socket.gaierror as error:
            raise SSHError(f"the name {target.hostname!r} can't be looked up ({error.strerror}). Is there a network, and is the host "
                           f"{target.text!r} in ~/.ssh/config or DNS?") from None
        except TimeoutError:
            raise _NotYet(f"{target} doesn't answer: no TCP connection within {target.connect_timeout_s:.0f} s. "
                          f"Is it up, and does a firewall let port {target.port} through?") from None
        except OSError as error:
            raise _NotYet(f"no connection to {target}: {error.strerror or error}. "
                          f"Is the host up, and sshd on port {target.port}?") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):   # with the keepalives: a dead network shows in a minute, not in a quarter of an hour
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)
        return sock

    def _start_proxy(self, target: Target) -> socket.socket:
        """paramiko's own ProxyCommand knows no shell and spins when the command ends; a socket pair needs neither."""
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()
        with theirs:
            process = subprocess.Popen(["/bin/sh", "-c", "exec " + target.proxy_command], stdin=theirs, stdout=theirs, stderr=stderr,
                                       start_new_session=True)   # our Ctrl-C is ours to handle
        self._proxies.append((process, stderr))
        return ours

    def peer_ip(self) -> str | None:
        """The host's IP address, for a direct connection of another kind; behind a jump host what its name stands for here, or None."""
        sock = self._fabrics[-1].transport.sock
        if not self._proxies and isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
            return str(sock.getpeername()[0]).partition("%")[0].removeprefix("::ffff:")
        try:
            return str(socket.getaddrinfo(self.target.hostname, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return None

    def open_socket(self, path: str, join: Sequence[str], mark: bytes, timeout_s: float = CHANNEL_S) -> channels.Channel:
        """A channel to the unix socket at `path` there; where the server opens none, through the command `join`, whose bytes are behind `mark`.
        SSHError when neither leads there."""
        transport, problem = self._fabrics[-1].transport, "it is known to forward none"
        try:
            if self._forwards:
                try:
                    return channels.to_socket(transport, path, timeout_s)
                except paramiko.SSHException as error:   # nobody is there, or the server won't: it says the same of both
                    problem = getattr(error, "text", "") or str(error)
                    if not join:
                        raise
            channel = channels.to_command(transport, "exec " + shlex.join(join), mark, timeout_s)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise SSHError(f"{self.target}: no channel to {path} could be opened ({problem}; {str(error) or 'no answer'})") from None
        self._forwards = False                # somebody is there, so the server won't: the next one needs no try
        return channel

    def run(self, command: str, stdin: bytes | None = None, timeout_s: float = 60.0) -> Result:
        """Run a command by the user's shell there, without a terminal, and wait for it, at most `timeout_s`.

        Channels of paramiko rather than Fabric's `run`: bytes stay bytes, and a bound that closes the channel is a bound.
        """
        chunks = [stdin[at:at + SEND_BYTES] for at in range(0, len(stdin), SEND_BYTES)] if stdin else []
        return self._exec(command, chunks, timeout_s=timeout_s)

    def put(self, local_path: str | os.PathLike[str], path: str, progress: Callable[[int], None] | None = None) -> None:
        """Copy a file to `path` there (mode 0600), whole or not at all; a missing folder is made (0700). No sftp is needed there.

        `progress` is called with the count of bytes sent. Gives up when none was taken for a while, however long the whole takes.
        """
        size = os.path.getsize(local_path)
        temp, final = remote_path(f"{path}.tmp-{os.getpid()}-{time.time_ns() & 0xffffff:x}"), remote_path(path)
        folder = remote_path(posixpath.dirname(path) or ".")
        # The count is checked there: when a connection breaks, cat sees an end of file like any other. One line and no "!", since the
        # login shell reads it first, and that may be csh.
        script = (f"umask 077; if mkdir -p {folder} && cat > {temp} && test $(wc -c < {temp}) -eq {size} && mv -f {temp} {final}; "
                  f"then exit 0; else rm -f {temp}; exit 1; fi")

        def blocks() -> Iterator[bytes]:
            with open(local_path, "rb") as file:
                while block := file.read(SEND_BYTES):
                    yield block

        done = self._exec(f"exec sh -c {shlex.quote(script)}", blocks(), idle_s=NO_PROGRESS_S, progress=progress)
        if done.code:
            raise SSHError(f"{self.target}: {path} could not be written (exit code {done.code}):\n{done.last_lines()}")

    def _exec(self, command: str, chunks: Iterable[bytes], timeout_s: float | None = None, idle_s: float | None = None,
              progress: Callable[[int], None] | None = None) -> Result:
        short = command if len(command) <= 200 else command[:197] + "..."
        try:
            asked = time.monotonic()
            channel = self._fabrics[-1].transport.open_session(timeout=CHANNEL_S)
            took_s = time.monotonic() - asked
            self.rtt_s = min(self.rtt_s or took_s, took_s)
            channel.settimeout(CHANNEL_S)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise SSHError(f"{self.target} did not start the command ({error or 'connection closed'}): {short}") from None
        channel.settimeout(None)   # the writer is freed by the close below
        sent, problem = 0, None

        def write() -> None:
            nonlocal sent, problem
            try:
                for chunk in chunks:
                    channel.sendall(chunk)
                    sent += len(chunk)
                channel.shutdown_write()
            except (OSError, EOFError) as error:   # the command ended without reading it all: its exit code tells; or a local file broke
                problem = error
                if not channel.closed:
                    channel.close()

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        size, told, moved, exited = 0, -1, time.monotonic(), None
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            try:
                begun = time.monotonic()
                while True:
                    selector.select(0.1)
                    now = time.monotonic()
                    if exited is None and channel.exit_status_ready():
                        exited = now
                    ended = channel.closed or (exited is not None and (channel.eof_received or now > exited + LINGER_S))
                    before = size
                    for name, ready, receive in (("stdout", channel.recv_ready, channel.recv),
                                                 ("stderr", channel.recv_stderr_ready, channel.recv_stderr)):
                        while ready():
                            output[name].append(receive(1 << 16))
                            size += len(output[name][-1])
                            if size > MAX_OUTPUT:
                                raise SSHError(f"{self.target}: more than {MAX_OUTPUT >> 20} MiB of output, given up: {short}")
                    if sent != told or size != before:
                        moved = now
                    if sent != told and progress:
                        progress(sent)
                    told = sent
                    if ended:
                        break
                    if timeout_s is not None and now - begun > timeout_s:
                        raise SSHError(f"{self.target}: no end after {timeout_s:g} s, given up: {short}")
                    if idle_s is not None and now - moved > idle_s:
                        raise SSHError(f"{self.target}: nothing was taken for {idle_s:g} s after {sent} bytes, given up: {short}")
                    if channel.eof_received:
                        time.sleep(0.005)   # its descriptor stays readable from here on
            finally:
                channel.close()
        writer.join(CHANNEL_S)
        if channel.exit_status < 0 and not self._fabrics[-1].transport.is_active():
            raise SSHError(f"the connection to {self.target} broke while this ran: {short}")
        if channel.exit_status < 0 and isinstance(problem, OSError) and problem.filename:
            raise SSHError(f"{problem.filename} can't be read: {problem.strerror}")
        return Result(channel.exit_status, b"".join(output["stdout"]), b"".join(output["stderr"]))
