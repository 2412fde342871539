"""Trees: walk against lstat, hashes, listings that only have one form, and names from a node that isn't trusted."""

import hashlib
import json
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpurun import manifest
from gpurun.errors import TransferError, UnsafeNameError, WireError, WorkspaceError
from gpurun.manifest import Entry, Guard, Skipped

SHA = hashlib.sha256(b"").hexdigest()


def file(path, size=0):
    return Entry(path, "file", 0o644, 5, size, SHA)


def folder(path):
    return Entry(path, "dir", 0o755, 5)


def link(path, target):
    return Entry(path, "link", 0o777, 5, target=target)


# ---- walk ------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def odd_tree(tmp_path):
    """Everything that a name, a mode or a kind can be."""
    root = os.fsencode(tmp_path / "tree")
    os.mkdir(root)
    for name in [b"plain", b"two words", b" lead", b"trail ", b"'single'", b'"double"', b"line\nbreak", b"\r", b"tab\t", b"-rf", b"back\\slash", b"caf\xe9",
                 b"\xff\xfe", "é".encode(), "e\u0301".encode(), b"$HOME", b"*", b"[a]", b"~", b"...", b".hidden", b"\x1b[31mred", b"\x7f", "\u202eevil".encode(),
                 "😀".encode(), b"n" * 255, b"CON", b"a:b", b"#", b"!"]:
        with open(os.path.join(root, name), "wb") as out:
            out.write(name)
    for path in [b"empty", b"deep/" + b"/".join([b"d%d" % i for i in range(60)]), b"dir \xff\n/in", b"closed", b"a", b"a.b", b"a-b"]:
        os.makedirs(os.path.join(root, path))
    for path in [b"a/z", b"a.b/z", b"a-b/z", b"dir \xff\n/in/x", b"closed/x"]:
        open(os.path.join(root, path), "wb").close()
    for name, target in [(b"dangling", b"nowhere"), (b"absolute", b"/etc/passwd"), (b"to_dir", b"a"), (b"up", b"../../.."), (b"self", b"self"),
                         (b"odd", b"\xff \n\\'"), (b"dot", b".")]:
        os.symlink(target, os.path.join(root, name))
    for name, mode in [(b"run.sh", 0o755), (b"secret", 0o400), (b"ro", 0o444), (b"none", 0o000), (b"sticky", 0o1644), (b"setgid", 0o2755)]:
        path = os.path.join(root, name)
        open(path, "wb").close()
        os.chmod(path, mode)
    os.chmod(os.path.join(root, b"closed"), 0o555)
    with open(os.path.join(root, b"sparse"), "wb") as out:
        out.truncate(5 << 30)
    os.link(os.path.join(root, b"plain"), os.path.join(root, b"hard"))
    os.utime(os.path.join(root, b"plain"), ns=(1, 1234567890123456789))
    os.utime(os.path.join(root, b"ro"), ns=(1, -1500000001))
    os.utime(os.path.join(root, b"a"), ns=(1, 999))
    os.utime(os.path.join(root, b"dangling"), ns=(1, 777), follow_symlinks=False)
    os.mkfifo(os.path.join(root, b"fifo"))
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(root)
        try:
            listener.bind(b"socket")
        finally:
            os.chdir(here)
        yield os.fsdecode(root)
    os.chmod(os.path.join(root, b"closed"), 0o755)


def independent_walk(root):
    """By os.walk and lstat over bytes, sharing nothing with manifest.walk."""
    found = {}
    top = os.fsencode(root)
    for where, folders, files in os.walk(top):
        for name in folders + files:
            full = os.path.join(where, name)
            st_ = os.lstat(full)
            path = full[len(top) + 1:]
            if stat.S_ISREG(st_.st_mode):
                found[path] = ("file", st_.st_mode & 0o7777, st_.st_mtime_ns, st_.st_size, b"")
            elif stat.S_ISDIR(st_.st_mode):
                found[path] = ("dir", st_.st_mode & 0o7777, st_.st_mtime_ns, 0, b"")
            elif stat.S_ISLNK(st_.st_mode):
                found[path] = ("link", 0o777, st_.st_mtime_ns, 0, os.readlink(full))
    return found


def as_found(entries):
    return {os.fsencode(e.path): (e.kind, e.mode, e.mtime_ns, e.size, os.fsencode(e.target)) for e in entries}


def test_walk_of_an_odd_tree(odd_tree):
    skipped = []
    entries = list(manifest.walk(odd_tree, on_skip=skipped.append))
    assert as_found(entries) == independent_walk(odd_tree)
    assert len({entry.path for entry in entries}) == len(entries) > 100
    assert sorted(skipped) == [("fifo", "a FIFO"), ("socket", "a socket")]
    seen = {""}
    for entry in entries:
        assert entry.path.rpartition("/")[0] in seen
        manifest.check_name(entry.path)
        seen.add(entry.path)
    tops = [entry.path for entry in entries if "/" not in entry.path]
    assert tops == sorted(tops)
    again = manifest.decode(manifest.encode(entries), hashed=False)
    assert again == entries and manifest.encode(again) == manifest.encode(manifest.walk(odd_tree))


def test_walk_as_rsync_lists_it(odd_tree):
    """rsync -a, another program's opinion of the same tree: kinds, modes, sizes, names."""
    rsync = shutil.which("rsync")
    if not rsync:
        pytest.skip("rsync is the oracle here")
    done = subprocess.run([rsync, "-an", "--no-specials", "--no-devices", "--out-format=%B|%l|%n", odd_tree + "/", odd_tree + ".new/"], stdout=subprocess.PIPE,
                          check=True, env={"PATH": os.environ["PATH"], "LC_ALL": "C"})
    theirs = {}
    for line in done.stdout.split(b"\n"):
        if line.count(b"|") >= 2 and not line.startswith(b"skipping "):
            perms, size, name = line.split(b"|", 2)
            name = re.sub(rb"\\#(\d{3})", lambda found: bytes([int(found[1], 8)]), name)        # how rsync prints odd bytes
            theirs[name.rstrip(b"/") if name.endswith(b"/") else name] = perms, int(size)
    theirs.pop(b".", None)
    ours = {}
    for entry in manifest.walk(odd_tree):
        ours[os.fsencode(entry.path)] = stat.filemode(entry.mode)[1:].encode(), entry.size
    kinds = {os.fsencode(entry.path): entry.kind for entry in manifest.walk(odd_tree)}
    assert set(theirs) == set(ours)
    assert {name: row[0] for name, row in theirs.items()} == {name: row[0] for name, row in ours.items()}
    assert {name: row[1] for name, row in theirs.items() if kinds[name] == "file"} == {name: row[1] for name, row in ours.items() if kinds[name] == "file"}


def test_walk_root_may_be_a_link(tmp_path):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    os.symlink("real", tmp_path / "root")
    os.symlink("..", tmp_path / "real" / "up")
    assert [(entry.path, entry.kind) for entry in manifest.walk(str(tmp_path / "root"))] == [("sub", "dir"), ("up", "link")]


def test_walk_keep_is_asked_first_and_prunes(tmp_path):
    for path in ("a/x", "b/x", "c"):
        os.makedirs(tmp_path / os.path.dirname(path), exist_ok=True)
        (tmp_path / path).write_text("")
    os.symlink("a", tmp_path / "l")
    os.mkfifo(tmp_path / "p")
    asked, skipped = [], []
    found = manifest.walk(str(tmp_path), lambda path, is_dir: asked.append((path, is_dir)) or path not in ("a", "p"), skipped.append)
    assert [entry.path for entry in found] == ["b", "b/x", "c", "l"]
    assert sorted(asked) == [("a", True), ("b", True), ("b/x", False), ("c", False), ("l", False), ("p", False)] and not skipped


def test_walk_what_vanishes_was_never_there(tmp_path):
    for path in ("a/x", "b/x", "c/x"):
        os.makedirs(tmp_path / os.path.dirname(path))
        (tmp_path / path).write_text("")
    (tmp_path / "d").write_text("")

    def keep(path, is_dir):
        if path == "d":
            os.unlink(tmp_path / "d")
        if path == "b/x":
            os.unlink(tmp_path / "b/x")
        return True
    found = []
    for entry in manifest.walk(str(tmp_path), keep):
        found.append(entry.path)
        if entry.path == "c":
            shutil.rmtree(tmp_path / "c")
    assert found == ["a", "a/x", "b", "c"]


def test_walk_while_the_tree_changes(tmp_path):
    stop = threading.Event()

    def churn():
        rng = random.Random(1)
        while not stop.is_set():
            name = tmp_path / str(rng.randrange(20))
            try:
                if name.is_symlink() or name.is_file():
                    name.unlink()
                elif name.is_dir():
                    shutil.rmtree(name, ignore_errors=True)
                else:
                    rng.choice([name.mkdir, name.touch, lambda: name.symlink_to("x")])()
            except OSError:
                pass
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            entries = list(manifest.walk(str(tmp_path)))
            assert manifest.decode(manifest.encode(entries), hashed=False) == entries
    finally:
        stop.set()
        thread.join()


def as_nobody(folder, action):
    """What `action` says in `folder` without root's right to read everything: in a child that has changed its user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.chdir(folder)
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writer, action().encode("utf-8"))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def error_of(call, *args):
    try:
        call(*args)
    except WorkspaceError as err:
        return str(err)
    return "no error"


@pytest.mark.parametrize("mode, named", [(0o000, "./locked"), (0o444, "./locked/file")])
def test_walk_names_a_folder_that_cannot_be_read(tmp_path, mode, named):
    tmp_path.chmod(0o755)
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "file").write_text("")
    (tmp_path / "locked").chmod(mode)
    try:
        said = as_nobody(tmp_path, lambda: error_of(lambda: list(manifest.walk("."))))
        assert "can't read '%s': Permission denied" % named in said and "exclude" in said
    finally:
        (tmp_path / "locked").chmod(0o755)


def test_hash_file_names_a_file_that_cannot_be_read(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "a\nb").write_text("")
    (tmp_path / "a\nb").chmod(0)
    assert "can't read 'a\\nb': Permission denied" in as_nobody(tmp_path, lambda: error_of(manifest.hash_file, "a\nb"))


def test_walk_names_a_root_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="nowhere': No such file"):
        list(manifest.walk(str(tmp_path / "nowhere")))
    with pytest.raises(WorkspaceError, match="file': Not a directory"):
        list(manifest.walk(str(tmp_path / "file")))


def test_walk_names_a_path_that_is_too_long(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(17):
            os.mkdir("n" * 255, dir_fd=fd)
            inner = os.open("n" * 255, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        with pytest.raises(WorkspaceError, match="File name too long. Shorten"):
            list(manifest.walk(str(tmp_path)))
    finally:
        os.close(fd)
        shutil.rmtree(tmp_path, ignore_errors=True)


def test_walk_reads_names_as_utf8_in_any_locale(odd_tree):
    """The same listing from a process that Python started with another file system encoding."""
    code = ("import sys; sys.path.insert(0, sys.argv[2]); from gpurun import manifest; e = list(manifest.walk(sys.argv[1])); "
            "sys.stdout.buffer.write(manifest.encode(e)); "
            "[manifest.hash_file(manifest.local_path(sys.argv[1], x.path)) for x in e if x.kind == 'file' and x.size < 1 << 20]")
    wanted = manifest.encode(manifest.walk(odd_tree))
    here = os.path.dirname(os.path.dirname(manifest.__file__))
    for env in ({"LC_ALL": "C"}, {"LANG": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "POSIX"}, {}):
        done = subprocess.run([sys.executable, "-c", code, odd_tree, here], env=env, stdout=subprocess.PIPE, check=True)
        assert done.stdout == wanted, env


def test_walk_of_many_files_is_quick_and_small(tmp_path):
    (tmp_path / "file").write_text("")
    for number in range(200):
        os.mkdir(tmp_path / str(number))
        for inner in range(100):                     # hard links: many names, made in no time
            os.link(tmp_path / "file", tmp_path / str(number) / str(inner))
    start = time.process_time()
    entries = list(manifest.walk(str(tmp_path)))
    spent = time.process_time() - start
    assert len(entries) == 20201 and spent < 1
    start = time.process_time()
    data = manifest.encode(entry._replace(sha256=SHA) if entry.kind == "file" else entry for entry in entries)
    assert len(manifest.decode(data)) == 20201
    assert time.process_time() - start < 2


# ---- hash_file -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [0, 1, manifest.BLOCK - 1, manifest.BLOCK, manifest.BLOCK + 1, 3 * manifest.BLOCK + 7])
def test_hash_file(tmp_path, size):
    data = random.Random(size).randbytes(size) if hasattr(random, "randbytes") else os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    os.utime(tmp_path / "f", ns=(5, 1234567890123456789))
    assert manifest.hash_file(str(tmp_path / "f")) == (hashlib.sha256(data).hexdigest(), os.stat(tmp_path / "f"))


def changing(monkeypatch, path, times, change):
    """`change` the file during its first `times` reads."""
    real, left = os.read, [times]

    def read(fd, size):
        data = real(fd, size)
        if left[0]:
            left[0] -= 1
            change(path)
        return data
    monkeypatch.setattr(os, "read", read)


def grow(path):
    with open(path, "ab") as out:
        out.write(b"more")


def rewrite(path):
    """Same size, and the mtime is put back."""
    before = os.stat(path)
    with open(path, "r+b") as out:
        out.write(os.urandom(3))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shrink(path):
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize("change", [grow, rewrite, shrink])
def test_hash_file_reads_a_changed_file_again(tmp_path, monkeypatch, change):
    path = tmp_path / "f"
    path.write_bytes(b"a" * 5000)
    time.sleep(0.02)                   # the clock of ctime ticks every few ms
    changing(monkeypatch, path, 2, change)
    digest, found = manifest.hash_file(str(path))
    assert (digest, found.st_size, found.st_mtime_ns) == (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, path.stat().st_mtime_ns)


@pytest.mark.parametrize("change", [grow, shrink])
def test_hash_file_names_a_file_that_always_changes(tmp_path, monkeypatch, change):
    path = tmp_path / "training\n.log"
    path.write_bytes(b"a" * 5000)
    changing(monkeypatch, path, 99, change)
    with pytest.raises(WorkspaceError, match=r"training\\n.log' changes while it is read"):
        manifest.hash_file(str(path))


def test_hash_file_of_what_is_no_file(tmp_path):
    with pytest.raises(WorkspaceError, match="gone") as caught:
        manifest.hash_file(str(tmp_path / "gone"))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    os.mkfifo(tmp_path / "fifo")
    os.symlink("/etc/passwd", tmp_path / "link")
    for name in ("fifo", "link", "."):
        with pytest.raises(WorkspaceError):
            manifest.hash_file(str(tmp_path / name))


# ---- listings --------------------------------------------------------------------------------------------------------------------

parts = st.one_of(st.sampled_from(["a", "b", " ", "\n", "\\", '"', "-", "é", "\udcff", "\u2028", "😀", "...", "\x1b", "e\u0301"]),
                  st.binary(min_size=1, max_size=8).filter(lambda raw: b"/" not in raw and b"\0" not in raw and raw not in (b".", b"..")).map(os.fsdecode))
mtimes = st.integers(-2 ** 63, 2 ** 63 - 1)


@st.composite
def listings(draw):
    entries, folders, taken = [], [""], set()
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from(folders))
        path = (above + "/" if above else "") + draw(parts)
        if path in taken:
            continue
        taken.add(path)
        kind = draw(st.sampled_from(["file", "dir", "link"]))
        mode = draw(st.integers(0, 0o7777))
        if kind == "file":
            entries.append(Entry(path, kind, mode, draw(mtimes), draw(st.integers(0, 2 ** 63 - 1)), hashlib.sha256(path.encode("utf-8", "replace")).hexdigest()))
        elif kind == "dir":
            entries.append(Entry(path, kind, mode, draw(mtimes)))
            folders.append(path)
        else:
            entries.append(Entry(path, kind, mode, draw(mtimes), target=draw(st.lists(parts, min_size=1, max_size=3).map("/".join))))
    return entries


@settings(max_examples=150, deadline=None)
@given(listings())
def test_a_listing_comes_back(entries):
    data = manifest.encode(entries)
    assert manifest.decode(data) == entries
    assert data.isascii() and data.count(b"\n") == len(entries)
    for line in data.splitlines():
        json.loads(line)
    assert manifest.tree_id(data) == hashlib.sha256(data).hexdigest()


def test_a_listings_lines_are_as_documented():
    lines = [line.strip().split("   ")[0] for line in manifest.__doc__.splitlines() if line.strip().startswith('["')]
    assert len(lines) == 3
    data = "".join(line.replace("<64 hex digits of SHA-256>", SHA) + "\n" for line in lines).encode()
    entries = manifest.decode(data)
    assert [entry.kind for entry in entries] == ["dir", "file", "link"] and manifest.encode(entries) == data


def raw(*fields):
    return json.dumps(list(fields), separators=(",", ":")).encode() + b"\n"


GOOD = raw("f", 420, 5, 0, SHA, "a")
BAD = {
    "no line feed": GOOD[:-1], "half": GOOD[:20] + b"\n", "empty line": b"\n", "no JSON": b"hello\n", "an object": b'{"f":1}\n', "a number": b"5\n",
    "five": raw("f", 420, 5, 0, SHA), "seven": raw("f", 420, 5, 0, SHA, "a", 1), "UTF-8": '["f",420,5,0,"%s","é"]\n'.encode().replace(b"%s", SHA.encode()),
    "blank": GOOD.replace(b",", b", "), "trailing": GOOD[:-1] + b" \n", "two on a line": GOOD[:-1] + GOOD, "leading": b" " + GOOD, "escape": GOOD.replace(b'"a"', b'"\\u0061"'),
    "device": raw("b", 420, 5, 0, SHA, "a"), "kind": raw("file", 420, 5, 0, SHA, "a"), "kind list": raw(["f"], 420, 5, 0, SHA, "a"), "kind null": raw(None, 420, 5, 0, SHA, "a"),
    "mode bool": raw("f", True, 5, 0, SHA, "a"), "mode text": raw("f", "420", 5, 0, SHA, "a"), "mode big": raw("f", 0o10000, 5, 0, SHA, "a"), "mode minus": raw("f", -1, 5, 0, SHA, "a"),
    "mtime float": raw("f", 420, 5.0, 0, SHA, "a"), "mtime big": raw("f", 420, 2 ** 63, 0, SHA, "a"), "mtime small": raw("f", 420, -2 ** 63 - 1, 0, SHA, "a"),
    "size minus": raw("f", 420, 5, -1, SHA, "a"), "size big": raw("f", 420, 5, 2 ** 63, SHA, "a"), "size NaN": GOOD.replace(b",0,", b",NaN,"), "size 1e9": GOOD.replace(b",0,", b",1e9,"),
    "size -0": GOOD.replace(b",0,", b",-0,"), "size huge": GOOD.replace(b",0,", b",%s," % (b"9" * 40000)), "size inf": GOOD.replace(b",0,", b",Infinity,"),
    "hash short": raw("f", 420, 5, 0, SHA[1:], "a"), "hash upper": raw("f", 420, 5, 0, SHA.upper(), "a"), "hash line": raw("f", 420, 5, 0, SHA + "\n", "a"), "no hash": raw("f", 420, 5, 0, "", "a"),
    "hash list": raw("f", 420, 5, 0, [SHA], "a"), "dir size": raw("d", 493, 5, 1, "", "a"), "dir hash": raw("d", 493, 5, 0, SHA, "a"), "link size": raw("l", 511, 5, 1, "b", "a"),
    "link empty": raw("l", 511, 5, 0, "", "a"), "link NUL": raw("l", 511, 5, 0, "a\0b", "a"), "link surrogate": raw("l", 511, 5, 0, "\ud800", "a"),
    "link long": raw("l", 511, 5, 0, "a" * 4096, "a"), "link list": raw("l", 511, 5, 0, ["b"], "a"),
    "twice": GOOD + GOOD, "below a file": GOOD + raw("f", 420, 5, 0, SHA, "a/b"), "below a link": raw("l", 511, 5, 0, "b", "a") + raw("f", 420, 5, 0, SHA, "a/b"),
    "no parent": raw("f", 420, 5, 0, SHA, "x/y"), "child first": raw("f", 420, 5, 0, SHA, "x/y") + raw("d", 493, 5, 0, "", "x"), "link over folder": raw("d", 493, 5, 0, "", "x") + raw("l", 511, 5, 0, "/", "x"),
    "deep": b"[" * 60000 + b"\n", "deep closed": b"[" * 30000 + b"]" * 30000 + b"\n", "long": b"[" + b" " * 70000 + GOOD[1:], "NUL byte": b"\0\n", "binary": bytes(range(128, 256)) + b"\n",
}
UNSAFE = ["", "/", "/etc/passwd", ".", "..", "a/..", "../a", "a/../b", "a//b", "a/", "/a", "./a", "a/.", "a\0b", "n" * 256, "é" * 128, "d/" * 2048 + "f", "\ud800", "\udc00", "a\udbff", "\udcc3\udca9",
          "../../.bashrc", "\udc41", "\udc2e\udc2e"]


@pytest.mark.parametrize("name", sorted(BAD))
def test_decode_refuses(name):
    with pytest.raises(WireError):
        manifest.decode(BAD[name])
    with pytest.raises(WireError):
        manifest.decode(raw("d", 493, 5, 0, "", "first") + BAD[name])


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names_are_refused_everywhere(name):
    with pytest.raises(UnsafeNameError) as caught:
        manifest.check_name(name)
    assert str(caught.value).isprintable()
    with pytest.raises(UnsafeNameError):
        Guard(["."], False, False).admit(file(name))
    for entry in (file(name), folder(name), link(name, "a")):
        with pytest.raises(WireError):
            manifest.decode(manifest.encode([folder("a"), entry]))


@pytest.mark.parametrize("name", [None, 5, b"a", ["a"]])
def test_a_name_that_is_no_text_is_refused(name):
    with pytest.raises(UnsafeNameError):
        manifest.check_name(name)


def test_decode_without_hashes_takes_none_or_a_right_one():
    entries = [Entry("a", "file", 0o644, 1, 7), file("b")]
    assert manifest.decode(manifest.encode(entries), hashed=False) == entries
    with pytest.raises(WireError):
        manifest.decode(BAD["hash short"], hashed=False)


def test_decode_bounds_the_number_of_entries(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_ENTRIES", 10)
    eleven = [file("f%02d" % number) for number in range(11)]
    assert manifest.decode(manifest.encode(eleven[:10])) == eleven[:10]
    with pytest.raises(WorkspaceError, match="11 files"):
        manifest.encode(eleven)
    monkeypatch.setattr(manifest, "MAX_ENTRIES", 11)
    data = manifest.encode(eleven)
    monkeypatch.setattr(manifest, "MAX_ENTRIES", 10)
    with pytest.raises(WireError, match="more than 10"):
        manifest.decode(data)


@settings(max_examples=200, deadline=None)
@given(listings(), st.data())
def test_decode_of_a_damaged_listing_is_an_error_or_a_tree(entries, data):
    """Whatever a peer sends: WireError, or entries whose one listing is what it sent."""
    sent = bytearray(manifest.encode(entries))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sent)))
        sent[at:at + data.draw(st.integers(0, 3))] = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"..", b"/", b'"', b"\n", b",", b"\\u0000", b"\\ud800", b"-1"])))
    try:
        got = manifest.decode(bytes(sent))
    except WireError as err:
        assert str(err).isprintable() and len(str(err)) < 1000
        return
    assert manifest.encode(got) == bytes(sent)


# ---- the guard -----------------------------------------------------------------------------------------------------------------------

def admitted(entries, declared=("out", "a/b"), folds_case=False, normalises=False, **more):
    guard = Guard(declared, folds_case, normalises, **more)
    for entry in entries:
        guard.admit(entry)
    return True


FINE = [
    [file("out")], [folder("out"), file("out/x"), folder("out/d"), link("out/d/l", "../x"), link("out/d/m", "..")], [folder("a"), file("a/b")],
    [folder("a"), folder("a/b"), file("a/b/c")], [file("a/b"), folder("a")], [file("out/x/y"), folder("out/x"), folder("out")], [link("out", "elsewhere")],
    [link("out/l", "../other/place")], [link("out/l", "./x/./y//z/")], [file("out/line\nbreak"), file("out/\x1b[31m"), file("out/-rf"), file("out/back\\slash"), file("out/\udcff")],
    [file("out/X"), file("out/x"), file("out/é"), file("out/e\u0301")], [file("out/huge", 2 ** 62)],
]
EVIL = {
    "undeclared": [file("other")], "a longer name": [file("outside")], "a declared one's parent as a file": [file("a")], "… as a link": [link("a", "out")],
    "beside a declared one": [folder("a"), file("a/c")], "folder beside": [folder("b")], "above": [file("../out")], "absolute": [file("/out")], "dots below": [file("out/../../x")],
    "twice": [file("out"), file("out")], "folder then link": [folder("out"), link("out", "/")], "link then file through it": [link("out", "a"), file("out/x")],
    "link below, then through": [folder("out"), link("out/l", "x"), file("out/l/y")], "file through it, then the link": [file("out/l/y"), link("out/l", "x")],
    "deep through": [link("out/l", "x"), file("out/l/y/z")], "file as folder": [file("out/f"), file("out/f/x")], "contents, then a file": [file("out/f/x"), file("out/f")],
    "link /": [link("out/l", "/")], "link /etc": [link("out/l", "/etc/passwd")], "link ..": [link("out", "..")], "link out": [link("out/l", "../..")],
    "link far out": [link("out/a/b", "../../../x")], "link in and out": [link("out/l", "../../root/x")], "dots behind a name": [link("out/l", "d/../x")],
    "dots behind a link": [link("out/d/d/k", "../../.."), link("out/x", "d/d/k/../..")], "link empty": [link("out/l", "")], "link NUL": [link("out/l", "a\0b")],
    "link second spelling": [link("out/l", "\udcc3\udca9")], "link dots as surrogates": [link("out/l", "\udc2e\udc2e/\udc2e\udc2e")], "second spelling": [link("out/\udcc3\udca9", "x")],
    "a device": [Entry("out/d", "block", 0o644, 5)], "a FIFO": [Entry("out/d", "fifo", 0o644, 5)], "no kind": [Entry("out/d", "", 0o644, 5)], "size": [Entry("out", "file", 0o644, 5, -1, SHA)],
    "huge": [Entry("out", "file", 0o644, 5, 2 ** 63, SHA)],
}


@pytest.mark.parametrize("entries", FINE)
def test_guard_admits(entries):
    assert admitted(entries)


@pytest.mark.parametrize("name", sorted(EVIL))
def test_guard_refuses(name):
    with pytest.raises(UnsafeNameError) as caught:
        admitted(EVIL[name])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("folds_case, normalises, entries", [
    (True, False, [file("out/X"), file("out/x")]), (True, False, [folder("out"), file("OUT/x")]), (True, False, [link("out/L", "x"), file("out/l/f")]),
    (True, False, [file("out/l/f"), link("out/L", "x")]), (True, False, [file("out/A/1"), file("out/a/2")]), (True, False, [file("out/\u017f"), file("out/s")]),
    (True, False, [file("out/É"), file("out/é")]), (False, True, [file("out/é"), file("out/e\u0301")]), (False, True, [link("out/é", "x"), file("out/e\u0301/f")]),
    (True, True, [file("out/É"), file("out/e\u0301")]), (True, True, [link("out/l", "x"), file("out/L\u200c/f")]), (False, True, [file("out/\u212b"), file("out/Å")]),
])
def test_guard_refuses_twins_where_the_disk_folds_them(folds_case, normalises, entries):
    assert admitted(entries, declared=("out", "OUT"))
    with pytest.raises(UnsafeNameError):
        admitted(entries, declared=("out", "OUT"), folds_case=folds_case, normalises=normalises)


def test_guard_on_a_folding_disk_takes_what_differs():
    assert admitted([folder("out"), folder("out/A"), file("out/A/x"), file("out/A/y"), file("out/b"), link("out/l", "A")], folds_case=True, normalises=True)


@pytest.mark.parametrize("name", ["..\\x", "C:\\x", "c:x", "a:stream", "NUL", "nul.txt", "d/COM1", "com1.x/y", "dot.", "blank ", "d./x", "a?", "a\x01"])
def test_guard_on_windows(name):
    assert admitted([file("out/" + name)], windows=False)
    with pytest.raises(UnsafeNameError):
        admitted([file("out/" + name)], windows=True)
    assert admitted([file("out/console.txt"), file("out/a.b"), file("out/.hidden")], windows=True)


def test_guard_bounds_the_number_of_entries(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_ENTRIES", 10)
    with pytest.raises(UnsafeNameError, match="more than 10"):
        admitted([file("out/%d" % number) for number in range(11)])


def test_guard_takes_declared_outputs_as_people_write_them():
    assert admitted([folder("ckpt"), file("ckpt/x"), file("m.json"), folder("a"), file("a/b")], declared=["ckpt/", "./m.json", "a//b"])
    assert admitted([file("anything"), file("x/y")], declared=["."])
    with pytest.raises(UnsafeNameError):
        admitted([file("x")], declared=[])


names = st.sampled_from(["a", "b", "A", "é", "e\u0301", "..", ".", "out", "c\u200c", "l"])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["file", "dir", "link"]), paths, st.one_of(paths, paths.map("/".__add__))), max_size=12))
@example([("file", "out", ""), ("file", "out/a/a", ""), ("file", "out/a/a", "")])
@example([("link", "out/a/b/l", "../.."), ("link", "out/x", "a/b/l/../.."), ("file", "out/x/f", "")])
def test_what_the_guard_admits_stays_inside(tmp_path_factory, rows):
    """Write what is admitted, naively, and look where everything and every link really is."""
    base = str(tmp_path_factory.mktemp("guard"))
    root = os.path.join(base, "root")
    os.mkdir(root)
    guard = Guard(["out"], False, False)
    for kind, path, target in rows:
        entry = Entry(path, kind, 0o644, 5, 0, SHA if kind == "file" else "", target if kind == "link" else "")
        try:
            guard.admit(entry)
        except UnsafeNameError:
            continue
        where = os.path.join(root, path)
        os.makedirs(where if kind == "dir" else os.path.dirname(where), exist_ok=True)
        if kind == "file":
            os.close(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        elif kind == "link":
            os.symlink(target, where)
    assert os.listdir(base) == ["root"] and os.listdir(root) in ([], ["out"])
    for where, folders, files in os.walk(root):
        for name in folders + files:
            real = os.path.realpath(os.path.join(where, name))
            assert real == root or real.startswith(root + "/")
    shutil.rmtree(base)


def test_output_filter_picks_the_declared_outputs(tmp_path):
    for path in ("out/x/y", "a/b/f", "a/c", "m.json", "other/z", "ab"):
        os.makedirs(tmp_path / os.path.dirname(path), exist_ok=True)
        (tmp_path / path).write_text("")
    found = list(manifest.walk(str(tmp_path), manifest.output_filter(["out/", "a/b", "./m.json", "missing", "ab/c"])))
    assert [entry.path for entry in found] == ["a", "a/b", "a/b/f", "m.json", "out", "out/x", "out/x/y"]
    guard = Guard(["out/", "a/b", "./m.json", "missing", "ab/c"], True, True)
    for entry in found:
        guard.admit(entry)


def test_folds_leaves_nothing_behind(tmp_path):
    assert manifest.folds(str(tmp_path)) == (False, False)
    assert os.listdir(tmp_path) == []
    with pytest.raises(TransferError, match="can't write in"):
        manifest.folds(str(tmp_path / "nowhere"))


# ---- names in messages --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, shown", [
    ("a b.txt", "a b.txt"), ("é😀", "é😀"), ("a\\b", "a\\b"), ("a\nb", "a\\nb"), ("a\\\nb", "a\\\\\\nb"), ("\x1b[31m", "\\x1b[31m"), ("caf\udce9", "caf\\xe9"),
    ("\u202eevil", "\\u202eevil"), ("\ud800", "\\ud800"), ("\x7f\x00\r", "\\x7f\\x00\\r"), ("", "")])
def test_quote_name(name, shown):
    assert manifest.quote_name(name) == shown and shown.isprintable()


@given(st.text(st.characters(), max_size=300))
def test_quote_name_of_anything_can_be_printed(name):
    shown = manifest.quote_name(name)
    assert shown.isprintable()
    shown.encode("utf-8")


def test_skipped_and_entry_are_plain_tuples():
    assert Skipped("a", "b") == ("a", "b") and Entry("a", "dir")._fields == ("path", "kind", "mode", "mtime_ns", "size", "sha256", "target")
