"""Vast.ai's API through its own SDK, which nothing else imports: plain calls with errors that say what happened.

    api = Api()                           the key from where the SDK has it
    api.account(), api.search(query(cluster), bid=False, disk_gb=64)
    api.create(offer, …) -> id            asked once, never again: an answer that got lost may be a machine that costs money
    api.rows("gpurun-…")                  all of the account's machines or a ProviderError: a listing that failed is unknown, never empty
    api.row(id) -> Row or None            None: the service says that there is none
    api.destroy(id)                       accepted, or there is none
    stage(row, started) -> Stage          what a machine's row means

Every call may come from any thread. All but `create` are asked again for as long as `patience_s`; an error after that which time alone
may heal is a TemporaryError. No error text has the key in it, or what stands behind the `?` of a URL.
"""

from __future__ import annotations

import os
import random
import re
import time
from typing import Any, Callable, Collection, Iterator, NamedTuple, TypeVar

from gpurun.errors import AccountError, ConfigError, OfferGoneError, ProviderError, TemporaryError, UnclearError
from gpurun.offers import id_text, number, text, whole

DEFAULT_URL = "https://console.vast.ai"
KEYS_PAGE = "https://cloud.vast.ai/manage-keys/"
TIMEOUT_S = 30.0                # of one attempt
# Waits before asking again, the last one again and again. The SDK's own (0.15 s) are far below the service's limits of 1 to 5 s for each call.
BACKOFF_S = {"slow down": (3.0, 6.0, 12.0), "failed": (1.0, 2.0, 4.0)}
PAGE_ROWS, MAX_PAGES = 25, 400
PAGE_S = 1.0                    # between the pages of a list: the service takes one such call a second, and a refused one costs far more
TELL_S = 10.0                   # so often, at most, is said that something is asked again
MAX_ONSTART_BYTES = 4000        # the service's limit is told as 4048, 4096 and more
MAX_LOG_BYTES = 64 * 1024

_NO_OFFER = ("no_such_ask",)
_NO_MONEY = ("insufficient_credit", "insufficient credit", "missing_billing", "spend_rate_limit", "spending rate")
_NO_MACHINE = ("no_such_instance", "not_found", "not found", "invalid_id")
_BAD_KEY = ("invalid user key", "auth_error", "invalid api key")
_TWO_FACTOR = ("two factor", "two-factor", "2fa", "tfa")

_T = TypeVar("_T")


class Account(NamedTuple):
    """`credit` in $; None when the service doesn't say."""

    credit: float | None
    name: str


class Row(NamedTuple):
    """A machine as the service lists it. What it doesn't say is "", 0 or None; `ports` has the real port of each inner one."""

    id: str
    label: str = ""
    machine_id: str = ""
    actual_status: str = ""
    intended_status: str = ""
    cur_state: str = ""
    next_state: str = ""
    status_msg: str = ""
    public_ip: str = ""
    ssh_host: str = ""
    ssh_port: int = 0
    ports: dict[str, int] = {}
    price_per_hour: float | None = None
    is_bid: bool = False
    started_at: float | None = None
    ends_at: float | None = None
    gpu_name: str = ""
    num_gpus: int = 0
    geolocation: str = ""
    image: str = ""


class Rows(list):
    """The rows that were asked for; `total` counts everybody's on the account."""

    total = 0


# ---- the calls -------------------------------------------------------------------------------------------------------------

class Api:
    """`say(text)` is told when a call has to wait for long. `key_source`: where the key is from. `key_end`: its last 4
    characters, for who asks which one that is; no error has them."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._key, self.key_source = _find_key()
        self.key_end = self._key[-4:] if len(self._key) >= 12 else ""
        self.url = (os.environ.get("VAST_URL") or DEFAULT_URL).rstrip("/")
        if not re.match(r"https?://[^/\s?#@]+(/[^\s?#]*)?$", self.url):
            raise ConfigError("$VAST_URL must be the http or https URL of the API, without a key or a query; unset it for Vast.ai itself")
        self._say = say or (lambda line: None)
        self._told: float | None = None   # when, last
        vastai = _sdk()
        # One attempt each: the SDK's own retries would send a create twice. It opens a connection for each, so threads share nothing.
        self._vast = vastai.VastAI(api_key=self._key, server_url=self.url, retry=1)
        self._vast.client.timeout = TIMEOUT_S

    def account(self, patience_s: float = 20) -> Account:
        """Who the key belongs to. Also the cheapest way to learn that it is refused, which a search isn't."""
        body = self._ask("look at the account", lambda: self._get("/users/current"), patience_s)
        return Account(number(body.get("credit")), text(body.get("username")) or text(body.get("email")))

    def search(self, query: dict[str, Any], bid: bool, disk_gb: int, limit: int = 64, patience_s: float = 30) -> list[dict[str, Any]]:
        """Offers as they came, cheapest first; `offers.parse` reads them. `query` is complete: the SDK's hidden filters are off."""
        def once() -> list:
            found = self._vast.search_offers(query=dict(query), type="bid" if bid else "on-demand", order="dph_total", limit=limit, storage=disk_gb,
                                             no_default=True)
            if not isinstance(found, list):
                raise _odd("its answer has no list of offers")
            return found

        return self._ask("search for offers", once, patience_s)

    def create(self, offer_id: int, image: str, disk_gb: int, label: str, env: dict[str, str], onstart: str, bid: float | None = None) -> str:
        """Rent it; the id of the new machine.

        OfferGoneError: somebody else has it. AccountError: no offer will do. UnclearError: there may be a machine now. TemporaryError and
        any other ProviderError: there is none.
        """
        size = len(onstart.encode())
        if size >= MAX_ONSTART_BYTES:
            raise ProviderError(f"The machine's start script has {size:,} bytes, and Vast.ai takes less than {MAX_ONSTART_BYTES:,}; "
                                "nothing was rented")
        what = f"rent offer {offer_id}"
        try:
            body = _read(lambda: self._vast.create_instance(
                id=int(offer_id), image=image, disk=disk_gb, env=env, label=label, onstart_cmd=onstart, ssh=True, direct=True,
                cancel_unavail=True, bid_price=bid))
        except _Failed as failed:
            raise self._not_created(what, failed) from None
        contract = _contract(body)
        if contract and body.get("success", True) is not False:
            return contract
        raise self._unclear(what, _said(body) or "its answer names no machine", contract)

    def rows(self, prefix: str, patience_s: float = 30, ids: Collection[str] = ()) -> Rows:
        """Every machine of the account whose label starts so, or that has one of these ids, however many pages it takes; `patience_s` is for each."""
        what = "list the machines"
        found: dict[str, dict] = {}
        asked: dict[str, Any] = {"select_filters": {}, "order_by": [{"col": "id", "dir": "asc"}], "limit": PAGE_ROWS}
        for _ in range(MAX_PAGES):
            page = self._ask(what, lambda: self._page(asked), patience_s)
            for row in page["instances"]:
                found[id_text(row.get("id")) or f"? {len(found)}"] = row
            token = page.get("next_token")
            if not token:
                break
            if token == asked.get("after_token"):
                raise self._error(what, _odd("its list goes round in a circle"))
            asked = {**asked, "after_token": token}
            time.sleep(PAGE_S)
        else:
            raise self._error(what, _odd(f"its list has more than {MAX_PAGES} pages"))
        total = whole(page.get("total_instances"))
        if total is not None and total > len(found):
            raise self._error(what, _odd(f"it lists {len(found)} of {total} machines"))
        rows = Rows()
        for row in found.values():
            parsed = parse_row(row)
            if parsed.label.startswith(prefix) or parsed.id in ids:
                if not parsed.id:
                    raise self._error(what, _odd(f"the machine with the label {parsed.label} has no id"))
                rows.append(parsed)
        rows.total = max(len(found), total or 0)
        return rows

    def row(self, machine: str, patience_s: float = 0) -> Row | None:
        """None: the service says that there is no such machine."""
        what, number_ = f"look at machine {machine}", _number_of(machine)

        def once() -> dict:
            body = self._get(f"/instances/{number_}/", {"owner": "me"})
            if "instances" not in body:
                raise _odd("its answer has no machine, nor says that there is none")
            return body

        try:
            value = self._ask(what, once, patience_s)["instances"]
        except _NoMachine:
            return None
        if value is None or value == []:
            return None
        rows = value if isinstance(value, list) else [value]
        found = [one for one in rows if isinstance(one, dict) and id_text(one.get("id")) == str(number_)]
        if not found:
            raise self._error(what, _odd("its answer is about another machine"))
        row = parse_row(found[0])
        return self._with_ports(row) if row.actual_status == "running" and not row.ports else row

    def destroy(self, machine: str, patience_s: float = 120) -> None:
        """Returns when the service took it, or says that there is no such machine. It may stay in the listing for some seconds."""
        number_ = _number_of(machine)
        try:
            self._ask(f"destroy machine {machine}", lambda: _dict(self._vast.destroy_instance(number_)), patience_s)
        except _NoMachine:
            pass

    def ensure_key(self, public_key: str, patience_s: float = 30) -> None:
        """The account has this SSH key, so that machines that are made from now on let it in."""
        wanted = public_key.split()[:2]

        def once() -> Any:
            return None if wanted in self._account_keys() else self._vast.create_ssh_key(public_key.strip())

        self._ask("put gpurun's SSH key on the account", once, patience_s, fine=("already", "duplicate", "exists"))

    def has_key(self, public_key: str, patience_s: float = 5) -> bool:
        """Whether the account has it. Changes nothing."""
        return self._ask("look at the account's SSH keys", lambda: public_key.split()[:2] in self._account_keys(), patience_s)

    def attach_key(self, machine: str, public_key: str, patience_s: float = 20) -> None:
        """This machine lets the SSH key in; it may take half a minute to get there."""
        number_ = _number_of(machine)
        self._ask(f"put gpurun's SSH key on machine {machine}", lambda: self._vast.attach_ssh(number_, public_key.strip()), patience_s,
                  fine=("already", "duplicate", "exists"))

    def logs(self, machine: str, seconds: float = 20) -> str:
        """The end of the container's log; "" when it can't be had in time. Never an error: it is only to help a person."""
        import requests

        until = time.monotonic() + seconds
        path = f"/instances/request_logs/{_number_of(machine)}/"
        try:
            url = self._ask("", lambda: _object(self._vast.client.put(path, json_data={"tail": "200"})), 0).get("result_url")
            while isinstance(url, str) and time.monotonic() < until:
                # Without the key: it isn't the service's own server.
                with requests.get(url, timeout=max(0.1, min(10.0, until - time.monotonic())), stream=True) as answer:
                    if answer.status_code == 200:
                        return _end_of(answer, until).decode("utf-8", "replace").replace(self._key, "…")
                time.sleep(min(0.5, max(0.0, until - time.monotonic())))
        except (ProviderError, requests.exceptions.RequestException, ValueError):
            pass
        return ""

    # ---- what they share ----

    def _account_keys(self) -> list[list[str]]:
        """Type and key of each; one attempt."""
        try:
            known = _keys(_read(lambda: self._vast.show_ssh_keys()))
        except _Failed as failed:
            if failed.status != 404 or failed.has(_BAD_KEY):
                raise
            known = []
        return [key.split()[:2] for key in known]

    def _get(self, path: str, asked: dict[str, Any] | None = None) -> dict[str, Any]:
        return _object(self._vast.client.get(path, query_args=asked))

    def _page(self, asked: dict[str, Any]) -> dict[str, Any]:
        page = self._get("/api/v1/instances/", asked)
        rows, token = page.get("instances"), page.get("next_token")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not isinstance(token, (str, type(None))):
            raise _odd("its answer is no list of machines")
        return page

    def _with_ports(self, row: Row) -> Row:
        """Some of the service's answers about one machine lack the ports, which the list has."""
        asked = {"select_filters": {"id": {"eq": int(row.id)}}, "order_by": [{"col": "id", "dir": "asc"}], "limit": PAGE_ROWS}
        try:
            page = self._ask("", lambda: self._page(asked), 0)
        except ProviderError:
            return row   # as good as not published yet: whoever waits for them asks again
        found = [parse_row(one) for one in page["instances"] if id_text(one.get("id")) == row.id]
        return row._replace(ports=found[0].ports, public_ip=row.public_ip or found[0].public_ip) if found else row

    def _ask(self, what: str, call: Callable[[], _T], patience_s: float, fine: tuple[str, ...] = ()) -> _T:
        """Asked until it is answered, refused, or out of time. `fine`: words of a refusal that mean that it is so already."""
        until = time.monotonic() + patience_s
        tries = 0
        while True:
            try:
                return _read(call)
            except _Failed as failed:
                if failed.status in (400, 409) and failed.has(fine):
                    return {}   # type: ignore[return-value]  # of the calls that say what is fine, nobody reads the answer
                last = failed
            if last.kind not in BACKOFF_S:
                raise self._error(what, last) from None
            table = BACKOFF_S[last.kind]
            wait = max(table[min(tries, len(table) - 1)] * random.uniform(1.0, 1.2), last.retry_after)
            if time.monotonic() + wait > until:
                raise self._error(what, last) from None
            tries += 1
            now = time.monotonic()
            if (tries > 1 or wait > TELL_S) and (self._told is None or now - self._told >= TELL_S):
                self._told = now
                self._say(f"Vast.ai: can't {what} yet ({self._clean(last.says)}); asking again in {wait:.0f} s")
            time.sleep(wait)

    def _not_created(self, what: str, failed: _Failed) -> ProviderError:
        """For a create, whatever isn't a clear refusal may be a machine."""
        contract = _contract(failed.body)
        if contract:
            return self._unclear(what, failed.says, contract)
        if failed.not_sent or failed.status in (401, 402, 403, 429):
            return self._error(what, failed)
        if not 400 <= failed.status < 500 or failed.status in (408, 499) or not failed.explained:
            return self._unclear(what, failed.says, "")
        if failed.has(_NO_OFFER):
            return OfferGoneError(f"Vast.ai: offer {self._clean(what.split()[-1])} is gone, or not to be had at that price; another one may be")
        return self._error(what, failed)

    def _unclear(self, what: str, says: str, contract: str) -> UnclearError:
        known = f"it is machine {contract}" if contract else "look for its label in the list of machines"
        return UnclearError(f"Vast.ai: nobody can tell whether it did {what}: {self._clean(says)}. If it did, it costs money from now on; "
                            f"{known}", contract)

    def _error(self, what: str, failed: _Failed) -> ProviderError:
        says, doing = self._clean(failed.says), f"can't {what}" if what else "can't do that"
        if failed.status == 404 and "machine " in what and failed.has(_NO_MACHINE) and not failed.has(_BAD_KEY):
            return _NoMachine(f"Vast.ai {doing}: there is no such machine ({says})")
        if failed.has(_TWO_FACTOR) and failed.status in (401, 403):
            return AccountError(f"Vast.ai {doing}: this account has two-factor login, and the key from {self.key_source} isn't enough ({says}). "
                                f"The session of the vastai command can't be used here: make an API key at {KEYS_PAGE} and put it into $VAST_API_KEY")
        if failed.status == 401 or failed.has(_BAD_KEY):
            return AccountError(f"Vast.ai {doing}: it refuses the key from {self.key_source} ({says}). $VAST_API_KEY wins over a stored key, and an "
                                f"entry for its host (or `default`) in ~/.netrc is sent in place of either; make a key at {KEYS_PAGE}")
        if failed.has(_NO_MONEY) or failed.status == 402:
            return AccountError(f"Vast.ai {doing}: {says}. Add credit, or wait if the account is new: see https://cloud.vast.ai/billing/")
        if failed.status == 403:
            return AccountError(f"Vast.ai {doing}: the key from {self.key_source} may not do it ({says}). It needs the permissions misc, user_read, "
                                f"user_write, instance_read and instance_write; make one at {KEYS_PAGE}")
        if failed.status == 410:
            return ProviderError(f"Vast.ai {doing}: the service no longer knows this call ({says}); gpurun or its SDK is too old: "
                                 "pip install --upgrade 'gpurun[vastai]'")
        if failed.has(("search_quota_exceeded",)):
            return ProviderError(f"Vast.ai {doing}: the account's searches of today are used up ({says}); they come back at midnight UTC")
        if failed.status == 400 and failed.has(("team ssh keys",)):
            return AccountError(f"Vast.ai {doing}: a team's account takes no SSH keys ({says}); use a key of your own account, made at {KEYS_PAGE}")
        if failed.kind in BACKOFF_S:
            return TemporaryError(f"Vast.ai {doing}: {says}; try again later")
        return ProviderError(f"Vast.ai {doing}: {says}")

    def _clean(self, says: str) -> str:
        return re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", text(says.replace(self._key, "…"), 400)).rstrip(".")


class _NoMachine(ProviderError):
    """Said so by the service; never shown where that is what was hoped for."""


# ---- one attempt -------------------------------------------------------------------------------------------------------------

class _Failed(Exception):
    """One attempt. `kind`: a key of BACKOFF_S, or "" when asking again won't help. `status` 0: no answer, or one that makes no sense."""

    def __init__(self, says: str, kind: str = "", status: int = 0, body: Any = None, retry_after: float = 0.0, not_sent: bool = False) -> None:
        super().__init__(says)
        self.says, self.kind, self.status, self.body, self.retry_after, self.not_sent = says, kind, status, body, retry_after, not_sent

    @property
    def explained(self) -> bool:
        """The service itself said so, not something on the way there."""
        return isinstance(self.body, dict) and bool(_said(self.body)) and self.body.get("success") is not True

    def has(self, words: tuple[str, ...]) -> bool:
        lower = self.says.casefold()
        return any(word in lower for word in words)


def _odd(says: str) -> _Failed:
    return _Failed(says, "failed")


def _read(call: Callable[[], _T]) -> _T:
    """What a call of the SDK gives, or _Failed for all that it may raise."""
    import requests

    errors = requests.exceptions
    try:
        found = call()
    except _Failed:
        raise
    except errors.HTTPError as error:
        raise _refusal(error.response) from None
    except (errors.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:   # the SDK reads answers without a look at them
        raise _odd(f"its answer makes no sense ({type(error).__name__}); something on the way may have answered in its place") from None
    except (errors.InvalidURL, errors.MissingSchema, errors.InvalidSchema, errors.InvalidHeader) as error:
        raise _Failed(f"the request can't be made ({type(error).__name__}); check $VAST_URL and the proxy variables", not_sent=True) from None
    except errors.RequestException as error:
        raise _no_answer(error) from None
    if isinstance(found, dict) and found.get("success") is False:
        raise _Failed(_said(found) or "it says no, but not why", "failed", 200, found)
    return found


def _end_of(answer: Any, until: float) -> bytes:
    """The last MAX_LOG_BYTES of what comes in time."""
    end = b""
    for piece in answer.iter_content(MAX_LOG_BYTES):
        end = (end + piece)[-MAX_LOG_BYTES:]
        if time.monotonic() > until:
            break
    return end


def _object(response: Any) -> dict[str, Any]:
    response.raise_for_status()
    return _dict(response.json())


def _dict(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise _odd("its answer is no JSON object")
    return body


def _refusal(response: Any) -> _Failed:
    status = response.status_code
    try:
        body = response.json()
    except ValueError:   # also requests' own
        body = None
    raw = response.text[:2000].strip() if body is None else ""
    others = body is None and (not raw or raw[0] in "<{")   # of something on the way there, or half of an answer
    says = _said(body) or ("" if others else text(raw)) or "no word about why"
    code = body.get("error") if isinstance(body, dict) else None
    kind = ("slow down" if status == 429 and code != "search_quota_exceeded" else
            "failed" if status >= 500 or status == 408 or others and status not in (401, 402, 403, 410) else "")
    after = number(response.headers.get("Retry-After")) or (number(body.get("retry_after")) if isinstance(body, dict) else None) or 0.0
    return _Failed(f"HTTP {status}, {says}", kind, status, body, max(0.0, after))


def _no_answer(error: Exception) -> _Failed:
    """In plain words: an exception of requests names classes, addresses and the whole URL."""
    import socket

    import requests

    names = {type(one).__name__ for one in _causes(error)}
    if any(isinstance(one, socket.gaierror) for one in _causes(error)) or "NameResolutionError" in names:
        return _Failed("its name isn't found: no network, or DNS doesn't answer", "failed", not_sent=True)
    if isinstance(error, requests.exceptions.ConnectTimeout):
        return _Failed("it can't be reached: no connection in time", "failed", not_sent=True)
    if "SSLCertVerificationError" in names:
        return _Failed("its TLS certificate isn't trusted. Behind a proxy that looks into TLS the SDK can't work: it ignores REQUESTS_CA_BUNDLE",
                       not_sent=True)
    if names & {"ConnectionRefusedError", "NewConnectionError"}:
        return _Failed("it can't be reached: the connection is refused, or there is no way to it", "failed", not_sent=True)
    if isinstance(error, requests.exceptions.Timeout) or "ReadTimeoutError" in names:
        return _Failed(f"no answer within {TIMEOUT_S:.0f} s", "failed")
    if isinstance(error, requests.exceptions.ProxyError):
        return _Failed("the proxy of $HTTPS_PROXY or $HTTP_PROXY doesn't get there", "failed",
                       not_sent=any("Tunnel connection failed" in str(one) for one in _causes(error)))
    return _Failed(f"the connection broke ({type(error).__name__})", "failed")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What an exception of requests wraps, which is in its arguments and in `reason`, not only in its cause."""
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [getattr(one, "reason", None), one.__cause__, one.__context__, *one.args]


def _said(body: Any) -> str:
    """Code and text of an answer, in whichever of its places: `insufficient_credit: add funds`."""
    if isinstance(body, str):
        return text(body)
    if not isinstance(body, dict):
        return ""
    parts = [text(body.get(key), 400) for key in ("error", "msg", "message", "detail")]
    return ": ".join(dict.fromkeys(part for part in parts if part))


def _contract(body: Any) -> str:
    return id_text(body.get("new_contract")) if isinstance(body, dict) else ""


def _number_of(machine: str) -> int:
    found = whole(machine)
    if not found:
        raise ProviderError(f"{text(str(machine))!r} is no id of a machine at Vast.ai, which is a number")
    return found


def _keys(body: Any, depth: int = 3) -> list[str]:
    """The account's SSH keys out of any of the shapes that were seen."""
    if isinstance(body, str) and body.lstrip()[:1] in ("[", "{") and depth:
        import json

        try:
            return _keys(json.loads(body), depth - 1)
        except ValueError:
            raise _odd("its list of SSH keys makes no sense") from None
    if isinstance(body, dict):
        inner = next((body[name] for name in ("ssh_keys", "keys", "results") if name in body), None)
        if inner is None or not depth:
            raise _odd("its answer has no list of SSH keys")
        return _keys(inner, depth - 1)
    found = []
    for one in body if isinstance(body, list) else ():
        if isinstance(one, dict) and not one.get("deleted_at"):
            one = next((one[name] for name in ("public_key", "ssh_key", "key") if isinstance(one.get(name), str)), "")
        if isinstance(one, str):
            found.append(one)
    return found


# ---- the key and the SDK ------------------------------------------------------------------------------------------------------

def _find_key() -> tuple[str, str]:
    """The key and where it is from: the SDK's own places, in its order, but stripped."""
    xdg = os.environ.get("XDG_CONFIG_HOME") or ""
    base = xdg if os.path.isabs(xdg) else os.path.expanduser("~/.config")
    files = (os.path.join(base, "vastai", "vast_api_key"), os.path.expanduser("~/.vast_api_key"))
    key, source = (os.environ.get("VAST_API_KEY") or "").strip(), "$VAST_API_KEY"
    for path in files:
        if key:
            break
        try:
            with open(path, encoding="utf-8") as file:
                key, source = file.read(4096).strip(), path
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"The key of Vast.ai in {path} can't be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    if not key:
        raise ConfigError(f"There is no key for Vast.ai: set $VAST_API_KEY, or put it into {files[0]} (where `vastai set api-key` has it) "
                          f"or {files[1]}. Keys are made at {KEYS_PAGE}")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"What is in {source} isn't a key of Vast.ai: it has blanks or characters that no key has")
    return key, source


def _sdk() -> Any:
    import logging

    try:
        import vastai
    except ImportError as error:
        raise ConfigError(f"kind \"vastai\" needs Vast.ai's SDK: pip install 'gpurun[vastai]' ({error})") from None
    log = logging.getLogger("vastai")   # on import it got a handler that writes to stderr
    log.handlers[:] = [logging.NullHandler()]
    return vastai


# ---- rows ----------------------------------------------------------------------------------------------------------------------

def parse_row(row: dict[str, Any]) -> Row:
    """Whatever is in it. Only an id and a label count; without an id, `id` is ""."""
    def word(key: str) -> str:
        return text(row.get(key)).casefold()

    price = number(row.get("dph_total"))
    return Row(
        id_text(row.get("id")), text(row.get("label"), 1024), id_text(row.get("machine_id")), word("actual_status"), word("intended_status"),
        word("cur_state"), word("next_state"), text(row.get("status_msg"), 4000), text(row.get("public_ipaddr")), text(row.get("ssh_host")),
        _port(row.get("ssh_port")), _ports(row.get("ports")), number(row.get("dph_base")) if price is None else price, row.get("is_bid") is True,
        number(row.get("start_date")), number(row.get("end_date")), text(row.get("gpu_name")), whole(row.get("num_gpus")) or 0,
        text(row.get("geolocation")), text(row.get("image_uuid")))


def _port(value: Any) -> int:
    found = whole(value) or 0
    return found if found <= 65535 else 0


def _ports(value: Any) -> dict[str, int]:
    """Docker's shape, {"22/tcp": [{"HostPort": "41234"}]}, and simpler ones."""
    found = {}
    for key, hosts in value.items() if isinstance(value, dict) else ():
        for host in hosts if isinstance(hosts, list) else [hosts]:
            port = _port(host.get("HostPort") if isinstance(host, dict) else host)
            if port and isinstance(key, str):
                found.setdefault(key.casefold() if "/" in key else f"{key}/tcp", port)
    return found


# ---- what a row means ----------------------------------------------------------------------------------------------------------

class Stage(NamedTuple):
    """`state`: "coming", "up", "broken", or "doubtful" (it had been up: give it a minute or two). `why` is for a user.

    `fault` of a broken one: "host" (another machine will do), "image" (none will), "disk" (more of it will), "outbid", "stopped" (by
    somebody, or at the end of its time).
    """

    state: str
    why: str
    fault: str = ""


# What of a row's status_msg means that it will never come up, in this order: the last ones are in the text of the others too.
_BAD_TEXTS = (
    ("disk", ("no space left on device",)),
    ("host", ("toomanyrequests", "too many requests", "oci runtime", "unexpected eof", "device injection", "cdi device")),
    ("image", ("manifest unknown", "pull access denied", "unauthorized", "repository does not exist", "invalid reference format",
               ": not found")),
    ("host", ("failed to resolve reference", "failed to pull image", "error response from daemon")),
)
_BLAME = {"disk": "its disk is full: the image and the data need a larger disk_gb", "host": "its host can't start the image",
          "image": "the image can't be had: check its name and tag, and that it is public"}
_WAITING = {"": "it is being set up", "created": "its container is made, not started yet", "loading": "it loads the image",
            "rebooting": "it reboots", "restarting": "it restarts", "recycling": "its container is made anew"}
_OVER = {   # actual_status: the fault while it comes up, the fault after it has been up, what to read
    "stopped": ("stopped", "stopped", "it was stopped"), "frozen": ("stopped", "stopped", "it was frozen"),
    "exited": ("host", "stopped", "its container has ended"), "destroyed": ("stopped", "stopped", "it was destroyed"),
    "error": ("host", "host", "its host reports an error"), "offline": ("host", "host", "its host is offline"),
    "unknown": ("host", "host", "its host hasn't been heard of for a while"),
}


def stage(row: Row, started: bool) -> Stage:
    """`started`: it had been up before."""
    actual = row.actual_status
    message = text(row.status_msg, 160)
    tail = f": {message}" if message else ""
    if row.next_state == "unloaded" or (row.cur_state == "unloaded" and row.intended_status == "stopped"):
        return Stage("broken", "it is being destroyed", "stopped")
    if started and actual in ("unknown", "offline"):
        return Stage("doubtful", f"{_OVER[actual][2]}{tail}")
    if actual != "running":
        lower = row.status_msg.casefold()
        for fault, words in _BAD_TEXTS:
            if any(word in lower for word in words):
                return Stage("broken", f"{_BLAME[fault]}{tail}", fault)
    if actual == "stopped" and row.intended_status == "running":
        return Stage("broken", "it was outbid, or the account's credit is used up" if row.is_bid else
                     "it was stopped though it is to run: the account's credit is used up, or its host took it back", "outbid")
    if "scheduling" in (actual, row.cur_state, row.next_state):
        return Stage("broken", "its GPU isn't free, it waits in a queue", "outbid" if row.is_bid else "host")
    if actual in _OVER:
        before, after, why = _OVER[actual]
        return Stage("broken", f"{why}{tail}", after if started else before)
    if "stopped" in (row.intended_status, row.next_state):
        return Stage("doubtful", "it is being stopped") if started else Stage("broken", f"it is being stopped before it was up{tail}", "stopped")
    if actual == "running":
        return Stage("up", "it runs")
    return Stage("doubtful" if started else "coming", f"{_WAITING.get(actual, f'Vast.ai calls it {actual!r}')}{tail}")
