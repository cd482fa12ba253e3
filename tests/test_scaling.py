"""Simulated clusters of many sizes: the command, its file and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import infcl_gen
from infcl_gen import cli
from infcl_gen.cli.scaling import cells, clusters, simulated
from infcl_gen.errors import InputError
from infcl_gen.files import checksum
from tests.tiers import nightly

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--dim", "64", "--device-profile", "h200")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["scale", *arguments])


def test_the_table_has_every_size() -> None:
    done = run(*FLAGS, "--batches", "64k", "--devices", "8,16,64", "--set", "copy_engines=off")
    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:4] for line in lines[1:4]] == [
        ["65536", "8", "1", "gather"],
        ["65536", "16", "2", "ring"],
        ["65536", "64", "8", "ring"],
    ]
    assert "not measured" in done.stdout


def test_rows_are_the_simulation(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run(*FLAGS, "--batches", "64k,1M", "--devices", "1,4,32", "--json", "-o", str(file))
    result = json.loads(done.stdout)
    assert result == json.loads(file.read_text())
    assert result["simulated"] is True and result["board"] == "h200" and "not" not in result["command"]
    assert "nothing here was measured" in result["note"]
    assert result["checksum"] == checksum(result["rows"])
    assert [(row["batch"], row["devices"]) for row in result["rows"]] == [
        (batch, devices) for batch in (65536, 2**20) for devices in (1, 4, 32)
    ]
    row = result["rows"][2]
    problem = {"batch_size": 65536, "dim": 64, "devices": 32, "nodes": 4, "device_profile": "h200"}
    step = infcl_gen.simulate(**problem)
    assert row["step_ms"] == pytest.approx(1e3 * step.step_s, rel=1e-5)
    assert row["efficiency"] == pytest.approx(step.efficiency, abs=1e-4) and row["bound"] == step.bound
    assert row["peak_bytes"] == infcl_gen.plan(**problem).predicted_peak_bytes
    assert result["rows"][0]["transport"] == "none" and result["rows"][0]["efficiency"] == 1.0


def test_what_does_not_fit_is_a_row_that_says_why() -> None:
    done = run(*FLAGS, "--batches", "2M", "--devices", "8,512", "--memory-budget", "64MiB", "--json")
    assert done.exit_code == 0
    small, large = json.loads(done.stdout)["rows"]
    assert "no plan fits" in small["error"] and small["smallest_budget_bytes"] > 64 << 20
    assert small["step_ms"] is None and large["error"] is None
    assert "no plan fits the budget" in cells(small) and len(cells(small)) == len(cells(large))


def test_a_cluster_file_gives_nodes_links_and_the_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'nodes = 16\ndevices_per_node = 4\ndevice_profile = "h200"\nlinks_per_node = 2\n'
        'node_link_gbs = { value = 1.0, source = "assumed: a test" }\n'
    )
    flags = {"dim": 64, "cluster": str(file)}
    problems = clusters(flags, None, [4096])
    assert [(p.devices, p.nodes) for p in problems] == [(4, 1), (8, 2), (16, 4), (32, 8), (64, 16)]
    assert all(p.links is not None and p.links.links_per_node == 2 for p in problems)
    single = clusters(flags, [1], [4096])[0]
    assert (single.devices, single.nodes) == (1, 1)
    slow = simulated(clusters(flags, [64], [2**20])[0])
    fast = simulated(clusters({"dim": 64, "device_profile": "h200"}, [64], [2**20])[0])
    assert slow["bound"] == "network" and slow["step_ms"] > 2 * fast["step_ms"]
    with pytest.raises(InputError, match="--devices: 6 devices do not fill nodes of 4"):
        clusters(flags, [6], [4096])
    with pytest.raises(InputError, match="--device-profile: 'h100' contradicts 'h200'"):
        clusters({**flags, "device_profile": "h100"}, [4], [4096])


@pytest.mark.parametrize("suffix", nightly([".svg", ".png"], [".svg"]))
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        done = run(*FLAGS, "--batches", "4k,8k", "--devices", "8,16", "--plot", str(file))
        assert done.exit_code == 0, done.stderr
    content = files[0].read_bytes()
    assert content == files[1].read_bytes()  # the file's own name is not in it
    if suffix == ".svg":
        assert b"<svg" in content


def test_flags_of_a_config_file(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('dim = 64\ndevice-profile = "h200"\nbatches = ["4k"]\ndevices = "8,16"\nbatch_size = 3\n')
    done = run("--config", str(config), "--json")
    assert [row["devices"] for row in json.loads(done.stdout)["rows"]] == [8, 16]


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tune" / "bench" / "h200-scaling.json").read_text())
    return found


def test_the_committed_rows_are_what_is_simulated_today(tmp_path: Path) -> None:
    """Of a few sizes: all of them take seconds."""
    result = committed()
    assert result["simulated"] is True
    assert {row["devices"] for row in result["rows"]} == {8 << power for power in range(10)}
    assert {row["batch"] for row in result["rows"]} == {1 << 20, 32 << 20}
    for row in result["rows"]:
        if row["devices"] in (8, 64, 512):
            flags = {"dim": row["dim"], "device_profile": "h200", "memory_budget": "64GiB"}
            assert simulated(clusters(flags, [row["devices"]], [row["batch"]])[0]) == row, "run infcl-gen scale anew"


def test_all_nodes_of_a_file_are_reached(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('nodes = 6\ndevices_per_node = 4\ndevice_profile = "h200"\n')
    found = clusters({"dim": 64, "cluster": str(file)}, None, [4096])
    assert [problem.devices for problem in found] == [4, 8, 16, 24]
