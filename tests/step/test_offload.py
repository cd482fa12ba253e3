"""Graphs that wait on the host: the same gradients, no memory of the device, and a place in plans."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import infcl_gen
from infcl_gen.errors import InputError
from infcl_gen.step import context
from infcl_gen.step.account import Account, account
from infcl_gen.step.choose import choose
from infcl_gen.step.costs import write_costs
from infcl_gen.step.executor import TrainingStep
from infcl_gen.step.offload import HostMemory, OffloadedGraphs
from infcl_gen.step.plan import MicroBatch, Part, TowerPlan
from infcl_gen.step.planner import plan_from_costs
from infcl_gen.verification.memory import PeakMeter
from tests.step.costs import COSTS, IMAGE, MB, TEXT, Loss
from tests.step.models import DIM, batch, dense, difference, features_of, gradients, model_of, pair, plain
from tests.step.test_live import bounds, of_a_small_loss, wide
from tests.step.test_planner import problem
from tests.test_cli import run
from tests.tiers import combined, nightly

CPU = torch.device("cpu")
ROWS = 23


def offloaded(rows: int, size: int) -> list[TowerPlan]:
    return [TowerPlan(name, offloaded=Part(rows, size)) for name in ("image", "text")]


def test_gradients_are_those_of_torch_s_own_hooks() -> None:
    """Of the same micro-batches inside save_on_cpu."""
    module, other, inputs, plan = pair(dropout=0.2), pair(dropout=0.2), batch(ROWS), offloaded(ROWS, 5)
    torch.manual_seed(2)
    TrainingStep(plan, model_of(module))(*inputs)
    torch.manual_seed(2)
    with save_on_cpu():
        image, text = features_of(plan, (other.image, other.text), inputs)
    dense(image, text, other.log_scale.exp()).backward()
    assert difference(gradients(module), gradients(other)) < 1e-12


class Twice(torch.autograd.Function):
    """Reads what it saved two times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient[0] * (first.cos() + second.cos()) / 2


LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": lambda x, w: (x.t() @ x).exp() @ w.t(),
    "parts of one product": lambda x, w: functools.reduce(torch.mul, (x @ w).chunk(3, 1)),
    "expanded": lambda x, w: (x[:, :1].exp().expand(-1, 12) * (x @ w)).tanh(),
    "columns": lambda x, w: (x @ w)[:, ::2].square(),
    "changed in place": lambda x, w: torch.relu_(x @ w).square().add_(1).sqrt(),
    "read two times": lambda x, w: Twice.apply(x @ w).exp(),
    "integers and flags": lambda x, w: (x @ w).masked_fill(x @ w > 0, 0.5).gather(1, torch.zeros(6, 3).long()).exp(),
    "complex": lambda x, w: torch.view_as_real((x @ w).to(torch.complex128).conj() * (1 + 2j)).square(),
    "scalars": lambda x, w: (x @ w) * (x.sum() * w.sum()).tanh(),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_what_is_saved_comes_back_bit_by_bit(layout: str) -> None:
    found = []
    for leaves in (False, True):
        generator = torch.Generator().manual_seed(1)
        x, w = (
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in ((6, 12), (12, 12))
        )
        with OffloadedGraphs(HostMemory(CPU), [w]) as graphs:
            micro = MicroBatch(0, 0, 6, "offloaded")
            if leaves:
                with graphs.leaving(micro):
                    output = LAYOUTS[layout](x, w)
                graphs.settle()
                graphs.fetch(micro)
            else:
                output = LAYOUTS[layout](x, w)
            output.sum().backward()
        found.append((x.grad, w.grad))
    assert all(map(torch.equal, *found))


def test_bytes_leave_once_and_weights_not_at_all() -> None:
    """What two operations save is on the host once; what micro-batches share is there for the first of them alone."""
    weight, mask = torch.randn(8, 8, requires_grad=True), torch.randn(5, 8)
    memory = HostMemory(CPU)
    with OffloadedGraphs(memory, [weight]) as graphs:
        for number in range(3):
            x = torch.randn(5, 8)
            with graphs.leaving(MicroBatch(0, 5 * number, 5 * number + 5, "offloaded")):
                # x @ weight saves x and the weight, the second product that result and the weight; mask is saved too
                y = x @ weight
                ((y @ weight.t()) * mask + y).sum()
    sizes = [sum(held.numel() for (n, _), held in memory.held.items() if n == number) for number in range(3)]
    assert sizes == [3 * 5 * 8 * 4, 2 * 5 * 8 * 4, 2 * 5 * 8 * 4]


def test_memory_of_the_host_stays_and_is_no_more_than_planned() -> None:
    module, first = wide()
    plan = with_offloaded(((100, 0, 300, 112), (0, 112, 400, 0)), (16, 64))
    step, inputs = plan.step(), batch(512, dtype=torch.float32)
    addresses = []
    for _ in range(2):
        step(*inputs)
        found = gradients(module)
        module.zero_grad()
        addresses.append({place: held.data_ptr() for place, held in step.host.held.items()})
    held_bytes = sum(held.numel() for held in step.host.held.values())
    assert addresses[0] == addresses[1] and 0.9 * plan.account.host_bytes < held_bytes <= plan.account.host_bytes
    assert first.make_step is not None
    TrainingStep(first.account.towers, model_of(module, loss=summed, value=lambda x: x))(*inputs)
    assert difference(found, gradients(module)) < 1e-3
    module.zero_grad()


def summed(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return scale * (image * text).sum()


def with_offloaded(split: Any, sizes: tuple[int, int]) -> Any:
    """A plan of `tests.step.test_live.wide`: samples that are kept, checkpointed, offloaded and cached."""
    first = of_a_small_loss()
    costs = dataclasses.replace(first.problem.costs, host_to_device_gbs=50.0)
    towers = [
        TowerPlan(
            tower.name, Part(parts[3], sizes[0]), Part(parts[1], sizes[1]), Part(parts[0], sizes[1]),
            Part(parts[2], sizes[1]),
        )
        for tower, parts in zip(costs.towers, split, strict=True)
    ]  # fmt: skip
    given = dataclasses.replace(first.problem, costs=costs, host_memory_bytes=1 << 30)
    return dataclasses.replace(first, problem=given, account=account(given, towers, first.account.loss))


SPLITS = [
    ((0, 0, 512, 0), (0, 0, 512, 0)),
    ((0, 0, 300, 212), (0, 0, 0, 512)),
    ((100, 100, 300, 12), (512, 0, 0, 0)),
    ((0, 400, 112, 0), (0, 0, 412, 100)),
]


MIXTURES = combined(SPLITS, [(16, 16), (64, 32), (48, 100)])


@pytest.mark.parametrize(("split", "sizes"), nightly(MIXTURES, MIXTURES[1:3]))
def test_the_account_bounds_the_peak_of_the_device(split: Any, sizes: tuple[int, int]) -> None:
    """Torch's allocator of the CPU stands for the device; the host's memory is mapped, and not in it."""
    plan = with_offloaded(split, sizes)
    # One micro-batch on its way stands beside the first or the last graphs that stay, not beside all.
    both = any(part.samples for tower in plan.account.towers for part in (tower.kept, tower.checkpointed))
    apart = [item.size_bytes for item in plan.account.items if item.name == "offloaded graphs"]
    bounds(plan, wide()[0], sum(apart) * both)


def test_more_micro_batches_take_no_more_of_the_device() -> None:
    def peak(rows: int) -> int:
        module = pair()
        step = TrainingStep(offloaded(rows, 16), model_of(module, loss=summed, value=lambda x: x))
        inputs = batch(rows)
        step(*inputs)
        module.zero_grad()
        with PeakMeter("cpu") as meter:
            step(*inputs)
        return meter.peak_bytes

    assert peak(512) - peak(128) < 384 * DIM * 8 * 2 * 4  # features, their gradients, and products of these


@pytest.mark.parametrize(("moment", "place"), combined(range(1, 13, 2), ["forward", "backward"]))
def test_an_interrupt_leaves_nothing_behind(place: str, moment: int) -> None:
    """Of 12 passes: gradients are as before, no hook is left, and the same step is exact afterwards."""
    module, inputs, count = pair(), batch(ROWS), 0

    def happens() -> None:
        nonlocal count
        count += 1
        if count == moment:
            raise KeyboardInterrupt

    def text(x: Tensor) -> Tensor:
        features: Tensor = module.text.last(module.text.blocks[0](module.text.first(x)))
        if place == "forward":
            happens()
        else:
            features.register_hook(lambda _: happens())
        return nn.functional.normalize(module.text.last(module.text.blocks[1](module.text.first(x))) + features)

    plan = [TowerPlan("image", offloaded=Part(ROWS, 4)), TowerPlan("text", offloaded=Part(ROWS, 2))]
    model = model_of(module, (module.image, text), loss=dense, value=lambda x: x)
    step = TrainingStep(plan, model)
    with pytest.raises(KeyboardInterrupt):
        step(*inputs)
    assert not gradients(module) and not [inner for inner in module.modules() if "forward" in vars(inner)]
    x = torch.ones(3, requires_grad=True)
    held = sorted(step.host.held)
    x.exp().sum().backward()
    assert held == sorted(step.host.held)
    step(*inputs)
    found = gradients(module)
    module.zero_grad()
    dense(module.image(inputs[0]), text(inputs[1]), module.log_scale.exp()).backward()
    assert difference(found, gradients(module)) < 1e-12


class TestPlans:
    """Caching passes an image in 50 + 134 us, with checkpoints in 170; 2.5 MB take 50 us at 50 GB/s."""

    @staticmethod
    def chosen(host_mb: int, memory_mb: int = 2_000, samples: int = 2_048, **options: Any) -> Account:
        return choose(problem(samples, memory_mb, host_memory_bytes=host_mb * MB, **options))

    def test_graphs_wait_on_the_host_where_that_is_faster(self) -> None:
        times, held = [], []
        for host_mb in (0, 500, 2_000, 20_000):
            found = self.chosen(host_mb)
            assert found.peak_bytes <= 2_000 * MB and found.host_bytes <= host_mb * MB
            assert [plan.samples for plan in found.towers] == [2_048, 2_048]
            times.append(found.time_s)
            held.append(found.host_bytes)
        assert times == sorted(times, reverse=True) and times[0] > 1.02 * times[-1]
        assert held[0] == 0 and held[1] > 400 * MB and held == sorted(held)

    @pytest.mark.parametrize("link_gbs", [0.0, 5.0])
    def test_a_slow_link_or_none_carries_nothing(self, link_gbs: float) -> None:
        costs = dataclasses.replace(COSTS, host_to_device_gbs=link_gbs)
        assert self.chosen(20_000, costs=costs).host_bytes == 0

    def test_nothing_waits_on_the_host_where_all_is_kept_or_sharded(self) -> None:
        assert self.chosen(20_000, 200_000).host_bytes == 0
        assert self.chosen(20_000, wrapper="fsdp2", world_size=2).host_bytes == 0
        assert self.chosen(20_000, treatments=("cached", "checkpointed", "kept")).host_bytes == 0

    def test_copies_that_take_longer_than_their_pass_count(self) -> None:
        plan, slow = [TowerPlan("image", offloaded=Part(64, 64))], dataclasses.replace(COSTS, towers=(IMAGE,))
        for rate, forward_us, backward_us in ((50.0, 50.0, 120.0), (25.0, 100.0, 120.0), (5.0, 500.0, 500.0)):
            costs = dataclasses.replace(slow, host_to_device_gbs=rate)
            found = account(problem(64, 1000, costs, inputs="device"), plan, COSTS_OF_NO_LOSS).phase_s
            assert found["offloaded_forward"] == pytest.approx(64e-6 * forward_us, rel=0.02)
            assert found["offloaded_backward"] == pytest.approx(64e-6 * backward_us, rel=0.02)

    @pytest.mark.parametrize(("memory_mb", "host_mb"), [(60, 20), (80, 8), (80, 100), (150, 30), (260, 15)])
    def test_the_choice_is_within_one_percent_of_the_best(self, memory_mb: int, host_mb: int) -> None:
        """Of all plans of one tower in equal groups."""
        samples, tower = 16, dataclasses.replace(IMAGE, name="image")
        given = problem(samples, memory_mb, dataclasses.replace(COSTS, towers=(tower,)), host_memory_bytes=host_mb * MB)
        best_s = math.inf
        for size in (4, 8, 16):
            for kept in range(0, samples + 1, size):
                for checkpointed in range(0, samples + 1 - kept, size):
                    for waiting in range(0, samples + 1 - kept - checkpointed, size):
                        rest = samples - kept - checkpointed - waiting
                        for cached in (4, 8, 16):
                            parts = (Part(rest, cached), *(Part(each, size) for each in (checkpointed, kept, waiting)))
                            plan = TowerPlan("image", *parts)
                            for loss in given.losses.within_budgets(samples):
                                found = account(given, [plan], loss)
                                fits = found.peak_bytes <= given.memory_bytes and found.host_bytes <= host_mb * MB
                                best_s = min(best_s, found.time_s) if fits else best_s
        chosen = choose(given)
        assert chosen.peak_bytes <= given.memory_bytes and chosen.host_bytes <= host_mb * MB
        assert chosen.time_s <= 1.01 * best_s

    def test_what_people_read(self, tmp_path: Path) -> None:
        write_costs(tmp_path / "costs.toml", COSTS)
        flags = ("--profile", str(tmp_path / "costs.toml"), "--memory-budget", "2GB", "--batch-size", "2048")
        printed = run("step", *flags, "--host-memory", "20GB").stdout
        on_host = (
            "on the host 7.3 GiB of 18.7 GiB, for offloaded graphs; to lock it the first step takes about 3.26 s more"
        )
        assert "  offloaded  " in printed and on_host in printed
        assert "  cached and checkpointed and kept alone  " in printed
        assert "offloaded" not in run("step", *flags).stdout
        roomy = run("step", *flags[:2], "--memory-budget", "140GB", *flags[4:], "--host-memory", "20GB").stdout
        assert "on the host nothing of 18.7 GiB: offloaded graphs make no step faster" in roomy
        plan = plan_from_costs(COSTS, 2_000 * MB, Loss(), 2048, host_memory_bytes=20_000 * MB)
        others = [each for each in plan.alternatives if each.treatments == ("cached", "checkpointed", "kept")]
        assert others[0].time_s == choose(problem(2048, 2_000)).time_s > plan.predicted_time_s
        done = run("step", *flags, "--treatments", "offloaded")
        assert done.exit_code == 2 and "offloaded is beside others" in done.stderr

    def test_a_planned_step(self) -> None:
        """With invented costs of the device, for the host has no copies."""
        module, inputs = pair(), batch(2048)
        towers = tuple(dataclasses.replace(each, feature_bytes=DIM * 8, input_bytes=48) for each in (IMAGE, TEXT))
        costs = dataclasses.replace(COSTS, towers=towers, dim=DIM, dtype="fp64")
        plan = infcl_gen.plan_step(
            [module.image, module.text], [x[:8] for x in inputs], scale=lambda: module.log_scale.exp(), batch_size=2048,
            memory="2GB", host_memory="4GB", costs=costs, optimizer="none", loss=dense,
        )  # fmt: skip
        assert plan.account.host_bytes > 0
        step = plan.step()
        step(*inputs)
        passes = sum(tower.offloaded.passes for tower in plan.account.towers)
        assert {number for number, _ in step.host.held} == set(range(passes))
        assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12
        with pytest.raises(InputError, match="host_memory: 'much' is not a size"):
            infcl_gen.plan_step([module.image, module.text], batch(8), batch_size=100, host_memory="much", costs=costs)


COSTS_OF_NO_LOSS = Loss().within_budgets(1)[0]._replace(time_s=0.0, peak_bytes=0)


def test_the_host_s_memory_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = {"SC_PHYS_PAGES": 1 << 20, "SC_AVPHYS_PAGES": 1 << 16, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(context, "CONTROL_GROUPS", ())
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert context.host_memory_of("auto", int) == 128 << 20 and context.host_memory_of(0, int) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert context.host_memory_of("auto", int) == 32 << 20 and context.host_memory_of("1GiB", int) == 1 << 30
    (tmp_path / "max").write_text("100000000\n")
    (tmp_path / "current").write_text("60000000\n")
    monkeypatch.setattr(context, "CONTROL_GROUPS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert context.host_memory_of("auto", int) == 5_000_000
    (tmp_path / "max").write_text("max\n")
    assert context.host_memory_of("auto", int) == 32 << 20
    with pytest.raises(InputError, match=r"host_memory: 4\.1 GiB is more than the host has: 4 GiB; give less"):
        context.host_memory_of("4.1GiB", int)
    assert context.host_memory_of("5GiB", int, here=False) == 5 << 30
