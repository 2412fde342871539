"""This machine as a node: the same agent, as a process of its own, over loopback. Nothing has to be set up."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpurun import supervise
from gpurun.errors import ConfigError, GpurunError
from gpurun.files import read_json
from gpurun.provider import Endpoint, Keep, Node, Progress, Say, check_endpoint, load_endpoint, operator_id, process_of, with_port

if TYPE_CHECKING:
    from gpurun.config import Cluster

STOP_S = 5.0                  # for an agent to end at TERM, which takes it a moment


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
        endpoint = Endpoint(node=self.name, agent_id=said["id"], addresses=_addresses(said), agent=said["agent"], version=said["version"],
                            protocol=said["protocol"], relay=self.cluster.relay, relay_url=said.get("relay_url") or "",
                            socket=said.get("socket") or "", no_iroh=str(said.get("iroh") or ""), process=process_of(said))
        known = load_endpoint(self.cache_file())
        if known is not None and known.agent_id == endpoint.agent_id:   # what only we know
            endpoint = replace(endpoint, blocked=known.blocked, retry_at=known.retry_at, deployed_at=known.deployed_at)
        return endpoint

    def deploy(self, say: Say, progress: Progress, keep: Keep | None = None) -> Endpoint:
        from gpurun import bootstrap
        said = bootstrap.start_local(self.folder, operator_id(), self.cluster.python, self.cluster.udp_port, self.cluster.relay)
        return self.learned(said, _addresses(said), say)

    def stop_agent(self) -> None:
        import signal
        import time
        try:
            said = check_endpoint(read_json(os.path.join(self.folder, "agent", "endpoint.json")) or {})
        except (GpurunError, ValueError):
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + STOP_S
            while said.get("start") and supervise.start_time(said["pid"]) == said["start"] and time.monotonic() < deadline:
                supervise.send(said["pid"], number)
                time.sleep(0.02)

    def ssh_argv(self) -> list[str]:
        raise ConfigError("the node is this machine: there is nowhere to log in to")


def _addresses(said: dict[str, Any]) -> tuple[str, ...]:
    """None for an agent that has no iroh."""
    return (with_port("127.0.0.1", said["port"]),) if said["port"] else ()
