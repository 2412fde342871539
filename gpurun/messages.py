"""The words of the lifecycle: states, commands, events, and what else a control session says. No behaviour.

Commands and events are the spec's (section 6). Each is a NamedTuple (a frozen dataclass takes seven times as long to define, and every
run would pay for it); `wire.py` turns them into JSON lines whose `type` is the class name, so that one search finds class, message,
handler and test. Every field has a default, so that a message of an older or newer peer can be read; nobody changes one in place. `seq` numbers the events of one run on its node, from 1; 0 means that the event isn't on the node's disk.
"""

from typing import Any, Dict, List, NamedTuple

PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETED = "COMPLETED"
FAILED = "FAILED"
TERMINAL = (COMPLETED, FAILED)


# ---- commands: operator to node --------------------------------------------------------------------------------------------

class MaterializeWorkspace(NamedTuple):
    """Make the run's fresh workdir from the tree with this hash ("" = an empty workdir); its contents come by a push."""

    run_id: str = ""
    tree: str = ""


class RunSetup(NamedTuple):
    """Run `setup` once WorkspaceMaterialized holds. `env` stays in memory on the node."""

    run_id: str = ""
    command: str = ""
    env: Dict[str, str] = {}


class RunJob(NamedTuple):
    """Run `run` once the workspace and the setup, where there are any, are done. `env` stays in memory on the node."""

    run_id: str = ""
    command: str = ""
    env: Dict[str, str] = {}


class CollectOutputs(NamedTuple):
    """Offer these outputs for a pull as soon as no process of the run is left."""

    run_id: str = ""
    outputs: List[str] = []


class StopJob(NamedTuple):
    """End the run's whole process tree: TERM, `grace_s` seconds, KILL. The node answers with JobExited, `stopped` set."""

    run_id: str = ""
    grace_s: float = 10.0


class Detach(NamedTuple):
    """Finish this run without an operator. Answered by Detached as soon as that is possible."""

    run_id: str = ""


class RemoveRun(NamedTuple):
    """Delete the run's folder. Answered by Removed; refused while a process of the run is left or may still be started."""

    run_id: str = ""


# ---- events: node to operator ----------------------------------------------------------------------------------------------

class NodeReady(NamedTuple):
    """The node is there and, where the session asked for it, claimed for `run_id`. `facts`: what the node is."""

    run_id: str = ""
    seq: int = 0
    facts: Dict[str, Any] = {}


class WorkspaceMaterialized(NamedTuple):
    run_id: str = ""
    seq: int = 0
    files: int = 0
    size_bytes: int = 0


class SetupCompleted(NamedTuple):
    """The setup ended; a `code` other than 0 is a failed job. `signal` is 0 unless a signal ended it (then `code` is 128 + signal)."""

    run_id: str = ""
    seq: int = 0
    code: int = 0
    signal: int = 0
    stopped: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds: float = 0.0
    hint: str = ""


class JobExited(NamedTuple):
    """The job ended. `stdout_bytes` and `stderr_bytes` are the final sizes of its logs. `hint`: what the node knows of the cause."""

    run_id: str = ""
    seq: int = 0
    code: int = 0
    signal: int = 0
    stopped: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds: float = 0.0
    hint: str = ""


class OutputsCollected(NamedTuple):
    """The operator has acknowledged every byte of the outputs that exist; `missing` are the declared ones that don't."""

    run_id: str = ""
    seq: int = 0
    files: int = 0
    size_bytes: int = 0
    missing: List[str] = []


class NodeFault(NamedTuple):
    """The node could not do its part: no exit record and no process, a workspace that could not be written, a full disk."""

    run_id: str = ""
    seq: int = 0
    reason: str = ""


# ---- events made on the operator's side, never accepted from a node ----------------------------------------------------------

class JobSubmitted(NamedTuple):
    run_id: str = ""


class NodeLost(NamedTuple):
    run_id: str = ""
    reason: str = ""


class OperatorStop(NamedTuple):
    run_id: str = ""


# ---- the rest of a control session -------------------------------------------------------------------------------------------

class Hello(NamedTuple):
    """First line of the opener. With a `run_id`: claim the node for it (`claim`) or follow it; events after `after` are sent again. `keep`:
    how many of this operator's collected runs the node is to keep."""

    version: str = ""
    operator: str = ""
    run_id: str = ""
    job: str = ""
    claim: bool = False
    wait: bool = False
    after: int = 0
    keep: int = 20


class Busy(NamedTuple):
    """The node isn't this run's: `run_id` (job `job`, of `operator`) has had it for `seconds`. A run that was to wait is in the node's queue
    from now on, with `ahead` runs in front of it, that one included, and NodeReady comes when it is its turn; else `ahead` is 0."""

    run_id: str = ""
    job: str = ""
    operator: str = ""
    seconds: float = 0.0
    ahead: int = 0


class Refused(NamedTuple):
    """A message was not taken; `of` is its type. The session goes on unless the node closes it."""

    run_id: str = ""
    of: str = ""
    reason: str = ""


class Detached(NamedTuple):
    """The node has all that it takes to end the run alone: the workspace in the run's workdir and the whole plan on its disk."""

    run_id: str = ""


class Removed(NamedTuple):
    run_id: str = ""


class QueryRuns(NamedTuple):
    """How are these runs? One question for all of them, in a session of any run or of none."""

    run_ids: List[str] = []


class RunStates(NamedTuple):
    """run id: {"phase": queued, workspace, setup, run or ended; "over", "collected", "detached"; "seconds" in that phase; "ahead" in the queue;
    once it ended "code" (null where nobody knows), "signal", "stopped", "reason"}. A run that the node doesn't have isn't in it."""

    states: Dict[str, Any] = {}


class Ping(NamedTuple):
    number: int = 0


class Pong(NamedTuple):
    number: int = 0


class Sample(NamedTuple):
    """A measurement of the node during a run: telemetry, never read back to decide anything."""

    run_id: str = ""
    values: Dict[str, Any] = {}


COMMANDS = (MaterializeWorkspace, RunSetup, RunJob, CollectOutputs, StopJob, Detach, RemoveRun)
NODE_EVENTS = (NodeReady, WorkspaceMaterialized, SetupCompleted, JobExited, OutputsCollected, NodeFault)
OPERATOR_EVENTS = (JobSubmitted, NodeLost, OperatorStop)
OPERATOR_SAYS = COMMANDS + (Hello, Ping, QueryRuns)
NODE_SAYS = NODE_EVENTS + (Busy, Refused, Detached, Removed, RunStates, Pong, Sample)
