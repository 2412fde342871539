"""The environment that jobs start from: what a login shell of the node's user has, whatever its start files do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def login(here_home: Path, profile: str, patience_s: float = 15.0) -> dict[str, str]:
    """What an agent started with this ~/.bash_profile gives to jobs."""
    here_home.mkdir(exist_ok=True)
    (here_home / ".bash_profile").write_text(profile)
    script = f"from gpurun import node\nimport json\nnode.LOGIN_S = {patience_s}\nprint(json.dumps(node.LoginEnvironment()()))"
    done = subprocess.run([sys.executable, "-c", script], env={"HOME": str(here_home), "PATH": os.environ["PATH"]}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_jobs_get_what_a_login_shell_exports_and_nothing_that_it_prints(tmp_path):
    found = login(tmp_path / "home", "echo 'WELCOME=to the node'\nexport CUDA_HOME=/opt/cuda MULTI='a\nb=c'\nPATH=/opt/conda/bin:$PATH\n")
    assert found["CUDA_HOME"] == "/opt/cuda" and found["MULTI"] == "a\nb=c" and found["PATH"].startswith("/opt/conda/bin:")
    assert not {"WELCOME", "SHLVL", "_", "PWD", "TERM"} & set(found) and found["HOME"] == str(tmp_path / "home")


def test_a_start_file_that_leaves_a_daemon_behind_or_goes_elsewhere_keeps_no_job_waiting(tmp_path):
    started = time.monotonic()
    found = login(tmp_path / "home", f"export A=1\nsetsid sleep 60 & echo $! > {tmp_path}/pid\n", patience_s=50.0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert found["A"] == "1" and time.monotonic() - started < 40
    found = login(tmp_path / "home", "export A=1; echo B=2; exec true\n")
    assert "A" not in found and "B" not in found and found["PATH"] and not [name for name in found if "\n" in name]


def test_a_start_file_that_hangs_is_ended_so_that_it_can_take_away_its_locks(tmp_path):
    """pyenv's rehash holds one; killed outright, every later login of that user would wait for it."""
    found = login(tmp_path / "home", f"export A=1; trap 'rm {tmp_path}/lock' EXIT; touch {tmp_path}/lock; sleep 60\n", patience_s=3.0)
    assert found["PATH"] and "A" not in found and not (tmp_path / "lock").exists()
