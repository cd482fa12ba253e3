"""A loss of one side on the CPU target: against a dense loss by hand, alone and over ranks; calls that are refused."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import infcl_gen
from infcl_gen.cli.text import plan_text
from infcl_gen.errors import InputError
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import DTYPES
from infcl_gen.verification.worker import averaged
from tests.runtime.in_process import World, table_of
from tests.verification.dense import dense

DIM = 12
PANELS = ("FORWARD_ROWS", "FORWARD_KEYS", "PANEL_ROWS", "PANEL_KEYS", "FINISH_ROWS")


@functools.cache
def package(dtype: str = "fp32", loss: str = "ntxent") -> ModuleType:
    """In panels of eight rows."""
    return in_panels(infcl_gen.load(loss=loss, batch_size=64, dim=DIM, dtype=dtype, target="cpu"))


def in_panels(module: ModuleType, rows: int = 8) -> ModuleType:
    for name in PANELS:
        setattr(module._schedule, name, rows)
    return module


def passes_its_selftest(module: ModuleType) -> bool:
    """Of up to 64 rows, in panels of 32: in those of eight it takes four times as long."""
    report = in_panels(module, 32).selftest()
    in_panels(module)
    return bool(report["ok"] and report["cases"])


def features(rows: int, dtype: str = "fp32") -> Tensor:
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=1).to(DTYPES[dtype])


def labels_of(rows: int, kind: str) -> Tensor | None:
    """Of each row: none, another view by a random pairing, or any other row."""
    draw = torch.Generator().manual_seed(rows)
    if kind == "halves":
        return None
    if kind == "any":
        return (torch.arange(rows) + torch.randint(1, rows, (rows,), generator=draw)) % rows
    first, second = torch.randperm(rows, generator=draw).chunk(2)
    return torch.empty(rows, dtype=torch.int64).scatter_(0, torch.cat([first, second]), torch.cat([second, first]))


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("kind", ["halves", "pairs", "any"])
@pytest.mark.parametrize("scale", [1e-3, 14.3, 1000.0])
def test_it_is_the_loss_of_the_paper(dtype: str, kind: str, scale: float) -> None:
    """By the gate's tolerance, against a formula that the printer has no part in."""
    for rows in (2, 6, 22):
        q, labels, module = features(rows, dtype), labels_of(rows, kind), package(dtype)
        truth = truth_of(module, Inputs(q, None, scale, -1.0, labels))
        by_hand = dense("ntxent", q, None, scale, -1.0, labels=labels)
        for name, ours, theirs in zip(truth.reference._fields, truth.reference, by_hand, strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13, msg=f"reference: {name}")
        found = module.loss_and_grads(q, None, scale, -1.0, labels=labels)
        assert found[2] is None
        assert not failures(gate(found, truth)), failures(gate(found, truth))


def test_identical_rows_share_their_softmax() -> None:
    for rows in (4, 22):
        q = features(1).expand(rows, DIM)
        loss, dq, *_ = package().loss_and_grads(q, None, 14.3)
        assert float(loss) == pytest.approx(torch.tensor(rows - 1.0).log().item(), rel=1e-6)
        assert float(dq.norm()) < 1e-5


def test_what_is_not_finite_stays_so() -> None:
    q = features(22)
    q[5, 3] = torch.nan
    loss, dq, _, dscale, dbias = package().loss_and_grads(q, None, 14.3)
    assert loss.isnan() and dscale.isnan() and dbias.isnan() and dq.isnan().all()


SHARDS = ([6, 0, 10], [2, 2], [0, 12], [10, 4, 0, 8], [2, 0, 0, 0], [5, 3, 7], [1, 1])


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_over_ranks(transport: str, shards: list[int]) -> None:
    """Uneven and empty ranks; rows whose other view is on another rank, and those of a rank in halves."""
    module, world, rows = package(), len(shards), sum(shards)
    table = table_of(module, transport, world)
    q = features(rows)
    offsets = itertools.accumulate(shards, initial=0)
    halves = torch.cat([first + torch.arange(own).roll(own // 2) for own, first in zip(shards, offsets, strict=False)])
    even = not any(own % 2 for own in shards)
    for labels in (labels_of(rows, "any"), *([halves] * even)):
        given = None if labels is halves else labels

        def job(rank: int, given: Tensor | None = given) -> list[Any]:
            own = q.split(shards)[rank]
            named = None if given is None else given.split(shards)[rank]
            found = module.loss_and_grads(own, None, 14.3, -1.0, labels=named)
            leaf = own.clone().requires_grad_()
            loss = module.contrastive_loss(leaf, None, 14.3, -1.0, labels=named)
            (dq,) = torch.autograd.grad(loss, leaf)
            assert torch.equal(dq, found[1]) and torch.equal(loss.detach(), found[0])
            return list(found)

        found = averaged(World(module, world, tables={world: table}, seed=rows).run(job))
        judged = gate(found, truth_of(module, Inputs(q, None, 14.3, -1.0, labels)))
        assert not failures(judged), failures(judged)


def test_over_ranks_a_rank_without_its_pairs_is_named_on_all() -> None:
    module, shards = package(), [4, 3]

    def job(rank: int) -> None:
        with pytest.raises(ValueError, match="but rank 1 has 3 rows; labels name the other view of each row"):
            module.contrastive_loss(features(7).split(shards)[rank], None)

    World(module, 2).run(job)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ([1, 0, 3, 2, 4, 4], "^labels name another row, but that of row 4 on rank 1 is itself$"),
        ([1, 0, 2, 3, 5, 4], "^labels name another row, but that of row 2 on rank 0 is itself$"),
        ([1, 0, 3, 2, 5, 6], r"^labels on rank 1 range from 5 to 6; there are 6 rows \(0..5\)$"),
        ([-1, 0, 3, 2, 5, 4], r"^labels on rank 0 range from -1 to 3; there are 6 rows \(0..5\)$"),
    ],
)
def test_over_ranks_a_label_that_names_no_other_row_is_named_on_all(labels: list[int], why: str) -> None:
    """Labels of the host, as on one device; a rank without rows hears of it, too."""
    module, shards = package(), [4, 2, 0]

    def job(rank: int) -> None:
        own = torch.tensor(labels).split(shards)[rank]
        with pytest.raises(ValueError, match=why):
            module.contrastive_loss(features(6).split(shards)[rank], None, labels=own)

    World(module, 3).run(job)


def test_over_ranks_a_label_on_a_device_that_names_its_own_row_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such labels are looked at once only."""
    module, shards = package(), [4, 2]
    agreement = importlib.import_module(f"{module.__name__}._runtime.agreement")
    monkeypatch.setattr(agreement, "_label_range", lambda *_: (0, -1))

    def job(rank: int) -> bool:
        labels = torch.tensor([1, 0, 3, 2, 4, 4]).split(shards)[rank]
        return bool(module.contrastive_loss(features(6).split(shards)[rank], None, labels=labels).isnan())

    assert World(module, 2).run(job) == [False, True]


Q = features(8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a k": ({"k": Q}, "^ntxent compares the rows of q with each other: k must be None$"),
    "an odd row": ({"q": Q[:7]}, "takes rows i and i \\+ M/2 of a rank for views of one sample, but there are 7 rows"),
    "one row": ({"q": Q[:1], "labels": torch.tensor([0])}, "compares rows with each other, and there is one"),
    "itself": ({"labels": torch.tensor([1, 0, 3, 2, 4, 6, 5, 6])}, "that of row 4 is itself"),
    "no row": ({"labels": torch.full((8,), 8)}, "^labels range from 8 to 8; there are 8 rows \\(0..7\\)$"),
    "no rows": ({"q": Q[:0]}, "^the batch needs at least two rows; it has none$"),
    "too many": (
        {"q": features(66)},
        "for at most 64 rows, but the batch has 66 rows; .* --batch-size 66 --loss ntxent",
    ),
    "no values": ({"q": Q.to("meta")}, "^q is on the meta device, which holds no values"),
    "ids": ({"query_ids": torch.arange(8)}, "tells no pairs of one id apart"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused(name: str) -> None:
    given, why = REFUSED[name]
    for call in (package().contrastive_loss, package().loss_and_grads):
        with pytest.raises(ValueError, match=why) as error:
            call(**{"q": Q, "k": None, **given})
        assert "\n" not in str(error.value)


def test_a_loss_of_two_sides_needs_k() -> None:
    module = infcl_gen.load(loss="clip", batch_size=64, dim=DIM, dtype="fp32", target="cpu")
    with pytest.raises(TypeError, match="k must be a tensor, not NoneType"):
        module.contrastive_loss(Q, None)


def test_problems_and_steps_that_are_refused() -> None:
    with pytest.raises(InputError, match=r"keys: the rows of 'ntxent' are keys of each other; leave out keys"):
        infcl_gen.plan(loss="ntxent", batch_size=64, keys=128, dim=DIM, target="cpu")
    for settings, why in (
        ({"panel_keys": "64"}, "panel_keys: does not apply"),
        ({"strategy": "stash"}, "has no kernels for losses of one side, as ntxent; valid: panel, torch"),
    ):
        with pytest.raises(InputError, match=why):
            infcl_gen.plan(loss="ntxent", batch_size=64, dim=DIM, device_profile="h200", set=settings)
    towers = [torch.nn.Linear(4, DIM, device="cpu") for _ in range(2)]
    with pytest.raises(
        InputError, match=r"loss: ntxent compares rows of one tensor; .*contrastive_loss\(torch.cat\(\[a, b\]\), None"
    ):
        infcl_gen.plan_step(towers, [torch.randn(8, 4)] * 2, loss="ntxent", batch_size=8, memory="1GiB")


def test_ways_of_calling_agree() -> None:
    """The module, the loss without sizes, labels="own", a compiled call, torch.func; no gradient has a gradient."""
    q = features(22)
    loss, dq, *_ = package().loss_and_grads(q, None, 14.3)
    assert torch.equal(loss, package().ContrastiveLoss()(q, None, 14.3))
    assert torch.equal(loss, package().contrastive_loss(q, None, 14.3, labels="own"))
    torch.testing.assert_close(loss, infcl_gen.ContrastiveLoss("ntxent")(q, None, 14.3))
    assert torch.equal(dq, torch.func.grad(lambda x: package().contrastive_loss(x, None, 14.3))(q))
    leaf, module = q.clone().requires_grad_(), package()
    run = torch.compile(lambda x: module.contrastive_loss(x, None, 14.3), backend="aot_eager", fullgraph=True)
    assert torch.equal(dq, torch.autograd.grad(run(leaf), leaf)[0])
    doubled = torch.autograd.grad(package().contrastive_loss(2 * leaf, None, 14.3 / 4), leaf)[0]
    torch.testing.assert_close(doubled, dq)
    (again,) = torch.autograd.grad(package().contrastive_loss(leaf, None, 14.3), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(again.sum(), leaf)


def test_wider_features_have_gradients_that_are_not_rounded() -> None:
    q = features(22, "bf16")
    narrow = package("bf16").loss_and_grads(q, None, 14.3)
    wide = package("bf16").loss_and_grads(q.float(), None, 14.3)
    assert torch.equal(wide[0], narrow[0]) and wide[1].dtype == torch.float32
    assert torch.equal(wide[1].bfloat16(), narrow[1]) and not torch.equal(wide[1], narrow[1].float())


LOSSES = """
from infcl_gen.losses.language import *

Z = similarity("query", "query")
X = scale * Z + bias
OTHERS = 1 - is_self

def rows(x, weight=1):
    return LossSpec("mine", mean_over_queries(logsumexp_over_keys(x, where=OTHERS) - weight * positive(x)), "label")

CAPPED = rows(20 * tanh(scale * Z / 20) + bias)
UNBALANCED = rows(X, 0.5)
"""


@pytest.mark.parametrize("name", ["CAPPED", "UNBALANCED"])
def test_a_loss_of_rows_of_ones_own(name: str, tmp_path: Any) -> None:
    """A logit that is not affine, and shares that do not cancel."""
    (tmp_path / "mine.py").write_text(LOSSES)
    module = package("fp32", f"{tmp_path / 'mine.py'}:{name}")
    for rows, kind in itertools.product((2, 22), ("halves", "pairs", "any")):
        inputs = Inputs(features(rows), None, 14.3, -1.0, labels_of(rows, kind))
        judged = gate(module.loss_and_grads(*inputs[:4], labels=inputs.labels), truth_of(module, inputs))
        assert not failures(judged), failures(judged)


@pytest.mark.parametrize("flags", [{}, {"devices": 4}, {"devices": 32, "nodes": 4}], ids=str)
def test_plans_and_packages_speak_of_rows(flags: dict[str, int]) -> None:
    """Keys there are in names alone: of arguments, of settings, and of blocks of kernels."""
    plan = infcl_gen.plan(loss="ntxent", batch_size="64k", dim=768, device_profile="h200", **flags)
    said = [f"{reason.decision}; {reason.why}" for reason in plan.reasons] + [buffer.why for buffer in plan.buffers]
    said += [buffer.name for buffer in plan.buffers if not buffer.name.endswith("_partials")]
    said.append(plan_text(plan).partition("\n")[0])
    assert not [text for text in said if re.search(r"\bkeys?\b", text.removesuffix("of each block of keys"))]
    module = package()
    prose = [module.__doc__, module._loss.__doc__, module._schedule.__doc__, module._loss.reference.__doc__]
    assert not [text for text in prose if re.search(r"\bkeys?\b", text or "keys")]
    assert "--keys" not in module.SPEC["regenerate"]


def test_a_smaller_budget_makes_smaller_panels_and_no_other_loss() -> None:
    """Panels of the triangle are square, whatever the budget; memory is that of the plan."""
    for budget, fraction in (("1GiB", 1.0), ("440MiB", 0.5)):
        plan = infcl_gen.plan(loss="ntxent", batch_size="64k", dim=768, device_profile="h200", memory_budget=budget)
        assert plan.panel_rows == plan.panel_keys <= 16384 and plan.forward_rows == plan.forward_keys
        assert plan.predicted_peak_bytes <= fraction * 2**30
        clip = infcl_gen.plan(loss="clip", batch_size="64k", dim=768, device_profile="h200", memory_budget="1GiB")
        assert clip.predicted_time_s > 1.85 * plan.predicted_time_s
