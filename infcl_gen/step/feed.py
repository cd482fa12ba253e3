"""Micro-batches on the device: slices of what is there already, or copies from the host that run ahead of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from infcl_gen.errors import InputError

AHEAD = 1  # micro-batches that are on their way while one is computed


def rows_of(tree: Any, what: str) -> int:
    """The samples of an input: the first size of each of its tensors. Raises InputError where these differ."""
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        found = f"tensors of {', '.join(map(str, sorted(sizes)))} rows" if sizes else "no tensor with rows"
        raise InputError(f"{what}: has {found}; each of its tensors has one row for each sample")
    return int(sizes.pop())


def bytes_of(tree: Any) -> int:
    """The bytes of the tensors of an input."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def part_of(tree: Any, rows: slice) -> Any:
    """These rows of an input; what is no tensor with rows is passed as it is."""
    return pytree.tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf, tree)


def moved(tree: Any, device: torch.device) -> Any:
    """The input on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() else leaf, tree)


def on_host(trees: Sequence[Any], device: torch.device) -> bool:
    """Whether inputs have to be copied to the device."""
    leaves = [leaf for leaf in pytree.tree_leaves(list(trees)) if isinstance(leaf, Tensor) and leaf.dim()]
    return device.type != "cpu" and any(leaf.device.type == "cpu" for leaf in leaves)


class Feed:
    """The inputs of a step, one for each tower, on `device` when their turn comes.

    Host tensors that are not pinned go through pinned slabs, two for each input, which are allocated once and belong to
    the feed's owner.
    """

    def __init__(self, inputs: Sequence[Any], device: torch.device, slabs: Slabs) -> None:
        self._inputs, self._device, self._slabs = inputs, device, slabs

    def stream(self, passes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Each `Pass` with its input on the device; AHEAD further ones are being copied meanwhile."""
        waiting: list[tuple[Any, Callable[[], Any]]] = []
        for each in passes:
            waiting.append((each, self._sent(each)))
            if len(waiting) > AHEAD:
                first, arrived = waiting.pop(0)
                yield first, arrived()
        for first, arrived in waiting:
            yield first, arrived()

    def _sent(self, each: Any) -> Callable[[], Any]:
        part = part_of(self._inputs[each.tower], each.rows)
        if self._device.type != "cuda":
            return lambda: part
        leaves, form = pytree.tree_flatten(part)
        stream = self._slabs.stream(self._device)
        with torch.cuda.stream(stream):
            moved = [self._moved(leaf, (each.tower, place)) for place, leaf in enumerate(leaves)]
            copied = stream.record_event()

        def arrived() -> Any:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for before, after in zip(leaves, moved, strict=True):
                if after is not before:
                    after.record_stream(current)
            return pytree.tree_unflatten(moved, form)

        return arrived

    def _moved(self, leaf: Any, place: tuple[int, int]) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or not leaf.dim():
            return leaf
        if leaf.is_pinned():
            return leaf.to(self._device, non_blocking=True)
        return self._slabs.sent(leaf, place, self._device)


class Slabs:
    """Pinned host memory for micro-batches on their way, by input; it grows to the largest one and stays."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._held: dict[tuple[int, int], list[tuple[Tensor, torch.cuda.Event]]] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def sent(self, leaf: Tensor, place: tuple[int, int], device: torch.device) -> Tensor:
        """`leaf` on the device, by a copy on the current stream. A slab is filled again once its last copy is done."""
        held = self._held.setdefault(place, [])
        memory, done = held.pop(0) if len(held) > AHEAD else (torch.empty(0, dtype=torch.uint8), torch.cuda.Event())
        done.synchronize()
        if memory.numel() < leaf.nbytes:
            memory = torch.empty(leaf.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned = memory[: leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        pinned.copy_(leaf)
        moved = pinned.to(device, non_blocking=True)
        done.record()
        held.append((memory, done))
        return moved
