"""Packages of a GPU process, and its memory given back after each test: eight processes share one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.packages import use_folder


@pytest.fixture(scope="session", autouse=True)
def _packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    use_folder(tmp_path_factory.mktemp("packages"))


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
