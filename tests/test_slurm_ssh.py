"""A Slurm whose login host is reached over SSH: a real sshd, a home folder that has never seen gpurun, and sbatch in a login shell's PATH there only."""

from __future__ import annotations

import shutil

import pytest
from conftest import end_agents, eventually
from running import Running, end_all
from slurm_cluster import slurm             # noqa: F401 (a fixture)
from slurm_site import NEWS_S, within
from sshd import SSHD, Sshd, own_home_possible

pytestmark = pytest.mark.skipif(not SSHD or not shutil.which("ssh") or not own_home_possible(),
                                reason="needs OpenSSH's sshd and ssh, and a home folder of its own for it (root)")


@pytest.fixture
def login(here, slurm, tmp_path):
    """The host; the operator knows it as `node`."""
    with Sshd(tmp_path / "sshd") as sshd:
        slurm.here(here, home=sshd.home)
        here.env["GPURUN_SSH_CONFIG"] = str(sshd.config)
        yield sshd
        end_all()
        slurm.cancel_all("ssh-")
        end_agents(tmp_path)


def test_from_the_laptop_to_the_login_host_to_the_compute_node_and_back(here, slurm, login):
    """One SSH connection ever; a second run needs none."""
    slurm.cluster_file(here, login="node", node_dir=str(login.home / ".gpurun"), nodes=2, time=5)
    go = here.work / "go"
    path = here.job(f"cat data; srun bash -c 'echo $SLURMD_NODENAME > at-$SLURM_PROCID'; until [ -e {go} ]; do sleep 0.05; done; echo $SECRET | wc -c; exit 5",
                    name="ssh-whole", folder=here.work / "whole", workspace={"workdir": "."}, outputs=["at-0", "at-1"], setup="command -v sbatch",
                    env={"SECRET": "${SECRET}"})
    (path.parent / "data").write_text("over ssh\n")
    run = Running(here, path, "--cluster", here.work / "cluster.toml", env=dict(here.env, SECRET="four"))
    eventually(lambda: run.out == "over ssh\n", 60)
    eventually(lambda: here.record()["backend"].get("state") == "RUNNING", NEWS_S)
    record = here.record()
    assert record["node"]["kind"] == "slurm" and record["backend"]["nodes"] == "n[1-2]" and "node" in record["node"]["name"]
    assert slurm.job(record["backend"]["job_id"])["TimeLimit"] == "00:05:00" and f"{login.home}/slurm-bin/sbatch" in run.err
    go.touch()
    run.process.wait(60)
    assert run.end() == 5 and run.out == "over ssh\n5\n"
    assert [(here.latest / "outputs" / name).read_text() for name in ("at-0", "at-1")] == ["n1\n", "n2\n"] and login.logins == 1
    assert here.gpurun(here.job("echo again", name="ssh-again"), "--cluster", here.work / "cluster.toml").stdout == b"again\n" and login.logins == 1


def test_a_node_dir_that_the_compute_nodes_do_not_see_is_what_the_user_is_told(here, slurm, login):
    """The home of the sshd's sessions is theirs alone, as one on a login host's own disk."""
    (here.work / "cluster.toml").write_text('[provider]\nkind = "slurm"\nlogin = "node"\n')
    with within(55):         # a job that has ended and only left no record is waited for a minute
        done = here.gpurun(here.job("echo never", name="ssh-unshared"))
    err = done.stderr.decode()
    assert done.returncode == 125 and done.stdout == b"" and "on a file system that the compute nodes share?" in err, err
    assert here.record()["state"] == "FAILED" and "node_dir" in here.record()["reason"]
