"""Chaos: gpurun is killed anywhere, its provider does its worst, and in the end no machine is alive.

Each number below is a script of its own, made from that number alone: what goes wrong with which requests, how the machines behave, which
commands are given, and where they are killed (-9): at a request, before or after the provider heard it, or at the write of a record. The last
`down` is left alone, once the faults are over. Then the provider's own ledger is asked: nobody alive, none without a label, never more than were
asked for, no request for a machine sent twice; and no record is left.

The commands are the real ones with the real SDK; their machines are rows that nobody can log in to (tests/chaos_driver.py). Some scripts with
machines that are really there, a job and an agent follow at the end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here
from renter import TESTS, Renter, renter  # noqa: F401   # a fixture
from running import Running
from vast_http import Request
from vast_server import VastServer, offer

SCRIPTS, REAL = 200, 10
AT_ONCE = 8                       # they wait most of the time
BOUND_S = 120.0
# What comes late at the provider comes within 0.2 s; these are the times after which gpurun takes it for decided.
PACE = {"look_s": 0.08, "ending_s": 0.08, "create_s": 0.03, "offer_s": 0.02, "later_s": 0.05, "failed_s": 0.02, "again_s": [0.1, 0.2],
        "patience_s": 30.0, "in_flight_s": 5.0, "refused_s": 20.0}
TIMES = {"settle_s": 3.0, "confirm_s": 0.35, "again_s": 0.5, "doubt_s": 0.5}
CALLS = {"timeout_s": 0.6, "offers_s": 0.3, "backoff_s": 0.03, "asking": 0.02}
SILENCE = ["dropped", "lost_answer", "hang", "stall", "truncated", "html200", "empty200"]
REFUSALS = ["429", "500", "502", "503", "400"]
FAULTS = {"create": [*SILENCE, *REFUSALS, "gone_404", "gone_410", "402_no_credit", "error_with_contract", "success_never_appears", "success_false"],
          "list": [*SILENCE, *REFUSALS, "401", "403"], "show": [*SILENCE, *REFUSALS, "404_instance"],
          "destroy": [*SILENCE, *REFUSALS, "success_false", "401"], "search": [*SILENCE, *REFUSALS], "ssh_list ssh_create": [*SILENCE, *REFUSALS],
          "ssh_attach": REFUSALS, "user": REFUSALS, "any": ["dropped", "500", "429"]}
STEPS = [((0.0, "st_running"),), ((0.1, "st_loading"), (0.1, "st_running")), ((0.05, "st_oci_failed"),), ((0.05, "st_pull_limit"),),
         ((0.1, "st_running"), (0.2, "st_outbid")), ((0.0, "st_running"), (0.3, "st_offline"), (0.3, "st_running")),
         ((0.0, "st_running"), (0.3, "st_exited")), ((0.0, "st_loading"),), ((0.0, "st_running"), (0.2, "st_unknown"))]


# ---- the fork server -----------------------------------------------------------------------------------------------------------------

class Driver:
    """tests/chaos_driver.py, from any thread."""

    def __init__(self, here: Here) -> None:
        env = dict(here.env, PYTHONPATH=f"{TESTS.parent}:{TESTS}", VAST_API_KEY="k" * 60, NO_PROXY="127.0.0.1,localhost")
        argv = [sys.executable, str(TESTS / "chaos_driver.py")]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
        self._changed, self._pids, self._codes, self._numbers = threading.Condition(), {}, {}, 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            with self._changed:
                (self._pids if "pid" in said else self._codes)[said["number"]] = said.get("pid", said.get("code"))
                self._changed.notify_all()

    def start(self, **asked: Any) -> "Command":
        with self._changed:
            self._numbers += 1
            number = self._numbers
            self._process.stdin.write(json.dumps({"number": number, **asked}) + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: number in self._pids, BOUND_S)
            return Command(self, number, self._pids[number])

    def code(self, number: int, within_s: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._codes, within_s)
            return self._codes.get(number)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)


class Command:
    def __init__(self, driver: Driver, number: int, pid: int) -> None:
        self._driver, self._number, self.pid = driver, number, pid

    def kill(self) -> None:
        with self._driver._changed:
            if self._number not in self._driver._codes:
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        code = self._driver.code(self._number, BOUND_S)
        if code is None:
            os.kill(self.pid, signal.SIGABRT)
            raise AssertionError(f"not ended within {BOUND_S} s")
        return code


# ---- one script ----------------------------------------------------------------------------------------------------------------------

class Killer:
    """The server's hook: kills the command at its nth request, before or after the server has done what it asks."""

    def __init__(self) -> None:
        self.left, self.heard, self.command = 0, True, None
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> str | None:
        with self._lock:
            if self.left <= 0:
                return None
            self.left -= 1
            if self.left or self.command is None:
                return None
        self.command.kill()
        return "lost_answer" if self.heard else "dropped"


class Script:
    """What a number says."""

    def __init__(self, number: int, folder: Path, driver: Driver) -> None:
        self.random, self.folder, self.driver = random.Random(f"chaos {number}"), folder, driver
        self.said = folder / "said"
        self.asked = 0

    def run(self) -> None:
        draw = self.random
        with VastServer([offer(machine_id=number) for number in range(1, 13)]) as server:
            self.server, self.killer, self.here = server, Killer(), Renter(self.folder / "here", server)
            server.hook = self.killer
            server.relist = draw.random() < 0.5
            for machine_id in range(1, 13):
                server.script(machine_id, steps=STEPS[0] if draw.random() < 0.6 else draw.choice(STEPS),
                              visible_after=draw.choice((0.0, 0.0, 0.1, 0.2)), gone_after=draw.choice((0.0, 0.0, 0.1)),
                              comes_back_after=draw.choice((None, 0.15)), hidden_destroy=draw.random() < 0.7)
            for _ in range(draw.randint(0, 10)):
                endpoints = draw.choice((*FAULTS, "create", "list", "destroy"))
                server.fault(endpoints, draw.choice(FAULTS[endpoints]), draw.randint(1, 6), draw.choice((1, 1, 2, 4)))
            if draw.random() < 0.4:      # no list for a while
                server.fault("list", draw.choice(("400", "401", "403", "500", "empty200")), draw.randint(3, 9), 40)
            config = self.here.home / ".config/gpurun"
            config.mkdir(parents=True)
            (config / "key").write_text(f"{draw.getrandbits(256):064x}\n")
            (config / "key").chmod(0o600)
            self.here.cluster(ready_within_s=1.5, nodes=3)
            for number in range(draw.randint(1, 3)):
                self.commands(["up"] if not number else draw.choice((["up"], ["up"], ["down"], ["nodes"], ["up", "up"], ["up", "down"])))
            with server.changed:
                server._faults.clear()
                server._scripts.clear()
            server.hook = None
            code = self.command("down", 0, None).end()
            said = self.said.read_text()
            assert code == 0, said
            time.sleep(0.2)              # one that comes back does so within this time
            self.here.ended()
            assert server.most_alive <= self.asked, f"{server.most_alive} were alive at once, {self.asked} were asked for"
            assert "Traceback" not in said and "fault in gpurun" not in said, said

    def commands(self, names: list[str]) -> None:
        """Given at once; one of them may be killed."""
        draw = self.random
        count, fate = draw.randint(1, 3), draw.choice(("request", "request", "write", "write", "lives"))
        if "up" in names:
            self.asked = max(self.asked, count)
        fuse = [draw.choice(("before", "within", "after")), draw.randint(1, 12)] if fate == "write" else None
        self.killer.left, self.killer.heard, self.killer.command = draw.randint(1, 25) if fate == "request" else 0, draw.random() < 0.5, None
        running = [self.command(name, count, fuse if name == names[0] else None) for name in names]
        self.killer.command = running[0]
        for one in running:
            one.end()
        self.killer.left = 0

    def command(self, name: str, count: int, fuse: list[Any] | None) -> Command:
        argv = [name, *(["--yes"] if name != "nodes" else []), *(["--nodes", str(count)] if name == "up" else [])]
        with open(self.said, "a") as log:
            log.write(f"---- gpurun {' '.join(argv)} {fuse or ''} {[self.killer.left, self.killer.heard]}\n")
        return self.driver.start(argv=argv, env={"HOME": str(self.here.home), "VAST_URL": self.server.url, "VAST_API_KEY": self.server.key},
                                 cwd=str(self.here.work), said=str(self.said), pace=PACE, times=TIMES, calls=CALLS, fuse=fuse)


@pytest.fixture(scope="module")
def scripts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    """Those that were selected, some at once; each test waits for its own."""
    folder = tmp_path_factory.mktemp("chaos")
    driver = Driver(Here(folder / "driver"))
    numbers = [item.callspec.params["number"] for item in request.session.items
               if getattr(item, "originalname", "") == test_no_machine_is_left_whatever_went_wrong.__name__]

    def one(number: int) -> None:
        script = Script(number, folder / str(number), driver)
        script.folder.mkdir()
        try:
            script.run()
        except BaseException as error:
            said = script.said.read_text() if script.said.exists() else ""
            asked = "\n".join(f"{one.time % 1000:7.3f} {one.method} {one.path} {one.fault} {one.status}" for one in script.server.requests)
            raise AssertionError(f"script {number}: {error}\n{said}\n{asked}") from error
        shutil.rmtree(script.folder, ignore_errors=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {number: pool.submit(one, number) for number in numbers}
    driver.close()


@pytest.mark.parametrize("number", range(SCRIPTS))
def test_no_machine_is_left_whatever_went_wrong(number, scripts):
    scripts[number].result(600)


# ---- with machines that are there ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", range(REAL))
def test_no_machine_is_left_of_a_run_with_up_and_down_whatever_went_wrong(number, renter):
    """The whole command, with containers to log in to, an agent and a job; in most scripts it is killed at some request."""
    draw, server, killer = random.Random(f"real {number}"), renter.server, Killer()
    server.hook = killer
    for _ in range(draw.randint(0, 4)):
        endpoints = draw.choice(list(FAULTS))
        kinds = [kind for kind in FAULTS[endpoints] if kind not in ("hang", "stall")]         # which take as long as gpurun's patience
        server.fault(endpoints, draw.choice(kinds), draw.randint(1, 4), draw.choice((1, 1, 2)))
    server.script(visible_after=draw.choice((0.0, 0.2)), gone_after=draw.choice((0.0, 0.2)), comes_back_after=draw.choice((None, 0.2)))
    killer.left, killer.heard = draw.choice((0, draw.randint(4, 14), draw.randint(8, 20))), draw.random() < 0.5
    run = Running(renter, renter.job("echo done > out.txt", outputs=["out.txt"]), "--up", "--down")
    killer.command = run.process
    code = run.process.wait(200)
    server.hook = None
    server._faults.clear()
    if code == 0:
        assert (renter.latest / "outputs/out.txt").read_text() == "done\n" and renter.record()["cost"] > 0
    if code in (0, 1):                       # it wasn't killed, so nothing is left to others; of what can't be ended it says so
        assert server.alive() == [] or "could not be ended" in run.err, run.err
    done = renter.gpurun("down", "--yes", "--all")
    time.sleep(0.3)                          # one that comes back does so within this time
    renter.ended()
    assert done.returncode == 0 and server.most_alive <= 1, done.stderr.decode()
    assert "Traceback" not in run.err and "fault in gpurun" not in run.err + done.stderr.decode(), run.err
