"""`gpurun doctor`: what works here and what each node answers. Each check is {"name", "ok", "text"}; ok None is a remark."""

from __future__ import annotations

import os
import platform
import shutil
import time
from queue import Empty, SimpleQueue
from typing import Any, Callable, Iterator, Sequence

from gpurun import __version__, wire
from gpurun.config import Cluster
from gpurun.errors import GpurunError, RefusedError
from gpurun.files import human_bytes
from gpurun.messages import Hello, NodeReady
from gpurun.paths import config_dir
from gpurun.provider import Node


def checks(cluster: Cluster, nodes: Sequence[Node], link: Callable[[], Any], timeout_s: float, operator: str) -> Iterator[dict[str, Any]]:
    """One check after the other, as it is done."""
    yield _check("gpurun", True, f"{__version__}, protocol {wire.PROTOCOL}, Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        from gpurun.link import FAST_WRITES, load_key, public_id
        yield _check("iroh", True, "loads")
        yield _check("iroh fast writes", True if FAST_WRITES else None, "in use" if FAST_WRITES else
                     "this iroh has another inside: sending works, at about 4 MB/s; install iroh 1.2")
    except Exception as error:
        yield _check("iroh", False, f"can't be loaded: {error}. Install gpurun with a Python of 64 bits on glibc 2.28 or newer, macOS or Windows.")
        return
    path = os.path.join(config_dir(), "key")
    try:
        yield _check("key", True, f"{path}, id {public_id(load_key(path))[:16]}…")
    except GpurunError as error:
        yield _check("key", False, str(error))
        return
    if cluster.kind == "ssh":
        client = shutil.which("ssh")
        yield _check("ssh", True if client else None, f"{client} answers for {os.environ.get('GPURUN_SSH_CONFIG') or '~/.ssh/config'}" if client else
                     "no OpenSSH client on PATH: ~/.ssh/config is read by paramiko, which knows neither Include nor all of Match")
        yield _check("ssh agent", None, os.environ.get("SSH_AUTH_SOCK") or "none ($SSH_AUTH_SOCK isn't set): keys come from files")
    yield _check("cluster", True, f"{cluster.kind}: {cluster.path or 'no cluster file, this machine'}")
    for node in nodes:
        yield _node(node, link, timeout_s, operator)


def _check(name: str, ok: bool | None, text: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "text": text}


def _node(node: Node, link: Callable[[], Any], timeout_s: float, operator: str) -> dict[str, Any]:
    from gpurun.session import dial
    name = f"node {node.name}"
    known = node.known_endpoint()
    if known is None:
        if node.kind == "local":
            return _check(name, None, "no agent runs yet; the first run starts one")
        return _over_ssh(node, "no agent is known there yet; the first run brings one", False)
    inbox: "SimpleQueue[Any]" = SimpleQueue()
    began = time.monotonic()
    try:
        session = dial(link(), known, inbox, timeout_s)
        try:
            session.begin(Hello(version=__version__, operator=operator))
            kind, _, item = inbox.get(timeout=timeout_s)
        finally:
            path = session.path()
            session.close()
    except Empty:
        return _check(name, False, f"the agent was connected to and said nothing for {timeout_s:g} s")
    except RefusedError as error:
        return _check(name, None, f"{error}; the next run introduces it, over SSH" if node.kind == "ssh" else str(error))
    except GpurunError as error:
        return _over_ssh(node, f"its agent doesn't answer ({error})", True) if node.kind == "ssh" else _check(name, False, str(error))
    if kind != "said" or not isinstance(item, NodeReady):
        return _check(name, False, f"the agent's answer was {item}")
    facts = item.facts
    gpus = ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or []) or "no GPU seen"
    busy = f"busy with {facts['claim']}" if facts.get("claim") else "idle"
    return _check(name, True, f"{busy}; agent {facts.get('version')} over {path} in {time.monotonic() - began:.2f} s; {facts.get('os')} "
                              f"{facts.get('arch')}, Python {facts.get('python')}, {facts.get('cpus')} CPUs, {gpus}, "
                              f"{human_bytes(int(facts.get('free_bytes') or 0))} free in {facts.get('node_dir')}")


def _over_ssh(node: Any, before: str, known: bool) -> dict[str, Any]:
    """Whether SSH gets there, and what it finds; nothing is started. `known`: an agent was put there before."""
    from gpurun import bootstrap, ssh
    name = f"node {node.name}"
    try:
        with ssh.Connection(node.host) as connection:
            facts = bootstrap.probe(connection, node.cluster.node_dir, node.cluster.python)
            bootstrap.check(facts, node.name, node.cluster)
    except GpurunError as error:
        return _check(name, False, f"{before}; over SSH: {error}")
    if known and facts.serving:
        return _check(name, False, f"{before}, and SSH says that it runs there (process {facts.serving}): no UDP gets through to it. Let this machine "
                                   "reach its UDP port (`udp_port` in the cluster file fixes the number), or set `relay`.")
    return _check(name, True, f"{before}{'; the next run starts it again' if known else ''}; SSH works: {facts.os} {facts.arch}, Python at {facts.python}")
