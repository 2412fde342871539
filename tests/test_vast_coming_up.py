"""A machine between its request and its readiness: one that won't come is left for the next offer soon, a slow one is waited for, and its host is
avoided in this command and the next where it is the host's fault.

The numbers in comments are those of the list that test_vast_creating.py tells of, here 18 to 30, and S100, S101, S103, S109, S116. Tests beside
these: 29's drivers and GPUs in test_vast_asking.py (which offers do) and test_preflight.py (what the GPU itself says); every way in over SSH in
test_vast_ssh.py; S107, sshd that comes late, there too; S115, a GPU that is listed and can't be used, in test_preflight.py; S118 and S119, what
the agent needs of a node (it comes over SSH, not from the internet), in test_bootstrap.py. Not our design: a shorter deadline for a machine of
which nothing at all is said (22); there is one for all, ready_within_s.
"""

from __future__ import annotations

import signal

import pytest

from renter import paper, renter   # noqa: F401 (fixtures)
from running import Running
from vast_machine import Quirks
from vast_rows import offer

FRESH = True
LOADING = (0.0, "st_loading")
BAD = [   # state, what is said of it, whether its host is avoided
    ("st_oci_failed", "its host can't start the image: Error response from daemon: failed to create task for container: OCI runtime", True),   # 18
    ("st_pull_eof", "its host can't start the image: failed to copy: httpReadSeeker: unexpected EOF while reading layer", True),   # 19
    ("st_pull_limit", "its host can't start the image: toomanyrequests", True),   # 19
    ("st_outbid", "it was stopped though it is to run: the account's credit is used up, or its host took it back", False),   # 23
    ("st_all_stopped", "it was stopped", False),   # 23
    ("st_scheduling", "its GPU isn't free, it waits in a queue", True),   # 24, 27, S101
    ("st_cdi_failed", "its host can't start the image: Error response from daemon: CDI device injection failed", True),   # 28
    ("st_exited", "its container has ended: container exited", True),   # S101
    ("st_offline", "its host is offline: host offline", True),   # S101
    ("st_unknown", "its host hasn't been heard of for a while", True),   # S101
    ("st_frozen", "it was frozen", False),   # S101
    ("st_destroying", "it is being destroyed", False),   # S109
]


def avoided(paper):
    from gpurun.machines import Store
    return set(Store(str(paper.home / ".config/gpurun/machines")).avoided())


def scripts(server, first, **others):
    """What the first machine does that is rented, whichever it is, and what all others do."""
    made = []

    def hook(request):
        if request.endpoint == "create" and not made:
            made.append(True)
            server.script(request.ids[0], **first)
    server.script(**others)
    server.hook = hook


def until_another_loads(paper, *args):
    """`gpurun up` until a second machine loads its image, then Ctrl-C; the first machine and what was said."""
    up = Running(paper, "up", *args)
    paper.server.wait_for(lambda server: len(server.instances) == 2 and any(one.state == "st_loading" for one in server.alive()))
    first, second = paper.server.instances.values()
    assert up.signal(signal.SIGINT).end() == 130, up.err
    assert paper.server.most_alive == 1 and not first.alive and first.destroyed_by == "right"
    assert second.offer["machine_id"] != first.offer["machine_id"]
    paper.ended()
    return first, up.err


def vanish(server, one):
    """Somebody else ends it, by hand."""
    with server.changed:
        one.bill(server.now())
        one.destroyed, one.destroyed_at, one.destroyed_by, one.plan, one.want = server.now(), 1.0, "by hand", [], "gone"
        server.changed.notify_all()
    server._fit(one)


# ---- one that won't come ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("state, words, host", BAD, ids=[state for state, _, _ in BAD])   # 18, 19, 23, 24, 27, 28, S101
def test_a_machine_that_will_never_run_is_ended_at_once_and_another_one_rented(paper, state, words, host):
    scripts(paper.server, {"steps": ((0.0, state),)}, steps=(LOADING,))
    first, err = until_another_loads(paper)
    assert f"machine {first.id} is of no use: {words}" in err, err
    assert first.destroyed - first.created < 20
    assert avoided(paper) == ({str(first.offer["machine_id"])} if host else set())


@pytest.mark.parametrize("state", ["st_created", "st_loading"])   # 18, 19: after it had looked well for a while
def test_a_machine_that_fails_after_it_had_begun_to_load_is_ended_and_another_one_rented(paper, state):
    scripts(paper.server, {"steps": ((0.0, state), (0.5, "st_pull_eof"))}, steps=((0.0, "st_created"), LOADING))
    first, err = until_another_loads(paper)
    assert f"machine {first.id} is of no use: its host can't start the image" in err


@pytest.mark.parametrize("steps", [pytest.param((), id="nothing is said of it"), pytest.param((LOADING,), id="loading"),   # 21, 22, S100
                                   pytest.param(((0.0, "st_created"),), id="created"),
                                   pytest.param(((0.0, {"actual_status": "connecting"}),), id="connecting")])
def test_a_machine_that_is_not_ready_in_time_is_ended_and_another_one_rented(paper, steps):
    paper.cluster(ready_within_s=3)
    scripts(paper.server, {"steps": steps}, steps=(LOADING,))
    first, err = until_another_loads(paper)
    assert f"machine {first.id} is of no use: it wasn't ready within 3 s" in err and 1 < first.destroyed - first.created < 20
    assert avoided(paper) == {str(first.offer["machine_id"])}


@pytest.mark.parametrize("state, words", [   # 17, image
    ("st_image_missing", "the image can't be had: check its name and tag, and that it is public: Error response from daemon: manifest unknown"),
    ("st_no_space", "its disk is full: the image and the data need a larger disk_gb: failed to register layer: no space left on device")])
def test_an_image_that_cannot_be_had_or_is_too_large_is_tried_on_a_second_host_and_then_no_more(paper, state, words):
    paper.server.script(steps=((0.0, state),))
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 2 and f"on two hosts: {words}" in err
    assert ("Correct `disk_gb` in" if state == "st_no_space" else "Correct `image` in") in err
    assert avoided(paper) == set() and paper.server.most_alive == 1   # it wasn't the hosts' fault
    paper.ended()


def test_the_image_of_a_host_that_could_not_get_it_comes_from_another_one(paper):   # 19: the first was at its registry's limit, say
    scripts(paper.server, {"steps": ((0.0, "st_image_missing"),)}, steps=(LOADING,))
    first, err = until_another_loads(paper)
    assert "the image can't be had" in err and avoided(paper) == set()


# ---- one that is slow ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("steps", [   # 20, S101
    pytest.param(((0.0, "st_created"), LOADING, (3.0, "st_running")), id="the same word for long"),
    pytest.param(((1.0, {"actual_status": "connecting"}), (1.0, "st_running")), id="a word that nobody knows"),
    pytest.param(((0.0, "st_rebooting"), (1.0, "st_running")), id="rebooting"),
    pytest.param(((0.0, "st_running_no_ports"), (1.0, "st_running")), id="ports come late")])
def test_a_machine_that_is_only_slow_is_waited_for(renter, steps):
    renter.server.script(steps=steps)
    code, err = renter.said("up")
    assert code == 0 and len(renter.asked) == 1 and avoided(renter) == set(), err
    assert renter.said("down")[0] == 0
    renter.ended()


def test_what_a_machine_is_at_is_told_once_for_each_change(paper):   # 20, S101
    paper.server.script(steps=())
    up = Running(paper, "up", pace="tell_s=600")
    up.until("being provisioned")
    one, = paper.server.instances.values()
    for state, words in (("st_created", "created"), ("st_loading", "loading (8f3a1c22be01: Pull complete)")):
        paper.server.step(one, state)
        up.until(words)
    assert up.signal(signal.SIGINT).end() == 130
    told = [line.partition("node1: ")[2].strip().partition(" (")[0] for line in up.said if "node1: " in line]
    assert told == [f"rented machine {one.id}: 1 × RTX 4090 in Sweden, SE, $0.363/h", "being provisioned", "created", "loading",
                    f"ending machine {one.id}", f"machine {one.id} is gone"]
    assert f"machine {one.id} is gone (stopped by the operator); it has cost about $0.0" in up.err
    paper.ended()


# ---- hosts that failed -----------------------------------------------------------------------------------------------------------------

def test_three_offers_that_fail_and_a_fourth_that_works(renter):   # S103
    states = ["st_oci_failed", "st_pull_eof", "st_exited"]

    def hook(request):
        if request.endpoint == "create" and states:
            renter.server.script(request.ids[0], steps=((0.0, states.pop()),))
    renter.server.hook = hook
    code, err = renter.said("up")
    one, = renter.server.alive()
    assert code == 0 and len(renter.asked) == 4 and err.count("is of no use") == 3 and renter.server.most_alive == 1, err
    assert avoided(renter) == {"1", "2", "3", "4"} - {str(one.offer["machine_id"])}
    assert renter.said("down")[0] == 0
    renter.ended()


def test_when_every_offer_fails_a_user_reads_why_each_of_them_did(paper):   # S103
    paper.server.script(steps=((0.0, "st_oci_failed"),))
    code, err = paper.said("up")
    last = err[err.index("error:"):]
    assert code == 125 and len(paper.asked) == 4 and last.count("OCI runtime create failed") == 4
    assert all(str(one) in last for one in paper.server.instances)
    assert paper.server.most_alive == 1
    paper.ended()


def test_no_more_than_five_machines_are_tried_for_one_node(paper):   # 27
    paper.server.offers += [offer(machine_id=number) for number in range(5, 12)]
    paper.server.script(steps=((0.0, "st_scheduling"),))
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 5 and "node1: 5 machines failed, so no more are tried:" in err and paper.server.most_alive == 1
    paper.ended()


def test_a_host_that_failed_and_is_listed_again_is_not_taken_again_by_this_command_or_the_next(paper):   # 25
    paper.server.relist = True
    del paper.server.offers[3:]
    paper.server.offers[0]["dph_base"] = 0.1      # by far the cheapest
    paper.server.script(1, steps=((0.0, "st_oci_failed"),))
    for number in (2, 3):
        paper.server.script(number, steps=(LOADING,))
    first, _ = until_another_loads(paper)
    assert first.offer["machine_id"] == 1 and 1 in [one["machine_id"] for one in paper.server.offers]
    up = Running(paper, "up")
    up.until("loading (")
    assert up.signal(signal.SIGINT).end() == 130
    assert [one.offer["machine_id"] for one in paper.server.instances.values()].count(1) == 1 and len(paper.server.instances) == 3
    paper.ended()
    done = paper.gpurun("offers")
    assert b"this machine has failed before" in done.stdout and b"2 of 3 offers fit" in done.stderr


def test_when_only_hosts_that_failed_are_left_a_user_reads_so(paper):   # 25
    paper.server.relist = True
    del paper.server.offers[1:]
    paper.server.script(steps=((0.0, "st_oci_failed"),))
    assert paper.said("up")[0] == 125 and len(paper.asked) == 1
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 1 and "1 have failed before" in err
    paper.ended()


@pytest.mark.parametrize("kind", ["503", "429", "dropped"])   # 45, S103
def test_the_next_machine_is_asked_for_only_once_the_failed_one_is_gone(paper, kind):
    scripts(paper.server, {"steps": ((0.0, "st_oci_failed"),), "gone_after": 0.5}, steps=(LOADING,))
    paper.server.fault("destroy", kind, times=2)
    until_another_loads(paper)
    second = paper.server.calls("create")[1]
    assert len([one for one in paper.server.calls("destroy") if one.time < second.time]) >= 3


# ---- one that is gone ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("steps, state", [((), "st_new"), (((0.0, "st_created"),), "st_created"), ((LOADING,), "st_loading"),
                                          (((0.0, "st_running"),), "st_running")])   # S109
def test_a_machine_that_vanishes_while_it_comes_up_is_missed_and_another_one_rented(paper, steps, state):
    paper.server.absent = "null" if state in ("st_new", "st_loading") else "404_instance"
    scripts(paper.server, {"steps": steps}, steps=(LOADING,))
    up = Running(paper, "up")
    first = paper.server.wait_for(lambda server: next((one for one in server.instances.values() if one.state == state), None))
    up.until({"st_new": "being provisioned", "st_created": "created", "st_loading": "loading (", "st_running": "connecting over SSH"}[state])
    vanish(paper.server, first)
    paper.server.wait_for(lambda server: len(server.instances) == 2 and any(one.state == "st_loading" for one in server.alive()))
    assert up.signal(signal.SIGINT).end() == 130, up.err
    assert f"machine {first.id} is gone (it is gone, and not by us)" in up.err and paper.server.most_alive == 1
    paper.ended()


def test_machines_that_all_vanish_are_not_rented_again_for_ever(paper):   # 27, S109
    paper.server.offers += [offer(machine_id=number) for number in range(5, 12)]
    paper.server.script(steps=(LOADING,))
    up = Running(paper, "up")
    for count in range(1, 6):
        one = paper.server.wait_for(lambda server: len(server.instances) >= count and next(iter(server.alive()), None))
        listed = [call.answer["instances"] for call in paper.server.calls("list") if call.answer]
        paper.server.wait_for(lambda server: any(row["id"] == one.id for call in server.calls("list")[len(listed):] if call.answer
                                                 for row in call.answer["instances"]))
        vanish(paper.server, one)
    assert up.end() == 125 and "5 machines failed, so no more are tried" in up.err, up.err
    assert len(paper.asked) == 5
    paper.ended()


def test_a_ready_machine_that_was_destroyed_by_hand_is_replaced_by_the_next_up(renter):   # 41, S109, S130
    assert renter.said("up")[0] == 0
    vanish(renter.server, renter.server.alive()[0])
    renter.cluster(selection={})
    code, err = renter.said("up")
    assert code == 2 and "1 machine with 1 × RTX 4090 at about $0.363/h" in err and "nobody can be asked here" in err and len(renter.asked) == 1
    code, err = renter.said("up", "--yes")
    assert code == 0 and "it is gone, and not by us" in err and len(renter.server.alive()) == 1 and len(renter.asked) == 2
    assert renter.said("down")[0] == 0
    renter.ended()


# ---- one that runs and is of no use ------------------------------------------------------------------------------------------------------

def test_a_machine_whose_network_is_a_black_hole_is_left_for_the_next(renter):   # 26
    scripts(renter.server, {"machine": Quirks(direct="stall", proxy="stall")})
    code, err = renter.said("up", pace="ssh_s=1 way_s=3")
    first, second = renter.server.instances.values()
    assert code == 0 and f"machine {first.id} is of no use" in err and second.alive and not first.alive, err
    assert avoided(renter) == {str(first.offer["machine_id"])}
    assert renter.said("down")[0] == 0
    renter.ended()


def test_a_machine_that_publishes_no_address_is_left_for_the_next(renter):   # 26
    scripts(renter.server, {"row": {"ports": {}, "ssh_host": None, "ssh_port": None}})
    code, err = renter.said("up", pace="ssh_s=1")
    assert code == 0 and "its provider has published no address yet" in err and len(renter.asked) == 2, err
    assert renter.said("down")[0] == 0
    renter.ended()


def test_an_image_without_python_gets_debians(renter):   # 30, S116
    renter.server.script(machine=Quirks(python=False, apt=True))
    code, err = renter.said("up")
    one, = renter.server.alive()
    assert code == 0 and "no Python: installing Debian's with apt-get" in err and (one.machine.folder / "apt-get.log").exists(), err
    assert renter.said("down")[0] == 0
    renter.ended()


def test_an_image_without_python_and_apt_get_is_of_no_use_on_any_host(renter):   # 30, S116
    renter.server.script(machine=Quirks(python=False))
    code, err = renter.said("up")
    assert code == 125 and len(renter.asked) == 1 and "no Python" in err, err
    assert avoided(renter) == set()
    renter.ended()


# ---- several nodes -----------------------------------------------------------------------------------------------------------------------

def test_one_of_several_nodes_that_fails_is_replaced_and_the_others_stay(renter):   # S103
    scripts(renter.server, {"steps": ((0.0, "st_oci_failed"),)})
    done = renter.gpurun("up", "--nodes", "3")
    assert done.returncode == 0 and done.stdout.decode().split() == ["node1", "node2", "node3"], done.stderr.decode()
    assert len(renter.asked) == 4 and renter.server.most_alive == 3 and len(renter.server.alive()) == 3
    assert renter.said("down")[0] == 0
    renter.ended()


def test_when_one_of_several_nodes_cannot_be_had_all_that_this_command_rented_goes(paper):   # S103
    made = []

    def hook(request):
        if request.endpoint == "create":
            with paper.server.changed:        # both may come at once
                made.append(request.ids[0])
                paper.server.script(request.ids[0], steps=(LOADING,) if len(made) == 1 else ((0.0, "st_oci_failed"),))
    paper.server.hook = hook
    code, err = paper.said("up", "--nodes", "2")
    assert code == 125 and paper.server.most_alive == 2 and "ending" in err and "OCI runtime create failed" in err
    paper.ended()


def test_what_was_ready_before_stays_when_more_cannot_be_had(renter):   # S103
    assert renter.said("up")[0] == 0
    standing, = renter.server.alive()
    renter.server.script(steps=((0.0, "st_oci_failed"),))
    code, err = renter.said("up", "--nodes", "2")
    assert code == 125 and renter.server.alive() == [standing], err
    assert renter.said("down")[0] == 0
    renter.ended()


def test_fewer_nodes_than_before_are_those_that_still_stand(renter):   # S109
    assert renter.said("up", "--nodes", "2")[0] == 0
    first, second = sorted(renter.server.alive(), key=lambda one: one.label.split("-")[3])
    vanish(renter.server, first)
    code, err = renter.said("up")
    assert code == 0 and renter.server.alive() == [second] and len(renter.asked) == 2, err
    assert renter.said("down")[0] == 0
    renter.ended()
