"""Gradients of a step: set aside while it runs, and reduced over ranks once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infcl_gen.step.account import BUCKET_BYTES
from infcl_gen.step.state import parameters_of


class GradientSync:
    """A context manager around the backward passes of a step over `modules`.

    Gradients begin as None, and those of before are added at the end; after an error they are what they were. No
    wrapper reduces gradients but as told: FSDP2 in the last pass of a module, so that most of its reductions run beside
    it; those of DDP, and of numbers that are in no module, are averaged by `reduce`.
    """

    def __init__(self, modules: Sequence[nn.Module], numbers: Iterable[Tensor], group: Any = None) -> None:
        self._modules, self._group = modules, group
        own = {each: None for each in parameters_of(modules) if each.requires_grad}
        self._numbers = [each for each in numbers if each not in own]
        self._parameters = [*own, *self._numbers]
        self._before: list[Tensor | None] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(unreduced(self._modules))
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for parameter, before in zip(self._parameters, self._before, strict=True):
            if kind is None and before is not None and parameter.grad is not None:
                before += parameter.grad
            if kind is not None or before is not None:
                parameter.grad = before
        self._stack.close()

    def backward(self, output: Tensor, gradient: Tensor, last_of: Iterable[nn.Module]) -> None:
        """Backward of one micro-batch, the last one of these modules."""
        ending = inside(last_of, is_sharded)
        _reduces(ending, True)
        torch.autograd.backward(output, gradient)
        _reduces(ending, False)

    def reduce(self) -> None:
        """Average over ranks what no wrapper reduces."""
        replicated = inside(self._modules, is_replicated)
        for module in replicated:
            average([each for each in module.parameters() if each.requires_grad], module.process_group)
        if replicated or inside(self._modules, is_sharded):
            average(self._numbers, replicated[0].process_group if replicated else self._group)


@contextmanager
def unreduced(modules: Iterable[nn.Module]) -> Iterator[None]:
    """No wrapper reduces gradients inside, unless it is told to; at the end there is none left that was not reduced."""
    modules = list(modules)
    sharded = inside(modules, is_sharded)
    with ExitStack() as stack:
        for module in inside(modules, is_replicated):
            stack.enter_context(module.no_sync())
        _reduces(sharded, False)
        try:
            yield
        finally:
            for module in sharded:  # after an error FSDP2 still holds whole parameters and gradients
                module.reshard()
                group = module._get_fsdp_state()._fsdp_param_group
                for parameter in group.fsdp_params if group else ():
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
            _reduces(sharded, True)


def inside(modules: Iterable[nn.Module], kind: Callable[[nn.Module], bool]) -> list[Any]:
    """The modules of a kind, these or within these."""
    return [each for each in dict.fromkeys(inner for module in modules for inner in module.modules()) if kind(each)]


def is_replicated(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _reduces(sharded: Iterable[Any], reduces: bool) -> None:
    for module in sharded:
        module.set_requires_gradient_sync(reduces, recurse=False)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was applied to the module."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def leaves_of(value: object) -> list[Tensor]:
    """The tensors without a history that a tensor was computed from and that get a gradient."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return []
    if value.grad_fn is None:
        return [value]
    found, seen, waiting = dict[Tensor, None](), {value.grad_fn}, [value.grad_fn]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if leaf is not None:
            found[leaf] = None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found)


@torch.no_grad()
def average(parameters: Sequence[Tensor], group: Any) -> None:
    """Each gradient becomes its mean over the ranks of the group; all ranks name the same parameters, in one order.

    A rank without a gradient that another has counts as zeros.
    """
    parameters = [each for each in parameters if not hasattr(each, "placements")]  # a DTensor's is reduced by autograd
    size = dist.get_world_size(group)
    if size == 1 or not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group)
    gradients = []
    for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        for gradient, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, together up to BUCKET_BYTES; a larger one is alone."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
