"""Finding a loss by name (built in, or `FILE.py:NAME` from the user's own file), and writing it down as literals."""

from __future__ import annotations

import ast
import contextlib
import operator
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sympy import Expr, Number, sqrt, sympify

from infcl_gen.losses.builtin import BUILTIN_LOSSES
from infcl_gen.losses.language import FUNCTIONS, SYMBOLS, LossError, LossSpec, is_identifier, similarity_symbol
from infcl_gen.losses.printers import LONGEST_TEXT, display

_LARGEST_NUMBER = 1e300
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def load_loss(name: str) -> LossSpec:
    """Return the built-in loss `name`, or the LossSpec called NAME in FILE.py for `FILE.py:NAME`.

    The file is executed, because the user asked for it; nothing is written beside it and it does not stay importable.
    Raises LossError (an InputError) with one line for whatever is wrong: an unknown name, no file, a syntax error, an
    exception while it runs, no such name, or a value that is not a LossSpec.
    """
    if name in BUILTIN_LOSSES:
        return BUILTIN_LOSSES[name]
    file, colon, attribute = name.rpartition(":")
    if not colon:
        raise LossError(
            f"--loss: unknown loss {name!r}; built in are {', '.join(sorted(BUILTIN_LOSSES))}; "
            "a loss of your own is given as FILE.py:NAME"
        )
    if not is_identifier(attribute):
        raise LossError(f"--loss: {attribute!r} in {name!r} is not an ASCII identifier; expected FILE.py:NAME")
    module = _execute(file)
    if attribute not in vars(module):
        found = sorted(key for key, value in vars(module).items() if isinstance(value, LossSpec))
        raise LossError(f"--loss: {file!r} defines no {attribute}; its losses: {', '.join(found) or 'none'}")
    spec = vars(module)[attribute]
    if not isinstance(spec, LossSpec):
        raise LossError(f"--loss: {attribute} in {file!r} is a {type(spec).__name__}, not a LossSpec")
    return spec


def spec_as_dict(spec: LossSpec) -> dict[str, str]:
    """The loss as literals, enough to generate again without the user's file. Raises LossError for what is unknown."""
    return {"name": spec.name, "formula": display(spec.formula), "positives": spec.positives, "doc": spec.doc}


def is_builtin(literals: Mapping[str, Any]) -> bool:
    """Whether a loss that `spec_as_dict` wrote down is the built-in one of its name."""
    found = BUILTIN_LOSSES.get(literals["name"])
    return found is not None and spec_as_dict(found) == literals


def spec_from_dict(literals: Mapping[str, Any]) -> LossSpec:
    """The loss that `spec_as_dict` wrote down; nothing is executed. Raises LossError if it was tampered with."""
    missing = sorted({"name", "formula", "positives"} - set(literals))
    if missing:
        raise LossError(f"a stored loss lacks {', '.join(missing)}")
    formula = parse_formula(literals["formula"])
    return LossSpec(literals["name"], formula, literals["positives"], literals.get("doc", ""))


def parse_formula(text: str) -> Expr:
    """Read a formula as `printers.display` writes it: numbers, + - * / **, and the names of the loss language only."""
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise LossError(f"a formula must be a string of at most {LONGEST_TEXT} characters")
    try:
        return sympify(_build(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise LossError(f"cannot read the formula {text[:80]!r}: {_one_line(error)}") from error


def _build(node: ast.expr) -> Expr:
    expression = _built(node)
    if expression.is_Number and not _moderate(expression, _LARGEST_NUMBER):
        raise ValueError(f"a number in it exceeds {_LARGEST_NUMBER:g}")
    return expression


def _moderate(number: Expr, limit: float) -> bool:
    if number.is_Rational:
        return bool(max(abs(number.p), number.q) < limit)
    return not number.is_Float or bool(abs(number) < limit)


def _built(node: ast.expr) -> Expr:
    match node:
        case ast.Constant(value=int() | float() as value) if (
            not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER
        ):
            return sympify(value)
        case ast.Name(id=name) if (symbol := SYMBOLS.get(name) or similarity_symbol(name)) is not None:
            return symbol
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as exponent)) if 0 < exponent <= 4:
            base = _build(left)  # of z as well: ((2 * z)**4)**4 has ever larger numbers
            if not all(_moderate(number, _LARGEST_NUMBER**0.25) for number in base.atoms(Number)):
                raise ValueError(f"a power in it exceeds {_LARGEST_NUMBER:g}")
            return base**exponent
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            return sqrt(_build(argument))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_build, arguments))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not in the loss language")


def _execute(file: str) -> ModuleType:
    path = Path(file)
    try:
        source = path.read_bytes() if path.suffix == ".py" and path.is_file() else None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise LossError(f"--loss: cannot read {file!r}: {_one_line(error)}") from error
    if source is None:
        raise LossError(f"--loss: no Python file {file!r}")
    # Compiled here rather than by an import loader, so that no __pycache__ appears beside the user's file.
    name = "infcl_gen_user_loss"
    module = ModuleType(name)
    module.__file__ = str(path)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickling look their module up while it runs
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results: one object with --json
            exec(compile(source, str(path), "exec"), module.__dict__)
    except LossError as error:
        raise LossError(f"--loss: {file!r}: {_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise LossError(f"--loss: {file!r} fails with {type(error).__name__}: {_one_line(error)}") from error
    finally:
        if previous is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = previous
    return module


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or "no message"
