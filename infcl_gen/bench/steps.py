"""What is run: features, one forward and backward of a loss on them, and the bare products that a plan needs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from infcl_gen.bench.point import ROUNDED, Point
from infcl_gen.bench.timing import SEED
from infcl_gen.kernels.choice import SPLIT_TERMS
from infcl_gen.verification.properties import DTYPES

Step = Callable[[], tuple[Any, ...]]
LossFunction = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What everybody computes with: q (M, D), k (N, D), a 0-dim scale, all asking for gradients; labels (M,) int64.

    `directions` is 2 for clip, where M = N and labels are 0, 1, ..., M - 1; and 1 for infonce. `dtype` is what products
    are computed in: that of q and k, unless everybody runs under autocast.
    """

    q: Any
    k: Any
    scale: Any
    labels: Any
    directions: int
    dtype: Any

    @property
    def leaves(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.scale


def inputs_of(point: Point, queries: int, keys: int, rank: int = 0) -> Inputs:
    """Unit-norm random features for so many rows, the same on every run and others on each rank."""
    drawn = point.dtype if point.feature_dtype == ROUNDED else point.feature_dtype
    q, k = (features(rows, point.dim, drawn, seed, point.device) for seed, rows in enumerate((queries, keys), 2 * rank))
    if point.feature_dtype == ROUNDED:
        q, k = (x.detach().float().requires_grad_() for x in (q, k))
    dtype = DTYPES[point.dtype]
    wide = torch.promote_types(dtype, torch.float32)
    scale = torch.tensor(point.scale, dtype=wide, device=point.device, requires_grad=True)
    labels = torch.arange(queries, device=point.device) % keys
    return Inputs(q, k, scale, labels, 1 if point.loss == "infonce" else 2, dtype)


def features(rows: int, dim: int, dtype: str, seed: int, device: str = "cuda") -> Any:
    """Random features of unit norm that ask for gradients; the same on every run."""
    generator = torch.Generator(device).manual_seed(SEED + seed)
    found = torch.empty(rows, dim, dtype=DTYPES[dtype], device=device)
    wide = torch.promote_types(DTYPES[dtype], torch.float32)
    for part in found.split(1 << 16):  # the fp32 numbers of four million rows would not fit beside them
        drawn = torch.randn(len(part), dim, generator=generator, device=device, dtype=wide)
        part.copy_(torch.nn.functional.normalize(drawn, dim=1))
    return found.requires_grad_()


def training_step(module: ModuleType, q: Any, k: Any, temperature: Any, autocast: Any = None) -> Step:
    """One forward and backward of a package, as training runs it: (loss, dq, dk, dscale). `autocast`: to this dtype."""
    needs_labels = module.SPEC["positives"] == "label" and len(q) > len(k)
    labels = torch.arange(len(q), device=q.device) % len(k) if needs_labels else None
    return step_of(lambda: module.contrastive_loss(q, k, temperature, labels=labels), q, k, temperature, autocast)


def step_of(loss_function: LossFunction, q: Any, k: Any, temperature: Any, autocast: Any = None) -> Step:
    """One forward and backward of any loss of q, k and the temperature: (loss, dq, dk, its own), as `training_step`."""

    def step() -> tuple[Any, ...]:
        q.grad = k.grad = temperature.grad = None
        with torch.autocast(q.device.type, autocast) if autocast else contextlib.nullcontext():
            loss = loss_function()
        loss.backward()
        return loss.detach(), q.grad, k.grad, temperature.grad

    return step


def bare_products(plan: dict[str, Any], q: Any, k: Any) -> Step:
    """The library's products that a plan needs, panel by panel: z twice (once where a stash keeps it), dq and dk.

    fp32 features that the plan splits are as deep, and as often multiplied, as their halves are.
    """
    m, n = len(q), len(k)
    rows, keys = min(plan["panel_rows"], m), min(plan["panel_keys"], n)
    if plan["strategy"] == "fused":
        rows = keys = min(16384, m, n)
    kept = min(plan["stash_rows"], m)
    terms = SPLIT_TERMS if plan["split"] else 1
    if plan["split"]:
        q, k = (x.bfloat16().repeat(1, SPLIT_TERMS) for x in (q, k))
    # The library returns fp32 sums of half-precision features on a GPU; elsewhere what it is given.
    wide: dict[str, Any] = {"out_dtype": torch.float32} if q.is_cuda and q.element_size() == 2 else {}
    sums = wide.get("out_dtype", q.dtype)

    def run() -> tuple[Any, ...]:
        z = torch.empty(rows * keys, dtype=q.dtype, device=q.device)
        dq, dk = (torch.zeros(n, q.shape[1] // terms, dtype=sums, device=q.device) for n in (rows, keys))
        for row0, key0 in itertools.product(range(0, m, rows), range(0, n, keys)):
            a, b = q[row0 : row0 + rows], k[key0 : key0 + keys]
            g = z[: len(a) * len(b)].view(len(a), len(b))
            for _ in range(1 if row0 < kept else 2):
                torch.mm(a, b.T, out=g)
            for total, left, right in ((dq[: len(a)], g, b), (dk[: len(b)], g.T, a)):
                for term in right.split(total.shape[1], 1):
                    torch.addmm(total, left, term, out=total, **wide)
        return (dq, dk)

    return run
