"""`gpurun poll` and `gpurun verify`: how the jobs of manifests are, and the proof of what they made.

A job is a run: its record here says where it is, and its node how it is. Each node is asked once for all of its runs; a run whose record has the
last word needs no node. What nobody can say changes nothing: the row says `unknown` and the manifest stays. A submit that was cut short
has left a trace, and its job is looked for before anything else is submitted for the plan: it never came to a node, or the manifest that
it owes is written now.

A manifest comes with a repository, and it says where a record is, which says what to start on which machine. So nothing is reached by a record
that isn't of this operator's own key: whoever made up both doesn't have that.

`verify` runs a command that stands in a file which others can write. So it shows that command, and runs it only after somebody has
confirmed exactly this text.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from queue import Empty, SimpleQueue
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from gpurun import asyncjobs, external, signals
from gpurun.asking import AT_ONCE, Asked, ask_once
from gpurun.asyncjobs import Change, Found, Project, Reservation
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_TIME_LIMIT, ConfigError, GpurunError, MachineGoneError, RecordError
from gpurun.external import CANCELLED, FAILED, SUBMITTED, TIMEOUT, UNVERIFIED, Manifest, Outcome, Own, printable
from gpurun.fetching import clean_paths, fetch
from gpurun.records import Record, RunFolder, utc_now
from gpurun.screen import Screen, end_on_ctrl_c
from gpurun.stopping import Way, complete, settled

NODES_AT_ONCE = 8
GRACE_S = 10.0                # for a verification that is to end, between TERM and KILL
UNKNOWN = "unknown"
GONE = "gone"                 # with its node, or from it
NEVER = "it never came to a node: nothing was run"


class Row(NamedTuple):
    """One job as `gpurun poll` prints it. `problem`: why its state isn't known."""

    found: Found
    backend_state: str
    note: str = ""
    problem: str = ""

    def object(self) -> dict[str, Any]:
        """For a program to read."""
        manifest, own = self.found.manifest, _own(self.found.manifest)
        value = {"type": "job", "job_id": manifest.job_id, "backend_state": self.backend_state, "manifest_status": manifest.status, "path": self.found.path,
                 "plan_id": manifest.plan_id, "backend": manifest.backend, "run_id": own.run_id if own else ""}
        for name, more in (("terminal_details", manifest.terminal_details), ("note", self.note), ("problem", self.problem)):
            if more:
                value[name] = more
        return value


def _own(manifest: Manifest) -> Own | None:
    try:
        return external.own(manifest)
    except RecordError:
        return None


# ---- poll ------------------------------------------------------------------------------------------------------------------------------

def poll(project: Project, job_ids: Sequence[str], way: Way, screen: Screen, operator: str) -> tuple[list[Row], list[str]]:
    """How these jobs are, or without `job_ids` all of them; their manifests say so afterwards. And words for what could not be settled. RecordError
    when there is no such job, or when the folder has a file that can't be trusted."""
    known = asyncjobs.read_all(project)
    names = {text for one in known for text in (one.manifest.job_id, _run_id(one))}
    said = []
    if not job_ids or not names.issuperset(job_ids):
        at_work, said = _settle(project, None, way, screen, operator)
        for text in at_work:
            screen.say(text)
        known = asyncjobs.read_all(project)
    if job_ids:
        found = list({one.path: one for one in (asyncjobs.find(project, job_id) for job_id in job_ids)}.values())
    else:
        twice = {one.manifest.plan_id: asyncjobs.conflict(known, one.manifest.plan_id) for one in known}
        said += [text for text in twice.values() if text]
        found = [one for one in known if not twice[one.manifest.plan_id]]
    return _look(project, found, way, screen, operator), said


def _run_id(found: Found) -> str:
    own = _own(found.manifest)
    return own.run_id if own else ""


def _look(project: Project, found: Sequence[Found], way: Way, screen: Screen, operator: str) -> list[Row]:
    """Asks, and writes what has changed."""
    answers: dict[str, Outcome] = {}
    runs: dict[str, tuple[RunFolder, Record]] = {}
    for one in found:
        try:
            run, outcome = _from_here(one.manifest)
        except RecordError as error:
            answers[one.path] = Outcome("", UNKNOWN, note=str(error))
            continue
        if outcome is not None:
            answers[one.path] = outcome
        elif run is not None:
            runs[one.path] = run
    answers.update(_ask_nodes(runs, way, screen, operator))
    changes = {}
    for one in found:
        outcome, before = answers[one.path], one.manifest
        if outcome.status and (outcome.status, outcome.details) != (before.status, before.terminal_details) or \
                outcome.status and external.OWN in before.more and before.more[external.OWN].get("run_state") != outcome.backend_state:
            changes[one.path] = Change(one.path, outcome.status, outcome.details, {external.OWN: {"run_state": outcome.backend_state}}, before.status)
    unwritten = ""
    try:
        written = dict(zip(changes, asyncjobs.update(project, list(changes.values()))))
    except RecordError as error:                     # what was heard is told all the same
        written, unwritten = {}, str(error)
    rows = []
    for one in found:
        outcome = answers[one.path]
        problem = outcome.note if not outcome.status else unwritten if one.path in changes else ""
        rows.append(Row(Found(one.path, written.get(one.path, one.manifest)), outcome.backend_state, "" if problem else outcome.note, problem))
    return rows


def _from_here(manifest: Manifest) -> tuple[tuple[RunFolder, Record] | None, Outcome | None]:
    """What this disk knows of a job: the outcome, or the run whose node has to be asked. RecordError when its record isn't here."""
    own = external.own(manifest)
    if own is None:
        note = f"gpurun didn't submit it: ask whoever did, or its backend ({printable(manifest.backend)})"
        return None, Outcome(manifest.status, UNKNOWN, manifest.terminal_details, note)
    if not manifest.waiting and own.run_state != GONE:   # over: whether its outputs are home is another question. A lost one may come back
        return None, Outcome(manifest.status, own.run_state or "ended", manifest.terminal_details)
    folder, record = _record(own)
    if settled(record) or not record.node.get("name"):
        return None, of_record(record, folder.driver() is not None)
    return (folder, record), None


def _folder(own: Own) -> RunFolder:
    return RunFolder(os.path.join(own.runs_dir, own.run_id))


def _record(own: Own) -> tuple[RunFolder, Record]:
    folder = _folder(own)
    if not os.path.exists(folder.record):
        where = f" ({printable(own.folder)})" if own.folder else ""
        raise RecordError(f"the record of run {printable(own.run_id)} isn't in {printable(own.runs_dir)}, so its node isn't known here. Ask where it was "
                          f"submitted{where}, or bring that folder and the key of that operator here")
    return folder, folder.load()


def of_record(record: Record, driven: bool = False) -> Outcome:
    """The outcome of a run whose record has the last word, or that no node has had. `driven`: a gpurun is at work on it just now."""
    if not record.node.get("name") and record.state not in ("COMPLETED", "FAILED"):
        return Outcome(SUBMITTED, "submitting") if driven else Outcome(FAILED, "ended", {"reason": NEVER})
    run = record.fsm
    code, stopped = run.get("exit_code"), bool(run.get("stopped")) or record.exit_code == EXIT_STOPPED and not record.node.get("name")
    return external.outcome({"phase": "ended", "code": 0 if record.state == "COMPLETED" else code, "stopped": stopped,
                             "limit": run.get("limit") if stopped else "", "reason": record.reason if code != 0 else "", "backend": record.backend})


class _Asking:
    """The runs of one node."""

    def __init__(self, way: Way, screen: Screen, operator: str) -> None:
        self.way, self._screen, self._operator = way, screen, operator
        self._lock = threading.Lock()
        self._links: dict[Any, Callable[[], Any]] = {}

    def ask(self, runs: Sequence[tuple[RunFolder, Record]]) -> dict[str, Outcome]:
        """By run id. An agent that isn't there any more is started: it knows how its runs ended."""
        first = runs[0][1]
        with self._lock:                          # reading a cluster file takes milliseconds; a link is shared by the nodes that it suits
            cluster, nodes, link = self.way(first)
            link = self._links.setdefault((cluster.kind, cluster.relay), link)
        answers = {folder.run_id: Outcome("", UNKNOWN, note=_others(record)) for folder, record in runs if not _is_ours(record, link())}
        runs = [(folder, record) for folder, record in runs if folder.run_id not in answers]
        ids = [folder.run_id for folder, _ in runs]
        if not ids:
            return answers
        asked = Asked(link(), nodes[0], ids[:AT_ONCE], self._screen, self._operator)
        try:
            states = dict(asked.states)
            if ids[AT_ONCE:]:
                states.update(ask_once(link(), nodes[0], asked.session.endpoint, ids[AT_ONCE:], self._operator))
            for folder, record in runs:
                answers[folder.run_id] = self._outcome(folder, record, states.get(folder.run_id), asked.session.endpoint.agent_id)
            return answers
        finally:
            asked.close()

    def _outcome(self, folder: RunFolder, record: Record, state: Any, agent_id: str) -> Outcome:
        node = record.node["name"]
        if not isinstance(state, dict):
            if record.node.get("agent_id") != agent_id:
                return Outcome("", UNKNOWN, note=f"the agent on {node} isn't the one that was given {folder.run_id}: another machine answers there, or its "
                                                 "node_dir was deleted")
            return Outcome(FAILED, GONE, {"reason": f"{node} doesn't have the run (any more), and what is known of it here has no end"})
        _keep_seen(folder, state)
        outcome = external.outcome(state)
        if outcome.status == SUBMITTED and state.get("detached") is False and folder.driver() is None:
            note = f"its submit was cut short: `gpurun attach {folder.run_id}` goes on with it, `gpurun stop {folder.run_id}` ends it"
            outcome = outcome._replace(note="; ".join(filter(None, (outcome.note, note))))
        return outcome


def _is_ours(record: Record, link: Any) -> bool:
    """Whether this operator gave the run to its node, as the record says."""
    return bool(link.id) and record.node.get("operator") == link.id


def _others(record: Record) -> str:
    return (f"the run {record.run_id} belongs to another key than yours, so {record.node.get('name')} isn't asked for it. Ask where it was submitted, or bring "
            "that key here (`key` in ~/.config/gpurun)")


def _keep_seen(folder: RunFolder, state: dict[str, Any]) -> None:
    """What the node said, for `gpurun status`. Who drives a run writes its record, and knows more."""
    if folder.try_lock():
        try:
            record = folder.load()
            record.seen = {"at": utc_now(), **state}
            folder.save(record)
        except OSError:
            pass
        finally:
            folder.close()


def _ask_nodes(runs: Mapping[str, tuple[RunFolder, Record]], way: Way, screen: Screen, operator: str) -> dict[str, Outcome]:
    """By the key of `runs`: one question to each node, several nodes at a time. One that can't be reached leaves its runs unknown."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key, (_, record) in runs.items():
        groups.setdefault((str(record.node.get("cluster", "")), str(record.node.get("label") or record.node["name"])), []).append(key)
    todo: "SimpleQueue[list[str]]" = SimpleQueue()
    for keys in groups.values():
        todo.put(keys)
    asking, answers = _Asking(way, screen, operator), {}

    def work() -> None:
        while True:
            try:
                keys = todo.get(block=False)
            except Empty:
                return
            node = runs[keys[0]][1].node["name"]
            try:
                said = asking.ask([runs[key] for key in keys])
                answers.update({key: said[runs[key][0].run_id] for key in keys})
            except MachineGoneError as error:
                answers.update(dict.fromkeys(keys, Outcome(FAILED, GONE, {"reason": f"{node}: {error}"})))
            except (GpurunError, OSError) as error:
                answers.update(dict.fromkeys(keys, Outcome("", UNKNOWN, note=f"{node}: {error}")))
            except Exception as error:            # of a library, whatever it was: the other nodes have their say
                answers.update(dict.fromkeys(keys, Outcome("", UNKNOWN, note=f"{node}: {type(error).__name__}: {error}")))

    threads = [threading.Thread(target=work, name="poll", daemon=True) for _ in range(min(NODES_AT_ONCE, len(groups)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


# ---- submits that were cut short -------------------------------------------------------------------------------------------------------

def settle_left_overs(project: Project, way: Way, screen: Screen, operator: str, plan_id: str | None = None) -> None:
    """What became of the submits of a plan (None: of all) that were cut short: afterwards their jobs have manifests, or never were. RecordError
    when nobody can tell."""
    at_work, said = _settle(project, plan_id, way, screen, operator)
    if at_work or said:
        raise RecordError("\n".join(at_work + said))


def _settle(project: Project, plan_id: str | None, way: Way, screen: Screen, operator: str) -> tuple[list[str], list[str]]:
    """Words for the submits that are at work, and for those that could not be settled."""
    claimed, at_work, said = asyncjobs.left_overs(project, plan_id)
    try:
        asked: dict[str, tuple[RunFolder, Record]] = {}
        outcomes: dict[str, Outcome | None] = {}
        for number, one in enumerate(claimed):
            own, key = one.trace.own, str(number)
            if os.path.isdir(own.runs_dir) and not os.path.exists(_folder(own).record):
                outcomes[key] = None              # it never had a record, or was removed: `gpurun rm` lets nothing go that its node still has
                continue
            try:
                folder, record = _record(own)
            except RecordError as error:
                outcomes[key] = Outcome("", UNKNOWN, note=str(error))
                continue
            if not record.node.get("name"):
                outcomes[key] = None if folder.driver() is None else Outcome("", UNKNOWN, note=f"process {folder.driver()} is at work on it")
            elif settled(record):
                outcomes[key] = of_record(record) if record.node_dir else None
            else:
                asked[key] = folder, record
        outcomes.update(_ask_nodes(asked, way, screen, operator))
        for number, one in enumerate(claimed):
            problem = _settle_one(one, outcomes[str(number)], screen)
            if problem:
                said.append(f"what became of the submit of plan {printable(one.trace.plan.plan_id)} that was cut short at {one.trace.submitted_at} (run "
                            f"{printable(one.trace.own.run_id)}) isn't known: {problem}")
    finally:
        for one in claimed:
            one.release()
    return at_work, said


def _settle_one(one: Reservation, outcome: Outcome | None, screen: Screen) -> str:
    """Words for why it can't be done. An `outcome` of None: no node has ever had it."""
    trace = one.trace
    what = f"a submit of plan {printable(trace.plan.plan_id)} was cut short (run {printable(trace.own.run_id)})"
    if outcome is None or outcome.backend_state == GONE:
        screen.say(f"{what}: no node has its job, so the plan is free again")
        one.drop()
        return ""
    if not outcome.status:
        return outcome.note
    job_id = trace.own.run_id
    if trace.plan.backend == "slurm":
        job_id = _slurm_id(_record(trace.own)[1])
        if not job_id and outcome.status in external.WAITING:
            return (f"its node has it and Slurm hasn't given it a number yet ({outcome.backend_state}); ask again later, or go on with it: "
                    f"gpurun attach {printable(trace.own.run_id)}")
        if not job_id:
            screen.say(f"{what}: it ended before Slurm had it ({(outcome.details or {}).get('reason', outcome.status)}), so the plan is free again")
            one.drop()
            return ""
    path = one.write(external.build(trace.plan, job_id, outcome.status, trace.submitted_at, outcome.details,
                                    trace.own._replace(run_state=outcome.backend_state)))
    screen.say(f"{what}: its job exists, and its manifest is {path}" + (f". {outcome.note}" if outcome.note else ""))
    return ""


def _slurm_id(record: Record) -> str:
    """What Slurm calls the job, as its node has just said or its record has it."""
    said = record.seen.get("backend")
    for value in (said if isinstance(said, dict) else {}, record.backend):
        if isinstance(value.get("job_id"), str) and value["job_id"]:
            return str(value["job_id"])
    return ""


# ---- verify ----------------------------------------------------------------------------------------------------------------------------

class Refused(GpurunError):
    """The operator said no."""

    exit_code = EXIT_STOPPED


class Verifying(NamedTuple):
    """A job that is over and whose outputs are home. `missing`: what it was to make and didn't. `command` runs in `folder`."""

    found: Found
    artifacts: list[str]
    missing: list[str]
    command: str
    folder: str
    outputs: str
    link: str


def prepare(project: Project, job_id: str, way: Way, screen: Screen, operator: str) -> tuple[Row, Verifying | None]:
    """Asks how the job is, and of one that has ended well brings home what isn't. None of one that hasn't: its row says it all."""
    found = asyncjobs.find(project, job_id)
    own = external.own(found.manifest)
    if own is None:
        raise ConfigError(f"gpurun didn't submit job {printable(found.manifest.job_id)} (backend {printable(found.manifest.backend)}), so it has no outputs "
                          "of it. `gpurun show` shows how it is to be verified")
    row = _look(project, [found], way, screen, operator)[0]
    if row.found.manifest.status != UNVERIFIED:
        return row, None
    folder, record = _record(own)
    wanted = clean_paths(found.manifest.expected_artifacts)
    if not complete(record):
        _check_ours(record, way)
        failed = fetch(folder, (), "", way, screen, operator).failed
        if failed and not settled(folder.load()):
            raise GpurunError("; ".join(failed))
        for text in failed:
            screen.warn(text)
    root = os.path.realpath(folder.outputs)
    missing = [path for path in wanted if not _is_home(root, path)]
    if missing and record.node.get("name"):       # not among the declared outputs, or deleted since
        try:
            _check_ours(record, way)
            failed = fetch(folder, missing, "", way, screen, operator).failed
        except GpurunError as error:
            failed = [str(error)]
        for text in failed:
            screen.warn(text)
    missing = [path for path in wanted if not _is_home(root, path)]
    _end_on_signals()
    where = project.root or (own.folder if os.path.isdir(own.folder) else os.path.dirname(own.runs_dir))
    link = _link_artifacts(project, found.manifest.job_id, folder.outputs, screen) if project.root else ""
    return row, Verifying(row.found, [path for path in wanted if path not in missing], missing, row.found.manifest.verification_command, where,
                          folder.outputs, link)


def _check_ours(record: Record, way: Way) -> None:
    if record.node.get("name") and not _is_ours(record, way(record)[2]()):
        raise GpurunError(_others(record))


def _end_on_signals() -> None:
    """As before a run was taken up to bring it home, which has left its own way with signals."""
    end_on_ctrl_c()
    for number in signals.SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _is_home(root: str, path: str) -> bool:
    """Whether it exists below the outputs. A link that leads out of them proves nothing."""
    real = os.path.realpath(os.path.join(root, path))
    return _lies_in(root, real) and os.path.exists(real)


def _lies_in(root: str, path: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _link_artifacts(project: Project, job_id: str, outputs: str, screen: Screen) -> str:
    """`<artifact_dir>/<job_id>` of a GSD project, where its own tools look. What is there already stays. The project's own config, which comes
    with a repository, may name a folder of the project and no other: elsewhere such a link could be something that a shell reads."""
    folder = os.path.join(project.root, asyncjobs.settings(project, os.environ).artifact_dir)
    link = os.path.join(folder, job_id)
    if not (os.environ.get(asyncjobs.ARTIFACT_DIR) or _lies_in(os.path.realpath(project.root), os.path.realpath(folder))):
        screen.warn(f"external_job.artifact_dir leads out of {project.root}, so no link was made there (${asyncjobs.ARTIFACT_DIR} may name any folder); "
                    f"the outputs are in {outputs}")
        return ""
    if os.path.lexists(link):
        return link if os.path.realpath(link) == os.path.realpath(outputs) else ""
    try:
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(outputs, link)
    except OSError as error:
        screen.warn(f"{link} can't be made: {error.strerror}; the outputs are in {outputs}")
        return ""
    return link


def check_command(verifying: Verifying, confirmed: str | None) -> bool:
    """Whether the command was confirmed by its exact text. ConfigError when another text was, or when it can't be a command at all."""
    command = verifying.command
    if "\0" in command:
        raise ConfigError(f"the verification command has a NUL in it, so it can't be run: {printable(command)}")
    if confirmed is not None and confirmed != command:
        raise ConfigError(f"--confirm has another text than the manifest, so nothing was run. The manifest says: {printable(command)}")
    return confirmed is not None


def run_command(verifying: Verifying, run_id: str) -> int:
    """The exit code of the verification, which was confirmed. Its whole output goes to stderr. A signal to this process ends it with all that
    it has started, and this process too."""
    env = {**os.environ, "GPURUN_OUTPUTS": verifying.outputs, "GPURUN_RUN_ID": run_id}
    stops: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def on(number: int, _frame: Any) -> None:
        stops.append(number)
        if process is not None:
            _kill(process, signal.SIGTERM if len(stops) == 1 else signal.SIGKILL)

    signals.handle(on)
    try:
        process = subprocess.Popen(["bash", "-c", verifying.command], cwd=verifying.folder, env=env, stdin=subprocess.DEVNULL, stdout=2, stderr=2,
                                   start_new_session=True)
    except OSError as error:
        raise GpurunError(f"the verification can't be run in {verifying.folder}: {error.strerror} ({error.filename}). Nothing was verified") from error
    if stops:
        _kill(process, signal.SIGTERM)
    code = None
    while code is None:
        try:
            code = process.wait(GRACE_S if stops else 0.5)
        except subprocess.TimeoutExpired:
            if stops:
                _kill(process, signal.SIGKILL)
    if stops:
        _kill(process, signal.SIGKILL)            # what it has left behind
        raise SystemExit(EXIT_STOPPED)
    return 128 - code if code < 0 else code


def _kill(process: "subprocess.Popen[bytes]", number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def note_verified(project: Project, verifying: Verifying, exit_code: int | None) -> Manifest:
    """Keeps the result in the manifest. The status stays what it is: to close the plan is its owner's act."""
    result: dict[str, Any] = {"at": utc_now(), "exit_code": exit_code, "artifacts": verifying.artifacts, "missing": verifying.missing}
    return asyncjobs.update(project, [Change(verifying.found.path, UNVERIFIED, None, {"verification": result}, UNVERIFIED)])[0]


def exit_code_of(manifest: Manifest) -> int:
    """What `gpurun wait` would exit with for a job that failed."""
    code = (manifest.terminal_details or {}).get("exit_code")
    own = code if isinstance(code, int) and not isinstance(code, bool) and 0 < code < 256 else EXIT_FAILED
    return {TIMEOUT: EXIT_TIME_LIMIT, CANCELLED: EXIT_STOPPED}.get(manifest.status, own)


def recovery(manifest: Manifest) -> list[str]:
    """What a person can do about a job that failed. Nothing of it is done here."""
    job, own = printable(manifest.job_id), _own(manifest)
    run = printable(own.run_id) if own else "RUN"
    return [f"look again: gpurun poll {job}, gpurun logs {run}, gpurun fetch {run} (its outputs, as far as they exist)",
            f"reconcile again, as its manifest says (untrusted, look at it first): {printable(manifest.resume_command)}",
            "submit it again: gpurun submit JOB.toml --plan … (yours to say; nothing is submitted again by itself)",
            "or give it up: the plan's owner marks it as skipped; the manifest stays as the record of it"]
