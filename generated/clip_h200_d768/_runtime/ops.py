"""Two opaque operators per package: the whole forward and the whole backward, each over all hops.

Opaque, so that torch.compile neither looks inside nor reorders hops; functional, so that it may trace around them. The
namespace comes from the package's digest: importing the same package twice finds the operators of the first import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import engine
from .engine import Options, Package, Saved
from .ring import group_size

_FORWARD = (
    "(Tensor q, Tensor k, Tensor scale, Tensor bias, Tensor? labels, str group_name, str grad_sync, str reduction, "
    "str check_ranks, int gradients) -> (Tensor loss, Tensor query_statistics, Tensor key_statistics, Tensor stash, "
    "Tensor layout)"
)
_BACKWARD = (
    "(Tensor upstream, Tensor q, Tensor k, Tensor scale, Tensor bias, Tensor? labels, Tensor query_statistics, "
    "Tensor key_statistics, Tensor stash, Tensor layout, str group_name, str grad_sync, str reduction) "
    "-> (Tensor dq, Tensor dk, Tensor dscale, Tensor dbias)"
)


_libraries: list[torch.library.Library] = []  # operators live as long as theirs


class Operators(NamedTuple):
    """`forward` is differentiable in q, k, scale and bias, once. Arguments as in the schemas above."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def register(package: Package) -> Operators:
    """The operators of a package, registered at its first import."""
    namespace = f"infcl_{package.digest[:16]}"
    registered = getattr(torch.ops, namespace)
    if not (hasattr(registered, "forward") and hasattr(registered, "backward")):
        _define(package, namespace)
    return Operators(registered.forward.default, registered.backward.default)


def _define(package: Package, namespace: str) -> None:
    def forward(
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        group_name: str,
        grad_sync: str,
        reduction: str,
        check_ranks: str,
        gradients: int,
    ) -> tuple[Tensor, ...]:
        options = Options(group_name, grad_sync, reduction, check_ranks)
        loss, saved = engine.forward(package, q, k, scale, bias, labels, options, gradients)
        return (loss, *saved)

    def backward(
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        query_statistics: Tensor,
        key_statistics: Tensor,
        stash: Tensor,
        layout: Tensor,
        group_name: str,
        grad_sync: str,
        reduction: str,
    ) -> tuple[Tensor, ...]:
        saved = Saved(query_statistics, key_statistics, stash, layout)
        options = Options(group_name, grad_sync, reduction)
        return engine.backward(package, upstream, q, k, scale, bias, labels, saved, options)

    statistics = package.schedule.STATISTICS_DTYPE

    def forward_shapes(
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        group_name: str,
        grad_sync: str,
        reduction: str,
        check_ranks: str,
        gradients: int,
    ) -> tuple[Tensor, ...]:
        size = group_size(group_name)
        stash = None
        if size == 1 and gradients:
            stash = package.schedule.stash_shape(q.shape[0], k.shape[0])
        return (
            q.new_empty((), dtype=statistics),
            q.new_empty((2 + package.schedule.POSITIVE_ROWS, q.shape[0]), dtype=statistics),
            q.new_empty((2, k.shape[0] if package.loss.HAS_KEYS else 0), dtype=statistics),
            q.new_empty((0,) if stash is None else stash),
            torch.empty(
                (0 if size == 1 else size, 2), dtype=torch.int64, device=q.device if size == 1 else "cpu"
            ),
        )

    def backward_shapes(
        upstream: Tensor, q: Tensor, k: Tensor, scale: Tensor, *unused: object
    ) -> tuple[Tensor, ...]:
        scalars = (q.new_empty((), dtype=statistics), q.new_empty((), dtype=statistics))
        return (q.new_empty(q.shape), k.new_empty(k.shape), *scalars)

    # By hand: `torch.library.custom_op` checks every result for aliases, which takes 1.4 ms a call in torch 2.11.
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    for name, schema, implementation, shapes in (
        ("forward", _FORWARD, forward, forward_shapes),
        ("backward", _BACKWARD, backward, backward_shapes),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", shapes, lib=library)
    operators = getattr(torch.ops, namespace)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, scale, bias, labels, group_name, grad_sync, reduction, _, _ = inputs
        _, *saved = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(q, k, scale, bias, labels, *saved)
        ctx.options = (group_name, grad_sync, reduction)

    def differentiate(ctx: Any, upstream: Tensor | None, *unused: object) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # torch's own error for a second backward without retain_graph
        if upstream is None:
            return (None,) * 10
        gradients = operators.backward.default(upstream, *tensors, *ctx.options)
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * 6)

    def refuse(ctx: Any, *unused: object) -> None:
        raise RuntimeError(f"trying to differentiate {package.name} twice: its gradient has no derivative")

    torch.library.register_autograd(f"{namespace}::forward", differentiate, setup_context=save, lib=library)
    torch.library.register_autograd(f"{namespace}::backward", refuse, lib=library)
