"""The main job on a node behind a slow, lossy or broken network, and without a network of its own: a namespace at the end of tests/wan."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Here, end_agents, eventually
from sshd import SSHD

WAN = Path(__file__).parent / "wan"
pytestmark = pytest.mark.skipif(not SSHD or not shutil.which("ssh") or os.getuid() != 0 or not shutil.which("ip") or not os.path.exists("/dev/net/tun"),
                                reason="needs root, OpenSSH, iproute2 and /dev/net/tun for a network of its own")
LOSS_S = 8.0                  # as when a laptop changes its Wi-Fi
OUTAGE_S = 17.0               # longer than a silent connection is kept


class Wan:
    """A namespace with an sshd, as the only host of an operator."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder = folder
        self.name = f"gpurun{os.getpid()}{suffix}"
        self.here = Here(folder / "here")
        self.home = folder / "home"
        wan("up", self.name, "--rtt", "50ms", "--seed", "1")
        self.config = wan("sshd", self.name, "2222", "--home", self.home)
        self.here.env.update(GPURUN_SSH_CONFIG=self.config, XDG_CACHE_HOME=str(folder.parent / "cache"))   # iroh is packed there once
        self.node_dir("~/.gpurun")

    def node_dir(self, node_dir: str) -> None:
        (self.here.work / "cluster.toml").write_text(f'[provider]\nkind = "ssh"\nnode_dir = "{node_dir}"\n[[provider.hosts]]\nhost = "node"\n')

    def set(self, **shape: str) -> None:
        wan("set", self.name, *(word for key, value in shape.items() for word in (f"--{key}", value)))

    @property
    def logins(self) -> int:
        return Path(self.config).with_name("log").read_text().count("Accepted publickey")


def wan(*words: Any) -> str:
    return subprocess.check_output([WAN, *map(str, words)], text=True).strip()


@contextlib.contextmanager
def linked(folder: Path, suffix: str) -> Iterator[Wan]:
    made = Wan(folder, suffix)
    try:
        yield made
    finally:
        end_agents(folder)
        wan("down", "--kill", made.name)


def timed(link: Wan, *args: Any) -> tuple[float, "subprocess.CompletedProcess[bytes]"]:
    begun = time.monotonic()
    done = link.here.gpurun(*args)
    return time.monotonic() - begun, done


@pytest.fixture(scope="module", autouse=True)
def without_udp(tmp_path_factory):
    """A link of its own on which UDP is blocked after a first use. What must fail there takes its time, so it begins before all else."""
    with linked(tmp_path_factory.mktemp("blocked"), "b") as link, ThreadPoolExecutor() as pool:
        assert timed(link, link.here.job("true"))[1].returncode == 0
        link.set(udp="drop")
        link.run, link.doctor = pool.submit(timed, link, link.here.job("true")), pool.submit(timed, link, "doctor")
        yield link


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """A link to a node that has been used once; what that first use took."""
    with linked(tmp_path_factory.mktemp("wan"), "a") as link:
        link.first_s, link.first = timed(link, link.here.job("cat /proc/net/route", name="first"))
        link.first_logins = link.logins
        yield link


@pytest.fixture(autouse=True)
def healed(used):
    """Each test finds 50 ms, no loss, and the node's usual folder."""
    used.set(rtt="50ms", loss="0")
    used.node_dir("~/.gpurun")


def test_a_node_without_a_network_of_its_own_is_used_twice_over_one_ssh_connection(used):
    print(f"first use at 50 ms: {used.first_s:.1f} s, {used.first_logins} SSH connection")
    assert used.first.returncode == 0, used.first.stderr.decode()
    routes = [line.split()[1] for line in used.first.stdout.decode().splitlines()[1:]]
    assert routes and "00000000" not in routes                # the job saw no default route
    assert used.first_logins == 1
    done = used.here.gpurun(used.here.job("echo again"))
    assert (done.returncode, done.stdout, used.logins) == (0, b"again\n", 1), done.stderr.decode()


def test_the_node_speaks_to_nobody_but_the_operator(used):
    """With a way out as most nodes have one, from before the deploy until after a run: no relay, no name server, no package index."""
    used.node_dir("~/watched")
    subprocess.run(["ip", "-n", used.name, "route", "add", "default", "dev", "wan0"], check=True)
    (state,) = json.loads(wan("status", used.name, "--json"))
    ours = {word.partition("/")[0] for word in subprocess.check_output(["ip", "-4", "-o", "addr"], text=True).split()}
    seen = collections.Counter()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as wire:   # 3: every protocol
        wire.bind((state["dev"], 0))
        wire.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)    # SO_RCVBUFFORCE: a whole deploy fits
        done = used.here.gpurun(used.here.job("exec 3<>/dev/udp/198.51.100.1/9; echo >&3", name="watched"))
        wire.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while packet := wire.recv(64):
                seen[socket.inet_ntoa(packet[16:20]) if packet[0] >> 4 == 4 else "IPv6"] += 1
    subprocess.run(["ip", "-n", used.name, "route", "del", "default"], check=True)
    assert done.returncode == 0, done.stderr.decode()
    assert seen.pop("198.51.100.1") == 1                      # the job's own: it would have been seen
    assert seen[state["operator"]] > 1000 and set(seen) <= ours, seen


def test_a_loss_of_seconds_during_setup_and_run_changes_nothing_but_two_lines(used):
    """Two runs on two agents there, one in its setup and one in its job, and the network goes for eight seconds."""
    here, count = used.here, "for i in $(seq 100); do echo $i; echo $i >&2; sleep {}; done"
    in_run = here.start(here.job(f"echo begun; {count.format(0.1)}; echo 1 > o", name="in-run", outputs=["o"]), bufsize=0)
    assert in_run.stdout.readline() == b"begun\n"
    used.node_dir("~/two")
    in_setup = here.start(here.job(f"{count.format(0)}; echo 2 > o", name="in-setup", setup="echo begun; sleep 9; echo setup is over", outputs=["o"]))
    eventually(lambda: any(b"begun" in path.read_bytes() for path in here.runs.glob("in-setup-*/setup-stdout.log")), 60)
    used.set(loss="100%")
    time.sleep(LOSS_S)
    used.set(loss="0")
    numbers = "".join(f"{n}\n" for n in range(1, 101)).encode()
    for name, process, shown in (("in-run", in_run, numbers), ("in-setup", in_setup, numbers)):
        out, err = process.communicate(timeout=60)
        (folder,) = here.runs.glob(f"{name}-*")
        assert (process.returncode, out) == (0, shown), err.decode()
        assert (folder / "stdout.log").read_bytes().removeprefix(b"begun\n") == numbers == (folder / "stderr.log").read_bytes()
        assert (folder / "outputs/o").exists()
        talk = [line for line in err.decode().splitlines() if line.startswith("gpurun: ")]
        assert [line for line in talk if "nothing heard from node" in line and "goes on there" in line], talk
        assert len([line for line in talk if "nothing heard from node" in line]) == 1, talk
        assert len([line for line in talk if "node is back" in line]) == 1, talk
        assert not [line for line in talk if "broke" in line], talk


def test_an_outage_that_breaks_the_connection_loses_no_byte_of_the_run(used):
    here = used.here
    running = here.start(here.job("echo begun; for i in $(seq 150); do echo $i; sleep 0.1; done; echo 3 > o", name="outage", outputs=["o"]), bufsize=0)
    assert running.stdout.readline() == b"begun\n"
    logins = used.logins
    used.set(loss="100%")
    time.sleep(OUTAGE_S)
    used.set(loss="0")
    begun = time.monotonic()
    out, err = running.communicate(timeout=60)
    print(f"ended {time.monotonic() - begun:.1f} s after the network was back")
    (folder,) = here.runs.glob("outage-*")
    numbers = "".join(f"{n}\n" for n in range(1, 151)).encode()
    assert (running.returncode, out) == (0, numbers), err.decode()
    assert (folder / "stdout.log").read_bytes() == b"begun\n" + numbers and (folder / "outputs/o").read_text() == "3\n"
    assert err.decode().count("connecting again") == 1 and err.decode().count("connected to node again") == 1, err.decode()
    assert used.logins == logins


@pytest.mark.parametrize("shape", [{"rtt": "300ms"}, {"loss": "1%"}], ids=["300 ms", "1 percent loss"])
def test_a_workspace_there_and_an_output_back(used, shape):
    here = used.here
    used.set(**shape)
    folder = here.work / "_".join(shape)
    folder.mkdir()
    for n in range(50):
        (folder / f"{n}").write_bytes(os.urandom(4000))
    done = here.gpurun(here.job("mkdir o; cp [0-9]* o/", name="far", workspace={"workdir": folder.name}, outputs=["o"]))
    assert done.returncode == 0, done.stderr.decode()
    there, back = ({path.name: path.read_bytes() for path in where.iterdir()} for where in (folder, here.latest / "outputs/o"))
    assert there == back


def test_a_warm_run_takes_few_round_trips(used):
    """Against `ssh node true`, which takes about twelve."""
    here, job = used.here, used.here.job("true", name="warm")

    def seconds(command: Any, times: int) -> float:
        took = []
        for _ in range(times):
            begun = time.monotonic()
            assert command().returncode == 0
            took.append(time.monotonic() - begun)
        return statistics.median(took)

    took = {}
    for rtt_ms in (0, 100, 200):
        used.set(rtt=f"{rtt_ms}ms")
        took[rtt_ms] = (seconds(lambda: here.gpurun(job), 3), seconds(lambda: subprocess.run(["ssh", "-F", used.config, "node", "true"]), 1))
    trips = [(took[200][who] - took[0][who]) / 0.2 for who in (0, 1)]
    print(f"warm run / ssh node true: {took[0][0]:.2f} / {took[0][1]:.2f} s near, {took[100][0]:.2f} / {took[100][1]:.2f} s at 100 ms; "
          f"round trips {trips[0]:.1f} / {trips[1]:.1f}")
    assert trips[0] < 6 and trips[0] < trips[1]               # design 10


def test_without_udp_the_error_says_so_in_bounded_time(without_udp):
    took_s, done = without_udp.run.result()
    print(f"without UDP: {took_s:.1f} s")
    said = done.stderr.decode()
    assert done.returncode == 125 and took_s < 30, said
    assert "no UDP gets through to it" in said and "`udp_port`" in said and said.count("doesn't answer") == 1, said
    _, doctor = without_udp.doctor.result()
    assert doctor.returncode == 125 and b"FAIL  node node" in doctor.stdout and b"no UDP gets through" in doctor.stdout, doctor.stdout.decode()
    without_udp.set(udp="pass")
    logins = without_udp.logins
    assert timed(without_udp, without_udp.here.job("true"))[1].returncode == 0 and without_udp.logins == logins


def test_a_run_that_was_declared_lost_is_ended_and_collected_by_stop_once_the_node_is_back(used):
    """Its job went on all the while; `stop` asks the node instead of believing the record."""
    cluster = used.here.work / "cluster.toml"
    cluster.write_text(cluster.read_text().replace('kind = "ssh"\n', 'kind = "ssh"\nlost_after_s = 10\n'))
    job = used.here.job("i=0; while :; do i=$((i+1)); echo $i | tee count; sleep 0.1; done", name="lost", outputs=["count"])
    process = used.here.start(job)
    log = eventually(lambda: next(iter(used.home.glob(".gpurun/runs/lost-*/run.out")), None))
    eventually(lambda: b"3\n" in log.read_bytes())
    used.set(loss="100%")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 125 and b"may still run there" in err and b"gpurun stop lost-" in err, err.decode()
    assert used.here.record()["exit_code"] == 125
    used.set(loss="0")
    done = used.here.gpurun("stop", "latest")
    record = used.here.record()
    assert done.returncode == 0 and (record["state"], record["reason"], record["outputs"]) == ("FAILED", "stopped by the operator", ["count"])
    printed = (used.here.latest / "stdout.log").read_text().split()
    assert printed == [str(number) for number in range(1, len(printed) + 1)] == log.read_text().split()
    assert int((used.here.latest / "outputs" / "count").read_text() or printed[-1]) in (len(printed), len(printed) - 1)
