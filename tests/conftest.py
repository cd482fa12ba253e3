"""Test tiers and hypothesis profiles.

Default: everything that needs no GPU, with the same examples on every run. `-m gpu` (make test-gpu): the GPU suite.
`HYPOTHESIS_PROFILE=long -m "not gpu"` (make test-long): many more, random examples, and what tests/tiers.py
names.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from infcl_gen import processes
from tests.forks import SERVERS
from tests.imports import quicken

_COMMON = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck), "print_blob": True}
hypothesis.settings.register_profile("ci", derandomize=True, database=None, max_examples=12, **_COMMON)
hypothesis.settings.register_profile("gpu", derandomize=True, database=None, max_examples=100, **_COMMON)
hypothesis.settings.register_profile("long", max_examples=500, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Workers of pytest-xdist share the cores; a thread pool for each of them only makes them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What was compiled, by the content of its source and options: for all workers, and kept between runs (make clean
# removes it).
_COMPILED = Path(__file__).resolve().parent.parent / "build" / "compiled"
os.environ.setdefault("TRITON_CACHE_DIR", str(_COMPILED / "triton"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_COMPILED / "inductor"))
# Inductor's code for the CPU is scalar: without the headers of vector instructions it compiles in 3 s instead of 14.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Tests that wait, while others compute (of failures a minute in all), and single tests of 5 s to 30 s, one of which
# would keep a worker busy after the others have ended.
FIRST = (
    "test_failures.py", "test_bench.py", "test_search.py", "test_verify.py", "test_documents.py", "test_cli.py",
    "test_training_run.py", "test_rows.py", "test_emission.py", "test_lazy.py", "test_offload.py", "test_planner.py",
    "test_live.py", "test_tables.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """The GPU suite, asked for by name, fails where there is no GPU: skipping all of it is no success.

    Interrupts arrive: what a shell without job control runs in the background ignores SIGINT, and so would all that it
    starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == "gpu" and not config.option.collectonly:
        import torch

        if not torch.cuda.is_available():
            pytest.exit("-m gpu: torch finds no usable GPU on this machine", returncode=4)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: the collector of garbage need not look at it again.

    Of 530 000 objects it took 0.25 s each time, and measurements call it for each contestant. By itself it comes after
    50 000 new objects, not after 700: planning makes many, and hardly any garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `FIRST` come first, in its order.

    GPU tests skip, with the reason, where there is no GPU; they are never silently passed.
    """
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no GPU here (make test-gpu on a machine that has one)")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a run: what one of them has found or made spares the others the work."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="session")
def _private_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own tuning records never change what a test generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "data"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _unsynced_files() -> Iterator[None]:
    """Nothing waits for the disk: a package is 30 files, of 4 ms each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _quick_imports() -> None:
    quicken()


@pytest.fixture(autouse=True, scope="session")
def _the_same_examples() -> Iterator[None]:
    """Hypothesis also draws constants of the modules that happen to be imported, which differ between workers. To read
    ours took 4 s in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", lambda: providers._local_constants, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _private_turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements take turns through a lock in the folder of temporary files; those of tests need not wait for those
    of other test processes: three minutes were seen."""
    folder = tmp_path_factory.getbasetemp() / "temporary"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`infcl_gen.load` never touches the user's own cache in a test; one cache for the whole session."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of `infcl_gen.processes` are forked from one that has imported torch."""
    monkeypatch.setattr(processes, "_start", SERVERS.start)
