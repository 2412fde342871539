"""The node ends its own rented machine, by its guard: a real agent in a process of its own, and a server that stands for the provider's API."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import ssl
import stat
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import pytest
from conftest import eventually
from nodes import WAIT_S, changed_package, node, operator, own_folders  # noqa: F401

from gpurun import guard
from gpurun.agent import Agent
from gpurun.guard import Guard, container, due
from gpurun.messages import Arm, Armed, Busy, CollectOutputs, Hello, JobExited, NodeReady, Ping, Pong, Refused, RunJob

KEY = "5ecret-k3y-of-the-container"
GONE = (404, b'{"success": false, "error": "no_such_instance", "msg": "Instance 77 not found."}')
DONE = (200, b'{"success": true}')


class Api:
    """Records what it is asked; answers with `answers`, the last of them again and again. None: no answer at all."""

    def __init__(self, cert: Path | None = None) -> None:
        self.asked: list[tuple[str, str, str, bytes]] = []
        self.answers: list[tuple[int, bytes] | None] = [DONE]
        self.before: Callable[[], Any] = lambda: None
        self.changed = threading.Condition()
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                api.before()
                with api.changed:
                    answer = api.answers.pop(0) if len(api.answers) > 1 else api.answers[0]
                    api.asked.append((self.command, self.path, self.headers.get("Authorization", ""), body))
                    api.changed.notify_all()
                if answer is not None:
                    self.send_response(answer[0])
                    self.send_header("Content-Length", str(len(answer[1])))
                    self.end_headers()
                    self.wfile.write(answer[1])

            do_DELETE = do_PUT = answer

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        if cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{'https' if cert else 'http'}://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def wait(self, number: int = 1, timeout_s: float = WAIT_S) -> list[str]:
        """The methods that were asked for, once there are so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= number, timeout_s), self.asked
            return [method for method, *_ in self.asked]


@pytest.fixture
def api(monkeypatch) -> Iterator[Api]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    one = Api()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.fixture
def rented(monkeypatch) -> None:
    """What a provider gives to a container."""
    monkeypatch.setenv("CONTAINER_ID", "77")
    monkeypatch.setenv("CONTAINER_API_KEY", KEY)


# ---- when ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("end_in_s, idle_s, idle_for_s, there, ends", [
    (None, 0.0, 9e9, False, ""),                     # no limit
    (0.1, 0.0, 9e9, False, ""), (-0.1, 0.0, 0.0, False, "max_hours 8"), (-9e9, 0.0, 0.0, False, "max_hours 8"),
    (-0.1, 0.0, 0.0, True, ""), (-599.0, 0.0, 0.0, True, ""), (-600.0, 0.0, 0.0, True, "max_hours 8"),   # it is the operator's, for 600 s
    (None, 60.0, 59.9, False, ""), (None, 60.0, 60.0, False, "60 s"), (None, 60.0, 9e9, True, ""), (None, 0.5, 0.6, False, "0.5 s"),
    (None, 0.0, 0.0, False, ""), (None, -1.0, 5.0, False, ""),
    (10.0, 60.0, 61.0, False, "60 s"), (-1.0, 60.0, 0.0, False, "max_hours 8"),
])
def test_a_machine_ends_at_its_limit_or_when_it_has_been_idle_and_nobody_is_there(end_in_s, idle_s, idle_for_s, there, ends):
    why = due(end_in_s, idle_s, "max_hours 8", idle_for_s, there)
    assert bool(why) == bool(ends) and ends in why


class Clocks:
    def __init__(self, folder: Path) -> None:
        self.folder, self.up, self.wall, self.boot = folder, 1000.0, 1.7e9, "first boot"

    def guard(self, environ: dict[str, str] | None = None) -> Guard:
        return Guard(str(self.folder), {"CONTAINER_ID": "77", "CONTAINER_API_KEY": KEY} if environ is None else environ, "/nowhere", "/nowhere",
                     clock=lambda: self.up, wall=lambda: self.wall, boot=lambda: self.boot)


ARM = Arm(end_in_s=100.0, idle_s=0.0, api="http://127.0.0.1:9", why="max_hours 8", provider="vastai")


def test_a_clock_that_is_set_changes_nothing(tmp_path):
    clocks = Clocks(tmp_path)
    one = clocks.guard()
    assert one.arm(ARM) == Armed(able=True, reason="", end_in_s=100.0, idle_s=0.0)
    for jump in (-1e9, 1e9):
        clocks.wall += jump
        assert one.begin_if_due(0.0, False) is None
        assert clocks.guard().state()["end_in_s"] == 100.0, "nor for an agent after this one"
    clocks.up += 100
    assert "max_hours 8" in one.begin_if_due(0.0, False).why
    assert "max_hours 8" in clocks.guard().begin_if_due(0.0, False).why


def test_over_a_restart_of_the_machine_the_wall_clock_counts_and_never_gives_more_time(tmp_path):
    clocks = Clocks(tmp_path)
    clocks.guard().arm(ARM)
    clocks.up, clocks.wall, clocks.boot = 5.0, clocks.wall + 40, "second boot"
    assert clocks.guard().state()["end_in_s"] == 60.0
    clocks.up, clocks.wall, clocks.boot = 5.0, clocks.wall - 1e9, "third boot"
    assert clocks.guard().state()["end_in_s"] == 60.0
    clocks.up, clocks.wall, clocks.boot = 5.0, clocks.wall + 61, "fourth boot"
    assert clocks.guard().begin_if_due(0.0, False)


def test_the_limits_are_in_a_private_file_and_the_key_is_not(tmp_path):
    Clocks(tmp_path).guard().arm(ARM)
    path = tmp_path / "guard.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and KEY not in path.read_text() and os.listdir(tmp_path) == ["guard.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\0\0", b'{"version": 99}', b'{"version": 1, "end_in_s": "x"}'])
def test_a_broken_file_of_limits_keeps_nobody_from_arming_anew(tmp_path, content, capsys):
    (tmp_path / "guard.json").write_bytes(content)
    one = Clocks(tmp_path).guard()
    assert not one.armed and one.state() == {} and "no limit holds" in capsys.readouterr().err
    assert one.arm(ARM).able and Clocks(tmp_path).guard().armed


def test_a_full_disk_keeps_no_limit_from_holding_and_is_said(tmp_path, monkeypatch):
    clocks = Clocks(tmp_path)
    one = clocks.guard()
    with monkeypatch.context() as full:
        full.setattr(guard, "atomic_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        armed = one.arm(ARM)
        assert armed.able and armed.end_in_s == 100.0 and "guard.json can't be written" in armed.reason
    assert one.begin_if_due(0.0, False) is None
    assert clocks.guard().state()["end_in_s"] == 100.0, "written as soon as there is room"


def test_a_limit_that_has_passed_already_is_not_taken_for_none(tmp_path):
    one = Clocks(tmp_path).guard()
    armed = one.arm(ARM._replace(end_in_s=-5.0))
    assert armed.end_in_s == -5.0 and one.begin_if_due(0.0, False)


@pytest.mark.parametrize("change, why", [
    ({"provider": "acme"}, "'acme'"), ({"api": ""}, "no http"), ({"api": 'http://x"\nurl = "http://y'}, "no http")])
def test_what_the_guard_can_not_end_is_said(tmp_path, change, why):
    armed = Clocks(tmp_path).guard().arm(ARM._replace(**change))
    assert not armed.able and why in armed.reason


# ---- who this machine is ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("own, first, etc, found", [
    ({"CONTAINER_ID": "1", "CONTAINER_API_KEY": "a"}, b"CONTAINER_ID=2\0CONTAINER_API_KEY=b\0", b"CONTAINER_ID=3\n", ("1", "a")),
    ({}, b"PATH=/bin\0CONTAINER_ID=2\0X=a\nCONTAINER_ID=9\0CONTAINER_API_KEY=b==\0", b"", ("2", "b==")),
    ({}, b"", b'export CONTAINER_ID=3\nCONTAINER_API_KEY="c"\n', ("3", "c")),
    ({}, b"", b"A=two words $HOME `x`\nCONTAINER_ID = '3'\nCONTAINER_API_KEY=c \n", ("3", "c")),
    ({"CONTAINER_ID": "1"}, None, b"CONTAINER_API_KEY=c\n", ("1", "c")),
    ({"VAST_CONTAINERLABEL": "C.12"}, b"CONTAINER_API_KEY=b", None, ("12", "b")),
    ({"CONTAINER_ID": "../1", "CONTAINER_API_KEY": "a\nb"}, b"CONTAINER_ID=2\0CONTAINER_API_KEY=b\0", b"", ("2", "b")),
    ({}, None, None, ("", "")), ({}, b"\xff\xfe\0=\0", b"\xff=\n\n=\n", ("", "")),
])
def test_the_containers_id_and_key_are_found_wherever_an_image_has_them(tmp_path, own, first, etc, found):
    for name, data in (("first", first), ("etc", etc)):
        if data is not None:
            (tmp_path / name).write_bytes(data)
    assert container(own, str(tmp_path / "first"), str(tmp_path / "etc")) == found


# ---- the end of a machine --------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def ending(folder: Path, api: Api, **options: Any) -> Iterator[Guard]:
    one = Guard(str(folder), {"CONTAINER_ID": "77", "CONTAINER_API_KEY": KEY}, "/nowhere", "/nowhere", backoff_s=(0.0, 0.0, 0.0, 0.01), **options)
    one.arm(Arm(end_in_s=-1.0, api=api.url + "/", why="max_hours 8", provider="vastai"))
    begun = one.begin_if_due(0.0, False)
    thread = threading.Thread(target=one.end_machine, args=(begun,))
    thread.start()
    try:
        yield one
    finally:
        begun.over.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("refusal", [
    (429, b"API requests too frequent: endpoint threshold=3.0"), (500, b"oops"), (502, b"<html>"),
    (200, b'{"success": false, "error": "server_error"}'),
    (200, b""), (200, b"<html>"), (200, b'"success"'), (401, b'{"success": false, "error": "auth_error"}'), (308, b""), None, (503, KEY.encode()),
])
def test_whatever_is_answered_the_machine_is_ended_again_and_again_until_it_is_so(tmp_path, api, refusal, capsys):
    api.answers = [refusal, refusal, DONE]
    with ending(tmp_path, api):
        assert api.wait(4)[:4] == ["DELETE"] * 4
    assert api.asked[0] == ("DELETE", "/api/v0/instances/77/", f"Bearer {KEY}", b"{}")
    said = capsys.readouterr().err
    assert said.count("didn't end") == 2 and said.count("the provider ends this machine") == 1 and KEY not in said


def test_a_machine_that_can_not_be_ended_is_stopped_meanwhile_and_ended_all_the_same(tmp_path, api):
    api.answers = [(500, b"")] * 6 + [DONE]
    with ending(tmp_path, api):
        assert api.wait(7)[:7] == ["DELETE", "DELETE", "DELETE", "PUT", "DELETE", "PUT", "DELETE"]
    assert api.asked[3] == ("PUT", "/api/v0/instances/77/", f"Bearer {KEY}", b'{"state": "stopped"}')


@pytest.mark.parametrize("answer", [DONE, GONE])
def test_an_answer_is_no_end_and_as_long_as_the_machine_lives_it_is_asked_again(tmp_path, api, answer, capsys):
    api.answers = [answer]
    with ending(tmp_path, api):
        assert set(api.wait(4)) == {"DELETE"}
    assert capsys.readouterr().err.count("the provider ends this machine") == 1


def test_new_limits_call_an_end_off_unless_the_provider_has_taken_it(tmp_path, api):
    api.answers = [(500, b"")]
    with ending(tmp_path, api) as one:
        api.wait(2)
        assert one.ending and one.arm(ARM).reason == "" and not one.ending
    api.answers, api.asked[:] = [DONE], []
    with ending(tmp_path, api) as one:
        api.wait(2)
        assert "being ended already" in one.arm(ARM).reason and one.ending


@pytest.fixture(scope="module")
def cert(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cert") / "cert.pem"
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=x",
                    "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{path}.key", "-out", str(path)], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.key").read_bytes())
    return path


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_where_python_has_no_certificates_curl_is_asked_and_the_key_is_in_no_command_line(tmp_path, api, cert, monkeypatch, capsys):
    monkeypatch.setenv("CURL_CA_BUNDLE", str(cert))
    found: list[str] = []
    api = Api(cert)
    api.before = lambda: found.extend(command_lines())
    with ending(tmp_path, api):
        assert api.wait(1) == ["DELETE"]
    assert api.asked[0][2:] == (f"Bearer {KEY}", b"{}")
    assert any("curl" in line for line in found) and not any(KEY in line for line in found)
    api.server.shutdown()


def test_where_nothing_can_verify_certificates_the_machine_is_ended_without_at_last(tmp_path, api, cert, monkeypatch, capsys):
    api = Api(cert)
    with ending(tmp_path, api):
        assert api.wait(1)[0] in ("DELETE", "PUT")
    assert capsys.readouterr().err.count("didn't end") >= 3, "not at once"
    api.server.shutdown()


def command_lines() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace"))
    return found


# ---- the agent -------------------------------------------------------------------------------------------------------------------

WAITS = 'trap "echo the end; exit 3" TERM; echo begun; while :; do sleep 0.02; done'


def arm(api: Api, **limits: Any) -> Arm:
    return Arm(api=api.url, provider="vastai", why="max_hours 8", **limits)


def begun(node: Any, operator: Any, known: dict[str, Any], run_id: str) -> Any:
    """A job is at work; its session."""
    talk = operator.talk(known, Hello(run_id=run_id, claim=True), RunJob(run_id, WAITS))
    eventually(lambda: (node.folder / "runs" / run_id / "run.out").exists() and b"begun" in (node.folder / "runs" / run_id / "run.out").read_bytes())
    return talk


def test_a_machine_that_nobody_uses_ends_itself_and_takes_no_more_runs(node, operator, api, rented):
    known = node.up(operator, idle_exit_s=4.0)
    talk = operator.talk(known, Hello(), arm(api, idle_s=5.0))
    assert talk.hear(NodeReady).facts["guard"] == {}
    assert talk.hear(Armed) == Armed(able=True, reason="", end_in_s=0.0, idle_s=5.0)
    deadline = time.monotonic() + 7.0                        # longer than that: who only looks is there
    while time.monotonic() < deadline:
        talk.say(Ping(1))
        assert talk.hear(Pong)
    assert api.asked == []
    talk.close()
    assert api.wait() == ["DELETE"]
    again = operator.talk(known, Hello(run_id="late", claim=True))
    assert "is being ended and takes no more runs: nothing has run on it and no operator has been there for 5 s" in again.hear(Refused).reason
    facts = operator.talk(known, Hello()).hear(NodeReady).facts
    assert facts["guard"]["able"] and "nothing has run" in facts["guard"]["ending"] and facts["guard"]["idle_s"] == 5.0
    assert KEY not in node.log() and "the provider ends this machine" in node.log()


def test_a_long_quiet_job_is_no_idleness(node, operator, api, rented):
    known = node.up(operator)
    talk = begun(node, operator, known, "quiet")
    talk.say(arm(api, idle_s=0.2))
    assert talk.hear(Armed).able
    talk.close()
    waiter = operator.talk(known, Hello(run_id="next", claim=True, wait=True), RunJob("next", "sleep 1"))
    assert waiter.hear(Busy)
    waiter.close()
    assert not wait_a_while(api, 1.0)
    os.kill(json.loads((node.folder / "runs/quiet/state.json").read_text())["supervised"]["pid"], 15)
    assert api.wait() == ["DELETE"] and (node.folder / "runs/next/run.exit").exists(), "it ended after the last run, and not before"


def wait_a_while(api: Api, seconds: float) -> bool:
    """Whether the API was asked for anything within this time."""
    with api.changed:
        return api.changed.wait_for(lambda: bool(api.asked), seconds)


def test_at_its_limit_without_an_operator_the_job_is_stopped_its_log_is_whole_and_the_machine_ends(node, operator, api, rented):
    known = node.up(operator)
    talk = begun(node, operator, known, "r")
    waiter = operator.talk(known, Hello(run_id="waits", claim=True, wait=True), RunJob("waits", "echo never"))
    assert waiter.hear(Busy)
    talk.say(arm(api, end_in_s=0.7))
    assert 0 < talk.hear(Armed).end_in_s <= 0.7
    log_at_the_end: list[bytes] = []
    api.before = lambda: log_at_the_end.append((node.folder / "runs/r/run.out").read_bytes() if (node.folder / "runs/r/run.exit").exists() else b"")
    talk.close()
    waiter.close()
    assert api.wait() == ["DELETE"]
    assert log_at_the_end[0] == b"begun\nthe end\n"
    ended = operator.talk(known, Hello(run_id="r")).hear(JobExited)
    assert ended.stopped and ended.code == 3 and "the node is being ended: its limit is reached: max_hours 8" in ended.limit
    ended = operator.talk(known, Hello(run_id="waits")).hear(JobExited)
    assert ended.stopped and "max_hours 8" in ended.limit and not (node.folder / "runs/waits/run.out").exists()


def test_at_its_limit_an_operator_that_is_there_has_time_to_end_it_itself_and_not_for_ever(node, operator, api, rented, tmp_path):
    known = node.up(operator, package=changed_package(tmp_path, guard=[("^COLLECT_GRACE_S = 600.0", "COLLECT_GRACE_S = 1.5")]))
    talk = begun(node, operator, known, "r")
    started = time.monotonic()
    talk.say(arm(api, end_in_s=0.3))
    assert talk.hear(Armed)
    assert talk.hear(JobExited).stopped and time.monotonic() - started > 1.7
    assert api.wait() == ["DELETE"]
    assert operator.talk(known, Hello()).hear(NodeReady).facts["guard"]["end_in_s"] < -1.5


def test_an_operator_that_leaves_after_the_limit_ends_the_wait(node, operator, api, rented):
    known = node.up(operator)
    talk = operator.talk(known, Hello(), arm(api, end_in_s=0.2))
    assert talk.hear(Armed)
    assert not wait_a_while(api, 0.8)
    talk.close()
    assert api.wait() == ["DELETE"]


def test_the_limit_outlives_an_agent_that_is_killed(node, operator, api, rented):
    known = node.up(operator)
    talk = begun(node, operator, known, "r")
    talk.say(arm(api, end_in_s=9.0))                         # in which another agent has to come
    assert talk.hear(Armed)
    node.end(known)
    again = node.up(operator)
    assert api.asked == []
    look = operator.talk(again, Hello())
    left = look.hear(NodeReady).facts["guard"]
    assert left["end_in_s"] < 8.99 and left["why"] == "max_hours 8" and left["able"]
    look.close()
    assert api.wait(timeout_s=60) == ["DELETE"]
    assert operator.talk(again, Hello(run_id="r")).hear(JobExited).stopped


def test_a_machine_that_was_disarmed_is_not_ended_and_one_with_more_time_goes_on(node, operator, api, rented):
    known = node.up(operator)
    talk = begun(node, operator, known, "r")
    talk.say(arm(api, end_in_s=0.4), Arm())
    assert [talk.hear(Armed), talk.hear(Armed)][1] == Armed(able=False, reason="", end_in_s=0.0, idle_s=0.0)
    talk.close()
    assert not wait_a_while(api, 1.0)
    talk = operator.talk(known, Hello(), arm(api, end_in_s=0.4, idle_s=0.1), arm(api, end_in_s=3600.0))
    assert [talk.hear(Armed), talk.hear(Armed)][1].end_in_s > 3599
    talk.close()
    assert not wait_a_while(api, 1.0)
    assert operator.talk(known, Hello(run_id="r")).hear(NodeReady, JobExited).__class__ is NodeReady, "its job goes on"


def test_an_end_that_was_called_off_leaves_a_node_that_takes_runs(node, operator, api, rented):
    api.answers = [(500, b"")]
    known = node.up(operator)
    talk = operator.talk(known, Hello(), arm(api, idle_s=0.1))
    assert talk.hear(Armed)
    talk.close()
    api.wait()
    talk = operator.talk(known, Hello(), Arm())
    assert talk.hear(Armed)
    assert operator.run(known, "r", "exit 4").code == 4


def test_a_node_that_can_not_end_its_machine_stops_the_job_at_the_limit_and_says_what_is_missing(node, operator, api, monkeypatch):
    if any(container(os.environ)):
        pytest.skip("this is a rented container itself")
    known = node.up(operator)
    talk = begun(node, operator, known, "r")
    talk.say(arm(api, end_in_s=0.5, idle_s=0.1))
    armed = talk.hear(Armed)
    assert not armed.able and "no CONTAINER_ID and no CONTAINER_API_KEY was found on this node" in armed.reason and armed.end_in_s > 0
    talk.close()
    eventually(lambda: (node.folder / "runs/r/run.exit").exists())
    assert "takes no more runs" in operator.talk(known, Hello(run_id="late", claim=True)).hear(Refused).reason
    talk = operator.talk(known, Hello(), arm(api, idle_s=0.1))
    assert talk.hear(Armed)
    talk.close()
    assert not wait_a_while(api, 0.5)
    assert operator.run(known, "again", "exit 4").code == 4, "idle, it is as good as before"


def test_the_key_of_the_container_is_in_no_file_log_message_or_command_line(node, operator, api, rented, tmp_path):
    api.answers = [(500, b"no: " + KEY.encode()), DONE]
    found: list[str] = []
    api.before = lambda: found.extend(line for line in command_lines() if KEY in line)
    known = node.up(operator, package=changed_package(tmp_path, guard=[(r"^BACKOFF_S = \(5.0,", "BACKOFF_S = (0.1,")]))
    talk = begun(node, operator, known, "r")
    talk.say(CollectOutputs("r", []), arm(api, end_in_s=0.3))
    assert KEY not in str(talk.hear(Armed))
    talk.close()
    assert api.wait(2) == ["DELETE", "DELETE"]
    eventually(lambda: "the provider ends this machine" in node.log())
    assert KEY not in json.dumps(operator.talk(known, Hello()).hear(NodeReady).facts)
    for file in node.folder.rglob("*"):
        with contextlib.suppress(OSError):                   # a folder, or a file that the agent has just put in another's place
            found += [str(file)] if KEY.encode() in file.read_bytes() else []
    assert found == [] and "(the key)" in node.log()


def test_at_its_limit_an_operator_whose_link_broke_may_come_back_and_one_that_left_does_not(tmp_path, api, rented):
    api.answers = [(500, b"")]
    for closed in (False, True):
        folder = tmp_path / str(closed) / "agent"
        folder.mkdir(parents=True)
        one = Agent(str(folder.parent), [], "", [], dict)   # nobody dials this one
        one.arm(arm(api, end_in_s=-1.0))
        stream = SimpleNamespace(connection=SimpleNamespace(was_closed=closed))
        one.lost(stream)
        one._keep_limits()
        assert wait_a_while(api, 0.5 if not closed else WAIT_S) == closed
        one.arm(Arm())
