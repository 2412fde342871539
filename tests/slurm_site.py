"""An operator of a Slurm for tests: `site` is one for a whole file, whose agent is up already, and whose login shell alone knows the tests' cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from conftest import Here, eventually
from running import Running, end_all
from slurm_cluster import Shims, Slurm

COUNTED = "echo $SLURM_JOB_ID >> $HOME/ran-{name}"
STUBBORN = "trap 'echo bye; echo saved > saved; exit 0' TERM; echo up; while :; do sleep 0.02; done"
NEWS_S = 60.0    # in which something that Slurm decides is seen


class Started(Running):
    """One whose end Slurm and its agent have to tell of first. Whoever promises that something is soon says so: `with within(…)`."""

    def until(self, text: str) -> None:
        """Returns as soon as the job has printed the line `text`: a word of the job is in what gpurun itself says now and then."""
        eventually(lambda: text + "\n" in self.printed or not any(reader.is_alive() for reader in self.readers), 2 * NEWS_S)
        assert text + "\n" in self.printed, self.err

    def end(self) -> int:
        self.process.wait(2 * NEWS_S)
        return super().end()


class Site:
    """`here` is the operator, `slurm` the cluster, `shims` the programs that his login shell has. Each test brings its own job names."""

    def __init__(self, here: Here, slurm: Slurm, **keys: Any) -> None:
        self.here, self.slurm = here, slurm
        self.shims: Shims = slurm.here(here)
        self.cluster = slurm.cluster_file(here, **keys)
        self.env = here.env
        self.env["GPURUN_CLUSTER"] = str(self.cluster)      # for job files in folders of their own

    # ---- jobs

    def with_keys(self, name: str, **keys: Any) -> Path:
        """Another cluster file of this operator, for --cluster."""
        return self.slurm.cluster_file(self.here, self.here.work / f"{name}-cluster.toml", **keys)

    def job(self, run: str, name: str, **keys: Any) -> Path:
        return self.here.job(run, name=name, folder=self.here.work / name, **keys)

    def start(self, *args: Any, **options: Any) -> Running:
        return Started(self.here, *args, **options)

    def gpurun(self, *args: Any, **options: Any) -> Any:
        return self.here.gpurun(*args, **options)

    def submit(self, path: Path, *args: Any, **options: Any) -> str:
        done = self.gpurun("submit", path, *args, **options)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def ends(self, run_id: str, *args: str) -> Any:
        """`gpurun attach`, to the run's end."""
        return self.gpurun("attach", run_id, *args)

    def until(self, name: str) -> str:
        """Shell that waits for `go(name)`."""
        return f"while [ ! -e {self.here.work}/{name}.go ]; do sleep 0.02; done"

    def go(self, name: str) -> None:
        (self.here.work / f"{name}.go").touch()

    # ---- what is known

    def folder(self, name: str) -> Path:
        """Of the newest run of a job, once there is one."""
        return eventually(lambda: sorted(self.here.runs.glob(f"{name}-2*")))[-1]

    def record(self, name: str) -> Dict[str, Any]:
        return json.loads((self.folder(name) / "run.json").read_text())

    def there(self, name: str) -> Path:
        """The run's folder on the node."""
        return self.here.node_dir / "runs" / self.folder(name).name

    def state(self, name: str) -> Dict[str, Any]:
        try:
            return json.loads((self.there(name) / "state.json").read_text())
        except FileNotFoundError:
            return {}

    def job_id(self, name: str) -> str:
        """Of the run's job, once its agent knows it."""
        return eventually(lambda: (self.state(name).get("slurm") or {}).get("job_id"), NEWS_S)

    def slurms(self, name: str) -> Dict[str, str]:
        """What Slurm says of the run's job."""
        return self.slurm.job(self.job_id(name))

    def printed(self, name: str) -> str:
        path = self.there(name) / "run.out"
        return path.read_text() if path.exists() else ""

    def until_printed(self, name: str, text: str) -> None:
        eventually(lambda: text in self.printed(name), NEWS_S)

    def until_running(self, name: str) -> None:
        """Until its agent has heard so from Slurm."""
        eventually(lambda: self.backend(name).get("state") == "RUNNING", NEWS_S)

    def backend(self, name: str) -> Dict[str, Any]:
        """What the agent says, when it is asked now, of the job of a run that nobody watches."""
        done = self.gpurun("status", self.folder(name).name, "--refresh", "--json")
        return (json.loads(done.stdout).get("seen") or {}).get("backend") or {}

    def calls(self, program: str) -> List[List[str]]:
        """Of a program of Slurm, by this operator's agent."""
        return self.shims.calls(program)

    def jobs(self, name: str) -> List[str]:
        """All of Slurm's jobs that the newest run of `name` ever had, as far as Slurm remembers."""
        return self.slurm.jobs(self.folder(name).name)

    def kill_agent(self) -> int:
        """Its pid. Returns once it is gone."""
        pid = self.here.agent()["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not _alive(pid))
        return pid

    def end(self) -> None:
        """Nothing of a test that failed half-way goes on."""
        end_all()
        for name in os.listdir(self.shims.folder):
            if not name.startswith("."):
                self.shims.shim(name)
        names = {path.name for path in self.here.runs.iterdir()} if self.here.runs.exists() else set()
        deadline = time.monotonic() + NEWS_S
        while True:
            lines = [line.split(" ", 1) for line in self.slurm.run("squeue", "-h", "-o", "%i %j").stdout.splitlines()]
            left = [job for job, name in lines if name in names]
            if not left:
                return
            assert time.monotonic() < deadline, f"these jobs don't end: {left}"
            self.slurm.run("scancel", *left, check=False)
            for job in left:
                self.slurm.run("scancel", "--signal=KILL", "--batch", job, check=False)
            time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ran(site: Site, name: str) -> List[str]:
    """The ids of the jobs in which `COUNTED` of this name was run, in order."""
    path = site.here.home / f"ran-{name}"
    return path.read_text().split() if path.exists() else []


def failed(site: Site, name: str, code: int, *reason: str) -> None:
    """Asserts how the run ended, and that these words say why."""
    record = site.record(name)
    assert (record["state"], record["exit_code"]) == ("FAILED", code), (record["exit_code"], record["reason"])
    assert all(text in record["reason"] for text in reason), record["reason"]


def pending(site: Site, name: str, **keys: Any) -> Path:
    """A cluster file whose jobs wait until `slurm.run("scontrol", "release", …)`."""
    return site.with_keys(name, extra=["--hold"], **keys)


def stopped(site: Site, name: str) -> None:
    """Asserts that the run ended because it was told to."""
    record = site.record(name)
    assert (record["state"], record["exit_code"], record["reason"]) == ("FAILED", 130, "stopped by the operator"), record["reason"]


def within(seconds: float) -> "Within":
    return Within(seconds)


class Within:
    """`with within(5): …` asserts that it took no longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> "Within":
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        took = time.monotonic() - self.began
        assert kind is not None or took < self.seconds, f"it took {took:.1f} s"


@pytest.fixture(scope="module")
def site_of_file(warm: Here, slurm: Slurm) -> Iterator[Site]:
    yield Site(warm, slurm)


@pytest.fixture
def site(site_of_file: Site) -> Iterator[Site]:
    yield site_of_file
    site_of_file.end()
