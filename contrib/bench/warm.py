"""A warm trivial run: nothing changed since the last one, on a loopback sshd host, against what a user would type instead."""

from __future__ import annotations

import subprocess

from common import RUNS, bench, in_turn, ratio, sh


def main() -> None:
    with bench() as b:
        source, back = b.work / "hello", b.work / "back"
        for folder in (source, back):
            folder.mkdir()
        for name in ("a.txt", "b.txt", "c.txt"):
            (source / name).write_text(name * 50)
        run = "cat a.txt b.txt c.txt > out.txt"
        job = b.job("hello", run, workspace='{ workdir = "hello" }', outputs=["out.txt"])
        master = f"{b.rsh} -o ControlPath={b.folder}/master"
        subprocess.run([*master.split(), "-fNM", "node"], check=True, stdin=subprocess.DEVNULL)

        def script(rsh: str) -> float:
            return sh("sh", "-ec", f"rsync -az -e '{rsh}' {source}/ node:there/; {rsh} node 'cd there && {run}'; "
                                   f"rsync -az -e '{rsh}' node:there/out.txt {back}/")

        first = b.gpurun(job)
        print(f"first use of a fresh host: {first['wall']:.2f} s, {b.sshd.logins - 1} SSH connections")   # the master is one
        before = b.sshd.logins
        print("a warm trivial run:")
        taken = in_turn({
            "gpurun hello.toml": lambda: b.gpurun(job)["wall"],
            "rsync push; ssh run; rsync pull": lambda: script(b.rsh),
            "the same, ControlMaster open": lambda: script(master),
            "ssh node true": lambda: sh(*b.ssh, "true")})
        ours = taken["gpurun hello.toml"]
        ratio("gpurun : rsync push; ssh run; rsync pull", ours, taken["rsync push; ssh run; rsync pull"], "≤ 0.5")
        ratio("gpurun : the same, ControlMaster open", ours, taken["the same, ControlMaster open"], "≤ 1.5")
        ratio("gpurun : ssh node true", ours, taken["ssh node true"], "≤ 1.5")
        theirs = (RUNS + 1) * 4   # a script without a master three times, ssh true once
        print(f"SSH connections of all the warm gpurun runs together: {b.sshd.logins - before - theirs}")
        subprocess.run([*master.split(), "-O", "exit", "node"], check=False, capture_output=True)


main()
