"""A full disk, on the laptop and on the node, in each phase: a clear error, nothing half-written, no job ended by it, and once there is
room again `gpurun fetch` ends the work.

The disks are small tmpfs. They are filled by making them as small as what is on them, so that a byte more or less is no matter of chance.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here, end_agents, eventually
from trees import tiny_disk

from gpurun import supervise
from gpurun.files import TEMP_PREFIX

PAGE = 4096                   # what a tmpfs gives out
SIZE = "256m"
LINES = 30_000                # 170 kB of log
COUNT = f"seq {LINES}"
COUNTED = "".join(f"{number}\n" for number in range(1, LINES + 1))
FREE = re.compile(r"[\d,]+ bytes(?: \([\d.]+ kB\))? free|free, needed are|are free|were free")


class Disk:
    """A disk that can be full."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def full(self, spare_pages: int = 0) -> None:
        (self.path / "one").write_text("page")                     # a size of 0 would be no limit
        for left in range(50, -1, -1):
            disk = os.statvfs(self.path)
            try:
                return self._resize((disk.f_blocks - disk.f_bfree + spare_pages) * disk.f_frsize)
            except subprocess.CalledProcessError:                  # something was written meanwhile
                if not left:
                    raise

    def has_room(self) -> None:
        self._resize(256 << 20)

    def _resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with tiny_disk(tmp_path / "disk", SIZE) as path:
        yield Disk(path)
        for run in path.glob("node/runs/*"):                     # a job that waits in a test that failed would hold the disk
            for pid in supervise.of_run(run.name):
                supervise.send(pid, 9)
        end_agents(tmp_path)


# ---- the laptop's ------------------------------------------------------------------------------------------------------------------------

class Laptop:
    """An operator whose runs are on a small disk; the node's is large."""

    def __init__(self, here: Here, disk: Disk) -> None:
        self.here, self.disk = here, disk
        here.runs = disk.path / "runs"
        self.options = ("--runs-dir", here.runs)
        self.go = here.folder / "go"
        assert here.gpurun(here.job("true", name="warm"), *self.options).returncode == 0     # the agent is up, .gitignore is there

    def until_go(self, text: str = "true") -> str:
        return f"while [ ! -e '{self.go}' ]; do sleep 0.02; done; {text}"

    def node(self, name: str) -> Path:
        """Of the run's folder on the node."""
        return self.here.node_dir / "runs" / self.here.latest.name / name

    def check_room_asked_for(self, text: str) -> None:
        assert str(self.disk.path) in text and FREE.search(text) and "needed" in text and "Traceback" not in text, text

    def check_home(self, code: int, outputs: dict[str, int]) -> None:
        """All of it is here and says the truth."""
        record = self.here.record()
        assert (record["state"], record["exit_code"]) == ("FAILED" if code else "COMPLETED", code), record["reason"]
        assert record["logs_complete"] and (self.here.latest / "stdout.log").read_text() == COUNTED
        assert {name: (self.here.latest / "outputs" / name).stat().st_size for name in outputs} == outputs
        assert record["outputs"] == list(outputs)
        self.check_nothing_half()

    def check_nothing_half(self) -> None:
        left = [path for path in self.disk.path.rglob("*") if path.name.startswith((TEMP_PREFIX, ".incoming-"))]
        assert not left
        for path in self.here.runs.glob("*/run.json"):
            json.loads(path.read_text())
        for path in self.here.runs.glob("*/events.jsonl"):
            for line in path.read_text().splitlines():
                json.loads(line)


@pytest.fixture
def laptop(here: Here, disk: Disk) -> Laptop:
    return Laptop(here, disk)


@pytest.mark.parametrize("command, spare", [("run", 0), ("submit", 1), ("run", 1), ("submit", 2)])
def test_a_disk_that_is_full_before_the_node_has_the_run_is_an_error_and_nothing_runs(laptop, command, spare):
    """There is room for no file, for the first record, for that and the lock."""
    here = laptop.here
    before, runs_there = set(here.runs.iterdir()), set((here.node_dir / "runs").iterdir())
    laptop.disk.full(spare)
    done = here.gpurun(command, here.job(f"touch {laptop.go}", name="early"), *laptop.options)
    text = done.stderr.decode()
    assert done.returncode in (2, 125) and done.stdout == b"", text
    laptop.check_room_asked_for(text)
    laptop.disk.has_room()
    assert not laptop.go.exists() and set((here.node_dir / "runs").iterdir()) == runs_there
    for left in set(here.runs.iterdir()) - before:               # what there is of it says what became of it
        assert here.gpurun("attach", left.name, *laptop.options).returncode == 125
    laptop.check_nothing_half()


@pytest.mark.parametrize("phase, code", [("queue", 0), ("push", 3), ("setup", 0), ("run", 0), ("run", 3), ("collect", 0), ("collect", 3)])
def test_a_disk_that_fills_while_the_run_is_on_its_node_costs_it_nothing(laptop, phase, code):
    here = laptop.here
    holder = None
    if phase == "queue":
        holder = here.start(here.job(laptop.until_go(), name="holder"))
        eventually(lambda: list((here.node_dir / "runs").glob("holder*/run.out")))
    wait = {name: laptop.until_go() if name == phase else "true" for name in ("setup", "run")}
    run = f"{wait['run']}; {COUNT}; head -c 3000000 /dev/zero > big; echo small > small; exit {code}"
    if phase == "collect":
        run = f"{COUNT}; {laptop.until_go()}; head -c 3000000 /dev/zero > big; echo small > small; exit {code}"
    job = here.job(run, name="full", setup=f"{wait['setup']}; echo set", outputs=["big", "small"], folder=here.work / "full",
                   workspace={"workdir": "."})
    with open(job.parent / "pushed", "wb") as stream:
        stream.truncate((60 << 20) if phase == "push" else 1)
    process = here.start(job, "--wait", *laptop.options)
    eventually(lambda: "full" in here.latest.name)
    if phase == "queue":
        eventually(lambda: laptop.node("state.json").exists() and json.loads(laptop.node("state.json").read_text())["plan"]["run"])
    elif phase == "push":
        eventually(lambda: here.record()["node"].get("name"))
    elif phase == "collect":
        eventually(lambda: (here.latest / "stdout.log").exists() and (here.latest / "stdout.log").read_text() == COUNTED)
    else:
        eventually(lambda: laptop.node(f"{phase}.out").exists() and here.record()["phase"] == phase)
    laptop.disk.full()
    laptop.go.touch()
    out, err = process.communicate(timeout=60)
    text = err.decode()
    if holder is not None:
        holder.communicate(timeout=60)
    run_id = here.latest.name
    assert process.returncode == (code or 125), text             # the job's own, or why a run whose job exited 0 isn't whole
    assert out.decode() == COUNTED                               # what can't be kept is shown all the same
    laptop.check_room_asked_for(text)
    assert f"gpurun fetch {run_id}" in text and ("exited 0" if not code else f"exited {code}") in text
    assert text.count("can't be written") <= 4, text             # once for each file
    laptop.check_nothing_half()
    for command in ("fetch", "attach"):                          # still full: said again, and nothing is lost by trying
        again = here.gpurun(command, run_id, *laptop.options)
        assert again.returncode == (125 if command == "fetch" else code or 125), again.stderr.decode()
        laptop.check_room_asked_for(again.stderr.decode())
    for command in (["status"], ["status", "--refresh"], ["status", run_id], ["logs", run_id, "--tail", 1], ["logs", run_id]):
        done = here.gpurun(*command, *laptop.options)
        assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == COUNTED, done.stderr.decode()
    laptop.disk.has_room()
    done = here.gpurun("fetch", run_id, *laptop.options)
    assert done.returncode == 0 and done.stdout.decode().split() == [f"{here.latest}/outputs/{name}" for name in ("big", "small")], done.stderr.decode()
    laptop.check_home(code, {"big": 3_000_000, "small": 6})
    assert (here.latest / "setup-stdout.log").read_text() == "set\n"
    assert here.gpurun("attach", run_id, *laptop.options).returncode == code


@pytest.mark.parametrize("env", [{}, {"SECRET": "value"}])
def test_submit_on_a_disk_that_is_just_full_is_no_lost_run(laptop, env):
    """There is room for the record with its node, and not for another after it."""
    here = laptop.here
    job = here.job(f"{COUNT}; echo small > small; exit 3", name="submitted", outputs=["small"], env=env)
    laptop.disk.full(3)
    done = here.gpurun("submit", job, *laptop.options)
    run_id = here.latest.name
    assert done.returncode == 0 and done.stdout.decode() == run_id + "\n", done.stderr.decode()
    eventually(laptop.node("run.exit").exists)
    laptop.disk.full()
    done = here.gpurun("wait", run_id, *laptop.options)
    assert done.returncode == 3 and "exited 3; its outputs were not collected" in done.stdout.decode()
    laptop.check_room_asked_for(done.stderr.decode())
    laptop.disk.has_room()
    assert here.gpurun("wait", run_id, *laptop.options).returncode == 3
    laptop.check_home(3, {"small": 6})


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_gpurun_that_ends_while_its_disk_is_full_leaves_a_run_that_can_be_picked_up(laptop, how):
    here = laptop.here
    job = here.job(f"{COUNT}; echo up; {laptop.until_go()}; echo small > small; exit 3", name="left", outputs=["small"])
    process = here.start(job, *laptop.options, stderr=subprocess.DEVNULL)
    while process.stdout.readline() != b"up\n":
        pass
    laptop.disk.full()
    if how == "killed":
        process.kill()
        process.communicate()
        laptop.go.touch()
    else:
        done = here.gpurun("stop", "latest", *laptop.options)
        assert done.returncode == 0, done.stderr.decode()
        process.communicate(timeout=60)
        assert process.returncode == 130
    run_id = here.latest.name
    eventually(laptop.node("run.exit").exists)
    assert here.gpurun("attach", run_id, *laptop.options).returncode == (3 if how == "killed" else 130)
    laptop.disk.has_room()
    done = here.gpurun("fetch", run_id, *laptop.options)
    assert done.returncode == 0, done.stderr.decode()
    record = here.record()
    assert (record["state"], record["exit_code"], record["logs_complete"]) == ("FAILED", 3 if how == "killed" else 130, True)
    assert (here.latest / "stdout.log").read_text() == COUNTED + "up\n"
    assert (here.latest / "outputs/small").exists() == (how == "killed")
    laptop.check_nothing_half()


# ---- the node's ----------------------------------------------------------------------------------------------------------------------------

class OnNode:
    """An operator with room, whose node's folder is on a small disk."""

    def __init__(self, here: Here, disk: Disk) -> None:
        self.here, self.disk, self.folder = here, disk, disk.path / "node"
        self.go = here.folder / "go"
        (here.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\nnode_dir = "{self.folder}"\n')

    def until_go(self, text: str = "true") -> str:
        return f"while [ ! -e '{self.go}' ]; do sleep 0.02; done; {text}"

    def warm(self) -> None:
        assert self.here.gpurun(self.here.job("true", name="warm")).returncode == 0

    def workspace(self, name: str, size: int, run: str = "wc -c < data", **keys: Any) -> Path:
        job = self.here.job(run, name=name, folder=self.here.work / name, workspace={"workdir": "."}, **keys)
        (job.parent / "cluster.toml").write_text((self.here.work / "cluster.toml").read_text())
        with open(job.parent / "data", "wb") as stream:
            stream.truncate(size)
        return job

    def on_its_way(self) -> int:
        """Bytes of what is being pushed and isn't whole yet."""
        found = 0
        for path in (self.folder / "cache/incoming").iterdir():
            with contextlib.suppress(FileNotFoundError):           # it is whole now
                found += path.stat().st_size
        return found

    def refused(self, *args: Any) -> str:
        """The error of a command that ends because there is no room; nothing of it ran."""
        done = self.here.gpurun(*args)
        text = done.stderr.decode()
        assert done.returncode == 125 and done.stdout == b"", text
        assert str(self.folder) in text and FREE.search(text) and "needed" in text, text
        return text

    def check_works_again(self) -> None:
        """With room: the next run is as any, and nothing half-written is left."""
        self.disk.has_room()
        done = self.here.gpurun(self.workspace("again", 1000))
        assert done.returncode == 0 and done.stdout.split() == [b"1000"], done.stderr.decode()
        eventually(lambda: not [path for path in self.folder.rglob("*") if path.name.startswith(TEMP_PREFIX) or path.name == "work.new"])
        assert not list((self.folder / "cache/incoming").iterdir())


@pytest.fixture
def on_node(here: Here, disk: Disk) -> OnNode:
    return OnNode(here, disk)


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_full_node_takes_no_agent(on_node, command):
    on_node.disk.full()
    on_node.refused(command, on_node.here.job("true"))
    on_node.check_works_again()


@pytest.mark.parametrize("command, spare", [("run", 0), ("run", 1), ("submit", 2), ("run", 3), ("submit", 3)])
def test_a_full_node_takes_no_run(on_node, command, spare):
    """There is no room at all, for the run's state, for that beside the old one, and so on. What was begun is not called a success."""
    on_node.warm()
    on_node.disk.full(spare)
    job = on_node.workspace("none", 1 << 20)
    on_node.refused(command, job)
    if command == "run":
        assert on_node.here.record()["state"] == "FAILED"
    on_node.check_works_again()


def test_a_workspace_without_room_is_refused_before_it_is_sent_or_in_the_middle(on_node):
    on_node.warm()
    job = on_node.workspace("large", 60 << 20)
    on_node.disk.full((70 << 20) // PAGE)                          # what is kept free for logs and records isn't there for it
    assert "no room for the workspace" in on_node.refused(job) and on_node.here.record()["bytes"]["pushed"] == 0
    on_node.disk.has_room()
    (job.parent / "data").write_bytes(os.urandom(60 << 20))
    process = on_node.here.start(job)
    eventually(lambda: on_node.on_its_way() > 1 << 20)
    process.send_signal(signal.SIGSTOP)                            # a quick machine would have all of it there before the disk is full
    on_node.disk.full((16 << 20) // PAGE)
    assert on_node.on_its_way() < 40 << 20
    process.send_signal(signal.SIGCONT)
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 125 and str(on_node.folder) in err and "are free and" in err and "still needed" in err, err
    on_node.check_works_again()


def test_a_workspace_that_is_there_and_has_no_room_for_its_workdir(on_node):
    job = on_node.workspace("there", 5 << 20)
    assert on_node.here.gpurun(job).returncode == 0
    on_node.disk.full(100)
    text = on_node.refused(job)
    assert "were free and" in text and "/work on the node" in text
    on_node.check_works_again()


@pytest.mark.parametrize("phase", ["setup", "run"])
def test_a_phase_that_fills_the_disk_has_its_own_exit_code_and_all_that_it_wrote_comes_home(on_node, phase):
    fill = "echo some; dd if=/dev/zero of=fill bs=64k; rm -f nothing; echo more; exit 3"
    job = on_node.workspace("filler", 10, run=fill if phase == "run" else "true", setup=fill if phase == "setup" else "echo set", outputs=["data"])
    on_node.warm()
    on_node.disk.full((20 << 20) // PAGE + (64 << 20) // PAGE)
    done = on_node.here.gpurun(job)
    record = on_node.here.record()
    assert done.returncode == 3 and record["state"] == "FAILED" and record["exit_code"] == 3, done.stderr.decode()
    assert "the node's disk is full" in record["reason"] and str(on_node.folder) in record["reason"] and "0 bytes free" in record["reason"]
    assert record["outputs"] == ["data"] and (on_node.here.latest / "outputs/data").stat().st_size == 10 and record["logs_complete"]
    log = on_node.here.latest / ("stdout.log" if phase == "run" else "setup-stdout.log")
    assert log.read_text().startswith("some\n")                    # its page had room for "more" as well
    on_node.disk.has_room()
    assert on_node.here.gpurun("attach", "latest").returncode == 3
    assert on_node.here.gpurun("fetch", "latest").returncode == 0
    on_node.check_works_again()


def test_a_log_that_fills_the_disk_ends_the_writer_and_not_the_truth(on_node):
    on_node.warm()
    on_node.disk.full((4 << 20) // PAGE)
    done = on_node.here.gpurun(on_node.here.job("seq 10000000; echo $? > code; exit 4", name="talker"))
    record = on_node.here.record()
    assert done.returncode == 4 and "the node's disk is full" in record["reason"] and record["logs_complete"], record["reason"]
    numbers = (on_node.here.latest / "stdout.log").read_bytes()
    assert numbers == done.stdout and len(numbers) > 3 << 20
    assert numbers == "".join(f"{number}\n" for number in range(1, 1_000_000)).encode()[:len(numbers)]
    on_node.check_works_again()


@pytest.mark.parametrize("killed", [False, True])
def test_a_disk_that_fills_under_a_left_run_and_its_agent_keeps_the_truth(on_node, killed):
    """The disk fills while the job runs; the agent may be killed then. With room again the next command has it all."""
    here = on_node.here
    job = here.job(f"{COUNT}; {on_node.until_go()}; echo late; exit 5", name="left")
    done = here.gpurun("submit", job)
    run_id = done.stdout.decode().strip()
    there = on_node.folder / "runs" / run_id
    eventually(lambda: (there / "run.out").exists() and (there / "run.out").stat().st_size == len(COUNTED))
    on_node.disk.full()
    if killed:
        os.kill(here.agent(on_node.folder)["pid"], 9)
    on_node.go.touch()
    eventually((there / "run.exit").exists)
    if killed:
        on_node.refused("attach", run_id)
        assert here.record()["state"] != "COMPLETED"
    else:
        assert here.gpurun("attach", run_id).returncode == 5
    on_node.disk.has_room()
    assert here.gpurun("fetch", run_id).returncode == 0
    record = here.record()
    assert (record["state"], record["exit_code"], record["logs_complete"]) == ("FAILED", 5, True)
    assert (here.latest / "stdout.log").read_text() == COUNTED + "late\n"
    on_node.check_works_again()


def test_a_run_whose_turn_comes_on_a_full_disk_is_not_begun_and_says_why(on_node):
    here = on_node.here
    holder = here.gpurun("submit", here.job(on_node.until_go(), name="holder")).stdout.decode().strip()
    waits = here.gpurun("submit", here.job("touch ran", name="waits")).stdout.decode().strip()
    eventually((on_node.folder / "runs" / holder / "run.out").exists)        # its supervisor has what it needs of the disk
    eventually(lambda: (on_node.folder / "runs" / waits / "work").exists())
    on_node.disk.full()
    on_node.go.touch()
    done = here.gpurun("attach", waits)
    text = done.stderr.decode()
    assert done.returncode == 125 and "was not started" in text and str(on_node.folder) in text and FREE.search(text) and "needed" in text, text
    assert here.gpurun("attach", holder).returncode == 0
    assert not (on_node.folder / "runs" / waits / "work/ran").exists()
    on_node.check_works_again()


def test_logs_and_rm_on_a_full_disk(laptop):
    """What can be shown is shown although nothing can be kept, and what is in the way can be removed."""
    here = laptop.here
    run_id = here.gpurun("submit", here.job("echo short; exit 3", name="short"), *laptop.options).stdout.decode().strip()
    eventually(laptop.node("run.exit").exists)
    laptop.disk.full(1)
    done = here.gpurun("logs", run_id, *laptop.options)
    assert (done.returncode, done.stdout) == (0, b"short\n"), done.stderr.decode()
    laptop.disk.full()
    assert here.gpurun("logs", run_id, *laptop.options).stdout == b"short\n"
    done = here.gpurun("status", "--refresh", run_id, *laptop.options)
    assert done.returncode == 0 and b"ended with exit code 3" in done.stdout, done.stderr.decode()
    assert here.gpurun("rm", "--force", run_id, *laptop.options).returncode == 0 and not (here.runs / run_id).exists()
