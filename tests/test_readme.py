"""The README holds: its commands exist, its files load, its numbers are the code's, and what a user has to know of is in it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gpurun import bootstrap, config, errors, fleet, guard, machines, manifest, orchestrator, preflight, provider, provider_vastai, renting, screen, store
from gpurun import supervise, tomlfile
from gpurun.cli import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
WORDS = set(re.findall(r"`([^`\n]+)`", README))
EXAMPLES = sorted((ROOT / "contrib").rglob("*.toml"))
TABLES = {"gpu": config.Gpu(), "selection": config.Selection(), "limits": config.Limits()}
DOTTED = {f"{table}.{key}": value for table, defaults in TABLES.items() for key, value in defaults._asdict().items()}


def command_lines() -> list[str]:
    """Every `gpurun …` that the README shows: in its blocks (without comment and pipe) and in its sentences."""
    found = []
    for language, text in BLOCKS:
        for line in text.splitlines() if language in ("sh", "console") else ():
            line = line.removeprefix("$ ") if language == "console" else line
            if language == "sh" or line.startswith("gpurun ") and not line.startswith("gpurun: "):
                found += re.findall(r"(?:^|&& |; )(?:\.venv/bin/)?(gpurun [^#|&;]+)", line)
    found += [word for word in WORDS if word.startswith("gpurun ") and "COMMAND" not in word]
    return sorted({line.strip() for line in found})


@pytest.mark.parametrize("line", command_lines())
def test_each_command_line_in_it_is_one_that_gpurun_takes(line):
    words = shlex.split(line.split("|")[0].replace("[RUN]", "RUN"))[1:]
    if words == ["--version"]:
        return                                         # tests/test_contrib.py asks for it
    context = click.Context(cli, info_name="gpurun")
    name, command, rest = cli.resolve_command(context, words)
    assert command is not None
    if len(words) > 1 or name == "run":                # else the sentence only names a command
        command.make_context(name, rest, parent=context)   # raises on an option or argument that isn't there


def test_there_are_command_lines_to_check():
    lines = command_lines()
    assert "gpurun job.toml --cluster cluster.toml" in lines and "gpurun stop RUN" in lines and len(lines) > 8
    assert [text for language, text in BLOCKS if text.strip() == "tests/run"]
    for path in re.findall(r"(?:contrib|tests)/[\w./-]+", README):
        assert (ROOT / path.rstrip(".")).exists() or "*" in path, path


def test_each_job_and_cluster_file_in_it_loads(tmp_path):
    jobs = clusters = 0
    for language, text in BLOCKS:
        text = text if language == "toml" else ""
        path = tmp_path / "file.toml"
        path.write_text(text)
        if "[job]" in text:
            config.load_job(path, {})
            jobs += 1
        elif "[provider]" in text:
            config.load_cluster(path)
            clusters += 1
    assert jobs >= 1 and clusters >= 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_example_loads(path, tmp_path):
    text = path.read_text()
    if "[job]" in text:
        assert config.load_job(path, {}).name
        return
    if config.load_cluster(path).kind == "vastai":
        optional = re.findall(r"^# ([\w.]+ = [^#\n]*)", text.split("these are the defaults")[1], re.M)
        written = tmp_path / "cluster.toml"
        written.write_text(text + "\n".join(optional) + "\n")                     # that they are what counts without them
        assert config.load_cluster(written)._replace(path="") == config.load_cluster(path)._replace(path="")
        shown = {line.split(" = ")[0] for line in re.findall(r"^(?:# )?([\w.]+ = )", text, re.M)}
        assert shown | {"selection.min_cuda"} == {*(set(config.VASTAI_KEYS) - set(TABLES)), "kind", *DOTTED}
        return
    if config.load_cluster(path).kind == "slurm":
        optional = re.findall(r"^# (\w+ = [^#\n]*)", text.split("these are the defaults")[1], re.M)
        written = tmp_path / "cluster.toml"
        written.write_text(text + "\n".join(optional) + "\n")
        assert config.load_cluster(written)._replace(path="") == config.load_cluster(path)._replace(path="")
        assert set(re.findall(r"^(?:# )?(\w+) = ", text, re.M)) == {*config.SLURM_KEYS, "kind", "node_dir"}
        written.write_text(re.sub(r"^# (?=(account|extra) = )", "", text, flags=re.M))
        assert config.load_cluster(written).slurm.extra and config.load_cluster(written).slurm.account
        return
    assert config.load_cluster(path).kind == "ssh"
    commented = re.sub(r"^# (?=(\w+ = |\[\[|host = ))", "", text, flags=re.M)     # the optional lines, taken into the table at the top
    optional = re.findall(r"^\w+ = .*$", commented.split("Everything below")[1], re.M)
    written = tmp_path / "cluster.toml"
    written.write_text('[provider]\nkind = "ssh"\n' + "\n".join(line for line in optional if "python" not in line)
                       + '\n[[provider.hosts]]\nhost = "gpu1"\n')
    loaded, plain = config.load_cluster(written), config.load_cluster(path)
    for key in ("relay", "udp_port", "node_dir", "lost_after_s"):                 # it says that these are the defaults
        assert f"# {key} = " in text and getattr(loaded, key) == getattr(plain, key)


def test_the_tables_have_every_key_and_option():
    for key in (*config.JOB_KEYS, *config.WORKSPACE_KEYS, *config.PROVIDER_KEYS, *config.KINDS, "external_job", "host"):
        assert re.search(rf"`[^`]*\b{key}\b[^`]*`", README), key
    rows = set(re.findall(r"^\| `(\w+)` \|", README, re.M))
    assert set(config.JOB_KEYS) | set(config.PROVIDER_KEYS) | set(config.SLURM_KEYS) <= rows
    rows = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", README, re.M))))
    assert set(config.EXTERNAL_KEYS) <= rows
    assert set(config.VASTAI_KEYS) - set(TABLES) | set(DOTTED) <= set(re.findall(r"^\| `([\w.]+)` \|", README, re.M))
    for name, command in cli.commands.items():
        assert f"gpurun {name}" in README, name
        assert name == "run" or re.search(rf"^\| `gpurun {name}\b", README, re.M), name
        for option in (option for one in command.params for option in one.opts if option.startswith("--")):
            assert re.search(rf"`[^`]*{option}\b[^`]*`", README), f"{name} {option}"


def test_every_exit_code_is_in_it():
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    rows = set(re.findall(r"^\| (\d+) \|", README, re.M))
    assert {str(code) for code in codes} == rows
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.GpurunError):
            assert error.exit_code in codes


def test_every_variable_and_json_type_is_in_it():
    sources = "".join(path.read_text() for path in sorted((ROOT / "gpurun").glob("*.py")))
    for name in set(re.findall(r"\bGPURUN_[A-Z_]*[A-Z]\b", sources)) | set(re.findall(r"\bXDG_[A-Z_]+_HOME\b", sources)):
        assert name in README, name
    commands = "".join((ROOT / "gpurun" / f"{name}.py").read_text() for name in ("cli", "cli_jobs", "cli_nodes", "cli_runs"))
    kinds = set(re.findall(r'"type": "(\w+)"', (screen.__doc__ or "") + commands))
    for kind in kinds | {"warning", "error", "stderr", "setup", "plan", "run", "check", "result"}:
        assert f"`{kind}`" in README, kind


def test_its_numbers_are_those_of_the_code():
    defaults = config.Cluster()
    for text in (
        f"| `lost_after_s` | {defaults.lost_after_s} |", f'| `node_dir` | `"{defaults.node_dir}"` |', f'| `relay` | `"{defaults.relay}"` |',
        f"(TERM, {supervise.GRACE_S:g} s, KILL", f"(TERM, {supervise.LEFTOVER_GRACE_S:g} s, KILL)", f"at most every {screen.PLAIN_S:g} s",
        f"up to {store.CACHE_CAP_BYTES >> 30} GiB", f"the last {orchestrator.KEEP_RUNS} stay", f"{manifest.MAX_ENTRIES:,} files and folders",
        f"names up to {manifest.MAX_COMPONENT} bytes, paths up to {manifest.MAX_PATH}", f"glibc {'.'.join(map(str, bootstrap.GLIBC))} or newer",
        f"a job file {tomlfile.MAX_FILE_BYTES >> 10} KiB", f"at most {config.MAX_TEXT_BYTES + 1 >> 10} KiB each",
    ):
        assert text in README, text
    for name in ("run.json", "events.jsonl", "stdout.log", "stderr.log", "setup-stdout.log", "outputs/", "latest"):
        assert f"`{name}`" in README


def test_what_it_says_of_money_and_of_rented_machines_is_so():
    defaults = config.Cluster()._asdict() | DOTTED
    words = {None: "none", "": "any", True: "true", 0.0: "0"}
    for key in (*(set(config.VASTAI_KEYS) - set(TABLES)), *DOTTED):
        value = {"image": "required", "selection.min_cuda": "the image's"}.get(key) or words.get(defaults[key]) or f"{defaults[key]:g}"
        assert f"| `{key}` | {'1' if key in ('nodes', 'gpu.count') else value} |" in README, key
    pace, times = fleet.Pace(), provider_vastai.TIMES
    for text in (
        f"haven't shown it for {times['confirm_s']:g} s", f"for its label for {times['settle_s']:g} s", f"for {pace.patience_s / 60:g} minutes, and a list that",
        f"tried for {pace.patience_s / 60:g} minutes", f"at most {fleet.OFFERS} in a row", f"at most {provider.Machines.tries} machines for a node",
        f"avoided for {machines.AVOID_S / 3600:g} hours", f"{guard.COLLECT_GRACE_S / 60:g} minutes after it while you are connected",
        "at least {:g}, at most {:g}".format(*(seconds / 60 for seconds in provider_vastai.LEASE_S)),
        f"or {provider_vastai.LATE_S / 60:g} minutes after `max_hours`", f"reached within {renting.LEAST_S / 60:g} minutes is refused",
    ):
        assert text in README, text
    assert renting.ENOUGH == 3 and "Ctrl-C three times" in README and "16 MB" in README and "size, written = 16 << 20" in preflight.SCRIPT
    for example in re.findall(r"^\[provider\]\nkind = \"vastai\".*?^```", README, re.M | re.S):
        assert "max_price_per_hour" in example and "max_hours" in example       # who copies it is safe


def test_its_links_lead_somewhere():
    heads = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in re.findall(r"^#+ (.*)$", README, re.M)}
    for target, place in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", README + (ROOT / "CHANGELOG.md").read_text()):
        assert not place or place in heads, place
        assert not target or target.startswith("https://") or (ROOT / target).exists(), target
    assert re.match(r"# Changelog\n\n## Unreleased\n", (ROOT / "CHANGELOG.md").read_text())


def test_the_changelog_says_why_of_each_dependency():
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^    "([a-z]+)[><]', project.split("dependencies = [")[1].split("]")[0], re.M)
    assert len(named) > 4
    named += re.findall(r'^vastai = \["([a-z]+)>', project, re.M)
    assert "vastai" in named
    for name in named:
        assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text(), name
