"""One big file that doesn't compress, from the node and to it, against scp and rsync over SSH; with the peak memory of both of gpurun's sides.

From the node the file is in the job's workdir from the start (a hard link), so that the collect phase is nothing but the pull. To the node it is the
workspace. Where the link loses packets, rsync runs once with cubic and once with bbr; with cubic it gets a quarter of the file, or it would take
minutes: its rate is what counts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from common import LINKS, Bench, bench, in_turn, parser, ratio, sh, shown, size

PIECE = 1 << 20
LOSSY_SHARE = 4               # cubic's part of the file is so much smaller


def fill(path: Path, count: int) -> None:
    with open(path, "wb") as stream:
        for at in range(0, count, PIECE):
            stream.write(os.urandom(min(PIECE, count - at)))


def renew(path: Path) -> None:
    """Another file as far as anybody's cache knows."""
    with open(path, "r+b") as stream:
        stream.write(os.urandom(4096))


class Sides:
    """What gpurun took at its most, on either side, and whole commands."""

    def __init__(self, b: Bench) -> None:
        self.b, self.peak_kib, self.whole, self.paths = b, 0, [], set()

    def ran(self, result: dict[str, Any]) -> None:
        self.peak_kib = max(self.peak_kib, result["peak_kib"])
        self.whole.append(result["wall"])
        self.paths.add(result["record"].get("path", "?"))

    def show(self) -> None:
        print(f"  {'gpurun, the whole command':<58} {sorted(self.whole)[len(self.whole) // 2]:8.3f} s")
        print(f"  gpurun's path: {', '.join(sorted(self.paths))}; peak memory: operator {self.peak_kib / 1024:.0f} MB, "
              f"agent {self.b.agent_peak_kib() / 1024:.0f} MB   goal ≤ 150 each", flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--bytes", type=size, metavar="N", help="of the file: 4G, 40M (default 1G, on a lossy link 40M)")
    options.add_argument("--way", choices=("both", "down", "up"), default="both", help="from the node, to it (default both)")
    args = options.parse_args()
    lossy = "loss" in LINKS[args.link]
    count = args.bytes or (40 * 10**6 if lossy else 10**9)
    with bench(args.link, args.cc) as b:
        for way in ("down", "up") if args.way == "both" else (args.way,):
            one_way(b, way, count, lossy, args)


def one_way(b: Bench, way: str, count: int, lossy: bool, args: argparse.Namespace) -> None:
    there, here, back = b.home / "big.bin", b.work / "tree" / "big.bin", b.work / "back.bin"
    here.parent.mkdir(exist_ok=True)
    fill(there if way == "down" else here, count)
    part = count // LOSSY_SHARE
    if lossy and way == "down":
        fill(b.home / "part.bin", part)
    elif lossy:
        fill(b.work / "part.bin", part)
    sides = Sides(b)
    job = b.job("down", "ln ~/big.bin out.bin", outputs=["out.bin"]) if way == "down" else b.job("up", "true", workspace='{ workdir = "tree" }')

    def ours() -> float:
        if way == "up":
            renew(here)
        result = b.gpurun(job)
        sides.ran(result)
        if way == "down":
            (result["folder"] / "outputs" / "out.bin").unlink()
        return float(result["seconds"]["collect" if way == "down" else "push"])

    def theirs(program: list[str], name: str = "big.bin") -> float:
        (back if way == "down" else b.home / "there.bin").unlink(missing_ok=True)
        local = here if name == "big.bin" else b.work / name
        return sh(*program, *([f"node:{name}", str(back)] if way == "down" else [str(local), "node:there.bin"]))

    def with_congestion(name: str, file: str) -> float:
        with b.congestion(name):
            return theirs(["rsync", "-e", b.rsh], file)

    def ours_with_bbr() -> float:
        with b.congestion("bbr"):
            return ours()

    phase = f"gpurun, its {'collect' if way == 'down' else 'push'} phase"
    print(f"{shown(count)} {'from the node to here' if way == 'down' else 'from here to the node'}:")
    amounts = {phase: count}
    contestants = {phase: ours}
    if lossy:
        contestants[f"{phase}, TCP with bbr"] = ours_with_bbr
        contestants["rsync over SSH, cubic"] = lambda: with_congestion("cubic", "part.bin")
        contestants["rsync over SSH, bbr"] = lambda: with_congestion("bbr", "big.bin")
        amounts["rsync over SSH, cubic"], goals = part, {"rsync over SSH, cubic": (phase, "≥ 10"), "rsync over SSH, bbr": (f"{phase}, TCP with bbr", "≥ 1")}
    else:
        contestants["scp"] = lambda: theirs(["scp", "-q", "-F", str(b.config)])
        goals = {"scp": (phase, "≥ 1.0")}
    b.forget_agent_peak()
    taken = in_turn(contestants, args, b.settle)
    rates = {name: amounts.get(name, count) / seconds for name, seconds in taken.items()}
    for name, rate in rates.items():
        print(f"  {name:<58} {rate / 1e6:8.1f} MB/s  {rate * 8 / 1e6:8.1f} Mbit/s")
    for name, (mine, goal) in goals.items():
        ratio(f"rate of gpurun : rate of {name}", rates[mine], rates[name], goal)
    sides.show()


if __name__ == "__main__":
    main()
