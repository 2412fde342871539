"""The workdir that is made ahead: a run's workdir is the same with it as without, whatever happened to it meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun import manifest, spare as spare_module, store as store_module
from gpurun.errors import GpurunError, LinkError
from gpurun.store import Store
from gpurun.transfer import ChangedError
from conftest import eventually
from streams import cache_is_sound, listed, push, write_files
from test_store import fill
from trees import looks, rsync_differences

FILES = 60


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Worth it for a few files, and at once."""
    monkeypatch.setattr(spare_module, "FEWEST_FILES", 10)
    monkeypatch.setattr(spare_module, "PAUSE_S", 0)


class Node:
    def __init__(self, folder: Path) -> None:
        self.root, self.store, self.runs = folder / "tree", Store(str(folder / "node")), folder
        self.copied: list[str] = []
        copy = self.store._copy
        self.store._copy = lambda entry, path: "/cache/spare/" not in path and self.copied.append(entry.path) or copy(entry, path)
        for number in range(FILES):
            path = self.root / f"d{number % 4}" / f"f{number:02d}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"%d" % number * 50)
        self.number = 0

    def run(self) -> list[str]:
        """Makes the workdir of one more run of what the tree is now; which of its files were copied for it. The spare of the next is ready then."""
        tree = self.store.tree(fill(self.store, self.root)[1])
        self.number += 1
        work = self.runs / f"work{self.number}"
        self.copied.clear()
        assert self.store.materialize(tree, str(work)) == (sum(entry.kind == "file" for entry in tree), sum(entry.size for entry in tree))
        copied = list(self.copied)
        self.wait()
        assert looks(work) == looks(self.root) and rsync_differences(self.root, work) == ""
        assert not os.path.exists(str(work) + ".new")
        return sorted(copied)

    def wait(self) -> None:
        if self.store.spare.one is not None:
            self.store.spare.one.thread.join()

    @property
    def spare(self) -> Path:
        """Where it lies."""
        return Path(self.store.spare.one.path)


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    assert len(node.run()) == FILES
    return node


def test_an_unchanged_tree_costs_the_next_run_no_copy(node):
    assert node.run() == [] and node.run() == []


def test_a_changed_tree_costs_a_copy_of_what_changed(node):
    (node.root / "d1/f01").write_bytes(b"changed")
    (node.root / "d1/f05").chmod(0o755)
    os.utime(node.root / "d1/f09", ns=(1, 5))
    (node.root / "d0/f00").unlink()
    (node.root / "d0/new").write_bytes(b"new")
    assert node.run() == ["d0/new", "d1/f01", "d1/f05", "d1/f09"]


def test_every_kind_of_change_is_made(node):
    (node.root / "d0/f00").unlink()
    (node.root / "d0/f00").mkdir()
    (node.root / "d0/f00/below").write_bytes(b"x")
    os.symlink("f04", node.root / "d0/link")
    (node.root / "deep/er").mkdir(parents=True)
    (node.root / "deep/er/f").write_bytes(b"x")
    (node.root / "d0-").write_bytes(b"sorts between d0 and what is in it")
    node.run()
    shutil.rmtree(node.root / "d0/f00")
    (node.root / "d0/f00").write_bytes(b"a file again")
    (node.root / "d0/link").unlink()
    os.symlink("f08", node.root / "d0/link")
    shutil.rmtree(node.root / "deep")
    (node.root / "deep").write_bytes(b"a file")
    (node.root / "d3").chmod(0o700)
    assert node.run() == ["d0/f00", "deep"]
    assert node.run() == []


def test_read_only_folders_change_too(node):
    (node.root / "d2").chmod(0o555)
    node.run()
    (node.root / "d2").chmod(0o755)
    (node.root / "d2/f02").write_bytes(b"changed")
    (node.root / "d2").chmod(0o555)
    assert node.run() == ["d2/f02"]
    (node.root / "d2").chmod(0o755)


def test_a_tree_that_is_mostly_another_is_made_anew(node):
    for number in range(0, FILES, 2):
        (node.root / f"d{number % 4}" / f"f{number:02d}").write_bytes(b"changed")
    assert len(node.run()) == FILES and node.run() == []


@pytest.mark.parametrize("harm", [
    lambda spare: (spare / "d1/f01").write_bytes(b"changed"), lambda spare: (spare / "d1/f01").unlink(), lambda spare: (spare / "new").write_bytes(b""),
    lambda spare: (spare / "d1/f01").chmod(0o600), lambda spare: shutil.rmtree(spare), lambda spare: shutil.rmtree(spare / "d1"),
    lambda spare: os.rename(spare / "d1/f01", spare / "d1/x"), lambda spare: (spare / "empty").mkdir(), lambda spare: spare.chmod(0)],
    ids=["written", "deleted", "added", "chmod", "all deleted", "a folder deleted", "renamed", "a folder added", "closed"])
def test_a_spare_that_somebody_touched_is_not_used(node, harm):
    time.sleep(0.02)                   # the clock of ctime ticks every few ms
    harm(node.spare)
    node.run()
    assert node.run() == []


def test_a_change_that_hides_its_time_is_seen(node):
    time.sleep(0.02)
    path = node.spare / "d1/f01"
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(node.run()) == FILES


def test_a_run_that_changes_its_workdir_does_not_change_the_next_ones(node):
    for path in (node.runs / "work1").rglob("f*"):
        path.write_bytes(b"written by a job")
    assert node.run() == []
    for path in (node.runs / "work2").rglob("f*"):
        path.write_bytes(b"written by a job")
    assert node.run() == []


def test_few_files_many_bytes_or_little_room_make_no_spare(tmp_path, monkeypatch):
    node = Node(tmp_path)
    monkeypatch.setattr(spare_module, "FEWEST_FILES", FILES + 1)
    node.run()
    assert node.store.spare.one is None
    monkeypatch.setattr(spare_module, "FEWEST_FILES", 10)
    monkeypatch.setattr(spare_module, "MOST_BYTES", 100)
    node.run()
    assert node.store.spare.one is None
    monkeypatch.setattr(spare_module, "MOST_BYTES", 1 << 30)
    found = os.statvfs(tmp_path)
    size, few = FILES * spare_module.FILE_BYTES * spare_module.FREE_TIMES, FILES * spare_module.FREE_TIMES
    for free, names in ((size - 1, few), (size * 2, few - 1)):       # of many small files the last blocks are most of it
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1, f_bsize=1, f_files=found.f_files or 1, f_favail=names))
        node.run()
        assert not node.store.spare.one.made_ns and not (tmp_path / "node/cache/spare").exists()


def test_what_came_ahead_of_a_run_that_never_comes_goes_after_a_while(node, monkeypatch):
    """Of two pushes of one tree at once, one run finds the spare of the other."""
    monkeypatch.setattr(spare_module, "FRESH_S", 0.05)
    ahead = node.store.ahead()
    os.mkdir(ahead.path)
    ahead._begun = True
    node.store.spare.arrived("a listing", ahead)
    eventually(lambda: not os.path.exists(ahead.path))
    assert node.store.spare.take_arrived(SimpleNamespace(path="a listing"), str(node.runs / "late")) is None


def test_a_run_that_comes_while_the_spare_is_made_does_not_wait_for_it(node, monkeypatch):
    monkeypatch.setattr(spare_module, "PAUSE_S", 600)
    tree = node.store.tree(fill(node.store, node.root)[1])
    node.store.materialize(tree, str(node.runs / "one"))       # with the spare of before; the next one is never made
    for name in ("two", "three"):
        node.copied.clear()
        node.store.materialize(tree, str(node.runs / name))
        assert len(node.copied) == FILES and looks(node.runs / name) == looks(node.root)


def test_a_run_that_comes_in_the_middle_of_the_making_takes_what_is_there_of_it(node, monkeypatch):
    tree = node.store.tree(fill(node.store, node.root)[1])
    half, go_on = threading.Event(), threading.Event()
    copy_bytes = node.store._copy_bytes

    def slowly(source, target, size):
        if threading.current_thread().name == "spare" and os.readlink(f"/proc/self/fd/{target}").endswith("f20"):
            half.set()
            assert go_on.wait(30)
        copy_bytes(source, target, size)
    monkeypatch.setattr(node.store, "_copy_bytes", slowly)
    node.store.materialize(tree, str(node.runs / "one"))
    assert half.wait(30)
    node.copied.clear()
    waiting = threading.Thread(target=node.store.materialize, args=(tree, str(node.runs / "two")))
    waiting.start()
    go_on.set()
    waiting.join(30)
    assert looks(node.runs / "two") == looks(node.root) and node.copied == []


def test_another_tree_does_not_wait_for_the_spare_of_this_one(node, monkeypatch):
    tree = node.store.tree(fill(node.store, node.root)[1])
    half, go_on = threading.Event(), threading.Event()
    copy_bytes = node.store._copy_bytes

    def slowly(source, target, size):
        if threading.current_thread().name == "spare":
            half.set()
            assert go_on.wait(30)
        copy_bytes(source, target, size)
    monkeypatch.setattr(node.store, "_copy_bytes", slowly)
    node.store.materialize(tree, str(node.runs / "one"))
    assert half.wait(30)
    for path in node.root.rglob("f*"):
        path.write_bytes(b"another " + path.name.encode())
    monkeypatch.setattr(spare_module, "PAUSE_S", 600)
    node.store.materialize(node.store.tree(fill(node.store, node.root)[1]), str(node.runs / "two"))
    assert looks(node.runs / "two") == looks(node.root) and not go_on.is_set()
    go_on.set()


def test_only_one_spare_is_kept_and_none_outlives_its_agent(node):
    for number in range(3):
        (node.root / "d1/f01").write_bytes(b"%d" % number)
        node.run()
        assert len(list((node.runs / "node/cache/spare").iterdir())) == 1
    stale = node.spare
    again = Store(node.store.root)
    assert again.spare.one is None
    node.store = again
    node.run()
    assert node.spare.exists() and len(list(stale.parent.iterdir())) == 1


def test_what_an_earlier_agent_left_goes_when_the_cache_is_trimmed_and_a_good_spare_stays(node, monkeypatch):
    monkeypatch.setattr(store_module, "QUIET_S", -1)
    node.store.trim()
    assert node.run() == []
    folder = node.spare.parent
    Store(node.store.root).trim()
    assert not folder.exists()


def test_a_push_without_room_gets_that_of_the_spare(node, monkeypatch):
    folder = node.spare.parent
    monkeypatch.setattr(store_module, "free_bytes", lambda path: 0 if folder.exists() else 1 << 40)
    node.store.check_room(1000, "the workspace")
    assert not folder.exists()
    assert len(node.run()) == FILES


def test_a_node_folder_that_was_deleted_is_not_made_again(node, monkeypatch):
    tree = node.store.tree(fill(node.store, node.root)[1])
    monkeypatch.setattr(spare_module, "PAUSE_S", 3.0)         # longer than it takes to delete the folder
    node.store.materialize(tree, str(node.runs / "work"))
    shutil.rmtree(node.store.root)
    node.wait()
    assert not os.path.exists(node.store.root)


def test_a_spare_of_the_very_tree_needs_nothing_of_the_cache(node):
    tree_id = manifest.tree_id(manifest.encode(fill(node.store, node.root)[0]))
    shutil.rmtree(node.runs / "node/cache/contents")
    tree = node.store.tree(tree_id)
    node.store.materialize(tree, str(node.runs / "work"))
    assert looks(node.runs / "work") == looks(node.root)
    node.wait()
    assert node.store.tree(tree_id) is None                    # asked anew, without a spare: its contents have to be sent


# ---- with an agent -------------------------------------------------------------------------------------------------------------------

def test_a_job_runs_in_the_workdir_that_was_made_ahead(here):
    for number in range(600):
        path = here.work / "tree" / f"d{number % 3}" / f"f{number:03d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    job = here.job("stat -c %i d0/f000; cat d*/f* | sort -n | tail -n 1; echo junk > d1/junk; rm d0/f003", workspace={"workdir": "tree"})
    assert here.gpurun(job).stdout.split()[1:] == [b"599"]
    ahead = here.node_dir / "cache/spare"
    eventually(lambda: len(list(ahead.glob("*/d*/f*"))) == 600)
    inode = next(ahead.glob("*/d0/f000")).stat().st_ino
    (here.work / "tree/d1/f001").write_text("1000\n")
    assert here.gpurun(job).stdout.split() == [b"%d" % inode, b"1000"]
    result = here.result(job)
    assert result["exit_code"] == 0 and (here.latest / "stdout.log").read_bytes().split()[1] == b"1000"


class Pushed:
    """A tree that comes to a node by a push, and what its run then has to copy."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.store, self.work = folder / "tree", Store(str(folder / "node")), folder / "work"
        self.copied: list[str] = []
        copy = self.store._copy
        self.store._copy = lambda entry, path: "/cache/spare/" not in path and self.copied.append(entry.path) or copy(entry, path)
        write_files(self.tree, {f"d{number % 4}/f{number:02d}": b"%d" % number * 50 for number in range(FILES)})

    def run(self) -> list[str]:
        arrived: list[str] = []
        push(self.store, self.tree, arrived=arrived)
        return self.materialize(arrived[0])

    def materialize(self, tree: str) -> list[str]:
        entries = self.store.tree(tree)
        self.copied.clear()
        assert self.store.materialize(entries, str(self.work)) == (sum(entry.kind == "file" for entry in entries), sum(entry.size for entry in entries))
        copied = sorted(self.copied)
        self.store.settle()
        self.store.spare.clear()
        assert looks(self.work) == looks(self.tree) and rsync_differences(self.tree, self.work) == "" and self.on_its_way() == []
        cache_is_sound(self.store)
        assert all(self.store.has(entry.sha256, entry.size) for entry in entries if entry.size)
        return copied

    def on_its_way(self) -> list[str]:
        return os.listdir(Path(self.store.root, "cache", "incoming"))


@pytest.fixture
def pushed(tmp_path):
    return Pushed(tmp_path)


def test_the_workdir_of_a_tree_that_is_new_to_the_node_is_made_while_it_comes(pushed):
    assert pushed.run() == []
    write_files(pushed.tree, {"d0/new": b"new"})
    assert len(pushed.run()) == FILES + 1                        # most of it was here: that is what the spare is for


def test_whatever_does_not_come_is_put_into_a_workdir_that_is_made_ahead(pushed, monkeypatch):
    monkeypatch.setattr(store_module, "SMALL_BYTES", 1000)
    write_files(pushed.tree, {"empty": b"", "d1/twice": b"7" * 50, "zz/deep/er/big": b"big" * 1000, "d2/run.sh": b"echo"})
    (pushed.tree / "d2/run.sh").chmod(0o4750)
    (pushed.tree / "d3/f03").chmod(0o400)
    os.symlink("../d0", pushed.tree / "d1/link")
    os.utime(pushed.tree / "d0/f04", ns=(1, 5))
    (pushed.tree / "zz/deep").chmod(0o555)
    (pushed.tree / "nothing in it").mkdir()
    assert pushed.run() == ["d3/f07", "empty", "zz/deep/er/big"]         # d1/twice came with d3/f07's contents


def test_few_files_many_bytes_or_little_room_make_nothing_ahead(pushed, monkeypatch):
    for name, value in (("FEWEST_FILES", FILES + 1), ("MOST_BYTES", 100), ("FREE_TIMES", 1 << 60), ("MOST_HELD", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(spare_module, name, value)
            write_files(pushed.tree, {f"d{number % 4}/f{number:02d}": f"{name} {number}".encode() for number in range(FILES)})
            assert len(pushed.run()) == FILES, name


def test_a_disk_that_fails_what_is_made_ahead_costs_a_push_nothing(pushed, monkeypatch):
    real, left = os.open, [FILES // 2]

    def full(path, flags, *args, **keys):
        if "/incoming/work-" in str(path) and flags & os.O_CREAT:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device", path)
        return real(path, flags, *args, **keys)

    monkeypatch.setattr(os, "open", full)
    assert len(pushed.run()) == FILES and left[0] == -1


def test_what_is_made_ahead_goes_with_a_push_that_breaks_and_with_a_file_that_changed(pushed):
    push(Store(str(pushed.work.parent / "another")), pushed.tree)
    with pytest.raises(LinkError):
        push(pushed.store, pushed.tree, cut=push.stream.written - 10)
    pushed.store.settle()
    assert pushed.on_its_way() == []
    entries, encoded = listed(pushed.tree)
    (pushed.tree / "d3/f59").write_bytes(b"changed")
    with pytest.raises(ChangedError):
        push(pushed.store, pushed.tree, entries=entries, encoded=encoded)
    pushed.store.settle()
    assert pushed.on_its_way() == []


def test_what_is_made_ahead_of_a_run_that_does_not_come_is_no_later_ones(pushed, monkeypatch):
    monkeypatch.setattr(store_module, "SETTLE_S", 1000.0)      # not before we have looked
    arrived: list[str] = []
    push(pushed.store, pushed.tree, arrived=arrived)
    assert [name[:5] for name in sorted(pushed.on_its_way())] == ["journ", "work-"]
    other = write_files(pushed.work.parent / "other", {"a": b"a"})
    push(pushed.store, other, arrived=arrived)
    pushed.store.materialize(pushed.store.tree(arrived[1]), str(pushed.work))
    assert pushed.on_its_way() == []
    assert len(pushed.materialize(arrived[0])) == FILES
    write_files(pushed.tree, {f"d{number % 4}/f{number:02d}": b"other %d" % number for number in range(FILES)})
    monkeypatch.setattr(spare_module, "FRESH_S", -1.0)
    assert len(pushed.run()) == FILES
    push(pushed.store, pushed.tree)
    pushed.store.spare.clear()
    pushed.store.settle()
    assert pushed.on_its_way() == []


def test_two_pushes_of_one_tree_at_once_make_one_workdir(pushed):
    arrived: list[str] = []
    pushers = [threading.Thread(target=push, args=(pushed.store, pushed.tree), kwargs={"arrived": arrived}) for _ in range(2)]
    for one in pushers:
        one.start()
    for one in pushers:
        one.join()
    assert sum(name.startswith("work-") for name in pushed.on_its_way()) == 1
    pushed.materialize(arrived[0])


def journal_of(pushed: Pushed) -> Path:
    (name,) = [name for name in pushed.on_its_way() if name.startswith("journal-")]
    return Path(pushed.store.root, "cache", "incoming", name)


@pytest.fixture
def killed(pushed, monkeypatch):
    """The agent was killed after a push, before it had made the files of the contents."""
    monkeypatch.setattr(store_module, "SETTLE_S", 1000.0)
    arrived: list[str] = []
    push(pushed.store, pushed.tree, arrived=arrived)
    pushed.id = arrived[0]
    pushed.again = lambda: Store(pushed.store.root)
    return pushed


def test_what_came_is_there_for_an_agent_after_one_that_was_killed(killed):
    store = killed.again()
    assert [name for name in killed.on_its_way() if name.startswith("work-")] == []
    assert store.ahead().path != killed.store.ahead().path
    store.materialize(store.tree(killed.id), str(killed.work))
    assert looks(killed.work) == looks(killed.tree)
    store.spare.clear()
    assert killed.on_its_way() == []
    cache_is_sound(store)


@pytest.mark.parametrize("damage", [lambda data: data[:len(data) // 2], lambda data: data[:700] + b"\xff" * 40 + data[740:], lambda data: b"\xff" * len(data), lambda data: b""],
                         ids=["cut", "one content", "all", "empty"])
def test_of_a_journal_that_a_power_loss_damaged_only_what_is_whole_is_taken(killed, damage):
    path = journal_of(killed)
    path.write_bytes(damage(path.read_bytes()))
    store = killed.again()
    assert store.tree(killed.id) is None and killed.on_its_way() == []
    cache_is_sound(store)
    arrived: list[str] = []
    push(store, killed.tree, arrived=arrived)
    store.materialize(store.tree(arrived[0]), str(killed.work))
    assert looks(killed.work) == looks(killed.tree)
    store.spare.clear()


def test_what_no_agent_put_on_its_way_is_removed_when_one_starts(killed):
    for name in ("journal-", "journal-x", "7"):
        Path(killed.store.root, "cache", "incoming", name).write_bytes(b"x")
    killed.again()
    assert [name[:8] for name in killed.on_its_way()] == ["journal-"] and journal_of(killed).name != "journal-"


def test_contents_for_whose_files_there_is_no_room_are_asked_for_again(killed, monkeypatch):
    real = os.open

    def full(path, flags, *args, **keys):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return real(path, flags, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        killed.store.settle()
    assert killed.store.tree(killed.id) is None
    arrived: list[str] = []
    assert push(killed.store, killed.tree, arrived=arrived).files == FILES
    killed.materialize(arrived[0])


def test_a_disk_that_is_too_full_for_the_files_of_contents_is_left_some_room_and_said_to_be_full(killed, monkeypatch):
    monkeypatch.setattr(store_module, "free_bytes", lambda path: store_module.RESERVE_BYTES)
    killed.store.spare.clear()
    with pytest.raises(GpurunError, match="No space left on device"):
        killed.store.materialize(listed(killed.tree)[0], str(killed.work))
    assert killed.on_its_way() == [] and killed.store.tree(killed.id) is None
    monkeypatch.undo()
    arrived: list[str] = []
    assert push(killed.store, killed.tree, arrived=arrived).files == FILES


def test_whoever_asks_for_contents_while_their_files_are_made_waits_for_them(killed):
    keep, begun, go_on = store_module.Incoming.keep, threading.Event(), threading.Event()

    def slow(self, *args):
        begun.set()
        assert go_on.wait(20)
        return keep(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module.Incoming, "keep", slow)
        maker = threading.Thread(target=killed.store.settle)
        maker.start()
        assert begun.wait(20)
        found: list[object] = []
        killed.store.forget()
        asker = threading.Thread(target=lambda: found.append(killed.store.tree(killed.id)))
        asker.start()
        go_on.set()
        maker.join()
        asker.join()
    assert found[0] is not None
