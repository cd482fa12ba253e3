"""Where a step runs: the modules of its towers, their device, wrappers and ranks, and what memory there is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from infcl_gen.errors import InputError
from infcl_gen.hardware.profile import load_profile
from infcl_gen.inputs.text import bytes_text, parse_bytes
from infcl_gen.runtime.api import options_of
from infcl_gen.runtime.group import find_group
from infcl_gen.step.costs import StepCosts
from infcl_gen.step.gradients import inside, is_replicated, is_sharded
from infcl_gen.step.planner import optimizer_bytes

# Of the memory that is free: blocks of the allocator that nothing fits. A step of 32 768 pairs of ViT-B/32 loses 1 %
# with expandable segments, else 3 to 11 %, by what the process allocated before.
SPARE, SPARE_IN_FIXED_SEGMENTS = 0.03, 0.08

HOST_SHARE = 0.5  # of the free memory of the host: data loaders take some, and locked pages cannot be swapped
# The limit and the use of memory, in versions 2 and 1.
CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

Run = Callable[[Any], Tensor]


class Context(NamedTuple):
    """The modules of each tower, with a name, on one device, in the ranks of a group, if there is one."""

    names: list[str]
    modules: list[tuple[nn.Module, ...]]
    device: torch.device
    process_group: Any

    @classmethod
    def of(cls, runs: Sequence[Run], model: tuple[nn.Module, ...], group: Any) -> Context:
        """model: what all towers run; else it is found. Raises InputError where that fails."""
        modules = [model or tuple(_modules_of(run)) for run in runs]
        try:
            ranks = find_group(options_of(group, "mean").group_name)
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from None
        return cls(_names_of(runs), modules, _device_of(modules), None if ranks is None else ranks.process_group)

    @property
    def everything(self) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(each for some in self.modules for each in some))

    @property
    def size(self) -> int:
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    def least(self, value: int) -> int:
        """The least value of all ranks."""
        if self.process_group is None:
            return value
        found = torch.tensor([value], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.process_group)
        return int(found)

    def agree(self, wanted: bool) -> bool:
        """Whether all ranks want it."""
        return bool(self.least(int(wanted)))

    def told(self, costs: StepCosts) -> StepCosts:
        """Rank 0's costs, on every rank."""
        if self.process_group is None:
            return costs
        told = [costs]
        dist.broadcast_object_list(told, group=self.process_group, device=self.device, group_src=0)
        return told[0]

    def check_norms(self, accepted: str | None) -> None:
        """Raises InputError for batch normalisation in training mode, unless `accepted` is "micro-batch"."""
        if accepted not in (None, "micro-batch"):
            raise InputError(f'batch_norm: {accepted!r} is unknown; valid: "micro-batch"')
        for module in self.everything:
            for name, inner in module.named_modules():
                if isinstance(inner, _BatchNorm) and inner.training and accepted is None:
                    raise InputError(
                        f"towers: {name} normalises over a batch, here over each micro-batch: gradients are not those "
                        'of the whole batch. Put it into eval(), or accept that: batch_norm="micro-batch"'
                    )


def _modules_of(run: Any) -> Iterator[nn.Module]:
    """The modules that a callable runs: itself, that of a method, or those that a function names."""
    if isinstance(run, nn.Module):
        yield run
    elif isinstance(run, functools.partial):
        yield from _modules_of(run.func)
        for each in (*run.args, *run.keywords.values()):
            if isinstance(each, nn.Module):
                yield each
    elif inspect.ismethod(run):
        if isinstance(run.__self__, nn.Module):
            yield run.__self__
    elif inspect.isfunction(run):
        named = inspect.getclosurevars(inspect.unwrap(run))
        for each in (*named.nonlocals.values(), *named.globals.values()):
            if isinstance(each, nn.Module):
                yield each


def _names_of(runs: Sequence[Any]) -> list[str]:
    """A name for each tower: that of its class or function, numbered where several have it."""
    names = [getattr(run, "__name__", type(run).__name__) for run in runs]
    plain = [name if name.isidentifier() else "tower" for name in names]
    return [name if plain.count(name) == 1 else f"{name}{place}" for place, name in enumerate(plain)]


def _device_of(modules: Sequence[tuple[nn.Module, ...]]) -> torch.device:
    for place, some in enumerate(modules):
        if not some:
            raise InputError(f"towers: no module is found in tower {place}; name the modules that it runs: model=[...]")
    devices = {each.device for some in modules for module in some for each in module.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        raise InputError(f"towers: their parameters are on {found}; a step runs on one device")
    return devices.pop()


def compiled(run: Any, modules: tuple[nn.Module, ...]) -> bool:
    return any(hasattr(each, "_orig_mod") for each in (run, *modules)) or hasattr(run, "_torchdynamo_orig_callable")


def wrapper_of(modules: Iterable[nn.Module]) -> str:
    replicated = inside(modules, is_replicated)
    if any(each.static_graph for each in replicated):
        raise InputError("towers: static_graph=True of DistributedDataParallel allows one pass per step; give False")
    if replicated:
        return "ddp"
    return "fsdp2" if inside(modules, is_sharded) else "none"


def memory_of(memory: int | str, device: torch.device, device_profile: str | None) -> int:
    """Bytes that the process may allocate; of a device that is not here, those of its profile.

    Raises InputError for more than such a device has.
    """
    spare = SPARE
    profile = None if device_profile is None else load_profile(device_profile)
    if memory != "auto":
        given = parse_bytes(memory, "memory")
        if profile is not None:
            profile.check_budget("memory", given)
        return given
    if profile is not None:
        free = profile.memory_bytes
    elif device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
        if not any("expandable_segments:True" in each for each in settings):
            spare = SPARE_IN_FIXED_SEGMENTS
    else:
        free = free_host_bytes()
    return int(free * (1 - spare))


def host_memory_of(host_memory: int | str, least: Callable[[int], int], here: bool = True) -> int:
    """Bytes that offloaded graphs of this process may take; "auto": HOST_SHARE of what is free, in equal parts of the
    host's ranks. `least`: over all ranks; `here`: the step runs on this host.

    Raises InputError, on all ranks, for more than the smallest of such hosts has.
    """
    if host_memory == "auto":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (dist.get_world_size() if dist.is_initialized() else 1)
        return least(int(HOST_SHARE * free_host_bytes() / ranks))
    if not host_memory:
        return 0
    asked = parse_bytes(host_memory, "host_memory")
    there = least(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if here and asked > there:
        raise InputError(f"host_memory: {bytes_text(asked)} is more than the host has: {bytes_text(there)}; give less")
    return asked


def free_host_bytes() -> int:
    """What the host has free, and the control group of this process too."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used in CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or its limit is "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, free)


def optimizer_bytes_of(optimizer: Any, gradient_bytes: int) -> int:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer_bytes("adamw" if optimizer is None else optimizer, gradient_bytes)
    held = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    if held:
        return sum(each.nbytes for each in held)
    # What one of its kind holds for a small parameter behind its first step: flags such as amsgrad count.
    small = nn.Parameter(torch.zeros(64, 64))
    small.grad = torch.zeros_like(small)
    try:
        named = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
        alike: Any = type(optimizer)([small], **{name: optimizer.defaults[name] for name in named})
        alike.step()
    except Exception as error:
        name = type(optimizer).__name__
        raise InputError(
            f"optimizer: the state of {name} is not known before its first step; give its bytes"
        ) from error
    shares = [each.nbytes for each in alike.state[small].values() if isinstance(each, Tensor) and each.dim()]
    return sum(shares) * gradient_bytes // small.nbytes
