"""What the benchmarks share: a real sshd on loopback, gpurun as a user calls it, several runs in turn, medians and ratios.

Run them with the Python of an environment that has gpurun installed (`contrib/setup`, then `.venv/bin/python contrib/bench/warm.py`).
They need an OpenSSH server and rsync. Each figure is wall time of a whole process unless it says otherwise; the contestants take turns,
so that a machine that drifts drifts for all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from agents import end_agents   # noqa: E402
from sshd import Sshd   # noqa: E402

RUNS = int(os.environ.get("BENCH_RUNS", "5"))


class Bench:
    """One operator, one fresh SSH host."""

    def __init__(self, folder: Path, sshd: Sshd) -> None:
        self.folder, self.sshd = folder, sshd
        self.ssh = ["ssh", "-F", str(sshd.config), "node"]
        self.rsh = f"ssh -F {sshd.config}"
        self.work = folder / "work"
        self.work.mkdir()
        home = folder / "operator"
        home.mkdir()
        self.env = dict(os.environ, HOME=str(home), GPURUN_SSH_CONFIG=str(sshd.config), CI="true")
        self.cluster = self.work / "cluster.toml"
        self.cluster.write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "node"\n')

    def job(self, name: str, run: str, **keys: Any) -> Path:
        path = self.work / f"{name}.toml"
        text = "".join(f"{key} = {value if isinstance(value, str) and value.startswith('{') else json.dumps(value)}\n" for key, value in keys.items())
        path.write_text(f"[job]\nname = {json.dumps(name)}\nrun = {json.dumps(run)}\n{text}")
        return path

    def gpurun(self, job: Path, *options: str) -> dict[str, Any]:
        """Runs a job and returns its result, with `wall` seconds and `peak_kib` of the operator's process."""
        command = [str(Path(sys.executable).parent / "gpurun"), str(job), "--json", *options]
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=self.work, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        out = process.stdout.read() if process.stdout else b""
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"gpurun {job} ended with {process.returncode}:\n{out.decode(errors='replace')[-2000:]}")
        return dict(json.loads(out.splitlines()[-1]), wall=wall, peak_kib=usage.ru_maxrss)

    def agent_peak_kib(self) -> int:
        known = json.loads((self.sshd.home / ".gpurun/agent/endpoint.json").read_text())
        status = Path(f"/proc/{known['pid']}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="gpurun-bench-"))
    try:
        with Sshd(folder / "sshd", ["Subsystem sftp internal-sftp"]) as sshd:   # scp wants it, gpurun doesn't
            yield Bench(folder, sshd)
    finally:
        end_agents(folder)
        shutil.rmtree(folder, ignore_errors=True)


def sh(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def in_turn(contestants: dict[str, Callable[[], float]], runs: int = RUNS) -> dict[str, float]:
    """Median seconds of each, after one run of each that doesn't count."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(runs + 1):
        for name, run in contestants.items():
            seconds = run()
            if turn:
                taken[name].append(seconds)
    for name, values in taken.items():
        print(f"  {name:<58} {statistics.median(values):8.3f} s   ({min(values):.3f} – {max(values):.3f})")
    return {name: statistics.median(values) for name, values in taken.items()}


def ratio(what: str, ours: float, theirs: float, goal: str) -> None:
    print(f"  {what:<58} {ours / theirs:8.2f} ×   goal {goal}")
