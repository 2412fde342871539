"""logs.py: what is on this disk is always a prefix of the node's logs, whatever is killed, full or out of order."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading

import pytest

from conftest import eventually
from gpurun import transfer
from gpurun.logs import Logs, follow_local
from gpurun.records import RunFolder
from gpurun.transfer import LOGS
from streams import ROOT, node
from trees import tiny_disk


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run-1").mkdir()
    return RunFolder(str(tmp_path / "run-1"))


def here(folder, name="run.out") -> bytes:
    with open(folder.logs[name], "rb") as stream:
        return stream.read()


def shown(logs, tail=None) -> list[tuple[str, bytes]]:
    pieces = []
    logs.show(lambda name, data: pieces.append((name, data)), tail)
    return pieces


# ---- take -------------------------------------------------------------------------------------------------------------------------

def test_a_log_is_made_private_with_its_first_byte(folder):
    logs = Logs(folder)
    logs.take("run.err", 0, b"")
    assert logs.kept == dict.fromkeys(LOGS, 0) and os.listdir(folder.path) == []
    logs.take("run.err", 0, b"x")
    assert os.listdir(folder.path) == ["stderr.log"] and stat.S_IMODE(os.stat(folder.stderr).st_mode) == 0o600
    assert logs.kept == {"setup.out": 0, "setup.err": 0, "run.out": 0, "run.err": 1}
    logs.close()


def test_a_piece_that_is_here_in_part_is_gone_on_from_and_one_that_would_leave_a_hole_is_left_out(folder):
    logs = Logs(folder)
    for position, data, after in [(0, b"0123", b"0123"), (0, b"0123", b"0123"), (2, b"2345", b"012345"), (7, b"789", b"012345"),
                                  (1, b"12", b"012345"), (6, b"6", b"0123456"), (0, b"0123456789", b"0123456789")]:
        logs.take("run.out", position, data)
        assert here(folder) == after and logs.kept["run.out"] == len(after)
    assert logs.trouble == {}
    logs.close()


def test_what_a_killed_process_left_is_where_the_next_one_goes_on(folder):
    logs = Logs(folder)
    logs.take("run.out", 0, b"first ")
    again = Logs(folder)
    assert again.kept["run.out"] == 6 and again.behind({"run.out": 12, "run.err": 0, "setup.out": 3}) == {"setup.out": 0, "run.out": 6}
    again.take("run.out", 6, b"second")
    assert here(folder) == b"first second" and again.behind({"run.out": 12}) == {}
    logs.close()
    again.close()


def test_pieces_in_any_order_again_and_again_never_make_anything_but_a_prefix(folder):
    chance, data = random.Random(5), random.Random(6).randbytes(5000)
    logs = Logs(folder)
    for number in range(2000):
        begin = chance.randrange(len(data))
        logs.take("run.out", begin, data[begin:begin + chance.randrange(300)])
        if number % 50 == 0:                                    # another process, and the piece that follows
            logs.close()
            logs = Logs(folder)
            logs.take("run.out", logs.kept["run.out"], data[logs.kept["run.out"]:][:100])
        if logs.kept["run.out"]:
            assert here(folder) == data[:logs.kept["run.out"]]
    assert logs.kept["run.out"] == len(data)
    logs.close()


def test_a_kill_in_the_middle_of_writing_leaves_a_prefix(folder):
    """The bytes at each position are known, so a hole, a double or a half-written piece would show."""
    code = ("import sys; from gpurun.logs import Logs; from gpurun.records import RunFolder\n"
            "logs = Logs(RunFolder(sys.argv[1])); at = logs.kept['run.out'] // 12\nprint(flush=True)\n"
            "while True:\n  data = b''.join(b'%011d\\n' % n for n in range(at, at + 5000))\n"
            "  logs.take('run.out', at * 12, data); at += 5000")
    size = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", code, folder.path], stdout=subprocess.PIPE, cwd=ROOT)
        process.stdout.readline()
        eventually(lambda: os.path.exists(folder.stdout) and os.stat(folder.stdout).st_size > size + 400_000)
        process.kill()
        process.wait()
        process.stdout.close()
        data = here(folder)
        assert len(data) > size and data == b"".join(b"%011d\n" % n for n in range(len(data) // 12 + 1))[:len(data)]
        size = len(data)


# ---- a full disk ---------------------------------------------------------------------------------------------------------------------

def test_a_full_disk_keeps_a_prefix_and_goes_on_when_there_is_room_again(tmp_path):
    data = random.Random(4).randbytes(3 << 20)
    with tiny_disk(tmp_path / "disk", "1m") as disk:
        (disk / "run").mkdir()
        folder = RunFolder(str(disk / "run"))
        logs = Logs(folder)
        for at in range(0, len(data), 100_000):
            logs.take("run.out", at, data[at:at + 100_000])
        kept = logs.kept["run.out"]
        assert 900_000 < kept <= 1 << 20 and here(folder) == data[:kept] and "No space left" in str(logs.trouble["run.out"])
        assert logs.behind({"run.out": len(data)}) == {"run.out": kept}
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        logs.take("run.out", kept + 100, data[kept + 100:kept + 200])    # a hole is still a hole
        assert logs.kept["run.out"] == kept
        for at in range(kept, len(data), 100_000):                       # the second follow
            logs.take("run.out", at, data[at:at + 100_000])
        assert here(folder) == data and logs.trouble == {} and logs.behind({"run.out": len(data)}) == {}
        logs.close()


def test_a_limit_on_files_is_like_a_full_disk_and_no_other_log_suffers(folder):
    """Where no disk can be mounted this is the same: a write that takes a part, then an error."""
    code = ("import resource, signal, sys; from gpurun.logs import Logs; from gpurun.records import RunFolder\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
            "logs = Logs(RunFolder(sys.argv[1]))\n"
            "for at in range(0, 3000, 300): logs.take('run.out', at, bytes([65 + at // 300]) * 300); logs.take('run.err', at // 10, b'e' * 30)\n"
            "print(logs.kept, str(logs.trouble))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
            "logs.take('run.out', 900, b'D' * 300); print(logs.kept, logs.trouble)")
    done = subprocess.run([sys.executable, "-c", code, folder.path], stdout=subprocess.PIPE, check=True, cwd=ROOT, text=True)
    full, after = done.stdout.splitlines()
    assert "'run.out': 1000, 'run.err': 300}" in full and "File too large" in full and "run.err" not in full.split("}")[1]
    assert after == "{'setup.out': 0, 'setup.err': 0, 'run.out': 1200, 'run.err': 300} {}"
    assert here(folder) == b"A" * 300 + b"B" * 300 + b"C" * 300 + b"D" * 300


def test_a_log_that_cannot_be_made_is_trouble_and_no_error(folder):
    os.mkdir(folder.stdout)
    logs = Logs(folder)
    logs.take("run.out", logs.kept["run.out"], b"x")
    assert "directory" in str(logs.trouble["run.out"])
    os.rmdir(folder.stdout)
    logs = Logs(folder)
    logs.take("run.out", 0, b"x")
    assert here(folder) == b"x" and not logs.trouble
    logs.close()


# ---- with the node ---------------------------------------------------------------------------------------------------------------------

def test_a_tail_first_and_the_hole_after_it_end_in_the_whole_log(tmp_path, folder):
    (tmp_path / "node").mkdir()
    data = b"".join(b"line %d\n" % number for number in range(10_000))
    (tmp_path / "node" / "run.out").write_bytes(data)

    def follow(offsets, **how):
        with node(lambda channel, header: transfer.serve_follow(channel, header, str(tmp_path / "node"), lambda: True, lambda pause: None)) as stream:
            return transfer.follow(stream, "run-1", offsets, take, **how)

    logs, seen = Logs(folder), []

    def take(name, position, piece):
        seen.append(piece)
        logs.take(name, position, piece)

    sizes = follow(logs.kept, tail=3)
    assert b"".join(seen) == b"line 9997\nline 9998\nline 9999\n" and logs.kept["run.out"] == 0
    assert logs.behind(sizes) == {"run.out": 0}
    assert follow(logs.behind(sizes), live=False) == {"run.out": len(data)}
    assert here(folder) == data and logs.behind(sizes) == {}
    logs.close()


# ---- show ----------------------------------------------------------------------------------------------------------------------------

def test_show_gives_setup_first_and_with_a_tail_the_last_lines_of_each(folder):
    for name, data in (("run.out", b"o1\no2\no3"), ("run.err", b"e\n"), ("setup.err", b"s1\ns2\n")):
        with open(folder.logs[name], "wb") as stream:
            stream.write(data)
    logs = Logs(folder)
    assert shown(logs) == [("setup.err", b"s1\ns2\n"), ("run.out", b"o1\no2\no3"), ("run.err", b"e\n")]
    assert shown(logs, 2) == [("setup.err", b"s1\ns2\n"), ("run.out", b"o2\no3"), ("run.err", b"e\n")]
    assert shown(logs, 0) == [] and sorted(os.listdir(folder.path)) == ["setup-stderr.log", "stderr.log", "stdout.log"]


def test_show_gives_a_long_log_in_pieces(folder):
    with open(folder.stdout, "wb") as stream:
        stream.truncate(20 << 20)
    pieces = shown(Logs(folder))
    assert sum(len(data) for _, data in pieces) == 20 << 20 and max(len(data) for _, data in pieces) <= 1 << 20


# ---- follow_local --------------------------------------------------------------------------------------------------------------------

def test_a_second_process_sees_what_the_first_one_writes_to_its_last_byte(folder):
    code = ("import sys; from gpurun.logs import Logs; from gpurun.records import RunFolder\n"
            "folder = RunFolder(sys.argv[1]); assert folder.try_lock(); logs = Logs(folder); at = 0\n"
            "for line in sys.stdin.buffer: logs.take('run.out', at, line); at += len(line)\n"
            "logs.take('run.err', 0, b'the end')")
    process = subprocess.Popen([sys.executable, "-c", code, folder.path], stdin=subprocess.PIPE, cwd=ROOT)
    eventually(lambda: folder.driver() == process.pid)
    got = {name: b"" for name in LOGS}

    def take(name, data):
        got[name] += data

    thread = threading.Thread(target=follow_local, args=(folder, take, lambda: folder.driver() is None))
    thread.start()
    for line in (b"one\n", b"two\n"):
        process.stdin.write(line)
        process.stdin.flush()
        eventually(lambda: got["run.out"].endswith(line))
    process.stdin.write(b"three\n" * 100_000)
    process.communicate(timeout=60)
    thread.join(60)
    assert not thread.is_alive() and got == {"setup.out": b"", "setup.err": b"", "run.out": b"one\ntwo\n" + b"three\n" * 100_000, "run.err": b"the end"}


@pytest.mark.parametrize("tail, begins", [(None, b"1\n2\n3\n"), (1, b"3\n"), (0, b"")])
def test_following_here_begins_at_the_last_lines_and_has_all_of_a_log_that_began_later(folder, tail, begins):
    with open(folder.stdout, "wb") as stream:
        stream.write(b"1\n2\n3\n")
    got = {"run.out": b"", "run.err": b""}
    asked = []

    def take(name, data):
        got[name] += data

    def ended():
        asked.append(None)
        if len(asked) == 2:
            with open(folder.stdout, "ab") as stream:
                stream.write(b"4\n")
            with open(folder.stderr, "wb") as stream:
                stream.write(b"e1\ne2\n")
        return len(asked) == 3

    assert follow_local(folder, take, ended, tail) == {"run.out": 8, "run.err": 6}
    assert got == {"run.out": begins + b"4\n", "run.err": b"e1\ne2\n"}
