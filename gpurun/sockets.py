"""The link's streams over plain sockets: for a node that no UDP gets through to, or where iroh can't be loaded.

The agent listens on a unix socket that only its own user can open. An operator comes to it over SSH, which proves who both are, or, on
its own machine, straight. One connection to the socket is one stream: its first line says what is wanted, its answer is one line too,

    {"alpn": "gpurun/control/1", "operator": "<id>"}
    {"id": "<the agent's id>"}          or  {"refused": "<why>"}

and all else, both ways, is the stream's; or with LANE_ALPN it is one more lane of a stream that came over UDP. The opener need not wait for the answer. The end of one direction is `finish`, a close is both.
`Stream` and `Connection` do what those of link.py do; iroh is not needed here. The operator's id isn't proven by this line: who gets
here is the node's own user, who may do all that the agent may.
"""

from __future__ import annotations

import collections
import errno
import hashlib
import json
import os
import socket
import stat
import struct
import threading
import time
import traceback
import weakref
from typing import Any, Callable, Deque, Dict, Optional, Sequence, Tuple

from gpurun.errors import LinkError, LinkTimeoutError, RefusedError
from gpurun.files import atomic_write

LANE_ALPN = b"gpurun/lane/1"
READ_BYTES = 256 << 10
SEND_BYTES = 1 << 18
WRITES_IN_FLIGHT = 2          # so that reading a file and sending the block before it overlap
LINGER_S = 30.0               # a stream's sending thread stays for so long when there is nothing to send
GATHER_S = 0.5                # what has come is handed over at least this often
TICK_S = 0.25                 # a wait looks up so often: a socket's own timeout is one for its reader and its writer
HANDSHAKE_S = 15.0            # for a peer's first line
LINE_BYTES = 4096             # of it
STREAMS_AT_ONCE = 256         # handler threads, those that wait for a first line included
ACCEPT_PAUSE_S = 0.05
JOINED = b"GPURUN-JOINED\n"   # what `join` prints before the agent's bytes: login shells chatter
RATED_BYTES = 4 << 20         # before so much was sent, buffers on the way have taken most of it
LONGEST = 100                 # bytes of a path: a socket's address has room for 104 to 108 with its end


def own_id(key_path: str) -> str:
    """64 hexadecimal digits that tell an agent without iroh from others; made of its key file, which is made if there is none."""
    try:
        with open(key_path, "rb") as stream:
            key = stream.read(128)
    except FileNotFoundError:
        key = os.urandom(32).hex().encode() + b"\n"
        atomic_write(key_path, key)
    return hashlib.sha256(b"gpurun agent " + key.strip()).hexdigest()


def open_door(folder: str, agent_id: str, alpns: Sequence[bytes]) -> "Door":
    """The socket of the agent in `folder`: there, or where its path would be too long or the file system takes no sockets, in a private folder
    elsewhere. OSError where no place will do."""
    name = "gpurun-" + hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:16]
    places = [folder, os.path.join(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere", name), f"/tmp/{name}-{os.getuid()}"]
    problem: Optional[OSError] = None
    for place in places:
        path = os.path.join(place, "socket")
        if len(os.fsencode(path)) > LONGEST:
            continue
        try:
            if place != folder:
                _private(place)
            return Door(path, agent_id, alpns, place != folder)
        except OSError as error:
            problem = error
    assert problem is not None                # the last place is a short one
    raise problem


def _private(folder: str) -> None:
    """Makes a folder that nobody else can look into. OSError where it is there and somebody else's: /tmp is everybody's."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise OSError(errno.EPERM, f"it is there, and not a folder of user {os.getuid()} alone", folder) from None


def connect(path: str, timeout_s: float, ours: bool = False) -> socket.socket:
    """To a socket of this machine. OSError when nobody is there, or not a process of `ours`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        if ours and _user_of(sock) != os.getuid():
            raise OSError(errno.EPERM, "it is another user's", path)
        return sock
    except BaseException:
        sock.close()
        raise


def _user_of(sock: socket.socket) -> int:
    """Of the process that listens where this socket leads; -1 where the system doesn't say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


class Stream:
    """One bidirectional stream. Not for two readers or two writers at once; a reader and a writer may be two threads.

    `sock` has a socket's recv, send, shutdown, settimeout and close; those of an SSH channel will do.
    """

    def __init__(self, connection: "Connection", sock: Any, greets: bool = False) -> None:
        """`greets`: the other side's answer to our first line is still to come, before all else."""
        sock.settimeout(TICK_S)
        self.connection = connection
        self._sock = sock
        self._greets = greets
        self._read = b""                      # what a read that ran out of time had got
        self._moved = threading.Condition()
        self._writing: Deque[bytes] = collections.deque()   # the first one is being sent
        self._sends = False                   # there is a thread for that
        self._problem: Optional[BaseException] = None       # that it met
        self._ended = self._finished = self._given_up = False
        self._sent_bytes, self._sent_s = 0, 0.0

    def read(self, timeout_s: float, least: int = 1) -> bytes:
        """What has arrived, at least `least` bytes of it as long as they keep coming; b"" at the end of the stream. LinkTimeoutError loses
        nothing: read again."""
        deadline = time.monotonic() + timeout_s
        self.greeted(timeout_s)
        parts, until = [self._read], 0.0
        size = len(self._read)
        self._read = b""
        while not self._ended and size < least:
            data = self._receive(until if size else deadline, not size)
            if data is None:
                break
            until = until or time.monotonic() + GATHER_S
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def greeted(self, timeout_s: float) -> None:
        """Waits for the other side's answer to our first line, unless it was heard. RefusedError, or LinkError where another agent is there."""
        deadline = time.monotonic() + timeout_s
        while self._greets:
            line, newline, rest = self._read.partition(b"\n")
            if newline:
                self._greets, self._read = False, rest
                self.connection.judge(line)
            elif len(self._read) > LINE_BYTES or self._ended:
                raise LinkError(f"{self.connection.name}: what answers at its agent's socket isn't an agent, or was just ending")
            else:
                self._read += self._receive(deadline, True) or b""

    def _receive(self, deadline: float, must: bool) -> Optional[bytes]:
        """The next piece, b"" at the end. At the deadline LinkTimeoutError if something `must` come, else None."""
        began = time.monotonic()
        while True:
            self._check()
            try:
                data = self._sock.recv(READ_BYTES)
                self._ended = not data
                if not data and self._finished:
                    self._close()             # both ways are over
                return data
            except socket.timeout:
                if time.monotonic() >= deadline:
                    if not must:
                        return None
                    raise LinkTimeoutError(f"nothing from {self.connection.name} for {deadline - began:g} s") from None
            except (OSError, EOFError, ValueError) as error:
                raise self._broken(error) from None

    def write(self, data: bytes, timeout_s: float) -> None:
        """Hands `data` over and waits while two writes are under way; an error of an earlier write is raised here or in `finish`."""
        with self._moved:
            self._wait_for(lambda: len(self._writing) < WRITES_IN_FLIGHT, timeout_s)
            self._writing.append(data)
            if len(self._writing) == 1 and not self._sends:
                self._sends = True
                try:
                    threading.Thread(target=self._send, name="send", daemon=True).start()
                except RuntimeError:          # no more threads on this machine
                    self._sends = False
                    raise LinkError(f"{self.connection.name}: this machine has no more threads") from None
            self._moved.notify_all()

    def _wait_for(self, what: Callable[[], bool], timeout_s: float) -> None:
        """Under our lock."""
        if not self._moved.wait_for(lambda: what() or self._problem is not None or self._given_up, timeout_s):
            raise LinkTimeoutError(f"{self.connection.name} took nothing for {timeout_s:g} s")
        self._check()
        if self._problem is not None:
            raise self._broken(self._problem)

    def _send(self) -> None:
        """In a thread of its own while there is something to send: an SSH channel may hold whoever sends for as long as TCP does."""
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._writing or self._given_up or self._finished, LINGER_S)
                if self._given_up or not self._writing:
                    self._sends = False
                    return
                rest = memoryview(self._writing[0])
            began = time.monotonic()
            while rest and not self._given_up:
                try:
                    taken = self._sock.send(rest[:SEND_BYTES])
                    if not taken:
                        raise OSError("it was closed")
                except socket.timeout:
                    continue
                except (OSError, EOFError, ValueError) as error:
                    with self._moved:
                        self._problem, self._sends = error, False
                        self._moved.notify_all()
                    return
                rest = rest[taken:]
                self._sent_bytes += taken
            self._sent_s += time.monotonic() - began
            if self._sent_bytes > 2 * RATED_BYTES:   # of late: older times count half
                self._sent_bytes, self._sent_s = self._sent_bytes // 2, self._sent_s / 2
            with self._moved:
                self._writing.popleft()
                self._moved.notify_all()

    def flush(self, timeout_s: float) -> None:
        with self._moved:
            self._wait_for(lambda: not self._writing, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """No more will be written. The peer's acknowledgement, not this call, says that it has arrived."""
        with self._moved:
            self._wait_for(lambda: not self._writing, timeout_s)
            self._finished = True
            self._moved.notify_all()
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except (OSError, EOFError) as error:
            raise self._broken(error) from None
        if self._ended:
            self._close()

    def stop_reading(self) -> None:
        """Nothing more will be read: a peer that still writes is told so as soon as there is nothing more to write to it."""
        self._ended = True
        if self._finished:
            self._close()
            return
        try:
            self._sock.shutdown(socket.SHUT_RD)
        except (OSError, EOFError):
            pass                              # already over: that is what was wanted

    def abort(self) -> None:
        """Gives the stream up, both ways, without waiting."""
        self.give_up()
        self._close()

    def give_up(self) -> None:
        """Whoever waits in it hears of it; the socket stays as it is."""
        with self._moved:
            self._given_up = True
            self._moved.notify_all()

    def detach(self, timeout_s: float) -> Any:
        """The socket itself, once the other side has taken the stream; nothing was read or written so far. The stream is of no use any more."""
        self.flush(timeout_s)
        self.greeted(timeout_s)
        with self._moved:
            self._finished = True             # and the sending thread ends
            self._moved.notify_all()
        with self.connection._lock:
            self.connection._streams.discard(self)
        return self._sock

    def rate(self) -> Optional[float]:
        """Bytes per second that were lately taken while we wrote; None while too little was written to know."""
        return self._sent_bytes / self._sent_s if self._sent_bytes >= RATED_BYTES and self._sent_s > 0 else None

    def _check(self) -> None:
        if self._given_up:
            raise LinkError(f"the stream to {self.connection.name} was given up")

    def _broken(self, error: BaseException) -> LinkError:
        self._check()
        return LinkError(f"the connection to {self.connection.name} broke: {getattr(error, 'strerror', None) or error}")

    def _close(self) -> None:
        for step in (lambda: self._sock.shutdown(socket.SHUT_RDWR), self._sock.close):   # the first wakes whoever waits in it
            try:
                step()
            except (OSError, EOFError):
                pass


class Connection:
    """Streams to one agent's socket for one ALPN, opened one by one by `dial(timeout_s)`, which gives a socket and raises LinkError."""

    def __init__(self, alpn: bytes, operator_id: str, peer_id: str, name: str, way: str = "", dial: Optional[Callable[[float], Any]] = None,
                 closed: Callable[[], None] = lambda: None, check: bool = False) -> None:
        """`peer_id`: of the agent on the operator's side, of the operator on the agent's. `way`: what `path` says. `closed` is called once.
        `check`: the first stream waits for the agent's word."""
        self.alpn, self.peer_id, self.name = alpn, peer_id, name or peer_id[:10]
        self.was_closed = False               # nobody says a word when a socket ends
        self.most_lanes = 1
        self._operator_id, self._way, self._dial, self._closed, self._check = operator_id, way, dial, closed, check
        self._streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()
        self._lock = threading.Lock()
        self._over = False
        self._rtt_s: Optional[float] = None

    def open(self, timeout_s: float = 10.0) -> Stream:
        """A new stream. The agent's answer to it isn't waited for, but for the first with `check`: `Stream.greeted` does, or the first read."""
        assert self._dial is not None
        began = time.monotonic()
        sock = self._dial(timeout_s)
        took_s = time.monotonic() - began
        self._rtt_s = min(self._rtt_s or took_s, took_s)
        stream = Stream(self, sock, greets=True)
        with self._lock:
            self._streams.add(stream)
            over = self._over
        if over:
            stream.abort()
        first = {"alpn": self.alpn.decode("ascii"), "operator": self._operator_id}
        stream.write(json.dumps(first).encode("ascii") + b"\n", timeout_s)
        if self._check:
            stream.greeted(timeout_s)
            self._check = False
        return stream

    def judge(self, line: bytes) -> None:
        """The agent's answer to a stream's first line."""
        try:
            said = json.loads(line.decode("utf-8"))
            refused, found = said.get("refused"), said.get("id")
        except (ValueError, AttributeError):
            raise LinkError(f"{self.name}: what answers at its agent's socket isn't an agent") from None
        if refused is not None:
            raise RefusedError(f"{self.name} refused this operator: {refused}")
        if found != self.peer_id:
            raise LinkError(f"{self.name}: another agent is at that socket, {str(found)[:10]}… and not {self.peer_id[:10]}…")

    def path(self) -> str:
        """"ssh", or "direct" on this machine."""
        return self._way

    def rtt_s(self) -> Optional[float]:
        """What opening a stream took at least: one round trip. None before the first."""
        return self._rtt_s

    def close(self, code: int = 0, reason: str = "") -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            streams = list(self._streams)

        def end() -> None:                    # in a thread: the word that a channel is closed waits behind all that is being sent
            for stream in streams:
                stream.abort()
            self._closed()

        for stream in streams:
            stream.give_up()
        threading.Thread(target=end, name="close", daemon=True).start()


class Door:
    """The agent's side: listens, and has each stream of an authorized operator handled in a thread of its own."""

    def __init__(self, path: str, agent_id: str, alpns: Sequence[bytes], alone: bool = False) -> None:
        """Takes the place of a socket that an earlier agent left there; the folder is a private one. `alone`: and goes with it. OSError when it
        can't listen."""
        self.id, self.path, self._alpns, self._alone = agent_id, path, alpns, alone
        self.take_lane: Optional[Callable[[str, socket.socket, bytes], None]] = None   # given a lane's operator, its socket and what came over it
        self._slots = threading.BoundedSemaphore(STREAMS_AT_ONCE)
        self._thread: Optional[threading.Thread] = None
        self._closed = False
        self._sock = self._listen()

    def _listen(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        before = os.umask(0o177)              # the socket is born with its mode: there is no moment in which others could open it
        try:
            sock.bind(self.path)
        finally:
            os.umask(before)
        self._made = os.stat(self.path)
        sock.listen(STREAMS_AT_ONCE)
        return sock

    def serve(self, authorized: Callable[[str], bool], handle: Callable[[Stream], None]) -> None:
        """From now on. Whose id `authorized` doesn't know gets no further than its first line. No peer can stop this: each has a thread, of which
        there is a bounded number, and a bounded time for its first line."""
        self._thread = threading.Thread(target=self._accept, args=(authorized, handle), name="door", daemon=True)
        self._thread.start()

    def answers(self, timeout_s: float) -> bool:
        """Whether somebody still takes what comes. A socket that was removed (/tmp is tidied up) is made again."""
        if not os.path.lexists(self.path) and not self._closed:
            try:
                if self._alone:
                    _private(os.path.dirname(self.path))
                old, self._sock = self._sock, self._listen()
                old.shutdown(socket.SHUT_RDWR)                   # whoever waits in it goes on with the new one
                old.close()
            except OSError:
                pass                          # its folder is gone too, or the disk is full: it is looked at again
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        self._closed = True
        for step in (self._remove, lambda: self._sock.shutdown(socket.SHUT_RDWR), self._sock.close):
            try:
                step()
            except OSError:
                pass

    def _remove(self) -> None:
        """Unless it is another agent's by now: of a folder that was deleted and made again."""
        if os.path.samestat(os.stat(self.path), self._made):
            os.unlink(self.path)
            if self._alone:
                os.rmdir(os.path.dirname(self.path))

    def _accept(self, authorized: Callable[[str], bool], handle: Callable[[Stream], None]) -> None:
        while True:
            try:
                sock = self._sock.accept()[0]
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL) and self._closed:
                    return
                time.sleep(ACCEPT_PAUSE_S)    # no descriptors just now, a peer that was gone again, or another socket by now
                continue
            if not self._slots.acquire(blocking=False):
                _answer(sock, {"refused": f"{STREAMS_AT_ONCE} streams are open at the agent's socket, and no more are taken"})
                sock.close()
                continue
            try:
                threading.Thread(target=self._handled, args=(sock, authorized, handle), name="socket stream", daemon=True).start()
            except RuntimeError:              # no more threads on this machine
                self._slots.release()
                sock.close()

    def _handled(self, sock: socket.socket, authorized: Callable[[str], bool], handle: Callable[[Stream], None]) -> None:
        stream, taken = None, False
        try:
            said, rest = _first_line(sock)
            operator_id, alpn = str(said.get("operator")), str(said.get("alpn")).encode("utf-8", "replace")
            if not authorized(operator_id):
                _answer(sock, {"refused": "this key is not in the agent's list of operators"})
                return
            if alpn == LANE_ALPN and self.take_lane is not None:
                _answer(sock, {"id": self.id})
                taken = True
                self.take_lane(operator_id, sock, rest)
                return
            if alpn not in self._alpns:
                _answer(sock, {"refused": f"its agent doesn't speak {alpn[:40]!r}"})
                return
            _answer(sock, {"id": self.id})
            stream = Stream(Connection(alpn, operator_id, operator_id, ""), sock)
            stream._read = rest
            handle(stream)
            stream.flush(HANDSHAKE_S)
        except (LinkError, OSError):
            pass                              # that peer is gone
        except Exception:                     # a bug of ours: this stream's end and nobody else's
            traceback.print_exc()
        finally:
            if stream is not None:
                stream.abort()
            if not taken:
                sock.close()
            self._slots.release()


def _first_line(sock: socket.socket) -> Tuple[Dict[str, Any], bytes]:
    """A peer's first line and what came behind it. LinkError for one that says something else, or nothing in time."""
    data, deadline = b"", time.monotonic() + HANDSHAKE_S
    while b"\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > LINE_BYTES:
            raise LinkError("no first line")
        sock.settimeout(left)
        more = sock.recv(READ_BYTES)
        if not more:
            raise LinkError("no first line")
        data += more
    line, _, rest = data.partition(b"\n")
    try:
        said = json.loads(line.decode("utf-8"))
        if not isinstance(said, dict):
            raise ValueError
        return said, rest
    except (ValueError, RecursionError):
        raise LinkError("the first line can't be read") from None


def _answer(sock: socket.socket, said: Dict[str, str]) -> None:
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(json.dumps(said).encode("ascii") + b"\n")
    except OSError:
        pass                                  # that peer is gone; whoever reads from it next sees so


def join(path: str) -> int:
    """`join` of the agent file: copies stdin to the socket and the socket to stdout, behind JOINED, until either has ended both ways. For an SSH
    server that forwards no sockets. Exit code 1: nobody is at the socket."""
    try:
        sock = connect(path, HANDSHAKE_S)
    except OSError as error:
        os.write(2, f"{path}: {error.strerror or error}\n".encode("utf-8", "replace"))
        return 1
    sock.settimeout(None)
    os.write(1, JOINED)

    def from_stdin() -> None:
        try:
            while True:
                data = os.read(0, READ_BYTES)
                if not data:
                    break
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass                              # the agent reads no more

    reader = threading.Thread(target=from_stdin, daemon=True)
    reader.start()
    try:
        while True:
            data = sock.recv(READ_BYTES)
            if not data:
                break
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(1, rest):]
        os.close(1)
        while reader.is_alive() and not _hung_up(sock):
            reader.join(TICK_S)
    except OSError:
        pass                                  # whoever reads our stdout is gone, or the agent
    os._exit(0)                               # the reader may still wait for a word


def _hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed it both ways."""
    import select
    poll = select.poll()
    poll.register(sock, 0)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))
