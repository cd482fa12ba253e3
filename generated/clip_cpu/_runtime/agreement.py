"""Checks before anything is computed: sizes, labels, and that all ranks of a group make the same call.

Conclusions follow from the headers of all ranks, so either every rank raises or none does.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .group import Group, Layout, find_group
from .package import SCALARS, Call, Package, is_cast, named
from .triangle import partners

# Header fields that ranks compare. The first two kinds come first: they may explain why a rank rejects its arguments.
_FINGERPRINT = ("protocol", "package digest", "torch version", "loss", "dtype", "embedding dimension")
_ORDER = ("phase", "trips finished", "call number")
_PASSES = {"trips finished": "passes finished", "call number": "passes finished before its forward"}
_PER_CALL = ("ranks compared", "labels", "gradients wanted", "grad_sync", "reduction", "digest of prefixes")
# With check_ranks="never": the plan and frozen sides decide what ranks send, and backward needs every rank.
_PACKAGE, _DIFFERENTIATED = ("package digest",), ("differentiated",)
OWN_KEYS = "{} takes a query and its own key on one rank: give each rank as many keys as queries, not {} and {}"

_labels_checked_alone: set[str] = set()  # digests of packages whose device labels were checked once, on one device
_warned: set[str] = set()  # digests of packages


class BatchTooLargeError(ValueError):
    """The batch of all ranks has more queries or keys than the package was generated for. All ranks raise it."""

    def __init__(self, message: str, queries: int, keys: int) -> None:
        super().__init__(message)
        self.queries, self.keys = queries, keys


def unpaired(loss: str, rows: Sequence[int], keys: Sequence[int]) -> str:
    """What is wrong where ranks have so many rows and keys of a loss of pairs. Where one rank alone has more of one
    side, it is named."""
    uneven = [rank for rank, (own, others) in enumerate(zip(rows, keys, strict=True)) if own != others]
    where = f" (rank {uneven[0]} has {rows[uneven[0]]} and {keys[uneven[0]]})" * (len(uneven) == 1 < len(rows))
    there = f"there are {sum(rows)} queries and {sum(keys)} keys{where}"
    return f"{loss} pairs query i with key i, but {there}; infonce takes hard negatives"


@contextlib.contextmanager
def told(package: Package, call: Call) -> Iterator[None]:
    """The other ranks hear of an error in here, also of torch's for lack of memory: none waits for this rank."""
    try:
        yield
    except Exception:
        announce_rejection(package, call)
        raise


def announce_rejection(package: Package, call: Call) -> None:
    """Tells the other ranks that this rank rejects its own arguments, so that all ranks raise.

    Raises RuntimeError where the headers already differ (in dtype, say), which explains more.
    """
    group = find_group(call.options.group_name)
    if group is not None:
        headers = group.exchange(header(package, call, accepted=False))
        problem = _difference(headers, _FINGERPRINT, _ORDER)
        if problem is not None:
            raise RuntimeError(f"ranks disagree: {problem}")


def layout(package: Package, group: Group | None, call: Call, gradients: int) -> Layout:
    """The sizes of all ranks, after the ranks are compared and sizes and labels are checked.

    Raises on every rank: RuntimeError where ranks disagree, ValueError for wrong sizes or labels.
    """
    checked = _labels_checked_alone if group is None else group.labels_checked
    if group is None:
        found, ranges = Layout.alone(call.q, call.k), [_label_range(package, call, checked)]
    else:
        with told(package, call):
            group.check_device(call.q.device)
        headers = group.exchange(header(package, call, gradients, _label_range(package, call, checked)))
        compare(headers)
        devices = [given["device"] for given in headers]
        if package.table.copy_engines and min(devices) >= 0:
            group.connect(devices)
        rows, keys = (tuple(given[name] for given in headers) for name in ("rows", "keys"))
        found, ranges = Layout(group.rank, rows, keys), [(h["first label"], h["last label"]) for h in headers]
    _check_sizes(package, found, call.options.labelling)
    count, labels = sum(found.keys), call.labels
    for rank, (first, last) in enumerate(ranges):
        if last >= count or first < 0:
            where = f" on rank {rank}" if len(ranges) > 1 else ""
            there = f"there are {count} {package.traits.sides[1]} (0..{count - 1})"
            raise ValueError(f"labels{where} range from {first} to {last}; {there}")
    if package.traits.triangle and any(each != (0, -1) for each in ranges):
        _check_other_rows(package, group, call, found, ranges[found.rank])
    if labels is not None and labels.numel() and labels.device.type != "cpu":
        checked.add(package.digest)
    return found


def compare(headers: list[dict[str, Any]]) -> None:
    """Raises RuntimeError, on every rank, where the ranks must not go on together.

    Every header holds the whole fingerprint: ranks may call two different packages, both compared before.
    """
    compared = any(given["ranks compared"] for given in headers)
    problem = _difference(headers, _FINGERPRINT if compared else _PACKAGE, _ORDER)
    rejecting = ", ".join(str(rank) for rank, given in enumerate(headers) if not given["accepted"])
    if rejecting and problem is None:  # A rejecting rank's other fields mean nothing.
        problem = f"the arguments of rank {rejecting} are invalid (see the error there)"
    problem = problem or _difference(headers, _PER_CALL if compared else _DIFFERENTIATED)
    if problem is not None:
        raise RuntimeError(f"ranks disagree: {problem}")


def _difference(headers: Sequence[Mapping[str, Any]], *kinds: tuple[str, ...]) -> str | None:
    """The differing fields of the first kind in which headers differ, in words; later kinds may follow from it.

    A rank that rejects before it has a package is left out: it does not know these fields. So is the digest where a
    rank that loads a package has none: its phase differs, too.
    """
    if len({id(header) for header in headers}) == 1:  # equal ranks share one: comparing takes 15 us
        return None
    informed = {rank: given for rank, given in enumerate(headers) if given["accepted"] or given["package digest"]}
    distinct = list({id(given): given for given in informed.values()}.values())
    for fields in kinds:
        known = [field for field in fields if all(h[field] != "" for h in distinct)]
        different = [field for field in known if any(h[field] != distinct[0][field] for h in distinct)]
        if fields is _ORDER and different and different[0] in _PASSES:
            counts = " and ".join(f"{given[different[0]]} on rank {rank}" for rank, given in informed.items())
            return f"the ranks are in different calls of the loss: {_PASSES[different[0]]} are {counts}"
        if different:
            said = {field: ", ".join(f"rank {r}: {h[field]}" for r, h in informed.items()) for field in different}
            return "; ".join(f"{field} differs ({each})" for field, each in said.items())
    return None


def header(
    package: Package, call: Call, gradients: int = 0, label_range: tuple[int, int] = (0, -1), accepted: bool = True
) -> Mapping[str, Any]:
    """This rank's part of `Group.exchange`: fields that must be equal, and sizes, which may differ."""
    # Rejected features may be no tensors, or without a shape: these must not differ, so that the other ranks report the
    # rejection. Nor do dtypes that are cast: ranks that go on have cast their features.
    options, nothing = call.options, lambda: torch.empty(0, package.dim, dtype=package.dtype, device="cpu")
    features, keys = (x if isinstance(x, Tensor) and not x.is_nested else nothing() for x in call[:2])
    dtypes = [x.dtype for x in (features, keys) if not is_cast(x.dtype, package.dtype)]
    return {
        "accepted": accepted,
        "package digest": package.digest,
        "torch version": str(torch.__version__),
        "loss": package.loss_name,
        "dtype": str(dtypes[0] if dtypes else package.dtype).removeprefix("torch."),
        "embedding dimension": features.shape[-1] if features.dim() else 0,
        "ranks compared": options.check_ranks != "never",
        "labels": options.labelling,
        "gradients wanted": named(gradients),
        "differentiated": named(gradients & ~SCALARS or (gradients and SCALARS)),
        "grad_sync": str(options.grad_sync),
        "reduction": str(options.reduction),
        "digest of prefixes": options.prefixes,
        "rows": features.shape[0] if features.dim() else 0,
        "keys": keys.shape[0] if keys.dim() else 0,
        "first label": label_range[0],
        "last label": label_range[1],
        "device": -1 if features.device.index is None else features.device.index,
    }


def _check_sizes(package: Package, layout: Layout, labelling: str) -> None:
    """Raises ValueError. Uses figures of all ranks only, so that every rank concludes the same."""
    queries, keys, ranks = sum(layout.rows), sum(layout.keys), len(layout.rows)
    if not queries or not keys:
        least = f"one query and one key; it has {queries} and {keys}"
        raise ValueError(f"the batch needs at least {'two rows; it has none' if package.traits.triangle else least}")
    if queries > package.batch_size or keys > package.key_count:
        sizes = {"queries": max(queries, package.batch_size), "keys": max(keys, package.key_count)}
        counted = package.traits.counted
        raise BatchTooLargeError(
            f"{package.name} was generated for at most {counted(package.batch_size, package.key_count)}, but "
            f"the batch has {counted(queries, keys)}; regenerate: {package.regenerate.format(**sizes)}; "
            "a ContrastiveLoss without sizes grows with its batches: under torch.compile, call it once outside",
            queries,
            keys,
        )
    if package.traits.triangle:
        _check_pairs(package, layout, labelling)
    if package.traits.paired and queries != keys:
        raise ValueError(unpaired(package.loss_name, layout.rows, layout.keys))
    if package.traits.labels and labelling == "none" and not package.traits.triangle:
        if queries > keys:
            raise ValueError(f"labels are needed where there are more queries ({queries}) than keys ({keys})")
        if queries < keys and ranks > 1:
            raise ValueError(
                f"there are {queries} queries and {keys} keys on {ranks} ranks: labels must name the "
                'positives; labels="own" takes the first keys of each rank, in the order of its queries'
            )
    for rank, (rows, own) in enumerate(zip(layout.rows, layout.keys, strict=True)):
        if package.traits.own_keys and rows != own:
            raise ValueError(f"{OWN_KEYS.format(package.loss_name, own, rows)} as rank {rank} has")
        if labelling == "own" and rows > own:
            where = f"rank {rank} has" if ranks > 1 else "there are"
            raise ValueError(
                f'labels="own" takes a key of the same rank for each query, but {where} {rows} queries and {own} keys'
            )
    over = max(layout.rows) > package.rows_per_rank or max(layout.keys) > package.keys_per_rank
    planned = package.table.world_size
    if (over or ranks > planned == 1) and package.digest not in _warned:
        _warned.add(package.digest)
        warnings.warn(
            f"{package.name} was planned for {planned} rank(s) of at most "
            f"{package.traits.counted(package.rows_per_rank, package.keys_per_rank)}; {ranks} of up to "
            f"{package.traits.counted(max(layout.rows), max(layout.keys))} may take more memory than predicted; a plan "
            "for as many devices, with the largest rank's rows on each, has room",
            stacklevel=2,
        )


def _check_pairs(package: Package, layout: Layout, labelling: str) -> None:
    """Raises ValueError for a batch without a pair of rows, and for a row without its other view."""
    if sum(layout.rows) < 2:
        raise ValueError(f"{package.loss_name} compares rows with each other, and there is one")
    for rank, rows in enumerate(layout.rows):
        if package.traits.labels and labelling != "given" and rows % 2:
            where = f"rank {rank} has" if len(layout.rows) > 1 else "there are"
            raise ValueError(
                f"{package.loss_name} takes rows i and i + M/2 of a rank for views of one sample, but {where} {rows} "
                "rows; labels name the other view of each row"
            )


def _check_other_rows(
    package: Package, group: Group | None, call: Call, layout: Layout, looked_at: tuple[int, int]
) -> None:
    """Raises ValueError, on every rank, where a label of a triangle names its own row, or rows must be pairs and are
    not. Where a row is in the batch is known only once the ranks have told their sizes, so they exchange what they
    find, too."""
    row, labels, mutual = -1, call.labels, package.traits.mutual
    if labels is not None and looked_at != (0, -1):
        first = layout.key_offset(layout.rank)
        wrong = labels == torch.arange(first, first + len(labels), device=labels.device)
        if mutual:
            wrong |= partners(labels, first)[1]
        row = first + int(wrong.int().argmax()) if bool(wrong.any()) else -1
    found = [row]
    if group is not None:
        headers = group.exchange(header(package, call, label_range=(row, row)))
        compare(headers)
        found = [each["first label"] for each in headers]
    for rank, row in enumerate(found):
        if row >= 0:
            where = f" on rank {rank}" if group else ""
            if mutual:
                raise ValueError(
                    f"{package.loss_name} takes pairs of rows of one rank, of which labels[i] = j and labels[j] = i, "
                    f"but row {row}{where} is in none"
                )
            raise ValueError(f"labels name another row, but that of row {row}{where} is itself")


def _label_range(package: Package, call: Call, checked: set[str]) -> tuple[int, int]:
    """Smallest and largest label of this rank; (0, -1) for none, or for device labels that were `checked` before.

    Reading device labels stalls the device. Unchecked, an out-of-range label gives NaN, and so does a row without a
    partner.
    """
    labels = call.labels
    if labels is None or not labels.numel():
        return 0, -1
    if labels.device.type != "cpu" and package.digest in checked and call.options.check_ranks != "always":
        return 0, -1
    first, last = torch.aminmax(labels)
    return int(first), int(last)
