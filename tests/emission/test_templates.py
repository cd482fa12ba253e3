"""Templates read as what they print: few tags, no arithmetic, plain names; what they print fits into 120 columns.

Launches give each kernel just the arguments that it takes: of those that no interpreter runs, too.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infcl_gen.emission import build
from infcl_gen.files import template_folder
from infcl_gen.inputs.problem import make_problem
from infcl_gen.kernels import FAMILIES
from tests.emission.golden import GOLDEN
from tests.tiers import nightly

TEMPLATES = sorted(path for path in template_folder().rglob("*.jinja") if path.parent.name != "report")  # of packages
COMMENT_ON_TOP = re.compile(r"\A(\{#.*?#\}\s*)+", re.DOTALL)
HOLE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
TAG = re.compile(r"\{%(.*?)%\}", re.DOTALL)
WIDTH = 120
OPTIONS = {"num_warps", "num_stages", "maxnreg"}

LOSSES = Path(__file__).parent.parent / "kernels" / "losses.py"
WEIGHED = f"{LOSSES}:weighed_of_rows"
H200 = {"loss": "clip", "batch_size": 10007, "dim": 200, "device_profile": "h200"}
PROBLEMS: dict[str, dict[str, Any]] = {
    **GOLDEN,
    "hopper": H200,
    "hopper_slabs": {**H200, "dim": 768, "prefixes": "96,192,384,768"},
    "hopper_slabs of cosines": {**H200, "dim": 768, "prefixes": "96,192,384,768", "renormalise": True},
    "hopper_slabs of one side's cosines": {
        **H200,
        "loss": "infonce",
        "dim": 768,
        "prefixes": "96,192,384,768",
        "renormalise": True,
    },
    "prefixes of one side": {**H200, "loss": "infonce", "dim": 768, "prefixes": "96,192,384,768"},
    "fused": {**H200, "set": ["strategy=fused"]},
    "fused rows": {**H200, "loss": "infonce", "dim": 96, "set": ["strategy=fused"]},
    "fused fp16": {**H200, "dim": 256, "dtype": "fp16", "set": ["strategy=fused"]},
    "stash": {**H200, "dim": 256, "set": ["strategy=stash"]},
    "stash rows": {**H200, "loss": "infonce", "dim": 250, "set": ["strategy=stash"]},
    "rows": {**H200, "loss": "infonce", "dim": 96, "set": ["strategy=rows"]},
    "kept keys": {**H200, "dim": 96},
    "triangle": {**H200, "loss": "ntxent"},
    "triangle, kept keys": {**H200, "loss": "ntxent", "dim": 96},
    "triangle, split": {**H200, "loss": "ntxent", "dtype": "fp32"},
    "triangle, exact": {**H200, "loss": "ntxent", "dtype": "fp32", "precision": "exact"},
    "triangle on cpu": {**H200, "loss": "ntxent", "device_profile": "cpu"},
    "combined": {**H200, "loss": "rince"},
    "combined on cpu": {**H200, "loss": "rince", "device_profile": "cpu"},
    "combined triangle": {**H200, "loss": "dclw"},
    "combined triangle, split": {**H200, "loss": "dcl", "dtype": "fp32"},
    "combined triangle, exact": {**H200, "loss": "dcl", "dtype": "fp32", "precision": "exact"},
    "combined triangle on cpu": {**H200, "loss": "dclw", "device_profile": "cpu"},
    "two sums of a triangle": {**H200, "loss": WEIGHED},
    "two sums of a triangle, exact": {**H200, "loss": WEIGHED, "dtype": "fp32", "precision": "exact"},
    "two sums on cpu": {**H200, "loss": f"{LOSSES}:squared_weights", "device_profile": "cpu"},
    "two sums of a triangle on cpu": {**H200, "loss": WEIGHED, "device_profile": "cpu"},
    "sums of columns, split": {**H200, "loss": "mil_nce", "dtype": "fp32"},
    "sums of columns of a gather": {**H200, "loss": "mil_nce", "devices": 4, "set": ["transport=gather"]},
    "columns of ids": {**H200, "loss": "mil_nce_multi"},
    "columns of ids, exact": {**H200, "loss": "mil_nce_multi", "dtype": "fp32", "precision": "exact"},
    "columns of ids on cpu": {**H200, "loss": "mil_nce_multi", "device_profile": "cpu"},
    "sums of columns on cpu": {**H200, "loss": "mil_nce", "device_profile": "cpu"},
    "several": {**H200, "loss": "infonce_out"},
    "several of a triangle": {**H200, "loss": "supcon_in"},
    "several of a triangle, exact": {**H200, "loss": "supcon_out", "dtype": "fp32", "precision": "exact"},
    "several on cpu": {**H200, "loss": "infonce_in", "device_profile": "cpu"},
    "several of a triangle on cpu": {**H200, "loss": "supcon_out", "device_profile": "cpu"},
    "guide": {**H200, "loss": "distill"},
    "guide, exact": {**H200, "loss": "distill", "dtype": "fp32"},
    "guide on cpu": {**H200, "loss": "distill", "device_profile": "cpu"},
    "guide of both sides": {**H200, "loss": "distill_clip", "devices": 4, "settings": (("transport", "gather"),)},
    "guide of both sides on cpu": {**H200, "loss": "distill_both", "device_profile": "cpu"},
    "thresholds": {**H200, "loss": "gist"},
    "thresholds, exact": {**H200, "loss": "gist", "dtype": "fp32"},
    "thresholds on cpu": {**H200, "loss": "gist", "device_profile": "cpu"},
    "pairs of single queries": {**H200, "loss": f"{LOSSES}:siglip_of_rows", "dtype": "fp32"},
    "pairs of single queries on cpu": {**H200, "loss": f"{LOSSES}:siglip_multi_of_rows", "device_profile": "cpu"},
    "rows in pairs": {**H200, "loss": "three_block"},
    "rows in pairs, fp32": {**H200, "loss": f"{LOSSES}:of_queries_alone", "dtype": "fp32"},
    "rows in pairs, in their sums": {**H200, "loss": f"{LOSSES}:near_rows"},
    "rows in pairs on cpu": {**H200, "loss": "three_block", "device_profile": "cpu"},
    "sides on cpu": {**H200, "loss": f"{LOSSES}:of_queries_alone", "device_profile": "cpu"},
    "thresholds of rows on cpu": {**H200, "loss": f"{LOSSES}:near_rows", "device_profile": "cpu"},
    "split": {**H200, "dtype": "fp32"},
    "split rows": {**H200, "loss": "infonce", "dtype": "fp32"},
    "exact": {**H200, "dtype": "fp32", "precision": "exact"},
    "ring": {**H200, "devices": 4, "set": ["transport=ring"]},
    "fp32 on cpu": {**H200, "device_profile": "cpu", "loss": "infonce", "dtype": "fp32"},
    "gather": {**H200, "devices": 4, "set": ["transport=gather"]},
    "fused in parts": {**H200, "batch_size": 8192, "dim": 96, "set": ["strategy=fused"]},
    "two sums": {**H200, "loss": f"{LOSSES}:hard_keys", "dim": 768},
    "two sums of a triangle, wide": {**H200, "loss": "hard_negative", "dim": 768},
    "several, wide": {**H200, "loss": "infonce_in", "dim": 768},
    "pairs": {**H200, "loss": "siglip"},
    "pairs of halves": {**H200, "loss": "siglip", "dtype": "fp32"},
    "pairs of ids": {**H200, "loss": "siglip_multi"},
    "two states": {**H200, "loss": "sogclr_clip"},
    "two states on cpu": {**H200, "loss": "sogclr_clip", "device_profile": "cpu"},
    "formulas in several lines": {**H200, "loss": f"{LOSSES}:angular"},
    "further keys": {**H200, "loss": f"{LOSSES}:hard", "dim": 768},
}
# Left to the nightly tier: each of their lines is in another package, but for its numbers.
REPEATED = (
    "rows", "kept keys", "triangle", "triangle, kept keys", "triangle, exact", "combined triangle, exact",
    "sums of columns of a gather", "columns of ids, exact", "thresholds, exact", "exact", "ring", "gather",
)  # fmt: skip


def text_of(template: Path) -> str:
    return COMMENT_ON_TOP.sub("", template.read_text())


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_under_a_fifth_of_the_lines_have_a_tag(template: Path) -> None:
    lines = text_of(template).splitlines()
    tagged = [line for line in lines if "{%" in line or any(" if " in hole for hole in HOLE.findall(line))]
    assert len(tagged) < 0.2 * len(lines), f"{len(tagged)} of {len(lines)} lines"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_holes_are_names_and_not_computed(template: Path) -> None:
    """No arithmetic, no conditions, no objects of the planner's: values come printed."""
    text = text_of(template)
    for found in (*HOLE.findall(text), *TAG.findall(text)):
        code = re.sub(r'"[^"]*"', '""', found)
        assert not re.search(r"[*/%]|\*\*| [-+] |\bplan\b|\bproblem\b", code), found
    assert not any(" if " in hole for hole in HOLE.findall(text))


@pytest.mark.parametrize("name", nightly(PROBLEMS, set(PROBLEMS) - set(REPEATED)))
def test_what_is_printed(name: str, tmp_path: Path) -> None:
    problem = PROBLEMS[name]
    files = build(make_problem(**problem))
    assert_tidy(files, tmp_path)
    if problem["device_profile"] != "cpu":
        assert_launched(files, name)


def assert_tidy(files: dict[str, str], tmp_path: Path) -> None:
    """Lines of 120 columns at most; no import, variable or name that is undefined or not used in this very package."""
    printed = {path: text for path, text in files.items() if not path.startswith("_runtime/")}
    long = [f"{path}: {line}" for path, text in printed.items() for line in text.splitlines() if len(line) > WIDTH]
    assert not long, "\n".join(long)
    for path, text in printed.items():
        (tmp_path / path).write_text(text)
    # A kernel of every loss loads the scale, which only some terms need: the compiler drops the load.
    idle = "--config=lint.per-file-ignores={'kernels.py'=['F841']}"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F", idle, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_launched(files: dict[str, str], name: str) -> None:
    """Launches give each kernel just the arguments that it takes."""
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
    if name.startswith("hopper"):
        variants = [module for module in ("hopper", "hopper_slabs") if (module, "gradient_hopper") in seen]
        assert variants == [name.partition(" ")[0]]
