"""Errors against fp64 under bf16 autocast, as CLIP trains: fp32 features, a bf16 package, and OpenCLIP's loss.

python tune/gradient_errors.py [--batches 4k,16k] [--dim 768] [-o tune/analysis/h200-autocast.json]

The features' values are bf16 numbers, so that rounding them, which is the same for everybody, counts for nobody. A
package's gradients come in the features' fp32; a library's are fp32 numbers that were rounded to bf16 on the way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import infcl_gen
from infcl_gen.emission import import_package, read_package
from infcl_gen.problem import make_problem, parse_count
from infcl_gen.tuning.bench import RESULTS, features, point_of, step_of, training_step
from infcl_gen.tuning.peers import open_clip_loss
from infcl_gen.tuning.results import blank_row, command_line, write_results

SCALES = (14.3, 100.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/analysis/h200-autocast.json"))
    parser.add_argument("--batches", default="4k,16k")
    parser.add_argument("--dim", type=parse_count, default="768")
    parser.add_argument("--target", default="auto")
    given = parser.parse_args()
    rows = []
    for batch in map(parse_count, given.batches.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            problem = make_problem(batch_size=batch, dim=given.dim, dtype="bf16", target=given.target)
            package = infcl_gen.generate(problem, Path(folder) / "package")
            for scale in SCALES:
                rows += _rows(package, scale)
    write_results(
        given.output, rows, command_line("tune/gradient_errors.py", sys.argv[1:]), None, ["open_clip_torch"]
    )
    for row in rows:
        print(row["batch"], row["scale"], row["impl"], row["err"])
    return 0


def _rows(package: Path, scale: float) -> list[dict[str, Any]]:
    """The package's row and OpenCLIP's; no times are taken."""
    module, criterion = import_package(package), open_clip_loss().ClipLoss()
    point = point_of([read_package(package)], scale=scale)
    q, k = (
        features(point.batch, point.dim, point.dtype, seed, point.device).detach().float().requires_grad_()
        for seed in range(2)
    )
    temperature = torch.tensor(scale, device=q.device, requires_grad=True)
    exact = _exact(module, q, k, temperature)
    sizes = {name: getattr(point, name) for name in ("loss", "batch", "keys", "dim", "dtype", "precision")}
    steps = {
        "infcl": training_step(module, q, k, temperature, torch.bfloat16),
        "open_clip": step_of(lambda: criterion(q, k, temperature), q, k, temperature, torch.bfloat16),
    }
    found = []
    for name, step in steps.items():
        errors = {
            which: float((got.double() - true).norm() / true.norm())
            for which, got, true in zip(RESULTS, step(), exact, strict=True)
            if got is not None
        }
        row = blank_row(sizes, 1, name, "fp32 features under autocast", scale)
        found.append({**row, "err": errors})
    return found


def _exact(module: Any, q: Any, k: Any, temperature: Any) -> list[torch.Tensor]:
    """Loss, dq, dk and dscale of the dense formula in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, temperature)]
    loss = module.reference(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


if __name__ == "__main__":
    sys.exit(main())
