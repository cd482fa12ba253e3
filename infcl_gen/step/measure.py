"""Measures what towers cost, on the device and in the process that will train: seconds, and nothing is changed.

Micro-batches double in size until larger ones are no faster or would not fit; the last one nearly fills the memory.
Parameters, gradients, buffers and random numbers are afterwards what they were before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from infcl_gen.errors import InputError
from infcl_gen.hardware.detection import detect
from infcl_gen.inputs.problem import TORCH_DTYPES
from infcl_gen.step.account import LossCosts
from infcl_gen.step.blocks import recomputed
from infcl_gen.step.costs import PassCosts, StepCosts, TowerCosts
from infcl_gen.step.executor import Model, Tower, one_number
from infcl_gen.step.feed import Ragged, bytes_of, moved, part_of, rows_of
from infcl_gen.step.gradients import unreduced
from infcl_gen.step.state import (
    RandomState,
    autocast_in,
    buffers_of,
    changed_buffers,
    parameters_of,
    restore_buffers,
    sources_of,
)
from infcl_gen.verification.memory import PeakMeter, give_workspaces_back

SMALLEST = 16  # samples of the first micro-batch: 32 of ViT-B/16 take no longer on an H200, 5 ms
REPEATS = 3  # of a timed pass, whose median counts
WORTH_GROWING = 0.98  # a larger micro-batch is tried if the last one took less than this of the time per sample before
MOST_MEMORY = 0.9  # that the next micro-batch may take, as predicted from the last one
COPY_BYTES = 64 << 20  # of a timed copy: its start takes 10 us, its way at 50 GB/s 1.3 ms
LARGEST_LOSS = 2048  # samples for which a loss of the user is measured; logits take 16 MiB in fp32


class Limits(NamedTuple):
    """How far to measure.

    micro_batch   samples of the largest one
    memory_bytes  that the process may allocate on the device
    agree         what this rank decides -> what all ranks do: they pass sharded towers together
    """

    micro_batch: int
    memory_bytes: int
    agree: Callable[[bool], bool]


DTYPE_NAMES = {getattr(torch, word): flag for flag, word in TORCH_DTYPES.items()}


def measure(
    model: Model, example: Sequence[Any], names: Sequence[str], limits: Limits, probe_of: type[Probe] | None = None
) -> StepCosts:
    """The costs of the model's towers; `example` has an input for each, whose samples are repeated as needed."""
    probe_of = probe_of or Probe
    with unchanged(model.modules, model.device, model.generators), autocast_in(model.device, model.autocast):
        found = [
            _tower(model, tower, given, name, limits, probe_of)
            for tower, given, name in zip(model.towers, example, names, strict=True)
        ]
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # segments of the largest micro-batches: what a step keeps would split them
    parameters, buffers = parameters_of(model.modules), buffers_of(model.modules)
    trained = [each for each in parameters if each.requires_grad]
    features = model.towers[0].features
    return StepCosts(
        device=probe_of.profile(model.device),
        towers=tuple(costs for costs, _ in found),
        dim=math.prod(features.shape[1:]),
        dtype=DTYPE_NAMES[features.dtype],
        parameter_bytes=sum(each.nbytes for each in (*parameters, *buffers)),  # of a DTensor: all shards
        gradient_bytes=sum(each.nbytes for each in trained),
        cast_bytes=sum(cast for _, cast in found),
        workspace_bytes=_workspace_bytes(model.device),
        state_bytes=sum(each.nbytes for each in buffers),
        random_bytes=model.random().bytes_on(model.device),
        host_to_device_gbs=_copy_rate(model.device),
        versions={"torch": importlib.metadata.version("torch")},
    )


def _tower(
    model: Model, tower: Tower, example: Any, name: str, limits: Limits, probe_of: type[Probe]
) -> tuple[TowerCosts, int]:
    """The costs of one tower, and the bytes of its weights that autocast keeps."""
    rows = rows_of(example, f"example: {name}")

    def given(size: int) -> Any:
        some = example.longest(size) if isinstance(example, Ragged) else part_of(example, torch.arange(size) % rows)
        return moved(some, model.device)

    probe = probe_of(model, tower, given, limits)
    cast_bytes, frozen = probe.cast_bytes()
    state_bytes = 0 if frozen else probe.state_bytes()
    with torch.no_grad():
        without_graph = probe.costs(backward=False)
    torch.clear_autocast_cache()
    kept = checkpointed = None
    if not frozen:
        kept = probe.costs(backward=True)
        if tower.blocks:
            with recomputed(tower.blocks, probe.state):
                checkpointed = probe.costs(backward=True)
    per_sample = tower.features.element_size() * math.prod(tower.features.shape[1:])
    tokens = example.lengths[0] if isinstance(example, Ragged) else 0
    input_bytes = -(-bytes_of(example) // rows)
    passes = (without_graph, kept, checkpointed)
    return TowerCosts(name, per_sample, input_bytes, *passes, tokens, state_bytes), cast_bytes


@dataclasses.dataclass
class Probe:
    """Runs micro-batches of a tower; `given(size)` makes an input."""

    model: Model
    tower: Tower
    given: Callable[[int], Any]
    limits: Limits
    _random: RandomState | None = None

    @classmethod
    def profile(cls, device: torch.device) -> str:
        """The name of the device's profile."""
        return detect("auto" if device.type == "cuda" else "cpu").name

    def cast_bytes(self) -> tuple[int, bool]:
        """What stays of the first pass but not of the second, and whether features have no gradient."""
        kept, outputs = [], []
        for _ in range(2):
            with self._meter() as meter:
                outputs.append(self.tower.run(self.given(min(SMALLEST, self.limits.micro_batch))))
            kept.append(meter.kept_bytes)
        return max(0, kept[0] - kept[1]), not outputs[0].requires_grad

    def state(self) -> RandomState:
        """Of all generators; it shares with the one before what did not change."""
        self._random = self.model.random(self._random)
        return self._random

    def state_bytes(self) -> int:
        """What one pass changes: buffers of the tower, and random states."""
        random = self.state()
        with torch.no_grad(), changed_buffers(buffers_of(self.tower.modules)) as changed:
            self.tower.run(self.given(min(SMALLEST, self.limits.micro_batch)))
        drawn = self.state().bytes_on(self.model.device, random)
        return sum(value.nbytes for _, value in changed) + drawn

    def costs(self, backward: bool) -> PassCosts:
        """The costs of micro-batches of SMALLEST samples, twice as many, and so on; where twice as many do not fit, of
        the most quarters more that do."""
        rows: list[tuple[int, float, int, int, float, int]] = []
        size, limit, agree = min(SMALLEST, self.limits.micro_batch), self.limits.micro_batch, self.limits.agree
        doubled = self._measured(rows, size, backward)
        while doubled and size < limit and agree(self.worth_growing(rows)):
            wanted = [min(2 * size, limit), *(size * quarters // 4 for quarters in (7, 6, 5))]
            candidates = (each for each in wanted if size < each <= limit)
            fitting = (
                each for each in candidates if agree(self.fits(rows, each)) and self._measured(rows, each, backward)
            )
            size = next(fitting, size)
            doubled = size == wanted[0]
        if len(rows) == 1 and rows[0][0] > 1:  # what a pass takes whatever its size shows between two sizes
            rows.insert(0, (rows[0][0] // 2, *self.row(rows[0][0] // 2, backward)))
        if not rows:
            raise InputError(f"memory: a micro-batch of {min(SMALLEST, self.limits.micro_batch)} samples does not fit")
        sizes, forward_s, forward_peak, kept, backward_s, backward_peak = zip(*rows, strict=True)
        behind = (backward_s, backward_peak) if backward else ((), ())
        return PassCosts(sizes, forward_s, forward_peak, kept, *behind)

    def _measured(self, rows: list[Any], size: int, backward: bool) -> bool:
        """Whether a micro-batch fits on all ranks; then `rows` has its costs."""
        found = []
        with contextlib.suppress(torch.OutOfMemoryError):
            found.append((size, *self.row(size, backward)))
        fits = self.limits.agree(bool(found))
        rows += found if fits else []
        return fits

    def fits(self, rows: list[Any], size: int) -> bool:
        """Whether a micro-batch is predicted to fit, from the last one."""
        used = torch.cuda.memory_allocated(self.model.device) if self.model.device.type == "cuda" else 0
        last, _, forward_peak, _, _, backward_peak = rows[-1]
        return bool(used + max(forward_peak, backward_peak) * size / last <= MOST_MEMORY * self.limits.memory_bytes)

    def worth_growing(self, rows: list[Any]) -> bool:
        rates = [(row[1] + row[4]) / row[0] for row in rows]
        return len(rates) < 3 or min(rates[-2:]) < WORTH_GROWING * min(rates[:-2])

    def row(self, size: int, backward: bool) -> tuple[float, int, int, float, int]:
        """(seconds of forward, its peak, what it keeps, seconds of backward, its peak) of one micro-batch."""
        run = self.tower.run
        self._times(size, backward)  # allocates gradients, chooses kernels
        self._cast_weights()
        with self._meter() as forward:
            output = run(self.given(size))
        backward_peak = 0
        if backward:
            gradient = torch.ones_like(output)
            with self._meter() as behind:
                torch.autograd.backward(output, gradient)
            backward_peak = forward.kept_bytes + behind.peak_bytes
        del output
        forward_s, backward_s = zip(*(self._times(size, backward) for _ in range(REPEATS)), strict=True)
        return (
            statistics.median(forward_s), forward.peak_bytes, forward.kept_bytes, statistics.median(backward_s),
            backward_peak,
        )  # fmt: skip

    def _cast_weights(self) -> None:
        """Fill autocast's cache, which blocks that are computed again clear in backward: in a step, micro-batches share
        it, and `cast_bytes` counts it once."""
        self.tower.run(self.given(min(SMALLEST, self.limits.micro_batch)))

    def _meter(self) -> PeakMeter:
        """Workspaces of the matrix library stay: they count once, and not for each micro-batch."""
        return PeakMeter(self.model.device, workspaces=False)

    def _times(self, size: int, backward: bool) -> tuple[float, float]:
        given = self.given(size)
        start = _now(self.model.device)
        output = self.tower.run(given)
        middle = _now(self.model.device)
        if backward:
            torch.autograd.backward(output, torch.ones_like(output))
        return middle - start, _now(self.model.device) - middle if backward else 0.0


def _now(device: torch.device) -> float:
    """Seconds of a clock, once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def unchanged(modules: Sequence[nn.Module], device: torch.device, generators: Sequence[Any]) -> Iterator[None]:
    """Gradients, buffers and random numbers are afterwards what they were; no wrapper reduces gradients inside."""
    parameters, buffers = parameters_of(modules), [(each, each.clone()) for each in buffers_of(modules)]
    gradients, random = [each.grad for each in parameters], RandomState(sources_of(device, generators))
    try:
        for each in parameters:
            each.grad = None
        with unreduced(modules):
            yield
    finally:
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient
        restore_buffers(buffers)
        random.restore()


def _workspace_bytes(device: torch.device) -> int:
    """What the matrix library keeps now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    give_workspaces_back()
    return before - torch.cuda.memory_allocated(device)


def _copy_rate(device: torch.device) -> float:
    """1e9 bytes a second from pinned host memory to the device; 0 on the host itself."""
    if device.type != "cuda":
        return 0.0
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    host.to(device)
    times = []
    for _ in range(REPEATS):
        start = _now(device)
        host.to(device)
        times.append(_now(device) - start)
    return COPY_BYTES / statistics.median(times) / 1e9


class MeasuredLoss:
    """`Losses` of the user's own: measured on random features of three batches, and on parabolas through them."""

    def __init__(self, model: Model, samples: int | None) -> None:
        largest = min(LARGEST_LOSS, samples or LARGEST_LOSS)
        self._sizes = sorted({max(1, largest // 4), max(1, largest // 2), largest})
        self._found = [self._row(model, size) for size in self._sizes]

    def smallest_bytes(self, samples: int) -> int:
        return math.ceil(self._at(samples, 0))

    def within_budgets(self, samples: int) -> list[LossCosts]:
        return [LossCosts(self.smallest_bytes(samples), self._at(samples, 1))]

    def _at(self, samples: int, place: int) -> float:
        """By Lagrange's formula: a loss takes bytes and seconds with the square of its batch, at most."""
        found = 0.0
        for size, row in zip(self._sizes, self._found, strict=True):
            others = [other for other in self._sizes if other != size]
            found += row[place] * math.prod((samples - other) / (size - other) for other in others)
        return max(found, max(row[place] for row in self._found) if samples >= self._sizes[-1] else 0.0)

    def _row(self, model: Model, size: int) -> tuple[int, float]:
        def run() -> None:
            numbers = [each() if callable(each) else each for each in (model.scale, model.bias) if each is not None]
            torch.autograd.grad(one_number(model.loss(*features, *numbers)), features, allow_unused=True)

        like = [tower.features.new_zeros(1, *tower.features.shape[1:]) for tower in model.towers]
        with unchanged(model.modules, model.device, model.generators), autocast_in(model.device, model.autocast):
            features = [torch.randn_like(x.expand(size, *x.shape[1:])).requires_grad_() for x in like]
            run()
            with PeakMeter(model.device) as meter:
                run()
            start = _now(model.device)
            run()
            return meter.peak_bytes, _now(model.device) - start
