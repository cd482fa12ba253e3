"""A state of each query, and of each key, which a call replaces: the moving averages of SogCLR, kept by the caller as
logarithms."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from infcl_gen import ContrastiveLoss, contrastive_loss
from infcl_gen.losses import LossSpec
from infcl_gen.losses.language import (
    detach,
    exp,
    is_self,
    logsumexp_over_keys,
    mean_over_queries,
    next_state,
    positive,
    query_state,
    scale,
    similarity,
)
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import Case, check_case, inputs_of
from tests.kernels.planted import Edit
from tests.losses.specs import RATE, RATES_OF_SIDES
from tests.tiers import some
from tests.verification.dense import dense, moving_average

from .in_process import USUAL
from .pool import Packages, Pool, results
from .test_own import CLOSE, GATHER, RING, assert_close, truth

GAMMA, EPS = 0.9, 1e-14
torch.manual_seed(0)
X, Y = (torch.nn.functional.normalize(torch.randn(12, 8, dtype=torch.float64), dim=1) for _ in range(2))
U, V = (torch.tensor([-math.inf, -0.5, -3.0] * 4, dtype=torch.float64).roll(n) for n in range(2))
LOSSES = ("sogclr", "sogclr_clip")


def drawn(package: ModuleType, seed: int = 1, dtype: str = "fp64") -> Inputs:
    keys = 70 if package.SPEC["positives"] == "diagonal" else 93
    return inputs_of(package, Case(70, keys, 8, dtype, 3.0, -1.0, seed=seed))


def states_of(given: dict[str, Any]) -> list[Tensor]:
    return [x for name, x in given.items() if name.endswith("_state")]


def next_of(inputs: Inputs) -> list[Tensor]:
    """The next states, by their definition."""
    assert inputs.k is not None and inputs.query_state is not None
    z, scale = inputs.q.double() @ inputs.k.double().T, torch.as_tensor(inputs.scale)
    found = [moving_average(z, scale, inputs.positives(), inputs.query_state)[1]]
    if inputs.key_state is not None:
        found.append(moving_average(z.T, scale, inputs.positives(), inputs.key_state)[1])
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loss", LOSSES)
def test_one_device_against_the_definition(packages: Packages, loss: str, seed: int) -> None:
    """Loss, gradients and next states, by autograd, without it, and without gradients; `reference` leaves the states.
    A second call goes on from those of the first."""
    package = packages(loss)
    inputs = drawn(package, seed)
    for visit in range(2):
        expected, following = dense(loss, *inputs), next_of(inputs)
        given = inputs.given
        assert_close([*package.loss_and_grads(*inputs[:4], **given), *states_of(given)], [*expected, *following])
        leaves, given = inputs.leaves(torch.float64, torch.float64), inputs.given
        value = package.contrastive_loss(*leaves, **given, reduction="sum")
        assert_close([value.detach() / 70, *states_of(given)], [expected[0], *following])
        upstream = -3 * torch.ones_like(value)
        assert_close(torch.autograd.grad(value, leaves, upstream), [-210 * each for each in expected[1:]])
        without = inputs.given
        with torch.no_grad():
            assert_close([package.contrastive_loss(*inputs[:4], **without)], expected[:1])
        assert_close(states_of(without), following)
        left = inputs.given
        assert_close([package.reference(*inputs[:4], **left)], expected[:1])
        assert all(map(torch.equal, states_of(left), states_of(inputs._asdict()))), visit
        other = {"q": inputs.q.flip(0), "query_state": given["query_state"]}  # the samples have moved
        inputs = inputs._replace(**other, **{name: given[name] for name in ("key_state",) if name in given})


def test_the_state_is_kept_where_the_caller_has_it(packages: Packages) -> None:
    """In rows of a table, of either dtype, also by strides; a second visit takes the average."""
    package = packages("sogclr", "fp32")
    q, k = X.float(), Y.float()
    table = torch.full((30, 2), -math.inf)
    for visit, count in enumerate((1, 2)):
        for _ in range(count):
            package.contrastive_loss(q, k, 3.0, query_state=table[9:21, 1])
        assert bool(table[:9].isinf().all()) and bool(table[:, 0].isinf().all()), visit
    log_g, _ = moving_average(X @ Y.T, torch.tensor(3.0), torch.arange(12), U)
    torch.testing.assert_close(table[9:21, 1].double(), log_g, rtol=1e-5, atol=1e-6)  # an average of equal numbers
    wide = U.clone()
    package.loss_and_grads(q, k, 3.0, query_state=wide)
    expected = next_of(Inputs(X, Y, 3.0, query_state=U, key_state=V))
    torch.testing.assert_close(wide, expected[0], rtol=1e-5, atol=1e-6)
    columns = torch.stack((U, V), 1)  # which lie between each other
    packages("sogclr_clip").loss_and_grads(X, Y, 3.0, query_state=columns[:, 0], key_state=columns[:, 1])
    assert_close(columns, torch.stack(expected, 1))


def test_traced_and_transformed(packages: Packages) -> None:
    package = packages("sogclr_clip")
    inputs = Inputs(X, Y, 2.0, query_state=U, key_state=V)
    expected, following = dense("sogclr_clip", *inputs), next_of(inputs)

    def loss(q: Tensor, *states: Tensor) -> Tensor:
        value: Tensor = package.contrastive_loss(q, Y, 2.0, query_state=states[0], key_state=states[1])
        return value

    states, outside = [U.clone(), V.clone()], [U.clone(), V.clone()]
    assert_close([torch.func.grad(loss)(X, *states), *states], [expected.dq, *following])
    assert_close([torch.func.grad(lambda q: loss(q, *outside))(X), *outside], [expected.dq, *following])
    q, states = X.clone().requires_grad_(), [U.clone(), V.clone()]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    value = compiled(q, *states)
    assert_close([value.detach(), *torch.autograd.grad(value, q), *states], [expected.loss, expected.dq, *following])
    with pytest.raises(ValueError, match="sogclr_clip needs query_state: query_state must be a dense fp32 or"):
        torch.compile(lambda q: package.contrastive_loss(q, Y, 2.0), backend="aot_eager")(X)
    for call in (loss, compiled, torch.func.grad(loss)):
        with pytest.raises(ValueError, match="query_state and key_state must be two tensors"):
            call(X, states[0], states[0])


def test_operators_are_well_formed(packages: Packages) -> None:
    operators = packages("sogclr_clip").ContrastiveLoss._package.operators
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (2.0, 0.0)]
    call = [*(x.clone().requires_grad_() for x in (X, Y, *numbers)), torch.stack((U, V))]
    rest = (*[None] * 5, *USUAL)
    torch.library.opcheck(operators.forward, (*call, *rest, 15))
    with torch.no_grad():
        loss, *saved = operators.forward(*call, *rest, 15)
        arguments = (torch.ones_like(loss), *(x.detach() for x in call), *rest[:5], *saved, *rest[5:], 15)
    torch.library.opcheck(operators.backward, arguments)


def test_the_recipe_of_both_directions(packages: Packages) -> None:
    """As docs/losses.md has it: one call, or two, and the temperature of FastCLIP-v3, as autograd differentiates it."""
    log_scale, rho = torch.tensor(1.5, dtype=torch.float64), 6.5

    def ours(q: Tensor, k: Tensor, log_scale: Tensor) -> Tensor:
        criterion, u, v, scale = ContrastiveLoss("sogclr"), U.clone(), V.clone(), log_scale.exp()
        loss = criterion(q, k, scale, query_state=u) + criterion(k, q, scale, query_state=v)
        whole: Tensor = loss + ((u + v).mean() + 2 * rho) / scale
        return whole

    def in_one(q: Tensor, k: Tensor, log_scale: Tensor) -> Tensor:
        u, v, scale = U.clone(), V.clone(), log_scale.exp()
        loss = ContrastiveLoss("sogclr_clip")(q, k, scale, query_state=u, key_state=v)
        whole: Tensor = loss + ((u + v).mean() + 2 * rho) / scale
        return whole

    def theirs(q: Tensor, k: Tensor, log_scale: Tensor) -> Tensor:
        tau, own, sides = 1 / log_scale.exp(), torch.arange(12), torch.zeros((), dtype=torch.float64)
        for z, state in ((q @ k.T, U), (k @ q.T, V)):
            g = ((z - z.diagonal()[:, None]) / tau).exp().masked_fill(torch.eye(12, dtype=torch.bool), 0.0).sum(1) / 11
            u = torch.where(state == -math.inf, g, (1 - GAMMA) * state.exp() + GAMMA * g).detach()
            assert own.numel() == len(u)
            sides = sides + tau.detach() * (g / (u + EPS)).mean() + tau * (u.log().mean() + rho)
        return sides

    found = []
    for of in (ours, in_one, theirs):
        leaves = [x.clone().requires_grad_() for x in (X, Y, log_scale)]
        value = of(*leaves)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for each in found[:2]:
        assert_close(each, found[2])


# A state of rows that are compared with each other.
X_OF_ROWS = scale * similarity("query", "query")
APART = logsumexp_over_keys(X_OF_ROWS, where=1 - is_self) - positive(X_OF_ROWS)
AVERAGED = exp(APART - next_state((query_state + APART) / 2)) * detach(1 / scale)
CENTRED = LossSpec("centred", mean_over_queries(AVERAGED), "label")


def test_losses_of_ones_own() -> None:
    """The rate of a state may be the weight of a query. The rows of a triangle have states, too."""
    rate, state, before = torch.linspace(0, 1, 12, dtype=torch.float64).requires_grad_(), V.clone(), V.clamp(min=-4)
    value = contrastive_loss(X, Y, 2.0, loss=RATE, query_weight=rate, query_state=state)
    logits = 2 * X @ Y.T
    terms = logits.logsumexp(1) - logits.diagonal()
    following = before + rate.detach() * (terms - before)
    assert_close([state, value.detach()], [following, (rate.detach() * (terms - following)).mean()])
    assert_close(torch.autograd.grad(value, rate), [(terms - following) / 12])  # the state is a constant

    q, number = X.clone().requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    state = before.clone()
    value = contrastive_loss(q, None, number, loss=CENTRED, query_state=state)
    found = torch.autograd.grad(value, (q, number))
    logits = (number * q @ q.T).masked_fill(torch.eye(12, dtype=torch.bool), -math.inf)
    terms = logits.logsumexp(1) - logits[torch.arange(12), torch.arange(12).roll(6)]
    following = ((before + terms) / 2).detach()
    expected = ((terms - following).exp() / number.detach()).mean()
    assert_close(
        [value.detach(), state, *found], [expected.detach(), following, *torch.autograd.grad(expected, (q, number))]
    )


def test_rates_of_both_sides() -> None:
    """The rates of states are weights of queries and keys. Positives are in the sums, and pairs of one id are not."""
    ids, rates = torch.arange(12) // 2, [torch.linspace(*ends, 12, dtype=torch.float64) for ends in ((0, 1), (1, 0.2))]
    same = (ids[:, None] == ids) & ~torch.eye(12, dtype=torch.bool)
    for reduction in ("mean", "none"):
        leaves = [x.clone().requires_grad_() for x in (X, Y, *rates)]
        q, k, of_query, of_key = leaves
        logits = (2 * q @ k.T).masked_fill(same, -math.inf)
        sides = [x.logsumexp(1) - x.diagonal() for x in (logits, logits.T)]
        following = [
            (max_ + rate * (side - max_)).detach()
            for max_, rate, side in zip((U.clamp(min=-4), V.clamp(min=-4)), rates, sides, strict=True)
        ]
        of_queries = of_query * (sides[0] - following[0]) / 2
        of_keys = of_key * torch.nn.functional.softplus(sides[1] - following[1]) / 3
        expected = of_queries + of_keys if reduction == "none" else (of_queries + of_keys).mean()
        states = {"query_state": U.clone(), "key_state": V.clone()}
        own = {"query_weight": of_query, "key_weight": of_key, "query_ids": ids, "key_ids": ids}
        value = contrastive_loss(q, k, 2.0, loss=RATES_OF_SIDES, **own, **states, reduction=reduction)
        factors = rates[0].flip(0).expand_as(value) if reduction == "none" else torch.ones_like(value)
        gradients = [torch.autograd.grad(of, leaves, factors) for of in (value, expected)]
        assert_close([value.detach(), *states.values(), *gradients[0]], [expected, *following, *gradients[1]])


def test_values_at_the_ends(packages: Packages) -> None:
    """Without negatives g is 0, and the state is that of a query not yet visited; NaN stays in its row."""
    package = packages("sogclr")
    state = torch.tensor([-math.inf, -2.0], dtype=torch.float64)
    loss, dq, dk, *_ = package.loss_and_grads(
        X[:2], X[:1], 2.0, labels=torch.zeros(2, dtype=torch.int64), query_state=state
    )
    assert loss == 0 and not dq.any() and not dk.any() and state[0] <= -5000
    torch.testing.assert_close(state[1], torch.tensor(-2 + math.log(1 - GAMMA), dtype=torch.float64), **CLOSE)
    for factor in (1e-3, 1000.0):
        inputs = drawn(package)._replace(scale=factor)
        assert_close(package.loss_and_grads(*inputs[:4], **inputs.given)[:3], dense("sogclr", *inputs)[:3])
    broken, state = X.clone(), U.clone()
    broken[3] = math.nan
    assert package.contrastive_loss(broken, Y, 2.0, query_state=state).isnan()
    assert bool(state[3].isnan()) and int(state.isnan().sum()) == 1

    package, states = packages("sogclr_clip"), [torch.full((1,), x, dtype=torch.float64) for x in (-math.inf, -2.0)]
    loss, dq, dk, *_ = package.loss_and_grads(X[:1], Y[:1], 2.0, query_state=states[0], key_state=states[1])
    assert loss == 0 and not dq.any() and not dk.any() and states[0] <= -5000
    torch.testing.assert_close(states[1], torch.tensor([-2 + math.log(1 - GAMMA)], dtype=torch.float64), **CLOSE)
    states = [U.clone(), V.clone()]
    assert package.contrastive_loss(broken, Y, 2.0, query_state=states[0], key_state=states[1]).isnan()
    assert bool(states[0][3].isnan()) and int(states[0].isnan().sum()) == 1 and bool(states[1].isnan().all())


STATE = r"query_state must be a dense fp32 or fp64 tensor of shape \(12,\) on cpu"
OF_KEYS, BOTH = STATE.replace("query", "key"), "sogclr_clip"
TABLE = torch.zeros(16, dtype=torch.float64)
with torch.inference_mode():
    FIXED = U.clone()
TWO = "query_state and key_state must be two tensors: a call writes the next states into each$"
BAD_CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("sogclr", {}, ValueError, f"^sogclr needs query_state: {STATE}$"),
    ("sogclr", {"query_state": 0.0}, TypeError, f"{STATE}, not float$"),
    ("sogclr", {"query_state": U[:5]}, ValueError, rf"{STATE}, not of shape \(5,\)$"),
    ("sogclr", {"query_state": U.bfloat16()}, ValueError, f"{STATE}, not torch.bfloat16$"),
    (
        "sogclr", {"query_state": U.clone().requires_grad_()}, ValueError,
        r"no gradient, but requires one: pass query_state.detach\(\)",
    ),
    ("clip", {"query_state": U}, ValueError, "clip has no state of queries .sogclr has.: query_state must be None$"),
    ("sogclr", {"query_state": U, "key_state": V}, ValueError, "no state of keys .sogclr_clip has.: key_state must be"),
    (BOTH, {"query_state": U}, ValueError, f"^sogclr_clip needs key_state: {OF_KEYS}$"),
    (BOTH, {"query_state": U, "key_state": V[:5]}, ValueError, rf"{OF_KEYS}, not of shape \(5,\)$"),
    (BOTH, {"query_state": U, "key_state": V.half()}, ValueError, f"{OF_KEYS}, not torch.float16$"),
    (BOTH, {"query_state": U, "key_state": V.to("meta")}, ValueError, f"{OF_KEYS}, not on meta$"),
    (
        BOTH, {"query_state": U, "key_state": V.clone().requires_grad_()}, ValueError,
        r"no gradient, but requires one: pass key_state.detach\(\)",
    ),
    (
        "sogclr", {"query_state": U[1].expand(12)}, ValueError,
        r"^query_state has several elements in one place, and a call writes .* into it: pass query_state.clone",
    ),
    (BOTH, {"query_state": U, "key_state": FIXED}, ValueError, "^key_state was made in inference mode, and a call wr"),
    (BOTH, {"query_state": U, "key_state": U[:]}, ValueError, TWO),
    (BOTH, {"query_state": TABLE[:12], "key_state": TABLE[4:]}, ValueError, TWO),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "states", "error", "message"), BAD_CALLS)
def test_wrong_states_are_refused_in_one_line(
    packages: Packages, loss: str, states: dict[str, Any], error: type[Exception], message: str
) -> None:
    package = packages(loss)
    for call in (package.contrastive_loss, package.loss_and_grads):
        with pytest.raises(error, match=message) as caught:
            call(X, Y, 2.0, **states)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def pool(packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(3, folder_of(packages("clip")).parent)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("loss", "rows", "keys"),
    [
        ("sogclr", [33, 40], [65, 30]),
        ("sogclr", [0, 7, 3], [9, 2, 4]),
        ("sogclr_clip", [33, 40], [33, 40]),
        ("sogclr_clip", [0, 7, 3], [0, 7, 3]),
    ],
)
@pytest.mark.parametrize("way", [RING, GATHER], ids=["ring", "gather"])
def test_over_ranks(
    pool: Pool, packages: Packages, way: dict[str, Any], loss: str, rows: list[int], keys: list[int]
) -> None:
    """Nothing of a state travels: each rank gives those of its own queries and keys, whose next ones have all keys and
    queries in them."""
    ranks = tuple(range(len(rows)))
    case = Case(sum(rows), sum(keys), 8, "fp64", 3.0, -1.0, seed=1)
    inputs, package = inputs_of(packages(loss), case), packages(loss, **way).__name__
    answers = pool.run("own_gradients", ranks, package=package, ranks=ranks, rows=rows, keys=keys, case=case)
    parts, following = [*zip(*results(answers), strict=True)], next_of(inputs)
    found, states = parts[: -len(following)], parts[-len(following) :]
    averaged = [torch.cat(each) / len(rows) if each[0].dim() else torch.stack(each).mean() for each in found]
    assert_close([*averaged, *map(torch.cat, states)], [*truth(loss, inputs), *following])


SCHEDULE, ENGINE, API, OPS, LOSS = "schedule.py", "_runtime/engine.py", "_runtime/api.py", "_runtime/ops.py", "loss.py"
BUGS: dict[str, tuple[str, Edit]] = {
    "the state stays": ("sogclr", (OPS, "state.copy_(saved.of_vectors[-place])", "pass")),
    "the next state is weighed": ("sogclr", (ENGINE, "[: package.traits.weighed].mul_(weight)", ".mul_(weight)")),
    "the state of the next query": (
        "sogclr", (API, "x.to(dtype) for x in (query_state", "x.roll(1) for x in (query_state"),
    ),
    "the next state of the first rows": (
        "sogclr", (SCHEDULE, "own = block.vectors[:, rows]", "own = block.vectors[:, : len(r)]"),
    ),
    "the old state divides": ("sogclr", (LOSS, "of_state = t", "of_state = state + 0.0 * t")),
    "the states change places": ("sogclr_clip", (OPS, "enumerate(reversed(states), 1)", "enumerate(states, 1)")),
    "the next states of keys are weighed": (
        "sogclr_clip", (ENGINE, "[: package.traits.weighed].mul_", "[1 - package.traits.weighed :].mul_"),
    ),
    "keys have the states of queries": (
        "sogclr_clip", (API, "in (query_state, key_state)", "in (query_state, query_state)"),
    ),
    "the average of a key is that of its query": ("sogclr_clip", (SCHEDULE, "cp = log(block.keys, rows)", "cp = r")),
}  # fmt: skip


VERIFIED = {  # and the states that are wrong
    "the state stays": {"query_state"},
    "the next states of keys are weighed": {"key_state"},
    "the states change places": {"query_state", "key_state"},
}


@pytest.mark.parametrize("seed", (5, 6))
@pytest.mark.parametrize("name", VERIFIED)
def test_verify_judges_next_states(packages: Packages, planted: Callable[..., str], name: str, seed: int) -> None:
    """In states of fp32, by autograd and by `loss_and_grads`; no other quantity shows these bugs. At this scale
    logarithms are so large that their roundings show in the loss."""
    loss, edit = BUGS[name]
    case = Case(70, 70, 8, "fp64", 1000.0, -1.0, features="duplicate", seed=seed)
    assert all(row.passed for row in check_case(packages(loss), case))
    wrong = importlib.import_module(planted(name, loss, (edit,)))
    assert {row.quantity for row in check_case(wrong, case) if not row.passed} == VERIFIED[name]


@pytest.mark.parametrize("name", some(BUGS))
def test_planted_bugs_are_noticed(packages: Packages, planted: Callable[..., str], name: str) -> None:
    loss, edit = BUGS[name]
    wrong = importlib.import_module(planted(name, loss, (edit,)))
    with pytest.raises(AssertionError):
        test_one_device_against_the_definition(lambda _: wrong, loss, 1)
