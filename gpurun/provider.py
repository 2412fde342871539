"""Nodes: what a provider promises about them. One file for each kind; here is the contract and what the kinds share.

A node's endpoint (who its agent is, where to reach it) is learned once, when the agent is put there, and kept in a small file, so that
a second use needs no SSH. The agent's id is pinned by it: whoever answers at those addresses must prove to be that id.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpurun.errors import RecordError
from gpurun.files import atomic_write, make_private_dir, read_json
from gpurun.paths import config_dir

if TYPE_CHECKING:
    from gpurun.config import Cluster
    from gpurun.messages import Arm
    from gpurun.reconcile import Machine, Seen

CACHE_VERSION = 1

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]   # what is sent, bytes sent, bytes in all
Keep = Callable[[Any], None]                 # takes an ssh.Connection over


@dataclass(frozen=True)
class Endpoint:
    """An agent as the link needs it. `agent`: the hash of its file; `relay`: the cluster's setting when it was started."""

    node: str
    agent_id: str
    addresses: tuple[str, ...]                # ip:port, the likeliest first
    agent: str
    version: str
    protocol: int
    relay: str | tuple[str, ...] = "disabled"
    relay_url: str = ""                       # the agent's home relay, where it has one
    socket: str = ""                          # of the agent there, "" for none; SSH leads to it
    join: tuple[str, ...] = ()                # a command that does, where the SSH server doesn't
    no_iroh: str = ""                         # why it can't be reached but by its socket
    blocked: bool = False                     # no UDP got through to it, SSH did
    retry_at: float = 0.0                     # when UDP is to be tried again then
    process: str = ""                         # another one for each agent that was started
    basis: str = ""                           # what `Node.basis` said when this was learned
    deployed_at: float = 0.0
    note: str = field(default="", compare=False)   # for the user, from the deploy that just happened; not kept


class Node:
    """One node of a cluster. A provider implements `deploy`, and `cached_endpoint` where the file here isn't the best source.

    `name` is what the user calls it: unique in its cluster, shown on the screen, taken by --node.
    """

    kind = ""
    rented = False                            # `trouble` is worth asking
    label = ""                                # of a rented machine, its record's
    backend: dict[str, Any] = {}              # what RunJob is to say about who runs the job there; {}: its agent itself

    def __init__(self, name: str, cluster: Cluster, key: str) -> None:
        """`key`: what makes this node the same one tomorrow."""
        self.name, self.cluster = name, cluster
        same = "\n".join([self.kind, key, cluster.node_dir]).encode("utf-8", "surrogateescape")
        self._file = hashlib.sha256(same).hexdigest()[:16] + ".json"

    def cached_endpoint(self) -> Endpoint | None:
        """What was learned last: no network, no SSH, no Fabric, a millisecond. None: deploy first. The agent may have gone since, or be
        of another version; whoever connects finds out, and then calls `deploy`."""
        return load_endpoint(self.cache_file())

    def basis(self) -> str:
        """Changes when something does that decides which machine this is, or how its agent is to be reached. A few milliseconds."""
        return ""

    def known_endpoint(self) -> Endpoint | None:
        """What was learned last, if it is still about the node that the settings mean now."""
        known = self.cached_endpoint()
        return known if known is not None and known.basis == self.basis() else None

    def deploy(self, say: Say, progress: Progress, keep: Keep | None = None) -> Endpoint:
        """Make sure that an agent runs there, and learn its endpoint. Safe to repeat: what is there isn't sent again, an agent that
        runs goes on, and so does its job. Every wait has a bound. Raises DeployError, SSHError, HostKeyError; then nothing is cached anew
        and an older endpoint stays. `keep` is given the SSH connection, if there was one, instead of that being closed."""
        raise NotImplementedError

    def log_in(self, say: Say) -> Any:
        """An ssh.Connection to there, open. Raises SSHError, HostKeyError, ProviderError."""
        raise NotImplementedError

    def remember(self, known: Endpoint, **fields: Any) -> Endpoint:
        """Change what is kept of the agent, unless more has been learned since; what is known with that."""
        now = load_endpoint(self.cache_file())
        if now is not None and now.agent_id == known.agent_id and now.deployed_at == known.deployed_at:
            self._keep(replace(now, **fields))
        return replace(known, **fields)

    def describe(self) -> dict[str, Any]:
        """For `plan`, `doctor` and the run record: where a job would run. No network."""
        known = self.cached_endpoint()
        return {"node": self.name, "kind": self.kind, "node_dir": self.cluster.node_dir,
                "agent_id": known.agent_id if known else None, "addresses": list(known.addresses) if known else []}

    def trouble(self) -> tuple[str, str]:
        """What a run there should know now: why the machine is gone, and which of its limits is reached; "" for neither. May ask the provider."""
        return "", ""

    def stop_agent(self) -> None:
        """End the agent there; what it runs goes on. Nothing happens where none runs. Raises SSHError, DeployError."""
        raise NotImplementedError

    def ssh_argv(self) -> list[str]:
        """The user's own ssh to there, as a command; ConfigError where that makes no sense."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what was learned; the next use deploys."""
        if os.path.lexists(self.cache_file()):
            os.unlink(self.cache_file())

    def cache_file(self) -> str:
        return os.path.join(config_dir(), "nodes", self._file)

    def learned(self, said: dict[str, Any], addresses: tuple[str, ...], say: Say, basis: str = "") -> Endpoint:
        """Keep what an agent said when it was started, by a way that proves who it is. Another id than before is right then, but said.
        `basis`: from before the deploy, so that a change meanwhile isn't missed."""
        endpoint = Endpoint(node=self.name, agent_id=said["id"], addresses=tuple(dict.fromkeys(addresses)), agent=said["agent"],
                            version=said["version"], protocol=said["protocol"], relay=self.cluster.relay,
                            relay_url=said.get("relay_url") or "", basis=basis, deployed_at=time.time(), note=str(said.get("note") or ""),
                            socket=str(said.get("socket") or ""), join=tuple(said.get("join") or ()), no_iroh=str(said.get("iroh") or ""), process=process_of(said))
        before = load_endpoint(self.cache_file())
        if before and before.blocked and before.basis == basis and addresses:
            same = before.process == endpoint.process   # else nothing is waited for either, but whether it has changed is looked at meanwhile
            endpoint = replace(endpoint, blocked=True, retry_at=before.retry_at if same else 0.0)
        if before and before.agent_id != endpoint.agent_id:
            say(f"{self.name}: its agent has a new identity, {endpoint.agent_id[:10]}… and no longer {before.agent_id[:10]}…")
        self._keep(endpoint)
        return endpoint

    def _keep(self, endpoint: Endpoint) -> None:
        make_private_dir(os.path.dirname(self.cache_file()))
        record = dict(asdict(replace(endpoint, note="")), record=CACHE_VERSION, kind=self.kind, node_dir=self.cluster.node_dir)
        atomic_write(self.cache_file(), json.dumps(record, indent=1).encode())


class Made(NamedTuple):
    """A machine that was asked for and given. `facts` are kept in its record: price_per_hour, gpu, host and what the kind needs."""

    id: str
    facts: dict[str, Any]


class Machines:
    """What a kind of provider does with the machines of a cluster. Each method is one thin call with a bound on its time; who calls whom when
    is decided elsewhere (reconcile.py, fleet.py). Any thread may call them."""

    paid = False                              # they cost money: asked before, proven gone after
    tries = 5                                 # machines for one node that failed, before it is given up
    times: dict[str, float] = {}              # reconcile.Desired's, where the kind has others
    gone_at_once = True                       # one that was ended doesn't come back

    def shape(self) -> str:
        """Changes when something does that makes the machines that are there the wrong ones."""
        return ""

    def look(self) -> tuple[list[Seen], bool]:
        """All machines of this operator, and whether that is all of them for sure. Raises ProviderError when nothing is known."""
        raise NotImplementedError

    def pick(self) -> dict[str, Any]:
        """What is to be asked for next, as facts for the machine's record. NoOfferError when there is nothing."""
        return {}

    def name(self, index: int) -> str:
        """What the user calls it."""
        return f"node{index}"

    def label(self, prefix: str, index: int) -> str:
        """Of a machine that is to be asked for; never used before, unless it is the same machine each time."""
        from gpurun.reconcile import label_for
        return label_for(prefix, index, os.urandom(3).hex())

    def create(self, machine: Machine, say: Say, progress: Progress) -> Made:
        """Ask for a machine under this label, once. OfferGoneError: try again; AccountError, ConfigError: that would be of no use;
        UnclearError: it may be there, and must not be asked for again; any other error: it isn't there."""
        raise NotImplementedError

    def node(self, machine: Machine) -> Node:
        """The node that it is. No network."""
        raise NotImplementedError

    def prepare(self, machine: Machine, say: Say, progress: Progress) -> Node:
        """Make an agent run on a machine that runs. The node, whose endpoint is known then."""
        raise NotImplementedError

    def destroy(self, machine: Machine, machine_id: str) -> None:
        """Ask for its end, for good. Returns when that was taken, or it doesn't exist; safe to repeat."""
        raise NotImplementedError

    def arm(self, end_in_s: float, why: str) -> Arm | None:
        """What to tell an agent so that it ends its own machine after `end_in_s` (infinite: no such limit); None where there is nothing to end."""
        return None

    def by_hand(self, machine: Machine) -> str:
        """How a person ends it without gpurun: a command, or where to click."""
        return ""


def nodes(cluster: Cluster) -> list[Node]:
    """The nodes of a cluster file, in its order; without one this machine is the only node. Of rented ones those that are up."""
    if cluster.kind == "local":
        from gpurun.provider_local import LocalNode
        return [LocalNode(cluster)]
    if cluster.kind == "slurm":
        from gpurun.provider_slurm import slurm_node
        return [slurm_node(cluster)]
    if cluster.kind == "vastai":
        from gpurun.provider_vastai import nodes_up
        return nodes_up(cluster)
    from gpurun.provider_ssh import SshNode
    return [SshNode(host, cluster) for host in cluster.hosts]


def load_endpoint(path: str) -> Endpoint | None:
    """An endpoint that was kept; None if there is none, or none that this version can read: it can be learned again."""
    try:
        record = read_json(path) or {}
    except RecordError:
        return None
    if record.get("record") != CACHE_VERSION:
        return None
    try:
        values = {one.name: record[one.name] for one in fields(Endpoint)}
        relay = values["relay"] if isinstance(values["relay"], str) else tuple(values["relay"])
        texts = [values[name] for name in ("node", "agent_id", "agent", "version", "relay_url", "socket", "no_iroh", "process", "basis")]
        numbers = [values[name] for name in ("protocol", "retry_at", "deployed_at", "blocked")]
        if not all(isinstance(one, str) for one in [*texts, *values["addresses"], *values["join"]]) or not all(isinstance(one, (int, float)) for one in numbers):
            return None
        return Endpoint(**dict(values, addresses=tuple(values["addresses"]), join=tuple(values["join"]), relay=relay))
    except (KeyError, TypeError):
        return None


def operator_id() -> str:
    """Our own id, which agents are told to serve; the key is made on first use."""
    from gpurun import link
    return link.public_id(link.load_key(os.path.join(config_dir(), "key")))


def operator_mark() -> str:
    """Tells one operator's machines from another's: made of our key, and says nothing of it. No iroh is loaded for it once there is a key."""
    path = os.path.join(config_dir(), "key")
    if not os.path.exists(path):
        from gpurun import link
        link.load_key(path)
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(b"gpurun machines " + stream.read()).hexdigest()
    except OSError as error:
        raise RecordError(f"{path} can't be read: {error.strerror}; it is this operator's key") from None


def process_of(said: dict[str, Any]) -> str:
    """What tells the process of an agent that says this from an earlier one."""
    return f"{said['pid']} {said.get('start')}"


def with_port(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def check_endpoint(said: Any) -> dict[str, Any]:
    """What an agent says of itself, from `start` or its endpoint.json; ValueError where a field is missing or isn't what it must be."""
    wanted = {"id": str, "addresses": list, "port": int, "pid": int, "agent": str, "version": str, "protocol": int}
    for key, kind in wanted.items():
        if type(said.get(key)) is not kind:
            raise ValueError(f"{key} is {said.get(key)!r}")
    if not re.fullmatch(r"[0-9a-z]{32,128}", said["id"]) or not 1 <= said["port"] <= 65535 and (said["port"] or said["addresses"] or not said.get("socket")):
        raise ValueError(f"id {said['id']!r}, port {said['port']}")
    if not isinstance(said.get("socket") or "", str) or not all(isinstance(word, str) for word in said.get("join") or ()):
        raise ValueError(f"socket {said['socket']!r}, join {said.get('join')!r}")
    address = r"(\d+\.\d+\.\d+\.\d+|\[[0-9a-fA-F:.]+\]):\d+"
    if not all(isinstance(one, str) and re.fullmatch(address, one) for one in said["addresses"]):
        raise ValueError(f"addresses are {said['addresses']!r}")
    return dict(said)
