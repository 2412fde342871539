"""A job on Slurm, against what its user would type: `rsync; sbatch --wait; rsync; cat` on the login host, and `srun`. A submit against `sbatch`.

Needs a Slurm whose programs are on the PATH (tests/slurm-up DIR starts one, `. DIR/env.sh`), this machine being its login host. The job is trivial, so
what is measured is what each of them puts around it; Slurm itself takes about a second from sbatch to the end of a batch job.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import end_agents, in_turn, parser, ratio, sh

COMMAND = "cat data; echo made > out.txt"


def main() -> None:
    args = parser(__doc__, links=False).parse_args()
    if shutil.which("sbatch") is None:
        raise SystemExit("there is no sbatch on the PATH: start a Slurm first, like tests/slurm-up DIR, then . DIR/env.sh")
    folder = Path(tempfile.mkdtemp(prefix="gpurun-bench-"))
    folder.chmod(0o755)
    try:
        work = folder / "work"
        work.mkdir()
        os.environ.update(HOME=str(folder), CI="true")
        (folder / ".bash_profile").write_text("".join(f"export {name}={os.environ[name]!r}\n" for name in ("PATH", "SLURM_CONF") if name in os.environ))
        os.chdir(work)
        (work / "data").write_text("some data\n")
        (work / "cluster.toml").write_text('[provider]\nkind = "slurm"\n')
        (work / "job.toml").write_text(f'[job]\nname = "job"\nrun = "{COMMAND}"\noutputs = ["out.txt"]\nworkspace = {{ workdir = "." }}\n')
        gpurun, there = str(Path(sys.executable).parent / "gpurun"), folder / "there"
        script = (f"set -e; rsync -a --exclude gpurun-runs {work}/ {there}/; cd {there}; sbatch --wait --quiet -o log --wrap '{COMMAND}'; "
                  f"rsync -a {there}/out.txt {folder}/home.txt; cat log")
        print("a trivial job, from start to exit:")
        taken = in_turn({
            "gpurun job.toml": lambda: sh(gpurun, "job.toml", "-q"),
            "rsync; sbatch --wait; rsync; cat": lambda: sh("bash", "-c", script),
            "srun": lambda: sh("srun", "--quiet", "-D", str(work), "bash", "-c", COMMAND)}, args)
        ratio("gpurun : sbatch --wait", taken["gpurun job.toml"], taken["rsync; sbatch --wait; rsync; cat"], "≤ 1.0")
        ratio("gpurun : srun", taken["gpurun job.toml"], taken["srun"], "none")
        print("a job handed over:")
        taken = in_turn({
            "gpurun submit": lambda: sh(gpurun, "submit", "job.toml", "-q"),
            "rsync; sbatch": lambda: sh("bash", "-c", f"rsync -a --exclude gpurun-runs {work}/ {there}/; cd {there}; sbatch --quiet -o log --wrap true")}, args)
        ratio("gpurun submit : rsync; sbatch", taken["gpurun submit"], taken["rsync; sbatch"], "none")
        subprocess.run([gpurun, "wait", "-q", *[path.name for path in (work / "gpurun-runs").iterdir() if path.is_dir() and not path.is_symlink()]],
                       stdout=subprocess.DEVNULL, check=True)
    finally:
        end_agents(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
