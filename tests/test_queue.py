"""Runs that wait for the node, runs that nobody watches and runs that are over, on a real agent: what it does with them by itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually
from nodes import WAIT_S, NodeDir, Operator, Talk, changed_package, gone, node, operator, own_folders  # noqa: F401
from streams import listed

from gpurun import landing, manifest, pushing, wire
from gpurun.messages import (
    Busy, CollectOutputs, Detach, Detached, Hello, JobExited, MaterializeWorkspace, NodeFault, NodeReady, OutputsCollected, Ping, Pong, QueryRuns,
    Refused, Removed, RemoveRun, RunJob, RunSetup, RunStates, SetupCompleted, StopJob, WorkspaceMaterialized,
)

HOLD = 'while [ ! -e "$GPURUN_OUTPUTS/go" ]; do sleep 0.02; done; '
ENDS = (JobExited, NodeFault, Refused)


def hold(operator: Operator, known: dict[str, Any], run_id: str = "holder") -> Talk:
    """A run that has the node until `let_go`."""
    talk = operator.talk(known, Hello(run_id=run_id, job="job", claim=True), RunJob(run_id, HOLD + "exit 7"))
    assert talk.hear(NodeReady, Busy).__class__ is NodeReady
    eventually(lambda: states(operator, known, run_id)[run_id]["phase"] == "run")
    return talk


def let_go(node: NodeDir, run_id: str = "holder") -> None:
    eventually(lambda: (node.folder / "runs" / run_id / "work").is_dir())
    (node.folder / "runs" / run_id / "work" / "go").touch()


def leave(operator: Operator, known: dict[str, Any], run_id: str, *plan: Any, **hello: Any) -> None:
    """As `gpurun submit` does it: gone as soon as the node may be left alone with it."""
    talk = operator.talk(known, Hello(run_id=run_id, job="job", claim=True, wait=True, **hello), *plan, Detach(run_id))
    assert talk.hear(Detached, *ENDS) == Detached(run_id)
    talk.close()


def states(operator: Operator, known: dict[str, Any], *run_ids: str) -> dict[str, Any]:
    talk = operator.talk(known, Hello(), QueryRuns(list(run_ids)))
    answer = talk.hear(RunStates)
    talk.close()
    return answer.states


def push(operator: Operator, known: dict[str, Any], folder: Path) -> str:
    entries, encoded = listed(folder)
    connection = operator.dial(known, wire.TRANSFER_ALPN)
    pushing.push(lambda: connection.open(WAIT_S), str(folder), entries, encoded, lambda done, total, name: None)
    connection.close()
    return manifest.tree_id(encoded)


def collect(operator: Operator, known: dict[str, Any], run_id: str, outputs: list[str], target: Path) -> OutputsCollected:
    connection = operator.dial(known, wire.TRANSFER_ALPN)
    talk = operator.talk(known, Hello(run_id=run_id), CollectOutputs(run_id, outputs))
    landing.pull(connection.open(WAIT_S), run_id, outputs, str(target), lambda done, total, name: None)
    collected = talk.hear(OutputsCollected, Refused)
    talk.close()
    connection.close()
    return collected


# ---- the queue -------------------------------------------------------------------------------------------------------------------

def test_runs_that_wait_go_in_the_order_they_came_across_a_restart_of_the_agent_too(node, operator):
    known, second = node.up(operator), Operator()
    node.authorize(second.id)
    hold(operator, known).close()
    whose = [(f"r{number}", one) for number, one in enumerate((operator, second, operator, second))]
    for run_id, one in whose:
        leave(one, known, run_id, RunJob(run_id, f"echo {run_id} >> {node.folder}/order"))
    assert [states(one, known, run_id)[run_id]["ahead"] for run_id, one in whose] == [1, 2, 3, 4]
    node.end(known)
    again = node.up(operator)
    assert [states(one, again, run_id)[run_id]["ahead"] for run_id, one in whose] == [1, 2, 3, 4]
    assert states(operator, again, "holder")["holder"]["phase"] == "run"
    let_go(node)
    eventually(lambda: states(second, again, "r3")["r3"]["over"])
    assert (node.folder / "order").read_text().split() == ["r0", "r1", "r2", "r3"]
    assert states(operator, again, "holder")["holder"]["code"] == 7
    second.link.close()


def test_a_waiting_run_is_told_how_many_are_ahead_and_takes_its_workspace_at_once(node, operator, tmp_path):
    known = node.up(operator)
    first = hold(operator, known)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("a\n")
    entries, encoded = listed(tmp_path / "tree")
    talk = operator.talk(known, Hello(run_id="r", job="job", claim=True, wait=True), MaterializeWorkspace("r", manifest.tree_id(encoded)),
                         RunJob("r", "cat a"), Detach("r"), Ping(1))
    busy = talk.hear()
    assert (busy.__class__, busy.run_id, busy.ahead) == (Busy, "holder", 1)
    assert talk.hear(Pong, Detached) == Pong(1), "it may not be left before its workspace is there"
    assert push(operator, known, tmp_path / "tree") == manifest.tree_id(encoded)
    assert talk.hear(Detached, WorkspaceMaterialized, NodeReady) == Detached("r")
    assert (node.folder / "runs" / "r" / "work" / "a").read_text() == "a\n"
    let_go(node)
    assert first.hear(JobExited).code == 7
    assert [talk.hear().__class__ for _ in range(3)] == [NodeReady, WorkspaceMaterialized, JobExited]
    assert operator.logs(known, "r") == b"a\n"


def test_a_waiting_run_can_be_stopped_from_anywhere_and_frees_its_place(node, operator):
    known = node.up(operator)
    hold(operator, known)
    waiter = operator.talk(known, Hello(run_id="r1", claim=True, wait=True), RunJob("r1", "true"))
    assert waiter.hear().ahead == 1
    leave(operator, known, "r2", RunJob("r2", "exit 2"))
    other = operator.talk(known, Hello(run_id="r1"), StopJob("r1"))
    assert other.hear().ahead == 1, "who comes later hears the same"
    for talk in (waiter, other):
        ended = talk.hear()
        assert (ended.__class__, ended.stopped, ended.seq) == (JobExited, True, 1), "no NodeReady before it"
    eventually(lambda: states(operator, known, "r2")["r2"]["ahead"] == 1)
    late = operator.talk(known, Hello(run_id="r1"))
    assert [late.hear().__class__, late.hear().__class__] == [NodeReady, JobExited]
    let_go(node)
    assert eventually(lambda: states(operator, known, "r2")["r2"]["code"] if states(operator, known, "r2")["r2"]["over"] else None) == 2


def test_who_does_not_want_to_wait_is_told_that_the_node_is_busy_and_leaves_nothing(node, operator):
    known = node.up(operator)
    hold(operator, known)
    talk = operator.talk(known, Hello(run_id="r", claim=True), RunJob("r", "true"))
    assert (talk.hear().ahead, talk.hear().__class__) == (0, Refused)
    assert not (node.folder / "runs" / "r").exists() and states(operator, known, "r") == {}


def test_a_run_that_waits_and_lacks_its_plan_is_given_up_when_its_operator_vanished_and_another_is_not(node, operator, tmp_path):
    quick = changed_package(tmp_path, agent=[(r"^NEVER_STARTED_S = .*$", "NEVER_STARTED_S = 0.5"), ("^HOUSEKEEPING_S = .*$", "HOUSEKEEPING_S = 0.1")])
    known = node.up(operator, package=quick)
    hold(operator, known)
    half = operator.talk(known, Hello(run_id="half", claim=True, wait=True))
    assert half.hear().ahead == 1             # before the next one comes: two connections have no order
    whole = operator.talk(known, Hello(run_id="whole", claim=True, wait=True), RunJob("whole", "exit 3"))
    assert whole.hear().ahead == 2
    half.close()
    whole.close()
    eventually(lambda: states(operator, known, "half")["half"]["over"])
    assert "the operator was silent for 0.5 s before the job could start" in states(operator, known, "half")["half"]["reason"]
    assert states(operator, known, "whole")["whole"]["ahead"] == 1
    let_go(node)
    eventually(lambda: states(operator, known, "whole")["whole"].get("code") == 3)


# ---- left alone --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("phase", ["queued", "setup", "run"])
def test_a_run_that_was_left_ends_by_itself_although_the_agent_is_killed(node, operator, tmp_path, phase):
    known = node.up(operator)
    if phase == "queued":
        hold(operator, known).close()
    waits = {name: HOLD if name == phase else "" for name in ("setup", "run")}
    leave(operator, known, "r", RunSetup("r", waits["setup"] + "echo set up > made"), RunJob("r", waits["run"] + "cat made; echo out > out; exit 5"),
          CollectOutputs("r", ["out"]))
    eventually(lambda: states(operator, known, "r")["r"]["phase"] == phase)
    node.end(known)
    again = node.up(operator)
    assert states(operator, again, "r")["r"]["phase"] == phase
    let_go(node, "holder" if phase == "queued" else "r")
    eventually(lambda: states(operator, again, "r")["r"]["over"])
    said = states(operator, again, "r")["r"]
    assert (said["code"], said["detached"], said["collected"]) == (5, True, False)
    talk = operator.talk(again, Hello(run_id="r"))
    assert [talk.hear().__class__ for _ in range(3)] == [NodeReady, SetupCompleted, JobExited]
    assert operator.logs(again, "r") == b"set up\n"
    assert collect(operator, again, "r", ["out"], tmp_path / "outputs").seq == 3
    assert (tmp_path / "outputs" / "out").read_text() == "out\n"


@pytest.mark.parametrize("phase", ["queued", "setup"])
def test_a_run_whose_values_went_with_the_agent_says_so_unless_somebody_brings_them(node, operator, tmp_path, phase):
    quick = changed_package(tmp_path, agent=[(r"^NEVER_STARTED_S = .*$", "NEVER_STARTED_S = 6.0"), ("^HOUSEKEEPING_S = .*$", "HOUSEKEEPING_S = 0.1")])
    known = node.up(operator, package=quick)
    hold(operator, known, "holder").close() if phase == "queued" else None
    plan = [RunSetup("r", HOLD if phase == "setup" else "true", {"A": "s3cret"}), RunJob("r", 'test -n "$A"', {"A": "s3cret", "B": ""})]
    leave(operator, known, "r", *plan)
    if phase == "queued":
        leave(operator, known, "brought", RunJob("brought", "exit $CODE", {"CODE": "9"}))
    eventually(lambda: states(operator, known, "r")["r"]["phase"] == phase)
    node.end(known)
    again = node.up(operator, package=quick)
    if phase == "queued":
        wrong = operator.talk(again, Hello(run_id="brought"), RunJob("brought", "exit $CODE", {"COED": "9"}))
        assert "COED" in wrong.hear(Refused).reason
        assert wrong.hear() is None
        right = operator.talk(again, Hello(run_id="brought"), RunJob("brought", "exit $CODE", {"CODE": "9"}), Detach("brought"))
        assert right.hear(Detached, *ENDS) == Detached("brought")
    let_go(node, "holder" if phase == "queued" else "r")
    fault = operator.talk(again, Hello(run_id="r")).hear(*ENDS)
    assert "the agent was restarted before the job began, and the values of its env (A, B) were only in its memory: run the job again" in fault.reason
    assert b"s3cret" not in b"".join(path.read_bytes() for path in node.folder.rglob("*") if path.is_file())
    if phase == "queued":
        assert right.hear(*ENDS).code == 9


def test_detach_of_a_run_that_has_begun_or_ended_is_answered_at_once_and_as_often_as_it_is_asked(node, operator):
    known = node.up(operator)
    talk = hold(operator, known)
    talk.say(Detach("holder"), Detach("holder"))
    assert talk.hear(Detached, *ENDS) == Detached("holder")          # a sample of the node may come at any time
    talk.say(Detach("holder"))
    assert talk.hear(Detached, *ENDS) == Detached("holder")
    let_go(node)
    assert talk.hear(JobExited).code == 7
    assert operator.talk(known, Hello(run_id="holder"), Detach("holder")).hear(Detached, Refused) == Detached("holder")


# ---- questions ---------------------------------------------------------------------------------------------------------------------

def test_one_question_for_many_runs_answers_for_those_of_the_operator_that_the_node_has(node, operator):
    known, second = node.up(operator), Operator()
    node.authorize(second.id)
    assert second.run(known, "his", "exit 1").code == 1
    assert operator.run(known, "done", "exit 4").code == 4
    assert operator.talk(known, Hello(run_id="bad", claim=True), RunSetup("bad", "exit 6")).hear(SetupCompleted).code == 6
    hold(operator, known)
    leave(operator, known, "next", RunJob("next", "true"))
    found = states(operator, known, "done", "bad", "holder", "next", "his", "nowhere", "../x")
    assert {run_id: (said["phase"], said["over"], said.get("code"), said.get("ahead", 0), said["detached"]) for run_id, said in found.items()} == {
        "done": ("ended", True, 4, 0, False), "bad": ("ended", True, 6, 0, False), "holder": ("run", False, None, 0, False),
        "next": ("queued", False, None, 1, True)}
    assert all(said["seconds"] >= 0 for said in found.values())
    talk = operator.talk(known, Hello(run_id="holder"), QueryRuns(["done"]), QueryRuns(["x"] * 10000))
    assert list(talk.hear(RunStates).states) == ["done"] and "at most 500" in talk.hear(Refused).reason
    second.link.close()


# ---- runs that go ------------------------------------------------------------------------------------------------------------------

def test_an_ended_run_is_removed_whole_and_others_are_not(node, operator):
    known, second = node.up(operator), Operator()
    node.authorize(second.id)
    for run_id in ("one", "two"):
        assert operator.run(known, run_id, "mkdir d; touch d/x; chmod 500 d").code == 0
    assert second.run(known, "his", "true").code == 0
    hold(operator, known)
    talk = operator.talk(known, Hello())
    heard = {}
    for run_id in ("one", "nowhere", "holder", "his", "two", "one"):
        talk.say(RemoveRun(run_id))
        heard[run_id] = talk.hear(Removed, Refused)
    assert [heard[run_id] for run_id in ("one", "two", "nowhere")] == [Removed("one"), Removed("two"), Removed("nowhere")]
    assert heard["holder"].of == heard["his"].of == "RemoveRun" and heard["holder"].run_id == "holder"
    assert "hasn't ended yet (run): stop it first" in heard["holder"].reason and "another operator's" in heard["his"].reason
    assert sorted(os.listdir(node.folder / "runs")) == ["his", "holder"] and set(states(operator, known, "one", "two", "holder")) == {"holder"}
    let_go(node)
    eventually(lambda: states(operator, known, "holder")["holder"]["over"])
    talk.say(RemoveRun("holder"))
    assert talk.hear(Removed, Refused) == Removed("holder")
    second.link.close()


def test_what_a_killed_agent_left_of_a_deletion_goes_with_the_next_start(node, operator):
    known = node.up(operator)
    assert operator.run(known, "r", "true").code == 0
    node.end(known)
    os.rename(node.folder / "runs" / "r", node.folder / "runs" / ".removed-r-0000")
    known = node.up(operator)
    assert os.listdir(node.folder / "runs") == [] and states(operator, known, "r") == {}


def test_each_operators_oldest_collected_runs_go_and_no_other_does(node, operator, tmp_path):
    known, second = node.up(operator), Operator()
    node.authorize(second.id)
    folder = node.folder / "runs"
    assert second.run(known, "his", "true").code == 0
    leave(operator, known, "uncollected", RunJob("uncollected", "echo out > out"), CollectOutputs("uncollected", ["out"]))
    leave(operator, known, "unread", RunJob("unread", "echo some"))
    eventually(lambda: states(operator, known, "unread")["unread"]["over"])
    watched = operator.talk(known, Hello(run_id="watched", claim=True, keep=2), RunJob("watched", "true"))
    assert watched.hear(*ENDS).code == 0 and operator.logs(known, "watched") == b""
    for number in range(4):
        run_id = f"r{number}"
        talk = operator.talk(known, Hello(run_id=run_id, claim=True, keep=2), RunJob(run_id, "echo out > out"))
        assert talk.hear(*ENDS).code == 0
        talk.close()
        assert collect(operator, known, run_id, ["out"], tmp_path / run_id).files == 1 and operator.logs(known, run_id) == b""
    eventually(lambda: sorted(os.listdir(folder)) == ["his", "r2", "r3", "uncollected", "unread", "watched"])
    watched.close()
    eventually(lambda: sorted(os.listdir(folder)) == ["his", "r2", "r3", "uncollected", "unread"])
    assert operator.logs(known, "unread") == b"some\n", "looked at, not kept"
    assert collect(operator, known, "uncollected", ["out"], tmp_path / "late").files == 1
    assert [said["collected"] for said in states(operator, known, "uncollected", "unread").values()] == [True, False]
    assert operator.logs(known, "unread", keeps=True) == b"some\n"
    eventually(lambda: states(operator, known, "uncollected", "unread").keys() == {"uncollected"}), "its logs are nowhere else"
    assert operator.logs(known, "uncollected", keeps=True) == b""
    eventually(lambda: states(operator, known, "uncollected", "unread") == {})
    eventually(lambda: sorted(os.listdir(folder)) == ["his", "r2", "r3"])
    second.link.close()


# ---- another version ---------------------------------------------------------------------------------------------------------------

def test_an_agent_of_another_version_leaves_a_job_and_the_queue_alone_and_their_outputs_can_be_collected(node, operator, tmp_path):
    known, other_version = node.up(operator), changed_package(tmp_path)
    leave(operator, known, "r", RunJob("r", HOLD + "echo out > out; exit 3"), CollectOutputs("r", ["out"]))
    leave(operator, known, "next", RunJob("next", HOLD + "exit 4"))
    used = node.up(operator, package=other_version)
    assert used["pid"] == known["pid"] and "busy with r and is used as it is" in used["note"]
    let_go(node, "r")
    eventually(lambda: states(operator, known, "next")["next"]["phase"] == "run")
    assert node.up(operator, package=other_version)["pid"] == known["pid"], "the queue is its business too"
    let_go(node, "next")
    eventually(lambda: states(operator, known, "next")["next"]["over"])
    new = eventually(lambda: (lambda one: one["pid"] != known["pid"] and one)(node.up(operator, package=other_version)))
    assert gone(known) and new["agent"] != known["agent"]
    assert {run_id: said["code"] for run_id, said in states(operator, new, "r", "next").items()} == {"r": 3, "next": 4}
    assert collect(operator, new, "r", ["out"], tmp_path / "outputs").files == 1
    assert (tmp_path / "outputs" / "out").read_text() == "out\n"


def test_an_agent_killed_and_replaced_by_another_version_takes_the_job_up(node, operator, tmp_path):
    known = node.up(operator)
    leave(operator, known, "r", RunJob("r", HOLD + "exit 3"))
    eventually(lambda: states(operator, known, "r")["r"]["phase"] == "run")
    node.end(known)
    new = node.up(operator, package=changed_package(tmp_path))
    since = time.monotonic()
    let_go(node, "r")
    eventually(lambda: states(operator, new, "r")["r"]["over"])
    assert states(operator, new, "r")["r"]["code"] == 3 and time.monotonic() - since < WAIT_S
