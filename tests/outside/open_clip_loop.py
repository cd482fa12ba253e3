"""open_clip's own training loop with this loss in place of its own, judged by the gradients of the first step.

python -m tests.outside.open_clip_loop                  all cases of the installed open_clip, on the CPU
python -m tests.outside.open_clip_loop --only fsdp      cases in whose name this pattern is found
python -m tests.outside.open_clip_loop --device cuda    on GPUs, one per rank; adds fp16 autocast

Each case calls `open_clip_train.main` with a tiny model and random pairs, on one and on two processes. The truth is the
gradient of the dense loss over all pairs, in fp64, of a copy of the initial model. In fp32 each parameter's gradient
must be within EXACT of it; on a GPU two roundings more, since fp32 features multiply as bf16 halves. Under autocast its
error is at most twice that of open_clip's own loss in the same loop, plus two roundings. With `--accum-freq k` the loop
sums the scale's gradient over k whole losses: k times the true one, whatever the loss, unless a hook divides it.

A released open_clip is installed by `pip install open_clip_torch`; another source is put first on PYTHONPATH.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infcl_gen.processes import Seat, run_ranks

EXACT = 1e-5  # relative norm error of a parameter's gradient, in fp32
UNITS = {"amp_bf16": 2.0**-8, "amp": 2.0**-11}  # of rounding
HALVES = 2.0**-17  # rounding of products of fp32 features on a GPU
ROWS, STEPS, WIDTH, VOCABULARY, LENGTH, PIXELS = 24, 3, 32, 96, 12, 32
TIMEOUT_S = 1800.0
TINY = {
    "embed_dim": WIDTH,
    "vision_cfg": {"image_size": PIXELS, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": 64, "heads": 2, "layers": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int
    precision: str
    what: str  # "plain", or what differs
    flags: tuple[str, ...] = ()
    shaped_scale: bool = False  # of shape (1,)
    warm: bool = False  # the loss was called before it is compiled, and is then part of the graph
    divided: bool = False  # a hook divides the scale's gradient by k
    ours: bool = True  # False: open_clip's own loss, exact by its flags

    @property
    def name(self) -> str:
        return f"{self.ranks} x {self.precision}, {self.what}"

    @property
    def accumulated(self) -> int:
        return int(self.flags[self.flags.index("--accum-freq") + 1]) if "--accum-freq" in self.flags else 1

    @property
    def scale_factor(self) -> int:
        """The true gradient of the scale times this is what the loop makes of it."""
        return 1 if self.divided else self.accumulated

    def beside(self) -> "Case":
        """The case of open_clip's own loss to compare errors with."""
        flags = tuple(flag for flag in self.flags if flag in ("--fsdp", "--accum-freq", str(self.accumulated)))
        what = "open_clip's loss" + "".join(f" {flag}" for flag in flags)
        return Case(self.ranks, self.precision, what, (*flags, "--local-loss", "--gather-with-grad"), ours=False)


def all_cases(newer: bool, device: str) -> list[Case]:
    """`newer`: open_clip with tasks, which has FSDP2 and compiles the loss with the model."""
    variants: dict[str, tuple[str, ...]] = {
        "plain": (),
        "accumulated": ("--accum-freq", "2"),
        "compiled": ("--torchcompile",),
        "compiled, accumulated": ("--torchcompile", "--accum-freq", "2"),
    }
    if newer:
        variants["compiled step"] = ("--torchcompile", "--torchcompile-strategy", "step")
        variants["compiled model"] = ("--torchcompile", "--torchcompile-strategy", "model")
    sharded = {f"fsdp, {what}": ("--fsdp", *flags) for what, flags in list(variants.items())[:3]} if newer else {}
    found = []
    for ranks in (1, 2):
        for precision in ("fp32", "amp_bf16", *(("amp",) if device == "cuda" else ())):
            each = variants | (sharded if ranks > 1 else {})
            found += [Case(ranks, precision, what, flags) for what, flags in each.items()]
            found.append(Case(ranks, precision, "scale of shape (1,)", shaped_scale=True))
            flags = variants["accumulated"]
            found.append(Case(ranks, precision, "accumulated, scale divided", flags, divided=True))
            if newer:
                found.append(Case(ranks, precision, "compiled, warm", variants["compiled"], warm=True))
    return found


class Batches:
    """The loader of one rank: the same micro-batches in each step. After a step it calls `after_step`."""

    def __init__(self, micro_batches: list[Any], after_step: Any) -> None:
        self.micro_batches, self.after_step = micro_batches, after_step
        self.num_batches = STEPS * len(micro_batches)
        self.num_samples = self.num_batches * ROWS

    def __iter__(self) -> Iterator[Any]:
        for step in range(STEPS):
            yield from self.micro_batches
            self.after_step(step)


def pairs(rank: int, index: int) -> tuple[Any, Any]:
    """Images and texts of one micro-batch of a rank; the last token of a text is the largest, where it is read out."""
    import torch

    generator = torch.Generator().manual_seed(1000 * rank + index)
    images = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    texts = torch.randint(1, VOCABULARY - 1, (ROWS, LENGTH), generator=generator)
    texts[:, -1] = VOCABULARY - 1
    return images, texts


def dense_loss(model: Any, case: Case) -> Any:
    """The loss over the pairs of all ranks in the model's dtype, with its graph."""
    import torch
    from torch.nn.functional import cross_entropy

    batches = [pairs(rank, index) for rank in range(case.ranks) for index in range(case.accumulated)]
    images, texts = (torch.cat(each) for each in zip(*batches, strict=True))
    found = model(images.double(), texts)
    logits = found["logit_scale"] * found["image_features"] @ found["text_features"].T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def run_rank(job: dict[str, Any], seat: Seat) -> list[dict[str, Any]]:
    """The task of each rank: all cases, one after another."""
    import torch

    cases = [Case(**{**fields, "flags": tuple(fields["flags"])}) for fields in job["cases"]]
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # the loop switches TF32 on, whose error in the towers is 1e-3
    results = []
    for case, port in zip(cases, job["ports"], strict=True):
        os.environ.update(
            RANK=str(seat.rank), LOCAL_RANK=str(seat.rank), WORLD_SIZE=str(seat.ranks), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )  # fmt: skip
        torch._dynamo.reset()
        results.append(run_case(case, seat.folder, job["device"]))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return results


def run_case(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """Train; return {"gradients": {parameter: [relative error, ratio]}, "losses": [first, last]}."""
    import open_clip
    import torch

    main = import_module("open_clip_train.main")
    rank = int(os.environ["RANK"])
    tiny = folder / str(rank) / f"tiny{int(case.shaped_scale)}.json"
    tiny.parent.mkdir(exist_ok=True)
    tiny.write_text(json.dumps(TINY | {"nonscalar_logit_scale": case.shaped_scale}))
    open_clip.add_model_config(tiny)
    seen: dict[str, Any] = {"losses": []}
    create_model = main.create_model_and_transforms

    def create_and_keep(*arguments: Any, **options: Any) -> Any:
        found = create_model(*arguments, **options)
        seen["model"] = found[0]
        seen["truth"] = copy.deepcopy(found[0]).cpu().double().train()
        loss = dense_loss(seen["truth"], case)
        loss.backward()
        seen["losses"].append(loss.item())
        if case.divided:
            found[0].logit_scale.register_hook(lambda gradient: gradient / case.accumulated)
        return found

    def after_step(step: int) -> None:
        named = {name.replace("_orig_mod.", ""): p for name, p in seen["model"].named_parameters()}
        for name, true in seen["truth"].named_parameters():
            value, gradient = (whole(x).reshape(true.shape) for x in (named[name], named[name].grad))
            if step == 0:
                seen.setdefault("gradients", {})[name] = compared(gradient, true.grad)
            true.data.copy_(value)
        with torch.no_grad():
            seen["losses"].append(dense_loss(seen["truth"], case).item())

    micro_batches: list[Any] = [pairs(rank, index) for index in range(case.accumulated)]
    if hasattr(main, "create_task"):
        micro_batches = [dict(zip(("image", "text"), batch, strict=True)) for batch in micro_batches]
    loader = SimpleNamespace(dataloader=Batches(micro_batches, after_step), set_epoch=lambda epoch: None)
    words = [
        *("--model", tiny.stem, "--dataset-type", "synthetic", "--batch-size", str(ROWS), "--workers", "0"),
        *("--epochs", "1", "--warmup", "0", "--lr", "1e-3", "--lr-scheduler", "const", "--precision", case.precision),
        *("--device", device, "--logs", str(folder / "logs"), "--name", case.name.replace(" ", "_")),
        *("--log-every-n-steps", "1", *case.flags),
    ]
    with contextlib.ExitStack() as patches:
        replace(patches, main, "create_model_and_transforms", create_and_keep)
        replace(patches, main, "get_data", lambda *_, **__: {"train": loader})
        # From its default of 65 536 the first steps on two ranks are infinite, also with open_clip's loss.
        replace(patches, torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=1024.0))
        if device == "cpu":  # the loop passes device_ids=[cpu], which DistributedDataParallel refuses
            parallel = torch.nn.parallel.DistributedDataParallel
            original = parallel.__init__
            replace(patches, parallel, "__init__", lambda self, module, device_ids, **o: original(self, module, **o))
        if case.ours:
            put_in(main, patches, case)
        main.main(words)
    return {"gradients": seen["gradients"], "losses": seen["losses"]}


def put_in(main: Any, patches: contextlib.ExitStack, case: Case) -> None:
    """This loss in place of open_clip's, as docs/training.md says."""
    import torch

    from infcl_gen import ContrastiveLoss

    def create_loss(args: Any) -> Any:
        criterion = ContrastiveLoss(rank=args.rank, world_size=args.world_size)
        if case.warm:
            dtype = {"amp_bf16": torch.bfloat16, "amp": torch.float16}.get(case.precision, torch.float32)
            features = torch.ones(ROWS, WIDTH, dtype=dtype, device=args.device)
            criterion(features, features, 1.0)
        return criterion

    if not hasattr(main, "create_task"):
        replace(patches, main, "create_loss", create_loss)
        return
    create_task = main.create_task

    def create_task_with_loss(args: Any, **options: Any) -> Any:
        task = create_task(args, **options)
        task.loss = create_loss(args)
        return task

    replace(patches, main, "create_task", create_task_with_loss)


def replace(patches: contextlib.ExitStack, place: Any, name: str, value: Any) -> None:
    patches.callback(setattr, place, name, getattr(place, name))
    setattr(place, name, value)


def whole(x: Any) -> Any:
    """A parameter or gradient as an fp64 tensor on the host; all ranks call it for a sharded one."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu().double()


def compared(gradient: Any, true: Any) -> list[float]:
    """Relative norm error, and the factor of `true` in `gradient`."""
    size = true.norm()
    return [float((gradient - true).norm() / size), float((gradient * true).sum() / size**2)]


def judge(case: Case, result: dict[str, Any], beside: dict[str, Any] | None, device: str = "cpu") -> list[str]:
    """What is wrong with a case; `beside` is the result of `case.beside()`, None for exact cases."""
    wrong = []
    for name, (error, ratio) in result["gradients"].items():
        allowed = EXACT + 2 * HALVES * (device == "cuda")
        if name.endswith("logit_scale"):
            error = abs(ratio / case.scale_factor - 1)
        if beside is not None:
            other_error, other_ratio = beside["gradients"][name]
            if name.endswith("logit_scale"):
                other_error = abs(other_ratio / case.accumulated - 1)
            allowed = 2 * other_error + 2 * UNITS[case.precision]
        if not error <= allowed:
            wrong.append(f"{name}: error {error:.1e}, allowed {allowed:.1e}, ratio {ratio:.4f}")
    losses = result["losses"]
    if not losses[-1] < losses[0]:
        wrong.append(f"the loss did not fall: {losses}")
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside.open_clip_loop")
    parser.add_argument("--only", default="", help="run cases in whose name this regular expression is found")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(words)
    for module in ("open_clip", "open_clip_train"):
        if importlib.util.find_spec(module) is None:
            print(f"{module} is not installed: pip install open_clip_torch webdataset pandas", file=sys.stderr)
            return 4
    newer = importlib.util.find_spec("open_clip.task") is not None
    cases = [case for case in all_cases(newer, options.device) if re.search(options.only, case.name)]
    version = import_module("open_clip").__version__
    failed = 0
    for ranks in sorted({case.ranks for case in cases}):
        here = [case for case in cases if case.ranks == ranks]
        beside = {case.beside() for case in here if case.precision in UNITS or case.accumulated > 1}
        jobs = [*here, *sorted(beside, key=lambda case: case.name)]
        job = {"cases": [dataclasses.asdict(case) for case in jobs], "ports": free_ports(len(jobs))}
        job["device"] = options.device
        found = run_ranks("tests.outside.open_clip_loop:run_rank", job, ranks, TIMEOUT_S, {"OMP_NUM_THREADS": "1"})
        results = dict(zip(jobs, found[0], strict=True))
        for case, result in results.items():
            other = results[case.beside()] if case.ours and case.precision in UNITS else None
            wrong = judge(case, result, other, options.device) if case.ours or case.precision not in UNITS else []
            failed += bool(wrong)
            error = max(error for name, (error, _) in result["gradients"].items() if not name.endswith("logit_scale"))
            scale_error, ratio = next(v for name, v in result["gradients"].items() if name.endswith("logit_scale"))
            first, *_, last = result["losses"]
            print(
                f"open_clip {version}, {case.name}: largest error {error:.1e}; scale {ratio:.5f} of the true "
                f"({scale_error:.1e}); loss {first:.4f} to {last:.4f}" + "".join(f"\n  WRONG {each}" for each in wrong),
                flush=True,
            )
    print(f"{len(cases)} cases, {failed} failed")
    return int(failed > 0)


def free_ports(count: int) -> list[int]:
    """Below those that the system hands out: NCCL takes some of these before the last case begins."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise SystemExit(f"open_clip_loop: fewer than {count} free ports")


if __name__ == "__main__":
    sys.exit(main())
