"""SIGTERM and SIGHUP, terminals that are closed, and what is asked on them: `--up --down` ends its machine all the same."""

from __future__ import annotations

import signal

import pytest
from rented import go, none_goes_on, until_go   # noqa: F401
from renter import renter   # noqa: F401
from signalled import END_S, OUTPUT, SLOW, Signalled, Terminal


@pytest.mark.parametrize("phase", ["renting", "coming up", "setup", "run", "collect"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_term_and_hup_end_the_machine_as_ctrl_c_does(renter, phase, number):
    one = Signalled(renter, phase)
    code = one.send(number)
    assert code == (0 if phase == "collect" else 130) or phase == "collect" and code == 130, one.run.err
    assert one.output == {"run": "kept\n", "collect": "01234"}.get(phase) or code == 130 and phase == "collect"
    renter.ended()


@pytest.mark.parametrize("phase", ["coming up", "run"])
def test_a_terminal_that_is_closed_ends_the_machine(renter, phase):
    if phase == "coming up":
        renter.server.script(steps=SLOW)
    with Terminal(renter, renter.job(OUTPUT, outputs=["out.txt"]), "--up", "--down", "--yes") as terminal:
        if phase == "coming up":
            renter.server.wait_for(lambda server: server.alive())
        else:
            terminal.until(b"at-work\r\n")
        terminal.close()
        terminal.end()
    renter.ended()
    if phase == "run":
        assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"


@pytest.mark.parametrize("answer", [b"\x03", b"n"], ids=["Ctrl-C", "no"])
def test_no_at_the_question_whether_to_rent_rents_nothing(renter, answer):
    with Terminal(renter, renter.job("true"), "--up", "--down") as terminal:
        terminal.until(b"[n]")
        terminal.write(answer)
        assert terminal.end() == 130, terminal.seen.decode()
    assert renter.server.calls("create") == []
    renter.ended()


def test_yes_at_the_question_rents(renter):
    with Terminal(renter, renter.job("true"), "--up", "--down") as terminal:
        terminal.until(b"[n]")
        assert renter.server.calls("create") == [] and b"$0.363" in terminal.seen
        terminal.write(b"y")
        assert terminal.end() == 0, terminal.seen.decode()
    renter.ended()


@pytest.mark.parametrize("key, code", [(b"d", 130), (b"s", 130), (b"g", 0)], ids=["detach", "stop", "go on"])
def test_what_is_answered_at_ctrl_c_decides_about_the_machine_too(renter, key, code):
    job = renter.job(f"echo at-work; {until_go(renter)}; echo kept > out.txt", outputs=["out.txt"])
    with Terminal(renter, job, "--up", "--down", "--yes") as terminal:
        terminal.until(b"at-work\r\n")
        terminal.write(b"\x03")
        terminal.until(b"[g]")
        terminal.write(key)
        if key == b"g":
            go(renter)
        assert terminal.end() == code, terminal.seen.decode()
    if key == b"d":
        assert len(renter.server.alive()) == 1
        go(renter)
        done = renter.gpurun("attach", "latest")
        assert done.returncode == 0, done.stderr.decode()
    if key != b"s":
        assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
    renter.ended()


def test_signals_that_are_ignored_from_outside_end_nothing(renter):
    job = renter.job("echo at-work; sleep 1; echo kept > out.txt", outputs=["out.txt"])
    process = renter.start(job, "--up", "--down", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    renter.server.wait_for(lambda server: server.alive())
    process.send_signal(signal.SIGHUP)
    assert process.wait(END_S) == 0
    assert (renter.latest / "outputs/out.txt").read_text() == "kept\n"
    renter.ended()
