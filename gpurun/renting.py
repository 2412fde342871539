"""Renting for commands: what is asked before money is spent, the machine of one run from its request to its proven end, and what is left over.

`gpurun up` and `down` drive a cluster's machines, `gpurun JOB.toml --up --down` one that belongs to the run alone, so that two runs at once
never share, or end, each other's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Iterator, Sequence

from gpurun import limits, machines, provider, signals
from gpurun.config import Cluster
from gpurun.errors import EXIT_STOPPED, AccountError, ConfigError, GpurunError, NoOfferError, RecordError
from gpurun.files import free_bytes
from gpurun.fleet import PACE, Fleet, LeftOver
from gpurun.limits import dollars
from gpurun.link import Link
from gpurun.messages import FAILED, TERMINAL
from gpurun.provider import Node
from gpurun.reconcile import Machine, Seen
from gpurun.records import Record, RunFolder, utc_now
from gpurun.screen import Screen, counted, duration
from gpurun.stopping import Way, never_given, settled

LEAST_S = 600.0               # a machine that must go sooner than this is not worth renting
ENOUGH = 3                    # signals, after which what couldn't be ended is left


# ---- whose machines ------------------------------------------------------------------------------------------------------------------

def fleet(cluster: Cluster, screen: Screen, link: Callable[[], Link], operator: str, run_id: str = "") -> Fleet:
    """The machines of a cluster, or those of one run of it. ConfigError where the provider's key or package is missing."""
    about = {"cluster": cluster.path or "", "kind": cluster.kind, "run": run_id, "folder": os.getcwd()}
    store = machines.Store()
    if cluster.kind == "vastai":
        from gpurun import provider_vastai
        executor: provider.Machines = provider_vastai.VastMachines(cluster, store, screen.say)
        return Fleet(cluster, executor, store, provider_vastai.scope(cluster, run_id), screen, link, operator, about)
    from gpurun.hosts import HostMachines
    prefix = machines.prefix_of(provider.operator_mark(), f"cluster {os.path.realpath(cluster.path) if cluster.path else 'this machine'}")
    return Fleet(cluster, HostMachines(provider.nodes(cluster), prefix, link, operator), store, prefix, screen, link, operator, about)


# ---- signals -------------------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def heeding(at: Fleet, screen: Screen, ending: bool) -> Iterator[None]:
    """Signals while machines come (`ending` False: the first one ends what has come) or go (only several leave them). After it they are kept for
    whoever deals with them next, one that came too late for this as well."""
    came: list[int] = []

    def on_signal(number: int, _frame: Any) -> None:
        came.append(number)
        if not ending and len(came) == 1:
            at.stopping.set()
        elif len(came) >= ENOUGH:
            at.giving_up.set()
        else:
            screen.warn(f"machines that cost money are being ended first; {ENOUGH - len(came)} more of this leaves them as they are")

    signals.handle(on_signal)
    for number in signals.kept():
        on_signal(number, None)
    try:
        yield
    except BaseException:
        signals.keep()
        raise
    signals.keep(() if ending else came)


# ---- before money is spent -----------------------------------------------------------------------------------------------------------

def offer(at: Fleet, count: int) -> list[str]:
    """What renting so many more machines would cost, as lines to read; raises what speaks against it. Nothing is rented."""
    cluster, executor = at.cluster, at.machines
    account = executor.api.account()          # type: ignore[attr-defined]   # a wrong key shows here, and not at a search
    choice = executor.choice()                # type: ignore[attr-defined]
    if not choice.fitting:
        executor.pick()                       # which says why
    if len(choice.fitting) < count:
        raise NoOfferError(f"{counted(count, 'machines')} are wanted and {counted(len(choice.fitting), 'offers')} "
                           f"{'fits' if len(choice.fitting) == 1 else 'fit'}: nothing was rented. Ask for fewer nodes, or for less of each: "
                           "`gpurun offers --all` shows what doesn't fit and why")
    from gpurun import offers
    best = choice.fitting[0]
    price = offers.price_of(best, cluster) or 0.0
    rate = max(sum(limits.price(one) for one in at.all() if one.wanted) + price * count, 1e-9)
    bounds = [f"{name} {value:g}" if name == "max_hours" else f"{name} {dollars(value)}" for name, value in
              (("max_hours", cluster.limits.max_hours), ("max_cost", cluster.limits.max_cost)) if value is not None]
    bounds.append(f"idle for {cluster.limits.idle_minutes:g} min")
    spent = at.spent() if at.all() else 0.0
    reached_s = max(0.0, (cluster.limits.max_cost or float("inf")) - spent) / rate * 3600
    if reached_s < LEAST_S:
        raise ConfigError(f"max_cost {dollars(cluster.limits.max_cost or 0.0)} would be reached {duration(reached_s)} after the start, at {dollars(rate)} an "
                          "hour: nothing was rented. Raise it, or ask for less.")
    lines = [f"{counted(count, 'machines')} with {best.num_gpus or 1} × {best.gpu_name or 'GPU'} at about {dollars(price)}/h each"
             f"{' (interruptible)' if cluster.bid is not None else ''}, {dollars(rate)}/h in all; {len(choice.fitting)} offers fit",
             f"ends itself at: {', '.join(bounds)}"]
    if account.credit is not None:
        hours = min(cluster.limits.max_hours or 1.0, (cluster.limits.max_cost or float("inf")) / rate)
        if account.credit < rate * LEAST_S / 3600:
            raise AccountError(f"the account's credit is {dollars(max(0.0, account.credit))}, and this costs {dollars(rate)} an hour: nothing was rented. "
                               "Add credit at https://cloud.vast.ai/billing/")
        if account.credit < rate * hours * 2:
            lines.append(f"the account's credit of {dollars(account.credit)} lasts for about {duration(account.credit / rate * 3600)}: then the provider "
                         "stops everything")
    return lines


def standing(at: Fleet) -> list[Machine]:
    """The machines that are wanted and there. One that its provider no longer lists would be rented anew, which isn't done unasked."""
    return [one for one in at.look().machines if one.wanted and not one.absent] if at.all() else []


def consent(at: Fleet, count: int, screen: Screen, yes: bool, also: str = "") -> None:
    """Shows what it costs and asks on a terminal. Where nobody can be asked `yes` says so, or a price cap in the cluster file does."""
    lines = offer(at, count) if count > 0 else []
    for line in [*lines, *([also] if also else [])]:
        screen.say(line)
    if yes or not lines and not also:
        return
    answer = confirm(screen, "Rent?" if lines else "Go on?", at.stopping)
    if answer is None and (at.cluster.selection.max_price_per_hour is None or also):
        raise ConfigError("nobody can be asked here, so nothing was rented: say --yes"
                          + ("" if also else ", or set selection.max_price_per_hour in the cluster file, which counts as a yes"))
    if answer is False:
        raise Refused("nothing was rented")


class Refused(GpurunError):
    """The operator said no."""

    exit_code = EXIT_STOPPED


def confirm(screen: Screen, question: str, stopping: threading.Event | None = None) -> bool | None:
    """The answer of a person at the terminal, where a stop is a no; None where there is none."""
    answers: "SimpleQueue[str]" = SimpleQueue()
    if not screen.ask(question, {"y": "yes", "n": "no"}, answers.put):
        return None
    stopping = stopping or threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda _number, _frame: stopping.set())
    try:
        while not stopping.is_set():
            with contextlib.suppress(Empty):
                return answers.get(timeout=0.1) == "y"
        screen.stop_asking()
        return False
    finally:
        signal.signal(signal.SIGINT, before)


# ---- up and down ---------------------------------------------------------------------------------------------------------------------

def bring_up(at: Fleet, count: int, screen: Screen) -> list[Machine]:
    """Machines that are ready. Raises LeftOver when that failed and something couldn't be ended."""
    with at.store.at_work(at.prefix), heeding(at, screen, ending=False):
        screen.phase("up", f"{count} {'node' if count == 1 else 'nodes'}")
        try:
            return at.up(count)
        finally:
            screen.phase("")


def bring_down(at: Fleet, screen: Screen, labels: Sequence[str] | None = None, why: str = "by gpurun down") -> list[Machine]:
    """Those that could not be ended."""
    with at.store.at_work(at.prefix), heeding(at, screen, ending=True):
        screen.phase("down", at.cluster.path or "this machine")
        try:
            return at.down(labels, why)
        finally:
            screen.phase("")


def node_for(cluster: Cluster, machine: Machine) -> Node:
    """The node that a rented machine is; without its provider being asked."""
    from gpurun import provider_vastai
    return provider_vastai.VastNode(machine, cluster, machines.Store())


# ---- the machine of a run ------------------------------------------------------------------------------------------------------------

class Rental:
    """The machine side of a run on rented machines, or with `--up` or `--down`. `down`: they end with the run; `own`: one was rented for it alone."""

    def __init__(self, cluster: Cluster, folder: RunFolder, record: Record, screen: Screen, link: Callable[[], Link], operator: str) -> None:
        self._cluster, self._folder, self._record, self._screen, self._link, self._operator = cluster, folder, record, screen, link, operator
        self._fleet: Fleet | None = None
        self._began = time.time()

    @property
    def _down(self) -> bool:
        return bool(self._record.rented.get("down"))

    @property
    def _own(self) -> bool:
        return bool(self._record.rented.get("own"))

    @property
    def _at(self) -> Fleet:
        if self._fleet is None:
            self._fleet = fleet(self._cluster, self._screen, self._link, self._operator, self._folder.run_id if self._own else "")
        return self._fleet

    def run(self, on: Callable[[list[Node]], dict[str, Any]], nodes: list[Node], up: bool, down: bool, yes: bool,
            keep_s: float, fetch: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
        """`on(nodes)` is the run; its result, and what is to be said last of machines that couldn't be ended. Whatever happens in between, they end
        if they were to; after a run that failed they stay for `keep_s` before that. `fetch` brings outputs that had no room here."""
        self._record.rented = {"down": down, "own": up and down and self._cluster.kind == "vastai"}
        with contextlib.ExitStack() as stack:
            if self._own:
                stack.enter_context(self._at.store.at_work(self._at.prefix))
            try:
                result = on(self._up(yes) if up else nodes)
            except GpurunError as error:
                if not self._record.node.get("name"):
                    never_given(self._folder, self._record, str(error).splitlines()[0], error.exit_code)
                left = [] if isinstance(error, (LeftOver, Refused, ConfigError)) else self.end(None, keep_s)
                if left:
                    raise LeftOver(str(error), left) from None
                raise
            except Exception:                 # a fault of our own, a file that can't be written: the machine costs money all the same
                for line in self.end(None):
                    self._screen.error(line)
                raise
            if down and self._record.rented.pop("unkept", "") and not self._record.rented.get("limit"):
                result = self._await_room(result, fetch)
            left = self.end(result, keep_s)
        return dict(result, reason=self._record.reason, **({"cost": self._record.cost} if self._record.cost else {})), left

    def _up(self, yes: bool) -> list[Node]:
        """The node to run on, rented where none stands."""
        if self._cluster.kind != "vastai":
            return provider.nodes(self._cluster)   # a run brings its agent there by itself
        at = self._at
        with heeding(at, self._screen, ending=False):
            there = standing(at)
            count = 1 if self._own else max(self._cluster.nodes, len(there))
            consent(at, count - len(there), self._screen, yes)
        return [node_for(self._cluster, one) for one in bring_up(at, count, self._screen)]

    def end(self, result: dict[str, Any] | None, keep_s: float = 0.0) -> list[str]:
        """After the run, however it went: the machine goes, if that was wanted or a limit says so. Words for those that couldn't be ended."""
        record, limit = self._record, str(self._record.rented.get("limit") or "")
        if record.fsm.get("gone"):            # outbid, stopped, broken: what is left of it costs money and is of no use
            limit = limit or f"the run {record.run_id} lost it"
        due, label = self._down and not record.detached, str(record.node.get("label") or "")
        if not due and not limit:
            self._stays(label)
            return []
        at = self._at
        if due and keep_s and not limit and (result is None or result.get("exit_code")):
            self._keep(at, keep_s)
        self._screen.phase("")
        labels = None if due and self._cluster.kind == "vastai" else [one.label for one in at.adopt().machines if self._is(one, label)]
        self._count(label)
        left = bring_down(at, self._screen, labels, limit or f"the run {record.run_id} is over")
        others = [] if labels is None else [one for one in at.all() if one.wanted and one.label not in labels]
        if limit.startswith("max_cost") and others:
            self._screen.warn(f"{', '.join(at.machines.name(one.index) for one in others)} of the same cluster has reached it too and ends itself; "
                              "`gpurun down` does it now")
        if self._own:
            record.cost = round(at.spent(), 6)
            if not left:
                with contextlib.suppress(RecordError):
                    at.store.begin_spending(at.prefix)
        if record.state not in TERMINAL:
            what = "its machine could not be ended" if left else "its machine was ended"
            record.state, record.reason, record.exit_code = FAILED, f"left by the operator, and {what}", EXIT_STOPPED
            record.times["ended"] = utc_now()
        if not left and record.fsm.get("failed_phase") == "collect" and not record.fsm.get("gone"):
            record.fsm = dict(record.fsm, gone=True)     # nothing is there any more to be fetched
            record.reason += ". But its machine was ended with the run, and they went with it: --keep-on-failure TIME would have left it for so long"
        self._save()
        return at.words(left)

    def _is(self, machine: Machine, label: str) -> bool:
        """Whether the run was on this one."""
        return machine.label == label if label else machine.id == self._record.node.get("name")

    def _stays(self, label: str) -> None:
        self._count(label)
        if self._own and self._record.detached:
            machines.Store().change(label, facts={"detached": True})   # or it would be taken for left over
            self._screen.say(f"its machine stays until the run has been attached to, or was idle for {self._cluster.limits.idle_minutes:g} min after it, "
                             "or its other limits are reached")

    def _await_room(self, result: dict[str, Any], fetch: Callable[[], Any]) -> dict[str, Any]:
        """What hours have made isn't thrown away for want of room here: it is tried again for a while, whenever there is more. The result then."""
        at, until, room = self._at, time.monotonic() + PACE.room_s, free_bytes(self._folder.path)
        self._screen.warn(f"{self._record.reason}. Make room: it is tried again for {duration(PACE.room_s, whole=True)}, and then the machine goes, and they go "
                          "with it. Ctrl-C ends it now")
        with heeding(at, self._screen, ending=False):
            self._screen.phase("room", f"for the outputs of {self._record.run_id}")
            while time.monotonic() < until and not at.stopping.wait(0.2) and all(at.end_of(one).in_s > 0 for one in at.all()):
                self._screen.live_tick()
                if free_bytes(self._folder.path) <= room:
                    continue
                room = free_bytes(self._folder.path)
                with contextlib.suppress(GpurunError, OSError):
                    fetch()
                record = self._folder.load()
                if settled(record) and record.fsm.get("collected"):
                    vars(self._record).update(vars(record))
                    result = record.result(self._folder.outputs, record.exit_code or 0)
                    break
        signals.kept()                        # what ended that is dealt with
        return result

    def _count(self, label: str) -> None:
        """What its time on a machine that stood has cost; of one of its own, what that has cost so far."""
        machine = machines.Store().get(label) if label else None
        if machine is not None:
            began = machine.begun if self._own else self._began
            self._record.cost = round(limits.price(machine) * (time.time() - began) / limits.HOUR_S, 6)
            self._save()

    def _save(self) -> None:
        with contextlib.suppress(OSError):    # it was said already that the record can't be kept
            self._folder.save(self._record)

    def _keep(self, at: Fleet, keep_s: float) -> None:
        """The machine of a run that failed stays for a while, to be looked at; a signal ends that, and if we are killed the machine does it."""
        import shlex
        until, text = time.monotonic() + keep_s, duration(keep_s, whole=True)
        there = [one for one in at.all() if one.ready and one.wanted]
        if not there:
            return                            # it never came up, or has gone
        for machine in there:
            with contextlib.suppress(GpurunError):
                node = at.machines.node(machine)
                with contextlib.suppress(GpurunError):
                    at.keep(machine, node, keep_s)
                self._screen.warn(f"node{machine.index} stays for {text}, since the run failed; Ctrl-C ends it now. Look at it with:\n  {shlex.join(node.ssh_argv())}")
        with heeding(at, self._screen, ending=False):
            self._screen.phase("keep", f"{text} after the failure")
            while time.monotonic() < until and not at.stopping.is_set() and all(at.end_of(one).in_s > 0 for one in at.all()):
                self._screen.live_tick()
                at.stopping.wait(min(0.2, max(0.0, until - time.monotonic())))
            self._screen.phase("")
        signals.kept()                        # what ended that is dealt with


def end_with(folder: RunFolder, way: Way, screen: Screen, operator: str) -> list[str]:
    """After `attach`, `wait` or `stop`: a machine that was to end with this run, or whose limit was reached, ends now that all is home. Words for
    what couldn't be ended."""
    record = folder.load()
    wanted = record.rented.get("down") or record.rented.get("limit")
    machine = machines.Store().get(str(record.node.get("label") or "-"))
    if not wanted or machine is None or not settled(record) or not folder.try_lock():
        return []
    try:
        record = folder.load()
        cluster, _, link = way(record)
        record.detached = False               # it isn't any more: we are here
        return Rental(cluster, folder, record, screen, link, operator).end({"exit_code": 0})
    finally:
        folder.close()


# ---- all of them ---------------------------------------------------------------------------------------------------------------------

def orphans(at: Fleet, every: bool, alive: bool = False) -> list[Fleet]:
    """Fleets of machines beside this one: of its cluster file's runs whose gpurun has gone, with `alive` of all its runs; with `every` all of this
    operator's."""
    if at.cluster.kind != "vastai":
        return []
    store, scopes = at.store, {}
    for one in store.all(machines.prefix_of(provider.operator_mark())):
        prefix = machines.scope_of(one.label)
        mine = one.facts.get("run") and one.facts.get("cluster") == at.cluster.path
        mine = mine and (alive or not one.facts.get("detached") and not store.somebody_at_work(prefix))
        if prefix != at.prefix and (every or mine):
            scopes[prefix] = one
    if every:
        for row in at.machines.look()[0]:
            prefix = machines.scope_of(row.label)
            if prefix != at.prefix and row.label.startswith(machines.prefix_of(provider.operator_mark())):
                scopes.setdefault(prefix, None)
    return [at.beside(prefix) for prefix in sorted(scopes)]


def ask_all(at: Fleet, machines_there: Sequence[Machine]) -> dict[str, dict[str, Any]]:
    """What the agents of those that are ready say of themselves, by label; {"silent": True} of one that doesn't answer."""
    from concurrent.futures import ThreadPoolExecutor
    ready = [one for one in machines_there if one.ready]
    if not ready:
        return {}

    def ask(one: Machine) -> dict[str, Any]:
        try:
            return at.ask(at.machines.node(one))
        except GpurunError:
            return {"silent": True}

    with ThreadPoolExecutor(min(16, len(ready)), "ask") as pool:
        return dict(zip((one.label for one in ready), pool.map(ask, ready)))


def busy_runs(at: Fleet, labels: Sequence[str] | None) -> list[str]:
    """Nodes among these on which a run is, in words."""
    there = [one for one in at.all() if labels is None or one.label in labels]
    facts = ask_all(at, there)
    return [f"{at.machines.name(one.index)} has the run {facts[one.label]['claim']}" for one in there if facts.get(one.label, {}).get("claim")]


def all_nodes(cluster: Cluster) -> list[Node]:
    """The cluster's nodes that have a machine, and those of its runs."""
    store, from_file = machines.Store(), os.path.realpath(cluster.path or "")
    return [node_for(cluster, one) for one in store.all(machines.prefix_of(provider.operator_mark()))
            if one.id and os.path.realpath(str(one.facts.get("cluster") or "")) == from_file]


def unknown(at: Fleet, seen: Sequence[Seen]) -> list[Seen]:
    """Machines of this operator, of whatever cluster file or run, that no record here knows: one that its provider showed too late, or whose record
    was lost."""
    if not at.machines.paid:
        return []
    mine, known = machines.prefix_of(provider.operator_mark()), {one.label for one in at.store.all()}
    return [row for row in seen if row.label.startswith(mine) and not row.label.startswith(at.prefix) and row.label not in known]


def about_unknown(rows: Sequence[Seen]) -> list[str]:
    """A line for each."""
    return [f"machine {row.id} ({row.label}) is yours, has no record here and costs money. `gpurun down --all` ends it, and all that is yours" for row in rows]
