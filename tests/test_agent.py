"""The agent as a real process on loopback: hostile peers, several operators, kills, replacements, every way its start can fail.

What is asserted all over: the running job and its operator notice nothing of what others do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here, end_agents, eventually
from nodes import WAIT_S, NodeDir, Operator, changed_package, gone, node, operator, own_folders  # noqa: F401

from gpurun import bootstrap, supervise, transfer, wire
from gpurun.agentfile import agent_file
from gpurun.errors import LinkError, LinkTimeoutError, RefusedError, TransferError
from gpurun.link import Link, Stream, load_key
from gpurun.messages import (
    NODE_SAYS, Busy, CollectOutputs, Hello, JobExited, MaterializeWorkspace, NodeFault, NodeReady, Ping, Pong, Refused, RemoveRun, RunJob, RunSetup,
    SetupCompleted, StopJob,
)

PYTHONS = list(dict.fromkeys(path for path in os.environ.get("GPURUN_TEST_PYTHONS", "").split(":") if path)) or [sys.executable]
COUNT = 'i=0; while [ ! -e "$GPURUN_OUTPUTS/enough" ]; do i=$((i+1)); echo "line $i"; sleep 0.02; done; exit 7'


# ---- attacks while a job runs and its operator watches ---------------------------------------------------------------------------

@contextlib.contextmanager
def followed_job(here: Here, name: str) -> Iterator[None]:
    """A real `gpurun` whose job counts until the block is over; then every line and the exit code must have come."""
    process = here.start(here.job(COUNT, name=name, folder=here.work / name), "--runs-dir", here.work / name / "runs")
    collected: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
    threading.Thread(target=lambda: collected.put(process.communicate(timeout=100)), daemon=True).start()
    runs = here.work / name / "runs"
    log = eventually(lambda: next(iter(runs.glob(f"{name}-*/stdout.log")), None))
    eventually(lambda: log.read_bytes().count(b"\n") > 3)
    before = log.read_bytes().count(b"\n")
    try:
        yield
        eventually(lambda: log.read_bytes().count(b"\n") > before)
        assert process.poll() is None
    finally:
        (here.node_dir / "runs" / log.parent.name / "work" / "enough").touch()
        out, err = collected.get(timeout=60)
    numbers = [int(line.split()[1]) for line in out.decode().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 3
    assert (log.read_bytes(), process.returncode) == (out, 7)
    said = err.decode()
    assert not re.search("broke|again|warn|refused", said), said


@pytest.fixture(scope="module")
def attackers(warm: Here) -> Iterator[dict[str, Any]]:
    """The warm agent, the key of its operator, a second authorized operator, a stranger."""
    assert warm.gpurun(warm.job("true", name="first")).returncode == 0
    known = warm.agent()
    first, second, stranger = Operator(load_key(str(warm.home / ".config/gpurun/key"))), Operator(), Operator()
    NodeDir(warm.node_dir).authorize(second.id)
    yield {"known": known, "own": first, "second": second, "stranger": stranger}
    for one in (first, second, stranger):
        one.link.close()


def control(operator: Operator, known: dict[str, Any], data: bytes) -> Stream:
    stream = operator.dial(known, wire.CONTROL_ALPN).open(WAIT_S)
    stream.write(data, WAIT_S)
    return stream


def last_word(stream: Stream) -> str:
    """The reason of the Refused with which the node ends a session."""
    reader, reason = wire.Reader(stream), ""
    while True:
        line = reader.line(WAIT_S)
        if not line:
            return reason
        message = wire.decode(line, NODE_SAYS)
        if isinstance(message, Refused):
            reason = message.reason


def test_a_wrong_alpn_disturbs_nobody(warm, attackers):
    with followed_job(warm, "alpn"):
        for operator in (attackers["own"], attackers["stranger"]):
            with pytest.raises(LinkError):
                operator.dial(attackers["known"], b"gpurun/control/0")


def test_a_stranger_is_refused_and_disturbs_nobody(warm, attackers):
    with followed_job(warm, "stranger"):
        for alpn in (wire.CONTROL_ALPN, wire.TRANSFER_ALPN):
            with pytest.raises(RefusedError):
                stream = attackers["stranger"].dial(attackers["known"], alpn).open(WAIT_S)
                stream.write(wire.encode(Hello()), WAIT_S)
                stream.read(WAIT_S)


def test_a_line_that_the_protocol_does_not_allow_ends_that_session_with_the_reason_and_nothing_else(warm, attackers):
    hello = wire.encode(Hello())
    with followed_job(warm, "lines"):
        for first, why in [
                (b"GET / HTTP/1.1\r\n\r\n", "not a line of JSON"), (b'{"type":"Hello","job":"\xff\xfe"}\n', "not a line of JSON"),
                (b'{"type":"Hello","job":"' + b"x" * (2 << 20) + b'"}\n', "more than 1048576 bytes"), (b"\n", "empty line"),
                (wire.encode(RunJob("r", "true")), "'RunJob' isn't taken here"), (wire.encode(Ping(1)), "'Ping' isn't taken here"),
                (hello * 2, "Hello is a session's first line"), (hello + b'{"type":"Reboot"}\n', "'Reboot' isn't taken here"),
                (hello + wire.encode(JobExited("r")), "'JobExited' isn't taken here"),
                (wire.encode(Hello(run_id="../../etc", claim=True)), "run_id must be")]:
            stream = attackers["second"].dial(attackers["known"], wire.CONTROL_ALPN).open(WAIT_S)
            with contextlib.suppress(LinkError):             # the node may have had enough before the end of it
                stream.write(first, WAIT_S)
                stream.flush(WAIT_S)
            assert why in last_word(stream), first[:80]


def frame(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">cI", kind, len(payload)) + payload


def test_a_transfer_of_garbage_ends_with_the_reason_and_nothing_else(warm, attackers):
    push = frame(b"J", b'{"type":"Push","tree":"%s","listing":true}' % (b"0" * 64))
    with followed_job(warm, "frames"):
        for frames, why in [
                (struct.pack(">cI", b"J", 0xFFFFFFFF), "a frame of 4294967295 bytes"), (frame(b"D", b"{}"), "begins with a J"),
                (frame(b"J", b"{]"), "not a line of JSON"), (frame(b"J", b'{"type":"Rob"}'), "'Rob' isn't known"),
                (frame(b"J", b'{"type":"Push","tree":"../x","listing":true}'), "tree must be a SHA-256"),
                (push + frame(b"L", b"abc"), "compressed"), (push + frame(b"Z", b""), "a frame b'Z' where")]:
            stream = attackers["second"].dial(attackers["known"], wire.TRANSFER_ALPN).open(WAIT_S)
            stream.write(frames, WAIT_S)
            with pytest.raises(TransferError, match=why):
                transfer.Channel(stream).frame()


def test_half_open_streams_and_200_connections_at_once_disturb_nobody(warm, attackers):
    known, second = attackers["known"], attackers["second"]
    failures: list[BaseException] = []

    def knock(operator: Operator, alpn: bytes, data: bytes) -> None:
        try:
            stream = operator.dial(known, alpn).open(5)
            if data:
                stream.write(data, 5)
                stream.read(0.2)
        except LinkError:
            pass
        except BaseException as error:
            failures.append(error)

    with followed_job(warm, "crowd"):
        half_open = [second.dial(known, alpn).open(WAIT_S) for alpn in (wire.CONTROL_ALPN, wire.TRANSFER_ALPN) for _ in range(10)]
        for number, stream in enumerate(half_open):
            if number % 2:
                stream.write(b'{"type":"Hel', WAIT_S)   # half a line, and nothing more
        crowd = [threading.Thread(target=knock, args=(attackers[who], alpn, data)) for who, alpn, data in
                 [("stranger", wire.CONTROL_ALPN, b"x")] * 60 + [("second", wire.CONTROL_ALPN, b"")] * 60
                 + [("second", wire.TRANSFER_ALPN, b"J\0")] * 40 + [("own", wire.CONTROL_ALPN, b"{")] * 20 + [("stranger", b"wrong", b"x")] * 20]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(60)
        assert not failures
        assert second.talk(known, Hello()).hear(NodeReady).facts["claim"].startswith("crowd-"), "the node takes sessions as before"


def test_a_second_operator_can_do_nothing_with_a_run_that_is_not_his(warm, attackers):
    known, second = attackers["known"], attackers["second"]
    with followed_job(warm, "mine"):
        run_id = attackers["own"].talk(known, Hello()).hear(NodeReady).facts["claim"]
        assert run_id.startswith("mine-")
        for hello in (Hello(run_id=run_id), Hello(run_id=run_id, claim=True), Hello(run_id=run_id, claim=True, wait=True)):
            talk = second.talk(known, hello, StopJob(run_id), CollectOutputs(run_id, ["enough"]))
            heard = talk.hear()
            assert isinstance(heard, Refused) and "operator" in heard.reason
            talk.close()
        talk = second.talk(known, Hello(), StopJob(run_id), Ping(3))
        assert talk.hear(Refused).reason == "this session has no claim on that run"
        assert talk.hear(Pong) == Pong(3), "the session goes on"
        talk.close()
        for fields in ({"type": "Follow", "run_id": run_id, "offsets": {"run.out": 0}}, {"type": "Pull", "run_id": run_id, "outputs": ["enough"]}):
            channel = transfer.Channel(second.dial(known, wire.TRANSFER_ALPN).open(WAIT_S))
            channel.say(**fields)
            with pytest.raises(TransferError, match="this node has no run"):
                channel.frame()
        busy = second.talk(known, Hello(run_id="his-1", claim=True), RunJob("his-1", "true")).hear(Busy)
        assert (busy.run_id, busy.job) == (run_id, "mine") and busy.operator
        assert [run["run_id"] for run in second.talk(known, Hello()).hear(NodeReady).facts["runs"] if run["run_id"] != "his-1"] == []


def test_an_operator_that_asks_and_never_reads_is_let_go(warm, attackers):
    with followed_job(warm, "flood"):
        stream = control(attackers["second"], attackers["known"], wire.encode(Hello()))
        with pytest.raises(LinkError) as caught:
            for _ in range(3000):
                stream.write(wire.encode(Ping(1)) * 2000, WAIT_S)
        assert not isinstance(caught.value, LinkTimeoutError), "it was kept, and would be for as long as it likes"


def test_an_operator_with_a_new_key_is_let_in_again_by_itself(here):
    """Its old key was deleted: the agent refuses the new one until it is started once more by somebody who may."""
    job = here.job("exit 4")
    assert here.gpurun(job).returncode == 4
    known = here.agent()
    (here.home / ".config/gpurun/key").unlink()
    assert here.gpurun(job).returncode == 4
    assert here.agent() == known and len((here.node_dir / "agent/authorized").read_text().split()) == 2


# ---- claims ----------------------------------------------------------------------------------------------------------------------

def test_waiters_get_the_node_in_the_order_they_came_and_with_their_whole_plan(node, operator):
    known = node.up(operator)
    first = operator.talk(known, Hello(run_id="r0", job="job", claim=True), RunJob("r0", 'while [ ! -e "$GPURUN_OUTPUTS/go" ]; do sleep 0.02; done'))
    assert first.hear(NodeReady)
    waiting = []
    for number in (1, 2, 3, 4):
        talk = operator.talk(known, Hello(run_id=f"r{number}", job="job", claim=True, wait=True), MaterializeWorkspace(f"r{number}", ""),
                             RunSetup(f"r{number}", "echo set up > made", {}), RunJob(f"r{number}", f"cat made; echo r{number} >> {node.folder}/order", {}))
        assert talk.hear(Busy).run_id == "r0"
        waiting.append(talk)
    waiting[1].close()                                     # vanished while it waited: the node has all that it takes
    eventually(lambda: waiting[1].connection._connection.close_reason())
    again = operator.talk(known, Hello(run_id="r3", job="job", claim=True, wait=True), RunSetup("r3", "echo another > made"))
    assert again.hear(Busy).ahead == 3                     # came back: keeps its place before r4, and its plan
    waiting[2].close()
    (node.folder / "runs" / "r0" / "work" / "go").touch()
    assert first.hear(JobExited).code == 0
    for talk in (waiting[0], again, waiting[3]):
        assert talk.hear().__class__ is NodeReady
        assert talk.hear(SetupCompleted, JobExited, NodeFault).__class__ is SetupCompleted
        assert talk.hear(JobExited, NodeFault).code == 0
    assert (node.folder / "order").read_text().split() == ["r1", "r2", "r3", "r4"]
    assert operator.logs(known, "r3") == b"set up\n"


def test_a_run_whose_operator_vanished_before_its_job_could_start_is_given_up(node, operator, tmp_path):
    quick = changed_package(tmp_path, agent=[(r"^NEVER_STARTED_S = .*$", "NEVER_STARTED_S = 0.5"), ("^HOUSEKEEPING_S = .*$", "HOUSEKEEPING_S = 0.1")])
    known = node.up(operator, package=quick)
    there = operator.talk(known, Hello(run_id="there", claim=True))
    assert there.hear(NodeReady)
    waiter = operator.talk(known, Hello(run_id="waiter", claim=True, wait=True), RunJob("waiter", "exit 4"))
    assert waiter.hear(Busy)
    deadline = time.monotonic() + 1.5                      # three times the limit: an operator that is there is not given up
    while time.monotonic() < deadline:
        there.say(Ping(1))
        assert there.hear(Pong, NodeFault) == Pong(1)
    there.close()
    assert waiter.hear(JobExited).code == 4
    fault = operator.talk(known, Hello(run_id="there")).hear(NodeFault)
    assert "the operator was silent for 0.5 s before the job could start" in fault.reason


def test_the_node_is_free_the_moment_that_a_run_is_known_to_be_over(node, operator, tmp_path):
    """However it ended: an operator that comes at once with the next run isn't told that the node is busy with the one before."""
    known = node.up(operator, package=changed_package(tmp_path, noderun=[(r"^( +)self\._ended\(self\)$", r"\1time.sleep(0.3)\n\1self._ended(self)")]))
    for number in range(2):
        assert operator.run(known, f"ok{number}", "exit 0").code == 0
        failed = operator.talk(known, Hello(run_id=f"setup{number}", claim=True), RunSetup(f"setup{number}", "exit 5"))
        assert failed.hear(SetupCompleted, Busy).code == 5
        faulty = operator.talk(known, Hello(run_id=f"fault{number}", claim=True), RunJob(f"fault{number}", "kill -9 $PPID"))
        assert "no exit record" in faulty.hear(NodeFault, Busy).reason


# ---- life ------------------------------------------------------------------------------------------------------------------------

class KilledRun:
    """An attached `gpurun` whose agent is killed in the middle of a phase. That takes its time: the link counts as broken after 15 s."""

    def __init__(self, here: Here, phase: str, **job: Any) -> None:
        self.here, self.process = here, here.start(here.job(**job), env=dict(here.env, SECRET=SECRET))
        self.log = eventually(lambda: next(iter((here.node_dir / "runs").glob(f"*/{phase}.out")), None))
        eventually(lambda: b"begun" in self.log.read_bytes())
        self.first = here.agent()
        os.kill(self.first["pid"], signal.SIGKILL)
        eventually(lambda: gone(self.first))
        self.say("on")

    def say(self, word: str) -> None:
        (self.log.parent / "work" / word).touch()

    def end(self) -> None:
        """Its gpurun has started an agent again, and brings the run home."""
        again = eventually(lambda: self.here.agent()["pid"] != self.first["pid"] and self.here.agent(), 60)
        assert (again["port"], again["id"]) == (self.first["port"], self.first["id"]), "operators have both in their caches"
        self.say("enough")
        self.out, self.err = self.process.communicate(timeout=60)
        assert self.process.returncode == 7, self.err.decode()
        record = self.here.record()
        assert (record["state"], record["exit_code"]) == ("FAILED", 7)
        assert self.out == self.log.with_name("run.out").read_bytes() == (self.here.latest / "stdout.log").read_bytes()


SECRET = "s3cret" + os.urandom(8).hex()


def test_an_agent_killed_in_the_middle_of_setup_or_job_costs_an_attached_run_nothing_and_leaks_nothing(tmp_path):
    """gpurun starts it again by itself. Exit code, every byte once; and the values of the job's env are still in no file."""
    count = COUNT.replace("exit 7", 'test -n "$TOKEN" && exit 7')
    wait = 'echo begun; while [ ! -e "$GPURUN_OUTPUTS/on" ]; do sleep 0.05; done; '
    in_setup = KilledRun(Here(tmp_path / "one"), "setup", setup=wait + 'echo "set up" >&2', run=count, env={"TOKEN": "${SECRET}"})
    in_job = KilledRun(Here(tmp_path / "two"), "run", run=wait + count, env={"TOKEN": "${SECRET}"})
    try:
        in_job.end()
        in_setup.end()
        lines = in_job.out.decode().splitlines()
        assert lines[0] == "begun" and lines[1:] == [f"line {n}" for n in range(1, len(lines))] and len(lines) > 10
        assert [(in_setup.here.latest / f"setup-{name}.log").read_bytes() for name in ("stdout", "stderr")] == [b"begun\n", b"set up\n"]
        assert in_setup.out.decode().splitlines() == [f"line {n}" for n in range(1, in_setup.out.count(b"\n") + 1)]
        assert places_of(SECRET, tmp_path) == []
    finally:
        end_agents(tmp_path)


def test_a_killed_agent_leaves_the_job_alone_and_the_next_agent_knows_how_it_ended(node, operator):
    known = node.up(operator)
    talk = operator.talk(known, Hello(run_id="r", claim=True), RunJob("r", 'echo a; while [ ! -e "$GPURUN_OUTPUTS/go" ]; do sleep 0.02; done; echo b; exit 9'))
    talk.hear(NodeReady)
    eventually(lambda: (node.folder / "runs/r/run.out").exists())
    node.end(known)
    talk.close()                                            # or iroh may take 20 s to see that its path to this port has another agent at its end
    (node.folder / "runs/r/work/go").touch()
    eventually(lambda: (node.folder / "runs/r/run.exit").exists())   # nobody but the supervisor saw it
    again = node.up(operator)
    assert (again["id"], again["port"]) == (known["id"], known["port"]) and again["pid"] != known["pid"]
    ended = operator.talk(again, Hello(run_id="r")).hear(JobExited, NodeFault)
    assert (ended.code, ended.seq) == (9, 1)
    assert operator.logs(again, "r") == b"a\nb\n"
    assert operator.run(again, "next", "exit 3").code == 3, "the node is free again"


def test_a_killed_supervisor_is_a_fault_its_children_end_and_an_unrelated_process_lives(node, operator):
    known = node.up(operator)
    unrelated = subprocess.Popen(["sleep", "300"], env={**os.environ, "GPURUN_RUN_ID": "orphanedd", "RUN": "orphaned"})
    talk = operator.talk(known, Hello(run_id="orphaned", claim=True),
                         RunJob("orphaned", 'sleep 301 & setsid sleep 302 & echo $! > away; trap "" TERM; echo up; while :; do sleep 0.05; done'))
    talk.hear(NodeReady)
    eventually(lambda: (node.folder / "runs/orphaned/run.out").exists() and (node.folder / "runs/orphaned/run.out").read_bytes())
    eventually(lambda: len(supervise.of_run("orphaned")) >= 3)        # a process that is just starting a program shows no environment
    os.kill(node.state("orphaned")["supervised"]["pid"], signal.SIGKILL)
    fault = talk.hear(JobExited, NodeFault)
    assert isinstance(fault, NodeFault) and "no exit record" in fault.reason and str(node.folder / "runs/orphaned") in fault.reason
    eventually(lambda: not supervise.of_run("orphaned"))
    assert unrelated.poll() is None
    unrelated.kill()
    unrelated.wait()
    assert operator.run(known, "next", "exit 3").code == 3


def test_starts_at_the_same_time_give_one_agent_that_knows_all_their_operators(node):
    operators = [Operator() for _ in range(4)]
    processes = [node.starting(operator.id) for operator in operators]
    printed = [process.communicate(timeout=60) for process in processes]
    assert all(out.startswith(b"GPURUN-ENDPOINT ") for out, _ in printed), printed
    said = [json.loads(out.split(b"GPURUN-ENDPOINT ")[1]) for out, _ in printed]
    assert len({(one["pid"], one["port"], one["id"]) for one in said}) == 1
    for operator in operators:
        assert operator.talk(said[0], Hello()).hear(NodeReady)
        operator.link.close()


def test_an_agent_that_is_started_again_has_all_its_addresses_again(node, operator):
    """Who was just talking to the one before sends to the path that it took then, over IPv4 or IPv6, for half a minute."""
    known = node.up(operator)
    for _ in range(3):
        operator.talk(known, Hello()).hear(NodeReady)
        os.kill(known["pid"], signal.SIGKILL)
        again = node.up(operator)
        assert again["pid"] != known["pid"] and again["addresses"] == known["addresses"]
        known = again


def test_a_fixed_port_is_that_of_ipv6_too_and_one_that_is_taken_is_named(node, operator):
    first = node.up(operator)
    os.kill(first["pid"], signal.SIGKILL)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        code, said = node.start(operator.id, bind=f"127.0.0.1:{port}")
        assert code == 14 and f"has UDP port {port} here" in said["reason"] and "`udp_port`" in said["reason"]
    known = node.up(operator, bind=f"127.0.0.1:{port}")
    assert known["port"] == port and known["port6"] in (0, port)


def test_an_idle_agent_of_another_version_is_replaced_and_a_busy_one_is_used(node, operator, tmp_path):
    old = node.up(operator, package=changed_package(tmp_path))
    new = node.up(operator)
    assert gone(old) and new["agent"] != old["agent"] and (new["id"], new["port"]) == (old["id"], old["port"])
    assert node.up(operator)["pid"] == new["pid"], "the same version answers at once"
    talk = operator.talk(new, Hello(run_id="r", claim=True), RunJob("r", COUNT))
    talk.hear(NodeReady)
    other_version = changed_package(tmp_path)
    used = node.up(operator, package=other_version)
    assert used["pid"] == new["pid"] and "busy with r and is used as it is" in used["note"]
    eventually(lambda: (node.folder / "runs/r/work").is_dir())
    (node.folder / "runs/r/work/enough").touch()
    assert talk.hear(JobExited).code == 7
    eventually(lambda: node.up(operator, package=other_version)["pid"] != new["pid"])
    assert gone(new)


def test_a_busy_agent_of_another_protocol_is_left_alone_and_named(node, operator, tmp_path):
    old = changed_package(tmp_path, wire=[("^PROTOCOL = 2$", "PROTOCOL = 99")], node=[("^PROTOCOL = 2 ", "PROTOCOL = 99 ")])
    known = node.up(operator, package=old)
    assert known["protocol"] == 99
    talk = operator.talk(known, Hello(run_id="r", claim=True), RunJob("r", COUNT))
    talk.hear(NodeReady)
    code, said = node.start(operator.id)
    assert code == 13 and "speaks protocol 99 (this one: 2) is busy with r" in said["reason"] and not gone(known)
    eventually(lambda: (node.folder / "runs/r/work").is_dir())
    (node.folder / "runs/r/work/enough").touch()
    assert talk.hear(JobExited).code == 7
    eventually(lambda: node.start(operator.id)[0] == 0)
    assert gone(known), "idle, it is replaced"


def test_an_agent_for_this_machine_only_is_replaced_when_others_want_to_reach_it(node, operator):
    local = node.up(operator)
    everywhere = node.up(operator, bind="0.0.0.0:0")
    assert everywhere["pid"] != local["pid"] and everywhere["port"] == local["port"]
    assert node.up(operator)["pid"] == everywhere["pid"], "one that all can reach serves this machine as well"


def test_an_idle_agent_ends_by_itself_and_the_next_start_has_its_port(node, operator):
    known = node.up(operator)
    talk = operator.talk(known, Hello(run_id="r", claim=True), RunJob("r", COUNT))
    talk.hear(NodeReady)
    eventually(lambda: (node.folder / "runs/r/run.out").exists())
    node.end(known)
    talk.close()
    short = node.up(operator, idle_exit_s=0.3)              # it has the job to look after; else it could be gone before anybody comes
    (node.folder / "runs/r/work/enough").touch()
    eventually(lambda: gone(short), 60)
    assert (node.folder / "runs/r/run.exit").exists(), "it left a job alone"
    again = node.up(operator)
    assert (again["port"], again["id"]) == (short["port"], short["id"]) == (known["port"], known["id"])
    assert operator.talk(again, Hello(run_id="r")).hear(JobExited).code == 7


def test_a_port_that_somebody_else_took_meanwhile_is_no_obstacle(node, operator):
    known = node.up(operator)
    node.end(known)
    squatter = Link(os.urandom(32), f"127.0.0.1:{known['port']}")
    again = node.up(operator)
    assert again["port"] != known["port"] and operator.run(again, "r", "exit 5").code == 5
    squatter.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b'{"pid": "x", "start": 5, "port": 99999999, "run_id": [1]}'])
def test_files_of_the_agents_that_a_crash_broke_do_not_keep_it_down(node, operator, content):
    (node.folder / "agent").mkdir(parents=True, mode=0o700)
    for name in ("endpoint.json", "claim.json", "authorized"):
        (node.folder / "agent" / name).write_bytes(content)
    known = node.up(operator)
    assert operator.talk(known, Hello()).hear(NodeReady)


def test_a_run_folder_that_nothing_can_be_read_from_does_not_keep_the_agent_down(node, operator):
    for name, content in [("empty", None), ("broken", b"{"), ("lacking", b'{"version": 1}'), ("types", b'{"version": 1, "run_id": 5}')]:
        (node.folder / "runs" / name).mkdir(parents=True)
        if content is not None:
            (node.folder / "runs" / name / "state.json").write_bytes(content)
    (node.folder / "runs" / "a file").write_text("")
    known = node.up(operator)
    assert operator.run(known, "r", "exit 5").code == 5
    said = operator.talk(known, Hello(run_id="broken")).hear(Refused)       # and whoever asks for it isn't told that it was deleted
    assert str(node.folder / "runs" / "broken") in said.reason and "damaged" in said.reason and "state.json" in said.reason
    assert "damaged" in operator.talk(known, Hello(), RemoveRun("broken")).hear(Refused).reason and (node.folder / "runs" / "broken").exists()


# ---- a start that fails ----------------------------------------------------------------------------------------------------------

def old_pythons() -> list[str]:
    names = [shutil.which(f"python{version}") for version in ("2.7", "3.5", "3.6", "3.7")]
    names += map(str, Path("~/.pyenv/versions").expanduser().glob("*/bin/python[23].[5-7]"))
    works = [name for name in filter(None, names) if subprocess.run([name, "-c", ""], capture_output=True).returncode == 0]
    return sorted({Path(name).name: name for name in works}.values())


@pytest.mark.parametrize("python", old_pythons() or [pytest.param("", marks=pytest.mark.skip(reason="no Python older than 3.8 here"))])
def test_a_python_that_is_too_old_is_exit_10_and_named(node, operator, python):
    code, said = node.start(operator.id, python=python)
    assert code == 10 and "needs Python 3.8 or newer" in said["reason"] and python in said["reason"]


def bare_python() -> str:
    """An interpreter that has no iroh of its own."""
    for python in PYTHONS + [getattr(sys, "_base_executable", sys.executable)]:
        if subprocess.run([python, "-I", "-c", "import iroh"], capture_output=True).returncode:
            return python
    pytest.skip("every Python here has iroh installed")


def test_without_an_iroh_that_can_be_loaded_an_agent_has_its_socket_alone_and_the_loaders_words(node, operator, tmp_path):
    python = bare_python()
    code, said = node.start(operator.id, python=python, lib=str(tmp_path / "nowhere"))
    assert code == 0 and "iroh can't be loaded" in said["iroh"] and "nowhere" in said["iroh"] and "No module named 'iroh'" in said["iroh"]
    assert said["port"] == 0 and said["addresses"] == [] and os.path.exists(said["socket"])
    assert node.start(operator.id, python=python, lib=str(tmp_path / "nowhere"))[1]["pid"] == said["pid"]   # it would be the same again
    first = said
    broken = tmp_path / "lib"
    shutil.copytree(bootstrap.iroh_folder(), broken / "iroh")
    for library in (broken / "iroh").glob("*.so"):
        library.write_bytes(b"\x7fELF of another machine")
    code, said = node.start(operator.id, python=python, lib=str(broken))
    assert code == 0 and "iroh can't be loaded" in said["iroh"] and said["pid"] != first["pid"] and said["id"] == first["id"]
    code, said = node.start(operator.id, python=python)
    assert code == 0 and said["iroh"] is None and said["port"]


def test_a_node_dir_that_cannot_be_written_is_exit_12_and_named(tmp_path, operator):
    (tmp_path / "file").write_text("")
    code, said = NodeDir(tmp_path / "file" / "node").start(operator.id)
    assert code == 12 and f"{tmp_path}/file" in said["reason"] and "can't be written" in said["reason"]
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "agent").write_text("")
    code, said = NodeDir(tmp_path / "node").start(operator.id)
    assert code == 12 and f"{tmp_path}/node/agent" in said["reason"]


@pytest.mark.skipif(os.geteuid() == 0 and not (shutil.which("setpriv") and os.access("/usr/bin/python3", os.X_OK)),
                    reason="root writes everywhere, and there is no setpriv with a Python for another user")
def test_a_node_dir_of_somebody_else_is_exit_12(operator):
    with tempfile.TemporaryDirectory() as folder:           # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        (Path(folder) / "node").mkdir(mode=0o555)
        agent = shutil.copy(agent_file().path, Path(folder) / "agent-0.pyz")
        os.chmod(agent, 0o644)
        as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3"]
        argv = [*(as_nobody if os.geteuid() == 0 else [sys.executable]), "-I", agent, "start", "--node-dir", f"{folder}/node",
                "--authorize", operator.id]
        done = subprocess.run(argv, capture_output=True, timeout=60)
        assert done.returncode == 12 and f"{folder}/node".encode() in done.stdout and b"Permission denied" in done.stdout, done


def test_an_agent_that_hangs_is_replaced_and_its_job_goes_on(node, operator, tmp_path):
    known = node.up(operator)
    alive, go = node.folder / "agent" / "alive", tmp_path / "go"
    eventually(alive.exists)
    talk = operator.talk(known, Hello(run_id="hung", claim=True), RunJob("hung", f"echo up; while [ ! -e {go} ]; do sleep 0.02; done; exit 3"))
    eventually(lambda: (node.folder / "runs/hung/run.out").exists() and (node.folder / "runs/hung/run.out").read_bytes())
    talk.close()
    os.kill(known["pid"], signal.SIGSTOP)
    assert node.up(operator)["pid"] == known["pid"], "stopped a moment ago: it may only be slow"
    os.utime(alive, (time.time() - 60, time.time() - 60))
    again = node.up(operator)
    assert again["pid"] != known["pid"] and again["id"] == known["id"] and gone(known)
    go.touch()
    assert operator.talk(again, Hello(run_id="hung")).hear(JobExited, NodeFault).code == 3


def test_an_agent_whose_last_word_is_old_and_that_works_is_left_alone(node, operator):
    known = node.up(operator)
    alive = node.folder / "agent" / "alive"
    eventually(alive.exists)
    os.utime(alive, (time.time() - 60, time.time() - 60))       # as on a machine that has just been woken up
    assert node.up(operator)["pid"] == known["pid"]


def test_an_agent_that_hangs_before_its_first_beat_is_replaced(node, operator, tmp_path):
    mute = changed_package(tmp_path, agent=[(r"^ +if all\(door.answers", "            if 0 and all(door.answers")])
    known = node.up(operator, package=mute)
    os.kill(known["pid"], signal.SIGSTOP)
    alive = node.folder / "agent" / "alive"
    os.utime(alive, (time.time() - 60, time.time() - 60))
    again = node.up(operator, package=mute)
    assert again["pid"] != known["pid"] and gone(known)


def test_an_agent_that_cannot_come_up_is_exit_14_with_the_reason(node, operator):
    (node.folder / "agent").mkdir(parents=True)
    (node.folder / "agent" / "key").write_text("no key")
    (node.folder / "agent" / "key").chmod(0o600)
    code, said = node.start(operator.id)
    assert code == 14 and "is not a gpurun key" in said["reason"]
    (node.folder / "agent" / "key").unlink()
    code, said = node.start(operator.id, bind="203.0.113.1:0")
    assert code == 14 and "binding UDP 203.0.113.1:0" in said["reason"]
    (node.folder / "runs").write_text("")
    code, said = node.start(operator.id)
    assert code == 14 and "runs" in said["reason"]


def test_an_agent_that_dies_while_it_starts_is_exit_14_with_the_end_of_its_log(node, operator, tmp_path):
    (node.folder / "agent").mkdir(parents=True)
    (node.folder / "agent" / "log").write_text("an old story\n")
    dies = changed_package(tmp_path, agent=[(r"^class Agent:", "raise SystemError('no such luck')\nclass Agent:")])
    code, said = node.start(operator.id, package=dies)
    assert code == 14 and "no such luck" in said["reason"] and "an old story" not in said["reason"]


def test_a_folder_that_another_agent_holds_is_exit_13(node, operator, tmp_path):
    """As on a cluster whose machines share the home folder: there its process can't be seen from here."""
    quick = changed_package(tmp_path, node=[("^REPLACE_S = .*$", "REPLACE_S = 0.3")])
    (node.folder / "agent").mkdir(parents=True, mode=0o700)
    with open(node.folder / "agent" / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, said = node.start(operator.id, package=quick)
        assert code == 13 and "another agent holds" in said["reason"]
    assert node.start(operator.id, package=quick)[0] == 0


# ---- fifty jobs ------------------------------------------------------------------------------------------------------------------

def vitals(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {"rss_kib": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "fds": len(os.listdir(f"/proc/{pid}/fd"))}


def below(pid: int) -> list[list[str]]:
    """State and pid of all children, zombies included."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append([fields[0], name])
    return found


def test_fifty_jobs_in_a_row_leave_no_zombie_and_let_nothing_grow(node, operator):
    known = node.up(operator)

    def job(number: int) -> None:
        run_id = f"r{number}"
        assert operator.run(known, run_id, f"echo {number}; sleep 0 & exit {number}").code == number
        assert operator.logs(known, run_id) == b"%d\n" % number

    def settled() -> dict[str, int]:
        """Once the last job's threads are gone and a spare supervisor waits."""
        eventually(lambda: len(below(known["pid"])) == 1 and vitals(known["pid"])["threads"] <= quiet["threads"] + 1)
        return vitals(known["pid"])

    job(0)
    quiet = eventually(lambda: len(below(known["pid"])) == 1 and vitals(known["pid"]))
    for number in range(1, 11):
        job(number)
    at_ten = settled()
    for number in range(11, 51):
        job(number)
    settled()
    eventually(lambda: all(vitals(known["pid"])[name] <= at_ten[name] + more for name, more in (("threads", 1), ("fds", 4), ("rss_kib", 8 * 1024))), 60)
    assert all(state != "Z" for state, _ in below(known["pid"]))
    assert node.log() == ""


# ---- every Python ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).name)
def test_the_agent_runs_a_job_on_every_python_that_is_here(node, operator, python):
    known = node.up(operator, python=python)
    assert known["python"].startswith(Path(python).name.replace("python", "")) or Path(python).name in ("python", "python3")
    talk = operator.talk(known, Hello(run_id="r", job="job", claim=True), RunSetup("r", "echo ready > made"),
                         RunJob("r", 'cat made; echo "$A $GPURUN_RUN_ID"; exit 42', {"A": "ü \n"}))
    assert talk.hear(NodeReady).facts["fast_writes"] is True
    assert talk.hear(SetupCompleted).code == 0 and talk.hear(JobExited).code == 42
    assert operator.logs(known, "r") == "ready\nü \n r\n".encode()
    slow = operator.talk(known, Hello(run_id="slow", claim=True), RunJob("slow", "trap 'exit 3' TERM; echo up; while :; do sleep 0.05; done"))
    slow.hear(NodeReady)
    eventually(lambda: (node.folder / "runs/slow/run.out").exists() and (node.folder / "runs/slow/run.out").read_bytes())
    slow.say(StopJob("slow", 5.0))
    ended = slow.hear(JobExited)
    assert ended.stopped and ended.code == 3
    assert node.log() == "", "no warning, no traceback"


# ---- secrets ---------------------------------------------------------------------------------------------------------------------

def places_of(secret: str, folder: Path) -> list[str]:
    """Files below `folder` and processes whose command line have it."""
    found = []
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):         # a record's next version has a name of its own for a moment
            if file.is_file() and secret.encode() in file.read_bytes():
                found.append(str(file))
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if secret.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(f"process {name}")
    return found


def test_a_value_of_the_jobs_env_is_in_no_file_and_no_command_line(here):
    path = here.job('echo "have ${#TOKEN}"; while [ ! -e "$GPURUN_OUTPUTS/enough" ]; do sleep 0.05; done; test -n "$TOKEN"',
                    setup='test -n "$TOKEN"', env={"TOKEN": "${SECRET}"})
    process = here.start(path, env=dict(here.env, SECRET=SECRET))
    log = eventually(lambda: next(iter((here.node_dir / "runs").glob("*/run.out")), None))
    eventually(lambda: log.read_bytes() == b"have %d\n" % len(SECRET))
    assert places_of(SECRET, here.folder) == []
    (log.parent / "work" / "enough").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and SECRET.encode() not in out + err
    assert places_of(SECRET, here.folder) == []
