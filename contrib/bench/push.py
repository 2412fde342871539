"""Many small files: pushed the first time, again unchanged, and with 5 of them changed, against `rsync -az`.

Both figures of gpurun are shown: the whole command (start, push, an empty job, exit), and its push phase alone. `--kind random` (the default) doesn't
compress; `text` is Python's own standard library, cut to as many files as are asked for.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from common import bench, in_turn, parser, ratio, sh, shown, size

CHANGED = 5
GOALS = (("the first time", None, "≤ 0.8"), ("again, nothing changed", 0, "≤ 0.5"), (f"again, {CHANGED} changed", CHANGED, "≤ 0.5"))


class Tree:
    """Nothing is ever deleted in it: ext4 is slow to create files for half a minute after that."""

    def __init__(self, root: Path, files: int, size_bytes: int, kind: str) -> None:
        self.root, self.files, self.size_bytes, self.round = root, files, size_bytes, 0
        self.texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.rglob("*.py"))] if kind == "text" else []
        for index in range(files):
            self.path(index).parent.mkdir(parents=True, exist_ok=True)
        self.change(files)

    def path(self, index: int) -> Path:
        return self.root / f"{index % 20:02d}" / f"{index // 20 % 50:02d}" / f"{index:06d}.{'py' if self.texts else 'bin'}"

    def change(self, count: int) -> None:
        """New contents in the first `count` files, or all if there are fewer."""
        self.round += 1
        for index in range(min(count, self.files)):
            if self.texts:
                contents = b"# %d in round %d\n" % (index, self.round) + self.texts[index % len(self.texts)]
            else:
                contents = os.urandom(self.size_bytes)
            self.path(index).write_bytes(contents)

    def bytes(self) -> int:
        return sum(self.path(index).stat().st_size for index in range(self.files))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--files", type=int, default=2000, metavar="N", help="(default 2000)")
    options.add_argument("--size", type=size, default=4096, metavar="BYTES", help="of each random file (default 4096)")
    options.add_argument("--kind", choices=("random", "text"), default="random")
    args = options.parse_args()
    with bench(args.link, args.cc) as b:
        tree = Tree(b.work / "tree", args.files, args.size, args.kind)
        job = b.job("push", "true", workspace='{ workdir = "tree" }')
        phases: list[float] = []
        places = 0

        def ours(changes: int | None) -> float:
            tree.change(args.files if changes is None else changes)
            b.settle()
            result = b.gpurun(job)
            phases.append(result["seconds"]["push"])
            return float(result["wall"])

        def theirs(changes: int | None) -> float:
            nonlocal places
            places += changes is None         # for rsync all is new in a new place
            tree.change(changes or 0)
            b.settle()
            return sh("rsync", "-az", "-e", b.rsh, f"{tree.root}/", f"node:there{places}/")

        for what, changes, goal in GOALS:
            phases.clear()
            print(f"{args.files} {args.kind} files, {shown(tree.bytes())}, {what}:")
            taken = in_turn({"gpurun, the whole command": lambda: ours(changes), "rsync -az": lambda: theirs(changes)}, args)
            push = statistics.median(phases[args.unmeasured:])
            print(f"  {'gpurun, its push phase':<58} {push:8.3f} s")
            ratio("gpurun, whole : rsync -az", taken["gpurun, the whole command"], taken["rsync -az"], goal)
            ratio("gpurun, push phase : rsync -az", push, taken["rsync -az"], goal)


if __name__ == "__main__":
    main()
