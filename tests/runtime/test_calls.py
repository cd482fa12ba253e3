"""Calls of one group, one after the other, of the same sizes and of others; nothing is done before all have agreed.

As test_in_process.py: threads of one process, over a transport that forgives nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infcl_gen.runtime.package import Saved
from tests.planning.tables import gather_table, ring_table
from tests.tiers import examples

from .in_process import USUAL, Ring, World, current_rank
from .test_in_process import LOSSES, MORE_THAN_A_PANEL, Batch, Packages, Results, batches, check_against_reference, step


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_nothing_is_done_before_the_others_are_heard(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Their sizes decide on buffers, and a rank that means another call would take what is sent for its own."""
    package = packages("clip")
    schedule = package.ContrastiveLoss._package.schedule
    orders: dict[int, list[str]] = {0: [], 1: []}

    def noting(where: Any, name: str) -> None:
        inner = getattr(where, name)

        def noted(*args: Any, **options: Any) -> Any:
            orders[current_rank()].append(name)
            given = inner(*args, **options)
            if name == "exchange":
                orders[current_rank()].append("heard")
            return given

        monkeypatch.setattr(where, name, noted)

    def job(rank: int) -> list[str]:
        q, k = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        package.contrastive_loss(q, k, 2.0).backward()
        return orders[rank]

    for where, name in ((schedule, "forward_block"), (Ring, "exchange"), (Ring, "post")):
        noting(where, name)
    way = gather_table(2) if transport == "gather" else ring_table(2, 1)
    world = World(package, 2, tables={2: way})
    for order in world.run(job):
        assert order[:2] == ["exchange", "heard"] and {"forward_block", "post"} <= set(order[2:])
        asked = order.index("exchange", 2)  # before backward
        assert "post" in order[asked:] and "post" not in order[asked : order.index("heard", asked)]


@st.composite
def calls(draw: st.DrawFn, loss: str) -> list[Batch]:
    """Of one group, one after the other: sizes as before, others on one rank, on two, or on all."""
    members = range(draw(st.integers(2, 5)))
    nodes, keeps = draw(st.sampled_from((0, 1))), draw(st.booleans())
    found = [draw(batches(loss, members, nodes, keeps))]
    for change in draw(st.lists(st.sampled_from(("none", "one", "two", "all")), min_size=1, max_size=4)):
        rows, keys = list(found[-1].rows), list(found[-1].keys)
        rank, other = (draw(st.integers(0, len(members) - 1)) for _ in range(2))
        if change == "one":
            more = draw(st.sampled_from((1, MORE_THAN_A_PANEL)))
            rows[rank], keys[rank] = rows[rank] + more, keys[rank] + more
        elif change == "two":  # sums of all ranks are as before
            rows[rank], rows[other] = rows[other], rows[rank]
            keys[rank], keys[other] = keys[other], keys[rank]
        again = dataclasses.replace(found[-1], rows=tuple(rows), keys=tuple(keys), seed=draw(st.integers(0, 99)))
        found.append(draw(batches(loss, members, nodes, keeps)) if change == "all" else again)
    return found


def check_calls(package: ModuleType, batches: Sequence[Batch], turns: int) -> None:
    size = len(batches[0].members)
    has_keys = package.ContrastiveLoss._package.loss.HAS_KEYS
    tensors = [batch.tensors(package.SPEC["problem"]["dim"]) for batch in batches]

    def job(rank: int) -> Results:
        return [step(package, batch, given, rank, "") for batch, given in zip(batches, tensors, strict=True)]

    world = World(package, size, seed=turns, tables={size: batches[0].table(has_keys, package.SPEC["problem"]["dim"])})
    for batch, *results in zip(batches, *world.run(job), strict=True):
        check_against_reference(package, batch, results)


@pytest.mark.parametrize("loss", LOSSES)
@examples(ci=6, long=300)
@given(data=st.data(), turns=st.integers(0, 2**31))
def test_calls_of_other_sizes(packages: Packages, loss: str, data: st.DataObject, turns: int) -> None:
    check_calls(packages(loss, batch_size=1024), data.draw(calls(loss)), turns)


@pytest.mark.parametrize("check_ranks", ["first", "always"])
def test_ranks_that_want_gradients_of_different_inputs_are_told(packages: Packages, check_ranks: str) -> None:
    """Planted: gradients wanted are compared as yes or no."""
    package = packages("clip")

    def job(rank: int) -> Tensor:
        features = [torch.ones(3, 8, dtype=torch.float64) for _ in range(2)]
        features[rank].requires_grad_()
        loss: Tensor = package.contrastive_loss(*features, 2.0, check_ranks=check_ranks)
        return loss

    with pytest.raises(RuntimeError, match=r"gradients wanted differs \(rank 0: q, rank 1: k\)"):
        World(package, 2).run(job)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("loss", ["clip", "infonce"])
@pytest.mark.parametrize("gradients", [0b0000, 0b1111])
def test_a_traced_graph_keeps_what_a_step_keeps(
    packages: Packages, world: int, transport: str, loss: str, gradients: int
) -> None:
    """In shape, dtype and device; what it does not know of other ranks is as planned. The layout is on the host.

    Planted: another number of columns, dtype or device in `forward_shapes`.
    """
    package = packages(loss)
    forward = package.ContrastiveLoss._package.operators.forward
    has_keys = loss == "clip"
    table = gather_table(world, has_keys) if transport == "gather" else ring_table(1, world, has_keys)

    def job(rank: int) -> None:
        q, k = (torch.ones(3 + rank, 8, dtype=torch.float64) for _ in range(2))
        scale, bias = torch.tensor(2.0).double(), torch.tensor(0.0).double()
        rest = (*[None] * 6, *USUAL, gradients)
        step = forward(q, k, scale, bias, *rest)
        traced = forward(*(x.to("meta") for x in (q, k, scale, bias)), *rest)
        for name, kept, known in zip(("loss", *Saved._fields), step, traced, strict=True):
            assert (known.shape, known.dtype) == (kept.shape, kept.dtype), name
            assert known.device.type == ("cpu" if name == "layout" and world > 1 else "meta"), name

    World(package, world, tables={world: table} if world > 1 else {}).run(job)


def test_ranks_hear_of_what_a_full_graph_refuses(packages: Packages) -> None:
    """What was wrong when the graph was traced is raised where it runs; the others do not wait for that rank."""
    package = packages("clip")

    def job(rank: int) -> str:
        x = torch.ones(3, 8, dtype=torch.float64)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            if rank:
                package.ContrastiveLoss._package.operators.refuse("ValueError", "q is wrong", "")
            else:
                package.contrastive_loss(x, x)
        return str(caught.value)

    heard = "ranks disagree: the arguments of rank 1 are invalid (see the error there)"
    assert World(package, 2).run(job) == [heard, "q is wrong"]
