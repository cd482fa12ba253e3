"""The memory plan against what a package really allocates on the CPU (the GPU suite does the same on a GPU), and
against the world size, on which neither may depend."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.losses import BUILTIN_LOSSES, derive
from infcl_gen.planning import Plan, memory
from infcl_gen.runtime import means, renormalised, scaled
from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.properties import DTYPES
from tests.runtime.in_process import Echo
from tests.tiers import LONG, combined, nightly

WORLDS = (2, 3, 8, 64, 4096, 65536) if LONG else (2, 3, 8, 64, 512)


def measured_peak_bytes(step: Any) -> int:
    with PeakMeter("cpu") as meter:
        step()
    return meter.peak_bytes


# Budgets, dtypes of several sizes and further losses of the same buffers, which the nightly tier takes, too.
OTHER_PEAKS: list[dict[str, Any]] = [
    {"batch_size": 2000, "dim": 256, "dtype": "bf16", "memory_budget": "8MiB"},
    {"batch_size": 2000, "dim": 256, "dtype": "fp64", "loss": "siglip", "memory_budget": "18MiB"},
    {"batch_size": 2000, "dim": 256, "dtype": "bf16", "prefixes": [64, 128, 256], "memory_budget": "11MiB"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "dclw"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "three_block"},
    {"batch_size": 3000, "dim": 64, "dtype": "bf16", "loss": "infonce_out", "frozen": "key"},
    {"batch_size": 1000, "dim": 64, "dtype": "bf16", "loss": "gemini", "negatives": 30},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32"},
    {"batch_size": 256, "dim": 4096, "dtype": "fp32"},
    {"batch_size": 64, "dim": 256, "dtype": "fp64"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "siglip"},
    {"batch_size": 3000, "dim": 256, "dtype": "bf16", "loss": "siglip"},
    {"batch_size": 256, "dim": 1024, "dtype": "fp16", "loss": "siglip"},
    {"batch_size": 256, "dim": 4096, "dtype": "fp32", "loss": "siglip"},
    {"batch_size": 64, "dim": 256, "dtype": "fp64", "loss": "siglip"},
    {"batch_size": 2000, "keys": 3000, "dim": 96, "dtype": "fp64", "loss": "infonce", "prefixes": [5, 96]},
    {"batch_size": 3000, "dim": 256, "dtype": "bf16", "frozen": "query"},
    {"batch_size": 2000, "keys": 3000, "dim": 96, "dtype": "fp64", "loss": "infonce", "frozen": "query"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "ntxent"},
    {"batch_size": 3000, "dim": 64, "dtype": "bf16", "loss": "debiased"},
    {"batch_size": 3000, "dim": 64, "dtype": "bf16", "loss": "three_block"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "supcon_out"},
    {"batch_size": 2000, "keys": 3000, "dim": 96, "dtype": "fp64", "loss": "infonce_in"},
    {"batch_size": 1000, "dim": 256, "dtype": "fp32", "loss": "distill"},
    {"batch_size": 2000, "dim": 64, "dtype": "bf16", "loss": "distill_both"},
    {"batch_size": 3000, "dim": 256, "dtype": "fp64", "loss": "ntxent", "memory_budget": "16MiB"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "gemini"},
    {"batch_size": 1000, "dim": 64, "dtype": "bf16", "loss": "three_block_hard", "negatives": 7},
]
# A package of each kind of buffers: panels, sums of each trait, prefixes, frozen sides, a guide, columns, and budgets.
PEAKS: list[dict[str, Any]] = [
    {"batch_size": 2100, "dim": 256, "dtype": "bf16"},
    {"batch_size": 2000, "dim": 256, "dtype": "fp64", "memory_budget": "16MiB"},
    {"batch_size": 2000, "keys": 3000, "dim": 96, "dtype": "fp64", "loss": "infonce"},
    {"batch_size": 512, "dim": 1024, "dtype": "fp32", "memory_budget": "4520kB"},
    {"batch_size": 256, "dim": 1024, "dtype": "bf16", "set": {"panel_rows": "256", "panel_keys": "64"}},
    {"batch_size": 2000, "dim": 256, "dtype": "bf16", "loss": "siglip", "memory_budget": "8MiB"},
    {"batch_size": 2100, "dim": 256, "dtype": "bf16", "prefixes": [64, 256], "renormalise": True},
    {"batch_size": 2000, "dim": 256, "dtype": "fp64", "frozen": "key", "memory_budget": "12MiB"},
    {"batch_size": 2100, "dim": 256, "dtype": "bf16", "loss": "siglip", "frozen": "key"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "hard_negative"},
    {"batch_size": 3000, "dim": 64, "dtype": "bf16", "loss": "four_block"},
    {"batch_size": 3000, "dim": 64, "dtype": "bf16", "loss": "rince"},
    {"batch_size": 3000, "dim": 64, "dtype": "bf16", "loss": "supcon_in"},
    {"batch_size": 2000, "dim": 64, "dtype": "bf16", "loss": "gist"},
    {"batch_size": 2000, "dim": 64, "dtype": "fp32", "loss": "distill_clip"},
    {"batch_size": 2000, "dim": 64, "dtype": "fp32", "loss": "mil_nce"},
    {"batch_size": 2000, "keys": 3000, "dim": 96, "dtype": "fp32", "loss": "mil_nce_multi"},
    {"batch_size": 2000, "keys": 3000, "dim": 64, "dtype": "bf16", "loss": "distill"},
    {"batch_size": 2000, "dim": 256, "dtype": "bf16", "loss": "ntxent", "memory_budget": "8MiB"},
    {"batch_size": 1000, "dim": 64, "dtype": "fp32", "loss": "three_block_hard", "negatives": 30},
    {"batch_size": 4, "dim": 64, "dtype": "fp32", "loss": "gemini", "negatives": 3 * memory.NEGATIVE_ROWS},
]


@pytest.mark.parametrize(
    "flags", nightly([*PEAKS, *OTHER_PEAKS], PEAKS), ids=lambda flags: "-".join(map(str, flags.values()))
)
def test_predicted_peak_is_a_close_upper_bound(flags: dict[str, Any]) -> None:
    package = infcl_gen.load(target="cpu", **flags)
    predicted = package.SPEC["predicted"]["peak_bytes"]
    rows, keys, dim = flags["batch_size"], flags.get("keys", flags["batch_size"]), flags["dim"]
    dtype = DTYPES[flags["dtype"]]
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows, dim, generator=generator).to(dtype).requires_grad_(flags.get("frozen") != "query")
    k: Any = torch.randn(keys, dim, generator=generator).to(dtype).requires_grad_(flags.get("frozen") != "key")
    loss = flags.get("loss", "clip")
    if derive(BUILTIN_LOSSES[loss]).traits.triangle:
        k = None
    ids = {"query_ids": torch.arange(rows) // 3} if loss.endswith(("_in", "_out", "_multi", "gemini")) else {}
    if ids and k is not None:
        ids["key_ids"] = torch.arange(keys) // 3
    if loss.startswith("distill") or loss == "gist":
        ids = {name: x.detach() for name, x in (("guide_queries", q), ("guide_keys", k))}
    if loss in ("gemini", "three_block_hard"):
        shape = rows // (1 + (k is None)), flags.get("negatives", 1), dim
        ids["negatives"] = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    scale = torch.tensor(3.0, requires_grad=True)
    measured = measured_peak_bytes(lambda: package.contrastive_loss(q, k, scale, **ids).backward())
    assert measured <= predicted <= 1.1 * measured


@pytest.mark.parametrize(
    ("loss", "over"),
    [
        ("clip", {}),
        ("infonce", {}),
        ("siglip", {}),
        ("clip", {"prefixes": (8, 16, 64)}),
        ("clip", {"prefixes": (8, 16, 64), "renormalise": True}),
    ],
)
def test_losses_of_single_queries_take_what_is_planned(loss: str, over: dict[str, Any]) -> None:
    spec = dataclasses.replace(BUILTIN_LOSSES[loss], reduction="none", **over)
    package = infcl_gen.load(loss=spec, target="cpu", batch_size=3000, dim=64, dtype="bf16")
    q, k = (torch.randn(3000, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 2))
    q, k, factors = q.requires_grad_(), k.requires_grad_(), torch.ones(3000)
    step = lambda: package.contrastive_loss(q, k, 3.0, reduction="none").backward(factors)  # noqa: E731
    measured = measured_peak_bytes(step)
    assert measured <= package.SPEC["predicted"]["peak_bytes"] <= 1.1 * measured


def test_siglip_fits_into_640_mb() -> None:
    plan = infcl_gen.plan(
        loss="siglip", batch_size=65536, dim=768, dtype="bf16", device_profile="h200", memory_budget=640_000_000
    )
    by_name = {buffer.name: buffer.bytes for buffer in plan.buffers}
    kept = [by_name[name] for name in ("kept_dq", "kept_dk", "dq", "dk")]
    assert kept == [2 * 65536 * 768] * 4 and not plan.wider
    assert by_name["accumulators"] == 4 * (65536 + plan.panel_rows) * 768
    assert plan.predicted_peak_bytes <= 640_000_000


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("layout", ["expanded", "constant", "strided", "overlapping", "transposed"])
def test_strides_that_no_matrix_product_reads_cost_no_memory(layout: str, dtype: str) -> None:
    """A panel of such features is copied in parts, into scratch that is planned anyway."""
    rows, dim, size = 300, 200, 4 if dtype == "fp32" else 8
    budget = (2 * rows * dim + 2 * 64 * 128 + 100 * rows) * size
    package = infcl_gen.load(target="cpu", batch_size=rows, dim=dim, dtype=dtype, memory_budget=budget)
    base = torch.randn(2 * rows, 2 * dim, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    features = {
        "expanded": base[:1, :dim].expand(rows, dim),
        "constant": base[:rows, :1].expand(rows, dim),
        "strided": base[::2, ::2],
        "overlapping": base.view(-1).as_strided((rows, dim), (dim // 2, 1)),
        "transposed": base[:rows, :dim].T.contiguous().T,
    }[layout]
    keys = features.flip(0) if layout == "transposed" else features
    plain = package.loss_and_grads(features.contiguous(), keys.contiguous(), 0.1)
    ours: list[Any] = []
    measured = measured_peak_bytes(lambda: ours.extend(package.loss_and_grads(features, keys, 0.1)))
    assert measured <= package.SPEC["predicted"]["peak_bytes"] <= budget
    error = 1e-5 if size == 4 else 1e-13  # dscale of rows that are all equal is a sum that vanishes
    for value, expected, unit in zip(ours, plain, (1.0, 1.0, 1.0, dim, 1.0), strict=True):
        torch.testing.assert_close(value / unit, expected / unit, rtol=1e-4, atol=error)


SMALL_PANELS = {"panel_rows": "256", "panel_keys": "256"}


@pytest.mark.parametrize(
    ("loss", "dtype", "keys", "panels"),
    nightly(
        [
            ("infonce", "bf16", 512, {"panel_rows": "256"}),
            ("infonce", "bf16", 3000, {}),
            ("infonce", "bf16", 16384, {}),
            ("siglip", "bf16", 3000, {}),
            ("siglip", "bf16", 3000, SMALL_PANELS),
            ("siglip", "fp16", 3000, SMALL_PANELS),
        ],
        [
            ("infonce", "bf16", 512, {"panel_rows": "256"}),
            ("infonce", "bf16", 3000, {}),
            ("siglip", "bf16", 3000, {}),
            ("siglip", "bf16", 3000, SMALL_PANELS),
        ],
    ),
)
def test_unrounded_gradients_under_autocast_take_no_more_than_planned(
    loss: str, dtype: str, keys: int, panels: dict[str, str]
) -> None:
    """Beyond the casts, which are not promised; with few keys for many queries too, in panels of few rows. A backward
    that only multiplies what forward has kept casts nothing.

    Planted: room for the rows of a panel alone; for returned gradients of siglip, or kept ones, in bf16; casts there.
    """
    dim, sizes = 64, {"batch_size": 3000, "keys": keys if loss == "infonce" else None}
    package = infcl_gen.load(target="cpu", loss=loss, **sizes, dim=dim, dtype=dtype, set=panels)
    leaves = [torch.randn(rows, dim).requires_grad_() for rows in (3000, keys)]
    labels = torch.arange(3000) % keys if loss == "infonce" else None
    kept: list[Any] = []

    def forward() -> None:
        with torch.autocast("cpu", DTYPES[dtype]):
            kept.append(package.contrastive_loss(*leaves, 3.0, labels=labels))

    def backward() -> None:
        kept.pop().backward()

    def step() -> None:
        forward()
        backward()

    casts, planned = 2 * dim * (3000 + keys), package.SPEC["predicted"]["peak_bytes"]
    step()
    assert [leaf.grad.dtype for leaf in leaves if leaf.grad is not None] == [torch.float32] * 2
    for leaf in leaves:
        leaf.grad = None
    assert measured_peak_bytes(step) <= planned + casts
    if loss == "siglip":
        for leaf in leaves:
            leaf.grad = None
        forward()
        gradients = 4 * dim * (3000 + keys)
        assert measured_peak_bytes(backward) <= gradients + (1 << 16)
        sums = {buffer["name"]: buffer["bytes"] for buffer in package.SPEC["plan"]["buffers"]}
        assert sums["dq"] + sums["dk"] == gradients


def test_a_plan_without_room_for_gradients_of_wider_features_refuses_these() -> None:
    """The smallest budget has none; its plan names the budget that has."""
    flags: dict[str, Any] = {"loss": "siglip", "batch_size": 512, "dim": 64, "dtype": "bf16", "target": "cpu"}
    narrow = infcl_gen.plan(**flags, memory_budget=infcl_gen.plan(**flags).smallest_budget_bytes)
    assert not narrow.wider
    (why,) = [reason.why for reason in narrow.reasons if reason.decision == "features in bf16 alone"]
    (needed,) = (int(word) for word in why.split() if word.isdigit())
    assert infcl_gen.plan(**flags, memory_budget=needed).wider
    assert not infcl_gen.plan(**flags, memory_budget=needed - 1).wider
    package = infcl_gen.load(**flags, memory_budget=narrow.smallest_budget_bytes)
    features = torch.randn(512, 64)
    package.loss_and_grads(features.bfloat16(), features.bfloat16(), 3.0)
    with pytest.raises(ValueError, match=r"q has dtype torch.float32, but the memory budget .* cast it, or generate"):
        package.loss_and_grads(features, features, 3.0)


@pytest.mark.parametrize(
    ("rows", "flags"),
    [
        (4096, {"device_profile": "h200", "dim": 768, "memory_budget": "256MiB"}),
        (1000, {"device_profile": "h200", "dim": 768}),
        (512, {"device_profile": "h200", "dim": 64, "dtype": "fp32", "loss": "infonce", "memory_budget": "64MiB"}),
        (3, {"target": "cpu", "dim": 8, "dtype": "fp64", "memory_budget": "8MiB"}),
    ],
    ids=["256MiB", "auto", "infonce", "cpu"],
)  # fmt: skip
def test_predicted_peak_is_that_of_few_ranks_in_every_larger_world(rows: int, flags: dict[str, Any]) -> None:
    """With as many rows on each rank: the same buffers, to the byte, from two ranks on; where the keys that visit last
    are kept, from four on: three have one buffer less, two have two less. (One rank alone has no visitors.)"""
    for keeps, worlds in (("off", WORLDS), ("on", (4, *WORLDS[2:]))):
        few, *others = (plan_of_ring(rows, world, keeps, flags) for world in worlds)
        for plan in others:
            assert plan.predicted_peak_bytes == few.predicted_peak_bytes
            assert plan.buffers == few.buffers
            assert plan.smallest_budget_bytes == few.smallest_budget_bytes
            assert (plan.rows_per_rank, plan.panel_rows, plan.panel_keys) == (rows, few.panel_rows, few.panel_keys)
    # One more buffer for keys in use, then one for keys in flight.
    slots = [
        Counter(
            {
                buffer.name: buffer.shape[0]
                for buffer in plan_of_ring(rows, world, "on", flags).buffers
                if buffer.phase == "backward" and buffer.name in ("visiting keys", "visiting key statistics")
            }
        )
        for world in (2, 3, 4)
    ]
    visiting = {"visiting keys": 1} | ({"visiting key statistics": 1} if flags.get("loss") != "infonce" else {})
    assert slots[1] - slots[0] == slots[2] - slots[1] == visiting


def plan_of_ring(rows: int, world: int, keeps: str, flags: dict[str, Any]) -> Plan:
    way = {"transport": "ring", "keeps": keeps, "copy_engines": "off"}
    return infcl_gen.plan(batch_size=rows * world, devices=world, **flags, set=way)


@pytest.mark.parametrize(
    ("flags", "rounding"),
    [
        ({"target": "cpu", "dim": 8, "dtype": "fp64"}, 0),
        ({"target": "cpu", "dim": 8, "dtype": "bf16"}, 0),
        (
            {"device_profile": "h200", "dim": 768},
            2 * 512,
        ),  # the CUDA allocator's unit, for each of two buffers that are no multiple of it
    ],
    ids=["cpu-fp64", "cpu-bf16", "h200"],
)
def test_predicted_peak_is_linear_in_the_own_rows(flags: dict[str, Any], rounding: int) -> None:
    # As they are for any number of rows; fewer than 2 080 have smaller tiles.
    panel = (("panel_rows", "1024"), ("panel_keys", "1024"), ("transport", "ring"))
    strategy = () if "target" in flags else (("strategy", "panel"),)

    def plan(panels: int) -> Plan:
        return infcl_gen.plan(batch_size=8 * 1024 * panels, devices=8, settings=panel + strategy, **flags)

    peaks = [plan(panels).predicted_peak_bytes for panels in range(3, 11)]
    steps = [more - less for less, more in itertools.pairwise(peaks)]
    assert min(steps) > 0 and max(steps) - min(steps) <= rounding, steps


def test_a_rank_allocates_the_same_in_every_world() -> None:
    """One rank of the real runtime, with 64 rows, in rings of up to 65 536; at most 128 others hold keys (of as many
    rows), so that a hop costs 0.01 ms. On the host each rank knows the sizes of all: 24 bytes per rank."""
    rows, dim, most = 64, 8, WORLDS[-1]
    package = infcl_gen.load(target="cpu", batch_size=rows * most, devices=most, dim=dim, dtype="fp64")
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    peaks = []
    for world in WORLDS:
        every = max(1, world // 128)
        ring = Echo([rows if rank % every == 0 else 0 for rank in range(world)])
        with ring.attached(package):
            package.loss_and_grads(q, k, 3.0)  # the constants of the first call stay
            measured = measured_peak_bytes(lambda: package.loss_and_grads(q, k, 3.0))
        peaks.append(measured - 24 * world)
    assert len(set(peaks)) == 1, dict(zip(WORLDS, peaks, strict=True))
    assert peaks[0] <= package.SPEC["predicted"]["peak_bytes"]


RINGS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16", "set": {}},
    "small panels": {"dtype": "bf16", "set": {"panel_rows": "128", "panel_keys": "128"}},
    "fp64": {"dtype": "fp64", "set": {}},
    "infonce": {"dtype": "fp32", "loss": "infonce", "set": {}},
    "siglip": {"dtype": "bf16", "loss": "siglip", "set": {}},
    "siglip fp32": {"dtype": "fp32", "loss": "siglip", "set": {}},
}
KEEPING = [kind for kind in RINGS if not kind.startswith("siglip")]  # whose backward has use for keys
# Where the keys of the last hops are kept two, three and more ranks have other buffers.
RINGS_OF_CI = [
    *itertools.product(["bf16"], [2, 3, 4], ["on", "off"]),
    *itertools.product(["small panels"], [4], ["on", "off"]),
    *[("fp64", 4, "on"), ("infonce", 4, "off"), ("siglip", 2, "off"), ("siglip fp32", 3, "off")],
]


@pytest.mark.parametrize(
    ("kind", "world", "keeps"),
    nightly(
        [
            *itertools.product(KEEPING, [2, 3, 4, 8], ["on", "off"]),
            *itertools.product(["siglip", "siglip fp32"], [2, 3, 4, 8], ["off"]),
        ],
        RINGS_OF_CI,
    ),
)
def test_a_ring_allocates_what_is_planned(kind: str, world: int, keeps: str) -> None:
    """One rank of the real runtime; what it sends comes back."""
    rows, dim, flags = 600, 128, RINGS[kind]
    flags = flags | {"set": {"transport": "ring", "keeps": keeps} | flags["set"]}
    package = infcl_gen.load(target="cpu", batch_size=rows * world, devices=world, dim=dim, **flags)
    assert package.SPEC["plan"]["schedule"]["keeps"] == (keeps == "on")
    predicted = package.SPEC["predicted"]["peak_bytes"]
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, dim, generator=generator).to(DTYPES[flags["dtype"]]).requires_grad_() for _ in range(2))
    with Echo([rows] * world, package.ContrastiveLoss._package.table).attached(package):
        package.contrastive_loss(q, k, 3.0).backward()
        measured = measured_peak_bytes(lambda: package.contrastive_loss(q, k, 3.0).backward())
    assert measured <= predicted + 24 * world <= 1.1 * measured


@pytest.mark.parametrize(("world", "keys"), [(2, 16), (3, 24)])
def test_sums_that_leave_are_alive_beside_the_gradients_of_queries(world: int, keys: int) -> None:
    """Few keys for the rows, in the least memory: the gradients are written where the step takes the most.

    Planted: two sums for keys there, for the own part, what comes home and what leaves.
    """
    rows, dim = 64, 4096
    flags: dict[str, Any] = {
        "target": "cpu", "loss": "siglip_multi", "batch_size": rows * world, "keys": keys * world, "devices": world,
        "dim": dim, "dtype": "bf16", "set": {"transport": "ring"},
    }  # fmt: skip
    package = infcl_gen.load(**flags, memory_budget=infcl_gen.plan(**flags).smallest_budget_bytes)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, dim, generator=generator).bfloat16().requires_grad_() for n in (rows, keys))
    scale, ids = torch.tensor(3.0, requires_grad=True), {"query_ids": torch.arange(rows), "key_ids": torch.arange(keys)}
    with Echo([rows] * world, package.ContrastiveLoss._package.table, keys=[keys] * world).attached(package):
        measured = measured_peak_bytes(lambda: package.contrastive_loss(q, k, scale, **ids).backward())
    assert measured <= package.SPEC["predicted"]["peak_bytes"] <= 1.1 * measured


ANEW = [("ntxent", "bf16", 3), ("ntxent", "fp32", 8), ("mil_nce", "bf16", 3), ("mil_nce_multi", "bf16", 3)]


@pytest.mark.parametrize(
    ("of", "transport"),
    nightly(
        itertools.product(ANEW, ["ring", "gather"]),
        [(ANEW[0], "ring"), (ANEW[0], "gather"), (ANEW[2], "ring"), (ANEW[3], "ring"), (ANEW[3], "gather")],
    ),
)
def test_what_goes_out_anew_takes_what_is_planned(of: tuple[str, str, int], transport: str) -> None:
    """Rows with their statistics of a loss of one side, or renewed statistics of keys: one rank of the real runtime;
    what it sends comes back."""
    (loss, dtype, world), rows, dim = of, 600, 128
    flags: dict[str, Any] = {"batch_size": rows * world, "devices": world, "dim": dim, "set": {"transport": transport}}
    package, generator = infcl_gen.load(target="cpu", loss=loss, dtype=dtype, **flags), torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, dim, generator=generator).to(DTYPES[dtype]).requires_grad_() for _ in range(2))
    sides = (q, None) if loss == "ntxent" else (q, k)
    ids = torch.arange(rows)
    more = {"query_ids": ids, "key_ids": ids} if loss == "mil_nce_multi" else {}
    with Echo([rows] * world, package.ContrastiveLoss._package.table).attached(package):
        package.contrastive_loss(*sides, 3.0, **more).backward()
        q.grad = k.grad = None
        measured = measured_peak_bytes(lambda: package.contrastive_loss(*sides, 3.0, **more).backward())
    predicted = package.SPEC["predicted"]["peak_bytes"]
    assert measured <= predicted + 24 * world <= 1.1 * measured


GATHERS = [{"dtype": "bf16"}, {"dtype": "fp64", "memory_budget": "48MiB"}, {"dtype": "fp32", "loss": "infonce"}]


@pytest.mark.parametrize(("flags", "world"), combined(GATHERS, [2, 3, 8]))
def test_a_gather_allocates_what_is_planned(flags: dict[str, Any], world: int) -> None:
    """One rank of the real runtime; what it sends comes back."""
    rows, dim = 600, 128
    flags = {"batch_size": rows * world, "devices": world, "dim": dim, "set": {"transport": "gather"}} | flags
    package = infcl_gen.load(target="cpu", **flags)
    assert package.SPEC["plan"]["schedule"]["transport"] == "gather"
    predicted = package.SPEC["predicted"]["peak_bytes"]
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, dim, generator=generator).to(DTYPES[flags["dtype"]]).requires_grad_() for _ in range(2))
    scale = torch.tensor(3.0, requires_grad=True)
    with Echo([rows] * world).attached(package):
        package.contrastive_loss(q, k, scale).backward()  # the constants of the first call stay
        q.grad = k.grad = scale.grad = None
        measured = measured_peak_bytes(lambda: package.contrastive_loss(q, k, scale).backward())
    assert measured <= predicted <= 1.1 * measured


def test_rows_are_planned_as_the_runtime_takes_them() -> None:
    """The planner runs without torch, which the runtime imports. A strip's fp64 rows are two of fp32 each."""
    assert (memory.MEAN_ROWS, memory.MEAN_STRIP) == (means.EACH, 2 * means.STRIP_ROWS)
    assert (memory.SCALED_ROWS, memory.FACTOR_ROOM) == (scaled.STRIP_ROWS, renormalised.TILE_ROWS)
