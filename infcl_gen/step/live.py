"""`plan_step`: measures towers where they will train, plans their step, and binds the plan to them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infcl_gen.emission import load_cached
from infcl_gen.errors import InputError, in_python_words
from infcl_gen.inputs.problem import MAX_BATCH
from infcl_gen.inputs.text import check_integer, parse_count, show
from infcl_gen.lazy import global_value
from infcl_gen.step.blocks import blocks_of
from infcl_gen.step.context import Context, Run, compiled, host_memory_of, memory_of, optimizer_bytes_of, wrapper_of
from infcl_gen.step.costs import StepCosts, read_costs
from infcl_gen.step.estimate import fake_mode_of, faked, probe_for
from infcl_gen.step.executor import Model, Number, Tower, TrainingStep
from infcl_gen.step.feed import Ragged, Samples, form_of, moved, on_host, part_of, rows_of
from infcl_gen.step.means import MeanLoss, MeanStep
from infcl_gen.step.measure import DTYPE_NAMES, SMALLEST, Limits, MeasuredLoss, Probe, measure, unchanged
from infcl_gen.step.plan import TREATMENTS
from infcl_gen.step.planner import PlannedLoss, StepPlan, check_treatments, plan_from_costs
from infcl_gen.step.state import autocast_in, is_generator

LARGEST_MICRO_BATCH = 4096  # that is measured; one image of ViT-B/32 keeps 33.5 MB for backward


@in_python_words()
def plan_step(
    towers: Run | Sequence[Run],
    example: Any,
    *,
    targets: Any = None,
    loss: str | Callable[..., Tensor] = "clip",
    denominator: Callable[[Any], Tensor | float] | None = None,
    scale: Number = 1.0,
    bias: Number | None = None,
    batch_size: int | str | None = None,
    micro_batch: int | None = None,
    memory: int | str = "auto",
    host_memory: int | str = 0,
    optimizer: torch.optim.Optimizer | str | int | None = None,
    autocast: torch.dtype | None = None,
    treatments: Sequence[str] = TREATMENTS,
    model: nn.Module | Sequence[nn.Module] = (),
    generators: Sequence[torch.Generator] = (),
    batch_norm: str | None = None,
    group: Any = None,
    costs: StepCosts | str | os.PathLike[str] | None = None,
    device_profile: str | None = None,
) -> StepPlan:
    """Plan an exact training step of towers on this device: `plan_step(...).step()` makes what executes it.

    towers       callables from an input to features (M, D), one for each input; modules, methods of modules, functions
    example      an input for each tower, of some samples: a tensor, or a dict, tuple or list of tensors of equal rows;
                 inputs of steps are like it, on the host or on the device
    loss         a built-in loss, FILE.py:NAME, or a callable of (*features, scale) or (*features, scale, bias); with
                 `targets` a mean over samples: a loss module of torch, or a callable of (outputs, targets)
    targets      those of the example: `towers` is one model then, and a step is `step(inputs, targets)`
    denominator  from targets to what such a callable divides by; None: their number
    scale, bias  numbers, tensors, or callables that return one with its graph: `lambda: log_scale.exp()`
    batch_size   samples over all ranks, 65536 or "64k"; None: as many as fit
    micro_batch  overrides the plan's sizes
    memory       bytes that this process may allocate on the device: "24GiB", a number, or "auto": what is free
    optimizer    what holds state for the parameters: itself, its name, or its bytes; None counts AdamW's
    autocast     the dtype that towers and loss compute in; None: as it is set around the step
    host_memory  bytes of the host that graphs may wait in, where that is faster: "64GiB", a number, or "auto": half of
                 what is free, shared by its ranks; the first step takes long to lock it, about a second for 2.4 GB
    treatments   that the plan may use, of "cached", "offloaded", "checkpointed", "kept"
    model        the modules that towers run, where they are not found: a lambda names them by its variables
    generators   that towers draw from, beside torch's own
    batch_norm   "micro-batch" accepts normalisation over micro-batches: gradients are then not those of the batch
    group        as for `contrastive_loss`
    costs        instead of measuring: what an earlier plan measured (`plan.problem.costs`), a FILE.toml with it, or
                 the name of a profile: "vit_b_32-h200"; with costs of another device a plan of a named loss has no step
    device_profile   the device that towers without values, made under FakeTensorMode, are planned for: "h200"; costs
                 are estimated then, and the plan does not run

    The device is that of the parameters. Ranks call it together. Raises InputError, and InfeasibleError with the
    largest batch that fits and the smallest memory that would do.
    """
    models = (model,) if isinstance(model, nn.Module) else model
    _check_kinds(
        ("towers", towers, callable(towers) or (_listed(towers, callable) and towers), "modules, methods or functions"),
        ("example", example, callable(towers) or _listed(example), "a list with an input for each tower"),
        ("scale", scale, isinstance(scale, int | float | Tensor) or callable(scale), "a number, tensor or function"),
        ("bias", bias, bias is None or isinstance(bias, int | float | Tensor) or callable(bias), "what scale= takes"),
        ("denominator", denominator, denominator is None or callable(denominator), "a function of targets"),
        ("autocast", autocast, autocast in (None, torch.bfloat16, torch.float16), "torch.bfloat16 or torch.float16"),
        ("model", model, _listed(models, lambda each: isinstance(each, nn.Module)), "a module, or a list of them"),
        ("generators", generators, _listed(generators, is_generator), "a list of generators of torch, Python or NumPy"),
    )
    runs: list[Run] = [towers] if callable(towers) else list(towers)
    inputs = [example] if callable(towers) else list(example)
    if len(runs) != len(inputs):
        raise InputError(f"example: {len(inputs)} inputs were given for {len(runs)} towers")
    allowed = check_treatments(treatments)
    _check_meaning(runs, inputs, targets, loss, denominator, scale, bias, allowed)
    context = Context.of(runs, tuple(models), group)
    context.check_norms(batch_norm)
    wrapper = wrapper_of(context.everything)
    mode = fake_mode_of(context.everything)
    if mode is not None and (targets is not None or callable(loss)):
        raise InputError("loss: towers without values are planned with a built-in loss, or with FILE.py:NAME")
    if mode is None and device_profile is not None:
        raise InputError("device_profile: is for towers without values, made under FakeTensorMode; leave it out")
    probe = Probe if mode is None else probe_for(device_profile)
    asked = None if batch_size is None else parse_count(batch_size, "batch_size")
    for name, count in (("batch_size", asked), ("micro_batch", micro_batch)):
        if count is not None:
            check_integer(name, count, 1, MAX_BATCH)
    samples = None if asked is None else -(-asked // context.size)
    largest = min(LARGEST_MICRO_BATCH, samples or LARGEST_MICRO_BATCH)
    allowed_bytes = context.least(memory_of(memory, context.device, None if mode is None else device_profile))
    limits = Limits(micro_batch or largest, allowed_bytes, context.agree)
    host = mode is not None or on_host(inputs, context.device)
    around = context.device, autocast, tuple(generators)
    bare = Model((), loss, scale, bias, *around, lambda value: value, context.process_group)
    losses: Any
    with faked(mode, inputs) as inputs:
        with unchanged(context.everything, context.device, bare.generators), autocast_in(context.device, autocast):
            if targets is None:
                bound = bare._replace(towers=tuple(_towers(context, runs, inputs, loss)))
            else:
                mean = MeanLoss(loss, denominator)  # type: ignore[arg-type]
                bound = bare._replace(towers=(_of_mean(context, runs[0], mean, inputs[0], targets),))
                inputs = [(inputs[0], targets)]
        given = _given_costs(costs, len(runs), targets is not None)
        elsewhere = given is not None and given.device != probe.profile(context.device)
        if given and not (elsewhere or given.with_targets):
            _check_features(given, bound.towers[0].features, loss)
        runs_here = mode is None and not (elsewhere and isinstance(loss, str))  # it is planned for the costs' device
        if runs_here and isinstance(loss, str):
            _check_needs(loss)
        measured = given or context.told(measure(bound, inputs, context.names, limits, probe))
    if targets is not None:
        losses = None
        make: Any = lambda plan, progress: MeanStep(plan.account.towers[0], bound, mean, progress)  # noqa: E731
    elif callable(loss):
        losses = MeasuredLoss(bound, samples)
        make = functools.partial(_training_step, bound, None, group)
    else:
        losses = PlannedLoss(loss, measured, context.size)
        make = functools.partial(_training_step, bound, losses, group)
    plan = plan_from_costs(
        measured, limits.memory_bytes, losses, batch_size=asked, world_size=context.size, treatments=allowed,
        micro_batch=micro_batch, wrapper=wrapper, inputs="host" if host else "device",
        optimizer_bytes=optimizer_bytes_of(optimizer, measured.gradient_bytes),
        host_memory_bytes=host_memory_of(host_memory, context.least, here=mode is None),
    )  # fmt: skip
    return dataclasses.replace(plan, make_step=make) if runs_here else plan


def _listed(value: Any, fits: Callable[[Any], bool] = lambda each: True) -> bool:
    """Whether it is a list or tuple of such values."""
    return isinstance(value, list | tuple) and all(map(fits, value))


def _check_kinds(*arguments: tuple[str, Any, Any, str]) -> None:
    """Of each argument: its name, its value, whether that is of the right kind, and which that is."""
    for name, value, fits, kind in arguments:
        if not fits:
            raise InputError(f"{name}: expected {kind}, got {show(value)}")


def _check_meaning(
    runs: Any, inputs: Any, targets: Any, loss: Any, denominator: Any, scale: Any, bias: Any, treatments: Any
) -> None:
    """Raises InputError for arguments that have no meaning beside others."""
    if targets is not None and len(runs) > 1:
        raise InputError("towers: a loss with targets is a mean over the samples of one model; give that")
    if targets is not None and not callable(loss):
        raise InputError(f"loss: {loss!r} has no targets; with targets= give a loss module of torch or a function")
    if targets is None and isinstance(loss, nn.modules.loss._Loss):
        raise InputError(f"loss: {type(loss).__name__} compares outputs with targets; give targets= of the example")
    if targets is None and isinstance(loss, str) and len(runs) != 2:
        raise InputError(
            f"towers: a loss by its name takes two, and {len(runs)} were given; give a function of their features: "
            f"loss=lambda a, scale: infcl_gen.contrastive_loss(a, None, scale, loss={loss!r})"
        )
    for name, value in (("scale", scale), ("bias", bias)):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise InputError(f"{name}: a tensor with a graph serves one step; give a function: lambda: log_scale.exp()")
    for each in inputs:
        if isinstance(each, Samples) and not (isinstance(each, Ragged) and targets is None):
            raise InputError(f"example: {type(each).__name__} are inputs of a step; give a tensor of some samples")
    if isinstance(loss, type):
        raise InputError(f"loss: {loss.__name__} is a class; give a module of it: {loss.__name__}()")
    if targets is None and denominator is not None:
        raise InputError("denominator: is of a loss with targets; give targets= as well")
    contrastive = not isinstance(scale, int | float) or scale != 1 or bias is not None or {*treatments} != {*TREATMENTS}
    if targets is not None and contrastive:
        raise InputError("scale, bias, treatments: are of a contrastive loss; a loss with targets has none of them")


def _check_features(costs: StepCosts, features: Tensor, loss: Any) -> None:
    """Raises InputError where given costs are of other features than towers give here. A named loss has their dtype."""
    dim, dtype = features.shape[1:].numel(), DTYPE_NAMES[features.dtype]
    if costs.dim != dim or (isinstance(loss, str) and costs.dtype != dtype):
        raise InputError(
            f"costs: are of features of D = {costs.dim} in {costs.dtype}; the towers give {dim} in {dtype}: plan with "
            "the autocast that costs were measured under"
        )


def _check_needs(loss: str) -> None:
    """Raises InputError for a loss by its name that takes more than features, scale and bias."""
    from infcl_gen.losses import derive, load_loss  # with SymPy

    traits = derive(load_loss(loss)).traits
    needs = ["query_ids", "key_ids"] * traits.ids + ["guide_queries", "guide_keys"] * traits.guide
    needs += [*traits.vectors, *traits.scaled]
    if needs and not traits.triangle:
        raise InputError(
            f"loss: {loss} needs {' and '.join(needs)}, which a step does not pass; give a function that does: "
            f"lambda a, b, scale: infcl_gen.contrastive_loss(a, b, scale, loss={loss!r}, {needs[0]}=...)"
        )


def _given_costs(costs: Any, towers: int, with_targets: bool) -> StepCosts | None:
    if costs is None:
        return None
    if not isinstance(costs, StepCosts | str | os.PathLike):
        raise InputError(f"costs: expected StepCosts, the name of a profile or its FILE.toml, got {show(costs)}")
    found = costs if isinstance(costs, StepCosts) else read_costs(costs, "costs")
    if len(found.towers) != towers:
        raise InputError(f"costs: are of {len(found.towers)} towers; the step has {towers}")
    if found.with_targets != with_targets:
        raise InputError(f"costs: are of a loss with{'out' * with_targets} targets, unlike the step's")
    return found


def _towers(context: Context, runs: Sequence[Run], inputs: Sequence[Any], loss: Any) -> list[Tower]:
    """The towers, with no features, (0, ...), of the shape and dtype that they give."""
    found = []
    for run, given, name, modules in zip(runs, inputs, context.names, context.modules, strict=True):
        rows = min(SMALLEST, rows_of(given, f"example: {name}"))
        with torch.no_grad():
            output = run(moved(part_of(given, slice(0, rows)), context.device))
        if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[0] != rows:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(f"towers: {name} gave {shape} for {rows} samples; expected features (M, D)")
        # A compiled tower would not see that its blocks are computed again.
        blocks = () if compiled(run, modules) else blocks_of(modules)
        found.append(Tower(run, output[:0].clone(), modules, blocks, form_of(given)))
    widths = [each.features.shape[1:].numel() for each in found]
    if isinstance(loss, str) and len({*widths}) > 1:
        each = " and ".join(f"{name} gives {width}" for name, width in zip(context.names, widths, strict=True))
        raise InputError(f"towers: {each} features; {loss!r} compares features of one width")
    return found


def _of_mean(context: Context, run: Run, mean: MeanLoss, example: Any, targets: Any) -> Tower:
    """A model and its loss as one tower without features, which takes pairs of inputs and targets."""
    rows = rows_of(example, "example")
    if rows != rows_of(targets, "targets"):
        raise InputError(f"targets: {rows_of(targets, 'targets')} samples; the example has {rows}")
    with torch.no_grad():
        dtype = mean.check(run(moved(example, context.device)), moved(targets, context.device))
    forms = form_of(example), form_of(targets)
    like = torch.empty(0, 0, dtype=dtype)
    return Tower(lambda pair: mean.sum_of(run(pair[0]), pair[1]), like, context.modules[0], form=forms)


def _training_step(
    bound: Model, losses: PlannedLoss | None, group: Any, plan: StepPlan, progress: bool
) -> TrainingStep:
    if losses is not None:
        package = load_cached(losses.problem(plan.problem.samples, plan.account.loss.budget_bytes))
        loss, value = (functools.partial(each, group=group) for each in (package.contrastive_loss, global_value))
        bound = bound._replace(loss=loss, value=value)
    return TrainingStep(plan.account.towers, bound, progress)
