"""Runtime budgets: the table, each rule at its border, the words, and what holds for any budget at any moment."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun import budgets
from gpurun.budgets import GO_ON, REVIEW, STOP, TABLE, TELL, Budget, Decision, Signals, budget, decide, from_wire, next_s
from gpurun.errors import ConfigError, WireError

NO_GROWTH = "neither its log nor a declared output has grown"
FINE = Signals(produced=True, processes=2)
ALL = Budget("unknown", hard_s=1000, progress_s=100, health_s=60, review_s=500, silence_s=300, abort_pattern="x", expect_output=True)


# ---- the table -------------------------------------------------------------------------------------------------------------------

def test_the_budgets_are_those_of_the_policy():
    assert TABLE == {"quick": Budget("quick", hard_s=120), "medium": Budget("medium", hard_s=1800, progress_s=300),
                     "unknown": Budget("unknown", hard_s=3600, health_s=60, review_s=900), "long_compute": Budget("long_compute")}


def test_the_document_of_the_file_names_every_budget_and_every_setting():
    for name in (*TABLE, *Budget()._asdict()):
        assert name in budgets.__doc__


def test_a_budget_is_had_by_its_name_and_none_is_none():
    assert budget("medium") == TABLE["medium"]
    assert budget() == Budget() and decide(budget(), 1e9, Signals()) == Decision(GO_ON, "")


def test_every_setting_of_a_budget_may_be_changed_and_what_is_none_is_left_as_it_is():
    assert budget("medium", hard_s=None, progress_s=60, abort_pattern=None) == Budget("medium", hard_s=1800, progress_s=60)
    assert budget("long_compute", hard_s=86400) == Budget("long_compute", hard_s=86400)
    assert budget("", hard_s=5) == Budget(hard_s=5)
    assert budget(**ALL._asdict()) == ALL


def test_a_limit_of_a_budget_can_be_taken_away():
    assert budget("quick", hard_s=0) == Budget("quick")
    assert decide(budget("quick", hard_s=0), 1e6, FINE).act == GO_ON


def test_a_hard_limit_that_is_set_leaves_no_default_behind_it():
    assert budget("unknown", hard_s=600) == Budget("unknown", hard_s=600, health_s=60, review_s=300)
    assert budget("unknown", hard_s=900).review_s == 450
    assert budget("unknown", hard_s=60) == Budget("unknown", hard_s=60, review_s=30)
    assert budget("unknown", hard_s=7200) == Budget("unknown", hard_s=7200, health_s=60, review_s=900)


def test_what_is_set_is_never_moved():
    assert budget("unknown", hard_s=600, review_s=800, health_s=700) == Budget("unknown", hard_s=600, review_s=800, health_s=700)


def test_a_name_that_is_no_budget_is_answered_with_those_that_are():
    with pytest.raises(ConfigError, match="no runtime budget 'fast': it is one of quick, medium, unknown, long_compute"):
        budget("fast")


@pytest.mark.parametrize("key, value", [
    ("hard_s", -1), ("hard_s", math.nan), ("hard_s", math.inf), ("hard_s", True), ("hard_s", "120"), ("hard_s", 1 << 70),
    ("progress_s", -0.5), ("health_s", []), ("review_s", {}), ("silence_s", -math.inf), ("abort_pattern", 5), ("abort_pattern", b"x"),
    ("expect_output", 1), ("expect_output", "yes"),
])
def test_a_setting_that_cannot_be_is_refused_here_and_from_the_wire(key, value):
    with pytest.raises(ConfigError, match=f"{key} of a runtime budget is "):
        budget("quick", **{key: value})
    with pytest.raises(WireError, match=f"budget.{key} must be "):
        from_wire({key: value})


# ---- the wire --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("one", [*TABLE.values(), Budget(), ALL])
def test_a_budget_goes_over_the_wire_unchanged(one):
    assert from_wire(one._asdict()) == one


def test_nothing_on_the_wire_is_no_budget():
    assert from_wire({}) == Budget()


def test_what_a_later_version_says_of_a_budget_is_ignored_and_what_an_earlier_one_does_not_say_is_not_set():
    assert from_wire({"name": "quick", "hard_s": 5, "gpu_idle_s": "?"}) == Budget("quick", hard_s=5)


@pytest.mark.parametrize("said", [None, [], "quick", 5, {"name": None}, {"name": 5}, {"hard_s": None}])
def test_what_is_no_budget_on_the_wire_is_an_error_of_the_wire(said):
    with pytest.raises(WireError):
        from_wire(said)


def test_an_error_from_the_wire_does_not_repeat_what_was_sent():
    with pytest.raises(WireError) as error:
        from_wire({"hard_s": "x" * 100_000})
    assert len(str(error.value)) < 100


@given(st.dictionaries(st.sampled_from([*Budget()._fields, "other"]),
                       st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none())))
@settings(max_examples=300, deadline=None)
def test_anything_from_the_wire_is_a_budget_or_an_error_of_the_wire(said):
    try:
        one = from_wire(said)
    except WireError:
        return
    assert from_wire(one._asdict()) == one
    assert isinstance(decide(one, 1.0, Signals()), Decision)


# ---- the rules at their borders ----------------------------------------------------------------------------------------------------

# (budget, elapsed, signals) -> what is done
ROWS = [
    (TABLE["quick"], 119.9, FINE, GO_ON),
    (TABLE["quick"], 120, FINE, STOP),
    (TABLE["quick"], 119.9, Signals(silent_s=119.9), GO_ON),
    (TABLE["medium"], 299, Signals(silent_s=299), GO_ON),
    (TABLE["medium"], 300, Signals(silent_s=300), TELL),
    (TABLE["medium"], 599, Signals(silent_s=599, told_s=300), GO_ON),
    (TABLE["medium"], 600, Signals(silent_s=600, told_s=300), TELL),
    (TABLE["medium"], 700, Signals(silent_s=299, told_s=300), GO_ON),
    (TABLE["medium"], 1800, Signals(silent_s=1800), STOP),
    (TABLE["unknown"], 59, Signals(processes=0), GO_ON),
    (TABLE["unknown"], 60, Signals(processes=0), STOP),
    (TABLE["unknown"], 60, Signals(processes=None), GO_ON),           # nobody knows: that is no fault of the job
    (TABLE["unknown"], 60, Signals(processes=1), GO_ON),              # silence is none either, where no output was promised
    (TABLE["unknown"], 61, Signals(processes=0, checked=True), GO_ON),
    (TABLE["unknown"], 899, FINE._replace(checked=True), GO_ON),
    (TABLE["unknown"], 900, FINE._replace(checked=True), REVIEW),
    (TABLE["unknown"], 901, FINE._replace(checked=True, reviewed=True), GO_ON),
    (TABLE["unknown"], 3600, FINE._replace(checked=True, reviewed=True), STOP),
    (TABLE["long_compute"], 1e8, Signals(silent_s=1e8, processes=0, matched="x"), GO_ON),
    (ALL, 60, Signals(processes=1), STOP),                            # output was promised
    (ALL, 60, Signals(processes=1, produced=True), GO_ON),
    (ALL, 60, Signals(processes=None), STOP),
    (ALL, 61, Signals(processes=1, checked=True), GO_ON),
    (ALL, 400, Signals(silent_s=299.9, checked=True, told_s=350), GO_ON),
    (ALL, 400, Signals(silent_s=300, checked=True, told_s=350), STOP),
    (ALL, 0, FINE._replace(matched="x"), STOP),                       # whenever that is
    (ALL, 999, FINE._replace(matched="x", checked=True), STOP),
    (Budget(hard_s=1000), 5, Signals(matched="x"), GO_ON),            # of nobody's pattern
    (ALL, 500, FINE._replace(checked=True, silent_s=150), REVIEW),    # before a silence is told of: it says that too
]


@pytest.mark.parametrize("one, elapsed_s, signals, act", ROWS)
def test_a_rule_at_its_border(one, elapsed_s, signals, act):
    assert decide(one, elapsed_s, signals).act == act


def test_what_ends_a_job_comes_before_what_is_said_of_it_and_the_hard_limit_before_all():
    signals, said = Signals(silent_s=2000, processes=0, matched="x"), []     # all of the rules have something to say
    one = ALL
    for change in (dict(hard_s=0), dict(abort_pattern=""), dict(silence_s=0), dict(health_s=0), dict(review_s=0), dict(progress_s=0)):
        said.append(decide(one, 2000, signals))
        one = one._replace(**change)
    assert [one.act for one in said] == [STOP, STOP, STOP, STOP, REVIEW, TELL]
    for word, decision in zip(("hard limit", "pattern", "without progress", "health check", "has run", "no progress for"), said):
        assert word in decision.text
    assert decide(one, 2000, signals) == Decision()


# ---- the words -----------------------------------------------------------------------------------------------------------------------

def test_the_words_of_each_limit():
    assert decide(TABLE["quick"], 120.04, FINE).text == "the hard limit of 120 s (budget quick) was reached"
    assert decide(TABLE["medium"], 1801, FINE).text == "the hard limit of 30 min (budget medium) was reached"
    assert decide(Budget(hard_s=90.5), 91, FINE).text == "the hard limit of 90.5 s was reached"
    assert decide(Budget(silence_s=600), 800, Signals(silent_s=600)).text == f"the limit of 10 min without progress was reached: {NO_GROWTH}"
    assert decide(TABLE["unknown"], 60, Signals(processes=0)).text == "the health check after 60 s (budget unknown) found no process of it"
    assert decide(ALL, 60, Signals(processes=1)).text == f"the health check after 60 s (budget unknown) found no output, where output is expected: {NO_GROWTH}"
    assert decide(ALL, 60, Signals(matched="CUDA error: out of memory")).text == "its log matched the abort pattern: CUDA error: out of memory"


def test_the_words_of_a_silence():
    assert decide(TABLE["medium"], 400, Signals(silent_s=300.2)).text == f"no progress for 5 min: {NO_GROWTH}"
    assert decide(Budget(progress_s=30), 400, Signals(silent_s=31.9)).text == f"no progress for 31 s: {NO_GROWTH}"


def test_a_review_says_how_long_it_has_run_when_it_made_progress_and_when_its_end_comes():
    checked = Signals(silent_s=20.9, produced=True, checked=True)
    assert decide(TABLE["unknown"], 900.2, checked).text == (
        "it has run for 15 min (budget unknown); its last progress was 20 s ago; the hard limit comes in 45 min")
    assert decide(Budget(review_s=60), 60, Signals(silent_s=60)).text == "it has run for 60 s; it has made no progress yet; it has no hard limit"


@pytest.mark.parametrize("seconds, limit, about", [
    (0.5, "0.5 s", "0 s"), (59, "59 s", "59 s"), (60, "60 s", "60 s"), (120, "120 s", "120 s"), (121, "121 s", "2 min"), (180, "3 min", "3 min"),
    (200, "200 s", "3 min"), (3600, "1 h", "60 min"), (5400, "90 min", "90 min"), (7200, "2 h", "2 h"), (12000, "200 min", "3 h 20 min"),
    (172800, "48 h", "2 d"), (190000, "190000 s", "2 d 4 h"), (604800, "168 h", "7 d"),
])
def test_a_limit_is_shown_as_it_was_set_and_a_time_without_what_nobody_reads(seconds, limit, about):
    assert (budgets._limit(seconds), budgets._about(seconds)) == (limit, about)


@pytest.mark.parametrize("line, shown", [
    ("  RuntimeError:\tNaN  ", "RuntimeError: NaN"),
    ("\x1b[1;31mError\x1b[0m: 3", "Error: 3"),
    ("a\x1b]0;title\x07b\x9b31m\u202eoverride\x00", "a ]0;title b 31m override"),
    ("é 漢字 ok", "é 漢字 ok"),
    ("e" * 120, "e" * 120),
    ("e" * 121, "e" * 119 + "…"),
])
def test_a_line_of_a_log_is_shown_as_one_short_line_that_no_terminal_obeys(line, shown):
    assert decide(ALL, 1, Signals(matched=line)).text == f"its log matched the abort pattern: {shown}"


# ---- for any budget at any moment --------------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 1e7) | st.integers(0, 10_000) | st.just(0)
BUDGETS = st.sampled_from(list(TABLE.values())) | st.builds(Budget, st.sampled_from(["", *TABLE]), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS,
                                                           st.sampled_from(["", "x"]), st.booleans())
SIGNALS = st.builds(Signals, SECONDS, st.booleans(), st.none() | st.integers(0, 5), st.sampled_from(["", "x", "\x1b[2J" * 90]), st.booleans(), st.booleans(),
                    st.just(-1.0) | SECONDS)


@given(BUDGETS, st.floats() | SECONDS,
       st.builds(Signals, st.floats(), st.booleans(), st.none() | st.integers(), st.text(), st.booleans(), st.booleans(), st.floats()))
@settings(max_examples=1000, deadline=None)
def test_there_is_a_decision_at_any_moment_and_the_same_one_each_time(one, elapsed_s, signals):
    decision = decide(one, elapsed_s, signals)
    assert decision == decide(one, elapsed_s, signals)
    assert decision.act in (GO_ON, TELL, REVIEW, STOP) and bool(decision.text) == (decision.act != GO_ON)
    assert decision.text.isprintable() and len(decision.text) < 250
    assert budgets.SOONEST_S <= next_s(one, elapsed_s, signals) <= budgets.LATEST_S


@given(BUDGETS, SECONDS, SIGNALS)
@settings(max_examples=500, deadline=None)
def test_nothing_that_a_job_does_moves_its_hard_limit(one, past_s, signals):
    if one.hard_s:
        assert "hard limit" in decide(one, one.hard_s + past_s, signals).text
        assert decide(one, one.hard_s + past_s, signals).act == STOP


@given(BUDGETS, SECONDS, SECONDS, SIGNALS)
@settings(max_examples=500, deadline=None)
def test_who_is_stopped_now_would_be_stopped_later_too(one, elapsed_s, more_s, signals):
    if decide(one, elapsed_s, signals).act == STOP:
        assert decide(one, elapsed_s + more_s, signals._replace(silent_s=signals.silent_s + more_s)).act == STOP


@given(BUDGETS, SECONDS, SIGNALS)
@settings(max_examples=500, deadline=None)
def test_more_progress_never_stops_a_job(one, elapsed_s, signals):
    """One that may go on silent may go on when it has made progress."""
    if decide(one, elapsed_s, signals).act != STOP:
        assert decide(one, elapsed_s, signals._replace(silent_s=0.0, produced=True)).act != STOP


def story(one, signals_at, until_s, step_s=None):
    """What a watch does with the decisions, from look to look: [(elapsed, decision)] of all that isn't GO_ON, up to the first STOP."""
    said, elapsed_s, signals = [], 0.0, Signals()
    while elapsed_s <= until_s:
        signals = signals._replace(**signals_at(elapsed_s))
        decision = decide(one, elapsed_s, signals)
        if decision.act != GO_ON:
            said.append((elapsed_s, decision.act))
        if decision.act == STOP:
            break
        signals = signals._replace(checked=signals.checked or bool(one.health_s) and elapsed_s >= one.health_s,
                                   reviewed=signals.reviewed or decision.act == REVIEW,
                                   told_s=elapsed_s if decision.act in (TELL, REVIEW) else signals.told_s)
        elapsed_s += step_s or next_s(one, elapsed_s, signals)
    return said


def test_a_silent_job_of_each_budget_from_its_start_to_its_end():
    """The looks are as far apart as `next_s` lets them be, and no limit is missed by that."""
    def silent(elapsed_s):
        return {"silent_s": elapsed_s, "processes": 1}
    assert story(TABLE["quick"], silent, 9999) == [(120, STOP)]
    assert story(TABLE["medium"], silent, 9999) == [(300, TELL), (600, TELL), (900, TELL), (1200, TELL), (1500, TELL), (1800, STOP)]
    assert story(TABLE["unknown"], silent, 9999) == [(900, REVIEW), (3600, STOP)]
    assert story(TABLE["long_compute"], silent, 99999) == []
    assert story(ALL, silent, 9999) == [(60, STOP)]
    assert story(ALL._replace(expect_output=False), silent, 9999) == [(100, TELL), (200, TELL), (300, STOP)]
    assert story(ALL._replace(expect_output=False, silence_s=0), silent, 9999) == [
        (100, TELL), (200, TELL), (300, TELL), (400, TELL), (500, REVIEW), (600, TELL), (700, TELL), (800, TELL), (900, TELL), (1000, STOP)]


def test_each_silence_is_told_of_anew_and_a_job_that_makes_progress_is_left_alone():
    def now_and_then(elapsed_s):              # silent for 400 s, then progress at 400, 420, ..., 1000
        return {"silent_s": elapsed_s if elapsed_s < 400 else elapsed_s % 20 if elapsed_s < 1000 else elapsed_s - 1000}
    assert story(Budget(progress_s=300), now_and_then, 1700, 1) == [(300, TELL), (1300, TELL), (1600, TELL)]


@given(BUDGETS, st.lists(st.floats(1.0, 4000.0), min_size=1, max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
@settings(max_examples=300, deadline=None)
def test_a_review_is_had_once_and_a_silence_is_not_told_of_more_often_than_asked_for(one, steps, progress):
    looks, elapsed_s, grew_s = iter(zip(steps, progress)), 0.0, 0.0
    signals, reviews, told = Signals(), 0, []
    for step, grew in looks:
        elapsed_s += step
        grew_s = elapsed_s if grew else grew_s
        signals = signals._replace(silent_s=elapsed_s - grew_s, produced=signals.produced or grew, processes=1)
        decision = decide(one, elapsed_s, signals)
        reviews += decision.act == REVIEW
        told += [elapsed_s] if decision.act == TELL else []
        signals = signals._replace(checked=elapsed_s >= one.health_s, reviewed=signals.reviewed or decision.act == REVIEW,
                                   told_s=elapsed_s if decision.act == TELL else signals.told_s)
    assert reviews <= 1
    assert all(later - earlier >= one.progress_s for earlier, later in zip(told, told[1:]))


@pytest.mark.parametrize("one, elapsed_s, signals, rest_s", [
    (Budget(hard_s=300), 299, FINE, 1),
    (Budget(health_s=300), 299, FINE, 1),
    (Budget(health_s=300), 299, FINE._replace(checked=True), budgets.LATEST_S),
    (Budget(review_s=300), 299, FINE, 1),
    (Budget(review_s=300), 299, FINE._replace(reviewed=True), budgets.LATEST_S),
    (Budget(silence_s=300), 299, Signals(silent_s=299), 1),
    (Budget(silence_s=300), 299, Signals(silent_s=200), 10),
    (Budget(silence_s=60), 299, FINE, 3),
    (Budget(silence_s=1), 299, FINE, 0.5),
    (Budget(progress_s=300), 299, Signals(silent_s=299), 1),
    (Budget(progress_s=300), 599, Signals(silent_s=599, told_s=300), 1),
    (Budget(progress_s=300), 301, Signals(silent_s=301, told_s=300), 10),
])
def test_the_next_look_comes_no_later_than_what_it_is_for(one, elapsed_s, signals, rest_s):
    assert next_s(one, elapsed_s, signals) == rest_s


def test_with_an_abort_pattern_the_logs_are_read_often_and_without_limits_seldom():
    assert next_s(ALL, 5, Signals()) <= 1.0
    assert next_s(TABLE["long_compute"], 5, Signals()) == budgets.LATEST_S
    assert next_s(TABLE["quick"], 100, Signals()) == 20
    assert next_s(TABLE["quick"], 119.999, Signals()) == budgets.SOONEST_S


def looks(late, times, listening=True):
    return [late.look(now, listening) for now in times]


def test_an_operator_ends_what_its_node_has_not_ended_half_a_minute_after_the_limit():
    late = budgets.Late(Budget("quick", hard_s=2.0))
    assert not any(looks(late, range(100))), "nothing has begun"
    late.since = 100.0
    said = looks(late, [100 + tick / 4 for tick in range(200)])
    assert not any(said[:8 + 4 * 30]) and said[-1] == "the hard limit of 2 s (budget quick) was reached"


def test_time_in_which_the_operator_slept_or_had_no_connection_is_no_reason_to_end_what_may_have_ended_well():
    late = budgets.Late(Budget("quick", hard_s=2.0))
    late.since = 0.0
    assert not any(looks(late, [1.0, 1.2, 5000.0, 5000.2])), "it was stopped for an hour, and what came meanwhile is still to be read"
    assert not any(looks(late, range(5001, 5100), listening=False))
    assert not any(looks(late, range(5100, 5120)))


def test_without_a_hard_limit_an_operator_ends_nothing():
    late = budgets.Late(Budget("long_compute"))
    late.since = 0.0
    assert not any(looks(late, range(0, 10 ** 5, 7)))
