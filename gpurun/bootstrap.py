"""Put the agent on a node and start it: the agent file, a probe of the node, what it lacks, the start.

iroh can't be imported from a zip, so it lies unpacked beside the agent file; it travels from here, since a node may have no internet. Over SSH all of it takes one
connection: one command that looks, an upload for each part that is missing, one command that starts. What the login shell prints in
between doesn't matter: everything we read is behind a word of our own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpurun.agentfile import agent_file
from gpurun.errors import DeployError, UnfitError
from gpurun.files import FULL, atomic_write, human_bytes, make_private_dir, room
from gpurun.paths import cache_dir
from gpurun.provider import check_endpoint

if TYPE_CHECKING:
    from gpurun.config import Cluster
    from gpurun.ssh import Connection

# The platforms that iroh has wheels for, by `uname -s` and `uname -m`.
WHEELS = {("Linux", "x86_64"): "manylinux_2_28_x86_64", ("Linux", "aarch64"): "manylinux_2_28_aarch64",
          ("Darwin", "arm64"): "macosx_11_0_arm64"}
GLIBC = (2, 28)           # of these wheels
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9", "python3.8", "/usr/bin/python3",
           "/usr/local/bin/python3", "/opt/conda/bin/python3", "/venv/main/bin/python3", "/opt/python-venv/bin/python3", "~/miniconda3/bin/python3", "~/miniforge3/bin/python3")
SPARE_BYTES = 32 << 20    # beside what is sent: logs, and the file system's own needs
PROBE_S, UNPACK_S, START_S = 60.0, 120.0, 90.0
APT_S = 300.0                 # Debian's python3 is 10 MB; a slow mirror has its time
PIP_S = 300.0

Progress = Callable[[str, int, int], None]   # what is sent, bytes sent, bytes in all


# ---- the probe -----------------------------------------------------------------------------------------------------------------

PROBE = r"""
say() { printf '%s=%s\n' "$1" "$2"; }
try_python() { # prints the interpreter itself, where the name was a version manager's shim
  [ -n "$found" ] && return
  path=$(command -v "$1" 2>/dev/null) || return
  said=$("$path" -I -c 'import sys
try:
    import asyncio, concurrent.futures, ctypes, hashlib, json, select, socket, subprocess, threading, zipfile, zlib
    problem = "" if sys.version_info >= (3, 8) else "older than 3.8"
except Exception as error:
    problem = str(error)
print("%s %d.%d.%d %s" % ((sys.executable or "?",) + tuple(sys.version_info[:3]) + (problem or "ok",)))' 2>&1 | tail -n 1)
  case $said in /*) ;; *) said="$path $said" ;; esac
  say python "$said"
  case $said in /*' ok') found=$path ;; esac
}
probe() {
  echo
  echo GPURUN-PROBE-BEGIN
  say os "$(uname -s)"
  say arch "$(uname -m)"
  say home "$HOME"
  say user "$(id -un 2>/dev/null)"
  say uid "$(id -u)"
  say libc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
  say ldd "$(ldd --version 2>&1 | head -n 2 | tr '\n' ' ')"
  for file in /lib/ld-musl-*; do [ -e "$file" ] && say musl "$file"; done
  say node_dir "$dir"
  near=$dir
  while [ -n "$near" ] && [ ! -e "$near" ]; do near=${near%/*}; done
  near=${near:-/}
  say near "$near"
  if [ -d "$near" ] && [ -w "$near" ] && [ -x "$near" ]; then say writable yes; else say writable no; fi
  df -Pk "$near" 2>/dev/null | tail -n 1 | { read -r _ _ _ free _; say free_kib "$free"; }
  for file in "$dir"/agent/agent-*.pyz; do [ -f "$file" ] && say agent "${file##*/} $(wc -c < "$file" | tr -d ' ')"; done
  for file in "$dir"/lib/iroh-*; do [ -f "$file/iroh/__init__.py" ] && say lib "${file##*/}"; done
  pid=$(sed -n 's/.*"pid": *\([0-9][0-9]*\).*/\1/p' "$dir/agent/endpoint.json" 2>/dev/null)
  if [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; then   # where there is a /proc it may tell that the number is another process's by now
    case $(if [ -r "/proc/$pid/cmdline" ]; then tr '\0' ' ' < "/proc/$pid/cmdline"; else echo ' serve '; fi) in *' serve '*) say serving "$pid" ;; esac
  fi
  inside=no
  [ -e /.dockerenv ] || [ -e /run/.containerenv ] || [ -n "$container" ] && inside=yes
  grep -qE 'docker|containerd|kubepods|lxc' /proc/1/cgroup 2>/dev/null && inside=yes
  say container "$inside"
  found=
PYTHONS
  echo GPURUN-PROBE-END
}
probe </dev/null
exit 0
"""


@dataclass(frozen=True)
class Facts:
    """What the probe found. `pythons`: (path, version, "ok" or what is wrong) in the order tried; `agents`: name to size."""

    os: str
    arch: str
    libc: str                                  # "glibc", "musl" or ""
    libc_version: tuple[int, ...]
    node_dir: str
    writable: bool
    near: str                                  # the nearest folder to node_dir that exists
    free_bytes: int
    home: str
    user: str
    uid: int
    container: bool
    pythons: tuple[tuple[str, str, str], ...] = ()
    agents: tuple[tuple[str, int], ...] = ()
    libs: tuple[str, ...] = ()
    serving: int = 0                           # the process of an agent that runs there, 0 for none

    @property
    def python(self) -> str:
        """The Python to use, "" for none."""
        return next((path for path, _, state in self.pythons if state == "ok"), "")


def probe_script(node_dir: str, python: str = "") -> str:
    """For a POSIX sh on its stdin. It looks and changes nothing. A `python` of the cluster file is the only one that is tried."""
    from gpurun.ssh import remote_path
    tries = "\n".join(f"  try_python {remote_path(name)}" for name in ([python] if python else PYTHONS))
    return f"dir={remote_path(node_dir)}\n" + PROBE.replace("PYTHONS", tries)


def parse_probe(output: bytes) -> Facts:
    """The probe's lines, whatever stands before and after them. DeployError with the last lines where they are not all there."""
    text = output.decode("utf-8", "surrogateescape").replace("\r", "")
    found = re.findall(r"^GPURUN-PROBE-BEGIN\n(.*?)^GPURUN-PROBE-END$", text, re.S | re.M)
    if not found:
        raise DeployError("the host's login shell did not run our command, or not to its end. It should run commands that ssh gives it "
                          f"(try: ssh HOST sh -c true) and not end the session in a start file. Its last lines:\n{_tail(output)}")
    lists: dict[str, list[str]] = {"python": [], "agent": [], "lib": [], "musl": []}
    once: dict[str, str] = {}
    for line in found[-1].splitlines():
        key, equals, value = line.partition("=")
        if equals and key in lists:
            lists[key].append(value)
        elif equals:
            once.setdefault(key, value)
    try:
        libc, version = _libc(once["libc"], once["ldd"], bool(lists["musl"]))
        return Facts(os=_filled(once, "os"), arch=_filled(once, "arch"), libc=libc, libc_version=version,
                     node_dir=_absolute(once, "node_dir"), near=_absolute(once, "near"),
                     writable={"yes": True, "no": False}[once["writable"]],
                     free_bytes=int(once["free_kib"]) * 1024 if once.get("free_kib") else -1,   # no df there: unknown
                     home=once["home"], user=once["user"], uid=int(once["uid"]), container=once["container"] == "yes",
                     pythons=tuple(_python_line(line) for line in lists["python"]),
                     agents=tuple((name, int(size)) for name, _, size in (line.rpartition(" ") for line in lists["agent"])),
                     libs=tuple(lists["lib"]), serving=int(once.get("serving", "0")))
    except (KeyError, ValueError) as error:
        raise DeployError(f"the probe of the host gave something that can't be read ({error}). It said:\n{_tail(output, 30)}") from None


def _filled(once: dict[str, str], key: str) -> str:
    if not once[key].strip():
        raise ValueError(f"{key} is empty")
    return once[key]


def _absolute(once: dict[str, str], key: str) -> str:
    if not once[key].startswith("/"):
        raise ValueError(f"{key} is {once[key]!r}")
    return once[key]


def _libc(getconf: str, ldd: str, musl: bool) -> tuple[str, tuple[int, ...]]:
    version = re.search(r"glibc (\d+)\.(\d+)", getconf) or (None if "musl" in ldd else re.search(r"(?i)gnu libc|glibc", ldd) and
                                                             re.search(r"\b(\d+)\.(\d+)\s*(?:Copyright|$)", ldd))
    if version:
        return "glibc", (int(version[1]), int(version[2]))
    if musl or "musl" in ldd:
        number = re.search(r"Version (\d+)\.(\d+)", ldd)
        return "musl", (int(number[1]), int(number[2])) if number else ()
    return "", ()


def _python_line(line: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"(.+?) (\d+\.\d+\.\d+) (.*)", line)
    if found:
        return found[1], found[2], found[3]
    path, _, said = line.partition(" ")
    return path, "", said or "it says nothing"   # a version manager's placeholder, a broken link


def check(facts: Facts, host: str, cluster: Cluster) -> str:
    """The platform of the iroh wheel that works on this node, "" where none does. UnfitError, with the ways out, for a node that can't run the
    agent."""
    where = f"in {cluster.path}" if cluster.path else "in the cluster file"
    if not facts.python:
        if cluster.python:
            said = facts.pythons[0] if facts.pythons else None
            raise UnfitError(f"{host}: `python = \"{cluster.python}\"` {where} " +
                              (f"can't be used: Python {said[1]}: {said[2]}" if said and said[1] else
                               f"can't be used: {said[2]}" if said else "isn't there") +
                              ". The agent needs Python 3.8 or newer with its whole standard library; without that line gpurun looks for one.")
        tried = "".join(f"\n  {path}: {' '.join(part for part in (version, state) if part)}" for path, version, state in facts.pythons)
        raise UnfitError(f"{host} has no Python that the agent can run on (3.8 or newer, with its whole standard library).{tried}\n"
                          f"Install one there (Debian, Ubuntu: apt-get install python3; Alpine: apk add python3), or name one {where}: "
                          "python = \"/path/to/python3\"")
    if not facts.writable:
        raise UnfitError(f"{host}: {facts.node_dir} can't be written by {facts.user or facts.uid} ({facts.near} is a file, read-only or "
                          f"somebody else's). Name another folder {where}: node_dir = \"/path/on/the/node\"")
    return _wheel(facts)[0]


def why_no_iroh(facts: Facts) -> str:
    """Why iroh, which is the fast way between here and there, can't be loaded on this node; "" where it can."""
    return _wheel(facts)[1]


def _wheel(facts: Facts) -> tuple[str, str]:
    arch = {"arm64": "aarch64", "amd64": "x86_64"}.get(facts.arch, facts.arch) if facts.os == "Linux" else facts.arch
    tag = WHEELS.get((facts.os, arch))
    if tag is None:
        return "", f"{facts.os} {facts.arch}, which iroh has no build for"
    needs = "and iroh loads only with glibc 2.28 or newer"
    if facts.os == "Linux" and facts.libc != "glibc":
        return "", f"{'musl' if facts.libc == 'musl' else 'no glibc'} as its C library, {needs}"
    if facts.os == "Linux" and facts.libc_version < GLIBC:
        return "", f"glibc {'.'.join(map(str, facts.libc_version))}, {needs}"
    return tag, ""


class Missing(NamedTuple):
    agent: bool
    iroh: bool


def what_is_missing(facts: Facts, agent: str, agent_size: int, lib: str) -> Missing:
    """What the node lacks of the agent file (its name; a file cut short by a crash counts as missing) and of the iroh folder (`lib`, "" for none)."""
    return Missing((agent, agent_size) not in facts.agents, bool(lib) and lib not in facts.libs)


# ---- iroh for another machine --------------------------------------------------------------------------------------------------

def iroh_version() -> str:
    try:
        return importlib.metadata.version("iroh")
    except importlib.metadata.PackageNotFoundError:
        raise DeployError("the package iroh isn't installed here; install gpurun again (pip install --force-reinstall gpurun)") from None


def iroh_zip(tag: str, say: Callable[[str], None]) -> Path:
    """A zip with the folder iroh/ for this platform: our own copy if it is that, else the wheel, fetched once."""
    version = iroh_version()
    folder = Path(make_private_dir(os.path.join(cache_dir(), "iroh")))
    own = folder / f"iroh-{version}-{tag}.zip"
    wheel = folder / f"iroh-{version}-py3-none-{tag}.whl"
    for path in (own, wheel):
        if path.exists():
            return path
    if tag in _own_tags():
        atomic_write(own, _pack_own())
        return own
    say(f"fetching iroh {version} for {tag} (once)")
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
                "--platform", tag, "--dest", temp, f"iroh=={version}"]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PIP_S)
            problem = _tail(done.stdout) if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        fetched = list(Path(temp).glob("iroh-*.whl"))
        if not fetched:
            raise DeployError(f"iroh {version} for {tag} could not be fetched here:\n{problem}\nThe command was: {shlex.join(argv)}\n"
                              f"You can put the wheel there yourself: {wheel}")
        os.replace(fetched[0], wheel)
    return wheel


def _own_tags() -> list[str]:
    """The platforms of the iroh that is installed here, from its wheel's own record."""
    record = importlib.metadata.distribution("iroh").read_text("WHEEL") or ""
    return [tag for line in record.splitlines() if line.startswith("Tag: ") for tag in line.rpartition("-")[2].split(".")]


def iroh_folder() -> Path:
    """Where the installed iroh lies; found without importing it."""
    found = importlib.util.find_spec("iroh")
    if found is None or not found.submodule_search_locations:
        raise DeployError("the package iroh isn't installed here; install gpurun again (pip install --force-reinstall gpurun)")
    return Path(next(iter(found.submodule_search_locations)))


def _pack_own() -> bytes:
    import zipfile
    target, folder = io.BytesIO(), iroh_folder()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, f"iroh/{path.relative_to(folder).as_posix()}")
    return target.getvalue()


# Unpacks beside the target, syncs, renames: the folder is there whole or not at all, and two deploys at once do no harm.
UNPACK = r"""
import os, shutil, sys, zipfile
source, target = sys.argv[1:]
temp = "%s.tmp-%d" % (target, os.getpid())
os.umask(0o077)
try:
    with zipfile.ZipFile(source) as archive:
        archive.extractall(temp, [name for name in archive.namelist() if name.startswith("iroh/")])
    for folder, _, names in os.walk(temp):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    try:
        os.rename(temp, target)
    except OSError:
        if not os.path.exists(os.path.join(target, "iroh", "__init__.py")):
            raise
finally:
    shutil.rmtree(temp, ignore_errors=True)
    os.unlink(source)
print("GPURUN-UNPACKED")
"""


# The certificates are for the agent too, which ends its machine over https.
APT_GET = """
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 ca-certificates
"""


# ---- deploy over SSH -----------------------------------------------------------------------------------------------------------

def probe(ssh: Connection, node_dir: str, python: str = "") -> Facts:
    done = ssh.run("exec sh -s", stdin=probe_script(node_dir, python).encode(), timeout_s=PROBE_S)
    try:
        return parse_probe(done.stdout)
    except DeployError as error:
        raise DeployError(f"{ssh.target}: {error}" + (f"\nand on stderr:\n{_tail(done.stderr)}" if done.stderr.strip() else "")) from None


def deploy(ssh: Connection, cluster: Cluster, operator_id: str, say: Callable[[str], None] = lambda _text: None,
           progress: Progress = lambda *_: None, idle_exit_s: float = 7 * 86400, ours: bool = False) -> dict[str, Any]:
    """Put on the host what it lacks and start the agent, over this one connection. What the agent says of itself comes back:
    id, addresses, port, socket, iroh (why it has none), pid, agent (its hash), version, protocol, python, note. May be repeated at any time. `ours`: it was rented for us, so a
    Python that it lacks may be installed."""
    host = str(ssh.target)
    agent = agent_file()
    facts = probe(ssh, cluster.node_dir, cluster.python)
    if ours and not facts.python and not cluster.python:
        say(f"{host} has no Python: installing Debian's with apt-get")
        done = ssh.run("exec sh -s", APT_GET.encode(), APT_S)
        facts = probe(ssh, cluster.node_dir, cluster.python)
        if not facts.python:
            raise UnfitError(f"{host} has no Python, and apt-get could not install one (exit code {done.code}):\n{done.last_lines()}\n"
                             "Take an image that has Python 3.8 or newer, or apt-get and the internet.")
    tag = check(facts, host, cluster)
    lib = f"iroh-{iroh_version()}-{tag}" if tag else ""
    missing = what_is_missing(facts, agent.name, agent.size, lib)
    packed = iroh_zip(tag, say) if missing.iroh else None
    need = (agent.size if missing.agent else 0) + (packed.stat().st_size + _unpacked_size(packed) if packed else 0)
    if need and 0 <= facts.free_bytes < need + SPARE_BYTES:
        raise DeployError(f"{host}: {facts.near} has {human_bytes(facts.free_bytes)} free, gpurun needs "
                          f"{human_bytes(need + SPARE_BYTES)} there. Make room, or name another folder in "
                          f"{cluster.path or 'the cluster file'}: node_dir = \"/path/on/the/node\"")
    agent_path, lib_path = f"{facts.node_dir}/agent/{agent.name}", f"{facts.node_dir}/lib/{lib}" if lib else ""
    if missing.agent:
        size = agent.size
        ssh.put(agent.path, agent_path, lambda sent: progress("agent", sent, size))
    if packed:
        size, there = packed.stat().st_size, f"{lib_path}.{os.getpid()}-{os.urandom(4).hex()}.zip"
        ssh.put(packed, there, lambda sent: progress("iroh", sent, size))
        done = ssh.run(f"exec {shlex.quote(facts.python)} -I - {shlex.quote(there)} {shlex.quote(lib_path)}", UNPACK.encode(), UNPACK_S)
        if b"GPURUN-UNPACKED" not in done.stdout:
            raise DeployError(f"{host}: iroh could not be unpacked to {lib_path} (exit code {done.code}):\n{done.last_lines()}")
    argv = _start_argv(facts.python, agent_path, facts.node_dir, operator_id, f"0.0.0.0:{cluster.udp_port}", lib_path, cluster.relay,
                       idle_exit_s)
    done = ssh.run("exec " + shlex.join(argv), timeout_s=START_S)
    said = parse_start(host, done.code, done.stdout, done.stderr)
    return said if tag or not said.get("iroh") else dict(said, iroh=f"it has {why_no_iroh(facts)}")


# Only a process that is an agent's: its number may be another one's by now.
STOP = r"""
dir=DIR
pid=$(sed -n 's/.*"pid": *\([0-9][0-9]*\).*/\1/p' "$dir/agent/endpoint.json" 2>/dev/null)
serves() { if [ -r "/proc/$pid/cmdline" ]; then tr '\0' ' ' < "/proc/$pid/cmdline" | grep -q ' serve '; else kill -0 "$pid" 2>/dev/null; fi; }
if [ -n "$pid" ] && serves; then
  kill "$pid"
  tries=0
  while serves && [ $tries -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
  serves && kill -9 "$pid"
fi
echo GPURUN-STOPPED
"""


def stop(ssh: Connection, node_dir: str) -> None:
    """End the agent on the host, if one runs; its jobs go on without it. DeployError where that couldn't be done."""
    from gpurun.ssh import remote_path
    done = ssh.run("exec sh -s", STOP.replace("DIR", remote_path(node_dir)).encode(), PROBE_S)
    if b"GPURUN-STOPPED" not in done.stdout:
        raise DeployError(f"{ssh.target}: the agent there could not be stopped (exit code {done.code}):\n{done.last_lines()}")


def _unpacked_size(path: Path) -> int:
    import zipfile
    with zipfile.ZipFile(path) as archive:
        return sum(info.file_size for info in archive.infolist() if info.filename.startswith("iroh/"))


def _start_argv(python: str, agent: str, node_dir: str, operator_id: str, bind: str, lib: str, relay: str | tuple[str, ...],
                idle_exit_s: float) -> list[str]:
    """-I: the user's PYTHONPATH and site-packages are the job's business and not the agent's."""
    return [python, "-I", agent, "start", "--node-dir", node_dir, "--authorize", operator_id, "--bind", bind, "--lib", lib,
            "--relay", relay if isinstance(relay, str) else ",".join(relay), "--carrier", "any" if lib else "ssh", "--idle-exit-s", f"{idle_exit_s:g}"]


def parse_start(host: str, code: int, stdout: bytes, stderr: bytes) -> dict[str, Any]:
    """What `start` said, checked; DeployError with its reason, or with the exit code and the last lines where it said nothing."""
    words = re.findall(rb"GPURUN-(ENDPOINT|FAILED) (\{.*\})", stdout)
    if not words:
        raise DeployError(f"{host}: the agent did not start (exit code {code}). The last lines were:\n{_tail(stderr) or _tail(stdout)}")
    word, text = words[-1]
    try:
        said = json.loads(text)
        if word == b"FAILED":
            raise DeployError(f"{host}: the agent did not start: {said['reason']} (exit code {code})")
        return check_endpoint(said)
    except (ValueError, KeyError, TypeError) as error:
        raise DeployError(f"{host}: the agent started and said what can't be read ({error}): "
                          f"{text.decode('utf-8', 'replace')[:500]}") from None


def _tail(output: bytes, count: int = 10) -> str:
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return "\n".join("  " + line for line in lines[-count:]) or "  (no output)"


# ---- this machine --------------------------------------------------------------------------------------------------------------

def start_local(node_dir: str | os.PathLike[str], operator_id: str, python: str = "", udp_port: int = 0,
                relay: str | tuple[str, ...] = "disabled", idle_exit_s: float = 86400) -> dict[str, Any]:
    """The same agent file on this machine, as a process of its own; iroh is the one that is installed here. Returns as `deploy` does."""
    folder = os.path.abspath(os.path.expanduser(node_dir))
    agent = agent_file()
    there = Path(folder, "agent", agent.name)
    try:
        make_private_dir(there.parent)
        if not there.exists() or there.stat().st_size != agent.size:
            atomic_write(there, Path(agent.path).read_bytes())
    except OSError as error:
        full = f" ({room(folder, agent.size)})" if error.errno in FULL else ""
        raise DeployError(f"{error.filename or there} can't be written: {error.strerror}{full}. Name another folder in a cluster file: "
                          "[provider] kind = \"local\" and node_dir = \"/path\"") from None
    argv = _start_argv(os.path.expanduser(python) or sys.executable, str(there), folder, operator_id, f"127.0.0.1:{udp_port}",
                       str(iroh_folder().parent), relay, idle_exit_s)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S)
    except OSError as error:
        raise DeployError(f"{argv[0]} can't be started: {error.strerror}. It is the `python` of the cluster file.") from None
    except subprocess.TimeoutExpired as error:
        raise DeployError(f"the agent on this machine did not start within {START_S:g} s; its log is {folder}/agent/log:\n"
                          f"{_tail(error.stderr or b'')}") from None
    return parse_start("this machine", done.returncode, done.stdout, done.stderr)
