"""`plan_step` on the CPU: what it measures and leaves alone, what its plans promise, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import infcl_gen
from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.hardware.profile import load_profile
from infcl_gen.processes import run_ranks
from infcl_gen.step.account import LossCosts, account
from infcl_gen.step.costs import PassCosts, StepCosts, TowerCosts, write_costs
from infcl_gen.step.measure import MOST_MEMORY, Limits, Probe
from infcl_gen.step.plan import Part, TowerPlan
from infcl_gen.step.planner import StepPlan
from infcl_gen.verification.memory import PeakMeter
from tests.step.models import Encoder, Pair, batch, dense, difference, gradients, pair, plain
from tests.tiers import combined, nightly

ROWS = 512


class Wide(Pair):
    """Towers whose activations are what takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Encoder(6, width=64, blocks=4), Encoder(6, width=32, blocks=3)


@functools.cache
def wide() -> tuple[Wide, StepPlan]:
    torch.manual_seed(0)
    module = Wide()
    return module, planned(module)


def planned(module: Pair, memory: str | int = "2GiB", rows: int = ROWS, **options: Any) -> StepPlan:
    example = batch(32, dtype=module.log_scale.dtype)
    given: dict[str, Any] = {"scale": lambda: module.log_scale.exp(), "batch_size": rows, "optimizer": "none"}
    return infcl_gen.plan_step([module.image, module.text], example, memory=memory, **given | options)


def steady(costs: StepCosts) -> StepCosts:
    """With times by size alone, so that every run plans the same."""

    def timed(each: PassCosts | None, factor: float) -> PassCosts | None:
        if each is None:
            return None
        forward_s = tuple(1e-4 + factor * 1e-5 * size for size in each.sizes)
        backward_s = tuple(2 * time_s for time_s in forward_s) if each.backward_s else ()
        return dataclasses.replace(each, forward_s=forward_s, backward_s=backward_s)

    factors = {"without_graph": 1.0, "kept": 1.1, "checkpointed": 1.3}
    towers = tuple(
        dataclasses.replace(tower, **{name: timed(getattr(tower, name), by) for name, by in factors.items()})
        for tower in costs.towers
    )
    return dataclasses.replace(costs, towers=towers)


@pytest.mark.parametrize(
    ("treatments", "share"),
    combined([("cached",), ("checkpointed",), ("kept",), ("cached", "checkpointed", "kept")], [1.0, 0.4]),
)
def test_the_predicted_peak_bounds_the_measured_one_closely(treatments: tuple[str, ...], share: float) -> None:
    """Within 10 %, whatever is chosen; below the least memory of these treatments nothing is planned."""
    module, first = wide()
    costs = steady(first.problem.costs)
    options: dict[str, Any] = {"costs": costs, "treatments": treatments, "rows": ROWS // 16}
    most = planned(module, "2GiB", **options).predicted_peak_bytes
    try:
        plan = planned(module, int(share * most), **options)
    except InfeasibleError as error:  # then in micro-batches of one sample
        assert error.smallest_budget_bytes is not None and error.smallest_budget_bytes > share * most
        plan = planned(module, error.smallest_budget_bytes, **options)
    assert plan.predicted_peak_bytes <= plan.problem.memory_bytes
    bounds(plan, module)


def bounds(plan: StepPlan, module: nn.Module, apart_bytes: int = 0) -> None:
    """Of two steps: the first compares second passes with the first ones. `apart_bytes` of the account are not there
    at the same time as its others."""
    step, inputs = plan.step(), batch(plan.batch_size, dtype=torch.float32)
    there = sum(each.nbytes for each in (*module.parameters(), *module.buffers(), *inputs))
    for _ in range(2):
        with PeakMeter("cpu") as meter:
            step(*inputs)
        module.zero_grad()
        measured = meter.peak_bytes + there
        # The account has all gradients there from the first backward on.
        most = 1.1 * measured + plan.problem.costs.gradient_bytes + apart_bytes
        assert measured <= plan.predicted_peak_bytes <= most


class Counting(nn.Module):
    """Adds up what it sees in a large buffer, and has another one that stays."""

    def __init__(self, inner: nn.Module, dropout: float) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(64 << 10))
        self.register_buffer("still", torch.zeros(32 << 10))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        features: Tensor = self.inner(self.dropout(x))
        return features


@pytest.mark.parametrize(("dropout", "micro_batch"), combined([0.0, 0.1], [16, 100]))
def test_what_second_passes_must_meet_counts(dropout: float, micro_batch: int) -> None:
    """Buffers of 256 KiB that a pass changes, and random states of 5 KB, for each cached micro-batch."""
    torch.manual_seed(0)
    module = Pair(dropout=dropout)
    module.image = Counting(module.image, dropout)
    plan = planned(module, micro_batch=micro_batch, treatments=("cached",))
    states = [each.state_bytes for each in plan.problem.costs.towers]
    drawn = torch.get_rng_state().nbytes * (dropout > 0)
    assert states == [(256 << 10) + drawn, drawn]
    bounds(plan, module)


def test_planning_changes_nothing() -> None:
    module = pair(dropout=0.2, dtype=torch.float32)
    module.register_buffer("passes", torch.zeros(()))

    def count(*_: object) -> None:
        module.passes.add_(1)

    module.image.register_forward_hook(count)
    plain_gradient = torch.ones_like(module.log_scale)
    module.log_scale.grad = plain_gradient
    before = {name: each.clone() for name, each in module.state_dict().items()}
    state = torch.get_rng_state()
    planned(module, rows=64, model=module)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert module.log_scale.grad is plain_gradient and list(gradients(module)) == ["log_scale"]
    assert not [block for block in module.modules() if "forward" in vars(block)]


def test_gradients_of_a_planned_step_are_exact() -> None:
    module, inputs = pair(), batch(100)
    loss = planned(module, "64MiB", rows=100, micro_batch=16).step()(*inputs)
    true, of_plain = plain(module, *inputs)
    assert abs(float(loss - true)) < 1e-12 and difference(gradients(module), of_plain) < 1e-12


def test_a_loss_of_the_users_own() -> None:
    module, inputs = pair(), batch(100)
    plan = planned(module, "64MiB", rows=100, loss=dense)
    loss = plan.step()(*inputs)
    true, of_plain = plain(module, *inputs)
    assert abs(float(loss - true)) < 1e-12 and difference(gradients(module), of_plain) < 1e-12
    assert plan.account.loss.peak_bytes > 8 * 100 * 100 * 2  # the matrix, and its gradient
    in_small_ones = planned(module, "64MiB", rows=100, loss=dense, micro_batch=1)
    assert in_small_ones.account.loss.peak_bytes == plan.account.loss.peak_bytes


def test_inputs_of_several_tensors_and_methods_of_a_model() -> None:
    module, (image, text) = pair(), batch(40)

    def encode(given: dict[str, Any]) -> Tensor:
        features: Tensor = module(text=given["tokens"] * given["mask"])
        return features

    mask = torch.ones(40, 1, dtype=torch.float64)
    example = [image[:8], {"tokens": text[:8], "mask": mask[:8], "padding": "right"}]
    plan = infcl_gen.plan_step(
        [functools.partial(module), encode], example, scale=lambda: module.log_scale.exp(), batch_size=40,
        memory="64MiB",
    )  # fmt: skip
    assert [tower.name for tower in plan.account.towers] == ["partial", "encode"]
    plan.step()(image, {"tokens": text, "mask": mask, "padding": "right"})
    assert difference(gradients(module), plain(module, image, text)[1]) < 1e-12


class Named(Pair):
    def encode_image(self, image: Tensor) -> Tensor:
        features: Tensor = self.image(image)
        return features

    def encode_text(self, text: Tensor) -> Tensor:
        features: Tensor = self.text(text)
        return features


def test_methods_are_towers_and_memory_is_what_is_free() -> None:
    torch.manual_seed(0)
    module, inputs = Named().double(), batch(40)
    towers = [module.encode_image, module.encode_text]
    plan = infcl_gen.plan_step(towers, batch(8), scale=lambda: module.log_scale.exp(), batch_size=40)
    assert [tower.name for tower in plan.account.towers] == ["encode_image", "encode_text"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.001 * total < plan.problem.memory_bytes < total
    # Parameters of the whole model count, whichever methods run them.
    assert plan.problem.costs.parameter_bytes == sum(each.nbytes for each in module.parameters())
    plan.step()(*inputs)
    assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12


def test_memory_that_is_free_is_taken_but_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    module, first = wide()
    pages = {"SC_AVPHYS_PAGES": 1 << 16, "SC_PAGE_SIZE": 4096}
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", pages.__getitem__)
        plan = planned(module, "auto", costs=first.problem.costs)
    assert plan.problem.memory_bytes == int(0.97 * (256 << 20))


SPLITS = [
    ((0, 200, 312), (512, 0, 0)),
    ((0, 0, 512), (0, 0, 512)),
    ((100, 0, 412), (100, 100, 312)),
    ((512, 0, 0), (0, 0, 512)),
    ((1, 510, 1), (300, 1, 211)),
]


@functools.cache
def of_a_small_loss() -> StepPlan:
    """The towers take what there is of memory."""
    return planned(
        wide()[0], loss=lambda image, text, scale: scale * (image * text).sum(), costs=wide()[1].problem.costs
    )


@pytest.mark.parametrize(("split", "sizes"), combined(SPLITS, [(16, 16), (64, 32), (48, 100)]))
def test_the_account_bounds_the_peak_of_any_mixture(
    split: tuple[tuple[int, int, int], ...], sizes: tuple[int, int]
) -> None:
    """Of plans that nobody chose: numbers of samples that are kept, checkpointed and cached, for each tower."""
    (module, _), (cached, graph) = wide(), sizes
    first = of_a_small_loss()
    towers = [
        TowerPlan(costs.name, Part(parts[2], cached), Part(parts[1], graph), Part(parts[0], graph))
        for costs, parts in zip(first.problem.costs.towers, split, strict=True)
    ]
    found = account(first.problem, towers, first.account.loss)
    bounds(dataclasses.replace(first, account=found), module)


class Spread(Pair):
    """Towers whose features are what takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 256)) for _ in range(2))


def test_features_count_once_and_their_gradients() -> None:
    """Planted: either left out; features counted with the loss, too; and those of the last pass kept through the next
    one."""
    torch.manual_seed(0)
    module = Spread()
    loss = lambda image, text, scale: scale * (image[:, :1] * text[:, :1]).sum()  # noqa: E731
    bounds(planned(module, loss=loss, treatments=("cached",), micro_batch=16), module)


def test_graphs_of_towers_behind_are_gone_when_a_tower_takes_most() -> None:
    """Planted: they count beside what the first tower computes again."""
    (module, _), first = wide(), of_a_small_loss()
    image, text = (each.name for each in first.problem.costs.towers)
    towers = [TowerPlan(image, checkpointed=Part(ROWS, ROWS)), TowerPlan(text, kept=Part(ROWS, 16))]
    bounds(dataclasses.replace(first, account=account(first.problem, towers, first.account.loss)), module)


@pytest.mark.parametrize("samples", [1, 11, 21])
def test_the_last_micro_batch_counts_where_it_takes_more(samples: int) -> None:
    """One sample takes 900 bytes beside its graph, a gradient of weights, and 10 samples take 10."""
    graph = PassCosts((1, 10), (1.0, 1.0), (100, 1000), (100, 1000), (1.0, 1.0), (1000, 1010))
    costs = StepCosts("h200", (TowerCosts("image", 1, 0, graph, graph),), 1, "fp32", 0, 0, 0)
    problem = dataclasses.replace(of_a_small_loss().problem, costs=costs, samples=samples)
    found = account(problem, [TowerPlan("image", kept=Part(samples, 10))], LossCosts(0, 0.0))
    assert found.bytes_in("backward") == 100 * samples + 900 + 2 * samples


def test_random_states_count_beside_graphs_of_single_samples() -> None:
    """Of a block that is computed again: 5 KB each before and behind it, where a graph takes 2 KB."""
    module, first = wide()
    costs = first.problem.costs
    image, text = (each.name for each in costs.towers)
    plan = planned(module, rows=ROWS // 4, costs=costs)
    towers = [
        TowerPlan(image, cached=Part(120, 1), checkpointed=Part(8, 1)),
        TowerPlan(text, cached=Part(120, 8), kept=Part(8, 8)),
    ]
    bounds(dataclasses.replace(plan, account=account(plan.problem, towers, plan.account.loss)), module)


def test_costs_may_be_given(tmp_path: Path) -> None:
    module, first = wide()
    write_costs(str(tmp_path / "wide.toml"), first.problem.costs)
    for costs in (first.problem.costs, tmp_path / "wide.toml"):
        again = planned(module, costs=costs)
        assert again.predicted_peak_bytes == first.predicted_peak_bytes


def test_costs_may_be_of_a_built_in_profile() -> None:
    plan = planned(wide()[0], "80GB", costs="vit_b_32-h200")
    assert plan.problem.costs.measured.startswith("open_clip ViT-B-32") and plan.predicted_time_s > 0
    with pytest.raises(InputError, match="a plan from a profile or an estimate has no towers to run"):
        plan.step()
    with pytest.raises(InputError, match=r"costs: 'vit' is neither .*; valid: vit_b_16-h200, "):
        planned(wide()[0], "80GB", costs="vit")


def test_the_largest_batch() -> None:
    module, first = wide()
    plan = planned(module, "64MiB", costs=first.problem.costs, batch_size=None)
    assert plan.batch_size == plan.largest_batch > 10_000
    with pytest.raises(InfeasibleError, match="the largest batch that fits has"):
        planned(module, "64MiB", costs=first.problem.costs, rows=plan.largest_batch + 1)


def test_the_state_of_an_optimiser_counts() -> None:
    module, first = wide()
    size = first.problem.costs.gradient_bytes

    def counted(optimizer: Any) -> int:
        plan = planned(module, costs=first.problem.costs, optimizer=optimizer, micro_batch=16)
        return next(item.size_bytes for item in plan.account.items if item.name == "optimizer")

    assert counted(None) == counted("adamw") == counted(torch.optim.AdamW(module.parameters())) == 2 * size
    assert counted(torch.optim.SGD(module.parameters(), lr=1.0)) == 0 and counted(12345) == 12345
    stepped = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
    assert counted(stepped) == size
    for each in module.parameters():
        each.grad = torch.zeros_like(each)
    stepped.step()
    module.zero_grad()
    assert size <= counted(stepped) <= size + 4
    assert counted(torch.optim.Adam(module.parameters(), amsgrad=True)) == 3 * size
    assert counted(torch.optim.RMSprop(module.parameters(), momentum=0.9, centered=True)) == 3 * size
    assert counted(torch.optim.Rprop(module.parameters())) == 2 * size
    with pytest.raises(InputError, match="optimizer: 'big' is unknown"):
        counted("big")
    with pytest.raises(InputError, match="the state of LBFGS is not known before its first step; give its bytes"):
        counted(torch.optim.LBFGS(module.parameters()))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.last(self.norm(x))
        return features


def test_batch_normalisation_is_refused_or_accepted() -> None:
    towers, example = [Normed(), Encoder(6)], batch(16, dtype=torch.float32)
    plan = functools.partial(infcl_gen.plan_step, towers, example, batch_size=32, memory="1GiB")
    with pytest.raises(InputError, match=r'norm normalises over a batch, .* eval\(\), or accept that: batch_norm="mic'):
        plan()
    assert plan(batch_norm="micro-batch").account.towers[0].samples == 32
    with pytest.raises(InputError, match="batch_norm: 'yes' is unknown"):
        plan(batch_norm="yes")
    towers[0].eval()
    assert plan().account.towers[0].samples == 32


WRONG: dict[str, tuple[Any, str]] = {
    "one example": (lambda m, x: ([m.image, m.text], x[:1], {}), "example: 1 inputs were given for 2 towers"),
    "no module": (lambda m, x: ([lambda y: y, m.text], x, {}), "no module is found in tower 0; name the modules"),
    "features of one number": (
        lambda m, x: ([lambda y: m.image(y).sum(), m.text], x, {}),
        r"towers: tower gave \(\) for 16 samples; expected features \(M, D\)",
    ),
    "an unknown treatment": (lambda m, x: ([m.image, m.text], x, {"treatments": ("lost",)}), "'lost' is unknown"),
    "a wrong size": (lambda m, x: ([m.image, m.text], x, {"memory": "much"}), "memory: 'much' is not a size"),
    "a wrong batch": (lambda m, x: ([m.image, m.text], x, {"batch_size": "many"}), "batch_size: 'many' is not a count"),
    "no samples": (lambda m, x: ([m.image, m.text], x, {"batch_size": 0}), "batch_size: 0 is out of range"),
    "micro-batches of none": (lambda m, x: ([m.image, m.text], x, {"micro_batch": 0}), "micro_batch: 0 is out of"),
    "a class": (lambda m, x: ([m.image, m.text], x, {"loss": nn.MSELoss}), r"MSELoss is a class; .*: MSELoss\(\)"),
    "a denominator of nothing": (
        lambda m, x: ([m.image, m.text], x, {"denominator": len}),
        "denominator: is of a loss with targets; give targets=",
    ),
    "no treatments": (lambda m, x: ([m.image, m.text], x, {"treatments": ()}), "treatments: give one or more of"),
    "a treatment as text": (lambda m, x: ([m.image, m.text], x, {"treatments": "cached"}), "give one or more of"),
    "costs of other towers": (
        lambda m, x: (
            m.image,
            x[0],
            {"costs": wide()[1].problem.costs, "targets": m.image(x[0]).detach(), "loss": nn.MSELoss()},
        ),
        "costs: are of 2 towers",
    ),
    "no costs": (
        lambda m, x: ([m.image, m.text], x, {"costs": 3}),
        "costs: expected StepCosts, the name of a profile or its FILE.toml",
    ),
    "absent costs": (
        lambda m, x: ([m.image, m.text], x, {"costs": "absent.toml"}),
        "costs: cannot read 'absent.toml': No such file or directory",
    ),
    "autocast as text": (lambda m, x: ([m.image, m.text], x, {"autocast": "bf16"}), "expected torch.bfloat16 or torch"),
    "a model as text": (lambda m, x: ([m.image, m.text], x, {"model": "m"}), "model: expected a module, or a list"),
    "a group as text": (
        lambda m, x: ([m.image, m.text], x, {"group": "m"}),
        "group must be a ProcessGroup, .*, not 'm'",
    ),
    "towers as text": (lambda m, x: ("image", x, {}), "towers: expected modules, methods or functions, got 'image'"),
    "no towers": (lambda m, x: ([], x, {}), r"towers: expected modules, methods or functions, got \[\]"),
    "one tower": (
        lambda m, x: (m.image, x[0], {}),
        "a loss by its name takes two, and 1 were given; .*contrastive_loss",
    ),
    "a loss with ids": (
        lambda m, x: ([m.image, m.text], x, {"loss": "gemini"}),
        r"gemini needs query_ids and key_ids and negatives, which a step does not pass; .*'gemini', query_ids=\.\.\.\)",
    ),
    "a loss with a guide": (
        lambda m, x: ([m.image, m.text], x, {"loss": "distill"}),
        "distill needs guide_queries and guide_keys, which a step does not pass",
    ),
    "a scale with a graph": (
        lambda m, x: ([m.image, m.text], x, {"scale": nn.Parameter(torch.zeros(())).exp()}),
        r"scale: a tensor with a graph serves one step; give a function: lambda: log_scale\.exp\(\)",
    ),
    "a device of towers with values": (
        lambda m, x: ([m.image, m.text], x, {"device_profile": "h200"}),
        "device_profile: is for towers without values",
    ),
    "costs of other features": (
        lambda m, x: (
            [lambda image: m.image(image)[:, :3], lambda text: m.text(text)[:, :3]],
            x,
            {"model": m, "costs": wide()[1].problem.costs},
        ),
        r"costs: are of features of D = \d+ in fp32; the towers give 3 in fp32",
    ),
    "towers of two widths": (
        lambda m, x: ([m.image, lambda text: m.text(text)[:, :3]], x, {"model": m}),
        "gives 3 features; 'clip' compares features of one width",
    ),
    "one input for all": (
        lambda m, x: ([m.image, m.text], x[0], {}),
        "example: expected a list with an input for each",
    ),
    "forgotten targets": (
        lambda m, x: (m.image, x[0], {"loss": nn.MSELoss()}),
        "loss: MSELoss compares outputs with targets; give targets= of the example",
    ),
    "a loss of each sample": (
        lambda m, x: ([m.image, m.text], x, {"loss": lambda a, b, scale: (a * b).sum(1)}),
        r"loss: gave \(\d+,\); expected one number",
    ),
    "a scale as text": (
        lambda m, x: ([m.image, m.text], x, {"scale": "x"}),
        "scale: expected a number, tensor or func",
    ),
    "a bias as text": (lambda m, x: ([m.image, m.text], x, {"bias": "x"}), "bias: expected what scale= takes, got 'x'"),
    "a seed as a generator": (
        lambda m, x: ([m.image, m.text], x, {"generators": [3]}),
        "a list of generators of torch",
    ),
    "treatments as a number": (lambda m, x: ([m.image, m.text], x, {"treatments": 3}), "treatments: give one or more"),
    "too little memory": (lambda m, x: ([m.image, m.text], x, {"memory": 1000}), "1000 B are allowed, and no batch"),
    "two devices": (
        lambda m, x: ([m.image, nn.Linear(6, 8, device="meta")], x, {}),
        "towers: their parameters are on cpu, meta; a step runs on one device",
    ),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_wrong_arguments_are_refused(what: str) -> None:
    change, message = WRONG[what]
    towers, example, options = change(pair(dtype=torch.float32), batch(16, dtype=torch.float32))
    with pytest.raises((InputError, InfeasibleError), match=message):
        infcl_gen.plan_step(towers, example, **{"batch_size": 64, "memory": "1GiB", **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            {"tokens": 0, "mask": 0},
            "got {'tokens': tensor, 'mask': tensor}; the step is planned for {'tokens': tensor}",
        ),
        ([0], r"got \[tensor\]; the step is planned for {'tokens': tensor}"),
        (0, "got tensor; the step is planned for {'tokens': tensor}"),
    ],
)
def test_inputs_of_another_structure_are_refused(text: Any, message: str) -> None:
    images, texts = batch(40)
    with pytest.raises(InputError, match=message):
        of_tokens().step()(images, torch.utils._pytree.tree_map(lambda _: texts, text))


@functools.cache
def of_tokens() -> StepPlan:
    module, (images, texts) = pair(), batch(40)
    towers = [module.image, lambda given: module.text(given["tokens"])]
    return infcl_gen.plan_step(towers, [images, {"tokens": texts}], batch_size=40, memory="1GiB")


class TestTowersWithoutValues:
    """Estimates where no GPU is at hand."""

    @staticmethod
    @functools.cache
    def planned(blocks: tuple[int, int] = (1, 1), **options: Any) -> StepPlan:
        with FakeTensorMode():
            towers = [Encoder(6, width=64, blocks=blocks[0]), Encoder(6, width=32, blocks=blocks[1])]
        given: dict[str, Any] = {"batch_size": 4096, "device_profile": "h200", "memory": "1GiB"}
        return infcl_gen.plan_step(towers, batch(16, dtype=torch.float32), **given | options)

    def test_bytes_are_those_that_are_measured(self) -> None:
        plan = self.planned((4, 3), device_profile="h200", memory="auto", micro_batch=16)
        found, measured = plan.problem.costs, wide()[1].problem.costs
        assert found.device == "h200" and found.gradient_bytes == measured.gradient_bytes
        for name in ("kept", "checkpointed"):
            for mine, true in zip(found.towers, measured.towers, strict=True):
                more, few = (
                    [getattr(each, name).at("kept_bytes", size) for each in (mine, true)] for size in (256, 64)
                )
                estimated, passes = (a - b for a, b in zip(more, few, strict=True))  # without what all sizes keep
                assert 0.95 * passes < estimated < 1.05 * passes

    def test_more_products_take_longer_and_memory_is_that_of_the_device(self) -> None:
        slow, fast = (self.planned(device_profile=name, memory="auto", micro_batch=16) for name in ("a100", "h200"))
        assert slow.predicted_time_s > fast.predicted_time_s
        assert fast.problem.memory_bytes == int(0.97 * load_profile("h200").memory_bytes)

    def test_such_a_plan_does_not_run(self) -> None:
        with pytest.raises(InputError, match="from a profile or an estimate has no towers"):
            self.planned(device_profile="h200", memory="auto", micro_batch=16).step()

    def test_what_it_needs_is_named(self) -> None:
        with pytest.raises(InputError, match="device_profile: is required for towers without values"):
            self.planned(device_profile=None)
        with pytest.raises(
            InputError, match="memory: 500 GiB on each device exceeds the 139 GiB of one h200; give less"
        ):
            self.planned(memory="500GiB")
        with pytest.raises(InputError, match="towers without values are planned with a built-in loss"):
            self.planned(loss=dense)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("wrapper", nightly(["ddp", "fsdp"], ["fsdp"]))
def test_ranks_plan_together(wrapper: str, package_cache: str) -> None:
    first, second = run_ranks("tests.step.ranks:planned", {"wrapper": wrapper, "cache": package_cache}, 2, 120.0)
    assert first["plan"]["memory_bytes"] == 32 << 20  # of the rank that has less
    assert first["plan"] == second["plan"] and first["plan"]["wrapper"] == {"ddp": "ddp", "fsdp": "fsdp2"}[wrapper]
    assert max(first["error"], second["error"]) < 1e-12
    assert "static_graph=True of DistributedDataParallel allows one pass per step" in first["refused"]


class Linear(Probe):
    """A pass of a sample takes 100 bytes, and a micro-batch 10 s and 1 s a sample; 200 samples do not fit."""

    def __init__(self, memory_bytes: int, largest: int = 1000, agree: Any = bool) -> None:
        self.limits, self.sizes = Limits(largest, memory_bytes, agree), []
        self.model: Any = types.SimpleNamespace(device=torch.device("cpu"))

    def row(self, size: int, backward: bool) -> tuple[float, int, int, float, int]:
        self.sizes.append(size)
        if size > 200:
            raise torch.OutOfMemoryError("too large")
        return 10.0 + size, 100 * size, 50 * size, 0.0, 0


@pytest.mark.parametrize(
    ("memory", "largest", "sizes"),
    [
        (9_000 / MOST_MEMORY, 1000, [16, 32, 64, 80]),
        (11_200 / MOST_MEMORY, 1000, [16, 32, 64, 112]),
        (12_799 / MOST_MEMORY, 1000, [16, 32, 64, 112]),
        (12_800 / MOST_MEMORY, 1000, [16, 32, 64, 128]),
        (6_400 / MOST_MEMORY, 1000, [16, 32, 64]),
        (1e9, 100, [16, 32, 64, 100]),
        (1e9, 10, [5, 10]),
    ],
)
def test_the_largest_micro_batch_that_is_measured_nearly_fills_the_memory(
    memory: float, largest: int, sizes: list[int]
) -> None:
    """Planted: only doubled sizes, of which the largest may take half of it."""
    assert Linear(math.ceil(memory), largest).costs(backward=True).sizes == tuple(sizes)


def test_a_micro_batch_that_did_not_fit_is_not_among_the_sizes() -> None:
    """Those of fewer quarters follow. Planted: none does."""
    probe = Linear(10**9)
    assert probe.costs(backward=True).sizes == (16, 32, 64, 128, 192) and probe.sizes[-3:] == [256, 224, 192]


def test_a_size_that_another_rank_cannot_pass_is_not_among_the_sizes() -> None:
    asked: list[bool] = []

    def agree(mine: bool) -> bool:
        asked.append(mine)
        return mine and len(asked) <= 3  # 16 fits, larger ones are faster, 32 is predicted to fit; then no more

    assert Linear(10**9, agree=agree).costs(backward=True).sizes == (8, 16)
