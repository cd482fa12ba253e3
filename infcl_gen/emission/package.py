"""A package as a folder: written atomically, read without importing it, checked against its manifest."""

import ast
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infcl_gen.errors import InputError
from infcl_gen.files import lock, lock_file_of, write_folder

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_LARGEST_FILE_BYTES = 4 << 20
_DIGEST_LINE = re.compile(r'^    "digest": "[0-9a-f]*",\n', re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A generated package as read from its folder: SPEC's literals and the bytes of every file by its path.

    `missing`: paths that a partial package leaves out. `edited`: paths of files that are not as generated.
    """

    path: Path
    spec: dict[str, Any]
    files: dict[str, bytes]
    missing: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SPEC's digest; of an edited package the sha256 of its files."""
        if self.edited:
            return hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()
        return str(self.spec["digest"])


class Manifest(msgspec.Struct, omit_defaults=True):
    """manifest.json. `files`: path -> sha256; `missing`: what a partial package leaves out."""

    generator: str
    schema_version: Any
    digest: Any
    files: dict[str, str]
    missing: list[str] = []


class PartialPackageError(InputError):
    """A partial package can be read, and neither imported nor run."""


def write_package(
    files: Mapping[str, str], output: str | Path, force: bool = False, missing: Sequence[str] = ()
) -> Path:
    """Write `files` and their manifest to the folder `output`, and return its absolute path.

    At every moment `output` is complete or absent: a folder beside it is written, synced, and renamed. With `force` an
    existing package is replaced, never a folder that holds anything else. `missing`: paths that `specific_part` left
    out. Raises InputError if `output` is not a place to write to, LockTimeoutError if another process is writing there.
    """
    target = check_output(output, force)
    contents = {path: text.encode() for path, text in files.items()}
    contents[MANIFEST] = manifest_text(files, missing).encode()
    with lock(lock_file_of(target), f"writing {target}"):
        check_output(output, force)  # again: another process may have written there meanwhile
        try:
            write_folder(target, contents)
        except OSError as error:
            raise InputError(f"--output {target}: cannot be written ({error.strerror})") from error
    return target


def specific_part(files: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The files of a partial package, which differ from package to package, with their digest; and the other paths."""
    from infcl_gen.kernels import FAMILIES  # a package that is imported from the cache does not need them

    specific = {*(family.file for family in FAMILIES), "loss.py", "schedule.py", "spec.py"}
    kept = {path: text for path, text in files.items() if path in specific}
    return with_digest(kept), tuple(sorted(files.keys() - kept.keys()))


def read_package(folder: str | Path, partial: bool = False, edited: bool = False) -> Package:
    """Read and check a package without importing anything of it.

    Raises InputError if the folder is not a package, or if a file is missing, edited, truncated or added, bytecode
    caches aside. With `edited`, only a missing file and an edited spec.py are errors. Raises PartialPackageError for an
    intact partial package unless `partial`.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; give the folder of a generated package")
    manifest = _read_manifest(root)
    present, missing = set(_package_files(root)), tuple(manifest.missing)
    if lost := sorted(manifest.files.keys() - present):
        raise InputError(f"{root}: damaged package: missing {', '.join(lost)}; generate it again")
    added = sorted(present - manifest.files.keys() - {MANIFEST})
    if added and not edited:
        raise InputError(f"{root}: not as generated: {', '.join(added)} was added; remove it or generate again")
    files = {path: _read_bytes(root / path) for path in sorted(manifest.files)}
    changed = [path for path, content in files.items() if hashlib.sha256(content).hexdigest() != manifest.files[path]]
    if changed and (not edited or "spec.py" in changed):
        raise InputError(f"{root}: not as generated: {', '.join(changed)} was edited or cut short; generate it again")
    if (changed or added) and not missing:
        files |= {path: _read_bytes(root / path) for path in added}
        return Package(root.resolve(), _parse_spec(root, files["spec.py"]), files, edited=tuple(changed + added))
    try:
        texts = {path: content.decode() for path, content in files.items()}
    except UnicodeDecodeError as error:
        raise InputError(f"{root}: not as generated: a file is not UTF-8 text; generate it again") from error
    spec = _parse_spec(root, files["spec.py"])
    if spec["digest"] != content_digest(texts):
        raise InputError(f"{root}: SPEC's digest does not fit the files; generate it again")
    if manifest.digest != spec["digest"]:
        raise InputError(
            f"{root}: not as generated: {MANIFEST} was edited (its digest is not SPEC's); generate it again"
        )
    if missing and not partial:
        raise PartialPackageError(
            f"{root}: a partial package, without {', '.join(missing[:2])} and more: inspect shows it, "
            "nothing can run it; generate the whole one from the flags in its SPEC"
        )
    return Package(root.resolve(), spec, files | {MANIFEST: _read_bytes(root / MANIFEST)}, missing)


def kernels_of(source: str) -> list[dict[str, Any]]:
    """Name, line, arguments and first docstring line of each `@triton.jit` function, from the text."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            arguments = [argument.arg for argument in node.args.args]
            found.append({"name": node.name, "line": node.lineno, "summary": summary, "arguments": arguments})
    return found


def with_digest(files: Mapping[str, str]) -> dict[str, str]:
    """The same files, sorted by path, with their digest in spec.py."""
    line = f'    "digest": "{content_digest(files)}",\n'
    spec = _DIGEST_LINE.sub(line, files["spec.py"], count=1)
    return dict(sorted({**files, "spec.py": spec}.items()))


def content_digest(files: Mapping[str, str]) -> str:
    """sha256 over the sorted paths and texts, without the digest line of spec.py."""
    digest = hashlib.sha256()
    for path, text in sorted(files.items()):
        if path == "spec.py":
            text = _DIGEST_LINE.sub("", text, count=1)
        content = text.encode()
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def manifest_text(files: Mapping[str, str], missing: Sequence[str] = ()) -> str:
    """The text of manifest.json for these files."""
    sums = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in sorted(files.items())}
    manifest = Manifest("infcl_gen", SCHEMA_VERSION, content_digest(files), sums, list(missing))
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode() + "\n"


def check_output(output: str | Path, force: bool = False) -> Path:
    """The absolute output path. Raises InputError unless a package may be written there."""
    if not isinstance(output, str | os.PathLike):
        raise InputError(f"--output {output!r}: not a path")
    if not str(output).strip() or not str(output).isprintable():
        raise InputError(f"--output {str(output)!a}: not a usable folder name")
    try:
        target = Path(os.path.abspath(output))
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
        manifest = _read_manifest(target)
    except InputError as error:
        raise InputError(f"--output {target}: exists and is not a generated package; give another folder") from error
    if not force:
        raise InputError(f"--output {target}: exists; give another folder, or --force to replace the package")
    if foreign := sorted(set(_package_files(target)) - manifest.files.keys() - {MANIFEST}):
        raise InputError(f"--output {target}: holds files that are not the package's ({foreign[0]}); move them away")


def _read_manifest(root: Path) -> Manifest:
    file = root / MANIFEST
    if not file.is_file():
        raise InputError(f"{root}: not a generated package (no {MANIFEST})")
    try:
        manifest = msgspec.json.decode(_read_bytes(file), type=Manifest)
    except msgspec.ValidationError as error:
        raise InputError(f"{file}: not the manifest of a generated package") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: damaged (not JSON); generate the package again") from error
    paths = (*manifest.files, *manifest.missing)
    leaves = any(os.path.isabs(path) or "\0" in path or ".." in Path(path).parts for path in paths)
    if manifest.generator != "infcl_gen" or "spec.py" not in manifest.files or leaves:
        raise InputError(f"{file}: not the manifest of a generated package")
    if manifest.schema_version != SCHEMA_VERSION:
        raise InputError(
            f"{file}: schema version {manifest.schema_version!r}, this infcl_gen reads {SCHEMA_VERSION}; "
            "generate the package again"
        )
    return manifest


def _package_files(root: Path) -> list[str]:
    """Paths of all files, links and empty folders ("name/") below `root`, without Python's bytecode caches."""
    paths = sorted(root.rglob("*"))
    occupied = {path.parent for path in paths}
    found = []
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            # Python writes a cache under a name that ends in digits, and renames it.
            cached = path.parent.name == "__pycache__" and re.search(r"\.pyc(\.\d+)?$", path.name)
            if path.is_symlink() or not cached:
                found.append(path.relative_to(root).as_posix())
        elif path not in occupied and path.name != "__pycache__":
            found.append(f"{path.relative_to(root).as_posix()}/")
    return found


def _read_bytes(file: Path) -> bytes:
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE_BYTES:
            raise InputError(f"{file}: not a file that infcl_gen wrote")
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error


def _parse_spec(root: Path, source: bytes) -> dict[str, Any]:
    values = []
    try:
        for node in ast.parse(source).body:
            match node:
                case ast.AnnAssign(ast.Name("SPEC"), value=value) | ast.Assign([ast.Name("SPEC")], value=value):
                    values.append(value)
        spec = ast.literal_eval(values[0]) if len(values) == 1 and values[0] else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InputError(f"{root}/spec.py: SPEC is not a literal; generate the package again") from error
    if not isinstance(spec, dict) or not {"schema_version", "digest", "problem", "plan"} <= set(spec):
        raise InputError(f"{root}/spec.py: no complete SPEC; generate the package again")
    return spec
