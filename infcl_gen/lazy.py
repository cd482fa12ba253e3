"""The loss without planning first: `ContrastiveLoss` and `contrastive_loss` take no sizes.

The first call reads embedding dimension, dtype, device, group and batch from its features, and loads a package for
them: from the cache, or generated. A larger batch later loads a larger package; a smaller one runs in the one at hand.

The ranks of a group load together. They exchange their sizes, rank 0 plans for the whole batch and tells the others,
and nobody goes on unless everybody has the package.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import operator
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infcl_gen.emission import load_cached
from infcl_gen.errors import InfeasibleError, InputError, ToolchainError, in_python_words
from infcl_gen.garbage import uncollected
from infcl_gen.inputs.builtin import builtin_positives
from infcl_gen.inputs.problem import Formula, Problem, make_problem
from infcl_gen.inputs.text import parse_bytes, parse_prefixes, suggestion
from infcl_gen.lengths import DTYPES, Lengths, lengths_apart
from infcl_gen.runtime import api
from infcl_gen.runtime.agreement import compare, header, unpaired
from infcl_gen.runtime.group import Group, find_group
from infcl_gen.runtime.package import Call, Options
from infcl_gen.triton_start import start_triton, wait_for_triton

# The process groups there are, as torch's world keeps them; in another world each call looks for its group.
_C10D: Any = getattr(dist, "distributed_c10d", None)
_WORLD, _GROUPS = getattr(_C10D, "_world", None), getattr(_C10D, "_pg_map", None)
if _GROUPS is None or getattr(_WORLD, "pg_map", None) is not _GROUPS:
    _GROUPS = "unknown"
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_LOG = logging.getLogger("infcl_gen")
start_triton("key")  # until the first call there is other work, which leaves cores idle
_USUAL = Options()  # of calls without options; making one takes 1 us of each


class Kind(NamedTuple):
    """Calls of one kind in one group share a package."""

    loss: str  # as `_text` writes it
    memory_budget: str | int
    dim: int
    dtype: torch.dtype
    device: str  # "cuda" or "cpu"


class _Shelf:
    """The packages at hand for a group, or for this device alone; the lock is held while one is loaded."""

    def __init__(self) -> None:
        self.packages: dict[Any, ModuleType] = {}  # by Kind, or the tuple of its fields
        self.lock = threading.RLock()


_alone = _Shelf()
_shelves: weakref.WeakKeyDictionary[Group, _Shelf] = weakref.WeakKeyDictionary()
# Differs after each load. Compiled code is guarded by it, and traced again where a package may have taken the place of
# the one in its graph. A text, since dynamo turns a number that changes into a symbol.
_loads = ""
_disabled: Callable[..., Tensor] | None = None


class ContrastiveLoss(api.ContrastiveLoss):
    """The loss of a global batch as a module, for features of any size:
    `ContrastiveLoss()(image_features, text_features, logit_scale, logit_bias=None, output_dict=False, *, labels=None,
    query_ids=None, key_ids=None, query_weight=None, key_weight=None, negatives=None, query_state=None,
    key_state=None, query_scale=None, key_scale=None, guide_queries=None, guide_keys=None)`.

    loss           a built-in loss, FILE.py:NAME as text or path, or a LossSpec, which is pickled as its formula
    memory_budget  bytes per device that the loss may take beyond its inputs: "1GiB", a number, or "auto"
    prefixes       counts of first columns of the features, or {count: weight}: the loss is the sum of those of each, by
                   a call for each where no package has all at once; None: one loss of all columns
    renormalise    whether similarities of each prefix are cosines of its columns
    group, grad_sync, check_ranks   as for `contrastive_loss`
    open_clip      arguments of open_clip's ClipLoss: local_loss, gather_with_grad, cache_labels, rank, world_size,
                   use_horovod; by name
    The result is the loss (0-dim), or {"contrastive_loss": loss} with output_dict. Over ranks it is this rank's share:
    the mean over ranks is the loss, see `global_value`.

    Raises InputError for a loss that is unknown or has no kernels; a call raises what `infcl_gen.load` raises, on every
    rank, where there is no package for the batch.
    """

    _lengths: Lengths | None = None  # how calls add up the loss

    def __init__(
        self,
        loss: str | os.PathLike[str] | Formula = "clip",
        *positional: Any,
        memory_budget: str | int = "auto",
        prefixes: Any = None,
        renormalise: bool = False,
        group: Any = None,
        grad_sync: str = "mean",
        check_ranks: str = "first",
        **open_clip: Any,
    ) -> None:
        if positional or isinstance(loss, bool):
            raise TypeError(
                "ContrastiveLoss(loss) takes open_clip's arguments by name: ContrastiveLoss(local_loss=True)"
            )
        known = [*inspect.signature(api.ContrastiveLoss).parameters, "loss", "memory_budget", "prefixes", "renormalise"]
        for name in open_clip:
            if name == "reduction":
                raise TypeError(api.UNREDUCED)
            if name not in known:
                raise TypeError(f"ContrastiveLoss has no argument {name!r}{suggestion(name, known)}")
        super().__init__(group=group, grad_sync=grad_sync, check_ranks=check_ranks, **open_clip)
        self.loss, self._lengths = _text_over(loss, prefixes, renormalise=renormalise)
        self.memory_budget = memory_budget
        if self._lengths is not None:
            prefixes, renormalise = None, False
        with in_python_words():
            given = os.fspath(loss) if isinstance(loss, os.PathLike) else loss
            over = {"prefixes": prefixes, "renormalise": renormalise}
            Problem(batch_size=1, dim=1, loss=given, memory_budget_bytes=_budget(memory_budget), **over)
            if not (isinstance(given, str) and given in builtin_positives()) or prefixes:
                from infcl_gen.losses import derive, is_being_read, load_loss, over_prefixes

                if not is_being_read(given):  # a file that makes a module of its own loss
                    spec = over_prefixes(load_loss(given), parse_prefixes(prefixes), renormalise)
                    _literals(derive(spec).spec)

    def extra_repr(self) -> str:
        return f"{_shown(self.loss)!r}, memory_budget={self.memory_budget!r}, grad_sync={self.options.grad_sync!r}"

    def _loss(self, *arguments: Any) -> Tensor:
        if self._lengths is not None:
            return _added_up(self._lengths, self.loss, self.memory_budget, arguments)
        return _run(self.loss, self.memory_budget, arguments)


def contrastive_loss(
    q: Tensor,
    k: Tensor | None,
    scale: Tensor | float = 1.0,
    bias: Tensor | float | None = None,
    *,
    loss: str | os.PathLike[str] | Formula = "clip",
    labels: Tensor | str | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    negatives: Tensor | None = None,
    query_state: Tensor | None = None,
    key_state: Tensor | None = None,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    guide_queries: Tensor | None = None,
    guide_keys: Tensor | None = None,
    group: Any = None,
    grad_sync: str = "mean",
    reduction: str = "mean",
    check_ranks: str = "first",
    memory_budget: str | int = "auto",
    prefixes: Any = None,
    renormalise: bool = False,
) -> Tensor:
    """The loss of the batch that the group's ranks hold together, 0-dim; differentiable in q, k, scale and bias.

    q, k           (M, D) queries and (N, D) keys of this rank, of any sizes, in bf16, fp16, fp32 or (on CPUs) fp64.
                   k is None for a loss that compares the rows of q with each other
    scale, bias    numbers, or tensors of one; gradients are exact
    loss           a built-in loss, FILE.py:NAME as text or path, or (not under torch.compile) a LossSpec
    labels         of a loss with labels: int64 (M,), the index of each query's positive among the keys of all ranks, in
                   the order of the ranks; "own": this rank's first M keys; None: query i of the batch and key i. Of
                   rows that are compared with each other: the index of another row of all ranks' rows; None and "own"
                   pair rows i and i + M/2 of this rank
    query_ids      int64 (M,) and key_ids int64 (N,) of a loss that tells apart pairs of one id, on the device of q
    query_weight   (M,) of a loss with weights of queries, key_weight (N,) of one with weights of keys, and negatives
                   (M, H, D), keys that one query sees alone, of a loss with them, or (M / 2, H, D), of the first rows
                   of its pairs; floating-point, on the device of q, with exact gradients
    query_state    (M,) of a loss with states of queries, key_state (N,) of one with states of keys, fp32 or fp64, on
                   the device of q: the call writes the next ones there
    query_scale    (M,) and key_scale (N,) of a loss with scales of single queries or keys, 1 / temperature; the same
    guide_queries  (M, D) and guide_keys (N, D) of a loss with a guide, of the dtype that the loss computes in, on the
                   device of q, without gradients
    group          a ProcessGroup, a 1-D DeviceMesh, "local" (this device alone), or None: the default group, if any
    grad_sync      "mean": gradients are right after averaging over ranks (DDP, FSDP2); "sum": after adding them up
    reduction      "mean"; "sum": M times as much; "none": the loss of each query of this rank, (M,), for any grad_sync
    check_ranks    "first" and "always": ranks compare package, versions and arguments at each call, and labels on a
                   device at the first or at each; "never": only that they are in the same call
    memory_budget  bytes per device that the loss may take beyond its inputs: "1GiB", a number, or "auto"
    prefixes       counts of first columns of the features, or {count: weight}, of which the last is D: the loss is the
                   sum of those of each, times its weight; not under torch.compile. Where no package has all at once,
                   as of sums over pairs, it is a call for each, with `memory_budget`. None: one loss of all columns
    renormalise    whether similarities of each prefix are cosines of its columns

    Raises TypeError or ValueError for wrong arguments, RuntimeError on every rank where ranks disagree, and what
    `infcl_gen.load` raises, on every rank, where there is no package for the batch.
    """
    options = _USUAL
    if group is not None or (grad_sync, reduction, check_ranks) != ("mean", "mean", "first"):
        options = api.options_of(group, grad_sync, reduction, check_ranks)
    own = query_weight, key_weight, negatives, query_state, key_state, query_scale, key_scale
    of_pairs = labels, query_ids, key_ids, guide_queries, guide_keys
    arguments = q, k, scale, bias, own, *of_pairs, options
    if type(loss) is not str or ":" in loss or prefixes is not None or reduction == "none" or renormalise:
        loss, lengths = _text_over(loss, prefixes, reduction, renormalise)
        if lengths is not None:
            return _added_up(lengths, loss, memory_budget, arguments)
    return _run(loss, memory_budget, arguments)


def global_value(loss: Tensor, group: Any = None) -> Tensor:
    """The value of the loss over all ranks, detached, for logging: the mean of the ranks' shares, by one all-reduce.

    Every rank of the group must call it. `loss` is what this rank's call returned with grad_sync="mean" (with "sum" the
    value is to be multiplied by the number of ranks). group as for `contrastive_loss`.
    """
    if not isinstance(loss, Tensor):
        what = 'a dict: pass its "contrastive_loss"' if isinstance(loss, dict) else type(loss).__name__
        raise TypeError(f"loss must be the tensor that a call returned, not {what}")
    value = loss.detach().clone()
    group_name = api.options_of(group, "mean").group_name
    found = find_group(group_name)
    if found is not None:
        dist.all_reduce(value, group=found.process_group)
        value /= found.size
    return value


def _run(loss: Any, memory_budget: str | int, arguments: tuple[Any, ...]) -> Tensor:
    """The loss of a `Call`'s arguments, by the package at hand, or by a larger one where the batch is too large.

    It is one function: after other work, each that it called in Python would take another 0.5 us or more of each step.
    The package does not ask again whether a graph is traced.
    """
    if torch.compiler.is_compiling():
        return _in_graph(loss, memory_budget, arguments)
    q = arguments[0]
    kind: tuple[Any, ...] | None  # the fields of a `Kind`; None if q is no matrix, or on a device without autocast
    try:
        device = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type  # the last takes 0.4 us
        dtype = _autocast_dtype(q, device) if _any_autocast() else q.dtype
        kind = loss if isinstance(loss, str) else _text(loss), memory_budget, q.shape[1], dtype, device
    except (AttributeError, IndexError, RuntimeError):
        kind = None
    apart = _GROUPS or _C10D._world is not _WORLD
    shelf = _shelf(find_group(arguments[-1].group_name)) if apart else _alone
    try:
        package = shelf.packages.get(kind)
    except TypeError:  # a loss or a budget that cannot be hashed
        package = None
    if package is None:
        return _untraced()(kind, arguments)
    try:
        found: Tensor = package._api.eager_loss(package._package, arguments)
    except package._api.BatchTooLargeError as error:
        found = _untraced()(kind, arguments, error.queries, error.keys)
    return found


def _added_up(lengths: Lengths, loss: Any, memory_budget: str | int, arguments: tuple[Any, ...]) -> Tensor:
    """The sum of the losses of all lengths, each of a call of its own. The other ranks hear of an error.

    The longest is the first: it has all columns, whose number ranks compare.
    """
    total: Tensor | None = None
    for columns, weight in reversed(lengths.prefixes):
        try:
            given = lengths.arguments(columns, arguments)
        except Exception:
            if (group := find_group(arguments[-1].group_name)) is not None:
                group.exchange(_header(None, arguments[0], arguments[1], accepted=False))
            raise
        loss_of_length = _run(loss, memory_budget, given) * weight
        if total is None:
            lengths.check_width(arguments[0].shape[1])
        total = loss_of_length if total is None else total + loss_of_length
    assert total is not None
    return total


def _autocast_dtype(q: Tensor, device: str) -> torch.dtype:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype


def _in_graph(loss: Any, memory_budget: str | int, arguments: tuple[Any, ...]) -> Tensor:
    """`_run`, where a graph is traced: by a package that is at hand."""
    q, kind = arguments[0], None
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):  # as in `_run`
        dtype = _autocast_dtype(q, q.device.type)
        text = loss if isinstance(loss, str) else _text(loss)
        kind = text, memory_budget, operator.index(q.shape[1]), dtype, q.device.type
    name = _warm_name(_loads, arguments[-1].group_name, kind)
    if not name:
        raise RuntimeError(
            "there is no package for these features yet: call the loss once outside torch.compile with the "
            "largest batch"
        )
    package = sys.modules[name]
    found: Tensor = package._api.differentiable_loss(package._package, *arguments)
    return found


def _load_and_run(kind: Any, arguments: tuple[Any, ...], queries: int = 0, keys: int = 0) -> Tensor:
    package = _load(kind, arguments[0], arguments[1], arguments[-1], queries, keys)
    with uncollected():  # the first call of a package compiles its kernels or loads them
        found: Tensor = package._api.eager_loss(package._package, arguments)
    return found


def _untraced() -> Callable[..., Tensor]:
    """`_load_and_run`, out of the compiler's sight: where a graph breaks, it would trace how ranks load together.

    A process that has not imported the compiler does not need that, and does not import it.
    """
    global _disabled
    if _disabled is None and "torch._dynamo" in sys.modules:
        _disabled = torch.compiler.disable(_load_and_run)
    return _disabled or _load_and_run


def _path(loss: Any) -> Any:
    """The loss, a file by its absolute path: the process may change its folder before the first call."""
    text = os.fspath(loss) if isinstance(loss, os.PathLike) else loss
    if isinstance(text, str) and ":" in text:
        file, _, name = text.rpartition(":")
        text = f"{os.path.abspath(file)}:{name}"
    return text


def _text(loss: Any) -> Any:
    """The loss as text, which compiled code is guarded by; a LossSpec as its literals.

    A wrong loss is refused by `_check`, which tells the other ranks.
    """
    text = _path(loss)
    if not isinstance(text, str) and isinstance(text, Formula):
        if torch.compiler.is_compiling():
            raise TypeError("under torch.compile a LossSpec is given to infcl_gen.ContrastiveLoss, made outside")
        with contextlib.suppress(InputError):  # `_check` raises it, and tells the other ranks
            return _literals(loss)
    return text


def _text_over(
    loss: Any, prefixes: Any = None, reduction: str = "mean", renormalise: bool = False
) -> tuple[Any, Lengths | None]:
    """The loss over these prefixes, or for each query, as text; and how calls add it up, where no package has all of
    its prefixes at once. Raises InputError for wrong prefixes."""
    if not isinstance(renormalise, bool):
        raise InputError(f"renormalise={renormalise!r} is neither True nor False")
    if renormalise and prefixes is None:
        raise InputError("renormalise: cosines are of prefixes; give prefixes, for example [96, 192, 384, 768]")
    if prefixes is not None or reduction == "none":
        if torch.compiler.is_compiling():
            word = (
                "prefixes are given to infcl_gen.ContrastiveLoss"
                if prefixes is not None
                else "reduction='none' takes a package"
            )
            raise TypeError(f"under torch.compile {word}, made outside")
        try:
            with in_python_words():
                if (found := parse_prefixes(prefixes)) or reduction == "none":
                    return _changed(_path(loss), found, reduction, renormalise)
        except InputError:
            if prefixes is not None:
                raise
        except TypeError:  # a loss that cannot be hashed: `_check` refuses it, too
            return loss, None
    return _text(loss), None


@functools.lru_cache(maxsize=64, typed=True)  # 1 is no True
def _changed(
    loss: Any, prefixes: tuple[tuple[int, float], ...], reduction: str, renormalise: bool
) -> tuple[str, Lengths | None]:
    """What `_text_over` finds. Raises LossError for a loss that cannot have these prefixes, or losses of queries."""
    from infcl_gen.losses import LossError, is_being_read, load_loss, over_prefixes

    if is_being_read(loss):
        raise LossError(f"loss: {loss!r} is being read: beside prefixes give the LossSpec itself")
    spec = load_loss(loss)
    if reduction == "none":
        spec = dataclasses.replace(spec, reduction="none")
    if prefixes and (lengths := lengths_apart(spec, prefixes, renormalise)) is not None:
        return loss if isinstance(loss, str) and reduction != "none" else _literals(spec), lengths
    return _literals(over_prefixes(spec, prefixes, renormalise)), None


@functools.lru_cache(maxsize=64)
def _literals(loss: Any) -> str:
    """A LossSpec as JSON. Raises LossError for a formula that is too long to be written."""
    from infcl_gen.losses import load_loss, spec_as_dict

    return json.dumps(spec_as_dict(load_loss(loss)))


@functools.lru_cache(maxsize=64)
def _given(text: str) -> str | Formula:
    """The loss that `_text` wrote."""
    if text.startswith("{"):
        from infcl_gen.losses import spec_from_dict

        with contextlib.suppress(ValueError, InputError):  # a text of the user's: `Problem` refuses it
            return spec_from_dict(json.loads(text))
    return text


def _shown(text: str) -> str:
    """The loss that `_text` wrote, for people: a LossSpec by its name."""
    given = _given(text)
    return given if isinstance(given, str) else given.name


def _budget(memory_budget: str | int) -> int | None:
    return None if memory_budget == "auto" else parse_bytes(memory_budget, "memory_budget")


def _warm_name(loads: str, group_name: str, kind: tuple[Any, ...] | None) -> str:
    """The module of the package at hand, for a graph that is traced."""
    package = _shelf(find_group(group_name)).packages.get(kind)
    return "" if package is None else package.__name__


# As torch.compiler.assume_constant_result does, which imports the whole compiler for it: 1 to 3 s of a first call.
vars(_warm_name)["_dynamo_marked_constant"] = True


def _shelf(group: Group | None) -> _Shelf:
    return _alone if group is None else _shelves.setdefault(group, _Shelf())


def _check(kind: tuple[Any, ...] | None, q: Any, k: Any, names: Sequence[str]) -> Kind:
    """The kind of a call. Raises TypeError or ValueError for what is no batch of features, which has these names."""
    features = (names[0], q), (names[1], k)
    for name, x in features:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dim() != 2 or x.dtype not in DTYPES:
            what = f"{x.dim()}-D of {x.dtype}"
            raise ValueError(f"{name} must be (rows, D) of {', '.join(map(str, DTYPES))}, not {what}")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on the {x.device} device: move it to a CPU or a GPU")
    if q.device != k.device or q.shape[1] != k.shape[1]:
        what = ", ".join(f"{name} has D = {x.shape[1]} on {x.device}" for name, x in features)
        raise ValueError(f"{names[0]} and {names[1]} must have one embedding dimension and be on one device; {what}")
    assert kind is not None
    found = Kind(*kind)
    if isinstance(found.loss, Formula):
        _literals(found.loss)  # raises
    if not isinstance(found.loss, str):
        raise TypeError(f"loss must be a name, FILE.py:NAME or a LossSpec, not {type(found.loss).__name__}")
    if not isinstance(found.memory_budget, str | int):
        raise TypeError(f"memory_budget must be a number or text, not {type(found.memory_budget).__name__}")
    return found


def _load(given: Any, q: Any, k: Any, options: Options, queries: int = 0, keys: int = 0) -> ModuleType:
    """A package for at least this batch and so many queries and keys, which takes the place of the one at hand.

    `given` are the fields of a Kind, None if q is no matrix. The other ranks hear of a rejection.
    """
    global _loads
    group = find_group(options.group_name)
    k = q if k is None else k  # a loss with two sides refuses that in its package
    try:
        kind = _check(given, q, k, options.names)
    except Exception:
        if group is not None:
            group.exchange(_header(None, q, k, accepted=False))
        raise
    if kind.device == "cuda":
        start_triton("key", "driver")
    shelf, began_s = _shelf(group), time.perf_counter()
    with shelf.lock, in_python_words():
        at_hand = shelf.packages.get(kind)
        if group is not None:
            package = _load_together(group, kind, at_hand, q, k, (queries, keys))
        else:
            sizes = max(queries, len(q)), max(keys, len(k))
            if at_hand is not None and all(map(operator.le, sizes, _planned(at_hand))):
                return at_hand  # another thread was loading it
            _check_pairs(kind, [len(q)], [len(k)])
            package = _fitting(load_cached, kind, at_hand, sizes, 1)
        wait_for_triton()
        shelf.packages[kind] = package
        if at_hand is not None and at_hand is not package:
            at_hand._api.replay.give_up_all()
        _loads = secrets.token_hex(8)
    problem = package.SPEC["problem"]
    _LOG.info(
        "%s: batches of up to %d, D = %d, %s, on %d device(s); loaded in %.1f s from %s",
        _shown(kind.loss), problem["batch_size"], kind.dim, problem["dtype"], problem["devices"],
        time.perf_counter() - began_s, package.__path__[0],
    )  # fmt: skip
    return package


def _load_together(
    group: Group, kind: Kind, at_hand: ModuleType | None, q: Tensor, k: Tensor, least: tuple[int, int]
) -> ModuleType:
    """`_load` on all ranks of a group. Raises on all of them where one of them cannot, and leaves them in step."""
    said = _header(kind, q, k)
    headers = group.exchange(said, "planning")
    compare(headers)
    group.finish_trip()
    package = failure = None
    # A plan is for even ranks: it must have room for the largest one on each. Equal sides stay equal.
    totals, sizes = ([work(given[name] for given in headers) for name in ("rows", "keys")] for work in (sum, max))
    largest = [max(sizes)] * 2 if totals[0] == totals[1] else sizes
    sizes = [max(few, group.size * rows) for few, rows in zip(least, largest, strict=True)]

    def decide() -> Problem:
        _check_pairs(kind, *([given[name] for given in headers] for name in ("rows", "keys")))
        found: Problem = _fitting(_settled, kind, at_hand, sizes, group.size)
        return found

    try:
        package = load_cached(_decided(group, kind, decide))
    except Exception as error:
        failure = error
    digest = package.SPEC["digest"] if package else ""
    headers = group.exchange({**said, "accepted": failure is None, "package digest": digest}, "loading")
    if failure is not None:
        raise failure
    if failed := [str(rank) for rank, given in enumerate(headers) if not given["accepted"]]:
        raise RuntimeError(f"rank {', '.join(failed)} could not load the package (see the error there)")
    compare(headers)
    group.finish_trip()
    assert package is not None
    return package


def _decided(group: Group, kind: Kind, decide: Callable[[], Problem]) -> Problem:
    """The problem that rank 0 decides on, on every rank; its error, where it has none."""
    failure: Exception | None = None
    told: dict[str, Any] = {}
    if group.rank == 0:
        try:
            told = {"asked": _asked(kind), "problem": decide().as_dict()}
        except Exception as error:
            failure, told = error, {"error": str(error) or type(error).__name__}
            told["class"] = type(error).__name__
    told = json.loads(group.told_by_first(json.dumps(told)))
    if failure is not None:
        raise failure
    if "error" in told:
        known: dict[str, type[Exception]] = {"InfeasibleError": InfeasibleError, "ValueError": ValueError}
        raise known.get(told["class"], InputError)(f"rank 0 cannot plan for this batch: {told['error']}")
    for name, own in _asked(kind).items():
        if own != told["asked"][name]:
            raise RuntimeError(f"ranks disagree: {name} differs (rank 0: {told['asked'][name]}, here: {own})")
    return make_problem(**told["problem"] | {"loss": _given(kind.loss)})


def _asked(kind: Kind) -> dict[str, Any]:
    """What the caller asks for, which must be the same on all ranks. A loss of the user's own is its formula."""
    loss: Any = kind.loss
    if ":" in loss:
        from infcl_gen.losses import load_loss, spec_as_dict  # imports SymPy

        loss = spec_as_dict(load_loss(_given(loss)))
    return {"loss": loss, "memory_budget": _budget(kind.memory_budget)}


def _settled(problem: Problem) -> Problem:
    """The problem with what this machine decides: the device, and the settings of its tuning record, or none at all.

    Another machine makes the same package from it. Raises InfeasibleError if no plan fits.
    """
    from infcl_gen.emission.pipeline import plan_problem  # imports SymPy

    found = plan_problem(problem)[0].problem
    settings = dataclasses.replace(found.settings, records=found.settings.records or "off")
    return dataclasses.replace(found, settings=settings)


def _check_pairs(kind: Kind, rows: Sequence[int], keys: Sequence[int]) -> None:
    """Raises ValueError where a loss that pairs query i with key i has more of one side, over all ranks."""
    if sum(rows) != sum(keys):
        positives = builtin_positives().get(kind.loss)
        if positives is None:
            from infcl_gen.losses import load_loss  # imports SymPy

            positives = load_loss(_given(kind.loss)).positives
        if positives == "diagonal":
            raise ValueError(unpaired(_shown(kind.loss), rows, keys))


def _fitting(
    work: Callable[[Problem], Any], kind: Kind, at_hand: ModuleType | None, sizes: Sequence[int], ranks: int
) -> Any:
    """`work` of the problem for batches of up to the next power of two: each is generated once, however batches vary.

    Where that does not fit the memory budget, of up to the next multiple of 1 024. Never less than at hand.
    """
    least = [max(1, *size) for size in zip(sizes, _planned(at_hand) if at_hand else (1, 1), strict=True)]
    powers = [1 << (size - 1).bit_length() for size in least]
    smaller = [min(power, -(-size // 1024) * 1024) for power, size in zip(powers, least, strict=True)]
    try:
        return work(_problem(kind, powers, ranks))
    except InfeasibleError:
        if smaller == powers:
            raise
        return work(_problem(kind, smaller, ranks))


def _planned(package: ModuleType) -> tuple[int, int]:
    """The queries and keys that a package was generated for."""
    problem = package.SPEC["problem"]
    return problem["batch_size"], problem["keys"] or problem["batch_size"]


def _problem(kind: Kind, sizes: Sequence[int], ranks: int) -> Problem:
    if kind.dtype not in DTYPES:
        raise ToolchainError(f"there are no kernels for {kind.dtype}")
    return make_problem(
        loss=_given(kind.loss), batch_size=sizes[0], keys=sizes[1], dim=kind.dim, devices=ranks,
        dtype=DTYPES[kind.dtype], memory_budget=kind.memory_budget, target="cpu" if kind.device == "cpu" else "auto",
    )  # fmt: skip


def _header(kind: Kind | None, q: Any, k: Any, accepted: bool = True) -> dict[str, Any]:
    """What a rank tells the others of its call before there is a package."""
    described: Any = SimpleNamespace(
        digest="",
        loss_name=_shown(kind.loss).rpartition(":")[2] if kind else "",
        dtype=kind.dtype if kind else torch.float32,
        dim=kind.dim if kind else 0,
    )
    nothing: Any = None
    return dict(header(described, Call(q, k, nothing, nothing), accepted=accepted))
