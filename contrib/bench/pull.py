"""1 GB that doesn't compress, from the node to here, against scp; with the peak memory of both of gpurun's sides.

The file is in the job's workdir from the start (a hard link), so that the collect phase is nothing but the pull.
"""

from __future__ import annotations

import os
import sys

from common import bench, in_turn, ratio, sh

SIZE = int(os.environ.get("BENCH_BYTES", 1_000_000_000))


def main() -> None:
    with bench() as b:
        big = b.sshd.home / "big.bin"
        with open(big, "wb") as stream:
            for _ in range(SIZE // 1_000_000):
                stream.write(os.urandom(1_000_000))
        job = b.job("pull", "ln ~/big.bin out.bin", outputs=["out.bin"])
        b.gpurun(b.job("first", "true"))
        peaks: list[int] = []
        whole: list[float] = []

        def ours() -> float:
            result = b.gpurun(job)
            peaks.append(result["peak_kib"])
            whole.append(result["wall"])
            os.unlink(os.path.join(result["outputs_dir"], "out.bin"))
            return float(result["seconds"]["collect"])

        def theirs() -> float:
            seconds = sh("scp", "-q", "-F", str(b.sshd.config), "node:big.bin", f"{b.work}/back.bin")
            os.unlink(b.work / "back.bin")
            return seconds

        print(f"{SIZE / 1e6:.0f} MB from the node to here:")
        taken = in_turn({"gpurun, its collect phase": ours, "scp": theirs})
        for name, seconds in taken.items():
            print(f"  {name:<58} {SIZE / 1e6 / seconds:8.1f} MB/s")
        print(f"  {'gpurun, the whole command':<58} {sorted(whole)[len(whole) // 2]:8.3f} s")
        ratio("rate of gpurun : rate of scp", taken["scp"], taken["gpurun, its collect phase"], "≥ 1.0")
        print(f"  peak memory: operator {max(peaks) / 1024:.0f} MB, agent {b.agent_peak_kib() / 1024:.0f} MB   goal ≤ 150 each")


if __name__ == "__main__":
    sys.exit(main())
