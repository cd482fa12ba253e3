"""Inputs that break contrastive losses, drawn from a seed, and the check of a package against them.

`random_cases` draws a `Case` with the standard library alone, and makes one as wide as its loss allows. Tests let
hypothesis draw its fields, so that a failure shrinks.
"""

import contextlib
import dataclasses
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infcl_gen.inputs.problem import TORCH_DTYPES
from infcl_gen.runtime.negatives import shape as negatives_shape
from infcl_gen.runtime.selftest import compared
from infcl_gen.runtime.traits import Traits
from infcl_gen.verification.gate import GateRow, gate, gate_numbers, gate_states, truth_of
from infcl_gen.verification.oracle import Inputs, loss_module, oracle

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, word) for name, word in TORCH_DTYPES.items()}
DIMS = (1, 3, 16, 64, 96, 100, 384, 640, 768, 1152)
ROWS = (1, 2, 17, 63, 64, 65, 100, 127, 129, 130)
# By place: the CPU, the CPU with TRITON_INTERPRET=1 in the environment, a GPU.
SIZES = {"cpu": ROWS, "interpreter": (1, 17, 64, 65, 130), "cuda": (*ROWS, 1000, 2049, 4096)}
SCALES = (1e-3, 1.0, 14.3, 100.0, 1000.0)
BIASES = (None, 0.0, -10.0, 3.5, 10.0, -2.0)
# Random directions; positives almost equal, so loss and gradient nearly vanish; norms over four powers of two; every
# similarity about -1; few distinct rows; every third row 0; norms about 1e-3.
FEATURES = ("unit", "matched", "unnormalised", "negative", "duplicate", "zero_rows", "tiny")
# Of losses over prefixes: behind the first quarter of the columns, positives are longer and almost equal.
SOLVED = "solved"
# Row-major; column-major; every second row and column; a slice of something wider, whose rows are not 16-byte aligned;
# the first row seen M times (stride 0).
LAYOUTS = ("contiguous", "transposed", "strided", "sliced", "expanded")
ROUNDINGS = 10.0  # of a product, that similarities of draws keep away from thresholds
UPSTREAM = 2.0  # gradient of the loss, as a training step that divides or scales its loss has it; divided out exactly
PLAIN_PANEL = 64  # queries, and keys, of a small panel where no kernel has tiles
_PANELS = ("FORWARD_ROWS", "FORWARD_KEYS", "PANEL_ROWS", "PANEL_KEYS", "STASH_ROWS", "FINISH_ROWS")
_TILES = ("FORWARD_ROWS", "FORWARD_KEYS", "GRADIENT_ROWS", "GRADIENT_KEYS", "FUSED_ROWS", "FUSED_KEYS")


@dataclass(frozen=True)
class Case:
    """One input: sizes, numbers, the kind of features (FEATURES, SOLVED), and the layout in memory (LAYOUTS)."""

    queries: int
    keys: int
    dim: int
    dtype: str = "fp32"
    scale: float = 1.0
    bias: float | None = None
    features: str = "unit"
    layout: str = "contiguous"
    seed: int = 0


def inputs_of(module: ModuleType, case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The input of a case for an imported package."""
    traits = Traits(**module.SPEC["loss"]["traits"])
    own, alone = (*traits.vectors, *traits.scaled), (traits.ids, traits.triangle)
    found = tensors(case, traits.positives, device, *alone, own, traits.guided, traits.mutual, traits.partnered)
    if traits.thresholds:
        return apart_from_thresholds(module, found)
    if not traits.weighted:
        return found
    shorter = {  # so that weights add up to more than 0
        name: torch.nn.functional.normalize(x.double(), dim=1).div(2).to(x.dtype)
        for name in ("guide_queries", "guide_keys") if (x := getattr(found, name)) is not None
    }  # fmt: skip
    return found._replace(**shorter)


def apart_from_thresholds(module: ModuleType, inputs: Inputs) -> Inputs:
    """The inputs, or a guide's, with some rows moved until no similarity is within ROUNDINGS of its query's threshold,
    then negatives of pairs.

    Raises ValueError where rows stay near after 64 moves.
    """
    loss, generator = loss_module(module), torch.Generator().manual_seed(len(inputs.q))
    guided = "above_by_guide" in loss.CLASSES
    names = ["guide_queries", "guide_keys"] if guided else ["q", "k"] if inputs.k is not None else ["q"]
    for _ in range(64):
        compared = [getattr(inputs, name) for name in names]
        u, v = compared if guided else inputs.scaled(inputs.q, inputs.k, torch.float64)
        near = near_thresholds(loss.THRESHOLD, u, v, inputs.positives())
        if not bool(near.any()):
            return _negatives_apart(loss.THRESHOLD, inputs, generator)
        rows = (near.any(1), near.any(0)) if names[1:] else (near.any(1) | near.any(0),)
        inputs = inputs._replace(**{
            name: _moved(x, which, generator) for name, x, which in zip(names, compared, rows, strict=True)
        })  # fmt: skip
    raise ValueError(f"similarities of {len(inputs.q)} queries stay near their thresholds")


def _negatives_apart(threshold: tuple[float, float], inputs: Inputs, generator: torch.Generator) -> Inputs:
    """The inputs, with some negatives of pairs moved until none is within ROUNDINGS of its pair's threshold."""
    pairs, n = inputs.pairs(), inputs.negatives
    if pairs is None or n is None:
        return inputs
    unit = torch.finfo(torch.promote_types(n.dtype, torch.float32)).eps / 2
    q, other = (inputs.q.double()[each] for each in (pairs.first, pairs.other))
    most, size = threshold[0] * (q * other).sum(1) + threshold[1], (q * other).abs().sum(1)
    for _ in range(64):
        z, of_each = (torch.einsum("id,ild->il", a, b) for a, b in ((q, n.double()), (q.abs(), n.double().abs())))
        near = ((z - most[:, None]).abs() <= ROUNDINGS * unit * (of_each + size[:, None])) & (of_each > 0)
        if not bool(near.any()):
            return inputs._replace(negatives=n)
        n = _moved(n.flatten(0, 1), near.flatten(), generator).view_as(n)
    raise ValueError(f"negatives of {len(n)} pairs stay near their thresholds")


def near_thresholds(threshold: tuple[float, float], q: Tensor, k: Tensor | None, positives: Tensor) -> Tensor:
    """Which similarities of q (M, D) and k (M, D), or of the rows of q, are so near the threshold of their query, which
    follows from that of its positive, that ROUNDINGS may decide. Of D = 1 a similarity may be on it: a product of two
    numbers is the same in any kernel."""
    factor, margin = threshold
    unit, alone = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps / 2, q.shape[1] == 1
    q, k, at = q.double(), (q if k is None else k).double(), positives[:, None]
    z, size = q @ k.T, q.abs() @ k.abs().T
    distance = (z - (factor * z.gather(1, at) + margin)).abs()
    size += size.gather(1, at)
    near = (distance <= ROUNDINGS * unit * size) & (size > 0)
    if alone and (factor, margin) == (1, 0):
        near &= distance > 0
    return near.scatter_(1, at, False)


def _moved(x: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """x with some of its rows a sixteenth of their length away."""
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    far = x.double() + noise * x.double().norm(dim=1, keepdim=True) / (16 * math.sqrt(x.shape[1]))
    return x.clone().copy_(torch.where(rows[:, None], far, x.double()))


def tensors(
    case: Case,
    positives: str = "diagonal",
    device: torch.device | str = "cpu",
    with_ids: bool = False,
    one_sided: bool = False,
    vectors: Sequence[str] = (),
    guided: bool = False,
    mutual: bool = False,
    partnered: bool = False,
) -> Inputs:
    """The input of a case. "label" losses get explicit, repeating labels on odd seeds, and always if N < M.

    A loss of one side has at least two rows, and labels for an odd number of them; no row's is itself. Where rows must
    be pairs their number is even, and labels are those of `neighbours`. `partnered`: negatives are of pairs.
    """
    if one_sided:
        rows = max(2, case.queries - mutual * (case.queries % 2))
        case = dataclasses.replace(case, queries=rows, keys=rows)
    generator = torch.Generator().manual_seed(case.seed)
    shapes = ((case.queries, case.dim), (case.keys, case.dim))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k = (torch.nn.functional.normalize(x, eps=1e-6) for x in drawn)
    labels: Tensor | None = None
    ids: tuple[Tensor | None, Tensor | None] = None, None
    if one_sided and with_ids:
        ids = _ids(case, generator)[0], None
    if positives == "label" and (case.seed % 2 or case.keys < case.queries):
        labels = torch.randint(case.keys, (case.queries,), generator=generator)
    if one_sided and positives == "label":
        labels = None
        if case.seed % 2 or case.queries % 2:
            away = torch.randint(1, case.queries, (case.queries,), generator=generator)
            labels = neighbours(case.queries) if mutual else (torch.arange(case.queries) + away) % case.queries
    if case.features == "matched":
        own = torch.arange(case.queries) if labels is None else labels
        if one_sided:
            own = torch.arange(case.queries) % max(1, case.queries // 2) if labels is None else labels
            if ids[0] is not None:  # rows of one id, almost equal
                own = ids[0].unique(return_inverse=True)[1]
        q = k[own % case.keys] + 0.05 * q
    elif case.features == "unnormalised":
        q, k = (x * torch.exp2(4 * torch.rand(len(x), 1, generator=generator).to(x) - 2) for x in (q, k))
    elif case.features == "negative":
        q, k = q[:1] + 0.02 * q, -(q[:1] + 0.02 * k)
    elif case.features == "duplicate":
        q, k = q[torch.arange(len(q)) % 3 % len(q)], k[torch.arange(len(k)) % 2 % len(k)]
    elif case.features == "zero_rows":
        q[::3], k[1::3] = 0.0, 0.0
    elif case.features == "tiny":
        q, k = 1e-3 * q, 1e-3 * k
    elif case.features == SOLVED:
        own = torch.arange(case.queries) if labels is None else labels
        tail = slice(case.dim // 4, None)
        k[:, tail] *= 4.0
        q[:, tail] = k[own % case.keys, tail] + 0.05 * q[:, tail]
    q, k = (_laid_out(x.to(DTYPES[case.dtype]), case.layout, device) for x in (q, k))
    if with_ids and not one_sided:
        ids = _ids(case, generator)
    numbers = _vectors(case, q, generator, vectors, partnered)
    given = (labels, *ids, *numbers, *(_guides(case, generator) if guided else ()))
    others = None if one_sided else k
    return Inputs(q, others, case.scale, case.bias, *(None if x is None else x.to(device) for x in given))


def neighbours(rows: int) -> Tensor:
    """The positive of each of so many rows, which are pairs 0 and 1, 2 and 3, and so on."""
    return torch.arange(rows) ^ 1


def _vectors(
    case: Case, q: Tensor, generator: torch.Generator, vectors: Sequence[str], partnered: bool
) -> tuple[Tensor | None, ...]:
    """Weights of queries, and of keys, some 0 and some negative; one to three negatives of each, or of each pair, by
    seed as hard as positives; states about that of a moving average in logarithms, of some -inf; scales of queries and
    of keys, from 1/2 to 2 and of some keys 0."""
    weight = key_weight = negatives = state = key_state = query_scale = key_scale = None
    if "query_weight" in vectors:
        weight = torch.randn(case.queries, generator=generator)
        weight[weight.abs() < 0.3] = 0.0
    if "key_weight" in vectors:
        key_weight = torch.randn(case.keys, generator=generator)
        key_weight[key_weight.abs() < 0.3] = 0.0
    if "negatives" in vectors:
        shape = (negatives_shape(partnered, q)[0], 1 + case.seed % 3, case.dim)
        negatives = torch.nn.functional.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=2)
        own = torch.nn.functional.normalize(q.to("cpu", torch.float64), dim=1, eps=1e-6)
        negatives = (negatives + (case.seed // 3 % 2) * own[: len(negatives), None]).to(DTYPES[case.dtype])
    if "query_state" in vectors:
        state = torch.randn(case.queries, generator=generator) - case.scale / 2
        state[:: 3 + case.seed % 3] = -torch.inf
    if "key_state" in vectors:
        key_state = torch.randn(case.keys, generator=generator) - case.scale / 2
        key_state[1 :: 2 + case.seed % 3] = -torch.inf
    if "query_scale" in vectors:
        query_scale = torch.exp2(2 * torch.rand(case.queries, generator=generator) - 1)
    if "key_scale" in vectors:
        key_scale = torch.exp2(2 * torch.rand(case.keys, generator=generator) - 1)
        key_scale[3::7] = 0.0
    return weight, key_weight, negatives, state, key_state, query_scale, key_scale


def _guides(case: Case, generator: torch.Generator) -> list[Tensor]:
    """What a guide has for queries and keys: by seed its similarities are some apart, all alike, or up to 900."""
    shapes, factor = ((case.queries, case.dim), (case.keys, case.dim)), (4.0, 1e-3, 30.0)[case.seed % 3]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    features = (factor * torch.nn.functional.normalize(x, eps=1e-6) for x in drawn)
    return [_laid_out(x.to(DTYPES[case.dtype]), case.layout, "cpu") for x in features]


def _ids(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids of queries and keys, by seed: some in common, those of neighbours, none in common, or one for all.

    Numbers 2 n and 2 n + 1 become ids that differ in their high halves only, which may be negative.
    """
    rows, keys = case.queries, case.keys
    kinds = (
        lambda: [torch.randint(max(1, keys // 2), (count,), generator=generator) for count in (rows, keys)],
        lambda: [torch.arange(rows), torch.arange(keys)],
        lambda: [torch.arange(rows) % 7, 8 + torch.arange(keys) % 7],
        lambda: [torch.zeros(count, dtype=torch.int64) for count in (rows, keys)],
    )
    query_ids, key_ids = ((number // 2 + (number % 2 << 40) - (1 << 39)) for number in kinds[case.seed // 2 % 4]())
    return query_ids, key_ids


def random_cases(module: ModuleType, examples: int, rows: Iterable[int] = ROWS) -> list[Case]:
    """`examples` cases, always the same, within the planned sizes of an imported package."""
    problem, draw = module.SPEC["problem"], random.Random(0)
    largest = min(problem["batch_size"], problem["keys"] or problem["batch_size"])
    sizes = [size for size in rows if size <= largest] or [1]
    solved = [SOLVED] * bool(Traits(**module.SPEC["loss"]["traits"]).slabs)
    # SOLVED among the first, for the few examples of the interpreter; twice, as an odd number of kinds take turns in
    # what follows from the parity of the index.
    features = (*FEATURES[:3], *solved, *FEATURES[3:], *solved)
    cases = []
    for index in range(examples):
        queries = draw.choice(sizes)
        keys = queries if module.SPEC["positives"] == "diagonal" else draw.choice(sizes)
        scale, bias = draw.choice(SCALES), draw.choice(BIASES)
        structure = features[index % len(features)]  # in turn, so that a few examples see all of them
        layout, seed = draw.choice(LAYOUTS), draw.randrange(2**31)
        if index % 2 == 0:  # kernels that read by descriptors run on contiguous rows only
            layout = LAYOUTS[0]
        case = Case(queries, keys, problem["dim"], problem["dtype"], scale, bias, structure, layout, seed)
        widened = index == FEATURES.index("unnormalised") and DTYPES[case.dtype].itemsize == 2
        cases.append(_widest(module, case, sizes) if widened else case)
    return cases


def _widest(module: ModuleType, case: Case, sizes: Sequence[int]) -> Case:
    """The case with as many queries and keys as a tile has, and at the largest scale whose loss is finite in fp32: what
    has so wide a range is computed again. Not of fp32, whose products of halves are as wrong there as the gate allows.
    """
    rows = max((size for size in sizes if size <= ROWS[-1]), default=case.queries)
    wide = [dataclasses.replace(case, queries=rows, keys=rows, scale=scale) for scale in reversed(SCALES)]
    largest = torch.finfo(torch.float32).max
    return next((each for each in wide if oracle(module, inputs_of(module, each, "cpu")).loss.abs() < largest), case)


def check_case(module: ModuleType, case: Case, device: torch.device | str = "cpu") -> list[GateRow]:
    """Judge one case run through a package, by autograd on odd seeds and by `loss_and_grads` on even ones."""
    inputs = inputs_of(module, case, device)
    truth, given = truth_of(module, inputs, with_numbers=case.seed % 2 == 1), inputs.given
    if not case.seed % 2:
        results = module.loss_and_grads(*inputs[:4], **given)
        return gate(results, truth) + gate_states(given, truth)
    sides = [side[side.isfinite()].abs() for side in truth.reference[1:3] if side is not None]
    # Gradients that the dtype holds must not leave it: fp16 ends at 65 504.
    fits = all(bool((UPSTREAM * side <= torch.finfo(inputs.q.dtype).max).all()) for side in sides)
    upstream = UPSTREAM if fits else 1.0
    (loss, *gradients), of_numbers = with_numbers(module, inputs, given, list(truth.numbers), upstream)
    results = (loss, *(None if each is None else each / upstream for each in gradients))
    of_numbers = {name: each / upstream for name, each in of_numbers.items()}
    return gate(results, truth) + gate_states(given, truth) + gate_numbers(loss, of_numbers, truth)


def with_numbers(
    module: ModuleType, inputs: Inputs, given: dict[str, Any], names: Sequence[str], upstream: float = 1.0
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """`autograd_results`, and the gradients of the own numbers of these names. `given`: as there."""
    numbers = {name: given[name].detach().requires_grad_() for name in names}
    results = autograd_results(module, inputs, given | numbers, upstream, numbers.values())
    found = [each for each in results[5:] if each is not None]
    return results[:5], dict(zip(numbers, found, strict=True))


def check_package(
    module: ModuleType, place: str, examples: int = 14, share: slice = slice(None)
) -> Iterator[tuple[Case, list[GateRow]]]:
    """The numerics gate over `share` of `examples` random cases of an imported package, at a place of SIZES.

    Half of them run in small panels: the planned ones hold more rows than a dense reference can.
    """
    for case in random_cases(module, examples, SIZES[place])[share]:
        with small_panels(module) if case.seed // 2 % 2 else contextlib.nullcontext():
            rows = check_case(module, case, "cuda" if place == "cuda" else "cpu")
        yield case, rows


def unrepeated(module: ModuleType, inputs: Inputs) -> list[str]:
    """Which of (loss, dq, dk, dscale, dbias) differ in a bit between two calls."""
    first, second = (module.loss_and_grads(*inputs[:4], **inputs.given) for _ in range(2))
    return [
        name
        for name, a, b in compared(first, second)
        if not torch.equal(a.nan_to_num(), b.nan_to_num()) or not torch.equal(a.isnan(), b.isnan())
    ]


def nan_misplaced(module: ModuleType, inputs: Inputs) -> list[str]:
    """Which of (loss, dq, dk, dscale, dbias) are not NaN exactly where the oracle is, with a NaN in the last query.

    A pair that its log-sum-exp leaves out may be NaN, too, and so may dscale and dbias of a loss that has none. Beside
    columns of ids a query without a positive need not be: autograd multiplies its weight of 0 by NaN. In a sum over
    pairs a class may have a constant slope: what is then the same for any number in that place need not be NaN, either.
    What meets the query there may be NaN where autograd's `maximum` drops it.
    """

    def with_last(number: float) -> Inputs:
        q = inputs.q.clone()
        q[-1, 0] = number
        return inputs._replace(q=q)

    spoilt = with_last(math.nan)
    found = module.loss_and_grads(*spoilt[:4], **spoilt.given)
    traits, wrong = Traits(**module.SPEC["loss"]["traits"]), list[str]()
    words = set(re.findall(r"\w+", module.SPEC["loss"]["formula"]))
    for name, value, true in compared(found, oracle(module, spoilt)):
        ours = value.isnan().to(true.device)
        absent = name == "dbias" or (name == "dscale" and "scale" not in words)
        differs = true.isnan() & ~ours if traits.masked or absent else true.isnan() != ours
        if traits.columns_of_ids and name == "dq":
            assert inputs.query_ids is not None and inputs.key_ids is not None
            positives = (inputs.query_ids[:-1, None] == inputs.key_ids).any(1, keepdim=True)
            differs[:-1] &= positives.to(differs.device) | ours[:-1]
        if traits.pairs and bool(differs.any()):
            one, other = (getattr(oracle(module, with_last(number)), name) for number in (0.0, 1.0))
            differs &= (one != other) | ours
            if "maximum" in words and name == "dq" and not traits.triangle:
                differs[-1] &= ~ours[-1]
            elif "maximum" in words:
                differs &= ~ours
        if bool(differs.any()):
            wrong.append(name)
    return wrong


def small_panel(module: ModuleType) -> int:
    """Rows, and keys, of a small panel: those of the kernels' largest tile, or PLAIN_PANEL."""
    kernels: Any = getattr(module._schedule, "kernels", None)
    tiles = (getattr(kernels, name, None) for name in _TILES)
    return max((tile.value for tile in tiles if tile is not None), default=PLAIN_PANEL)


@contextlib.contextmanager
def small_panels(module: ModuleType) -> Iterator[None]:
    """Panels of `small_panel` rows and keys, so that a few hundred rows meet several panels."""
    schedule: Any = module._schedule
    size = small_panel(module)
    planned = {name: getattr(schedule, name) for name in _PANELS if hasattr(schedule, name)}
    if hasattr(schedule, "kernels"):
        planned.pop("FINISH_ROWS")  # of a kernel's program
    try:
        for name, rows in planned.items():
            setattr(schedule, name, min(rows, size))
        yield
    finally:
        for name, rows in planned.items():
            setattr(schedule, name, rows)


def crowded(module: ModuleType, case: Case, ranks: int) -> Case:
    """The case with as many rows and keys as fill more than a small panel on one rank beside two on each other rank,
    as far as the planned sizes go."""
    problem, least = module.SPEC["problem"], small_panel(module) + 2 * ranks
    planned = problem["batch_size"], problem["keys"] or problem["batch_size"]
    queries, keys = (max(rows, min(most, least)) for rows, most in zip((case.queries, case.keys), planned, strict=True))
    return dataclasses.replace(case, queries=queries, keys=keys)


def autograd_results(
    module: ModuleType,
    inputs: Inputs,
    given: Any = None,
    upstream: float = 1.0,
    others: Iterable[Tensor] = (),
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """(loss, dq, dk, dscale, dbias) of `contrastive_loss` through autograd, and the gradients of `others`, some of the
    keywords' tensors; gradients are those of upstream * loss.
    `given`: the keywords, where it is to leave the next states; those of `inputs` if there are none.

    None of a side that the package has as frozen, and of no k.
    """
    frozen = module.SPEC["problem"]["frozen"]
    passed = zip(inputs[:2], ("query", "key"), strict=True)  # as they lie in memory
    sides = [None if x is None else x.detach().requires_grad_(side != frozen) for x, side in passed]
    leaves = [*sides, *inputs.leaves(inputs.q.dtype, torch.promote_types(inputs.q.dtype, torch.float32))[2:]]
    loss = module.contrastive_loss(*leaves, **(given or inputs.given), **options)
    leaves += others
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(upstream * loss, wanted))
    return (loss.detach(), *(next(gradients) if x is not None and x.requires_grad else None for x in leaves))


def _laid_out(x: Tensor, layout: str, device: torch.device | str) -> Tensor:
    x = x.to(device)
    rows, columns = x.shape
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "expanded":
        return x[:1].expand(rows, columns)
    if layout == "strided":
        return x.new_full((2 * rows, 2 * columns), float("nan"))[::2, ::2].copy_(x)
    if layout == "sliced":
        return x.new_full((rows + 2, columns + 3), float("nan"))[1:-1, 1:-2].copy_(x)
    return x.contiguous()
