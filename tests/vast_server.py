"""A server on 127.0.0.1 that answers as Vast.ai's API does, and rents out machines that are really there.

`with VastServer(offers=[offer(machine_id=7)]) as server:` and give `server.url` and `server.key` to who is tested. With `machines=True` each
running instance is a container with an sshd (vast_machine.py); else it is rows only. `script` says how instances behave, `fault` and `hook`
what goes wrong with a request; `requests`, `instances` and what they have spent say afterwards what happened.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import select
import socket
import threading
import time
from typing import Any, Callable

import vast_rows as rows
from vast_http import SILENT, SPECIAL, Answer, Fault, Httpd, Request, Unreadable, refusal
from vast_instance import HOUR_S, PORT, Instance, Script, create_problem
from vast_machine import Machine, Quirks, Way, environment, free_ports
from vast_rows import REFUSALS, Row, offer

__all__ = ["Answer", "Fault", "Instance", "Quirks", "Request", "Script", "VastServer", "offer"]
Hook = Callable[[Request], "None | str | Fault | Answer | tuple[int, Any]"]


class VastServer:
    """See the top. All of it may be used from any thread; `changed` is its lock."""

    def __init__(self, offers: list[Row] | None = None, *, machines: bool = False, port: int = 0, key: str = "k" * 60, rates: float = 0.0) -> None:
        """`rates`: turns the service's rate limits on, with its intervals times this."""
        self.key, self.machines, self.rates, self.port = key, machines, rates, port
        self.offers = [offer()] if offers is None else offers
        self.account: Row = {"id": 7001, "key_id": 88, "email": "dev@example.com", "username": "dev", "credit": 100.0, "balance": 0.0,
                             "ssh_key": None, "sid": "x1", "spend_limit": None}
        self.gone = "gone_404"             # the dress of "this offer is gone": or "gone_410", "gone_400"
        self.absent = "null"               # how by-id answers for what isn't there: or "404_instance", "404_not_found"
        self.relist = False                # a destroyed instance's offer is there again, under a new id
        self.ignored_filters: set[str] = set()
        self.secrets: dict[str, str] = {}
        # The account's ssh keys, and the shapes in which clients have seen them.
        self.ssh_keys: list[Row] = []
        self.key_field, self.keys_as, self.no_keys_404, self.refuse_duplicates, self.team = "key", "list", False, True, False
        # What happened.
        self.requests: list[Request] = []
        self.elsewhere: list[Request] = []     # what came to the other port after a redirect
        self.instances: dict[int, Instance] = {}
        self.most_alive = 0
        self.errors: list[BaseException] = []
        self.hook: Hook | None = None
        self.changed = threading.Condition(threading.RLock())
        self._scripts: list[tuple[int | None, Script]] = []
        self._faults: list[Fault] = []
        self._last: dict[tuple[str, str], float] = {}
        self._next_id, self._next_key, self._skipped = 28123456, 5501, 0.0
        self._touched: list[Instance] = []
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._closing = False
        self._httpd: Httpd | None = None
        self._other: Httpd | None = None
        self._held: socket.socket | None = None

    # -- its life --

    def __enter__(self) -> VastServer:
        self.up()
        self._start(self._keep)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close()
        if kind is None and self.errors:
            raise AssertionError(f"the loopback server itself failed: {self.errors!r}") from self.errors[0]

    def up(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
        self._httpd = Httpd(self, self.port)
        self.port = self._httpd.server_address[1]

    def down(self) -> None:
        """Connections are refused until `up()`; meanwhile nobody else gets the port."""
        self._httpd.end()
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", self.port))

    def close(self) -> None:
        with self.changed:
            self._closing = True
            self.changed.notify_all()
            for sock in list(self._sockets):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        for httpd in (self._httpd, self._other):
            if httpd is not None:
                httpd.end()
        if self._held is not None:
            self._held.close()
        for thread in self._threads:
            thread.join(60)
        for instance in self.instances.values():
            instance.want = "gone"
            self._fit(instance)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def now(self) -> float:
        return time.monotonic() + self._skipped

    def skip(self, seconds: float) -> None:
        """Time passes for states and bills."""
        with self.changed:
            self._skipped += seconds
            self.changed.notify_all()

    # -- what tests say --

    def script(self, which: int | None = None, **fields: Any) -> Script:
        """For instances made from now on: of an offer or a machine (its id), or of all. The latest that fits counts."""
        made = Script(**fields)
        with self.changed:
            self._scripts.append((which, made))
        return made

    def fault(self, endpoints: str, kind: str, nth: int = 1, times: int = 1, **options: Any) -> Fault:
        """`endpoints`: names with blanks between, or "any". The nth such call from now on, and as many as `times` says."""
        made = Fault(frozenset(endpoints.split()), kind, nth, times, **options)
        with self.changed:
            self._faults.append(made)
        return made

    def step(self, instance: Instance, state: str | Row) -> None:
        """This instance is in this state now; when the call returns so is its machine."""
        with self.changed:
            self._advance()
            instance.plan = []
            instance.bill(self.now())
            instance.enter(state)
            self.changed.notify_all()
        self._fit(instance)

    # -- what tests look at --

    def alive(self) -> list[Instance]:
        with self.changed:
            self._advance()
            return [one for one in self.instances.values() if one.alive]

    def unlabelled(self) -> list[Instance]:
        with self.changed:
            return [one for one in self.instances.values() if not one.label]

    def spent(self) -> float:
        with self.changed:
            return sum(sum(one.spent.values()) for one in self.instances.values())

    def calls(self, endpoint: str) -> list[Request]:
        with self.changed:
            return [one for one in self.requests if one.endpoint == endpoint]

    def leaks(self) -> list[str]:
        """Requests that had the account's key where it doesn't belong."""
        with self.changed:
            bad = [one for one in [*self.requests, *self.elsewhere] if self.key in f"{one.path} {one.query} {one.body} {one.headers}"]
            bad += [one for one in self.elsewhere if one.bearer != "none"] + [one for one in self.calls("object") if one.bearer != "none"]
            return [str(one) for one in bad]

    def wait_for(self, predicate: Callable[[VastServer], Any], timeout_s: float = 60.0) -> Any:
        """The first true value of `predicate(server)`, looked at after each request and change of state."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while True:
                self._advance()
                if value := predicate(self):
                    return value
                left = deadline - time.monotonic()
                assert left > 0, f"not within {timeout_s} s; the last requests:\n" + "\n".join(map(str, self.requests[-15:]))
                self.changed.wait(left)

    # -- time --

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _keep(self) -> None:
        """The thread that lets planned things happen when nobody asks."""
        try:
            self._keep_going()
        except Exception as error:
            self.errors.append(error)

    def _keep_going(self) -> None:
        while True:
            with self.changed:
                if self._closing:
                    return
                self._advance()
                touched, self._touched = self._touched, []
                if not touched:
                    due = self._next_due()
                    self.changed.wait(None if due is None else min(3600.0, max(0.001, due - self.now())))
            for instance in touched:
                self._start(self._fit, instance)

    def _times(self, one: Instance) -> list[float]:
        script = one.script
        times = [at for at, _ in one.plan[:1]] + [one.created + script.visible_after]
        if one.destroyed is not None:
            times += [one.destroyed + script.gone_after] + ([one.destroyed + script.comes_back_after] if one.returns else [])
        return times

    def _next_due(self) -> float | None:
        now = self.now()
        due = [at for one in self.instances.values() for at in self._times(one) if at > now]
        rate = sum(sum(one.rates().values()) for one in self.instances.values())
        left = self.account["credit"] - self.spent()
        return min(due + ([now + left / rate * HOUR_S] if rate and left > 0 else []), default=None)

    def _advance(self) -> None:
        """Everything that has become due happens. Under the lock."""
        now, changed = self.now(), False
        for one in self.instances.values():
            if one.returns and one.destroyed is not None and now >= one.destroyed + one.script.comes_back_after:
                one.returns, one.destroyed, one.destroyed_at, one.billed_until = False, None, None, now
                one.enter("st_all_stopped")
                changed = True
            while one.alive and one.plan and one.plan[0][0] <= now:
                at, state = one.plan.pop(0)
                one.bill(at)
                one.enter(state)
                self._touched.append(one)
                changed = True
            one.bill(now)
        if self.account["credit"] <= self.spent():
            for one in self.instances.values():
                if one.alive and one.status not in ("stopped", "offline"):
                    one.plan = []
                    one.enter("st_outbid")
                    self._touched.append(one)
                    changed = True
        self.most_alive = max(self.most_alive, sum(one.alive for one in self.instances.values()))
        if changed:
            self.changed.notify_all()

    # -- machines --

    def _fit(self, one: Instance) -> None:
        """The machine becomes what the instance wants of it."""
        try:
            with one.lock:
                self._fit_locked(one)
        except Exception as error:         # perhaps a thread's; told when the server is closed
            self.errors.append(error)
        with self.changed:
            self.changed.notify_all()

    def _fit_locked(self, one: Instance) -> None:
        want, boot, machine = one.want, one.boot, one.machine
        if machine is None:
            return
        if want in ("down", "gone") or boot != one.booted:
            machine.stop()
        if want == "gone":
            for way in one.ways.values():
                way.close()
            machine.close()
            return
        if want == "up" and not machine.running:
            if one.wipe:
                machine.wipe()
                one.wipe = False
            one.booted = boot
            machine.start()
        for name, way in one.ways.items():
            wanted = "stall" if want == "unreachable" else getattr(one.script.machine, name)
            if (want == "unreachable") != one.cut_off:
                way.mode = wanted
                way.cut()
        one.cut_off = want == "unreachable"

    def _furnish(self, one: Instance) -> None:
        """Ports, and where there are machines the machine and the ways to it."""
        script, env = one.script, one.body.get("env") or {}
        asked = [(int(found[2]), found[3] or "tcp") for found in map(PORT.fullmatch, env) if found]
        runtype = one.body.get("runtype") or "ssh"
        names = ["direct"] if "ssh_direc" in runtype else []
        if one.offer.get("direct_port_count", 0) < len(asked) + len(names):
            asked, names = [], []          # a host without open ports
        names += ["proxy"] if "proxy" in runtype or runtype == "ssh" else []
        one.udp = {(port, proto): free_ports(1, socket.SOCK_DGRAM if proto == "udp" else socket.SOCK_STREAM)[0] for port, proto in asked}
        if not self.machines:
            one.ports = {name: 2 * (one.id % 400) + number + 1 for number, name in enumerate(names)}      # nobody listens down there
            return
        self._make_ways(one, names)
        udp = {port: real for (port, proto), real in one.udp.items() if proto == "udp"}
        one.machine = Machine(environment(one.id, one.api_key, one.ports.get("direct", 0), udp, env), one.body.get("onstart") or "",
                              [key["text"] for key in self.ssh_keys if not key["deleted_at"]], script.machine)

    def _make_ways(self, one: Instance, names: list[str]) -> None:
        for way in one.ways.values():
            way.close()
        one.ways = {name: Way(lambda: one.machine.ready() if one.want == "up" else 0, getattr(one.script.machine, name),
                              one.script.direct_port if name == "direct" else 0) for name in names}
        one.ports = {name: way.port for name, way in one.ways.items()}

    # -- one request --

    def play(self, request: Request) -> tuple[Fault | None, Answer | None, list[Instance]]:
        """The fault that hits it, the answer, and instances whose machines have to follow."""
        for name, method, pattern in rows.ENDPOINTS:
            if method == request.method and (found := re.fullmatch(pattern, request.path)):
                request.endpoint, request.ids = name, tuple(map(int, found.groups()))
        if request.endpoint == "state" and isinstance(request.body, dict) and "label" in request.body:
            request.endpoint = "label"
        with self.changed:
            self._check_open()
            self.requests.append(request)
            self._advance()
            fault = self._fault_for(request)
            self.changed.notify_all()
        said = self.hook(request) if self.hook else None
        if isinstance(said, tuple):
            said = Answer(*said)
        if isinstance(said, Answer):
            return None, said, []
        if said is not None:
            fault = said if isinstance(said, Fault) else Fault(frozenset({"any"}), said)
        if fault is not None:
            request.fault = fault.kind
            if not fault.effect and fault.kind not in ("error_with_contract", "success_never_appears"):
                return fault, None if fault.kind in SILENT | SPECIAL else fault.answer(), []
        with self.changed:
            self._check_open()
            touched: list[Instance] = []
            try:
                answer = self._answer(request, fault.kind if fault else "", touched)
            except Unreadable as error:
                answer = error.answer
            self._advance()
            self.changed.notify_all()
        if fault is not None and fault.kind in {"429", *REFUSALS}:
            answer = fault.answer()
        return fault, answer, touched

    def _check_open(self) -> None:
        if self._closing:      # nothing may be made any more that nobody would end
            raise ConnectionAbortedError("the server is being closed")

    def _fault_for(self, request: Request) -> Fault | None:
        hit = None
        for fault in self._faults:
            if "any" in fault.endpoints or request.endpoint in fault.endpoints:
                fault.calls += 1
                if hit is None and fault.nth <= fault.calls < fault.nth + fault.times:
                    fault.hits += 1
                    hit = fault
        return hit

    def _answer(self, request: Request, fault: str, touched: list[Instance]) -> Answer:
        if not request.endpoint:
            return Answer(404, rows.HTML.format("404 Not Found"))
        if request.endpoint not in rows.OPEN:
            self._check_bearer(request)
        if self.rates and (wait := rows.THRESHOLDS.get(request.endpoint, 0.0)):
            last = self._last.get((request.endpoint, request.bearer))
            if last is not None and time.monotonic() - last < wait * self.rates:
                return Answer(429, f"API requests too frequent: endpoint threshold={wait}")
            self._last[request.endpoint, request.bearer] = time.monotonic()
        if request.body is not None and not isinstance(request.body, dict):
            raise Unreadable(refusal("400"))
        if request.endpoint == "create":
            return self._create(request.ids[0], request.body or {}, fault)
        if request.endpoint in ("destroy", "state", "reboot", "recycle"):
            return getattr(self, f"_on_{request.endpoint}")(request, touched)
        return getattr(self, f"_on_{request.endpoint}")(request)

    def _check_bearer(self, request: Request) -> None:
        if request.bearer == "right":
            return
        if request.bearer.startswith("C.") and request.endpoint in ("destroy", "state") and request.bearer == f"C.{request.ids[0]}":
            return
        raise Unreadable(refusal("403" if request.bearer.startswith("C.") else "401"))

    def bearer(self, authorization: str | None) -> str:
        token = (authorization or "").removeprefix("Bearer ")
        own = next((f"C.{one.id}" for one in self.instances.values() if one.api_key == token), "wrong")
        return "none" if authorization is None else "right" if token == self.key else own

    # -- search and create --

    def _on_search(self, request: Request) -> Answer:
        try:
            return Answer(200, {"offers": rows.search(self.offers, request.body or {}, self.ignored_filters)})
        except rows.BadFilter as error:
            return Answer(400, {"success": False, "error": "invalid_request", "msg": f"bad filter on field {error}"})

    def _on_search_new(self, request: Request) -> Answer:
        request.body = (request.body or {}).get("q") or {}
        return self._on_search(request)

    def _create(self, ask: int, body: Row, fault: str) -> Answer:
        found = next((one for one in self.offers if one["id"] == ask), None)
        if found is None:
            return refusal(self.gone, ask_id=ask)
        if problem := create_problem(body, found):
            return Answer(400, {"success": False, "error": problem[0], "msg": problem[1], "ask_id": ask})
        price = body.get("price")
        if price is not None and price < found["min_bid"]:
            return refusal(self.gone, ask_id=ask)
        if self.account["credit"] <= self.spent():
            return refusal("no_credit")
        hourly = sum(one.price for one in self.instances.values() if one.alive) + (found["dph_base"] if price is None else price)
        if self.account["spend_limit"] is not None and hourly > self.account["spend_limit"]:
            return refusal("spend_limit")
        script = next((one for which, one in reversed(self._scripts) if which in (None, found["id"], found["machine_id"])), Script())
        self.offers.remove(found)
        if script.unavailable and body.get("cancel_unavail"):
            return refusal("gone_410", ask_id=ask)
        contract = self._next_id
        self._next_id += 1
        if fault == "success_never_appears":
            return Answer(200, {"success": True, "new_contract": contract})
        body = {**body, "env": body["env"] if isinstance(body.get("env"), dict) else {}}
        one = self.instances[contract] = Instance(contract, found, body, script, self.now())
        self._furnish(one)
        if script.unavailable or fault == "error_with_contract":
            one.enter("st_all_stopped")
        else:
            one.begin(script.steps, self.now())
        if fault == "error_with_contract":
            return Answer(400, {"success": False, "error": "bid_too_low", "msg": "created in stopped state", "new_contract": contract})
        return Answer(200, {"success": True, "new_contract": contract, **({"instance_api_key": one.api_key} if script.instance_key else {})})

    # -- instances --

    def _instance(self, request: Request, missing: str = "404_instance") -> Instance:
        one = self.instances.get(request.ids[0])
        if one is None or not one.visible(self.now()):
            raise Unreadable(refusal(missing))
        return one

    def _on_show(self, request: Request) -> Answer:
        one = self.instances.get(request.ids[0])
        if one is None or not one.visible(self.now()):
            return Answer(200, {"instances": None}) if self.absent == "null" else refusal(self.absent)
        return Answer(200, {"instances": one.row(self.now(), "show")})

    def _on_list(self, request: Request) -> Answer:
        query, now = request.query, self.now()
        every = [one.row(now, "list") for _, one in sorted(self.instances.items()) if one.visible(now)]
        try:
            found = [row for row in every if rows.matches(row, query.get("select_filters") or {}, rows.STORED)]
        except rows.BadFilter as error:
            return refusal("400", msg=f"column {error} cannot be filtered")
        if [(one.get("col"), one.get("dir")) for one in query.get("order_by") or []] == [("id", "desc")]:
            found.reverse()
        start = 0
        if token := query.get("after_token"):
            try:
                last = json.loads(base64.b64decode(token, validate=True))["values"]["id"]
                start = [row["id"] for row in found].index(last) + 1
            except (ValueError, KeyError, TypeError):
                return refusal("400", msg="invalid after_token")
        limit = min(int(query.get("limit") or rows.PAGE), rows.PAGE)
        page = found[start:start + limit]
        more = base64.b64encode(json.dumps({"values": {"id": page[-1]["id"]}}).encode()).decode() if found[start + limit:] else None
        if columns := query.get("select_cols"):
            page = [{name: row.get(name) for name in columns} for row in page]
        counts: dict[str, int] = {}
        for row in found:
            counts[row.get("label") or ""] = counts.get(row.get("label") or "", 0) + 1
        return Answer(200, {"success": True, "instances_found": len(page), "total_instances": len(found), "label_counts": counts, "next_token": more,
                            "instances": page})

    def _on_destroy(self, request: Request, touched: list[Instance]) -> Answer:
        one, now = self.instances.get(request.ids[0]), self.now()
        hidden = one is not None and one.alive and not one.visible(now) and not one.script.hidden_destroy
        if one is None or hidden or not (one.alive or one.visible(now)):
            return refusal("404_instance")
        if one.alive:
            one.bill(now)
            one.destroyed, one.destroyed_at, one.destroyed_by = now, time.time(), request.bearer
            one.plan, one.want = [], "gone" if not one.returns else "down"
            one.states.append((one.destroyed_at, "destroyed"))
            touched.append(one)
            if self.relist:
                self.offers.append(offer(**{key: value for key, value in one.offer.items() if key not in ("id", "ask_contract_id")}))
        return Answer(200, {"success": True})

    def _on_state(self, request: Request, touched: list[Instance]) -> Answer:
        one, now = self._instance(request), self.now()
        wanted = (request.body or {}).get("state")
        if wanted not in ("running", "stopped") or not one.alive:
            return refusal("400")
        one.bill(now)
        if wanted == "stopped":
            one.plan = []
            one.enter("st_all_stopped")
            touched.append(one)
        elif one.status != "running":
            if one.script.queued:
                return refusal("queued")
            one.begin(one.script.resumed, now)
        return Answer(200, {"success": True})

    def _on_reboot(self, request: Request, touched: list[Instance]) -> Answer:
        one, now = self._instance(request), self.now()
        one.bill(now)
        one.enter("st_rebooting")
        one.boot += 1
        if one.script.moves:
            if one.ways:
                self._make_ways(one, list(one.ways))
            else:
                one.ports = {name: port + 2 for name, port in one.ports.items()}
        one.begin(one.script.resumed, now)
        return Answer(200, {"success": True})

    def _on_recycle(self, request: Request, touched: list[Instance]) -> Answer:
        self._instance(request).wipe = True
        return self._on_reboot(request, touched)

    def _on_label(self, request: Request) -> Answer:
        one, label = self._instance(request), request.body["label"]
        if not isinstance(label, str) or len(label) > 1024:
            return refusal("400", error="label_too_long")
        one.label = label
        return Answer(200, {"success": True})

    def _on_bid(self, request: Request) -> Answer:
        one = self._instance(request)
        one.bill(self.now())
        if one.bid is not None:
            one.bid = float(request.body["price"])
        return Answer(200, {"success": True})

    def _on_destroy_many(self, request: Request) -> Answer:
        for contract in request.body["instance_ids"]:
            touched: list[Instance] = []
            request.ids = (contract,)
            self._on_destroy(request, touched)
            self._touched += touched
        return Answer(200, {"success": True})

    def _on_contracts(self, request: Request) -> Answer:
        found = [{"id": one.id, "label": one.label} for one in self.instances.values() if one.label == request.body.get("label")]
        return Answer(200, {"success": True, "contracts": found})

    def _on_logs(self, request: Request) -> Answer:
        one = self._instance(request, "no_logs")
        return Answer(200, {"success": True, "result_url": f"{self.url}/s3/instance_logs/{one.id}.log", "msg": "log upload requested"})

    def _on_object(self, request: Request) -> Answer:
        one = self.instances.get(request.ids[0])
        if one is None:
            return Answer(404, "NoSuchKey")
        one.log_fetches += 1
        text = one.script.logs if one.script.logs is not None else one.machine.text if one.machine else "no container\n"
        return Answer(404, "NoSuchKey") if one.log_fetches <= one.script.logs_after else Answer(200, text)

    _on_execute = _on_logs

    def _on_copy(self, request: Request) -> Answer:
        return Answer(200, {"success": True, "msg": "copy started", "dst_addr": "127.0.0.1", "dst_port": 1})

    # -- the account --

    def _on_user(self, request: Request) -> Answer:
        user = {key: value for key, value in self.account.items() if key != "spend_limit"}
        return Answer(200, {**user, "credit": user["credit"] - self.spent(), "api_key": self.key} if "credit" in user else user)

    def _key_row(self, key: Row) -> Row:
        return {"id": key["id"], "user_id": self.account["id"], self.key_field: key["text"], "created_at": key["created_at"],
                "deleted_at": key["deleted_at"]}

    def _on_ssh_list(self, request: Request) -> Answer:
        found: Any = [self._key_row(key) for key in self.ssh_keys]
        if not found and self.no_keys_404:
            return refusal("404_not_found", msg="no keys")
        return Answer(200, {"list": found, "wrapped": {"ssh_keys": found}, "text": {"ssh_keys": json.dumps(found)}}[self.keys_as])

    def _on_ssh_create(self, request: Request) -> Answer:
        text = str(request.body.get("ssh_key") or "")
        if self.team:
            return refusal("team_keys")
        if not text or self.refuse_duplicates and any(key["text"].split()[:2] == text.split()[:2] and not key["deleted_at"] for key in self.ssh_keys):
            return refusal("400", error="duplicate_key", msg="this key exists already")
        return Answer(200, {"success": True, "key": self._key_row(self.add_key(text))})

    def add_key(self, text: str, deleted: bool = False) -> Row:
        """A key on the account, as if its owner had put it there."""
        self.ssh_keys.append({"id": self._next_key, "text": text, "created_at": "2026-08-01T10:00:00Z",
                              "deleted_at": "2026-09-01T10:00:00Z" if deleted else None})
        self._next_key += 1
        return self.ssh_keys[-1]

    def _on_ssh_delete(self, request: Request) -> Answer:
        for key in self.ssh_keys:
            if key["id"] == request.ids[0] and not key["deleted_at"]:
                key["deleted_at"] = "2026-11-01T10:00:00Z"
                return Answer(200, {"success": True})
        return refusal("no_ssh_key")

    def _on_ssh_attach(self, request: Request) -> Answer:
        one, text = self._instance(request), request.body.get("ssh_key")
        if not text:
            return refusal("400")
        one.keys[self._next_key] = text
        self._next_key += 1
        if one.machine:
            one.machine.attach(text)
        return Answer(200, {"success": True, "msg": "SSH key attached successfully"})

    def _on_ssh_of_instance(self, request: Request) -> Answer:
        found = [{"id": number, "name": "gpurun", "public_key": text} for number, text in self._instance(request).keys.items()]
        return Answer(200, {"success": True, "ssh_keys": json.dumps(found)})

    def _on_ssh_detach(self, request: Request) -> Answer:
        one = self._instance(request)
        text = one.keys.pop(request.ids[1], None)
        if text is None:
            return refusal("no_ssh_key")
        if one.machine:
            one.machine.detach(text)
        return Answer(200, {"success": True})

    def _on_secrets(self, request: Request) -> Answer:
        return Answer(200, {"success": True, "secrets": self.secrets})

    def _on_pending(self, request: Request) -> Answer:
        return Answer(200, {"success": True, "count": 0, "truncated": False, "pending_price_increases": []})

    @property
    def other_url(self) -> str:
        with self.changed:
            if self._other is None:
                self._other = Httpd(self, 0, self.elsewhere)
        return f"http://127.0.0.1:{self._other.server_address[1]}"


def main() -> None:
    """A server for itself, until its stdin ends: prints its URL."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--offers", type=int, default=8)
    parser.add_argument("--machines", action="store_true")
    options = parser.parse_args()
    with VastServer([offer() for _ in range(options.offers)], machines=options.machines, port=options.port) as server:
        print(server.url, server.key, flush=True)
        select.select([0], [], [])


if __name__ == "__main__":
    main()
