"""A training step that follows a plan: exact gradients of a batch whose towers' activations do not fit at once.

features   cached micro-batches pass the towers without a graph, then the others with theirs: those whose graphs wait on
           the host, then those whose graphs stay
loss       of all features; its gradient with respect to each
backward   of these graphs, the last one first, each freed behind its use; what waits on the host comes back ahead
           then each cached micro-batch again: forward with a graph, backward
ranks      gradients are reduced once
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infcl_gen.errors import InputError
from infcl_gen.inputs.text import show
from infcl_gen.step import state
from infcl_gen.step.blocks import recomputed
from infcl_gen.step.feed import Feed, Ragged, StagingBuffers, form_of, form_text, gathered, rows_of
from infcl_gen.step.gradients import GradientSync, inside, is_sharded, leaves_of
from infcl_gen.step.offload import HostMemory, OffloadedGraphs
from infcl_gen.step.plan import DEALT, MicroBatch, TowerPlan
from infcl_gen.step.state import RandomState

Number = float | Tensor | Callable[[], Tensor]


class Tower(NamedTuple):
    """A callable from an input to features (M, ...), and what it runs.

    features  none, (0, ...): their shape, dtype and device
    blocks    modules that are computed again where a micro-batch is checkpointed
    form      the structure of its inputs, or None for any
    """

    run: Callable[[Any], Tensor]
    features: Tensor
    modules: tuple[nn.Module, ...] = ()
    blocks: tuple[nn.Module, ...] = ()
    form: Any = None


class Model(NamedTuple):
    """Everything of a training step but its plan and its inputs.

    loss        (*features, scale) -> this rank's loss; (*features, scale, bias) where there is a bias; until a step is
                made of a plan the name of a built-in one
    autocast    the dtype that towers and loss compute in, or None for what is set around the step
    generators  further ones that the towers draw from
    value       what a step returns of the loss: its value over ranks
    group       the process group of the ranks; None is the default one, where there is one
    """

    towers: tuple[Tower, ...]
    loss: Any
    scale: Number
    bias: Number | None
    device: torch.device
    autocast: torch.dtype | None
    generators: tuple[Any, ...]
    value: Callable[[Tensor], Tensor]
    group: Any = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(module for tower in self.towers for module in tower.modules))

    def random(self, before: RandomState | None = None) -> RandomState:
        return RandomState(state.sources_of(self.device, self.generators), before)


class UnrepeatableError(RuntimeError):
    """A second pass of a micro-batch gave other features than the first."""


# What both passes of a micro-batch begin with: random numbers, and the buffers that it changes with their values.
PassState = tuple[RandomState, list[tuple[Tensor, Tensor]]]


@contextlib.contextmanager
def bar(passes: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; what it gives is called behind each pass."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training step", total=passes)
        yield lambda: progress.advance(task)


class Step(abc.ABC):
    """What is common to all steps: what they take and refuse, and what is around their passes.

    names   of what a step takes for each of at most `samples` samples, in the structures `forms`; None: any
    """

    def __init__(
        self, names: Sequence[str], forms: Sequence[Any], samples: int, model: Model, progress: bool = False
    ) -> None:
        self.names, self.forms, self.samples, self.model, self.progress = names, forms, samples, model, progress
        self.staging = StagingBuffers(model.device)
        self._sharded = bool(inside(model.modules, is_sharded))
        self._trained = self._trainable()

    def __call__(self, *inputs: Any, scaler: Any = None) -> Tensor:
        if len(inputs) == 1 and isinstance(inputs[0], Iterator):
            inputs = tuple(gathered(inputs[0], len(self.names), self.samples))
        rows = self._rows(inputs)
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise InputError(f"scaler: {show(scaler)} scales no loss; give a torch.amp.GradScaler")
        if self._trainable() != self._trained:
            raise InputError("towers: parameters were frozen or unfrozen since the step was planned; plan it again")
        if torch.is_inference_mode_enabled():
            raise InputError("a training step has gradients: call it outside torch.inference_mode()")
        with torch.enable_grad(), state.autocast_in(self.model.device, self.model.autocast):
            return self._run(inputs, rows, scaler)

    @abc.abstractmethod
    def _run(self, inputs: Sequence[Any], rows: int, scaler: Any) -> Tensor: ...

    def bar(self, passes: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return bar(passes) if self.progress else contextlib.nullcontext(lambda: None)

    def check_ranks(self, passes: Sequence[MicroBatch]) -> None:
        """Raises InputError on all ranks where they pass a sharded tower differently often: each pass gathers its
        parameters from all of them, and would wait for ever."""
        if not self._sharded:
            return
        kinds = list(itertools.product(range(len(self.names)), DEALT))
        counts = Counter((each.tower, each.treatment) for each in passes)
        mine = [counts[kind] for kind in kinds]
        found = torch.tensor([mine, [-count for count in mine]], device=self.model.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.model.group)
        for (tower, treatment), most, least in zip(kinds, *found.tolist(), strict=True):
            if most != -least:
                raise InputError(
                    f"inputs: ranks pass {self.names[tower]} in {-least} to {most} {treatment} micro-batches; under "
                    "FSDP2 all must pass equally many; give all ranks equally many samples"
                )

    def _rows(self, inputs: Sequence[Any]) -> int:
        """The samples of a step, of which each input has as many."""
        if len(inputs) != len(self.names):
            names = ", ".join(self.names)
            raise InputError(f"inputs: {len(inputs)} were given; the step takes {len(self.names)}: step({names})")
        for given, form, name in zip(inputs, self.forms, self.names, strict=True):
            found = form_of(given)
            if None not in (form, found) and found != form:
                raise InputError(f"inputs: {name} got {form_text(found)}; the step is planned for {form_text(form)}")
        counts = [rows_of(given, f"inputs: {name}") for given, name in zip(inputs, self.names, strict=True)]
        if len({*counts}) > 1:
            have = " and ".join(map(str, counts))
            raise InputError(f"inputs: {' and '.join(self.names)} have {have} samples; give equally many")
        if counts[0] > self.samples:
            raise InputError(f"inputs: {counts[0]} samples were given; the step is planned for {self.samples}")
        return counts[0]

    def _trainable(self) -> list[bool]:
        return [each.requires_grad for each in state.parameters_of(self.model.modules)]


class TrainingStep(Step):
    """One exact step: `loss = step(*inputs)`, an input for each tower. Gradients are in `.grad`; the loss is detached.

    An input may be `Samples`, which are made when their turn comes. `step(iterator)` takes micro-batches, tuples of
    inputs, until the planned samples are there, and keeps them on the host.

    The user's own clipping and optimiser follow. Gradients that are there already are added to. `scaler=`: the
    GradScaler that the loss is multiplied by before backward. A NaN in the loss is returned, and is in the gradients.

    After an error or an interrupt, `.grad` of every parameter is what it was before the step.

    Raises InputError for inputs that do not fit the plan, and UnrepeatableError where a second pass differs.
    """

    def __init__(self, plans: Sequence[TowerPlan], model: Model, progress: bool = False) -> None:
        forms = [tower.form for tower in model.towers]
        super().__init__([plan.name for plan in plans], forms, plans[0].samples, model, progress)
        self.plans = tuple(plans)
        self.host = HostMemory(model.device)
        self.repeats = False  # whether second passes were seen to give the features of the first

    def _run(self, inputs: Sequence[Any], rows: int, scaler: Any) -> Tensor:
        model = self.model
        scale, bias = (each() if callable(each) else each for each in (model.scale, model.bias))
        numbers = [leaf for each in (scale, bias) for leaf in leaves_of(each)]
        graphs = OffloadedGraphs(self.host, state.parameters_of(model.modules))
        with GradientSync(model.modules, numbers, model.group) as sync, graphs:
            run = _Run(self, inputs, rows, sync, graphs)
            self.check_ranks(run.micros)
            with self.bar(run.passes) as run.passed:
                loss = run.loss(scale, bias, scaler)
        return model.value(loss)


class _Run:
    """One call of a step."""

    passed: Callable[[], None]  # called behind each pass

    def __init__(
        self, step: TrainingStep, inputs: Sequence[Any], rows: int, sync: GradientSync, graphs: OffloadedGraphs
    ) -> None:
        self._step, self._model, self._plans, self._sync, self._graphs = step, step.model, step.plans, sync, graphs
        self._sorted = [given.order if isinstance(given, Ragged) else None for given in inputs]
        self.micros = [
            each
            for t, (plan, given) in enumerate(zip(self._plans, inputs, strict=True))
            for each in plan.passes(rows, t, _lengths(given, plan))
        ]
        trained = [micro for micro in self.micros if not self._plans[micro.tower].frozen]
        self.passes = len(self.micros) + len(trained)  # each forward that leaves features, and what ends in backward
        self._feed = Feed(inputs, self._model.device, step.staging)
        self._features = [tower.features.new_empty(rows, *tower.features.shape[1:]) for tower in self._model.towers]
        self._random: RandomState | None = None
        self._buffers = [state.buffers_of(tower.modules) for tower in self._model.towers]
        self._last: dict[nn.Module, MicroBatch] = {}  # of each module, the micro-batch whose backward is its last

    def loss(self, scale: Any, bias: Any, scaler: Any) -> Tensor:
        """The loss, detached, once all gradients are accumulated and reduced."""
        cached = {micro: begin for micro, begin in self._first_passes() if not self._plans[micro.tower].frozen}
        torch.clear_autocast_cache()  # weights that were cast without a graph
        kept = list(self._kept_passes())
        self._graphs.settle()
        leaves = [x.requires_grad_(not plan.frozen) for x, plan in zip(self._features, self._plans, strict=True)]
        loss = one_number(self._model.loss(*leaves, *(each for each in (scale, bias) if each is not None)))
        (loss if scaler is None else scaler.scale(loss)).backward()
        kept = [each for each in kept if leaves[each[0].tower].grad is not None]  # else the loss has no use for them
        cached = {micro: begin for micro, begin in cached.items() if leaves[micro.tower].grad is not None}
        order = [*(micro for micro, _ in reversed(kept)), *cached]
        self._last = {module: micro for micro in order for module in self._model.towers[micro.tower].modules}
        while kept:
            micro, output = kept.pop()
            for each in (micro, *(ahead for ahead, _ in kept[-1:])):
                self._graphs.fetch(each)
            self._backward(micro, output)
            self._graphs.free(micro)
            del output
        torch.clear_autocast_cache()
        if cached:
            self._second_passes(cached)
        self._sync.reduce()
        return loss.detach()

    def _first_passes(self) -> Iterator[tuple[MicroBatch, PassState]]:
        """Features of cached micro-batches, without a graph."""
        for micro, given in self._feed.stream(each for each in self.micros if each.treatment == "cached"):
            random = self._state()
            with torch.no_grad(), state.changed_buffers(self._buffers[micro.tower]) as changed:
                self._store(micro, self._model.towers[micro.tower].run(given))
            self._buffers[micro.tower] = [buffer for buffer, _ in changed]
            yield micro, (random, changed)

    def _kept_passes(self) -> Iterator[tuple[MicroBatch, Tensor]]:
        """The other micro-batches, with features and their graph."""
        micros = [each for each in self.micros if each.treatment != "cached"]
        micros.sort(key=lambda each: each.treatment != "offloaded")
        for micro, given in self._feed.stream(micros):
            tower, offloaded = self._model.towers[micro.tower], micro.treatment == "offloaded"
            blocks = tower.blocks if offloaded or micro.treatment == "checkpointed" else ()
            leaving = self._graphs.leaving(micro) if offloaded else contextlib.nullcontext()
            with recomputed(blocks, self._state), leaving:
                output = tower.run(given)
            self._store(micro, output)
            yield micro, output

    def _second_passes(self, cached: Mapping[MicroBatch, PassState]) -> None:
        """The graph of each cached micro-batch, from the random numbers and buffers of its first pass; backward."""
        random, changed = self._state(), {buffer for _, some in cached.values() for buffer, _ in some}
        after = [(buffer, buffer.clone()) for buffer in changed]
        differ: dict[MicroBatch, Tensor] = {}
        try:
            for micro, given in self._feed.stream(cached):
                first, buffers = cached[micro]
                first.restore()
                state.restore_buffers(buffers)
                output = self._model.towers[micro.tower].run(given)
                if not self._step.repeats:
                    differ[micro] = _differs(output.detach(), self._features[micro.tower].detach()[self._places(micro)])
                self._backward(micro, output)
                del output  # features that the next pass need not wait for
        finally:
            random.restore()
            state.restore_buffers(after)
        for micro, found in differ.items():
            if bool(found):
                raise UnrepeatableError(
                    f"{self._plans[micro.tower].name}: rows {micro.start} to {micro.stop} have other features "
                    "in their second pass than in their first; name the generators that the tower draws from "
                    "(generators=), or keep all graphs (treatments=('kept',))"
                )
        self._step.repeats = True

    def _backward(self, micro: MicroBatch, output: Tensor) -> None:
        gradient = self._features[micro.tower].grad
        assert gradient is not None
        last_of = [module for module, last in self._last.items() if last == micro]
        self._sync.backward(output, gradient[self._places(micro)], last_of)
        self.passed()

    def _state(self) -> RandomState:
        self._random = self._model.random(self._random)
        return self._random

    def _places(self, micro: MicroBatch) -> slice | Tensor:
        """Of the samples of a micro-batch among all."""
        order = self._sorted[micro.tower]
        return micro.rows if order is None else order[micro.rows].to(self._model.device)

    def _store(self, micro: MicroBatch, output: Any) -> None:
        whole, places = self._features[micro.tower], self._places(micro)
        here = whole[places]
        if not isinstance(output, Tensor) or output.shape != here.shape or output.dtype != here.dtype:
            kind = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            name, planned = self._plans[micro.tower].name, f"{here.dtype} {tuple(here.shape)}"
            raise InputError(f"{name}: gave {kind} for {len(here)} samples; the step is planned for {planned}")
        whole[places] = output.detach()
        self.passed()


def _lengths(given: Any, plan: TowerPlan) -> list[int] | None:
    """Tokens of the samples of an input, in descending order, where it has sequences."""
    if not isinstance(given, Ragged):
        return None
    if plan.tokens == 0:
        raise InputError(f"inputs: {plan.name} got sequences; the step is planned for samples of one length")
    if given.lengths and given.lengths[0] > plan.tokens:
        raise InputError(f"inputs: {plan.name} got {given.lengths[0]} tokens; the step is planned for {plan.tokens}")
    return given.lengths


def one_number(loss: Any) -> Tensor:
    """The loss. Raises InputError where it is no 0-dim tensor."""
    if not isinstance(loss, Tensor) or loss.dim():
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"loss: gave {what}; expected one number, a tensor (), such as the mean over samples")
    return loss


def _differs(again: Tensor, first: Tensor) -> Tensor:
    """Whether features differ by more than rounding explains in the dtype that they are computed in; 0-dim."""
    device = first.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else first.dtype
    error, size = (again - first).double().norm(), first.double().norm()
    return torch.gt(error, math.sqrt(torch.finfo(dtype).eps) * size)
