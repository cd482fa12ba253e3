"""Every way to lay a batch out over ranks, judged by the numerics gate: gloo processes everywhere, NCCL on GPUs."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import infcl_gen
from infcl_gen.inputs.problem import make_problem
from infcl_gen.verification.gate import Truth, failures, gate, truth_of
from infcl_gen.verification.properties import Case, tensors
from infcl_gen.verification.worker import averaged
from tests.tiers import combined

from .pool import Packages, Pool, backends, need, results

Ring = tuple[tuple[int, ...], list[int]]  # global ranks in group order, and the rows of each
GROUPS = ((0,), (1,), (0, 1), (1, 0), (0, 1, 2, 3), (2, 3, 1, 0), (3, 1), (0, 2))


def layouts(world: int, total: int) -> dict[str, list[Ring]]:
    """Of each kind the rings that work at once, each on a batch of its own."""
    everybody = tuple(range(world))
    even = {"even": [(everybody, [total // world] * world)]}
    if world == 1:
        return even
    if world == 2:
        return even | {
            "uneven": [(everybody, [1, total - 1])],
            "empty": [(everybody, [0, total])],
            "sub-group": [((1,), [total]), ((0,), [total])],
            "permuted": [((1, 0), [total - 70, 70])],
        }
    return even | {
        "uneven": [(everybody, [1, 70, total - 101, 30])],
        "empty": [(everybody, [0, total - 13, 0, 13])],
        "sub-group": [((3, 1), [17, total - 17]), ((0, 2), [total, 0])],
        "permuted": [((2, 3, 1, 0), [total - 101, 0, 31, 70])],
    }


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the packages for GPUs are."""
    folder = tmp_path_factory.mktemp("layouts")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


SMALL = {"batch_size": 4096, "dim": 64, "device_profile": "h200"}  # kernels that compile in seconds


def for_gpus(folder: Path, world: int) -> list[ModuleType]:
    """bf16: each strategy that a ring can have, each way that keys can travel, and a gather with statistics of keys,
    one without and one of whole rows; fp32 as split operands.
    Few: every one takes some 20 s to compile."""
    gather, nodes = ({}, 1) if world == 1 else ({"transport": "gather"}, 2)
    panels = {"strategy": "panel", "panel_rows": "256", "panel_keys": "256"}  # several at a hop
    wanted: dict[str, dict[str, Any]] = {
        "gather": {"devices": world, "set": {**panels, **gather}},
        "gather_of_rows": {"devices": world, "loss": "infonce", "set": {"strategy": "fused", **gather}},
        "gather_by_rows": {"devices": world, "loss": "infonce", "set": {"strategy": "rows", **gather}},
        "nodes": {"devices": world, "nodes": nodes, "set": {"strategy": "fused"}},
        "flat": {"dtype": "fp32"},
    }
    for name, flags in wanted.items():
        infcl_gen.generate(make_problem(**{**SMALL, **flags}), folder / f"{name}_of_{world}")
    return [importlib.import_module(f"{name}_of_{world}") for name in wanted]


def for_gloo(packages: Packages, world: int) -> list[ModuleType]:
    found = [packages("clip", "bf16", 24), packages("infonce", "bf16", 24), packages("clip", "fp32", 24)]
    if world > 1:
        found.append(packages("clip", "bf16", 24, devices=world, transport="gather"))
        found.append(packages("clip", "bf16", 24, devices=world, nodes=2))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", backends("gloo", "nccl"))
def test_results_are_as_accurate_as_one_process_and_repeatable(
    packages: Packages, folder_of: Callable[[ModuleType], Path], folder: Path, backend: str, world: int
) -> None:
    need(backend, world)
    if backend == "gloo":
        device, total = "cpu", 300
        modules = for_gloo(packages, world)
        folders = [folder_of(modules[0]).parent]
    else:
        device, total = "cuda", 1024
        modules = for_gpus(folder, world)
        folders = [folder]

    @functools.cache
    def truth(module: ModuleType, case: Case) -> Truth:
        return truth_of(module, tensors(case, module.SPEC["positives"], device))

    pool = Pool(world, folders, backend=backend, groups=GROUPS)
    try:
        ways = layouts(world, total)
        # On gloo in CI each module and each kind of layout once.
        chosen = combined(modules, ways) if backend == "gloo" else itertools.product(modules, ways)
        for module, kind in chosen:
            problem, labelled = module.SPEC["problem"], module.SPEC["positives"] == "label"
            rings = ways[kind]
            scale = 100.0 if kind == "uneven" else 14.3
            case = Case(total, total, problem["dim"], problem["dtype"], scale, -1.0, features="unnormalised", seed=1)
            for ranks, rows in rings:
                # Queries without keys beside them, and keys without queries.
                keys = rows[::-1] if labelled or kind in ("empty", "permuted") else rows
                pool.start(
                    "case_results", ranks, package=module.__name__, ranks=ranks, rows=rows, keys=keys, case=case
                )  # fmt: skip
            for ranks, rows in rings:
                parts = results([pool.receive(rank) for rank in ranks])
                judged = gate(averaged(parts), truth(module, case))
                assert all(row.passed for row in judged), (
                    f"{module.__name__}, {kind}, rows {rows} on ranks {ranks}: {failures(judged)}"
                )
    finally:
        pool.close()
