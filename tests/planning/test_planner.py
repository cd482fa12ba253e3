"""The planner's promises: the budget is kept, more of it is never slower, its advice about feasibility is true."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.hardware import load_profile, resolve_cluster
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.kernels import LARGE, TILES, default_blocks
from infcl_gen.kernels.choice import Choice
from infcl_gen.planning import Plan
from infcl_gen.planning.candidates import SATURATED
from infcl_gen.planning.planner import cost_model
from infcl_gen.runtime.table import MAILBOX_BYTES
from tests.calls import calls
from tests.kernels import losses
from tests.losses.specs import DERIVABLE
from tests.planning.conftest import plan_flags, plan_problem
from tests.planning.tables import gather_table, ring_table
from tests.planning.walk import walk
from tests.tiers import nightly

GPU_PROFILES = ("h200", "a100", "l4", "rtx4090", "b200", "mi300x", "mi355x")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    profile = draw(st.sampled_from(["h200", "h200", "cpu", *GPU_PROFILES]))
    loss = draw(st.sampled_from(["clip", "infonce"]))
    nodes = draw(st.sampled_from([1, 1, 1, 2, 3]))
    sides = st.sampled_from([None, None, None, 512, 1024, 16384])
    chosen = {"panel_rows": draw(sides), "panel_keys": draw(sides)}
    return make_problem(
        loss=loss,
        batch_size=draw(st.one_of(st.integers(1, 300), st.integers(1, 2**22))),
        keys=draw(st.one_of(st.none(), st.integers(1, 2**20))) if loss == "infonce" else None,
        dim=draw(st.sampled_from([1, 3, 16, 64, 96, 100, 128, 256, 384, 640, 768, 1152, 4096])),
        devices=nodes * draw(st.sampled_from([1, 1, 1, 2, 3, 8])),
        nodes=nodes,
        frozen=draw(st.sampled_from(["none", "none", "query", "key"])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32", *(["fp64"] if profile == "cpu" else [])])),
        device_profile=profile,
        set={key: size for key, size in chosen.items() if size is not None},
    )


def with_budget(problem: Problem, budget: int | None) -> Problem:
    return dataclasses.replace(problem, memory_budget_bytes=budget)


def smallest_budget(problem: Problem) -> int:
    try:
        plan_problem(with_budget(problem, 1))
    except InfeasibleError as error:
        assert error.smallest_budget_bytes is not None
        return error.smallest_budget_bytes
    raise AssertionError("a plan in one byte")


def check_plan(problem: Problem, plan: Plan) -> None:
    assert 0 < plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.smallest_budget_bytes <= plan.predicted_peak_bytes
    assert plan.rows_per_rank == -(-problem.batch_size // problem.devices)
    assert plan.keys_per_rank == -(-problem.total_keys // problem.devices)
    profile = plan_profile(problem)
    for kernel, block in plan.blocks.items():
        assert TILES[kernel].violations(block, plan, profile) == ()
        if kernel == "forward":
            assert plan.forward_rows % block.rows == plan.forward_keys % block.keys == 0
        if kernel == "gradient":
            assert plan.panel_rows % block.rows == plan.panel_keys % block.keys == 0
    if plan.blocks and not plan.stash_rows:  # the forward takes no more memory than the backward, if it can
        memory = cost_model(plan, resolve_cluster(problem)).memory(plan)
        block = plan.blocks["forward"]
        smallest = (plan.forward_rows, plan.forward_keys) == (block.rows, block.keys)
        assert memory.forward <= max(memory.backward, memory.finish) or smallest
    # A panel is never more than one block longer than the problem.
    assert plan.panel_rows < plan.rows_per_rank + 256 and plan.forward_rows < plan.rows_per_rank + 256
    assert plan.panel_keys < plan.keys_per_rank + 256 and plan.forward_keys < plan.keys_per_rank + 256
    if plan.stash_rows:
        assert plan.stash_rows % plan.panel_rows == 0 and plan.world_size == 1
    assert {reason.level for reason in plan.reasons} >= ({0, 1, 2, 3, 4} if plan.blocks else {0, 1, 2})
    assert plan.predicted_time_s == pytest.approx(sum(phase.time_s for phase in plan.phases))
    walk(plan.schedule)


def plan_profile(problem: Problem) -> Any:
    return load_profile(problem.device_profile)


def budget_and_monotony(problem: Problem, factors: list[float]) -> None:
    smallest = smallest_budget(problem)
    previous: Plan | None = None
    for factor in sorted([1.0, *factors]):
        plan = plan_problem(with_budget(problem, int(smallest * factor)))
        check_plan(problem, plan)
        assert plan.smallest_budget_bytes == smallest
        if previous is not None:
            assert plan.predicted_time_s <= previous.predicted_time_s
            assert plan.largest_batch >= previous.largest_batch
        previous = plan
    if smallest > 1:
        with pytest.raises(InfeasibleError) as caught:
            plan_problem(with_budget(problem, smallest - 1))
        largest = caught.value.largest_batch
        if largest is not None:
            assert largest < problem.batch_size
            check_largest(with_budget(problem, smallest - 1), largest)


def check_largest(problem: Problem, largest: int) -> None:
    """`largest` is feasible, the next is not."""
    plan = plan_problem(dataclasses.replace(problem, batch_size=largest))
    check_plan(plan.problem, plan)
    assert plan.largest_batch == largest
    with pytest.raises(InfeasibleError):
        plan_problem(dataclasses.replace(problem, batch_size=largest + 1))


def feasibility(problem: Problem) -> None:
    """The numbers of an InfeasibleError, for budgets drawn anywhere, are true."""
    try:
        plan = plan_problem(problem)
    except InfeasibleError as error:
        assert error.exit_code == 3
        assert str(error.smallest_budget_bytes) in str(error)
        plan_problem(with_budget(problem, error.smallest_budget_bytes))
        if error.largest_batch is None:
            with pytest.raises(InfeasibleError):
                plan_problem(dataclasses.replace(problem, batch_size=1))
        else:
            check_largest(problem, error.largest_batch)
    else:
        check_plan(problem, plan)
        if plan.largest_batch < 2**40:
            check_largest(problem, plan.largest_batch)


FACTORS = st.lists(st.floats(1.0, 40.0), max_size=3)
BUDGETS = st.one_of(st.none(), st.integers(2**10, 2**40), st.integers(2**24, 2**31))


@settings(max_examples=12, deadline=None)
@given(problems(), FACTORS)
def test_budget_kept_and_more_is_never_slower(problem: Problem, factors: list[float]) -> None:
    budget_and_monotony(problem, factors)


@settings(max_examples=40, deadline=None)
@given(problems(), BUDGETS)
def test_feasibility_figures_are_true(problem: Problem, budget: int | None) -> None:
    feasibility(with_budget(problem, budget))


@pytest.mark.long
@settings(max_examples=1500, deadline=None)
@given(problems(), FACTORS)
def test_budget_kept_and_more_is_never_slower_long(problem: Problem, factors: list[float]) -> None:
    budget_and_monotony(problem, factors)


@pytest.mark.long
@settings(max_examples=1500, deadline=None)
@given(problems(), BUDGETS)
def test_feasibility_figures_are_true_long(problem: Problem, budget: int | None) -> None:
    feasibility(with_budget(problem, budget))


@settings(max_examples=15, deadline=None)
@given(problems(), st.integers(1, 2**20))
def test_a_smaller_batch_never_takes_more(problem: Problem, smaller: int) -> None:
    assume(smaller < problem.batch_size and problem.keys is None)
    budget = smallest_budget(problem)
    assert smallest_budget(dataclasses.replace(problem, batch_size=smaller)) <= budget


def test_one_panel_side_as_set() -> None:
    """The smallest of the candidates is the one that the advice about feasibility speaks of."""
    flags = {"batch_size": 5000, "dim": 1152, "dtype": "fp16", "device_profile": "a100"}
    for key in ("panel_rows", "panel_keys"):
        feasibility(make_problem(**flags, set={key: 16384}, memory_budget="1MiB"))


def test_settings_that_another_batch_does_not_allow() -> None:
    chosen = {"panel_rows": 1024, "stash_rows": 1024}
    with pytest.raises(InfeasibleError):
        plan_flags(batch_size=4000, set=chosen, memory_budget="40MiB")
    assert plan_flags(batch_size=700, set=chosen, memory_budget="1GiB").stash_rows == 768
    plan = plan_flags(loss="infonce", dim=1, set={"strategy": "stash"}, memory_budget="1TiB")
    assert plan.largest_batch <= 2**22  # of keys that a stash can address


def test_the_target_problem_fits_one_gibibyte() -> None:
    plan = plan_flags(batch_size="64k", memory_budget="1GiB")
    assert plan.strategy == "panel" and plan.product_by == "library" and plan.descriptors
    assert plan.predicted_time_s < 0.055
    assert plan.budget_bytes == 2**30


@pytest.mark.parametrize(
    ("flags", "products"),
    [
        ({}, 4.0), ({"set": {"strategy": "stash"}, "memory_budget": "30GiB"}, 3.0), ({"loss": "infonce"}, 3.0),
        ({"loss": "siglip"}, 3.0), ({"frozen": "key"}, 3.0), ({"loss": "infonce", "frozen": "query"}, 2.0),
        ({"dtype": "fp32"}, 4.0), ({"device_profile": "cpu", "dtype": "fp32"}, 4.0),
    ],
)  # fmt: skip
def test_products_are_counted(flags: dict[str, Any], products: float) -> None:
    plan = plan_flags(**{"batch_size": "64k", "device_profile": "h200"} | flags)
    assert plan.products == pytest.approx(products, rel=1e-3) and plan.as_dict()["products"] == plan.products


def test_sums_without_positives_are_not_taken_by_rows() -> None:
    """A positive may be the reference of a row: where it lies far above all others, their sum would be lost."""
    flags: dict[str, Any] = {"batch_size": "16k", "dim": 768, "device_profile": "h200", "memory_budget": "4GiB"}
    flags |= {"loss": f"{losses.__file__}:margin"}
    assert plan_flags(**flags).strategy == "panel"
    with pytest.raises(InputError, match="no kernels that leave positives out"):
        plan_flags(**flags, set={"strategy": "rows"})


@pytest.mark.parametrize(("loss", "valid"), [("rince", "panel, rows, torch"), ("pooled_alone", "panel, torch")])
def test_a_strategy_is_offered_where_it_has_kernels(loss: str, valid: str) -> None:
    """Rows of panels have no gradients that depend on a number of all positives."""
    flags: dict[str, Any] = {"batch_size": "4k", "device_profile": "h200", "loss": DERIVABLE.get(loss, loss)}
    with pytest.raises(InputError, match=f"; valid: {valid}$"):
        plan_flags(**flags, set={"strategy": "fused"})


def test_a_triangle_takes_about_half_of_the_products() -> None:
    assert 1.8 < plan_flags(batch_size="64k", device_profile="h200", loss="ntxent").products < 2.2


def test_other_strategies_are_named_once_beside_the_one_that_is_taken() -> None:
    """A strategy has many panels, and over ranks keeps keys or does not: these are no other strategies."""
    for flags in ({"devices": 64, "nodes": 8}, {"dim": 128}, {"loss": "infonce", "devices": 4}):
        plan = plan_flags(batch_size="64k", device_profile="h200", **flags)
        (why,) = [reason.why for reason in plan.reasons if reason.decision.startswith("strategy ")]
        named = re.findall(r"(\w+(?: replayed)?) [\d.e+-]+ ms", why.partition("against ")[2])
        own = plan.strategy + " replayed" * plan.replay
        assert own not in named and len(named) == len(set(named))


def test_a_loss_over_rows_takes_three_products_where_all_keys_are() -> None:
    flags: dict[str, Any] = {"loss": "infonce", "batch_size": "64k", "device_profile": "h200"}
    one, two = (plan_flags(**flags, memory_budget="1GiB", devices=devices) for devices in (1, 2))
    ring = plan_flags(**flags, memory_budget="1GiB", devices=2, set={"transport": "ring"})
    assert [plan.strategy for plan in (one, two, ring)] == ["rows", "rows", "panel"]
    assert (two.transport, two.schedule.whole, ring.schedule.whole) == ("gather", True, False)
    assert one.panel_keys == two.panel_keys == 65536 and one.panel_rows * one.panel_keys * 2 < 2**30
    flops = [math.fsum(phase.flops for phase in each.phases) / (2 * 65536**2 * 768) for each in (one, two, ring)]
    assert flops == [3, 1.5, 2]  # of two ranks each has half of the pairs
    assert two.predicted_queued_s < ring.predicted_queued_s
    assert plan_flags(**flags, memory_budget="1.5GiB").predicted_queued_s <= one.predicted_queued_s


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "fp16"}, "keeps 8 bits of each probability, which would lose the accuracy of fp16; valid: bf16"),
        ({"dtype": "fp32"}, "keeps 8 bits of each probability, which would lose the accuracy of fp32; valid: bf16"),
        ({"devices": 2, "set": {"transport": "ring"}}, "needs all keys on each device: --devices 1, or a gather"),
        ({"devices": 32}, "needs all keys on each device: --devices 1, or a gather"),
        ({"devices": 2, "nodes": 2}, "needs all keys on each device: --devices 1, or a gather"),
        ({"memory_budget": "700MiB"}, "needs a budget of 806.6 MiB"),
        ({"set": {"panel_keys": "2048"}}, "is excluded by --set"),
    ],
)
def test_a_plan_says_why_it_takes_four_products(changes: dict[str, Any], why: str) -> None:
    plan = plan_flags(**{"loss": "infonce", "batch_size": "64k", "device_profile": "h200"} | changes)
    assert plan.strategy == "panel"
    (reason,) = [reason.why for reason in plan.reasons if reason.decision == "strategy panel"]
    assert reason.endswith(f"; rows, with three products for four, {why}")


def test_auto_takes_an_eighth_at_most() -> None:
    for profile in GPU_PROFILES:
        for batch in ("4k", "256k"):
            plan = plan_flags(batch_size=batch, device_profile=profile)
            assert plan.budget_bytes == plan.predicted_peak_bytes
            assert plan.budget_bytes <= plan_profile(plan.problem).memory_bytes // 8
            assert plan.stash_rows == 0


def test_strategies() -> None:
    assert plan_flags(device_profile="cpu").strategy == "torch"
    assert plan_flags(device_profile="cpu").product_by == "torch"
    assert plan_flags(dim=128, batch_size="64k").strategy == "fused"
    assert plan_flags(dim=512).strategy == "panel"
    assert plan_flags(device_profile="mi300x").product_by == "triton"
    assert plan_flags(set={"strategy": "torch"}).blocks == {}
    assert plan_flags(batch_size="64k", memory_budget="16GiB").strategy == "stash"
    assert plan_flags(batch_size="64k", memory_budget="16GiB", devices=2).strategy == "panel"
    assert plan_flags(batch_size="64k", memory_budget="16GiB", dtype="fp32").strategy == "panel"
    stash = plan_flags(batch_size="64k", set={"strategy": "stash"})
    assert stash.stash_rows > 0 and set(stash.blocks) == {"forward", "gradient", "product", "positive", "finish"}
    assert set(plan_flags(dim=64, batch_size="64k").blocks) == {"forward", "fused", "positive", "finish"}
    assert not plan_flags(dim=100, set={"strategy": "panel"}).descriptors


def test_a_fused_ring_counts_the_positives_of_all_its_rows() -> None:
    """A hop takes all queries at once, whatever the panel of a single device would be."""
    plan = plan_flags(batch_size=65536, dim=64, devices=8, device_profile="h200", set={"strategy": "fused"})
    (term,) = (buffer for buffer in plan.buffers if buffer.name == "positive_gradients")
    assert term.shape == (8192,)


def test_more_budget_does_not_turn_a_gather_down() -> None:
    """A ring that the larger budget makes faster must not take the place of a gather that is faster still."""
    flags = {"batch_size": 49152, "dim": 768, "devices": 3, "device_profile": "l4"}
    less, more = (plan_flags(memory_budget=budget, **flags) for budget in (662623232, 754900986))
    assert more.predicted_time_s <= less.predicted_time_s


def test_small_tiles_say_why() -> None:
    def why(**flags: Any) -> str:
        (found,) = (r.why for r in plan_flags(**flags).reasons if r.decision.startswith("forward block"))
        return str(found)

    assert "small: the batch has few tiles for 132 multiprocessors" in why(batch_size=1024)
    assert "small" not in why(batch_size=8192)
    assert "small" not in why(batch_size="64k", memory_budget="40GiB", set={"strategy": "stash"})


@pytest.mark.parametrize("name", GPU_PROFILES)
def test_more_than_saturates_does_not_change_a_block(name: str) -> None:
    """Choices are made once for all larger sizes: whatever the other side, and for the largest tiles there are."""
    profile = load_profile(name)
    enough = SATURATED * profile.multiprocessors
    for strategy, dim, dtype in itertools.product(("panel", "fused", "stash"), (64, 128, 256), ("bf16", "fp32")):
        if dtype == "fp32" and strategy != "panel":
            continue
        for descriptors in {False, profile.tensor_descriptors}:
            facts = {"target": profile.target, "arch": profile.arch, "descriptors": descriptors}
            choice = Choice(strategy=strategy, dim=dim, dtype=dtype, **facts)
            for few in (1, 300, enough):
                for more in (enough + 1, LARGE):
                    assert default_blocks(profile, choice, enough, few) == default_blocks(profile, choice, more, few)
                    assert default_blocks(profile, choice, few, enough) == default_blocks(profile, choice, few, more)


def test_what_is_set_means_the_same_block_at_every_size() -> None:
    tile = {"forward.rows": "256", "forward.keys": "128"}
    for batch in (64, 1024, 65536):
        plan = plan_flags(batch_size=batch, set=tile)
        assert plan.blocks["forward"].warps == 8
        assert plan.largest_batch > 10**6


def test_small_batches_are_recorded_where_the_budget_allows() -> None:
    small, large = plan_flags(batch_size=1024), plan_flags(batch_size="128k")
    assert small.replay and not large.replay
    off = plan_flags(batch_size=1024, set={"replay": "off"})
    assert not off.replay and off.predicted_time_s > small.predicted_time_s
    assert not plan_flags(batch_size=1024, memory_budget=small.smallest_budget_bytes).replay
    assert {term.name for term in small.buffers} - {term.name for term in off.buffers} == {
        "recorded_features",
        "recorded_query_statistics",
        "recorded_key_statistics",
        "recorded_sums",
    }
    assert plan_flags(batch_size=64, set={"replay": "on", "products": "library"}).replay
    for flags in ({"devices": 2}, {"device_profile": "mi300x"}):
        with pytest.raises(InputError, match="--set replay: on needs"):
            plan_flags(**flags, set={"replay": "on"})


def test_a_stash_is_recorded_where_the_start_counts() -> None:
    """Its memory is that of a stash without a recording and what the graphs read and write: never a second stash."""
    plan, large = (plan_flags(batch_size=size, dim=1024, memory_budget="64GiB") for size in ("32k", "128k"))
    assert (plan.strategy, large.strategy) == ("stash", "stash")
    assert plan.replay and not large.replay
    off = plan_flags(batch_size="32k", dim=1024, memory_budget="64GiB", set={"replay": "off"})
    assert off.predicted_time_s - 0.5e-3 < plan.predicted_time_s < off.predicted_time_s
    stash = next(term.bytes for term in plan.buffers if term.name == "stash")
    assert 0 < plan.predicted_peak_bytes - off.predicted_peak_bytes < stash / 4


def test_settings_are_honoured() -> None:
    plan = plan_flags(
        batch_size="64k",
        set=[
            "panel_rows=4096",
            "panel_keys=2k",
            "products=triton",
            "descriptors=off",
            "gradient.keys=128",
            "forward.stages=2",
        ],
    )
    assert (plan.panel_rows, plan.panel_keys) == (4096, 2048)
    assert plan.product_by == "triton" and not plan.descriptors
    assert plan.blocks["gradient"].keys == 128 and plan.blocks["forward"].stages == 2
    assert plan_flags(set={"stash_rows": "2048", "panel_rows": "1024"}).stash_rows == 2048
    assert plan_flags(set={"panel_rows": "1M"}).panel_rows == 4096  # never more than the problem
    assert plan_flags(dim=128, set={"fused.keys": "64"}).strategy == "fused"
    assert plan_flags(dim=128, set={"gradient.keys": "64"}).strategy == "panel"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"keys": 100}, "--keys: .*'clip'.* must equal --batch-size 4096"),
        ({"set": {"strategy": "fused"}}, "--set strategy: fused .*at most 256, not 768"),
        ({"set": {"strategy": "panel"}, "device_profile": "cpu"}, "--set strategy: panel needs a GPU"),
        ({"set": {"strategy": "stash"}, "devices": 2}, "--set strategy: stash .*--devices 1"),
        ({"set": {"strategy": "stash"}, "dtype": "fp32"}, "--set strategy: stash keeps 8 bits"),
        ({"set": {"strategy": "rows"}}, "--set strategy: rows needs gradients .* unlike those of clip"),
        ({"set": {"strategy": "rows", "transport": "ring"}, "loss": "infonce", "devices": 2}, "rows .*, or a gather"),
        ({"set": {"strategy": "rows"}, "loss": "infonce", "devices": 8, "nodes": 2}, "rows .*--devices 1, or a gather"),
        ({"set": {"strategy": "rows"}, "loss": "infonce", "dtype": "fp16"}, "--set strategy: rows keeps 8 bits"),
        ({"set": {"strategy": "rows", "panel_keys": "128"}, "loss": "infonce"}, "--set panel_keys: does not apply"),
        ({"set": {"stash_rows": "1024"}, "devices": 2}, "--set stash_rows: does not apply"),
        ({"set": {"stash_rows": "1000"}}, "--set stash_rows: 1000 must be a multiple"),
        ({"set": {"stash_rows": "1024", "panel_rows": "2048"}}, "--set stash_rows: 1024 must be a multiple"),
        ({"set": {"panel_rows": "1000"}}, "--set panel_rows: 1000 must be a multiple of 128"),
        ({"set": {"panel_keys": "100"}}, "--set panel_keys: 100 must be a multiple of 128"),
        ({"set": {"panel_keys": "256", "strategy": "fused"}, "dim": 128}, "--set panel_keys: does not apply"),
        ({"set": {"nothing.rows": "64"}}, "--set nothing.rows: unknown kernel .*valid: forward, gradient"),
        ({"set": {"gradient.rows": "100"}}, r"--set gradient.rows: .*power of two"),
        ({"set": {"gradient.depth": "256"}}, r"--set gradient.depth: .*shared memory"),
        ({"set": {"fused.rows": "64"}}, r"--set fused.rows: does not apply"),
        ({"set": {"forward.rows": "64"}, "device_profile": "cpu"}, r"--set forward.rows: does not apply"),
        ({"set": {"products": "library"}, "device_profile": "mi300x"}, "--set products: rocm"),
        ({"set": {"descriptors": "on"}, "device_profile": "a100"}, "--set descriptors: a100 has no"),
        ({"set": {"descriptors": "on"}, "dim": 100}, "--set descriptors: a row of 100 bf16"),
        ({"set": {"transport": "gather"}}, "--set transport: keys travel between devices.*give --devices"),
        ({"set": {"transport": "gather"}, "devices": 8, "nodes": 2}, "gather .* not between 2 nodes; valid: ring"),
        ({"set": {"transport": "gather"}, "devices": 32}, "gather .* at most 16 devices, not 32; valid: ring"),
        ({"set": {"transport": "tree"}, "devices": 4}, "--set transport.*ring"),
        ({"dtype": "fp64"}, "--dtype"),
        ({"dtype": "fp32", "precision": "tf32", "device_profile": "cpu"}, "--precision: tf32"),
        ({"dtype": "fp32", "precision": "tf32", "device_profile": "mi300x"}, "--precision: tf32"),
        ({"precision": "exact"}, "--precision: exact is for --dtype fp32"),
    ],
)
def test_bad_inputs(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_flags(**flags)


def test_how_keys_travel() -> None:
    """A gather where it is faster and fits; rings for large shards, across nodes, for small budgets, and as set."""
    nccl = {"copy_engines": "off"}
    flags: dict[str, Any] = {"batch_size": "16k", "devices": 4}
    ring = plan_flags(**flags, set={"transport": "ring", **nccl})
    assert ring.schedule == ring_table(1, 4, dim=768)
    flags["set"] = nccl
    found = plan_flags(**flags)
    assert found.schedule == gather_table(4, dim=768)
    assert found.predicted_time_s < ring.predicted_time_s
    assert found.predicted_peak_bytes > ring.predicted_peak_bytes
    assert plan_flags(**flags, nodes=2).schedule == ring_table(2, 2, dim=768)
    for rows, devices in ((65536, 2), (65536, 4), (16384, 4), (16384, 16), (4096, 32)):
        assert plan_flags(batch_size=rows * devices, devices=devices).schedule.transport == "ring"
    assert plan_flags(batch_size="64k").schedule.transport == "none"
    narrow = plan_flags(**flags, memory_budget=ring.smallest_budget_bytes)
    assert narrow.schedule.transport == "ring"
    assert any(r.level == 1 and "a gather exceeds the budget" in r.why for r in narrow.reasons)
    why = {r.level: f"{r.decision}: {r.why}" for r in reversed(found.reasons)}
    assert re.search("gather among 4 devices.*ms against .* by ring", why[1]) and "one node" in why[0]
    nodes = {r.level: f"{r.decision}: {r.why}" for r in reversed(plan_flags(**flags, nodes=2).reasons)}
    assert "one hop of 2, by all 2 devices" in nodes[0] and "ring of 2 devices, 4 hops" in nodes[1]


def test_copy_engines_carry_messages_between_the_gpus_of_a_node() -> None:
    """Through memory that the plan counts."""
    ways = {word: plan_flags(batch_size="64k", devices=2, set={"copy_engines": word}) for word in ("on", "off")}
    default = plan_flags(batch_size="64k", devices=2)
    assert default.schedule == ways["on"].schedule and default.schedule.copy_engines
    assert default.predicted_time_s < ways["off"].predicted_time_s
    (mailboxes,) = [buffer for buffer in default.buffers if buffer.name == "mailboxes"]
    assert (mailboxes.bytes, mailboxes.phase) == (MAILBOX_BYTES, "both")
    assert "mailboxes" not in {buffer.name for buffer in ways["off"].buffers}
    assert default.predicted_peak_bytes > ways["off"].predicted_peak_bytes + MAILBOX_BYTES


CARRIERS: list[tuple[dict[str, Any], str, bool, str]] = [  # transport, whether by copy engines, and what is said
    ({"batch_size": "64k", "devices": 2}, "ring", True, "copy engines carry the messages"),
    ({"batch_size": "64k", "devices": 2, "nodes": 2}, "ring", False, "NCCL carries the messages"),
    ({"batch_size": "64k", "devices": 2, "device_profile": "l4"}, "ring", False, "NCCL carries the messages"),
    # The only gather that fits is by NCCL, and rings by copy engines, of any budget, do not count against it.
    (
        {"batch_size": "8k", "devices": 4, "memory_budget": "111MiB"},
        "gather",
        False,
        "a gather with mailboxes exceeds the budget",
    ),
    (
        {"batch_size": "16k", "devices": 4, "memory_budget": "159MiB"},
        "ring",
        False,
        "with copy engines and their mailboxes .* ms are predicted",
    ),
    (
        {"batch_size": "32M", "devices": 8, "memory_budget": "64GiB"},
        "ring",
        False,
        "with copy engines and their mailboxes .* ms are predicted",
    ),
]


@pytest.mark.parametrize(("flags", "transport", "engines", "said"), CARRIERS)
def test_what_carries_messages_and_why(flags: dict[str, Any], transport: str, engines: bool, said: str) -> None:
    plan = plan_flags(**flags)
    assert (plan.schedule.transport, plan.schedule.copy_engines) == (transport, engines)
    (why,) = [reason.why for reason in plan.reasons if reason.level == 1]
    assert re.search(f"{said}$" if transport == "gather" else said, why), why


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "messages need several devices; give --devices"),
        ({"devices": 4, "nodes": 2}, "they reach the GPUs of one node; valid: off"),
        ({"devices": 2, "device_profile": "cpu"}, "cpu is no NVIDIA GPU; valid: off"),
        ({"devices": 2, "device_profile": "mi300x"}, "mi300x is no NVIDIA GPU; valid: off"),
    ],
)
def test_where_copy_engines_cannot_carry_messages(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"--set copy_engines: {message}"):
        plan_flags(**flags, set={"copy_engines": "on"})
    assert not plan_flags(**flags).schedule.copy_engines


def test_a_gather_is_for_at_most_sixteen_ranks() -> None:
    way = {"transport": "gather", "copy_engines": "off"}
    assert plan_flags(devices=16, set=way).schedule == gather_table(16, dim=768)
    with pytest.raises(InputError, match="at most 16 devices, not 17"):
        plan_flags(devices=17, set={"transport": "gather"})


def test_a_panel_is_compared_with_panels_of_its_own_strategy() -> None:
    """A fused strategy's are larger, as it has no scratch: they are no reason for a panel at its cap."""
    found = plan_flags(batch_size="64k", dim=256)
    (why,) = [reason.why for reason in found.reasons if reason.decision == "panel 16384 x 16384"]
    assert "larger ones exceed the budget, the problem or the cap" in why


def test_an_infeasible_gather_says_what_a_gather_needs() -> None:
    flags: dict[str, Any] = {"batch_size": "64k", "devices": 4, "set": {"transport": "gather"}}
    with pytest.raises(InfeasibleError) as error:
        plan_flags(**flags, memory_budget="300MiB")
    assert error.value.smallest_budget_bytes is not None
    plan_flags(**flags, memory_budget=error.value.smallest_budget_bytes)


def test_infonce_takes_any_keys() -> None:
    assert plan_flags(loss="infonce", keys=100_000).keys_per_rank == 100_000


def test_as_dict_holds_literals_only() -> None:
    for flags in ({}, {"devices": 8, "nodes": 2}, {"dim": 64}, {"device_profile": "cpu"}):
        plan = plan_flags(**flags)
        assert ast.literal_eval(repr(plan.as_dict())) == plan.as_dict()


def test_deterministic_under_any_hash_seed() -> None:
    code = (
        "from tests.planning.conftest import plan_flags;"
        "print(plan_flags(batch_size='64k', memory_budget='4GiB').as_dict(), plan_flags(dim=96, devices=4).as_dict())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in nightly(["0", "1", "77"], ["77"])
    }
    flags: tuple[dict[str, Any], ...] = ({"batch_size": "64k", "memory_budget": "4GiB"}, {"dim": 96, "devices": 4})
    here = " ".join(str(plan_flags(**each).as_dict()) for each in flags)
    assert outputs == {f"{here}\n"}


def test_planning_is_quick() -> None:
    plan_flags(batch_size="64k", memory_budget="8GiB")
    assert calls(lambda: plan_flags(batch_size="128k", memory_budget="16GiB", dim=256)) < 600_000  # 0.06 s


def test_the_forward_has_panels_of_its_own() -> None:
    """A quarter of the launches where its partial sums fit beside nothing else; smaller ones in a tight budget."""
    for dim in (96, 128, 768):
        plan = plan_flags(batch_size="64k", dim=dim)
        assert (plan.forward_rows, plan.forward_keys) == (32768, 32768)
    budget = plan_flags(batch_size="64k", dim=16).smallest_budget_bytes
    tight = plan_flags(batch_size="64k", dim=16, memory_budget=budget)
    assert tight.forward_rows * tight.forward_keys < 32768**2
    # Tiles of the forward, of 256 keys, do not bind the backward's panels.
    flags = {"batch_size": "64k", "dim": 96, "set": {"strategy": "panel", "panel_keys": "1152"}}
    assert plan_flags(**flags).panel_keys == 1152


@pytest.mark.parametrize(("loss", "most"), [("clip", 0.78), ("infonce", 0.72), ("siglip", 0.72)])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_frozen_side_saves_a_product(loss: str, most: float, devices: int) -> None:
    """In memory, too: its sums. Frozen keys also send no sums."""
    flags = {"loss": loss, "batch_size": devices << 16, "dim": 768, "device_profile": "h200", "devices": devices}
    chosen = {"transport": "gather"} if devices > 1 else {}
    whole, *frozen = (plan_flags(**flags, frozen=side, set=chosen) for side in ("none", "query", "key"))
    for plan in frozen:
        assert plan.predicted_queued_s <= most * whole.predicted_queued_s
        assert plan.predicted_peak_bytes < whole.predicted_peak_bytes
        assert plan.problem.frozen in next(why.decision for why in plan.reasons if why.why.startswith("it is frozen"))
    names = [{item.name for item in plan.schedule.travelling} for plan in (whole, *frozen)]
    assert names[0] == names[1] == names[2] | {"key gradients"}
