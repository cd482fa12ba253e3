"""Forward and backward of the loss, on one device or over ranks, through the package's device sweep.

    forward     agreement.layout -> Sweep (sweep.py) -> forward_block for each owner's keys -> statistics -> loss_terms
    backward    Sweep -> backward_block for each owner's keys -> sums -> Weighting (weighting.py) -> gradients
    at once     where gradients need no statistics, or those of a row of panels alone, forward does the work of
                backward, which only multiplies what forward has kept (`_at_once`, `_gradients_by_rows`)
    means       a multiple of the mean of all logits is no part of any sweep: sums of features make it (means.py), and
                products of them where keys have weights (weighted.py)
    state       `combine` makes the next state of each query, and the operators of ops.py write it where the caller's is
    thresholds  of queries, above which pairs are left out: each phase makes them from the positives, in the same order
    combined    before loss_terms `combine` makes the weight and the parts of each query from its sum and its positive
    columns     of any number of positives are summed by ids before `combine`, and what keys get by that after it
                (columns.py)
    cosines     of renormalised prefixes: tiles multiply products by factors of rows and keys, and radial sums of keys
                travel beside the sums for dk (renormalised.py)
    per row     where a call takes the loss of each query, backward multiplies what `combine` has left of it by the
                factor that it gets (`_times_upstream`)
    pooled      before `combine` two numbers of the whole batch follow from the positives of all queries (pooled.py)
    triangle    queries are keys of each other: each pair is seen once, and adds to the sums of both rows; those of
                another rank's rows go home (`_of_one_side`, triangle.py)

`gradients` has a bit each for q, k, scale, bias and vectors: a gradient is wanted. Of a side that needs none the
product with g, its sums and their messages are left out (`package.products`).

The package's `schedule` module sweeps blocks of queries and keys. Over ranks a `Trip` brings the keys of each owner.
One device never communicates, never copies its inputs and, on CUDA, never waits for the device.

Gradients. The loss of the batch is L = 1/M * (sum of the terms of queries and keys). With grad_sync="mean" rank p
returns W * (the terms of its own rows). The average of the ranks' parameter gradients (DDP, FSDP) is then exactly the
gradient of L, also for uneven ranks, scale and bias. grad_sync="sum" leaves out W.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import agreement, triangle
from .columns import Columns
from .device_state import device_state
from .group import Group, Layout, find_group
from .launch import panel, panel_columns
from .means import Means
from .package import ALL, KEYS, QUERIES, SCALARS, Block, Call, Package, Saved, combined, products
from .pooled import pooled
from .statistics import Terms, by_prefix, view
from .sweep import Sweep, new_statistics, slopes_of_rows
from .table import Table
from .transport import Tensors, Trip
from .weighted import WeightedMeans
from .weighting import Sums, Weighting, weight_of

Gradients = tuple[Tensor | None, ...]  # dq, dk, dscale, dbias; of a loss with vectors, theirs, too


def forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """This rank's loss (0-dim, statistics dtype), or with reduction "none" its queries' losses (m,), and what backward
    needs.

    `call` is cast; over ranks m and n may be 0. Raises as `agreement.layout`.
    """
    group = find_group(call.options.group_name)
    return swept(package, call, group, agreement.layout(package, group, call, gradients), gradients)


def swept(package: Package, call: Call, group: Group | None, layout: Layout, gradients: int) -> tuple[Tensor, Saved]:
    """`forward` for a layout that the ranks have agreed on."""
    gradients &= ALL  # those of vectors follow with the terms of queries
    with device_state(package, call.q.device, "forward"):
        sweep = Sweep(package, call, layout, _saved_for(package, call, group, layout, gradients), group)
        if isinstance(sweep.means, WeightedMeans):
            sweep.means.begin()
        if package.traits.at_once:
            return _at_once(sweep, group, gradients)
        if isinstance(sweep.queries, Terms):
            _set_valid(sweep, sweep.queries.factor)
        elif package.traits.labels:
            sweep.positive.fill_(math.nan)
        if gradients and package.at_once(len(layout.rows)):
            saved = _gradients_by_rows(sweep, group, gradients)
            _finish_statistics(sweep)
            ours = sweep.own_block()._replace(keys=None)
        else:
            saved, keys = sweep.saved, _forward(sweep, group, gradients)
            _finish_statistics(sweep)
            ours = sweep.own_block()._replace(**({"keys": None} if keys is None else sweep.statistics_of_keys(keys)))
            if package.traits.combined:
                _combine_all(package, ours, group, layout)
        weight = weight_of(layout, call.options)
        if package.traits.vectors:
            saved.of_vectors[: package.traits.weighed].mul_(weight)
        return _losses_of_rows(sweep, ours) if call.options.reduction == "none" else _loss(sweep, ours, weight), saved


def _saved_for(package: Package, call: Call, group: Group | None, layout: Layout, gradients: int) -> Saved:
    """Room for what backward needs, with the vectors of the call."""
    if group is None:
        sizes = call.q.new_empty((0, 3), dtype=torch.int64)
    else:
        each = zip(layout.rows, layout.keys, [group.trips] * group.size, strict=True)
        sizes = torch.tensor(list(each), dtype=torch.int64, device="cpu")
    how = {"unrounded": call.options.unrounded, "later": group is None}
    saved = new_saved(package, call.q, call.k, sizes, gradients, **how)
    if call.vectors is not None:
        saved.of_vectors.copy_(call.vectors)
    return saved


def _finish_statistics(sweep: Sweep) -> None:
    """Terms of queries times their factors; and NaN in sums of queries, where labels or thresholds are NaN."""
    if isinstance(sweep.queries, Terms):
        sweep.queries.total.mul_(sweep.queries.factor)
    elif sweep.queries is not None:
        if sweep.package.traits.labels:
            # A label that names no key leaves NaN in `positive`, which must reach the gradients.
            sweep.queries.mantissa.add_(sweep.positive[0] * 0.0)
        if sweep.thresholds is not None:
            # Comparisons with NaN are false, which no loss shows.
            sweep.queries.mantissa.add_(sweep.thresholds * 0.0)


def _combine_all(package: Package, ours: Block, group: Group | None, layout: Layout) -> None:
    """`_combine`, with what follows from the positives of all queries before it, and what keys get by it."""
    of_all = [pooled(package, ours, group)] if package.traits.pooled else []
    columns = Columns(package, ours, group, layout) if package.traits.columns_of_ids else None
    of_all += [] if columns is None else [columns.of_queries()]
    _combine(package, ours, of_all)
    if columns is not None:
        columns.renew(of_all[-1])


def _losses_of_rows(sweep: Sweep, ours: Block) -> Tensor:
    """The loss of each query, (m,)."""
    if isinstance(ours.queries, Terms):
        return ours.queries.total.clone()
    terms = combined(sweep.package.traits, ours.positive).term
    terms = terms.sum(0) if sweep.package.traits.slabs else terms.clone()
    return sweep.means.added_to_rows(terms) if isinstance(sweep.means, Means) else terms


def _loss(sweep: Sweep, ours: Block, weight: float) -> Tensor:
    """This rank's share of the loss, 0-dim, with the mean of all logits where it has a part."""
    loss: Tensor = sweep.package.schedule.loss_terms(ours, weight)
    return loss if sweep.means is None else sweep.means.added(loss, weight)


def backward(package: Package, call: Call, saved: Saved, upstream: Tensor, gradients: int) -> Gradients:
    """dq (m, D) and dk (n, D) in the features' dtype or `unrounded`; dscale and dbias 0-dim in the statistics dtype;
    None for those not wanted. Of a loss with vectors theirs (V, m), too, in that dtype.

    `upstream` is the gradient of this rank's loss, of its shape and any dtype. `gradients` are those of forward. All
    ranks of a group must call it, in one order; otherwise every rank raises RuntimeError. With `Package.at_once` a rank
    needs no other.
    """
    each = None
    if call.options.reduction == "none":
        each = upstream.to(package.schedule.STATISTICS_DTYPE)
        saved, upstream = _times_upstream(package, saved, each), call.scale.new_ones(())
    if not gradients & ALL:
        return None, None, None, None, *_of_vectors(package, saved, upstream)
    if package.at_once(saved.layout.shape[0]):
        return _rescaled(package, call, saved, upstream, gradients)
    group, layout = None, Layout.alone(call.q, call.k)
    if saved.layout.shape[0]:
        group = find_group(call.options.group_name)
        assert group is not None
        rows, keys, _ = zip(*saved.layout.tolist(), strict=True)
        layout = Layout(group.rank, rows, keys)
    with device_state(package, call.q.device, "backward"):
        sweep = Sweep(package, call, layout, saved, group)
        if isinstance(sweep.means, Means):
            sweep.means.rows = each
        weighting = Weighting(package, call, layout, upstream, gradients, further=sweep.further)
        dq, dk = _backward_alone(sweep, weighting) if group is None else _backward_over(sweep, weighting, group)
        return dq, dk, *weighting.scalars(sweep.slopes), *_of_vectors(package, saved, upstream)


def _combine(package: Package, block: Block, of_all: list[Tensor]) -> None:
    """Makes the weights of queries, of each prefix on its own: its parts of the loss and of scalars are times its
    weight, and in backward its gradients of logits."""
    if not package.traits.slabs:
        package.schedule.combine(block, *of_all)
    for number in range(len(package.traits.slabs)):
        part = block.prefix(number, package.dim)
        package.schedule.combine(part)
        part.positive[1:4].mul_(package.loss.PREFIX_WEIGHTS[number])


def _times_upstream(package: Package, saved: Saved, upstream: Tensor) -> Saved:
    """What forward has saved of each query, times the gradient (m,) of its loss. A log-sum-exp's sum is divided: its
    row, or column, then has the weight."""
    traits, of_queries, vectors = package.traits, saved.of_queries.clone(), saved.of_vectors.clone()
    prefixes = len(traits.slabs)
    if traits.pairs:
        Terms(*of_queries).factor.mul_(upstream)
        return saved._replace(of_queries=of_queries)
    parts, of_keys = combined(traits, by_prefix(of_queries, prefixes)[2:]), saved.of_keys
    view(of_queries, prefixes).mantissa.div_(upstream)
    if traits.softmax_of_positives or traits.by_guide:
        parts.of_positives.div_(upstream)
    else:
        parts.of_positives.mul_(upstream)
    parts.of_scalars.mul_(upstream)
    if parts.by_z is not None:
        parts.by_z.mul_(upstream)
    if parts.second is not None:
        parts.second.mantissa.div_(upstream)
    if traits.crossed:
        of_keys = of_keys.clone()
        view(of_keys, prefixes).mantissa.div_(upstream)
    vectors[: traits.weighed] *= upstream
    return saved._replace(of_queries=of_queries, of_keys=of_keys, of_vectors=vectors)


def _of_vectors(package: Package, saved: Saved, upstream: Tensor) -> list[Tensor]:
    """The gradient of the vectors, if the loss has any; that of a state is 0."""
    if not package.traits.vectors:
        return []
    found = saved.of_vectors * upstream.to(saved.of_vectors.dtype)
    found[package.traits.weighed :] = 0.0
    return [found]


def _at_once(sweep: Sweep, group: Group | None, gradients: int) -> tuple[Tensor, Saved]:
    """The loss of a sum over pairs, and `Saved` with the gradients for an upstream gradient of 1."""
    package, call, layout, saved = sweep.package, sweep.call, sweep.layout, sweep.saved
    upstream = _set_valid(sweep, call.scale.new_empty(()))
    if not gradients:
        _forward(sweep, group, gradients)
    else:
        weighting = Weighting(package, call, layout, upstream, gradients, saved.of_queries.dtype)
        if group is None:
            saved = _kept_alone(sweep, weighting)
        else:
            table = _table(package, layout, gradients)
            begin = lambda: Trip(group, table, "forward", layout, _tensors(sweep, table))  # noqa: E731
            _finished(sweep, weighting, begin, *weighting.kept(saved))
        _keep_scalars(saved, weighting.scalars(sweep.slopes))
    loss: Tensor = package.schedule.loss_terms(sweep.own_block(), weight_of(layout, call.options))
    return loss.mul_(upstream) if package.traits.labels else loss, saved


def _kept_alone(sweep: Sweep, weighting: Weighting) -> Saved:
    """`Saved` of one device with dq and dk, which is made last: during the sweep its memory is for a panel."""
    dk = _backward_alone(sweep, weighting, *weighting.kept(sweep.saved))[1]
    return sweep.saved if dk is None else sweep.saved._replace(of_keys=dk)


def _keep_scalars(saved: Saved, scalars: tuple[Tensor | None, Tensor | None]) -> None:
    dscale, dbias = scalars
    if dscale is not None and dbias is not None:
        torch.stack((dscale, dbias), out=saved.stash)


def _gradients_by_rows(sweep: Sweep, group: Group | None, gradients: int) -> Saved:
    """Completes the statistics of all queries; `Saved` with the gradients for an upstream gradient of 1."""
    package, call, layout, saved = sweep.package, sweep.call, sweep.layout, sweep.saved
    upstream, dtype = call.scale.new_ones(()), saved.of_queries.dtype
    weighting = Weighting(package, call, layout, upstream, gradients, dtype, sweep.means)
    if group is None:
        saved = _kept_alone(sweep, weighting)
    else:
        _rows_over(sweep, weighting, group)
    _keep_scalars(saved, weighting.scalars(sweep.slopes))
    return saved


def _rows_over(sweep: Sweep, weighting: Weighting, group: Group) -> None:
    """Rows of panels over the keys of all ranks, of which work has the sums for dk of each. The first row begins with
    the own keys, while others come. Sums for others go home beside the last products."""
    package, layout, saved, q = sweep.package, sweep.layout, sweep.saved, sweep.call.q
    table, schedule, (dq, dk) = _table(package, layout, weighting.gradients), package.schedule, weighting.kept(saved)
    tensors, sums, of_keys = _tensors(sweep, table), dict[int, Tensor | None](), weighting.products.of_keys
    means, step, keys = sweep.means, min(schedule.PANEL_ROWS, q.shape[0]), sum(layout.keys)
    block, scratch = sweep.block(0, tensors.kept["keys"], saved.of_keys, None), None
    trip = Trip(group, table, "forward", layout, tensors)
    for owner in trip:
        if trip.early:
            trip.arrive()  # behind the early work's programs, messages would begin when these are all under way
            if q.shape[0]:
                scratch = schedule.rows_scratch(step, keys, q.device)
                own_keys = layout.key_offset(owner), layout.keys[owner]
                schedule.begin_rows(block.panel(0, step, 0, keys), *own_keys, scratch)
            continue
        sums[owner] = trip["key gradients"] if of_keys else None
        if means is not None and of_keys and q.shape[0]:
            means.work(trip, fresh=True)
        if len(sums) < group.size or not q.shape[0]:
            continue
        if means is not None:
            means.see(panel(tensors.kept["keys"], 0, keys))
        total = weighting.query_sums(dq, step)
        of_ranks = [(sums[rank], layout.key_offset(rank), count) for rank, count in enumerate(layout.keys)]
        of_ranks = [of_ranks[rank] for rank in sums if of_keys and layout.keys[rank]]  # the own ones last
        for start, count, own in _rows_of_panels(sweep, weighting, total, dq, scratch):
            part = block.panel(start, count, 0, keys)
            # Without own keys the last of `of_ranks` is another rank's: its sums leave behind all work.
            last = start + count == q.shape[0] and layout.keys[layout.rank] > 0
            arrive = trip.arrive if last else None
            schedule.rows_block(part, own, of_ranks, scratch, fresh_dk=start == 0, arrive=arrive)
        scratch = None  # its memory is for the results
    if dk is not None:
        if means is not None:
            means.arrived(trip)
        weighting.keys(trip.home("key gradients"), panel(dk, 0, sweep.call.k.shape[0]))


def _rows_of_panels(
    sweep: Sweep, weighting: Weighting, total: Tensor | None, dq: Tensor | None, scratch: Any
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Of each row of panels the first query, their number, and their part of `total`, which holds all sums for dq if it
    is dq itself, else those of one row of panels, or None. dq is written after the loop's body, by `rows` with
    the shares of its rows in `scratch`."""
    rows, each = sweep.call.q.shape[0], sweep.package.schedule.PANEL_ROWS
    for start in range(0, rows, each):
        count = min(each, rows - start)
        own = None if total is None else panel(total, start if total is dq else 0, count)
        yield start, count, own
        if own is not None:
            share = {"share": scratch.share} if sweep.package.rows else {}
            if share and sweep.package.traits.weighted:
                # These sums get their part of the mean before `finish`.
                own.mul_(share.pop("share")[:count, None])
            weighting.queries(own, own if dq is None else panel(dq, start, count), start, **share)


def _set_valid(sweep: Sweep, valid: Tensor) -> Tensor:
    """`valid`, of each query or 0-dim for all: becomes 1, or NaN where a label names no key."""
    valid.fill_(1.0)
    if isinstance(sweep.positives, int):
        return valid
    wrong = (sweep.positives < 0) | (sweep.positives >= sum(sweep.layout.keys))
    return valid.masked_fill_(wrong if valid.dim() else wrong.any(), math.nan)


def _rescaled(package: Package, call: Call, saved: Saved, upstream: Tensor, gradients: int) -> Gradients:
    """`backward` of a loss whose forward has computed the gradients."""
    schedule, parts = package.schedule, zip((QUERIES, KEYS, SCALARS), saved[:3], strict=True)
    if any(gradients & wanted and kept.shape == (0,) for wanted, kept in parts):
        # A graph that was traced with fewer gradients has not kept the others.
        saved = forward(package, call.cast(package), gradients)[1]
    with device_state(package, call.q.device, "backward"):
        upstream = upstream.to(schedule.STATISTICS_DTYPE)
        dq, dk = _results(call, gradients, schedule.STATISTICS_DTYPE if call.options.unrounded else package.dtype)
        if dq is not None:
            schedule.rescale(saved.of_queries, upstream, dq)
        if dk is not None:
            schedule.rescale(panel(saved.of_keys, 0, call.k.shape[0]), upstream, dk)
        if not gradients & SCALARS:
            return dq, dk, None, None, *_of_vectors(package, saved, upstream)
        dscale, dbias = (x * upstream for x in saved.stash.unbind())  # an operator's results share no memory
        return dq, dk, dscale, dbias, *_of_vectors(package, saved, upstream)


def _results(call: Call, gradients: int, dtype: torch.dtype) -> Sums:
    """Room for dq and dk, contiguous as inputs need not be; None for those not wanted."""
    dq, dk = (
        x.new_empty(x.shape, dtype=dtype) if gradients & wanted else None
        for x, wanted in zip(call[:2], (QUERIES, KEYS), strict=True)
    )
    return dq, dk


def gradient_sums(package: Package, call: Call, saved: Saved, gradients: int) -> Sums:
    """First part of `backward` on one device: the sums for dq (m, D) and dk (n, D), in the statistics dtype.

    `weighted` is the second part. Both are called in a `device_state`.
    """
    (rows, dim), keys, schedule = call.q.shape, call.k.shape[0], package.schedule
    sweep, room = Sweep(package, call, Layout.alone(call.q, call.k), saved), _key_room(package, keys)
    wanted = products(gradients)
    sums = call.q.new_empty((room * wanted.of_keys + rows * wanted.of_queries, dim), dtype=schedule.STATISTICS_DTYPE)
    dk_sum, dq_sum = sums[:room] if wanted.of_keys else None, sums[-rows:] if wanted.of_queries else None
    scratch = schedule.backward_scratch(rows, keys, call.q.device)
    how = {"fresh_dq": True, "fresh_dk": True, "stash": sweep.tiles}
    schedule.backward_block(sweep.own_block(), dq_sum, dk_sum, scratch, **how)
    return dq_sum, None if dk_sum is None else panel(dk_sum, 0, keys)


def weighted(package: Package, call: Call, saved: Saved, sums: Sums, upstream: Tensor, gradients: int) -> Gradients:
    """Second part of `backward`: its results, in fresh tensors, from the `gradient_sums` of the same inputs."""
    layout, means = Layout.alone(call.q, call.k), None
    if package.traits.means:
        means = Means(package, call, call.k.shape[0])
        means.see(call.k)
    weighting = Weighting(package, call, layout, upstream, gradients, further=means)
    dq, dk = _results(call, gradients, weighting.dtype)
    if sums[0] is not None:
        weighting.queries(sums[0], sums[0] if dq is None else dq)
    if sums[1] is not None and dk is not None:
        weighting.keys(sums[1], dk)
    return dq, dk, *weighting.scalars(slopes_of_rows(package, saved.of_queries[2:]))


def new_saved(
    package: Package, q: Tensor, k: Tensor, sizes: Tensor, gradients: int, unrounded: bool = False, later: bool = False
) -> Saved:
    """`Saved` with its tensors not yet written; `sizes` is its layout, `unrounded` that of `Options`.

    With `later` a dk that holds no sums has no rows yet.

    A traced graph does not know the sizes of other ranks. There is room for the planned keys: of all ranks in a gather,
    of one rank in a ring.
    """
    schedule, stash, columns, ranks = package.schedule, None, k.shape[0], sizes.shape[0] or 1
    vectors = q.new_empty((len(package.traits.vectors), q.shape[0]), dtype=schedule.STATISTICS_DTYPE)
    weighted = 1 + k.shape[1] if package.traits.weighted else 0
    sums = q.new_empty((weighted, weighted), dtype=torch.float64)
    if package.at_once(ranks):
        dq, dk, scalars, ids = _new_gradients(package, q, k, gradients, unrounded, later)
        return Saved(dq, dk, scalars, ids, k.new_empty((0, k.shape[1]), dtype=package.dtype), vectors, sums, sizes)
    if gradients and ranks == 1:
        stash = schedule.stash_shape(q.shape[0], columns)
    elif gradients:
        table, room = package.table.over(ranks), _room(package, ranks)
        if table.transport == "gather":
            stash = package.key_count, package.dim
            columns = columns if package.traits.crossed else package.key_count
        elif table.keeps:
            stash, columns = (room, package.dim), columns + room
    kept_ids = stash[0] if stash and package.traits.named and ranks > 1 else 0
    guides = stash[0] if stash and package.traits.guide and ranks > 1 else 0
    return Saved(
        new_statistics(package, q),
        q.new_empty(
            (package.traits.key_numbers, columns if package.traits.has_keys else 0), dtype=schedule.STATISTICS_DTYPE
        ),
        q.new_empty(stash or (0,), dtype=package.dtype),
        q.new_empty((kept_ids, 1), dtype=torch.int64),
        q.new_empty((guides, k.shape[1]), dtype=package.dtype),
        vectors,
        sums,
        sizes,
    )


def _new_gradients(
    package: Package, q: Tensor, k: Tensor, gradients: int, unrounded: bool, later: bool
) -> list[Tensor]:
    """The first parts of `Saved` where forward has the gradients: dq, dk, scalars, and no ids."""
    # bf16 has the range of fp32. fp16 has not, and how far a loss is scaled up is known in backward only.
    rounds, sums = package.dtype == torch.bfloat16 and not unrounded, package.schedule.STATISTICS_DTYPE
    dtype, room = package.dtype if rounds else sums, 0 if later and rounds else _key_room(package, k.shape[0])
    return [
        q.new_empty(q.shape if gradients & QUERIES else (0,), dtype=dtype),
        q.new_empty((room, k.shape[1]) if gradients & KEYS else (0,), dtype=dtype),
        q.new_empty(2 if gradients & SCALARS else 0, dtype=sums),
        q.new_empty((0, 1), dtype=torch.int64),
    ]


def _forward(sweep: Sweep, group: Group | None, gradients: int) -> Tensor | None:
    """Sweeps all keys. Returns the statistics of this rank's keys, those of `saved` where backward reads these."""
    schedule, call, layout, saved = sweep.package.schedule, sweep.call, sweep.layout, sweep.saved
    scratch, fresh = schedule.forward_scratch(call.q, max(layout.keys)), True
    if group is None:
        block = sweep.own_block()
        if sweep.means is not None:
            sweep.means.see(block.k)
        schedule.forward_block(block, scratch, fresh_queries=True, fresh_keys=True, stash=sweep.tiles)
        return saved.of_keys if sweep.package.traits.has_keys else None
    table = _table(sweep.package, layout, gradients)
    trip = Trip(group, table, "forward", layout, _tensors(sweep, table))
    for block in sweep.visits(trip):
        fresh_keys = fresh if block.own else trip.fresh
        schedule.forward_block(block, scratch, fresh_queries=fresh, fresh_keys=fresh_keys, arrive=trip.arrive)
        fresh = False
    if sweep.package.traits.triangle:
        for sums in trip.others("key sums"):
            triangle.add(saved.of_queries, sums, sweep.package.traits, schedule.add_statistics)
    if not sweep.package.traits.has_keys:
        return None
    finished = trip.home("key statistics")
    if not _kept_of_all(sweep.package, table, saved.stash):  # else `finished` is a part of it
        finished = panel_columns(saved.of_keys, 0, call.k.shape[0]).copy_(finished)
    return finished


def _backward_alone(sweep: Sweep, weighting: Weighting, dq: Tensor | None = None, sums: Tensor | None = None) -> Sums:
    """dq and dk on one device, in the tensors given or in new ones. The sums for dq hold PANEL_ROWS rows at a time.

    With `sums` of no rows dk is made after the sweep, and has room behind it.
    """
    if sweep.package.traits.triangle:
        return _of_one_side(sweep, weighting)
    schedule, tiles, (q, k, *_) = sweep.package.schedule, sweep.tiles, sweep.call
    rows, keys, room = q.shape[0], k.shape[0], _key_room(sweep.package, k.shape[0])
    step, in_place, wanted = min(schedule.PANEL_ROWS, rows), weighting.in_place, weighting.products
    later = sums is not None and not len(sums)
    # Not `empty_like`: results are contiguous, inputs need not be.
    if weighting.gradients & QUERIES and dq is None:
        dq = q.new_empty(q.shape, dtype=weighting.dtype)
    if wanted.of_keys and sums is None:
        sums = k.new_empty((room if in_place else keys, k.shape[1]), dtype=weighting.dtype)
    total, dk = dq, None if sums is None else panel(sums, 0, keys)
    if not in_place or (wanted.of_queries and dq is None):
        # One allocation of sums: the allocator may round each up by 1 MiB.
        room, step_room = room * wanted.of_keys, step * wanted.of_queries
        both = q.new_empty((room + step_room, q.shape[1]), dtype=schedule.STATISTICS_DTYPE)
        sums, total = both[:room] if room else None, both[room:] if step_room else None
    block, by_rows = sweep.own_block(), sweep.package.rows
    if sweep.renormalised is not None:
        block = sweep.renormalised.with_sums(block, None, *wanted)
    if sweep.means is not None:
        sweep.means.see(block.k)
    scratch = (schedule.rows_scratch if by_rows else schedule.backward_scratch)(step, keys, q.device)
    for start, count, own in _rows_of_panels(sweep, weighting, total, dq, scratch):
        kept = None if tiles is None or start >= len(tiles) else panel(tiles, start, count)
        part = block.panel(start, count, 0, keys)
        if by_rows:
            schedule.rows_block(part, own, [] if sums is None else [(sums, 0, keys)], scratch, fresh_dk=start == 0)
        else:
            how = {"fresh_dq": True, "fresh_dk": start == 0, "stash": kept}
            schedule.backward_block(part, own, sums, scratch, **how)
    del scratch  # its memory is for the results
    if later:
        dk = k.new_empty((_key_room(sweep.package, keys), k.shape[1]), dtype=weighting.dtype)
    if sums is not None and dk is not None:
        weighting.keys(panel(sums, 0, keys), panel(dk, 0, keys))
    return dq, dk


def _backward_over(sweep: Sweep, weighting: Weighting, group: Group) -> Sums:
    """dq and dk over ranks. The sums for dq hold all rows. dq is written while a gather's sums for dk travel home."""
    package, call, layout, saved = sweep.package, sweep.call, sweep.layout, sweep.saved
    kept = bool(saved.stash.numel())
    table = _table(package, layout, weighting.gradients, kept)
    if table.transport == "gather" and not kept:  # traced without gradients, forward kept no keys
        table = dataclasses.replace(table, transport="ring")

    def agree() -> None:
        # A rank in another call would send keys of the same shape: wrong gradients and no error.
        agreement.compare(group.exchange(agreement.header(package, call), "backward", call=int(saved.layout[0, 2])))

    begin = lambda: Trip(group, table, "backward", layout, _tensors(sweep, table), agree)  # noqa: E731
    return _of_one_side(sweep, weighting, begin()) if package.traits.triangle else _finished(sweep, weighting, begin)


def _of_one_side(sweep: Sweep, weighting: Weighting, trip: Trip | None = None) -> Sums:
    """dq of a triangle, on one device or over a trip of other ranks' rows; and no dk.

    The sums of own rows are one tensor: each pair of them adds to two of it.
    """
    schedule, layout, q = sweep.package.schedule, sweep.layout, sweep.call.q
    rows, room = q.shape[0], _key_room(sweep.package, q.shape[0])
    total = q.new_empty((room, q.shape[1]), dtype=schedule.STATISTICS_DTYPE)
    scratch = schedule.backward_scratch(rows, max(layout.keys), q.device) if rows else None
    if trip is None:
        schedule.backward_block(sweep.own_block(), total, total, scratch, fresh_dq=True, fresh_dk=True)
    else:
        _add_pairs(sweep, trip, total, scratch)
    del scratch, trip  # their memory is for the result
    dq = total = panel(total, 0, rows)
    if weighting.gradients & QUERIES and not weighting.in_place:
        dq = q.new_empty(q.shape, dtype=weighting.dtype)
    weighting.queries(total, dq)
    return dq if weighting.gradients & QUERIES else None, None


def _add_pairs(sweep: Sweep, trip: Trip, total: Tensor, scratch: Any) -> None:
    """total = the sums for dq of all pairs of own rows, with those that other ranks have for them."""
    schedule, rows, fresh = sweep.package.schedule, sweep.call.q.shape[0], True
    for block in sweep.visits(trip):
        share, dq, dk, fresh_dk = trip.share, total, total, trip.fresh
        if fresh:
            panel(total, share.rows, rows - share.rows).zero_()
        if block.own:
            fresh_dk = fresh
        else:
            dq, dk = panel(total, share.row, share.rows), panel(trip["key gradients"], share.key, share.keys)
        schedule.backward_block(block, dq, dk, scratch, fresh_dq=fresh, fresh_dk=fresh_dk, arrive=trip.arrive)
        fresh = False
    for sums in trip.others("key gradients"):
        panel(total, 0, rows).add_(sums)


def _finished(
    sweep: Sweep, weighting: Weighting, begin: Callable[[], Trip], dq: Tensor | None = None, dk: Tensor | None = None
) -> Sums:
    """dq and dk over a trip that carries the sums for dk, in the tensors given or in new ones."""
    schedule, layout, q, k = sweep.package.schedule, sweep.layout, sweep.call.q, sweep.call.k
    trip, in_place, of_keys = begin(), weighting.in_place, weighting.products.of_keys
    dq_sum = weighting.query_sums(dq, q.shape[0])
    scratch, fresh, sums = None, True, None
    for block in sweep.visits(trip):
        row, rows = trip.share[:2]
        if scratch is None:
            scratch = schedule.backward_scratch(q.shape[0], max(layout.keys), q.device)
        if dq_sum is not None and fresh and rows < q.shape[0]:
            panel(dq_sum, rows, q.shape[0] - rows).zero_()
        if sweep.renormalised is not None:
            block = sweep.renormalised.with_sums(block, trip, *weighting.products)
        sums = None if dq_sum is None else panel(dq_sum, row, rows), trip["key gradients"] if of_keys else None
        schedule.backward_block(block, *sums, scratch, fresh_dq=fresh, fresh_dk=trip.fresh, arrive=trip.arrive)
        if sweep.means is not None and of_keys:
            sweep.means.work(trip, trip.fresh)
        fresh = False
    del scratch, sums  # their memory is for the results
    if dq_sum is not None:
        if dq is None and weighting.gradients & QUERIES:
            dq = dq_sum if in_place else q.new_empty(q.shape)
        weighting.queries(dq_sum, dq_sum if dq is None else dq)
    if not of_keys:
        return dq, None
    del dq_sum
    dk_sum = trip.home("key gradients")
    if sweep.further is not None:
        sweep.further.arrived(trip)
    del trip
    if dk is None:
        dk = dk_sum if in_place else k.new_empty(k.shape)
    weighting.keys(dk_sum, panel(dk, 0, k.shape[0]))
    return dq, dk


def _key_room(package: Package, keys: int) -> int:
    """Rows of the sums for dk: library products write up to a multiple of LIBRARY_MULTIPLE."""
    multiple: int = package.schedule.LIBRARY_MULTIPLE
    return -(-keys // multiple) * multiple


def _table(package: Package, layout: Layout, gradients: int, keeps: bool = True) -> Table:
    """The table for this number of ranks, the same on every rank. Forward keeps keys for backward if it has gradients;
    it did not where a graph was traced without them."""
    table = package.table.over(len(layout.rows))
    if package.at_once(table.world_size) and not gradients:
        return table.without_sums()
    if not gradients & KEYS and not package.traits.triangle:
        table = table.without_key_gradients()
    if table.keeps and not (gradients and keeps and max(layout.keys) <= _room(package, table.world_size)):
        return dataclasses.replace(table, keeps=False)
    return table


def sweep_off_diagonal(package: Package, call: Call, saved: Saved, gradients: int) -> None:
    """Forward and backward of one panel without positives, for a rehearsal: panels of its few rows have some.

    A triangle's panel lies above the diagonal. Forward is left out where backward has the loss.
    """
    schedule, rows, wanted = package.schedule, min(call.q.shape[0], call.k.shape[0]), products(gradients)
    own = Sweep(package, call, Layout.alone(call.q, call.k), saved).own_block()
    block = own.panel(0, rows, 0, rows)._replace(first_key=rows)
    if not (gradients and package.traits.at_once):
        schedule.forward_block(block, schedule.forward_scratch(call.q, rows))
    total = call.q.new_empty((_key_room(package, rows), package.dim), dtype=schedule.STATISTICS_DTYPE)
    dq, dk = total if wanted.of_queries else None, total if wanted.of_keys or package.traits.triangle else None
    if gradients:
        schedule.backward_block(block, dq, dk, schedule.backward_scratch(rows, rows, call.q.device))


def _tensors(sweep: Sweep, table: Table) -> Tensors:
    """The tensors of a trip; those kept for backward are `of_keys`, `stash`, `ids` and `guides` of `Saved`."""
    package, layout, k, stash, statistics = sweep.package, sweep.layout, sweep.call.k, sweep.stash, sweep.saved.of_keys
    named = "key ids" if package.traits.ids else "key labels"
    schedule, keys, ids, guides = package.schedule, k.shape[0], sweep.saved.ids, sweep.saved.guides
    dtypes = {"features": k.dtype, "statistics": schedule.STATISTICS_DTYPE}
    own = {"keys": k}
    if sweep.key_ids is not None:
        own["key ids"] = sweep.key_ids[:, None]
    if package.traits.guide and sweep.call.guide_keys is not None:
        own["guide keys"] = sweep.call.guide_keys
    if package.traits.has_keys:
        own["key statistics"] = panel_columns(statistics, 0, keys)
    if package.traits.triangle:
        own["key statistics"] = sweep.saved.of_queries
        if package.traits.labels:
            assert sweep.labels is not None
            own["key labels"] = sweep.labels[:, None]
    if table.transport == "gather":
        if not stash.numel():  # nothing is kept for backward
            total = sum(layout.keys)
            stash = k.new_empty((total, package.dim))
            statistics = statistics.new_empty((package.traits.key_numbers, total))
            ids = ids.new_empty((total * package.traits.named, 1))
            guides = guides.new_empty((total * package.traits.guide, package.dim))
        kept = {"keys": stash, "key statistics": statistics, named: ids, "guide keys": guides}
        if package.traits.triangle or package.traits.crossed:
            del kept["key statistics"]  # each rank has those of its own keys
        return Tensors(own, kept, dtypes, functools.partial(_merge_ranks, package))
    if not table.keeps:
        return Tensors(own, {}, dtypes)
    largest = max(layout.keys)
    kept = {"keys": stash[:largest], named: ids[:largest], "guide keys": guides[:largest]}
    if not package.traits.triangle:
        kept["key statistics"] = statistics[:, keys : keys + largest]
    return Tensors(own, kept, dtypes)


def _kept_of_all(package: Package, table: Table, stash: Tensor) -> bool:
    """Whether the statistics of all ranks' keys stay for backward, where forward has them."""
    return table.transport == "gather" and bool(stash.numel()) and not package.traits.crossed


def _merge_ranks(package: Package, parts: Tensor, sums: Tensor) -> None:
    """sums = the statistics of keys that several ranks have, `parts` (ranks, *the shape of sums)."""
    schedule, prefixes = package.schedule, len(package.traits.slabs)
    if not prefixes:
        schedule.merge_ranks(parts[:, :2], view(sums))
        if package.traits.guided_sides:
            schedule.merge_guides(parts[:, 2:], sums[2:])
        return
    total, of_ranks = view(sums, prefixes), parts.unflatten(1, (-1, prefixes))
    for number in range(prefixes):
        schedule.merge_ranks(of_ranks[:, :, number], total.prefix(number))


def _room(package: Package, ranks: int) -> int:
    """Keys that a ring has room to keep for backward: an even shard. Keys of a longer shard are sent once more."""
    return -(-package.key_count // ranks)
