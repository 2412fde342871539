"""What Vast.ai offers, against what a cluster file asks for: the search's filters, a second look at each answer, and the choice.

    query(cluster) -> filters                       what the service is to leave out itself; `narrow=False`: as little as it can
    parse(row) -> Offer                             tolerant: what is missing or odd is unknown
    why_not(offer, cluster) -> what it lacks        every requirement again: the service doesn't always apply its filters
    find(search, cluster, avoid) -> Choice          both searches, and choose()
    choose(offers, cluster, avoid) -> Choice        the fitting ones, cheapest first, and the rest with what each lacks
    why_none(choice) -> text                        when nothing fits: what excluded how many, and which key alone would bring the most
"""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple

if TYPE_CHECKING:
    from gpurun.config import Cluster

# As Vast.ai spells them; others are sent as they were written.
GPU_NAMES = (
    "A10", "A40", "A100 PCIE", "A100 SXM4", "A100X", "B200", "GH200 SXM", "GTX 1080 Ti", "H100 NVL", "H100 PCIE", "H100 SXM", "H200", "H200 NVL",
    "L4", "L40", "L40S", "Q RTX 6000", "Q RTX 8000", "RTX 3060", "RTX 3060 Ti", "RTX 3070", "RTX 3070 Ti", "RTX 3080", "RTX 3080 Ti", "RTX 3090",
    "RTX 3090 Ti", "RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070S", "RTX 4070S Ti", "RTX 4070 Ti", "RTX 4080", "RTX 4080S", "RTX 4090",
    "RTX 4090D", "RTX 4500Ada", "RTX 5000Ada", "RTX 5060", "RTX 5060 Ti", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090", "RTX 6000Ada",
    "RTX A4000", "RTX A4500", "RTX A5000", "RTX A6000", "RTX PRO 6000 S", "RTX PRO 6000 WS", "Tesla T4", "Tesla V100",
)
MB_PER_GB = 950          # of a GPU's memory: drivers report 23,028 to 24,564 for cards that are sold with 24 GB
DIRECT_PORTS = 2         # SSH, and UDP for the link
BLACKWELL, BLACKWELL_CUDA = 1000, 12.8   # compute capability 10.0, and what a program needs to run on it
HOURS_PER_MONTH = 730
_CUDA = re.compile(r"cuda[-_:]?v?(\d{1,2})(?:\.(\d{1,2}))?|(?<![a-z0-9])cu(\d\d)(\d)(?!\d)", re.IGNORECASE)


class Offer(NamedTuple):
    """One machine, or a share of one, to be had. None or "": it wasn't said. Prices in $/h. `machine_id` stays, `id` is gone once it is rented."""

    id: int
    machine_id: str = ""
    host_id: str = ""
    gpu_name: str = ""
    num_gpus: int | None = None
    gpu_ram_mb: float | None = None      # of each
    price_per_hour: float | None = None  # on demand, with the disk
    storage_per_hour: float | None = None
    min_bid: float | None = None
    reliability: float | None = None
    down_mbps: float | None = None
    up_mbps: float | None = None
    disk_gb: float | None = None
    cuda: float | None = None
    compute_cap: int | None = None
    verified: bool | None = None
    direct_ports: int | None = None
    duration_s: float | None = None
    place: str = ""
    cpu_arch: str = ""
    gpu_arch: str = ""
    free: bool = True                    # not said to be rented, or not rentable


class Miss(NamedTuple):
    """What an offer lacks: the key that asks for it, what a user reads, and the offer's own number."""

    key: str
    text: str
    has: float | None = None


class Choice(NamedTuple):
    """`fitting` by price; `rejected` with what each lacks; `asked` in words."""

    fitting: list[Offer] = []
    rejected: list[tuple[Offer, list[Miss]]] = []
    asked: str = ""


# ---- reading what may be anything ------------------------------------------------------------------------------------------

def number(value: Any) -> float | None:
    """A finite number, also one in a string; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """A whole number from 0, also one in a string or a float; ids keep every digit."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,30}\s*", value):
        return int(value)
    found = number(value)
    if found is None or found < 0 or found != int(found):
        return None
    return value if isinstance(value, int) else int(found)


def id_text(value: Any) -> str:
    """An id, which is a number there, as text; "" for none."""
    return str(whole(value) or "")


def text(value: Any, longest: int = 200) -> str:
    """One printable line, stripped; "" for what isn't text."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in value).split()) if isinstance(value, str) else ""
    return line if len(line) <= longest else line[:longest - 1] + "…"


def parse(row: Any) -> Offer | None:
    """An offer of a search's answer; None without an id, since it can't be rented."""
    if not isinstance(row, dict):
        return None
    found = whole(row.get("id")) or whole(row.get("ask_contract_id"))
    if not found:
        return None
    reliability = number(row.get("reliability2"))
    verification = row.get("verification")
    return Offer(
        found, id_text(row.get("machine_id")), id_text(row.get("host_id")), text(row.get("gpu_name")), whole(row.get("num_gpus")),
        number(row.get("gpu_ram")), number(row.get("dph_total")), number(row.get("storage_total_cost")), number(row.get("min_bid")),
        number(row.get("reliability")) if reliability is None else reliability, number(row.get("inet_down")), number(row.get("inet_up")),
        number(row.get("disk_space")), number(row.get("cuda_max_good")), whole(row.get("compute_cap")),
        verification == "verified" if isinstance(verification, str) else None, whole(row.get("direct_port_count")), number(row.get("duration")),
        text(row.get("geolocation")), text(row.get("cpu_arch")), text(row.get("gpu_arch")),
        row.get("rentable") is not False and row.get("rented") is not True)


# ---- names of GPUs and images ------------------------------------------------------------------------------------------------

def gpu_names(asked: str) -> tuple[str, ...]:
    """How Vast.ai calls what a user calls `rtx_4090`, `A6000` or `H100` (all that there are of it). () for "": any."""
    words = " ".join(asked.replace("_", " ").split())
    short = re.sub(r"^(?:nvidia |geforce )+", "", words, flags=re.IGNORECASE)
    if not short:
        return ()
    exact = [name for name in GPU_NAMES if _key(name) == _key(short)]
    alone = [name for name in GPU_NAMES if _key(name.split()[-1]) == _key(short)]
    family = [name for name in GPU_NAMES if name.casefold().startswith(short.casefold() + " ")]
    return tuple(exact or (alone if len(alone) == 1 else []) or [short] + family)


def near_gpus(asked: str) -> list[str]:
    """Known names that look like it, for who mistyped one."""
    keys = {_key(name): name for name in GPU_NAMES}
    return [keys[key] for key in difflib.get_close_matches(_key(asked), keys, 3, 0.75)]


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def image_cuda(image: str) -> float | None:
    """The CUDA that an image's name tells: `cuda-12.8.1`, `cuda12.4`, `nvidia/cuda:12.8.1-base`, `cu124`; else None."""
    match = _CUDA.search(image)
    if not match:
        return None
    return float(f"{match[1] or match[3]}.{match[2] or match[4] or 0}")


# ---- what is asked for ---------------------------------------------------------------------------------------------------------

def query(cluster: Cluster, narrow: bool = True) -> dict[str, Any]:
    """Filters for the service, complete: it isn't to add any of its own.

    At most 64 offers come back, so the narrow one asks for all that a filter can say. The other one leaves out what `why_none` is to
    count: price, reliability, speed, CUDA, duration.
    """
    names, gpu, selection = gpu_names(cluster.gpu.name), cluster.gpu, cluster.selection
    asked: dict[str, Any] = {
        "external": {"eq": False}, "rentable": {"eq": True}, "rented": {"eq": False}, "num_gpus": {"eq": gpu.count},
        "disk_space": {"gte": cluster.disk_gb}, "direct_port_count": {"gte": DIRECT_PORTS}}
    if selection.require_verified:
        asked["verified"] = {"eq": True}
    if names:
        asked["gpu_name"] = {"eq": names[0]} if len(names) == 1 else {"in": list(names)}
    if gpu.min_vram_gb:
        asked["gpu_ram"] = {"gte": math.floor(gpu.min_vram_gb * MB_PER_GB)}
    if narrow:
        least = {"reliability": selection.min_reliability, "inet_down": selection.min_down_mbps, "inet_up": selection.min_up_mbps,
                 "cuda_max_good": _cuda_needed(cluster), "duration": (cluster.limits.max_hours or 0) * 3600}
        asked.update({key: {"gte": value} for key, value in least.items() if value})
        if cluster.bid is not None:
            asked["min_bid"] = {"lte": cluster.bid}
        elif selection.max_price_per_hour is not None:
            asked["dph_total"] = {"lte": selection.max_price_per_hour}
    return asked


def price_of(offer: Offer, cluster: Cluster) -> float | None:
    """$/h for the whole machine with its disk; None when it can't be known."""
    if cluster.bid is None:
        return offer.price_per_hour
    return cluster.bid + (offer.storage_per_hour or 0.0)


def why_not(offer: Offer, cluster: Cluster, need_s: float | None = None) -> list[str]:
    """What it lacks, in words; [] when it will do. `need_s`: how long it is needed, where that is known better than `max_hours`."""
    return [miss.text for miss in _misses(offer, cluster, need_s)]


def find(search: Callable[[dict[str, Any]], list[Any]], cluster: Cluster, avoid: Iterable[str] = (), need_s: float | None = None) -> Choice:
    """`search(filters)` gives rows. A second search only where nothing fits, so that there is something to tell."""
    choice = choose([parse(row) for row in search(query(cluster))], cluster, avoid, need_s)
    if choice.fitting:
        return choice
    return choose([parse(row) for row in search(query(cluster, narrow=False))], cluster, avoid, need_s)


def choose(offers: Iterable[Offer | None], cluster: Cluster, avoid: Iterable[str] = (), need_s: float | None = None) -> Choice:
    """`avoid`: machine ids that have failed already."""
    fitting, rejected, avoid = [], [], set(avoid)
    for offer in {offer.id: offer for offer in offers if offer is not None}.values():
        misses = _misses(offer, cluster, need_s)
        if offer.machine_id and offer.machine_id in avoid:
            misses.append(Miss("avoid", "this machine has failed before"))
        if misses:
            rejected.append((offer, misses))
        else:
            fitting.append(offer)
    fitting.sort(key=lambda offer: (price_of(offer, cluster), -(offer.reliability or 0), offer.id))
    return Choice(fitting, rejected, _asked(cluster))


def _cuda_needed(cluster: Cluster) -> float | None:
    return cluster.selection.min_cuda if cluster.selection.min_cuda is not None else image_cuda(cluster.image)


def _misses(offer: Offer, cluster: Cluster, need_s: float | None) -> list[Miss]:
    gpu, selection = cluster.gpu, cluster.selection
    found = []

    def least(key: str, has: float | None, asked: float | None, what: str, unknown_will_do: bool = False) -> None:
        if asked and (not unknown_will_do if has is None else has < asked - 1e-9):
            found.append(Miss(key, f"{what} {'unknown' if has is None else f'{has:g}'}, less than {key} {asked:g}", has))

    if not offer.free:
        found.append(Miss("free", "it is rented out by now"))
    names = gpu_names(gpu.name)
    if names and _key(offer.gpu_name) not in {_key(name) for name in names}:
        found.append(Miss("gpu.name", f"its GPU is {offer.gpu_name or 'unknown'}, not {' or '.join(names)}"))
    if offer.num_gpus != gpu.count:
        found.append(Miss("gpu.count", f"it has {'an unknown number of' if offer.num_gpus is None else offer.num_gpus} GPUs, not {gpu.count}"))
    if gpu.min_vram_gb and (offer.gpu_ram_mb or 0) < gpu.min_vram_gb * MB_PER_GB:
        has = (offer.gpu_ram_mb or 0) / 1000
        found.append(Miss("gpu.min_vram_gb", f"its GPU has {has:.1f} GB, less than gpu.min_vram_gb {gpu.min_vram_gb:g}", has))
    least("disk_gb", offer.disk_gb, cluster.disk_gb, "its free disk is")
    least("min_reliability", offer.reliability, selection.min_reliability, "its reliability is")
    least("min_down_mbps", offer.down_mbps, selection.min_down_mbps, "its download is")
    least("min_up_mbps", offer.up_mbps, selection.min_up_mbps, "its upload is")
    if selection.require_verified and offer.verified is False:
        found.append(Miss("require_verified", "Vast.ai hasn't verified it"))
    least("direct ports", offer.direct_ports, DIRECT_PORTS, "the number of its open ports is", unknown_will_do=True)
    found += _machine_misses(offer, cluster) + _time_misses(offer, cluster, need_s) + _price_misses(offer, cluster)
    return found


def _machine_misses(offer: Offer, cluster: Cluster) -> list[Miss]:
    found = []
    needed, built = _cuda_needed(cluster), image_cuda(cluster.image)
    if needed and (cluster.selection.min_cuda is not None if offer.cuda is None else offer.cuda < needed - 1e-9):
        by = "min_cuda asks for" if cluster.selection.min_cuda is not None else "the image is for"
        found.append(Miss("min_cuda", f"its driver is for CUDA {offer.cuda or 'unknown'}; {by} {needed:g}", offer.cuda))
    if built and built < BLACKWELL_CUDA and (offer.compute_cap or 0) >= BLACKWELL:
        found.append(Miss("image", f"its {offer.gpu_name or 'GPU'} needs an image for CUDA {BLACKWELL_CUDA:g} or newer; this one is for {built:g}"))
    if offer.cpu_arch.casefold() not in ("", "amd64", "x86_64"):
        found.append(Miss("cpu", f"its CPU is {offer.cpu_arch}, not amd64"))
    if offer.gpu_arch.casefold() not in ("", "nvidia"):
        found.append(Miss("gpu maker", f"its GPU is of {offer.gpu_arch}, not of nvidia"))
    return found


def _time_misses(offer: Offer, cluster: Cluster, need_s: float | None) -> list[Miss]:
    hours = need_s / 3600 if need_s is not None else cluster.limits.max_hours
    if not hours or offer.duration_s is None or offer.duration_s >= hours * 3600:
        return []
    has = offer.duration_s / 3600
    return [Miss("max_hours", f"it is to be had for {has:.1f} h, less than the {hours:g} h of max_hours", has)]


def _price_misses(offer: Offer, cluster: Cluster) -> list[Miss]:
    price, highest = price_of(offer, cluster), cluster.selection.max_price_per_hour
    if price is None:
        return [Miss("price", "its price isn't told")]
    found = []
    if cluster.bid is not None and offer.min_bid is not None and cluster.bid < offer.min_bid - 1e-9:
        found.append(Miss("bid", f"it takes bids from {offer.min_bid:.3f}, more than bid {cluster.bid:g}", offer.min_bid))
    if highest is not None and price > highest + 1e-9:
        found.append(Miss("max_price_per_hour", f"it costs {price:.3f} $/h with its disk, more than max_price_per_hour {highest:g}", price))
    return found


# ---- nothing fits ----------------------------------------------------------------------------------------------------------------

# Of a key: what n offers do, and which of their numbers is the nearest to what is asked.
_SUMMARY = {
    "max_price_per_hour": ("cost more than max_price_per_hour", "the cheapest {:.3f}", min),
    "bid": ("take only bids above bid", "the lowest {:.3f}", min),
    "min_reliability": ("are below min_reliability", "the best {:.3f}", max), "min_down_mbps": ("are below min_down_mbps", "the fastest {:.0f}", max),
    "min_up_mbps": ("are below min_up_mbps", "the fastest {:.0f}", max), "disk_gb": ("have less free disk than disk_gb", "the largest {:.0f}", max),
    "gpu.min_vram_gb": ("have less memory on the GPU than gpu.min_vram_gb", "the largest {:.1f}", max),
    "min_cuda": ("have a driver for an older CUDA (min_cuda, else the image's)", "the newest {:g}", max),
    "max_hours": ("can't be had for as long as max_hours", "the longest {:.1f} h", max), "direct ports": ("have too few open ports", "", max),
    "require_verified": ("aren't verified (require_verified)", "", max), "image": ("need an image for CUDA 12.8 or newer", "", max),
    "gpu.name": ("have another GPU than gpu.name", "", max), "gpu.count": ("have another number of GPUs than gpu.count", "", max),
    "cpu": ("aren't amd64", "", max), "gpu maker": ("aren't of nvidia", "", max), "price": ("tell no price", "", max),
    "free": ("are rented out by now", "", max), "avoid": ("have failed before", "", max),
}
_NOT_A_KEY = {"direct ports", "cpu", "gpu maker", "price", "free", "avoid"}


def why_none(choice: Choice) -> str:
    """What to tell when nothing fits, and what to change."""
    if not choice.rejected:
        return f"Vast.ai has no free offer for {choice.asked} right now. Ask for less in the cluster file, or try again later"
    many: dict[str, list[float]] = {}
    alone: dict[str, int] = {}
    count: dict[str, int] = {}
    for _, misses in choice.rejected:
        for miss in misses:
            count[miss.key] = count.get(miss.key, 0) + 1
            if miss.has is not None:
                many.setdefault(miss.key, []).append(miss.has)
        if len(misses) == 1 and misses[0].key not in _NOT_A_KEY:
            alone[misses[0].key] = alone.get(misses[0].key, 0) + 1
    parts = []
    for key in sorted(count, key=lambda key: -count[key]):
        phrase, best, nearest = _SUMMARY[key]
        parts.append(f"{count[key]} {phrase}" + (f" ({best.format(nearest(many[key]))})" if best and key in many else ""))
    total = len(choice.rejected)
    said = f"{total} offer{'s' * (total != 1)} for {choice.asked}, and none that fits: {', '.join(parts)}"
    if not alone:
        return said
    key = max(alone, key=lambda key: alone[key])
    return f"{said}. Relaxing {key} alone would bring {alone[key]}"


def _asked(cluster: Cluster) -> str:
    """What only some of the machines have, so that no offer at all isn't a riddle."""
    gpu = cluster.gpu
    names = gpu_names(gpu.name)
    asked = f"{gpu.count} × {' or '.join(names) or 'any GPU'}"
    if len(names) == 1 and names[0] not in GPU_NAMES:
        near = near_gpus(gpu.name)
        asked += " (a name that gpurun doesn't know" + (f"; did you mean {' or '.join(near)}?" if near else "") + ")"
    asked += f" with {gpu.min_vram_gb:g} GB" * bool(gpu.min_vram_gb) + f", {cluster.disk_gb} GB of disk and {DIRECT_PORTS} open ports"
    return asked + ", verified" * cluster.selection.require_verified + f", for a bid of {cluster.bid or 0:g} $/h" * (cluster.bid is not None)
