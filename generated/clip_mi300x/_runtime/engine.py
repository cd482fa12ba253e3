"""Forward and backward of the loss over one device or over the ring, through the package's device sweep.

The device sweep is the package's `schedule` module; this file decides which blocks of queries and keys it is given,
where accumulators live, and what the results are weighted with. A group of one never communicates, never copies its
inputs and, on CUDA, never waits for the device.

Gradient convention. The loss of the whole batch is L = 1/M * (sum of terms of queries and of keys). Rank p returns
W * (the terms of its own rows) with grad_sync="mean": averaging parameter gradients over ranks, as DDP and FSDP do,
then gives exactly the gradient of L, for uneven ranks and for scale and bias too. grad_sync="sum" leaves out the W.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import agreement
from . import ring as rings
from .gather import BackwardGather, ForwardGather
from .launch import panel, panel_columns
from .package import Options, Package, Saved
from .ring import Layout
from .route import Route
from .statistics import Statistics, clear, view


class Started(abc.ABC):
    """A forward whose first kernels are at work (none of a package in plain torch); `finish` does the rest.

    Before them comes only what they need, but for two things: labels on the host are copied (later the copy would wait
    for these kernels), and in a ring the others are told, for their answers take 0.2 ms.
    """

    def __init__(
        self, package: Package, inputs: tuple[Tensor, ...], labels: Tensor | None, options: Options
    ) -> None:
        """inputs: q, k, scale and bias, cast."""
        self._package, self._inputs, self._options = package, inputs, options
        self._labels = _labels_on(inputs[0].device, labels)
        self._started: Any = None

    @abc.abstractmethod
    def finish(self) -> tuple[Tensor, Saved]:
        """The result of `forward`."""

    def _start(self, k: Tensor, most_keys: int, stash: Tensor | None = None) -> None:
        """Starts the first block; later ones may be of up to `most_keys`."""
        q, _, scale, bias = self._inputs
        self._started = self._package.schedule.start_forward(q, k, scale, bias, most_keys, stash)

    def _take_started(self) -> Any:
        """What `start_forward` gave, of which nothing is held here any longer: it goes when the blocks are done."""
        started, self._started = self._started, None
        return started


class _StartedAlone(Started):
    """The forward of a group of one."""

    def __init__(
        self,
        package: Package,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        options: Options,
        gradients: int,
    ) -> None:
        self._layout = agreement.layout_alone(package, q, k, labels, options)
        with _device_state(package, q.device):
            q, k = package.cast(q, k)
            super().__init__(package, (q, k, scale, bias), labels, options)
            kept, self._columns = kept_sizes(package, 1, q.shape[0], k.shape[0], bool(gradients))
            self._stash = None if 0 in kept else q.new_empty(kept)
            self._start(k, k.shape[0], self._stash)

    def finish(self) -> tuple[Tensor, Saved]:
        q, _, scale, bias = self._inputs
        package, layout, schedule = self._package, self._layout, self._package.schedule
        with _device_state(package, q.device):
            positives = _positives(package, layout, self._labels, q.device)
            query_statistics, key_statistics = _statistics(package, q, self._columns)
            queries, positive = view(query_statistics), query_statistics[2:]
            keys = view(key_statistics) if package.loss.HAS_KEYS else None
            arguments = (*self._inputs, positives, 0, queries, keys, positive)
            how = {"fresh_queries": True, "fresh_keys": True, "stash": self._stash}
            schedule.forward_block(*arguments, **how, started=self._take_started())
            loss = _loss(package, layout, queries, keys, positive, scale, bias, self._options)
        stash = q.new_empty(0) if self._stash is None else self._stash
        return loss, Saved(query_statistics, key_statistics, stash, q.new_empty((0, 3), dtype=torch.int64))


class _StartedInRing(Started):
    """The forward of one rank of a ring, begun on its own keys: at once if its sizes are those of its last call
    (whether the others' are, too, is heard before anything is sent), else when all have been heard."""

    def __init__(
        self,
        package: Package,
        ring: rings.Ring,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor,
        labels: Tensor | None,
        options: Options,
        gradients: int,
    ) -> None:
        self._ring, self._differentiated, self._call = ring, bool(gradients), ring.trips
        with torch.no_grad():
            q, k = package.cast(q, k)
        super().__init__(package, (q, k, scale, bias), labels, options)
        self._agreed = agreed = agreement.Agreement(package, ring, q, k, labels, options, gradients)
        with _device_state(package, q.device):
            guess = ring.layouts.get(package.digest)
            if guess is not None and (guess.rows[ring.rank], guess.keys[ring.rank]) == (len(q), len(k)):
                self._begin(guess, agree=lambda: agreed.expect(guess))
            else:
                self._begin(agreed.layout(), agree=None)

    def _begin(self, layout: Layout, agree: rings.Agreeing | None) -> None:
        """Starts the work on the own keys. `agree`: if the others have not been heard."""
        q, k, *_ = self._inputs
        package, ring, self._layout = self._package, self._ring, layout
        rows, keys = q.shape[0], k.shape[0]
        kept, columns = kept_sizes(package, ring.size, rows, keys, self._differentiated)
        self._query_statistics, self._key_statistics = _statistics(package, q, columns)
        self._stash = q.new_empty(kept)
        self._trip: rings.ForwardRotation | ForwardGather | None = _forward_trip(
            package, ring, layout, k, self._key_statistics, self._stash, self._differentiated, agree
        )
        if rows and keys:
            self._start(panel(self._trip.parcels[0], 0, keys), max(layout.keys))
        else:
            clear(self._query_statistics[:2])

    def finish(self) -> tuple[Tensor, Saved]:
        with _device_state(self._package, self._inputs[0].device):
            with contextlib.suppress(agreement.OtherSizes):
                return self._finish()
            self._stash = self._inputs[0].new_empty(0)  # its memory is for the next one
            self._begin(self._agreed.layout(), agree=None)
            return self._finish()

    def _finish(self) -> tuple[Tensor, Saved]:
        q, k, scale, bias = self._inputs
        package, layout, schedule = self._package, self._layout, self._package.schedule
        query_statistics, key_statistics = self._query_statistics, self._key_statistics
        rows, keys = q.shape[0], k.shape[0]
        trip, self._trip = self._trip, None  # of which nothing is held here any longer
        assert trip is not None
        positives = _positives(package, layout, self._labels, q.device)
        queries, positive = view(query_statistics), query_statistics[2:]
        started, fresh = self._take_started(), bool(rows and keys)
        for owner in trip:
            valid = layout.keys[owner]
            if not (rows and valid):
                continue
            block = None if trip.accumulator is None else view(trip.accumulator).panel(0, valid)
            visiting, offset = panel(trip.parcels[0], 0, valid), layout.key_offset(owner)
            arguments = (q, visiting, scale, bias, positives, offset, queries, block, positive)
            how = {"fresh_queries": fresh, "fresh_keys": trip.fresh, "arrive": trip.arrive}
            schedule.forward_block(*arguments, **how, started=started)
            started, fresh = started and (started[0], None), False
        del started  # its memory is for the loss
        trip.arrive()
        own = None
        if trip.accumulator is not None:
            own = view(trip.accumulator).panel(0, keys)
            if isinstance(trip, rings.Rotation) or not self._differentiated:
                panel_columns(key_statistics, 0, keys).copy_(panel_columns(trip.accumulator, 0, keys))
        loss = _loss(package, layout, queries, own, positive, scale, bias, self._options)
        sizes = torch.tensor(
            list(zip(layout.rows, layout.keys, [self._call] * self._ring.size, strict=True)),
            dtype=torch.int64,
        )
        return loss, Saved(query_statistics, key_statistics, self._stash, sizes)


def start(
    package: Package,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor,
    labels: Tensor | None,
    options: Options,
    gradients: int,
) -> Started:
    """The `forward` with these arguments, begun; q and k may be of any dtype: they are cast. Errors of `forward` come
    here or at `finish`."""
    ring = rings.find_ring(options.group_name)
    arguments = (q, k, scale, bias, labels, options, gradients)
    return _StartedAlone(package, *arguments) if ring is None else _StartedInRing(package, ring, *arguments)


def forward(
    package: Package,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor,
    labels: Tensor | None,
    options: Options,
    gradients: int,
) -> tuple[Tensor, Saved]:
    """This rank's loss (0-dim, statistics dtype) and what backward needs.

    q (m, D), k (n, D) of the package's dtype on one device, any strides, m and n possibly 0 in a ring; scale, bias
    0-dim, statistics dtype, on that device; labels int64 (m,), global, or None; `gradients`: bits of the inputs that
    want one, 0 if none does. Raises, on every rank, ValueError for sizes that the package cannot take and RuntimeError
    where ranks disagree.
    """
    return start(package, q, k, scale, bias, labels, options, gradients).finish()


def _statistics(package: Package, q: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Room for a forward's statistics of the queries, with what is kept of their positives, and of `columns` keys."""
    schedule = package.schedule
    queries = q.new_empty((2 + schedule.POSITIVE_PARTS, q.shape[0]), dtype=schedule.STATISTICS_DTYPE)
    if package.labelled:
        queries[2:].fill_(math.nan)
    return queries, q.new_empty((2, columns), dtype=schedule.STATISTICS_DTYPE)


def _loss(
    package: Package,
    layout: Layout,
    queries: Statistics,
    keys: Statistics | None,
    positive: Tensor,
    scale: Tensor,
    bias: Tensor,
    options: Options,
) -> Tensor:
    """This rank's part of the loss, from the statistics of its rows and keys."""
    if package.labelled:
        # A label that names no key leaves the NaN in `positive`: let it reach the gradients too.
        queries.mantissa.add_(positive[0] * 0.0)
    weight = _weight(layout, options)
    loss: Tensor = package.schedule.loss_terms(queries, keys, positive, scale, bias, weight, weight)
    return loss


def _forward_trip(
    package: Package,
    ring: rings.Ring,
    layout: Layout,
    k: Tensor,
    key_statistics: Tensor,
    stash: Tensor,
    gradients: bool,
    agree: rings.Agreeing | None,
) -> rings.ForwardRotation | ForwardGather:
    """How the keys of all ranks come to this one: as the plan has it, where there are as many ranks as planned."""
    dtype, route = package.schedule.STATISTICS_DTYPE, package.route.over(ring.size)
    if route.transport == "gather":
        if not gradients:  # nothing is kept
            stash = k.new_empty((sum(layout.keys), package.dim))
            key_statistics = k.new_empty((2, sum(layout.keys)), dtype=dtype)
        statistics, add_up = None, None
        if package.loss.HAS_KEYS:
            statistics, add_up = key_statistics, package.schedule.merge_ranks
        return ForwardGather(ring, layout, k, stash, statistics, add_up, agree)
    keys, largest = k.shape[0], max(layout.keys)
    kept = gradients and route.keeps and largest <= _room(package, ring.size)
    sums = finished = None
    if package.loss.HAS_KEYS:
        sums = k.new_empty((2, largest), dtype=dtype)
        if not layout.rows[ring.rank]:  # no work replaces what it holds
            clear(sums)
        finished = key_statistics[:, keys : keys + largest] if kept else None
    last = [stash[:largest]] if kept else None
    return rings.ForwardRotation(ring, route, [k], largest, last, sums, finished, agree)


def _room(package: Package, ranks: int) -> int:
    """For how many keys a ring keeps room from forward to backward: a rank's, if all have as many. A longer shard's are
    sent once more instead."""
    return -(-package.key_count // ranks)


def kept_sizes(
    package: Package, ranks: int, rows: int, keys: int, gradients: bool
) -> tuple[tuple[int, ...], int]:
    """The shape of what a forward keeps in `Saved.stash`, and the columns of its key statistics.

    A graph is traced without knowing the rows of other ranks: there is room for as many keys as were planned, in a
    gather for those of all ranks, in a ring for those of one.
    """
    shape: tuple[int, ...] | None = None
    if gradients and ranks == 1:
        shape = package.schedule.stash_shape(rows, keys)
    elif gradients:
        route, room = package.route.over(ranks), _room(package, ranks)
        if route.transport == "gather":
            shape, keys = (package.key_count, package.dim), package.key_count
        elif route.keeps:
            shape, keys = (room, package.dim), keys + room
    return shape or (0,), keys if package.loss.HAS_KEYS else 0


def backward(
    package: Package,
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor,
    labels: Tensor | None,
    saved: Saved,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq (m, D), dk (n, D) in the features' dtype or `unrounded`, dscale, dbias 0-dim in the statistics dtype), times
    `upstream`, the gradient of this rank's loss (0-dim, any strides and dtype). In a ring every rank must call it, in
    one order where there are several; else all raise RuntimeError."""
    ring = rings.find_ring(options.group_name)
    rows, keys = q.shape[0], k.shape[0]
    if ring is None:
        layout = Layout.alone(rows, keys)
    else:
        sizes = saved.layout.tolist()
        layout = Layout(ring.rank, tuple(size[0] for size in sizes), tuple(size[1] for size in sizes))

        def ask() -> rings.Agreeing:
            # A rank that is in another call would send keys of the same shape: wrong gradients, and no error.
            header = agreement.header(package, q, k, labels, options)
            answers = ring.ask(header, "backward", call=sizes[0][2])
            return lambda: agreement.compare(answers())

    with _device_state(package, q.device):
        weighting = _Weighting(package, q, scale, bias, upstream, _weight(layout, options), options.unrounded)
        positives = _positives(package, layout, _labels_on(q.device, labels), q.device)
        sweep = _Backward(package, q, k, scale, bias, positives, saved)
        if ring is None:
            dq, dk = sweep.alone(weighting)
        else:
            dq, dk = sweep.over(weighting, ring, layout, ask)
        return dq, dk, *weighting.scalars(rows)


def gradient_sums(
    package: Package,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor,
    labels: Tensor | None,
    saved: Saved,
) -> tuple[Tensor, Tensor]:
    """The part of `backward` before `weighted`, of a group of one and for all rows at once: the sums for dq (m, D) and
    dk (n, D), in the statistics dtype."""
    with _device_state(package, q.device):
        layout = Layout.alone(q.shape[0], k.shape[0])
        positives = _positives(package, layout, _labels_on(q.device, labels), q.device)
        return _Backward(package, q, k, scale, bias, positives, saved).sums()


def weighted(
    package: Package,
    sums: tuple[Tensor, Tensor],
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rest of `backward`: its results, in fresh tensors, from what `gradient_sums` gave for the same inputs."""
    layout = Layout.alone(q.shape[0], k.shape[0])
    with _device_state(package, q.device):
        weighting = _Weighting(package, q, scale, bias, upstream, _weight(layout, options), options.unrounded)
        dq, dk = (x.new_empty(x.shape, dtype=weighting.dtype) for x in (q, k))
        weighting.queries(sums[0], q, dq)
        weighting.keys(sums[1], k, dk)
        return dq, dk, *weighting.scalars(q.shape[0])


class _Weighting:
    """From sums over pairs to gradients: the weight of a term, the gradient of the loss and the logit's own factor.

    `dtype` is that of dq and dk.
    """

    def __init__(
        self,
        package: Package,
        q: Tensor,
        scale: Tensor,
        bias: Tensor,
        upstream: Tensor,
        weight: float,
        unrounded: bool,
    ) -> None:
        self._schedule, self._statistics_dtype = package.schedule, package.schedule.STATISTICS_DTYPE
        self._arguments = (q, scale, bias, upstream, weight)
        self.dtype = self._statistics_dtype if unrounded else q.dtype

    # Made at first use, behind the sweep's launches: before them they take the host 30 us.
    @functools.cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor, float]:
        _, scale, bias, upstream, weight = self._arguments
        return scale, bias, upstream.to(self._statistics_dtype).contiguous(), weight

    @functools.cached_property
    def _dots(self) -> Tensor:
        q = self._arguments[0]
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


@dataclass(frozen=True)
class _Backward:
    """The arguments of the backward sweep, and its drivers."""

    package: Package
    q: Tensor
    k: Tensor
    scale: Tensor
    bias: Tensor
    positives: Tensor | int
    saved: Saved

    def sums(self) -> tuple[Tensor, Tensor]:
        """One device, all rows at once: the unweighted sums."""
        rows, keys = self.q.shape[0], self.k.shape[0]
        total = self.q.new_empty((keys + rows, self.q.shape[1]), dtype=self.package.schedule.STATISTICS_DTYPE)
        dk_sum, dq_sum = total[:keys], total[keys:]
        stash = self.saved.stash if self.saved.stash.numel() else None
        how = {"fresh_dq": True, "fresh_dk": True, "stash": stash}
        self._block(0, rows, self.k, 0, self._key_statistics(), dq_sum, dk_sum, **how)
        return dq_sum, dk_sum

    def alone(self, weighting: _Weighting) -> tuple[Tensor, Tensor]:
        """One device. The query gradient of PANEL_ROWS rows at a time accumulates in the statistics dtype."""
        schedule, q, k = self.package.schedule, self.q, self.k
        step = min(schedule.PANEL_ROWS, q.shape[0])
        # By shape, not `empty_like`: results are contiguous, and inputs need not be.
        dq, dk = (x.new_empty(x.shape, dtype=weighting.dtype) for x in (q, k))
        in_place = weighting.dtype == schedule.STATISTICS_DTYPE
        dk_sum, dq_panel = dk, None
        if not in_place:  # one allocation: the allocator may round each up by 1 MiB
            sums = q.new_empty((k.shape[0] + step, q.shape[1]), dtype=schedule.STATISTICS_DTYPE)
            dk_sum, dq_panel = sums[: k.shape[0]], sums[k.shape[0] :]
        keys, scratch = self._key_statistics(), schedule.backward_scratch(step, k.shape[0], q.device)
        for start in range(0, q.shape[0], step):
            stop = min(start + step, q.shape[0])
            out = dq[start:stop]
            total = out if dq_panel is None else dq_panel[: stop - start]
            tiles = self.saved.stash[start:stop]
            how = {"fresh_dq": True, "fresh_dk": start == 0, "stash": tiles if tiles.numel() else None}
            self._block(start, stop, k, 0, keys, total, dk_sum, scratch=scratch, **how)
            weighting.queries(total, q[start:stop], out, start)
        weighting.keys(dk_sum, k, dk)
        return dq, dk

    def _key_statistics(self) -> Statistics | None:
        return view(self.saved.key_statistics) if self.package.loss.HAS_KEYS else None

    def over(
        self, weighting: _Weighting, ring: rings.Ring, layout: Layout, ask: Callable[[], rings.Agreeing]
    ) -> tuple[Tensor, Tensor]:
        """Several ranks. Sums for all rows, then the results: of the queries while a gather's sums for dk come home."""
        q, k = self.q, self.k
        dq_sum = q.new_empty(q.shape, dtype=self.package.schedule.STATISTICS_DTYPE)
        route = self.package.route.over(ring.size)
        if (
            route.transport == "gather" and not self.saved.stash.numel()
        ):  # a graph that was traced without gradients
            route = Route.flat(ring.size, keeps=False)
        if route.transport == "gather":
            home = self._gather(ring, layout, ask, dq_sum)
        else:
            home = self._rotate(ring, route, layout, ask, dq_sum)
        in_place = weighting.dtype == dq_sum.dtype
        dq = dq_sum if in_place else q.new_empty(q.shape)
        if q.shape[0]:
            weighting.queries(dq_sum, q, dq)
        dk_sum = home()
        del home
        dk = dk_sum if in_place else k.new_empty(k.shape)
        if k.shape[0]:
            weighting.keys(dk_sum, k, dk)
        return dq, dk

    def _rotate(
        self,
        ring: rings.Ring,
        route: Route,
        layout: Layout,
        ask: Callable[[], rings.Agreeing],
        dq_sum: Tensor,
    ) -> Callable[[], Tensor]:
        """Unweighted sums for dq; what gives those for dk, which are home."""
        k, keys, largest, saved = self.k, self.k.shape[0], max(layout.keys), self.saved
        has_keys, own, last, away = self.package.loss.HAS_KEYS, [k], None, []
        if has_keys:
            own.append(saved.key_statistics[:, :keys])
        if saved.stash.numel() and largest <= _room(self.package, ring.size):
            last = [panel(saved.stash, 0, largest)]
            if has_keys:
                kept = saved.key_statistics[:, keys : keys + largest]
                # Between two ranks it does not travel; rows of more columns are not contiguous.
                last.append(kept.contiguous() if ring.size > 2 else kept)
        else:
            away = [k.new_empty((largest, self.package.dim))]
            away[0][:keys].copy_(k)
            if has_keys:
                away.append(k.new_empty((2, largest), dtype=dq_sum.dtype))
                away[1][:, :keys].copy_(own[1])
        # The first work replaces what the sums hold; a rank without queries has none.
        new = k.new_empty if self.q.shape[0] else k.new_zeros
        dk_sum = new((largest, self.package.dim), dtype=dq_sum.dtype)
        rotation = rings.BackwardRotation(ring, route, own, last, away, dk_sum, agree=lambda: ask()())
        del own, last, away, dk_sum
        self._sweep(rotation, layout, dq_sum)

        def home() -> Tensor:
            assert rotation.accumulator is not None
            return rotation.accumulator[:keys]

        return home

    def _gather(
        self, ring: rings.Ring, layout: Layout, ask: Callable[[], rings.Agreeing], dq_sum: Tensor
    ) -> Callable[[], Tensor]:
        """The same, from the keys that the forward has kept."""
        statistics = self.saved.key_statistics if self.package.loss.HAS_KEYS else None
        gather = BackwardGather(ring, layout, self.saved.stash, statistics, dq_sum.dtype, ask)
        self._sweep(gather, layout, dq_sum)
        return gather.settle

    def _sweep(self, trip: rings.BackwardRotation | BackwardGather, layout: Layout, dq_sum: Tensor) -> None:
        rows, fresh, scratch = self.q.shape[0], True, None
        for owner in trip:
            valid = layout.keys[owner]
            if not (rows and valid):
                continue
            assert trip.accumulator is not None
            statistics = view(trip.parcels[1]).panel(0, valid) if self.package.loss.HAS_KEYS else None
            visiting, total = panel(trip.parcels[0], 0, valid), panel(trip.accumulator, 0, valid)
            if scratch is None:
                scratch = self.package.schedule.backward_scratch(rows, max(layout.keys), self.q.device)
            how = {"arrive": trip.arrive, "fresh_dq": fresh, "fresh_dk": trip.fresh, "scratch": scratch}
            self._block(0, rows, visiting, layout.key_offset(owner), statistics, dq_sum, total, **how)
            fresh = False
        if fresh:
            dq_sum.zero_()  # no block has written to it

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
            panel(self.q, start, rows), k, self.scale, self.bias, positives, key_offset,
            view(statistics).panel(start, rows), keys, panel_columns(statistics[2:], start, rows),
            dq_sum, dk_sum, **how,
        )  # fmt: skip


def _labels_on(device: torch.device, labels: Tensor | None) -> Tensor | None:
    """The labels on this device, contiguous: kernels read them one after another."""
    return None if labels is None else labels.to(device).contiguous()


def _positives(package: Package, layout: Layout, labels: Tensor | None, device: torch.device) -> Tensor | int:
    """The global index of each query's positive: an int64 tensor, or for "diagonal" losses that of local row 0.
    `labels`, if given, are on `device`."""
    offset = layout.row_offset()
    if not package.labelled:
        return offset
    if labels is None:
        return torch.arange(offset, offset + layout.rows[layout.rank], device=device)
    return labels


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
