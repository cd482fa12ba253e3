"""Every emitted kernel compiles for its boards, without a GPU, within their shared memory and without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.emission import read_package
from infcl_gen.hardware import load_profile
from infcl_gen.verification.aot import SHARED_BYTES

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = sorted(folder.parent for folder in (ROOT / "generated").glob("*/kernels.py"))
BOARDS = {
    "sm_80": "a100",
    "sm_86": "rtx3090",
    "sm_89": "rtx4090",
    "sm_90": "h200",
    "sm_100": "b200",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
    "gfx950": "mi355x",
}
# In a process of its own: triton may have been imported here to interpret kernels.
COMPILE_ALL = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from infcl_gen.emission import read_package
from infcl_gen.verification.aot import compile_kernel, kernel_names, load_kernels, variants

package, target = Path(sys.argv[1]), sys.argv[2]
kernels = load_kernels(package)
spec = read_package(package).spec
for name in sys.argv[3:] or kernel_names(kernels):
    for inputs in variants(spec, target, getattr(kernels, name)):
        print(json.dumps({"ragged": not inputs.aligned, **asdict(compile_kernel(package, spec, name, target, inputs))}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def resources(package: Path, target: str, cache: Path, *kernels: str) -> list[dict[str, Any]]:
    """What each kernel takes, or those of that name, ragged and whole."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", COMPILE_ALL, str(package), target, *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]], package: Path, target: str, *kernels: str) -> None:
    assert {row["kernel"] for row in rows} == set(kernels or read_package(package).spec["launches"])
    assert {row["kernel"] for row in rows if row["ragged"]}
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[target], row
        assert row["spill_bytes"] == 0, row
        assert 0 < row["registers"] <= (512 if target.startswith("gfx") else 255), row


def clip(folder: Path, target: str, **flags: Any) -> Path:
    """A package of 64k x 768, planned for the board of that architecture."""
    return infcl_gen.generate(
        output=folder / "clip", batch_size="64k", dim=768, device_profile=BOARDS[target], **flags
    )


@pytest.mark.parametrize("package", GOLDEN, ids=lambda folder: folder.name)
def test_golden_packages_for_their_own_boards(package: Path, cache: Path) -> None:
    arch = load_profile(read_package(package).spec["problem"]["device_profile"]).arch
    check(resources(package, arch, cache), package, arch)


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_clip_planned_for_each_architecture(target: str, cache: Path, tmp_path: Path) -> None:
    package = clip(tmp_path, target, memory_budget="1GiB")
    assert load_profile(BOARDS[target]).arch == target
    check(resources(package, target, cache), package, target)


@pytest.mark.parametrize(
    ("dim", "flags"), [(40, {}), (72, {}), (72, {"loss": "infonce"}), (40, {"dtype": "fp32"})]
)
def test_forwards_that_read_their_keys_once(
    dim: int, flags: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    """Also where rows are no multiples of 16 elements, as Triton takes them to be on its own."""
    package = infcl_gen.generate(
        output=tmp_path / "p", batch_size="64k", dim=dim, device_profile="h200", **flags
    )
    kernels = ("references", "forward", "forward_wide")
    check(resources(package, "sm_90", cache, *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize("dim", [40, 128])
def test_fused_programs_that_blackwell_computes_again(dim: int, cache: Path, tmp_path: Path) -> None:
    package = infcl_gen.generate(
        output=tmp_path / "p",
        batch_size="64k",
        dim=dim,
        device_profile="b200",
        settings=(("strategy", "fused"),),
    )
    kernels = ("fused_queries_wide", "fused_keys_wide")
    check(resources(package, "sm_100", cache, *kernels), package, "sm_100", *kernels)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_what_a_gather_adds_up(target: str, cache: Path, tmp_path: Path) -> None:
    package = clip(tmp_path, target, devices=4, settings=(("transport", "gather"),))
    check(resources(package, target, cache, "merge_ranks"), package, target, "merge_ranks")


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_tiles_that_a_stash_stores(target: str, cache: Path, tmp_path: Path) -> None:
    """Through tensor descriptors; and the gradient of what is not kept."""
    package = clip(tmp_path, target, memory_budget="40GiB", settings=(("strategy", "stash"),))
    kernels = ("forward", "gradient", "gradient_from_stash")
    check(resources(package, target, cache, *kernels), package, target, *kernels)


def test_tiles_that_are_too_large_for_a_board_are_noticed(cache: Path, tmp_path: Path) -> None:
    """Triton compiles them all the same: tiles for an H200 may take more shared memory than an L4 has."""
    settings = (("forward.stages", "4"), ("gradient.stages", "4"))
    package = infcl_gen.generate(
        output=tmp_path / "clip", batch_size="64k", dim=768, device_profile="h200", settings=settings
    )
    for row in resources(package, "sm_90", cache):
        assert row["shared_bytes"] <= SHARED_BYTES["sm_90"], row
    with pytest.raises(AssertionError, match="shared_bytes"):
        check(resources(package, "sm_89", cache), package, "sm_89")


def test_kernels_hold_no_assembly_and_no_atomics() -> None:
    for template in (ROOT / "templates" / "triton").iterdir():
        text = template.read_text()
        assert "inline_asm" not in text and "atomic_" not in text and "inline_ptx" not in text, template
