"""Machines that can't be ended at once, that are others', or whose gpurun was killed: none is forgotten, none of others is touched."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest
from rented import AT_WORK, at_work, call, downed, go, none_goes_on, until_go, upped   # noqa: F401
from renter import Renter, renter   # noqa: F401
from running import Running
from vast_rows import offer


# ---- ends that fail -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["500", "502", "429", "success_false", "dropped", "lost_answer", "html200", "empty200", "401", "403"])
def test_an_end_that_fails_is_asked_for_again(renter, kind):
    upped(renter)
    renter.server.fault("destroy", kind, times=4)
    downed(renter)
    assert len(renter.server.calls("destroy")) > 1


@pytest.fixture
def stuck(renter):
    """A run whose machine can't be ended, for as long as the fault lasts."""
    fault = renter.server.fault("destroy", "500", times=10 ** 6)
    done = renter.gpurun(renter.job("echo kept > out.txt", outputs=["out.txt"]), "--up", "--down", pace="patience_s=1")
    return renter, fault, done


def test_what_can_not_be_ended_is_the_last_thing_that_is_said(stuck):
    renter, fault, done = stuck
    one = renter.server.alive()[0]
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 125
    assert str(one.id) in last and "$0.36" in last and "hour" in last and f"vastai destroy instance {one.id}" in last, done.stderr.decode()
    assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
    record = json.loads(renter.records[0].read_text())
    assert record["wanted"] is False
    for command in (["status"], ["--help"], ["nodes"], ["plan", "job.toml"], ["logs", "latest"]):
        first = renter.gpurun(*command).stderr.decode().splitlines()[0]
        assert str(one.id) in first and "gpurun down" in first, (command, first)
    told = json.loads(renter.gpurun("status", "--json").stdout.decode().splitlines()[0])
    assert told["type"] == "warning" and str(one.id) in told["text"]
    fault.times = 0
    assert renter.gpurun("down").returncode == 0
    renter.ended()
    assert str(one.id) not in renter.gpurun("status").stderr.decode()


def test_what_could_not_be_ended_is_not_used_again(stuck):
    renter, fault, _ = stuck
    old = renter.server.alive()[0]
    fault.times = 0
    assert renter.gpurun(renter.job("true"), "--up", "--down").returncode == 0
    assert downed(renter)
    assert len(renter.server.instances) == 2 and old.destroyed is not None


@pytest.mark.parametrize("kind", ["500", "401", "hang"])
def test_without_a_list_nothing_is_called_ended(renter, kind):
    one = upped(renter)[0]
    renter.server.fault("list show destroy", kind, times=10 ** 6)
    done = renter.gpurun("down", pace="patience_s=1 timeout_s=1 asking=0.01")
    said = done.stderr.decode()
    assert done.returncode == 125 and "is gone" not in said and "nothing of it is left" not in said, said
    assert f"vastai destroy instance {one.id}" in said.splitlines()[-1], said
    renter.server._faults.clear()
    downed(renter)


def test_an_end_that_was_taken_counts_only_once_a_list_is_without_it(renter):
    one = upped(renter)[0]
    fault = renter.server.fault("list", "500", times=10 ** 6)
    done = renter.gpurun("down", pace="patience_s=1 asking=0.01")
    assert done.returncode == 125 and not one.alive and str(one.id) in done.stderr.decode().splitlines()[-1], done.stderr.decode()
    fault.times = 0
    downed(renter)


def test_a_machine_that_is_shown_for_a_while_after_its_end_is_waited_for(renter):
    renter.server.script(gone_after=1.0)
    one = upped(renter)[0]
    downed(renter)
    assert time.time() - one.destroyed_at >= 1.0


def test_a_machine_that_comes_back_is_ended_again(renter):
    renter.server.script(comes_back_after=0.3)
    upped(renter)
    downed(renter)
    assert len(renter.server.calls("destroy")) > 1
    assert all(one.body != {"state": "stopped"} for one in renter.server.calls("state"))


def test_the_wait_for_one_that_comes_back_covers_five_seconds():
    from gpurun import provider_vastai
    assert provider_vastai.TIMES["confirm_s"] > 5


@pytest.mark.parametrize("refusal", ["401", "403", "401_2fa"])
def test_a_key_that_was_revoked_before_the_end_leaves_the_command_to_end_it(renter, refusal):
    run = at_work(renter, pace="patience_s=1", run=f"echo kept > out.txt; echo at-work; {until_go(renter)}")
    one = renter.server.alive()[0]
    renter.server.fault("any", refusal, times=10 ** 6)
    go(renter)
    code = run.end()
    assert code == 125 and f"vastai destroy instance {one.id}" in run.said[-1] and "key" in run.said[-1], run.err
    assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
    renter.server._faults.clear()
    assert renter.gpurun("down").returncode == 0
    renter.ended()


def test_without_any_key_a_machine_that_is_left_is_still_told_of(renter):
    one = upped(renter)[0]
    key = renter.env.pop("VAST_API_KEY")
    done = renter.gpurun("down")
    assert done.returncode in (2, 125) and "VAST_API_KEY" in done.stderr.decode()
    renter.env["VAST_API_KEY"] = key
    assert one.alive
    downed(renter)


def test_limits_of_the_service_are_kept_by_waiting(renter):
    renter.server.rates = 0.5
    assert len(upped(renter, "--nodes", "3", pace="look_s=0.6 ending_s=0.6 create_s=2.5 failed_s=1 settle_s=5 patience_s=30")) == 3
    downed(renter)
    assert any(one.status == 429 for one in renter.server.requests)


# ---- whose machines -----------------------------------------------------------------------------------------------------------------

def others(renter: Renter) -> list:
    """Machines on the account that are none of this cluster's."""
    labels = ["training", None, "gpurun-0badcafe-0badcafe-1-abcdef", "gpurun-", "Gpurun", "gpurun-1"]
    for label in labels:
        made = offer(machine_id=900)
        renter.server.offers.append(made)
        call(renter, "PUT", f"/api/v0/asks/{made['id']}/", client_id="me", image="a/b:c", disk=64, label=label, env={})
    return renter.server.alive()


def test_machines_of_others_are_never_touched(renter):
    theirs = others(renter)
    for way in ([], ["--all"]):
        upped(renter)
        assert renter.gpurun("down", *way).returncode == 0
        assert renter.server.alive() == theirs
    run = renter.gpurun(renter.job("true"), "--up", "--down")
    assert run.returncode == 0 and renter.server.alive() == theirs and renter.records == []
    assert {one.ids[0] for one in renter.server.calls("destroy")}.isdisjoint({one.id for one in theirs})


def test_down_ends_this_cluster_and_down_all_every_one_of_this_operator(renter):
    upped(renter)
    other = renter.work / "other.toml"
    other.write_text(renter.cluster().read_text())
    assert renter.gpurun("up", "--cluster", other).returncode == 0
    assert len(renter.server.alive()) == 2
    assert renter.gpurun("down", "--cluster", other).returncode == 0
    assert len(renter.server.alive()) == 1
    assert renter.gpurun("up", "--cluster", other).returncode == 0
    downed(renter, "--all")


def test_a_machine_whose_label_was_changed_by_hand_is_still_ended(renter):
    one = upped(renter)[0]
    one.label = "mine now"
    done = renter.gpurun("down")
    assert done.returncode == 0, done.stderr.decode()
    assert renter.server.alive() == [] and renter.records == []


@pytest.mark.parametrize("row", [{"start_date": None}, {"extra_env": None}, {"uptime_mins": None}, {"machine_id": None, "dph_total": None}])
def test_rows_with_holes_lose_no_machine(renter, row):
    renter.server.script(row=row)
    upped(renter)
    downed(renter)


# ---- gpurun killed at a request -----------------------------------------------------------------------------------------------------

def killed(renter: Renter, endpoint: str, effect: bool = True, nth: int = 1, args: tuple = ("--up", "--down"), run: str = AT_WORK) -> Running:
    """A gpurun that is killed -9 when its nth request of this kind (since it asked for the machine) has come, before it is answered."""
    running = Running(renter, renter.job(run, outputs=["out.txt"]), *args) if args[0] != "up" else Running(renter, *args)
    count, last, struck = 0, [], threading.Event()

    def hook(request):
        nonlocal count
        count += request.endpoint == endpoint and bool(renter.server.calls("create"))
        if request.endpoint == endpoint and count == nth and not last:
            last.append(request)
            struck.set()
            running.process.kill()
            running.process.wait()
            return None if effect else (500, "")
        if endpoint == "list" and request.endpoint == "ssh_attach":
            struck.wait(60)                  # or it is up before there were so many lists
        return None

    renter.server.hook = hook
    running.process.wait(60)
    assert running.process.returncode == -signal.SIGKILL, running.err
    renter.server.wait_for(lambda server: last[0].status)     # what it does, it has done
    renter.server.hook = None
    return running


PLACES = [("create", True, 1), ("create", False, 1), ("list", True, 1), ("ssh_attach", True, 1), ("list", True, 2), ("list", True, 4),
          ("destroy", False, 1), ("destroy", True, 1)]


@pytest.mark.parametrize("endpoint, effect, nth", PLACES)
def test_what_a_killed_run_leaves_is_told_and_ended_by_down(renter, endpoint, effect, nth):
    killed(renter, endpoint, effect, nth, run="true")
    left = renter.server.alive()
    assert len(left) == (0 if (endpoint, effect) in (("create", False), ("destroy", True)) else 1)
    told = renter.gpurun("status").stderr.decode()
    assert "gpurun down" in told.splitlines()[0], told
    shown = renter.gpurun("nodes").stdout.decode()
    assert all(str(one.id) in shown for one in left), shown
    downed(renter)


@pytest.mark.parametrize("endpoint, effect, nth", PLACES[:6])
def test_what_a_killed_up_leaves_is_used_by_the_next_up(renter, endpoint, effect, nth):
    killed(renter, endpoint, effect, nth, args=("up",))
    done = renter.gpurun("up")
    assert done.returncode == 0, done.stderr.decode()
    assert len(renter.server.alive()) == 1 and renter.server.most_alive == 1
    downed(renter)


def test_a_machine_whose_record_was_lost_is_found_by_its_label(renter):
    upped(renter)
    renter.records[0].unlink()
    assert str(renter.server.alive()[0].id) in renter.gpurun("nodes").stdout.decode()
    downed(renter)


def test_down_that_was_killed_is_finished_by_the_next_one(renter):
    upped(renter)
    running = Running(renter, "down")
    renter.server.hook = lambda request: running.process.kill() if request.endpoint == "destroy" else None
    running.process.wait(60)
    renter.server.hook = None
    downed(renter)


def test_a_run_whose_gpurun_was_killed_is_attached_to_and_its_machine_goes_then(renter):
    run = at_work(renter, run=f"echo at-work; {until_go(renter)}; echo kept > out.txt")
    run.signal(signal.SIGKILL)
    run.process.wait()
    go(renter)
    done = renter.gpurun("attach", "latest")
    assert done.returncode == 0, done.stderr.decode()
    assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
    renter.ended()
