"""The main job on hosts over SSH, as a user meets it: the real command, a real sshd, a home folder that has never seen gpurun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Here, end_agents, eventually
from sshd import SSHD, Sshd, free_port, own_home_possible

import gpurun
from gpurun import supervise

pytestmark = pytest.mark.skipif(not SSHD or not shutil.which("ssh") or not own_home_possible(),
                                reason="needs OpenSSH's sshd and ssh, and a home folder of its own for it (root)")
PACKAGE = Path(gpurun.__file__).parent


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts, and a cache folder with iroh packed in it once."""
    folder = tmp_path_factory.mktemp("hosts")
    with Sshd(folder / "one") as one, Sshd(folder / "two") as two:
        yield one, two
        end_agents(folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fresh(here, hosts, cache, request):
    """An operator with the host `node`, on which each test has a node folder of its own: as on a host that has never seen gpurun."""
    return operator(here, hosts[0], cache, request.node.name.partition("[")[0])


@pytest.fixture
def op(fresh, hosts):
    """The same, but iroh is there already where an earlier test has brought it: that takes a second each time."""
    there = next(hosts[0].home.glob("*/lib/iroh-*/iroh/__init__.py"), None)
    if there:
        shutil.copytree(there.parents[2], fresh.there / "lib")
        fresh.there.chmod(0o700)
    return fresh


def operator(here: Here, sshd: Sshd, cache: Path | None = None, node_dir: str = "", **keys: Any) -> Here:
    here.env["GPURUN_SSH_CONFIG"] = str(sshd.config)
    if cache:
        here.env["XDG_CACHE_HOME"] = str(cache)
    here.there = sshd.home / (node_dir or ".gpurun")
    cluster(here, "node", **({"node_dir": f"~/{node_dir}"} if node_dir else {}), **keys)
    return here


def cluster(here: Here, *names: str, **keys: Any) -> Path:
    path = here.work / "cluster.toml"
    lines = ["[provider]", 'kind = "ssh"', *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path.write_text("\n".join(lines + [f"[[provider.hosts]]\nhost = {json.dumps(name)}" for name in names]) + "\n")
    return path


def ssh(sshd: Sshd, script: str) -> None:
    """As the user of the host would by hand."""
    subprocess.run(["ssh", "-F", sshd.config, "node", "sh -s"], input=script.encode(), check=True, timeout=60)


def serving(node_dir: str) -> list[int]:
    """The agents that serve this node folder now."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and node_dir.encode() in words:
            found.append(int(entry.parent.name))
    return found


# ---- first use, second use -----------------------------------------------------------------------------------------------------

def test_first_use_of_a_fresh_host_then_no_ssh_at_all(here, tmp_path):
    """The whole promise: one SSH connection ever, no Fabric on the second use, and a third use with sshd gone."""
    with Sshd(tmp_path / "sshd") as sshd:
        operator(here, sshd)
        (here.work / "src").mkdir()
        (here.work / "src/input").write_text("42")
        job = here.job("cat input; echo err >&2; mkdir -p out/deep; cp input out/deep/answer", outputs=["out"],
                       workspace={"workdir": "src"}, setup="echo ready > setup-was-here; test -f input")
        begun = time.monotonic()
        done = here.gpurun(job)
        print(f"first use: {time.monotonic() - begun:.1f} s, {sshd.connections} SSH connections")
        assert done.returncode == 0 and done.stdout == b"42", done.stderr.decode()
        assert (here.latest / "outputs/out/deep/answer").read_text() == "42"
        assert (here.latest / "stderr.log").read_bytes() == b"err\n"
        assert sshd.connections == sshd.logins == 1          # design 10: at most 3
        assert here.record()["node"]["name"] == "node" and here.record()["path"] == "direct"

        done = here.gpurun(job, "--json", env=dict(here.env, PYTHONPROFILEIMPORTTIME="1"))
        loaded = {line.rpartition(b"|")[2].strip().decode() for line in done.stderr.splitlines() if line.startswith(b"import time:")}
        assert "gpurun.orchestrator" in loaded                # or the names would not be read right
        assert not {name for name in loaded if name.split(".")[0] in ("fabric", "paramiko", "invoke", "cryptography")}
        assert not loaded & {"gpurun.ssh", "gpurun.bootstrap", "gpurun.known_hosts"}
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["type"] == "result" and result["node"] == "node" and result["exit_code"] == 0 and result["outputs"] == ["out"]
        assert sshd.connections == 1
    assert here.gpurun(job).returncode == 0
    assert len(list(here.runs.glob("job-*"))) == 3


def test_the_agent_ends_with_neither_the_ssh_session_nor_the_operator(fresh, hosts):
    assert fresh.gpurun(fresh.job("true")).returncode == 0
    known = fresh.agent(fresh.there)
    assert os.getsid(known["pid"]) == known["pid"]
    for fd in (0, 1, 2):
        where = os.readlink(f"/proc/{known['pid']}/fd/{fd}")
        assert where == "/dev/null" or where.endswith("/agent/log"), where


@pytest.mark.parametrize("code, script", [(3, "exit 3"), (137, "kill -KILL $$"), (143, "kill -TERM $$"), (255, "exit 255")])
def test_exit_codes_come_home_over_ssh(warm_host, code, script):
    assert warm_host.gpurun(warm_host.job(script)).returncode == code
    assert warm_host.record()["state"] == "FAILED" and warm_host.record()["exit_code"] == code


@pytest.fixture(scope="module")
def warm_host(tmp_path_factory, hosts, cache):
    """A host that has been used before; tests share it."""
    folder = tmp_path_factory.mktemp("warm")
    here = operator(Here(folder / "here"), hosts[1], cache, "warm")
    assert here.gpurun(here.job("true")).returncode == 0
    yield here


# ---- what login shells do -----------------------------------------------------------------------------------------------------------

NOISE = """\
echo "Welcome to gpu1!"; printf 'GPURUN-PROBE-BEGIN'; echo; printf '\\033]0;title\\007'; tput cols; stty -echo; clear; echo noise >&2
echo 'GPURUN-ENDPOINT {"id": "nonsense"}'
[ -z "$TMUX" ] && tmux new-session -A -s main
"""


def test_noisy_start_files_change_nothing_and_the_job_has_the_login_environment(op, hosts):
    sshd = hosts[0]
    (sshd.home / ".bashrc").write_text(NOISE + "export FROM_BASHRC=1\n")
    (sshd.home / ".profile").write_text(NOISE + 'export GREETING="from the profile,\nin two lines" PATH="$HOME/my bin:$PATH"\n')
    (sshd.home / ".bash_logout").write_text("clear; echo bye\n")
    (sshd.home / "my bin").mkdir()
    (sshd.home / "my bin/mytool").write_text("#!/bin/sh\necho found\n")
    (sshd.home / "my bin/mytool").chmod(0o755)
    try:
        done = op.gpurun(op.job('printf "%s|" "$GREETING" "$(mytool)" "$HOME" "$SSH_CONNECTION"'))
    finally:
        for name in (".bashrc", ".profile", ".bash_logout"):
            (sshd.home / name).unlink()
    home = os.path.expanduser(f"~{sshd.user}")
    assert (done.returncode, done.stdout) == (0, f"from the profile,\nin two lines|found|{home}||".encode()), done.stderr.decode()


def test_a_banner_and_a_forced_command_that_wraps_ours(here, cache, tmp_path):
    (tmp_path / "banner").write_text("Authorised users only!\n" * 20)
    (tmp_path / "wrapper").write_text('#!/bin/sh\necho "wrapped"; echo "wrapped" >&2\n/bin/sh -c "$SSH_ORIGINAL_COMMAND"\ncode=$?\n'
                                      'echo "left"; exit $code\n')
    (tmp_path / "wrapper").chmod(0o755)
    with Sshd(tmp_path / "sshd", [f"Banner {tmp_path}/banner", f"ForceCommand {tmp_path}/wrapper"]) as sshd:
        operator(here, sshd, cache)
        done = here.gpurun(here.job("echo clean"))
        assert (done.returncode, done.stdout) == (0, b"clean\n"), done.stderr.decode()


# ---- what a node may lack, and the cluster file's keys ---------------------------------------------------------------------------------

def test_a_node_without_python_says_the_ways_out_and_the_python_key_is_one(here, cache, tmp_path):
    pythons = [path for path in ("/usr/bin/python3", "/usr/local/bin/python3", "/opt/conda/bin/python3") if os.path.exists(path)]
    with Sshd(tmp_path / "sshd", hidden=pythons) as sshd:
        operator(here, sshd, cache)
        job = here.job("echo ran")
        done = here.gpurun(job)
        said = done.stderr.decode()
        assert done.returncode == 125 and b"" == done.stdout
        assert "has no Python that the agent can run on" in said and "apt-get install python3" in said and 'python = "/path/to/python3"' in said
        assert not here.there.exists() and sshd.connections == 1
        cluster(here, "node", python="/no/such/python")
        done = here.gpurun(job)
        assert done.returncode == 125 and b'`python = "/no/such/python"`' in done.stderr and b"cluster.toml" in done.stderr
        cluster(here, "node", python=sys.executable)
        done = here.gpurun(job)
        assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr.decode()


def test_the_oldest_python_that_there_is_by_the_python_key(op):
    found = [path for path in os.environ.get("GPURUN_TEST_PYTHONS", "").split(":") if path] or [
        str(path) for path in Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3") if _minor(path) >= 8]
    if not found:
        pytest.skip("no Python but our own here")
    oldest = min(found, key=_minor)
    cluster(op, "node", python=oldest, node_dir=f"~/{op.there.name}")
    (op.work / "src").mkdir()
    (op.work / "src/data").write_bytes(os.urandom(100_000))
    done = op.gpurun(op.job("cat data > back", workspace={"workdir": "src"}, outputs=["back"]))
    assert done.returncode == 0, done.stderr.decode()
    assert (op.latest / "outputs/back").read_bytes() == (op.work / "src/data").read_bytes()
    assert op.record()["node"]["facts"]["python"].startswith(f"3.{_minor(oldest)}.")


def _minor(path: str | Path) -> int:
    return int(subprocess.check_output([path, "-c", "import sys; print(sys.version_info[1])"]))


def test_node_dir_and_udp_port_of_the_cluster_file_are_used(op, hosts):
    with_port = free_port(socket.SOCK_DGRAM)
    cluster(op, "node", node_dir="~/a folder/of 'mine'", udp_port=with_port)
    done = op.gpurun(op.job("pwd"))
    folder = hosts[0].home / "a folder/of 'mine'"
    assert done.returncode == 0 and "/a folder/of 'mine'/runs/" in done.stdout.decode(), done.stderr.decode()
    assert op.agent(folder)["port"] == with_port
    assert folder.stat().st_mode & 0o777 == 0o700
    cluster(op, "node", node_dir="~/another", udp_port=with_port)
    done = op.gpurun(op.job("true"))
    assert done.returncode == 125 and f"0.0.0.0:{with_port}".encode() in done.stderr, done.stderr.decode()


def test_a_node_folder_that_cannot_be_written_or_is_too_small(op, hosts):
    ssh(hosts[0], "mkdir ~/small ~/locked && mount -t tmpfs -o size=4m none ~/small && mount -t tmpfs -o ro none ~/locked")
    job = op.job("true")
    cluster(op, "node", node_dir="~/small/gpurun")
    done = op.gpurun(job)
    assert done.returncode == 125, done
    assert b"/small has 4.2 MB free, gpurun needs" in done.stderr and b"node_dir = " in done.stderr, done.stderr.decode()
    cluster(op, "node", node_dir="~/locked/gpurun")
    done = op.gpurun(job)
    assert done.returncode == 125, done
    assert b"/locked/gpurun can't be written by" in done.stderr and b"node_dir = " in done.stderr, done.stderr.decode()
    assert os.listdir(hosts[0].home / "small") == []


# ---- the agent goes, or is of another version -----------------------------------------------------------------------------------------

def test_a_killed_agent_is_started_again_over_one_ssh_connection(op, hosts):
    job = op.job("echo ran")
    assert op.gpurun(job).returncode == 0
    known, before = op.agent(op.there), hosts[0].connections
    os.kill(known["pid"], signal.SIGKILL)
    begun = time.monotonic()
    done = op.gpurun(job)
    print(f"with a dead agent: {time.monotonic() - begun:.1f} s")
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr.decode()
    assert hosts[0].connections == before + 1
    again = op.agent(op.there)
    assert again["id"] == known["id"] and again["port"] == known["port"] and again["pid"] != known["pid"]
    assert op.gpurun(job).returncode == 0 and hosts[0].connections == before + 1


def test_a_node_folder_that_was_deleted_is_made_again_and_the_old_agent_goes(op, hosts):
    job = op.job("echo ran")
    assert op.gpurun(job).returncode == 0
    old = op.agent(op.there)["pid"]
    subprocess.run(["rm", "-rf", op.there], check=True)   # the agent that sees it go removes its socket itself
    done = op.gpurun(job)
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr.decode()
    new = op.agent(op.there)["pid"]
    assert new != old
    eventually(lambda: not supervise.start_time(old))
    assert op.gpurun(job).returncode == 0 and op.agent(op.there)["pid"] == new


def test_a_node_that_has_lost_our_key_is_told_it_again(op, hosts):
    """The refusal comes with the handshake or, as often, after what we have sent: either way one SSH connection mends it."""
    job = op.job("echo ran")
    assert op.gpurun(job).returncode == 0
    pid = op.agent(op.there)["pid"]
    for _ in range(4):
        before = hosts[0].connections
        (op.there / "agent/authorized").unlink()
        done = op.gpurun(job)
        assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr.decode()
        assert hosts[0].connections == before + 1 and op.agent(op.there)["pid"] == pid


def test_an_operator_that_neither_the_agent_nor_ssh_lets_in_is_told_both_within_seconds(here, cache, tmp_path):
    with Sshd(tmp_path / "sshd") as sshd:
        operator(here, sshd, cache)
        job = here.job("echo ran")
        assert here.gpurun(job).returncode == 0
        (here.there / "agent/authorized").write_text("")
        (tmp_path / "sshd/authorized_keys").write_text("")
        done = here.gpurun(job, timeout=90)
        said = done.stderr.decode()
        assert done.returncode == 125 and done.stdout == b"" and "refused" in said and str(sshd.key) in said, said
        end_agents(tmp_path)


def newer(folder: Path) -> dict[str, str]:
    """The environment of a gpurun whose agent is another one."""
    shutil.copytree(PACKAGE, folder / "gpurun", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "gpurun/node.py", "a") as file:
        file.write("\n# a newer version\n")
    return {"PYTHONPATH": str(folder)}


def test_an_idle_agent_of_another_version_is_replaced_and_a_busy_one_is_used_as_it_is(op, hosts, tmp_path):
    go = tmp_path / "go"
    long = op.job(f"echo begun; until [ -e {go} ]; do sleep 0.05; done; echo done > o", name="long", outputs=["o"])
    quick = op.job("echo quick", name="quick")
    other = dict(op.env, **newer(tmp_path / "newer"))
    running = op.start(long, bufsize=0)
    assert running.stdout.readline() == b"begun\n"
    old = op.agent(op.there)

    done = op.gpurun(quick, env=other)
    assert done.returncode == 125 and b"node is busy with long-" in done.stderr and b"--wait" in done.stderr, done.stderr.decode()
    waiting = op.start(quick, "--wait", env=other, bufsize=0)
    while b"busy with long-" not in (line := waiting.stderr.readline()):
        assert line, "it ended without having waited"
    go.touch()
    out, err = running.communicate(timeout=90)
    assert running.returncode == 0, err.decode()
    assert [path.read_text() for path in op.runs.glob("long-*/outputs/o")] == ["done\n"]
    out, err = waiting.communicate(timeout=90)
    assert (waiting.returncode, out) == (0, b"quick\n"), err.decode()
    assert op.agent(op.there) == old

    eventually(lambda: not json.loads((op.there / "agent/claim.json").read_text())["run_id"])    # it is idle as soon as the run is on the disk
    done = op.gpurun(quick, env=other)
    assert (done.returncode, done.stdout) == (0, b"quick\n"), done.stderr.decode()
    new = op.agent(op.there)
    assert new["agent"] != old["agent"] and new["pid"] != old["pid"] and new["id"] == old["id"]
    eventually(lambda: supervise.start_time(old["pid"]) != old["start"])
    before = hosts[0].connections
    assert op.gpurun(quick, env=other).returncode == 0 and hosts[0].connections == before


def test_two_operators_who_meet_on_a_fresh_host_share_one_agent(fresh, hosts, cache, tmp_path):
    other = operator(Here(tmp_path / "other"), hosts[0], cache, fresh.there.name)
    both = [one.start(one.job(f"echo {name}; sleep 0.3"), "--wait") for one, name in ((fresh, "one"), (other, "two"))]
    for process, name in zip(both, (b"one\n", b"two\n")):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, name), err.decode()
    folder = os.path.expanduser(f"~{hosts[0].user}/") + fresh.there.name
    eventually(lambda: serving(folder) == [fresh.agent(fresh.there)["pid"]])     # one that came second is going
    assert len((fresh.there / "agent/authorized").read_text().split()) == 2
    assert [fresh.gpurun(fresh.job("true")).returncode, other.gpurun(other.job("true")).returncode] == [0, 0]


# ---- hosts --------------------------------------------------------------------------------------------------------------------------

def test_a_changed_host_key_is_an_error_that_names_both_and_nothing_is_sent(here, cache, tmp_path):
    with Sshd(tmp_path / "sshd") as sshd:
        operator(here, sshd, cache)
        sshd.config.write_text(sshd.config_for("node", StrictHostKeyChecking="ask", UserKnownHostsFile="/dev/null"))
        done = here.gpurun(here.job("true"))
        assert done.returncode == 0 and b"never seen before" in done.stderr, done.stderr.decode()
        first = fingerprint(sshd)
    for name in ("host_key", "host_key.pub"):
        (tmp_path / "sshd" / name).unlink()
    with Sshd(tmp_path / "sshd", port=sshd.port) as sshd:
        sshd.config.write_text(sshd.config_for("node", StrictHostKeyChecking="ask", UserKnownHostsFile="/dev/null"))
        assert here.gpurun(here.job("true")).returncode == 0   # the agent proves who it is by its own key: no SSH, no question
        before, logins = sorted(sshd.home.rglob("*")), sshd.logins
        cluster(here, "node", node_dir="~/new")
        done = here.gpurun(here.job("true"))
        said = done.stderr.decode()
        assert done.returncode == 125 and first in said and fingerprint(sshd) in said and "ssh-keygen -R" in said, said
        assert sshd.logins == logins and sorted(sshd.home.rglob("*")) == before


def fingerprint(sshd: Sshd) -> str:
    return subprocess.check_output(["ssh-keygen", "-lf", sshd.folder / "host_key.pub"], text=True).split()[1]


def test_an_alias_that_was_pointed_at_another_machine_leads_there(op, hosts, tmp_path):
    """As after renting the next machine, while the last one is still there: an edit of the ssh config costs one SSH connection."""
    one, two = hosts
    included = tmp_path / "included"
    included.write_text(one.config_for("rented"))
    op.env["GPURUN_SSH_CONFIG"] = str(tmp_path / "config")
    (tmp_path / "config").write_text(f"Include {included}\n")
    cluster(op, "rented", node_dir=f"~/{op.there.name}")
    job = op.job("true")
    assert op.gpurun(job).returncode == 0 and (op.there / "runs" / op.latest.name).is_dir()
    included.write_text(two.config_for("rented"))
    before = two.connections
    done = op.gpurun(job)
    assert done.returncode == 0 and b"its agent has a new identity" in done.stderr, done.stderr.decode()
    assert (two.home / op.there.name / "runs" / op.latest.name).is_dir()
    assert op.gpurun(job).returncode == 0 and two.connections == before + 1
    known = op.agent(two.home / op.there.name)
    included.write_text(included.read_text() + "Host other\n    User nobody\n")
    assert op.gpurun(job).returncode == 0 and op.gpurun(job).returncode == 0 and two.connections == before + 2
    assert op.agent(two.home / op.there.name) == known

    with_port = free_port(socket.SOCK_DGRAM)
    cluster(op, "rented", node_dir=f"~/{op.there.name}", udp_port=with_port)
    assert op.gpurun(job).returncode == 0 and op.gpurun(job).returncode == 0 and two.connections == before + 3
    assert op.agent(two.home / op.there.name)["port"] == with_port


def test_a_host_that_is_not_there_is_said_at_once(op, hosts):
    hosts[0].config_and("away", Port=str(free_port()))
    cluster(op, "away")
    begun = time.monotonic()
    done = op.gpurun(op.job("true"))
    assert done.returncode == 125 and time.monotonic() - begun < 30
    assert b"no connection to away" in done.stderr and b"Connection refused" in done.stderr and b"sshd on port" in done.stderr
    result = op.result(op.job("true"))
    assert result["state"] == "FAILED" and "no connection to away" in result["reason"]
    cluster(op, "nobody-knows-this.invalid")
    done = op.gpurun(op.job("true"))
    assert done.returncode == 125 and b"nobody-knows-this.invalid" in done.stderr and b"can't be looked up" in done.stderr


def test_of_several_hosts_the_first_that_can_be_had_runs_the_job(op, hosts, tmp_path):
    one, two = hosts
    one.config_and("away", Port=str(free_port()))
    one.config_and("second", HostName="127.0.0.1", Port=str(two.port), IdentityFile=str(two.key), UserKnownHostsFile=f"{two.folder}/known_hosts")
    cluster(op, "away", "node", "second", node_dir="~/several")
    job = op.job("echo $SSH_CONNECTION; pwd -P")

    done = op.gpurun(job)
    assert done.returncode == 0 and b"away can't be used: no connection to away" in done.stderr, done.stderr.decode()
    assert op.record()["node"]["name"] == "node"

    assert op.result(job, "--node", "second")["node"] == "second"
    assert (two.home / "several/runs" / op.record()["run_id"]).is_dir()
    done = op.gpurun(job, "--node", "third")
    assert done.returncode == 2 and b"away, node, second" in done.stderr, done.stderr.decode()

    go = tmp_path / "go"
    running = op.start(op.job(f"echo begun; until [ -e {go} ]; do sleep 0.05; done", name="long"), "--node", "node", bufsize=0)
    assert running.stdout.readline() == b"begun\n"
    done = op.gpurun(job)
    assert done.returncode == 0 and b"node is busy with long-" in done.stderr and b"trying second" in done.stderr, done.stderr.decode()
    assert op.record()["node"]["name"] == "second"
    done = op.gpurun(job, "--node", "node")
    assert done.returncode == 125 and b"node is busy with long-" in done.stderr
    go.touch()
    assert running.wait(90) == 0
    running.communicate()


def test_a_run_through_a_jump_host(op, hosts):
    hosts[0].config.write_text(hosts[0].config.read_text() + hosts[0].config_for("inner", ProxyJump="hop") + hosts[1].config_for("hop"))
    cluster(op, "inner", node_dir=f"~/{op.there.name}")
    before = hosts[0].connections, hosts[1].connections
    done = op.gpurun(op.job("echo inside"))
    assert (done.returncode, done.stdout) == (0, b"inside\n"), done.stderr.decode()
    assert (hosts[0].connections, hosts[1].connections) == (before[0] + 1, before[1] + 1)
    assert op.gpurun(op.job("true")).returncode == 0 and hosts[0].connections == before[0] + 1


# ---- the other commands -----------------------------------------------------------------------------------------------------------------

def test_doctor_before_and_after_the_first_run(op, hosts):
    done = op.gpurun("doctor", "--json")
    checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0 and checks["node node"]["ok"], checks
    assert "no agent is known" in checks["node node"]["text"] and "SSH works: Linux" in checks["node node"]["text"]
    assert not (op.there / "agent").exists()
    assert op.gpurun(op.job("true")).returncode == 0
    before = hosts[0].connections
    done = op.gpurun("doctor")
    assert done.returncode == 0 and b"node node: idle; agent" in done.stdout and b"over direct" in done.stdout, done.stdout.decode()
    assert hosts[0].connections == before
    hosts[0].config_and("away", Port=str(free_port()))
    cluster(op, "away")
    done = op.gpurun("doctor")
    assert done.returncode == 125 and b"FAIL  node away" in done.stdout and b"Connection refused" in done.stdout


def test_status_logs_and_stop_of_a_run_over_ssh(warm_host, hosts):
    before = hosts[1].connections
    job = warm_host.job("echo some > o; echo begun; sleep 600 & wait", name="stopped", outputs=["o", "never"])
    running = warm_host.start(job, bufsize=0)
    assert running.stdout.readline() == b"begun\n"
    run_id = warm_host.latest.name
    status = json.loads(warm_host.gpurun("status", run_id, "--json").stdout)
    assert status["state"] == "RUNNING" and status["node"] == "node" and status["driven"]
    logs = warm_host.gpurun("logs", run_id)
    assert logs.stdout == b"begun\n"
    done = warm_host.gpurun("stop", run_id)
    assert done.returncode == 0, done.stderr.decode()
    out, err = running.communicate(timeout=90)
    assert running.returncode == 130, err.decode()
    record = json.loads((warm_host.runs / run_id / "run.json").read_text())
    assert record["state"] == "FAILED" and record["missing"] == ["never"]
    assert (warm_host.runs / run_id / "outputs/o").read_text() == "some\n"
    assert supervise.of_run(run_id) == set()
    said = logs.stderr + done.stderr + err                    # an agent that is so slow to answer is looked after over SSH
    assert hosts[1].connections == before or b"doesn't answer" in said or b"can't be reached" in said, said.decode()


def test_gpurun_in_a_loop_does_not_eat_the_list(fresh, tmp_path):
    """A deploy over SSH, then a warm run: neither reads stdin, which is the loop's."""
    job = fresh.job('echo "$ITEM"', env={"ITEM": "${ITEM}"})
    script = f'while read -r item; do ITEM=$item "{sys.executable}" -m gpurun "{job}" || exit; done'
    done = subprocess.run(["bash", "-c", script], input=b"one\ntwo\nthree\n", capture_output=True, cwd=fresh.work, env=fresh.env, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"one\ntwo\nthree\n"), done.stderr.decode()


def test_six_at_once_with_wait_each_run_once(warm_host):
    counter = warm_host.folder / "counter"
    jobs = [warm_host.job(f"echo {n} >> {counter}; echo {n} > o", name="many", folder=warm_host.work / str(n), outputs=["o"]) for n in range(6)]
    for n in range(6):
        shutil.copy(warm_host.work / "cluster.toml", warm_host.work / str(n))
    before = set(warm_host.runs.iterdir())
    processes = [warm_host.start(job, "--wait") for job in jobs]
    for process in processes:
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0, err.decode()
    assert sorted(counter.read_text().split()) == list("012345")
    runs = [path for path in set(warm_host.runs.iterdir()) - before if path.name.startswith("many-")]
    assert sorted((path / "outputs/o").read_text().strip() for path in runs) == list("012345")
    assert {json.loads((path / "run.json").read_text())["state"] for path in runs} == {"COMPLETED"}
