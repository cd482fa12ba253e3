"""Time, memory and errors of clip in bf16 over a grid of batch sizes and dimensions on this GPU, in parts.

python tune/speed_grid.py [--minutes 8] [--batches 1k,...] [--dims 128,...] [--against torch-compiled] [--others all]
                          [--others-at 32k:768,...] [--memory-budgets auto,40GiB,577MB@64k:768]
                          [--again 32k:768,...] [--features fp32] [--plot FILE.svg] [-o tune/bench/h200-speed.json]

The peers of --against are measured at every point, those of --others only where --others-at says. Every point is
written as soon as it is measured, and points that the file holds with all peers that are wanted are not measured
again, but those of --again: when the time is up, run it again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import infcl_gen
from infcl_gen.errors import InputError
from infcl_gen.problem import Problem, make_problem, parse_count
from infcl_gen.tuning.bench import row_precision
from infcl_gen.tuning.contest import Contest, Limits, table
from infcl_gen.tuning.peers import chosen_peers
from infcl_gen.tuning.plot import check_plot, plot
from infcl_gen.tuning.results import board, command_line, measured_before, write_results

BATCHES = "1k,2k,4k,8k,16k,32k,64k,128k"
DIMS = "128,256,384,512,768,1024,1152"
OTHERS_AT = "8k:768,32k:768,64k:768,64k:256"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/bench/h200-speed.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batches", type=_counts, default=BATCHES)
    parser.add_argument("--dims", type=_counts, default=DIMS)
    parser.add_argument("--against", default="torch-compiled")
    parser.add_argument("--others", default="all")
    parser.add_argument("--others-at", type=_points, default=OTHERS_AT)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5, help="timed runs at one point, all together")
    parser.add_argument(
        "--silent", type=float, default=120.0, help="seconds that one contestant may take to start"
    )
    parser.add_argument(
        "--errors", type=parse_count, default="32k", help="largest batch with errors against fp64"
    )
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument(
        "--features", default=None, help="dtype of the features: fp32 for everybody under autocast"
    )
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument(
        "--memory-budgets",
        default="auto,40GiB",
        help="a package for each that plans otherwise; BUDGET@B:D: at that point only",
    )
    parser.add_argument(
        "--again", type=_points, default="", help="points to measure though the file has them"
    )
    parser.add_argument("--target", default="auto")
    parser.add_argument("--plot", type=Path, default=None)
    given = parser.parse_args()
    if given.plot is not None:
        check_plot(given.plot)

    everywhere = chosen_peers(given.against)
    everybody = tuple({peer.name: peer for peer in (*everywhere, *chosen_peers(given.others))}.values())
    libraries = [peer.distribution for peer in everybody]
    now = command_line("tune/speed_grid.py", sys.argv[1:])
    rows, absent, command = measured_before(given.output, now, libraries)
    deadline = time.monotonic() + 60 * given.minutes
    limits = Limits(given.repeats, given.seconds, given.silent, given.errors)
    precision = row_precision("default", given.dtype, given.features)
    left = 0
    with Contest(everybody, given.scale, limits, given.features) as contest:
        for dim in given.dims:
            for batch in given.batches:
                wanted = [
                    peer.name for peer in (everybody if (batch, dim) in given.others_at else everywhere)
                ]
                here = [
                    row
                    for row in rows
                    if [row[name] for name in ("batch", "dim", "dtype", "precision", "scale")]
                    == [batch, dim, given.dtype, precision, given.scale]
                ]
                complete = here and {row["impl"] for row in here} | set(absent) >= set(wanted)
                if complete and (batch, dim) not in given.again:
                    continue
                budgets = _budgets(given.memory_budgets, (batch, dim))
                if not budgets:
                    continue
                if time.monotonic() > deadline:
                    left += 1
                    continue
                flags: dict[str, Any] = {"dtype": given.dtype, "target": given.target}
                problems = {
                    budget: make_problem(batch_size=batch, dim=dim, memory_budget=budget, **flags)
                    for budget in budgets
                }
                with tempfile.TemporaryDirectory() as folder:
                    packages = _packages(problems, Path(folder))
                    fresh = contest.rows(contest.point(packages, batch, wanted))
                absent |= contest.absent
                rows = [row for row in rows if row not in here] + fresh
                rows.sort(key=lambda row: (row["dim"], row["batch"]))  # stable: packages stay first
                write_results(given.output, rows, command, absent, libraries)
                for line in table(fresh)[1]:
                    print("  ".join(cell or "-" for cell in line), flush=True)
    if given.plot is not None and rows:
        plot(rows, given.plot, f"{board()}, forward + backward")
    print(f"{len(rows)} rows in {given.output}" + (f"; {left} points left: run it again" if left else ""))
    return 0


def _packages(problems: dict[str, Problem], folder: Path) -> list[Path]:
    """A package for each memory budget whose plan differs from those before it, in a folder named by its strategy."""
    found: list[Path] = []
    seen: list[Any] = []
    for budget, problem in problems.items():
        plan = infcl_gen.plan(problem)
        tiles = (plan.strategy, plan.panel_rows, plan.panel_keys, plan.stash_rows, plan.replay, plan.blocks)
        if tiles not in seen:
            seen.append(tiles)
            suffix = "" if problem.memory_budget_bytes is None else f"_{budget}"
            found.append(infcl_gen.generate(problem, folder / f"{plan.strategy}{suffix}"))
    return found


def _budgets(text: str, here: tuple[int, int]) -> list[str]:
    """Those of "auto,577MB@64k:768" for this batch and dim."""
    words = (word.partition("@") for word in text.split(","))
    return [budget for budget, _, point in words if not point or here in _points(point)]


def _counts(text: str) -> list[int]:
    return [parse_count(part) for part in text.split(",")]


def _points(text: str) -> set[tuple[int, int]]:
    """ "32k:768,64k:256" as pairs of batch and dim."""
    pairs = (part.partition(":") for part in text.split(",") if part)
    return {(parse_count(batch), parse_count(dim)) for batch, _, dim in pairs}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(str(error))
