"""A ResNet or a U-Net at a batch that needs many times the memory: gradients, time and peak beside the plain step.

    pip install torchvision
    python examples/micro_batches.py --model resnet50 --batch-size 1024 --side 224 --share 0.1
    python examples/micro_batches.py --model unet --batch-size 256 --device cpu --side 32

Random images, cross-entropy of classes or of pixels, group normalisation, fp32. `--share` is the memory of the planned
step, of what the plain one takes beyond parameters. With `--stream` the batch is on the host. A device sums in an order
that depends on the batch: what gradients differ by is printed beside what they differ by when the plain step takes the
same samples in reverse. With `--output` the figures are added to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import infcl_gen
from infcl_gen.bench.results import measured_before, measurement, write_results
from infcl_gen.verification.memory import PeakMeter

CLASSES = 10


def norm(channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels)


class UNet(nn.Module):
    """Two levels down and up again, with the outer levels' activations beside the inner ones."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.outer, self.middle, self.inner = _twice(3, width), _twice(width, 2 * width), _twice(2 * width, 4 * width)
        self.up_middle, self.up_outer = _twice(6 * width, 2 * width), _twice(3 * width, width)
        self.last = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        middle = self.middle(nn.functional.max_pool2d(outer, 2))
        inner = self.inner(nn.functional.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([middle, _larger(inner)], 1))
        scores: Tensor = self.last(self.up_outer(torch.cat([outer, _larger(middle)], 1)))
        return scores


def _twice(before: int, after: int) -> nn.Sequential:
    convolutions = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
    return nn.Sequential(convolutions[0], norm(after), nn.ReLU(), convolutions[1], norm(after), nn.ReLU())


def _larger(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x, scale_factor=2.0)


def model_of(name: str) -> nn.Module:
    if name == "unet":
        return UNet()
    try:
        import torchvision
    except ImportError:
        raise SystemExit(
            "micro_batches: torchvision is missing; pip install torchvision, or take --model unet"
        ) from None
    model: nn.Module = torchvision.models.get_model(name, num_classes=CLASSES, norm_layer=norm)
    return model


def timed(step: Callable[[], object], model: nn.Module, device: str, repeats: int) -> tuple[float, int]:
    """Median seconds of a step, and the peak of one beyond what was there."""
    times = []
    for _ in range(repeats + 1):
        model.zero_grad()
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    model.zero_grad()
    with PeakMeter(device) as meter:
        step()
    return statistics.median(times[1:]), meter.peak_bytes


def difference(model: nn.Module, other: nn.Module) -> tuple[float, float]:
    """Of all gradients, and the largest of one, relative to the norms of the others."""
    squares = [
        (float((mine.grad - true.grad).double().square().sum()), float(true.grad.double().square().sum()))
        for mine, true in zip(model.parameters(), other.parameters(), strict=True)
        if mine.grad is not None and true.grad is not None
    ]
    differences, norms = (sum(each) for each in zip(*squares, strict=True))
    return (differences / norms) ** 0.5, max(a / b for a, b in squares) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="unet, or an architecture of torchvision")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="cuDNN times its convolutions for each batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    command = "python examples/micro_batches.py"
    rows, _, command = measured_before(flags.output, command) if flags.output else ([], {}, command)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = flags.cudnn_benchmark
    plain = model_of(flags.model).to(flags.device)
    model, loss = copy.deepcopy(plain), nn.CrossEntropyLoss()
    images = torch.randn(flags.batch_size, 3, flags.side, flags.side)
    pixels = (flags.side, flags.side) if flags.model == "unet" else ()
    labels = torch.randint(CLASSES, (flags.batch_size, *pixels))
    there = images.to(flags.device), labels.to(flags.device)

    plain_s, plain_peak = timed(lambda: loss(plain(there[0]), there[1]).backward(), plain, flags.device, flags.repeats)
    inputs = (images, labels) if flags.stream else there
    held = sum(each.nbytes for each in model.parameters()) + sum(each.nbytes for each in there) * (not flags.stream)
    try:
        plan = infcl_gen.plan_step(
            model, inputs[0][:16], targets=inputs[1][:16], loss=loss, batch_size=flags.batch_size, optimizer="none",
            memory=int(flags.share * plain_peak) + held,
        )  # fmt: skip
    except infcl_gen.InfeasibleError as error:
        parser.exit(error.exit_code, f"--share {flags.share:g} of {plain_peak} bytes is too little: {error}\n")
    step = plan.step(progress=False)
    planned_s, planned_peak = timed(lambda: step(*inputs), model, flags.device, flags.repeats)
    found = difference(model, plain)
    model.zero_grad()
    loss(model(there[0].flip(0)), there[1].flip(0)).backward()
    rounding = difference(model, plain)
    print(f"plain    {plain_s:8.3f} s  {plain_peak / 2**20:10,.0f} MiB")
    print(f"planned  {planned_s:8.3f} s  {planned_peak / 2**20:10,.0f} MiB  ({plan.account.towers[0].streamed})")
    print(f"time {planned_s / plain_s:.3f} of plain; relative difference of all gradients, and the largest of one:")
    print(f"planned from plain {found[0]:.1e} {found[1]:.1e}; plain in reverse {rounding[0]:.1e} {rounding[1]:.1e}")
    if flags.output:
        rows.append({
            "model": flags.model, "batch": flags.batch_size, "side": flags.side, "dtype": "fp32",
            "inputs": "host" if flags.stream else "device", "cudnn_benchmark": flags.cudnn_benchmark,
            "memory_bytes": plan.problem.memory_bytes,
            "micro_batch": plan.account.towers[0].streamed.micro_batch, "repeats": flags.repeats,
            "plain_ms": 1e3 * plain_s, "plain_peak_bytes": plain_peak, "predicted_ms": 1e3 * plan.predicted_time_s,
            "median_ms": 1e3 * planned_s, "peak_bytes": planned_peak, "error": None,
            "difference": found[0], "largest_difference": found[1],
            "rounding": rounding[0], "largest_rounding": rounding[1],
        })  # fmt: skip
        write_results(flags.output, measurement(rows, command, {}))


if __name__ == "__main__":
    main()
