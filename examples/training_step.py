"""A whole training step of an open_clip model in several ways: time and peak memory, in turns.

    pip install open_clip_torch
    python examples/training_step.py --model ViT-B-32 --batch-size 16384 --ways planned,accum_freq,two_forwards \
        --output steps.json

    open_clip, infcl   one forward and backward of the whole batch, with the loss of open_clip, of this project
    planned            `infcl_gen.plan_step`, within --memory
    cached             the same with a gradient cache alone
    two_forwards       of the planned micro-batches: forward without a graph, then forward and backward; no loss
    accum_freq         open_clip's training loop with --accum-freq, in micro-batches of --micro-batch
    gradcache, sentence_transformers   gradient caches of other libraries (gradient_caches.py), in the same ones

Random images and texts, bf16 autocast, gradients of all parameters; one CUDA GPU. --batch-size and --memory take lists.
Rows that the output has already are not measured again, so that a campaign can be done in parts. The row of a way whose
library is not installed says "absent".

Under torchrun the model is in DistributedDataParallel, the batch is that of all ranks, and times and peaks are the
largest of a rank:

    torchrun --nproc-per-node 2 examples/training_step.py --ways planned,cached --batch-size 16384
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradient_caches
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import infcl_gen
from infcl_gen import Samples
from infcl_gen.bench.results import measured_before, measurement, write_results
from infcl_gen.bench.timing import turns
from infcl_gen.inputs.text import one_line
from infcl_gen.step.costs import StepCosts, write_costs
from infcl_gen.step.plan import TREATMENTS

PLANNED, PEERS = ("planned", "cached"), ("gradcache", "sentence_transformers")
WHOLE = ("open_clip", "infcl")
WAYS = (*WHOLE, *PLANNED, "two_forwards", "accum_freq", *PEERS)
SAME = ("way", "model", "batch", "ranks", "memory_bytes", "micro_batch", "checkpointing")  # rows of one measurement
ABSENT = "absent"
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32", help="an architecture of open_clip")
    parser.add_argument("--batch-size", default="2048", help="image-text pairs of a step")
    parser.add_argument("--ways", default="open_clip,infcl", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--memory", default="auto", help="for a planned step: 24GiB, or auto")
    parser.add_argument("--micro-batch", type=int, help="of accum_freq and of other libraries [the plan's]")
    parser.add_argument(
        "--checkpointing", action="store_true", help="open_clip's --grad-checkpointing, where not planned"
    )
    parser.add_argument("--images", choices=("device", "host", "made"), default="device", help="where the batch is")
    parser.add_argument("--costs", type=Path, help="what the towers cost: read, or measured and written where absent")
    parser.add_argument("--warm", type=int, default=1, help="steps of each way that are not timed")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each way")
    parser.add_argument("--output", type=Path, help="write the rows to this .json file, beside those that it has")
    flags = parser.parse_args()
    ways = flags.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: {', '.join(unknown)}: valid: {', '.join(WAYS)}")
    if flags.images == "made" and (whole := [way for way in ways if way in (*WHOLE, *PEERS)]):
        parser.error(f"--images made: {', '.join(whole)} take a batch that is there; leave them out")
    try:
        import open_clip
    except ImportError:
        parser.exit(4, "training_step: open_clip is missing; pip install open_clip_torch\n")
    if not torch.cuda.is_available():
        parser.exit(4, "training_step: a CUDA GPU is needed; torch sees none\n")
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ranks > 1 and (alone := [way for way in ways if way not in PLANNED]):
        parser.error(f"--ways: {', '.join(alone)} run on one GPU; under torchrun: {', '.join(PLANNED)}")
    if ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))

    launcher = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python"
    command = f"{launcher} examples/training_step.py --model {flags.model} --ways {flags.ways}"
    rows, _, command = (
        measured_before(flags.output, command, ["open_clip_torch"]) if flags.output else ([], {}, command)
    )
    rows = [row for row in rows if row["way"] not in ways or not (row["error"] or "").startswith(ABSENT)]
    sizes, budgets = map(int, flags.batch_size.split(",")), flags.memory.split(",")
    for batch, memory in itertools.product(sizes, budgets):
        made = Ways(open_clip, flags, batch, memory, ranks)
        wanted = {way: made.identity(way) for way in ways}
        left = [way for way in ways if not any(_is(row, wanted[way]) for row in rows)]
        steps, found = startable(left, made.step, flags.repeats)
        for way, row in (found | measured(steps, flags.warm, flags.repeats, made.forget)).items():
            rows.append(wanted[way] | made.predicted(way) | row)
            if rank:
                continue
            seconds = f"{row['median_ms']:10.1f} +- {row['std_ms']:.1f} ms" if row["error"] is None else row["error"]
            print(f"{way:14s} {batch:8d} {memory:8s} {seconds}  {row['peak_bytes'] / 2**20:10,.0f} MiB", flush=True)
        if flags.output is not None and left and not rank:
            write_results(flags.output, measurement(rows, command, {}, ["open_clip_torch"]))
        del made, steps
        gc.collect()  # modules are in cycles: their memory would be in the next peak
    if ranks > 1:
        dist.destroy_process_group()


def _is(row: dict[str, Any], identity: dict[str, Any]) -> bool:
    return all(row.get(name) == identity[name] for name in SAME)


class Ways:
    """The ways of a step of one model on one batch; each leaves gradients behind, which are removed before the next."""

    def __init__(self, open_clip: Any, flags: argparse.Namespace, batch: int, memory: str, ranks: int = 1) -> None:
        torch.manual_seed(0)
        self._flags, self._open_clip, self._batch, self._memory = flags, open_clip, batch, memory
        self._ranks = ranks
        self._model = open_clip.create_model(flags.model).cuda().train()
        self._replicated = DistributedDataParallel(self._model) if ranks > 1 else self._model
        self._images, self._texts = self._inputs(batch // ranks)
        self._plans: dict[str, Any] = {}

    def identity(self, way: str) -> dict[str, Any]:
        """What rows of the same measurement share."""
        planned = way in (*PLANNED, "two_forwards")
        micro_batch = self._flags.micro_batch if way in ("accum_freq", *PEERS) else None
        return {
            "way": way, "model": self._flags.model, "batch": self._batch, "ranks": self._ranks,
            "images": self._flags.images,
            "memory_bytes": self.plan().problem.memory_bytes if planned and self._memory != "auto" else None,
            "micro_batch": micro_batch, "checkpointing": self._flags.checkpointing and not planned,
        }  # fmt: skip

    def plan(self, way: str = "planned") -> Any:
        """The planned step; autocast is part of it."""
        if way not in self._plans:
            costs = self._flags.costs
            self._plans[way] = infcl_gen.plan_step(
                self._towers(),
                list(self._inputs(64, "device" if self._flags.images == "device" else "host")),
                scale=lambda: self._model.logit_scale.exp(), batch_size=self._batch, model=self._replicated,
                memory=self._memory, optimizer="none", autocast=torch.bfloat16,
                treatments=("cached",) if way == "cached" else TREATMENTS,
                costs=costs if costs is not None and costs.exists() else None,
            )  # fmt: skip
            if costs is not None and not costs.exists() and self._ranks == 1:
                write_costs(costs, self._described_costs(self._plans[way].problem.costs))
        return self._plans[way]

    def _towers(self) -> list[Callable[[Tensor], Tensor]]:
        model = self._replicated  # whose forward normalises the features of what it is given

        def image(images: Tensor) -> Tensor:
            return model(image=images.cuda())[0]  # type: ignore[no-any-return]

        def text(texts: Tensor) -> Tensor:
            return model(text=texts)[1]  # type: ignore[no-any-return]

        return [image, text]

    def _described_costs(self, costs: StepCosts) -> StepCosts:
        """With what they depend on."""
        model = self._model
        return dataclasses.replace(
            costs,
            versions={**costs.versions, "open_clip": importlib.metadata.version("open_clip_torch")},
            measured=f"open_clip {self._flags.model}, fp32 weights under bf16 autocast, image "
            f"{model.visual.image_size[0]}, text {model.context_length} tokens, TF32 at the default of torch",
        )

    def predicted(self, way: str) -> dict[str, Any]:
        if way not in PLANNED:
            return {}
        plan = self.plan(way)
        towers = [f"{tower.name}: {_described(tower)}" for tower in plan.account.towers]
        return {
            "predicted_peak_bytes": plan.predicted_peak_bytes, "predicted_ms": 1e3 * plan.predicted_time_s,
            "towers": "; ".join(towers),
        }  # fmt: skip

    def step(self, way: str) -> Step:
        if way in PLANNED:
            run = self.plan(way).step(progress=False)
            run(*self._inputs(64, "device"))  # libraries are loaded, and the loss compiled, once a process: 1 to 2 s
            self.forget()
            return lambda: run(self._images, self._texts)
        if way == "two_forwards":
            return self._two_forwards
        self._model.set_grad_checkpointing(self._flags.checkpointing)
        if way == "accum_freq":
            return self._accum_freq
        if way in PEERS:
            return self._gradient_cache(way)
        loss = self._open_clip.ClipLoss() if way == "open_clip" else infcl_gen.ContrastiveLoss()
        return lambda: self._whole(loss)

    def forget(self) -> None:
        """Without gradients, as behind an optimiser's zero_grad()."""
        self._model.zero_grad()

    def _inputs(self, rows: int, where: str | None = None) -> tuple[Any, Any]:
        model, where = self._model, where or self._flags.images
        side = model.visual.image_size[0]
        texts = torch.randint(1, model.vocab_size, (rows, model.context_length), device="cuda")
        if where == "made":

            def make(part: slice) -> Tensor:
                generator = torch.Generator("cuda").manual_seed(part.start)
                return torch.randn(part.stop - part.start, 3, side, side, device="cuda", generator=generator)

            return Samples(rows, make), texts
        images = torch.empty(rows, 3, side, side, device="cuda" if where == "device" else "cpu")
        for part in images.split(1024):
            part.copy_(torch.randn(part.shape, device="cuda"))
        return images, texts

    def _some(self, place: int, start: int, size: int) -> Tensor:
        """The inputs of a micro-batch of one tower."""
        rows, given = slice(start, min(start + size, self._batch)), (self._images, self._texts)[place]
        some: Tensor = given.make(rows) if isinstance(given, Samples) else given[rows]
        return some.cuda()

    def _part(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        return self._some(0, start, size), self._some(1, start, size)

    def _micro_batch(self) -> int:
        planned = (tower.cached.micro_batch for tower in self.plan().account.towers)
        return int(self._flags.micro_batch or max(planned))

    def _gradient_cache(self, way: str) -> Step:
        """Of another library, with open_clip's loss where it takes one."""
        more = {"loss": self._open_clip.ClipLoss()} if way == "gradcache" else {}
        inputs, autocast = (self._images, self._texts), functools.partial(torch.autocast, "cuda", torch.bfloat16)
        make = getattr(gradient_caches, way)
        step: Step = make(
            self._towers(), inputs, self._model.logit_scale.exp, self._micro_batch(), autocast=autocast, **more
        )
        return step

    def _whole(self, loss: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(*self._model(self._images, self._texts)[:3])
        value.backward()

    def _two_forwards(self) -> None:
        for place, (tower, plan) in enumerate(zip(self._towers(), self.plan().account.towers, strict=True)):
            size = max(part.micro_batch for part in (plan.cached, plan.checkpointed, plan.kept) if part.samples)
            with torch.autocast("cuda", torch.bfloat16):
                for start in range(0, self._batch, size):
                    with torch.no_grad():
                        tower(self._some(place, start, size))
                torch.clear_autocast_cache()
                for start in range(0, self._batch, size):
                    features = tower(self._some(place, start, size))
                    features.backward(torch.ones_like(features))

    def _accum_freq(self) -> None:
        """As open_clip_train.train.train_one_epoch: features of all, then each micro-batch again among the others'."""
        size = self._micro_batch()
        loss, starts = self._open_clip.ClipLoss(), range(0, self._batch, size)
        kept: list[list[Tensor]] = [[], []]
        for start in starts:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                for features, each in zip(kept, self._model(*self._part(start, size))[:2], strict=True):
                    features.append(each)
        for place, start in enumerate(starts):
            with torch.autocast("cuda", torch.bfloat16):
                image, text, scale, *_ = self._model(*self._part(start, size))
                whole = [
                    torch.cat([*features[:place], own, *features[place + 1 :]])
                    for features, own in zip(kept, (image, text), strict=True)
                ]
                value = loss(*whole, scale)
            value.backward()


def _described(tower: Any) -> str:
    parts = (("kept", tower.kept), ("checkpointed", tower.checkpointed), ("cached", tower.cached))
    return ", ".join(f"{part.samples} {name} by {part.micro_batch}" for name, part in parts if part.samples)


def startable(
    ways: Sequence[str], make: Callable[[str], Step], repeats: int
) -> tuple[dict[str, Step], dict[str, dict[str, Any]]]:
    """The steps of ways, and rows of those whose library is not installed."""
    steps, rows = {}, {}
    for way in ways:
        try:
            steps[way] = make(way)
        except ImportError as error:
            rows[way] = _row(repeats) | {"error": f"{ABSENT}: {one_line(error)}"}
    return steps, rows


def _row(repeats: int) -> dict[str, Any]:
    return {"peak_bytes": 0, "median_ms": None, "std_ms": None, "repeats": repeats, "error": None}


def measured(steps: dict[str, Step], warm: int, repeats: int, forget: Step) -> dict[str, dict[str, Any]]:
    """Times of steps in turns, and the peak of all. In a turn, `warm` steps fill the allocator before the timed one."""
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name in steps:
        found[name] = _row(repeats)
    for _, name in turns(list(steps), repeats):
        row = found[name]
        if row["error"] is not None:
            continue
        torch.cuda.empty_cache()
        try:
            taken_ms = [_timed_ms(steps[name], forget) for _ in range(warm + 1)]
            times[name].append(taken_ms[-1])
        except torch.OutOfMemoryError as error:
            if dist.is_initialized():
                raise  # other ranks wait: the launcher ends them
            row["error"] = f"out of memory: {error}".partition(" Process ")[0]
            forget()
        row["peak_bytes"] = max(row["peak_bytes"], int(_largest(torch.cuda.max_memory_allocated())))
    for name, some in times.items():
        if found[name]["error"] is None:
            deviation = statistics.stdev(some) if len(some) > 1 else 0.0
            found[name] |= {"median_ms": statistics.median(some), "std_ms": deviation}
    return found


def _timed_ms(step: Step, forget: Step) -> float:
    """Of a step without gradients from before."""
    forget()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return _largest(start.elapsed_time(end))


def _largest(value: float) -> float:
    """Of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main()
