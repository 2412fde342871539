"""Vast.ai's API: the real SDK against a server on 127.0.0.1 that answers as the service does, and in all the ways in which it fails."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import vast_rows
from gpurun import vast_api
from gpurun.errors import AccountError, ConfigError, OfferGoneError, ProviderError, UnclearError
from gpurun.vast_api import Row, TemporaryError, parse_row, stage
from vast_http import Answer
from vast_server import VastServer, offer

KEY = "k3y-of-the-account-" + "0123456789" * 4 + "a1b2"
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLE2 gpurun"
IMAGE = "vastai/base-image:cuda-12.8.1-cudnn-devel-ubuntu22.04-py310"
LABEL = "gpurun-0a0b0c0d-11112222-0-abcdef"


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No key, no netrc, no proxy and no settings of whoever runs the tests; and nobody waits."""
    for name in ("VAST_API_KEY", "VAST_URL", "XDG_CONFIG_HOME", "NETRC", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(vast_api, "BACKOFF_S", {"slow down": (0.01, 0.02), "failed": (0.01, 0.02)})
    monkeypatch.setattr(vast_api, "PAGE_S", 0.0)


@pytest.fixture
def server():
    with VastServer(offers=[offer(), offer()], key=KEY) as server:
        yield server
        assert server.leaks() == []


@pytest.fixture
def api(server, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", KEY + "\n")
    monkeypatch.setenv("VAST_URL", server.url)
    return vast_api.Api()


def rent(api, server, **changes):
    fields = {"offer_id": server.offers[0]["id"], "image": IMAGE, "disk_gb": 64, "label": LABEL, "env": {"-p 70001:70001/udp": "1"}, "onstart": "true"}
    return api.create(**{**fields, **changes})


def error_of(kind, call, *args, **options):
    with pytest.raises(ProviderError) as raised:
        call(*args, **options)
    assert type(raised.value) is kind, repr(raised.value)
    assert KEY not in str(raised.value) and "?" not in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


# ---- the key, the SDK --------------------------------------------------------------------------------------------------------------

def place_and_end(api):
    return api.key_source, api.key_end


def test_the_key_is_looked_for_where_the_sdk_does_in_its_order(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="VAST_API_KEY.*vast_api_key"):
        vast_api.Api()
    (tmp_path / ".vast_api_key").write_text("legacy-key-of-mine\n")
    assert place_and_end(vast_api.Api()) == (f"{tmp_path}/.vast_api_key", "mine")
    stored = tmp_path / ".config/vastai/vast_api_key"
    stored.parent.mkdir(parents=True)
    stored.write_text("  stored-key-of-mine2\n")
    assert place_and_end(vast_api.Api()) == (f"{stored}", "ine2")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg/vastai").mkdir(parents=True)
    (tmp_path / "xdg/vastai/vast_api_key").write_text("other-key-of-mine3")
    assert place_and_end(vast_api.Api()) == (f"{tmp_path}/xdg/vastai/vast_api_key", "ine3")
    monkeypatch.setenv("VAST_API_KEY", "key-of-the-shell-a1b2\n")
    assert place_and_end(vast_api.Api()) == ("$VAST_API_KEY", "a1b2")
    monkeypatch.setenv("VAST_API_KEY", " \n")
    assert vast_api.Api().key_source.startswith(f"{tmp_path}/xdg")


@pytest.mark.parametrize("text", ["two words", "a\nb", "schlüssel", "a\x00b"])
def test_what_cannot_be_a_key_is_named_by_its_place_and_not_shown(tmp_path, text):
    (tmp_path / ".vast_api_key").write_bytes(text.encode())
    with pytest.raises(ConfigError) as raised:
        vast_api.Api()
    assert str(tmp_path / ".vast_api_key") in str(raised.value) and text not in str(raised.value)


def test_without_the_sdk_a_user_reads_how_to_get_it(monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setitem(sys.modules, "vastai", None)
    with pytest.raises(ConfigError, match=r"pip install 'gpurun\[vastai\]'"):
        vast_api.Api()


@pytest.mark.parametrize("url", ["console.vast.ai", "ftp://x", "http://", "https://u:p@x", "https://x/?api_key=1", "https://x y"])
def test_a_url_that_is_none_is_refused(monkeypatch, url):
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("VAST_URL", url)
    with pytest.raises(ConfigError, match="VAST_URL"):
        vast_api.Api()


def test_the_sdk_is_loaded_only_when_it_is_needed_and_then_says_nothing(api, capfd):
    code = "import sys, gpurun.vast_api, gpurun.offers; sys.exit('vastai' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(vast_api.__file__).parents[1], timeout=60).returncode == 0
    logging.getLogger("vastai").error("something")
    assert capfd.readouterr() == ("", "")


# ---- what goes well ----------------------------------------------------------------------------------------------------------------

def test_the_account_has_a_name_and_credit_or_none_is_told(api, server):
    server.account["credit"] = 12.34
    assert api.account() == (12.34, "dev")
    server.hook = lambda request: (200, {"id": 7001, "credit": None, "username": None, "email": "dev@example.com"})
    assert api.account() == (None, "dev@example.com")
    server.hook = lambda request: (200, {"id": 7001})
    assert api.account() == (None, "")


@pytest.mark.parametrize("bid", [False, True])
def test_a_search_asks_for_what_the_query_says_and_nothing_else(api, server, bid):
    query = {"num_gpus": {"eq": 1}, "rentable": {"eq": True}}
    assert [row["id"] for row in api.search(query, bid, 100)] == [row["id"] for row in server.offers]
    assert server.calls("search")[0].body == {"num_gpus": {"eq": 1}, "rentable": {"eq": True}, "order": [["dph_total", "asc"]], "limit": 64,
                                              "type": "bid" if bid else "on-demand", "allocated_storage": 100}
    assert query == {"num_gpus": {"eq": 1}, "rentable": {"eq": True}}
    server.offers.clear()
    assert api.search(query, bid, 100) == []


def test_a_machine_is_made_with_both_ways_in_its_label_and_without_being_left_stopped(api, server):
    machine_id = str(server.offers[0]["machine_id"])
    machine = rent(api, server)
    body = server.calls("create")[0].body
    assert body["runtype"] == "ssh_direc ssh_proxy" and body["cancel_unavail"] is True and body["price"] is None
    assert (body["image"], body["disk"], body["label"], body["onstart"], body["env"]) == (IMAGE, 64, LABEL, "true", {"-p 70001:70001/udp": "1"})
    row = api.row(machine)
    assert (row.id, row.label, row.actual_status, row.public_ip, row.is_bid) == (machine, LABEL, "running", "127.0.0.1", False)
    assert row.ports["22/tcp"] and row.ssh_port and row.machine_id == machine_id
    assert stage(row, False).state == "up"


def test_a_bid_is_sent_as_the_price_and_one_too_low_is_an_offer_that_is_gone(api, server):
    error_of(OfferGoneError, rent, api, server, bid=0.1)
    assert api.row(rent(api, server, bid=0.2)).is_bid and server.calls("create")[1].body["price"] == 0.2


def test_destroyed_is_destroyed_and_again_is_no_error(api, server):
    machine = rent(api, server)
    api.destroy(machine)
    assert api.row(machine) is None and api.rows("gpurun-") == [] and not server.alive()
    for server.absent in ("404_instance", "404_not_found"):
        api.destroy(machine)
        assert api.row(machine) is None
    server.hook = lambda request: (200, {"instances": []})
    assert api.row(machine) is None


def test_a_listing_has_all_pages_and_counts_those_of_others(api, server):
    server.offers = [offer() for _ in range(60)]
    mine = [rent(api, server, offer_id=one["id"], label=f"gpurun-{number}" if number % 2 else ("theirs" if number % 4 else None))
            for number, one in enumerate(list(server.offers))]
    rows = api.rows("gpurun-")
    assert [row.id for row in rows] == mine[1::2] and rows.total == 60 and len(server.calls("list")) == 3
    assert [row.label for row in api.rows("gpurun-7")] == ["gpurun-7"]


def test_a_long_list_is_asked_for_at_the_services_pace_and_each_page_has_the_patience(api, server, monkeypatch):
    pages, asked = 20, []

    def page(request):
        asked.append(request.query.get("after_token"))
        if len(asked) % 2:                                              # each page is refused once
            return 429, "API requests too frequent"
        number = len(asked) // 2
        return 200, {"instances": [{"id": number, "label": f"gpurun-{number}"}], "total_instances": pages, "next_token": str(number) if number < pages else None}

    server.hook = page
    monkeypatch.setattr(vast_api, "PAGE_S", 0.05)
    monkeypatch.setattr(vast_api, "BACKOFF_S", {"slow down": (0.2,)})
    begun = time.monotonic()
    assert len(api.rows("gpurun-", patience_s=2.4)) == pages and len(asked) == 2 * pages
    assert time.monotonic() - begun > (pages - 1) * 0.05 + pages * 0.2   # twice the patience and more

    monkeypatch.setattr(vast_api, "PAGE_S", 3600)                        # who has few machines waits for nothing
    server.hook = lambda request: (200, {"instances": [{"id": 1, "label": "gpurun-1"}]})
    assert len(api.rows("gpurun-")) == 1


@pytest.mark.parametrize("shape", [{"key_field": "key"}, {"key_field": "public_key"}, {"key_field": "ssh_key"},
                                   {"keys_as": "wrapped"}, {"keys_as": "text"}, {"no_keys_404": True}])
def test_the_accounts_ssh_key_is_put_there_once_whatever_the_list_looks_like(api, server, shape):
    for name, value in shape.items():
        setattr(server, name, value)
    api.ensure_key(SSH_KEY)
    api.ensure_key(SSH_KEY.replace("gpurun", "another comment"))
    assert len(server.calls("ssh_create")) == 1 and server.calls("ssh_create")[0].body == {"ssh_key": SSH_KEY}
    server.ssh_keys[0]["deleted_at"] = "2026-01-01T00:00:00Z"
    api.ensure_key(SSH_KEY)
    assert len(server.calls("ssh_create")) == 2


@pytest.mark.parametrize("body", [{}, {"success": True, "keys": {"a": 1}}, "[not json", {"ssh_keys": "{"}])
def test_a_list_of_keys_that_makes_no_sense_does_not_mean_that_there_is_none(api, server, body):
    server.hook = lambda request: (200, json.dumps(body) if isinstance(body, str) else body)
    error_of(TemporaryError, api.ensure_key, SSH_KEY, patience_s=0)
    assert not server.calls("ssh_create")


def test_a_key_that_is_there_already_after_all_is_no_error(api, server):
    server.hook = lambda request: (400, {"success": False, "error": "duplicate", "msg": "key already exists"}) if request.method == "POST" else None
    api.ensure_key(SSH_KEY)
    api.attach_key("28123456", SSH_KEY)


def test_a_key_is_attached_and_a_teams_account_says_what_to_do(api, server):
    machine = rent(api, server)
    api.attach_key(machine, SSH_KEY)
    assert server.calls("ssh_attach")[0].body == {"ssh_key": SSH_KEY}
    server.fault("ssh_create", "team_keys")
    assert "team" in error_of(AccountError, api.ensure_key, SSH_KEY)


def test_logs_come_when_they_are_ready_without_the_key_and_never_as_an_error(api, server):
    server.script(logs="one\nbad ownership\n" + KEY, logs_after=1)
    machine = rent(api, server)
    assert api.logs(machine, 60) == "one\nbad ownership\n…"
    assert server.calls("object")[-1].bearer == "none"
    begun = time.monotonic()
    server.fault("object", "404_not_found", times=1000)
    assert api.logs(machine, 0.2) == "" and time.monotonic() - begun < 15
    for kind in ("401", "502", "dropped", "success_false", "empty200"):
        server.fault("logs", kind)
        assert api.logs(machine, 0.2) == ""


def test_ports_that_an_answer_about_one_machine_lacks_are_taken_from_the_list(api, server):
    server.script(ports_in="list")
    machine = rent(api, server)
    assert api.row(machine).ports["22/tcp"] and len(server.calls("list")) == 1
    server.fault("list", "502")
    assert api.row(machine).ports == {}


def test_threads_may_call_at_once(api, server):
    server.offers = [offer() for _ in range(16)]
    machines = []
    ids = [row["id"] for row in server.offers]
    threads = [threading.Thread(target=lambda found=found: machines.append(rent(api, server, offer_id=found, label=f"gpurun-{found}"))) for found in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(machines)) == 16 and {row.id for row in api.rows("gpurun-")} == set(machines)


# ---- a create that may have made a machine -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["gone_404", "gone_410", "gone_400"])
def test_an_offer_that_is_gone_is_known_in_all_its_dresses(api, server, kind):
    server.fault("create", kind)
    error_of(OfferGoneError, rent, api, server)
    assert len(server.calls("create")) == 1


@pytest.mark.parametrize("kind, word", [("no_credit", "credit"), ("402_no_credit", "credit"), ("spend_limit", "spending"), ("401", "$VAST_API_KEY"),
                                        ("401_2fa", "two-factor"), ("403", "permission"), ("403_args", "permission"), ("404_auth", "refuses the key")])
def test_what_no_other_offer_would_help_is_the_accounts(api, server, kind, word):
    server.fault("create", kind)
    assert word in error_of(AccountError, rent, api, server)
    assert len(server.calls("create")) == 1


def test_bad_arguments_and_a_request_too_many_made_nothing(api, server):
    server.fault("create", "too_long")
    assert "400/3471" in error_of(ProviderError, rent, api, server)
    server.fault("create", "429", retry_after=1)
    error_of(TemporaryError, rent, api, server)
    assert "3,999" not in error_of(ProviderError, rent, api, server, onstart="é" * 2000)
    assert len(server.calls("create")) == 2 and not server.instances
    rent(api, server, onstart="x" * 3999)


@pytest.mark.parametrize("kind, made", [("lost_answer", 1), ("dropped", 0), ("truncated", 1), ("html200", 1), ("empty200", 1), ("success_false", 0), ("500", 0),
                                        ("500_json", 0), ("502", 0), ("503", 0), ("504", 0), ("queued", 0), ("stall", 1), ("hang", 0)])
def test_a_create_whose_answer_is_no_clear_refusal_is_unclear_and_never_sent_again(api, server, kind, made):
    patience_s, api._vast.client.timeout = api._vast.client.timeout, 1.0 if kind in ("hang", "stall") else 60.0
    fault = server.fault("create", kind)
    text = error_of(UnclearError, rent, api, server)
    server.wait_for(lambda _: fault.hits and len(server.instances) == made)      # it may have been heard only now
    api._vast.client.timeout = patience_s
    assert "label" in text and len(server.calls("create")) == 1 and len(server.instances) == made
    assert [row.label for row in api.rows("gpurun-")] == [LABEL] * made


def test_an_error_with_a_machine_in_it_names_the_machine(api, server):
    server.fault("create", "error_with_contract")
    with pytest.raises(UnclearError) as raised:
        rent(api, server)
    assert raised.value.contract_id == str(next(iter(server.instances)))
    for body in ({"success": False, "new_contract": 5}, {"error": "bid_too_low", "new_contract": "5"}):
        server.hook = lambda request, body=body: (200 if "success" in body else 400, body)
        with pytest.raises(UnclearError) as raised:
            rent(api, server)
        assert raised.value.contract_id == "5"


@pytest.mark.parametrize("answer", [(200, {"success": True}), (200, {}), (200, []), (200, None), (200, {"success": True, "new_contract": None}),
                                    (400, "<html>bad request</html>"), (404, ""), (400, {}), (408, {"error": "timeout", "msg": "x"}),
                                    (400, {"success": True, "msg": "ok"})])
def test_an_answer_without_a_machine_or_a_reason_is_unclear(api, server, answer):
    server.hook = lambda request: answer if request.endpoint == "create" else None
    error_of(UnclearError, rent, api, server)


def test_a_create_that_never_left_is_only_a_failure(api, server):
    server.down()
    assert "refused" in error_of(TemporaryError, rent, api, server)
    server.up()


def test_a_name_that_is_not_found_is_told_in_plain_words(api, server, monkeypatch):
    def nowhere(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    assert "DNS" in error_of(TemporaryError, rent, api, server)
    assert "DNS" in error_of(TemporaryError, api.rows, "gpurun-", patience_s=0)


def test_a_proxy_that_lets_nothing_through_made_no_machine(server, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("VAST_URL", "https://vast.invalid")
    monkeypatch.setenv("HTTPS_PROXY", server.url)        # which doesn't know CONNECT
    assert "HTTPS_PROXY" in error_of(TemporaryError, rent, vast_api.Api(), server)


# ---- a listing is whole or an error ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("answer", [
    (200, {"success": False, "error": "server_error", "instances": []}), (200, {"success": True}), (200, []), (200, None), (200, {"instances": None}),
    (200, {"instances": {}}), (200, {"instances": [None]}), (200, {"instances": [], "total_instances": 1}), (200, {"instances": [], "next_token": 5}),
    (200, {"instances": [{"label": LABEL}]}), (200, {"instances": [{"id": None, "label": LABEL}]}), (200, {"instances": [], "next_token": "again"}),
    (200, "<html>hello</html>"), (200, ""), (502, "<html>"), (500, {"error": "x"}), (400, {"error": "invalid_args"}), (404, {"error": "not_found"}),
    (410, {"error": "gone", "msg": "use v2"}), (401, {"error": "auth_error"}), (429, "API requests too frequent")])
def test_a_listing_that_failed_or_makes_no_sense_is_never_an_empty_one(api, server, answer):
    server.hook = lambda request: answer if request.endpoint == "list" else None
    with pytest.raises(ProviderError) as raised:
        api.rows("gpurun-", patience_s=0)
    assert not isinstance(raised.value, UnclearError)


def test_a_page_that_fails_fails_the_listing_and_is_asked_for_again_within_the_patience(api, server):
    server.offers = [offer() for _ in range(30)]
    for one in list(server.offers):
        rent(api, server, offer_id=one["id"])
    server.fault("list", "502", nth=2)
    error_of(TemporaryError, api.rows, "gpurun-", patience_s=0)
    for kind in ("502", "dropped", "429", "empty200", "success_false", "truncated"):
        server.fault("list", kind, nth=2)
        assert len(api.rows("gpurun-")) == 30, kind


def test_an_api_that_is_gone_says_that_gpurun_is_too_old(api, server):
    server.hook = lambda request: (410, {"error": "gone"})
    assert "too old" in error_of(ProviderError, api.rows, "gpurun-")


@pytest.mark.parametrize("damage", [
    vast_rows.NO_START_DATE, vast_rows.NO_ENV, vast_rows.ENV_MISSING,
    {key: None for key in vast_rows.INSTANCE}, {key: vast_rows.MISSING for key in vast_rows.INSTANCE},
    {"ports": [], "ssh_port": "x", "start_date": "soon", "dph_total": {}, "public_ipaddr": 5, "gpu_name": ["x"], "num_gpus": -1, "actual_status": 7}])
def test_a_row_of_ours_that_has_lost_most_of_itself_is_still_in_the_listing(api, server, damage):
    server.script(row=damage)
    machine = rent(api, server)
    (row,) = api.rows("gpurun-")
    assert (row.id, row.label) == (machine, LABEL) == (api.row(machine).id, api.row(machine).label)
    assert stage(row, False).state and stage(row, True).state


@pytest.mark.parametrize("body", [{}, {"instances": {}}, {"instances": False}, {"instances": "x"}, {"instances": [{"id": 7}]}, {"instances": {"id": 7}},
                                  {"success": False, "instances": None}, [], None])
def test_an_answer_about_one_machine_that_makes_no_sense_does_not_mean_that_it_is_gone(api, server, body):
    server.hook = lambda request: (200, body)
    with pytest.raises(ProviderError):
        api.row("28123456")


@pytest.mark.parametrize("status, body, kind", [
    (404, {"error": "auth_error", "msg": "Invalid user key"}, AccountError), (404, "<html>404 Not Found</html>", TemporaryError),
    (404, {"error": "not_found", "msg": "Invalid user key"}, AccountError), (403, {"error": "not_authorized", "msg": "x"}, AccountError)])
def test_a_404_that_is_about_something_else_does_not_mean_that_a_machine_is_gone(api, server, status, body, kind):
    server.hook = lambda request: (status, body)
    error_of(kind, api.row, "28123456")
    error_of(kind, api.destroy, "28123456", patience_s=0)


def test_what_is_no_id_is_never_put_into_a_path(api, server):
    for bad in ("", "x", "1/../2", "-1", "0"):
        for call in (api.row, api.destroy, api.logs):
            with pytest.raises(ProviderError):
                call(bad)
    assert not server.requests


# ---- patience ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["429", "500", "502", "503", "504", "dropped", "lost_answer", "empty200", "html200", "truncated", "success_false"])
def test_destroying_is_asked_for_until_it_is_taken(api, server, kind):
    machine = rent(api, server)
    server.fault("destroy", kind, times=3)
    api.destroy(machine)
    assert not server.alive() and len(server.calls("destroy")) == 4


@pytest.mark.parametrize("kind, error", [("429", TemporaryError), ("502", TemporaryError), ("dropped", TemporaryError), ("success_false", TemporaryError),
                                         ("401", AccountError), ("403", AccountError), ("bad_id", ProviderError)])
def test_a_destroy_that_was_not_taken_is_an_error(api, server, kind, error):
    machine = rent(api, server)
    server.fault("destroy", kind, times=10 ** 6)
    text = error_of(error, api.destroy, machine, patience_s=1.0)
    assert machine in text and server.alive()
    assert (len(server.calls("destroy")) > 1) == (error is TemporaryError)


def test_retry_after_is_obeyed_up_to_the_patience(api, server):
    server.hook = lambda request: Answer(429, {"detail": "slow"}, {"Retry-After": "0.3"}) if len(server.requests) < 2 else None
    begun = time.monotonic()
    api.account()
    assert 0.3 <= time.monotonic() - begun < 15 and len(server.requests) == 2
    server.hook = lambda request: (429, {"error": "rate_limit_exceeded", "retry_after": 61})
    error_of(TemporaryError, api.account, patience_s=30)
    assert len(server.requests) == 3


def test_a_searchs_quota_of_the_day_is_not_asked_for_again(api, server):
    server.fault("search", "429_quota", times=10)
    assert "midnight" in error_of(ProviderError, api.search, {}, False, 64)
    assert len(server.calls("search")) == 1


def test_who_waits_is_told_why(server, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("VAST_URL", server.url)
    said = []
    server.fault("user", "502", times=2)
    vast_api.Api(said.append).account()
    assert len(said) == 1 and "HTTP 502" in said[0] and "look at the account" in said[0]


def test_who_waits_for_long_is_told_at_once_and_then_not_with_each_try(server, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("VAST_URL", server.url)
    said = []
    api = vast_api.Api(said.append)
    server.fault("user list", "502", times=16)
    api.account()
    assert len(said) == 1 and vast_api.TELL_S == 10
    server.fault("user list", "502", times=16)
    api.rows("gpurun-")                                                  # whatever is asked for next
    assert len(said) == 1
    monkeypatch.setattr(vast_api, "TELL_S", 0.05)
    server.fault("user", "502", times=16)
    begun = time.monotonic()
    api.account()
    assert 3 <= len(said) <= 2 + (time.monotonic() - begun) / 0.05


@pytest.mark.parametrize("answer, words", [
    ((401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}), ["the key from $VAST_API_KEY (HTTP", "netrc", "wins over", "Invalid user key"]),
    ((401, {"error": "auth_error", "msg": "This action needs Two Factor Authentication for this account."}), ["two-factor", "API key", "session"]),
    ((403, {"error": "not_authorized", "msg": "key lacks permission user_read"}), ["user_read", "instance_write"]),
    ((500, {"message": f"at https://x.example/a?api_key={KEY} for {KEY}"}), ["https://x.example/a for …"]),
    ((400, {"detail": "one\ntwo\x1b[31m"}), ["HTTP 400, one two [31m"]), ((502, "<html>bad</html>"), ["HTTP 502", "no word about why"])])
def test_an_error_says_what_happened_and_what_to_do_and_never_the_key(api, server, answer, words):
    server.hook = lambda request: answer
    with pytest.raises(ProviderError) as raised:
        api.account(patience_s=0)
    assert all(word in str(raised.value) for word in words) and KEY not in str(raised.value) and "api_key=" not in str(raised.value)
    assert KEY[-4:] not in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_netrc_that_replaces_the_key_is_named_in_the_error(api, server, tmp_path):
    (tmp_path / ".netrc").write_text("default login a password b\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert "netrc" in error_of(AccountError, api.account)


# ---- rows and what they mean ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value, ports", [
    ({"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "41234"}, {"HostIp": "::", "HostPort": "41235"}], "41236/udp": [{"HostPort": "41236"}]},
     {"22/tcp": 41234, "41236/udp": 41236}),
    ({"22/TCP": {"HostPort": 5}, "80": 81, "81/tcp": "82"}, {"22/tcp": 5, "80/tcp": 81, "81/tcp": 82}),
    ({"22/tcp": None, "1/tcp": [], "2/tcp": [None, {"HostPort": "x"}, {"HostPort": "7"}], "3/tcp": "70000", 4: 5}, {"2/tcp": 7}),
    (None, {}), ([], {}), ([22], {}), ("22", {})])
def test_ports_are_read_from_whatever_shape_they_have(value, ports):
    assert parse_row({"id": 1, "ports": value}).ports == ports


def test_text_of_a_row_is_one_printable_line():
    row = parse_row({"id": 1.0, "public_ipaddr": "203.0.113.7\n", "status_msg": "a\r\nb\x1b[2J\n", "actual_status": " Running\n", "dph_base": "0.5"})
    assert (row.id, row.public_ip, row.status_msg, row.actual_status, row.price_per_hour) == ("1", "203.0.113.7", "a b [2J", "running", 0.5)


@pytest.mark.parametrize("name, before, after", [
    ("st_running", "up", "up"), ("st_running_no_ports", "up", "up"), ("st_new", "coming", "doubtful"), ("st_created", "coming", "doubtful"),
    ("st_loading", "coming", "doubtful"), ("st_oci_failed", "host", "host"), ("st_cdi_failed", "host", "host"), ("st_pull_eof", "host", "host"),
    ("st_pull_limit", "host", "host"), ("st_image_missing", "image", "image"), ("st_no_space", "disk", "disk"), ("st_outbid", "outbid", "outbid"),
    ("st_all_stopped", "stopped", "stopped"), ("st_scheduling", "host", "host"), ("st_exited", "host", "stopped"), ("st_frozen", "stopped", "stopped"),
    ("st_offline", "host", "doubtful"), ("st_unknown", "host", "doubtful"), ("st_destroying", "stopped", "stopped"),
    ("st_rebooting", "coming", "doubtful")])
def test_each_state_of_a_machine_has_its_meaning_before_and_after_it_was_up(name, before, after):
    row = parse_row({"id": 1, **vast_rows.INSTANCE, **vast_rows.STATES[name]})
    for started, expected in ((False, before), (True, after)):
        found = stage(row, started)
        assert expected in (found.state, found.fault) and found.why
        assert (found.state == "broken") == bool(found.fault)


def test_every_state_that_the_server_plays_is_among_them():
    marks = next(mark for mark in test_each_state_of_a_machine_has_its_meaning_before_and_after_it_was_up.pytestmark if mark.name == "parametrize")
    assert {row[0] for row in marks.args[1]} == set(vast_rows.STATES)


@pytest.mark.parametrize("message, fault", [
    ("Error response from daemon: pull access denied for x, repository does not exist", "image"), ("UNAUTHORIZED: authentication required", "image"),
    ("Error response from daemon: toomanyrequests: unauthorized: pull limit", "host"), ("write /var/x: No space left on device", "disk"),
    ('failed to resolve reference "docker.io/a/b:1": docker.io/a/b:1: not found', "image"),
    ('failed to resolve reference "docker.io/a/b:1": dial tcp: i/o timeout', "host"), ("Failed to pull image", "host"),
    ("Error response from daemon: something new", "host")])
def test_a_bad_word_in_the_status_is_the_images_the_disks_or_the_hosts(message, fault):
    row = Row("1", actual_status="loading", intended_status="running", cur_state="running", next_state="running", status_msg=message)
    found = stage(row, False)
    assert (found.state, found.fault) == ("broken", fault) and message[:30] in found.why
    assert stage(row._replace(actual_status="running"), False).state == "up"


def test_being_outbid_is_told_apart_from_credit_that_is_used_up_as_far_as_it_goes():
    row = Row("1", actual_status="stopped", intended_status="running", is_bid=True)
    assert "outbid" in stage(row, True).why and "credit" in stage(row, True).why
    assert "outbid" not in stage(row._replace(is_bid=False), True).why and stage(row._replace(is_bid=False), True).fault == "outbid"


def test_a_machine_that_is_being_stopped_while_it_comes_up_has_failed():
    row = Row("1", actual_status="loading", intended_status="running", next_state="stopped")
    assert stage(row, False).fault == "stopped" and stage(row, True).state == "doubtful"
    assert stage(row._replace(actual_status="running"), False).fault == "stopped" and stage(row._replace(actual_status="running"), True).state == "doubtful"


def test_a_word_that_nobody_knows_is_waited_for_and_shown():
    assert stage(Row("1", actual_status="warming"), False) == ("coming", "Vast.ai calls it 'warming'", "")
    assert json.dumps(stage(Row("1"), False))
