"""Limits as the operator's gpurun keeps them: refused before anything is rented, fired during a run, and what it all costs. Real machines.

That a GPU is idle while a job runs, or that a job makes no progress, ends nothing: neither is a limit that a cluster file has.
There are no budgets of their own for coming up, setup and run: max_hours and max_cost count from the request for the machine, whatever it does.
"""

from __future__ import annotations

import json

import pytest
from conftest import eventually
from rented import AT_WORK, none_goes_on   # noqa: F401
from renter import Renter, renter   # noqa: F401
from running import Running
from vast_rows import offer

from gpurun.limits import dollars
from gpurun.machines import Store

HOUR_S = 3600.0


def records(renter: Renter) -> list[dict]:
    return [json.loads(path.read_text()) for path in renter.records]


def older(renter: Renter, hours: float) -> None:
    """Time passes for gpurun: its machines were asked for so much earlier. Their agents know nothing of it."""
    for path in renter.records:              # as a gpurun does it, which may write there just now
        store = Store(str(path.parent))
        store.change(path.stem, begun=store.get(path.stem).begun - hours * HOUR_S)


def limited(renter: Renter, said: str, run: Running, bound: str) -> None:
    """Asserts that a run was ended by its limit, with all that belongs to it."""
    assert run.end() == 124, run.err
    assert bound in renter.record()["reason"], renter.record()["reason"]
    assert (renter.latest / "outputs/out.txt").read_text() == said
    assert f"{bound} was reached" in run.err


# ---- by the operator's loop ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("limits, hours, bound", [({"max_hours": 2}, 2.1, "max_hours 2"), ({"max_cost": 3, "max_hours": 20}, 9.0, "max_cost $3.00")])
def test_a_limit_ends_the_run_brings_its_outputs_home_and_ends_the_machine(renter, limits, hours, bound):
    renter.cluster(limits=limits)
    run = Running(renter, renter.job(AT_WORK, outputs=["out.txt"]), "--up", "--down")
    run.until("at-work")
    older(renter, hours)
    limited(renter, "kept\n", run, bound)
    renter.ended()


def test_a_limit_ends_a_machine_that_stood_before_the_run(renter):
    assert renter.gpurun("up").returncode == 0
    run = Running(renter, renter.job(AT_WORK, outputs=["out.txt"]))
    run.until("at-work")
    older(renter, 2.1)
    limited(renter, "kept\n", run, "max_hours 2")
    renter.ended()


def test_a_limit_that_passes_in_real_time_fires(renter):
    renter.cluster(limits={"max_hours": 0.007})             # 25 s, in which a busy machine has to come up
    run = Running(renter, renter.job(AT_WORK, outputs=["out.txt"]), "--up", "--down")
    run.until("at-work")
    begun = records(renter)[0]["begun"]
    limited(renter, "kept\n", run, "max_hours 0.007")
    one = next(iter(renter.server.instances.values()))
    assert 25 < one.destroyed_at - begun < 60               # by whoever was faster, once the outputs were home
    renter.ended()


def test_a_limit_that_passes_during_setup_ends_that(renter):
    run = Running(renter, renter.job("true", setup="echo at-work; sleep 120"), "--up", "--down")
    run.until("at-work")
    older(renter, 2.1)
    assert run.end() == 124, run.err
    renter.ended()


def test_a_limit_that_passes_before_the_machine_is_up_ends_it(renter):
    renter.cluster(limits={"max_hours": 0.0005})
    renter.server.script(steps=((0.1, "st_loading"), (600.0, "st_running")))
    done = renter.gpurun(renter.job("true"), "--up", "--down")
    assert done.returncode in (124, 125) and "max_hours 0.0005" in done.stderr.decode(), done.stderr.decode()
    renter.ended()


def test_a_limit_ends_what_is_kept_after_a_failure(renter):
    run = Running(renter, renter.job("exit 3"), "--up", "--down", "--keep-on-failure", "30m")
    run.until("ssh -i")
    older(renter, 2.1)
    assert run.end() == 3, run.err
    renter.ended()


def test_a_run_that_is_over_in_time_is_not_called_limited(renter):
    renter.cluster(limits={"max_hours": 1, "max_cost": 5})
    done = renter.gpurun(renter.job("exit 4"), "--up", "--down")
    assert done.returncode == 4, done.stderr.decode()
    renter.ended()


# ---- refused before anything is rented ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keys", [dict(limits={"max_cost": 0.01}), dict(limits={"max_hours": 0}), dict(limits={"max_cost": -1}),
                                  dict(limits={"idle_minutes": 0}), dict(bid=0.9), dict(selection={"max_price_per_hour": 0.1})], ids=str)
def test_a_limit_or_price_that_can_not_hold_rents_nothing(renter, keys):
    renter.cluster(**keys)
    for command in ([renter.job("true"), "--up", "--down"], ["up", "--yes"]):
        done = renter.gpurun(*command)
        assert done.returncode in (2, 125) and done.stderr.count(b"error") == 1, done.stderr.decode()
    assert renter.server.calls("create") == []
    renter.ended()


def test_a_machine_that_turns_out_dearer_than_the_cap_is_not_used(renter):
    renter.server.offers[:] = [offer(machine_id=11, dph_base=0.2), offer(machine_id=12)]
    renter.server.script(11, row={"dph_total": 4.0})
    done = renter.gpurun(renter.job("true"), "--up", "--down")
    assert done.returncode == 0, done.stderr.decode()
    assert [one.offer["machine_id"] for one in renter.server.instances.values()] == [11, 12]
    assert "$4.00" in done.stderr.decode()
    renter.ended()


# ---- what it costs ------------------------------------------------------------------------------------------------------------------

def test_what_a_run_has_cost_counts_from_the_request_and_is_in_record_status_and_summary(renter):
    renter.server.offers[:] = [offer(dph_base=90.0)]
    renter.cluster(selection={})
    renter.server.script(steps=((0.0, "st_loading"), (1.0, "st_running")))
    done = renter.gpurun(renter.job("sleep 1"), "--up", "--down", "--yes")
    assert done.returncode == 0, done.stderr.decode()
    one = next(iter(renter.server.instances.values()))
    whole = 90.0 * (one.destroyed_at - one.created_at) / HOUR_S
    cost = renter.record()["cost"]
    assert 0.98 * whole <= cost < 2 * whole + 0.05 and cost >= renter.server.spent() * 0.98
    assert dollars(cost) in done.stderr.decode().splitlines()[-1]
    assert "cost" in renter.gpurun("status", "latest").stdout.decode()
    assert json.loads(renter.gpurun("status", "latest", "--json").stdout.decode().splitlines()[-1])["cost"] == cost
    assert eventually(lambda: not renter.records)
    renter.ended()


def test_nodes_tells_price_spent_run_and_limit(renter):
    renter.cluster(limits={"max_hours": 2, "max_cost": 1})
    assert renter.gpurun("up").returncode == 0
    older(renter, 1.0)
    assert renter.gpurun("submit", renter.job("sleep 120")).returncode == 0
    shown = renter.gpurun("nodes").stdout.decode()
    assert "$0.363" in shown and "max_hours" in shown and "job-" in shown, shown
    told = json.loads(renter.gpurun("nodes", "--json").stdout)
    assert 0.36 < told["cost"] < 0.37 and 3500 < told["ends_in_s"] < 3600 and told["run"] == renter.record()["run_id"]
    assert renter.gpurun("down", "--yes").returncode == 0
    renter.ended()
