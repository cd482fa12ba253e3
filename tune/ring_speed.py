"""Rings of GPUs of one host: time with and without communication, and against peers that run on several devices.

python tune/ring_speed.py [--ranks 4,2] [--rows 16k,64k] [--dim 768] [--transports ring,gather]
    [--memory-budget 680MB] [--peers-up-to 64k] [-o tune/bench/h200-ring.json]

`--rows` are those of each GPU; peers are measured up to the global batch of `--peers-up-to`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import infcl_gen
from infcl_gen.errors import ToolchainError
from infcl_gen.problem import make_problem, parse_count
from infcl_gen.tuning.results import command_line, write_results
from infcl_gen.tuning.ring_bench import PEERS, measure_ring

FIGURES = ("median_ms", "std_ms", "queued_ms", "queued_std_ms", "predicted_queued_ms", "peak_bytes", "error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/bench/h200-ring.json"))
    parser.add_argument("--ranks", default="4,2")
    parser.add_argument("--rows", default="16k,64k")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--transports", default="ring,gather", help="how keys travel: ring, gather")
    parser.add_argument("--memory-budget", help="of more packages, for the first of --rows")
    parser.add_argument("--peers-up-to", type=parse_count, default="64k")
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    measured: list[dict[str, Any]] = []
    for ranks in map(parse_count, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows_of_each = [parse_count(own) for own in given.rows.split(",")]
            ways = given.transports.split(",")
            wanted = [(own, way, None) for own in rows_of_each for way in ways]
            if given.memory_budget:
                wanted += [(rows_of_each[0], way, given.memory_budget) for way in ways]
            packages = []
            for own, way, budget in wanted:
                flags = {"devices": ranks, "memory_budget": budget, "set": {"transport": way}}
                problem = make_problem(batch_size=ranks * own, dim=given.dim, **flags)
                name = f"{way}_{own}" + "_budget" * (budget is not None)
                packages.append(infcl_gen.generate(problem, Path(folder) / name))
            try:
                rows = measure_ring(
                    packages, ranks, tuple(PEERS), rounds=given.repeats, peers_up_to=given.peers_up_to
                )
            except ToolchainError as error:
                print(f"{ranks} ranks: {error}", file=sys.stderr)
                return error.exit_code
        measured += rows
        for row in rows:
            who = (row["impl"], row["transport"] or "", row["package"] or "")
            print(ranks, row["batch"], *who, *(row[name] for name in FIGURES))
        write_results(
            given.output, measured, command_line("tune/ring_speed.py", sys.argv[1:]), None, PEERS.values()
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
