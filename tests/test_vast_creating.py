"""Asking for a machine: whatever the provider answers, or doesn't, there is never more than was asked for and nothing is asked for twice.

The numbers in comments are those of a list of failures seen in public with Vast.ai (of creating: 1 to 17) and, as S94 and so on, of one with tools
of this kind. 9 to 12, 16 and 17 are in test_vast_asking.py. Not tested: 13, the SDK's own contract (all of this runs the real one, and
test_vast_api.py holds what is sent); 15, a registry's password (a cluster file has no key for one: images are public).
"""

from __future__ import annotations

import json
import signal
import threading

import pytest

from renter import Renter, paper, renter   # noqa: F401 (fixtures)
from running import Running
from vast_rows import offer

GONE = ("gone_404", "gone_410", "gone_400")


def up_and_down(renter, *args, **options):
    """`gpurun up` and `down`, for one machine; what `up` said."""
    code, err = renter.said("up", *args, **options)
    assert code == 0, err
    assert len(renter.server.alive()) == 1
    code, rest = renter.said("down")
    assert code == 0, rest
    renter.ended()
    assert renter.server.most_alive == 1
    return err


def up_to_loading(paper, requests, most=1, *args):
    """`gpurun up` until the machine loads its image and so many requests for one were made, then Ctrl-C; what it said."""
    paper.server.script(steps=((0.0, "st_loading"),))
    up = Running(paper, "up", *args)
    paper.server.wait_for(lambda server: len(server.calls("create")) == requests and any(one.state == "st_loading" for one in server.alive()))
    up.until("loading (8f3a1c22be01: Pull complete)")
    assert up.signal(signal.SIGINT).end() == 130, up.err
    paper.ended()
    assert len(paper.asked) == requests and paper.server.most_alive == most
    return up.err


def taken_meanwhile(server, times):
    """Somebody else is faster, so many times: an offer that is asked for has gone."""
    count = 0

    def hook(request):
        nonlocal count
        if request.endpoint == "create" and count < times:
            count += 1
            server.offers[:] = [one for one in server.offers if one["id"] != request.ids[0]]
    server.hook = hook


# ---- answers that say nothing, or both -------------------------------------------------------------------------------------------------

def test_a_machine_whose_answer_got_lost_is_found_by_its_label_and_used(renter):   # 1, S95
    renter.server.fault("create", "lost_answer")
    err = up_and_down(renter)
    assert len(renter.asked) == 1 and "nobody can tell whether" in err and "its list of machines will tell" in err


@pytest.mark.parametrize("kind", ["lost_answer", "html200", "empty200", "truncated", "500"])   # 1, S95, S97
def test_a_machine_whose_answer_makes_no_sense_is_found_by_its_label_and_none_beside_it_is_rented(paper, kind):
    paper.server.fault("create", kind, effect=True)
    assert "nobody can tell whether" in up_to_loading(paper, 1)


def test_a_machine_whose_answer_never_comes_is_found_by_its_label(paper):   # 1, S95
    paper.server.fault("create", "stall")
    paper.env["GPURUN_TEST_PACE"] = "timeout_s=1"
    up_to_loading(paper, 1)


@pytest.mark.parametrize("kind", ["dropped", "500", "502", "504", "success_false"])   # 1
def test_a_request_that_may_have_been_heard_is_looked_for_first_and_then_another_offer_is_asked_for(paper, kind):
    paper.server.fault("create", kind)
    begun = []

    def hook(request):
        if request.endpoint == "create":
            begun.append(json.loads(paper.records[0].read_text())["begun"])
    paper.server.hook = hook
    err = up_to_loading(paper, 2)
    first, second = paper.server.calls("create")
    assert first.ids != second.ids and second.time - begun[0] >= 1.5   # as long as a new machine may be missing from a list
    assert "nobody can tell whether" in err and "it was never made" in err


def test_a_machine_whose_answer_got_lost_and_that_shows_late_is_not_given_up(paper):   # 1, 5
    paper.server.fault("create", "lost_answer")
    paper.server.script(visible_after=1.0, steps=((0.0, "st_loading"),))
    up = Running(paper, "up", pace="settle_s=20")
    up.until("loading (")
    assert up.signal(signal.SIGINT).end() == 130 and len(paper.asked) == 1 and paper.server.most_alive == 1
    paper.ended()


def test_answers_that_get_lost_again_and_again_are_not_waited_for_for_ever(paper):   # 1
    paper.server.fault("create", "dropped", times=99)
    code, err = paper.said("up", pace="settle_s=0.3")
    assert code == 125 and len(paper.asked) == 4 and err.count("a machine never came") == 4, err
    paper.ended()


def test_a_refusal_that_left_a_machine_behind_ends_that_one_and_asks_for_another(paper):   # 2
    paper.server.fault("create", "error_with_contract")
    err = up_to_loading(paper, 2)
    first, second = paper.server.instances.values()
    assert first.destroyed_by == "right" and f"it is machine {first.id}" in err and second.offer["id"] != first.offer["id"]


def test_what_a_refusal_left_behind_is_found_by_the_next_gpurun_when_this_one_is_killed(paper):   # 2, 47
    paper.server.fault("create", "error_with_contract")
    paper.server.fault("destroy", "hang")
    up = Running(paper, "up")
    paper.server.wait_for(lambda server: server.calls("destroy"))
    up.process.kill()
    up.process.wait()
    first, = paper.server.alive()
    code, err = paper.said("down")
    assert code == 0 and f"machine {first.id} was to be ended and isn't known to be gone" in err, err
    paper.ended()


def test_a_gpu_that_is_taken_at_the_last_moment_leaves_no_stopped_machine_behind(paper):   # 3
    for number in (1, 2, 3):
        paper.server.script(number, unavailable=True)
    paper.server.script(4, steps=((0.0, "st_loading"),))
    up = Running(paper, "up")
    up.until("loading (")
    assert up.signal(signal.SIGINT).end() == 130
    assert all(one["cancel_unavail"] is True for one in paper.asked) and [one.offer["machine_id"] for one in paper.server.instances.values()] == [4]
    paper.ended()


def test_a_machine_that_was_promised_and_never_comes_is_given_up_and_another_one_used(renter):   # 4
    renter.server.fault("create", "success_never_appears")
    err = up_and_down(renter)
    assert len(renter.asked) == 2 and "was promised and never came" in err


def test_a_new_machine_that_the_list_does_not_show_at_once_is_waited_for(renter):   # 5
    renter.server.script(visible_after=1.0)
    up_and_down(renter, pace="settle_s=20")
    assert len(renter.asked) == 1


def test_too_many_requests_is_a_wait_and_nothing_else(paper):   # 49
    paper.server.rates = 0.1
    paper.server.fault("create", "429")
    up_to_loading(paper, 2)


@pytest.mark.parametrize("kind", ["429_text", "429_detail", "429_full"])   # 49
def test_the_only_offer_is_asked_for_again_after_too_many_requests(paper, kind):
    del paper.server.offers[1:]
    paper.server.fault("create", kind)
    up_to_loading(paper, 2)
    first, second = paper.server.calls("create")
    assert first.ids == second.ids


# ---- offers that are gone --------------------------------------------------------------------------------------------------------------

def test_offers_that_others_took_meanwhile_are_passed_over_until_one_is_had(renter):   # 6, S103
    taken_meanwhile(renter.server, 3)
    err = up_and_down(renter)
    assert len({one.ids for one in renter.server.calls("create")}) == 4 and err.count("is gone") == 3 and "trying the next offer" in err


@pytest.mark.parametrize("dress", GONE)   # 6, S103
def test_when_all_offers_are_taken_meanwhile_a_user_reads_that_there_is_none_left(paper, dress):
    paper.server.gone = dress
    taken_meanwhile(paper.server, 99)
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 4 and len({one.ids for one in paper.server.calls("create")}) == 4
    assert "no free offer for 1 × RTX 4090" in err and "try again later" in err
    paper.ended()


def test_offers_that_are_listed_anew_as_fast_as_they_go_are_not_asked_for_for_ever(paper):   # 6, 27
    def hook(request):
        if request.endpoint == "create":
            paper.server.offers[:] = [offer(machine_id=number) for number in range(1, 5)]
    paper.server.hook = hook
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 20 and "20 offers in a row were gone" in err and "try again later" in err
    paper.ended()


def test_a_machine_that_costs_more_than_the_cap_though_its_offer_did_not_is_ended(paper):   # S136
    paper.server.script(row={"dph_total": 9.9})
    code, err = paper.said("up")
    assert code == 125 and err.count("costs $9.90 an hour, more than its offer said and more than max_price_per_hour 0.5") >= 4, err
    assert "Before that:" in err and paper.server.most_alive == 1
    paper.ended()


# ---- bids ------------------------------------------------------------------------------------------------------------------------------

def test_a_bid_below_what_any_host_takes_rents_nothing_and_names_the_lowest(paper):   # 7
    paper.cluster(bid=0.1)
    code, err = paper.said("up", "--yes")
    assert code == 125 and paper.asked == [] and "take only bids above bid (the lowest 0.180)" in err and "Relaxing bid alone would bring 4" in err
    paper.ended()


def test_a_floor_that_rose_meanwhile_is_one_offer_that_is_gone_and_then_the_search_says_it(paper):   # 7
    paper.cluster(bid=0.2)

    def hook(request):
        if request.endpoint == "create":
            for one in paper.server.offers:
                one["min_bid"] = 0.3
    paper.server.hook = hook
    code, err = paper.said("up", "--yes")
    assert code == 125 and 1 <= len(paper.asked) <= 4 and "the lowest 0.300" in err
    paper.ended()


def test_an_interruptible_machine_is_asked_for_with_its_price(renter):   # 8
    renter.cluster(bid=0.2)
    assert "(interruptible)" in up_and_down(renter) and [one["price"] for one in renter.asked] == [0.2]


def test_a_machine_on_demand_is_asked_for_without_a_price(paper):   # 8
    up_to_loading(paper, 1)
    assert [one["price"] for one in paper.asked] == [None]


@pytest.mark.parametrize("bid, given, word", [(0.2, False, "on demand"), (None, True, "interruptible")])   # 8
def test_a_machine_of_the_other_kind_than_asked_for_is_ended(paper, bid, given, word):
    paper.cluster(bid=bid)
    paper.server.script(row={"is_bid": given})
    code, err = paper.said("up", "--yes")
    assert code == 125 and f"is {word}, which isn't what was asked for" in err
    assert 1 <= len(paper.asked) <= 5 and paper.server.most_alive == 1
    paper.ended()


# ---- what is asked for -----------------------------------------------------------------------------------------------------------------

def test_the_port_for_the_link_is_published_and_is_the_one_that_the_agent_has(renter):   # 14
    code, err = renter.said("up")
    one, = renter.server.alive()
    assert code == 0 and renter.asked[0]["env"] == {"-p 70001:70001/udp": "1"} and "args" not in renter.asked[0], err
    endpoint, = (json.loads(path.read_text()) for path in (renter.home / ".config/gpurun/nodes").glob("*.json"))
    assert f"127.0.0.1:{one.udp[70001, 'udp']}" in endpoint["addresses"]
    assert renter.said("down")[0] == 0
    renter.ended()


def test_a_machine_is_asked_for_with_both_ways_in_its_disk_its_image_and_a_label_of_its_operators(paper):   # 3, 48, S106
    paper.cluster(disk_gb=100)
    up_to_loading(paper, 1)
    body, = paper.asked
    assert (body["runtype"], body["disk"], body["image"].partition(":")[0]) == ("ssh_direc ssh_proxy", 100, "vastai/base-image")
    mark, scope, index, nonce = body["label"].removeprefix("gpurun-").split("-")
    assert (len(mark), len(scope), index, len(nonce)) == (8, 8, "1", 6) and len(body["onstart"].encode()) < 4000
    order = [one.endpoint for one in paper.server.requests]
    assert order.index("ssh_create") < order.index("create")   # a container gets the account's keys when it is made


# ---- several at once -------------------------------------------------------------------------------------------------------------------

def test_two_gpurun_at_once_for_one_cluster_rent_one_machine_together(renter):   # S94
    done = [Running(renter, "up") for _ in range(2)]
    assert [one.end() for one in done] == [0, 0], [one.err for one in done]
    assert renter.server.most_alive == 1 and len(renter.asked) == 1
    assert renter.said("down")[0] == 0
    renter.ended()


def test_two_operators_who_want_the_same_offer_get_one_each(renter, tmp_path):   # S94
    other = Renter(tmp_path / "other", renter.server)
    del renter.server.offers[2:]
    both = threading.Barrier(2)

    def hook(request):
        if request.endpoint == "search" and both.n_waiting < 2 and not both.broken:
            try:
                both.wait(5)                  # each sees both offers
            except threading.BrokenBarrierError:
                pass
    renter.server.hook = hook
    done = [Running(one, "up") for one in (renter, other)]
    assert [one.end() for one in done] == [0, 0], [one.err for one in done]
    assert renter.server.most_alive == 2 and len(renter.server.alive()) == 2
    assert len({one.label.split("-")[1] for one in renter.server.alive()}) == 2
    assert renter.said("down", "--all")[0] == 0 and len(renter.server.alive()) == 1   # the other operator's stays
    assert other.said("down")[0] == 0
    renter.ended()
    assert other.records == []


# ---- Ctrl-C while it is asked for ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("endpoint", ["user", "search", "ssh_list", "ssh_create", "list"])   # S104, S125
def test_ctrl_c_before_anything_is_rented_rents_nothing(paper, endpoint):
    paper.server.fault(endpoint, "stall", seconds=3.0)
    up = Running(paper, "up")
    paper.server.wait_for(lambda server: server.calls(endpoint))
    assert up.signal(signal.SIGINT).end() == 130, up.err
    assert len(paper.server.instances) <= 1   # a request that was on its way already
    paper.ended()


@pytest.mark.parametrize("kind", ["stall", "hang", "trickle"])   # S104, S125: with an effect, without one, and answered late
def test_ctrl_c_while_a_machine_is_asked_for_leaves_none(paper, kind):
    paper.server.fault("create", kind, seconds=2.0)
    up = Running(paper, "up")
    paper.server.wait_for(lambda server: server.calls("create"))
    assert up.signal(signal.SIGINT).end() == 130, up.err
    paper.ended()
    assert len(paper.asked) == 1 and len(paper.server.instances) == (kind != "hang")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])   # S104
def test_an_up_that_is_terminated_while_it_asks_for_a_machine_leaves_none(paper, number):
    paper.server.fault("create", "trickle", seconds=1.0)
    up = Running(paper, "up")
    paper.server.wait_for(lambda server: server.calls("create"))
    assert up.signal(number).end() == 130, up.err
    paper.ended()


def test_several_machines_that_are_asked_for_at_once_all_go_with_ctrl_c(paper):   # S104, S128
    paper.server.fault("create", "trickle", times=4, seconds=1.0)
    up = Running(paper, "up", "--nodes", "4")
    paper.server.wait_for(lambda server: len(server.calls("create")) == 4)
    assert up.signal(signal.SIGINT).end() == 130, up.err
    paper.ended()
    assert paper.server.most_alive == 4


def test_a_refusal_that_comes_while_machines_are_being_ended_keeps_none_of_them_from_its_end(paper):   # S104, 45
    late = threading.Event()

    def hook(request):
        if request.endpoint == "create" and request is not paper.server.calls("create")[0]:
            late.wait(20)
            return "no_credit"
        if request.endpoint == "destroy":
            late.set()
    paper.server.hook = hook
    paper.server.script(steps=((0.0, "st_loading"),), gone_after=1.0)
    up = Running(paper, "up", "--nodes", "2", pace="in_flight_s=0.3")
    up.until("loading (")
    assert up.signal(signal.SIGINT).end() == 130, up.err
    paper.ended()


# ---- a gpurun that was killed ----------------------------------------------------------------------------------------------------------

def test_a_machine_whose_record_is_lost_is_shown_and_found_by_the_next_gpurun(paper):   # 47
    paper.server.script(steps=((0.0, "st_loading"),))
    up = Running(paper, "up")
    up.until("loading (")
    up.process.kill()
    up.process.wait()
    one, = paper.server.alive()
    assert paper.said("nodes")[1].startswith(f"gpurun: warning: machine {one.id} is left from a gpurun that was killed: it costs $0.363 an hour")
    paper.records[0].unlink()
    shown = paper.gpurun("nodes").stdout.decode()
    assert "no record here" in shown and str(one.id) in shown
    code, err = paper.said("down")
    assert code == 0 and f"machine {one.id} is ours and has no record here; it is ended" in err, err
    paper.ended()


def test_a_record_with_facts_of_another_kind_is_shown_and_its_machine_is_ended(paper):
    paper.server.script(steps=((0.0, "st_loading"),))
    up = Running(paper, "up")
    up.until("loading (")
    up.process.kill()
    up.process.wait()
    record = json.loads(paper.records[0].read_text())
    record["facts"].update(gpu=7, place=["x"], run=8, status={"a": 1}, price_per_hour="dear", gpus=None)
    paper.records[0].write_text(json.dumps(record))
    one, = paper.server.alive()
    shown = paper.gpurun("nodes")
    assert shown.returncode == 0 and str(one.id) in shown.stdout.decode(), shown.stderr.decode()
    code, err = paper.said("down")
    assert code == 0, err
    paper.ended()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_gpurun_killed_around_the_request_leaves_what_the_next_one_goes_on_with(renter, moment):   # 1, 47, S125
    renter.server.fault("create", "hang" if moment == "before" else "stall")
    up = Running(renter, "up")
    renter.server.wait_for(lambda server: server.calls("create") and (moment == "before" or server.alive()))
    up.process.kill()
    up.process.wait()
    assert len(renter.records) == 1
    code, err = renter.said("up")
    assert code == 0 and len(renter.asked) == (2 if moment == "before" else 1), err
    assert renter.said("down")[0] == 0
    renter.ended()
    assert renter.server.most_alive == 1
