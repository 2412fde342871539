"""The workspace: what goes and what stays (the oracle is git), hashes, the survey for `gpurun plan`."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpurun import manifest, workspace
from gpurun.errors import ConfigError, WorkspaceError

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is the oracle here")
GIT_ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}


@pytest.fixture(autouse=True)
def no_cache_yet(tmp_path_factory, monkeypatch):
    """Every scan here is a first one; what later ones know is test_statcache's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def git(where, *args, **more):
    return subprocess.run(["git", *args], cwd=where, env=GIT_ENV, check=False, capture_output=True, **more)


def plant(root, files):
    """Make the files of a tree; what can't be (a file below a file) is left out."""
    for name in files:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if not os.path.isdir(path):
                with open(path, "wb") as out:
                    out.write(b"x")
        except (FileExistsError, NotADirectoryError):
            pass


def taken(root, exclude, **more):
    return [entry.path for entry in workspace.scan(str(root), exclude, **more).entries]


def files_taken(root, exclude):
    return {entry.path for entry in workspace.scan(str(root), exclude).entries if entry.kind != "dir"}


# ---- exclude: the same set of files as git ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    root = tmp_path_factory.mktemp("repo")
    git(root, "init", "-q")
    return root


def git_keeps(repo, patterns):
    (repo / ".gitignore").write_bytes(b"".join(os.fsencode(pattern) + b"\n" for pattern in patterns))
    every = {entry.path for entry in manifest.walk(str(repo), lambda path, is_dir: path != ".git") if entry.kind != "dir"}
    asked = git(repo, "check-ignore", "--no-index", "--stdin", "-z", input=b"".join(os.fsencode(path) + b"\0" for path in sorted(every)))
    assert asked.returncode in (0, 1), asked.stderr
    return every - {os.fsdecode(path) for path in asked.stdout.split(b"\0") if path}


def agrees_with_git(repo, patterns, files):
    for name in os.listdir(os.fsencode(repo)):
        if name != b".git":
            path = os.path.join(os.fsencode(repo), name)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    plant(repo, files)
    wanted = git_keeps(repo, patterns)
    valid = []
    for pattern in patterns:                  # what we refuse is what git never matches: git gets it, we don't
        try:
            workspace.Exclude([pattern], str(repo))
            valid.append(pattern)
        except ConfigError:
            pass
    assert files_taken(repo, valid) == wanted


TREE = ["a", "b.py", "src/a.py", "src/b/a", "src/b/c/a.pyc", "data/x", "data/keep/x", "src/pkg/data/__init__.py", "x y", "x ", "tab\t", "nl\n",
        "*", "[a]", "\\", "a\\b", "!x", "#x", "-x", "é", "caf\udcff", "é/é", "A", "build/out/a", "ab/c", "abx/y/c", "abc", "a]b", "^", "foo/bar/baz",
        "foo/x/bar/baz", "foo/x/y/bar", "d/.hidden/f", ".env", "z/z/z/z/f"]


@needs_git
@pytest.mark.parametrize("patterns", [
    ["/artifacts", "/.venv", "__pycache__"], ["data/*"], ["/data/*", "!/data/keep"], ["data", "!data/keep"], ["*", "!src", "!*.py"],
    ["*", "!src/", "!src/**"], ["*.py[co]", "!/src/b/c/"], ["**/a"], ["src/**/a"], ["src/**"], ["src/**", "!src/b"], ["src/**/"], ["**"], ["**/"], ["*/"],
    ["*/*"], ["/*", "!/src"], ["/**"], ["foo/**/bar"], ["**/bar/**"], ["foo/**/**/baz"], ["ab**/c"], ["ab**"], ["a**/"], ["***/a"], ["a/**b"], ["x\\ "],
    ["x "], ["x  "], ["x\\  "], ["tab\t"], ["tab"], ["nl"], ["nl?"], ["\\!x"], ["!x"], ["\\#x"], ["#x"], ["-x"], ["\\*"], ["[*]"], ["\\[a]"], ["[[]a]"],
    ["[]a]"], ["[!a]"], ["[^a]"], ["[\\^]"], ["a[]]b"], ["a[\\]]b"], ["a[\\\\]b"], ["a\\\\b"], ["\\\\"], ["[z-a]"], ["[a-"], ["[a", "b.py"], ["a\\"],
    ["[[:alpha:]]"], ["[[:upper:][:punct:]]"], ["[[:nope:]]"], ["[[:alpha:]"], ["[[:]a]"], ["[a-c]"], ["[--0]x"], ["?"], ["??"], ["caf?"], ["é"], ["[é]"],
    ["é/?"], ["é/??"], ["/"], ["//"], ["//a"], ["a//"], ["!"], [""], [" "], [" a"], ["src\\/a.py"], ["src/b[/]c"], ["src[a/]b"], [".*"], ["/.*"], ["a", "!a", "a"],
    ["z/*/z"], ["z/**/f"], ["z/*/*/z/f"], ["*/z/*"], ["src/b/", "!src/b/c"], ["src/*", "!src/b/c"], ["**/c/*", "!a.pyc"], ["foo/*/", "!foo/bar"], [".git"],
])
def test_exclude_is_gitignore(repo, patterns):
    agrees_with_git(repo, patterns, TREE)


names = st.sampled_from(["a", "b", "c", "ab", "abc", "a.b", "a b", "b ", "A", "0", "*", "[a]", "!a", "#a", "-", "]", "\\", "a\\b", "é", "\udcff", "a\n", "^", ".a"])
trees = st.lists(st.lists(names, min_size=1, max_size=4).map("/".join), min_size=1, max_size=12)
bits = st.sampled_from(["a", "b", "c", "ab", "a", "b", "/", "/", "/", "*", "?", "**", "/**", "**/", "/**/", "[ab]", "[!a]", "[^b]", "[a-c]", "[]a]", "[\\]b]", "[a-", "[-a]",
                        "[[:alpha:]]", "[[:punct:]-]", "[!-a]", "[c-a]", "[", "]", "\\", "\\*", "\\ ", " ", "!", "#", ".", "-", "é", "^", "[é]", "[a/b]", "[\\!b]"])
patterns = st.lists(st.tuples(st.sampled_from(["", "", "", "!"]), st.lists(bits, min_size=1, max_size=6).map("".join)).map("".join), min_size=1, max_size=5)


@needs_git
@settings(max_examples=int(os.environ.get("GPURUN_EXAMPLES", "150")), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(patterns, trees)
@example(["*", "!a"], ["a/b"])
def test_exclude_is_gitignore_for_any_patterns(repo, patterns, tree):
    agrees_with_git(repo, patterns, tree)


@pytest.mark.parametrize("pattern, words", [
    ("a[", "bracket"), ("a[b", "bracket"), ("a[!]", "bracket"), ("a\\", "backslash"), ("[[:nope:]]", "class"), ("a\nb", "line break"), ("a\0b", "NUL")])
def test_exclude_names_the_pattern_that_git_would_never_match(tmp_path, pattern, words):
    with pytest.raises(ConfigError) as caught:
        workspace.scan(str(tmp_path), ["fine", pattern])
    assert "job.workspace.exclude[1]" in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


def test_an_excluded_folder_is_not_opened(tmp_path, monkeypatch):
    plant(tmp_path, [".venv/lib/a", "src/a", "node_modules/x/y", ".git/objects/00/1"])
    opened = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(os.path.basename(path)) or real(path))
    assert taken(tmp_path, ["/.venv", "node_modules/"]) == ["src", "src/a"]
    assert opened == [tmp_path.name, "src"]


def test_git_folder_stays_unless_taken_back(tmp_path):
    plant(tmp_path, [".git/config", "sub/.git/config", "sub/.gitignore"])
    assert taken(tmp_path, []) == ["sub", "sub/.gitignore"]
    assert taken(tmp_path, ["!/.git"]) == [".git", ".git/config", "sub", "sub/.gitignore"]
    assert taken(tmp_path, ["*", "!*/", "!.gitignore"]) == ["sub", "sub/.gitignore"]
    assert ".git/config" in taken(tmp_path, ["!.git"]) and "sub/.git/config" in taken(tmp_path, ["!.git"])


def test_a_submodules_git_file_stays_too(tmp_path):
    plant(tmp_path, ["sub/.git"])
    assert taken(tmp_path, []) == ["sub"]


def test_the_runs_folder_never_goes(tmp_path):
    plant(tmp_path, ["gpurun-runs/r/run.json", "a/gpurun-runs/x", "a/b", "out/runs/r/run.json", "out/kept"])
    (tmp_path / "c").write_text("")
    assert taken(tmp_path, ["!gpurun-runs", "!**"], runs_dir=str(tmp_path / "out" / "runs")) == ["a", "a/b", "c", "out", "out/kept"]
    os.symlink(tmp_path, tmp_path.with_suffix(".link"))
    assert "out/runs" not in taken(tmp_path.with_suffix(".link"), [], runs_dir=str(tmp_path / "out" / "runs"))
    assert "out/runs" not in taken(tmp_path, [], runs_dir=str(tmp_path.with_suffix(".link") / "out" / "runs"))
    assert "a/b" in taken(tmp_path, [], runs_dir=str(tmp_path.parent / "elsewhere"))
    with pytest.raises(ConfigError, match="--runs-dir"):
        taken(tmp_path, [], runs_dir=str(tmp_path))


def test_no_wildcard_no_pathspec():
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from gpurun import workspace; workspace.Exclude(['/artifacts', '.venv/', '!a/b'], '.'); "
            "assert 'pathspec' not in sys.modules; workspace.Exclude(['*.pyc'], '.'); assert 'pathspec' in sys.modules")
    subprocess.run([sys.executable, "-c", code, os.path.dirname(os.path.dirname(workspace.__file__))], check=True)


# ---- scan ------------------------------------------------------------------------------------------------------------------------

@pytest.fixture(params=[False, True], ids=["alone", "threads"])
def threads(request, monkeypatch):
    """The same with threads, which otherwise only large files get."""
    if request.param:
        monkeypatch.setattr(workspace, "BIG_FILE", 1)
        monkeypatch.setattr(workspace, "BIG_BYTES", 1)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return request.param


def test_scan_hashes_every_file_in_order(tmp_path, threads, count=700):
    for number in range(count):
        path = tmp_path / ("d%d" % (number % 7)) / ("f%d" % number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%d" % number * (number % 50))
    os.mkfifo(tmp_path / "fifo")
    seen = []
    found = workspace.scan(str(tmp_path), ["f1"], on_progress=lambda *args: seen.append(args))
    entries = [entry for entry in found.entries if entry.kind == "file"]
    assert [entry.path for entry in found.entries] == [entry.path for entry in manifest.walk(str(tmp_path), lambda path, is_dir: path[3:] != "f1")]
    for entry in entries:
        assert entry.sha256 == hashlib.sha256((tmp_path / entry.path).read_bytes()).hexdigest()
    assert len(entries) == count - 1 and found.excluded_count == 1
    assert found.total_bytes == sum(entry.size for entry in entries) and found.skipped == [("fifo", "a FIFO")]
    assert seen[-1] == (len(entries), found.total_bytes, "") and len(seen) == len(entries) + 1
    assert {name for _, _, name in seen} == {entry.path for entry in entries} | {""}
    assert [row[0] for row in seen] == sorted(row[0] for row in seen)
    assert manifest.decode(manifest.encode(found.entries)) == found.entries


def test_same_tree_same_id(tmp_path, threads):
    plant(tmp_path, ["a/%d" % number for number in range(400)])
    os.symlink("0", tmp_path / "a" / "link")
    ids = {manifest.tree_id(manifest.encode(workspace.scan(str(tmp_path), ["*7"]).entries)) for _ in range(4)}
    assert len(ids) == 1
    (tmp_path / "a" / "0").write_text("y")
    assert manifest.tree_id(manifest.encode(workspace.scan(str(tmp_path), ["*7"]).entries)) not in ids


def test_a_file_that_vanishes_before_it_is_hashed_was_never_there(tmp_path, threads, count=400):
    plant(tmp_path, ["a/%03d" % number for number in range(count)])
    found = workspace.scan(str(tmp_path), [], on_progress=lambda files, size, name: os.unlink(tmp_path / "a/001") if name == "a/001" else None)
    assert "a/001" not in [entry.path for entry in found.entries] and len(found.entries) == count


def test_a_file_that_always_changes_is_named(tmp_path, threads, monkeypatch, count=400):
    plant(tmp_path, ["log/%03d" % number for number in range(count)])
    real = os.read

    def read(fd, size):
        if os.readlink("/proc/self/fd/%d" % fd).endswith("log/002"):
            with open(tmp_path / "log/002", "ab") as out:
                out.write(b"more")
        return real(fd, size)
    monkeypatch.setattr(os, "read", read)
    with pytest.raises(WorkspaceError, match="log/002' changes while it is read"):
        workspace.scan(str(tmp_path), [])


def test_ctrl_c_ends_a_scan(tmp_path, threads):
    plant(tmp_path, ["a/%03d" % number for number in range(400)])
    before = threading.active_count()

    def stop(files, size, name):
        if files > 50:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        workspace.scan(str(tmp_path), [], on_progress=stop)
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_root_is_named_when_it_is_missing_or_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(WorkspaceError, match="'%s'" % (tmp_path / name)):
            workspace.scan(str(tmp_path / name), [])


def test_a_small_workspace_is_quick(tmp_path):
    plant(tmp_path, ["a", "b", "c/d"])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        workspace.scan(str(tmp_path), [])
        times.append(time.perf_counter() - start)
    assert min(times) < 0.003


# ---- survey ----------------------------------------------------------------------------------------------------------------------

def test_survey_reads_nothing(tmp_path, monkeypatch):
    for number in range(8):
        folder = tmp_path / ("top%d" % number) / "deep"
        folder.mkdir(parents=True)
        (folder / "f").write_bytes(b"x" * number)
    (tmp_path / "root file").write_bytes(b"12345")
    os.symlink("nowhere", tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    plant(tmp_path, ["x.pyc", "top7/y.pyc", "top1/y.pyc", ".git/HEAD", "gone/z"])
    monkeypatch.setattr(manifest, "hash_file", lambda path: pytest.fail("a file was read"))
    for path in tmp_path.rglob("f"):
        path.chmod(0)
    found = workspace.survey(str(tmp_path), ["*.pyc", "/gone/", "/unused"])
    assert (found.files, found.folders, found.total_bytes) == (9, 16, 28 + 5)   # a link is none, as in what a run says
    assert found.largest == [("top7", 7, 1), ("top6", 6, 1), ("top5", 5, 1), ("top4", 4, 1), ("top3", 3, 1)]
    assert found.excluded == {"*.pyc": 3, "/gone/": 1, ".git": 1} and found.excluded_count == 5
    assert found.skipped == [("fifo", "a FIFO")]


@needs_git
def test_survey_names_what_git_ignores_but_would_go(tmp_path):
    git(tmp_path, "init", "-q")
    root = tmp_path / "sub"
    plant(root, ["data/a", "data/b/c", "out/x", "src/a.py", "src/a.pyc", "odd\n name.pyc", "gone/x"] + ["many/%d.pyc" % number for number in range(20)])
    (root / "data/a").write_bytes(b"x" * 100)
    (tmp_path / ".gitignore").write_text("/sub/data\nout/\n*.pyc\ngone\nempty/\n")
    (root / "empty").mkdir()
    found = workspace.survey(str(root), ["/gone", "/many"])
    assert found.git_ignored == [("data", 101), ("odd\n name.pyc", 1), ("out", 1), ("src/a.pyc", 1)] and found.git_ignored_count == 4
    found = workspace.survey(str(root), [])
    assert len(found.git_ignored) == 10 and found.git_ignored_count == 25 and found.git_ignored[0] == ("data", 101)


def test_survey_without_git_or_repository(tmp_path, monkeypatch):
    plant(tmp_path, ["a"])
    assert workspace.survey(str(tmp_path), []).git_ignored == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workspace.survey(str(tmp_path), []).files == 1


def test_shell_scripts_with_crlf_are_found(tmp_path):
    for name, data in [("dos.sh", b"#!/bin/sh\r\necho\r\n"), ("unix.sh", b"#!/bin/sh\necho '\r'\n"), ("empty.sh", b""), ("table.csv", b"a,b\r\n"),
                       ("long.sh", b"x" * 10000 + b"\r\n")]:
        (tmp_path / name).write_bytes(data)
    assert workspace.scan(str(tmp_path), ()).crlf == ["dos.sh"]
