"""How rented machines end with their runs, and how gpurun knows when one is gone: the real command against the loopback server and real machines.

The provider's command line isn't used, so neither its waits nor its exit codes matter. An account that is a team's, and everything else before a
machine is there, is in test_vast_asking.py and test_vast_creating.py; signals are in test_vast_signals.py, limits in test_vast_limits.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from conftest import eventually
from rented import AT_WORK, at_work, destroyed_by_hand, downed, go, none_goes_on, until_go, upped   # noqa: F401
from renter import renter   # noqa: F401
from running import Running
from trees import tiny_disk
from vast_rows import offer


# ---- however the run goes -----------------------------------------------------------------------------------------------------------

def test_a_run_uses_no_call_of_the_provider_that_it_does_not_need(renter):
    done = renter.gpurun(renter.job("echo kept > out.txt", outputs=["out.txt"]), "--up", "--down")
    assert done.returncode == 0, done.stderr.decode()
    used = {one.endpoint for one in renter.server.requests}
    assert used <= {"user", "search", "list", "ssh_list", "ssh_create", "create", "show", "ssh_attach", "destroy"}
    body = renter.server.calls("create")[0].body
    assert body["cancel_unavail"] is True and ":" in body["image"] and body["label"] and body["price"] is None
    renter.ended()


@pytest.mark.parametrize("keys, code", [(dict(run="exit 7"), 7), (dict(run="true", setup="exit 5"), 5), (dict(run="kill -9 $$"), 137)],
                         ids=["job", "setup", "killed"])
def test_the_machine_goes_when_the_run_fails(renter, keys, code):
    done = renter.gpurun(renter.job(outputs=["out.txt"], **keys), "--up", "--down")
    assert done.returncode == code, done.stderr.decode()
    renter.ended()
    assert renter.record()["cost"] > 0 and "$" in done.stderr.decode().splitlines()[-1]


def test_the_machine_goes_when_an_output_is_not_there(renter):
    done = renter.gpurun(renter.job("true", outputs=["missing.txt"]), "--up", "--down")
    assert done.returncode == 0 and "missing: missing.txt" in done.stderr.decode(), done.stderr.decode()
    renter.ended()


def test_the_machine_goes_when_its_outputs_have_no_room_here(renter):
    with tiny_disk(renter.folder / "disk", "2m") as runs:
        done = renter.gpurun(renter.job("head -c 8M /dev/urandom > out.txt", outputs=["out.txt"]), "--up", "--down", "--runs-dir", runs)
        told = renter.gpurun("fetch", "latest", "--runs-dir", runs)
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 125 and "no room" in last and "went with it" in last and "--keep-on-failure" in last, done.stderr.decode()
    assert told.returncode == 125 and "went with it" in told.stderr.decode(), told.stderr.decode()
    renter.ended()


def test_outputs_that_have_no_room_here_are_waited_for_and_come_once_there_is_some(renter):
    with tiny_disk(renter.folder / "disk", "2m") as runs:
        run = Running(renter, renter.job("head -c 8M /dev/urandom > out.txt", outputs=["out.txt"]), "--up", "--down", "--runs-dir", runs, pace="room_s=60")
        run.until("Make room")
        subprocess.run(["mount", "-o", "remount,size=64m", str(runs)], check=True)
        assert run.end() == 0, run.err
        assert (runs / "latest/outputs/out.txt").stat().st_size == 8 << 20
        assert json.loads((runs / "latest/run.json").read_text())["state"] == "COMPLETED"
    renter.ended()


def test_a_full_disk_of_settings_keeps_no_machine_alive(renter):
    with tiny_disk(renter.folder / "disk", "16m") as disk:
        renter.env["GPURUN_CONFIG"] = str(disk / "config")
        run = at_work(renter, run=f"echo kept > out.txt; echo at-work; {until_go(renter)}")
        filled = os.open(disk / "filled", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(filled, b"x" * 4096)
        os.close(filled)
        go(renter)
        assert run.end() == 0, run.err
        assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
        renter.ended()
        assert not list((disk / "config/machines").glob("gpurun-*.json"))


def test_an_error_of_this_machine_in_the_middle_of_a_run_ends_the_rented_one(renter):
    run = at_work(renter, run=f"echo kept > out.txt; echo at-work; {until_go(renter)}")
    renter.latest.rename(renter.folder / "lost")   # at once: what is written there just now can't get in the way
    shutil.rmtree(renter.folder / "lost", ignore_errors=True)
    go(renter)
    run.end()                             # with which code depends on whether the outputs had a place before
    renter.ended()


def test_a_reader_of_the_output_that_has_had_enough_changes_nothing(renter):
    for name in ("stdout", "stderr"):
        process = renter.start(renter.job("seq 50000; echo kept > out.txt", outputs=["out.txt"]), "--up", "--down")
        stream, other = (process.stdout, process.stderr) if name == "stdout" else (process.stderr, process.stdout)
        stream.readline()
        stream.close()
        said = other.read().decode()
        assert process.wait(60) == 0, said
        assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
        renter.ended()


def test_a_workspace_that_is_not_there_rents_nothing(renter):
    done = renter.gpurun(renter.job("true", workspace={"workdir": "gone"}), "--up", "--down")
    assert done.returncode == 2 and renter.server.calls("create") == [], done.stderr.decode()


def test_an_output_that_leads_out_of_its_folder_is_not_followed_and_holds_nothing_up(renter):
    done = renter.gpurun(renter.job("mkdir out; ln -s /etc out/link; echo ok > out/fine", outputs=["out/"]), "--up", "--down")
    assert (renter.latest / "outputs/out/fine").read_text() == "ok\n", done.stderr.decode()
    assert not (renter.latest / "outputs/out/link/passwd").exists()
    renter.ended()


def test_a_failed_run_keeps_its_machine_as_long_as_was_said_and_shows_the_way_in(renter):
    done = renter.gpurun(renter.job("exit 3"), "--up", "--down", "--keep-on-failure", "1s")
    said = done.stderr.decode()
    assert done.returncode == 3 and "ssh -i" in said, said
    one = next(iter(renter.server.instances.values()))
    assert one.destroyed_at - one.created_at > 1.0
    renter.ended()


def test_a_machine_kept_after_a_failure_goes_at_ctrl_c(renter):
    run = Running(renter, renter.job("exit 3"), "--up", "--down", "--keep-on-failure", "30m")
    run.until("ssh -i")
    run.signal(signal.SIGINT)
    assert run.end() == 3, run.err
    renter.ended()


def test_a_run_that_succeeded_keeps_nothing(renter):
    began = time.monotonic()
    assert renter.gpurun(renter.job("true"), "--up", "--down", "--keep-on-failure", "30m").returncode == 0
    assert time.monotonic() - began < 60
    renter.ended()


def test_a_machine_that_never_came_is_not_kept(renter):
    renter.server.offers[:] = []
    done = renter.gpurun(renter.job("true"), "--up", "--down", "--keep-on-failure", "30m")
    assert done.returncode == 125 and renter.server.calls("create") == [], done.stderr.decode()


# ---- machines that go by themselves -------------------------------------------------------------------------------------------------

def test_a_machine_destroyed_by_hand_ends_the_run_at_once(renter):
    run = at_work(renter)
    one = renter.server.alive()[0]
    began = time.monotonic()
    destroyed_by_hand(renter, one)
    code = run.end()
    assert code == 125 and time.monotonic() - began < 30, run.err
    assert "exist" in renter.record()["reason"]
    renter.ended()


@pytest.mark.parametrize("absent", ["null", "404_instance", "404_not_found"])
def test_down_is_content_when_somebody_else_was_faster(renter, absent):
    renter.server.absent = absent
    destroyed_by_hand(renter, upped(renter)[0])
    downed(renter)
    downed(renter)


def test_a_run_hears_at_once_that_somebody_brings_its_machine_down(renter):
    upped(renter)
    run = Running(renter, renter.job(AT_WORK, outputs=["out.txt"]))
    eventually(lambda: any("at-work" in line for line in run.printed), 60)
    downed(renter, "--yes")
    assert run.end() == 125 and "node1: " in renter.record()["reason"] and "node1: node1" not in run.err, run.err   # its words depend on who saw it first


def test_down_leaves_a_machine_that_another_gpurun_has_for_its_run(renter):
    run = at_work(renter)
    assert renter.gpurun("down").returncode == 0 and len(renter.server.alive()) == 1
    downed(renter, "--all", "--yes")
    assert run.end() == 125, run.err
    renter.ended()


def test_an_outbid_machine_is_a_lost_node_at_once_and_is_destroyed(renter):
    renter.cluster(bid=0.25)
    run = at_work(renter)
    one = renter.server.alive()[0]
    began = time.monotonic()
    renter.server.step(one, "st_outbid")
    code = run.end()
    assert code == 125 and time.monotonic() - began < 30, run.err
    assert "outbid" in renter.record()["reason"]
    renter.ended()


def test_an_outbid_machine_that_resumes_starts_nothing_by_itself(renter):
    renter.cluster(bid=0.25)
    run = at_work(renter, run="echo once >> /root/count; " + AT_WORK)
    run.signal(signal.SIGKILL)
    one = renter.server.alive()[0]
    renter.server.step(one, "st_outbid")
    (one.machine.home / ".gpurun-onstart").unlink(missing_ok=True)
    renter.server.step(one, "st_running")
    eventually(lambda: (one.machine.home / ".gpurun-onstart").exists())
    assert (one.machine.home / "count").read_text() == "once\n"
    assert not any("sleep 120" in command for command in one.machine.processes().values())
    downed(renter)


def test_credit_that_is_used_up_is_said_to_be_and_the_machine_destroyed(renter):
    run = at_work(renter)
    renter.server.account["credit"] = 0.0
    renter.server.wait_for(lambda server: server.alive()[0].status == "stopped")
    code = run.end()
    assert code == 125 and "credit" in renter.record()["reason"], run.err
    renter.ended()


def test_too_little_credit_rents_nothing(renter):
    renter.server.account["credit"] = 0.01
    done = renter.gpurun(renter.job("true"), "--up", "--down")
    assert done.returncode == 125 and "credit" in done.stderr.decode(), done.stderr.decode()
    assert renter.server.calls("create") == []


def test_a_host_whose_contract_ends_before_the_limit_is_not_rented(renter):
    renter.server.offers[:] = [offer(duration=600.0)]
    done = renter.gpurun(renter.job("true"), "--up", "--down")
    assert done.returncode == 125 and renter.server.calls("create") == [], done.stderr.decode()


# ---- detached runs ------------------------------------------------------------------------------------------------------------------

def test_a_detached_run_keeps_its_machine_and_its_outputs_come_home_later(renter):
    upped(renter)
    done = renter.gpurun("submit", renter.job("echo kept > out.txt", outputs=["out.txt"]))
    assert done.returncode == 0, done.stderr.decode()
    assert len(renter.server.alive()) == 1
    done = renter.gpurun("attach", done.stdout.decode().strip())
    assert done.returncode == 0 and (renter.latest / "outputs/out.txt").read_text() == "kept\n", done.stderr.decode()
    assert len(renter.server.alive()) == 1
    downed(renter)


def test_submit_up_rents_and_leaves(renter):
    done = renter.gpurun("submit", renter.job("echo kept > out.txt", outputs=["out.txt"]), "--up")
    assert done.returncode == 0, done.stderr.decode()
    assert "gpurun down" not in renter.gpurun("status").stderr.decode()      # it is meant to stand
    assert renter.gpurun("attach", "latest").returncode == 0
    assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
    downed(renter, "--all")


def test_down_and_detach_together_are_refused_before_anything_is_rented(renter):
    done = renter.gpurun("run", renter.job("true"), "--up", "--down", "--detach")
    assert done.returncode == 2 and renter.server.requests == []
