"""`gpurun stop`: end a run that this or another process started, or that nobody drives any more.

The node is told to stop; what it answers is the truth. A gpurun that drives the run sees the same answer and collects; where none does,
this one takes the run over, collects what there is and closes its record.
"""

from __future__ import annotations

import os
import signal
import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Sequence

from gpurun import __version__, fsm
from gpurun.config import Cluster, Job
from gpurun.errors import EXIT_STOPPED, GpurunError, LinkError, RecordError
from gpurun.link import Link
from gpurun.messages import FAILED, PENDING, TERMINAL, Busy, Hello, JobExited, NodeFault, Refused, SetupCompleted, StopJob
from gpurun.provider import Node
from gpurun.records import Record, RunFolder, utc_now
from gpurun.screen import Screen
from gpurun.session import reach

GRACE_S = StopJob().grace_s
STOP_S = 50.0                 # TERM, KILL and a slow link, beside the grace period
CLOSE_S = 15.0                # for the gpurun that drives the run to close its record after that

Way = Callable[[Record], tuple[Cluster, Sequence[Node], Callable[[], Link]]]   # finds the node that a record names, and makes the link to it


def stop_run(folder: RunFolder, way: Way, screen: Screen, operator: str, grace_s: float = GRACE_S) -> Record:
    """The run's record once nothing of it runs any more. Its processes get `grace_s` seconds between TERM and KILL. Raises GpurunError when
    the node can't be reached or doesn't do it."""
    folder.load()                             # or an error: a folder that isn't a run's is left as it is
    ours = folder.try_lock()
    record = folder.load()                    # after the lock: whoever drove it until now has written its last word
    if record.state in TERMINAL and not (ours and unsettled(record)):
        screen.say(f"{record.run_id} had ended already")
    elif not record.node.get("name"):
        _not_begun(folder, record, ours, screen)
    elif ours:
        _take_over(folder, record, way, screen, operator, grace_s)
    else:
        screen.say(f"telling {record.node['name']} to stop {record.run_id}; the gpurun that drives it collects what there is")
        _, nodes, link = way(record)
        if not _tell(record, nodes[0], link(), screen, operator, grace_s):
            _end_driver(folder, screen)
        gone = _closed(folder, screen) is None and folder.try_lock()
        record = folder.load()
        if gone and not settled(record):      # who drove it has ended without closing its record: killed, or its disk is full
            _take_over(folder, record, way, screen, operator, grace_s)
    return record


def _take_over(folder: RunFolder, record: Record, way: Way, screen: Screen, operator: str, grace_s: float) -> None:
    """Stops a run that nobody else drives, and collects what there is."""
    from gpurun.orchestrator import Orchestrator
    cluster, nodes, link = way(record)
    Orchestrator(job_on_record(record), cluster, nodes, link, folder, record, screen, operator=operator, lacking="it is to be stopped").take_over(
        stop=True, grace_s=grace_s, echo=False)


def unsettled(record: Record) -> bool:
    """Whether a run was closed without its node's last word: declared lost, or its outputs never came. The node may have it still."""
    try:
        return bool(record.node.get("name")) and fsm.unsettled(fsm.Run(**record.fsm))
    except TypeError:                         # of another version, or closed before it had a lifecycle
        return False


def settled(record: Record) -> bool:
    """Whether the record has the last word: its node has nothing of the run that isn't here."""
    return record.state in TERMINAL and not unsettled(record)


def complete(record: Record) -> bool:
    """Whether it is settled and its logs are here to their end. A run that its node never had has none."""
    return settled(record) and (record.logs_complete or not record.node_dir)


def job_on_record(record: Record) -> Job:
    """The job as its run's record has it, without the values of its env: enough to watch it, to stop it and to collect its outputs."""
    job = record.job
    path = str(job.get("file", ""))
    return Job(path=path, folder=os.path.dirname(path), name=job.get("name", ""), run=job.get("run", ""), setup=job.get("setup", ""),
               workdir=job.get("workdir"), exclude=tuple(job.get("exclude") or ()), outputs=tuple(job.get("outputs") or ()))


def _not_begun(folder: RunFolder, record: Record, ours: bool, screen: Screen) -> None:
    """No node has the run. Its gpurun is told, if there is one; else the record is all that there is to close."""
    if not ours:
        _end_driver(folder, screen)
        return
    never_given(folder, record, fsm.BY_OPERATOR + " before anything was begun", EXIT_STOPPED, "OperatorStop")
    screen.say(f"{record.run_id} was never given to a node: nothing of it runs")


def never_given(folder: RunFolder, record: Record, reason: str, exit_code: int, event: str = "NodeFault") -> None:
    """Closes the record of a run that no node has had, and that nobody drives."""
    record.state, record.reason, record.exit_code = FAILED, reason, exit_code
    record.times["ended"] = utc_now()
    folder.save(record)
    folder.append_event({"event": event, "from": PENDING, "from_phase": "", "to": FAILED, "to_phase": "", "command": []})


def _end_driver(folder: RunFolder, screen: Screen) -> None:
    """What Ctrl-C in its terminal would do."""
    deadline = time.monotonic() + CLOSE_S
    while folder.driver() == 0 and time.monotonic() < deadline:   # it has just taken the lock and not yet said who it is
        time.sleep(0.01)
    pid = folder.driver()
    if pid:
        screen.say(f"the node doesn't have it yet: the gpurun that waits with it (process {pid}) is told to stop")
        os.kill(pid, signal.SIGTERM)


def _closed(folder: RunFolder, screen: Screen) -> Record | None:
    """The record once the gpurun that drives the run has closed it and has gone."""
    deadline = time.monotonic() + CLOSE_S
    while folder.driver() is not None and time.monotonic() < deadline:
        screen.live_tick()
        time.sleep(0.05)
    record = folder.load()
    return record if record.state in TERMINAL else None   # else it still collects


def _tell(record: Record, node: Node, link: Link, screen: Screen, operator: str, grace_s: float) -> bool:
    """Waits until the node says that nothing of the run is left. False: it doesn't know the run."""
    inbox: "SimpleQueue[Any]" = SimpleQueue()
    session = reach(link, node, inbox, screen.say, lambda name, done, total: None)
    if session.note:
        screen.say(session.note)
    session.begin(Hello(version=__version__, operator=operator, run_id=record.run_id), StopJob(record.run_id, grace_s))
    deadline = time.monotonic() + grace_s + STOP_S
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
            if isinstance(item, Refused) and item.of == "Hello":
                return False
            if isinstance(item, Refused) or isinstance(item, Busy) and not item.ahead:   # `ahead`: it waits there, and a stop ends that too
                raise RecordError(f"{node.name} refused: {getattr(item, 'reason', 'it is busy')}")
            if isinstance(item, (JobExited, NodeFault)) or isinstance(item, SetupCompleted) and (item.code or item.stopped or item.limit):
                return True
    finally:
        screen.phase("")
        session.close()
    raise GpurunError(f"{record.run_id} on {node.name} didn't end within {grace_s + STOP_S:g} s of the stop; look at its processes there")
