"""The hosts of a cluster file (or this machine) as machines: up is an agent that answers there, down is its end. Nothing is rented or paid."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Sequence

from gpurun import ways
from gpurun.asking import facts_once
from gpurun.errors import GpurunError
from gpurun.link import Link
from gpurun.provider import Endpoint, Machines, Made, Node, Progress, Say
from gpurun.reconcile import Machine, Seen, label_for

DIAL_S = 3.0
AT_ONCE = 16


class HostMachines(Machines):
    """The machine of index 1 is the first host of the cluster file, and so on."""

    tries = 1
    times = {"settle_s": 0.0, "confirm_s": 0.0, "again_s": 2.0}

    def __init__(self, nodes: Sequence[Node], prefix: str, link: Callable[[], Link], operator: str) -> None:
        self._nodes, self._link, self._operator = list(nodes), link, operator
        self._labels = [label_for(prefix, index, hashlib.sha256(node.name.encode("utf-8", "surrogateescape")).hexdigest()[:6])
                        for index, node in enumerate(self._nodes, 1)]

    def look(self) -> tuple[list[Seen], bool]:
        """A host that was never used has no agent of ours. One whose agent doesn't answer is unknown, not absent."""
        def one(pair: tuple[Node, str]) -> Seen | None | Exception:
            node, label = pair
            known = node.cached_endpoint()
            if known is None:
                return None
            if node.known_endpoint() is None:           # the alias may mean another machine now, which only SSH knows
                return self._over_ssh(node, known, label)
            try:
                facts_once(self._link(), node, known, self._operator, DIAL_S)
            except GpurunError as error:
                return self._over_ssh(node, known, label, error)
            return Seen(id=node.name, label=label)

        with ThreadPoolExecutor(AT_ONCE, "look") as pool:
            found = list(pool.map(one, zip(self._nodes, self._labels)))
        return [item for item in found if isinstance(item, Seen)], not any(isinstance(item, Exception) for item in found)

    def _over_ssh(self, node: Node, known: Endpoint, label: str, error: GpurunError | None = None) -> Seen | None | Exception:
        """An agent that doesn't answer (`error`) may have ended, or no packet gets there; then it may answer over SSH. Without `error`: whether the
        agent that is known is that of the host which is meant now."""
        if node.cluster.here:
            return error
        from gpurun import bootstrap
        try:
            basis = node.basis()
            with node.log_in(lambda text: None) as connection:
                facts = bootstrap.probe(connection, node.cluster.node_dir, node.cluster.python)
                if not facts.serving:
                    return None
                try:
                    facts_once(self._link(), node, known, self._operator, DIAL_S, connection)
                    if error is None:
                        node.remember(known, basis=basis)
                    else:
                        ways.blocked(node, known)   # the next look goes that way at once
                    return Seen(id=node.name, label=label)
                except GpurunError as silent:
                    return Seen(id=node.name, label=label, why=str(error or silent))
        except GpurunError as problem:
            return problem

    def name(self, index: int) -> str:
        return self._nodes[index - 1].name if index <= len(self._nodes) else super().name(index)

    def label(self, prefix: str, index: int) -> str:
        return self._labels[index - 1]

    def create(self, machine: Machine, say: Say, progress: Progress) -> Made:
        """The machine is there: what is made is its agent."""
        node = self._nodes[machine.index - 1]
        node.deploy(say, progress)
        return Made(node.name, {})

    def node(self, machine: Machine) -> Node:
        return self._nodes[machine.index - 1]

    def prepare(self, machine: Machine, say: Say, progress: Progress) -> Node:
        """Its agent answers already when it is new; one that was there and doesn't answer is looked after."""
        node = self._nodes[machine.index - 1]
        if machine.unready:
            node.deploy(say, progress)
        return node

    def destroy(self, machine: Machine, machine_id: str) -> None:
        node = next(one for one in self._nodes if one.name == machine_id)
        node.stop_agent()
        node.forget()
