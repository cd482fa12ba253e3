"""The golden packages in generated/, and the formulas of the cost model: examples, documentation and test in one.
`make golden` writes them anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import infcl_gen
from infcl_gen.planning.terms import markdown

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


def main() -> None:
    for name in sys.argv[1:] or GOLDEN:
        print(infcl_gen.generate(output=FOLDER / name, force=True, **GOLDEN[name]))
    COST_MODEL.write_text(markdown())
    print(COST_MODEL)


if __name__ == "__main__":
    main()
