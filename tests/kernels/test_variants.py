"""One module and one template make a variant: it is planned, emitted, compiled, launched, and stales records."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import infcl_gen.kernels
from infcl_gen.emission import build, write_package
from infcl_gen.emission.render import _environment
from infcl_gen.errors import InputError
from infcl_gen.inputs.problem import make_problem
from infcl_gen.kernels.arguments import arguments
from infcl_gen.planning.records import revisions
from tests.kernels import checks, variant
from tests.kernels.worker import Interpreter


@pytest.fixture
def templates(tmp_path: Path) -> Iterator[Path]:
    families = infcl_gen.kernels.FAMILIES
    variant.register(tmp_path / "templates")
    yield tmp_path / "templates"
    infcl_gen.kernels.FAMILIES = families
    _environment.cache_clear()


def built(profile: str = "b200", **settings: str) -> dict[str, str]:
    settings = {"strategy": "panel", "products": "triton", "product.rows": "64", "panel_rows": "128"} | settings
    return build(make_problem(batch_size=512, dim=48, device_profile=profile, set=settings))


def test_a_variant_is_one_module_and_one_template(templates: Path, tmp_path: Path, interpreted: Interpreter) -> None:
    files = built()
    assert "def product_narrow(" in files["narrow.py"] and "of 64 rows" in files["narrow.py"]
    assert 'if runs_variant(g.device, "sm_100", ""):' in files["schedule.py"]
    assert "launch(narrow.product_narrow, grid," in files["schedule.py"]
    package = write_package(files, tmp_path / "package")
    for target, names in (("sm_100", "['product', 'product_narrow']"), ("sm_90", "['product']")):
        command = [sys.executable, "-m", "tests.kernels.variant", str(package), str(templates), target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.splitlines()[0] == names
        assert target != "sm_100" or done.stdout.splitlines()[1] == "[0, 0, 0, 0]"
    interpreted(checks.launches_variant, str(package), "product_narrow")


@pytest.mark.usefixtures("templates")
def test_a_variant_is_for_its_hardware_and_blocks() -> None:
    for others in (built("h200"), built(**{"product.rows": "128"}), built(products="library")):
        assert "narrow.py" not in others and "narrow" not in others["schedule.py"]
    with pytest.raises(InputError, match="rows = 100 is not a power of two"):
        built(**{"product.rows": "100"})


@pytest.mark.usefixtures("templates")
def test_records_know_the_revision_of_a_variant() -> None:
    settings = {"strategy": "panel", "products": "triton", "product.rows": "64"}
    plan = infcl_gen.plan(make_problem(batch_size=512, dim=48, device_profile="b200", set=settings))
    assert revisions(plan) == {"forward": 1, "gradient": 1, "product": 1, "narrow": 1}


def test_an_argument_of_a_new_name_needs_a_type() -> None:
    with pytest.raises(ValueError, match=r"^temperature: no type; add it to _NAMES in kernels/arguments.py, or pass"):
        arguments("rows temperature")
