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
