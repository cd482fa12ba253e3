"""What every generated package exports: argument checks, the functions, the module and the self-test."""

import dataclasses
import functools
import math
import numbers
import operator
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import negatives as of_single
from . import replay
from .agreement import OWN_KEYS, told
from .agreement import BatchTooLargeError as BatchTooLargeError
from .group import ALONE, resolve
from .launch import INTERPRETED
from .ops import cast, differentiable, keep_states, register, traced, wanted
from .package import NAMES, Call, Options, Package, is_cast
from .scaled import scaled, times_rows
from .selftest import selftest as run_selftest
from .table import planned_table
from .traits import Traits
from .warmup import warm_up

_CHOICES = {
    "grad_sync": ("mean", "sum"),
    "reduction": ("mean", "sum", "none"),
    "check_ranks": ("first", "always", "never"),
}
_GUIDES = "guide_queries", "guide_keys"
_OWN = {
    "query_weight": "weights of queries", "key_weight": "weights of keys",
    "negatives": "negatives of single queries (gemini has)",
    "query_state": "state of queries (sogclr has)", "key_state": "state of keys (sogclr_clip has)",
    "query_scale": "scales of single queries", "key_scale": "scales of single keys",
}  # fmt: skip
_STATES = "query_state", "key_state"
_OF_KEYS = "key_weight", "key_state"  # which stand beside the numbers of queries
_NAMES = "image_features", "text_features", "logit_scale", "logit_bias"  # as NAMES, in the signature of modules
UNREDUCED = "ContrastiveLoss is the mean over the batch; contrastive_loss(..., reduction=...) has others"
_REAL = (numbers.Real, torch.SymFloat, torch.SymInt)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def bind(spec: Mapping[str, Any], loss: ModuleType, schedule: ModuleType) -> Package:
    """The runtime's record of a package, from its SPEC, loss.py and schedule.py; registers its operators."""
    problem, plan = spec["problem"], spec["plan"]
    package = Package(
        name=spec["name"],
        digest=spec["digest"],
        loss_name=problem["loss"],
        dtype=_DTYPES[problem["dtype"]],
        dim=problem["dim"],
        batch_size=problem["batch_size"],
        key_count=problem["batch_size"] if problem["keys"] is None else problem["keys"],
        table=planned_table(plan["schedule"]),
        rows_per_rank=plan["rows_per_rank"],
        keys_per_rank=plan["keys_per_rank"],
        any_device=plan["strategy"] == "torch" or INTERPRETED,
        replay=plan["replay"],
        product_precision=plan["input_precision"],
        traits=Traits(**spec["loss"]["traits"]),
        rows=plan["strategy"] == "rows",
        wider=plan["wider"],
        split=bool(plan["split"]),
        frozen=problem["frozen"],
        regenerate=spec["regenerate"],
        loss=loss,
        schedule=schedule,
    )
    return dataclasses.replace(package, operators=register(package))


def differentiable_loss(package: Package, *arguments: Any) -> Tensor:
    """`contrastive_loss` of a `Call`'s arguments."""
    if not torch.compiler.is_compiling():
        return eager_loss(package, arguments)
    given = Call(*arguments)
    try:
        call = accepted(package, given)
    except (TypeError, ValueError) as error:  # raised in a trace, torch's error would name no argument and no remedy
        kind, message = "TypeError" if isinstance(error, TypeError) else "ValueError", error.args[0]
        refused: Tensor = package.operators.refuse(kind, message, given.options.group_name)
        return refused
    return differentiable(package, call, _states(package, given))


def eager_loss(package: Package, arguments: Sequence[Any]) -> Tensor:
    """The same, where no graph is traced."""
    call = Call(*arguments)
    return differentiable(package, _agreed(package, call), _states(package, call))


def loss_and_grads(package: Package, *arguments: Any) -> tuple[Tensor | None, ...]:
    """`loss_and_grads` of a `Call`'s arguments."""
    called = Call(*arguments)
    with torch.no_grad():
        given = _agreed(package, called, package.gradients)
        call = cast(package, given)
        loss, saved = replay.forward(package, call, package.gradients)
        keep_states(_states(package, called), saved)
        upstream = torch.ones_like(loss)
        dq, dk, dscale, dbias, *_ = replay.backward(package, call, saved, upstream, package.gradients)
        sides = zip((dq, dk), given[:2], strict=True)
        dq, dk = (None if x is None else x.to(like.dtype) for x, like in sides)
        if "negatives" in package.traits.vectors:
            found = _through_negatives(package, given, called.vectors[2], saved.of_vectors[package.traits.weighed - 1])
            sums = zip((dq, dscale, dbias), found, strict=True)
            dq, dscale, dbias = (None if a is None else a + b for a, b in sums)
        scales = _scales(package, called.vectors)
        dq, dk = (x if a is None or x is None else times_rows(x, a) for x, a in zip((dq, dk), scales, strict=True))
        return loss, dq, dk, dscale, dbias


def _through_negatives(package: Package, call: Call, negatives: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """What the log-sum-exps of queries' own negatives add to dq, dscale and dbias, for an accepted call."""
    with torch.inference_mode(False), torch.enable_grad():
        given = (call.q, call.scale, call.bias, negatives)
        # Autograd keeps no tensor of inference mode, but copies.
        q, scale, bias, negatives = (x.clone() if x.is_inference() else x.detach() for x in given)
        q, scale, bias = (x.requires_grad_() for x in (q, scale, bias))
        own = None, None, negatives, None, None
        found = _vectors(package, q, scale, bias, call.labels, *own)
        return torch.autograd.grad(found, (q, scale, bias), upstream[None], materialize_grads=True)


def selftest(package: Package, device: torch.device | str | None) -> dict[str, Any]:
    """`selftest` of a package."""
    default = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
    return run_selftest(package, torch.device(device or default), loss_and_grads)


class ContrastiveLoss(nn.Module):
    """Base of each package's own `ContrastiveLoss`, which sets `_package` and has the documentation."""

    _package: ClassVar[Package]

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        use_horovod: bool = False,
        *,
        group: Any = None,
        grad_sync: str = "mean",
        check_ranks: str = "first",
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod=True is not supported: ranks communicate through torch.distributed")
        if local_loss and not gather_with_grad:
            warnings.warn(
                "local_loss=True without gather_with_grad=True: open_clip then leaves out the gradients of other "
                "ranks' losses in this rank's features; here they are complete",
                stacklevel=2,
            )
        self.options = options_of(group, grad_sync, "mean", check_ranks)._replace(names=_NAMES)
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size, self.use_horovod = rank, world_size, use_horovod
        _check_choices(self.options)
        self._check_world()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor | None,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
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
        **unknown: Any,
    ) -> Tensor | dict[str, Tensor]:
        """The loss (0-dim), or {"contrastive_loss": loss} if `output_dict`."""
        for name in unknown:
            raise TypeError(UNREDUCED if name == "reduction" else f"ContrastiveLoss has no argument {name!r} in a call")
        if not isinstance(output_dict, bool):
            raise TypeError("output_dict must be a bool; labels are given by name: labels=...")
        if self.world_size is not None or self.rank is not None:
            self._check_world()
        features, numbers = (image_features, text_features), (logit_scale, logit_bias)
        own = query_weight, key_weight, negatives, query_state, key_state, query_scale, key_scale
        of_pairs = labels, query_ids, key_ids, guide_queries, guide_keys
        loss = self._loss(*features, *numbers, own, *of_pairs, self.options)
        return {"contrastive_loss": loss} if output_dict else loss

    def _loss(self, *arguments: Any) -> Tensor:
        return differentiable_loss(self._package, *arguments)

    def extra_repr(self) -> str:
        return f"{self._package.name}, grad_sync={self.options.grad_sync!r}"

    def _check_world(self) -> None:
        rank, size = _place(self.options.group_name)
        if self.world_size not in (None, size):
            raise ValueError(
                f"wrong world size: world_size={self.world_size} was given, but the process group has {size} "
                f"rank(s); leave it out, or pass the group"
            )
        if self.rank not in (None, rank):
            raise ValueError(f"wrong rank: rank={self.rank} was given, but this process has rank {rank}")


def _agreed(package: Package, call: Call, gradients: int | None = None) -> Call:
    """`accepted`, with the kernels for these gradients compiled, None: those that autograd wants."""
    with told(package, call):
        found = accepted(package, call)
        if not (traced(*found.inputs) or torch._C._are_functorch_transforms_active()):
            warm_up(package, found, wanted(package, found) if gradients is None else gradients)
        return found


def accepted(package: Package, call: Call) -> Call:
    """The call as described at `Call`, converted differentiably; features keep their dtype until `Call.cast`.

    Raises TypeError or ValueError for the first wrong argument.
    """
    q, k, scale, bias, passed, labels, query_ids, key_ids, guide_queries, guide_keys, options = call
    _check_choices(options)
    names = options.names
    if options.reduction == "none" and not package.traits.per_row:
        raise ValueError(
            f"{package.name} has one loss for all queries: reduction='none' takes a package that was generated from a "
            "LossSpec(..., reduction='none')"
        )
    if package.traits.triangle:
        if k is not None:
            rows = f"{package.loss_name} compares the rows of {names[0]} with each other"
            raise ValueError(f"{rows}: {names[1]} must be None")
        k = q.detach() if isinstance(q, Tensor) else q
        call = call._replace(k=k)
        if package.traits.ids:
            if key_ids is not None:
                raise ValueError(f"query_ids are the ids of both sides in {package.loss_name}: key_ids must be None")
            key_ids = query_ids
            call = call._replace(key_ids=key_ids)
    _check_features(package, call)
    _check_ids(package, call)
    _check_guides(package, call)
    _check_vectors(package, call)
    if labels is not None:
        _check_labels(package, q, labels)
        own = isinstance(labels, str)
        labels, options = None if own else labels, options._replace(labelling="own" if own else "given")
    if names != NAMES:  # equal calls share what is recorded
        options = options._replace(names=NAMES)
    scale = _scalar(names[2], scale, package, q)
    bias = _scalar(names[3], 0.0 if bias is None else bias, package, q)
    q, k = (x if a is None else scaled(x, a) for x, a in zip((q, k), _scales(package, passed), strict=True))
    vectors = _vectors(package, q, scale, bias, labels, *passed[:5]) if package.traits.vectors else None
    return Call(q, k, scale, bias, vectors, labels, query_ids, key_ids, guide_queries, guide_keys, options)


def _check_choices(options: Options) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _check_features(package: Package, call: Call) -> None:
    own, names = call.vectors or (None,) * len(_OWN), call.options.names
    q_name, k_name, *scalars = names
    for name, value in (*zip((*names, *Call._fields[4:-1]), call, strict=False), *zip(_OWN, own, strict=True)):
        if type(value) is not Tensor and hasattr(type(value), "full_tensor"):  # importing DTensor takes long
            whole = f'{name}.full_tensor(grad_placements=[Partial("avg")]), or Partial("sum") with grad_sync="sum"'
            rows = f"the rows of this rank, {name}.to_local(), and its mesh as group"
            raise TypeError(f"{name} is a DTensor: pass {whole if name in scalars else rows}")
    q, k = call.q, call.k
    for name, x in ((q_name, q), (k_name, k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.is_nested:
            raise ValueError(f"{name} must be a dense tensor, not a nested one: pass torch.cat({name}.unbind())")
        if x.dim() != 2:
            raise ValueError(f"{name} must have shape (rows, {package.dim}), not {_shape(x)}")
        if x.shape[1] != package.dim:
            dim = operator.index(x.shape[1])
            if name == k_name:
                raise ValueError(f"{name} has embedding dimension {dim}, but {q_name} has {package.dim}")
            raise ValueError(
                f"{name} has embedding dimension {dim}, but {package.name} was generated for {package.dim}; "
                f"generate one for dim {dim}"
            )
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, not {x.layout}")
    for name, x, side in ((q_name, q, "query"), (k_name, k, "key")):
        if side == package.frozen and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, but {package.name} was generated with --frozen {side} and has no memory "
                f"for it: pass {name}.detach(), or generate one without --frozen"
            )
    name, frozen = f"{package.frozen}_scale", package.frozen != "none" and bool(package.traits.scaled)
    of_frozen = dict(zip(_OWN, own, strict=True))[name] if frozen else None
    if isinstance(of_frozen, Tensor) and of_frozen.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, which follows from those of features, and {package.name} was generated with "
            f"--frozen {package.frozen}: pass {name}.detach(), or generate one without --frozen"
        )
    if q.device != k.device:
        raise ValueError(f"{q_name} and {k_name} must be on one device, not on {q.device} and {k.device}")
    device, features = q.device.type, f"{q_name} is" if package.traits.triangle else f"{q_name} and {k_name} are"
    if device == "meta" and not torch.compiler.is_compiling():
        raise ValueError(f"{features} on the meta device, which holds no values: move features to one that does")
    if device != "cuda" and not package.any_device:
        raise ValueError(
            f"{package.name} holds GPU kernels, but {features} on {device}: generate one for target cpu, or set "
            "TRITON_INTERPRET=1 before the start, which runs kernels slowly on the CPU"
        )
    for name, x in ((q_name, q), (k_name, k)):
        if x.dtype == package.dtype:
            continue
        if not is_cast(x.dtype, package.dtype):
            if q.dtype != k.dtype and {q.dtype, k.dtype} <= {*_DTYPES.values()}:
                dtypes = f"{q_name} has dtype {q.dtype}, {k_name} has dtype {k.dtype}"
                raise ValueError(f"{q_name} and {k_name} must have one dtype; {dtypes}")
            raise ValueError(
                f"{name} has dtype {x.dtype}, but {package.name} was generated for {package.dtype}: cast it, or "
                "generate one for another dtype"
            )
        if not package.wider:
            raise ValueError(
                f"{name} has dtype {x.dtype}, but the memory budget of {package.name} has no room for gradients wider "
                f"than {package.dtype}: cast it, or generate one with a larger --memory-budget, which SPEC['plan']"
                "['reasons'] names"
            )


def _shape(x: Tensor) -> tuple[int, ...]:
    """In integers, also where a graph is traced for symbolic sizes."""
    return tuple(map(operator.index, x.shape))


def _check_labels(package: Package, q: Tensor, labels: Any) -> None:
    if package.traits.positives == "none":
        raise ValueError(f"{package.loss_name} has no positives: it takes no labels")
    if not package.traits.placed:
        own, others = ("a row", "rows") if package.traits.triangle else ("a query", "keys")
        raise ValueError(f"the positives of {package.loss_name} are the {others} of {own}'s id: it takes no labels")
    if not package.traits.labels:
        raise ValueError(f"{package.loss_name} pairs query i with key i: labels are not supported (infonce takes them)")
    expected = 'labels must be an int64 tensor, "own" or None'
    if isinstance(labels, str):
        if labels != "own":
            raise ValueError(f"{expected}, not {labels!r}")
        return
    if not isinstance(labels, Tensor):
        raise TypeError(f"{expected}, not {type(labels).__name__}")
    if labels.dtype != torch.int64 or labels.shape != q.shape[:1]:
        rows = _shape(q)[0]
        raise ValueError(f"labels must be int64 of shape ({rows},), not {labels.dtype} of shape {_shape(labels)}")
    if labels.device.type != "cpu" and labels.device != q.device:
        raise ValueError(f"labels must be on the host or on {q.device}, not on {labels.device}")


def _check_ids(package: Package, call: Call) -> None:
    given = {"query_ids": (call.query_ids, call.q), "key_ids": (call.key_ids, call.k)}
    if not package.traits.ids:
        if call.ids != (None, None):
            raise ValueError(f"{package.loss_name} tells no pairs of one id apart: query_ids and key_ids must be None")
        return
    for name, (ids, x) in given.items():
        fits = isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.shape == x.shape[:1]
        if isinstance(ids, Tensor) and fits and ids.device == x.device:
            continue
        expected = f"{name} must be an int64 tensor of shape ({_shape(x)[0]},) on {x.device}"
        if ids is None:
            needed = "query_ids" if package.traits.triangle else "query_ids and key_ids"
            raise ValueError(f"{package.loss_name} needs {needed}: {expected}")
        if not isinstance(ids, Tensor):
            raise TypeError(f"{expected}, not {type(ids).__name__}")
        if not fits:
            raise ValueError(f"{expected}, not {ids.dtype} of shape {_shape(ids)}")
        raise ValueError(f"{expected}, not on {ids.device}")  # a copy from the host would wait for the device


def _check_guides(package: Package, call: Call) -> None:
    given = zip(_GUIDES, call.guides, (call.q, call.k), strict=True)
    for name, guide, x in given:
        if not package.traits.guided:
            if guide is not None:
                raise ValueError(f"{package.loss_name} has no guide: {name} must be None")
            continue
        expected = f"{name} must be a dense tensor of {package.dtype}, {_shape(x)}, on {x.device}"
        if guide is None:
            raise ValueError(f"{package.loss_name} needs {name}: {expected}")
        if not isinstance(guide, Tensor):
            raise TypeError(f"{expected}, not {type(guide).__name__}")
        if guide.is_nested or guide.layout != torch.strided:
            raise ValueError(f"{expected}, not {'nested' if guide.is_nested else guide.layout}")
        if guide.shape != x.shape:
            padded = ": pad the narrower of features and guide by zeros, which change no product"
            narrow = guide.dim() == 2 and guide.shape[0] == x.shape[0]
            raise ValueError(f"{expected}, not of shape {_shape(guide)}{padded * narrow}")
        if guide.dtype != package.dtype:
            raise ValueError(f"{expected}, not of {guide.dtype}: cast it")
        if guide.device != x.device:
            raise ValueError(f"{expected}, not on {guide.device}")
        if guide.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and a guide has none: pass {name}.detach()")


def _check_vectors(package: Package, call: Call) -> None:
    for (name, what), x in zip(_OWN.items(), call.vectors or (None,) * len(_OWN), strict=True):
        q = call.k if name.startswith("key") else call.q
        if name not in (*package.traits.vectors, *package.traits.scaled):
            if x is not None:
                raise ValueError(f"{package.loss_name} has no {what}: {name} must be None")
            continue
        if name in _OF_KEYS and len(call.q) != len(call.k):
            raise ValueError(OWN_KEYS.format(package.loss_name, len(call.k), len(call.q)))
        if _is_vector(package, name, x, q):
            continue
        shape = f"({_shape(q)[0]},)"
        if name == "negatives":
            more = "with H at least 1," + " of pairs in the order of their first rows," * package.traits.partnered
            shape = f"({of_single.shape(package.traits.partnered, q)[0]}, H, {package.dim}), {more}"
        dtype = "fp32 or fp64" if name in _STATES else "floating-point"
        expected = f"{name} must be a dense {dtype} tensor of shape {shape} on {q.device}"
        if x is None:
            raise ValueError(f"{package.loss_name} needs {name}: {expected}")
        if not isinstance(x, Tensor):
            raise TypeError(f"{expected}, not {type(x).__name__}")
        if not _is_dense(name, x):
            kind = "nested of " if x.is_nested else "" if x.layout == torch.strided else f"{x.layout} of "
            raise ValueError(f"{expected}, not {kind}{x.dtype}")
        if x.device != q.device:  # a copy from the host would wait for the device
            raise ValueError(f"{expected}, not on {x.device}")
        if name in _STATES and x.requires_grad:
            raise ValueError(f"{name} has no gradient, but requires one: pass {name}.detach(), which is overwritten")
        if name in _STATES and x.shape == q.shape[:1]:
            why = "has several elements in one place" if x.stride(0) == 0 else "was made in inference mode"
            raise ValueError(
                f"{name} {why}, and a call writes the next state into it: pass {name}.clone(), and keep it"
            )
        raise ValueError(f"{expected}, not of shape {_shape(x)}")
    states = _states(package, call)
    if len(states) > 1 and _overlap(*states):
        raise ValueError(f"{' and '.join(_STATES)} must be two tensors: a call writes the next states into each")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two vectors of one length have an element in common; of several strides, whether they may have one. In a
    graph that is traced, tensors have no memory yet."""
    if x is y or torch.compiler.is_compiling():
        return x is y
    if x.is_set_to(y) or not torch._C._is_alias_of(x, y):  # type: ignore[attr-defined]
        return x.is_set_to(y)  # which sees through functorch, as the other does not
    distance, strides, last = y.storage_offset() - x.storage_offset(), (x.stride(0), y.stride(0)), x.shape[0] - 1
    return distance % max(1, math.gcd(*strides)) == 0 and -last * strides[1] <= distance <= last * strides[0]


def _is_writable(x: Tensor) -> bool:
    """Whether a call may write into each element of a vector."""
    fixed = not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()
    return not fixed and (x.shape[0] < 2 or x.stride(0) > 0)


def _is_dense(name: str, x: Tensor) -> bool:
    """Strided, and of floating point; a state also of at least 32 bits: an average moves in small steps."""
    dense = not x.is_nested and x.layout == torch.strided and x.is_floating_point()
    return dense and (name not in _STATES or x.dtype in (torch.float32, torch.float64))


def _is_vector(package: Package, name: str, x: Any, q: Tensor) -> bool:
    if not isinstance(x, Tensor) or not _is_dense(name, x) or (name in _STATES and x.requires_grad):
        return False
    if name == "negatives":
        fits = x.dim() == 3 and x.shape[::2] == of_single.shape(package.traits.partnered, q) and x.shape[1] > 0
        return x.device == q.device and fits
    return x.device == q.device and x.shape == q.shape[:1] and (name not in _STATES or _is_writable(x))


def _vectors(
    package: Package,
    q: Tensor,
    scale: Tensor,
    bias: Tensor,
    labels: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    negatives: Tensor | None,
    query_state: Tensor | None,
    key_state: Tensor | None,
) -> Tensor:
    """The numbers of `Traits.vectors` (V, m) in the statistics dtype, differentiably in all of these but states."""
    dtype = package.schedule.STATISTICS_DTYPE
    found = [x.to(dtype) for x in (query_weight, key_weight) if x is not None]
    if negatives is not None:
        found.append(of_single.log_sums(package.traits, package.loss, q, negatives, scale, bias, labels))
    found += [x.to(dtype) for x in (query_state, key_state) if x is not None]
    return torch.stack(found)


def _states(package: Package, call: Call) -> tuple[Any, ...]:
    """The states that a call passes of those of the loss, before it is accepted."""
    names = package.traits.vectors[package.traits.weighed :]
    if not names or call.vectors is None:
        return ()
    given = dict(zip(_OWN, call.vectors, strict=True))
    return tuple(given[name] for name in names)


def _scales(package: Package, own: tuple[Any, ...] | None) -> tuple[Tensor | None, Tensor | None]:
    """The numbers that multiply rows of q and of k, in the statistics dtype, differentiably; None for none."""
    *_, first, last = own or (None,) * len(_OWN)
    of_queries, of_keys = (None if x is None else x.to(package.schedule.STATISTICS_DTYPE) for x in (first, last))
    return of_queries, of_keys


def _scalar(name: str, value: Tensor | float, package: Package, q: Tensor) -> Tensor:
    """`value` as a 0-dim tensor in the statistics dtype on q's device, differentiably."""
    dtype = package.schedule.STATISTICS_DTYPE
    if isinstance(value, Tensor):
        if value.shape not in ((), (1,)) or value.is_complex() or value.dtype == torch.bool:
            real = f"{name} must be a tensor of one real number, 0-dim or of shape (1,)"
            raise ValueError(f"{real}, not {value.dtype} of shape {_shape(value)}")
        value = value.to(device=q.device, dtype=dtype, non_blocking=q.is_cuda).resolve_neg()
        return value.reshape(()) if value.dim() else value
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, _REAL)):  # `Real` takes 5 us
        raise TypeError(f"{name} must be a number or a tensor of one, not {type(value).__name__}")
    # Uncached: a tensor made under torch.func, or in a graph being captured, is invalid outside of it.
    if traced(q) or torch._C._are_functorch_transforms_active() or (q.is_cuda and replay.capturing(q.device)):
        return torch.full((), value, dtype=dtype, device=q.device)
    stream = replay.raw_stream(q.device) if q.is_cuda else 0
    try:
        return _constant(float(value), dtype, q.device, stream)
    except (OverflowError, RuntimeError) as error:
        if "overflow" not in str(error) and not isinstance(error, OverflowError):
            raise
        raise ValueError(f"{name} must be a number that {dtype} can hold: {error}") from error


@functools.lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """A number on the device, never written to. Filling it takes a launch, which only its own stream waits for."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def options_of(group: Any, grad_sync: str, reduction: str = "mean", check_ranks: str = "first") -> Options:
    """The options of a call. Raises TypeError or ValueError where `group` is no group of this process."""
    if group is None or group == "local":
        return Options(ALONE if group else "", grad_sync, reduction, check_ranks)
    if not dist.is_available():
        raise ValueError("group was given, but this torch has no torch.distributed")
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a 1-D DeviceMesh, not one of {group.ndim} dimensions; pass mesh['name']")
        if group.get_coordinate() is None:
            raise ValueError("this process is not a member of the DeviceMesh that was passed as group")
        group = group.get_group()
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f'group must be a ProcessGroup, a 1-D DeviceMesh, "local" or None, not {group!r:.60}')
    if outside or dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of the process group that was passed as group")
    return Options(group.group_name, grad_sync, reduction, check_ranks)


def _place(group_name: str) -> tuple[int, int]:
    """(rank, number of ranks) of this process in a named group."""
    if group_name == ALONE or not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    group = resolve(group_name)
    return dist.get_rank(group), dist.get_world_size(group)
