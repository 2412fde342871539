"""When is a node lost? A failure detector in SWIM's terms: `step(member, event)` gives the next member and the actions to carry out.

Pure: no clock, no network; each event brings the time. A node is alive while it answers on the control session (the direct probe: a
ping), suspect when no answer comes or that breaks, and lost only when every way to it was silent for `lost_after_s`, or its provider says
that the machine is gone and it doesn't answer. Whatever else comes shows that the node is there, not that it hears us: a session over which
only the node gets through (seen with iroh when this machine's networks change) is given up like a silent one. For one loss there is one
SAY_SUSPECT and, if the node comes back, one SAY_BACK, however many tries lie between.

The time that counts is this process's own: between two events at most `gap_s` of it passed. A laptop that slept, or a process that
was stopped, heard nothing because it didn't listen: that is not the node's silence.

The caller ticks several times a second, tells only what the session of now does (not what an earlier one left behind), and after DROP
connects again until it tells Connected. There is exactly one DROP for a session.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ALIVE, SUSPECT, LOST = "alive", "suspect", "lost"
STATES = (ALIVE, SUSPECT, LOST)

# The actions. LOST is one too, with `member.reason`; it comes once.
PING = "ping"                   # send a direct probe
SAY_SUSPECT = "say_suspect"     # the line for the loss, with `member.reason`
SAY_BACK = "say_back"           # the line for the return, with `member.back_after_s`
DROP = "drop"                   # give the session up and connect again: the direct way first, then the others


class Tick(NamedTuple):
    now: float
    rtt_s: float = 0.0          # of the session's path, where it is known


class Heard(NamedTuple):        # anything that came over the control session
    now: float
    answers: bool = True        # it answers what this session said: the node hears us, too


class Broken(NamedTuple):       # the session ended, or can't be used
    now: float
    reason: str


class Connected(NamedTuple):    # there is a new session
    now: float


class Indirect(NamedTuple):     # another way (SSH, the provider) said that the machine is there, or it said nothing
    now: float
    answered: bool
    reason: str = ""            # why it said nothing


class Hurry(NamedTuple):        # the operator waits for something to be delivered: from now on this much silence is enough
    now: float
    patience_s: float


class Gone(NamedTuple):         # the provider says that the machine doesn't exist any more
    now: float
    reason: str


TABLE = {
    #            alive        suspect       lost
    Tick:       ("watch",     "watch",      "stay"),
    Heard:      ("hear",      "come_back",  "stay"),
    Broken:     ("lose",      "lose_again", "stay"),
    Connected:  ("meet",      "meet",       "stay"),
    Indirect:   ("vouch",     "vouch",      "stay"),
    Hurry:      ("hurry",     "hurry",      "stay"),
    Gone:       ("gainsay",   "end",        "stay"),
}


class Limits(NamedTuple):
    ping_s: float = 2.0         # an idle session costs half a packet a second
    suspect_s: float = 4.0      # two pings without an answer (and twice the round trip); one is lost now and then on a bad line
    drop_s: float = 15.0        # QUIC itself gives a silent peer up after about 12 s, so nothing more will come of this session
    lost_after_s: float = 300.0  # a reboot and a change of networks take less
    gainsaid_s: float = 60.0    # a provider that calls a machine gone which answers us is believed only after so long
    gap_s: float = 1.0          # five of the orchestrator's ticks: a busy machine is late by less


class Member(NamedTuple):
    """One node as this side sees it. Seconds are those in which this process was awake."""

    now: float                  # of the last event
    limits: Limits = Limits()
    state: str = ALIVE
    session: bool = False       # one is open
    silent_s: float = 0.0       # since its last word, on any way: what LOST is decided by
    unheard_s: float = 0.0      # since its last word on a session: what the user is told
    direct_s: float = 0.0       # since its last answer, but a new session and a gap of our own start it afresh: what SUSPECT and DROP are decided by
    unpinged_s: float = 0.0
    hurried_s: float = 0.0      # since Hurry
    patience_s: float = 0.0     # what Hurry gave; 0: there was none
    back_after_s: float = 0.0   # how long the last loss lasted
    gone_first: float = 0.0     # since when its provider says, again and again, that it is gone
    gone_last: float = 0.0
    reason: str = ""            # of the last SAY_SUSPECT or LOST
    trouble: str = ""           # why the last try on another way failed


Next = tuple[Member, tuple[str, ...]]


def step(member: Member, event: Any) -> Next:
    row = TABLE[event.__class__][STATES.index(member.state)]
    return (member, ()) if row == "stay" else ROWS[row](_pass(member, event.now), event)


def _pass(member: Member, now: float) -> Member:
    """Let the time until `now` go by."""
    past, gap_s = max(now - member.now, 0.0), member.limits.gap_s
    slept, past = past > gap_s, min(past, gap_s)
    return member._replace(
        now=max(now, member.now), silent_s=member.silent_s + past, unheard_s=member.unheard_s + past, hurried_s=member.hurried_s + past,
        direct_s=0.0 if slept else member.direct_s + past,
        unpinged_s=member.limits.ping_s if slept else member.unpinged_s + past)     # a ping is due at the next tick


def _spent(member: Member) -> float:
    """How much of the patience with this node is used up: at 1 it is lost."""
    hurried = min(member.silent_s, member.hurried_s) / member.patience_s if member.patience_s else 0.0
    return max(member.silent_s / member.limits.lost_after_s, hurried)


# ---- the rows ------------------------------------------------------------------------------------------------------------------

def _watch(member: Member, tick: Tick) -> Next:
    limits, spent = member.limits, _spent(member)
    if spent >= 1:
        tried = f" (the last try: {member.trouble})" if member.trouble else ""
        return _lost(member, f"nothing heard for {member.silent_s:.0f} s, on any way{tried}")
    # Half of a short patience is kept for the other ways, which are tried only once the session is given up.
    dead = member.session and (member.direct_s >= limits.drop_s or spent >= 0.5)
    late = member.session and member.direct_s >= limits.suspect_s + 2 * tick.rtt_s
    actions: tuple[str, ...] = ()
    if member.state == ALIVE and (late or dead):
        deaf = member.unheard_s < min(member.direct_s, limits.suspect_s)
        member = member._replace(state=SUSPECT, reason=f"no answer for {member.direct_s:.0f} s" if deaf else f"nothing heard for {member.unheard_s:.0f} s")
        actions = (SAY_SUSPECT,)
    if dead:
        return member._replace(session=False), actions + (DROP,)
    if member.session and member.unpinged_s >= limits.ping_s:
        return member._replace(unpinged_s=0.0), actions + (PING,)
    return member, actions


def _hear(member: Member, event: Heard) -> Next:
    return member._replace(silent_s=0.0, unheard_s=0.0, direct_s=0.0 if event.answers else member.direct_s), ()


def _come_back(member: Member, event: Heard) -> Next:
    """What an earlier session had still to say shows that the machine was there, and no more; so does what is no answer, and it is asked at once."""
    if not member.session or not event.answers:
        return member._replace(silent_s=0.0, unpinged_s=member.limits.ping_s), ()
    return _hear(member._replace(state=ALIVE, back_after_s=member.unheard_s, trouble=""), event)[0], (SAY_BACK,)


def _lose(member: Member, event: Broken) -> Next:
    return member._replace(state=SUSPECT, session=False, reason=event.reason), (SAY_SUSPECT, DROP)


def _lose_again(member: Member, event: Broken) -> Next:
    """The loss was said already. Where no session is, there is none to give up: the tries to connect go on."""
    return member._replace(session=False, trouble=event.reason), (DROP,) if member.session else ()


def _meet(member: Member, event: Connected) -> Next:
    """The handshake is a word of the node. Whether it is back shows when the session says something."""
    return member._replace(session=True, silent_s=0.0, direct_s=0.0, unpinged_s=member.limits.ping_s), ()


def _vouch(member: Member, event: Indirect) -> Next:
    """A node that answers on another way isn't lost, and as long as it doesn't answer directly it isn't alive either."""
    return member._replace(silent_s=0.0, trouble="") if event.answered else member._replace(trouble=event.reason), ()


def _hurry(member: Member, event: Hurry) -> Next:
    """Counts from now, and from the first of several."""
    return (member, ()) if member.patience_s else (member._replace(patience_s=event.patience_s, hurried_s=0.0), ())


def _gainsay(member: Member, event: Gone) -> Next:
    """A machine that is gone falls silent within seconds, and then that word ends it. While it answers, the word may be a fault of its provider's,
    and a run with all that it has made would be thrown away for it."""
    if not member.session or member.direct_s >= member.limits.suspect_s:
        return _end(member, event)
    again = member.gone_first and event.now - member.gone_last <= member.limits.gainsaid_s
    member = member._replace(gone_first=member.gone_first if again else event.now, gone_last=event.now)
    return _end(member, event) if event.now - member.gone_first >= member.limits.gainsaid_s else (member, ())


def _end(member: Member, event: Gone) -> Next:
    return _lost(member, event.reason)


def _lost(member: Member, reason: str) -> Next:
    return member._replace(state=LOST, session=False, reason=reason), (LOST,)


ROWS = {"watch": _watch, "hear": _hear, "come_back": _come_back, "lose": _lose, "lose_again": _lose_again, "meet": _meet,
        "vouch": _vouch, "hurry": _hurry, "gainsay": _gainsay, "end": _end}
