"""Trees for tests: an odd one, what a tree looks like, rsync's opinion of two, a tiny disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

NAMES = [b"plain", b"two words", b" lead", b"trail ", b"'single'", b'"double"', b"line\nbreak", b"\r", b"tab\t", b"-rf", b"back\\slash", b"caf\xe9",
         b"\xff\xfe", "é".encode(), "e\u0301".encode(), b"$HOME", b"*", b"~", b"...", b".hidden", b"\x1b[31mred", "😀".encode(), b"n" * 255, b"a:b"]


def make_odd_tree(root: Path) -> Path:
    """Everything that a name, a mode or a kind can be, with times to the nanosecond."""
    base = os.fsencode(root)
    for path in [b"", b"empty", b"deep/" + b"/".join([b"d%d" % i for i in range(40)]), b"dir \xff\n/in", b"closed", b"a", b"a.b", b"a-b"]:
        os.makedirs(os.path.join(base, path), exist_ok=True)
    for path in NAMES + [b"a/z", b"a.b/z", b"a-b/z", b"dir \xff\n/in/x", b"closed/x"]:
        Path(os.fsdecode(os.path.join(base, path))).write_bytes(path)
    (root / "nothing in it").touch()
    (root / "a" / "twin").write_bytes(b"plain")
    (root / "large").write_bytes(bytes(range(256)) * 9000)
    for name, mode in [("run.sh", 0o755), ("secret", 0o400), ("ro", 0o444), ("sticky", 0o1644), ("setgid", 0o2755)]:
        (root / name).write_text(name)
        (root / name).chmod(mode)
    for name, target in [(b"dangling", b"nowhere"), (b"absolute", b"/etc/passwd"), (b"to_dir", b"a"), (b"self", b"self"), (b"odd", b"\xff \n\\'"),
                         (b"a/up", b"../plain")]:
        os.symlink(target, os.path.join(base, name))
    for number, (folder, names, files) in enumerate(os.walk(base, topdown=False)):
        # Links to folders too: rsync leaves a link's own time alone if it is of the same second.
        for name in files + [b"."] + [name for name in names if os.path.islink(os.path.join(folder, name))]:
            os.utime(os.path.join(folder, name), ns=(1, 1_600_000_000_123_456_789 + number * 1_000_000_007), follow_symlinks=name == b".")
    (root / "closed").chmod(0o555)
    return root


def looks(root: Path) -> dict[str, tuple]:
    """Path: (kind, mode, mtime, what is in it)."""
    seen = {}
    for folder, names, files in os.walk(root):
        for name in names + files:
            path = os.path.join(folder, name)
            state = os.lstat(path)
            inside = (os.readlink(path) if stat.S_ISLNK(state.st_mode) else
                      hashlib.sha256(Path(path).read_bytes()).hexdigest() if stat.S_ISREG(state.st_mode) else "")
            seen[os.path.relpath(path, root)] = (oct(state.st_mode), state.st_mtime_ns, inside)
    return seen


def rsync_differences(one: Path, other: Path) -> str:
    """What rsync -a would change, either way; the roots themselves apart."""
    if shutil.which("rsync") is None:
        pytest.skip("no rsync, which says here what two trees differ in")
    out = ""
    for source, target in ((one, other), (other, one)):
        # Owners stay out of it: gpurun runs as one user. --checksum looks into the files.
        done = subprocess.run(["rsync", "-anic", "--no-o", "--no-g", "--delete", f"{source}/", f"{target}/"], stdout=subprocess.PIPE, check=True)
        out += "\n".join(line for line in done.stdout.decode(errors="replace").splitlines() if line.split()[-1:] != ["./"])
    return out


@contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of that size; skips where this user can't mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "gpurun-test", str(folder)], stderr=subprocess.PIPE)
    if done.returncode:
        pytest.skip(f"can't mount a tmpfs here: {done.stderr.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def as_nobody(work) -> None:
    """Does `work()` in a process whose user isn't root, so that modes count. What it raises fails here."""
    if os.geteuid():
        work()
        return
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
