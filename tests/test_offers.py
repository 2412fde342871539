"""Offers: how a GPU and an image are called, what is searched for, what fits, and what to tell when nothing does."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vast_rows
from gpurun import offers
from gpurun.config import Cluster, Gpu, Limits, Selection
from gpurun.offers import Choice, Offer, choose, find, gpu_names, image_cuda, parse, price_of, query, why_none, why_not

IMAGE = "vastai/base-image:cuda-12.8.1-cudnn-devel-ubuntu22.04-py310"
PLAIN = Cluster("/c.toml", "vastai", image=IMAGE)


def cluster(gpu=None, selection=None, limits=None, **fields):
    return PLAIN._replace(gpu=Gpu(**(gpu or {})), selection=Selection(**(selection or {})), limits=Limits(**(limits or {})), **fields)


def an(**changes):
    """A good offer of the service, as its row is."""
    row = vast_rows.priced(vast_rows.offer(), 64, False)
    return parse(vast_rows.patched(row, changes))


# ---- names -----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("asked, names", [
    ("RTX 4090", ("RTX 4090",)), ("rtx_4090", ("RTX 4090",)), ("RTX4090", ("RTX 4090",)), ("NVIDIA GeForce RTX 4090", ("RTX 4090",)), ("4090", ("RTX 4090",)),
    (" a100-sxm4 ", ("A100 SXM4",)), ("RTX 6000 Ada", ("RTX 6000Ada",)), ("A6000", ("RTX A6000",)), ("t4", ("Tesla T4",)), ("H200", ("H200",)),
    ("H100", ("H100", "H100 NVL", "H100 PCIE", "H100 SXM")), ("A100", ("A100", "A100 PCIE", "A100 SXM4")), ("RTX 9999", ("RTX 9999",)), ("", ()), ("_", ())])
def test_a_gpu_is_found_by_what_people_call_it(asked, names):
    assert gpu_names(asked) == names


@pytest.mark.parametrize("image, cuda", [
    (IMAGE, 12.8), ("pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime", 12.4), ("nvidia/cuda:12.8.1-base-ubuntu24.04", 12.8), ("a/b:torch2-cu124", 12.4),
    ("nvidia/cuda:11.0-x", 11.0), ("a/b:cuda13", 13.0), ("ubuntu:22.04", None), ("a/focus124:1", None), ("nvidia/cuda:latest", None), ("", None),
    ("ubuntu@sha256:" + "0f" * 32, None)])
def test_the_cuda_of_an_image_is_read_from_its_name(image, cuda):
    assert image_cuda(image) == cuda


# ---- the search ------------------------------------------------------------------------------------------------------------------------

def test_the_search_has_every_filter_with_numbers_and_names_as_the_service_wants_them():
    asked = cluster({"name": "rtx_4090", "count": 2, "min_vram_gb": 24}, {"max_price_per_hour": 0.4, "min_up_mbps": 5.0}, {"max_hours": 8}, disk_gb=100)
    broad = {"external": {"eq": False}, "rentable": {"eq": True}, "rented": {"eq": False}, "verified": {"eq": True}, "num_gpus": {"eq": 2},
             "disk_space": {"gte": 100}, "direct_port_count": {"gte": 2}, "gpu_name": {"eq": "RTX 4090"}, "gpu_ram": {"gte": 22800}}
    assert query(asked, narrow=False) == broad
    assert query(asked) == {**broad, "reliability": {"gte": 0.97}, "inet_down": {"gte": 100.0}, "inet_up": {"gte": 5.0}, "cuda_max_good": {"gte": 12.8},
                            "duration": {"gte": 28800}, "dph_total": {"lte": 0.4}}


def test_a_search_leaves_out_what_was_not_asked_for():
    asked = query(cluster({"name": "H100"}, {"require_verified": False, "min_reliability": 0.0, "min_down_mbps": 0.0, "max_price_per_hour": 9.0},
                          bid=0.2, image="ubuntu:22.04"))
    assert asked["gpu_name"] == {"in": ["H100", "H100 NVL", "H100 PCIE", "H100 SXM"]} and asked["min_bid"] == {"lte": 0.2}
    assert set(asked) == {"external", "rentable", "rented", "num_gpus", "disk_space", "direct_port_count", "gpu_name", "min_bid"}


def test_the_server_takes_the_search_and_what_it_finds_fits():
    rows = [vast_rows.offer(), vast_rows.offer(gpu_name="RTX 3090"), vast_rows.offer(reliability=0.5, reliability2=0.5)]
    asked = cluster({"name": "rtx 4090", "min_vram_gb": 24}, {"max_price_per_hour": 0.5, "min_up_mbps": 1.0}, {"max_hours": 8})
    found = [parse(row) for row in vast_rows.search(rows, {**query(asked), "order": [["dph_total", "asc"]], "allocated_storage": 64})]
    assert [one.id for one in found] == [rows[0]["id"]] and why_not(found[0], asked) == []


def test_a_second_search_is_made_only_to_tell_why_nothing_fits():
    seen = []

    def search(filters):
        seen.append(filters)
        return [] if "reliability" in filters else [vast_rows.priced(vast_rows.offer(reliability2=0.9), 64, False)]

    choice = find(search, PLAIN)
    assert len(seen) == 2 and not choice.fitting and "min_reliability" in why_none(choice)
    assert find(lambda filters: [vast_rows.priced(vast_rows.offer(), 64, False)], PLAIN).fitting


# ---- what fits -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, asked, word", [
    ({}, {}, None), ({"verification": "deverified"}, {}, "verified"), ({"verification": "unverified"}, {"selection": {"require_verified": False}}, None),
    ({"verification": None}, {}, None), ({"reliability2": 0.96}, {}, "min_reliability"), ({"reliability2": None}, {}, None),
    ({"reliability2": None, "reliability": None}, {}, "unknown"), ({"reliability2": None, "reliability": None}, {"selection": {"min_reliability": 0.0}}, None),
    ({"inet_down": 99.0}, {}, "min_down_mbps"), ({"inet_down": None}, {}, "min_down_mbps"), ({"inet_up": 1.0}, {"selection": {"min_up_mbps": 2.0}}, "min_up_mbps"),
    ({"disk_space": 63.0}, {}, "disk_gb"), ({"num_gpus": 2}, {}, "2 GPUs, not 1"), ({"num_gpus": None}, {}, "unknown number"),
    ({"gpu_name": "RTX 3090"}, {"gpu": {"name": "rtx_4090"}}, "RTX 3090"), ({"gpu_name": "RTX 4090D"}, {"gpu": {"name": "RTX 4090"}}, "4090D"),
    ({"gpu_name": "H100 PCIE"}, {"gpu": {"name": "H100"}}, None), ({"gpu_ram": 23028}, {"gpu": {"min_vram_gb": 24}}, None),
    ({"gpu_ram": 22528}, {"gpu": {"min_vram_gb": 24}}, "22.5 GB"), ({"gpu_ram": 81559}, {"gpu": {"min_vram_gb": 80}}, None),
    ({"gpu_ram": None}, {"gpu": {"min_vram_gb": 8}}, "min_vram_gb"), ({"cuda_max_good": 12.4}, {}, "the image is for 12.8"),
    ({"cuda_max_good": 12.4}, {"selection": {"min_cuda": 12.0}}, None), ({"cuda_max_good": 12.4}, {"selection": {"min_cuda": 12.6}}, "min_cuda asks for 12.6"),
    ({"cuda_max_good": None}, {}, None), ({"cuda_max_good": None}, {"selection": {"min_cuda": 12.0}}, "unknown"),
    ({"cuda_max_good": 12.4}, {"image": "ubuntu:22.04"}, None), ({"compute_cap": 1200, "gpu_name": "RTX 5090"}, {}, None),
    ({"compute_cap": 1200, "gpu_name": "RTX 5090"}, {"image": "a/b:cu124"}, "RTX 5090 needs an image"),
    ({"compute_cap": 1200}, {"image": "ubuntu:22.04"}, None), ({"cpu_arch": "arm64"}, {}, "arm64"), ({"gpu_arch": "amd"}, {}, "nvidia"),
    ({"cpu_arch": None, "gpu_arch": None}, {}, None), ({"direct_port_count": 1}, {}, "ports"), ({"direct_port_count": None}, {}, None),
    ({"duration": 3600 * 7}, {"limits": {"max_hours": 8}}, "7.0 h"), ({"duration": None}, {"limits": {"max_hours": 8}}, None), ({"duration": 60}, {}, None),
    ({"rented": True}, {}, "rented"), ({"rentable": False}, {}, "rented"), ({"dph_total": None}, {}, "price"),
    ({"dph_total": 0.41}, {"selection": {"max_price_per_hour": 0.4}}, "0.410"), ({"dph_total": 0.4}, {"selection": {"max_price_per_hour": 0.4}}, None),
    ({"min_bid": 0.3}, {"bid": 0.2}, "bids from 0.300"), ({"min_bid": 0.2}, {"bid": 0.2}, None), ({"min_bid": None, "dph_total": None}, {"bid": 0.2}, None),
    ({"storage_total_cost": 0.05}, {"bid": 0.2, "selection": {"max_price_per_hour": 0.22}}, "0.250"),
])
def test_every_requirement_is_looked_at_again(changes, asked, word):
    found = why_not(an(**changes), cluster(**asked))
    assert found == [] if word is None else len(found) == 1 and word in found[0]


def test_how_long_it_is_needed_counts_for_more_than_the_limit():
    asked = cluster(limits={"max_hours": 8})
    assert why_not(an(duration=3600 * 2), asked, need_s=3600) == [] and why_not(an(duration=3600), PLAIN, need_s=7200)


def test_the_price_of_a_bid_has_the_disk_in_it():
    assert price_of(an(dph_total=0.4), PLAIN) == 0.4
    assert price_of(an(storage_total_cost=0.05), cluster(bid=0.2)) == pytest.approx(0.25) and price_of(an(storage_total_cost=None), cluster(bid=0.2)) == 0.2
    assert price_of(an(dph_total="soon"), PLAIN) is None


def test_the_cheapest_comes_first_and_a_machine_that_failed_not_at_all():
    some = [an(dph_total=0.5, machine_id=1), an(dph_total=0.3, machine_id=2, reliability2=0.98), an(dph_total=0.3, machine_id=3, reliability2=0.99), None]
    choice = choose(some + some, PLAIN, {"1"})
    assert [offer.machine_id for offer in choice.fitting] == ["3", "2"]
    assert [(offer.machine_id, [miss.text for miss in misses]) for offer, misses in choice.rejected] == [("1", ["this machine has failed before"])]


# ---- whatever an answer has --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("row", [None, [], "x", {}, {"id": None}, {"id": "x"}, {"id": -1}, {"id": 0}, {"id": True}])
def test_what_cannot_be_rented_is_no_offer(row):
    assert parse(row) is None


@pytest.mark.parametrize("row", [{"id": 5}, {"ask_contract_id": "5"}, {"id": 5.0, **{key: None for key in vast_rows.OFFER}},
                                 {**dict.fromkeys(vast_rows.OFFER, {}), "id": 5}, {**dict.fromkeys(vast_rows.OFFER, "\n"), "id": 5}])
def test_an_offer_may_lack_everything_but_its_id(row):
    assert parse(row)[:2] == (5, "") and why_not(parse(row), PLAIN)


def test_a_sparse_offer_is_read():
    assert parse(vast_rows.offer(sparse=True)).place == ""


CASES = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


@CASES
@given(st.dictionaries(st.sampled_from([*vast_rows.OFFER, "machine_id", "dph_total"]), ANYTHING, max_size=12), st.booleans())
def test_no_value_of_an_offer_ends_in_an_exception(changes, bidding):
    asked = cluster({"name": "H100", "min_vram_gb": 8}, {"max_price_per_hour": 1.0}, {"max_hours": 1}, bid=0.5 if bidding else None)
    choice = choose([an(**changes)], asked, {"1"})
    assert len(choice.fitting) + len(choice.rejected) == 1
    assert all(price_of(offer, asked) is not None for offer in choice.fitting) and (choice.fitting or why_none(choice))


@CASES
@given(ANYTHING)
def test_a_number_is_finite_or_none(value):
    assert offers.number(value) is None or math.isfinite(offers.number(value))
    assert offers.whole(value) is None or offers.whole(value) >= 0


def test_a_long_id_keeps_its_digits():
    assert offers.id_text(2 ** 60 + 1) == str(2 ** 60 + 1) == offers.id_text(str(2 ** 60 + 1)) and offers.id_text(None) == ""


# ---- nothing fits --------------------------------------------------------------------------------------------------------------------------

def test_when_nothing_fits_a_user_reads_what_excluded_how_many_and_what_to_change():
    asked = cluster({"name": "RTX 4090"}, {"max_price_per_hour": 0.4})
    some = [an(dph_total=0.52), an(dph_total=0.6), an(dph_total=0.7, reliability2=0.9), an(reliability2=0.95, dph_total=0.3)]
    text = why_none(choose(some, asked))
    assert text == ("4 offers for 1 × RTX 4090, 64 GB of disk and 2 open ports, verified, and none that fits: 3 cost more than max_price_per_hour "
                    "(the cheapest 0.520), 2 are below min_reliability (the best 0.950). Relaxing max_price_per_hour alone would bring 2")


def test_when_no_offer_came_back_at_all_a_user_reads_what_was_asked_for():
    text = why_none(choose([], cluster({"name": "RTX 4O90", "count": 4, "min_vram_gb": 24}, bid=0.2)))
    assert text.startswith("Vast.ai has no free offer for 4 × RTX 4O90 (a name that gpurun doesn't know; did you mean RTX 4090")
    assert "24 GB" in text and "verified" in text and "a bid of 0.2" in text
    assert "any GPU" in why_none(choose([], PLAIN)) and "doesn't know" not in why_none(choose([], cluster({"name": "H100"})))


def test_each_thing_that_may_be_missing_has_its_words():
    rows = [{"id": 1}, {"id": 2, "rented": True, "gpu_ram": 1, "verification": "x", "cpu_arch": "arm64", "gpu_arch": "amd", "compute_cap": 1200, "duration": 1,
                        "cuda_max_good": 1, "direct_port_count": 0, "dph_total": 99, "min_bid": 99, "machine_id": 7, "inet_up": 0}]
    for bid in (None, 0.1):
        asked = cluster({"name": "H100", "min_vram_gb": 8}, {"max_price_per_hour": 0.05, "min_up_mbps": 1.0}, {"max_hours": 1}, bid=bid, image="a/b:cu121")
        choice = choose([parse(row) for row in rows], asked, {"7"})
        text = why_none(choice)
        assert all(offers._SUMMARY[miss.key][0] in text for _, misses in choice.rejected for miss in misses) and "Relaxing" not in text
    assert why_none(Choice([], [(Offer(1), [offers.Miss("avoid", "x")])])).endswith("1 have failed before")
