"""`gpurun doctor` for a cluster that is rented: what it finds of the key, the account, the offers and the machines, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from renter import Renter, paper, renter   # noqa: F401

ACCOUNT, KEYS, OFFERS, MACHINES = ("Vast.ai account (user_read)", "SSH key for Vast.ai (user_read)", "Vast.ai offers (misc)",
                                   "Vast.ai machines (instance_read)")


def checks(renter: Renter, code: int = 0, **options: Any) -> dict[str, tuple[bool | None, str]]:
    """What doctor says, by name. That nothing was changed by it is asserted each time."""
    before = files(renter)
    asked = len(renter.server.requests)
    done = renter.gpurun("doctor", "--json", **options)
    assert done.returncode == code, done.stdout.decode() + done.stderr.decode()
    new = [one for one in renter.server.requests[asked:]]
    assert {one.endpoint for one in new} <= {"user", "list", "ssh_list", "search"}, "it only looks"
    assert files(renter) == before and renter.server.leaks() == []
    assert renter.server.key.encode() not in done.stdout + done.stderr
    return {one["name"]: (one["ok"], one["text"]) for one in map(json.loads, done.stdout.splitlines()) if one["type"] == "check"}


def files(renter: Renter) -> dict[str, bytes]:
    folder = renter.home / ".config"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def record(renter: Renter, label: str = "", **fields: Any) -> str:
    """A record of a machine, as a gpurun that was killed leaves one."""
    folder = renter.home / ".config/gpurun/machines"
    folder.mkdir(parents=True, exist_ok=True)
    label = label or "gpurun-0123abcd-0123abcd-1-0123ab"
    facts = {"kind": "vastai", "cluster": "/c.toml", "price_per_hour": 0.5, **fields.pop("facts", {})}
    (folder / f"{label}.json").write_text(json.dumps({"version": 1, "index": 1, "begun": 1.0, "ended": 3601.0, **fields, "facts": facts}))
    return label


def rent(renter: Renter, label: str) -> Any:
    """A machine of that label, rented by somebody else than this test's gpurun."""
    import urllib.request
    body = json.dumps({"client_id": "me", "image": "x:1", "disk": 16, "label": label, "env": {}, "onstart": "", "runtype": "ssh_direc ssh_proxy"})
    request = urllib.request.Request(f"{renter.server.url}/api/v0/asks/{renter.server.offers[0]['id']}/", body.encode(), method="PUT", headers={
        "Authorization": f"Bearer {renter.server.key}", "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return renter.server.instances[int(json.load(answer)["new_contract"])]


def test_a_fresh_account_is_looked_at_and_nothing_is_made(paper):
    said = checks(paper)
    assert said["key"][0] is None and said[KEYS][0] is None and "none yet" in said[KEYS][1]
    assert said["Vast.ai key"] == (True, f"$VAST_API_KEY (…kkkk); {paper.server.url}; SDK {said['Vast.ai key'][1].rpartition(' ')[2]}")
    assert said[ACCOUNT] == (True, "dev, credit $100.00")
    assert said[OFFERS][0] is True and said[OFFERS][1].startswith("4 of 4 fit, from $0.363/h (1 × RTX 4090, Sweden, SE)")
    assert said[MACHINES] == (True, "0 machines on the account, 0 of them by gpurun")
    assert not (paper.home / ".config/gpurun").exists()
    assert not [name for name in said if name.startswith(("machine", "node"))]


@pytest.mark.parametrize("endpoint, name", [("user", ACCOUNT), ("ssh_list", KEYS), ("search", OFFERS), ("list", MACHINES)])
def test_each_permission_that_is_refused_is_named_with_what_to_do_and_the_others_are_still_tried(paper, endpoint, name):
    paper.server.fault(endpoint, "403", times=99)
    said = checks(paper, 125)
    assert [one for one, (ok, _) in said.items() if ok is False] == [name]
    assert "the key from $VAST_API_KEY may not do it" in said[name][1] and "https://cloud.vast.ai/manage-keys/" in said[name][1]


def test_a_wrong_key_is_told_by_its_source_and_its_last_letters(paper):
    path = paper.home / ".config/vastai/vast_api_key"
    path.parent.mkdir(parents=True)
    path.write_text("x" * 30 + "wxyz\n")
    said = checks(paper, 125, env={name: value for name, value in paper.env.items() if name != "VAST_API_KEY"})
    assert said["Vast.ai key"][1].startswith(f"{path} (…wxyz)")
    assert said[ACCOUNT][0] is False and f"it refuses the key from {path} (HTTP" in said[ACCOUNT][1] and "wxyz" not in said[ACCOUNT][1]


def test_without_a_key_or_the_sdk_it_says_where_it_belongs_and_goes_on_with_the_records(paper, tmp_path):
    label = record(paper)
    env = {name: value for name, value in paper.env.items() if name != "VAST_API_KEY"}
    said = checks(paper, 125, env=env)
    assert said["Vast.ai key"][0] is False and "set $VAST_API_KEY" in said["Vast.ai key"][1] and ACCOUNT not in said
    assert said[f"machine {label}"][0] is None and "nobody could be asked" in said[f"machine {label}"][1]
    (tmp_path / "vastai.py").write_text("raise ImportError('No module named vastai')\n")
    said = checks(paper, 125, env={**paper.env, "PYTHONPATH": f"{tmp_path}:{paper.env['PYTHONPATH']}"})
    assert said["Vast.ai key"][0] is False and "pip install 'gpurun[vastai]'" in said["Vast.ai key"][1]


def test_an_account_without_money_fails_and_one_that_says_nothing_of_it_doesnt(paper):
    paper.server.account["credit"] = -0.5
    said = checks(paper, 125)
    assert said[ACCOUNT] == (False, "dev, credit $0.00: add some at https://cloud.vast.ai/billing/")
    del paper.server.account["credit"]
    paper.server.hook = lambda request: (200, {"id": 1, "username": "dev"}) if request.endpoint == "user" else None
    paper.server.account["credit"] = 100.0
    assert checks(paper)[ACCOUNT] == (None, "dev, which doesn't say what its credit is")


def test_that_nothing_fits_is_a_remark_with_what_is_in_the_way(paper):
    paper.cluster(selection={"max_price_per_hour": 0.1})
    ok, text = checks(paper)[OFFERS]
    assert ok is None and "max_price_per_hour" in text


def test_a_service_that_cant_be_reached_is_asked_once_and_not_for_long(paper):
    label = record(paper, id="28123456")
    paper.server.down()
    said = checks(paper, 125)
    assert said[ACCOUNT][0] is False and "try again later" in said[ACCOUNT][1] and OFFERS not in said and MACHINES not in said
    assert said["machine 28123456"] == (None, "node1 of /c.toml, not ready, $0.500/h, $0.500 so far; it could not be asked") and label
    paper.server.up()


def test_each_record_is_held_against_the_providers_list(paper):
    known, gone, ending = (f"gpurun-0123abcd-0123abcd-{number}-0123ab" for number in (1, 2, 3))
    there, still = rent(paper, known), rent(paper, ending)
    record(paper, known, id=str(there.id), ready=True)
    record(paper, gone, id="9", index=2)
    record(paper, ending, id=str(still.id), index=3, wanted=False)
    said = checks(paper, 125)
    assert said[MACHINES] == (True, "2 machines on the account, 2 of them by gpurun")
    assert said[f"machine {there.id}"] == (True, "node1 of /c.toml, ready, $0.500/h, $0.500 so far, and Vast.ai lists it")
    assert said["machine 9"][0] is None and "Vast.ai doesn't list it" in said["machine 9"][1]
    assert said[f"machine {still.id}"][0] is False and f"gpurun down {still.id}" in said[f"machine {still.id}"][1]
    record(paper, known, id=str(there.id), ready=True, facts={"guarded": False})
    assert "can't end itself" in checks(paper, 125)[f"machine {there.id}"][1]


def test_a_machine_of_ours_without_a_record_fails_with_what_it_costs(paper):
    import hashlib
    key = paper.home / ".config/gpurun/key"
    key.parent.mkdir(parents=True)
    key.write_text("ab" * 32 + "\n")
    key.chmod(0o600)
    from gpurun import machines
    mark = hashlib.sha256(b"gpurun machines " + key.read_bytes()).hexdigest()
    ours = rent(paper, machines.prefix_of(mark, "cluster x") + "1-abcdef")
    rent(paper, machines.prefix_of("of another operator", "cluster x") + "1-abcdef")
    said = checks(paper, 125)
    assert [name for name, (ok, _) in said.items() if ok is False] == [f"machine {ours.id}"]
    assert "has no record here and costs $0.3" in said[f"machine {ours.id}"][1] and "gpurun down --all" in said[f"machine {ours.id}"][1]


def test_a_machine_that_stands_is_asked_itself(renter):
    assert renter.gpurun("up").returncode == 0
    said = checks(renter)
    (one,) = renter.server.alive()
    assert said[KEYS] == (True, f"{renter.home}/.config/gpurun/ssh_key, on the account")
    assert said[f"machine {one.id}"][0] is True and "ready, $0.363/h" in said[f"machine {one.id}"][1]
    assert said["node node1"][0] is True and said["node node1"][1].startswith("idle; agent ")
    for path in (renter.home / ".config/gpurun/nodes").glob("*.json"):
        path.unlink()
    assert checks(renter)["node node1"] == (None, "no agent is known there; the next run brings one, over SSH")
    assert renter.gpurun("down").returncode == 0
    renter.ended()
