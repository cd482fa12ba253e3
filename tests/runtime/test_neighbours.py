"""What other parts of torch see of the loss: a profiler its phases, torch.export one operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from infcl_gen.processes import run_ranks

Packages = Callable[..., ModuleType]


def drawn(rows: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    features = [torch.randn(rows, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in "qk"]
    return [*features, torch.tensor(2.0, dtype=torch.float64, requires_grad=True)]


def test_a_profiler_sees_the_phases(packages: Packages) -> None:
    package = packages("clip")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        package.contrastive_loss(*drawn()).backward()
    assert [event.name for event in profile.events() if event.name.startswith("infcl ")] == [
        "infcl forward", "infcl backward"
    ]  # fmt: skip


@pytest.mark.usefixtures("forked")
def test_a_profiler_sees_the_hops(tmp_path_factory: pytest.TempPathFactory) -> None:
    (first, _) = run_ranks("tests.lazy_rank:ranges", {"cache": str(tmp_path_factory.mktemp("cache"))}, 2, 120.0)
    assert first[0] == "infcl forward" and "infcl backward" in first
    for phase in ("forward", "backward"):
        assert [f"infcl {phase} hop {hop} of 2" for hop in (0, 1)] == [name for name in first if f"{phase} hop" in name]


def test_without_a_profiler_there_are_no_ranges(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost the host microseconds."""
    package = packages("clip")
    monkeypatch.setattr(sys.modules["torch.autograd.profiler"], "record_function", None)
    package.contrastive_loss(*drawn()).backward()


class Model(nn.Module):
    """A tower of each kind and the loss."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.tower, self.criterion = nn.Linear(8, 8, dtype=torch.float64), criterion

    def forward(self, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.tower(q), self.tower(k), scale)
        return loss


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_that_contains_the_loss_is_exported(packages: Packages, dynamic: bool) -> None:
    model, arguments = Model(packages("clip").ContrastiveLoss()), tuple(x.detach() for x in drawn())
    rows = torch.export.Dim("rows", min=2, max=200)
    shapes = {"q": {0: rows}, "k": {0: rows}, "scale": None} if dynamic else None
    exported = torch.export.export(model, arguments, dynamic_shapes=shapes)
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum(name.startswith("infcl_") for name in called) == 1
    for rows_now in (12, 20) if dynamic else (12,):
        inputs = [x.detach() for x in drawn(rows_now)]
        assert torch.equal(exported.module()(*inputs), model(*inputs))
