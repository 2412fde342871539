"""The records of machines on the operator's disk, one small file each: written before a machine is asked for, gone when it is known to be gone.

    <settings>/machines/<label>.json          what was meant and what is known (reconcile.Machine)
    <settings>/machines/<label>.known_hosts   the SSH host key that it showed first
    <settings>/machines/avoid.json            hosts that failed, for some hours
    <settings>/machines/spent.json            by cluster, what its machines that are gone have cost since it was brought up

They lie beside the operator's key and not in a run's folder: whichever gpurun of this operator comes next finds them, and a machine that
costs money must not be forgotten with a folder. Several processes may be at it: each change is made to what is on disk, under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from typing import Any, Callable, Iterator

from gpurun import limits
from gpurun.errors import RecordError
from gpurun.files import FULL, TEMP_PREFIX, atomic_write, make_private_dir, read_json, room
from gpurun.limits import dollars
from gpurun.paths import config_dir
from gpurun.reconcile import Machine, index_of

VERSION = 1
PREFIX = "gpurun-"
SUFFIX = ".json"
LATE_S = 1200.0               # after its limit: whoever is connected has ten minutes to collect, and the switch in it has five more
SWEPT_S = 600.0               # a write takes milliseconds
AVOID_S = 12 * 3600.0         # a host that failed is left alone for so long; it is often the cheapest, and so would be taken again and again


def prefix_of(operator_id: str, scope: str = "") -> str:
    """How the labels of an operator's machines begin; with `scope` (a cluster file, a run) those of one cluster. Sixteen letters of a hash
    say nothing of who or where to others who see the account's labels."""
    who = hashlib.sha256(operator_id.encode()).hexdigest()[:8]
    return f"{PREFIX}{who}-" + (hashlib.sha256(scope.encode("utf-8", "surrogateescape")).hexdigest()[:8] + "-" if scope else "")


def scope_of(label: str) -> str:
    """The part of a label that its cluster's machines share."""
    return label.rsplit("-", 2)[0] + "-"


class Store:
    """See the module. Errors of the disk are RecordErrors that name the file."""

    def __init__(self, folder: str = "", clock: Callable[[], float] = time.time) -> None:
        self.folder = folder or os.path.join(config_dir(), "machines")
        self.clock = clock
        self._dropped: set[str] = set()
        self._unkept: dict[str, Machine] = {}   # as they are by now, where the disk didn't take it: a full one must not keep a machine alive

    # ---- machines ----------------------------------------------------------------------------------------------------------

    def all(self, prefix: str = PREFIX) -> list[Machine]:
        """Those whose label begins so, by label. A record that can't be read still says that there may be a machine of that label."""
        try:
            names = sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RecordError(f"{self.folder} can't be read: {error.strerror}; the records of machines are there") from None
        found = []
        for name in names:
            label = name[:-len(SUFFIX)]
            if name.endswith(SUFFIX) and label.startswith(prefix):
                machine = self.get(label)
                if machine is not None:
                    found.append(machine)
        return found

    def get(self, label: str) -> Machine | None:
        if label in self._dropped:
            return None
        try:
            value = read_json(self._path(label))
        except RecordError:
            value = {"version": VERSION, "begun": self._written(label)}
        if value is None:
            self._unkept.pop(label, None)
            return None
        if label in self._unkept:
            return self._unkept[label]
        known = {name: value[name] for name in Machine._fields if name in value and isinstance(value[name], _KINDS[name])}
        return Machine(**dict(known, label=label, index=known.get("index") or max(1, index_of(label))))

    def add(self, machine: Machine) -> bool:
        """A new record, on the disk when this returns. RecordError if it can't be: then nothing may be asked for under its label. False: another
        process was faster, and its cluster has a machine with this index."""
        with self._lock():
            if any(one.index == machine.index for one in self.all(scope_of(machine.label))):
                return False
            self._dropped.discard(machine.label)
            self._sweep()
            self._write(self._path(machine.label), {"version": VERSION, **machine._asdict()})
            return True

    def change(self, label: str, **fields: Any) -> Machine | None:
        """Sets fields of what is on disk now; `facts` are added to those that are there. None: the record is gone. A disk that takes nothing is no
        error here: this process goes on with what it knows, and the next one begins with what the disk has."""
        with self._lock():
            machine = self.get(label)
            if machine is None:
                return None
            if "facts" in fields:
                fields["facts"] = {**machine.facts, **fields["facts"]}
            changed = machine._replace(**fields)
            if changed != machine or label in self._unkept:
                try:
                    self._write(self._path(label), {"version": VERSION, **changed._asdict()})
                    self._unkept.pop(label, None)
                except RecordError:
                    self._unkept[label] = changed
            return changed

    def drop(self, label: str) -> None:
        """The machine is gone: what it has cost is kept for its cluster, the rest is not."""
        with self._lock():
            machine = self.get(label)
            if machine is None:
                return
            amount = limits.cost(machine, self.clock())
            if amount:
                sums = self._read("spent")
                scope = scope_of(label)
                sums[scope] = self.spent(scope) + amount
                with contextlib.suppress(RecordError):
                    self._write(self._other("spent"), sums)
            self._dropped.add(label)          # also where the disk doesn't let it go
            for path in (self.known_hosts(label), self._path(label)):
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def known_hosts(self, label: str) -> str:
        return os.path.join(self.folder, f"{label}.known_hosts")

    # ---- who is at it, and what nobody is at -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def at_work(self, prefix: str) -> Iterator[None]:
        """While this lasts nobody takes the machines whose labels begin so for left over. Several processes may be at it."""
        path = os.path.join(self.folder, f"{prefix}lock")
        try:
            make_private_dir(self.folder)
            fd = _shared(path)
        except OSError:                       # it can't be written: nothing is rented then, but what is there must still be ended
            yield
            return
        try:
            yield
        finally:
            if not self.all(prefix):
                with contextlib.suppress(OSError):          # another process has it
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            os.close(fd)

    def somebody_at_work(self, prefix: str) -> bool:
        """Whether a process that lives is busy with them."""
        try:
            fd = os.open(os.path.join(self.folder, f"{prefix}lock"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(fd)

    def left_over(self) -> list[str]:
        """Machines that cost money, that should be gone and that nobody is busy with; a line each. Reads a few small files."""
        lines, now = [], self.clock()
        for one in self.all():
            run, cluster = one.facts.get("run"), one.facts.get("cluster")
            ends_at = one.facts.get("ends_at")
            late = isinstance(ends_at, (int, float)) and now > ends_at + LATE_S   # its agent hasn't ended it, and whose gpurun would isn't there
            stands = one.ready and one.wanted and (not run or one.facts.get("detached")) and not late
            if one.facts.get("kind", "vastai") != "vastai" or stands or self.somebody_at_work(scope_of(one.label)):
                continue
            what = (f"machine {one.id}" if one.id else f"a machine labelled {one.label}, if there is one,") + (f" of the run {run}" if run else "")
            price = limits.price(one)
            cost = f"costs {dollars(price)} an hour ({dollars(limits.cost(one, now))} so far)" if price else "may cost money"
            why = ("is past its limit and should have ended itself" if late and one.wanted else "is left from a gpurun that was killed" if one.wanted else
                   "was to be ended and isn't known to be gone")
            job = f"`gpurun attach {run}` goes on with its job, if it has one, and then ends it. " if run and one.ready and one.wanted else ""
            lines.append(f"{what} {why}: it {cost}. {job}End it with: gpurun down {one.id or one.label}" + (f" --cluster {cluster}" if cluster else ""))
        return lines

    # ---- money, and hosts to avoid -------------------------------------------------------------------------------------------

    def spent(self, scope: str) -> float:
        """What this cluster's machines that are gone have cost. `scope`: the prefix of its labels."""
        value = self._read("spent").get(scope, 0.0)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def begin_spending(self, scope: str) -> None:
        """A cluster without machines is brought up anew: its sum begins at nothing."""
        with self._lock():
            sums = self._read("spent")
            if sums.pop(scope, None) is not None:
                self._write(self._other("spent"), sums)

    def avoid(self, host: str, why: str) -> None:
        """Remember a host that failed."""
        with self._lock():
            now = self.clock()
            known = {name: one for name, one in self._read("avoid").items() if _until(one) > now}
            known[host] = {"until": now + AVOID_S, "why": why[:300]}
            with contextlib.suppress(RecordError):
                self._write(self._other("avoid"), known)

    def avoided(self) -> dict[str, str]:
        """Hosts that failed lately, and why."""
        now = self.clock()
        return {host: str(one.get("why", "")) for host, one in self._read("avoid").items() if _until(one) > now}

    # ---- files -----------------------------------------------------------------------------------------------------------------

    def _written(self, label: str) -> float:
        """Of a record that can't be read: without a time its machine would have cost a fortune."""
        try:
            return os.stat(self._path(label)).st_mtime
        except OSError:
            return self.clock()

    def _sweep(self) -> None:
        """What a kill in the middle of a write has left."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                path = os.path.join(self.folder, name)
                if name.startswith(TEMP_PREFIX) and time.time() - os.stat(path).st_mtime > SWEPT_S:
                    os.unlink(path)

    def _path(self, label: str) -> str:
        return os.path.join(self.folder, label + SUFFIX)

    def _other(self, name: str) -> str:
        return os.path.join(self.folder, name + SUFFIX)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self._other(name)) or {}
        except RecordError:
            return {}

    def _write(self, path: str, value: dict[str, Any]) -> None:
        data = (json.dumps(value, indent=1) + "\n").encode()
        try:
            atomic_write(path, data)
        except OSError as error:
            full = f" ({room(self.folder, len(data))})" if error.errno in FULL else ""
            raise RecordError(f"{path} can't be written: {error.strerror}{full}. Without that record nothing is rented; make room there, or name another "
                              "folder for gpurun's settings with GPURUN_CONFIG.") from None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            make_private_dir(self.folder)
            fd = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:                       # what is written next says so, where that matters
            yield
            return
        try:
            with contextlib.suppress(OSError):   # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _shared(path: str) -> int:
    """The file, made where it isn't there, with a lock that several may have. Whoever had it last may have removed it between the two."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        except OSError:                       # a file system without locks
            return fd
        os.close(fd)


def _until(one: Any) -> float:
    value = one.get("until") if isinstance(one, dict) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


_KINDS: dict[str, Any] = {name: (int, float) if isinstance(default, float) else type(default) for name, default in Machine._field_defaults.items()}
_KINDS["label"] = str
