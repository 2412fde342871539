"""The job file and the cluster file: what a user may write, and what an error tells about the rest."""

import datetime
import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpurun import config, tomlfile
from gpurun.config import Cluster, Gpu, Host, Job, Limits, Selection, find_cluster, load_cluster, load_job, parse_host, pick_host
from gpurun.errors import ConfigError
from gpurun.tomlfile import tomllib

MINIMAL = '[job]\nname = "a"\nrun = "true"\n'
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def write(tmp_path):
    def put(text, name="job.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path
    return put


@pytest.fixture
def job(write):
    return lambda more="", environ={}: load_job(write(MINIMAL + more), environ)


@pytest.fixture
def cluster(write):
    return lambda text: load_cluster(write(text, "cluster.toml"))


def error_of(call, *args):
    with pytest.raises(ConfigError) as raised:
        call(*args)
    return str(raised.value)


# ---- a good job file -----------------------------------------------------------------------------------------------------------

def test_the_example_of_the_spec_is_read(write, tmp_path):
    path = write("""[job]
name = "airfrans_smoke_01"
setup = "uv sync --no-dev"
run = "uv run remote-run smoke-train configs/aggressive_smoke.toml"
workspace = { workdir = ".", exclude = ["/artifacts", "/.venv", "__pycache__"] }
outputs = ["metrics.jsonl", "final_metrics.json", "checkpoint_latest.pt"]
env = { HF_TOKEN = "..." }
""")
    assert load_job(path, {}) == Job(
        str(path), str(tmp_path), "airfrans_smoke_01", "uv run remote-run smoke-train configs/aggressive_smoke.toml", "uv sync --no-dev",
        str(tmp_path), ("/artifacts", "/.venv", "__pycache__"), ("metrics.jsonl", "final_metrics.json", "checkpoint_latest.pt"), {"HF_TOKEN": "..."})


def test_name_and_run_are_enough(job, tmp_path):
    assert job() == Job(str(tmp_path / "job.toml"), str(tmp_path), "a", "true")


def test_a_relative_path_of_a_job_file_gives_absolute_paths(write, tmp_path, monkeypatch):
    write(MINIMAL + 'workspace = { workdir = "." }')
    monkeypatch.chdir(tmp_path)
    loaded = load_job("job.toml", {})
    assert (loaded.path, loaded.folder, loaded.workdir) == (str(tmp_path / "job.toml"), str(tmp_path), str(tmp_path))


def test_tables_may_be_written_with_headers_or_dotted_keys(write, tmp_path):
    for text in ('[job]\nname="a"\nrun="true"\n[job.workspace]\nworkdir="."\n[job.env]\nA="1"',
                 '[job]\nname="a"\nrun="true"\nworkspace.workdir="."\nenv.A="1"', 'job={name="a",run="true",workspace={workdir="."},env={A="1"}}'):
        loaded = load_job(write(text), {})
        assert loaded.workdir == str(tmp_path) and loaded.env == {"A": "1"}


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "0", "x" * 64])
def test_good_names(write, name):
    assert load_job(write(f'[job]\nname="{name}"\nrun="true"'), {}).name == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "_a", "x" * 65, "a b", "a/b", "ä", "a\\n", "..", "${A}", "a\\u0000"])
def test_bad_names_are_refused_with_the_line(write, name):
    text = error_of(load_job, write(f'[job]\nname = "{name}"\nrun="true"'), {})
    assert ":2:1: job.name: " in text


def test_crlf_becomes_lf_in_commands(write):
    loaded = load_job(write(b'[job]\r\nname="a"\r\nrun="""one\r\ntwo\r\n"""\r\nsetup="x\\r\\ny"\r\n'), {})
    assert (loaded.run, loaded.setup) == ("one\ntwo\n", "x\ny")


@pytest.mark.parametrize("setup", ["", "  ", "\\n\\t", "\\r\\n"])
def test_an_all_blank_setup_is_no_setup(job, setup):
    assert job(f'setup = "{setup}"').setup == ""


@pytest.mark.parametrize("run", ["", "  \\n"])
def test_a_blank_run_is_refused(write, run):
    assert "job.run: is blank" in error_of(load_job, write(f'[job]\nname="a"\nrun="{run}"'), {})


def test_dollar_braces_in_commands_are_the_shells(write):
    assert load_job(write('[job]\nname="a"\nrun="echo ${X} $${Y}"'), {}).run == "echo ${X} $${Y}"


def test_a_command_longer_than_linux_takes_is_refused_before_anything_is_sent(write):
    assert "bash -c" in error_of(load_job, write(f'[job]\nname="a"\nrun="{"x" * 131072}"'), {})
    assert load_job(write(f'[job]\nname="a"\nrun="{"x" * 131071}"'), {})


# ---- workspace -----------------------------------------------------------------------------------------------------------------

def test_the_workdir_is_relative_to_the_job_file_and_may_lead_up(write, tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/job.toml").write_text(MINIMAL + 'workspace = { workdir = ".." }')
    assert load_job(tmp_path / "jobs/job.toml", {}).workdir == str(tmp_path.resolve())


def test_the_workdir_may_be_a_link_to_a_folder(job, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert job('workspace = { workdir = "link" }').workdir == str(tmp_path / "link")


@pytest.mark.parametrize("workdir, words", [
    ("/", "not relative"), ("/tmp", "not relative"), ("~", "not relative"), ("~/x", "not relative"), ("", "is blank"), (" ", "is blank"),
    ("gone", "does not exist"), ("job.toml", "is not a folder"), ("job.toml/x", "does not exist"), ("x" * 300, "does not exist"),
    ("a\\u0000b", "NUL"),
    ("dangling", "is not a folder"), ("circle", "is not a folder")])
def test_a_workdir_that_cannot_be_is_refused(job, tmp_path, workdir, words):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    text = error_of(job, f'workspace = {{ exclude = [], workdir = "{workdir}" }}')
    assert ":4:29: job.workspace.workdir: " in text and words in text


def test_exclude_patterns_are_kept_as_they_are(job):
    assert job('workspace = { workdir = ".", exclude = ["/a", "!b ", "#c", "", "d\\\\ "] }').exclude == ("/a", "!b ", "#c", "", "d\\ ")


def test_an_exclude_item_is_one_pattern(job):
    assert "job.workspace.exclude[1]: has a line break" in error_of(job, 'workspace = { workdir = ".", exclude = ["a", "b\\nc"] }')


# ---- outputs -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given_, kept", [
    (["a"], ("a",)), (["./a/"], ("a",)), (["a//b/./c"], ("a/b/c",)), (["a", "./a"], ("a",)), (["a/b", "c", "a"], ("c", "a")), ([], ()),
    (["a b", "-x", ".h", "*", "$HOME", "ä", "a\n"], ("a b", "-x", ".h", "*", "$HOME", "ä", "a\n")),
    (["ab", "a"], ("ab", "a")), (["./~x"], ("~x",)), (["..a", "a.."], ("..a", "a.."))])
def test_outputs_are_literal_relative_paths_normalised_and_without_repeats(job, given_, kept):
    assert job(f"outputs = {json.dumps(given_, ensure_ascii=False)}").outputs == kept


@pytest.mark.parametrize("name, words", [
    ("/a", "absolute"), ("/", "absolute"), ("..", "leads out"), ("a/../b", "leads out"), ("a/..", "leads out"), ("~", "~"), ("~/a", "~"),
    ("~user/a", "~"), ("", "blank"), (" ", "blank"), (".", "whole workdir"), ("./", "whole workdir"), ("a\\u0000", "NUL"),
    ("x" * 256, "too long"), ("x/" * 2049, "too long")])
def test_outputs_that_lead_elsewhere_are_refused_with_their_index(job, name, words):
    text = error_of(job, f'outputs = [\n  "fine", # "{name}"\n  "{name}",\n]')
    assert ":6:3: job.outputs[1]: " in text and words in text


# ---- env -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value, result", [
    ("plain $X $(y) {z}", "plain $X $(y) {z}"), ("${A}", "one"), ("<${A}${B_2}>", "<onetwo>"), ("$${A}", "${A}"), ("$$${A}", "$${A}"),
    ("$ ${A}$", "$ one$"), ("${E}", ""), ("${N}", "${A}"), ("", ""), ("}{", "}{")])
def test_a_value_takes_the_operators_variables(job, value, result):
    assert job(f'env = {{ K = "{value}" }}', {"A": "one", "B_2": "two", "E": "", "N": "${A}"}).env == {"K": result}


def test_a_variable_that_is_not_set_is_an_error_that_names_it_and_the_key(job):
    text = error_of(job, 'env = { A = "x", TOKEN = "secret-${HF_TOKEN}" }')
    assert ":4:18: job.env.TOKEN: " in text and "$HF_TOKEN" in text and "secret" not in text


@pytest.mark.parametrize("value", ["hunter2${", "${hunter2", "${}hunter2", "${hunter2-x}", "hunter2${ A}", "${1hunter2}", "${A:-hunter2}"])
def test_a_broken_reference_is_an_error_without_the_value(job, value):
    text = error_of(job, f'env = {{ K = "{value}" }}', {"A": "x"})
    assert "job.env.K: has a `${`" in text and "hunter2" not in text


@pytest.mark.parametrize("key, words", [(key, "variable's name") for key in ('"a b"', '"1a"', '"a=b"', '""', '"ä"', "a-b", '"a\\n"')]
                         + [("GPURUN_X", "gpurun's own")])
def test_bad_names_of_variables_are_refused(job, key, words):
    text = error_of(job, f"[job.env]\n{key} = 'hunter2'")
    assert ":5:1: job.env." in text and words in text and "hunter2" not in text


@pytest.mark.parametrize("value", ["7123", "true", "7123.5", "[7123]", "{ x = 7123 }", "2071-12-31"])
def test_a_value_that_is_no_string_is_refused_without_being_shown(job, value):
    text = error_of(job, f"[job.env]\nK = {value}")
    assert ":5:1: job.env.K: must be a string, but is " in text and "71" not in text


def test_a_nul_or_an_overlong_variable_is_refused_without_the_value(job):
    assert "hunter2" not in error_of(job, 'env = { K = "hunter2\\u0000" }')
    assert "one variable" in error_of(job, 'env = { K = "${A}${A}" }', {"A": "x" * 70000})
    many = ", ".join(f'K{n} = "${{A}}"' for n in range(20))
    assert "together" in error_of(job, f"env = {{ {many} }}", {"A": "x" * 70000})


def test_values_are_in_no_repr(job):
    assert "hunter2" not in repr(job('env = { K = "hunter2${A}" }', {"A": "hunter2"}))


SECRET = "hunter2"
AROUND = st.text(alphabet=st.sampled_from(list("${}A =\"'\\\n\t\0é")), max_size=8)


@QUIET
@given(AROUND, AROUND, st.booleans(), st.sampled_from([
    "env = { K = %s }", "[job.env]\nK = %s", "env.K = %s", "env = { K = %s", "env = { K %s }", "env = %s", "evn = { K = %s }", "env = { K = [%s] }",
    "env = { K.L = %s }", "env = { K = %s, K = 1 }", "env = [{ K = %s }]", "[env]\nK = %s", "env = { GPURUN_K = %s }",
    "workspace = { env = { K = %s } }", "env = { K = %s }\nname = 'b'", "env = { K = %s }\noutputs = 3"]))
def test_a_value_never_leaks_into_an_error(write, before, after, quoted, form):
    value = before + SECRET + after
    assume(not re.search(r"\$\{A*hunter2A*\}", value))  # there it is the name of a variable, which an error shows
    text = MINIMAL + form % (json.dumps(value) if quoted else f'"{value}"')
    try:
        loaded = load_job(write(text), {"A": SECRET, "AA": SECRET})
    except ConfigError as error:
        assert SECRET not in str(error) and error.__cause__ is None and error.__suppress_context__ is (error.__context__ is not None)
    else:
        assert SECRET not in repr(loaded)


# ---- errors that say where and what --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("more, place, words", [
    ("rnu = 1", "4:1: job.rnu", ["is not a key here; did you mean `run`?", "name, run, setup, workspace, outputs, env"]),
    ('command = "x"', "4:1: job.command", ["did you mean `run`?"]),
    ('workdir = "."', "4:1: job.workdir", ["workspace = { workdir"]),
    ("zzz = 1", "4:1: job.zzz", ["the keys here are name"]),
    ('"a\\nb" = 1', '4:1: job."a\\nb"', ["is not a key"]),
    ('workspace = { workdir = ".", ignore = [] }', "4:30: job.workspace.ignore", ["workdir, exclude"]),
    ('workspace = { workdir = ".", exlude = [] }', "4:30: job.workspace.exlude", ["did you mean `exclude`?"]),
    ("workspace = {}", "4:1: job.workspace.workdir", ["is missing"]),
    ("[job.workspace]", "4:1: job.workspace.workdir", ["is missing"]),
    ('workspace = "."', "4:1: job.workspace", ["must be a table, but is a string", 'workspace = { workdir = "." }']),
    ('workspace = { workdir = 1 }', "4:15: job.workspace.workdir", ["must be a string, but is a whole number"]),
    ('workspace = { workdir = ".", exclude = "a" }', "4:30: job.workspace.exclude", ["must be an array, but is a string"]),
    ('workspace = { workdir = ".", exclude = ["a",\n "b", 1.5] }', "5:7: job.workspace.exclude[2]", ["but is a number"]),
    ('outputs = "a"', "4:1: job.outputs", ["must be an array, but is a string", '["metrics.json"]']),
    ("outputs = [{}]", "4:12: job.outputs[0]", ["but is a table"]),
    ("outputs = {}", "4:1: job.outputs", ["but is a table"]),
    ("env = []", "4:1: job.env", ["must be a table, but is an array"]),
    ("setup = false", "4:1: job.setup", ["but is true or false"]),
    ("setup = 2020-01-01", "4:1: job.setup", ["but is a date"]),
    ('"set\\u0075p" = 1', "4:1: job.setup", ["but is a whole number"]),
    ('# setup = 1\nrnu = "x = 1"', "5:1: job.rnu", []),
    ('setup = """\nrnu = 1\n"""\nrnu = 2', "7:1: job.rnu", []),
    ('setup = """x"""""\noutputs = [\n1]', "6:1: job.outputs[0]", []),
    ("setup = '''\n[job]\n''' # '\nrnu = 1.5e3", "7:1: job.rnu", []),
    ("  [ job . env ] # x\n  K = 1", "5:3: job.env.K", []),
    ("[jobs]", "4:1: jobs", ["did you mean `job`?", "job, external_job"]),
    ("[other]\nname = 1", "4:1: other", ["job, external_job"]),
])
def test_an_error_has_the_place_the_keys_path_the_valid_keys_and_the_nearest_one(job, tmp_path, more, place, words):
    text = error_of(job, more)
    assert text.startswith(f"{tmp_path}/job.toml:{place}: ") and all(word in text for word in words)


@pytest.mark.parametrize("key", config.HARDWARE_KEYS + ("GPU",))
@pytest.mark.parametrize("form", ["{} = 1", "[job.{}]\ncount = 1", "[{}]\ncount = 1"])
def test_hardware_in_a_job_is_sent_to_the_cluster_file(job, key, form):
    text = error_of(job, form.format(key))
    assert ":4:1: " in text and "belongs in the cluster file" in text


@pytest.mark.parametrize("text, place, words", [
    ('[job]\nname = a\n', ":2:8: ", ["Invalid value", "needs quotes"]), ('[job]\nname = "a', ":2:10: ", ["not valid TOML"]),
    ("[job", ":1:5: ", ["not valid TOML"]), ("x = [\n", ":2:1: ", ["not valid TOML"]), ('[job]\nname="a"\nname="b"\n', ":3:", ["not valid TOML"]),
    (MINIMAL + "x = " + "9" * 5000, "", ["not valid TOML"]), (MINIMAL + "x = " + "[" * 100000, "", []), ("\0", ":1:1", ["not valid TOML"]),
    ("", ": ", ["is empty", "[job]"]), (" \n# nothing\n", ": ", ["is empty"]), ('name = "a"\nrun = "b"', ":1:1: name: ", ["below [job]"]),
    ("[external_job]", ": ", ["has no table [job]"]), ("job = 1", ":1:1: job: ", ["must be a table"]),
    ("[[job]]", ":1:1: job: ", ["must be a table, but is an array"]),
    ("[job]", ":1:1: job.name: ", ["is missing"]), ('[job]\nname = "a"', ":1:1: job.run: ", ["is missing"]),
    (b"\xef\xbb\xbf" + MINIMAL.encode(), ": ", ["byte order mark"]), (MINIMAL.encode("utf-16"), ": ", ["byte order mark", "UTF-8"]),
    (MINIMAL.encode() + b"# \xff", ":4: ", ["not UTF-8"]), (b"#" * 300000, ": ", ["longer than"]),
])
def test_a_file_that_is_no_job_file_is_named_with_the_place_if_there_is_one(write, text, place, words):
    path = write(text)
    message = error_of(load_job, path, {})
    assert message.startswith(f"{path}{place}") and all(word in message for word in words)


def test_a_missing_file_a_folder_and_an_unreadable_path_are_clear(tmp_path):
    assert "there is no such job file" in error_of(load_job, tmp_path / "gone.toml", {})
    assert "is a folder" in error_of(load_job, tmp_path, {})
    assert "can't be read" in error_of(load_job, "a\0b", {})
    assert "can't be read" in error_of(load_job, "x" * 5000, {})
    assert "\n" not in error_of(load_job, "a\nb", {})
    assert error_of(load_job, os.fsdecode(b"\xff.toml"), {}).isprintable()


# ---- which cluster -------------------------------------------------------------------------------------------------------------

def test_the_cluster_file_is_the_option_then_the_variable_then_beside_the_job_then_the_home_then_none(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "job"
    files = [tmp_path / "a.toml", tmp_path / "b.toml", folder / "cluster.toml", home / ".config/gpurun/cluster.toml"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    one, two, beside, at_home = map(str, files)
    home, folder, env = str(home), str(folder), {"GPURUN_CLUSTER": two}
    assert find_cluster(one, folder, env, home) == one
    assert find_cluster(None, folder, env, home) == two
    assert find_cluster(None, folder, {"GPURUN_CLUSTER": "~/.config/gpurun/cluster.toml"}, home) == at_home
    assert find_cluster(None, folder, {"GPURUN_CLUSTER": ""}, home) == beside
    files[2].unlink()
    assert find_cluster(None, folder, {}, home) == at_home
    assert find_cluster(None, folder, {}, None) is None
    files[3].unlink()
    assert find_cluster(None, folder, {}, home) is None


def test_a_cluster_file_that_was_named_is_never_passed_over(tmp_path):
    (tmp_path / "cluster.toml").touch()
    assert "--cluster names" in error_of(find_cluster, "gone.toml", str(tmp_path), {}, str(tmp_path))
    assert "$GPURUN_CLUSTER names" in error_of(find_cluster, None, str(tmp_path), {"GPURUN_CLUSTER": "gone.toml"}, str(tmp_path))
    assert "--cluster is empty" in error_of(find_cluster, "", str(tmp_path), {}, str(tmp_path))
    assert "does not exist" in error_of(find_cluster, "a\0b", str(tmp_path), {}, str(tmp_path))


def test_no_cluster_file_is_this_machine():
    assert load_cluster(None) == Cluster(None, "local", (), "disabled", 0, "", "~/.gpurun", 300)


# ---- the cluster file ----------------------------------------------------------------------------------------------------------

SSH = '[provider]\nkind = "ssh"\n'
ONE = '[[provider.hosts]]\nhost = "gpu1"\n'


def test_every_key_of_an_ssh_cluster_is_read(cluster, tmp_path):
    loaded = cluster(SSH + 'relay = "n0"\nudp_port = 4433\npython = "python3.11"\nnode_dir = "/scratch/me/./gpurun/"\nlost_after_s = 60\n'
                     'max_connections = 8\n' + ONE + '[[provider.hosts]]\nhost = "me@example.org:2222"\n')
    hosts = (Host("gpu1", "", "gpu1", 0), Host("me@example.org:2222", "me", "example.org", 2222))
    assert loaded == Cluster(str(tmp_path / "cluster.toml"), "ssh", hosts, "n0", 4433, "python3.11", "/scratch/me/gpurun", 60, max_connections=8)


def test_defaults_of_ssh(cluster, tmp_path):
    assert cluster(SSH + ONE) == Cluster(str(tmp_path / "cluster.toml"), "ssh", (Host("gpu1", "", "gpu1", 0),))


@pytest.mark.parametrize("text, place, words", [
    ("", ": ", ["is empty", "[provider]"]),
    ("[provider]", ":1:1: provider.kind: ", ["is missing", "local, ssh, vastai, slurm"]),
    ('[provider]\nkind = "shh"', ":2:1: provider.kind: ", ["did you mean `ssh`?", "local, ssh"]),
    ("[provider]\nkind = 1", ":2:1: provider.kind: ", ["must be a string"]),
    ("provider = 1", ":1:1: provider: ", ["must be a table"]),
    ("[[provider]]", ":1:1: provider: ", ["must be a table"]),
    ("[providr]", ":1:1: providr: ", ["`provider`"]),
    (MINIMAL, ":1:1: job: ", ["this is a job file"]),
    (SSH, ":1:1: provider.hosts: ", ["at least one host"]),
    (SSH + "hosts = []", ":3:1: provider.hosts: ", ["at least one"]),
    (SSH + 'hosts = ["gpu1"]', ":3:10: provider.hosts[0]: ", ["must be a table"]),
    (SSH + 'hosts = "gpu1"', ":3:1: provider.hosts: ", ["must be an array"]),
    (SSH + "[[provider.hosts]]", ":3:1: provider.hosts[0].host: ", ["is missing"]),
    (SSH + ONE + "[[provider.hosts]]\nhots = 1", ":6:1: provider.hosts[1].hots: ", ["`host`"]),
    (SSH + ONE + "[[provider.hosts]]\nhost = 1", ":6:1: provider.hosts[1].host: ", ["must be a string"]),
    (SSH + ONE + ONE, ":6:1: provider.hosts[1].host: ", ["twice"]),
    (SSH + ONE + '[[provider.hosts]]\nhost = "GPU1"', ":6:1: ", ["twice"]),
    (SSH + ONE + "[provider.hosts.x]\ny = 1", ":5:1: provider.hosts[0].x", ["is not a key"]),
    ('[provider]\nkind = "local"\n' + ONE, ":3:1: provider.hosts: ", ["takes no hosts", '"ssh"']),
    ('[provider]\nkind = "local"\nimage = 1', ":3:1: provider.image: ", ["relay"]),
])
def test_a_cluster_file_with_a_mistake_is_answered_with_its_place(cluster, tmp_path, text, place, words):
    message = error_of(cluster, text)
    assert message.startswith(f"{tmp_path}/cluster.toml{place}") and all(word in message for word in words)


@pytest.mark.parametrize("line", [
    'relay = "on"', "relay = []", "relay = [1]", 'relay = ["http://x"]', 'relay = ["https://"]', 'relay = ["https://x:99999"]',
    'relay = ["https://[x"]', 'relay = ["https://a b"]', 'relay = ["https://u:p@x"]', "relay = true",
    "max_connections = 0", "max_connections = 65", "max_connections = true", "max_connections = 1.5", "udp_port = -1", "udp_port = 65536", "udp_port = true", 'udp_port = "1"',
    "python = 3", 'python = ""', 'python = "-c"', 'python = "a/b"', 'python = "~x/p"', 'python = "py\\nthon"',
    'node_dir = ""', 'node_dir = "x"', 'node_dir = "/"', 'node_dir = "~"', 'node_dir = "~/"', 'node_dir = "~/../x"', 'node_dir = "~me/x"', 'node_dir = "/a\\u0007"',
    "lost_after_s = 0", "lost_after_s = nan", "lost_after_s = inf", "lost_after_s = true", 'lost_after_s = "9"'])
def test_a_setting_of_the_wrong_kind_is_refused(cluster, line):
    assert re.search(rf":3:(1: provider\.{line.split()[0]}|10: provider\.relay\[0\]): must be ", error_of(cluster, SSH + line + "\n" + ONE))


@pytest.mark.parametrize("line, value", [
    ('relay = "disabled"', "disabled"), ('relay = ["https://r.example/", "https://s:8443"]', ("https://r.example/", "https://s:8443")),
    ("udp_port = 0", 0), ('python = "/opt/my py/bin/python"', "/opt/my py/bin/python"), ('python = "~/venv/bin/python"', "~/venv/bin/python"),
    ('node_dir = "~/a//b/"', "~/a/b"), ("lost_after_s = 1.5", 1.5)])
@pytest.mark.parametrize("kind", ["local", "ssh", "vastai"])
def test_settings_of_every_kind(cluster, line, value, kind):
    image = f'image = "{IMAGE}"\n' * (kind == "vastai")
    loaded = cluster(f'[provider]\nkind = "{kind}"\n{image}{line}\n' + ONE * (kind == "ssh"))
    assert getattr(loaded, line.split()[0]) == value


IMAGE = "vastai/base-image:cuda-12.8.1-cudnn-devel-ubuntu22.04-py310"
VASTAI = f'[provider]\nkind = "vastai"\nimage = "{IMAGE}"\n'


def test_an_image_is_enough_for_vastai_and_the_rest_has_defaults(cluster, tmp_path):
    loaded = cluster(VASTAI)
    assert loaded == Cluster(str(tmp_path / "cluster.toml"), "vastai", image=IMAGE)
    assert loaded[8:] == (IMAGE, 64, 1, Gpu("", 1, 0.0), Selection(0.97, 100.0, 0.0, True, None, None), Limits(None, None, 60.0), None, 1200, None, None, 64)


@pytest.mark.parametrize("gpu", ['gpu = { name = "RTX 4090", count = 2, min_vram_gb = 24 }\n', ""])
def test_every_key_of_a_vastai_cluster_is_read_in_tables_of_either_form(cluster, gpu):
    loaded = cluster(VASTAI + 'relay = "n0"\nudp_port = 4433\npython = "python3.11"\nnode_dir = "/root/g"\nlost_after_s = 60\ndisk_gb = 100\n'
                     'nodes = 3\nbid = 0.2\nready_within_s = 1800\n' + gpu + """[provider.selection]
min_reliability = 0.9
min_down_mbps = 50
min_up_mbps = 10.5
require_verified = false
max_price_per_hour = 0.4
min_cuda = 12.4
[provider.limits]
max_hours = 8
max_cost = 3.5
idle_minutes = 0.5
""" + ("" if gpu else '[provider.gpu]\nname = "RTX 4090"\ncount = 2\nmin_vram_gb = 24\n'))
    assert loaded[1:] == ("vastai", (), "n0", 4433, "python3.11", "/root/g", 60, IMAGE, 100, 3, Gpu("RTX 4090", 2, 24),
                          Selection(0.9, 50, 10.5, False, 0.4, 12.4), Limits(8, 3.5, 0.5), 0.2, 1800, None, None, 64)


@pytest.mark.parametrize("image", [
    "ubuntu:22.04", "pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime", "localhost:5000/me/x_y:1", "ghcr.io/a/b/c:v1.0", "vastai/base-image:@vastai-automatic-tag",
    "ubuntu@sha256:" + "0f" * 32, "ubuntu:22.04@sha256:" + "0f" * 32])
def test_an_image_has_a_tag_or_a_digest(cluster, image):
    assert cluster(f'[provider]\nkind = "vastai"\nimage = "{image}"\n').image == image


@pytest.mark.parametrize("image, word", [
    ("ubuntu", '"ubuntu:1.0"'), ("localhost:5000/me/x", "no tag"), ("ghcr.io/a/b", "no tag"), ("", "not the name"), ("a b:1", "not the name"), ("a:", "not the name"),
    ("-v:1", "not the name"), ("A:1", "not the name"), ("a:1;x", "not the name"), ("https://a/b:1", "not the name"), ("a//b:1", "not the name"),
    ("a:1\\n", "not the name"), ("ubuntu@sha256:00", "not the name"), ("a/" * 300 + "b:1", "not the name"), ("a" + "-" * 600 + ":1", "not the name")])
def test_an_image_without_one_or_that_is_none_is_refused(cluster, image, word):
    text = error_of(cluster, f'[provider]\nkind = "vastai"\nimage = "{image}"\n')
    assert ":3:1: provider.image: " in text and word in text


@pytest.mark.parametrize("line, key", [(f"{key} = {value}", key) for key, values in {
    "disk_gb": (7, 64.5, "nan", "true", '"64"', 65537), "nodes": (0, 65, 1.0, -1, "false"), "bid": (0, -0.1, 129, "nan", "inf", '"0.2"'),
    "ready_within_s": (0, "nan", "inf", 1e7, "true"), "gpu.count": (0, 1.5, -1, 65, "true", '"1"'), "gpu.min_vram_gb": (-1, "nan", "-inf", '"24 GB"'),
    "gpu.name": (4090, '"a\\nb"', f'"{"x" * 65}"', '["RTX 4090"]'),
    "selection.min_reliability": (-0.1, 1.01, 97, "nan", '"0.9"'), "selection.min_down_mbps": (-1, "inf"), "selection.min_up_mbps": (-1, "nan"),
    "selection.require_verified": (1, '"yes"'), "selection.max_price_per_hour": (0, -1, "nan", "inf", "true"), "selection.min_cuda": (0, "nan", '"12.8"'),
    "limits.max_hours": (0, -1, "nan", "inf"), "limits.max_cost": (0, "inf", '"$5"'), "limits.idle_minutes": (0, "nan", 1e9)}.items() for value in values])
def test_a_number_of_vastai_that_makes_no_sense_is_refused_with_its_place(cluster, line, key):
    assert re.search(rf":4:1: provider\.{re.escape(key)}: must be ", error_of(cluster, VASTAI + line))


@pytest.mark.parametrize("text, place, words", [
    ('[provider]\nkind = "vastai"\n', ":1:1: provider.image: ", ["is missing", "vastai/base-image:"]),
    (VASTAI + ONE, ":4:1: provider.hosts: ", ["rents its machines", '"ssh"']),
    (VASTAI + "disk = 100", ":4:1: provider.disk: ", ["did you mean `disk_gb`?", "ready_within_s"]),
    (VASTAI + 'gpu = "RTX 4090"', ":4:1: provider.gpu: ", ["must be a table", 'gpu = { name = "RTX 4090", count = 1 }']),
    (VASTAI + 'gpu = { nam = "RTX 4090" }', ":4:9: provider.gpu.nam: ", ["did you mean `name`?"]),
    (VASTAI + "[provider.selection]\nmax_price = 1", ":5:1: provider.selection.max_price: ", ["did you mean `max_price_per_hour`?"]),
    (VASTAI + "limits.max_hour = 1", ":4:1: provider.limits.max_hour: ", ["did you mean `max_hours`?"]),
    (VASTAI + "bid = 0.5\nselection.max_price_per_hour = 0.4", ":4:1: provider.bid: ", ["0.5 is more than", "0.4"]),
    ('[provider]\nkind = "local"\nnodes = 2', ":3:1: provider.nodes: ", ['only the kinds "vastai" and "slurm" have it']),
    (SSH + ONE + "[provider.gpu]\ncount = 1", ":5:1: provider.gpu: ", ['only kind "vastai" has it']),
])
def test_a_mistake_in_a_vastai_cluster_file_is_answered_with_its_place(cluster, tmp_path, text, place, words):
    message = error_of(cluster, text)
    assert message.startswith(f"{tmp_path}/cluster.toml{place}") and all(word in message for word in words)


@pytest.mark.parametrize("text, parts", [
    ("gpu1", ("", "gpu1", 0)), ("me@gpu1", ("me", "gpu1", 0)), ("gpu1:22", ("", "gpu1", 22)), ("me@10.0.0.1:65535", ("me", "10.0.0.1", 65535)),
    ("[::1]", ("", "::1", 0)), ("me@[2001:db8::1]:2222", ("me", "2001:db8::1", 2222)), ("[fe80::1%eth0]", ("", "fe80::1%eth0", 0)),
    ("me@corp@gpu1", ("me@corp", "gpu1", 0)), ("CORP\\me@gpu1", ("CORP\\me", "gpu1", 0)), ("my_gpu.lan", ("", "my_gpu.lan", 0))])
def test_a_host_is_an_alias_or_user_host_and_port(text, parts):
    assert parse_host(text) == Host(text, *parts)


@pytest.mark.parametrize("text", [
    "", " ", "-oProxyCommand=x", "a@-b", "-a@b", "a b", "a\tb", "a\nb", "a\0b", "a\x7f", "@a", "a@", "a:", "a:0", "a:65536", "a:-1", "a:x", "a:²",
    "::1", "a:1:2", "[::1", "[x]", "[]", "[::1]x", "[10.0.0.1]", "[fe80::1%;x]", "a;b", "a$(b)", "a`b`", "a|b", "a&b", "a'b", 'a"b', "a>b",
    "a\\b", "a/b", "ssh://a", "a,b", "u;v@a", "u:p@a", "u$x@a", "u\\@a", "a\u00a0b", "a\u202eb"])
def test_a_host_that_ssh_could_take_for_something_else_is_refused(text):
    with pytest.raises(ValueError):
        parse_host(text)


def test_a_bad_host_in_the_file_is_shown_with_what_to_write(cluster):
    text = error_of(cluster, SSH + '[[provider.hosts]]\nhost = "::1"')
    assert ':4:1: provider.hosts[0].host: "::1" ' in text and "brackets" in text and "user@[IPv6]:port" in text


def test_pick_host_takes_the_text_of_a_host_or_a_hostname_that_only_one_has():
    hosts = (parse_host("gpu1"), parse_host("me@gpu2:22"), parse_host("a@gpu3"), parse_host("b@gpu3"))
    some = Cluster(Path("/c.toml"), "ssh", hosts)
    assert pick_host(some, "") == pick_host(some, None) == pick_host(some, "gpu1") == hosts[0]
    assert pick_host(some, "gpu2") == pick_host(some, "me@gpu2:22") == hosts[1]
    assert pick_host(some, "b@gpu3") == hosts[3]
    assert "more than one node" in error_of(pick_host, some, "gpu3")
    text = error_of(pick_host, some, "gpu11")
    assert "did you mean `gpu1`?" in text and "gpu1, me@gpu2:22, a@gpu3, b@gpu3" in text and "/c.toml" in text


def test_pick_host_of_this_machine_is_none():
    assert pick_host(Cluster(), "") is pick_host(Cluster(), "local") is None
    assert "the nodes are local" in error_of(pick_host, Cluster(), "gpu1")


# ---- whatever is in a file -----------------------------------------------------------------------------------------------------

WORDS = ["[job]", "[[job", "]]", "[", "]", "{", "}", "=", ".", ",", "\n", "\r\n", "#", '"', "'", '"""', "'''", "\\", "name", "run", "env",
         "workspace", "provider", "hosts", '"a"', "1", "1.5", "nan", "true", "1979-05-27 07:32:00", " "]


def only_a_result_or_a_config_error(path):
    for load, kind in ((lambda: load_job(path, {"A": "x"}), Job), (lambda: load_cluster(path), Cluster)):
        try:
            assert isinstance(load(), kind)
        except ConfigError as error:
            assert str(error).startswith(str(path))


@settings(QUIET, max_examples=300)
@given(st.one_of(st.binary(max_size=80), st.binary(max_size=40).map(lambda raw: MINIMAL.encode() + raw),
                 st.lists(st.sampled_from(WORDS), max_size=30).map(lambda words: "".join(words).encode())))
def test_any_bytes_give_a_result_or_a_config_error(write, raw):
    only_a_result_or_a_config_error(write(raw))


VALUES = st.recursive(
    st.one_of(st.text(alphabet=st.characters(codec="utf-8"), max_size=12), st.integers(-10, 70000), st.floats(), st.booleans(), st.dates(),
              st.datetimes(), st.times(), st.sampled_from(["${A}", "${", "..", "/x", "~", "ssh", "local", "vastai", "slurm", "gpu1", "n0", "quick", "--mem=1"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
        st.sampled_from(["workdir", "exclude", "host", "kind", "hosts", "relay", "name", "count", "min_reliability", "max_hours", "A", "x y", "", "é", "\n"]), inner, max_size=3)), max_leaves=8)


def toml(value):
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else repr(value)


@settings(QUIET, max_examples=400)
@given(st.dictionaries(st.sampled_from(config.JOB_KEYS + ("gpu", "é")), VALUES, max_size=4),
       st.dictionaries(st.sampled_from(config.EXTERNAL_KEYS), VALUES, max_size=4),
       st.dictionaries(st.sampled_from(config.PROVIDER_KEYS + config.VASTAI_KEYS + config.SLURM_KEYS), VALUES, max_size=4), st.booleans())
def test_any_value_under_any_key_gives_a_result_or_a_config_error(write, job, external, provider, good):
    base_job = {"name": "a", "run": "true"} if good else {}
    only_a_result_or_a_config_error(write("job = " + toml({**base_job, **job}) + "\nexternal_job = " + toml(external)))
    for base_provider in ({"kind": "ssh", "hosts": [{"host": "a"}]}, {"kind": "vastai", "image": IMAGE}, {"kind": "slurm"}) if good else ({},):
        only_a_result_or_a_config_error(write("provider = " + toml({**base_provider, **provider})))


# ---- places, against tomllib ---------------------------------------------------------------------------------------------------

def paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, path + (key,))


@settings(QUIET, max_examples=300)
@given(st.dictionaries(st.sampled_from(["a", "b c", "", 'q"', "é"]), VALUES, max_size=4), st.dictionaries(st.sampled_from(["t", "u v"]), st.lists(
    st.dictionaries(st.sampled_from(["k", "l"]), VALUES, max_size=2), min_size=1, max_size=2), max_size=2))
def test_every_key_of_a_file_has_a_place_and_nothing_else_has(top, tables):
    text = "".join(f"{toml(key)} = {toml(value)} # k = 1\n" for key, value in top.items())
    for name, items in tables.items():
        for item in items:
            text += f"[[ {toml(name)} ]]\n" + "".join(f"  {key} = {toml(value)}\n" for key, value in item.items())
    places = tomlfile.places_of(text)
    assert set(places) == {path for path in paths(tomllib.loads(text)) if len(path) <= tomlfile.DEPTH}
    for path, offset in places.items():
        if isinstance(path[-1], str) and path[-1] not in tables:
            assert re.match(re.escape(toml(path[-1])) + r"|k|l", text[offset:])


@pytest.mark.parametrize("head, line", [
    (".".join(["a"] * 60_000) + " = 1\n", 4), ("[" + " . ".join(["a"] * 102) + "]\n", 4), ("x = { " + ".".join(["'a'"] * 102) + " = 1 }\n", 4),
    ("setup = '''\n\n'''\n" + ".".join(["a"] * 102) + " = 1\n", 7)])
def test_a_key_of_too_many_parts_is_refused_before_it_costs_time(write, head, line):
    begun = time.process_time()
    assert f"job.toml:{line}: is nested too deeply" in error_of(load_job, write(MINIMAL + head), {})
    assert time.process_time() - begun < 2       # tomllib takes half a minute for the first


def test_dots_that_are_no_key_may_be_many(job):
    dots = "." * 300
    loaded = job(f'setup = """\necho "{dots}" = 1\n{dots}\\\\"""\nenv = {{ "A" = "{dots}", B = \'{dots}\' }} # {dots}\n# {dots}\n')
    assert loaded.env == {"A": dots, "B": dots} and dots in loaded.setup
