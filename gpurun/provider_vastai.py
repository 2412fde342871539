"""Machines rented from Vast.ai, and the nodes that they are. All of its API is in vast_api.py; which offers will do is in offers.py.

A machine is a container with sshd. There are two ways in, direct and by Vast's proxy, and either may fail, so they are tried in turn. One
UDP port is asked for by a number from 70000 on: then the real port is the same inside and outside, and the container is told which it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from gpurun import limits, machines, offers, preflight
from gpurun.errors import DeployError, HostKeyError, MachineGoneError, NoOfferError, OfferGoneError, ProviderError, SSHError, TemporaryError, UnfitError
from gpurun.messages import Arm
from gpurun.onstart import script
from gpurun.paths import config_dir
from gpurun.provider import Endpoint, Keep, Machines, Made, Node, Progress, Say, operator_id, operator_mark, with_port
from gpurun.reconcile import BROKEN, Machine, Seen

if TYPE_CHECKING:
    from gpurun.config import Cluster
    from gpurun.vast_api import Api, Row

UDP = 70001                   # the number that is asked for
SSH_S = 300.0                 # from the moment that the container runs: sshd comes up some seconds later, a key takes half a minute
WAY_S = 20.0                  # for one of the two ways in, before the other one is tried
PAUSE_S = 3.0
ROW_S = 30.0                  # for an answer about one machine, when it must be had: it may be asked for once in two seconds
ASK_S = 10.0                  # between two questions to the provider during a run
# reconcile.Desired's: a new machine was missing from lists for some seconds, one that was ended has been seen again after five, and a host may
# be out of sight for a moment.
TIMES = {"settle_s": 90.0, "confirm_s": 6.0, "again_s": 15.0, "doubt_s": 120.0}
OFFERS_S = 30.0               # a search is good for so long; offers go within minutes, and searches are counted
NEAR = 1.05                   # offers at up to so many times the lowest price are as good: two gpurun at once shouldn't take the same
ROUNDED = 1.02                # a machine's price and its offer's are summed up by different hands
LEASE_S = (600.0, 1800.0)     # an agent that shows no life for so long (idle_minutes, within these) is gone, and its machine ends
LATE_S = 900.0                # the switch in the container ends it so long after `max_hours`: the agent and the operator come first
# What the container knows and an ssh session isn't told; nothing secret is asked for.
ASK_UDP = (r"{ tr '\0' '\n' < /proc/1/environ; cat /etc/environment; } 2>/dev/null | "
           rf"""sed -n 's/^VAST_UDP_PORT_{UDP}=["'"'"']\{{0,1\}}\([0-9][0-9]*\).*$/GPURUN-UDP \1/p'""")


class Way(NamedTuple):
    """One way in over SSH."""

    name: str
    host: str
    port: int


def scope(cluster: Cluster, run_id: str = "") -> str:
    """The prefix of the labels of this operator's machines for a cluster file, or for one run of it."""
    return machines.prefix_of(operator_mark(), f"run {run_id}" if run_id else f"cluster {os.path.realpath(cluster.path or '')}")


def nodes_up(cluster: Cluster) -> list[Node]:
    """The nodes of a cluster file that are up. No network."""
    if not os.path.exists(os.path.join(config_dir(), "key")):
        return []                             # who has no key yet has no machines
    store = machines.Store()
    mine = [one for one in store.all(scope(cluster)) if one.ready and one.wanted]
    return [VastNode(one, cluster, store) for one in sorted(mine, key=lambda one: one.index)]


def node_of(cluster: Cluster, label: str) -> Node:
    """The node with this label, up or not, or gone: then whoever asks it for something hears that."""
    store = machines.Store()
    return VastNode(store.get(label) or Machine(label, machines.index_of(label)), cluster, store)


class VastNode(Node):
    kind = "vastai"
    rented = True

    def __init__(self, machine: Machine, cluster: Cluster, store: machines.Store, api: Api | None = None, new: bool = False,
                 row: Row | None = None) -> None:
        """`new`: its GPUs haven't been tried yet. `row`: what its provider has just said of it."""
        super().__init__(f"node{machine.index}", cluster, machine.label)
        self.label, self._store, self._api, self._new, self._row = machine.label, store, api, new, row
        self._ask_at = time.monotonic() + ASK_S   # the SDK takes a second to load: a short run has no use for it

    @property
    def machine(self) -> Machine:
        """Its record as it is now."""
        found = self._store.get(self.label)
        if found is None:
            raise MachineGoneError(f"the machine of {self.name} ({self.label}) was ended, and what was on it went with it")
        return found

    def cached_endpoint(self) -> Endpoint | None:
        return super().cached_endpoint() if self._store.get(self.label) else None

    def deploy(self, say: Say, progress: Progress, keep: Keep | None = None, within_s: float = 0.0) -> Endpoint:
        """Tries the ways in, in turn, until an agent runs there; at least once each, and for `within_s`."""
        patience_s = min(within_s, ROW_S)
        ways, ip = self._ways(patience_s)
        deadline, problem, changed, number = time.monotonic() + within_s, "", None, 0
        while True:
            way = ways[number % len(ways)] if ways else None
            try:
                if way is None:
                    raise SSHError(f"{self.name}: its provider has published no address yet")
                return self._deploy_by(way, ip, say, progress, keep)
            except UnfitError:
                raise
            except (SSHError, DeployError) as error:   # sshd comes up, the key arrives, a start file swallows commands until onstart has run
                problem = problem if way is None and problem else str(error).partition(" (tried for ")[0]   # how long, is said below
                changed = error if isinstance(error, HostKeyError) else changed
            number += 1
            if time.monotonic() > deadline and number >= len(ways):
                tried = f" (tried for {within_s:.0f} s, {' and '.join(way.name for way in ways) or 'no way'})" if within_s else ""
                raise changed or SSHError(problem + tried)
            if number % max(1, len(ways)) == 0:
                time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
                ways, ip = self._ways(patience_s)   # they are published late, and may change

    def log_in(self, say: Say) -> Any:
        """By the way that worked last, else by the other."""
        from gpurun import ssh
        facts = self.machine.facts
        ways = [Way(*one) for one in facts.get("ways") or ()] or self._ways()[0]
        problem = SSHError(f"{self.name}: its provider has published no address yet; try again in a moment")
        for way in sorted(ways, key=lambda one: one.name != facts.get("way")):
            try:
                return ssh.Connection(self._target(way), say).open()
            except SSHError as error:
                problem = error
        raise problem

    def _deploy_by(self, way: Way, ip: str, say: Say, progress: Progress, keep: Keep | None) -> Endpoint:
        from gpurun import bootstrap, ssh
        cluster = self.cluster
        with contextlib.ExitStack() as until:
            connection = ssh.Connection(self._target(way), say, WAY_S).open()
            until.callback(connection.close)
            said = connection.run("exec sh -c " + _quoted(ASK_UDP), timeout_s=30.0).stdout.decode(errors="replace")
            port = next((int(line.split()[1]) for line in said.splitlines() if line.startswith("GPURUN-UDP ")), 0)
            agent = bootstrap.deploy(connection, cluster._replace(udp_port=cluster.udp_port or port), operator_id(), say, progress, ours=True)
            if self._new:
                self._try_gpus(connection, bootstrap.probe(connection, cluster.node_dir, cluster.python).python, say)
            if keep is not None:
                until.pop_all()
                keep(connection)
        self._store.change(self.label, facts={"way": way.name})
        mapped = self.machine.facts.get("udp") or {}
        ports = dict.fromkeys([agent["port"], *(mapped[key] for key in (f"{agent['port']}/udp", f"{UDP}/udp") if key in mapped)])
        hosts = dict.fromkeys([ip, *([way.host] if way.name == "direct" else [])])
        near = ip.startswith("127.")
        addresses = [with_port(host, port) for host in hosts if host for port in ports if agent["port"]]
        return self.learned(agent, (*addresses, *(one for one in agent["addresses"] if near or not one.startswith(("127.", "[::1]")))), say)

    def _try_gpus(self, connection: Any, python: str, say: Say) -> None:
        """ProviderError: its host is to be left, whatever way leads there."""
        done = connection.run(preflight.command(python, self.cluster.gpu.count), preflight.SCRIPT.encode(), preflight.BOUND_S + 10)
        found = preflight.verdict(done.code, done.stdout, done.last_lines())
        if found.problem:
            raise ProviderError(f"its GPU can't be used: {found.problem}")
        say(f"{self.name}: {found.text}")

    def _ways(self, patience_s: float = 0.0) -> tuple[list[Way], str]:
        """The ways in as the provider tells them now, or as it last did; and its public address."""
        machine = self.machine
        row, self._row = self._row, None
        try:
            row = row or (self.api().row(machine.id, patience_s) if machine.id else None)
        except ProviderError:
            if not machine.facts.get("ways"):
                raise
            return [Way(*one) for one in machine.facts["ways"]], str(machine.facts.get("ip", ""))
        if row is None:
            raise MachineGoneError(f"{self.name}: its provider says that machine {machine.id or self.label} doesn't exist any more")
        seen = _seen(row, machine.ready)
        if seen.state == BROKEN:
            raise MachineGoneError(f"{self.name}: {seen.why}")
        ways = _ways_of(row)
        udp = {key: port for key, port in row.ports.items() if key.endswith("/udp")}
        self._store.change(self.label, facts={"ways": [list(way) for way in ways], "ip": row.public_ip, "udp": udp})
        return ways, row.public_ip

    def trouble(self) -> tuple[str, str]:
        """The limits are asked of the records alone; the provider once they don't say it, at most every ASK_S."""
        try:
            machine = self.machine
        except MachineGoneError as error:
            return str(error), ""
        if not machine.wanted:
            return f"{self.name}: its machine is being ended ({machine.why})", ""
        label = machines.scope_of(self.label)
        end = limits.end_of(machine, self._store.all(label), self.cluster.limits, self._store.spent(label), self._store.clock())
        if end.in_s <= 0:
            return "", end.why
        if time.monotonic() < self._ask_at:
            return "", ""
        self._ask_at = time.monotonic() + ASK_S * random.uniform(0.8, 1.2)
        try:
            self._ways()
        except MachineGoneError as error:     # a second look: an answer that says null was seen for machines that are there
            try:
                time.sleep(PAUSE_S)
                self._ways()
            except MachineGoneError:
                return str(error), ""
            except ProviderError:
                pass
        except ProviderError:
            pass                              # not known just now
        return "", ""

    def api(self) -> Api:
        if self._api is None:
            from gpurun.vast_api import Api
            self._api = Api()
        return self._api

    def _target(self, way: Way) -> Any:
        from gpurun import ssh
        hosts = self._store.known_hosts(self.label)
        return ssh.Target(text=f"{self.name}, {way.name}", hostname=way.host, user="root", port=way.port, identity_files=(ssh_key(),), identities_only=True,
                          user_known_hosts=(hosts,), strict="accept-new", connect_timeout_s=10, pins=hosts, source="the provider")

    def ssh_argv(self) -> list[str]:
        """By the way that worked last."""
        ways, _ = self._ways()
        if not ways:
            raise SSHError(f"{self.name}: its provider has published no address yet; try again in a moment")
        way = next((one for one in ways if one.name == self.machine.facts.get("way")), ways[0])
        return ["ssh", "-i", ssh_key(), "-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={self._store.known_hosts(self.label)}",
                "-o", "StrictHostKeyChecking=accept-new", "-p", str(way.port), f"root@{way.host}"]

    def describe(self) -> dict[str, Any]:
        machine = self._store.get(self.label) or Machine(self.label)
        return dict(super().describe(), label=self.label, machine_id=machine.id,
                    **{name: machine.facts.get(name) for name in ("gpu", "price_per_hour", "place")})


class VastMachines(Machines):
    """Of one cluster file. One object for each process that rents or ends."""

    paid = True

    def __init__(self, cluster: Cluster, store: machines.Store, say: Say | None = None) -> None:
        """`say` is told when the provider lets us wait."""
        from gpurun.vast_api import Api
        self.cluster, self.store, self.api = cluster, store, Api(say)
        self._lock = threading.Lock()
        self._searched, self._found = float("-inf"), offers.Choice()
        self.times = {**TIMES, "ready_within_s": cluster.ready_within_s}
        self._taken: set[int] = set()         # offers that were gone, or are ours by now
        self._rows: dict[str, Row] = {}       # as they were at the last look

    def shape(self) -> str:
        cluster = self.cluster
        return hashlib.sha256(repr([cluster.image, cluster.disk_gb, cluster.gpu, cluster.bid is not None, cluster.node_dir]).encode()).hexdigest()[:12]

    def look(self) -> tuple[list[Seen], bool]:
        """Those with a label of ours, and those that we know whatever their label has become: it can be changed by hand."""
        ours = machines.prefix_of(operator_mark())
        known = {one.id: one for one in self.store.all(ours) if one.id}
        try:
            rows, complete = self.api.rows(ours, ids=known), True
        except ProviderError:
            if not known:
                raise
            rows, complete = self._one_by_one(list(known.values())), False
        self._rows = {row.id: row for row in rows}
        found = []
        for row in rows:
            machine = known.get(row.id) or (self.store.get(row.label) if row.label.startswith(ours) else None)
            if machine is not None:
                self._learn(machine, row)
            seen = _seen(row, machine is not None and machine.ready)
            found.append(seen._replace(label=machine.label) if machine is not None else seen)
        return found, complete

    def _one_by_one(self, known: list[Machine]) -> list[Row]:
        """Those that are there for sure; raises what was wrong where none can be asked for either."""
        rows, problem = [], None
        for machine in known:
            try:
                row = self.api.row(machine.id)
            except ProviderError as error:
                problem = error
                continue
            if row is not None:
                rows.append(row)
        if problem is not None and not rows:
            raise problem
        return rows

    def _learn(self, machine: Machine, row: Row) -> None:
        facts: dict[str, Any] = {"status": row.actual_status or "being provisioned", "message": row.status_msg}
        if row.price_per_hour:
            facts["price_per_hour"] = row.price_per_hour
        facts.update({"gpu": row.gpu_name, "gpus": row.num_gpus} if row.gpu_name else {})
        facts.update({"host": row.machine_id} if row.machine_id else {})
        fields: dict[str, Any] = {"facts": facts} if any(machine.facts.get(name) != value for name, value in facts.items()) else {}
        if not machine.shape and row.started_at and 0 < row.started_at < machine.begun:
            fields["begun"] = row.started_at  # one that was found without a record has cost from its beginning on
        if fields:
            self.store.change(machine.label, **fields)

    def choice(self) -> offers.Choice:
        """The offers of now, those that fit by price."""
        cluster = self.cluster
        with self._lock:
            if time.monotonic() - self._searched > OFFERS_S:
                self._found = offers.find(lambda query: self.api.search(query, cluster.bid is not None, cluster.disk_gb), cluster, self.store.avoided(),
                                          cluster.limits.max_hours * 3600 if cluster.limits.max_hours else None)
                self._searched = time.monotonic()
            return self._found

    def pick(self) -> dict[str, Any]:
        """An offer, one of the cheapest that fit. NoOfferError when there is none (left)."""
        choice, avoided = self.choice(), self.store.avoided()
        with self._lock:
            if choice.fitting:
                # Before: a key of the account is copied into a container when that is made. And before there is a record: that is forgotten
                # when no list shows its machine in time, so nothing that may take long lies between the record and the request.
                self.api.ensure_key(public_key())
            free = [one for one in choice.fitting if one.id not in self._taken and one.machine_id not in avoided]
            if not free:
                tried = len(choice.fitting)
                raise NoOfferError(offers.why_none(choice) if not tried else
                                   f"none of the {tried} offers that fit is left: they were gone, or their machines failed")
            best = offers.price_of(free[0], self.cluster)
            offer = random.choice([one for one in free[:5] if offers.price_of(one, self.cluster) <= best * NEAR])
            self._taken.add(offer.id)
        return {"offer": offer.id, "price_per_hour": offers.price_of(offer, self.cluster), "gpu": offer.gpu_name, "gpus": offer.num_gpus, "place": offer.place,
                "host": offer.machine_id}

    def create(self, machine: Machine, say: Say, progress: Progress) -> Made:
        cluster = self.cluster
        public = public_key()
        idle_s = cluster.limits.idle_minutes * 60
        end_s = cluster.limits.max_hours * 3600 + LATE_S if cluster.limits.max_hours else 0.0
        onstart = script(public, min(max(idle_s, LEASE_S[0]), LEASE_S[1]), end_s, cluster.node_dir, self.api.url)
        try:
            made = self.api.create(machine.facts["offer"], image=cluster.image, disk_gb=cluster.disk_gb, label=machine.label,
                                   env={f"-p {UDP}:{UDP}/udp": "1"}, onstart=onstart, bid=cluster.bid)
        except TemporaryError:
            self._taken.discard(machine.facts["offer"])   # nobody has looked at it
            raise
        except OfferGoneError:
            self._searched = float("-inf") if len(self._taken) >= len(self._found.fitting) else self._searched
            raise
        return Made(made, {})

    def node(self, machine: Machine) -> Node:
        return VastNode(machine, self.cluster, self.store, self.api)

    def prepare(self, machine: Machine, say: Say, progress: Progress) -> Node:
        row, highest = self._rows.get(machine.id), self.cluster.selection.max_price_per_hour
        if row is None or not row.ports:      # else it isn't asked for: that is allowed once in two seconds, for all machines together
            row = self.api.row(machine.id, ROW_S)
        if row is not None and row.is_bid != (self.cluster.bid is not None):
            raise ProviderError(f"machine {machine.id} is {'interruptible' if row.is_bid else 'on demand'}, which isn't what was asked for")
        if row is not None and highest is not None and (row.price_per_hour or 0.0) > highest * ROUNDED:
            raise ProviderError(f"machine {machine.id} costs {limits.dollars(row.price_per_hour or 0.0)} an hour, more than its offer said and more than "
                                f"max_price_per_hour {highest:g}")
        try:
            self.api.attach_key(machine.id, public_key())
        except ProviderError as error:        # the account's keys and `onstart` bring it as well
            say(f"node{machine.index}: its SSH key could not be attached ({error}); trying without")
        # Not where a run may be at work with them: of a machine that had been ready, or whose record was lost.
        node = VastNode(machine, self.cluster, self.store, self.api, new=not machine.unready and "offer" in machine.facts, row=row)
        try:
            node.deploy(say, progress, within_s=SSH_S)
        except SSHError as error:
            logs = self.api.logs(machine.id)  # sshd's own word on why it refused a key is there, and nowhere else once the machine is gone
            last = [line for line in logs.splitlines() if "sshd" in line or "ssh" in line.lower()][-2:]
            raise SSHError(f"{error}{'; its log says: ' + ' | '.join(last) if last else ''}") from None
        return node

    def destroy(self, machine: Machine, machine_id: str) -> None:
        self.api.destroy(machine_id)

    def arm(self, end_in_s: float, why: str) -> Arm | None:
        return Arm(end_in_s=0.0 if end_in_s == float("inf") else max(1.0, end_in_s), idle_s=self.cluster.limits.idle_minutes * 60, api=self.api.url,
                   why=why, provider="vastai")

    def by_hand(self, machine: Machine) -> str:
        return (f"vastai destroy instance {machine.id}" if machine.id else f"vastai show instances, and destroy the one labelled {machine.label}") + \
            " (or at https://cloud.vast.ai/instances/)"


def ssh_key() -> str:
    """The file of gpurun's own SSH key for rented machines."""
    return os.path.join(config_dir(), "ssh_key")


def public_key() -> str:
    from gpurun import ssh
    return ssh.own_key(ssh_key())


def _seen(row: Row, started: bool) -> Seen:
    from gpurun.vast_api import stage
    now = stage(row, started)
    return Seen(id=row.id, label=row.label, state=now.state, why=now.why, fault=now.fault)


def _ways_of(row: Row) -> list[Way]:
    direct = row.ports.get("22/tcp")
    return [*([Way("direct", row.public_ip, direct)] if row.public_ip and direct else []),
            *([Way("proxy", row.ssh_host, row.ssh_port)] if row.ssh_host and row.ssh_port else [])]


def _quoted(text: str) -> str:
    import shlex
    return shlex.quote(text)
