"""A wheel built from the project and installed elsewhere generates the same bytes as the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.emission.test_golden import ROOT, digests, digests_here


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    templates = {path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*.jinja")}
    assert templates == {
        name.removeprefix("infcl_gen/_templates/") for name in names if name.startswith("infcl_gen/_templates/")
    }
    for kind in ("*.py", "*.toml"):
        wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "infcl_gen").rglob(kind)}
        assert wanted <= set(names)
    assert all(name.startswith(("infcl_gen/", "infcl_gen-")) for name in names)


def test_installed_wheel_generates_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """Installed without its dependencies, which this interpreter has; the checkout is not on the path."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*install, "--target", str(site), str(wheel)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    where = subprocess.run(
        [sys.executable, "-c", "import infcl_gen; print(infcl_gen.__file__)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(site)
    assert digests(site, cwd=str(tmp_path)) == digests_here()


def test_lock_file_pins_every_dependency() -> None:
    import re
    import tomllib

    locked = {
        re.split(r"==", line)[0].strip().lower().replace("_", "-"): line
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    assert all("==" in line for line in locked.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["plot"]]
    names = {re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}  # type: ignore[index]
    assert names <= set(locked)
