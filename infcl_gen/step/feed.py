"""Micro-batches on the device: slices of what is there already, or copies from the host that run ahead of the work."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from infcl_gen.errors import InputError
from infcl_gen.inputs.problem import MAX_BATCH
from infcl_gen.inputs.text import check_integer, show
from infcl_gen.step.plan import MicroBatch

AHEAD = 1  # micro-batches that are on their way while one is computed


class Samples:
    """An input whose samples are made when their turn comes: `make(rows)` gives those of a slice, on the host or the
    device.

    Cached samples are made twice, and have to be the same. `make` runs in a thread of its own, one micro-batch ahead;
    it draws from no generator that towers draw from. Raises InputError for what is no count, or no function.
    """

    def __init__(self, count: int, make: Callable[[slice], Any]) -> None:
        if not callable(make):
            raise InputError(f"Samples: expected a function of a slice, got {show(make)}")
        integral = isinstance(count, numbers.Integral) and not isinstance(count, bool)
        self.count, self.make = check_integer("Samples", int(count) if integral else count, 0, MAX_BATCH), make

    @classmethod
    def of(
        cls,
        dataset: Any,
        indices: Sequence[int],
        place: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Samples:
        """Those of a map-style data set; `place`: which element of a sample, where it is a tuple."""
        joined = collate or torch.utils.data.default_collate

        def make(rows: slice) -> Any:
            samples = [dataset[int(index)] for index in indices[rows]]
            return joined(samples if place is None else [sample[place] for sample in samples])

        return cls(len(indices), make)


class Ragged(Samples):
    """Sequences of various lengths, (tokens, ...) each, as one input. The longest come first, so that a micro-batch is
    padded to its own longest alone; a micro-batch of shorter ones holds more of them.

    `collate` makes an input of some of them: by default zeros are put behind the shorter ones, (samples, tokens, ...).
    """

    def __init__(self, sequences: Sequence[Tensor], collate: Callable[[list[Tensor]], Any] | None = None) -> None:
        joined = collate or functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        self.order = lengths.argsort(descending=True, stable=True)  # places of the sorted ones among all
        self.lengths: list[int] = lengths[self.order].clamp(min=1).tolist()
        self._sequences, self._joined = sequences, joined
        super().__init__(len(sequences), self._sorted)

    def _sorted(self, rows: slice) -> Any:
        return self._joined([self._sequences[int(place)] for place in self.order[rows]])

    def longest(self, count: int) -> Any:
        """An input of so many samples, all as long as the longest."""
        return self._joined([self._sequences[int(self.order[0])]] * count)


def gathered(batches: Iterator[Any], towers: int, samples: int) -> list[Any]:
    """One input for each tower from micro-batches, tuples of inputs on the host, until there are so many samples.

    Raises InputError where a micro-batch is no such tuple, or holds more than are left.
    """
    whole: list[Tensor] = []
    form, start = None, 0
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != towers:
            raise InputError(f"inputs: a micro-batch of {type(batch).__name__}; expected a tuple of {towers} inputs")
        count = rows_of(batch, "inputs: a micro-batch")
        if start + count > samples:
            raise InputError(
                f"inputs: a micro-batch of {count} after {start} samples; the step is planned for {samples}"
            )
        leaves, form = pytree.tree_flatten(list(batch))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise InputError("inputs: micro-batches of an iterator hold tensors alone; give whole inputs, or Samples")
        whole = whole or [leaf.new_empty(samples, *leaf.shape[1:]) for leaf in leaves]
        for place, leaf in zip(whole, leaves, strict=True):
            place[start : start + count] = leaf
        start += count
        if start == samples:
            break
    if form is None:
        raise InputError("inputs: the iterator gave no micro-batch")
    found: list[Any] = pytree.tree_unflatten([place[:start] for place in whole], form)
    return found


def rows_of(tree: Any, what: str) -> int:
    """The samples of an input: the first size of each of its tensors. Raises InputError where these differ."""
    if isinstance(tree, Samples):
        return tree.count
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        found = f"tensors of {', '.join(map(str, sorted(sizes)))} rows" if sizes else "no tensor with rows"
        raise InputError(f"{what}: has {found}; each of its tensors has one row for each sample")
    return int(sizes.pop())


def form_of(tree: Any) -> Any:
    """The structure of an input; None where it is not there yet."""
    return None if isinstance(tree, Samples) else pytree.tree_structure(tree)


def form_text(form: Any) -> str:
    return str(pytree.tree_unflatten(["tensor"] * form.num_leaves, form)).replace("'tensor'", "tensor")


def bytes_of(tree: Any) -> int:
    """The bytes of the tensors of an input; of sequences, those of the longest."""
    if isinstance(tree, Ragged):
        return tree.count * bytes_of(tree.longest(1))
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def part_of(tree: Any, rows: slice | Tensor) -> Any:
    """These rows of an input; what is no tensor with rows is passed as it is."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Samples):
            return leaf.make(rows)  # type: ignore[arg-type]
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return pytree.tree_map(part, tree)


def moved(tree: Any, device: torch.device) -> Any:
    """The input on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() else leaf, tree)


def on_host(trees: Sequence[Any], device: torch.device) -> bool:
    """Whether inputs have to be copied to the device."""
    leaves = [leaf for leaf in pytree.tree_leaves(list(trees)) if not isinstance(leaf, Tensor) or leaf.dim()]
    here = [isinstance(leaf, Samples) or (isinstance(leaf, Tensor) and leaf.device.type == "cpu") for leaf in leaves]
    return device.type != "cpu" and any(here)


class Feed:
    """The inputs of a step, one for each tower, on `device` when their turn comes.

    What has to be made or copied is, by the thread of the staging buffers: host tensors that are not pinned go
    through pinned ones, two for each, which are allocated once.
    """

    def __init__(self, inputs: Sequence[Any], device: torch.device, staging: StagingBuffers) -> None:
        self._inputs, self._device, self._staging = inputs, device, staging

    def stream(self, passes: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Each pass with its input on the device; AHEAD further ones are made and copied meanwhile."""
        waiting: list[tuple[MicroBatch, Callable[[], Any]]] = []
        for each in passes:
            waiting.append((each, self._started(each)))
            if len(waiting) > AHEAD:
                first, arrived = waiting.pop(0)
                yield first, arrived()
        for first, arrived in waiting:
            yield first, arrived()

    def _started(self, each: MicroBatch) -> Callable[[], Any]:
        given = self._inputs[each.tower]
        if not isinstance(given, Samples) and not on_host([given], self._device):
            part = part_of(given, each.rows)
            return lambda: part
        sent = self._staging.thread.submit(self._sent, each)

        def arrived() -> Any:
            leaves, form, copied = sent.result()
            if copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)
                for leaf in leaves:
                    if isinstance(leaf, Tensor) and leaf.is_cuda:
                        leaf.record_stream(current)
            return pytree.tree_unflatten(leaves, form)

        return arrived

    def _sent(self, each: MicroBatch) -> tuple[list[Any], Any, torch.cuda.Event | None]:
        """The leaves of an input on the device, and the end of their copies."""
        leaves, form = pytree.tree_flatten(part_of(self._inputs[each.tower], each.rows))
        stream = self._staging.stream
        if stream is None:
            return leaves, form, None
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            moved = [self._moved(leaf, (each.tower, place)) for place, leaf in enumerate(leaves)]
            return moved, form, stream.record_event()

    def _moved(self, leaf: Any, place: tuple[int, int]) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or not leaf.dim():
            return leaf
        if leaf.is_pinned():
            return leaf.to(self._device, non_blocking=True)
        return self._staging.sent(leaf, place, self._device)


class StagingBuffers:
    """Pinned host memory for micro-batches on their way, by input, which grows to the largest one and stays; and the
    thread that fills it."""

    def __init__(self, device: torch.device) -> None:
        self.thread = ThreadPoolExecutor(1, "infcl-feed")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: dict[tuple[int, int], list[tuple[Tensor, torch.cuda.Event]]] = {}

    def sent(self, leaf: Tensor, place: tuple[int, int], device: torch.device) -> Tensor:
        """`leaf` on the device, by a copy on the current stream. It is filled again once its last copy is done."""
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
