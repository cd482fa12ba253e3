"""The loss under autograd: two opaque operators per package, the whole forward and the whole backward.

torch.compile traces around the operators and cannot reorder hops inside them. The package's digest names them, and a
number each further import (of an edited copy, say). Outside of traces an autograd function saves 0.3 ms per call.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode

from . import agreement, engine, replay
from .group import find_group
from .package import ALL, KEYS, QUERIES, SCALARS, Call, Options, Package, Saved, products

# Schemas of the operators: the fields of Call, of Options those that a call may choose, and of Saved.
_CALL = "Tensor q, Tensor k, Tensor scale, Tensor bias, Tensor? vectors, "
_CALL += "Tensor? labels, Tensor? query_ids, Tensor? key_ids, Tensor? guide_queries, Tensor? guide_keys"
_OPTIONS = "str group_name, str grad_sync, str reduction, str check_ranks, str labelling, str prefixes"
_SAVED = "Tensor of_queries, Tensor of_keys, Tensor stash, Tensor ids, Tensor guides, Tensor of_vectors, "
_SAVED += "Tensor weighted, Tensor layout"
_FORWARD = f"({_CALL}, {_OPTIONS}, int gradients) -> (Tensor loss, {_SAVED})"
_RESULTS = "Tensor dq, Tensor dk, Tensor dscale, Tensor dbias"  # (0,) for those not wanted
_BACKWARD = f"(Tensor upstream, {_CALL}, {_SAVED}, {_OPTIONS}, int gradients) -> ({_RESULTS}"
_GIVEN = len(Call._fields) - 1  # tensors of a Call
_NAMED = tuple(word.split()[1] for word in _OPTIONS.split(", "))
_SAVED_PARTS = len(Saved._fields)
_REFUSE = "(str error, str message, str group_name) -> Tensor"

_libraries: list[torch.library.Library] = []  # keeps the operators registered
_hidden = False  # whether `_Loss.backward` is out of the compiler's sight


class _Loss(torch.autograd.Function):
    """The loss, differentiable once in q, k, scale, bias and vectors. Inputs: a `Call`'s, the package, the bits of
    gradients, the caller's states, which are overwritten."""

    @staticmethod
    def vmap(*_: object) -> Any:
        raise RuntimeError("vmap over batches of the loss is not supported: call it once for each batch")

    @staticmethod
    def jvp(*_: object) -> Any:
        raise NotImplementedError("the loss has no forward-mode derivatives: use backward, torch.func.grad or vjp")

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # With setup_context torch would inspect this signature at each call: 65 us of host time.
        *call, package, gradients, states = inputs
        loss, saved = replay.forward(package, cast(package, Call(*call)), gradients)
        keep_states(states, saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call[:_GIVEN], *saved)
        ctx.options, ctx.package, ctx.gradients = call[_GIVEN], package, gradients
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *unused: object) -> Any:
        tensors, package, gradients = ctx.saved_tensors, ctx.package, ctx.gradients
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = Saved(*tensors[_GIVEN:])
        call = _of_backward(package, Call(*(*tensors[:_GIVEN], ctx.options)), saved)
        if torch.is_grad_enabled():  # create_graph
            return _wanted(ctx, _Gradients.apply(upstream, *call, package, gradients, *saved))
        return _wanted(ctx, replay.backward(package, call, saved, upstream, gradients))


def _hide_backward() -> None:
    """Where a compiled step calls `backward()` after a graph break, the compiler would trace the sweep, and messages
    between ranks. A process that has not imported the compiler does not need that, and does not import it."""
    global _hidden
    if not _hidden and "torch._dynamo" in sys.modules:
        _Loss.backward = staticmethod(torch.compiler.disable(_Loss.backward))  # type: ignore[method-assign]
        _hidden = True


def cast(package: Package, call: Call) -> Call:
    """`Call.cast` of forward, which is the first to need memory."""
    with agreement.told(package, call):
        return call.cast(package)


def _named(options: Options) -> tuple[str, ...]:
    """What an operator is given of the options."""
    return tuple(getattr(options, name) for name in _NAMED)


def _options(named: Sequence[str]) -> Options:
    return Options(**dict(zip(_NAMED, named, strict=True)))  # type: ignore[arg-type]


def _of_backward(package: Package, call: Call, saved: Saved) -> Call:
    """The call, cast for backward: where forward has the gradients, a copy of the features would only take memory."""
    return call.cast(package, features=not package.at_once(saved.layout.shape[0]))


def _wanted(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    needed, rest = ctx.needs_input_grad, len(ctx.needs_input_grad) - len(gradients)
    return (*[g if need else None for g, need in zip(gradients, needed, strict=False)], *[None] * rest)


class _TransformedLoss(_Loss):
    """The same for torch.func, which requires a forward without `ctx`."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        *call, package, gradients, states = inputs
        loss, saved = replay.forward(package, cast(package, Call(*call)), gradients)
        keep_states(states, saved)
        return (loss, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:_GIVEN], *output[1:])
        ctx.options, ctx.package, ctx.gradients, _ = inputs[_GIVEN:]


class _Gradients(_TransformedLoss):
    """The gradients of the loss, not differentiable. Inputs: upstream, a `Call`'s, the package, the bits of gradients,
    `Saved`'s."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        upstream, *call, package, gradients = inputs[:-_SAVED_PARTS]
        return replay.backward(package, Call(*call), Saved(*inputs[-_SAVED_PARTS:]), upstream, gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[1 + len(Call._fields)].name

    @staticmethod
    def backward(ctx: Any, *unused: object) -> Any:
        raise _twice(ctx.name)


def keep_states(states: Sequence[Tensor], saved: Saved) -> None:
    """Writes the next states where the caller has the states, as batch norm does its running statistics."""
    for place, state in enumerate(reversed(states), 1):
        state.copy_(saved.of_vectors[-place])


def _twice(name: str) -> RuntimeError:
    return RuntimeError(f"trying to differentiate {name} twice: its gradient has no derivative")


def differentiable(package: Package, call: Call, states: tuple[Tensor, ...] = ()) -> Tensor:
    """The loss of an accepted call. Features are cast to the package's dtype; gradients have the features' dtype.

    `states` are the caller's tensors of those that the loss has, which are overwritten.
    """
    gradients = wanted(package, call)
    loss: Tensor
    if traced(*call.inputs):
        if not torch.compiler.is_compiling():
            _tell_flops(package)
        loss, *rest = package.operators.forward(*call[:_GIVEN], *_named(call.options), gradients)
        keep_states(states, Saved(*rest))  # not in the operator: torch differentiates none that writes its arguments
    elif torch._C._are_functorch_transforms_active():
        loss = _TransformedLoss.apply(*call, package, gradients, states)[0]
    elif gradients or forward_ad._current_level >= 0:  # `_Loss` refuses forward-mode derivatives
        _hide_backward()
        loss = _Loss.apply(*call, package, gradients, states)
    else:
        loss, saved = replay.forward(package, cast(package, call), gradients)
        keep_states(states, saved)
    return loss


def wanted(package: Package, call: Call) -> int:
    """The bits of the gradients that the loss of an accepted call computes."""
    gradients = 0
    if torch.is_grad_enabled():
        for bit, tensor in enumerate(call.inputs):
            gradients |= int(tensor.requires_grad) << bit
        gradients = package.computed(gradients)
    return gradients


def traced(*tensors: Tensor) -> bool:
    """Whether operators are recorded, or a tensor is of a subclass: only the opaque operator is then right."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or is_in_torch_dispatch_mode():
        return True
    return not all([type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors])


def _tell_flops(package: Package) -> None:
    """Tells torch's counters of floating-point operations that are active what a rank computes, in products of its
    queries and all ranks' keys, of which each has as many: the similarities in forward, and in backward again; with the
    latter those that gradients need. A triangle has half of the similarities.
    The counters' module is not imported here: it imports Triton, in 0.5 s."""
    operators = package.operators

    def counted(q: Tensor, k: Tensor, ranks: int, gradients: int) -> int:
        similarities = 1 / (1 + package.traits.triangle)
        return int(2 * (similarities + sum(products(gradients))) * q.numel() * k.shape[0] * ranks)

    def forward(*inputs: Any, **_: Any) -> int:
        (q, k), group = inputs[:2], find_group(inputs[_GIVEN])
        ranks = 1 if group is None else group.size
        return counted(q, k, ranks, inputs[-1] if package.at_once(ranks) else 0)

    def backward(upstream: Any, *inputs: Any, **_: Any) -> int:
        (q, k), saved = inputs[:2], Saved(*inputs[_GIVEN : -len(_NAMED) - 1])
        ranks = max(1, saved.layout.shape[0])
        return 0 if package.at_once(ranks) else counted(q, k, ranks, inputs[-1])

    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", {})
        registry[operators.forward], registry[operators.backward] = forward, backward


def register(package: Package) -> Any:
    """The operators of a package, registered under a name of their own, with the schemas above.

    `forward` is differentiable once in q, k, scale, bias and vectors. `refuse` raises, when a graph runs, the error
    that its trace has found in the arguments.
    """
    statistics, name = package.schedule.STATISTICS_DTYPE, f"infcl_{package.digest[:16]}"
    own = package.traits.vectors
    names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(2)))
    namespace = next(free for free in names if not hasattr(getattr(torch.ops, free), "forward"))
    operators = getattr(torch.ops, namespace)

    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *given, gradients = inputs
        call = Call(*(*given[:_GIVEN], _options(given[_GIVEN:])))
        loss, saved = replay.unrecorded_forward(package, cast(package, call), gradients)
        return (loss, *saved)

    def backward(*inputs: Any) -> tuple[Tensor, ...]:
        upstream, *rest, gradients = inputs
        q, k, saved = rest[0], rest[1], Saved(*rest[_GIVEN : -len(_NAMED)])
        call = _of_backward(package, Call(*(*rest[:_GIVEN], _options(rest[-len(_NAMED) :]))), saved)
        found = engine.backward(package, call, saved, upstream, gradients)
        dtypes = (q.dtype, k.dtype, *[statistics] * (len(found) - 2))
        results = zip(found, dtypes, strict=True)
        return tuple(q.new_empty(0, dtype=dtype) if x is None else x.to(dtype) for x, dtype in results)

    def forward_shapes(q: Tensor, k: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        group = find_group(inputs[_GIVEN - 2])
        ranks, place = (0, q.device) if group is None else (group.size, "cpu")
        sizes = torch.empty((ranks, 3), dtype=torch.int64, device=place)
        unrounded = Call(q, k, inputs[0], inputs[1]).cast(package).options.unrounded
        saved = engine.new_saved(package, q, k, sizes, inputs[-1] & ALL, unrounded)
        rows = q.shape[:1] if inputs[_GIVEN] == "none" else ()
        return (q.new_empty(rows, dtype=statistics), *saved)

    def backward_shapes(upstream: Tensor, q: Tensor, k: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        of_queries, of_keys, of_scalars = (inputs[-1] & bits for bits in (QUERIES, KEYS, SCALARS))
        dq, dk = q.new_empty(q.shape if of_queries else (0,)), k.new_empty(k.shape if of_keys else (0,))
        scalars = (q.new_empty(() if of_scalars else (0,), dtype=statistics) for _ in range(2))
        vectors = [q.new_empty((len(own), q.shape[0]), dtype=statistics)] * bool(own)
        return (dq, dk, *scalars, *vectors)

    def refuse_arguments(error: str, message: str, group_name: str) -> Tensor:
        unknown: list[Any] = [*[None] * _GIVEN, Options(group_name)]
        agreement.announce_rejection(package, Call(*unknown))
        raise {"TypeError": TypeError, "ValueError": ValueError}[error](message)

    # Not `torch.library.custom_op`: it checks every result for aliases, 1.4 ms per call in torch 2.11.
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    for name, schema, implementation, shapes in (
        ("forward", _FORWARD, forward, forward_shapes),
        ("backward", _BACKWARD + (", Tensor dvectors)" if own else ")"), backward, backward_shapes),
        ("refuse", _REFUSE, refuse_arguments, lambda *_: torch.empty((), dtype=statistics)),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", shapes, lib=library)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _TransformedLoss.setup_context(ctx, (*inputs[:_GIVEN], inputs[_GIVEN:-1], package, inputs[-1], ()), output)

    def differentiate(ctx: Any, upstream: Tensor | None, *unused: object) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # first: raises torch's own error for a second backward without retain_graph
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        needed = sum(int(need) << bit for bit, need in enumerate(ctx.needs_input_grad[:5]))
        gradients = ctx.gradients | needed  # a graph that was traced without gradients has none
        return _wanted(ctx, operators.backward(upstream, *tensors, *ctx.options, gradients))

    def refuse(ctx: Any, *unused: object) -> None:
        raise _twice(package.name)

    torch.library.register_autograd(f"{namespace}::forward", differentiate, setup_context=save, lib=library)
    torch.library.register_autograd(f"{namespace}::backward", refuse, lib=library)
    return operators
