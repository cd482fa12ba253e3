"""Costs of towers whose tensors have no values: estimated where no GPU is at hand, by torch's own tools.

Towers are made under `torch._subclasses.FakeTensorMode`. MemTracker counts what their passes allocate, FlopCounterMode
what they multiply; seconds are PASS_S and those of the products at EFFICIENCY of the device's peak. Kernels of a GPU
may keep other tensors than those of the CPU, so a measurement on the device should follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from infcl_gen.errors import InputError
from infcl_gen.hardware.profile import DeviceProfile, load_profile
from infcl_gen.step.costs import PassCosts
from infcl_gen.step.measure import Probe
from infcl_gen.step.state import RandomState

EFFICIENCY = 0.4  # of the peak: open_clip under bf16 autocast on an H200 reaches 0.3 (ViT-B/32) to 0.45 (ViT-L/14)
LOOKED_AT = (16, 48)  # samples: bytes and products grow with them in a straight line
SIZES = (64, 128, 256, 512, 1024, 2048)  # that a plan may have
PASS_S = 2e-3  # of a pass of any size: the host launches some 30 kernels for each of 12 blocks, in 5 us each

_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def fake_mode_of(modules: Sequence[nn.Module]) -> FakeTensorMode | None:
    """The mode under which the modules were made; None where their tensors have values."""
    for module in modules:
        for each in module.parameters():
            if isinstance(each, FakeTensor):
                return each.fake_mode
    return None


@contextlib.contextmanager
def faked(mode: FakeTensorMode | None, example: Any) -> Iterator[Any]:
    """Inside, tensors have no values; the example, without values."""
    if mode is None:
        yield example
        return

    def convert(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) else leaf

    with mode:
        yield pytree.tree_map(convert, example)


def probe_for(device_profile: str | None) -> type[Probe]:
    """What estimates the costs on a device. Raises InputError without the name of a profile."""
    if device_profile is None:
        raise InputError("device_profile: is required for towers without values; name the device to plan for: h200")
    profile = load_profile(device_profile)

    class FakeProbe(Probe):
        @classmethod
        def profile(cls, device: torch.device) -> str:
            return profile.name

        def state(self) -> RandomState:
            return RandomState(())  # a GPU's are in the memory of its host

        def cast_bytes(self) -> tuple[int, bool]:
            """What micro-batches keep whatever their size: weights that autocast casts, which a device keeps once."""
            self.cast = round(self.line(False).at("kept_bytes", 0))
            return self.cast, not self.tower.run(self.given(1)).requires_grad

        def line(self, backward: bool) -> PassCosts:
            """Through two sizes."""
            forward_s, forward_peak, kept, *after = zip(*(self.row(size, backward) for size in LOOKED_AT), strict=True)
            return PassCosts(LOOKED_AT, forward_s, forward_peak, kept, *(after if backward else ()))

        def costs(self, backward: bool) -> PassCosts:
            line = self.line(backward)

            def sizes(name: str) -> Any:
                cast = self.cast if name.endswith("bytes") else 0
                found = (max(0, line.at(name, size) - cast) for size in SIZES if getattr(line, name))
                return tuple(map(round, found) if name.endswith("bytes") else found)

            return PassCosts(SIZES, *(sizes(field.name) for field in dataclasses.fields(PassCosts)[1:]))

        def row(self, size: int, backward: bool) -> tuple[float, int, int, float, int]:
            given, backward_peak, behind = self.given(size), 0, FlopCounterMode(display=False)
            with _tracked(self.model.modules) as tracker:
                with FlopCounterMode(display=False) as ahead:
                    output = self.tower.run(given)
                kept, peak = _bytes(tracker, "current"), _bytes(tracker, "peak")
                if backward:
                    with behind:
                        torch.autograd.backward(output, torch.ones_like(output))
                    backward_peak = max(kept, _bytes(tracker, "peak"))
            dtype = self.model.autocast or output.dtype
            seconds = (_seconds(each, profile, dtype) for each in (ahead, behind))
            return (next(seconds), peak, kept, next(seconds) if backward else 0.0, backward_peak)

    return FakeProbe


@contextlib.contextmanager
def _tracked(modules: Sequence[nn.Module]) -> Iterator[MemTracker]:
    tracker = MemTracker()
    tracker.track_external(*modules)
    with tracker:
        yield tracker
    for module in modules:
        module.zero_grad()


def _bytes(tracker: MemTracker, moment: str) -> int:
    """Allocated at a moment beside parameters, buffers and their gradients."""
    found = tracker.get_tracker_snapshot(moment)
    held = ("Parameter", "Buffer", "Gradient")
    return sum(
        size
        for by_kind in found.values()
        for kind, size in by_kind.items()
        if kind != "Total" and getattr(kind, "value", kind) not in held
    )


def _seconds(flops: FlopCounterMode, profile: DeviceProfile, dtype: torch.dtype) -> float:
    kind = _KINDS.get(dtype, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32")
    peak = profile.matmul_tflops.get(kind) or profile.matmul_tflops["fp32"]
    return PASS_S + flops.get_total_flops() / (EFFICIENCY * peak.value * 1e12)
