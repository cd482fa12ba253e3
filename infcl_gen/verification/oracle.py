"""What a package's numbers are compared with: the dense loss in fp64, and the same loss in plain torch.

The oracle is the package's `reference`, printed from the loss's formula and differentiated by autograd. It shares
neither the derived gradient nor any kernel with what it checks.
"""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infcl_gen.runtime.selftest import Results as LossAndGrads

SLICE_ROWS = 2048


class Inputs(NamedTuple):
    """The arguments of a loss: q (M, D), k (N, D), numbers or 0-dim tensors; labels (M,) for "label" losses."""

    q: Tensor
    k: Tensor
    scale: float | Tensor = 1.0
    bias: float | Tensor | None = None
    labels: Tensor | None = None

    def leaves(self, features: torch.dtype, numbers: torch.dtype) -> list[Tensor]:
        """Copies of q and k, and of scale and bias, in these dtypes, that require gradients."""
        values = (self.q, self.k, self.scale, 0.0 if self.bias is None else self.bias)
        return [
            torch.as_tensor(value, dtype=dtype, device=self.q.device).detach().clone().requires_grad_()
            for value, dtype in zip(values, (features, features, numbers, numbers), strict=True)
        ]

    def positives(self) -> Tensor:
        """The key of each query, (M,)."""
        own = torch.arange(len(self.q)) if self.labels is None else self.labels
        return own.to(self.q.device)


def oracle(module: ModuleType, inputs: Inputs) -> LossAndGrads:
    """The dense fp64 loss of the package and its gradients, all fp64, for features of any dtype and strides."""
    leaves = inputs.leaves(torch.float64, torch.float64)
    loss = module.reference(*leaves, labels=inputs.labels, dtype=torch.float64)
    return _gradients(loss, leaves)


def plain_torch(module: ModuleType, inputs: Inputs) -> LossAndGrads:
    """The same loss as one would write it in torch, whose error sets the tolerance; as OpenCLIP under autocast.

    Similarities are a product in the features' dtype, so bf16 rounds them. Logits and cross-entropy are fp32 (fp64 for
    fp64 features), and autograd returns through the same dtypes.
    """
    mathematics = loss_module(module)
    statistics = torch.promote_types(inputs.q.dtype, torch.float32)
    leaves = q, k, scale, bias = inputs.leaves(inputs.q.dtype, statistics)
    x = mathematics.logit((q @ k.T).to(statistics), scale, bias)
    labels = (inputs.positives(),) if mathematics.POSITIVES == "label" else ()
    return _gradients(mathematics.loss_of_logits(x, *labels), leaves)


def oracle_by_slices(mathematics: Any, q: Tensor, k: Tensor, scale: float, labels: Tensor) -> LossAndGrads:
    """The oracle for batches whose similarities do not fit into memory, from a package's loss.py alone.

    It takes SLICE_ROWS queries at a time and computes their similarities again for the gradient.
    """
    leaves = q, k, factor, bias = Inputs(q, k, scale).leaves(torch.float64, torch.float64)

    def of_pairs(rows: Tensor, own: Tensor) -> Tensor:
        x = mathematics.logit(rows @ k.T, factor, bias)
        at = torch.arange(len(own), device=own.device), own
        terms: Tensor = mathematics.pair_term(x).index_put(at, mathematics.positive_term(x[at]))
        return terms.sum()

    def statistics(rows: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = mathematics.logit(rows @ k.T, factor, bias)
        return x.logsumexp(1), x.logsumexp(0), x.gather(1, own[:, None])[:, 0]

    pairs = hasattr(mathematics, "pair_term")
    slices = zip(q.split(SLICE_ROWS), labels.split(SLICE_ROWS), strict=True)
    work = of_pairs if pairs else statistics
    found = [checkpoint(work, *each, use_reentrant=False, preserve_rng_state=False) for each in slices]
    if pairs:
        return _gradients(torch.stack(found).sum() / len(q), leaves)
    by_query, by_key, at_positive = zip(*found, strict=True)
    c, p = torch.stack(by_key).logsumexp(0), torch.cat(at_positive)
    loss = mathematics.query_term(torch.cat(by_query), p).sum()
    if mathematics.HAS_KEYS:
        loss = loss + mathematics.key_term(c, p).sum()
    return _gradients(loss / len(q), leaves)


def loss_module(module: ModuleType) -> Any:
    """The package's loss.py (its `__init__` need not offer it under this name)."""
    return importlib.import_module(f"{module.__name__}.loss")


def _gradients(loss: Tensor, leaves: list[Tensor]) -> LossAndGrads:
    return LossAndGrads(loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True))
