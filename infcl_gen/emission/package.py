"""A package as a folder: written atomically, read without importing it, checked against its manifest."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from infcl_gen.emission.render import content_digest
from infcl_gen.errors import InputError, LockTimeoutError

SCHEMA_VERSION = 1
LOCK_TIMEOUT_S = 120.0
MANIFEST = "manifest.json"
_LARGEST_FILE_BYTES = 4 << 20


@dataclass(frozen=True)
class Package:
    """A generated package as read from its folder: SPEC's literals and the bytes of every file by its path."""

    path: Path
    spec: dict[str, Any]
    files: dict[str, bytes]

    @property
    def digest(self) -> str:
        return str(self.spec["digest"])


def write_package(files: Mapping[str, str], output: str | Path, force: bool = False) -> Path:
    """Write `files` and their manifest to the folder `output`, and return its absolute path.

    Everything is written to a folder beside it, synced, and renamed: `output` is complete or absent at every
    moment. With `force` an existing package is replaced; a folder that holds anything else never is.
    Raises InputError (the output is not a place to write to), LockTimeoutError (another process is writing there).
    """
    target = _checked_output(output, force)
    contents = {path: text.encode() for path, text in files.items()}
    contents[MANIFEST] = manifest_text(files).encode()
    with lock(_lock_file(target), f"writing {target}"):
        _checked_output(output, force)  # again: another process may have written it meanwhile
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        except OSError as error:
            raise InputError(f"--output {target}: cannot write there ({error.strerror})") from error
        try:
            _write_files(fresh, contents)
            _rename_into_place(fresh, target)
        except OSError as error:
            raise InputError(f"--output {target}: writing failed ({error.strerror})") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def read_package(folder: str | Path) -> Package:
    """Read and check a package without importing anything of it.

    Raises InputError if the folder is not a package, or if a file is missing, edited, truncated or added
    (bytecode caches aside).
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; give the folder of a generated package")
    entries = _manifest_entries(root)
    present = set(_package_files(root))
    if missing := sorted(set(entries) - present):
        raise InputError(f"{root}: damaged package: missing {', '.join(missing)}; generate it again")
    if added := sorted(present - set(entries) - {MANIFEST}):
        raise InputError(
            f"{root}: not as generated: {', '.join(added)} was added; remove it or generate again"
        )
    files = {path: _read_bytes(root / path) for path in sorted(entries)}
    edited = [path for path, content in files.items() if hashlib.sha256(content).hexdigest() != entries[path]]
    if edited:
        raise InputError(
            f"{root}: not as generated: {', '.join(edited)} was edited or cut short; generate it again"
        )
    try:
        texts = {path: content.decode() for path, content in files.items()}
    except UnicodeDecodeError as error:
        raise InputError(f"{root}: not as generated: a file is not UTF-8 text; generate it again") from error
    spec = _parse_spec(root, texts)
    if spec["digest"] != content_digest(texts):
        raise InputError(f"{root}: SPEC's digest does not fit the files; generate it again")
    files[MANIFEST] = _read_bytes(root / MANIFEST)
    if json.loads(files[MANIFEST]).get("digest") != spec["digest"]:
        raise InputError(
            f"{root}: not as generated: {MANIFEST} was edited (its digest is not SPEC's); generate it again"
        )
    return Package(root.resolve(), spec, files)


def kernels_of(source: str) -> list[dict[str, Any]]:
    """Name, line, arguments and first docstring line of each `@triton.jit` function, from the text."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            arguments = [argument.arg for argument in node.args.args]
            found.append({"name": node.name, "line": node.lineno, "summary": summary, "arguments": arguments})
    return found


def manifest_text(files: Mapping[str, str]) -> str:
    """manifest.json: what wrote the package, its digest, and the sha256 of each file."""
    manifest = {
        "generator": "infcl_gen",
        "schema_version": SCHEMA_VERSION,
        "digest": content_digest(files),
        "files": {path: hashlib.sha256(text.encode()).hexdigest() for path, text in sorted(files.items())},
    }
    return json.dumps(manifest, indent=2) + "\n"


@contextlib.contextmanager
def lock(path: Path, doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Hold an inter-process lock; LockTimeoutError after `timeout_s` (LOCK_TIMEOUT_S) says what was being done."""
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


def _checked_output(output: str | Path, force: bool) -> Path:
    """The absolute output path, if a package may be written there."""
    if not isinstance(output, str | os.PathLike):
        raise InputError(f"--output {output!r}: not a path")
    text = str(output)
    if not text.strip() or "\0" in text or any(not character.isprintable() for character in text):
        raise InputError(f"--output {text!a}: not a usable folder name")
    target = Path(os.path.abspath(text))
    try:
        defect = _defect_of_place(target)
        occupied = not defect and target.exists() and any(target.iterdir())
    except OSError as error:
        defect, occupied = f"{error.strerror}", False
    if defect:
        raise InputError(f"--output {output}: {defect}")
    if occupied:
        _check_replaceable(target, force)
    return target


def _defect_of_place(target: Path) -> str | None:
    if target == target.parent:
        return "not a folder of its own"
    if target.is_symlink():
        return "is a symbolic link; give the folder itself"
    ancestor = next(folder for folder in target.parents if os.path.lexists(folder))
    if not ancestor.is_dir():
        return f"{ancestor} is not a folder"
    if not os.access(ancestor, os.W_OK | os.X_OK):
        return f"{ancestor} is not writable"
    if target.exists() and not target.is_dir():
        return "is a file; give a folder"
    return None


def _check_replaceable(target: Path, force: bool) -> None:
    try:
        entries = _manifest_entries(target)
    except InputError as error:
        raise InputError(
            f"--output {target}: exists and is not a generated package; give another folder"
        ) from error
    if not force:
        raise InputError(f"--output {target}: exists; give another folder, or --force to replace the package")
    if foreign := sorted(set(_package_files(target)) - set(entries) - {MANIFEST}):
        raise InputError(
            f"--output {target}: holds files that are not the package's ({foreign[0]}); move them away"
        )


def _manifest_entries(root: Path) -> dict[str, str]:
    """sha256 by path as manifest.json has it; InputError unless it is a manifest of ours."""
    file = root / MANIFEST
    if not file.is_file():
        raise InputError(f"{root}: not a generated package (no {MANIFEST})")
    try:
        manifest = json.loads(_read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: damaged (not JSON); generate the package again") from error
    entries = manifest.get("files") if isinstance(manifest, dict) else None
    if (
        not isinstance(entries, dict)
        or manifest.get("generator") != "infcl_gen"
        or not all(isinstance(value, str) and _is_inner_path(path) for path, value in entries.items())
        or "spec.py" not in entries
    ):
        raise InputError(f"{file}: not the manifest of a generated package")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{file}: schema version {manifest.get('schema_version')!r}, this infcl_gen reads {SCHEMA_VERSION}; "
            "generate the package again"
        )
    return entries


def _is_inner_path(path: str) -> bool:
    return not os.path.isabs(path) and "\0" not in path and ".." not in Path(path).parts


def _package_files(root: Path) -> list[str]:
    """Paths of all files below `root` except bytecode caches; a link counts as a file."""
    found = []
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in links]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in names + links]
    return [path.replace(os.sep, "/") for path in found]


def _read_bytes(file: Path) -> bytes:
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE_BYTES:
            raise InputError(f"{file}: not a file that infcl_gen wrote")
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error


def _parse_spec(root: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    try:
        assignments = [
            node.value
            for node in ast.parse(texts["spec.py"]).body
            if isinstance(node, ast.AnnAssign | ast.Assign) and ast.unparse(_target(node)) == "SPEC"
        ]
        spec = ast.literal_eval(assignments[0]) if len(assignments) == 1 and assignments[0] else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InputError(f"{root}/spec.py: SPEC is not a literal; generate the package again") from error
    if not isinstance(spec, dict) or not {"schema_version", "digest", "problem", "plan"} <= set(spec):
        raise InputError(f"{root}/spec.py: no complete SPEC; generate the package again")
    return spec


def _target(node: ast.AnnAssign | ast.Assign) -> ast.expr:
    return node.target if isinstance(node, ast.AnnAssign) else node.targets[0]


def _lock_file(target: Path) -> Path:
    # Kept apart from the output, so that nothing but the package appears there.
    key = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"infcl_gen-{os.getuid()}" / f"{key}.lock"


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)  # mkdtemp's folders are private
    for path, content in contents.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    for inner in sorted({folder, *((folder / path).parent for path in contents)}):
        _sync_folder(inner)


def _rename_into_place(fresh: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(fresh, target)  # POSIX: an empty folder is replaced
    else:
        retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        os.rename(target, retired)
        try:
            os.rename(fresh, target)
        except BaseException:
            os.rename(retired, target)
            raise
        shutil.rmtree(retired, ignore_errors=True)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
