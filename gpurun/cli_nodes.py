"""The commands for machines: offers, up, nodes, down, ssh. As in `cli.py`, heavy imports sit inside the command that needs them."""

from __future__ import annotations

import json
import os
import shlex
import time
from typing import Any

import click

from gpurun.cli_shared import Command, LazyLink, find_cluster, operator_name, options, print_line
from gpurun.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, GpurunError

MISSES_SHOWN = 10


def _yes(function: Any) -> Any:
    return click.option("--yes", "-y", is_flag=True, help="Don't ask.")(function)


def _fleet(cluster: Any, screen: Any) -> Any:
    from gpurun.renting import fleet
    return fleet(cluster, screen, LazyLink(cluster), operator_name())


# ---- offers ------------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="What could be rented now, and what it costs: gpurun offers")
@options("cluster", "json")
@click.option("--all", "show_all", is_flag=True, help="Every offer that doesn't fit, too, with the reasons.")
def offers(cluster: str | None, as_json: bool, show_all: bool) -> int:
    """The offers that fit the cluster file, by price, and why the rest doesn't. Rents nothing.

    \b
    Example: gpurun offers --cluster gpus.toml
    """
    from gpurun.offers import why_none
    found = _rented(find_cluster(cluster, os.getcwd()))
    from gpurun.screen import Screen
    at = _fleet(found, Screen.choose(json=as_json))
    choice = at.machines.choice()
    if as_json:
        for offer in choice.fitting:
            print_line(json.dumps(_offer_object(offer, found, [])))
        for offer, misses in choice.rejected:
            print_line(json.dumps(_offer_object(offer, found, [miss.text for miss in misses])))
        if choice.fitting:
            return 0
        raise _no_offer(why_none(choice))
    rows = [_offer_row(offer, found, "") for offer in choice.fitting]
    shown = choice.rejected if show_all else choice.rejected[:MISSES_SHOWN]
    rows += [_offer_row(offer, found, "; ".join(miss.text for miss in misses)) for offer, misses in shown]
    if rows:
        print_line(_table(("$/h", "GPU", "VRAM", "CUDA", "DOWN", "UP", "RELIABLE", "PLACE", "OFFER", "WHY NOT"), rows))
    if len(choice.rejected) > len(shown):
        at.screen.say(f"{len(choice.rejected) - len(shown)} more don't fit; --all shows them")
    if not choice.fitting:
        raise _no_offer(why_none(choice))
    at.screen.say(f"{len(choice.fitting)} of {len(choice.fitting) + len(choice.rejected)} offers fit; `gpurun up` takes one of the cheapest")
    return 0


def _no_offer(text: str) -> GpurunError:
    from gpurun.errors import NoOfferError
    return NoOfferError(text)


def _offer_object(offer: Any, cluster: Any, misses: list[str]) -> dict[str, Any]:
    from gpurun.offers import price_of
    return {"type": "offer", "offer": offer.id, "machine": offer.machine_id, "price_per_hour": price_of(offer, cluster), "gpu": offer.gpu_name,
            "gpus": offer.num_gpus, "gpu_ram_mb": offer.gpu_ram_mb, "cuda": offer.cuda, "reliability": offer.reliability, "down_mbps": offer.down_mbps,
            "up_mbps": offer.up_mbps, "disk_gb": offer.disk_gb, "place": offer.place, "fits": not misses, "why_not": misses}


def _offer_row(offer: Any, cluster: Any, why: str) -> tuple[str, ...]:
    from gpurun.offers import price_of

    def some(value: Any, form: str) -> str:
        return "" if value is None else form.format(value)

    return (some(price_of(offer, cluster), "{:.3f}"), f"{offer.num_gpus or 1} × {offer.gpu_name}", some(offer.gpu_ram_mb and offer.gpu_ram_mb / 1000, "{:.0f} GB"),
            some(offer.cuda, "{:g}"), some(offer.down_mbps, "{:.0f}"), some(offer.up_mbps, "{:.0f}"), some(offer.reliability and offer.reliability * 100, "{:.1f} %"),
            offer.place, str(offer.id), why)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as what is in them; one that is empty in every row is left out."""
    from gpurun.screen import columns, printable
    rows = [tuple(printable("" if cell is None else str(cell)) for cell in row) for row in rows]   # a record says whatever its disk made of it
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    wide = {at: max(columns(row[at]) for row in [heads, *rows]) for at in used}
    return "\n".join("  ".join(row[at] + " " * (wide[at] - columns(row[at])) for at in used).rstrip() for row in [heads, *rows])


# ---- up, down ----------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="Rent the machines of the cluster file: gpurun up")
@options("cluster", "json", "quiet")
@click.option("--nodes", "count", metavar="N", type=click.IntRange(1, 64), help="So many, instead of the cluster file's `nodes`.")
@_yes
def up(cluster: str | None, as_json: bool, quiet: bool, count: int | None, yes: bool) -> int:
    """Bring so many nodes up, until each one's agent answers. What it costs is shown first. Of hosts over SSH: deploy the agent there.

    \b
    Example: gpurun up --yes && gpurun train.toml; gpurun down
    """
    from gpurun.renting import bring_up, consent, standing
    from gpurun.screen import Screen
    found = find_cluster(cluster, os.getcwd())
    screen = Screen.choose(json=as_json, quiet=quiet)
    at = _fleet(found, screen)
    try:
        if found.kind == "vastai":
            count = count or found.nodes
            there = sorted(standing(at), key=lambda one: one.index)
            shape, also = at.machines.shape(), ""
            going = there[count:] + [one for one in there[:count] if one.shape not in ("", shape)]
            if going:
                also = f"this ends {', '.join(f'node{one.index}' for one in going)}, and with it what runs there"
            consent(at, count - len(there) + sum(one in there[:count] for one in going), screen, yes, also)
        else:
            from gpurun import provider
            count = min(count or 64, len(provider.nodes(found)))
        ready = bring_up(at, count, screen)
        screen.close()
        for one in ready:
            print_line(json.dumps(_machine_object(at, one, {})) if as_json else at.machines.node(one).name)
        return 0
    finally:
        screen.close()


@click.command(cls=Command, short_help="End machines, provably: gpurun down")
@click.argument("names", metavar="[NODE]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All machines of this operator, of whatever cluster file or run.")
@_yes
@options("cluster", "json", "quiet")
def down(names: tuple[str, ...], every: bool, cluster: str | None, as_json: bool, quiet: bool, yes: bool) -> int:
    """End the cluster's machines, or those named. It counts once the provider's list doesn't show them any more. Safe to repeat.

    \b
    Example: gpurun down
    """
    from gpurun.renting import about_unknown, bring_down, busy_runs, confirm, orphans, unknown
    from gpurun.screen import Screen
    if every and names:
        raise ConfigError("--all and names of nodes say two different things; give one of them")
    found = find_cluster(cluster, os.getcwd())
    screen = Screen.choose(json=as_json, quiet=quiet)
    at = _fleet(found, screen)
    try:
        fleets = [at, *orphans(at, every or bool(names), alive=bool(names))]
        chosen = _chosen(fleets, names) if names else dict.fromkeys(fleets)
        runs = [words for one, labels in chosen.items() for words in busy_runs(one, labels)]
        if runs and not yes and confirm(screen, f"{', '.join(runs)}: end what runs there?") is False:
            return EXIT_STOPPED
        for words in runs:
            screen.warn(f"{words}; it goes with it, and so does what it made and isn't home" if found.kind == "vastai" else f"{words}, which goes on")
        left: list[str] = []
        for one, labels in chosen.items():
            left += one.words(bring_down(one, screen, labels))
        strays = [] if every or names else about_unknown(unknown(at, at.seen))
        screen.close()
        for line in strays:
            screen.warn(line)
        for line in left:
            screen.error(line)
        if as_json:
            print_line(json.dumps({"type": "down", "left": left}))
        elif not left and not strays:
            screen.say("nothing of it is left" if found.kind == "vastai" else "no agent of ours runs there any more")
        return EXIT_FAILED if left else 0
    finally:
        screen.close()


def _chosen(fleets: list[Any], names: tuple[str, ...]) -> dict[Any, list[str] | None]:
    """The labels that these names mean, by fleet: a node's name in the first one, the cluster's; a machine's id or label in any."""
    machines = {fleet: (fleet.look() if fleet.machines.paid else fleet.adopt()).machines for fleet in fleets}
    chosen: dict[Any, list[str] | None] = {}
    for name in names:
        found = [(fleet, one.label) for fleet in fleets for one in machines[fleet]
                 if name in (one.id, one.label) or fleet is fleets[0] and name == fleet.machines.name(one.index)]
        if not found:
            known = ", ".join([fleets[0].machines.name(one.index) for one in machines[fleets[0]]] + [one.id for fleet in fleets[1:] for one in machines[fleet] if one.id])
            raise ConfigError(f"'{name}' is not a node of {fleets[0].cluster.path or 'this machine'}: {known or 'none is up'}")
        for fleet, label in found:
            chosen[fleet] = [*(chosen.get(fleet) or []), label]
    return chosen


# ---- nodes, ssh --------------------------------------------------------------------------------------------------------------------

@click.command(cls=Command, short_help="The machines, what they do and cost: gpurun nodes")
@options("cluster", "json")
def nodes(cluster: str | None, as_json: bool) -> int:
    """The cluster's machines: state, GPU, price, what they have cost, what runs there, and when they end. Asks the provider and each node.

    \b
    Example: gpurun nodes
    """
    from gpurun.renting import ask_all, orphans, unknown
    from gpurun.screen import Screen
    found = find_cluster(cluster, os.getcwd())
    screen = Screen.choose(json=as_json)
    at = _fleet(found, screen)
    objects, code = [], 0
    for fleet in [at, *orphans(at, False, alive=True)]:
        observed = fleet.look() if fleet.machines.paid else fleet.adopt()
        facts = ask_all(fleet, observed.machines)
        for one in sorted(observed.machines, key=lambda one: (one.index, one.begun)):
            objects.append(_machine_object(fleet, one, facts.get(one.label, {})))
        known = {one.label for one in observed.machines}
        own = [row for row in observed.seen if row.label.startswith(fleet.prefix) and row.label not in known]
        for row in [*own, *(unknown(at, observed.seen) if fleet is at else [])]:
            objects.append({"type": "node", "node": "?", "machine": row.id, "label": row.label, "state": f"{row.state}, no record here", "run": ""})
        if fleet is at and not observed.complete:
            screen.warn("this may not be all: the provider's list couldn't be had")
            code = EXIT_FAILED if found.kind == "vastai" else 0
    if as_json:
        for one in objects:
            print_line(json.dumps(one))
        return code
    rows = [_node_row(one) for one in objects]
    if not rows:
        screen.say("no machine is up" if not code else "no machine is known here")
        return code
    print_line(_table(("NODE", "STATE", "GPU", "$/h", "SPENT", "RUN", "LIMIT", "MACHINE", "WHERE"), rows))
    return code


def _machine_object(at: Any, one: Any, facts: dict[str, Any]) -> dict[str, Any]:
    from gpurun import limits
    end = at.end_of(one)
    state = "ending" if not one.wanted else "ready" if one.ready else one.facts.get("status") or "asked for"
    if one.absent:
        state = "gone" if one.sighted else "not there (yet)"
    elif one.ready and one.wanted and facts.get("silent"):
        state = "ready, but silent"
    return {"type": "node", "node": at.machines.name(one.index), "machine": one.id, "label": one.label, "state": state,
            "gpu": one.facts.get("gpu", "") or ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or []), "gpus": one.facts.get("gpus"),
            "price_per_hour": limits.price(one), "cost": round(limits.cost(one, time.time()), 4), "run": facts.get("claim") or one.facts.get("run") or "",
            "place": one.facts.get("place", ""), "ends_in_s": None if end.in_s == float("inf") else round(end.in_s), "ends_by": end.why,
            "guarded": one.facts.get("guarded"), "cluster": one.facts.get("cluster", "")}


def _node_row(one: dict[str, Any]) -> tuple[str, ...]:
    from gpurun.limits import dollars
    from gpurun.screen import duration
    limit = f"{duration(one['ends_in_s'], whole=True)} ({one['ends_by']})" if one.get("ends_in_s") is not None else ""
    limit += " can't end itself" if one.get("guarded") is False else ""
    paid = one.get("price_per_hour")
    return (one["node"], one["state"], f"{one['gpus']} × {one['gpu']}" if one.get("gpus") else one.get("gpu") or "", dollars(paid) if paid else "",
            dollars(one["cost"]) if paid else "", one["run"], limit, one["machine"] if one["machine"] != one["node"] else "", one.get("place", ""))


@click.command(cls=Command, short_help="Log in to a node: gpurun ssh", context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="[NODE]", required=False)
@click.argument("command", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
@options("cluster")
def ssh(name: str | None, command: tuple[str, ...], cluster: str | None) -> int:
    """Your own ssh to a node, with the address, key and host key that gpurun uses there.

    \b
    Example: gpurun ssh node1 nvidia-smi
    """
    found = find_cluster(cluster, os.getcwd())
    node = _node(found, name)
    argv = [*node.ssh_argv(), *command]
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise ConfigError(f"{argv[0]} can't be started: {error.strerror}. The command is: {shlex.join(argv)}") from None


def _node(cluster: Any, name: str | None) -> Any:
    from gpurun import provider
    from gpurun.cli_shared import nodes_named
    if cluster.kind != "vastai":
        try:
            return nodes_named(cluster, name)[0]
        except ConfigError as error:
            raise ConfigError(f"{str(error).removeprefix('--node ')}. Name the node first: gpurun ssh {provider.nodes(cluster)[0].name} COMMAND") from None
    from gpurun.renting import all_nodes
    nodes = all_nodes(cluster)
    found = [one for one in nodes if name in (None, one.name, one.label, one.machine.id)]
    if not found:
        raise ConfigError(f"'{name}' is not a node that is up. Name the node first: gpurun ssh {nodes[0].name} COMMAND" if nodes else
                          "no machine is up: `gpurun up` rents one")
    if name is None and len(found) > 1:
        raise ConfigError(f"there are {len(found)} nodes: name one of {', '.join(one.name for one in found)}")
    return found[0]


def _rented(cluster: Any) -> Any:
    if cluster.kind != "vastai":
        raise ConfigError(f"{cluster.path or 'no cluster file: this machine'} is of kind {cluster.kind}: nothing is rented there, so there are no offers")
    return cluster


COMMANDS = (offers, up, nodes, down, ssh)
