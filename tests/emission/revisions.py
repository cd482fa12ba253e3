"""What the kernels of each family compute, as digests beside the family's revision, in revisions.json.

python -m tests.emission.revisions writes that file anew.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

from infcl_gen.emission import plan_problem
from infcl_gen.emission.lower import lower
from infcl_gen.emission.render import render
from infcl_gen.hardware import resolve_cluster
from infcl_gen.inputs.problem import make_problem
from infcl_gen.kernels import families
from tests.emission.golden import GOLDEN

FILE = Path(__file__).with_name("revisions.json")
H200 = {"loss": "clip", "batch_size": 8192, "dim": 96, "device_profile": "h200"}
PROBLEMS: dict[str, dict[str, Any]] = {
    **{name: flags for name, flags in GOLDEN.items() if flags["device_profile"] != "cpu"},
    "hopper": {**H200, "dim": 200},
    "fused": {**H200, "set": ["strategy=fused"]},
    "fused rows": {**H200, "loss": "infonce", "set": ["strategy=fused"]},
    "stash": {**H200, "set": ["strategy=stash"]},
    "pairs": {**H200, "loss": "siglip"},
    "triangle": {**H200, "loss": "ntxent"},
    "rows": {**H200, "loss": "infonce", "set": ["strategy=rows"]},
    "prefixes": {**H200, "prefixes": "32,96"},
    "prefixes of one side": {**H200, "loss": "infonce", "prefixes": "32,96"},
    "split": {**H200, "dtype": "fp32"},
    "exact": {**H200, "dtype": "fp32", "precision": "exact"},
}


def main() -> None:
    FILE.write_text(json.dumps(current(), indent=1) + "\n")


def current() -> dict[str, dict[str, Any]]:
    """{family: its revision, and the digest of its kernels over all problems}, of families that have a revision."""
    found: dict[str, Any] = {}
    for flags in PROBLEMS.values():
        problem = make_problem(**flags)
        plan, derivation = plan_problem(problem)
        files = render(lower(plan, derivation, resolve_cluster(problem).profile))
        for family in (family for family in families(plan) if family.revision):
            digest = found.setdefault(family.template, (family.revision, hashlib.sha256()))[1]
            for kernel in family.kernels(plan):
                digest.update(code_of(kernel.name, files[family.file]).encode())
    return {name: {"revision": n, "digest": digest.hexdigest()} for name, (n, digest) in sorted(found.items())}


def code_of(kernel: str, text: str) -> str:
    """A kernel and all helpers that it calls, without decorators, docstrings, comments and its own names."""
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    wanted, seen = [kernel], {kernel}
    for name in wanted:
        called = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)} & functions.keys()
        wanted += sorted(called - seen)
        seen |= called
    return "\n".join(_without_names(functions[name]) for name in wanted)


def _without_names(function: ast.FunctionDef) -> str:
    function.decorator_list = []
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    own: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.setdefault(node.id, f"_{len(own)}")
    taken = {argument.arg for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id not in taken:
            node.id = own.get(node.id, node.id)
    return ast.unparse(function)


if __name__ == "__main__":
    main()
