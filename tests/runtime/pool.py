"""Processes that form rings, on gloo or NCCL, and answer what they are asked."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.forks import PoolServer

from . import ring_worker

Packages = Callable[..., ModuleType]
TIMEOUT_S = 60


class Backend(NamedTuple):
    """What carries the keys, and what the environment tells it."""

    name: str
    environment: Mapping[str, str]


BACKENDS = {
    "gloo": Backend("gloo", {}),
    # Kernels on the CPU.
    "gloo-interpreted": Backend("gloo", {"TRITON_INTERPRET": "1"}),
    # What ranks tell each other goes beside the group, as it does beside NCCL.
    "gloo-beside": Backend("gloo", {ring_worker.BESIDE: "1"}),
    # As in training: the host waits for no transfer. After a timeout torch's watchdog gives others four times this long
    # to write down what they did (by default 4 x 15 s), then ends the process.
    "nccl": Backend("nccl", {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
    # The host waits for each transfer, and raises where one is not done in time; there is no watchdog.
    "nccl-waiting": Backend("nccl", {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
}

# By whether their processes interpret kernels.
_SERVERS = {interprets: PoolServer(interprets) for interprets in (False, True)}


def backends(*names: str) -> list[Any]:
    """Parameters: these backends, those of GPUs for the GPU suite."""
    gpu = [pytest.mark.gpu]
    return [pytest.param(name, marks=gpu if BACKENDS[name].name == "nccl" else []) for name in names]


def need(backend: str, world: int) -> None:
    """Skips, with the reason, a ring on one GPU, which nobody has tried. On two, the ranks of a ring of four share."""
    needed = min(world, 2)
    if BACKENDS[backend].name == "nccl" and torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, there are {torch.cuda.device_count()}")


class Pool:
    """Processes that each run `ring_worker.main`; on NCCL rank r uses GPU r, or shares one."""

    def __init__(
        self,
        world: int,
        folder: Path | Sequence[Path],
        timeout_s: float = TIMEOUT_S,
        backend: str = "gloo",
        groups: Sequence[tuple[int, ...]] = ring_worker.GROUPS,
    ) -> None:
        server = _SERVERS["TRITON_INTERPRET" in BACKENDS[backend].environment]
        context = multiprocessing.get_context("forkserver")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs = tempfile.TemporaryDirectory(prefix="infcl-gen-pool-")
        folders = [folder] if isinstance(folder, Path) else folder
        self.warm = False  # a test may note that the processes have worked once
        self.lost = False  # a process has ended, though it may still be seen alive for a moment
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            seat = ring_worker.Seat(
                rank, world, self.store.port, tuple(map(str, folders)), timeout_s, *BACKENDS[backend], tuple(groups),
                f"{self.logs.name}/{rank}",
            )  # fmt: skip
            process = context.Process(target=ring_worker.main, args=(seat, theirs), daemon=True)
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(world):
            assert self.receive(rank) == "ready", self.log(rank)

    def run(
        self, job: str, on: tuple[int, ...], /, each: dict[int, dict[str, Any]] | None = None, **arguments: Any
    ) -> list[Any]:
        """[("ok", result) or (error's type, message)] of these processes, in this order; `each` adds to one rank's
        arguments."""
        self.start(job, on, each, **arguments)
        return [self.receive(rank) for rank in on]

    def start(
        self, job: str, on: tuple[int, ...], each: dict[int, dict[str, Any]] | None = None, **arguments: Any
    ) -> None:
        """`run`, except that the answers are to be received."""
        for rank in on:
            self.pipes[rank].send((job, {**arguments, **(each or {}).get(rank, {})}))

    def receive(self, rank: int) -> Any:
        if not self.pipes[rank].poll(TIMEOUT_S):
            raise TimeoutError(f"rank {rank} hangs\n{self.log(rank)}")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.lost = True
            return ("dead", "")

    def log(self, rank: int) -> str:
        """What the process has written to stderr."""
        return Path(self.logs.name, str(rank)).read_text(errors="replace")

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self.logs.cleanup()


def results(answers: list[Any]) -> list[Any]:
    assert all(kind == "ok" for kind, _ in answers), answers
    return [value for _, value in answers]


def average(per_rank: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(values).mean(0) for values in zip(*per_rank, strict=True)]


def assert_equal(ours: list[Tensor], truth: list[Tensor]) -> None:
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
