"""A node of kind slurm: what it says of itself, what doctor finds of Slurm there, and up, nodes and down."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from agents import end_agents
from conftest import eventually
from gpurun import doctor, provider, supervise
from gpurun.config import Cluster, Host, Slurm
from gpurun.errors import GpurunError
from gpurun.provider_slurm import SlurmHere, SlurmOverSsh
from gpurun.reconcile import Machine
from gpurun.hosts import HostMachines
from slurm_cluster import own_slurm, slurm as slurm
from sshd import Sshd, own_home_possible

EXAMPLES = Path(__file__).resolve().parents[1] / "contrib" / "examples"
HERE = Cluster("c.toml", "slurm", slurm=Slurm(partition="main", extra=("--exclusive",)), node_dir="/nowhere/g")
THERE = HERE._replace(login=Host("me@login1:22", "me", "login1", 22))


# ---- the node ----------------------------------------------------------------------------------------------------------------------

def test_a_cluster_of_slurm_has_one_node_here_or_behind_its_login_host(monkeypatch, tmp_path):
    monkeypatch.setenv("GPURUN_CONFIG", str(tmp_path))
    here, = provider.nodes(HERE)
    there, = provider.nodes(THERE)
    assert isinstance(here, SlurmHere) and (here.name, here.kind, here.rented) == ("slurm", "slurm", False)
    assert isinstance(there, SlurmOverSsh) and (there.name, there.kind, there.rented) == ("me@login1:22", "slurm", False)
    assert here.cached_endpoint() is there.cached_endpoint() is None
    assert here.cache_file() != there.cache_file()


def test_a_job_takes_along_what_the_cluster_file_says_of_slurm_and_on_other_nodes_nothing():
    asks = {"kind": "slurm", "options": ["--partition=main", "--exclusive"], "submit_s": 30.0, "poll_s": 15.0, "pending_s": 604800.0}
    assert provider.nodes(HERE)[0].backend == provider.nodes(THERE)[0].backend == asks
    assert provider.nodes(Cluster())[0].backend == provider.Node("a", Cluster(), "a").backend == {}


def test_the_record_and_plan_say_what_slurm_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("GPURUN_CONFIG", str(tmp_path))
    for cluster in (HERE, THERE):
        said = provider.nodes(cluster)[0].describe()
        assert said["kind"] == "slurm" and said["slurm"] == ["--partition=main", "--exclusive"] and said["node_dir"] == "/nowhere/g"
        json.dumps(said)
    assert provider.nodes(THERE)[0].ssh_argv()[-1] == "login1"


def test_other_options_for_slurm_are_the_same_node_and_need_no_other_agent(monkeypatch, tmp_path):
    monkeypatch.setenv("GPURUN_CONFIG", str(tmp_path))
    for cluster in (HERE, THERE):
        one, = provider.nodes(cluster)
        other, = provider.nodes(cluster._replace(slurm=Slurm(partition="short", nodes=2)))
        assert (one.cache_file(), one.basis()) == (other.cache_file(), other.basis()) and one.backend != other.backend


def test_an_agent_here_that_does_not_answer_is_not_looked_for_over_ssh():
    machines = HostMachines(provider.nodes(HERE), "prefix", lambda: pytest.fail("no link is needed"), "me")
    error = GpurunError("it doesn't answer")
    assert machines._over_ssh(provider.nodes(HERE)[0], None, "label", error) is error
    assert isinstance(machines.node(Machine("a", 1)), SlurmHere) and machines.name(1) == "slurm"


# ---- what doctor makes of Slurm's answers ---------------------------------------------------------------------------------------------

ROWS = """\
PartitionName=main AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] State=UP TotalCPUs=16 TotalNodes=2
PartitionName=short AllowGroups=ALL Default=NO DefaultTime=NONE MaxNodes=1 MaxTime=00:05:00 Nodes=n1 State=UP TotalCPUs=8 TotalNodes=1 JobDefaults=(null)
PartitionName=old Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n3 State=DOWN TotalNodes=1
"""


@pytest.mark.parametrize("asked, ok, words", [
    (Slurm(), [True], ["up, 2 nodes (n[1-2])", "any time", "01:00:00 where `time` isn't set"]),
    (Slurm("main", time="2-0"), [True], ["any time"]),
    (Slurm("short"), [True], ["1 node (n1)", "at most 00:05:00"]),
    (Slurm("short", time="5"), [True], ["at most 00:05:00"]),
    (Slurm("short", time="6"), [False], ["at most 00:05:00, and `time` is 6", "wait for ever"]),
    (Slurm("short", time="UNLIMITED"), [False], ["wait for ever"]),
    (Slurm("main", nodes=3), [False], ["at most 2 nodes, and `nodes` is 3", "wait for ever"]),
    (Slurm("short", nodes=2), [False], ["at most 1 node, and"]),
    (Slurm("old"), [False], ["it is DOWN"]),
    (Slurm("mian"), [False], ["no such partition; there are main, short, old"]),
    (Slurm("main,short", nodes=2), [True, None], ["at most 1 node, and"]),
    (Slurm("old,short", nodes=2), [False, False], ["it is DOWN", "at most 1 node"]),
])
def test_a_job_that_slurm_would_take_and_never_start_is_said_before_it_is_submitted(asked, ok, words):
    found = list(doctor.judge_partitions(ROWS, asked))
    assert [one["ok"] for one in found] == ok
    assert all(word in " ".join(one["text"] for one in found) for word in words), found


@pytest.mark.parametrize("text, asked, words", [
    (ROWS.replace("Default=YES", "Default=NO"), Slurm(), "none is the default here; set `partition` (main, short, old)"),
    ("", Slurm("main"), "scontrol said nothing"), ("slurm_load_partitions error: Access denied\n", Slurm(), "Access denied"), ("PartitionName=\n", Slurm(), ""),
])
def test_partitions_that_cannot_be_judged_are_a_remark(text, asked, words):
    found, = doctor.judge_partitions(text, asked)
    assert found["ok"] is None and words in found["text"]


@pytest.mark.parametrize("text, seconds", [
    ("5", 300), ("1:30", 90), ("01:00:00", 3600), ("1-00:00:00", 86400), ("2-12", 216000), ("2-12:30", 217800), ("0", 0), ("UNLIMITED", math.inf),
    ("NONE", math.inf),
    ("", math.inf), ("Partition_Limit", math.inf), ("60-min", math.inf), ("1:2:3:4", math.inf)])
def test_a_time_limit_in_seconds(text, seconds):
    assert doctor.slurm_seconds(text) == seconds


def test_what_start_files_print_around_the_answer_does_not_matter():
    said = doctor.parse_slurm(b"Welcome!\r\nGPURUN-SLURM sbatch=/usr/bin/sbatch\nnoise\n\x1b[0mGPURUN-SLURM ping=a=b\r\nGPURUN-SLURM ping=c\x07\xff\nGPURUN-SLURM end=yes\nbye")
    assert said == {"sbatch": ["/usr/bin/sbatch"], "ping": ["a=b", "c?\ufffd"], "end": ["yes"]}
    with pytest.raises(ValueError, match="not run our command to its end; it said: 'exec: bash: not found'"):
        doctor.parse_slurm(b"exec: bash: not found\n")


# ---- doctor on the real one -------------------------------------------------------------------------------------------------------------

def diagnosis(here, code=None):
    done = here.gpurun("doctor", "--json")
    assert code in (None, done.returncode), done.stdout.decode()
    return {one["name"]: (one["ok"], one["text"]) for one in map(json.loads, done.stdout.splitlines())}


def test_doctor_finds_slurm_that_only_a_login_shell_knows(here, slurm):
    slurm.here(here)
    slurm.cluster_file(here, partition="main")
    said = diagnosis(here, 0)
    assert said["cluster"][1].startswith("slurm: ") and said["node slurm"][0] is None and "no agent runs yet" in said["node slurm"][1]
    assert said["Slurm"] == (True, f"slurm-wlm 22.05.8, {here.home}/slurm-bin/sbatch")
    assert said["Slurm controller"][0] and said["Slurm controller"][1].endswith(" is UP")
    assert said["Slurm partition main"][0] and said["Slurm accounting"] == (True, "sacct answers")
    assert said["Slurm folder"][0] in (True, None) and f"node_dir is {here.node_dir}, on a file system of type " in said["Slurm folder"][1]
    assert not slurm.calls("srun") and not [one for one in slurm.calls("sbatch") if one != ["--version"]]
    assert not here.node_dir.exists()


def test_doctor_says_which_command_no_login_shell_finds_and_what_to_do(here, slurm):
    shims = slurm.here(here)
    slurm.cluster_file(here)
    shims.hide("sbatch", "scancel")
    ok, text = diagnosis(here, 125)["Slurm"]
    assert ok is False and "finds no sbatch, scancel in its PATH" in text and str(shims.folder) in text and "~/.bash_profile" in text


def test_doctor_says_that_a_partition_is_not_there_or_would_never_start_the_job(here, slurm):
    slurm.here(here)
    slurm.cluster_file(here, partition="mian")
    assert diagnosis(here, 125)["Slurm partition mian"] == (False, "there is no such partition; there are main, short")
    slurm.cluster_file(here, partition="short", time="10")
    assert "wait for ever" in diagnosis(here, 125)["Slurm partition short"][1]


def test_doctor_says_that_the_controller_is_down_and_asks_nothing_that_would_wait_for_it(here, slurm):
    slurm.here(here)
    slurm.cluster_file(here)
    with slurm.stop_controller():
        said = diagnosis(here, 125)
        assert said["Slurm controller"][0] is False and "is DOWN: jobs go on meanwhile" in said["Slurm controller"][1]
        assert "Slurm accounting" not in said and slurm.calls("sacct") == [] and [one for one in slurm.calls("scontrol") if one != ["ping"]] == []


def test_without_the_database_accounting_is_a_remark(here, slurm):
    slurm.here(here)
    slurm.cluster_file(here)
    with slurm.stop_database():
        ok, text = diagnosis(here, 0)["Slurm accounting"]
    assert ok is None and "its own record" in text


def test_a_slurm_without_a_configuration_is_no_traceback_but_its_own_words(here, slurm):
    slurm.here(here)
    slurm.cluster_file(here)
    with open(here.home / ".bash_profile", "a") as profile:
        profile.write("unset SLURM_CONF\n")
    ok, text = diagnosis(here, 125)["Slurm controller"]
    assert ok is False and "configuration source" in text


def test_a_slurm_that_only_the_operators_own_environment_names_is_found_too(here, slurm):
    """As after `. env.sh` in the terminal that gpurun is called in: SLURM_CONF says where the cluster is, as no other SLURM_* does."""
    slurm.here(here)
    slurm.cluster_file(here)
    here.env.update(slurm.shims.env, SLURM_JOB_ID="77")
    (here.home / ".bash_profile").unlink()
    said = diagnosis(here, 0)
    assert said["Slurm controller"][0] is True
    done = here.gpurun(here.job("echo ${SLURM_JOB_ID:-none} $SLURMD_NODENAME"))
    assert done.returncode == 0 and done.stdout.split()[0] not in (b"none", b"77") and done.stdout.split()[1] in (b"n1", b"n2"), done.stderr.decode()


def test_commands_of_slurm_that_hang_are_given_up_and_ended(here, slurm, monkeypatch, tmp_path):
    shims = slurm.here(here)
    shims.shim("scontrol", f"echo $$ > {tmp_path}/pid; sleep 600")
    monkeypatch.setattr(doctor, "SLURM_S", 6.0)     # in which a login shell comes to scontrol on any machine
    monkeypatch.setenv("HOME", str(here.home))
    node, = provider.nodes(HERE)
    found, = doctor._slurm(node, HERE.slurm)
    assert found["ok"] is False and "did not answer within 6 s" in found["text"]
    eventually(lambda: supervise.start_time(int((tmp_path / "pid").read_text())) == "")


def test_in_a_cluster_without_accounting_that_is_a_remark(here, tmp_path):
    with own_slurm(accounting=False) as slurm:
        slurm.here(here)
        slurm.cluster_file(here)
        said = diagnosis(here, 0)
    assert said["Slurm accounting"][0] is None and "accounting" in said["Slurm accounting"][1].lower()


# ---- behind a login host ---------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def login(tmp_path_factory):
    folder = tmp_path_factory.mktemp("login")
    with Sshd(folder / "sshd") as sshd:
        yield sshd
        end_agents(folder)


@pytest.fixture
def remote(here, slurm, login, tmp_path_factory):
    """An operator whose cluster file names a login host, where only a login shell knows Slurm; here nobody does."""
    slurm.here(here, home=login.home)
    here.env["GPURUN_SSH_CONFIG"] = str(login.config)
    here.env["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "slurm-cache")
    slurm.cluster_file(here, login="node", node_dir="~/.gpurun", partition="main")
    yield here
    (login.home / ".bash_profile").unlink()
    shutil.rmtree(login.home / "slurm-bin")


def test_up_nodes_doctor_and_down_of_a_login_host(remote, login):
    said = diagnosis(remote, 0)
    assert said["node node"][0] and "no agent is known" in said["node node"][1] and "SSH works" in said["node node"][1] and said["ssh"][0] is not False
    assert said["Slurm"] == (True, f"slurm-wlm 22.05.8, {login.home}/slurm-bin/sbatch") or "/slurm-bin/sbatch" in said["Slurm"][1]
    assert said["Slurm partition main"][0] and "/.gpurun, on a file system of type " in said["Slurm folder"][1]
    done = remote.gpurun("up", timeout=200)
    assert done.returncode == 0 and done.stdout == b"node\n", done.stderr.decode()
    assert b"node" in remote.gpurun("nodes").stdout
    assert diagnosis(remote, 0)["node node"][1].startswith("idle; agent ")
    done = remote.gpurun("down")
    assert done.returncode == 0, done.stderr.decode()
    assert "no agent is known" in diagnosis(remote, 0)["node node"][1]


def test_a_job_goes_through_a_login_host_to_slurm_and_its_outputs_and_exit_code_come_back(remote, login, slurm):
    slurm.cluster_file(remote, login="node", node_dir=str(remote.folder / "shared"), partition="main")
    (remote.work / "in.txt").write_text("b\na\n")
    job = remote.job("sort in.txt > sorted.txt; echo on $SLURMD_NODENAME in $SLURM_JOB_PARTITION with $SECRET; exit 255", name="far", outputs=["sorted.txt"],
                     workspace={"workdir": ".", "exclude": ["*.toml"]}, setup="touch made-by-setup; echo ${SLURM_JOB_ID:-none}", env={"SECRET": "s3\ncret"})
    done = remote.gpurun(job, timeout=200)
    assert done.returncode == 255, done.stderr.decode()
    assert done.stdout in (b"on n1 in main with s3 cret\n", b"on n2 in main with s3 cret\n")
    assert (remote.latest / "outputs/sorted.txt").read_text() == "a\nb\n"
    record = remote.record()
    assert record["node"]["kind"] == "slurm" and record["node"]["name"] == "node" and record["backend"]["job_id"]
    before = login.connections
    assert remote.gpurun(job).returncode == 255 and login.connections == before          # a second run needs no SSH
    assert remote.gpurun("status", remote.latest.name).returncode == 0
    assert [words for words in slurm.calls("sbatch") if "s3" in " ".join(words)] == []


@pytest.mark.skipif(not own_home_possible(), reason="the login host's home is the compute nodes' too")
def test_a_node_dir_that_the_compute_nodes_do_not_see_is_said_as_that(remote):
    done = remote.gpurun(remote.job("echo never", name="unshared"), timeout=200)
    assert done.returncode == 125 and b"Is node_dir on a file system that the compute nodes share?" in done.stderr and b"/.gpurun/runs/unshared-" in done.stderr
    assert done.stdout == b""


def test_a_login_host_that_cannot_be_reached_is_said_and_nothing_more_is_asked(remote):
    remote.env["GPURUN_SSH_CONFIG"] = "/dev/null"
    (remote.work / "cluster.toml").write_text('[provider]\nkind = "slurm"\nlogin = "nobody@127.0.0.1:1"\n')
    said = diagnosis(remote, 125)
    assert said["node nobody@127.0.0.1:1"][0] is False and said["Slurm"][0] is False and "can't be asked for Slurm" in said["Slurm"][1]


def test_up_nodes_and_down_here(here, slurm):
    slurm.here(here)
    slurm.cluster_file(here)
    done = here.gpurun("up")
    assert done.returncode == 0 and done.stdout == b"slurm\n", done.stderr.decode()
    rows = [json.loads(line) for line in here.gpurun("nodes", "--json").stdout.splitlines()]
    assert [(row["node"], row["state"]) for row in rows] == [("slurm", "ready")], rows
    assert diagnosis(here, 0)["node slurm"][1].startswith("idle; agent ")
    assert here.gpurun("down").returncode == 0
    assert "no agent runs yet" in diagnosis(here, 0)["node slurm"][1]


def test_plan_says_that_the_job_goes_to_slurm_with_which_options_and_starts_nothing(here, slurm):
    slurm.here(here)
    path = slurm.cluster_file(here, partition="main", nodes=2)
    done = here.gpurun("plan", here.job("true"), "--json")
    node, = json.loads(done.stdout)["nodes"]
    assert done.returncode == 0 and node["kind"] == "slurm" and node["slurm"] == ["--partition=main", "--nodes=2"], node
    done = here.gpurun("plan", here.job("true"))
    assert done.returncode == 0 and f"slurm (slurm, {path}".encode() in done.stdout and not here.node_dir.exists(), done.stdout.decode()


# ---- the examples ----------------------------------------------------------------------------------------------------------------------

def test_the_example_on_two_nodes_counts_the_primes_with_both(here, slurm):
    folder = shutil.copytree(EXAMPLES / "two-nodes", here.work / "two-nodes")
    slurm.here(here)
    text = (EXAMPLES / "slurm.toml").read_text().replace('login = "login1"\n', "")       # as on the login host itself
    path = here.work / "slurm.toml"
    path.write_text(text)
    done = here.gpurun(folder / "job.toml", "--cluster", path)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert sorted(line.split(":")[0] for line in lines[:2]) == ["n1", "n2"] and lines[2] == "17984"
    assert (here.latest / "outputs/total.txt").read_text() == "17984\n"
    assert sum(int(part.read_text()) for part in (here.latest / "outputs/parts").iterdir()) == 17984
    options = slurm.calls("sbatch")[0]
    assert [one for one in options if one.split("=")[0] in ("--partition", "--time", "--nodes", "--gres")] == [
        "--partition=main", "--time=2:00:00", "--nodes=2", "--gres=gpu:1"]
    assert not (folder / "parts").exists()
