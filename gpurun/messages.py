"""The words of the lifecycle: states, commands, events, and what else a control session says. No behaviour.

Commands and events are the spec's (section 6). Each is a frozen dataclass; `wire.py` turns them into JSON lines whose `type` is
the class name, so that one search finds class, message, handler and test. Every field has a default, so that a message of an older
or newer peer can be read. `seq` numbers the events of one run on its node, from 1; 0 means that the event isn't on the node's disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List

PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETED = "COMPLETED"
FAILED = "FAILED"
TERMINAL = (COMPLETED, FAILED)


# ---- commands: operator to node --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class MaterializeWorkspace:
    """Make the run's fresh workdir from the tree with this hash ("" = an empty workdir); its contents come by a push."""

    run_id: str = ""
    tree: str = ""


@dataclass(frozen=True)
class RunSetup:
    """Run `setup` once WorkspaceMaterialized holds. `env` stays in memory on the node."""

    run_id: str = ""
    command: str = ""
    env: Dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunJob:
    """Run `run` once the workspace and the setup, where there are any, are done. `env` stays in memory on the node."""

    run_id: str = ""
    command: str = ""
    env: Dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectOutputs:
    """Offer these outputs for a pull as soon as no process of the run is left."""

    run_id: str = ""
    outputs: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class StopJob:
    """End the run's whole process tree: TERM, `grace_s` seconds, KILL. The node answers with JobExited, `stopped` set."""

    run_id: str = ""
    grace_s: float = 10.0


# ---- events: node to operator ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class NodeReady:
    """The node is there and, where the session asked for it, claimed for `run_id`. `facts`: what the node is."""

    run_id: str = ""
    seq: int = 0
    facts: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkspaceMaterialized:
    run_id: str = ""
    seq: int = 0
    files: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class SetupCompleted:
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


@dataclass(frozen=True)
class JobExited:
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


@dataclass(frozen=True)
class OutputsCollected:
    """The operator has acknowledged every byte of the outputs that exist; `missing` are the declared ones that don't."""

    run_id: str = ""
    seq: int = 0
    files: int = 0
    size_bytes: int = 0
    missing: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class NodeFault:
    """The node could not do its part: no exit record and no process, a workspace that could not be written, a full disk."""

    run_id: str = ""
    seq: int = 0
    reason: str = ""


# ---- events made on the operator's side, never accepted from a node ----------------------------------------------------------

@dataclass(frozen=True)
class JobSubmitted:
    run_id: str = ""


@dataclass(frozen=True)
class NodeLost:
    run_id: str = ""
    reason: str = ""


@dataclass(frozen=True)
class OperatorStop:
    run_id: str = ""


# ---- the rest of a control session -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Hello:
    """First line of the opener. With a `run_id`: claim the node for it (`claim`) or follow it; events after `after` are sent again."""

    version: str = ""
    operator: str = ""
    run_id: str = ""
    job: str = ""
    claim: bool = False
    wait: bool = False
    after: int = 0


@dataclass(frozen=True)
class Busy:
    """The claim was not given: `run_id` (job `job`, of `operator`) has had the node for `seconds`. With `wait` NodeReady comes later."""

    run_id: str = ""
    job: str = ""
    operator: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Refused:
    """A message was not taken; `of` is its type. The session goes on unless the node closes it."""

    run_id: str = ""
    of: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Ping:
    number: int = 0


@dataclass(frozen=True)
class Pong:
    number: int = 0


@dataclass(frozen=True)
class Sample:
    """A measurement of the node during a run: telemetry, never read back to decide anything."""

    run_id: str = ""
    values: Dict[str, Any] = field(default_factory=dict)


COMMANDS = (MaterializeWorkspace, RunSetup, RunJob, CollectOutputs, StopJob)
NODE_EVENTS = (NodeReady, WorkspaceMaterialized, SetupCompleted, JobExited, OutputsCollected, NodeFault)
OPERATOR_EVENTS = (JobSubmitted, NodeLost, OperatorStop)
OPERATOR_SAYS = COMMANDS + (Hello, Ping)
NODE_SAYS = NODE_EVENTS + (Busy, Refused, Pong, Sample)
