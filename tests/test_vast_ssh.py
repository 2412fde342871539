"""SSH to rented machines, with whatever their two ways in and their containers do: the real command against the loopback server and real sshds.

UDP that is filtered can't be staged here, since a container has this machine's network; here a node is remembered as one without UDP. That
a proxy shows another host key than the container isn't known of any; each way has its own pin.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import requests
from conftest import eventually
from renter import Renter, renter   # noqa: F401
from vast_rows import offer
from vast_server import Quirks

FRESH = True
JOB = "echo hello"
BROKEN_KEYS = dict(onstart=False, account_keys=False, attach_after=None)


def runs(renter: Renter, **options) -> str:
    """A run that must succeed and leave nothing; what gpurun said."""
    done = renter.gpurun(renter.job(JOB), "--up", "--down", **options)
    assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr.decode()
    renter.ended()
    assert renter.server.leaks() == []
    return done.stderr.decode()


def two_hosts(renter: Renter, **quirks) -> None:
    """The cheaper host has these quirks, the other one none."""
    renter.server.offers[:] = [offer(machine_id=11, dph_base=0.2), offer(machine_id=12)]
    renter.server.script(11, machine=Quirks(**quirks))


def used(renter: Renter) -> list[int]:
    return [one.offer["machine_id"] for one in renter.server.instances.values()]


def avoided(renter: Renter) -> dict:
    return json.loads((renter.home / ".config/gpurun/machines/avoid.json").read_text())


def upped(renter: Renter, *args, **options) -> dict:
    """The record of a machine that `gpurun up` has brought up."""
    done = renter.gpurun("up", *args, **options)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(renter.records[0].read_text())


def downed(renter: Renter) -> None:
    done = renter.gpurun("down")
    assert done.returncode == 0, done.stderr.decode()
    renter.ended()


# ---- the key ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("quirks", [dict(account_keys=False, attach_after=None), dict(onstart=False, account_keys=False),
                                    dict(onstart=False, account_keys=False, attach_after=0.6), dict(onstart=False, attach_after=None)],
                         ids=["only by onstart", "only attached", "attached late", "only of the account"])
def test_the_key_gets_in_by_any_one_of_its_three_ways(renter, quirks):
    renter.server.script(machine=Quirks(**quirks))
    runs(renter)
    assert len(renter.server.instances) == 1


def test_a_machine_that_never_gets_the_key_is_blamed_and_left_for_the_next(renter):
    two_hosts(renter, **BROKEN_KEYS)
    said = runs(renter, pace="ssh_s=1")
    assert used(renter) == [11, 12] and list(avoided(renter)) == ["11"]
    assert "of no use" in said and "key" in said


def test_the_key_is_registered_before_a_machine_is_asked_for_and_is_no_second_one_the_next_time(renter):
    upped(renter)
    calls = [one.endpoint for one in renter.server.requests if one.endpoint in ("ssh_create", "create", "ssh_attach")]
    assert calls == ["ssh_create", "create", "ssh_attach"]
    downed(renter)
    upped(renter)
    assert len(renter.server.calls("ssh_create")) == 1
    downed(renter)


def test_authorized_keys_that_sshd_refuses_to_read_are_the_hosts_fault_and_its_log_is_told(renter):
    two_hosts(renter, onstart=False, bad_ownership=True)
    said = runs(renter, pace="ssh_s=1")
    assert used(renter) == [11, 12] and list(avoided(renter)) == ["11"]
    assert "bad ownership or modes" in said
    asked, ended = renter.server.calls("logs")[0], renter.server.calls("destroy")[0]
    assert asked.time < ended.time


# ---- two ways in --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("direct", ["stall", "refuse", "reset", "close"])
def test_a_direct_way_that_leads_nowhere_is_passed_by(renter, direct):
    renter.server.script(machine=Quirks(direct=direct))
    assert upped(renter, pace="way_s=2")["facts"]["way"] == "proxy"
    downed(renter)


@pytest.mark.parametrize("proxy", ["stall", "refuse", "close"])
def test_both_ways_are_tried_again_until_one_leads_there(renter, proxy):
    renter.server.script(machine=Quirks(direct="refuse", proxy=proxy))

    def open_the_direct_way() -> None:
        one = renter.server.wait_for(lambda server: next(iter(server.instances.values()), None))
        if proxy == "refuse":
            assert one.machine.said("Server listening")   # nobody sees a connection that is refused
        else:
            eventually(lambda: one.ways["proxy"].connections)
        one.ways["direct"].mode = "pass"

    threading.Thread(target=open_the_direct_way, daemon=True).start()
    assert upped(renter, pace="way_s=1")["facts"]["way"] == "direct"
    downed(renter)


def test_a_host_without_open_ports_is_reached_by_the_proxy(renter):
    renter.server.script(row={"ports": {}})
    assert upped(renter)["facts"]["way"] == "proxy"
    downed(renter)


@pytest.mark.parametrize("missing", [{"ssh_host": None, "ssh_port": None}, {"ssh_host": "", "ssh_port": 0}])
def test_a_proxy_that_is_not_published_is_not_missed(renter, missing):
    renter.server.script(row=missing)
    assert upped(renter)["facts"]["way"] == "direct"
    downed(renter)


def test_no_way_in_at_all_ends_the_machine_and_says_what_was_tried(renter):
    renter.server.offers[:] = [offer(machine_id=11)]
    renter.server.script(machine=Quirks(direct="refuse", proxy="close"))
    done = renter.gpurun("up", pace="ssh_s=0.5")
    said = done.stderr.decode()
    assert done.returncode == 125 and "direct and proxy" in said, said
    assert list(avoided(renter)) == ["11"]
    renter.ended()


def test_ports_that_only_one_of_the_answers_has_are_found(renter):
    for where in ("list", "show"):
        renter.server.script(ports_in=where)
        assert upped(renter)["facts"]["way"] == "direct", where
        downed(renter)


def test_the_newline_after_an_address_is_no_part_of_it(renter):
    facts = upped(renter)["facts"]
    one = renter.server.alive()[0]
    assert one.row(renter.server.now(), "show")["public_ipaddr"] == "127.0.0.1\n"
    assert facts["ip"] == "127.0.0.1" and ["direct", "127.0.0.1", one.ports["direct"]] in facts["ways"]
    shown = renter.gpurun("ssh", "node1", "echo", "there")
    assert (shown.returncode, shown.stdout) == (0, b"there\n"), shown.stderr.decode()
    downed(renter)


# ---- what a container's shell does --------------------------------------------------------------------------------------------------

def test_the_banner_is_in_no_answer_and_no_output_of_the_job(renter):
    said = runs(renter)
    assert "Have fun" not in said


def test_a_shell_that_talks_on_stdout_is_not_taken_for_an_answer(renter):
    noise = "echo '  ** this host is fast **'; echo GPURUN; echo '{\"id\": 1}'; echo oops >&2\n"
    renter.server.script(machine=Quirks(files={".bashrc": noise, ".profile": noise, ".bash_profile": noise}))
    runs(renter)


def test_commands_that_a_tmux_hook_swallowed_are_given_again(renter):
    renter.server.script(machine=Quirks(tmux=True))
    runs(renter)


def test_a_hook_that_swallows_every_command_makes_a_machine_useless_not_a_run_that_succeeded(renter):
    two_hosts(renter, tmux=True, onstart=False)
    runs(renter, pace="ssh_s=1")
    assert used(renter) == [11, 12]


def test_sshd_that_comes_seconds_after_running_is_waited_for(renter):
    renter.server.script(machine=Quirks(ssh_after=1.0))
    runs(renter)
    assert len(renter.server.instances) == 1


def test_the_agent_is_on_the_port_that_is_the_same_outside(renter):
    upped(renter)
    one = renter.server.alive()[0]
    endpoint = json.loads((one.machine.home / ".gpurun/agent/endpoint.json").read_text())
    assert endpoint["port"] == one.udp[70001, "udp"]
    downed(renter)


@pytest.mark.parametrize("by", ["real", "asked"])
def test_without_its_environment_the_container_is_used_all_the_same(renter, by):
    renter.server.script(ports_by=by, machine=Quirks(without=("VAST_UDP_PORT_70001", "PUBLIC_IPADDR", "VAST_TCP_PORT_22")))
    runs(renter)


# ---- host keys ----------------------------------------------------------------------------------------------------------------------

def test_an_address_that_another_machine_had_before_is_no_changed_host_key(renter):
    theirs = renter.home / ".ssh/known_hosts"
    theirs.parent.mkdir(mode=0o700)
    theirs.write_text("# mine\n")
    from vast_machine import free_ports
    renter.server.script(direct_port=free_ports(1)[0])
    for _ in range(2):
        upped(renter)
        downed(renter)
    first, second = renter.server.instances.values()
    assert first.ports["direct"] == second.ports["direct"] and theirs.read_text() == "# mine\n"
    assert not list((renter.home / ".config/gpurun/machines").glob("*.known_hosts"))


def reboot(renter: Renter) -> None:
    one = renter.server.alive()[0]
    requests.put(f"{renter.server.url}/api/v0/instances/reboot/{one.id}/", json={}, headers={"Authorization": f"Bearer {renter.server.key}"})
    renter.server.wait_for(lambda server: one.machine.starts == 2 and one.machine.ready(0.1))


def test_a_host_key_that_changes_while_the_machine_is_ours_is_an_error(renter):
    from vast_machine import free_ports
    renter.server.script(direct_port=free_ports(1)[0], machine=Quirks(new_host_key=True, proxy="refuse"))
    upped(renter)
    reboot(renter)
    done = renter.gpurun(renter.job(JOB))
    said = done.stderr.decode()
    assert done.returncode == 125 and "host key" in said and not done.stdout, said
    downed(renter)


def test_where_no_udp_gets_through_a_run_goes_over_the_way_that_works_and_finds_one_that_moved(renter):
    renter.server.script(machine=Quirks(direct="refuse"), moves=True)
    assert upped(renter)["facts"]["way"] == "proxy"
    for moved in (False, True):
        (cache,) = (renter.home / ".config/gpurun/nodes").glob("*.json")
        cache.write_text(json.dumps(dict(json.loads(cache.read_text()), blocked=True, retry_at=time.time() + 3600)))
        if moved:
            reboot(renter)
        done = renter.gpurun(renter.job(JOB))
        assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr.decode()
        assert renter.record()["path"] == "ssh" and b"going over SSH" in done.stderr
    downed(renter)


def test_addresses_that_moved_are_asked_for_again(renter):
    renter.server.script(moves=True)
    before = upped(renter)["facts"]["ways"]
    reboot(renter)
    done = renter.gpurun(renter.job(JOB))
    assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr.decode()
    assert json.loads(renter.records[0].read_text())["facts"]["ways"] != before
    downed(renter)


def test_the_account_keys_of_others_and_their_files_stay_as_they_are(renter):
    theirs = renter.server.add_key("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAM laptop")
    runs(renter)
    assert theirs["deleted_at"] is None
    assert Path(renter.home / ".config/gpurun/ssh_key").stat().st_mode & 0o077 == 0
