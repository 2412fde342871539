"""A question on the terminal: one key answers it, nothing of the job is lost meanwhile, and the terminal is as it was afterwards.

Each test has a terminal of its own (a pty) with a process whose controlling terminal it is. What the terminal shows is read, what the
process has to say beside that comes over a pipe. Everything has a bound.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from conftest import eventually
from test_screen import shown

LIMIT_S = 40
PRELUDE = """
import os, queue, resource, signal, sys, termios, threading, time
from gpurun.screen import Screen
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.alarm(120)
screen, answers = Screen("terminal"), queue.SimpleQueue()
def report(*words): os.write(int(os.environ["REPORT"]), (" ".join(map(str, words)) + "\\n").encode())
def ask(): return screen.ask("what now?", {"s": "stop", "d": "detach", "g": "go on"}, answers.put)
def answer(): report("answer", repr(answers.get(timeout=60)))
"""
KEYS = b"[s] stop   [d] detach   [g] go on\x1b[K"


class Terminal:
    """A terminal with a process on it."""

    def __init__(self, body, shell=False):
        self.reports_fd, writer = os.pipe()
        os.set_inheritable(writer, True)
        env = {**os.environ, "TERM": "xterm", "REPORT": str(writer), "BODY": PRELUDE + body, "PYTHON": sys.executable, "PS1": "$ ", "NO_COLOR": "1",
               "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"] if shell else [sys.executable, "-c", PRELUDE + body]
        ready, go = os.pipe()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.read(ready, 1)                 # the settings are read first
            os.execvpe(argv[0], argv, env)
        os.close(writer)
        self.settings = termios.tcgetattr(self.fd)
        os.write(go, b"x")
        os.close(ready)
        os.close(go)
        self.got, self.said, self.status, self.open = b"", b"", None, [self.fd, self.reports_fd]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.status is None:
            for number in (signal.SIGHUP, signal.SIGKILL):            # a shell passes the first on to its jobs
                os.kill(self.pid, number)
                os.kill(self.pid, signal.SIGCONT)
                time.sleep(0.1)
            os.waitpid(self.pid, 0)
        for fd in (self.fd, self.reports_fd):
            if fd is not None:
                os.close(fd)

    def look(self, seconds=0.0):
        """Reads what there is, for so long or to the end of both."""
        deadline = time.monotonic() + seconds
        while self.open:
            for fd in select.select(self.open, [], [], max(deadline - time.monotonic(), 0))[0]:
                try:
                    data = os.read(fd, 65536)
                except OSError:               # how Linux says that nobody has the terminal any more
                    data = b""
                if fd == self.fd:
                    self.got += data
                else:
                    self.said += data
                if not data:
                    self.open.remove(fd)
            if time.monotonic() >= deadline:
                return

    def hang_up(self):
        os.close(self.fd)
        self.open.remove(self.fd)
        self.fd = None

    def expect(self, what, times=1):
        eventually(lambda: self.look(0.05) or self.got.count(what) >= times or None, LIMIT_S)

    def expect_report(self, line, times=1):
        eventually(lambda: self.look(0.05) or self.said.decode().splitlines().count(line) >= times or None, LIMIT_S)

    def press(self, keys):
        os.write(self.fd, keys)

    def now(self):
        return termios.tcgetattr(self.fd)

    def asking(self):
        """Key by key and no echo."""
        return not self.now()[3] & (termios.ICANON | termios.ECHO)

    def end(self):
        """The exit code, once the process has ended."""
        def ended():
            self.look(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            return pid
        eventually(ended, LIMIT_S)
        self.look(1.0)
        return os.waitstatus_to_exitcode(self.status)


# ---- keys ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keys, answer", [(b"d", "d"), (b"D", "d"), (b"s", "s"), (b"x\x7f\xc3\xa4 7G", "g"), (b"\x04", "")])
def test_one_key_answers_and_the_terminal_is_as_it_was(keys, answer):
    with Terminal("report(ask()); answer(); screen.close()") as terminal:
        terminal.expect(KEYS)
        assert terminal.asking()
        terminal.press(keys)
        assert terminal.end() == 0
        assert terminal.said.decode().splitlines() == ["True", f"answer {answer!r}"]
        assert terminal.now() == terminal.settings
        assert [row.rstrip() for row in shown(terminal.got)] == ["gpurun: what now?", ""]   # nothing echoed, the keys are gone


def test_an_arrow_key_is_no_letter():
    with Terminal("ask(); answer()") as terminal:
        terminal.expect(KEYS)
        terminal.press(b"\x1b[D")                                    # the last of these three is a D
        terminal.look(0.4)
        assert terminal.said == b"" and terminal.asking()
        terminal.press(b"g")
        terminal.expect_report("answer 'g'")


def test_enter_alone_shows_the_question_again():
    with Terminal("ask(); answer()") as terminal:
        terminal.expect(KEYS)
        terminal.press(b"\r")
        terminal.expect(b"what now?", times=2)
        terminal.expect(KEYS, times=2)
        terminal.press(b"d")
        terminal.expect_report("answer 'd'")


def test_what_was_typed_before_the_question_does_not_answer_it():
    body = "screen.say('ready'); signal.sigtimedwait({signal.SIGUSR1}, 20); ask(); answer()"
    with Terminal("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + body) as terminal:
        terminal.expect(b"ready")
        terminal.press(b"ss")
        terminal.expect(b"ss")                                       # the echo: they have arrived
        os.kill(terminal.pid, signal.SIGUSR1)
        terminal.expect(KEYS)
        terminal.press(b"g")
        terminal.expect_report("answer 'g'")


def test_a_second_question_takes_the_place_of_the_first():
    with Terminal("ask()\nwhile not screen._drawn: time.sleep(0.01)\nask(); answer(); report(answers.empty())") as terminal:
        terminal.expect(KEYS, times=2)
        terminal.press(b"d")
        assert terminal.end() == 0 and terminal.said == b"answer 'd'\nTrue\n" and terminal.now() == terminal.settings


# ---- beside it goes on ---------------------------------------------------------------------------------------------------------

WRITER = """
def write():
    for number in range(3000):
        {method}(b"line %d\\n" % number)
        if number == 1000: half.set()
half = threading.Event()
writer = threading.Thread(target=write, daemon=True); writer.start(); half.wait(20)
ask(); answer(); writer.join(20); screen.close(); report("whole", not writer.is_alive())
"""


@pytest.mark.parametrize("method", ["screen.job_stdout", "screen.job_stderr", "screen.setup_output"])
def test_the_jobs_output_waits_and_is_whole_and_in_order_afterwards(method):
    with Terminal(WRITER.format(method=method)) as terminal:
        terminal.expect(KEYS)
        terminal.look(0.2)
        before = terminal.got
        terminal.look(0.4)
        assert terminal.got == before and before.endswith(KEYS)      # nothing moves while the question stands
        assert b"line 2999" not in before
        terminal.press(b"g")
        assert terminal.end() == 0 and b"whole True" in terminal.said
        rows = [row for row in shown(terminal.got) if row.startswith("line ")]
        assert rows == [f"line {number}" for number in range(3000)]


def test_a_stdout_that_is_a_pipe_waits_too(tmp_path):
    body = f"os.dup2(os.open({str(tmp_path / 'out')!r}, os.O_CREAT | os.O_WRONLY), 1); screen = Screen('terminal')\n"
    with Terminal(body + WRITER.format(method="screen.job_stdout")) as terminal:
        terminal.expect(KEYS)
        time.sleep(0.2)
        size = (tmp_path / "out").stat().st_size
        time.sleep(0.3)
        assert (tmp_path / "out").stat().st_size == size
        terminal.press(b"g")
        assert terminal.end() == 0
        assert (tmp_path / "out").read_text() == "".join(f"line {number}\n" for number in range(3000))


def test_talk_stands_above_the_question_and_the_live_line_stays_away():
    body = "screen.phase('run', 'on gpu1'); ask()\n" \
           "while not screen._drawn: time.sleep(0.01)\n" \
           "[(screen.live_tick(), time.sleep(0.05)) for _ in range(10)]; screen.warn('gpu1 is silent'); report('said'); answer()"
    with Terminal(body) as terminal:
        terminal.expect(KEYS)
        terminal.expect_report("said")
        eventually(lambda: terminal.look(0.05) or terminal.got.endswith(KEYS) or None, LIMIT_S)
        rows = [row.rstrip() for row in shown(terminal.got)]
        assert rows == ["gpurun: what now?", "gpurun: warning: gpu1 is silent", "[s] stop   [d] detach   [g] go on"]
        terminal.press(b"g")
        terminal.expect_report("answer 'g'")


def test_a_narrow_terminal_has_the_keys_on_one_row():
    with Terminal("import fcntl, struct; fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 20, 0, 0)); ask(); answer()") as terminal:
        terminal.expect(b"[s] stop")
        terminal.press(b"d")
        terminal.expect_report("answer 'd'")
        shown(terminal.got, width=20)


# ---- signals -------------------------------------------------------------------------------------------------------------------

def test_ctrl_c_is_a_signal_and_the_question_stands():
    with Terminal("signal.signal(signal.SIGINT, lambda *_: report('SIGINT')); ask(); answer()") as terminal:
        terminal.expect(KEYS)
        for count in (1, 2):
            terminal.press(b"\x03")
            terminal.expect_report("SIGINT", times=count)
        assert terminal.asking()
        terminal.press(b"d")
        assert terminal.end() == 0 and terminal.now() == terminal.settings


@pytest.mark.parametrize("where", ["a reader of the lock", "nowhere", "the lock"])
def test_a_handler_may_take_the_question_back_and_leave_at_once(where):
    """Whatever the main thread, or another one, is in the middle of."""
    hold = {"nowhere": "time.sleep(30)", "the lock": "with screen._lock: report('in'); time.sleep(30)",
            "a reader of the lock": "def hold():\n    with screen._lock: time.sleep(30)\n"
                                    "threading.Thread(target=hold, daemon=True).start(); time.sleep(30)"}[where]
    body = "def leave(*_): screen.stop_asking(); os._exit(7)\nsignal.signal(signal.SIGINT, leave); ask()\n" \
           "while not screen._drawn: time.sleep(0.01)\n"
    with Terminal(body + hold) as terminal:
        terminal.expect(KEYS)
        time.sleep(0.2)
        terminal.press(b"\x03")
        assert terminal.end() == 7 and terminal.now() == terminal.settings
        if where != "a reader of the lock":
            assert [row.rstrip() for row in shown(terminal.got)] == ["gpurun: what now?", ""]


def test_taking_it_back_lets_the_output_go_on_and_nobody_is_answered():
    body = "ask(); threading.Timer(0.5, screen.stop_asking).start(); screen.job_stdout(b'after\\n'); report(answers.empty())\n" \
           "[time.sleep(0.05) for _ in range(600) if threading.active_count() > 1]; report(answers.empty(), threading.active_count())"
    with Terminal(body) as terminal:
        terminal.expect(b"after")
        assert terminal.end() == 0 and terminal.now() == terminal.settings
        assert terminal.said == b"True\nTrue 1\n"


def test_closing_the_screen_takes_the_question_back():
    with Terminal("ask()\nwhile not screen._drawn: time.sleep(0.01)\nscreen.close()") as terminal:
        assert terminal.end() == 0 and terminal.now() == terminal.settings


def test_ctrl_backslash_leaves_no_broken_terminal():
    with Terminal("ask(); answer()") as terminal:
        terminal.expect(KEYS)
        terminal.press(b"\x1c")
        assert terminal.end() == -signal.SIGQUIT and terminal.now() == terminal.settings


def test_a_terminal_that_hangs_up_counts_as_no_answer():
    with Terminal("signal.signal(signal.SIGHUP, signal.SIG_IGN); ask(); answer(); screen.job_stdout(b'x'); report('on')") as terminal:
        terminal.expect(KEYS)
        terminal.hang_up()
        terminal.expect_report("answer ''")
        terminal.expect_report("on")
        assert terminal.end() == 0


# ---- a shell's job control -----------------------------------------------------------------------------------------------------

def stopped():
    """A shell whose job asks, stopped with Ctrl-Z."""
    terminal = Terminal("ask(); answer()", shell=True)
    terminal.expect(b"$ ")
    terminal.press(b'"$PYTHON" -c "$BODY"\n')
    terminal.expect(KEYS)
    eventually(terminal.asking, LIMIT_S)
    terminal.press(b"\x1a")
    terminal.expect(b"Stopped")
    eventually(lambda: terminal.now()[3] & termios.ICANON and terminal.now()[3] & termios.ECHO, LIMIT_S)
    return terminal


def test_ctrl_z_gives_the_shell_a_sound_terminal_and_fg_asks_again():
    with stopped() as terminal:
        terminal.press(b"echo typed\n")
        terminal.expect(b"typed", times=2)                           # the echo, and what it wrote
        terminal.press(b"fg\n")
        terminal.expect(KEYS, times=2)
        eventually(terminal.asking, LIMIT_S)
        terminal.press(b"d")
        terminal.expect_report("answer 'd'")
        eventually(lambda: terminal.now()[3] & termios.ICANON, LIMIT_S)
        terminal.press(b"exit\n")
        assert terminal.end() == 0 and terminal.now() == terminal.settings


def test_in_the_background_nobody_answers_and_nothing_waits():
    with stopped() as terminal:
        terminal.press(b"bg\n")
        terminal.expect_report("answer ''")


def test_a_job_in_the_background_is_not_asked():
    with Terminal("report(ask())", shell=True) as terminal:
        terminal.expect(b"$ ")
        terminal.press(b'"$PYTHON" -c "$BODY" & wait\n')
        terminal.expect_report("False")


# ---- nobody there --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("before", ["os.dup2(os.open('/dev/null', os.O_RDONLY), 0)", "os.dup2(os.open('/dev/null', os.O_WRONLY), 2)",
                                    "screen = Screen('json')", "screen = Screen('quiet')", "screen = Screen('plain')"])
def test_without_a_terminal_on_both_ends_or_in_another_mode_nobody_is_asked(before):
    with Terminal(before + "; report(ask()); screen.job_stdout(b''); report('on')") as terminal:
        assert terminal.end() == 0
        assert terminal.said == b"False\non\n" and terminal.got == b"" and terminal.now() == terminal.settings


def test_without_a_controlling_terminal_nobody_is_asked():
    """stdin and stderr are one, but it isn't ours: what is read there isn't meant for us."""
    master, slave = pty.openpty()
    reader, writer = os.pipe()
    try:
        env = {**os.environ, "REPORT": str(writer), "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
        subprocess.run([sys.executable, "-c", PRELUDE + "report(ask())"], stdin=slave, stderr=slave, stdout=slave, pass_fds=[writer], env=env,
                       start_new_session=True, timeout=LIMIT_S, check=True)
        assert os.read(reader, 100) == b"False\n"
    finally:
        for fd in (master, slave, reader, writer):
            os.close(fd)
