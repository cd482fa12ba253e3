"""Bandwidth between GPUs, on a machine that is made up: copies take the time of their link, streams and all."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from infcl_gen import cli
from infcl_gen.hardware import doctor, links
from infcl_gen.hardware.detection import FoundDevice
from infcl_gen.hardware.profile import load_profile
from infcl_gen.inputs.problem import make_problem

SETUP_S = 2.0  # what the first copy of a pair takes more


class Machine:
    """`rates[a][b]` GB/s. As torch orders them: a copy runs on the sender's current stream, and is waited for on the
    receiver's. A GPU sends over one port."""

    def __init__(self, rates: list[list[float]], free: int = 1 << 40) -> None:
        self.rates, self.free, self.clock = rates, free, 10.0
        self.current: dict[int, Any] = {}
        self.done: dict[Any, float] = {}  # when a stream's last work is over
        self.ports: dict[int, float] = {}
        self.opened: set[tuple[int, int]] = set()
        self.copies: list[tuple[int, int]] = []
        self.uint8, self.cuda = "uint8", self
        self.memory = [free] * len(rates)

    def perf_counter(self) -> float:
        return self.clock

    def device_count(self) -> int:
        return len(self.rates)

    def can_device_access_peer(self, a: int, b: int) -> bool:
        assert a != b
        return self.rates[a][b] > 50

    def empty(self, size: int, dtype: str, device: str) -> Buffer:
        assert dtype == "uint8"
        index = int(device.removeprefix("cuda:"))
        self.memory[index] -= size
        if self.memory[index] < 0:
            raise RuntimeError("CUDA out of memory.\nTried to allocate")
        return Buffer(self, index, size)

    def Stream(self, device: int) -> Any:
        return (device, object())

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current.get(stream[0])
        self.current[stream[0]] = stream
        yield
        self.current[stream[0]] = before

    def synchronize(self, device: int) -> None:
        self.clock = max([self.clock, *(end for stream, end in self.done.items() if stream and stream[0] == device)])


class Buffer:
    def __init__(self, machine: Machine, device: int, size: int) -> None:
        self.machine, self.device, self.size = machine, device, size

    def copy_(self, other: Buffer, non_blocking: bool) -> None:
        machine, pair = self.machine, (other.device, self.device)
        assert non_blocking and pair[0] != pair[1]
        send, receive = machine.current[pair[0]], machine.current[pair[1]]
        start = max(
            machine.clock, machine.done.get(send, 0.0), machine.done.get(receive, 0.0), machine.ports.get(pair[0], 0.0)
        )
        end = start + self.size / (machine.rates[pair[0]][pair[1]] * 1e9)
        end += SETUP_S * (pair not in machine.opened)
        machine.opened.add(pair)
        machine.done[send] = machine.done[receive] = machine.ports[pair[0]] = end
        machine.copies.append(pair)


def machine(count: int) -> Machine:
    return Machine([[100.0 + 10 * a + b for b in range(count)] for a in range(count)])


@pytest.mark.parametrize("count", [2, 3, 8])
def test_each_ordered_pair_and_the_ring(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    torch = machine(count)
    monkeypatch.setattr(links.time, "perf_counter", torch.perf_counter)
    found = links.measure(torch)
    for a, b in itertools.product(range(count), repeat=2):
        assert found.pairs[a][b] == pytest.approx(0.0 if a == b else torch.rates[a][b])
    # All at once: the slowest decides, and no copy waits for another GPU's.
    assert found.ring == pytest.approx(min(torch.rates[a][(a + 1) % count] for a in range(count)))
    assert set(torch.copies) == {(a, b) for a in range(count) for b in range(count) if a != b}
    assert found.slowest == (pytest.approx(101.0), 0, 1)


def seen(monkeypatch: pytest.MonkeyPatch, torch: Machine) -> None:
    """The doctor's machine: the real torch, but for what it says of GPUs."""
    import torch as real

    found = FoundDevice("NVIDIA H200", "cuda", "sm_90", 132, 150_110_011_392)
    monkeypatch.setattr(links.time, "perf_counter", torch.perf_counter)
    monkeypatch.setattr(doctor, "find_device", lambda: found)
    monkeypatch.setattr(doctor, "detect", lambda: load_profile("h200"))
    monkeypatch.setattr(doctor, "measure", lambda _: links.measure(torch))
    properties = type("Properties", (), {"name": "NVIDIA H200", "total_memory": 1 << 37, "multi_processor_count": 132})
    monkeypatch.setattr(real.cuda, "device_count", torch.device_count)
    monkeypatch.setattr(real.cuda, "can_device_access_peer", torch.can_device_access_peer)
    monkeypatch.setattr(real.cuda, "get_device_properties", lambda _: properties)


def test_doctor_shows_a_table_and_the_lines_of_a_cluster_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, machine(4))
    result = json.loads(CliRunner().invoke(cli.main, ["doctor", "--json"]).stdout)
    found = {row["subject"]: row for row in result["findings"]}
    assert found["links"]["state"] == "ok" and "12 of 12 pairs direct" in found["links"]["detail"]
    pairs = result["links"]["pairs_gbs"]
    assert [row[a] for a, row in enumerate(pairs)] == [None] * 4
    assert pairs[2][1] == pytest.approx(121.0) and result["links"]["ring_gbs"] == pytest.approx(101.0)
    text = CliRunner().invoke(cli.main, ["doctor"]).stdout
    assert ["2", "120", "121", "-", "123"] in [line.split() for line in text.splitlines()]
    lines = result["links"]["cluster_file"]
    assert all(line in text for line in lines)
    cluster = msgspec.toml.decode("\n".join(lines))
    problem = make_problem(batch_size=64, dim=8, cluster=cluster)  # what is suggested is valid
    assert problem.devices == 4 and problem.device_profile == "h200"
    assert problem.links is not None and problem.links.link_gbs is not None
    assert problem.links.link_gbs.value == pytest.approx(101.0)


def test_doctor_names_indirect_pairs_and_short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = machine(3)
    slow.rates[2][0] = 9.0
    seen(monkeypatch, slow)
    found = {row.subject: row for row in doctor.examine().findings}
    assert found["links"].state == "missing" and "topology" in found["links"].advice
    assert "5 of 6 pairs direct; slowest 2 to 0: 9 GB/s" in found["links"].detail
    full = Machine(slow.rates, free=300 << 20)
    seen(monkeypatch, full)
    report = doctor.examine()
    row = next(row for row in report.findings if row.subject == "links")
    assert row.state == "broken" and "out of memory" in row.detail and "\n" not in row.detail
    assert report.links is None and any(row.subject == "gloo" for row in report.findings)


def test_the_doctor_of_a_machine_without_gpus_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_device", lambda: None)
    monkeypatch.setattr(doctor, "measure", lambda _: 1 / 0)
    report = doctor.examine()
    assert report.links is None
    assert {row.subject: row.state for row in report.findings}["gpu"] == "missing"
