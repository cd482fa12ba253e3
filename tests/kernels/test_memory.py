"""The memory plan of kernels against what their schedule allocates: on the CPU, where launches do nothing.

What is planned counts here without the slack of a GPU's allocator, and without the matrix library's workspace.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.verification.properties import DTYPES
from tests.kernels.packages import Made, module
from tests.kernels.worker import Interpreter
from tests.planning.test_memory import measured_peak_bytes
from tests.runtime.in_process import Echo
from tests.tiers import nightly

SIDES = ("query", "key")
ROWS = 2500  # no multiple of any block
SLACK_BYTES = 66 << 10  # 32 KiB are planned for scalars; partial sums of dscale and flags are of backward alone


def made(strategy: str, loss: str = "clip", dtype: str = "bf16", dim: int = 96, **more: Any) -> Made:
    settings = {"replay": "off"} | more.pop("settings", {})
    if more.get("devices", 1) > 1:  # mailboxes are not torch's allocator's
        settings["copy_engines"] = "off"
    return Made(strategy, loss, dtype, dim, ROWS, small=False, settings=tuple(settings.items()), **more)


def planned_bytes(buffers: list[dict[str, Any]]) -> tuple[int, int]:
    """Of a forward alone, and of a step."""
    sums = dict.fromkeys(("both", "forward", "backward", "finish"), 0)
    for buffer in buffers:
        sums[buffer["phase"]] += buffer["bytes"] * (buffer["name"] != "workspace")
    both = sums.pop("both")
    return both + sums["forward"], both + max(sums.values())


def features(made: Made, rows: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sides = {"query": rows, "key": keys}.items()
    return [torch.zeros(n, made.dim, dtype=dtype).requires_grad_(side != made.frozen) for side, n in sides]


def check_step(made: Made) -> None:
    """Of features in the package's dtype, or of wider ones beyond their casts, where the plan has room for them."""
    package = module(made)
    package._schedule.launch = lambda *arguments, **options: None
    rows, dtype, plan = made.rows // made.devices, DTYPES[made.dtype], package.SPEC["plan"]
    found = []
    with Echo([rows] * made.devices).attached(package) if made.devices > 1 else contextlib.nullcontext():
        for wider in (False, True)[: 1 + plan["wider"]]:
            q, k = features(made, rows, rows, torch.float32 if wider else dtype)
            casts = 2 * dtype.itemsize * rows * made.dim if wider else 0
            found.append([measured - casts for measured in peaks(package, q, k, dtype if wider else None)])
    for name, measured, bound in zip(
        ("forward", "step"), map(max, *found, (0, 0)), planned_bytes(plan["buffers"]), strict=True
    ):
        assert bound - SLACK_BYTES <= measured <= bound, (name, measured, bound, measured - bound)


def peaks(package: ModuleType, q: torch.Tensor, k: torch.Tensor, autocast: torch.dtype | None) -> tuple[int, int]:
    """Of a forward alone, and of a step."""
    scale, kept = torch.tensor(3.0, requires_grad=True), []
    casting = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    how = {"reduction": "none"} if package._package.traits.per_row else {}  # whose backward has more to keep

    def forward() -> torch.Tensor:
        with casting:
            loss: torch.Tensor = package.contrastive_loss(q, k, scale, **how)
        return loss.sum() if how else loss

    forward().backward()  # the constants of the first call stay
    q.grad = k.grad = scale.grad = None
    alone = measured_peak_bytes(lambda: kept.append(forward()))
    kept.clear()
    return alone, measured_peak_bytes(lambda: forward().backward())


def check_wider_features(made: Made, keys: int) -> None:
    """fp32 features under autocast, beyond their casts: within the plan of a rank's rows and so many keys, in both
    passes."""
    with Echo([made.rows // 2] * 2).attached(module(made)) if made.devices == 2 else contextlib.nullcontext():
        check_passes(made, made.rows // made.devices, keys)


def check_passes(made: Made, rows: int, keys: int) -> None:
    package = module(made)
    package._schedule.launch = lambda *arguments, **options: None
    q, k = features(made, rows, keys, torch.float32)
    labels = torch.zeros(rows, dtype=torch.int64) if package._package.traits.labels else None
    kept: list[Any] = []

    def forward() -> None:
        with torch.autocast("cpu", DTYPES[made.dtype]):
            kept.append(package.contrastive_loss(q, k, 3.0, labels=labels))

    settings = dict(made.settings) | {"strategy": made.strategy}
    total = keys * made.devices if labels is not None else None
    flags = {"loss": made.loss, "keys": total, "devices": made.devices, "device_profile": made.profile}
    flags["frozen"] = made.frozen
    plan = infcl_gen.plan(batch_size=made.rows, dim=made.dim, dtype=made.dtype, **flags, set=settings)
    buffers = [buffer for buffer in plan.buffers if buffer.name != "workspace"]
    forward_bytes, _ = planned_bytes([buffer._asdict() for buffer in buffers])
    behind = [buffer for buffer in buffers if buffer.phase in ("both", "backward")]
    held = sum(buffer.bytes for buffer in behind)
    forward()  # the constants of the first call stay
    kept.pop().backward()
    q.grad = k.grad = None
    first = measured_peak_bytes(forward) - 2 * made.dim * (rows + keys)
    assert first <= forward_bytes, (first, forward_bytes)
    saved = sum(buffer.bytes for buffer in behind if buffer.name in ("kept_dq", "kept_dk", "wider_gradients"))
    second = measured_peak_bytes(lambda: kept.pop().backward()) + saved
    assert held - SLACK_BYTES <= second <= held, (second, held)


def check_loss_parts(rows: int) -> None:
    """So many rows that the partial sums of the loss take more than its scalars."""
    package = module(made("panel"))
    package._schedule.launch = lambda *arguments, **options: None
    statistics, positive = package._runtime.statistics.Statistics(*torch.zeros(2, rows)), torch.zeros(3, rows)
    one, x = torch.ones(()), torch.empty(rows, 0)
    block = package._runtime.package.Block(x, x, one, one, 0, 0, statistics, statistics, positive)
    loss = lambda: package._schedule.loss_terms(block, 1.0)  # noqa: E731
    plan = infcl_gen.plan(batch_size=rows, dim=96, device_profile="h200", set={"strategy": "panel"})
    (planned,) = (buffer.bytes for buffer in plan.buffers if buffer.name == "loss_parts")
    measured = measured_peak_bytes(loss)
    assert planned <= measured <= planned + 64, (planned, measured)


def check_ratios(made: Made) -> None:
    """By themselves: the slack of a step is larger than what is kept for each block."""
    package = module(made)
    (planned,) = (buffer["bytes"] for buffer in package.SPEC["plan"]["buffers"] if buffer["name"] == "ratios")
    assert package._schedule._ratios_scratch(ROWS, "cpu").nbytes == planned


@pytest.mark.parametrize(
    "case",
    [
        made("panel"),
        made("panel", "infonce", dim=100),
        made("panel", dtype="fp32", dim=100),  # split into halves
        made("panel", dtype="fp32", precision="exact"),
        made("panel", settings={"panel_keys": "1024", "panel_rows": "640"}),
        made("panel", dtype="fp16", profile="mi300x"),
        made("panel", devices=2, settings={"transport": "ring"}),
        made("panel", devices=2, settings={"transport": "gather"}),
        made("panel", "siglip", devices=2, settings={"transport": "ring"}),
        made("fused"),
        made("fused", "infonce", dtype="fp16"),
        made("fused", devices=2, settings={"transport": "ring", "keeps": "off"}),
        made("stash"),
        made("rows", "infonce"),
        made("panel", "smooth_clip"),
        *(
            Made("panel", f"{loss}_prefixes", "bf16", 48, ROWS, small=False)
            for loss in ("clip", "infonce", "clip_cosines")
        ),
        Made("panel", "clip_cosines_prefixes_of_rows", "bf16", 48, ROWS, small=False),
        made("rows", "smooth", devices=2, settings={"transport": "gather", "panel_rows": "1280"}),
        made("panel", "smooth", devices=2, settings={"transport": "ring"}),
        made("rows", "infonce", settings={"panel_rows": "512", "replay": "off"}),
        made("rows", "infonce", devices=2, settings={"transport": "gather", "panel_rows": "1280"}),
        made("stash", settings={"panel_rows": "512", "stash_rows": "1024"}),
        *(made("panel", frozen=side) for side in SIDES),
        *(made("panel", "siglip", frozen=side) for side in nightly(SIDES, ["query"])),
        *(made("panel", "siglip", "fp32", frozen=side) for side in nightly(SIDES, ["key"])),
        *(made("panel", devices=2, frozen=side, settings={"transport": "ring"}) for side in nightly(SIDES, ["query"])),
        *(
            made("panel", "siglip", "fp32", devices=2, frozen=side, settings={"transport": "gather"})
            for side in nightly(SIDES, ["key"])
        ),
        *(made("fused", devices=2, frozen=side, settings={"transport": "gather"}) for side in nightly(SIDES, ["key"])),
        *(made("rows", "infonce", frozen=side) for side in SIDES),
        made("rows", "infonce", devices=2, frozen="key", settings={"transport": "gather"}),
    ],
    ids=lambda case: "-".join(
        (case.strategy, case.loss, case.dtype, case.profile, case.frozen, *dict(case.settings).values())
    ),
)  # fmt: skip
def test_a_schedule_allocates_what_is_planned(interpreted: Interpreter, case: Made) -> None:
    interpreted(check_step, case)


FEW = (("panel_rows", "128"), ("gradient.rows", "64"), ("replay", "off"))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        (made("rows", "infonce", settings=dict(FEW)), 128),
        (made("rows", "infonce", settings=dict(FEW)), ROWS),
        (made("rows", "infonce", devices=2, settings=dict(FEW) | {"transport": "gather"}), ROWS // 2),
        (made("panel", "siglip", settings={"panel_rows": "128", "panel_keys": "256"}), ROWS),
        (made("panel", "siglip", dtype="fp16", settings={"panel_rows": "128", "panel_keys": "256"}), ROWS),
        *((made("rows", "infonce", frozen=side, settings=dict(FEW)), ROWS) for side in SIDES),
        (made("rows", "infonce", devices=2, frozen="key", settings=dict(FEW) | {"transport": "gather"}), ROWS // 2),
        (made("rows", "infonce", devices=2, frozen="query", settings=dict(FEW) | {"transport": "gather"}), ROWS // 2),
    ],
    ids=["few keys", "rows", "gather", "siglip", "fp16", *("rows, query", "rows, key", "gather, key", "gather, query")],
)
def test_gradients_of_wider_features_are_planned(interpreted: Interpreter, case: Made, keys: int) -> None:
    """Planted: room in forward for the sums of a row of panels alone; in backward for gradients in bf16."""
    interpreted(check_wider_features, case, keys)


def test_partial_sums_of_the_loss_are_planned(interpreted: Interpreter) -> None:
    interpreted(check_loss_parts, 1 << 20)


@pytest.mark.parametrize("strategy", ["panel", "fused"])
def test_ratios_are_planned(interpreted: Interpreter, strategy: str) -> None:
    """Planted: the two numbers of each block are left out."""
    interpreted(check_ratios, made(strategy))
