"""Losses by name, from a user's file, and as literals; every failure is one line."""

from pathlib import Path

import pytest

import infcl_gen
from infcl_gen.errors import InputError
from infcl_gen.inputs.builtin import builtin_positives
from infcl_gen.losses import BUILTIN_LOSSES, derive, load_loss, spec_as_dict, spec_from_dict
from infcl_gen.losses.language import LossError
from infcl_gen.losses.load import parse_formula
from tests.calls import calls
from tests.losses.specs import DERIVABLE
from tests.losses.test_derive import ROADMAP

GOOD = """
from dataclasses import dataclass
from infcl_gen.losses.language import *

@dataclass
class Helper:
    cap: int = 20

x = Helper().cap * tanh(scale * z / Helper().cap)
MINE = LossSpec("mine", mean_over_queries(logsumexp_over_keys(x) - positive(x)), "label")
NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my losses.py"
    path.write_text(GOOD)
    return path


def test_a_loss_from_a_file(file: Path) -> None:
    spec = load_loss(f"{file}:MINE")
    assert spec.name == "mine" and not derive(spec).has_keys
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # no bytecode beside it


def test_a_loss_is_given_itself(file: Path) -> None:
    """The package is that of the file, from one entry of the cache."""
    flags = {"batch_size": 64, "dim": 16, "target": "cpu", "dtype": "fp32"}
    module = infcl_gen.load(loss=load_loss(f"{file}:MINE"), **flags)
    assert module is infcl_gen.load(loss=f"{file}:MINE", **flags)
    assert module.SPEC["loss"]["name"] == module.SPEC["problem"]["loss"] == "mine"
    assert infcl_gen.load(loss=BUILTIN_LOSSES["clip"], **flags).SPEC == infcl_gen.load(**flags).SPEC
    problem = infcl_gen.Problem(batch_size=64, dim=16, loss=load_loss(f"{file}:MINE"))
    assert problem.loss_name == "mine" and hash(problem) == hash(problem)
    with pytest.raises(infcl_gen.InputError, match=r"loss: \[1\] is no name"):
        infcl_gen.load(loss=[1], **flags)


@pytest.mark.parametrize("name", sorted(BUILTIN_LOSSES))
def test_built_in_losses(name: str) -> None:
    assert load_loss(name) is BUILTIN_LOSSES[name]


def test_built_in_losses_are_known_without_their_module() -> None:
    """Planted: a record whose `positives` are left out."""
    assert builtin_positives() == {name: spec.positives for name, spec in BUILTIN_LOSSES.items()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clipp", r"'clipp' is neither a built-in loss nor FILE\.py:NAME; did you mean 'clip'\?$"),
        ("", "FILE.py:NAME; valid: " + ", ".join(sorted(BUILTIN_LOSSES))),
        ("missing.py:X", "no Python file 'missing.py'"),
        (".:X", "no Python file"),
        ("nul\0.py:X", "cannot read|no Python file"),
        ("{file}:", "not an ASCII identifier"),
        ("{file}:a b", "not an ASCII identifier"),
        ("{file}:ÄÖ", "not an ASCII identifier"),
        ("{file}:OTHER", "defines no OTHER; its losses: MINE"),
        ("{file}:NUMBER", "is of type int, not LossSpec"),
        ("{file}:__name__", "is of type str, not LossSpec"),
    ],
)
def test_wrong_names(file: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_loss(name.replace("{file}", str(file)))
    assert "\n" not in str(error.value)


def test_a_name_is_text() -> None:
    with pytest.raises(LossError, match=r"expected a name or FILE\.py:NAME, not int"):
        load_loss(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"def", "SyntaxError"),
        (b"\xff\xfe", "SyntaxError|UnicodeDecodeError"),
        (b"a\0b", "ValueError|SyntaxError"),
        (b"import no_such_module_at_all", "ModuleNotFoundError"),
        (b"1 / 0", "ZeroDivisionError"),
        (b"raise SystemExit(0)", "SystemExit"),
        (b"raise RuntimeError('two\\nlines')", "two lines"),
        (b"def f(): f()\nf()", "RecursionError"),
        (
            b"from infcl_gen.losses.language import *\nX = LossSpec('a b', z)",
            "is no ASCII identifier, or a word of Python",
        ),
        (b"X = None", "is of type NoneType"),
        (b"", "defines no X; its losses: none"),
    ],
)
def test_files_that_fail(tmp_path: Path, source: bytes, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_bytes(source)
    with pytest.raises(InputError, match=message) as error:
        load_loss(f"{path}:X")
    assert "\n" not in str(error.value)


INSTEAD = (
    "formulas have no comparisons, sorting, random numbers or tensors: use maximum.u, v., step, query_weight, ids, or "
    "for the largest a steep logsumexp_over_keys"
)
OWN = "functions of math, torch and numpy take no formulas: import exp, .* or maximum from infcl_gen.losses.language"
OF_SAMPLES = "is not in the loss language: masks are same_id, is_positive and step, and weights are query_weight"
UNSAYABLE = {  # a term of a query, and what is said of it
    "sorted([z, scale])[0]": f"truth value of Relational.*; {INSTEAD}$",
    "positive(z) if z > 0 else z": f"; {INSTEAD}$",
    "max(z)": f"'Symbol' object is not iterable; {INSTEAD}$",
    "max(z, 0)": f"; {INSTEAD}$",
    "logsumexp_over_keys(z)[0]": f"; {INSTEAD}$",
    "positive(z) * (z > 0)": f"; {INSTEAD}$",
    "torch.relu(positive(z))": f"must be Tensor, not positive; {OWN}$",
    "math.exp(positive(z))": f"; {OWN}$",
    "positive(z) * torch.rand(4)": f"; {INSTEAD}$",
    "positive(relu(z))": r"'relu' is not defined; write maximum\(u, 0\)$",
    "max_over_keys(z)": f"'max_over_keys' is not defined; {INSTEAD}; did you mean 'mean_over_keys'\\?$",
    "logsumexp_over_keys(z, where=torch.rand(4, 4) > 0.5)": f"Tensor {OF_SAMPLES}",
    "maximum(positive(z), torch.rand(4))": f"Tensor {OF_SAMPLES}",
    "exp(torch.rand(4))": f"Tensor {OF_SAMPLES}",
    "logsumexp_over_keys(z, where=sympy.Array([1, 0]))": f"Array {OF_SAMPLES}",
    "undefined": "name 'undefined' is not defined$",
    "positive(z, 2)": r"takes exactly 1 argument \(2 given\)$",
    "range(0, 1, 0)": "range.. arg 3 must not be zero$",
    "float('positive')": "could not convert string to float: 'positive'$",
}


@pytest.mark.parametrize("term", UNSAYABLE)
def test_what_python_and_sympy_refuse_names_what_to_write(term: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import math, sympy, torch\nfrom infcl_gen.losses.language import *\n"
        f"X = LossSpec('own', mean_over_queries({term}))"
    )
    with pytest.raises(LossError, match=UNSAYABLE[term]) as error:
        load_loss(f"{path}:X")
    assert "\n" not in str(error.value)


def test_a_word_that_cannot_be_imported_has_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from infcl_gen.losses.language import max_over_keys")
    with pytest.raises(LossError, match=f"{INSTEAD}; did you mean 'mean_over_keys'"):
        load_loss(f"{path}:X")


@pytest.mark.parametrize("name", sorted(DERIVABLE) + sorted(ROADMAP))
def test_losses_as_literals(name: str) -> None:
    spec = DERIVABLE[name] if name in DERIVABLE else ROADMAP[name][0]
    literals = spec_as_dict(spec)
    assert all(isinstance(value, str) for value in literals.values())
    again = spec_from_dict(literals)
    assert spec_as_dict(again) == literals
    assert again == spec


@pytest.mark.parametrize("field", ["name", "formula", "positives"])
def test_stored_losses_are_checked(field: str) -> None:
    literals = spec_as_dict(BUILTIN_LOSSES["clip"])
    for bad in ("__import__('os')", 3, None):
        with pytest.raises(InputError):
            spec_from_dict({**literals, field: bad})
    with pytest.raises(InputError, match=f"lacks {field}"):
        spec_from_dict({key: value for key, value in literals.items() if key != field})


def test_what_a_file_prints_is_not_a_result(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("print('hello')\n" + file.read_text())
    load_loss(f"{file}:MINE")
    printed = capsys.readouterr()
    assert printed.out == "" and "hello" in printed.err


@pytest.mark.parametrize("inner", ["9", "(2*z)", "(9.5*z)", "sqrt(2)", "(z/7)"])
def test_powers_of_powers_are_refused_at_once(inner: str) -> None:
    formula = inner
    for _ in range(60):
        formula = f"({formula})**4"

    def refused() -> None:
        with pytest.raises(LossError, match="exceeds"):
            parse_formula(f"mean_over_queries({formula})")

    assert calls(refused) < 100_000  # hundredths of a second
