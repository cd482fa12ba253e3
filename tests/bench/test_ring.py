"""Measuring a ring, on gloo processes of this machine."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import infcl_gen
from infcl_gen import cli
from infcl_gen.bench.contest import Contest, Limits
from infcl_gen.bench.peers import Peer, chosen_peers
from infcl_gen.bench.results import Rows
from infcl_gen.bench.ring import HOW, carriers
from infcl_gen.emission import import_package
from infcl_gen.errors import InputError, ToolchainError
from tests.bench.libraries import write_libraries

pytestmark = pytest.mark.usefixtures("forked")


def package(folder: Path, devices: int = 2, **flags: Any) -> Path:
    flags = {"dtype": "fp32", "target": "cpu"} | flags
    return infcl_gen.generate(output=folder, batch_size=129, dim=16, devices=devices, **flags)


def measured(folders: list[Path], ranks: int = 2, peers: str = "none", rounds: int = 10, once: bool = False) -> Rows:
    with Contest(chosen_peers(peers, ranks), limits=Limits(rounds, silent_s=100)) as contest:
        return contest.ring(folders, ranks, once=once)


def test_a_package_is_measured_with_and_without_its_communication(tmp_path: Path) -> None:
    ways = {"fp32": "ring", "bf16": "gather"}
    folders = [package(tmp_path / dtype, dtype=dtype, set={"transport": way}) for dtype, way in ways.items()]
    (folders[1] / "notes.txt").write_text("added: this package is an edited one")
    rows = measured(folders, rounds=3)
    assert [(row["dtype"], row["impl"], row["package"]) for row in rows] == [
        (dtype, "infcl", how) for dtype in ("fp32", "bf16") for how in HOW.values()
    ]
    for row in rows:
        assert row["error"] is None and row["ranks"] == 2 and row["batch"] == 129 and row["repeats"] == 3
        assert row["median_ms"] > 0 and 0 < row["peak_bytes"] <= row["predicted_peak_bytes"]
        assert row["transport"] == ways[row["dtype"]]
        assert row.get("edited", False) == (row["dtype"] == "bf16")


def test_ways_to_carry_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without overlap a transfer is waited for at once; without communication nothing is sent, and nobody is asked."""
    module = import_package(package(tmp_path / "a"))
    groups, transport = (
        importlib.import_module(f"{module.__name__}._runtime.{name}") for name in ("group", "transport")
    )
    waited: list[str] = []
    work = SimpleNamespace(wait=lambda: waited.append("waited"))
    monkeypatch.setattr(groups.Group, "__init__", lambda self, group: None)
    monkeypatch.setattr(groups.Group, "post", lambda self, sends, receives: [work])
    plain = SimpleNamespace(process_group=None)
    monkeypatch.setattr(groups, "find_group", lambda name: plain)
    found = carriers(module, [3, 2])
    assert list(found) == list(HOW) and found["infcl"] is plain
    assert groups.Group.overlaps and not any(found[name].overlaps for name in list(HOW)[1:])
    source, target = torch.arange(4.0), torch.full((6,), torch.nan)
    messages = [groups.Message(source, 1, 0)], [groups.Message(target, 1, 0)]
    assert found["infcl, no overlap"].post(*messages) == [] and waited == ["waited"]
    assert found["infcl, no communication"].post(*messages) == [] and waited == ["waited"]
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]
    answers = found["infcl, no communication"].exchange({"loss": "clip", "rows": 3, "keys": 3}, "backward", 1)
    assert [(said["rows"], said["keys"], said["phase"]) for said in answers] == [(3, 3, "backward"), (2, 2, "backward")]
    # On a GPU messages are started on a stream of their own, for which the work would not wait.
    with transport.Moment(torch.device("cuda"), beside=False):
        assert not transport._streams


def test_a_large_batch_is_measured_once(tmp_path: Path) -> None:
    (row,) = measured([package(tmp_path / "a", set={"transport": "ring"})], once=True)
    assert row["error"] is None and row["repeats"] == 1 and row["transport"] == "ring"
    assert row["median_ms"] > 0 and 0 < row["peak_bytes"] <= row["predicted_peak_bytes"]


def test_peers_are_not_run_on_uneven_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "absent", lambda peer, loss: None)
    *ours, peer = measured([package(tmp_path / "a")], peers="inf_cl", rounds=1)
    assert [row["impl"] for row in ours] == ["infcl"] * len(HOW) and not any(row["error"] for row in ours)
    assert (peer["impl"], peer["error"], peer["median_ms"]) == ("inf_cl", "needs as many rows on each rank", None)


def test_each_way_to_exchange_texts_is_a_peer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rank and the number of ranks; the stand-ins compute, but exchange nothing."""
    said = tmp_path / "said"
    tell = f"open({str(said)!r}, 'a').write(f'{{given}}\\n') if given else None"
    folder = write_libraries(tmp_path / "libraries", {"open_clip": tell, "siglip_kernel": tell})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(Peer, "absent", lambda peer, loss: None if "siglip" in peer.losses else "another loss")
    even = infcl_gen.generate(
        output=tmp_path / "p", batch_size=128, dim=16, devices=2, target="cpu", dtype="fp32", loss="siglip"
    )
    peers = measured([even], peers="all", rounds=1)[len(HOW) :]
    ways = {f"open_clip-siglip-{way}": way for way in ("bidir", "shift", "reduce", "gather")}
    ways |= {f"siglip-kernel-{way}": way for way in ("ring", "gather")}
    assert [(row["impl"], row["error"]) for row in peers] == [(name, None) for name in ways]
    lines = set(said.read_text().splitlines())
    assert lines == {f"({(rank, 2, way)},)" for rank in (0, 1) for way in ways.values()}


def test_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "ring.json"
    flags = "bench --target cpu --dtype fp32 --batch-size 64 --dim 16 --ranks 2 --against none --repeats 2 -o"
    command = [*flags.split(), str(output)]
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 0, done.output
    result = json.loads(output.read_text())
    assert [row["package"] for row in result["rows"]] == list(HOW.values())
    assert "--ranks 2" in result["command"] and "no communication" in done.stdout
    for extra, message in (
        (["--plot", "x.svg"], "--plot: not with --ranks"),
        (["--against", "memeff"], "one device"),
        (["--features", "fp32"], "--features: not with --ranks"),
    ):
        refused = CliRunner().invoke(cli.main, [*command, *extra])
        assert refused.exit_code == 2 and message in refused.stderr


def test_what_cannot_be_measured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="planned for 2 device"):
        measured([package(tmp_path / "a")], ranks=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    gpu = package(tmp_path / "c", target="auto", device_profile="h200", dtype="bf16")
    with pytest.raises(ToolchainError, match="2 GPUs are needed, and 1 are here"):
        measured([gpu])
    with pytest.raises(InputError, match="with a key for each query"):
        measured([package(tmp_path / "keys", loss="infonce", keys=64)])
    monkeypatch.setattr("infcl_gen.bench.contest.RING_S", 0.1)
    with pytest.raises(ToolchainError, match=r"not finished after 0\.1 s"):
        measured([package(tmp_path / "d")])
