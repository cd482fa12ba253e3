"""Forward and backward of the loss over one device or several, through the package's device sweep.

The device sweep is the package's `schedule` module. This file gives it the blocks of queries and keys that the table of
communication names, and decides what is kept for backward and what the results are weighted with. A group of one never
communicates, never copies its inputs and, on CUDA, never waits for the device.

Gradient convention. The loss of the whole batch is L = 1/M * (sum of terms of queries and of keys). Rank p returns
W * (the terms of its own rows) with grad_sync="mean": averaging parameter gradients over ranks, as DDP and FSDP do,
then gives exactly the gradient of L, for uneven ranks and for scale and bias too. grad_sync="sum" leaves out the W.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import agreement
from .group import Group, Layout, find_group
from .launch import panel, panel_columns
from .package import Call, Options, Package, Saved
from .statistics import Statistics, clear, view
from .table import Table
from .transport import Tensors, Trip


def forward(package: Package, call: Call, gradients: int) -> tuple[Tensor, Saved]:
    """This rank's loss (0-dim, statistics dtype) and what backward needs.

    `call` is cast; over several ranks m and n may be 0. `gradients`: bits of q, k, scale and bias for those that want
    one. Raises, on every rank, ValueError for sizes that the package cannot take and RuntimeError where ranks disagree.
    """
    q, k, scale, bias = call[:4]
    group = find_group(call.options.group_name)
    if group is None:
        layout, trips = agreement.layout_alone(package, call), 0
    else:
        trips = group.trips
        layout = agreement.layout_over(package, group, call, gradients)
    rows, keys, size = q.shape[0], k.shape[0], len(layout.rows)
    with _device_state(package, q.device):
        # First, before any kernel: a copy of labels from the host would wait for it.
        positives = _positives(package, call, layout)
        shape, columns = kept_sizes(package, size, rows, keys, bool(gradients))
        query_statistics, key_statistics = _statistics(package, q, columns)
        stash = q.new_empty(shape)
        queries, positive, own = view(query_statistics), query_statistics[2:], None
        table = _table(package, layout, bool(gradients))
        tensors = _tensors(package, table, layout, k, key_statistics, stash)
        trip = Trip(group, table, "forward", layout, tensors)
        scratch, fresh = package.schedule.forward_scratch(q, max(layout.keys)), True
        tiles = stash if group is None and 0 not in shape else None
        for owner in trip:
            visiting = trip["keys"]
            if not (rows and visiting.shape[0]):
                continue
            block = view(trip["key statistics"]) if package.loss.HAS_KEYS else None
            arguments = (q, visiting, scale, bias, positives, layout.key_offset(owner), queries, block, positive)
            how = {"fresh_queries": fresh, "fresh_keys": trip.fresh, "arrive": trip.arrive, "stash": tiles}
            package.schedule.forward_block(*arguments, **how, scratch=scratch)
            fresh = False
        if fresh:
            clear(query_statistics[:2])  # no block has written to them
        if package.loss.HAS_KEYS:
            finished, mine = trip.home("key statistics"), panel_columns(key_statistics, 0, keys)
            if table.transport == "ring":
                mine.copy_(finished)
            own = view(finished)
        del scratch, trip, tensors  # their memory is for the loss
        loss = _loss(package, call, layout, queries, own, positive)
    if group is None:
        sizes = q.new_empty((0, 3), dtype=torch.int64)
    else:
        sizes = torch.tensor(list(zip(layout.rows, layout.keys, [trips] * size, strict=True)), dtype=torch.int64)
    return loss, Saved(query_statistics, key_statistics, stash, sizes)


def _statistics(package: Package, q: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Room for a forward's statistics of the queries, with what is kept of their positives, and of `columns` keys."""
    schedule = package.schedule
    queries = q.new_empty((2 + schedule.POSITIVE_PARTS, q.shape[0]), dtype=schedule.STATISTICS_DTYPE)
    if package.labelled:
        queries[2:].fill_(math.nan)
    return queries, q.new_empty((2, columns), dtype=schedule.STATISTICS_DTYPE)


def _loss(
    package: Package, call: Call, layout: Layout, queries: Statistics, keys: Statistics | None, positive: Tensor
) -> Tensor:
    """This rank's part of the loss, from the statistics of its rows and keys."""
    if package.labelled:
        # A label that names no key leaves the NaN in `positive`: let it reach the gradients too.
        queries.mantissa.add_(positive[0] * 0.0)
    weight = _weight(layout, call.options)
    loss: Tensor = package.schedule.loss_terms(queries, keys, positive, call.scale, call.bias, weight, weight)
    return loss


def _table(package: Package, layout: Layout, kept: bool) -> Table:
    """Who sends what when, for as many ranks as there are; `kept`: forward keeps what backward reads, or has kept it.
    The same on every rank."""
    table = package.table.over(len(layout.rows))
    if table.keeps and not (kept and max(layout.keys) <= _room(package, table.world_size)):
        return dataclasses.replace(table, keeps=False)
    return table


def _tensors(
    package: Package, table: Table, layout: Layout, k: Tensor, key_statistics: Tensor, stash: Tensor
) -> Tensors:
    """What travels, and where it stays for backward: in `Saved.key_statistics` and `Saved.stash`."""
    keys, own, kept = k.shape[0], {"keys": k}, {}
    if package.loss.HAS_KEYS:
        own["key statistics"] = panel_columns(key_statistics, 0, keys)
    dtypes = {"features": k.dtype, "statistics": package.schedule.STATISTICS_DTYPE}
    if table.keeps:
        largest = max(layout.keys)
        kept["keys"] = panel(stash, 0, largest)
        if package.loss.HAS_KEYS:
            kept["key statistics"] = key_statistics[:, keys : keys + largest]
    if table.transport != "gather":
        return Tensors(own, kept, dtypes)
    total = sum(layout.keys)
    if not stash.numel():  # nothing stays
        stash = k.new_empty((total, package.dim))
        key_statistics = k.new_empty((2, total), dtype=dtypes["statistics"])
    kept = {"keys": stash, "key statistics": key_statistics}
    return Tensors(own, kept, dtypes, lambda parts, sums: package.schedule.merge_ranks(parts, view(sums)))


def _room(package: Package, ranks: int) -> int:
    """For how many keys a ring keeps room from forward to backward: a rank's, if all have as many. A longer shard's are
    sent once more instead."""
    return -(-package.key_count // ranks)


def kept_sizes(package: Package, ranks: int, rows: int, keys: int, gradients: bool) -> tuple[tuple[int, ...], int]:
    """The shape of what a forward keeps in `Saved.stash`, and the columns of its key statistics.

    A graph is traced without knowing the rows of other ranks: there is room for as many keys as were planned, in a
    gather for those of all ranks, in a ring for those of one.
    """
    shape: tuple[int, ...] | None = None
    if gradients and ranks == 1:
        shape = package.schedule.stash_shape(rows, keys)
    elif gradients:
        table, room = package.table.over(ranks), _room(package, ranks)
        if table.transport == "gather":
            shape, keys = (package.key_count, package.dim), package.key_count
        elif table.keeps:
            shape, keys = (room, package.dim), keys + room
    return shape or (0,), keys if package.loss.HAS_KEYS else 0


def backward(package: Package, call: Call, saved: Saved, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq (m, D), dk (n, D) in the features' dtype or `unrounded`, dscale, dbias 0-dim in the statistics dtype), times
    `upstream`, the gradient of this rank's loss (0-dim, any strides and dtype). In a ring every rank must call it, in
    one order where there are several; else all raise RuntimeError."""
    group, rows = find_group(call.options.group_name), call.q.shape[0]
    layout, agree = Layout.alone(rows, call.k.shape[0]), None
    if group is not None:
        sizes = saved.layout.tolist()
        layout = Layout(group.rank, tuple(size[0] for size in sizes), tuple(size[1] for size in sizes))

        def agree() -> None:
            # A rank that is in another call would send keys of the same shape: wrong gradients, and no error.
            header = agreement.header(package, call)
            agreement.compare(group.ask(header, "backward", call=sizes[0][2])())

    with _device_state(package, call.q.device):
        weighting = _Weighting(package, call, layout, upstream)
        sweep = _Backward(package, call, _positives(package, call, layout), saved)
        dq, dk = sweep.gradients(weighting, group, layout, agree)
        return dq, dk, *weighting.scalars(rows)


def gradient_sums(package: Package, call: Call, saved: Saved) -> tuple[Tensor, Tensor]:
    """The part of `backward` before `weighted`, of a group of one and for all rows at once: the sums for dq (m, D) and
    dk (n, D), in the statistics dtype."""
    with _device_state(package, call.q.device):
        layout = Layout.alone(call.q.shape[0], call.k.shape[0])
        return _Backward(package, call, _positives(package, call, layout), saved).sums()


def weighted(
    package: Package, call: Call, sums: tuple[Tensor, Tensor], upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rest of `backward`: its results, in fresh tensors, from what `gradient_sums` gave for the same inputs."""
    q, k = call.q, call.k
    with _device_state(package, q.device):
        weighting = _Weighting(package, call, Layout.alone(q.shape[0], k.shape[0]), upstream)
        dq, dk = (x.new_empty(x.shape, dtype=weighting.dtype) for x in (q, k))
        weighting.queries(sums[0], q, dq)
        weighting.keys(sums[1], k, dk)
        return dq, dk, *weighting.scalars(q.shape[0])


class _Weighting:
    """From sums over pairs to gradients: the weight of a term, the gradient of the loss and the logit's own factor.

    `dtype` is that of dq and dk.
    """

    def __init__(self, package: Package, call: Call, layout: Layout, upstream: Tensor) -> None:
        self._schedule, self._statistics_dtype = package.schedule, package.schedule.STATISTICS_DTYPE
        self._call, self._upstream, self._weight = call, upstream, _weight(layout, call.options)
        self.dtype = self._statistics_dtype if call.options.unrounded else package.dtype

    # Made at first use, behind the sweep's launches: before them they take the host 30 us.
    @functools.cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor, float]:
        upstream = self._upstream.to(self._statistics_dtype).contiguous()
        return self._call.scale, self._call.bias, upstream, self._weight

    @functools.cached_property
    def _dots(self) -> Tensor:
        q = self._call.q
        return q.new_empty(-(-q.shape[0] // self._schedule.FINISH_ROWS), dtype=self._statistics_dtype)

    def queries(self, total: Tensor, q: Tensor, out: Tensor, start: int = 0) -> None:
        """Rows `start` and on, a multiple of FINISH_ROWS, of the query gradient; `out` may be `total`."""
        first, count = (-(-rows // self._schedule.FINISH_ROWS) for rows in (start, q.shape[0]))
        self._schedule.finish(total, q, *self._factors, out, dots=self._dots[first : first + count])

    def keys(self, total: Tensor, k: Tensor, out: Tensor) -> None:
        """The key gradient; `out` may be `total`."""
        self._schedule.finish(total, k, *self._factors, out)

    def scalars(self, rows: int) -> tuple[Tensor, Tensor]:
        """(dscale, dbias), when all rows of the query gradient are done."""
        found: tuple[Tensor, Tensor] = self._schedule.scalar_gradients(self._dots, *self._factors, rows)
        return found


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The arguments of the backward sweep, and its drivers."""

    package: Package
    call: Call
    positives: Tensor | int
    saved: Saved

    def sums(self) -> tuple[Tensor, Tensor]:
        """One device, all rows at once: the unweighted sums."""
        rows, keys = self.call.q.shape[0], self.call.k.shape[0]
        room = self._room(keys)
        total = self.call.q.new_empty((room + rows, self.call.q.shape[1]), dtype=self.package.schedule.STATISTICS_DTYPE)
        dk_sum, dq_sum = total[:room], total[room:]
        stash = self.saved.stash if self.saved.stash.numel() else None
        how = {"fresh_dq": True, "fresh_dk": True, "stash": stash}
        self._block(0, rows, self.call.k, 0, self._key_statistics(), dq_sum, dk_sum, **how)
        return dq_sum, panel(dk_sum, 0, keys)

    def gradients(
        self, weighting: _Weighting, group: Group | None, layout: Layout, agree: Callable[[], None] | None
    ) -> tuple[Tensor, Tensor]:
        """dq and dk. On one device the sums for dq are of PANEL_ROWS rows at a time. Over several ranks they are of all
        rows; the queries' results are written while a gather's sums for dk come home."""
        package, schedule, q, k = self.package, self.package.schedule, self.call.q, self.call.k
        rows, keys, alone = q.shape[0], k.shape[0], group is None
        step = min(schedule.PANEL_ROWS, rows) if alone else rows
        table = _table(package, layout, bool(self.saved.stash.numel()))
        if table.transport == "gather" and not self.saved.stash.numel():  # traced without gradients
            table = dataclasses.replace(table, transport="ring")
        tensors = _tensors(package, table, layout, k, self.saved.key_statistics, self.saved.stash)
        in_place = weighting.dtype == schedule.STATISTICS_DTYPE
        if alone:
            # By shape, not `empty_like`: results are contiguous, and inputs need not be.
            total, room = q.new_empty(q.shape, dtype=weighting.dtype), self._room(keys)
            dq, sums = total, k.new_empty((room if in_place else keys, k.shape[1]), dtype=weighting.dtype)
            dk = panel(sums, 0, keys)
            if not in_place:  # one allocation of sums: the allocator may round each up by 1 MiB
                both = q.new_empty((room + step, q.shape[1]), dtype=schedule.STATISTICS_DTYPE)
                sums, total = both[:room], both[room:]
            tensors = tensors._replace(own={**tensors.own, "key gradients": panel(sums, 0, keys)})
        else:
            total = q.new_empty(q.shape, dtype=schedule.STATISTICS_DTYPE)
        trip, scratch, fresh = Trip(group, table, "backward", layout, tensors, agree), None, True
        del tensors
        for owner in trip:
            visiting = trip["keys"]
            if not (rows and visiting.shape[0]):
                continue
            if scratch is None:
                scratch = schedule.backward_scratch(step, max(layout.keys), q.device)
            statistics = view(trip["key statistics"]) if package.loss.HAS_KEYS else None
            dk_sum, offset = sums if alone else trip["key gradients"], layout.key_offset(owner)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                own = panel(total, start if len(total) == rows else 0, stop - start)
                tiles = self.saved.stash[start:stop] if alone else None
                how = {"fresh_dq": fresh, "fresh_dk": trip.fresh and start == 0, "arrive": trip.arrive}
                how["stash"] = tiles if tiles is not None and tiles.numel() else None
                self._block(start, stop, visiting, offset, statistics, own, dk_sum, **how, scratch=scratch)
                if alone:
                    weighting.queries(own, q[start:stop], dq[start:stop], start)
            fresh = False
        del scratch  # its memory is for the results
        if not alone:
            if fresh:
                total.zero_()  # no block has written to it
            dq = total if in_place else q.new_empty(q.shape)
            if rows:
                weighting.queries(total, q, dq)
        dk_sum = trip.home("key gradients")
        del trip
        if not alone:
            dk = dk_sum if in_place else k.new_empty(k.shape)
        if keys:
            weighting.keys(dk_sum, k, dk)
        return dq, dk

    def _room(self, keys: int) -> int:
        """Rows of the sums for dk of so many keys, with what library products write behind them."""
        multiple: int = self.package.schedule.LIBRARY_MULTIPLE
        return -(-keys // multiple) * multiple

    def _key_statistics(self) -> Statistics | None:
        return view(self.saved.key_statistics) if self.package.loss.HAS_KEYS else None

    def _block(
        self,
        start: int,
        stop: int,
        k: Tensor,
        key_offset: int,
        keys: Any,
        dq_sum: Tensor,
        dk_sum: Tensor,
        **how: Any,  # what is fresh; when dk_sum has arrived; tiles that were kept; scratch
    ) -> None:
        positives = self.positives + start if isinstance(self.positives, int) else self.positives[start:stop]
        statistics, rows = self.saved.query_statistics, stop - start
        self.package.schedule.backward_block(
            panel(self.call.q, start, rows), k, self.call.scale, self.call.bias, positives, key_offset,
            view(statistics).panel(start, rows), keys, panel_columns(statistics[2:], start, rows),
            dq_sum, dk_sum, **how,
        )  # fmt: skip


def _positives(package: Package, call: Call, layout: Layout) -> Tensor | int:
    """The global index of each query's positive: an int64 tensor beside the features, contiguous since kernels read one
    after another, or for "diagonal" losses that of local row 0."""
    own = call.options.labelling == "own"
    offset = layout.key_offset(layout.rank) if own else layout.row_offset()
    if not package.labelled:
        return offset
    if call.labels is None:
        return torch.arange(offset, offset + call.q.shape[0], device=call.q.device)
    return call.labels.to(call.q.device).contiguous()


def _weight(layout: Layout, options: Options) -> float:
    """What a term of this rank counts in its loss."""
    ranks = len(layout.rows) if options.grad_sync == "mean" else 1
    return ranks / sum(layout.rows) if options.reduction == "mean" else float(ranks)


def _device_state(package: Package, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No graph, no autocast (it would round inside the sweep), and the tensors' device current.

    Each costs microseconds on the host, which the device waits for: only what is not so already is changed.
    """
    changes: list[contextlib.AbstractContextManager[Any]] = []
    if torch.is_grad_enabled():
        changes.append(torch.no_grad())
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        changes.append(torch.cuda.device(device))
    if torch.is_autocast_enabled(device.type):
        changes.append(torch.autocast(device.type, enabled=False))
    if package.dtype == torch.float32 or device.type == "cpu":  # where the switch has a say
        changes.append(_precisions[device.type == "cuda"].of_products(package.product_precision))
    if len(changes) < 2:
        return changes[0] if changes else contextlib.nullcontext()
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
            if self._switch.fp32_precision != precision:
                self._switch.fp32_precision = precision
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._switch.fp32_precision != self._before:
                    self._switch.fp32_precision = self._before


_precisions = (_Precision(torch.backends.mkldnn), _Precision(torch.backends.cuda))
