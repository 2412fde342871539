"""`gpurun doctor`: what works here and what each node answers. Each check is {"name", "ok", "text"}; ok None is a remark."""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Iterator, Sequence

from gpurun import __version__, limits, offers, wire
from gpurun.config import Cluster, Slurm
from gpurun.errors import GpurunError, RefusedError, TemporaryError
from gpurun.files import human_bytes
from gpurun.limits import dollars
from gpurun.messages import Hello, NodeReady
from gpurun.paths import config_dir
from gpurun.provider import Node
from gpurun.reconcile import Machine
from gpurun.screen import counted

PATIENCE_S = 5.0       # for each question to a provider


def checks(cluster: Cluster, nodes: Sequence[Node], link: Callable[[], Any], timeout_s: float, operator: str) -> Iterator[dict[str, Any]]:
    """One check after the other, as it is done."""
    yield _check("gpurun", True, f"{__version__}, protocol {wire.PROTOCOL}, Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        from gpurun.link import FAST_WRITES, load_key, public_id
        yield _check("iroh", True, "loads")
        yield _check("iroh fast writes", True if FAST_WRITES else None, "in use" if FAST_WRITES else
                     "this iroh has another inside: sending works, at about 4 MB/s; install iroh 1.2")
    except Exception as error:
        yield _check("iroh", False, f"can't be loaded: {error}. Install gpurun with a Python of 64 bits on glibc 2.28 or newer, macOS or Windows.")
        return
    path = os.path.join(config_dir(), "key")
    if os.path.lexists(path):
        try:
            yield _check("key", True, f"{path}, id {public_id(load_key(path))[:16]}…")
        except GpurunError as error:
            yield _check("key", False, str(error))
            return
    else:
        yield _check("key", None, f"none yet: the first run makes it, {path}")
    if cluster.kind == "ssh" or cluster.login:
        client = shutil.which("ssh")
        yield _check("ssh", True if client else None, f"{client} answers for {os.environ.get('GPURUN_SSH_CONFIG') or '~/.ssh/config'}" if client else
                     "no OpenSSH client on PATH: ~/.ssh/config is read by paramiko, which knows neither Include nor all of Match")
        yield _check("ssh agent", None, os.environ.get("SSH_AUTH_SOCK") or "none ($SSH_AUTH_SOCK isn't set): keys come from files")
    yield _check("cluster", True, f"{cluster.kind}: {cluster.path or 'no cluster file, this machine'}")
    if cluster.kind == "vastai":
        yield from _vastai(cluster)
    for node in nodes:
        yield _node(node, link, timeout_s, operator)
        if cluster.slurm is not None:
            yield from _slurm(node, cluster.slurm)


def _check(name: str, ok: bool | None, text: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "text": text}


# ---- Vast.ai -------------------------------------------------------------------------------------------------------------------------

def _vastai(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The key, what it may do (each of its permissions is asked for once), what could be rented, and what is."""
    from importlib import metadata
    from gpurun import machines, provider_vastai
    store = machines.Store()
    try:
        executor = provider_vastai.VastMachines(cluster, store)
    except GpurunError as error:
        yield _check("Vast.ai key", False, str(error))
        yield from _records(store.all(), None, "nobody could be asked")
        return
    api = executor.api
    yield _check("Vast.ai key", True, f"{api.key_source}{f' (…{api.key_end})' if api.key_end else ''}; {api.url}; SDK {metadata.version('vastai')}")
    yield _check("Vast.ai permissions", None, "what only reads is tried below; whether the key may rent and end machines (instance_write), and "
                                              "put an SSH key on the account (user_write), shows when it does")
    try:
        account = api.account(PATIENCE_S)
        credit = account.credit
        yield _check("Vast.ai account (user_read)", None if credit is None else credit > 0, f"{account.name}, " + (
            "which doesn't say what its credit is" if credit is None else f"credit {dollars(max(0.0, credit))}" + (
                "" if credit > 0 else ": add some at https://cloud.vast.ai/billing/")))
    except GpurunError as error:
        yield _check("Vast.ai account (user_read)", False, str(error))
        if isinstance(error, TemporaryError):   # nothing else would answer, each after its own time
            yield from _records(store.all(), None, "it could not be asked")
            return
    yield _ssh_key(api)
    try:
        choice = executor.choice()
        best = choice.fitting[0] if choice.fitting else None
        yield _check("Vast.ai offers (misc)", True if best else None, offers.why_none(choice) if best is None else
                     f"{len(choice.fitting)} of {len(choice.fitting) + len(choice.rejected)} fit, "
                     f"from {dollars(offers.price_of(best, cluster) or 0.0)}/h ({best.num_gpus or 1} × {best.gpu_name}, {best.place})")
    except GpurunError as error:
        yield _check("Vast.ai offers (misc)", False, str(error))
    try:
        rows = api.rows(machines.PREFIX, PATIENCE_S)
    except GpurunError as error:
        yield _check("Vast.ai machines (instance_read)", False, str(error))
        yield from _records(store.all(), None, "it could not be asked")
        return
    yield _check("Vast.ai machines (instance_read)", True, f"{counted(rows.total, 'machines')} on the account, {len(rows)} of them by gpurun")
    yield from _records(store.all(), {row.label for row in rows}, "")
    mine = machines.prefix_of(provider_vastai.operator_mark()) if os.path.lexists(os.path.join(config_dir(), "key")) else None
    known = {one.label for one in store.all()}
    for row in rows:
        if mine is not None and row.label.startswith(mine) and row.label not in known:
            yield _check(f"machine {row.id}", False, f"it is yours ({row.label}), has no record here and costs "
                                                     f"{dollars(row.price_per_hour or 0.0)} an hour. `gpurun down --all` ends it")


def _ssh_key(api: Any) -> dict[str, Any]:
    """gpurun's own. None is made for this."""
    from gpurun import provider_vastai
    name, path = "SSH key for Vast.ai (user_read)", provider_vastai.ssh_key()
    try:
        made = os.path.lexists(path)
        there = api.has_key(provider_vastai.public_key() if made else "", PATIENCE_S)
        if there:
            return _check(name, True, f"{path}, on the account")
        return _check(name, None, f"{path}, not on the account yet: `gpurun up` puts it there" if made else
                      f"none yet: `gpurun up` makes {path} and puts it on the account")
    except GpurunError as error:
        return _check(name, False, str(error))


def _records(mine: Sequence[Machine], there: set[str] | None, unknown: str) -> Iterator[dict[str, Any]]:
    """What is written here of machines, and what Vast.ai says of each. `there`: the labels that it lists, None when it isn't known."""
    for one in mine:
        if one.facts.get("kind", "vastai") != "vastai":
            continue
        name, price = f"machine {one.id or one.label}", limits.price(one)
        text = f"node{one.index} of {one.facts.get('cluster') or 'a cluster file'}, "
        text += "being ended" if not one.wanted else "ready" if one.ready else "not ready"
        text += f", {dollars(price)}/h, {dollars(limits.cost(one, time.time()))} so far" if price else ""
        if there is None:
            yield _check(name, None, f"{text}; {unknown}")
        elif one.label not in there:
            yield _check(name, None, f"{text}; Vast.ai doesn't list it. `gpurun down` waits until that is sure and forgets it")
        elif not one.wanted:
            yield _check(name, False, f"{text}, and still there. `gpurun down {one.id or one.label}` ends it")
        elif one.facts.get("guarded") is False:
            yield _check(name, None, f"{text}; it can't end itself when nobody else does")
        else:
            yield _check(name, True, f"{text}, and Vast.ai lists it")


# ---- a node --------------------------------------------------------------------------------------------------------------------------

def _node(node: Node, link: Callable[[], Any], timeout_s: float, operator: str) -> dict[str, Any]:
    from gpurun.asking import facts_once
    from gpurun.session import dial
    name = f"node {node.name}"
    by_ssh = not node.rented and not node.cluster.here
    known = node.known_endpoint()
    if known is None:
        if node.cluster.here:
            return _check(name, None, "no agent runs yet; the first run starts one")
        if node.rented:
            return _check(name, None, "no agent is known there; the next run brings one, over SSH")
        return _over_ssh(node, "no agent is known there yet; the first run brings one", lambda connection: None)
    inbox: "SimpleQueue[Any]" = SimpleQueue()
    began = time.monotonic()
    try:
        session = dial(link(), node, known, inbox, timeout_s)
        try:
            session.begin(Hello(version=__version__, operator=operator))
            kind, _, item = inbox.get(timeout=timeout_s)
        finally:
            path, way = session.path(), session.note
            session.close()
    except Empty:
        return _check(name, False, f"the agent was connected to and said nothing for {timeout_s:g} s")
    except RefusedError as error:
        return _check(name, None, f"{error}; the next run introduces it, over SSH" if by_ssh else str(error))
    except GpurunError as error:
        return _check(name, False, str(error)) if not by_ssh else _over_ssh(
            node, f"its agent doesn't answer ({error})", lambda connection: facts_once(link(), node, known, operator, timeout_s, connection), began)
    if kind != "said" or not isinstance(item, NodeReady):
        return _check(name, False, f"the agent's answer was {item}")
    return _check(name, None if way and known.addresses else True, _described(item.facts, path, began) + (f". {way}" if way else ""))


def _described(facts: dict[str, Any], path: str, began: float) -> str:
    gpus = ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or []) or "no GPU seen"
    busy = f"busy with {facts['claim']}" if facts.get("claim") else "idle"
    return (f"{busy}; agent {facts.get('version')} over {path} in {time.monotonic() - began:.2f} s; {facts.get('os')} "
            f"{facts.get('arch')}, Python {facts.get('python')}, {facts.get('cpus')} CPUs, {gpus}, "
            f"{human_bytes(int(facts.get('free_bytes') or 0))} free in {facts.get('node_dir')}")


def _over_ssh(node: Any, before: str, ask: Callable[[Any], dict[str, Any] | None], known: float = 0.0) -> dict[str, Any]:
    """Whether SSH gets there, and what it finds; nothing is started. `known`: since when we try for an agent that was put there before, which
    `ask` asks over an SSH connection."""
    from gpurun import bootstrap
    name = f"node {node.name}"
    try:
        with node.log_in(lambda text: None) as connection:
            facts = bootstrap.probe(connection, node.cluster.node_dir, node.cluster.python)
            tag = bootstrap.check(facts, node.name, node.cluster)
            if known and facts.serving:
                udp = ("no UDP gets through to it. Let this machine reach its UDP port (`udp_port` in the cluster file fixes the number), or set `relay`")
                try:
                    return _check(name, None, f"{_described(ask(connection) or {}, 'ssh', known)}. {before}: {udp}; the next run goes over SSH")
                except GpurunError as error:
                    return _check(name, False, f"{before}, and SSH says that it runs there (process {facts.serving}): {udp}. Over SSH: {error}")
    except GpurunError as error:
        return _check(name, False, f"{before}; over SSH: {error}")
    way = "" if tag else f"; it has {bootstrap.why_no_iroh(facts)}: runs there go over SSH"
    return _check(name, True, f"{before}{'; the next run starts it again' if known else ''}; SSH works: {facts.os} {facts.arch}, Python at {facts.python}{way}")


# ---- Slurm ---------------------------------------------------------------------------------------------------------------------------

SLURM_S = 45.0         # for all of its commands; `scontrol ping` says at once that nobody is there, the others would each wait
SLURM_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct")
SLURM_MARK = "GPURUN-SLURM "
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+(?::[0-9]+){0,2})")
SHARED = ("afs", "autofs", "beegfs", "ceph", "cifs", "fhgfs", "fuseblk", "gfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb", "smb2", "wekafs")
# For bash, with $dir set. Each line that it has to say is marked: start files chatter.
SLURM_SCRIPT = """\
say() { sed "s/^/GPURUN-SLURM $1=/"; }
for name in """ + " ".join(SLURM_COMMANDS) + """; do type -P "$name" | say "$name"; done
echo "$PATH" | say path
near=$dir
while [ -n "$near" ] && [ ! -e "$near" ]; do near=${near%/*}; done
echo "$dir" | say dir
stat -f -c %T "${near:-/}" 2>/dev/null | say files
if type -P scontrol >/dev/null && type -P sbatch >/dev/null; then
  sbatch --version 2>&1 | say version
  ping=$(scontrol ping 2>&1)
  echo "$ping" | say ping
  case $ping in *' UP'*)
    scontrol --all --oneliner show partition 2>&1 | say partition
    if type -P sacct >/dev/null; then
      sacct -X -n -P -S now -o JobID 2>&1 >/dev/null | say accounting
      echo "${PIPESTATUS[0]}" | say accounted
    fi ;;
  esac
fi
echo yes | say end
"""


def _slurm(node: Any, wanted: Slurm) -> Iterator[dict[str, Any]]:
    """What a login shell there finds of Slurm, and whether a job that asks for this would ever start. Nothing is submitted."""
    try:
        said = parse_slurm(_slurm_here(node) if node.cluster.here else _slurm_there(node))
    except (GpurunError, ValueError) as error:
        yield _check("Slurm", False, f"{node.name}: it can't be asked for Slurm: {error}")
        return
    where = "here" if node.cluster.here else f"on {node.name}"
    missing = [name for name in SLURM_COMMANDS if name != "sacct" and not said.get(name)]
    if missing:
        yield _check("Slurm", False, f"a login shell {where} (bash -l) finds no {', '.join(missing)} in its PATH, {_last(said.get('path'))}. Let a start file "
                                     "of bash's put it there (~/.bash_profile: export PATH=…, or module load slurm), or name the host that has it as `login`")
        return
    yield _check("Slurm", True, f"{_last(said.get('version'))}, {_last(said['sbatch'])}")
    up = any(re.search(r"\bUP\b", line) for line in said.get("ping", ()))
    told = [line for line in said.get("ping", ()) if line.strip("* ") and not line.startswith("**")]   # it adds a banner when nobody is there
    yield _check("Slurm controller", up, (", ".join(told) if up else _last(told)) + ("" if up else ": jobs go on meanwhile, and none can be submitted"))
    if not up:
        return
    yield from judge_partitions("\n".join(said.get("partition", ())), wanted)
    answers = _last(said.get("accounted")) == "0"
    yield _check("Slurm accounting", True if answers else None, "sacct answers" if answers else
                 f"{_last(said.get('accounting')) if said.get('sacct') else 'there is no sacct'}; how a job ended is known from its own record, and for some "
                 "minutes from the controller")
    kind = _last(said.get("files")) or "unknown"
    yield _check("Slurm folder", True if kind in SHARED else None, f"node_dir is {_last(said.get('dir'))}, on a file system of type {kind}" + (
        "" if kind in SHARED else ": each node that runs a job must see it at the same path. If this is a disk of one machine, set `node_dir` "
                                  "to a folder that they share"))


def _last(lines: Sequence[str] | None) -> str:
    return lines[-1] if lines else ""


def _slurm_here(node: Any) -> bytes:
    """In the environment that the agent gives to sbatch."""
    from gpurun.node import LoginEnvironment
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(["bash", "-c", f"dir={shlex.quote(node.folder)}\n{SLURM_SCRIPT}"], env=LoginEnvironment()(), stdin=subprocess.DEVNULL,
                                   stdout=said, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(SLURM_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise GpurunError(f"Slurm's commands did not answer within {SLURM_S:g} s") from None
        said.seek(0)
        return said.read()


def _slurm_there(node: Any) -> bytes:
    from gpurun import ssh
    script = f"dir={ssh.remote_path(node.cluster.node_dir)}\n{SLURM_SCRIPT}"
    with ssh.Connection(node.host) as connection:
        return connection.run("exec sh -s", stdin=f"exec bash -l -c {shlex.quote(script)} </dev/null\n".encode(), timeout_s=SLURM_S).stdout


def parse_slurm(output: bytes) -> dict[str, list[str]]:
    """{key: lines} of what the script says, whatever stands around them; ValueError where its end isn't there."""
    said: dict[str, list[str]] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        key, equals, value = line.partition(SLURM_MARK)[2].partition("=")
        if equals:
            said.setdefault(key, []).append("".join(letter if letter.isprintable() else "?" for letter in value.strip()))
    if "end" not in said:
        tail = " ".join(output.decode("utf-8", "replace").split())[-200:]
        raise ValueError("a login shell there (bash -l) did not run our command to its end" + (f"; it said: {ascii(tail)}" if tail else ""))
    return said


def judge_partitions(text: str, wanted: Slurm) -> Iterator[dict[str, Any]]:
    """From `scontrol --oneliner show partition`. Slurm takes jobs that can never start there, unless EnforcePartLimits is set: they wait for ever."""
    rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines() if line.startswith("PartitionName=")]
    table = {row["PartitionName"]: row for row in rows}
    names = wanted.partition.split(",") if wanted.partition else [name for name, row in table.items() if row.get("Default") == "YES"]
    if not table or not names:
        yield _check("Slurm partition", None, f"none could be listed: {_last(text.splitlines()) or 'scontrol said nothing'}" if not table else
                     f"none is the default here; set `partition` ({', '.join(table)})")
        return
    found = [(name, _never(table.get(name), wanted, table)) for name in names]
    fine = any(not why for _, why in found)
    for name, why in found:              # a job that may go to several goes to the one that takes it
        yield _check(f"Slurm partition {name}", True if not why else None if fine else False, why or _partition(table[name], wanted))


def _never(row: dict[str, str] | None, wanted: Slurm, table: dict[str, Any]) -> str:
    """Why no job that asks for this would run in this partition, "" where it would."""
    if row is None:
        return f"there is no such partition; there are {', '.join(table)}"
    if row.get("State", "UP") != "UP":
        return f"it is {row['State']}: no job is started there"
    most = min(slurm_number(row.get("MaxNodes", "")), slurm_number(row.get("TotalNodes", "")))
    if (wanted.nodes or 1) > most:
        return f"a job there has at most {counted(int(most), 'nodes')}, and `nodes` is {wanted.nodes or 1}: it would wait for ever"
    if wanted.time and slurm_seconds(wanted.time) > slurm_seconds(row.get("MaxTime", "UNLIMITED")):
        return f"a job there runs for at most {row['MaxTime']}, and `time` is {wanted.time}: it would wait for ever"
    return ""


def _partition(row: dict[str, str], wanted: Slurm) -> str:
    most, usual = row.get("MaxTime", "UNLIMITED"), row.get("DefaultTime", "NONE")
    limit = "any time" if most == "UNLIMITED" else f"at most {most}"
    if not wanted.time and usual not in ("NONE", most):   # what surprises people: a job that is ended by a limit that nobody has set
        limit += f", and for {usual} where `time` isn't set, as here"
    total = slurm_number(row.get("TotalNodes", ""))
    return f"up, {counted(int(total), 'nodes') if total < math.inf else 'nodes'} ({row.get('Nodes', '?')}); a job may run for {limit}"


def slurm_seconds(text: str) -> float:
    """Of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; infinite where it is none."""
    match = _TIME.fullmatch(text)
    if not match:
        return math.inf
    parts = [int(part) for part in match[2].split(":")]
    if match[1]:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts]}.get(len(parts), parts)
    return ((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def slurm_number(text: str) -> float:
    return int(text) if re.fullmatch("[0-9]+", text) else math.inf
