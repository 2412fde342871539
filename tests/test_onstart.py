"""What a rented machine runs at each start of its container: the real text, under the shells that images have; a server stands for the API."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import eventually
from test_guard import KEY, Api, api, command_lines  # noqa: F401

from gpurun.errors import ConfigError
from gpurun.onstart import MAX_BYTES, script

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAM"
SHELLS = [[path] + rest for name, *rest in (["dash"], ["bash"], ["bash", "--posix"], ["busybox", "sh"]) for path in [shutil.which(name)] if path]
LONG = 100_000


class Machine:
    """A container: a home, an environment, and where images have their variables."""

    def __init__(self, folder: Path, api: Api, lease_s: float = LONG, end_s: float = 0, **environ: str) -> None:
        self.home, self.api = folder / "home of root", api
        self.home.mkdir(parents=True)
        self.agent = self.home / "it's" / ".gpurun" / "agent"
        self.marks = self.agent.parent.parent
        text = script(PUBLIC + " me@laptop", lease_s, end_s, "~/it's/.gpurun", api.url)
        for path in ("/proc/1/environ", "/etc/environment"):
            assert path in text
            text = text.replace(path, f'"{self.home}{path}"')
            (self.home / path[1:]).parent.mkdir(parents=True)
        self.file = folder / "onstart.sh"
        self.file.write_text(text)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.home), **environ}

    def start(self, shell: list[str] = SHELLS[0]) -> "subprocess.CompletedProcess[bytes]":
        """Runs it to its end, as the provider does; the switch stays."""
        done = subprocess.run([*shell, str(self.file)], env=self.env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done

    def switches(self) -> list[int]:
        """The switches that are at work. Those of us that are being forked look the same for a moment: only leaders of a session count."""
        leaders = []
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):       # it has just ended
                leaders += [pid] if os.getsid(pid) == pid else []
        return leaders

    def processes(self) -> list[int]:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"HOME={self.home}\0".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    os.getsid(int(name))
                    found.append(int(name))
        return found

    def stop(self) -> None:
        """As the container's end: everything in it is gone, its disk stays."""
        while self.processes():
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def works(self) -> None:
        """The agent shows that it is alive."""
        self.agent.mkdir(parents=True, exist_ok=True)
        (self.agent / "alive").touch()


OWN = {"CONTAINER_ID": "77", "CONTAINER_API_KEY": KEY}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Any]:
    made: list[Machine] = []

    def make(*args: Any, **options: Any) -> Machine:
        made.append(Machine(tmp_path / f"machine{len(made)}", *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def apis() -> Iterator[Any]:
    made: list[Api] = []

    def make() -> Api:
        made.append(Api())
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def test_its_operator_is_let_in_and_nobody_is_locked_out(machine, api):
    for shell in SHELLS:
        one = machine(api)
        keys = one.home / ".ssh" / "authorized_keys"
        keys.parent.mkdir(mode=0o777)
        keys.write_text("ssh-rsa AAAA of the provider")            # no newline at its end
        assert one.start(shell).stderr == b"" and (one.marks / ".gpurun-onstart").read_text() == "done\n", "others can see that it ran"
        one.start(shell)
        assert keys.read_text() == f"ssh-rsa AAAA of the provider\n{PUBLIC} gpurun\n"
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600 and stat.S_IMODE(keys.parent.stat().st_mode) == 0o700
        assert (one.home / ".no_auto_tmux").exists()
        bare = machine(api)
        assert bare.start(shell).stderr == b"" and (bare.home / ".ssh" / "authorized_keys").read_text() == f"{PUBLIC} gpurun\n"
    assert one.file.read_text().splitlines()[0].endswith('touch "$R/.no_auto_tmux"')


def test_a_machine_to_which_nobody_comes_ends_itself_whatever_its_shell(machine, apis):
    started = []
    for shell in SHELLS:
        one = machine(apis(), lease_s=1, **OWN)
        one.api.answers = [(500, b""), (429, b"")]
        one.start(shell)
        started.append(one)
    for one in started:
        assert one.api.wait(4, 60)[:4] == ["DELETE", "DELETE", "DELETE", "PUT"], "again and again, and stopped meanwhile"
        assert one.api.asked[0] == ("DELETE", "/api/v0/instances/77/", f"Bearer {KEY}", b"{}")
        assert one.api.asked[3] == ("PUT", "/api/v0/instances/77/", f"Bearer {KEY}", b'{"state": "stopped"}')


def tools(folder: Path, without: tuple[str, ...]) -> str:
    """A PATH of an image that lacks these."""
    folder.mkdir()
    for name in ("sh", "cat", "chmod", "chown", "curl", "date", "grep", "head", "id", "ln", "mkdir", "mktemp", "python3", "readlink", "rm", "sed",
                 "setsid", "sleep", "stat", "tail", "touch", "tr", "wget"):
        path = os.path.realpath(shutil.which(name) or "/nowhere")
        if name == "python3":                                      # one that a version manager would have to find first is none in an image
            path = os.path.realpath(shutil.which("python3", path="/usr/bin") or sys.executable)
        if name not in without and os.path.exists(path):
            (folder / name).symlink_to(path)
    return str(folder)


def test_the_key_is_in_no_command_line_whatever_tool_the_image_has_and_wherever_the_key_is(machine, apis, tmp_path):
    """The server holds each request until everybody's command line has been looked at."""
    seen: list[str] = []
    started = {}
    for tool, others in (("curl", ()), ("python3", ("curl", "setsid")), ("wget", ("curl", "python3"))):
        if shutil.which(tool) is None:
            continue
        one = machine(apis(), lease_s=1)
        one.env["PATH"] = tools(tmp_path / f"with {tool}", others)
        one.api.before = lambda: seen.extend(command_lines())
        if tool == "curl":
            one.env.update(OWN)
        elif tool == "python3":
            (one.home / "proc/1/environ").write_bytes(f"PATH=/bin\0VAST_CONTAINERLABEL=C.77\0CONTAINER_API_KEY={KEY}\0X=1\0".encode())
        else:
            (one.home / "etc/environment").write_text(f"A=two words\nexport CONTAINER_ID='77'\nCONTAINER_API_KEY=\"{KEY}\"\n")
        one.start([shutil.which("dash") or "sh"])
        started[tool] = one
    assert started
    for tool, one in started.items():
        assert one.api.wait(1, 60)[0] == "DELETE"
        assert one.api.asked[0] == ("DELETE", "/api/v0/instances/77/", f"Bearer {KEY}", b"{}"), tool
        assert any(tool in line and one.api.url in line for line in seen), tool
    assert not [line for line in seen if KEY in line]


def test_an_agent_that_works_keeps_the_machine_and_one_that_has_stopped_does_not(machine, api):
    one = machine(api, lease_s=5, **OWN)
    one.works()
    os.utime(one.agent / "alive", (1e9, 1e9))                      # of the container before this one
    one.start()
    deadline = time.monotonic() + 7.5
    while time.monotonic() < deadline:
        one.works()
        time.sleep(0.1)                                            # an agent does so every 10 s
    assert api.asked == []
    assert api.wait(1, 60)[0] == "DELETE"


def test_a_start_later_on_gets_no_time_of_its_own(machine, api):
    one = machine(api, end_s=50, **OWN)
    one.start()
    first = one.marks / ".gpurun-first"
    assert abs(int(first.read_text()) - time.time()) < 40
    eventually(one.switches)
    one.stop()
    first.write_text(f"{int(time.time()) - 60}\n")                 # it was stopped, and somebody's bid made it come back
    one.works()
    one.start()
    assert api.wait(1, 60)[0] == "DELETE" and int(first.read_text()) < time.time() - 50


def test_a_first_start_that_nobody_can_read_or_that_lies_ahead_counts_as_now(machine, apis):
    started = []
    for content in ("", "nonsense\n", "9" * 12 + "\n"):
        one = machine(apis(), end_s=2, **OWN)
        one.marks.mkdir()
        (one.marks / ".gpurun-first").write_text(content)
        one.start()
        started.append(one)
    for one in started:
        assert one.api.wait(1, 60)[0] == "DELETE"


def test_there_is_one_switch_however_often_it_is_started_and_never_none(machine, api):
    one = machine(api)
    threads = [threading.Thread(target=one.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(one.switches()) > 1 or (one.marks / ".gpurun-switch").is_symlink())
    eventually(lambda: settled(one))
    before = one.switches()
    one.start()
    deadline = time.monotonic() + 1.5                              # a newcomer has had two looks by then
    while time.monotonic() < deadline:
        assert set(before) <= set(one.switches())
        time.sleep(0.05)
    eventually(lambda: one.switches() == before and settled(one))
    one.stop()
    one.start()
    eventually(lambda: settled(one) and one.switches() != before)


def settled(one: Machine) -> bool:
    """One switch, and the link says that it is this one."""
    with contextlib.suppress(OSError):
        return [str(pid) for pid in one.switches()] == [os.readlink(one.marks / ".gpurun-switch").partition("-")[0]]
    return False


def test_it_is_short_enough_for_the_provider_or_refused():
    longest = script(PUBLIC, 9e6, 9e6, "/" + "x" * 250, "https://console.vast.ai")
    assert len(longest.encode()) < MAX_BYTES < 4096
    with pytest.raises(ConfigError, match="less than 4000"):
        script("ssh-rsa " + "A" * 3000, 60, 0, "~/.gpurun", "https://console.vast.ai")


@pytest.mark.parametrize("change", [
    {"public_key": "ssh-rsa"}, {"public_key": "ssh-rsa A'B"}, {"api": "https://x/$(reboot)"}, {"api": "console.vast.ai"}, {"lease_s": 0},
    {"lease_s": float("nan")}, {"end_s": -1}, {"end_s": float("inf")}, {"node_dir": "/"}, {"node_dir": "x"}])
def test_what_could_not_work_on_the_machine_is_refused_here(change):
    with pytest.raises(ConfigError):
        script(**{"public_key": PUBLIC, "lease_s": 60, "end_s": 0, "node_dir": "~/.gpurun", "api": "https://console.vast.ai", **change})
