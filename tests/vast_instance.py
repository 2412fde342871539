"""A contract of the loopback server (vast_server.py): how it behaves, its states, its row, what it has cost, what may be created."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import vast_rows as rows
from vast_machine import Machine, Quirks, Way
from vast_rows import STATES, Row, patched

HOUR_S = 3600.0
PORT = re.compile(r"-p (\d+):(\d+)(?:/(tcp|udp))?")


@dataclass
class Script:
    """How the instances of an offer behave. Times in seconds."""

    steps: tuple[tuple[float, str | Row], ...] = ((0.0, "st_running"),)   # (after the one before, a name of STATES or a patch); "st_new" is before
    resumed: tuple[tuple[float, str | Row], ...] = ((0.0, "st_running"),)   # the same after a start or a reboot
    visible_after: float = 0.0             # by-id null and not listed until then
    hidden_destroy: bool = True            # False: a DELETE until then is answered 404
    gone_after: float = 0.0                # how long a destroyed one is still shown
    comes_back_after: float | None = None  # a destroyed one is there again, stopped and billing, until it is destroyed again
    ports_in: str = "both"                 # which answers have the ports: "both", "list", "show"
    ports_by: str = "real"                 # an identity port is listed under its "real" number or as "asked"
    row: Row = field(default_factory=dict)   # put over each row; MISSING takes a key away
    queued: bool = False                   # a start is answered with "resources unavailable" and does nothing
    unavailable: bool = False              # the GPU is taken when it comes to it: refused, or with cancel_unavail=False made and stopped
    moves: bool = False                    # a reboot gives other ports
    direct_port: int = 0                   # of the direct way; 0: a free one
    instance_key: bool = True              # whether the create answer has the container's key
    logs: str | None = None                # instead of what the machine said
    logs_after: int = 0                    # so many fetches of them are answered 404 first
    machine: Quirks = field(default_factory=Quirks)


class Instance:
    """One contract from its creation on, and what it has cost. Times with `_at` are of the wall clock."""

    def __init__(self, contract: int, its_offer: Row, body: Row, script: Script, now: float) -> None:
        self.id, self.offer, self.body, self.script = contract, its_offer, body, script
        self.label: str | None = body.get("label")
        self.api_key = f"c{contract:063x}"
        self.created, self.created_at = now, time.time()
        self.destroyed: float | None = None
        self.destroyed_at: float | None = None
        self.destroyed_by = ""             # the bearer: "right", or "C.<id>" where the container did it itself
        self.state, self.patch = "st_new", STATES["st_new"]
        self.states: list[tuple[float, str]] = [(self.created_at, "st_new")]
        self.plan: list[tuple[float, str | Row]] = []
        self.spent = {"gpu": 0.0, "storage": 0.0}
        self.billed_until = now
        self.bid: float | None = body.get("price")
        self.keys: dict[int, str] = {}
        self.log_fetches = 0
        self.returns = script.comes_back_after is not None
        self.cut_off = False
        # What its machine is to be, and the machine: VastServer._fit makes the second follow the first.
        self.want, self.boot, self.wipe = "down", 0, False
        self.lock = threading.RLock()
        self.machine: Machine | None = None
        self.booted = 0
        self.ways: dict[str, Way] = {}
        self.address, self.ports, self.udp = "127.0.0.1\n", {}, {}

    @property
    def price(self) -> float:
        return self.bid if self.bid is not None else self.offer["dph_base"]

    @property
    def storage_price(self) -> float:
        return rows.storage_per_hour(self.offer, self.body["disk"])

    @property
    def status(self) -> str | None:
        return self.patch.get("actual_status", "running")

    @property
    def alive(self) -> bool:
        return self.destroyed is None

    def rates(self) -> dict[str, float]:
        if not self.alive or self.status in rows.NOTHING_BILLS:
            return {"gpu": 0.0, "storage": 0.0}
        return {"gpu": self.price if self.status in rows.GPU_BILLS else 0.0, "storage": self.storage_price}

    def bill(self, now: float) -> None:
        hours = max(0.0, now - self.billed_until) / HOUR_S
        for what, rate in self.rates().items():
            self.spent[what] += rate * hours
        self.billed_until = max(now, self.billed_until)

    def enter(self, state: str | Row) -> None:
        self.state, self.patch = (state, STATES[state]) if isinstance(state, str) else (str(state), state)
        self.states.append((time.time(), self.state))
        machine = rows.MACHINE_IS.get(self.status or "", "down")
        self.want = self.want if machine == "as it was" else machine

    def begin(self, steps: tuple[tuple[float, str | Row], ...], now: float) -> None:
        self.plan = []
        for delay, state in steps:
            now += delay
            self.plan.append((now, state))

    def visible(self, now: float) -> bool:
        if self.destroyed is not None:
            return now - self.destroyed < self.script.gone_after
        return now - self.created >= self.script.visible_after

    def row(self, now: float, asked: str) -> Row:
        runtype = self.body.get("runtype") or "ssh"
        proxy, disk = "proxy" in runtype or runtype == "ssh", self.body["disk"]
        row = {**rows.INSTANCE, **{key: self.offer[key] for key in rows.OF_OFFER if key in self.offer}}
        row.update(id=self.id, label=self.label, image_uuid=self.body["image"], image_runtype=runtype, onstart=self.body.get("onstart"),
                   status_msg=f"success, running {self.body['image'].replace(':', '_')}/ssh\n", disk_space=disk, start_date=self.created_at,
                   extra_env=[[key, value] for key, value in (self.body.get("env") or {}).items()], public_ipaddr=self.address,
                   ssh_host="127.0.0.1" if proxy else None, ssh_port=self.ports.get("proxy") if proxy else None, ports=self._ports(),
                   is_bid=self.bid is not None, dph_base=self.price, storage_total_cost=self.storage_price, dph_total=self.price + self.storage_price,
                   uptime_mins=(now - self.created) / 60)
        row = patched(row, self.patch, STATES["st_destroying"] if not self.alive else {}, self.script.row)
        if self.script.ports_in not in ("both", asked):
            row = patched(row, {"ports": rows.MISSING})
        return row

    def _ports(self) -> Row:
        found: Row = {}
        if direct := self.ports.get("direct"):
            found["22/tcp"] = [{"HostIp": "0.0.0.0", "HostPort": str(direct)}, {"HostIp": "::", "HostPort": str(direct)}]
        for (inside, proto), real in self.udp.items():
            key = real if inside >= 70000 and self.script.ports_by == "real" else inside
            found[f"{key}/{proto}"] = [{"HostIp": "0.0.0.0", "HostPort": str(real)}]
        return found


def create_problem(body: Row, found: Row) -> tuple[str, str] | None:
    """What the service refuses to create, as (error, msg)."""
    image, disk, price, label = body.get("image"), body.get("disk"), body.get("price"), body.get("label")
    env, args = body.get("env"), body.get("args") or []
    long = len((body.get("onstart") or "").encode()) + sum(len(str(arg).encode()) for arg in args)
    number = isinstance(disk, (int, float)) and not isinstance(disk, bool)
    for bad, error, msg in (
        (not isinstance(image, str) or not image, "invalid_args", "error 400/3467: Invalid args: image"),
        (isinstance(image, str) and not re.search(r"[:@]", image.rpartition("/")[2]), "server_error", "image reference must carry a tag"),
        (not number or not 8 <= disk <= found.get("disk_space", 1e9), "invalid_args", "error 400/3467: Invalid args: disk"),
        (env is not None and not isinstance(env, (dict, str)), "invalid_args", "error 400/3467: Invalid args: env"),
        (isinstance(env, dict) and sum(key.startswith("-p ") for key in env) > 64, "invalid_args", "error 400/3467: Invalid args: too many ports"),
        (isinstance(env, dict) and not all(PORT.fullmatch(key) for key in env if key.startswith("-p")), "invalid_args", "error 400/3467: port"),
        (label is not None and (not isinstance(label, str) or len(label) > 256), "label_too_long", "label too long"),
        (long > 4096, "invalid_args", "error 400/3471: Invalid args: len(args) > 4096"),
        (price is not None and not 0.001 <= price <= 128, "invalid_price", "price must lie in 0.001..128"),
        (body.get("client_id") != "me", "invalid_args", "error 400/3467: Invalid args: client_id"),
    ):
        if bad:
            return error, msg
    return None
