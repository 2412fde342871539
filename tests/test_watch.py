"""The watch of a job: its progress, its health, what is told of it. Only what a walk may cost is measured on a clock, which the test winds too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from watched import PATTERN, SILENCE, bounds, clock, job, said, unreadable  # noqa: F401

from gpurun import watch
from gpurun.budgets import GO_ON, REVIEW, STOP, TELL, Budget, budget
from gpurun.watch import Watch


# ---- progress ------------------------------------------------------------------------------------------------------------------------

def test_a_byte_in_either_log_is_progress(job):
    job.watch(SILENCE)
    assert job.silent(0) == 0 and job.silent(10) == 10 and not job.watched.state()["produced"]
    job.write("x")
    assert job.silent(20) == 0 and job.watched.state()["produced"]
    assert job.silent(25) == 5
    job.write("y", job.err)
    assert job.silent(30) == 0 and job.silent(31) == 1


def test_what_is_in_a_log_at_the_first_look_is_progress(job):
    job.watch(SILENCE)
    job.write("quick")
    assert job.silent(0) == 0 and job.watched.state()["produced"]


@pytest.mark.parametrize("change", ["bytes", "file", "deep file", "empty file", "another in its place", "written in place"])
def test_growth_of_an_output_is_progress(job, change):
    path = job.put("result/a", "12345")
    job.watch(SILENCE)
    assert job.silent(0) == 0 and job.silent(50) == 50
    later = path.stat().st_mtime_ns + 1_000_000
    if change == "bytes":
        path.write_text("123456")
        os.utime(path, ns=(1, 1))                    # whatever its time says
    elif change == "another in its place":           # of the same size: a checkpoint
        os.utime(job.put("new", "abcde"), ns=(later, later))
        os.replace(job.work / "new", path)
    elif change == "written in place":
        path.write_text("abcde")
        os.utime(path, ns=(later, later))
    else:
        os.utime(job.put({"file": "result/b", "deep file": "result/1/2/3/b", "empty file": "result/c"}[change], "" if "empty" in change else "x"), ns=(1, 1))
    assert job.silent(60) == 0 and job.watched.state()["produced"]
    assert job.silent(61) == 1                       # and only once


def test_an_output_that_is_one_file_grows_from_nothing(job):
    job.watch(SILENCE)
    assert job.silent(0) == 0 and job.silent(10) == 10
    path = job.put("result", "")
    assert job.silent(20) == 0 and job.silent(30) == 10
    path.write_text("12")
    assert job.silent(40) == 0
    assert job.silent(45) == 5


def test_what_was_there_before_the_command_is_no_progress(job):
    job.put("result/from-the-workspace", "x" * 1000)
    job.watch(SILENCE)
    assert job.silent(0) == 0 and job.silent(30) == 30 and not job.watched.state()["produced"]


def test_what_gets_less_is_no_progress_and_what_grows_from_there_is(job):
    a, b = job.put("result/a", "x" * 100), job.put("result/b", "x" * 100)
    os.utime(a, ns=(5, 5))
    job.watch(SILENCE)
    assert job.silent(0) == 0
    b.unlink()
    assert job.silent(10) == 10
    a.write_text("x" * 101)
    os.utime(a, ns=(5, 5))
    assert job.silent(20) == 0


def test_what_is_no_declared_output_is_no_progress(job):
    job.watch(SILENCE)
    job.put("scratch/a")
    assert job.silent(0) == 0 and job.silent(10) == 10


@pytest.mark.parametrize("more", [{}, {"abort_pattern": "x"}, {"health_s": 60}, {"expect_output": True}])
def test_where_no_rule_asks_about_growth_nothing_is_walked_through(job, monkeypatch, more):
    monkeypatch.setattr(watch, "_walk", None)
    job.watch(budget("quick", **more))
    assert job.acts(0, 60, 120) == [GO_ON, GO_ON, STOP]


def test_no_link_is_followed(job):
    """Neither one that is an output nor one in it, and none that leads in circles."""
    outside = job.put("outside/log", "x")
    (job.work / "link").symlink_to(job.work / "outside")
    (job.work / "file").symlink_to(outside)
    job.put("result/a")
    (job.work / "result" / "there").symlink_to(job.work / "outside")
    (job.work / "result" / "self").symlink_to(".")
    (job.work / "result" / "gone").symlink_to("nowhere")
    job.outputs = ["result", "link", "file"]
    job.watch(SILENCE)
    assert job.silent(0) == 0
    outside.write_text("x" * 1000)
    job.put("outside/more")
    assert job.silent(10) == 10


def test_a_log_that_is_a_link_is_not_read(job):
    job.put("outside", "Error: 5\n")
    job.out.symlink_to(job.work / "outside")
    job.watch(PATTERN)
    assert job.acts(0, 1, 2) == [GO_ON] * 3


def test_things_that_are_no_files_neither_fail_nor_hold_up_a_look(job):
    os.mkfifo(job.out)
    job.err.mkdir()
    os.mkfifo(job.work / "pipe")
    job.put("result/a")
    os.mkfifo(job.work / "result" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(job.work / "result" / "s"))
        job.outputs = ["result", "pipe", "no\0name", "/dev/null"]
        job.watch(SILENCE._replace(abort_pattern="x"))
        assert job.silent(0) == 0 and job.silent(10) == 10
        job.put("result/b")
        assert job.silent(20) == 0


def test_names_of_any_bytes_are_outputs_too(job):
    job.watch(SILENCE)
    (job.work / "result").mkdir()
    job.silent(0)
    with open(os.fsencode(job.work) + b"/result/\xff\n\x1b", "wb"):
        pass
    assert job.silent(10) == 0


def test_a_folder_that_cannot_be_read_has_not_grown_and_its_neighbours_have(job):
    job.put("result/locked/a")
    job.put("result/open/a")
    job.watch(SILENCE)
    assert job.silent(0) == 0
    with unreadable(job.work / "result"):
        assert job.silent(10) == 10
    job.put("result/open/b")
    os.chmod(job.work / "result" / "locked", 0)
    assert job.silent(20) == 0
    os.chmod(job.work / "result" / "locked", 0o700)


def test_logs_that_cannot_be_read_say_nothing_and_are_read_later(job):
    job.write("Error: 5\n")
    job.watch(PATTERN)
    with unreadable(job.folder):
        assert job.acts(0, 1) == [GO_ON, GO_ON]
    assert job.acts(2) == [STOP]


def test_an_output_that_vanishes_and_one_that_comes_back(job):
    job.put("result/a")
    job.watch(SILENCE)
    job.silent(0)
    shutil.rmtree(job.work / "result")
    assert job.silent(10) == 10
    job.put("result/a")
    assert job.silent(20) == 0


def test_files_that_vanish_in_the_middle_of_a_walk(job, clock):
    for number in range(100):
        job.put(f"result/{number % 5}/{number}")
    job.watch(SILENCE)
    clock.cost = 1.0
    clock.now += 100
    job.look(10)
    assert job.watched._outputs.walking                # in the middle of it
    shutil.rmtree(job.work / "result")
    clock.cost = 0.0
    clock.now += 1000
    job.look(20)
    assert not job.watched._outputs.walking
    assert job.silent(30) == 30


def test_folders_deeper_than_any_sane_ones_end_somewhere(job):
    folder = job.work / "result"
    for _ in range(watch.MAX_DEPTH + 20):
        folder = folder / "d"
    folder.mkdir(parents=True)
    job.watch(SILENCE)
    assert job.silent(0) == 0 and job.silent(10) == 10
    (folder / "a").write_text("x")
    assert job.silent(20) == 20                        # beyond: nobody looks there
    job.put("result/d/d/d/a")
    assert job.silent(30) == 0


# ---- the health check --------------------------------------------------------------------------------------------------------------------

UNKNOWN = Budget("unknown", hard_s=3600, health_s=60, review_s=900)


def test_the_processes_are_asked_for_at_the_health_check_and_only_then(job):
    job.watch(UNKNOWN)
    assert job.acts(0, 30, 59) == [GO_ON] * 3 and job.asked == 0
    assert job.acts(60.2) == [GO_ON] and job.asked == 1
    job.alive = 0
    assert job.acts(61, 120, 600) == [GO_ON] * 3 and job.asked == 1


def test_a_job_without_a_process_at_its_health_check_is_stopped_and_stays_so(job):
    job.watch(UNKNOWN)
    job.alive = 0
    assert job.acts(0, 59) == [GO_ON, GO_ON]
    assert job.acts(60) == [GO_ON] and job.watched.next_s == watch.BEHIND_S
    decision = job.look(60.3)
    assert decision.act == STOP and "no process" in decision.text
    job.alive = 1
    assert job.look(61) == job.look(5000) == decision


def test_a_job_that_shows_no_process_for_a_moment_passes_the_health_check(job):
    job.watch(UNKNOWN)
    job.alive = 0
    assert job.acts(60) == [GO_ON]
    job.alive = 1
    assert job.acts(60.3) == [GO_ON] and job.watched.next_s > 1
    job.alive = 0
    assert job.acts(61, 62) == [GO_ON, GO_ON] and job.asked == 2


@pytest.mark.parametrize("alive", [None, OSError("no /proc here"), ProcessLookupError(3, "gone")])
def test_a_job_of_whose_processes_nobody_knows_passes_the_health_check(job, alive):
    job.watch(UNKNOWN)
    job.alive = alive
    assert job.acts(60, 61) == [GO_ON, GO_ON] and job.asked == 1


@pytest.mark.parametrize("what", ["log", "error log", "output", "nothing", "what was there before"])
def test_where_output_is_promised_the_health_check_wants_to_see_some(job, what):
    job.put("result/old")
    job.watch(UNKNOWN._replace(expect_output=True))
    job.look(1)
    if what == "output":
        job.put("result/new")
    elif "log" in what:
        job.write("x", job.err if "error" in what else job.out)
    act = job.look(60).act
    assert act == (STOP if what in ("nothing", "what was there before") else GO_ON)


@pytest.mark.parametrize("wrote", [True, False])
def test_what_the_job_wrote_before_the_first_look_is_output(job, clock, wrote):
    job.watch(UNKNOWN._replace(expect_output=True))
    if wrote:
        job.put("result")
    clock.now += 60
    assert job.acts(60) == [GO_ON if wrote else STOP]


def test_a_health_check_on_outputs_waits_for_a_walk_that_is_not_through(job, clock):
    """The one file that the job has written may be where the walk hasn't been yet."""
    for number in range(200):
        job.put(f"result/{number:03}")
    job.watch(UNKNOWN._replace(expect_output=True))
    clock.cost = 0.05
    clock.now += 100
    assert job.acts(59) == [GO_ON] and job.watched._outputs.walking
    clock.now += 1
    assert job.acts(60, 61) == [GO_ON, GO_ON] and job.asked == 0
    assert job.watched.next_s == watch.BEHIND_S
    clock.cost = 0.0
    clock.now += 100
    assert job.acts(62) == [GO_ON]                     # that walk was begun before the check was due
    assert job.acts(63) == [STOP]
    assert job.asked == 1


# ---- what is told ------------------------------------------------------------------------------------------------------------------------

def test_a_silence_is_told_of_again_and_again_and_progress_ends_it(job):
    job.watch(budget("medium"))
    assert job.acts(0, 299, 300, 301, 599, 600) == [GO_ON, GO_ON, TELL, GO_ON, GO_ON, TELL]
    assert job.watched.state() == {"silent_s": 600.0, "produced": False,
                                   "told": "no progress for 10 min: neither its log nor a declared output has grown"}
    job.write("x")
    assert job.acts(601) == [GO_ON] and job.watched.state() == {"silent_s": 0.0, "produced": True, "told": ""}
    assert job.acts(899, 900.5, 902) == [GO_ON, GO_ON, TELL]
    assert job.acts(1800) == [STOP]


def test_a_silence_that_is_too_long_stops_the_job(job):
    job.watch(Budget(silence_s=100))
    job.look(0)
    job.write("x")
    assert job.acts(50, 149, 150) == [GO_ON, GO_ON, STOP]
    job.write("y")
    assert job.acts(151) == [STOP]


def test_a_review_is_had_once_and_tells_of_a_silence_too(job):
    job.watch(Budget(review_s=100, progress_s=90))
    assert job.acts(0, 100, 100.1, 150, 190, 191) == [GO_ON, REVIEW, GO_ON, GO_ON, TELL, GO_ON]
    assert job.watched.state()["told"].startswith("no progress for ")


def test_a_review_that_was_had_can_be_told_again_in_words_of_now(job):
    job.watch(Budget("unknown", hard_s=1000, review_s=100, progress_s=90))
    job.write("x")
    assert job.acts(10, 99) == [GO_ON, GO_ON] and job.watched.review() == ""
    assert job.acts(100, 600) == [REVIEW, TELL]
    assert job.watched.review() == "it has run for 10 min (budget unknown); its last progress was 9 min ago; the hard limit comes in 6 min"
    again(job, Budget("unknown", hard_s=1000, review_s=100))
    assert job.watched.review().startswith("it has run for 10 min")
    assert job.acts(1000) == [STOP] and job.watched.review() == ""


def test_looks_as_far_apart_as_next_s_says_miss_no_limit(job):
    job.watch(Budget("unknown", hard_s=1000, health_s=60, review_s=500, progress_s=300))
    elapsed_s, acts, looks = 0.0, [], 0
    while not acts or acts[-1][1] != STOP:
        decision = job.look(elapsed_s)
        acts += [(elapsed_s, decision.act)] if decision.act != GO_ON else []
        elapsed_s += job.watched.next_s
        looks += 1
    assert acts == [(300, TELL), (500, REVIEW), (800, TELL), (1000, STOP)]
    assert looks < 150


def test_a_wait_for_the_next_look_is_there_before_the_first(job):
    assert 0 < job.watch(budget("quick")).next_s <= 60


def test_a_job_that_is_begun_anew_is_watched_anew(job):
    """Slurm requeues a job: its time starts again, its logs go on."""
    job.put("result/a")
    job.watch(budget("medium", hard_s=0))
    job.write("x")
    job.acts(0, 1000)
    assert job.watched.state()["silent_s"] == 1000
    assert job.acts(5, 200, 304) == [GO_ON] * 3        # not silent since long ago
    assert job.acts(305) == [TELL]


def test_a_time_that_goes_back_a_little_is_the_same_attempt(job):
    job.watch(budget("medium"))
    assert job.acts(0, 100.5, 100, 99) == [GO_ON] * 4
    assert job.acts(300) == [TELL]


# ---- after another watch -----------------------------------------------------------------------------------------------------------------

def again(job, one, earlier=None):
    """The watch of the agent that comes after; what the first has kept went through a file."""
    return job.watch(one, json.loads(json.dumps(job.watched.kept())) if earlier is None else earlier)


def test_a_watch_that_goes_on_tells_nothing_twice_and_goes_on_with_a_silence(job):
    one = Budget(review_s=100, progress_s=150, health_s=60, silence_s=500)
    job.watch(one)
    job.put("result/a")
    job.write("x")
    assert job.acts(10, 60, 100, 250) == [GO_ON, GO_ON, REVIEW, TELL]
    before = job.watched.state()
    again(job, one)
    assert job.watched.state()["told"] == before["told"]
    job.alive = 0
    assert job.acts(300, 399, 400, 509, 510) == [GO_ON, GO_ON, TELL, GO_ON, STOP]
    again(job, one)
    job.write("y")
    assert job.look(511).act == STOP                   # and so does a stop


@pytest.mark.parametrize("what", ["log", "new log", "shorter log", "output", "rewritten output"])
def test_progress_while_no_agent_was_there_is_progress(job, what):
    one = Budget(silence_s=500)
    path = job.put("result/a")
    job.watch(one)
    job.write("xx")
    job.acts(0)
    kept = job.watched.kept()
    if what == "log":
        job.write("y")
    elif what == "new log":
        job.write("y", job.err)
    elif what == "shorter log":
        job.out.write_text("y")
    elif what == "output":
        job.put("result/b")
    else:
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))
    again(job, one, kept)
    assert job.acts(1000, 1499, 1500) == [GO_ON, GO_ON, STOP]


def test_no_progress_while_no_agent_was_there_is_silence(job):
    job.put("result/a")
    job.watch(Budget(silence_s=500))
    job.write("x")
    job.acts(0)
    again(job, Budget(silence_s=500))
    assert job.acts(499, 500) == [GO_ON, STOP]


def test_a_job_that_was_begun_anew_while_no_agent_was_there_is_watched_anew(job):
    job.watch(Budget(progress_s=300))
    job.write("x")
    job.acts(0, 1000)
    again(job, Budget(progress_s=300))
    assert job.acts(5, 304, 305) == [GO_ON, GO_ON, TELL]


def test_a_line_that_came_while_no_agent_was_there_stops_the_job(job):
    job.watch(PATTERN)
    job.write("ok\n")
    job.acts(0)
    job.write("Error: 1\n")
    again(job, PATTERN)
    assert said(job.look(1000)) == "Error: 1"


def test_a_watch_without_an_earlier_one_knows_of_no_silence_before_it(job, clock):
    """An agent of an earlier version has kept nothing; a job that it began long ago isn't stopped for that."""
    job.watch(Budget(silence_s=500))
    clock.now += 3
    assert job.silent(5000) == 3
    assert job.acts(5496, 5497) == [GO_ON, STOP]


def test_a_watch_without_an_earlier_one_does_not_say_that_a_job_wrote_nothing(job, clock):
    job.put("result")                                  # who did?
    job.watch(UNKNOWN._replace(expect_output=True))
    assert job.acts(1000, 1001) == [REVIEW, GO_ON]
    job.alive = 0
    job.watch(UNKNOWN._replace(expect_output=True))
    assert job.acts(850, 851) == [GO_ON, STOP]         # that nothing of it is left shows at any time


def test_a_watch_that_was_there_from_the_start_counts_from_there_however_late_it_looks(job, clock):
    job.watch(Budget(silence_s=500))
    clock.now += 40
    assert job.silent(40) == 40


@pytest.mark.parametrize("earlier", [{}, {"grew_s": 5}, {"of": "another version"}])
def test_what_another_version_has_kept_is_as_good_as_nothing(job, earlier):
    job.put("result/a")
    job.watch(Budget(progress_s=100), earlier)
    job.put("result/b")
    assert job.acts(0) == [GO_ON] and job.watched.state()["produced"]
    assert job.acts(99, 100) == [GO_ON, TELL]


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda one: st.lists(one, max_size=4), max_leaves=6)
KEYS = ("elapsed_s", "grew_s", "produced", "checked", "reviewed", "told_s", "told", "stop", "logs", "outputs")


@given(st.fixed_dictionaries({key: JSON for key in KEYS}) | st.dictionaries(st.sampled_from(KEYS), JSON))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_kept_a_watch_can_be_made_of_it(job, earlier):
    job.watch(ALL_RULES, earlier)
    job.look(1)
    assert job.look(1e6).act == STOP
    json.dumps(job.watched.kept())


ALL_RULES = Budget("unknown", hard_s=1000, progress_s=100, health_s=60, review_s=500, silence_s=300, abort_pattern="x", expect_output=True)


# ---- what it costs -----------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """100,000 files in 1,000 folders; nobody changes them but by adding. Hard links: most of the files would be for the disk only."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(1000):
        (folder / str(number)).mkdir()
        (folder / str(number) / "0").write_text("x")
        for name in range(1, 100):
            os.link(f"{folder}/{number}/0", f"{folder}/{number}/{name}")
    yield folder
    shutil.rmtree(folder)


def test_a_walk_through_many_files_takes_its_share_of_the_time_and_no_more(many, clock):
    """On a clock that ticks 20 us for each file, as this machine's disk takes at most: 2 s of work are done in about 100 s."""
    clock.cost = 20e-6 * watch.CLOCK_EVERY
    spent = longest = 0.0
    watched = Watch(SILENCE, [], [str(many)], lambda: 1)
    began, elapsed_s = clock.now, 0.0
    while watched._outputs._known is None or elapsed_s < 1:
        before = clock.now
        watched.look(elapsed_s)
        took = clock.now - before
        spent, longest = spent + took, max(longest, took)
        clock.now += watched.next_s
        elapsed_s = clock.now - began
        assert elapsed_s < 500
    assert longest <= watch.MOST_S + 3 * clock.cost
    assert spent <= watch.SHARE * elapsed_s + watch.MOST_S
    assert 80 <= elapsed_s <= 140


def test_in_many_files_growth_is_seen_and_silence_is_counted_only_where_it_was_looked(many, clock):
    watched = Watch(Budget(silence_s=300), [], [str(many)], lambda: 1)
    clock.cost = 20e-6 * watch.CLOCK_EVERY
    elapsed_s, walks = 0.0, 0
    while watched.state()["silent_s"] < 100:           # it is through with a walk that was begun then
        assert watched.look(elapsed_s).act == GO_ON
        assert watched.state()["silent_s"] <= elapsed_s
        clock.now += watched.next_s
        elapsed_s += watched.next_s
        walks += 1
        assert walks < 1000
    assert elapsed_s > 150
    new = many / "500" / "new"
    new.write_text("x")
    try:
        while watched.state()["silent_s"]:
            assert watched.look(elapsed_s).act == GO_ON
            clock.now += watched.next_s
            elapsed_s += watched.next_s
            assert elapsed_s < 1000
    finally:
        new.unlink()


def test_a_silence_in_many_files_stops_the_job_once_a_walk_has_shown_it(many, clock):
    watched = Watch(Budget(silence_s=50), [], [str(many)], lambda: 1)
    clock.cost = 20e-6 * watch.CLOCK_EVERY
    elapsed_s = 0.0
    while watched.look(elapsed_s).act == GO_ON:
        clock.now += watched.next_s
        elapsed_s += watched.next_s
        assert elapsed_s < 1000
    assert 100 <= elapsed_s <= 350


def test_more_than_can_be_seen_before_the_start_is_no_reason_to_stop_at_the_health_check(many, clock):
    """What the job itself wrote can't be told from what was there."""
    clock.cost = 20e-6 * watch.CLOCK_EVERY
    watched = Watch(UNKNOWN._replace(expect_output=True), [], [str(many)], lambda: 1)
    clock.now += 60
    assert watched.look(60).act == GO_ON and watched.state()["produced"]


def test_many_files_hold_no_look_up_and_no_memory(many, monkeypatch):
    """On the real clock."""
    monkeypatch.setattr(watch, "SHARE", 1.0)
    tracemalloc.start()
    try:
        watched = Watch(SILENCE, [], [str(many)], lambda: 1)
        longest, looks = 0.0, 0
        while watched._outputs.walking:
            before = time.thread_time()
            watched.look(looks)
            longest = max(longest, time.thread_time() - before)
            looks += 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert longest < watch.MOST_S + 0.1
    assert watched._outputs._known[1] == 100_000


def test_a_slow_disk_is_asked_less_often(job, clock):
    """A small output, each look at which takes a second: it is left alone for 50 s then, and what it did meanwhile is no silence."""
    path = job.put("result")
    job.watch(SILENCE._replace(abort_pattern="x"))
    real = os.lstat
    asked = []

    def slow(name, **more):
        asked.append(name)
        clock.now += 1.0
        return real(name, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.os, "lstat", slow)
        for second in range(200):
            job.look(second)
            clock.now += 1.0
    assert 3 <= len(asked) <= 6
    path.write_text("more")
    clock.now += 100
    assert job.silent(250) == 0


def test_a_watch_that_is_given_up_in_the_middle_of_a_walk_leaves_nothing_open(many, clock):
    clock.cost = 1.0
    watched = Watch(SILENCE, [], [str(many)], lambda: 1)
    assert watched._outputs.walking and opened(many)
    del watched
    assert not opened(many)


def opened(folder):
    """What this process has open there. Other threads of it, and what an earlier test left, open and close theirs at any time."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(str(folder))]


def test_a_look_at_a_job_of_the_usual_size_costs_next_to_nothing(job, bounds):
    for number in range(20):
        job.put(f"result/{number}")
    job.watch(ALL_RULES._replace(hard_s=0, silence_s=0))
    job.write("hello\n" * 100)
    began = time.thread_time()
    for number in range(200):
        job.look(number / 10)
    assert time.thread_time() - began < 1.0            # 5 ms a look; it takes about 0.2
