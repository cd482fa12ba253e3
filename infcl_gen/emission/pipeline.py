"""The pipeline: problem -> derivation -> plan -> specification -> text. Five calls, no branches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from infcl_gen.emission.lower import lower
from infcl_gen.emission.package import manifest_text, read_package
from infcl_gen.emission.render import render
from infcl_gen.errors import InputError
from infcl_gen.hardware import Cluster, resolve_cluster
from infcl_gen.losses import Derivation, derive, load_loss
from infcl_gen.planning import Plan, plan
from infcl_gen.problem import Problem, make_problem


def build(problem: Problem) -> dict[str, str]:
    """The text of every file of the package for `problem`, without the manifest."""
    planned, derivation = plan_problem(problem)
    return render(lower(planned, derivation))


def plan_problem(problem: Problem) -> tuple[Plan, Derivation]:
    """The plan and the derived gradient; the plan's problem names the device that was found for "auto"."""
    cluster = resolve_cluster(problem)
    derivation = derive(load_loss(problem.loss))
    return plan(resolved(problem, cluster), derivation, cluster), derivation


def resolved(problem: Problem, cluster: Cluster) -> Problem:
    """The same problem with nothing left that depends on the machine: "auto" becomes what was found."""
    found = cluster.profile.name if problem.device_profile == "auto" else problem.device_profile
    return dataclasses.replace(problem, target=cluster.profile.target, device_profile=found)


def rerender(folder: str | Path) -> dict[str, bytes]:
    """What the package in `folder` would be if generated now, from its SPEC["problem"] alone; with the manifest.

    Raises InputError if the folder is not an intact package, and whatever planning its problem raises.
    """
    files = build(spec_problem(read_package(folder).spec))
    return {path: text.encode() for path, text in {**files, "manifest.json": manifest_text(files)}.items()}


def spec_problem(spec: dict[str, object]) -> Problem:
    """The problem that a package was generated for. Raises InputError if SPEC["problem"] is not one."""
    fields = spec["problem"]
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise InputError("SPEC['problem'] is not a set of problem flags; generate the package again")
    return make_problem(**fields)
