"""A whole training step of an open_clip model, by open_clip's loss and by infcl_gen's: time and memory, in turns.

    pip install open_clip_torch
    python examples/training_step.py --model ViT-B-32 --batch-size 2048 --output step.json

Random images and texts, bf16 autocast, AdamW; one CUDA GPU. The towers' activations fill the memory and most of the
time: the loss is a small part of such a step.
"""

import argparse
import statistics
from pathlib import Path

import torch

from infcl_gen import ContrastiveLoss
from infcl_gen.bench.results import measurement, write_results
from infcl_gen.bench.timing import turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32", help="an architecture of open_clip")
    parser.add_argument("--batch-size", type=int, default=2048, help="image-text pairs of a step")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each loss")
    parser.add_argument("--output", type=Path, help="write the rows to this .json file")
    flags = parser.parse_args()
    try:
        import open_clip
    except ImportError:
        parser.exit(4, "training_step: open_clip is missing; pip install open_clip_torch\n")
    if not torch.cuda.is_available():
        parser.exit(4, "training_step: a CUDA GPU is needed; torch sees none\n")

    torch.manual_seed(0)
    model = open_clip.create_model(flags.model).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    side = model.visual.image_size[0]
    images = torch.randn(flags.batch_size, 3, side, side, device="cuda")
    texts = torch.randint(1, model.vocab_size, (flags.batch_size, model.context_length), device="cuda")
    losses = {"open_clip": open_clip.ClipLoss(), "infcl": ContrastiveLoss()}

    def step(name: str) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = losses[name](*model(images, texts)[:3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    peaks: dict[str, int] = {}
    for name in losses:
        step(name)
        torch.cuda.reset_peak_memory_stats()
        step(name)
        peaks[name] = torch.cuda.max_memory_allocated()
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _, name in turns(list(losses), flags.repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(name)
        end.record()
        end.synchronize()
        times[name].append(start.elapsed_time(end))
    rows = [
        {
            "way": name, "model": flags.model, "batch": flags.batch_size, "median_ms": statistics.median(times[name]),
            "std_ms": statistics.stdev(times[name]), "repeats": flags.repeats, "peak_bytes": peaks[name],
        }
        for name in losses
    ]  # fmt: skip
    for row in rows:
        print(
            f"{row['way']:10s} {row['median_ms']:8.1f} +- {row['std_ms']:.1f} ms  {row['peak_bytes'] / 2**20:8,.0f} MiB"
        )
    if flags.output is not None:
        command = f"python examples/training_step.py --model {flags.model} --batch-size {flags.batch_size}"
        write_results(flags.output, measurement(rows, command, {}, ["open_clip_torch"]))


if __name__ == "__main__":
    main()
