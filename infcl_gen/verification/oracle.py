"""What a package's numbers are compared with: the dense loss in fp64, and the same loss in plain torch.

The oracle is the package's `reference`, printed from the loss's formula and differentiated by autograd. It shares
neither the derived gradient nor any kernel with what it checks.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from infcl_gen.runtime.negatives import Pairs, pairs
from infcl_gen.runtime.selftest import Results as LossAndGrads
from infcl_gen.runtime.traits import SIDES

SLICE_ROWS = 2048


STATES = "query_state", "key_state"  # which a call replaces
NUMBERS = "query_weight", "key_weight", "negatives", "query_scale", "key_scale"  # own numbers that have gradients


class Inputs(NamedTuple):
    """The arguments of a loss: q (M, D), k (N, D) or None for a loss of one side, numbers or 0-dim tensors; labels (M,)
    for "label" losses; query_ids (M,) and key_ids (N,) for losses with ids, of one side query_ids alone; query_weight
    (M,), key_weight (N,), negatives (M, H, D), query_state (M,), key_state (N,), query_scale (M,) and key_scale (N,)
    for losses with them; guide_queries (M, D) and guide_keys (N, D) for losses with a guide."""

    q: Tensor
    k: Tensor | None
    scale: float | Tensor = 1.0
    bias: float | Tensor | None = None
    labels: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    query_weight: Tensor | None = None
    key_weight: Tensor | None = None
    negatives: Tensor | None = None
    query_state: Tensor | None = None
    key_state: Tensor | None = None
    query_scale: Tensor | None = None
    key_scale: Tensor | None = None
    guide_queries: Tensor | None = None
    guide_keys: Tensor | None = None

    @property
    def given(self) -> dict[str, Tensor | None]:
        """The keywords of a call: labels, and the others that the loss has; copies of states, which are written."""
        others = {name: x for name, x in zip(self._fields[5:], self[5:], strict=True) if x is not None}
        states = {name: x.clone() for name, x in others.items() if name in STATES}
        return {"labels": self.labels, **others, **states}

    def of_rank(self, rows: slice, keys: slice) -> "Inputs":
        """The part of some queries and some keys; labels stay those of all keys."""
        of_queries = (
            "q", "labels", "query_ids", "query_weight", "negatives", "query_state", "query_scale", "guide_queries",
        )  # fmt: skip
        of_keys = ("k", "key_ids", "key_weight", "key_state", "key_scale", "guide_keys")
        sides = {name: rows for name in of_queries} | {name: keys for name in of_keys}
        if self.negatives is not None and len(self.negatives) < len(self.q):  # of pairs, which are neighbours
            sides["negatives"] = slice(rows.start // 2, rows.stop // 2)
        return self._replace(**{
            name: x[side] for name, side in sides.items() if (x := getattr(self, name)) is not None
        })  # fmt: skip

    def scaled(self, q: Tensor, k: Any, wide: torch.dtype) -> tuple[Tensor, Any]:
        """q and k times the numbers of their rows, computed in a wide dtype and rounded to their own."""
        sides = ((q, self.query_scale), (k, self.key_scale))
        q, k = (x if a is None else (x.to(wide) * a.to(wide)[:, None]).to(x.dtype) for x, a in sides)
        return q, k

    def vectors(
        self, mathematics: Any, q: Tensor, scale: Tensor, bias: Tensor, products: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """What a query's term has besides its sum and its positive, in the dtype of `scale`: its weight, that
        of its positive, the log-sum-exp of its own negatives, whose products with q are of another dtype, if given, its
        state, and that of its positive."""
        found = [x.to(scale.dtype) for x in (self.query_weight, self.key_weight) if x is not None]
        if self.negatives is not None:
            dtype = products or scale.dtype
            pairs = self.pairs()
            rows = q if pairs is None else q[pairs.first]
            z = torch.einsum("id,ild->il", rows.to(dtype), self.negatives.to(dtype)).to(scale.dtype)
            x = mathematics.logit(z, scale, bias).masked_fill(negatives_left_out(mathematics, self, q), -torch.inf)
            found.append(x.logsumexp(1) if pairs is None else x.logsumexp(1)[pairs.of_row])
        found += [x.to(scale.dtype) for x in (self.query_state, self.key_state) if x is not None]
        return tuple(found)

    def pairs(self) -> Pairs | None:
        """The pairs of rows whose first ones have negatives; None where each query has its own."""
        own = self.negatives is None or len(self.negatives) == len(self.q)
        return None if own else pairs(self.positives(), len(self.q), self.q.device)

    def prefix(self, columns: int, renormalise: bool = False) -> "Inputs":
        """The inputs with so many first columns of the features, divided by their norms if asked."""
        q, k = self.q[:, :columns], None if self.k is None else self.k[:, :columns]
        if renormalise:
            q, k = normalize(q, dim=1), None if k is None else normalize(k, dim=1)
        return self._replace(q=q, k=k)

    @property
    def others(self) -> Tensor:
        """What queries are compared with."""
        return self.q if self.k is None else self.k

    def leaves(self, features: torch.dtype, numbers: torch.dtype) -> list[Any]:
        """Copies of q and k, and of scale and bias, in these dtypes, that require gradients; None for no k."""
        values = (self.q, self.k, self.scale, 0.0 if self.bias is None else self.bias)
        return [
            None
            if value is None
            else torch.as_tensor(value, dtype=dtype, device=self.q.device).detach().clone().requires_grad_()
            for value, dtype in zip(values, (features, features, numbers, numbers), strict=True)
        ]

    def positives(self) -> Tensor:
        """The key of each query, (M,)."""
        own = torch.arange(len(self.q)) if self.labels is None else self.labels
        if self.labels is None and self.k is None:  # the other half
            own = own.roll(len(own) // 2)
        return own.to(self.q.device)

    def same_id(self) -> Tensor | None:
        """Which pairs are of one id, (M, N), those of a row and itself, too; None without ids."""
        if self.query_ids is None:
            return None
        return self.query_ids[:, None] == (self.query_ids if self.key_ids is None else self.key_ids)

    def are_positive(self, positives: str) -> Tensor:
        """Which pairs are a query and its positive, (M, N), for a loss with these `positives`."""
        if positives == "none":
            return torch.zeros(len(self.q), len(self.others), dtype=torch.bool, device=self.q.device)
        if positives == "id":
            same_id = self.same_id()
            assert same_id is not None
            return same_id if self.k is not None else same_id.fill_diagonal_(False)
        keys = torch.arange(len(self.others), device=self.q.device)
        return self.positives()[:, None] == keys

    def classes(self, positives: str, products: torch.dtype, result: torch.dtype) -> tuple[Tensor, ...]:
        """What `loss_of_logits` takes besides logits, with similarities of a guide as `guided` has them."""
        found = self.positives() if positives == "label" else None, self.same_id(), self.guided(products, result)
        return tuple(each for each in found if each is not None)

    def guided(self, products: torch.dtype, result: torch.dtype) -> Tensor | None:
        """The guide's similarities, (M, N), multiplied in one dtype and of another; None without a guide."""
        if self.guide_queries is None or self.guide_keys is None:
            return None
        return (self.guide_queries.to(products) @ self.guide_keys.to(products).T).to(result)


def over_prefixes(
    mathematics: Any,
    inputs: Inputs,
    work: Callable[[Inputs], LossAndGrads],
    through: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> LossAndGrads:
    """`work` of a loss without prefixes for the inputs; else the sum of what it finds for each prefix, times weights.

    Gradients of features are as wide as these. Where features are divided by their norms, `through(x, found)` is that
    of x (rows, columns) from what `work` finds of the quotients; by default the gradient.
    """
    if not hasattr(mathematics, "PREFIXES"):
        return work(inputs)
    total: list[Any] = [0.0] * len(LossAndGrads._fields)
    for columns, weight in zip(mathematics.PREFIXES, mathematics.PREFIX_WEIGHTS, strict=True):
        results = work(inputs.prefix(columns, mathematics.RENORMALISE))
        if mathematics.RENORMALISE:
            own, back = inputs.prefix(columns), through or _through_normalize
            results = results._replace(dq=back(own.q, results.dq), dk=back(own.others, results.dk))
        for place, value in enumerate(results):
            padding = (0, inputs.q.shape[1] - columns) if value.dim() else ()
            total[place] = total[place] + weight * torch.nn.functional.pad(value, padding)
    return LossAndGrads(*total)


def _through_normalize(x: Tensor, of_quotient: Tensor) -> Tensor:
    """The gradient of x from that of `normalize(x)`."""
    with torch.enable_grad():
        own = x.detach().to(of_quotient.dtype).requires_grad_()
        (found,) = torch.autograd.grad(normalize(own, dim=1), own, of_quotient)
    return found


def oracle(module: ModuleType, inputs: Inputs) -> LossAndGrads:
    """The dense fp64 loss of the package and its gradients, all fp64, for features of any dtype and strides."""
    leaves = inputs.leaves(torch.float64, torch.float64)
    loss = module.reference(*leaves, **inputs.given, dtype=torch.float64)
    return _gradients(loss, leaves)


def trained_numbers(module: ModuleType, inputs: Inputs) -> list[str]:
    """The keywords of own numbers of queries and keys that have gradients. Scales of a frozen side have none."""
    frozen = f"{module.SPEC['problem'].get('frozen')}_scale"
    return [name for name in NUMBERS if name != frozen and getattr(inputs, name) is not None]


def gradients_of_numbers(module: ModuleType, inputs: Inputs) -> dict[str, Tensor]:
    """The oracle's gradients of `trained_numbers`, by keyword, in their shapes and fp64."""
    names = trained_numbers(module, inputs)
    leaves = {name: getattr(inputs, name).detach().double().requires_grad_() for name in names}
    if not leaves:
        return {}
    loss = module.reference(*inputs.leaves(torch.float64, torch.float64), **inputs.given | leaves, dtype=torch.float64)
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def plain_torch(module: ModuleType, inputs: Inputs) -> LossAndGrads:
    """The same loss as one would write it in torch, whose error sets the tolerance; as OpenCLIP under autocast."""
    mathematics = loss_module(module)
    return over_prefixes(mathematics, inputs, lambda part: plain_of_all(mathematics, part))


def plain_of_all(mathematics: Any, inputs: Inputs) -> LossAndGrads:
    """`plain_torch` of all features at once, from a package's loss.py.

    Similarities are a product in the features' dtype, so bf16 rounds them. Logits and cross-entropy are fp32 (fp64 for
    fp64 features), and autograd returns through the same dtypes.
    """
    statistics = torch.promote_types(inputs.q.dtype, torch.float32)
    leaves = q, k, scale, bias = inputs.leaves(inputs.q.dtype, statistics)
    q, k = inputs.scaled(q, k, statistics)
    z = (q @ (q if k is None else k).T).to(statistics)
    x, own = mathematics.logit(z, scale, bias), inputs.vectors(mathematics, q, scale, bias, q.dtype)
    products = q.dtype
    if hasattr(mathematics, "THRESHOLD"):  # rounded similarities would be on the other side of it
        products, z = statistics, q.to(statistics) @ (q if k is None else k).to(statistics).T
    taken = (x, *inputs.classes(mathematics.POSITIVES, products, statistics), *own)
    return _gradients(mathematics.loss_of_logits(*taken, **dense_numbers(mathematics, z, scale, bias)), leaves)


def oracle_by_slices(mathematics: Any, inputs: Inputs, features: torch.dtype = torch.float64) -> LossAndGrads:
    """The oracle for batches whose similarities do not fit into memory, from a package's loss.py alone; without bias.
    With the dtype of the features it is `plain_torch` for them.

    It takes SLICE_ROWS queries at a time and computes their similarities again for the gradient.
    """
    return over_prefixes(mathematics, inputs, lambda part: _by_slices(mathematics, part, features))


def _by_slices(mathematics: Any, inputs: Inputs, features: torch.dtype) -> LossAndGrads:
    leaves = q, k, factor, bias = inputs.leaves(features, torch.promote_types(features, torch.float32))
    q, k = inputs.scaled(q, k, factor.dtype)
    labels, ids, others = inputs.positives(), inputs.query_ids, q if k is None else k
    places = torch.arange(len(q), device=q.device)

    def of_pairs(rows: Tensor, _: Tensor, *classes: Tensor) -> Tensor:
        x = mathematics.logit((rows @ others.T).to(factor.dtype), factor, bias)
        part = inputs._replace(q=rows, labels=classes[0], query_ids=classes[1] if classes[1:] else None)
        terms: Tensor = pair_values(mathematics, x, "term", part)
        return terms.sum()

    def statistics(rows: Tensor, at: Tensor, *classes: Tensor) -> tuple[Tensor, ...]:
        x = mathematics.logit((rows @ others.T).to(factor.dtype), factor, bias)
        part = inputs._replace(q=rows, labels=classes[0], query_ids=classes[1] if classes[1:] else None)
        if guided and inputs.guide_queries is not None:
            y = inputs._replace(guide_queries=inputs.guide_queries[at]).guided(features, x.dtype)
            assert y is not None
            return x.logsumexp(1), (y.softmax(1) * x).sum(1)
        if several:
            same_id = part._replace(key_ids=ids if k is None else inputs.key_ids).same_id()
            assert same_id is not None
            if k is None:
                same_id = same_id & (at[:, None] != places)
            y = kept(x, part, at, ())
            return y.logsumexp(1), *mathematics.of_positives(x, same_id), y.logsumexp(0)
        y = kept(x, part, at, mathematics.CLASSES, further_left_out(mathematics, inputs, at, q, others))
        further = [] if times is None else [(times * y).logsumexp(1)]
        if guided_sides and inputs.guide_queries is not None:
            of_guide = inputs._replace(guide_queries=inputs.guide_queries[at]).guided(features, x.dtype)
            assert of_guide is not None
            of_queries, of_keys = ((of_guide.softmax(axis) * x).sum(axis) for axis in (1, 0))
            further += [of_queries, of_guide.logsumexp(0), of_keys]
        return y.logsumexp(1), y.logsumexp(0), x.gather(1, classes[0][:, None])[:, 0], *further

    guided, guided_sides = mathematics.POSITIVES == "none", hasattr(mathematics, "GUIDE_SHARES")
    pairs, several = hasattr(mathematics, "pair_term"), hasattr(mathematics, "of_positives")
    times = getattr(mathematics, "MULTIPLE", None)
    split = [each.split(SLICE_ROWS) for each in (q, places, labels, *(() if ids is None else (ids,)))]
    slices = zip(*split, strict=True)
    work = of_pairs if pairs else statistics
    found = [checkpoint(work, *each, use_reentrant=False, preserve_rng_state=False) for each in slices]
    if pairs:
        return _gradients(torch.stack(found).sum() / len(q), leaves)
    if guided:
        r, p = (torch.cat(each) for each in zip(*found, strict=True))
        own = inputs.vectors(mathematics, q, factor, bias, features)
        rest = numbers_of_rows(mathematics, r, p, r, factor, bias, len(q), len(others), own)
        return _gradients(mathematics.of_queries(r, p, **rest)[0].sum() / len(q), leaves)
    if several:
        *of_rows, by_key = zip(*found, strict=True)
        r, found_any, n, p = map(torch.cat, of_rows)
        own = inputs.vectors(mathematics, q, factor, bias, features)
        columns = None
        if "cp" in mathematics.OF_ROWS:
            c = torch.stack(by_key).logsumexp(0)
            columns = torch.cat([_of_positives(c, each, inputs.key_ids) for each in split[3]])
        rest = numbers_of_rows(mathematics, r, p, r, factor, bias, len(q), len(others), own, n, columns=columns)
        return _gradients((mathematics.of_queries(r, p, **rest)[0] * found_any).sum() / len(q), leaves)
    by_query, by_key, at_positive, *further = (tuple(each) for each in zip(*found, strict=True))
    c, p = torch.stack(by_key).logsumexp(0), torch.cat(at_positive)
    mean_key = others.mean(0)
    if hasattr(mathematics, "WEIGHT") and inputs.guide_queries is not None and inputs.guide_keys is not None:
        constant, slope = mathematics.WEIGHT  # of each query, from sums over keys
        u, v, k = (each.to(factor.dtype) for each in (inputs.guide_queries, inputs.guide_keys, others))
        summed = constant * k.sum(0) + slope * (u @ (v.T @ k))
        mean_key = summed / (constant * len(k) + slope * (u @ v.sum(0)))[:, None]
    of_all = mathematics.logit((q * mean_key).sum(1).mean(), factor, bias) * mean_share(mathematics)
    r = torch.cat(by_query)
    if hasattr(mathematics, "of_queries"):
        own = inputs.vectors(mathematics, q, factor, bias, features)
        at_positive_z = (q.to(factor.dtype) * others[labels].to(factor.dtype)).sum(1)
        second = torch.cat(further[0]) if further else None
        more = None, second, r[labels] if "rp" in mathematics.OF_ROWS else None, c
        rest = numbers_of_rows(mathematics, r, p, at_positive_z, factor, bias, len(q), len(others), own, *more)
        return _gradients(mathematics.of_queries(r, p, **rest)[0].sum() / len(q) + of_all, leaves)
    of_query, of_key = [r, p], [c, p]
    if guided_sides:
        of_slices, sums, means = further
        of_query.append(torch.cat(of_slices))
        of_key.append((torch.stack(sums).softmax(0) * torch.stack(means)).sum(0))
    loss = mathematics.query_term(*of_query).sum()
    if mathematics.HAS_KEYS:
        loss = loss + mathematics.key_term(*of_key).sum()
    return _gradients(loss / len(q) + of_all, leaves)


def _of_positives(c: Tensor, query_ids: Tensor, key_ids: Tensor | None) -> Tensor:
    """The log-sum-exp of the numbers of each query's positives, by ids; any number where there are none."""
    assert key_ids is not None
    same_id = query_ids[:, None] == key_ids[None, :]
    return c.expand(same_id.shape).masked_fill(~same_id & same_id.any(1, keepdim=True), -torch.inf).logsumexp(1)


def mean_share(mathematics: Any) -> float:
    """What multiplies the mean of all logits in L."""
    return float(getattr(mathematics, "MEAN_SHARE", 0.0))


def dense_numbers(mathematics: Any, z: Tensor, scale: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """What a loss.py's `loss_of_logits` takes besides logits and classes."""
    taken = inspect.signature(mathematics.loss_of_logits).parameters
    return {name: value for name, value in (("z", z), ("scale", scale), ("bias", bias)) if name in taken}


def numbers_of_rows(
    mathematics: Any,
    r: Tensor,
    p: Tensor,
    positive_z: Tensor,
    scale: Tensor,
    bias: Tensor,
    queries: int,
    keys: int,
    own: Sequence[Tensor] = (),
    positives: Tensor | None = None,
    second: Tensor | None = None,
    partners: Tensor | None = None,
    columns: Tensor | None = None,
    pooled: Sequence[Tensor] | None = None,
) -> dict[str, Tensor]:
    """What a loss.py's `of_queries` takes besides `r` and `p`. `own`: `Inputs.vectors`. `positives`: their numbers.
    `second`: the log-sum-exps of a multiple of the logits. `partners`: the log-sum-exps of positives.
    `columns`: those of their columns. `pooled`: what all queries have in common; made from the others if it is not
    given."""
    counts = {"queries": positive_z.new_tensor(queries), "keys": positive_z.new_tensor(keys)}
    found = {"positive_z": positive_z, "scale": scale, "bias": bias, **counts}
    if positives is not None:
        found["positives_of_query"] = positives
    if second is not None:
        found["r2"] = second
    if partners is not None:
        found["rp"] = partners
    if columns is not None:
        found |= {"cp": columns, "pc": p}
    names = mathematics.OF_ROWS
    found |= zip(names[len(names) - len(own) :], own, strict=True)
    if hasattr(mathematics, "of_all_positives"):
        found |= zip(("pooled", "pooled_slope"), pooled or pooled_numbers(mathematics, r, p, found), strict=True)
    return {name: found[name] for name in names}


def pooled_numbers(mathematics: Any, r: Tensor, p: Tensor, numbers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss.py's log-sum-exp over the positives of all queries, and the sum of slopes by it, 0-dim, from what
    `numbers_of_rows` finds besides."""
    of_each = [numbers[name] for name in ("positive_z", "scale", "bias")]
    total = mathematics.of_all_positives(p, *of_each).logsumexp(0)
    return total, slopes_of_pooled(mathematics, r, p, {**numbers, "pooled": total}).sum()


def slopes_of_pooled(mathematics: Any, r: Tensor, p: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """What the terms of queries change with the log-sum-exp over the positives of all, (M,)."""
    taken = {name: numbers[name] for name in mathematics.OF_ROWS if name != "pooled_slope"}
    found: Tensor = mathematics.slope_of_pooled(r, p, **taken)
    return found


def pair_values(mathematics: Any, x: Tensor, name: str, inputs: Inputs) -> Tensor:
    """The "term" or "slope" of each pair (M, N) by its class, from the logits and a package's loss.py."""
    values: Tensor = getattr(mathematics, f"pair_{name}")(x)
    placed = mathematics.POSITIVES in ("diagonal", "label")
    if (same_id := inputs.same_id()) is not None:
        values = torch.where(same_id, getattr(mathematics, f"{'same_id' if placed else 'positive'}_{name}")(x), values)
    if placed:
        at = torch.arange(len(x), device=x.device), inputs.positives()
        values = values.index_put(at, getattr(mathematics, f"positive_{name}")(x[at]))
    return values


def further_left_out(mathematics: Any, inputs: Inputs, places: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """Which pairs of the queries at `places` and all keys are above their query's threshold, in the widest dtype of a
    loss, or of sides that are left out; None of a loss without either. q and k are those whose products are
    similarities."""
    of_sides, above = [SIDES[name] for name in mathematics.CLASSES if name in SIDES], None
    if hasattr(mathematics, "THRESHOLD"):
        above = _above(mathematics, inputs, places, q, k)
    if not of_sides:
        return above
    first = inputs.positives() > torch.arange(len(inputs.q), device=q.device)
    found = torch.stack([(first[places, None] == i) & (first == j) for i, j in of_sides]).any(0)
    return found if above is None else found | above


def _above(mathematics: Any, inputs: Inputs, places: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Which of these pairs are above the threshold of their query."""
    factor, margin = mathematics.THRESHOLD
    guides = (inputs.guide_queries, inputs.guide_keys) if "above_by_guide" in mathematics.CLASSES else (q, k)
    u, v = (each.detach().double() for each in guides if each is not None)
    rows, own = u[places], v[inputs.positives()[places]]
    found: Tensor = rows @ v.T > (factor * (rows * own).sum(1) + margin)[:, None]
    return found


def negatives_left_out(mathematics: Any, inputs: Inputs, q: Tensor) -> Tensor:
    """Which negatives are above the threshold of their pair, in the widest dtype of a loss; none where queries have
    their own. q are the rows whose products are similarities."""
    assert inputs.negatives is not None
    found = inputs.pairs()
    if found is None or not hasattr(mathematics, "THRESHOLD"):
        return torch.zeros(inputs.negatives.shape[:2], dtype=torch.bool, device=q.device)
    q, (factor, margin) = q.detach().double(), mathematics.THRESHOLD
    most = factor * (q[found.first] * q[found.other]).sum(1) + margin
    above: Tensor = torch.einsum("id,ild->il", q[found.first], inputs.negatives.double()) > most[:, None]
    return above


def kept(x: Tensor, inputs: Inputs, places: Tensor, classes: Sequence[str], further: Tensor | None = None) -> Tensor:
    """Logits of the queries at `places` and all keys, -inf where the log-sum-exps leave a pair out: of these classes of
    `Traits`, or a row and itself; `further` are those of `further_left_out`."""
    if inputs.k is None:
        x = x.masked_fill(places[:, None] == torch.arange(x.shape[1], device=x.device), -torch.inf)
    if not classes:
        return x
    positive = inputs.positives()[:, None] == torch.arange(x.shape[1], device=x.device)
    same_id = inputs.same_id()
    left_out = torch.zeros_like(positive) if same_id is None else same_id & ~positive
    if further is not None:
        left_out |= further & ~positive
    return x.masked_fill(left_out | positive if "positive" in classes else left_out, -torch.inf)


def loss_module(module: ModuleType) -> Any:
    """The package's loss.py (its `__init__` need not offer it under this name)."""
    return importlib.import_module(f"{module.__name__}.loss")


def _gradients(loss: Tensor, leaves: list[Any]) -> LossAndGrads:
    given = [leaf for leaf in leaves if leaf is not None]
    found: Iterator[Any] = iter(torch.autograd.grad(loss, given, materialize_grads=True))
    gradients: list[Any] = [leaf if leaf is None else next(found) for leaf in leaves]
    return LossAndGrads(loss.detach(), *gradients)
