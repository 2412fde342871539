"""A host over SSH as a node. SSH is used to put the agent there and to learn its id; everything after that is the link's, unless no UDP gets through."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import pwd
import re
from typing import TYPE_CHECKING, Any

from gpurun.provider import Endpoint, Keep, Node, Progress, Say, operator_id, with_port

if TYPE_CHECKING:
    from gpurun.config import Cluster, Host

MAX_CONFIG_FILES = 200        # one that includes itself in ever new spellings ends too


class SshNode(Node):
    kind = "ssh"

    def __init__(self, host: Host, cluster: Cluster) -> None:
        super().__init__(host.text, cluster, host.text)
        self.host = host

    def deploy(self, say: Say, progress: Progress, keep: Keep | None = None) -> Endpoint:
        from gpurun import bootstrap
        basis = self.basis()
        with contextlib.ExitStack() as until:
            connection = self.log_in(say)
            until.callback(connection.close)
            said = bootstrap.deploy(connection, self.cluster, operator_id(), say, progress)
            peer = connection.peer_ip()
            if keep is not None:
                until.pop_all()
                keep(connection)
        # The address that SSH reached is the likeliest; what the agent sees of itself may be behind NAT, or the better way inside one.
        ours = (with_port(peer, said["port"]),) if peer and said["port"] else ()
        near = bool(peer) and is_loopback(peer)
        return self.learned(said, ours + tuple(one for one in said["addresses"] if near or not is_loopback(one.rpartition(":")[0])), say, basis)

    def log_in(self, say: Say) -> Any:
        from gpurun import ssh               # the only place of the main job that loads Fabric
        return ssh.Connection(self.host, say).open()

    def stop_agent(self) -> None:
        from gpurun import bootstrap, ssh
        with ssh.Connection(self.host) as connection:
            bootstrap.stop(connection, self.cluster.node_dir)

    def ssh_argv(self) -> list[str]:
        own = os.environ.get("GPURUN_SSH_CONFIG")
        return ["ssh", *(["-F", own] if own else []), *(["-l", self.host.user] if self.host.user else []),
                *(["-p", str(self.host.port)] if self.host.port else []), "--", self.host.hostname]

    def basis(self) -> str:
        cluster = self.cluster
        return hashlib.sha256(repr([cluster.udp_port, cluster.relay, cluster.python, _ssh_config()]).encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        return dict(super().describe(), host=self.host.text)


def _ssh_config() -> list[tuple[str, bytes]]:
    """Every file of the ssh config, with those that it includes: after an edit the alias may mean another machine, which only SSH knows."""
    own = os.environ.get("GPURUN_SSH_CONFIG")
    user = os.path.join(_home(), ".ssh")
    todo, found = [own] if own else [os.path.join(user, "config"), "/etc/ssh/ssh_config"], {}
    for path in todo:                        # it grows on the way
        if path in found or len(found) > MAX_CONFIG_FILES:
            continue
        try:
            with open(path, "rb") as stream:
                found[path] = stream.read()
        except OSError:
            continue
        for words in re.findall(rb"(?im)^[ \t]*include[ \t=]+(.+)$", found[path]):
            base = "/etc/ssh" if path.startswith("/etc/ssh/") else user
            for word in os.fsdecode(words).replace('"', " ").split():
                todo += sorted(glob.glob(os.path.join(base, re.sub("^~(?=/)", _home(), word))))
    return sorted(found.items())


def _home() -> str:
    """Where OpenSSH looks: it asks the user database and not $HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def is_loopback(ip: str) -> bool:
    import ipaddress
    return ipaddress.ip_address(ip.strip("[]")).is_loopback
