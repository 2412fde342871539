"""How time and memory grow with the work: files (pushed, and pushed again unchanged), bytes (pulled and pushed), lines of a job's output.

For each the seconds and the peak memory of gpurun's operator and agent, as a table in Markdown and with --out as a plot (SVG or PNG). Beside a series stands the
exponent of its growth, what a trivial run takes being taken off: 1 is a straight line, 2 a square. Each point is one run.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from common import Bench, bench, machine, parser, shown, size
from pull import fill, renew
from push import Tree
from roundtrips import line

STRAIGHT = 1.15               # an exponent up to this is a straight line, as well as single runs can tell
FILE_BYTES = 1000
MEMORY_GOAL_MB = 150


class Point(NamedTuple):
    amount: int
    seconds: float
    operator_mb: float
    agent_mb: float


class Series(NamedTuple):
    name: str
    unit: str                 # the panel it stands in
    points: list[Point]


def exponent(amounts: Sequence[int], seconds: Sequence[float], base_s: float) -> float | None:
    """Of the growth of `seconds - base_s`, by the straight line through their logarithms. Only points count in which the work takes as long as the base: in
    others a base of some tenths that varies would be what is fitted. None where there aren't two of them."""
    logs = [(math.log(amount), math.log(value - base_s)) for amount, value in zip(amounts, seconds) if value > 2 * base_s]
    return line(logs)[0] if len(logs) > 1 else None


def verdict(grown: float | None) -> str:
    if grown is None:
        return "hardly more than a trivial run, or only at the end"
    return f"exponent {grown:.2f}, {'a straight line or better' if grown <= STRAIGHT else 'MORE than a straight line'}"


def steps(least: int, most: int) -> list[int]:
    """Decades, and the end."""
    made, amount = [], least
    while amount <= most:
        made.append(amount)
        amount *= 10
    return made if made and made[-1] == most else [*made, most]


class Measured:
    def __init__(self, b: Bench) -> None:
        self.b, self.series = b, []
        self.base_s = min(b.gpurun(b.job("nothing", "true"))["wall"] for _ in range(3))

    def grow(self, name: str, unit: str, amounts: list[int], job: Callable[[int], Path], after: Callable[[Path], None] = lambda folder: None) -> None:
        points = []
        for amount in amounts:
            made = job(amount)
            self.b.settle()
            self.b.forget_agent_peak()
            result = self.b.gpurun(made, "-q")
            points.append(Point(amount, result["wall"], result["peak_kib"] / 1024, self.b.agent_peak_kib() / 1024))
            after(result["folder"])
        self.series.append(Series(name, unit, points))
        self.show(self.series[-1])

    def show(self, series: Series) -> None:
        print(f"\n{series.name}\n\n| {series.unit} | seconds | operator's peak MiB | agent's peak MiB |\n| ---: | ---: | ---: | ---: |")
        for point in series.points:
            amount = shown(point.amount) if series.unit == "bytes" else f"{point.amount:,}"
            print(f"| {amount} | {point.seconds:.2f} | {point.operator_mb:.0f} | {point.agent_mb:.0f} |")
        first, last = series.points[0], series.points[-1]
        print(f"\ntime: {verdict(self.time_exponent(series))}; memory from first to last: operator {last.operator_mb - first.operator_mb:+.0f} MiB, "
              f"agent {last.agent_mb - first.agent_mb:+.0f} MiB", flush=True)

    def time_exponent(self, series: Series) -> float | None:
        return exponent([point.amount for point in series.points], [point.seconds for point in series.points], self.base_s)


def measure(b: Bench, most_files: int, most_bytes: int, most_lines: int) -> Measured:
    made = Measured(b)
    trees: dict[int, Tree] = {}

    def tree_of(count: int) -> Path:
        trees[count] = Tree(b.work / f"files{count}", count, FILE_BYTES, "random")
        return again(count)

    def again(count: int) -> Path:
        return b.job(f"files{count}", "true", workspace=f'{{ workdir = "files{count}" }}')

    def pulled(count: int) -> Path:
        fill(b.home / "big.bin", count)
        return b.job("down", "ln ~/big.bin out.bin", outputs=["out.bin"])

    def pushed(count: int) -> Path:
        (b.home / "big.bin").write_bytes(b"")   # the pulled one's room, which runs there have links to
        big = b.work / "tree" / "big.bin"
        big.parent.mkdir(exist_ok=True)
        fill(big, count)
        renew(big)
        return b.job("up", "true", workspace='{ workdir = "tree" }')

    made.grow("lines of the job's output", "lines", steps(1000, most_lines), lambda count: b.job("lines", f"seq {count}"))
    made.grow("one file, from the node to here", "bytes", steps(10**6, most_bytes), pulled, lambda folder: shutil.rmtree(folder / "outputs"))
    made.grow("one file, from here to the node", "bytes", steps(10**6, most_bytes), pushed)
    files = steps(100, most_files)            # last: an agent that has had many keeps some of that memory
    made.grow(f"files of {FILE_BYTES} bytes, first push", "files", files, tree_of)
    made.grow("the same files, unchanged", "files", files, again)
    return made


def draw(made: Measured, path: Path, about: str) -> None:
    """Double logarithmic: a straight line of slope 1 is growth in proportion, and the grey lines are that."""
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gpurun", "font.size": 8})
    from matplotlib import pyplot
    units = ("files", "bytes", "lines")
    figure, panels = pyplot.subplots(2, len(units), figsize=(11, 6.5), constrained_layout=True)
    for column, unit in enumerate(units):
        time, memory = panels[0][column], panels[1][column]
        for series in (one for one in made.series if one.unit == unit):
            amounts = [point.amount for point in series.points]
            grown = made.time_exponent(series)
            (drawn,) = time.loglog(amounts, [point.seconds for point in series.points], "o-", markersize=3,
                                   label=f"{series.name} ({'hardly more than a trivial run' if grown is None else f'exponent {grown:.2f}'})")
            for side, style in (("operator", "o-"), ("agent", "s--")):
                memory.semilogx(amounts, [getattr(point, f"{side}_mb") for point in series.points], style, markersize=3, color=drawn.get_color(),
                                label=f"{series.name}: {side}")
        low, high = time.get_xlim()
        bottom, top = time.get_ylim()
        for seconds in range(-12, 6):         # in proportion: parallel to these
            time.plot([low, high], [10.0**seconds, 10.0**seconds * high / low], color="0.85", linewidth=0.6, zorder=0)
        time.set_xlim(low, high)
        time.set_ylim(min(bottom, 0.1), max(top, 10.0))   # less would make mountains of noise
        memory.axhline(MEMORY_GOAL_MB, color="0.6", linewidth=0.8)
        memory.set_ylim(0, max(MEMORY_GOAL_MB * 1.1, memory.get_ylim()[1]))
        time.set_ylabel("seconds, whole command")
        memory.set_ylabel("peak memory, MiB")
        for panel in (time, memory):
            panel.set_xlabel(unit)
            panel.legend(fontsize=6, frameon=False)
    figure.suptitle(about, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    options = parser(__doc__, runs=0)
    options.add_argument("--max-files", type=size, default=10**5, metavar="N", help="(default 100k)")
    options.add_argument("--max-bytes", type=size, default=4 * 10**9, metavar="N", help="(default 4G)")
    options.add_argument("--max-lines", type=size, default=10**7, metavar="N", help="(default 10m)")
    options.add_argument("--out", type=Path, metavar="FILE", help="draw the plot there: scale.svg, scale.png")
    args = options.parse_args()
    if args.out is not None and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("to draw, matplotlib is needed: contrib/setup bench (or without --out: the tables alone)")
    out = args.out and args.out.absolute()
    with bench(args.link, args.cc) as b:
        made = measure(b, args.max_files, args.max_bytes, args.max_lines)
    if out is not None:
        draw(made, out, f"gpurun, link {args.link}; {machine()}")
        print(f"\ndrawn: {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
