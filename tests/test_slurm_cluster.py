"""The tests' own Slurm: it is one, it is shared by a test run, and it leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import slurm_cluster
from conftest import eventually
from slurm_cluster import own_slurm, slurm

from gpurun import supervise

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd-n1", "slurmd-n2")


def pid_of(folder: Path, daemon: str) -> int:
    """0 when it isn't there."""
    try:
        pid, start = (folder / "run" / f"{daemon}.pid").read_text().split()
    except (FileNotFoundError, ValueError):
        return 0
    return int(pid) if str(supervise.start_time(int(pid))) == start else 0


def python(script: str, **env: str) -> "subprocess.Popen[str]":
    """Another process of a test run that has the cluster's module."""
    return subprocess.Popen([sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=str(slurm_cluster.HERE), **env), text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# ---- what runs on it

def test_a_job_runs_and_both_witnesses_know_how_it_ended(slurm, tmp_path):
    out = tmp_path / "out"
    job = slurm.submit("echo $SLURMD_NODENAME; exit 3", "--job-name=equipment", f"--output={out}")
    slurm.until(job, "FAILED")
    assert out.read_text() in ("n1\n", "n2\n") and slurm.job(job)["ExitCode"] == "3:0"   # n1 may be full of other tests' jobs
    assert slurm.jobs("equipment") == [job]
    eventually(lambda: slurm.run("sacct", "-X", "-P", "-n", "-j", job, "-o", "State,ExitCode").stdout == "FAILED|3:0\n", 60)


def test_a_job_on_two_nodes_has_both_and_their_pretended_gpus(slurm, tmp_path):
    out = tmp_path / "out"
    job = slurm.submit("srun bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES' | sort", "--nodes=2", "--gres=gpu:h200:2", f"--output={out}")
    slurm.until(job, "COMPLETED")
    assert out.read_text().splitlines()[-2:] == ["n1 0,1", "n2 0,1"]


def test_jobs_of_one_name_are_cancelled_and_no_others(slurm):
    mine, other = slurm.submit("sleep 100", "--job-name=cancel-me-1"), slurm.submit("sleep 100", "--job-name=not-me")
    slurm.cancel_all("cancel-me")
    assert slurm.state(mine) == "CANCELLED" and slurm.state(other) in ("PENDING", "RUNNING")
    slurm.cancel_all("not-me")


def test_a_job_that_never_was_is_known_from_one_that_ended(slurm):
    assert slurm.job("999999") == {} and slurm.jobs("no-such-name") == []


# ---- an operator whose login shell alone knows it

def login(here, command: str) -> str:
    return subprocess.run(["bash", "-l", "-c", command], env=here.env, cwd=here.work, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_only_a_login_shell_of_the_operator_knows_slurm(slurm, here):
    slurm.here(here)
    assert login(here, "sinfo -h -N -p main -o %N") == "n1\nn2\n"
    others = subprocess.run(["bash", "-c", "command -v sbatch || ls -d / /$SLURM_CONF"], env=here.env, stdout=subprocess.PIPE, text=True)
    assert others.stdout == "/\n/\n", "his other programs are there"


def test_calls_of_a_program_are_counted_with_their_arguments(slurm, here):
    slurm.here(here)
    login(here, "squeue -h -n 'a b'; squeue -h -n $'two\\nlines'")
    assert slurm.calls("squeue") == [["-h", "-n", "a b"], ["-h", "-n", "two\nlines"]] and slurm.calls("sacct") == []


def test_a_program_can_be_another_for_one_call_and_then_the_real_one(slurm, here):
    slurm.here(here)
    slurm.shim("sinfo", '[ $N -gt 1 ] && exec "$REAL" "$@"\necho "slurm_load_partitions: Socket timed out" >&2; exit 1')
    assert login(here, "sinfo -h -N -p main -o %N || echo failed; sinfo -h -N -p main -o %N") == "failed\nn1\nn2\n"
    slurm.shim("sinfo", "echo never")
    slurm.shim("sinfo")
    assert login(here, "sinfo -h -N -p main -o %N") == "n1\nn2\n" and len(slurm.calls("sinfo")) == 3


def test_a_program_can_be_not_installed(slurm, here):
    slurm.here(here).hide("sacct")
    assert login(here, "command -v sacct || echo none; command -v squeue") == f"none\n{here.home}/slurm-bin/squeue\n"


def test_the_cluster_file_is_toml_with_the_keys_that_a_test_gives(slurm, here):
    path = slurm.cluster_file(here, partition="short", extra=["--exclusive"], nodes=2)
    assert path == here.work / "cluster.toml"
    assert path.read_text() == (f'[provider]\nkind = "slurm"\nnode_dir = "{here.home}/.gpurun"\npartition = "short"\nextra = ["--exclusive"]\n'
                                "nodes = 2\n")


# ---- what takes something away from all

def test_without_its_controller_clients_fail_while_jobs_go_on(slurm, tmp_path):
    with slurm.alone():
        job = slurm.submit(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo done > {tmp_path}/done")
        slurm.until(job, "RUNNING")
        with slurm.stop_controller():
            assert slurm.run("scontrol", "ping", check=False).returncode == 1
            (tmp_path / "go").touch()
            eventually(lambda: (tmp_path / "done").exists())
        slurm.until(job, "COMPLETED")      # its node tries only each 15 s to tell the controller


def test_without_its_database_only_sacct_fails(slurm):
    with slurm.stop_database():
        assert "Problem talking to the database" in slurm.run("sacct", check=False).stderr
        assert slurm.run("sinfo", "-h", "-p", "main", "-o", "%P").stdout.strip() == "main*"
    slurm.run("sacct")


def test_a_job_of_a_lost_node_ends_node_fail(slurm):
    with slurm.alone():
        job = slurm.submit("sleep 100", "--no-requeue", "--nodelist=n2")
        slurm.until(job, "RUNNING")
        with slurm.node_down("n2"):
            slurm.until(job, "NODE_FAIL")


def test_who_wants_to_be_alone_waits_for_the_others_and_they_for_him(tmp_path):
    mine = slurm_cluster._Turn(tmp_path / "turn")
    mine.take()
    other = python(f"""if True:
        import slurm_cluster, sys
        from pathlib import Path
        turn = slurm_cluster._Turn(Path({str(tmp_path / 'turn')!r}))
        turn.take()
        print("there", flush=True); input(); turn.give()
        print("gone", flush=True); turn.take(); print("again", flush=True)""")
    assert other.stdout.readline() == "there\n"
    said = []
    reader = threading.Thread(target=lambda: said.extend(iter(other.stdout.readline, "")))

    def go() -> None:
        with open(mine._gate.name) as gate:
            eventually(lambda: taken(gate))         # who wants to be alone stands in it
        other.stdin.write("\n")
        other.stdin.flush()
    threading.Thread(target=go).start()
    with mine.alone(), mine.alone():
        assert other.stdout.readline() == "gone\n", "it has said that before it let us in"
        reader.start()
        reader.join(0.2)
        assert said == [], "it is let in after us"
    other.wait(60)
    reader.join(60)
    assert said == ["again\n"]


def taken(gate) -> bool:
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(gate, fcntl.LOCK_UN)
    return False


# ---- a private one

def test_a_private_cluster_has_no_accounting_when_it_shall_not_and_forgets_its_jobs_when_it_shall():
    with own_slurm(minjobage=2, accounting=False) as mine:
        assert not pid_of(mine.folder, "mariadbd") and "storage is disabled" in mine.run("sacct", check=False).stderr
        job = mine.submit("true")
        eventually(lambda: mine.job(job) == {}, timeout_s=60)


@pytest.mark.parametrize(("how", "then"), [("requeue", "PENDING"), ("cancel", "PREEMPTED")])
def test_in_a_private_cluster_jobs_make_room_for_those_of_another_partition(how, then):
    with own_slurm(accounting=False, preempt=how, killwait=1) as mine:
        low = mine.submit("sleep 100", "--partition=low", "--nodes=2", "--exclusive")
        mine.until(low, "RUNNING")
        high = mine.submit("sleep 100", "--partition=high", "--nodes=2", "--exclusive")
        mine.until(high, "RUNNING")
        assert mine.state(low) == then


# ---- starting and ending

STARTS = """if True:
    import slurm_cluster, sys
    from pathlib import Path
    made, use = slurm_cluster._began(Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r}), {{"SLURM_UP_ACCOUNTING": "0", "SLURM_UP_CGROUP": "0"}})
    print(made.conf, flush=True); input(); use.end(); print("ended", flush=True)"""


def test_a_second_worker_shares_the_cluster_and_the_last_one_ends_it_and_nothing_else(slurm):
    folder = slurm_cluster.ROOT / f"{slurm_cluster.NAME}two{os.getpid()}"
    first, second = (python(STARTS.format(folder=str(folder))) for _ in range(2))
    assert first.stdout.readline() == second.stdout.readline() == f"{folder}/etc/slurm.conf\n"
    daemons = [pid_of(folder, name) for name in DAEMONS if not name.endswith("dbd")]
    assert all(daemons)
    first.communicate("\n", timeout=300)
    assert daemons == [pid_of(folder, name) for name in DAEMONS if not name.endswith("dbd")]
    assert second.communicate("\n", timeout=300)[0] == "ended\n"
    assert not list(folder.parent.glob(f"{folder.name}*")) and not any(map(supervise.start_time, daemons))
    assert all(pid_of(slurm.folder, name) for name in DAEMONS)


def test_what_a_killed_test_run_left_is_ended_by_the_next_one():
    folder = slurm_cluster.ROOT / f"{slurm_cluster.NAME}killed{os.getpid()}"
    killed = python(STARTS.format(folder=str(folder)))
    killed.stdout.readline()
    daemons = [pid_of(folder, name) for name in DAEMONS if not name.endswith("dbd")]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert all(daemons)
    with own_slurm(accounting=False):
        assert not list(folder.parent.glob(f"{folder.name}*")) and not any(map(supervise.start_time, daemons))


def test_a_job_of_a_cluster_that_ends_ends_too(tmp_path):
    with own_slurm(accounting=False, killwait=1) as mine:
        mine.submit(f"trap '' TERM; echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; while :; do sleep 0.1; done")
        eventually(lambda: (tmp_path / "pid").exists())
    eventually(lambda: not supervise.start_time(int((tmp_path / "pid").read_text())))


def test_where_slurm_cannot_be_it_is_said_in_one_line(tmp_path):
    done = subprocess.run(["unshare", "--uts", "bash", "-c", f"hostname elsewhere.invalid && exec {slurm_cluster.HERE}/slurm-up --can"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "unshare" in done.stdout:
        pytest.skip("needs root")
    assert done.returncode == 3 and "the host name elsewhere.invalid resolves to 'nothing', not to loopback" in done.stdout
