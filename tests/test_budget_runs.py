"""Runtime budgets as their user meets them: real jobs on this machine's real agent, with limits of seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
from conftest import Here, eventually, toml
from agents import end_agents
from running import Running, gone, nothing_goes_on   # noqa: F401
from signalled import Terminal

from gpurun import supervise

pytestmark = pytest.mark.usefixtures("nothing_goes_on")
SAVES = "trap 'echo kept > out.txt; exit 3' TERM"   # saves what it has when it is told to end
ENDS = SAVES + "; echo at-work; while :; do sleep 60; done 2>/dev/null"
BOUND_S = 10.0   # all that ends without the grace period, on a machine that is busy with other tests


def budgeted(here, name, run, external=None, **keys):
    """A job file with a table [external_job]."""
    path = here.job(run, name, **keys)
    if external:
        path.write_text(path.read_text() + "\n[external_job]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in external.items()))
    return path


def notices(here, about=None):
    return [event["text"] for event in here.events() if "notice" in event and about in (None, event["notice"])]


def kill_agent(here):
    known = here.agent()
    assert supervise.start_time(known["pid"]) == known["start"]
    os.kill(known["pid"], signal.SIGKILL)
    eventually(lambda: supervise.start_time(known["pid"]) != known["start"])


def log(here, name):
    path = here.node_dir / "runs" / name / "run.out"
    return path.read_bytes() if path.exists() else b""


def ended(here, name):
    """Until nothing of it is left. It may be over before anybody looks."""
    eventually((here.node_dir / "runs" / name / "run.exit").exists)
    eventually(lambda: gone(name))


def run_id(here, name):
    return eventually(lambda: next((path.name for path in here.runs.iterdir() if path.name.startswith(name + "-")), "") if here.runs.exists() else "")


# ---- the hard limit ------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def deaf(tmp_path_factory):
    """A job that ignores TERM, as its children do, on an agent of its own: the grace period passes while the other tests run."""
    folder = tmp_path_factory.mktemp("deaf")
    here = Here(folder / "here")
    here.job("trap 'echo told' TERM; bash -c 'trap \"\" TERM; setsid sleep 60 & while :; do sleep 60; done' 2>/dev/null & mkdir out; echo 1 > out/first\n"
             "while :; do wait; done", "deaf", outputs=["out"])
    yield here, here.start("deaf.toml", "--budget", "quick", "--limit", "2", "--json"), time.monotonic()
    end_agents(folder)


def test_a_job_that_is_done_in_time_is_not_touched_and_has_its_own_code(deaf, warm):   # deaf: begun with the first test
    assert warm.result(warm.job("sleep 0.2; exit 7", "seven"), "--budget", "quick", "--limit", "20")["reason"] == "exited 7"
    assert warm.record()["job"]["budget"] == {"name": "quick", "hard_s": 20.0} and warm.record()["fsm"]["limit"] == "" and notices(warm) == []
    result = warm.result(warm.job("exit 124", "own124"), "--budget", "medium")
    assert result["exit_code"] == 124 and result["reason"] == "exited 124" and warm.record()["fsm"]["limit"] == ""


@pytest.mark.parametrize("options, external, words", [
    (["--budget", "quick", "--limit", "1"], None, "the hard limit of 1 s (budget quick) was reached"),
    ([], {"runtime_budget": "unknown", "hard_limit_s": 1.5}, "the hard limit of 1.5 s (budget unknown) was reached"),
    (["--limit", "1.5"], {"runtime_budget": "medium", "hard_limit_s": 50}, "the hard limit of 1.5 s (budget medium) was reached"),
], ids=["options", "job file", "options before the job file"])
def test_the_hard_limit_ends_a_job_and_what_it_saved_comes_home(warm, options, external, words):
    result = warm.result(budgeted(warm, "hard", ENDS, external, outputs=["out.txt"]), *options)
    assert result["exit_code"] == 124 and result["reason"] == f"stopped, {words}" and result["state"] == "FAILED"
    assert result["outputs"] == ["out.txt"] and (warm.latest / "outputs/out.txt").read_text() == "kept\n" and 0.9 < result["seconds"]["run"] < BOUND_S
    record = warm.record()
    assert (record["exit_code"], record["fsm"]["exit_code"], record["fsm"]["limit"]) == (124, 3, words)   # 3: what the job made of its TERM
    assert record["fsm"]["failed_phase"] == "run"
    assert notices(warm, "limit") in ([f"stopping the job: {words}"], [])   # the supervisor keeps it too: where it was quicker, there is nothing to stop
    assert gone(result["run_id"])


def test_a_setup_that_hangs_is_ended_too_and_its_job_never_begun(warm):
    result = warm.result(budgeted(warm, "hang", "echo > begun", {"hard_limit_s": 1}, setup="echo one; sleep 60", outputs=["begun"]))
    assert result["exit_code"] == 124 and result["reason"] == "stopped, the hard limit of 1 s was reached"
    assert result["missing"] == ["begun"] and (warm.latest / "setup-stdout.log").read_text() == "one\n"
    assert warm.record()["fsm"]["failed_phase"] == "setup" and gone(result["run_id"])


def test_a_setup_does_not_use_up_the_time_of_the_job(warm):
    assert warm.result(budgeted(warm, "two", "sleep 1; exit 4", {"hard_limit_s": 3}, setup="sleep 2.2"))["exit_code"] == 4


@pytest.mark.parametrize("how", ["in front of it", "submitted"])
def test_the_limit_holds_when_gpurun_and_the_agent_are_gone(warm, how):
    """The supervisor of the job keeps it."""
    name = "away" if how == "submitted" else "killed"
    job = budgeted(warm, name, ENDS, {"runtime_budget": "quick", "hard_limit_s": 6}, outputs=["out.txt"])
    run = Running(warm, *(["submit", job] if how == "submitted" else [job]))
    if how == "submitted":
        assert run.end() == 0
        run_name = run.out.strip()
        eventually(lambda: b"at-work" in log(warm, run_name))
    else:
        run.until("at-work")
        run_name = run_id(warm, name)
        run.signal(signal.SIGKILL)
    kill_agent(warm)
    assert not gone(run_name)
    eventually(lambda: gone(run_name), 6 + BOUND_S)
    attached = Running(warm, "attach", run_name)
    assert attached.end() == 124 and "stopped, the hard limit of 6 s (budget quick) was reached" in attached.err
    record = json.loads((warm.runs / run_name / "run.json").read_text())
    assert record["exit_code"] == 124 and 5.9 < record["seconds"]["run"] < 6 + BOUND_S and (warm.runs / run_name / "outputs/out.txt").read_text() == "kept\n"


def test_what_ended_while_away_is_told_by_status_and_wait_as_well(warm):
    name = warm.gpurun("submit", budgeted(warm, "told", ENDS, {"hard_limit_s": 1}), "--quiet").stdout.decode().strip()
    ended(warm, name)

    def over():
        seen = json.loads(warm.gpurun("status", name, "--refresh", "--json").stdout)["seen"]
        return seen if seen["phase"] == "ended" else None
    asked = eventually(over)
    assert (asked["code"], asked["limit"]) == (3, "the hard limit of 1 s was reached")
    assert "stopped, the hard limit of 1 s was reached; what it made is still there" in warm.gpurun("status", name).stdout.decode()
    waited = warm.gpurun("wait", name)
    assert waited.returncode == 124 and b"exit code 124: stopped, the hard limit of 1 s was reached" in waited.stdout
    assert warm.gpurun("attach", name).returncode == 124


def test_a_stop_of_its_operator_stays_one(warm):
    run = Running(warm, warm.job(ENDS, "stopped"), "--budget", "unknown", "--limit", "60")
    run.until("at-work")
    stopped = warm.gpurun("stop", run_id(warm, "stopped"))
    assert run.end() == 130 and warm.record()["reason"] == "stopped by the operator" and warm.record()["fsm"]["limit"] == "", stopped.stderr


# ---- silence -------------------------------------------------------------------------------------------------------------------

def test_silence_is_told_and_told_again_and_stops_nothing(warm):
    run = Running(warm, budgeted(warm, "quiet", "while [ ! -e ../go ]; do sleep 0.05; done; exit 6", {"runtime_budget": "medium", "progress_every_s": 1}))

    def told():
        return [line for line in list(run.said) if "no progress for " in line]
    eventually(lambda: len(told()) >= 2)
    (warm.node_dir / "runs" / run_id(warm, "quiet") / "go").touch()
    assert run.end() == 6
    assert re.fullmatch(r"gpurun: warning: no progress for \d+ s: neither its log nor a declared output has grown\n", told()[0]), run.err
    assert [f"gpurun: warning: {text}\n" for text in notices(warm, "silence")] == told()


def test_as_long_as_a_log_or_an_output_grows_nothing_is_told(warm):
    job = budgeted(warm, "grows", "for i in $(seq 18); do echo $i >&2; sleep 0.2; done; mkdir out\nfor i in $(seq 18); do echo $i > out/$i; sleep 0.2; done",
                   {"runtime_budget": "medium", "progress_every_s": 3}, outputs=["out"])
    run = Running(warm, job)
    assert run.end() == 0 and "no progress" not in run.err and notices(warm) == []


def test_a_job_that_is_silent_for_too_long_is_ended(warm):
    result = warm.result(budgeted(warm, "still", f"echo one; {ENDS}", {"abort_silence_s": 1}, outputs=["out.txt"]))
    assert result["exit_code"] == 124 and result["outputs"] == ["out.txt"] and result["seconds"]["run"] < BOUND_S
    assert result["reason"] == "stopped, the limit of 1 s without progress was reached: neither its log nor a declared output has grown"


def test_what_was_told_while_nobody_was_there_stands_in_status_until_the_job_makes_progress(warm):
    job = budgeted(warm, "watched", "while [ ! -e ../more ]; do sleep 0.05; done; while [ ! -e ../quiet ]; do echo more; sleep 0.1; done\n"
                                    "while [ ! -e ../end ]; do sleep 0.05; done; exit 4", {"runtime_budget": "medium", "progress_every_s": 2})
    name = warm.gpurun("submit", job, "--quiet").stdout.decode().strip()
    folder = warm.node_dir / "runs" / name
    eventually(lambda: b"no progress for" in warm.gpurun("status", name, "--refresh").stdout)
    (folder / "more").touch()
    eventually(lambda: b"no progress" not in warm.gpurun("status", name, "--refresh").stdout)
    (folder / "quiet").touch()
    attached = Running(warm, "attach", name)
    attached.until("no progress for")                  # told again
    (folder / "end").touch()
    assert attached.end() == 4


# ---- unknown -------------------------------------------------------------------------------------------------------------------

HEALTH = {"runtime_budget": "unknown", "health_check_s": 0.5, "expect_output": True}


def test_a_job_that_has_written_nothing_at_its_health_check_is_ended_at_once(warm):
    result = warm.result(budgeted(warm, "dead", "sleep 60", HEALTH, outputs=["out"]))
    assert result["exit_code"] == 124 and 0.4 < result["seconds"]["run"] < BOUND_S
    assert result["reason"] == ("stopped, the health check after 0.5 s (budget unknown) found no output, where output is expected: neither its log nor a "
                                "declared output has grown")


@pytest.mark.parametrize("writes", ["echo one >&2", "mkdir out; echo one > out/file"])
def test_one_that_has_written_goes_on(warm, writes):
    result = warm.result(budgeted(warm, "alive", f"sleep 0.1; {writes}; sleep 3.5; exit 5", dict(HEALTH, health_check_s=3), outputs=["out"]))
    assert result["exit_code"] == 5 and result["reason"] == "exited 5"


def test_one_that_need_not_write_goes_on(warm):
    assert warm.result(budgeted(warm, "mute", "sleep 1; exit 5", dict(HEALTH, expect_output=False)))["exit_code"] == 5


# ---- a line that ends it -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words", ["echo 'E: CUDA out of memory'", "printf 'E: CUDA out of memory' >&2"], ids=["stdout", "stderr, no line end"])
def test_a_line_that_matches_ends_the_job_within_a_second_or_so(warm, words):
    job = budgeted(warm, "match", f"{SAVES}; echo CUDA; sleep 0.5; {words}; while :; do sleep 60; done 2>/dev/null", {"abort_pattern": "CUDA (out of|error)"},
                   outputs=["out.txt"])
    result = warm.result(job)
    assert result["exit_code"] == 124 and result["reason"] == "stopped, its log matched the abort pattern: E: CUDA out of memory"
    assert result["outputs"] == ["out.txt"] and 0.4 < result["seconds"]["run"] < BOUND_S
    print(f"ended {result['seconds']['run'] - 0.5:.2f} s after the line")


def test_a_job_that_ends_by_itself_with_that_line_has_its_own_code(warm):
    result = warm.result(budgeted(warm, "itself", "echo FATAL; exit 9", {"abort_pattern": "FATAL"}))
    assert result["exit_code"] == 9 and result["reason"] == "exited 9"


def test_a_pattern_that_takes_for_ever_is_given_up_and_holds_up_neither_its_job_nor_the_node(warm):
    job = budgeted(warm, "endless", f"echo {'a' * 40}b; while [ ! -e go ]; do sleep 0.05; done; exit 5", {"abort_pattern": "(a+)+$"})
    run = Running(warm, job)
    eventually(lambda: any("the abort pattern (a+)+$ is given up" in line for line in run.said), 60)
    (warm.node_dir / "runs" / run_id(warm, "endless") / "work/go").touch()
    assert run.end() == 5 and "can't be reached" not in run.err, run.err


# ---- the review ----------------------------------------------------------------------------------------------------------------

REVIEW = {"runtime_budget": "unknown", "soft_review_s": 1, "health_check_s": 0.5}


def test_on_a_pipe_a_review_is_a_line_and_the_job_goes_on_to_its_hard_limit(warm):
    run = Running(warm, budgeted(warm, "line", ENDS, dict(REVIEW, hard_limit_s=4.5), outputs=["out.txt"]))
    assert run.end() == 124
    said = [line for line in run.said if "it has run for" in line]
    assert len(said) == 1 and re.fullmatch(r"gpurun: warning: it has run for \d s \(budget unknown\); its last progress was \d s ago; the hard limit comes in "
                                           r"\d s\n", said[0])
    assert 4.4 < warm.record()["seconds"]["run"] < 4.5 + BOUND_S


def test_for_a_program_it_is_an_object(warm):
    done = warm.gpurun(budgeted(warm, "object", "echo one; sleep 4; exit 8", REVIEW), "--json")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 8
    assert [re.sub(r"\d", "N", one["text"][:35]) for one in objects if one["type"] == "warning"] == ["it has run for N s (budget unknown)"]


@pytest.mark.parametrize("key, code", [(b"s", 130), (b"g", 0), (b"d", 130)], ids=["stop", "go on", "detach"])
def test_on_a_terminal_it_is_a_question(warm, key, code):
    name = f"asked-{key.decode()}"
    job = budgeted(warm, name, "trap 'echo cut > out.txt; exit 3' TERM; echo at-work; while [ ! -e ../go ]; do sleep 0.05; done; echo kept > out.txt",
                   REVIEW, outputs=["out.txt"])
    with Terminal(warm, job) as terminal:
        terminal.until(b"[g]")
        assert b" s (budget unknown); its last progress was " in terminal.seen and b"what now?" in terminal.seen
        terminal.write(key)
        if key == b"d":
            terminal.until(b"attach")
        if key != b"s":
            (warm.node_dir / "runs" / run_id(warm, name) / "go").touch()
        assert terminal.end() == code, terminal.seen.decode()
    if key == b"d":
        assert warm.gpurun("attach", run_id(warm, name)).returncode == 0
    assert (warm.runs / run_id(warm, name) / "outputs/out.txt").read_text() == ("cut\n" if key == b"s" else "kept\n")


def test_a_question_that_nobody_answers_goes_when_the_hard_limit_has_ended_the_job(warm):
    with Terminal(warm, budgeted(warm, "nobody", ENDS, dict(REVIEW, hard_limit_s=5.5), outputs=["out.txt"])) as terminal:
        terminal.until(b"[g]")
        assert terminal.end() == 124, terminal.seen.decode()
    assert b"the hard limit of 5.5 s (budget unknown) was reached" in terminal.seen and (warm.latest / "outputs/out.txt").exists()


# ---- an agent that is gone -----------------------------------------------------------------------------------------------------

def test_an_agent_that_was_killed_leaves_the_rest_to_the_next_one_and_nothing_is_told_twice(warm):
    external = dict(REVIEW, progress_every_s=2, hard_limit_s=6)
    run = Running(warm, budgeted(warm, "again", ENDS, external, outputs=["out.txt"]))
    run.until("it has run for")
    kill_agent(warm)
    assert run.end() == 124, run.err
    assert run.err.count("it has run for") == 1
    told = [line for line in run.said if "no progress for" in line]
    assert len(set(told)) == len(told) <= 2, run.err           # a review tells of a silence too, so the first comes 2 s after it
    assert 5.9 < warm.record()["seconds"]["run"] < 6 + BOUND_S and warm.record()["reason"] == "stopped, the hard limit of 6 s (budget unknown) was reached"


def test_a_review_that_was_had_while_nobody_was_there_is_told_to_who_comes_and_asks_nothing(warm):
    job = budgeted(warm, "missed", "while [ ! -e ../go ]; do sleep 0.05; done; exit 6", dict(REVIEW, hard_limit_s=300))
    name = warm.gpurun("submit", job, "--quiet").stdout.decode().strip()
    eventually(lambda: b"it has run for" in warm.gpurun("status", name, "--refresh").stdout)
    with Terminal(warm, "attach", name) as terminal:
        terminal.until(b"the hard limit comes in")
        (warm.node_dir / "runs" / name / "go").touch()
        assert terminal.end() == 6
    assert terminal.seen.count(b"it has run for") == 1 and b"[g]" not in terminal.seen


def test_a_review_that_came_while_its_agent_was_gone_is_asked_once_the_next_one_is_there(warm):
    with Terminal(warm, budgeted(warm, "late", ENDS, dict(REVIEW, soft_review_s=3))) as terminal:
        terminal.until(b"at-work")
        kill_agent(warm)
        terminal.until(b"[g]")
        terminal.write(b"s")
        assert terminal.end() == 130 and terminal.seen.count(b"it has run for") == 1, terminal.seen.decode()


def test_a_line_that_comes_while_no_agent_is_there_is_found_by_the_next_one(warm):
    run = Running(warm, budgeted(warm, "unseen", f"echo at-first; while [ ! -e ../go ]; do sleep 0.05; done; echo FATAL; {ENDS}", {"abort_pattern": "FATAL"}))
    run.until("at-first")
    run.signal(signal.SIGKILL)
    kill_agent(warm)
    name = run_id(warm, "unseen")
    (warm.node_dir / "runs" / name / "go").touch()
    eventually(lambda: b"FATAL" in (warm.node_dir / "runs" / name / "run.out").read_bytes())
    attached = Running(warm, "attach", name)
    assert attached.end() == 124 and "its log matched the abort pattern: FATAL" in attached.err


# ---- what can't be -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, external, words", [
    (["--budget", "medum"], None, ["quick", "long_compute"]),
    (["--limit", "0"], None, ["--limit"]),
    (["--limit", "soon"], None, ["'soon' is not a time"]),
    ([], {"runtime_budget": "medum"}, ["did you mean `medium`?"]),
    ([], {"soft_review_s": 10, "hard_limit_s": 5}, ["soft_review_s", "would never come"]),
    ([], {"abort_pattern": "("}, ["abort_pattern", "not a regular expression"]),
    (["--budget", "long_compute"], None, ["--plan ID", "--phase N", "--verify CMD"]),
])
def test_a_budget_that_cannot_be_is_an_error_before_anything_is_sent(here, options, external, words):
    done = here.gpurun(budgeted(here, "wrong", "true", external, outputs=["out"]), *options)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr.decode() for word in words), done.stderr.decode()
    assert not here.runs.exists() and not here.node_dir.exists()


# ---- long_compute --------------------------------------------------------------------------------------------------------------

def test_long_compute_is_submitted_and_nobody_waits(warm):
    job = budgeted(warm, "long", ENDS, {"runtime_budget": "long_compute", "plan": "02-01", "phase": "02", "verify": "test -s out.txt"}, outputs=["out.txt"])
    began = time.monotonic()
    done = warm.gpurun(job, "--limit", "1")
    print(f"external_job_waiting after {time.monotonic() - began:.2f} s")
    said = dict(line.split(": ", 1) for line in done.stdout.decode().splitlines())
    assert done.returncode == 0 and said["state"] == "external_job_waiting"
    manifest = json.loads(open(said["manifest"]).read())
    assert (manifest["plan_id"], manifest["status"], manifest["expected_artifacts"]) == ("02-01", "submitted", ["out.txt"])
    ended(warm, said["run_id"])
    polled = warm.gpurun("poll", said["job_id"])
    assert json.loads(polled.stdout)["manifest_status"] == "timeout", polled
    assert "the hard limit of 1 s (budget long_compute) was reached" in json.dumps(json.loads(open(said["manifest"]).read())["terminal_details"])


# ---- one that doesn't listen: begun at the top ---------------------------------------------------------------------------------

def test_a_job_that_ignores_term_is_killed_after_the_grace_with_all_that_it_has_started(deaf):
    here, process, began = deaf
    out, err = process.communicate(timeout=60)
    objects = [json.loads(line) for line in out.splitlines()]
    result = objects[-1]
    assert process.returncode == result["exit_code"] == 124 and result["reason"] == "stopped, the hard limit of 2 s (budget quick) was reached", err
    assert 11.5 < result["seconds"]["run"] < 25 and (here.latest / "outputs/out/first").read_text() == "1\n" and result["outputs"] == ["out"]
    assert {"type": "stdout", "text": "told\n"} in objects and gone(result["run_id"])
    assert [one["text"] for one in objects if one["type"] == "warning"] == ["stopping the job: the hard limit of 2 s (budget quick) was reached"]
    record = here.record()
    assert (record["state"], record["exit_code"], record["fsm"]["exit_code"], record["fsm"]["limit"]) == (
        "FAILED", 124, 137, "the hard limit of 2 s (budget quick) was reached")
