"""The pipeline: problem -> derivation -> plan -> specification -> text."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from infcl_gen.emission.lower import lower
from infcl_gen.emission.package import manifest_text, read_package, specific_part
from infcl_gen.emission.render import render
from infcl_gen.errors import InputError
from infcl_gen.hardware import Cluster, profile_from_literals, resolve_cluster
from infcl_gen.inputs.cluster_file import Links
from infcl_gen.inputs.problem import Problem, make_problem
from infcl_gen.losses import Derivation, LossSpec, derive, load_loss, spec_from_dict
from infcl_gen.planning import Plan, plan
from infcl_gen.planning.planner import cost_model
from infcl_gen.planning.records import Found, Missing, lookup, record_key
from infcl_gen.planning.timeline import LEAD_S, Timeline, execute

_LOG = logging.getLogger("infcl_gen")


def build(problem: Problem) -> dict[str, str]:
    """The text of every file of the package for `problem`, without the manifest; a tuning record that fits is used."""
    cluster = resolve_cluster(problem)
    planned, derivation = _measured_plan(problem, load_loss(problem.loss), cluster)
    return render(lower(planned, derivation, cluster.profile))


def plan_problem(problem: Problem) -> tuple[Plan, Derivation]:
    """The plan and the derived gradient; the plan's problem names the loss and device that were found."""
    return _measured_plan(problem, load_loss(problem.loss), resolve_cluster(problem))


def simulate_problem(problem: Problem, lead_s: float = LEAD_S, **how: bool) -> tuple[Plan, Timeline]:
    """The plan, and a step of it as `planning.timeline.execute` simulates it, behind other work; `how` are its
    keywords."""
    cluster = resolve_cluster(problem)
    planned, _ = _measured_plan(problem, load_loss(problem.loss), cluster)
    return planned, execute(planned, cost_model(planned, cluster), lead_s=lead_s, **how)


def find_record(problem: Problem) -> Found | Missing:
    """The tuning record that `build` uses for the problem, or why there is none."""
    return _find_record(problem, load_loss(problem.loss), resolve_cluster(problem))


def build_for(problem: Problem, loss: LossSpec, cluster: Cluster) -> dict[str, str]:
    """The text of the package for a problem as it stands: no tuning record is looked up."""
    planned, derivation = _plan(problem, loss, cluster)
    return render(lower(planned, derivation, cluster.profile))


def resolved(problem: Problem, loss: LossSpec, cluster: Cluster) -> Problem:
    """The same problem, with names of what was found: nothing depends on the machine or on a user's file."""
    profile = cluster.profile
    return dataclasses.replace(problem, loss=loss.name, target=profile.target, device_profile=profile.name)


def rerender(folder: str | Path) -> dict[str, bytes]:
    """What the package in `folder` would be if generated now, from its SPEC alone; with the manifest.

    SPEC carries the loss as a formula and the device as figures: files that the user gave are not needed again, nor is
    the record of measured settings. Of a partial package it is the part that is there. Raises InputError if the folder
    is not an intact package, and whatever planning its problem raises.
    """
    package = read_package(folder, partial=True)
    files = build_for(*spec_inputs(package.spec))
    missing: tuple[str, ...] = ()
    if package.missing:
        files, missing = specific_part(files)
    written = {**files, "manifest.json": manifest_text(files, missing)}
    return {path: text.encode() for path, text in written.items()}


def spec_inputs(spec: dict[str, object]) -> tuple[Problem, LossSpec, Cluster]:
    """Problem, loss and cluster of a package from its SPEC alone. Raises InputError if it lacks one of them."""
    problem = spec_problem(spec)
    loss, device = spec.get("loss"), spec.get("device")
    if not isinstance(loss, dict) or not isinstance(device, dict):
        raise InputError("SPEC lacks the loss or the device; generate the package again")
    cluster = Cluster(problem.devices, problem.nodes, profile_from_literals(device), problem.links or Links())
    return problem, spec_from_dict(loss), cluster


def _find_record(problem: Problem, loss: LossSpec, cluster: Cluster) -> Found | Missing:
    key = record_key(problem, loss, cluster)
    return lookup(problem, key, lambda applied: _plan(applied, loss, cluster)[0])


def _plan(problem: Problem, loss: LossSpec, cluster: Cluster) -> tuple[Plan, Derivation]:
    derivation = derive(loss)
    return plan(resolved(problem, loss, cluster), derivation, cluster), derivation


def _measured_plan(problem: Problem, loss: LossSpec, cluster: Cluster) -> tuple[Plan, Derivation]:
    """The plan with the settings of a record that fits, else by the cost model."""
    found = _find_record(problem, loss, cluster)
    if isinstance(found, Found):
        return found.plan, derive(loss)
    _LOG.info("no measured settings: %s", found.reason)
    return _plan(problem, loss, cluster)


def spec_problem(spec: dict[str, object]) -> Problem:
    """The problem that a package was generated for. Raises InputError if SPEC["problem"] is not one."""
    fields = spec["problem"]
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise InputError("SPEC['problem'] is not a set of problem flags; generate the package again")
    return make_problem(**fields)
