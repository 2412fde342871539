"""Before anything is rented: what is offered, what it will cost, who is asked, and what speaks against it. Nothing is rented for input that is bad.

The numbers in comments are those of the list that test_vast_creating.py tells of, here 9 to 12, 16, 17, 43, 53 and 58, and S110 to S113, S136, S158.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import sys
import time

import pytest

from renter import TESTS, paper, renter   # noqa: F401 (fixtures)
from running import Running
from vast_http import Answer
from vast_rows import offer


def nothing_was_asked_for(paper):
    assert paper.asked == [] and paper.server.instances == {}
    paper.ended()


# ---- the account -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, words", [   # 9, 53
    ("no_credit", "insufficient_credit: Insufficient credits"), ("402_no_credit", "Add credit"), ("spend_limit", "wait if the account is new"),
    ("401", "it refuses the key from $VAST_API_KEY (HTTP"), ("401_2fa", "this account has two-factor login"), ("403", "needs the permissions")])
def test_a_refusal_that_is_about_the_account_ends_it_at_once(paper, kind, words):
    paper.server.fault("create", kind, times=99)
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 1 and words in err and paper.server.key not in err
    paper.ended()


@pytest.mark.parametrize("command, kind, words", [   # 53, S98
    (["up"], "401", "it refuses the key from $VAST_API_KEY (HTTP"), (["up"], "404_auth", "it refuses the key from $VAST_API_KEY"),
    (["up", "--yes", "--nodes", "3"], "401_2fa", "make an API key at"), (["job.toml", "--up", "--down"], "401", "it refuses the key"),
    (["job.toml", "--up", "--down", "--json"], "403", "key lacks permission user_read")])
def test_a_key_that_will_not_do_is_found_out_before_anything_is_rented(paper, command, kind, words):
    paper.job("true")
    paper.server.fault("user", kind, times=99)
    done = paper.gpurun(*command)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 125 and words in said and paper.server.key not in said
    nothing_was_asked_for(paper)


def test_a_wrong_key_is_said_by_every_command(paper):   # S98
    paper.env["VAST_API_KEY"] = "zyxw" * 15
    for command in (["up"], ["nodes"], ["down"], ["down", "--all"]):
        code, err = paper.said(*command)
        assert code == 125 and "it refuses the key from $VAST_API_KEY (HTTP" in err and "zyxw" not in err, (command, err)
    nothing_was_asked_for(paper)


def test_no_key_at_all_is_said_with_where_it_may_be(paper):
    del paper.env["VAST_API_KEY"]
    for command in (["offers"], ["up"], ["nodes"], ["down"]):
        code, err = paper.said(*command)
        assert code == 2 and "There is no key for Vast.ai: set $VAST_API_KEY" in err
    assert paper.server.requests == []


def test_a_call_that_the_service_no_longer_has_says_that_gpurun_is_too_old(paper):   # S98
    paper.server.fault("user", "410", times=99)
    code, err = paper.said("up")
    assert code == 125 and "gpurun or its SDK is too old: pip install --upgrade 'gpurun[vastai]'" in err
    nothing_was_asked_for(paper)


def test_a_list_of_machines_that_cannot_be_had_rents_nothing(paper):   # S98
    paper.server.fault("list", "410", times=99)
    code, err = paper.said("up", pace="patience_s=1")
    assert code == 125 and "nothing could be learned of the machines" in err and "pip install --upgrade" in err
    nothing_was_asked_for(paper)


@pytest.mark.parametrize("credit", [0.0, -1.0, 0.02])   # 9, 43
def test_credit_that_does_not_last_rents_nothing(paper, credit):
    paper.server.account["credit"] = credit
    code, err = paper.said("up")
    assert code == 125 and "the account's credit is $" in err and "nothing was rented" in err and "Add credit at" in err
    nothing_was_asked_for(paper)


def test_credit_that_ends_before_the_limit_is_said_before_the_question(paper):   # 43
    paper.server.account["credit"] = 0.5
    paper.server.fault("create", "no_credit", times=9)
    assert "the account's credit of $0.500 lasts for about 1 h 2" in paper.said("up")[1]
    paper.ended()


def test_an_account_that_does_not_tell_its_credit_is_no_reason_to_stop(paper):   # 43
    paper.server.hook = lambda request: Answer(200, {"id": 7001, "username": "dev"}) if request.endpoint == "user" else None
    paper.server.fault("create", "no_credit")
    code, err = paper.said("up")
    assert code == 125 and len(paper.asked) == 1 and "credit" not in err.partition("error")[0]
    paper.ended()


# ---- no offer --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keys, row, words", [   # 10, 17, 29, 58, S112, S113, S136
    pytest.param({"selection": {"max_price_per_hour": 0.1}}, {},
                 "4 offers for 1 × RTX 4090, 64 GB of disk and 2 open ports, verified, and none that fits: 4 cost more than max_price_per_hour "
                 "(the cheapest 0.363). Relaxing max_price_per_hour alone would bring 4", id="price"),
    pytest.param({"gpu": {"name": "RTX 4091"}}, {}, "a name that gpurun doesn't know; did you mean RTX 4090", id="no such GPU"),
    pytest.param({"gpu": {"name": "H100"}}, {}, "no free offer for 1 × H100 or H100 NVL or H100 PCIE or H100 SXM", id="other GPU"),
    pytest.param({"gpu": {"name": "RTX 4090", "min_vram_gb": 48}}, {}, "no free offer for 1 × RTX 4090 with 48 GB", id="memory"),
    pytest.param({"disk_gb": 4000}, {}, "4000 GB of disk", id="disk"),
    pytest.param({}, {"cuda_max_good": 12.2}, "4 have a driver for an older CUDA (min_cuda, else the image's) (the newest 12.2)", id="driver"),
    pytest.param({"image": "a/b:cuda-12.4"}, {"compute_cap": 1200}, "4 need an image for CUDA 12.8 or newer", id="Blackwell"),
    pytest.param({}, {"reliability": 0.9, "reliability2": 0.9}, "4 are below min_reliability (the best 0.900)", id="reliability"),
    pytest.param({}, {"inet_down": 20.0}, "4 are below min_down_mbps (the fastest 20)", id="slow"),
    pytest.param({}, {"verification": "unverified"}, "verified right now. Ask for less in the cluster file", id="verified"),
    pytest.param({}, {"duration": 3600.0}, "4 can't be had for as long as max_hours (the longest 1.0 h)", id="contract ends"),
    pytest.param({}, {"direct_port_count": 0}, "2 open ports", id="ports")])
def test_when_nothing_fits_a_user_reads_what_was_asked_for_and_what_excluded_how_many(paper, keys, row, words):
    paper.cluster(**keys)
    for one in paper.server.offers:
        one.update(row)
    for command in (["offers"], ["up"]):
        code, err = paper.said(*command)
        assert code == 125 and words in err, err
    nothing_was_asked_for(paper)


def test_offers_prints_what_fits_by_price_and_why_the_rest_does_not(paper):   # 10
    paper.server.offers[:] = [offer(dph_base=price, machine_id=number, reliability2=0.99 if number < 4 else 0.5)
                              for number, price in enumerate((0.30, 0.20, 0.10, 0.05), 1)]
    paper.server.ignored_filters = {"reliability"}
    done = paper.gpurun("offers")
    head, *lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == ["0.113", "0.213", "0.313", "0.063"]
    assert head.split()[-2:] == ["WHY", "NOT"] and lines[-1].endswith("its reliability is 0.5, less than min_reliability 0.97")
    assert "3 of 4 offers fit; `gpurun up` takes one of the cheapest" in done.stderr.decode()
    assert [one.endpoint for one in paper.server.requests] == ["search"]
    nothing_was_asked_for(paper)


def test_offers_as_json_is_one_object_a_line_and_nothing_else(paper):   # S158
    paper.server.ignored_filters = {"dph_total"}
    paper.server.offers.append(offer(dph_base=2.0))
    done = paper.gpurun("offers", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and done.stderr == b"" and {one["type"] for one in found} == {"offer"}
    assert [one["fits"] for one in found] == [True] * 4 + [False] and found[-1]["why_not"] == [
        "it costs 2.013 $/h with its disk, more than max_price_per_hour 0.5"]
    assert set(found[0]) == {"type", "offer", "machine", "price_per_hour", "gpu", "gpus", "gpu_ram_mb", "cuda", "reliability", "down_mbps", "up_mbps",
                             "disk_gb", "place", "fits", "why_not"}


def test_no_offer_as_json_is_an_error_that_says_why(paper):   # 10, S158
    paper.server.offers.clear()
    done = paper.gpurun("offers", "--json")
    said, = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 125 and said["type"] == "error" and "no free offer for 1 " in said["text"]


def test_of_more_offers_than_one_answer_holds_the_cheapest_is_taken(paper):   # 10
    paper.server.offers[:] = [offer(dph_base=0.45 - number / 1000) for number in range(100)]
    best = paper.server.offers[-1]["id"]
    paper.server.offers[-1]["dph_base"] = 0.1
    paper.server.fault("create", "no_credit")
    paper.said("up")
    create, = paper.server.calls("create")
    assert create.ids == (best,)
    paper.ended()


def test_a_filter_that_the_server_ignores_is_looked_at_again_here(paper):   # 11
    paper.server.ignored_filters = {"dph_total", "gpu_name", "num_gpus", "disk_space", "reliability", "verified"}
    paper.server.offers[:] = [offer(dph_base=0.6), offer(gpu_name="RTX 3060"), offer(num_gpus=2), offer(disk_space=20.0), offer(reliability2=0.5),
                              offer(verification="unverified")]
    code, err = paper.said("up")
    assert code == 125 and "6 offers for" in err and "none that fits" in err
    nothing_was_asked_for(paper)


def test_an_offer_of_which_little_is_told_is_as_good_as_any(renter):   # 12
    renter.server.offers[:] = [offer(sparse=True, direct_port_count=4)]
    assert renter.said("up")[0] == 0 and len(renter.server.alive()) == 1
    assert renter.said("nodes")[0] == 0 and renter.said("down")[0] == 0
    renter.ended()


@pytest.mark.parametrize("body", [{"offers": None}, {"offers": [None, 7, {}]}, {}, [], "<html>"])   # 12
def test_a_search_that_is_answered_with_nonsense_rents_nothing(paper, body):
    paper.server.hook = lambda request: Answer(200, body) if request.endpoint == "search" else None
    code, err = paper.said("up", pace="asking=0.02")
    assert code == 125 and ("search for offers" in err or "no free offer" in err), err
    nothing_was_asked_for(paper)


def test_searches_of_the_day_that_are_used_up_say_when_they_come_back(paper):
    paper.server.fault("search", "429_quota", times=9)
    code, err = paper.said("up")
    assert code == 125 and "they come back at midnight UTC" in err and len(paper.server.calls("search")) == 1
    nothing_was_asked_for(paper)


# ---- bad input -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keys, words", [   # 16, 17, S134, S136
    ({"limits": {"max_cost": 0.01}}, "max_cost $0.0100 would be reached 1 min 39 s after the start, at $0.363 an hour: nothing was rented"),
    ({"limits": {"max_hours": 0}}, "max_hours"), ({"limits": {"max_hours": -1}}, "max_hours"), ({"limits": {"max_cost": "5"}}, "must be a number"),
    ({"selection": {"max_price_per_hour": 0}}, "max_price_per_hour"), ({"disk_gb": 4}, "disk_gb"), ({"nodes": 0}, "nodes"), ({"nodes": 65}, "nodes"),
    ({"bid": 0.6}, "0.6 is more than selection.max_price_per_hour = 0.5"), ({"image": None}, "needs a container image"),
    ({"image": "ubuntu"}, "has no tag"),
    ({"login": "-u me -p x y"}, "is not a key here"), ({"gpu": {"nmae": "RTX 4090"}}, "is not a key here")])
def test_a_cluster_file_that_asks_for_nonsense_is_refused_before_anything_is_rented(paper, keys, words):
    paper.cluster(**keys)
    code, err = paper.said("up", "--yes")
    assert code == 2 and words in err, err
    nothing_was_asked_for(paper)


def test_a_folder_of_the_node_that_does_not_fit_the_start_script_is_said_once(paper):   # 16
    paper.cluster(node_dir="/root/" + "/".join(["d" * 200] * 18))
    code, err = paper.said("up", "--yes")
    assert code == 2 and err.count("bytes") == 1 and "use a shorter node_dir" in err, err
    nothing_was_asked_for(paper)


@pytest.mark.parametrize("args", [["--nodes", "0"], ["--nodes", "65"], ["--nodes", "two"], ["extra"]])
def test_an_option_that_makes_no_sense_rents_nothing(paper, args):
    assert paper.said("up", "--yes", *args)[0] == 2
    nothing_was_asked_for(paper)


def test_a_cluster_of_ones_own_machines_has_no_offers(paper):
    (paper.work / "cluster.toml").write_text('[provider]\nkind = "local"\n')
    code, err = paper.said("offers")
    assert code == 2 and "nothing is rented there, so there are no offers" in err


def test_more_nodes_than_there_are_offers_for_are_refused_before_the_first_one_is_rented(paper):   # S112
    code, err = paper.said("up", "--nodes", "6")
    assert code == 125 and "6 machines are wanted and 4 offers fit: nothing was rented" in err, err
    nothing_was_asked_for(paper)


# ---- no network ------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def nobody_listens():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("command", [["up"], ["offers"], ["nodes"], ["job.toml", "--up", "--down"]])
def test_without_a_network_a_user_reads_that_there_is_none(paper, nobody_listens, command):   # S110
    paper.env["VAST_URL"] = nobody_listens
    paper.job("true")
    code, err = paper.said(*command, pace="asking=0.02 patience_s=1")
    assert code == 125 and "no machine is up" not in err and "it can't be reached: the connection is refused, or there is no way to it" in err, err
    nothing_was_asked_for(paper)


def test_a_name_that_is_not_found_is_said_in_plain_words(paper):   # S110
    paper.env["VAST_URL"] = "http://no-such-host.invalid"
    code, err = paper.said("up", pace="asking=0.02")
    assert code == 125 and "no network, or DNS doesn't answer" in err
    nothing_was_asked_for(paper)


def test_who_waits_for_a_service_that_does_not_answer_is_told_so_and_may_stop_it(paper, nobody_listens):   # S110
    paper.env["VAST_URL"] = nobody_listens
    up = Running(paper, "up")
    up.until("asking again in")
    assert up.signal(signal.SIGINT).end() == 130
    nothing_was_asked_for(paper)


def test_a_command_for_ssh_without_its_node_is_answered_with_how_to_say_it(paper):
    assert "no machine is up: `gpurun up` rents one" in paper.said("ssh", "nvidia-smi")[1]
    paper.server.script(steps=((0.0, "st_loading"),))
    up = Running(paper, "up")
    up.until("loading (")
    for words in (["nvidia-smi -L"], ["-t", "top"]):
        code, err = paper.said("ssh", *words)
        assert code == 2 and f"'{words[0]}' is not a node that is up. Name the node first: gpurun ssh node1 COMMAND" in err, err
    assert up.signal(signal.SIGINT).end() == 130
    paper.ended()
    (paper.work / "cluster.toml").write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "gpu1"\n')
    code, err = paper.said("ssh", "-t", "top")
    assert code == 2 and 'error: "-t" is not a node of' in err and "Name the node first: gpurun ssh gpu1 COMMAND" in err, err


# ---- the question ----------------------------------------------------------------------------------------------------------------------

class Terminal:
    """gpurun on a terminal of its own."""

    def __init__(self, paper, *args):
        env = {**{name: value for name, value in paper.env.items() if name != "CI"}, "TERM": "xterm", "NO_COLOR": "1"}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(paper.work)
            os.execve(sys.executable, [sys.executable, str(TESTS / "quick.py"), *args], env)
        self.got, self.open = b"", True

    def until(self, text, limit_s=60):
        deadline = time.monotonic() + limit_s
        while text is None and self.open or text is not None and text not in self.got:
            assert time.monotonic() < deadline and (self.open or text is None), self.got.decode(errors="replace")
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:                # nobody has it open any more
                    data = b""
                self.got, self.open = self.got + data, bool(data)
        return self

    def press(self, keys):
        os.write(self.fd, keys)
        return self

    def end(self):
        self.until(None)
        os.close(self.fd)
        assert b"Traceback" not in self.got
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_on_a_terminal_what_it_costs_is_shown_and_asked_and_no_rents_nothing(paper):
    shown = Terminal(paper, "up").until(b"[y] yes")
    assert b"1 machine with 1 \xc3\x97 RTX 4090 at about $0.363/h each, $0.363/h in all; 4 offers fit" in shown.got
    assert b"ends itself at: max_hours 2, idle for 60 min" in shown.got and b"Rent?" in shown.got and paper.server.calls("create") == []
    assert shown.press(b"n").end() == 130 and b"nothing was rented" in shown.got
    nothing_was_asked_for(paper)


def test_on_a_terminal_yes_rents(renter):
    shown = Terminal(renter, "up").until(b"[y] yes").press(b"y")
    assert shown.end() == 0 and len(renter.server.alive()) == 1
    assert renter.said("down")[0] == 0
    renter.ended()


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["ctrl-c", "ctrl-d"])
def test_on_a_terminal_who_leaves_at_the_question_has_rented_nothing(paper, key):
    assert Terminal(paper, "up").until(b"[y] yes").press(key).end() == 130
    nothing_was_asked_for(paper)


def test_a_run_that_rents_asks_before_it_begins_and_no_leaves_a_record_that_says_so(paper):
    paper.job("true")
    shown = Terminal(paper, "job.toml", "--up", "--down").until(b"[y] yes")
    assert shown.press(b"n").end() == 130
    assert paper.record()["state"] == "FAILED" and "nothing was rented" in paper.record()["reason"] and paper.record()["exit_code"] == 130
    nothing_was_asked_for(paper)


def test_where_nobody_can_be_asked_a_price_cap_counts_as_yes_and_without_one_nothing_is_rented(paper):   # S157
    paper.cluster(selection={})
    code, err = paper.said("up")
    assert code == 2 and "say --yes, or set selection.max_price_per_hour in the cluster file, which counts as a yes" in err
    nothing_was_asked_for(paper)
    paper.server.fault("create", "no_credit", times=9)
    assert paper.said("up", "--yes")[0] == 125 and len(paper.asked) == 1
    paper.cluster()
    assert paper.said("up")[0] == 125 and len(paper.asked) == 2
    paper.ended()


def test_up_as_json_is_one_object_for_each_node(renter):   # S158
    done = renter.gpurun("up", "--json")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and done.stderr == b""
    node, = [one for one in said if one["type"] == "node"]
    assert node["node"] == "node1" and node["machine"] == str(renter.server.alive()[0].id) and node["state"] == "ready" and node["guarded"] is True
    assert node["price_per_hour"] == pytest.approx(0.3633, abs=1e-3) and node["ends_by"] == "max_hours 2"
    listed = [json.loads(line) for line in renter.gpurun("nodes", "--json").stdout.splitlines()]
    assert [one["label"] for one in listed] == [node["label"]] and set(listed[0]) == set(node)
    done = renter.gpurun("down", "--json")
    assert done.returncode == 0 and all(json.loads(line)["type"] for line in done.stdout.splitlines())
    renter.ended()
