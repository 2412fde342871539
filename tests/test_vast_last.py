"""What the last reader of rented machines found: settings that can't be written any more, a signal in the gap between two that heed it, a machine that
shows too late, and a fault of this machine that no host is to blame for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time

import pytest
from conftest import eventually
from rented import at_work, go, none_goes_on, until_go   # noqa: F401
from renter import paper, renter   # noqa: F401
from running import Running
from trees import tiny_disk
from vast_machine import Quirks


def test_settings_that_can_not_be_written_any_more_keep_no_machine_alive(renter):
    with tiny_disk(renter.folder / "disk", "32m") as disk:
        renter.env["GPURUN_CONFIG"] = str(disk / "config")
        run = at_work(renter, run=f"echo kept > out.txt; echo at-work; {until_go(renter)}")
        subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
            go(renter)
            assert run.end() == 0, run.err
            assert (renter.latest / "outputs/out.txt").read_text() == "kept\n" and renter.server.alive() == []
            assert renter.gpurun("down").returncode == 0
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01], ids=str)
def test_a_signal_just_when_the_machine_is_up_ends_it_and_the_run(renter, number, after_s):
    run = Running(renter, renter.job("sleep 60", outputs=[]), "--up", "--down")
    eventually(lambda: any(re.search(r"up: (1 node in )?[0-9.]+ s", line) for line in run.said) or run.process.poll() is not None, 60)
    time.sleep(after_s)
    assert run.signal(number).end() == 130, run.err
    assert renter.record()["state"] == "FAILED", run.err
    renter.ended()


def test_a_storm_of_signals_while_a_machine_comes_leaves_it_with_its_id_and_price_or_ends_it(renter):
    renter.server.script(steps=((0.1, "st_loading"), (600.0, "st_running")))
    run = Running(renter, renter.job("true"), "--up", "--down")
    run.until("loading")
    for _ in range(9):
        run.signal(signal.SIGINT)
        time.sleep(0.03)
    code = run.end()
    one, = renter.server.instances.values()
    if code == 125:                          # also of one whose end was on its way already, and not proven
        assert str(one.id) in run.err.splitlines()[-1] and "vastai destroy instance" in run.err.splitlines()[-1], run.err
        assert renter.gpurun("down").returncode == 0
    else:
        assert code == 130 and not one.alive, run.err
    assert renter.record()["state"] == "FAILED"
    renter.ended()


def test_a_machine_that_shows_after_it_was_given_up_is_ended_all_the_same(paper):
    paper.server.script(visible_after=3.0)
    up = Running(paper, "up")
    eventually(lambda: len(paper.server.instances) > 1 or up.process.poll() is not None, 60)   # settle_s has passed, and another one was asked for
    assert up.signal(signal.SIGINT).end() == 130, up.err
    assert paper.server.calls("destroy") and paper.server.most_alive <= 1
    paper.ended()


def test_a_machine_without_a_record_of_whatever_run_is_named_by_nodes_and_down(renter):
    run = at_work(renter)
    run.process.kill()
    run.process.wait()
    for path in renter.records:
        path.unlink()
    one, = renter.server.alive()
    shown = renter.gpurun("nodes")
    assert str(one.id) in shown.stdout.decode() and "no record here" in shown.stdout.decode()
    down = renter.gpurun("down")
    assert str(one.id) in down.stderr.decode() and "gpurun down --all" in down.stderr.decode() and "nothing of it is left" not in down.stderr.decode()
    assert renter.gpurun("down", "--all").returncode == 0
    renter.ended()


def test_a_full_disk_of_this_machine_blames_no_host_and_rents_no_second_machine(renter):
    renter.server.script(machine=Quirks())           # a fresh one: iroh has to be packed here for it
    with tiny_disk(renter.folder / "cache", "1m") as cache:
        (cache / "filled").write_bytes(b"x" * 1020 * 1024)
        renter.env["XDG_CACHE_HOME"] = str(cache)
        done = renter.gpurun("up")
    assert done.returncode != 0 and len(renter.server.calls("create")) == 1, done.stderr.decode()
    assert "cache of gpurun" in done.stderr.decode() and "No space left" in done.stderr.decode(), done.stderr.decode()
    avoided = renter.home / ".config/gpurun/machines/avoid.json"
    assert not avoided.exists() or json.loads(avoided.read_text()) == {}
    renter.ended()


def test_down_without_a_terminal_says_whose_run_goes(renter):
    assert renter.gpurun("up").returncode == 0
    run_id = renter.gpurun("submit", renter.job("sleep 60")).stdout.decode().strip()
    down = renter.gpurun("down")
    assert down.returncode == 0 and f"node1 has the run {run_id}; it goes with it" in down.stderr.decode(), down.stderr.decode()
    renter.ended()


def test_the_last_object_has_the_exit_code_of_gpurun_where_a_machine_is_left(renter):
    renter.server.fault("destroy", "500", times=10_000)
    done = renter.gpurun(renter.job("true"), "--up", "--down", "--json", pace="patience_s=1.5")
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 125 and last["exit_code"] == 125 and "could not be ended" in last["left"][0], done.stdout.decode()
