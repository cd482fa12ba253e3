"""What must be right before anything is computed: sizes and labels; and, in a ring, that all ranks mean the same.

Everything is concluded from what all ranks have, so that all raise, or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import ring as rings
from .package import Options, Package
from .ring import Layout

_labels_checked_alone: set[str] = set()  # packages whose labels were looked at once, in a group of one
_warned: set[str] = set()


def layout_alone(package: Package, q: Tensor, k: Tensor, labels: Tensor | None, options: Options) -> Layout:
    """The layout of a group of one. Raises ValueError for sizes or labels that are wrong."""
    layout = Layout.alone(q.shape[0], k.shape[0])
    _check_sizes(package, layout, labels is not None)
    if labels is not None:
        _check_labels([_label_range(package, labels, _labels_checked_alone, options)], layout)
        _remember_labels(package, labels, _labels_checked_alone)
    return layout


def announce_rejection(package: Package, q: object, k: object, labels: object, options: Options) -> None:
    """Tells the other ranks that this one is about to raise for its own arguments, so that they raise too.

    Raises RuntimeError if the reason is one that the ranks can name together (such as differing dtypes).
    """
    ring = rings.find_ring(options.group_name)
    if ring is not None:
        own = header(package, q, k, labels, options, accepted=False)
        difference = rings.difference(ring.exchange(own))
        if difference is not None:
            raise RuntimeError(f"ranks disagree: {difference}")


class OtherSizes(Exception):
    """The ranks' rows and keys are not those of the last call."""


class Agreement:
    """What ranks tell each other at the start of a forward: told at once, looked at when something depends on it."""

    def __init__(
        self,
        package: Package,
        ring: rings.Ring,
        q: Tensor,
        k: Tensor,
        labels: Tensor | None,
        options: Options,
        gradients: int,
    ) -> None:
        try:
            ring.check_device(q.device)
        except ValueError:
            announce_rejection(package, q, k, labels, options)
            raise
        label_range = _label_range(package, labels, ring.labels_checked, options)
        self._package, self._ring, self._labels = package, ring, labels
        self._answers = ring.ask(header(package, q, k, labels, options, gradients, label_range))
        self._layout: Layout | None = None

    def layout(self) -> Layout:
        """Everybody's sizes, after comparing what must be equal and checking what must fit."""
        if self._layout is None:
            headers, ring = self._answers(), self._ring
            compare(headers)
            rows, keys = (tuple(given[name] for given in headers) for name in ("rows", "keys"))
            layout = Layout(ring.rank, rows, keys)
            _check_sizes(self._package, layout, self._labels is not None)
            _check_labels([(given["first label"], given["last label"]) for given in headers], layout)
            _remember_labels(self._package, self._labels, ring.labels_checked)
            ring.layouts[self._package.digest] = self._layout = layout
        return self._layout

    def expect(self, guess: Layout) -> None:
        """Raises OtherSizes if the sizes are others, and whatever `layout` raises."""
        if self.layout() != guess:
            raise OtherSizes


def compare(headers: list[dict[str, Any]]) -> None:
    """Raises RuntimeError where the ranks must not go on together; on all of them, since all have the same headers.

    The fingerprint is in every header: two packages that both were agreed on may meet in one call.
    """
    only_order = not any(given["ranks compared"] for given in headers)
    problem = rings.difference(headers, only_order) or rings.rejection(headers)
    if problem is not None:
        raise RuntimeError(f"ranks disagree: {problem}")


def header(
    package: Package,
    q: object,
    k: object,
    labels: object,
    options: Options,
    gradients: int = 0,
    label_range: tuple[int, int] = (0, -1),
    accepted: bool = True,
) -> Mapping[str, Any]:
    """What a rank tells the others of its call, by name: whatever must be equal, and the sizes that may differ.

    q, k and labels may be anything where they were not `accepted`.
    """
    # Of what is no tensor nothing differs: that the arguments were not accepted is what the others are to hear.
    features, keys = (
        x if isinstance(x, Tensor) else torch.empty(0, package.dim, dtype=package.dtype) for x in (q, k)
    )
    return {
        "accepted": accepted,
        "package digest": package.digest,
        "torch version": str(torch.__version__),
        "loss": package.loss_name,
        "dtype": str(features.dtype if features.dtype != package.dtype else keys.dtype).removeprefix(
            "torch."
        ),
        "embedding dimension": features.shape[-1] if features.dim() else 0,
        "ranks compared": options.check_ranks != "never",
        "labels given": labels is not None,
        "gradients wanted": gradients,
        "differentiated": gradients != 0,
        "grad_sync": str(options.grad_sync),
        "reduction": str(options.reduction),
        "rows": features.shape[0] if features.dim() else 0,
        "keys": keys.shape[0] if keys.dim() else 0,
        "first label": label_range[0],
        "last label": label_range[1],
    }


def _check_sizes(package: Package, layout: Layout, labels_given: bool) -> None:
    """From global figures only, so that every rank comes to the same conclusion."""
    queries, keys = sum(layout.rows), sum(layout.keys)
    if not queries or not keys:
        raise ValueError(f"the batch needs at least one query and one key; it has {queries} and {keys}")
    if queries > package.batch_size or keys > package.key_count:
        sizes = {"queries": max(queries, package.batch_size), "keys": max(keys, package.key_count)}
        raise ValueError(
            f"{package.name} was generated for at most {package.batch_size} queries and {package.key_count} keys, but "
            f"the batch has {queries} and {keys}; regenerate: {package.regenerate.format(**sizes)}"
        )
    if not package.labelled and queries != keys:
        raise ValueError(
            f"{package.loss_name} pairs query i with key i, but there are {queries} queries and {keys} keys"
        )
    if package.labelled and not labels_given and queries > keys:
        raise ValueError(f"labels are needed where there are more queries ({queries}) than keys ({keys})")
    ranks = len(layout.rows)
    over = max(layout.rows) > package.rows_per_rank or max(layout.keys) > package.keys_per_rank
    if (over or ranks > package.world_size == 1) and package.digest not in _warned:
        _warned.add(package.digest)
        warnings.warn(
            f"{package.name} was planned for {package.world_size} rank(s) of at most {package.rows_per_rank} queries "
            f"and {package.keys_per_rank} keys; {ranks} of up to {max(layout.rows)} and {max(layout.keys)} may take "
            "more memory than predicted (--devices plans a ring)",
            stacklevel=2,
        )


def _label_range(
    package: Package, labels: Tensor | None, checked: set[str], options: Options
) -> tuple[int, int]:
    """Smallest and largest label of this rank; (0, -1) if there is none, or where looking would stall the device.

    Labels on a device are looked at on first use only, unless `check_ranks` is "always"; later an out-of-range label
    gives NaN.
    """
    if labels is None or not labels.numel():
        return 0, -1
    if labels.device.type != "cpu" and package.digest in checked and options.check_ranks != "always":
        return 0, -1
    first, last = torch.aminmax(labels)
    return int(first), int(last)


def _remember_labels(package: Package, labels: Tensor | None, checked: set[str]) -> None:
    """Labels on a device have been looked at, and were right."""
    if labels is not None and labels.numel() and labels.device.type != "cpu":
        checked.add(package.digest)


def _check_labels(ranges: list[tuple[int, int]], layout: Layout) -> None:
    keys = sum(layout.keys)
    for rank, (first, last) in enumerate(ranges):
        if last >= keys or first < 0:
            where = f" on rank {rank}" if len(ranges) > 1 else ""
            raise ValueError(
                f"labels{where} range from {first} to {last}; there are {keys} keys (0..{keys - 1})"
            )
