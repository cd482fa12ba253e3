"""What is derived equals what autograd finds, and what cannot be derived is refused with a reason."""

import math
from typing import Any

import hypothesis
import pytest
import sympy
import torch
from hypothesis import strategies as st
from torch import Tensor

from infcl_gen.errors import InputError
from infcl_gen.losses import CLIP, INFONCE, SIGLIP, LossError, LossSpec, derive, formulas_of, language, loss_context
from infcl_gen.losses.language import (
    bias,
    detach,
    exp,
    guide,
    is_first,
    is_positive,
    is_self,
    key_scale,
    key_state,
    key_weight,
    log,
    logsumexp_over_all_positives,
    logsumexp_over_keys,
    logsumexp_over_negatives,
    logsumexp_over_queries,
    maximum,
    mean_by_softmax,
    mean_by_softmax_over_queries,
    mean_of_keys,
    mean_of_queries,
    mean_over_keys,
    mean_over_positives,
    mean_over_queries,
    next_state,
    of_positive,
    positive,
    positives_of_query,
    queries,
    query_scale,
    query_state,
    query_weight,
    same_id,
    same_side,
    scale,
    sigmoid,
    similarity,
    softplus,
    step,
    sum_over_pairs,
    tanh,
    z,
)
from infcl_gen.losses.printers import c, p, r, x
from infcl_gen.verification.oracle import dense_numbers, mean_share, numbers_of_rows
from tests.calls import calls
from tests.losses.specs import DERIVABLE, INFONCE_OF, KEPT, X, spec
from tests.tiers import combined, examples
from tests.verification.dense import dense_package


def test_clip() -> None:
    derivation = derive(CLIP)
    assert (derivation.query_share, derivation.key_share, derivation.positive_share) == (0.5, 0.5, -1.0)
    assert (derivation.slope, derivation.shift, derivation.gradient_factor) == (scale, bias, scale)
    assert sympy.expand(derivation.query_term - (r - p) / 2) == 0
    assert sympy.expand(derivation.key_term - (c - p) / 2) == 0
    assert (derivation.dlogit_dz, derivation.dscale_factor, derivation.dbias) == (1, 1, 0)
    assert derivation.has_queries and derivation.has_keys


def test_infonce() -> None:
    derivation = derive(INFONCE)
    assert (derivation.query_share, derivation.key_share, derivation.positive_share) == (1.0, 0.0, -1.0)
    assert derivation.key_term == 0 and not derivation.has_keys


def test_shares_of_label_smoothing_cancel() -> None:
    """As people write them: of 1 - 0.9 - 0.1 a rounding is left, by which bias would have a gradient."""
    logit = scale * (z - 1) + bias
    share = 0.1
    terms = logsumexp_over_keys(logit) - (1 - share) * positive(logit) - share * mean_of_keys(logit)
    derivation = derive(spec(mean_over_queries(terms)))
    assert (derivation.dbias, derivation.mean_share) == (0, -0.1)
    assert formulas_of(derivation)["dL/dx"] == "g_ij = 1/M * (exp(x_ij - r_i) - 0.9 * [j = positive(i)] - 0.1 / N)"


def test_slopes_by_the_similarity_count_in_the_bound() -> None:
    """fp16 is refused where there is none."""
    assert derive(DERIVABLE["margin"]).largest_slope == 2.0
    assert math.isinf(derive(DERIVABLE["angular_margin"]).largest_slope)


def test_formulas_are_for_people() -> None:
    formulas = formulas_of(derive(CLIP))
    assert formulas["dL/dx"] == ("g_ij = 1/M * (0.5 * exp(x_ij - r_i) + 0.5 * exp(x_ij - c_j) - [j = positive(i)])")
    assert formulas["dq"] == "dq_i = sum_j g_ij * scale * k_j"
    assert set(formulas) >= {"logit", "loss", "dL/dx", "dq", "dk", "dscale", "dbias"}
    assert all(text.isascii() and "\n" not in text for text in formulas.values())


def derived(
    loss: Any,
    x: Tensor,
    z: Tensor,
    scale: Tensor,
    bias: Tensor,
    same_id: Tensor | None,
    own: tuple[Tensor, ...] = (),
    compared: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
    """Of a loss.py: M * L, M * dL/dx, dL/dbias, what M * dL/dscale has besides a multiple of sum q . dq, and what dL/dz
    of positives has besides. `z`: of the positives; `compared`: similarities beside thresholds, or those of a guide."""
    eye = torch.eye(len(x), dtype=x.dtype)
    if hasattr(loss, "pair_term"):
        of_class = [(loss.pair_term, loss.pair_slope)]
        same = torch.zeros_like(eye, dtype=torch.bool) if same_id is None else same_id
        placed = same_id is not None and loss.POSITIVES != "id"
        of_class.append(
            (loss.same_id_term, loss.same_id_slope) if placed else (loss.positive_term, loss.positive_slope)
        )
        of_class.append((loss.positive_term, loss.positive_slope))
        which = torch.where((eye == 1) & (loss.POSITIVES != "id"), 2, same.long())
        terms, slopes = ([each[kind](x) for each in of_class] for kind in (0, 1))
        total = sum(term[which == kind].sum() for kind, term in enumerate(terms))
        g = sum(slope * (which == kind) for kind, slope in enumerate(slopes))
        return total, g, loss.dbias_factor(scale, bias) * g.sum() / len(x), loss.dscale_rest(scale, bias) * g.sum(), 0.0
    p, of_all = x.diagonal(), mean_share(loss) * x.mean() * len(x)
    x = x if same_id is None else torch.where(same_id & (eye == 0), -torch.inf, x)
    if compared is not None and not hasattr(loss, "GUIDE_SHARES"):
        thresholds = loss.THRESHOLD[0] * compared.diagonal()[:, None] + loss.THRESHOLD[1]
        x = torch.where((compared > thresholds) & (eye == 0), -torch.inf, x)
    if hasattr(loss, "of_queries"):
        x = torch.where(eye == 1, -torch.inf, x) if "positive" in loss.CLASSES else x
        r = x.logsumexp(1)
        times = getattr(loss, "MULTIPLE", 1.0)
        r2 = (times * x).logsumexp(1)
        c = x.logsumexp(0)
        rest = numbers_of_rows(loss, r, p, z, scale, bias, *x.shape, own, second=r2, columns=c)
        term, weight, slope, through_z, *parts = loss.of_queries(r, p, **rest)
        weight = torch.where(r == -torch.inf, 0.0, weight)
        g = weight[:, None] * (x - r[:, None]).exp().nan_to_num(0.0) + slope[:, None] * eye
        if hasattr(loss, "MULTIPLE"):
            second = torch.where(r == -torch.inf, 0.0, parts[2])
            g = g + second[:, None] * (times * x - r2[:, None]).exp().nan_to_num(0.0)
        if loss.HAS_KEYS:
            of_columns = torch.where(c == -torch.inf, 0.0, parts[2])
            g = g + of_columns * (x - c).exp().nan_to_num(0.0)
        of_scale, of_bias = (torch.as_tensor(part).expand(len(x)).sum() for part in parts[:2])
        g = g + mean_share(loss) / x.shape[1]
        of_bias += loss.dbias_factor(scale, bias) * g.sum()
        return term.sum() + of_all, g, of_bias / len(x), of_scale + loss.dscale_rest(scale, bias) * g.sum(), through_z
    r, c = x.logsumexp(1), x.logsumexp(0)
    of_guide: list[list[Tensor]] = [[], []]
    if hasattr(loss, "GUIDE_SHARES"):
        assert compared is not None
        shares = [compared.softmax(axis) for axis in (1, 0)]
        of_guide = [[(share * x).sum(axis)] for share, axis in zip(shares, (1, 0), strict=True)]
    total = of_all + loss.query_term(r, p, *of_guide[0]).sum()
    total += loss.key_term(c, p, *of_guide[1]).sum() if loss.HAS_KEYS else 0.0
    g = loss.QUERY_SHARE * (x - r[:, None]).exp() + loss.POSITIVE_SHARE * eye + mean_share(loss) / x.shape[1]
    if loss.HAS_KEYS:
        g = g + loss.KEY_SHARE * (x - c).exp()
    if of_guide[0]:
        g = g + sum(factor * share for factor, share in zip(loss.GUIDE_SHARES, shares, strict=True))
    return total, g, torch.tensor(loss.DBIAS, dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0.0


@pytest.mark.parametrize("name", sorted(DERIVABLE))
@examples(ci=3, long=500)
@hypothesis.given(rows=st.integers(1, 9), scale_value=st.sampled_from([0.01, 1.0, 5.0]), seed=st.integers(0, 99))
def test_the_derived_gradient_is_that_of_autograd(name: str, rows: int, scale_value: float, seed: int) -> None:
    loss = dense_package(DERIVABLE[name]).loss
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(rows, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (scale_value, 0.3))
    ids, which = {}, None
    if derive(DERIVABLE[name]).traits.ids:
        ids = {side: torch.randint(rows, (rows,), generator=generator) for side in ("query_ids", "key_ids")}
        which = ids["query_ids"][:, None] == ids["key_ids"]
    own = tuple(torch.randn(rows, generator=generator, dtype=torch.float64) for _ in loss.VECTORS)
    ids |= dict.fromkeys(loss.SCALES, torch.ones(rows))  # all below is said of products
    if hasattr(loss, "WEIGHT"):  # all weights alike
        ids |= dict.fromkeys(("guide_queries", "guide_keys"), torch.zeros(rows, 4))
    compared = q.detach() @ k.detach().T if "above" in loss.CLASSES else None
    if "above_by_guide" in loss.CLASSES or hasattr(loss, "GUIDE_SHARES"):
        ids |= {name: x.detach().flip(1) for name, x in (("guide_queries", q), ("guide_keys", k))}
        compared = ids["guide_queries"] @ ids["guide_keys"].T
    if own:
        similarity = q @ k.T
        rest = dense_numbers(loss, similarity, scale, bias)
        classes = [torch.arange(rows)] * (loss.POSITIVES == "label") + [which] * (which is not None)
        expected_loss = loss.loss_of_logits(loss.logit(similarity, scale, bias), *classes, *own, **rest)
    else:
        expected_loss = loss.reference(q, k, scale, bias, **ids)
    expected = torch.autograd.grad(expected_loss, (q, k, scale, bias), allow_unused=True)

    with torch.no_grad():
        similarity = q @ k.T
        logits = loss.logit(similarity, scale, bias)
        total, g, dbias, rest, through_z = derived(
            loss, logits, similarity.diagonal(), scale, bias, which, own, compared
        )
        g = g * loss.dlogit_dz(similarity, scale, bias)
        g.diagonal().add_(through_z)
        factor = loss.gradient_factor(scale, bias) / rows
        dscale = (loss.dscale_factor(scale, bias) * (q * (g @ k)).sum() + rest) / rows
        actual = (factor * (g @ k), factor * (g.T @ q), dscale, dbias)
    assert torch.allclose(total / rows, expected_loss, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(actual, expected, strict=True):
        theirs = torch.zeros((), dtype=torch.float64) if theirs is None else theirs
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["weighted", "hard"])
def test_the_slopes_of_queries_own_numbers_are_those_of_autograd(name: str) -> None:
    loss = dense_package(DERIVABLE[name]).loss
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_() for _ in (*"rp", *loss.VECTORS))
    r, p, *own = drawn
    values = loss.of_queries(r, p, *own)
    expected = torch.autograd.grad(values[0].sum(), own)
    for ours, theirs in zip(values[6:], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_small_shares_keep_their_digits() -> None:
    u, h = sympy.Symbol("u", real=True), sympy.Symbol("h", real=True)
    assert derive(DERIVABLE["hard"]).query_weight == u * sigmoid(r - h)  # not 1 - sigmoid(h - r)


NT_XENT = similarity("query", "query")
ROW, COLUMN = (each(X, where=1 - is_positive) for each in (logsumexp_over_keys, logsumexp_over_queries))
OF_OTHERS = logsumexp_over_keys(scale * NT_XENT, where=1 - is_self)
NEAR_ROW = step(NT_XENT - positive(NT_XENT) - 0.1)
OF_FIRST = (1 - is_positive) * is_first
_of_rows = lambda kept, times=1: logsumexp_over_keys(times * scale * NT_XENT, where=(1 - is_self) * kept)  # noqa: E731
OF_NEAR = logsumexp_over_negatives(scale * NT_XENT, where=1 - NEAR_ROW)
OF_KEPT = _of_rows((1 - is_positive) * (1 - NEAR_ROW))
MARGIN = scale * (z - is_positive / 5)
NO_MARGIN = (
    "^loss mine: a logit that depends on is_positive has no kernel yet beside mean_over_keys: write mean_over_queries "
    "alone, and call it once for each direction$"
)


def COLUMNS_OF(logit: sympy.Expr) -> sympy.Expr:
    return mean_over_keys(logsumexp_over_queries(logit) - positive(logit))


ROADMAP = {  # sayable today; each is refused by name until there is a kernel for it
    "a positive in a sum over pairs": (
        spec(sum_over_pairs((1 - is_positive) * maximum(z - positive(z) + 0.2, 0)) / queries, "diagonal"),
        r"positive\(z\) stands inside sum_over_pairs, whose terms know one pair: use z and is_positive, or",
    ),
    "a log-sum-exp in a sum over pairs": (
        spec(sum_over_pairs(z * logsumexp_over_keys(z)) / queries + CLIP.formula, "diagonal"),
        r"logsumexp_over_keys\(z\) stands inside sum_over_pairs, whose terms know one pair",
    ),
    "siglip with clip": (spec(SIGLIP.formula + CLIP.formula, "diagonal"), "sum_over_pairs beside"),
    "nt_xent_with_itself": (
        spec(mean_over_queries(logsumexp_over_keys(scale * NT_XENT) - positive(scale * NT_XENT))),
        "where=1 - is_self leaves out the row itself",
    ),
    "nt_xent_by_id": (
        spec(
            mean_over_queries(
                logsumexp_over_keys(scale * NT_XENT, (1 - is_self) * (1 - same_id)) - positive(scale * NT_XENT)
            )
        ),
        r"same_id has no kernel yet beside similarity\('query', 'query'\)",
    ),
    "nt_xent_without_positives_alone": (
        spec(mean_over_queries(logsumexp_over_keys(scale * NT_XENT, 1 - is_positive) - positive(scale * NT_XENT))),
        "where=1 - is_self leaves out the row itself",
    ),
    "nt_xent_of_two_masks": (
        spec(
            mean_over_queries(
                logsumexp_over_keys(scale * NT_XENT, 1 - is_self)
                - logsumexp_over_keys(scale * NT_XENT, (1 - is_self) * (1 - is_positive))
            )
        ),
        "differ in their masks",
    ),
    "nt_xent_with_keys": (
        spec(mean_over_queries(logsumexp_over_keys(X, 1 - is_self) - positive(scale * NT_XENT))),
        "has no keys beside it",
    ),
    "nt_xent_of_columns": (
        spec(mean_over_queries(logsumexp_over_queries(scale * NT_XENT, 1 - is_self) - positive(scale * NT_XENT))),
        "is symmetric: write logsumexp_over_keys",
    ),
    "nt_xent_of_the_diagonal": (
        spec(mean_over_queries(logsumexp_over_keys(NT_XENT, 1 - is_self) - positive(NT_XENT)), "diagonal"),
        "a row is not its own positive",
    ),
    "siglip_of_one_side": (spec(sum_over_pairs(softplus(NT_XENT)) / queries), "sum_over_pairs in a loss over"),
    "margins of both sides": (
        spec(INFONCE_OF(X - is_positive) + mean_over_keys(logsumexp_over_queries(X) - positive(X)), "diagonal"),
        "a logit that depends on is_positive has no kernel yet beside mean_over_keys",
    ),
    "margins of pairs": (
        spec(sum_over_pairs(softplus((1 - 2 * is_positive) * (X - scale * is_positive / 4))) / queries),
        "a logit that depends on is_positive or same_id has no kernel yet in sum_over_pairs",
    ),
    "supcon_and_positives_left_out": (
        spec(mean_over_queries(logsumexp_over_keys(X, 1 - is_positive) - mean_over_positives(X)), "id"),
        "where= with is_positive has no kernel yet beside positives='id'",
    ),
    "supcon_of_both_forms": (
        spec(
            mean_over_queries(
                logsumexp_over_keys(X) - mean_over_positives(X) / 2 - logsumexp_over_keys(X, is_positive) / 2
            ),
            "id",
        ),
        "two statistics of positives have no kernel yet",
    ),
    "supcon_of_both_sides": (
        spec(
            mean_over_queries(logsumexp_over_keys(X) - mean_over_positives(X))
            + mean_over_keys(logsumexp_over_queries(X) - mean_over_positives(X)),
            "id",
        ),
        "positives='id' has no kernel yet beside mean_over_keys",
    ),
    "supcon_of_two_logits": (
        spec(mean_over_queries(logsumexp_over_keys(X) - mean_over_positives(2 * z)), "id"),
        "positives='id' has kernels for one logit",
    ),
    "supcon_with_a_margin": (
        spec(mean_over_queries(logsumexp_over_keys(X - is_positive) - mean_over_positives(X)), "id"),
        "a logit with is_positive has no kernel yet beside positives='id'",
    ),
    "a guide beside a positive": (
        spec(mean_over_queries(logsumexp_over_keys(X) - positive(X) - mean_by_softmax(X, guide)), "diagonal"),
        "a mean by a guide has kernels of queries alone by positives='none', or of both sides by positives='diagonal'",
    ),
    "a guide of keys alone": (
        spec(
            mean_over_queries(logsumexp_over_keys(X))
            + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax_over_queries(X, guide)),
            "diagonal",
        ),
        r"for both sides mean_by_softmax\(x, guide\) in mean_over_queries and mean_by_softmax_over_queries\(x, guide\)",
    ),
    "a guide of the other side": (
        spec(
            mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax_over_queries(X, guide))
            + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax(X, guide)),
            "diagonal",
        ),
        r"mean_by_softmax_over_queries\(x, guide\) has no value in mean_over_queries: write mean_by_softmax\(x",
    ),
    "a guide of both sides without a sum": (
        spec(
            mean_over_queries(-mean_by_softmax(X, guide))
            + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax_over_queries(X, guide)),
            "diagonal",
        ),
        r"write logsumexp_over_keys\(x\) and logsumexp_over_queries\(x\), too",
    ),
    "a guide of both sides with weights": (
        spec(
            mean_over_queries(query_weight * (logsumexp_over_keys(X) - mean_by_softmax(X, guide)))
            + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax_over_queries(X, guide)),
            "diagonal",
        ),
        "a mean by a guide of both sides has kernels in sums of constant multiples",
    ),
    "a guide of both sides with a mean of all": (
        spec(
            mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax(X, guide) - mean_of_keys(X))
            + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax_over_queries(X, guide)),
            "diagonal",
        ),
        "have no kernel yet beside a mean by a guide: leave them out",
    ),
    "a guide of both sides beside another positive": (
        spec(
            mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax(X, guide) - positive(z))
            + mean_over_keys(logsumexp_over_queries(X) - mean_by_softmax_over_queries(X, guide)),
            "diagonal",
        ),
        "mean_by_softmax has kernels for one logit",
    ),
    "a positive of no query": (
        spec(mean_over_queries(logsumexp_over_keys(X) - positive(X)), "none"),
        "positives='none' says that no key is a positive",
    ),
    "no positive and no guide": (
        spec(mean_over_queries(logsumexp_over_keys(X)), "none"),
        r"positives='none' has no kernel without a mean by a guide: add mean_by_softmax\(x, guide\)",
    ),
    "a guide that is scaled": (
        spec(mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax(X, 2 * guide)), "none"),
        "has a kernel where it is `guide`: scale the guide's features instead",
    ),
    "a guide of both sides": (
        spec(
            mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax(X, guide))
            + mean_over_keys(logsumexp_over_queries(X)),
            "none",
        ),
        "positives='none' has kernels for queries alone: for both sides write positives='diagonal'",
    ),
    "a guide of another logit": (
        spec(mean_over_queries(logsumexp_over_keys(X) - mean_by_softmax(z, guide)), "none"),
        "mean_by_softmax has kernels for one logit",
    ),
    "pairs without positives": (
        spec(sum_over_pairs(softplus(X)) / queries, "none"),
        "sum_over_pairs has no kernel yet beside positives='none'",
    ),
    "a guide in a logit": (
        spec(mean_over_queries(logsumexp_over_keys(X + guide) - positive(X + guide))),
        "write it with z, scale and bias alone",
    ),
    "a mean of one positive": (
        spec(mean_over_queries(logsumexp_over_keys(X) - mean_over_positives(X)), "label"),
        "mean_over_positives is of any number",
    ),
    "positives and no sum": (
        spec(mean_over_queries(-mean_over_positives(X)), "id"),
        "a statistic of positives has no kernel alone",
    ),
    "a margin towards keys": (spec(INFONCE_OF(MARGIN) + COLUMNS_OF(scale * z), "diagonal"), NO_MARGIN),
    "a margin towards queries": (spec(INFONCE_OF(scale * z) + COLUMNS_OF(MARGIN), "diagonal"), NO_MARGIN),
    "a margin of both sides": (spec(INFONCE_OF(MARGIN) + COLUMNS_OF(MARGIN), "diagonal"), NO_MARGIN),
    "a margin in a mask": (
        spec(mean_over_queries(logsumexp_over_keys(MARGIN, 1 - same_id) - positive(MARGIN))),
        "a logit that depends on is_positive has a kernel in logsumexp_over_keys without where= alone",
    ),
    "by_id": (spec(INFONCE_OF(X), "id"), "positives='id'"),
    "ids_excluded": (
        spec(mean_over_queries(logsumexp_over_keys(X, is_positive + (1 - same_id)) - positive(X))),
        "the mask where=",
    ),
    "smoothing of a capped logit": (
        spec(INFONCE_OF(tanh(z)) + mean_over_queries(mean_of_keys(tanh(z)))),
        r"mean_of_keys has kernels for logits affine in z, not for tanh\(z\): leave it out, or write",
    ),
    "smoothing of one side": (
        spec(mean_over_queries(logsumexp_over_keys(NT_XENT, 1 - is_self) - mean_of_keys(NT_XENT))),
        "has no kernel yet: give both sides, and write z",
    ),
    "smoothing by id": (
        spec(INFONCE_OF(X) - mean_over_queries(mean_of_keys(X)), "id"),
        r"mean_of_keys\(x\) has no kernel yet beside positives='id': leave it out, or write positives='label'",
    ),
    "smoothing beside a margin": (
        spec(INFONCE_OF(MARGIN) + mean_over_queries(mean_of_keys(MARGIN))),
        r"mean_of_keys of a logit that depends on is_positive: write mean_of_keys\(scale \* z\)",
    ),
    "smoothing of another logit": (
        spec(INFONCE_OF(X) + mean_over_queries(mean_of_keys(2 * z))),
        r"mean_of_keys\(2 \* z\) is not of the one logit: write mean_of_keys\(scale \* z \+ bias\)",
    ),
    "smoothing by a weight": (
        spec(mean_over_queries(query_weight * (logsumexp_over_keys(X) - mean_of_keys(X)))),
        r"mean_of_keys\(x\) has kernels only as a constant multiple in a sum: take it out of query_weight",
    ),
    "smoothing in a function": (
        spec(mean_over_queries(softplus(logsumexp_over_keys(X) - mean_of_keys(X)))),
        r"mean_of_keys\(x\) has kernels only as a constant multiple in a sum: take it out of softplus",
    ),
    "smoothing of the wrong side": (
        spec(INFONCE_OF(X) + mean_over_keys(mean_of_keys(X)), "diagonal"),
        r"mean_of_keys\(x\) has no value in mean_over_keys: write mean_of_queries\(x\)",
    ),
    "smoothing of keys by labels": (
        spec(INFONCE_OF(X) + mean_over_keys(mean_of_queries(X))),
        r"needs positives='diagonal': write mean_of_keys\(x\) in mean_over_queries, the same number",
    ),
    "smoothing of pairs": (
        spec(sum_over_pairs(softplus(X)) / queries + mean_over_queries(mean_of_keys(X))),
        "sum_over_pairs beside mean_of_keys, mean_over_queries has no kernel yet",
    ),
    "weights of keys in a mean over queries": (
        spec(mean_over_queries(key_weight * (logsumexp_over_keys(X) - positive(X))), "diagonal"),
        "key_weight has no value in mean_over_queries: write query_weight",
    ),
    "weights of queries in a mean over keys": (
        spec(mean_over_keys(query_weight * (logsumexp_over_queries(X) - positive(X))), "diagonal"),
        "query_weight has no value in mean_over_keys: write key_weight",
    ),
    "weights of keys alone": (
        spec(mean_over_keys(key_weight * (logsumexp_over_queries(X) - positive(X))), "diagonal"),
        "such terms of keys have no kernel without a log-sum-exp over keys: exchange queries and keys",
    ),
    "weights of keys in a sum over pairs": (
        spec(sum_over_pairs(key_weight * softplus(X)) / queries),
        "key_weight has no kernel yet in sum_over_pairs: write it in mean_over_keys",
    ),
    "weights of keys by labels": (
        spec(mean_over_keys(key_weight * (logsumexp_over_queries(X) - positive(X)))),
        "logsumexp_over_queries needs positives='diagonal'",
    ),
    "weights of the mean of a key's logits": (
        spec(mean_over_keys(key_weight * (logsumexp_over_queries(X) - mean_of_queries(X))), "diagonal"),
        r"mean_of_queries\(x\) has kernels only as a constant multiple in a sum",
    ),
    "a temperature of one term": (
        spec(INFONCE_OF(query_scale * scale * z) + INFONCE_OF(scale * z)),
        r"query_scale, .*, is a factor of similarities alone: write query_scale \* z wherever z stands; query_w",
    ),
    "a temperature beside a similarity": (
        spec(mean_over_queries(key_scale * (logsumexp_over_keys(X) - positive(X)))),
        "key_scale, .*, is a factor of similarities",
    ),
    "temperatures of one side": (
        spec(INFONCE_OF(query_scale * NT_XENT)),
        "a factor of similarities in a loss over .* has no kernel yet: give both sides",
    ),
    "temperatures of negatives": (
        spec(mean_over_queries(logsumexp_over_negatives(key_scale * z) + logsumexp_over_keys(key_scale * z))),
        "key_scale has no value in logsumexp_over_negatives: multiply",
    ),
    "weights of a mean that are not affine": (
        spec(INFONCE_OF(X) - mean_over_queries(mean_of_keys(X, weight=guide**2))),
        r"weights that are affine in guide, not for guide\*\*2: write one such as \(1 \+ guide\) / 2",
    ),
    "weights and none": (
        spec(INFONCE_OF(X) - mean_over_queries(mean_of_keys(X, weight=1 + guide) + mean_of_keys(X))),
        "the means of all keys differ in their weights: give all of them one weight=",
    ),
    "a guide in a term": (
        spec(mean_over_queries(guide * (logsumexp_over_keys(X) - positive(X)))),
        "guide stands outside of means by it",
    ),
    "a state that stays": (
        spec(mean_over_queries(logsumexp_over_keys(X) - positive(X) + query_state)),
        "query_state is kept by nothing: write next_state",
    ),
    "two states": (
        spec(mean_over_queries(next_state(query_state + 1) * logsumexp_over_keys(X) - next_state(positive(X)))),
        "a query has one state, and",
    ),
    "a state of keys that stays": (
        spec(CLIP.formula + mean_over_keys(key_state * logsumexp_over_queries(X)), "diagonal"),
        "key_state is kept by nothing: write next_state.e. of what becomes the state, or key_weight",
    ),
    "two states of a key": (
        spec(
            CLIP.formula + mean_over_keys(next_state(key_state) * logsumexp_over_queries(X) - next_state(positive(X))),
            "diagonal",
        ),
        "a key has one state, and",
    ),
    "a state of keys in a mean over queries": (
        spec(mean_over_queries(next_state(key_state) * logsumexp_over_keys(X))),
        "key_state has no value in mean_over_queries: write query_state",
    ),
    "a state of queries in a mean over keys": (
        spec(CLIP.formula + mean_over_keys(next_state(query_state) * logsumexp_over_queries(X)), "diagonal"),
        "query_state has no value in mean_over_keys: write key_state",
    ),
    "a state of keys by labels": (
        spec(INFONCE_OF(X) + mean_over_keys(next_state(key_state) * logsumexp_over_queries(X))),
        "logsumexp_over_queries needs positives='diagonal'",
    ),
    "a column in the next state alone": (
        spec(INFONCE_OF(X) + mean_over_keys(next_state(logsumexp_over_queries(X) + key_state)), "diagonal"),
        "mean_over_keys without logsumexp_over_queries",
    ),
    "a state of many positives": (
        spec(
            mean_over_queries(logsumexp_over_keys(X) - next_state(mean_over_positives(X)) * mean_over_positives(X)),
            "id",
        ),
        "next_state has no kernel yet beside positives='id': write positives='label'",
    ),
    "a sum of the state alone": (
        spec(mean_over_queries(logsumexp_over_keys(X) - next_state(logsumexp_over_keys(2 * X) + query_state))),
        "a log-sum-exp stands in next_state alone, where it has no kernel: write it in the term, too",
    ),
    "a constant in the logit": (
        spec(INFONCE_OF(detach(scale) * z)),
        "detach in a logit or in sum_over_pairs has no kernel yet: write it outside of reductions",
    ),
    "a constant of pairs": (
        spec(sum_over_pairs(detach(z) * softplus(X)) / queries, "diagonal"),
        "detach in a logit or in sum_over_pairs has no kernel yet",
    ),
    "a state of pairs": (
        spec(sum_over_pairs(query_state * softplus(X)) / queries + mean_over_queries(next_state(positive(X)))),
        "sum_over_pairs beside mean_over_queries",
    ),
    "a state of keys in pairs": (
        spec(sum_over_pairs(key_state * softplus(X)) / queries),
        "key_state has no kernel yet in sum_over_pairs: write it in mean_over_keys",
    ),
    "the mean of logits as a constant": (
        spec(mean_over_queries(logsumexp_over_keys(X) - detach(mean_of_keys(X)))),
        r"mean_of_keys\(x\) has kernels only as a constant multiple in a sum",
    ),
    "two numbers of all positives": (
        spec(
            mean_over_queries(
                logsumexp_over_keys(X)
                - logsumexp_over_all_positives(positive(X)) * logsumexp_over_all_positives(positive(z))
            )
        ),
        "two of logsumexp_over_all_positives have no kernel yet: write one, of one expression",
    ),
    "a number of all positives of many": (
        spec(mean_over_queries(logsumexp_over_keys(X) - logsumexp_over_all_positives(mean_over_positives(X))), "id"),
        "logsumexp_over_all_positives has kernels where each query has one positive: write positives='diagonal'",
    ),
    "a number of all positives of both sides": (
        spec(mean_over_queries(logsumexp_over_all_positives(positive(X))) + CLIP.formula, "diagonal"),
        "logsumexp_over_all_positives has no kernel yet beside mean_over_keys: write mean_over_queries alone",
    ),
    "a number of all sums": (
        spec(mean_over_queries(logsumexp_over_keys(X) - logsumexp_over_all_positives(logsumexp_over_keys(X)))),
        r"logsumexp_over_all_positives\(logsumexp_over_keys\(x\)\) is of positives: write an expression of",
    ),
    "a number of all positives and partners": (
        spec(
            mean_over_queries(
                OF_OTHERS - of_positive(OF_OTHERS) * logsumexp_over_all_positives(positive(scale * NT_XENT))
            )
        ),
        "logsumexp_over_all_positives has no kernel yet beside of_positive: write one of the two",
    ),
    "a number of all queries in a logit": (
        spec(INFONCE_OF(X + logsumexp_over_all_positives(positive(z)))),
        "in it: write it with z, scale and bias alone",
    ),
    "weights of pairs": (
        spec(sum_over_pairs(query_weight * softplus(X)) / queries),
        "query_weight has no kernel yet in",
    ),
    "hard negatives of both sides": (
        spec(mean_over_queries(logsumexp_over_negatives(X)) + CLIP.formula, "diagonal"),
        r"logsumexp_over_negatives\(x\) has no kernel yet beside mean_over_keys: write",
    ),
    "negatives of another logit": (
        spec(mean_over_queries(logsumexp_over_keys(X) - positive(X) + logsumexp_over_negatives(2 * z))),
        "exactly one logit",
    ),
    "sides of a term": (
        spec(mean_over_queries(is_first * (OF_OTHERS - positive(scale * NT_XENT)))),
        "is_first stands outside of log-sum-exps: write it in their where=",
    ),
    "sides of rows that are no pairs": (
        spec(mean_over_queries(_of_rows(same_side * (1 - is_positive)) - positive(scale * NT_XENT))),
        "is_first and same_side have kernels for rows in pairs, beside of_positive or a threshold: write",
    ),
    "the positives of one side": (
        spec(mean_over_queries(softplus(of_positive(_of_rows(is_first)) - _of_rows(is_first)))),
        r"has no kernel yet: write \(1 - is_self\) \* \(1 - is_positive\) \* \(1 - is_first \* same_side\), say",
    ),
    "a threshold of one side": (
        spec(mean_over_queries(_of_rows((1 - is_positive) * (1 - NEAR_ROW * is_first)) - positive(scale * NT_XENT))),
        r"\(1 - step\(z - positive\(z\) - 0.1\)\) \* \(1 - is_first \* same_side\), say",
    ),
    "positives above a threshold": (
        spec(mean_over_queries(_of_rows(1 - NEAR_ROW) - positive(scale * NT_XENT))),
        r"write \(1 - is_self\) \* \(1 - is_positive\) \* \(1 - step\(z - positive\(z\) - 0.1\)\), say",
    ),
    "a threshold of ids": (
        spec(mean_over_queries(_of_rows(1 - NEAR_ROW) - mean_over_positives(scale * NT_XENT)), "id"),
        "a threshold has no kernel yet beside positives='id': write positives='label'",
    ),
    "a threshold of two sums": (
        spec(
            mean_over_queries(
                _of_rows((1 - is_positive) * (1 - NEAR_ROW)) + _of_rows((1 - is_positive) * (1 - NEAR_ROW), 2)
            )
        ),
        "two log-sum-exps have no kernel yet beside a threshold or is_first in a loss of one side: write one",
    ),
    "partners of many positives": (
        spec(mean_over_queries(OF_OTHERS + of_positive(OF_OTHERS) - mean_over_positives(scale * NT_XENT)), "id"),
        "of_positive needs positives='label'",
    ),
    "partners with weights": (
        spec(mean_over_queries(query_weight * softplus(OF_OTHERS - of_positive(OF_OTHERS)))),
        "query_weight has no kernel yet beside of_positive",
    ),
    "partners with negatives": (
        spec(
            mean_over_queries(ROW + softplus(of_positive(COLUMN) - ROW) - logsumexp_over_negatives(X)),
            positives="diagonal",
        ),
        "logsumexp_over_negatives has no kernel yet beside of_positive",
    ),
    "negatives of partners that have no threshold": (
        spec(mean_over_queries(of_positive(OF_OTHERS) + OF_OTHERS - OF_NEAR)),
        r"beside of_positive, and no others: write logsumexp_over_negatives\(x\)$",
    ),
    "negatives of partners without their threshold": (
        spec(mean_over_queries(of_positive(OF_KEPT) + OF_KEPT - logsumexp_over_negatives(scale * NT_XENT))),
        r"write where=.*, as in the other log-sum-exps$",
    ),
    "negatives above a threshold of two sides": (
        spec(mean_over_queries(logsumexp_over_keys(X) - positive(X) + logsumexp_over_negatives(X, where=1 - step(z)))),
        r"beside of_positive, and no others: write logsumexp_over_negatives\(x\)$",
    ),
    "partners alone": (
        spec(mean_over_queries(of_positive(OF_OTHERS) - positive(scale * NT_XENT))),
        "where the row's own log-sum-exp is not: write that one",
    ),
    "partners of two logits": (
        spec(
            mean_over_queries(
                softplus(logsumexp_over_keys(2 * scale * NT_XENT, 1 - is_self) - OF_OTHERS) * of_positive(OF_OTHERS)
            )
        ),
        "of_positive has no kernel yet beside two log-sum-exps",
    ),
    "partners of the second logit": (
        spec(
            mean_over_queries(
                softplus(OF_OTHERS - of_positive(logsumexp_over_keys(2 * scale * NT_XENT, 1 - is_self)))
                - positive(scale * NT_XENT)
            )
        ),
        "of_positive has no kernel yet beside two log-sum-exps",
    ),
    "the positive of the positive": (
        spec(mean_over_queries(OF_OTHERS - of_positive(positive(scale * NT_XENT)))),
        "of_positive is of a log-sum-exp alone",
    ),
    "the margin of a partner": (
        spec(
            mean_over_queries(
                OF_OTHERS - of_positive(logsumexp_over_keys(scale * (NT_XENT - is_positive / 5), 1 - is_self))
            )
        ),
        "a logit with is_positive has no kernel yet in of_positive",
    ),
    "columns of labels": (
        spec(mean_over_queries(softplus(ROW - of_positive(COLUMN)) - positive(X))),
        "no other query has a query's key: write positives='diagonal', or positives='id'",
    ),
    "columns without several positives": (
        spec(mean_over_queries(logsumexp_over_keys(X) - of_positive(COLUMN) - mean_over_positives(X)), "id"),
        "where= with is_positive has no kernel yet beside positives='id': leave it out of that log-sum-exp",
    ),
    "columns beside both sides": (
        spec(mean_over_queries(softplus(ROW - of_positive(COLUMN))) + CLIP.formula, "diagonal"),
        "of_positive has no kernel yet beside mean_over_keys",
    ),
    "columns with positives": (
        spec(
            mean_over_queries(softplus(logsumexp_over_keys(X) - of_positive(logsumexp_over_queries(X))) - positive(X)),
            "diagonal",
        ),
        "kernels where sums leave positives out: write where=1 - is_positive in both",
    ),
    "columns alone": (
        spec(mean_over_queries(of_positive(COLUMN) - positive(X)), "diagonal"),
        r"has no kernel without a log-sum-exp over keys: exchange queries and keys",
    ),
    "columns with a state": (
        spec(mean_over_queries(ROW + of_positive(COLUMN) - next_state(positive(X))), "diagonal"),
        "next_state has no kernel yet beside of_positive",
    ),
    "columns of two logits": (
        spec(
            mean_over_queries(softplus(logsumexp_over_keys(2 * X, where=1 - is_positive) - ROW) * of_positive(COLUMN)),
            "diagonal",
        ),
        "of_positive has no kernel yet beside two log-sum-exps",
    ),
    "the margin of a column": (
        spec(mean_over_queries(ROW - of_positive(logsumexp_over_queries(scale * (z - is_positive / 5)))), "diagonal"),
        "a logit with is_positive has no kernel in of_positive: write where=1 - is_positive",
    ),
    "a threshold beside columns": (
        spec(
            mean_over_queries(
                logsumexp_over_keys(X, where=(1 - is_positive) * (1 - step(z - positive(z)))) + of_positive(COLUMN)
            ),
            "diagonal",
        ),
        "a threshold has no kernel yet beside of_positive",
    ),
    "a number of all positives and columns": (
        spec(mean_over_queries(ROW - of_positive(COLUMN) * logsumexp_over_all_positives(positive(X))), "diagonal"),
        "logsumexp_over_all_positives has no kernel yet beside of_positive: write one of the two",
    ),
    "four_blocks": (
        spec(
            mean_over_queries(
                log(exp(logsumexp_over_keys(X)) + exp(logsumexp_over_keys(scale * NT_XENT))) - positive(X)
            )
        ),
        "has no keys beside it",
    ),
    "logits that are normalised": (
        spec(mean_over_queries(logsumexp_over_keys(X - logsumexp_over_queries(X)) - positive(X)), "diagonal"),
        r"logsumexp_over_queries\(.*\) stands inside another sum: a logit is of z",
    ),
    "matryoshka": (
        spec(INFONCE_OF(scale * similarity(first=64)) + INFONCE_OF(scale * similarity(first=128))),
        "exactly one logit",
    ),
}


@pytest.mark.parametrize("name", sorted(ROADMAP))
def test_the_language_carries_the_roadmap(name: str) -> None:
    loss, reason = ROADMAP[name]
    with pytest.raises(LossError, match=reason) as error:
        derive(loss)
    assert isinstance(error.value, InputError)
    said = str(error.value).removeprefix("loss mine: ")
    assert "\n" not in said and ": " in said and len(said.split()) <= 40, said
    if z in loss.formula.free_symbols and not loss.formula.has(of_positive):
        assert loss.formula.diff(z) != 0


def test_the_gradient_of_a_pointwise_loss_is_derived() -> None:
    gradient = SIGLIP.formula.diff(z)
    sign = 1 - 2 * is_positive
    assert sympy.expand(gradient - sign * scale * sigmoid(sign * X) / queries) == 0


REFUSED = {
    "two masks": spec(
        mean_over_queries(logsumexp_over_keys(X, where=KEPT) - positive(X))
        + mean_over_keys(logsumexp_over_queries(X) - positive(X)),
        "diagonal",
    ),
    "a positive by its id": spec(sum_over_pairs(softplus(X) * (1 - same_id)) / queries, "diagonal"),
    "two logits": spec(mean_over_queries(logsumexp_over_keys(X) + logsumexp_over_keys(2 * z) - positive(X))),
    "a logit and its negative": spec(mean_over_queries(logsumexp_over_keys(X) + logsumexp_over_keys(-X) - positive(X))),
    "two logits of keys": spec(mean_over_keys(logsumexp_over_queries(X) + logsumexp_over_queries(2 * X)), "diagonal"),
    "two logits of both sides": spec(CLIP.formula + mean_over_queries(logsumexp_over_keys(2 * X)), "diagonal"),
    "two logits, and one in another mean": spec(
        mean_over_queries(logsumexp_over_keys(X)) + mean_over_keys(logsumexp_over_keys(2 * X)), "diagonal"
    ),
    "three logits": spec(mean_over_queries(sum(logsumexp_over_keys(c * X) for c in (1, 2, 3)) - positive(X))),
    "multiples of many positives": spec(
        mean_over_queries(logsumexp_over_keys(2 * X) - logsumexp_over_keys(X, where=is_positive)), "id"
    ),
    "weight outside": spec(scale * INFONCE_OF(X)),
    "a sum inside a positive": spec(mean_over_queries(logsumexp_over_keys(X) - positive(logsumexp_over_keys(X)))),
    "no logsumexp": spec(mean_over_queries(positive(X))),
    "no z": spec(INFONCE_OF(scale + bias)),
    "not linear, of keys alone": spec(mean_over_keys(logsumexp_over_queries(X) ** 2), "diagonal"),
    "square of a mean": spec(INFONCE_OF(X) ** 2),
    "mean of a mean": spec(mean_over_queries(INFONCE_OF(X))),
    "something added": spec(INFONCE_OF(X) + 3),
    "keys with labels": spec(INFONCE_OF(X) + mean_over_keys(logsumexp_over_queries(X)), "label"),
    "wrong side": spec(mean_over_queries(logsumexp_over_queries(X) - positive(X)), "diagonal"),
    "nested": spec(INFONCE_OF(scale * z + logsumexp_over_keys(z))),
    "bias inside the cap": spec(INFONCE_OF(tanh(scale * z + bias)) + mean_over_queries(positive(tanh(X)))),
    "scale in the shift, shares that do not cancel": spec(
        mean_over_queries(logsumexp_over_keys(scale * (z - 1)) - positive(scale * (z - 1)) / 2)
    ),
    "bias times z": spec(INFONCE_OF(scale * z + bias * z)),
    "a weight of nothing": spec(mean_over_queries((logsumexp_over_keys(X) - positive(X)) / 10**20) / 10**20),
}
# What the message must say besides the loss's name: what is wrong, and that it is the language that lacks it.
OUTSIDE = {
    "unknown function": (sympy.sin(scale * z), "sin is not in the loss language; its functions are .*, sqrt$"),
    "the larger": (sympy.Max(z, 0), r"Max is not in the loss language: write maximum\(u, v\)$"),
    "a margin of an angle": (sympy.cos(sympy.acos(z) + 0.3), r"cos is not .*: write math\.cos\(m\) \* z - math\.sin"),
    "a magnitude": (abs(z), r"Abs is not in the loss language: write maximum\(u, -u\)$"),
    "a fifth power": ((scale * z) ** 5, "powers of the loss language are .* not scale"),
    "a cube root": (z ** sympy.Rational(1, 3), "powers of the loss language"),
    "a power by z": (2**z, "powers of the loss language"),
    "infinite": (scale * z + sympy.oo, "numbers of the loss language are .* not oo"),
    "complex": (sympy.I * scale * z, "numbers of the loss language are .* not I"),
    "no number": (sympy.nan * z, "numbers of the loss language are .* not nan"),
    "a comparison": (sympy.false, "numbers of the loss language are .* not False: == compares formulas"),
    "a slope of nothing": (sympy.Float("1e-50") * z, "numbers of the loss language are .* not 1.0*E-50"),
    "a slope of everything": (sympy.Integer(10) ** 50 * z, "numbers of the loss language"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_one_sentence(name: str) -> None:
    with pytest.raises(LossError) as error:
        derive(REFUSED[name])
    said = str(error.value).removeprefix("loss mine: ")
    assert "\n" not in said and ": " in said and len(said.split()) <= 32, said


_SUM, _OWN = logsumexp_over_keys(X), positive(z)
SAID = {  # of a positive's similarity, which a logit has not, and of two log-sum-exps
    "the mean of a mean": (mean_over_queries(_SUM - mean_over_queries(_OWN)), "mean_over_queries(positive(z))"),
    "a factor of a mean": (_OWN * mean_over_queries(_SUM), "multiplied by positive(z): write"),
    "a function of a mean": (exp(mean_over_queries(_SUM - _OWN)), "(logsumexp_over_keys(x) - positive(z)) stands in"),
    "outside of means": (mean_over_queries(_SUM) - _OWN, "-positive(z) stands outside of means"),
    "two states": (mean_over_queries(_SUM * next_state(_OWN) * next_state(query_state)), "next_state(positive(z)) and"),
    "two log-sum-exps": (
        mean_over_queries(_SUM + logsumexp_over_keys(2 * X)) + COLUMNS_OF(X),
        "two log-sum-exps of a query have no kernel yet beside mean_over_keys: write mean_over_queries alone",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_refusals_speak_the_language(name: str) -> None:
    """Planted: symbols of reduced formulas, such as `positive_z` and `r2`."""
    formula, words = SAID[name]
    with pytest.raises(LossError) as error:
        derive(spec(formula, "diagonal"))
    assert words in str(error.value), error.value


_FAR = logsumexp_over_keys(scale * z, where=(1 - same_id) * (1 - is_positive))
_NEAR = positive(scale * z - scale / 5)
OFFERED = {  # refused, and what the message says to write instead
    "z alone": (INFONCE_OF(X) - mean_over_queries(z), "write positive", INFONCE_OF(X) - mean_over_queries(positive(z))),
    "positives alone": (
        mean_over_queries(positive(X)), r"write sum_over_pairs\(is_positive \* x\) / queries",
        sum_over_pairs(is_positive * X) / queries,
    ),
    "a function of z and scale": (
        sum_over_pairs(z * softplus(scale * z)) / queries, r"scale occurs in z \* softplus\(scale \* z\) other than as",
        sum_over_pairs(scale * z * softplus(scale * z)) / queries,
    ),
    "a weight of a mean": (
        scale * INFONCE_OF(X), "multiplied by scale: write that factor inside",
        mean_over_queries(scale * (logsumexp_over_keys(X) - positive(X))),
    ),
    "bias in a cap": (INFONCE_OF(tanh(scale * z + bias)), "as a last term", INFONCE_OF(tanh(scale * z) + bias)),
    "a margin in a mask": (
        mean_over_queries(logsumexp_over_keys(MARGIN, 1 - same_id * (1 - is_positive)) - positive(MARGIN)),
        r"write positive\(a\) \+ softplus",
        mean_over_queries(_NEAR + softplus(_FAR - _NEAR) - _NEAR),
    ),
    "numbers of positives": (
        mean_over_queries((logsumexp_over_keys(X) - positive(X)) / positives_of_query), "is of many positives",
        mean_over_queries((logsumexp_over_keys(X) - positive(X)) * query_weight),
    ),
    "sides of queries and keys": (
        mean_over_queries(logsumexp_over_keys(X, where=is_first) - positive(X)),
        r"are two sides: write them beside similarity\('query', 'query'\)",
        mean_over_queries(softplus(_of_rows(OF_FIRST) - of_positive(_of_rows(OF_FIRST)))),
    ),
    "a row and itself of two sides": (
        mean_over_queries(logsumexp_over_keys(X, where=1 - is_self) - positive(X)), "write it beside similarity",
        mean_over_queries(logsumexp_over_keys(NT_XENT, where=1 - is_self) - positive(NT_XENT)),
    ),
    "ids of rows": (
        mean_over_queries(
            logsumexp_over_keys(NT_XENT, where=(1 - is_self) * (1 - same_id * (1 - is_positive))) - positive(NT_XENT)
        ),
        "pass the rows as queries and as keys",
        mean_over_queries(logsumexp_over_keys(X, where=1 - same_id * (1 - is_positive)) - positive(X)),
    ),
    "pairs of one id": (
        mean_over_queries(logsumexp_over_keys(X, same_id) - positive(X)), r'write positives="id"$',
        mean_over_queries(logsumexp_over_keys(X, 1 - same_id * (1 - is_positive)) - positive(X)),
    ),
    "another mask": (
        mean_over_queries(logsumexp_over_keys(X, is_positive + (1 - same_id)) - positive(X)),
        r"write 1 - is_positive, 1 - same_id \* \(1 - is_positive\), or the product of both",
        mean_over_queries(logsumexp_over_keys(X, (1 - is_positive) * (1 - same_id * (1 - is_positive))) - positive(X)),
    ),
    "a temperature outside": (
        mean_over_queries(query_scale * (logsumexp_over_keys(X) - positive(X))), "query_weight multiplies terms",
        mean_over_queries(query_weight * (logsumexp_over_keys(X) - positive(X))),
    ),
    "partners of two sides": (
        mean_over_queries(softplus(logsumexp_over_keys(X) - of_positive(logsumexp_over_keys(X))) - positive(X)),
        r"for rows in pairs: write similarity\('query', 'query'\) of both sides in one tensor",
        mean_over_queries(softplus(OF_OTHERS - of_positive(OF_OTHERS)) - positive(scale * NT_XENT)),
    ),
    "a number beside means": (INFONCE_OF(X) + 3, "3 stands outside", INFONCE_OF(X) + mean_over_queries(3)),
    "smoothing by a weight": (
        mean_over_queries(query_weight * (logsumexp_over_keys(X) - mean_of_keys(X))), "take it out of",
        mean_over_queries(query_weight * logsumexp_over_keys(X) - mean_of_keys(X)),
    ),
    "smoothing of keys": (
        INFONCE_OF(X) - mean_over_keys(mean_of_queries(X)), r"write mean_of_keys\(x\) in mean_over_queries",
        INFONCE_OF(X) - mean_over_queries(mean_of_keys(X)),
    ),
    "a logit with a number of queries": (
        INFONCE_OF(scale * z / queries), "has queries in it: write it with z, scale and bias", INFONCE_OF(scale * z)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OFFERED))
def test_what_a_refusal_offers_has_kernels(name: str) -> None:
    refused, says, offered = OFFERED[name]
    with pytest.raises(LossError, match=says):
        derive(spec(refused))
    assert derive(spec(offered)).spec.formula == offered


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_what_is_not_in_the_language_is_named(name: str) -> None:
    logit, message = OUTSIDE[name]
    with pytest.raises(LossError, match=f"^loss mine: .*{message}"):
        spec(INFONCE_OF(logit))


def test_a_comparison_is_no_mask() -> None:
    with pytest.raises(
        LossError, match=r"StrictGreaterThan is not in the loss language: write step\(u - v\) for u > v$"
    ):
        spec(mean_over_queries(logsumexp_over_keys(X, where=z > 0) - positive(X)))


@pytest.mark.parametrize("weight", ["1e-50", "1e-31", "1e31"])
def test_a_weight_that_fp32_cannot_hold_is_refused(weight: str) -> None:
    for formula in (sympy.Float(weight) * INFONCE_OF(X), INFONCE_OF(sympy.Float(weight) * z)):
        with pytest.raises(LossError, match=r"1e-30 to 1e\+30 in magnitude"):
            spec(formula)


NESTED: list[tuple[Any, str]] = [
    (lambda u: tanh(u) + u, "at most 1024 parts"),
    (lambda u: log(u) + u, "at most 1024 parts"),
    (lambda u: softplus(u) + u, "at most 1024 parts"),
    (lambda u: (u + z) ** 2, "at most 1024 parts"),
    (softplus, "more than 10000 characters"),  # which a printer writes with its argument twice
]


@pytest.mark.parametrize(("case", "times"), combined(NESTED, [14, 60]))
def test_nested_functions_are_refused_at_once(case: tuple[Any, str], times: int) -> None:
    """What SymPy and the printers do with them takes time that is exponential in the depth."""
    nested, message = case

    def refused() -> None:
        with pytest.raises(LossError, match=message):
            logit = scale * z
            for _ in range(times):
                logit = nested(logit)
            derive(spec(INFONCE_OF(logit)))

    assert calls(refused) < 4_000_000  # about a second


@pytest.mark.parametrize("times", [400, 480, 700])
def test_a_deep_formula_is_refused(times: int) -> None:
    """Planted: Python's RecursionError."""
    term = positive(X)
    for _ in range(times):
        term = sigmoid(term)
    with pytest.raises(LossError, match=r"nested too deeply|at most 1024 parts|characters"):
        derive(spec(mean_over_queries(term)))


def test_a_product_of_sums_counts_as_it_is_multiplied_out() -> None:
    for factors, terms in ((10, "2048"), (30, "over 1000000")):
        with pytest.raises(LossError, match=f"at most 1024 parts, .*this one has [0-9]+ and {terms}$"):
            spec(INFONCE_OF(sympy.prod(z + number * scale for number in range(1, factors + 1))))


@pytest.mark.parametrize("undefined", [log, sympy.sqrt])
def test_the_logarithm_of_a_similarity_is_refused(undefined: Any) -> None:
    """It may be negative for a pair. That of what is positive there is not refused."""

    def pairs(term: Any) -> Any:
        return sum_over_pairs(term) / queries

    for term in (z, scale * z + bias, language.maximum(z, -2), sigmoid(z) - sympy.Rational(1, 2)):
        one = undefined(term)
        for formula in (pairs(one), pairs(is_positive * one), pairs(softplus(one)), INFONCE_OF(one)):
            with pytest.raises(LossError, match=r"is undefined at z = -1, scale = 1, bias = 0; maximum\("):
                derive(spec(formula))
    for term in (language.maximum(z, 1e-6), softplus(z), sigmoid(X), 1 + z**2, 1 - z**2, language.step(z) + 1):
        assert derive(spec(pairs(undefined(term)))).pair_slope is not None


def test_the_largest_formula_is_derived_at_once() -> None:
    logit = scale * z
    for _ in range(6):
        logit = tanh(logit) + logit
    assert calls(lambda: derive(spec(INFONCE_OF(logit)))) < 2_000_000
    with pytest.raises(LossError, match="at most 1024 parts"):
        spec(INFONCE_OF(tanh(logit) + logit))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("not a name", INFONCE_OF(X)), "ASCII identifier"),
        (("é", INFONCE_OF(X)), "ASCII identifier"),
        (("class", INFONCE_OF(X)), "ASCII identifier"),
        (('a"; import os', INFONCE_OF(X)), "ASCII identifier"),
        ((3, INFONCE_OF(X)), "ASCII identifier"),
        (("a", "r - p"), "must be a SymPy expression"),
        (("a", INFONCE_OF(X), "somewhere"), "is not one of"),
        (("a", INFONCE_OF(sympy.Symbol("z"))), "unknown symbol 'z'"),
        (("a", INFONCE_OF(X) + sympy.Symbol('__import__("os")')), "unknown symbol"),
        (("a", X), "not reduced to one number"),
        (("a", INFONCE_OF(X), "label", 7), "doc must be a string"),
        (("a", INFONCE_OF(X), "label", "", 7), "source must be a string"),
        (("a", INFONCE_OF(X), "label", "", "", 7), "use must be a string"),
    ],
)
def test_a_spec_validates_its_fields(arguments: tuple, message: str) -> None:
    with pytest.raises(LossError, match=message):
        LossSpec(*arguments)


def test_opaque_functions_know_their_derivatives() -> None:
    assert logsumexp_over_keys(x).diff(x) == exp(x - logsumexp_over_keys(x))
    with pytest.raises(LossError, match="has no slope of one pair: it changes with the pairs of another row"):
        of_positive(logsumexp_over_keys(x)).diff(x)
    assert softplus(2 * x).diff(x) == 2 * sigmoid(2 * x)
    point = {x: 0.7}
    slope = sigmoid(x).diff(x).subs(point).replace(sigmoid, lambda u: 1 / (1 + exp(-u)))
    assert math.isclose(float(slope), math.exp(-0.7) / (1 + math.exp(-0.7)) ** 2)


def test_reference_takes_what_the_contract_says_and_nothing_else() -> None:
    clip, infonce = dense_package(CLIP).reference, dense_package(INFONCE).reference
    q, k = torch.randn(4, 3), torch.randn(6, 3)
    wide = torch.randn(3, 8).T[::2]
    assert clip(wide, wide.clone(), 2, None).dtype == torch.float64
    expected = torch.nn.functional.cross_entropy(14.3 * q.double() @ k.double().T, torch.tensor([5, 0, 0, 2]))
    assert torch.allclose(infonce(q, k, 14.3, labels=torch.tensor([5, 0, 0, 2])), expected, rtol=1e-14)
    assert clip(q, q, torch.tensor(1.0, requires_grad=True)).requires_grad
    for call in (
        lambda: clip(q, k),
        lambda: clip(q, q, labels=torch.arange(4)),
        lambda: clip(q, q[:, :2]),
        lambda: clip(q[0], q[0]),
        lambda: clip(q.long(), q.long()),
        lambda: clip(q[:0], q[:0]),
        lambda: clip(q, q, torch.ones(2)),
        lambda: infonce(q, k, labels=torch.tensor([0, 1, 2, 6])),
        lambda: infonce(q, k, labels=torch.tensor([0, 1, 2, -1])),
        lambda: infonce(q, k, labels=torch.tensor([0, 1, 2])),
        lambda: infonce(q, k, labels=torch.tensor([0.0, 1, 2, 3])),
        lambda: infonce(k, q),
    ):
        with pytest.raises(ValueError):
            call()


def test_the_template_context_is_plain() -> None:
    for loss in (CLIP, INFONCE):
        for value in loss_context(derive(loss)).values():
            assert isinstance(value, (str, bool, float))


def test_shares_that_nearly_cancel_leave_a_rest() -> None:
    """Only what rounding leaves of shares counts as nothing. Planted: a rest of 1e-3 of a share is dropped."""
    x = scale * z + bias
    for weight, rest in ((1.0, 0.0), (1.001, -0.001), (0.1 + 0.2, 0.7)):
        spec = LossSpec("nearly", mean_over_queries(logsumexp_over_keys(x) - weight * positive(x)), "label")
        assert derive(spec).positive_rest == pytest.approx(rest, rel=1e-9, abs=0)
    thirds = LossSpec("thirds", mean_over_queries(0.3 * logsumexp_over_keys(x) - (0.1 + 0.2) * positive(x)), "label")
    assert derive(thirds).positive_rest == 0.0
