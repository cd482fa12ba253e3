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

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        negatives: Tensor | None = None,
    ) -> Tensor:
        named = {"query_ids": query_ids, "key_ids": key_ids, "negatives": negatives}
        loss: Tensor = self.criterion(self.tower(q), self.tower(k), scale, **named)
        return loss


def given_by_name(loss: str, rows: int) -> dict[str, Tensor]:
    """What a call of the loss gets beside features and scale."""
    own = torch.randn(rows, 1, 8, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    ids = torch.arange(rows) // 2
    return {
        "clip": {},
        "siglip_multi": {"query_ids": ids, "key_ids": ids},
        "gemini": {"query_ids": ids, "key_ids": ids, "negatives": own},
    }[loss]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", ["clip", "siglip_multi", "gemini"])
def test_a_model_that_contains_the_loss_is_exported(packages: Packages, loss: str, dynamic: bool) -> None:
    model, arguments = Model(packages(loss).ContrastiveLoss()), tuple(x.detach() for x in drawn())
    named, rows = given_by_name(loss, 12), torch.export.Dim("rows", min=2, max=200)
    shapes = {"q": {0: rows}, "k": {0: rows}, "scale": None, **{name: {0: rows} for name in named}}
    exported = torch.export.export(model, arguments, named, dynamic_shapes=shapes if dynamic else None)
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum(name.startswith("infcl_") for name in called) == 1
    for rows_now in (12, 20) if dynamic else (12,):
        inputs, named = [x.detach() for x in drawn(rows_now)], given_by_name(loss, rows_now)
        assert torch.equal(exported.module()(*inputs, **named), model(*inputs, **named))
