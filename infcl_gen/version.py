"""The version, written into every generated package and part of the cache key of `load`, and those of libraries."""

import re

__version__ = "0.1.0"


def installed(*names: str) -> dict[str, str]:
    """The versions of those of these distributions that are installed."""
    import importlib.metadata

    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def older(version: str, major: int, minor: int) -> bool:
    """Whether a version is before major.minor."""
    first, second, *_ = [*map(int, re.findall(r"[0-9]+", version)), 0, 0]
    return (first, second) < (major, minor)


def interpreter_defect() -> str | None:
    """Why the installed Triton cannot interpret kernels on the CPU, and what would help; None if it can."""
    found = {"numpy": "", **installed("numpy", "triton")}
    if not found["numpy"]:
        return "Triton's interpreter needs NumPy: install numpy"
    # It makes numbers of arrays with one element, which NumPy 2.4 refuses.
    if "triton" in found and older(found["triton"], 3, 7) and not older(found["numpy"], 2, 4):
        return (
            f"the interpreter of Triton {found['triton']} does not run with NumPy {found['numpy']}: install "
            "'numpy<2.4', or Triton 3.7"
        )
    return None
