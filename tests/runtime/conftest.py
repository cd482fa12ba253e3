"""Packages to run the runtime in: generated once per session, for the CPU."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import infcl_gen
from infcl_gen.verification.oracle import Inputs
from infcl_gen.verification.properties import Case
from tests.kernels.planted import Edit, plant
from tests.runtime.pool import Pool, results
from tests.verification.dense import dense

SOFT_CAPPED = """
from infcl_gen.losses.language import *

x = 20 * tanh(scale * z / 20) + bias
SOFT = LossSpec(
    name="soft",
    formula=mean_over_queries(logsumexp_over_keys(x) - positive(x)) / 2
    + mean_over_keys(logsumexp_over_queries(x) - positive(x)) / 2,
    positives="diagonal",
    doc="CLIP with capped logits: not affine in z.",
)
"""
WITHOUT_IDS = """
from infcl_gen.losses.language import *

x, kept = scale * z + bias, 1 - same_id * (1 - is_positive)
towards_keys = mean_over_queries(logsumexp_over_keys(x, where=kept) - positive(x))
towards_queries = mean_over_keys(logsumexp_over_queries(x, where=kept) - positive(x))
CLIP = LossSpec("clip_ids", (towards_keys + towards_queries) / 2)
INFONCE = LossSpec("infonce_ids", towards_keys, positives="label")
negatives = logsumexp_over_keys(x, where=(1 - is_positive) * (1 - same_id))
DECOUPLED = LossSpec("decoupled_ids", mean_over_queries(softplus(negatives - positive(x))), positives="label")
"""
COMBINED = """
from sympy import sqrt

from infcl_gen.losses.language import *

x = scale * z + bias
negatives = logsumexp_over_keys(x, where=1 - is_positive)
MARGIN = LossSpec("margin", mean_over_queries(softplus(negatives - positive(x) + 0.3)), positives="label")
DECOUPLED = LossSpec("decoupled", mean_over_queries(negatives - positive(x)), positives="label")
angular = scale * (0.955336489125606 * z - 0.29552020666133955 * sqrt(maximum(1 - z**2, 1e-12)))
logit = 20 * tanh((is_positive * angular + (1 - is_positive) * scale * z) / 20) + bias
ANGULAR = LossSpec("angular", mean_over_queries(logsumexp_over_keys(logit) - positive(logit)), positives="label")
others = log(maximum(keys - 1, 1e-30))
share = exp(others - maximum(negatives - positive(x), -700)) / 10
rest = negatives + log(maximum(1 - share, 1e-30)) - log(0.9)
DEBIASED = LossSpec(
    "debiased_keys", mean_over_queries(softplus(maximum(rest, others - scale) - positive(x))), positives="label"
)
"""
OWN = """
from infcl_gen.losses.language import *

x = scale * z + bias
apart = logsumexp_over_keys(x) - positive(x)
WEIGHTED = LossSpec("weighted", mean_over_queries(query_weight * apart), positives="label")
harder = softplus(logsumexp_over_negatives(x) - logsumexp_over_keys(x))
HARD = LossSpec("hard", mean_over_queries(query_weight * (apart + harder)), positives="label")
each = positive(z) + positive(x) / 3
weight = query_weight * (2 - queries * exp(each - logsumexp_over_all_positives(each)))
both = logsumexp_over_keys(x) + logsumexp_over_keys(2 * x) / 2 - 2 * positive(x)
BY_ALL = LossSpec("weighed_by_all", mean_over_queries(logsumexp_over_keys(x) + weight * both), positives="label")
kept = 1 - same_id * (1 - is_positive)
of_queries = mean_over_queries(query_weight * (logsumexp_over_keys(x, where=kept) - positive(x)))
of_keys = mean_over_keys(key_weight * (logsumexp_over_queries(x, where=kept) - positive(x)))
SIDES = LossSpec("weighed_sides_ids", (of_queries + of_keys) / 2)
"""
SMOOTH = """
from infcl_gen.losses.language import *

x = scale * z + bias
towards_keys = mean_over_queries(logsumexp_over_keys(x) - 0.9 * positive(x) - 0.1 * mean_of_keys(x))
towards_queries = mean_over_keys(logsumexp_over_queries(x) - 0.9 * positive(x) - 0.1 * mean_of_queries(x))
INFONCE = LossSpec("smooth", towards_keys, positives="label")
CLIP = LossSpec("smooth_clip", (towards_keys + towards_queries) / 2)
RINCE = LossSpec(
    "smooth_rince",
    mean_over_queries(exp(logsumexp_over_keys(x) / 2) / 5 - 2 * exp(positive(x) / 2) - mean_of_keys(x) / 5),
    positives="label",
)
"""
TEMPERED = """
from infcl_gen.losses.language import *

x, kept = scale * query_scale * key_scale * z + bias, 1 - same_id * (1 - is_positive)
INFONCE = LossSpec("tempered_infonce", mean_over_queries(logsumexp_over_keys(x) - positive(x)), positives="label")
y = scale * z * query_scale + bias
towards_keys = mean_over_queries(logsumexp_over_keys(y, where=kept) - positive(y))
towards_queries = mean_over_keys(logsumexp_over_queries(y, where=kept) - positive(y))
CLIP = LossSpec("tempered_clip_ids", (towards_keys + towards_queries) / 2)
SIGLIP = LossSpec("tempered_siglip", sum_over_pairs(softplus((1 - 2 * is_positive) * x)) / queries)
apart, harder = logsumexp_over_keys(y) - positive(y), softplus(logsumexp_over_negatives(y) - logsumexp_over_keys(y))
HARD = LossSpec("tempered_hard", mean_over_queries(query_weight * (apart + harder)), positives="label")
"""
PREFIXES = """
import dataclasses

from infcl_gen.losses import CLIP, INFONCE

prefixes = {2: 1.0, 5: 0.5, 8: 2.0}
clip, infonce = (dataclasses.replace(loss, prefixes=prefixes) for loss in (CLIP, INFONCE))
clip_cosines, infonce_cosines = (dataclasses.replace(loss, renormalise=True) for loss in (clip, infonce))
"""
GUIDED = """
from infcl_gen.losses.language import *

x = scale * z + bias
m = mean_of_keys(x, weight=(1 + guide) / 2)
towards_queries = mean_over_keys(logsumexp_over_queries(x) - positive(x))
BOTH = LossSpec("cwcl_both", (mean_over_queries(logsumexp_over_keys(x) - m) + towards_queries) / 2)
rince = 2 * (exp(logsumexp_over_keys(x) / 2) / 10 - exp(positive(x) / 2))
other = mean_of_keys(x, weight=0.7 - guide / 5)
RINCE = LossSpec("cwcl_rince", mean_over_queries(rince - 0.6 * other), positives="label")
"""
FILES = {
    "soft": "soft.py:SOFT", "clip_ids": "ids.py:CLIP", "infonce_ids": "ids.py:INFONCE",
    "decoupled_ids": "ids.py:DECOUPLED", "margin": "combined.py:MARGIN", "decoupled": "combined.py:DECOUPLED",
    "angular": "combined.py:ANGULAR", "debiased_keys": "combined.py:DEBIASED",
    "weighted": "own.py:WEIGHTED", "hard": "own.py:HARD", "weighed_by_all": "own.py:BY_ALL",
    "weighed_sides_ids": "own.py:SIDES",
    "tempered_infonce": "tempered.py:INFONCE", "tempered_clip_ids": "tempered.py:CLIP",
    "tempered_siglip": "tempered.py:SIGLIP", "tempered_hard": "tempered.py:HARD",
    "clip_prefixes": "prefixes.py:clip", "infonce_prefixes": "prefixes.py:infonce",
    "clip_cosines": "prefixes.py:clip_cosines", "infonce_cosines": "prefixes.py:infonce_cosines",
    "cwcl_both": "guided.py:BOTH", "cwcl_rince": "guided.py:RINCE",
    "smooth": "smooth.py:INFONCE", "smooth_clip": "smooth.py:CLIP", "smooth_rince": "smooth.py:RINCE",
}  # fmt: skip


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ModuleType]]:
    """`packages(loss, dtype, dim, ...)` -> the imported package, generated on first use. `panel`: rows and keys; no
    keys (0) for a loss of one side, whose panels are square."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "soft.py").write_text(SOFT_CAPPED)
    (folder / "ids.py").write_text(WITHOUT_IDS)
    (folder / "combined.py").write_text(COMBINED)
    (folder / "own.py").write_text(OWN)
    (folder / "smooth.py").write_text(SMOOTH)
    (folder / "guided.py").write_text(GUIDED)
    (folder / "tempered.py").write_text(TEMPERED)
    (folder / "prefixes.py").write_text(PREFIXES)
    sys.path.insert(0, str(folder))

    def get(
        loss: str = "clip",
        dtype: str = "fp64",
        dim: int = 8,
        batch_size: int = 300,
        panel: tuple[int, int] = (64, 64),
        devices: int = 1,
        nodes: int = 1,
        transport: str | None = None,
        keeps: str | None = None,
        frozen: str = "none",
    ) -> ModuleType:
        name = f"{loss}_{dtype}_{dim}_{batch_size}_{panel[0]}x{panel[1]}"
        name += f"_{transport}_{keeps}_{devices}_{nodes}" if devices > 1 else ""
        name += f"_{frozen}" if frozen != "none" else ""
        given = {"panel_rows": panel[0], "panel_keys": panel[1] or None, "transport": transport, "keeps": keeps}
        chosen = {key: str(word) for key, word in given.items() if word is not None}
        if not (folder / name).exists():
            infcl_gen.generate(
                loss=f"{folder}/{FILES[loss]}" if loss in FILES else loss,
                batch_size=batch_size,
                dim=dim,
                dtype=dtype,
                target="cpu",
                devices=devices,
                nodes=nodes,
                frozen=frozen,
                set=chosen,
                output=folder / name,
            )
        return importlib.import_module(name)

    yield get
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def over_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """`over_processes(loss, transport, rows, draw)`: on three ranks of gloo with so many rows each, the average of what
    they find is the formula by hand. `draw`: the input of all of a case."""
    folder, ranks = tmp_path_factory.mktemp("over_processes"), (0, 1, 2)
    pool = Pool(3, folder)

    def check(loss: str, transport: str, rows: list[int], draw: Callable[[Case], Inputs]) -> None:
        case = Case(sum(rows), sum(rows), 8, "fp64", 3.0, -1.0, seed=1)
        if not (folder / (name := f"{loss}_{transport}")).exists():
            how = {"batch_size": 12, "dim": 8, "dtype": "fp64", "target": "cpu", "devices": 3}
            infcl_gen.generate(loss=loss, output=folder / name, **how, set={"transport": transport, "panel_rows": "64"})
        parts = results(pool.run("own_gradients", ranks, package=name, ranks=ranks, rows=rows, keys=rows, case=case))
        truth = [x for x in dense(loss, *draw(case)) if x is not None]
        found = [
            torch.cat(each) / 3 if each[0].dim() else torch.stack(each).mean() for each in zip(*parts, strict=True)
        ]
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)

    yield check
    pool.close()


@pytest.fixture(scope="session")
def folder_of() -> Callable[[ModuleType], Path]:
    return lambda module: Path(str(module.__file__)).parent


@pytest.fixture(scope="module")
def planted(packages: Callable[..., ModuleType], folder_of: Callable[[ModuleType], Path]) -> Callable[..., str]:
    """`planted(bug, loss, edits, ...)` -> the import name of a copy of that package with the edits."""

    def make(bug: str, loss: str, edits: tuple[Edit, ...], **options: str) -> str:
        original = folder_of(packages(loss, **options))
        target = original.parent / f"planted_{loss}_{''.join(c for c in bug if c.isalpha())}"
        if not target.exists():
            copy_with(bug, edits, original, target)
        return target.name

    return make


def copy_with(bug: str, edits: tuple[Edit, ...], original: Path, target: Path) -> None:
    """A package's folder again, with edits, where imports find it."""
    shutil.copytree(original, target, ignore=shutil.ignore_patterns("__pycache__"))
    plant(bug, edits, target)
    importlib.invalidate_caches()


@pytest.fixture
def with_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """`with_bug(package, bug, old, new)` -> the package with that edit of its schedule."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(package: ModuleType, bug: str, *edit: str) -> ModuleType:
        name = f"{package.__name__.rpartition('.')[2]}_{''.join(c for c in bug if c.isalpha())}"
        copy_with(bug, (("schedule.py", *edit),), Path(str(package.__file__)).parent, tmp_path / name)
        return importlib.import_module(name)

    return make
