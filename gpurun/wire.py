"""The control protocol `gpurun/control/1`: line-delimited JSON; and the lines and frames that the transfer protocol is made of.

One bidirectional stream a session. One JSON object a line, UTF-8, at most 1 MiB with its newline; `type` is a class name of
`messages.py`, the other keys are its fields. Unknown keys are ignored, a missing key has the field's default. An unknown type, a
field of the wrong type, an empty or over-long line, bad UTF-8 or bad JSON (NaN and Infinity are) ends that session with a `Refused`
line and touches nothing else.

The opener (operator) writes `Hello` first:

    {"type":"Hello","version":"0.1.0","operator":"ana@laptop","run_id":"mnist-20260102-030405-1a2b","job":"mnist","claim":true}

The node answers `NodeReady` (the node is this run's), or `Busy` (it is another one's; with `wait` this run is in the node's queue from
then on, takes commands and its workspace, and `NodeReady` follows when it is its turn), or `Refused`. Then it sends again each event of
that run whose `seq` is above `after`, and each new one:

    {"type":"NodeReady","run_id":"mnist-20260102-030405-1a2b","facts":{"python":"3.11.2","cpus":8}}
    {"type":"WorkspaceMaterialized","run_id":"mnist-20260102-030405-1a2b","seq":1,"files":12,"size_bytes":48121}
    {"type":"SetupCompleted","run_id":"mnist-20260102-030405-1a2b","seq":2,"code":0,"seconds":1.5}
    {"type":"JobExited","run_id":"mnist-20260102-030405-1a2b","seq":3,"code":0,"stdout_bytes":812,"stderr_bytes":0}
    {"type":"OutputsCollected","run_id":"mnist-20260102-030405-1a2b","seq":4,"files":2,"size_bytes":1024,"missing":["a.pt"]}
    {"type":"NodeFault","run_id":"mnist-20260102-030405-1a2b","seq":3,"reason":"no exit record and no process"}

The operator may send the whole plan in one flight right behind `Hello`; the node holds each command until what it waits for is
done (RunSetup: the workspace; RunJob: the setup; CollectOutputs: the last process). A command may be sent again without harm.

    {"type":"MaterializeWorkspace","run_id":"mnist-20260102-030405-1a2b","tree":"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}
    {"type":"RunSetup","run_id":"mnist-20260102-030405-1a2b","command":"pip install -r requirements.txt","env":{"TOKEN":"…"}}
    {"type":"RunJob","run_id":"mnist-20260102-030405-1a2b","command":"python train.py","env":{"TOKEN":"…"}}
    {"type":"CollectOutputs","run_id":"mnist-20260102-030405-1a2b","outputs":["metrics.json"]}
    {"type":"StopJob","run_id":"mnist-20260102-030405-1a2b","grace_s":10.0}

`Detach` asks the node to end the run alone; `Detached` says that it can: the workspace is in the workdir and the plan, without the values
of `env`, on its disk. Those stay in the agent's memory: an agent that was restarted before the job began needs RunSetup and RunJob again.

    {"type":"Detach","run_id":"mnist-20260102-030405-1a2b"}
    {"type":"Detached","run_id":"mnist-20260102-030405-1a2b"}
    {"type":"QueryRuns","run_ids":["mnist-20260102-030405-1a2b"]}
    {"type":"RunStates","states":{"mnist-20260102-030405-1a2b":{"phase":"ended","over":true,"collected":false,"code":0}}}
    {"type":"RemoveRun","run_id":"mnist-20260102-030405-1a2b"}
    {"type":"Removed","run_id":"mnist-20260102-030405-1a2b"}

`Arm` sets the limits after which the node ends its own rented machine, if its operators haven't: so many seconds from now on (then an
operator that is there gets 600 s more, to collect and to end it), or so many without a job and an operator. `Armed` says what holds now,
and whether the node can do it. Both outlive the agent. The last `Arm` holds, whichever operator's it is; one without `provider` disarms.

    {"type":"Arm","end_in_s":28800.0,"idle_s":3600.0,"api":"https://console.vast.ai","why":"max_hours 8","provider":"vastai"}
    {"type":"Armed","able":true,"end_in_s":28800.0,"idle_s":3600.0}
    {"type":"Armed","able":false,"reason":"no CONTAINER_API_KEY was found on this node","end_in_s":28800.0,"idle_s":3600.0}

A `budget` or a `backend` goes with RunJob: limits that the node keeps whoever is there, and what is to run the command if not the node
itself. A run whose `Hello` said `shared` needs no turn. `Notice` tells an operator that is there what is worth a line.

    {"type":"RunJob","run_id":"mnist-20260102-030405-1a2b","command":"python train.py","budget":{"name":"quick","hard_s":120}}
    {"type":"RunJob","run_id":"mnist-20260102-030405-1a2b","command":"srun train","backend":{"kind":"slurm","options":["--partition=gpu"],"submit_s":30}}
    {"type":"Notice","run_id":"mnist-20260102-030405-1a2b","about":"silence","text":"no progress for 5 min","values":{"silent_s":300.0}}
    {"type":"Notice","run_id":"mnist-20260102-030405-1a2b","about":"backend","values":{"kind":"slurm","job_id":"17","state":"PENDING","reason":"Resources"}}

`Ping` is answered by `Pong` with its number. `Sample` (node to operator) is telemetry. `Refused` names the `type` that wasn't taken.
A command for a run that this session has not claimed, or that the node doesn't have, is answered by `Refused`.

    {"type":"Ping","number":7}
    {"type":"Pong","number":7}
    {"type":"Busy","run_id":"other-20260102-030405-9f9f","job":"other","operator":"bo@ci","seconds":12.5,"ahead":1}
    {"type":"Refused","of":"RunJob","reason":"this node has no run mnist-20260102-030405-1a2b"}
    {"type":"Sample","run_id":"mnist-20260102-030405-1a2b","values":{"cpu_percent":97.5,"gpu":[{"util_percent":88}]}}

The session ends when either side ends its stream. An end says nothing about the job: ask again in a new session.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, Callable, Dict, List, Sequence, Tuple

from gpurun.errors import LinkError, WireError

PROTOCOL = 2
CONTROL_ALPN = b"gpurun/control/1"
TRANSFER_ALPN = b"gpurun/transfer/1"
MAX_LINE = 1 << 20            # a plan with a long script fits; a peer can't make us hold more
MAX_FRAME = 1 << 20
SMALL_WRITE = 512 << 10       # frames are gathered up to this size: one write for many small files
MAX_DEPTH = 16                # of facts and samples: who writes them out again must not run into Python's recursion limit


def _flat(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Plain JSON of a sane depth whose numbers any JSON can carry."""
    if isinstance(value, (dict, list)):
        return depth > 0 and all(_flat(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


_CHECKS: Dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63,
    float: lambda value: isinstance(value, float) and math.isfinite(value) or isinstance(value, int) and _CHECKS[int](value),
    List[str]: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    Dict[str, str]: lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
    Dict[str, Any]: lambda value: isinstance(value, dict) and _flat(value),
}


def encode(message: Any) -> bytes:
    """One line. Raises WireError when it is longer than a peer takes."""
    line = json.dumps(dict(type=type(message).__name__, **message._asdict()), separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_LINE:
        raise WireError(f"{type(message).__name__} takes {len(line)} bytes on the wire and at most {MAX_LINE} are allowed: "
                        "put a long script into a file of the workspace")
    return line


def decode(line: bytes, accepted: Sequence[type]) -> Any:
    """The message that `line` says, one of the classes in `accepted`; WireError for everything else."""
    fields = decode_object(line)
    kind = fields.pop("type", None)
    for cls in accepted:
        if cls.__name__ == kind:
            break
    else:
        said = repr(kind[:60]) if isinstance(kind, str) else "that is no text"
        raise WireError(f"a message of type {said} isn't taken here")
    values = {}
    for name, kind_of in cls.__annotations__.items():
        if name in fields:
            if not _CHECKS[kind_of](fields[name]):
                wanted = str(getattr(kind_of, "__name__", kind_of)).replace("typing.", "")
                raise WireError(f"{kind}.{name} must be {wanted}, within bounds; this {type(fields[name]).__name__} isn't")
            values[name] = fields[name]
    return cls(**values)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")   # Python's json takes NaN and Infinity unless told otherwise


def decode_object(line: bytes) -> Dict[str, Any]:
    """A JSON object out of one line; WireError when it isn't one."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise WireError(f"not a line of JSON in UTF-8: {line[:60]!r}") from None
    if not isinstance(value, dict):
        raise WireError(f"not a JSON object: {line[:60]!r}")
    return value


class Reader:
    """Lines, and exact numbers of bytes, out of a stream that gives what has arrived.

    LinkTimeoutError loses nothing, in the middle of a line or a frame either: what had arrived is there for the next call.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffer = b""
        self._at = 0                  # what of the buffer has been taken
        self._more: List[bytes] = []  # arrived behind the buffer; joined only once there is enough
        self._size = 0                # bytes not taken yet, in both

    def line(self, timeout_s: float) -> bytes:
        """One line without its newline; b"" at the end of the stream. An empty line is no line of any protocol here: WireError."""
        self._join()                  # parts that a call left behind which ran out of time
        end = self._buffer.find(b"\n", self._at)
        while end < 0 and self._size < MAX_LINE:
            if not self._receive(timeout_s):
                if self._size:
                    raise WireError("the stream ended in the middle of a line")
                return b""
            if b"\n" in self._more[-1]:
                self._join()
                end = self._buffer.find(b"\n")
        if end < 0 or end - self._at >= MAX_LINE:
            raise WireError(f"a line of more than {MAX_LINE} bytes")
        if end == self._at:
            raise WireError("an empty line")
        return self._take(end + 1 - self._at)[:-1]

    def exactly(self, size: int, timeout_s: float) -> bytes:
        """`size` bytes; LinkError when the stream ends before."""
        self._need(size, timeout_s)
        return self._take(size)

    def frame(self, timeout_s: float) -> Tuple[bytes, bytes]:
        """(kind, payload): one byte of kind, four of length (big-endian), at most 1 MiB of payload."""
        self._need(5, timeout_s)
        kind, size = struct.unpack_from(">cI", self._buffer, self._at)
        if size > MAX_FRAME:
            raise WireError(f"a frame of {size} bytes; at most {MAX_FRAME} are allowed")
        self._need(5 + size, timeout_s)
        self._take(5)
        return kind, self._take(size)

    def _receive(self, timeout_s: float, least: int = 1) -> bool:
        """Waits for more, `least` bytes at once where that is cheaper; False at the end of the stream."""
        more = self._stream.read(timeout_s, least)
        if more:
            self._more.append(more)
            self._size += len(more)
        return bool(more)

    def _need(self, size: int, timeout_s: float) -> None:
        """Brings at least `size` bytes into the buffer."""
        while self._size < size:
            if not self._receive(timeout_s, size - self._size):
                raise LinkError("the other side ended the stream too early")
        if len(self._buffer) - self._at < size:
            self._join()

    def _join(self) -> None:
        if self._more:
            self._buffer, self._at = b"".join([self._buffer[self._at:]] + self._more), 0
            self._more.clear()

    def _take(self, size: int) -> bytes:
        taken = self._buffer[self._at:self._at + size]
        self._at += size
        self._size -= size
        return taken


class Writer:
    """Gathers frames into writes of a good size. `flush` before waiting for an answer."""

    def __init__(self, stream: Any, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self.gathers = SMALL_WRITE    # bytes; less where making them takes longer than sending them: the link shouldn't wait
        self._parts: List[bytes] = []
        self._size = 0

    def frame(self, kind: bytes, payload: bytes = b"") -> None:
        if len(payload) > MAX_FRAME:  # the peer would refuse it, less clearly
            raise WireError(f"a {kind!r} frame of {len(payload)} bytes; at most {MAX_FRAME} are allowed")
        self._add(struct.pack(">cI", kind, len(payload)))
        if payload:
            self._add(payload)

    def _add(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= self.gathers:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            self._stream.write(b"".join(self._parts), self._timeout_s)
            self._parts, self._size = [], 0
