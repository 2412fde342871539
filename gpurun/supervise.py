"""The supervisor: one process for each phase of a run, between the agent and the user's command.

The agent starts it ahead of time, notes which one it is, and only then gives it its work, as one JSON line on stdin; killing or
replacing the agent afterwards doesn't touch it. It runs `bash -c` in the workdir with stdin from /dev/null and both outputs into files,
waits, ends what the command left running, and writes `<phase>.exit` atomically. Before it starts the command it makes
`<phase>.exit.next`: neither of the two files and no supervisor means that the command never began, and an agent starts it anew; that
mark alone, that nobody knows how the command ended. It is a subreaper: whatever the command starts stays below it, with setsid or
without, so SIGTERM to the supervisor ends the whole tree (TERM, a grace period, KILL) and nothing else. A hard limit of time is kept here
too: nothing else is sure to be there for as long as the command.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from gpurun.files import atomic_write

GRACE_S = 10.0                # between TERM and KILL when nobody says otherwise
LEFTOVER_GRACE_S = 2.0        # the same for processes that outlive the command
KILL_S = 10.0                 # a process that survives KILL for so long hangs in the kernel: say so and go on
PR_SET_CHILD_SUBREAPER = 36   # linux/prctl.h
NO_SUCH_COMMAND = 127
BLOCKED = {signal.SIGTERM, signal.SIGCHLD}   # taken by sigwait; blocked by who starts us, so that none comes before we are there
RECORD_BYTES = 4096           # set aside for the exit record at the start: a job that fills the disk mustn't cost its own exit code


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0              # the agent ended and had no use for this one, or was ended in the middle of giving it its work
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    spec = json.loads(line.decode("utf-8"))
    path = os.path.join(spec["folder"], spec["phase"] + ".exit")
    try:
        _set_aside(path + ".next")   # or nothing is started: without the mark the command might be started twice
        record = _supervise(spec)
    except OSError as error:
        record = {"fault": f"the command could not be started: {error.strerror or error}{_advice(error)}"}
    _write_record(path, json.dumps(record).encode("ascii"))
    os._exit(0)               # the agent waits for our end, and there is nothing to unwind


def _set_aside(path: str) -> None:
    """Makes the mark, with room for the record in it where the file system can do that."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, RECORD_BYTES)
    except OSError:
        pass                  # a file system that can't: then the record takes its chances
    finally:
        os.close(fd)


def _write_record(path: str, data: bytes) -> None:
    """Atomic, in the place that was set aside; anew where there is none."""
    try:
        fd = os.open(path + ".next", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        atomic_write(path, data)
        return
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
    os.fsync(fd)
    os.close(fd)
    os.replace(path + ".next", path)


def _advice(error: OSError) -> str:
    """What to do about the reasons that aren't plain."""
    return {errno.E2BIG: ". A command of bash -c has at most 128 KiB: put a long script into a file of the workspace",
            errno.ENOENT: ". The node needs bash, and a PATH of the job's own must lead to it"}.get(error.errno or 0, "")


def _supervise(spec: Dict[str, Any]) -> Dict[str, Any]:
    _become_subreaper()
    out, err = (os.path.join(spec["folder"], f"{spec['phase']}.{end}") for end in ("out", "err"))
    oom_before, started = _oom_kills(), time.monotonic()
    status: Optional[int] = None
    stopped, limit, hard_s = False, "", spec.get("hard_s") or 0.0
    child = _start(spec, out, err)
    while status is None:
        number = _next_signal(started + hard_s - time.monotonic() if hard_s else None)
        if number == signal.SIGTERM and not stopped or number is None:
            stopped, limit, hard_s = number is not None, "" if number else spec["limit"], 0.0
            status = _end(descendants(os.getpid()), lambda: _grace(spec["folder"]), child)
            if status is None:                # hangs in the kernel and will die when that lets it: nobody can wait for this
                status = int(signal.SIGKILL)
        else:
            status = _reap(child)
    seconds = time.monotonic() - started
    left = descendants(os.getpid()) if _has_children() else set()
    if left:
        _end(left, lambda: 0.0 if stopped or limit else LEFTOVER_GRACE_S)
    return {"code": 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "stopped": stopped, "limit": limit, "seconds": round(seconds, 3), "hint": _hint(status, stopped or bool(limit), oom_before, left),
            "stdout_bytes": os.stat(out).st_size, "stderr_bytes": os.stat(err).st_size}


def _next_signal(within_s: Optional[float]) -> Optional[int]:
    """The next one for us; None once the time is over."""
    if within_s is None:
        return signal.sigwait(BLOCKED)
    if hasattr(signal, "sigtimedwait"):
        known = signal.sigtimedwait(BLOCKED, max(0.0, within_s))
        return known.si_signo if known is not None else None
    deadline = time.monotonic() + within_s
    while not signal.sigpending() & BLOCKED:             # macOS hasn't got it
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return signal.sigwait(BLOCKED)


def _become_subreaper() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(spec: Dict[str, Any], out: str, err: str) -> int:
    """Forks the command into a session of its own; its pid. OSError when it can't be forked or the workdir is gone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    files = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), os.open(out, flags, 0o600), os.open(err, flags, 0o600)]
    broken_r, broken_w = os.pipe()                             # closed by a successful exec; else it brings the errno
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for number, fd in enumerate(files):
                os.dup2(fd, number)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)          # Python ignores SIGPIPE: a command must not inherit that
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            os.umask(spec["umask"])
            os.chdir(spec["workdir"])
            os.execvpe("bash", ["bash", "-c", spec["command"]], spec["env"])
        except OSError as error:
            os.write(broken_w, str(error.errno).encode("ascii"))
        finally:
            os._exit(NO_SUCH_COMMAND)
    for fd in files + [broken_w]:
        os.close(fd)
    number = os.read(broken_r, 16)
    os.close(broken_r)
    if number:
        os.waitpid(child, 0)
        raise OSError(int(number), f"{os.strerror(int(number))} (bash -c in {spec['workdir']})")
    return child


def _reap(child: int) -> Optional[int]:
    """Takes the status of everything that has ended below us; the one of `child` if it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = ended


def _has_children() -> bool:
    """False: nothing is left below us, since what lost its parent has become our child. Cheaper than a look at all processes."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    except ChildProcessError:
        return False


def _end(pids: Set[int], grace_s: Callable[[], float], child: int = 0) -> Optional[int]:
    """Ends processes and all below them: TERM, `grace_s()` (asked again and again: somebody may want it sooner), KILL until none is left; the
    status of `child` if it was among them."""
    status = None
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, lambda: KILL_S)):
        began = time.monotonic()
        signalled: Set[int] = set()
        while pids:
            for pid in pids if number == signal.SIGKILL else pids - signalled:   # KILL again and again: a fork may be quicker
                send(pid, number)
            signalled |= pids
            ended = _reap(child)
            status = ended if ended is not None else status
            pids = descendants(os.getpid())
            if not pids or time.monotonic() - began >= patience():
                break
            time.sleep(0.01)
    ended = _reap(child)      # one that has just died isn't among the living any more
    return ended if ended is not None else status


def _grace(folder: str) -> float:
    try:
        with open(os.path.join(folder, "stop")) as stream:
            return float(stream.read())
    except (OSError, ValueError):
        return GRACE_S


def _hint(status: int, stopped: bool, oom_before: int, left: Set[int]) -> str:
    hints: List[str] = []
    if not stopped and (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                        or os.WIFEXITED(status) and os.WEXITSTATUS(status) == 128 + signal.SIGKILL):
        if _oom_kills() > oom_before >= 0:
            hints.append("the kernel killed it for lack of memory")
        else:
            hints.append("nobody here sent that signal: on a node this is most often the kernel, out of memory")
    if left and not stopped:
        hints.append(f"{len(left)} process{'es' if len(left) > 1 else ''} that it left running {'were' if len(left) > 1 else 'was'} ended")
    return "; ".join(hints)


def _oom_kills() -> int:
    """How often the kernel's OOM killer has struck in this cgroup; -1 where that isn't told."""
    try:
        with open("/proc/self/cgroup") as stream:
            groups = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return -1
    for _, controllers, path in groups:
        files = [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"] if not controllers else []
        if "memory" in controllers.split(","):
            files = [f"/sys/fs/cgroup/memory{path}/memory.oom_control", "/sys/fs/cgroup/memory/memory.oom_control"]
        for name in files:
            try:
                with open(name) as stream:
                    for line in stream:
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
            except (OSError, ValueError):
                continue
    return -1


# ---- processes: what the agent needs of this too -------------------------------------------------------------------------------

def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass                  # gone, or become somebody else's (setuid): nothing that we can do


def _stat_fields(pid: int) -> Optional[List[str]]:
    """/proc/PID/stat behind the name: state, ppid, …; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return None


def start_time(pid: int) -> str:
    """What tells a process from a later one of the same pid: when it started; "" when it isn't there or is a zombie."""
    if not os.path.isdir("/proc/self"):
        return " ".join(_ps("-o", "lstart=", "-p", str(pid)))
    fields = _stat_fields(pid)
    return "" if fields is None or fields[0] in "ZX" else fields[19]


def boot_id() -> str:
    """What tells this boot of the node from others, in which its pids and start times meant something else; "" where nothing does (macOS)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _ps(*options: str) -> List[str]:
    """Lines of ps, for systems without /proc (macOS, where a process that leaves its parent can't be followed any further)."""
    return os.popen("ps " + " ".join(options)).read().splitlines()


def _parents() -> List[Tuple[int, int]]:
    """(pid, parent) of every living process."""
    if not os.path.isdir("/proc/self"):
        rows = [line.split() for line in _ps("-A", "-o", "pid=,ppid=,stat=")]
        return [(int(row[0]), int(row[1])) for row in rows if not row[2].startswith("Z")]
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if fields is not None and fields[0] not in "ZX":
                found.append((int(name), int(fields[1])))
    return found


def descendants(*roots: int) -> Set[int]:
    """All living processes below `roots`."""
    children: Dict[int, List[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: Set[int] = set()
    queue = list(roots)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found


def of_run(run_id: str) -> Set[int]:
    """Living processes that carry this run's id in the environment they were started with: what a killed supervisor leaves behind."""
    mark, found = b"GPURUN_RUN_ID=" + run_id.encode("utf-8"), set()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if mark in stream.read().split(b"\0") and start_time(int(name)):
                        found.add(int(name))
            except OSError:
                continue
    return found


def remains(run_id: str, known: Dict[int, str]) -> Set[int]:
    """What a killed supervisor leaves behind, and all below it. `known` (pid: start time) is kept from look to look: a process that is
    just starting a program or ending shows no environment, and one with another environment may lose the parent that it was known by."""
    found = of_run(run_id) | {pid for pid, start in known.items() if start_time(pid) == start}
    found |= descendants(*found) if found else set()
    found.discard(os.getpid())
    known.update((pid, start_time(pid)) for pid in found)
    return {pid for pid in found if known[pid]}
