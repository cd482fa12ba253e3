"""What a tracer records is what a plain call does: operators are well formed, every option arrives, and gradients have
the features' dtype."""

from __future__ import annotations

import importlib
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from infcl_gen.emission import import_package
from infcl_gen.runtime.ops import _named
from infcl_gen.runtime.package import Options
from tests.kernels.planted import Edit
from tests.tiers import combined, nightly

from .in_process import USUAL

Packages = Callable[..., ModuleType]
OPS = "_runtime/ops.py"
# Texts that only one place is followed by.
SAVED = ", *saved)\n\n    def backward(*inputs"
NOTHING = "\n            return (None,) * len(ctx.needs_input_grad)\n        needed"


def drawn(*dtypes: torch.dtype) -> list[Tensor]:
    """q and k in these dtypes, and a scale in fp32."""
    generator = torch.Generator().manual_seed(5)
    features = [torch.randn(20, 8, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]
    return [*features, torch.tensor(2.0, requires_grad=True)]


def options_arrive(package: ModuleType) -> None:
    """`reduction` is the one option that changes the results of a single rank, in forward and in backward."""
    leaves = drawn(torch.bfloat16, torch.bfloat16)
    found = {}

    def results(reduction: str, *leaves: Tensor) -> tuple[Tensor, ...]:
        loss = package.contrastive_loss(*leaves, reduction=reduction)
        return (loss, *torch.autograd.grad(loss, leaves))

    for reduction in ("mean", "sum"):
        run = partial(results, reduction)
        found[reduction] = run(*leaves)
        for recorded, plain in zip(make_fx(run)(*leaves)(*leaves), found[reduction], strict=True):
            assert torch.equal(recorded, plain), f"reduction {reduction}"
    assert not any(torch.equal(a, b) for a, b in zip(found["mean"], found["sum"], strict=True))


def gradients_have_the_dtype_of_their_features(package: ModuleType) -> None:
    """By the operator itself: autograd's engine would cast what comes out of it."""
    operators = package.ContrastiveLoss._package.operators
    wide, narrow = torch.float32, torch.bfloat16
    for dtypes in ((wide, wide), (wide, narrow), (narrow, wide), (narrow, narrow)):
        q, k, scale = (x.detach() for x in drawn(*dtypes))
        call = (q, k, scale, torch.tensor(0.0), *[None] * 6)
        loss, *saved = operators.forward(*call, *USUAL, 15)
        dq, dk, dscale, dbias = operators.backward(torch.ones_like(loss), *call, *saved, *USUAL, 15)
        assert (dq.dtype, dk.dtype) == dtypes, f"{dq.dtype}, {dk.dtype} for {dtypes}"
        assert dscale.dtype == dbias.dtype == wide
        rounded = [torch.equal(x.bfloat16().float(), x) for x in (dq, dk) if x.dtype == wide]
        assert not any(rounded), "gradients of wider features are not rounded to the package's dtype in between"


WIDE, NARROW = (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)
# 0: called under no_grad, nothing is kept; then both sides, and one of them is frozen.
WANTED = [(WIDE, 0), (WIDE, 0b1111), (WIDE, 0b1101), (NARROW, 0), (NARROW, 0b1111), (NARROW, 0b0110)]


def operators_are_well_formed(package: ModuleType, cases: list[tuple[tuple[torch.dtype, ...], int]] = WANTED) -> None:
    """All of torch's own checks: schema, shapes of fake tensors, registration, and dispatch through AOTAutograd with
    symbolic sizes. Features are wider than the package, as before autocast; each gradient has the dtype of its own."""
    operators, traits = package.ContrastiveLoss._package.operators, package.ContrastiveLoss._package.traits
    labelled, ids = traits.labels, traits.ids
    of_pairs = (None, torch.arange(20).flip(0) if labelled else None, *[torch.arange(20) // 3 if ids else None] * 2)
    of_pairs += tuple(x.detach() for x in drawn(torch.bfloat16, torch.bfloat16)[:2]) if traits.guide else (None, None)
    options = _named(Options(labelling="given" if labelled else "none"))
    bias = torch.tensor(0.0, requires_grad=True)
    for dtypes, gradients in cases:
        call = (*drawn(*dtypes), bias)
        wanted = [x.detach().requires_grad_(bool(gradients >> bit & 1)) for bit, x in enumerate(call)]
        torch.library.opcheck(operators.forward, (*wanted, *of_pairs, *options, gradients))
        with torch.no_grad():
            loss, *saved = operators.forward(*call, *of_pairs, *options, gradients)
            arguments = (torch.ones_like(loss), *(x.detach() for x in call), *of_pairs, *saved, *options)
        if gradients:
            torch.library.opcheck(operators.backward, (*arguments, gradients))
    # The other checks of `refuse` call it, and it does nothing but raise.
    torch.library.opcheck(operators.refuse, ("ValueError", "wrong", ""), test_utils="test_autograd_registration")


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "form": operators_are_well_formed, "options": options_arrive, "dtypes": gradients_have_the_dtype_of_their_features,
}  # fmt: skip
BUGS: dict[str, tuple[str, Edit]] = {
    "an operator writes to its input": (
        "form", (OPS, "loss, saved = replay.unrecorded", "call.scale.mul_(2)\n        loss, saved = replay.unrecorded"),
    ),
    "a result is an input": ("form", (OPS, f"return (loss{SAVED}", f"return (call.scale{SAVED}")),
    "a fake loss has a row": ("form", (OPS, "q.new_empty(rows, dtype=statistics), *s", "q.new_empty((1,)), *s")),
    "a fake gradient has the other's dtype": ("form", (OPS, "k.new_empty(k.shape if", "q.new_empty(k.shape if")),
    "the gradient formula branches on a value": (
        "form", (OPS, f"if upstream is None:{NOTHING}", f"if upstream is None or not upstream:{NOTHING}"),
    ),
    "a traced call drops the reduction": (
        "options", (OPS, "*_named(call.options), g", '*_named(call.options._replace(reduction="mean")), g'),
    ),
    "the forward operator drops the reduction": (
        "options", (OPS, "_options(given[_GIVEN:])", '_options(given[_GIVEN:])._replace(reduction="mean")'),
    ),
    "the backward operator drops the reduction": (
        "options",
        (OPS, "_options(rest[-len(_NAMED) :])", '_options(rest[-len(_NAMED) :])._replace(reduction="mean")'),
    ),
    "gradients keep the dtype of their sums": (
        "dtypes", (OPS, "else x.to(dtype) for", "else x for"),
    ),
    "a fake gradient of a frozen side has its shape": (
        "form", (OPS, "q.shape if of_queries else (0,)", "q.shape"),
    ),
    "both gradients have the dtype of the queries": ("dtypes", (OPS, "(q.dtype, k.dtype, *[", "(q.dtype, q.dtype, *[")),
    "gradients pass through the package's dtype": (
        "dtypes", (OPS, "else x.to(dtype) for", "else x.to(package.dtype).to(dtype) for"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_operators(packages: Packages, check: str) -> None:
    CHECKS[check](packages("clip", dtype="bf16"))


OTHERS = ("infonce", "siglip", "siglip_multi", "clip_ids", "distill", "gist")


@pytest.mark.parametrize(
    ("loss", "wanted"), nightly(itertools.product(OTHERS, WANTED), combined(OTHERS[2::2], [WANTED[2], WANTED[4]]))
)
def test_operators_with_labels_and_ids_are_well_formed(
    packages: Packages, loss: str, wanted: tuple[tuple[torch.dtype, ...], int]
) -> None:
    operators_are_well_formed(packages(loss, dtype="bf16"), [wanted])


@pytest.mark.parametrize("bug", nightly(BUGS, {BUGS[bug][0]: bug for bug in BUGS}.values()))
def test_a_bug_in_the_operators_is_noticed(planted: Callable[..., str], bug: str) -> None:
    from torch.testing._internal.optests.generate_tests import OpCheckError  # imported in 1.3 s

    check, edit = BUGS[bug]
    package = importlib.import_module(planted(bug, "clip", (edit,), dtype="bf16"))
    with pytest.raises((AssertionError, OpCheckError)):
        CHECKS[check](package)


def test_an_edited_copy_runs_in_a_graph_as_it_does_without_one(packages: Packages, tmp_path: Path) -> None:
    """Planted: operators named by the digest alone, which are those of the package that was imported first."""
    package, copy = packages("clip", dtype="bf16"), tmp_path / "edited"
    shutil.copytree(package.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "loss.py").read_text()
    assert "return (r - p) / 2" in text
    (copy / "loss.py").write_text(text.replace("return (r - p) / 2", "return (r - p) / 2 + 100"))
    q, k, scale = (x.detach() for x in drawn(torch.bfloat16, torch.bfloat16))
    values = []
    for each in (package, import_package(copy, edited=True)):
        plain = each.contrastive_loss(q, k, scale)
        recorded = make_fx(lambda *x, run=each.contrastive_loss: run(*x))(q, k, scale)
        assert torch.equal(recorded(q, k, scale), plain)
        values.append(plain.item())
    assert values[1] - values[0] == pytest.approx(100.0)
