"""Losses that combine what the language offers, drawn from a fixed seed, and each one as plain torch over all pairs.

A `Combination` names its options. `spec_of` writes it in the language. `dense` computes it from one small function for
each option, and takes nothing from the generator. `refusals` is what the language may say where it has no kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from sympy import Expr
from torch import Tensor

from infcl_gen.losses import LossSpec
from infcl_gen.losses.language import (
    Reduction,
    bias,
    exp,
    guide,
    is_positive,
    is_self,
    key_scale,
    key_weight,
    logsumexp_over_all_positives,
    logsumexp_over_keys,
    logsumexp_over_negatives,
    logsumexp_over_queries,
    maximum,
    mean_of_keys,
    mean_of_queries,
    mean_over_keys,
    mean_over_queries,
    of_positive,
    positive,
    queries,
    query_scale,
    query_weight,
    same_id,
    scale,
    sigmoid,
    similarity,
    softplus,
    step,
    sum_over_pairs,
    tanh,
    z,
)
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import near_thresholds

COUNTS = {"queries": 22, "both": 6, "triangle": 4, "pairs": 8}  # combinations of each form
REFUSALS = 20
SHARP = 5.0  # what all temperatures multiply similarities with
CAP, MARGIN, ANGLE = 4.0, 0.25, 0.3
SHARE_OF_KEYS = 0.75  # of the mean over keys, beside 0.5 of that over queries
SMOOTHING = 0.375  # of the mean of all logits
SHARPER = {"similarity": 3.0, "logit": 0.5}  # what multiplies positives in a number of all of them
THRESHOLD = (0.75, 0.125)  # of the similarity of a query's positive, and what is added
CHOICES: dict[str, tuple[Any, ...]] = {
    "form": ("queries", "queries", "queries", "both", "triangle", "pairs"),
    "positives": ("diagonal", "label", "own", "id"),
    "temperature": ("factor", "logarithm", "reciprocal"),
    "bias": (False, True),
    "capped": (False, False, True),
    "margin": ("", "", "additive", "angular"),
    "mask": ("", "same_id", "positive", "both"),
    "apart": (False, True),
    "term": ("plain", "softplus", "rince", "focal"),
    "weighted": (False, True),
    "hard": (False, True),
    "reduction": ("mean", "sum"),
    "grad_sync": ("mean", "sum"),
    "frozen": ("", "", "q", "k", "scale"),
}


@dataclasses.dataclass(frozen=True)
class Combination:
    """form         a mean over queries, over queries and keys ("both"), over rows of one tensor, or a sum over pairs
    positives    "own": by label, which calls give as "own"
    temperature  `scale` is a factor, the logarithm of one, or divides
    capped       logits are CAP * tanh(x / CAP), without the bias
    margin       MARGIN off the similarity of the positive, or ANGLE added to its angle
    mask         which pairs the sums leave out: those of one id but no positive, positives, or both
    apart        a margin is written as the positive beside the sum of the others, not as a logit of the sum
    term         F(total, positive) of a query, or for "focal" h of a pair
    weighted     terms have query_weight; `hard`: queries have negatives of their own
    smoothed     less SMOOTHING times the mean of all logits without margins; drawn apart from the others
    tempered     similarities are multiplied by a number of each query, or of each key, too; drawn apart, too
    reduction    "none": the loss of each query, times `factors_of` it; drawn apart, too
    coupled      of a triangle: the total is that of both rows of a pair; drawn apart, too
    crossed      of sums without positives: the total is that of the query and of its key; drawn apart, too
    above        pairs above a threshold are left out, too, by their own similarities or a guide's; drawn apart, too
    pooled       terms have the factor 1 + w, of the softmax w over the positives of all queries, of their
                 similarities or their logits without margins; drawn apart, too
    """

    form: str
    positives: str
    temperature: str
    bias: bool
    capped: bool
    margin: str
    mask: str
    apart: bool
    term: str
    weighted: bool
    hard: bool
    reduction: str
    grad_sync: str
    frozen: str
    smoothed: bool = False
    tempered: str = ""
    coupled: bool = False
    above: str = ""
    crossed: bool = False
    pooled: str = ""

    @property
    def ids(self) -> bool:
        """Whether calls give ids."""
        return self.positives == "id" or self.mask in ("same_id", "both")

    @property
    def may_sum_nothing(self) -> bool:
        """Whether a query may have no key in its sum."""
        return self.mask == "both" and (self.hard or self.term in ("softplus", "rince"))


# ------------------------------------------------------------------------------------------------ in the language


@functools.cache
def spec_of(one: Combination, name: str) -> LossSpec:
    """Raises LossError for what the language itself refuses."""
    found = similarity("query", "query") if one.form == "triangle" else z
    found *= {"": 1, "queries": query_scale, "both": query_scale * key_scale}[one.tempered]
    own, other = (_logit(one, each) for each in (_with_margin(one, found), found))
    positives = "label" if one.positives == "own" else one.positives
    reduction: Reduction = "none" if one.reduction == "none" else "mean"
    if one.form == "pairs":
        sign = 1 - 2 * is_positive
        wrong = sign * (is_positive * own + (1 - is_positive) * other if one.margin else other)
        term = sigmoid(wrong) ** 2 * softplus(wrong) if one.term == "focal" else softplus(wrong)
        whole = sum_over_pairs(_mask(one, found) * (query_weight if one.weighted else 1) * term) / queries
        whole += mean_over_queries(logsumexp_over_negatives(other)) if one.hard else 0
        return LossSpec(name, whole, positives, reduction=reduction)
    total, at_positive = _total(one, found, own, other), positive(own)
    if one.hard:
        further = logsumexp_over_negatives(other)
        total = further + softplus(total - further)  # also where nothing is in the sum of keys
    if one.coupled:
        total = of_positive(total) + softplus(total - of_positive(total))
    if one.crossed:
        column = of_positive(logsumexp_over_queries(other, *_where(one, found)))
        total = column + softplus(total - column)
    term = (query_weight if one.weighted else 1) * _TERMS[one.term](total, at_positive)
    if one.pooled:
        each = positive(found if one.pooled == "similarity" else other) * sympy.Rational(SHARPER[one.pooled])
        term *= 1 + exp(each - logsumexp_over_all_positives(each))
    formula = mean_over_queries(term)
    if one.form == "both":
        of_key = _TERMS[one.term](logsumexp_over_queries(other, *_where(one, found)), at_positive)
        of_keys = mean_over_keys((key_weight if one.weighted else 1) * of_key)
        formula = formula / 2 + sympy.Rational(SHARE_OF_KEYS) * of_keys
    if one.smoothed:
        share = sympy.Rational(SMOOTHING) / (2 if one.form == "both" else 1)
        formula -= share * mean_over_queries(mean_of_keys(other))
        formula -= share * mean_over_keys(mean_of_queries(other)) if one.form == "both" else 0
    return LossSpec(name, formula, positives, reduction=reduction)


def _logit(one: Combination, of: Expr) -> Expr:
    """The logit of a similarity."""
    logit = {"factor": scale * of, "logarithm": exp(scale) * of, "reciprocal": of / scale}[one.temperature]
    logit = CAP * tanh(logit / CAP) if one.capped else logit
    return logit + bias if one.bias else logit


def _with_margin(one: Combination, of: Expr) -> Expr:
    """The similarity of a positive."""
    if one.margin == "angular":
        return math.cos(ANGLE) * of - math.sin(ANGLE) * sympy.sqrt(maximum(1 - of**2, 1e-12))
    return of - MARGIN if one.margin else of


def _mask(one: Combination, of: Expr, mask: str | None = None) -> Expr:
    """Which pairs the sums keep, by the similarity `of` pairs; `mask` is that of the combination if it is not given."""
    mask, apart = one.mask if mask is None else mask, sympy.Integer(1)
    if mask in ("same_id", "both"):
        apart *= 1 - same_id
    if one.above:
        compared, (factor, margin) = guide if one.above == "guide" else of, map(sympy.Rational, THRESHOLD)
        apart *= 1 - step(compared - factor * positive(compared) - margin)
    return (1 - is_positive) * apart if mask in ("positive", "both") else apart + is_positive * (1 - apart)


_TERMS: dict[str, Any] = {
    "plain": lambda total, own: total - own,
    "softplus": lambda total, own: softplus(total - own),
    "rince": lambda total, own: (exp(total / 2) / 10 - exp(own / 2)) * 2,
    "focal": lambda total, own: (1 - exp(own - total)) ** 2 * (total - own),
}


def _total(one: Combination, found: Expr, own: Expr, other: Expr) -> Expr:
    """The log-sum-exp of a query's keys."""
    others = 1 - is_self if one.form == "triangle" else sympy.Integer(1)
    where = _where(one, found) if one.form != "triangle" else (others * _mask(one, found),)
    if one.margin and not one.apart:
        return logsumexp_over_keys(is_positive * own + (1 - is_positive) * other, *where)
    if one.margin and one.mask in ("", "same_id"):
        rest = logsumexp_over_keys(other, others * _mask(one, found, "both" if one.mask else "positive"))
        return positive(own) + softplus(rest - positive(own))
    return logsumexp_over_keys(other, *where)


def _where(one: Combination, found: Expr) -> tuple[Any, ...]:
    return (_mask(one, found),) if one.mask or one.above else ()


def refusals(one: Combination) -> list[str]:
    """What the language has no kernel for in this combination: its message must have one of these texts in it."""
    triangle, pairs, both = (one.form == form for form in ("triangle", "pairs", "both"))
    of_keys = not (triangle or pairs)
    reasons = {
        "other than as scale * z": one.capped and one.temperature != "factor" and (one.bias or not pairs),
        "a logit that depends on is_positive": not pairs and one.margin and not one.apart and (one.mask or both),
        "a logit that depends on is_positive or same_id has no kernel yet in sum_over_pairs": pairs and one.margin,
        "the log-sum-exps differ in their masks": both and one.margin and one.apart,
        "positives='id'": one.positives == "id" and of_keys,
        "positives='diagonal'": both and one.positives != "diagonal",
        "needs positives='label'": triangle and one.positives not in ("label", "own"),
        "beside mean_over_keys": both and one.margin,
        "where=1 - is_self": triangle and one.mask in ("same_id", "both"),
        "kernels for logits affine in z": one.smoothed and one.capped,
        "give both sides": (one.smoothed or one.tempered) and triangle,
        "multiply the features of keys": one.tempered == "both" and one.hard,
        "query_weight": pairs and one.weighted,
        "logsumexp_over_negatives": (both or pairs) and one.hard,
        "of_positive": (one.coupled and (one.weighted or one.hard or one.margin or one.pooled))
        or (one.crossed and (one.weighted or one.hard or one.pooled)),
        "logsumexp_over_all_positives has": one.pooled and both,
    }
    if any(reasons.values()):
        reasons["at most 1024 parts"] = one.term == "focal"
    return [reason for reason, holds in reasons.items() if holds]


# -------------------------------------------------------------------------------------------------- in plain torch


def dense(one: Combination, given: Inputs, products: torch.dtype | None = None) -> Tensor:
    """The loss of a call's arguments, differentiable; similarities are products in this dtype, or that of `scale`.

    `scale` and `bias` may have one number for each pair, (M, N), or (M, N + H) with negatives.
    """
    number = given.scale.dtype
    q, k = (
        (x if t is None else t[:, None] * x).to(products or number)
        for x, t in ((given.q, given.query_scale), (given.others, given.key_scale))
    )
    pairs = q @ k.T
    if given.negatives is not None:
        pairs = torch.cat((pairs, torch.einsum("id,ild->il", q, given.negatives.to(q))), 1)
    similarities, keys = pairs.to(number), len(k)
    other = _dense_logit(one, similarities, given)
    is_own, smoothing = _are_positive(one, given), other[:, :keys].mean(1) * SMOOTHING if one.smoothed else 0.0
    if one.margin:
        own = _dense_logit(one, _dense_margin(one, similarities), given)
        other = torch.cat((torch.where(is_own, own[:, :keys], other[:, :keys]), other[:, keys:]), 1)
    x, further = other[:, :keys], other[:, keys:]
    kept = _dense_mask(one, given, is_own)
    if one.form == "pairs":
        return _of_losses(one, given, (kept * _term_of_pair(one, torch.where(is_own, -x, x))).sum(1))
    p = x[is_own]
    total = _log(torch.where(kept, x.exp(), 0.0).sum(1) + further.exp().sum(1))
    total = torch.logaddexp(total, total[is_own.int().argmax(1)]) if one.coupled else total
    total = torch.logaddexp(total, _log(torch.where(kept, x.exp(), 0.0).sum(0))) if one.crossed else total
    terms = _dense_term(one, total, p)
    if one.pooled:
        of_each = similarities if one.pooled == "similarity" else _dense_logit(one, similarities, given)
        terms = terms * (1 + torch.softmax(SHARPER[one.pooled] * of_each[:, :keys][is_own], 0))
    losses = terms if given.query_weight is None else given.query_weight.to(number) * terms
    if one.form == "both":
        of_keys = _dense_term(one, _log(torch.where(kept, x.exp(), 0.0).sum(0)), p)
        of_keys = of_keys if given.key_weight is None else given.key_weight.to(number) * of_keys
        losses = losses / 2 + SHARE_OF_KEYS * of_keys
    return _of_losses(one, given, losses - smoothing)


def _of_losses(one: Combination, given: Inputs, losses: Tensor) -> Tensor:
    return (losses * factors_of(given)).sum() if one.reduction == "none" else losses.mean()


def factors_of(given: Inputs) -> Tensor:
    """What the loss of each query is multiplied by, told by its features; above 0, so that no sum cancels by it."""
    return 1.5 + torch.sin(100 * given.q.detach().double()[:, 0])


def _dense_logit(one: Combination, similarities: Tensor, given: Inputs) -> Tensor:
    factor = given.scale
    if one.temperature != "factor":
        factor = factor.exp() if one.temperature == "logarithm" else 1 / factor
    x = factor * similarities
    x = CAP * torch.tanh(x / CAP) if one.capped else x
    return x + given.bias if one.bias else x


def _dense_margin(one: Combination, similarities: Tensor) -> Tensor:
    return torch.cos(similarities.arccos() + ANGLE) if one.margin == "angular" else similarities - MARGIN


def _are_positive(one: Combination, given: Inputs) -> Tensor:
    if one.positives == "id":
        return given.query_ids[:, None] == given.key_ids[None, :]
    place = torch.arange(len(given.q), device=given.q.device) if given.labels is None else given.labels
    if given.k is None and given.labels is None:
        place = (place + len(place) // 2) % len(place)
    return torch.arange(len(given.others), device=given.q.device)[None, :] == place[:, None]


def _dense_mask(one: Combination, given: Inputs, is_own: Tensor) -> Tensor:
    """Which pairs count."""
    kept = torch.ones_like(is_own)
    if one.form == "triangle":
        kept.fill_diagonal_(False)
    if one.mask in ("same_id", "both"):
        kept &= is_own | (given.query_ids[:, None] != given.key_ids[None, :])
    if one.above:
        u, v = (x.double() for x in _compared(one, given))
        compared = u @ v.T
        kept &= is_own | (compared <= THRESHOLD[0] * compared.diagonal()[:, None] + THRESHOLD[1])
    return kept & ~is_own if one.mask in ("positive", "both") else kept


def _compared(one: Combination, given: Inputs) -> tuple[Tensor, Tensor]:
    """What the similarities are products of that are compared with thresholds."""
    if one.above == "guide":
        assert given.guide_queries is not None and given.guide_keys is not None
        return given.guide_queries, given.guide_keys
    return given.q.detach(), given.others.detach()


def _term_of_pair(one: Combination, wrong: Tensor) -> Tensor:
    cost = torch.logaddexp(wrong, torch.zeros_like(wrong))
    return torch.sigmoid(wrong) ** 2 * cost if one.term == "focal" else cost


def _log(sums: Tensor) -> Tensor:
    """A sum of nothing is -inf, and has no gradient."""
    nothing = sums == 0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, sums).log())


def _dense_term(one: Combination, total: Tensor, p: Tensor) -> Tensor:
    if one.term == "rince":
        return ((0.01 * total.exp()).sqrt() - p.exp().sqrt()) / 0.5
    if one.term == "softplus":
        return torch.log1p((total - p).exp())
    return (1 - (p - total).exp()) ** 2 * (total - p) if one.term == "focal" else total - p


# ------------------------------------------------------------------------------------------------------- the draws


def draws() -> Iterator[Combination]:
    """Endless, and always the same."""
    chance, smoothing, tempering, coupling, comparing, crossing, pooling, taking = (
        random.Random(seed) for seed in (0, 2, 3, 31, 4, 5, 33, 7)
    )
    while True:
        one = Combination(**{name: chance.choice(values) for name, values in CHOICES.items()})
        tempered = tempering.choice(("", "", "queries", "both"))
        one = dataclasses.replace(one, smoothed=smoothing.random() < 0.5, tempered=tempered)
        one = dataclasses.replace(one, coupled=coupling.random() < 0.3 and one.form == "triangle")
        wanted, masked = crossing.random() < 0.3, one.mask in ("positive", "both")
        crossed = wanted and masked and one.form == "queries" and one.term != "focal"  # of too many terms
        one = dataclasses.replace(one, crossed=crossed, positives="diagonal" if crossed else one.positives)
        one = dataclasses.replace(one, pooled=pooling.choice(("", "", "similarity", "logit")))
        one = _plain(_likely(one) if chance.random() < 0.8 else one)  # else most would be refused
        if not one.crossed:
            one = _with_threshold(one, *(comparing.choice(each) for each in ((True, False, False), ("guide", "own"))))
        yield _of_rows(one) if taking.random() < 0.4 else one


def _of_rows(one: Combination) -> Combination:
    """With the loss of each query, where there is one."""
    none = one.coupled or one.pooled or (one.form == "both" and one.smoothed)
    return one if none else dataclasses.replace(one, reduction="none")


def _with_threshold(one: Combination, wanted: bool, above: str) -> Combination:
    """With the diagonal for labels. Not where a query may have nothing in a sum that its term has no value for, nor in
    products of sums of sums."""
    of_nothing = one.mask not in ("positive", "both") or one.hard or one.term in ("softplus", "rince")
    whole = (not one.margin or one.apart) and not (one.term == "focal" and one.hard)
    if not (wanted and one.form == "queries" and one.positives != "id" and whole and of_nothing):
        return one
    return dataclasses.replace(one, positives="diagonal", above="guide" if one.tempered else above)


def _likely(one: Combination) -> Combination:
    """Without most of what the form has no kernel for."""
    temperature = "factor" if one.capped else one.temperature
    smoothed = one.smoothed and not one.capped and one.form != "triangle"
    one = dataclasses.replace(one, temperature=temperature, apart=one.apart or bool(one.mask), smoothed=smoothed)
    tempered = "" if one.form == "triangle" else "queries" if one.tempered and one.hard else one.tempered
    pooled = "" if one.form == "both" or one.coupled or one.crossed else one.pooled
    one = dataclasses.replace(one, tempered=tempered, pooled=pooled)
    if one.form == "queries":
        alone = {"weighted": False, "hard": False} if one.crossed else {}
        return dataclasses.replace(one, positives="label" if one.positives == "id" else one.positives, **alone)
    if one.form == "triangle":
        positives, mask = "own" if one.positives == "diagonal" else "label", "positive" if one.mask else ""
        alone = {"weighted": False, "hard": False, "margin": "", "apart": False} if one.coupled else {}
        return dataclasses.replace(one, positives=positives, mask=mask, **alone)
    one = dataclasses.replace(one, margin="", hard=False)
    if one.form == "pairs":
        return dataclasses.replace(one, weighted=False)
    return dataclasses.replace(one, positives="diagonal")


def _plain(one: Combination) -> Combination:
    """What changes nothing in a form has one value there. A product of four sums of sums is no formula of the language,
    which counts its terms when multiplied out."""
    pairs, changes = one.form == "pairs", dict[str, Any](apart=bool(one.margin) and one.apart)
    if pairs:
        changes |= {
            "term": "focal" if one.term == "focal" else "plain",
            "apart": False,
            "smoothed": False,
            "pooled": "",
        }
    if pairs and one.mask in ("positive", "both"):
        changes["margin"] = ""
    if pairs and one.positives == "id":  # where the two classes are one
        changes["mask"] = "positive" if one.mask in ("positive", "both") else ""
    if one.term == "focal" and one.hard:
        mask = "positive" if one.mask in ("positive", "both") else ""
        changes |= {"margin": "", "apart": False, "mask": mask, "pooled": ""}
    if one.form == "triangle" and one.frozen == "k":
        changes["frozen"] = ""
    if one.form == "triangle" and one.margin == "angular":  # a row and itself are the angle's tie in the dense truth
        changes["margin"] = "additive"
    return dataclasses.replace(one, **changes)


def _drawn() -> tuple[dict[str, Combination], list[Combination]]:
    """The combinations by name, each form's spread over the whole; and REFUSALS that are to be refused."""
    found: dict[str, list[Combination]] = {form: [] for form in COUNTS}
    refused: list[Combination] = []
    for one in draws():
        loss = dataclasses.replace(one, reduction="mean", grad_sync="mean", frozen="")
        if refusals(one):
            refused += [one] * (one not in refused and len(refused) < REFUSALS)
        elif len(found[one.form]) < COUNTS[one.form] and loss not in {
            dataclasses.replace(each, reduction="mean", grad_sync="mean", frozen="") for each in found[one.form]
        }:
            found[one.form].append(one)
        if len(refused) == REFUSALS and all(len(each) == COUNTS[form] for form, each in found.items()):
            break
    places = [((place + 0.5) / len(each), form, place) for form, each in found.items() for place in range(len(each))]
    return {f"{form}_{place}": found[form][place] for _, form, place in sorted(places)}, refused


COMBINATIONS, REFUSED = _drawn()


# ------------------------------------------------------------------------------------------------------ the batches

GUIDES = ("guide_queries", "guide_keys")
SIZES = {True: ((97, 97), (130, 130), (66, 66)), False: ((70, 131), (97, 97), (66, 130), (65, 70))}


def batch(
    one: Combination, seed: int, dim: int, shards: tuple[list[int], list[int]] | None = None, dtype: Any = torch.float64
) -> Inputs:
    """A batch in fp64 of numbers that `dtype` holds; `shards` are the rows and keys of each rank.

    Labels name keys more than once, and "own" ones are written out. Every third seed has a query that shares its id
    with all keys, others have ids that several queries and keys have. Some weights are 0, some negative.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = SIZES[one.positives == "diagonal" or one.form == "triangle"]
    rows, keys = map(list, shards) if shards else ([each] for each in sizes[seed % len(sizes)])
    if one.form == "triangle" and (one.positives == "own" or one.coupled):  # two views of each sample
        rows = keys = [each - each % 2 for each in rows]
    count, others = sum(rows), sum(keys)

    def features(*shape: int) -> Tensor:
        x = torch.randn(*shape, dim, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(x, dim=-1).to(dtype).double()

    q, k = features(count), None if one.form == "triangle" else features(others)
    if one.margin == "angular":
        assert k is not None and float((q @ k.T).abs().max()) < 0.9999, "the angle is near that of a tie"
    labels = query_ids = key_ids = weight = key_weight = negatives = None
    if one.coupled and one.positives == "label":
        labels = torch.arange(count) ^ 1  # on its rank
    elif one.form == "triangle" and one.positives == "label":
        labels = (torch.arange(count) + torch.randint(1, count, (count,), generator=generator)) % count
    elif one.positives == "label":
        labels = torch.randint(others, (count,), generator=generator)
    elif one.positives == "own":
        sides = [sum(rows[:rank]) if one.form == "triangle" else sum(keys[:rank]) for rank in range(len(rows))]
        places = (torch.arange(m).roll(m // 2 if one.form == "triangle" else 0) for m in rows)
        labels = torch.cat([first + own for first, own in zip(sides, places, strict=True)])
    if one.ids:
        query_ids, key_ids = (torch.randint(others // 3, (n,), generator=generator) << 32 for n in (count, others))
        if seed % 3 == 2 and (one.mask != "both" or one.may_sum_nothing):
            key_ids, query_ids[0] = torch.full_like(key_ids, -1), -1
    if one.weighted:
        weight = torch.randn(count, generator=generator, dtype=torch.float32).double()
        weight[::7] = 0.0
    if one.weighted and one.form == "both":
        key_weight = torch.randn(others, generator=generator, dtype=torch.float32).double()
        key_weight[1::6] = 0.0
    if one.hard:
        negatives = features(count, 1 + seed % 3)
    guides = _guides(one, q, k, generator, features, dtype) if one.above else {}
    scale_of = {"factor": SHARP, "logarithm": math.log(SHARP), "reciprocal": 1 / SHARP}
    of_queries, of_keys = (0.5 + torch.rand(n, generator=generator).double() / 2 for n in (count, others))
    return Inputs(
        q, k, scale_of[one.temperature], -0.5, labels, query_ids, key_ids, weight, key_weight, negatives,
        query_scale=of_queries if one.tempered else None, key_scale=of_keys if one.tempered == "both" else None,
        **guides,
    )  # fmt: skip


def _guides(
    one: Combination, q: Tensor, k: Tensor | None, generator: torch.Generator, features: Any, dtype: Any
) -> dict[str, Tensor]:
    """A guide's features for a combination with one. A similarity that is near its threshold moves its query."""
    assert k is not None
    found = {"guide_queries": features(len(q)), "guide_keys": features(len(k))} if one.above == "guide" else {}
    rows, keys = found.get("guide_queries", q), found.get("guide_keys", k)
    while bool(
        (near := near_thresholds(THRESHOLD, rows.to(dtype), keys.to(dtype), torch.arange(len(rows))).any(1)).any()
    ):
        rows[near] = features(int(near.sum()))
    return found


def placed(given: Inputs, device: str, features: torch.dtype = torch.float64) -> Inputs:
    """A batch on a device, its features, negatives and guides in this dtype."""
    names = ("q", "k", "negatives", *GUIDES)
    of_features = {name: x.to(features) for name in names if (x := getattr(given, name)) is not None}
    found = given._replace(**of_features)
    return Inputs(*(x.to(device) if isinstance(x, Tensor) else x for x in found))


NUMBERS = ("query_weight", "key_weight", "negatives", "query_scale", "key_scale")
NAMES = ("loss", "dq", "dk", "dscale", "dbias", *(f"of {name}" for name in NUMBERS))


def leaves_of(given: Inputs, numbers: torch.dtype, features: torch.dtype, device: str = "cpu") -> Inputs:
    """A copy whose features, numbers, weights and negatives require gradients."""

    def leaf(value: Any, dtype: torch.dtype) -> Any:
        return None if value is None else torch.as_tensor(value, dtype=dtype, device=device).clone().requires_grad_()

    others = (None if x is None else x.to(device) for x in given[4:7])
    sides, values = (leaf(x, features) for x in given[:2]), (leaf(x, numbers) for x in given[2:4])
    own = {name: leaf(getattr(given, name), features if name == "negatives" else numbers) for name in NUMBERS}
    guides = {name: x.to(device, features) for name in GUIDES if (x := getattr(given, name)) is not None}
    return Inputs(*sides, *values, *others, **own, **guides)


def differentiable(given: Inputs) -> list[Any]:
    return [*given[:4], *(getattr(given, name) for name in NUMBERS)]


def truth_of(
    one: Combination, given: Inputs, numbers: torch.dtype = torch.float64, features: torch.dtype = torch.float64
) -> tuple[list[Any], list[Any]]:
    """(loss, dq, dk, dscale, dbias, by each of NUMBERS) of `dense`, None for what the batch has not; and for each
    what its terms add up to without their signs, where that is more."""
    leaves = leaves_of(given, numbers, features, str(given.q.device))
    pairs = len(given.q), len(given.others) + (0 if given.negatives is None else given.negatives.shape[1])
    apart = leaves._replace(
        **{name: getattr(leaves, name).detach().expand(pairs).clone().requires_grad_() for name in ("scale", "bias")}
    )
    loss = dense(one, apart, features)
    wanted = differentiable(apart)
    found = iter(torch.autograd.grad(loss, [x for x in wanted if x is not None], materialize_grads=True))
    gradients = [x if x is None else next(found) for x in wanted]
    sizes = [loss.detach().abs(), *(x if x is None else x.norm() for x in gradients)]
    for place in (2, 3):
        sizes[1 + place] = gradients[place].abs().sum()
        gradients[place] = gradients[place].sum()
    return [loss.detach(), *gradients], sizes


def call(package: Any, one: Combination, leaves: Inputs, group: Any = None) -> Tensor:
    """The loss of a package with the options of the combination."""
    labels: Any = "own" if one.positives == "own" else leaves.labels
    ids = {name: getattr(leaves, name) for name in ("query_ids", "key_ids")} if one.ids else {}
    own = {name: getattr(leaves, name) for name in (*NUMBERS, *GUIDES)}
    options = {"reduction": one.reduction, "grad_sync": one.grad_sync, "group": group}
    loss: Tensor = package.contrastive_loss(*leaves[:4], labels=labels, **ids, **own, **options)
    if one.reduction == "none":
        return (loss * factors_of(leaves)).sum()
    return loss


def gradients_of(package: Any, one: Combination, leaves: Inputs, group: Any = None) -> list[Any]:
    """The loss and gradients of a call with the options of the combination; None for what is frozen, or not there."""
    if one.frozen:
        getattr(leaves, one.frozen).requires_grad_(False)
    loss = call(package, one, leaves, group)
    wanted = [None if x is None or not x.requires_grad else x for x in differentiable(leaves)]
    found = iter(torch.autograd.grad(loss, [x for x in wanted if x is not None]))
    return [loss.detach(), *(x if x is None else next(found) for x in wanted)]


def assert_same(one: Combination, found: list[Any], truth: list[Any], sizes: list[Any], within: float) -> None:
    """Norms of errors, relative to those of what terms add up to; "sum" gives M times as much as the mean."""
    assert truth[1] is not None
    factor = len(truth[1]) if one.reduction == "sum" else 1
    for name, ours, true, size in zip(NAMES, found, truth, sizes, strict=True):
        if ours is None:
            frozen = {"dq": "q", "dk": "k", "dscale": "scale"}.get(name)
            assert true is None or frozen == one.frozen, f"{one}: no {name}"
            continue
        assert true is not None and ours.shape == true.shape, f"{one}: {name} of {ours.shape}"
        error = float((ours.double().to(true.device) / factor - true).norm())
        assert error <= within * float(size), f"{one}: {name} is off by {error / float(size):.1e}"
