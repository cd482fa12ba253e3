"""The engine by hand: what waits, what shares, what is slower beside a message."""

from __future__ import annotations

import pytest

from infcl_gen.planning.events import Events, Pipe, Task


def test_a_task_waits_for_the_last_of_many() -> None:
    events = Events(1, 0.0)
    short, long = (events.task(0, "host", "host", name, time_s, []) for name, time_s in (("a", 1.0), ("b", 3.0)))
    after = events.task(0, "end", "", "c", 2.0, [long, short, short])
    events.run()
    assert (short.end, long.end, after.start, after.end) == (1.0, 3.0, 3.0, 5.0)
    assert after.cause is long and long.cause is None


def flow(events: Events, pipe: Pipe, size: float, start_s: float) -> Task:
    wait = events.task(0, "host", "host", "wait", start_s, [])
    return events.task(0, "transfer", "network", "flow", size, [wait], pipe)


def test_transfers_share_a_pipe_while_they_are_in_it() -> None:
    """Two of 10 bytes at 1 B/s each, 1.5 B/s in all: 2 s alone, then 0.75 B/s each until the first is through."""
    events, pipe = Events(1, 0.0), Pipe(1.0, 1.5, 1)
    first, second = flow(events, pipe, 10.0, 0.0), flow(events, pipe, 10.0, 2.0)
    events.run()
    assert first.end == pytest.approx(2 + 8 / 0.75)
    left = 10 - 8.0
    assert second.end == pytest.approx(first.end + left / 1.0)
    assert pipe.active == []


def test_a_transfer_that_stands_for_several() -> None:
    events = Events(1, 0.0)
    four = flow(events, Pipe(1.0, 2.0, 4), 10.0, 0.0)
    events.run()
    assert four.end == pytest.approx(20.0)


def test_kernels_are_slower_beside_a_message_of_their_rank() -> None:
    """Half as fast from 1 s to 3 s; another rank's kernels are not touched."""
    events, pipe = Events(2, 1.0), Pipe(2.0, 2.0, 1)
    kernels, others = (events.task(rank, "compute", "compute", "k", 4.0, []) for rank in (0, 1))
    posted = events.task(0, "host", "host", "post", 1.0, [])
    message = events.task(0, "message", "network", "m", 0.5, [posted])
    sent = events.task(0, "transfer", "network", "m", 3.0, [message], pipe)
    done = events.task(0, "done", "network", "m", 0.0, [sent])
    later = events.task(0, "compute", "compute", "k", 1.0, [kernels])
    events.run()
    assert (message.start, done.end) == (1.0, 3.0)
    assert (kernels.end, others.end, later.end) == (5.0, 4.0, 6.0)
    assert kernels.slowed_by == "network" and others.slowed_by == ""


def test_kernels_that_start_beside_a_message() -> None:
    events = Events(1, 1.0)
    begun = events.task(0, "message", "device link", "m", 1.0, [])
    kernels = events.task(0, "compute", "compute", "k", 2.0, [begun])
    wait = events.task(0, "host", "host", "w", 3.0, [])
    events.task(0, "done", "device link", "m", 0.0, [wait])
    events.run()
    assert kernels.end == pytest.approx(4.0)  # half as fast from 1 s to 3 s: 1 s of work, then the other
