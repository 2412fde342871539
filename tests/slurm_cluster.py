"""A real Slurm for tests: `from slurm_cluster import slurm`, and operators of whom only a login shell knows it.

`slurm` is one cluster for all workers of a test run (slurm-up says what it has): the first that wants it starts it, the last one ends
it, and what a killed test run left is ended by the next one. `own_slurm(...)` is another, private, with another configuration.

Tests share `slurm`, so each brings its own job names and looks only at its own jobs. One that takes something away from all (the
controller, a node) does that in `with slurm.alone():` or in one of the context managers that begin so: they wait until no other test
uses the cluster, and the others wait meanwhile. To be begun before jobs of one's own, which others may hit else.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

HERE = Path(__file__).parent
PROGRAMS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun", "salloc", "sacctmgr", "sstat", "sattach", "sbcast", "strigger")
FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Unix sockets lie in it, whose paths may be 107 bytes long: a TMPDIR of somebody's own may be too deep.
ROOT = Path("/tmp") if len(tempfile.gettempdir()) > 30 else Path(tempfile.gettempdir())
NAME = "gpurun-slurm-"
BOUND_S = 60.0

SHIM = """\
#!/bin/bash
# {name}, before the real one. REAL: its path; N: how many calls of it this is.
REAL={real}
exec 8>>{calls}.lock && flock 8 || exit 99
printf '%s\\0' "$#" "$@" >> {calls}
printf . >> {calls}.n
N=$(wc -c < {calls}.n)
exec 8>&-
{script}
"""


class Shims:
    """The only Slurm that somebody's login shell has in its PATH: programs of a folder that count their calls and pass them on, until
    a test puts something else in their place."""

    def __init__(self, folder: Path, slurm: "Slurm") -> None:
        self.folder, self.slurm = folder, slurm
        self.folder.mkdir(parents=True, exist_ok=True)
        self._calls = folder.with_name(folder.name + "-calls")
        self._calls.mkdir(exist_ok=True)
        self.path = f"{folder}:{slurm.without}"
        for name in PROGRAMS:
            if shutil.which(name, path=FOLDERS):
                self.shim(name)

    @property
    def env(self) -> Dict[str, str]:
        """What a login shell of theirs would have of Slurm."""
        return {"PATH": self.path, "SLURM_CONF": self.slurm.conf}

    def shim(self, name: str, script: str = 'exec "$REAL" "$@"') -> None:
        """From now on `name` is this bash script. It has $REAL (the path of the real one), $N (its number, 1 for the first call, counted
        through all scripts of this name) and "$@"; without `script` it is the real one again."""
        text = SHIM.format(name=name, real=shlex.quote(shutil.which(name, path=FOLDERS) or name), calls=shlex.quote(str(self._calls / name)),
                           script=script)
        there = self.folder / f".{name}"
        there.write_text(text)
        there.chmod(0o755)
        os.replace(there, self.folder / name)     # bash reads a script as it goes: never one that changes

    def hide(self, *names: str) -> None:
        """From now on these aren't installed."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def calls(self, name: str) -> List[List[str]]:
        """The arguments of each call so far."""
        found: List[List[str]] = []
        try:
            words = (self._calls / name).read_bytes().decode(errors="replace").split("\0")[:-1]
        except FileNotFoundError:
            return found
        while words:
            count = int(words[0])
            found.append(words[1:count + 1])
            del words[:count + 1]
        return found


class Slurm:
    """A cluster that runs. `conf` is its SLURM_CONF, `env` an environment that its clients work in."""

    def __init__(self, folder: Path, settings: Dict[str, str]) -> None:
        self.folder, self.settings = folder, settings
        self.conf = str(folder / "etc" / "slurm.conf")
        self.env = {"PATH": FOLDERS, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8", "SLURM_CONF": self.conf}
        self._turn = _Turn(folder.with_name(folder.name + ".turn"))
        self.without = ""                # a PATH of this machine without any Slurm
        self.shims: Optional[Shims] = None

    def start(self) -> None:
        self._script("slurm-up")
        self.without = _path_without(self.folder / "bin")

    def _script(self, name: str, *options: str) -> None:
        done = subprocess.run([str(HERE / name), *options, str(self.folder)], env=dict(os.environ, **self.settings), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400)
        text = done.stdout.decode(errors="replace").strip()
        if done.returncode == 3:
            pytest.skip("no Slurm here: " + text.splitlines()[-1])
        if done.returncode != 0:
            raise RuntimeError(f"{name} {self.folder} ended with {done.returncode}:\n{text}")

    # ---- asking

    def run(self, *argv: Any, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """One of Slurm's programs as somebody with this cluster would call it. `check=False` for those that should fail."""
        options.setdefault("env", self.env)
        options.setdefault("cwd", self.folder / "spool")
        done = subprocess.run([str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True, timeout=BOUND_S, **options)
        assert done.returncode == 0 or not check, f"{shlex.join(done.args)} ended with {done.returncode}: {done.stderr or done.stdout}"
        return done

    def submit(self, script: str, *options: str, **more: Any) -> str:
        """The id of a job that runs this, its output in /dev/null unless `options` say otherwise."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script, **more).stdout.strip()

    def job(self, job_id: str) -> Dict[str, str]:
        """What scontrol knows of it: {"JobState": "RUNNING", …}; {} when it knows nothing."""
        done = self.run("scontrol", "show", "job", "--oneliner", job_id, check=False)
        if done.returncode != 0:
            assert "Invalid job id" in done.stderr, done.stderr
            return {}
        return {key: value for key, equals, value in (word.partition("=") for word in done.stdout.split()) if equals}

    def state(self, job_id: str) -> str:
        return self.job(job_id).get("JobState", "")

    def jobs(self, name: str) -> List[str]:
        """The ids of the jobs of this name, also of those that ended not long ago."""
        return self.run("squeue", "-h", "-t", "all", "-o", "%i", "-n", name).stdout.split()

    def until(self, job_id: str, *states: str, timeout_s: float = BOUND_S) -> str:
        """Its state, once it is one of these."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state(job_id)
            if state in states:
                return state
            assert time.monotonic() < deadline, f"job {job_id} isn't {' or '.join(states)} within {timeout_s} s: {self.job(job_id)}"
            time.sleep(0.05)

    def time_out(self, job_id: str) -> None:
        """Lets the time limit of a job that runs be over now: TIMEOUT within 30 s, for slurmctld looks that often and never oftener."""
        self.run("scontrol", "update", f"JobId={job_id}", "EndTime=now")

    def cancel_all(self, name_prefix: str) -> None:
        """Ends every job whose name begins so. Returns when they are over."""
        def there() -> List[str]:
            lines = self.run("squeue", "-h", "-o", "%i %j").stdout.splitlines()
            return [line.split()[0] for line in lines if line.partition(" ")[2].startswith(name_prefix)]
        deadline, found = time.monotonic() + BOUND_S, there()
        while found:
            self.run("scancel", *found, check=False)
            assert time.monotonic() < deadline, f"these jobs don't end: {found}"
            time.sleep(0.1)
            found = there()

    @property
    def cgroups(self) -> bool:
        """Whether a job is held to its memory (OUT_OF_MEMORY) and loses every process at its end. Only one cluster of a machine has them."""
        return "proctrack/cgroup" in Path(self.conf).read_text()

    # ---- an operator

    def here(self, here: Any, home: Optional[Path] = None) -> Shims:
        """From now on a login shell of this operator (conftest.Here) knows this cluster, and nothing else of them does: neither his
        environment nor his PATH. `home`: the home of the login host instead, for one that he reaches over SSH."""
        shims = Shims((home or here.home) / "slurm-bin", self)
        profile = (home or here.home) / ".bash_profile"
        before = profile.read_text() if profile.exists() else ""
        profile.write_text(f"{before}export SLURM_CONF={shlex.quote(self.conf)}\nexport PATH={shlex.quote(shims.path)}\n")
        here.env["PATH"] = ":".join([*(folder for folder in here.env["PATH"].split(":") if folder not in FOLDERS.split(":")), self.without])
        self.shims = shims
        return shims

    def shim(self, name: str, script: str = 'exec "$REAL" "$@"') -> None:
        """Shims.shim of the operator that `here` was called for last."""
        assert self.shims, "slurm.here(here) comes first"
        self.shims.shim(name, script)

    def calls(self, name: str) -> List[List[str]]:
        assert self.shims, "slurm.here(here) comes first"
        return self.shims.calls(name)

    def cluster_file(self, here: Any, path: Optional[Path] = None, **keys: Any) -> Path:
        """His cluster.toml, beside the job files: `keys` are further keys of [provider], as Python values."""
        keys = {"kind": "slurm", "node_dir": str(here.node_dir), **keys}
        path = path or here.work / "cluster.toml"
        path.write_text("[provider]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in keys.items()))
        return path

    # ---- what takes something away from all

    def alone(self) -> Any:
        """A context manager: nobody else uses the cluster in it. May be used again inside itself."""
        return self._turn.alone()

    def stop_controller(self) -> Any:
        """A context manager: slurmctld isn't there in it; jobs go on. `start_controller()` inside ends that early."""
        return self._down("slurmctld")

    def stop_database(self) -> Any:
        """A context manager: slurmdbd isn't there in it, so that sacct fails."""
        return self._down("slurmdbd", self._accounts_again)

    def start_controller(self) -> None:
        self._script("slurm-up")

    start_database = start_controller

    @contextlib.contextmanager
    def _down(self, daemon: str, again: Callable[[], None] = lambda: None) -> Iterator[None]:
        with self.alone():
            self._script("slurm-down", "--only", daemon)
            try:
                yield
            finally:
                self._script("slurm-up")
                again()

    def _accounts_again(self) -> None:
        """Returns when the accounting knows what happens. It answers at once, and slurmctld tries only each 10 s to tell it of anything again."""
        job, deadline = self.submit("true"), time.monotonic() + BOUND_S
        while "COMPLETED" not in self.run("sacct", "-n", "-X", "-j", job, "-o", "State").stdout:
            assert time.monotonic() < deadline, f"the accounting doesn't hear of the end of job {job}"
            time.sleep(0.1)

    @contextlib.contextmanager
    def node_down(self, name: str) -> Iterator[None]:
        """Slurm takes this node for lost in it: what runs there ends NODE_FAIL or is requeued at once."""
        with self.alone():
            self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")
            try:
                yield
            finally:
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)   # it may have come back by itself
                deadline = time.monotonic() + BOUND_S
                while self.run("sinfo", "-h", "-N", "-p", "main", "-n", name, "-o", "%T").stdout.strip() not in ("idle", "mixed", "allocated"):
                    assert time.monotonic() < deadline, f"node {name} doesn't come back"
                    time.sleep(0.05)


class _Turn:
    """Who may use the cluster: many tests side by side, or one alone. Files with locks, for they are in several processes."""

    def __init__(self, path: Path) -> None:
        self._lock, self._gate = open(path, "a"), open(f"{path}-gate", "a")
        self._shared, self._alone = False, 0

    def take(self) -> None:
        if not self._shared:
            fcntl.flock(self._gate, fcntl.LOCK_EX)   # behind one who waits to be alone: it would wait for ever else
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            fcntl.flock(self._gate, fcntl.LOCK_UN)
            self._shared = True

    def give(self) -> None:
        if self._shared:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._shared = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        if self._alone == 0:
            shared = self._shared
            self.give()              # before the gate: who stands in it may be waiting for us
            fcntl.flock(self._gate, fcntl.LOCK_EX)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1
            if self._alone == 0:
                fcntl.flock(self._lock, fcntl.LOCK_SH if shared else fcntl.LOCK_UN)
                self._shared = shared
                fcntl.flock(self._gate, fcntl.LOCK_UN)

    def close(self) -> None:
        self._shared = False
        self._lock.close()
        self._gate.close()


# ---- starting and ending

@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """One at a time on this machine starts or ends clusters: ports and control groups are everybody's."""
    with open(ROOT / f"{NAME}lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Use:
    """That somebody uses the cluster in this folder. Known by a lock, so that it ends with his process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, open(_users(folder), "a")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def end(self) -> None:
        with _changing():
            self._file.close()
            _end_unless_used(self.folder)


def _users(folder: Path) -> Path:
    return folder.with_name(folder.name + ".users")


def _end_unless_used(folder: Path) -> None:
    with open(_users(folder), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        subprocess.run([str(HERE / "slurm-down"), "--wipe", str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=400)
        for path in glob.glob(f"{glob.escape(str(folder))}.*"):
            os.unlink(path)


def _began(folder: Path, settings: Dict[str, str]) -> "tuple[Slurm, _Use]":
    with _changing():
        for users in ROOT.glob(f"{NAME}*.users"):
            _end_unless_used(users.with_suffix(""))
        use = _Use(folder)
        made = Slurm(folder, settings)
        try:
            made.start()
        except BaseException:
            use._file.close()
            _end_unless_used(folder)
            raise
    return made, use


def _path_without(folder: Path) -> str:
    """A PATH with all programs of this machine but Slurm's. Others find them made already."""
    if not folder.exists():
        making = folder.with_name(folder.name + ".new")
        making.mkdir(exist_ok=True)
        for place in FOLDERS.split(":"):
            for program in os.scandir(place) if os.path.isdir(place) else ():
                if program.name not in PROGRAMS and not os.path.lexists(making / program.name):
                    os.symlink(program.path, making / program.name)
        os.replace(making, folder)
    return str(folder)


def _toml(value: Any) -> str:
    from conftest import toml

    return toml(value)


# ---- the fixture

class _Turns:
    """pytest's hooks: a test that uses `slurm` holds it from its first fixture to its last."""

    def __init__(self, turn: _Turn) -> None:
        self.turn = turn

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        if "slurm" in item.fixturenames:
            self.turn.take()

    def pytest_runtest_logfinish(self) -> None:
        self.turn.give()


_shared: Dict[str, Any] = {}    # this process's: the fixture is one for each file that imports it, the cluster isn't


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """The cluster of this test run."""
    if not _shared:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
        made, use = _began(ROOT / f"{NAME}{run[:12]}", {})
        _shared.update(slurm=made, use=use, users=0)
        _shared["turns"] = request.config.pluginmanager.register(_Turns(made._turn))
        made._turn.take()           # its hook came too late for this test
    _shared["users"] += 1
    yield _shared["slurm"]
    _shared["users"] -= 1
    if not _shared["users"]:
        request.config.pluginmanager.unregister(name=_shared["turns"])
        _shared["slurm"]._turn.close()
        _shared["use"].end()
        _shared.clear()


@contextlib.contextmanager
def own_slurm(minjobage: int = 300, killwait: int = 5, accounting: bool = True, preempt: str = "") -> Iterator[Slurm]:
    """A private cluster, 1 s to start without accounting, 3 s with. `minjobage`: seconds after which squeue forgets an ended job;
    `preempt`: "requeue" or "cancel", what happens to jobs of the partition `low` when one of `high` wants their place."""
    settings = {"SLURM_UP_MINJOBAGE": str(minjobage), "SLURM_UP_KILLWAIT": str(killwait), "SLURM_UP_ACCOUNTING": str(int(accounting)),
                "SLURM_UP_PREEMPT": preempt, "SLURM_UP_CGROUP": "0"}
    made, use = _began(Path(tempfile.mkdtemp(prefix=f"{NAME}own-", dir=ROOT)), settings)
    try:
        yield made
    finally:
        made._turn.close()
        use.end()
