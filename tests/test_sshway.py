"""Where no UDP gets through, or the node's agent has no iroh: every command over SSH, and back to UDP when that works again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here, end_agents, eventually
from links import Wan, linked, needs_a_network, use
from running import Running, end_all

BIG = 50 << 20


@pytest.fixture(scope="module")
def link(tmp_path_factory) -> Iterator[Wan]:
    """A link on which UDP is blocked, and an operator that has used it once; what that took."""
    with linked(tmp_path_factory.mktemp("blocked"), "s", rtt="20ms", udp="drop") as made:
        made.here = made.operator("first")
        begun = time.monotonic()
        made.first = made.here.gpurun(made.here.job("echo one", name="first"))
        made.first_s, made.first_logins, made.first_record = time.monotonic() - begun, made.logins, made.here.record()
        yield made


@pytest.fixture(scope="module")
def strict(tmp_path_factory, link) -> Iterator[Wan]:
    """The same with an SSH server that forwards no sockets, and whose login shell chatters."""
    with linked(tmp_path_factory.mktemp("strict"), "t", "AllowStreamLocalForwarding=no", rtt="20ms", udp="drop") as made:
        (made.home / ".bashrc").write_text("echo welcome\n")
        made.here = made.operator("there", lib=link.home / "first/lib")
        yield made


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    yield
    end_all()


def cache(here: Here) -> Path:
    (path,) = (here.home / ".config/gpurun/nodes").glob("*.json")
    return path


def known(here: Here) -> dict[str, Any]:
    return json.loads(cache(here).read_text())


def agent_of(link: Wan, name: str) -> dict[str, Any]:
    return json.loads((link.home / name / "agent/endpoint.json").read_text())


@needs_a_network
def test_the_first_use_goes_over_the_connection_that_the_deploy_opened_and_the_second_at_once(link):
    here = link.here
    print(f"first use: {link.first_s:.1f} s")
    assert link.first.returncode == 0 and link.first.stdout == b"one\n", link.first.stderr.decode()
    assert link.first_record["path"] == "ssh" and link.first_logins == 1
    said = link.first.stderr.decode()
    assert said.count("no UDP gets through to node: going over SSH") == 1 and "`udp_port`" in said and "doesn't answer" not in said
    logins, begun = link.logins, time.monotonic()
    done = here.gpurun(here.job("echo two"))
    print(f"second: {time.monotonic() - begun:.1f} s")
    assert done.returncode == 0 and done.stdout == b"two\n" and here.record()["path"] == "ssh" and link.logins == logins + 1
    assert done.stderr.decode().count("going over SSH") == 1 and "doesn't answer" not in done.stderr.decode()


@needs_a_network
def test_every_command_goes_over_ssh(link):
    here = link.here
    job = here.job("seq 3; echo 1 > x; while [ ! -e go ]; do sleep 0.02; done; echo end; exit 3", name="far", outputs=["x"])
    done = here.gpurun("submit", job)
    run_id = done.stdout.decode().strip()
    assert done.returncode == 0, done.stderr.decode()
    there = link.home / "first/runs" / run_id
    eventually(lambda: (there / "work/x").exists())
    assert "run for" in here.gpurun("status", "--refresh").stdout.decode()
    assert here.gpurun("logs", run_id, "--tail", "1").stdout == b"3\n" and here.gpurun("fetch", run_id, "x").returncode == 0
    assert here.gpurun("wait", run_id, "--timeout", "0.5").returncode == 124
    doctor = here.gpurun("doctor")
    assert b"over ssh in" in doctor.stdout and b"FAIL  node" not in doctor.stdout, doctor.stdout.decode()
    (there / "work/go").touch()
    done = here.gpurun("attach", run_id)
    assert done.returncode == 3 and done.stdout == b"1\n2\n3\nend\n", done.stderr.decode()
    assert (here.runs / run_id / "outputs/x").read_text() == "1\n"
    assert here.gpurun("rm", run_id).returncode == 0 and not there.exists()
    run_id = here.gpurun("submit", here.job("sleep 600", name="far")).stdout.decode().strip()
    assert here.gpurun("stop", run_id, "--grace", "0").returncode == 0 and here.record()["state"] == "FAILED"
    assert here.gpurun("submit", here.job("echo > x", name="plan", outputs=["x"]), "--plan", "3.1", "--phase", "3", "--verify", "true").returncode == 0
    eventually(lambda: (done := here.gpurun("poll")).returncode == 0 and b"\"ended\"" in done.stdout, 60)
    assert here.gpurun("up").returncode == 0 and b"ready" in here.gpurun("nodes").stdout
    assert here.gpurun("down").returncode == 0 and not cache_files(here)
    logins = link.logins
    assert here.gpurun("up").returncode == 0 and known(here)["blocked"]   # it finds that out as a run does
    print(f"up: {link.logins - logins} logins")
    assert here.gpurun(here.job("true")).returncode == 0 and here.record()["path"] == "ssh"


def cache_files(here: Here) -> list[Path]:
    return list((here.home / ".config/gpurun/nodes").glob("*.json"))


@needs_a_network
def test_an_operator_that_is_killed_an_agent_that_is_killed_and_a_list_of_operators_that_is_lost(link):
    here = link.here
    run = Running(here, here.job("echo begun; while [ ! -e go ]; do sleep 0.02; done; echo end; echo 1 > o", name="long", outputs=["o"]))
    run.until("begun")
    run.process.kill()
    run.process.wait()
    run_id = here.latest.name
    back = Running(here, "attach", run_id)
    back.until("begun")
    os.kill(agent_of(link, "first")["pid"], signal.SIGKILL)   # in the middle: it is started again, and the run taken up
    eventually(lambda: "is back" in back.err or back.process.poll() is not None, 90)
    (link.home / "first/runs" / run_id / "work/go").touch()
    assert back.process.wait(120) == 0 and here.record()["path"] == "ssh", back.err
    assert (here.latest / "outputs/o").read_text() == "1\n" and back.out.endswith("end\n")
    (link.home / "first/agent/authorized").write_text("")      # whoever isn't on it gets no further than the first line
    assert here.gpurun(here.job("true")).returncode == 0
    assert (link.home / "first/agent/authorized").read_text().strip()


@needs_a_network
def test_50_mb_both_ways_beside_another_run_that_waits(link):
    here = link.here
    (here.work / "w").mkdir()
    (here.work / "w/in").write_bytes(os.urandom(BIG))
    first = here.start("--wait", here.job("cp in out; seq 100000; echo done >&2", name="bulk", workspace={"workdir": "w"}, outputs=["out"]))
    second = here.start("--wait", here.job("echo small", name="small"))
    printed = first.communicate(timeout=300)[0]
    assert first.returncode == 0 and printed == "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert second.communicate(timeout=120)[0] == b"small\n" and second.returncode == 0
    (out,) = here.runs.glob("bulk-*/outputs/out")
    assert out.read_bytes() == (here.work / "w/in").read_bytes()


@needs_a_network
def test_a_server_that_forwards_no_sockets_runs_a_command_that_joins_them(strict):
    here = strict.here
    (here.work / "w").mkdir()
    (here.work / "w/in").write_bytes(os.urandom(3 << 20))
    for _ in range(2):
        done = here.gpurun(here.job("cat in > out; echo hi", workspace={"workdir": "w"}, outputs=["out"]))
        assert done.returncode == 0 and done.stdout == b"hi\n" and here.record()["path"] == "ssh", done.stderr.decode()
        assert (here.latest / "outputs/out").read_bytes() == (here.work / "w/in").read_bytes()
    os.kill(agent_of(strict, "there")["pid"], signal.SIGKILL)
    assert here.gpurun(here.job("true")).returncode == 0        # nobody is at the socket: it is looked after
    eventually(lambda: not [one for one in Path("/proc").glob("[0-9]*/cmdline") if b"join\0--socket\0" + bytes(strict.home) in read(one)])


@needs_a_network
def test_a_node_with_musl_is_sent_no_iroh_and_says_why_it_goes_over_ssh(strict):
    (strict.home / "bin").mkdir()
    for name, says in (("getconf", "exit 1"), ("ldd", "printf 'musl libc (x86_64)\\nVersion 1.2.4\\n'")):
        (strict.home / "bin" / name).write_text(f"#!/bin/sh\n{says}\n")
        (strict.home / "bin" / name).chmod(0o755)
    before = (strict.home / ".bashrc").read_text()
    (strict.home / ".bashrc").write_text('export PATH="$HOME/bin:$PATH"\n')
    try:
        here = strict.operator("musl")
        done = here.gpurun(here.job("echo hi"))
        assert done.returncode == 0 and done.stdout == b"hi\n" and here.record()["path"] == "ssh", done.stderr.decode()
        assert "going over SSH, as it has musl as its C library, and iroh loads only with glibc" in done.stderr.decode()
        assert not (strict.home / "musl/lib").exists() and agent_of(strict, "musl")["carrier"] == "ssh"
        assert b"has musl as its C library" in here.gpurun("doctor").stdout
    finally:
        (strict.home / ".bashrc").write_text(before)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@needs_a_network
def test_an_agent_whose_iroh_can_not_be_loaded_and_whose_folder_has_a_long_name(link):
    """As with musl or an old glibc, but for the probe's word on it (test_bootstrap.py)."""
    name = f"{os.getpid():n>90}"                              # its socket lies in /tmp
    here = link.operator(name)
    shutil.copytree(link.home / "first/lib", link.home / name / "lib")
    for module in (link.home / name / "lib").glob("*/iroh/__init__.py"):
        module.write_text("raise OSError('version GLIBC_2.28 not found')\n")
    done = here.gpurun(here.job("echo hi"))
    assert done.returncode == 0 and done.stdout == b"hi\n" and here.record()["path"] == "ssh", done.stderr.decode()
    assert "GLIBC_2.28 not found" in done.stderr.decode() and "no UDP" not in done.stderr.decode()
    agent = agent_of(link, name)
    assert agent["addresses"] == [] and agent["socket"].startswith("/tmp/gpurun-") and os.stat(agent["socket"]).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(agent["socket"])).st_mode & 0o777 == 0o700
    logins, begun = link.logins, time.monotonic()
    assert here.gpurun(here.job("echo hi")).returncode == 0 and link.logins == logins + 1 and time.monotonic() - begun < 40
    assert here.gpurun("down").returncode == 0
    eventually(lambda: not os.path.exists(os.path.dirname(agent["socket"])))


@needs_a_network
def test_udp_is_blocked_in_the_middle_of_a_run_then_remembered_and_found_again(link):
    here = link.operator("middle", lib=link.home / "first/lib", lost_after_s=24)   # with little patience SSH is tried at once
    link.set(udp="pass")
    try:
        assert here.gpurun(here.job("true", name="warm")).returncode == 0 and here.record()["path"] == "direct"
        run = Running(here, here.job("echo begun; while [ ! -e go ]; do sleep 0.02; done; echo end", name="long"))
        run.until("begun")
        link.set(udp="drop")
        eventually(lambda: "is back" in run.err or run.process.poll() is not None, 90)
        assert here.record()["path"] == "ssh" and "no UDP gets through to node: going over SSH" in run.err
        (link.home / "middle/runs" / here.latest.name / "work/go").touch()
        assert run.process.wait(120) == 0 and run.out.endswith("end\n"), run.err

        link.set(udp="pass")
        assert here.gpurun(here.job("true", name="soon")).returncode == 0 and here.record()["path"] == "ssh"   # it isn't time yet
        assert known(here)["blocked"]
        cache(here).write_text(json.dumps(dict(known(here), retry_at=0.0)))
        assert here.gpurun(here.job("true", name="later")).returncode == 0 and here.record()["path"] == "ssh"
        eventually(lambda: not known(here)["blocked"])
        logins = link.logins
        assert here.gpurun(here.job("true", name="after")).returncode == 0 and here.record()["path"] == "direct" and link.logins == logins

        link.set(udp="drop")                      # a warm run whose agent doesn't answer any more
        begun = time.monotonic()
        done = here.gpurun(here.job("true", name="again"))
        print(f"the detour: {time.monotonic() - begun:.1f} s")
        assert done.returncode == 0 and here.record()["path"] == "ssh" and link.logins == logins + 1, done.stderr.decode()
        assert done.stderr.decode().count("doesn't answer") == 1
    finally:
        link.set(udp="drop")


@needs_a_network
def test_on_this_machine_without_loopback_udp_the_socket_is_the_way(here, tmp_path):
    drop = "ip link set lo up && ip rule add pref 1 lookup local && ip rule del pref 0 && ip rule add pref 0 ipproto udp blackhole"
    job, gpurun = here.job("echo hi; echo 1 > o", outputs=["o"]), f"{sys.executable} -m gpurun"
    script = f"{drop}\n{gpurun} {job} && {gpurun} {job} && {gpurun} fetch latest o && {gpurun} doctor"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], cwd=here.work, env=here.env, capture_output=True, timeout=300)
    said = done.stderr.decode()
    assert done.returncode == 0 and done.stdout.startswith(b"hi\nhi\n"), said + done.stdout.decode()
    assert said.count("no UDP gets through to local: going over its socket") == 1 and said.count("going over its socket") == 3, said


def test_on_this_machine_an_agent_without_iroh_is_reached_by_its_socket(here, tmp_path):
    """Its Python can't load it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['iroh'] = None\n")
    (here.work / "cluster.toml").write_text(f'[provider]\nkind = "local"\npython = "{tmp_path}/venv/bin/python"\n')
    for _ in range(2):
        done = here.gpurun(here.job("echo hi; echo 1 > o", outputs=["o"]))
        assert done.returncode == 0 and done.stdout == b"hi\n" and (here.latest / "outputs/o").exists(), done.stderr.decode()
        assert done.stderr.decode().count("going over its socket") == 1
    end_agents(here.folder)
    assert here.gpurun(here.job("true")).returncode == 0
