"""The pipeline: problem -> derivation -> plan -> specification -> text."""

import logging
from pathlib import Path
from typing import NamedTuple

from infcl_gen.emission.lower import lower
from infcl_gen.emission.package import MANIFEST, manifest_text, read_package, specific_part
from infcl_gen.emission.render import render
from infcl_gen.errors import InputError
from infcl_gen.hardware import Cluster, cluster_of, profile_from_literals, resolve_cluster, resolved
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.losses import Derivation, LossSpec, derive, load_loss, over_prefixes, spec_from_dict
from infcl_gen.planning import Plan, plan
from infcl_gen.planning.planner import cost_model
from infcl_gen.planning.records import Found, lookup, record_key
from infcl_gen.planning.timeline import LEAD_S, Timeline, execute

_LOG = logging.getLogger("infcl_gen")


class Case(NamedTuple):
    """A problem, and the loss and the cluster that it names."""

    problem: Problem
    loss: LossSpec
    cluster: Cluster

    def resolved(self) -> Problem:
        return resolved(self.problem, self.loss.name, self.cluster.profile)


def loss_of(problem: Problem) -> LossSpec:
    """The loss that a problem names, over its prefixes."""
    return over_prefixes(load_loss(problem.loss), problem.prefixes, problem.renormalise)


def case_of(problem: Problem, any_budget: bool = False) -> Case:
    """Loads the loss and detects what the problem leaves to this machine.

    Raises InputError for a memory budget that exceeds the GPU's memory, unless `any_budget`.
    """
    case = Case(problem, loss_of(problem), resolve_cluster(problem))
    if not any_budget:
        case.cluster.profile.check_budget("--memory-budget", problem.memory_budget_bytes or 0)
    return case


def build(problem: Problem) -> dict[str, str]:
    """The text of every file of the package for `problem`, by path, without the manifest.

    A tuning record that fits the problem decides its settings.
    """
    case = case_of(problem)
    return render(lower(*_measured_plan(case), case.cluster.profile))


def plan_problem(problem: Problem, any_budget: bool = False) -> tuple[Plan, Derivation]:
    """The plan and the derived gradient. The plan's problem names the loss and the device that were found."""
    return _measured_plan(case_of(problem, any_budget))


def simulate_problem(problem: Problem, lead_s: float = LEAD_S, **how: bool) -> tuple[Plan, Timeline]:
    """The plan, and a simulated step of it, which the host begins `lead_s` seconds ahead of the device.

    `how`: further keywords of `planning.timeline.execute`.
    """
    case = case_of(problem)
    planned, _ = _measured_plan(case)
    return planned, execute(planned, cost_model(planned, case.cluster), lead_s=lead_s, **how)


def find_record(case: Case) -> Found | str:
    """The tuning record that `build` uses for the problem, or why there is none."""
    return lookup(case.problem, record_key(*case), lambda applied: _plan(case._replace(problem=applied))[0])


def build_for(problem: Problem, loss: LossSpec, cluster: Cluster) -> dict[str, str]:
    """`build` with these settings alone: no tuning record is looked up."""
    return render(lower(*_plan(Case(problem, loss, cluster)), cluster.profile))


def rerender(folder: str | Path) -> dict[str, bytes]:
    """The files that the package in `folder` has if generated again from its SPEC alone, with the manifest.

    SPEC holds the loss as a formula, the device as figures, and measured settings: neither the user's files nor a
    tuning record are needed. A partial package gives its own part. Raises InputError if the folder is not an intact
    package, and whatever planning its problem raises.
    """
    package = read_package(folder, partial=True)
    files = build_for(*spec_inputs(package.spec))
    files, missing = specific_part(files) if package.missing else (files, ())
    return {path: text.encode() for path, text in (files | {MANIFEST: manifest_text(files, missing)}).items()}


def spec_inputs(spec: dict[str, object]) -> Case:
    """Problem, loss and cluster of a package from its SPEC alone. Raises InputError if it lacks one of them."""
    fields, loss, device = spec["problem"], spec.get("loss"), spec.get("device")
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise InputError("SPEC['problem'] is not a set of problem flags; generate the package again")
    if not isinstance(loss, dict) or not isinstance(device, dict):
        raise InputError("SPEC lacks the loss or the device; generate the package again")
    problem = make_problem(**fields)
    return Case(problem, spec_from_dict(loss), cluster_of(problem, profile_from_literals(device)))


def _plan(case: Case) -> tuple[Plan, Derivation]:
    derivation = derive(case.loss)
    return plan(case.resolved(), derivation, case.cluster), derivation


def _measured_plan(case: Case) -> tuple[Plan, Derivation]:
    """The plan of a tuning record that fits, else the cost model's."""
    found = find_record(case)
    if isinstance(found, Found):
        return found.plan, derive(case.loss)
    _LOG.info("no measured settings: %s", found)
    return _plan(case)
