"""Who packages are compared with: plain torch, and other libraries as their documentation says to call them.

A peer's `prepare` takes the inputs of one point and returns a function of no arguments that computes the loss; backward
from it is autograd's. Libraries with one direction only are called twice for `clip`, with queries and keys exchanged,
as a user of them would. Features come in the package's dtype; "autocast" means that dtype for products and fp32 for
cross-entropy, as in mixed-precision training, and no autocast at all for fp32 and fp64 features. Where everybody runs
under autocast on fp32 features (`bench.Point.feature_dtype`), those that take 16-bit features only are given them cast.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from infcl_gen.bench.point import Inputs, LossFunction
from infcl_gen.errors import InputError
from infcl_gen.files import load_file
from infcl_gen.inputs.text import show, suggestion
from infcl_gen.losses import is_builtin

CHUNK_ELEMENTS = 1 << 28  # logits of one checkpointed chunk of rows: 1 GiB in fp32
# Libraries that compute something else: named when asked for.
OTHER_LOSSES = {"siglip-kernel": "computes the sigmoid loss, which is not a loss of infcl_gen yet"}


@dataclasses.dataclass(frozen=True)
class Peer:
    """One contestant that is no package; `distribution` and `module` are what must be installed.

    `on_ranks` prepares it for one rank of several, from that rank's inputs, its `rank` and the `world_size`.
    """

    name: str
    prepare: Callable[[Inputs], LossFunction]
    distribution: str = "torch"
    module: str = "torch"
    attribute: str | None = None  # of the module, where not every version has it
    losses: tuple[str, ...] = ("clip", "infonce")
    on_ranks: Callable[..., LossFunction] | None = None

    def absent(self, loss: Mapping[str, Any]) -> str | None:
        """Why it cannot take part here, with a package's loss; or None."""
        name = loss["name"] if is_builtin(loss) else "a loss of your own"
        if name not in self.losses:
            return f"does not compute {name}"
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.distribution} is not installed"
        if self.attribute and not hasattr(importlib.import_module(self.module), self.attribute):
            return f"{self.distribution} {version(self.distribution)} has no {self.module}.{self.attribute}"
        return None


def chosen_peers(names: str | list[str] | None, ranks: int = 1) -> tuple[Peer, ...]:
    """The peers of a comma-separated text or of a list; None and "all" mean every one that runs on so many devices,
    "none" nobody.

    Raises InputError naming --against.
    """
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    able = {name: peer for name, peer in PEERS.items() if ranks == 1 or peer.on_ranks is not None}
    if given is None or given == ["all"]:
        return tuple(able.values())
    if given == ["none"]:
        return ()
    for name in given:
        if name in OTHER_LOSSES:
            raise InputError(f"--against: {name} {OTHER_LOSSES[name]}")
        if name not in PEERS:
            raise InputError(f"--against: {show(name)} is unknown{suggestion(name, [*PEERS, 'all', 'none'])}")
        if name not in able:
            raise InputError(f"--against: {name} runs on one device; on several: {', '.join(able)} or none")
    return tuple(PEERS[name] for name in dict.fromkeys(given))


def _plain(inputs: Inputs) -> LossFunction:
    """`cross_entropy(scale * q @ k.T)` along rows and columns of one matrix, all in the features' dtype, or as autocast
    has it where everybody runs under it."""

    def loss() -> Any:
        x = inputs.scale * inputs.q @ inputs.k.T
        rows = cross_entropy(x, inputs.labels)
        return rows if inputs.directions == 1 else (rows + cross_entropy(x.T, inputs.labels)) / 2

    return loss


def _autocast(inputs: Inputs, compiled: bool = False) -> LossFunction:
    """What OpenCLIP's ClipLoss does in a process of its own, written out: a product and a cross-entropy a direction;
    `compiled` by `torch.compile`, for exactly these shapes."""
    dense = _each_way(inputs, lambda a, b: cross_entropy(inputs.scale * a @ b.T, inputs.labels))
    return _under_autocast(inputs, torch.compile(dense, dynamic=False) if compiled else dense)


def _checkpointed(inputs: Inputs) -> LossFunction:
    """`torch.utils.checkpoint` around chunks of rows of either direction: logits are never kept, and computed twice."""
    from torch.utils.checkpoint import checkpoint

    def chunk(a: Any, b: Any, labels: Any) -> Any:
        return cross_entropy(inputs.scale * a @ b.T, labels, reduction="sum")

    def one_way(a: Any, b: Any) -> Any:
        rows = max(1, CHUNK_ELEMENTS // len(b))
        parts = zip(a.split(rows), inputs.labels.split(rows), strict=True)
        return sum(checkpoint(chunk, part, b, labels, use_reentrant=False) for part, labels in parts) / len(a)

    return _under_autocast(inputs, _each_way(inputs, one_way))


def _linear_cross_entropy(inputs: Inputs) -> LossFunction:
    """`torch.nn.functional.linear_cross_entropy(scale * q, k, labels)`, by chunks where this torch can."""
    linear_cross_entropy = torch.nn.functional.linear_cross_entropy
    chunked = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    options = {} if chunked is None else {"options": chunked()}
    return _each_way(inputs, lambda a, b: linear_cross_entropy(inputs.scale * a, b, inputs.labels, **options))


def _open_clip(inputs: Inputs, compiled: bool = False, **ranks: Any) -> LossFunction:
    """`open_clip.ClipLoss()(image_features, text_features, logit_scale)` under autocast; `compiled` by `torch.compile`,
    for exactly these shapes; on ranks `ClipLoss(local_loss=True, gather_with_grad=True)`. Only its `loss.py` is loaded:
    importing `open_clip` wants torchvision and timm."""
    folder = importlib.util.find_spec("open_clip")
    assert folder is not None and folder.submodule_search_locations
    criterion = load_file(Path(folder.submodule_search_locations[0]) / "loss.py").ClipLoss(**ranks)
    run = torch.compile(criterion, dynamic=False) if compiled else criterion
    return _under_autocast(inputs, lambda: run(*inputs.leaves))


def _inf_cl(inputs: Inputs) -> LossFunction:
    """`inf_cl.cal_flash_loss(q, k, labels, scale, head_dim).mean()`: its kernels for one device, without the ring.

    (`cal_inf_loss` runs the same kernels, wants a process group, and on one device sends a gradient to itself.)
    """
    from inf_cl import cal_flash_loss

    dim = inputs.q.shape[1]
    head_dim = next((size for size in (256, 128, 64, 32, 16) if dim % size == 0), None)
    if head_dim is None:
        raise ValueError(f"D = {dim} is not a multiple of 16, its smallest head_dim")
    each = partial(cal_flash_loss, labels=inputs.labels, scale=inputs.scale, head_dim=head_dim)
    return _each_way(inputs, lambda a, b: each(a, b).mean())


def _inf_cl_on_ranks(inputs: Inputs, rank: int, world_size: int) -> LossFunction:
    """`inf_cl.cal_inf_loss(q, k, scale=scale)`, once for each direction."""
    from inf_cl import cal_inf_loss

    return _each_way(inputs, lambda a, b: cal_inf_loss(a, b, scale=inputs.scale))


def _cut_cross_entropy(inputs: Inputs, **options: Any) -> LossFunction:
    """`linear_cross_entropy(scale * q, k, labels)`: by default it leaves small probabilities out of gradients; with
    `filter_eps=None` every probability counts."""
    from cut_cross_entropy import linear_cross_entropy

    def one_way(*both: Any) -> Any:
        a, b = (x.to(inputs.dtype) for x in both)
        return linear_cross_entropy(inputs.scale * a, b, inputs.labels, **options)

    return _each_way(inputs, one_way)


def _liger(inputs: Inputs, **options: Any) -> LossFunction:
    """`LigerFusedLinearCrossEntropyLoss()(k, scale * q, labels)`: gradients are computed in forward, chunk by chunk;
    those of k are added up over the chunks in the dtype of the features, or in `accum_dtype`: fp32, as here."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    criterion = LigerFusedLinearCrossEntropyLoss(**options)
    return _each_way(inputs, lambda a, b: criterion(b, inputs.scale * a, inputs.labels))


def _quack(inputs: Inputs) -> LossFunction:
    """`chunked_linear_cross_entropy(scale * q, k, labels)`: gradients are computed in forward, chunk by chunk; those of
    k are added up in fp32. On Hopper, in bf16, its fused backward, which it chooses by itself."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    sizes = {"B": len(inputs.q), "N": len(inputs.k), "D": inputs.q.shape[1]}
    if odd := [f"{name} = {size}" for name, size in sizes.items() if size % 8]:
        raise ValueError(f"{', '.join(odd)}: not a multiple of 8, as its products want")
    return _each_way(inputs, lambda a, b: chunked_linear_cross_entropy(inputs.scale * a, b, inputs.labels))


def _memeff(inputs: Inputs) -> LossFunction:
    """`MemoryEfficientCLIPLoss(1 / scale, normalized_inputs=True, stable=False)(q, k)`: no gradient of the scale.

    (Its default, `stable=True`, returns gradients times a factor that depends on the batch.)
    """
    from memeff import MemoryEfficientCLIPLoss

    criterion = MemoryEfficientCLIPLoss(temperature=1 / inputs.scale.item(), normalized_inputs=True, stable=False)
    return lambda: criterion(inputs.q.to(inputs.dtype), inputs.k.to(inputs.dtype))


def _each_way(inputs: Inputs, one_way: Callable[[Any, Any], Any]) -> LossFunction:
    """A loss of one direction, for one or for the mean of both."""
    q, k = inputs.q, inputs.k
    return lambda: one_way(q, k) if inputs.directions == 1 else (one_way(q, k) + one_way(k, q)) / 2


def _under_autocast(inputs: Inputs, loss: LossFunction) -> LossFunction:
    narrow = inputs.dtype in (torch.bfloat16, torch.float16)
    run: LossFunction = torch.autocast(inputs.q.device.type, dtype=inputs.dtype)(loss) if narrow else loss
    return run


_OPEN_CLIP = ("open_clip_torch", "open_clip", None, ("clip",))
_CUT = ("cut-cross-entropy", "cut_cross_entropy")
_LIGER = ("liger-kernel", "liger_kernel")
_TORCH_LOSS = ("torch", "torch.nn.functional", "linear_cross_entropy")
_ALL = (
    Peer("torch", _plain),
    Peer("torch-autocast", _autocast),
    Peer("torch-compiled", partial(_autocast, compiled=True)),
    Peer("torch-checkpoint", _checkpointed),
    Peer("torch-linear-cross-entropy", _linear_cross_entropy, *_TORCH_LOSS),
    Peer("open_clip", _open_clip, *_OPEN_CLIP, partial(_open_clip, local_loss=True, gather_with_grad=True)),
    Peer("open_clip-compiled", partial(_open_clip, compiled=True), *_OPEN_CLIP),
    Peer("inf_cl", _inf_cl, "inf_cl", "inf_cl", on_ranks=_inf_cl_on_ranks),
    Peer("cut-cross-entropy", _cut_cross_entropy, *_CUT),
    Peer("cut-cross-entropy-exact", partial(_cut_cross_entropy, filter_eps=None), *_CUT),
    Peer("liger-kernel", _liger, *_LIGER),
    Peer("liger-kernel-fp32-sums", partial(_liger, accum_dtype=torch.float32), *_LIGER),
    Peer("quack", _quack, "quack-kernels", "quack"),
    Peer("memeff", _memeff, "memeff", "memeff", losses=("clip",)),
)
PEERS = {peer.name: peer for peer in _ALL}
