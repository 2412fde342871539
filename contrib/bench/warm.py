"""A warm trivial run: nothing changed since the last one, against what a user would type instead."""

from __future__ import annotations

import subprocess

from common import bench, in_turn, parser, ratio, sh

RUN = "cat a.txt b.txt c.txt > out.txt"
PLAIN, MASTER, TRUE = "rsync push; ssh run; rsync pull", "the same, ControlMaster open", "ssh node true"
# What gpurun's time may be of theirs.
GOALS = {"loopback": {PLAIN: "≤ 0.5", MASTER: "≤ 1.5", TRUE: "≤ 1.5"}, "lan": {PLAIN: "≤ 0.5", MASTER: "≤ 1.5", TRUE: "none"},
         "coast": {PLAIN: "≤ 0.35", MASTER: "≤ 0.5", TRUE: "none"}, "ocean": {PLAIN: "≤ 0.35", MASTER: "≤ 0.5", TRUE: "none"}}


def main() -> None:
    args = parser(__doc__).parse_args()
    with bench(args.link, args.cc) as b:
        source, back = b.work / "hello", b.work / "back"
        for folder in (source, back):
            folder.mkdir()
        for name in ("a.txt", "b.txt", "c.txt"):
            (source / name).write_text(name * 50)
        job = b.job("hello", RUN, workspace='{ workdir = "hello" }', outputs=["out.txt"])
        master = f"{b.rsh} -o ControlPath={b.folder}/master"
        subprocess.run([*master.split(), "-fNM", "node"], check=True, stdin=subprocess.DEVNULL)

        def script(rsh: str) -> float:
            return sh("sh", "-ec", f"rsync -az -e '{rsh}' {source}/ node:there/; {rsh} node 'cd there && {RUN}'; "
                                   f"rsync -az -e '{rsh}' node:there/out.txt {back}/")

        before = b.logins
        print("a warm trivial run:")
        taken = in_turn({
            "gpurun hello.toml": lambda: b.gpurun(job)["wall"],
            PLAIN: lambda: script(b.rsh),
            MASTER: lambda: script(master),
            TRUE: lambda: sh(*b.ssh, "true")}, args, b.settle)
        ours = taken["gpurun hello.toml"]
        for name in (PLAIN, MASTER, TRUE):
            ratio(f"gpurun : {name}", ours, taken[name], GOALS.get(args.link, {}).get(name, "none"))
        theirs = (args.runs + args.unmeasured) * 4   # a script without a master three times, ssh true once
        print(f"SSH connections of all the warm gpurun runs together: {b.logins - before - theirs}")
        subprocess.run([*master.split(), "-O", "exit", "node"], check=False, capture_output=True)


if __name__ == "__main__":
    main()
