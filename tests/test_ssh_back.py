"""Coming back to a run on a host over SSH: over the link as long as its agent answers, over SSH where that must be started again."""

from __future__ import annotations

import json
import os
import signal

from conftest import eventually
from test_ssh_run import cache, fresh, hosts, op, pytestmark   # noqa: F401 (fixtures)


def test_every_command_on_a_run_over_ssh(op, hosts):
    job = op.job("seq 5; echo 1 > x; while [ ! -e go ]; do sleep 0.02; done; echo end; exit 3", name="far", outputs=["x"])
    done = op.gpurun("submit", job)
    run_id = done.stdout.decode().strip()
    assert done.returncode == 0, done.stderr.decode()
    there = op.there / "runs" / run_id
    eventually(lambda: (there / "work/x").exists())
    connections = hosts[0].connections
    assert "run for" in op.gpurun("status", "--refresh").stdout.decode()
    assert op.gpurun("logs", run_id, "--tail", "1").stdout == b"5\n" and op.gpurun("fetch", run_id, "x").returncode == 0
    assert op.gpurun("wait", run_id, "--timeout", "0.5").returncode == 124
    assert hosts[0].connections == connections               # nothing of this needs SSH

    os.kill(op.agent(op.there)["pid"], signal.SIGKILL)
    done = op.gpurun("status", "--refresh")
    assert done.returncode == 0 and b"node: " in done.stderr and hosts[0].connections == connections   # it deploys nothing
    (there / "work/go").touch()
    done = op.gpurun("attach", run_id)
    assert done.returncode == 3 and done.stdout == b"1\n2\n3\n4\n5\nend\n", done.stderr.decode()
    assert (op.runs / run_id / "outputs/x").read_text() == "1\n" and hosts[0].connections == connections + 1

    done = op.gpurun("rm", run_id, "--json")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1]) == {"type": "removed", "run_id": run_id}
    assert not there.exists() and not (op.runs / run_id).exists()


def test_a_node_that_can_not_be_reached_is_said_by_each_command(op, hosts):
    run_id = op.gpurun("submit", op.job("echo one; sleep 600", name="away")).stdout.decode().strip()
    eventually(lambda: op.gpurun("logs", run_id).stdout == b"one\n")
    nowhere = op.folder / "nowhere"
    nowhere.write_text("Host node\n HostName 127.0.0.1\n Port 1\n")   # its ssh config changed: what was known of it counts no more
    env = dict(op.env, GPURUN_SSH_CONFIG=str(nowhere))
    for args in (["attach", run_id], ["wait", run_id], ["fetch", run_id], ["stop", run_id], ["rm", run_id], ["logs", "-f", run_id]):
        done = op.gpurun(*args, env=env)
        assert done.returncode == 125 and b"node" in done.stderr and b"127.0.0.1" in done.stderr, args
    done = op.gpurun("logs", run_id, env=env)
    assert done.returncode == 0 and done.stdout == b"one\n" and b"can't be asked" in done.stderr
    record = op.record()
    assert record["state"] == "RUNNING" or record["state"] == "PENDING"
    assert op.gpurun("stop", run_id, "--grace", "0").returncode == 0 and op.record()["state"] == "FAILED"
