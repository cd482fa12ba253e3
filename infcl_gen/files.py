"""Files and folders that are complete or absent at every moment, and locks between processes."""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from infcl_gen.errors import InputError, LockTimeoutError

LOCK_TIMEOUT_S = 120.0
_UNFINISHED = ".infcl-gen-"  # in the names of folders that are being written or replaced


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the previous content or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_synced(temporary, content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files atomically, replacing `target`. Leftovers of killed writers are removed.

    All files are synced before the folder gets its name, so that a crash of the machine leaves no partial folder. The
    caller holds a lock of `target`. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(target)
    fresh = target.with_name(f".{target.name}{_UNFINISHED}{secrets.token_hex(4)}")
    fresh.mkdir()
    claim = os.open(fresh, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # where folders cannot be locked, no folder counts as a leftover
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path, content in contents.items():
            _write_synced(fresh / path, content)
        for inner in sorted({fresh, *((fresh / path).parent for path in contents)}):
            _sync_folder(inner)
        _rename_into_place(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(claim)


@contextlib.contextmanager
def lock(path: Path, doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Hold an inter-process lock. Raises LockTimeoutError after `timeout_s` (default LOCK_TIMEOUT_S), which names
    `doing`; InputError if the lock file cannot be made."""
    import filelock

    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(path)
        held.acquire(timeout=timeout_s)
    except filelock.Timeout as error:
        raise LockTimeoutError(
            f"{doing}: another process has held the lock {path} for {timeout_s:g} s; wait for it, or end it"
        ) from error
    except OSError as error:
        raise InputError(f"{doing}: cannot lock {path} ({error.strerror})") from error
    try:
        yield
    finally:
        held.release()


def lock_file(name: str) -> Path:
    """This user's lock file of that name, in a folder of its own, so that nothing appears beside what is locked."""
    return Path(tempfile.gettempdir()) / f"infcl_gen-{os.getuid()}" / f"{name}.lock"


def timing_lock(target: str, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Held while timing on this machine's devices of a target: concurrent runs would disturb each other's times."""
    return lock(lock_file(f"timing-{target}"), "timing", timeout_s)


def lock_file_of(target: Path) -> Path:
    """This user's lock file for an absolute path."""
    return lock_file(hashlib.sha256(os.fsencode(target)).hexdigest()[:16])


def load_file(path: Path) -> ModuleType:
    """Import one file without its package. Raises whatever the file raises."""
    name = f"infcl_gen_file_{checksum(str(path.resolve()))}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    # Triton looks up kernels' globals in sys.modules.
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def checksum(value: Any) -> str:
    """sha256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_folder(flag: str, folder: Path) -> None:
    """Raises InputError unless files can be written to the folder, or to its nearest existing parent."""
    try:
        existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        raise InputError(
            f"{flag}: {str(folder)!a} cannot be written to ({error.strerror}); give a folder of yours"
        ) from error


def _remove_unfinished(target: Path) -> None:
    """Remove folders of killed writers of `target`: their locks are free."""
    prefix = f".{target.name}{_UNFINISHED}"
    for entry in [entry for entry in target.parent.iterdir() if entry.name.startswith(prefix)]:
        with contextlib.suppress(OSError):  # a writer on another machine holds the lock
            claim = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(claim)


def _rename_into_place(fresh: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(fresh, target)  # POSIX: an empty folder is replaced
    else:
        retired = fresh.with_name(f"{fresh.name}-retired")
        os.rename(target, retired)
        try:
            os.rename(fresh, target)
        except BaseException:
            os.rename(retired, target)
            raise
        shutil.rmtree(retired, ignore_errors=True)
    _sync_folder(target.parent)


def _write_synced(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """The folder of cached packages: in $INFCL_GEN_CACHE, or below the user's cache directory."""
    import platformdirs

    moved = os.environ.get("INFCL_GEN_CACHE")
    root = (
        Path(moved).expanduser().absolute()
        if moved
        else Path(platformdirs.user_cache_dir("infcl_gen", appauthor=False))
    )
    return root / "packages"


def record_folders() -> tuple[Path, Path]:
    """The user's folder of tuning records, and the folder that comes with infcl_gen."""
    import platformdirs

    package = Path(__file__).resolve().parent
    installed = package / "_records"  # in a wheel; in a checkout they stand beside the package
    users = Path(platformdirs.user_data_dir("infcl_gen", appauthor=False)) / "records"
    return users, installed if installed.is_dir() else package.parent / "tune" / "records"


def template_folder() -> Path:
    """`templates/`: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_templates"
    return installed if installed.is_dir() else package.parent / "templates"
