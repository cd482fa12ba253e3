"""`plan_step`: measures towers where they will train, plans their step, and binds the plan to them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from infcl_gen.emission import load_cached
from infcl_gen.errors import InputError, in_python_words
from infcl_gen.inputs.text import parse_bytes, parse_count
from infcl_gen.lazy import global_value
from infcl_gen.runtime.api import options_of
from infcl_gen.runtime.group import find_group
from infcl_gen.step import measure as measuring
from infcl_gen.step.blocks import blocks_of
from infcl_gen.step.costs import StepCosts, costs_of, costs_text, read_costs
from infcl_gen.step.executor import Model, Number, Tower, TrainingStep
from infcl_gen.step.feed import moved, on_host, part_of, rows_of
from infcl_gen.step.gradients import inside, is_replicated, is_sharded
from infcl_gen.step.measure import SMALLEST, Limits, MeasuredLoss
from infcl_gen.step.plan import TREATMENTS
from infcl_gen.step.planner import PlannedLoss, StepPlan, optimizer_bytes, plan_from_costs

SPARE = 0.03  # of the memory that is free: blocks of the allocator that nothing fits
LARGEST_MICRO_BATCH = 4096

Run = Callable[[Any], Tensor]


@in_python_words()
def plan_step(
    towers: Run | Sequence[Run],
    example: Any,
    *,
    loss: str | Callable[..., Tensor] = "clip",
    scale: Number = 1.0,
    bias: Number | None = None,
    batch_size: int | str | None = None,
    micro_batch: int | None = None,
    memory: int | str = "auto",
    optimizer: torch.optim.Optimizer | str | int | None = None,
    autocast: torch.dtype | None = None,
    treatments: Sequence[str] = TREATMENTS,
    model: nn.Module | Sequence[nn.Module] = (),
    generators: Sequence[torch.Generator] = (),
    batch_norm: str | None = None,
    group: Any = None,
    costs: StepCosts | str | os.PathLike[str] | None = None,
) -> StepPlan:
    """Plan an exact training step of towers on this device: `plan_step(...).step()` makes what executes it.

    towers       callables from an input to features (M, D), one for each input; modules, methods of modules, functions
    example      an input for each tower, of some samples: a tensor, or a dict, tuple or list of tensors of equal rows;
                 inputs of steps are like it, on the host or on the device
    loss         a built-in loss, FILE.py:NAME, or a callable of (*features, scale) or (*features, scale, bias)
    scale, bias  numbers, tensors, or callables that return one with its graph: `lambda: log_scale.exp()`
    batch_size   samples over all ranks, 65536 or "64k"; None: as many as fit
    micro_batch  overrides the plan's sizes
    memory       bytes that this process may allocate on the device: "24GiB", a number, or "auto": what is free
    optimizer    what holds state for the parameters: itself, its name, or its bytes; None counts AdamW's
    autocast     the dtype that towers and loss compute in; None: as it is set around the step
    treatments   that the plan may use, of "cached", "checkpointed", "kept"
    model        the modules that towers run, where they are not found: a lambda names them by its variables
    generators   that towers draw from, beside torch's own
    batch_norm   "micro-batch" accepts normalisation over micro-batches: gradients are then not those of the batch
    group        as for `contrastive_loss`
    costs        what an earlier plan measured (`plan.problem.costs`), or a profile FILE.toml, instead of measuring

    The device is that of the parameters. Ranks call it together. Raises InputError, and InfeasibleError with the
    largest batch that fits and the smallest memory that would do.
    """
    runs = [towers] if callable(towers) else list(towers)
    inputs = [example] if callable(towers) else list(example)
    if len(runs) != len(inputs):
        raise InputError(f"example: {len(inputs)} inputs were given for {len(runs)} towers")
    given = (model,) if isinstance(model, nn.Module) else tuple(model)
    modules = [given or tuple(_modules_of(run)) for run in runs]
    _check_norms({each for some in modules for each in some}, batch_norm)
    device = _device_of(modules)
    names = _names_of(runs)
    ranks = find_group(options_of(group, "mean").group_name)
    together = _Together(None if ranks is None else ranks.process_group, device)
    everything = tuple(dict.fromkeys(each for some in modules for each in some))
    with measuring.unchanged(everything, device, generators), measuring.autocast(device, autocast), torch.no_grad():
        features = [_features_of(run, each, name, device) for run, each, name in zip(runs, inputs, names, strict=True)]
    bound = Model(
        tuple(
            Tower(run, like, some, blocks_of(_own(run, some)))
            for run, like, some in zip(runs, features, modules, strict=True)
        ),
        loss if callable(loss) else _no_loss, scale, bias, device, autocast, tuple(generators), lambda value: value,
    )  # fmt: skip
    memory_bytes = together.least(_memory(memory, device))
    asked = None if batch_size is None else parse_count(batch_size, "batch_size")
    samples = LARGEST_MICRO_BATCH if asked is None else min(LARGEST_MICRO_BATCH, -(-asked // together.size))
    limits = Limits(micro_batch or samples, memory_bytes, together.agree)
    if isinstance(costs, StepCosts):
        measured = costs
    elif costs is not None:
        measured = read_costs(os.fspath(costs), "costs")
    else:
        measured = together.told(measuring.measure(bound, inputs, names, limits))
    flags = {"loss": loss, "dim": measured.dim, "dtype": measured.dtype, "device_profile": measured.device}
    losses: Any = MeasuredLoss(bound, limits) if callable(loss) else PlannedLoss(flags, together.size)
    plan = plan_from_costs(
        measured, memory_bytes, losses, batch_size=asked, world_size=together.size, treatments=tuple(treatments),
        micro_batch=micro_batch, wrapper=_wrapper(everything), inputs="host" if on_host(inputs, device) else "device",
        optimizer_bytes=_optimizer_bytes(optimizer, measured.gradient_bytes),
    )  # fmt: skip
    chosen = plan.account.loss.budget_bytes
    make_loss = None if callable(loss) else functools.partial(_generated, losses, plan.problem.samples, chosen, group)
    return dataclasses.replace(plan, make_step=functools.partial(_bound, bound, make_loss))


def _bound(model: Model, make_loss: Callable[[], dict[str, Any]] | None, plan: StepPlan) -> TrainingStep:
    return TrainingStep(plan.account.towers, model if make_loss is None else model._replace(**make_loss()))


def _generated(losses: PlannedLoss, samples: tuple[int, ...], budget: int | None, group: Any) -> dict[str, Any]:
    """The planned loss, and how its value over ranks is found."""
    package = load_cached(losses.problem(samples, budget))
    return {
        "loss": functools.partial(package.contrastive_loss, group=group),
        "value": functools.partial(global_value, group=group),
    }


def _no_loss(*features: Tensor) -> Tensor:
    raise AssertionError("the loss is generated when the step is made")


class _Together:
    """What the ranks of a group decide together; without a group, what this process decides."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)

    def least(self, value: int) -> int:
        if self._group is None:
            return value
        found = torch.tensor([value], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return int(found)

    def agree(self, wanted: bool) -> bool:
        return bool(self.least(int(wanted)))

    def told(self, costs: StepCosts) -> StepCosts:
        """Rank 0's costs, on every rank."""
        if self._group is None:
            return costs
        text = costs_text(costs).encode()
        size = torch.tensor([len(text)], device=self._device)
        dist.broadcast(size, group=self._group, group_src=0)
        words = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8)[: int(size)].to(self._device)
        dist.broadcast(words, group=self._group, group_src=0)
        return costs_of(tomllib.loads(bytes(words.tolist()).decode()), "the costs of rank 0")


def _modules_of(run: Any) -> Iterator[nn.Module]:
    """The modules that a callable runs: itself, that of a method, or those that a function names."""
    if isinstance(run, nn.Module):
        yield run
    elif isinstance(run, functools.partial):
        yield from _modules_of(run.func)
        for each in (*run.args, *run.keywords.values()):
            if isinstance(each, nn.Module):
                yield each
    elif inspect.ismethod(run):
        if isinstance(run.__self__, nn.Module):
            yield run.__self__
    elif inspect.isfunction(run):
        named = inspect.getclosurevars(inspect.unwrap(run))
        for each in (*named.nonlocals.values(), *named.globals.values()):
            if isinstance(each, nn.Module):
                yield each


def _names_of(runs: Sequence[Any]) -> list[str]:
    """A name for each tower: that of its class or function, numbered where several have it."""
    names = [getattr(run, "__name__", type(run).__name__) for run in runs]
    plain = [name if name.isidentifier() else "tower" for name in names]
    return [name if plain.count(name) == 1 else f"{name}{place}" for place, name in enumerate(plain)]


def _device_of(modules: Sequence[tuple[nn.Module, ...]]) -> torch.device:
    for place, some in enumerate(modules):
        if not some:
            raise InputError(f"towers: no module is found in tower {place}; name what it runs: model=...")
    devices = {each.device for some in modules for module in some for each in module.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise InputError(f"towers: their parameters are on {found}; a step runs on one device")
    return devices.pop()


def _own(run: Any, modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The modules whose blocks may be computed again: none inside a compiled tower, which would not see it."""
    compiled = any(hasattr(each, "_orig_mod") for each in (run, *modules)) or hasattr(run, "_torchdynamo_orig_callable")
    return () if compiled else modules


def _features_of(run: Run, example: Any, name: str, device: torch.device) -> Tensor:
    """No features, (0, ...), of a tower: their shape and dtype."""
    rows = rows_of(example, f"example: {name}")
    output = run(moved(part_of(example, slice(0, min(rows, SMALLEST))), device))
    if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[0] != min(rows, SMALLEST):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"towers: {name} gave {shape} for {min(rows, SMALLEST)} samples; expected features (M, D)")
    return output[:0].clone()


def _check_norms(modules: Iterable[nn.Module], accepted: str | None) -> None:
    if accepted not in (None, "micro-batch"):
        raise InputError(f'batch_norm: {accepted!r} is unknown; valid: "micro-batch"')
    for module in modules:
        for name, inner in module.named_modules():
            if isinstance(inner, _BatchNorm) and inner.training and accepted is None:
                raise InputError(
                    f"towers: {name} normalises over a batch, here over each micro-batch: gradients are not those of "
                    'the whole batch. Put it into eval(), or accept that: batch_norm="micro-batch"'
                )


def _wrapper(modules: Iterable[nn.Module]) -> str:
    if inside(modules, is_replicated):
        return "ddp"
    return "fsdp2" if inside(modules, is_sharded) else "none"


def _memory(memory: int | str, device: torch.device) -> int:
    if memory != "auto":
        return parse_bytes(memory, "memory")
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * (1 - SPARE))


def _optimizer_bytes(optimizer: Any, gradient_bytes: int) -> int:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer_bytes("adamw" if optimizer is None else optimizer, gradient_bytes)
    held = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    if held:
        return sum(each.nbytes for each in held)
    name = type(optimizer).__name__.lower()
    if name == "sgd" and any(group["momentum"] for group in optimizer.param_groups):
        name = "momentum"
    return optimizer_bytes(name, gradient_bytes)
