"""Kernels of a first step, compiled side by side: one after the other they take 10 s on an H200's host, so 2 to 3 s.

A rehearsal runs forward and backward on a few rows of the call and notes the launches instead of making them. Threads
then compile what was noted, and build what launches it into Triton's cache. What they load of it is dropped: one thread
loads it again. A call that wants other gradients than those before it, as an evaluation or one with a frozen side, is
rehearsed, too: its kernels may have other constants or dtypes.
"""

import itertools
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from . import engine, launch, replay
from .device_state import device_state
from .group import ALONE, Layout, find_group
from .package import ALL, SCALARS, Call, Package

# Rows of a rehearsal. They are divisible by what divides the call's rows, up to the largest tile: kernels are compiled
# for such divisors, and for ragged tiles. 2048 rows have two parts of a loss, as every larger batch.
ROWS, LARGEST_TILE = 2048, 256
MOST_THREADS = 16

_LOG = logging.getLogger("infcl_gen")
# Package, device and gradients, and whether panels without positives count, too.
_done: set[tuple[str, torch.device, int, bool]] = set()
_lock = threading.Lock()


def warm_up(package: Package, call: Call, gradients: int) -> None:
    """Compile what a step of this package with these gradients needs, unless that was done on this device, or a graph
    is being captured. A step that is the first to leave the diagonal needs further kernels.

    Raises what compiling raises.
    """
    gradients = gradients & ALL | SCALARS * bool(gradients & SCALARS)  # one kernel computes both scalars
    if package.any_device or not call.q.is_cuda:
        return
    place = package.digest, call.q.device, gradients, _leaves_diagonal(package, call, gradients)
    if place in _done or not (len(call.q) and len(call.k)) or replay.capturing(call.q.device):
        return
    with _lock:  # a second thread waits for the first, instead of compiling the same
        if place not in _done:
            _compile(rehearsed(package, call, gradients), call.q.device)
        _done.update((place, (*place[:3], False)))


def rehearsed(package: Package, call: Call, gradients: int) -> list[launch.Launch]:
    """The launches of a step with these gradients on some rows of the call, none of which is made. Products of the
    library run."""
    rows = (min(len(call.q), len(call.k)),) * 2 if package.traits.paired else (len(call.q), len(call.k))
    q, k = (x[: min(count, ROWS + count % LARGEST_TILE)] for x, count in zip(call[:2], rows, strict=True))
    vectors = None if call.vectors is None else call.vectors[:, : len(q)]
    labels = None if call.labels is None else torch.arange(len(q), device=q.device) % len(k)
    query_ids, key_ids = (None if ids is None else ids[: len(x)] for ids, x in zip(call.ids, (q, k), strict=True))
    u, v = (None if each is None else each[: len(x)] for each, x in zip(call.guides, (q, k), strict=True))
    options = call.options._replace(group_name=ALONE)
    with device_state(package, q.device, "warm-up"), launch.noting() as launches:
        sample = Call(q, k, call.scale, call.bias, vectors, labels, query_ids, key_ids, u, v, options).cast(package)
        loss, saved = engine.swept(package, sample, None, Layout.alone(q, k), gradients)
        if gradients:
            engine.backward(package, sample, saved, torch.ones_like(loss), gradients)
        if _leaves_diagonal(package, call, gradients):
            engine.sweep_off_diagonal(package, sample, saved, gradients)
        if package.replay:
            package.schedule.copy_inputs(*sample[:4], *(torch.empty_like(x) for x in sample[:4]))
    return launches


def _leaves_diagonal(package: Package, call: Call, gradients: int) -> bool:
    """Whether a step has panels without positives, which have other constants: of a larger batch, or of other ranks."""
    if not (package.traits.pairs or package.traits.triangle):
        return False
    schedule, rows, keys = package.schedule, len(call.q), len(call.k)
    names = ("PANEL_ROWS", "PANEL_KEYS") if gradients else ("FORWARD_ROWS", "FORWARD_KEYS")
    most_rows, most_keys = (getattr(schedule, name) for name in names)
    if package.traits.triangle:  # its forward keeps to its own panels beside gradients
        most_rows = min(most_rows, schedule.FORWARD_ROWS, ROWS)
    return bool(rows > most_rows or keys > most_keys) or find_group(call.options.group_name) is not None


def key_functions(module: dict[str, Any]) -> None:
    """Give the functions of a module their keys in Triton's cache, those first that others call.

    A key depends on which of the functions that it calls have theirs by then. The order of threads changes, and a
    second process would compile again what the first one has compiled.
    """
    for function in [*module.values()]:
        getattr(function, "cache_key", None)


def _compile(launches: list[launch.Launch], device: torch.device) -> None:
    """One thread for each kernel with its constants. One for all branches of a kernel takes 1.8 s longer for ntxent."""
    from triton.runtime import cache, driver

    # Each thread that finds it missing hashes all of Triton's library: 0.4 s alone, 1.4 s in sixteen that compile.
    getattr(cache, "triton_key", int)()
    here = driver.active.get_current_device()  # begins Triton's driver, which several threads must not do at once
    variants: dict[tuple[Any, ...], list[launch.Launch]] = {}
    for each in launches:
        each.kernel.device_caches[here]  # the kernel's tables, of which two threads would make two
        variants.setdefault((id(each.kernel), *(x for x in each.given.items() if x[0].isupper())), []).append(each)

    def compile_all(of_variant: list[launch.Launch]) -> list[Any]:
        with torch.cuda.device(device):
            found = [kernel.warmup(grid=grid, **given) for kernel, grid, given in of_variant]
            for each in found:  # up to Triton 3.6 a C compiler builds the launcher, in 0.4 s, into Triton's cache
                driver.active.launcher_cls(each.src, each.metadata)
        return found

    for module in {id(each.kernel.fn.__globals__): each.kernel.fn.__globals__ for each in launches}.values():
        key_functions(module)
    _LOG.info("compiling or loading %d variants of kernels for %s", len(variants), device)
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        # The longest text first: it takes the most time, and the threads' Python code runs one after the other.
        compiled = [*pool.map(compile_all, sorted(variants.values(), key=lambda each: -len(each[0].kernel.src)))]
    with torch.cuda.device(device):
        # Launchers of Triton 3.6 are modules of one name. Where a file is loaded again, Python fills the module that
        # has the name. Of two threads one may get the other's launcher: 81 of 5 760, where threads change every 1 us.
        for each in itertools.chain.from_iterable(compiled):
            _ = each.run
