"""`gpurun attach`, `wait` and `logs`: back to a run, from its record, as if one had never left.

One process drives a run: it holds the lock of the run's folder. Where there is one already, its logs and its record are watched; where
there is none, or it goes, this one takes the run over.
"""

from __future__ import annotations

import os
import signal
import time
from queue import SimpleQueue
from typing import Any, Callable, Mapping, Sequence

from gpurun import config, signals, transfer
from gpurun.asking import UNREACHED, Asked
from gpurun.config import Job
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_TIME_LIMIT, ConfigError, GpurunError, LinkError
from gpurun.files import room
from gpurun.logs import Logs, follow_local
from gpurun.messages import TERMINAL
from gpurun.orchestrator import KEYS, Orchestrator
from gpurun.records import Record, RunFolder
from gpurun.screen import Screen, end_on_ctrl_c
from gpurun.stopping import Way, complete, job_on_record, never_given, settled, stop_run

POLL_S = 0.2
TRIES = 8                     # in a row, before `logs -f` gives a node up
RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


# ---- taking a run over ---------------------------------------------------------------------------------------------------------------

def take_up(folder: RunFolder, record: Record, way: Way, screen: Screen, operator: str, **how: Any) -> dict[str, Any]:
    """The result of a run whose lock this process has: `Orchestrator.take_over(**how)`, with all that can be had of its job."""
    if not record.node.get("name"):
        never_given(folder, record, "it never came to a node: gpurun was ended before that. Nothing was run; run the job again", EXIT_FAILED)
        return result_of(folder, record)
    job, lacking = job_again(record, os.environ)
    cluster, nodes, link = way(record)
    return Orchestrator(job, cluster, nodes, link, folder, record, screen, operator=operator, lacking=lacking).take_over(**how)


def job_again(record: Record, environ: Mapping[str, str]) -> tuple[Job, str]:
    """The job file of a run, read again, and ""; or what the record has of it, and why the file isn't any more what it was then."""
    known = job_on_record(record)
    try:
        job = config.load_job(known.path, environ)
    except ConfigError as error:              # gone, or it takes a variable that isn't set here
        return known, str(error).rstrip(".")
    same = (job._replace(env={}) == known._replace(folder=job.folder, external_job=job.external_job)
            and sorted(job.env) == list(record.job.get("env") or ()))
    return (job, "") if same else (known, f"{known.path} isn't any more what it was when the run was begun")


def result_of(folder: RunFolder, record: Record) -> dict[str, Any]:
    """What `Orchestrator.run` returns, from a record."""
    code = record.exit_code if record.exit_code is not None else EXIT_FAILED
    return record.result(folder.outputs, code if record.state in TERMINAL else EXIT_STOPPED)


# ---- attach ----------------------------------------------------------------------------------------------------------------------------

def attach(folder: RunFolder, way: Way, screen: Screen, operator: str, tail: int | None = None) -> dict[str, Any]:
    """Watches a run to its end and brings home what belongs to it; the result. Its logs are shown from the beginning, or the last `tail`
    lines of each and what comes then."""
    folder.load()                             # or an error: a folder that isn't a run's is left as it is
    shown = not folder.try_lock()
    if shown:
        screen.say(f"process {folder.driver() or '?'} drives {folder.run_id} here; watching it")
        signals = _Signals(folder, way, screen, operator)
        # Nothing is missed and nothing comes twice: what was written before we have the lock is shown before this returns.
        follow_local(folder, screen.log, lambda: signals.handle() or folder.try_lock(), tail)
        screen.stop_asking()
        if signals.left:
            screen.warn(f"left; the run {folder.run_id} goes on. Watch it with: gpurun attach {folder.run_id}")
            return result_of(folder, folder.load())
    try:
        record = folder.load()                # after the lock: whoever drove it until now has written its last word
        if not settled(record):
            return take_up(folder, record, way, screen, operator, tail=None if shown else tail, past=not shown)
        if not complete(record):
            record = _complete(folder, record, way, screen, operator)
        if not shown:
            Logs(folder).show(screen.log, tail)
        return result_of(folder, record)
    finally:
        folder.close()


def _complete(folder: RunFolder, record: Record, way: Way, screen: Screen, operator: str) -> Record:
    """Brings the end of the logs of a run whose outcome is known; without it that outcome stands all the same."""
    try:
        take_up(folder, record, way, screen, operator, echo=False)
    except GpurunError as error:
        screen.warn(f"the end of the logs can't be had: {error}")
    return folder.load()


class _Signals:
    """Signals while another process drives the run. Ctrl-C asks on a terminal and stops the run elsewhere, SIGTERM stops it, SIGHUP leaves."""

    def __init__(self, folder: RunFolder, way: Way, screen: Screen, operator: str) -> None:
        self._folder, self._way, self._screen, self._operator = folder, way, screen, operator
        self._inbox: "SimpleQueue[Any]" = SimpleQueue()
        self._asked = self._stopping = self.left = False
        self._count = 0
        signals.handle(self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._count += 1
        if self._asked or self._count > 3:    # the log that this thread shows is held back while the question stands
            self._screen.stop_asking()
        if self._count > 3:                   # the main thread hangs, in a write that nobody reads
            os._exit(EXIT_STOPPED)
        self._inbox.put(number)

    def handle(self) -> bool:
        """Does what was wanted; whether that is to leave. To be called again and again."""
        self._screen.live_tick()
        while not (self.left or self._inbox.empty()):
            what = self._inbox.get()
            if what in (signal.SIGHUP, "d") or what == signal.SIGINT and self._stopping:
                self.left = True
            elif what in ("g", ""):           # "": nobody can answer any more
                self._asked, self._count = False, 0
            elif what == signal.SIGINT and not self._asked and self._screen.ask(
                    f"{self._folder.run_id}: what now?", KEYS, self._inbox.put):
                self._asked, self._count = True, 0
            else:
                self._stop()
        return self.left

    def _stop(self) -> None:
        self._asked, self._stopping = False, True
        self._screen.stop_asking()
        try:
            stop_run(self._folder, self._way, self._screen, self._operator)
        except GpurunError as error:
            self._screen.warn(f"{error} (Ctrl-C again leaves)")


# ---- wait ------------------------------------------------------------------------------------------------------------------------------

def wait(folder: RunFolder, way: Way, screen: Screen, operator: str, deadline: float = float("inf")) -> dict[str, Any]:
    """The result of a run once it has ended and its outputs are home, or once `deadline` (time.monotonic) has passed: exit code 124."""
    end_on_ctrl_c()                           # a run that was waited for before this one may have left its own way
    folder.load()
    while not folder.try_lock():
        record = folder.load()
        if settled(record):
            return result_of(folder, record)
        if time.monotonic() > deadline:
            screen.warn(f"{folder.run_id} isn't over; it goes on. Wait for it again, or watch it with: gpurun attach {folder.run_id}")
            return dict(result_of(folder, record), exit_code=EXIT_TIME_LIMIT)
        screen.live_tick()
        time.sleep(POLL_S)
    try:
        record = folder.load()
        if settled(record):
            return result_of(folder, record)
        return take_up(folder, record, way, screen, operator, echo=False, leaves=True, deadline=deadline)
    finally:
        folder.close()


# ---- logs ------------------------------------------------------------------------------------------------------------------------------

class Reading:
    """`gpurun logs` of one run: what is here, and what its node has beyond that. Nothing is stopped or collected by reading."""

    def __init__(self, folder: RunFolder, names: Sequence[str], take: Callable[[str, bytes], None], way: Way, screen: Screen, operator: str) -> None:
        """`take(log, bytes)` gets the pieces of the logs in `names`."""
        self._folder, self._names, self._take, self._way, self._screen, self._operator = folder, names, take, way, screen, operator
        self._at: dict[str, int] = {}         # how far each log was shown

    def read(self, tail: int | None = None) -> None:
        """All that there is now, or the last `tail` lines of each log. Without its node, what is here."""
        record = self._folder.load()
        if self._node_has_more(record) and self._folder.try_lock():
            try:
                if self._bring(self._folder.load(), tail):
                    return
            except GpurunError as error:
                self._screen.warn(f"the rest is on {record.node['name']}, which can't be asked: {error}")
            finally:
                self._folder.close()
        self._show_here(tail)

    def follow(self, tail: int | None = None) -> None:
        """The same, and what comes until the run has ended."""
        driven = self._folder.driver() is not None
        if driven:
            at = follow_local(self._folder, self._some, lambda: self._over() or self._folder.driver() is None, tail)
            self._at = {name: at.get(name, 0) for name in self._names}   # a tail's pieces don't say where they are; and a new driver may write already
        elif tail is None or not self._node_has_more(self._folder.load()):
            self.read(tail)
        record = self._folder.load()
        if self._node_has_more(record) and not self._over():
            self._follow_there(record, None if driven else tail)

    def _node_has_more(self, record: Record) -> bool:
        return bool(record.node.get("name")) and not complete(record)

    def _over(self) -> bool:
        self._screen.live_tick()
        return self._screen.stdout_gone

    def _some(self, name: str, data: bytes) -> None:
        if name in self._names:
            self._at[name] = self._at.get(name, 0) + len(data)
            self._take(name, data)

    def _show_here(self, tail: int | None) -> None:
        """A reader that has had enough is no reason to read on."""
        def some(name: str, data: bytes) -> None:
            if self._screen.stdout_gone:
                raise _Enough
            self._some(name, data)
        try:
            Logs(self._folder).show(some, tail)
        except _Enough:
            pass

    def _bring(self, record: Record, tail: int | None) -> bool:
        """What the node has now comes to this disk; of a tail only that, and it is shown as it comes: True. The lock is ours."""
        kept = Logs(self._folder)
        asked = self._ask(record)
        try:
            state = asked.states.get(record.run_id)
            if state is None:
                return False
            if tail is None:
                whole = (lambda sizes: not kept.behind(sizes)) if state.get("over") else None   # asked before: what comes now is all of it
                sizes = asked.during(lambda stream: transfer.follow(stream, record.run_id, dict(kept.kept), kept.take, live=False, kept=whole))
                if whole and whole(sizes):
                    self._note_complete(record)
                if not kept.trouble:
                    return False
                for name, error in kept.trouble.items():
                    self._screen.warn(f"{self._folder.logs[name]} can't be written: {error.strerror} "
                                      f"({room(self._folder.path, sizes[name] - kept.kept[name])}). The rest is on {record.node['name']} and is only shown")
                self._show_here(None)
                offsets = {name: kept.kept[name] for name in self._names}
                asked.during(lambda stream: transfer.follow(stream, record.run_id, offsets, lambda name, _, data: self._some(name, data), live=False))
                return True

            def take(name: str, position: int, data: bytes) -> None:
                kept.take(name, position, data)
                self._some(name, data)
            offsets = {name: kept.kept[name] for name in self._names}
            asked.during(lambda stream: transfer.follow(stream, record.run_id, offsets, take, tail, live=False))
            return True
        finally:
            asked.close()
            kept.close()

    def _note_complete(self, record: Record) -> None:
        """All logs are here. Where that can't be written the node is asked again the next time, which is no harm."""
        record.logs_complete = True
        try:
            self._folder.save(record)
        except OSError as error:
            self._screen.warn(f"the record {self._folder.record} can't be written: {error.strerror} ({room(self._folder.path, len(record.encode()))})")

    def _ask(self, record: Record) -> Asked:
        _, nodes, link = self._way(record)
        return Asked(link(), nodes[0], [record.run_id], self._screen, self._operator)

    def _follow_there(self, record: Record, tail: int | None) -> None:
        """Until the node says that nothing more comes. What comes is shown and not kept: only who drives a run keeps its logs."""
        self._at = {name: self._at.get(name, 0) for name in self._names}
        node, lines, failures = record.node["name"], tail, 0
        connected = False

        def take(name: str, position: int, data: bytes) -> None:
            nonlocal lines
            lines = None
            if self._screen.stdout_gone:
                raise _Enough
            self._at[name] = position + len(data)
            self._take(name, data)

        while True:
            try:
                asked = self._ask(record)
                try:
                    state = asked.states.get(record.run_id)
                    if state is None:
                        self._screen.warn(f"{node} doesn't have {record.run_id} any more; this is all that is here")
                        return
                    if failures:
                        self._screen.say(f"{node} is back")
                    elif state.get("phase") == "queued":
                        self._screen.say(f"{record.run_id} waits for its turn on {node}")
                    connected, failures = True, 0
                    asked.during(lambda stream: transfer.follow(stream, record.run_id, dict(self._at), take, lines))
                    return
                finally:
                    asked.close()
            except _Enough:
                return
            except UNREACHED as error:
                if not connected:
                    raise
                failures += 1
                if failures == 1:
                    self._screen.warn(f"the connection to {node} broke ({error}); the run goes on there, connecting again")
                if failures > TRIES:
                    raise LinkError(f"{node} didn't answer {TRIES} times in a row ({error}). The run goes on there: gpurun logs -f {record.run_id}") from None
                time.sleep(RETRY_S[min(failures, len(RETRY_S)) - 1])


class _Enough(Exception):
    """Nobody reads what is shown any more."""
