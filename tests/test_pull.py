"""Outputs: which there are, how they come home, links that break anywhere, full disks, and a node that lies."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import zlib

import pytest

from gpurun import landing, manifest, transfer
from gpurun.errors import LinkError, TransferError, WireError
from gpurun.manifest import Entry
from streams import ROOT, as_agent, iroh_pair, node, peak_mb, pull, quiet, target, work, write_files
from trees import as_nobody, looks, make_odd_tree, tiny_disk


# ---- find_outputs ----------------------------------------------------------------------------------------------------------------

def found(work, *declared):
    outputs, missing, refused = manifest.find_outputs(str(work), declared)
    return [output.entry.path for output in outputs], missing, refused


def test_outputs_are_found_with_the_folders_above_them(work):
    write_files(work, {"metrics.json": b"{}", "out/a/b": b"", "deep/er/file": b"x", "a-b/z": b"", "not/declared": b"", "a/z": b""})
    paths, missing, refused = found(work, "metrics.json", "out/", "./deep//er/file", "none", "deep/none", "a", "a-b")
    assert sorted(paths) == sorted(["metrics.json", "out", "out/a", "out/a/b", "deep", "deep/er", "deep/er/file", "a", "a/z", "a-b", "a-b/z"])
    assert missing == ["deep/none", "none"] and refused == []
    assert manifest.decode(manifest.encode(output.entry for output in manifest.find_outputs(str(work), ["a", "a-b", "deep/er/file"])[0]), hashed=False)


def test_an_output_inside_another_one_comes_once(work):
    write_files(work, {"out/a/b": b"x", "out/c": b"y"})
    assert found(work, "out", "out/a", "out/a/b") == (["out", "out/a", "out/a/b", "out/c"], [], [])


def test_a_declared_link_inside_brings_what_it_leads_to(work, target):
    write_files(work, {"runs/7/model": b"weights", "real": b"file"})
    (work / "latest").symlink_to("runs/7")
    (work / "one").symlink_to(work / "real")
    pulled = pull(work, ["latest", "one"], target)
    assert (target / "latest" / "model").read_bytes() == b"weights" and not (target / "latest").is_symlink()
    assert (target / "one").read_bytes() == b"file" and not (target / "one").is_symlink() and pulled.refused == []


def test_what_lies_outside_is_refused_and_never_read(work, tmp_path, target):
    secret = write_files(tmp_path / "secret", {"key": b"PRIVATE"})
    (work / "out").symlink_to(secret)
    (work / "file").symlink_to(secret / "key")
    (work / "folder").mkdir()
    (work / "folder" / "up").symlink_to("../../secret/key")
    (work / "folder" / "absolute").symlink_to(secret / "key")
    (work / "parent").symlink_to(secret)
    (work / "sideways").symlink_to("../secret/../work/folder")       # ends inside
    pulled = pull(work, ["out", "file", "folder", "parent/key", "sideways"], target)
    assert {path for path, _ in pulled.refused} == {"out", "file", "parent/key", "folder/up", "folder/absolute", "sideways/up", "sideways/absolute"}
    assert all("out" in why or "absolute" in why for _, why in pulled.refused)
    assert all(b"PRIVATE" not in path.read_bytes() for path in target.rglob("*") if path.is_file())
    assert sorted(os.listdir(target)) == ["folder", "sideways"]


def test_a_parent_that_is_a_link_to_a_folder_inside_becomes_a_folder(work, target):
    write_files(work, {"real/data/x": b"1"})
    (work / "way").symlink_to("real")
    pulled = pull(work, ["way/data/x"], target)
    assert (target / "way" / "data" / "x").read_bytes() == b"1" and pulled.missing == [] and not (target / "way").is_symlink()


def test_what_is_neither_file_nor_folder_is_refused_and_the_rest_comes(work, target):
    os.mkfifo(work / "fifo")
    write_files(work, {"out/a": b"x"})
    os.mkfifo(work / "out" / "pipe")
    (work / "loop").symlink_to("loop")
    (work / "dangling").symlink_to("nowhere")
    pulled = pull(work, ["fifo", "out", "loop", "dangling"], target)
    assert dict(pulled.refused)["fifo"] == "is neither a file nor a folder" and dict(pulled.refused)["out/pipe"] == "a FIFO"
    assert "loop" in dict(pulled.refused) and pulled.missing == ["dangling"] and pulled.files == 1


def test_an_output_that_cannot_be_read_is_refused_and_what_is_beside_it_comes(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/") and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)

    def check():
        work = write_files(tmp_path / "mine", {"out/a": b"a", "out/closed/x": b"x", "out/secret": b"s", "out/z": b"z", "shut/x": b"x"})
        for name in ("out/closed", "out/secret", "shut"):
            (work / name).chmod(0)
        target = tmp_path / "run" / "outputs"
        target.parent.mkdir()
        pulled = pull(work, ["out", "shut", "shut/x"], target)
        assert {"out/closed", "out/secret", "shut"} <= {path for path, _ in pulled.refused}
        assert all("Permission denied" in why for _, why in pulled.refused)
        assert (target / "out" / "a").read_bytes() == b"a" and (target / "out" / "z").read_bytes() == b"z"
        assert not (target / "out" / "secret").exists()

    as_nobody(check)


def test_no_workdir_means_that_all_outputs_are_missing(tmp_path):
    assert found(tmp_path / "never", "a", "b/c") == ([], ["a", "b/c"], [])


# ---- pull ------------------------------------------------------------------------------------------------------------------------

def test_outputs_are_what_rsync_would_have_brought(tmp_path, work, target):
    make_odd_tree(work / "out")
    (work / "out" / "absolute").unlink()                     # leads out
    pulled = pull(work, ["out"], target)
    assert pulled.refused == [] and pulled.missing == []
    (work / "out" / "closed").chmod(0o755)                   # folders stay writable to their owner here, so that they can be removed
    (target / "out" / "closed").chmod(0o755)
    theirs, ours = looks(work / "out"), looks(target / "out")
    assert ours == {path: (mode.replace("0o101644", "0o100644").replace("0o102755", "0o100755"), *rest) for path, (mode, *rest) in theirs.items()}


def test_a_second_pull_sends_nothing_that_is_here(work, target):
    write_files(work, {"out/a": os.urandom(1 << 20), "out/b": b"b"})
    pull(work, ["out"], target)
    assert pull(work, ["out"], target) == (2, (1 << 20) + 1, [], [])
    assert pull.stream.peer.written < 2000
    (target / "out" / "b").write_bytes(b"touched here")
    pull(work, ["out"], target)
    assert (target / "out" / "b").read_bytes() == b"b"


def test_another_file_of_the_same_size_and_time_is_brought_all_the_same(work, target):
    """Times can be set: by `touch -d`, `cp -p`, tar, a build that wants to be reproducible."""
    for name, size in (("small", 4), ("large", 300_000)):
        for folder, byte in ((target, b"A"), (work, b"B")):
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(byte * size)
            os.utime(folder / name, ns=(10**18, 10**18))
    pulled = pull(work, ["small", "large"], target)
    assert (pulled.files, pulled.size_bytes) == (2, 300_004)
    assert (target / "small").read_bytes() == b"BBBB" and set((target / "large").read_bytes()) == {ord("B")}


def test_a_pull_cut_anywhere_shows_only_whole_files_and_the_next_one_brings_the_rest(tmp_path, work):
    write_files(work, {"out/a": b"a" * 50, "out/b/c": b"c" * 700, "out/d": b"d" * 200, "out/e": b""})
    (work / "out" / "l").symlink_to("a")
    (tmp_path / "all").mkdir()
    pull(work, ["out", "none"], tmp_path / "all" / "outputs")
    size, requests = pull.stream.peer.written, pull.stream.written
    for cuts in [{"cut_answers": at} for at in range(0, size, 19)] + [{"cut": at} for at in range(0, requests, 17)]:
        run = tmp_path / f"{next(iter(cuts))}-{next(iter(cuts.values()))}"
        run.mkdir()
        with pytest.raises(LinkError):
            pull(work, ["out", "none"], run / "outputs", **cuts)
        for path in (run / "outputs").rglob("*"):
            if path.is_file():
                assert path.read_bytes() == (work / path.relative_to(run / "outputs")).read_bytes(), cuts
        assert os.listdir(run) in ([], ["outputs"])
        assert pull(work, ["out", "none"], run / "outputs").missing == ["none"]
        assert looks(run / "outputs" / "out") == looks(work / "out"), cuts
        assert os.listdir(run) == ["outputs"]


def test_a_large_output_goes_on_where_its_pull_broke_off(work, target):
    write_files(work, {"large": random.Random(2).randbytes(8 << 20), "z": b"z"})
    with pytest.raises(LinkError):
        pull(work, ["large", "z"], target, cut_answers=6 << 20)
    assert not (target / "large").exists()
    seen = []
    pull(work, ["large", "z"], target, progress=lambda *args: seen.append(args))
    assert pull.stream.peer.written < 3 << 20 and seen[-1][:2] == ((8 << 20) + 1, (8 << 20) + 1)
    assert (target / "large").read_bytes() == (work / "large").read_bytes() and os.listdir(target.parent) == ["outputs"]


def test_the_part_of_an_output_that_was_damaged_is_not_gone_on_from(work, target):
    write_files(work, {"large": random.Random(2).randbytes(8 << 20)})
    with pytest.raises(LinkError):
        pull(work, ["large"], target, cut_answers=6 << 20)
    part, = (target.parent / ".incoming-outputs").iterdir()
    with open(part, "r+b") as stream:
        stream.write(b"zeros after a power loss")
    pull(work, ["large"], target)
    assert (target / "large").read_bytes() == (work / "large").read_bytes()


def test_a_pull_waits_for_the_end_of_the_run_and_tells_that_it_lives(work, target):
    write_files(work, {"out": b"early"})
    asked = []

    def over(timeout_s):
        asked.append(timeout_s)
        if len(asked) == 3:
            write_files(work, {"out": b"late"})
        return len(asked) > 2

    pull(work, ["out"], target, over=over)
    assert (target / "out").read_bytes() == b"late" and len(asked) == 3


def test_a_full_disk_here_is_named_with_free_and_needed_bytes_and_a_second_pull_completes(tmp_path, work, monkeypatch):
    write_files(work, {f"out/f{number}": os.urandom(1 << 20) for number in range(8)})
    with tiny_disk(tmp_path / "disk", "6m") as disk:
        target = disk / "run" / "outputs"
        target.parent.mkdir()
        with pytest.raises(TransferError) as caught:
            pull(work, ["out"], target)
        assert str(target) in str(caught.value) and "8,388,608 bytes" in str(caught.value) and "still on the node" in str(caught.value)
        assert "`gpurun fetch run-1` brings them" in str(caught.value)
        really, lie = landing.free_bytes, [1 << 30]
        monkeypatch.setattr(landing, "free_bytes", lambda path: lie.pop() if lie else really(path))     # another takes the room meanwhile
        with pytest.raises(TransferError) as caught:
            pull(work, ["out"], target)
        text = str(caught.value)
        assert "'out/f" in text and "No space left" in text and "free, needed are" in text and "still on the node" in text
        assert os.listdir(target.parent) == ["outputs"]
        here = [path for path in target.rglob("*") if path.is_file()]
        assert 3 <= len(here) <= 6 and all(path.read_bytes() == (work / path.relative_to(target)).read_bytes() for path in here)
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert pull(work, ["out"], target).files == 8
        assert pull.stream.peer.written < (9 - len(here)) << 20
        assert looks(target / "out") == looks(work / "out")


# ---- pull: while the run goes on -------------------------------------------------------------------------------------------------

class Growing:
    """Makes a file grow, or another change, while it is sent: at the first byte that arrives."""

    def __init__(self, change):
        self.change = change

    def __call__(self, done, total, name):
        if done and self.change is not None:
            self.change, change = None, self.change
            change()


def test_a_live_pull_does_not_wait_and_brings_a_growing_file_as_it_was_when_it_was_listed(work, target):
    data = os.urandom(8 << 20)                               # more than is in flight: the rest is read after it grew
    write_files(work, {"out/log": data, "out/z": b"z"})

    def grow():
        with open(work / "out" / "log", "ab") as stream:
            stream.write(b"more")

    def never(timeout_s):
        raise AssertionError("a live pull waits for nothing")

    pulled = pull(work, ["out", "later"], target, progress=Growing(grow), over=never, live=True)
    assert pulled == (2, (8 << 20) + 1, ["later"], [])
    assert (work / "out" / "log").stat().st_size == (8 << 20) + 4 and (target / "out" / "log").read_bytes() == data
    assert pull(work, ["out"], target, live=True).size_bytes == (8 << 20) + 5
    assert (target / "out" / "log").read_bytes() == data + b"more"


def test_a_file_that_gets_shorter_or_goes_in_a_live_pull_is_named_and_the_rest_comes(work, target):
    write_files(work, {"out/a": os.urandom(8 << 20), "out/b": b"b", "out/c": b"c"})

    def change():
        os.truncate(work / "out" / "a", 100)

    pulled = pull(work, ["out"], target, progress=Growing(change), live=True)
    assert [path for path, why in pulled.refused] == ["out/a"] and "changes while it is sent" in pulled.refused[0][1]
    assert sorted(os.listdir(target / "out")) == ["b", "c"] and pulled.files == 2


def test_a_checkpoint_that_another_one_replaces_in_a_live_pull_does_not_come_in_half(work, target):
    write_files(work, {"out/a": os.urandom(8 << 20), "out/checkpoint": b"old", "new": b"new and longer"})
    pulled = pull(work, ["out"], target, progress=Growing(lambda: os.replace(work / "new", work / "out" / "checkpoint")), live=True)
    assert "changes while it is sent" in dict(pulled.refused)["out/checkpoint"] and os.listdir(target / "out") == ["a"]
    assert pull(work, ["out"], target, live=True).refused == [] and (target / "out" / "checkpoint").read_bytes() == b"new and longer"


def test_a_file_that_grows_in_a_pull_of_the_end_is_still_a_fault(work, target):
    write_files(work, {"out": os.urandom(8 << 20)})
    pulled = pull(work, ["out"], target, progress=Growing(lambda: os.truncate(work / "out", 9 << 20)))
    assert pulled.files == 0 and "changes while it is sent" in dict(pulled.refused)["out"]


@pytest.mark.parametrize("live", [False, True], ids=["end", "live"])
def test_a_pull_that_was_killed_goes_on_in_another_process_with_a_file_that_grew_meanwhile(tmp_path, work, target, live):
    data = random.Random(3).randbytes(16 << 20)
    write_files(work, {"large": data})
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import streams as t
from pathlib import Path
kill = lambda done, total, name: done < 9 << 20 or os.kill(os.getpid(), signal.SIGKILL)
t.pull(Path({str(work)!r}), ["large"], Path({str(target)!r}), progress=kill, live={live})
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=300, cwd=ROOT).returncode == -9
    assert not (target / "large").exists()
    with open(work / "large", "ab") as stream:
        stream.write(b"grown")
    assert pull(work, ["large"], target, live=live).size_bytes == (16 << 20) + 5
    assert pull.stream.peer.written < 8 << 20 and (target / "large").read_bytes() == data + b"grown"
    assert os.listdir(target.parent) == ["outputs"]


# ---- pull: files that are here in an earlier state ---------------------------------------------------------------------------------

LOG = random.Random(4).randbytes(3 << 20)


def grow(path, data):
    with open(path, "ab") as stream:
        stream.write(data)


@pytest.mark.parametrize("live", [False, True], ids=["end", "live"])
def test_of_a_log_that_grew_only_what_is_new_comes(work, target, live):
    write_files(work, {"out/log": LOG, "out/small": b"s" * 1000})
    (work / "out" / "log").chmod(0o640)
    pull(work, ["out"], target, live=True)
    os.link(target / "out" / "log", target.parent / "kept")
    seen = []
    grow(work / "out" / "log", b"n" * 100_000)
    grow(work / "out" / "small", b"more")
    assert pull(work, ["out"], target, progress=lambda *args: seen.append(args), live=live) == (2, len(LOG) + 101_004, [], [])
    assert 101_000 < pull.stream.peer.written < 104_000 and seen[-1][:2] == (len(LOG) + 101_004, len(LOG) + 101_004)
    assert looks(target / "out") == looks(work / "out") and os.listdir(target.parent) == ["kept", "outputs"] or os.listdir(target.parent) == ["outputs", "kept"]
    assert (target.parent / "kept").read_bytes() == LOG              # a file that is here is never written into


def test_a_file_whose_time_alone_changed_costs_no_byte(work, target):
    write_files(work, {"log": LOG})
    pull(work, ["log"], target)
    os.utime(work / "log", ns=(1, 1))
    assert pull(work, ["log"], target).files == 1 and pull.stream.peer.written < 1000
    assert looks(target) == looks(work)


@pytest.mark.parametrize("live", [False, True], ids=["end", "live"])
def test_a_file_that_has_grown_and_changed_before_its_old_end_is_not_glued_together_but_comes_whole_at_once(work, target, live):
    names = ["out/a", "out/log", "out/z"]
    write_files(work, {name: LOG for name in names})
    pull(work, ["out"], target, live=True)
    for name in names:
        grow(work / name, b"n" * 1000)
    with open(work / "out" / "log", "r+b") as stream:
        stream.write(b"another beginning")
    seen = []
    assert pull(work, ["out"], target, progress=lambda *args: seen.append(args), live=live) == (3, 3 * (len(LOG) + 1000), [], [])
    assert len(LOG) < pull.stream.peer.written < len(LOG) + 10_000 and seen[-1][:2] == (3 * (len(LOG) + 1000),) * 2
    assert looks(target / "out") == looks(work / "out") and os.listdir(target.parent) == ["outputs"]


def test_a_file_that_changed_again_before_it_came_whole_is_named_and_the_rest_stays(work, target, monkeypatch):
    write_files(work, {"a": LOG, "b": b"b"})
    pull(work, ["a", "b"], target)
    with open(work / "a", "r+b") as stream:
        stream.write(b"another beginning")
    really = landing._Landing._take_again
    monkeypatch.setattr(landing._Landing, "_take_again", lambda self, channel: (os.truncate(work / "a", 70_000), really(self, channel))[1])
    pulled = pull(work, ["a", "b"], target)
    assert pulled.files == 1 and "changes while it is sent" in dict(pulled.refused)["a"] and (target / "a").read_bytes() == LOG


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(LOG[:1 << 20]), lambda path: path.write_bytes(LOG[:-9] + b"other end" + b"and more")],
                         ids=["shorter", "other end"])
def test_a_file_that_does_not_seem_to_begin_with_what_is_here_comes_whole_without_a_question(work, target, change):
    write_files(work, {"log": LOG})
    pull(work, ["log"], target)
    change(work / "log")
    size = (work / "log").stat().st_size
    pull(work, ["log"], target)
    assert size < pull.stream.peer.written < size + 1000 and pull.stream.written < 700 and looks(target) == looks(work)


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.truncate(path, 100), lambda path: path.write_bytes(b"mine" * 1_000_000)],
                         ids=["gone", "shorter", "another"])
def test_a_file_that_changes_here_while_its_rest_comes_is_brought_whole(work, target, change):
    write_files(work, {"a": LOG, "b": LOG})
    pull(work, ["a", "b"], target)
    grow(work / "a", b"n" * (1 << 20))
    pull(work, ["a", "b"], target, progress=Growing(lambda: change(target / "a")))
    assert looks(target) == looks(work)


@pytest.mark.parametrize("how", ["broken", "killed"])
def test_the_rest_of_a_file_that_broke_off_goes_on_where_it_was_unless_gpurun_was_killed(tmp_path, work, target, how):
    write_files(work, {"log": LOG})
    pull(work, ["log"], target)
    grow(work / "log", random.Random(5).randbytes(8 << 20))
    if how == "broken":
        with pytest.raises(LinkError):
            pull(work, ["log"], target, cut_answers=6 << 20)
    else:
        script = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import streams as t
from pathlib import Path
kill = lambda done, total, name: done < 9 << 20 or os.kill(os.getpid(), signal.SIGKILL)
t.pull(Path({str(work)!r}), ["log"], Path({str(target)!r}), progress=kill)
"""
        assert subprocess.run([sys.executable, "-c", script], timeout=300, cwd=ROOT).returncode == -9
        assert len(list((target.parent / ".incoming-outputs").iterdir())) == 1
    assert (target / "log").read_bytes() == LOG
    pull(work, ["log"], target)
    assert pull.stream.peer.written < (3 << 20 if how == "broken" else (8 << 20) + 1000)
    assert looks(target) == looks(work) and os.listdir(target.parent) == ["outputs"]


def test_a_node_that_lies_twice_about_what_is_behind_a_file_gets_an_error_and_nothing_changes(tmp_path, work, target):
    write_files(work, {"out": LOG})
    pull(work, ["out"], target)
    before = looks(target)
    lie = [(b"P", b""), (b"D", b"data"), (b"E", SHA), (b"Z", b"")]
    for frames, says in (([*lie, (b"D", b"data"), (b"E", SHA), (b"Z", b"")], "arrived broken"), ([*lie, (b"P", b"")], "a frame b'P' inside a file"),
                         ([*lie, (b"S", b"")], "a frame b'S' inside a file"), ([(b"P", b""), (b"D", b"data"), (b"D", b"d")], "longer than the node said")):
        assert says in node_says(tmp_path, [out("out", size=len(LOG) + 4)], frames, target=target)
    assert looks(target) == before


def test_an_operator_who_does_not_say_that_he_takes_tails_gets_whole_files(work, target, monkeypatch):
    write_files(work, {"log": LOG})
    pull(work, ["log"], target)
    grow(work / "log", b"more")
    really = transfer.Channel.put
    monkeypatch.setattr(transfer.Channel, "put", lambda self, fields: really(self, {name: fields[name] for name in fields if name != "tails"}))
    pull(work, ["log"], target)
    assert pull.stream.peer.written > len(LOG) and looks(target) == looks(work)


def test_a_part_of_a_file_that_is_another_one_now_is_not_gone_on_from(work, target):
    write_files(work, {"large": random.Random(2).randbytes(8 << 20)})
    for size in (8 << 20, 3 << 20):                          # of the same size, and shorter than the part
        with pytest.raises(LinkError):
            pull(work, ["large"], target, cut_answers=6 << 20)
        write_files(work, {"large": random.Random(size).randbytes(size)})
        pull(work, ["large"], target, live=True)
        assert (target / "large").read_bytes() == (work / "large").read_bytes() and os.listdir(target.parent) == ["outputs"]
        write_files(work, {"large": random.Random(size + 1).randbytes(8 << 20)})


@pytest.mark.parametrize("begun", [{"KEY": 3}, {"KEY": [3]}, {"KEY": ["3", "0" * 64]}, {"KEY": [3, "no hash"]}, {"KEY": [-1, "0" * 64]}, []])
def test_parts_that_make_no_sense_are_refused(work, begun):
    write_files(work, {"large": bytes(8 << 20)})
    if begun:
        begun = {transfer.key_of("large"): begun["KEY"]}
    with node(lambda channel, header: transfer.serve_pull(channel, header, str(work), lambda timeout_s: True)) as stream:
        channel = transfer.Channel(stream)
        channel.put({"type": "Pull", "run_id": "run-1", "outputs": ["large"], "begun": begun})
        channel.send_packed(b"L", [])
        channel.writer.flush()
        with pytest.raises(TransferError, match="begun must"):
            while True:
                channel.frame()


def test_the_whole_workdir_can_be_had(work, target):
    make_odd_tree(work / "deep")
    write_files(work, {"a": b"a"})
    (work / "deep" / "absolute").unlink()
    pulled = pull(work, ["."], target, live=True)
    assert pulled.refused == [] and pulled.missing == [] and (target / "a").read_bytes() == b"a"
    assert {path: look[2] for path, look in looks(target).items()} == {path: look[2] for path, look in looks(work).items()}
    assert pull(work, [".", "a"], target, live=True).files == pulled.files and pull.stream.peer.written < 20_000
    (work / "deep" / "closed").chmod(0o755)
    (target / "deep" / "closed").chmod(0o755)


# ---- pull: into a folder of the user's ---------------------------------------------------------------------------------------------

@pytest.fixture
def mine(tmp_path):
    """A folder with files of the user's own."""
    return write_files(tmp_path / "mine", {"notes": b"notes", "out/own": b"own", "out/model": b"of last week", "other/file": b"other"})


def test_a_users_folder_keeps_all_that_is_not_an_output_untouched_and_unread(work, mine, monkeypatch):
    write_files(work, {"out/model": b"model", "out/deep/x": b"x"})
    before = {path: look for path, look in looks(mine).items() if path not in ("out", "out/model")}
    read, really = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(str(path)) or really(path))
    pull(work, ["out"], mine, live=True)
    assert {path for path in read if path.startswith(str(mine))} == {str(mine / "out")}        # a million files beside it cost nothing
    after = looks(mine)
    assert {path: after[path] for path in before} == before
    assert set(after) - set(before) == {"out", "out/model", "out/deep", "out/deep/x"}
    assert (mine / "out" / "model").read_bytes() == b"model" and not list(mine.parent.glob(".incoming*"))


def test_an_existing_file_is_replaced_in_one_step(work, mine):
    write_files(work, {"out/model": b"model"})
    with open(mine / "out" / "model", "rb") as old:             # whoever reads it goes on reading the old one
        pull(work, ["out/model"], mine, live=True)
        assert old.read() == b"of last week" and (mine / "out" / "model").read_bytes() == b"model"
    (mine / "out" / "model").unlink()
    (mine / "out" / "model").symlink_to("../notes")
    pull(work, ["out/model"], mine, live=True)
    assert (mine / "out" / "model").read_bytes() == b"model" and (mine / "notes").read_bytes() == b"notes"


@pytest.mark.parametrize("theirs, ours, named", [
    ({"out/own": b"x", "out/z": b"z"}, {"out/own/kept": b"kept"}, "out/own"),       # a folder where a file comes
    ({"out/own/x": b"x", "out/z": b"z"}, {"out/own": b"kept"}, "out/own"),          # a file where a folder comes
])
def test_a_name_of_another_kind_in_a_users_folder_is_an_error_that_names_it_and_nothing_is_lost(tmp_path, work, theirs, ours, named):
    mine = write_files(tmp_path / "mine", ours)
    write_files(work, theirs)
    before = looks(mine)
    with pytest.raises(TransferError, match=f"the output '{named}' is a .*'{mine / named}' is .*still on the node.*run the same command again"):
        pull(work, ["out"], mine, live=True)
    assert looks(mine) == before and not list(tmp_path.glob(".incoming*"))


def test_what_was_fetched_while_the_job_ran_and_is_gone_at_its_end_is_no_output(work, target):
    write_files(work, {"out/kept": b"kept", "out/tmp/a": b"a", "single": b"v1"})
    write_files(work, {"turned": b"a file"})
    pull(work, ["out", "single", "turned"], target, live=True)
    write_files(target, {"out/tmp/mine": b"mine", "notes": b"mine"})
    for name in ("out/tmp/a", "single", "turned"):
        (work / name).unlink()
    (work / "out/tmp").rmdir()
    write_files(work, {"turned/x": b"a folder now"})
    assert pull(work, ["out", "single", "turned"], target).missing == ["single"]
    here = {str(path.relative_to(target.parent)): path.read_bytes() for path in target.parent.rglob("*") if path.is_file() and work not in path.parents}
    earlier = target.name + "-earlier"
    assert here == {f"{target.name}/out/kept": b"kept", f"{target.name}/notes": b"mine", f"{target.name}/turned/x": b"a folder now",
                    f"{earlier}/out/tmp/a": b"a", f"{earlier}/out/tmp/mine": b"mine", f"{earlier}/single": b"v1", f"{earlier}/turned": b"a file"}


def test_a_link_of_the_users_is_not_followed_out_of_the_folder(tmp_path, work, mine):
    write_files(work, {"way/a": b"a", "way/b": b"b"})
    write_files(tmp_path, {"elsewhere/a": b"mine"})
    (mine / "way").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferError, match="'way' is a folder on the node"):
        pull(work, ["way/a", "way/b"], mine, live=True)
    assert os.listdir(tmp_path / "elsewhere") == ["a"] and (tmp_path / "elsewhere" / "a").read_bytes() == b"mine"


def test_a_folder_beside_which_nothing_may_be_written_receives_in_itself(tmp_path):
    """Such as a home, or a disk of its own."""
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/") and folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    work = write_files(tmp_path / "work", {"out/a": b"a", "large": os.urandom(8 << 20)})
    home = tmp_path / "home" / "me"
    home.mkdir(parents=True)
    home.chmod(0o777)

    def check():
        with pytest.raises(LinkError):
            pull(work, ["out", "large"], home, live=True, cut_answers=6 << 20)
        assert [name for name in os.listdir(home) if name.startswith(".")] == [".incoming-me"]
        assert pull(work, ["out", "large"], home, live=True).files == 2
        assert pull.stream.peer.written < 5 << 20 and sorted(os.listdir(home)) == ["large", "out"]

    as_nobody(check)
    assert os.listdir(home.parent) == ["me"]


def test_a_disk_of_its_own_receives_in_itself(tmp_path, work):
    write_files(work, {"out/a": b"a"})
    with tiny_disk(tmp_path / "disk", "2m") as disk:
        assert pull(work, ["out"], disk, live=True).files == 1
        assert os.listdir(disk) == ["out"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "work"]


def test_two_pulls_into_one_folder_at_once_do_not_disturb_each_other(work, target):
    """`gpurun fetch` while another gpurun, which drives the run, waits for its end."""
    write_files(work, {"out/a": os.urandom(3 << 20), "b": b"b"})
    inner = []

    def fetch(timeout_s):
        inner.append(pull(work, ["out"], target, live=True))
        return True

    assert pull(work, ["out", "b"], target, over=fetch).files == 2 and inner[0].files == 1
    assert looks(target) == looks(work) and os.listdir(target.parent) == ["outputs"]


def test_what_somebody_else_has_put_where_a_pull_receives_is_left_alone(tmp_path, work, target):
    write_files(work, {"out": b"out"})
    victim = write_files(tmp_path / "victim", {"x": b"x"})
    (target.parent / ".incoming-outputs").symlink_to(victim)
    (target.parent / ".incoming-outputs-2").write_bytes(b"a file")
    write_files(target.parent, {".incoming-outputs-3/notes": b"mine"})
    pull(work, ["out"], target)
    assert (target / "out").read_bytes() == b"out" and os.listdir(victim) == ["x"]
    assert (target.parent / ".incoming-outputs-3" / "notes").read_bytes() == b"mine"


def test_thousands_of_outputs_need_few_open_files_on_either_side(tmp_path):
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.path[:0] = [{str(ROOT / "tests")!r}]
import streams as t
from pathlib import Path
work, run = Path({str(tmp_path)!r}) / "work", Path({str(tmp_path)!r}) / "run"
run.mkdir()
t.write_files(work, {{f"out/{{n // 500}}/{{n}}": b"%d" % n for n in range(4000)}})
assert t.pull(work, ["out"], run / "outputs").files == 4000
store = t.Store(str(Path({str(tmp_path)!r}) / "node"))
assert t.push(store, run / "outputs").files == 4000
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=ROOT)
    assert looks(tmp_path / "run" / "outputs" / "out") == looks(tmp_path / "work" / "out")


# ---- pull: a node that lies -------------------------------------------------------------------------------------------------------

def node_says(tmp_path, entries, frames=(), declared=("out",), summary=None, missing=(), listing=None, error=(TransferError, WireError), target=None):
    """The error of a pull from a node that answers with these; nothing outside the outputs folder may have changed."""
    target = target or tmp_path / "run" / "outputs"
    target.parent.mkdir(exist_ok=True)
    write_files(tmp_path, {"victim/.bashrc": b"mine", "run/run.json": b"{}"})
    before = {path: look for path, look in looks(tmp_path).items() if not path.startswith(("run/outputs", "run/.incoming"))}

    def lies(channel, header):
        list(channel.read_packed(b"L", 1 << 20))
        channel.put({"entries": len(entries), "bytes": 0, "refused": []} if summary is None else summary)
        channel.send_packed(b"M", (json.dumps(missing).encode(),))
        if listing is None:
            channel.send_packed(b"L", (b"".join(map(manifest._line, entries)).encode(),) if entries and isinstance(entries[0], str) else
                                (manifest.encode(entries),))
        else:
            for kind, payload in listing:
                channel.writer.frame(kind, payload)
        for kind, payload in frames:
            channel.writer.frame(kind, payload)
        channel.writer.flush()
        with contextlib.suppress(LinkError):
            channel.frame()

    with node(lies) as stream:
        try:
            with pytest.raises(error) as caught:
                landing.pull(stream, "run-1", list(declared), str(target), quiet)
        finally:
            stream.abort()
    after = {path: look for path, look in looks(tmp_path).items() if not path.startswith(("run/outputs", "run/.incoming"))}
    changed = {path for path in before | after if before.get(path, ())[::2] != after.get(path, ())[::2]}      # the times of folders move
    assert changed == set()
    assert not (target.parent / ".incoming-outputs").exists()
    return str(caught.value)


def out(name, kind="file", size=4, target=""):
    return Entry(name, kind, 0o755, 1, size if kind == "file" else 0, "", target)


SHA = hashlib.sha256(b"data").digest()
DATA = [(b"D", b"data"), (b"E", SHA)]


@pytest.mark.parametrize("entries, says", [
    ([out("../victim/.bashrc")], "may not be used"),
    ([out("/etc/cron.d/evil")], "may not be used"),
    ([out("out", "dir"), out("out/../../victim/.bashrc")], "may not be used"),
    ([out("out", "dir"), out("out/.")], "may not be used"),
    ([out("out", "dir"), out("out//x")], "may not be used"),
    ([out("other")], "not a declared output"),
    ([out("outside")], "not a declared output"),
    ([out("out", "link", target="../../victim"), out("out/.bashrc")], "no folder of the listing"),
    ([out("out", "link", target="../../victim")], "leads out"),
    ([out("out", "link", target="/etc/passwd")], "absolute"),
    ([out("out", "dir"), out("out/a", "link", target="b/../../..")], "'..' behind a name"),
    ([out("out", "dir"), out("out/a"), out("out/a")], "a second entry"),
    ([out("out"), out("out/x")], "no folder of the listing"),
    ([out("out", "file", size=1 << 62)], "no room here"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_name_that_an_evil_node_sends_is_refused_before_anything_is_written(tmp_path, entries, says):
    assert says in node_says(tmp_path, entries, DATA * len(entries) + [(b"Z", b"")]).replace("the outputs have no room here", "no room here")
    assert not list((tmp_path / "run" / "outputs").rglob("*"))


@pytest.mark.parametrize("frames, says", [
    ([(b"D", b"data and more"), (b"E", SHA), (b"Z", b"")], "longer than the node said"),
    ([(b"D", b"dat"), (b"E", hashlib.sha256(b"dat").digest()), (b"Z", b"")], "arrived broken"),
    ([(b"D", b"DATA"), (b"E", SHA), (b"Z", b"")], "arrived broken"),
    ([(b"D", b"data"), (b"E", b""), (b"Z", b"")], "arrived broken"),
    ([(b"S", b""), (b"Z", b"")], "isn't here and the node doesn't send it"),
    ([(b"R", b""), *DATA, (b"Z", b"")], "which isn't here"),
    ([(b"P", b""), *DATA, (b"Z", b"")], "isn't the beginning of it"),
    ([(b"D", b"da"), (b"Z", b"")], "inside a file"),
    ([*DATA, *DATA, (b"Z", b"")], "more outputs than were listed"),
    ([(b"Z", b"")], "inside a file"),
    ([(b"!", b"the node's own words")], "the node's own words"),
    ([(b"?", b"")], "inside a file"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_contents_that_are_not_what_the_node_said_never_get_their_name(tmp_path, frames, says):
    assert says in node_says(tmp_path, [out("out")], frames)
    assert not [path for path in (tmp_path / "run" / "outputs").rglob("*") if path.read_bytes() != b"data"]


@pytest.mark.parametrize("parts, says", [
    ({"listing": [(b"L", b"[\"p\",420,1,0,\"\",\"out\"]\n"), (b"l", b"")]}, "compressed bytes that aren't"),
    ({"listing": [(b"L", zlib.compress(b'["p",420,1,0,"","out"]\n')), (b"l", b"")]}, "neither a file nor"),      # a device, say
    ({"listing": [(b"L", zlib.compress(b"x" * (1 << 20))), (b"l", b"")]}, "longer than"),
    ({"summary": {"refused": "all"}}, "list of refused"),
    ({"summary": {"refused": [["a"]]}}, "list of refused"),
    ({"missing": ["never declared"]}, "nobody declared"),
    ({"missing": {"a": 1}}, "nobody declared"),
    ({"missing": [["out"]]}, "nobody declared"),
])
def test_an_answer_that_makes_no_sense_is_an_error(tmp_path, parts, says):
    assert says in node_says(tmp_path, [out("out")], DATA + [(b"Z", b"")], **parts)


def test_a_listing_that_unpacks_to_far_more_than_it_is_ends_with_an_error_and_takes_little_memory(tmp_path):
    script = f"""
import sys, zlib
sys.path[:0] = [{str(ROOT / "tests")!r}]
import test_pull as t
from pathlib import Path
pack = zlib.compressobj(9)
bomb = b"".join([pack.compress(bytes(1 << 20)) for _ in range(300)] + [pack.flush()])
before = t.peak_mb()
print(t.node_says(Path({str(tmp_path)!r}), [], listing=[(b"L", bomb[at:at + 500000]) for at in range(0, len(bomb), 500000)] + [(b"l", b"")]))
pack = zlib.compressobj(9)
bomb = b"".join([pack.compress(b"".join(t.manifest._line(t.out("out/%d" % (n * 1000 + m))).encode() for m in range(1000))) for n in range(3)] + [pack.flush()])
t.manifest.MAX_ENTRIES = 2000
print(t.node_says(Path({str(tmp_path)!r}), [], listing=[(b"L", t.zlib.compress(t.manifest._line(t.out("out", "dir")).encode() + t.zlib.decompress(bomb))), (b"l", b"")]))
print(t.peak_mb() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=300, cwd=ROOT)
    bomb, many, grown = done.stdout.decode().splitlines()
    assert "longer than" in bomb and "more than 2000 entries" in many and int(grown) < 30


def test_names_that_this_disk_cannot_tell_apart_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "folds", lambda folder: (True, True))
    says = node_says(tmp_path, [out("out", "dir"), out("out/Model"), out("out/model")], DATA * 2 + [(b"Z", b"")])
    assert "can't tell its name from" in says
    says = node_says(tmp_path, [out("out", "dir"), out("out/é"), out("out/e\u0301")], DATA * 2 + [(b"Z", b"")])
    assert "can't tell its name from" in says


def test_a_link_of_an_earlier_pull_is_never_written_through(tmp_path, work, target):
    write_files(work, {"out/folder/file": b"data", "out/plain": b"data"})
    write_files(tmp_path, {"victim/file": b"mine"})
    (target / "out").mkdir(parents=True)
    (target / "out" / "folder").symlink_to(tmp_path / "victim")
    (target / "out" / "plain").symlink_to(tmp_path / "victim" / "file")
    with pytest.raises(TransferError, match="'out/folder' is a folder on the node"):
        pull(work, ["out"], target, live=True)
    assert (target / "out" / "folder").is_symlink()            # may be the user's own: left to the user
    pull(work, ["out"], target)                                # at the end the outputs are the job's, and that one goes beside
    assert (tmp_path / "victim" / "file").read_bytes() == b"mine"
    assert looks(target) == looks(work)
    assert os.readlink(f"{target}-earlier/out/folder") == str(tmp_path / "victim")


def test_a_folder_where_an_output_file_or_link_belongs_goes_beside_at_the_end_and_is_an_error_before(work, target):
    for kind in ("file", "link"):
        name = f"out-{kind}"
        write_files(work, {"data": b"data"})
        os.link(work / "data", work / name) if kind == "file" else None
        (work / "folder").mkdir(exist_ok=True)
        if kind == "link":
            (work / "folder" / "l").symlink_to("../data")
        place = target / name if kind == "file" else target / "folder" / "l"
        write_files(place, {"own": b"own"})
        asked = [name] if kind == "file" else ["folder"]
        with pytest.raises(TransferError, match=f"{place.name}' is a {kind} on the node, and here '{place}' is a folder.*run the same command again"):
            pull(work, asked, target, live=True)
        assert (place / "own").read_bytes() == b"own"
        pull(work, asked, target)
        assert not place.is_dir() and os.path.lexists(place)


def test_over_a_real_link_an_operator_that_gives_up_frees_the_node_at_once(tmp_path, work, iroh_pair):
    write_files(work, {f"out/f{number:02}": os.urandom(1 << 20) for number in range(48)})
    ended = threading.Event()

    def serve(stream):
        as_agent(stream, lambda channel, header: transfer.serve_pull(channel, header, str(work), lambda timeout_s: True))
        ended.set()

    opened = iroh_pair(serve)
    with tiny_disk(tmp_path / "disk", "3m") as disk:
        with pytest.raises(TransferError, match="no room here"):
            landing.pull(opened(), "run-1", ["out"], str(disk / "outputs"), quiet)
        assert ended.wait(30)
