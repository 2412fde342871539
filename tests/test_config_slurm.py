"""The cluster file of kind slurm: what is read, what becomes of it on sbatch's command line, and what is refused with its place."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun import config
from gpurun.config import Cluster, Host, Slurm, load_cluster, pick_host
from gpurun.errors import ConfigError
from gpurun.provider_slurm import backend
from slurm_cluster import slurm as slurm

HEAD = '[provider]\nkind = "slurm"\n'


@pytest.fixture
def cluster(tmp_path):
    def load(more=""):
        path = tmp_path / "cluster.toml"
        path.write_text(HEAD + more)
        return load_cluster(path)
    return load


def refused(cluster, more):
    with pytest.raises(ConfigError) as raised:
        cluster(more)
    return str(raised.value)


# ---- what is good ---------------------------------------------------------------------------------------------------------------

def test_the_kind_alone_is_enough_and_is_this_machine(cluster, tmp_path):
    loaded = cluster()
    assert loaded == Cluster(str(tmp_path / "cluster.toml"), "slurm", slurm=Slurm()) and loaded.here and loaded.login is None
    assert backend(loaded.slurm) == {"kind": "slurm", "options": [], "submit_s": 30.0, "poll_s": 15.0, "pending_s": 604800.0}


def test_every_key_is_read_and_becomes_what_sbatch_takes(cluster):
    loaded = cluster("""login = "me@login1:2222"
partition = "main,short"
account = "lab7"
time = "1-02:03:04"
nodes = 2
gres = "gpu:h200:2"
extra = ["--exclusive", "--comment=two words", "--wait-all-nodes=1", "--mem=0"]
pending_limit_s = 3600
submit_timeout_s = 60
poll_timeout_s = 20.5
relay = "n0"
udp_port = 4433
python = "python3.11"
node_dir = "/scratch/me/gpurun"
lost_after_s = 60
""")
    assert loaded[1:8] == ("slurm", (), "n0", 4433, "python3.11", "/scratch/me/gpurun", 60)
    assert loaded.login == Host("me@login1:2222", "me", "login1", 2222) and not loaded.here
    assert backend(loaded.slurm) == {
        "kind": "slurm", "submit_s": 60.0, "poll_s": 20.5, "pending_s": 3600.0,
        "options": ["--partition=main,short", "--account=lab7", "--time=1-02:03:04", "--nodes=2", "--gres=gpu:h200:2",
                    "--exclusive", "--comment=two words", "--wait-all-nodes=1", "--mem=0"]}
    assert json.loads(json.dumps(backend(loaded.slurm))) == backend(loaded.slurm)


def test_the_node_is_this_machine_for_kind_local_and_for_slurm_without_a_login_host():
    login = Host("a", "", "a", 0)
    assert [Cluster(kind=kind, login=host).here for kind, host in (("local", None), ("slurm", None), ("slurm", login), ("ssh", None), ("vastai", None))] == [
        True, True, False, False, False]


@pytest.mark.parametrize("value, text", [
    ('"1-02:03:04"', "1-02:03:04"), ('"60"', "60"), ("60", "60"), ('"30:00"', "30:00"), ('"12:00:00"', "12:00:00"), ('"2-12"', "2-12"),
    ('"2-12:30"', "2-12:30"), ('"0:30"', "0:30"), ('"unlimited"', "UNLIMITED"), ('"INFINITE"', "UNLIMITED")])
def test_a_time_limit_is_one_of_slurms_forms(cluster, value, text):
    assert cluster(f"time = {value}").slurm.time == text


def test_the_host_to_log_in_to_is_the_one_node_there_is(cluster):
    loaded = cluster('login = "me@login1"')
    assert pick_host(loaded, None) == pick_host(loaded, "me@login1") == pick_host(loaded, "login1") == loaded.login
    with pytest.raises(ConfigError, match="the nodes are me@login1"):
        pick_host(loaded, "slurm")
    here = cluster()
    assert pick_host(here, None) is pick_host(here, "slurm") is None
    with pytest.raises(ConfigError, match="the nodes are slurm"):
        pick_host(here, "local")


# ---- what is refused -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line, words", [
    ('time = "-5"', ["is not a time limit", "days-hours"]), ("time = -5", ["is not a time limit"]), ("time = 0", ["is not a time limit", '"UNLIMITED"']),
    ('time = "00:00"', ["is not a time limit"]), ('time = ""', ["is not a time limit"]), ('time = "1:2:3:4"', ["is not"]), ('time = "1d"', ["is not"]),
    ('time = "60 "', ["is not"]), ('time = "60\\n"', ["is not", "60\\n"]), ("time = 1.5", ["must be a time limit"]), ("time = true", ["must be a time limit"]),
    ("time = 12:00:00", ['quote it: time = "12:00:00"']), ("time = 2026-01-02", ["quote it"]), ('time = "٣"', ["is not"]),
    ("nodes = 0", ["at least 1"]), ("nodes = -1", ["at least 1"]), ('nodes = "2"', ["whole number"]), ("nodes = 2.0", ["whole number"]),
    ("nodes = true", ["whole"]),
    ('partition = ""', ["one word", '"main"']), ('partition = "a\\nb"', ["one word", "a\\nb"]), ('partition = "a b"', ["one word"]),
    ("partition = 1", ["a string"]),
    ('partition = ["main"]', ["a string", "but is an array"]), ('account = "a\\u0007"', ["one word", "\\u0007"]),
    ('account = "a\\u007f"', ["one word", "\\u007f"]),
    ('gres = "gpu\\u2028:1"', ["one word", "\\u2028"]), ("gres = 2", ["a string", '"gpu:2"']), (f'gres = "{"g" * 1025}"', ["one word"]),
    ('partition = "a\\u0000b"', ["NUL"]),
    ('login = "-oProxyCommand=x"', ["starts with `-`"]), ('login = "a b"', ["ssh doesn't take"]), ('login = ""', ["not a host"]), ("login = 1", ["a string"]),
    ("login = []", ["a string"]), ('login = { host = "a" }', ["a string"]),
    ("pending_limit_s = 0", ["above 0"]), ("pending_limit_s = inf", ["above 0"]), ("submit_timeout_s = nan", ["above 0"]),
    ('poll_timeout_s = "15"', ["number"]),
    ("poll_timeout_s = -1", ["above 0"]), ("submit_timeout_s = true", ["number"]),
    ('hosts = [{ host = "a" }]', ["which is its `login`", 'kind "ssh"']), ('image = "a:1"', ['only kind "vastai" has it']),
    ('partitions = "x"', ["did you mean `partition`?"]),
])
def test_a_value_that_cannot_be_is_refused_with_its_place(cluster, tmp_path, line, words):
    text = refused(cluster, line)
    key = line.split(" = ")[0]
    assert re.match(re.escape(f"{tmp_path}/cluster.toml:3:1: provider.{key}: "), text), text
    assert all(word in text for word in words), text
    assert text.isprintable()


@pytest.mark.parametrize("kind", ["local", "ssh", "vastai"])
def test_what_only_slurm_has_is_refused_elsewhere(tmp_path, kind):
    path = tmp_path / "cluster.toml"
    path.write_text(f'[provider]\nkind = "{kind}"\npartition = "main"\n')
    with pytest.raises(ConfigError, match=r':3:1: provider.partition: .*only kind "slurm" has it'):
        load_cluster(path)
    path.write_text('[provider]\nkind = "local"\nnodes = 2\n')
    with pytest.raises(ConfigError, match='only the kinds "vastai" and "slurm" have it'):
        load_cluster(path)


@pytest.mark.parametrize("option, words", [
    ("--output=x", ["can't be set here", "logs"]), ("--error", ["logs"]), ("--input=x", ["/dev/null"]), ("--chdir=/tmp", ["workspace"]),
    ("--job-name=x", ["run's id"]),
    ("--parsable", ["prints"]), ("--wrap=true", ["`run`"]), ("--array=1-3", ["one job"]), ("--export=ALL", ["`env`"]), ("--export-file=x", ["`env`"]),
    ("--open-mode=truncate", ["logs"]), ("--get-user-env", ["`env`"]), ("--wait", ["waits"]), ("--test-only", ["nothing would be submitted"]),
    ("--clusters=b", ["another cluster"]),
    ("--cluster=b", ["another cluster"]), ("--help", []), ("--usage", []), ("--version", []), ("--quiet", []), ("--verbose", []), ("--uid=0", []),
    ("--gid=0", []), ("--bb=x", []),
    ("--out=x", ["short for --output"]), ("--w", ["short for --wrap"]), ("--wa", ["short for --wait"]), ("--o=x", ["short for --output"]),
    ("--e=x", ["short for"]),
    ("--exp=NONE", ["short for --export"]), ("--arr=1-3", ["short for --array"]), ("--j=x", ["short for --job"]), ("--test", ["short for --test-only"]),
    ("--partition=main", ["write partition = …"]), ("--p=main", ["short for"]), ("--part=main", ["short for --partition, has a key of its own"]),
    ("--account=a", ["write account"]), ("--acc=a", ["write account"]), ("--time=1", ["write time"]), ("--tim=1", ["write time"]),
    ("--nodes=2", ["write nodes"]),
    ("--node=2", ["write nodes"]), ("--gres=gpu", ["write gres"]),
    ("-p", ["long form"]), ("-pmain", ["long form"]), ("--", ["long form"]), ("", ["long form"]), ("script.sh", ["long form"]), (":", ["long form"]),
    ("--=x", ["long form"]),
    ("--qos high", ["in one piece"]), (" --qos=high", ["long form"]), ("--qos=a\nb", ["long form", "\\n"]), ("--qos=a\x1b[1m", ["\\u001b"]),
    ("--Qos=x", ["long form"]),
    ("--qos", ["needs a value", '"--qos=…"']), ("--mem", ["needs a value"]), ("--depend", ["needs a value", '"--dependency=…"']),
])
def test_an_option_that_gpurun_must_set_itself_or_that_is_not_one_piece_is_refused(cluster, tmp_path, option, words):
    text = refused(cluster, f'extra = ["--hold", {json.dumps(option)}]')
    assert text.startswith(f"{tmp_path}/cluster.toml:3:20: provider.extra[1]: "), text
    assert all(word in text for word in words) and text.isprintable(), text


@pytest.mark.parametrize("option", ["--wait-all-nodes=1", "--time-min=10", "--nodelist=n1", "--gres-flags=enforce-binding", "--no-requeue",
"--signal=B:USR1@60", "--exclusive",
                                    "--exclusive=user", "--mem=4G", "--comment=", "--export-nothing-we-know=1", "--an-option-of-a-later-slurm", "--exclu",
                                    "--hol"])
def test_an_option_that_changes_nothing_of_gpuruns_is_passed_on_as_it_is(cluster, option):
    assert cluster(f"extra = [{json.dumps(option)}]").slurm.extra == (option,)


def test_extra_is_an_array_of_strings(cluster):
    assert "must be an array, but is a string; write it like extra = " in refused(cluster, 'extra = "--hold"')
    assert "provider.extra[0]: must be a string" in refused(cluster, "extra = [1]")
    assert cluster("extra = []").slurm.extra == ()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted((*config._RESERVED, *config._OWN))), st.integers(1, 20), st.sampled_from(["", "=", "=x", "=main y"]))
def test_no_beginning_of_a_reserved_option_gets_through(cluster, name, length, value):
    short = name[:length]
    assert f"--{short}" in refused(cluster, f"extra = [{json.dumps(f'--{short}{value}')}]") or short in (*config._FLAGS, *config._VALUED)
    assert name not in (*config._FLAGS, *config._VALUED)


# ---- against the real one ---------------------------------------------------------------------------------------------------------

def test_every_option_of_the_sbatch_here_is_known(slurm):
    """None that needs a value may be without: it would swallow the next argument. None that is reserved for its abbreviation's sake is forgotten."""
    said = slurm.run("sbatch", "--help").stdout
    known = {*config._RESERVED, *config._OWN, *config._FLAGS, *config._VALUED}
    shown = dict(re.findall(r"^ {2}(?:-\w,?)? +--([a-z-]+)(\S?)", said, re.M))
    assert len(shown) > 90 and set(shown) - known == set()
    assert {name for name, sign in shown.items() if sign == "="} & set(config._FLAGS) <= {"exclusive"}      # which is [=user] in truth
    for name in config._FLAGS:
        if f"--{name}" in said:
            done = slurm.run("sbatch", "--test-only", f"--{name}", "/bin/false", check=False)
            assert "requires an argument" not in done.stderr, name


def test_what_passes_the_check_of_time_is_what_sbatch_takes(slurm, tmp_path, cluster):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    for time in ("60", "30:00", "12:00:00", "2-12", "2-12:30", "2-12:30:30", "UNLIMITED", "99:99", "0:30"):
        assert cluster(f'time = "{time}"').slurm.time == time
        assert slurm.run("sbatch", "--test-only", f"--time={time}", script).returncode == 0
    assert slurm.run("sbatch", "--test-only", "--time=1:2:3:4", script, check=False).returncode != 0


def test_sbatch_takes_abbreviations_which_is_why_they_are_refused(slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    assert slurm.run("sbatch", "--test-on", "--parti=main", script).returncode == 0
