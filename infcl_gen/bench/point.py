"""One size: its contestants, their features, and what is timed: a forward and backward, or bare products."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from infcl_gen.bench.results import FIELDS, IDENTITY, NAMED, Row
from infcl_gen.bench.timing import SEED
from infcl_gen.emission.package import Package
from infcl_gen.errors import InputError
from infcl_gen.inputs.text import prefixes_text, show
from infcl_gen.kernels.choice import SPLIT_TERMS
from infcl_gen.losses import derive, spec_from_dict
from infcl_gen.runtime import negatives
from infcl_gen.runtime.traits import Traits
from infcl_gen.verification.oracle import STATES
from infcl_gen.verification.properties import DTYPES

Step = Callable[[], tuple[Any, ...]]
LossFunction = Callable[[], Any]
ROUNDED = "rounded fp32"
PRIOR = -10.0  # the bias that SigLIP begins with


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What all contestants compute with; q, k, scale and bias require the gradients that are measured."""

    q: Any  # (M, D)
    k: Any  # (N, D); None for a loss of one side
    scale: Any  # 0-dim
    labels: Any  # (M,) int64
    directions: int  # 2 if the loss classifies keys among queries, too: then M = N and labels are 0, 1, ..., M - 1
    dtype: Any  # of products: that of q and k, except under autocast
    bias: Any = None  # 0-dim, of a sum over pairs: PRIOR; None for other losses, which it does not change

    @property
    def leaves(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.scale

    @property
    def wanted(self) -> set[str]:
        """Which of RESULTS a step must have. Not every contestant has dscale."""
        sides = (("dq", self.q), ("dk", self.k))
        return {"loss"} | {name for name, x in sides if x is not None and x.requires_grad}


@dataclasses.dataclass(frozen=True)
class Point:
    """One size and its contestants.

    `feature_dtype` is `dtype`, or fp32 under autocast to `dtype`. "rounded fp32" is fp32 that holds numbers of `dtype`:
    casting then makes no error.
    """

    packages: tuple[str, ...]  # their folders
    peers: tuple[str, ...]
    target: str
    loss: str
    directions: int  # as in Inputs
    bias: float | None  # as in Inputs
    batch: int
    keys: int
    dim: int
    dtype: str
    feature_dtype: str
    precision: str  # in rows: that of the packages, or the autocast
    scale: float
    rounds: int  # at most; a contestant that has spent its share of `seconds` stops earlier
    seconds: float
    exact: str | None  # the package whose loss gives fp64 results; None: no errors are computed
    edited: tuple[str, ...] = ()  # packages whose files are not as generated
    ranks: int = 1
    frozen: str = "none"  # the side that requires no gradient
    prefixes: str = ""  # of the features, as `prefixes_text` has them, where the loss is added up over some
    gradients: bool = True  # else forward alone is measured
    one_sided: bool = False  # rows are compared with each other

    @property
    def device(self) -> str:
        return "cpu" if self.target == "cpu" else "cuda"

    @property
    def contestants(self) -> tuple[str, ...]:
        return (*self.packages, *self.peers)

    @property
    def autocast(self) -> Any:
        """The torch dtype that all contestants run under autocast to, or None."""
        return None if self.feature_dtype == self.dtype else DTYPES[self.dtype]

    def row(self, name: str) -> Row:
        """A contestant's row before it is measured: all figures are None."""
        row = dict.fromkeys(FIELDS) | {field: getattr(self, field) for field in IDENTITY}
        row["impl"], row["package"] = ("infcl", Path(name).name) if name in self.packages else (name, None)
        row |= {field: found for field, usual in NAMED.items() if (found := getattr(self, field)) != usual}
        return {**row, "edited": True} if name in self.edited else row

    def shard(self, rank: int) -> int:
        """Queries of one rank."""
        return self.batch // self.ranks + (rank < self.batch % self.ranks)

    def inputs(self, rank: int = 0, rows: int | None = None) -> Inputs:
        """Unit-norm random features for a rank's shard, or for `rows` queries and keys; the same on every run.

        On several ranks each has its own features, and there is one key per query.
        """
        queries = rows or self.shard(rank)
        keys = self.keys if self.ranks == 1 and rows is None else queries
        drawn = self.dtype if self.feature_dtype == ROUNDED else self.feature_dtype
        q, k = (features(n, self.dim, drawn, seed, self.device) for seed, n in enumerate((queries, keys), 2 * rank))
        if self.feature_dtype == ROUNDED:
            q, k = (x.detach().float().requires_grad_() for x in (q, k))
        for side, x in (("query", q), ("key", k)):
            x.requires_grad_(self.gradients and side != self.frozen)
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = torch.tensor(self.scale, dtype=wide, device=self.device, requires_grad=self.gradients)
        bias = None if self.bias is None else torch.full_like(scale, self.bias, requires_grad=self.gradients)
        labels = torch.arange(queries, device=self.device) % keys
        if self.one_sided:
            return Inputs(q, None, scale, labels.roll(queries // 2), 1, DTYPES[self.dtype])
        return Inputs(q, k, scale, labels, self.directions, DTYPES[self.dtype], bias)


def row_precision(precision: str, dtype: str, feature_dtype: str | None) -> str:
    """`precision` in rows: that of the packages, unless features are cast by autocast."""
    return precision if feature_dtype in (None, dtype) else f"autocast from {feature_dtype}"


def point_of(
    packages: Sequence[Package], batch: int | None = None, peers: Iterable[str] = (), scale: float = 14.3,
    rounds: int = 10, seconds: float = math.inf, errors: bool = False, feature_dtype: str | None = None, ranks: int = 1,
    gradients: bool = True,
) -> Point:  # fmt: skip
    """The point at `batch` queries (default: the planned ones) of packages for one loss, dim, dtype and device.

    Raises InputError for packages that differ in these, that are not planned for `ranks` devices or for fewer queries,
    and for a `feature_dtype` that they cannot take.
    """
    first, paths = packages[0], [str(package.path) for package in packages]
    dtype, planned = first.spec["problem"]["dtype"], first.spec["problem"]["batch_size"]
    narrow = dtype in ("bf16", "fp16")
    if feature_dtype not in (None, dtype) and not (narrow and feature_dtype in ("fp32", ROUNDED)):
        valid = f"{dtype}, or fp32 under autocast to it" if narrow else dtype
        raise InputError(f"--features: {show(feature_dtype)} is not what the packages take; valid: {valid}")
    queries, shared = batch or planned, _shared(first.spec)
    for package, path in zip(packages, paths, strict=True):
        for name, value in _shared(package.spec).items():
            if value != shared[name]:
                raise InputError(f"--package: {path} is for another {name} than {paths[0]}; give packages for one")
        if (devices := package.spec["plan"]["world_size"]) != ranks:
            given = f"{path} was planned for {devices} device(s), not {ranks}"
            raise InputError(f"--package: {given}; give --ranks {devices}")
        if queries > (most := package.spec["problem"]["batch_size"]):
            raise InputError(f"--batches: {queries} is more than the {most} that {path} is for")
    unedited = [str(package.path) for package in packages if "loss.py" not in package.edited]
    return Point(
        packages=tuple(paths), peers=tuple(peers), target=shared["device"],
        loss=shared["loss"]["name"], directions=1 + derive(spec_from_dict(shared["loss"])).has_keys,
        bias=PRIOR if shared["loss"]["traits"]["known"] == "before" else None, batch=queries,
        keys=queries if shared["keys"] in (None, planned) else shared["keys"], dim=shared["dim"], dtype=dtype,
        feature_dtype=feature_dtype or dtype, precision=row_precision(shared["precision"], dtype, feature_dtype),
        scale=scale, rounds=rounds, seconds=seconds, exact=unedited[0] if errors and unedited else None,
        edited=tuple(str(package.path) for package in packages if package.edited), ranks=ranks,
        frozen=shared["frozen"], prefixes=_prefixes_of(shared["loss"]), gradients=gradients,
        one_sided=shared["loss"]["traits"]["domain"] == "triangle",
    )  # fmt: skip


def _prefixes_of(loss: Mapping[str, Any]) -> str:
    return prefixes_text(loss.get("prefixes", ()), loss.get("renormalise", False))


def _shared(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What all packages of a point must have in common."""
    sizes = {name: spec["problem"][name] for name in ("dim", "dtype", "precision", "keys", "frozen")}
    return {"loss": spec["loss"], "device": spec["device"]["target"], **sizes}


def features(rows: int, dim: int, dtype: str, seed: int, device: str = "cuda") -> Any:
    """Random features (rows, dim) of unit norm that require gradients; the same on every run."""
    generator = torch.Generator(device).manual_seed(SEED + seed)
    found = torch.empty(rows, dim, dtype=DTYPES[dtype], device=device)
    wide = torch.promote_types(DTYPES[dtype], torch.float32)
    for part in found.split(1 << 16):  # the fp32 draws of four million rows would not fit beside `found`
        drawn = torch.randn(len(part), dim, generator=generator, device=device, dtype=wide)
        part.copy_(torch.nn.functional.normalize(drawn, dim=1))
    return found.requires_grad_()


def training_step(module: ModuleType, q: Any, k: Any, scale: Any, autocast: Any = None, bias: Any = None) -> Step:
    """A forward and backward of a package, which returns (loss, dq, dk, dscale); `autocast` is a dtype or None."""
    labels = None
    if k is None and len(q) % 2 and module.SPEC["positives"] == "label":  # without labels rows are pairs
        labels = torch.arange(len(q), device=q.device).roll(len(q) // 2)
    elif k is not None and module.SPEC["positives"] == "label" and len(q) > len(k):
        labels = torch.arange(len(q), device=q.device) % len(k)
    own = own_keywords(module.SPEC, q, k, dtype=autocast)
    states = {name: x for name, x in own.items() if name in STATES}  # which a call replaces: each begins with the same

    def loss() -> Any:
        given = {**own, **{name: x.clone() for name, x in states.items()}}
        return module.contrastive_loss(q, k, scale, bias, labels=labels, **given)

    return step_of(loss, q, k, scale, autocast)


def own_keywords(spec: Mapping[str, Any], q: Any, k: Any, first: int = 0, dtype: Any = None) -> dict[str, Any]:
    """What a loss takes besides features, by the SPEC of its package: ids, weights of queries and keys, one negative of
    each, the key behind its own, states, scales of queries and keys, and a guide's features, of `dtype`. `first`: of
    this rank's rows."""
    traits = Traits(**spec["loss"]["traits"])
    own = (*traits.vectors, *traits.scaled)
    found = own_ids(q, k, first) if traits.ids else {}
    if traits.guided:
        guides = zip(("guide_queries", "guide_keys"), (q, k), strict=True)
        found |= {name: x.detach().flip(1).to(dtype or x.dtype) for name, x in guides}
    behind = torch.arange(1, len(q) + 1, device=q.device)
    if "query_weight" in own:
        found["query_weight"] = behind / len(q)
    if "key_weight" in own:
        found["key_weight"] = torch.linspace(0.5, 1, len(k), device=k.device)
    if "negatives" in own:
        others = (q if k is None else k).detach()
        rows, _ = negatives.shape(traits.partnered, q)
        found["negatives"] = others[behind[:rows] % len(others)][:, None]
    if "query_state" in own:
        found["query_state"] = -behind / len(q)
    if "key_state" in own:
        found["key_state"] = -torch.linspace(0.5, 1, len(k), device=k.device)
    for name, x in (("query_scale", q), ("key_scale", k)):
        if name in own:
            found[name] = torch.linspace(0.5, 1, len(x), device=x.device)
    return found


def own_ids(q: Any, k: Any, first: int = 0) -> dict[str, Any]:
    """Ids by which key i belongs to query i, or without k each row to its neighbour; `first`: of this rank's rows."""
    if k is None:
        return {"query_ids": torch.arange(first, first + len(q), device=q.device) // 2}
    names = {"query_ids": q, "key_ids": k}
    return {name: torch.arange(first, first + len(x), device=x.device) for name, x in names.items()}


def step_of(loss_function: LossFunction, q: Any, k: Any, scale: Any, autocast: Any = None) -> Step:
    """The same for any loss of q, k and scale; a gradient is None where there is none."""

    def step() -> tuple[Any, ...]:
        for leaf in (q, k, scale):
            if leaf is not None:
                leaf.grad = None
        with torch.autocast(q.device.type, autocast) if autocast else contextlib.nullcontext():
            loss = loss_function()
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), q.grad, None if k is None else k.grad, scale.grad

    return step


def bare_products(plan: Mapping[str, Any], q: Any, k: Any, known: str = "all", gradients: bool = True) -> Step:
    """The plan's matrix products by torch, panel by panel: z, dq and dk, without that of a frozen side. z comes twice,
    but for rows that are kept, and where slopes are `known` "before" the sweep (`Traits.known`). Without k, those of
    panels on and above the diagonal; without gradients, z once.

    For fp32 features that the plan splits, products are as many and as deep as those of their bf16 terms.
    """
    one_sided, k = k is None, q if k is None else k
    m, n = len(q), len(k)
    rows, keys = min(plan["panel_rows"], m), min(plan["panel_keys"], n)
    if plan["strategy"] == "fused":
        rows = keys = min(16384, m, n)
    terms = SPLIT_TERMS if plan["split"] else 1
    if plan["split"]:
        q, k = (x.bfloat16().repeat(1, SPLIT_TERMS) for x in (q, k))
    # With out_dtype torch adds 16-bit products up in fp32; it can do so on GPUs only.
    wide: dict[str, Any] = {"out_dtype": torch.float32} if q.is_cuda and q.element_size() == 2 else {}
    sums = wide.get("out_dtype", q.dtype)

    def run() -> tuple[Any, ...]:
        z = torch.empty(rows * keys, dtype=q.dtype, device=q.device)
        dq, dk = (torch.zeros(size, q.shape[1] // terms, dtype=sums, device=q.device) for size in (rows, keys))
        for row0, key0 in itertools.product(range(0, m, rows), range(0, n, keys)):
            if one_sided and key0 < row0:
                continue
            a, b = q[row0 : row0 + rows], k[key0 : key0 + keys]
            g = z[: len(a) * len(b)].view(len(a), len(b))
            once = not gradients or known == "before" or plan["strategy"] == "rows" or row0 < plan["stash_rows"]
            for _ in range(1 if once else 2):
                torch.mm(a, b.T, out=g)
            if not gradients:
                continue
            sides = {"query": (dq[: len(a)], g, b), "key": (dk[: len(b)], g.T, a)}
            left_out = "key" if one_sided and key0 == row0 else plan.get("frozen")
            for total, left, right in (part for side, part in sides.items() if side != left_out):
                for term in right.split(total.shape[1], 1):
                    torch.addmm(total, left, term, out=total, **wide)
        return (dq, dk)

    return run
