"""Small towers with what makes exact micro-batches hard, and the plain step that a planned one is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infcl_gen import ContrastiveLoss, global_value
from infcl_gen.step.blocks import blocks_of
from infcl_gen.step.executor import Model, Tower
from infcl_gen.step.plan import TowerPlan

DIM = 8


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))
        return x + inner


class Encoder(nn.Module):
    """Residual blocks, and a projection to normalised features."""

    def __init__(self, inputs: int = 6, width: int = 12, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.last = nn.Linear(width, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.normalize(self.last(x), dim=-1)


class Pair(nn.Module):
    """A model of two encoders and a learnt scale, as CLIP."""

    def __init__(self, dropout: float = 0.0, shared: bool = False) -> None:
        super().__init__()
        self.image = Encoder(6, dropout=dropout)
        self.text = self.image if shared else Encoder(6, blocks=2, dropout=dropout)
        self.log_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        found = [tower(x) for tower, x in ((self.image, image), (self.text, text)) if x is not None]
        return found[0] if len(found) == 1 else found


def pair(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Pair:
    torch.manual_seed(seed)
    return Pair(**options).to(dtype)


def batch(rows: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator).to(dtype), torch.randn(rows, 6, generator=generator).to(dtype)


def model_of(module: Pair, towers: Sequence[Callable[[Any], Tensor]] | None = None, **options: Any) -> Model:
    """What a planned step of `module` is executed with."""
    runs = towers or (module.image, module.text)
    like = torch.empty(0, DIM, dtype=options.get("autocast") or module.log_scale.dtype)
    own = module.image, module.text
    made = [Tower(run, like, (module,), blocks_of([each])) for run, each in zip(runs, own, strict=True)]
    given: dict[str, Any] = {
        "loss": ContrastiveLoss(), "scale": lambda: module.log_scale.exp(), "bias": None, "device": like.device,
        "autocast": None, "generators": (), "value": global_value,
    }  # fmt: skip
    return Model(tuple(made), **given | options)


def plain(module: Pair, image: Tensor, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one large batch, by a copy of the module and the formula."""
    own = copy.deepcopy(module)
    own.zero_grad()
    loss = dense(own.image(image), own.text(text), own.log_scale.exp())
    loss.backward()
    return loss.detach(), gradients(own)


def features_of(
    plan: Sequence[TowerPlan], towers: Sequence[Callable[[Any], Tensor]], inputs: Sequence[Any]
) -> list[Tensor]:
    """The features of a plan's micro-batches in its order with all graphs kept, written apart from the executor."""
    passes = [each for t, of_tower in enumerate(plan) for each in of_tower.passes(len(inputs[t]), t)]
    passes.sort(key=lambda each: {"cached": 0, "offloaded": 1}.get(each.treatment, 2))
    outputs = {each: towers[each.tower](inputs[each.tower][each.rows]) for each in passes}
    return [torch.cat([outputs[each] for each in sorted(passes) if each.tower == t]) for t in range(len(plan))]


def dense(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss, by its formula."""
    logits, here = scale * image @ text.T, torch.arange(len(image))
    return (nn.functional.cross_entropy(logits, here) + nn.functional.cross_entropy(logits.T, here)) / 2


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def difference(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient; infinite where other parameters have one."""
    if found.keys() != true.keys():
        return float("inf")
    return max(float((found[name] - true[name]).norm() / true[name].norm()) for name in true)
