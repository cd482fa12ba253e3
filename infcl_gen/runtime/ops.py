"""The loss and autograd: two opaque operators per package, the whole forward and the whole backward over all hops.

Opaque, so that torch.compile neither looks inside nor reorders hops; functional, so that it may trace around them. The
namespace comes from the package's digest: importing the same package twice finds the operators of the first import.
Outside of tracing `differentiable` does the same by an autograd function, without the dispatcher's 0.3 ms a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import engine, replay
from .package import Options, Package, Saved
from .ring import group_size

_FORWARD = (
    "(Tensor q, Tensor k, Tensor scale, Tensor bias, Tensor? labels, str group_name, str grad_sync, str reduction, "
    "str check_ranks, int gradients) -> (Tensor loss, Tensor query_statistics, Tensor key_statistics, Tensor stash, "
    "Tensor layout)"
)
_BACKWARD = (
    "(Tensor upstream, Tensor q, Tensor k, Tensor scale, Tensor bias, Tensor? labels, Tensor query_statistics, "
    "Tensor key_statistics, Tensor stash, Tensor layout, str group_name, str grad_sync, str reduction, "
    "str check_ranks) "
    "-> (Tensor dq, Tensor dk, Tensor dscale, Tensor dbias)"
)


_libraries: list[torch.library.Library] = []  # operators live as long as theirs


class Operators(NamedTuple):
    """`forward` is differentiable in q, k, scale and bias, once. Arguments as in the schemas above."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class _Loss(torch.autograd.Function):
    """The loss of plain tensors, differentiable in q, k, scale and bias, once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        package: Package,
        options: Options,
        gradients: int,
        started: engine.Started | None,
    ) -> Tensor:
        # With `ctx` here, and no setup_context, torch does not look up this signature at each call: 65 us of the host.
        if started is None:
            features = package.cast(q, k)
            loss, saved = replay.forward(package, *features, scale, bias, labels, options, gradients)
        else:
            loss, saved = started.finish()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, scale, bias, labels, *saved)
        ctx.package, ctx.options = package, options
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *unused: object) -> Any:
        q, k, scale, bias, labels, *saved = ctx.saved_tensors
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        package: Package = ctx.package
        tensors = (upstream, *package.cast(q, k), scale, bias)
        if torch.is_grad_enabled():  # create_graph
            gradients: Any = _Gradients.apply(*tensors, labels, package, Saved(*saved), ctx.options)
        else:
            gradients = replay.backward(package, *tensors, labels, Saved(*saved), ctx.options)
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * (len(ctx.needs_input_grad) - 4))


class _TransformedLoss(_Loss):
    """The same under torch.func, which asks for a forward without `ctx`."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k = inputs[5].cast(*inputs[:2])
        loss, saved = replay.forward(inputs[5], q, k, *inputs[2:5], *inputs[6:])
        return (loss, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:5], *output[1:])
        ctx.package, ctx.options = inputs[5:7]


class _Gradients(torch.autograd.Function):
    """The gradients of the loss, which have none of their own."""

    @staticmethod
    def forward(
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        package: Package,
        saved: Saved,
        options: Options,
    ) -> tuple[Tensor, ...]:
        return replay.backward(package, upstream, q, k, scale, bias, labels, saved, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[6].name

    @staticmethod
    def backward(ctx: Any, *unused: object) -> Any:
        raise _twice(ctx.name)


def _twice(name: str) -> RuntimeError:
    return RuntimeError(f"trying to differentiate {name} twice: its gradient has no derivative")


def differentiable(
    package: Package,
    operators: Operators,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor,
    labels: Tensor | None,
    options: Options,
) -> Tensor:
    """The loss of arguments that were checked and converted. Features of another dtype than the package's are cast, and
    have their gradients in their own, not rounded to the package's in between."""
    gradients = 0
    if torch.is_grad_enabled():
        for bit, tensor in enumerate((q, k, scale, bias)):
            gradients |= int(tensor.requires_grad) << bit
    loss: Tensor
    if traced(q, k, scale, bias):
        loss = operators.forward(q, k, scale, bias, labels, *_in_schema(options), gradients)[0]
        return loss
    options = wanted(package, q, k, options)
    if gradients or forward_ad._current_level >= 0:  # the function refuses forward-mode derivatives
        inputs = (q, k, scale, bias, labels, package, options, gradients)
        if torch._C._are_functorch_transforms_active():
            loss = _TransformedLoss.apply(*inputs)[0]
        else:
            # First: autograd takes the host as long as it takes to start the first kernels.
            started = replay.start(package, q, k, scale, bias, labels, options, gradients)
            loss = _Loss.apply(*inputs, started)
    else:
        loss = replay.forward(package, *package.cast(q, k), scale, bias, labels, options, gradients)[0]
    return loss


def wanted(package: Package, q: Tensor, k: Tensor, options: Options) -> Options:
    """The options for features as they are before they are cast."""
    unrounded = not q.dtype == k.dtype == package.dtype
    return options if unrounded == options.unrounded else options._replace(unrounded=unrounded)


def _in_schema(options: Options) -> tuple[str, ...]:
    """What an operator is given; the rest follows from the features' dtype."""
    return options[:4]


def traced(*tensors: Tensor) -> bool:
    """Whether somebody records operators, or the tensors stand for others: then only an operator is right."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or is_in_torch_dispatch_mode()
        or not all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    )


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
        features = package.cast(q, k)
        loss, saved = replay.unrecorded_forward(package, *features, scale, bias, labels, options, gradients)
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
        check_ranks: str,
    ) -> tuple[Tensor, ...]:
        saved = Saved(query_statistics, key_statistics, stash, layout)
        options = wanted(package, q, k, Options(group_name, grad_sync, reduction, check_ranks))
        inputs = (upstream, *package.cast(q, k), scale, bias, labels, saved, options)
        dq, dk, *scalars = engine.backward(package, *inputs)
        return (dq.to(q.dtype), dk.to(k.dtype), *scalars)

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
        kept, columns = engine.kept_sizes(package, size, q.shape[0], k.shape[0], bool(gradients))
        return (
            q.new_empty((), dtype=statistics),
            q.new_empty((2 + package.schedule.POSITIVE_PARTS, q.shape[0]), dtype=statistics),
            q.new_empty((2, columns), dtype=statistics),
            q.new_empty(kept, dtype=package.dtype),
            torch.empty(
                (0 if size == 1 else size, 3), dtype=torch.int64, device=q.device if size == 1 else "cpu"
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
        q, k, scale, bias, labels, *options, _ = inputs
        _, *saved = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(q, k, scale, bias, labels, *saved)
        ctx.options = tuple(options)

    def differentiate(ctx: Any, upstream: Tensor | None, *unused: object) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # torch's own error for a second backward without retain_graph
        if upstream is None:
            return (None,) * 10
        gradients = operators.backward.default(upstream, *tensors, *ctx.options)
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * 6)

    def refuse(ctx: Any, *unused: object) -> None:
        raise _twice(package.name)

    torch.library.register_autograd(f"{namespace}::forward", differentiate, setup_context=save, lib=library)
    torch.library.register_autograd(f"{namespace}::backward", refuse, lib=library)
