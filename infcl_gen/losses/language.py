"""The loss language: a loss is a formula over the similarities z_ij = q_i . k_j, written with SymPy objects.

    x = scale * z + bias                                             # the logit of one pair
    infonce = mean_over_queries(logsumexp_over_keys(x) - positive(x))

An expression in `z` describes every pair (i, j) at once. Reductions are functions that SymPy leaves alone, but each
knows its derivative. So `formula.diff(x)` is the gradient of the whole loss by the logit of one pair, in the stable
form exp(x_ij - r_i). `of_positive` has none: it changes with the pairs of another row. logsumexp_over_all_positives
changes the terms of other queries, too: `derive` adds them up.

| written                                  | one value per | means                                                   |
|------------------------------------------|---------------|---------------------------------------------------------|
| `z`, or `similarity(...)`                | pair          | q_i . k_j (or of other sides, or of a prefix of D)      |
| `guide`                                  | pair          | y_ij = u_i . v_j, of features of the caller's guide     |
| `is_positive`, `is_self`, `same_id`      | pair          | 1 or 0: which pairs are positive, one sample, of one id |
| `is_first`                               | query         | 1 of a row that comes before its positive, else 0       |
| `same_side`                              | pair          | 1 where `is_first` of both rows is the same, else 0     |
| `logsumexp_over_keys(x, where=w)`        | query         | r_i = log sum_j w_ij exp(x_ij); without `where` w is 1  |
| `logsumexp_over_queries(x, where=w)`     | key           | c_j = log sum_i w_ij exp(x_ij)                          |
| `logsumexp_over_negatives(x)`            | query         | h_i = log sum_l exp(x) of a query and its own negatives |
| `positive(x)`                            | query or key  | x at the positive                                       |
| `of_positive(e)`                         | query         | that of its positive, or of all: c, r of rows in pairs  |
| `mean_over_positives(x)`                 | query         | mean of x over a query's positives                      |
| `mean_of_keys(x, weight=w)`              | query         | sum_j w_ij x_ij / sum_j w_ij over all keys; else w is 1 |
| `mean_of_queries(x)`                     | key           | mean of x over all queries                              |
| `mean_by_softmax(x, guide)`              | query         | sum_j t_ij x_ij, t a guide's softmax over keys of y_ij  |
| `mean_by_softmax_over_queries(x, guide)` | key           | sum_i t_ij x_ij, t that softmax over queries            |
| `logsumexp_over_all_positives(e)`        | loss          | log sum_i exp(e_i) over queries, e of their positives   |
| `mean_over_queries(e)`                   | loss          | 1/M sum_i e_i                                           |
| `mean_over_keys(e)`                      | loss          | 1/N sum_j e_j                                           |
| `sum_over_pairs(e)`                      | loss          | sum_ij e_ij                                             |
| `exp`, `log`, `tanh`, `sqrt`             | as they come  | the usual functions                                     |
| `softplus`, `sigmoid`, `step`            | as they come  | evaluated stably; step(u) is 1 where u > 0, else 0      |
| `maximum(u, v)`                          | as they come  | the larger one; where they are equal it changes like v  |
| `scale`, `bias`                          | number        | what the caller passes (learnable)                      |
| `queries`, `keys`                        | number        | M and N                                                 |
| `positives_of_query`                     | query         | the number of a query's positives                       |
| `query_weight`, `key_weight`             | query, key    | the caller's weights, each in the mean over its side    |
| `query_scale`, `key_scale`               | query, key    | the caller's factors of `z`: 1 / temperature of each    |
| `query_state`, `key_state`               | query, key    | the caller's state of each, without gradient            |
| `next_state(e)`                          | query, key    | e without its gradient, which becomes the state         |
| `detach(e)`                              | as it comes   | e, whose derivative is 0                                |

In `where=`, `step(guide - positive(guide))` is 1 for the pairs above their query's threshold; so it is of `z`. There
`is_first` and `same_side` tell apart what one tensor of queries and documents holds: `torch.cat([queries, documents])`.

Besides: + - * /, integer powers up to 4, and numbers that are 0 or from 1e-30 to 1e30 in magnitude, whose
products with gradients fp32 holds. A formula has at most LARGEST_FORMULA parts. Kernels exist for a part of the
language; `derive` refuses the rest with a reason.
"""

import keyword
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import sympy
from sympy import Expr, Function, Integer, Rational, Symbol
from sympy.core.function import ArgumentIndexError
from sympy.logic.boolalg import BooleanAtom

from infcl_gen.errors import InputError
from infcl_gen.inputs.text import parse_prefixes

__all__ = [
    "FUNCTIONS", "SYMBOLS", "LossError", "LossSpec", "bias", "detach", "exp", "guide", "is_first", "is_positive",
    "is_self", "key_scale", "key_state", "key_weight", "keys", "log", "logsumexp_over_all_positives",
    "logsumexp_over_keys", "logsumexp_over_negatives", "logsumexp_over_queries", "maximum", "mean_by_softmax",
    "mean_by_softmax_over_queries", "mean_of_keys", "mean_of_queries", "mean_over_keys", "mean_over_positives",
    "mean_over_queries", "next_state", "of_positive", "positive", "positives_of_query", "queries", "query_scale",
    "query_state", "query_weight", "same_id", "same_side", "scale", "sigmoid", "similarity", "softplus", "sqrt", "step",
    "sum_over_pairs", "tanh", "z",
]  # fmt: skip

Reduction = Literal["mean", "none"]
Positives = Literal["diagonal", "label", "id", "none"]

LARGEST_FORMULA = 1024  # parts of a formula, and its terms when multiplied out; derived within 0.5 s
_COUNTED = 1_000_000  # parts or terms, no further
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30
INSTEAD = (
    "formulas have no comparisons, sorting, random numbers or tensors: use maximum(u, v), step, query_weight, ids, or "
    "for the largest a steep logsumexp_over_keys"
)
OWN_FUNCTIONS = (
    "functions of math, torch and numpy take no formulas: import exp, log, sqrt, tanh, sigmoid, softplus or maximum "
    "from infcl_gen.losses.language"
)
_MARGIN = "math.cos(m) * z - math.sin(m) * sqrt(maximum(1 - z**2, 1e-12)) for cos(acos(z) + m)"
SUBSTITUTES = {  # of functions and relations that others have
    "cos": _MARGIN, "acos": _MARGIN, "relu": "maximum(u, 0)",
    "Max": "maximum(u, v)", "Min": "-maximum(-u, -v)", "Abs": "maximum(u, -u)", "Heaviside": "step(u)",
    "sign": "2 * step(u) - 1", "Piecewise": "terms times step(u) and 1 - step(u)",
    "StrictGreaterThan": "step(u - v) for u > v", "StrictLessThan": "step(v - u) for u < v",
    "GreaterThan": "1 - step(v - u) for u >= v", "LessThan": "1 - step(u - v) for u <= v",
}  # fmt: skip
_EXPONENTS = (Rational(1, 2), *map(Integer, (1, 2, 3, 4)))


class LossError(InputError):
    """A loss is not well formed, or no kernel implements it."""


class PrefixesApartError(LossError):
    """A loss has kernels, but none for all of its prefixes at once."""


@dataclass(frozen=True)
class LossSpec:
    """A loss: its name, its formula, and which key is the positive of a query.

    name       an ASCII identifier; generated code contains it.
    formula    a SymPy expression in the language of this module, with one value for the whole batch.
    positives  "diagonal": key i for query i, hence as many keys as queries; "label": the key that `labels[i]` names;
               "id": every key with the query's id; "none": no key.
    prefixes   of the features, by number of columns, each with its weight: L is the sum over them of weight * the
               formula over so many first features of each side. Counts alone have a weight of 1; without any, L is the
               formula over all features. The last prefix is the whole embedding.
    renormalise  whether z of a prefix is the cosine of the first features: their product over both norms.
    reduction  "mean"; "none": calls may also take the loss of each query, whose factors are known in backward alone.
    doc        one sentence for people.
    source     paper and equation: "Zhai et al., arXiv 2303.15343, algorithm 1".
    use        Markdown: when to use it, and what to know. Packages store neither `source` nor `use`.

    Raises LossError for a field of the wrong type, and for a formula outside the language.
    """

    name: str
    formula: Expr
    positives: Positives = "diagonal"
    doc: str = ""
    source: str = field(default="", compare=False)
    use: str = field(default="", compare=False)
    prefixes: tuple[tuple[int, float], ...] = ()
    reduction: Reduction = "mean"
    renormalise: bool = False

    def __post_init__(self) -> None:
        if not is_identifier(self.name):
            raise LossError(f"loss name {self.name!r} is no ASCII identifier, or a word of Python")
        try:
            object.__setattr__(self, "prefixes", parse_prefixes(self.prefixes, "prefixes"))
            self._check()
        except InputError as error:
            raise LossError(f"loss {self.name}: {error}") from None

    def _check(self) -> None:
        for name in ("doc", "source", "use"):
            if not isinstance(text := getattr(self, name), str):
                raise LossError(f"{name} must be a string, not {type(text).__name__}")
        for name, values in (("positives", get_args(Positives)), ("reduction", get_args(Reduction))):
            if getattr(self, name) not in values:
                raise LossError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, values))}")
        if not isinstance(self.renormalise, bool):
            raise LossError(f"renormalise={self.renormalise!r} is neither True nor False")
        if self.renormalise and not self.prefixes:
            raise LossError("renormalise=True is of prefixes: give them, too, for example prefixes=[96, 192, 384]")
        if not isinstance(self.formula, Expr):
            raise LossError(f"the formula must be a SymPy expression, not {type(self.formula).__name__}")
        check_size(self.formula)
        try:
            object.__setattr__(self, "formula", _evaluated(self.formula, {}))
        except RecursionError:
            raise LossError("the formula is nested too deeply: write fewer functions inside of functions") from None
        _check_words(self.formula, set())
        for symbol in sorted(self.formula.free_symbols, key=str):
            if symbol not in SYMBOLS.values() and symbol != similarity_symbol(symbol.name):
                raise LossError(
                    f"unknown symbol {str(symbol)!r}; import {', '.join(sorted(SYMBOLS))} "
                    "from infcl_gen.losses.language instead of making symbols"
                )
        if not self.formula.atoms(*LOSS_FUNCTIONS):
            raise LossError(
                "the formula is not reduced to one number; use mean_over_queries, mean_over_keys or sum_over_pairs"
            )


def check_size(expression: Expr) -> None:
    """Raises LossError for more than LARGEST_FORMULA parts, or terms when multiplied out."""
    try:
        sizes = _size(sympy.sympify(expression), {})
    except RecursionError:
        sizes = (_COUNTED, _COUNTED)
    if max(sizes) > LARGEST_FORMULA:
        parts, terms = (f"{'over ' * (size == _COUNTED)}{size}" for size in sizes)
        of_functions = any(power.base.is_Function for power in sympy.sympify(expression).atoms(sympy.Pow))
        raise LossError(
            f"a formula has at most {LARGEST_FORMULA} parts, and as many terms when its products are multiplied out; "
            f"this one has {parts} and {terms}" + ": write sigmoid(u)**5 as exp(-5 * softplus(-u))" * of_functions
        )


def _size(expression: Expr, known: dict[Expr, tuple[int, int]]) -> tuple[int, int]:
    """Parts of an expression as written, and terms when multiplied out; `known` holds visited subexpressions."""
    if expression not in known:
        sizes = [_size(argument, known) for argument in expression.args]
        parts, counts = 1 + sum(size for size, _ in sizes), [count for _, count in sizes]
        terms = max(counts, default=1)
        if expression.is_Add:
            terms = sum(counts)
        elif expression.is_Mul:
            terms = math.prod(counts)
        elif expression.is_Pow and expression.exp.is_Integer:
            terms = counts[0] ** min(abs(int(expression.exp)), LARGEST_FORMULA)
        known[expression] = min(parts, _COUNTED), min(terms, _COUNTED)
    return known[expression]


def _check_words(expression: Expr, checked: set[Expr]) -> None:
    """Raises LossError for the first function, power or number outside the language."""
    if expression in checked or expression.is_Symbol:
        return
    checked.add(expression)
    if expression.is_Atom:
        finite = bool(expression.is_real and expression.is_finite)
        if expression != 0 and not (finite and SMALLEST_NUMBER <= abs(expression) <= LARGEST_NUMBER):
            limits = f"{SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}"
            said = f"numbers of the loss language are 0 or {limits} in magnitude, not {expression}"
            more = ": == compares formulas as they are written; a mask is a product, such as 1 - same_id"
            raise LossError(said + more * isinstance(expression, BooleanAtom))
    elif expression.is_Pow:
        if abs(expression.exp) not in _EXPONENTS:
            raise LossError(f"powers of the loss language are 1/2 and integers up to 4, not {expression}")
    elif not (expression.is_Add or expression.is_Mul or expression.func in FUNCTIONS.values()):
        name = expression.func.__name__
        known = (
            f": write {SUBSTITUTES[name]}"
            if name in SUBSTITUTES
            else f"; its functions are {', '.join(FUNCTIONS)}, sqrt"
        )
        raise LossError(f"{name} is not in the loss language{known}")
    for argument in expression.args:
        _check_words(argument, checked)


def _evaluated(expression: Expr, done: dict[Expr, Expr]) -> Expr:
    """The expression as SymPy makes it of its parts, which stored text gives again: pi and softplus(1) are numbers,
    2 * (z + 1) is a sum, and the exponents 2.0 and 0.5 are 2 and 1/2."""
    if isinstance(expression, sympy.NumberSymbol):
        return sympy.Float(expression)
    if expression.args and expression not in done:
        parts = [_evaluated(each, done) for each in expression.args]
        if expression.is_Pow and parts[1].is_Float:
            parts[1] = next((each for each in _EXPONENTS if float(each) == float(parts[1])), parts[1])
        numbers = expression.func in _VALUES and all(each.is_number for each in parts)
        done[expression] = sympy.N(_VALUES[expression.func](*parts)) if numbers else expression.func(*parts)
    return done.get(expression, expression)


def is_identifier(name: object) -> bool:
    """Whether `name` is an ASCII Python identifier of at most 64 characters, and no keyword."""
    form = "[A-Za-z_][A-Za-z0-9_]{0,63}"
    return isinstance(name, str) and re.fullmatch(form, name) is not None and not keyword.iskeyword(name)


_SYMBOLS = (
    "z scale bias queries keys is_positive is_self same_id is_first same_side positives_of_query query_weight "
    "key_weight query_scale key_scale query_state key_state"
)
SYMBOLS: dict[str, Symbol] = {name: Symbol(name, real=True) for name in _SYMBOLS.split()}
(
    z, scale, bias, queries, keys, is_positive, is_self, same_id, is_first, same_side, positives_of_query, query_weight,
    key_weight, query_scale, key_scale, query_state, key_state,
) = SYMBOLS.values()  # fmt: skip


Side = Literal["query", "key", "guide_query", "guide_key"]


def similarity(rows: Side = "query", columns: Side = "key", first: int | None = None) -> Symbol:
    """Dot products between two sides, of the first `first` features if given; `similarity()` is `z`.

    `similarity("guide_query", "guide_key")` is `guide`: of the features that a teacher has of both sides.
    Two blocks in one denominator are `log(exp(logsumexp_over_keys(...)) + exp(logsumexp_over_keys(...)))`.
    """
    if (rows, columns) == ("guide_query", "guide_key") and first is None:
        return guide
    for side in (rows, columns):
        if side not in ("query", "key"):
            raise LossError(
                f"similarity of {side!r}: the sides are 'query' and 'key', or 'guide_query' and 'guide_key'"
            )
    if first is not None and (not isinstance(first, int) or first < 1):
        raise LossError(f"similarity of the first {first!r} features: give a positive integer")
    name = "z" if (rows, columns) == ("query", "key") else f"z_{rows}_{columns}"
    return Symbol(name if first is None else f"{name}_first_{first}", real=True)


def similarity_symbol(name: str) -> Symbol | None:
    """The symbol that `similarity` makes under this name, if any."""
    blocks = "_query_query|_key_key|_key_query"
    known = re.fullmatch(f"z({blocks})?(_first_[1-9][0-9]*)?|{guide.name}", name)
    return Symbol(name, real=True) if known else None


guide = Symbol("z_guide_query_guide_key", real=True)


def word_of(symbol: Symbol) -> str:
    """How a formula's author writes the symbol."""
    if symbol == guide:
        return "guide"
    sides = re.fullmatch("z_(query|key)_(query|key)", symbol.name)
    return f'similarity("{sides[1]}", "{sides[2]}")' if sides else str(symbol.name)


def _without_arrays(*args: Any) -> None:
    """Raises LossError for a tensor or an array among the arguments of a function."""
    for each in args:
        if getattr(each, "shape", ()):
            raise LossError(
                f"{type(each).__name__} is not in the loss language: masks are same_id, is_positive and step, and "
                "weights are query_weight and key_weight"
            )


def _opaque(name: str, slope: Callable[[Expr, Expr], Any], nargs: tuple[int, ...] = (1,)) -> Any:
    """A function f that SymPy leaves alone, with its derivative `slope(f(u), u)` by its first argument u.

    The slope of a reduction is *of one pair*: the change of the reduced value by the argument of pair (i, j).
    SymPy's chain rule then gives dL/dx_ij of a whole formula.
    """

    def fdiff(self: Expr, argindex: int = 1) -> Expr:
        if argindex != 1:  # a mask does not depend on the features
            raise ArgumentIndexError(self, argindex)
        return sympy.sympify(slope(self, self.args[0]))

    def new(cls: Any, *args: Any, where: Any = None, weight: Any = None, **options: Any) -> Any:
        given = (*args, *(each for each in (where, weight) if each is not None))
        _without_arrays(*given)
        return Function.__new__(cls, *given, **options)

    return type(name, (Function,), {"nargs": nargs, "fdiff": fdiff, "__new__": new, "__module__": __name__})


def _share(r: Expr, x: Expr) -> Expr:
    """The share of a pair in its log-sum-exp, whose second argument is a mask."""
    return math.prod(r.args[1:]) * sympy.exp(x - r)


def _of_another_row(f: Expr) -> Expr:
    raise LossError(f"{f} has no slope of one pair: it changes with the pairs of another row")


logsumexp_over_keys = _opaque("logsumexp_over_keys", _share, nargs=(1, 2))
logsumexp_over_queries = _opaque("logsumexp_over_queries", _share, nargs=(1, 2))
logsumexp_over_negatives = _opaque("logsumexp_over_negatives", lambda h, x: 0, nargs=(1, 2))  # its keys are in no pair
positive = _opaque("positive", lambda f, x: is_positive)
of_positive = _opaque("of_positive", lambda f, r: _of_another_row(f))
logsumexp_over_all_positives = _opaque("logsumexp_over_all_positives", _share)
mean_over_positives = _opaque("mean_over_positives", lambda f, x: is_positive / positives_of_query)
mean_of_keys = _opaque(
    "mean_of_keys", lambda f, x: math.prod(f.args[1:]) / keys / math.prod(map(f.func, f.args[1:])), nargs=(1, 2)
)
mean_of_queries = _opaque("mean_of_queries", lambda f, x: 1 / queries)
mean_by_softmax = _opaque(
    "mean_by_softmax", lambda f, x: sympy.exp(f.args[1] - logsumexp_over_keys(f.args[1])), nargs=(2,)
)
mean_by_softmax_over_queries = _opaque(
    "mean_by_softmax_over_queries", lambda f, x: sympy.exp(f.args[1] - logsumexp_over_queries(f.args[1])), nargs=(2,)
)
mean_over_queries = _opaque("mean_over_queries", lambda f, e: 1 / queries)
mean_over_keys = _opaque("mean_over_keys", lambda f, e: 1 / keys)
sum_over_pairs = _opaque("sum_over_pairs", lambda f, e: 1)
step = _opaque("step", lambda f, u: 0)
sigmoid: Any = _opaque("sigmoid", lambda f, u: f * sigmoid(-u))
softplus = _opaque("softplus", lambda f, u: sigmoid(u))
detach = _opaque("detach", lambda f, u: 0)  # a number is one without it, too
detach.eval = classmethod(lambda cls, u: u if u.is_number else None)
next_state = _opaque("next_state", lambda f, u: 0)


class maximum(Function):
    """The larger of two arguments; where they are equal it changes as the second does."""

    nargs = (2,)

    def __new__(cls, *args: Any, **options: Any) -> Any:
        _without_arrays(*args)
        return Function.__new__(cls, *args, **options)

    def fdiff(self, argindex: int = 1) -> Expr:
        u, v = self.args
        return step(u - v) if argindex == 1 else 1 - step(u - v)


def _sized(function: Any, u: Expr) -> Expr:
    _without_arrays(u)
    check_size(u)  # SymPy's simplification takes time exponential in the depth of `tanh(u) + u`
    return function(u)


exp, log, sqrt, tanh = (partial(_sized, function) for function in (sympy.exp, sympy.log, sympy.sqrt, sympy.tanh))
_VALUES: dict[Any, Callable[..., Expr]] = {
    softplus: lambda u: sympy.log(1 + sympy.exp(u)),
    sigmoid: lambda u: 1 / (1 + sympy.exp(-u)),
    step: lambda u: sympy.Heaviside(u, 0),
    maximum: sympy.Max,
}


SIMILARITIES = (Integer(-1), Rational(-1, 2), Integer(0), Rational(1, 2), Integer(1))  # of features of norm 1


def check_defined(pair: Expr) -> None:
    """Raises LossError where an expression of a pair, in z, scale and bias, has the logarithm or the root of what is
    negative at a similarity of SIMILARITIES, for a scale of 1 and a bias of 0."""
    for function in pair.atoms(sympy.log, sympy.Pow):
        if function.is_Pow and function.exp.is_Integer:
            continue
        value = function.args[0]
        for known, meaning in _VALUES.items():
            value = value.replace(known, meaning)
        for at in SIMILARITIES:
            found = sympy.N(value.xreplace({z: at, scale: Integer(1), bias: Integer(0)}))
            if found.is_extended_real and found < 0:
                raise LossError(
                    f"{function} is undefined at z = {at}, scale = 1, bias = 0; maximum({function.args[0]}, 1e-6) "
                    "inside of it is defined everywhere"
                )


LOSS_FUNCTIONS = (mean_over_queries, mean_over_keys, sum_over_pairs)
ROW_FUNCTIONS = (
    logsumexp_over_keys, logsumexp_over_queries, logsumexp_over_negatives, positive, of_positive,
    logsumexp_over_all_positives, mean_over_positives, mean_of_keys, mean_of_queries, mean_by_softmax,
    mean_by_softmax_over_queries,
)  # fmt: skip
FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        *LOSS_FUNCTIONS,
        *ROW_FUNCTIONS,
        softplus,
        sigmoid,
        step,
        maximum,
        detach,
        next_state,
        sympy.exp,
        sympy.log,
        sympy.tanh,
    )
}
