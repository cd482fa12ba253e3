"""Rings of GPUs of one host: time with and without communication, and against peers that run on several devices.

python tune/ring_speed.py [--ranks 4,2] [--rows 16k,64k] [--dim 768] [--transport ring|gather]
    [--peers-up-to 64k] [-o tune/bench/h200-ring.json]

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
from infcl_gen.tuning.bench import write_results
from infcl_gen.tuning.ring_bench import PEERS, measure_ring


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/bench/h200-ring.json"))
    parser.add_argument("--ranks", default="4,2")
    parser.add_argument("--rows", default="16k,64k")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--transport", choices=("ring", "gather"), help="default: what the planner takes")
    parser.add_argument("--peers-up-to", type=parse_count, default="64k")
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    measured: list[dict[str, Any]] = []
    for ranks in map(parse_count, given.ranks.split(",")):
        for own in map(parse_count, given.rows.split(",")):
            peers = tuple(PEERS) if ranks * own <= given.peers_up_to else ()
            with tempfile.TemporaryDirectory() as folder:
                settings = {"transport": given.transport} if given.transport else {}
                problem = make_problem(batch_size=ranks * own, dim=given.dim, devices=ranks, set=settings)
                package = infcl_gen.generate(problem, Path(folder) / "package")
                try:
                    rows = measure_ring([package], ranks, peers, rounds=given.repeats)
                except ToolchainError as error:
                    print(f"{ranks} x {own}: {error}", file=sys.stderr)
                    return error.exit_code
            measured += rows
            for row in rows:
                figures = ("median_ms", "std_ms", "predicted_ms", "peak_bytes", "error")
                print(
                    ranks, row["batch"], row["impl"], row["package"] or "", *(row[name] for name in figures)
                )
            write_results(given.output, measured, "python tune/ring_speed.py", None, PEERS.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
