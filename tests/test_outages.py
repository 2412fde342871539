"""What happens to a run when the network, the agent or this machine goes away in the middle: it goes on, and not a byte is missing or doubled.

Each scene has links of its own, and all scenes that the selected tests need go on side by side: most of their time is waiting.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import Here, eventually
from links import Wan, linked, needs_a_network, wan

from gpurun.files import TEMP_PREFIX

pytestmark = needs_a_network
SCENE_S = 900.0               # none takes a quarter of it on a machine with nothing else to do
WAIT_S = 240.0
SIZE = 9_000_000              # of a workspace and of outputs, in three files: more than a minute at RATE for both, so that none is over before its outage
BEGUN = 250_000               # of it is here: the transfer is under way
RATE = "2mbit"
SCENES: dict[str, Callable[[Path, Path], Any]] = {}


def scene(play: Callable[[Path, Path], Any]) -> Any:
    """`play(folder, lib)` as a fixture, which is what it returns."""
    SCENES[play.__name__] = play

    @pytest.fixture(scope="module", name=play.__name__)
    def outcome(playing):
        return playing[play.__name__].result(SCENE_S)

    return outcome


@pytest.fixture(scope="module")
def playing(request, tmp_path_factory):
    wanted = {name for item in request.session.items if item.path == request.path for name in item.fixturenames if name in SCENES}
    folder = tmp_path_factory.mktemp("outages")
    with linked(folder / "first", "first") as link, ThreadPoolExecutor(len(SCENES)) as pool:
        first = link.operator("first")
        assert first.gpurun(first.job("true")).returncode == 0
        yield {name: pool.submit(SCENES[name], folder / name, link.home / "first/lib") for name in SCENES if name in wanted}


class Run:
    """A gpurun in a process of its own, and the run that it is about."""

    def __init__(self, here: Here, *args: Any) -> None:
        self.here, number = here, len(list(here.folder.glob("*.err")))
        self._out, self._err = here.folder / f"{number}.out", here.folder / f"{number}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = here.start(*args, stdout=out, stderr=err)

    def until(self, text: str, timeout_s: float = WAIT_S) -> "Run":
        """Returns as soon as gpurun or the job said that. A number and its line's end is a whole line: an id of a run may end so too."""
        text, lead = ("\n" + text, "\n") if text[:-1].isdigit() else (text, "")
        try:
            eventually(lambda: text in lead + self.err or text in lead + self.out or self.process.poll() is not None, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"no {text!r}: {error}\n{self.talk}") from None
        assert text in lead + self.err or text in lead + self.out, self.err
        return self

    def end(self, timeout_s: float = WAIT_S) -> "Run":
        try:
            self.code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not over within {timeout_s:g} s: {self.err}") from None
        assert "Traceback" not in self.err, self.err
        self.folder = self.here.latest                                # of the run, before a later one is the latest
        return self

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def talk(self) -> str:
        return "".join(line for line in self.err.splitlines(True) if line.startswith("gpurun: "))

    def until_lost(self) -> "Run":
        """Returns once the node is said to be away: on a machine that is out of breath the silence is noticed later."""
        eventually(lambda: self.losses > self.returns or self.process.poll() is not None, WAIT_S)
        assert self.losses > self.returns, self.talk
        return self

    @property
    def two_lines(self) -> bool:
        """Whether there was one line for each loss and one for its return. On a machine that is out of breath a node may seem away once more."""
        return self.losses == self.returns > 0

    @property
    def losses(self) -> int:
        return self.talk.count("can't be reached")

    @property
    def returns(self) -> int:
        return self.talk.count("is back after")


def count(until: Path, then: str = "") -> str:
    """Shell that prints numbers, ten a second on both outputs, until that file is there."""
    return f"i=0; while [ ! -e {until} ]; do i=$((i+1)); echo $i; echo $i >&2; sleep 0.1; done; {then}"


def numbers(text: str) -> int:
    """How many lines were counted; each must be there, and once."""
    lines = text.splitlines()
    assert lines == [str(number) for number in range(1, len(lines) + 1)], text
    return len(lines)


def there(link: Wan, run: Run) -> Path:
    """The run's folder on the node."""
    return link.home / run.here.folder.name / "runs" / run.folder.name


def arrived(folder: Path) -> int:
    """Bytes below a folder that may change meanwhile."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                pass
    return size


def whole(link: Wan, run: Run, code: int, out: str | None = None) -> None:
    """The run ended with that exit code; logs here and there are the same, and what was shown is what was kept."""
    record, latest = run.record, run.folder
    assert (run.code, record["exit_code"], record["logs_complete"]) == (code, code, True), run.talk
    kept = {log: (latest / log).read_text() for log in ("stdout.log", "stderr.log", "setup-stdout.log", "setup-stderr.log") if (latest / log).exists()}
    node = there(link, run)
    for log, name in (("stdout.log", "run.out"), ("stderr.log", "run.err"), ("setup-stdout.log", "setup.out"), ("setup-stderr.log", "setup.err")):
        assert kept.get(log, "") == ((node / name).read_text() if (node / name).exists() else ""), log
    assert run.out == kept["stdout.log"]
    assert out is None or run.out == out
    events = [event["event"] for event in map(json.loads, (latest / "events.jsonl").read_text().splitlines()) if "event" in event]
    assert len(events) == len(set(events)), events                    # no step of the lifecycle was taken twice
    assert [path for path in latest.rglob("*") if path.name.startswith(TEMP_PREFIX)] == []


# ---- the network goes, in each phase ---------------------------------------------------------------------------------------------------

PHASES = {"push": 6, "setup": 4, "run": 3, "collect": 5}              # with the exit code of the job


def operators(link: Wan, lib: Path, *names: str, **provider: Any) -> dict[str, Here]:
    """Each with an agent that is up already."""
    made = {name: link.operator(name, lib, **provider) for name in names}
    begun = [Run(here, here.job("true")) for here in made.values()]
    for run in begun:
        assert run.end().code == 0, run.err
    return made


def outage(link: Wan, who: dict[str, Here], seconds: float, name: str, *others: Run) -> dict[str, Run]:
    """Four runs, each in another phase when the network goes, for so long at least and until each has said so, the `others` too; over when the four
    have ended."""
    go, runs = link.folder / f"{name}.go", {}
    before = {phase: arrived(link.home / phase) for phase in PHASES}
    here = who["setup"]
    runs["setup"] = Run(here, here.job("seq 100; echo s > o; exit 4", name=name, outputs=["o"], setup=f"echo begun; {count(go)}"))
    here = who["run"]
    runs["run"] = Run(here, here.job(count(go, "echo r > o; exit 3"), name=name, outputs=["o"]))
    runs["run"].until("5\n")
    runs["setup"].until("begun")
    link.set(rate=RATE)
    here = who["push"]
    (here.work / name).mkdir()
    for number in range(3):
        (here.work / name / str(number)).write_bytes(os.urandom(SIZE // 3))
    runs["push"] = Run(here, here.job("cat [0-2] | sha256sum; exit 6", name=name, workspace={"workdir": name}))
    here = who["collect"]
    runs["collect"] = Run(here, here.job(f"mkdir o; cd o; for n in 0 1 2; do head -c {SIZE // 3} /dev/urandom > $n; done; cat [0-2] | sha256sum; exit 5",
                                         name=name, outputs=["o"]))
    came = {"push": lambda: arrived(link.home / "push") - before["push"],
            "collect": lambda: sum(map(arrived, here.runs.glob(f"{name}-*")))}
    for phase in came:
        eventually(lambda: came[phase]() > BEGUN, WAIT_S)
    doubted = {run: run.losses for run in (*runs.values(), *others)}
    link.set(loss="100%")
    under_way = {phase: come() for phase, come in came.items()}
    assert all(BEGUN < size < SIZE for size in under_way.values()), under_way
    time.sleep(seconds / 2)
    go.touch()                                                        # the job of one ends meanwhile, setup and job of another
    time.sleep(seconds / 2)
    for run in doubted:
        run.until_lost()
    assert all(run.losses - losses <= 1 for run, losses in doubted.items())      # however long it lasts it is said once
    link.set(loss="0", rate="none")
    for run in runs.values():
        run.healed = time.monotonic()
    for run in runs.values():
        run.end()
        print(f"{name}: {run.here.folder.name} ended {time.monotonic() - run.healed:.1f} s after the network was back")
    return runs


def check(link: Wan, runs: dict[str, Run], phase: str) -> None:
    run = runs[phase]
    whole(link, run, PHASES[phase])
    assert run.two_lines, run.talk
    folder = run.folder / "outputs/o"
    if phase == "run":
        assert numbers(run.out) > 10 and numbers((run.folder / "stderr.log").read_text()) > 10 and folder.read_text() == "r\n"
    elif phase == "setup":
        assert numbers((run.folder / "setup-stdout.log").read_text().removeprefix("begun\n")) > 10
        assert numbers(run.out) == 100 and folder.read_text() == "s\n"
    else:
        parts = run.here.work / run.record["job"]["name"] if phase == "push" else folder
        summed = subprocess.run("cat [0-2] | sha256sum", shell=True, cwd=parts, stdout=subprocess.PIPE, check=True).stdout.decode()
        assert run.out == summed and run.out


@scene
def short(folder: Path, lib: Path) -> Any:
    """Five seconds, and then twenty, which break each connection."""
    with linked(folder, "short") as link:
        who = operators(link, lib, *PHASES, "twice", "attach")
        after = link.folder / "after.go"
        logins = link.logins
        jobs = {name: who[name].job(count(after, "echo t > o; exit 8"), name=name, outputs=["o"]) for name in ("twice", "attach")}
        runs = {"twice": Run(who["twice"], jobs["twice"]).until("5\n")}
        five = outage(link, who, 5, "five", runs["twice"])
        logins = link.logins - logins
        Run(who["attach"], "submit", jobs["attach"]).end()
        runs["attach"] = Run(who["attach"], "attach", "latest").until("5\n")
        runs["watch"] = Run(who["attach"], "logs", "-f", "latest").until("5\n")
        twenty = outage(link, who, 20, "twenty", runs["twice"], runs["attach"])
        seen = {name: len(run.out) for name, run in runs.items()}
        eventually(lambda: all(len(run.out) > seen[name] for name, run in runs.items()), WAIT_S)   # all go on by themselves
        after.touch()
        for run in runs.values():
            run.end()
        runs["logins"] = logins
        return link, {"five": five, "twenty": twenty}, runs


@scene
def minute(folder: Path, lib: Path) -> Any:
    with linked(folder, "minute") as link:
        who, after = operators(link, lib, *PHASES, "logs", "no-ssh"), link.folder / "after.go"
        Run(who["logs"], "submit", who["logs"].job(count(after), name="logs")).end()
        runs = {"logs": Run(who["logs"], "logs", "-f", "latest").until("5\n")}
        own_config = link.folder / "ssh_config"
        own_config.write_text(Path(link.config).read_text())
        who["no-ssh"].env["GPURUN_SSH_CONFIG"] = str(own_config)
        runs["no-ssh"] = Run(who["no-ssh"], who["no-ssh"].job(count(after, "exit 8"), name="nossh")).until("5\n")
        own_config.write_text(own_config.read_text().replace("Port 2222", "Port 1"))
        sixty = outage(link, who, 60, "sixty", runs["no-ssh"])
        seen = {name: len(run.out) for name, run in runs.items()}
        eventually(lambda: all(len(run.out) > seen[name] for name, run in runs.items()), WAIT_S)
        after.touch()
        return link, {"sixty": sixty}, {name: run.end() for name, run in runs.items()}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("length", ["five", "twenty"])
def test_a_loss_of_the_network_in_any_phase_changes_nothing_but_two_lines(short, length, phase):
    link, outages, _ = short
    check(link, outages[length], phase)


@pytest.mark.parametrize("phase", PHASES)
def test_a_minute_without_a_network_changes_nothing_either(minute, phase):
    link, outages, _ = minute
    check(link, outages["sixty"], phase)


def test_two_losses_in_one_run_are_two_pairs_of_lines(short):
    link, _, runs = short
    run = runs["twice"]
    whole(link, run, 8)
    assert numbers(run.out) > 100 and run.two_lines and run.losses > 1, run.talk


def test_a_short_loss_costs_no_ssh_login(short):
    """Which may ask for a passphrase or a code."""
    assert short[2]["logins"] == 0


def test_attach_goes_on_through_a_loss_and_ends_as_the_job_did(short):
    link, _, runs = short
    whole(link, runs["attach"], 8)
    assert numbers(runs["attach"].out) > 50 and runs["attach"].two_lines, runs["attach"].talk
    assert (runs["attach"].folder / "outputs/o").read_text() == "t\n"
    assert runs["watch"].code == 0 and runs["watch"].out == runs["attach"].out


def test_logs_of_a_run_that_nobody_drives_go_on_through_a_loss(minute):
    link, _, runs = minute
    run = runs["logs"]
    assert run.code == 0 and run.out == (there(link, run) / "run.out").read_text() and numbers(run.out) > 100, run.talk
    assert run.talk.count("connecting again") == run.talk.count("is back") > 0, run.talk


# ---- the agent goes, the machine stays -------------------------------------------------------------------------------------------------

@scene
def killed(folder: Path, lib: Path) -> Any:
    with linked(folder, "killed") as link:
        who, go = operators(link, lib, "setup", "run"), link.folder / "go"
        runs = {"setup": Run(who["setup"], who["setup"].job("seq 100; exit 4", setup=count(go))),
                "run": Run(who["run"], who["run"].job(count(go, "echo r > o; exit 3"), outputs=["o"]))}
        for name, run in runs.items():
            run.until("5\n")
            os.kill(who[name].agent(link.home / name)["pid"], signal.SIGKILL)
        for run in runs.values():
            run.until("is back after")                 # 30 s where there is room; a machine at its limit takes several tries
        go.touch()
        return link, {name: run.end() for name, run in runs.items()}


@pytest.mark.parametrize("phase, code", [("setup", 4), ("run", 3)])
def test_an_agent_that_is_killed_is_started_again_over_ssh_and_the_run_goes_on(killed, phase, code):
    link, runs = killed
    run = runs[phase]
    print(run.talk)
    whole(link, run, code)
    assert run.two_lines, run.talk
    assert numbers((run.folder / {"setup": "setup-stdout.log", "run": "stdout.log"}[phase]).read_text()) > 20


@scene
def blocked(folder: Path, lib: Path) -> Any:
    """Longer than the patience with a node that says nothing at all."""
    with linked(folder, "blocked") as link:
        who, go = operators(link, lib, "blocked", lost_after_s=45), link.folder / "go"
        run = Run(who["blocked"], who["blocked"].job(count(go, "echo b > o; exit 3"), outputs=["o"])).until("5\n")
        link.set(udp="drop")
        time.sleep(75)
        run.blocked = run.process.poll(), run.talk, who["blocked"].record()["state"]
        link.set(udp="pass")
        run.until("is back after")
        go.touch()
        return link, run.end()


def test_a_node_that_answers_over_ssh_is_never_lost(blocked):
    link, run = blocked
    code, said, state = run.blocked
    assert (code, state) == (None, "RUNNING") and said.count("no UDP gets through to node: going over SSH") == 1, run.talk
    whole(link, run, 3)
    assert numbers(run.out) > 100 and run.two_lines, run.talk


# ---- everything is silent for too long --------------------------------------------------------------------------------------------------

PATIENCE = {"stop": 10, "attach": 25, "fetch": 25}


@scene
def lost(folder: Path, lib: Path) -> Any:
    """Cut as soon as the node has said that setup is over, so that its last word is known."""
    with linked(folder, "lost") as link:
        who = {name: operators(link, lib, name, lost_after_s=seconds)[name] for name, seconds in PATIENCE.items()}
        begin, go = link.folder / "begin", link.folder / "go"
        jobs = {"stop": who["stop"].job(ENDLESS, setup=f"while [ ! -e {begin} ]; do sleep 0.05; done", outputs=["o"])}
        for name, code in (("attach", 3), ("fetch", 4)):
            jobs[name] = who[name].job(count(go, f"echo {name} > o; exit {code}"), setup=f"while [ ! -e {begin} ]; do sleep 0.05; done", outputs=["o"])
        runs = {name: Run(who[name], job) for name, job in jobs.items()}
        for run in runs.values():
            run.until("setup: on node")
        begin.touch()
        for run in runs.values():
            run.until("1\n")
        link.set(loss="100%")
        cut = time.time()
        records = {}
        time.sleep(5)
        go.touch()                                                    # two jobs end where nobody hears it
        for name, run in runs.items():
            records[name] = run.end().record
            run.cut = cut
        link.set(loss="0")
        after = {name: Run(who[name], name, "latest") for name in runs}
        return link, runs, records, {name: run.end() for name, run in after.items()}


@pytest.mark.parametrize("name", PATIENCE)
def test_a_node_that_is_silent_on_every_way_is_lost_after_as_long_as_was_said(lost, name):
    _, runs, records, _ = lost
    run, record, patience_s = runs[name], records[name], PATIENCE[name]
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    last_word, ended = (datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() for text in (
        next(event["time"] for event in events if event.get("event") == "SetupCompleted"), record["times"]["ended"]))
    print(f"{name}: lost {ended - last_word:.1f} s after setup was over, {ended - run.cut:.1f} s after the cut; lost_after_s = {patience_s}")
    assert ended - last_word >= 0.9 * patience_s and ended - run.cut <= 1.1 * patience_s + 10, run.talk   # a machine at its limit is late
    assert run.code == 125 == record["exit_code"] and record["state"] == "FAILED" and "nothing heard for" in record["reason"], record["reason"]
    assert run.losses - run.returns == 1 and f"gpurun attach {record['run_id']}" in run.talk, run.talk


@pytest.mark.parametrize("name, code", [("attach", 3), ("fetch", 4)])
def test_a_lost_node_that_comes_back_still_gives_everything(lost, name, code):
    """The exit code, the logs to their last byte, and the outputs."""
    link, _, _, after = lost
    run = after[name]
    record = run.record
    log = (there(link, run) / "run.out").read_text()
    assert (record["state"], record["exit_code"], record["logs_complete"], record["outputs"]) == ("FAILED", code, True, ["o"]), run.talk
    assert numbers(log) > 10 and (run.folder / "stdout.log").read_text() == log == (run.folder / "stderr.log").read_text()
    assert (run.folder / "outputs/o").read_text() == f"{name}\n"
    if name == "attach":
        assert run.code == code and run.out == log


def test_a_lost_run_is_ended_and_collected_by_stop_once_the_node_is_back(lost):
    """Its job went on all the while; `stop` asks the node instead of believing the record."""
    link, _, _, after = lost
    run = after["stop"]
    record = run.record
    assert run.code == 0 and (record["state"], record["reason"], record["outputs"]) == ("FAILED", "stopped by the operator", ["o"]), run.talk
    log = (run.folder / "stdout.log").read_text()
    printed = numbers(log)
    assert log == (there(link, run) / "run.out").read_text() and printed > 50
    assert int((run.folder / "outputs/o").read_text() or printed) in (printed, printed - 1)


@scene
def cut_short(folder: Path, lib: Path) -> Any:
    """Lost in the middle of a transfer, and taken up again from its record."""
    with linked(folder, "cut") as link:
        who = operators(link, lib, "push", "collect", lost_after_s=20)
        before = arrived(link.home / "push")
        link.set(rate=RATE)
        here = who["push"]
        (here.work / "tree").mkdir()
        (here.work / "tree/data").write_bytes(os.urandom(SIZE))
        runs = {"push": Run(here, here.job("sha256sum < data; exit 6", name="cut", workspace={"workdir": "tree"})),
                "collect": Run(who["collect"], who["collect"].job(f"head -c {SIZE} /dev/urandom > o; sha256sum < o", name="cut", outputs=["o"]))}
        came = {"push": lambda: arrived(link.home / "push") - before, "collect": lambda: sum(map(arrived, who["collect"].runs.glob("cut-*")))}
        for come in came.values():
            eventually(lambda: come() > BEGUN, WAIT_S)
        link.set(loss="100%")
        sizes = {name: come() for name, come in came.items()}
        for run in runs.values():
            run.end()
        link.set(loss="0", rate="none")
        return link, sizes, runs, {name: Run(who[name], "attach", "latest").end() for name in runs}


@pytest.mark.parametrize("phase, code", [("push", 6), ("collect", 0)])
def test_a_run_that_was_lost_in_a_transfer_goes_on_with_attach(cut_short, phase, code):
    link, sizes, runs, after = cut_short
    assert BEGUN < sizes[phase] < SIZE and runs[phase].code == 125, runs[phase].talk
    run = after[phase]
    whole(link, run, code)
    data = run.here.work / "tree/data" if phase == "push" else run.folder / "outputs/o"
    assert run.out == subprocess.check_output("sha256sum", stdin=open(data, "rb"), text=True)


# ---- a stop while nobody can be told ---------------------------------------------------------------------------------------------------------

ENDLESS = "i=0; while :; do i=$((i+1)); echo $i | tee o; sleep 0.1; done"


@scene
def stopped(folder: Path, lib: Path) -> Any:
    """Stopped during an outage that soon ends."""
    with linked(folder, "stopped") as link:
        who = operators(link, lib, "stopped")
        run = Run(who["stopped"], who["stopped"].job(ENDLESS, outputs=["o"])).until("5\n")
        link.set(loss="100%")
        run.until("can't be reached")
        run.process.terminate()
        time.sleep(8)
        link.set(loss="0")
        return link, run.end()


def test_a_stop_during_a_loss_is_done_when_the_node_is_back(stopped):
    link, run = stopped
    record = run.record
    assert (run.code, record["state"], record["reason"], record["outputs"]) == (130, "FAILED", "stopped by the operator", ["o"]), run.talk
    log = (run.folder / "stdout.log").read_text()
    assert numbers(log) > 20 and run.out == log == (there(link, run) / "run.out").read_text() and run.two_lines, run.talk


@scene
def unheard(folder: Path, lib: Path) -> Any:
    """The same, and the node doesn't come back within half a minute."""
    with linked(folder, "unheard") as link:
        who = operators(link, lib, "unheard")
        run = Run(who["unheard"], who["unheard"].job(ENDLESS, outputs=["o"])).until("5\n")
        link.set(loss="100%")
        run.until("can't be reached")
        run.process.terminate()
        begun = time.monotonic()
        run.end()
        took_s, record = time.monotonic() - begun, run.record
        link.set(loss="0")
        return link, run, took_s, record, Run(who["unheard"], "stop", "latest").end()


def test_a_stop_that_can_not_be_delivered_is_given_up_after_half_a_minute_and_can_be_said_again(unheard):
    link, run, took_s, record, stop = unheard
    print(f"given up {took_s:.1f} s after the stop")
    assert 25 < took_s < 60 and run.code == 125 and record["run_id"] in run.talk, run.talk
    record = stop.record
    assert (stop.code, record["state"], record["reason"], record["outputs"]) == (0, "FAILED", "stopped by the operator", ["o"]), stop.talk
    log = (stop.folder / "stdout.log").read_text()
    assert numbers(log) > 100 and log == (there(link, stop) / "run.out").read_text()


# ---- addresses change ---------------------------------------------------------------------------------------------------------------------

def readdress(link: Wan, ours: bool) -> str:
    """One end of the link gets another address instead of the one that it had; the new one."""
    (state,) = json.loads(wan("status", link.name, "--json"))
    here, node, near, far = state["operator"], state["node"], ["ip"], ["ip", "-n", link.name]
    old, peer, new = (here, node, here[:-1] + "3") if ours else (node, here, node[:-1] + "4")
    moving, device, other, other_device = (near, state["dev"], far, "wan0") if ours else (far, "wan0", near, state["dev"])
    for command in ([*other, "route", "add", new, "dev", other_device], [*moving, "addr", "del", old, "peer", peer, "dev", device],
                    [*moving, "addr", "add", new, "peer", peer, "dev", device]):
        subprocess.run(command, check=True)
    return new


@scene
def moved(folder: Path, lib: Path) -> Any:
    """The operator goes to another network while a job runs and a workspace is on its way."""
    with linked(folder, "moved") as link:
        who, go = operators(link, lib, "run", "push"), link.folder / "go"
        runs = {"run": Run(who["run"], who["run"].job(count(go, "echo m > o; exit 3"), name="moved", outputs=["o"])).until("5\n")}
        (who["push"].work / "tree").mkdir()
        (who["push"].work / "tree/data").write_bytes(os.urandom(SIZE))
        before = arrived(link.home / "push")
        link.set(rate=RATE)
        runs["push"] = Run(who["push"], who["push"].job("sha256sum < data; exit 6", name="moved", workspace={"workdir": "tree"}))
        eventually(lambda: arrived(link.home / "push") - before > BEGUN, WAIT_S)
        readdress(link, ours=True)
        under_way, seen, begun = arrived(link.home / "push") - before, len(runs["run"].out), time.monotonic()
        assert under_way < SIZE, under_way
        link.set(rate="none")
        eventually(lambda: len(runs["run"].out) > seen, WAIT_S)
        print(f"the operator has another address: output again after {time.monotonic() - begun:.1f} s")
        go.touch()
        return link, {name: run.end() for name, run in runs.items()}


@pytest.mark.parametrize("phase, code", [("run", 3), ("push", 6)])
def test_an_operator_whose_address_changes_goes_on(moved, phase, code):
    link, runs = moved
    run = runs[phase]
    print(run.talk)
    whole(link, run, code)
    assert run.losses == run.returns, run.talk
    if phase == "push":
        assert run.out == subprocess.check_output("sha256sum < data", shell=True, cwd=run.here.work / "tree", text=True)


@scene
def renamed(folder: Path, lib: Path) -> Any:
    """The node comes back with another address, which the ssh config learns later."""
    with linked(folder, "renamed", "ListenAddress=0.0.0.0") as link:
        who, go = operators(link, lib, "setup"), link.folder / "go"
        run = Run(who["setup"], who["setup"].job("seq 100; exit 4", setup=count(go))).until("5\n")
        old = json.loads(wan("status", link.name, "--json"))[0]["node"]
        new = readdress(link, ours=False)
        run.until("can't be reached")
        for path in (Path(link.config), Path(link.config).with_name("known_hosts")):
            path.write_text(path.read_text().replace(old, new))
        run.until("is back after")
        go.touch()
        return link, run.end()


def test_a_node_whose_address_changes_during_setup_is_found_again_over_ssh(renamed):
    link, run = renamed
    print(run.talk)
    whole(link, run, 4)
    assert numbers((run.folder / "setup-stdout.log").read_text()) > 20 and run.two_lines, run.talk


# ---- a very slow link, and a laptop that sleeps ---------------------------------------------------------------------------------------------

@scene
def slow(folder: Path, lib: Path) -> Any:
    with linked(folder, "slow") as link:
        who = operators(link, lib, "slow")
        link.set(rtt="3s")
        begun = time.monotonic()
        run = Run(who["slow"], who["slow"].job("seq 3; sleep 15; echo s > o; exit 3", outputs=["o"])).end()
        print(f"a run of 15 s at a round trip of 3 s: {time.monotonic() - begun:.1f} s")
        return link, run


def test_a_round_trip_of_three_seconds_is_no_loss(slow):
    link, run = slow
    whole(link, run, 3, "1\n2\n3\n")
    assert run.losses == 0 and "warning" not in run.talk and (run.folder / "outputs/o").read_text() == "s\n", run.talk


@scene
def asleep(folder: Path, lib: Path) -> Any:
    """This machine sleeps for three times its patience; one job ends meanwhile."""
    with linked(folder, "asleep") as link:
        who, go = operators(link, lib, "ends", "lasts", lost_after_s=10), link.folder / "go"
        timed = "begun=$EPOCHREALTIME; {} over=$EPOCHREALTIME; echo $begun $over > o; exit 3"
        runs = {"ends": Run(who["ends"], who["ends"].job(timed.format("seq 5; sleep 8;"), outputs=["o"])),
                "lasts": Run(who["lasts"], who["lasts"].job(timed.format(count(go)), outputs=["o"]))}
        for run in runs.values():
            run.until("5\n")
            run.process.send_signal(signal.SIGSTOP)
        time.sleep(30)
        seen = len(runs["lasts"].out)
        for run in runs.values():
            run.process.send_signal(signal.SIGCONT)
        eventually(lambda: len(runs["lasts"].out) > seen, WAIT_S)     # its output goes on, while its job does
        go.touch()
        return link, {name: run.end() for name, run in runs.items()}


@pytest.mark.parametrize("name", ["ends", "lasts"])
def test_a_laptop_that_sleeps_neither_loses_a_run_nor_makes_it_longer(asleep, name):
    link, runs = asleep
    run = runs[name]
    print(run.talk)
    whole(link, run, 3)
    assert run.losses == run.returns, run.talk
    begun, ended = map(float, (run.folder / "outputs/o").read_text().split())
    assert abs(run.record["seconds"]["run"] - (ended - begun)) < 5 and (ended - begun > 30) == (name == "lasts"), run.record["seconds"]


def test_a_node_that_only_ssh_can_not_reach_is_back_as_soon_as_the_network_is(minute):
    link, _, runs = minute
    run = runs["no-ssh"]
    whole(link, run, 8)
    assert numbers(run.out) > 100 and run.two_lines, run.talk
