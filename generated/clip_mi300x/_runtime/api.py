"""The public face of a generated package: argument checks, the functions, the module, the self-test."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import replay
from .agreement import announce_rejection
from .launch import INTERPRETED
from .ops import Operators, differentiable, register, traced, wanted
from .package import Options, Package
from .ring import ALONE, resolve
from .route import planned_route

_CHOICES = {
    "grad_sync": ("mean", "sum"),
    "reduction": ("mean", "sum"),
    "check_ranks": ("first", "always", "never"),
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Api(NamedTuple):
    """What a package exports, besides SPEC and `reference`."""

    ContrastiveLoss: type[ContrastiveLoss]
    contrastive_loss: Callable[..., Tensor]
    loss_and_grads: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    selftest: Callable[..., dict[str, Any]]


def build_api(spec: Mapping[str, Any], loss: ModuleType, schedule: ModuleType) -> Api:
    """Binds the runtime to one package: its SPEC, its loss.py and its schedule.py (the device sweep)."""
    package = _package(spec, loss, schedule)
    operators = register(package)

    def contrastive_loss(
        q: Tensor,
        k: Tensor,
        scale: Tensor | float = 1.0,
        bias: Tensor | float | None = None,
        *,
        labels: Tensor | None = None,
        group: Any = None,
        grad_sync: str = "mean",
        reduction: str = "mean",
        check_ranks: str = "first",
    ) -> Tensor:
        """The loss of the batch that the group's ranks hold together, 0-dim; differentiable in q, k, scale and bias.

        q            (M, D) queries of this rank and k (N, D) keys, any strides, in the package's dtype (under autocast
                     to that dtype, others are cast; their gradients are in their own dtype, not rounded in between). M
                     and N differ between ranks as they like, and may be 0.
        scale, bias  numbers or 0-dim tensors. A host tensor with a device batch makes backward wait for the device.
        labels       int64 (M,), the index of each query's positive among all keys of the group; None means the same
                     global row. Host labels are checked on every call, labels on a device on first use (later, one that
                     names no key gives NaN).
        group        a ProcessGroup, a 1-D DeviceMesh, or None: the default group if there is one, else this device.
        grad_sync    "mean": gradients are right after averaging over the ranks (DDP, FSDP); "sum": after summing.
        reduction    "mean", or "sum": M times as much.
        check_ranks  "never": ranks are not compared, except that all are in the same call. Else every call compares
                     package, versions and arguments (they travel with the sizes); labels on a device are looked at on
                     "first" use, or "always".

        Raises TypeError or ValueError for wrong arguments, RuntimeError on every rank where ranks disagree.
        """
        return _differentiable(
            package,
            operators,
            q,
            k,
            scale,
            bias,
            labels,
            Options(_group_name(group), grad_sync, reduction, check_ranks),
        )

    def loss_and_grads(
        q: Tensor,
        k: Tensor,
        scale: Tensor | float = 1.0,
        bias: Tensor | float | None = None,
        *,
        labels: Tensor | None = None,
        group: Any = None,
        grad_sync: str = "mean",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(loss, dq, dk, dscale, dbias), without a graph. Arguments as for `contrastive_loss`; None as bias is 0."""
        with torch.no_grad():
            return _loss_and_grads(package, q, k, scale, bias, labels, Options(_group_name(group), grad_sync))

    def selftest(device: torch.device | str | None = None) -> dict[str, Any]:
        """Runs small batches on one device against `reference` in fp64.

        Returns {"ok": bool, "package", "device", "dtype", "repeatable": bool, "cases": [...]}; a case names its sizes
        and scale, and for loss, dq, dk, dscale has the relative norm error and the largest one allowed.
        """
        return _selftest(package, torch.device(device or _default_device(package)))

    bound = type(
        "ContrastiveLoss",
        (ContrastiveLoss,),
        {"_package": package, "_operators": operators, "__doc__": ContrastiveLoss.__doc__},
    )
    for item in (contrastive_loss, loss_and_grads, selftest, bound):
        item.__module__, item.__qualname__ = (
            package_module(schedule),
            item.__name__,
        )  # so that they pickle by name
    return Api(bound, contrastive_loss, loss_and_grads, selftest)


def package_module(schedule: ModuleType) -> str:
    """The import name of the generated package that `schedule` is part of."""
    return schedule.__name__.rpartition(".")[0] or schedule.__name__


class ContrastiveLoss(nn.Module):
    """The contrastive loss of a global batch, as a module: `forward(image_features, text_features, logit_scale)`.

    group, grad_sync, check_ranks as for `contrastive_loss`. The remaining arguments are those of open_clip's ClipLoss:
    rank and world_size, if given, must be the group's; local_loss, gather_with_grad and cache_labels are accepted and
    have no effect (nothing is gathered, gradients are always exact, positives need no label tensor); use_horovod is
    refused.
    """

    _package: ClassVar[Package]
    _operators: ClassVar[Operators]

    def __init__(
        self,
        *,
        group: Any = None,
        grad_sync: str = "mean",
        check_ranks: str = "first",
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod=True is not supported: ranks communicate through torch.distributed")
        self.options = Options(_group_name(group), grad_sync, "mean", check_ranks)
        self.expected_rank, self.expected_world_size = rank, world_size
        _check_choices(self.options)
        self._check_world()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        labels: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss (0-dim), or {"contrastive_loss": loss} if `output_dict`."""
        if self.expected_world_size is not None or self.expected_rank is not None:
            self._check_world()
        loss = _differentiable(
            self._package,
            self._operators,
            image_features,
            text_features,
            logit_scale,
            logit_bias,
            labels,
            self.options,
        )
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        return f"{self._package.name}, grad_sync={self.options.grad_sync!r}"

    def _check_world(self) -> None:
        rank, size = _place(self.options.group_name)
        if self.expected_world_size not in (None, size):
            raise ValueError(
                f"wrong world size: world_size={self.expected_world_size} was given, but the process group has {size} "
                f"rank(s); leave it out, or pass the group"
            )
        if self.expected_rank not in (None, rank):
            raise ValueError(
                f"wrong rank: rank={self.expected_rank} was given, but this process has rank {rank}"
            )


def _differentiable(
    package: Package,
    operators: Operators,
    q: Tensor,
    k: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    labels: Tensor | None,
    options: Options,
) -> Tensor:
    tensors = _prepare(package, q, k, scale, bias, labels, options)
    return differentiable(package, operators, *tensors, labels, options)


def _loss_and_grads(
    package: Package,
    q: Tensor,
    k: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    labels: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, scale, bias = _prepare(package, q, k, scale, bias, labels, options)
    options = wanted(package, q, k, options)
    tensors = (*package.cast(q, k), scale, bias)
    loss, saved = replay.forward(package, *tensors, labels, options, gradients=0b1111)
    dq, dk, dscale, dbias = replay.backward(package, torch.ones_like(loss), *tensors, labels, saved, options)
    return loss, dq.to(q.dtype), dk.to(k.dtype), dscale, dbias


def _prepare(
    package: Package,
    q: Tensor,
    k: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    labels: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments as the engine wants them (differentiably), or one clear TypeError or ValueError. In a group the
    other ranks learn of it, so that none of them waits for this one."""
    try:
        _check_choices(options)
        return _converted(package, q, k, scale, bias, labels)
    except Exception:  # also torch's own, such as RuntimeError for a device or for want of memory
        if not torch.compiler.is_compiling():
            announce_rejection(package, q, k, labels, options)
        raise


def _converted(
    package: Package,
    q: Tensor,
    k: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    labels: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dim() != 2:
            raise ValueError(f"{name} must have shape (rows, {package.dim}), not {tuple(x.shape)}")
        if x.shape[1] != package.dim:
            raise ValueError(
                f"{name} has embedding dimension {x.shape[1]}, but {package.name} was generated for {package.dim}; "
                f"regenerate it with --dim {x.shape[1]}"
            )
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, not {x.layout}")
    if q.device != k.device:
        raise ValueError(f"q and k must be on one device, not on {q.device} and {k.device}")
    device = q.device.type
    if device != "cuda" and not package.any_device:
        raise ValueError(
            f"{package.name} holds GPU kernels, but q and k are on {device}; generate with --target cpu"
        )
    for name, x in (("q", q), ("k", k)):
        if x.dtype != package.dtype and not (x.is_floating_point() and _autocast_to(package, device)):
            raise ValueError(
                f"{name} has dtype {x.dtype}, but {package.name} was generated for {package.dtype}: cast it, or "
                "regenerate the package with another --dtype"
            )
    if labels is not None:
        _check_labels(package, q, labels)
    scale, bias = (
        _scalar("scale", scale, package, q),
        _scalar("bias", 0.0 if bias is None else bias, package, q),
    )
    return q, k, scale, bias


def _autocast_to(package: Package, device: str) -> bool:
    """Whether features of other dtypes are cast to the package's."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == package.dtype


def _check_labels(package: Package, q: Tensor, labels: Tensor) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be an int64 tensor, not {type(labels).__name__}")
    if not package.labelled:
        raise ValueError(
            f"{package.loss_name} pairs query i with key i: labels are not supported (infonce takes them)"
        )
    if labels.dtype != torch.int64 or labels.shape != q.shape[:1]:
        shape = tuple(labels.shape)
        raise ValueError(
            f"labels must be int64 of shape ({q.shape[0]},), not {labels.dtype} of shape {shape}"
        )
    if labels.device.type != "cpu" and labels.device != q.device:
        raise ValueError(f"labels must be on the host or on {q.device}, not on {labels.device}")


def _scalar(name: str, value: Tensor | float, package: Package, q: Tensor) -> Tensor:
    """A number or 0-dim tensor as a 0-dim tensor of the statistics dtype beside q; differentiable."""
    dtype = package.schedule.STATISTICS_DTYPE
    if isinstance(value, Tensor):
        if value.dim() or value.is_complex() or value.dtype == torch.bool:
            shape = tuple(value.shape)
            raise ValueError(
                f"{name} must be a 0-dim tensor of a real number, not {value.dtype} of shape {shape}"
            )
        return value.to(device=q.device, dtype=dtype, non_blocking=q.is_cuda)
    if type(value) is not float and (  # asking for a real number in general takes 5 us
        isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt))
    ):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, not {type(value).__name__}")
    # Not kept: what is made under a transform of torch.func, or in somebody's graph, is of no use outside of it.
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
    """A number on the device, which nobody writes to: it takes a launch to put it there, of which other streams do not
    know."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def _check_choices(options: Options) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _group_name(group: Any) -> str:
    """The name by which the operators find the group; "" for the default one."""
    if group is None:
        return ""
    if not dist.is_available():
        raise ValueError("group was given, but this torch has no torch.distributed")
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh, not one of {group.ndim} dimensions; pass mesh['name']"
            )
        if group.get_coordinate() is None:
            raise ValueError("this process is not a member of the DeviceMesh that was passed as group")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not a member of the process group that was passed as group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or None, not {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of the process group that was passed as group")
    name: str = group.group_name
    return name


def _place(group_name: str) -> tuple[int, int]:
    """This process's (rank, number of ranks) in a group given by name."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    group = resolve(group_name)
    return dist.get_rank(group), dist.get_world_size(group)


def _package(spec: Mapping[str, Any], loss: ModuleType, schedule: ModuleType) -> Package:
    problem, plan = spec["problem"], spec["plan"]
    batch_size = problem["batch_size"]
    keys = batch_size if problem["keys"] is None else problem["keys"]
    return Package(
        name=spec["name"],
        digest=spec["digest"],
        loss_name=problem["loss"],
        dtype=_DTYPES[problem["dtype"]],
        dim=problem["dim"],
        batch_size=batch_size,
        key_count=keys,
        world_size=plan["world_size"],
        route=planned_route(plan["schedule"]),
        rows_per_rank=plan["rows_per_rank"],
        keys_per_rank=plan["keys_per_rank"],
        any_device=plan["strategy"] == "torch" or INTERPRETED,
        replay=plan["replay"],
        product_precision="tf32" if problem["precision"] == "tf32" else "ieee",
        regenerate=spec["regenerate"],
        loss=loss,
        schedule=schedule,
    )


def _default_device(package: Package) -> str:
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


# Rows, keys, scale: one pair, a small tile, ragged tiles, and a temperature at which a fixed reference would underflow.
_SELFTEST_CASES = ((1, 1, 1.0), (2, 2, 1.0), (64, 64, 14.3), (129, 129, 100.0), (100, 127, 14.3))


def _selftest(package: Package, device: torch.device) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    repeatable = True
    for rows, keys, scale in _SELFTEST_CASES:
        keys = keys if package.labelled else rows
        if rows > package.batch_size or keys > package.key_count:
            continue
        generator = torch.Generator().manual_seed(rows)
        q, k = (
            nn.functional.normalize(
                torch.randn(n, package.dim, generator=generator, dtype=torch.float64), dim=1
            )
            for n in (rows, keys)
        )
        q, k = q.to(device, package.dtype), k.to(device, package.dtype)
        first, second = (_loss_and_grads(package, q, k, scale, None, None, Options(ALONE)) for _ in range(2))
        repeatable &= all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        exact, plain = (_dense(package, q, k, scale, dtype) for dtype in (torch.float64, package.dtype))
        # The size of each result; dscale is a sum of terms of either sign, whose size is that of the terms.
        sizes = [float(torch.linalg.vector_norm(x)) for x in exact]
        sizes[3] = float((q.double() * exact[1]).abs().sum()) / scale
        sizes = [size or 1.0 for size in sizes]  # of a pair alone all of them are zero
        errors, allowed = {}, {}
        names = ("loss", "dq", "dk", "dscale")
        for name, ours, truth, naive, size in zip(names, first, exact, plain, sizes, strict=False):
            errors[name] = _distance(ours, truth) / size
            # Twice what plain torch loses in the same dtype, a few roundings of the result, and the truth's own error.
            rounding = 8.0 * torch.finfo(package.dtype).eps + 8.0 * scale * torch.finfo(torch.float64).eps
            allowed[name] = 2.0 * _distance(naive, truth) / size + rounding
        ok = all(errors[name] <= allowed[name] for name in errors)
        cases.append(
            {"rows": rows, "keys": keys, "scale": scale, "ok": ok, "errors": errors, "allowed": allowed}
        )
    return {
        "ok": repeatable and all(case["ok"] for case in cases),
        "package": package.name,
        "device": str(device),
        "dtype": str(package.dtype).removeprefix("torch."),
        "repeatable": repeatable,
        "cases": cases,
    }


def _dense(package: Package, q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """loss, dq, dk, dscale of the dense reference, computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k)]
    leaves.append(torch.tensor(scale, dtype=dtype, device=q.device, requires_grad=True))
    loss = package.loss.reference(*leaves, dtype=dtype)
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def _distance(value: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double() - truth))
