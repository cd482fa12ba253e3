"""What contrastive losses of several libraries return on W ranks, measured with gloo on the CPU.

python docs/conventions.py    measures those that are installed and writes tune/bench/cpu-conventions.json
                               if none is absent that the file has

Each rank calls the loss for its rows and runs backward; gradients are averaged over the ranks, as DDP does. The truth
is the gradient of the dense loss of all rows, in fp64. A row has two figures for features and scale: `ratio` is the
factor of the truth in the averaged gradient; `error` is relative to ratio * truth, 0 if only the factor is wrong.
`values` are what the ranks return, relative to the true loss.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from infcl_gen.bench.results import lost, measurement, write_results  # noqa: E402
from infcl_gen.errors import ToolchainError  # noqa: E402
from infcl_gen.files import load_file  # noqa: E402
from infcl_gen.processes import Seat, run_ranks  # noqa: E402

OUTPUT = ROOT / "tune" / "bench" / "cpu-conventions.json"
RANKS = (1, 2, 3)
ROWS, DIM, SCALE = 8, 16, 14.3  # rows of a rank
TIMEOUT_S = 300.0
Step = Callable[[Any, Any, Any], Any]  # (q, k, scale) of a rank to its loss


@dataclasses.dataclass(frozen=True)
class Contestant:
    distribution: str
    module: str
    call: str
    loss: str  # a key of DENSE
    prepare: Callable[[], Step]
    learned_scale: bool = True
    alone: str | None = None  # why it does not run on one rank


def _dense_infonce(q: Any, k: Any, scale: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(scale * q @ k.T, torch.arange(len(q)))


def _dense_clip(q: Any, k: Any, scale: Any) -> Any:
    return (_dense_infonce(q, k, scale) + _dense_infonce(k, q, scale)) / 2


def _dense_ntxent(q: Any, k: Any, scale: Any) -> Any:
    """Both views are queries and keys; a row's positive is its other view, and it is no negative of itself."""
    import torch

    both = torch.cat([q, k])
    itself = torch.eye(len(both), dtype=torch.bool)
    logits = (scale * both @ both.T).masked_fill(itself, -torch.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(both)).roll(len(q)))


DENSE = {"clip": _dense_clip, "infonce": _dense_infonce, "ntxent": _dense_ntxent}


def _ours(loss: str) -> Step:
    from infcl_gen import ContrastiveLoss

    return ContrastiveLoss(loss)


def _open_clip(**flags: bool) -> Step:
    import torch.distributed as dist

    found = importlib.util.find_spec("open_clip")
    assert found is not None and found.submodule_search_locations
    module = load_file(Path(found.submodule_search_locations[0]) / "loss.py")  # `open_clip` itself needs torchvision
    criterion: Step = module.ClipLoss(rank=dist.get_rank(), world_size=dist.get_world_size(), **flags)
    return criterion


def _inf_cl() -> Step:
    ring_loss = importlib.import_module("inf_cl").cal_ring_loss
    one_way = partial(ring_loss, head_dim=DIM)
    return lambda q, k, scale: (one_way(q, k, scale=scale) + one_way(k, q, scale=scale)) / 2


def _sentence_transformers() -> Step:
    import torch

    losses = importlib.import_module("sentence_transformers.losses")
    criterion = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=SCALE, gather_across_devices=True)
    return lambda q, k, scale: criterion.compute_loss_from_embeddings([q, k], None)


def _lightly() -> Step:
    loss = importlib.import_module("lightly.loss").NTXentLoss(temperature=1 / SCALE, gather_distributed=True)
    return lambda q, k, scale: loss(q, k)


def _metric_learning(efficient: bool) -> Step:
    import torch
    import torch.distributed as dist

    loss = importlib.import_module("pytorch_metric_learning.losses").NTXentLoss(temperature=1 / SCALE)
    wrapper = importlib.import_module("pytorch_metric_learning.utils.distributed").DistributedLossWrapper
    criterion = wrapper(loss, efficient=efficient)
    labels = (torch.arange(ROWS) + ROWS * dist.get_rank()).repeat(2)
    return lambda q, k, scale: criterion(torch.cat([q, k]), labels)


def _grad_cache() -> Step:
    """It runs backward itself, through towers that here return their inputs; its value has no graph."""
    import torch

    criterion = importlib.import_module("grad_cache.loss").DistributedContrastiveLoss()
    cache = importlib.import_module("grad_cache").GradCache
    towers = [lambda x: x, lambda x: x]

    def step(q: Any, k: Any, scale: Any) -> Any:
        inputs = [x.detach().requires_grad_() for x in (q, k)]
        value = cache(towers, chunk_sizes=ROWS // 2, loss_fn=lambda x, y: criterion(scale * x, y))(*inputs)
        torch.autograd.backward([q, k], [x.grad for x in inputs])
        return value

    return step


CONTESTANTS = (
    *(Contestant("infcl_gen", "infcl_gen", f'ContrastiveLoss("{loss}")', loss, partial(_ours, loss))
      for loss in ("clip", "infonce")),
    *(Contestant(
        "open_clip_torch", "open_clip", f"ClipLoss(local_loss={local}, gather_with_grad={grad})", "clip",
        partial(_open_clip, local_loss=local, gather_with_grad=grad),
    ) for local in (False, True) for grad in (False, True)),
    Contestant(
        "inf-cl", "inf_cl", "cal_ring_loss, each way", "clip", _inf_cl,
        alone="on one rank it sends a gradient to itself, which gloo refuses",
    ),
    Contestant(
        "sentence-transformers", "sentence_transformers", "MultipleNegativesRankingLoss(gather_across_devices=True)",
        "infonce", _sentence_transformers, learned_scale=False,
    ),
    Contestant(
        "GradCache", "grad_cache", "GradCache(loss_fn=DistributedContrastiveLoss())", "infonce", _grad_cache,
        learned_scale=False,
    ),
    Contestant(
        "lightly", "lightly", "NTXentLoss(gather_distributed=True)", "ntxent", _lightly, learned_scale=False
    ),
    *(Contestant(
        "pytorch-metric-learning", "pytorch_metric_learning",
        f"DistributedLossWrapper(NTXentLoss(), efficient={efficient})", "ntxent",
        partial(_metric_learning, efficient), learned_scale=False,
    ) for efficient in (False, True)),
)  # fmt: skip


def leaves(rank: int) -> tuple[Any, Any, Any]:
    """Rows of a rank before they are normalised, and the scale; in fp64, with gradients."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    q, k = torch.randn(2, ROWS, DIM, dtype=torch.float64, generator=generator)
    scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
    return q.requires_grad_(), (q.detach() + k).requires_grad_(), scale


def measure_rank(names: list[str], seat: Seat) -> list[dict[str, Any]]:
    """The task of each rank: for each contestant {"value", "q", "k", "scale"}, or {"failed"}."""
    from torch.nn.functional import normalize

    seat.join_group("cpu", TIMEOUT_S)
    results: list[dict[str, Any]] = []
    for one in CONTESTANTS:
        if one.module not in names:
            continue
        if one.alone and seat.ranks == 1:
            results.append({"failed": one.alone})
            continue
        q, k, scale = leaves(seat.rank)
        try:
            loss = one.prepare()(normalize(q), normalize(k), scale)
            if loss.requires_grad:
                loss.backward()
        except Exception as error:
            results.append({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})
            continue
        found = {"value": loss.item(), "q": q.grad.tolist(), "k": k.grad.tolist()}
        results.append({**found, "scale": scale.grad.item() if one.learned_scale else None})
    return results


def rows_of(one: Contestant, ranks: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a contestant from what its ranks returned."""
    import torch
    from torch.nn.functional import normalize

    row: dict[str, Any] = {
        "loss": one.loss, "batch": ROWS * ranks, "dim": DIM, "dtype": "fp64", "ranks": ranks, "impl": one.distribution,
        "call": one.call, "scale": SCALE,
    }  # fmt: skip
    failed = next((result["failed"] for result in results if "failed" in result), None)
    if failed:
        return row | {"features": None, "dscale": None, "values": None, "error": failed}
    given = [leaves(rank) for rank in range(ranks)]
    scale = given[0][2]
    q, k = (torch.cat([normalize(each[side]) for each in given]) for side in (0, 1))
    loss = DENSE[one.loss](q, k, scale)
    loss.backward()

    def compared(averaged: Any, true: Any) -> dict[str, float]:
        ratio = float((averaged * true).sum() / true.square().sum())
        return {"ratio": ratio, "error": float((averaged / ratio - true).norm() / true.norm())}

    sides = [[result[side] for side in ("q", "k")] for result in results]
    averaged = torch.tensor(sides, dtype=torch.float64) / ranks
    true = torch.stack([torch.stack([each[0].grad, each[1].grad]) for each in given])
    scales = [result["scale"] for result in results]
    dscale = None if scales[0] is None else compared(torch.tensor(scales, dtype=torch.float64).mean(), scale.grad)
    values = [result["value"] / loss.item() for result in results]
    return row | {"features": compared(averaged, true), "dscale": dscale, "values": values, "error": None}


def main() -> int:
    absent = {}
    for one in CONTESTANTS:
        if importlib.util.find_spec(one.module) is None:
            absent[one.distribution] = f"{one.distribution} is not installed"
    if missing := lost(OUTPUT, absent):
        print(f"{OUTPUT.name} is left as it is: install {', '.join(missing)}, which it has", file=sys.stderr)
        return 4
    here = [one for one in CONTESTANTS if one.distribution not in absent]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "docs"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    rows = []
    for ranks in RANKS:
        task, names = "conventions:measure_rank", [one.module for one in here]
        try:
            results = run_ranks(task, names, ranks, TIMEOUT_S, environment)
        except ToolchainError as error:
            print(error, file=sys.stderr)
            return 4
        each = zip(here, zip(*results, strict=True), strict=True)
        rows += [rows_of(one, ranks, list(found)) for one, found in each]
    libraries = sorted({one.distribution for one in here} - {"infcl_gen"})
    write_results(OUTPUT, measurement(rows, "python docs/conventions.py", absent, libraries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
