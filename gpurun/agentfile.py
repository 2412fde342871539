"""The agent file: one zipapp of the modules that go to the node, the same bytes from the same sources, named by their hash.

In a file of its own because every run needs the hash, to know an agent of another version, and only a deploy needs the rest.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

from gpurun.errors import DeployError
from gpurun.files import atomic_write, make_private_dir
from gpurun.paths import cache_dir

SHIPPED = ("__init__", "errors", "messages", "files", "wire", "manifest", "spare", "store", "packing", "listings", "transfer", "lanes", "link", "sockets", "supervise", "supervisors",
           "budgets", "searching", "watch", "slurm", "slurmjobs", "rundisk", "runstate", "noderun", "guard", "agent", "node")

# Runs before anything of ours is imported, and under any Python: 2.7 has to be able to read it.
MAIN = """\
import sys

if sys.version_info < (3, 8):
    sys.stdout.write('GPURUN-FAILED {"reason": "the agent needs Python 3.8 or newer; %s is %d.%d"}\\n'
                     % (sys.executable.replace("\\\\", "/").replace('"', "'"), sys.version_info[0], sys.version_info[1]))
    sys.stdout.flush()
    sys.exit(10)

from gpurun.node import main

sys.exit(main())
"""


class AgentFile(NamedTuple):
    path: str
    hash: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def size(self) -> int:
        return os.stat(self.path).st_size


def agent_file(package: str = os.path.dirname(os.path.abspath(__file__))) -> AgentFile:
    """The zipapp of SHIPPED and the hash that names it; built once for each state of the sources."""
    members = [("__main__.py", MAIN.encode())]
    for module in SHIPPED:
        try:
            with open(os.path.join(package, f"{module}.py"), "rb") as stream:
                members.append((f"gpurun/{module}.py", stream.read()))
        except OSError as error:
            raise DeployError(f"gpurun's own file {error.filename} can't be read: {error.strerror}. Install gpurun again.") from None
    digest = hashlib.sha256()
    for name, data in members:
        digest.update(f"{name} {len(data)}\n".encode() + data)
    known = digest.hexdigest()[:16]
    path = os.path.join(cache_dir(), "agent", f"agent-{known}.pyz")
    if not os.path.exists(path):
        make_private_dir(os.path.dirname(path))
        atomic_write(path, _zipapp(members))
    return AgentFile(path, known)


def _zipapp(members: list[tuple[str, bytes]]) -> bytes:
    """Stored, with one fixed time: the same bytes wherever they are made, and readable by a Python without zlib."""
    import io
    import zipfile
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o100644 << 16
            archive.writestr(info, data)
    return target.getvalue()
