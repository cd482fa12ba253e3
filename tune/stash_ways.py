"""Other ways through the backward of a stash on this GPU, beside the one that ships: what was tried.

    python tune/stash_ways.py [--batch 64k] [--dim 768] [-o tune/analysis/h200-stash-ways.json]

A stash spares a product, and adds memory traffic: a pass from kept tiles to gradients of logits, before the products
that add these up. The ways, all on the tiles that one forward has kept:

    as it ships              for each panel: the pass, the product for dq, the product for dk
    pass alone, products alone
    on a second stream       the pass of the next panel beside the products of this one, in a second panel
    ... leaving N            the same, and the matrix library leaves so many multiprocessors to it
    panel R x C              as it ships, in smaller panels: they stay in the L2 cache, and fill fewer multiprocessors
    inside the product       the product for dq makes its gradients itself, of whole panels (those for dk would have to
                             be made again); beside the pass and the library's product for dq

Times are behind other work, all in turns; the repair of flagged strips is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.problem import make_problem, parse_count
from infcl_gen.tuning.bench import features
from infcl_gen.tuning.results import command_line, write_results
from infcl_gen.tuning.timing import Timer

LEAD_MS = 20.0
SMALLER = ((8192, 8192), (8192, 4096), (4096, 4096), (5632, 2816))
LEFT = (4, 8, 16)
TILES = ((128, 256, 64, 8, 3), (128, 256, 32, 8, 4), (256, 128, 64, 8, 3), (64, 256, 64, 4, 3))


@triton.jit
def product_from_tiles(tiles, a, b, c, x, total, keys, tiles_stride, DIM: tl.constexpr, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """total (rows, DIM) = g x, g = tile * (a_i c_j + b_j) made in registers; c: 2^reference of each key's block."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(a + r)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for key0 in range(0, keys, KEYS):
        j = key0 + tl.arange(0, KEYS)
        tile = tl.load(tiles + r.to(tl.int64)[:, None] * tiles_stride + j[None, :]).to(tl.float32)
        g = tile * (own[:, None] * tl.load(c + j)[None, :] + tl.load(b + j)[None, :])
        sums = tl.dot(g.to(tl.bfloat16), tl.load(x + j[:, None] * DIM + d[None, :]), sums)
    tl.store(total + r.to(tl.int64)[:, None] * DIM + d[None, :], sums)


class Backward:
    """The kept tiles of one forward, and the steps of its backward."""

    def __init__(self, package: Path) -> None:
        module = import_package(package)
        self.schedule: Any = importlib.import_module(f"{module.__name__}.schedule")
        statistics_of: Any = importlib.import_module(f"{module.__name__}._runtime.statistics").view
        problem, schedule = module.SPEC["problem"], self.schedule
        rows, dim = problem["batch_size"], problem["dim"]
        self.panel = schedule.PANEL_ROWS, schedule.PANEL_KEYS
        self.q, self.k = (features(rows, dim, "bf16", seed, "cuda").detach() for seed in (0, 1))
        self.scale, self.bias = (torch.tensor(value, device="cuda") for value in (14.3, 0.0))
        pairs = [torch.empty((2, rows), device="cuda") for _ in range(2)]
        self.queries, self.keys = map(statistics_of, pairs)
        self.positive = torch.empty((schedule.POSITIVE_PARTS, rows), device="cuda")
        self.stash = torch.empty(schedule.stash_shape(rows, rows), dtype=torch.bfloat16, device="cuda")
        self.dq, self.dk = (torch.empty((rows, dim), device="cuda") for _ in range(2))
        self.scratch = [torch.empty(self.panel, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self.side: Any = torch.cuda.Stream()
        self.flags = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
        arguments = (self.q, self.k, self.scale, self.bias, 0, 0, self.queries, self.keys, self.positive)
        schedule.forward_block(*arguments, fresh_queries=True, fresh_keys=True, stash=self.stash)

    def panels(self, rows: int, keys: int) -> list[tuple[slice, slice]]:
        parts = (
            [slice(start, min(start + size, len(x))) for start in range(0, len(x), size)]
            for x, size in ((self.q, rows), (self.k, keys))
        )
        return list(itertools.product(*parts))

    def gradients(self, rows: slice, keys: slice, buffer: int = 0) -> Any:
        """The pass: g of one panel."""
        schedule, m, n = self.schedule, rows.stop - rows.start, keys.stop - keys.start
        kernels, g = schedule.kernels, self.scratch[buffer]
        block = kernels.GRADIENT_ROWS.value, kernels.GRADIENT_KEYS.value
        # References are those of the forward's strips: smaller panels take whole panels' first ones, which are as far.
        start = rows.start // self.panel[0] * self.panel[0]
        tiles, _ = schedule._stash_panel(self.stash, len(self.k), rows.start, keys.start)
        _, reference = schedule._stash_panel(self.stash, len(self.k), start, keys.start)
        tiles_down, tiles_across = schedule.cdiv(m, block[0]), schedule.cdiv(n, block[1])
        strip = schedule.strip_blocks(
            tiles_down, tiles_across, schedule.FORWARD_STRIPS, schedule.FORWARD_PROGRAMS
        )
        grid = (tiles_across * schedule.cdiv(tiles_down, strip),)
        own = (self.queries.exponent[rows], self.queries.mantissa[rows])
        visiting = (self.keys.exponent[keys], self.keys.mantissa[keys])
        schedule.launch(
            kernels.gradient_from_stash, grid, tiles, reference, *own, *visiting, g,
            self.flags, m, n, strip, tiles.stride(0), 0, g.stride(0), num_warps=8,
        )  # fmt: skip
        return g[:m, :n]

    def products(self, g: Any, rows: slice, keys: slice, only_dq: bool = False) -> None:
        self.schedule._add_product(self.dq[rows], g, self.k[keys], keys.start == 0)
        if not only_dq:
            self.schedule._add_product(self.dk[keys], g.T, self.q[rows], rows.start == 0)

    def shipped(self, rows: int, keys: int) -> None:
        for panel in self.panels(rows, keys):
            self.products(self.gradients(*panel), *panel)

    def pass_alone(self) -> None:
        for panel in self.panels(*self.panel):
            self.gradients(*panel)

    def products_alone(self) -> None:
        for panel in self.panels(*self.panel):
            self.products(self.scratch[0], *panel)

    def beside(self, left: int = 0) -> None:
        """The pass of the next panel on a second stream."""
        main: Any = torch.cuda.current_stream()
        panels = self.panels(*self.panel)
        made, used = ([torch.cuda.Event() for _ in panels] for _ in range(2))
        self.side.wait_stream(main)
        with leaving(left):
            for number, panel in enumerate(panels):
                with torch.cuda.stream(self.side):
                    if number > 1:
                        self.side.wait_event(used[number - 2])
                    self.gradients(*panel, buffer=number % 2)
                    made[number].record(self.side)
                main.wait_event(made[number])
                self.products(self.scratch[number % 2], *panel)
                used[number].record(main)

    def pass_and_dq(self) -> None:
        for panel in self.panels(*self.panel):
            self.products(self.gradients(*panel), *panel, only_dq=True)

    def inside(self, rows: int, columns: int, keys: int, warps: int, stages: int) -> None:
        dim = self.q.shape[1]
        a, b, c = (torch.ones(len(self.q), device="cuda") for _ in range(3))
        for i, j in self.panels(*self.panel):
            tiles, _ = self.schedule._stash_panel(self.stash, len(self.k), i.start, j.start)
            grid = ((i.stop - i.start) // rows, dim // columns)
            product_from_tiles[grid](
                tiles, a, b, c, self.k[j], self.dq[i], j.stop - j.start, tiles.stride(0), dim, rows, columns, keys,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip


@contextlib.contextmanager
def leaving(multiprocessors: int) -> Iterator[None]:
    """While this lasts the matrix library plans for so many multiprocessors less (0: as ever)."""
    if not multiprocessors:
        yield
        return
    library = ctypes.CDLL("libcublas.so." + str(torch.version.cuda).partition(".")[0])
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    count = torch.cuda.get_device_properties().multi_processor_count - multiprocessors
    settings: Any = torch._C
    library.cublasSetSmCountTarget(handle, count)
    settings._set_sm_carveout_experimental(multiprocessors)
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, 0)
        settings._set_sm_carveout_experimental(None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=Path("tune/analysis/h200-stash-ways.json"))
    parser.add_argument("--batch", type=parse_count, default="64k")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"memory_budget": "40GiB", "set": {"strategy": "stash"}}
        problem = make_problem(batch_size=given.batch, dim=given.dim, **flags)
        backward = Backward(infcl_gen.generate(problem, Path(folder) / "package"))
        ways: dict[str, Callable[[], None]] = {
            "as it ships": functools.partial(backward.shipped, *backward.panel),
            "pass alone": backward.pass_alone,
            "products alone": backward.products_alone,
            "on a second stream": backward.beside,
            "pass and product for dq": backward.pass_and_dq,
        }
        for left in LEFT:
            ways[f"on a second stream, leaving {left}"] = functools.partial(backward.beside, left)
        for panel in SMALLER:
            ways["panel {} x {}".format(*panel)] = functools.partial(backward.shipped, *panel)
        for tile in TILES:
            name = "inside the product for dq, {} x {} x {}, {} warps, {} stages".format(*tile)
            ways[name] = functools.partial(backward.inside, *tile)
        rows = measured(ways, given.repeats)
    for row in rows:
        print(*row.values())
    point = {"batch": given.batch, "dim": given.dim, "strategy": "stash"}
    write_results(
        given.output, [point | row for row in rows], command_line("tune/stash_ways.py", sys.argv[1:])
    )
    return 0


def measured(ways: dict[str, Callable[[], None]], repeats: int) -> list[dict[str, Any]]:
    """Median and spread of each way, in turns; a way that cannot be compiled says why."""
    timer, times = Timer("cuda"), dict[str, list[float]]()
    failed = {}
    for name, way in ways.items():
        try:
            way()
            torch.cuda.synchronize()
            times[name] = []
        except Exception as error:  # a tile that does not fit: said in its row
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for round_ in range(repeats):
        for name in random.Random(round_).sample(list(times), len(times)):
            times[name].append(timer.queued_ms(ways[name], LEAD_MS)[0])
    found = [
        {
            "way": name,
            "ms": statistics.median(ms),
            "std_ms": statistics.stdev(ms),
            "repeats": len(ms),
            "error": None,
        }
        for name, ms in times.items()
    ]
    return found + [
        {"way": name, "ms": None, "std_ms": None, "repeats": 0, "error": why} for name, why in failed.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
