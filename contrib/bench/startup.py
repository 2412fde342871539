"""What starting costs: `gpurun --help` against `python -c pass`, and the modules that a warm run loads, the dearest first.

The modules' times are those of one run under `python -X importtime`, which itself makes them some tenths longer: compare, don't add. `with its own
imports` counts what is loaded by a module for the first time, so the same module costs nothing where it is asked for again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import NamedTuple

from common import bench, gpurun_command, in_turn, parser, sh

SHOWN = 30
GOAL_S = 0.15


class Import(NamedTuple):
    own_us: int
    whole_us: int
    depth: int
    name: str


def imports(text: str) -> list[Import]:
    """What `-X importtime` says, in its order: a module comes after those that it loads."""
    found = re.findall(r"^import time: +(\d+) \| +(\d+) \| ( *)(\S+)$", text, re.M)
    return [Import(int(own), int(whole), len(indent) // 2, name) for own, whole, indent, name in found]


def main() -> None:
    args = parser(__doc__, links=False, runs=10).parse_args()
    with bench() as b:
        print("start-up:")
        taken = in_turn({"python -c pass": lambda: sh(sys.executable, "-c", "pass"),
                         "gpurun --help": lambda: sh(str(gpurun_command()), "--help"),
                         "python -c 'import iroh'": lambda: sh(sys.executable, "-c", "import iroh")}, args)
        print(f"  {'gpurun --help, more than python -c pass':<58} {taken['gpurun --help'] - taken['python -c pass']:8.3f} s   goal ≤ {GOAL_S}")
        job = b.job("hello", "true")
        for _ in range(2):
            b.gpurun(job)
        done = subprocess.run([sys.executable, "-X", "importtime", "-m", "gpurun", str(job), "-q"], cwd=b.work, env=b.env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, check=True)
        found = imports(done.stderr)
        print(f"a warm run loads {len(found)} modules in {sum(one.own_us for one in found) / 1000:.0f} ms (as traced), the dearest of them:")
        print("       own   with its own imports")
        for one in sorted(found, key=lambda one: -one.own_us)[:SHOWN]:
            print(f"  {one.own_us / 1000:6.1f} ms {one.whole_us / 1000:6.1f} ms   {one.name}")
        print("gpurun's own modules, with all that each is the first to load:")
        for one in sorted(found, key=lambda one: -one.whole_us):
            if one.name.startswith("gpurun."):
                print(f"  {one.own_us / 1000:6.1f} ms {one.whole_us / 1000:6.1f} ms   {one.name}")


if __name__ == "__main__":
    main()
