"""The lifecycle: its table row by row, and its promises over random sequences of events."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun import fsm
from gpurun.errors import WireError
from gpurun.fsm import Run, accept_from_wire, outcome, reopen, step, unsettled
from gpurun.messages import (
    COMPLETED, FAILED, NODE_EVENTS, OPERATOR_EVENTS, PENDING, RUNNING, TERMINAL,
    JobExited, JobSubmitted, NodeFault, NodeLost, NodeReady, OperatorStop, OutputsCollected, Ping, SetupCompleted, WorkspaceMaterialized,
)

FULL = Run("r", True, True, True)
BARE = Run("r", False, False, False)
OK, BAD = JobExited(code=0), JobExited(code=3)
KILLED = JobExited(code=143, signal=15, stopped=True)


def at(where, run=FULL):
    """A run that is there by no other way than the fields."""
    if where == "PENDING":
        return run
    return replace(run, state=RUNNING, phase=where, exit_code=0 if where == "collect" else None)


def walk(run, *events):
    """The run after all of them, and all commands."""
    commands = ()
    for event in events:
        run, more = step(run, event)
        commands += more
    return run, commands


# (where, event) -> (where then, commands). Everything that isn't here has to raise WireError.
ALLOWED = [
    ("PENDING", JobSubmitted(), "PENDING", ()),
    ("PENDING", NodeReady(), "workspace", ("MaterializeWorkspace",)),
    ("PENDING", NodeFault(), FAILED, ()),
    ("PENDING", NodeLost(), FAILED, ()),
    ("PENDING", OperatorStop(), FAILED, ()),
    ("PENDING", KILLED, FAILED, ()),
    ("workspace", NodeReady(), "workspace", ()),
    ("workspace", WorkspaceMaterialized(), "setup", ("RunSetup",)),
    ("workspace", KILLED, "collect", ("CollectOutputs",)),
    ("workspace", NodeFault(), FAILED, ()),
    ("workspace", NodeLost(), FAILED, ()),
    ("workspace", OperatorStop(), "workspace", ("StopJob",)),
    ("setup", NodeReady(), "setup", ()),
    ("setup", WorkspaceMaterialized(), "setup", ()),
    ("setup", SetupCompleted(code=0), "run", ("RunJob",)),
    ("setup", SetupCompleted(code=3), "collect", ("CollectOutputs",)),
    ("setup", SetupCompleted(code=0, stopped=True), "collect", ("CollectOutputs",)),
    ("setup", KILLED, "collect", ("CollectOutputs",)),
    ("setup", NodeFault(), FAILED, ()),
    ("setup", NodeFault(seq=2), "collect", ("CollectOutputs",)),
    ("setup", NodeLost(), FAILED, ()),
    ("setup", OperatorStop(), "setup", ("StopJob",)),
    ("run", NodeReady(), "run", ()),
    ("run", WorkspaceMaterialized(), "run", ()),
    ("run", SetupCompleted(code=0), "run", ()),
    ("run", SetupCompleted(code=3), "run", ()),
    ("run", OK, "collect", ("CollectOutputs",)),
    ("run", BAD, "collect", ("CollectOutputs",)),
    ("run", KILLED, "collect", ("CollectOutputs",)),
    ("run", NodeFault(), FAILED, ()),
    ("run", NodeFault(seq=2), "collect", ("CollectOutputs",)),
    ("run", NodeLost(), FAILED, ()),
    ("run", OperatorStop(), "run", ("StopJob",)),
    ("collect", NodeReady(), "collect", ()),
    ("collect", WorkspaceMaterialized(), "collect", ()),
    ("collect", SetupCompleted(code=0), "collect", ()),
    ("collect", SetupCompleted(code=3), "collect", ()),
    ("collect", SetupCompleted(code=0, stopped=True), "collect", ()),
    ("collect", OK, "collect", ()),
    ("collect", BAD, "collect", ()),
    ("collect", KILLED, "collect", ()),
    ("collect", OutputsCollected(), COMPLETED, ()),
    ("collect", NodeFault(), FAILED, ()),
    ("collect", NodeLost(), FAILED, ()),
    ("collect", OperatorStop(), "collect", ()),
    ("run", SetupCompleted(code=0, stopped=True), "run", ()),
]
SAMPLES = (JobSubmitted(), NodeReady(), WorkspaceMaterialized(), SetupCompleted(code=0), SetupCompleted(code=3),
           SetupCompleted(code=0, stopped=True), OK, BAD, KILLED, OutputsCollected(), NodeFault(), NodeLost(), OperatorStop())


@pytest.mark.parametrize("where, event, then, commands", ALLOWED, ids=lambda value: str(value)[:60])
def test_a_pair_of_the_table(where, event, then, commands):
    run, sent = step(at(where), event)
    assert (run.phase or run.state, sent) == (then, commands)


@pytest.mark.parametrize("where", fsm.WHERE)
@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: str(event)[:60])
def test_a_pair_that_is_not_in_the_table_raises_naming_event_and_state(where, event):
    if any((where, event) == row[:2] for row in ALLOWED):
        return
    before = at(where)
    with pytest.raises(WireError) as raised:
        step(before, event)
    assert type(event).__name__ in str(raised.value) and before.state in str(raised.value) and before.phase in str(raised.value)
    assert before == at(where)


def test_every_event_has_a_row_and_every_row_a_cell_for_every_place():
    assert set(fsm.TABLE) == set(NODE_EVENTS + OPERATOR_EVENTS)
    assert all(len(row) == len(fsm.WHERE) for row in fsm.TABLE.values())
    assert {cell for row in fsm.TABLE.values() for cell in row if cell} == set(fsm.ROWS)


def test_a_message_that_is_no_event_raises():
    with pytest.raises(WireError, match="Ping"):
        step(FULL, Ping())


@pytest.mark.parametrize("state", TERMINAL)
@pytest.mark.parametrize("event", SAMPLES + (Ping(), NodeLost(run_id="another")), ids=lambda event: str(event)[:60])
def test_a_terminal_state_absorbs_every_event(state, event):
    run = replace(FULL, state=state)
    assert step(run, event) == (run, ())


def test_an_event_of_another_run_raises():
    with pytest.raises(WireError, match="another run"):
        step(FULL, NodeReady(run_id="other"))
    assert step(FULL, NodeReady(run_id="r"))[0].state == RUNNING


# ---- whole runs ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workspace", [True, False])
@pytest.mark.parametrize("setup", [True, False])
@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("code", [0, 1, 255])
def test_a_job_sends_the_steps_it_has_in_order_and_its_exit_code_decides(workspace, setup, outputs, code):
    events = [JobSubmitted(), NodeReady()] + [WorkspaceMaterialized()] * workspace + [SetupCompleted()] * setup
    run, commands = walk(Run("r", workspace, setup, outputs), *events, JobExited(code=code), *[OutputsCollected()] * outputs)
    assert commands == (("MaterializeWorkspace",) * workspace + ("RunSetup",) * setup + ("RunJob",) + ("CollectOutputs",) * outputs)
    assert (run.state, run.phase, run.exit_code, run.reason) == (FAILED if code else COMPLETED, "", code, f"exited {code}")
    assert outcome(run) == code and run.failed_phase == ("run" if code else "")


@pytest.mark.parametrize("where", ["PENDING", "workspace", "setup", "run"])
def test_outputs_collected_before_job_exited_is_no_success(where):
    with pytest.raises(WireError):
        step(at(where), OutputsCollected())


@pytest.mark.parametrize("outputs", [True, False])
def test_a_failed_setup_is_a_failed_job_with_its_exit_code_and_its_outputs(outputs):
    run, commands = walk(replace(FULL, has_outputs=outputs), NodeReady(), WorkspaceMaterialized(), SetupCompleted(code=3),
                         *[OutputsCollected()] * outputs)
    assert "RunJob" not in commands and ("CollectOutputs" in commands) == outputs
    assert (run.state, run.reason, run.failed_phase, outcome(run)) == (FAILED, "setup exited 3", "setup", 3)


@pytest.mark.parametrize("event, reason", [
    (JobExited(code=137, signal=9), "ended by signal 9 (SIGKILL)"),
    (JobExited(code=137, signal=9, hint="the node ran out of memory"), "ended by signal 9 (SIGKILL): the node ran out of memory"),
    (JobExited(code=139, signal=11), "ended by signal 11 (SIGSEGV)"),
    (JobExited(code=168, signal=40), "ended by signal 40"),
    (JobExited(code=127, hint="no such command"), "exited 127: no such command"),
])
def test_the_reason_says_how_the_job_ended(event, reason):
    run, _ = step(at("run", BARE), event)
    assert (run.reason, outcome(run)) == (reason, event.code)


@pytest.mark.parametrize("fault, words", [(NodeFault(reason="the disk is full"), "the disk is full"), (NodeLost(reason="silent"), "lost: silent")])
def test_a_job_that_exited_0_but_whose_outputs_did_not_come_fails_and_says_where_they_are(fault, words):
    run, _ = walk(at("run"), OK, fault)
    assert (run.state, run.exit_code, outcome(run), run.failed_phase) == (FAILED, 0, 125, "collect")
    assert all(word in run.reason for word in (words, "the job itself exited 0", "still on the node", "runs/r/"))


@pytest.mark.parametrize("fault", [NodeFault(reason="full"), NodeLost()])
def test_a_failed_job_keeps_its_exit_code_whatever_the_collection_does(fault):
    run, _ = walk(at("run"), BAD, fault)
    assert (run.state, outcome(run), run.failed_phase) == (FAILED, 3, "run") and run.reason.startswith("exited 3; its outputs were not")


@pytest.mark.parametrize("where", ["PENDING", "workspace", "setup", "run"])
@pytest.mark.parametrize("fault, reason", [(NodeFault(reason="full"), "full"), (NodeLost(reason="gone"), "the node was lost: gone"),
                                           (NodeLost(), "the node was lost"), (NodeFault(), "the node reported a fault")])
def test_a_node_that_fails_before_the_end_is_125_with_its_reason(where, fault, reason):
    run, _ = step(at(where), fault)
    assert run.reason.startswith(reason)
    assert (run.state, outcome(run), run.exit_code, run.failed_phase) == (
        FAILED, 125, None, at(where).phase or ("queue" if isinstance(fault, NodeLost) else ""))


# ---- stopping ------------------------------------------------------------------------------------------------------------------

def test_a_stop_before_the_node_is_ready_ends_the_run_at_once():
    run, commands = step(FULL, OperatorStop())
    assert (run.state, run.stopped, outcome(run), commands) == (FAILED, True, 130, ()) and "stopped by the operator" in run.reason


@pytest.mark.parametrize("where", ["workspace", "setup", "run"])
def test_a_stop_is_sent_once_and_the_run_goes_on_until_the_node_says_so_and_the_outputs_are_here(where):
    run, commands = walk(at(where), OperatorStop(), OperatorStop())
    assert (run.phase, run.state, commands) == (where, RUNNING, ("StopJob",))
    run, commands = walk(run, KILLED, OutputsCollected())
    assert commands == ("CollectOutputs",)
    assert (run.state, run.reason, run.exit_code, outcome(run)) == (FAILED, "stopped by the operator", 143, 130)


def test_after_a_stop_no_further_step_is_begun_even_if_one_more_ends_well():
    run, commands = walk(FULL, NodeReady(), OperatorStop(), WorkspaceMaterialized(), SetupCompleted(), KILLED, OutputsCollected())
    assert commands == ("MaterializeWorkspace", "StopJob", "CollectOutputs") and outcome(run) == 130


def test_a_job_that_ended_by_itself_before_the_stop_reached_it_is_stopped_and_the_reason_says_both():
    run, _ = walk(at("run"), OperatorStop(), BAD, OutputsCollected())
    assert (outcome(run), run.exit_code, run.reason) == (130, 3, "stopped by the operator; before that the job had exited 3")
    run, _ = walk(at("run"), OperatorStop(), OK, OutputsCollected())
    assert (run.state, outcome(run)) == (FAILED, 130)
    run, _ = walk(at("setup"), OperatorStop(), SetupCompleted(code=4), OutputsCollected())
    assert run.reason == "stopped by the operator; before that the setup had exited 4"


@pytest.mark.parametrize("where, event", [("run", KILLED), ("setup", KILLED), ("setup", SetupCompleted(code=143, signal=15, stopped=True)),
                                          ("setup", SetupCompleted(stopped=True)), ("run", JobExited(stopped=True))])
def test_a_stop_from_another_shell_counts_as_stopped(where, event):
    run, commands = walk(at(where), event, OutputsCollected())
    assert (run.state, run.stopped, outcome(run), run.failed_phase, commands) == (FAILED, True, 130, where, ("CollectOutputs",))


def test_a_stop_while_outputs_are_collected_changes_nothing():
    run, _ = walk(at("run"), OK, OperatorStop(), OutputsCollected())
    assert run.state == COMPLETED and not run.stopped


def test_a_stopped_run_is_never_completed():
    run, _ = step(replace(at("collect"), stopped=True), OutputsCollected())
    assert (run.state, outcome(run)) == (FAILED, 130)


def test_a_stopped_run_stays_130_when_its_outputs_do_not_come():
    run, _ = walk(at("run"), OperatorStop(), JobExited(stopped=True), NodeLost())
    assert outcome(run) == 130 and run.reason.startswith("stopped by the operator; its outputs were not collected")


def test_a_node_that_is_lost_before_it_answers_a_stop_is_125_since_the_job_may_still_run():
    run, _ = walk(at("run"), OperatorStop(), NodeLost())
    assert outcome(run) == 125 and "may still run" in run.reason


# ---- what a node may not say ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("event", [kind() for kind in OPERATOR_EVENTS])
def test_events_of_the_operators_side_are_refused_from_the_wire(event):
    with pytest.raises(WireError, match=type(event).__name__):
        accept_from_wire(event)


@pytest.mark.parametrize("event", [kind() for kind in NODE_EVENTS])
def test_events_of_the_node_are_accepted_from_the_wire(event):
    assert accept_from_wire(event) is event


@pytest.mark.parametrize("event", [JobExited(code=256), JobExited(code=-1), JobExited(code=0, signal=9), JobExited(code=512, stopped=True)])
def test_a_code_that_would_look_like_success_to_a_shell_is_refused(event):
    with pytest.raises(WireError, match="can't be"):
        step(at("run"), event)
    with pytest.raises(WireError):
        step(at("setup"), SetupCompleted(code=event.code, signal=event.signal))


def test_a_run_that_has_not_ended_has_no_outcome():
    with pytest.raises(ValueError, match="has not ended"):
        outcome(FULL)


# ---- over random sequences -----------------------------------------------------------------------------------------------------

CODES = st.sampled_from([0, 0, 0, 1, 3, 255])
EVENTS = st.one_of(
    st.sampled_from([JobSubmitted(), NodeReady(), NodeReady(), WorkspaceMaterialized(), WorkspaceMaterialized(), OutputsCollected(),
                     NodeFault(reason="f"), NodeLost(reason="l"), OperatorStop()]),
    st.builds(SetupCompleted, code=CODES, stopped=st.booleans()), st.builds(SetupCompleted),
    st.builds(JobExited, code=CODES, stopped=st.booleans()), st.builds(JobExited, code=CODES),
)
RUNS = st.builds(Run, st.just("r"), st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=1000, deadline=None)
@given(RUNS, st.lists(EVENTS, max_size=14), st.booleans())
def test_promises_over_random_events(run, events, lead_in):
    if lead_in:  # get to the later phases more often than chance does
        events = [NodeReady(), WorkspaceMaterialized(), SetupCompleted()] + events
    sent, ended, exited_0, terminal = [], 0, False, None
    for event in events:
        before = replace(run)
        try:
            after, commands = step(run, event)
        except WireError:
            assert run == before and run.state not in TERMINAL
            continue
        assert run == before, "step mutated its run"
        assert (after, commands) == step(run, event), "not a function"
        if terminal:
            assert (after, commands) == (terminal, ())
        if isinstance(event, JobExited) and run.phase == "run" and event.code == 0:
            exited_0 = True
        if run.exit_code is not None:
            assert after.exit_code == run.exit_code
        assert after.stopped >= run.stopped
        assert (after.state == RUNNING) == bool(after.phase)
        assert not (commands and after.state in TERMINAL)
        if after.state == COMPLETED:
            assert exited_0 and after.exit_code == 0 and not after.stopped and not after.failed_phase
        if after.state in TERMINAL and not terminal:
            ended, terminal = ended + 1, after
            assert after.reason and (outcome(after) == 0) == (after.state == COMPLETED) and 0 <= outcome(after) <= 255
        sent += commands
        run = after
    assert len(sent) == len(set(sent)), "a command was sent twice"
    assert ended <= 1
    order = [command for command in sent if command != "StopJob"]
    assert order == [command for command in fsm.COMMAND_OF.values() if command in order]
    for has, command in ((run.has_workspace, "MaterializeWorkspace"), (run.has_setup, "RunSetup"), (run.has_outputs, "CollectOutputs")):
        assert has or command not in sent


@settings(max_examples=300, deadline=None)
@given(RUNS, st.lists(EVENTS, max_size=10))
def test_every_run_can_still_end_and_ends_exactly_once(run, events):
    for event in events + [NodeLost()]:
        try:
            run, _ = step(run, event)
        except WireError:
            pass
    assert run.state in TERMINAL


def test_a_run_is_frozen():
    with pytest.raises(FrozenInstanceError):
        FULL.state = PENDING


# ---- closed without the node's word ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("phase", ["workspace", "setup", "run"])
def test_a_run_that_was_declared_lost_can_be_opened_again_where_it_was(phase):
    run, _ = step(at(phase), NodeLost(reason="silent"))
    assert run.state == FAILED and unsettled(run) and "may still run there" in run.reason and "gpurun stop" in run.reason
    again = reopen(run)
    assert (again.state, again.phase, again.exit_code, again.failed_phase, again.stopped) == (RUNNING, phase, None, "", False)


def test_outputs_that_did_not_come_can_be_collected_later_and_the_exit_code_stays():
    for code, state in ((0, COMPLETED), (3, FAILED)):
        run, _ = step(at("run"), JobExited(code=code))
        run, _ = step(run, NodeFault(reason="the disk here is full"))
        assert run.state == FAILED and unsettled(run)
        again = reopen(run)
        assert again.phase == "collect" and again.exit_code == code and "not collected" not in again.reason
        run, _ = step(again, OutputsCollected())
        assert (run.state, run.exit_code) == (state, code) and not unsettled(run)


def test_a_run_that_ended_as_it_should_or_never_began_stays_closed():
    done, _ = step(step(at("run"), JobExited(code=3))[0], OutputsCollected())
    never, _ = step(FULL, NodeFault(reason="busy"))
    assert not unsettled(done) and not unsettled(never)


@pytest.mark.parametrize("where", ["setup", "run"])
def test_what_a_job_had_saved_before_its_node_failed_it_comes_home_and_the_run_is_no_success(where):
    run, commands = step(at(where), NodeFault(seq=3, reason="the node restarted while the job ran: no exit status"))
    assert (run.phase, commands, run.exit_code) == ("collect", ("CollectOutputs",), None)
    run, _ = step(run, OutputsCollected())
    assert (run.state, outcome(run), run.reason) == (FAILED, 125, "the node restarted while the job ran: no exit status")
    assert not unsettled(run)


def test_events_that_a_node_tells_again_from_the_beginning_change_nothing():
    told = (NodeReady(), WorkspaceMaterialized(seq=1), SetupCompleted(seq=2), NodeFault(seq=3, reason="gone"))
    run, _ = walk(FULL, *told)
    assert run.phase == "collect" and walk(run, *told) == (run, ())
    run, _ = walk(FULL, *told[:3], JobExited(seq=3, code=4))
    assert run.phase == "collect" and walk(run, *told[:3], JobExited(seq=3, code=4)) == (run, ())


def test_outputs_that_did_not_come_after_a_fault_of_the_node_can_be_collected_later():
    run, _ = walk(at("run"), NodeFault(seq=3, reason="gone"), NodeLost(reason="silent"))
    assert run.state == FAILED and unsettled(run)
    again, _ = step(reopen(run), OutputsCollected())
    assert (again.state, outcome(again), again.reason) == (FAILED, 125, "gone") and not unsettled(again)


def test_a_run_that_was_lost_in_the_nodes_queue_can_be_taken_up_there():
    run, _ = step(FULL, NodeLost(reason="silent"))
    assert unsettled(run) and reopen(run).state == "PENDING"
    assert step(reopen(run), NodeReady())[0].phase == "workspace"


def test_a_run_that_is_stopped_in_the_nodes_queue_never_began():
    run, _ = step(FULL, KILLED)
    assert (run.state, outcome(run)) == (FAILED, 130) and "before anything was begun" in run.reason and not unsettled(run)


@pytest.mark.parametrize("phase, event", [("setup", SetupCompleted), ("run", JobExited)])
@pytest.mark.parametrize("code, stopped", [(0, False), (3, False), (143, True)])
def test_a_limit_that_its_node_ended_it_for_is_a_time_limit_whatever_code_the_command_chose(phase, event, code, stopped):
    run = walk(at(phase), event(code=code, stopped=stopped, limit="the hard limit of 120 s was reached"), OutputsCollected())[0]
    assert run.state == FAILED and run.reason == "stopped, the hard limit of 120 s was reached" and run.collected and run.exit_code == code
    assert outcome(run) == 124 and run.limit and run.failed_phase == phase


def test_an_operators_stop_stays_one_although_the_run_has_a_limit():
    assert outcome(walk(at("run"), OperatorStop(), KILLED, OutputsCollected())[0]) == 130
