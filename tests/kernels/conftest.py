"""The interpreter process of a pytest worker, and how many examples a tier draws."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kernels.worker import Interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """`interpreted(check, *arguments)`: the check, in a process where Triton interprets its kernels on the CPU."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
