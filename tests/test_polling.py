"""Polling without a network: whom it asks, how often, and what it makes of each answer. The nodes are stand-ins; records and manifests are real files."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace

import pytest

from gpurun import asyncjobs, external, polling
from gpurun.errors import LinkError, MachineGoneError, RecordError
from gpurun.external import Own, Plan
from gpurun.records import RunFolder
from gpurun.screen import Screen

AGENT, KEY = "agent-1", "key-1"


class Fleet:
    """Nodes that answer what they are told to. `asked`: each session that was opened, by its node, with the runs that it was for."""

    def __init__(self, folder, monkeypatch):
        self.runs, self.says, self.agents, self.asked, self.more, self.heard = folder / "runs", {}, {}, [], [], []
        (folder / "p" / ".planning").mkdir(parents=True)
        self.project = asyncjobs.find_project(str(folder / "p"), str(self.runs))
        self.screen = Screen("quiet")
        self.screen.say = self.heard.append
        self.lock = threading.Lock()
        monkeypatch.setattr(polling, "Asked", self._ask)
        monkeypatch.setattr(polling, "ask_once", self._ask_more)

    def way(self, record):
        cluster = SimpleNamespace(kind="ssh", relay="n0", here=False)
        return cluster, [SimpleNamespace(name=record.node["name"])], lambda: SimpleNamespace(id=KEY)

    def _ask(self, _link, node, run_ids, _screen, _operator):
        with self.lock:
            self.asked.append((node.name, list(run_ids)))
        said = self.says.get(node.name, {})
        if isinstance(said, Exception):
            raise said
        endpoint = SimpleNamespace(agent_id=self.agents.get(node.name, AGENT), node=node.name)
        return SimpleNamespace(states={run_id: said[run_id] for run_id in run_ids if run_id in said}, session=SimpleNamespace(endpoint=endpoint), close=lambda: None)

    def _ask_more(self, _link, _node, endpoint, run_ids, _operator):
        self.more.append((endpoint.node, list(run_ids)))
        return {run_id: self.says[endpoint.node][run_id] for run_id in run_ids}

    def run(self, node, said=None, name="job", **record):
        """A run that was given to a node; the id."""
        folder, made = RunFolder.create(str(self.runs), name, node={"name": node, "kind": "ssh", "agent_id": AGENT, "operator": KEY} if node else {"kind": "ssh"}, **record)
        if said is not None:
            self.says.setdefault(node, {})[folder.run_id] = said
        return made.run_id

    def reserve(self, run_id, plan_id="3.1", backend="node"):
        return asyncjobs.reserve(self.project, Plan(plan_id, "3", backend, "gpurun submit", ("out",), "true", "/gsd"), Own(run_id, str(self.runs)))

    def job(self, node, said=None, plan_id="3.1", status="submitted", job_id="", **record):
        run_id = self.run(node, said, **record)
        reserved = self.reserve(run_id, plan_id)
        reserved.write(external.build(reserved.trace.plan, job_id or run_id, status, reserved.trace.submitted_at, {"reason": "x"}, reserved.trace.own))
        return job_id or run_id

    def poll(self, *job_ids):
        rows, said = polling.poll(self.project, job_ids, self.way, self.screen, "me@here")
        return {row.found.manifest.job_id: row for row in rows}, said

    def settle(self, plan_id=None):
        polling.settle_left_overs(self.project, self.way, self.screen, "me@here", plan_id)

    def manifests(self):
        return {one.manifest.job_id: one.manifest for one in asyncjobs.read_all(self.project)}


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    return Fleet(tmp_path, monkeypatch)


ENDED = {"phase": "ended", "over": True, "code": 0, "signal": 0, "stopped": False, "reason": ""}


def slurm(state="PENDING", job_id="17", **more):
    return {"phase": "run", "over": False, "detached": True, "backend": {"kind": "slurm", "job_id": job_id, "state": state, "reason": "", **more}}


# ---- whom it asks ------------------------------------------------------------------------------------------------------------------------------

def test_each_node_is_asked_once_for_all_of_its_runs(fleet):
    jobs = {fleet.job(f"node{number % 3}", {"phase": "run"}, plan_id=str(number)) for number in range(12)}
    rows, said = fleet.poll()
    assert set(rows) == jobs and said == [] and sorted(name for name, _ in fleet.asked) == ["node0", "node1", "node2"]
    assert {len(run_ids) for _, run_ids in fleet.asked} == {4} and {row.found.manifest.status for row in rows.values()} == {"running"}


def test_one_job_asks_for_that_one_alone(fleet):
    jobs = [fleet.job("n", {"phase": "run"}, plan_id=str(number)) for number in range(3)]
    fleet.poll(jobs[1])
    assert fleet.asked == [("n", [jobs[1]])] and [fleet.manifests()[job].status for job in jobs] == ["submitted", "running", "submitted"]


def test_more_runs_than_a_question_may_have_go_over_the_same_node(fleet, monkeypatch):
    monkeypatch.setattr(polling, "AT_ONCE", 5)
    for number in range(12):
        fleet.job("n", {"phase": "run"}, plan_id=str(number))
    rows, _ = fleet.poll()
    assert [len(run_ids) for _, run_ids in fleet.asked] == [5] and [len(run_ids) for _, run_ids in fleet.more] == [7]
    assert {row.backend_state for row in rows.values()} == {"run"}


@pytest.mark.parametrize("status", ["completed-unverified", "failed", "cancelled", "timeout"])
def test_a_job_that_is_over_is_asked_for_no_more(fleet, status):
    job = fleet.job("n", {"phase": "run"}, status=status)
    assert fleet.poll(job)[0][job].found.manifest.status == status and fleet.asked == []


def test_a_run_whose_record_has_the_last_word_needs_no_node(fleet):
    done = {"state": "COMPLETED", "exit_code": 0, "fsm": dict(_lifecycle(state="COMPLETED", exit_code=0))}
    failed = {"state": "FAILED", "exit_code": 3, "reason": "exited 3: no memory", "fsm": dict(_lifecycle(state="FAILED", exit_code=3, failed_phase="run", ended=True))}
    limit = {"state": "FAILED", "exit_code": 124, "reason": "stopped, the hard limit of 2 s was reached",
             "fsm": dict(_lifecycle(state="FAILED", exit_code=143, failed_phase="run", ended=True, stopped=True, limit="the hard limit of 2 s was reached"))}
    stopped = {"state": "FAILED", "exit_code": 130, "reason": "stopped by the operator",
               "fsm": dict(_lifecycle(state="FAILED", exit_code=143, failed_phase="run", ended=True, stopped=True))}
    jobs = [fleet.job("n", plan_id=str(number), **record) for number, record in enumerate((done, failed, limit, stopped))]
    rows, _ = fleet.poll()
    assert fleet.asked == [] and [rows[job].found.manifest.status for job in jobs] == ["completed-unverified", "failed", "timeout", "cancelled"]
    assert rows[jobs[1]].found.manifest.terminal_details == {"reason": "exited 3: no memory", "exit_code": 3}
    assert rows[jobs[2]].found.manifest.terminal_details["reason"] == "stopped, the hard limit of 2 s was reached"


def _lifecycle(**more):
    return {"run_id": "r", "has_workspace": False, "has_setup": False, "has_outputs": False, **more}


# ---- what it makes of the answers ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("error", [LinkError("no way"), RuntimeError("a library's"), OSError(5, "Input/output error")])
def test_a_node_that_does_not_answer_holds_up_no_other_and_changes_nothing(fleet, error):
    away, there = fleet.job("away", plan_id="1"), fleet.job("there", {"phase": "run"}, plan_id="2")
    fleet.says["away"] = error
    rows, _ = fleet.poll()
    assert rows[away].backend_state == "unknown" and rows[away].problem.startswith("away: ") and rows[there].found.manifest.status == "running"
    assert fleet.manifests()[away].status == "submitted"


def test_a_machine_that_its_provider_has_no_more_has_failed_its_jobs_until_it_is_back(fleet):
    job = fleet.job("rented")
    fleet.says["rented"] = MachineGoneError("it was destroyed")
    row = fleet.poll(job)[0][job]
    assert (row.backend_state, row.found.manifest.status) == ("gone", "failed") and "destroyed" in row.found.manifest.terminal_details["reason"]
    fleet.says["rented"] = {job: {"phase": "run"}}
    row = fleet.poll(job)[0][job]
    assert row.found.manifest.status == "running" and row.found.manifest.terminal_details is None


def test_a_run_that_its_own_agent_does_not_have_is_gone(fleet):
    job = fleet.job("n")
    row = fleet.poll(job)[0][job]
    assert row.found.manifest.status == "failed" and "doesn't have the run" in row.found.manifest.terminal_details["reason"]


@pytest.mark.parametrize("record, agent, said", [({}, "agent-2", "another machine"), ({"operator": "key-2"}, AGENT, "another key")])
def test_an_agent_that_can_not_know_the_run_proves_nothing(fleet, record, agent, said):
    job = fleet.job("n")
    fleet.agents["n"] = agent
    path = fleet.runs / job / "run.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "node": {**value["node"], **record}}))
    row = fleet.poll(job)[0][job]
    assert row.backend_state == "unknown" and said in row.problem and fleet.manifests()[job].status == "submitted"
    assert len(fleet.asked) == ("operator" not in record)      # of another's run nothing is asked, and nobody


def test_slurm_s_own_word_is_the_backend_s_state(fleet):
    for number, (said, status) in enumerate([(slurm("PENDING", reason="Priority"), "submitted"), (slurm("CONFIGURING"), "submitted"), (slurm("RUNNING"), "running"),
                                             (slurm("COMPLETED"), "running"), (slurm("", ""), "submitted")]):
        job = fleet.job("login", said, plan_id=str(number), job_id=str(100 + number))
        row = fleet.poll(job)[0][job]
        assert (row.backend_state, row.found.manifest.status) == (said["backend"]["state"] or "submitting", status)
    assert fleet.poll("100")[0]["100"].note == "Slurm: Priority"
    fleet.says["login"][fleet.poll("102")[0]["102"].object()["run_id"]] = dict(ENDED, backend=slurm("TIMEOUT")["backend"], code=143, limit="Slurm's time limit")
    assert fleet.poll("102")[0]["102"].found.manifest.status == "timeout"


def test_a_state_of_slurm_s_that_is_not_in_the_table_is_named_and_changes_nothing(fleet):
    job = fleet.job("login", slurm("REVOKED"))
    row = fleet.poll(job)[0][job]
    assert row.backend_state == "REVOKED" and "REVOKED" in row.problem and fleet.manifests()[job].status == "submitted"


def test_a_job_that_waits_for_a_submit_that_was_cut_short_says_how_it_goes_on(fleet):
    job = fleet.job("n", {"phase": "workspace", "detached": False})
    assert f"gpurun attach {job}" in fleet.poll(job)[0][job].note
    folder = RunFolder(str(fleet.runs / job))
    folder.try_lock()                                   # somebody is at it
    assert fleet.poll(job)[0][job].note == ""
    folder.close()


def test_what_another_poll_has_written_meanwhile_stands_and_is_told(fleet, monkeypatch):
    job = fleet.job("n", {"phase": "run"})
    ask = polling._ask_nodes

    def slow(*args):
        answers = ask(*args)
        asyncjobs.update(fleet.project, [asyncjobs.Change(os.path.join(fleet.project.jobs, job + ".json"), "completed-unverified")])
        return answers
    monkeypatch.setattr(polling, "_ask_nodes", slow)
    assert fleet.poll(job)[0][job].found.manifest.status == "completed-unverified"


# ---- submits that were cut short ---------------------------------------------------------------------------------------------------------------

def test_the_submits_of_one_plan_are_settled_alone(fleet):
    for plan_id in ("1", "2"):
        fleet.reserve(fleet.run("n", {"phase": "run", "detached": True}), plan_id).release()
    fleet.settle("1")
    assert [one.plan_id for one in fleet.manifests().values()] == ["1"] and len(fleet.asked) == 1
    fleet.settle()
    assert {one.plan_id for one in fleet.manifests().values()} == {"1", "2"}


def test_a_submit_whose_node_does_not_answer_stays_open(fleet):
    fleet.reserve(fleet.run("n")).release()
    fleet.says["n"] = LinkError("no way")
    with pytest.raises(RecordError, match="no way"):
        fleet.settle("3.1")
    with pytest.raises(RecordError, match="cut short"):
        fleet.reserve("another")
    fleet.says["n"] = {}
    fleet.settle("3.1")                                 # its own agent doesn't have it: it never came there
    fleet.reserve("another").drop()


def test_a_submit_whose_run_somebody_is_at_is_left_to_them(fleet):
    run_id = fleet.run("")
    fleet.reserve(run_id).release()
    folder = RunFolder(str(fleet.runs / run_id))
    folder.try_lock()
    with pytest.raises(RecordError, match=f"process {os.getpid()} is at work"):
        fleet.settle("3.1")
    folder.close()
    fleet.settle("3.1")
    assert fleet.manifests() == {} and "plan is free again" in fleet.heard[0]


def test_runs_on_a_disk_that_is_not_there_prove_nothing(fleet, tmp_path):
    run_id = fleet.run("n", {"phase": "run"})
    fleet.reserve(run_id).release()
    os.rename(fleet.runs, tmp_path / "unmounted")
    with pytest.raises(RecordError, match="isn't in"):
        fleet.settle("3.1")
    os.rename(tmp_path / "unmounted", fleet.runs)
    fleet.settle("3.1")
    assert set(fleet.manifests()) == {run_id}


def test_a_job_of_slurm_s_is_known_by_slurm_s_number_and_waited_for_until_it_has_one(fleet):
    run_id = fleet.run("login", slurm("", ""))
    fleet.reserve(run_id, backend="slurm").release()
    with pytest.raises(RecordError, match="hasn't given it a number"):
        fleet.settle("3.1")
    fleet.says["login"][run_id] = slurm("RUNNING")
    fleet.settle("3.1")
    manifest = fleet.manifests()["17"]
    assert (manifest.status, manifest.backend, external.own(manifest).run_id) == ("running", "slurm", run_id)
    assert fleet.poll(run_id)[0]["17"].found.manifest.status == "running"


def test_a_job_that_ended_before_slurm_had_it_leaves_the_plan_free(fleet):
    fleet.reserve(fleet.run("login", dict(ENDED, code=3, reason="the setup failed")), backend="slurm").release()
    fleet.settle("3.1")
    assert fleet.manifests() == {} and "the setup failed" in fleet.heard[0]
    fleet.reserve("another").drop()


def test_a_job_of_slurm_s_that_is_home_has_its_number_from_the_record(fleet):
    run_id = fleet.run("login", state="COMPLETED", exit_code=0, node_dir="/node", fsm=dict(_lifecycle(state="COMPLETED", exit_code=0)),
                       backend={"kind": "slurm", "job_id": "18", "state": "COMPLETED"})
    fleet.reserve(run_id, backend="slurm").release()
    fleet.settle("3.1")
    assert fleet.manifests()["18"].status == "completed-unverified" and fleet.asked == []


def test_a_manifest_that_was_written_before_its_submit_was_killed_keeps_its_time(fleet):
    run_id = fleet.run("n", dict(ENDED))
    reserved = fleet.reserve(run_id)
    trace = next(name for name in os.listdir(fleet.project.jobs) if name.startswith(asyncjobs.TRACE))
    content = open(os.path.join(fleet.project.jobs, trace)).read()
    reserved.write(external.build(reserved.trace.plan, run_id, "submitted", "2026-01-01T00:00:00Z", own=reserved.trace.own))
    with open(os.path.join(fleet.project.jobs, trace), "w") as file:
        file.write(content)                             # killed between the two
    rows, said = fleet.poll()
    assert said == [] and rows[run_id].found.manifest.status == "completed-unverified" and len(os.listdir(fleet.project.jobs)) == 1
    assert fleet.manifests()[run_id].submitted_at == "2026-01-01T00:00:00Z"
