"""`gpurun fetch`: what a run has made so far, brought home at any time: while it runs, after it failed, after it was lost or collected."""

from __future__ import annotations

import os
import time
from typing import Callable, NamedTuple, Sequence

from gpurun.asking import UNREACHED, Asked
from gpurun.attaching import take_up
from gpurun.errors import ConfigError, GpurunError, LinkError, RecordError
from gpurun.landing import pull
from gpurun.link import Link
from gpurun.manifest import clean_output, quote_name
from gpurun.provider import Node
from gpurun.records import Record, RunFolder
from gpurun.screen import Screen
from gpurun.stopping import Way, complete, settled
from gpurun.transfer import Pulled

TRIES = 6                     # a connection that broke this often over one path isn't worth more; what has arrived is kept for the next fetch
RETRY_S = 1.0                 # and so much more before each further try


class Fetched(NamedTuple):
    """A path that was asked for and is here now, at `to`."""

    path: str
    to: str
    files: int
    size_bytes: int


class Outcome(NamedTuple):
    """What a fetch brought, and an error for each path that it could not bring."""

    fetched: list[Fetched]
    failed: list[str]


def fetch(folder: RunFolder, paths: Sequence[str], to: str, way: Way, screen: Screen, operator: str) -> Outcome:
    """Brings `paths`, which are relative to the run's workdir, into `to` ("": the run's outputs). Without paths: the declared outputs as they
    are now; those of a run that has ended, and whose last word isn't here, with all that belongs to it. Raises GpurunError when the node
    can't be reached or doesn't have the run."""
    wanted = clean_paths(paths)
    record = folder.load()
    if not record.node.get("name"):
        raise RecordError(f"{record.run_id} was never given to a node, so there is nothing to fetch. Run the job again.")
    if wanted:
        return _Fetching(folder, record, to, way, screen, operator).bring(wanted, must_be=True)
    declared = [str(name) for name in record.job.get("outputs") or ()]
    if settled(record) and not to:
        if not complete(record) and folder.try_lock():
            record = _settle(folder, way, screen, operator)
        return _check_home(folder, record, way, screen, operator)
    fetching = _Fetching(folder, record, to, way, screen, operator)
    if fetching.runs():
        screen.say(f"{record.run_id} isn't over: these are its outputs as they are now")
    elif not settled(record) and folder.try_lock():
        fetching.close()
        record = _settle(folder, way, screen, operator)
        if not settled(record):
            return Outcome([], [record.reason or f"{record.run_id} could not be brought home whole, and its record says no more. What was said "
                                                 "above has to be set right first; all of it is still on the node"])
        if not to:
            return _home(folder, record)
    if not declared:
        screen.say(f"{record.run_id} declares no outputs; name a path: gpurun fetch {record.run_id} PATH")
    return fetching.bring(declared, must_be=False)


def _settle(folder: RunFolder, way: Way, screen: Screen, operator: str) -> Record:
    """What the node still has of a run that has ended comes home. The lock is ours, and is let go."""
    try:
        record = folder.load()                # after the lock: whoever drove it until now has written its last word
        if not complete(record):
            try:
                screen.summary(take_up(folder, record, way, screen, operator, echo=False, leaves=True))
            except GpurunError as error:
                if not settled(record):
                    raise
                screen.warn(f"the end of the logs can't be had: {error}")   # all else is here
    finally:
        folder.close()
    return folder.load()


def clean_paths(paths: Sequence[str]) -> list[str]:
    """The paths as a node knows them, each once; "." is the whole workdir. ConfigError for what can't be one."""
    for path in paths:
        wrong = ("is blank" if not path.strip() else "is an absolute path" if path.startswith("/") else
                 "has `..` in it" if ".." in path.split("/") else "")
        if wrong:
            raise ConfigError(f"'{quote_name(path)}' {wrong}; name a file or folder relative to the job's workdir (`.` is all of it)")
    return list(dict.fromkeys(clean_output(path) or "." for path in paths))


def _check_home(folder: RunFolder, record: Record, way: Way, screen: Screen, operator: str) -> Outcome:
    """Of a run that is settled: its outputs should be here, unless somebody has deleted some since."""
    gone = [name for name in record.outputs if not os.path.lexists(os.path.join(folder.outputs, name))]
    if record.fsm.get("gone") and record.fsm.get("has_outputs") and not record.fsm.get("collected"):
        return Outcome([], [f"{record.run_id}: its machine is gone, and its outputs with it: {record.reason}"])
    if not record.outputs:
        screen.say(f"{record.run_id} has ended ({record.state}) and left no declared outputs; `gpurun fetch {record.run_id} PATH` brings other files "
                   "of its workdir")
        return Outcome([], [])
    screen.say(f"{record.run_id} has ended ({record.state}) and its outputs were collected"
               + (f"; {', '.join(map(quote_name, gone))} isn't here any more and is fetched again" if gone else ""))
    outcome = _Fetching(folder, record, "", way, screen, operator).bring(gone, must_be=True) if gone else Outcome([], [])
    home = _home(folder, record)
    again = {one.path for one in outcome.fetched}
    return Outcome([one for one in home.fetched if one.path not in again and one.path not in gone] + outcome.fetched, outcome.failed)


def _home(folder: RunFolder, record: Record) -> Outcome:
    """The outputs that are in the run's folder."""
    return Outcome([Fetched(name, os.path.join(folder.outputs, name), 0, 0) for name in record.outputs], [])


class _Fetching:
    """The session of one fetch. Connects when it is first needed, and again when the connection breaks."""

    def __init__(self, folder: RunFolder, record: Record, to: str, way: Way, screen: Screen, operator: str) -> None:
        self._run_id, self._target, self._screen, self._operator = record.run_id, to or folder.outputs, screen, operator
        _, nodes, link = way(record)
        self._node: Node = nodes[0]
        self._make_link: Callable[[], Link] = link
        self._asked: Asked | None = None

    def _session(self) -> Asked:
        if self._asked is None:
            self._asked = Asked(self._make_link(), self._node, [self._run_id], self._screen, self._operator)
        return self._asked

    def close(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def runs(self) -> bool:
        """Whether something of the run is still to come, as its node says. True of a run that waits its turn as well."""
        state = self._session().states.get(self._run_id)
        return state is not None and not state.get("over")

    def bring(self, paths: Sequence[str], must_be: bool) -> Outcome:
        """Each path by itself, so that one that can't come holds up no other. `must_be`: one that doesn't exist is a failure."""
        outcome = Outcome([], [])
        try:
            if paths and self._run_id not in self._session().states:
                raise GpurunError(f"{self._node.name} doesn't have {self._run_id} any more, if it ever had: its folder there was removed (`gpurun rm`, "
                                  "or one run too many for --keep). What is here is all that there is.")
            for path in paths:
                self._screen.phase("fetch", f"{path} from {self._node.name}")
                pulled = self._pull(path)
                refused = dict(pulled.refused)
                name = clean_output(path)
                if name in pulled.missing or path in pulled.missing:
                    if must_be:
                        outcome.failed.append(f"'{quote_name(path)}' doesn't exist in the workdir of {self._run_id} on {self._node.name}")
                    else:
                        self._screen.say(f"the output '{quote_name(path)}' doesn't exist yet")
                elif name in refused:
                    outcome.failed.append(f"'{quote_name(path)}' was not fetched: {refused[name]}")
                else:
                    for inner, why in refused.items():
                        self._screen.warn(f"'{quote_name(inner)}' was not fetched: {why}")
                    to = os.path.join(self._target, name) if name else self._target
                    outcome.fetched.append(Fetched(path, to, pulled.files, pulled.size_bytes))
            return outcome
        finally:
            self._screen.phase("")
            self.close()

    def _pull(self, path: str) -> Pulled:
        def progress(done: int, total: int, name: str) -> None:
            self._screen.progress(done, total, "B", name)

        for attempt in range(1, TRIES + 1):
            try:
                return self._session().during(lambda stream: pull(stream, self._run_id, [path], self._target, progress, live=True))
            except UNREACHED as error:
                self.close()
                if attempt == TRIES:
                    raise LinkError(f"the connection to {self._node.name} broke {TRIES} times ({error}). What has arrived is kept: the same "
                                    "command goes on where it was") from None
                self._screen.warn(f"the connection to {self._node.name} broke ({error}); connecting again")
                time.sleep(RETRY_S * attempt)
        raise AssertionError
