"""A side that needs no gradient: results are exact, and what it would take is neither computed, sent nor kept."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from infcl_gen.verification.memory import PeakMeter
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import Case, autograd_results, inputs_of
from infcl_gen.verification.worker import averaged
from tests.kernels.planted import Edit
from tests.verification.dense import dense

from .in_process import USUAL, World
from .recording import as_recording
from .test_replay import batch

Packages = Callable[..., ModuleType]
LOSSES = ("clip", "infonce", "siglip")
# Bits of q, k, scale and bias: a frozen side with and without scalars, one number alone, and both numbers.
WANTED = (0b0001, 0b0010, 0b1101, 0b1110, 0b0100, 0b1000, 0b1100, 0b0011)
RANKS = ((5, 9), (70, 0, 3))  # queries, and keys in the other order
OPTIONS = (*[None] * 6, *USUAL)


def products_of(wanted: int) -> int:
    """That of each side whose gradient is wanted; one of them for the scalars alone."""
    return (wanted & 3).bit_count() or 1


def tensors(loss: str, rows: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    features = [torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (rows, keys)]
    return [*features, torch.tensor(1.5).double(), torch.tensor(-2.0).double()]


def leaves_of(values: list[Tensor], wanted: int) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(bool(wanted >> bit & 1)) for bit, x in enumerate(values)]


def gradients_of(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    found = iter(torch.autograd.grad(loss, [x for x in leaves if x.requires_grad]))
    return [next(found) if x.requires_grad else None for x in leaves]


@contextmanager
def counted(package: ModuleType) -> Iterator[list[str]]:
    """Notes the products of g with features, and the dots that dscale follows from."""
    schedule: Any = package._schedule
    noted: list[str] = []
    product, finish = schedule.Panels.add_product, schedule.finish

    def add_product(*given: Any) -> None:
        noted.append("product")
        product(*given)

    def finishing(*given: Any, dots: Tensor | None = None, **more: Any) -> None:
        noted.append("finish" if dots is None else "dots")
        finish(*given, dots=dots, **more)

    products = mock.patch.object(schedule.Panels, "add_product", add_product)
    with products, mock.patch.object(schedule, "finish", finishing):
        yield noted


def check_alone(package: ModuleType, loss: str) -> None:
    """Gradients, products and dots on one device, for all of WANTED."""
    values = tensors(loss, 40, 40)
    _, *truth = dense(loss, *values[:2], 1.5, -2.0)
    for wanted in WANTED:
        leaves = leaves_of(values, wanted)
        with counted(package) as noted:
            found = gradients_of(package.contrastive_loss(*leaves), leaves)
        for bit, (ours, true) in enumerate(zip(found, truth, strict=True)):
            assert (ours is not None) == bool(wanted >> bit & 1)
            if ours is not None:
                torch.testing.assert_close(ours, true, atol=1e-12, rtol=1e-9)
        assert noted.count("product") == products_of(wanted), f"products for {wanted:04b}"
        assert noted.count("dots") == bool(wanted & 0b1100), f"dots for {wanted:04b}"
        assert noted.count("dots") + noted.count("finish") == products_of(wanted)


def check_ranks(package: ModuleType, loss: str, wanted: int, rows: tuple[int, ...]) -> None:
    """The same over ranks; sums for keys have the last tag of what travels."""
    keys = rows[::-1]
    values = tensors(loss, sum(rows), sum(keys))
    cuts = [list(itertools.accumulate(counts, initial=0)) for counts in (rows, keys)]

    def job(rank: int) -> list[Tensor | None]:
        own = [x[cut[rank] : cut[rank + 1]] for x, cut in zip(values, cuts, strict=False)]
        leaves = leaves_of([*own, *values[2:]], wanted)
        value = package.contrastive_loss(*leaves)
        return [value.detach(), *gradients_of(value, leaves)]

    world = World(package, len(rows))
    found = averaged([list(parts) for parts in world.run(job)])
    for bit, (ours, true) in enumerate(zip(found, dense(loss, *values[:2], 1.5, -2.0), strict=True)):
        assert (ours is not None) == (bit == 0 or bool(wanted >> bit - 1 & 1))
        if ours is not None:
            torch.testing.assert_close(ours, true, atol=1e-12, rtol=1e-9)
    tags = {tag for posted in world.groups[0].posted for _, tag, _ in posted}
    assert (max(tags) == 1 + (loss == "clip")) == bool(wanted & 2), f"{tags} are sent"


@pytest.mark.parametrize("loss", LOSSES)
def test_only_what_is_wanted_is_computed(packages: Packages, loss: str) -> None:
    check_alone(packages(loss), loss)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("loss", LOSSES)
def test_only_what_is_wanted_is_sent(packages: Packages, loss: str, transport: str) -> None:
    for rows in RANKS:
        ways = {"devices": len(rows), "transport": transport} if transport == "gather" else {}
        for wanted in (0b0101, 0b0110, 0b1100):
            check_ranks(packages(loss, **ways), loss, wanted, rows)


BUGS: dict[str, tuple[str, Edit]] = {
    "a frozen key side has its product": (
        "alone", ("_runtime/package.py", "of_keys = bool(gradients & KEYS)", "of_keys = True"),
    ),
    "scalars need the queries' product": (
        "alone", ("_runtime/package.py", "(gradients & SCALARS and not of_keys)", "gradients & SCALARS"),
    ),
    "dots are of queries alone": (
        "alone", ("_runtime/weighting.py", "dots = None if self.products.of_queries else self._dots", "dots = None"),
    ),
    "sums that nobody wants travel": ("ranks", ("_runtime/table.py", '"summed" not in (roles', '"" not in (roles')),
    "as many dots as queries": (
        "ranks", ("_runtime/weighting.py", "(call.q if self.products.of_queries else call.k)", "call.q"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(planted: Callable[..., str], bug: str) -> None:
    check, edit = BUGS[bug]
    package = importlib.import_module(planted(bug, "clip", (edit,)))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        if check == "alone":
            check_alone(package, "clip")
        else:
            check_ranks(package, "clip", 0b1101, (5, 9))
            check_ranks(package, "clip", 0b1110, (70, 0, 3))


@pytest.mark.parametrize("checks", ["first", "never"])
def test_ranks_that_freeze_different_sides_are_told(packages: Packages, checks: str) -> None:
    """Planted: unchecked ranks compare whether any gradient is wanted, as one of them waits for sums of the other."""
    package, values = packages("clip"), tensors("clip", 3, 3)

    def job(rank: int) -> Tensor:
        leaves = leaves_of(values, 0b0101 + rank)
        loss: Tensor = package.contrastive_loss(*leaves, check_ranks=checks)
        return loss

    what = "gradients wanted" if checks == "first" else "differentiated"
    said = r"rank 0: q scale, rank 1: k scale" if checks == "first" else r"rank 0: q, rank 1: k"
    with pytest.raises(RuntimeError, match=rf"{what} differs \({said}\)"):
        World(package, 2).run(job)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_graph_keeps_and_counts_what_is_wanted(packages: Packages, loss: str) -> None:
    """Operators that are recorded, their floating-point operations, and what forward saves."""
    package, values = packages(loss), tensors(loss, 20, 20)
    operators = package.ContrastiveLoss._package.operators
    at_once = loss == "siglip"
    for wanted in (0b0101, 0b0110, 0b1100):

        def results(*leaves: Tensor) -> list[Tensor]:
            value = package.contrastive_loss(*leaves)
            return [value, *(x for x in gradients_of(value, list(leaves)) if x is not None)]

        plain = results(*leaves_of(values, wanted))
        recorded = make_fx(results)(*leaves_of(values, wanted))(*leaves_of(values, wanted))
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
        with FlopCounterMode(display=False) as flops:
            results(*leaves_of(values, wanted))
        count = (1 if at_once else 2) + products_of(wanted)
        assert flops.get_total_flops() == 2 * count * 20 * 20 * 8
        if at_once:
            _, *kept = operators.forward(*values, *OPTIONS, wanted)
            assert [x.numel() for x in kept[:3]] == [160 * bool(wanted & 1), 160 * bool(wanted & 2), 2]


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_compiled_step_freezes_what_the_inputs_do(packages: Packages, loss: str) -> None:
    package, values = packages(loss), tensors(loss, 20, 20)

    def run(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        value: Tensor = package.contrastive_loss(1.0 * q, 1.0 * k, scale, bias)
        return value

    for wanted in (0b0101, 0b0110):
        leaves = leaves_of(values, wanted)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for ours, true in zip(gradients_of(compiled(*leaves), leaves), gradients_of(run(*leaves), leaves), strict=True):
            assert ours is true or (ours is not None and true is not None and torch.equal(ours, true))


@pytest.mark.parametrize("traced", [0b0000, 0b0001, 0b1000])
def test_gradients_that_forward_has_not_kept_are_computed(packages: Packages, traced: int) -> None:
    """A graph that was traced without gradients, or with a frozen side. Planted: what was not kept is not looked at."""
    values = tensors("siglip", 4, 4)
    operators, leaves = packages("siglip").ContrastiveLoss._package.operators, leaves_of(values, 0b1111)
    found = gradients_of(operators.forward(*leaves, *OPTIONS, traced)[0], leaves)
    for ours, true in zip(found, dense("siglip", *values[:2], 1.5, -2.0)[1:], strict=True):
        torch.testing.assert_close(ours, true)


def test_a_recorded_step_is_that_of_its_gradients(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = as_recording(packages("infonce"), monkeypatch)
    call, upstream = batch(1), torch.tensor(2.0).double()
    for wanted in (0b1111, 0b1101, 0b0110):
        recorded.gradients = wanted
        for _ in range(3):
            value, saved = recorded.forward(call)
            gradients = recorded.backward(call, saved, upstream)
            true_value, true = recorded.unrecorded(call, upstream)
            assert torch.equal(value, true_value)
            assert [x is None for x in gradients] == [x is None for x in true]
            assert all(a is b or torch.equal(a, b) for a, b in zip(gradients, true, strict=True))
    assert recorded.graphs >= 4


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(("loss", "dtype"), [("clip", "fp64"), ("infonce", "bf16"), ("siglip", "bf16")])
def test_a_package_planned_for_a_frozen_side(packages: Packages, loss: str, dtype: str, side: str) -> None:
    """It keeps its predicted memory, needs less than one for both, and refuses the gradient that has no room."""
    package, whole = packages(loss, dtype, frozen=side, batch_size=128, dim=64), packages(loss, dtype, 64, 128)
    predicted = package.SPEC["predicted"]["peak_bytes"]
    assert predicted < whole.SPEC["predicted"]["peak_bytes"]
    assert package.SPEC["predicted"]["time_s"] < whole.SPEC["predicted"]["time_s"]
    inputs = inputs_of(package, Case(128, 128, 64, dtype, 2.0, features="unit"))
    for width in (inputs.q.dtype, *[torch.float32] * (dtype == "bf16")):  # gradients of wider features are not rounded
        given = Inputs(inputs.q.to(width), inputs.k.to(width), inputs.scale)
        package.loss_and_grads(*given[:3])
        with PeakMeter("cpu") as meter:
            found = package.loss_and_grads(*given[:3])
        casts = 0 if width == inputs.q.dtype else 2 * 128 * 64 * 2
        assert meter.peak_bytes <= predicted + casts
        assert found[1 if side == "query" else 2] is None
        both = zip(found[:3], whole.loss_and_grads(*given[:3])[:3], strict=True)
        assert all(a is None or torch.equal(a, b) for a, b in both)
    assert autograd_results(package, inputs)[1 if side == "query" else 2] is None
    assert package.selftest("cpu")["ok"]
    name = "q" if side == "query" else "k"
    with pytest.raises(ValueError, match=f"{name} requires a gradient, but .* was generated with --frozen {side}"):
        package.contrastive_loss(*(x.detach().requires_grad_() for x in inputs[:2]), 2.0)
    scale = torch.tensor(2.0, requires_grad=True)
    plain = [x.detach() for x in inputs[:2]]
    package.contrastive_loss(*plain, scale).backward()
    assert scale.grad is not None
    scale.grad = None
    with PeakMeter("cpu") as meter:
        package.contrastive_loss(*plain, scale).backward()
    assert meter.peak_bytes <= predicted
    with torch.no_grad():
        package.contrastive_loss(*(x.detach().requires_grad_() for x in inputs[:2]), 2.0)


class OnGpu(list):  # type: ignore[type-arg]
    """Features, to the warm-up."""

    is_cuda, device = True, torch.device("cuda", 0)


def test_kernels_are_compiled_once_for_the_gradients_that_calls_want(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen side and an evaluation launch other kernels. Scale and bias are computed together.

    Planted: the planned gradients are compiled for each call; those of an earlier call count for all.
    """
    package, compiled = packages("clip"), list[int]()
    api, warmup = (importlib.import_module(f"{package.__name__}._runtime.{name}") for name in ("api", "warmup"))
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(warmup, "rehearsed", lambda package, call, gradients: compiled.append(gradients))
    monkeypatch.setattr(warmup, "_compile", lambda launches, device: None)
    monkeypatch.setattr(warmup.replay, "capturing", lambda device: False)
    record = SimpleNamespace(digest="d", any_device=False, traits=SimpleNamespace(pairs=False, triangle=False))
    on_gpu = SimpleNamespace(q=OnGpu([0]), k=[0])
    monkeypatch.setattr(api, "warm_up", lambda package, call, gradients: warmup.warm_up(record, on_gpu, gradients))
    values = tensors("clip", 5, 5)
    for wanted in (0b1111, 0b0001, 0b0111, 0b1110, 0b0001, 0):
        package.contrastive_loss(*leaves_of(values, wanted))
    with torch.no_grad():
        package.contrastive_loss(*leaves_of(values, 0b1111))
    package.loss_and_grads(*values)
    assert compiled == [0b1111, 0b0001, 0b1110, 0]
