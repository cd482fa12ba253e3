"""The interpreter process of a pytest worker; all processes of a run share the packages that they generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.packages import use_folder
from tests.kernels.worker import Interpreter


@pytest.fixture(scope="session")
def interpreted(shared_folder: Path) -> Iterator[Interpreter]:
    """`interpreted(check, *arguments)`: the check, in a process where Triton interprets its kernels on the CPU."""
    interpreter = Interpreter(shared_folder)
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session", autouse=True)
def _packages(shared_folder: Path) -> None:
    use_folder(shared_folder)
