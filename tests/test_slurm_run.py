"""`gpurun job.toml` where the cluster is a Slurm: from the command line to the exit code it is a run as on any node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from conftest import eventually
from slurm_cluster import slurm             # noqa: F401 (a fixture)
from slurm_site import NEWS_S, site, site_of_file   # noqa: F401 (fixtures)


# ---- what a user sees -------------------------------------------------------------------------------------------------------------------

def test_a_run_is_as_on_any_node(site):
    """Workspace, setup on the login host, the job by Slurm, logs, outputs, record, exit code."""
    path = site.job("cat data made; echo to-err >&2; mkdir out; cp data out/; echo $SLURMD_NODENAME > where; exit 3", "whole", outputs=["out", "where"],
                    setup="echo set; echo ${SLURMD_NODENAME:-login} > made", workspace={"workdir": "."})
    (path.parent / "data").write_text("from the workspace\n")
    done = site.gpurun(path)
    err = done.stderr.decode()
    assert done.returncode == 3 and done.stdout == b"from the workspace\nlogin\n" and "to-err\n" in err and "set\n" in err
    record, folder = site.record("whole"), site.folder("whole")
    assert (record["state"], record["exit_code"], record["reason"], record["outputs"], record["missing"]) == ("FAILED", 3, "exited 3", ["out", "where"], [])
    assert (folder / "outputs/out/data").read_text() == "from the workspace\n" and (folder / "outputs/where").read_text() in ("n1\n", "n2\n")
    assert (folder / "stdout.log").read_bytes() == done.stdout and (folder / "stderr.log").read_text() == "to-err\n" and record["logs_complete"]
    assert (folder / "setup-stdout.log").read_text() == "set\n" and record["node"]["kind"] == "slurm"
    job = site.job_id("whole")
    assert record["backend"]["job_id"] == job and f"Slurm job {job}" in err
    assert site.slurms("whole")["ExitCode"] == "3:0" and site.jobs("whole") == [job]


def test_what_the_job_prints_is_there_at_once(site):
    run = site.start(site.job(f"echo one; echo err >&2; {site.until('live')}; echo two", "live"))
    run.until("one")
    eventually(lambda: "err\n" in run.err)
    assert run.process.poll() is None and site.record("live")["state"] == "RUNNING"
    eventually(lambda: site.record("live")["backend"].get("state") == "RUNNING", NEWS_S)
    site.go("live")
    assert run.end() == 0 and run.out == "one\ntwo\n" and "COMPLETED" in run.err


CODES = {"exit 0": 0, "exit 1": 1, "exit 127": 127, "exit 128": 128, "exit 130": 130, "exit 143": 143, "exit 255": 255, "no-such-command": 127,
         "exec bash -c 'kill -KILL $$'": 137, "bash -c 'kill -SEGV $$'": 139, "kill -TERM $$": 143, "trap 'exit 9' USR1; kill -USR1 $$": 9,
         "(sleep 0.1; echo late) & exit 5": 5}


def test_the_exit_code_is_the_jobs_own_where_slurms_accounting_has_another(site):
    """sacct makes 127:0 of 255, 2:0 of 130 and 0:0 of 128. All of them side by side."""
    ids = [site.submit(site.job(command, f"code{number}")) for number, command in enumerate(CODES)]
    rows = site.gpurun("wait", *ids).stdout.decode().splitlines()
    assert {command: int(row.split("exit code ")[1].split(":")[0]) for command, row in zip(CODES, rows)} == CODES
    records = [site.record(f"code{number}") for number in range(len(CODES))]
    assert [record["exit_code"] for record in records] == list(CODES.values())
    assert [record["state"] for record in records] == ["FAILED" if code else "COMPLETED" for code in CODES.values()]


def test_ended_by_a_signal_is_said_as_on_any_node(site):
    done = site.gpurun(site.job("exec bash -c 'kill -SEGV $$'", "segv"))
    assert done.returncode == 139 and "signal 11" in site.record("segv")["reason"], site.record("segv")["reason"]


def test_a_setup_that_fails_submits_nothing(site):
    before = len(site.calls("sbatch"))
    done = site.gpurun(site.job("echo never", "badsetup", setup="echo half; exit 6"))
    assert done.returncode == 6 and done.stdout == b"" and "setup" in site.record("badsetup")["reason"] and len(site.calls("sbatch")) == before


def test_an_output_that_is_missing_is_said_and_the_others_are_here(site):
    done = site.gpurun(site.job("echo 1 > one", "missing", outputs=["one", "two"]))
    record = site.record("missing")
    assert done.returncode == 0 and (record["outputs"], record["missing"]) == (["one"], ["two"]) and "two" in done.stderr.decode()


def test_json_says_what_it_says_of_any_node(site):
    result = site.here.result(site.job("echo x; exit 4", "json"))
    assert (result["state"], result["exit_code"], result["reason"]) == ("FAILED", 4, "exited 4")


def test_an_empty_log_a_big_log_and_bytes_that_are_no_text_come_whole(site):
    done = site.gpurun(site.job("head -c 3000000 /dev/urandom | tee bytes; printf 'no newline' >&2", "bytes", outputs=["bytes"]))
    assert done.returncode == 0 and done.stdout == (site.folder("bytes") / "outputs/bytes").read_bytes() and len(done.stdout) == 3000000
    assert (site.folder("bytes") / "stderr.log").read_bytes() == b"no newline"


# ---- what the job gets ----------------------------------------------------------------------------------------------------------------------

SECRETS = {"A_SECRET": "s3cret-of-mine", "QUOTES": "it's \"quoted\" \\ $HOME `id` %j", "LINES": "first\n#SBATCH --time=1\nthird\n", "EMPTY": "",
           "COMMA": "a,b=c",
           "UNICODE": "grüße ✓", "LONG": "x" * 60000}


def test_env_values_reach_the_job_and_stand_nowhere_else(site):
    code = "import os, json; print(json.dumps({name: os.environ[name] for name in %r}))" % (list(SECRETS),)
    (site.here.work / "secret").mkdir()
    (site.here.work / "secret" / "show.py").write_text(code)
    path = site.job(f"python3 show.py; {site.until('secret')}", "secret", workspace={"workdir": "."},
                    env={name: f"${{OF_{name}}}" for name in SECRETS})
    run = site.start(path, env=dict(site.env, **{f"OF_{name}": value for name, value in SECRETS.items()}))
    site.until_printed("secret", "}")
    assert json.loads(site.printed("secret")) == SECRETS
    job = site.job_id("secret")
    value = "s3cret-of-mine"
    said = [site.slurm.run("scontrol", "show", "job", "-dd", job).stdout, site.slurm.run("scontrol", "write", "batch_script", job, "-").stdout,
            site.slurm.run("squeue", "-h", "-j", job, "-O", "comment:200,command:500,name:200").stdout]
    said += [argument for call in site.calls("sbatch") for argument in call]
    said += [_read(line).decode(errors="replace") for line in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [text for text in said if value in text]
    site.go("secret")
    assert run.end() == 0
    line = eventually(lambda: site.slurm.run("sacct", "-j", job, "-X", "-n", "-P", "-o", "SubmitLine,Comment").stdout.strip("|\n"), NEWS_S)
    assert value not in line and "--export=ALL" in line and "--comment" not in line
    for folder in (site.there("secret"), site.folder("secret")):
        for found in folder.rglob("*"):
            if found.is_file() and found.name not in ("run.out", "stdout.log"):
                assert value.encode() not in _read(found), found
    assert value not in run.err


def _read(path: Path) -> bytes:
    """b"" for what has just ended, or been replaced."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_job_in_an_allocation_knows_of_its_own_job_only(site):
    """gpurun is started in an allocation with all that this sets, as in a notebook on a compute node."""
    path = site.job("env | grep -E '^(SLURM|SBATCH|SRUN|CUDA|PMI)' | sort", "inner")
    script = site.here.work / "outer.sh"
    argv = f"cd {site.here.work} && exec {sys.executable} -m gpurun {path}"
    script.write_text(f"#!/bin/bash\nenv -0 > {site.here.work}/outer.env\n{argv} > {site.here.work}/outer.out 2> {site.here.work}/outer.err\n")
    outer = site.slurm.run("sbatch", "--parsable", "--job-name=outer", "--gres=gpu:h200:2", "--ntasks=3", "--output=/dev/null", str(script),
                           env=dict(site.env, SLURM_CONF=site.slurm.conf, PATH=site.slurm.env["PATH"])).stdout.strip()
    site.slurm.until(outer, "COMPLETED", "FAILED", "CANCELLED", timeout_s=120)
    err = (site.here.work / "outer.err").read_text()
    assert site.slurm.state(outer) == "COMPLETED", err
    assert b"SLURM_NTASKS=3" in (site.here.work / "outer.env").read_bytes()
    found = dict(line.split("=", 1) for line in (site.here.work / "outer.out").read_text().splitlines())
    assert found["SLURM_JOB_ID"] == site.job_id("inner") != outer and "CUDA_VISIBLE_DEVICES" not in found
    assert "SLURM_NTASKS" not in found and found["SLURM_JOB_NAME"] == site.folder("inner").name


def test_variables_of_slurm_in_a_login_shell_change_nothing_of_the_job(site, here):
    """A ~/.bash_profile of somebody who has worked in an allocation for long."""
    shims = site.slurm.here(here)
    with open(here.home / ".bash_profile", "a") as profile:
        profile.write("export SLURM_JOB_ID=1 SLURM_NTASKS=7 SLURM_NNODES=2 SBATCH_WAIT=1 SBATCH_ARRAY_INX=1-3 SBATCH_EXPORT=NONE SBATCH_TEST_ONLY=1 "
                      "SBATCH_OUTPUT=/tmp/no SBATCH_JOB_NAME=other SQUEUE_STATES=TIMEOUT SQUEUE_FORMAT=%i SCANCEL_INTERACTIVE=1 SACCT_FORMAT=user "
                      "SLURM_TIME_FORMAT=%s SBATCH_TIMELIMIT=7\n")
    site.slurm.cluster_file(here)
    done = here.gpurun(here.job("env | grep -E '^(SLURM|SBATCH)' | sort; exit 3", name="profile"))
    assert done.returncode == 3, done.stderr.decode()
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    assert "SLURM_ARRAY_TASK_ID" not in found and found["SLURM_NNODES"] == "1" and found.get("SLURM_NTASKS") != "7"
    job = site.slurm.job(found["SLURM_JOB_ID"])
    assert job["TimeLimit"] == "00:07:00" and job["JobName"] == here.latest.name and len(shims.calls("sbatch")) == 1


def test_lines_that_look_like_directives_are_the_jobs_text(site):
    run = "#SBATCH --time=17\n#SBATCH --job-name=stolen\n#SBATCH --no-such-option\necho '#SBATCH --array=1-5'\ncat <<E\n#SBATCH --hold\nE\n"
    done = site.gpurun(site.job(run, "directives"))
    assert done.returncode == 0 and done.stdout == b"#SBATCH --array=1-5\n#SBATCH --hold\n"
    job = site.slurms("directives")
    assert job["TimeLimit"] == "01:00:00" and job["JobName"] == site.folder("directives").name


def test_a_command_of_many_kinds_of_text_is_run_as_it_stands(site):
    run = ("set -e\nx=\"a 'b' \\\"c\\\" \\$d\"\necho \"$x\"\nprintf '%s\\n' 'tab\there' \"$0\" 'grüße ✓' '@COMMAND@ @FOLDER@'\n"
           "cat <<'E'\n$x `id` \\\nE\nexit 7\n")
    done = site.gpurun(site.job(run, "texts"))
    plain = subprocess.run(["bash", "-c", run], stdout=subprocess.PIPE)
    assert done.returncode == 7 and done.stdout.decode().splitlines()[:2] == plain.stdout.decode().splitlines()[:2]
    assert done.stdout.decode().splitlines()[3:] == plain.stdout.decode().splitlines()[3:]


def test_the_job_has_no_input_and_knows_its_run(site):
    done = site.gpurun(site.job("cat; echo $GPURUN_RUN_ID $GPURUN_JOB; [ $PWD = $GPURUN_OUTPUTS ] && echo inside; umask; echo $-", "knows"))
    lines = done.stdout.decode().splitlines()
    assert lines[:2] == [f"{site.folder('knows').name} knows", "inside"] and lines[2] == "0022" and "i" not in lines[3]


# ---- what the cluster file says -------------------------------------------------------------------------------------------------------------

def test_two_nodes_with_srun(site):
    cluster = site.with_keys("two", nodes=2, gres="gpu:h200:1", time="0:10:00", partition="main", extra=["--mem-per-cpu=100", "--comment=of mine"])
    path = site.job("echo batch on $SLURM_JOB_NUM_NODES; srun bash -c 'echo $SLURMD_NODENAME $SLURM_PROCID ${#CUDA_VISIBLE_DEVICES} >> all-$SLURM_PROCID'; "
                    "cat all-* | sort; srun bash -c 'exit $((SLURM_PROCID * 5))'", "two", outputs=["all-0", "all-1"])
    done = site.gpurun(path, "--cluster", cluster)
    assert done.returncode == 5 and done.stdout.decode().splitlines() == ["batch on 2", "n1 0 1", "n2 1 1"], done.stderr.decode()   # one GPU each, whichever
    job = site.slurms("two")
    assert (job["NumNodes"], job["TimeLimit"], job["Partition"]) == ("2", "00:10:00", "main") and site.record("two")["outputs"] == ["all-0", "all-1"]
    assert "Slurm job" in done.stderr.decode()


def test_what_slurm_refuses_is_said_in_its_words_and_costs_no_wait(site):
    refused = [({"partition": "nope"}, "nvalid partition"), ({"gres": "gpu:h200:9"}, "Requested node configuration is not available"),
               ({"gres": "fpga:1"}, "gres"), ({"extra": ["--nodelist=n77"]}, "nvalid node name"), ({"extra": ["--no-such"]}, "--no-such")]
    for number, (keys, word) in enumerate(refused):
        done = site.gpurun(site.job("echo never", f"refused{number}"), "--cluster", site.with_keys(f"refused{number}", **keys))
        assert done.returncode == 125 and word in done.stderr.decode() and "refused" in done.stderr.decode(), done.stderr.decode()
        assert done.stdout == b"" and site.record(f"refused{number}")["state"] == "FAILED"


def test_sbatch_is_found_where_only_a_login_shell_has_it(site, here):
    """`site` never has Slurm in its own PATH; without it in the login shell's either, it is said where it was looked for."""
    assert not site.env.get("SLURM_CONF") and subprocess.run(["bash", "-c", "command -v sbatch"], env=site.env).returncode
    assert site.gpurun(site.job("true", "found")).returncode == 0
    site.slurm.here(here).hide("sbatch")
    site.slurm.cluster_file(here)
    done = here.gpurun(here.job("true", name="nosbatch"))
    err = done.stderr.decode()
    assert done.returncode == 125 and "there is no sbatch on this node" in err and "slurm-bin" in err and "login" in err


# ---- many -------------------------------------------------------------------------------------------------------------------------------------

def test_many_runs_are_side_by_side_and_are_asked_for_together(site):
    before, began = len(site.calls("squeue")), time.monotonic()
    ids = [site.submit(site.job(f"echo {number}; {site.until('many')}; exit {number}", f"many{number}")) for number in range(10)]
    for number in range(10):
        site.until_printed(f"many{number}", f"{number}\n")       # all at once: none waits for another
    calls, took_s = site.calls("squeue")[before:], time.monotonic() - began
    jobs = [site.job_id(f"many{number}") for number in range(10)]
    eventually(lambda: any(set(jobs) <= set(call[call.index("-j") + 1].split(",")) for call in site.calls("squeue")[before:] if "-j" in call), NEWS_S)
    assert len(calls) < 30 + took_s / 2, f"{len(calls)} calls of squeue for 10 jobs that were submitted one after the other in {took_s:.0f} s"
    quiet = len(site.calls("squeue"))
    rows = [json.loads(line) for line in site.gpurun("status", "--refresh", "--json").stdout.splitlines()]
    assert sum(row["run_id"] in ids for row in rows) == 10 and len(site.calls("squeue")) - quiet < 10, "a user's question is none to Slurm"
    site.go("many")
    done = site.gpurun("wait", *ids)
    assert done.returncode == 1
    assert [line.split("exit code ")[1].split(":")[0] for line in done.stdout.decode().splitlines()] == [str(number) for number in range(10)]
