"""The node's cache: contents by hash, trees, workdirs as rsync would make them, room."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from gpurun import manifest, store as store_module
from gpurun.errors import TransferError, WireError
from gpurun.files import remove_tree
from gpurun.store import Store
from trees import as_nobody, looks, make_odd_tree, rsync_differences, tiny_disk


def sha(data):
    return hashlib.sha256(data).hexdigest()


def put(store, data):
    incoming = store.incoming()
    incoming.write(data)
    assert incoming.keep(sha(data), len(data))
    return Path(store._path(sha(data)))


def hashed(root):
    return [entry._replace(sha256=manifest.hash_file(manifest.local_path(root, entry.path))[0]) if entry.kind == "file" else entry
            for entry in manifest.walk(root)]


def fill(store, root):
    """Brings all contents and the listing of `root`; its entries and id."""
    entries = hashed(root)
    for entry in entries:
        if entry.kind == "file" and entry.size:
            put(store, Path(manifest.local_path(root, entry.path)).read_bytes())
    listing = store.incoming()
    listing.write(manifest.encode(entries))
    listing.keep_tree()
    return entries, manifest.tree_id(manifest.encode(entries))


def stamp(path, seconds_ago):
    """As if it had been verified then."""
    os.utime(path, ns=(1, (int(time.time()) - seconds_ago) * 10 ** 9 + store_module.MARK_NS))


@pytest.fixture
def hashed_paths(monkeypatch):
    """What is hashed from here on."""
    paths, hash_file = [], manifest.hash_file
    monkeypatch.setattr(manifest, "hash_file", lambda path: paths.append(path) or hash_file(path))
    return paths


def leftovers(store):
    return os.listdir(os.path.join(store.root, "cache", "incoming"))


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "node"))


# ---- contents --------------------------------------------------------------------------------------------------------------------

def test_a_content_gets_its_name_only_with_the_announced_hash_and_size(store):
    for announced, size in ((sha(b"other"), 5), (sha(b"bytes"), 4), (sha(b"bytes"), 6)):
        incoming = store.incoming()
        incoming.write(b"bytes")
        assert not incoming.keep(announced, size)
    assert not store.has(sha(b"bytes"), 5) and not leftovers(store)
    put(store, b"bytes")
    assert store.has(sha(b"bytes"), 5) and not leftovers(store)


def test_a_dropped_content_leaves_nothing(store):
    incoming = store.incoming()
    incoming.write(b"half")
    incoming.drop()
    incoming.drop()
    assert not leftovers(store)


def test_what_was_on_its_way_when_the_agent_died_is_gone_after_its_start(store, monkeypatch):
    monkeypatch.setattr(store_module, "SMALL_BYTES", 0)
    store.incoming().write(b"half")
    assert leftovers(store)
    assert not leftovers(Store(store.root))


def test_a_content_cut_short_is_not_there_and_asked_for_again(store):
    path = put(store, b"0123456789")
    path.write_bytes(b"01234")
    assert not store.has(sha(b"0123456789"), 10) and not path.exists()


def reboot(store, monkeypatch, boot_id):
    monkeypatch.setattr(store_module, "_boot_id", lambda: boot_id)
    return Store(store.root)


def test_a_content_damaged_by_a_power_loss_is_thrown_away_after_the_boot_and_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_boot_id", lambda: "first")
    store = Store(str(tmp_path / "node"))
    good, bad = put(store, b"good"), put(store, b"fine before")
    bad.write_bytes(b"zeros after")
    assert len(b"fine before") == len(b"zeros after")
    for path, seconds_ago in ((good, 10), (bad, 10), (Path(store.root, "cache", "boot"), 60)):
        stamp(path, seconds_ago)                     # the damage is below the file system: it keeps the time
    entries = [manifest.Entry("a", "file", 0o644, 1, 4, sha(b"good")), manifest.Entry("b", "file", 0o644, 1, 11, sha(b"fine before"))]
    assert [index for index, _ in reboot(store, monkeypatch, "first").lacks(entries)] == []         # only the agent was started again
    assert [index for index, _ in reboot(store, monkeypatch, "second").lacks(entries)] == [1]
    assert good.exists() and not bad.exists()


def test_contents_are_hashed_once_after_a_boot_and_not_each_time(store, monkeypatch, hashed_paths):
    stamp(put(store, b"good"), 2)
    store = reboot(store, monkeypatch, "another")
    assert store.has(sha(b"good"), 4) and store.has(sha(b"good"), 4)
    assert len(hashed_paths) == 1


def test_what_arrived_is_used_without_being_hashed_again_however_old_it_is(store, tmp_path, hashed_paths):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"x" * 5000)
    entries, tree_id = fill(store, tmp_path / "tree")
    hashed_paths.clear()
    stamp(Path(store.root, "cache", "boot"), 10 ** 6)
    for again in (Store(store.root), Store(store.root)):
        stamp(store._path(sha(b"x" * 5000)), 10 ** 5)                # long not used: its time is refreshed, with the mark
        again.forget()
        for number in range(2):
            again.materialize(again.tree(tree_id), str(tmp_path / "work"))
    assert hashed_paths == []
    assert time.time() - os.stat(store._path(sha(b"x" * 5000))).st_mtime < 60


def test_what_was_damaged_after_a_run_is_noticed_by_the_next_ones_push_even_before_that_run_is_there(store, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"good bytes")
    _, tree_id = fill(store, tmp_path / "tree")
    store.materialize(store.tree(tree_id), str(tmp_path / "work"))
    path = Path(store._path(sha(b"good bytes")))
    path.chmod(0o600)
    path.write_bytes(b"evil bytes")
    assert store.tree(tree_id) is None


@pytest.mark.parametrize("before", ["it is asked for", "it is copied"])
def test_a_content_that_somebody_changed_never_reaches_a_job_and_is_asked_for_again(store, tmp_path, before):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"good bytes")
    entries, tree_id = fill(store, tmp_path / "tree")
    path = Path(store._path(sha(b"good bytes")))
    path.chmod(0o600)
    path.write_bytes(b"evil bytes")
    if before == "it is copied":                                     # found whole just now
        with pytest.raises(TransferError, match="damaged and is thrown away; run again"):
            store.materialize(store.tree(tree_id), str(tmp_path / "work"))
        assert not (tmp_path / "work").exists()
    else:
        store.forget()                                               # as a new run does
    assert store.tree(tree_id) is None and not path.exists()
    assert [index for index, _ in store.lacks(entries)] == [0]
    put(store, b"good bytes")
    store.materialize(store.tree(tree_id), str(tmp_path / "work"))
    assert (tmp_path / "work" / "f").read_bytes() == b"good bytes"


def test_a_content_that_was_only_touched_is_hashed_once_and_stays(store, hashed_paths):
    os.utime(put(store, b"good"))
    assert store.has(sha(b"good"), 4) and store.has(sha(b"good"), 4) and len(hashed_paths) == 1


def test_a_file_system_that_keeps_no_fractions_of_a_second_hashes_each_time(store, monkeypatch, hashed_paths):
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path, ns: utime(path, ns=tuple(one // 10 ** 9 * 10 ** 9 for one in ns)))
    path = put(store, b"good")
    assert store.has(sha(b"good"), 4) and store.has(sha(b"good"), 4) and len(hashed_paths) == 2
    path.chmod(0o600)
    path.write_bytes(b"evil")
    assert not store.has(sha(b"good"), 4)


def test_contents_are_read_only(store):
    assert put(store, b"good").stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("gone", ["cache/contents", "cache/incoming", "cache/trees", "cache"])
def test_what_is_removed_from_the_cache_under_a_living_agent_is_made_again(store, tmp_path, gone):
    tree = make_odd_tree(tmp_path / "tree")
    _, tree_id = fill(store, tree)
    remove_tree(os.path.join(store.root, gone))
    store.forget()
    assert (store.tree(tree_id) is None) == (gone != "cache/incoming")
    fill(store, tree)
    store.materialize(store.tree(tree_id), str(tmp_path / "work"))
    assert looks(tmp_path / "work") == looks(tree)
    assert quiet(store).trim() == 0 and Store(store.root).tree(tree_id) is not None


def test_without_a_boot_id_each_start_of_the_agent_counts_as_a_boot(store, monkeypatch):
    path = put(store, b"good")
    path.write_bytes(b"evil")
    stamp(path, 2)
    assert not reboot(store, monkeypatch, "").has(sha(b"good"), 4)


def test_each_content_is_asked_for_once_and_empty_files_never(store):
    put(store, b"known")
    entries = [manifest.Entry(name, "file", 0o644, 1, len(data), sha(data)) for name, data in
               [("a", b"new"), ("b", b"new"), ("c", b""), ("d", b"known"), ("e", b"newer")]]
    assert [index for index, _ in store.lacks([manifest.Entry("0", "dir")] + entries)] == [1, 5]


def test_a_push_that_broke_off_goes_on_where_it_was_but_only_a_few_large_ones_are_kept(store, monkeypatch):
    monkeypatch.setattr(store_module, "RESUME_BYTES", 100)
    monkeypatch.setattr(store_module, "SMALL_BYTES", 0)
    for number in range(8):
        incoming = store.incoming()
        incoming.write(bytes([number]) * 200)
        store.keep_partial(sha(bytes([number]) * 300), incoming)
    small = store.incoming()
    small.write(b"x" * 99)
    store.keep_partial(sha(b"x" * 300), small)
    assert len(leftovers(store)) == store_module.KEEP_PARTIALS
    assert store.take_partial(sha(b"x" * 300)) is None and store.take_partial(sha(bytes([0]) * 300)) is None
    partial = store.take_partial(sha(bytes([7]) * 300))
    assert partial.size == 200
    partial.write(bytes([7]) * 100)
    assert partial.keep(sha(bytes([7]) * 300), 300) and store.has(sha(bytes([7]) * 300), 300)


def test_of_two_parts_of_one_content_the_longer_is_kept(store, monkeypatch):
    monkeypatch.setattr(store_module, "RESUME_BYTES", 100)
    monkeypatch.setattr(store_module, "SMALL_BYTES", 0)
    for size in (200, 250, 150):
        incoming = store.incoming()
        incoming.write(b"x" * size)
        store.keep_partial(sha(b"x" * 300), incoming)
    assert len(leftovers(store)) == 1
    assert store.take_partial(sha(b"x" * 300)).size == 250


# ---- trees -----------------------------------------------------------------------------------------------------------------------

def test_a_tree_is_known_only_while_all_of_it_is_here(store, tmp_path):
    entries, tree_id = fill(store, make_odd_tree(tmp_path / "tree"))
    again = Store(store.root)
    assert list(again.tree(tree_id)) == entries
    os.unlink(again._path(entries[-1].sha256 or sha(b"plain")))
    assert Store(store.root).tree(tree_id) is None
    assert store.tree("0" * 64) is None


def test_a_damaged_listing_is_thrown_away(store, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"x")
    _, tree_id = fill(store, tmp_path / "tree")
    path = Path(store.root, "cache", "trees", tree_id)
    path.write_bytes(path.read_bytes().replace(b'"f"]', b'"g"]'))
    assert Store(store.root).tree(tree_id) is None and not path.exists()


def test_a_listing_that_is_zeros_now_is_thrown_away_though_it_was_found_whole_just_now(store, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"x")
    entries, tree_id = fill(store, tmp_path / "tree")
    path = Path(store.root, "cache", "trees", tree_id)
    for change_time in (True, False):                                # with the same time and length: at the next run
        assert store.tree(tree_id) is not None
        before = path.stat()
        path.write_bytes(bytes(before.st_size))
        if not change_time:
            os.utime(path, ns=(1, before.st_mtime_ns))
            with pytest.raises(WireError):
                store.materialize(store.tree(tree_id), str(tmp_path / "work"))
        assert store.tree(tree_id) is None and not path.exists()
        fill(store, tmp_path / "tree")
    store.materialize(store.tree(tree_id), str(tmp_path / "work"))
    assert (tmp_path / "work" / "f").read_bytes() == b"x"


@pytest.mark.parametrize("what", ["listing", "content"])
def test_a_look_that_finds_damage_late_spares_what_was_put_in_its_place_meanwhile(store, tmp_path, monkeypatch, what):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"x" * 100)
    _, tree_id = fill(store, tmp_path / "tree")
    path = Path(store._path(sha(b"x" * 100))) if what == "content" else Path(store.root, "cache", "trees", tree_id)
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    owner, name = (manifest, "hash_file") if what == "content" else (store_module.Tree, "is_whole")
    look = getattr(owner, name)

    def slow_look(*args):
        result = look(*args)
        monkeypatch.setattr(owner, name, look)
        fill(store, tmp_path / "tree")                               # a push, in another thread
        return result

    monkeypatch.setattr(owner, name, slow_look)
    store.forget()
    assert store.tree(tree_id) is None
    assert path.exists() and Store(store.root).tree(tree_id) is not None


# ---- workdirs --------------------------------------------------------------------------------------------------------------------

def test_a_workdir_is_what_rsync_would_have_brought(store, tmp_path):
    tree = make_odd_tree(tmp_path / "tree")
    entries, tree_id = fill(store, tree)
    work = tmp_path / "work"
    files, size = store.materialize(store.tree(tree_id), str(work))
    assert files == sum(entry.kind == "file" for entry in entries) and size == sum(entry.size for entry in entries)
    assert looks(work) == looks(tree)
    assert rsync_differences(tree, work) == ""
    assert not Path(str(work) + ".new").exists()


@pytest.mark.parametrize("mask", [0o077, 0o000, 0o777])
def test_modes_arrive_whatever_the_umask_is(store, tmp_path, mask):
    tree = make_odd_tree(tmp_path / "tree")
    entries, _ = fill(store, tree)
    before = os.umask(mask)
    try:
        store.materialize(entries, str(tmp_path / "work"))
    finally:
        os.umask(before)
    assert looks(tmp_path / "work") == looks(tree)


def test_a_job_cannot_write_through_into_the_cache(store, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "data").write_bytes(b"original")
    entries, _ = fill(store, tmp_path / "tree")
    store.materialize(entries, str(tmp_path / "one"))
    with open(tmp_path / "one" / "data", "r+b") as stream:
        stream.write(b"scribble")
    os.truncate(tmp_path / "one" / "data", 3)
    store.materialize(entries, str(tmp_path / "two"))
    assert (tmp_path / "two" / "data").read_bytes() == b"original"
    assert (tmp_path / "one" / "data").stat().st_nlink == 1


def test_what_an_agent_that_was_killed_half_way_left_is_replaced(store, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "data").write_bytes(b"original")
    entries, _ = fill(store, tmp_path / "tree")
    for leftover in ("work.new", "work"):          # killed while it was made; killed before the state was saved
        (tmp_path / leftover / "closed").mkdir(parents=True)
        (tmp_path / leftover / "closed" / "stale").touch()
        (tmp_path / leftover / "closed").chmod(0o555)
    store.materialize(entries, str(tmp_path / "work"))
    assert sorted(os.listdir(tmp_path / "work")) == ["data"] and not (tmp_path / "work.new").exists()


def test_a_content_that_somebody_removed_is_an_error_that_leaves_no_half_workdir_and_is_asked_for_again(store, tmp_path):
    entries, tree_id = fill(store, make_odd_tree(tmp_path / "tree"))
    os.unlink(store._path(sha(b"plain")))
    with pytest.raises(TransferError, match="could not be written"):
        store.materialize(store.tree(tree_id), str(tmp_path / "work"))
    assert not (tmp_path / "work").exists() and not (tmp_path / "work.new").exists()
    assert store.tree(tree_id) is None


def test_a_disk_that_fills_up_half_way_is_named_with_free_and_needed_bytes_and_nothing_half_made_stays(tmp_path):
    with tiny_disk(tmp_path / "disk", "6m") as disk:
        store = Store(str(disk / "node"))
        entries = []
        for number in range(4):
            data = bytes([number]) * (1 << 20)
            put(store, data)
            entries.append(manifest.Entry(f"f{number}", "file", 0o644, 1, len(data), sha(data)))
        with pytest.raises(TransferError) as caught:
            store.materialize(entries, str(disk / "work"))
        text = str(caught.value)
        assert str(disk / "work") in text and "No space left" in text and "were free" in text
        assert "3,145,728 bytes (3.1 MB) still needed" in text or "2,097,152 bytes (2.1 MB) still needed" in text
        assert not (disk / "work").exists() and not (disk / "work.new").exists()
        os.unlink(store._path(sha(bytes([3]) * (1 << 20))))
        store.materialize(entries[:2], str(disk / "work"))
        assert sorted(os.listdir(disk / "work")) == ["f0", "f1"]


def test_no_room_is_said_before_anything_is_sent_and_names_the_bytes(store, monkeypatch):
    monkeypatch.setattr(store_module, "free_bytes", lambda path: 100_000_000)
    store.check_room(0, "nothing")
    store.check_room(100_000_000 - store_module.RESERVE_BYTES, "what just fits")
    with pytest.raises(TransferError) as caught:
        store.check_room(100_000_001 - store_module.RESERVE_BYTES, "the workspace")
    assert "100,000,000 bytes" in str(caught.value) and "100,000,001 bytes" in str(caught.value) and store.root in str(caught.value)


# ---- trim ------------------------------------------------------------------------------------------------------------------------

def quiet(store):
    store._touched = -store_module.QUIET_S
    return store


def used(path, hours_ago):
    os.utime(path, ns=(1, time.time_ns() - hours_ago * 3600 * 10 ** 9))


def test_trim_removes_what_was_used_longest_ago_until_the_cache_is_below_its_cap(store):
    paths = [put(store, bytes([number]) * 1000) for number in range(10)]
    for number, path in enumerate(paths):
        used(path, 2 * (10 - number))
    store.cap_bytes = 4500
    assert quiet(store).trim() == 6000
    assert [path.exists() for path in paths] == [False] * 6 + [True] * 4
    assert quiet(store).trim() == 0


def test_trim_takes_no_more_than_it_must_of_what_was_used_in_the_same_hour(store):
    paths = [put(store, bytes([number]) * 1000) for number in range(10)]
    for path in paths:
        used(path, 5)
    store.cap_bytes = 7000
    assert quiet(store).trim() == 3000
    assert sum(path.exists() for path in paths) == 7


def test_a_cache_below_its_cap_is_left_alone(store):
    path = put(store, b"x" * 1000)
    used(path, 10000)
    assert quiet(store).trim() == 0 and path.exists()


def test_listings_count_and_go_as_contents_do(store, tmp_path):
    (tmp_path / "tree").mkdir()
    _, tree_id = fill(store, tmp_path / "tree")
    (tmp_path / "tree" / "folder").mkdir()
    _, other = fill(store, tmp_path / "tree")
    used(Path(store.root, "cache", "trees", tree_id), 50)
    store.cap_bytes = 10
    quiet(store).trim()
    assert store.tree(tree_id) is None


def test_use_counts_as_age_not_arrival(store):
    old, new = put(store, b"o" * 1000), put(store, b"n" * 1000)
    used(old, 100)
    used(new, 50)
    assert store.has(sha(b"o" * 1000), 1000)         # a run needs it now
    store.cap_bytes = 1000
    quiet(store).trim()
    assert old.exists() and not new.exists()


def test_trim_never_runs_while_a_workdir_is_made_or_soon_after_a_push(store, tmp_path):
    path = put(store, b"x" * 1000)
    used(path, 100)
    store.cap_bytes = 0
    assert store.trim() == 0 and path.exists()       # something came in just now
    arrived, go_on = threading.Event(), threading.Event()

    def entries():
        arrived.set()
        assert go_on.wait(20)
        yield manifest.Entry("f", "file", 0o644, 1, 1000, sha(b"x" * 1000))

    maker = threading.Thread(target=store.materialize, args=(entries(), str(tmp_path / "work")))
    maker.start()
    assert arrived.wait(20)
    assert quiet(store).trim() == 0
    go_on.set()
    maker.join()
    assert (tmp_path / "work" / "f").read_bytes() == b"x" * 1000
    assert quiet(store).trim() == 1000 and not path.exists()


# ---- removing --------------------------------------------------------------------------------------------------------------------

def test_a_tree_of_read_only_and_closed_folders_can_be_removed(tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "file").touch()
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)

    def work():
        top = tmp_path / "top"
        for folder in ("a/b/c", "d", "e/f"):
            (top / folder).mkdir(parents=True)
            (top / folder / "file").touch()
        os.symlink(keep, top / "a" / "link")
        for folder, mode in (("a/b/c", 0o000), ("a/b", 0o444), ("a", 0o555), ("d", 0o000), ("e/f", 0o500), ("e", 0o100), ("", 0o000)):
            (top / folder).chmod(mode)
        remove_tree(str(top))
        assert not top.exists()

    as_nobody(work)
    assert (keep / "file").exists() and keep.stat().st_mode & 0o777 == 0o755


def test_removing_a_link_leaves_what_it_leads_to_and_nothing_is_fine(tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").touch()
    os.symlink("keep", tmp_path / "link")
    remove_tree(str(tmp_path / "link"))
    remove_tree(str(tmp_path / "nothing"))
    assert (tmp_path / "keep" / "file").exists() and not os.path.lexists(tmp_path / "link")
