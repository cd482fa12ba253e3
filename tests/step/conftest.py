"""What tests of planned steps share: the packages that their ranks load."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def package_cache(shared_folder: Path) -> str:
    """A cache that all ranks of a run find their packages in: each is derived and written once."""
    return str(shared_folder / "step_packages")
