"""How many round trips a warm trivial run takes, and where each goes.

First the count: the same run at several round trip times, and the straight line through the medians. Its slope is the number of round trips that
somebody waits for, whatever else crosses the link meanwhile; where it begins is what would be left on a link without delay. Then one run at
--rtt, every packet of the link's device and every message of gpurun's operator with its time, in units of round trips: packets that leave within the
same moment are one flight. Needs root.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from common import Bench, bench, parser, sh
from warm import RUN

RTTS_MS = (20, 60, 100)
GOAL_TRIPS, GOAL_S = 6.0, 0.3
PAUSE_S = 0.010               # packets of one direction with less than this between them are one flight
LONG_S = 0.005                # a flight that takes so long says so
EVERY_PROTOCOL, OUTGOING, TIMESTAMPS = 3, 4, 35   # ETH_P_ALL, PACKET_OUTGOING, SO_TIMESTAMPNS
TRACED = Path(__file__).with_name("traced.py")


class Packet(NamedTuple):
    at: float                 # time.time()
    out: bool                 # from here to the node
    size_bytes: int           # of the IP packet
    kind: str


class Flight(NamedTuple):
    at: float
    until: float
    out: bool
    packets: int
    size_bytes: int
    kinds: str


class Capture:
    """Every packet of a device while this is open, as the kernel saw it here."""

    def __init__(self, device: str) -> None:
        self.packets: list[Packet] = []
        self._wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERY_PROTOCOL))
        self._wire.bind((device, 0))
        self._wire.setsockopt(socket.SOL_SOCKET, TIMESTAMPS, 1)
        self._wire.settimeout(0.1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.1)                       # what is on its way through the kernel
        self._over.set()
        self._thread.join()
        self._wire.close()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                data, extra, _, address = self._wire.recvmsg(65536, 64)
            except socket.timeout:
                continue
            stamps = [struct.unpack("qq", value[:16]) for _, kind, value in extra if kind == TIMESTAMPS]
            at = stamps[0][0] + stamps[0][1] / 1e9 if stamps else time.time()
            if data[0] >> 4 == 4:
                self.packets.append(Packet(at, address[2] == OUTGOING, struct.unpack_from("!H", data, 2)[0],
                                           {17: "UDP", 6: "TCP", 1: "ICMP"}.get(data[9], str(data[9]))))


def flights(packets: Sequence[Packet], pause_s: float = PAUSE_S) -> list[Flight]:
    """Packets of one direction that follow each other closely, put together; in the order in which they began."""
    made: list[Flight] = []
    for out in (True, False):
        group: list[Packet] = []
        for packet in [*sorted(one for one in packets if one.out == out), None]:
            if group and (packet is None or packet.at - group[-1].at > pause_s):
                kinds = "+".join(sorted({one.kind for one in group}))
                made.append(Flight(group[0].at, group[-1].at, out, len(group), sum(one.size_bytes for one in group), kinds))
                group = []
            if packet is not None:
                group.append(packet)
    return sorted(made)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, value at 0) of the straight line closest to these."""
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x


def count(b: Bench, contestants: dict[str, Callable[[], float]], args: argparse.Namespace) -> None:
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for rtt_ms in RTTS_MS:
        b.set(rtt=f"{rtt_ms}ms")
        for name, run in contestants.items():
            for _ in range(args.unmeasured):
                run()                         # what is remembered of the link is of another one
            taken = []
            for _ in range(args.runs):
                b.settle()
                taken.append(run())
            points[name].append((rtt_ms / 1000, statistics.median(taken)))
    print(f"round trips, from runs at {', '.join(map(str, RTTS_MS))} ms:")
    for name, values in points.items():
        trips, base_s = line(values)
        times = "  ".join(f"{seconds:.3f} s" for _, seconds in values)
        goal = f"   goal ≤ {GOAL_TRIPS:g} and ≤ {GOAL_S:g} s" if name.startswith("gpurun") else ""
        print(f"  {name:<46} {trips:5.1f} round trips + {base_s:.2f} s   ({times}){goal}", flush=True)


def trace(b: Bench, job: Path, rtt_s: float) -> None:
    """One run, every flight and message, and how much of the time was spent waiting for the link."""
    notes = b.folder / "trace"
    env = dict(b.env, GPURUN_BENCH_TRACE=str(notes))
    with Capture(b.shape["dev"]) as capture:
        began = time.time()
        subprocess.run([sys.executable, TRACED, str(job), "-q"], cwd=b.work, env=env, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, check=True)
        ended = time.time()
    rows = [(at, text) for at, text in map(json.loads, notes.read_text().splitlines())]
    rows += [(one.at, f"{'──>' if one.out else '<──'} {one.packets} packet{'s' if one.packets > 1 else ''}, {one.size_bytes} B {one.kinds}"
              + (f", the last {(one.until - one.at) * 1000:.0f} ms later" if one.until - one.at > LONG_S else ""))
             for one in flights(capture.packets) if began <= one.at]
    first = min((packet.at for packet in capture.packets if packet.at >= began and packet.out and packet.kind != "ICMP"), default=began)
    print(f"one run at {rtt_s * 1000:.0f} ms, with the time in s and in round trips since the first packet:")
    for at, text in sorted([*rows, (began, "  the process starts"), (ended, "  the process has ended")]):
        print(f"  {at - began:6.3f} s {(at - first) / rtt_s:6.2f}  {text}")
    mine = [packet for packet in capture.packets if began <= packet.at <= ended]
    for out in (True, False):
        there = [packet.size_bytes for packet in mine if packet.out == out]
        print(f"  {'to' if out else 'from'} the node: {len(there)} packets, {sum(there)} bytes")
    print(f"  before the first packet {first - began:.3f} s, after it {(ended - first) / rtt_s:.1f} round trips' time", flush=True)


def main() -> None:
    options = parser(__doc__, links=False, runs=3)
    options.add_argument("--rtt", type=int, default=100, metavar="MS", help="of the traced run (default 100)")
    options.add_argument("--trace-only", action="store_true", help="no count, one run with its trace")
    args = options.parse_args()
    with bench("ocean") as b:
        source, back = b.work / "hello", b.work / "back"
        for folder in (source, back):
            folder.mkdir()
        for name in ("a.txt", "b.txt", "c.txt"):
            (source / name).write_text(name * 50)
        job = b.job("hello", RUN, workspace='{ workdir = "hello" }', outputs=["out.txt"])
        master = f"{b.rsh} -o ControlPath={b.folder}/master"

        def script(rsh: str) -> float:
            return sh("sh", "-ec", f"rsync -az -e '{rsh}' {source}/ node:there/; {rsh} node 'cd there && {RUN}'; "
                                   f"rsync -az -e '{rsh}' node:there/out.txt {back}/")

        b.gpurun(job)
        if not args.trace_only:
            subprocess.run([*master.split(), "-fNM", "node"], check=True, stdin=subprocess.DEVNULL)
            count(b, {"gpurun hello.toml": lambda: b.gpurun(job)["wall"],
                      "rsync push; ssh run; rsync pull": lambda: script(b.rsh),
                      "the same, ControlMaster open": lambda: script(master),
                      "ssh node true": lambda: sh(*b.ssh, "true")}, args)
            subprocess.run([*master.split(), "-O", "exit", "node"], check=False, capture_output=True)
        b.set(rtt=f"{args.rtt}ms")
        b.gpurun(job)
        time.sleep(1)                         # or the last packets of that run would be taken for this one's
        trace(b, job, args.rtt / 1000)


if __name__ == "__main__":
    main()
