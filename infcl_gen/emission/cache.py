"""Packages in the user's cache folder: generated when missing, else imported without SymPy and without planning."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import threading
import time
from dataclasses import asdict, astuple
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from infcl_gen.emission.package import read_package, write_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.files import cache_folder, lock, record_folders, template_folder
from infcl_gen.garbage import uncollected
from infcl_gen.hardware import resolve_cluster, resolved
from infcl_gen.inputs.problem import Problem
from infcl_gen.version import __version__

SOURCE = Path(__file__).resolve().parent.parent
_importing = threading.RLock()  # a thread must not see a module that another is still executing


def load_cached(problem: Problem) -> ModuleType:
    """Import the package for `problem`, generating it first unless an intact one is in the cache.

    Of several processes one generates, the others wait. Raises LockTimeoutError if another holds the lock for too long,
    InputError or InfeasibleError if there is no such package.
    """
    folder = cache_folder() / cache_key(problem)
    if not _intact(folder):
        with _lock(folder, "generating"):
            _complete(folder, problem)
    try:
        return _used(folder)
    except (OSError, ToolchainError):
        if _intact(folder):
            raise
    with _lock(folder, "generating"):  # another process has pruned it, and must not do so again
        _complete(folder, problem)
        return _used(folder)


@uncollected()
def _complete(folder: Path, problem: Problem) -> None:
    if not _intact(folder):
        from infcl_gen.emission.pipeline import build

        _remove(folder)  # damaged: no process imports it, for each checks before it imports
        write_package(build(problem), folder)


@uncollected()
def _used(folder: Path) -> ModuleType:
    with contextlib.suppress(OSError):  # a cache that can only be read
        os.utime(folder)  # `entries` tells when a package was last used
    return import_package(folder, f"infcl_gen.packages.{folder.name}")


def _lock(folder: Path, doing: str) -> contextlib.AbstractContextManager[None]:
    return lock(folder.with_name(f"{folder.name}.lock"), f"{doing} {folder}")


class Entry(NamedTuple):
    """A package in the cache; `used` is when it was last loaded, in seconds since the epoch."""

    folder: Path
    problem: dict[str, Any]
    bytes: int
    used: float


def entries(name: str = "p*") -> list[Entry]:
    """The packages in the cache, the one used last first. A damaged one has an empty problem."""
    found = []
    for folder in cache_folder().glob(f"{name}/"):
        try:
            problem = read_package(folder).spec["problem"]
        except InputError:
            problem = {}
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.append(Entry(folder, problem, size, folder.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def prune(days: float) -> list[Entry]:
    """Remove the packages that were not used for so many days, and damaged ones; they are returned."""

    def is_old(entry: Entry) -> bool:
        return not entry.problem or time.time() - entry.used >= 86400 * days

    removed = []
    for entry in filter(is_old, entries()):
        with _lock(entry.folder, "removing"):
            # Looked at again: another process may have used it, made it anew, or removed it since.
            if now := [each for each in entries(entry.folder.name) if is_old(each)]:
                _remove(entry.folder)
                removed += now
    return removed


def import_package(folder: Path, name: str | None = None, edited: bool = False) -> ModuleType:
    """Import a generated package from any folder under `name`; the same module again if it is already imported.

    Without a name the package is checked and named by its digest, so that two packages never share a module. Raises
    InputError if the check fails (`edited`: as in `read_package`), ToolchainError if a library is missing.
    """
    if name is None:
        name = f"infcl_gen_package_{read_package(folder, edited=edited).digest[:16]}"
    with _importing:
        if name in sys.modules:
            return sys.modules[name]
        specification = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert specification and specification.loader  # as for each .py
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        try:
            specification.loader.exec_module(module)
        except ImportError as error:
            raise ToolchainError(f"{folder}: a library that the package needs is missing: {error}") from error
        finally:
            if not hasattr(module, "contrastive_loss"):
                for entry in [other for other in sys.modules if other == name or other.startswith(f"{name}.")]:
                    del sys.modules[entry]
        return module


def cache_key(problem: Problem) -> str:
    """The digest of what decides the text: problem, device, a loss of the user's own, tuning records, the generator."""
    profile, loss, formula = resolve_cluster(problem).profile, problem.loss, None
    if not isinstance(loss, str) or ":" in loss:  # a built-in loss is part of the generator
        from infcl_gen.losses import load_loss, spec_as_dict

        own = load_loss(loss)
        loss, formula = own.name, spec_as_dict(own)
    found = (__version__, astuple(resolved(problem, loss, profile)), formula, asdict(profile))
    digest = hashlib.sha256(repr(found).encode())
    sources = [(root, file) for root in (SOURCE, template_folder()) for file in sorted(root.rglob("*"))]
    records = [(folder, folder / f"{profile.name}.json") for folder in record_folders()]
    for root, file in [*sources, *records]:
        if file.suffix in (".py", ".jinja", ".toml", ".json") and file.is_file():
            digest.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return f"p{digest.hexdigest()[:24]}"  # a name that can be imported


def _remove(entry: Path) -> None:
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{entry}: damaged, and cannot be removed ({error.strerror})") from error


@uncollected()
def _intact(folder: Path) -> bool:
    try:
        read_package(folder)
    except InputError:
        return False
    return True
