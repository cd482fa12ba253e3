"""Losses over prefixes of the features without kernels for all of them at once: the sum of a call for each length.

A sum over pairs, a loss of rows that are compared with each other, and terms that are no multiples of log-sum-exps keep
one similarity of a pair. Their products are those of all lengths: of 96, 192, 384 and 768 columns 1.9 times those of
the last.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from infcl_gen.inputs.problem import TORCH_DTYPES
from infcl_gen.runtime.renormalised import SMALLEST_NORM

if TYPE_CHECKING:
    from infcl_gen.losses.language import LossSpec

DTYPES = {getattr(torch, name): flag for flag, name in TORCH_DTYPES.items()}  # of features, and their flags


class _Directions(torch.autograd.Function):
    """x over the norms of its rows, and these, in fp32 or fp64. Rows whose norm is below SMALLEST_NORM are divided by
    that instead.

    As torch's `normalize` of x in fp32, which would keep that copy until backward: twice the memory of bf16.
    """

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).clamp_min_(SMALLEST_NORM)
        return (x / norms).to(x.dtype), norms

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> Tensor:
        x, norms = ctx.saved_tensors
        directions = x / norms
        along = (upstream * directions).sum(-1, keepdim=True).masked_fill(norms == SMALLEST_NORM, 0.0)
        gradient: Tensor = (upstream - along * directions) / norms
        return gradient.to(x.dtype)


class Lengths(NamedTuple):
    """Of a loss so many first columns of the features, each with its weight. The last are all of them."""

    prefixes: tuple[tuple[int, float], ...]
    renormalise: bool  # whether similarities of each length are cosines
    padded: bool  # whether features keep their width, as that of a guide is the same
    digest: str  # of all lengths, 8 characters: what ranks compare

    def arguments(self, columns: int, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a call's arguments those of one length. Ranks compare all lengths in each."""
        q, k, scale, bias, own, *of_pairs, options = given
        query_weight, key_weight, negatives, *of_single = own
        first_q, first_k, negatives = (self._first(x, columns) for x in (q, k, negatives))
        own = query_weight, key_weight, negatives, *of_single
        return first_q, first_k, scale, bias, own, *of_pairs, options._replace(prefixes=self.digest)

    def check_width(self, width: int) -> None:
        """Raises ValueError for features of another width than the last length."""
        if width != self.prefixes[-1][0]:
            counts = ", ".join(str(columns) for columns, _ in self.prefixes)
            raise ValueError(f"prefixes: {counts} must end with D = {width}: add it, or pass fewer columns")

    def _first(self, x: Any, columns: int) -> Any:
        """The first columns of features, or their directions. What are no features the package refuses."""
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            return x
        if x.dim() < 2 or x.dtype not in DTYPES:
            return x
        width = x.shape[-1]
        if columns < self.prefixes[-1][0]:
            x = x[..., :columns]
        if self.renormalise:
            x, _ = _Directions.apply(x)
        return pad(x, (0, width - x.shape[-1])) if self.padded else x


def lengths_apart(loss: LossSpec, prefixes: tuple[tuple[int, float], ...], renormalise: bool) -> Lengths | None:
    """How to add up the loss over these prefixes, or None where a package has them all. Raises LossError for a loss
    that cannot have them."""
    from infcl_gen.losses import PrefixesApartError, derive, over_prefixes  # imports SymPy

    try:
        derive(over_prefixes(loss, prefixes, renormalise))
    except PrefixesApartError:
        digest = f"{zlib.crc32(repr((prefixes, renormalise)).encode()):08x}"
        return Lengths(prefixes, renormalise, derive(loss).traits.guided, digest)
    return None
