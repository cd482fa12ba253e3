"""The committed packages in generated/ are exactly what is generated today, anywhere and under any hash seed."""

import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from infcl_gen import cli
from infcl_gen.emission import build, read_package, rerender
from infcl_gen.emission.package import specific_part, with_digest
from infcl_gen.inputs.problem import make_problem
from tests.emission.golden import COST_MODEL, FOLDER, GOLDEN, WHOLE, golden_files, markdown
from tests.tiers import nightly

ROOT = FOLDER.parent

DIGESTS = """
import hashlib, json, sys
from infcl_gen.emission import build
from infcl_gen.inputs.problem import make_problem
problems = json.loads(sys.argv[1])
built = {name: build(make_problem(**flags)) for name, flags in problems.items()}
print(json.dumps({n: hashlib.sha256(repr(list(files.items())).encode()).hexdigest() for n, files in built.items()}))
"""


def digests(path: Path, **environment: str) -> dict[str, str]:
    """Digests of all golden packages as another interpreter generates them, with `path` first on sys.path."""
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, json.dumps(GOLDEN)],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
        cwd=environment.pop("cwd", "/"),
        env={**os.environ, "PYTHONPATH": str(path), **environment},
    )
    return json.loads(done.stdout)


def digests_here() -> dict[str, str]:
    built = {name: golden_files(name) for name in GOLDEN}
    return {name: hashlib.sha256(repr(list(files.items())).encode()).hexdigest() for name, files in built.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return digests_here()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_package_is_current(name: str) -> None:
    committed = read_package(FOLDER / name, partial=True)
    today = rerender(FOLDER / name)
    differing = sorted(
        path for path in committed.files.keys() | today.keys() if committed.files.get(path) != today.get(path)
    )
    assert not differing, f"generated/{name} differs in {', '.join(differing)}; if intended: make golden"
    text = {path: content.decode() for path, content in today.items() if path != "manifest.json"}
    problem = golden_files(name)
    part = (problem, ()) if name in WHOLE else specific_part(problem)
    assert (text, committed.missing) == part, "the golden problem has changed; if intended: make golden"


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - set(WHOLE)))
def test_partial_packages_hold_what_is_specific_and_the_rest_is_as_in_a_whole_one(name: str) -> None:
    """A change of the runtime leaves them as they are: whatever they leave out is the text of a whole package of the
    same strategy, but for names."""
    files = golden_files(name)
    kept = read_package(FOLDER / name, partial=True)
    assert set(kept.files) == {"kernels.py", "loss.py", "manifest.json", "schedule.py", "spec.py"}
    assert set(kept.files) | set(kept.missing) == {*files, "manifest.json"}
    whole = read_package(FOLDER / "clip_h200_d768").files
    shared = [path for path in kept.missing if path.startswith("_runtime/")]
    assert shared == [path for path in whole if path.startswith("_runtime/")]
    assert all(files[path].encode() == whole[path] for path in shared)
    changed = {**files, "_runtime/engine.py": files["_runtime/engine.py"] + "# changed\n"}
    assert specific_part(with_digest(changed)) == specific_part(files)


def test_the_formulas_are_current() -> None:
    assert COST_MODEL.read_text() == markdown(), "generated/cost_model.md differs; if intended: make golden"


def test_no_golden_package_is_forgotten() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == sorted(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_generated_text_is_tidy(name: str) -> None:
    for path, text in golden_files(name).items():
        assert text.isascii() or path.startswith("_runtime/"), path
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
        assert "\t" not in text and "\r" not in text, path
        assert path.startswith("_runtime/") or ("{{" not in text and "{%" not in text), path
        assert not any(line != line.rstrip() for line in text.splitlines()), f"{path} has trailing blanks"
        assert str(ROOT) not in text and "infcl_gen." not in text, f"{path} refers to the generator"
        compile(text, path, "exec")


OTHERS: dict[str, dict[str, Any]] = {
    "nodes": {"batch_size": "16k", "dim": 256, "devices": 16, "nodes": 2, "device_profile": "h200"},
    "precision": {"batch_size": 512, "dim": 64, "dtype": "fp32", "precision": "exact", "device_profile": "a100"},
    "settings": {"batch_size": 512, "dim": 64, "device_profile": "cpu", "set": {"panel_rows": "64"}},
}


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_the_command_that_regenerates_makes_the_same_package(name: str) -> None:
    problem = make_problem(**{**GOLDEN, **OTHERS}[name])
    files = golden_files(name) if name in GOLDEN else build(problem)
    (spec,) = (
        node.value for node in ast.parse(files["spec.py"]).body if isinstance(node, ast.AnnAssign) and node.value
    )
    command = ast.literal_eval(spec)["regenerate"]
    sizes = {"queries": problem.batch_size, "keys": problem.total_keys}
    _, subcommand, *words = shlex.split(command.format(**sizes))
    with click.Context(cli.main, obj={}) as parent:
        flags = cli.main.commands[subcommand].make_context(subcommand, words, parent=parent).params
    assert flags["output"] == "DIR"
    assert build(cli.options.problem_of(flags)) == files


@pytest.mark.parametrize("seed", nightly(["0", "1", "2", "4242"], ["4242"]))  # beside that of this process
def test_bytes_do_not_depend_on_place_locale_time_zone_or_hash_seed(
    expected: dict[str, str], tmp_path: Path, seed: str
) -> None:
    other = {"LC_ALL": "C", "TZ": "Pacific/Chatham", "PYTHONUTF8": "0", "PYTHONHASHSEED": seed}
    assert digests(ROOT, cwd=str(tmp_path), **other) == expected


def test_package_is_self_contained(tmp_path: Path) -> None:
    """Copied elsewhere and imported under another name, without the generator on the path."""
    folder = tmp_path / "renamed"
    folder.mkdir()
    for path, content in read_package(FOLDER / "clip_cpu").files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('infcl_gen', 'msgspec', 'click', 'platformdirs'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import torch, renamed\n"
        "q, k = torch.randn(2, 20, 512).unbind()\n"
        "loss, dq, dk, dscale, dbias = renamed.loss_and_grads(q, k, 1.5)\n"
        "want = renamed.reference(q, k, 1.5)\n"
        "assert abs(loss.double() - want) < 1e-5 * abs(want), (loss, want)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
