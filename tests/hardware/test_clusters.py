"""Cluster files: what they give to a problem, what flags may say beside them, and where the figures go."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import infcl_gen
from infcl_gen.cli import main
from infcl_gen.emission import pipeline, rerender
from infcl_gen.errors import InputError
from infcl_gen.hardware import cluster, cluster_of, detection, load_profile, resolve_cluster
from infcl_gen.inputs.cluster_file import Links, Peak, read_cluster
from infcl_gen.inputs.problem import make_problem
from tests.hardware.test_profiles import profile_text

TEXT = """
nodes = 4
devices_per_node = 8
device_profile = "h200"
link_gbs = { value = 300, source = "measured: infcl-gen doctor" }
node_link_gbs = { value = 25.0, source = "vendor: two ports for four devices" }
links_per_node = 4
latency_us = { value = 5.0, source = "assumed: switched" }
node_latency_us = { value = 12.5, source = "assumed: two switches" }
"""
SIZES = {"batch_size": "64k", "dim": 768}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT)
    return path


def test_a_file_gives_devices_nodes_profile_and_links(file: Path) -> None:
    problem = make_problem(**SIZES, cluster=file)
    assert (problem.devices, problem.nodes, problem.device_profile) == (32, 4, "h200")
    cluster = resolve_cluster(problem)
    assert cluster.devices_per_node == 8
    assert cluster.link_gbs == Peak(300.0, "measured: infcl-gen doctor")
    assert (cluster.node_link_gbs.value, cluster.links_per_node) == (25.0, 4)
    assert (cluster.latency_us.value, cluster.node_latency_us.value) == (5.0, 12.5)


def test_what_a_file_does_not_say_is_the_profiles() -> None:
    profile = load_profile("h100")
    problem = make_problem(**SIZES, devices=16, nodes=2)
    cluster = cluster_of(problem, profile)
    assert (cluster.link_gbs, cluster.node_link_gbs) == (profile.link_gbs, profile.node_link_gbs)
    assert cluster.links_per_node == 8
    assert cluster.latency_us == cluster.node_latency_us == profile.launch_us
    slow = Links(latency_us=Peak(7.0, "assumed: x"))
    assert cluster_of(dataclasses.replace(problem, links=slow), profile).node_latency_us.value == 7.0
    assert make_problem(**SIZES, cluster={}).links is None


def test_a_mapping_is_the_same_as_a_file(file: Path) -> None:
    import msgspec

    assert make_problem(**SIZES, cluster=msgspec.toml.decode(TEXT)) == make_problem(**SIZES, cluster=str(file))


@pytest.mark.parametrize(
    ("cluster", "flags", "found"),
    [
        ({"devices_per_node": 8}, {}, (8, 1)),
        ({"devices_per_node": 8}, {"devices": 64}, (64, 8)),
        ({"devices_per_node": 8}, {"nodes": "3"}, (24, 3)),
        ({"devices_per_node": 8, "nodes": 2}, {"devices": "16", "nodes": 2}, (16, 2)),
        ({"nodes": 2}, {"devices": 6}, (6, 2)),
        ({"links_per_node": 2}, {"devices": 4}, (4, 1)),
    ],
)
def test_flags_beside_a_file(cluster: dict[str, Any], flags: dict[str, Any], found: tuple[int, int]) -> None:
    problem = make_problem(**SIZES, cluster=cluster, **flags)
    assert (problem.devices, problem.nodes) == found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"devices": 16}, "--devices: 16 contradicts 32 of --cluster"),
        ({"nodes": "8"}, "--nodes: 8 contradicts 4 of --cluster"),
        ({"device_profile": "h100"}, "--device-profile: 'h100' contradicts 'h200' of --cluster"),
        ({"links": Links()}, "--links: .* contradicts"),
    ],
)
def test_flags_that_contradict_the_file(file: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_problem(**SIZES, cluster=file, **flags)


def test_a_profile_is_looked_for_beside_the_cluster_file(tmp_path: Path, file: Path) -> None:
    (tmp_path / "mine.toml").write_text(profile_text("h200").replace('"h200"', '"mine"'))
    file.write_text(TEXT.replace('"h200"', '"mine.toml"'))
    assert resolve_cluster(make_problem(**SIZES, cluster=file)).profile.name == "mine"


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is said on a machine without a GPU."""
    monkeypatch.setattr(detection, "find_device", lambda: None)
    cluster._warn_once.cache_clear()
    return caplog


def test_several_devices_without_a_gpu_or_a_profile_are_cpus_aloud(
    warned: pytest.LogCaptureFixture, file: Path
) -> None:
    """A login node has none. It is said once, to users of Python by the keyword."""
    flags = {"batch_size": 64, "dim": 8}
    for silent in ({}, {"devices": 2, "target": "cpu"}, {"devices": 2, "device_profile": "cpu"}, {"cluster": file}):
        resolve_cluster(make_problem(**flags | silent))
    assert not warned.messages
    for several in ({"devices": 2}, {"devices": 4}, {"cluster": {"links_per_node": 1}}):
        assert resolve_cluster(make_problem(**flags | several)).profile.name == "cpu"
    (message,) = warned.messages
    assert message.startswith(
        "no GPU is here, so this plans for CPUs; device_profile names another device: a100, b200,"
    )


def test_a_command_names_the_flag_of_a_profile(warned: pytest.LogCaptureFixture) -> None:
    done = CliRunner().invoke(main, ["plan", "--batch-size", "64", "--dim", "8", "--devices", "2"])
    assert done.exit_code == 0 and len(warned.messages) == 1
    assert "; --device-profile names another device: a100" in warned.messages[0]


DEFECTS = [
    ("nodes = 4", "node = 4", "unknown key 'node' in .*did you mean 'nodes'"),
    ("nodes = 4", "nodes = 0", "nodes in .*: 0 is out of range; valid: 1 to 65536"),
    ("nodes = 4", "nodes = 4.0", "nodes in .*expected an integer"),
    ("nodes = 4", "nodes = true", "nodes in .*expected an integer"),
    ("nodes = 4", "nodes = 65536", "--devices"),
    ('"h200"', "200", "device_profile in .*expected text"),
    ('"h200"', '"h\\u001b[31m200"', "device_profile in"),
    ("value = 300", "value = 0", "link_gbs in .*above 0"),
    ("value = 300", "value = nan", "link_gbs in .*finite"),
    ("value = 300", "value = inf", "link_gbs in .*finite"),
    ("value = 300", 'value = "300"', "link_gbs in .*expected a number"),
    ("value = 300", "valeu = 300", "link_gbs in .*expected a number"),
    ("measured: infcl-gen doctor", "doctor", "link_gbs in .*source must start with one of measured:"),
    ('{ value = 300, source = "measured: infcl-gen doctor" }', "300", "link_gbs in .*expected a number and where"),
    ("links_per_node = 4", "links_per_node = 9", "links_per_node = 9 of a node of 8 device.*valid: 1 to 8"),
    ("links_per_node = 4", "links_per_node = 0", "links_per_node: 0 is out of range"),
    ("links_per_node = 4", "links_per_node = 1.5", "links_per_node: expected an integer"),
    ("nodes = 4", "[nodes", "TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), DEFECTS)
def test_defects_of_a_file_are_named(file: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as raised:
        make_problem(**SIZES, cluster=file)
    assert str(raised.value).startswith("--") and str(raised.value).isprintable()


@pytest.mark.parametrize("cluster", [3, [], b"x", {1: 2}, {"links_per_node": "4"}, {"latency_us": [1, 2]}])
def test_what_is_no_cluster(cluster: Any) -> None:
    with pytest.raises(InputError, match=r"^--cluster: "):
        read_cluster(cluster)


def test_link_rates_reach_the_plan(file: Path) -> None:
    def exposed(cluster: dict[str, Any]) -> float:
        plan = infcl_gen.plan(**SIZES, device_profile="h200", cluster=cluster)
        return sum(phase.time_s for phase in plan.phases if phase.bound == "link")

    slow = {"value": 2.0, "source": "assumed: a slow one"}
    assert exposed({"devices_per_node": 4, "link_gbs": slow}) > 10 * exposed({"devices_per_node": 4})
    two = {"nodes": 2, "devices_per_node": 4}
    assert exposed(two | {"node_link_gbs": slow}) > 2 * exposed(two)


def test_a_package_carries_its_links_and_needs_no_file(file: Path, tmp_path: Path) -> None:
    folder = infcl_gen.generate(output=tmp_path / "package", cluster=file, **SIZES)
    file.unlink()
    assert all((folder / path).read_bytes() == content for path, content in rerender(folder).items())
    spec = pipeline.read_package(folder).spec
    problem, _, cluster = pipeline.spec_inputs(spec)
    assert problem.links is not None and cluster.node_latency_us.value == 12.5


@pytest.mark.parametrize("name", ["loss", "device"])
def test_a_package_without_loss_or_device_is_refused(name: str, file: Path, tmp_path: Path) -> None:
    spec = pipeline.read_package(infcl_gen.generate(output=tmp_path / "package", cluster=file, **SIZES)).spec
    with pytest.raises(infcl_gen.InputError, match="SPEC lacks the loss or the device"):
        pipeline.spec_inputs(spec | {name: None})


def test_without_a_file_a_package_says_nothing_of_links(tmp_path: Path) -> None:
    folder = infcl_gen.generate(output=tmp_path / "package", device_profile="h200", **SIZES)
    assert "links" not in pipeline.read_package(folder).spec["problem"]
    assert "links" not in infcl_gen.plan(device_profile="h200", **SIZES).as_dict()["problem"]
