"""Starts gpurun's commands within milliseconds: loads it and Vast.ai's SDK once, and forks for each command. For tests/test_vast_chaos.py.

Reads one JSON object a line: {"number", "argv", "env", "cwd", "said": a file for what it says, "pace", "times", "calls": names to seconds,
"fuse": [how, n] or null}. Answers {"number", "pid"} at once and {"number", "code"} at the end. The command is gpurun's own with all that belongs
to it but two things: its machines are rows that nobody can log in to, so their agents are taken for running; and with a fuse it is killed (-9) at
the nth write of a record, "before" it, "within" (the new file is there under another name) or "after".
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import sys
from typing import Any

import quick  # noqa: F401   # its times

from gpurun import cli, cli_nodes, fleet, machines, provider_vastai, renting, ssh, vast_api  # noqa: F401
from gpurun.provider import Node

vast_api._sdk()


class Told(Node):
    """A node whose agent is taken for running."""

    kind = "vastai"


def prepare(self: Any, machine: Any, say: Any, progress: Any) -> Node:
    row = self.api.row(machine.id)
    if row is None:
        raise provider_vastai.MachineGoneError(f"machine {machine.id} is gone")
    self.api.attach_key(machine.id, provider_vastai.public_key(), patience_s=0.5)
    return Told(f"node{machine.index}", self.cluster, machine.label)


def with_fuse(how: str, left: int) -> None:
    """Kills this process at that write of a record of a machine."""
    write, replace = machines.atomic_write, os.replace

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(path: str, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left == 0 and how == "before":
            die()
        os.replace = die if left == 0 and how == "within" else replace
        write(path, data)
        if left == 0:
            die()

    machines.atomic_write = counted


def command(asked: dict[str, Any]) -> None:
    """In the forked process; never returns."""
    said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, at in ((null, 0), (said, 1), (said, 2)):
        os.dup2(fd, at)
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    random.seed(asked["number"])
    calls = asked["calls"]
    fleet.PACE = fleet.PACE._replace(**asked["pace"])
    provider_vastai.TIMES.update(asked["times"])
    vast_api.TIMEOUT_S, provider_vastai.OFFERS_S = calls["timeout_s"], calls["offers_s"]
    vast_api.BACKOFF_S.update({name: (calls["backoff_s"],) for name in vast_api.BACKOFF_S})
    ask = vast_api.Api._ask
    vast_api.Api._ask = lambda self, what, call, patience_s, fine=(): ask(self, what, call, patience_s * calls["asking"], fine)
    provider_vastai.VastMachines.prepare = prepare
    fleet.Fleet._arm = lambda self, *_: None
    fleet.Fleet.ask = lambda self, node: {}
    if asked["fuse"]:
        with_fuse(*asked["fuse"])
    sys.argv = ["gpurun", *asked["argv"]]
    cli.main()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting, numbers, text = selectors.DefaultSelector(), {}, b""
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fd == wake:
                os.read(wake, 4096)
                continue
            more = os.read(0, 65536)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                pid = os.fork()
                if not pid:
                    for fd in (wake, woken):
                        os.close(fd)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    try:
                        command(asked)
                        code = 0
                    except SystemExit as stop:
                        code = stop.code if isinstance(stop.code, int) else 1
                    except BaseException as error:
                        print(f"Traceback: {error!r}", file=sys.stderr)
                        code = 99
                    sys.stdout.flush()
                    os._exit(code)
                numbers[pid] = asked["number"]
                print(json.dumps({"number": asked["number"], "pid": pid}), flush=True)
        while numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            print(json.dumps({"number": numbers.pop(pid), "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
