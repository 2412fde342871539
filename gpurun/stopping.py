"""`gpurun stop`: end a run that this or another process started, or that nobody drives any more.

The node is told to stop; what it answers is the truth. A gpurun that drives the run sees the same answer and collects; where none does,
this one takes the run over, collects what there is and closes its record.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Sequence

from gpurun import __version__, config
from gpurun.config import Cluster
from gpurun.errors import GpurunError, LinkError, RecordError
from gpurun.link import Link
from gpurun.messages import Hello, JobExited, NodeFault, Refused, SetupCompleted, StopJob
from gpurun.provider import Node
from gpurun.records import Record, RunFolder
from gpurun.screen import Screen
from gpurun.session import reach

STOP_S = 60.0                 # TERM, the grace period, KILL, and a slow link


def stop_run(folder: RunFolder, record: Record, cluster: Cluster, nodes: Sequence[Node], link: Callable[[], Link], screen: Screen,
             operator: str) -> dict[str, Any]:
    """The run's result once nothing of it runs any more. Raises GpurunError when the node can't be reached or doesn't do it."""
    if folder.try_lock():
        from gpurun.orchestrator import Orchestrator
        job = config.Job(path=folder.path, folder=folder.path, name=record.job["name"], run=record.job["run"], setup=record.job["setup"],
                         outputs=tuple(record.job["outputs"]))
        return Orchestrator(job, cluster, nodes, link, folder, record, screen, operator=operator).stop()
    screen.say(f"telling {record.node.get('name')} to stop {record.run_id}; the gpurun that drives it collects what there is")
    ended = _tell(record, nodes[0], link(), screen, operator)
    return {"run_id": record.run_id, "state": "FAILED", "exit_code": getattr(ended, "code", None), "reason": "stopped by the operator"}


def _tell(record: Record, node: Node, link: Link, screen: Screen, operator: str) -> Any:
    """The event with which the node says that the run is over."""
    inbox: "SimpleQueue[Any]" = SimpleQueue()
    session = reach(link, node, inbox, screen.say, lambda name, done, total: None)
    session.begin(Hello(version=__version__, operator=operator, run_id=record.run_id), StopJob(record.run_id))
    deadline = time.monotonic() + STOP_S
    screen.phase("stop", record.run_id)
    try:
        while time.monotonic() < deadline:
            try:
                kind, _, item = inbox.get(timeout=0.2)
            except Empty:
                screen.live_tick()
                continue
            if kind == "broken":
                raise LinkError(f"the connection to {node.name} broke before the run had ended ({item}); run gpurun stop again")
            if isinstance(item, Refused):
                raise RecordError(f"{node.name} refused: {item.reason}")
            if isinstance(item, (JobExited, NodeFault)) or isinstance(item, SetupCompleted) and (item.code or item.stopped):
                return item
    finally:
        session.close()
    raise GpurunError(f"{record.run_id} on {node.name} didn't end within {STOP_S:g} s of the stop; look at its processes there")
