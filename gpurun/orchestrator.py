"""One run from start to end: wait for what happens, step the lifecycle, save, act.

The main thread owns the run: it takes one item after the other out of an inbox. Everything that takes time (reading the workspace,
connecting, the session, the push, the logs, the outputs) is a thread that ends in an item, and so is a signal: whatever is going on,
Ctrl-C is the next thing that is seen. After each event the new state is on disk before anything is sent. The whole plan goes to the
node in one flight behind Hello; a command that the lifecycle asks for later was then sent already, and is sent again only to a node
that may not have it. So the node can end the run alone, and any later process can take it over from its record (`take_over`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from copy import deepcopy
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any, Callable, Sequence

from gpurun import __version__, budgets, fsm, landing, manifest, pushing, signals, transfer, workspace
from gpurun.config import Cluster, Job
from gpurun.contact import Contact
from gpurun.errors import (
    EXIT_STOPPED, EXIT_TIME_LIMIT, GpurunError, LinkError, LinkTimeoutError, MachineGoneError, NodeBusyError, RecordError, TransferError,
    UnkeptError, WireError, WorkspaceError, described,
)
from gpurun.files import room
from gpurun.following import Following
from gpurun.link import Link
from gpurun.messages import (
    TERMINAL, Busy, CollectOutputs, Detach, Detached, Hello, JobExited, MaterializeWorkspace, NodeFault, NodeLost, NodeReady, Notice,
    OperatorStop, OutputsCollected, QueryRuns, Refused, RunJob, RunSetup, RunStates, Sample, SetupCompleted, StopJob, WorkspaceMaterialized, NODE_EVENTS,
)
from gpurun.provider import Node
from gpurun.records import Record, RunFolder, utc_now
from gpurun.screen import Screen, remember_terminal
from gpurun.session import Session, dial_known, reach_any

TICK_S = 0.2
STOP_UNHEARD_S = 30.0         # a stop that can't be delivered is given up after this time
AGAIN_S = 5.0                 # a transfer that lasted so long and broke is begun again; one that broke sooner takes the session with it
LOGS_S = 60.0                 # for the rest of the logs once all else is done, counted from their last move
FAULT_LOGS_S = 5.0            # the same when the node could not end the run as it should
PUSHES = 3                    # a workspace that changes under us is listed and pushed again this often
KEEP_RUNS = Hello().keep      # collected runs of this operator that the node keeps
GRACE_S = StopJob().grace_s   # between TERM and KILL
KEYS = {"s": "stop the job", "d": "detach: the job goes on there", "g": "go on watching"}


class Left(Exception):
    """The operator left; the node goes on with whatever it is at."""


class Orchestrator:
    """Drives one run. `run()` and `take_over()` return the result object, whose `exit_code` is the process's."""

    def __init__(self, job: Job, cluster: Cluster, nodes: Sequence[Node], link: Callable[[], Link], folder: RunFolder, record: Record,
                 screen: Screen, wait: bool = False, operator: str = "", detach: bool = False, keep: int = KEEP_RUNS, lacking: str = "",
                 ends: bool = False, submits: bool = False) -> None:
        """`detach`: leave as soon as the node can end the run alone; with `submits` not before its backend has the job. `lacking`: why `job` isn't
        all that it was when the run was begun, the values of its env and the workspace included (what a record alone hasn't got). `ends`: the
        caller ends the machine after this, whatever comes of it."""
        self._job, self._cluster, self._nodes, self._make_link = job, cluster, list(nodes), link
        self._folder, self._record, self._screen = folder, record, screen
        self._wait, self._operator, self._detach, self._keep, self._lacking, self._ends = wait, operator, detach, keep, lacking, ends
        self._submits = submits
        self._late = budgets.Late(budgets.from_wire(record.job.get("budget") or {}))
        self._fsm = fsm.Run(run_id=record.run_id, has_workspace=job.workdir is not None, has_setup=bool(job.setup),
                            has_outputs=bool(job.outputs))
        self._inbox: "SimpleQueue[Any]" = SimpleQueue()
        self._link: Link | None = None
        self._contact = self._contact_with(self._nodes[0])
        self._preparing = False               # a thread may be asking for a passphrase
        self._greeted = False                 # a node may have the run
        self._waiting = False                 # it is busy, and we stand in its queue
        self._sent: set[str] = set()          # the commands that went over this session
        self._entries: list[manifest.Entry] = []
        self._encoded = b""
        self._logs = Following(folder, screen, self._warn_once)
        self._warned: set[str] = set()
        self._last_word_until = 0.0           # a node that was told to stop what we gave up is heard until then
        self._unkept = ""                     # why the record isn't on the disk as it is
        self._followed = False
        self._pulled_at = 0.0                 # when the last pull had brought all
        self._collected: OutputsCollected | None = None
        self._collect_error = ""
        self._pull_from: tuple[int, int] | None = None   # bytes done and in all when the pull began
        self._refused: set[str] = set()
        self._signals = 0
        self._asked = self._reviewed = False  # what Ctrl-C means is being asked; a review was told here
        self._stop_wanted = self._taking_over = False
        self._limit = ""                      # of time or money, that was reached, in words
        self._grace_s = GRACE_S
        self._detached = self._left = self._timed_out = False
        self._before: dict[str, Any] = {}     # the record of a run that is taken over, as it was
        self._deadline = float("inf")
        self._began = self._phase_began = self._ended = time.monotonic()
        self._shown_phase = ""                # the phase that the screen is at
        self._told_backend: dict[str, Any] = {}
        self._there: dict[str, Any] = {}      # what the node said of the run when it was taken over
        self._round = 0                       # transfers of an earlier session or claim have an earlier number
        self._launched: dict[str, float] = {}
        self._turns = {name: threading.Lock() for name in ("push", "follow", "pull")}   # one at a time of each, whatever session

    # ---- from outside ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """The whole run, or with `detach` its beginning. Raises GpurunError for what goes wrong before the node has the run; all else is
        in the result."""
        signals.handle(self._on_signal)       # never put back: a late Ctrl-C mustn't cut off the result that the caller prints
        for number in signals.kept():         # since there is a record, or a machine, that somebody has to end
            self._on_signal(number, None)
        restore_terminal = remember_terminal()
        try:
            self._preparing = True
            self._in_background("prepared", self._prepare)
            while not self._finished():
                self._turn()
            if self._left:
                raise Left
        except Left:
            self._say_what_is_left()
        except GpurunError:                   # of a run that was to be taken over its node said nothing: the record has its last word still
            for name, value in self._before.items():
                setattr(self._record, name, value)
            raise
        finally:
            self._screen.stop_asking()
            if self._preparing:
                restore_terminal()
            self._close()
        return self._result()

    def take_over(self, stop: bool = False, grace_s: float = GRACE_S, echo: bool = True, tail: int | None = None, past: bool = True,
                  leaves: bool = False, deadline: float = float("inf")) -> dict[str, Any]:
        """Goes on with a run that no process here drives, from its record, to its end; with `stop` it is ended. What its node says is the truth: a
        job that ended by itself meanwhile has its own exit code, and its outputs and the rest of its logs come home in any case.

        `echo` shows its logs: from the beginning, or the last `tail` lines of each and what comes then; without `past` only what isn't on
        this disk yet. At `deadline` (time.monotonic) it is left: exit code 124. `leaves`: so does any signal, which asks and stops nothing.
        Raises GpurunError when the node can't be reached; the record stays as it is then.
        """
        self._before = {name: deepcopy(getattr(self._record, name)) for name in ("state", "phase", "exit_code", "reason", "fsm", "times")}
        known = asdict(self._fsm)
        self._fsm = replace(self._fsm, **{name: value for name, value in self._record.fsm.items() if name in known})
        if fsm.unsettled(self._fsm):          # declared lost, or its outputs never came: now the node has its say
            self._fsm = fsm.reopen(self._fsm)
            self._record.times["ended"] = ""
        self._record.seq = 0                  # the node tells all of it again, and what the lifecycle has seen it passes over
        self._taking_over, self._stop_wanted, self._grace_s = True, stop, grace_s
        self._logs.take_over(echo, tail, past)
        self._deadline = deadline
        self._signals = 1 if stop or leaves else 0   # the first Ctrl-C leaves
        return self.run()

    def _contact_with(self, node: Node) -> Contact:
        return Contact(node, self._make_link, self._inbox, self._screen, self._cluster.lost_after_s, self._node_lost, self._give_up)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals += 1
        if self._signals > (6 if self._ends else 3):   # the main thread hangs, in a write that nobody reads: it has had its chances
            self._screen.stop_asking()
            os._exit(EXIT_STOPPED)
        self._inbox.put(("signal", None, number))

    # ---- before the node has the run -----------------------------------------------------------------------------------------

    def _in_background(self, name: str, work: Callable[[], Any]) -> None:
        """`work()` in a thread: `(name, None, its value)` lands in the inbox, or `("failed", None, error)`."""
        def body() -> None:
            try:
                self._inbox.put((name, None, work()))
            except Exception as error:        # whatever it was, the main thread waits for a word
                self._inbox.put(("failed", None, error if isinstance(error, GpurunError) else GpurunError(described(error))))

        threading.Thread(target=body, name=name, daemon=True).start()

    def _prepare(self) -> Session:
        """Lists the workspace while the connection is made."""
        dialled: "SimpleQueue[Any]" = SimpleQueue()
        threading.Thread(target=lambda: dialled.put(dial_known(self._make_link, self._nodes[0], self._inbox)), name="dial", daemon=True).start()
        if self._needs_push():
            if self._lacking:
                raise GpurunError(f"the workspace of {self._fsm.run_id} never arrived on its node, and it can't be sent again: {self._lacking}. Set that "
                                  f"right, or end the run with: gpurun stop {self._fsm.run_id}")
            self._list_workspace()
        found = dialled.get()
        self._link = self._make_link()
        return found if isinstance(found, Session) else reach_any(self._link, self._nodes, self._inbox, self._screen, found)

    def _needs_push(self) -> bool:
        return (self._fsm.has_workspace and self._fsm.phase in ("", "workspace") and self._fsm.state not in TERMINAL
                and not self._stop_wanted and not self._record.detached)

    def _list_workspace(self) -> None:
        root = str(self._job.workdir)
        self._screen.phase("read", "the workspace")
        found = workspace.scan(root, self._job.exclude, os.path.dirname(self._folder.path),
                               lambda files, _size, name: self._screen.progress(files, None, "files", name))
        self._entries, self._encoded = found.entries, manifest.encode(found.entries)
        tree = manifest.tree_id(self._encoded)
        if self._record.job.setdefault("tree", tree) != tree:
            self._screen.warn("the workspace isn't what it was when the run was begun; what hasn't arrived goes as it is now")
        self._screen.workspace(root, found)

    def _prepared(self, session: Session) -> None:
        """A first session with a node: claims it for this run."""
        self._preparing = False
        node = self._nodes[0]
        if node is not self._contact.node:
            self._contact = self._contact_with(node)
        self._contact.connected(session)
        if not self._taking_over:
            self._record.node = {"name": node.name, "kind": node.kind, "agent_id": session.endpoint.agent_id,
                                 "cluster": str(self._cluster.path or ""), "label": node.label, "operator": self._link.id if self._link is not None else ""}
        self._record.seen = {}                # this record knows more from here on
        self._record.agent, self._record.path = session.endpoint.version, session.path()
        self._mirror()
        if not self._save() and not self._taking_over:
            self._failed(RecordError(f"{self._unkept}. Nothing was sent; make room, or name another folder with --runs-dir or GPURUN_RUNS."))
        if self._needs_push():
            self._screen.phase("push", f"to {node.name}")
        elif self._fsm.phase:
            self._show_phase()
        self._hello(session)

    def _failed(self, error: GpurunError) -> None:
        """No node has the run: it ends here. One that is taken over goes on there, as far as anybody knows."""
        self._preparing = False
        if self._taking_over and isinstance(error, MachineGoneError):
            self._greeted = True              # nobody else will say anything any more
            self._node_lost(str(error), True)
            return
        if not self._taking_over:
            self._step(NodeFault(self._fsm.run_id, reason=str(error)))
        raise error

    def _hello(self, session: Session) -> None:
        """Opens the session. A node that had the run and lost it must say so: only a run that never began is claimed."""
        plan = self._plan()
        if self._stop_wanted and self._fsm.state not in TERMINAL:
            plan.append(self._stop_job())
        hello = Hello(version=__version__, operator=self._operator, run_id=self._fsm.run_id, job=self._job.name,
                      claim=not self._fsm.phase and not self._stop_wanted and not self._taking_over,
                      wait=self._wait and len(self._nodes) == 1, after=self._record.seq, keep=self._keep, shared=bool(self._nodes[0].backend))
        self._sent = {type(command).__name__ for command in plan}
        if self._taking_over:
            plan.append(QueryRuns([self._fsm.run_id]))   # since when it is at what it is at
        try:
            session.begin(hello, *plan)
        except LinkError as error:
            self._greeted = True
            self._broken(error)
            return
        except WireError as error:            # a message that is too long: none of them went
            self._failed(error)
        self._greeted = True
        self._start_transfers()

    def _plan(self) -> list[Any]:
        """Every command that the run still needs, in order; the node holds each until its turn. After a stop nothing more is begun."""
        run_id, done = self._fsm.run_id, fsm.PHASES.index(self._fsm.phase) if self._fsm.phase else 0
        plan: list[Any] = []
        if self._fsm.state in TERMINAL:
            return plan
        if self._fsm.has_outputs:             # first: a budget looks at them as soon as the job runs
            plan.append(CollectOutputs(run_id, list(self._job.outputs)))
        if not self._stop_wanted:
            if self._needs_push():
                plan.append(MaterializeWorkspace(run_id, manifest.tree_id(self._encoded)))
            if self._fsm.has_setup and done <= 1:
                plan.append(RunSetup(run_id, self._job.setup, self._job.env, self._record.job.get("budget") or {}))
            if done <= 2:
                plan.append(RunJob(run_id, self._job.run, self._job.env, self._record.job.get("budget") or {}, self._nodes[0].backend))
        if self._detach:
            plan.append(Detach(run_id))
        return plan

    def _stop_job(self) -> StopJob:
        return StopJob(self._fsm.run_id, self._grace_s)

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        """The run has ended and so have its logs: the last lines belong to it, so they are waited for as long as they come. Or the node has all
        that it needs and we were asked to leave then."""
        if self._detached and not self._awaits_backend():
            return True
        if self._fsm.state not in TERMINAL or self._taking_over and not self._greeted:
            return False
        if time.monotonic() < self._last_word_until and self._contact.session is not None:
            return False
        if self._followed or self._detach or not (self._record.node_dir or self._taking_over):
            return True
        patience = LOGS_S if self._fsm.exit_code is not None else FAULT_LOGS_S
        if self._logs.writing or time.monotonic() - max(self._logs.moved, self._ended) < patience:
            return False
        self._screen.warn(f"the end of the logs didn't come; it is on the node, in {self._record.node_dir}. Once that can be reached, "
                          f"`gpurun fetch {self._fsm.run_id}` brings it")
        return True

    def _awaits_backend(self) -> bool:
        """Whether the job is still on its way to Slurm, and we are to see it there."""
        return self._submits and bool(self._nodes[0].backend) and not self._record.backend.get("job_id")

    def _turn(self) -> None:
        try:
            kind, source, item = self._inbox.get(timeout=TICK_S)
        except Empty:
            self._screen.live_tick()
            self._watch()
            return
        if kind in ("said", "broken") and source is not self._contact.session:
            return                            # of a session that was replaced
        if kind.endswith("_ended") and source != self._round and isinstance(item, GpurunError):
            return                            # an error of a try that was replaced; what it achieved counts
        if kind in ("vouched", "unreached", "gone"):
            getattr(self._contact, kind)(item)
        else:
            getattr(self, f"_{kind}")(item)

    def _watch(self) -> None:
        if time.monotonic() > self._deadline:
            self._timed_out = True
            raise Left
        if self._greeted:
            self._contact.tick()
        session, told_at = self._contact.session, self._pulled_at
        if (session is not None and self._fsm.phase == "collect" and self._launched.get("pull", 0.0) < told_at
                and time.monotonic() - told_at > AGAIN_S + 2 * session.rtt_s()):
            self._launch("pull")              # our word for it went over a connection that was dead by then, and the session's own isn't
        limit = self._late.look(time.monotonic(), self._contact.session is not None)
        if limit:
            self._end_by(limit)

    def _signal(self, number: int) -> None:
        if not self._greeted:
            if self._taking_over:
                raise Left
            self._stop_wanted = True
            self._step(self._operator_stop())
        elif number == signal.SIGHUP and not self._ends or self._signals > 1 or self._fsm.state in TERMINAL:
            raise Left
        elif self._fsm.phase == "collect":
            self._screen.warn("the job has ended already; collecting its outputs (Ctrl-C again leaves)")
        elif number == signal.SIGINT and not self._asked and self._screen.ask(
                f"{self._fsm.run_id}: what now?", KEYS, self._on_answer):
            self._asked, self._signals = True, 0
        else:
            self._stop("stopping the job and collecting what there is (Ctrl-C again leaves at once)")

    def _reached(self, limit: str) -> None:
        """A limit of the machine."""
        if not self._limit:
            self._record.rented["limit"] = limit
            self._end_by(f"{limit} was reached")

    def _end_by(self, limit: str) -> None:
        """What runs there ends now, and what there is comes home."""
        if not self._limit:
            self._limit = limit
            if self._fsm.state not in TERMINAL and self._fsm.phase != "collect" and not self._stop_wanted:
                self._stop(f"{limit}: stopping the job and collecting what there is")

    def _operator_stop(self) -> OperatorStop:
        return OperatorStop(self._fsm.run_id, self._limit)

    def _on_answer(self, key: str) -> None:
        self._inbox.put(("answered", None, key))

    def _answered(self, key: str) -> None:
        if not self._asked:
            return                            # a second Ctrl-C was the answer
        self._asked, self._signals = False, 0
        if key == "s":
            self._signals = 1
            self._stop("stopping the job and collecting what there is (Ctrl-C leaves at once)")
        elif key == "d" and self._fsm.state not in TERMINAL:
            self._detach = self._left = True
            self._screen.say("detaching as soon as the node has all that it needs")
            self._contact.say(Detach(self._fsm.run_id))

    def _stop(self, text: str) -> None:
        self._asked = False
        self._screen.stop_asking()
        self._screen.warn(text)
        self._stop_wanted = True
        # Whoever wants to stop has no use for the patience that a run deserves.
        self._contact.hurry(min(STOP_UNHEARD_S, self._cluster.lost_after_s))
        self._try_stop()

    def _try_stop(self) -> None:
        """Before the node's first word the plan may be on its way: that word is waited for, so that nothing is left running. What is in
        its queue ends as soon as the node has read StopJob. Where that went behind Hello, the node's events say what it did."""
        if not self._stop_wanted or self._fsm.stopped or "StopJob" in self._sent:
            return
        if self._fsm.phase:
            self._step(self._operator_stop())
        elif self._waiting:
            self._sent.add("StopJob")
            self._contact.say(self._stop_job())

    # ---- what the node says --------------------------------------------------------------------------------------------------

    def _said(self, message: Any) -> None:
        self._contact.heard(message)
        if isinstance(message, (JobExited, NodeFault, Refused)):
            self._last_word_until = 0.0
        if isinstance(message, Sample):
            self._folder.append_event({"sample": message.values})
        elif isinstance(message, Busy):
            self._busy(message)
        elif isinstance(message, Refused):
            self._refusal(message)
        elif isinstance(message, Notice):
            self._notice(message)
        elif isinstance(message, RunStates):
            self._there = dict(message.states.get(self._fsm.run_id) or {}, asked=time.monotonic())
            self._tell_since()
        elif isinstance(message, Detached):
            self._record.detached = self._detached = True
            self._save()
        elif isinstance(message, NODE_EVENTS):
            self._observe(message)

    def _observe(self, event: Any) -> None:
        try:
            fsm.accept_from_wire(event)
            if event.seq and (event.seq <= self._record.seq or self._fsm.state in TERMINAL):
                return                        # seen before the connection broke; or for whoever takes the run up again
            if isinstance(event, OutputsCollected) and not self._pulled_at:
                self._collected = event       # the node has our word for it; the thread that gave it is about to say so here
                return
            if isinstance(event, NodeReady):
                self._ready(event)
            self._record.seq = max(self._record.seq, event.seq)
            self._note(event)
            self._step(event)
        except WireError as error:
            self._give_up(f"the node broke the protocol: {error}")
        self._try_stop()

    def _ready(self, event: NodeReady) -> None:
        self._record.node["facts"] = {name: event.facts.get(name) for name in ("hostname", "os", "arch", "python", "cpus", "gpus")}
        self._record.node_dir = f"{event.facts.get('node_dir', '~/.gpurun')}/runs/{self._fsm.run_id}"
        if self._waiting:                     # the node has the plan that went with Hello, and the workspace or a part of it
            self._waiting = False
            if self._needs_push():
                self._screen.phase("push", f"to {self._nodes[0].name}")

    def _note(self, event: Any) -> None:
        """Times and amounts that the event brings."""
        now = time.monotonic()
        if isinstance(event, NodeReady):
            if not self._record.times["started"]:
                self._record.times["started"] = utc_now()
            return
        if isinstance(event, WorkspaceMaterialized) and not self._taking_over:
            self._record.seconds["push"] = round(now - self._began, 3)
        elif isinstance(event, SetupCompleted):
            self._record.seconds["setup"] = round(event.seconds, 3)
        elif isinstance(event, JobExited):
            self._record.seconds["run"] = round(event.seconds, 3)
        elif isinstance(event, OutputsCollected):
            self._record.seconds["collect"] = round(now - self._phase_began, 3)
            self._record.missing = list(event.missing)
            self._record.outputs = [name for name in self._job.outputs if name not in event.missing and name not in self._refused]
        self._phase_began = now

    def _notice(self, notice: Notice) -> None:
        if notice.about == "backend":
            self._backend(notice.values)
            return
        had = notice.values.get("had") is True   # an earlier review, told to whoever comes: asked where its question was missed
        if had and self._reviewed:
            return
        self._reviewed |= notice.about == "review"
        self._folder.append_event({"notice": notice.about, "text": notice.text})
        if notice.about == "review" and not (had and self._taking_over) and not self._asked and not self._stop_wanted and self._screen.ask(
                f"{self._fsm.run_id}: {notice.text}; what now?", KEYS, self._on_answer):
            self._asked, self._signals = True, 0
        else:
            self._screen.warn(notice.text)

    def _backend(self, news: dict[str, Any]) -> None:
        """What Slurm says of the job. Its queue is a phase for the screen, and no budget counts in it."""
        from gpurun import slurm
        self._record.backend = news
        self._save()
        state, job = str(news.get("state", "")), f"Slurm job {news.get('job_id')}"
        why = f" ({news['reason']})" if news.get("reason") not in (None, "", "None") else ""
        if self._fsm.phase != "run" or not news.get("job_id") or self._told_backend == {**news, "seconds": 0}:
            return
        self._told_backend = {**news, "seconds": 0}
        kind = slurm.STATES.get(state, "")
        self._late.since = time.monotonic() - float(news.get("seconds") or 0) if kind == slurm.RUNS else float("inf")
        if state == "RUNNING":
            self._screen.phase("run", f"{job} on {news.get('nodes') or self._nodes[0].name}{why}")
        elif kind != slurm.ENDED:
            self._screen.phase("run" if kind == slurm.RUNS else "queue", f"{job}: {state or 'submitted'}{why}")
        elif state != "COMPLETED":
            self._screen.say(f"{job}: {state}{why}")

    def _busy(self, busy: Busy) -> None:
        node = self._nodes[0]
        who = f"{node.name} is busy with {busy.run_id or 'another run'} of {busy.operator or 'another operator'} for {busy.seconds:.0f} s"
        if busy.ahead:                        # our run is in its queue, and all that we send is taken
            self._waiting = True
            more = f"; {busy.ahead - 1} more in front of this run" if busy.ahead > 1 else ""
            self._screen.phase("wait", who + more)
            self._try_stop()
            return
        self._round += 1                      # the transfers of this try end without the run
        if self._stop_wanted:
            self._step(self._operator_stop())
        elif len(self._nodes) > 1:
            self._screen.say(f"{who}; trying {self._nodes[1].name}")
            del self._nodes[0]
            self._contact.drop()
            self._greeted, self._preparing = False, True
            self._in_background("prepared", lambda: reach_any(self._make_link(), self._nodes, self._inbox, self._screen))
        else:
            error = NodeBusyError(f"{who}. Wait for it with --wait, end it with `gpurun stop`, or name another node with --node.")
            self._step(NodeFault(self._fsm.run_id, reason=str(error)))

    def _refusal(self, refused: Refused) -> None:
        """The commands that went with a Hello which wasn't granted are refused too: the answer to Hello has said it all."""
        assert self._contact.session is not None
        node, run_id, known = self._nodes[0].name, self._fsm.run_id, self._record.node.get("agent_id")
        if refused.of not in ("", "Hello"):
            return
        if not self._taking_over and self._stop_wanted and not self._fsm.phase:
            self._step(self._operator_stop())  # the node doesn't have the run, and we don't send it any more
        elif not self._taking_over:
            other = (" The agent there isn't the one that was given the run: another machine answers to that name, or its node_dir was deleted"
                     if known != self._contact.session.endpoint.agent_id else "")
            self._step(NodeFault(run_id, reason=f"the node refused: {refused.reason}{other and '.'}{other}"))
        elif not refused.of:
            raise GpurunError(f"{node} can't go on with {run_id} by itself ({refused.reason}): {self._lacking or 'its job is another one here'}. Set that "
                              f"right and attach again, or end the run with `gpurun stop {run_id}`.")
        elif self._link is not None and self._record.node.get("operator", self._link.id) != self._link.id:
            raise GpurunError(f"{run_id} belongs to another key than yours: {node} shows it only to the one that started it. Bring that key here "
                              "(`key` in ~/.config/gpurun of that laptop), or use that laptop.")
        elif known != self._contact.session.endpoint.agent_id:
            raise GpurunError(f"the agent on {node} isn't the one that was given {run_id}: another machine answers there, or its node_dir was deleted. "
                              f"The record stays as it is. If the run is gone for good, `gpurun rm --here {run_id}` removes it here.")
        elif "damaged" in refused.reason and self._fsm.state not in TERMINAL:
            self._step(NodeFault(run_id, reason=f"{node}: {refused.reason}"))
        elif not self._fsm.phase and not self._record.detached:
            self._step(NodeFault(run_id, reason=f"it never came to {node}: gpurun was ended before that. Nothing was run; run the job again"))
        elif self._fsm.state not in TERMINAL:
            self._step(NodeFault(run_id, reason=f"{node} has the run no more: its folder there was deleted. How it ended isn't known"))
        else:
            raise GpurunError(f"{node} has {run_id} no more: its folder there was removed. What is here is all that there is.")

    # ---- step, save, act -----------------------------------------------------------------------------------------------------

    def _step(self, event: Any) -> None:
        before = self._fsm
        self._fsm, commands = fsm.step(self._fsm, event)
        self._mirror()
        if self._fsm.state in TERMINAL and before.state not in TERMINAL:
            self._ended = time.monotonic()
            self._record.times["ended"] = utc_now()
        self._save()
        if self._fsm is not before or commands:
            self._folder.append_event({"event": type(event).__name__, "from": before.state, "from_phase": before.phase, "to": self._fsm.state,
                                       "to_phase": self._fsm.phase, "command": list(commands)})
        self._act(commands)
        if self._fsm.phase != before.phase:
            self._show_phase()
        if self._detached and self._fsm.ended and self._awaits_backend():
            self._detach = self._detached = False   # it never came there: it is brought home and told of like any other
            self._logs.take_over(True, None, True)
            if self._contact.session is not None:
                self._start_transfers()
        if self._asked and (self._fsm.phase == "collect" or self._fsm.state in TERMINAL):
            self._asked, self._signals = False, 0
            self._screen.stop_asking()        # there is nothing left to decide
        if self._fsm.phase == "collect" and self._collect_error:
            self._step(NodeFault(self._fsm.run_id, reason=self._collect_error))

    def _mirror(self) -> None:
        """The lifecycle as the record has it."""
        self._record.fsm = asdict(self._fsm)
        self._record.state, self._record.phase = self._fsm.state, self._fsm.phase
        self._record.exit_code = fsm.outcome(self._fsm) if self._fsm.state in TERMINAL else None   # what gpurun exits with
        self._record.reason = self._fsm.reason

    def _show_phase(self) -> None:
        phase = self._fsm.phase
        self._late.since = time.monotonic() if phase == "setup" or phase == "run" and not self._nodes[0].backend else float("inf")
        if phase == "run" and self._nodes[0].backend:
            if not self._record.backend.get("job_id"):
                self._screen.phase("queue", f"sbatch on {self._nodes[0].name}")
        elif phase not in ("", "workspace"):
            self._screen.phase(phase, f"{'from' if phase == 'collect' else 'on'} {self._nodes[0].name}")
            self._shown_phase = phase
            if phase == "collect" and self._pull_from is not None:   # it began before its node's word that the job has ended was here
                self._screen.progress(*self._pull_from)
            self._tell_since()

    def _tell_since(self) -> None:
        seconds = self._there.get("seconds")
        if self._there.get("phase") == self._shown_phase and isinstance(seconds, (int, float)) and not self._nodes[0].backend:
            seconds += time.monotonic() - self._there["asked"]
            self._screen.phase_since(seconds)
            self._late.since = min(self._late.since, time.monotonic() - seconds)

    def _act(self, commands: Sequence[str]) -> None:
        """Sends what wasn't sent ahead. Without a session nothing is lost: the next one gets the whole plan."""
        known = {type(command).__name__: command for command in self._plan() + [self._stop_job()]}
        wanted = [name for name in commands if name in known and name not in self._sent]
        if wanted and self._contact.session is not None:
            self._sent.update(wanted)
            self._contact.say(*[known[name] for name in wanted])

    def _give_up(self, reason: str) -> None:
        """A fault of ours, or nonsense from the node: the run ends here, and as far as we can tell there."""
        self._step(NodeFault(self._fsm.run_id, reason=reason))
        self._contact.say(self._stop_job())

    def _save(self) -> bool:
        """Whether this disk took the record. A run that its node has goes on without: its truth is there too, and it is said once."""
        self._record.offsets = self._logs.kept
        try:
            self._folder.save(self._record)
        except OSError as error:
            self._unkept = (f"the record {self._folder.record} can't be written: {error.strerror} "
                            f"({room(self._folder.path, len(self._record.encode()))})")
            if self._greeted:
                self._warn_once("record", f"{self._unkept}; make room. The run goes on")
            return False
        return True

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._screen.warn(text)

    # ---- transfers -----------------------------------------------------------------------------------------------------------

    def _start_transfers(self) -> None:
        """Each in a thread, on the session of now. A pull whose acknowledgement was lost is done again: what is here isn't sent again."""
        self._round += 1
        if self._needs_push():
            self._launch("push")
        if self._detach:
            return                            # what comes back comes when somebody attaches
        if not self._followed:
            self._launch("follow")
        if self._fsm.has_outputs and self._fsm.state not in TERMINAL:
            self._launch("pull")

    def _launch(self, name: str) -> None:
        session, started_in = self._contact.session, self._round
        assert session is not None
        work = {"push": self._push_tree, "follow": self._follow_logs, "pull": self._pull_outputs}[name]
        self._launched[name] = time.monotonic()

        def body() -> None:
            try:
                with self._turns[name]:       # an earlier one may still be writing what it had got
                    outcome: Any = work(session)
            except Exception as error:        # whatever it was, the main thread waits for a word
                outcome = error if isinstance(error, GpurunError) else TransferError(described(error))
            self._record.connections = max(self._record.connections, session.connections())
            self._inbox.put((f"{name}_ended", started_in, outcome))

        threading.Thread(target=body, name=name, daemon=True).start()

    def _again(self, name: str, error: LinkError) -> None:
        """A transfer broke and the session didn't: a reader of our stdout paused for long, or this is how a breaking link begins."""
        if self._contact.session is None:
            return
        if time.monotonic() - self._launched[name] > AGAIN_S and not isinstance(error, LinkTimeoutError):
            self._launch(name)                # where nothing came for so long, nothing would come the next time
        else:
            self._broken(error)

    def _push_tree(self, session: Session) -> Any:
        for attempt in range(PUSHES):
            try:
                return pushing.push(session.transfer, str(self._job.workdir), self._entries, self._encoded, self._push_progress)
            except transfer.ChangedError as error:
                if attempt == PUSHES - 1:
                    raise WorkspaceError(f"{error}; tried {PUSHES} times. Wait until nothing writes it, or exclude it.") from None
                found = workspace.scan(str(self._job.workdir), self._job.exclude, os.path.dirname(self._folder.path))
                self._entries, self._encoded = found.entries, manifest.encode(found.entries)
                session.say(MaterializeWorkspace(self._fsm.run_id, manifest.tree_id(self._encoded)))

    def _push_progress(self, done: int, total: int, name: str) -> None:
        self._record.bytes["pushed"] = done
        self._screen.progress(done, total, "B", name)

    def _push_ended(self, outcome: Any) -> None:
        if isinstance(outcome, LinkError):
            self._again("push", outcome)
        elif isinstance(outcome, GpurunError):
            self._last_word_until = time.monotonic() + FAULT_LOGS_S   # or the next gpurun would find the node busy with this run
            self._give_up(str(outcome))

    def _follow_logs(self, session: Session) -> None:
        self._record.logs_complete = self._logs.follow(session, self._fsm.run_id)

    def _follow_ended(self, outcome: Any) -> None:
        if isinstance(outcome, LinkError):
            self._again("follow", outcome)
            return
        if isinstance(outcome, GpurunError):
            self._warn_once("follow", f"the logs can't be followed: {outcome}")
        self._followed = True

    def _pull_outputs(self, session: Session) -> Any:
        self._pull_from = None
        return landing.pull(session.transfer(), self._fsm.run_id, list(self._job.outputs), self._folder.outputs, self._pull_progress)

    def _pull_progress(self, done: int, total: int, name: str) -> None:
        self._record.bytes["pulled"] = done
        self._pull_from = self._pull_from or (done, total)
        if self._shown_phase == "collect":
            self._screen.progress(done, total, "B", name)

    def _pull_ended(self, outcome: Any) -> None:
        if isinstance(outcome, LinkError):
            self._again("pull", outcome)
        elif isinstance(outcome, GpurunError):
            self._collect_error = str(outcome)
            if self._ends and isinstance(outcome, UnkeptError):
                self._record.rented["unkept"] = self._collect_error
            if self._fsm.phase == "collect":
                self._step(NodeFault(self._fsm.run_id, reason=self._collect_error))
        else:
            self._pulled_at = time.monotonic()
            for path, why in outcome.refused:
                self._refused.add(path)
                self._warn_once(path, f"the output '{manifest.quote_name(path)}' was not collected: {why}")
            if self._collected is not None:
                self._observe(self._collected)

    # ---- the link ------------------------------------------------------------------------------------------------------------

    def _broken(self, error: GpurunError) -> None:
        if isinstance(error, WireError):      # a new session would hear the same
            self._give_up(f"the node broke the protocol: {error}")
        else:
            self._contact.broken(error)

    def _reconnected(self, session: Session) -> None:
        self._record.path = session.path()
        self._save()
        self._contact.connected(session)
        self._hello(session)

    def _node_lost(self, reason: str, gone: bool) -> None:
        self._followed = self._followed or gone or self._fsm.state not in TERMINAL   # as far as anybody can
        if self._fsm.state not in TERMINAL:
            who = f"{self._contact.node.name}: "
            self._step(NodeLost(self._fsm.run_id, who + reason.removeprefix(who), gone))

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._contact.close()
        seconds = self._record.seconds
        if self._taking_over:                 # whose own time says nothing about the run's
            seconds["total"] = round(sum(seconds.get(name, 0.0) for name in fsm.PHASES + ("push",)), 3)
        else:
            seconds["total"] = round(time.monotonic() - self._began, 3)
        if self._turns["follow"].acquire(blocking=False):   # else its thread may be writing: a closed number could be another file's
            self._logs.close()
        self._save()
        if self._link is not None:
            self._link.close()
        self._folder.close()

    def _say_what_is_left(self) -> None:
        run_id, node = self._fsm.run_id, self._nodes[0].name
        left = "the time limit has passed" if self._timed_out else "left"
        if self._ends and self._fsm.state not in TERMINAL:
            self._screen.warn(f"{left}; the machine is ended now, and what wasn't collected goes with it")
            return
        if self._fsm.state in TERMINAL:
            text = f"left before the end of the logs was here; it is on {node}, in {self._record.node_dir}. Bring it with: gpurun fetch {run_id}"
        elif self._fsm.phase == "collect":
            text = f"{left}; the job has ended ({self._fsm.reason}) and its outputs are still on {node}. Collect them with: gpurun fetch {run_id}"
        elif self._stop_wanted:
            text = f"left; {node} was told to stop {run_id} and hasn't said yet that it did. Make sure with: gpurun stop {run_id}"
        else:
            text = f"{left}; the run {run_id} goes on, on {node}. Watch it with: gpurun attach {run_id}; end it with: gpurun stop {run_id}"
        self._screen.warn(text)

    def _result(self) -> dict[str, Any]:
        code = EXIT_TIME_LIMIT if self._timed_out else EXIT_STOPPED
        if self._record.state in TERMINAL:
            code = fsm.outcome(self._fsm)
        elif self._detached and not self._left:
            code = 0
        return self._record.result(self._folder.outputs, code)
