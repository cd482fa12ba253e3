"""Stand-ins for the libraries that `infcl-gen bench` compares with: their signatures, computed densely by torch.

Written to a folder for PYTHONPATH, so that the adapters call them as they would the real ones. `does` is code that one
of them runs at each call, before it computes. Kernels of some know nothing of autocast: they want what they multiply.
"""

from collections.abc import Mapping
from pathlib import Path

SOURCES = {
    "inf_cl/__init__.py": """
def cal_flash_loss(q, k, labels=None, scale=None, head_dim=256):
    assert q.shape[1] % head_dim == 0 and head_dim in (16, 32, 64, 128, 256)
    does()
    return torch.nn.functional.cross_entropy(scale * q @ k.T, labels, reduction="none")
""",
    "cut_cross_entropy/__init__.py": """
def linear_cross_entropy(e, c, targets, reduction="mean", filter_eps="high"):
    assert filter_eps in ("high", None) and c.requires_grad
    not_under_autocast(e, c)
    does(filter_eps)
    return torch.nn.functional.cross_entropy(e @ c.T, targets, reduction=reduction)
""",
    "liger_kernel/transformers/fused_linear_cross_entropy.py": """
class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(self, accum_dtype=None):
        super().__init__()
        assert accum_dtype in (None, torch.float32)

    def forward(self, lin_weight, _input, target, bias=None):
        assert lin_weight.is_leaf and not _input.is_leaf
        does()
        return torch.nn.functional.cross_entropy(_input @ lin_weight.T, target)
""",
    "liger_kernel/ops/cutedsl/ops/fused_linear_cross_entropy_sm90.py": """
def liger_fused_linear_cross_entropy_sm90(_input, weight, target, ignore_index=-100, reduction="mean"):
    assert weight.is_leaf and not _input.is_leaf
    does()
    return torch.nn.functional.cross_entropy(_input @ weight.T, target)
""",
    "quack/linear_cross_entropy.py": """
def chunked_linear_cross_entropy(
    x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True, use_scaled_exp=None
):
    assert weight.is_leaf and not x.is_leaf and not any(size % 8 for size in (*x.shape, len(weight)))
    does()
    return torch.nn.functional.cross_entropy(x @ weight.T, target)
""",
    "memeff/__init__.py": """
class MemoryEfficientCLIPLoss(torch.nn.Module):
    def __init__(self, temperature=0.07, normalized_inputs=False, stable=True):
        super().__init__()
        assert isinstance(temperature, float) and normalized_inputs and not stable
        self.temperature = temperature

    def forward(self, image_features, text_features):
        does()
        not_under_autocast(image_features, text_features)
        x, own = image_features @ text_features.T / self.temperature, torch.arange(len(image_features))
        cross_entropy = torch.nn.functional.cross_entropy
        return (cross_entropy(x, own) + cross_entropy(x.T, own)) / 2
""",
    # Importing the package itself fails where torchvision is missing; the loss is in a file of its own.
    "open_clip/__init__.py": "import a_module_that_is_not_there\n",
    "open_clip/loss.py": """
class ClipLoss(torch.nn.Module):
    def forward(self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False):
        does()
        x, own = logit_scale * image_features @ text_features.T, torch.arange(len(image_features))
        cross_entropy = torch.nn.functional.cross_entropy
        return (cross_entropy(x, own) + cross_entropy(x.T, own)) / 2


class SigLipLoss(torch.nn.Module):
    def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None):
        super().__init__()
        assert dist_impl in (None, "bidir", "shift", "reduce", "gather")
        self.how = rank, world_size, dist_impl

    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        does(self.how)
        x = logit_scale * image_features @ text_features.T + logit_bias
        labels = 2 * torch.eye(len(x), dtype=x.dtype) - 1
        return -torch.nn.functional.logsigmoid(labels * x).sum() / len(x)
""",
    "siglip_kernel/__init__.py": """
def pairs(q, k, log_temperature, bias, positive):
    not_under_autocast(q, k)
    x = q @ k.T * log_temperature.exp() + bias
    return torch.nn.functional.softplus(torch.where(positive, -x, x)).sum()


def fused_siglip_loss(img_features, txt_features, log_temperature, bias, use_fp8=False, backend="auto"):
    does()
    own = torch.eye(len(img_features), dtype=bool)
    return pairs(img_features, txt_features, log_temperature, bias, own) / len(img_features)


def fused_chunked_bf16_siglip_loss(img_features, txt_features, log_temperature, bias, chunk_size=0, use_fp8=False):
    assert chunk_size == 1024
    return fused_siglip_loss(img_features, txt_features, log_temperature, bias)


def fused_siglip_plus_loss(
    img_features, txt_features, log_temperature, bias, img_gid=None, txt_gid=None, symmetric=True, num_groups=None
):
    does()
    assert 0 <= min(*img_gid, *txt_gid) and max(*img_gid, *txt_gid) < num_groups
    assert len(img_gid.unique()) == len(img_features) and len(txt_gid.unique()) == len(txt_features)
    same = img_gid[:, None] == txt_gid
    return pairs(img_features, txt_features, log_temperature, bias, same) / (len(img_features) * len(txt_features))


class DistributedSigLIPLoss(torch.nn.Module):
    def __init__(self, chunk_size=0, strategy="ring", rank=0, world_size=1, process_group=None, overlap=True):
        super().__init__()
        self.how = rank, world_size, strategy

    def forward(self, image_features, text_features, logit_scale, logit_bias=None):
        does(self.how)
        return fused_siglip_loss(image_features, text_features, logit_scale.log(), logit_bias)
""",
    "pytorch_metric_learning/distances.py": """
class DotProductSimilarity:
    def __init__(self, normalize_embeddings):
        assert not normalize_embeddings
""",
    "pytorch_metric_learning/losses.py": """
class SupConLoss(torch.nn.Module):
    def __init__(self, temperature, distance):
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings, labels, ref_emb=None, ref_labels=None):
        does()
        one_side = ref_emb is None
        k, of_keys = (embeddings, labels) if one_side else (ref_emb, ref_labels)
        x = embeddings @ k.T / self.temperature
        positive = labels[:, None] == of_keys[None, :]
        if one_side:
            itself = torch.eye(len(x), dtype=torch.bool)
            x, positive = x.masked_fill(itself, -torch.inf), positive & ~itself
        of_positives = torch.where(positive, x, 0).sum(1) / positive.sum(1)
        return (x.logsumexp(1) - of_positives).mean()


class NTXentLoss(SupConLoss):
    pass
""",
    "sentence_transformers/util.py": """
def dot_score(a, b):
    return a @ b.T
""",
    "sentence_transformers/losses.py": """
class MultipleNegativesRankingLoss(torch.nn.Module):
    def __init__(
        self, model, scale=20.0, similarity_fct=None, gather_across_devices=False, directions=("query_to_doc",),
        partition_mode="joint",
    ):
        super().__init__()
        assert isinstance(scale, float) and similarity_fct.__name__ == "dot_score"
        assert (len(directions) == 2) == (partition_mode == "per_direction")
        self.scale, self.similarity, self.directions = scale, similarity_fct, directions

    def compute_loss_from_embeddings(self, embeddings, labels):
        does()
        queries, documents = embeddings[0], embeddings[1:]
        x = self.scale * self.similarity(queries, torch.cat(documents))
        if len(self.directions) == 4:
            itself = torch.eye(len(x), dtype=torch.bool)
            alike = [(self.scale * self.similarity(e, e)).masked_fill(itself, -torch.inf) for e in embeddings]
            return (torch.cat((x, x.T, *alike), 1).logsumexp(1) - x.diagonal()).mean()
        own, cross_entropy = torch.arange(len(x)), torch.nn.functional.cross_entropy
        found = [cross_entropy(x if name == "query_to_doc" else x.T, own) for name in self.directions]
        return sum(found) / len(found)
""",
}
NOTHING = "pass"
AUTOCAST = """
def not_under_autocast(*features):
    wanted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else features[0].dtype
    assert all(x.dtype == wanted for x in features), "neither library nor autocast casts them"
"""


def write_libraries(folder: Path, does: Mapping[str, str] | None = None) -> Path:
    """Write them all to `folder`; `does` maps the name of a package to code, in which `given` are extra arguments."""
    for path, source in SOURCES.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for inner in file.parents:
            if inner == folder:
                break
            if not (inner / "__init__.py").exists():
                (inner / "__init__.py").write_text("")
        code = (does or {}).get(path.partition("/")[0], NOTHING)
        file.write_text(f"import os, signal, time\nimport torch\n\ndef does(*given):\n    {code}\n{AUTOCAST}{source}")
    return folder
