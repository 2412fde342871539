"""What is hashed when a workspace is listed again, and that a hash from the cache is never the wrong one.

The clock of a disk can't be set, so what is moved is ours: `later` says how much time passed since the files were written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun import manifest, statcache, workspace
from trees import tiny_disk

SECOND = 10 ** 9
COUNT = 40


class Lister:
    """A workspace, and what a listing of it by another process would hash."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cache, self.monkeypatch = folder / "tree", folder / "cache", monkeypatch
        for number in range(COUNT):
            path = self.root / f"d{number % 4}" / f"f{number:02d}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"%d" % number * 50)
        self.hashed: list[str] = []
        hash_file = manifest.hash_file
        monkeypatch.setattr(manifest, "hash_file", lambda path: self.hashed.append(os.path.relpath(path, self.root)) or hash_file(path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.cache))
        self.later(10)

    def later(self, seconds: float) -> None:
        """From now on it is so much later than it is."""
        self.monkeypatch.setattr(statcache, "now_ns", lambda: time.time_ns() + int(seconds * SECOND))

    def again(self, exclude=(), root=None) -> list[str]:
        """Lists it as a process of its own would, checks every hash; what was hashed for it."""
        self.hashed.clear()
        workspace._scanned.clear()
        found = workspace.scan(str(root or self.root), exclude)
        for entry in found.entries:
            path = Path(root or self.root) / entry.path
            if entry.kind == "file":
                state = path.stat()
                assert (entry.sha256, entry.size, entry.mtime_ns, entry.mode) == (
                    hashlib.sha256(path.read_bytes()).hexdigest(), state.st_size, state.st_mtime_ns, state.st_mode & 0o7777), entry.path
        return sorted(self.hashed)

    def files(self) -> list[Path]:
        return sorted((self.cache / "gpurun" / "stat").iterdir())


@pytest.fixture
def lister(tmp_path, monkeypatch):
    return Lister(tmp_path, monkeypatch)


# ---- how many files are hashed ------------------------------------------------------------------------------------------------------

def test_an_unchanged_workspace_is_not_hashed_again(lister):
    assert len(lister.again()) == COUNT
    first = workspace.scan(str(lister.root), ()).entries
    assert lister.again() == [] and lister.again() == []
    workspace._scanned.clear()
    assert workspace.scan(str(lister.root), ()).entries == first


def test_five_changed_files_are_five_hashes(lister):
    lister.again()
    changed = [f"d{number % 4}/f{number:02d}" for number in range(5)]
    for name in changed:
        (lister.root / name).write_bytes(b"changed")
    lister.later(20)
    assert lister.again() == sorted(changed)
    assert lister.again() == []


def test_few_new_hashes_are_not_worth_writing_all_of_a_cache_and_many_are(lister, monkeypatch):
    lister.again()
    before = lister.files()[0].read_bytes()
    (lister.root / "d0/f00").write_bytes(b"changed")
    lister.later(20)
    assert [lister.again(), lister.again()] == [["d0/f00"]] * 2 and lister.files()[0].read_bytes() == before
    (lister.root / "d0/f00").write_bytes(b"changed" * statcache.WORTH_BYTES)     # one large file is worth it
    lister.later(30)
    assert [lister.again(), lister.again()] == [["d0/f00"], []]


@pytest.mark.parametrize("touch", [
    lambda path: os.utime(path), lambda path: os.utime(path, ns=(1, SECOND)), lambda path: path.chmod(0o600),
    lambda path: os.link(path, path.with_name("second name"))], ids=["touch", "touch -d", "chmod", "ln"])
def test_a_file_whose_state_moved_is_hashed(lister, touch):
    lister.again()
    time.sleep(0.02)                   # the clock of ctime ticks every few ms
    touch(lister.root / "d1/f01")
    assert "d1/f01" in lister.again()


def test_a_file_of_the_same_size_with_its_time_put_back_is_hashed(lister):
    lister.again()
    time.sleep(0.02)                   # the clock of ctime ticks every few ms
    path = lister.root / "d1/f01"
    state = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes()[:-1])) + b"x")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size and path.stat().st_mtime_ns == state.st_mtime_ns
    assert lister.again() == ["d1/f01"]


def test_another_file_moved_or_copied_into_the_place_is_hashed(lister):
    """Even one with the same size and time."""
    lister.again()
    state = (lister.root / "d1/f01").stat()
    new = lister.root.parent / "new"
    for how in ("mv", "cp -p"):
        new.write_bytes(os.urandom(state.st_size))
        os.utime(new, ns=(state.st_atime_ns, state.st_mtime_ns))
        subprocess.run([*how.split(), new, lister.root / "d1/f01"], check=True)
        assert (lister.root / "d1/f01").stat().st_mtime_ns == state.st_mtime_ns
        assert lister.again() == ["d1/f01"]


def test_two_files_that_changed_names_are_hashed(lister):
    lister.again()
    one, other = lister.root / "d0/f00", lister.root / "d1/f01"
    one.rename(one.with_name("x"))
    other.rename(one)
    one.with_name("x").rename(other)
    assert lister.again() == ["d0/f00", "d1/f01"]


def test_a_change_through_another_hard_link_is_seen(lister):
    os.link(lister.root / "d1/f01", lister.root.parent / "outside")
    lister.again()
    (lister.root.parent / "outside").write_bytes(b"changed")
    assert lister.again() == ["d1/f01"]


def test_a_file_that_became_a_link_or_a_fifo_is_none_any_more(lister):
    lister.again()
    for name, make in (("d1/f01", os.mkfifo), ("d1/f05", lambda path: os.symlink("f09", path)), ("d1/f09", os.mkdir)):
        (lister.root / name).unlink()
        make(lister.root / name)
    assert lister.again() == []
    workspace._scanned.clear()
    found = workspace.scan(str(lister.root), ())
    assert found.skipped == [("d1/f01", "a FIFO")]
    assert {entry.path: entry.kind for entry in found.entries if entry.path in ("d1/f05", "d1/f09")} == {"d1/f05": "link", "d1/f09": "dir"}


def test_odd_names_are_known_again(lister):
    for name in (b"line\nbreak", b"caf\xe9", "é".encode(), b" ", b"\x1b[31m", b"n" * 255):
        Path(os.fsdecode(os.path.join(os.fsencode(lister.root), name))).write_bytes(name)
    assert len(lister.again()) == COUNT + 6 and lister.again() == []


def test_times_before_1970_and_empty_files_are_known_again(lister):
    (lister.root / "empty").touch()
    os.utime(lister.root / "d1/f01", ns=(-5 * SECOND, -5 * SECOND - 1))
    assert len(lister.again()) == COUNT + 1 and lister.again() == []


def test_a_link_to_the_workspace_is_the_same_workspace_and_another_folder_is_another(lister):
    lister.again()
    os.symlink(lister.root, lister.root.parent / "link")
    assert lister.again(root=lister.root.parent / "link") == []
    assert len(lister.again(root=lister.root / "d1")) == COUNT // 4
    assert lister.again() == [] and len(lister.files()) == 2


def test_two_jobs_that_exclude_different_files_do_not_cost_each_other_their_hashes(lister):
    assert len(lister.again(["d0"])) == COUNT * 3 // 4
    assert len(lister.again(["d1"])) == COUNT // 4
    assert [lister.again(["d0"]), lister.again(["d1"]), lister.again()] == [[], [], []]


# ---- the racy timestamp --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("age_s", [-3600, -1, 0, 1, 1.9])
def test_a_file_hashed_within_the_tick_of_its_last_change_is_hashed_again(lister, monkeypatch, age_s):
    """Also one with a time in the future, as after a clock was set back."""
    oldest_ns = min(path.stat().st_ctime_ns for path in lister.root.rglob("f*"))
    monkeypatch.setattr(statcache, "now_ns", lambda: oldest_ns + int(age_s * SECOND))     # stands still: a busy machine takes a tenth of a second for this
    assert len(lister.again()) == COUNT and len(lister.again()) == COUNT
    lister.later(10)
    assert len(lister.again()) == COUNT and lister.again() == []


def test_a_second_change_that_leaves_no_trace_is_seen(lister, monkeypatch):
    """Both of a file's changes fall in one tick of a slow clock: its state after the second is what it was after the first."""
    path = lister.root / "d1/f01"
    os.utime(path)
    first = path.stat()
    lister.later(0)
    lister.again()
    path.write_bytes(bytes(reversed(path.read_bytes()[:-1])) + b"x")
    state = statcache._state
    monkeypatch.setattr(statcache, "_state", lambda found: state(first if found.st_ino == first.st_ino else found))
    lister.later(60)
    assert "d1/f01" in lister.again()


def found(mtime_ns, ctime_ns, ino=7):
    return SimpleNamespace(st_size=1, st_mtime_ns=mtime_ns, st_ctime_ns=ctime_ns, st_ino=ino, st_dev=1)


def test_whole_seconds_are_trusted_only_much_later():
    """A disk that keeps no more may be one with a clock of its own."""
    whole, part = 1_700_000_000 * SECOND, 1_700_000_000 * SECOND + 1
    for mtime, ctime, after_s in ((whole, part, 2), (part, whole, 2), (whole, whole, 600), (0, part, 2), (0, whole, 600)):
        latest = max(mtime, ctime)
        assert not statcache._settled(found(mtime, ctime), latest + after_s * SECOND)
        assert statcache._settled(found(mtime, ctime), latest + after_s * SECOND + 1)


def test_an_mtime_set_to_the_future_is_never_trusted(lister):
    os.utime(lister.root / "d1/f01", ns=(0, time.time_ns() + 3600 * SECOND))
    lister.again()
    assert lister.again() == ["d1/f01"]


def test_a_disk_without_inodes_or_ctimes_is_not_trusted():
    assert statcache._state(found(5, 5)) and not statcache._state(found(5, 5, ino=0)) and not statcache._state(found(5, 0))
    assert not statcache._state(found(1 << 70, 5))


def test_a_cache_from_the_future_is_not_read(lister):
    """The clock was set back since: times may come a second time."""
    lister.again()
    lister.later(5)
    assert len(lister.again()) == COUNT


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(lister, monkeypatch):
    counted = manifest.hash_file

    def changes(path):
        result = counted(path)
        if path.endswith("f01"):
            Path(path).write_bytes(b"changed after it was hashed")
        return result
    lister.later(0)
    time.sleep(0.02)
    monkeypatch.setattr(manifest, "hash_file", changes)
    lister.later(10)
    workspace._scanned.clear()
    workspace.scan(str(lister.root), ())
    monkeypatch.setattr(manifest, "hash_file", counted)
    assert lister.again() == ["d1/f01"]


def test_the_second_listing_of_one_process_trusts_nothing(lister):
    """It comes when the node was sent something that isn't what the first one said."""
    lister.again()
    assert lister.again() == []
    workspace.scan(str(lister.root), ())
    assert len(lister.hashed) == COUNT
    assert lister.again() == []


def test_a_wrong_hash_in_the_cache_is_set_right_by_the_second_listing(lister):
    lister.again()
    data = lister.files()[0].read_bytes()
    right = hashlib.sha256((lister.root / "d1/f01").read_bytes()).digest()
    data = data[:-32].replace(right, bytes(32))
    lister.files()[0].write_bytes(data + hashlib.sha256(data).digest())
    workspace._scanned.clear()
    wrong = workspace.scan(str(lister.root), ())
    assert "0" * 64 in [entry.sha256 for entry in wrong.entries]
    workspace.scan(str(lister.root), ())
    assert lister.again() == []                        # and all of it is right, which `again` checks


# ---- the cache's own file -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("harm", [
    lambda data: b"", lambda data: data[:10], lambda data: data[:-1], lambda data: data[:len(data) // 2], lambda data: data + b"x",
    lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    lambda data: b"gpurun-stat-2\n" + data[len(statcache.VERSION):], lambda data: os.urandom(len(data)), lambda data: b"\0" * len(data)])
def test_a_damaged_cache_or_one_of_another_version_is_none(lister, harm):
    lister.again()
    cache = lister.files()[0]
    cache.write_bytes(harm(cache.read_bytes()))
    assert len(lister.again()) == COUNT and lister.again() == []


def test_a_folder_in_the_place_of_the_cache_is_none(lister):
    lister.again()
    cache = lister.files()[0]
    cache.unlink()
    cache.mkdir()
    assert len(lister.again()) == COUNT


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_cache_that_cannot_be_written_is_none(lister, monkeypatch, capfd, code):
    def refuse(*args):
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(statcache, "atomic_write", refuse)
    assert len(lister.again()) == len(lister.again()) == COUNT
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")   # nor can its folder be made
    assert len(lister.again()) == len(lister.again()) == COUNT
    assert capfd.readouterr() == ("", "")


def test_no_room_for_the_cache_leaves_the_old_one_and_nothing_else(lister, tmp_path):
    lister.again()
    with tiny_disk(tmp_path / "tiny", "64k") as tiny:
        (tiny / "gpurun").mkdir()
        (tiny / "gpurun" / "full").write_bytes(b"x" * (52 << 10))
        lister.monkeypatch.setenv("XDG_CACHE_HOME", str(tiny))
        for number in range(300):
            (lister.root / ("n" * 100 + str(number))).write_bytes(b"x")
        lister.later(20)
        assert len(lister.again()) == len(lister.again()) == COUNT + 300
        assert not [path for path in tiny.rglob("*") if path.is_file() and path.name != "full"]


def test_the_cache_is_private_and_holds_no_contents(lister):
    (lister.root / "d1/f01").write_bytes(b"very secret")
    lister.again()
    cache = lister.files()[0]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600 and stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert b"very secret" not in cache.read_bytes()


def test_a_file_takes_its_path_and_72_bytes(lister):
    lister.again()
    assert lister.files()[0].stat().st_size < 100 + COUNT * (72 + len("d0/f00") + 1)


def test_files_that_are_gone_leave_the_cache_when_it_is_written(lister):
    lister.again()
    size = lister.files()[0].stat().st_size
    for number in range(1, COUNT):
        (lister.root / f"d{number % 4}" / f"f{number:02d}").unlink()
    for number in range(3):
        (lister.root / "d0" / f"new{number}").write_bytes(b"new")
    lister.later(20)
    assert len(lister.again()) == 3 and lister.again() == []
    assert lister.files()[0].stat().st_size < size // 8


def test_caches_of_workspaces_not_used_for_long_go(lister, monkeypatch):
    monkeypatch.setattr(statcache, "KEPT", 3)
    roots = []
    for number in range(5):
        root = lister.root.parent / f"root{number}"
        root.mkdir()
        (root / "f").write_bytes(b"x")
        roots.append(root)
    lister.root = roots[0]
    lister.later(20)
    for root in roots[:3]:
        lister.root = root
        assert lister.again() == ["f"]
        time.sleep(0.02)
    for root, wanted in ((roots[0], []), (roots[3], ["f"]), (roots[0], []), (roots[1], ["f"])):
        lister.root = root
        assert lister.again() == wanted
        assert len(lister.files()) == 3
        time.sleep(0.02)


def test_two_processes_at_once_do_each_other_no_harm(lister):
    code = ("import sys, time; from gpurun import statcache, workspace; real = time.time_ns; statcache.now_ns = lambda: real() + 20 * 10 ** 9\n"
            "for number in range(40):\n"
            "    workspace._scanned.clear(); import os; open(os.path.join(sys.argv[1], sys.argv[2]), 'w').write(str(number) * 70000)\n"
            "    workspace.scan(sys.argv[1], [])\n")
    env = dict(os.environ, PYTHONPATH=str(Path(workspace.__file__).parents[1]))
    others = [subprocess.Popen([sys.executable, "-c", code, str(lister.root), f"own{number}"], env=env) for number in range(3)]
    assert [other.wait(60) for other in others] == [0, 0, 0]
    lister.later(60)
    assert len(lister.again()) <= 3                    # the hashes of the last one that wrote, all of them right
    assert len(lister.files()) == 1
