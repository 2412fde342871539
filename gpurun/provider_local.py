"""This machine as a node: the same agent, as a process of its own, over loopback. Nothing has to be set up."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpurun import supervise
from gpurun.errors import GpurunError
from gpurun.files import read_json
from gpurun.provider import Endpoint, Node, Progress, Say, check_endpoint, operator_id, with_port

if TYPE_CHECKING:
    from gpurun.config import Cluster


class LocalNode(Node):
    kind = "local"

    def __init__(self, cluster: Cluster) -> None:
        self.folder = os.path.abspath(os.path.expanduser(cluster.node_dir))
        super().__init__("local", cluster, self.folder)

    def cached_endpoint(self) -> Endpoint | None:
        """From the agent's own file rather than ours, and only while its process lives: here that can be seen."""
        try:
            said = check_endpoint(read_json(os.path.join(self.folder, "agent", "endpoint.json")) or {})
        except (GpurunError, ValueError):
            return None
        if not said.get("start") or supervise.start_time(said["pid"]) != said["start"]:
            return None
        return Endpoint(node=self.name, agent_id=said["id"], addresses=(with_port("127.0.0.1", said["port"]),), agent=said["agent"],
                        version=said["version"], protocol=said["protocol"], relay=self.cluster.relay, relay_url=said.get("relay_url") or "")

    def deploy(self, say: Say, progress: Progress) -> Endpoint:
        from gpurun import bootstrap
        said = bootstrap.start_local(self.folder, operator_id(), self.cluster.python, self.cluster.udp_port, self.cluster.relay)
        return self.learned(said, (with_port("127.0.0.1", said["port"]),), say)
