"""The choice of treatments: exact for few micro-batches, never beyond the memory, and clear where nothing fits."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.inputs.problem import MAX_BATCH
from infcl_gen.step import choose as choosing
from infcl_gen.step.account import PHASES, Account, LossCosts, StepProblem, account
from infcl_gen.step.choose import choose, largest_samples
from infcl_gen.step.costs import PassCosts, StepCosts, TowerCosts, costs_text, profile_names, read_costs, write_costs
from infcl_gen.step.plan import Part, TowerPlan
from infcl_gen.step.planner import PlannedLoss, plan_from_costs
from tests.documents import commands
from tests.step.costs import COSTS, FROZEN, IMAGE, MB, SIZES, TEXT, Loss
from tests.test_cli import run
from tests.tiers import examples

PROFILES = Path(choosing.__file__).parent / "profiles"
SMALL = (2, 4, 8)  # micro-batches, where all plans are compared


def problem(samples: int = 64, memory_mb: int = 500, costs: StepCosts = COSTS, **options: Any) -> StepProblem:
    return StepProblem(costs, samples, memory_mb * MB, Loss(), **options)


@examples(5, 50)
@hypothesis.given(st.integers(4, 8), st.integers(60, 400), st.sampled_from([0, 2 * MB]))
def test_the_choice_for_two_towers_is_the_best_of_all(samples: int, memory_mb: int, state_bytes: int) -> None:
    towers = tuple(dataclasses.replace(each, state_bytes=state_bytes) for each in (IMAGE, TEXT))
    given = problem(samples, memory_mb, dataclasses.replace(COSTS, towers=towers))
    found, best_s, chosen = compared(given, *(everything(given, tower, samples) for tower in towers))
    if chosen is not None:
        assert chosen.time_s <= best_s * (1 + 1e-9) or not _sensible_is_best(given, found, best_s)


def compared(given: StepProblem, *ways: list[TowerPlan]) -> tuple[list[Account], float, Account | None]:
    """All accounts of the towers' ways, the least seconds of those that fit, and what is chosen; None where neither
    fits. What is chosen fits."""
    found = [
        account(given, plans, loss)
        for plans in itertools.product(*ways)
        for loss in given.losses.within_budgets(given.samples)
    ]
    best_s = min((each.time_s for each in found if each.peak_bytes <= given.memory_bytes), default=math.inf)
    try:
        chosen = choose(given)
    except InfeasibleError:
        assert best_s == math.inf
        return found, best_s, None
    assert chosen.peak_bytes <= given.memory_bytes
    return found, best_s, chosen


def everything(given: StepProblem, costs: Any, samples: int) -> list[TowerPlan]:
    """Every plan of a tower in equal micro-batches of measured sizes, written apart from the search."""
    found = []
    for cached, graph in itertools.product(SIZES, SIZES):
        cached, graph = min(cached, samples), min(graph, samples)
        for some in {*range(0, samples, graph), samples}:
            for others in {*range(0, samples - some, graph), samples - some}:
                rest = samples - some - others
                found.append(TowerPlan(costs.name, Part(rest, cached), Part(some, graph), Part(others, graph)))
    return list(dict.fromkeys(found))


@st.composite
def tower_costs(draw: st.DrawFn, name: str) -> TowerCosts:
    """Of any tower: what it keeps, how much less with checkpoints, how long a pass takes at least, and per sample."""
    kept_mb, share = draw(st.floats(1, 30)), draw(st.floats(0.05, 0.6))
    forward_us, again = draw(st.floats(5, 100)), draw(st.floats(0.7, 1.0))
    start_s, extra_mb = draw(st.sampled_from([0.0, 20e-6, 200e-6])), draw(st.floats(0.5, 10))
    backward_us = draw(st.floats(1.2, 2.2)) * forward_us

    def graph(size_mb: float, behind_us: float, more_mb: float) -> PassCosts:
        times = [tuple(start_s + us * 1e-6 * size for size in SMALL) for us in (forward_us, behind_us)]
        sizes = [tuple(round(mb * MB * size) for size in SMALL) for mb in (size_mb + more_mb / 3, size_mb)]
        behind = tuple(round((size_mb + more_mb) * MB * size) for size in SMALL)
        return PassCosts(SMALL, times[0], *sizes, times[1] if behind_us else (), behind if behind_us else ())

    return TowerCosts(
        name, 1024, 0, graph(0.001, 0, extra_mb), graph(kept_mb, backward_us, extra_mb),
        graph(share * kept_mb, backward_us + again * forward_us, (1 - share) * kept_mb / 6 + extra_mb),
    )  # fmt: skip


@examples(2, 50)
@hypothesis.given(st.integers(4, 8), st.floats(0.02, 1.0), tower_costs("image"), tower_costs("text"))
def test_the_choice_for_two_different_towers_is_within_one_percent(
    samples: int, share: float, image: TowerCosts, text: TowerCosts
) -> None:
    """Of all plans in equal groups: any micro-batches, and any numbers of them that are kept and checkpointed."""
    costs = dataclasses.replace(COSTS, towers=(image, text))
    most = account(problem(samples, 0, costs), [TowerPlan("", kept=Part(samples, samples))] * 2, LossCosts(0, 0.0))
    given = dataclasses.replace(problem(samples, 0, costs), memory_bytes=int(share * most.peak_bytes))
    _, best_s, chosen = compared(given, *(in_groups(tower.name, samples) for tower in costs.towers))
    assert chosen is None or chosen.time_s <= 1.01 * best_s


def in_groups(name: str, samples: int) -> list[TowerPlan]:
    """Every plan of a tower whose graphs are of one size of micro-batches, and whose cached ones of another."""
    found = set()
    for cached, graph in itertools.product(SMALL, SMALL):
        for some in {*range(0, samples, graph), samples}:
            for others in {*range(0, samples - some, graph), samples - some}:
                rest = samples - some - others
                found.add(TowerPlan(name, Part(rest, cached), Part(some, graph), Part(others, graph)))
    return list(found)


@hypothesis.given(st.integers(5, 20), st.integers(60, 500), st.integers(0, 3))
def test_the_choice_is_the_best_of_all(samples: int, memory_mb: int, seed: int) -> None:
    """Against every plan of one tower."""
    tower = dataclasses.replace((IMAGE, TEXT)[seed % 2], state_bytes=seed // 2 * MB)
    costs = dataclasses.replace(COSTS, towers=(tower,), cast_bytes=seed * MB, state_bytes=seed // 2 * 2 * MB)
    given = problem(samples, memory_mb, costs)
    found, best_s, chosen = compared(given, everything(given, tower, samples))
    if chosen is None:
        return
    if best_s == math.inf:
        sizes = {part.micro_batch for plan in chosen.towers for part in (plan.cached, plan.checkpointed, plan.kept)}
        assert min(sizes) < SIZES[0]
        return
    # Of sizes that are slower per sample some pairs are not tried.
    assert chosen.time_s <= best_s * (1 + 1e-9) or not _sensible_is_best(given, found, best_s)


def _sensible_is_best(given: StepProblem, found: list[Any], best_s: float) -> bool:
    best = next(each for each in found if each.time_s == best_s and each.peak_bytes <= given.memory_bytes)
    return all(
        part.micro_batch in choosing._sizes(given, costs, 0)
        for costs, plan in zip(given.costs.towers, best.towers, strict=True)
        for part in (plan.cached, plan.checkpointed, plan.kept)
        if part.samples
    )


def test_each_treatment_has_the_sizes_that_were_measured_of_it() -> None:
    """Graphs that are kept are measured up to smaller sizes than checkpointed ones. Planted: the sizes of one for all,
    and all sizes for each."""
    kept = IMAGE.kept
    assert kept is not None
    few = PassCosts(*(each[:3] for each in dataclasses.astuple(kept)))
    slow = dataclasses.replace(few, forward_s=tuple(2 * each for each in few.forward_s))
    costs = dataclasses.replace(COSTS, towers=tuple(dataclasses.replace(each, kept=slow) for each in (IMAGE, TEXT)))
    sizes = dict[str, set[int]]()
    for memory_mb in (100, 200, 400, 800, 1600, 6000):
        for plan in choose(dataclasses.replace(problem(256, memory_mb), costs=costs)).towers:
            for treatment, part in plan.parts():
                sizes.setdefault(treatment, set()).add(part.micro_batch)
    assert max(sizes["checkpointed"]) == SIZES[-1]
    assert max(sizes["cached"] | sizes.get("kept", set())) <= SIZES[2]


@examples(3, 500)
@hypothesis.given(st.integers(1, 300), st.integers(30, 10_000), st.sampled_from(["host", "device"]))
def test_more_memory_is_never_slower_and_never_exceeded(samples: int, memory_mb: int, inputs: str) -> None:
    times = []
    for size in (memory_mb, 2 * memory_mb):
        try:
            found = choose(problem(samples, size, inputs=inputs))
        except InfeasibleError as error:
            assert error.smallest_budget_bytes is not None and error.smallest_budget_bytes > size * MB
            continue
        assert max(map(found.bytes_in, PHASES)) <= size * MB
        assert [plan.samples for plan in found.towers] == [samples, samples]
        times.append(found.time_s)
    assert times == sorted(times, reverse=True)


def test_where_second_passes_need_much_micro_batches_are_larger() -> None:
    """What single samples would keep for theirs exceeds what larger activations take; the promise holds."""
    towers = tuple(dataclasses.replace(each, state_bytes=5 * MB) for each in (IMAGE, TEXT))
    given = problem(640, 100, dataclasses.replace(COSTS, towers=towers))
    with pytest.raises(InfeasibleError) as caught:
        choose(given)
    smallest = caught.value.smallest_budget_bytes
    assert smallest is not None and smallest < 640 * 5 * MB
    found = choose(dataclasses.replace(given, memory_bytes=smallest))
    assert found.peak_bytes <= smallest and min(plan.cached.micro_batch for plan in found.towers) > 8


def test_treatments_by_memory() -> None:
    """Plenty of memory keeps all graphs; little caches all; between, a mixture is faster than either."""
    plenty, little = choose(problem(640, 200_000)), choose(problem(640, 60))
    between = choose(problem(640, 10_000))
    assert all(plan.kept.samples == 640 for plan in plenty.towers)
    assert all(plan.cached.samples > 600 for plan in little.towers)
    used = {
        name for plan in between.towers for name in ("cached", "checkpointed", "kept") if getattr(plan, name).samples
    }
    assert len(used) > 1 and plenty.time_s < between.time_s < little.time_s
    assert between.time_s < choose(problem(640, 10_000, treatments=("cached",))).time_s


def test_what_does_not_fit_names_what_would() -> None:
    message = (
        r"a step of 6400 samples per device needs .*; 76.3 MiB are allowed, and the largest batch that fits has \d+"
    )
    with pytest.raises(InfeasibleError, match=message) as caught:
        choose(problem(6400, 80))
    smallest, largest = caught.value.smallest_budget_bytes, caught.value.largest_batch
    assert smallest is not None and largest is not None
    assert choose(dataclasses.replace(problem(6400), memory_bytes=smallest)).peak_bytes == smallest
    with pytest.raises(InfeasibleError):
        choose(dataclasses.replace(problem(6400), memory_bytes=smallest - 1))
    assert choose(problem(largest, 80)).peak_bytes <= 80 * MB
    with pytest.raises(InfeasibleError):
        choose(problem(largest + 1, 80))
    with pytest.raises(InfeasibleError, match="no batch fits"):
        choose(problem(6400, 3))
    with pytest.raises(InfeasibleError, match=rf"fits has {4 * largest} samples on 4 devices") as together:
        choose(problem(6400, 80, world_size=4))
    assert together.value.largest_batch == 4 * largest


@hypothesis.given(
    st.integers(1, 2000),
    st.integers(1, 8),
    st.sampled_from([0, 1, 10**4]),
    st.sampled_from([1, 77, 4096]),
    st.booleans(),
)
def test_the_largest_batch_is_that_of_a_bisection(
    memory_mb: int, world_size: int, quadratic: int, tile: int, on_host: bool
) -> None:
    """Also where the loss's memory grows by steps or with the square of the batch; in few accounts if it is linear."""

    class Stairs(Loss):
        asked = 0

        def smallest_bytes(self, samples: int) -> int:
            self.asked += 1
            rows = -(-samples // tile) * tile
            return 10_000 * rows + quadratic * rows**2

    losses = Stairs()
    given = StepProblem(COSTS, 1, memory_mb * MB, losses, world_size=world_size, inputs="host" if on_host else "device")
    found, asked = largest_samples(given), losses.asked

    def peak_bytes(samples: int) -> int:
        return choosing._smallest(dataclasses.replace(given, samples=samples)).peak_bytes

    most = MAX_BATCH // world_size
    assert found == bisect.bisect_left(range(1, most + 1), True, key=lambda each: peak_bytes(each) > given.memory_bytes)
    assert asked <= (20 if tile == 1 and not quadratic else 100)


def test_the_largest_batch_is_planned_where_none_is_given() -> None:
    plan = plan_from_costs(COSTS, 500 * MB, Loss(), batch_size=None, world_size=4)
    assert plan.batch_size == plan.largest_batch == 4 * largest_samples(problem(1, 500, world_size=4))
    assert plan.predicted_peak_bytes <= 500 * MB
    with pytest.raises(InputError, match="a plan from a profile or an estimate has no towers to run"):
        plan.step()


def test_a_frozen_tower_passes_once() -> None:
    found = choose(problem(640, 200_000, dataclasses.replace(COSTS, towers=(FROZEN, TEXT))))
    assert found.towers[0].frozen and found.towers[0].cached.samples == 640 and found.towers[1].kept.samples == 640


def test_the_loss_of_a_frozen_tower_is_planned_without_its_gradient() -> None:
    for towers, frozen in (((FROZEN, TEXT), "query"), ((IMAGE, FROZEN), "key"), ((FROZEN, FROZEN), "none")):
        costs = dataclasses.replace(COSTS, towers=towers)
        assert PlannedLoss("clip", costs, 2).problem(64, None).frozen == frozen


def test_fully_sharded_parameters_are_shared_out() -> None:
    def sizes(**options: Any) -> Counter[str]:
        found = Counter[str]()
        for item in choose(problem(64, 5000, optimizer_bytes=10 * MB, **options)).items:
            found[item.name] += item.size_bytes
        return found

    alone, sharded = sizes(world_size=1), sizes(world_size=5, wrapper="fsdp2")
    assert alone["parameters"] == 5 * MB and sharded["parameters"] == MB
    assert sharded["optimizer"] == 2 * MB and sharded["gradients"] == 5 * MB
    assert sharded["own gradients"] == MB and not alone["own gradients"]
    replicated = sizes(world_size=5, wrapper="ddp")
    assert replicated["bucket"] == 5 * MB and not alone["bucket"]
    assert replicated["DDP's buckets"] == 5 * MB and not sharded["DDP's buckets"]


def test_inputs_from_the_host_take_their_time() -> None:
    slow = dataclasses.replace(COSTS, host_to_device_gbs=0.5)
    plain, host, device = (
        choose(problem(640, 5000, costs, inputs=inputs)).time_s
        for costs, inputs in ((COSTS, "host"), (slow, "host"), (slow, "device"))
    )
    assert host > 1.3 * plain and device == pytest.approx(plain, rel=0.05)


def test_micro_batches_may_be_given() -> None:
    found = choose(problem(640, 5000, micro_batch=24))
    parts = [part for plan in found.towers for part in (plan.cached, plan.checkpointed, plan.kept) if part.samples]
    assert {part.micro_batch for part in parts} == {24}


class TestProfiles:
    def test_they_survive_a_file(self, tmp_path: Path) -> None:
        for costs in (
            COSTS,
            dataclasses.replace(COSTS, towers=(FROZEN,), device='a "b"\n', versions={}, measured='"x"'),
        ):
            write_costs(tmp_path / "costs.toml", costs)
            again = read_costs(tmp_path / "costs.toml")
            assert costs_text(again) == costs_text(costs)
            assert again.towers[0].without_graph.kept_bytes == costs.towers[0].without_graph.kept_bytes

    @pytest.mark.parametrize("name", profile_names())
    def test_built_in_ones(self, name: str) -> None:
        """Written by `write_costs`; a pair of a model takes the memory that was measured by itself: 33.5 MB, 249 MB."""
        costs = read_costs(name)
        assert (PROFILES / f"{name}.toml").read_text() == costs_text(costs)
        assert [tower.name for tower in costs.towers] == ["image", "text"] and costs.device == name.split("-")[-1]
        assert costs.measured and {"torch", "open_clip"} <= {*costs.versions}
        pair_bytes = sum(tower.kept.at("kept_bytes", 256) / 256 for tower in costs.towers if tower.kept)
        known_mb = {"vit_b_32-h200": 33.5, "vit_l_14-h200": 249.0}
        assert name not in known_mb or pair_bytes / MB == pytest.approx(known_mb[name], rel=0.05)

    def test_they_are_found_by_name_or_file(self) -> None:
        assert read_costs("vit_b_32-h200") == read_costs(PROFILES / "vit_b_32-h200.toml")
        for name in ("vit_b_32", "costs", "../profiles/vit_b_32-h200"):
            with pytest.raises(InputError, match=f"--profile: '{name}' .*; valid: {', '.join(profile_names())}"):
                read_costs(name)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("schema = 1", "schema = 2", "no profile of a step"),
            ("schema = 1", "schema = 1\nsize = 3", "unknown key 'size'"),
            ("dim = 512", 'dim = "x"', "Expected `int`"),
            ("sizes = [4, 8,", "sizes = [8, 4,", "positive and ascending"),
            ("kept_bytes = [4000, 8000, 16000, 32000, 64000]", "kept_bytes = [4000]", "kept_bytes must have 5 values"),
            ("kept_bytes = [4000,", "kept_bytes = [-4000,", "of at least 0"),
        ],
    )
    def test_wrong_ones_are_refused(self, old: str, new: str, message: str, tmp_path: Path) -> None:
        text = costs_text(COSTS)
        assert old in text
        (tmp_path / "costs.toml").write_text(text.replace(old, new, 1))
        with pytest.raises(InputError, match=message):
            read_costs(tmp_path / "costs.toml")


class TestCommand:
    @pytest.fixture
    def profile(self, tmp_path: Path) -> str:
        write_costs(tmp_path / "costs.toml", COSTS)
        return str(tmp_path / "costs.toml")

    def test_a_cluster_is_planned_without_a_gpu(self, profile: str) -> None:
        flags = ("--profile", profile, "--batch-size", "4M", "--devices", "8", "--memory-budget", "80GB")
        done = run("step", *flags)
        assert done.exit_code == 0 and not done.stderr
        for part in ("a batch of 4194304 on 8 devices (h200)", "Memory per device", "largest batch for this memory"):
            assert part in done.stdout
        plan = json.loads(run("step", *flags, "--json").stdout)["plan"]
        assert plan["predicted_peak_bytes"] <= 80 * 10**9 and plan["devices"] == 8 and plan["wrapper"] == "ddp"
        assert sum(each["time_s"] for each in plan["phases"]) == pytest.approx(plan["predicted_time_s"])
        assert max(each["bytes"] for each in plan["phases"]) == plan["predicted_peak_bytes"]
        assert {each["treatments"][0] for each in plan["alternatives"]} == {"cached", "checkpointed", "kept"}

    def test_the_documented_command(self) -> None:
        (line,) = (line for page, line in commands() if page == "docs/steps.md")
        done = run(*shlex.split(line)[1:])
        assert done.exit_code == 0 and "A step of image and text: a batch of 4194304 on 8 devices" in done.stdout
        assert "Costs of towers: open_clip ViT-L-14, " in done.stdout

    def test_what_people_read(self, profile: str) -> None:
        """What Python prints; the phase of the peak; a batch that is rounded up; nothing that takes no memory."""
        flags = ("--profile", profile, "--memory-budget", "4GiB", "--devices", "3", "--inputs", "host")
        printed = run("step", *flags, "--batch-size", "100").stdout
        assert "a batch of 102 on 3 devices (h200); 100 is rounded up to equal parts" in printed
        assert "rounded" not in run("step", *flags, "--batch-size", "102").stdout and " 0 B" not in printed
        assert len([line for line in printed.splitlines() if line.endswith("GiB  peak")]) == 1
        assert any(line.split()[:5] == ["parameters", "4.8", "MiB", "all", "and"] for line in printed.splitlines())
        plan = plan_from_costs(
            COSTS, 4 << 30, PlannedLoss("clip", COSTS, 3),
            batch_size=100, world_size=3, wrapper="ddp", optimizer_bytes=2 * COSTS.gradient_bytes,
        )  # fmt: skip
        assert f"{plan}\n" == printed

    def test_a_profile_of_a_model_with_targets(self, profile: str, tmp_path: Path) -> None:
        tower = dataclasses.replace(IMAGE, feature_bytes=0, checkpointed=None)
        costs = dataclasses.replace(COSTS, dim=0, dtype="fp32", towers=(tower,))
        write_costs(tmp_path / "targets.toml", costs)
        flags = ("--profile", str(tmp_path / "targets.toml"), "--memory-budget", "2GiB", "--batch-size", "1000")
        printed = run("step", *flags).stdout
        assert "  streamed  " in printed and "features" not in printed and "  cached  " not in printed
        plan = json.loads(run("step", *flags, "--json").stdout)["plan"]
        assert plan["towers"][0]["streamed"]["samples"] == 1000 and plan["alternatives"] == []
        # The memory of a device without a profile is not known, that of an H200 is.
        for device, code in (("of my own", 0), ("h200", 2)):
            write_costs(tmp_path / "roomy.toml", dataclasses.replace(costs, device=device))
            roomy = ("--profile", str(tmp_path / "roomy.toml"), "--memory-budget", "500GiB", "--batch-size", "1000")
            assert run("step", *roomy).exit_code == code
        for more in (("--loss", "clip"), ("--treatments", "kept")):
            done = run("step", *flags, *more)
            assert done.exit_code == 2 and "--loss, --treatments: are of a contrastive step" in done.stderr

    def test_without_a_batch_the_largest_is_planned(self, profile: str) -> None:
        done = run("step", "--profile", profile, "--memory-budget", "4GiB", "--json")
        plan = json.loads(done.stdout)["plan"]
        assert plan["batch_size"] == plan["largest_batch"] > 1000

    @pytest.mark.parametrize(
        ("flags", "code", "message"),
        [
            ((), 2, "--profile: is required"),
            (
                ("--profile", "vit_l_14", "--memory-budget", "1GB"),
                2,
                "valid: vit_b_16-h200, vit_b_32-h200, vit_l_14-h2",
            ),
            (("--profile", "P"), 2, "--memory-budget: is required"),
            (
                ("--profile", "vit_l_14-h200", "--memory-budget", "500GiB"),
                2,
                "500 GiB on each device exceeds the 139 GiB",
            ),
            (("--profile", "none.toml", "--memory-budget", "1GB"), 2, "cannot read 'none.toml'"),
            (("--profile", "P", "--memory-budget", "1GB", "--batch-size", "16M"), 3, "the largest batch that fits has"),
            (("--profile", "P", "--memory-budget", "1GB", "--wrapper", "zero"), 2, "--wrapper: 'zero' is unknown"),
            (
                ("--profile", "P", "--memory-budget", "1GB", "--optimizer", "big"),
                2,
                "--optimizer: 'big' is unknown; valid: none, ",
            ),
            (("--profile", "P", "--memory-budget", "1GB", "--treatments", "kept,lost"), 2, "'lost' is unknown"),
            (("--profile", "P", "--memory-budget", "1GB", "--inputs", "disk"), 2, "--inputs: 'disk' is unknown"),
        ],
    )
    def test_wrong_flags(self, flags: tuple[str, ...], code: int, message: str, profile: str) -> None:
        done = run("step", *(profile if each == "P" else each for each in flags))
        assert done.exit_code == code and message in done.stderr and len(done.stderr.splitlines()) == 1
