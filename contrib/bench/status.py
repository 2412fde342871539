"""`gpurun status` with 200 runs in the folder, against the start of the Python that it runs on, and against `ls` of the same folder.

One run is real and was left to this machine's agent; the others are copies of its record. `--refresh` asks that agent for all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import end_agents, in_turn, parser, ratio, sh

RUNS_KEPT = 200


def main() -> None:
    args = parser(__doc__, links=False).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpurun-bench-"))
    try:
        os.environ.update(HOME=str(folder), CI="true")
        os.chdir(folder)
        (folder / "job.toml").write_text('[job]\nname = "job"\nrun = "true"\noutputs = ["x"]\n')
        gpurun = str(Path(sys.executable).parent / "gpurun")
        run_id = subprocess.run([gpurun, "submit", "job.toml", "-q"], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout.decode().strip()
        runs = folder / "gpurun-runs"
        record = json.loads((runs / run_id / "run.json").read_text())
        for number in range(1, RUNS_KEPT):
            copy = runs / f"{record['job']['name']}-20260101-{number:06d}-0000"
            copy.mkdir()
            (copy / "run.json").write_text(json.dumps(dict(record, run_id=copy.name), indent=1))
        print(f"{RUNS_KEPT} runs:")
        taken = in_turn({
            "gpurun status": lambda: sh(gpurun, "status"),
            "gpurun status --refresh": lambda: sh(gpurun, "status", "--refresh"),
            "python -c pass": lambda: sh(sys.executable, "-c", "pass"),
            "ls": lambda: sh("ls", str(runs))}, args)
        print(f"  {'gpurun status':<58} {taken['gpurun status']:8.3f} s   goal < 0.5")
        ratio("gpurun status : python -c pass", taken["gpurun status"], taken["python -c pass"], "≤ 5")
        ratio("gpurun status : ls", taken["gpurun status"], taken["ls"], "none")
    finally:
        end_agents(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
