"""Clusters of 8 to 4096 H200s, simulated; nothing here is measured.

python tune/scaling.py [-o tune/analysis/h200-scaling.json]     the rows of the README's table of simulated steps
python tune/scaling.py --plot tune/analysis/h200-scaling.svg    and a picture of them
python tune/scaling.py --compare                             measured rows of tune/bench beside their simulated times

The constants that `--compare` is for are at the top of infcl_gen/planning/timeline.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from infcl_gen.tuning.plot import check_plot, plot_scaling
from infcl_gen.tuning.results import write_file
from infcl_gen.tuning.scaling import HEADER, beside_measured, cells, clusters, results, simulated

TUNE = Path(__file__).resolve().parent
MEASURED = ("h200-ring.json", "h200-ring2.json", "h200-first-speed.json", "h200-grid.json")
FLAGS = {"loss": "clip", "dim": 768, "device_profile": "h200", "memory_budget": "64GiB"}
BATCHES = (1 << 20, 32 << 20)
COMMAND = "infcl-gen scale --dim 768 --device-profile h200 --memory-budget 64GiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=TUNE / "analysis" / "h200-scaling.json")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    if given.plot is not None:
        check_plot(given.plot)
    if given.compare:
        return compare()
    rows = [simulated(problem) for problem in clusters(FLAGS, None, BATCHES)]
    for line in (HEADER, *map(cells, rows)):
        print("  ".join(f"{cell:14}" for cell in line).rstrip())
    text = json.dumps(results(rows, COMMAND, "h200"), indent=1, allow_nan=False)
    write_file(given.output, f"{text}\n".encode())
    if given.plot is not None:
        plot_scaling(rows, given.plot, f"simulated, not measured: h200; {COMMAND}")
    return 0


def compare() -> int:
    """Every measured row of a package, and how far its simulated time is from it; 1 if one is farther than 10 %."""
    far = 0
    for name in MEASURED:
        for row in json.loads((TUNE / "bench" / name).read_text())["rows"]:
            if row["impl"] == "infcl":
                measured_ms, step_ms = beside_measured(row, "h200")
                error = step_ms / measured_ms - 1
                far += abs(error) > 0.1
                size = f"{name:22} {row['batch']:7} x {row['dim']:4} on {row['ranks']}"
                times = f"{measured_ms:9.2f} ms, simulated {step_ms:9.2f} {error:+7.1%}"
                print(f"{size}  {row['package'] or 'as it is':18} {times}{'  <<<' * (abs(error) > 0.1)}")
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main())
