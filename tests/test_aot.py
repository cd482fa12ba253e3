"""Every emitted kernel compiles for its boards, without a GPU, within their shared memory and without spills."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.emission import read_package, write_package
from infcl_gen.hardware import load_profile
from infcl_gen.losses import BUILTIN_LOSSES
from infcl_gen.verification.aot import SHARED_BYTES, Kernels
from tests.compiled import resources
from tests.emission.golden import FOLDER, GOLDEN, golden_files
from tests.losses.specs import DERIVABLE
from tests.tiers import nightly

pytestmark = pytest.mark.usefixtures("forked")
ROOT = Path(__file__).resolve().parent.parent
WITH_KERNELS = [name for name in GOLDEN if (FOLDER / name / "kernels.py").exists()]
# Golden packages that `test_clip_planned_for_each_architecture` makes anew: their kernels are compiled there.
PLANNED_ALIKE = {"clip_h200_d768": "sm_90", "clip_mi300x": "gfx942"}
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
# Bytes a thread that a version of Triton spills in the forward kernels of these dimensions, by (major.minor, target,
# dimension). Three kernels on Hopper spill, too. Two of cosines keep numbers around their loop, or one that they read
# once a prefix; one is of sums over pairs. All else has no spills.
KNOWN_SPILLS = {("3.6", "sm_90", 40): 16, ("3.6", "sm_90", 72): 16, ("3.6", "sm_90", 128): 16}
SPILLED_BY_COSINES = {"forward_hopper": 16, "gradient_hopper": 8}
SPILLED_BY_SIZES = 8  # by Triton 3.7, of masked panels: a pointer that each size of logits reads once


def allowed_spill(kernel: str, target: str, dim: int, version: str, cosines: bool = False) -> int:
    if kernel in SPILLED_BY_COSINES:
        return SPILLED_BY_COSINES[kernel] * cosines
    if kernel == "pairs":
        return SPILLED_BY_SIZES * (target == "sm_90" and version.startswith("3.7."))
    known = KNOWN_SPILLS.get((version.rpartition(".")[0], target, dim), 0)
    return known if kernel in ("forward", "forward_wide") else 0


def check(rows: list[dict[str, Any]], package: Path, target: str, *kernels: str) -> None:
    spec, version = read_package(package).spec, importlib.metadata.version("triton")
    dim, cosines = spec["problem"]["dim"], spec["loss"]["traits"].get("renormalised", False)
    assert {row["kernel"] for row in rows} == set(kernels or spec["launches"])
    assert {row["kernel"] for row in rows if row["ragged"]}
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[target], row
        assert row["spill_bytes"] <= allowed_spill(row["kernel"], target, dim, version, cosines), row
        assert not row["faults"], row
        assert 0 < row["registers"] <= (512 if target.startswith("gfx") else 255), row


def clip(folder: Path, target: str, **flags: Any) -> Path:
    """A package of 64k x 768, planned for the board of that architecture."""
    return infcl_gen.generate(output=folder / "clip", batch_size="64k", dim=768, device_profile=BOARDS[target], **flags)


@pytest.mark.parametrize("name", [name for name in WITH_KERNELS if name not in PLANNED_ALIKE])
def test_golden_packages_for_their_own_boards(name: str, tmp_path: Path) -> None:
    package = write_package(golden_files(name), tmp_path / name)
    arch = load_profile(read_package(package).spec["problem"]["device_profile"]).arch
    check(resources(package, arch), package, arch)


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_clip_planned_for_each_architecture(target: str, tmp_path: Path) -> None:
    package = clip(tmp_path, target, memory_budget="1GiB")
    assert load_profile(BOARDS[target]).arch == target
    for name in (name for name, arch in PLANNED_ALIKE.items() if arch == target):
        golden = read_package(FOLDER / name, partial=True)
        assert read_package(package).files["kernels.py"] == golden.files["kernels.py"]
        assert read_package(package).spec["launches"] == golden.spec["launches"]
    check(resources(package, target), package, target)


KEYS_READ_ONCE = [(40, {}), (72, {}), (72, {"loss": "infonce", "set": {"strategy": "fused"}}), (40, {"dtype": "fp32"})]


@pytest.mark.parametrize(("dim", "flags"), nightly(KEYS_READ_ONCE, KEYS_READ_ONCE[2:]))
def test_forwards_that_read_their_keys_once(dim: int, flags: dict[str, Any], tmp_path: Path) -> None:
    """Also where rows are no multiples of 16 elements, as Triton takes them to be on its own."""
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="64k", dim=dim, device_profile="h200", **flags)
    kernels = ("references", "forward", "forward_wide")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


TRIANGLES = [("ntxent", 40), ("ntxent", 96), ("ntxent", 768), ("dcl", 96), ("dcl", 768)]


@pytest.mark.parametrize(("loss", "dim"), nightly(TRIANGLES, [("ntxent", 40), ("dcl", 768)]))
def test_kernels_of_a_triangle(loss: str, dim: int, tmp_path: Path) -> None:
    """On the diagonal and above it; those of gradients are clip's, but for rows with weights."""
    package = infcl_gen.generate(output=tmp_path / "p", loss=loss, batch_size="64k", dim=dim, device_profile="h200")
    kernels = ("references", "forward", "forward_wide", "positives", "gradient_positives")
    kernels += ("combine", "gradient") * (loss == "dcl")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


def test_kernels_of_partners(tmp_path: Path) -> None:
    package = infcl_gen.generate(
        output=tmp_path / "p", loss="four_block", batch_size="64k", dim=96, device_profile="h200"
    )
    check(resources(package, "sm_90", "partners", "combine"), package, "sm_90", "partners", "combine")


@pytest.mark.parametrize("dim", nightly([40, 768], [40]))
def test_kernels_of_rows_in_pairs(dim: int, tmp_path: Path) -> None:
    """At D = 40 one block spans the features, which the forward reads in each step."""
    package = infcl_gen.generate(
        output=tmp_path / "p", loss="three_block", batch_size="64k", dim=dim, device_profile="h200"
    )
    kernels = ("forward", "positives", "combine", "gradient", "gradient_positives")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


COLUMNS = [("mil_nce", 96), ("mil_nce", 768), ("mil_nce_multi", 768)]


@pytest.mark.parametrize(("loss", "dim"), nightly(COLUMNS, [("mil_nce", 96), ("mil_nce_multi", 768)]))
def test_kernels_of_columns(loss: str, dim: int, tmp_path: Path) -> None:
    package = infcl_gen.generate(output=tmp_path / "p", loss=loss, batch_size="64k", dim=dim, device_profile="h200")
    kernels = ("forward", "forward_wide", "combine", "gradient")
    kernels += ("positives", "gradient_positives") * (loss == "mil_nce_multi")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize("dim", nightly([96, 768], [768]))
def test_kernels_of_two_sums(dim: int, tmp_path: Path) -> None:
    how = {"batch_size": "64k", "dim": dim, "device_profile": "h200"}
    package = infcl_gen.generate(output=tmp_path / "p", loss="hard_negative", **how)
    kernels = ("forward", "forward_wide", "merge", "combine", "gradient", "gradient_positives")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


GUIDED = [("distill", 96), ("distill", 768), ("gist", 96), ("gist", 768), ("distill_clip", 200), ("distill_clip", 768)]


@pytest.mark.parametrize(("loss", "dim"), nightly(GUIDED, [("distill", 768), ("gist", 96), ("distill_clip", 200)]))
def test_kernels_with_a_guide(loss: str, dim: int, tmp_path: Path) -> None:
    how = {"batch_size": "64k", "dim": dim, "device_profile": "h200"}
    package = infcl_gen.generate(output=tmp_path / "p", loss=loss, **how)
    kernels = ("forward", "gradient") + ("forward_wide", "merge_guided", "combine") * (loss == "distill")
    kernels += ("forward_wide", "positives", "loss_terms", "gradient_positives") * (loss == "distill_clip")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


SEVERAL = [("supcon_out", 96), ("supcon_in", 40), ("supcon_in", 768), ("infonce_out", 768), ("infonce_in", 96)]


@pytest.mark.parametrize(("loss", "dim"), nightly(SEVERAL, [SEVERAL[0], SEVERAL[2], SEVERAL[4]]))
def test_kernels_of_any_number_of_positives(loss: str, dim: int, tmp_path: Path) -> None:
    """Tiles are those of other losses, but for gradients of a rectangle's rows."""
    package = infcl_gen.generate(output=tmp_path / "p", loss=loss, batch_size="64k", dim=dim, device_profile="h200")
    kernels = ("positives", "combine", "gradient", "gradient_positives")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize(
    ("loss", "profile", "target"),
    [
        ("siglip", "h200", "sm_90"),
        ("siglip_multi", "h200", "sm_90"),
        ("siglip_labels", "h200", "sm_90"),
        ("siglip", "b200", "sm_100"),
        ("siglip_labels", "a100", "sm_80"),
    ],
)
def test_kernels_of_pairs(loss: str, profile: str, target: str, tmp_path: Path) -> None:
    """Beside wide tiles logits that may be small take a thread's last registers."""
    problem = {
        "loss": {**BUILTIN_LOSSES, **DERIVABLE}[loss],
        "batch_size": "64k",
        "dim": 768,
        "device_profile": profile,
    }
    package = infcl_gen.generate(output=tmp_path / "p", **problem)
    check(resources(package, target, "pairs", "pair_terms"), package, target, "pairs", "pair_terms")


@pytest.mark.parametrize("loss", ["siglip", "siglip_multi"])
def test_kernels_of_single_queries_of_pairs(loss: str, tmp_path: Path) -> None:
    """Beside wide tiles factors of rows take a thread's last registers."""
    of_rows = dataclasses.replace(BUILTIN_LOSSES[loss], reduction="none")
    package = infcl_gen.generate(output=tmp_path / "p", loss=of_rows, batch_size="64k", dim=768, device_profile="h200")
    kernels = ("pairs", "pair_terms", "pair_loss") + ("pair_positives", "pair_positive_terms") * (loss == "siglip")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize(
    ("prefixes", "renormalise"),
    [([96, 192, 384, 768], False), ([96, 192, 384, 768], True), ([64, 128, 192, 256, 320, 384], True)],
)
def test_kernels_of_single_queries_of_prefixes(prefixes: list[int], renormalise: bool, tmp_path: Path) -> None:
    """Each side has an exponential of its own, also on Hopper."""
    over = {"prefixes": prefixes, "renormalise": renormalise, "reduction": "none"}
    loss = dataclasses.replace(BUILTIN_LOSSES["clip"], **over)  # type: ignore[arg-type]
    how: dict[str, Any] = {"loss": loss, "dim": prefixes[-1], "device_profile": "h200"}
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="64k", **how)
    kernels = ("combine", "gradient", "gradient_positives")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize(
    ("loss", "prefixes", "renormalise"),
    [
        ("clip", [96, 192, 384, 768], False),
        ("infonce", [64, 256], False),
        ("clip", [96, 192, 384, 768], True),
        ("clip", [32, 64, 96, 136], True),
        ("infonce", [96, 192, 384, 768], True),
        ("infonce", [32, 64, 96, 136], True),
        ("infonce on the diagonal", [96, 192, 384, 768], True),
    ],
)
def test_kernels_of_prefixes(loss: str, prefixes: list[int], renormalise: bool, tmp_path: Path) -> None:
    form = BUILTIN_LOSSES[loss.split()[0]]
    form = dataclasses.replace(form, positives="diagonal") if "diagonal" in loss else form
    how: dict[str, Any] = {"loss": form, "dim": prefixes[-1], "prefixes": prefixes, "device_profile": "h200"}
    how["renormalise"] = renormalise
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="64k", **how)
    kernels = ("references", "forward", "forward_wide", "positives", "gradient", "gradient_positives", "product")
    kernels += ("gradient_wide",) * (loss == "clip")
    kernels = () if prefixes[-1] == 136 else kernels  # of two prefixes that end in one stage on Hopper
    kernels += ("forward_hopper", "gradient_hopper")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize("loss", nightly(["supcon_in", "infonce_out", "distill"], ["supcon_in", "distill"]))
def test_the_same_of_fp32_features(loss: str, tmp_path: Path) -> None:
    how = {"dtype": "fp32", "precision": "exact", "device_profile": "h200"}
    package = infcl_gen.generate(output=tmp_path / "p", loss=loss, batch_size="64k", dim=96, **how)
    kernels = ("forward", "gradient") + ("positives", "gradient_positives") * (loss != "distill")
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize(
    ("kernel", "target", "dim", "version", "spill"),
    [
        ("forward_wide", "sm_90", 128, "3.6.0", 16),
        ("forward_wide", "sm_90", 128, "3.7.1", 0),
        ("forward_wide", "sm_90", 256, "3.6.0", 0),
        ("forward_wide", "sm_100", 128, "3.6.0", 0),
        ("gradient", "sm_90", 128, "3.6.0", 0),
        ("gradient_hopper", "sm_90", 128, "3.6.0", 0),
    ],
)
def test_a_spill_is_known_of_one_version_only(kernel: str, target: str, dim: int, version: str, spill: int) -> None:
    assert allowed_spill(kernel, target, dim, version) == spill


@pytest.mark.parametrize("dim", nightly([144, 200], [200]))
def test_kernels_for_hopper(dim: int, tmp_path: Path) -> None:
    """Gluon's: within shared memory and without spills; for no other target."""
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="64k", dim=dim, device_profile="h200")
    kernels = ("forward_hopper", "gradient_hopper")
    names = Kernels(package).names
    assert set(names("sm_90")) - set(names("sm_100")) == set(kernels)
    check(resources(package, "sm_90", *kernels), package, "sm_90", *kernels)


@pytest.mark.parametrize("dim", nightly([40, 128], [128]))
def test_fused_programs_that_blackwell_computes_again(dim: int, tmp_path: Path) -> None:
    package = infcl_gen.generate(
        output=tmp_path / "p", batch_size="64k", dim=dim, device_profile="b200", settings=(("strategy", "fused"),)
    )
    kernels = ("fused_queries_wide", "fused_keys_wide")
    check(resources(package, "sm_100", *kernels), package, "sm_100", *kernels)


@pytest.mark.parametrize("target", nightly(["sm_90", "gfx942"], ["sm_90"]))
def test_gradients_that_get_the_mean_of_all_logits(target: str, tmp_path: Path) -> None:
    loss = f"{ROOT / 'tests' / 'kernels' / 'losses.py'}:smooth_rince"
    package = clip(tmp_path, target, loss=loss, settings=(("strategy", "panel"),))
    check(resources(package, target, "finish", "combine"), package, target, "finish", "combine")


@pytest.mark.parametrize("target", nightly(["sm_90", "gfx942"], ["gfx942"]))
def test_what_a_gather_adds_up(target: str, tmp_path: Path) -> None:
    package = clip(tmp_path, target, devices=4, settings=(("transport", "gather"),))
    check(resources(package, target, "merge_ranks"), package, target, "merge_ranks")


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_tiles_that_a_stash_stores(target: str, tmp_path: Path) -> None:
    """Through tensor descriptors; and the gradient of what is not kept."""
    package = clip(tmp_path, target, memory_budget="40GiB", settings=(("strategy", "stash"),))
    kernels = ("forward", "gradient", "gradient_from_stash")
    check(resources(package, target, *kernels), package, target, *kernels)


@pytest.mark.parametrize("target", nightly(["sm_90", "sm_100", "sm_80", "gfx942"], ["sm_100", "gfx942"]))
def test_a_row_of_panels(target: str, tmp_path: Path) -> None:
    package = clip(tmp_path, target, loss="infonce", settings=(("strategy", "rows"),))
    kernels = (
        *("row_references", "forward", "forward_wide", "shares", "row_gradient_wide"),
        *("row_positives", "weighted_queries", "finish", "rescale"),
    )
    check(resources(package, target, *kernels), package, target, *kernels)


def test_tiles_that_are_too_large_for_a_board_are_noticed(tmp_path: Path) -> None:
    """Triton compiles them all the same: tiles for an H200 may take more shared memory than an L4 has."""
    settings = (("forward.stages", "4"), ("gradient.stages", "4"))
    package = infcl_gen.generate(
        output=tmp_path / "clip", batch_size="64k", dim=768, device_profile="h200", settings=settings
    )
    for row in resources(package, "sm_90", "gradient"):
        assert row["shared_bytes"] <= SHARED_BYTES["sm_90"], row
    with pytest.raises(AssertionError, match="shared_bytes"):
        check(resources(package, "sm_89", "gradient"), package, "sm_89", "gradient")


def test_kernels_hold_no_assembly_and_no_atomics() -> None:
    for template in (ROOT / "templates").rglob("*.jinja"):
        text = template.read_text()
        assert "inline_asm" not in text and "atomic_" not in text and "inline_ptx" not in text, template
