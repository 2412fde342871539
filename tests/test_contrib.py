"""The examples and samples of contrib/ do what they say, each run for real."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Here
from renter import paper, renter  # noqa: F401
from sshd import SSHD

ROOT = Path(__file__).resolve().parents[1]
CONTRIB = ROOT / "contrib"
NO_COPY = shutil.ignore_patterns("__pycache__", ".venv", "gpurun-runs")


def copy_of(name: str, here: Here) -> Path:
    """A copy to run in: the checkout stays as it is."""
    return Path(shutil.copytree(CONTRIB / name, here.work / name, ignore=NO_COPY))


# ---- examples ----------------------------------------------------------------------------------------------------------------------

def test_the_hello_example(here):
    job = copy_of("examples/hello", here) / "job.toml"
    began = time.monotonic()
    done = here.gpurun(job)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("hello from ") and lines[0].endswith(here.latest.name)
    assert lines[1:] == ["bring home what counts", "push what changed", "run it over there"]
    assert (here.latest / "outputs" / "sorted.txt").read_text().splitlines() == lines[1:]
    assert (here.latest / "stdout.log").read_bytes() == done.stdout
    assert time.monotonic() - began < 30        # two seconds, on a machine with nothing else to do
    again = here.result(job)
    assert set(again) == {"type", "run_id", "state", "exit_code", "reason", "node", "outputs_dir", "outputs", "missing", "seconds"}
    assert set(again["seconds"]) == {"push", "setup", "run", "collect", "total"}
    assert again["state"] == "COMPLETED" and again["outputs"] == ["sorted.txt"] and again["missing"] == []
    assert here.record()["bytes"]["pushed"] == 0   # nothing changed since


def packages_can_be_had(env: dict[str, str], requirement: str) -> str:
    """"" when pip could install this, else why not. Nothing is downloaded but an index page and metadata."""
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check", "--no-deps", "--retries", "1",
            "--ignore-installed", "--only-binary", ":all:", requirement]
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "pip has no answer after two minutes"
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test_the_train_example_trains_for_real(here):
    folder = copy_of("examples/train", here)
    problem = packages_can_be_had(here.env, (folder / "requirements.txt").read_text().strip())
    if problem:
        pytest.skip(f"no package index within reach: {problem}")
    done = here.gpurun(folder / "job.toml", timeout=400)
    assert done.returncode == 0, done.stderr.decode()
    assert here.record()["state"] == "COMPLETED" and here.record()["missing"] == []
    outputs = here.latest / "outputs"
    assert sorted(path.name for path in outputs.iterdir()) == ["checkpoint.npz", "final_metrics.json", "metrics.jsonl"]
    epochs = [json.loads(line) for line in (outputs / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((outputs / "final_metrics.json").read_text())
    assert [line["epoch"] for line in epochs] == list(range(1, 13)) and epochs[-1]["loss"] < epochs[0]["loss"] / 2
    assert final["good"] and final["accuracy"] >= 0.9 and abs(final["accuracy"] - epochs[-1]["accuracy"]) < 1e-4
    assert f"accuracy {final['accuracy']:.4f}: good" in done.stdout.decode()
    assert (outputs / "checkpoint.npz").read_bytes().startswith(b"PK\x03\x04")   # what numpy writes: a zip of arrays
    assert (outputs / "checkpoint.npz").stat().st_size > 10_000


# ---- make --------------------------------------------------------------------------------------------------------------------------

class Make:
    def __init__(self, here: Here) -> None:
        self.here, self.folder = here, copy_of("make", here)
        self.target = self.folder / "report.json"
        self.runs = self.folder / "gpurun-runs" / "report"

    def __call__(self, *args: str) -> "subprocess.CompletedProcess[str]":
        argv = ["make", f"GPURUN={shlex.quote(sys.executable)} -m gpurun", *args]
        return subprocess.run(argv, cwd=self.folder, env=self.here.env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120)

    def count(self) -> int:
        return len(list(self.runs.glob("report-*")))

    def touch(self, name: str) -> None:
        """Newer than the target for sure, whatever the file system's clock."""
        later = (self.target.stat().st_mtime_ns if self.target.exists() else time.time_ns()) + 10**9
        os.utime(self.folder / name, ns=(later, later))


@pytest.mark.skipif(not shutil.which("make"), reason="needs make (tests/run installs it)")
def test_make_runs_a_job_only_when_its_inputs_changed_and_never_leaves_half_a_target(here):
    make = Make(here)
    first = make()
    assert first.returncode == 0, first.stderr
    report = json.loads(make.target.read_text())
    assert report["count"] == 100 and report["mean"] == 149.5 and make.count() == 1

    idle = make()
    assert idle.returncode == 0 and "up to date" in idle.stdout and make.count() == 1

    with open(make.folder / "src" / "numbers.txt", "a") as numbers:
        numbers.write("301\n")
    make.touch("src/numbers.txt")
    again = make()
    assert again.returncode == 0, again.stderr
    assert json.loads(make.target.read_text())["count"] == 101 and make.count() == 2

    before = make.target.read_bytes()
    (make.folder / "src" / "report.py").write_text("import sys\nprint('half')\nsys.exit(3)\n")
    make.touch("src/report.py")
    failed = make()
    assert failed.returncode == 2 and "Error 3" in failed.stderr     # the job's own exit code, as make reports it
    assert make.target.read_bytes() == before and not Path(f"{make.target}.tmp").exists() and make.count() == 3
    assert make().returncode == 2 and make.count() == 4               # and it is not taken for done

    assert make("clean").returncode == 0 and not make.target.exists() and not make.runs.exists()


# ---- CI ----------------------------------------------------------------------------------------------------------------------------

def github_steps(file: str = "github-actions.yml") -> list[tuple[str, str]]:
    """(name, script) of each `run: |` step of the sample. GitHub runs it with `bash -e FILE`."""
    text = (CONTRIB / "ci" / file).read_text()
    found = re.findall(r"^( +)- name: (.*)\n(?:\1  .*\n|\n)*?\1  run: \|\n((?:\1    .*\n|\n)+)", text, re.M)
    return [(name, textwrap.dedent(script)) for _, name, script in found]


def gitlab_lines(key: str, file: str = "gitlab-ci.yml") -> list[str]:
    """The commands of a list like `script:`."""
    text = (CONTRIB / "ci" / file).read_text()
    block = re.search(rf"^  {key}:\n((?:    .*\n)+)", text, re.M)
    lines = [line.strip()[2:] for line in block[1].splitlines() if line.strip().startswith("- ")]
    return [line[1:-1].replace("''", "'") if line.startswith("'") else line for line in lines]


def variables(name: str) -> dict[str, str]:
    """What the sample sets for its steps, as it stands there."""
    text = (CONTRIB / "ci" / name).read_text()
    return dict(re.findall(r"^ +(GPURUN_[A-Z_]+): +([^\s$#]+)", text, re.M))


class CI:
    """A runner: a checkout that is the current folder, HOME, CI=true, no terminal and nothing to read on stdin."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.env = dict(here.env, CI="true", GPURUN_SOURCE=str(ROOT), GPURUN_CLUSTER="", GPURUN_JOB_FILE="hello/job.toml")
        self.folder = here.work
        shutil.copytree(CONTRIB / "examples" / "hello", self.folder / "hello")

    def __call__(self, script: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """start_new_session: a prompt finds no terminal to open, and would end the step instead of waiting for us."""
        return subprocess.run(["bash", "-e", "-c", script], cwd=self.folder, env=dict(self.env, **env), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=300, start_new_session=True)

    def installed(self, program: str = "-m gpurun") -> None:
        """What the install step leaves, where no package index is to be had: the gpurun of these tests."""
        command = self.here.home / "gpurun-venv" / "bin" / "gpurun"
        if not command.exists():
            command.parent.mkdir(parents=True, exist_ok=True)
            command.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {program} \"$@\"\n")
            command.chmod(0o755)

    def check_the_job_step(self, script: str) -> None:
        good = self(script)
        assert good.returncode == 0, good.stderr
        assert good.stdout.startswith("hello from ") and good.stdout.count("\n") == 4
        assert "\r" not in good.stderr and "\x1b" not in good.stderr and len(good.stderr.splitlines()) < 20
        assert (self.here.latest / "outputs" / "sorted.txt").exists()
        job = self.folder / "hello" / "failing.toml"
        job.write_text('[job]\nname = "failing"\nrun = "echo $TOKEN | wc -c > length; exit 7"\noutputs = ["length"]\n'
                       'env = { TOKEN = "${HF_TOKEN}" }\n')
        bad = self(script, GPURUN_JOB_FILE=str(job), HF_TOKEN="a-secret-value")
        assert bad.returncode == 7
        assert (self.here.latest / "outputs" / "length").read_text().strip() == "15"
        assert not [path for path in self.here.runs.rglob("*") if path.is_file() and b"a-secret-value" in path.read_bytes()]
        unset = self(script, GPURUN_JOB_FILE=str(job))
        assert unset.returncode == 2 and "HF_TOKEN" in unset.stderr


@pytest.fixture
def ci(here):
    return CI(here)


def test_the_samples_name_the_same_variables():
    for name in ("github-actions.yml", "gitlab-ci.yml", "github-actions-vastai.yml", "gitlab-ci-vastai.yml"):
        assert variables(name) == {"GPURUN_SOURCE": "vendor/gpurun", "GPURUN_CLUSTER": "ci/cluster.toml", "GPURUN_JOB_FILE": "job.toml"}


def test_the_install_step_installs_gpurun_from_a_checkout(ci):
    """The command line itself, with a copy of the checkout, since pip builds in the folder that it is given."""
    problem = packages_can_be_had(ci.env, "pathspec>=0.12")
    if problem:
        pytest.skip(f"no package index within reach: {problem}")
    source = ci.folder / "vendor" / "gpurun"
    source.mkdir(parents=True)
    shutil.copytree(ROOT / "gpurun", source / "gpurun", ignore=NO_COPY)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    (script,) = [script for name, script in github_steps() if name == "Install gpurun"]
    assert [line.split() for line in script.strip().splitlines()] == [line.split() for line in gitlab_lines("before_script")[:2]]
    done = ci(script, GPURUN_SOURCE="vendor/gpurun", PIP_NO_COMPILE="0")   # "0": pip's switches of this kind are upside down
    assert done.returncode == 0, done.stderr
    version = ci('"$HOME/gpurun-venv/bin/gpurun" --version')
    assert version.returncode == 0 and version.stdout.startswith("gpurun, version ")


def test_the_github_steps_run_as_they_stand(ci):
    steps = dict(github_steps())
    assert list(steps) == ["Install gpurun", "Key for the node", "Run the job"]
    assert ci(steps["Key for the node"], SSH_KEY="-----KEY-----", KNOWN_HOSTS="gpu1 ssh-ed25519 AAAA").returncode == 0
    key = ci.here.home / ".ssh" / "id_ed25519"
    assert key.read_text() == "-----KEY-----\n" and key.stat().st_mode & 0o077 == 0
    assert (ci.here.home / ".ssh" / "known_hosts").read_text() == "gpu1 ssh-ed25519 AAAA\n"
    ci.installed()
    ci.check_the_job_step(steps["Run the job"])


def test_the_gitlab_lines_run_as_they_stand(ci):
    (ci.folder / "key").write_text("-----KEY-----\n")
    (ci.folder / "hosts").write_text("gpu1 ssh-ed25519 AAAA\n")
    lines = "\n".join(gitlab_lines("before_script")[2:])
    done = ci(lines, GPURUN_SSH_KEY=str(ci.folder / "key"), GPURUN_KNOWN_HOSTS=str(ci.folder / "hosts"))
    assert done.returncode == 0, done.stderr
    for name in ("id_ed25519", "known_hosts"):
        assert (ci.here.home / ".ssh" / name).stat().st_mode & 0o777 == 0o600
    assert (ci.here.home / ".ssh").stat().st_mode & 0o777 == 0o700
    ci.installed()
    (line,) = gitlab_lines("script")
    ci.check_the_job_step(line)


# ---- CI that rents -----------------------------------------------------------------------------------------------------------------

RENTING = ("github-actions-vastai.yml", "gitlab-ci-vastai.yml")


def renting(name: str) -> tuple[str, list[str], str]:
    """What such a sample does: to install, to rent and run, and at its end whatever happened."""
    if name.startswith("github"):
        text, steps = (CONTRIB / "ci" / name).read_text(), github_steps(name)
        assert [title for title, _ in steps] == ["Install gpurun", "Rent", "Run the job", "End what was rented"]
        assert re.search(r"- name: End what was rented\n +if: always\(\)\n", text)
        return steps[0][1], [script for _, script in steps[1:3]], steps[3][1]
    (end,) = gitlab_lines("after_script", name)
    return "\n".join(gitlab_lines("before_script", name)), gitlab_lines("script", name), end


def test_the_samples_that_rent_install_the_extra():
    for name in RENTING:
        lines = renting(name)[0].strip().splitlines()
        assert len(lines) == 2 and lines[1].endswith('"$GPURUN_SOURCE[vastai]"')
        assert lines == [line.replace('$GPURUN_SOURCE"', '$GPURUN_SOURCE[vastai]"') for line in gitlab_lines("before_script")[:2]]


@pytest.mark.parametrize("name", RENTING)
def test_the_samples_that_rent_run_as_they_stand_and_leave_nothing(name, renter):
    """The job's exit code is the run's, and the machine is gone after a job that failed too. No question is asked: the price cap is the yes."""
    runner = CI(renter)
    runner.installed(shlex.quote(str(ROOT / "tests" / "quick.py")))
    runner.env["GPURUN_CLUSTER"] = str(renter.cluster(limits={"max_hours": 1, "max_cost": 1}))
    (runner.folder / "failing.toml").write_text('[job]\nname = "failing"\nrun = "exit 7"\n')
    _, does, end = renting(name)
    for job, code in (("hello/job.toml", 0), ("failing.toml", 7)):
        codes = [runner(script, GPURUN_JOB_FILE=job).returncode for script in does]
        assert codes == [0, code] and len(renter.server.alive()) == 1
        ended = runner(end)
        assert ended.returncode == 0, ended.stderr
        renter.ended()
    assert (renter.runs / "latest").exists() and len(list(renter.runs.glob("hello-*/outputs/sorted.txt"))) == 1


def test_the_cluster_file_that_rents_is_taken_and_shows_what_fits(paper):
    done = paper.gpurun("offers", "--cluster", CONTRIB / "examples" / "vastai.toml")
    assert done.returncode == 0 and done.stdout.count(b"RTX 4090") == 4, done.stderr.decode()


# ---- benchmarks --------------------------------------------------------------------------------------------------------------------

BENCH = CONTRIB / "bench"
PARTS = {"common.py", "measured.py", "traced.py"}    # of the others


def run_bench(name: str, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(BENCH / name), *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)


def from_bench(name: str, expression: str) -> Any:
    """What a benchmark's own function gives, in a process of its own: their modules have names that ours have too."""
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); from {name} import *; print(repr({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_every_benchmark_says_what_it_measures_and_is_in_the_readme_and_in_the_one_command():
    readme, everything = (BENCH / "README.md").read_text(), (BENCH / "all.sh").read_text()
    for path in BENCH.glob("*.py"):
        assert f"`{path.name}`" in readme, path.name
        if path.name not in PARTS:
            done = run_bench(path.name, "--help")
            assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
            assert path.stem in ("rent", "slurm", "status") or f"bench {path.name}" in everything
    assert subprocess.run(["bash", "-n", str(BENCH / "all.sh")]).returncode == 0


@pytest.mark.skipif(not SSHD or not shutil.which("rsync"), reason="needs an OpenSSH server and rsync")
def test_a_benchmark_runs_and_leaves_nothing():
    before = set(Path(tempfile.gettempdir()).glob("gpurun-bench-*"))
    done = run_bench("push.py", "--files", "3", "--runs", "1", "--unmeasured", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gpurun, whole : rsync -az") == 3 and "first use of a fresh host" in done.stdout
    assert set(Path(tempfile.gettempdir()).glob("gpurun-bench-*")) <= before


def test_a_benchmark_says_what_went_wrong():
    done = run_bench("warm.py", "--link", "moon")
    assert done.returncode == 2 and "invalid choice: 'moon'" in done.stderr


def test_what_the_benchmarks_compute():
    assert from_bench("roundtrips", "line([(0.02, 0.28), (0.06, 0.44), (0.1, 0.6)])") == pytest.approx((4.0, 0.2))
    packets = "[Packet(1.0, True, 100, 'UDP'), Packet(1.004, True, 50, 'UDP'), Packet(1.1, False, 70, 'UDP'), Packet(1.102, True, 9, 'TCP')]"
    assert from_bench("roundtrips", f"[tuple(one) for one in flights({packets})]") == [
        (1.0, 1.004, True, 2, 150, "UDP"), (1.1, 1.1, False, 1, 70, "UDP"), (1.102, 1.102, True, 1, 9, "TCP")]
    assert from_bench("scale", "exponent([10, 100, 1000], [0.3, 2.2, 20.2], 0.2)") == pytest.approx(1.0)
    assert from_bench("scale", "exponent([10, 100, 1000], [0.3, 2.2, 200.2], 0.2)") == pytest.approx(2.0)
    assert from_bench("scale", "exponent([10, 100, 1000], [0.3, 0.3, 0.4], 0.2)") is None
    assert from_bench("scale", "exponent([10, 100, 1000], [0.21, 0.9, 7.2], 0.2)") == pytest.approx(1.0)
    assert from_bench("scale", "steps(10**6, 4 * 10**9)") == [10**6, 10**7, 10**8, 10**9, 4 * 10**9]
    assert from_bench("common", "[size('4G'), size('1.5k'), size('77'), shown(4e9), shown(5)]") == [4 * 10**9, 1500, 77, "4 GB", "5 B"]
