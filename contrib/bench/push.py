"""2,000 files of 4 KB that don't compress: pushed the first time, again unchanged, and with 5 of them changed, against `rsync -az`.

Both figures of gpurun are shown: the whole command (start, push, an empty job, exit), and its push phase alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from common import Bench, bench, in_turn, ratio, sh

FILES, SIZE = 2000, 4096


def fill(folder: Path) -> None:
    """New contents in the same files. Nothing is deleted anywhere in here: ext4 is slow to create files for half a minute after that."""
    for index in range(FILES):
        path = folder / f"{index % 20:02d}" / f"{index:04d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(SIZE))


def change(folder: Path, count: int) -> None:
    for index in range(count):
        (folder / f"{index % 20:02d}" / f"{index:04d}.bin").write_bytes(os.urandom(SIZE))


def main() -> None:
    with bench() as b:
        tree = b.work / "tree"
        job = b.job("push", "true", workspace='{ workdir = "tree" }')
        fill(tree)
        b.gpurun(job)
        phases: list[float] = []
        there: list[str] = []

        def ours(before: int | None) -> float:
            fill(tree) if before is None else change(tree, before)
            result = b.gpurun(job)
            phases.append(result["seconds"]["push"])
            return float(result["wall"])

        def theirs(before: int | None) -> float:
            fill(tree) if before is None else change(tree, before)
            if before is None:
                there.append(f"there{len(there)}")
            return sh("rsync", "-az", "-e", b.rsh, f"{tree}/", f"node:{there[-1]}/")

        for what, before, goal in (("the first time", None, "≤ 0.8"), ("again, nothing changed", 0, "≤ 0.5"), ("again, 5 changed", 5, "≤ 0.5")):
            print(f"{FILES} files of {SIZE} bytes, {what}:")
            phases.clear()
            taken = in_turn({"gpurun, the whole command": lambda: ours(before), "rsync -az": lambda: theirs(before)})
            push = sorted(phases[1:])[len(phases[1:]) // 2]
            print(f"  {'gpurun, its push phase':<58} {push:8.3f} s")
            ratio("gpurun, whole : rsync -az", taken["gpurun, the whole command"], taken["rsync -az"], goal)
            ratio("gpurun, push phase : rsync -az", push, taken["rsync -az"], goal)


main()
