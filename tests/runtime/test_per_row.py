"""The loss of each query, by reduction="none": values by hand, and gradients for any factor of each, alone and over
ranks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, softplus

import infcl_gen
from infcl_gen.losses import BUILTIN_LOSSES, LossError, LossSpec, derive
from tests.losses.specs import BY_PARTNER, DERIVABLE, OF_ROWS, RATE, SIDES, SMOOTH
from tests.runtime.conftest import copy_with
from tests.runtime.in_process import World, table_of, uninitialised_memory_is_nan
from tests.runtime.test_several import in_panels
from tests.runtime.test_triangle import DIM, features
from tests.tiers import nightly, some

SCALE, BIAS = 7.0, -0.5
IDS = torch.arange(60) // 3
OTHER_IDS = (torch.arange(60) * 7) % 20 + 5 * (torch.arange(60) % 2)  # some queries have no positives
WEIGHT, KEY_WEIGHT = (torch.linspace(-1, 2, 60, dtype=torch.float64).roll(n) for n in (0, 17))
SPECS = {
    **{name: BUILTIN_LOSSES[name] for name in ("infonce", "clip", "rince", "infonce_out", "infonce_in", "ntxent")},
    **{name: BUILTIN_LOSSES[name] for name in ("distill", "supcon_in", "hard_negative")},
    **{name: SMOOTH[name] for name in ("smooth", "smooth_rince")},
    **{name: BUILTIN_LOSSES[name] for name in ("siglip", "siglip_multi")},
    **{
        name: DERIVABLE[name] for name in ("siglip_labels", "siglip_scaled_bias", "siglip_without_ids", "siglip_capped")
    },
    "soft_capped": DERIVABLE["soft_capped"],
    "capped_of_rows": OF_ROWS["capped_of_rows"],
    "weighed_sides": SIDES,
}
PREFIXES = {3: 1.0, 8: 0.5, 12: 2.0}
OVER_PREFIXES = {
    f"{name}_{of}": dataclasses.replace(SPECS[name], prefixes=PREFIXES, renormalise=of == "cosines")  # type: ignore[arg-type]
    for name in ("clip", "infonce")
    for of in ("prefixes", "cosines")
}
SPECS |= OVER_PREFIXES


def by_hand(name: str, x: Tensor, z: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The loss of each query (M,), from all logits and similarities (M, N)."""
    if name in OVER_PREFIXES:
        whole, of = name.split("_")
        parts = []
        for columns, weight in PREFIXES.items():
            q, k = (each[:, :columns] for each in (given["q"], given["k"]))
            z = given["scale"] * (normalize(q, dim=1) @ normalize(k, dim=1).T if of == "cosines" else q @ k.T)
            parts.append(weight * by_hand(whole, z + given["bias"], z, given))
        return torch.stack(parts).sum(0)
    own = torch.arange(len(x))
    p, rows = x.diagonal(), own
    if name in ("ntxent", "supcon_in", "hard_negative", "capped_of_rows"):
        not_itself = rows[:, None] != rows
        x = x.masked_fill(~not_itself, -torch.inf)
        own = given.get("labels", rows.roll(len(rows) // 2))
        p = x[rows, own]
    if name in ("infonce_out", "infonce_in", "supcon_in"):
        ids = given["query_ids"]
        same = (ids[:, None] == given.get("key_ids", ids)) & x.isfinite()
        terms = []
        for logits, positives in zip(x.log_softmax(1), same, strict=True):
            found = logits[positives]
            mean = found.mean() if name == "infonce_out" else found.exp().mean().log()
            terms.append(-mean if len(found) else 0.0 * x.diagonal(1).sum())
        return torch.stack(terms)
    if "siglip" in name:
        same = given["query_ids"][:, None] == given["key_ids"] if "query_ids" in given else None
        bias = given["bias"]
        x = {"siglip_capped": 20 * torch.tanh(z / 20) + bias, "siglip_scaled_bias": z + given["scale"] * bias}.get(
            name, x
        )
        positive = same if name == "siglip_multi" else given.get("labels", own)[:, None] == torch.arange(x.shape[1])
        terms = torch.where(positive, softplus(-x), softplus(x))
        return (terms if name != "siglip_without_ids" else terms * (positive | ~same)).sum(1)
    if name == "rince" or name == "smooth_rince":
        rince = (0.01 * x.exp().sum(1)) ** 0.5 / 0.5 - p.exp() ** 0.5 / 0.5
        return rince - x.mean(1) / 5 if name == "smooth_rince" else rince
    if name == "capped_of_rows":  # the positive's logit is its similarity
        capped = 20 * torch.tanh(z / 20) + given["bias"]
        negatives = capped.masked_fill(~x.isfinite(), -torch.inf).scatter(1, own[:, None], -torch.inf)
        return softplus(negatives.logsumexp(1) - z[rows, own], threshold=100)
    if name == "distill":
        teacher = (given["guide_queries"] @ given["guide_keys"].T).softmax(1)
        return -(teacher * x.log_softmax(1)).sum(1)
    if name == "hard_negative":  # tau_plus = 0.1 and beta = 1
        x, count = x - BIAS, len(x) - 2
        kept = x.scatter(1, own[:, None], -torch.inf)
        weighed = count * (2 * kept).exp().sum(1) / kept.exp().sum(1)
        rest = (weighed - 0.1 * count * (p - BIAS).exp()) / 0.9
        least = count * torch.exp(-given["scale"])
        return torch.log((p - BIAS).exp() + torch.maximum(rest, least)) - (p - BIAS)
    if name == "weighed_sides":
        away = (given["query_ids"][:, None] == given["key_ids"]) & (rows[:, None] != rows)
        x = x.masked_fill(away, -torch.inf)
        of_key = softplus(x.logsumexp(0) - p, threshold=100)
        return given["query_weight"] * (x.logsumexp(1) - p) / 2 + given["key_weight"] * of_key / 3
    if name == "clip":
        return (cross_entropy(x, own, reduction="none") + cross_entropy(x.T, own, reduction="none")) / 2
    if name == "soft_capped":
        x = 30 * torch.tanh(z / 30) + BIAS
    smoothing = 0.1 if name == "smooth" else 0.0
    return cross_entropy(x, own, reduction="none", label_smoothing=smoothing)


@functools.cache
def package(name: str, dtype: str = "fp64") -> ModuleType:
    """In panels of eight rows."""
    loss = dataclasses.replace(SPECS[name], name=name, reduction="none")
    return in_panels(infcl_gen.load(loss=loss, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def drawn(name: str, rows: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Leaves of a call, and its other arguments."""
    traits = derive(SPECS[name]).traits
    leaves: dict[str, Any] = {"q": features(rows, "fp64"), "k": features(rows + 1, "fp64")[1:]}
    if traits.triangle:
        leaves["k"] = None
    leaves |= {"scale": torch.tensor(SCALE), "bias": torch.tensor(BIAS)}
    leaves |= (
        {each: x[:rows] for each, x in (("query_weight", WEIGHT), ("key_weight", KEY_WEIGHT))} if traits.vectors else {}
    )
    leaves = {each: x if x is None else x.double().clone().requires_grad_() for each, x in leaves.items()}
    given = {}
    if traits.ids:
        given = {"query_ids": IDS[:rows]} | ({} if traits.triangle else {"key_ids": OTHER_IDS[:rows]})
    if traits.guided:
        given = {each: 3 * features(rows + n, "fp64")[n:] for n, each in ((2, "guide_queries"), (3, "guide_keys"))}
    return leaves, given


def truth(name: str, leaves: dict[str, Any], given: dict[str, Tensor], factors: Tensor) -> list[Tensor]:
    """The losses, and the gradients of their sum times `factors`."""
    z = leaves["scale"] * leaves["q"] @ (leaves["q"] if leaves["k"] is None else leaves["k"]).T
    losses = by_hand(name, z + leaves["bias"], z, {**given, **leaves})
    wanted = [x for x in leaves.values() if x is not None]
    return [losses.detach(), *torch.autograd.grad(losses, wanted, factors, materialize_grads=True)]


def factors_of(rows: int, seed: int = 0) -> Tensor:
    """Of either sign, some large and some 0."""
    found = torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return found.masked_fill(torch.arange(rows) % 7 == 3, 0.0) * torch.where(torch.arange(rows) % 5 == 0, 100.0, 1.0)


def close(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=atol)


def as_by_hand(name: str, module: ModuleType, rows: int = 30) -> None:
    leaves, given = drawn(name, rows)
    losses = module.contrastive_loss(**leaves, **given, reduction="none")
    wanted = [x for x in leaves.values() if x is not None]
    for seed in range(2):  # twice: what forward has saved stays
        factors = factors_of(rows, seed)
        gradients = torch.autograd.grad(losses, wanted, factors, retain_graph=True)
        close([losses.detach(), *gradients], truth(name, leaves, given, factors))
    mean = module.contrastive_loss(**leaves, **given)
    close(
        [mean.detach(), module.contrastive_loss(**leaves, **given, reduction="sum").detach() / rows],
        [losses.mean().detach()] * 2,
    )
    each = torch.full((rows,), 1 / rows, dtype=torch.float64)
    close(torch.autograd.grad(mean, wanted), truth(name, leaves, given, each)[1:])


@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_loss_of_each_query(name: str) -> None:
    as_by_hand(name, package(name))


def test_a_single_leaf_and_no_gradient_at_all() -> None:
    for name, leaf in itertools.product(("clip", "clip_cosines", "weighed_sides"), ("q", "k", "scale", "key_weight")):
        leaves, given = drawn(name, 30)
        if leaf not in leaves:
            continue
        expected = truth(name, leaves, given, factors_of(30))
        alone = {each: x.detach().requires_grad_(each == leaf) for each, x in leaves.items()}
        losses = package(name).contrastive_loss(**alone, **given, reduction="none")
        (found,) = torch.autograd.grad(losses, alone[leaf], factors_of(30))
        close([found], [expected[1 + [*leaves].index(leaf)]])
    with torch.inference_mode():
        close(
            [
                package("weighed_sides").contrastive_loss(
                    **{each: x.detach() for each, x in leaves.items()}, **given, reduction="none"
                )
            ],
            expected[:1],
        )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_losses_are_of_the_dtype_of_statistics(dtype: str) -> None:
    leaves, given = drawn("clip", 30)
    rounded = {
        each: x.detach().to(getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]))
        for each, x in leaves.items()
        if each in "qk"
    }
    losses = package("clip", dtype).contrastive_loss(
        *(x.requires_grad_() for x in rounded.values()), SCALE, BIAS, reduction="none"
    )
    exact = {**leaves, **{each: x.detach().double().requires_grad_() for each, x in rounded.items()}}
    expected = truth("clip", exact, given, factors_of(30))
    assert losses.shape == (30,) and losses.dtype == torch.float32
    found = torch.autograd.grad(losses, [*rounded.values()], factors_of(30).float())
    near = 2e-5 if dtype == "fp32" else 2e-2
    for ours, theirs in zip((losses, *found), expected, strict=False):
        assert float((ours.detach().double() - theirs).norm()) < near * float(theirs.norm())


def test_traced_and_transformed() -> None:
    leaves, given = drawn("clip", 30)
    q, k, factors, module = leaves["q"].detach(), leaves["k"].detach(), factors_of(30), package("clip")

    def total(q: Tensor) -> Tensor:
        losses: Tensor = module.contrastive_loss(q, k, SCALE, BIAS, reduction="none")
        return (losses * factors).sum()

    expected = truth("clip", leaves, given, factors)[1]
    close([torch.func.grad(total)(q)], [expected])
    compiled, leaf = torch.compile(total, fullgraph=True, backend="aot_eager"), q.clone().requires_grad_()
    close(torch.autograd.grad(compiled(leaf), leaf), [expected])


SHARDS = [[9, 13, 8], [5, 0, 11, 14]]


@pytest.mark.parametrize(
    "name",
    [
        *("infonce", "clip", "smooth", "infonce_out", "ntxent", "weighed_sides", "siglip_labels", "siglip_multi"),
        *nightly(OVER_PREFIXES, ["clip_cosines", "infonce_prefixes"]),
    ],
)
def test_each_rank_has_those_of_its_own_queries(name: str) -> None:
    """Gradients of features and numbers are those of all ranks' losses, each times its factor, for any grad_sync."""
    for shards, (transport, grad_sync) in itertools.product(SHARDS, (("ring", "mean"), ("gather", "sum"))):
        over_ranks(name, [2 * (n // 2) for n in shards] if name == "ntxent" else shards, transport, grad_sync)


def over_ranks(name: str, shards: list[int], transport: str, grad_sync: str) -> None:
    module, world, rows = package(name), len(shards), sum(shards)
    table, offsets = table_of(module, transport, world), [0, *itertools.accumulate(shards)]
    leaves, given = drawn(name, rows)

    def step(rank: int) -> list[Tensor]:
        part = slice(offsets[rank], offsets[rank + 1])
        own = {each: x if x is None or not x.dim() else x[part] for each, x in leaves.items()}
        own = {each: x if x is None else x.detach().clone().requires_grad_() for each, x in own.items()}
        others = {each: x[part] for each, x in given.items()}
        losses = module.contrastive_loss(**own, **others, reduction="none", grad_sync=grad_sync)
        wanted = [x for x in own.values() if x is not None]
        return [losses.detach(), *torch.autograd.grad(losses, wanted, factors_of(rows)[part])]

    parts = World(module, world, tables={world: table}, seed=rows).run(step)
    found = [torch.cat(each) if each[0].dim() else torch.stack(each).sum() for each in zip(*parts, strict=True)]
    if name == "ntxent":  # a row and its other view, of one rank
        views = [first + torch.arange(n).roll(n // 2) for first, n in zip(offsets, shards, strict=False)]
        given["labels"] = torch.cat(views)
    close(found, truth(name, leaves, given, factors_of(rows)))


def test_without_a_package_of_ones_own() -> None:
    leaves, given = drawn("clip", 30)
    losses = infcl_gen.contrastive_loss(**leaves, loss="clip", reduction="none")
    found = torch.autograd.grad(losses, [*leaves.values()], factors_of(30))
    close([losses.detach(), *found], truth("clip", leaves, given, factors_of(30)))
    close([infcl_gen.contrastive_loss(**leaves, loss="clip").detach()], [losses.mean().detach()])


REFUSED: dict[str, tuple[LossSpec, str]] = {
    "all positives": (BUILTIN_LOSSES["dclw"], "by which a query changes the terms of all others"),
    "pairs of rows": (BY_PARTNER, "whose weights have the terms of two rows in one"),
    "columns of several positives": (BUILTIN_LOSSES["mil_nce_multi"], "whose keys have the terms of several queries"),
    "smoothing of keys": (
        SMOOTH["smooth_clip"],
        r"write mean_of_keys\(x\) in mean_over_queries, whose mean is the same",
    ),
    "weights of means": (BUILTIN_LOSSES["cwcl"], "has no kernel for weights of mean_of_keys"),
    "prefixes of other terms": (
        dataclasses.replace(BUILTIN_LOSSES["rince"], prefixes=(8, 16)),  # type: ignore[arg-type]
        "prefixes have kernels for .* of which terms are constant multiples",
    ),
    "prefixes of pairs": (
        dataclasses.replace(BUILTIN_LOSSES["siglip"], prefixes=(8, 16)),  # type: ignore[arg-type]
        "prefixes have kernels for .* not for sums over pairs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_losses_of_queries_is_refused(name: str) -> None:
    spec, why = REFUSED[name]
    with pytest.raises(LossError, match=why) as error:
        derive(dataclasses.replace(spec, reduction="none"))
    assert "\n" not in str(error.value)


def test_fp16_kernels_are_refused_and_a_state_is_kept() -> None:
    with pytest.raises(infcl_gen.InputError, match="in fp16 for the loss infonce, whose slopes may overflow"):
        loss = dataclasses.replace(BUILTIN_LOSSES["infonce"], reduction="none")
        infcl_gen.plan(
            loss=loss, batch_size=4096, dim=64, dtype="fp16", device_profile="h200", set={"strategy": "panel"}
        )
    loss = dataclasses.replace(RATE, reduction="none")
    module = infcl_gen.load(loss=loss, batch_size=64, dim=DIM, dtype="fp64", target="cpu")
    q, k = features(30, "fp64"), features(31, "fp64")[1:]
    states = [torch.zeros(30, dtype=torch.float64) for _ in range(2)]
    losses = module.contrastive_loss(q, k, SCALE, query_weight=WEIGHT[:30], query_state=states[0], reduction="none")
    mean = module.contrastive_loss(q, k, SCALE, query_weight=WEIGHT[:30], query_state=states[1])
    close([losses.mean(), states[0]], [mean, states[1]])
    assert bool(states[0].any())


@pytest.mark.parametrize("name", ["siglip_labels", "infonce", "infonce_prefixes", "infonce_cosines"])
def test_a_label_that_names_no_key_leaves_nan_to_its_query(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of a device are looked at once. Other queries know nothing of that one."""
    module, labels = package(name), torch.arange(30)
    monkeypatch.setattr(
        importlib.import_module(f"{module.__name__}._runtime.agreement"), "_label_range", lambda *_: (0, -1)
    )
    labels[7] = 30
    leaves, _ = drawn(name, 30)
    losses = module.contrastive_loss(**leaves, labels=labels, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [7]
    dq, dk, dscale, dbias = torch.autograd.grad(losses.sum(), [*leaves.values()])
    assert dq.isnan().any(1).nonzero().flatten().tolist() == [7] and bool(dk.isnan().all())
    assert bool(dscale.isnan() & dbias.isnan() & module.contrastive_loss(**leaves, labels=labels).isnan())


ENGINE = "_runtime/engine.py"
BUGS = {
    "sums keep their weights": ("infonce", ENGINE, "    view(of_queries, prefixes).mantissa.div_(upstream)\n", ""),
    "positives keep theirs": ("infonce", ENGINE, "        parts.of_positives.mul_(upstream)\n", "        pass\n"),
    "parts of the scalars keep theirs": ("rince", ENGINE, "    parts.of_scalars.mul_(upstream)\n", ""),
    "columns keep theirs": ("clip", ENGINE, "        view(of_keys, prefixes).mantissa.div_(upstream)\n", ""),
    "second sums keep theirs": (
        "hard_negative",
        ENGINE,
        "        parts.second.mantissa.div_(upstream)\n",
        "        pass\n",
    ),
    "what positives have by their z keeps its": (
        "capped_of_rows",
        ENGINE,
        "        parts.by_z.mul_(upstream)\n",
        "        pass\n",
    ),
    "own numbers keep theirs": ("weighed_sides", ENGINE, "    vectors[: traits.weighed] *= upstream\n", ""),
    "means keep theirs": ("smooth", ENGINE, "sweep.means.rows = each", "pass"),
    "what is saved is changed": ("infonce", ENGINE, "saved.of_queries.clone()", "saved.of_queries"),
    "factors of pairs are those of forward": ("siglip", ENGINE, ".factor.mul_(upstream)", ".factor.mul_(1.0)"),
    "slopes of pairs have no factor": ("siglip", "schedule.py", "slopes *= strip.queries.factor[:, None]", "pass"),
    "losses of prefixes have no weights": (
        "clip_prefixes",
        ENGINE,
        "part.positive[1:4].mul_(package.loss.PREFIX_WEIGHTS[number])",
        "pass",
    ),
    "losses are those of the first prefix": ("infonce_cosines", ENGINE, "terms.sum(0)", "terms[0].clone()"),
    "the first prefix alone has factors": (
        "clip_cosines",
        ENGINE,
        "view(of_keys, prefixes).mantissa.div_",
        "view(of_keys, prefixes).mantissa[0].div_",
    ),
    "positives of prefixes have the g of other keys": (
        "infonce_prefixes",
        "schedule.py",
        "g[row, column] = of_prefix.positive[0, row]",
        "pass",
    ),
    "totals of pairs are never fresh": ("siglip_multi", "schedule.py", "if fresh_queries:", "if not fresh_queries:"),
}


@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_noticed(
    bug: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[ModuleType], Any]
) -> None:
    name, *edit = BUGS[bug]
    monkeypatch.syspath_prepend(str(tmp_path))
    target = tmp_path / f"wrong_{''.join(c for c in bug if c.isalpha())}"
    copy_with(bug, (tuple(edit),), folder_of(package(name)), target)  # type: ignore[arg-type]
    wrong = importlib.import_module(target.name)
    with uninitialised_memory_is_nan(), pytest.raises((AssertionError, RuntimeError)):
        as_by_hand(name, in_panels(wrong))
