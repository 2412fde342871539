"""The loopback server does what tests of renting rely on: the real SDK understands it, and what it says it broke is broken."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import requests

import vast_machine
import vast_rows as rows
from conftest import eventually
from sshd import keygen
from vast_http import SILENT, SPECIAL
from vast_rows import REFUSALS, STATES
from vast_server import Answer, Fault, Instance, Quirks, VastServer, offer

vastai = pytest.importorskip("vastai")
machines = pytest.mark.skipif(not vast_machine.possible(), reason="needs root and namespaces")


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VAST_API_KEY", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def sdk(server: VastServer, retry: int = 1, timeout: float = 60.0, key: str | None = None) -> Any:
    client = vastai.VastAI(api_key=key or server.key, server_url=server.url, retry=retry)
    client.client.timeout = timeout
    return client


def create(client: Any, ask: int, **changes: Any) -> Any:
    asked = {"image": "vastai/base-image:cuda", "disk": 40, "label": "gpurun-1", "ssh": True, "direct": True, "cancel_unavail": True,
             "env": {"A": "b", "-p 4242:4242/udp": "1", "-p 70001:70001/udp": "1"}, "onstart_cmd": "touch /root/.no_auto_tmux", **changes}
    return client.create_instance(id=ask, **asked)


def rented(server: VastServer, client: Any = None, **changes: Any) -> Instance:
    return server.instances[create(client or sdk(server), server.offers[0]["id"], **changes)["new_contract"]]


def as_container(server: VastServer, one: Instance, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body or {}).encode(), method=method,
                                     headers={"Authorization": f"Bearer {one.api_key}", "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# ---- as the real SDK sees it -----------------------------------------------------------------------------------------------------

def test_a_life_with_the_real_sdk_from_search_to_nothing_left():
    with VastServer() as server:
        client = sdk(server)
        assert client.show_user()["credit"] == 100.0 and client.show_ssh_keys() == []
        key = client.create_ssh_key("ssh-ed25519 AAAA gpurun")["key"]
        assert [one["key"] for one in client.show_ssh_keys()] == ["ssh-ed25519 AAAA gpurun"]
        found = client.search_offers(query={"gpu_name": {"eq": "RTX 4090"}, "num_gpus": {"eq": 1}}, storage=40, order="dph_total")
        assert len(found) == 1 and found[0]["dph_total"] == pytest.approx(0.3583, abs=1e-4) and found[0]["ask_contract_id"] == found[0]["id"]
        one = rented(server, client)
        row = client.show_instance(one.id)
        assert (row["actual_status"], row["label"], row["machine_id"], row["is_bid"]) == ("running", "gpurun-1", found[0]["machine_id"], False)
        assert row["extra_env"] == {"A": "b", "-p 4242:4242/udp": "1", "-p 70001:70001/udp": "1"} and row["public_ipaddr"] == "127.0.0.1\n"
        real = one.udp[70001, "udp"]
        assert {"22/tcp", "4242/udp", f"{real}/udp"} == set(row["ports"]) and row["ports"][f"{real}/udp"][0]["HostPort"] == str(real) < "40000"
        assert [listed["id"] for listed in client.show_instances()] == [one.id] and client.fetch_contracts(label="gpurun-1")[0]["id"] == one.id
        assert client.attach_ssh(one.id, "ssh-ed25519 BBBB more")["success"] and one.keys
        assert client.label_instance(one.id, "other")["success"] and one.label == "other"
        assert client.logs(one.id) == "no container\n"
        assert client.reboot_instance(one.id)["success"] and client.stop_instance(one.id)["success"] and client.start_instance(one.id)["success"]
        assert client.destroy_instance(one.id) == {"success": True}
        assert client.show_instance(one.id) is None and client.show_instances() == [] and server.alive() == [] and server.most_alive == 1
        with pytest.raises(requests.HTTPError) as gone:
            client.destroy_instance(one.id)
        assert gone.value.response.status_code == 404 and gone.value.response.json()["error"] == "no_such_instance"
        assert client.delete_ssh_key(key["id"])["success"] and client.show_ssh_keys()[0]["deleted_at"]
        assert [state for _, state in one.states] == ["st_new", "st_running", "st_rebooting", "st_running", "st_all_stopped", "st_running",
                                                      "destroyed"]
        assert server.leaks() == [] and all(request.bearer_ok for request in server.requests if request.endpoint != "object")


def test_a_search_filters_prices_and_is_cut_as_the_services():
    cheap = offer(dph_base=0.1, gpu_ram=12000)
    with VastServer([offer(), cheap, offer(sparse=True), *(offer(gpu_name="A40") for _ in range(70))]) as server:
        client = sdk(server)
        assert len(client.search_offers(query={"gpu_name": {"eq": "A40"}}, limit=100)) == 64
        query: dict[str, Any] = {"gpu_name": {"eq": "RTX 4090"}}
        assert [one["dph_base"] for one in client.search_offers(query=query, order="dph_total")][0] == 0.1
        assert len(client.search_offers(query={**query, "gpu_ram": {"gte": 23000}})) == 2
        assert [one["id"] for one in client.search_offers(query=f"gpu_name=RTX_4090 num_gpus=1 gpu_ram<=13")] == [cheap["id"]]
        assert client.search_offers(query={"id": {"eq": cheap["id"]}}) == [] != client.search_offers(query={"ask_contract_id": {"eq": cheap["id"]}})
        assert client.search_offers(query={**query, "driver_version": {"gte": "1"}}) == []
        bid = client.search_offers(query={**query, "direct_port_count": {"gte": 1}}, type="bid", storage=100)
        assert {(one["dph_base"], one["is_bid"]) for one in bid} == {(0.18, True)} and bid[0]["dph_total"] == pytest.approx(0.18 + 15 / 720, abs=1e-4)
        server.ignored_filters = {"gpu_ram"}
        assert len(client.search_offers(query={**query, "gpu_ram": {"gte": 23000}})) == 3
        with pytest.raises(requests.HTTPError, match="400"):
            client.search_offers(query={"gpu_rm": {"eq": 1}})
        assert sdk(server, key="nobody's").search_offers(query=query)      # needs no key, so it proves none
        server.offers.clear()
        assert client.search_offers(query=query) == []


@pytest.mark.parametrize("changes, error", [
    ({"image": ""}, "invalid_args"), ({"image": "registry:5000/name"}, "server_error"),
    ({"disk": 7}, "invalid_args"), ({"disk": 5000}, "invalid_args"),
    ({"label": "x" * 257}, "label_too_long"), ({"onstart_cmd": "x" * 4097}, "invalid_args"), ({"bid_price": 200.0}, "invalid_price"),
    ({"bid_price": 0.01}, "invalid_args"), ({"env": {f"-p {port}:{port}": "1" for port in range(1000, 1065)}}, "invalid_args"),
    ({"env": {"-p 100-200:100-200": "1"}}, "invalid_args")])
def test_a_create_is_refused_as_the_service_refuses_it(changes, error):
    with VastServer() as server:
        with pytest.raises(requests.HTTPError) as refused:
            create(sdk(server), server.offers[0]["id"], **changes)
        assert refused.value.response.json()["error"] == error and not server.instances and len(server.offers) == 1


@pytest.mark.parametrize("dress, status", [("gone_404", 404), ("gone_410", 410), ("gone_400", 400)])
def test_an_offer_is_rented_once(dress, status):
    with VastServer() as server:
        server.gone, ask = dress, server.offers[0]["id"]
        create(sdk(server), ask)
        with pytest.raises(requests.HTTPError) as gone:
            create(sdk(server), ask)
        assert gone.value.response.status_code == status and "no_such_ask" in gone.value.response.text and gone.value.response.json()["ask_id"] == ask
        assert len(server.alive()) == 1


def test_money_that_is_not_there_rents_nothing_and_stops_what_runs():
    with VastServer([offer(), offer(), offer()]) as server:
        client, one = sdk(server), rented(server)
        server.account["spend_limit"] = 0.5
        with pytest.raises(requests.HTTPError) as refused:
            rented(server)
        assert refused.value.response.json()["error"] == "spend_rate_limit"
        server.account["credit"] = server.spent() + one.price + one.storage_price     # an hour's worth
        server.skip(3601)
        server.wait_for(lambda s: one.state == "st_outbid")
        row = client.show_instance(one.id)
        assert (row["intended_status"], row["actual_status"], row["cur_state"]) == ("running", "stopped", "stopped")
        with pytest.raises(requests.HTTPError) as refused:
            rented(server)
        assert refused.value.response.json()["error"] == "insufficient_credit" and client.show_user()["credit"] <= 0


def test_every_state_is_shown_by_id_and_in_the_list():
    with VastServer() as server:
        client, one = sdk(server), rented(server)
        for name, patch in STATES.items():
            server.step(one, name)
            shown, listed = client.show_instance(one.id), client.show_instances()[0]
            for key, value in patch.items():
                assert shown[key] == value and listed[key] == (value.strip() if isinstance(value, str) else value), (name, key)


def test_pages_of_25_in_order_with_a_token_nobody_can_make_up_and_filters():
    with VastServer([offer() for _ in range(60)]) as server:
        client = sdk(server)
        server.account["credit"] = 1e6
        for number in range(60):
            rented(server, client, label=f"gpurun-{number % 2}")
        assert [row["id"] for row in client.show_instances()] == sorted(server.instances) and len(server.calls("list")) == 3
        page = client.show_instances_v1({"select_filters": {"label": {"eq": "gpurun-1"}}, "limit": 100, "select_cols": ["id", "label", "nonsense"]})
        assert page["instances_found"] == 25 and page["total_instances"] == 30 and page["label_counts"] == {"gpurun-1": 30}
        assert page["instances"][0] == {"id": sorted(server.instances)[1], "label": "gpurun-1", "nonsense": None} and "id" not in page["next_token"]
        some = sorted(server.instances)[:2]
        assert [row["id"] for row in client.show_instances_v1({"select_filters": {"id": {"in": some}}})["instances"]] == some
        for bad in ({"after_token": "made-up"}, {"select_filters": {"dph_total": {"lt": 1}}}):
            with pytest.raises(requests.HTTPError, match="400"):
                client.show_instances_v1(bad)


@pytest.mark.parametrize("damage, error", [(rows.NO_START_DATE, TypeError), (rows.NO_ENV, TypeError), (rows.ENV_MISSING, KeyError),
                                           ({"extra_env": {"A": "b"}}, IndexError)])
def test_a_damaged_row_breaks_the_sdks_listing_and_not_the_raw_one(damage, error):
    with VastServer() as server:
        server.script(row=damage)
        one = rented(server)
        with pytest.raises(error):
            sdk(server).show_instances()
        assert sdk(server).show_instances_v1({})["instances"][0]["id"] == one.id


# ---- scripts ---------------------------------------------------------------------------------------------------------------------

def test_a_script_leads_an_instance_through_its_states_by_the_clock():
    with VastServer([offer(machine_id=1), offer(machine_id=2)]) as server:
        server.script(1, steps=((100, "st_loading"), (200, "st_running_no_ports"), (50, "st_running")))
        server.script(2, steps=((0, "st_oci_failed"),))
        client, slow, broken = sdk(server), rented(server), rented(server)
        assert client.show_instance(slow.id)["actual_status"] is None and "OCI runtime" in client.show_instance(broken.id)["status_msg"]
        for seconds, status, ports in ((110, "loading", None), (200, "running", {}), (50, "running", slow._ports())):
            server.skip(seconds)
            row = client.show_instance(slow.id)
            assert (row["actual_status"], row["ports"]) == (status, ports)
        assert [state for _, state in slow.states] == ["st_new", "st_loading", "st_running_no_ports", "st_running"]


def test_what_it_costs_follows_the_states():
    with VastServer([offer(dph_base=2.0, storage_cost=0.72, disk_space=1000.0)]) as server:
        server.script(steps=((3600, "st_loading"), (3600, "st_running")))
        one = rented(server, disk=1000)
        server.skip(7200)
        assert one in server.alive() and one.spent == pytest.approx({"gpu": 0.0, "storage": 2.0}, abs=0.01)
        server.skip(3600)
        server.step(one, "st_outbid")
        server.skip(3600)
        server.alive()
        assert one.spent == pytest.approx({"gpu": 2.0, "storage": 4.0}, abs=0.01)
        sdk(server).destroy_instance(one.id)
        before = server.spent()
        server.skip(3600)
        assert server.alive() == [] and server.spent() == before and one.destroyed_by == "right"


def test_what_is_new_may_be_hidden_and_what_is_destroyed_may_linger_or_come_back():
    with VastServer([offer(), offer()]) as server:
        client = sdk(server)
        server.script(visible_after=30, gone_after=30, comes_back_after=60)
        one = rented(server)
        assert client.show_instance(one.id) is None and client.show_instances() == [] and server.alive() == [one]
        server.skip(31)
        assert client.show_instance(one.id)["id"] == one.id
        client.destroy_instance(one.id)
        assert client.show_instance(one.id)["cur_state"] == "unloaded" and server.alive() == []
        server.skip(31)
        assert client.show_instance(one.id) is None and client.show_instances() == []
        server.skip(31)
        assert client.show_instance(one.id)["actual_status"] == "stopped" and server.alive() == [one]
        client.destroy_instance(one.id)
        server.skip(200)
        assert client.show_instance(one.id) is None and server.alive() == []
        server.script(visible_after=30, hidden_destroy=False)
        hidden = rented(server)
        with pytest.raises(requests.HTTPError, match="404"):
            client.destroy_instance(hidden.id)
        assert server.alive() == [hidden]


def test_ports_may_be_in_one_kind_of_answer_only_and_change_with_a_reboot():
    with VastServer([offer(), offer(), offer(direct_port_count=2)]) as server:
        client = sdk(server)
        made = server.script(ports_in="list", ports_by="asked", moves=True)
        one = rented(server)
        assert "ports" not in client.show_instance(one.id)
        before = client.show_instances()[0]["ports"]
        assert "70001/udp" in before
        client.reboot_instance(one.id)
        assert client.show_instances()[0]["ports"]["22/tcp"] != before["22/tcp"]
        made.ports_in = "show"
        proxied, few = rented(server, direct=False), rented(server)
        assert set(client.show_instance(proxied.id)["ports"]) == {"4242/udp", "70001/udp"} and "ports" not in client.show_instances()[1]
        few = client.show_instance(few.id)         # its host has fewer open ports than were asked for
        assert few["ports"] == {} and few["ssh_port"] == server.instances[few["id"]].ports["proxy"]


def test_a_gpu_that_is_taken_refuses_or_leaves_something_stopped_and_a_start_may_be_queued():
    with VastServer([offer(), offer(), offer()]) as server:
        made = server.script(unavailable=True, queued=True)
        with pytest.raises(requests.HTTPError, match="410"):
            rented(server)
        one = rented(server, cancel_unavail=False)
        assert one.state == "st_all_stopped" and server.alive() == [one] and made.queued
        assert sdk(server).start_instance(one.id)["error"] == "resources_unavailable" and one.state == "st_all_stopped"
        assert rented(server, label=None, cancel_unavail=False) in server.unlabelled()


# ---- faults ----------------------------------------------------------------------------------------------------------------------

FAULTS = {"dropped": requests.ConnectionError, "lost_answer": requests.ConnectionError, "hang": requests.ReadTimeout, "stall": requests.ReadTimeout,
          "truncated": requests.JSONDecodeError, "html200": requests.JSONDecodeError, "empty200": requests.JSONDecodeError,
          **{name: requests.HTTPError for name, (status, _) in REFUSALS.items() if status >= 400}}
HAPPENS = {"lost_answer", "stall", "truncated", "html200", "empty200"}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_raises_what_the_sdk_raises_and_happened_or_did_not(kind):
    with VastServer() as server:
        one = rented(server)
        fault = server.fault("destroy", kind)
        with pytest.raises(FAULTS[kind]) as raised:
            sdk(server, timeout=1.0 if kind in ("hang", "stall") else 60.0).destroy_instance(one.id)
        server.wait_for(lambda _: fault.hits and (kind not in HAPPENS or not one.alive))     # it may have been heard only now
        if isinstance(raised.value, requests.HTTPError):
            assert raised.value.response.status_code == REFUSALS[kind][0] and server.requests[-1].status == REFUSALS[kind][0]
        assert (server.alive() == []) == (kind in HAPPENS) and fault.hits == 1 and server.requests[-1].fault == kind


def test_a_200_that_says_no_raises_nothing_and_does_nothing():
    with VastServer() as server:
        one = rented(server)
        server.fault("destroy", "success_false")
        assert sdk(server).destroy_instance(one.id)["success"] is False and server.alive() == [one]


def test_every_kind_of_fault_is_in_these_tests():
    assert SILENT | SPECIAL | set(REFUSALS) - set(FAULTS) == SILENT | SPECIAL | {"success_false", "queued"}
    with pytest.raises(ValueError):
        Fault(frozenset({"create"}), "lost-answer")
    with pytest.raises(ValueError):
        Fault(frozenset({"creat"}), "lost_answer")


def test_a_create_that_is_sent_again_finds_the_offer_gone_while_the_machine_bills():
    with VastServer() as server:
        server.fault("create", "lost_answer")
        with pytest.raises(requests.HTTPError) as gone:
            create(sdk(server, retry=3), server.offers[0]["id"])
        assert "no_such_ask" in gone.value.response.text and len(server.alive()) == 1 and len(server.calls("create")) == 2


def test_an_error_may_be_said_of_what_was_done_all_the_same():
    with VastServer() as server:
        server.fault("create", "502", effect=True)
        with pytest.raises(requests.HTTPError, match="502"):
            rented(server)
        assert len(server.alive()) == 1


def test_an_error_may_come_with_a_contract_and_a_success_without_a_machine():
    with VastServer([offer(), offer()]) as server:
        client = sdk(server)
        server.fault("create", "error_with_contract")
        server.fault("create", "success_never_appears", nth=2)
        with pytest.raises(requests.HTTPError) as refused:
            rented(server)
        [left] = server.alive()
        assert refused.value.response.json()["new_contract"] == left.id and left.state == "st_all_stopped"
        nothing = create(client, server.offers[0]["id"])["new_contract"]
        assert client.show_instance(nothing) is None and server.alive() == [left]


def test_faults_count_calls_of_their_endpoints_and_429_carries_what_it_is_told_to():
    with VastServer() as server:
        client = sdk(server, retry=3)
        server.fault("user ssh_list", "503", nth=2, times=2)
        assert client.show_user() and client.show_ssh_keys() == [] and [one.status for one in server.requests] == [200, 503, 503, 200]
        server.fault("user", "429", body="detail", retry_after=0)
        assert client.show_user() and server.requests[-2].answer == REFUSALS["429_detail"][1]
        server.fault("user", "429", retry_after=61)
        with pytest.raises(requests.HTTPError) as slow:
            client.show_user()
        assert slow.value.response.headers["Retry-After"] == "61" and "threshold" in slow.value.response.text
        server.fault("any", "401_2fa", times=10 ** 9)
        with pytest.raises(requests.HTTPError) as refused:
            client.show_user()
        assert "Two Factor" in refused.value.response.text


def test_a_body_that_trickles_in_outlasts_the_clients_timeout():
    with VastServer() as server:
        server.fault("ssh_create", "trickle", seconds=4.0)
        started = time.monotonic()
        assert sdk(server, timeout=2.0).create_ssh_key("ssh-ed25519 AAAA x")["success"] and time.monotonic() - started > 3.9
        server.fault("user", "stall", seconds=0.05)
        with pytest.raises(requests.ConnectionError):
            sdk(server).show_user()


def test_a_redirect_leads_to_another_port_and_takes_no_key_there():
    with VastServer() as server:
        server.fault("user", "redirect308")
        with pytest.raises(requests.HTTPError, match="401"):
            sdk(server).show_user()
        assert [(one.path, one.bearer) for one in server.elsewhere] == [("/api/v0/users/current", "none")] and server.leaks() == []
        requests.get(server.other_url, headers={"Authorization": f"Bearer {server.key}"}, timeout=60)
        assert len(server.leaks()) == 1


def test_a_hook_sees_each_request_and_decides():
    with VastServer() as server:
        said = iter([None, "502", (418, {"msg": "teapot"}), Answer(200, {"credit": 7}), Fault(frozenset({"any"}), "lost_answer")])
        server.hook = lambda request: next(said) if request.endpoint == "user" else None
        client = sdk(server)
        assert client.show_user()["credit"] == 100.0
        for status in ("502", "418"):
            with pytest.raises(requests.HTTPError, match=status):
                client.show_user()
        assert client.show_user()["credit"] == 7
        with pytest.raises(requests.ConnectionError):
            client.show_user()


def test_the_rate_limits_can_be_turned_on():
    with VastServer(rates=600) as server:
        client = sdk(server)
        client.show_instances()
        with pytest.raises(requests.HTTPError) as fast:
            client.show_instances()
        assert fast.value.response.text == "API requests too frequent: endpoint threshold=1.0"
        server.rates = 0.1
        eventually(lambda: requests.get(f"{server.url}/api/v1/instances/", headers={"Authorization": f"Bearer {server.key}"}, timeout=60).ok)


def test_a_server_that_is_down_refuses_and_comes_back_as_it_was():
    with VastServer() as server:
        one, url = rented(server), server.url
        server.down()
        with pytest.raises(requests.ConnectionError):
            sdk(server).show_user()
        server.up()
        assert server.url == url and sdk(server).show_instance(one.id)["id"] == one.id
        server.down()


def test_who_waits_is_woken_by_requests_and_by_time_and_says_what_it_saw_instead():
    with VastServer() as server:
        server.script(steps=((0.2, "st_loading"), (0.2, "st_running")))
        threading.Timer(0.1, lambda: rented(server)).start()
        one = server.wait_for(lambda s: s.alive())[0]
        assert server.wait_for(lambda s: one.state == "st_running") and time.time() - one.created_at < 30
        with pytest.raises(AssertionError, match="PUT /api/v0/asks/"):
            server.wait_for(lambda s: len(s.alive()) == 2, timeout_s=0.05)


def test_logs_come_late_and_are_fetched_without_the_key():
    with VastServer() as server:
        server.script(logs="sshd: Authentication refused: bad ownership or modes\n", logs_after=1)
        assert "bad ownership" in sdk(server).logs(rented(server).id)
        assert [one.status for one in server.calls("object")] == [404, 200] and server.leaks() == []
        assert all("requests" in one.headers["User-Agent"] for one in server.calls("object"))


def test_the_keys_come_in_all_the_shapes_that_clients_have_seen():
    with VastServer() as server:
        client = sdk(server)
        server.no_keys_404 = True
        with pytest.raises(requests.HTTPError, match="404"):
            client.show_ssh_keys()
        server.add_key("ssh-ed25519 AAAA one")
        server.key_field = "public_key"
        assert client.show_ssh_keys()[0]["public_key"] == "ssh-ed25519 AAAA one"
        server.keys_as = "wrapped"
        assert client.show_ssh_keys()["ssh_keys"][0]["id"] == server.ssh_keys[0]["id"]
        server.keys_as = "text"
        assert json.loads(client.show_ssh_keys()["ssh_keys"])[0]["id"] == server.ssh_keys[0]["id"]
        for change in ("refuse_duplicates", "team"):
            setattr(server, change, True)
            with pytest.raises(requests.HTTPError, match="400"):
                client.create_ssh_key("ssh-ed25519 AAAA another comment")
        with pytest.raises(requests.HTTPError, match="400"):
            client.delete_ssh_key(99)


def test_a_containers_key_ends_its_own_instance_and_nothing_else():
    with VastServer([offer(), offer()]) as server:
        one, other = rented(server), rented(server)
        for method, path in (("DELETE", f"/api/v0/instances/{other.id}/"), ("GET", "/api/v0/users/current"), ("GET", "/api/v1/instances/"),
                             ("PUT", f"/api/v0/instances/reboot/{one.id}/")):
            assert as_container(server, one, method, path)[0] == 403
        assert as_container(server, one, "PUT", f"/api/v0/instances/{one.id}/", {"state": "stopped"}) == (200, {"success": True})
        assert one.state == "st_all_stopped"
        assert as_container(server, one, "DELETE", f"/api/v0/instances/{one.id}/") == (200, {"success": True})
        assert server.alive() == [other] and one.destroyed_by == f"C.{one.id}"


def test_a_wrong_key_gets_in_nowhere():
    with VastServer() as server:
        for call in ("show_user", "show_instances", "show_ssh_keys"):
            with pytest.raises(requests.HTTPError, match="401"):
                getattr(sdk(server, key="wrong"), call)()
        assert [one.bearer for one in server.requests] == ["wrong"] * 3


# ---- machines --------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Each test's own: the machines of another one had the same numbers, and perhaps the same ports."""
    (tmp_path / "key").mkdir()
    return keygen(tmp_path / "key" / "key")


def login(one: Instance, key: Path, command: str, way: str = "direct", timeout: float = 60.0, within_s: int = 30) -> "subprocess.CompletedProcess[str]":
    options = {"BatchMode": "yes", "StrictHostKeyChecking": "accept-new", "UserKnownHostsFile": f"{key}.{one.id}.known", "IdentitiesOnly": "yes",
               "IdentityAgent": "none", "GlobalKnownHostsFile": "/dev/null", "ConnectTimeout": str(within_s)}
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return subprocess.run(["ssh", "-F", "none", "-T", "-n", "-i", str(key), "-p", str(one.ports[way]), *words, "root@127.0.0.1", command],
                          capture_output=True, text=True, timeout=timeout)


def rents(server: VastServer, key: Path, **changes: Any) -> Instance:
    if not server.ssh_keys:
        server.add_key(Path(f"{key}.pub").read_text())
    return rented(server, **changes)


def dead(pids: Any) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@machines
def test_a_machine_is_a_container_that_is_there_at_once_and_dies_whole(key):
    with VastServer(machines=True) as server:
        started = time.monotonic()
        one = rents(server, key, onstart_cmd='echo "began in $CONTAINER_ID"; setsid sleep 1000 & touch /root/.no_auto_tmux')
        told = login(one, key, "setsid sleep 2000 >/dev/null 2>&1 </dev/null & tr '\\0' '\\n' </proc/1/environ; echo \"[$CONTAINER_ID]\"; cd; pwd; "
                     "ls -a; test -e /.dockerenv -o -e /run/.containerenv && echo container; python3 -c 'print(6 * 7)'")
        assert told.returncode == 0 and time.monotonic() - started < 20, told.stderr
        lines = told.stdout.splitlines()
        for line in (f"CONTAINER_ID={one.id}", f"CONTAINER_API_KEY={one.api_key}", f"VAST_CONTAINERLABEL=C.{one.id}", "A=b",
                     "PUBLIC_IPADDR=127.0.0.1",
                     f"VAST_TCP_PORT_22={one.ports['direct']}", f"VAST_UDP_PORT_70001={one.udp[70001, 'udp']}", "[]", "/root",
                     "onstart.sh", "container", "42"):
            assert line in lines
        assert "Welcome to vast.ai" in told.stderr and not any(line.startswith("-p") for line in lines)
        assert login(one, key, "echo by proxy", "proxy").stdout == "by proxy\n" and one.machine.said(f"began in {one.id}")
        assert f"began in {one.id}" in sdk(server).logs(one.id)
        eventually(lambda: {"sleep 1000", "sleep 2000"} <= set(one.machine.processes().values()))
        inside = one.machine.processes()
        sdk(server).destroy_instance(one.id)
        assert dead(inside) and not one.machine.folder.exists() and login(one, key, "true").returncode == 255


@machines
def test_a_machine_can_end_itself_from_within(key, tmp_path):
    """Whether it lives to print the answer is a matter of milliseconds."""
    script = ("python3 -c \"import os, urllib.request as u; print(u.urlopen(u.Request(os.environ['VAST_URL'] + '/api/v0/instances/%s/' % "
              "os.environ['CONTAINER_ID'], method='DELETE', headers={'Authorization': 'Bearer ' + os.environ['CONTAINER_API_KEY']})).read())\"")
    with VastServer(machines=True) as server:
        one = rents(server, key, onstart_cmd=script, env={"VAST_URL": server.url})
        server.wait_for(lambda s: not s.alive())
        server.wait_for(lambda s: not one.machine.folder.exists())
        assert one.destroyed_by == f"C.{one.id}" and not one.machine.running


@machines
def test_a_stop_ends_what_runs_and_keeps_the_disk_and_each_start_runs_onstart(key):
    with VastServer(machines=True) as server:
        server.script(moves=True)
        one = rents(server, key, onstart_cmd="echo start >> /root/starts; echo written")
        assert one.machine.said("written")
        login(one, key, "echo kept > file")
        inside, port = one.machine.processes(), one.ports["direct"]
        server.step(one, "st_outbid")
        assert inside and dead(inside) and login(one, key, "true").returncode == 255
        server.step(one, "st_running")
        assert eventually(lambda: login(one, key, "cat file starts").stdout == "kept\nstart\nstart\n")
        sdk(server).reboot_instance(one.id)
        assert one.ports["direct"] != port and eventually(lambda: login(one, key, "cat starts").stdout == "start\n" * 3)
        sdk(server).recycle_instance(one.id)
        Path(f"{key}.{one.id}.known").unlink()
        assert eventually(lambda: login(one, key, "cat starts").stdout == "start\n") and "kept" not in login(one, key, "cat file").stdout


@machines
@pytest.mark.parametrize("mode, said", [("refuse", "refused"), ("reset", "reset"), ("close", "closed"), ("stall", "timed out")])
def test_one_way_fails_as_it_is_told_to_while_the_other_works(key, mode, said):
    with VastServer(machines=True) as server:
        server.script(machine=Quirks(direct=mode))
        one, within_s = rents(server, key), 1 if mode == "stall" else 30
        assert re.search(said, login(one, key, "echo in", within_s=within_s).stderr, re.IGNORECASE) and login(one, key, "echo in", "proxy").stdout == "in\n"
        one.ways["direct"].mode, one.ways["proxy"].mode = "pass", mode
        assert login(one, key, "echo in").stdout == "in\n" and login(one, key, "echo in", "proxy", within_s=within_s).returncode == 255


@machines
def test_a_machine_may_lack_the_accounts_key_until_one_is_attached_and_then_some_time(key):
    with VastServer([offer(machine_id=1), offer(machine_id=2), offer(machine_id=3)], machines=True) as server:
        server.script(1, machine=Quirks(account_keys=False, attach_after=0.5))
        server.script(2, machine=Quirks(account_keys=False, attach_after=None))
        server.script(3, machine=Quirks(bad_ownership=True))
        late, never, owned = rents(server, key), rents(server, key), rents(server, key)
        for one in (late, never):
            assert "Permission denied" in login(one, key, "true").stderr
            sdk(server).attach_ssh(one.id, Path(f"{key}.pub").read_text())
        assert "Permission denied" in login(owned, key, "true").stderr and owned.machine.said("bad ownership or modes")
        assert "bad ownership or modes" in sdk(server).logs(owned.id)
        assert eventually(lambda: login(late, key, "echo in").stdout == "in\n") and login(never, key, "true").returncode == 255


@machines
def test_commands_are_swallowed_until_the_tmux_hook_is_off_and_the_host_key_may_change(key):
    with VastServer(machines=True) as server:
        server.script(machine=Quirks(tmux=True, new_host_key=True))
        one = rents(server, key, onstart_cmd="")
        assert login(one, key, "echo ran").stdout == "no sessions\n"
        (one.machine.home / ".no_auto_tmux").touch()
        assert login(one, key, "echo ran").stdout == "ran\n"
        sdk(server).reboot_instance(one.id)
        assert eventually(lambda: "HOST IDENTIFICATION HAS CHANGED" in login(one, key, "echo ran").stderr)


@machines
def test_an_address_may_be_used_again_by_a_machine_with_another_host_key_whose_sshd_comes_late(key):
    with VastServer([offer(machine_id=1), offer(machine_id=2)], machines=True) as server:
        first = rents(server, key)
        assert login(first, key, "echo in").stdout == "in\n"
        sdk(server).destroy_instance(first.id)
        late = Quirks(ssh_after=3600.0)
        server.script(2, direct_port=first.ports["direct"], machine=late)
        second = rents(server, key)
        Path(f"{key}.{first.id}.known").rename(f"{key}.{second.id}.known")
        assert "losed" in login(second, key, "echo in").stderr
        late.ssh_after = 0.0
        assert eventually(lambda: "HOST IDENTIFICATION HAS CHANGED" in login(second, key, "echo in").stderr)


@machines
def test_a_machine_without_python_may_have_an_apt_get_that_brings_it(key):
    with VastServer(machines=True) as server:
        server.script(machine=Quirks(python=False, apt=True, without=("CONTAINER_API_KEY",), etc_environment=True))
        one = rents(server, key)
        assert login(one, key, "for p in /usr/bin/python3 /usr/local/bin/python3 python3; do $p -c 'print(1)'; done").stdout == ""
        assert login(one, key, "apt-get install -y python3 && python3 -c 'print(1)'").stdout == "1\n"
        told = login(one, key, "grep -c CONTAINER_API_KEY /proc/1/environ; grep CONTAINER /etc/environment").stdout
        assert "1\n" not in told and f"CONTAINER_ID={one.id}" in told
        assert (one.machine.folder / "apt-get.log").read_text() == "install -y python3\n"


@machines
def test_many_at_once_come_and_go_and_what_is_left_dies_with_the_server(key):
    with VastServer([offer() for _ in range(8)], machines=True) as server:
        asks = [one["id"] for one in server.offers]
        server.script(machine=Quirks(home=key.parent))
        server.add_key(Path(f"{key}.pub").read_text())
        server.hook = lambda request: "503" if [one.path for one in server.calls("destroy")].count(request.path) == 1 else None
        said: list[str] = []

        def live(number: int) -> None:
            one = server.instances[create(sdk(server, retry=1), asks[number], label=f"gpurun-{number}")["new_contract"]]
            said.append(login(one, key, "ls key.pub").stdout)
            if number % 2:
                sdk(server, retry=9).destroy_instance(one.id)
        threads = [threading.Thread(target=live, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = server.alive()
        assert said == ["key.pub\n"] * 8 and len(left) == 4
        eventually(lambda: all(len(one.machine.processes()) >= 3 for one in left))
        inside = [pid for one in left for pid in one.machine.processes()]
        assert server.unlabelled() == [] and 4 <= server.most_alive <= 8
    assert dead(inside) and not any(one.machine.folder.exists() for one in left)


@machines
def test_a_host_that_is_offline_is_silent_and_its_jobs_go_on(key):
    with VastServer(machines=True) as server:
        one = rents(server, key)
        assert login(one, key, "true").returncode == 0
        server.step(one, "st_offline")
        assert "timed out" in login(one, key, "true", within_s=1).stderr and one.machine.running
        server.step(one, "st_running")
        assert login(one, key, "echo in").stdout == "in\n" and one.machine.starts == 1


@machines
def test_nothing_outlives_a_server_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("vast_server.py"), "--machines"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    url, token = process.stdout.readline().decode().split()
    headers = {"Authorization": f"Bearer {token}"}
    ask = requests.post(f"{url}/api/v0/bundles/", json={}, timeout=60).json()["offers"][0]["id"]
    body = {"client_id": "me", "image": "a:b", "disk": 8, "onstart": f"touch {tmp_path}/began; setsid sleep 3000", "runtype": "ssh_direc ssh_proxy"}
    requests.put(f"{url}/api/v0/asks/{ask}/", json=body, headers=headers, timeout=60)
    eventually((tmp_path / "began").exists)
    below = eventually(lambda: found if len(found := vast_machine.descendants(process.pid)) >= 5 else None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: dead(below))
    process.stdin.close()
    process.stdout.close()
