"""Five problems at three budgets each on this GPU: is measured peak <= predicted <= budget, and is predicted close?

    python tune/memory_sweep.py [-o tune/bench/h200-memory.json]

Writes the rows as they come, prints a table, and exits with 5 if a guarantee is broken. The smallest budget of each
problem is the planner's smallest feasible one and a tenth more (the very smallest works in tiles, and takes minutes);
the second is half way (geometrically) to what an unlimited plan takes; the third is what it takes. Close is within a
tenth, but where steps are recorded: their plans have room for a call that cannot be. Also asks for one byte less than
the smallest, which must be refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import infcl_gen
from infcl_gen.emission import read_package
from infcl_gen.errors import InfeasibleError
from infcl_gen.problem import make_problem
from infcl_gen.tuning.bench import measure
from infcl_gen.tuning.results import command_line, write_results

PROBLEMS = [
    {"loss": "clip", "batch_size": 4096, "dim": 768},
    {"loss": "clip", "batch_size": 16384, "dim": 512},
    {"loss": "clip", "batch_size": 32768, "dim": 128},
    {"loss": "infonce", "batch_size": 65536, "dim": 768},
    {"loss": "clip", "batch_size": 131072, "dim": 768},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/bench/h200-memory.json"))
    parser.add_argument("--device-profile", default="auto")
    arguments = parser.parse_args()
    rows, broken = [], []
    for problem in PROBLEMS:
        flags = {**problem, "device_profile": arguments.device_profile}
        generous = infcl_gen.plan(make_problem(**flags))
        smallest = generous.smallest_budget_bytes
        middle = int((smallest * generous.predicted_peak_bytes) ** 0.5)
        try:
            infcl_gen.plan(make_problem(**flags, memory_budget=smallest - 1))
            broken.append(f"{problem}: a budget of {smallest - 1} bytes was not refused")
        except InfeasibleError as error:
            if error.smallest_budget_bytes != smallest:
                broken.append(
                    f"{problem}: the refusal names {error.smallest_budget_bytes}, not {smallest} bytes"
                )
        for budget in (smallest * 11 // 10, middle, generous.predicted_peak_bytes):
            with tempfile.TemporaryDirectory() as folder:
                package = infcl_gen.generate(
                    make_problem(**flags, memory_budget=budget), Path(folder) / "package"
                )
                recorded = read_package(package).spec["plan"]["replay"]
                row = measure(package, "--repeats", "3")
            rows.append(row)
            write_results(arguments.output, rows, command_line("tune/memory_sweep.py", sys.argv[1:]))
            if row["error"]:
                broken.append(f"{problem} at {budget} bytes: {row['error']}")
                continue
            ratio = row["predicted_peak_bytes"] / row["peak_bytes"]
            kept = row["peak_bytes"] <= row["predicted_peak_bytes"] <= budget
            if not kept or (ratio > 1.1 and not recorded):
                broken.append(f"{problem} at {budget} bytes: predicted / measured = {ratio:.3f}")
            print(
                f"{row['loss']:8} B {row['batch']:7} D {row['dim']:5} {row['strategy']:6} "
                f"budget {budget / 2**20:8.1f} MiB  predicted {row['predicted_peak_bytes'] / 2**20:8.1f}  "
                f"measured {row['peak_bytes'] / 2**20:8.1f}  ratio {ratio:.3f}  {row['median_ms']:8.2f} ms "
                f"(predicted {row['predicted_ms']:.2f}, floor {row['floor_ms']:.2f})",
                flush=True,
            )
    for line in broken:
        print("BROKEN", line)
    sys.exit(5 if broken else 0)


if __name__ == "__main__":
    main()
