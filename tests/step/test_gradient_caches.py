"""Steps by other libraries' gradient caches, in examples/gradient_caches.py: the gradients of one dense batch.

The libraries are not among the project's dependencies; without them the tests of their gradients are skipped.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
WAYS = {"gradcache": "grad_cache", "sentence_transformers": "sentence_transformers"}  # and the module of each


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, labels = scale * image @ text.T, torch.arange(len(image))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2


@pytest.mark.parametrize("way", WAYS)
def test_the_gradients_are_those_of_the_whole_batch(way: str) -> None:
    pytest.importorskip(WAYS[way])
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
    log_scale = nn.Parameter(torch.tensor(2.0))
    parameters = [log_scale, *(each for module in modules for each in module.parameters())]
    towers: list[Callable[[Tensor], Tensor]] = [
        lambda x: nn.functional.normalize(modules[0](x), dim=-1),
        lambda x: nn.functional.normalize(modules[1](x), dim=-1),
    ]
    inputs = [torch.randn(22, 12) for _ in towers]
    whole = clip(*(tower(x) for tower, x in zip(towers, inputs, strict=True)), log_scale.exp())
    expected = torch.autograd.grad(whole, parameters)
    more = {"loss": clip} if way == "gradcache" else {}
    step = getattr(example("gradient_caches"), way)(towers, inputs, log_scale.exp, 8, **more)
    for _ in range(2):  # a step leaves nothing behind that changes the next
        for each in parameters:
            each.grad = None
        assert step().item() == pytest.approx(whole.item(), rel=1e-6)
        for each, true in zip(parameters, expected, strict=True):
            assert each.grad is not None
            torch.testing.assert_close(each.grad, true, rtol=1e-5, atol=1e-7)


def test_a_library_that_is_not_installed_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    campaign, caches = example("training_step"), example("gradient_caches")
    for name in [*WAYS.values(), *sys.modules]:
        if name.partition(".")[0] in WAYS.values():
            monkeypatch.setitem(sys.modules, name, None)  # importing it fails

    def make(way: str) -> Callable[[], object]:
        return getattr(caches, way)([], [], torch.ones, 8, **({"loss": clip} if way == "gradcache" else {}))  # type: ignore[no-any-return]

    steps, rows = campaign.startable([*WAYS], make, 3)
    assert not steps and [*rows] == [*WAYS]
    for way, row in rows.items():
        assert row["error"].startswith("absent: ") and WAYS[way] in row["error"] and row["median_ms"] is None
    assert [*campaign.startable(["planned"], lambda way: lambda: None, 3)[0]] == ["planned"]
