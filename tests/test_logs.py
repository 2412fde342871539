"""The job's output: every byte, in order, at once, in both places, whatever the bytes are and whoever reads them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import eventually
from test_screen import shown

PEAK_KB = 150_000
GPURUN = f"{sys.executable} -m gpurun"
TRICKY = b"\xed\xee\xef|\xff\xfe|\xc3|\xe2\x82|\xf0\x9f\x98|\x00|\x1b[31m|\r|\xc3\xa9"   # Latin-1, half characters, NUL, an escape


def printing(path: Path) -> str:
    return f"cat {path}"


def peak_kb(pid: int) -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1))


def run_to_file(warm, job, target: Path, *options) -> tuple[int, int]:
    """(exit code, peak kB of gpurun) of a run whose stdout goes to a file."""
    # A process counts the memory of the one that it was forked from as its own: not pytest's, but that of a small one in between.
    between = ("import os, subprocess, sys; p = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL); _, status, usage = os.wait4(p.pid, 0); "
               "print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, file=sys.stderr)")
    with open(target, "wb") as out:
        done = subprocess.run([sys.executable, "-c", between, sys.executable, "-m", "gpurun", str(job), *options], cwd=warm.work, env=warm.env,
                              stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, timeout=120)
    code, peak = map(int, done.stderr.split())
    return code, peak


def sha(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(stream.read()).hexdigest()


# ---- all of it, in order --------------------------------------------------------------------------------------------------------------

def test_a_million_lines_and_the_end_at_once(warm):
    target = warm.work / "million"
    code, peak = run_to_file(warm, warm.job("seq 1000000; exit 5", name="million"), target)
    wanted = "".join(f"{number}\n" for number in range(1, 1_000_001)).encode()
    assert code == 5 and target.read_bytes() == wanted and (warm.latest / "stdout.log").read_bytes() == wanted
    assert peak < PEAK_KB and peak_kb(warm.agent()["pid"]) < PEAK_KB


def test_one_line_of_500_mb(warm):
    size = 500_000_000
    target = warm.work / "line"
    code, peak = run_to_file(warm, warm.job(f"head -c {size} /dev/zero | tr '\\0' x", name="line"), target)
    try:
        assert code == 0 and target.stat().st_size == (warm.latest / "stdout.log").stat().st_size == size
        assert sha(target) == sha(warm.latest / "stdout.log") == sha(warm.node_dir / "runs" / warm.latest.name / "run.out")
        assert peak < PEAK_KB and peak_kb(warm.agent()["pid"]) < PEAK_KB
    finally:
        for path in (target, warm.latest / "stdout.log", warm.node_dir / "runs" / warm.latest.name / "run.out"):
            path.unlink()


@pytest.mark.parametrize("language", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text_come_through(warm, language):
    data = warm.work / "tricky"
    data.write_bytes(TRICKY)
    done = warm.gpurun(warm.job(f"cat {data}; cat {data} >&2; exit 1", name="tricky"), "--quiet", env=dict(warm.env, LANG=language, LC_ALL=language))
    assert done.returncode == 1 and done.stdout == TRICKY and done.stderr.startswith(TRICKY)
    assert (warm.latest / "stdout.log").read_bytes() == (warm.latest / "stderr.log").read_bytes() == TRICKY


def test_stdout_and_stderr_stay_apart_and_each_in_order(warm):
    done = warm.gpurun(warm.job("for i in $(seq 500); do echo o$i; echo e$i >&2; done", name="apart"), "--quiet")
    assert done.stdout == "".join(f"o{number}\n" for number in range(1, 501)).encode()
    assert done.stderr == "".join(f"e{number}\n" for number in range(1, 501)).encode()
    assert (warm.latest / "stderr.log").read_bytes() == done.stderr


def test_a_last_line_without_its_newline(warm):
    assert warm.gpurun(warm.job("printf 'a\\nb'", name="noeol")).stdout == b"a\nb"


def test_progress_bars_stay_as_they_are(warm):
    done = warm.gpurun(warm.job("for i in $(seq 50); do printf '\\r%d %%' $i; done; echo", name="bar"))
    assert done.stdout == "".join(f"\r{number} %" for number in range(1, 51)).encode() + b"\n"


# ---- at once ------------------------------------------------------------------------------------------------------------------------------

def test_a_line_is_there_within_a_second(warm):
    """The job prints and waits for us to have seen it, nine times, without a newline too: nothing waits for more to come. A busy machine may be
    late with some of them."""
    took = []
    process = warm.start(warm.job(f"for i in 1 2 3 4 5 6 7 8 9; do printf \"line $i.\"; while [ ! -e {warm.work}/seen$i ]; do sleep 0.01; done; done", name="lag"))
    for number in range(1, 10):
        began, got = time.monotonic(), b""
        while not got.endswith(b"."):
            got += os.read(process.stdout.fileno(), 100)
        assert got == b"line %d." % number
        took.append(time.monotonic() - began)
        (warm.work / f"seen{number}").touch()
    assert sorted(took[1:])[4] < 1, took
    process.communicate()
    assert process.returncode == 0


def test_a_burst_before_a_silence_is_all_there(warm):
    process = warm.start(warm.job(f"seq 100000; printf tail; while [ ! -e {warm.work}/burst.go ]; do sleep 0.01; done", name="burst"))
    wanted, got = "".join(f"{number}\n" for number in range(1, 100_001)).encode() + b"tail", b""
    while len(got) < len(wanted):
        assert select.select([process.stdout], [], [], 60)[0], got[-20:]
        got += os.read(process.stdout.fileno(), 1 << 20)
    assert got == wanted
    (warm.work / "burst.go").touch()
    assert process.communicate()[0] == b""


# ---- readers --------------------------------------------------------------------------------------------------------------------------------

def pipeline(warm, script: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["bash", "-c", script + '; echo "${PIPESTATUS[*]}" > status'], cwd=warm.work, env=warm.env, capture_output=True, timeout=60)


def test_head_ends_the_output_and_not_the_run(warm):
    job = warm.job("seq 200000; echo last > x", name="head", outputs=["x"])
    done = pipeline(warm, f"{GPURUN} {job} | head -1")
    assert done.stdout == b"1\n" and (warm.work / "status").read_text() == "0 0\n" and b"Traceback" not in done.stderr and b"roken" not in done.stderr
    assert (warm.latest / "stdout.log").read_bytes().endswith(b"\n200000\n") and (warm.latest / "outputs/x").read_text() == "last\n"
    done = pipeline(warm, f"{GPURUN} {job} --json | head -1")
    assert done.stdout.count(b"\n") == 1 and (warm.work / "status").read_text() == "0 0\n" and done.stderr == b""


def test_a_reader_that_pauses_loses_nothing(warm):
    process = warm.start(warm.job("seq 2000000; exit 4", name="pause"))
    eventually(lambda: (warm.node_dir / "runs" / warm.latest.name / "run.exit").exists() if warm.latest.name.startswith("pause") else False)
    time.sleep(1)                                                    # the job has ended long ago; we haven't read a byte
    assert process.poll() is None
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 4 and hashlib.sha256(out).digest() == hashlib.sha256(
        "".join(f"{number}\n" for number in range(1, 2_000_001)).encode()).digest()


def test_logs_prints_what_a_run_printed(warm):
    warm.gpurun(warm.job("seq 100000; echo err >&2", name="logs", setup="echo prepared"))
    done = warm.gpurun("logs", "latest")
    assert done.stdout == (warm.latest / "stdout.log").read_bytes() and done.stderr == b"err\n"
    assert warm.gpurun("logs", warm.latest.name[:10], "--setup").stdout == b"prepared\n"
    done = pipeline(warm, f"{GPURUN} logs latest | head -1")
    assert done.stdout == b"1\n" and (warm.work / "status").read_text() == "0 0\n" and done.stderr == b""


def test_logs_of_a_run_that_goes_on_says_so(warm):
    process = warm.start(warm.job(f"echo up; while [ ! -e {warm.work}/more.go ]; do sleep 0.01; done; echo end", name="more"))
    assert process.stdout.readline() == b"up\n"
    done = warm.gpurun("logs", "latest")
    assert done.stdout == b"up\n" and b"isn't over" in done.stderr
    (warm.work / "more.go").touch()
    assert process.communicate()[0] == b"end\n"


# ---- ways of showing it ----------------------------------------------------------------------------------------------------------------------

def test_json_objects_give_the_exact_bytes_again(warm):
    data = warm.work / "json-bytes"
    data.write_bytes(TRICKY + "é€😀".encode() * 50_000)
    done = warm.gpurun(warm.job(f"cat {data}; head -c 1000 {data} >&2", name="json", setup=f"cat {data}"), "--json")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("type" in item for item in objects) and objects[-1]["type"] == "result" and done.stderr == b""

    def joined(kind: str) -> bytes:
        return b"".join(base64.b64decode(item["data_base64"]) if "data_base64" in item else item["text"].encode()
                        for item in objects if item["type"] == kind)
    assert joined("stdout") == joined("setup") == data.read_bytes() and joined("stderr") == data.read_bytes()[:1000]
    assert [item["name"] for item in objects if item["type"] == "phase"][-2:] == ["setup", "run"]


def test_quiet_is_only_the_job_warnings_and_errors(warm):
    done = warm.gpurun(warm.job("echo out; echo err >&2", name="quiet", setup="echo hush"), "--quiet")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    done = warm.gpurun(warm.job("exit 3", name="quiet"), "-q")
    assert done.stdout == b"" and b"exit code 3" in done.stderr


def on_a_terminal(warm, job, **extra) -> bytes:
    """All that a terminal gets."""
    env = dict({name: value for name, value in warm.env.items() if name != "CI"}, TERM="xterm", **extra)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(warm.work)
        os.execve(sys.executable, [sys.executable, "-m", "gpurun", str(job)], env)
    got = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:                                              # the last writer has closed it
            break
        if not data:
            break
        got += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, got
    os.close(terminal)
    return got


def test_on_a_terminal_the_live_line_gives_way_to_the_jobs_lines(warm):
    script = "for i in 1 2 3; do echo line $i; sleep 0.3; done; printf part; sleep 0.4; echo ial; echo err >&2"
    got = on_a_terminal(warm, warm.job(script, name="terminal"))
    rows = [row.rstrip() for row in shown(got)]
    assert [row for row in rows if not row.startswith("gpurun:")] == ["line 1", "line 2", "line 3", "partial", "err", ""]
    assert rows[-2].startswith("gpurun: ") and "COMPLETED" in rows[-2]
    assert re.search(rb"\rrun +\d+ s", got) and b"\x1b[32m" in got   # a live line was there, in colour what is worth it
    assert got.count(b"line 2\r\n") == 1


def test_no_color_means_none(warm):
    assert b"\x1b[3" not in on_a_terminal(warm, warm.job("echo x", name="mono"), NO_COLOR="1")


def test_ctrl_c_on_a_terminal(warm):
    """The terminal sends it to the whole foreground group: gpurun takes it once, asks once, and does what the key says."""
    env = dict({name: value for name, value in warm.env.items() if name != "CI"}, TERM="xterm")
    job = warm.job("echo up; sleep 600", name="keys")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(warm.work)
        os.execve(sys.executable, [sys.executable, "-m", "gpurun", str(job)], env)
    got = b""
    while b"up\r\n" not in got:
        got += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    while b"[g] go on" not in got:
        got += os.read(terminal, 65536)
    os.write(terminal, b"s")
    while True:
        try:
            got += os.read(terminal, 65536)
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130 and b"Traceback" not in got
    assert got.count(b"stopping the job") == 1 and b"stopped by the operator" in got.splitlines()[-1]
    os.close(terminal)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_logs_that_cannot_be_written_are_a_failure_and_a_reader_that_leaves_is_none(warm):
    assert warm.gpurun(warm.job("seq 100000", name="full-stdout")).returncode == 0
    with open("/dev/full", "wb") as full:
        assert warm.gpurun("logs", "latest", stdout=full).returncode == 125
    reader, writer = os.pipe()
    os.close(reader)
    done = warm.gpurun("logs", "latest", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
