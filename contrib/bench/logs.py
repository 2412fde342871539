"""A job that writes much: its output against `ssh node cat` of the same lines, every byte compared, and how far behind the screen is.

The rate is that of the whole command from start to exit. The lag is taken with a job that writes at a pace, and says what time it is in between: how late each
of these lines comes out of gpurun's stdout.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import time

from common import Bench, bench, gpurun_command, in_turn, parser, ratio, sh

PIECES, PIECE_LINES, PAUSE_S = 50, 2000, 0.1      # of the job at a pace: 20,000 lines a second for five seconds
MARK = b"it is now "


def line(number: int) -> bytes:
    """What a training loop might print, 60 bytes."""
    return b"step %08d  loss %.6f  accuracy %.4f  lr 3.00e-04 seen\n" % (number, 2 / (1 + number % 997), number % 1000 / 1000)


def main() -> None:
    options = parser(__doc__, runs=3)
    options.add_argument("--lines", type=int, default=1_000_000, metavar="N", help="(default 1000000)")
    args = options.parse_args()
    with bench(args.link, args.cc) as b:
        with open(b.home / "lines.txt", "wb") as stream:
            stream.writelines(map(line, range(args.lines)))
        written = (b.home / "lines.txt").read_bytes()
        job = b.job("logs", "cat ~/lines.txt")

        def ours() -> float:
            seconds = sh("sh", "-c", f"cd {b.work} && {shlex.join([str(gpurun_command()), str(job), '-q'])} > here.txt", env=b.env)
            for came in (b.work / "here.txt", b.work / "gpurun-runs" / "latest" / "stdout.log"):
                if came.read_bytes() != written:
                    raise SystemExit(f"what came home isn't what the job wrote: {came}")
            return seconds

        def theirs() -> float:
            return sh("sh", "-c", f"{shlex.join(b.ssh)} cat lines.txt > {b.work}/lines.txt")

        print(f"{args.lines} lines, {len(written) / 1e6:.0f} MB:")
        taken = in_turn({"gpurun, the whole command": ours, "ssh node cat": theirs}, args, b.settle)
        for name, seconds in taken.items():
            print(f"  {name:<58} {len(written) / seconds / 1e6:8.1f} MB/s")
        ratio("rate of gpurun : rate of ssh node cat", taken["ssh node cat"], taken["gpurun, the whole command"], "≥ 0.8")
        lag(b)


def lag(b: Bench) -> None:
    (b.home / "piece.txt").write_bytes(b"".join(map(line, range(PIECE_LINES))))
    job = b.job("lag", f"for i in $(seq {PIECES}); do cat ~/piece.txt; date +'{MARK.decode()}%s.%N'; sleep {PAUSE_S}; done")
    command = [str(gpurun_command()), str(job), "-q"]
    late = []
    with subprocess.Popen(command, cwd=b.work, env=b.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rest = b""
        while data := os.read(process.stdout.fileno(), 1 << 20):
            now = time.time()
            *lines, rest = (rest + data).split(b"\n")
            late += [now - float(text[len(MARK):]) for text in lines if text.startswith(MARK)]
    if process.returncode or len(late) != PIECES:
        raise SystemExit(f"the job that says what time it is ended with {process.returncode}, and {len(late)} of its {PIECES} lines came")
    print(f"  {'lag behind the job, median / worst':<58} {statistics.median(late):8.3f} s / {max(late):.3f} s   goal < 1")


if __name__ == "__main__":
    main()
