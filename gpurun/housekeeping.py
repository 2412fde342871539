"""`gpurun status --refresh` and `gpurun rm`: what the nodes say of the runs that are kept here, and runs that go, there and here."""

from __future__ import annotations

import os
import threading
from queue import Empty, SimpleQueue
from typing import Any, Callable, Sequence

from gpurun.asking import Asked, ask_once
from gpurun.errors import GpurunError, LinkError, MachineGoneError, RecordError
from gpurun.records import LATEST, Listed, Record, RunFolder, all_runs, point_latest, utc_now
from gpurun.screen import Screen
from gpurun.stopping import Way, settled
from gpurun.store import remove_tree

AT_ONCE = 8                   # nodes that are asked at the same time
LEAVING = ".removed-"         # a run's folder on its way out: nothing that lists runs sees it
UNKNOWN = "unknown"           # in the place of a phase: the node doesn't have the run


# ---- refresh -----------------------------------------------------------------------------------------------------------------------

def refresh(listed: Sequence[Listed], way: Way, operator: str, warn: Callable[[str], None]) -> None:
    """Asks the nodes of the runs that aren't settled, each node once, and keeps what they say in the records' `seen`. A node that doesn't
    answer is a warning. No agent is deployed for this."""
    groups: dict[tuple[str, str], list[Listed]] = {}
    for one in listed:
        if one.record is not None and one.record.node.get("name") and not settled(one.record):
            groups.setdefault((str(one.record.node.get("cluster", "")), one.record.node["name"]), []).append(one)
    todo: "SimpleQueue[list[Listed]]" = SimpleQueue()
    for group in groups.values():
        todo.put(group)
    links: dict[Any, Callable[[], Any]] = {}
    lock = threading.Lock()

    def work() -> None:
        while True:
            try:
                group = todo.get(block=False)
            except Empty:
                return
            record = group[0].record
            assert record is not None
            try:
                with lock:                    # reading a cluster file takes milliseconds; a link is shared by the nodes that it suits
                    cluster, nodes, link = way(record)
                    link = links.setdefault((cluster.here, cluster.relay), link)
                _ask(group, nodes[0], link, operator)
            except (GpurunError, OSError) as error:
                warn(f"{record.node['name']}: {error}")

    threads = [threading.Thread(target=work, name="refresh", daemon=True) for _ in range(min(AT_ONCE, len(groups)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(group: Sequence[Listed], node: Any, link: Callable[[], Any], operator: str) -> None:
    known = node.known_endpoint()
    if known is None:
        raise LinkError("no agent is known there that could be asked; `gpurun attach` or `gpurun logs` of one of its runs starts one")
    states = ask_once(link(), node, known, [one.folder.run_id for one in group], operator)
    for one in group:
        assert one.record is not None
        said = states.get(one.folder.run_id)
        one.record.seen = {"at": utc_now(), **(said if isinstance(said, dict) else {"phase": UNKNOWN})}
        if one.folder.try_lock():             # who drives it writes its record, and knows more
            try:
                record = one.folder.load()
                record.seen = one.record.seen
                one.folder.save(record)
            finally:
                one.folder.close()


# ---- rm ----------------------------------------------------------------------------------------------------------------------------

def remove(folder: RunFolder, way: Way, screen: Screen, operator: str, force: bool = False, only_here: bool = False) -> None:
    """Deletes a run, on its node and then here. Raises RecordError, and deletes nothing, when something of it runs or isn't home; `force` is
    for what isn't home, `only_here` for a node that is gone."""
    if not only_here:
        folder.load()                         # or an error: a folder that isn't a run's is left as it is
    if not folder.try_lock():
        raise RecordError(f"{folder.run_id} is at work: process {folder.driver() or '?'} drives it. End it with `gpurun stop {folder.run_id}`, "
                          "then remove it.")
    try:
        if not only_here:
            record = folder.load()
            if record.node.get("name"):
                _remove_there(folder, record, way, screen, operator, force)
        _remove_here(folder)
    finally:
        folder.close()


def _remove_there(folder: RunFolder, record: Record, way: Way, screen: Screen, operator: str, force: bool) -> None:
    run_id, name = folder.run_id, record.node["name"]
    _, nodes, link = way(record)
    try:
        asked = Asked(link(), nodes[0], [run_id], screen, operator)
    except MachineGoneError:                  # and so is what it had of the run
        return
    except LinkError as error:
        raise LinkError(f"{name} can't be reached to remove {run_id} there: {error}. If it is gone for good: gpurun rm --here {run_id}") from None
    try:
        state = asked.states.get(run_id)
        if state is None:
            return
        if not state.get("over"):
            raise RecordError(f"{run_id} still runs on {name} ({state.get('phase') or 'begun'}). End it with `gpurun stop {run_id}`, then remove it.")
        if not (force or settled(record)):
            raise RecordError(f"{run_id} has ended on {name} and its outputs or logs aren't home yet. Bring them with `gpurun fetch {run_id}`, "
                              f"or remove it all the same with: gpurun rm --force {run_id}")
        asked.remove(run_id)
    finally:
        asked.close()


def _remove_here(folder: RunFolder) -> None:
    """Renamed away first: a list of runs has it whole or not at all. What a killed `rm` left goes too."""
    runs_dir = os.path.dirname(folder.path)
    try:
        os.rename(folder.path, os.path.join(runs_dir, LEAVING + folder.run_id))
        if not os.path.exists(os.path.join(runs_dir, LATEST)):
            left = all_runs(runs_dir)
            point_latest(runs_dir, left[0].folder.run_id if left else None)
        for name in os.listdir(runs_dir):
            if name.startswith(LEAVING):
                remove_tree(os.path.join(runs_dir, name))
    except OSError as error:
        raise RecordError(f"{error.filename or folder.path} can't be removed: {error.strerror}. Check its owner and mode.") from error
