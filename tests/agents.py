"""Ending agents that tests and benchmarks started, and what their jobs left. Needs no pytest."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

from gpurun import supervise


def works_in(pid: int, run: Path) -> bool:
    """Whether a run's process is that of this node's run, and not of one that another test calls alike at the same time."""
    try:
        return f"GPURUN_OUTPUTS={run.absolute()}/".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False                                         # it has just ended


def end_agents(folder: Path) -> None:
    """Ends every agent with its node folder below `folder`, and what its jobs left."""
    found = [Path(here, "endpoint.json") for here, _, names in os.walk(folder)   # which passes over what an agent deletes just now
             if "endpoint.json" in names and os.path.basename(here) == "agent"]
    for endpoint in found:
        known = json.loads(endpoint.read_text())
        below = supervise.descendants(known["pid"])
        for run in (endpoint.parent.parent / "runs").iterdir() if (endpoint.parent.parent / "runs").is_dir() else ():
            below |= {pid for pid in supervise.of_run(run.name) if works_in(pid, run)}
        if supervise.start_time(known["pid"]) == known["start"]:
            supervise.send(known["pid"], signal.SIGKILL)
        elsewhere = os.path.dirname(known.get("socket") or "")
        if elsewhere.startswith("/tmp/gpurun-"):             # of a node folder with a long name
            shutil.rmtree(elsewhere, ignore_errors=True)
        for pid in below:
            supervise.send(pid, signal.SIGKILL)
