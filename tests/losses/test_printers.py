"""Printed text means what the expression means, is the same under any hashing, and is refused where unknown."""

import contextlib
import io
import math
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import sympy
import torch
from hypothesis import strategies as st

from infcl_gen.losses import LossError, parse_formula, torch_code, triton_code
from infcl_gen.losses.language import FUNCTIONS, bias, scale, sigmoid, softplus, tanh, z
from infcl_gen.losses.printers import display, p, r, x
from tests.tiers import LONG

ROOT = Path(__file__).resolve().parents[2]
numbers = st.one_of(
    st.integers(-20, 20).map(sympy.Integer),
    st.fractions(-20, 20, max_denominator=50).map(lambda f: sympy.Rational(f.numerator, f.denominator)),
    st.floats(-1e6, 1e6, allow_subnormal=False).map(sympy.Float),
)


def combined(inner: st.SearchStrategy) -> st.SearchStrategy:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda two: two[0] + two[1]),
        pairs.map(lambda two: two[0] - two[1]),
        pairs.map(lambda two: two[0] * two[1]),
        pairs.map(lambda two: two[0] / (two[1] ** 2 + 1)),
        inner.map(lambda one: one**2),
        inner.map(lambda one: sympy.sqrt(one**2 + 1)),
        inner.map(lambda one: 1 / sympy.sqrt(one**2 + 1)),
        inner.map(tanh),
        inner.map(sigmoid),
        inner.map(softplus),
        inner.map(lambda one: sympy.exp(tanh(one))),
        inner.map(lambda one: sympy.log(softplus(one) + 1)),
    )


expressions = st.recursive(st.one_of(st.sampled_from([z, scale, bias]), numbers), combined, max_leaves=6)


class Tl:
    """Triton's functions, on fp64 tensors."""

    exp, log, sqrt, sigmoid, abs = torch.exp, torch.log, torch.sqrt, torch.sigmoid, torch.abs

    @staticmethod
    def maximum(a: torch.Tensor, b: float) -> torch.Tensor:
        return a.clamp(min=b)


@hypothesis.given(expression=expressions, values=st.tuples(*[st.floats(-3, 3)] * 3))
def test_all_printers_agree_with_sympy(expression: sympy.Expr, values: tuple[float, float, float]) -> None:
    try:
        texts = [printer(expression) for printer in (torch_code, triton_code)]
    except LossError:
        return  # a power or number that is not in the language
    exact = expression.replace(sigmoid, lambda u: 1 / (1 + sympy.exp(-u)))
    exact = exact.replace(softplus, lambda u: sympy.log(1 + sympy.exp(u)))
    truth = complex(exact.subs(dict(zip((z, scale, bias), values, strict=True))).evalf(30))
    hypothesis.assume(abs(truth) < 1e12)
    tensors = dict(zip(("z", "scale", "bias"), (torch.tensor(v, dtype=torch.float64) for v in values), strict=True))
    for text in texts:
        value = float(eval(text, {"torch": torch, "tl": Tl}, tensors))
        assert math.isclose(value, truth.real, rel_tol=1e-7, abs_tol=1e-6), text


sums = st.tuples(numbers, st.sampled_from([z, scale, bias])).map(lambda two: two[0] + two[1])
factors = st.one_of(numbers, sums, sums.map(lambda one: 1 / one), expressions)
products = st.lists(factors, min_size=2, max_size=5).map(sympy.prod)


@hypothesis.given(
    expression=st.one_of(expressions, products, st.tuples(products, sums).map(lambda u: sigmoid(u[0]) * u[1]))
)
@hypothesis.example(0.25 * softplus(z) * (1 - z))
@hypothesis.example(-softplus(z) * (1 - z) / 3)
@hypothesis.example((1 - z) / 2 / (scale + 1))
def test_formulas_read_back(expression: sympy.Expr) -> None:
    """Planted: factors that are multiplied one after the other: SymPy expands 2 * (z + 1), if that is all."""
    try:
        text = display(expression)
    except LossError:
        return
    read = parse_formula(text)
    assert display(read) == text
    if all(abs(number) > 1e-300 for number in expression.atoms(sympy.Float)):  # else rounded as it is printed
        assert read == expression


def test_kernel_text() -> None:
    assert triton_code(scale * z + bias) == "scale * z + bias"
    assert triton_code((r - p) / 2) in ("(r - p) / 2.0", "r / 2.0 - p / 2.0")
    assert triton_code(scale * z, {"z": "z_tile", "scale": "a + b"}) == "(a + b) * z_tile"
    assert triton_code(z**2) == "z * z"
    assert triton_code(1 / z**5) == "1.0 / (z * z * z * z * z)"
    assert torch_code(sympy.sqrt(1 + z) ** 3) == "torch.sqrt(z + 1) * (z + 1)"
    assert triton_code(1 - z**2) == "1.0 - z * z"
    assert triton_code(1 / z**2) == "1.0 / (z * z)"
    assert triton_code(-z) == "-z"
    assert triton_code(2 * tanh(z)) == "2.0 * (2.0 * tl.sigmoid(2.0 * (z)) - 1.0)"
    assert triton_code(sympy.Float(0.1) * z) == "0.1 * z"
    assert triton_code(sympy.exp(x - r)) == "tl.exp(x - r)"
    assert triton_code(sympy.Integer(1)) == "1.0"


@pytest.mark.parametrize("printer", [triton_code, torch_code])
@pytest.mark.parametrize(
    "expression",
    [
        sympy.Symbol("z"),
        sympy.Symbol("__import__('os').system('true')", real=True),
        sympy.sin(z),
        sympy.Function("f")(z),
        sympy.Piecewise((z, z > 0), (0, True)),
        sympy.oo,
        sympy.nan,
        sympy.I,
        sympy.zoo,
        z**6,
        z**scale,
        z ** sympy.Rational(1, 3),
        pytest.param(sympy.Integer(10) ** 400 * z, id="huge"),
        pytest.param(sympy.Float("1e-400") * z, id="tiny"),
        FUNCTIONS["logsumexp_over_keys"](z),
        sympy.Derivative(sympy.Function("f")(z), z),
    ],
    ids=str,
)
def test_what_is_unknown_is_refused(printer, expression: sympy.Expr) -> None:
    with pytest.raises(LossError):
        printer(expression)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "z.real", "z if z else z", "lambda: z", "[z]", "z + 'a'", "9**9**9", "z**99", "unknown",
        "exp(z, z=1)", "exp(*z)", "1e999", "", "(", "z\0", "sum_over_pairs()", "True", "z < 1", "f'{z}'", "z_first_0",
        "(" * 5000 + "z" + ")" * 5000, "-" * 9000 + "z", "1/0 + z" * 3000,
    ],
)  # fmt: skip
def test_a_hostile_formula_is_refused(text: str) -> None:
    with pytest.raises(LossError):
        parse_formula(text)


def test_text_does_not_depend_on_hashing() -> None:
    code = (
        "from infcl_gen.losses import *\n"
        "from tests.losses.specs import DERIVABLE\n"
        f"for spec in list(DERIVABLE.values())[:: {1 if LONG else 3}]:\n"
        "    print(loss_context(derive(spec)), latex_of(derive(spec)), spec_as_dict(spec))"
    )
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    environment = {**os.environ, "PYTHONHASHSEED": "31337", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == here.getvalue() and result.stdout.strip()
