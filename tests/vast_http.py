"""The loopback server's HTTP side: requests as they came, answers, what can go wrong with them, and the sockets."""

from __future__ import annotations

import json
import select
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import vast_rows as rows
from vast_rows import REFUSALS

if TYPE_CHECKING:
    from vast_server import VastServer

FOREVER = 10 ** 9
SILENT = {"dropped", "lost_answer", "hang", "stall"}
SPECIAL = {"truncated", "trickle", "redirect308", "error_with_contract", "success_never_appears"}
WITH_EFFECT = {"lost_answer", "stall", "truncated", "trickle", "html200", "empty200"}


@dataclass
class Request:
    """One request as it came, and what was answered."""

    time: float
    method: str
    path: str
    query: dict[str, Any]
    body: Any
    headers: dict[str, str]                # without what Authorization says
    bearer: str                            # "right", "wrong", "none", or "C.<id>": a container's key
    endpoint: str = ""
    ids: tuple[int, ...] = ()
    status: int = 0                        # 0: no answer was sent
    answer: Any = None
    fault: str = ""

    @property
    def bearer_ok(self) -> bool:
        return self.bearer == "right"

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.body or ''} ({self.bearer}) -> {self.fault} {self.status}"


@dataclass
class Answer:
    status: int
    body: Any = None                       # JSON, but a str goes as it is
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> tuple[bytes, str]:
        if isinstance(self.body, str):
            return self.body.encode(), "text/html" if self.body.startswith("<") else "text/plain"
        return json.dumps(self.body).encode(), "application/json"


@dataclass
class Fault:
    """What goes wrong with calls of some endpoints.

    Kinds: a name of REFUSALS (with `retry_after` where wanted), "429" (`body="text"|"detail"|"full"`, `retry_after`);
    "dropped" (closed, no effect), "lost_answer" (effect, closed), "hang" and "stall" (silence until the client leaves or for `seconds`, without
    and with effect), "truncated" (effect, half the JSON), "trickle" (effect, the answer byte by byte over `seconds`);
    "redirect308" (to another port), "error_with_contract" (create: an error, and a stopped instance), "success_never_appears" (create).
    """

    endpoints: frozenset[str]
    kind: str
    nth: int = 1
    times: int = 1
    effect: bool | None = None             # whether the call does what it should; None: as the kind has it
    status: int | None = None
    body: Any = None
    retry_after: int | None = None
    seconds: float = FOREVER
    calls: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SILENT | SPECIAL | {"429"} | set(REFUSALS):
            raise ValueError(f"no such fault: {self.kind}")
        if unknown := self.endpoints - {"any", "label", *(name for name, _, _ in rows.ENDPOINTS)}:
            raise ValueError(f"no such endpoint: {unknown}")
        if self.effect is None:
            self.effect = self.kind in WITH_EFFECT

    def answer(self) -> Answer:
        kind = f"429_{self.body or 'text'}" if self.kind == "429" else self.kind
        status, body = REFUSALS[kind]
        return Answer(self.status or status, body, {} if self.retry_after is None else {"Retry-After": str(self.retry_after)})


class Unreadable(Exception):
    """A request that gets an answer at once."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


def refusal(name: str, **changes: Any) -> Answer:
    status, body = REFUSALS[name]
    return Answer(status, {**body, **changes} if changes else body)


class Httpd(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128

    def __init__(self, vast: VastServer, port: int, other: list[Request] | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.vast, self.other = vast, other
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):     # a client that left is no fault of ours
            self.vast.errors.append(error)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.server.vast.changed:
            self.server.vast._sockets.add(self.connection)

    def finish(self) -> None:
        with self.server.vast.changed:
            self.server.vast._sockets.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        pass

    def _read(self) -> Request:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urllib.parse.urlsplit(self.path)
        query: dict[str, Any] = {}
        for name, value in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
            try:
                query[name] = value if name == "after_token" else json.loads(value)
            except ValueError:
                query[name] = value
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode(errors="replace")
        headers = {name: value for name, value in self.headers.items() if name.lower() != "authorization"}
        with self.server.vast.changed:
            bearer = self.server.vast.bearer(self.headers.get("Authorization"))
        return Request(time.time(), self.command, parts.path, query, body, headers, bearer)

    def _serve(self) -> None:
        vast, request = self.server.vast, self._read()
        if self.server.other is not None:
            self.server.other.append(request)
            return self._send(request, refusal("401"))
        fault, answer, touched = vast.play(request)
        at_once = request.bearer == "right"    # a container that ends itself gets its answer first
        try:
            if at_once:
                for instance in touched:
                    vast._fit(instance)
            self._deliver(request, fault, answer)
        finally:
            if not at_once:
                for instance in touched:
                    vast._fit(instance)
            with vast.changed:
                vast.changed.notify_all()

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _deliver(self, request: Request, fault: Fault | None, answer: Answer | None) -> None:
        kind = fault.kind if fault else ""
        if kind in SILENT:
            self.close_connection = True
            if kind in ("hang", "stall"):
                select.select([self.connection], [], [], min(fault.seconds, 3600.0))
        elif kind == "redirect308":
            self._send(request, Answer(308, "", {"Location": self.server.vast.other_url + self.path}))
        elif kind == "truncated":
            text = json.dumps(answer.body)
            self._send(request, Answer(answer.status, text[:len(text) // 2]), kind="application/json")
        elif kind == "trickle":
            self._send(request, answer, slow_s=min(fault.seconds, 10.0))
        else:
            self._send(request, answer)

    def _send(self, request: Request, answer: Answer, kind: str = "", slow_s: float = 0.0) -> None:
        body, content_type = answer.encoded()
        request.status, request.answer = answer.status, answer.body
        self.send_response(answer.status)
        for name, value in {"Content-Type": kind or content_type, "Content-Length": str(len(body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not slow_s:
            self.wfile.write(body)
            return
        for start in range(len(body)):
            self.wfile.write(body[start:start + 1])
            if select.select([self.connection], [], [], slow_s / len(body))[0]:     # the client has left
                self.close_connection = True
                return
