"""The self-test of a generated package: small batches on one device against the package's `reference` in fp64."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from . import negatives
from .group import ALONE
from .launch import INTERPRETED
from .package import Options, Package
from .scaled import times_rows

# Queries, keys, scale: one pair, a small tile, ragged tiles, and a temperature at which a fixed reference underflows.
CASES = ((1, 1, 1.0), (2, 2, 1.0), (64, 64, 14.3), (129, 129, 100.0), (100, 127, 14.3))
BIAS = -0.5
SHARED = 3  # rows of one id
FEW = 16  # rows or keys whose largest rounding may decide
ROUNDINGS = 4.0  # of a product or of the statistics dtype, allowed in a result; at most 1.0 is measured
TF32_ROUNDOFF = 2.0**-10  # tensor cores cut operands to 10 mantissa bits
SPLIT_ROUNDOFF = 2.0**-16  # of a product of bf16 halves: operands are cut at 2^-18, low x low is left out


class Results(NamedTuple):
    """The loss (0-dim) and its gradients: dq (M, D), dk (N, D), dscale and dbias (0-dim); None of a frozen side, and of
    no k."""

    loss: Tensor
    dq: Tensor
    dk: Any
    dscale: Tensor
    dbias: Tensor


def compared(*results: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The name of each quantity, and its value in each of some results; without those that the first has not."""
    for name, *values in zip(Results._fields, *results, strict=True):
        if values[0] is not None:
            yield name, *values


def selftest(package: Package, device: torch.device, loss_and_grads: Callable[..., Any]) -> dict[str, Any]:
    """The report of a package's `selftest`; `loss_and_grads` is that of api.py."""
    cases: list[dict[str, Any]] = []
    repeatable = True
    for rows, keys, scale in CASES:
        keys = rows if package.traits.paired else keys
        if package.traits.triangle:  # two views of each sample
            rows = keys = rows + rows % 2
        if rows > package.batch_size or keys > package.key_count:
            continue
        if keys == 1 + package.traits.triangle and package.traits.without_positives:  # a sum of nothing
            continue
        generator = torch.Generator().manual_seed(rows)
        random = (
            torch.randn(n, package.dim, generator=generator, dtype=torch.float64, device="cpu") for n in (rows, keys)
        )
        q, other = (torch.nn.functional.normalize(x, dim=1).to(device, package.dtype) for x in random)
        k = None if package.traits.triangle else other
        rest = None, *_ids(package, q, k), *_guides(package, q, k).values(), Options(ALONE)
        first, second = (
            Results(*loss_and_grads(package, q, k, scale, BIAS, _passed(package, q, k), *rest)) for _ in range(2)
        )
        repeatable &= all(torch.equal(a, b) for _, a, b in compared(first, second))
        errors, allowed = _errors(package, first, q, k, scale)
        ok = all(errors[name] <= allowed[name] for name in errors)
        cases.append({"rows": rows, "keys": keys, "scale": scale, "ok": ok, "errors": errors, "allowed": allowed})
    return {
        "ok": repeatable and all(case["ok"] for case in cases),
        "package": package.name,
        "device": str(device),
        "dtype": str(package.dtype).removeprefix("torch."),
        "repeatable": repeatable,
        "cases": cases,
    }


def _ids(package: Package, q: Tensor, k: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Ids of q and k, each of SHARED neighbours, beyond 32 bits; None where the loss has none, and of no k."""
    if not package.traits.ids:
        return None, None
    query_ids, key_ids = (None if x is None else torch.arange(len(x), device=x.device) // SHARED << 31 for x in (q, k))
    return query_ids, key_ids


def _guides(package: Package, q: Tensor, k: Tensor | None) -> dict[str, Tensor | None]:
    """Keywords of a guide's features: those of q and k, read backwards, twice or, for weights that are to be above 0,
    by half."""
    names, factor = ("guide_queries", "guide_keys"), 0.5 if package.traits.weighted else 2
    if not package.traits.guided or k is None:
        return dict.fromkeys(names)
    return {name: factor * x.flip(1) for name, x in zip(names, (q, k), strict=True)}


def _passed(package: Package, q: Tensor, k: Tensor | None) -> tuple[Tensor | None, ...]:
    """What a call passes of numbers of single rows."""
    given = _vectors(package, q) | _scales(package, q, k)
    names = ("query_weight", "key_weight", "negatives", "query_state", "key_state", "query_scale", "key_scale")
    return tuple(given.get(name) for name in names)


def _vectors(package: Package, q: Tensor) -> dict[str, Tensor]:
    """Keywords of own numbers: weights up to 1, those of keys the other way round, another query and the query itself
    read backwards, and states below 0 that the first queries, and the last keys, do not have yet. A call overwrites
    the states."""
    weights = torch.arange(1, len(q) + 1, device=q.device, dtype=torch.float64) / len(q)
    state = torch.where(weights < 0.2, -math.inf, -weights)
    weights_of_both = {"query_weight": weights, "key_weight": weights.flip(0)}
    states = {"query_state": state, "key_state": state.flip(0)}
    further = torch.stack((q.roll(1, 0), q.flip(1)), 1)[: negatives.shape(package.traits.partnered, q)[0]]
    found = weights_of_both | {"negatives": further} | states
    return {name: found[name] for name in package.traits.vectors}


def _scales(package: Package, q: Tensor, k: Tensor | None) -> dict[str, Tensor]:
    """Keywords of numbers that multiply rows of features: 1 and 1/2, by which no product is rounded."""
    found = {}
    for name, x in (("query_scale", q), ("key_scale", k)):
        if name in package.traits.scaled and x is not None:
            found[name] = 1 / (1 + torch.arange(len(x), device=x.device, dtype=torch.float64) % 2)
    return found


def _scaled(package: Package, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """q and k times these."""
    found = _scales(package, q, k)
    if "query_scale" in found:
        q = times_rows(q, found["query_scale"])
    return q, times_rows(k, found["key_scale"]) if k is not None and "key_scale" in found else k


def product_roundoff(dtype: torch.dtype, tf32: bool, split: bool) -> float:
    """Relative error of an operand in a matrix product, beyond the rounding of the features."""
    if dtype == torch.float32 and tf32:
        return TF32_ROUNDOFF
    return SPLIT_ROUNDOFF if split else torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2


def _errors(
    package: Package, found: Results, q: Tensor, k: Tensor | None, scale: float
) -> tuple[dict[str, float], ...]:
    """Relative norm errors of the `Results`, and the largest allowed ones.

    Allowed are twice the error of dense torch in the statistics dtype, twice what the features' dtype rounds
    (`_rounded`), ROUNDINGS of a product, and the rounding of the products in the logits, whose terms are about
    scale / sqrt(D). A query's term may grow as e^x: its relative error is that of x, which is as large as `scale`.
    """
    exact = _dense(package, q, k, scale, torch.float64)
    plain = _dense(package, q, k, scale, package.schedule.STATISTICS_DTYPE)
    scaled_q, scaled_k = _scaled(package, q, k)
    rounded = _rounded(package, exact, scaled_q, scaled_k, scale)
    product = 2.0 * product_roundoff(package.dtype, package.product_precision == "tf32", package.split)
    terms = scale if package.traits.combined else scale / math.sqrt(package.dim)
    errors, allowed = {}, {}
    roundings = ROUNDINGS * (1 + 2 * package.traits.columns_of_ids)  # positives have parts of three softmaxes
    for name, value, truth, nearly in compared(found, exact, plain):
        size = float(torch.linalg.vector_norm(truth))
        if name == "dscale":  # terms of either sign: relative to the sum of their absolute values
            size = float((q.double() * exact.dq).abs().sum()) / scale
        elif name == "dbias":
            size = (
                float(_gradients_of_logits(package, scaled_q, scaled_k, scale)[1].abs().sum())
                if package.traits.sums_slopes
                else 0.0
            )
        elif name == "loss" and (package.traits.combined or package.traits.weighted):
            size = max(size, 1.0)  # a sum and a positive that it leaves out may cancel, as may a sum and a mean
        size = size or 1.0  # one pair has no gradients
        errors[name] = _distance(value, truth) / size
        unavoidable = _distance(nearly, truth) + rounded.get(name, 0.0)
        allowed[name] = 2.0 * unavoidable / size + (roundings + terms) * product
    return errors, allowed


def _rounded(package: Package, exact: Results, q: Tensor, k: Tensor | None, scale: float) -> dict[str, float]:
    """Norms of the error in dq, dk and dscale where g, the gradient of the similarities, is rounded to the features'
    dtype, and then dq and dk. Kept tiles are rounded, too. The loss and dbias stay in the statistics dtype.

    Roundings of different elements are independent, so that their squares add up, in long norms to a third of the
    largest at most. Triton's interpreter cuts bf16 instead of rounding. Its errors then have the sign of g: those of
    positives add up, and those of all other pairs.
    """
    found: dict[str, float] = {}
    if package.traits.slabs:  # the g of a slab is the sum of those of its prefixes
        alone = dataclasses.replace(package, traits=dataclasses.replace(package.traits, slabs=()))
        for columns, weight in zip(package.traits.prefixes, package.loss.PREFIX_WEIGHTS, strict=True):
            own, others = q[:, :columns], None if k is None else k[:, :columns]
            if package.traits.renormalised and others is not None:
                # What rows lose along themselves has the errors of their sums, too.
                over = {f"d{name}": 2 / float(x.norm(dim=1).min()) for name, x in (("q", own), ("k", others))}
                part = _rounded(alone, exact, normalize(own, dim=1), normalize(others, dim=1), scale)
                part = {name: value * over.get(name, 1.0) for name, value in part.items()}
            else:
                part = _rounded(alone, exact, own, others, scale)
            found = {name: found.get(name, 0.0) + weight * value for name, value in part.items()}
        return found
    k, given = q if k is None else k, k
    rows, keys = q.shape[0], k.shape[0]
    unit, typical = torch.finfo(package.dtype).eps / 2, math.sqrt(3) if min(rows, keys) > FEW else 1.0
    times = 2 if package.rows or package.schedule.stash_shape(rows, keys) else 1
    q, k = q.double(), k.double()
    g, _ = _gradients_of_logits(package, q, None if given is None else k, scale)
    if package.traits.means:  # is added to rounded gradients, with which it may cancel
        g = g - package.loss.MEAN_SHARE * package.loss.gradient_factor(scale, BIAS) / g.numel()
    if package.traits.weighted:
        found_guides = _guides(package, q.to(package.dtype), k.to(package.dtype)).values()
        u, v = (each.double() for each in found_guides if each is not None)
        weights = package.loss.WEIGHT[0] + package.loss.WEIGHT[1] * (u @ v.T)
        shares = weights / weights.sum(1, keepdim=True) / len(q)
        g = g - package.loss.MEAN_SHARE * package.loss.gradient_factor(scale, BIAS) * shares
    squares, z, parts = g.square(), q @ k.T, []
    if INTERPRETED and package.dtype == torch.bfloat16:
        others = g.clone()
        others[_are_positive(package, q, given)] = 0.0
        parts = [g - others, others]
    total = torch.linalg.vector_norm(g * z) + sum((part * z).sum().abs() for part in parts) / typical
    found["dscale"] = unit * times * float(total) / scale
    sides = [("dq", squares, k, parts), ("dk", squares.T, q, [part.T for part in parts])]
    for name, squared, other, cut in sides if given is not None else sides[:1]:
        # What own negatives add to dq is rounded on its own, and so is the sum.
        parts_of = 3 if name == "dq" and "negatives" in package.traits.vectors else 1
        spread = (squared @ other.square()).sum().sqrt() * times
        spread += torch.linalg.vector_norm(getattr(exact, name)) * parts_of
        spread += sum(torch.linalg.vector_norm(part @ other) for part in cut)
        found[name] = unit / typical * float(spread)
    return found


def _own_positives(package: Package, rows: int) -> Tensor:
    """The positive of each query without labels."""
    return torch.arange(rows, device="cpu").roll(rows // 2 if package.traits.triangle else 0)


def _are_positive(package: Package, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor] | Tensor:
    """An index of the pairs that are a query and its positive."""
    rows = len(q)
    if package.traits.by_guide:
        return torch.zeros(rows, rows if k is None else len(k), dtype=torch.bool, device="cpu")
    if not package.traits.several:
        return torch.arange(rows, device="cpu"), _own_positives(package, rows)
    query_ids, key_ids = _ids(package, q, k)
    assert query_ids is not None
    return query_ids[:, None] == (query_ids if key_ids is None else key_ids)


def _gradients_of_logits(package: Package, q: Tensor, k: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """dL/dz and dL/dx * dx/dbias of each pair, (M, N) in fp64; of a triangle dL/dz_ij + dL/dz_ji."""
    z = (q.double() @ (q if k is None else k).double().T).requires_grad_()
    numbers = [torch.tensor(number, dtype=z.dtype, device=z.device) for number in (scale, BIAS)]
    bias = numbers[1].expand_as(z).clone().requires_grad_()
    x = package.loss.logit(z, numbers[0], bias)
    classes = [_own_positives(package, len(q)).to(z.device)] if package.traits.labels else []
    query_ids, key_ids = _ids(package, q, k)
    if query_ids is not None:
        classes.append(query_ids[:, None] == (query_ids if key_ids is None else key_ids))
    guides = [each.double() for each in _guides(package, q.to(package.dtype), k).values() if each is not None]
    if guides:
        classes.append(guides[0] @ guides[1].T)
    own = _vectors(package, q.double())
    if "negatives" in own:
        given = q.double(), own["negatives"], *numbers
        own["negatives"] = negatives.log_sums(package.traits, package.loss, *given)
    taken = inspect.signature(package.loss.loss_of_logits).parameters
    others = {"z": z.detach(), "scale": numbers[0], "bias": numbers[1]}
    rest = {name: each for name, each in others.items() if name in taken}
    value = package.loss.loss_of_logits(x, *classes, *own.values(), **rest)
    of_z, of_bias = torch.autograd.grad(value, (z, bias), materialize_grads=True)
    return (of_z + of_z.T if package.traits.triangle else of_z), of_bias


def _dense(package: Package, q: Tensor, k: Tensor | None, scale: float, dtype: torch.dtype) -> Results:
    """The results of the package's `reference` in `dtype`; unused inputs have gradient 0."""
    numbers = (torch.tensor(number, dtype=dtype, device=q.device) for number in (scale, BIAS))
    leaves: list[Any] = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (q, k, *numbers)]
    query_ids, key_ids = _ids(package, q, k)
    own = _vectors(package, q) | _scales(package, q, k) | _guides(package, q, k)
    loss = package.loss.reference(*leaves, query_ids=query_ids, key_ids=key_ids, **own, dtype=dtype)
    found: Iterator[Any] = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None], materialize_grads=True))
    gradients: list[Any] = [x if x is None else next(found) for x in leaves]
    return Results(loss.detach(), *gradients)


def _distance(value: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double() - truth))
