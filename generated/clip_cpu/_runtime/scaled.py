"""Features whose rows are multiplied by numbers: q_i . k_j is then a_i times that of the features.

The product is rounded once, to the features' dtype, as plain torch rounds it. So is the gradient of the features, which
is that of the product times the same numbers; a number's own gradient is their dot product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STRIP_ROWS = 4096  # at a time, where a temporary is wider than the features
WITHOUT_COPIES = ("cuda",)  # devices that compute in the wider dtype without one, if no graph is built


def times_rows(x: Tensor, numbers: Tensor) -> Tensor:
    """x (rows, D), of any strides, times `numbers` (rows,) of a dtype at least as wide: contiguous, of x's dtype."""
    out = x.new_empty(x.shape)
    if x.device.type in WITHOUT_COPIES and not torch.is_grad_enabled():
        return torch.mul(x, numbers[:, None], out=out)
    for start in range(0, x.shape[0], STRIP_ROWS):
        strip = slice(start, start + STRIP_ROWS)
        out[strip] = x[strip] * numbers[strip, None]
    return out


def row_dots(x: Tensor, y: Tensor, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
    """The dot product of each row of x with that of y, or with y at its place, (rows,), computed in `dtype`."""
    found = x.new_empty(x.shape[0], dtype=dtype)
    for start in range(0, x.shape[0], STRIP_ROWS):
        strip = slice(start, start + STRIP_ROWS)
        found[strip] = (x[strip].to(dtype) * y[strip if places is None else places[strip]]).sum(1)
    return found


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, numbers: Tensor) -> Tensor:
        return times_rows(x, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, numbers = ctx.saved_tensors
        of_x = times_rows(upstream, numbers) if ctx.needs_input_grad[0] else None
        return of_x, row_dots(x, upstream, numbers.dtype) if ctx.needs_input_grad[1] else None


def scaled(x: Tensor, numbers: Tensor) -> Tensor:
    """`times_rows`, differentiable in both."""
    product: Tensor = _Scaled.apply(x, numbers)
    return product
