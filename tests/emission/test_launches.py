"""Launches give each kernel just the arguments that it takes: of those that no interpreter runs, too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from infcl_gen.emission import build
from infcl_gen.inputs.problem import make_problem
from infcl_gen.kernels import FAMILIES

LOSSES = Path(__file__).parent.parent / "kernels" / "losses.py"
OPTIONS = {"num_warps", "num_stages", "maxnreg"}
H200 = {"loss": "clip", "batch_size": 8192, "dim": 768, "device_profile": "h200"}
PROBLEMS = {
    "hopper": {"dim": 200},
    "hopper_slabs": {"prefixes": "96,192,384,768"},
    "hopper_slabs of cosines": {"prefixes": "96,192,384,768", "renormalise": True},
    "stash": {"settings": {"strategy": "stash"}},
    "rows": {"loss": "infonce", "settings": {"strategy": "rows"}},
    "fused in parts": {"dim": 96, "settings": {"strategy": "fused"}},
    "triangle": {"loss": "ntxent"},
    "combined triangle": {"loss": "dclw"},
    "two sums": {"loss": f"{LOSSES}:hard_keys"},
    "two sums of a triangle": {"loss": "hard_negative"},
    "sums of partners": {"loss": "four_block"},
    "sums of columns": {"loss": "mil_nce"},
    "columns of ids": {"loss": "mil_nce_multi"},
    "several": {"loss": "infonce_in"},
    "several of a triangle": {"loss": "supcon_in"},
    "guide": {"loss": "distill"},
    "guide of both sides": {"loss": "distill_clip"},
    "thresholds": {"loss": "gist"},
    "thresholds of rows in pairs": {"loss": "three_block"},
    "triangle of halves": {"loss": "ntxent", "dtype": "fp32"},
    "pairs": {"loss": "siglip"},
    "pairs of halves": {"loss": "siglip", "dtype": "fp32"},
    "split": {"loss": "infonce", "dtype": "fp32"},
    "exact": {"dtype": "fp32", "precision": "exact"},
    "gather": {"devices": 4, "settings": {"transport": "gather"}},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_launches_have_the_arguments_of_their_kernels(name: str) -> None:
    files = build(make_problem(**{**H200, **PROBLEMS[name]}))
    taken = {
        (module, function.name): [argument.arg for argument in function.args.args]
        for module in {family.file.removesuffix(".py") for family in FAMILIES}
        for function in ast.walk(ast.parse(files.get(f"{module}.py", "")))
        if isinstance(function, ast.FunctionDef)
    }
    seen = set()
    for call in ast.walk(ast.parse(files["schedule.py"])):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "launch":
            kernel = call.args[0]
            assert isinstance(kernel, ast.Attribute) and isinstance(kernel.value, ast.Name)
            given = {keyword.arg for keyword in call.keywords} - OPTIONS
            seen.add((kernel.value.id, kernel.attr))
            names = taken[kernel.value.id, kernel.attr]
            assert given == set(names), kernel.attr
            assert names == sorted(names, key=str.isupper), kernel.attr  # constants last: `launch` gives them last
    assert {("kernels", "pairs" if name.startswith("pairs") else "forward"), ("kernels", "finish")} <= seen
    variants = [module for module in ("hopper", "hopper_slabs") if (module, "gradient_hopper") in seen]
    assert variants == [name.partition(" ")[0]] * name.startswith("hopper")
