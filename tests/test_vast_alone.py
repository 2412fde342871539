"""Machines that nobody is there for: they end themselves with their container's key, at a limit or when they have been idle. Real machines.

What ends a machine whose agent never came, or died, is in test_onstart.py: its shortest lease is ten minutes.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from rented import at_work, none_goes_on   # noqa: F401
from renter import Renter, renter   # noqa: F401
from vast_server import Quirks


def by_itself(renter: Renter, timeout_s: float = 60.0):
    """The only machine, once it has ended itself."""
    one = next(iter(renter.server.instances.values()))
    renter.server.wait_for(lambda server: not one.alive, timeout_s)
    assert one.destroyed_by == f"C.{one.id}"
    return one


def test_a_machine_ends_itself_at_its_limit_when_its_operator_left(renter):
    renter.cluster(limits={"max_hours": 0.008})           # 29 s, in which a busy machine has to come up
    assert renter.gpurun("up").returncode == 0
    done = renter.gpurun("submit", renter.job("sleep 120"))
    assert done.returncode == 0, done.stderr.decode()
    begun = json.loads(renter.records[0].read_text())["begun"]
    one = by_itself(renter)
    assert 28.5 < one.destroyed_at - begun < 55
    done = renter.gpurun("attach", "latest", timeout=60)
    assert done.returncode == 125 and "exist" in done.stderr.decode(), done.stderr.decode()
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_a_machine_ends_itself_at_its_limit_when_gpurun_was_killed(renter):
    renter.cluster(limits={"max_hours": 0.008})
    run = at_work(renter)
    run.signal(signal.SIGKILL)
    by_itself(renter, 100)                    # an operator whose link broke may be coming back: half a minute
    assert "gpurun down" in renter.gpurun("status").stderr.decode().splitlines()[0]
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_a_machine_ends_itself_at_its_share_of_the_money(renter):
    renter.cluster(limits={"max_cost": 40}, selection={}, gpu={})
    renter.server.script(row={"dph_total": 6000.0})       # 24 s
    assert renter.gpurun("up", "--yes").returncode == 0
    assert renter.gpurun("submit", renter.job("sleep 120")).returncode == 0
    begun = json.loads(renter.records[0].read_text())["begun"]
    one = by_itself(renter)
    assert one.destroyed_at - begun > 23.5
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_an_idle_machine_ends_itself(renter):
    renter.cluster(limits={"idle_minutes": 0.05})
    assert renter.gpurun("up").returncode == 0
    up = time.time()
    one = by_itself(renter)
    assert one.destroyed_at - up < 25         # and not when an operator could have been coming back, half a minute later
    shown = renter.gpurun("nodes")
    assert shown.returncode == 0 and str(one.id) not in shown.stdout.decode() or "gone" in shown.stdout.decode(), shown.stdout.decode()
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_a_long_quiet_job_is_no_idleness_and_the_machine_goes_once_it_has_ended(renter):
    renter.cluster(limits={"idle_minutes": 0.1})          # 6 s, within which the job has to come after its machine
    ended = renter.folder / "ended"
    job = renter.job(f"sleep 9; date +%s.%N > {ended}; echo kept > out.txt", outputs=["out.txt"])
    assert renter.gpurun("submit", job, "--up").returncode == 0
    one = by_itself(renter)
    assert one.destroyed_at - float(ended.read_text()) >= 5.9
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_a_machine_with_an_operator_at_it_is_not_idle(renter):
    renter.cluster(limits={"idle_minutes": 0.06})
    done = renter.gpurun(renter.job("sleep 8; echo kept > out.txt", outputs=["out.txt"]), "--up", "--down")
    assert done.returncode == 0 and (renter.latest / "outputs/out.txt").read_text() == "kept\n", done.stderr.decode()
    assert next(iter(renter.server.instances.values())).destroyed_by == "right"
    renter.ended()


def test_a_machine_that_can_not_end_itself_is_said_to_be_one(renter):
    renter.server.script(machine=Quirks(without=("CONTAINER_API_KEY",)))
    done = renter.gpurun(renter.job("true"), "--up", "--down")
    assert done.returncode == 0 and "can't end itself" in done.stderr.decode(), done.stderr.decode()
    renter.ended()


@pytest.mark.parametrize("refusal", ["429", "500", "401", "dropped"])
def test_a_machine_that_may_not_end_itself_at_once_asks_again(renter, refusal):
    renter.cluster(limits={"idle_minutes": 0.06})
    renter.server.fault("destroy", refusal, times=1)
    assert renter.gpurun("up").returncode == 0
    by_itself(renter)
    asked = renter.server.calls("destroy")
    assert len(asked) >= 2 and not any(one.body == {"state": "stopped"} for one in renter.server.calls("state"))
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_every_one_of_many_runs_at_once_is_guarded_before_its_job_begins(renter):
    seen = []

    def hook(request):
        if request.endpoint == "destroy":
            seen.append(request.ids[0])

    renter.server.hook = hook
    jobs = [renter.job(f"cat /root/.gpurun/agent/guard.json > {renter.folder}/guard{number}", name=f"job{number}") for number in range(3)]
    threads = [threading.Thread(target=renter.gpurun, args=(job, "--up", "--down")) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        known = json.loads(Path(renter.folder / f"guard{number}").read_text())
        assert 7000 < known["left_s"] <= 7200 and known["idle_s"] == 3600
    assert len(set(seen)) == 3
    renter.ended()
