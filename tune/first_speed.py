"""Time, memory and errors of clip at B = 65 536 within given budgets on this GPU.

python tune/first_speed.py [-o tune/bench/h200-first-speed.json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import infcl_gen
from infcl_gen.problem import make_problem
from infcl_gen.tuning.bench import measure
from infcl_gen.tuning.results import command_line, write_results

PROBLEMS = [
    {"dim": 768, "memory_budget": "1GiB"},
    {"dim": 768, "memory_budget": "16GiB", "set": {"strategy": "stash"}},
    {"dim": 256, "memory_budget": "1GiB"},
    {"dim": 128, "memory_budget": "1GiB"},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/bench/h200-first-speed.json"))
    output = parser.parse_args().output
    rows = []
    for problem in PROBLEMS:
        with tempfile.TemporaryDirectory() as folder:
            package = infcl_gen.generate(make_problem(batch_size="64k", **problem), Path(folder) / "package")
            rows.append(measure(package, "--errors", "--repeats", "20"))
        shown = ("dim", "median_ms", "floor_ms", "peak_bytes", "error")
        print({name: rows[-1].get(name) for name in shown}, flush=True)
    if any(row["error"] for row in rows):
        sys.exit(1)
    write_results(output, rows, command_line("tune/first_speed.py", sys.argv[1:]))


if __name__ == "__main__":
    main()
