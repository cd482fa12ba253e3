"""A plan for a whole training step, from what its towers cost: batch or largest batch, treatments, bytes, seconds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.inputs.text import check_word, parse_bytes, show
from infcl_gen.planning import Plan
from infcl_gen.step.account import PHASES, Account, LossCosts, Losses, StepProblem
from infcl_gen.step.choose import choose, largest_samples, smallest_bytes
from infcl_gen.step.costs import StepCosts
from infcl_gen.step.plan import STREAMED, TREATMENTS
from infcl_gen.step.text import step_text

WRAPPERS = ("none", "ddp", "fsdp2")
# Bytes of state for each byte of a trained parameter.
OPTIMIZERS = {
    "none": 0, "sgd": 0, "momentum": 1, "adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "lion": 1, "muon": 1,
}  # fmt: skip
LONG_S = 20.0  # a step that takes longer shows a bar
BUDGETS = (1, 2, 8)  # of the loss, times its smallest, beside "auto": each costs a plan of 10 to 30 ms


class Alternative(NamedTuple):
    """The step with fewer treatments to choose from."""

    treatments: tuple[str, ...]
    time_s: float | None  # None: it does not fit
    peak_bytes: int  # or what it would need


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step of `samples` per device and tower: how they pass, what it takes, what else there is.

    `largest_batch`: over all devices, within the same memory. `asked_batch_size`: before it was rounded up to equal
    parts of devices; None where the largest was asked for. `step` makes what executes it, where it was planned for
    towers and not from a profile.
    """

    problem: StepProblem
    account: Account
    alternatives: tuple[Alternative, ...]
    largest_batch: int
    asked_batch_size: int | None = None
    make_step: Callable[[StepPlan, bool], Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def batch_size(self) -> int:
        return self.problem.samples * self.problem.world_size

    @property
    def predicted_peak_bytes(self) -> int:
        return self.account.peak_bytes

    @property
    def predicted_time_s(self) -> float:
        return self.account.time_s

    def step(self, progress: bool | None = None) -> Any:
        """The `TrainingStep` of this plan; `progress`: with a bar on stderr, by default where it takes over LONG_S.

        Raises InputError for a plan from a profile.
        """
        if self.make_step is None:
            raise InputError(
                "step: a plan from a profile or an estimate has no towers to run; call plan_step on their device"
            )
        return self.make_step(self, self.predicted_time_s > LONG_S if progress is None else progress)

    def __str__(self) -> str:
        """What `infcl-gen step` prints."""
        return step_text(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The plan as literals."""
        account, problem = self.account, self.problem
        return {
            "device": problem.costs.device, "measured": problem.costs.measured,
            "versions": dict(problem.costs.versions),
            "batch_size": self.batch_size, "asked_batch_size": self.asked_batch_size, "devices": problem.world_size,
            "wrapper": problem.wrapper, "inputs": problem.inputs, "memory_bytes": problem.memory_bytes,
            "host_memory_bytes": problem.host_memory_bytes, "host_bytes": account.host_bytes,
            "host_lock_s": account.host_lock_s,
            "largest_batch": self.largest_batch, "predicted_peak_bytes": account.peak_bytes,
            "predicted_time_s": account.time_s,
            "towers": [dataclasses.asdict(each) for each in account.towers],
            "items": [each._asdict() for each in account.items],
            "phases": [{"name": x, "time_s": account.phase_s[x], "bytes": account.bytes_in(x)} for x in PHASES],
            "loss": account.loss._asdict(),
            "alternatives": [each._asdict() for each in self.alternatives],
        }  # fmt: skip


def check_treatments(treatments: Sequence[str]) -> tuple[str, ...]:
    """The treatments of a contrastive step, each once. Raises InputError for others, or none."""
    if not isinstance(treatments, list | tuple) or not treatments:
        raise InputError(f"--treatments: give one or more of {', '.join(TREATMENTS)}, as a tuple in Python")
    for each in treatments:
        check_word("--treatments", each, TREATMENTS)
    if set(treatments) == {"offloaded"}:
        raise InputError(
            "--treatments: offloaded is beside others, for the host may hold less than a batch; add cached"
        )
    return tuple(dict.fromkeys(treatments))


def plan_from_costs(
    costs: StepCosts, memory_bytes: int, losses: Losses | None, batch_size: int | None, world_size: int = 1, **more: Any
) -> StepPlan:
    """The fastest step within the memory; without a batch size, of the largest batch that fits.

    losses: None where the costs are with targets. more: further fields of `StepProblem`. Raises InputError or
    InfeasibleError.
    """
    if losses is None or costs.with_targets:
        losses, more = _NoLoss(), more | {"treatments": (STREAMED,)}
    check_word("--wrapper", more.get("wrapper", "none"), WRAPPERS)
    asked = None if batch_size is None else -(-batch_size // world_size)
    problem = StepProblem(costs, asked or 1, memory_bytes, losses, world_size=world_size, **more)
    largest = largest_samples(problem)
    if asked is None:
        if not largest:
            choose(problem)  # raises
        problem = dataclasses.replace(problem, samples=largest)
    found = choose(problem)
    return StepPlan(problem, found, tuple(_alternatives(problem, found)), largest * world_size, batch_size)


def _alternatives(problem: StepProblem, chosen: Account) -> list[Alternative]:
    found = []
    on_device = tuple(each for each in problem.treatments if each != "offloaded")
    for treatments in (*([on_device] if chosen.host_bytes else []), ("cached",), ("checkpointed",), ("kept",)):
        if treatments == problem.treatments or treatments[0] not in problem.treatments:
            continue
        other = dataclasses.replace(problem, treatments=treatments)
        with contextlib.suppress(InputError):  # no blocks to compute again
            least = smallest_bytes(other)
            account = choose(other) if least <= problem.memory_bytes else None
            costs = (account.time_s, account.peak_bytes) if account else (None, least)
            found.append(Alternative(treatments, *costs))
    return found


class _NoLoss:
    """`Losses` of a step whose loss is measured with its model."""

    def smallest_bytes(self, samples: int) -> int:
        return 0

    def within_budgets(self, samples: int) -> list[LossCosts]:
        return [LossCosts(0, 0.0)]


class PlannedLoss:
    """`Losses` of a loss that this project generates, of features as the towers give them."""

    def __init__(self, loss: str, costs: StepCosts, world_size: int) -> None:
        features = {"dim": costs.dim, "dtype": costs.dtype, "device_profile": costs.device}
        frozen = [side for side, tower in zip(("query", "key"), costs.towers, strict=False) if tower.frozen]
        features["frozen"] = frozen[0] if len(frozen) == 1 else "none"
        self._flags, self._world_size = {"loss": loss, **features}, world_size
        self._plans: dict[Any, Plan] = {}
        self._smallest: dict[int, int] = {}

    def smallest_bytes(self, samples: int) -> int:
        if samples not in self._smallest:
            try:  # no plan fits a byte: that takes a tenth of the time of a plan
                self._smallest[samples] = self._plan(samples, 1).smallest_budget_bytes
            except InfeasibleError as error:
                if error.smallest_budget_bytes is None:
                    raise
                self._smallest[samples] = error.smallest_budget_bytes
        return self._smallest[samples]

    def within_budgets(self, samples: int) -> list[LossCosts]:
        smallest = self.smallest_bytes(samples)
        plans = [self._plan(samples, times * smallest) for times in BUDGETS]
        with contextlib.suppress(InfeasibleError):
            plans.append(self._plan(samples, "auto"))
        by_peak = {plan.predicted_peak_bytes: plan for plan in plans}
        return [LossCosts(peak, plan.predicted_queued_s, plan.budget_bytes) for peak, plan in sorted(by_peak.items())]

    def problem(self, samples: int, budget: str | int | None) -> Problem:
        """The problem for so many samples of each tower per device."""
        batch = {"batch_size": max(1, samples) * self._world_size, "devices": self._world_size}
        return make_problem(**self._flags, **batch, memory_budget="auto" if budget is None else budget)

    def _plan(self, samples: int, budget: str | int) -> Plan:
        from infcl_gen.emission import plan_problem

        if (samples, budget) not in self._plans:
            # A batch that is too large has budgets beyond the device: `choose` compares what it needs.
            self._plans[samples, budget] = plan = plan_problem(self.problem(samples, budget), any_budget=True)[0]
            loss, named = self._flags["loss"], f"loss={self._flags['loss']!r}"
            if plan.traits.triangle:
                raise InputError(
                    f"loss: {loss} compares rows of one tensor; plan_step takes a function that joins the features of "
                    f"towers: lambda a, b, scale: infcl_gen.contrastive_loss(torch.cat([a, b]), None, scale, {named})"
                )
        return self._plans[samples, budget]


def optimizer_bytes(optimizer: str | int, gradient_bytes: int) -> int:
    """Of the state of an optimiser: by its name, or as they are given."""
    if optimizer in OPTIMIZERS:
        return OPTIMIZERS[str(optimizer)] * gradient_bytes
    try:
        return parse_bytes(optimizer, "--optimizer")
    except InputError:
        names = ", ".join(OPTIMIZERS)
        raise InputError(f"--optimizer: {show(optimizer)} is unknown; valid: {names}, or a size such as 2GiB") from None
