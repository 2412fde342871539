"""The link between operator and node: iroh behind plain blocking calls. The only file that imports iroh.

iroh's Python binding is asyncio only (1.2.0), so one event loop lives in a daemon thread and everybody else calls functions that
block, each with a bound of its own. A connection has one ALPN; a stream is bidirectional, and who opens it writes first (the peer
doesn't see it before). A `Stream` offers read, write, finish, abort: what `wire.py` and `transfer.py` need, so that another carrier
of the same streams can stand in for iroh.

Measured on iroh 1.2.0, and handled here: `str(IrohError)` is empty; a failed handshake raises out of accept/connect and would end an
accept loop; `connect` to a wrong id never returns; generated code copies every written byte in a Python loop (4 MB/s).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import socket
import threading
import traceback
import weakref
from concurrent.futures import CancelledError, Future, TimeoutError as FutureTimeoutError
from typing import Any, Callable, Coroutine, Dict, List, Optional, Sequence, Tuple

import iroh
from iroh import iroh_ffi

from gpurun.errors import LinkError, LinkTimeoutError, RefusedError
from gpurun.files import TEMP_PREFIX, atomic_write
from gpurun.lanes import HEAD, MOST, NEAR, READ_BYTES, Bundle, Growth, Known, SocketLane
from gpurun.wire import TRANSFER_ALPN

LANED = {TRANSFER_ALPN}       # bulk: a stream may get several connections
BUNDLE_ID = 16                # bytes
LANES_AT_ONCE = 2 * MOST      # of one stream, from a peer
GATHER_S = 0.5                # what has come is handed over at least this often: on a slow link that is the sign of life
WRITES_IN_FLIGHT = 2          # so that reading a file and sending the block before it overlap
HANDSHAKE_S = 15.0            # on the accepting side: a peer that doesn't finish its handshake is let go
HANDSHAKES_AT_ONCE = 128      # more are refused at once: they cost memory before we know who it is
ACCEPT_PAUSE_S = 0.01
SECOND_LEAST_S = 0.05         # of two connections that are made at once the second one is tried again so long after the first one is up
CLOSE_S = 0.02                # for the goodbye to leave: to wait for its acknowledgement would cost a round trip at every command's end
STREAMS_AT_ONCE = 256         # handler threads over all connections; one more stream is reset
DIED = "endpoint stopping"     # what iroh says of an endpoint that has ended by itself
REVIVE_S = 0.25               # between two tries to have its ports again
CLOSE_NOT_AUTHORIZED = 403
CLOSE_BYE = 0


def _use_fast_writes() -> bool:
    """Replaces the byte-by-byte copy of the generated code by a memmove (n0-computer/iroh-ffi#229); False where it can't."""
    builder = getattr(iroh_ffi, "_UniffiRustBufferBuilder", None)
    buffer = getattr(iroh_ffi, "_UniffiRustBuffer", None)
    if builder is None or buffer is None or not hasattr(builder, "_reserve") or not hasattr(builder, "write"):
        return False
    if [name for name, _ in getattr(buffer, "_fields_", ())] != ["capacity", "len", "data"]:
        return False

    def write(self: Any, value: Any) -> None:
        size = len(value)
        with self._reserve(size):
            if size:
                address = ctypes.cast(self.rbuf.data, ctypes.c_void_p).value or 0
                ctypes.memmove(address + self.rbuf.len, bytes(value), size)

    builder.write = write
    return True


FAST_WRITES = _use_fast_writes()


def load_key(path: str) -> bytes:
    """The 32 secret bytes of the Ed25519 key at `path`; made there (0600) if there is none.

    Raises LinkError when the file is not a key or may be read by others. Processes that make one at the same time get the same.
    """
    for made in (False, True):
        try:
            with open(path, "rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                key = stream.read(128)
            break
        except FileNotFoundError:
            if made:
                raise LinkError(f"gpurun's key {path} is a link to a file that isn't there: remove the link, gpurun then makes a key") from None
            _make_key(path)
        except OSError as error:
            raise LinkError(f"can't read gpurun's key {path}: {error.strerror}") from None
    if mode & 0o077 and os.name == "posix":
        raise LinkError(f"gpurun's key {path} may be read by others (mode {mode & 0o777:04o}): run 'chmod 600 {path}'")
    try:
        text = key.decode("ascii").strip()
        if not re.fullmatch("[0-9a-fA-F]{64}", text):
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        raise LinkError(f"{path} is not a gpurun key (64 hexadecimal digits): move it away, gpurun then makes a new one") from None


def _make_key(path: str) -> None:
    """Puts a new key at `path` unless another process is quicker: a key that somebody has read already is never replaced."""
    temp = os.path.join(os.path.dirname(path), TEMP_PREFIX + os.urandom(8).hex())
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        atomic_write(temp, os.urandom(32).hex().encode() + b"\n", 0o600)
        try:
            os.link(temp, path)
            os.unlink(temp)
        except FileExistsError:
            os.unlink(temp)
        except OSError:
            os.replace(temp, path)                    # a file system without hard links: the last one in place counts
    except OSError as error:
        raise LinkError(f"gpurun's key {path} can't be made: {error.strerror}") from None


def public_id(key: bytes) -> str:
    """The endpoint id, 64 hexadecimal digits, that belongs to a secret key."""
    return str(iroh.SecretKey.from_bytes(key).public())


def _explain(error: BaseException) -> str:
    if isinstance(error, iroh.IrohError):
        if "TimedOut" in error.message():                       # Rust's own words for it say no more
            return "no packet came through for too long"
        return f"{error.kind().name.lower()}: {error.message()}"
    return f"{type(error).__name__}: {error}"


class _Loop:
    """The one event loop of this process, in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="link", daemon=True).start()

    def start(self, work: Coroutine) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine, timeout_s: float, what: str) -> Any:
        """Runs `work` to its end and returns its value; LinkTimeoutError after `timeout_s`, LinkError where iroh refuses."""
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except (FutureTimeoutError, asyncio.TimeoutError):
            future.cancel()
            raise LinkTimeoutError(f"{what}: no answer within {timeout_s:g} s") from None
        except iroh.IrohError as error:
            raise LinkError(f"{what}: {_explain(error)}") from None


_loop: Optional[_Loop] = None
_loop_lock = threading.Lock()


def _running_loop() -> _Loop:
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = _Loop()
        return _loop


class Stream:
    """One bidirectional stream. Not for two readers or two writers at once; a reader and a writer may be two threads."""

    def __init__(self, connection: "Connection", bi: Any) -> None:
        self.connection = connection
        self._loop = connection._loop
        self._send, self._recv = bi.send(), bi.recv()
        self._reading: Optional["Future[bytes]"] = None
        self._writing: List["Future[None]"] = []

    def rate(self) -> Optional[float]:
        """Bytes a second that the link has lately taken of what was written here; None while that isn't known."""
        return self._send.rate() if isinstance(self._send, Bundle) else None

    def read(self, timeout_s: float, least: int = 1) -> bytes:
        """What has arrived, at least `least` bytes of it as long as they keep coming; b"" at the end of the stream. LinkTimeoutError loses
        nothing: read again."""
        future = self._reading or self._loop.start(self._gather(least))
        self._reading = future
        data = self._outcome(future, timeout_s, f"nothing from {self.connection.name}")
        self._reading = None
        return data

    def _outcome(self, future: "Future[Any]", timeout_s: float, silence: str) -> Any:
        """The value of a read or write; it stays under way when the wait runs out."""
        try:
            return future.result(timeout_s)
        except (FutureTimeoutError, asyncio.TimeoutError):
            raise LinkTimeoutError(f"{silence} for {timeout_s:g} s") from None
        except CancelledError:
            raise LinkError(f"the stream to {self.connection.name} was given up") from None
        except iroh.IrohError as error:
            raise self.connection.broken(error) from None

    async def _gather(self, least: int) -> bytes:
        """Pieces of some 100 KB put together in here: handing each to another thread would cost more than decrypting it."""
        parts = [await self._recv.read(READ_BYTES)]
        size, until = len(parts[0]), self._loop.loop.time() + GATHER_S
        while size < least and parts[-1] and self._loop.loop.time() < until:
            parts.append(await self._recv.read(READ_BYTES))
            size += len(parts[-1])
        return b"".join(parts) if len(parts) > 1 else parts[0]

    def write(self, data: bytes, timeout_s: float) -> None:
        """Hands `data` over and waits while two writes are under way; an error of an earlier write is raised here or in `finish`."""
        while len(self._writing) >= WRITES_IN_FLIGHT:
            self._await_write(timeout_s)
        self._writing.append(self._loop.start(self._send.write_all(data)))

    def _await_write(self, timeout_s: float) -> None:
        self._outcome(self._writing[0], timeout_s, f"{self.connection.name} took nothing")
        del self._writing[0]

    def flush(self, timeout_s: float) -> None:
        while self._writing:
            self._await_write(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """No more will be written. The peer's acknowledgement, not this call, says that it has arrived."""
        self.flush(timeout_s)
        self._loop.call(self._send.finish(), timeout_s, f"ending a stream to {self.connection.name}")

    def stop_reading(self) -> None:
        """Nothing more will be read: a peer that still writes is told so at once. What was written to it still arrives."""
        self._give_up([self._reading], [self._recv.stop])

    def abort(self) -> None:
        """Gives the stream up, both ways, without waiting."""
        self._give_up(self._writing + [self._reading], [self._send.reset, self._recv.stop])

    def _give_up(self, pending: "List[Optional[Future[Any]]]", steps: Sequence[Callable[[int], Any]]) -> None:
        async def end() -> None:
            for step in steps:
                try:
                    await step(1)
                except (iroh.IrohError, LinkError):
                    pass                                        # already over: that is what was wanted
        for future in pending:
            if future is not None:
                future.cancel()
        self._loop.start(end())


class _Lane:
    """A bidirectional stream of iroh's, as lanes.py wants it."""

    def __init__(self, bi: Any) -> None:
        send, recv = bi.send(), bi.recv()
        self.write_all, self.finish, self.reset = send.write_all, send.finish, send.reset
        self.read, self.read_exact, self.stop = recv.read, recv.read_exact, recv.stop


async def _head(lane: Any) -> Optional[Tuple[bytes, int]]:
    """What a lane begins with: its stream's id and its number. None where it ended before."""
    head = b""
    while len(head) < HEAD.size:
        more = await asyncio.wait_for(lane.read(HEAD.size - len(head)), HANDSHAKE_S)
        if not more:
            return None
        head += more
    bundle_id, number = HEAD.unpack(head)
    return bundle_id, number


class Connection:
    """A connection to one peer for one ALPN."""

    def __init__(self, loop: _Loop, connection: Any, alpn: bytes, name: str = "",
                 again: Optional[Callable[[], Coroutine]] = None, most: int = 1, known: Optional[Known] = None) -> None:
        """`again` makes one more to the same peer; a stream may get up to `most` of them, as many as are worth it."""
        self._loop = loop
        self._again, self._most, self._known = again, most, known
        self._connection = connection
        self.alpn = alpn
        self.peer_id = str(connection.remote_id())
        self.name = name or self.peer_id[:10]
        self.was_closed = False               # by the peer, with its word for it; one that is lost says nothing
        self.most_lanes = 1                   # that a stream of it has had at once
        self._opened: "weakref.WeakSet[Bundle]" = weakref.WeakSet()
        self.near: Optional[Callable[[], socket.socket]] = None   # on one machine, a socket that leads there too, for one more lane

    def open(self, timeout_s: float = 10.0) -> Stream:
        async def open_bi() -> Any:
            try:
                bi = await self._connection.open_bi()
            except iroh.IrohError as error:
                raise self.broken(error) from None
            return self._bundle(bi) if self.alpn in LANED else bi

        return Stream(self, self._loop.call(open_bi(), timeout_s, f"opening a stream to {self.name}"))

    def _bundle(self, bi: Any) -> Bundle:
        """The first lane of a stream that this side opens, and how it gets more."""
        bundle_id = os.urandom(BUNDLE_ID)

        async def dial(number: int) -> Tuple[Any, Callable[[], None], bytes]:
            assert self._again is not None
            raw = await asyncio.wait_for(self._again(), HANDSHAKE_S)
            self.most_lanes = max(self.most_lanes, bundle.lanes + 1)
            return _Lane(await raw.open_bi()), lambda: raw.close(CLOSE_BYE, b""), HEAD.pack(bundle_id, number)

        async def dial_near(number: int) -> Tuple[Any, Callable[[], None], bytes]:
            assert self.near is not None
            lane = SocketLane(await self._loop.loop.run_in_executor(None, self.near))
            self.most_lanes = max(self.most_lanes, bundle.lanes + 1)
            return lane, lane.close, HEAD.pack(bundle_id, number)

        growth = None
        if self._again is not None and self._most > 1 and self._known is not None:
            growth, quiet_s = Growth(self._most, self._known), self.rtt_s()
            if quiet_s is not None:           # while all is quiet, in whole milliseconds: 0 is a near network's
                self._known.rtt_s = min(self._known.rtt_s, quiet_s)
        bundle = Bundle(self.broken, self.usual_rtt_s, dial, growth, dial_near if self.near is not None else None)
        bundle.add(0, _Lane(bi), head=HEAD.pack(bundle_id, 0))
        self._opened.add(bundle)
        return bundle

    def usual_rtt_s(self) -> float:
        return self.rtt_s() or 0.0

    def broken(self, error: BaseException) -> LinkError:
        """The LinkError for a failed read or write: with the peer's own word where it closed the connection."""
        explained = _explain(error)
        # Either may come first, and only in Rust's debug form does it have the peer's code.
        code = re.search(r"error_code: (\d+), reason: b\"((?:[^\"\\]|\\.)*)\"", f"{self._connection.close_reason()} {explained}")
        self.was_closed = bool(code)
        if code and int(code.group(1)) == CLOSE_NOT_AUTHORIZED:
            return RefusedError(f"{self.name} refused this operator: {code.group(2)}")
        if code:
            return LinkError(f"{self.name} closed the connection ({code.group(2) or 'no reason given'})")
        return LinkError(f"the connection to {self.name} broke: {explained}")

    def path(self) -> str:
        """"direct" or "relay": the path that is in use now."""
        paths = self._connection.paths()
        used = [path for path in paths if path.is_selected] or paths
        return "relay" if used and used[0].is_relay else "direct"

    def rtt_s(self) -> Optional[float]:
        try:
            rtt_ms = self._connection.rtt()
        except iroh.IrohError:                                  # it is just ending
            return None
        return None if rtt_ms is None else rtt_ms / 1000

    def close(self, code: int = CLOSE_BYE, reason: str = "") -> None:
        """And with it every stream that was opened here, whatever other lanes it has."""
        async def end() -> None:
            for bundle in list(self._opened):
                await bundle.reset(1)

        self._connection.close(code, reason.encode())
        self._loop.start(end())


class Link:
    """This process's endpoint: dials nodes, or serves operators."""

    def __init__(self, key: bytes, bind: str = "0.0.0.0:0", alpns: Sequence[bytes] = (), relay: Any = "disabled",
                 timeout_s: float = 10.0, most_connections: int = MOST, port6: int = 0) -> None:
        """Binds UDP `bind`, and IPv6's `port6` if it is free. `relay`: "disabled", "n0", or relay URLs. `most_connections`: that one transfer may get where more make it faster.
        Raises LinkError when the port is taken."""
        self._loop = _running_loop()
        self._built_of, self._closed = (key, alpns, relay), False
        self._reviving: "Optional[asyncio.Task[None]]" = None
        here_only = bind.startswith("127.")
        wanted = [[bind, f"{'[::1]' if here_only else '[::]'}:{port6}"]] if port6 else []
        wanted += [[bind, "[::1]:0"]] if here_only else []
        for sockets in wanted + [[bind]]:     # the last one for a machine without IPv6
            try:
                self._endpoint = self._loop.call(self._builder(sockets).bind(), timeout_s, f"binding UDP {bind}")
                break
            except LinkError:
                if sockets == [bind]:
                    raise
        self.id = str(self._endpoint.id())
        self._streams = threading.BoundedSemaphore(STREAMS_AT_ONCE)
        self._most = most_connections
        self._known: Dict[str, Known] = {}
        self._bundles: Dict[Tuple[str, bytes], Bundle] = {}     # those that peers opened, by peer and id
        self._serving: "set[asyncio.Task]" = set()

    def _builder(self, sockets: Sequence[str]) -> Any:
        """Of an endpoint on these sockets; a kind of IP that isn't among them gets one on every address."""
        key, alpns, relay = self._built_of
        builder = iroh.EndpointBuilder()
        if relay == "n0":
            builder.apply_n0()
            builder.relay_mode(iroh.RelayMode.default_mode())
        else:
            builder.apply_minimal()
            builder.relay_mode(iroh.RelayMode.disabled() if relay == "disabled" else iroh.RelayMode.custom_from_urls(list(relay)))
        builder.secret_key(key)
        builder.alpns(list(alpns))
        try:
            for bound in sockets:
                builder.bind_addr(bound)
        except iroh.IrohError as error:
            raise LinkError(f"binding UDP {sockets[0]}: {_explain(error)}") from None
        return builder

    async def _revive(self, dead: Any) -> None:
        """Another endpoint in the place of one that has ended by itself: where this machine's networks change iroh binds its sockets again, and tries
        that only once (n0-computer/iroh#4289)."""
        if self._endpoint is dead and self._reviving is None:
            self._reviving = asyncio.ensure_future(self._bind_again(dead))
        if self._reviving is not None:
            await asyncio.shield(self._reviving)

    async def _bind_again(self, dead: Any) -> None:
        try:
            sockets = list(dead.bound_sockets())
            try:
                await asyncio.wait_for(dead.close(), HANDSHAKE_S)   # its other sockets
            except (iroh.IrohError, asyncio.TimeoutError):
                pass
            while not self._closed:
                try:
                    self._endpoint = await self._builder(sockets).bind()
                    return
                except (iroh.IrohError, LinkError):                 # a process that was just started may have them open still
                    await asyncio.sleep(REVIVE_S)
        finally:
            self._reviving = None

    def addresses(self) -> List[str]:
        """The addresses, "ip:port", that this endpoint knows of itself."""
        return list(self._endpoint.addr().direct_addresses())

    def relay_url(self) -> Optional[str]:
        return self._endpoint.addr().relay_url()

    def port(self) -> int:
        """The UDP port of the IPv4 socket, which a provider's mapping or the SSH host's address goes with."""
        return next(int(bound.rpartition(":")[2]) for bound in self._endpoint.bound_sockets() if not bound.startswith("["))

    def port6(self) -> int:
        """That of the IPv6 socket, 0 for none."""
        return next((int(bound.rpartition(":")[2]) for bound in self._endpoint.bound_sockets() if bound.startswith("[")), 0)

    def dial(self, peer_id: str, addresses: Sequence[str], alpn: bytes, timeout_s: float, name: str = "",
             relay_url: Optional[str] = None) -> Connection:
        """Tries all addresses at once. LinkTimeoutError when nothing answers, LinkError when the peer doesn't speak `alpn`."""
        return self.dial_all(peer_id, addresses, [alpn], timeout_s, name, relay_url)[0]

    def dial_all(self, peer_id: str, addresses: Sequence[str], alpns: Sequence[bytes], timeout_s: float, name: str = "",
                 relay_url: Optional[str] = None) -> List[Connection]:
        """One connection for each ALPN, all handshakes at the same time: one round trip for all of them."""
        name = name or peer_id[:10]
        try:
            address = iroh.EndpointAddr(iroh.EndpointId.from_string(peer_id), relay_url, list(addresses))
        except iroh.IrohError as error:
            raise LinkError(f"the address of {name} can't be used: {_explain(error)}") from None

        def begin(alpn: bytes) -> "asyncio.Future[Any]":
            return asyncio.ensure_future(self._endpoint.connect(address, alpn))

        async def connect() -> List[Any]:
            tries, began = {alpn: [begin(alpn)] for alpn in alpns}, self._loop.loop.time()
            found: List[Any] = []
            try:
                await asyncio.wait([one for one, in tries.values()], return_when=asyncio.FIRST_COMPLETED)
                took_s = self._loop.loop.time() - began
                await asyncio.wait([one for one, in tries.values()], timeout=max(SECOND_LEAST_S, took_s))
                for alpn, begun in tries.items():
                    if not begun[0].done():                     # once in a hundred times its first packet never leaves, and the next one does after 1 s
                        begun.append(begin(alpn))
                for begun in tries.values():
                    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
                    found.append(next(one for one in begun if one.done()).result())
                return found
            finally:                                            # one without the other is of no use
                rest = [one for begun in tries.values() for one in begun]
                for one in rest:
                    one.cancel()
                for made in await asyncio.gather(*rest, return_exceptions=True):
                    if not isinstance(made, BaseException) and (len(found) < len(tries) or made not in found):
                        made.close(CLOSE_BYE, b"")

        async def connect_anew() -> List[Any]:
            endpoint = self._endpoint
            try:
                return await connect()
            except iroh.IrohError as error:
                if DIED not in error.message():
                    raise
            await self._revive(endpoint)
            return await connect()

        tried = ", ".join(addresses) or relay_url or "no address"
        connections = self._loop.call(connect_anew(), timeout_s, f"connecting to {name} over UDP ({tried})")
        known = self._known.setdefault(peer_id, Known())
        if addresses and all(one.startswith(("127.", "[::1]:")) for one in addresses):
            known.rtt_s = 0.0                                   # this machine: however busy it is, more lanes help nobody
        return [Connection(self._loop, connection, alpn, name, lambda alpn=alpn: self._endpoint.connect(address, alpn), self._most, known)
                for connection, alpn in zip(connections, alpns)]

    def serve(self, authorized: Callable[[str], bool], handle: Callable[[Stream], None]) -> None:
        """Accepts connections from now on; `handle(stream)` runs in a thread of its own for every stream that a peer opens.

        A peer whose id `authorized` doesn't know is closed before anything is read. No peer can stop the loop: each handshake is
        a task of its own, bounded in time and number.
        """
        self._loop.start(self._accept(authorized, handle))

    async def _accept(self, authorized: Callable[[str], bool], handle: Callable[[Stream], None]) -> None:
        tasks: "set[asyncio.Task]" = set()
        while True:
            endpoint = self._endpoint
            try:
                incoming = await endpoint.accept_next()
                if incoming is None and self._closed:
                    return
                if incoming is None:
                    await self._revive(endpoint)
                    continue
                if len(tasks) >= HANDSHAKES_AT_ONCE:
                    await incoming.refuse()
                    continue
            except Exception:                                   # that peer's fault, not the endpoint's
                if self._closed:
                    return
                await asyncio.sleep(ACCEPT_PAUSE_S)             # were it ours after all, the loop must not eat a core
                continue
            task = asyncio.ensure_future(self._admit(incoming, authorized, handle))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _admit(self, incoming: Any, authorized: Callable[[str], bool], handle: Callable[[Stream], None]) -> None:
        async def handshake() -> Tuple[bytes, Any]:
            accepting = await incoming.accept()
            return await accepting.alpn(), await accepting.connect()

        try:
            alpn, raw = await asyncio.wait_for(handshake(), HANDSHAKE_S)
        except (iroh.IrohError, asyncio.TimeoutError):
            return                                              # a wrong ALPN or a stranger: nothing of ours is touched
        try:
            admitted = authorized(str(raw.remote_id()))
        except Exception:                                       # whoever can't be looked up isn't let in
            traceback.print_exc()
            admitted = False
        if not admitted:
            raw.close(CLOSE_NOT_AUTHORIZED, b"this key is not in the agent's list of operators")
            return
        serving = asyncio.ensure_future(self._streams_of(Connection(self._loop, raw, alpn), handle))
        self._serving.add(serving)                              # the loop itself holds tasks only weakly
        serving.add_done_callback(self._serving.discard)

    async def _streams_of(self, connection: Connection, handle: Callable[[Stream], None]) -> None:
        while True:
            try:
                bi = await connection._connection.accept_bi()
            except iroh.IrohError:
                return                                          # the peer is gone; its streams notice by themselves
            if connection.alpn in LANED:
                joining = asyncio.ensure_future(self._join(connection, bi, handle))
                self._serving.add(joining)
                joining.add_done_callback(self._serving.discard)
            else:
                self._begin(Stream(connection, bi), handle)

    async def _join(self, connection: Connection, bi: Any, handle: Callable[[Stream], None]) -> None:
        """A lane that a peer opened: the first one of a stream, or one more."""
        lane = _Lane(bi)
        try:
            head = await _head(lane)
            if head is None:
                return
            bundle_id, number = head
            known = self._bundles.get((connection.peer_id, bundle_id))
            if known is not None and number and known.lanes <= LANES_AT_ONCE:
                known.add(number, lane)
            elif known is not None or number:
                await lane.reset(1)                             # of a stream that has ended
            else:
                self._bundles[connection.peer_id, bundle_id] = bundle = Bundle(connection.broken, connection.usual_rtt_s)
                bundle.add(0, lane)
                self._begin(Stream(connection, bundle), handle)
                await bundle.over.wait()
                del self._bundles[connection.peer_id, bundle_id]
        except (iroh.IrohError, asyncio.TimeoutError):
            pass                                                # it has said nothing that counts

    def take_lane(self, peer_id: str, sock: socket.socket, first: bytes) -> None:
        """A lane of a stream of that peer's, over a socket that `first` has come over already. Who it is wasn't proven, but the stream's id is known
        to its two ends alone."""
        async def join() -> None:
            lane = SocketLane(sock, first)
            try:
                bundle_id, number = await _head(lane) or (b"", 0)
            except (OSError, asyncio.TimeoutError):
                bundle_id, number = b"", 0
            known = self._bundles.get((peer_id, bundle_id))
            if known is not None and number == NEAR:
                known.add(number, lane, lane.close)
            else:
                lane.close()
        self._loop.start(join())

    def _begin(self, stream: Stream, handle: Callable[[Stream], None]) -> None:
        if not self._streams.acquire(blocking=False):
            stream.abort()
            return
        try:
            threading.Thread(target=self._handled, args=(stream, handle), name="stream", daemon=True).start()
        except RuntimeError:                                    # no more threads on this machine
            self._streams.release()
            stream.abort()

    def _handled(self, stream: Stream, handle: Callable[[Stream], None]) -> None:
        try:
            handle(stream)
        except LinkError:
            stream.abort()                                      # that peer is gone
        except Exception:                                       # a bug of ours: this stream's end and nobody else's
            traceback.print_exc()
            stream.abort()
        finally:
            stream.stop_reading()                               # or the read under way would stay as long as the connection
            self._streams.release()

    def answers(self, timeout_s: float) -> bool:
        """Whether this process still gets to its packets."""
        try:
            self._loop.call(asyncio.sleep(0), timeout_s, "the link's own loop")
        except LinkError:
            return False
        return True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Ends the endpoint and its connections; what was written and not acknowledged may be lost. A peer that doesn't hear it notices by itself."""
        self._closed = True
        try:
            self._loop.call(self._endpoint.close(), timeout_s, "closing the link")
        except LinkError:
            pass                                                # the process ends anyway, and peers notice
