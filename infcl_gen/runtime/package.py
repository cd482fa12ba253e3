"""The records that the runtime passes around: the package, a call, what forward saves, and a block of the sweep."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import panel, panel_columns
from .statistics import Statistics, Terms, view
from .table import Table
from .traits import Traits

# The gradients that a call wants, a bit for each of the first four fields of `Call`; a fifth is for vectors.
QUERIES, KEYS, SCALARS = 0b0001, 0b0010, 0b1100
ALL = QUERIES | KEYS | SCALARS
FROZEN = {"query": QUERIES, "key": KEYS}  # by side, the gradient that is not wanted where it is frozen


def is_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether features of a dtype are taken by a package of another, and cast to it."""
    return dtype == to or (dtype in (torch.bfloat16, torch.float16, torch.float32) and to != torch.float64)


class Products(NamedTuple):
    """Which sums over pairs gradients need: each is a matrix product."""

    of_queries: bool  # sum_j g_ij k_j
    of_keys: bool  # sum_i g_ij q_i


@functools.cache
def products(gradients: int) -> Products:
    """dscale follows from either: sum_ij g_ij z_ij = sum_i q_i . sum_j g_ij k_j = sum_j k_j . sum_i g_ij q_i."""
    of_keys = bool(gradients & KEYS)
    return Products(bool(gradients & QUERIES or (gradients & SCALARS and not of_keys)), of_keys)


def named(gradients: int) -> str:
    """The inputs whose gradients are wanted."""
    return " ".join(name for bit, name in enumerate(Call._fields[:5]) if gradients >> bit & 1) or "nothing"


@dataclass(frozen=True)
class Package:
    """One generated package: its problem and plan, its loss.py and its device sweep (schedule.py)."""

    name: str
    digest: str
    loss_name: str
    dtype: torch.dtype
    dim: int
    batch_size: int
    key_count: int
    table: Table  # of communication, for the planned number of ranks
    rows_per_rank: int
    keys_per_rank: int
    any_device: bool  # False: Triton kernels, for CUDA and ROCm
    replay: bool  # recorded CUDA graphs
    product_precision: str  # of fp32 library products: "ieee" or "tf32"
    traits: Traits  # of the loss
    rows: bool  # forward has the gradients, by rows of panels, where it has all keys
    wider: bool  # features of another dtype are taken, whose gradients are not rounded to the package's
    split: bool  # fp32 features are multiplied as bf16 halves
    frozen: str  # "query" or "key": the side for whose gradient the plan has no memory and no messages; "none"
    regenerate: str  # the command for another problem
    loss: Any
    schedule: Any
    operators: Any = None  # of `ops.register`

    @property
    def gradients(self) -> int:
        """The gradients that were planned."""
        return ALL & ~FROZEN.get(self.frozen, 0) & ~(KEYS * self.traits.triangle)

    def computed(self, wanted: int) -> int:
        """The gradients that are computed where these are wanted: scalars alone need a side that was planned."""
        alone = wanted & SCALARS and not wanted & (QUERIES | KEYS) and self.frozen == "query"
        return wanted | KEYS if alone else wanted

    def at_once(self, ranks: int) -> bool:
        """Whether the forward of so many ranks has the gradients, so that backward multiplies them by `upstream`."""
        return self.traits.at_once or (self.rows and (ranks <= 1 or self.table.over(ranks).whole))


NAMES = "q", "k", "scale", "bias"  # of the first four fields of `Call`, in the signatures of functions


class Options(NamedTuple):
    """The options of a call; the first four are those of `contrastive_loss`. New ones come last: pickled modules hold
    them by position."""

    group_name: str = ""
    grad_sync: str = "mean"
    reduction: str = "mean"  # or "sum"; "none": the loss of each query, where the package has them
    check_ranks: str = "first"
    labelling: str = "none"  # a query's positive: "none" its global row, "own" its row on this rank, "given" by labels
    unrounded: bool = False  # dq and dk stay in the statistics dtype, for features wider than the package's dtype
    names: tuple[str, ...] = NAMES  # in the signature that the user has called, for messages
    prefixes: str = "none"  # a digest of those that calls add up a loss over, of which this is one


class Call(NamedTuple):
    """A call on this rank: at first what the user has passed, after `api.accepted` as follows.

    q (m, D), k (n, D)   on one device, any strides; of the package's dtype once `cast`; of a triangle k is q, detached
    scale, bias          0-dim, in the statistics dtype, on that device
    vectors              (V, m), in the statistics dtype, on that device: the numbers of `Traits.vectors`, each query's
                         own, or of the key that is its positive, or None without any; at first the query_weight,
                         key_weight, negatives, query_state, key_state, query_scale and key_scale that were passed. q
                         and k are multiplied by the last two once accepted
    labels               int64 (m,), global, there or on the host; None unless `options.labelling` is "given"
    query_ids, key_ids   int64 (m,) and (n,), on that device; None unless the loss tells apart pairs of one id; of a
                         triangle one tensor, passed as query_ids
    guide_queries, guide_keys   (m, D) and (n, D), any strides, of the package's dtype, on that device, without
                         gradients; None unless the loss has a guide
    """

    q: Tensor
    k: Tensor
    scale: Tensor
    bias: Tensor
    vectors: Any = None
    labels: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    guide_queries: Tensor | None = None
    guide_keys: Tensor | None = None
    options: Options = Options()

    @property
    def inputs(self) -> list[Tensor]:
        """What the loss is differentiable in, once accepted; without vectors four."""
        return [*self[:4]] if self.vectors is None else [*self[:5]]

    @property
    def ids(self) -> tuple[Tensor | None, Tensor | None]:
        return self.query_ids, self.key_ids

    @property
    def guides(self) -> tuple[Tensor | None, Tensor | None]:
        return self.guide_queries, self.guide_keys

    def cast(self, package: Package, features: bool = True) -> Call:
        """The call with features in the package's dtype. `to` also unwraps features that torch.func left wrapped.

        Without `features` they are left as they are, for a backward that reads their shapes alone. Kernels read memory
        as it is: features that torch is to negate when it reads them, as imaginary parts of conjugates, are copied.
        """
        q, k, options, dtype = self.q, self.k, self.options, package.dtype
        if not q.dtype == k.dtype == dtype:
            options = options._replace(unrounded=True)
        if features:
            q = q.to(dtype).resolve_neg()
            k = q if package.traits.triangle else k.to(dtype).resolve_neg()
        u, v = (None if x is None else x.resolve_neg() for x in self.guides)
        return self._replace(q=q, k=k, guide_queries=u, guide_keys=v, options=options)


class Saved(NamedTuple):
    """What forward saves for backward, besides the inputs.

    of_queries  (2 + POSITIVE_PARTS, m): exponent, mantissa, z of the positive and further parts of it; of a combined
                loss what `combine` has left of them. Over P prefixes P rows of each, as of `of_keys`. Of a sum over
                pairs `Terms`
    of_keys     statistics (2, n) of this rank's keys, or (Traits.key_numbers, n); (2, 0) if the loss has none. With
                gradients: of a gather (2, planned keys), all ranks' keys first; of a ring the statistics of the keys in
                `stash` follow. With `Traits.crossed` always (2, n): sums over the factors of keys, which backward sends
                again
    stash       one device: kept tiles; gather: the keys of all ranks; ring: the keys that visit last; (0,) for none, or
                if it stays in a recording (replay.py)
    ids         int64 (columns, 1) of the keys in `stash`, where keys are `named` and backward reads the stash of other
                ranks' keys; else (0, 1)
    guides      (columns, D): what the guide has for these keys, likewise; else (0, D)
    of_vectors  (V, m): the gradients of `Call.vectors`, for an upstream gradient of 1; of a state the next one
    weighted    fp64 (1 + D, 1 + D), what `WeightedMeans` keeps for backward; (0, 0) without weights of means
    layout      int64 (W, 3) on the host: rows, keys and the call number of each rank; for one device (0, 3), on that
                device

    Where forward has the gradients (`Package.at_once`) the first three are dq (m, D), dk (n, D) with room for
    whole LIBRARY_MULTIPLEs of rows, and (2,) dscale and dbias, for an upstream gradient of 1. What is not wanted is
    (0,).
    """

    of_queries: Tensor
    of_keys: Tensor
    stash: Tensor
    ids: Tensor
    guides: Tensor
    of_vectors: Tensor
    weighted: Tensor
    layout: Tensor


class Block(NamedTuple):
    """Queries and keys for the device sweep.

    q (m, D), k (n, D)  features, any strides; m and n are at least 1
    scale, bias         0-dim, in the statistics dtype
    positives           global key index of each query's positive: int64 (m,), or that of row 0, counted up by row
    first_key           global index of k's first row
    queries, keys       statistics (m,) and (n,), merged in place; None if the loss has none. Of a loss over prefixes
                        (prefixes, m) and (prefixes, n), and `positive` is (POSITIVE_PARTS, prefixes, m). Of a sum over
                        pairs that is taken query by query `Terms` (m,)
    positive            (POSITIVE_PARTS, m): z of each query's positive, and further parts. After `combine`: g of the
                        positive, and the query's parts of M * dL/dscale, M * dL/dbias and M * L; of a triangle z of
                        the positive; a last one, of g by z, where the logit is not affine. With `Traits.several`: sum
                        of positives' logits, number of positives; of a log-sum-exp mantissa, number, and last exponent.
                        After `combine` first g of each positive, or that mantissa over the slope; the exponent stays.
                        With `Traits.second` the last two are the second log-sum-exp of each query. With
                        `Traits.partnered` the fourth and the fifth are first that of its positive
                        By a guide: mantissa and exponent are those of its sum, and a mean of logits is the number.
                        With `Traits.guided_sides` the last three are those of `key_guide` of each query
    key_guide           (3, n) with `Traits.guided_sides`: what the schedule keeps of the mean of each key's logits by
                        the softmax of its guide, and mantissa and exponent of the sum of that, merged in place; or None
    query_ids, key_ids  int64 (m,) and (n,), contiguous; None if the loss has no ids
    vectors             (V, m): the queries' own numbers, after `combine` the derivatives of M * L by them, and the next
                        state; None if the loss has none
    counts              queries and keys of the whole batch
    guide_queries, guide_keys  (m, D) and (n, D), any strides; None if the loss has no guide
    thresholds          (m,) in the statistics dtype: pairs above it are left out; None if the loss has none. Of a
                        triangle `key_thresholds` (n,) are those of the rows that stand as keys
    query_factors, key_factors  (prefixes, m) and (prefixes, n): inverse norms; None unless `Traits.renormalised`
    query_radial, key_radial    the same shapes: in backward the radial sums (renormalised.py) of sides with gradients
    sums                fp64 (2, parts) of a loss that is a sum over pairs: parts of the sum of terms, but for those in
                        `Terms`, and of that of slopes, to which sweeps add; in Triton with `Traits.small_first`
                        (4, parts): two rows of the sizes of logits that programs have met; else None

    Of a triangle keys are rows as queries are: their statistics, `key_positive` and `key_labels` are what `queries`,
    `positive` and `positives` are of their own rank; in the forward of another rank's rows the part of this rank.
    first_query         global index of q's first row
    own                 whether k is q: then each pair of rows is seen once
    """

    q: Tensor
    k: Tensor
    scale: Tensor
    bias: Tensor
    positives: Tensor | int
    first_key: int
    queries: Statistics | Terms | None
    keys: Statistics | None
    positive: Tensor
    vectors: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    sums: Tensor | None = None
    counts: tuple[int, int] = (0, 0)
    key_positive: Tensor | None = None
    key_labels: Tensor | None = None
    first_query: int = 0
    own: bool = False
    guide_queries: Tensor | None = None
    guide_keys: Tensor | None = None
    thresholds: Tensor | None = None
    key_guide: Tensor | None = None
    query_factors: Tensor | None = None
    key_factors: Tensor | None = None
    query_radial: Tensor | None = None
    key_radial: Tensor | None = None
    key_thresholds: Tensor | None = None

    @property
    def diagonal(self) -> bool:
        """Whether a panel of a triangle has pairs of a row and itself: its queries are then its keys."""
        return self.own and self.first_query == self.first_key

    @property
    def second(self) -> Statistics:
        """The second log-sum-exp of each query, of a loss that has one; `combine` divides it as it does `queries`."""
        return view(self.positive[-2:])

    @property
    def key_second(self) -> Statistics:
        """The same of a triangle's rows that stand as keys."""
        assert self.key_positive is not None
        return view(self.key_positive[-2:])

    def panel(self, row0: int, rows: int, key0: int, keys: int) -> Block:
        """Up to `rows` queries from `row0` on, and up to `keys` keys from `key0` on; itself if these are all."""
        q, k = panel(self.q, row0, rows), panel(self.k, key0, keys)
        if q is self.q and k is self.k:
            return self
        own = self.positives
        return Block(
            q, k, self.scale, self.bias, own + row0 if isinstance(own, int) else panel(own, row0, rows),
            self.first_key + key0, self.queries and self.queries.panel(row0, rows),
            self.keys and self.keys.panel(key0, keys), panel_columns(self.positive, row0, rows),
            None if self.vectors is None else panel_columns(self.vectors, row0, rows),
            None if self.query_ids is None else panel(self.query_ids, row0, rows),
            None if self.key_ids is None else panel(self.key_ids, key0, keys), self.sums, self.counts,
            None if self.key_positive is None else panel_columns(self.key_positive, key0, keys),
            None if self.key_labels is None else panel(self.key_labels, key0, keys),
            self.first_query + row0, self.own,
            None if self.guide_queries is None else panel(self.guide_queries, row0, rows),
            None if self.guide_keys is None else panel(self.guide_keys, key0, keys),
            None if self.thresholds is None else panel(self.thresholds, row0, rows),
            None if self.key_guide is None else panel_columns(self.key_guide, key0, keys),
            None if self.query_factors is None else panel_columns(self.query_factors, row0, rows),
            None if self.key_factors is None else panel_columns(self.key_factors, key0, keys),
            None if self.query_radial is None else panel_columns(self.query_radial, row0, rows),
            None if self.key_radial is None else panel_columns(self.key_radial, key0, keys),
            None if self.key_thresholds is None else panel(self.key_thresholds, key0, keys),
        )  # fmt: skip

    def prefix(self, number: int, columns: int) -> Block:
        """The block of so many first columns of the features, with the statistics of one of several prefixes."""
        assert not isinstance(self.queries, Terms)
        own = ("query_factors", "key_factors", "query_radial", "key_radial")
        given = {name: x[number] for name in own if (x := getattr(self, name)) is not None}
        return self._replace(
            **given,
            q=self.q[:, :columns], k=self.k[:, :columns], queries=self.queries and self.queries.prefix(number),
            keys=self.keys and self.keys.prefix(number), positive=self.positive[:, number],
        )  # fmt: skip

    def meets_diagonal(self) -> bool:
        """Whether the positive of a query is one of these keys, where query i has the i-th key after `positives`. Of
        labels, which are on the device, always."""
        if not isinstance(self.positives, int):
            return True
        first = self.positives - self.first_key
        return bool(first < self.k.shape[0] and first + self.q.shape[0] > 0)


class Combined(NamedTuple):
    """What `combine` leaves of each query in `Block.positive`, as views."""

    of_positives: Tensor  # (m,): g of its positive; of several positives what is first in `Block.positive`
    of_scalars: Tensor  # (2, m): its parts of M * dL/dscale and M * dL/dbias
    term: Tensor  # (m,): its part of M * L; of prefixes all have a further dimension before the last
    by_z: Tensor | None  # (m,): of g, by the positive's z, where the logit is not affine
    second: Statistics | None  # of a second log-sum-exp


def combined(traits: Traits, positive: Tensor) -> Combined:
    """The parts of `positive`, (POSITIVE_PARTS, m), of a combined loss."""
    by_z = None if traits.affine or traits.several else positive[4 + traits.triangle]
    return Combined(positive[0], positive[1:3], positive[3], by_z, view(positive[-2:]) if traits.second else None)
