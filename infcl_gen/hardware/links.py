"""Bandwidth between the GPUs of this machine: each ordered pair alone, and all of them as a ring."""

import dataclasses
import statistics
import time
from typing import Any

COPY_BYTES = 256 << 20  # 0.7 ms on NVLink, long against the start of a copy
COPIES, RUNS = 4, 3  # copies in a timed run; timed runs, whose median counts


@dataclasses.dataclass(frozen=True)
class LinkRates:
    """GB/s: `pairs[a][b]` from GPU a to b alone (0 on the diagonal), `ring` from each GPU to the next, all at once."""

    pairs: tuple[tuple[float, ...], ...]
    ring: float

    @property
    def slowest(self) -> tuple[float, int, int]:
        """The lowest rate of a pair, and the pair."""
        return min((rate, a, b) for a, row in enumerate(self.pairs) for b, rate in enumerate(row) if a != b)

    def table(self) -> list[tuple[str, ...]]:
        """A header, and a row for each sender."""
        rows = [("GB/s from", *(f"to {b}" for b in range(len(self.pairs))))]
        for a, rates in enumerate(self.pairs):
            rows.append((str(a), *("-" if a == b else f"{rate:.0f}" for b, rate in enumerate(rates))))
        return rows

    def cluster_file(self, profile: str) -> list[str]:
        """The lines of a cluster file with these devices."""
        source = f"measured: infcl-gen doctor, copies of {len(self.pairs)} GPUs to the next at once"
        return [
            f"devices_per_node = {len(self.pairs)}",
            f'device_profile = "{profile}"',
            f'link_gbs = {{ value = {self.ring:.1f}, source = "{source}" }}',
        ]


def measure(torch: Any) -> LinkRates:
    """The rates between the GPUs of `torch`, at least two. Raises torch's RuntimeError, for example without memory."""
    devices = range(torch.cuda.device_count())
    buffers = [[torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{a}") for _ in range(2)] for a in devices]
    # In a ring every GPU sends and receives at once, on a stream for each.
    streams = [[torch.cuda.Stream(a) for _ in range(2)] for a in devices]

    def synchronize(pairs: list[tuple[int, int]]) -> None:
        for device in {device for pair in pairs for device in pair}:
            torch.cuda.synchronize(device)

    def rate(pairs: list[tuple[int, int]]) -> float:
        """GB/s of each pair, all at once. The first run is not timed: it sets up peer access."""
        times = []
        for _ in range(RUNS + 1):
            synchronize(pairs)
            start = time.perf_counter()
            for a, b in pairs * COPIES:
                with torch.cuda.stream(streams[a][0]), torch.cuda.stream(streams[b][1]):
                    buffers[b][1].copy_(buffers[a][0], non_blocking=True)
            synchronize(pairs)
            times.append(time.perf_counter() - start)
        return COPIES * COPY_BYTES / statistics.median(times[1:]) / 1e9

    pairs = tuple(tuple(0.0 if a == b else rate([(a, b)]) for b in devices) for a in devices)
    return LinkRates(pairs, rate([(device, (device + 1) % len(devices)) for device in devices]))
