"""The guard: the node ends its own rented machine once a limit is reached and nobody else has ended it.

Whoever rented the machine may be gone for good: a laptop that was closed, an account that nobody looks at. So the node itself keeps what
`Arm` said, on its disk, and has what it takes to end this one machine: the provider puts a key for that into each container. Deadlines are
kept on a clock that nobody sets, which goes on while the machine sleeps; only over a restart of the machine they are taken from the
wall clock. A machine is ended for good or not at all: one that is stopped goes on costing, so that is asked for only besides.

The key is read anew each time. It is in no file, no log, no message and no command line.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from gpurun import supervise
from gpurun.errors import GpurunError
from gpurun.files import atomic_write, read_json
from gpurun.messages import Arm, Armed

VERSION = 1
PROVIDER = "vastai"
COLLECT_GRACE_S = 600.0       # at the deadline it is for an operator that is there to stop, collect and end the machine; for so long
BACKOFF_S = (5.0, 10.0, 20.0, 40.0, 60.0)   # between requests to end the machine; the last of them for ever
TIMEOUT_S = 20.0              # of one request
STOP_AFTER = 3                # requests that failed: then the machine is asked to be stopped too, which is cheaper than nothing
UNVERIFIED_AFTER = 5          # requests for which no certificate could be verified
LOGGED_S = 60.0               # by as much a new deadline differs that is worth a line: each session of an operator may bring one
ANSWER_BYTES = 65536
SHOWN = 200
LEAST_WAIT_S = 0.05

ID = re.compile(r"[0-9]{1,20}").fullmatch
KEY = re.compile(r"[!#-\[\]-~]{1,500}").fullmatch      # what can stand in a header and, in quotes, in curl's config
API = re.compile(r"https?://[!#-\[\]-~]{1,500}").fullmatch


def due(end_in_s: Optional[float], idle_s: float, why: str, idle_for_s: float, operator_there: bool) -> str:
    """Why the machine is to be ended now; "" when it isn't. `end_in_s`: until the deadline, None where there is none."""
    if end_in_s is not None and end_in_s <= (-COLLECT_GRACE_S if operator_there else 0.0):
        return f"its limit is reached: {why or 'the time that it was given'}"
    if idle_s > 0 and not operator_there and idle_for_s >= idle_s:
        return f"nothing has run on it and no operator has been there for {idle_s:g} s"
    return ""


def container(environ: Mapping[str, str], first: str = "/proc/1/environ", etc: str = "/etc/environment") -> Tuple[str, str]:
    """(id, key) of this container, as its provider's API wants them; "" for what is nowhere. Sessions of ssh don't have them, so they are looked
    for in the container's first process and in what images write down for everybody, too."""
    found_id, found_key = "", ""
    for variables in (dict(environ), _variables(_read(first), b"\0"), _variables(_read(etc), b"\n")):
        if not found_id:
            named = variables.get("CONTAINER_ID", "").strip() or re.sub(r"^C\.", "", variables.get("VAST_CONTAINERLABEL", "").strip())
            found_id = named if ID(named) else ""
        if not found_key:
            key = variables.get("CONTAINER_API_KEY", "").strip()
            found_key = key if KEY(key) else ""
    return found_id, found_key


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _variables(data: bytes, end: bytes) -> Dict[str, str]:
    """NAME=value, each up to `end`; the value in quotes of either kind or bare, whatever it has in it."""
    found = {}
    for item in data.split(end):
        name, _, value = item.decode("utf-8", "replace").strip().partition("=")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[re.sub(r"^export\s+", "", name).strip()] = value
    return found


def boottime() -> float:
    """Seconds on a clock that nobody can set, those that the machine slept included where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Ending:
    """The machine is being ended. `over`: nobody wants that any more. `accepted`: the provider has said that it does it."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.over = threading.Event()
        self.accepted = False


class Guard:
    """The limits of one machine, in `<folder>/guard.json`, and what ends it."""

    def __init__(self, folder: str, environ: Mapping[str, str] = os.environ, first: str = "/proc/1/environ", etc: str = "/etc/environment",
                 backoff_s: Sequence[float] = BACKOFF_S, clock: Callable[[], float] = boottime, wall: Callable[[], float] = time.time,
                 boot: Callable[[], str] = supervise.boot_id) -> None:
        self._path = os.path.join(folder, "guard.json")
        self._sources = (environ, first, etc)
        self._backoff_s = backoff_s
        self._clock, self._wall, self._boot = clock, wall, boot
        self._lock = threading.Lock()
        self._armed = Arm()
        self._ends_at: Optional[float] = None    # on our clock
        self._unsaved = False
        self._ending: Optional[Ending] = None
        self._untrusted = 0                      # requests for which no certificate could be verified
        try:
            self._load(read_json(self._path))
        except (GpurunError, KeyError, TypeError, ValueError) as error:
            self._log(f"{self._path} can't be read, no limit holds: {error!r}")

    # ---- what holds --------------------------------------------------------------------------------------------------------

    def arm(self, message: Arm) -> Armed:
        """Takes the limits in place of those before; what was begun because of those is given up. `end_in_s` below 0: at once."""
        with self._lock:
            before, left = self._armed._replace(end_in_s=0.0), self._left()
            self._armed = message
            self._ends_at = self._clock() + message.end_in_s if message.provider and message.end_in_s else None
            if message._replace(end_in_s=0.0) != before or abs((self._left() or 0.0) - (left or 0.0)) > LOGGED_S:
                self._log(f"armed: ends in {self._left() or 'any number of'} s ({message.why}), or idle for {message.idle_s:g} s (0: never)"
                          if message.provider else "disarmed")
            if self._ending is not None and not self._ending.accepted:
                self._ending.over.set()
                self._ending = None
            self._save()
            able, reason = self._able()
            if self._unsaved:
                reason = "; ".join(filter(None, [reason, f"{self._path} can't be written: an agent after this one wouldn't know"]))
            if self._ending is not None:
                reason = "; ".join(filter(None, [reason, f"the machine is being ended already: {self._ending.why}"]))
            return Armed(able=able, reason=reason, end_in_s=self._left() or 0.0, idle_s=self._idle_s())

    def state(self) -> Dict[str, Any]:
        """For the node's facts; {} when it isn't armed. `end_in_s`: 0.0 means no deadline, below 0 one that has passed."""
        with self._lock:
            if not self._armed.provider:
                return {}
            able, reason = self._able()
            return {"able": able, "reason": reason, "end_in_s": self._left() or 0.0, "idle_s": self._idle_s(), "why": self._armed.why[:SHOWN],
                    "ending": self._ending.why if self._ending is not None else ""}

    @property
    def armed(self) -> bool:
        return bool(self._armed.provider)

    @property
    def ending(self) -> str:
        """Why the machine is being ended; "" when it isn't."""
        ending = self._ending
        return ending.why if ending is not None else ""

    def begin_if_due(self, idle_for_s: float, operator_there: bool) -> Optional[Ending]:
        """The machine's end, if it is to be begun now; None when it isn't, or has been. It is for `end_machine`, once the job is stopped. A machine
        that can't be ended is none the worse for being idle."""
        with self._lock:
            if not self._armed.provider or self._ending is not None:
                return None
            if self._unsaved:
                self._save()
            why = due(self._left(), self._idle_s(), self._armed.why[:SHOWN], idle_for_s, operator_there)
            if not why or not self._able()[0] and not due(self._left(), 0.0, "", 0.0, operator_there):
                return None
            self._log(f"this machine is being ended: {why}")
            self._ending = Ending(why)
            return self._ending

    def next_in(self, idle_for_s: float) -> float:
        """Seconds until it may be due, if nothing happens meanwhile."""
        with self._lock:
            if not self._armed.provider or self._ending is not None:
                return math.inf
            left = self._left()
            waits = [self._idle_s() - idle_for_s] if self._idle_s() and self._able()[0] else []
            if left is not None:
                waits.append(left if left > 0 else left + COLLECT_GRACE_S)
            return max(min(waits, default=math.inf), LEAST_WAIT_S)

    def _left(self) -> Optional[float]:
        """Seconds until the deadline, never 0.0, which means none in a message."""
        return None if self._ends_at is None else round(self._ends_at - self._clock(), 3) or -0.001

    def _idle_s(self) -> float:
        return max(0.0, self._armed.idle_s) if self._armed.provider else 0.0

    def _able(self) -> Tuple[bool, str]:
        if not self._armed.provider:
            return False, ""
        if self._armed.provider != PROVIDER:
            return False, f"this agent can't end a machine of {self._armed.provider[:40]!r}, only one of {PROVIDER!r}"
        if not API(self._armed.api):
            return False, f"the API's address is no http(s) URL: {self._armed.api[:SHOWN]!r}"
        missing = [name for name, value in zip(("CONTAINER_ID", "CONTAINER_API_KEY"), container(*self._sources)) if not value]
        places = f"its environment, {self._sources[1]}, {self._sources[2]}"
        return not missing, f"no {' and no '.join(missing)} was found on this node ({places})" if missing else ""

    # ---- on disk -----------------------------------------------------------------------------------------------------------

    def _load(self, known: Optional[Dict[str, Any]]) -> None:
        if known is None:
            return
        if known["version"] != VERSION:
            raise ValueError("it is of another version")
        armed = Arm(end_in_s=float(known["end_in_s"]), idle_s=float(known["idle_s"]), api=str(known["api"]), why=str(known["why"]),
                    provider=str(known["provider"]))
        if known["ends_at"] is not None:
            if known["boot"] == self._boot() and known["boot"]:
                self._ends_at = float(known["ends_at"])
            else:                              # never later than it was when it was written: the wall clock may be wrong by years
                self._ends_at = self._clock() + min(float(known["ends_wall"]) - self._wall(), float(known["left_s"]))
        self._armed = armed
        if armed.provider:
            self._save()

    def _save(self) -> None:
        left = self._left()
        try:
            atomic_write(self._path, json.dumps(dict(self._armed._asdict(), version=VERSION, boot=self._boot(), ends_at=self._ends_at, left_s=left,
                                                     ends_wall=None if left is None else self._wall() + left)).encode("ascii"))
            self._unsaved = False
        except OSError:                        # a full disk: it holds all the same, and is written as soon as that is possible
            self._unsaved = True

    @staticmethod
    def _log(text: str) -> None:
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} guard: {text}\n")

    # ---- the end -----------------------------------------------------------------------------------------------------------

    def end_machine(self, ending: Ending) -> None:
        """Asks the provider to end this machine, again and again: this process ends with the machine. Returns only if nobody wants that any more."""
        failed, silent = 0, False
        while not ending.over.is_set():
            done, said = self._ask("DELETE", {})
            if done and not silent:
                self._log(f"the provider ends this machine ({said})")
            elif not done:
                self._log(f"the provider didn't end this machine: {said}")
            silent = done                      # it is asked again all the same: an answer is no end
            ending.accepted = ending.accepted or done and said.startswith("HTTP 200")
            failed = 0 if done else failed + 1
            if failed >= STOP_AFTER:
                done, said = self._ask("PUT", {"state": "stopped"})
                self._log(f"asked to be stopped for now: {said}")
            ending.over.wait(self._backoff_s[min(failed or len(self._backoff_s), len(self._backoff_s)) - 1])

    def _ask(self, method: str, body: Dict[str, Any]) -> Tuple[bool, str]:
        """Whether it is done, or there is no such machine any more; and the provider's words."""
        api = self._armed.api.rstrip("/")
        number, key = container(*self._sources)
        if not number or not key or not API(api):
            return False, self._able()[1] or "no limit is set"
        try:
            status, data = self._request(method, f"{api}/api/v0/instances/{number}/", key, json.dumps(body))
        except Exception as error:             # whatever a broken network, proxy or image comes up with: it is tried again
            return False, f"{type(error).__name__}: {error}".replace(key, "(the key)")[:SHOWN]
        try:
            answer = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError):
            answer = None
        answer = answer if isinstance(answer, dict) else {}
        done = status == 200 and answer.get("success") is True or status == 404 or answer.get("error") == "no_such_instance"
        return done, f"HTTP {status} {data[:SHOWN].decode('utf-8', 'replace')!r}".replace(key, "(the key)")

    def _request(self, method: str, url: str, key: str, body: str) -> Tuple[int, bytes]:
        """(status, body) of the answer. Where this Python can't verify certificates (slim images have none to do it with) curl may, and after
        that nobody does: the key can do nothing but start, stop and end this one machine, which is to be ended anyway, and a machine that
        isn't ended costs money for ever."""
        try:
            return _by_urllib(method, url, key, body)
        except OSError as error:
            if not _untrusted(error):
                raise
            self._untrusted += 1
            if shutil.which("curl"):
                try:
                    return _by_curl(method, url, key, body)
                except (OSError, subprocess.SubprocessError):
                    if self._untrusted <= UNVERIFIED_AFTER:
                        raise
            elif self._untrusted <= UNVERIFIED_AFTER:
                raise
        return _by_urllib(method, url, key, body, verify=False)


def _untrusted(error: OSError) -> bool:
    """Whether it is this Python that can't verify the other side, or can't speak TLS at all."""
    reason = getattr(error, "reason", error)
    return "CERTIFICATE_VERIFY_FAILED" in str(reason) or "unknown url type" in str(reason)


def _by_urllib(method: str, url: str, key: str, body: str, verify: bool = True) -> Tuple[int, bytes]:
    import urllib.error                        # here: no run needs them
    import urllib.request
    context = None
    if not verify:
        import ssl
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(url, body.encode("ascii"), {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:
            return response.status, response.read(ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(ANSWER_BYTES)


def _by_curl(method: str, url: str, key: str, body: str) -> Tuple[int, bytes]:
    """Everything over stdin: everybody on the machine can read a command line."""
    quoted = body.replace('"', '\\"')
    config = (f'url = "{url}"\nrequest = "{method}"\nheader = "Authorization: Bearer {key}"\nheader = "Content-Type: application/json"\n'
              f'data = "{quoted}"\nmax-time = {TIMEOUT_S:g}\nsilent\nshow-error\nwrite-out = "\\n%{{http_code}}"\n')
    done = subprocess.run(["curl", "-q", "-K", "-"], input=config.encode("ascii"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=2 * TIMEOUT_S)
    if done.returncode:
        raise OSError(f"curl ended with {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()}")
    data, _, status = done.stdout.rpartition(b"\n")
    return int(status), data
