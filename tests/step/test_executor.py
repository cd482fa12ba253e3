"""A planned step against one plain large batch, in fp64."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infcl_gen.errors import InputError
from infcl_gen.step import executor
from infcl_gen.step.blocks import blocks_of
from infcl_gen.step.executor import Tower, TrainingStep, UnrepeatableError
from infcl_gen.step.feed import Samples
from infcl_gen.step.plan import Part, TowerPlan
from tests.step.models import DIM, Pair, batch, dense, difference, features_of, gradients, model_of, pair, plain
from tests.tiers import combined, in_pairs, nightly

ROWS = 23
PLANS = {
    "cached": {"cached": Part(ROWS, 5)},
    "checkpointed": {"checkpointed": Part(ROWS, 7)},
    "kept": {"kept": Part(ROWS, 4)},
    "offloaded": {"offloaded": Part(ROWS, 4)},
    "all four": {"cached": Part(5, 2), "offloaded": Part(9, 4), "checkpointed": Part(4, 3), "kept": Part(5, 4)},
    "mixture": {"cached": Part(9, 2), "checkpointed": Part(8, 3), "kept": Part(6, 4)},
    "alone": {"cached": Part(22, 22), "kept": Part(1, 1)},
}


def plans(image: str, text: str) -> list[TowerPlan]:
    return [TowerPlan("image", **PLANS[image]), TowerPlan("text", **PLANS[text])]


EVERY_PAIR = list(itertools.product(sorted(PLANS), repeat=2))
PAIRS = nightly(EVERY_PAIR, EVERY_PAIR[::5])  # each plan of a tower beside one or two of the other


@pytest.mark.parametrize(("image", "text"), PAIRS)
def test_gradients_are_those_of_one_large_batch(image: str, text: str) -> None:
    module, inputs = pair(), batch(ROWS)
    loss = TrainingStep(plans(image, text), model_of(module))(*inputs)
    true, of_plain = plain(module, *inputs)
    assert not loss.requires_grad and abs(float(loss - true)) < 1e-12
    assert difference(gradients(module), of_plain) < 1e-12


def kept_step(module: Pair, towers: Sequence[Any], plan: Sequence[TowerPlan], inputs: Sequence[Tensor]) -> Tensor:
    """The same micro-batches in the same order with all graphs kept, written apart from the executor."""
    image, text = features_of(plan, towers, inputs)
    loss = dense(image, text, module.log_scale.exp())
    loss.backward()
    return loss.detach()


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "Python": lambda: random.Random(3),
    "NumPy": lambda: np.random.default_rng(3),
    "NumPy, Mersenne Twister": lambda: np.random.Generator(np.random.MT19937(3)),
}


class Noise:
    """What is added from a generator, of torch or another, and from Python's own numbers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.seed()

    def seed(self) -> None:
        random.seed(3)
        np.random.seed(3)
        self.generator = GENERATORS[self._kind]()

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            return x + random.random() * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        slope = torch.linspace(-1.0, 1.0, x.shape[-1], dtype=x.dtype)  # layer norm takes no notice of a number
        return x + random.random() * self.generator.random() * slope


class TestRandomNumbers:
    """Dropout: gradients are those of the same micro-batches with all graphs kept and the same generator state."""

    @pytest.mark.parametrize(("image", "text"), PAIRS)
    def test_a_second_pass_draws_what_the_first_drew(self, image: str, text: str) -> None:
        inputs, plan = batch(ROWS), plans(image, text)
        module, other = pair(dropout=0.3), pair(dropout=0.3)
        torch.manual_seed(5)
        loss = TrainingStep(plan, model_of(module))(*inputs)
        after = torch.get_rng_state()
        torch.manual_seed(5)
        true = kept_step(other, (other.image, other.text), plan, inputs)
        assert abs(float(loss - true)) < 1e-12 and difference(gradients(module), gradients(other)) < 1e-12
        assert torch.equal(after, torch.get_rng_state())

    @pytest.mark.parametrize("kind", sorted(GENERATORS))
    def test_other_generators_are_replayed_where_they_are_named(self, kind: str) -> None:
        module, inputs, plan, noise = pair(), batch(ROWS), plans("cached", "kept"), Noise(kind)
        towers = (lambda x: module.image(noise(x))), module.text
        with pytest.raises(UnrepeatableError, match=r"image: rows 0 to 5 .*\(generators=\)"):
            TrainingStep(plan, model_of(module, towers))(*inputs)
        module.zero_grad()
        noise.seed()
        TrainingStep(plan, model_of(module, towers, generators=(noise.generator,)))(*inputs)
        found = gradients(module)
        module.zero_grad()
        noise.seed()
        kept_step(module, towers, plan, inputs)
        assert difference(found, gradients(module)) < 1e-12

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("kind", sorted(GENERATORS))
    def test_blocks_are_computed_again_from_the_same_random_numbers(self, kind: str, named: bool) -> None:
        """Of a generator that is named, and of Python's and NumPy's own."""
        module, inputs, noise = pair(), batch(ROWS), Noise(kind)
        forward, slope = module.image.blocks[1].forward, torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)
        own = lambda x: x + slope * random.random() * np.random.rand()  # noqa: E731
        module.image.blocks[1].forward = lambda x: forward(noise(x) if named else own(x))
        plan, found = plans("checkpointed", "kept"), []
        for planned in (True, False):
            module.zero_grad()
            noise.seed()
            if planned:
                TrainingStep(plan, model_of(module, generators=(noise.generator,) * named))(*inputs)
            else:
                kept_step(module, (module.image, module.text), plan, inputs)
            found.append(gradients(module))
        assert difference(*found) < 1e-12


def mixed(*frozen: str) -> list[TowerPlan]:
    return [dataclasses.replace(each, frozen=each.name in frozen) for each in plans("mixture", "mixture")]


def test_a_shared_tower() -> None:
    module, inputs = pair(shared=True), batch(ROWS)
    TrainingStep(mixed(), model_of(module))(*inputs)
    assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12


def test_a_frozen_tower() -> None:
    module, inputs = pair(), batch(ROWS)
    module.image.requires_grad_(False)
    plan = [TowerPlan("image", cached=Part(ROWS, 5), frozen=True), mixed()[1]]
    step = TrainingStep(plan, model_of(module))
    step(*inputs)
    assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12
    module.image.requires_grad_(True)
    with pytest.raises(InputError, match="were frozen or unfrozen since the step was planned; plan it again"):
        step(*inputs)


@pytest.mark.parametrize("rows", [2, 3, 9, 14, 22])
def test_smaller_batches_than_planned(rows: int) -> None:
    module, inputs = pair(), batch(rows)
    TrainingStep(mixed(), model_of(module))(*inputs)
    assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12


def test_gradients_accumulate_over_steps() -> None:
    module, step_of = pair(), [batch(ROWS, seed) for seed in (1, 2)]
    step = TrainingStep(mixed(), model_of(module))
    for inputs in step_of:
        step(*inputs)
    first, second = (plain(module, *inputs)[1] for inputs in step_of)
    assert difference(gradients(module), {name: first[name] + second[name] for name in first}) < 1e-12


MOMENTS = [
    *(("forward", moment) for moment in range(1, 40, 3)),  # the tower has 15 passes
    *(("backward", moment) for moment in (1, 4, 9, 10, 11)),  # and 10 of them are differentiated
    ("loss", 1),
    ("reduction", 1),
]


@pytest.mark.parametrize(("moment", "before"), combined(MOMENTS, [False, True]))
def test_an_interrupt_leaves_gradients_as_they_were(
    moment: tuple[str, int], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any micro-batch of any pass, in the loss, and where ranks reduce gradients."""
    place, number = moment
    module, inputs, calls = pair(dropout=0.2), batch(ROWS), {"forward": 0, "backward": 0, "loss": 0, "reduction": 0}
    if before:
        dense(module.image(inputs[0]), module.text(inputs[1]), module.log_scale.exp()).backward()
    held, values = gradients(module), {name: each.clone() for name, each in module.named_parameters()}

    def happens(what: str) -> None:
        calls[what] += 1
        if (what, calls[what]) == (place, number):
            raise KeyboardInterrupt

    def text(x: Tensor) -> Tensor:
        happens("forward")
        features: Tensor = module.text(x)
        if features.requires_grad:
            features.register_hook(lambda gradient: happens("backward"))
        return features

    def loss(*features: Tensor) -> Tensor:
        happens("loss")
        return dense(*features)

    reduce = executor.GradientSync.reduce
    monkeypatch.setattr(executor.GradientSync, "reduce", lambda self: [reduce(self), happens("reduction")])
    step = TrainingStep(mixed(), model_of(module, (module.image, text), loss=loss, value=lambda x: x))
    if moment in MOMENTS[:5] + MOMENTS[13:17] + MOMENTS[18:]:
        with pytest.raises(KeyboardInterrupt):
            step(*inputs)
        assert difference(gradients(module), held) == 0 if held else not gradients(module)
    else:
        step(*inputs)
        assert (calls["forward"], calls["backward"]) == (15, 10)
    assert all(torch.equal(each, values[name]) for name, each in module.named_parameters())
    assert not [block for block in module.modules() if "forward" in vars(block)]


PHASES = ("cached forward", "forward", "loss", "backward", "block again", "second pass", "second backward", "inputs")


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_in_a_phase_leaves_the_very_gradients(phase: str, before: bool) -> None:
    """In the last moment of each: a micro-batch of each treatment went before it, where the phase has several."""
    module, (images, texts), seen = pair(), batch(ROWS), list[str]()
    if before:
        plain_loss = dense(module.image(images), module.text(texts), module.log_scale.exp())
        plain_loss.backward()
    held = {name: (each.grad, None if each.grad is None else each.grad.clone()) for name, each in parameters(module)}
    values = {name: each.detach().clone() for name, each in parameters(module)}
    counts = {"cached forward": 5, "forward": 5, "loss": 1, "backward": 5, "block again": 3, "inputs": 12}
    last = {**counts, "second pass": 5, "second backward": 5}[phase]

    def happens(what: str) -> None:
        seen.append(what)
        if what == phase and seen.count(what) == last:
            raise KeyboardInterrupt

    def image(x: Tensor) -> Tensor:
        differentiated = "loss" in seen
        first = "forward" if torch.is_grad_enabled() else "cached forward"
        happens("second pass" if differentiated else first)
        features: Tensor = module.image(x)
        if features.requires_grad:
            features.register_hook(lambda _: happens("second backward" if differentiated else "backward"))
        return features

    def block(*_: object) -> None:
        if "backward" in seen and "second pass" not in seen:
            happens("block again")

    def loss(*features: Tensor) -> Tensor:
        happens("loss")
        return dense(*features)

    def make(rows: slice) -> Tensor:
        happens("inputs")
        return texts[rows]

    module.image.blocks[0].norm.register_forward_hook(block)
    step = TrainingStep(mixed(), model_of(module, (image, module.text), loss=loss, value=lambda x: x))
    with pytest.raises(KeyboardInterrupt):
        step(images, Samples(ROWS, make))
    for name, each in parameters(module):
        gradient, value = held[name]
        assert each.grad is gradient and torch.equal(each, values[name])
        assert gradient is None or torch.equal(gradient, value)
    assert not [inner for inner in module.modules() if "forward" in vars(inner)]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


@pytest.mark.parametrize("before", [False, True])
def test_buffers_are_those_of_one_pass(before: bool) -> None:
    """A counter, and a value that features depend on, which every pass in training mode changes; `before` such a step
    there is one that changes nothing."""

    class Moving(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
            self.register_buffer("still", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.passes += 1
            features: Tensor = self.inner(x * self.passes)
            return features

    module, other, inputs, plan = pair(), pair(), batch(ROWS), mixed()
    for each in (module, other):
        each.image = Moving(each.image)
    like = torch.empty(0, DIM, dtype=torch.float64)
    model = model_of(pair())._replace(
        towers=(Tower(module.image, like, (module,), blocks_of([module.image])), Tower(module.text, like, (module,))),
        scale=lambda: module.log_scale.exp(),
    )
    step = TrainingStep(plan, model)
    if before:
        module.eval()
        step(*inputs)
        module.zero_grad()
        module.train()
    step(*inputs)
    kept_step(other, (other.image, other.text), plan, inputs)
    assert difference(gradients(module), gradients(other)) < 1e-12
    assert float(module.image.passes) == float(other.image.passes) == 10


def test_gradients_are_wanted_where_they_are_switched_off() -> None:
    module, inputs = pair(), batch(ROWS)
    step = TrainingStep(mixed(), model_of(module))
    with torch.no_grad():
        step(*inputs)
    assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12
    with torch.inference_mode(), pytest.raises(InputError, match="call it outside torch"):
        step(*inputs)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_that_is_a_parameter_and_a_bias(shape: tuple[int, ...]) -> None:
    module, inputs = pair(), batch(ROWS)
    scale, bias = (nn.Parameter(torch.full(shape, value, dtype=torch.float64)) for value in (3.0, -0.5))
    TrainingStep(mixed(), model_of(module, scale=scale, bias=bias))(*inputs)
    found = [*gradients(module).items(), ("scale", scale.grad), ("bias", bias.grad)]
    module.zero_grad()
    scale.grad = None
    dense(module.image(inputs[0]), module.text(inputs[1]), scale).backward()
    true = [*gradients(module).items(), ("scale", scale.grad), ("bias", torch.zeros(shape, dtype=torch.float64))]
    for (name, mine), (_, other) in zip(found, true, strict=True):
        assert mine is not None and torch.allclose(mine, other, rtol=1e-11, atol=1e-14), name


def spectral(module: Pair) -> None:
    module.image.first = nn.utils.parametrizations.spectral_norm(module.image.first)
    module.image.blocks[0].up = nn.utils.parametrizations.spectral_norm(module.image.blocks[0].up)


def tied(module: Pair) -> None:
    module.text.last.weight = module.image.last.weight


def partly_frozen(module: Pair) -> None:
    module.image.blocks[0].requires_grad_(False)


def hooked(module: Pair) -> None:
    module.image.blocks[0].register_forward_hook(lambda _, __, output: 1.1 * output)
    module.image.blocks[1].register_full_backward_hook(lambda _, given, __: (0.5 * given[0],))


def checkpointed_inside(module: Pair) -> None:
    forward = module.image.blocks[0].forward
    module.image.blocks[0].forward = lambda x: checkpoint(forward, x, use_reentrant=False)


CHANGES = (spectral, tied, partly_frozen, hooked, checkpointed_inside)


@pytest.mark.parametrize(
    ("change", "image", "text"), in_pairs(CHANGES, ["cached", "checkpointed", "mixture"], ["cached", "kept"])
)
def test_towers_as_users_have_them(change: Callable[[Pair], None], image: str, text: str) -> None:
    module, other, inputs, plan = pair(dropout=0.2), pair(dropout=0.2), batch(ROWS), plans(image, text)
    for each in (module, other):
        torch.manual_seed(3)
        change(each)
    torch.manual_seed(3)
    TrainingStep(plan, model_of(module))(*inputs)
    torch.manual_seed(3)
    kept_step(other, (other.image, other.text), plan, inputs)
    assert difference(gradients(module), gradients(other)) < 1e-11
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(module.buffers(), other.buffers(), strict=True))


def test_nan_in_nan_out() -> None:
    module, inputs = pair(), batch(ROWS)
    inputs[0][3, 1] = float("nan")
    loss = TrainingStep(mixed(), model_of(module))(*inputs)
    assert loss.isnan() and all(each.isnan().any() for each in gradients(module).values())


def test_a_gradient_scaler() -> None:
    module, inputs = pair(), batch(ROWS)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    loss = TrainingStep(mixed(), model_of(module))(*inputs, scaler=scaler)
    true, of_plain = plain(module, *inputs)
    assert abs(float(loss - true)) < 1e-12
    assert difference(gradients(module), {name: 64 * each for name, each in of_plain.items()}) < 1e-12
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    assert difference(gradients(module), of_plain) < 1e-12


def test_a_scaler_skips_a_step_whose_gradients_overflow() -> None:
    module, inputs = pair(dtype=torch.float32), batch(ROWS, dtype=torch.float32)
    model = model_of(module, loss=lambda *features: 1e3 * dense(*features), value=lambda x: x)
    optimizer, step = torch.optim.SGD(module.parameters(), lr=0.1), TrainingStep(mixed(), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    values = [each.detach().clone() for each in module.parameters()]
    for overflows in (True, False):
        step(*inputs, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(map(torch.equal, module.parameters(), values)) == overflows
    assert scaler.get_scale() == 2.0**27


def test_several_losses_of_the_user_on_the_same_features() -> None:
    def both(image: Tensor, text: Tensor, scale: Tensor, bias: float) -> Tensor:
        return dense(image, text, scale) + bias * (image - text).square().mean()

    module, inputs = pair(), batch(ROWS)
    TrainingStep(mixed(), model_of(module, loss=both, bias=0.25, value=lambda loss: loss))(*inputs)
    found = gradients(module)
    module.zero_grad()
    both(module.image(inputs[0]), module.text(inputs[1]), module.log_scale.exp(), 0.25).backward()
    assert difference(found, gradients(module)) < 1e-12


def test_a_loss_without_use_for_a_tower() -> None:
    module, inputs = pair(), batch(ROWS)
    loss = TrainingStep(mixed(), model_of(module, loss=lambda image, text, scale: image.sum(), value=lambda x: x))
    loss(*inputs)
    assert gradients(module) and not [name for name in gradients(module) if name.startswith("text")]


def test_autocast_reaches_every_pass() -> None:
    """Weights that are cast in a pass without a graph get gradients in the next; the error is that of one batch."""
    module, inputs = pair(dtype=torch.float32), batch(ROWS, dtype=torch.float32)
    exact = plain(pair(dtype=torch.float64), *(x.double() for x in inputs))[1]
    TrainingStep(mixed(), model_of(module, autocast=torch.bfloat16))(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        of_plain = plain(module, *inputs)[1]
    error, of_plain_error = (
        difference({name: each.double() for name, each in found.items()}, exact)
        for found in (gradients(module), of_plain)
    )
    assert error < 2 * of_plain_error + 0.02


@pytest.mark.parametrize("around", [False, True])
def test_second_passes_have_the_autocast_of_the_first(around: bool) -> None:
    """Also where the user sets it around the step; and behind it there is none."""
    module, inputs, seen = pair(dtype=torch.float32), batch(ROWS, dtype=torch.float32), list[Any]()

    def image(x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()))
        features: Tensor = module.image(x)
        return features

    model = model_of(module, (image, module.text), autocast=torch.bfloat16)
    step = TrainingStep(plans("cached", "kept"), model._replace(autocast=None) if around else model)
    with torch.autocast("cpu", torch.bfloat16) if around else contextlib.nullcontext():
        step(*inputs)
    assert seen == [(True, torch.bfloat16, False)] * 5 + [(True, torch.bfloat16, True)] * 5
    assert not torch.is_autocast_enabled("cpu")


def test_second_passes_under_autocast_give_the_features_of_the_first_bit_by_bit() -> None:
    module, inputs, seen = pair(dtype=torch.float32), batch(ROWS, dtype=torch.float32), dict[bool, list[Tensor]]()

    def image(x: Tensor) -> Tensor:
        features: Tensor = module.image.last(module.image.first(x))
        seen.setdefault(torch.is_grad_enabled(), []).append(features.detach().clone())
        return features

    model = model_of(module, (image, module.text), autocast=torch.bfloat16)
    TrainingStep(plans("cached", "kept"), model)(*inputs)
    assert {each.dtype for some in seen.values() for each in some} == {torch.bfloat16}
    assert len(seen[False]) == 5 and all(map(torch.equal, seen[False], seen[True]))


def test_a_compiled_tower() -> None:
    module, inputs = pair(), batch(ROWS)
    compiled = torch.compile(module.image, backend="aot_eager")
    plan = [TowerPlan("image", cached=Part(13, 4), kept=Part(10, 5)), mixed()[1]]
    TrainingStep(plan, model_of(module, (compiled, module.text)))(*inputs)
    assert difference(gradients(module), plain(module, *inputs)[1]) < 1e-12


def test_a_checkpoint_between_steps_resumes_bit_by_bit(tmp_path: Path) -> None:
    """Parameters, the optimiser's state and the generators are all there is; a step keeps nothing for the next."""

    def begun() -> tuple[Pair, torch.optim.Optimizer, TrainingStep]:
        module = pair(dropout=0.3)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01), TrainingStep(mixed(), model_of(module))

    def trained(
        module: Pair, optimizer: torch.optim.Optimizer, step: TrainingStep, seeds: Sequence[int]
    ) -> list[Tensor]:
        losses = []
        for seed in seeds:
            losses.append(step(*batch(ROWS, seed)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    torch.manual_seed(7)
    whole = begun()
    losses = trained(*whole, [1, 2, 3, 4])
    torch.manual_seed(7)
    first = begun()
    trained(*first, [1, 2])
    states = {"model": first[0].state_dict(), "optimizer": first[1].state_dict(), "random": torch.get_rng_state()}
    torch.save(states, tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    second, states = begun(), torch.load(tmp_path / "checkpoint.pt")
    second[0].load_state_dict(states["model"])
    second[1].load_state_dict(states["optimizer"])
    torch.set_rng_state(states["random"])
    assert all(map(torch.equal, trained(*second, [3, 4]), losses[2:]))
    assert all(map(torch.equal, second[0].parameters(), whole[0].parameters()))


@pytest.mark.parametrize("frozen", [(), ("image",)])
def test_a_bar_is_at_its_end_when_the_step_is(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module, totals, passed = pair(), list[int](), list[int]()

    @contextlib.contextmanager
    def bar(passes: int) -> Iterator[Any]:
        totals.append(passes)
        yield lambda: passed.append(1)

    monkeypatch.setattr(executor, "bar", bar)
    module.image.requires_grad_(not frozen)
    plan = [TowerPlan("image", cached=Part(ROWS, 5), frozen=bool(frozen)), mixed()[1]]
    TrainingStep(plan, model_of(module), progress=True)(*batch(ROWS))
    assert totals == [len(passed)]


WRONG = {
    "one input": (lambda image, text: (image,), r"1 were given; the step takes 2: step\(image, text\)"),
    "too many samples": (
        lambda image, text: (torch.cat([image, image]), torch.cat([text, text])),
        "inputs: 46 samples were given; the step is planned for 23",
    ),
    "unequal samples": (lambda image, text: (image, text[:4]), "image and text have 23 and 4 samples; give equally"),
    "no rows": (lambda image, text: (image, 3), "inputs: text: has no tensor with rows"),
    "rows that differ": (lambda image, text: (image, {"a": text, "b": text[:4]}), "has tensors of 4, 23 rows"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_wrong_inputs_are_refused(what: str) -> None:
    change, message = WRONG[what]
    with pytest.raises(InputError, match=message):
        TrainingStep(mixed(), model_of(pair()))(*change(*batch(ROWS)))


def test_what_is_no_scaler_is_refused() -> None:
    with pytest.raises(InputError, match="scaler: 'dynamic' scales no loss; give a"):
        TrainingStep(mixed(), model_of(pair()))(*batch(ROWS), scaler="dynamic")


def test_a_loss_of_each_sample_is_refused() -> None:
    module = pair()
    model = model_of(module, loss=lambda image, text, scale: scale * (image * text).sum(1))
    with pytest.raises(InputError, match=r"loss: gave \(23,\); expected one number, a tensor \(\)"):
        TrainingStep(mixed(), model)(*batch(ROWS))
    assert not gradients(module)


def test_features_that_are_not_as_planned_are_refused() -> None:
    module = pair()
    for tower, message in ((lambda x: module.image(x)[:, :4], "planned for torch.float64"), (lambda x: [x], "list")):
        with pytest.raises(InputError, match=f"image: gave .*{message}"):
            TrainingStep(mixed(), model_of(module, (tower, module.text)))(*batch(ROWS))
    assert not gradients(module)
