"""The loss without planning first: `ContrastiveLoss` and `contrastive_loss` take no sizes.

The first call reads embedding dimension, dtype, device, group and batch from its features, and loads a package for
them: from the cache, or generated. A larger batch later loads a larger package; a smaller one runs in the one at hand.

The ranks of a group load together. They exchange their sizes, rank 0 plans for the whole batch and tells the others,
and nobody goes on unless everybody has the package.
"""

import dataclasses
import json
import logging
import operator
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infcl_gen.emission import load_cached
from infcl_gen.errors import InfclError, InputError, ToolchainError, in_python_words
from infcl_gen.inputs.problem import TORCH_DTYPES, Problem, make_problem
from infcl_gen.runtime import api
from infcl_gen.runtime.agreement import compare, header
from infcl_gen.runtime.group import Group, find_group
from infcl_gen.runtime.package import Call, Options

_DTYPES = {getattr(torch, name): flag for flag, name in TORCH_DTYPES.items()}
_LOG = logging.getLogger("infcl_gen")


class Kind(NamedTuple):
    """Calls of one kind share a package."""

    loss: str
    memory_budget: str | int
    dim: int
    dtype: torch.dtype
    device: str  # "cuda" or "cpu"
    group_name: str


_packages: dict[Any, ModuleType] = {}  # by Kind, or the tuple of its fields
_loading = threading.RLock()


class ContrastiveLoss(api.ContrastiveLoss):
    """The loss of a global batch as a module, for features of any size:
    `ContrastiveLoss()(image_features, text_features, logit_scale, logit_bias=None, labels=None)`.

    loss           a built-in loss, or FILE.py:NAME
    memory_budget  bytes per device that the loss may take beyond its inputs: "1GiB", a number, or "auto"
    open_clip      arguments of open_clip's ClipLoss: local_loss, gather_with_grad, cache_labels, rank, world_size,
                   use_horovod; by name
    The other arguments, the results and the errors are those of a package's `ContrastiveLoss`.

    Raises what `infcl_gen.load` raises, on every rank, where there is no package for the batch.
    """

    def __init__(
        self,
        loss: str = "clip",
        *positional: Any,
        memory_budget: str | int = "auto",
        group: Any = None,
        grad_sync: str = "mean",
        check_ranks: str = "first",
        **open_clip: Any,
    ) -> None:
        if positional or isinstance(loss, bool):
            raise TypeError(
                "ContrastiveLoss(loss) takes open_clip's arguments by name: ContrastiveLoss(local_loss=True)"
            )
        super().__init__(group=group, grad_sync=grad_sync, check_ranks=check_ranks, **open_clip)
        self.loss, self.memory_budget = loss, memory_budget

    def extra_repr(self) -> str:
        return f"{self.loss!r}, memory_budget={self.memory_budget!r}, grad_sync={self.options.grad_sync!r}"

    def _loss(self, *arguments: Any) -> Tensor:
        return _run(self.loss, self.memory_budget, *arguments)


def contrastive_loss(
    q: Tensor,
    k: Tensor,
    scale: Tensor | float = 1.0,
    bias: Tensor | float | None = None,
    *,
    loss: str = "clip",
    labels: Tensor | str | None = None,
    group: Any = None,
    grad_sync: str = "mean",
    reduction: str = "mean",
    check_ranks: str = "first",
    memory_budget: str | int = "auto",
) -> Tensor:
    """The loss of the batch that the group's ranks hold together, 0-dim; differentiable in q, k, scale and bias.

    q (M, D) and k (N, D) are this rank's features, of any sizes, in bf16, fp16, fp32 or (on CPUs) fp64. `loss` and
    `memory_budget` as for `ContrastiveLoss`; the other arguments as for a package's `contrastive_loss`, group="local"
    is this device alone.

    Raises TypeError or ValueError for wrong arguments, RuntimeError on every rank where ranks disagree, and what
    `infcl_gen.load` raises, on every rank, where there is no package for the batch.
    """
    options = api.options_of(group, grad_sync, reduction, check_ranks)
    return _run(loss, memory_budget, q, k, scale, bias, labels, options)


def global_value(loss: Tensor, group: Any = None) -> Tensor:
    """The value of the loss over all ranks, detached, for logging: the mean of the ranks' shares, by one all-reduce.

    `loss` is what this rank's call returned with grad_sync="mean". group as for `contrastive_loss`.
    """
    value = loss.detach().clone()
    group_name = api.options_of(group, "mean").group_name
    found = find_group(group_name)
    if found is not None:
        dist.all_reduce(value, group=found.process_group)
        value /= found.size
    return value


def _run(loss: str, memory_budget: str | int, *arguments: Any) -> Tensor:
    """The loss of a `Call`'s arguments, by the package at hand, or by a larger one where the batch is too large."""
    q, k, options = arguments[0], arguments[1], arguments[5]
    try:
        device = q.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        kind = loss, memory_budget, operator.index(q.shape[1]), dtype, device, options.group_name
    except (AttributeError, IndexError):  # no matrix
        kind = None
    if torch.compiler.is_compiling():
        name = _warm_name(*kind) if kind else ""
        if not name:
            raise RuntimeError("the loss has no package yet: call it once outside of torch.compile with such features")
        return _apply(sys.modules[name], arguments)
    package = _packages.get(kind) or _load(kind, q, k, options, 0, 0)
    try:
        return _apply(package, arguments)
    except package._api.BatchTooLargeError as error:
        return _apply(_load(kind, q, k, options, error.queries, error.keys), arguments)


def _apply(package: ModuleType, arguments: tuple[Any, ...]) -> Tensor:
    found: Tensor = package._api.differentiable_loss(package._package, *arguments)
    return found


def _check(q: Any, k: Any, options: Options) -> None:
    """For what is no batch of features, tells the other ranks, and raises TypeError or ValueError."""
    try:
        for name, x in (("q", q), ("k", k)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
            if x.dim() != 2 or x.dtype not in _DTYPES:
                what = f"{x.dtype} of {x.dim()} dimensions"
                raise ValueError(f"{name} must be (rows, D) of {', '.join(map(str, _DTYPES))}, not {what}")
    except (TypeError, ValueError):
        group = find_group(options.group_name)
        if group is not None:
            group.exchange(_header(None, q, k, options, accepted=False))
        raise


def _warm_name(*kind: Any) -> str:
    """The module of the package at hand, for a graph that is traced."""
    package = _packages.get(Kind(*kind))
    return "" if package is None else package.__name__


# As torch.compiler.assume_constant_result does, which imports the whole compiler for it: 1 to 3 s of a first call.
vars(_warm_name)["_dynamo_marked_constant"] = True


def _load(given: tuple[Any, ...] | None, q: Any, k: Any, options: Options, queries: int, keys: int) -> ModuleType:
    """A package for at least this batch and so many queries and keys, which takes the place of the one at hand.

    `given` are the fields of a Kind, None if q is no matrix.
    """
    _check(q, k, options)
    assert given is not None
    kind = Kind(*given)
    with _loading, in_python_words():
        began_s = time.perf_counter()
        group = find_group(kind.group_name)
        if group is None:
            package = load_cached(_problem(kind, max(queries, len(q)), max(keys, len(k)), 1))
        else:
            package = _load_together(group, kind, q, k, queries, keys)
        _packages[kind] = package
        problem = package.SPEC["problem"]
        _LOG.info(
            "%s: batches of up to %d, D = %d, %s, on %d device(s); loaded in %.1f s from %s",
            kind.loss, problem["batch_size"], kind.dim, problem["dtype"], problem["devices"],
            time.perf_counter() - began_s, package.__path__[0],
        )  # fmt: skip
        return package


def _load_together(group: Group, kind: Kind, q: Tensor, k: Tensor, queries: int, keys: int) -> ModuleType:
    """`_load` on all ranks of a group. Raises on all of them where one of them cannot."""
    said = _header(kind, q, k, Options(kind.group_name))
    headers = group.exchange(said, "planning")
    group.finish_trip()
    compare(headers)
    package = failure = None
    try:
        rows, columns = (
            max(least, sum(given[name] for given in headers)) for least, name in ((queries, "rows"), (keys, "keys"))
        )
        package = load_cached(_decided(group, _problem(kind, rows, columns, group.size)))
    except Exception as error:
        failure = error
    digest = package.SPEC["digest"] if package else ""
    headers = group.exchange({**said, "accepted": failure is None, "package digest": digest}, "loading")
    group.finish_trip()
    if failure is not None:
        raise failure
    compare(headers)
    assert package is not None
    return package


def _decided(group: Group, problem: Problem) -> Problem:
    """Rank 0's problem with what it has found on its machine, on every rank; its error, where it has none."""
    place = f"{group.process_group.group_name}/{group.trips}"
    store = dist.PrefixStore("infcl/problem", dist.distributed_c10d._get_default_store())
    if group.rank == 0:
        from infcl_gen.emission.pipeline import case_of

        try:
            found = dataclasses.replace(case_of(problem).resolved(), loss=problem.loss)
        except InfclError as error:
            store.set(place, json.dumps({"error": str(error)}))
            raise
        store.set(place, json.dumps({"problem": found.as_dict()}))
        return found
    said = json.loads(store.get(place))
    if "error" in said:
        raise InputError(f"rank 0 cannot plan for this batch: {said['error']}")
    return make_problem(**said["problem"])


def _problem(kind: Kind, queries: int, keys: int, ranks: int) -> Problem:
    """For batches of up to the next power of two: each size is generated once, however batches vary."""
    if (package := _packages.get(kind)) is not None:
        planned = package.SPEC["problem"]
        queries, keys = max(queries, planned["batch_size"]), max(keys, planned["keys"] or planned["batch_size"])
    batch_size, key_count = (1 << max(0, count - 1).bit_length() for count in (queries, keys))
    if kind.dtype not in _DTYPES:
        raise ToolchainError(f"there are no kernels for {kind.dtype}")
    return make_problem(
        loss=kind.loss, batch_size=batch_size, keys=key_count, dim=kind.dim, devices=ranks, dtype=_DTYPES[kind.dtype],
        memory_budget=kind.memory_budget, target="cpu" if kind.device == "cpu" else "auto",
    )  # fmt: skip


def _header(kind: Kind | None, q: Any, k: Any, options: Options, accepted: bool = True) -> dict[str, Any]:
    """What a rank tells the others of its call before there is a package."""
    described: Any = SimpleNamespace(
        digest="",
        loss_name=kind.loss if kind else "",
        dtype=kind.dtype if kind else torch.float32,
        dim=kind.dim if kind else 0,
    )
    nothing: Any = None
    call = Call(q, k, nothing, nothing, None, options)
    return dict(header(described, call, accepted=accepted))
