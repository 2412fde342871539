"""Transfers of some size on bad links: loss, long trips, a rate that collapses, outages, killed processes, full disks. Whatever happens, what
arrives is what was sent, what has arrived isn't sent again, and neither side grows.

Each scene has a link of its own, and all scenes that the selected tests need go on side by side, as in test_outages.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import Here, eventually
from links import Wan, linked, needs_a_network, use, wan
from test_outages import Run as Watched, arrived
from trees import tiny_disk

pytestmark = needs_a_network
SCENE_S = 900.0              # some wait for their turn
WAIT_S = 240.0
MB = 1_000_000
MOST_MEMORY = 150 << 10       # kB
SCENES: dict[str, Callable[[Path, Path], Any]] = {}
BUSY = ("lossy", "collapse", "full_here", "full_there", "two")   # these take a core each: one after the other
TURNS = threading.Semaphore(1)


def scene(play: Callable[[Path, Path], Any]) -> Any:
    """`play(folder, lib)` as a fixture, which is what it returns."""
    SCENES[play.__name__] = play

    @pytest.fixture(scope="module", name=play.__name__)
    def outcome(playing):
        return playing[play.__name__].result(SCENE_S)

    return outcome


@pytest.fixture(scope="module")
def playing(request, tmp_path_factory):
    wanted = {name for item in request.session.items if item.path == request.path for name in item.fixturenames if name in SCENES}
    folder = tmp_path_factory.mktemp("badnet")
    with linked(folder / "first", "bfirst") as link, ThreadPoolExecutor(len(SCENES)) as pool:
        first = link.operator("first")
        assert first.gpurun(first.job("true")).returncode == 0
        yield {name: pool.submit(play, name, folder / name, link.home / "first/lib") for name in SCENES if name in wanted}


def play(name: str, folder: Path, lib: Path) -> Any:
    with TURNS if name in BUSY else contextlib.nullcontext():
        return SCENES[name](folder, lib)


def peak(pid: int) -> int:
    """The most memory that a process has had, in kB; 0 when it is over."""
    try:
        return next((int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")), 0)
    except OSError:
        return 0


class Run(Watched):
    """With the most memory that the process had."""

    def end(self, timeout_s: float = WAIT_S) -> "Run":
        self.peak = 0

        def over() -> bool:
            self.peak = peak(self.process.pid) or self.peak
            return self.process.poll() is not None

        try:
            eventually(over, timeout_s)
        except AssertionError:
            self.process.kill()
            raise AssertionError(f"not over within {timeout_s:g} s: {self.err}") from None
        return super().end()

    def kill(self) -> "Run":
        self.folder = self.here.latest
        self.process.kill()
        self.process.wait()
        return self


def up(link: Wan, lib: Path, *names: str, **provider: Any) -> list[Here]:
    """Operators, each with an agent that is up already."""
    made = [link.operator(name, lib, **provider) for name in names]
    for run in [Run(here, here.job("true", name="up")) for here in made]:
        assert run.end().code == 0, run.err
    return made


def went(link: Wan) -> dict[str, int]:
    """Bytes that have come out of the link, each way."""
    (state,) = json.loads(wan("status", link.name, "--json"))
    return {way: state["counters"][way]["bytes_out"] for way in ("to_node", "from_node")}


def fill(folder: Path, size: int, name: str = "data") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(os.urandom(size))
    return folder / name


def same(one: Path, other: Path) -> bool:
    return hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()


def agent_peak(link: Wan, here: Here) -> int:
    return peak(here.agent(link.home / here.folder.name)["pid"])


def work(link: Wan, run: Run) -> Path:
    """The run's workdir on the node."""
    return link.home / run.here.folder.name / "runs" / run.folder.name / "work"


def comes(here: Here, name: str) -> int:
    """Bytes that have come of the outputs of the runs of that name."""
    return sum(map(arrived, here.runs.glob(f"{name}-*")))


# ---- loss --------------------------------------------------------------------------------------------------------------------------------

@scene
def lossy(folder: Path, lib: Path) -> Any:
    with linked(folder, "lossy", rtt="100ms", rate="100mbit") as link:
        (many,) = up(link, lib, "many")
        (one,) = up(link, lib, "one", max_connections=1)
        link.set(loss="1%")
        out = {}
        for name, here, size in (("many", many, 8 * MB), ("one", one, MB)):
            there = fill(here.work / "tree", size)
            began = time.monotonic()
            run = out[name + " push"] = Run(here, here.job("true", name="push", workspace={"workdir": "tree"})).end()
            run.took_s = time.monotonic() - began
            run.same = same(there, work(link, run) / "data")
            began = time.monotonic()
            run = out[name + " pull"] = Run(here, here.job(f"head -c {size} /dev/urandom > o", name="pull", outputs=["o"])).end()
            run.took_s = time.monotonic() - began
            run.same = same(run.folder / "outputs/o", work(link, run) / "o")
            for way in ("push", "pull"):
                done = out[f"{name} {way}"]
                print(f"{name} {way}: {size * 8e-6 / done.took_s:.1f} Mbit/s, {done.record['connections']} connections")
        for name, here in (("many", many), ("one", one)):
            out[name + " agent"] = agent_peak(link, here)
            print(name, "memory: agent", out[name + " agent"] >> 10, "MiB, operator", max(out[f"{name} {way}"].peak for way in ("push", "pull")) >> 10)
        return out


@pytest.mark.parametrize("who, way", [("many", "push"), ("many", "pull"), ("one", "push"), ("one", "pull")])
def test_on_a_lossy_link_a_transfer_takes_several_connections_unless_it_may_not(lossy, who, way):
    run = lossy[f"{who} {way}"]
    assert run.code == 0 and run.same and run.losses == run.returns, run.talk   # on a machine that is out of breath a node may seem away
    assert run.record["connections"] > 1 if who == "many" else run.record["connections"] == 1
    assert max(run.peak, lossy[f"{who} agent"]) < MOST_MEMORY


# ---- a minute without a network ------------------------------------------------------------------------------------------------------------

OUTAGE_SIZE = 12 * MB


@scene
def minute(folder: Path, lib: Path) -> Any:
    with linked(folder, "bminute", rtt="100ms") as link:
        # A chunk that is late goes twice where there are several connections: nobody could tell it from one that is sent again.
        push, pull = up(link, lib, "push", "pull", max_connections=1)
        data = fill(push.work / "tree", OUTAGE_SIZE)
        before, counted = arrived(link.home / "push"), went(link)
        link.set(rate="3mbit")                                # one may begin much later than the other, and neither be over by then
        runs = {"push": Run(push, push.job("true", name="cut", workspace={"workdir": "tree"})),
                "pull": Run(pull, pull.job(f"head -c {OUTAGE_SIZE} /dev/urandom > o", name="cut", outputs=["o"]))}
        eventually(lambda: arrived(link.home / "push") - before > OUTAGE_SIZE / 2 and comes(pull, "cut") > OUTAGE_SIZE / 2, WAIT_S)
        link.set(loss="100%")
        sizes = arrived(link.home / "push") - before, comes(pull, "cut")
        time.sleep(60)
        link.set(loss="0", rate="none")
        for run in runs.values():
            run.end()
        runs["push"].same = same(data, work(link, runs["push"]) / "data")
        runs["pull"].same = same(work(link, runs["pull"]) / "o", runs["pull"].folder / "outputs/o")
        after = went(link)
        for run, way in zip(("push", "pull"), ("to_node", "from_node")):
            runs[run].went = after[way] - counted[way]
            print("minute:", run, "cut at", sizes, "bytes; in all over the link", runs[run].went)
        return runs


@pytest.mark.parametrize("way", ["push", "pull"])
def test_a_minute_without_a_network_costs_only_what_was_under_way(minute, way):
    run = minute[way]
    assert run.code == 0 and run.same and run.losses == run.returns > 0, run.talk
    assert run.went < 1.4 * OUTAGE_SIZE                       # from its beginning again: 1.5 at least


# ---- killed operators --------------------------------------------------------------------------------------------------------------------------

KILLED_SIZE = 24 * MB


@scene
def killed(folder: Path, lib: Path) -> Any:
    """Whoever drives it is killed at a quarter, a half and three quarters; then it is brought to its end."""
    with linked(folder, "bkilled", rtt="50ms", rate="12mbit") as link:   # a quarter of it takes four seconds
        push, pull = up(link, lib, "push", "pull", max_connections=1)
        data = fill(push.work / "tree", KILLED_SIZE)
        before, counted = arrived(link.home / "push"), went(link)

        def chain(here: Here, job: Path, came: Callable[[], int], *commands: str) -> Run:
            run = Run(here, job)
            for number, command in enumerate(commands):
                eventually(lambda: came() > KILLED_SIZE * (0.25 + 0.25 * number) or run.process.poll() is not None, WAIT_S)
                assert run.process.poll() is None, run.talk
                print(here.folder.name, "killed at", came())
                run.kill()
                run = Run(here, command, "latest")
            return run.end()

        with ThreadPoolExecutor() as pool:
            pushing = pool.submit(chain, push, push.job("true", name="killed", workspace={"workdir": "tree"}),
                                  lambda: arrived(link.home / "push") - before, "attach", "attach", "attach")
            pulling = pool.submit(chain, pull, pull.job(f"head -c {KILLED_SIZE} /dev/urandom > o", name="killed", outputs=["o"]),
                                  lambda: comes(pull, "killed"), "attach", "fetch", "fetch")
            runs = {"push": pushing.result(), "pull": pulling.result()}
        runs["push"].same = same(data, work(link, runs["push"]) / "data")
        runs["pull"].same = same(work(link, runs["pull"]) / "o", runs["pull"].folder / "outputs/o")
        after = went(link)
        for run, way in zip(("push", "pull"), ("to_node", "from_node")):
            runs[run].went = after[way] - counted[way]
            print("killed:", run, "in all over the link", runs[run].went)
        return runs


@pytest.mark.parametrize("way", ["push", "pull"])
def test_whoever_is_killed_in_a_transfer_is_gone_on_for_by_the_next(killed, way):
    run = killed[way]
    assert run.code == 0 and run.same and run.record["state"] == "COMPLETED", run.talk
    assert run.went < 1.75 * KILLED_SIZE                      # each time from its beginning again: 2.5


# ---- killed agents --------------------------------------------------------------------------------------------------------------------------

@scene
def agents(folder: Path, lib: Path) -> Any:
    with linked(folder, "bagents", rtt="50ms", rate="8mbit") as link:
        push, pull = up(link, lib, "push", "pull")
        data = fill(push.work / "tree", 6 * MB)
        before, counted = arrived(link.home / "push"), went(link)
        runs = {"push": Run(push, push.job("exit 3", name="killed", workspace={"workdir": "tree"})),
                "pull": Run(pull, pull.job(f"head -c {6 * MB} /dev/urandom > o; exit 4", name="killed", outputs=["o"]))}
        came = {"push": lambda: arrived(link.home / "push") - before, "pull": lambda: comes(pull, "killed")}
        link.set(rate="2mbit")                                # neither is over before its turn has come
        goes_on = {"push": push, "pull": pull}
        while goes_on:                                        # one may be through before the other has come so far
            name = eventually(lambda: next((name for name in goes_on if came[name]() > 2 * MB), ""), WAIT_S)
            os.kill(goes_on.pop(name).agent(link.home / name)["pid"], signal.SIGKILL)
            print("agent of", name, "killed at", came[name]())
        link.set(rate="8mbit")
        for run in runs.values():
            run.end()
        runs["push"].same = same(data, work(link, runs["push"]) / "data")
        runs["pull"].same = same(work(link, runs["pull"]) / "o", runs["pull"].folder / "outputs/o")
        after = went(link)
        for run, way in zip(("push", "pull"), ("to_node", "from_node")):
            runs[run].went = after[way] - counted[way]
            print("agents:", run, "in all over the link", runs[run].went)
        return runs


@pytest.mark.parametrize("way, code", [("push", 3), ("pull", 4)])
def test_an_agent_that_is_killed_in_a_transfer_is_started_again_and_it_goes_on(agents, way, code):
    run = agents[way]
    assert run.code == code and run.same and run.losses == run.returns > 0, run.talk


# ---- sources that change ---------------------------------------------------------------------------------------------------------------------

PAGE, PAGES = 4096, 2500      # twenty seconds at the link's rate
STAMP = """python3 -c 'import os, sys
how, generation, pages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
flags = {"over": os.O_WRONLY, "new": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "more": os.O_WRONLY | os.O_APPEND}[how]
fd = os.open(sys.argv[4], flags)
for page in range(pages): os.write(fd, bytes([generation]) + os.urandom(4095))' """
CHANGES = {"rewritten": f"{STAMP} over 2 {PAGES} FILE", "written anew": f"{STAMP} new 2 {PAGES * 2} FILE", "truncated": "truncate -s 1000000 FILE",
           "grown": f"{STAMP} more 1 100 FILE", "replaced": f"{STAMP} new 2 {PAGES} g; mv g FILE"}


@scene
def changing(folder: Path, lib: Path) -> Any:
    with linked(folder, "bchanging", rtt="50ms") as link:
        (here,) = up(link, lib, "here", max_connections=1)      # what is under way is little
        rounds = "".join(f"{STAMP} new 1 {PAGES} f; mv f f{n}; touch made{n}; while [ ! -e go{n} ]; do sleep 0.05; done; "
                         f"{how.replace('FILE', f'f{n}')}; touch done{n}; " for n, how in enumerate(CHANGES.values()))
        submitted = Run(here, "submit", here.job(rounds, name="changing")).end()
        at, out = work(link, submitted), {}
        for number, name in enumerate(CHANGES):
            eventually((at / f"made{number}").exists, WAIT_S)
            link.set(rate="4mbit")
            run = out[name] = Run(here, "fetch", "latest", f"f{number}")
            whole = arrived(submitted.folder / "outputs")
            eventually(lambda: arrived(submitted.folder) > PAGE * PAGES / 10 + whole, WAIT_S)
            (at / f"go{number}").touch()
            eventually((at / f"done{number}").exists, WAIT_S)
            run.was_under_way = run.process.poll() is None
            link.set(rate="24mbit")
            run.end()
            run.file = submitted.folder / f"outputs/f{number}"
            run.got = (sorted(set(run.file.read_bytes()[::PAGE])), run.file.stat().st_size) if run.file.exists() else ([], 0)
            run.there = sorted(set((at / f"f{number}").read_bytes()[::PAGE]))
            print("changing:", name, run.code, run.got, run.there)
            again = Run(here, "fetch", "latest", f"f{number}").end()
            run.again = again.code == 0 and same(run.file, at / f"f{number}")
        return out


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_it_is_fetched_is_never_two_halves(changing, how):
    run = changing[how]
    assert run.was_under_way and run.again and run.there == ([1] if how in ("truncated", "grown") else [2])
    assert run.code == 0 or "changes while it is sent" in run.err or "can't be read" in run.err, run.err
    if how == "grown":
        assert run.code == 0 and run.got == ([1], PAGE * PAGES)
    else:
        assert len(run.got[0]) <= 1


def arrives(run: Path) -> bool:
    """Whether something is on its way into a run's folder; what is asked may be gone meanwhile."""
    return any(".incoming-" in here and names for here, _, names in os.walk(run))


@scene
def growing(folder: Path, lib: Path) -> Any:
    """Fetched again and again while the job writes, and once by somebody who is killed."""
    with linked(folder, "bgrowing", rtt="50ms") as link:
        (here,) = up(link, lib, "here")
        link.set(rate="16mbit")
        job = here.job("while [ ! -e stop ]; do head -c 50000 /dev/urandom >> log; sleep 0.1; done", name="growing")
        submitted = Run(here, "submit", job).end()
        log, got, sizes = work(link, submitted) / "log", submitted.folder / "outputs/log", []
        eventually(lambda: log.exists() and log.stat().st_size > MB, WAIT_S)
        counted, whole = went(link), True
        for number in range(5):
            if number == 2:
                run = Run(here, "fetch", "latest", "log")
                eventually(lambda: arrives(submitted.folder) or run.process.poll() is not None, WAIT_S)
                run.kill()
            run = Run(here, "fetch", "latest", "log").end()
            sizes.append(got.stat().st_size)
            with open(log, "rb") as stream:
                whole = whole and run.code == 0 and stream.read(sizes[-1]) == got.read_bytes()
        (log.parent / "stop").touch()
        after = went(link)
        print("growing:", sizes, after["from_node"] - counted["from_node"])
        return whole, sizes, after["from_node"] - counted["from_node"]


def test_a_file_that_grows_is_fetched_again_and_again_and_never_from_its_beginning(growing):
    whole, sizes, size = growing
    assert whole and sizes == sorted(set(sizes)) and sizes[0] > MB
    assert size < 1.5 * sizes[-1] + MB


# ---- long trips ------------------------------------------------------------------------------------------------------------------------------

@scene
def far(folder: Path, lib: Path) -> Any:
    with linked(folder, "bfar", rtt="300ms") as link:
        here, codes = link.operator("far", lib), {}
        fill(here.work / "tree", 200_000)

        def done(name: str, *args: Any) -> Run:
            run = Run(here, *args).end()
            codes[name] = run.code, run.talk
            return run

        done("run", here.job("cp data o; echo said", name="far", workspace={"workdir": "tree"}, outputs=["o"]))
        done("submit", "submit", here.job("while [ ! -e go ]; do sleep 0.1; done; echo more > p; echo over", name="later", outputs=["p"]))
        at = work(link, Run(here, "status", "latest").end())
        for name in ("status --refresh", "logs latest", "nodes", "doctor"):
            done(name, *name.split())
        (at / "early").write_text("early")
        done("fetch early", "fetch", "latest", "early")
        (at / "go").touch()
        attached = done("attach", "attach", "latest")
        done("stop", "submit", here.job("sleep 1000", name="endless"))
        done("stop", "stop", "latest")
        done("rm", "rm", "latest")
        link.set(rtt="2s")
        done("2 s", here.job("cp data o", name="farther", workspace={"workdir": "tree"}, outputs=["o"]))
        return codes, attached.out


def test_each_command_works_at_300_ms_and_a_run_at_2_s(far):
    codes, out = far
    assert {name: code for name, (code, _) in codes.items() if code} == {}, [talk for code, talk in codes.values() if code]
    assert out == "over\n"


# ---- a rate that collapses -----------------------------------------------------------------------------------------------------------------------

@scene
def collapse(folder: Path, lib: Path) -> Any:
    with linked(folder, "bcollapse", rtt="100ms", rate="100mbit") as link:
        (here,) = up(link, lib, "here")
        link.set(loss="1%")
        size = 32 * MB
        run = Run(here, here.job(f"head -c {size} /dev/urandom > o", name="collapse", outputs=["o"]))
        eventually(lambda: comes(here, "collapse") > 5 * MB, WAIT_S)
        link.set(rate="256kbit")
        run.came = comes(here, "collapse")
        time.sleep(15)
        run.moved = comes(here, "collapse") - run.came
        run.lived = run.process.poll() is None, run.talk
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        run.until("Ctrl-C again leaves")
        run.heard_s = time.monotonic() - began
        run.process.send_signal(signal.SIGINT)
        run.end()
        run.took_s = time.monotonic() - began
        link.set(rate="100mbit")
        after = Run(here, "attach", "latest").end()
        after.same = same(after.folder / "outputs/o", work(link, after) / "o")
        print("collapse: came", run.came, "then", run.moved, f"Ctrl-C: {run.heard_s:.2f} s, over {run.took_s:.2f} s; memory",
              agent_peak(link, here), run.peak, after.peak)
        return run, after


def test_a_rate_that_collapses_loses_nothing_and_ctrl_c_is_heard(collapse):
    run, after = collapse
    # All that is under way fills the queue of such a link: a node that is silent so long is doubted, and may still be when the user leaves.
    assert run.lived[0] and run.losses - run.returns in (0, 1) and "lost" not in run.lived[1], run.talk
    assert run.code == 130 and "gpurun fetch" in run.talk, run.talk
    assert after.code == 0 and after.same, after.talk


# ---- full disks, several connections ----------------------------------------------------------------------------------------------------------

class Disk:
    """A small disk that a transfer fills up in the middle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self.path / "filler", "wb", buffering=0) as stream:
            while True:
                stream.write(bytes(MB))

    def has_room(self) -> None:
        (self.path / "filler").unlink()


@scene
def full_here(folder: Path, lib: Path) -> Any:
    folder.mkdir()
    with linked(folder / "link", "bhere", rtt="100ms", rate="100mbit") as link, tiny_disk(folder / "disk", "200m") as path:
        (here,), disk = up(link, lib, "here"), Disk(path)
        link.set(loss="1%")
        here.runs = path / "runs"
        link.set(rate="16mbit")                               # it isn't over before the disk is full
        run = Run(here, here.job(f"head -c {16 * MB} /dev/urandom > o", name="full", outputs=["o"]), "--runs-dir", here.runs)
        eventually(lambda: comes(here, "full") > 5 * MB, WAIT_S)
        disk.fill()
        run.end()
        disk.has_room()
        link.set(rate="100mbit")
        again = Run(here, "fetch", "latest", "--runs-dir", here.runs).end()
        again.connections = again.record["connections"]       # as long as the disk is there
        again.same = same(again.folder / "outputs/o", work(link, again) / "o")
        return run, again


@scene
def full_there(folder: Path, lib: Path) -> Any:
    folder.mkdir()
    with tiny_disk(folder / "disk", "400m") as path:
        with linked(path / "link", "bthere", rtt="100ms", rate="100mbit") as link:
            link.folder, disk = folder / "operator", Disk(path)
            subprocess.run(["mkdir", "-p", link.home / "there"], check=True)
            subprocess.run(["cp", "-r", lib, link.home / "there/lib"], check=True)
            here = link.operator("there")
            assert Run(here, here.job("true", name="up")).end().code == 0
            link.set(loss="1%")
            data, before = fill(here.work / "tree", 16 * MB), arrived(link.home)
            job = here.job("true", name="full", workspace={"workdir": "tree"})
            link.set(rate="16mbit")
            run = Run(here, job)
            eventually(lambda: arrived(link.home) > before + 5 * MB, WAIT_S)
            disk.fill()
            run.end()
            disk.has_room()
            link.set(rate="100mbit")
            again = Run(here, job).end()
            again.same = same(data, work(link, again) / "data")
            return run, again


def test_a_disk_that_gets_full_here_is_said_and_fetch_goes_on_once_there_is_room(full_here):
    run, again = full_here
    assert run.code == 125 and "No space left" in run.talk and "gpurun fetch" in run.talk, run.talk
    assert again.code == 0 and again.same and again.connections > 1, again.talk


def test_a_disk_that_gets_full_there_is_said_and_the_next_run_finds_room(full_there):
    run, again = full_there
    assert run.code == 125 and "No space left" in run.talk and "larger disk" in run.talk, run.talk
    assert again.code == 0 and again.same and run.record["connections"] > 1, again.talk


# ---- two at once --------------------------------------------------------------------------------------------------------------------------------

@scene
def two(folder: Path, lib: Path) -> Any:
    with linked(folder, "btwo", rtt="100ms", rate="100mbit") as link:
        (one,), other = up(link, lib, "one"), link.operator("other")
        use(other, "~/one")
        link.set(loss="1%")
        for here in (one, other):
            assert Run(here, "submit", here.job(f"head -c {5 * MB} /dev/urandom > o", name="two", outputs=["o"])).end().code == 0
            eventually(lambda: arrived(link.home / "one/runs" / here.latest.name / "work") >= 5 * MB, WAIT_S)
        runs = [Run(here, "fetch", "latest") for here in (one, other)]
        for run in runs:
            run.end()
            run.same = same(run.folder / "outputs/o", link.home / "one/runs" / run.folder.name / "work/o")
        return runs, agent_peak(link, one)


def test_two_operators_pull_from_one_node_at_once(two):
    runs, agent = two
    for run in runs:
        assert run.code == 0 and run.same and run.peak < MOST_MEMORY, run.talk
    assert agent < MOST_MEMORY
