"""The async-job manifest as a contract: its fields, its closed list of statuses, and what a job's state means in its words. Pure.

A manifest says of one job that works somewhere else: which plan it belongs to, how it is, and how its result is to be proved. Another
program reads it and decides by it whether a job is submitted again, so all that isn't exactly right is an error here, never a guess: keys
that stand twice, NaN, a byte order mark, a text where a list belongs. Keys that the contract doesn't name are others' and are kept.
Its three commands are untrusted text: `printable` shows them, and nothing runs one of them unasked.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from gpurun.errors import RecordError

MANIFEST_VERSION = "1.0"
SUBMITTED, RUNNING, UNVERIFIED = "submitted", "running", "completed-unverified"
FAILED, CANCELLED, TIMEOUT = "failed", "cancelled", "timeout"
STATUSES = (SUBMITTED, RUNNING, UNVERIFIED, FAILED, CANCELLED, TIMEOUT)
WAITING = (SUBMITTED, RUNNING)               # not terminal: looked at again, never submitted again
FAILURES = (FAILED, CANCELLED, TIMEOUT)      # only these have terminal_details
TEXTS = ("job_id", "plan_id", "phase", "backend", "submit_command", "verification_command", "resume_command", "submitted_at")
FIELDS = ("version", "job_id", "plan_id", "phase", "backend", "submit_command", "status", "expected_artifacts", "verification_command",
          "resume_command", "submitted_at", "terminal_details")
OWN = "gpurun"                               # the key that gpurun adds: where the run of a job is
REASON_CHARS = 2000

# Slurm's states. The contract's own are the first block; the meaning of the others is certain for the reason beside each. REVOKED (another
# cluster of a federation has the job), LAUNCH_FAILED and RECONFIG_FAIL (requeued or not, as the site has it) are not in it: which status
# they are depends on what comes next.
SLURM_STATES = {
    "PENDING": SUBMITTED, "CONFIGURING": SUBMITTED, "RUNNING": RUNNING, "COMPLETING": RUNNING, "COMPLETED": UNVERIFIED,
    "FAILED": FAILED, "OUT_OF_MEMORY": FAILED, "BOOT_FAIL": FAILED, "NODE_FAIL": FAILED, "PREEMPTED": FAILED,
    "CANCELLED": CANCELLED, "TIMEOUT": TIMEOUT,
    "REQUEUED": SUBMITTED,         # on its way back into the queue, from where it starts again
    "REQUEUE_HOLD": SUBMITTED,     # in the queue again, and held there
    "REQUEUE_FED": SUBMITTED,      # in the queue again, of a federation
    "RESV_DEL_HOLD": SUBMITTED,    # in the queue, held since its reservation was deleted
    "SPECIAL_EXIT": SUBMITTED,     # in the queue again and held, with a mark of the site's
    "POWER_UP_NODE": SUBMITTED,    # as CONFIGURING: it has nodes, which still boot
    "SUSPENDED": RUNNING,          # it was started, has its allocation or gets it back, and goes on
    "STOPPED": RUNNING,            # by SIGSTOP, with its cores kept
    "SIGNALING": RUNNING,          # a signal is being delivered to it
    "RESIZING": RUNNING,           # it gets or gives back nodes
    "STAGE_OUT": RUNNING,          # its files are still being copied out: it isn't over
    "DEADLINE": TIMEOUT,           # ended at the time that it was given as the last
}


class Plan(NamedTuple):
    """What is known of a job before anybody has it: the fields of its manifest that the caller gives."""

    plan_id: str
    phase: str
    backend: str
    submit_command: str
    expected_artifacts: Tuple[str, ...]
    verification_command: str
    resume_command: str


class Manifest(NamedTuple):
    """A manifest that keeps the contract. `more`: the keys that the contract doesn't name."""

    job_id: str
    plan_id: str
    phase: str
    backend: str
    submit_command: str
    status: str
    expected_artifacts: Tuple[str, ...]
    verification_command: str
    resume_command: str
    submitted_at: str
    terminal_details: Optional[Dict[str, Any]] = None
    more: Dict[str, Any] = {}

    def encode(self) -> bytes:
        """The bytes of its file: two spaces, a newline at the end, the contract's order."""
        value = {name: MANIFEST_VERSION if name == "version" else getattr(self, name) for name in FIELDS}
        value.update({name: item for name, item in self.more.items() if name not in FIELDS})
        try:
            return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        except UnicodeEncodeError:               # half a character in a key of others: it stays the escape that it was
            return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()

    @property
    def waiting(self) -> bool:
        return self.status in WAITING


class Own(NamedTuple):
    """gpurun's own key in a manifest: the run that is the job. `folder`: where it was submitted, which is where its commands belong."""

    run_id: str
    runs_dir: str
    cluster: str = ""
    folder: str = ""
    run_state: str = ""


class Outcome(NamedTuple):
    """A job's state in the contract's words. An empty `status`: nobody can say, and the manifest stays as it is; `note` says why."""

    status: str
    backend_state: str
    details: Optional[Dict[str, Any]] = None
    note: str = ""


# ---- building and checking -------------------------------------------------------------------------------------------------------------

def build(plan: Plan, job_id: str, status: str, submitted_at: str, details: Optional[Dict[str, Any]] = None, own: Optional[Own] = None) -> Manifest:
    """A new manifest. RecordError that names the field, if it would break the contract: before anything is submitted is the time to try."""
    manifest = Manifest(job_id=job_id, status=status, submitted_at=submitted_at, terminal_details=(details or None) if status in FAILURES else None,
                        more={} if own is None else {OWN: dict(own._asdict())},
                        **dict(plan._asdict(), expected_artifacts=tuple(plan.expected_artifacts)))
    wrong = problems(dict(manifest._asdict(), version=MANIFEST_VERSION, expected_artifacts=list(manifest.expected_artifacts)))
    wrong += [f"{name} has a NUL in it, which no command or file name can have" for name in TEXTS if "\0" in str(getattr(manifest, name))]
    if wrong:
        raise RecordError(f"the manifest of plan {printable(str(plan.plan_id))} can't be written: {'; '.join(wrong)}")
    return manifest


def problems(value: Any) -> List[str]:
    """What is wrong with a decoded manifest; nothing if it keeps the contract."""
    if not isinstance(value, dict):
        return [f"it holds {_kind(value)} where an object belongs"]
    wrong = [f"{name} is missing" for name in FIELDS if name not in value]
    if "version" in value and value["version"] != MANIFEST_VERSION:
        wrong.append(f'version is {_shown(value["version"])}; gpurun knows "{MANIFEST_VERSION}"')
    for name in TEXTS:
        if name in value and not _text(value[name]):
            wrong.append(f"{name} is {_shown(value[name])} where a text belongs")
    if _text(value.get("job_id")) and not file_name(value["job_id"]):
        wrong.append(f"job_id is {_shown(value['job_id'])}, which can't be the name of its file")
    if _text(value.get("submitted_at")) and not re.match(r"\d{4}-?\d\d-?\d\d([T ]\d\d|\Z)", value["submitted_at"], re.ASCII):
        wrong.append(f"submitted_at is {_shown(value['submitted_at'])}, which is no ISO 8601 time")
    if "status" in value and not (isinstance(value["status"], str) and value["status"] in STATUSES):
        wrong.append(f"status is {_shown(value['status'])}, which is none of {', '.join(STATUSES)}")
    artifacts = value.get("expected_artifacts")
    if "expected_artifacts" in value and not (isinstance(artifacts, (list, tuple)) and artifacts and all(map(_text, artifacts))):
        wrong.append(f"expected_artifacts is {_shown(artifacts)} where a list of paths belongs, at least one")
    details = value.get("terminal_details")
    if details is not None and not isinstance(details, dict):
        wrong.append(f"terminal_details is {_shown(details)} where null or an object belongs")
    elif details is not None and value.get("status") in WAITING:
        wrong.append(f"terminal_details is {_shown(details)} of a job that is {value['status']}")
    return wrong


def decode(data: bytes, where: str, job_id: str = "") -> Manifest:
    """The manifest in a file's bytes. RecordError that names the file and all that is wrong with it. `job_id`: the one that its name says."""
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_number)
    except UnicodeDecodeError as error:
        raise malformed(where, f"it isn't UTF-8: byte {data[error.start]:#x} at {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise malformed(where, f"it isn't valid JSON: {error}" if text.strip() else "it is empty") from None
    wrong = problems(value)
    if not wrong and job_id and value["job_id"] != job_id:
        wrong = [f"it is the manifest of job {_shown(value['job_id'])}, whose file has another name"]
    if wrong:
        raise malformed(where, "; ".join(wrong))
    known = {name: value[name] for name in FIELDS if name != "version"}
    more = {name: item for name, item in value.items() if name not in FIELDS}
    return Manifest(**dict(known, expected_artifacts=tuple(known["expected_artifacts"])), more=more)


def own(manifest: Manifest) -> Optional[Own]:
    """Where the run of this job is; None of a manifest that gpurun didn't write. RecordError if that key says nothing that can be used."""
    value = manifest.more.get(OWN)
    if value is None:
        return None
    texts = {name: value.get(name, "") for name in Own._fields} if isinstance(value, dict) else {}
    if not texts or not all(isinstance(text, str) and "\0" not in text for text in texts.values()) or not file_name(texts["run_id"]) \
            or not texts["runs_dir"].startswith("/"):
        raise RecordError(f"the manifest of job {printable(manifest.job_id)} has a key `{OWN}` that names no run: {_shown(value)}")
    return Own(**texts)


def file_name(text: str) -> bool:
    """Whether a text can be the name of a file (with five letters more) and of nothing else."""
    try:
        return bool(text) and not text.startswith(".") and not re.search(r"[/\0]", text) and len(text.encode()) <= 250
    except UnicodeEncodeError:
        return False


def malformed(where: str, what: str) -> RecordError:
    """The error for a manifest's file that can't be used, whatever is wrong with it."""
    return RecordError(f"{where} is no manifest that can be trusted: {what}. It may stand for a job that runs, so nothing is decided without it: "
                       "mend it, or move it away once you know that no job of it runs")


def _object(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {_shown(next(name for name in names if names.count(name) > 1))} stands twice in one object")
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _text(value: Any) -> bool:
    """A text with something in it, in whole characters."""
    return isinstance(value, str) and value != "" and not re.search("[\ud800-\udfff]", value)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


# ---- what a state means ------------------------------------------------------------------------------------------------------------------

def slurm_status(state: str) -> str:
    """The status for what Slurm calls a job's state (`CANCELLED by 1001` too). RecordError that names a state that isn't in the table."""
    words = state.upper().split() if isinstance(state, str) else []
    if not words or words[0] not in SLURM_STATES or words[1:] and words[1] != "BY":
        raise RecordError(f"Slurm calls the job's state {_shown(state)}, which gpurun doesn't know; nothing was decided by it. Look at it with "
                          "`squeue` and `sacct`")
    return SLURM_STATES[words[0]]


def outcome(state: Dict[str, Any]) -> Outcome:
    """What a node says of a run (one of RunStates' values), in the contract's words. What isn't known is never taken for an end."""
    phase, backend = state.get("phase"), state.get("backend")
    slurm = backend.get("state") if isinstance(backend, dict) and backend.get("kind") == "slurm" else None
    slurm = slurm if isinstance(slurm, str) else ""
    if phase == "ended":
        return _ended(state, slurm)
    if phase in ("queued", "workspace", "setup") or phase == "run" and isinstance(backend, dict) and backend.get("kind") == "slurm" and not slurm:
        return Outcome(SUBMITTED, str(phase) if phase != "run" else "submitting")
    if phase != "run":
        return Outcome("", "unknown", note=f"its node calls what it does {_shown(phase)}, which gpurun doesn't know")
    if not slurm:
        return Outcome(RUNNING, "run")
    try:
        status = slurm_status(slurm)
    except RecordError as error:
        return Outcome("", slurm, note=str(error))
    # Slurm is through with it and the node isn't: its exit code, which decides, is still to come.
    return Outcome(status if status in WAITING else RUNNING, slurm, note=_pending(backend) if status == SUBMITTED else "")


def _pending(backend: Dict[str, Any]) -> str:
    reason = backend.get("reason")
    return f"Slurm: {reason}" if isinstance(reason, str) and reason not in ("", "None") else ""


def _ended(state: Dict[str, Any], slurm: str) -> Outcome:
    """The job's own exit record decides; where it was cut short, whoever did that."""
    code, signal = state.get("code"), state.get("signal")
    code = code if isinstance(code, int) and not isinstance(code, bool) else None
    reason, limit = ("" if not isinstance(state.get(name), str) else state[name] for name in ("reason", "limit"))
    shown = slurm or "ended"
    if limit:
        status, why = TIMEOUT, f"stopped, {limit}"
    elif state.get("stopped") is True:
        status, why = CANCELLED, reason or "stopped by the operator"
    elif code == 0 and SLURM_STATES.get(slurm) != FAILED:
        return Outcome(UNVERIFIED, shown)
    elif code == 0:
        status, why = FAILED, reason or f"Slurm says {slurm}"
    elif slurm.upper().split()[:1] == ["CANCELLED"]:
        status, why = CANCELLED, reason or f"Slurm says {slurm}"
    else:
        status, why = FAILED, reason or ("the node doesn't know how it ended" if code is None else f"exited {code}")
    details: Dict[str, Any] = {"reason": why[:REASON_CHARS]}
    if code is not None:
        details["exit_code"] = code
    if isinstance(signal, int) and not isinstance(signal, bool) and signal:
        details["signal"] = signal
    return Outcome(status, shown, details)


# ---- showing -------------------------------------------------------------------------------------------------------------------------------

# Letters that show nothing, or change how the one before them looks, and that Python calls printable all the same.
_HIDDEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def printable(text: str) -> str:
    """An untrusted text as one line that can't move a cursor, recolour a terminal or hide a letter. A text with nothing of that kind is shown
    as it is; any other as bash writes it, $'…', so that what is shown is exactly one text and can be pasted after --confirm."""
    if text.isprintable() and not _HIDDEN.search(text) and not text.startswith("$'"):
        return text
    return "$'" + "".join(_ESCAPES.get(c) or (c if c.isprintable() and not _HIDDEN.match(c) else f"\\x{ord(c):02x}" if c < "\x80" else
                                              f"\\u{ord(c):04x}" if c <= "\uffff" else f"\\U{ord(c):08x}") for c in text) + "'"
