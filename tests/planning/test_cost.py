"""The cost model: its formulas give the figures, and the figures agree with what was measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import pytest
import sympy

from infcl_gen.kernels.choice import Choice
from infcl_gen.losses import BUILTIN_LOSSES, derive
from infcl_gen.planning.memory import LEGEND, MIB, SYMBOLS, allocated_bytes, buffer_terms, places_of
from infcl_gen.planning.model import BATCH_S, ENGINES_BATCH_S, SLOWDOWN
from infcl_gen.planning.work import time_terms
from infcl_gen.runtime.table import ALL, KEPT, RECEIVED
from tests.emission.golden import markdown
from tests.planning.conftest import allowed_error, budget_of, plan_flags
from tests.tiers import LONG

STRATEGIES = ("fused", "panel", "stash", "torch")


@functools.cache
def choices() -> list[Choice]:
    traits = {name: derive(spec).traits for name, spec in BUILTIN_LOSSES.items()}
    found = [
        Choice(
            strategy=strategy, dim=8, traits=traits[loss], dtype=dtype, world_size=2 if ring else 1,
            product_by="library" if library else "triton", precision="exact" if dtype == "fp32" else "default",
        )
        for strategy in ("panel", "fused", "torch")
        for dtype in ("bf16", "fp32")
        for loss, ring, library in itertools.product(traits, [True, False], [True, False])
        if strategy != "fused" or loss != "siglip"
    ]  # fmt: skip
    found += [Choice(strategy="stash", dim=8), Choice(strategy="panel", dim=8, dtype="fp32", replay=True)]
    found += [dataclasses.replace(choice, transport="gather") for choice in found if choice.world_size > 1]
    found += [
        dataclasses.replace(choice, keeps=True) for choice in found if choice.world_size > 1 and not choice.gather
    ]
    assert {choice.strategy for choice in found} == set(STRATEGIES)
    # Products of the library change terms of two sides and of pairs alike for all losses.
    ci = [traits[name] for name in ("clip", "siglip", "ntxent")]
    return [choice for choice in found if LONG or choice.product_by == "triton" or choice.traits in ci]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_terms_are_closed_expressions(strategy: str) -> None:
    known = set(SYMBOLS.values())
    for choice in {choice for choice in choices() if choice.strategy == strategy}:
        for term in buffer_terms(choice):
            assert sympy.sympify(term.bytes).free_symbols <= known, choice
        for time in time_terms(choice):
            for value in time.quantities:
                assert sympy.sympify(value).free_symbols <= known, choice


def test_what_memory_and_work_know_of_communication_is_what_its_table_does() -> None:
    """Where statistics of others' keys stay for backward, and whether the gradients of all keys go home at once."""
    ways = ({"transport": "ring", "keeps": "off"}, {"transport": "ring", "keeps": "on"}, {"transport": "gather"})
    for way, (nodes, devices), loss in itertools.product(ways, ((1, 2), (1, 5), (2, 3)), ("clip", "infonce")):
        if nodes > 1 and way["transport"] == "gather":
            continue
        plan = plan_flags(devices=nodes * devices, nodes=nodes, loss=loss, set={"strategy": "panel"} | way)
        table, has_keys = plan.schedule, loss == "clip"
        forward, backward = places_of(table, "forward"), places_of(table, "backward")
        stay = {place for item in table.named("summed", "forward") for place in forward[item.name]} & {KEPT, ALL}
        assert stay == {place for place, kept in ((ALL, plan.gather), (KEPT, plan.keeps)) if kept and has_keys}
        assert any(RECEIVED in places for places in backward.values()) == plan.gather
        kept = {buffer.name: buffer.shape[-1] for buffer in plan.buffers}.get("key_statistics", 0)
        assert kept == plan.keys_per_rank * has_keys * (table.world_size if ALL in stay else 1 + (KEPT in stay))
        assert ("additions" in {phase.name for phase in plan.phases}) == plan.gather


@pytest.mark.parametrize("devices", [2, 5])
def test_a_ring_adds_what_comes_home_to_what_has_stayed(devices: int) -> None:
    """One pass over the own sums, read twice and written, whatever the number of ranks. Planted: one for each."""
    flags = {"loss": "siglip", "batch_size": 1024 * devices, "devices": devices, "set": {"transport": "ring"}}
    phases = {phase.name: phase for phase in plan_flags(**flags).phases}
    assert phases["additions"].bytes == 3 * 1024 * 768 * 4
    assert "additions" not in {phase.name for phase in plan_flags(**flags, frozen="key").phases}


def test_a_buffer_is_its_shape() -> None:
    sizes = {"bf16": 2, "fp32": 4, "fp64": 8, "int32": 4, "int64": 8, "uint8": 1}
    for flags in (
        {},
        {"devices": 4},
        {"dim": 128},
        {"target": "cpu", "device_profile": "cpu"},
        {"loss": "infonce"},
        {"loss": "siglip"},
        {"dtype": "fp32"},
    ):
        for buffer in plan_flags(**flags).buffers:
            elements = 1
            for length in buffer.shape:
                elements *= length
            assert buffer.bytes == elements * sizes[buffer.dtype], buffer


def test_the_peak_is_the_sum_of_the_buffers() -> None:
    for flags in ({}, {"devices": 4}, {"dim": 64}, {"batch_size": "1M"}, {"dtype": "fp32"}, {"loss": "siglip"}):
        plan = plan_flags(**flags)
        totals = dict.fromkeys(("both", "forward", "backward", "finish", "after"), 0)
        for buffer in plan.buffers:
            totals[buffer.phase] += buffer.bytes
        plain = totals.pop("both") + max(totals.values())
        assert plain <= plan.predicted_peak_bytes <= plain + 2 * len(plan.buffers) * MIB


def test_memory_by_hand() -> None:
    """clip, bf16, D = 768, M = N = 65 536 in panels of 16 384 x 16 384 (blocks of 128 x 128)."""
    plan = plan_flags(batch_size=65536, memory_budget="1GiB")
    assert (plan.panel_rows, plan.panel_keys) == (16384, 16384)
    by_name = {buffer.name: buffer.bytes for buffer in plan.buffers}
    assert by_name["gradient_panel"] == 2 * 16384**2
    assert by_name["accumulators"] == 4 * (65536 + 16384) * 768
    assert by_name["dq"] == by_name["dk"] == 2 * 65536 * 768
    assert by_name["query_statistics"] == 5 * 4 * 65536
    assert plan.predicted_peak_bytes <= 2**30


LATENCY_S = 3.4e-6  # launch_us of the H200
LOST = SLOWDOWN / (1 + SLOWDOWN)  # of the work beside a transfer
BENCH = Path(__file__).resolve().parents[2] / "tune" / "bench"


def test_predictions_are_near_the_measurements() -> None:
    """Behind other work. From an idle device the host counts, which differs by more from run to run."""
    count = 0
    for name in ("h200-grid.json", "h200-large.json"):
        for row in json.loads((BENCH / name).read_text())["rows"]:
            if row["impl"] != "infcl":
                continue
            assert row["peak_bytes"] <= row["predicted_peak_bytes"] <= row["budget_bytes"]
            flags = {"batch_size": row["batch"], "dim": row["dim"], "memory_budget": budget_of(row)}
            plan = plan_flags(**flags, set={"strategy": row["strategy"]})
            queued_ms = row.get("queued_ms") or row["median_ms"]  # from an idle device where it takes seconds
            error = plan.predicted_queued_s * 1e3 / queued_ms - 1
            assert abs(error) <= allowed_error(queued_ms), (row["batch"], row["dim"], error)
            count += 1
    assert count > 65


def test_predictions_of_other_losses_are_near_the_measurements() -> None:
    """Over triangles, rows alone, pairs, prefixes, a guide, two sums of a row, and where one side is frozen."""
    files = [json.loads((BENCH / f"h200-{name}.json").read_text()) for name in ("losses", "prefixes")]
    rows = [row for found in files for row in found["rows"] if row["predicted_queued_ms"]]
    assert len({row["loss"] for row in rows}) > 12
    for row in rows:
        given = {name: row[name] for name in ("loss", "dim", "prefixes", "frozen") if row.get(name)}
        if "prefixes" in given:  # "cosines of 96,192" where they are renormalised
            _, renormalised, given["prefixes"] = given["prefixes"].rpartition("cosines of ")
            given["renormalise"] = bool(renormalised)
        plan = plan_flags(
            batch_size=row["batch"], memory_budget=budget_of(row), set={"strategy": row["strategy"]}, **given
        )
        error = plan.predicted_queued_s * 1e3 / row["queued_ms"] - 1
        assert abs(error) <= 0.15, (row["loss"], row["batch"], given, error)


@pytest.mark.parametrize(
    ("descriptors", "renormalise", "forward_ms", "gradient_ms"),
    [("off", False, 18.7, 27.8), ("on", False, 14.3, 25.1), ("off", True, 56.7, 86.7), ("on", True, 15.7, 33.8)],
)
def test_prefixes_cost_their_sums_and_narrow_products(
    descriptors: str, renormalise: bool, forward_ms: float, gradient_ms: float
) -> None:
    """Kernels of clip at 65 536 x 768 over four prefixes, on an H200: g of each goes to memory, and products of narrow
    slabs read it there. With descriptors kernels for Hopper run. Renormalised, those of cosines."""
    how = {"memory_budget": "1GiB", "renormalise": renormalise, "set": {"descriptors": descriptors}}
    plan = plan_flags(batch_size=65536, prefixes="96,192,384,768", **how)
    found = dict.fromkeys(("forward product", "gradient", "dq product", "dk product"), 0.0)
    for phase in plan.phases:
        name = phase.name.partition(" of ")[0]
        if name in found:
            found[name] += phase.time_s * 1e3
    products = found.pop("dq product") + found.pop("dk product")
    forward, gradient = (pytest.approx(ms, rel=0.05) for ms in (forward_ms, gradient_ms))
    assert found == {"forward product": forward, "gradient": gradient}
    assert 22 <= products <= 26
    assert plan.products == pytest.approx(4, rel=0.01)


def test_communication_by_hand() -> None:
    """clip, bf16, D = 768, 65 536 keys over 4 ranks: of what travels only forward's way home is waited for; what is
    hidden slows the work down. Each batch of messages takes its time to start."""
    link, network = 345e9, 50e9  # link_gbs and node_link_gbs of the H200
    for nodes, rates, engines in (
        (1, [link] * 4, "off"),
        (1, [link] * 4, "on"),
        (2, [link, network] * 2, "off"),
        (4, [network] * 4, "off"),
    ):  # rates of each move
        way = {"transport": "ring", "keeps": "on", "copy_engines": engines}
        plan = plan_flags(batch_size=65536, devices=4, nodes=nodes, set=way)
        start_s, lost = (ENGINES_BATCH_S, 0.0) if engines == "on" else (BATCH_S, LOST)
        phases = {phase.name: phase for phase in plan.phases}
        keys, statistics, dk = 16384 * 768 * 2, 16384 * 2 * 4, 16384 * 768 * 4

        def seconds(*parts: tuple[int, float], start_s: float = start_s) -> float:
            return start_s + sum(size / rate + LATENCY_S for size, rate in parts)

        # Sums follow by the move of the step before; at the last step none of the keys travel.
        forward = seconds((statistics, rates[3])) + lost * (
            seconds((keys, rates[0]))
            + seconds((statistics, rates[0]), (keys, rates[1]))
            + seconds((statistics, rates[1]), (keys, rates[2]))
            + seconds((statistics, rates[2]))
        )
        names = ("gradient", "dq product", "dk product", "finish", "split")
        hop = sum(phases[name].time_s for name in names if name in phases) / 4
        first = (phases["gradient"].time_s + phases["dq product"].time_s) / 4
        # Against the moves of forward. 50 MB of sums take 1 ms at 50 GB/s: their step does not hide them, with keys.
        backward, both = lost * seconds((keys + statistics, rates[2])), (keys + statistics, rates[1])
        for sums, parts in ((rates[2], [both]), (rates[1], []), (rates[0], [])):
            whole = seconds((dk, sums), *parts)
            waited = max(0.0, seconds((dk, sums)) - first, whole - hop)
            assert not waited or network in rates
            backward += waited + lost * (whole - waited)
        assert phases["forward communication"].time_s == pytest.approx(forward, rel=1e-5)
        assert phases["backward communication"].time_s == pytest.approx(backward, rel=1e-5)
        assert phases["forward communication"].bytes == 3 * keys + 4 * statistics
        assert phases["backward communication"].bytes == 2 * (keys + statistics) + 3 * dk
    # Few queries, many keys: the work hides only a part of the transfer of the keys.
    plan = plan_flags(loss="infonce", batch_size=512, keys=65536, devices=4, nodes=4)
    phases = {phase.name: phase.time_s for phase in plan.phases}
    work = phases["forward product"] + phases["statistics"]
    exposed = 3 * (BATCH_S + 16384 * 768 * 2 / network + LATENCY_S - work / 4) + LOST * 3 / 4 * work
    assert exposed > 1e-3
    assert phases["forward communication"] == pytest.approx(exposed, rel=1e-5)


def test_a_hierarchical_ring_uses_all_links_of_a_node() -> None:
    """Of 31 moves of the keys, 3 cross the network; in a flat ring all would wait for those that do."""
    plan = plan_flags(batch_size="128k", devices=32, nodes=4)
    exposed = {phase.name: phase.time_s for phase in plan.phases if phase.bound == "link"}
    keys, dk = 4096 * 768 * 2, 4096 * 768 * 4
    network = keys / 50e9 + dk / 50e9
    beside = LOST * 28 * (keys + dk) / 345e9
    assert exposed["backward communication"] < 4 * network + beside + 33 * BATCH_S + 3e-4 < 31 * network


def test_links_that_devices_of_a_node_share_are_slower() -> None:
    """Two links for 8 devices: what crosses the network takes 4 times as long, and is more than work can hide."""
    exposed = []
    for links in (8, 2):
        cluster = {"nodes": 4, "devices_per_node": 8, "device_profile": "h200", "links_per_node": links}
        plan = plan_flags(batch_size="32k", cluster=cluster, set={"transport": "ring"})
        exposed.append({phase.name: phase.time_s for phase in plan.phases}["backward communication"])
    assert exposed[1] > 1.2 * exposed[0], exposed


def test_a_gather_by_hand() -> None:
    """The same 65 536 keys at once: 75 MB of keys, and 151 MB of sums, travel beside the work of one hop of four."""
    plan = plan_flags(batch_size=65536, devices=4, set={"transport": "gather", "copy_engines": "off"})
    phases = {phase.name: phase for phase in plan.phases}
    keys, statistics, dk, rate = 16384 * 768 * 2, 16384 * 2 * 4, 16384 * 768 * 4, 345e9
    forward = BATCH_S + 3 * 4 * statistics / rate + LATENCY_S + LOST * (BATCH_S + 3 * keys / rate + LATENCY_S)
    assert phases["forward communication"].time_s == pytest.approx(forward, rel=1e-5)
    backward = LOST * (BATCH_S + 3 * dk / rate + LATENCY_S)
    assert phases["backward communication"].time_s == pytest.approx(backward, rel=1e-5)
    assert phases["forward communication"].bytes == 3 * (keys + 4 * statistics)
    assert phases["backward communication"].bytes == 3 * dk
    assert phases["additions"].bytes == 3 * 3 * dk
    # 16 384 queries of one rank are too few to hide the keys of 1 048 576.
    flags = {"loss": "infonce", "batch_size": 64, "keys": 2**20, "devices": 8}
    plan = plan_flags(**flags, set={"transport": "gather", "strategy": "panel", "copy_engines": "off"})
    phases = {phase.name: phase for phase in plan.phases}
    work = phases["forward product"].time_s + phases["statistics"].time_s
    exposed = 7 * 2**17 * 768 * 2 / rate + LATENCY_S - (1 - LOST) * work / 8 + BATCH_S
    assert phases["forward communication"].time_s == pytest.approx(exposed, rel=1e-5)
    # Rows of panels begin with the own keys, at most. Sums hide behind two of the last products.
    uneven = {**flags, "batch_size": 8 * 384, "keys": 8 * (2**17 - 28)}
    for given, panel_rows, first, last in ((flags, "256", 1.0, 1.0), (uneven, "256", 256 / 384, 128 / 384)):
        plan = plan_flags(**given, set={"strategy": "rows", "panel_rows": panel_rows, "copy_engines": "off"})
        phases, keys = {phase.name: phase for phase in plan.phases}, plan.keys_per_rank
        begun = phases["forward product"].time_s / 8 * first
        left = (phases["dq product"].time_s + phases["dk product"].time_s / 8) * last
        exposed = 7 * keys * 768 * (2 + 4) / rate + 2 * (LATENCY_S + BATCH_S) - (1 - LOST) * (begun + left)
        assert phases["forward communication"].time_s == pytest.approx(exposed, rel=1e-5)
        assert phases["backward communication"].time_s == 0


def test_rings_are_predicted_as_they_were_measured() -> None:
    """By either transport, behind other work."""
    count = 0
    for name, engines in (("h200-ring.json", "off"), ("h200-ring2.json", "off"), ("h200-ring-losses.json", "on")):
        for row in json.loads((BENCH / name).read_text())["rows"]:
            if row["impl"] == "infcl" and row["package"] is None and row["transport"]:
                flags = {"devices": row["ranks"], "memory_budget": budget_of(row)}
                way = {"transport": row["transport"], "copy_engines": engines}
                plan = plan_flags(loss=row["loss"], batch_size=row["batch"], **flags, set=way)
                error = plan.predicted_queued_s * 1e3 / row["queued_ms"] - 1
                assert abs(error) <= 0.1, (name, row["batch"], row["transport"], error)
                count += 1
    assert count == 15


def test_allocator_slack() -> None:
    assert allocated_bytes(1, 1, gpu=True) == 512
    assert allocated_bytes(1000, 1, gpu=False) == 1000
    assert allocated_bytes(MIB, 1, gpu=True) == 2 * MIB
    for size, pieces in ((1000, 2), (MIB, 2), (3 * MIB + 2, 2)):
        assert allocated_bytes(size, pieces, True) >= pieces * allocated_bytes(size // pieces, 1, True)


def test_documentation_comes_from_the_terms() -> None:
    page = markdown()
    assert all(f"| `{name}` |" in page for name in LEGEND)
    assert "gradient_panel" in page and "| dq product |" in page
