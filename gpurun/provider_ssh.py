"""A host over SSH as a node. SSH is used to put the agent there and to learn its id; everything after that is the link's."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from gpurun.provider import Endpoint, Node, Progress, Say, operator_id, with_port

if TYPE_CHECKING:
    from gpurun.config import Cluster, Host


class SshNode(Node):
    kind = "ssh"

    def __init__(self, host: Host, cluster: Cluster) -> None:
        super().__init__(host.text, cluster, host.text)
        self.host = host

    def deploy(self, say: Say, progress: Progress, connect_within_s: float = 0.0) -> Endpoint:
        from gpurun import bootstrap, ssh   # the only place of the main job that loads Fabric
        with ssh.Connection(self.host, say, connect_within_s) as connection:
            said = bootstrap.deploy(connection, self.cluster, operator_id(), say, progress)
            peer = connection.peer_ip()
        # The address that SSH reached is the likeliest; what the agent sees of itself may be behind NAT, or the better way inside one.
        ours = (with_port(peer, said["port"]),) if peer else ()
        return self.learned(said, ours + tuple(one for one in said["addresses"] if peer_is_loopback(peer) or not is_loopback(one)), say)

    def describe(self) -> dict[str, Any]:
        return dict(super().describe(), host=self.host.text)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback


def peer_is_loopback(peer: str | None) -> bool:
    return peer is not None and ipaddress.ip_address(peer).is_loopback
