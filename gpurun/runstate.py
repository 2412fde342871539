"""A run's state on its node, as state.json has it: all its keys, and what it says to who asks how the run is."""

from __future__ import annotations

import signal
import time
from typing import Any, Dict, Optional, Sequence

from gpurun import supervise
from gpurun.messages import JobExited, NodeFault, OutputsCollected, SetupCompleted

REASON_SHOWN = 200            # of a fault, in a list of many runs


def complete(state: Dict[str, Any]) -> Dict[str, Any]:
    """A run's state with all its keys: those that an agent of an older version didn't know have the value that fits what it did."""
    began = {"boot": supervise.boot_id(), "since": time.monotonic(), "place": 0, "keep": 20, "turn": True, "workspace": False, "made": None,
             "setup": None, "over": False, "collected": False, "pulled": None, "asked_outputs": False, "supervised": None, "detached": False,
             "shared": False, "slurm": None, "stopped": False, "limit": "", "watch": None, "logs_taken": False,
             "plan": {"tree": None, "setup": None, "run": None, "outputs": None}}
    if state.get("workspace"):
        began["made"] = {"files": 0, "size_bytes": 0, "boot": began["boot"]}
    return dict(began, **state)


def setup_code(event: SetupCompleted) -> int:
    """0 when the job may follow. A setup that was stopped, or ended by a limit, and exits 0 all the same has no job behind it either."""
    return event.code or (128 + signal.SIGTERM if event.stopped or event.limit else 0)


def backend(state: Dict[str, Any]) -> Dict[str, Any]:
    """What Slurm last said of the run's job; {} for a run that isn't Slurm's."""
    plan = state["plan"]["run"]
    if plan is None or not plan.get("backend"):
        return {}
    return dict({"kind": "slurm", "job_id": "", "state": "", "reason": "", "nodes": "", "seconds": 0}, **(state["slurm"] or {}))


def report(state: Dict[str, Any], events: Sequence[Any], collected: bool, has_turn: bool, watch: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """How the run is, for RunStates; `ahead` is the queue's to say. `watch`: what its budget's watch says, where there is one."""
    last = next((event for event in reversed(events) if not isinstance(event, OutputsCollected)), None)
    said: Dict[str, Any] = {"over": bool(state["over"]), "collected": collected, "detached": bool(state["detached"]),
                            "seconds": round(max(0.0, time.monotonic() - state["since"]), 1)}
    if state["over"]:
        said.update(phase="ended", code=None, signal=0, stopped=False, reason="")
        if isinstance(last, JobExited):
            said.update(code=last.code, signal=last.signal, stopped=last.stopped, limit=last.limit, reason=last.hint[:REASON_SHOWN])
        elif isinstance(last, SetupCompleted):
            said.update(code=setup_code(last), signal=last.signal, stopped=last.stopped, limit=last.limit,
                        reason=(last.hint or "the setup failed")[:REASON_SHOWN])
        elif isinstance(last, NodeFault):
            said.update(reason=last.reason[:REASON_SHOWN])
    elif state["supervised"]:
        said["phase"] = state["supervised"]["phase"]
    elif state["slurm"] is not None:
        said["phase"] = "run"
    elif not has_turn:
        said["phase"] = "queued"
    elif not state["workspace"]:
        said["phase"] = "workspace"
    else:
        said["phase"] = "setup" if state["plan"]["setup"] is not None and state["setup"] is None else "run"
    if watch is not None:
        said["watch"] = watch
    if backend(state):
        said["backend"] = backend(state)
    return said
