"""The scripts of tune/, which are no modules of a package."""

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def script(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(name, ROOT / "tune" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
