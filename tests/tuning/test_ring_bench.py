"""Measuring a ring, on gloo processes of this machine."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.tuning import ring_bench
from infcl_gen.tuning.ring_bench import HOW, measure_ring


def package(folder: Path, devices: int = 2, **flags: Any) -> Path:
    flags = {"dtype": "fp32", "target": "cpu"} | flags
    return infcl_gen.generate(output=folder, batch_size=129, dim=16, devices=devices, **flags)


def test_a_package_is_measured_with_and_without_its_communication(tmp_path: Path) -> None:
    ways = {"fp32": "ring", "bf16": "gather"}
    folders = [package(tmp_path / dtype, dtype=dtype, set={"transport": way}) for dtype, way in ways.items()]
    rows = measure_ring(folders, 2, rounds=3, timeout_s=100)
    assert [(row["dtype"], row["impl"], row["package"]) for row in rows] == [
        (dtype, "infcl", how) for dtype in ("fp32", "bf16") for how in HOW.values()
    ]
    for row in rows:
        assert row["error"] is None and row["ranks"] == 2 and row["batch"] == 129 and row["repeats"] == 3
        assert row["median_ms"] > 0 and 0 < row["peak_bytes"] <= row["predicted_peak_bytes"]
        assert row["transport"] == ways[row["dtype"]]


@pytest.mark.parametrize("how", [how for how in HOW.values() if how])
def test_nothing_is_waited_for_or_copied_beside_the_work(tmp_path: Path, how: str) -> None:
    """On a GPU messages are started on a stream of their own, for which the work would not wait."""
    module = import_package(package(tmp_path / "a"))
    ring = importlib.import_module(f"{module.__name__}._runtime.ring")
    enter = ring.Moment.__enter__
    with ring_bench._transport(module, how, [1, 1]):
        assert ring.Moment.__enter__ is not enter
        with ring.Moment([torch.empty(1)]):
            assert not ring._streams
    assert ring.Moment.__enter__ is enter


def test_a_large_batch_is_measured_once(tmp_path: Path) -> None:
    (row,) = measure_ring([package(tmp_path / "a", set={"transport": "ring"})], 2, once=True, timeout_s=100)
    assert row["error"] is None and row["repeats"] == 1 and row["transport"] == "ring"
    assert row["median_ms"] > 0 and 0 < row["peak_bytes"] <= row["predicted_peak_bytes"]


def test_peers_are_not_run_on_uneven_shards(tmp_path: Path) -> None:
    *ours, peer = measure_ring([package(tmp_path / "a")], 2, ["inf_cl"], rounds=1, timeout_s=100)
    assert [row["impl"] for row in ours] == ["infcl"] * len(HOW) and not any(row["error"] for row in ours)
    assert (peer["impl"], peer["error"], peer["median_ms"]) == (
        "inf_cl",
        "needs as many rows on each rank",
        None,
    )


def test_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "ring.json"
    flags = "bench --target cpu --dtype fp32 --batch-size 64 --dim 16 --ranks 2 --against none --repeats 2 -o"
    command = [sys.executable, "-m", "infcl_gen", *flags.split(), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [row["package"] for row in result["rows"]] == list(HOW.values())
    assert "--ranks 2" in result["command"] and "no communication" in done.stdout
    for extra, message in (
        (["--plot", "x.svg"], "--plot: not with --ranks"),
        (["--against", "memeff"], "one device"),
        (["--features", "fp32"], "--features: not with --ranks"),
    ):
        refused = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and message in refused.stderr


def test_what_cannot_be_measured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="planned for 2 device"):
        measure_ring([package(tmp_path / "a")], 4)
    with pytest.raises(InputError, match="memeff runs on one device"):
        measure_ring([package(tmp_path / "b")], 2, peers=["memeff"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    gpu = package(tmp_path / "c", target="auto", device_profile="h200", dtype="bf16")
    with pytest.raises(ToolchainError, match="2 GPUs are needed, and 1 are here"):
        measure_ring([gpu], 2)
    with pytest.raises(ToolchainError, match="no result of 2 ranks"):
        measure_ring([package(tmp_path / "d")], 2, timeout_s=0.1)
