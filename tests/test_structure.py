"""The structure that design decisions rest on: imports run one way, and planning needs neither torch nor triton."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "infcl_gen"
# A part may import itself and what stands before it. Modules at the bottom may be used by all.
BOTTOM = ("version", "errors", "files", "garbage", "packages", "processes")
ORDER = (
    "inputs",
    "hardware",
    "losses",
    "kernels",
    "planning",
    "emission",
    "runtime",
    "triton_start",
    "lengths",
    "lazy",
    "verification",
    "step",
    "bench",
    "tuning",
    "report",
    "cli",
    "__main__",
)
DOOR = (  # what users meet first
    *("__init__.py", "errors.py", "inputs/builtin.py", "inputs/flags.py"),
    *("lazy.py", "lengths.py", "triton_start.py", "packages.py", "cli/cache.py", "runtime/warmup.py"),
)
MODULES = sorted(path for path in SOURCE.rglob("*.py"))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports anywhere in it, except under `if TYPE_CHECKING`."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def test_every_part_has_its_place() -> None:
    parts = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert parts == {*BOTTOM, *ORDER, "__init__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part == "__init__":
        return  # the driver: it calls the parts, and only the programs on top import it
    if part not in ("cli", "__main__"):
        assert "infcl_gen" not in imports_of(path), f"{part} imports the driver"
    ours = {name for name in imports_of(path) if name.startswith("infcl_gen.")}
    # Pure data, which the plan is made of and which ships with every package.
    ours -= {name for name in ours if f"{name}.".startswith(("infcl_gen.runtime.table.", "infcl_gen.runtime.traits."))}
    parts = {name.split(".")[1] for name in ours} - set(BOTTOM)
    if part in BOTTOM:
        assert not parts
        return
    known = parts & set(ORDER)
    later = {other for other in known if ORDER.index(other) > ORDER.index(part)}
    assert not later, f"{part} imports {later}, which come after it"


@pytest.mark.parametrize("path", sorted((SOURCE / "runtime").glob("*.py")), ids=lambda path: path.name)
def test_runtime_stands_alone(path: Path) -> None:
    """It is copied into packages that must not need infcl_gen: only the standard library, torch and triton."""
    outside = {name.split(".")[0] for name in imports_of(path) if not name.startswith("infcl_gen.runtime")} - set(
        sys.stdlib_module_names
    )
    assert outside <= ({"torch", "triton"} if path.name not in ("table.py", "traits.py") else set())


WAITS = re.compile(r"\.(new_tensor|item|nonzero|cpu|masked_select)\(")  # each copies between host and device


@pytest.mark.parametrize("folder", ["infcl_gen/runtime", "templates/triton"])
def test_what_a_package_runs_on_a_gpu_never_waits_for_it(folder: str) -> None:
    """No line calls what copies between host and device. The GPU suite runs every built-in loss where waiting is an
    error. Planted: `new_tensor` of a number."""
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".jinja")]
    lines = [(path.name, line.split("#")[0]) for path in files for line in path.read_text().splitlines()]
    assert len(lines) > 2000 and [(name, line) for name, line in lines if WAITS.search(line)] == []


def test_templates_stay_small() -> None:
    """The best measure of a generator is how little text makes all of its packages: `wc -l` over templates/.

    520 lines are of sums over pairs, which share opening, products and finish with softmaxes, but no sweep; 60 tell
    apart pairs of one id; 266 are of rows of panels, whose programs own queries and have a reference for each; 130
    combine the sum of a query and its positive; 361 are of a triangle, whose panels, positives and sums of one side are
    its own, 40 of these where it combines a sum and its positive, 11 where sums of other ranks come home; 20 are of
    queries' own numbers; 340 count and sum any number of positives, whose forward and gradient are their own on the
    CPU; 10 add the mean of all logits; 4 take factors of similarities; 70 make a second sum of each query; 36 take that
    of a row's partner; 308 are of a guide, whose sweep on the CPU and whose sums are their own, 83 of these for sums of
    both axes; 931 are of prefixes, whose tiles grow by slabs of columns, with statistics and gradients of logits for
    each, 362 of these on Hopper alone, for one side or both; 394 of their cosines, 258 of these on Hopper, whose
    gradient keeps g in tiles of shared memory and has its own loop, and 30 of these of one side and labels;
    15 are of a number of all positives; 34 leave out pairs
    above a threshold, 52 the same of rows in pairs, and whole blocks; 11 have the sums of columns in a query's term; 20
    take weights and states of keys, and positives in these sums; 31 add up the terms of each query of a sum over pairs;
    14 have weights of rows and keys of each prefix; 20 take sigmoids from powers of 2, by a quotient of the library,
    and print what is called; 67 take small logits apart, two by two, and mask whole tiles where registers allow;
    54 take tiny logits apart, too, and begin with the size that the panel before has met.
    """
    lines = {path: path.read_text().count("\n") for path in (ROOT / "templates").rglob("*.jinja")}
    pages = sum(count for path, count in lines.items() if path.parent.name == "report")  # print no package
    assert sum(lines.values()) - pages <= 5876 and pages <= 150


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def test_planning_and_emission_import_neither_torch_nor_triton_nor_numpy() -> None:
    done = run_python(
        "import sys\n"
        "import infcl_gen, infcl_gen.emission as emission\n"
        "from infcl_gen.inputs.problem import make_problem\n"
        "for profile in ('cpu', 'h200'):\n"
        "    emission.build(make_problem(batch_size=1024, dim=64, device_profile=profile))\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'triton', 'numpy'}))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_the_project_is_cheap() -> None:
    done = run_python(
        "import sys, infcl_gen\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} &"
        " {'torch', 'triton', 'sympy', 'jinja2', 'click'}))\n"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_what_users_write_and_catch_is_exported() -> None:
    import infcl_gen
    from infcl_gen import InfclError, InfeasibleError, InputError, LossSpec, Problem
    from infcl_gen.inputs.problem import make_problem
    from infcl_gen.losses.language import LossError

    assert type(make_problem(batch_size=1024, dim=64)) is Problem
    assert issubclass(LossError, InputError) and issubclass(InfeasibleError, InfclError)
    assert {name for name in infcl_gen.__all__ if getattr(infcl_gen, name, None) is None} == set()
    assert LossSpec.__module__ == "infcl_gen.losses.language"
    with pytest.raises(AttributeError, match="no attribute 'LossSpecs'"):
        _ = infcl_gen.LossSpecs


def calls_in_a_process(*code: str) -> int:
    """Calls of `run`, which `code` defines, in a process of its own: imports count."""
    lines = ("from tests.calls import calls", *code, "print(calls(run), file=sys.stderr)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(("import sys", *lines))], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return int(done.stderr)


def test_help_answers_at_once() -> None:
    code = ("def run():", "    from infcl_gen.cli import main", "    try:", "        main(['--help'])",
            "    except SystemExit:", "        pass")  # fmt: skip
    assert calls_in_a_process(*code) < 200_000  # 0.1 s


def test_generate_takes_about_a_second(tmp_path: Path) -> None:
    flags = f"batch_size='64k', dim=768, device_profile='h200', output={str(tmp_path / 'p')!r}"
    code = ("def run():", "    import infcl_gen", f"    infcl_gen.generate({flags})")
    assert calls_in_a_process(*code) < 2_500_000  # 0.8 s, of which importing SymPy takes half


def test_the_source_stays_small() -> None:
    """Limits to be raised knowingly: 24 635 lines read formulas, plan, emit, run, verify, measure and tune losses, 800
    of them for the general form and sums over pairs, 380 for ids from the call to the gate, 280 for rows of panels, 180
    for frozen sides, 670 for terms that combine sums, 620 for losses of one side from the call to the peers of bench,
    196 for their pairs over ranks, of which one of two computes each, from the table to what it costs; 625 for queries'
    own numbers from the call to the gate, 285 of these for states of either side, 480 for the mean of all logits and
    its weights, 97 for what refusals offer, 450 for any number of positives, from the formula on, 220 for factors of
    similarities, 260 for a second sum of each query, 145 for the sum of a row's partner, from the formula to
    the peers of bench, 325 for a guide and 266 for its softmaxes of both sides,
    502 for prefixes from the flag to the gate, 376 for their cosines, likewise, 290 for their kernels on Hopper,
    116 of these of cosines, 20 of one side,
    65 for strips of hard negatives and what they take,
    50 for numbers at the planned size, 8 for a NaN that a constant slope does not read,
    29 for the blocks of variants, 163 for hard negatives of pairs, from the formula to the gate,
    255 for a number of all positives, from the formula to the gate, 265 for thresholds, from the formula to the draws,
    242 for thresholds and blocks of rows in pairs, likewise,
    386 for the sums of columns in a query's term, 196 of these by ids, from the formula to the gate, 91 for weights of
    keys, 296 for losses of single queries, likewise, 127 of these for sums over pairs and 38 over prefixes, 27 to
    print an expression of costs, and a literal, once, 47 for printed lines of 120 columns at most,
    35 for small panels in a ring, 12 for tiles that an input has computed again, 18 for
    numbers beyond a range, roundings of one sign and tiles of a stash, 20 for what ranks and wrong calls are
    told, 13 for the context of a thread, 21 for what `verify` is doing, 45 for packages without collections, 63 for a
    forward that begins and ends with the own keys, whose sums for others leave before its end, and their price;
    3 571 plan and run training steps, 15 of which remember costs, 10 count states and comparisons, 67 refuse what would
    fail in the first step;
    1 255 are what users meet first, 155 of which add up calls of lengths, 8 load what threads have built, 11 keep
    calls in graphs apart from others, 15 rehearse panels off the diagonal, 5 do without private names of torch,
    50 take a LossSpec itself,
    20 prefixes, 80 know built-in losses without SymPy and start Triton beside other work, and refuse a module's wrong
    arguments where it is made, 2 give recordings back, 26 refuse wrong prefixes and losses of a call, and pairs
    before there is a plan;
    5 keep the own part of a ring's sums at home, 28 read products back as they were written, and name what a refused
    formula has in its author's words, 40 make a formula of its parts as its text does, and say which numbers NaN
    reaches, 29 measure forward alone, 38 print slopes of powers of 2 and the functions that are called, 35 begin a
    gather's rows with the own keys, 57 take small logits apart, also beside masks, and shares of rows into the last
    kernel, 92 give rows of panels strips of keys, and tiles of their own, 68 take tiny logits
    apart with the size that panels hand on, 5 compare budgets of steps with devices that have a profile;
    50 head the modules of sweeps, of weights and of the device's state, 424 carry messages by copy engines,
    106 judge gradients of own numbers, 26 part bounds of errors from the gate, and keep doubled gradients within
    fp16, 51 head the modules of what templates of kernels read, 39 say why a formula is refused,
    3 read one as an example, 24 part forward into steps, 8 fail a loss
    that is seldom finite, 45 tell ranks of what one cannot take, count what ranks compute, and read negated tensors,
    12 keep files of comparisons that would lose some, 56 judge gradients of each slab of columns;
    850 make pages.
    The records of built-in losses count for nothing: a loss is added without a thought of lines."""
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    door = sum(lines[SOURCE / name] for name in DOOR)
    pages = sum(lines[path] for path in MODULES if path.parent.name == "report" or path == SOURCE / "cli" / "pages.py")
    step = sum(lines[path] for path in MODULES if path.parent.name == "step" or path == SOURCE / "cli" / "step.py")
    rest = sum(lines.values()) - door - pages - step - lines[SOURCE / "losses" / "builtin.py"]
    assert rest <= 25_568, f"{rest} lines: shorten what is there, or raise the limit and say why"
    assert door <= 1_255 and pages <= 850 and step <= 3_571
