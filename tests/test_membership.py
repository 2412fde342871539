"""The failure detector: its table row by row, its story of a loss, and its promises over random events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun import membership
from gpurun.membership import (
    ALIVE, DROP, LOST, PING, SAY_BACK, SAY_SUSPECT, STATES, SUSPECT,
    Broken, Connected, Gone, Heard, Hurry, Indirect, Limits, Member, Tick, step,
)

TICK_S = 0.2
MINUTES_S = 600.0
LIMITS = Limits()


def at(state, session=True, **fields):
    """A member that is there by no other way than the fields."""
    return Member(now=0.0, state=state, session=session, **fields)


class Watch:
    """A member with what a caller does around it: ticks, and what came of them, as (second, action)."""

    def __init__(self, member=None):
        self.member = member or step(Member(now=0.0), Connected(0.0))[0]
        self.said = []

    def tell(self, event):
        self.member, actions = step(self.member, event)
        self.said += [(round(event.now, 1), action) for action in actions]
        return actions

    def tick(self, seconds, rtt_s=0.0, also=lambda now: None):
        """Ticks for so long; `also(now)` may give an event beside each."""
        began = self.member.now                          # which stands still once the node is lost
        for count in range(1, round(seconds / TICK_S) + 1):
            now = began + count * TICK_S
            self.tell(Tick(now, rtt_s))
            event = also(now)
            if event is not None:
                self.tell(event)

    def lines(self):
        return [(second, action) for second, action in self.said if action != PING]


# ---- the table -----------------------------------------------------------------------------------------------------------------

# (a member, an event) -> (state, a session is open, actions)
ROWS = [
    (at(ALIVE), Tick(0.2), ALIVE, True, ()),
    (at(ALIVE, unpinged_s=1.9), Tick(0.2), ALIVE, True, (PING,)),
    (at(ALIVE, unpinged_s=1.9, session=False), Tick(0.2), ALIVE, False, ()),
    (at(ALIVE, direct_s=3.9), Tick(0.2), SUSPECT, True, (SAY_SUSPECT,)),
    (at(ALIVE, direct_s=3.9, unpinged_s=1.9), Tick(0.2), SUSPECT, True, (SAY_SUSPECT, PING)),
    (at(ALIVE, direct_s=3.9), Tick(0.2, rtt_s=0.5), ALIVE, True, ()),
    (at(ALIVE, direct_s=4.9), Tick(0.2, rtt_s=0.5), SUSPECT, True, (SAY_SUSPECT,)),
    (at(ALIVE, direct_s=14.9), Tick(0.2, rtt_s=60), SUSPECT, False, (SAY_SUSPECT, DROP)),
    (at(ALIVE, silent_s=299.9), Tick(0.2), LOST, False, (LOST,)),
    (at(SUSPECT, direct_s=9.0), Tick(0.2), SUSPECT, True, ()),
    (at(SUSPECT, direct_s=9.0, unpinged_s=1.9), Tick(0.2), SUSPECT, True, (PING,)),
    (at(SUSPECT, direct_s=14.9, unpinged_s=1.9), Tick(0.2), SUSPECT, False, (DROP,)),
    (at(SUSPECT, silent_s=149.9), Tick(0.2), SUSPECT, False, (DROP,)),
    (at(SUSPECT, silent_s=299.0, session=False), Tick(0.2), SUSPECT, False, ()),
    (at(SUSPECT, silent_s=299.9, session=False), Tick(0.2), LOST, False, (LOST,)),
    (at(ALIVE), Heard(0.2), ALIVE, True, ()),
    (at(SUSPECT), Heard(0.2), ALIVE, True, (SAY_BACK,)),
    (at(SUSPECT, session=False), Heard(0.2), SUSPECT, False, ()),
    (at(ALIVE, direct_s=3.0), Heard(0.2, False), ALIVE, True, ()),
    (at(SUSPECT), Heard(0.2, False), SUSPECT, True, ()),
    (at(SUSPECT, session=False), Heard(0.2, False), SUSPECT, False, ()),
    (at(ALIVE), Broken(0.2, "why"), SUSPECT, False, (SAY_SUSPECT, DROP)),
    (at(SUSPECT), Broken(0.2, "why"), SUSPECT, False, (DROP,)),
    (at(SUSPECT, session=False), Broken(0.2, "why"), SUSPECT, False, ()),
    (at(ALIVE, session=False), Connected(0.2), ALIVE, True, ()),
    (at(SUSPECT, session=False), Connected(0.2), SUSPECT, True, ()),
    (at(ALIVE), Indirect(0.2, True), ALIVE, True, ()),
    (at(ALIVE), Indirect(0.2, False, "why"), ALIVE, True, ()),
    (at(SUSPECT, session=False), Indirect(0.2, True), SUSPECT, False, ()),
    (at(SUSPECT, session=False), Indirect(0.2, False, "why"), SUSPECT, False, ()),
    (at(ALIVE), Hurry(0.2, 30.0), ALIVE, True, ()),
    (at(SUSPECT, session=False), Hurry(0.2, 30.0), SUSPECT, False, ()),
    (at(ALIVE), Gone(0.2, "why"), ALIVE, True, ()),
    (at(ALIVE, session=False), Gone(0.2, "why"), LOST, False, (LOST,)),
    (at(SUSPECT, session=False), Gone(0.2, "why"), LOST, False, (LOST,)),
]
SAMPLES = (Tick(900.0), Heard(900.0), Broken(900.0, "why"), Connected(900.0), Indirect(900.0, True), Indirect(900.0, False, "why"),
           Hurry(900.0, 1.0), Gone(900.0, "why"))


@pytest.mark.parametrize("member, event, state, session, actions", ROWS, ids=lambda value: str(value)[:40])
def test_a_pair_of_the_table(member, event, state, session, actions):
    then, did = step(member, event)
    assert (then.state, then.session, did) == (state, session, actions)


def test_every_event_has_a_row_and_every_row_a_cell_for_every_state():
    assert {type(event) for event in SAMPLES} == set(membership.TABLE)
    assert all(len(row) == len(STATES) for row in membership.TABLE.values())
    assert {cell for row in membership.TABLE.values() for cell in row} - {"stay"} == set(membership.ROWS)
    assert {(type(event), member.state) for member, event, *_ in ROWS} == {(kind, state) for kind in membership.TABLE for state in (ALIVE, SUSPECT)}


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: str(event)[:40])
def test_lost_absorbs_every_event(event):
    lost = at(LOST, session=False, reason="first")
    assert step(lost, event) == (lost, ())


# ---- the story of a loss -------------------------------------------------------------------------------------------------------

def test_a_node_that_answers_is_pinged_every_two_seconds_and_nothing_is_said():
    watch = Watch()
    watch.tick(60, also=Heard)
    assert watch.lines() == [] and 29 <= len(watch.said) <= 31


def test_a_short_loss_is_one_line_and_one_for_the_return():
    watch = Watch()
    watch.tick(2, also=Heard)
    watch.tick(5)
    assert "4 s" in watch.member.reason
    watch.tell(Heard(watch.member.now + 0.1))
    watch.tick(10, also=Heard)
    assert [action for _, action in watch.lines()] == [SAY_SUSPECT, SAY_BACK]
    assert abs(watch.member.back_after_s - 5.1) < 0.01


def test_a_long_loss_is_still_one_line_however_many_tries_it_takes():
    watch = Watch()
    watch.tick(20)                                       # silent: the session is given up
    for _ in range(4):                                   # new ones that say nothing, break or fail on the way
        watch.tell(Indirect(watch.member.now + 1, False, "no route"))
        watch.tell(Connected(watch.member.now + 1))
        watch.tick(6)
        watch.tell(Broken(watch.member.now + 1, "reset"))
        watch.tell(Connected(watch.member.now + 1))
        watch.tick(20)
    watch.tell(Connected(watch.member.now + 1))
    assert [action for _, action in watch.lines() if action != DROP] == [SAY_SUSPECT]
    watch.tell(Heard(watch.member.now + 0.1))
    assert [action for _, action in watch.lines() if action != DROP] == [SAY_SUSPECT, SAY_BACK]
    assert 100 < watch.member.back_after_s < 150 and watch.member.state == ALIVE


def test_a_second_loss_is_said_again():
    watch = Watch()
    for _ in range(2):
        watch.tick(5)
        watch.tell(Heard(watch.member.now + 0.1))
    assert [action for _, action in watch.lines()] == [SAY_SUSPECT, SAY_BACK] * 2


def test_a_session_that_breaks_says_why_and_is_given_up_at_once():
    watch = Watch()
    assert watch.tell(Broken(0.1, "reset by peer")) == (SAY_SUSPECT, DROP) and watch.member.reason == "reset by peer"


def test_a_silent_session_is_given_up_after_fifteen_seconds_and_once():
    watch = Watch()
    watch.tick(100)
    (second, _), = [line for line in watch.lines() if line[1] == DROP]
    assert 15 <= second <= 15.2


def test_a_session_over_which_only_the_node_gets_through_is_given_up_like_a_silent_one_and_the_node_is_not_lost():
    watch = Watch()
    watch.tick(100, also=lambda now: Heard(now, False))
    (said, _), (dropped, _) = watch.lines()
    assert [action for _, action in watch.lines()] == [SAY_SUSPECT, DROP] and 4 <= said <= 4.4 and 15 <= dropped <= 15.4
    assert watch.member.reason == "no answer for 4 s"
    watch.tick(LIMITS.lost_after_s, also=lambda now: Heard(now, False))
    assert watch.member.state == SUSPECT
    watch.tell(Connected(watch.member.now + 0.1))
    watch.tell(Heard(watch.member.now + 0.1))
    assert watch.lines()[-1][1] == SAY_BACK


def test_what_comes_unasked_from_a_suspect_has_it_asked_at_once():
    watch = Watch(at(SUSPECT))
    watch.tell(Tick(0.2))
    watch.tell(Heard(0.3, False))
    assert watch.tell(Tick(0.5)) == (PING,)


def test_a_new_session_has_its_whole_time_to_say_something():
    watch = Watch()
    watch.tick(250)
    watch.tell(Connected(250.1))
    watch.tick(14)
    assert watch.member.session and watch.member.state == SUSPECT
    watch.tick(1)
    assert not watch.member.session


def test_all_ways_silent_is_lost_after_the_time_given_and_the_reason_names_the_last_try():
    watch = Watch()
    watch.tick(20)
    watch.tell(Indirect(20.1, False, "ssh: connection timed out"))
    watch.tick(400)
    (second, action), = [line for line in watch.lines() if line[1] == LOST]
    assert 300 <= second <= 300.5 and "300 s" in watch.member.reason and "ssh: connection timed out" in watch.member.reason


def test_a_short_patience_leaves_half_of_itself_to_the_other_ways():
    watch = Watch(Member(now=0.0, session=True, limits=Limits(lost_after_s=6.0)))
    watch.tick(10)
    assert [action for _, action in watch.lines()] == [SAY_SUSPECT, DROP, LOST]
    assert [round(second) for second, _ in watch.lines()] == [3, 3, 6]


def test_a_node_that_answers_another_way_is_never_lost_and_not_alive_either():
    watch = Watch()
    watch.tick(3000, also=lambda now: Indirect(now, True) if round(now) % 200 == 0 else None)
    assert watch.member.state == SUSPECT and [action for _, action in watch.lines()] == [SAY_SUSPECT, DROP]


def test_a_machine_that_the_provider_says_is_gone_and_that_is_silent_is_lost_at_once():
    watch = Watch()
    watch.tick(5)
    assert watch.member.state == SUSPECT
    assert watch.tell(Gone(5.1, "the instance was destroyed")) == (LOST,) and watch.member.reason == "the instance was destroyed"


def test_a_machine_that_answers_is_not_lost_for_a_wrong_word_of_its_provider_but_for_one_that_lasts():
    watch = Watch()
    for second in range(1, 300):
        assert watch.tell(Heard(float(second))) == ()
        if second in (3, 4, 5, 100, 101, 102):
            assert watch.tell(Gone(second + 0.1, "null")) == ()
    lost = [second for second in range(300, 400) if (watch.tell(Heard(float(second))), watch.tell(Gone(second + 0.1, "null")))[1] == (LOST,)]
    assert lost == [360]


def test_an_operator_in_a_hurry_waits_as_long_as_asked_from_then_on_and_asking_again_changes_nothing():
    watch = Watch()
    watch.tick(100)
    watch.tell(Hurry(100.0, 30.0))
    watch.tick(10)
    watch.tell(Hurry(110.0, 30.0))
    watch.tick(100)
    (second, _), = [line for line in watch.lines() if line[1] == LOST]
    assert 130 <= second <= 130.5


def test_a_hurry_never_makes_the_patience_longer_than_a_word_of_the_node_does():
    watch = Watch()
    watch.tell(Hurry(0.0, 30.0))
    watch.tick(100, also=Heard)
    assert watch.member.state == ALIVE
    watch.tick(29.5)
    assert watch.member.state == SUSPECT
    watch.tick(1)
    assert watch.member.state == LOST


def test_a_gap_of_our_own_sends_a_ping_at_once_and_starts_the_silence_afresh():
    watch = Watch()
    watch.tick(3.8)
    watch.said.clear()
    assert watch.tell(Tick(3.8 + MINUTES_S)) == (PING,)
    watch.tick(3.8)
    assert watch.lines() == [] and watch.member.state == ALIVE
    watch.tick(0.4)
    assert [action for _, action in watch.lines()] == [SAY_SUSPECT]


def test_a_gap_that_another_event_shows_has_its_ping_at_the_next_tick():
    watch = Watch()
    watch.tick(1)
    assert watch.tell(Heard(1 + MINUTES_S)) == () and watch.tell(Tick(1 + MINUTES_S + TICK_S)) == (PING,)


def test_a_process_that_only_ever_gets_slow_ticks_still_gives_up_the_session_and_then_the_node():
    watch = Watch()
    while watch.member.state != LOST and watch.member.now < 10_000:
        watch.tell(Tick(watch.member.now + 5.0))
    assert [action for _, action in watch.lines()] == [SAY_SUSPECT, DROP, LOST]


def test_a_clock_that_stands_or_steps_back_does_no_harm():
    watch = Watch()
    watch.tick(2)
    for now in (2.0, 1.0, 2.0):
        watch.tell(Tick(now))
    assert watch.member.now == 2.0 and watch.member.silent_s < 2.1


# ---- promises over random events -----------------------------------------------------------------------------------------------

QUIET = st.sampled_from([Tick, Tick, Tick, lambda now: Broken(now, "why"), lambda now: Indirect(now, False, "why")])
ANY = st.one_of(QUIET, st.sampled_from([Heard, lambda now: Heard(now, False), Connected, lambda now: Indirect(now, True)]))
STEPS = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.2, 2.0, 20.0, MINUTES_S]))
SHORT = Limits(lost_after_s=40.0)


def story(events=ANY, steps=STEPS, size=120):
    return st.lists(st.tuples(steps, events), max_size=size)


def play(told, limits=SHORT):
    """Each event with the member after it and what it asked for."""
    member, now = step(Member(now=0.0, limits=limits), Connected(0.0))[0], 0.0
    for seconds, kind in told:
        now += seconds
        event = kind(now)
        member, actions = step(member, event)
        yield event, member, actions


def last_of(told, limits=SHORT):
    members = [member for _, member, _ in play(told, limits)]
    return members[-1] if members else Member(now=0.0, session=True, limits=limits)


@settings(max_examples=200, deadline=None)
@given(story())
def test_the_same_events_give_the_same_and_change_nothing_that_was_given(told):
    first = list(play(told))
    assert first == list(play(told))


@settings(max_examples=300, deadline=None)
@given(story(size=250))
def test_never_lost_before_so_much_silence_while_we_were_awake(told):
    silent, last, lost = 0.0, 0.0, False
    for event, member, actions in play(told):
        silent, last = silent + min(event.now - last, 1.0), event.now
        if LOST in actions:
            assert silent >= SHORT.lost_after_s - 1e-6 and not lost
        lost = lost or LOST in actions
        if isinstance(event, (Heard, Connected)) or isinstance(event, Indirect) and event.answered:
            silent = 0.0
        assert (member.state == LOST) == lost


@settings(max_examples=200, deadline=None)
@given(story(), st.lists(st.sampled_from([lambda now: Broken(now, "why"), lambda now: Indirect(now, False, "why")]), max_size=20),
       st.floats(0.2, 1.0), st.floats(5.0, 60.0))
def test_lost_within_a_tick_after_the_time_given(told, between, tick_s, lost_after_s):
    """Whatever was before: from the last word on, so long and no longer, however many tries fail meanwhile."""
    member = last_of(told, Limits(lost_after_s=lost_after_s))
    if member.state == LOST:
        return
    member, _ = step(member, Indirect(member.now, True))
    began = now = member.now
    while member.state != LOST:
        assert now - began < lost_after_s + 1e-6, "never lost"
        for kind in (between.pop() if between else Tick, Tick):
            now += tick_s / 2
            member, _ = step(member, kind(now))
    assert lost_after_s - 1e-6 <= now - began <= lost_after_s + tick_s + 1e-6


@settings(max_examples=300, deadline=None)
@given(story(size=250))
def test_one_line_for_a_loss_and_one_for_the_return_in_turn(told):
    said = [action for _, _, actions in play(told) for action in actions if action in (SAY_SUSPECT, SAY_BACK)]
    assert said == ([SAY_SUSPECT, SAY_BACK] * len(said))[:len(said)]


@settings(max_examples=300, deadline=None)
@given(story(size=250))
def test_a_session_is_given_up_once_and_no_ping_goes_where_none_is(told):
    session = True
    for event, member, actions in play(told):
        session = session or isinstance(event, Connected) and member.state != LOST
        for action in actions:
            assert action not in (PING, DROP) or session
            session = session and action not in (DROP, LOST)
        assert session == member.session


@settings(max_examples=300, deadline=None)
@given(story())
def test_after_whatever_happened_a_node_that_talks_is_alive_unless_it_was_lost(told):
    member = last_of(told)
    watch = Watch(member)
    watch.tell(Connected(member.now + 0.1))
    watch.tick(30, also=Heard)
    assert watch.member.state == (LOST if member.state == LOST else ALIVE)
    assert all(action in (PING, SAY_BACK) for _, action in watch.said)


@settings(max_examples=300, deadline=None)
@given(story())
def test_ten_minutes_of_our_own_sleep_lose_no_node(told):
    member = last_of(told)
    if member.state == LOST or member.silent_s >= SHORT.lost_after_s - 1.0:
        return
    then, actions = step(member, Tick(member.now + MINUTES_S))
    assert then.state != LOST and LOST not in actions
