"""What every test of measurements has."""

import gc

import pytest

from infcl_gen.bench import timing


@pytest.fixture(autouse=True)
def _little_garbage() -> None:
    """Measurements collect garbage for each contestant: 0.05 s less each time, of what earlier tests have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are of no interest here: a flush of 64 MiB takes 0.03 s."""
    monkeypatch.setattr(timing, "CPU_FLUSH_BYTES", 1 << 20)
