"""Forward and backward of the loss over one device or several, through the package's device sweep.

    forward     agreement.layout -> _Sweep -> forward_block for each owner's keys -> statistics -> loss_terms
    backward    _Sweep -> backward_block for each owner's keys -> sums -> _Weighting -> gradients

The device sweep is the package's `schedule` module: this file gives it blocks of queries and keys, decides what is kept
for backward, and weights the results. Over several ranks the table of communication says whose keys visit when, and a
`Trip` brings them. A group of one never communicates, never copies its inputs and, on CUDA, never waits for the device.

Gradient convention. The loss of the whole batch is L = 1/M * (sum of terms of queries and of keys). Rank p returns
W * (the terms of its own rows) with grad_sync="mean": averaging parameter gradients over ranks, as DDP and FSDP do,
then gives exactly the gradient of L, for uneven ranks and for scale and bias too. grad_sync="sum" leaves out the W.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import agreement
from .group import Group, Layout, find_group
from .launch import panel, panel_columns
from .package import Block, Call, Options, Package, Saved
from .statistics import Statistics, view
from .table import Table
from .transport import Tensors, Trip

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dscale, dbias


def forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """This rank's loss (0-dim, statistics dtype) and what backward needs.

    `call` is cast; over several ranks m and n may be 0. `gradients`: bits of q, k, scale and bias for those that want
    one. Raises, on every rank, ValueError for sizes that the package cannot take and RuntimeError where ranks disagree.
    """
    group = find_group(call.options.group_name)
    layout = agreement.layout(package, group, call, gradients)
    with device_state(package, call.q.device):
        if group is None:
            sizes = call.q.new_empty((0, 3), dtype=torch.int64)
        else:
            each = zip(layout.rows, layout.keys, [group.trips] * group.size, strict=True)
            sizes = torch.tensor(list(each), dtype=torch.int64)
        saved = new_saved(package, call.q, call.k, sizes, bool(gradients))
        sweep = _Sweep(package, call, layout, saved)
        if package.labelled:
            sweep.positive.fill_(math.nan)
        keys = _forward(sweep, group, bool(gradients))
        if package.labelled:
            # A label that names no key leaves the NaN in `positive`: let it reach the gradients too.
            sweep.queries.mantissa.add_(sweep.positive[0] * 0.0)
        ours = sweep.block(layout.rank, call.k, saved.key_statistics)._replace(keys=keys)
        return package.schedule.loss_terms(ours, _weight(layout, call.options)), saved


def backward(package: Package, call: Call, saved: Saved, upstream: Tensor) -> Gradients:
    """(dq (m, D), dk (n, D) in the features' dtype or `unrounded`, dscale, dbias 0-dim in the statistics dtype), times
    `upstream`, the gradient of this rank's loss (0-dim, any strides and dtype). In a ring every rank must call it, in
    one order where there are several; else all raise RuntimeError."""
    group, layout = None, Layout.alone(call.q, call.k)
    if saved.layout.shape[0]:
        group = find_group(call.options.group_name)
        assert group is not None
        rows, keys, _ = zip(*saved.layout.tolist(), strict=True)
        layout = Layout(group.rank, rows, keys)
    with device_state(package, call.q.device):
        weighting = _Weighting(package, call, layout, upstream)
        sweep = _Sweep(package, call, layout, saved)
        dq, dk = _backward_alone(sweep, weighting) if group is None else _backward_over(sweep, weighting, group)
        return dq, dk, *weighting.scalars()


def gradient_sums(package: Package, call: Call, saved: Saved) -> tuple[Tensor, Tensor]:
    """The part of `backward` before `weighted`, of a group of one and for all rows at once: the sums for dq (m, D) and
    dk (n, D), in the statistics dtype. Both parts are called in a `device_state`."""
    (rows, dim), keys, schedule = call.q.shape, call.k.shape[0], package.schedule
    sweep, room = _Sweep(package, call, Layout.alone(call.q, call.k), saved), _key_room(package, keys)
    sums = call.q.new_empty((room + rows, dim), dtype=schedule.STATISTICS_DTYPE)
    dk_sum, dq_sum = sums[:room], sums[room:]
    scratch = schedule.backward_scratch(rows, keys, call.q.device)
    how = {"fresh_dq": True, "fresh_dk": True, "stash": _kept(saved.stash)}
    schedule.backward_block(sweep.own_block(), dq_sum, dk_sum, scratch, **how)
    return dq_sum, panel(dk_sum, 0, keys)


def weighted(package: Package, call: Call, sums: tuple[Tensor, Tensor], upstream: Tensor) -> Gradients:
    """The rest of `backward`: its results, in fresh tensors, from what `gradient_sums` gave for the same inputs."""
    weighting = _Weighting(package, call, Layout.alone(call.q, call.k), upstream)
    dq, dk = [x.new_empty(x.shape, dtype=weighting.dtype) for x in call[:2]]
    weighting.queries(sums[0], dq)
    weighting.keys(sums[1], dk)
    return dq, dk, *weighting.scalars()


def new_saved(package: Package, q: Tensor, k: Tensor, sizes: Tensor, gradients: bool) -> Saved:
    """What a forward keeps, not yet written but for `sizes`, which is `Saved.layout`.

    A graph is traced without knowing the rows of other ranks: there is room for as many keys as were planned, in a
    gather for those of all ranks, in a ring for those of one.
    """
    schedule, stash, columns, ranks = package.schedule, None, k.shape[0], sizes.shape[0] or 1
    if gradients and ranks == 1:
        stash = schedule.stash_shape(q.shape[0], columns)
    elif gradients:
        table, room = package.table.over(ranks), _room(package, ranks)
        if table.transport == "gather":
            stash, columns = (package.key_count, package.dim), package.key_count
        elif table.keeps:
            stash, columns = (room, package.dim), columns + room
    return Saved(
        q.new_empty((2 + schedule.POSITIVE_PARTS, q.shape[0]), dtype=schedule.STATISTICS_DTYPE),
        q.new_empty((2, columns if package.loss.HAS_KEYS else 0), dtype=schedule.STATISTICS_DTYPE),
        q.new_empty(stash or (0,), dtype=package.dtype),
        sizes,
    )


class _Sweep:
    """One phase of a call, from which its blocks are cut. `positives`: those of `_positives`. `queries` and `positive`:
    views of `Saved.query_statistics`, the sums, and what is kept of the positives."""

    def __init__(self, package: Package, call: Call, layout: Layout, saved: Saved) -> None:
        self.package, self.call, self.layout, self.saved = package, call, layout, saved
        # Labels before any kernel: their copy from the host would wait for it.
        self.positives, statistics = _positives(package, call, layout), saved.query_statistics
        self.queries, self.positive = view(statistics), statistics[2:]

    def block(self, owner: int, k: Tensor, statistics: Tensor) -> Block:
        """All queries, and the owner's keys with their statistics."""
        keys, first = view(statistics) if self.package.loss.HAS_KEYS else None, self.layout.key_offset(owner)
        q, _, scale, bias, *_ = self.call
        return Block(q, k, scale, bias, self.positives, first, self.queries, keys, self.positive)

    def own_block(self) -> Block:
        """All queries and keys of a group of one."""
        return self.block(0, self.call.k, self.saved.key_statistics)

    def visits(self, trip: Trip) -> Iterator[Block]:
        """The blocks of all queries and the keys that a trip brings, of those where neither is empty."""
        has_keys = self.package.loss.HAS_KEYS
        for owner in trip:
            if self.call.q.shape[0] and self.layout.keys[owner]:
                statistics = trip["key statistics"] if has_keys else self.saved.key_statistics
                yield self.block(owner, trip["keys"], statistics)


def _forward(sweep: _Sweep, group: Group | None, gradients: bool) -> Statistics | None:
    """The sweep over all keys: as one block, or of each owner as they visit. Returns the statistics of the own keys."""
    schedule, call, layout, saved = sweep.package.schedule, sweep.call, sweep.layout, sweep.saved
    scratch, fresh = schedule.forward_scratch(call.q, max(layout.keys)), True
    if group is None:
        block = sweep.own_block()
        schedule.forward_block(block, scratch, fresh_queries=True, fresh_keys=True, stash=_kept(saved.stash))
        return block.keys
    table = _table(sweep.package, layout, gradients)
    trip = Trip(group, table, "forward", layout, _tensors(sweep, table))
    for block in sweep.visits(trip):
        schedule.forward_block(block, scratch, fresh_queries=fresh, fresh_keys=trip.fresh, arrive=trip.arrive)
        fresh = False
    if not sweep.package.loss.HAS_KEYS:
        return None
    finished = trip.home("key statistics")
    if table.transport == "ring":
        panel_columns(saved.key_statistics, 0, call.k.shape[0]).copy_(finished)
    return view(finished)


def _backward_alone(sweep: _Sweep, weighting: _Weighting) -> tuple[Tensor, Tensor]:
    """dq and dk. The sums for dq are of PANEL_ROWS rows at a time."""
    schedule, saved, (q, k, *_) = sweep.package.schedule, sweep.saved, sweep.call
    rows, keys, room = q.shape[0], k.shape[0], _key_room(sweep.package, k.shape[0])
    step, in_place = min(schedule.PANEL_ROWS, rows), weighting.dtype == schedule.STATISTICS_DTYPE
    # By shape, not `empty_like`: results are contiguous, and inputs need not be.
    total = dq = q.new_empty(q.shape, dtype=weighting.dtype)
    sums = k.new_empty((room if in_place else keys, k.shape[1]), dtype=weighting.dtype)
    dk = panel(sums, 0, keys)
    if not in_place:  # one allocation of sums: the allocator may round each up by 1 MiB
        both = q.new_empty((room + step, q.shape[1]), dtype=schedule.STATISTICS_DTYPE)
        sums, total = both[:room], both[room:]
    block, scratch = sweep.own_block(), schedule.backward_scratch(step, keys, q.device)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        own = panel(total, start if in_place else 0, count)
        how = {"fresh_dq": True, "fresh_dk": start == 0, "stash": _kept(saved.stash, start, count)}
        schedule.backward_block(block.panel(start, count, 0, keys), own, sums, scratch, **how)
        weighting.queries(own, panel(dq, start, count), start)
    del scratch  # its memory is for the results
    weighting.keys(panel(sums, 0, keys), dk)
    return dq, dk


def _backward_over(sweep: _Sweep, weighting: _Weighting, group: Group) -> tuple[Tensor, Tensor]:
    """dq and dk. The sums for dq are of all rows; the queries' results are written while a gather's sums for dk come
    home."""
    package, call, layout, saved = sweep.package, sweep.call, sweep.layout, sweep.saved
    schedule, q, k, gradients = package.schedule, call.q, call.k, bool(saved.stash.numel())
    table = _table(package, layout, gradients)
    if table.transport == "gather" and not gradients:  # traced without
        table = dataclasses.replace(table, transport="ring")

    def agree() -> None:
        # A rank that is in another call would send keys of the same shape: wrong gradients, and no error.
        agreement.compare(group.exchange(agreement.header(package, call), "backward", call=int(saved.layout[0, 2])))

    trip = Trip(group, table, "backward", layout, _tensors(sweep, table), agree)
    dq_sum = q.new_empty(q.shape, dtype=schedule.STATISTICS_DTYPE)
    scratch, fresh = None, True
    for block in sweep.visits(trip):
        if scratch is None:
            scratch = schedule.backward_scratch(q.shape[0], max(layout.keys), q.device)
        how = {"fresh_dq": fresh, "fresh_dk": trip.fresh, "arrive": trip.arrive}
        schedule.backward_block(block, dq_sum, trip["key gradients"], scratch, **how)
        fresh = False
    del scratch  # its memory is for the results
    in_place = weighting.dtype == schedule.STATISTICS_DTYPE
    dq = dq_sum if in_place else q.new_empty(q.shape)
    weighting.queries(dq_sum, dq)
    dk_sum = trip.home("key gradients")
    del trip
    dk = dk_sum if in_place else k.new_empty(k.shape)
    weighting.keys(dk_sum, dk)
    return dq, dk


def _kept(stash: Tensor, start: int = 0, rows: int | None = None) -> Tensor | None:
    """The tiles of these rows in what the sweep has kept (None: of all), if there are any."""
    tiles = stash if rows is None or not stash.numel() else stash[start : start + rows]
    return tiles if tiles.numel() else None


def _key_room(package: Package, keys: int) -> int:
    """Rows of the sums for dk of so many keys, with what library products write behind them."""
    multiple: int = package.schedule.LIBRARY_MULTIPLE
    return -(-keys // multiple) * multiple


class _Weighting:
    """From sums over pairs to gradients: the weight of a term, the gradient of the loss and the logit's own factor.

    `dtype` is that of dq and dk. Where these are in the statistics dtype they may take the place of the sums.
    """

    def __init__(self, package: Package, call: Call, layout: Layout, upstream: Tensor) -> None:
        schedule, rows = package.schedule, call.q.shape[0]
        self._schedule, self._q, self._k, dtype = schedule, call.q, call.k, schedule.STATISTICS_DTYPE
        self._factors = call.scale, call.bias, upstream.to(dtype).contiguous(), _weight(layout, call.options)
        self._dots = call.q.new_empty(-(-rows // schedule.FINISH_ROWS), dtype=dtype)
        self.dtype = dtype if call.options.unrounded else package.dtype

    def queries(self, total: Tensor, out: Tensor, start: int = 0) -> None:
        """Rows of the query gradient from `start` on, a multiple of FINISH_ROWS."""
        rows, each = total.shape[0], self._schedule.FINISH_ROWS
        if rows:
            dots = panel(self._dots, start // each, -(-rows // each))
            self._schedule.finish(total, panel(self._q, start, rows), *self._factors, out, dots=dots)

    def keys(self, total: Tensor, out: Tensor) -> None:
        """The key gradient."""
        if total.shape[0]:
            self._schedule.finish(total, self._k, *self._factors, out)

    def scalars(self) -> tuple[Tensor, Tensor]:
        """(dscale, dbias), when all rows of the query gradient are done."""
        found: tuple[Tensor, Tensor] = self._schedule.scalar_gradients(self._dots, *self._factors, self._q.shape[0])
        return found


def _table(package: Package, layout: Layout, gradients: bool) -> Table:
    """Who sends what when, for as many ranks as there are; `gradients`: forward keeps what backward reads, or has kept
    it. The same on every rank."""
    table = package.table.over(len(layout.rows))
    if table.keeps and not (gradients and max(layout.keys) <= _room(package, table.world_size)):
        return dataclasses.replace(table, keeps=False)
    return table


def _tensors(sweep: _Sweep, table: Table) -> Tensors:
    """What travels, and where it stays for backward: in `Saved.key_statistics` and `Saved.stash`."""
    package, layout, k, (_, statistics, stash, _) = sweep.package, sweep.layout, sweep.call.k, sweep.saved
    schedule, keys = package.schedule, k.shape[0]
    dtypes = {"features": k.dtype, "statistics": schedule.STATISTICS_DTYPE}
    own = {"keys": k}
    if package.loss.HAS_KEYS:
        own["key statistics"] = panel_columns(statistics, 0, keys)
    if table.transport == "gather":
        if not stash.numel():  # nothing stays
            total = sum(layout.keys)
            stash, statistics = k.new_empty((total, package.dim)), statistics.new_empty((2, total))
        kept = {"keys": stash, "key statistics": statistics}
        return Tensors(own, kept, dtypes, lambda parts, sums: schedule.merge_ranks(parts, view(sums)))
    if not table.keeps:
        return Tensors(own, {}, dtypes)
    largest = max(layout.keys)
    return Tensors(own, {"keys": stash[:largest], "key statistics": statistics[:, keys : keys + largest]}, dtypes)


def _room(package: Package, ranks: int) -> int:
    """For how many keys a ring keeps room from forward to backward: a rank's, if all have as many. A longer shard's are
    sent once more instead."""
    return -(-package.key_count // ranks)


def _positives(package: Package, call: Call, layout: Layout) -> Tensor | int:
    """The global index of each query's positive: an int64 tensor beside the features, contiguous since kernels read one
    after another, or for "diagonal" losses that of local row 0."""
    own = call.options.labelling == "own"
    offset = layout.key_offset(layout.rank) if own else sum(layout.rows[: layout.rank])
    if not package.labelled:
        return offset
    if call.labels is None:
        return torch.arange(offset, offset + call.q.shape[0], device=call.q.device)
    return call.labels.to(call.q.device).contiguous()


def _weight(layout: Layout, options: Options) -> float:
    """What a term of this rank counts in its loss."""
    ranks = len(layout.rows) if options.grad_sync == "mean" else 1
    return ranks / sum(layout.rows) if options.reduction == "mean" else float(ranks)


def device_state(
    package: Package, device: torch.device, plain_tensors: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """No graph, no autocast (it would round inside the sweep), and the tensors' device current. `plain_tensors`: not in
    inference mode either.

    Each costs microseconds on the host, which the device waits for: only what is not so already is changed.
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
    if package.dtype == torch.float32 or device.type == "cpu":  # where the switch has a say
        changes.append(_precisions[device.type == "cuda"].of_products(package.product_precision))
    if not changes:
        return _UNCHANGED
    with contextlib.ExitStack() as state:  # which leaves again what it has entered, if the next cannot be
        for change in changes:
            state.enter_context(change)
        return state.pop_all()


class _Precision:
    """torch's process-wide switch for fp32 matrix products, held at a value while anybody needs it there.

    What the process has chosen for its own products ("medium" rounds them to bf16 on some CPUs) must not reach ours.
    """

    def __init__(self, library: Any) -> None:
        self._switch, self._lock, self._users, self._before = library.matmul, threading.Lock(), 0, ""

    @contextlib.contextmanager
    def of_products(self, precision: str) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = self._switch.fp32_precision
            self._users += 1
            self._switch.fp32_precision = precision
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._switch.fp32_precision = self._before


_UNCHANGED = contextlib.nullcontext()
_precisions = (_Precision(torch.backends.mkldnn), _Precision(torch.backends.cuda))
