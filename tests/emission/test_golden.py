"""The committed packages in generated/ are exactly what is generated today, anywhere and under any hash seed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infcl_gen.emission import build, read_package, rerender
from infcl_gen.planning.terms import markdown
from infcl_gen.problem import make_problem
from tests.emission.golden import COST_MODEL, FOLDER, GOLDEN

ROOT = FOLDER.parent

DIGESTS = """
import hashlib, json, sys
from infcl_gen.emission import build
from infcl_gen.problem import make_problem
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


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    built = {name: build(make_problem(**flags)) for name, flags in GOLDEN.items()}
    return {
        name: hashlib.sha256(repr(list(files.items())).encode()).hexdigest() for name, files in built.items()
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_package_is_current(name: str) -> None:
    committed = read_package(FOLDER / name).files
    today = rerender(FOLDER / name)
    differing = sorted(
        path for path in committed.keys() | today.keys() if committed.get(path) != today.get(path)
    )
    assert not differing, f"generated/{name} differs in {', '.join(differing)}; if intended: make golden"
    text = {path: content.decode() for path, content in today.items() if path != "manifest.json"}
    assert text == build(make_problem(**GOLDEN[name])), (
        "the golden problem has changed; if intended: make golden"
    )


def test_the_formulas_are_current() -> None:
    assert COST_MODEL.read_text() == markdown(), "generated/cost_model.md differs; if intended: make golden"


def test_no_golden_package_is_forgotten() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == sorted(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_generated_text_is_tidy(name: str) -> None:
    for path, text in build(make_problem(**GOLDEN[name])).items():
        assert text.isascii() or path.startswith("_runtime/"), path
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
        assert "\t" not in text and "\r" not in text, path
        assert path.startswith("_runtime/") or ("{{" not in text and "{%" not in text), path
        assert not any(line != line.rstrip() for line in text.splitlines()), f"{path} has trailing blanks"
        assert str(ROOT) not in text and "infcl_gen." not in text, f"{path} refers to the generator"
        compile(text, path, "exec")


@pytest.mark.parametrize("seed", ["0", "1", "2", "4242"])
def test_bytes_do_not_depend_on_the_hash_seed(expected: dict[str, str], seed: str) -> None:
    assert digests(ROOT, PYTHONHASHSEED=seed) == expected


def test_bytes_do_not_depend_on_place_locale_or_time_zone(expected: dict[str, str], tmp_path: Path) -> None:
    assert digests(ROOT, cwd=str(tmp_path), LC_ALL="C", TZ="Pacific/Chatham", PYTHONUTF8="0") == expected


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
