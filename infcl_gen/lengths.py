"""Losses over prefixes of the features without kernels for all of them at once: the sum of a call for each length.

A sum over pairs, a loss of rows that are compared with each other, and terms that are no multiples of log-sum-exps keep
one similarity of a pair. Their products are those of all lengths: of 96, 192, 384 and 768 columns 1.9 times those of
the last.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from infcl_gen.inputs.problem import Formula


class Lengths(NamedTuple):
    """Of a loss so many first columns of the features, each with its weight. The last are all of them."""

    prefixes: tuple[tuple[int, float], ...]
    renormalise: bool  # whether similarities of each length are cosines
    padded: bool  # whether features keep their width, as that of a guide is the same

    def total(self, run: Callable[[tuple[Any, ...]], Tensor], arguments: tuple[Any, ...]) -> Tensor:
        """The sum of `run` of the arguments of each length. Raises ValueError for features of another width.

        The longest comes first. It has all columns: what is wrong with them all ranks hear from its package.
        """
        losses = (run(given) * weight for given, weight in self._calls(arguments))
        total = next(losses)
        if (width := arguments[0].shape[1]) != (longest := self.prefixes[-1][0]):
            raise ValueError(f"this loss is over prefixes of {longest} columns, but features have {width}")
        for loss in losses:
            total = total + loss
        return total

    def _calls(self, arguments: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], float]]:
        q, k, scale, bias, own, *others = arguments
        query_weight, key_weight, negatives, *of_single = own
        for columns, weight in reversed(self.prefixes):
            first = functools.partial(self._first, columns=columns)
            of_length = query_weight, key_weight, first(negatives), *of_single
            yield (first(q), first(k), scale, bias, of_length, *others), weight

    def _first(self, x: Any, columns: int) -> Any:
        """The first columns of features, or their directions. What are no features the package refuses."""
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            return x
        width = x.shape[-1]
        if columns < self.prefixes[-1][0]:
            x = x[..., :columns]
        if self.renormalise:
            x = normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1).to(x.dtype)
        return pad(x, (0, width - x.shape[-1])) if self.padded else x


@functools.lru_cache(maxsize=64, typed=True)  # 1 is no True
def lengths_apart(loss: str | Formula, prefixes: tuple[tuple[int, float], ...], renormalise: bool) -> Lengths | None:
    """How to add up the loss over these prefixes, or None where a package has them all. Raises LossError for a loss
    that is unknown, or cannot have them."""
    from infcl_gen.losses import LossError, PrefixesApartError, derive, load_loss, over_prefixes  # import SymPy

    whole = load_loss(loss)
    try:
        derive(over_prefixes(whole, prefixes, renormalise))
    except PrefixesApartError:
        traits = derive(whole).traits
        if traits.states:
            raise LossError(
                f"loss {whole.name}: a state is of one length of the features: add up losses of sliced features, each "
                "with states of its own"
            ) from None
        return Lengths(prefixes, renormalise, padded=traits.guide)
    return None
