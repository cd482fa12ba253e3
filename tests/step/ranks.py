"""What a rank of tests/step/test_ranks.py does: each function is a task of `infcl_gen.processes.run_ranks`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import infcl_gen
from infcl_gen.errors import InputError
from infcl_gen.processes import Seat
from infcl_gen.step import gradients
from infcl_gen.step.blocks import blocks_of
from infcl_gen.step.executor import Tower, TrainingStep
from infcl_gen.step.plan import Part, TowerPlan
from tests.step.models import DIM, Pair, batch, dense, difference, features_of, model_of, pair, plain
from tests.step.models import gradients as gradients_of


def plans(rows: int, way: str) -> list[TowerPlan]:
    """Of `rows` samples: "mixture" has all treatments."""
    parts = {way: Part(rows, 3)}
    if way == "mixture":
        kept, checkpointed = rows // 3, rows // 4
        parts = {"kept": Part(kept, 2), "checkpointed": Part(checkpointed, 3)}
        parts["cached"] = Part(rows - kept - checkpointed, 3)
    return [TowerPlan("image", **parts), TowerPlan("text", **parts)]


def wrapped(module: Pair, wrapper: str) -> tuple[nn.Module, Any]:
    """The module under a wrapper, and its scale."""
    if wrapper == "ddp":
        return DistributedDataParallel(module), lambda: module.log_scale.exp()
    for block in blocks_of([module]):
        fully_shard(block)
    fully_shard(module)
    average = [Partial("avg")]
    return module, lambda: module.log_scale.full_tensor(grad_placements=average).exp()


def step(argument: dict[str, Any], seat: Seat) -> dict[str, Any]:
    """The errors of two steps of this rank's part of a batch, and how often gradients were reduced in one of them."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    device, dtype = (torch.device("cuda", seat.rank), torch.float32) if argument.get("gpus") else (None, torch.float64)
    seat.join_group("cuda" if device else "cpu", 60.0)
    rows, wrapper, way = argument["rows"], argument["wrapper"], argument["way"]
    first = sum(rows[: seat.rank])
    original, module = pair(), pair(dtype=dtype).to(device)
    if wrapper == "fsdp":
        module.log_scale = nn.Parameter(module.log_scale.detach().reshape(1))
    model, scale = wrapped(module, wrapper)
    towers = (lambda x: model(image=x), lambda x: model(text=x))
    like, blocks = (
        torch.empty(0, DIM, dtype=dtype, device=device),
        [blocks_of([each]) for each in (module.image, module.text)],
    )
    executed = model_of(original, scale=scale, device=torch.device("cpu") if device is None else device)._replace(
        towers=tuple(Tower(run, like, (model,), own) for run, own in zip(towers, blocks, strict=True))
    )
    run = TrainingStep(plans(rows[seat.rank], way), executed)
    own = [x[first : first + rows[seat.rank]].to(dtype) for x in batch(sum(rows), 3)]
    for at in argument.get("interrupts", ()):  # a pass of the image tower, on all ranks; 0: the loss
        interrupted = interrupting(executed, at)
        with contextlib.suppress(KeyboardInterrupt):
            TrainingStep(plans(rows[seat.rank], way), interrupted)(*own)
            raise AssertionError(f"no interrupt at {at}")
        assert not whole_gradients(module)
    if len({*rows}) > 1 and wrapper == "fsdp":
        try:
            run(*own)
        except InputError as error:
            return {"refused": str(error)}
    if argument.get("planted"):  # wrappers reduce in each pass
        gradients.unreduced = lambda modules: contextlib.nullcontext()
        gradients._reduces = lambda modules, reduces: None
    found: dict[str, Any] = {"errors": [], "values": []}
    total: dict[str, torch.Tensor] = {}
    for seed in (1, 2):  # the second adds to the gradients of the first
        inputs = batch(sum(rows), seed)
        with counted() as reductions:
            loss = run(*(x[first : first + rows[seat.rank]].to(dtype) for x in inputs))
        true, of_plain = plain(original, *inputs)
        total = {name: each + total.get(name, 0) for name, each in of_plain.items()}
        reduced = {name: each.to("cpu", torch.float64) for name, each in whole_gradients(module).items()}
        total = {name: each.reshape(reduced[name].shape) for name, each in total.items()}
        found["errors"].append(difference(reduced, total))
        found["values"].append(float((loss - true).abs()))
    return {**found, "reductions": len(reductions)}


def interrupting(model: Any, at: int) -> Any:
    """The model with an interrupt before a pass of its first tower, or in the loss."""
    tower, passes = model.towers[0], 0

    def interrupt(*features: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    def run(x: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return interrupt() if passes == at else tower.run(x)

    return model._replace(towers=(tower._replace(run=run), *model.towers[1:]), loss=model.loss if at else interrupt)


def whole_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by the name of their parameter; those of shards are gathered."""
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


class counted:
    """The calls inside that reduce gradients: their sizes in elements."""

    def __enter__(self) -> list[int]:
        self._calls: list[int] = []
        names = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor")  # the last one before torch 2.12
        self._originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

        def counting(name: str) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
                if tensors[0].is_floating_point() and max(each.numel() for each in tensors) > 1:
                    self._calls.append(max(each.numel() for each in tensors))
                return self._originals[name](*arguments, **named)

            return call

        for name in self._originals:
            setattr(dist, name, counting(name))
        return self._calls

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)


def planned(argument: dict[str, Any], seat: Seat) -> dict[str, Any]:
    """The plan of ranks of which the second has less memory, and the error of its step."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    original, module = pair(), pair()
    if argument["wrapper"] == "fsdp":
        module.log_scale = nn.Parameter(module.log_scale.detach().reshape(1))
    model, scale = wrapped(module, argument["wrapper"])
    static = DistributedDataParallel(pair(), static_graph=True)
    try:
        infcl_gen.plan_step([static, static], batch(4), batch_size=4)
    except InputError as error:
        refused = str(error)
    inputs = batch(40)
    own = [x[seat.rank * 20 : seat.rank * 20 + 20] for x in inputs]
    plan = infcl_gen.plan_step(
        [lambda x: model(image=x), lambda x: model(text=x)], [x[:4] for x in own], scale=scale, batch_size=40,
        memory=f"{64 >> seat.rank}MiB",
    )  # fmt: skip
    plan.step()(*own)
    found = whole_gradients(module)
    true = {name: each.reshape(found[name].shape) for name, each in plain(original, *inputs)[1].items()}
    return {"plan": plan.as_dict(), "error": difference(found, true), "refused": refused}


def subgroup(argument: dict[str, Any], seat: Seat) -> dict[str, Any]:
    """The error of a step with dropout of the last two of three ranks, which draw from different seeds."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    group = dist.new_group([1, 2])
    if seat.rank == 0:
        return {"error": 0.0}
    original, module = pair(dropout=0.3), pair(dropout=0.3)
    if argument["wrapper"] == "fsdp":
        module.log_scale = nn.Parameter(module.log_scale.detach().reshape(1))
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in blocks_of([module.image]):
            fully_shard(block, mesh=mesh)
        towers, scale = (module.image, module.text), lambda: module.log_scale.exp()
    else:
        model = DistributedDataParallel(module, process_group=group)
        towers, scale = (lambda x: model(image=x), lambda x: model(text=x)), lambda: module.log_scale.exp()
    inputs = batch(20)
    plan = infcl_gen.plan_step(
        towers, [x[:4] for x in inputs], scale=scale, batch_size=20, memory="64MiB", micro_batch=3, group=group,
        treatments=argument["treatments"],
    )  # fmt: skip
    torch.manual_seed(seat.rank)
    plan.step()(*(x[(seat.rank - 1) * 10 :][:10] for x in inputs))
    features = []
    for rank in (1, 2):
        torch.manual_seed(rank)
        part = [x[(rank - 1) * 10 :][:10] for x in inputs]
        features.append(features_of(plan.account.towers, (original.image, original.text), part))
    dense(*map(torch.cat, zip(*features, strict=True)), original.log_scale.exp()).backward()
    found = whole_gradients(module)
    if argument["wrapper"] == "fsdp":  # the user averages what no wrapper does
        averaged = ("image.blocks", "log_scale")
        for name in found:
            if not name.startswith(averaged):
                dist.all_reduce(found[name], group=group)
                found[name] /= 2
    true = {name: each.reshape(found[name].shape) for name, each in gradients_of(original).items()}
    return {"error": difference(found, true)}


def numbers(argument: dict[str, Any], seat: Seat) -> dict[str, Any]:
    """The errors of a scale and a bias that are in no module, in a step of the last two of three ranks."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    group = dist.new_group([1, 2])
    if seat.rank == 0:
        return {"errors": [0.0]}
    module, original = pair(), pair()
    scale, bias = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (3.0, 0.4))
    if argument["wrapper"] == "ddp":
        towers: list[Any] = [DistributedDataParallel(each, process_group=group) for each in (module.image, module.text)]
    else:
        towers = [fully_shard(each, mesh=DeviceMesh.from_group(group, "cpu")) for each in (module.image, module.text)]
    inputs = batch(20)
    parts = [[x[start : start + 10] for x in inputs] for start in (0, 10)]
    plan = infcl_gen.plan_step(
        towers, [x[:4] for x in inputs], loss=with_bias, scale=scale, bias=bias, batch_size=20, memory="64MiB",
        micro_batch=3, group=group,
    )  # fmt: skip
    plan.step()(*parts[seat.rank - 1])
    true = [each.detach().clone().requires_grad_() for each in (scale, bias)]
    for image, text in parts:
        (with_bias(original.image(image), original.text(text), *true) / 2).backward()
    return {"errors": [float((a.grad - b.grad).abs()) for a, b in zip((scale, bias), true, strict=True)]}


def with_bias(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of one rank's features alone."""
    return dense(image, text, scale) + bias * (image - text).square().mean()


def after_error(argument: dict[str, Any], seat: Seat) -> dict[str, Any]:
    """The error of the gradients of the user's own step behind a planned one that failed, on all ranks at once."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    original, module = pair(), pair()
    module.log_scale = None
    model, _ = wrapped(module, argument["wrapper"])
    image, text = batch(8)
    own = slice(4 * seat.rank, 4 * seat.rank + 4)

    def failing(*features: torch.Tensor) -> torch.Tensor:
        raise ValueError("a loss that fails")

    run, passes = (lambda x: model(image=x)), 0

    def in_a_pass(x: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == argument["failing"]:
            raise ValueError("a tower that fails")
        return run(x)

    like, bare = torch.empty(0, DIM, dtype=torch.float64), model_of(original, scale=1.0)
    towers = (Tower(in_a_pass, like, (model,)), Tower(lambda x: model(text=x), like, (model,)))
    loss = bare.loss if argument["failing"] else failing
    with contextlib.suppress(ValueError):
        TrainingStep(plans(4, argument["way"]), bare._replace(towers=towers, loss=loss, scale=2.0))(
            image[own], text[own]
        )
        raise AssertionError("nothing failed")
    assert not whole_gradients(module)
    first, second = model(image[own], text[own])
    (first * second).sum().backward()
    first, second = original(image, text)
    (first * second).sum().backward()
    true = {name: each / 2 for name, each in gradients_of(original).items()}
    return {"error": difference(whole_gradients(module), true)}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)).double()


def labelled(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and their classes, of which some are to be ignored (-1)."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(-1, 4, (rows,), generator=generator)


def mean(argument: dict[str, Any], seat: Seat) -> dict[str, Any]:
    """The error of a step by cross-entropy of this rank's part of a batch."""
    os.environ["INFCL_GEN_CACHE"] = argument["cache"]
    seat.join_group("cpu", 60.0)
    rows, original, module = argument["rows"], classifier(), classifier()
    first = sum(rows[: seat.rank])
    inputs, targets = labelled(sum(rows))
    loss = nn.CrossEntropyLoss(torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=torch.float64), ignore_index=-1)
    plan = infcl_gen.plan_step(
        DistributedDataParallel(module), inputs[:4], targets=targets[:4], loss=loss, batch_size=max(rows) * len(rows),
        micro_batch=3, memory="1GiB",
    )  # fmt: skip
    own = slice(first, first + rows[seat.rank])
    value, true = plan.step()(inputs[own], targets[own]), loss(original(inputs), targets)
    true.backward()
    of_plain = {name: each.grad for name, each in original.named_parameters()}
    return {"error": difference(whole_gradients(module), of_plain), "value": float((value - true).abs())}
