"""The agent's socket by itself: streams as link.py's are, who gets in, and peers that are slow, many or hostile."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import eventually

from gpurun import sockets
from gpurun.agentfile import agent_file
from gpurun.errors import LinkError, LinkTimeoutError, RefusedError

ALPN, AGENT, ME = b"test/1", "ab" * 32, "cd" * 32


@pytest.fixture
def door(tmp_path):
    made = sockets.open_door(str(tmp_path), AGENT, [ALPN])
    yield made
    made.close()


def connection(door, operator: str = ME, agent: str = AGENT, alpn: bytes = ALPN, check: bool = False) -> sockets.Connection:
    return sockets.Connection(alpn, operator, agent, "node", "ssh", lambda timeout_s: sockets.connect(door.path, timeout_s), check=check)


def echo(stream) -> None:
    while True:
        data = stream.read(20)
        if not data:
            break
        stream.write(data, 20)
    stream.finish(20)


def everything(stream) -> bytes:
    return b"".join(iter(lambda: stream.read(20, 1 << 20), b""))


def test_a_stream_there_and_back_whose_ends_end_one_by_one(door):
    door.serve(lambda who: who == ME, echo)
    stream = connection(door).open()
    data, got = os.urandom(5 << 20), []
    reader = threading.Thread(target=lambda: got.append(everything(stream)))
    reader.start()
    stream.write(data[:1000], 20)
    stream.write(data[1000:], 20)
    stream.finish(20)
    reader.join(20)
    assert got == [data] and stream.read(1) == b"" and stream.rate()
    assert os.stat(door.path).st_mode & 0o777 == 0o600 and door.answers(1)
    assert stream.connection.path() == "ssh" and stream.connection.rtt_s() is not None


def test_a_stream_becomes_a_lane_with_what_came_behind_its_first_line(door):
    taken = []
    door.take_lane = lambda *what: taken.append(what)
    door.serve(lambda who: who == ME, echo)
    with sockets.connect(door.path, 5) as there:
        there.sendall(json.dumps({"alpn": sockets.LANE_ALPN.decode(), "operator": ME}).encode() + b"\nmine")
        eventually(lambda: len(taken) == 1)
        who, sock, first = taken.pop()
        assert who == ME and first + (b"" if first else sock.recv(9)) == b"mine"
        sock.close()
    made = sockets.Connection(sockets.LANE_ALPN, ME, AGENT, "node", dial=lambda timeout_s: sockets.connect(door.path, timeout_s))
    here = made.open().detach(5)
    eventually(lambda: len(taken) == 1)
    made.close()                                  # leaves what was detached alone
    there = taken.pop()[1]
    here.sendall(b"to")
    there.sendall(b"fro")
    assert (there.recv(9), here.recv(9)) == (b"to", b"fro")
    here.close()
    there.close()
    with pytest.raises(RefusedError):
        sockets.Connection(sockets.LANE_ALPN, "ee" * 32, AGENT, "node", dial=lambda timeout_s: sockets.connect(door.path, timeout_s)).open().detach(5)


@pytest.mark.parametrize("deep", [False, True])
def test_a_socket_that_was_tidied_up_is_made_again_and_streams_of_before_go_on(tmp_path, monkeypatch, deep):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / ("x" * 200 if deep else "agent")          # one with a long name has its socket elsewhere, alone in a folder
    folder.mkdir()
    door = sockets.open_door(str(folder), AGENT, [ALPN])
    door.serve(lambda who: who == ME, echo)
    before = connection(door).open()
    before.write(b"a", 5)
    assert before.read(5) == b"a"
    os.unlink(door.path)
    if deep:
        os.rmdir(os.path.dirname(door.path))
    assert door.answers(1)
    assert os.stat(door.path).st_mode & 0o777 == 0o600 and (not deep or os.stat(os.path.dirname(door.path)).st_mode & 0o077 == 0)
    for stream in (before, connection(door).open()):
        stream.write(b"b", 5)
        assert stream.read(5) == b"b"
    shutil.rmtree(folder)
    assert door.answers(1), "without its folder it is as before"
    door.close()
    door.answers(1)
    assert not os.path.exists(door.path)


def test_on_this_machine_a_socket_of_another_user_is_not_taken_for_the_agents(tmp_path, monkeypatch):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        with sockets.connect(path, 5, ours=True):
            pass
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        with pytest.raises(OSError, match="another user's"):
            sockets.connect(path, 5, ours=True)


def test_a_wait_that_runs_out_loses_nothing(door):
    go, seen = threading.Event(), []

    def slow(stream):
        stream.write(b"a", 20)
        go.wait(20)
        stream.write(b"b", 20)
        seen.append(everything(stream))
        stream.finish(20)

    door.serve(lambda who: True, slow)
    stream = connection(door).open()
    assert stream.read(20) == b"a"
    with pytest.raises(LinkTimeoutError):
        stream.read(0.1)
    data = os.urandom(8 << 20)                    # more than the buffers on the way take
    stream.write(data, 0.3)
    stream.write(b"?", 0.3)
    with pytest.raises(LinkTimeoutError):
        stream.write(b"not taken", 0.3)
    with pytest.raises(LinkTimeoutError):
        stream.flush(0.1)
    go.set()
    stream.write(b"!", 20)
    assert stream.read(20) == b"b"
    stream.finish(20)
    assert stream.read(20) == b"" and seen == [data + b"?!"]


def test_who_gets_in(door):
    door.serve(lambda who: who == ME, echo)
    for check in (True, False):
        with pytest.raises(RefusedError, match="refused this operator"):
            connection(door, operator="ee" * 32, check=check).open().read(20)
    with pytest.raises(RefusedError, match="doesn't speak"):
        connection(door, alpn=b"other/1").open().read(20)
    with pytest.raises(LinkError, match="another agent is at that socket, ababababab"):
        connection(door, agent="ee" * 32, check=True).open()
    stream = connection(door, check=True).open()
    stream.write(b"x", 5)
    assert stream.read(5) == b"x"
    stream.connection.close()
    with pytest.raises(LinkError, match="given up"):
        stream.read(5)


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"nonsense\n", b"\xff\n", b"{" * 5000, b'{"alpn": 3}\n', b'{"alpn": ' + b"[" * 3000 + b"\n"])
def test_a_peer_that_says_nonsense_is_let_go(door, line):
    door.serve(lambda who: who == ME, echo)
    with sockets.connect(door.path, 5) as peer:
        peer.sendall(line)
        assert not peer.recv(1) or b"refused" in peer.recv(4096)
    stream = connection(door).open()
    stream.write(b"x", 5)
    assert stream.read(5) == b"x"


def test_200_streams_at_once_beside_peers_that_say_nothing_and_one_that_does_not_read(door, monkeypatch):
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 6.0)             # on a busy machine the first line of one of 200 is late
    door.serve(lambda who: who == ME, echo)
    silent = [sockets.connect(door.path, 5) for _ in range(40)]
    deaf = connection(door).open()
    with pytest.raises(LinkTimeoutError):
        while True:
            deaf.write(bytes(1 << 20), 0.3)
    one, answers = connection(door), []

    def talk(number: int) -> None:
        stream = one.open()
        stream.write(b"%d" % number, 20)
        stream.finish(20)
        answers.append(everything(stream))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(int, answers)) == list(range(200))
    for peer in silent:
        peer.settimeout(60)
        assert peer.recv(1) == b""                # let go after its time
        peer.close()


def test_more_streams_than_are_taken_are_told_so_and_the_rest_goes_on(door, monkeypatch):
    door._slots = threading.BoundedSemaphore(2)
    door.serve(lambda who: True, echo)
    one, two = connection(door, check=True).open(), connection(door, check=True).open()
    with pytest.raises(RefusedError, match="no more are taken"):
        connection(door).open().read(20)
    one.abort()
    eventually(lambda: _gets_in(door))
    two.write(b"x", 5)
    assert two.read(5) == b"x"


def _gets_in(door) -> bool:
    try:
        connection(door, check=True).open().abort()
        return True
    except LinkError:
        return False


def test_a_handler_that_fails_or_the_agents_end_is_the_end_of_its_stream_alone(door, capsys):
    def fails(stream):
        if stream.read(5) == b"bug":
            raise ZeroDivisionError
        stream.write(b"fine", 5)

    door.serve(lambda who: True, fails)
    for said, heard in ((b"bug", b""), (b"x", b"fine")):
        stream = connection(door).open()
        stream.write(said, 5)
        assert stream.read(20) == heard
    assert "ZeroDivisionError" in capsys.readouterr().err
    door.close()
    with pytest.raises(OSError):
        sockets.connect(door.path, 5)


def test_the_place_of_a_socket_whose_path_is_long_is_private(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90) / ("y" * 90)
    long.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    if len(str(tmp_path)) < 50:
        door = sockets.open_door(str(long), AGENT, [ALPN])
        assert door.path.startswith(str(tmp_path / "run/gpurun-"))
        door.close()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    door = sockets.open_door(str(long), AGENT, [ALPN])
    folder = Path(door.path).parent
    try:
        assert str(folder).startswith("/tmp/gpurun-") and folder.stat().st_mode & 0o777 == 0o700
        door.close()
        assert not folder.exists()
        folder.mkdir()
        folder.chmod(0o755)                       # others could have been in it
        with pytest.raises(OSError, match="not a folder of user"):
            sockets.open_door(str(long), AGENT, [ALPN])
    finally:
        folder.rmdir()


def test_an_agents_own_id_is_made_of_its_key(tmp_path):
    own = sockets.own_id(str(tmp_path / "key"))
    assert len(own) == 64 and sockets.own_id(str(tmp_path / "key")) == own != sockets.own_id(str(tmp_path / "other"))
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("python", sorted({sys.executable, *filter(None, os.environ.get("GPURUN_TEST_PYTHONS", "").split(os.pathsep)[:1])}))
def test_join_copies_both_ways_and_ends_when_the_stream_does(door, tmp_path, monkeypatch, python):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    door.serve(lambda who: who == ME, echo)
    argv = [python, "-I", agent_file().path, "join", "--socket", door.path]
    data = os.urandom(3 << 20)
    first = json.dumps({"alpn": ALPN.decode(), "operator": ME}).encode() + b"\n"
    done = subprocess.run(argv, input=first + data, capture_output=True, timeout=90)
    assert done.returncode == 0 and done.stdout == sockets.JOINED + json.dumps({"id": AGENT}).encode() + b"\n" + data
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
        left.stdin.write(first.replace(b"cd", b"ee"))
        left.stdin.flush()
        assert b"refused" in left.stdout.read()   # and its stdin is still open
        assert left.wait(20) == 0
    door.close()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=90)
    assert done.returncode == 1 and sockets.JOINED not in done.stdout and b"socket" in done.stderr
