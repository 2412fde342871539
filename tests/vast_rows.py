"""Rows and answers of Vast.ai's API as data, for the loopback server: an offer, an instance, its states, refusals, filters.

All values are invented; the shapes are those that the service's documentation and its clients show.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, Iterable

Row = dict[str, Any]
MISSING = object()          # as a value in a patch: the row doesn't have this key
HOURS_A_MONTH = 720
MOST_OFFERS, PAGE = 64, 25

# ---- offers --------------------------------------------------------------------------------------------------------------------

OFFER: Row = {
    "bundle_id": 900101, "host_id": 801, "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_frac": 0.25, "gpu_ram": 24564, "gpu_total_ram": 24564,
    "gpu_arch": "nvidia", "compute_cap": 890, "cuda_max_good": 12.8, "driver_version": "570.133.20", "driver_vers": 570133020,
    "cpu_name": "EPYC 7402", "cpu_arch": "amd64", "cpu_cores": 48, "cpu_cores_effective": 12.0, "cpu_ram": 257000, "has_avx": 1,
    "disk_space": 812.4, "disk_bw": 2310.5, "disk_name": "nvme", "inet_down": 870.2, "inet_up": 612.9, "inet_down_cost": 0.002,
    "inet_up_cost": 0.002, "internet_down_cost_per_tb": 2.0, "internet_up_cost_per_tb": 2.0, "storage_cost": 0.15, "dph_base": 0.35,
    "min_bid": 0.18, "is_bid": False, "dlperf": 98.1, "dlperf_per_dphtotal": 273.8, "total_flops": 82.6, "flops_per_dphtotal": 230.5,
    "score": 512.3, "reliability": 0.9971, "reliability2": 0.9971, "verification": "verified", "geolocation": "Sweden, SE", "static_ip": True,
    "direct_port_count": 120, "public_ipaddr": "127.0.0.1", "hosting_type": 0, "external": False, "rentable": True, "rented": False,
    "start_date": 1795900000.0, "end_date": 1998500000.0, "duration": 2500000.0, "time_remaining": "", "vms_enabled": False,
    "resource_type": "gpu", "pci_gen": 4.0, "pcie_bw": 24.1, "gpu_mem_bw": 1008.0,
    "search": {"gpuCostPerHour": 0.35, "diskHour": 0.0083, "totalHour": 0.3583},
    "instance": {"gpuCostPerHour": 0.0, "diskHour": 0.0083, "totalHour": 0.0083},
}
# What a poorer host says of itself: much is null or not there at all.
SPARSE: Row = {"cpu_cores": None, "geolocation": None, "end_date": None, "static_ip": False, "direct_port_count": 0,
               **{key: MISSING for key in ("reliability", "cpu_name", "has_avx", "disk_name", "total_flops", "flops_per_dphtotal", "pci_gen",
                                           "pcie_bw", "gpu_mem_bw", "public_ipaddr", "vms_enabled", "resource_type", "time_remaining",
                                           "internet_down_cost_per_tb", "internet_up_cost_per_tb", "search", "instance")}}

_numbers = itertools.count(1)


def offer(**changes: Any) -> Row:
    """A full offer with ids of its own. `sparse=True`: as a poor host's, with much that is null or missing."""
    number = next(_numbers)
    row = {"id": 31000100 + number, "machine_id": 4100 + number, **copy.deepcopy(OFFER), **(SPARSE if changes.pop("sparse", False) else {})}
    row = patched(row, {"bundle_id": 900100 + number, "host_id": 800 + number, **changes})
    return {**row, "ask_contract_id": row["id"]}


def patched(row: Row, *patches: Row) -> Row:
    row = dict(row)
    for patch in patches:
        row.update(patch)
    return {key: value for key, value in row.items() if value is not MISSING}


def storage_per_hour(row: Row, disk_gb: float) -> float:
    return (row.get("storage_cost") or 0.0) * disk_gb / HOURS_A_MONTH


def priced(row: Row, disk_gb: float, bid: bool) -> Row:
    """The offer as one search sees it: interruptible prices in a search for them, and the storage that was asked about."""
    base = row["min_bid"] if bid else row["dph_base"]
    storage = storage_per_hour(row, disk_gb)
    return {**row, "is_bid": bid, "dph_base": base, "storage_total_cost": round(storage, 6), "dph_total": round(base + storage, 6)}


# ---- filters -------------------------------------------------------------------------------------------------------------------

def _number(value: Any) -> Any:
    try:
        return float(value)      # a query in the command line's language has its numbers as strings
    except (TypeError, ValueError):
        return value


def _compare(test: Any) -> Any:
    def compared(has: Any, wanted: Any) -> bool:
        try:
            return has is not None and bool(test(_number(has), _number(wanted)))
        except TypeError:
            return False
    return compared


OPERATORS = {
    "eq": lambda has, wanted: _number(has) == _number(wanted), "neq": lambda has, wanted: _number(has) != _number(wanted),
    "gt": _compare(lambda a, b: a > b), "gte": _compare(lambda a, b: a >= b),
    "lt": _compare(lambda a, b: a < b), "lte": _compare(lambda a, b: a <= b),
    "in": lambda has, wanted: has in wanted, "notin": lambda has, wanted: has not in wanted,
}
CONTROL = {"order", "type", "limit", "allocated_storage"}
ALL_OFFER_FIELDS = {*OFFER, "id", "machine_id", "ask_contract_id", "dph_total", "storage_total_cost"}
NEVER_MATCH = {"id", "driver_version"}      # the service finds nothing by these
STORED = {"id", "label", "actual_status", "intended_status", "cur_state", "next_state", "gpu_name", "num_gpus", "machine_id", "host_id",
          "verification", "image_uuid", "start_date"}


class BadFilter(Exception):
    """The text is the field's name."""


def matches(row: Row, filters: Row, known: Iterable[str]) -> bool:
    for field, tests in filters.items():
        if field not in known or not isinstance(tests, dict) or not set(tests) <= set(OPERATORS):
            raise BadFilter(field)
        if not all(OPERATORS[name](row.get(field), wanted) for name, wanted in tests.items()):
            return False
    return True


def search(offers: list[Row], query: Row, ignored: Iterable[str] = ()) -> list[Row]:
    """What a search finds. `ignored`: filters that the server doesn't apply, as happens."""
    bid = query.get("type") in ("bid", "interruptible")
    filters = {field: tests for field, tests in query.items() if field not in CONTROL}
    found = []
    for row in offers:
        row = priced(row, float(query.get("allocated_storage") or 5.0), bid)
        seen = {**row, "verified": row.get("verification") == "verified", **dict.fromkeys(NEVER_MATCH)}
        if matches(seen, {field: tests for field, tests in filters.items() if field not in ignored}, ALL_OFFER_FIELDS | {"verified"}):
            found.append(row)
    for field, direction in reversed(query.get("order") or [["score", "desc"]]):
        found.sort(key=lambda row: (row.get(field) is None, row.get(field) or 0), reverse=direction == "desc")
    return found[:min(int(query.get("limit") or MOST_OFFERS), MOST_OFFERS)]


# ---- instances -----------------------------------------------------------------------------------------------------------------

# A healthy running one. What belongs to its offer, its creation and its addresses is put over this.
INSTANCE: Row = {
    "actual_status": "running", "intended_status": "running", "cur_state": "running", "next_state": "running", "image_args": [],
    "template_id": None, "template_hash_id": None, "template_name": None, "local_ipaddrs": "192.168.1.20 172.17.0.1 \n",
    "ssh_idx": "5", "machine_dir_ssh_port": 22001, "direct_port_start": 41200, "direct_port_end": 41319, "end_date": 1998500000.0,
    "uptime_mins": 3.2, "gpu_totalram": 24564, "gpu_util": 0.0, "gpu_temp": 34.0, "cpu_util": 0.4, "mem_limit": 62.5, "mem_usage": 0.3,
    "disk_usage": 0.8, "disk_util": 0.02, "inet_down_billed": None, "inet_up_billed": None, "country_code": "SE",
    "jupyter_token": "00aa11bb22cc33dd", "credit_balance": None, "volume_info": [],
}
OF_OFFER = ("machine_id", "host_id", "bundle_id", "gpu_name", "num_gpus", "gpu_frac", "gpu_ram", "gpu_arch", "compute_cap", "cuda_max_good",
            "driver_version", "cpu_name", "cpu_arch", "cpu_cores", "cpu_cores_effective", "cpu_ram", "disk_bw", "inet_down", "inet_up",
            "inet_down_cost", "inet_up_cost", "min_bid", "storage_cost", "geolocation", "verification", "reliability2", "static_ip",
            "hosting_type", "external", "rentable", "direct_port_count", "duration")

_NOT_UP: Row = {"ports": None, "uptime_mins": None}
_STOPPED: Row = {"actual_status": "stopped", "cur_state": "stopped", "next_state": "stopped", **_NOT_UP}
# Each is put over the running row whole: a state doesn't inherit from the one before it.
STATES: dict[str, Row] = {
    "st_running": {},
    "st_new": {"actual_status": None, "status_msg": None, "public_ipaddr": None, "direct_port_start": -1, "direct_port_end": -1, "gpu_util": None,
               "gpu_temp": None, "mem_usage": None, "disk_usage": -1.0, "disk_util": -1.0, **_NOT_UP},
    "st_created": {"actual_status": "created", "status_msg": None, **_NOT_UP},
    "st_loading": {"actual_status": "loading", "status_msg": "8f3a1c22be01: Pull complete\n", "disk_usage": -1.0, "disk_util": -1.0, **_NOT_UP},
    "st_running_no_ports": {"ports": {}, "uptime_mins": 0.1},
    "st_oci_failed": {"actual_status": "created", "status_msg": "Error response from daemon: failed to create task for container: OCI runtime create "
                      "failed: runc create failed: unable to start container process: error during container init\n", **_NOT_UP},
    "st_cdi_failed": {"actual_status": "created", "status_msg": "Error response from daemon: CDI device injection failed: unresolvable CDI devices "
                      "D.28123456/gpu=0\n", **_NOT_UP},
    "st_pull_eof": {"actual_status": "loading", "status_msg": "failed to copy: httpReadSeeker: unexpected EOF while reading layer\n", **_NOT_UP},
    "st_pull_limit": {"actual_status": "loading", "status_msg": "toomanyrequests: unauthorized: You have reached your pull rate limit\n", **_NOT_UP},
    "st_image_missing": {"actual_status": "loading", **_NOT_UP,
                         "status_msg": "Error response from daemon: manifest unknown for example/none:latest\n"},
    "st_no_space": {"actual_status": "loading", "status_msg": "failed to register layer: no space left on device\n", **_NOT_UP},
    "st_outbid": {**_STOPPED, "intended_status": "running"},
    "st_all_stopped": {**_STOPPED, "intended_status": "stopped"},
    "st_scheduling": {"actual_status": "scheduling", "cur_state": "stopped", "next_state": "running", **_NOT_UP},
    "st_exited": {"actual_status": "exited", "status_msg": "container exited\n", **_NOT_UP},
    "st_rebooting": {"actual_status": "rebooting", "uptime_mins": None},
    "st_frozen": {"actual_status": "frozen"},
    "st_offline": {"actual_status": "offline", "status_msg": "host offline\n"},
    "st_unknown": {"actual_status": "unknown"},
    "st_destroying": {**_STOPPED, "intended_status": "stopped", "cur_state": "unloaded", "next_state": "unloaded"},
}
# Damage that Script(row=…) does to each row of an instance; the SDK's own listings end in an exception on it.
NO_START_DATE: Row = {"start_date": None}
NO_ENV: Row = {"extra_env": None}
ENV_MISSING: Row = {"extra_env": MISSING}

GPU_BILLS = {"running", "frozen", "unknown"}     # the last is unconfirmed; taken at its dearest
NOTHING_BILLS = {"offline"}
# What a state means for the machine itself. Not listed: it is down.
MACHINE_IS = {"running": "up", "unknown": "as it was", "frozen": "as it was", "rebooting": "as it was", "offline": "unreachable"}

# ---- answers -------------------------------------------------------------------------------------------------------------------

# An instance is created by `PUT /api/v0/asks/{offer}/`; trailing slashes are as the service has them.
ENDPOINTS = (
    ("search", "POST", r"/api/v0/bundles/"), ("search_new", "PUT", r"/api/v0/search/asks/"), ("create", "PUT", r"/api/v0/asks/(\d+)/"),
    ("show", "GET", r"/api/v0/instances/(\d+)/"), ("list", "GET", r"/api/v1/instances/"), ("destroy", "DELETE", r"/api/v0/instances/(\d+)/"),
    ("destroy_many", "DELETE", r"/api/v0/instances/"), ("state", "PUT", r"/api/v0/instances/(\d+)/"),
    ("reboot", "PUT", r"/api/v0/instances/reboot/(\d+)/"), ("recycle", "PUT", r"/api/v0/instances/recycle/(\d+)/"),
    ("bid", "PUT", r"/api/v0/instances/bid_price/(\d+)/"), ("logs", "PUT", r"/api/v0/instances/request_logs/(\d+)/?"),
    ("execute", "PUT", r"/api/v0/instances/command/(\d+)/"), ("copy", "PUT", r"/api/v0/commands/copy_direct/"),
    ("user", "GET", r"/api/v0/users/current/?"), ("ssh_list", "GET", r"/api/v0/ssh/"), ("ssh_create", "POST", r"/api/v0/ssh/"),
    ("ssh_delete", "DELETE", r"/api/v0/ssh/(\d+)/"), ("ssh_attach", "POST", r"/api/v0/instances/(\d+)/ssh/"),
    ("ssh_of_instance", "GET", r"/api/v0/instances/(\d+)/ssh/"), ("ssh_detach", "DELETE", r"/api/v0/instances/(\d+)/ssh/(\d+)/"),
    ("contracts", "POST", r"/api/v0/contracts/fetch/"), ("secrets", "GET", r"/api/v0/secrets/"),
    ("pending", "GET", r"/api/v0/instances/pending-price-increases/"), ("object", "GET", r"/s3/instance_logs/(\d+)\.log"),
)
OPEN = {"search", "search_new", "object"}      # answered without a key
# Seconds that must lie between two calls; what isn't here has no known limit. `label` is `state` with a label in it.
THRESHOLDS = {"create": 4.5, "show": 2.0, "list": 1.0, "destroy": 3.0, "label": 1.0, "state": 1.0, "reboot": 1.0, "recycle": 1.0, "ssh_create": 1.0,
              "ssh_detach": 2.0, "execute": 1.5, "copy": 3.5, "bid": 5.5, "search": 6.0, "search_new": 6.0}
HTML = "<html><head><title>{0}</title></head><body><center><h1>{0}</h1></center><hr><center>nginx</center></body></html>\n"


def _no(error: str, msg: str, **more: Any) -> Row:
    return {"success": False, "error": error, "msg": msg, **more}


# Answers that a fault may give in place of the true one: (status, body). A str is HTML or plain text.
REFUSALS: dict[str, tuple[int, Any]] = {
    "400": (400, _no("invalid_args", "error 400/3467: Invalid args")),
    "401": (401, _no("auth_error", "Invalid user key")),
    "401_2fa": (401, _no("auth_error", "This action needs Two Factor Authentication for this account.")),
    "402_no_credit": (402, _no("insufficient_credit", "Insufficient credits: add funds before renting.")),
    "403": (403, _no("not_authorized", "key lacks permission user_read")),
    "403_args": (403, _no("invalid_args", "error 403/3586: not allowed")),
    "404_auth": (404, _no("auth_error", "Invalid user key")),
    "404_instance": (404, _no("no_such_instance", "Instance not found.")),
    "404_not_found": (404, _no("not_found", "Instance not found")),
    "429_text": (429, "API requests too frequent: endpoint threshold=2.0"),
    "429_detail": (429, {"detail": "API requests too frequent endpoint threshold=2.0"}),
    "429_full": (429, _no("rate_limit_exceeded", "API requests too frequent endpoint threshold=3.0")),
    "429_quota": (429, _no("search_quota_exceeded", "daily search quota used up")),
    "500": (500, HTML.format("500 Internal Server Error")), "502": (502, HTML.format("502 Bad Gateway")),
    "503": (503, HTML.format("503 Service Unavailable")), "504": (504, HTML.format("504 Gateway Time-out")),
    "500_json": (500, _no("server_error", "image reference must carry a tag")),
    "gone_400": (400, _no("no_such_ask", "no_such_ask 31000101", ask_id=31000101)),
    "gone_404": (404, _no("invalid_args", "error 404/3603: no_such_ask Instance type by id 31000101 is not available.", ask_id=31000101)),
    "gone_410": (410, _no("no_such_ask", "error 410/3907: no_such_ask Instance type 31000101 is no longer available.", ask_id=31000101)),
    "no_credit": (400, _no("insufficient_credit", "Insufficient credits: add funds before renting.")),
    "spend_limit": (400, _no("spend_rate_limit", "account spending rate too high for its age")),
    "too_long": (400, _no("invalid_args", "error 400/3471: Invalid args: len(args) > 4096")),
    "no_ssh_key": (400, _no("no_ssh_key", "no such key")),
    "team_keys": (400, "team SSH keys are not supported"),
    "bad_id": (400, _no("invalid_args", "bad id")),
    "no_logs": (404, {"error": "invalid_id", "msg": "Invalid instance id."}),
    "410": (410, _no("no_such_ask", "error 410/3907: no_such_ask Instance type 31000101 is no longer available.", ask_id=31000101)),
    "success_false": (200, _no("server_error", "try again")),
    "queued": (200, _no("resources_unavailable", "Required resources are currently unavailable, state change queued.")),
    "html200": (200, HTML.format("Welcome to nginx!")),
    "empty200": (200, ""),
}
