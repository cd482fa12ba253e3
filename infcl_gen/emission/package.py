"""A package as a folder: written atomically, read without importing it, checked against its manifest."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infcl_gen.emission.render import content_digest, with_digest
from infcl_gen.errors import InputError
from infcl_gen.files import lock, lock_file_of, write_folder

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
# What a partial package holds: the files that differ from package to package, for a reader.
SPECIFIC_FILES = ("hopper.py", "kernels.py", "loss.py", "schedule.py", "spec.py")
_LARGEST_FILE_BYTES = 4 << 20


@dataclass(frozen=True)
class Package:
    """A generated package as read from its folder: SPEC's literals and the bytes of every file by its path.

    `missing`: paths of the files that a partial package leaves out; none in a whole one. `edited`: paths of files that
    are not as generated, where such a package was asked for.
    """

    path: Path
    spec: dict[str, Any]
    files: dict[str, bytes]
    missing: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SPEC's; of an edited package one of its own, by its files."""
        if self.edited:
            return hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()
        return str(self.spec["digest"])


class PartialPackageError(InputError):
    """The folder holds a partial package: it can be read, and neither imported nor run."""


def write_package(
    files: Mapping[str, str], output: str | Path, force: bool = False, missing: Sequence[str] = ()
) -> Path:
    """Write `files` and their manifest to the folder `output`, and return its absolute path.

    `missing` makes a partial package: the paths that `specific_part` left out of `files`.

    Everything is written to a folder beside it, synced, and renamed: `output` is complete or absent at every
    moment. With `force` an existing package is replaced; a folder that holds anything else never is.
    Raises InputError (the output is not a place to write to), LockTimeoutError (another process is writing there).
    """
    target = check_output(output, force)
    contents = {path: text.encode() for path, text in files.items()}
    contents[MANIFEST] = manifest_text(files, missing).encode()
    with lock(lock_file_of(target), f"writing {target}"):
        check_output(output, force)  # again: another process may have written it meanwhile
        try:
            write_folder(target, contents)
        except OSError as error:
            raise InputError(f"--output {target}: cannot be written ({error.strerror})") from error
    return target


def specific_part(files: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The files of a partial package, with a digest of their own, and the paths of those that it leaves out."""
    kept = {path: text for path, text in files.items() if path in SPECIFIC_FILES}
    return with_digest(kept), tuple(sorted(files.keys() - kept.keys()))


def read_package(folder: str | Path, partial: bool = False, edited: bool = False) -> Package:
    """Read and check a package without importing anything of it.

    Raises InputError if the folder is not a package, or if a file is missing, edited, truncated or added
    (bytecode caches aside); with `edited`, only where that is SPEC or a missing file. Unless `partial`,
    PartialPackageError for an intact partial package.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; give the folder of a generated package")
    entries, missing = _manifest_entries(root)
    present = set(_package_files(root))
    if lost := sorted(set(entries) - present):
        raise InputError(f"{root}: damaged package: missing {', '.join(lost)}; generate it again")
    added = sorted(present - set(entries) - {MANIFEST})
    if added and not edited:
        raise InputError(f"{root}: not as generated: {', '.join(added)} was added; remove it or generate again")
    files = {path: _read_bytes(root / path) for path in sorted(entries)}
    changed = [path for path, content in files.items() if hashlib.sha256(content).hexdigest() != entries[path]]
    if changed and (not edited or "spec.py" in changed):
        raise InputError(f"{root}: not as generated: {', '.join(changed)} was edited or cut short; generate it again")
    if (changed or added) and not missing:
        spec = _parse_spec(root, {"spec.py": files["spec.py"].decode()})
        files |= {path: _read_bytes(root / path) for path in added}
        return Package(root.resolve(), spec, files, missing, tuple(changed + added))
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
    if missing and not partial:
        raise PartialPackageError(
            f"{root}: a partial package, without {', '.join(missing[:2])} and more: inspect shows it, "
            "nothing can run it; generate the whole one from the flags in its SPEC"
        )
    return Package(root.resolve(), spec, files, missing)


def kernels_of(source: str) -> list[dict[str, Any]]:
    """Name, line, arguments and first docstring line of each `@triton.jit` function, from the text."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            arguments = [argument.arg for argument in node.args.args]
            found.append({"name": node.name, "line": node.lineno, "summary": summary, "arguments": arguments})
    return found


def manifest_text(files: Mapping[str, str], missing: Sequence[str] = ()) -> str:
    """manifest.json: what wrote the package, its digest, the sha256 of each file; what a partial package leaves out."""
    manifest: dict[str, Any] = {
        "generator": "infcl_gen",
        "schema_version": SCHEMA_VERSION,
        "digest": content_digest(files),
        "files": {path: hashlib.sha256(text.encode()).hexdigest() for path, text in sorted(files.items())},
    }
    if missing:
        manifest["missing"] = list(missing)
    return json.dumps(manifest, indent=2) + "\n"


def check_output(output: str | Path, force: bool = False) -> Path:
    """The absolute output path, if a package may be written there; otherwise raises InputError."""
    if not isinstance(output, str | os.PathLike):
        raise InputError(f"--output {output!r}: not a path")
    text = str(output)
    if not text.strip() or "\0" in text or any(not character.isprintable() for character in text):
        raise InputError(f"--output {text!a}: not a usable folder name")
    try:
        target = Path(os.path.abspath(text))
        defect = _defect_of_place(target)
        occupied = not defect and target.exists() and any(target.iterdir())
    except OSError as error:  # such as a current folder that was deleted
        raise InputError(f"--output {output}: {error.strerror}") from error
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
        entries, _ = _manifest_entries(target)
    except InputError as error:
        raise InputError(f"--output {target}: exists and is not a generated package; give another folder") from error
    if not force:
        raise InputError(f"--output {target}: exists; give another folder, or --force to replace the package")
    if foreign := sorted(set(_package_files(target)) - set(entries) - {MANIFEST}):
        raise InputError(f"--output {target}: holds files that are not the package's ({foreign[0]}); move them away")


def _manifest_entries(root: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """sha256 by path and what is left out, as manifest.json has them; InputError unless it is a manifest of ours."""
    file = root / MANIFEST
    if not file.is_file():
        raise InputError(f"{root}: not a generated package (no {MANIFEST})")
    try:
        manifest = json.loads(_read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: damaged (not JSON); generate the package again") from error
    entries = manifest.get("files") if isinstance(manifest, dict) else None
    missing = manifest.get("missing", []) if isinstance(manifest, dict) else None
    if (
        not isinstance(entries, dict)
        or not isinstance(missing, list)
        or not all(isinstance(path, str) and _is_inner_path(path) for path in missing)
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
    return entries, tuple(missing)


def _is_inner_path(path: str) -> bool:
    return not os.path.isabs(path) and "\0" not in path and ".." not in Path(path).parts


def _package_files(root: Path) -> list[str]:
    """Paths of all that is below `root` except Python's bytecode caches. A link, and a folder that holds nothing
    (written "name/"), count as files."""
    found = []
    for folder, folders, names in os.walk(root):
        caches = os.path.basename(folder) == "__pycache__"
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in links]
        kept = [name for name in names if not (caches and _is_bytecode(os.path.join(folder, name)))]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in kept + links]
        if not (folders or names or links or caches or os.path.samefile(folder, root)):
            found.append(os.path.relpath(folder, root) + "/")
    return [path.replace(os.sep, "/") for path in found]


def _is_bytecode(file: str) -> bool:
    """A file that Python writes to its caches; while it does, under a name that ends in digits."""
    return re.search(r"\.pyc(\.\d+)?$", file) is not None and not os.path.islink(file)


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
