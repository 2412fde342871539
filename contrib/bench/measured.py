"""`measured.py FILE COMMAND…` runs a command and puts its seconds, its peak memory in KiB and its exit code into FILE. For common.py.

A process of its own, and a small one, since Linux lets the peak of a child begin with that of the process which starts it: a benchmark that has drawn a plot or
read a tree would be measured in place of gpurun.
"""

import os
import sys
import time

began = time.perf_counter()
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - began
with open(sys.argv[1], "w") as out:
    out.write(f"{seconds} {usage.ru_maxrss} {os.waitstatus_to_exitcode(status)}")
