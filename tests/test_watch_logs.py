"""What a job's logs say to its watch: the line to stop at, in whatever pieces it comes; logs that are truncated, rotated, endless."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from watched import PATTERN, SILENCE, bounds, clock, job, said, unreadable  # noqa: F401

from gpurun import watch
from gpurun.budgets import GO_ON, STOP, TELL, Budget


def looks_until(job, act, most=1000):
    """How many looks it takes."""
    return next(looks for looks in range(1, most) if job.look(0).act == act)


def searched_s():
    """The CPU time of all processes of ours that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- logs that are truncated, rotated, removed -----------------------------------------------------------------------------------------

def test_a_log_that_was_truncated_grows_from_there_and_is_searched_from_its_start(job):
    job.watch(SILENCE._replace(abort_pattern="^stop$"))
    job.write("a" * 1000 + "\n")
    assert job.silent(0) == 0
    os.truncate(job.out, 0)
    assert job.silent(10) == 10                        # nothing was written
    job.write("go\n")
    assert job.silent(20) == 0
    os.truncate(job.out, 0)
    job.write("s")
    assert job.silent(30) == 0                         # less than before, and yet new
    job.write("top\n")
    assert job.look(40).act == STOP


def test_a_log_that_was_rotated_is_read_from_its_start(job):
    job.watch(SILENCE._replace(abort_pattern="^stop$"))
    job.write("a" * 1000 + "\nst")
    assert job.silent(0) == 0
    os.rename(job.out, job.folder / "run.out.1")
    assert job.silent(10) == 10
    job.write("op\n")                                  # what the other one began isn't this one's
    assert job.silent(20) == 0
    job.write("stop\n")
    assert job.look(30).act == STOP


def test_a_log_that_is_gone_is_no_progress(job):
    job.watch(SILENCE)
    job.write("x")
    job.silent(0)
    job.out.unlink()
    assert job.silent(10) == 10
    job.write("xy")
    assert job.silent(20) == 0


# ---- the abort pattern -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("log", ["out", "err"])
def test_a_line_that_matches_stops_the_job_and_is_shown(job, log):
    job.watch(PATTERN)
    job.write("all is well\n")
    assert job.look(0).act == GO_ON
    job.write("ok\n[rank 3] RuntimeError: 77 things\nlater\n", getattr(job, log))
    assert said(job.look(1)) == "[rank 3] RuntimeError: 77 things"
    assert said(job.look(2)) == said(job.look(100)) == "[rank 3] RuntimeError: 77 things"      # and stays so


def test_the_first_line_that_matches_is_the_one_that_is_shown(job):
    job.watch(PATTERN)
    job.write("Error: 1\nError: 2\n")
    assert said(job.look(0)) == "Error: 1"


@pytest.mark.parametrize("pattern, text, matches", [
    ("^b$", "a\nb\nc\n", True),
    ("^b$", "ab\nbc\n", False),
    ("a.*b", "a\nb\n", False),                         # no match goes over the end of a line
    (r"a\s+b", "a\nb\n", False),
    (r"a\s+b", "a\rb\n", False),
    (r"(?i)cuda ERROR", "CUDA error: 2\n", True),
    ("^b$", "a\r\nb\r\nc\r\n", True),                  # CRLF
    ("^100%", "50%\r75%\r100%\rdone", True),
    ("^done", "50%\r75%\r100%\rdone", False),          # it isn't ended yet
    ("", "anything\n", False),
    ("^$", "\n\n\r\n", False),                         # an empty line is none
    ("x*", "\n\nabc\n", True),
    ("fußball|漢", "漢字\n", True),
    ("b", b"\xff\xfeb\xff\n", True),                   # not UTF-8
    ("^.b", b"\xffb\n", True),
    ("b", b"\0\0\0b\n", True),
    ("a\x0bb|a\u2028b|a\x85b", "a\u2028b\n", True),    # lines end with LF and CR and nothing else
])
def test_lines_are_searched_one_by_one(job, pattern, text, matches):
    job.watch(Budget(abort_pattern=pattern))
    job.write(text)
    assert job.look(0).act == (STOP if matches else GO_ON)


def test_a_line_that_comes_in_pieces_is_one_line(job):
    job.watch(PATTERN)
    for number, piece in enumerate((b"Err", b"or", b": ", b"\xc3", b"\xa9 no\nError: 1", b"2", b"3\n")):
        job.write(piece)
        decision = job.look(number)
    assert said(decision) == "Error: 123"


def test_a_letter_of_two_bytes_that_comes_in_two_pieces_is_one_letter(job):
    job.watch(Budget(abort_pattern="^é$"))
    job.write(b"\xc3")
    assert job.look(0).act == GO_ON
    job.write(b"\xa9\n")
    assert said(job.look(1)) == "é"


def test_a_last_line_without_an_end_is_searched_once_nothing_more_comes(job):
    """What a job that hangs said last. But half of a line that is just being written isn't taken for the whole."""
    job.watch(Budget(abort_pattern="loss=nan$"))
    job.write("loss=nan")
    assert job.look(0).act == GO_ON
    job.write("o\nloss=nan")
    assert job.look(1).act == GO_ON
    assert said(job.look(2)) == "loss=nan"


def test_a_last_line_that_does_not_match_is_not_searched_again_and_again(job, monkeypatch):
    searched = []
    monkeypatch.setattr(watch, "_match", lambda search, lines: searched.extend(lines) or "")
    job.watch(PATTERN)
    job.write("Continue? ")
    job.acts(0, 1, 2, 3, 4)
    assert searched == ["Continue? "]
    job.write("[y/n] ")
    job.acts(5, 6, 7, 8)
    assert searched == ["Continue? ", "Continue? [y/n] "]


def test_of_a_line_without_an_end_its_beginning_is_searched_and_the_next_line_is_again(job):
    job.watch(PATTERN)
    job.write("Error: " + "x" * watch.MAX_LINE)
    for number in range(20):
        job.write("y" * 100_000)
        assert job.look(number).act == GO_ON
    job.write(" Error: 1 is too far behind\nand\nError: 2\n")
    assert said(job.look(30)) == "Error: 2"


def test_a_long_line_is_searched_as_far_as_that_without_its_end(job):
    job.watch(PATTERN)
    job.write("x" * (watch.MAX_LINE - 20) + "Error: 1" + "y" * 100)
    assert said(job.look(0)).startswith("Error: 1yyy")  # what matched is in sight


def test_a_match_far_to_the_right_is_in_sight(job):
    job.watch(Budget(abort_pattern="out of memory"))
    job.write("x" * 500 + " CUDA out of memory\n")
    assert said(job.look(0)) == "out of memory"


def test_a_match_of_nothing_at_the_end_of_a_long_line_shows_its_end(job):
    job.watch(Budget(abort_pattern="$"))
    job.write("x" * 500 + "end\n")
    assert said(job.look(0)).endswith("xend")


def test_a_line_cannot_write_to_the_terminal_of_who_reads_the_reason(job):
    job.watch(PATTERN)
    job.write("\x1b[31mError: 1\x1b[0m\x07\x1b]0;x\x07 " + "\u202e" * 3 + "z" * 500 + "\n")
    text = job.look(0).text
    assert text.isprintable() and len(text) < 200 and "Error: 1" in text


def test_a_progress_bar_of_a_million_steps_is_searched_step_by_step_and_kept_nowhere(job):
    job.watch(Budget(abort_pattern="^ 77777/"))
    job.write("".join(f"\r {step}/100000 [####    ]" for step in range(100_000)))
    tracemalloc.start()
    try:
        looks = looks_until(job, STOP)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert said(job.look(looks)) == "77777/100000 [#### ]"


def test_a_log_that_comes_faster_than_it_is_searched_is_searched_later_and_wholly(job):
    job.watch(PATTERN)
    line = b"x" * 1023 + b"\n"
    job.write(line * (4 * watch.MAX_READ // len(line)) + b"Error: 9\n")
    assert job.look(0).act == GO_ON
    assert job.watched.next_s <= watch.BEHIND_S
    assert looks_until(job, STOP) >= 3
    assert said(job.look(99)) == "Error: 9"


def test_a_log_that_is_behind_does_not_keep_the_other_from_being_searched(job):
    job.watch(PATTERN)
    job.write(b"x" * 1023 + b"\n")
    for number in range(5):
        job.write(b"y" * 4 * watch.MAX_READ)
        assert job.look(number).act == GO_ON
    job.write("Error: 1\n", job.err)
    assert job.look(5).act == STOP


def test_a_look_at_a_log_of_many_short_lines_ends_soon(job, clock):
    """On a clock that ticks 20 ms for each block."""
    clock.cost = 0.02
    job.watch(PATTERN)
    job.write(b"\n\n" * watch.MAX_READ)
    before = clock.now
    job.look(0)
    assert clock.now - before < watch.READ_S + 6 * clock.cost
    assert job.watched.next_s == watch.BEHIND_S


@pytest.mark.parametrize("line", [b"x" * (1 << 20), (b"x" * 60_000 + b"\n") * 16, (b"x" * 4000 + b"\n") * 250])
def test_a_pattern_that_begins_with_anything_does_not_hold_up_a_look(job, bounds, line):
    """On lines of any length, none of which matches. The whole of them would take minutes."""
    job.watch(Budget(abort_pattern="(?i).*error"))
    job.write(line)
    began = time.thread_time() + searched_s()
    assert job.look(0).act == GO_ON
    job.close()                                        # its searches were done in a process of its own, whose time is known once that has ended
    assert time.thread_time() + searched_s() - began < 3.0            # it takes about 0.3


def test_a_pattern_that_takes_for_ever_on_a_line_is_given_up_and_that_is_told_once(job):
    """Python's `re` would hold up every thread of the agent meanwhile."""
    job.watch(SILENCE._replace(abort_pattern="(a+)+$|Error"))
    job.write("a" * 40 + "b\n")
    turns, over = [], threading.Event()
    others = threading.Thread(target=lambda: [turns.append(1) for _ in iter(lambda: over.wait(0.01), True)], daemon=True)
    others.start()
    decision = job.look(0)
    over.set()
    others.join()
    assert decision.act == TELL and "the abort pattern (a+)+$|Error is given up: on a line of the log" in decision.text and len(turns) > 10
    job.write("Error\n")
    assert job.acts(1, 2) == [GO_ON, GO_ON] and job.silent(3) == 2


def test_a_search_whose_process_was_killed_is_given_up_and_told(job):
    job.watch(PATTERN)
    job.write("x\n")
    assert job.look(0).act == GO_ON
    job.watched._search._process.kill()
    job.write("Error: 1\n")
    assert job.look(1).act == TELL and job.look(2).act == GO_ON


def test_a_watch_that_is_closed_leaves_no_process(job):
    job.watch(PATTERN)
    job.write("x\n")
    job.look(0)
    process = job.watched._search._process
    job.watched.close()
    job.write("Error: 1\n")
    assert process.poll() is not None and job.look(1).act == GO_ON


def test_a_look_at_a_log_that_is_read_is_soon_again_but_not_at_once(job):
    job.watch(PATTERN)
    job.write("x\n")
    job.look(0)
    assert watch.BEHIND_S < job.watched.next_s <= 1.0


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{2,1}", "(?P<x>a)(?P<x>b)", "a{99999999999999999999}", "\\", "(" * 5000, "(?z)"])
def test_a_pattern_that_is_none_is_refused_at_once_and_named(job, pattern):
    with pytest.raises(ValueError, match="abort_pattern .* is no regular expression: "):
        job.watch(Budget(abort_pattern=pattern))


# Pieces of any text, looked at after each or not: what is found is what a search of the whole text's lines finds.
@given(st.lists(st.tuples(st.sampled_from([b"E", b"EE\n", b"\r", b"\n", b"ab\r\n", b"\xc3", b"\xa9E", b"x" * 50, b" "]), st.booleans()), max_size=30))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_does_not_matter_in_which_pieces_a_log_comes(job, pieces):
    job.out.write_bytes(b"")
    job.watch(Budget(abort_pattern="^.?EE"))
    for piece, look in pieces:
        job.write(piece)
        if look:
            job.look(0)
    job.write(b"\n")
    lines = re.split("[\r\n]", b"".join(piece for piece, _ in pieces).decode("utf-8", "replace"))
    assert job.look(1).act == (STOP if any(re.search("^.?EE", line) for line in lines) else GO_ON)
