"""Machines come and go: the driver with a provider in memory that does what a test says, and hosts of one's own with real agents."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import end_agents, eventually
from sshd import SSHD, Sshd, own_home_possible

from gpurun import fleet as fleets
from gpurun import supervise
from gpurun.config import Cluster, Limits
from gpurun.errors import AccountError, GpurunError, NoOfferError, OfferGoneError, ProviderError, UnclearError
from gpurun.fleet import Fleet, LeftOver, Pace, Stopped
from gpurun.machines import Store, prefix_of
from gpurun.messages import Armed
from gpurun.provider import Endpoint, Machines, Made, Node
from gpurun.reconcile import BROKEN, COMING, UP, Machine, Seen, label_for

PREFIX = prefix_of("someone", "cluster /c")
OTHER = prefix_of("someone", "cluster /d")


class Said:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.say = self.warn = self.lines.append

    def progress(self, *_: Any) -> None:
        pass

    def live_tick(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Answering(Node):
    """A node whose agent answers."""

    def cached_endpoint(self) -> Endpoint | None:
        return Endpoint(self.name, "x" * 52, (), "", "", 1)


class Memory(Machines):
    """A provider. `do[name]` takes the place of a call; what it gives or raises is what the call does."""

    paid = True
    times = {"settle_s": 20.0, "confirm_s": 0.1, "again_s": 0.2, "doubt_s": 0.3, "ready_within_s": 60.0}

    def __init__(self) -> None:
        self.rows: dict[str, Seen] = {}
        self.called: list[str] = []
        self.do: dict[str, Any] = {}
        self.most, self.now_shape, self.lock = 0, "s", threading.Lock()

    def shape(self) -> str:
        return self.now_shape

    def look(self) -> tuple[list[Seen], bool]:
        return self.do.get("look", lambda: (list(self.rows.values()), True))()

    def pick(self) -> dict[str, Any]:
        self.called.append("pick")
        self.do.get("pick", lambda: None)()
        return {"price_per_hour": 0.5, "gpu": "G", "host": "41"}

    def make(self, machine: Machine, state: str = UP) -> str:
        with self.lock:
            number = str(100 + len(self.called))
            self.called.append(f"create {machine.index}")
            self.rows[number] = Seen(number, machine.label, state)
            self.most = max(self.most, len(self.rows))
        return number

    def create(self, machine: Machine, say: Any, progress: Any) -> Made:
        return Made(self.do.get("create", self.make)(machine), {})

    def node(self, machine: Machine) -> Node:
        return Answering(f"node{machine.index}", Cluster(), machine.label)

    def prepare(self, machine: Machine, say: Any, progress: Any) -> Node:
        self.called.append(f"prepare {machine.index}")
        self.do.get("prepare", lambda one: None)(machine)
        return self.node(machine)

    def destroy(self, machine: Machine, machine_id: str) -> None:
        self.called.append(f"destroy {machine_id}")
        self.do.get("destroy", lambda number: self.rows.pop(number, None))(machine_id)

    def by_hand(self, machine: Machine) -> str:
        return f"press the button of {machine.id or machine.label}"

    def times_called(self, what: str) -> int:
        return sum(one.startswith(what) for one in self.called)


class World:
    def __init__(self, folder: Path, limits: Limits = Limits()) -> None:
        self.provider, self.screen, self.store = Memory(), Said(), Store(str(folder / "machines"))
        self.cluster = Cluster(kind="vastai", path="/c", limits=limits)

    def fleet(self, prefix: str = PREFIX) -> Fleet:
        """As another process would have it."""
        return Fleet(self.cluster, self.provider, self.store, prefix, self.screen, lambda: None, "me", {"kind": "vastai"})

    def up(self, count: int) -> list[Machine]:
        return self.fleet().up(count)

    @property
    def there(self) -> list[int]:
        return sorted(int(row.label.split("-")[3]) for row in self.provider.rows.values() if row.label.startswith(PREFIX))

    def ended(self) -> bool:
        return not self.provider.rows and not self.store.all()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(fleets, "PACE", Pace(look_s=0.02, ending_s=0.02, offer_s=0.0, create_s=0.0, failed_s=0.0, later_s=0.0, again_s=(0.02, 0.04),
                                             patience_s=40.0, in_flight_s=30.0))
    monkeypatch.setattr(fleets, "facts_once", lambda *_: {})          # its agents answer
    monkeypatch.setattr(fleets, "arm_once", lambda *_: Armed())
    return World(tmp_path)


# ---- up ------------------------------------------------------------------------------------------------------------------------------

def test_up_makes_what_is_missing_and_a_second_one_nothing(world):
    assert [one.index for one in world.up(3)] == [1, 2, 3] and world.there == [1, 2, 3]
    assert all(one.ready and one.id and one.facts["price_per_hour"] == 0.5 for one in world.store.all(PREFIX))
    before = list(world.provider.called)
    assert [one.index for one in world.up(3)] == [1, 2, 3] and world.provider.called == before
    assert [one.index for one in world.up(4)] == [1, 2, 3, 4] and world.provider.times_called("create") == 4


def test_up_with_fewer_ends_the_highest(world):
    world.up(3)
    assert [one.index for one in world.up(1)] == [1]
    assert world.there == [1] and [one.index for one in world.store.all()] == [1]


def test_what_is_wanted_has_changed_each_machine_is_replaced_and_never_two_at_once(world):
    first = world.up(2)
    world.provider.now_shape = "other"
    second = world.up(2)
    assert not {one.id for one in first} & {one.id for one in second} and world.there == [1, 2] and world.provider.most == 2


def test_a_machine_that_takes_long_holds_up_no_other(world):
    go = threading.Event()
    world.provider.do["prepare"] = lambda one: go.wait(60) if one.index == 1 else None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(world.up(3)))
    thread.start()
    eventually(lambda: sum(one.ready for one in world.store.all()) == 2)
    go.set()
    thread.join(60)
    assert [one.index for one in found] == [1, 2, 3]


def test_a_machine_that_fails_is_ended_its_host_avoided_and_the_next_one_used(world):
    world.provider.do["prepare"] = lambda one: _raise(ProviderError("no sshd")) if world.provider.times_called("create") < 3 else None
    assert [one.index for one in world.up(1)] == [1]
    assert world.provider.times_called("create") == 3 and world.provider.most == 1 and world.store.avoided() == {"41": "no sshd"}
    assert "no sshd" in world.screen.text


def test_after_five_failures_no_more_is_tried_and_each_is_told(world):
    world.provider.do["prepare"] = lambda one: _raise(ProviderError(f"no sshd on {one.id}"))
    with pytest.raises(ProviderError) as caught:
        world.up(1)
    assert "5 machines failed" in str(caught.value) and str(caught.value).count("no sshd on") == 5 and world.provider.times_called("create") == 5
    assert world.ended()


@pytest.mark.parametrize("error", [AccountError("no credit"), NoOfferError("none fits")])
@pytest.mark.parametrize("where", ["pick", "create"])
def test_what_no_other_machine_helps_against_ends_at_once_and_what_stood_before_stays(world, error, where):
    world.up(1)
    world.provider.do[where] = lambda *_: _raise(error)
    with pytest.raises(type(error), match=str(error)):
        world.up(3)
    assert world.there == [1] and [one.index for one in world.store.all()] == [1] and world.store.all()[0].ready


def test_an_offer_that_is_gone_is_no_failure_and_twenty_in_a_row_are(world):
    late = world.provider.make
    world.provider.do["create"] = lambda one: _raise(OfferGoneError("gone")) if world.provider.times_called("pick") < 15 else late(one)
    assert len(world.up(1)) == 1
    world.provider.do["create"] = lambda one: _raise(OfferGoneError("gone"))
    with pytest.raises(ProviderError, match="20 offers in a row"):
        world.up(2)
    assert world.there == [1]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("made", [True, False])
def test_an_answer_that_got_lost_is_settled_by_the_list_and_nothing_is_asked_for_twice(world, made, known):
    def create(one: Machine) -> str:
        if world.provider.times_called("pick") > 1:
            return world.provider.make(one)
        number = world.provider.make(one) if made else "777"
        raise UnclearError("the answer was lost", number if known else "")

    world.provider.do["create"] = create
    world.provider.times = {**Memory.times, "settle_s": 1.5}
    assert len(world.up(1)) == 1
    assert world.provider.most == 1 and len(world.store.all()) == 1
    assert world.provider.times_called("create") == (2 if made and known else 1)      # with an id it was an error: that machine is of no use


def test_nothing_is_made_or_ended_while_the_list_cannot_be_had(world):
    world.up(2)
    world.provider.called.clear()
    asked = []

    def look() -> Any:
        asked.append(1)
        if len(asked) < 10:
            raise ProviderError("503")
        return list(world.provider.rows.values()), True

    world.provider.do["look"] = look
    assert len(world.up(3)) == 3
    assert world.provider.times_called("create") == 1 and not world.provider.times_called("destroy") and "nothing is known" in world.screen.text


def test_a_list_that_cannot_be_had_for_good_ends_it_and_says_so_and_what_may_be_there_is_named(world, monkeypatch):
    monkeypatch.setattr(fleets, "PACE", fleets.PACE._replace(patience_s=0.3))

    def create(one: Machine) -> str:
        world.provider.do["look"] = lambda: _raise(ProviderError("503 for ever"))
        return world.provider.make(one)

    world.provider.do["create"] = create
    with pytest.raises(LeftOver) as caught:
        world.up(1)
    number = next(iter(world.provider.rows))
    last = str(caught.value).splitlines()[-1]
    assert all(text in last for text in (f"machine {number} could not be ended", "$0.500 an hour", f"press the button of {number}", "503 for ever"))
    assert len(world.store.left_over()) == 1 and number in world.store.left_over()[0]
    del world.provider.do["look"]
    assert world.fleet().down() == [] and world.ended() and world.store.left_over() == []


def test_stopped_while_machines_come_ends_those_and_not_what_stood(world):
    world.up(1)
    at = world.fleet()
    world.provider.do["prepare"] = lambda one: at.stopping.set()
    with pytest.raises(Stopped):
        at.up(3)
    assert world.there == [1] and len(world.store.all()) == 1


def test_a_limit_that_is_reached_before_all_is_up_ends_it(world):
    world.cluster = world.cluster._replace(limits=Limits(max_cost=0.00001))
    world.provider.do["create"] = lambda one: world.provider.make(one, COMING)
    with pytest.raises(GpurunError, match=r"max_cost \$0\.000\d is reached"):
        world.up(1)
    assert world.ended()


def test_another_gpurun_that_ends_it_meanwhile_has_its_way(world):
    world.provider.do["create"] = lambda one: world.provider.make(one, COMING)
    world.provider.times = {**Memory.times, "confirm_s": 1.5}          # so long the other one can see it
    found: list[BaseException] = []

    def up() -> None:
        try:
            world.up(1)
        except GpurunError as error:
            found.append(error)

    thread = threading.Thread(target=up)
    thread.start()
    eventually(lambda: any(one.sighted for one in world.store.all()))
    world.fleet().down()
    thread.join(60)
    assert world.ended() and world.provider.times_called("create") == 1 and "brought down by another gpurun" in str(found[0])


def test_two_at_once_make_no_more_than_one_would(world):
    threads = [threading.Thread(target=world.up, args=(3,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert world.there == [1, 2, 3] and world.provider.most == 3 and [one.index for one in world.store.all()] == [1, 2, 3]


# ---- down ----------------------------------------------------------------------------------------------------------------------------

def test_down_ends_all_and_may_be_repeated(world):
    world.up(3)
    assert world.fleet().down() == [] and world.ended()
    assert world.fleet().down() == [] and world.provider.times_called("destroy") == 3


def test_down_of_one_leaves_the_others(world):
    two = world.up(3)[1]
    assert world.fleet().down([two.label]) == [] and world.there == [1, 3]


def test_down_after_somebody_ended_it_by_hand(world):
    world.up(2)
    world.provider.rows.clear()
    assert world.fleet().down() == [] and world.ended() and "gone" in world.screen.text


def test_down_ends_what_has_no_record_and_never_what_is_anothers(world):
    world.fleet(OTHER).up(1)
    labels = (label_for(PREFIX, 1, "aaaaaa"), label_for(PREFIX, 1, "bbbbbb"), PREFIX + "²-a", "mine", "")
    for number, label in zip("12345", labels):
        world.provider.rows[number] = Seen(number, label)
    assert world.fleet().down() == []
    assert {row.label for row in world.provider.rows.values()} == {"mine", "", world.store.all(OTHER)[0].label} and not world.store.all(PREFIX)


def test_down_asks_again_until_it_is_taken_and_the_list_shows_it_no_more(world):
    world.up(1)
    tries = []

    def destroy(number: str) -> None:
        tries.append(number)
        if len(tries) < 4:
            raise ProviderError("500")
        if len(tries) > 5:                    # and two more are taken and forgotten
            world.provider.rows.pop(number)

    world.provider.do["destroy"] = destroy
    assert world.fleet().down() == [] and len(tries) == 6 and world.ended()


def test_down_of_what_comes_back_ends_it_once_more(world):
    one = world.up(1)[0]
    gone: list[Seen] = []
    looks = 0

    def look() -> Any:
        nonlocal looks
        looks += bool(gone)
        if looks == 2:                        # the first list was without it
            world.provider.rows[one.id] = gone[0]._replace(state=BROKEN)
        return list(world.provider.rows.values()), True

    world.provider.do.update(destroy=lambda number: gone.append(world.provider.rows.pop(number)), look=look)
    assert world.fleet().down() == []
    assert world.ended() and world.provider.called.count(f"destroy {one.id}") == 2


def test_a_list_that_comes_late_proves_nothing_of_what_was_after_it_was_asked_for(world):
    one = world.up(1)[0]
    gone: list[Seen] = []
    looks, late_s = 0, 0.0

    def look() -> Any:
        nonlocal looks, late_s
        found = list(world.provider.rows.values())
        looks += bool(gone)
        if looks > 1:                         # the second list without it takes a minute, in which the machine is there again
            late_s += 60.0
        if looks == 2:
            world.provider.rows[one.id] = gone[0]._replace(state=BROKEN)
        return found, True

    world.store.clock = lambda: time.time() + late_s
    world.provider.times = {**Memory.times, "confirm_s": 30.0}
    world.provider.do.update(destroy=lambda number: gone.append(world.provider.rows.pop(number)), look=look)
    assert world.fleet().down([one.label]) == []
    assert world.ended() and world.provider.called.count(f"destroy {one.id}") == 2


def test_what_cannot_be_ended_is_named_with_price_and_the_way_to_end_it_and_so_in_the_record(world, monkeypatch):
    one = world.up(2)[0]
    monkeypatch.setattr(fleets, "PACE", fleets.PACE._replace(patience_s=3.0))       # in which the other one must be known to be gone
    world.provider.do["destroy"] = lambda number: _raise(ProviderError("refused")) if number == one.id else world.provider.rows.pop(number)
    at = world.fleet()
    left = at.down()
    assert [machine.id for machine in left] == [one.id]
    assert at.words(left) == [f"machine {one.id} could not be ended and may go on costing $0.500 an hour: refused. Try `gpurun down` again, "
                              f"or end it by hand: press the button of {one.id}"]
    assert len(world.store.left_over()) == 1
    del world.provider.do["destroy"]
    assert world.fleet().down() == [] and world.ended()


def test_giving_up_leaves_at_once_what_is_not_ended(world):
    world.up(1)
    at = world.fleet()
    world.provider.do["destroy"] = lambda number: at.giving_up.set()
    began = time.monotonic()
    assert len(at.down()) == 1 and time.monotonic() - began < 20


def test_down_does_not_wait_for_what_is_being_prepared(world):
    go = threading.Event()
    at = world.fleet()

    def prepare(one: Machine) -> None:
        at.stopping.set()
        go.wait(60)

    world.provider.do["prepare"] = prepare
    with pytest.raises(Stopped):
        at.up(1)
    assert not go.is_set() and not world.provider.rows and not world.store.all()
    go.set()


def test_what_was_spent_counts_all_since_it_was_brought_up(world):
    world.up(1)
    world.store.change(world.store.all()[0].label, begun=time.time() - 3600)
    world.up(2)
    world.fleet().down([world.store.all()[0].label])
    assert world.fleet().spent() == pytest.approx(0.5, abs=0.05)
    world.fleet().down()
    world.up(1)
    assert world.fleet().spent() < 0.01


def _raise(error: Exception) -> Any:
    raise error


# ---- this machine --------------------------------------------------------------------------------------------------------------------

def alive(known: dict[str, Any]) -> bool:
    return supervise.start_time(known["pid"]) == known["start"]


def listed(here: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in here.gpurun("nodes", "--json").stdout.splitlines()]
    return [one for one in found if one["type"] == "node"]


def test_up_on_this_machine_is_an_agent_that_answers_and_down_its_end(here):
    assert here.gpurun("down").returncode == 0            # of what never was
    done = here.gpurun("up")
    assert done.returncode == 0 and done.stdout == b"local\n", done.stderr.decode()
    known = here.agent()
    assert alive(known) and [(one["node"], one["state"]) for one in listed(here)] == [("local", "ready")]
    assert here.gpurun("up").stdout == b"local\n" and here.agent() == known
    assert here.gpurun(here.job("echo ran")).stdout == b"ran\n" and here.agent() == known
    done = here.gpurun("down")
    assert done.returncode == 0 and b"no agent of ours runs there any more" in done.stderr and not alive(known)
    assert here.gpurun("down").returncode == 0 and listed(here) == []


def test_an_agent_that_a_run_started_is_used_by_up_and_ended_by_down(here):
    assert here.gpurun(here.job("true")).returncode == 0
    known = here.agent()
    assert here.gpurun("up").returncode == 0 and here.agent() == known
    assert here.gpurun("down").returncode == 0 and not alive(known)


def test_up_after_its_agent_was_killed_starts_another_one(here):
    assert here.gpurun("up").returncode == 0
    known = here.agent()
    supervise.send(known["pid"], 9)
    eventually(lambda: not alive(known))
    assert here.gpurun("up").returncode == 0
    assert here.agent()["pid"] != known["pid"] and alive(here.agent())
    assert here.gpurun("down").returncode == 0 and not alive(here.agent())


def test_down_leaves_a_job_that_runs_here_running_until_it_is_over(here):
    job = here.job("until [ -e go ]; do sleep 0.02; done; echo went")
    run = here.start(job, "--detach")
    run.communicate(timeout=60)
    done = here.gpurun("down", "--yes")
    assert done.returncode == 0, done.stderr.decode()
    workdir = eventually(lambda: next((here.node_dir / "runs").glob("*/work*"), None))
    (workdir / "go").touch()
    assert here.gpurun("wait", here.latest.name).returncode == 0 and (here.latest / "stdout.log").read_text() == "went\n"


# ---- hosts over SSH ------------------------------------------------------------------------------------------------------------------

needs_ssh = pytest.mark.skipif(not SSHD or not shutil.which("ssh") or not own_home_possible(), reason="needs OpenSSH's sshd and ssh, and root")


@pytest.fixture
def hosts(here, tmp_path):
    """Two hosts of one's own."""
    with Sshd(tmp_path / "one") as one, Sshd(tmp_path / "two") as two:
        one.config.write_text(one.config_for("one", StrictHostKeyChecking="yes") + two.config_for("two", StrictHostKeyChecking="yes"))
        here.env["GPURUN_SSH_CONFIG"] = str(one.config)
        (here.work / "cluster.toml").write_text('[provider]\nkind = "ssh"\n[[provider.hosts]]\nhost = "one"\n[[provider.hosts]]\nhost = "two"\n')
        yield one, two
        end_agents(tmp_path)


@needs_ssh
def test_up_nodes_ssh_down_on_hosts_of_ones_own(here, hosts):
    done = here.gpurun("up")
    assert done.returncode == 0 and done.stdout == b"one\ntwo\n", done.stderr.decode()
    agents = [here.agent(one.home / ".gpurun") for one in hosts]
    assert all(map(alive, agents))
    logins = [one.logins for one in hosts]
    assert here.gpurun("up").stdout == b"one\ntwo\n" and [one.logins for one in hosts] == logins       # answers: no SSH at all
    assert [(one["node"], one["state"], one["price_per_hour"]) for one in listed(here)] == [("one", "ready", 0.0), ("two", "ready", 0.0)]
    done = here.gpurun("ssh", "two", "echo", "$HOME")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr.decode()
    assert here.gpurun(here.job("echo ran"), "--node", "two").stdout == b"ran\n"

    assert here.gpurun("up", "--nodes", "1").stdout == b"one\n" and [alive(one) for one in agents] == [True, False]
    assert here.gpurun("down", "one").returncode == 0 and not alive(agents[0])
    assert here.gpurun("down").returncode == 0 and listed(here) == []


@needs_ssh
def test_a_host_that_cannot_be_reached_is_unknown_and_not_gone(here, hosts):
    assert here.gpurun("up").returncode == 0
    agents = [here.agent(one.home / ".gpurun") for one in hosts]
    supervise.send(agents[0]["pid"], 19)                  # it answers no packet
    hosts[0].close()                                      # and nobody can log in
    try:
        done = here.gpurun("nodes", "--json")
        objects = [json.loads(line) for line in done.stdout.splitlines()]
        assert {one["node"]: one["state"] for one in objects if one["type"] == "node"} == {"one": "ready, but silent", "two": "ready"}
        assert b"may not be all" in done.stderr + done.stdout
    finally:
        supervise.send(agents[0]["pid"], 18)
    hosts[0].__enter__()
    hosts[0].config.write_text(hosts[0].config_for("one", StrictHostKeyChecking="yes") + hosts[1].config_for("two", StrictHostKeyChecking="yes"))
    assert here.gpurun("down").returncode == 0 and not any(map(alive, agents))


@needs_ssh
def test_a_host_where_nobody_answers_ends_up_with_the_reason_and_the_others_agents_as_before(here, hosts):
    hosts[1].close()
    done = here.gpurun("up")
    assert done.returncode != 0 and b"two" in done.stderr and done.stdout == b""
    assert not list(hosts[1].home.glob(".gpurun/agent/endpoint.json"))
    assert here.gpurun("up", "--nodes", "1").stdout == b"one\n"
    assert alive(here.agent(hosts[0].home / ".gpurun"))


@needs_ssh
def test_an_alias_that_means_another_host_now_is_not_answered_for_by_the_old_one(here, hosts):
    one, two = hosts
    assert here.gpurun("up", "--nodes", "1").stdout == b"one\n"
    agent, logins, config = here.agent(one.home / ".gpurun"), one.logins, one.config.read_text()
    one.config.write_text(config + "# an edit that changes nothing\n")
    for more in (1, 1):                                   # looked at over SSH once
        assert [(host["node"], host["state"]) for host in listed(here)] == [("one", "ready")] and one.logins == logins + more
    one.config.write_text(two.config_for("one", StrictHostKeyChecking="yes") + two.config_for("two", StrictHostKeyChecking="yes"))
    assert [(host["node"], host["state"]) for host in listed(here)] == [("one", "gone")] and not (two.home / ".gpurun/agent").exists()
    assert here.gpurun("up", "--nodes", "1").stdout == b"one\n"
    other = here.agent(two.home / ".gpurun")
    one.config.write_text(config)
    assert [(host["node"], host["state"]) for host in listed(here)] == [("one", "ready, but silent")]   # an agent is there, and another one is known
    done = here.gpurun("down")
    assert done.returncode == 0 and not alive(agent) and alive(other), done.stderr.decode()
