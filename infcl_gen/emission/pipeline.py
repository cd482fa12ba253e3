"""The pipeline: problem -> derivation -> plan -> specification -> text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from infcl_gen.emission.lower import lower
from infcl_gen.emission.package import manifest_text, read_package
from infcl_gen.emission.render import render
from infcl_gen.errors import InputError
from infcl_gen.hardware import Cluster, profile_from_literals, resolve_cluster
from infcl_gen.losses import Derivation, LossSpec, derive, load_loss, spec_from_dict
from infcl_gen.planning import Plan, plan
from infcl_gen.problem import Problem, make_problem


def build(problem: Problem) -> dict[str, str]:
    """The text of every file of the package for `problem`, without the manifest."""
    return _build(problem, load_loss(problem.loss), resolve_cluster(problem))


def plan_problem(problem: Problem) -> tuple[Plan, Derivation]:
    """The plan and the derived gradient; the plan's problem names the loss and device that were found."""
    cluster = resolve_cluster(problem)
    loss = load_loss(problem.loss)
    derivation = derive(loss)
    return plan(resolved(problem, loss, cluster), derivation, cluster), derivation


def _build(problem: Problem, loss: LossSpec, cluster: Cluster) -> dict[str, str]:
    derivation = derive(loss)
    planned = plan(resolved(problem, loss, cluster), derivation, cluster)
    return render(lower(planned, derivation, cluster.profile))


def resolved(problem: Problem, loss: LossSpec, cluster: Cluster) -> Problem:
    """The same problem, with names of what was found: nothing depends on the machine or on a user's file."""
    profile = cluster.profile
    return dataclasses.replace(problem, loss=loss.name, target=profile.target, device_profile=profile.name)


def rerender(folder: str | Path) -> dict[str, bytes]:
    """What the package in `folder` would be if generated now, from its SPEC alone; with the manifest.

    SPEC carries the loss as a formula and the device as figures: files that the user gave are not needed again.
    Raises InputError if the folder is not an intact package, and whatever planning its problem raises.
    """
    spec = read_package(folder).spec
    problem = spec_problem(spec)
    loss, device = spec.get("loss"), spec.get("device")
    if not isinstance(loss, dict) or not isinstance(device, dict):
        raise InputError("SPEC lacks the loss or the device; generate the package again")
    cluster = Cluster(problem.devices, problem.nodes, profile_from_literals(device))
    files = _build(problem, spec_from_dict(loss), cluster)
    return {path: text.encode() for path, text in {**files, "manifest.json": manifest_text(files)}.items()}


def spec_problem(spec: dict[str, object]) -> Problem:
    """The problem that a package was generated for. Raises InputError if SPEC["problem"] is not one."""
    fields = spec["problem"]
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise InputError("SPEC['problem'] is not a set of problem flags; generate the package again")
    return make_problem(**fields)
