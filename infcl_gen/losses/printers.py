"""Expressions as source text: for Triton kernels, for torch, and for people.

Generated code contains only symbols of the language and x, r, c, p, u, h, functions with a translation, and finite
numbers. A printer raises LossError for anything else. Terms and factors are sorted: text does not depend on hashing.
Numbers are printed with `repr`, so that they read back exactly.
"""

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from sympy import Expr, Symbol
from sympy.core.sorting import default_sort_key

from infcl_gen.losses import language
from infcl_gen.losses.language import LossError

# Symbols of derived expressions: x is the logit of a pair, r = logsumexp over a query's keys, c = logsumexp over a
# key's queries, p the logit of the positive, and positive_z its similarity. Of a query's own numbers u is the
# caller's weight, h = logsumexp over its own negatives, and state what the caller keeps of it, which next_state takes
# the place of. m is the mean of a query's logits, and d that of a key's. r2 is as r, of a constant multiple of x; rp
# is r of the row that is the positive, and cp is c of the key that is, of which uk is the caller's weight and statek
# the state, and pc is p as the sum of its column has it. tq is the mean of a query's logits by the softmax over keys of
# its guide, and tk that of a key's by the softmax over queries. Of the whole batch pooled = logsumexp over the
# positives of all queries, and pooled_slope follows from the terms' slopes by it.
_LETTERS = (
    "x", "r", "c", "p", "positive_z", "u", "h", "state", "next_state", "m", "d", "r2", "rp", "cp", "pc", "uk",
    "statek", "next_statek", "tq", "tk", "pooled", "pooled_slope",
)  # fmt: skip
_OWN = tuple(Symbol(each, real=True) for each in _LETTERS)
(
    x, r, c, p, positive_z, u, h, state, next_state, m, d, r2, rp, cp, pc, uk, statek, next_statek, tq, tk, pooled,
    pooled_slope,
) = _OWN  # fmt: skip


def temporary(number: int) -> Symbol:
    """A part of expressions that is computed once, under this name."""
    return Symbol(f"t{number}", real=True)


LARGEST_POWER = 5  # of the derivative of 1 / u**4
LONGEST_TEXT = 10_000  # characters; a translation that repeats its argument doubles the text with every nesting

_SYMBOLS = {**language.SYMBOLS, **{each.name: each for each in _OWN}}
_SUM, _PRODUCT, _POWER, _ATOM = range(4)


@dataclass(frozen=True)
class Printer:
    """One target language. `functions` maps a SymPy function to its translation, with "{}" for the arguments."""

    target: str
    functions: dict[Any, str]
    floats: bool = False  # print 2.0 and z * z rather than 2 and z**2
    at_least: str = ""  # the maximum of an argument and a number
    formulas: bool = False  # print whole formulas: functions of several arguments, every `similarity`

    def __call__(self, expression: Expr, names: Mapping[str, str] | None = None) -> str:
        """The expression as source text; `names` maps a symbol's name to the text that replaces it.

        Raises LossError for a symbol, function or number that has no translation.
        """
        return self._print(sympy.sympify(expression), names or {})[0]

    def _print(self, expression: Expr, names: Mapping[str, str]) -> tuple[str, int]:
        """The text, and the precedence of its outermost operation."""
        if isinstance(expression, Symbol):
            return self._symbol(expression, names), _ATOM
        if expression.is_number and (expression.is_Atom or not self.formulas):
            return self._number(expression)
        if expression.is_Add:
            return self._sum(expression, names), _SUM
        if expression.is_Mul:
            return self._product(expression, names)
        if expression.is_Pow:
            return self._pow(expression, names)
        translation = self.functions.get(expression.func)
        if expression.func == language.maximum and not self.formulas:
            return self._maximum(expression, names), _ATOM
        if translation is not None and (len(expression.args) == 1 or self.formulas):
            text = translation.format(", ".join(self._print(argument, names)[0] for argument in expression.args))
            if len(text) > LONGEST_TEXT:
                raise LossError(f"{self.target} would need more than {LONGEST_TEXT} characters for it")
            # A translation that is one call needs no parentheses inside other operations.
            is_call = isinstance(ast.parse(translation.format("u"), mode="eval").body, ast.Call)
            return text, (_ATOM if is_call else _SUM)
        raise LossError(f"{self.target} has no translation for {expression.func.__name__} in {expression}")

    def _maximum(self, expression: Expr, names: Mapping[str, str]) -> str:
        translation = self.functions.get(language.maximum)
        if translation is None:
            raise LossError(f"{self.target} has no translation for maximum in {expression}")
        number, *rest = sorted(expression.args, key=lambda argument: not argument.is_number)
        if number.is_number:
            return self.at_least.format(self._print(rest[0], names)[0], self._number(number)[0])
        text = str(translation.format(*(self._print(argument, names)[0] for argument in expression.args)))
        if len(text) > LONGEST_TEXT:
            raise LossError(f"{self.target} would need more than {LONGEST_TEXT} characters for it")
        return text

    def _bound(self, expression: Expr, names: Mapping[str, str], level: int) -> str:
        text, binds = self._print(expression, names)
        return text if binds >= level else f"({text})"

    def _symbol(self, symbol: Symbol, names: Mapping[str, str]) -> str:
        if re.fullmatch("t[0-9]+", symbol.name):
            return str(symbol.name)
        block = language.similarity_symbol(symbol.name) if self.formulas else None
        if symbol != _SYMBOLS.get(symbol.name, block):
            raise LossError(f"{self.target} does not know the symbol {symbol.name!r}")
        text = str(names.get(symbol.name, symbol.name))
        return text if re.fullmatch(r"[A-Za-z_]\w*(\[[^\[\]]*\])?", text) else f"({text})"

    def _number(self, number: Expr) -> tuple[str, int]:
        try:
            value = float(number)
        except (OverflowError, TypeError, ValueError) as error:
            raise LossError(f"{self.target}: {str(number)[:80]} has no value as a float") from error
        if not math.isfinite(value):
            raise LossError(f"{self.target}: the number {str(number)[:80]} is not finite")
        if not value and number.is_nonzero:
            raise LossError(f"{self.target}: the number {str(number)[:80]} is 0 as a float")
        if number.is_Rational and not self.floats:
            if number.is_Integer:
                return str(number), (_ATOM if value >= 0 else _SUM)
            return f"{number.p} / {number.q}", (_PRODUCT if value > 0 else _SUM)
        return repr(value), (_ATOM if value >= 0 else _SUM)

    def _sum(self, expression: Expr, names: Mapping[str, str]) -> str:
        def order(term: Expr) -> tuple[Any, ...]:
            return (is_negative(term), -len(term.free_symbols), default_sort_key(term))

        first, *rest = sorted(expression.args, key=order)
        text = self._bound(first, names, _SUM)
        for term in rest:
            negative = is_negative(term)
            text += (" - " if negative else " + ") + self._bound(-term if negative else term, names, _PRODUCT)
        return text

    def _product(self, expression: Expr, names: Mapping[str, str]) -> tuple[str, int]:
        if is_negative(expression):
            return f"-{self._bound(-expression, names, _PRODUCT)}", _SUM
        above: list[str] = []
        below: list[str] = []
        for factor in sorted(expression.args, key=lambda factor: (not factor.is_number, default_sort_key(factor))):
            if factor.is_Rational and not factor.is_Integer:
                if factor.p != 1:
                    above.append(self._number(sympy.Integer(factor.p))[0])
                below.append(self._number(sympy.Integer(factor.q))[0])
            elif factor.is_Pow and is_negative(factor.exp):
                below.append(self._bound(1 / factor, names, _POWER))
            else:
                above.append(self._bound(factor, names, _POWER))
        text = " * ".join(above) or self._number(sympy.Integer(1))[0]
        if below:
            text += f" / {below[0]}" if len(below) == 1 else f" / ({' * '.join(below)})"
        return text, _PRODUCT

    def _pow(self, expression: Expr, names: Mapping[str, str]) -> tuple[str, int]:
        base, exponent = expression.args
        if is_negative(exponent):
            one = self._number(sympy.Integer(1))[0]
            return f"{one} / {self._bound(1 / expression, names, _POWER)}", _PRODUCT
        if exponent == sympy.Rational(1, 2):
            return self.functions[sympy.sqrt].format(self._print(base, names)[0]), _ATOM
        whole, half = divmod(exponent, 1)
        if half == sympy.Rational(1, 2):  # of a derivative: u / (1 + u**2)**(3/2)
            return self._product(sympy.Mul(base**whole, sympy.sqrt(base), evaluate=False), names)
        if exponent.is_Integer and 2 <= exponent <= LARGEST_POWER:
            text = self._bound(base, names, _ATOM)
            return (" * ".join([text] * exponent), _PRODUCT) if self.floats else (f"{text}**{exponent}", _POWER)
        raise LossError(f"{self.target} has no translation for the power {expression}")


def temporaries(code: str, variable: str) -> int:
    """Tensors of the size of `variable` that torch holds at most while it computes `code`.

    An operand is freed after its operation. The result counts, the variable does not.
    """

    def count(node: ast.AST) -> tuple[int, int]:
        """The most tensors at once, and how many are left."""
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        if isinstance(node, ast.Name) or variable not in names:
            return 0, 0
        most = left = 0
        for operand in ast.iter_child_nodes(node):
            peak, remains = count(operand)
            most, left = max(most, left + peak), left + remains
        inside = 2 if isinstance(node, ast.Call) and "logsigmoid" in ast.unparse(node.func) else 1  # and a buffer
        return max(most, left + inside), 1

    return count(ast.parse(code, mode="eval").body)[0]


def is_negative(term: Expr) -> bool:
    return bool(term.could_extract_minus_sign()) if term.is_number else bool(term.as_coeff_Mul()[0].is_negative)


def _calls(module: str) -> dict[Any, str]:
    names = {sympy.exp: "exp", sympy.log: "log", sympy.tanh: "tanh", sympy.sqrt: "sqrt", language.sigmoid: "sigmoid"}
    return {function: f"{module}.{name}({{}})" for function, name in names.items()}


# fp32 arithmetic for Triton 3.6 and newer. tl has no power, and no tanh on every backend. This tanh saturates, and is
# exact to the fp32 rounding of 1.
triton_code = Printer(
    target="Triton",
    functions={
        **_calls("tl"),
        sympy.tanh: "2.0 * tl.sigmoid(2.0 * ({})) - 1.0",
        language.step: "tl.where(({}) > 0.0, 1.0, 0.0)",
        # tl.maximum drops a NaN; the sum is one where neither is larger.
        language.maximum: "tl.where(({0}) >= ({1}), {0}, tl.where(({1}) > ({0}), {1}, ({0}) + ({1})))",
        language.detach: "{}",  # the derivative is known
        language.softplus: "tl.maximum({0}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({0})))",
    },
    at_least="tl.where(({1}) > ({0}), {1}, {0})",
    floats=True,
)
# The same with functions of pieces/functions.py.jinja, which are good to a few roundings also where they are near 0.
pair_code = Printer(
    target="Triton",
    functions=triton_code.functions | {language.softplus: "softplus({})", language.sigmoid: "sigmoid({})"},
    at_least=triton_code.at_least,
    floats=True,
)
# The same of y = x log2(e), where x stands in sigmoids only: sigmoid2(y) is sigmoid(x).
pair_code_of_y = replace(pair_code, functions=pair_code.functions | {language.sigmoid: "sigmoid2({})"})
# Symbols stand for tensors. functional.softplus becomes linear beyond 20, an error of 2e-9; logsigmoid does not.
torch_code = Printer(
    target="torch",
    functions={
        **_calls("torch"),
        language.softplus: "-torch.nn.functional.logsigmoid(-({}))",
        language.step: "torch.sign(torch.relu({}))",  # of the dtype of its argument
        language.maximum: "torch.maximum({0}, {1})",
        language.detach: "({}).detach()",
    },
    at_least="torch.clamp({}, min={})",
)
# A formula over r (M,), c (N,), p (M,) as torch source.
dense_code = Printer(
    target="the dense reference",
    functions=torch_code.functions
    | {language.mean_over_queries: "({}).mean()", language.mean_over_keys: "({}).mean()"}
    | {language.sum_over_pairs: "({}).sum()"},
    at_least=torch_code.at_least,
)
# A query without positives adds nothing.
dense_code_of_several = Printer(
    target=dense_code.target,
    functions=dense_code.functions | {language.mean_over_queries: "(({}) * found).mean()"},
    at_least=torch_code.at_least,
)
# For people: `exp(x - r) / 2 - is_positive`. `load.parse_formula` reads it back.
display = Printer(
    target="the display",
    functions={sympy.sqrt: "sqrt({})"} | {function: f"{name}({{}})" for name, function in language.FUNCTIONS.items()},
    formulas=True,
)
