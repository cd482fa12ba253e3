"""Losses of other libraries as oracles of this project's: same value, same gradients, on the CPU.

python -m tests.outside.other_losses       all comparisons of installed libraries; writes tune/bench/cpu-oracles.json if
                                           none is absent that the file has
python -m pytest tests/outside/test_other_losses.py     the same; a library that is not installed is skipped by name

Both losses get the same features, scale and bias, in fp32 and in fp64. Errors of value, dq, dk, dscale and dbias are
relative norms, the largest of all ranks. On several ranks each calls both losses for its rows, over gloo.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from infcl_gen.bench.results import lost, measurement, write_results
from infcl_gen.files import load_file
from infcl_gen.processes import Seat, run_ranks

OUTPUT = Path(__file__).resolve().parents[2] / "tune" / "bench" / "cpu-oracles.json"
ROWS, DIM, HARD = 48, 32, 2  # rows of a rank, and hard negatives of a query
ALLOWED = {"fp32": 1e-5, "fp64": 1e-12}
SETTINGS = {  # scale and bias
    "siglip": (10.0, -10.0), "clip": (1 / 0.07, 0.0), "infonce": (20.0, 0.0), "ntxent": (10.0, 0.0),
    "four_block": (20.0, 0.0), "gemini": (20.0, 0.0), "decoupled": (10.0, 0.0), "supcon_out": (10.0, 0.0),
    "infonce_out": (10.0, 0.0), "decoupled_weighted": (10.0, 0.0), "gist": (20.0, 0.0),
    "distill_both": (1 / 0.07, 0.0), "distill_clip": (1 / 0.07, 0.0),
}  # fmt: skip
TEACHER_SCALE = 25.0  # of the guide's similarities, where these are a teacher's
IDS = 12  # distinct ids in a batch of a loss that leaves out pairs of one id
TIMEOUT_S = 300.0
NAMES = ("loss", "dq", "dk", "dscale", "dbias")
Errors = dict[str, float | None]


@dataclasses.dataclass
class Given:
    """What both losses of a rank compute with; tensors require gradients. `unit` are the normalised features."""

    q: Any  # (ROWS, DIM)
    k: Any  # (ROWS, DIM), or (ROWS * (1 + HARD), DIM)
    scale: Any
    bias: Any
    rank: int
    ranks: int

    @property
    def unit(self) -> tuple[Any, Any]:
        from torch.nn.functional import normalize

        return normalize(self.q), normalize(self.k)

    @property
    def leaves(self) -> tuple[Any, ...]:
        return self.q, self.k, self.scale, self.bias


@dataclasses.dataclass(frozen=True)
class Comparison:
    distribution: str
    module: str
    call: str
    loss: str  # of this project
    theirs: Callable[[Given], Any]
    ranks: int = 1
    hard: bool = False  # with hard negatives
    learned: bool = True  # their scale, and bias, have gradients
    ours: Callable[[Given], Any] | None = None  # None: one call of the loss

    @property
    def name(self) -> str:
        negatives = f", {HARD} hard negatives" * self.hard
        return f"{self.distribution} {self.call}, {self.loss}{negatives}, W = {self.ranks}"

    def absent(self) -> str | None:
        """Why the library cannot be asked, or None."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.distribution} is not installed"
        try:
            _module(self.module)
        except ImportError as error:
            return f"{self.distribution} cannot be imported: {error}".splitlines()[0]
        return None


def _module(name: str) -> Any:
    """A module; of a package whose import needs more than its loss does ("open_clip.loss"), that file alone."""
    package, _, file = name.partition(".")
    found = importlib.util.find_spec(package)
    if package in ("open_clip", "siglip_kernel"):
        assert found is not None and found.submodule_search_locations
        return load_file(Path(found.submodule_search_locations[0]) / f"{file}.py")
    return importlib.import_module(name)


def _open_clip(given: Given, name: str = "ClipLoss", **options: Any) -> Any:
    criterion = getattr(_module("open_clip.loss"), name)(rank=given.rank, world_size=given.ranks, **options)
    return criterion(*given.unit, given.scale, given.bias)


def _distilled(given: Given) -> Any:
    """The contrastive loss and the distillation that DistillClipLoss returns."""
    criterion = _module("open_clip.loss").DistillClipLoss(rank=given.rank, world_size=given.ranks)
    return criterion(*given.unit, given.scale, *guide_of(given), TEACHER_SCALE)


def _own_distilled(given: Given, loss: str) -> Any:
    from infcl_gen import ContrastiveLoss

    u, v = guide_of(given)
    return ContrastiveLoss(loss)(*given.unit, given.scale, guide_queries=TEACHER_SCALE * u, guide_keys=v)


def _siglip_kernel(given: Given, name: str) -> Any:
    """What its own tests compare its GPU kernels with."""
    return getattr(_module("siglip_kernel.reference"), name)(*given.unit, given.scale, given.bias)


def _sentence_transformers(given: Given, **options: Any) -> Any:
    """Of embeddings: the model is never called. Its similarity, by default, normalises them."""
    import torch

    losses = _module("sentence_transformers.losses")
    criterion = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=given.scale.item(), **options)
    documents = list(given.k.split(ROWS))  # the positives, then column after column of negatives
    return criterion.compute_loss_from_embeddings([given.q, *documents], None)


def guide_of(given: Given) -> tuple[Any, Any]:
    """What a guide finds: queries like their own key and the two behind it, more or less."""
    import torch
    from torch.nn.functional import normalize

    generator = torch.Generator().manual_seed(90 + given.rank)
    u, noise = (torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    v = u + u.roll(1, 0) + u.roll(2, 0) + noise
    return normalize(u).to(given.q.dtype), normalize(v).to(given.q.dtype)


def _gist(given: Given, **options: Any) -> Any:
    """Of embeddings, by the loss's own forward: model and guide stand for what they would have given."""
    from unittest import mock

    import torch

    criterion = _module("sentence_transformers.losses").GISTEmbedLoss
    temperature = {"temperature": 1 / given.scale.item(), "contrast_anchors": False, "contrast_positives": False}
    stand_in = mock.Mock(spec=torch.nn.Module, tokenizer=mock.Mock(get_vocab=dict), max_seq_length=1)
    home = importlib.import_module(criterion.__module__)
    embeddings = mock.Mock(side_effect=[[given.q, given.k], guide_of(given)])
    with (
        mock.patch.object(home, "PreTrainedTokenizerBase", mock.Mock),
        mock.patch.object(home, "embed_columns", embeddings),
    ):
        return criterion(stand_in, stand_in, **temperature, **options)([{}, {}], None)


def _own_gist(given: Given, loss: str = "gist") -> Any:
    from infcl_gen import ContrastiveLoss

    u, v = guide_of(given)
    return ContrastiveLoss(loss)(*given.unit, given.scale, guide_queries=u, guide_keys=v)


def _metric_learning(given: Given, name: str) -> Any:
    """Of all rows and their labels: two views of each sample."""
    import torch

    criterion = getattr(_module("pytorch_metric_learning.losses"), name)(temperature=1 / given.scale.item())
    return criterion(torch.cat(given.unit), torch.arange(ROWS).repeat(2))


def _of_classes(given: Given) -> Any:
    """Its supervised loss of rows with several others of their class."""
    import torch

    criterion = _module("pytorch_metric_learning.losses").SupConLoss(temperature=1 / given.scale.item())
    return criterion(torch.cat(given.unit), torch.arange(2 * ROWS) % IDS)


def _own_of_classes(given: Given) -> Any:
    import torch

    from infcl_gen import ContrastiveLoss

    loss = ContrastiveLoss("supcon_out")
    return loss(torch.cat(given.unit), None, given.scale, query_ids=torch.arange(2 * ROWS) % IDS)


def _of_classes_between_sides(given: Given) -> Any:
    import torch

    (q, k), of = given.unit, torch.arange(ROWS) % IDS
    criterion = _module("pytorch_metric_learning.losses").SupConLoss(temperature=1 / given.scale.item())
    return criterion(q, of, ref_emb=k, ref_labels=of.flip(0))


def _own_of_classes_between_sides(given: Given) -> Any:
    import torch

    from infcl_gen import ContrastiveLoss

    of = torch.arange(ROWS) % IDS
    return ContrastiveLoss("infonce_out")(*given.unit, given.scale, query_ids=of, key_ids=of.flip(0))


def _lightly(given: Given, name: str) -> Any:
    return getattr(_module("lightly.loss"), name)(temperature=1 / given.scale.item())(*given.unit)


def ids(count: int) -> Any:
    """An id that some queries and keys of a batch have in common."""
    import torch

    return torch.randint(IDS, (count,), generator=torch.Generator().manual_seed(1))


def _pairs_of_metric_learning(given: Given) -> Any:
    """Its NT-Xent of named pairs: a query and its positive, keys of other ids, and the query's own negatives."""
    import torch

    q, k = given.unit
    rows, of = torch.arange(ROWS), ids(ROWS)
    query, key = (of[:, None] != of).nonzero().unbind(1)
    own = ROWS + rows[:, None] + ROWS * torch.arange(HARD)
    negatives = torch.cat((query, rows.repeat_interleave(HARD))), torch.cat((key, own.flatten()))
    criterion = _module("pytorch_metric_learning.losses").NTXentLoss(temperature=1 / given.scale.item())
    return criterion(q, indices_tuple=(rows, rows, *negatives), ref_emb=k)


def _with_own_negatives(given: Given) -> Any:
    from infcl_gen import ContrastiveLoss

    q, k = given.unit
    negatives = k[ROWS:].view(HARD, ROWS, DIM).transpose(0, 1)
    return ContrastiveLoss("gemini")(
        q, k[:ROWS], given.scale, query_ids=ids(ROWS), key_ids=ids(ROWS), negatives=negatives
    )


def _of_views(given: Given) -> Any:
    import torch

    from infcl_gen import ContrastiveLoss

    return ContrastiveLoss("ntxent")(torch.cat(given.unit), None, given.scale)


def _of_documents(given: Given) -> Any:
    """Queries and documents as rows of one tensor."""
    import torch

    from infcl_gen import ContrastiveLoss

    return ContrastiveLoss("four_block")(torch.cat(given.unit), None, given.scale)


def _decoupled(given: Given, name: str) -> Any:
    """Rows of both views as queries and as keys: by its id a row is not its own key."""
    import torch

    from infcl_gen import ContrastiveLoss

    rows, x = torch.arange(2 * ROWS), torch.cat(given.unit)
    return ContrastiveLoss(f"{_FOLDER / 'decoupled.py'}:{name}")(
        x, x, given.scale, labels=rows.roll(ROWS), query_ids=rows, key_ids=rows
    )


def _both_directions(given: Given) -> Any:
    """A query among all documents, and a positive among queries."""
    from infcl_gen import ContrastiveLoss

    loss, (q, k) = ContrastiveLoss("infonce"), given.unit
    return (loss(q, k, given.scale, labels="own") + loss(k[:ROWS], q, given.scale)) / 2


_FOLDER = Path(__file__).resolve().parent
_APART = "contrast_anchors=False, contrast_positives=False"
_BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
_FOUR = {
    "directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "partition_mode": "joint"
}  # fmt: skip
_METRIC = ("pytorch-metric-learning", "pytorch_metric_learning.losses")
_RANKING = ("sentence-transformers", "sentence_transformers.losses")
COMPARISONS = (
    Comparison("open_clip_torch", "open_clip.loss", "ClipLoss()", "clip", _open_clip),
    Comparison("open_clip_torch", "open_clip.loss", "SigLipLoss()", "siglip", partial(_open_clip, name="SigLipLoss")),
    *(
        Comparison(
            "open_clip_torch", "open_clip.loss", f'SigLipLoss(dist_impl="{way}")', "siglip",
            partial(_open_clip, name="SigLipLoss", dist_impl=way), ranks,
        )
        for ranks in (2, 3) for way in ("bidir", "shift", "reduce", "gather")
    ),
    Comparison(
        "open_clip_torch", "open_clip.loss", "DistillClipLoss()[1]", "distill_both",
        lambda given: _distilled(given)[1], ours=partial(_own_distilled, loss="distill_both"),
    ),
    Comparison(
        "open_clip_torch", "open_clip.loss", "sum(DistillClipLoss())", "distill_clip",
        lambda given: sum(_distilled(given)), ours=partial(_own_distilled, loss="distill_clip"),
    ),
    *(
        Comparison(
            "siglip-kernel", "siglip_kernel.reference", f"{name}()", "siglip", partial(_siglip_kernel, name=name)
        ) for name in ("siglip_loss_reference", "siglip_loss_reference_bce")
    ),
    Comparison(
        *_RANKING, "MultipleNegativesRankingLoss()", "infonce", _sentence_transformers, learned=False
    ),
    Comparison(
        *_RANKING, "MultipleNegativesRankingLoss()", "infonce", _sentence_transformers, hard=True, learned=False
    ),
    Comparison(
        *_RANKING, 'MultipleNegativesRankingLoss(directions=both, partition_mode="per_direction")', "clip",
        partial(_sentence_transformers, **_BOTH), learned=False,
    ),
    Comparison(
        *_RANKING, "MultipleNegativesRankingLoss(gather_across_devices=True)", "infonce",
        partial(_sentence_transformers, gather_across_devices=True), ranks=2, learned=False,
    ),
    *(
        Comparison(
            *_RANKING, f"GISTEmbedLoss({way})", "gist", partial(_gist, **options), ranks, learned=False,
            ours=partial(_own_gist, loss=loss),
        )
        for way, options, loss, ranks in (
            (_APART, {}, "gist", 1),
            (f"{_APART}, margin=0.25", {"margin": 0.25}, f"{_FOLDER / 'margin.py'}:MARGIN", 1),
            (f"{_APART}, gather_across_devices=True", {"gather_across_devices": True}, "gist", 2),
        )
    ),
    Comparison(
        *_RANKING, 'MultipleNegativesRankingLoss(directions=both, partition_mode="per_direction")', "infonce",
        partial(_sentence_transformers, **_BOTH), hard=True, learned=False, ours=_both_directions,
    ),
    Comparison(
        *_RANKING, 'MultipleNegativesRankingLoss(directions=four, partition_mode="joint")', "four_block",
        partial(_sentence_transformers, **_FOUR), learned=False, ours=_of_documents,
    ),
    *(
        Comparison(*_METRIC, f"{name}()", "ntxent", partial(_metric_learning, name=name), learned=False, ours=_of_views)
        for name in ("NTXentLoss", "SupConLoss")
    ),
    Comparison(
        *_METRIC, "SupConLoss()(labels)", "supcon_out", _of_classes, learned=False, ours=_own_of_classes
    ),
    Comparison(
        *_METRIC, "SupConLoss()(ref_emb, ref_labels)", "infonce_out", _of_classes_between_sides, learned=False,
        ours=_own_of_classes_between_sides,
    ),
    Comparison(
        *_METRIC, "NTXentLoss()(indices_tuple)", "gemini", _pairs_of_metric_learning, hard=True, learned=False,
        ours=_with_own_negatives,
    ),
    Comparison(
        "lightly", "lightly.loss", "NTXentLoss()", "ntxent", partial(_lightly, name="NTXentLoss"), learned=False,
        ours=_of_views,
    ),
    Comparison(
        "lightly", "lightly.loss", "DCLLoss()", "decoupled", partial(_lightly, name="DCLLoss"), learned=False,
        ours=partial(_decoupled, name="DECOUPLED"),
    ),
    Comparison(
        "lightly", "lightly.loss", "DCLWLoss()", "decoupled_weighted", partial(_lightly, name="DCLWLoss"),
        learned=False, ours=partial(_decoupled, name="DECOUPLED_WEIGHTED"),
    ),
)  # fmt: skip


def draw(one: Comparison, dtype: str, rank: int) -> Given:
    import torch

    kind = {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    generator = torch.Generator().manual_seed(7 + rank)
    keys = ROWS * (1 + HARD) if one.hard else ROWS
    q, noise = (torch.randn(rows, DIM, dtype=torch.float64, generator=generator) for rows in (ROWS, keys))
    k = noise.clone()
    k[:ROWS] += q  # positives are closer
    numbers = (torch.tensor(value, dtype=kind, requires_grad=True) for value in SETTINGS[one.loss])
    return Given(q.to(kind).requires_grad_(), k.to(kind).requires_grad_(), *numbers, rank, one.ranks)


def compare(one: Comparison, dtype: str, rank: int = 0) -> Errors:
    """The errors of this project's loss relative to theirs; None where theirs has no gradient."""
    import torch

    found = []
    for loss_of in (one.theirs, partial(_ours, one)):
        given = draw(one, dtype, rank)
        loss = loss_of(given)
        loss.backward()
        found.append((loss.detach(), *(leaf.grad for leaf in given.leaves)))
    errors: Errors = {}
    for name, theirs, mine in zip(NAMES, *found, strict=True):
        if theirs is None or (name == "dbias" and one.loss != "siglip"):  # it is 0
            errors[name] = None
            continue
        errors[name] = float(torch.linalg.vector_norm(mine - theirs) / torch.linalg.vector_norm(theirs))
    return errors


def _ours(one: Comparison, given: Given) -> Any:
    from infcl_gen import ContrastiveLoss

    if one.ours is not None:
        return one.ours(given)
    labels = {"labels": "own"} if one.hard else {}
    return ContrastiveLoss(one.loss)(*given.unit, given.scale, given.bias, **labels)


def run_rank(job: dict[str, Any], seat: Seat) -> list[Errors]:
    """The task of each rank."""
    seat.join_group("cpu", TIMEOUT_S)
    here = [one for one in COMPARISONS if one.name in job["names"]]
    return [compare(one, dtype, seat.rank) for one in here for dtype in job["dtypes"]]


def errors_of(comparisons: Iterable[Comparison], dtypes: Iterable[str] = ALLOWED) -> dict[tuple[str, str], Errors]:
    """By name and dtype; those on several ranks run together, in one group for each number of ranks."""
    comparisons, dtypes = list(comparisons), list(dtypes)
    found = {(one.name, dtype): compare(one, dtype) for one in comparisons if one.ranks == 1 for dtype in dtypes}
    for ranks in sorted({one.ranks for one in comparisons} - {1}):
        here = [one for one in comparisons if one.ranks == ranks]
        job = {"names": [one.name for one in here], "dtypes": dtypes}
        results = run_ranks("tests.outside.other_losses:run_rank", job, ranks, TIMEOUT_S, {"OMP_NUM_THREADS": "1"})
        each = iter(zip(*results, strict=True))
        for one in here:
            for dtype in dtypes:
                of_ranks = next(each)
                found[one.name, dtype] = {
                    name: None if of_ranks[0][name] is None else max(errors[name] for errors in of_ranks)
                    for name in NAMES
                }
    return found


def wrong(one: Comparison, dtype: str, errors: Errors) -> list[str]:
    """What is not the same, and what was not compared."""
    missing = {"dscale"} if not one.learned else set()
    missing |= {"dbias"} if not one.learned or one.loss != "siglip" else set()
    lines = [f"{name}: no gradient" for name in NAMES if (errors[name] is None) != (name in missing)]
    allowed = ALLOWED[dtype]
    return lines + [
        f"{n}: {e:.1e}, allowed {allowed:g}" for n, e in errors.items() if e is not None and not e <= allowed
    ]


def main() -> int:
    reasons = {one.distribution: one.absent() for one in COMPARISONS}
    here = [one for one in COMPARISONS if reasons[one.distribution] is None]
    found = errors_of(here)
    rows, failed = [], 0
    for one in here:
        for dtype in ALLOWED:
            errors, scale_and_bias = found[one.name, dtype], SETTINGS[one.loss]
            lines = wrong(one, dtype, errors)
            failed += bool(lines)
            keys = one.ranks * ROWS * (1 + HARD if one.hard else 1)
            rows.append({
                "loss": one.loss, "batch": one.ranks * ROWS, "keys": keys, "dim": DIM, "dtype": dtype,
                "ranks": one.ranks, "impl": one.distribution, "call": one.call,
                "scale": scale_and_bias[0], "bias": scale_and_bias[1], "err": errors, "error": "; ".join(lines) or None,
            })  # fmt: skip
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items() if error is not None)
            print(f"{one.name}, {dtype}: {figures}" + "".join(f"\n  WRONG {line}" for line in lines), flush=True)
    absent = {name: why for name, why in reasons.items() if why}
    for why in absent.values():
        print(f"absent: {why}")
    libraries = sorted({one.distribution for one in here})
    if missing := lost(OUTPUT, absent):
        print(f"{OUTPUT.name} is left as it is: it has {', '.join(missing)}, too")
    else:
        write_results(OUTPUT, measurement(rows, "python -m tests.outside.other_losses", absent, libraries))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
