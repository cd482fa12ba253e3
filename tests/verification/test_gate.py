"""The gate lets through what a correct kernel computes and stops planted bugs, each a bug that a peer has had."""

import dataclasses
import functools
import itertools
import math
import types

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import infcl_gen
from infcl_gen import verification
from infcl_gen.losses import CLIP, INFONCE, LossSpec
from infcl_gen.losses.language import bias, logsumexp_over_keys, mean_over_queries, positive, scale, tanh, z
from infcl_gen.verification.gate import Truth, failures, gate, truth_of
from infcl_gen.verification.oracle import LossAndGrads, oracle, plain_torch
from infcl_gen.verification.properties import (
    BIASES,
    DTYPES,
    FEATURES,
    LAYOUTS,
    SCALES,
    SOLVED,
    Case,
    Inputs,
    check_case,
    inputs_of,
    random_cases,
    tensors,
)
from tests.tiers import combined, in_pairs, nightly
from tests.verification.dense import by_shares, dense_package

_capped = 30 * tanh(scale * z / 30) + bias
SOFT_CAPPED = LossSpec("soft_capped", mean_over_queries(logsumexp_over_keys(_capped) - positive(_capped)), "label")
PACKAGES = {spec.name: dense_package(spec) for spec in (CLIP, INFONCE, SOFT_CAPPED)}

cases = st.builds(
    Case,
    queries=st.integers(1, 130),
    keys=st.integers(1, 130),
    dim=st.sampled_from([1, 3, 16, 64, 100]),
    dtype=st.sampled_from(sorted(DTYPES)),
    scale=st.sampled_from(SCALES),
    bias=st.sampled_from(BIASES),
    features=st.sampled_from(FEATURES),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)


@pytest.mark.parametrize("loss", sorted(PACKAGES))
@hypothesis.given(case=cases)
def test_a_correct_computation_passes(loss: str, case: Case) -> None:
    package = PACKAGES[loss]
    if package.loss.POSITIVES == "diagonal":
        case = dataclasses.replace(case, keys=case.queries)
    inputs = tensors(case, package.loss.POSITIVES)
    assert not failures(gate(by_shares(package, *inputs), truth_of(package, inputs)))


def judged(package, inputs: Inputs, result: LossAndGrads) -> set[str]:
    """The quantities that fail the gate."""
    return failing(result, truth_of(package, inputs))


def failing(result: LossAndGrads, truth: Truth) -> set[str]:
    return {row.quantity for row in gate(result, truth) if not row.passed}


def example(dtype: str = "bf16", rows: int = 64, scale: float = 14.3, features: str = "unit", **more) -> Inputs:
    return tensors(Case(rows, rows, more.pop("dim", 64), dtype, scale, features=features, **more))


@functools.cache
def known(dtype: str, rows: int, scale: float) -> tuple[Inputs, LossAndGrads, Truth]:
    """An input, its right results, and their truth; no test changes them."""
    inputs = example(dtype, rows, scale)
    return inputs, by_shares(PACKAGES["clip"], *inputs), truth_of(PACKAGES["clip"], inputs)


@pytest.mark.parametrize(
    ("dtype", "scale", "factor", "quantity"),
    in_pairs(sorted(DTYPES), SCALES, [0.5, 2.0, 4.0], ["dq", "dk", "dscale", "loss"]),
)
def test_a_wrong_factor_of_the_world_size_fails(dtype: str, scale: float, factor: float, quantity: str) -> None:
    _, right, truth = known(dtype, 64, scale)
    wrong = right._replace(**{quantity: getattr(right, quantity) * factor})
    assert failing(wrong, truth) == {quantity}


@pytest.mark.parametrize(("dtype", "scale", "rows"), in_pairs(sorted(DTYPES), SCALES, [2, 64, 300]))
def test_a_missed_positive_fails(dtype: str, scale: float, rows: int) -> None:
    inputs, right, truth = known(dtype, rows, scale)
    dq, last = right.dq.clone(), inputs.k[-1].double() * scale / rows
    dq[-1] = (dq[-1].double() + last).to(dq.dtype)
    assert failing(right._replace(dq=dq), truth) == {"dq"}


@pytest.mark.parametrize(("dtype", "scale", "quantity"), in_pairs(sorted(DTYPES), SCALES, ["dq", "dk"]))
def test_a_lost_row_fails(dtype: str, scale: float, quantity: str) -> None:
    _, right, truth = known(dtype, 300, scale)
    lost = getattr(right, quantity).clone()
    lost[17] = 0.0
    assert failing(right._replace(**{quantity: lost}), truth) == {quantity}


@pytest.mark.parametrize(("dtype", "rows"), combined(sorted(DTYPES), [65, 129, 1000]))
def test_a_key_that_no_query_sees_fails(dtype: str, rows: int) -> None:
    """The last key missing from the denominators, as with a mask that lacks the block's offset."""
    inputs = example(dtype, rows, 1.0)
    short = tensors(Case(rows, rows, 64, dtype, 1.0))
    right = by_shares(PACKAGES["infonce"], *inputs)
    x = inputs.q.double() @ inputs.k.double().T
    missed = (x.logsumexp(1) - x[:, :-1].logsumexp(1)).mean()
    assert torch.equal(short.q, inputs.q)
    assert "loss" in judged(PACKAGES["infonce"], inputs, right._replace(loss=right.loss - missed))


@pytest.mark.parametrize("rows", nightly([128, 1000], [128]))
def test_tf32_at_scale_100_fails_unless_asked_for(rows: int) -> None:
    inputs = example("fp32", rows, 100.0, dim=768)
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (inputs.q, inputs.k)]
    result = by_shares(PACKAGES["clip"], *cut, *inputs[2:])
    assert {"dq", "dk"} <= judged(PACKAGES["clip"], inputs, result)
    asked_for = dense_package(CLIP)
    asked_for.SPEC["problem"]["precision"] = "tf32"
    assert not judged(asked_for, inputs, result)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_underflow_of_a_fixed_reference_fails(dtype: str) -> None:
    inputs = example(dtype, 128, 100.0, "negative")
    right = by_shares(PACKAGES["clip"], *inputs)
    x = 100.0 * (inputs.q.float() @ inputs.k.float().T)
    r = 100.0 + (x - 100.0).exp().sum(1).log()
    g = (x - r[:, None]).exp()
    assert r.isinf().all()
    wrong = right._replace(loss=(r - x.diagonal()).mean(), dq=(g @ inputs.k.float()).to(inputs.q.dtype))
    assert judged(PACKAGES["clip"], inputs, wrong) == {"loss", "dq"}


def test_a_bf16_rounded_logit_of_the_positive_fails() -> None:
    inputs = example("bf16", 64, 100.0, "matched")
    x = 100.0 * (inputs.q.float() @ inputs.k.float().T)
    rounded = (x.logsumexp(1) - x.diagonal().bfloat16().float()).mean() / 2
    rounded = rounded + (x.logsumexp(0) - x.diagonal().bfloat16().float()).mean() / 2
    right = by_shares(PACKAGES["clip"], *inputs)
    assert judged(PACKAGES["clip"], inputs, right._replace(loss=rounded)) == {"loss"}


def test_accumulation_in_bf16_fails() -> None:
    inputs = example("bf16", 1024, 1.0)
    right = by_shares(PACKAGES["clip"], *inputs)
    x = inputs.q.float() @ inputs.k.float().T
    g = ((x.softmax(1) + x.softmax(0)) / 2 - torch.eye(1024)) / 1024
    dq = torch.zeros_like(inputs.q)
    for start in range(0, 1024, 4):
        dq += (g[:, start : start + 4] @ inputs.k[start : start + 4].float()).bfloat16()
    assert judged(PACKAGES["clip"], inputs, right._replace(dq=dq)) == {"dq"}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("scale", SCALES)
def test_zeros_fail_at_any_scale(dtype: str, scale: float) -> None:
    inputs = example(dtype, 100, scale)
    zeros = LossAndGrads(*map(torch.zeros_like, by_shares(PACKAGES["clip"], *inputs)))
    assert judged(PACKAGES["clip"], inputs, zeros) >= {"loss", "dq", "dk", "dscale"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantity", LossAndGrads._fields)
def test_one_bad_element_fails(bad: float, quantity: str) -> None:
    inputs = example("fp32")
    right = by_shares(PACKAGES["clip"], *inputs)
    value = getattr(right, quantity).clone()
    value.view(-1)[-1] = bad
    assert judged(PACKAGES["clip"], inputs, right._replace(**{quantity: value})) == {quantity}


@pytest.mark.parametrize("quantity", LossAndGrads._fields)
@pytest.mark.parametrize("source", ["plain torch's error", "the bound", "what plain torch is credited with"])
def test_twice_each_part_of_the_tolerance_is_allowed_and_no_more(quantity: str, source: str) -> None:
    """Where plain torch is all error, an eighth of the magnitude stands for its error."""
    zero = LossAndGrads(*(torch.zeros(shape).double() for shape in ((), (3, 2), (4, 2), (), ())))
    at_one = zero._replace(**{quantity: torch.ones_like(getattr(zero, quantity))})
    plain = {"plain torch's error": 1.0, "the bound": 0.0}.get(source, 1e6)
    truth = Truth(
        reference=zero,
        plain=LossAndGrads(*(plain * x for x in at_one)),
        bound=at_one if source == "the bound" else zero,
        magnitude=LossAndGrads(*(8.0 * x for x in at_one)),
    )
    for error, allowed in ((1.99, True), (-1.99, True), (2.01, False), (-2.01, False)):
        rows = gate(LossAndGrads(*(error * x for x in at_one)), truth)
        assert [row.quantity for row in rows if not row.passed] == ([] if allowed else [quantity])


def test_each_row_has_its_own_tolerance() -> None:
    zero = LossAndGrads(*(torch.zeros(shape).double() for shape in ((), (3, 2), (4, 2), (), ())))
    bound = torch.tensor([[1.0, 0.0], [10.0, 0.0], [1.0, 0.0]]).double()
    truth = Truth(zero, zero, zero._replace(dq=bound), zero)
    for first, passed in ((1.99, True), (2.01, False)):
        dq = torch.tensor([[0.0, first], [0.0, 0.0], [0.0, 0.0]]).double()
        assert gate(zero._replace(dq=dq), truth)[1].passed == passed


@pytest.mark.parametrize("loss", ["clip", "infonce"])
def test_plain_torch_is_the_loss_that_was_asked_for(loss: str) -> None:
    """In fp64 it is the oracle to the last digits: labels, scale and bias are its own."""
    case = Case(33, 33 if loss == "clip" else 20, 8, "fp64", 3.0, -1.0, seed=1)
    inputs = tensors(case, PACKAGES[loss].loss.POSITIVES)
    assert (inputs.labels is None) == (loss == "clip")
    for a, b in zip(plain_torch(PACKAGES[loss], inputs), oracle(PACKAGES[loss], inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_products_of_halves_have_a_tolerance_of_their_own() -> None:
    """q and k cut to 16 bits pass only where a package multiplies halves; cut to 14 they pass nowhere."""
    package = PACKAGES["clip"]
    halves = dense_package(CLIP)
    halves.SPEC["plan"]["split"] = True
    inputs = example("fp32", 128, 14.3, dim=64)

    def failing(bits: int, module: types.ModuleType) -> set[str]:
        mask = ~((1 << (24 - bits)) - 1)
        cut = [(x.view(torch.int32) & mask).view(torch.float32) for x in (inputs.q, inputs.k)]
        return judged(module, inputs, by_shares(package, *cut, *inputs[2:]))

    assert not failing(16, halves)
    assert "loss" in failing(16, package) and "loss" in failing(14, halves)
    assert {"dq", "dk", "dscale"} <= failing(13, halves)


def test_a_probability_is_not_wronger_than_by_its_own_size() -> None:
    """However wrong its logit may be: at scale 1e8 the roundings of one amount to 20."""
    truth = truth_of(PACKAGES["clip"], example("fp32", scale=1e8))
    assert truth.bound.dq.norm() < 2 * truth.magnitude.dq.norm()


@pytest.mark.parametrize("seed", [2, 3])
def test_cases_with_odd_seeds_go_through_autograd(seed: int) -> None:
    asked = []

    def loss_and_grads(q, k, scale, bias, *, labels):
        asked.append("loss_and_grads")
        return by_shares(PACKAGES["clip"], q, k, scale, bias, labels)

    def contrastive_loss(q, k, scale, bias, *, labels):
        asked.append("autograd")
        assert all(x.requires_grad for x in (q, k, scale, bias))
        return PACKAGES["clip"].reference(q, k, scale, bias, dtype=q.dtype)

    module = dense_package(CLIP)
    module.loss_and_grads, module.contrastive_loss = loss_and_grads, contrastive_loss
    rows = check_case(module, Case(20, 20, 8, "fp64", seed=seed))
    assert not failures(rows) and asked == ["autograd" if seed % 2 else "loss_and_grads"]


def test_nan_must_come_out_where_it_went_in() -> None:
    inputs = example("fp32")
    inputs.q[3, 5] = math.nan
    package = PACKAGES["infonce"]
    right = by_shares(package, *inputs)
    truth = truth_of(package, inputs)
    assert truth.reference.dq[3].isnan().all() and not truth.reference.dq[:3].isnan().any()
    dbias = right.dbias * math.nan
    assert not failures(gate(right._replace(dbias=dbias), truth))
    finite = right._replace(dbias=dbias, dq=right.dq.nan_to_num(0.0))
    assert [row.quantity for row in gate(finite, truth) if not row.passed] == ["dq"]


def test_a_loss_near_the_end_of_the_range_has_its_bound() -> None:
    """Beyond 3.2e32 fp32 has a thousandth, or the bound where that is more. Planted: the thousandth alone."""
    inputs = example("fp32")
    package = PACKAGES["infonce"]
    truth = truth_of(package, inputs)
    large = torch.tensor(2e33, dtype=torch.float64)

    def fails(factor: float, bound: float) -> bool:
        limits = truth.bound._replace(loss=bound * large)
        found = by_shares(package, *inputs)._replace(loss=(factor * large).float())
        reference = truth.reference._replace(loss=large)
        return bool(failures(gate(found, dataclasses.replace(truth, reference=reference, bound=limits))))

    assert not fails(1.0005, 0.0) and not fails(1.003, 0.002) and not fails(math.inf, 0.0)
    assert fails(1.003, 0.0) and fails(1.003, math.inf) and fails(1.01, 0.002)


def test_a_loss_beyond_the_range_promises_no_gradients() -> None:
    """Terms of rince reach e^(8000): fp64 has both infinities, and so NaN, of which one element of dq is infinite.

    Planted: each element of ours had to be what fp64 has. With NaN in a query all gradients are compared.
    """
    package = infcl_gen.load(loss="rince", batch_size=129, dim=1, dtype="bf16", target="cpu")
    inputs = inputs_of(package, Case(129, 63, 1, "bf16", 1000.0, bias=3.5, features="unnormalised", seed=159))
    truth = truth_of(package, inputs)
    assert oracle(package, inputs).loss.isnan() and truth.reference.dq.isinf().any()
    nothing = LossAndGrads(*(torch.full_like(each, math.nan) for each in truth.reference))
    below = dataclasses.replace(truth, reference=truth.reference._replace(loss=torch.tensor(-math.inf).double()))
    for loss, fails in ((math.nan, False), (-math.inf, False), (1e38, True), (0.0, True)):
        found = nothing._replace(loss=torch.tensor(loss))
        assert [bool(failures(gate(found, each))) for each in (truth, below)] == [fails, fails], loss
    inputs = inputs_of(package, Case(129, 63, 1, "bf16", 1.0, seed=159))
    inputs.q[3] = math.nan
    truth = truth_of(package, inputs)
    assert truth.reference.dq[4:].isfinite().all() and failing(nothing, truth) == {"dq"}


def test_infinity_must_be_the_oracles_own() -> None:
    """Planted: anything passes where the oracle is infinite; or beside it."""
    right = LossAndGrads(*[torch.tensor([1.0, math.inf], dtype=torch.float64)] * 5)
    truth = Truth(right, right, LossAndGrads(*[torch.zeros(2)] * 5), right)
    for value, fails in ((math.inf, False), (-math.inf, True), (3.0, True), (math.nan, True)):
        found = right._replace(dq=torch.tensor([1.0, value]))
        assert bool(failures(gate(found, truth))) == fails, value
    assert failures(gate(right._replace(dq=torch.tensor([math.nan, math.inf])), truth))


def test_roundings_that_go_with_similarities_are_allowed() -> None:
    """Slopes of all pairs lie within a rounding of a tie, at 0.9707, and similarities decide which way each goes."""
    package = infcl_gen.load(loss="siglip", batch_size=129, dim=3, dtype="bf16", target="cpu")
    inputs = inputs_of(package, Case(129, 129, 3, "bf16", 1000.0, bias=3.5, features="tiny", seed=0))
    truth = truth_of(package, inputs)
    z = inputs.q.double() @ inputs.others.double().T
    slopes = torch.sigmoid(1000.0 * z + 3.5).bfloat16().double() - torch.eye(129, dtype=torch.float64)
    dscale = (slopes * z).sum() / 129
    assert abs(dscale / truth.reference.dscale - 1) > 1
    assert not failures(gate(truth.reference._replace(dscale=dscale), truth))
    assert failures(gate(truth.reference._replace(dscale=5 * dscale), truth))


def test_interpreted_bf16_has_the_bounds_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a sum of slopes was allowed twice the error there, or that of all of one sign."""
    package = infcl_gen.load(loss="infonce_out", batch_size=64, dim=3, dtype="bf16", target="cpu")
    inputs = inputs_of(package, Case(64, 64, 3, "bf16", 14.3))
    on_a_gpu = truth_of(package, inputs).bound
    monkeypatch.setattr(verification.bounds, "INTERPRETED", True)
    assert all(map(torch.equal, truth_of(package, inputs).bound, on_a_gpu))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 1e5), (torch.float32, 1e39), (torch.bfloat16, 1e241)])
def test_an_element_may_leave_the_range_of_its_dtype(dtype: torch.dtype, large: float) -> None:
    """Its row, and no other, may be infinite or NaN. Planted: it had to be finite, where fp64 is."""
    right = LossAndGrads(torch.ones(2).double(), *[torch.tensor([[1.0, large], [1.0, 2.0]], dtype=torch.float64)] * 4)
    zeros = LossAndGrads(torch.zeros(2), *[torch.zeros(2, 2)] * 4)
    truth = Truth(right, right, zeros, right)
    for values, fails in (
        ([[1.0, math.inf], [1.0, 2.0]], False), ([[math.nan, math.nan], [1.0, 2.0]], False),
        ([[1.0, math.inf], [1.0, math.inf]], True), ([[1.0, math.inf], [math.nan, 2.0]], True),
        ([[1.0, 3.0], [1.0, 2.0]], True),
    ):  # fmt: skip
        found = right._replace(dq=torch.tensor(values, dtype=dtype))
        assert bool(failures(gate(found, truth))) == fails, values


def test_a_wrong_shape_fails() -> None:
    inputs = example("fp32")
    right = by_shares(PACKAGES["clip"], *inputs)
    assert judged(PACKAGES["clip"], inputs, right._replace(dq=right.dq[:-1], loss=right.loss[None])) == {"dq", "loss"}


def test_cases_are_the_same_for_the_same_seed_and_see_every_structure() -> None:
    problem, given = {"batch_size": 500, "keys": None, "dim": 64, "dtype": "bf16"}, vars(PACKAGES["infonce"])
    spec = given["SPEC"] | {"problem": problem, "positives": "label"}
    package = types.SimpleNamespace(**given | {"SPEC": spec})
    first, second = (random_cases(package, 40) for _ in range(2))
    assert first == second
    assert {case.features for case in first} == set(FEATURES)
    assert {case.layout for case in first} == set(LAYOUTS)
    assert any(case.keys < case.queries for case in first) and any(case.keys > case.queries for case in first)
    for a, b in zip(tensors(first[5], "label")[:2], tensors(second[5], "label")[:2], strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_cases_of_prefixes_are_often_solved() -> None:
    """Also among the few that the interpreter takes; each kind of features meets contiguous rows and others."""
    package = infcl_gen.load(batch_size=500, dim=8, dtype="fp32", target="cpu", prefixes=[2, 8])
    drawn = random_cases(package, 90)
    assert SOLVED in {case.features for case in drawn[:7]}
    both = {(case.features, case.layout == "contiguous") for case in drawn}
    assert both == set(itertools.product((*FEATURES, SOLVED), (False, True)))


def test_g_of_long_features_may_underflow() -> None:
    """Stored times the inverse norms of its pair, g of 1e-37 is too small for fp32; its product with a long query is
    not. The gradient of the key may lack half of the smallest number times that query, but not ten of them."""
    package = infcl_gen.load(
        loss="infonce", batch_size=2, dim=8, dtype="fp32", target="cpu", prefixes=[2, 8], renormalise=True
    )
    q, k = 1e6 * torch.eye(8)[:1], 1e-3 * torch.eye(8)[:2]
    truth = truth_of(package, Inputs(q, k, 85.0, 0.0))
    lost = 85.0 * torch.finfo(torch.float32).smallest_normal * q[0].double()
    for times, passes in ((0.5, True), (10.0, False)):
        found = truth.reference._replace(dk=truth.reference.dk.clone())
        found.dk[1] += times * lost
        assert (failures(gate(found, truth)) == "") == passes


def test_slabs_of_columns_are_judged() -> None:
    """A slab may be small: its error is none of the whole. A row that leaves the range may be infinite in all slabs."""
    small = torch.tensor([[1.0, 1.0, 1e-6, 1e-6]], dtype=torch.float64)
    large = torch.tensor([[1e6, 1.0, 1.0, 1.0]], dtype=torch.float64)
    wrong, beyond = small.clone(), torch.full((1, 4), math.inf, dtype=torch.float16)
    wrong[0, 2] = 2e-6
    number = torch.ones((), dtype=torch.float64)
    for rows, found, slabs, fails in (
        (small, wrong, (), ""), (small, wrong, ((0, 2), (2, 4)), "dq of columns 2 to 3"),
        (small, small, ((0, 2), (2, 4)), ""), (large, beyond, ((0, 2), (2, 4)), ""),
    ):  # fmt: skip
        parts = [
            LossAndGrads(number, *(x * size for x in (rows, rows)), number, number) for size in (1.0, 1.0, 1e-5, 1.0)
        ]
        truth = Truth(*parts, slabs=slabs)
        detail = failures(gate((number, found, rows, number, number), truth))
        assert detail.startswith(fails) and bool(detail) == bool(fails), detail


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout: str) -> None:
    plain, laid_out = (tensors(Case(7, 7, 5, "fp32", layout=name)).q for name in ("contiguous", layout))
    if layout == "expanded":
        assert laid_out.stride(0) == 0 and torch.equal(laid_out, plain[:1].expand(7, 5))
    else:
        assert torch.equal(laid_out, plain) and (layout == "contiguous") == laid_out.is_contiguous()
