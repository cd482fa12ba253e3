"""Profiles as data, detection, and the cluster of a problem."""

import dataclasses
import importlib.resources
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.hardware import detect, detection, load_profile, profile_names, resolve_cluster
from infcl_gen.hardware.detection import FoundDevice, match
from infcl_gen.hardware.profile import MATMUL_KINDS, Architecture, profile_from_literals
from infcl_gen.inputs.problem import make_problem
from infcl_gen.kernels import family, forward, fused
from infcl_gen.kernels.choice import Block, Choice

SHARED = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}
GPUS = tuple(name for name in profile_names() if name != "cpu")


def profile_text(name: str) -> str:
    return importlib.resources.files("infcl_gen.hardware").joinpath("profiles", f"{name}.toml").read_text()


def test_every_device_and_architecture_has_a_profile() -> None:
    wanted = {"a100", "h100", "h200", "b200", "rtx4090", "l4", "mi300x", "mi355x", "cpu"}
    assert wanted <= set(profile_names())
    assert {load_profile(name).arch for name in GPUS} == set(SHARED)


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_sane(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    if name != "cpu":
        assert profile.shared_bytes_per_block == SHARED[profile.arch]
    peaks = profile.matmul_tflops
    assert tuple(peaks) == MATMUL_KINDS
    # A figure with sparsity, or one of fp16 accumulation, would break these orders.
    assert peaks["bf16"].value == peaks["fp16"].value >= peaks["tf32"].value >= peaks["fp32"].value
    assert peaks["fp32"].value >= peaks["fp64"].value
    assert profile.link_gbs.value < profile.bandwidth_gbs.value


def test_facts_of_architectures() -> None:
    """Each is one that kernels know, of an architecture that a board has; others get what is common to a vendor."""
    text = importlib.resources.files("infcl_gen.hardware").joinpath("architectures.toml").read_text()
    table = tomllib.loads(text)
    assert set(table) == {*SHARED, "nvidia", "amd"}
    fields = {field.name for field in dataclasses.fields(Architecture)}
    assert all({"family"} <= set(facts) <= fields for facts in table.values())
    assert all(facts["family"] in family.BLOCKS.keys() & fused.BLOCKS.keys() for facts in table.values())
    a100, h200, b200, mi300x = (load_profile(name) for name in ("a100", "h200", "b200", "mi300x"))
    block, choice = Block(128, 64, 64, 4, 2), Choice(strategy="panel", dim=768)
    lanes = [forward.key_lanes(block, choice, profile) for profile in (a100, h200, b200, mi300x)]
    assert lanes == [32, 32, 1, 1] and forward.key_lanes(dataclasses.replace(block, rows=32), choice, h200) == 1
    assert [fused.wide(profile, block) for profile in (h200, b200)] == [(32, 8), (16, 8)]
    unknown = dataclasses.replace(h200, arch="sm_75").architecture
    assert (unknown.family, unknown.row_lanes, unknown.products_read_shared) == ("small", 0, False)


@pytest.mark.parametrize("name", GPUS)
def test_dense_peaks_follow_from_units_and_clocks(name: str) -> None:
    """bf16 products and exponentials come from the same clock: products per multiprocessor and clock are a
    power of two."""
    profile = load_profile(name)
    per_clock = {"gfx950": 32}.get(profile.arch, 16)
    clock_ghz = profile.exp_gops.value / per_clock / profile.multiprocessors
    flop_per_clock = profile.matmul_tflops["bf16"].value * 1e3 / profile.multiprocessors / clock_ghz
    dense = {"sm_80": 2048, "sm_86": 512, "sm_89": 512, "sm_90": 4096, "sm_100": 8192, "sm_120": 512}
    expected = dense.get(profile.arch, {"gfx942": 2048, "gfx950": 4096}.get(profile.arch))
    assert expected is not None
    if name == "l4":
        expected *= 2  # no halved rate for fp32 accumulation
    limit = 1.0 if profile.matmul_tflops["bf16"].source.startswith("vendor") else 0.75
    assert limit - 0.03 < flop_per_clock / expected < 1.03


def test_measured_figures_of_the_h200() -> None:
    profile = load_profile("h200")
    assert (profile.matmul_tflops["bf16"].value, profile.bandwidth_gbs.value) == (765, 4300)
    assert (profile.matmul_tflops["tf32"].value, profile.link_gbs.value) == (355, 345)
    for peak in (profile.matmul_tflops["bf16"], profile.bandwidth_gbs, profile.link_gbs):
        assert peak.source.startswith("measured: ")


def test_names_are_forgiving() -> None:
    assert load_profile("RTX 4090") == load_profile("rtx-4090") == load_profile("rtx4090")


def test_a_file_is_read_like_a_built_in(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(profile_text("h200").replace('"h200"', '"mine"'))
    assert load_profile(str(file)) == dataclasses.replace(load_profile("h200"), name="mine")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('vendor = "nvidia"', 'vendor = "nvida"', "vendor"),
        ('target = "cuda"', 'target = "rocm"', "vendor and target"),
        ('arch = "sm_90"', 'arch = "gfx942"', "arch"),
        ('arch = "sm_90"', 'arch = "sm_90\'; import os"', "arch"),
        ('name = "h200"', 'name = "../h200"', "name"),
        ('name = "h200"', 'name = "h200\\n"', "name"),
        ('name = "h200"', "name = 200", "name"),
        ("multiprocessors = 132", "multiprocessors = 0", "multiprocessors"),
        ("multiprocessors = 132", "multiprocessors = -1", "multiprocessors"),
        ("multiprocessors = 132", 'multiprocessors = "132"', "multiprocessors"),
        ("multiprocessors = 132", "", "multiprocessors"),
        ("multiprocessors = 132", "multiprocesors = 132", "did you mean 'multiprocessors'"),
        ("warp_size = 32", "warp_size = true", "warp_size"),
        ("value = 765.0", "value = nan", "matmul_tflops.bf16"),
        ("value = 765.0", "value = inf", "matmul_tflops.bf16"),
        ("value = 765.0", "value = -1", "matmul_tflops.bf16"),
        ("value = 765.0", "value = 0", "matmul_tflops.bf16"),
        ("value = 765.0", "valeu = 765.0", "matmul_tflops.bf16.valeu"),
        ("measured: copy", "copy", "bandwidth_gbs: source"),
        ("bf16 =", "bf17 =", "bf17"),
        ("tensor_descriptors = true", "tensor_descriptors = 1", "tensor_descriptors"),
        ("[matmul_tflops]", "[matmul_tflops", "mine.toml"),
    ],
)
def test_defects_of_a_file_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    text = profile_text("h200")
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as raised:
        load_profile(str(file))
    assert str(raised.value).startswith("--device-profile: ")


@pytest.mark.parametrize("table", [{1: 2}, {None: 2}, {"matmul_tflops": {1: 2}}, {"link_gbs": {1: 2}}])
def test_keys_of_literals_must_be_text(table: dict[Any, Any]) -> None:
    with pytest.raises(InputError, match="key"):
        profile_from_literals(table)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (FoundDevice("NVIDIA H200", "cuda", "sm_90", 132, 150_110_011_392), "h200"),
        (FoundDevice("NVIDIA H100 80GB HBM3", "cuda", "sm_90", 132, 85_028_765_696), "h100"),
        (FoundDevice("NVIDIA A100-SXM4-80GB", "cuda", "sm_80", 108, 85_098_364_928), "a100"),
        (FoundDevice("NVIDIA GeForce RTX 4090", "cuda", "sm_89", 128, 25_282_281_472), "rtx4090"),
        (FoundDevice("NVIDIA L4", "cuda", "sm_89", 58, 23_573_757_952), "l4"),
        (FoundDevice("AMD Instinct MI300X", "rocm", "gfx942", 304, 205_822_885_888), "mi300x"),
        (FoundDevice("NVIDIA A100-SXM4-40GB", "cuda", "sm_80", 108, 42_298_834_944), "a100-108mp-39gib"),
        (FoundDevice("NVIDIA H100 PCIe", "cuda", "sm_90", 114, 85_028_765_696), "h100-114mp-79gib"),
        (FoundDevice("NVIDIA L40S", "cuda", "sm_89", 142, 47_697_362_944), "rtx4090-142mp-44gib"),
        (FoundDevice("NVIDIA A10G", "cuda", "sm_86", 80, 23_800_000_000), "rtx3090-80mp-22gib"),
    ],
)
def test_devices_are_matched(device: FoundDevice, name: str) -> None:
    profile = match(device)
    assert profile.name == name
    assert (profile.arch, profile.multiprocessors) == (device.arch, device.multiprocessors)
    assert load_profile(name) == profile  # a package that names it can be planned again, on any machine


def test_a_resized_profile_has_scaled_and_marked_rates() -> None:
    half, whole = load_profile("h200-66mp-70gib"), load_profile("h200")
    assert half.memory_bytes == 70 << 30
    assert half.exp_gops.value == whole.exp_gops.value / 2
    assert half.matmul_tflops["bf16"].source.startswith("derived: ")


def test_unsupported_devices_are_refused() -> None:
    with pytest.raises(ToolchainError, match=r"sm_70.*--target cpu"):
        match(FoundDevice("Tesla V100", "cuda", "sm_70", 80, 32 << 30))


def test_detection_without_a_driver_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom infcl_gen.hardware import detect, detection\n"
        "detection._DRIVERS = ()\nprint(detect().name, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "cpu False\n", done.stderr


def test_detection_chooses_by_target(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FoundDevice("NVIDIA H200", "cuda", "sm_90", 132, 150_110_011_392)
    monkeypatch.setattr(detection, "find_device", lambda: device)
    assert detect().name == detect("cuda").name == "h200"
    assert detect("cpu").name == "cpu"
    with pytest.raises(ToolchainError, match="no rocm device"):
        detect("rocm")
    monkeypatch.setattr(detection, "find_device", lambda: None)
    assert detect().name == "cpu"
    with pytest.raises(ToolchainError, match="no cuda device"):
        detect("cuda")


def test_cluster_of_a_problem() -> None:
    cluster = resolve_cluster(make_problem(batch_size=64, dim=8, devices=8, nodes=2, device_profile="mi300x"))
    assert (cluster.devices, cluster.nodes, cluster.devices_per_node) == (8, 2, 4)
    assert cluster.profile.target == "rocm"
    assert resolve_cluster(make_problem(batch_size=64, dim=8, target="cpu")).profile.name == "cpu"


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"target": "cuda", "device_profile": "mi300x"}, "--target"),
        ({"target": "cpu", "device_profile": "h200"}, "--target"),
        ({"target": "rocm", "device_profile": "cpu"}, "--target"),
        ({"device_profile": "h300"}, "--device-profile"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, str], flag: str) -> None:
    with pytest.raises(InputError, match=f"^{flag}: "):
        resolve_cluster(make_problem(batch_size=64, dim=8, **flags))


@pytest.mark.gpu
def test_this_machine_is_detected() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    profile = detect()
    assert profile.multiprocessors == properties.multi_processor_count
    assert 0.9 < properties.total_memory / profile.memory_bytes < 1.1
    assert profile.shared_bytes_per_block == getattr(
        properties, "shared_memory_per_block_optin", profile.shared_bytes_per_block
    )
