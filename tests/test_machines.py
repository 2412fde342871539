"""The records of machines on disk, which several processes change at once and any of them may leave half-way; and what machines cost."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from trees import as_nobody, tiny_disk

from gpurun import files, machines
from gpurun.config import Limits
from gpurun.errors import RecordError
from gpurun.limits import End, cost, dollars, end_of, price, spent
from gpurun.machines import AVOID_S, Store, prefix_of, scope_of
from gpurun.reconcile import Machine, label_for

OPERATOR = prefix_of("someone")
CLUSTER, OTHER, RUN = prefix_of("someone", "cluster /a"), prefix_of("someone", "cluster /b"), prefix_of("someone", "run r1")
NOW = 1_800_000_000.0
FORK = multiprocessing.get_context("fork")


def label(index: int = 1, prefix: str = CLUSTER, nonce: str = "abcdef") -> str:
    return label_for(prefix, index, nonce)


def machine(index: int = 1, prefix: str = CLUSTER, nonce: str = "abcdef", **more: Any) -> Machine:
    return Machine(**{"label": label(index, prefix, nonce), "index": index, "begun": NOW, **more})


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "settings" / "machines"), Clock())


def together(*works: Any) -> list[Any]:
    """Runs these in processes of their own that begin at the same moment; what each gave."""
    line, answers = FORK.Barrier(len(works)), FORK.SimpleQueue()

    def body(number: int, work: Any) -> None:
        line.wait(60)
        answers.put((number, work()))

    processes = [FORK.Process(target=body, args=pair) for pair in enumerate(works)]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [found[number] for number in range(len(works))]


# ---- labels --------------------------------------------------------------------------------------------------------------------------

def test_a_label_tells_operator_and_cluster_apart_and_names_neither():
    assert len({OPERATOR, prefix_of("other"), CLUSTER, OTHER, RUN, prefix_of("other", "cluster /a")}) == 6
    assert CLUSTER.startswith(OPERATOR) and OTHER.startswith(OPERATOR) and not CLUSTER.startswith(OTHER)
    assert scope_of(label()) == CLUSTER and "someone" not in label() and "/a" not in label()
    assert len(label(64)) < 64 and prefix_of("someone", "cluster /\udcff") != CLUSTER


# ---- one record ----------------------------------------------------------------------------------------------------------------------

def test_a_record_is_there_whole_for_the_next_process_and_readable_by_its_owner_alone(store):
    one = machine(id="7", ready=True, facts={"price_per_hour": 0.5, "cluster": "/ä"})
    assert store.add(one)
    path = Path(store.folder, one.label + ".json")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert Store(store.folder).get(one.label) == one and Store(store.folder).all() == [one]
    assert store.get(label(9)) is None and store.change(label(9), ready=True) is None
    changed = store.change(one.label, ready=False, facts={"price_per_hour": 0.6})
    assert changed == store.get(one.label) == one._replace(ready=False, facts={"price_per_hour": 0.6, "cluster": "/ä"})
    assert json.loads(path.read_text())["version"] == machines.VERSION
    store.drop(one.label)
    store.drop(one.label)
    assert store.all() == [] and store.get(one.label) is None


def test_a_change_that_changes_nothing_writes_nothing(store):
    store.add(machine(id="7"))
    before = os.stat(os.path.join(store.folder, label() + ".json"))
    assert store.change(label(), id="7", facts={}) == machine(id="7")
    assert os.stat(os.path.join(store.folder, label() + ".json")).st_ino == before.st_ino


def test_records_are_found_by_how_their_labels_begin(store):
    for one in (machine(2), machine(1), machine(1, OTHER), machine(1, prefix_of("other", "cluster /a"))):
        assert store.add(one)
    assert [one.index for one in store.all(CLUSTER)] == [1, 2] and len(store.all(OPERATOR)) == 3 and len(store.all()) == 4
    store.avoid("host", "why")
    Path(store.folder, label(5) + ".known_hosts").write_text("")
    assert len(store.all()) == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"version": 1}', b'{"index": "two", "facts": [], "begun": "now", "wanted": 1}'])
def test_a_damaged_record_still_says_that_there_may_be_a_machine(store, damage):
    store.add(machine(3, id="7", facts={"price_per_hour": 0.5}))
    path = Path(store.folder, label(3) + ".json")
    path.write_bytes(damage)
    os.utime(path, (NOW - 60, NOW - 60))
    found = store.get(label(3))
    assert found.label == label(3) and found.index == 3 and found.wanted and not found.id
    assert store.all(CLUSTER) == [found] and not store.add(machine(3, nonce="bbbbbb"))
    assert store.change(label(3), id="8", wanted=False).id == "8" and store.get(label(3)).id == "8"
    store.drop(label(3))
    assert store.all() == []


def test_a_damaged_record_makes_no_fortune_of_what_its_machine_has_cost(store):
    store.add(machine(3, id="7"))
    path = Path(store.folder, label(3) + ".json")
    path.write_bytes(b"{")
    os.utime(path, (NOW - 3600, NOW - 3600))
    store.change(label(3), id="7", facts={"price_per_hour": 0.5})
    assert cost(store.get(label(3)), NOW) == pytest.approx(0.5)


def test_a_record_that_may_not_be_read_still_says_so(tmp_path):
    tmp_path.chmod(0o777)

    def work() -> None:
        store = Store(str(tmp_path / "of nobody"))
        store.add(machine(3, id="7"))
        os.chmod(os.path.join(store.folder, label(3) + ".json"), 0)
        assert store.all()[0].label == label(3) and store.all()[0].wanted

    for folder in list(tmp_path.parents)[:3]:             # pytest's are for this user alone
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o011)
    as_nobody(work)


# ---- several processes ---------------------------------------------------------------------------------------------------------------

def test_processes_that_change_different_fields_lose_none(store):
    store.add(machine(id="7"))

    def count(name: str) -> None:
        for number in range(1, 51):
            assert Store(store.folder).change(label(), **({name: number} if name != "facts" else {"facts": {"number": number}}))

    together(lambda: count("tries"), lambda: count("not_before"), lambda: count("facts"), lambda: count("ended"))
    assert store.get(label()) == machine(id="7", tries=50, not_before=50, ended=50, facts={"number": 50})


def test_of_two_processes_that_want_the_same_index_one_gets_it_each_time(store):
    for index in range(1, 21):
        won = together(*(lambda nonce=nonce: Store(store.folder).add(machine(index, nonce=nonce)) for nonce in ("aaaaaa", "bbbbbb")))
        assert sorted(won) == [False, True]
    assert [one.index for one in store.all(CLUSTER)] == sorted(range(1, 21), key=lambda index: label(index))
    assert store.add(machine(1, OTHER))                  # another cluster's first


def test_a_record_that_others_read_while_it_is_written_is_never_half(store):
    store.add(machine(id="7", facts={"message": ""}))

    def write() -> None:
        for number in range(100):
            Store(store.folder).change(label(), facts={"message": "x" * (number * 97 % 5000)})

    def read() -> bool:
        return all(Store(store.folder).get(label()).id == "7" for _ in range(400))

    assert together(write, read, read)[1:] == [True, True]


@pytest.mark.parametrize("at", ["open", "write", "fsync", "replace"])
def test_a_process_killed_while_it_writes_leaves_the_old_record_or_the_new_one_and_no_lock(store, at):
    store.add(machine(id="7"))

    def die() -> None:
        real = getattr(os, at)

        def dies(*args: Any, **options: Any) -> Any:
            if at != "open" or files.TEMP_PREFIX in str(args[0]):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, at, dies)
        Store(store.folder).change(label(), id="8")

    process = FORK.Process(target=die)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert store.all() == [machine(id="7")]
    assert store.change(label(), id="9").id == "9"       # nobody waits for the dead


# ---- disks that take nothing ---------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_on_a_full_disk_nothing_is_asked_for_and_the_error_names_file_and_room(tmp_path):
    with tiny_disk(tmp_path / "disk", "64k") as disk:
        store = Store(str(disk / "machines"))
        assert store.add(machine(1, id="7"))
        fill = os.open(disk / "fill", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError):
            while True:
                os.write(fill, bytes(512))
        os.close(fill)
        with pytest.raises(RecordError) as caught:
            store.add(machine(2))
        said = str(caught.value)
        assert f"{label(2)}.json can't be written: No space left on device" in said and "free" in said
        assert "nothing is rented" in said and "GPURUN_CONFIG" in said
        assert store.all() == [machine(1, id="7")] and not list(Path(store.folder).glob(files.TEMP_PREFIX + "*"))
        os.unlink(disk / "fill")
        assert store.add(machine(2))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_folder_that_takes_no_file_is_named_before_anything_is_asked_for_and_keeps_nothing_alive(store, monkeypatch, code):
    store.add(machine(1, id="7"))

    def refuse(path: str, data: bytes, mode: int = 0o600) -> None:
        raise OSError(code, os.strerror(code), path)

    write = machines.atomic_write
    monkeypatch.setattr(machines, "atomic_write", refuse)
    with pytest.raises(RecordError) as caught:
        store.add(machine(2))
    assert store.folder in str(caught.value) and os.strerror(code) in str(caught.value)
    # What stands must end all the same: this process knows what it did, and keeps it once it can.
    assert store.change(label(), wanted=False) == store.get(label()) == machine(1, id="7", wanted=False) and store.all() == [store.get(label())]
    store.avoid("41", "no sshd")
    assert Store(store.folder).get(label()).wanted
    monkeypatch.setattr(machines, "atomic_write", write)
    store.change(label(), why="by gpurun down")
    assert Store(store.folder).get(label()) == machine(1, id="7", wanted=False, why="by gpurun down")
    store.drop(label())
    assert store.all() == [] and store.get(label()) is None


def test_a_file_where_the_folder_belongs_is_named(tmp_path):
    (tmp_path / "machines").write_text("")
    store = Store(str(tmp_path / "machines" / "deeper"))
    with pytest.raises(RecordError, match="machines.*can't be written.*GPURUN_CONFIG"):
        store.add(machine())
    with store.at_work(CLUSTER):              # what is there must still be ended
        assert store.all() == [] and store.change(label(), wanted=False) is None


def test_a_sum_that_is_no_number_keeps_no_record(store):
    store.add(machine(id="7", facts={"price_per_hour": 0.5}))
    (Path(store.folder) / "spent.json").write_text(json.dumps({CLUSTER: "nonsense"}))
    store.clock.now += 3600
    store.drop(label())
    assert store.all() == [] and store.spent(CLUSTER) == 0.5


# ---- hosts to avoid, and sums --------------------------------------------------------------------------------------------------------

def test_a_host_that_failed_is_avoided_for_half_a_day_and_then_tried_again(store):
    store.avoid("41", "no sshd")
    store.clock.now += 3600
    store.avoid("42", "x" * 1000)
    assert store.avoided() == {"41": "no sshd", "42": "x" * 300}
    store.clock.now = NOW + AVOID_S - 1
    assert set(store.avoided()) == {"41", "42"}
    store.clock.now = NOW + AVOID_S
    assert set(store.avoided()) == {"42"}
    store.avoid("43", "")
    assert set(json.loads(Path(store.folder, "avoid.json").read_text())) == {"42", "43"}     # the file doesn't grow for ever


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"41": 5, "42": {"until": "x"}, "43": {}}'])
def test_a_damaged_list_of_hosts_or_sums_is_as_good_as_none(store, damage):
    store.add(machine(id="7", facts={"price_per_hour": 1.0}))
    Path(store.folder, "avoid.json").write_text(damage)
    Path(store.folder, "spent.json").write_text(damage)
    assert store.avoided() == {} and store.spent(CLUSTER) == 0.0
    store.clock.now += 3600
    store.avoid("44", "no sshd")
    store.drop(label())
    assert set(store.avoided()) == {"44"} and store.spent(CLUSTER) == pytest.approx(1.0)


def test_what_machines_that_are_gone_have_cost_is_kept_by_cluster_until_it_is_brought_up_anew(store):
    for one in (machine(1, id="1", facts={"price_per_hour": 0.5}), machine(2, id="2", facts={"price_per_hour": 1.0}), machine(1, OTHER, id="3",
                facts={"price_per_hour": 2.0}), machine(3, facts={"price_per_hour": 9.0})):
        store.add(one)
    Path(store.known_hosts(label(1))).write_text("key")
    store.clock.now += 1800
    store.change(label(1), ended=NOW + 900)
    for one in store.all():
        store.drop(one.label)
    assert store.spent(CLUSTER) == pytest.approx(0.5 / 4 + 1.0 / 2) and store.spent(OTHER) == pytest.approx(1.0) and store.spent(RUN) == 0.0
    assert not os.path.exists(store.known_hosts(label(1)))
    store.begin_spending(CLUSTER)
    store.begin_spending(RUN)
    assert store.spent(CLUSTER) == 0.0 and store.spent(OTHER) == pytest.approx(1.0)


# ---- who is at it --------------------------------------------------------------------------------------------------------------------

def test_somebody_is_at_work_while_one_is_and_not_after_the_last(store):
    assert not store.somebody_at_work(CLUSTER)
    with store.at_work(CLUSTER):
        assert Store(store.folder).somebody_at_work(CLUSTER) and not store.somebody_at_work(OTHER)
        with Store(store.folder).at_work(CLUSTER):
            pass
        assert store.somebody_at_work(CLUSTER)            # the other one left nothing behind, and took nothing with it
    assert not store.somebody_at_work(CLUSTER)
    assert not list(Path(store.folder).glob("gpurun-*"))  # nor a file for each run that ever was


def test_who_comes_just_as_the_last_one_leaves_is_at_work_all_the_same(store, monkeypatch):
    path, flock, gone = os.path.join(store.folder, f"{CLUSTER}lock"), machines.fcntl.flock, []

    def last_one_leaves(fd: int, how: int) -> None:
        if how == machines.fcntl.LOCK_SH and not gone:
            gone.append(os.unlink(path))
        flock(fd, how)

    monkeypatch.setattr(machines.fcntl, "flock", last_one_leaves)
    with store.at_work(CLUSTER):
        assert gone and Store(store.folder).somebody_at_work(CLUSTER)
    assert not os.path.exists(path)


def test_a_process_that_was_killed_is_at_work_no_more(store):
    inside = FORK.Event()

    def work() -> None:
        with Store(store.folder).at_work(CLUSTER):
            store.add(machine(id="7"))
            inside.set()
            signal.pause()

    process = FORK.Process(target=work)
    process.start()
    assert inside.wait(60) and store.somebody_at_work(CLUSTER)
    process.kill()
    process.join(60)
    assert not store.somebody_at_work(CLUSTER)


PAID = {"kind": "vastai", "cluster": "/c.toml", "price_per_hour": 0.5}


@pytest.mark.parametrize("one, said", [
    (machine(id="7", ready=True, facts=PAID), None),                                                          # it stands, as was wanted
    (machine(id="7", ready=True, facts={**PAID, "run": "r1", "detached": True}), None),
    (machine(id="7", ready=True, wanted=False, facts=PAID),
     "machine 7 was to be ended and isn't known to be gone: it costs $0.500 an hour ($0.2500 so far). End it with: gpurun down 7 --cluster /c.toml"),
    (machine(id="7", facts=PAID),
     "machine 7 is left from a gpurun that was killed: it costs $0.500 an hour ($0.2500 so far). End it with: gpurun down 7 --cluster /c.toml"),
    (machine(id="7", ready=True, facts={**PAID, "run": "r1"}),
     "machine 7 of the run r1 is left from a gpurun that was killed: it costs $0.500 an hour ($0.2500 so far). `gpurun attach r1` goes on with its job, "
     "if it has one, and then ends it. End it with: gpurun down 7 --cluster /c.toml"),
    (machine(facts=PAID), f"a machine labelled {label()}, if there is one, is left from a gpurun that was killed: it may cost money. "
                          f"End it with: gpurun down {label()} --cluster /c.toml"),
    (machine(id="7", facts={"kind": "ssh"}), None),                                                           # a host of one's own
])
def test_a_machine_that_nobody_is_busy_with_is_named_with_its_price_and_the_command(store, one, said):
    store.add(one)
    store.clock.now += 1800
    assert [line.replace("($0.250 so far)", "($0.2500 so far)") for line in store.left_over()] == ([said] if said else [])
    with store.at_work(CLUSTER):
        assert store.left_over() == []


def test_a_damaged_record_of_a_machine_is_named_as_left_over(store):
    """Nobody knows what it was; it may cost money."""
    store.add(machine(id="7", facts=PAID))
    Path(store.folder, label() + ".json").write_bytes(b"{")
    assert len(store.left_over()) == 1 and label() in store.left_over()[0] and "may cost money" in store.left_over()[0]


# ---- sums ----------------------------------------------------------------------------------------------------------------------------

def paid(hourly: Any = 0.5, begun: float = NOW - 3600, index: int = 1, **more: Any) -> Machine:
    return machine(index, id=more.pop("id", "7"), begun=begun, facts={} if hourly is None else {"price_per_hour": hourly}, **more)


@pytest.mark.parametrize("one, hourly, so_far", [
    (paid(), 0.5, 0.5), (paid(id=""), 0.0, 0.0), (paid(None), 0.0, 0.0), (paid("0.5"), 0.0, 0.0), (paid(1), 1.0, 1.0),
    (paid(ended=NOW - 1800), 0.5, 0.25), (paid(begun=NOW + 60), 0.5, 0.0), (paid(begun=NOW), 0.5, 0.0),
])
def test_a_machine_costs_its_price_from_its_request_to_its_end(one, hourly, so_far):
    assert price(one) == hourly and cost(one, NOW) == pytest.approx(so_far)


def test_a_cluster_has_cost_what_all_its_machines_have():
    assert spent([], 0.0, NOW) == 0.0
    assert spent([paid(), paid(2.0, NOW - 1800), paid(ended=NOW - 3600)], 0.25, NOW) == pytest.approx(0.25 + 0.5 + 1.0)


@pytest.mark.parametrize("limits_, ones, before, in_s, why", [
    (Limits(), [paid()], 0.0, float("inf"), ""),
    (Limits(max_hours=2), [paid()], 0.0, 3600, "max_hours 2"),
    (Limits(max_hours=0.5), [paid()], 0.0, 0, "max_hours 0.5"),                                   # reached, and not a time in the past
    (Limits(max_hours=2), [paid(None)], 0.0, 3600, "max_hours 2"),
    (Limits(max_cost=1.0), [paid()], 0.0, 3600, "max_cost $1.00"),
    (Limits(max_cost=1.0), [paid()], 0.25, 1800, "max_cost $1.00"),                               # what is gone counts
    (Limits(max_cost=1.0), [paid()], 2.0, 0, "max_cost $1.00"),
    (Limits(max_cost=2.0), [paid(), paid(1.5, NOW)], 0.0, 2700, "max_cost $2.00"),                # all together: 1.5 left at 2.0 an hour
    (Limits(max_cost=2.0), [paid(), paid(1.5, ended=NOW - 2400)], 0.0, 7200, "max_cost $2.00"),   # one that has ended costs no more
    (Limits(max_cost=1.0), [paid(None)], 0.0, float("inf"), ""),                                  # no price, no moment
    (Limits(max_cost=1.0), [paid(id="")], 0.0, float("inf"), ""),
    (Limits(max_hours=3, max_cost=1.0), [paid()], 0.0, 3600, "max_cost $1.00"),
    (Limits(max_hours=1.5, max_cost=1.0), [paid()], 0.0, 1800, "max_hours 1.5"),
    (Limits(max_hours=1, max_cost=0.1), [paid()], 0.0, 0, "max_cost $0.100"),                     # both: one of them is named
])
def test_a_machine_must_end_at_the_first_of_its_limits(limits_, ones, before, in_s, why):
    found = end_of(ones[0], ones, limits_, before, NOW)
    assert isinstance(found, End) and found.in_s == pytest.approx(in_s) and found.why == why


@pytest.mark.parametrize("amount, said", [(0, "$0.00"), (1.25, "$1.25"), (0.5, "$0.500"), (0.99, "$0.990"), (0.999, "$1.00"), (0.3633, "$0.363"),
                                          (0.0421, "$0.0421"), (0.00004, "$0.0001"), (1234.5, "$1234.50")])
def test_dollars(amount, said):
    assert dollars(amount) == said
