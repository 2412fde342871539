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
from typing import TYPE_CHECKING, Any

from gpurun.errors import RecordError
from gpurun.files import atomic_write, make_private_dir, read_json
from gpurun.paths import config_dir

if TYPE_CHECKING:
    from gpurun.config import Cluster

CACHE_VERSION = 1

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]   # what is sent, bytes sent, bytes in all


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
    basis: str = ""                           # what `Node.basis` said when this was learned
    deployed_at: float = 0.0
    note: str = field(default="", compare=False)   # for the user, from the deploy that just happened; not kept


class Node:
    """One node of a cluster. A provider implements `deploy`, and `cached_endpoint` where the file here isn't the best source.

    `name` is what the user calls it: unique in its cluster, shown on the screen, taken by --node.
    """

    kind = ""

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

    def deploy(self, say: Say, progress: Progress) -> Endpoint:
        """Make sure that an agent runs there, and learn its endpoint. Safe to repeat: what is there isn't sent again, an agent that
        runs goes on, and so does its job. Every wait has a bound. Raises DeployError, SSHError, HostKeyError; then nothing is cached anew
        and an older endpoint stays."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """For `plan`, `doctor` and the run record: where a job would run. No network."""
        known = self.cached_endpoint()
        return {"node": self.name, "kind": self.kind, "node_dir": self.cluster.node_dir,
                "agent_id": known.agent_id if known else None, "addresses": list(known.addresses) if known else []}

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
                            relay_url=said.get("relay_url") or "", basis=basis, deployed_at=time.time(), note=str(said.get("note") or ""))
        before = load_endpoint(self.cache_file())
        if before and before.agent_id != endpoint.agent_id:
            say(f"{self.name}: its agent has a new identity, {endpoint.agent_id[:10]}… and no longer {before.agent_id[:10]}…")
        make_private_dir(os.path.dirname(self.cache_file()))
        record = dict(asdict(replace(endpoint, note="")), record=CACHE_VERSION, kind=self.kind, node_dir=self.cluster.node_dir)
        atomic_write(self.cache_file(), json.dumps(record, indent=1).encode())
        return endpoint


def nodes(cluster: Cluster) -> list[Node]:
    """The nodes of a cluster file, in its order; without one this machine is the only node."""
    if cluster.kind == "local":
        from gpurun.provider_local import LocalNode
        return [LocalNode(cluster)]
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
        return Endpoint(**dict(values, addresses=tuple(values["addresses"]), relay=relay))
    except (KeyError, TypeError):
        return None


def operator_id() -> str:
    """Our own id, which agents are told to serve; the key is made on first use."""
    from gpurun import link
    return link.public_id(link.load_key(os.path.join(config_dir(), "key")))


def with_port(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def check_endpoint(said: Any) -> dict[str, Any]:
    """What an agent says of itself, from `start` or its endpoint.json; ValueError where a field is missing or isn't what it must be."""
    wanted = {"id": str, "addresses": list, "port": int, "pid": int, "agent": str, "version": str, "protocol": int}
    for key, kind in wanted.items():
        if type(said.get(key)) is not kind:
            raise ValueError(f"{key} is {said.get(key)!r}")
    if not re.fullmatch(r"[0-9a-z]{32,128}", said["id"]) or not 1 <= said["port"] <= 65535:
        raise ValueError(f"id {said['id']!r}, port {said['port']}")
    address = r"(\d+\.\d+\.\d+\.\d+|\[[0-9a-fA-F:.]+\]):\d+"
    if not all(isinstance(one, str) and re.fullmatch(address, one) for one in said["addresses"]):
        raise ValueError(f"addresses are {said['addresses']!r}")
    return dict(said)
