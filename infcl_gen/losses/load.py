"""Losses by name: built in, or `FILE.py:NAME` from the user's own file. Losses as literals, written and read."""

import ast
import contextlib
import dataclasses
import itertools
import operator
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import sympy
from sympy import Expr, Number, sqrt, sympify

from infcl_gen.files import checksum
from infcl_gen.inputs.text import one_line, suggestion
from infcl_gen.losses.builtin import BUILTIN_LOSSES
from infcl_gen.losses.language import (
    FUNCTIONS,
    INSTEAD,
    OWN_FUNCTIONS,
    SUBSTITUTES,
    SYMBOLS,
    LossError,
    LossSpec,
    is_identifier,
    similarity_symbol,
)
from infcl_gen.losses.printers import LARGEST_POWER, LONGEST_TEXT, display

_LARGEST_NUMBER = 1e300
_WORDS = sorted({*FUNCTIONS, *SYMBOLS, "guide", "similarity"})
_read: ContextVar[tuple[str, ...]] = ContextVar("read", default=())  # the files that are being executed
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub}


def load_loss(name: object) -> LossSpec:
    """The built-in loss `name`, or the LossSpec called NAME in FILE.py for `FILE.py:NAME`; a LossSpec is itself.

    The file is executed; nothing is written beside it, and it does not stay importable.
    Raises LossError of one line for an unknown name, an unreadable file, and any exception while the file runs.
    """
    if isinstance(name, LossSpec):
        return name
    if not isinstance(name, str):
        raise LossError(f"--loss: expected a name or FILE.py:NAME, not {type(name).__name__}")
    if name in BUILTIN_LOSSES:
        return BUILTIN_LOSSES[name]
    file, colon, attribute = name.rpartition(":")
    if not colon:
        near = suggestion(name, sorted(BUILTIN_LOSSES))
        raise LossError(f"--loss: {name!r} is neither a built-in loss nor FILE.py:NAME{near}")
    if not is_identifier(attribute):
        raise LossError(f"--loss: {attribute!r} in {name!r} is not an ASCII identifier; expected FILE.py:NAME")
    defined = _executed(file)
    if attribute not in defined:
        found = sorted(key for key, value in defined.items() if isinstance(value, LossSpec))
        raise LossError(f"--loss: {file!r} defines no {attribute}; its losses: {', '.join(found) or 'none'}")
    spec = defined[attribute]
    if not isinstance(spec, LossSpec):
        raise LossError(f"--loss: {attribute} in {file!r} is of type {type(spec).__name__}, not LossSpec")
    return spec


def is_being_read(name: object) -> bool:
    """Whether the file of `FILE.py:NAME` is just executed, and asks for its own loss, which may not be defined yet."""
    return isinstance(name, str) and os.path.abspath(name.rpartition(":")[0]) in _read.get()


def over_prefixes(spec: LossSpec, prefixes: Any, renormalise: bool = False) -> LossSpec:
    """The loss over these prefixes, if there are any; it must have none of its own."""
    if not prefixes:
        return spec
    if spec.prefixes and (spec.prefixes, spec.renormalise) != (prefixes, renormalise):
        raise LossError(f"--prefixes: the loss {spec.name} has prefixes of its own; leave one of them out")
    return dataclasses.replace(spec, prefixes=prefixes, renormalise=renormalise)


def spec_as_dict(spec: LossSpec) -> dict[str, Any]:
    """The loss as literals, from which `spec_from_dict` makes it again without the user's file."""
    found: dict[str, Any] = {
        "name": spec.name,
        "formula": display(spec.formula),
        "positives": spec.positives,
        "doc": spec.doc,
    }
    if spec.prefixes:
        found["prefixes"] = [list(each) for each in spec.prefixes]
    if spec.renormalise:
        found["renormalise"] = True
    return found | ({"reduction": spec.reduction} if spec.reduction != "mean" else {})


def is_builtin(literals: Mapping[str, Any]) -> bool:
    """Whether the literals of a loss are those of the built-in loss of its name, over all features and rows at once."""
    found = BUILTIN_LOSSES.get(literals["name"])
    same = found is not None and all(literals.get(name) == value for name, value in spec_as_dict(found).items())
    return same and not {"prefixes", "reduction"} & {*literals}


def spec_from_dict(literals: Mapping[str, Any]) -> LossSpec:
    """The loss of these literals; nothing is executed. Raises LossError for what `spec_as_dict` cannot have written."""
    missing = sorted({"name", "formula", "positives"} - set(literals))
    if missing:
        raise LossError(f"a stored loss lacks {', '.join(missing)}")
    formula = parse_formula(literals["formula"])
    further = {name: literals[name] for name in ("prefixes", "renormalise", "reduction") if name in literals}
    return LossSpec(literals["name"], formula, literals["positives"], literals.get("doc", ""), **further)


def parse_formula(text: str) -> Expr:
    """The formula in a text of `printers.display`: numbers, + - * / **, and names of the loss language only.

    Raises LossError for anything else.
    """
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise LossError(f"a formula must be a string of at most {LONGEST_TEXT} characters")
    try:
        return sympify(_build(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise LossError(f"cannot read the formula {text[:80]!r}: {one_line(error)}") from error


def _build(node: ast.expr) -> Expr:
    expression = _built(node)
    if expression.is_Number and not _moderate(expression, _LARGEST_NUMBER):
        raise ValueError(f"a number in it exceeds {_LARGEST_NUMBER:g}")
    return expression


def _moderate(number: Expr, limit: float) -> bool:
    return bool((max(abs(number.p), number.q) if number.is_Rational else abs(number)) < limit)


def _built(node: ast.expr) -> Expr:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return sympify(value)
        case ast.Name(id=name) if (symbol := SYMBOLS.get(name) or similarity_symbol(name)) is not None:
            return symbol
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as exponent)) if (
            0 < exponent <= LARGEST_POWER
        ):
            base = _build(left)  # with z, too, numbers grow: ((2 * z)**4)**4
            if not all(_moderate(number, _LARGEST_NUMBER ** (1 / exponent)) for number in base.atoms(Number)):
                raise ValueError(f"a power in it exceeds {_LARGEST_NUMBER:g}")
            return base**exponent
        case ast.BinOp(op=ast.Mult() | ast.Div()) | ast.UnaryOp(op=ast.USub()):
            return sympy.Mul(*_factors(node))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _SUMS:
            return _SUMS[type(operation)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            return sqrt(_build(argument))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_build, arguments))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not in the loss language")


def _factors(node: ast.expr) -> list[Expr]:
    """The factors of a product. SymPy gets all at once: it expands 2 * (z + 1) alone, but not 2 * (z + 1) * scale."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return [*_factors(left), *_factors(right)]
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return [*_factors(left), *(1 / factor for factor in _factors(right))]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return [sympy.Integer(-1), *_factors(operand)]
    return [_build(node)]


def _instead(error: BaseException) -> str:
    """The end of a message: what to write for what Python or SymPy refuses in a formula; nothing for other errors."""
    if isinstance(error, NameError | ImportError):
        name = re.match(r"(?:cannot import )?name '(\w+)'", str(error))
        if name and name[1] in SUBSTITUTES:
            return f"; write {SUBSTITUTES[name[1]]}"
        near = suggestion(name[1], _WORDS) if name else ""
        return f"; {INSTEAD}{near}" if near.startswith("; did you mean") else ""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_sympy = any(module.partition(".")[0] == "sympy" for module in frames)
    # 'Symbol' object is ..., unsupported operands 'Symbol' and ..., must be Tensor, not Symbol
    types = itertools.chain(*re.findall(r"'(\w+)' (?:object|and)\b|\bnot (\w+)", str(error)))
    named = any(map(_is_of_formulas, types))
    if str(error).startswith("Unknown options"):
        return "; no function takes that keyword: logsumexps take where=, a weight of each pair"
    wrong_count = re.search(r"takes .* argument", str(error))
    refused = isinstance(error, TypeError | ValueError | AttributeError | RuntimeError) and not wrong_count
    of_numbers = re.search("convert expression to float|must be Tensor", str(error))
    return f"; {OWN_FUNCTIONS if of_numbers else INSTEAD}" if refused and (by_sympy or named) else ""


def _is_of_formulas(word: str) -> bool:
    """Whether a type of this name is that of a part of a formula: Symbol, Mul, positive."""
    found = FUNCTIONS.get(word) or getattr(sympy, word, None)
    return isinstance(found, type) and issubclass(found, Expr)


def _executed(file: str) -> dict[str, Any]:
    """What a Python file defines."""
    path = Path(file)
    try:
        source = path.read_bytes() if path.suffix == ".py" and path.is_file() else None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise LossError(f"--loss: cannot read {file!r}: {one_line(error)}") from error
    if source is None:
        raise LossError(f"--loss: no Python file {file!r}")
    # An import loader would leave __pycache__ beside the user's file.
    name = f"infcl_gen_user_loss_{checksum(str(path.absolute()))}"
    outer = _read.set((*_read.get(), os.path.abspath(file)))
    module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up while it runs
    module.__file__ = str(path)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            exec(compile(source, str(path), "exec"), vars(module))
    except LossError as error:
        raise LossError(f"--loss: {file!r}: {one_line(error)}") from error
    except (Exception, SystemExit) as error:
        said = f"--loss: {file!r} fails with {type(error).__name__}: {one_line(error)}"
        raise LossError(said + _instead(error)) from error
    finally:
        _read.reset(outer)
        sys.modules.pop(name, None)
    return vars(module)
