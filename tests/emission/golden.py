"""The golden packages in generated/, and the formulas of the cost model: examples, documentation and test in one.

Those in WHOLE can be imported as they are. Of the others only what is specific to their problem is there (spec.py,
loss.py, kernels.py, schedule.py), so that a change of the runtime does not touch them. `make golden` writes them anew.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from infcl_gen.emission import build, write_package
from infcl_gen.emission.package import specific_part
from infcl_gen.inputs.problem import make_problem
from infcl_gen.kernels.choice import Choice
from infcl_gen.planning.memory import LEGEND, buffer_terms
from infcl_gen.planning.work import time_terms

FOLDER = Path(__file__).resolve().parent.parent.parent / "generated"
COST_MODEL = FOLDER / "cost_model.md"

GOLDEN: dict[str, dict[str, Any]] = {
    "clip_cpu": {"loss": "clip", "batch_size": 4096, "dim": 512, "dtype": "fp32", "device_profile": "cpu"},
    "clip_h200_d768": {
        "loss": "clip", "batch_size": "64k", "dim": 768, "device_profile": "h200", "memory_budget": "1GiB",
    },
    "clip_h200_d128": {
        "loss": "clip", "batch_size": "64k", "dim": 128, "device_profile": "h200", "memory_budget": "1GiB",
    },
    "infonce_a100": {
        "loss": "infonce", "batch_size": "32k", "keys": "64k", "dim": 768, "device_profile": "a100",
        "memory_budget": "1GiB",
    },
    "clip_mi300x": {
        "loss": "clip", "batch_size": "64k", "dim": 768, "device_profile": "mi300x", "memory_budget": "1GiB",
    },
}  # fmt: skip
WHOLE = ("clip_cpu", "clip_h200_d768")


def main() -> None:
    for name in sys.argv[1:] or GOLDEN:
        files = golden_files(name)
        missing: tuple[str, ...] = ()
        if name not in WHOLE:
            files, missing = specific_part(files)
        print(write_package(files, FOLDER / name, force=True, missing=missing))
    COST_MODEL.write_text(markdown())
    print(COST_MODEL)


@functools.cache
def golden_files(name: str) -> dict[str, str]:
    """The text of every file of the whole package."""
    return build(make_problem(**GOLDEN[name]))


def markdown() -> str:
    """The cost model as a page: legend, memory by buffer and time by phase for each choice."""
    cases = {name: Choice(strategy=name, dim=1) for name in ("panel", "fused", "stash", "torch")}
    cases["panel, ring"] = Choice(strategy="panel", dim=1, world_size=2, transport="ring", keeps=True)
    cases["panel, gather"] = Choice(strategy="panel", dim=1, world_size=2, transport="gather")
    lines = [
        "# Cost model",
        "",
        'The peak is "both" and the largest of "forward", "backward", "finish" and "after".',
        "A phase takes the longest of FLOPs at the efficiency, bytes at the bandwidth and exponentials at their rate,",
        "and its launches.",
        "",
        "| symbol | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in LEGEND.items()]
    for title, case in cases.items():
        lines += ["", f"## {title}", "", "| buffer | phase | bytes | why |", "|---|---|---|---|"]
        lines += [f"| {t.name} | {t.phase} | `{t.bytes}` | {t.why} |" for t in buffer_terms(case)]
        lines += ["", "| phase | FLOPs | bytes | exponentials | efficiency | launches |", "|---|---|---|---|---|---|"]
        for term in time_terms(case):
            lines.append("| " + " | ".join([term.name, *(f"`{value}`" for value in term.quantities)]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
