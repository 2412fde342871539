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
    """First line of the opener. With a `run_id`: claim the node for it (`claim`) or follow it; events after `after` are sent again."""

    version: str = ""
    operator: str = ""
    run_id: str = ""
    job: str = ""
    claim: bool = False
    wait: bool = False
    after: int = 0


class Busy(NamedTuple):
    """The claim was not given: `run_id` (job `job`, of `operator`) has had the node for `seconds`. With `wait` NodeReady comes later."""

    run_id: str = ""
    job: str = ""
    operator: str = ""
    seconds: float = 0.0


class Refused(NamedTuple):
    """A message was not taken; `of` is its type. The session goes on unless the node closes it."""

    run_id: str = ""
    of: str = ""
    reason: str = ""


class Ping(NamedTuple):
    number: int = 0


class Pong(NamedTuple):
    number: int = 0


class Sample(NamedTuple):
    """A measurement of the node during a run: telemetry, never read back to decide anything."""

    run_id: str = ""
    values: Dict[str, Any] = {}


COMMANDS = (MaterializeWorkspace, RunSetup, RunJob, CollectOutputs, StopJob)
NODE_EVENTS = (NodeReady, WorkspaceMaterialized, SetupCompleted, JobExited, OutputsCollected, NodeFault)
OPERATOR_EVENTS = (JobSubmitted, NodeLost, OperatorStop)
OPERATOR_SAYS = COMMANDS + (Hello, Ping)
NODE_SAYS = NODE_EVENTS + (Busy, Refused, Pong, Sample)
