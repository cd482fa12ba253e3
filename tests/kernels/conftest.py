"""The interpreter process of a pytest worker, and the folder of the packages that the worker itself generates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.packages import use_folder
from tests.kernels.worker import Interpreter


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """`interpreted(check, *arguments)`: the check, in a process where Triton interprets its kernels on the CPU."""
    interpreter = Interpreter(tmp_path_factory.mktemp("interpreted"))
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session", autouse=True)
def _packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    use_folder(tmp_path_factory.mktemp("packages"))
