"""The lifecycle of one run as a table: `step(run, event)` gives the next run and the names of the commands to send.

Pure: no clock, no disk, no chance. PENDING -> RUNNING -> COMPLETED | FAILED; RUNNING has the phases workspace, setup, run, collect,
of which a job skips those that it hasn't got. A terminal state absorbs every event. In a table cell "stay" absorbs what a
reconnect can bring again (NodeReady, an event of a phase that is over), and None is a pair that can't be: WireError, nothing changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_TIME_LIMIT, WireError
from gpurun.messages import (
    COMPLETED, FAILED, OPERATOR_EVENTS, PENDING, RUNNING, TERMINAL,
    JobExited, JobSubmitted, NodeFault, NodeLost, NodeReady, OperatorStop, OutputsCollected, SetupCompleted, WorkspaceMaterialized,
)

PHASES = ("workspace", "setup", "run", "collect")
WHERE = (PENDING,) + PHASES
TABLE = {
    #                       PENDING     workspace    setup         run          collect
    JobSubmitted:          ("stay",     None,        None,         None,        None),
    NodeReady:             ("go_on",    "stay",      "stay",       "stay",      "stay"),
    WorkspaceMaterialized: (None,       "go_on",     "stay",       "stay",      "stay"),
    SetupCompleted:        (None,       None,        "setup_end",  "stay",      "stay"),
    JobExited:             ("early_end", "early_end", "early_end", "job_end",   "stay"),
    OutputsCollected:      (None,       None,        None,         None,        "finish"),
    NodeFault:             ("fault",    "fault",     "fault",      "fault",     "no_outputs"),
    NodeLost:              ("fault",    "fault",     "fault",      "fault",     "no_outputs"),
    OperatorStop:          ("not_begun", "stop",     "stop",       "stop",      "stay"),
}
QUEUE = "queue"
COMMAND_OF = {"workspace": "MaterializeWorkspace", "setup": "RunSetup", "run": "RunJob", "collect": "CollectOutputs"}

BY_OPERATOR = "stopped by the operator"
NOT_COLLECTED = "; its outputs were not collected: "
# Linux' numbers, since it is the node's signal: `signal.Signals` would name those of the operator's machine.
SIGNALS = ("HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN TTOU URG XCPU XFSZ "
           "VTALRM PROF WINCH IO PWR SYS").split()


@dataclass(frozen=True)
class Run:
    """Facts only. `exit_code`: the job's own, or that of the setup that ended the run. `failed_phase`: where what failed it happened ("queue": before
    its turn on the node)."""

    run_id: str
    has_workspace: bool
    has_setup: bool
    has_outputs: bool
    state: str = PENDING
    phase: str = ""
    exit_code: int | None = None
    reason: str = ""
    stopped: bool = False
    failed_phase: str = ""
    ended: bool = False          # the node has said that nothing of it runs any more
    collected: bool = False      # the outputs are home, as far as they exist
    limit: str = ""              # the limit that had it stopped
    gone: bool = False           # and so is its node, for good


Next = tuple[Run, tuple[str, ...]]


def step(run: Run, event: Any) -> Next:
    if run.state in TERMINAL:
        return run, ()
    if event.__class__ in TABLE and event.run_id not in ("", run.run_id):
        raise WireError(f"run {run.run_id}: got {_name(event)} of another run, {event.run_id!r}; nothing was changed. See `gpurun status`")
    row = TABLE.get(event.__class__, (None,) * len(WHERE))[WHERE.index(run.phase or PENDING)]
    if row is None:
        raise _misplaced(run, event)
    return ROWS[row](run, event)


def unsettled(run: Run) -> bool:
    """Whether a run was closed without the node's last word: its job may still run there, or its outputs are still there."""
    if run.state != FAILED or not run.failed_phase or run.gone:
        return False                             # a success, a run that no node began, or nobody is left to be asked
    return not _ended(run) or (run.has_outputs and not run.collected)


def reopen(run: Run) -> Run:
    """An unsettled run as it was before it was closed: what the node says from now on decides."""
    if run.failed_phase == QUEUE:
        return replace(run, state=PENDING, phase="", reason="", failed_phase="", stopped=False)
    if not _ended(run):
        return replace(run, state=RUNNING, phase=run.failed_phase, reason="", failed_phase="", stopped=False)
    failed = "" if run.failed_phase == "collect" else run.failed_phase
    reason = run.reason.partition(NOT_COLLECTED)[0] if failed else "exited 0"
    return replace(run, state=RUNNING, phase="collect", reason=reason, failed_phase=failed)


def _ended(run: Run) -> bool:
    return run.ended or run.exit_code is not None


def accept_from_wire(event: Any) -> Any:
    """The event, unless it is one that only this side makes."""
    if isinstance(event, OPERATOR_EVENTS):
        raise WireError(f"the node sent {_name(event)}, which a node may not say; nothing was changed. Look at it with `gpurun doctor`")
    return event


def outcome(run: Run) -> int:
    """The exit code of the CLI for a run that has ended."""
    if run.state not in TERMINAL:
        raise ValueError(f"run {run.run_id} has not ended, it is {run.state}")
    if run.state == COMPLETED:
        return 0
    if run.stopped and (run.exit_code is not None or not run.failed_phase):  # else: lost before it said that it had stopped
        return EXIT_TIME_LIMIT if run.limit else EXIT_STOPPED
    return run.exit_code or EXIT_FAILED


# ---- the rows ------------------------------------------------------------------------------------------------------------------

def _stay(run: Run, event: Any) -> Next:
    return run, ()


def _go_on(run: Run, event: Any) -> Next:
    """To the next phase that the job has. After a stop nothing is begun: the node, which may have had the whole plan, answers it."""
    has = {"workspace": run.has_workspace, "setup": run.has_setup, "run": True}
    done = PHASES.index(run.phase) + 1 if run.phase else 0
    phase = next(phase for phase in PHASES[done:] if has[phase])
    return replace(run, state=RUNNING, phase=phase), () if run.stopped else (COMMAND_OF[phase],)


def _setup_end(run: Run, event: SetupCompleted) -> Next:
    _check_code(run, event)
    return _end(run, event, "setup ") if event.code or event.stopped or event.limit else _go_on(run, event)


def _job_end(run: Run, event: JobExited) -> Next:
    _check_code(run, event)
    return _end(run, event, "")


def _early_end(run: Run, event: JobExited) -> Next:
    """Before the job has begun, only a stop (from here or another shell) ends it; in the node's queue there is nothing to collect."""
    if not event.stopped:
        raise _misplaced(run, event)
    return _job_end(run, event) if run.phase else _not_begun(run, event)


def _end(run: Run, event: Any, what: str) -> Next:
    """Record the exit code, which decides; then collect in any case. A limit that the node has ended it for is a stop that nobody asked for."""
    stopped = run.stopped or event.stopped or bool(event.limit)
    how = _how(event, what)
    reason = how
    if stopped:
        whole = event.stopped or bool(event.limit)
        reason = _by(run, event) if whole else f"{_by(run)}; before that the {what or 'job '}had {how[len(what):]}"
        reason += f" ({event.hint})" if whole and event.hint else ""
    failed = run.phase if stopped or event.code else ""
    run = replace(run, exit_code=event.code, stopped=stopped, reason=reason, failed_phase=failed, ended=True, limit=event.limit or run.limit)
    return (replace(run, phase="collect"), (COMMAND_OF["collect"],)) if run.has_outputs else _finish(run, event)


def _finish(run: Run, event: Any) -> Next:
    run = replace(run, collected=isinstance(event, OutputsCollected))
    good = run.exit_code == 0 and not run.stopped and not run.failed_phase
    return replace(run, state=COMPLETED if good else FAILED, phase=""), ()


def _fault(run: Run, event: Any) -> Next:
    reason = _fault_reason(event)
    lost = isinstance(event, NodeLost)
    if lost and event.gone:                  # and nothing can be had from there any more
        return replace(run, state=FAILED, phase="", reason=reason, failed_phase=run.phase or QUEUE, gone=True), ()
    if run.stopped and not _nodes_word(event):
        reason += "; a stop was asked for and the node didn't answer it, so the job may still run there"
    elif lost and run.phase:
        reason += "; the job may still run there"
    if lost:
        reason += f". Once the node is back, `gpurun attach {run.run_id}` goes on with it and `gpurun stop {run.run_id}` ends it"
    run = replace(run, reason=reason, failed_phase=run.phase or (QUEUE if lost else ""), ended=_nodes_word(event))
    if run.ended and run.phase in ("setup", "run") and run.has_outputs:   # what the job had saved before its node failed it
        return replace(run, phase="collect"), (COMMAND_OF["collect"],)
    return replace(run, state=FAILED, phase=""), ()


def _nodes_word(event: Any) -> bool:
    """Whether the node itself says that the run is over: then the event is on its disk and has a number there."""
    return isinstance(event, NodeFault) and event.seq > 0


def _no_outputs(run: Run, event: Any) -> Next:
    """The exit code stands; but a job that exited 0 and whose outputs aren't here is no success. The node's own fault is what brought the
    run here, told again."""
    if _nodes_word(event):
        return run, ()
    gone = isinstance(event, NodeLost) and event.gone
    if run.failed_phase:
        return _finish(replace(run, reason=f"{run.reason}{NOT_COLLECTED}{_fault_reason(event)}", gone=gone), event)
    if gone:
        reason = f"the job itself exited 0, but its outputs were not collected and are lost: {_fault_reason(event)}"
        return _finish(replace(run, reason=reason, failed_phase="collect", gone=True), event)
    reason = (f"the job itself exited 0, but its outputs were not collected: {_fault_reason(event)}; "
              f"they are still on the node in the run's folder, runs/{run.run_id}/work below its node_dir; "
              f"`gpurun fetch {run.run_id}` tries again to collect them")
    return _finish(replace(run, reason=reason, failed_phase="collect"), event)


def _not_begun(run: Run, event: Any) -> Next:
    return replace(run, state=FAILED, stopped=True, limit=getattr(event, "limit", "") or run.limit,
                   reason=f"{_by(run, event)} before anything was begun"), ()


def _stop(run: Run, event: OperatorStop) -> Next:
    return (run, ()) if run.stopped else (replace(run, stopped=True, limit=event.limit), ("StopJob",))


def _by(run: Run, event: Any = None) -> str:
    limit = getattr(event, "limit", "") or run.limit
    return f"stopped, {limit}" if limit else BY_OPERATOR


ROWS = {"stay": _stay, "go_on": _go_on, "setup_end": _setup_end, "early_end": _early_end, "job_end": _job_end, "finish": _finish,
        "fault": _fault, "no_outputs": _no_outputs, "not_begun": _not_begun, "stop": _stop}


# ---- words ---------------------------------------------------------------------------------------------------------------------

def _how(event: Any, what: str) -> str:
    number = event.signal
    name = f" (SIG{SIGNALS[number - 1]})" if 0 < number <= len(SIGNALS) else ""
    text = f"{what}ended by signal {number}{name}" if number else f"{what}exited {event.code}"
    return f"{text}: {event.hint}" if event.hint else text


def _fault_reason(event: Any) -> str:
    if isinstance(event, NodeLost):
        return f"the node was lost: {event.reason}" if event.reason else "the node was lost"
    return event.reason or "the node reported a fault and no reason; its agent's log has more"


def _check_code(run: Run, event: Any) -> None:
    """A shell shows an exit code of 256 as 0, and a signal is no success: neither may come from a node."""
    if not 0 <= event.code <= 255 or event.signal < 0 or (event.signal and not event.code):
        raise WireError(f"run {run.run_id}: {_name(event)} with code {event.code} and signal {event.signal} can't be; nothing was changed. "
                        f"See `gpurun status {run.run_id}`")


def _misplaced(run: Run, event: Any) -> WireError:
    phase = f", phase {run.phase}" if run.phase else ""
    return WireError(f"run {run.run_id}: {_name(event)} doesn't belong in state {run.state}{phase}; nothing was changed. "
                     f"See `gpurun status {run.run_id}`")


def _name(event: Any) -> str:
    return event.__class__.__name__
