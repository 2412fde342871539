"""screen.py: the job's bytes untouched, one live line that never harms them, and talk that reads well in a terminal, a log and a script."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from conftest import eventually

from gpurun.screen import Screen, columns, counted, duration, printable, shorten


MARK = b"\0so far\0"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Sink:
    """A pipe or a terminal with a thread that reads all that is written to it."""

    def __init__(self, terminal=False, width=80):
        if terminal:
            self.reader, self.fd = pty.openpty()
            attributes = termios.tcgetattr(self.fd)
            attributes[1] &= ~termios.OPOST   # keep \n as it is, so that bytes can be compared
            termios.tcsetattr(self.fd, termios.TCSANOW, attributes)
            self.resize(width)
        else:
            self.reader, self.fd = os.pipe()
        self.chunks, self.marks = [], 0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def resize(self, width):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def _read(self):
        try:
            while chunk := os.read(self.reader, 1 << 16):
                self.chunks.append(chunk)
        except OSError:   # a terminal's last writer left
            pass

    def so_far(self):
        """All that was written until now: it has come once a mark behind it has."""
        os.write(self.fd, MARK)
        self.marks += 1
        eventually(lambda: b"".join(self.chunks).count(MARK) == self.marks)
        return self._got()

    def all(self):
        os.close(self.fd)
        self.thread.join(30)
        os.close(self.reader)
        return self._got()

    def _got(self):
        return b"".join(self.chunks).replace(MARK, b"")


def shown(data, width=80):
    """The rows of a terminal after `data`. Fails if a line is wider than the terminal (it would wrap, and \\r would not erase it)."""
    rows, column = [""], 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b", data.decode("utf-8", "replace")):
        if part == "\r":
            column = 0
        elif part == "\n":   # with OPOST a terminal returns the carriage too
            rows.append("")
            column = 0
        elif part.endswith("K") and part.startswith("\x1b["):
            rows[-1] = rows[-1][:column]
        elif part.startswith("\x1b["):
            assert part.endswith("m"), f"unexpected {part!r}"
        else:
            rows[-1] = rows[-1][:column].ljust(column) + part + rows[-1][column + len(part):]
            column += len(part)
            assert column <= width, f"{rows[-1]!r} is wider than the terminal"
    return rows


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def make(mode, terminal=False, shared=False, width=80):
    clock, err = Clock(), Sink(terminal, width)
    out = err if shared else Sink()
    return Screen(mode, out.fd, err.fd, clock), clock, out, err


RESULT = {"run_id": "r-1", "state": "COMPLETED", "exit_code": 0, "reason": "", "node": "gpu1", "outputs_dir": "/x/outputs", "outputs": ["a"],
          "missing": [], "bytes": {"pushed": 1_234_567, "pulled": 0},
          "seconds": {"push": 0.2, "setup": 0, "run": 8.8, "collect": 0.31, "total": 9.4}}


# ---- words -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seconds, text, whole", [
    (0, "0.00 s", "0 s"), (0.04, "0.04 s", "0 s"), (0.0949, "0.09 s", "0 s"), (0.095, "0.1 s", "0 s"), (4.24, "4.2 s", "4 s"),
    (59.94, "59.9 s", "59 s"), (59.96, "1 min 0 s", "59 s"), (192.4, "3 min 12 s", "3 min 12 s"), (3599.7, "1 h 0 min", "59 min 59 s"),
    (7530, "2 h 5 min", "2 h 5 min"), (-1, "0.00 s", "0 s")])
def test_durations(seconds, text, whole):
    assert (duration(seconds), duration(seconds, whole=True)) == (text, whole)


def test_control_characters_in_names_are_escaped():
    assert printable("a\x1b[31mb\n\r\x07\x9b\u202e\u2028é\udcff\ud800") == "a\\x1b[31mb\\n\\r\\x07\\x9b\\u202e\\u2028é\\xff\\ud800"
    assert printable("a\n\tb", keep="\n\t") == "a\n\tb"


@pytest.mark.parametrize("width", range(0, 40))
@pytest.mark.parametrize("text", ["data/train/part-00001/images.bin", "データ/学習/部分-00001/画像.bin", "e\u0301" * 30, ""])
def test_long_names_are_shortened_in_the_middle(text, width):
    short = shorten(text, width)
    assert columns(short) <= width
    assert short == text if columns(text) <= width else "." in short or not width


# ---- the job's bytes -----------------------------------------------------------------------------------------------------------

ALL_BYTES = bytes(range(256)) + b"\xed\xee\xef half \xe2\x82"


@pytest.mark.parametrize("mode", ["terminal", "plain", "quiet"])
def test_job_output_is_untouched_and_apart(mode):
    screen, clock, out, err = make(mode)
    screen.job_stdout(ALL_BYTES)
    screen.job_stdout(b"")
    screen.job_stderr(b"\xff" + ALL_BYTES)
    screen.job_stdout(b"\xac\r\n")
    assert out.all() == ALL_BYTES + b"\xac\r\n"
    assert err.all() == b"\xff" + ALL_BYTES


def test_a_million_lines_arrive_whole_and_fast():
    reader, writer = os.pipe()
    data = b"".join(b"%d\n" % number for number in range(1_000_000))
    screen, got = Screen("plain", writer, 2), []
    thread = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(reader, 1 << 20), b"")))
    thread.start()
    start = time.monotonic()
    for at in range(0, len(data), 1 << 20):
        screen.job_stdout(data[at:at + (1 << 20)])
    os.close(writer)
    thread.join(10)
    os.close(reader)
    assert b"".join(got) == data and time.monotonic() - start < 2


def test_non_blocking_stdout_loses_nothing():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    screen, data = Screen("plain", writer, 2), os.urandom(3_000_000)
    thread = threading.Thread(target=lambda: (screen.job_stdout(data), os.close(writer)))
    thread.start()
    time.sleep(0.1)
    got = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    thread.join(10)
    os.close(reader)
    assert got == data and not screen.stdout_gone


@pytest.mark.parametrize("mode", ["terminal", "plain", "quiet", "json"])
def test_a_reader_that_left_is_remembered_and_nothing_else_happens(mode):
    reader, writer = os.pipe()
    err = Sink()
    screen = Screen(mode, writer, err.fd)
    screen.job_stdout(b"first\n")
    os.close(reader)
    for _ in range(3):
        screen.job_stdout(b"more\n")
    assert screen.stdout_gone
    screen.job_stderr(b"e\n")
    screen.phase("collect")
    screen.result(RESULT)
    screen.close()
    os.close(writer)
    text = err.all()
    assert b"stdout" not in text and (mode == "json" or b"e\n" in text)


def test_closed_descriptors_are_never_written_to(tmp_path):
    """What is opened at such a number later is a record or a socket."""
    code = ("import os, sys; from gpurun.screen import Screen\n"
            "screen = Screen('plain'); record = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); assert record in (1, 2), record\n"
            "screen.phase('run'); screen.job_stdout(b'x'); screen.job_stderr(b'y'); screen.warn('z'); screen.close()\n"
            "assert screen.stdout_gone == (record == 1)\n")
    for redirect in (">&-", "2>&-"):
        record = tmp_path / "record"
        done = subprocess.run(["bash", "-c", f'"$0" -c "$1" "$2" {redirect}', sys.executable, code, record], capture_output=True)
        assert done.returncode == 0 and record.read_bytes() == b"", done.stderr


def test_claim_standard_fds_fills_the_holes(tmp_path):
    code = ("import os, sys; from gpurun.screen import claim_standard_fds\n"
            "claim_standard_fds(); claim_standard_fds(); fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
            "os.write(fd, b'%d' % fd); os.write(1, b'x'); os.write(2, b'x'); assert os.read(0, 1) == b''\n")
    subprocess.run(["bash", "-c", '"$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, code, tmp_path / "record"], check=True)
    assert (tmp_path / "record").read_bytes() == b"3"


def test_a_full_disk_behind_stdout_is_said_once():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    fd, err = os.open("/dev/full", os.O_WRONLY), Sink()
    screen = Screen("plain", fd, err.fd)
    screen.job_stdout(b"x")
    screen.job_stdout(b"x")
    os.close(fd)
    assert screen.stdout_gone and err.all().count(b"No space left") == 1


def test_a_paused_reader_of_stdout_holds_nobody_else():
    reader, writer = os.pipe()
    err = Sink(terminal=True)
    screen = Screen("terminal", writer, err.fd)
    screen.phase("run")
    thread = threading.Thread(target=screen.job_stdout, args=(b"x" * 1_000_000,), daemon=True)
    thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    screen.live_tick()
    screen.say("hello")
    screen.job_stderr(b"err\n")
    assert time.monotonic() - start < 10 and thread.is_alive()       # else they would wait for as long as the reader does
    os.close(reader)
    thread.join(10)
    assert not thread.is_alive() and screen.stdout_gone
    os.close(writer)


# ---- the live line -------------------------------------------------------------------------------------------------------------

def test_live_line_shows_the_phase_and_ends_without_a_trace():
    screen, clock, out, err = make("terminal", terminal=True, width=100)
    screen.phase("push", "to gpu1")
    assert shown(err.so_far(), 100) == ["push  0 s  to gpu1"]
    screen.progress(0, 2_000_000_000, "B", "data/big.bin")
    clock.now += 1
    screen.progress(500_000_000, 2_000_000_000, "B", "data/big.bin")
    assert shown(err.so_far(), 100) == ["push  [=====               ]  25 %  500 MB of 2.0 GB  500 MB/s  1 s  data/big.bin"]
    clock.now += 0.5
    screen.live_tick()
    clock.now += 0.5
    screen.live_tick()
    assert "  2 s  " in shown(err.so_far(), 100)[-1]
    screen.close()
    assert shown(err.all(), 100) == [""] and out.all() == b""


def test_live_line_keeps_out_of_the_way_of_job_output():
    """The job's lines come out as if gpurun were not there, whatever they end in."""
    screen, clock, out, err = make("terminal", terminal=True, shared=True)
    screen.phase("run")
    for part in (b"one\n", b"two", b" and a half", b"\n", b"50%\r", b"99%\r", b"100%\n", b"last without newline"):
        clock.now += 1
        screen.job_stdout(part)
        screen.live_tick()
    assert shown(err.so_far()) == ["one", "two and a half", "100%", "last without newline"]
    screen.say("talk")
    assert shown(err.so_far())[-3:] == ["last without newline", "gpurun: talk", "run  8 s"]
    clock.now += 1
    screen.live_tick()
    assert shown(err.so_far())[-1] == "run  9 s"
    screen.close()
    data = err.all()
    assert shown(data)[-1] == "" and b"last without newline" in data


def test_live_line_is_drawn_at_most_ten_times_a_second():
    screen, clock, out, err = make("terminal", terminal=True)
    screen.phase("push")
    for number in range(10_000):
        clock.now += 0.0001
        screen.progress(number, 10_000, "files", f"f{number}")
        screen.live_tick()
        screen.job_stderr(b"x\n")
    assert err.so_far().count(b"push  ") <= 12
    screen.close()
    assert b"".join(err.chunks).count(b"x\n") == 10_000
    err.all(), out.all()


@pytest.mark.parametrize("width", [1, 5, 20, 40, 79, 80, 200])
def test_live_line_fits_the_terminal(width):
    screen, clock, out, err = make("terminal", terminal=True, width=width)
    screen.phase("push", "x" * 300)
    for name in ("a/" * 150 + "file", "\x1b[2J\n" * 50, "画" * 200, ""):
        clock.now += 1
        screen.progress(5, 10, "B", name)
        last = shown(err.so_far(), width)[-1]
        assert columns(last) <= width and "\x1b" not in last
    err.resize(width + 30)
    clock.now += 1
    screen.live_tick()
    shown(err.so_far(), width + 30)
    screen.close()
    err.all(), out.all()


def test_a_pipe_that_may_end_in_this_terminal_gets_the_line_to_itself():
    screen, clock, out, err = make("terminal", terminal=True)
    screen.phase("run")
    screen.job_stdout(b"x\n")
    screen.live_tick()
    assert shown(err.so_far()) == [""]
    clock.now += 1
    screen.live_tick()
    assert shown(err.so_far()) == ["run  1 s"]
    screen.close()
    err.all(), out.all()


def test_setup_output_is_dim_and_its_looks_end_with_it(monkeypatch):
    for colour in (True, False):
        if not colour:
            monkeypatch.setenv("NO_COLOR", "1")
        screen, clock, out, err = make("terminal", terminal=True)
        screen.setup_output("é".encode()[:1])
        screen.setup_output("é".encode()[1:] + b"\n")
        screen.job_stderr(b"job\n")
        screen.close()
        assert err.all() == ("\x1b[2mé\n\x1b[0mjob\n" if colour else "é\njob\n").encode() and out.all() == b""


def test_many_threads_at_once_lose_nothing():
    screen, clock, out, err = make("terminal", terminal=True, shared=True)
    screen.phase("run")

    def write(letter):
        for _ in range(500):
            screen.job_stdout(letter * 20 + b"\n")
            clock.now += 0.01
            screen.live_tick()

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    screen.close()
    rows = shown(err.all())
    assert sorted(rows) == [""] + [letter * 20 for letter in "abc" for _ in range(500)]


# ---- plain, quiet --------------------------------------------------------------------------------------------------------------

def test_plain_log_of_a_run():
    screen, clock, out, err = make("plain")
    screen.phase("push", "2 files to gpu1")
    for done in range(0, 101, 5):
        screen.progress(done * 1_000_000, 100_000_000, "B", "big")
        screen.live_tick()
        clock.now += 1.25
    screen.phase("setup")
    screen.setup_output(b"Collecting numpy\n")
    clock.now += 12
    screen.phase("run")
    screen.job_stderr(b"no newline")
    clock.now += 30
    screen.summary(RESULT | {"missing": ["b\n"], "outputs_dir": os.path.join(os.getcwd(), "runs", "x")})
    screen.close()
    assert out.all() == b""
    assert err.all().decode() == """\
gpurun: push: 2 files to gpu1
gpurun: push: 40 %, 40.0 MB of 100.0 MB, 4.0 MB/s
gpurun: push: 80 %, 80.0 MB of 100.0 MB, 4.0 MB/s
gpurun: push: 100.0 MB in 26.2 s (3.8 MB/s)
gpurun: setup
Collecting numpy
gpurun: setup: 12.0 s
gpurun: run
no newline
gpurun: COMPLETED, exit code 0; 9.4 s (push 0.2 s, run 8.8 s, collect 0.3 s); 1.2 MB pushed; outputs in runs/x; missing: b\\n
""".replace("100.0 MB", "100 MB")


def test_a_resumed_pull_is_not_flattered():
    screen, clock, out, err = make("plain")
    screen.phase("collect")
    screen.progress(900_000_000, 1_000_000_000)
    clock.now += 10
    screen.progress(1_000_000_000, 1_000_000_000)
    screen.phase("")
    assert err.all().decode().splitlines()[-1] == "gpurun: collect: 1.0 GB in 10.0 s (10.0 MB/s)"
    out.all()


def test_one_file_is_one_file():
    assert [counted(number, "files") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    screen, clock, out, err = make("plain")
    screen.phase("read")
    screen.progress(1, 1, "files")
    clock.now += 11
    screen.progress(1, 1, "files")
    screen.phase("")
    out.all()
    assert err.all().decode() == "gpurun: read\ngpurun: read: 100 %, 1 of 1 file\ngpurun: read: 1 file in 11.0 s\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("mode", ["plain", "json"])
def test_a_full_disk_under_stdout_is_said_once_and_errors_are_still_heard(mode):
    err, full = Sink(), os.open("/dev/full", os.O_WRONLY)
    screen = Screen(mode, full, err.fd)
    for _ in range(3):
        screen.job_stdout(b"x\n")
    screen.error("it broke")
    screen.result(RESULT)
    screen.close()
    os.close(full)
    assert err.all().decode() == ("gpurun: warning: stdout can't be written (No space left on device); the whole output is in the run's folder\n"
                                  "gpurun: error: it broke\n")


def test_failed_summary_has_the_reason():
    screen, clock, out, err = make("quiet")
    screen.phase("run")
    screen.say("talk")
    screen.setup_output(b"noise\n")
    screen.progress(1, 2)
    screen.summary(RESULT)
    screen.summary(RESULT | {"state": "FAILED", "exit_code": 3, "reason": "the setup exited 3", "seconds": {}, "bytes": {}, "outputs": []})
    screen.warn("careful\x1b[2J")
    screen.error("two\nlines")
    screen.close()
    assert err.all().decode() == ("gpurun: FAILED, exit code 3: the setup exited 3\ngpurun: warning: careful\\x1b[2J\n"
                                  "gpurun: error: two\nlines\n")
    out.all()


def test_choose(monkeypatch):
    def chosen(terminal, **options):
        monkeypatch.setattr(os, "isatty", lambda fd: terminal)
        return Screen.choose(**options).mode

    assert chosen(True) == "terminal" and chosen(False) == "plain"
    assert chosen(True, json=True, quiet=True) == "json" and chosen(True, quiet=True) == "quiet"
    monkeypatch.setenv("CI", "true")
    assert chosen(True) == "plain"
    monkeypatch.delenv("CI")
    for term in ("dumb", None):
        monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM")
        assert chosen(True) == "plain"


# ---- json ------------------------------------------------------------------------------------------------------------------------

def test_json_is_one_object_a_line_and_bytes_survive():
    screen, clock, out, err = make("json")
    logs = {"stdout": "aé€😀\u2028\n".encode() * 5 + b"\xff\xfe" + "é".encode() + b"\xe2\x82", "stderr": b"\xf0\x9f", "setup": b"plain"}
    screen.phase("push", "détail")
    for done in range(21):
        screen.progress(done, 20, "files", "a\udcff")
        clock.now += 0.1
    for kind, data in logs.items():
        write = getattr(screen, "setup_output" if kind == "setup" else f"job_{kind}")
        for at in range(len(data)):
            write(data[at:at + 1])
        write(b"")
    screen.say("hello\nthere")
    screen.warn("w")
    screen.error("e")
    screen.summary(RESULT)
    screen.result({"type": "x"} | RESULT)
    screen.close()
    lines = out.all().decode("ascii").splitlines()
    objects = [json.loads(line) for line in lines]
    assert err.all() == b""
    assert objects[0] == {"type": "phase", "name": "push", "detail": "détail"} and objects[-1] == {"type": "result"} | RESULT
    progress = [o for o in objects if o["type"] == "progress"]
    assert 2 <= len(progress) <= 4 and progress[-1] == {"type": "progress", "phase": "push", "done": 20, "total": 20, "unit": "files",
                                                        "name": "a\udcff"}
    for kind, data in logs.items():
        chunks = [o for o in objects if o["type"] == kind]
        assert b"".join(o["text"].encode() if "text" in o else base64.b64decode(o["data_base64"]) for o in chunks) == data
        assert any("text" in o for o in chunks) == (kind != "stderr")
    assert [o for o in objects if o["type"] in ("message", "warning", "error")] == [
        {"type": "message", "text": "hello\nthere"}, {"type": "warning", "text": "w"}, {"type": "error", "text": "e"}]
