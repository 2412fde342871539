"""What the benchmarks share: an SSH host at the end of a link, gpurun as a user calls it, contestants in turn, medians and ratios.

README.md beside this says how to run them. Each figure is wall time of a whole process unless it says otherwise. The contestants take turns, so
that a machine that drifts drifts for all of them; between two of them the kernel forgets what it learnt of the link, and dirty pages go to the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(TESTS))

try:
    from agents import end_agents   # noqa: E402
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run this with the Python of an environment that has gpurun (contrib/bench/README.md says how)") from None
from sshd import Sshd   # noqa: E402

WAN = TESTS / "wan"
MEASURED = Path(__file__).with_name("measured.py")
RUNS = 5
# tests/wan makes all but the first: rate and loss hold each way, the round trip is for both.
LINKS: dict[str, dict[str, str]] = {
    "loopback": {},
    "lan": {"rtt": "2ms", "rate": "1gbit"},
    "coast": {"rtt": "50ms", "rate": "100mbit"},
    "ocean": {"rtt": "100ms", "rate": "100mbit"},
    "ocean-0.1": {"rtt": "100ms", "rate": "100mbit", "loss": "0.1%"},
    "ocean-1": {"rtt": "100ms", "rate": "100mbit", "loss": "1%"},
}


def parser(about: str | None, links: bool = True, runs: int = RUNS) -> argparse.ArgumentParser:
    """--runs and --unmeasured (none with `runs` 0), and with `links` --link and --cc; a benchmark adds its own."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs:
        made.add_argument("--runs", type=int, default=runs, metavar="N", help=f"runs that count of each contestant (default {runs})")
        made.add_argument("--unmeasured", type=int, default=1, metavar="N", help="runs before them that don't count (default 1); 0 for what takes long anyway")
    if links:
        made.add_argument("--link", choices=LINKS, default="loopback", help="what lies between here and the node (default loopback); the others need root")
        made.add_argument("--cc", default="cubic", metavar="NAME", help="TCP's congestion control on that link, both sides (default cubic, as on most hosts)")
    return made


class Bench:
    """One operator, and one fresh SSH host at the end of a link. `home` is the home folder there, and can be looked into from here."""

    def __init__(self, folder: Path, link: str, config: Path, home: Path, log: Path) -> None:
        self.folder, self.link, self.config, self.home, self._log = folder, link, config, home, log
        self.shape: dict[str, Any] = {}       # of tests/wan: its name, device and addresses
        self.ssh = ["ssh", "-F", str(config), "node"]
        self.rsh = f"ssh -F {config}"
        self.work = folder / "work"
        self.work.mkdir()
        home_here = folder / "operator"
        home_here.mkdir()
        self.env = dict(os.environ, HOME=str(home_here), GPURUN_SSH_CONFIG=str(config), CI="true")
        (self.work / "cluster.toml").write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "node"\n')

    @property
    def logins(self) -> int:
        """How many SSH connections have logged in so far."""
        return self._log.read_text(errors="replace").count("Accepted publickey")

    def job(self, name: str, run: str, **keys: Any) -> Path:
        path = self.work / f"{name}.toml"
        text = "".join(f"{key} = {value if isinstance(value, str) and value.startswith('{') else json.dumps(value)}\n" for key, value in keys.items())
        path.write_text(f"[job]\nname = {json.dumps(name)}\nrun = {json.dumps(run)}\n{text}")
        return path

    def gpurun(self, job: Path, *options: str) -> dict[str, Any]:
        """Runs a job and returns its result, with `wall` seconds, `peak_kib` of the operator's process, and its `record`."""
        measures = self.folder / "measured"
        command = [sys.executable, "-I", "-S", str(MEASURED), str(measures), str(gpurun_command()), str(job), "--json", *options]
        with tempfile.TemporaryFile() as out:                    # a pipe that nobody empties fast enough would be measured instead
            subprocess.run(command, cwd=self.work, env=self.env, stdin=subprocess.DEVNULL, stdout=out, check=True)
            wall, peak_kib, code = map(float, measures.read_text().split())
            out.seek(max(out.seek(0, os.SEEK_END) - 100_000, 0))
            last = out.read().splitlines()[-1:]
        if code or not last:
            raise SystemExit(f"gpurun {job} ended with {code:g}:\n{b''.join(last).decode(errors='replace')}")
        result = dict(json.loads(last[0]), wall=wall, peak_kib=int(peak_kib))
        result["folder"] = self.work / "gpurun-runs" / result["run_id"]
        result["record"] = json.loads((result["folder"] / "run.json").read_text())
        return result

    def agent_pid(self) -> int:
        return int(json.loads((self.home / ".gpurun/agent/endpoint.json").read_text())["pid"])

    def agent_peak_kib(self) -> int:
        status = Path(f"/proc/{self.agent_pid()}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    def forget_agent_peak(self) -> None:
        """From now on the agent's peak is counted anew, from what it has now."""
        Path(f"/proc/{self.agent_pid()}/clear_refs").write_text("5")

    def settle(self) -> None:
        """Before each contestant: no metrics of an earlier connection, no pages of an earlier one that are still to be written."""
        os.sync()
        if self.shape:
            for side, peer in (((), self.shape["node"]), (("-n", self.shape["name"]), self.shape["operator"])):
                subprocess.run(["ip", *side, "tcp_metrics", "flush", peer], check=False, capture_output=True)

    def set(self, **shape: str) -> None:
        """Changes the link, which must be one of tests/wan."""
        wan("set", self.shape["name"], *(word for key, value in shape.items() for word in (f"--{key}", value)))

    @contextlib.contextmanager
    def congestion(self, name: str) -> Iterator[None]:
        """TCP connections that begin in here have this congestion control, on both sides. gpurun's UDP has its own."""
        self._route(name)
        try:
            yield
        finally:
            self._route(self.shape["cc"])

    def _route(self, congestion_control: str) -> None:
        here, there = self.shape["operator"], self.shape["node"]
        for side, device, mine, peer in (((), self.shape["dev"], here, there), (("-n", self.shape["name"]), "wan0", there, here)):
            subprocess.run(["ip", *side, "route", "replace", peer, "dev", device, "src", mine, "congctl", congestion_control], check=True)


def gpurun_command() -> Path:
    command = Path(sys.executable).parent / "gpurun"
    if not command.exists():
        raise SystemExit(f"there is no gpurun beside {sys.executable}: run this with the Python of an environment that has it (README.md says how)")
    return command


def wan(*words: str) -> str:
    done = subprocess.run([WAN, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the link can't be made or changed: tests/wan {' '.join(words)}: {done.stderr.strip()}\n"
                         "It needs root, iproute2 and /dev/net/tun; --link loopback does without.")
    return done.stdout.strip()


@contextlib.contextmanager
def bench(link: str = "loopback", cc: str = "cubic") -> Iterator[Bench]:
    """Prints what it is measured on and what the first use of the host took. Nothing stays: no agent, no link, no folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="gpurun-bench-"))
    try:
        with (on_loopback(folder) if link == "loopback" else on_a_link(folder, link, cc)) as made:
            what = " ".join(f"{key} {value}" for key, value in LINKS[link].items())
            print(f"link {link}{f': {what}, TCP with {cc}' if what else ''}; {machine()}")
            before = made.logins
            first = made.gpurun(made.job("first", "true"))
            print(f"first use of a fresh host: {first['wall']:.2f} s, {made.logins - before} SSH connections"
                  + ("   (this link's loss begins afterwards)" if "loss" in LINKS[link] else ""), flush=True)
            if "loss" in LINKS[link]:
                made.set(loss=LINKS[link]["loss"])
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def on_loopback(folder: Path) -> Iterator[Bench]:
    try:
        with Sshd(folder / "sshd", ["Subsystem sftp internal-sftp"]) as sshd:   # scp wants it, gpurun doesn't
            yield Bench(folder, "loopback", sshd.config, sshd.home, sshd.log)
    finally:
        end_agents(folder)


@contextlib.contextmanager
def on_a_link(folder: Path, link: str, cc: str) -> Iterator[Bench]:
    """The loss comes later: putting iroh there over a lossy one takes minutes of SSH, and is none of what is measured."""
    name, home = f"bench{os.getpid()}", folder / "home"
    wan("up", name, "--seed", "1", "--cc", cc, *(word for key, value in LINKS[link].items() if key != "loss" for word in (f"--{key}", value)))
    try:
        config = Path(wan("sshd", name, "2222", "--home", str(home)))
        made = Bench(folder, link, config, home, config.with_name("log"))
        (made.shape,) = json.loads(wan("status", name, "--json"))
        yield made
        drops = sum(way.get("kernel_drops") or 0 for way in json.loads(wan("status", name, "--json"))[0]["counters"].values())
        if drops:
            print(f"VOID: this machine was too busy to emulate the link, {drops} packets were lost on the way to the emulator")
    finally:
        end_agents(folder)
        wan("down", "--kill", name)


def machine() -> str:
    """What figures must be read with."""
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.split(",")[0].strip()
    return f"{os.cpu_count()} x {model or platform.machine()}, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}, {ssh}"


def sh(*command: str, env: dict[str, str] | None = None) -> float:
    """Seconds of a command that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return time.perf_counter() - began


def in_turn(contestants: dict[str, Callable[[], float]], args: argparse.Namespace, before: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Median seconds of each of `args.runs`, after `args.unmeasured` runs of each that don't count. `before` each one."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(args.unmeasured + args.runs):
        for name, run in contestants.items():
            before()
            seconds = run()
            if turn >= args.unmeasured:
                taken[name].append(seconds)
    for name, values in taken.items():
        print(f"  {name:<58} {statistics.median(values):8.3f} s   ({min(values):.3f} – {max(values):.3f})", flush=True)
    return {name: statistics.median(values) for name, values in taken.items()}


def ratio(what: str, ours: float, theirs: float, goal: str) -> None:
    print(f"  {what:<58} {ours / theirs:8.2f} ×   goal {goal}", flush=True)


def size(text: str) -> int:
    """Bytes out of 20M, 1G, 4096; powers of ten."""
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 0)
    return int(float(text[:-1]) * factor) if factor else int(text)


def shown(count: float) -> str:
    """4 GB, 20 MB, 4096 B."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:g} B"
