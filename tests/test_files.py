"""files.py: the old file or the new one, never half of one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from gpurun import files
from gpurun.errors import RecordError


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def child(code, *arguments, **options):
    """A Python process of its own, for what may kill it or change its limits."""
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, timeout=30, **options)


def test_atomic_write_makes_and_replaces_a_file_with_exactly_the_mode(tmp_path):
    path = tmp_path / "record"
    old = os.umask(0o077)
    try:
        files.atomic_write(path, b"one", 0o644)
        assert (path.read_bytes(), mode_of(path)) == (b"one", 0o644)
        files.atomic_write(str(path), b"")
        assert (path.read_bytes(), mode_of(path)) == (b"", 0o600)
    finally:
        os.umask(old)
    assert os.listdir(tmp_path) == ["record"]


def test_atomic_write_takes_a_relative_name_and_the_longest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.atomic_write("x" * 255, b"1")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"1"


def test_atomic_write_replaces_a_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "target").write_text("theirs")
    (tmp_path / "link").symlink_to("target")
    files.atomic_write(tmp_path / "link", b"ours")
    assert (tmp_path / "target").read_text() == "theirs" and not (tmp_path / "link").is_symlink()


def test_atomic_write_killed_before_the_rename_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "record"
    files.atomic_write(path, b"old")
    done = child("import os, signal, sys; from gpurun import files\n"
                 "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
                 "files.atomic_write(sys.argv[1], b'new' * 1000)", path)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    left = [name for name in os.listdir(tmp_path) if name != "record"]
    assert len(left) == 1 and left[0].startswith(files.TEMP_PREFIX)
    files.atomic_write(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_atomic_write_past_a_size_limit_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "record"
    files.atomic_write(path, b"old")
    done = child("import resource, signal, sys; from gpurun import files\n"
                 "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
                 "try: files.atomic_write(sys.argv[1], b'x' * 5000)\n"
                 "except OSError as error: print(error.errno)", path)
    assert done.stdout.strip() == b"27", done.stderr
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["record"]


def test_disk_full_leaves_the_old_file_and_whole_lines(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        files.atomic_write(disk / "record", b"old")
        with pytest.raises(OSError, match="No space left"):
            files.atomic_write(disk / "record", b"x" * 100_000)
        assert (disk / "record").read_bytes() == b"old" and os.listdir(disk) == ["record"]
        line = b"y" * 999 + b"\n"
        with pytest.raises(OSError, match="No space left"):
            for _ in range(100):
                files.append_line(disk / "events", line)
        text = (disk / "events").read_bytes()
        assert text and text == line * (len(text) // 1000)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_make_private_dir_makes_all_parents_private_and_leaves_existing_ones(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    old = os.umask(0o777)
    try:
        assert files.make_private_dir(shared / "a" / "b") == str(shared / "a" / "b")
        files.make_private_dir(shared / "a" / "b")
    finally:
        os.umask(old)
    assert [mode_of(p) for p in (shared, shared / "a", shared / "a" / "b")] == [0o755, 0o700, 0o700]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        files.make_private_dir(tmp_path / "file")


def test_append_line_of_many_threads_keeps_lines_whole(tmp_path):
    path = tmp_path / "events"

    def writer(letter):
        for number in range(200):
            files.append_line(path, letter * (number * 50))

    threads = [threading.Thread(target=writer, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    [t.start() for t in threads], [t.join() for t in threads]
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 801 and all(len(set(line)) <= 1 for line in lines) and mode_of(path) == 0o600


def test_open_append_after_a_torn_line_starts_a_new_one(tmp_path):
    path = tmp_path / "events"
    path.write_bytes(b'{"a": 1}\n{"torn')
    fd = files.open_append(path)
    files.append_line(fd, b'{"b": 2}\n')
    os.close(fd)
    assert path.read_bytes() == b'{"a": 1}\n{"torn\n{"b": 2}\n'


def test_append_line_refuses_two_lines_and_takes_a_descriptor(tmp_path):
    with pytest.raises(ValueError):
        files.append_line(tmp_path / "x", b"a\nb")
    fd = files.open_append(tmp_path / "y")
    files.append_line(fd, b"a")
    files.append_line(fd, b"b\n")
    os.close(fd)
    assert (tmp_path / "y").read_bytes() == b"a\nb\n"


def test_append_line_cut_by_a_limit_takes_its_part_back(tmp_path):
    path = tmp_path / "events"
    done = child("import resource, signal, sys; from gpurun import files\n"
                 "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (15, 15))\n"
                 "files.append_line(sys.argv[1], b'123456789')\n"
                 "try: files.append_line(sys.argv[1], b'abcdefghi')\n"
                 "except OSError: print('full')", path)
    assert done.stdout == b"full\n" and path.read_bytes() == b"123456789\n"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff{}", b"[" * 100_000])
def test_read_json_names_a_broken_file(tmp_path, content):
    path = tmp_path / "run.json"
    assert files.read_json(path) is None and files.read_json(path / "below") is None
    path.write_bytes(content)
    with pytest.raises(RecordError, match="run.json"):
        files.read_json(path)
    path.write_bytes('{"name": "é"}'.encode())
    assert files.read_json(path) == {"name": "é"}


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1234567, "1.2 MB"), (99_949_999, "99.9 MB"),
                                         (99_950_001, "100 MB"), (999_499_999, "999 MB"), (999_500_001, "1.0 GB"),
                                         (10**12, "1.0 TB"), (10**19, "10000 PB")])
def test_human_bytes(count, text):
    assert files.human_bytes(count) == text


def test_sizes_near_a_limit_are_told_apart():
    assert files.exact_bytes(2_100_001) == "2,100,001 bytes (2.1 MB)" != files.exact_bytes(2_100_000)
    assert files.exact_bytes(12) == "12 bytes"


def test_free_bytes_of_a_folder_that_is_still_to_be_made(tmp_path):
    assert files.free_bytes(tmp_path / "not" / "yet") > 0
