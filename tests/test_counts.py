"""The regression guard: what gpurun costs, counted. Round trips, bytes on the wire, SSH connections, hashes, connections, peak memory, and what is
left of it all in the agent. Nothing here is timed: how fast it is, contrib/bench says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import pytest
from conftest import LIMIT_S, Here, end_agents, eventually
from links import Wan, linked, needs_a_network, use
from trees import tiny_disk

from gpurun import lanes, pushing, supervise
from gpurun.link import Connection, Link
from gpurun.wire import CONTROL_ALPN, TRANSFER_ALPN

COUNTED = Path(__file__).with_name("counted.py")
FILES, KB, MB = 2000, 1 << 10, 1 << 20
SETTLED_S = 2.1             # a file has to be so old that its hash is remembered (statcache.py)
NOISE = 16 * KB             # by which the bytes of two equal runs may differ on the wire: acknowledgements, what a busy machine sent twice


def counted(here: Here, *args: Any, **env: str) -> dict[str, int]:
    """What counted.py says of a command of gpurun's, which has to succeed."""
    counts = here.folder / "counts"
    done = subprocess.run([sys.executable, COUNTED, *map(str, args)], cwd=here.work, env={**here.env, **env, "COUNTS": str(counts)},
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(counts.read_text())


# ---- over a link -----------------------------------------------------------------------------------------------------------------

class Cost(NamedTuple):
    there: int              # bytes to the node, over the link's device
    back: int
    counts: dict[str, int]


class Far:
    """A link that carries nothing but what one operator's commands send, and a node at its end that he has used."""

    def __init__(self, link: Wan) -> None:
        self.link, self.here = link, link.operator("here")
        use(self.here, "~/.gpurun")
        number = re.search(r"HostName 10\.77\.(\d+)\.2", Path(link.config).read_text())
        assert number is not None
        self._device = Path(f"/sys/class/net/wan{number[1]}/statistics")
        self.noise = self.tree("noise", lambda chance: chance.randbytes(KB))
        self.text = self.tree("text", lambda chance: b"".join(b"step %d: loss %f\n" % (chance.randrange(10_000), chance.random()) for _ in range(100)))
        self.unchanging = self.here.job("echo hi > out", name="unchanging", workspace={"workdir": "../small"}, outputs=["out"])
        (self.here.folder / "small").mkdir()
        (self.here.folder / "small/a").write_text("a")
        born = time.time()
        self.first = self.cost(self.unchanging)
        self.first_logins = link.logins
        eventually(lambda: time.time() > born + SETTLED_S)
        self.cost(self.unchanging)
        self.trivial = self.cost(self.unchanging)

    def tree(self, name: str, of: Any) -> Path:
        chance, folder = random.Random(name), self.here.folder / name
        for number in range(FILES):
            path = folder / f"d{number % 20}" / f"f{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(of(chance))
        return folder

    def job(self, tree: Path, run: str = "true", **keys: Any) -> Path:
        return self.here.job(run, name=tree.name, workspace={"workdir": f"../{tree.name}"}, **keys)

    def cost(self, *args: Any, **env: str) -> Cost:
        before = self.carried()
        counts = counted(self.here, *args, **env)
        after = self.carried()
        return Cost(after[0] - before[0], after[1] - before[1], counts)

    def carried(self) -> tuple[int, int]:
        there, back = (int((self._device / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
        return there, back


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    with linked(tmp_path_factory.mktemp("counts"), "c", rate="100mbit", rtt="50ms") as link:
        yield Far(link)


@pytest.fixture
def long_way(far: Far) -> Iterator[None]:
    """So long that a busy machine too has sent all of a flight before anything comes back."""
    far.link.set(rtt="1s")
    yield
    far.link.set(rtt="50ms")


@needs_a_network
def test_the_first_use_of_a_host_is_one_ssh_connection_and_a_warm_run_none(far):
    assert far.first_logins == 1 and far.link.logins == 1


@needs_a_network
def test_a_warm_run_is_three_round_trips_and_one_of_a_workspace_that_changed_one_more_at_most(far, long_way):
    """The handshake, the plan with all that comes back for it, what was collected (contrib/bench/README.md); and nobody waits for the goodbye."""
    assert far.cost(far.unchanging).counts["trips"] <= 3
    (far.here.folder / "small/a").write_text("b")
    assert far.cost(far.unchanging).counts["trips"] <= 4


@needs_a_network
def test_a_tree_of_2000_files_that_did_not_change_costs_what_one_file_does(far, request):
    first = far.cost(far.job(far.noise))
    assert first.counts["hashed"] == FILES and FILES * KB < first.there < 1.25 * FILES * KB
    request.getfixturevalue("long_way")
    again = far.cost(far.job(far.noise))
    assert again.counts["hashed"] == 0 and again.counts["wrote"] <= far.trivial.counts["wrote"]
    assert again.counts["read"] <= far.trivial.counts["read"] + KB
    assert again.there < far.trivial.there + NOISE and again.back < far.trivial.back + NOISE
    for number in range(5):
        (far.noise / f"d{number}/f{number}").write_bytes(random.Random(number).randbytes(KB))
    changed = far.cost(far.job(far.noise))
    assert changed.counts["hashed"] == 5 and changed.counts["trips"] <= again.counts["trips"] + 1
    assert 5 * KB < changed.counts["wrote"] < far.trivial.counts["wrote"] + 5 * KB + 2 * KB and changed.there < far.trivial.there + 5 * KB + NOISE
    shutil.rmtree(far.link.folder.parent / "cache/gpurun/pushed")           # nothing is remembered of what the node has: the listing goes, and a round trip's worth of contents
    known = far.cost(far.job(far.noise))
    assert known.counts["wrote"] < far.trivial.counts["wrote"] + 80 * FILES + pushing.ALONG_BYTES and known.counts["trips"] <= again.counts["trips"] + 1
    assert known.back < far.trivial.back + NOISE + known.there / 20           # the acknowledgements of what went


@needs_a_network
def test_a_tree_of_text_goes_packed(far):
    size = sum(path.stat().st_size for path in far.text.rglob("f*") if path.is_file())
    far.link.set(rate="30mbit")                                             # a busy machine packs faster than this, too
    cost = far.cost(far.job(far.text))
    far.link.set(rate="100mbit")
    assert FILES * 100 < cost.there < size / 2


@needs_a_network
def test_what_is_here_is_not_fetched_again_neither_of_a_log_that_grew_nor_after_a_break_in_a_new_process(far):
    here, big, log = far.here, 24 * MB, 5 * MB
    assert here.gpurun(here.job(f"head -c {big} /dev/urandom > big; head -c {log} /dev/urandom > log", name="made")).returncode == 0
    run_id = here.latest.name
    work, outputs = far.link.home / ".gpurun/runs" / run_id / "work", here.runs / run_id / "outputs"

    assert far.cost("fetch", run_id, "log").counts["read"] > log
    with open(work / "log", "ab") as stream:
        stream.write(os.urandom(KB))
    grown = far.cost("fetch", run_id, "log")
    assert (outputs / "log").read_bytes() == (work / "log").read_bytes()
    assert grown.counts["read"] < 8 * KB and grown.back < far.trivial.back + KB + NOISE

    def parts() -> int:
        with contextlib.suppress(FileNotFoundError):                        # it comes and goes
            return max((path.stat().st_size for path in (here.runs / run_id).glob(".incoming-outputs/*")), default=0)
        return 0

    far.link.set(rate="16mbit")                                             # the other half takes six seconds
    fetching = here.start("fetch", run_id, "big")
    eventually(lambda: parts() > 12 * MB, 60)
    fetching.send_signal(signal.SIGKILL)
    fetching.communicate()
    came = parts()
    far.link.set(rate="100mbit")
    assert 12 * MB < came < big
    rest = far.cost("fetch", run_id, "big")
    assert (outputs / "big").read_bytes() == (work / "big").read_bytes()
    assert rest.counts["read"] < big - came + 64 * KB
    assert rest.back < big - 4 * MB                                         # with what the node still sent to the one that was killed


@needs_a_network
def test_over_ssh_each_run_is_one_ssh_connection_and_so_is_each_node_that_status_asks(far):
    link, here = far.link, far.link.operator("ssh")
    nodes = [here.folder / f"{name}.toml" for name in ("one", "two")]
    for node in nodes:
        subprocess.run(["cp", "-rl", link.home / ".gpurun/lib", make(link.home / node.stem) / "lib"], check=True)
        use(here, f"~/{node.stem}")
        (here.work / "cluster.toml").rename(node)
    far.link.set(udp="drop", rtt="10ms")
    try:
        logins = link.logins
        with ThreadPoolExecutor() as pool:
            done = list(pool.map(lambda args: here.gpurun(*args), [
                ("--cluster", nodes[0], here.job("true", name="over")),
                ("submit", "--cluster", nodes[1], here.job("touch up; sleep 600", name="sleeps-1"))]))
        assert [one.returncode for one in done] == [0, 0] and link.logins == logins + 2
        assert here.gpurun("--cluster", nodes[0], here.job("true", name="warm")).returncode == 0 and link.logins == logins + 3
        assert here.gpurun("submit", "--cluster", nodes[0], here.job("touch up; sleep 600", name="sleeps-2")).returncode == 0
        assert {json.loads(path.read_text())["path"] for path in here.runs.glob("*-*/run.json")} == {"ssh"} and link.logins == logins + 4
        eventually(lambda: len(list(link.home.glob("*/runs/sleeps-*/work/up"))) == 2)
        said = here.gpurun("status", "--refresh").stdout.decode()
        assert said.count("run for") == 2 and link.logins <= logins + 6
    finally:
        far.link.set(udp="pass", rtt="50ms")


def make(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


# ---- memory ----------------------------------------------------------------------------------------------------------------------

MOST_KIB = 150 * KB         # of the operator and of the agent (design 10)


def agent_status(here: Here) -> dict[str, int]:
    pid = here.agent()["pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmHWM", "Threads")}   # type: ignore[index]
    return {"peak_kib": found["VmHWM"], "threads": found["Threads"], "fds": len(os.listdir(f"/proc/{pid}/fd"))}


def peaks(here: Here, *args: Any, **env: str) -> tuple[int, int]:
    """KiB of the operator and of the agent."""
    if (here.node_dir / "agent/endpoint.json").exists():
        Path(f"/proc/{here.agent()['pid']}/clear_refs").write_text("5")     # it is counted anew
    return counted(here, *args, **env)["peak_kib"], agent_status(here)["peak_kib"]


def test_memory_does_not_grow_with_the_bytes_of_a_file_either_way(here):
    tree = here.work / "w"
    make(tree)
    job = here.job("mv in out", workspace={"workdir": "w"}, outputs=["out"])
    assert here.gpurun(here.job("true", name="warm")).returncode == 0
    seen = []
    for size in (30 * MB, 300 * MB):
        block = os.urandom(MB)
        with open(tree / "in", "wb") as stream:
            for _ in range(size // MB):
                stream.write(block)
        seen.append(peaks(here, job))
        assert (here.latest / "outputs/out").stat().st_size == size
    print("KiB of operator and agent with 30 and with 300 MB:", seen)
    for small, large in zip(*seen):
        assert large < MOST_KIB and large < small + 24 * KB


def test_memory_for_20000_files(tmp_path):
    """On a disk in memory where one can be had: others take long to make so many files."""
    with tiny_disk(tmp_path / "disk", "1g") if os.getuid() == 0 else contextlib.nullcontext(make(tmp_path / "disk")) as disk:
        try:
            many_files(Here(disk / "here"))
        finally:
            end_agents(disk)


def many_files(here: Here) -> None:
    for number in range(20_000):
        path = here.work / "w" / f"d{number % 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    seen = peaks(here, here.job("true", workspace={"workdir": "w"}))
    print("KiB of operator and agent with 20,000 files:", seen)
    assert max(seen) < MOST_KIB


# ---- what is left ----------------------------------------------------------------------------------------------------------------

ENOUGH = 2 << 30            # bytes, in which eight connections must have been made


def held(here: Here) -> tuple[int, int]:
    """The agent's threads and descriptors."""
    status = agent_status(here)
    return status["threads"], status["fds"]


def rests(here: Here) -> bool:
    """A supervisor waits for the next run, and nothing else is left of the last one."""
    return len(supervise.descendants(here.agent()["pid"])) == 1


def test_after_20_runs_the_agent_has_the_threads_and_descriptors_that_it_had_after_3(here):
    make(here.work / "w")
    (here.work / "w/in").write_bytes(os.urandom(80 * MB))
    small = here.job("echo hi > out", name="small", outputs=["out"])
    big = here.job("mv in out", name="big", workspace={"workdir": "w"}, outputs=["out"])
    for _ in range(3):
        assert here.gpurun(small).returncode == 0
    eventually(lambda: rests(here))
    threads, fds = held(here)
    assert counted(here, big)["connections"] == 2                           # one of each kind: the network is near
    assert counted(here, big, LANES="8")["most_lanes"] > 4
    for _ in range(16):
        assert here.gpurun(small).returncode == 0
    eventually(lambda: rests(here) and held(here)[0] <= threads and held(here)[1] <= fds, 90)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """A node that echoes; `accepted` counts the connections that it let in."""
    server = Link(os.urandom(32), "127.0.0.1:0", [CONTROL_ALPN, TRANSFER_ALPN])
    server.accepted = 0
    streams_of = Link._streams_of

    async def count(self: Link, *args: Any) -> None:
        server.accepted += 1
        await streams_of(self, *args)

    def echo(stream: Any) -> None:
        while True:
            part = stream.read(30)
            if not part:
                break
            stream.write(part, 30)
        stream.finish(30)

    monkeypatch.setattr(Link, "_streams_of", count)
    monkeypatch.setattr(lanes, "TICK_S", 0.02)
    server.serve(lambda peer_id: True, echo)
    yield server
    server.close()


def exchange(peer: Link, size: int, alpn: bytes = TRANSFER_ALPN, connections: int = 0) -> None:
    """So many bytes there and back, by an operator that comes and goes; more, until the node has let in so many connections."""
    client, block = Link(os.urandom(32), "127.0.0.1:0"), bytes(256 * KB)
    stream = client.dial(peer.id, [f"127.0.0.1:{peer.port()}"], alpn, 10).open(10)
    sent = came = 0

    def write() -> None:
        nonlocal sent
        while sent < size or peer.accepted < connections and sent < ENOUGH:
            part = block[:size - sent] if sent < size else block
            stream.write(part, 30)
            sent += len(part)
        stream.finish(30)

    writer = threading.Thread(target=write)
    writer.start()
    while True:
        part = stream.read(30, 256 * KB)
        came += len(part)
        if not part:
            break
    writer.join()
    assert came == sent
    client.close()


def left(peer: Link) -> tuple[int, int, int]:
    """Tasks of the link's loop, connections and bundles that somebody still holds."""
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    running = peer._loop.call(tasks(), 10, "counting")
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return running, kinds.count(Connection), kinds.count(lanes.Bundle) + len(peer._bundles)


def test_a_near_network_gets_one_connection_however_long_a_transfer_goes_on(peer):
    exchange(peer, 64 * MB)
    assert peer.accepted == 1


def test_no_connection_stream_or_task_is_left_of_those_that_came_and_went(peer, monkeypatch):
    before = left(peer)[1:]                                                 # of a test that failed, say
    exchange(peer, 100)
    eventually(lambda: all(now <= then for now, then in zip(left(peer)[1:], before)))
    tasks = left(peer)[0]
    for _ in range(5):
        for alpn in (CONTROL_ALPN, TRANSFER_ALPN):
            exchange(peer, 100, alpn)
    assert peer.accepted == 11
    monkeypatch.setattr(lanes.Growth, "look", lambda self, *_: 8)
    exchange(peer, 20 * MB, connections=19)
    assert peer.accepted >= 19
    eventually(lambda: left(peer)[0] <= tasks and all(now <= then for now, then in zip(left(peer)[1:], before)))
