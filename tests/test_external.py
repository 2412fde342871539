"""The manifest as a contract: what is written keeps it, what doesn't keep it is refused, and a state is never guessed. Nothing here touches a disk."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun import external
from gpurun.errors import RecordError
from gpurun.external import FIELDS, STATUSES, Own, Plan, build, decode, outcome, printable, slurm_status

PLAN = Plan("3.1", "3", "slurm", "gpurun submit job.toml --plan 3.1", ("out/model.pt", "log.txt"), "pytest -q verify.py", "/gsd:execute-phase 3")
AT = "2026-11-30T10:15:00.000Z"
WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
NAMES = WORDS.filter(external.file_name)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=("Cs",))),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), inner, max_size=3), max_leaves=6)


def value(**changed):
    """A manifest as an object; a field given as None... stays None, one given as `leave_out` goes."""
    whole = json.loads(build(PLAN, "17", "submitted", AT, own=Own("run-1", "/home/me/gpurun-runs")).encode())
    whole.update(changed)
    return {name: item for name, item in whole.items() if item is not leave_out}


leave_out = object()


def text(**changed) -> bytes:
    return json.dumps(value(**changed)).encode()


# ---- the consumer's own rules, written again from the contract's facts: an independent reader ---------------------------------------------

def consumer_accepts(data: bytes) -> bool:
    """What the program that reads manifests checks: whole UTF-8 JSON, the version, seven texts, the enum, a list of texts, null or an object."""
    manifest = json.loads(data.decode("utf-8"))
    texts = ("job_id", "plan_id", "phase", "backend", "submit_command", "verification_command", "resume_command", "submitted_at")
    return (manifest["version"] == "1.0" and all(isinstance(manifest[name], str) and manifest[name] for name in texts)
            and manifest["status"] in ("submitted", "running", "completed-unverified", "failed", "cancelled", "timeout")
            and isinstance(manifest["expected_artifacts"], list) and bool(manifest["expected_artifacts"])
            and all(isinstance(path, str) for path in manifest["expected_artifacts"])
            and (manifest["terminal_details"] is None or isinstance(manifest["terminal_details"], dict) and manifest["status"] in ("failed", "cancelled", "timeout")))


# ---- writing -----------------------------------------------------------------------------------------------------------------------------

def test_a_manifest_is_two_space_json_in_utf_8_with_a_newline_at_its_end():
    data = build(PLAN._replace(verification_command="prüfe « x »"), "17", "submitted", AT).encode()
    assert data == (json.dumps(json.loads(data), indent=2, ensure_ascii=False) + "\n").encode() and "prüfe « x »".encode() in data
    assert list(json.loads(data)) == list(FIELDS) and json.loads(data)["version"] == "1.0"


@pytest.mark.parametrize("status", STATUSES)
def test_every_field_is_written_whatever_the_status_and_details_only_of_a_failure(status):
    data = build(PLAN, "17", status, AT, {"reason": "why", "exit_code": 3}).encode()
    manifest = json.loads(data)
    assert set(manifest) == set(FIELDS) and consumer_accepts(data)
    assert manifest["terminal_details"] == ({"reason": "why", "exit_code": 3} if status in ("failed", "cancelled", "timeout") else None)


@given(st.builds(Plan, WORDS, WORDS, WORDS, WORDS, st.lists(WORDS, min_size=1, max_size=3).map(tuple), WORDS, WORDS), NAMES, st.sampled_from(STATUSES),
       st.dictionaries(WORDS, JSON, max_size=3))
def test_what_is_written_the_consumer_takes_and_is_read_back_the_same(plan, job_id, status, details):
    manifest = build(plan, job_id, status, AT, details, Own("run-1", "/runs", "c.toml", "/p", "run"))
    assert consumer_accepts(manifest.encode())
    assert decode(manifest.encode(), "f", job_id) == manifest and external.own(manifest).run_id == "run-1"


@pytest.mark.parametrize("field", [name for name in Plan._fields if name != "expected_artifacts"])
@pytest.mark.parametrize("wrong", ["", 3, None, ["x"], "\ud800", "a\0b"])
def test_what_would_break_the_contract_is_refused_before_anything_is_submitted(field, wrong):
    with pytest.raises(RecordError, match=field):
        build(PLAN._replace(**{field: wrong}), "17", "submitted", AT)


@pytest.mark.parametrize("artifacts", [(), ("",), ("a", ""), (3,), ("a", None)])
def test_a_job_that_is_to_make_nothing_can_not_be_proved_and_is_refused(artifacts):
    with pytest.raises(RecordError, match="expected_artifacts"):
        build(PLAN._replace(expected_artifacts=artifacts), "17", "submitted", AT)


@pytest.mark.parametrize("job_id", ["", ".", "..", ".hidden", "a/b", "../up", "/abs", "a\0b", "x" * 251, "é" * 126])
def test_an_id_that_can_not_be_a_file_s_name_is_refused(job_id):
    with pytest.raises(RecordError, match="job_id"):
        build(PLAN, job_id, "submitted", AT)


# ---- reading -----------------------------------------------------------------------------------------------------------------------------

def test_keys_that_the_contract_does_not_name_are_kept_as_they_are():
    more = {"note": {"deep": [1, 2.5, None, "ü", {"x": False}]}, "zz": "\ud800"}
    manifest = decode(text(**more), "f", "17")
    again = decode(manifest._replace(status="running").encode(), "f", "17")
    assert again.more == {**manifest.more, **more} and again.status == "running"
    assert decode(json.dumps(dict(reversed(value().items()))).encode(), "f") == decode(text(), "f")     # the order says nothing


@pytest.mark.parametrize("data, said", [
    (b"", "empty"), (b" \n", "empty"), (b"{", "JSON"), (text()[:-1], "JSON"), (text()[:40], "JSON"), (text() + b"{}", "JSON"), (text() + b"x", "JSON"),
    (b"\xef\xbb\xbf" + text(), "byte order mark"), (text().decode().encode("utf-16"), "UTF-8"), (text(phase="M").replace(b'"M"', b'"\xff"'), "UTF-8"),
    (text(phase="M").replace(b'"M"', b'"\xc3"'), "UTF-8"), (b"[" * 100_000, "JSON"), (b"null", "null"), (b"[]", "a list"), (b'"x"', "a text"), (b"3", "a number"),
    (b"true", "true or false"), (text(x=1).replace(b'"x": 1', b'"x": NaN'), "NaN"), (text(x=1).replace(b'"x": 1', b'"x": -Infinity'), "Infinity"),
    (text(x=1).replace(b'"x": 1', b'"x": 1e999'), "out of range"), (text(x=1).replace(b'"x": 1', b'"x": ' + b"9" * 10_000), "JSON"),
    (text(x=1).replace(b'"x": 1', b'"x": 01'), "JSON"), (text(x=1).replace(b'"x": 1', b"'x': 1"), "JSON"), (text().replace(b"{", b"{,", 1), "JSON"),
    (text(phase="a").replace(b'"a"', b'"a\nb"'), "JSON"),
    (text().replace(b'{"version"', b'{"status": "failed", "version"', 1), "status"), (text(x={"y": 1}).replace(b'{"y": 1}', b'{"y": 1, "y": 2}'), "twice"),
])
def test_bytes_that_are_no_manifest_are_refused_and_the_file_is_named(data, said):
    with pytest.raises(RecordError) as error:
        decode(data, "/p/async-jobs/17.json", "17")
    assert "/p/async-jobs/17.json" in str(error.value) and said in str(error.value) and "move it away" in str(error.value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_is_refused_and_named(field):
    with pytest.raises(RecordError, match=f"{field} is missing"):
        decode(text(**{field: leave_out}), "f")


@pytest.mark.parametrize("field", external.TEXTS)
@pytest.mark.parametrize("wrong", ["", None, 3, True, ["x"], {"a": "b"}, "\udc80"])
def test_a_text_of_another_kind_is_refused_and_named(field, wrong):
    with pytest.raises(RecordError, match=field):
        decode(text(**{field: wrong}), "f")


@pytest.mark.parametrize("changed", [
    {"version": "1"}, {"version": "1.1"}, {"version": "2.0"}, {"version": 1.0}, {"version": 1}, {"version": None}, {"version": ["1.0"]}, {"version": "1.0 "},
    {"status": "done"}, {"status": "SUBMITTED"}, {"status": " running"}, {"status": "completed"}, {"status": "verified"}, {"status": ""}, {"status": None},
    {"status": ["running"]}, {"status": {"running": 1}}, {"status": 1},
    {"expected_artifacts": []}, {"expected_artifacts": "a"}, {"expected_artifacts": None}, {"expected_artifacts": {"a": 1}}, {"expected_artifacts": ["a", 3]},
    {"expected_artifacts": [""]}, {"expected_artifacts": [["a"]]}, {"expected_artifacts": ["\ud800"]},
    {"status": "failed", "terminal_details": []}, {"status": "failed", "terminal_details": "x"}, {"status": "failed", "terminal_details": False},
    {"status": "failed", "terminal_details": 0}, {"status": "submitted", "terminal_details": {"reason": "x"}}, {"status": "running", "terminal_details": {}},
    {"submitted_at": "yesterday"}, {"submitted_at": "10:15"}, {"submitted_at": "2026-1-3"}, {"job_id": "18"}, {"job_id": "a/../17"}, {"job_id": ".."},
])
def test_a_value_that_the_contract_does_not_allow_is_refused(changed):
    with pytest.raises(RecordError, match="no manifest that can be trusted"):
        decode(text(**changed), "f", "17")


@pytest.mark.parametrize("at", ["2026-11-30T10:15:00Z", "2026-11-30T10:15:00.123456+01:00", "2026-11-30T10:15-0500", "20261130T101500Z", "2026-11-30", "2026-11-30 10:15:00"])
def test_times_as_iso_8601_allows_them_are_taken(at):
    assert decode(text(submitted_at=at), "f").submitted_at == at


def test_all_that_is_wrong_is_said_at_once_and_nothing_of_it_reaches_a_terminal_raw():
    with pytest.raises(RecordError) as error:
        decode(text(version="\x1b[2J", status="x\ny", plan_id=3, phase=leave_out), "f")
    assert all(word in str(error.value) for word in ("version", "status", "plan_id", "phase is missing")) and str(error.value).isprintable()


@given(JSON)
def test_no_object_whatsoever_ends_in_another_error(anything):
    try:
        decode(json.dumps(anything).encode(), "f")
    except RecordError:
        pass
    for name in FIELDS:
        assert isinstance(external.problems(value(**{name: anything})), list)


@given(st.binary(max_size=60))
def test_no_bytes_whatsoever_end_in_another_error(data):
    with pytest.raises(RecordError):
        decode(data, "f")


@pytest.mark.parametrize("own", [[], "x", 3, {}, {"run_id": "r"}, {"run_id": "r", "runs_dir": "relative"}, {"run_id": "../r", "runs_dir": "/x"}, {"run_id": 3, "runs_dir": "/x"},
                                 {"run_id": "r", "runs_dir": "/x\0y"}, {"run_id": "r", "runs_dir": "/x", "cluster": 3}, {"run_id": "", "runs_dir": "/x"}])
def test_gpurun_s_own_key_names_a_run_or_is_refused(own):
    with pytest.raises(RecordError, match="names no run"):
        external.own(decode(text(gpurun=own), "f"))


def test_a_manifest_of_another_producer_is_as_good():
    assert external.own(decode(text(gpurun=leave_out), "f")) is None


# ---- Slurm's states ----------------------------------------------------------------------------------------------------------------------

CONTRACT = {"PENDING": "submitted", "CONFIGURING": "submitted", "RUNNING": "running", "COMPLETING": "running", "COMPLETED": "completed-unverified",
            "FAILED": "failed", "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed", "NODE_FAIL": "failed", "PREEMPTED": "failed", "CANCELLED": "cancelled",
            "CANCELLED by 1001": "cancelled", "TIMEOUT": "timeout"}


@pytest.mark.parametrize("state", CONTRACT)
def test_each_of_slurm_s_states_that_the_contract_names_has_its_status(state):
    assert {slurm_status(shape) for shape in (state, state.lower(), f"  {state} \n", state.title())} == {CONTRACT[state]}


@pytest.mark.parametrize("state", ["SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT", "SIGNALING", "DEADLINE", "SPECIAL_EXIT"])
def test_the_others_whose_meaning_is_certain_have_one_too(state):
    assert slurm_status(state) == external.SLURM_STATES[state] and (slurm_status(state) in external.WAITING or state == "DEADLINE")


@pytest.mark.parametrize("state", ["REVOKED", "LAUNCH_FAILED", "BRAND_NEW", "CD", "COMPLETE", "RUNNING+", "CANCELLED+", "CANCELLEDby 1", "RUNNING FAILED", "", " ", "0", None, 3, ["RUNNING"], "R", "???"])
def test_a_state_that_is_not_in_the_table_is_an_error_that_names_it(state):
    with pytest.raises(RecordError, match=re.escape(json.dumps(state))):
        slurm_status(state)


# ---- a run's states ------------------------------------------------------------------------------------------------------------------------

def slurm(state, **more):
    return {"kind": "slurm", "job_id": "17", "state": state, **more}


@pytest.mark.parametrize("state, status, shown", [
    ({"phase": "queued", "ahead": 2}, "submitted", "queued"), ({"phase": "workspace"}, "submitted", "workspace"), ({"phase": "setup"}, "submitted", "setup"),
    ({"phase": "run"}, "running", "run"), ({"phase": "run", "backend": {}}, "running", "run"),
    ({"phase": "run", "backend": slurm("")}, "submitted", "submitting"), ({"phase": "run", "backend": slurm("PENDING")}, "submitted", "PENDING"),
    ({"phase": "run", "backend": slurm("RUNNING")}, "running", "RUNNING"), ({"phase": "run", "backend": slurm("SUSPENDED")}, "running", "SUSPENDED"),
    # Slurm is through, the node not yet: what the job's own record says decides, so it is running until that is there.
    ({"phase": "run", "backend": slurm("COMPLETED")}, "running", "COMPLETED"), ({"phase": "run", "backend": slurm("NODE_FAIL")}, "running", "NODE_FAIL"),
])
def test_a_run_that_is_not_over_is_submitted_or_running_and_has_no_details(state, status, shown):
    found = outcome(state)
    assert (found.status, found.backend_state, found.details) == (status, shown, None)


@pytest.mark.parametrize("state", [{}, {"phase": "flying"}, {"phase": None}, {"phase": ["run"]}, {"phase": "run", "backend": slurm("REVOKED")}, {"phase": "collect"}])
def test_a_state_that_nobody_knows_has_no_status_and_says_what_it_was(state):
    found = outcome(state)
    assert found.status == "" and found.details is None and found.note and (found.backend_state == "unknown" or found.backend_state in found.note)


def ended(**more):
    return {"phase": "ended", "over": True, "code": 0, "signal": 0, "stopped": False, "reason": "", **more}


@pytest.mark.parametrize("state, status, details", [
    (ended(), "completed-unverified", None),
    (ended(code=3), "failed", {"reason": "exited 3", "exit_code": 3}),
    (ended(code=137, signal=9, reason="killed: out of memory?"), "failed", {"reason": "killed: out of memory?", "exit_code": 137, "signal": 9}),
    (ended(code=None), "failed", {"reason": "the node doesn't know how it ended"}),
    (ended(code=None, reason="the disk is full"), "failed", {"reason": "the disk is full"}),
    (ended(code=143, signal=15, stopped=True), "cancelled", {"reason": "stopped by the operator", "exit_code": 143, "signal": 15}),
    (ended(code=0, stopped=True), "cancelled", {"reason": "stopped by the operator", "exit_code": 0}),
    (ended(code=143, stopped=True, limit="the hard limit of 120 s was reached"), "timeout", {"reason": "stopped, the hard limit of 120 s was reached", "exit_code": 143}),
    (ended(code=None, limit="Slurm's time limit was reached", backend=slurm("TIMEOUT")), "timeout", {"reason": "stopped, Slurm's time limit was reached"}),
    (ended(backend=slurm("COMPLETED")), "completed-unverified", None),
    (ended(code=255, backend=slurm("FAILED")), "failed", {"reason": "exited 255", "exit_code": 255}),
    (ended(code=143, signal=15, reason="cancelled by uid 1001", backend=slurm("CANCELLED by 1001")), "cancelled",
     {"reason": "cancelled by uid 1001", "exit_code": 143, "signal": 15}),
    (ended(code=None, backend=slurm("CANCELLED")), "cancelled", {"reason": "Slurm says CANCELLED"}),
    (ended(code=0, backend=slurm("CANCELLED by 0")), "completed-unverified", None),       # it had ended before that
    (ended(code=137, backend=slurm("OUT_OF_MEMORY")), "failed", {"reason": "exited 137", "exit_code": 137}),
    (ended(code=0, backend=slurm("OUT_OF_MEMORY")), "failed", {"reason": "Slurm says OUT_OF_MEMORY", "exit_code": 0}),
    (ended(code=None, reason="its node failed", backend=slurm("NODE_FAIL")), "failed", {"reason": "its node failed"}),
    (ended(code=True, signal="9", reason=None, limit=3), "failed", {"reason": "the node doesn't know how it ended"}),   # a node that says nonsense
])
def test_a_run_that_is_over_has_the_status_that_its_end_has(state, status, details):
    found = outcome(state)
    assert (found.status, found.details) == (status, details)


@given(st.dictionaries(st.sampled_from(["phase", "backend", "code", "signal", "stopped", "limit", "reason"]),
                       JSON | st.sampled_from(["ended", "run", "queued", slurm("RUNNING"), slurm("X")])))
def test_whatever_a_node_says_the_answer_keeps_the_contract(state):
    found = outcome(state)
    assert found.status in ("", *STATUSES)
    if found.status:
        build(PLAN, "17", found.status, AT, found.details).encode()
    else:
        assert found.note


# ---- showing -------------------------------------------------------------------------------------------------------------------------------

HOSTILE = ["rm -rf x\r\x1b[2Kls", "a\nb", "a\tb", "\x1b]0;title\x07", "x\x00y"[0:1] + "\x7f", "safe\u202egnp.exe", "a\u200bb", "a\u00a0b", "a\u2028b", "a\u3164b", "a\u2800b",
           "a\ufe0f", "a\x9b31m", "it's \\n \x01", "$'fake\\n'", "\U000e0041", "'\\\n"]


@pytest.mark.parametrize("command", HOSTILE)
def test_a_command_that_could_deceive_a_terminal_is_shown_as_bash_would_write_it(command):
    shown = printable(command)
    assert shown.startswith("$'") and shown.isprintable() and not re.search("[\u3164\u2800\ufe0f]", shown)
    done = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"})
    assert done.stdout.decode() == command


@pytest.mark.parametrize("command", ["pytest -q", "grep 'a b' \"$X\" | wc -l", "prüfe é 日本 ✓", "a\\nb", "~/x $(date)"])
def test_a_command_with_nothing_to_hide_is_shown_as_it_is(command):
    assert printable(command) == command


@given(st.text(st.characters(exclude_categories=("Cs",))), st.text(st.characters(exclude_categories=("Cs",))))
def test_two_commands_are_never_shown_alike(one, other):
    assert printable(one).isprintable() and (printable(one) == printable(other)) == (one == other)
