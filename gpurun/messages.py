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
    """Run `setup` once WorkspaceMaterialized holds. `env` stays in memory on the node. `budget`: as in RunJob, whose hard limit holds here too."""

    run_id: str = ""
    command: str = ""
    env: Dict[str, str] = {}
    budget: Dict[str, Any] = {}


class RunJob(NamedTuple):
    """Run `run` once the workspace and the setup, where there are any, are done. `env` stays in memory on the node. `budget`: the fields of
    budgets.Budget that are set; {} for no limits. `backend`: {} for a process of this node, or {"kind": "slurm", "options" of sbatch, "submit_s",
    "poll_s", "pending_s"}."""

    run_id: str = ""
    command: str = ""
    env: Dict[str, str] = {}
    budget: Dict[str, Any] = {}
    backend: Dict[str, Any] = {}


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
    """The setup ended; a `code` other than 0 is a failed job. `signal` is 0 unless a signal ended it (then `code` is 128 + signal). `limit`: the
    limit that the node ended it for."""

    run_id: str = ""
    seq: int = 0
    code: int = 0
    signal: int = 0
    stopped: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds: float = 0.0
    hint: str = ""
    limit: str = ""


class JobExited(NamedTuple):
    """The job ended. `stdout_bytes` and `stderr_bytes` are the final sizes of its logs. `hint`: what the node knows of the cause. `limit`: the limit
    that the node, or Slurm, ended it for."""

    run_id: str = ""
    seq: int = 0
    code: int = 0
    signal: int = 0
    stopped: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds: float = 0.0
    hint: str = ""
    limit: str = ""


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
    """`gone`: for good, its machine doesn't exist any more."""

    run_id: str = ""
    reason: str = ""
    gone: bool = False


class OperatorStop(NamedTuple):
    """`limit`: the time or money limit that has it stopped, where nobody did."""

    run_id: str = ""
    limit: str = ""


# ---- the rest of a control session -------------------------------------------------------------------------------------------

class Hello(NamedTuple):
    """First line of the opener. With a `run_id`: claim the node for it (`claim`) or follow it; events after `after` are sent again. `keep`:
    how many of this operator's collected runs the node is to keep. `shared`: the run's job is no work of this node (it goes to Slurm), so it
    needs no turn."""

    version: str = ""
    operator: str = ""
    run_id: str = ""
    job: str = ""
    claim: bool = False
    wait: bool = False
    after: int = 0
    keep: int = 20
    shared: bool = False


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
    once it ended "code" (null where nobody knows), "signal", "stopped", "limit", "reason"; of a run with a budget "watch", as in Notice; of one that
    goes to Slurm "backend": {"kind", "job_id" ("" before it was submitted), "state", "reason", "nodes", "seconds"}}. A run that the node doesn't
    have isn't in it."""

    states: Dict[str, Any] = {}


class Arm(NamedTuple):
    """The node ends its own rented machine when nobody else does: `end_in_s` from now on (which limit that is, says `why`), or once nothing has
    run and no operator has been there for `idle_s`; 0: that limit isn't set. `provider`: whose machine it is, "vastai"; "" disarms. `api`: the
    base URL of the provider's API. Taken in any session, and replaces what was said before, by whichever operator. Answered by Armed."""

    end_in_s: float = 0.0
    idle_s: float = 0.0
    api: str = ""
    why: str = ""
    provider: str = ""


class Armed(NamedTuple):
    """The limits as the node has them now. Not `able`: it can't end its machine, for this `reason`; a job is stopped at `end_in_s` all the same."""

    able: bool = False
    reason: str = ""
    end_in_s: float = 0.0
    idle_s: float = 0.0


class Notice(NamedTuple):
    """What an operator that is there should know now, and nothing hangs on: `about` "silence", "review" or "limit" of the run's budget (`text` is
    for people; `values` "had": a review that was had before, for who comes later), "backend" (`values` as in RunStates)."""

    run_id: str = ""
    about: str = ""
    text: str = ""
    values: Dict[str, Any] = {}


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
OPERATOR_SAYS = COMMANDS + (Hello, Ping, QueryRuns, Arm)
NODE_SAYS = NODE_EVENTS + (Busy, Refused, Detached, Removed, RunStates, Armed, Notice, Pong, Sample)
