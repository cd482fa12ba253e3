"""Who packages are compared with: plain torch, and other libraries as their documentation says to call them.

A peer's `prepare` takes the inputs of one point and returns a function of no arguments that computes the loss; backward
from it is autograd's. Libraries with one direction only are called twice for `clip`, with queries and keys exchanged,
as a user of them would. Features come in the package's dtype; "autocast" means that dtype for products and fp32 for
cross-entropy, as in mixed-precision training, and no autocast at all for fp32 and fp64 features. Where everybody runs
under autocast on fp32 features (`bench.Point.feature_dtype`), those that take 16-bit features only are given them cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from infcl_gen.errors import InputError

CHUNK_ELEMENTS = 1 << 28  # logits of one checkpointed chunk of rows: 1 GiB in fp32
# Libraries that compute something else: named when asked for.
OTHER_LOSSES = {"siglip-kernel": "computes the sigmoid loss, which is not a loss of infcl_gen yet"}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What everybody computes with: q (M, D), k (N, D), a 0-dim scale, all asking for gradients; labels (M,) int64.

    `directions` is 2 for clip, where M = N and labels are 0, 1, ..., M - 1; and 1 for infonce. `dtype` is what products
    are computed in: that of q and k, unless everybody runs under autocast.
    """

    q: Any
    k: Any
    scale: Any
    labels: Any
    directions: int
    dtype: Any


LossFunction = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One contestant that is no package; `distribution` and `module` are what must be installed."""

    name: str
    prepare: Callable[[Inputs], LossFunction]
    distribution: str = "torch"
    module: str = "torch"
    attribute: str | None = None  # of the module, where not every version has it
    losses: tuple[str, ...] = ("clip", "infonce")

    def absent(self) -> str | None:
        """Why it cannot take part here, or None."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.distribution} is not installed"
        if self.attribute and not hasattr(importlib.import_module(self.module), self.attribute):
            return f"{self.distribution} {self.version()} has no {self.module}.{self.attribute}"
        return None

    def version(self) -> str:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.distribution)
        return "unknown"


def chosen_peers(names: str | list[str] | None) -> tuple[Peer, ...]:
    """The peers of a comma-separated text or of a list; None and "all" mean every one, "none" nobody.

    Raises InputError naming --against.
    """
    from infcl_gen.inputs.text import show, suggestion

    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    if given is None or given == ["all"]:
        return tuple(PEERS.values())
    if given == ["none"]:
        return ()
    for name in given:
        if name in OTHER_LOSSES:
            raise InputError(f"--against: {name} {OTHER_LOSSES[name]}")
        if name not in PEERS:
            raise InputError(f"--against: {show(name)} is unknown{suggestion(name, [*PEERS, 'all', 'none'])}")
    return tuple(PEERS[name] for name in dict.fromkeys(given))


def _plain(inputs: Inputs) -> LossFunction:
    """`cross_entropy(scale * q @ k.T)` along rows and columns of one matrix, all in the features' dtype, or as autocast
    has it where everybody runs under it."""
    from torch.nn.functional import cross_entropy

    def loss() -> Any:
        x = inputs.scale * inputs.q @ inputs.k.T
        rows = cross_entropy(x, inputs.labels)
        return rows if inputs.directions == 1 else (rows + cross_entropy(x.T, inputs.labels)) / 2

    return loss


def _autocast(inputs: Inputs) -> LossFunction:
    """What OpenCLIP's ClipLoss does in a process of its own, written out: a product and a cross-entropy a direction."""
    return _under_autocast(inputs, lambda: _dense(inputs.q, inputs.k, inputs.scale, inputs.labels, inputs.directions))


def _compiled(inputs: Inputs) -> LossFunction:
    """The same by `torch.compile`, for exactly these shapes."""
    import torch

    dense = torch.compile(_dense, dynamic=False)
    return _under_autocast(inputs, lambda: dense(inputs.q, inputs.k, inputs.scale, inputs.labels, inputs.directions))


def _checkpointed(inputs: Inputs) -> LossFunction:
    """`torch.utils.checkpoint` around chunks of rows of either direction: logits are never kept, and computed twice."""
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    def chunk(a: Any, b: Any, labels: Any) -> Any:
        return cross_entropy(inputs.scale * a @ b.T, labels, reduction="sum")

    def one_way(a: Any, b: Any) -> Any:
        rows = max(1, CHUNK_ELEMENTS // len(b))
        parts = zip(a.split(rows), inputs.labels.split(rows), strict=True)
        return sum(checkpoint(chunk, part, b, labels, use_reentrant=False) for part, labels in parts) / len(a)

    return _under_autocast(inputs, _each_way(inputs, one_way))


def _open_clip(inputs: Inputs) -> LossFunction:
    """`open_clip.ClipLoss()(image_features, text_features, logit_scale)` under autocast."""
    criterion = open_clip_loss().ClipLoss()
    return _under_autocast(inputs, lambda: criterion(inputs.q, inputs.k, inputs.scale))


def _open_clip_compiled(inputs: Inputs) -> LossFunction:
    """The same module by `torch.compile`, for exactly these shapes."""
    import torch

    criterion = torch.compile(open_clip_loss().ClipLoss(), dynamic=False)
    return _under_autocast(inputs, lambda: criterion(inputs.q, inputs.k, inputs.scale))


def _inf_cl(inputs: Inputs) -> LossFunction:
    """`inf_cl.cal_flash_loss(q, k, labels, scale, head_dim).mean()`: its kernels for one device, without the ring.

    (`cal_inf_loss` runs the same kernels, wants a process group, and on one device sends a gradient to itself.)
    """
    from inf_cl import cal_flash_loss

    dim = inputs.q.shape[1]
    head_dim = next((size for size in (256, 128, 64, 32, 16) if dim % size == 0), None)
    if head_dim is None:
        raise ValueError(f"D = {dim} is not a multiple of 16, its smallest head_dim")

    def one_way(a: Any, b: Any) -> Any:
        return cal_flash_loss(a, b, inputs.labels, inputs.scale, head_dim=head_dim).mean()

    return _each_way(inputs, one_way)


def _cut_cross_entropy(inputs: Inputs, **options: Any) -> LossFunction:
    """`linear_cross_entropy(scale * q, k, labels)`: by default it leaves small probabilities out of gradients."""
    from cut_cross_entropy import linear_cross_entropy

    def one_way(a: Any, b: Any) -> Any:
        return linear_cross_entropy(inputs.scale * a, b, inputs.labels, **options)

    return _each_way(inputs, one_way, cast=True)


def _cut_cross_entropy_exact(inputs: Inputs) -> LossFunction:
    """The same with `filter_eps=None`: every probability counts."""
    return _cut_cross_entropy(inputs, filter_eps=None)


def _liger(inputs: Inputs, **options: Any) -> LossFunction:
    """`LigerFusedLinearCrossEntropyLoss()(k, scale * q, labels)`: gradients are computed in forward, chunk by chunk;
    those of k are added up over the chunks in the dtype of the features."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    criterion = LigerFusedLinearCrossEntropyLoss(**options)
    return _each_way(inputs, lambda a, b: criterion(b, inputs.scale * a, inputs.labels))


def _liger_fp32_sums(inputs: Inputs) -> LossFunction:
    """The same with `accum_dtype=torch.float32`: added up in fp32, as this project does."""
    import torch

    return _liger(inputs, accum_dtype=torch.float32)


def _memeff(inputs: Inputs) -> LossFunction:
    """`MemoryEfficientCLIPLoss(1 / scale, normalized_inputs=True, stable=False)(q, k)`: no gradient of the scale.

    (Its default, `stable=True`, returns gradients times a factor that depends on the batch.)
    """
    from memeff import MemoryEfficientCLIPLoss

    criterion = MemoryEfficientCLIPLoss(temperature=1 / inputs.scale.item(), normalized_inputs=True, stable=False)
    return lambda: criterion(inputs.q.to(inputs.dtype), inputs.k.to(inputs.dtype))


def _linear_cross_entropy(inputs: Inputs) -> LossFunction:
    """`torch.nn.functional.linear_cross_entropy(scale * q, k, labels)`, by chunks where this torch can."""
    import torch
    from torch.nn import functional

    linear_cross_entropy = functional.linear_cross_entropy
    chunked = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    options = {} if chunked is None else {"options": chunked()}
    return _each_way(inputs, lambda a, b: linear_cross_entropy(inputs.scale * a, b, inputs.labels, **options))


def _dense(q: Any, k: Any, scale: Any, labels: Any, directions: int) -> Any:
    from torch.nn.functional import cross_entropy

    rows = cross_entropy(scale * q @ k.T, labels)
    return rows if directions == 1 else (rows + cross_entropy(scale * k @ q.T, labels)) / 2


def _each_way(inputs: Inputs, one_way: Callable[[Any, Any], Any], cast: bool = False) -> LossFunction:
    """A loss of one direction, for one or for the mean of both; of features in the packages' dtype with `cast`."""

    def loss() -> Any:
        q, k = (x.to(inputs.dtype) if cast else x for x in (inputs.q, inputs.k))
        return one_way(q, k) if inputs.directions == 1 else (one_way(q, k) + one_way(k, q)) / 2

    return loss


def _under_autocast(inputs: Inputs, loss: LossFunction) -> LossFunction:
    import torch

    dtype = inputs.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return loss

    def under_autocast() -> Any:
        with torch.autocast(inputs.q.device.type, dtype=dtype):
            return loss()

    return under_autocast


def open_clip_loss() -> ModuleType:
    """The installed package's `loss.py`; importing `open_clip` itself wants torchvision and timm, which it does not."""
    folder = importlib.util.find_spec("open_clip")
    assert folder is not None and folder.submodule_search_locations
    file = f"{folder.submodule_search_locations[0]}/loss.py"
    specification = importlib.util.spec_from_file_location("open_clip_loss", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", _plain),
        Peer("torch-autocast", _autocast),
        Peer("torch-compiled", _compiled),
        Peer("torch-checkpoint", _checkpointed),
        Peer(
            "torch-linear-cross-entropy",
            _linear_cross_entropy,
            module="torch.nn.functional",
            attribute="linear_cross_entropy",
        ),
        Peer("open_clip", _open_clip, "open_clip_torch", "open_clip", losses=("clip",)),
        Peer("open_clip-compiled", _open_clip_compiled, "open_clip_torch", "open_clip", losses=("clip",)),
        Peer("inf_cl", _inf_cl, "inf_cl", "inf_cl"),
        Peer("cut-cross-entropy", _cut_cross_entropy, "cut-cross-entropy", "cut_cross_entropy"),
        Peer("cut-cross-entropy-exact", _cut_cross_entropy_exact, "cut-cross-entropy", "cut_cross_entropy"),
        Peer("liger-kernel", _liger, "liger-kernel", "liger_kernel"),
        Peer("liger-kernel-fp32-sums", _liger_fp32_sums, "liger-kernel", "liger_kernel"),
        Peer("memeff", _memeff, "memeff", "memeff", losses=("clip",)),
    )
}
