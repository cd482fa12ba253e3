"""The contestants beside packages: plain torch, and other libraries as their documentation says to call them.

A peer's `prepare` takes a point's inputs and returns a function that computes the loss; autograd runs backward. For
`clip`, libraries with one direction are called twice, with queries and keys exchanged. "autocast" means products in the
package's dtype and cross-entropy in fp32; for fp32 and fp64 features there is none. Where all contestants run under
autocast on fp32 features (`Point.feature_dtype`), libraries for 16-bit features get them cast.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from infcl_gen.bench.point import Inputs, LossFunction, own_ids
from infcl_gen.errors import InputError
from infcl_gen.files import load_file
from infcl_gen.inputs.text import one_line, show, suggestion
from infcl_gen.losses import is_builtin

CHUNK_ELEMENTS = 1 << 28  # logits of one checkpointed chunk of rows: 1 GiB in fp32


@dataclasses.dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[[Inputs], LossFunction] | None  # None: runs on several devices only
    distribution: str = "torch"
    module: str = "torch"
    attribute: str | None = None  # of the module, if not every version has it
    losses: tuple[str, ...] = ("clip", "infonce")
    on_ranks: Callable[..., LossFunction] | None = None  # `prepare` for one rank: also takes `rank` and `world_size`

    def absent(self, loss: Mapping[str, Any]) -> str | None:
        """Why the peer cannot compute a package's loss here, or None."""
        name = loss["name"] if is_builtin(loss) else "a loss of your own"
        if name not in self.losses:
            return f"does not compute {name}"
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.distribution} is not installed"
        if self.attribute is None:
            return None
        try:
            found = hasattr(importlib.import_module(self.module), self.attribute)
        except ImportError as error:
            found, why = False, one_line(error)
        else:
            why = f"it has no {self.module}.{self.attribute}"
        return None if found else f"{self.distribution} {version(self.distribution)}: {why}"


def chosen_peers(names: str | list[str] | None, ranks: int = 1) -> tuple[Peer, ...]:
    """Peers by name, from a list or a comma-separated text. None and "all" mean all that run on `ranks`, "none" nobody.

    Raises InputError naming --against.
    """
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    able = {name: peer for name, peer in PEERS.items() if (peer.prepare if ranks == 1 else peer.on_ranks) is not None}
    if given is None or given == ["all"]:
        return tuple(able.values())
    if given == ["none"]:
        return ()
    for name in given:
        if name in ("all", "none"):
            raise InputError(f"--against: {name} stands alone")
        if name not in PEERS:
            raise InputError(f"--against: {show(name)} is unknown{suggestion(name, [*PEERS, 'all', 'none'])}")
        if name not in able:
            here, there = ("several devices", "one") if ranks == 1 else ("one device", "several")
            raise InputError(f"--against: {name} runs on {here}; on {there}: {', '.join(able)} or none")
    return tuple(PEERS[name] for name in dict.fromkeys(given))


def _plain(inputs: Inputs) -> LossFunction:
    """`cross_entropy(scale * q @ k.T)` along rows and columns of one matrix, in the features' dtype."""

    def loss() -> Any:
        x = inputs.scale * inputs.q @ inputs.k.T
        rows = cross_entropy(x, inputs.labels)
        return rows if inputs.directions == 1 else (rows + cross_entropy(x.T, inputs.labels)) / 2

    return loss


def _autocast(inputs: Inputs, compiled: bool = False) -> LossFunction:
    """OpenCLIP's ClipLoss written out: per direction a product and a cross-entropy, under autocast; `compiled` by
    `torch.compile` for static shapes."""
    dense = _each_way(inputs, lambda a, b: cross_entropy(inputs.scale * a @ b.T, inputs.labels))
    return _under_autocast(inputs, torch.compile(dense, dynamic=False) if compiled else dense)


def _checkpointed(inputs: Inputs) -> LossFunction:
    """`torch.utils.checkpoint` around chunks of rows: logits are computed twice and never kept."""
    from torch.utils.checkpoint import checkpoint

    def chunk(a: Any, b: Any, labels: Any) -> Any:
        return cross_entropy(inputs.scale * a @ b.T, labels, reduction="sum")

    def one_way(a: Any, b: Any) -> Any:
        rows = max(1, CHUNK_ELEMENTS // len(b))
        parts = zip(a.split(rows), inputs.labels.split(rows), strict=True)
        return sum(checkpoint(chunk, part, b, labels, use_reentrant=False) for part, labels in parts) / len(a)

    return _under_autocast(inputs, _each_way(inputs, one_way))


def _linear_cross_entropy(inputs: Inputs) -> LossFunction:
    """`torch.nn.functional.linear_cross_entropy(scale * q, k, labels)`, in chunks where this torch can."""
    linear_cross_entropy = torch.nn.functional.linear_cross_entropy
    chunked = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    options = {} if chunked is None else {"options": chunked()}
    return _each_way(inputs, lambda a, b: linear_cross_entropy(inputs.scale * a, b, inputs.labels, **options))


def _open_clip(inputs: Inputs, compiled: bool = False, **ranks: Any) -> LossFunction:
    """`open_clip.ClipLoss()(image_features, text_features, logit_scale)` under autocast; `compiled` by `torch.compile`
    for static shapes; on ranks `ClipLoss(local_loss=True, gather_with_grad=True)`."""
    criterion = _open_clip_losses().ClipLoss(**ranks)
    run = torch.compile(criterion, dynamic=False) if compiled else criterion
    return _under_autocast(inputs, lambda: run(*inputs.leaves))


def _open_clip_siglip(inputs: Inputs, compiled: bool = False, **ranks: Any) -> LossFunction:
    """`open_clip.SigLipLoss()(image_features, text_features, logit_scale, logit_bias)` under autocast; `compiled` by
    `torch.compile` for static shapes; on ranks by each `dist_impl`. Its labels are a matrix like the logits."""
    criterion = _open_clip_losses().SigLipLoss(**ranks)
    run = torch.compile(criterion, dynamic=False) if compiled else criterion
    return _under_autocast(inputs, lambda: run(*inputs.leaves, inputs.bias))


def _open_clip_losses() -> Any:
    folder = importlib.util.find_spec("open_clip")
    assert folder is not None and folder.submodule_search_locations
    # Only loss.py is loaded: importing `open_clip` needs torchvision and timm.
    return load_file(Path(folder.submodule_search_locations[0]) / "loss.py")


def _siglip_kernel(inputs: Inputs, chunk_size: int | None = None) -> LossFunction:
    """`fused_siglip_loss(q, k, scale.log(), bias)`, which chooses kernels by dtype: those for 16 bits compute gradients
    in forward, chunk by chunk, and add dk up in the features' dtype. A `chunk_size` names these kernels."""
    import siglip_kernel

    each: Any = siglip_kernel.fused_siglip_loss
    if chunk_size is not None:
        each = partial(siglip_kernel.fused_chunked_bf16_siglip_loss, chunk_size=chunk_size)
    return lambda: each(*_narrow(inputs), inputs.scale.log(), inputs.bias)


def _siglip_kernel_on_ranks(inputs: Inputs, **options: Any) -> LossFunction:
    """`DistributedSigLIPLoss(strategy=...)(q, k, scale, bias)`: chunks as on one device."""
    from siglip_kernel import DistributedSigLIPLoss

    criterion = DistributedSigLIPLoss(**options)
    return lambda: criterion(*_narrow(inputs), inputs.scale, inputs.bias)


def _siglip_plus(inputs: Inputs) -> LossFunction:
    """`fused_siglip_plus_loss(q, k, scale.log(), bias, query_ids, key_ids)`, times the keys, by which it divides.

    It weighs a positive by the number of positives, which is 1 for the ids measured here.
    """
    from siglip_kernel import fused_siglip_plus_loss

    ids = own_ids(inputs.q, inputs.k)
    groups = max(len(inputs.q), len(inputs.k))  # named, they cost no wait for the device
    each = partial(fused_siglip_plus_loss, img_gid=ids["query_ids"], txt_gid=ids["key_ids"], num_groups=groups)
    return lambda: each(*_narrow(inputs), inputs.scale.log(), inputs.bias) * len(inputs.k)


def _sentence_transformers(inputs: Inputs) -> LossFunction:
    """`MultipleNegativesRankingLoss(model, scale, similarity_fct=dot_score)` of embeddings under autocast, for both
    directions with `partition_mode="per_direction"`, for all four of rows in pairs in one softmax: no gradient of the
    scale."""
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    q, k = inputs.q.chunk(2) if inputs.k is None else (inputs.q, inputs.k)
    queries, keys = len(q), len(k)
    if keys < queries:
        raise ValueError(f"N = {keys} keys for B = {queries} queries: it takes a positive of its own for each query")
    both, options = ("query_to_doc", "doc_to_query"), dict[str, Any]()
    if inputs.k is None:
        options = {"directions": (*both, "query_to_query", "doc_to_doc"), "partition_mode": "joint"}
    elif inputs.directions == 2:
        options = {"directions": both, "partition_mode": "per_direction"}
    criterion = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=inputs.scale.item(), similarity_fct=dot_score, **options
    )
    documents = [part for part in (k[:queries], k[queries:]) if len(part)]
    return _under_autocast(inputs, lambda: criterion.compute_loss_from_embeddings([q, *documents], None))


def _inf_cl(inputs: Inputs) -> LossFunction:
    """`inf_cl.cal_flash_loss(q, k, labels, scale, head_dim).mean()`: the kernels without the ring.

    `cal_inf_loss` needs a process group, and on one device sends a gradient to itself.
    """
    from inf_cl import cal_flash_loss

    dim = inputs.q.shape[1]
    head_dim = next((size for size in (256, 128, 64, 32, 16) if dim % size == 0), None)
    if head_dim is None:
        raise ValueError(f"D = {dim} is not a multiple of 16, its smallest head_dim")
    each = partial(cal_flash_loss, labels=inputs.labels, scale=inputs.scale, head_dim=head_dim)
    return _each_way(inputs, lambda a, b: each(a, b).mean())


def _inf_cl_on_ranks(inputs: Inputs, rank: int, world_size: int) -> LossFunction:
    """`inf_cl.cal_inf_loss(q, k, scale=scale)`, once per direction."""
    from inf_cl import cal_inf_loss

    return _each_way(inputs, lambda a, b: cal_inf_loss(a, b, scale=inputs.scale))


def _cut_cross_entropy(inputs: Inputs, **options: Any) -> LossFunction:
    """`linear_cross_entropy(scale * q, k, labels)`: gradients omit small probabilities, unless `filter_eps=None`."""
    from cut_cross_entropy import linear_cross_entropy

    def one_way(*both: Any) -> Any:
        a, b = (x.to(inputs.dtype) for x in both)
        return linear_cross_entropy(inputs.scale * a, b, inputs.labels, **options)

    return _each_way(inputs, one_way)


def _liger(inputs: Inputs, **options: Any) -> LossFunction:
    """`LigerFusedLinearCrossEntropyLoss()(k, scale * q, labels)`: forward computes gradients, chunk by chunk. dk is
    added up in the features' dtype, or in `accum_dtype`."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    criterion = LigerFusedLinearCrossEntropyLoss(**options)
    return _each_way(inputs, lambda a, b: criterion(b, inputs.scale * a, inputs.labels))


def _liger_cute(inputs: Inputs) -> LossFunction:
    """`liger_fused_linear_cross_entropy_sm90(scale * q, k, labels)`: CuTe kernels for Hopper and bf16, which keep a
    matrix of all logits until backward."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return _each_way(inputs, lambda a, b: liger_fused_linear_cross_entropy_sm90(inputs.scale * a, b, inputs.labels))


def _quack(inputs: Inputs) -> LossFunction:
    """`chunked_linear_cross_entropy(scale * q, k, labels)`: forward computes gradients, chunk by chunk; dk is added up
    in fp32. On Hopper, in bf16, quack chooses its fused backward."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    sizes = {"B": len(inputs.q), "N": len(inputs.k), "D": inputs.q.shape[1]}
    if odd := [f"{name} = {size}" for name, size in sizes.items() if size % 8]:
        raise ValueError(f"{', '.join(odd)}: not a multiple of 8, as its products want")
    return _each_way(inputs, lambda a, b: chunked_linear_cross_entropy(inputs.scale * a, b, inputs.labels))


def _memeff(inputs: Inputs) -> LossFunction:
    """`MemoryEfficientCLIPLoss(1 / scale, normalized_inputs=True, stable=False)(q, k)`: no gradient of the scale.

    With the default, `stable=True`, gradients are off by a factor that depends on the batch.
    """
    from memeff import MemoryEfficientCLIPLoss

    criterion = MemoryEfficientCLIPLoss(temperature=1 / inputs.scale.item(), normalized_inputs=True, stable=False)
    return lambda: criterion(*_narrow(inputs))


def _simclr(inputs: Inputs, compiled: bool = False) -> LossFunction:
    """SimCLR's loss written out: a product, its diagonal filled, and a cross-entropy, under autocast; `compiled` by
    `torch.compile` for static shapes."""

    def dense() -> Any:
        itself = torch.eye(len(inputs.q), dtype=torch.bool, device=inputs.q.device)
        x = (inputs.scale * inputs.q @ inputs.q.T).masked_fill(itself, float("-inf"))
        return cross_entropy(x, inputs.labels)

    return _under_autocast(inputs, torch.compile(dense, dynamic=False) if compiled else dense)


def _four_blocks(inputs: Inputs, compiled: bool = False) -> LossFunction:
    """GTE's loss of rows in pairs written out: a product, its diagonal filled, and the log-sum-exps of both rows of a
    pair, under autocast; `compiled` by `torch.compile` for static shapes."""

    def dense() -> Any:
        itself = torch.eye(len(inputs.q), dtype=torch.bool, device=inputs.q.device)
        x = inputs.scale * inputs.q @ inputs.q.T
        x = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(itself, float("-inf"))
        r = x.logsumexp(1)
        p = x.gather(1, inputs.labels[:, None])[:, 0]
        return (torch.logaddexp(r, r[inputs.labels]) - p).mean()

    return _under_autocast(inputs, torch.compile(dense, dynamic=False) if compiled else dense)


def _lightly(inputs: Inputs) -> LossFunction:
    """`lightly.loss.NTXentLoss(temperature)(first, second)` of the views of each sample, under autocast. Its scale is a
    number, and has no gradient."""
    from lightly.loss import NTXentLoss

    run = NTXentLoss(temperature=1 / float(inputs.scale))
    return _under_autocast(inputs, lambda: run(*inputs.q.chunk(2)))


def _supcon(inputs: Inputs, compiled: bool = False) -> LossFunction:
    """SupCon's outer form for ids: a product, its diagonal filled, log-softmax, and the mean over positives,
    under autocast; `compiled` by `torch.compile` for static shapes."""
    ids = own_ids(inputs.q, None)["query_ids"]

    def dense() -> Any:
        itself = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        positive = (ids[:, None] == ids[None, :]) & ~itself
        x = inputs.scale * inputs.q @ inputs.q.T
        x = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(itself, float("-inf"))
        of_positives = torch.where(positive, x - x.logsumexp(1, keepdim=True), 0.0).sum(1)
        return -(of_positives / positive.sum(1)).mean()

    return _under_autocast(inputs, torch.compile(dense, dynamic=False) if compiled else dense)


def _metric_learning(inputs: Inputs, name: str = "NTXentLoss") -> LossFunction:
    """`pytorch_metric_learning.losses`' loss of this name: `(temperature)(q, labels)`, where two rows have each label,
    or `(q, ids, ref_emb=k, ref_labels=ids)`, under autocast. Its scale is a number, and has no gradient. Features are
    not normalised again, which would change dq."""
    from pytorch_metric_learning import distances, losses

    product = distances.DotProductSimilarity(normalize_embeddings=False)
    run, q, k = getattr(losses, name)(temperature=1 / inputs.scale.item(), distance=product), inputs.q, inputs.k
    if k is not None:
        ids = own_ids(q, k)
        return _under_autocast(inputs, lambda: run(q, ids["query_ids"], ref_emb=k, ref_labels=ids["key_ids"]))
    views = torch.arange(len(q), device=q.device) % (len(q) // 2)
    of_rows = views if name == "NTXentLoss" else own_ids(q, None)["query_ids"]
    return _under_autocast(inputs, lambda: run(q, of_rows))


def _narrow(inputs: Inputs) -> tuple[Any, Any]:
    """Queries and keys in the products' dtype, for kernels that know nothing of autocast."""
    return inputs.q.to(inputs.dtype), inputs.k.to(inputs.dtype)


def _each_way(inputs: Inputs, one_way: Callable[[Any, Any], Any]) -> LossFunction:
    """The loss of one direction, or the mean of both, from a loss of one direction."""
    q, k = inputs.q, inputs.k
    return lambda: one_way(q, k) if inputs.directions == 1 else (one_way(q, k) + one_way(k, q)) / 2


def _under_autocast(inputs: Inputs, loss: LossFunction) -> LossFunction:
    narrow = inputs.dtype in (torch.bfloat16, torch.float16)
    run: LossFunction = torch.autocast(inputs.q.device.type, dtype=inputs.dtype)(loss) if narrow else loss
    return run


_OPEN_CLIP = ("open_clip_torch", "open_clip", None, ("clip",))
_OPEN_CLIP_SIGLIP = ("open_clip_torch", "open_clip", None, ("siglip",))
_SIGLIP_KERNEL = ("siglip-kernel", "siglip_kernel", None, ("siglip",))
_CUT = ("cut-cross-entropy", "cut_cross_entropy")
_LIGER = ("liger-kernel", "liger_kernel")
_LIGER_CUTE = (
    *("liger-kernel", "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"),
    "liger_fused_linear_cross_entropy_sm90",
)
_SENTENCE_TRANSFORMERS = ("sentence-transformers", "sentence_transformers")
_METRIC_LEARNING = ("pytorch-metric-learning", "pytorch_metric_learning", None)
_TORCH_LOSS = ("torch", "torch.nn.functional", "linear_cross_entropy")
_PEERS = (
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
    Peer("liger-kernel-cute", _liger_cute, *_LIGER_CUTE),
    Peer(
        "sentence-transformers",
        _sentence_transformers,
        *_SENTENCE_TRANSFORMERS,
        None,
        ("clip", "infonce", "four_block"),
    ),
    Peer("quack", _quack, "quack-kernels", "quack"),
    Peer("memeff", _memeff, "memeff", "memeff", losses=("clip",)),
    Peer("open_clip-siglip", _open_clip_siglip, *_OPEN_CLIP_SIGLIP),
    Peer("open_clip-siglip-compiled", partial(_open_clip_siglip, compiled=True), *_OPEN_CLIP_SIGLIP),
    *(
        Peer(f"open_clip-siglip-{each}", None, *_OPEN_CLIP_SIGLIP, partial(_open_clip_siglip, dist_impl=each))
        for each in ("bidir", "shift", "reduce", "gather")
    ),
    Peer("siglip-kernel", _siglip_kernel, *_SIGLIP_KERNEL),
    Peer("siglip-kernel-smallest", partial(_siglip_kernel, chunk_size=1024), *_SIGLIP_KERNEL),
    *(
        Peer(f"siglip-kernel-{each}", None, *_SIGLIP_KERNEL, partial(_siglip_kernel_on_ranks, strategy=each))
        for each in ("ring", "gather")
    ),
    Peer("torch-simclr", _simclr, losses=("ntxent",)),
    Peer("torch-simclr-compiled", partial(_simclr, compiled=True), losses=("ntxent",)),
    Peer("lightly", _lightly, "lightly", "lightly", losses=("ntxent",)),
    Peer("pytorch-metric-learning", _metric_learning, *_METRIC_LEARNING, ("ntxent",)),
    Peer("torch-four-blocks", _four_blocks, losses=("four_block",)),
    Peer("torch-four-blocks-compiled", partial(_four_blocks, compiled=True), losses=("four_block",)),
    Peer("torch-supcon", _supcon, losses=("supcon_out",)),
    Peer("torch-supcon-compiled", partial(_supcon, compiled=True), losses=("supcon_out",)),
    Peer(
        "pytorch-metric-learning-supcon",
        partial(_metric_learning, name="SupConLoss"),
        *_METRIC_LEARNING,
        ("supcon_out", "infonce_out"),
    ),
    Peer("siglip-kernel-plus", _siglip_plus, *_SIGLIP_KERNEL[:3], ("siglip_multi",)),
)
PEERS = {peer.name: peer for peer in _PEERS}
