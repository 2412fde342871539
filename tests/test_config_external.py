"""The table [external_job] of a job file: what is read, and what is refused with its place and a word on what to write."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun import budgets
from gpurun.config import BACKENDS, EXTERNAL_KEYS, External, Job, external_with, load_job
from gpurun.errors import ConfigError

HEAD = '[job]\nname = "a"\nrun = "true"\noutputs = ["metrics.json", "models/best", "out"]\n[external_job]\n'


@pytest.fixture
def external(tmp_path):
    def load(more="", head=HEAD):
        path = tmp_path / "job.toml"
        path.write_text(head + more)
        return load_job(path, {}).external_job
    return load


def refused(external, more, head=HEAD):
    with pytest.raises(ConfigError) as raised:
        external(more, head)
    return str(raised.value)


def test_every_key_is_read(external):
    assert external("""runtime_budget = "unknown"
plan = "3.1"
phase = "3"
expected = ["metrics.json", "./models//best/weights.pt", "out/"]
verify = "python check.py --strict"
resume = "gpurun poll --all"
backend = "slurm"
hard_limit_s = 7200
progress_every_s = 120
health_check_s = 30
soft_review_s = 600
abort_silence_s = 900.5
abort_pattern = "CUDA error|nan loss"
expect_output = true
""") == External("unknown", "3.1", "3", ("metrics.json", "models/best/weights.pt", "out"), "python check.py --strict", "gpurun poll --all", "slurm",
                 7200, 120, 30, 600, 900.5, "CUDA error|nan loss", True)


def test_everything_in_it_may_be_left_out_and_so_may_the_table(external):
    assert external() == External() and set(External().settings().values()) == {None}
    assert external(head='[job]\nname = "a"\nrun = "true"\n') is None
    assert EXTERNAL_KEYS == External._fields


def test_what_it_sets_of_a_budget_goes_by_the_budgets_own_names(external):
    found = external('hard_limit_s = 7\nprogress_every_s = 2\nhealth_check_s = 1\nsoft_review_s = 3\nabort_silence_s = 4\nabort_pattern = "x"\nexpect_output = false')
    assert budgets.budget("unknown", **found.settings()) == budgets.Budget("unknown", 7, 2, 1, 3, 4, "x", False)
    assert set(found.settings()) == set(budgets.Budget._fields) - {"name"}


@pytest.mark.parametrize("name", budgets.TABLE)
def test_each_budget_of_the_table_can_be_named(external, name):
    assert external(f'runtime_budget = "{name}"').runtime_budget == name


def test_a_command_may_have_lines_and_is_kept_to_the_letter(external):
    assert external('verify = """\npython a.py &&\n\tpython b.py # "x"\n"""').verify == 'python a.py &&\n\tpython b.py # "x"\n'


def test_an_expected_path_that_is_there_twice_counts_once_and_one_within_another_stays(external):
    assert external('expected = ["out", "out/a", "out/./a"]').expected == ("out", "out/a")


@pytest.mark.parametrize("line, words", [
    ("plan = 3.1", ['quote it: plan = "3.1"']), ("phase = 3", ['quote it: phase = "3"']), ("plan = true", ["must be a string", 'plan = "3.1"']),
    ('plan = ""', ["not blank"]), ('plan = " "', ["not blank"]), ('phase = "3\\n"', ["a line of text", "3\\n"]), ('plan = "\\u001b[2J"', ["a line of text",
    "\\u001b"]),
    (f'plan = "{"3" * 256}"', ["at most 255"]), ("plan = 2026-01-01", ["must be a string"]), ('plan = "a\\u0000"', ["NUL"]),
    ('runtime_budget = "medum"', ["did you mean `medium`?", "quick, medium, unknown, long_compute"]), ("runtime_budget = 60", ["a string"]),
    ('runtime_budget = ""', ["quick"]),
    ('backend = "slrum"', ["did you mean `slurm`?", "node, slurm"]), ('backend = "local"', ["node, slurm"]),
    ('verify = ""', ["is blank"]), ('resume = " \\n "', ["is blank"]), ("verify = []", ["a string", "python check.py"]),
    (f'verify = "{"x" * 131072}"', ["bash -c"]),
    ("expected = []", ["names nothing"]), ('expected = "metrics.json"', ["an array", '["metrics.json"]']), ("expected = [1]", ["a string"]),
    ("hard_limit_s = 0", ["above 0"]), ("hard_limit_s = -1", ["above 0"]), ("hard_limit_s = inf", ["above 0"]), ("health_check_s = nan", ["above 0"]),
    ('soft_review_s = "15m"', ["number of seconds"]), ("abort_silence_s = true", ["number of seconds"]), ("progress_every_s = 1e9", ["up to a year"]),
    ('abort_pattern = "("', ["not a regular expression of Python", "missing )"]), ('abort_pattern = "a{99999999999}"', ["not a regular expression"]),
    ('abort_pattern = ""', ["every line"]), ('abort_pattern = "x*"', ["every line"]), ('abort_pattern = "^"', ["every line"]),
    ("abort_pattern = 1", ["a string"]),
    ('expect_output = "yes"', ["true or false"]), ("expect_output = 1", ["true or false"]),
    ('expect = ["a"]', ["did you mean `expected`?"]), ('plan_id = "3"', ["did you mean `plan`?"]), ('verification_command = "x"', ["did you mean `verify`?"]),
    ('budget = "quick"', ["did you mean `runtime_budget`?"]), ("gpus = 2", ["belongs in the cluster file"]), ("nodes = 2", ["belongs in the cluster file"]),
    ("whatever = 1", ["is not a key here", "runtime_budget, plan, phase"]),
])
def test_a_value_that_cannot_be_is_refused_with_its_place(external, tmp_path, line, words):
    text = refused(external, line)
    key = line.split(" = ")[0]
    assert re.match(re.escape(f"{tmp_path}/job.toml:6:") + r"\d+: external_job\." + key, text), text
    assert all(word in text for word in words), text
    assert text.isprintable()


def test_it_is_a_table(external):
    job = '[job]\nname = "a"\nrun = "true"\n'
    assert ":1:1: external_job: must be a table, but is a whole number" in refused(external, job, "external_job = 1\n")
    assert ":4:1: external_job: must be a table, but is an array" in refused(external, "[[external_job]]\n", job)


@pytest.mark.parametrize("name, words", [
    ("other.json", ["would not come home", '"metrics.json", "models/best", "out"']), ("models", ["would not come home"]),
    ("models/bes", ["would not come home"]),
    ("outer", ["would not come home"]), ("/abs", ["an absolute path"]), ("~/x", ["starts with ~"]), ("out/../../x", ["leads out"]),
    (".", ["the whole workdir"]), ("", ["is blank"]),
])
def test_an_expected_path_must_be_one_that_comes_home(external, tmp_path, name, words):
    text = refused(external, f'expected = ["out", {json.dumps(name)}]')
    assert text.startswith(f"{tmp_path}/job.toml:6:20: external_job.expected[1]: "), text
    assert all(word in text for word in words), text


def test_without_outputs_no_path_can_be_expected(external):
    assert "which has none" in refused(external, 'expected = ["a"]', '[job]\nname = "a"\nrun = "true"\n[external_job]\n')


@pytest.mark.parametrize("lines, key, words", [
    ("hard_limit_s = 60\nsoft_review_s = 60", "soft_review_s", ["the review after 60 s would never come", "hard_limit_s = 60 ends the job before"]),
    ("health_check_s = 90\nhard_limit_s = 60", "health_check_s", ["the health check after 90 s", "raise hard_limit_s"]),
    ("hard_limit_s = 60\nabort_silence_s = 61", "abort_silence_s", ["would never come"]),
    ("hard_limit_s = 60\nprogress_every_s = 60.5", "progress_every_s", ["60.5 s would never come"]),
    ('runtime_budget = "quick"\nsoft_review_s = 600', "soft_review_s", ["the hard limit of the budget quick = 120", "set hard_limit_s"]),
    ('runtime_budget = "unknown"\nsoft_review_s = 3600', "soft_review_s", ["the budget unknown = 3600"]),
    ("health_check_s = 60\nsoft_review_s = 60", "health_check_s", ["comes before the review"]),
    ('runtime_budget = "medium"\nexpect_output = true', "expect_output", ["the budget medium has none", "set health_check_s"]),
])
def test_limits_that_contradict_each_other_are_refused_at_the_one_that_would_never_come(external, tmp_path, lines, key, words):
    text = refused(external, lines)
    at = next(number for number, line in enumerate(lines.split("\n"), 6) if line.startswith(key))
    assert text.startswith(f"{tmp_path}/job.toml:{at}:1: external_job.{key}: "), text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("lines", ['runtime_budget = "unknown"\nhard_limit_s = 30', 'runtime_budget = "quick"\nhard_limit_s = 7200\nsoft_review_s = 600',
                                   'runtime_budget = "long_compute"\nsoft_review_s = 90000', "soft_review_s = 600", "expect_output = true",
                                   'runtime_budget = "medium"\nexpect_output = true\nhealth_check_s = 10', 'runtime_budget = "quick"\nexpect_output = false'])
def test_a_default_that_gives_way_contradicts_nothing(external, lines):
    found = external(lines)
    budgets.budget(found.runtime_budget, **found.settings())


SETTINGS = ("hard_limit_s", "progress_every_s", "health_check_s", "soft_review_s", "abort_silence_s")


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from([None, *budgets.TABLE]), st.dictionaries(st.sampled_from(SETTINGS), st.integers(1, 5000)))
def test_what_is_read_is_a_budget_in_which_each_setting_comes_before_the_hard_limit(external, name, given_s):
    lines = ([f'runtime_budget = "{name}"'] if name else []) + [f"{key} = {value}" for key, value in given_s.items()]
    try:
        found = external("\n".join(lines))
    except ConfigError:
        return
    budget = budgets.budget(found.runtime_budget, **found.settings())
    limits = found.settings()
    for key in ("progress_s", "health_s", "review_s", "silence_s"):
        assert limits[key] is None or getattr(budget, key) == limits[key] and (not budget.hard_s or limits[key] < budget.hard_s)


def test_its_words_are_those_of_the_backends_and_budgets():
    assert BACKENDS == ("node", "slurm") and tuple(budgets.TABLE) == ("quick", "medium", "unknown", "long_compute")


# ---- the same on the command line -----------------------------------------------------------------------------------------------------

JOB = Job("/a/job.toml", "/a", "a", "true", outputs=("out", "m.json"), external_job=External(plan="3.1", phase="3", soft_review_s=600, expected=("out",)))


def test_an_option_overrides_the_file_and_none_leaves_it():
    said = external_with(JOB, {"runtime_budget": "quick", "plan": "3.2", "phase": None, "hard_limit_s": 60.0, "expected": ("./m.json",), "backend": None})
    assert said == External(runtime_budget="quick", plan="3.2", phase="3", soft_review_s=600, expected=("m.json",), hard_limit_s=60.0)
    assert external_with(JOB, dict.fromkeys(EXTERNAL_KEYS)) == JOB.external_job
    assert external_with(JOB._replace(external_job=None), {}) == External()


@pytest.mark.parametrize("given, words", [
    ({"plan": ""}, "--plan: \"\" can't be it"), ({"plan": "3\x1b[2J"}, "--plan: \"3\\u001b[2J\" can't be it"), ({"phase": " "}, "--phase: "),
    ({"verify": ""}, "--verify: is blank"),
    ({"resume": "x\0"}, "--resume: has a NUL"), ({"expected": ()}, "--expected: names nothing"), ({"expected": ("out",
    "b")}, "--expected: \"b\" would not come home"),
    ({"expected": ("../x",)}, "--expected: \"../x\" leads out"), ({"runtime_budget": "fast"}, "--budget: "),
    ({"hard_limit_s": 0.0}, "--limit: must be a number of seconds"),
    ({"backend": "pbs"}, "--backend: "), ({"abort_pattern": "("}, "--abort-pattern: is not a regular"),
])
def test_a_mistake_in_an_option_names_the_option(given, words):
    """An empty one too: `--plan "$PLAN"` without that variable must not become a submit that no plan knows of."""
    with pytest.raises(ConfigError) as raised:
        external_with(JOB, given)
    assert words in str(raised.value) and str(raised.value).isprintable()
