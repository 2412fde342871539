"""What several commands need: options, the way to a node, how an answer is printed. Loads click and the errors, nothing else of ours."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

import click

from gpurun.errors import ConfigError

LONGEST_S = 366 * 86400.0


class Heard:
    """Of click, which would exit 1 when nobody reads a help text to its end."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*args, **options)   # type: ignore[misc]
        except BrokenPipeError:
            raise click.exceptions.Exit(0) from None


class Command(Heard, click.Command):
    pass


class Time(click.ParamType):
    """90, 90s, 10m, 2h, 1d."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        try:
            number = float(value.rstrip("smhd") or "x") * {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(value[-1:], 1)
            if len(value) - len(value.rstrip("smhd")) <= 1 and 0 <= number <= LONGEST_S:
                return number
        except ValueError:
            pass
        self.fail(f"'{value}' is not a time; write 90, 90s, 10m, 2h or 1d", param, ctx)


def options(*names: str) -> Callable:
    """The options that several commands have, as one decorator."""
    known = {
        "cluster": click.option("--cluster", metavar="FILE", help="Where to run. Else $GPURUN_CLUSTER, cluster.toml beside the job, "
                                                                  "~/.config/gpurun/cluster.toml, this machine."),
        "node": click.option("--node", metavar="NAME", help="One node of the cluster file."),
        "runs_dir": click.option("--runs-dir", metavar="DIR", help="Where runs are kept. Else $GPURUN_RUNS, else ./gpurun-runs."),
        "json": click.option("--json", "as_json", is_flag=True, help="One JSON object a line on stdout, each with a type."),
        "quiet": click.option("--quiet", "-q", is_flag=True, help="Only the job's own output, warnings and errors."),
    }

    def add(function: Callable) -> Callable:
        for name in reversed(names):
            function = known[name](function)
        return function
    return add


def loaded_all() -> None:
    """What lasts comes now: garbage is looked for again, and not among what was loaded."""
    import gc
    gc.freeze()
    gc.enable()


class LazyLink:
    """Makes this process's link when it is first needed: loading iroh takes a tenth of a second. Called from two threads."""

    def __init__(self, cluster: Any) -> None:
        import threading
        self._cluster, self._lock, self._link = cluster, threading.Lock(), None

    def __call__(self) -> Any:
        with self._lock:
            if self._link is None:
                from gpurun.link import Link, load_key
                from gpurun.paths import config_dir
                bind = "127.0.0.1:0" if self._cluster.here else "0.0.0.0:0"
                self._link = Link(load_key(os.path.join(config_dir(), "key")), bind, relay=self._cluster.relay,
                                  most_connections=self._cluster.max_connections)
            return self._link


def home() -> str:
    """The home folder, for a command that keeps something there: "" or a relative one would make folders in odd places."""
    path = os.path.expanduser("~") if os.environ.get("HOME", "/") else ""
    if not os.path.isabs(path):
        raise ConfigError(f"HOME is '{path}', which is not an absolute path, and gpurun keeps its key and more below it; "
                          "set HOME to your home folder.")
    return path


def find_cluster(option: str | None, folder: str) -> Any:
    """The cluster that a command means by `--cluster`, or by saying nothing."""
    from gpurun import config
    return config.load_cluster(config.find_cluster(option, folder, os.environ, home()))


def nodes_named(cluster: Any, name: str | None) -> list[Any]:
    """The nodes of a cluster, or the one with this name."""
    from gpurun import config, provider
    nodes = provider.nodes(cluster)
    if name is None:
        return nodes
    if cluster.kind == "vastai":
        found = [one for one in nodes if one.name == name]
        if not found:
            known = ", ".join(one.name for one in nodes) or "none is up: `gpurun up` rents one"
            raise ConfigError(f"--node {name} is not a node of {cluster.path} that is up; the nodes are {known}")
        return found
    host = config.pick_host(cluster, name)
    return nodes if host is None else [one for one in nodes if one.name == host.text]


def way_to(option: str | None) -> Callable[[Any], tuple[Any, list[Any], LazyLink]]:
    """A function that finds, for a run's record, the cluster and the node that it was given, and a link to get there. `option`: a cluster file
    that counts more than the one in the record."""
    def find(record: Any) -> tuple[Any, list[Any], LazyLink]:
        from gpurun import config
        home()
        path, name = option or record.node.get("cluster") or None, record.node.get("name", "")
        if path and not option and not os.path.lexists(path):
            raise ConfigError(f"{record.run_id} was given to {name} of the cluster file {path}, which is gone; name another file that has "
                              "this node with --cluster")
        cluster = config.load_cluster(path)
        if record.node.get("label") and cluster.kind == "vastai":   # that very machine, up or gone
            from gpurun.provider_vastai import node_of
            return cluster, [node_of(cluster, record.node["label"])], LazyLink(cluster)
        return cluster, nodes_named(cluster, name), LazyLink(cluster)
    return find


def operator_name() -> str:
    """Who this is, for others that use the same node."""
    import pwd
    import socket
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def status_object(folder: Any, record: Any, problem: str) -> dict[str, Any]:
    """A run for a program to read."""
    if record is None:
        return {"type": "run", "run_id": folder.run_id, "problem": problem}
    return {"type": "run", "run_id": record.run_id, "state": record.state, "phase": record.phase, "exit_code": record.exit_code,
            "reason": record.reason, "node": record.node.get("name", ""), "path": record.path, "driven": folder.driver() is not None, "times": record.times,
            "seconds": record.seconds, "bytes": record.bytes, "outputs": record.outputs, "missing": record.missing, "folder": folder.path,
            "node_dir": record.node_dir, "detached": record.detached, "cost": record.cost, "backend": record.backend,
            "logs_complete": record.logs_complete, "seen": record.seen}


def print_line(text: str) -> None:
    """An answer, to stdout, at once. Whoever reads it may leave (`| head -1`): the command goes on to its own exit code, unheard."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)                                # what the stream still holds goes there too
        os.close(null)
