"""Slurm as a node: the host that it takes jobs on, over SSH or this one. The agent there submits `run` with sbatch; where that runs is Slurm's.

What the cluster file says of Slurm goes along with the job (`Node.backend`) and not into the agent: many runs with other options share one agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpurun.provider_local import LocalNode
from gpurun.provider_ssh import SshNode

if TYPE_CHECKING:
    from gpurun.config import Cluster, Slurm


class SlurmHere(LocalNode):
    kind = "slurm"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.name = "slurm"
        self.backend = backend(cluster.slurm)

    def describe(self) -> dict[str, Any]:
        return dict(super().describe(), slurm=self.backend["options"])


class SlurmOverSsh(SshNode):
    kind = "slurm"

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.login is not None
        super().__init__(cluster.login, cluster)
        self.backend = backend(cluster.slurm)

    def describe(self) -> dict[str, Any]:
        return dict(super().describe(), slurm=self.backend["options"])


def slurm_node(cluster: Cluster) -> SlurmHere | SlurmOverSsh:
    """The one node of a cluster of kind "slurm"."""
    return SlurmHere(cluster) if cluster.here else SlurmOverSsh(cluster)


def backend(slurm: Slurm | None) -> dict[str, Any]:
    """What RunJob carries: options as sbatch takes them, bounds in seconds."""
    assert slurm is not None
    keys = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time, "nodes": slurm.nodes, "gres": slurm.gres}
    return {"kind": "slurm", "options": [f"--{key}={value}" for key, value in keys.items() if value] + list(slurm.extra),
            "submit_s": float(slurm.submit_timeout_s), "poll_s": float(slurm.poll_timeout_s), "pending_s": float(slurm.pending_limit_s)}
