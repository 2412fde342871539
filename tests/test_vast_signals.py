"""Ctrl-C in every phase of `--up --down`, once and more: the machine is gone before gpurun is, and outputs come home first."""

from __future__ import annotations

import json
import signal
import time

import pytest
from conftest import eventually
from rented import none_goes_on   # noqa: F401
from renter import renter   # noqa: F401
from running import Running
from signalled import END_S, PHASES, Signalled


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_once_ends_the_machine_and_what_there_is_comes_home(renter, phase):
    one = Signalled(renter, phase)
    code = one.send(signal.SIGINT)
    assert code == (0 if phase in ("collect", "down") else 130), one.run.err
    if phase in ("run", "down"):
        assert one.output == "kept\n"
    if phase == "collect":
        assert one.output == "01234" and (renter.latest / "outputs/out.txt").stat().st_size == 150 << 20
    renter.ended()
    assert renter.record()["state"] in ("FAILED", "COMPLETED", "STOPPED"), renter.record()["state"]
    assert renter.record()["exit_code"] == code


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_twice_ends_the_machine_at_once(renter, phase):
    one = Signalled(renter, phase)
    code = one.send(signal.SIGINT, signal.SIGINT)
    assert code == (0 if phase == "down" else 130) or phase == "collect" and code in (0, 130), one.run.err
    renter.ended()
    assert renter.record()["exit_code"] is not None


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_three_times_still_ends_the_machine_or_says_what_is_left(renter, phase):
    one = Signalled(renter, phase)
    code = one.send(*[signal.SIGINT] * 3)
    if code == 125:                       # while it was being ended: left at the operator's third word, and that was the last that was said
        assert phase in ("renting", "coming up", "preparing", "down") or phase == "collect" and one.output == "01234", one.run.err   # which may be over
        last = one.run.said[-1]
        assert "vastai destroy instance" in last and "an hour" in last, one.run.err
        told = renter.gpurun("status")
        assert "gpurun down" in told.stderr.decode().splitlines()[0]
        assert renter.gpurun("down").returncode == 0
    else:
        assert code in (0, 130), one.run.err
    renter.ended()


def test_a_provider_that_hangs_while_a_machine_is_prepared_does_not_hold_up_its_end(renter):
    from vast_server import Quirks
    renter.server.script(machine=Quirks(onstart=False, account_keys=False, attach_after=None))
    renter.server.fault("logs", "hang", times=99)
    run = Running(renter, renter.job("true"), "--up", "--down", pace="ssh_s=0.3")
    renter.server.wait_for(lambda server: server.calls("logs"))
    began = time.monotonic()
    run.signal(signal.SIGINT)
    run.process.wait(END_S)
    assert run.end() == 130 and time.monotonic() - began < 20, run.err
    renter.ended()


def test_a_run_that_is_left_in_its_last_moment_has_a_whole_record(renter):
    one = Signalled(renter, "down")
    one.send(*[signal.SIGINT] * 2)
    record = json.loads((renter.latest / "run.json").read_text())
    assert record["state"] == "COMPLETED" and record["cost"] > 0
    eventually(lambda: not renter.records)
