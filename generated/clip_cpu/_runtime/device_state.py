"""The state of torch that a sweep needs while it runs: no autograd, no autocast, the precision of products."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import profiler

from .package import Package


def device_state(
    package: Package, device: torch.device, phase: str, plain_tensors: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """No autograd, no autocast (it rounds inside the sweep), `device` current; `plain_tensors`: no inference mode. A
    profiler sees it as a range with the name of the phase.

    Every change costs microseconds on the host, which the device waits for, so only necessary changes are made.
    """
    changes: list[contextlib.AbstractContextManager[Any]] = []
    inference = plain_tensors and torch.is_inference_mode_enabled()
    if inference:
        changes.append(torch.inference_mode(False))  # which turns gradients on
    if inference or torch.is_grad_enabled():
        changes.append(torch.no_grad())
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        changes.append(torch.cuda.device(device))
    if torch.is_autocast_enabled(device.type):
        changes.append(torch.autocast(device.type, enabled=False))
    if package.dtype == torch.float32 or package.traits.weighted or device.type == "cpu":  # products it changes
        changes.append(_precisions[device.type == "cuda"].of_products(package.product_precision))
    if profiler._is_profiler_enabled:
        changes.append(profiler.record_function(f"infcl {phase}"))
    if not changes:
        return _UNCHANGED
    with contextlib.ExitStack() as state:  # undoes the changes made so far if the next one fails
        for change in changes:
            state.enter_context(change)
        return state.pop_all()


class Precision:
    """torch's process-wide switch for fp32 matrix products, held at a value while any thread needs it.

    The process's own choice ("medium" rounds to bf16 on some CPUs) must not reach the sweep. Other threads that need
    another value wait.
    """

    def __init__(self, library: Any) -> None:
        self._switch, self._before, self._left = library.matmul, "", threading.Condition()
        self._users: list[tuple[int, str]] = []  # thread, and the value that it holds

    @contextlib.contextmanager
    def of_products(self, precision: str) -> Iterator[None]:
        """Raises RuntimeError if another value is held for `_PATIENCE_S`: threads of ranks may wait in a circle."""
        own, users = threading.get_ident(), self._users
        with self._left:
            if not self._left.wait_for(lambda: all(own == i or held == precision for i, held in users), _PATIENCE_S):
                raise RuntimeError(
                    f"another thread has computed in another fp32 precision than {precision} for {_PATIENCE_S:g} s: "
                    "call losses of different precision from one thread"
                )
            if not users:
                self._before = self._switch.fp32_precision
            users.append((own, precision))
            self._set(precision)
        try:
            yield
        finally:
            with self._left:
                users.remove((own, precision))
                if not users and self._switch.fp32_precision != self._before:
                    self._switch.fp32_precision = "none"  # follows the global one, if that is what was there
                self._set(users[-1][1] if users else self._before)
                self._left.notify_all()

    def _set(self, precision: str) -> None:
        if self._switch.fp32_precision != precision:  # setting it would pin a value that follows the global one
            self._switch.fp32_precision = precision


_PATIENCE_S = 300.0
_UNCHANGED = contextlib.nullcontext()
_precisions = (Precision(torch.backends.mkldnn), Precision(torch.backends.cuda))
