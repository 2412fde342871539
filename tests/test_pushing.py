"""Few round trips for a push: what goes unasked, what an operator remembers of an agent, and wrong guesses of every kind."""

import os
import random

import pytest

from hypothesis import given, settings, strategies as st

from gpurun import listings, manifest, pushing, transfer
from gpurun.errors import LinkError, TransferError, WireError
from gpurun.store import Store
from streams import CHANGES, cache_is_sound, listed, node, push, remembered, store, tree, write_files
from trees import looks

pytestmark = pytest.mark.usefixtures("remembered")
AGENT = "a1" * 32


class Trips:
    """Pushes to one agent, and how often the operator waited for an answer of the node each time. An early one comes while it still sends."""

    def __init__(self, monkeypatch):
        self.answers = 0
        really = transfer.Channel.answer

        def answer(channel):
            said = really(channel)
            self.answers += channel.stream.connection.peer_id == AGENT and said.get("early") is not True
            return said

        monkeypatch.setattr(transfer.Channel, "answer", answer)

    def push(self, store, tree, **options):
        self.answers = 0
        return push(store, tree, peer_id=AGENT, **options)


@pytest.fixture
def trips(monkeypatch):
    return Trips(monkeypatch)


def test_a_changed_tree_is_stored_after_one_round_trip_and_so_is_an_unchanged_one_without_a_listing(trips, store, tree):
    write_files(tree, {f"f{number}": b"%d" % number * 1000 for number in range(100)})
    assert trips.push(store, tree) == (100, 190_000) and trips.answers == 1       # of an agent that isn't known it is guessed that it has nothing
    assert trips.push(store, tree) == (0, 0) and trips.answers == 1 and push.stream.written < 250
    write_files(tree, {"f7": b"changed", "new": b"new" * 1000})
    arrived, seen = [], []
    assert trips.push(store, tree, arrived=arrived, progress=lambda *args: seen.append(args)) == (2, 3007)
    assert trips.answers == 1 and arrived == [manifest.tree_id(listed(tree)[1])] and seen[-1][:2] == (3007, 3007)
    cache_is_sound(store)
    os.rename(tree / "new", tree / "renamed")
    assert trips.push(store, tree) == (0, 0) and trips.answers == 1


def test_a_long_listing_goes_unasked_to_an_agent_whose_last_tree_was_another_one(trips, store, tree, monkeypatch):
    monkeypatch.setattr(pushing, "INLINE_LISTING", 128 << 10)
    write_files(tree, {f"{number:05}-{'long' * 20}": b"" for number in range(2000)})
    assert len(listed(tree)[1]) > pushing.INLINE_LISTING
    trips.push(store, tree)
    assert trips.answers == 2                                         # nothing is known of that agent: it is asked whether it has the tree
    write_files(tree, {"more": b"m"})
    assert trips.push(store, tree) == (1, 1) and trips.answers == 1


def test_of_a_long_listing_only_the_changed_lines_go(trips, store, tree):
    write_files(tree, {f"d{number % 7}/{number:05}": b"%d" % number for number in range(2000)})
    trips.push(store, tree)
    write_files(tree, {"d0/00000": b"changed", "d3/new": b"new", "zz/last": b"last", "a": b"first"})
    os.unlink(tree / "d5" / "00005")
    os.rename(tree / "d4" / "00004", tree / "d4" / "renamed")
    arrived = []
    assert trips.push(store, tree, arrived=arrived) == (4, 19) and trips.answers == 1 and push.stream.written < 2000
    assert arrived == [manifest.tree_id(listed(tree)[1])]


def test_a_node_that_lost_the_last_listing_or_whose_copy_is_damaged_gets_the_whole_one(trips, tmp_path, store, tree):
    def last_listing():
        return os.path.join(store.root, "cache", "trees", manifest.tree_id(listed(tree)[1]))

    write_files(tree, {f"f{number}": b"%d" % number * 1000 for number in range(50)})
    trips.push(store, tree)
    os.unlink(last_listing())
    write_files(tree, {"new": b"n"})
    assert trips.push(store, tree) == (1, 1) and trips.answers == 3    # "nothing", then what is lacking, then that it is stored
    for damage in (b"", b'["d",493,1,0,"","x"]\n' * 100, b"no listing"):
        os.chmod(last_listing(), 0o600)
        with open(last_listing(), "wb") as stream:
            stream.write(damage)
        write_files(tree, {"new": b"for " + damage})
        arrived = []
        assert trips.push(store, tree, arrived=arrived).files == 1 and len(arrived) == 1
        cache_is_sound(store)


def lines_at_hash(data):
    return {hash(line): number for number, line in enumerate(listings.lines(data))}


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True), st.integers(1, 50))
def test_the_difference_of_two_listings_makes_the_new_one_of_the_old_one(old, new, cut):
    old, new = (b"".join(b'["f",%d]\n' % number for number in sorted(numbers)) for numbers in (old, new))
    sent = b"".join(listings.difference(lines_at_hash(old), new))
    parts = [sent[at:at + cut] for at in range(0, len(sent), cut)]
    assert b"".join(listings.whole(parts, listings.lines(old))) == new
    if old == new and old:
        assert sent == b"=0 %d\n" % old.count(b"\n")


@pytest.mark.parametrize("sent, says", [
    (b"=0 3\n", "more of the old one"), (b"=2 1\n", "more of the old one"), (b"=1 1\n=0 1\n", "more of the old one"), (b"=-1 1\n", "neither"),
    (b"=0\n", "neither"), (b"=1 1", "in the middle"), (b"=9999999999 1\n", "neither"), (b"[" * (manifest.MAX_LINE + 1), "longer than"),
])
def test_a_difference_that_does_not_fit_is_refused(sent, says):
    with pytest.raises(WireError, match=says):
        list(listings.whole([sent], listings.lines(b"[1]\n[2]\n")))


def test_a_base_that_is_no_tree_is_none(store, tree):
    for base in ("../../boot", "/etc/passwd", "0" * 64):
        with node(lambda channel, header: transfer.serve_push(channel, header, store, lambda tree: None)) as stream:
            channel = transfer.Channel(stream)
            channel.put({"type": "Push", "tree": "1" * 64, "listing": True, "base": base})
            channel.send_packed(b"L", [b"=0 1\n"])
            channel.writer.flush()
            assert channel.answer() == {"have": "nothing"}
            stream.abort()


def test_a_tree_of_before_the_last_one_is_still_known_to_be_there(trips, tmp_path, store, tree):
    write_files(tree, {"a": b"a"})
    other = write_files(tmp_path / "other", {"b": b"b"})
    for folder in (tree, other, tree, other):
        trips.push(store, folder)
    assert trips.answers == 1 and push.stream.written < 250


def test_what_goes_unasked_costs_no_more_than_the_round_trip_and_the_rest_is_asked_for(trips, store, tree):
    write_files(tree, {"first": b"1"})
    trips.push(store, tree)
    write_files(tree, {f"f{number:02}": random.Random(number).randbytes(100_000) for number in range(30)})
    seen = []
    assert trips.push(store, tree, rtt_s=0.04, progress=lambda *args: seen.append(args[:2])) == (30, 3_000_000)    # 0.5 MB of it went along
    assert push.stream.written < 3_010_000 and seen == sorted(seen) and seen[0] == (0, 3_000_000) and seen[-1] == (3_000_000, 3_000_000)
    cache_is_sound(store)


def test_the_node_says_what_it_lacks_before_it_has_what_comes_along(store, tree):
    write_files(tree, {f"f{number}": b"%d" % number * 1000 for number in range(9)})
    entries, encoded = listed(tree)
    arrived = []
    with node(lambda channel, header: transfer.serve_push(channel, header, store, arrived.append)) as stream:
        channel = transfer.Channel(stream)
        channel.put({"type": "Push", "tree": manifest.tree_id(encoded), "listing": True, "along": True, "early": True})
        channel.send_packed(b"L", [encoded])
        channel.send_packed(b"A", [b"\xff\x00"])
        channel.writer.flush()
        answer = channel.answer()                                     # and nothing else has gone there yet
        assert (answer["contents"], answer["bytes"], answer["early"]) == (9, 9000, True)
        assert b"".join(channel.read_packed(b"W", 100)) == b"\xff\x01"
        for entry in entries:
            transfer.send_file(channel, str(tree / entry.path), entry.size, entry.sha256, lambda moved: None)
        assert arrived == []
        channel.writer.frame(b"Z")
        channel.writer.flush()
        assert channel.answer() == {"stored": 9, "bytes": 9000}
        channel.finish()
    assert arrived == [manifest.tree_id(encoded)]
    cache_is_sound(store)


def test_an_agent_that_does_not_answer_early_is_sent_what_it_asks_for_when_it_has_what_came_along(trips, store, tree, monkeypatch):
    really = transfer.Channel.put
    monkeypatch.setattr(transfer.Channel, "put", lambda self, fields: really(self, {name: fields[name] for name in fields if name != "early"}))
    write_files(tree, {f"f{number}": random.Random(number).randbytes(20_000) for number in range(5)})
    assert trips.push(store, tree) == (5, 100_000) and trips.answers == 2         # 32 KiB of it went along
    assert push.stream.written < 102_000
    write_files(tree, {"f0": b"changed"})
    assert trips.push(store, tree) == (1, 7) and trips.answers == 1
    cache_is_sound(store)


def test_contents_that_the_node_has_all_the_same_are_thrown_away_there(trips, store, tree):
    write_files(tree, {"a": b"a" * 1000})
    trips.push(store, tree)
    write_files(tree, {"b": b"b" * 1000})
    assert push(store, tree) == (1, 1000)                              # by another operator, say
    write_files(tree, {"c": b"c" * 1000})
    assert trips.push(store, tree) == (1, 1000) and trips.answers == 1 and push.stream.written > 2000
    write_files(tree, {"d": b"d" * 1000})
    assert push(store, tree) == (1, 1000)
    assert trips.push(store, tree) == (0, 0) and trips.answers == 1    # the whole tree was there
    cache_is_sound(store)


def test_a_node_that_has_lost_its_cache_asks_for_all_of_it(trips, tmp_path, tree):
    write_files(tree, {"a": b"a" * 1000})
    trips.push(Store(str(tmp_path / "one")), tree)
    assert trips.push(Store(str(tmp_path / "two")), tree) == (1, 1000)
    write_files(tree, {"b": b"b" * 1000})
    store = Store(str(tmp_path / "three"))
    assert trips.push(store, tree) == (2, 2000) and trips.answers == 3        # it has no listing either for the difference to go with
    cache_is_sound(store)


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changed_after_it_was_listed_and_went_along_is_named(trips, store, tree, how):
    write_files(tree, {"before": b"b"})
    trips.push(store, tree)
    write_files(tree, {"it": b"i" * 20_000, "zlast": b"z" * 100})
    entries, encoded = listed(tree)
    CHANGES[how](tree / "it")
    arrived = []
    with pytest.raises(transfer.ChangedError, match="tree/it'"):
        trips.push(store, tree, entries=entries, encoded=encoded, arrived=arrived)
    assert arrived == []
    trips.push(store, tree, arrived=arrived)
    assert len(arrived) == 1
    cache_is_sound(store)


def test_a_push_with_contents_along_that_is_cut_anywhere_leaves_only_whole_contents(tmp_path, tree):
    before = write_files(tmp_path / "before", {"a": b"a" * 50})
    write_files(tree, {"a": b"a" * 50, "b/c": b"c" * 700, "d": b"d" * 200})
    push(Store(str(tmp_path / "all")), before, peer_id=AGENT)
    push(Store(str(tmp_path / "all")), tree, peer_id=AGENT)
    for cut in range(0, push.stream.written, 31):
        store, agent = Store(str(tmp_path / f"node-{cut}")), f"{cut:064x}"
        push(store, before, peer_id=agent)
        with pytest.raises(LinkError):
            push(store, tree, peer_id=agent, cut=cut)
        cache_is_sound(store)
        arrived = []
        push(store, tree, peer_id=agent, arrived=arrived)
        store.materialize(store.tree(arrived[0]), str(tmp_path / "work"))
        assert looks(tmp_path / "work") == looks(tree), cut


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]\n", b"\xff\xfe", b'{"version":1,"trees":7}\n', b'{"version":2,"trees":["x"],"listing":true}\n', b"[" * 60000, None])
def test_a_memory_that_is_damaged_or_gone_is_none(trips, store, tree, remembered, damage):
    write_files(tree, {"a": b"a"})
    trips.push(store, tree)
    if damage is None:
        os.unlink(remembered / AGENT)
        remembered.rmdir()
        remembered.write_bytes(b"no folder")
    else:
        (remembered / AGENT).write_bytes(damage)
    write_files(tree, {"b": b"b"})
    assert trips.push(store, tree) == (1, 1) and trips.answers == 1 and push.stream.written > 250         # the listing went


def test_what_is_remembered_stays_small(trips, store, tree, remembered, monkeypatch):
    monkeypatch.setattr(pushing, "LONGEST_LISTING", 500)
    remembered.mkdir(parents=True)
    for number in range(60):
        (remembered / f"{number:064}").write_bytes(b"old")
        os.utime(remembered / f"{number:064}", (number, number))
    write_files(tree, {f"f{number}": b"%d" % number for number in range(6)})
    for number in range(pushing.TREES + 3):
        write_files(tree, {"f0": b"changed %d" % number})
        trips.push(store, tree)
    assert trips.answers == 2                                         # of so long a listing nothing is remembered: nothing goes along
    assert (remembered / AGENT).stat().st_size < 2000 and len(os.listdir(remembered)) == pushing.AGENTS
    assert f"{0:064}" not in os.listdir(remembered) and (remembered / AGENT).stat().st_mode & 0o077 == 0


def test_an_agent_of_an_older_version_in_the_place_of_the_one_that_was_known_gets_the_push_without_anything_along(trips, store, tree, remembered, monkeypatch):
    write_files(tree, {"a": b"a"})
    trips.push(store, tree)
    write_files(tree, {"b": b"b"})
    really = transfer.Channel.put
    monkeypatch.setattr(transfer.Channel, "put", lambda self, fields: really(self, {name: fields[name] for name in fields if name != "along"}))
    assert trips.push(store, tree) == (1, 1)                          # once more, over another stream
    cache_is_sound(store)


def test_a_first_push_to_an_agent_of_an_older_version_is_done_again_without_anything_along(trips, store, tree, remembered, monkeypatch):
    write_files(tree, {"a": b"a"})
    really = transfer.Channel.put
    monkeypatch.setattr(transfer.Channel, "put", lambda self, fields: really(self, {name: fields[name] for name in fields if name not in ("along", "early")}))
    remembered.parent.mkdir(parents=True)
    remembered.write_bytes(b"no folder, so nothing can be written down")
    assert trips.push(store, tree) == (1, 1) and trips.answers == 3
    write_files(tree, {"b": b"b"})
    assert trips.push(store, tree) == (1, 1) and trips.answers == 2   # without a guess
    cache_is_sound(store)


def test_what_a_node_refuses_is_said_as_it_is_also_where_something_went_along(trips, store, tree, monkeypatch):
    write_files(tree, {"a": b"a" * 1000})
    monkeypatch.setattr("gpurun.store.free_bytes", lambda path: 0)
    for _ in range(2):
        with pytest.raises(TransferError, match="no room for the workspace"):
            trips.push(store, tree)
    monkeypatch.undo()
    assert push(store, tree, peer_id=AGENT) == (1, 1000)
