"""Templates of kernels read as kernels: few tags, no arithmetic, plain names; what they print fits into 120 columns."""

import re
from pathlib import Path
from typing import Any

import pytest

from infcl_gen.emission import build
from infcl_gen.emission.render import template_folder
from infcl_gen.inputs.problem import make_problem
from tests.emission.golden import GOLDEN

FOLDER = template_folder() / "triton"
KERNELS = sorted(path for path in FOLDER.rglob("*.jinja") if not path.name.startswith("schedule"))
COMMENT_ON_TOP = re.compile(r"\A(\{#.*?#\}\s*)+", re.DOTALL)
HOLE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
TAG = re.compile(r"\{%(.*?)%\}", re.DOTALL)
WIDTH = 120

H200 = {"loss": "clip", "batch_size": 10007, "dim": 200, "device_profile": "h200"}
PROBLEMS: dict[str, dict[str, Any]] = {
    **GOLDEN,
    "hopper": H200,
    "fused": {**H200, "set": ["strategy=fused"]},
    "fused rows": {**H200, "loss": "infonce", "dim": 96, "set": ["strategy=fused"]},
    "fused fp16": {**H200, "dim": 256, "dtype": "fp16", "set": ["strategy=fused"]},
    "stash": {**H200, "dim": 256, "set": ["strategy=stash"]},
    "stash rows": {**H200, "loss": "infonce", "dim": 250, "set": ["strategy=stash"]},
    "kept keys": {**H200, "dim": 96},
    "split": {**H200, "dtype": "fp32"},
    "split rows": {**H200, "loss": "infonce", "dtype": "fp32"},
    "exact": {**H200, "dtype": "fp32", "precision": "exact"},
    "ring": {**H200, "devices": 4, "set": ["transport=ring"]},
    "gather": {**H200, "devices": 4, "set": ["transport=gather"]},
}


def text_of(template: Path) -> str:
    return COMMENT_ON_TOP.sub("", template.read_text())


@pytest.mark.parametrize("template", KERNELS, ids=lambda path: path.name)
def test_under_a_fifth_of_the_lines_have_a_tag(template: Path) -> None:
    lines = text_of(template).splitlines()
    tagged = [line for line in lines if "{%" in line or any(" if " in hole for hole in HOLE.findall(line))]
    assert len(tagged) < 0.2 * len(lines), f"{len(tagged)} of {len(lines)} lines"


@pytest.mark.parametrize("template", KERNELS, ids=lambda path: path.name)
def test_holes_are_names_and_not_computed(template: Path) -> None:
    """No arithmetic, no conditions, no objects of the planner's: values come printed."""
    text = text_of(template)
    for found in (*HOLE.findall(text), *TAG.findall(text)):
        code = re.sub(r'"[^"]*"', '""', found)
        assert not re.search(r"[*/%]|\*\*| [-+] |\bplan\b|\bproblem\b", code), found
    assert not any(" if " in hole for hole in HOLE.findall(text))


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_fit_into_the_columns(name: str) -> None:
    files = build(make_problem(**PROBLEMS[name]))
    long = [
        f"{path}: {line}"
        for path in ("kernels.py", "hopper.py")
        for line in files.get(path, "").splitlines()
        if len(line) > WIDTH
    ]
    assert not long, "\n".join(long)
