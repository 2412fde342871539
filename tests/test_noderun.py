"""One run on its node, in this process, with real supervisors: the agent is killed at each of its writes, and the next one ends the run.

A kill is a copy of the run's folder at that moment, which a new NodeRun takes up while the first one is long gone. What must hold for
each: every event once and in order, each phase at most once, and the truth at the end. What nobody can know is a NodeFault that says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from conftest import eventually

from gpurun import manifest, noderun, rundisk, runstate, supervise
from gpurun.errors import TransferError, WireError
from gpurun.messages import (
    CollectOutputs, Detach, JobExited, MaterializeWorkspace, NodeFault, OutputsCollected, RunJob, RunSetup, SetupCompleted, StopJob,
    WorkspaceMaterialized,
)
from gpurun.noderun import NodeRun
from gpurun.slurmjobs import Slurm
from gpurun.store import Store
from gpurun.supervisors import Supervisors
from gpurun.transfer import Pulled
from streams import listed, push

ROOT = str(Path(noderun.__file__).parents[1])
SUPERVISE = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {ROOT!r}); from gpurun.node import main; sys.exit(main(['supervise']))"]
BEGUN = 'echo {0} >> "$GPURUN_OUTPUTS/../begun"; '      # in the run's folder, so that it is in a copy of it as well
RUN_ID = "r-" + os.urandom(4).hex()                     # what is left of a run is found, and ended, by its id
ENDS_S = 30.0


class Node:
    """What a run needs of its agent."""

    def __init__(self, folder: Path, supervisors: Supervisors) -> None:
        self.store = Store(str(folder))
        self.folder = Path(self.store.runs, RUN_ID)
        self.ended: list[NodeRun] = []
        self.parts = {"supervisors": supervisors, "environment": lambda: {"PATH": os.environ["PATH"]}, "ended": self.ended.append,
                      "slurm": Slurm(lambda: {"PATH": os.environ["PATH"]})}

    def create(self, **fields: Any) -> NodeRun:
        return NodeRun.create(self.store, RUN_ID, "job", "operator", "ana@laptop", **{"place": 1, "keep": 20, **fields}, **self.parts)

    def load(self) -> NodeRun:
        run = NodeRun.load(self.store, str(self.folder), **self.parts)
        assert run is not None
        return run

    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text())

    def change(self, **state: Any) -> None:
        (self.folder / "state.json").write_text(json.dumps(dict(self.state(), **state)))

    def begun(self) -> list[str]:
        path = self.folder / "begun"
        return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="module")
def supervisors() -> Iterator[Supervisors]:
    one = Supervisors(SUPERVISE)
    yield one
    one.close()


@pytest.fixture
def node(tmp_path: Path, supervisors: Supervisors) -> Node:
    return Node(tmp_path / "node", supervisors)


def told(run: NodeRun, *commands: Any) -> NodeRun:
    for command in commands:
        run.handle(command)
    return run


def at_work(run: NodeRun, turn: bool = True) -> NodeRun:
    run.begin()
    if turn:
        run.grant()
    return run


def ended(run: NodeRun) -> list[Any]:
    """Its events, once it has ended."""
    assert run.settled.wait(ENDS_S), run.report()
    return list(run.events)


def kinds(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


def once_and_in_order(events: list[Any]) -> None:
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len(set(kinds(events))) == len(events), kinds(events)


# ---- a kill at every write -----------------------------------------------------------------------------------------------------------------

class Kills:
    """Copies of a run's folder, before and after each write of its agent's and each word to a supervisor; and of a line half written."""

    def __init__(self, node: Node, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.target, self.copies, self.on = node, target, [], True   # type: ignore[var-annotated]
        self.run: NodeRun | None = None
        self.promised = False                           # Detached was said
        self.given: list[str] = []                      # the phases whose supervisor has got its work
        for where, name in ((noderun, "atomic_write"), (rundisk, "atomic_write"), (rundisk, "append_line"), (Supervisors, "take"), (Supervisors, "give")):
            monkeypatch.setattr(where, name, self.around(name, getattr(where, name)))

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            self.copy(f"before {name}")
            result = real(*args)
            if name == "give":
                self.given.append(args[1]["phase"])
            if name != "give":                          # from there on the supervisor is at work: see the jobs that copy
                self.copy(f"after {name}")
            if name == "append_line" and self.on:
                lines = self.copy(f"in the middle of {name}") / "events.jsonl"
                lines.write_bytes(lines.read_bytes()[:-7])
            return result
        return staticmethod(write) if name == "give" else write   # type: ignore[return-value]

    def copy(self, when: str) -> Path:
        copy = self.target / str(len(self.copies))
        if self.on and self.node.folder.exists():
            shutil.copytree(self.node.folder, copy, symlinks=True)
            if self.given and not (copy / f"{self.given[-1]}.exit").exists():   # it runs
                assert json.loads((copy / "state.json").read_text())["supervised"]["phase"] == self.given[-1], f"{when}: nobody would know that it runs"
            self.copies.append((when, copy, len(self.run.events) if self.run else 0, self.promised))
        return copy

    def each(self, tmp_path: Path, supervisors: Supervisors) -> Iterator[tuple[str, Node, int, bool]]:
        """(when, a node with what was on the disk then, how many events had been told at most, whether it must go on alone)."""
        self.on = False
        assert len(self.copies) > 6
        for number, (when, copy, events, promised) in enumerate(self.copies):
            root = tmp_path / f"again{number}"
            shutil.copytree(self.node.store.root, root, ignore=shutil.ignore_patterns("runs"))
            (root / "runs").mkdir()
            shutil.copytree(copy, root / "runs" / RUN_ID, symlinks=True)
            again = Node(root, supervisors)
            if (again.folder / "state.json").exists():  # else nobody was told yet that there is such a run
                yield f"{number}: {when}", again, events, promised


def the_tree(node: Node, tmp_path: Path) -> str:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("a\n")
    entries, encoded = listed(tmp_path / "tree")
    push(node.store, tmp_path / "tree", entries, encoded)
    return manifest.tree_id(encoded)


def collected(run: NodeRun) -> list[Any]:
    """As an operator does it, which pulls again when it didn't hear that it has collected."""
    ended(run)
    if not run.collected:
        run.handle(CollectOutputs(RUN_ID, ["out"]))
        run.pulled(Pulled(1, 2, [], []), ["out"])
    return list(run.events)


@pytest.mark.parametrize("env", [{}, {"TOKEN": "s3cret"}], ids=["without env", "with env"])
def test_a_run_whose_agent_is_killed_at_any_of_its_writes_ends_as_if_nothing_had_been(node, supervisors, tmp_path, monkeypatch, env):
    """Its operator is there, and says it all again to each new agent."""
    tree = the_tree(node, tmp_path)
    plan = [MaterializeWorkspace(RUN_ID, tree), RunSetup(RUN_ID, BEGUN.format("setup") + "cat a.txt", env),
            RunJob(RUN_ID, BEGUN.format("run") + 'echo b > out; test -z "$TOKEN" || echo has; exit 7', env), CollectOutputs(RUN_ID, ["out"])]
    kills = Kills(node, tmp_path / "kills", monkeypatch)
    kills.run = node.create()
    first = collected(at_work(told(kills.run, *plan)))
    wanted = ["WorkspaceMaterialized", "SetupCompleted", "JobExited", "OutputsCollected"]
    assert kinds(first) == wanted and node.begun() == ["setup", "run"]
    for when, again, sent, _ in kills.each(tmp_path, supervisors):
        run = at_work(again.load())
        events = collected(told(run, *plan))
        once_and_in_order(events)
        assert kinds(events) == wanted, when
        assert [event[:3] for event in events[:sent]] == [event[:3] for event in first[:sent]], f"{when}: what was told has changed"
        assert (events[1].code, events[2].code, again.begun()) == (0, 7, ["setup", "run"]), when
        assert not env or b"s3cret" not in b"".join(path.read_bytes() for path in again.folder.rglob("*") if path.is_file()), when
        assert (again.folder / "run.out").read_bytes() == (b"has\n" if env else b"") and again.load().over, when


def test_a_run_that_was_left_alone_ends_without_anybody_whatever_write_its_agent_is_killed_at(node, supervisors, tmp_path, monkeypatch):
    tree = the_tree(node, tmp_path)
    plan = [MaterializeWorkspace(RUN_ID, tree), RunSetup(RUN_ID, BEGUN.format("setup")), RunJob(RUN_ID, BEGUN.format("run") + "cat a.txt; exit 3"),
            CollectOutputs(RUN_ID, ["out"]), Detach(RUN_ID)]
    kills = Kills(node, tmp_path / "kills", monkeypatch)
    kills.run = at_work(told(node.create(), *plan), turn=False)
    eventually(kills.run.may_leave)
    assert kills.run.report()["phase"] == "queued" and kills.run.events == []
    kills.promised = True
    kills.run.grant()
    assert kinds(ended(kills.run)) == ["WorkspaceMaterialized", "SetupCompleted", "JobExited"]
    alone = 0
    for when, again, _, promised in kills.each(tmp_path, supervisors):
        run = at_work(again.load())
        if promised:
            alone += 1
        else:
            told(run, *plan)
        events = ended(run)
        once_and_in_order(events)
        assert (kinds(events)[-1], events[-1].code, again.begun()) == ("JobExited", 3, ["setup", "run"]), when
        assert (again.folder / "run.out").read_bytes() == b"a\n", when
        assert run.report()["detached"] and not run.collected, when
    assert alone > 6


def test_a_failed_setup_is_told_once_and_has_no_job_behind_it_whatever_write_the_agent_is_killed_at(node, supervisors, tmp_path, monkeypatch):
    plan = [RunSetup(RUN_ID, BEGUN.format("setup") + "exit 5"), RunJob(RUN_ID, BEGUN.format("run"))]
    kills = Kills(node, tmp_path / "kills", monkeypatch)
    kills.run = at_work(told(node.create(), *plan))
    assert kinds(ended(kills.run)) == ["SetupCompleted"]
    for when, again, _, _ in kills.each(tmp_path, supervisors):
        run = at_work(told(again.load(), *plan))
        assert [(type(event), event.code, event.seq) for event in ended(run)] == [(SetupCompleted, 5, 1)], when
        assert again.begun() == ["setup"] and run.report()["code"] == 5, when


def test_an_agent_killed_while_a_phase_runs_that_ends_with_it_is_a_fault_and_starts_nothing_again(node, supervisors, tmp_path):
    """Agent, supervisor and command at once: the phase copies the folder while it runs."""
    for phase in ("setup", "run"):
        middle = tmp_path / f"in the {phase}"
        copying = {name: BEGUN.format(name) + (f'echo some; cp -a "$GPURUN_OUTPUTS/.." "{middle}"' if name == phase else "") for name in ("setup", "run")}
        plan = [RunSetup(RUN_ID, copying["setup"]), RunJob(RUN_ID, copying["run"])]
        first = Node(tmp_path / phase, supervisors)
        assert kinds(ended(at_work(told(first.create(), *plan)))) == ["SetupCompleted", "JobExited"]
        again = Node(tmp_path / f"after {phase}", supervisors)
        shutil.copytree(middle, again.folder)
        events = ended(at_work(told(again.load(), *plan)))
        once_and_in_order(events)
        assert isinstance(events[-1], NodeFault) and "no exit record" in events[-1].reason and f"how the {phase} ended isn't known" in events[-1].reason
        assert again.begun() == first.begun()[:1 if phase == "setup" else 2]
        assert again.load().over and (again.folder / f"{phase}.out").read_bytes() == b"some\n"


def test_a_stop_is_remembered_or_never_was_whatever_write_the_agent_is_killed_at(node, supervisors, tmp_path, monkeypatch):
    plan = [RunJob(RUN_ID, BEGUN.format("run") + "exec sleep 300")]
    kills = Kills(node, tmp_path / "kills", monkeypatch)
    kills.run = at_work(told(node.create(), *plan))
    eventually(node.begun)
    kills.copies.clear()                                # what comes before is another test's
    shutil.rmtree(tmp_path / "kills")
    told(kills.run, StopJob(RUN_ID, 5.0))
    (first,) = ended(kills.run)
    assert (first.code, first.stopped) == (143, True)
    for when, again, sent, _ in kills.each(tmp_path, supervisors):
        (event,) = ended(at_work(told(again.load(), *plan)))
        assert isinstance(event, JobExited) and event == first or isinstance(event, NodeFault) and not sent, when
        assert again.begun() == ["run"], when


# ---- the processes are still there, or the node was restarted -------------------------------------------------------------------------------

def left_at_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder as it is when the agent is killed right after it noted the supervisor; the work that this one would have got."""
    work: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(Supervisors, "give", staticmethod(lambda process, spec: (work.update(spec), process.stdin.close())))
        patch.setattr(noderun, "STARTS", 1)
        run = at_work(told(node.create(), RunJob(RUN_ID, BEGUN.format("run") + 'while [ ! -e go ]; do sleep 0.02; done; exit 6')))
        eventually(lambda: work)
        saved = (node.folder / "state.json").read_bytes()
        assert isinstance(ended(run)[-1], NodeFault)
    (node.folder / "state.json").write_bytes(saved)
    (node.folder / "events.jsonl").unlink()
    return work


def test_a_supervisor_that_got_its_work_is_waited_for_by_the_next_agent(node, supervisors, monkeypatch):
    work = left_at_start(node, monkeypatch)
    process = supervisors.take()
    node.change(supervised={"phase": "run", "pid": process.pid, "start": supervise.start_time(process.pid), "boot": supervise.boot_id()})
    run = at_work(node.load())
    assert run.has_process and run.report()["phase"] == "run"
    supervisors.give(process, work)                     # a pipe that was on its way
    eventually(node.begun)
    (node.folder / "work" / "go").touch()
    process.wait()
    assert [(type(event), event.code) for event in ended(run)] == [(JobExited, 6)] and node.begun() == ["run"]


def test_a_supervisor_that_never_got_its_work_has_begun_nothing(node, supervisors, monkeypatch):
    left_at_start(node, monkeypatch)
    run = at_work(node.load())
    eventually(node.begun)
    (node.folder / "work" / "go").touch()
    assert [(type(event), event.code) for event in ended(run)] == [(JobExited, 6)] and node.begun() == ["run"]


def test_a_mark_without_a_record_is_a_fault_even_when_nothing_else_is_there(node, supervisors, monkeypatch):
    left_at_start(node, monkeypatch)
    (node.folder / "run.exit.next").touch()
    (event,) = ended(at_work(node.load()))
    assert isinstance(event, NodeFault) and "no exit record" in event.reason and node.begun() == []


@pytest.mark.parametrize("phase, word", [("run", "the job ran"), ("setup", "the setup ran")])
def test_a_node_that_restarted_in_a_phase_says_so_and_begins_nothing_again(node, supervisors, monkeypatch, phase, word):
    """Whatever its files say of a process: after a power loss the mark may be gone, and a pid be somebody else's."""
    left_at_start(node, monkeypatch)
    supervised = {"phase": phase, "pid": os.getpid(), "start": supervise.start_time(os.getpid()), "boot": "another boot"}
    node.change(boot="another boot", supervised=supervised)
    (event,) = ended(at_work(node.load()))
    assert isinstance(event, NodeFault) and f"the node restarted while {word}: no exit status" in event.reason
    assert str(node.folder) in event.reason and node.begun() == []


def test_an_exit_record_outlives_a_restart_of_the_node(node, supervisors, monkeypatch):
    left_at_start(node, monkeypatch)
    node.change(boot="another boot", supervised=dict(node.state()["supervised"], boot="another boot"))
    (node.folder / "run.exit").write_text(json.dumps({"code": 9, "signal": 0, "stopped": False, "seconds": 1.0, "hint": "", "stdout_bytes": 0,
                                                      "stderr_bytes": 0}))
    (event,) = ended(at_work(node.load()))
    assert isinstance(event, JobExited) and event.code == 9


def test_a_workdir_from_before_a_restart_of_the_node_is_made_again_before_anything_begins_in_it(node, tmp_path):
    """It wasn't synced: after a power loss its files may have any content."""
    tree = the_tree(node, tmp_path)
    plan = [MaterializeWorkspace(RUN_ID, tree), RunJob(RUN_ID, "cat a.txt"), Detach(RUN_ID)]
    run = at_work(told(node.create(), *plan), turn=False)
    eventually(run.may_leave)
    saved = node.state()
    told(run, StopJob(RUN_ID))
    ended(run)
    (node.folder / "events.jsonl").unlink()
    (node.folder / "state.json").write_text(json.dumps(dict(saved, boot="another boot", made=dict(saved["made"], boot="another boot"))))
    (node.folder / "work" / "a.txt").write_bytes(b"\0\0")
    assert kinds(ended(at_work(node.load()))) == ["WorkspaceMaterialized", "JobExited"]
    assert (node.folder / "run.out").read_bytes() == b"a\n"


def test_a_supervisor_that_is_killed_before_it_could_begin_is_no_matter_until_it_is_each_time(node, monkeypatch):
    real, killed = Supervisors.give, []

    def give(process: Any, spec: Any) -> None:
        if len(killed) < kills:
            process.kill()
            process.wait()
            killed.append(process)
        real(process, spec)

    monkeypatch.setattr(Supervisors, "give", staticmethod(give))
    kills = 2
    (event,) = ended(at_work(told(node.create(), RunJob(RUN_ID, BEGUN.format("run") + "exit 4"))))
    assert event.code == 4 and node.begun() == ["run"] and len(killed) == 2
    killed.clear()
    shutil.rmtree(node.folder)
    kills = 100
    (event,) = ended(at_work(told(node.create(), RunJob(RUN_ID, "exit 4"))))
    assert isinstance(event, NodeFault) and f"{noderun.STARTS} times before it could begin" in event.reason


def test_without_the_room_for_its_record_a_command_is_marked_as_begun_all_the_same(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    supervise._set_aside(str(tmp_path / "run.exit.next"))
    assert (tmp_path / "run.exit.next").exists()


def test_half_a_line_of_work_is_none(tmp_path):
    """An agent killed in the middle of giving it."""
    spec = json.dumps({"folder": str(tmp_path), "phase": "run", "command": "touch done", "workdir": str(tmp_path), "umask": 0, "env": {}})
    for line in (spec[:-20], spec):
        done = subprocess.run(SUPERVISE, input=line.encode(), capture_output=True, timeout=30)
        assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, b"", [])


# ---- the plan -------------------------------------------------------------------------------------------------------------------------------

def waiting(node: Node, *plan: Any) -> NodeRun:
    """A run that waits for its turn and was left alone, as an agent after the one that took it finds it."""
    run = at_work(told(node.create(), *plan, Detach(RUN_ID)), turn=False)
    eventually(run.may_leave)
    before = node.state()
    told(run, StopJob(RUN_ID))
    ended(run)
    (node.folder / "events.jsonl").unlink()
    (node.folder / "state.json").write_text(json.dumps(before))
    return node.load()


def test_a_plan_with_values_waits_for_the_same_names_after_a_restart_of_the_agent(node):
    run = at_work(waiting(node, RunSetup(RUN_ID, "echo $A $B", {"A": "1", "B": "2"}), RunJob(RUN_ID, "echo $A", {"A": "1"})))
    assert run.lost_values == ["A", "B"] and not run.can_finish_alone and not run.may_leave()
    eventually(lambda: node.state()["workspace"])       # it could begin now
    for wrong in (RunSetup(RUN_ID, "echo", {"A": "1"}), RunSetup(RUN_ID, "echo", {}), RunJob(RUN_ID, "echo", {"A": "1", "C": "3"})):
        with pytest.raises(WireError, match="A, B|A in its env") as caught:
            run.handle(wrong)
        assert "1" not in str(caught.value), "a value in an error"
    told(run, RunJob(RUN_ID, "another text", {"A": "one"}))
    assert run.lost_values == ["A", "B"] and run.events == [], "the job doesn't go before the setup"
    told(run, RunSetup(RUN_ID, "another text", {"A": "one", "B": "two"}))
    assert [(type(event), event.code) for event in ended(run)] == [(SetupCompleted, 0), (JobExited, 0)]
    assert ((node.folder / "setup.out").read_text(), (node.folder / "run.out").read_text()) == ("one two\n", "one\n")


def test_a_waiting_run_whose_operator_vanished_without_a_word_is_on_the_disk_as_well(node):
    """It had sent the whole plan; that it never said Detach changes nothing for the next agent."""
    run = at_work(told(node.create(), MaterializeWorkspace(RUN_ID, "")), turn=False)
    eventually(lambda: node.state()["made"])
    told(run, RunJob(RUN_ID, "exit 4"))
    again = node.load()
    told(run, StopJob(RUN_ID))
    ended(run)
    (node.folder / "events.jsonl").unlink()
    assert kinds(ended(at_work(again))) == ["WorkspaceMaterialized", "JobExited"] and again.report()["code"] == 4


def test_an_agent_after_this_one_counts_a_budget_from_when_the_command_began(node):
    """Not from when it could have, hours before its operator brought it."""
    run = at_work(told(node.create(), MaterializeWorkspace(RUN_ID, "")))
    eventually(lambda: node.state()["workspace"])
    before = time.monotonic()
    told(run, RunJob(RUN_ID, "exec sleep 60"))
    eventually(lambda: node.state()["supervised"])
    assert node.state()["since"] >= before
    told(run, StopJob(RUN_ID))
    ended(run)


def test_what_was_said_first_holds(node):
    run = told(node.create(), RunJob(RUN_ID, "exit 4", {"A": "1"}), RunJob(RUN_ID, "exit 5", {"B": "1"}))
    assert ended(at_work(run))[-1].code == 4


def test_a_run_may_be_left_only_once_the_disk_has_what_the_next_agent_needs(node, monkeypatch):
    run = at_work(told(node.create(), Detach(RUN_ID)), turn=False)
    assert not run.may_leave(), "there is no plan yet"
    told(run, RunJob(RUN_ID, "exit 2"))
    eventually(lambda: run.made)
    with monkeypatch.context() as patch:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")
        patch.setattr(rundisk, "atomic_write", full)
        run._disk.unsaved = True
        with pytest.raises(TransferError, match="can't be written in .* bytes.* free"):
            run.may_leave()
    assert run.may_leave() and node.state()["plan"]["run"] == {"command": "exit 2", "env": [], "budget": {}, "backend": {}} and node.state()["detached"]
    told(run, Detach(RUN_ID), Detach(RUN_ID))
    run.grant()
    assert ended(run)[-1].code == 2 and run.may_leave(), "an ended run may be left at any time"


def test_events_that_a_full_disk_did_not_take_are_written_before_any_later_one(node, monkeypatch):
    run = at_work(told(node.create(), RunJob(RUN_ID, "exit 2"), CollectOutputs(RUN_ID, ["out"])), turn=False)
    eventually(lambda: run.made)
    with monkeypatch.context() as patch:
        def full(fd: Any, line: bytes) -> None:
            raise OSError(28, "No space left on device")
        patch.setattr(rundisk, "append_line", full)
        with run.changed:
            run._emit(WorkspaceMaterialized)
        assert kinds(run.events) == ["WorkspaceMaterialized"] and not run._save(), "the state may not know more than the events"
    run.grant()
    ended(run)
    run.pulled(Pulled(0, 0, ["out"], []), ["out"])
    assert node.load().events == run.events and len(run.events) == 3


def test_a_fault_that_a_full_disk_did_not_take_is_written_later_or_the_next_agent_would_run_the_job(node, monkeypatch):
    run = told(node.create(), RunJob(RUN_ID, BEGUN.format("run")))
    with monkeypatch.context() as patch:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")
        patch.setattr(rundisk, "atomic_write", full)
        patch.setattr(rundisk, "append_line", full)
        (event,) = ended(at_work(run))
        assert isinstance(event, NodeFault) and "was not started" in event.reason
    assert not node.load().over
    run.write_rest()
    assert node.load().over and node.load().events == [event] and node.begun() == []


def test_a_state_of_an_older_agent_is_understood(node):
    """It knew no plan, no turn and no boot; its run had the node."""
    run = at_work(told(node.create(), RunJob(RUN_ID, "exit 3")))
    ended(run)
    state = node.state()
    old = {name: state[name] for name in ("version", "run_id", "job", "operator", "operator_name", "created", "workspace", "setup", "over",
                                          "collected", "pulled", "asked_outputs", "supervised")}
    (node.folder / "state.json").write_text(json.dumps(dict(old, over=False, supervised={"phase": "run", "pid": 1, "start": "x"})))
    (node.folder / "events.jsonl").unlink()
    again = node.load()
    assert again.had_turn and again.made and again.keep == 20
    assert ended(at_work(again))[-1].code == 3


# ---- what is collected, and how it is told ----------------------------------------------------------------------------------------------------

def test_outputs_are_collected_only_by_a_pull_of_all_of_them(node):
    run = told(node.create(), RunJob(RUN_ID, "true"), CollectOutputs(RUN_ID, ["a", "b"]))
    ended(at_work(run))
    run.pulled(Pulled(1, 1, [], []), ["a"])             # gpurun fetch RUN a
    assert not run.collected and kinds(run.events) == ["JobExited"]
    run.pulled(Pulled(2, 2, [], []), ["b", "a", "c"])
    assert run.collected and isinstance(run.events[-1], OutputsCollected)


def test_a_run_may_go_once_its_logs_are_home_too(node):
    """An operator that is there keeps what it reads; of a run that was left it has to say so."""
    run = told(node.create(), RunJob(RUN_ID, "echo hi"))
    run.logs_taken(True)
    ended(at_work(run))
    assert run.collected and not run.may_go, "what was read before the end wasn't all"
    run.logs_taken(False)
    assert run.may_go and node.load().may_go
    shutil.rmtree(node.folder)
    run = told(node.create(), RunJob(RUN_ID, "echo hi"), Detach(RUN_ID))
    ended(at_work(run))
    run.logs_taken(False)
    assert not run.collected and not run.may_go and not node.load().may_go, "gpurun logs looks and keeps nothing"
    run.logs_taken(True)
    assert run.collected and run.may_go and node.load().may_go


def test_a_report_says_where_a_run_stands(node):
    run = at_work(told(node.create(), RunSetup(RUN_ID, "while [ ! -e on ]; do sleep 0.02; done")), turn=False)
    assert run.report()["phase"] == "queued" and not run.report()["over"]
    run.grant()
    eventually(lambda: run.report()["phase"] == "setup" and run.has_process)
    since = time.monotonic()
    (node.folder / "work" / "on").touch()
    eventually(lambda: run.report()["phase"] == "run")
    assert run.report()["seconds"] <= time.monotonic() - since + 0.1
    told(run, RunJob(RUN_ID, "kill -9 $$"))
    ended(run)
    said = run.report()
    assert (said["phase"], said["over"], said["code"], said["signal"], said["stopped"]) == ("ended", True, 137, 9, False) and "signal" in said["reason"]
    assert node.load().report()["code"] == 137


def test_a_report_of_a_fault_has_no_code_and_its_reason(node):
    run = told(node.create(), RunJob(RUN_ID, "kill -9 $PPID"))
    ended(at_work(run))
    said = run.report()
    assert said["phase"] == "ended" and said["code"] is None and "no exit record" in said["reason"] and len(said["reason"]) <= runstate.REASON_SHOWN


def test_a_setup_that_its_hard_limit_ended_has_no_job_behind_it_whatever_code_it_chose(node):
    run = told(node.create(), RunSetup(RUN_ID, "trap 'exit 0' TERM; sleep 60 & wait", {}, {"name": "quick", "hard_s": 2.0}), RunJob(RUN_ID, "echo never"))
    at_work(run)
    eventually(lambda: run.over)
    (done,) = [event for event in run.events if isinstance(event, SetupCompleted)]
    assert done.code == 0 and not done.stopped and done.limit == "the hard limit of 2 s (budget quick) was reached"
    assert run.report()["code"] == 143 and run.report()["limit"] == done.limit and not (node.folder / "run.out").exists()
