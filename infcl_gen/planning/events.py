"""Discrete events: tasks that start when their predecessors are over.

Work is seconds, or bytes in a pipe that transfers share. Kernels are slower beside a message of their rank.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence


class Task:
    """`kind`: "host", "compute", "message" (a batch of transfers begins), "transfer", "done" (the batch has arrived),
    "lead" (work before the step), "heard" (a call is known to the other hosts) or "end". `resource` is in use or waited
    for. `Events.run` sets `start`, `end`, `cause` (the predecessor that ended last) and, for kernels, `slowed_by`, the
    resource of the rank's last message."""

    def __init__(self, rank: int, kind: str, resource: str, name: str, work: float, pipe: Pipe | None) -> None:
        self.rank, self.kind, self.resource, self.name, self.pipe = rank, kind, resource, name, pipe
        self.work = self.left = work
        self.rate, self.version, self.waits = 1.0, 0, 0
        self.start = self.since = self.end = -1.0
        self.followers: list[Task] = []
        self.cause: Task | None = None
        self.slowed_by = ""


class Pipe:
    """A link that transfers share: each has at most `each` bytes/s, all together at most `total`. A transfer counts
    `weight` times, for the ranks that its rank stands for."""

    def __init__(self, each: float, total: float, weight: int) -> None:
        self._each, self._total, self._weight = each, total, weight
        self.active: list[Task] = []

    @property
    def rate(self) -> float:
        return min(self._each, self._total / (self._weight * max(1, len(self.active))))


class Events:
    """Tasks and their clock. Kernels take (1 + slowdown) times as long beside a message of their rank."""

    def __init__(self, ranks: int, slowdown: float) -> None:
        self.tasks: list[Task] = []
        self._slow = 1 / (1 + slowdown)
        self._in_flight = [0] * ranks
        self._last_message = [""] * ranks
        self._running: list[Task | None] = [None] * ranks
        self._heap: list[tuple[float, int, Task]] = []
        self._now, self._versions = 0.0, itertools.count(1)

    def task(
        self, rank: int, kind: str, resource: str, name: str, work: float, waits: Sequence[Task],
        pipe: Pipe | None = None,
    ) -> Task:  # fmt: skip
        """Add a task that starts when all of `waits` are over."""
        task = Task(rank, kind, resource, name, work, pipe)
        for other in waits:
            other.followers.append(task)
        task.waits = len(waits)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        for task in self.tasks:
            if not task.waits:
                self._start(task)
        while self._heap:
            time_s, version, task = heapq.heappop(self._heap)
            if version == task.version:  # else its rate has changed since
                self._now = time_s
                self._finish(task)

    def _start(self, task: Task) -> None:
        task.start = task.since = self._now
        if task.pipe is not None:
            task.pipe.active.append(task)
            self._share(task.pipe)
            return
        if task.kind == "compute":
            self._running[task.rank] = task
            task.rate = self._speed(task.rank)
        elif task.kind == "message":
            self._in_flight[task.rank] += 1
            self._last_message[task.rank] = task.resource
            self._change(self._running[task.rank], self._speed(task.rank))
        self._push(task)

    def _finish(self, task: Task) -> None:
        task.end, task.version = self._now, -1
        if task.kind == "compute":
            self._running[task.rank] = None
            task.slowed_by = self._last_message[task.rank]
        elif task.kind == "done":
            self._in_flight[task.rank] -= 1
            self._change(self._running[task.rank], self._speed(task.rank))
        elif task.pipe is not None:
            task.pipe.active.remove(task)
            self._share(task.pipe)
        for follower in task.followers:
            follower.waits -= 1
            if not follower.waits:
                follower.cause = task
                self._start(follower)

    def _speed(self, rank: int) -> float:
        return self._slow if self._in_flight[rank] else 1.0

    def _share(self, pipe: Pipe) -> None:
        for task in pipe.active:
            self._change(task, pipe.rate)

    def _change(self, task: Task | None, rate: float) -> None:
        if task is not None and (rate != task.rate or not task.version):
            task.left -= (self._now - task.since) * task.rate
            task.since, task.rate = self._now, rate
            self._push(task)

    def _push(self, task: Task) -> None:
        task.version = next(self._versions)
        heapq.heappush(self._heap, (self._now + max(0.0, task.left) / task.rate, task.version, task))
