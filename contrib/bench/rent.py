"""One job on a machine that is rented for it: `gpurun JOB --up --down` against a script with Vast.ai's own command line and ssh.

The provider is the tests' loopback server, whose machines are containers with an sshd; one takes LOADING_S to load its image. The script does
what its author would write: rent the cheapest, ask every five seconds, try ssh until it answers, run, fetch, destroy. It asks for no proof that
the machine is gone; gpurun does, so its last seconds are listed by themselves. Needs root, for the containers. And the reconciler alone: one
pass over a thousand machines.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import end_agents, in_turn, parser, ratio, sh

import vast_machine   # of the tests, whose folder common.py knows
from vast_server import VastServer, offer

from gpurun.reconcile import Desired, Machine, Observed, Seen, note, reconcile

LOADING_S = 10.0
IMAGE = "vastai/base-image:cuda-12.8.1-cudnn-devel-ubuntu22.04-py310"
SCRIPT = r"""
set -e
ask() { "$VAST" --url "$VAST_URL" --api-key "$VAST_API_KEY" "$@" --raw; }
offer=$(ask search offers 'gpu_name=RTX_4090' -o dph_total | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')
id=$(ask create instance "$offer" --image IMAGE --disk 64 --ssh --direct | python3 -c 'import json, sys; print(json.load(sys.stdin)["new_contract"])')
trap 'ask destroy instance "$id" -y >/dev/null' EXIT
until set -- $(ask show instance "$id" | python3 -c 'import json, sys
row = json.load(sys.stdin)
if row["actual_status"] == "running" and row.get("ports"): print(row["public_ipaddr"].strip(), row["ports"]["22/tcp"][0]["HostPort"])') && [ "$2" ]; do
  sleep 5
done
options="-i $HOME/.ssh/id_ed25519 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
until ssh $options -p "$2" root@"$1" true; do sleep 2; done
ssh $options -p "$2" root@"$1" 'echo 42 > /root/result.txt'
ssh $options -p "$2" root@"$1" 'cat /root/result.txt' > result.txt
"""


def main() -> None:
    args = parser(__doc__, links=False, runs=3).parse_args()
    reconciler()
    if not vast_machine.possible():
        raise SystemExit("the rest needs root and namespaces")
    folder = Path(tempfile.mkdtemp(prefix="gpurun-bench-"))
    try:
        with VastServer([offer(machine_id=number) for number in range(1, 40)], machines=True) as server:
            server.relist = True
            server.script(steps=((0.0, "st_loading"), (LOADING_S, "st_running")))
            (folder / ".ssh").mkdir()
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / ".ssh/id_ed25519")], check=True)
            server.add_key((folder / ".ssh/id_ed25519.pub").read_text().strip())
            bin_dir = Path(sys.executable).parent
            os.environ.update(HOME=str(folder), CI="true", VAST_URL=server.url, VAST_API_KEY=server.key, NO_PROXY="127.0.0.1", VAST=str(bin_dir / "vastai"))
            os.chdir(folder)
            (folder / "cluster.toml").write_text(f'[provider]\nkind = "vastai"\nimage = {json.dumps(IMAGE)}\ngpu = {{ name = "RTX 4090" }}\n'
                                                 "selection = { max_price_per_hour = 1.0 }\n")
            (folder / "job.toml").write_text('[job]\nname = "job"\nrun = "echo 42 > result.txt"\noutputs = ["result.txt"]\n')
            script = SCRIPT.replace("IMAGE", shlex.quote(IMAGE))
            print(f"a machine that takes {LOADING_S:g} s to load, one job, and its end:")
            taken = in_turn({"gpurun JOB --up --down, the machine proven gone": lambda: sh(str(bin_dir / "gpurun"), "job.toml", "--up", "--down", "-q"),
                             "vastai and ssh by a script": lambda: sh("bash", "-c", script)}, args)
            ratio("gpurun : script", taken["gpurun JOB --up --down, the machine proven gone"], taken["vastai and ssh by a script"], "≤ 1.5")
            assert server.alive() == [], "a machine was left"
    finally:
        end_agents(folder)
        shutil.rmtree(folder, ignore_errors=True)


def reconciler() -> None:
    """A pass over a thousand machines of which a tenth has something to be done."""
    machines = tuple(Machine(f"gpurun-a-b-{number}-c", number, "s", 0.0, str(number), ready=number % 10 != 0, sighted=True) for number in range(1, 1001))
    observed = Observed(machines, tuple(Seen(one.id, one.label) for one in machines), True)
    began, passes = time.perf_counter(), 20
    for _ in range(passes):
        plan = reconcile(note(observed, 10.0), Desired(1000, "s", "gpurun-a-b-"), 10.0)
    print(f"reconcile, 1000 machines, {len(plan)} steps: {(time.perf_counter() - began) / passes * 1000:.1f} ms a pass")


if __name__ == "__main__":
    main()
