"""The main job on a node behind a slow or lossy network, and without a network of its own. What happens when it breaks is in test_outages.py."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from links import Wan, linked, needs_a_network, use, wan

pytestmark = needs_a_network


@contextlib.contextmanager
def one_operator(folder: Path, suffix: str) -> Iterator[Wan]:
    """A link with the only operator `here` that it has, who uses the usual node folder."""
    with linked(folder, suffix) as link:
        link.here = link.operator("here")
        use(link.here, "~/.gpurun")
        yield link


def timed(link: Wan, *args: Any) -> tuple[float, "subprocess.CompletedProcess[bytes]"]:
    begun = time.monotonic()
    done = link.here.gpurun(*args)
    return time.monotonic() - begun, done


@pytest.fixture(scope="module", autouse=True)
def without_udp(tmp_path_factory):
    """A link of its own on which UDP is blocked after a first use. What goes another way then takes its time, so it begins before all else."""
    with one_operator(tmp_path_factory.mktemp("blocked"), "b") as link, ThreadPoolExecutor() as pool:
        assert timed(link, link.here.job("true"))[1].returncode == 0
        link.set(udp="drop")
        link.run, link.doctor = pool.submit(timed, link, link.here.job("true")), pool.submit(timed, link, "doctor")
        yield link


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """A link to a node that has been used once; what that first use took."""
    with one_operator(tmp_path_factory.mktemp("wan"), "a") as link:
        link.first_s, link.first = timed(link, link.here.job("cat /proc/net/route", name="first"))
        link.first_logins = link.logins
        yield link


@pytest.fixture(autouse=True)
def healed(used):
    """Each test finds 50 ms, no loss, and the node's usual folder."""
    used.set(rtt="50ms", loss="0")
    use(used.here, "~/.gpurun")


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
    use(used.here, "~/watched")
    subprocess.run(["ip", "-n", used.name, "route", "add", "default", "dev", "wan0"], check=True)
    (state,) = json.loads(wan("status", used.name, "--json"))
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
    ours = {word.partition("/")[0] for word in subprocess.check_output(["ip", "-4", "-o", "addr"], text=True).split()}
    ours |= {address for address in seen if address.startswith("10.77.")}      # this machine's too: ends of links that other tests have had meanwhile
    assert done.returncode == 0, done.stderr.decode()
    assert seen.pop("198.51.100.1") == 1                      # the job's own: it would have been seen
    assert seen[state["operator"]] > 1000 and set(seen) <= ours, seen


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
        return min(took)

    took = {}
    for rtt_ms in (0, 500):                                   # so long that what else goes on at this machine says nothing
        used.set(rtt=f"{rtt_ms}ms")
        took[rtt_ms] = (seconds(lambda: here.gpurun(job), 3), seconds(lambda: subprocess.run(["ssh", "-F", used.config, "node", "true"]), 1))
    trips = [(took[500][who] - took[0][who]) / 0.5 for who in (0, 1)]
    print(f"warm run / ssh node true: {took[0][0]:.2f} / {took[0][1]:.2f} s near, {took[500][0]:.2f} / {took[500][1]:.2f} s at 500 ms; "
          f"round trips {trips[0]:.1f} / {trips[1]:.1f}")
    assert trips[0] < 6 and trips[0] < trips[1]               # design 10


def test_without_udp_it_goes_over_ssh_in_bounded_time(without_udp):
    took_s, done = without_udp.run.result()
    print(f"without UDP: {took_s:.1f} s")
    said = done.stderr.decode()
    assert done.returncode == 0 and took_s < 60, said
    assert "no UDP gets through to node: going over SSH" in said and "`udp_port`" in said and said.count("doesn't answer") == 1, said
    _, doctor = without_udp.doctor.result()
    assert doctor.returncode == 0 and b"over ssh in" in doctor.stdout and b"no UDP g" in doctor.stdout, doctor.stdout.decode()
