"""Writing and reading packages as folders: complete or absent, checked on reading, nothing foreign touched."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from infcl_gen import files
from infcl_gen.emission import package
from infcl_gen.emission.package import content_digest, read_package, write_package
from infcl_gen.emission.render import literal
from infcl_gen.errors import InputError, LockTimeoutError


def small_package(**extra: str) -> dict[str, str]:
    files = {
        "__init__.py": "from .spec import SPEC\n",
        "_runtime/__init__.py": "",
        "spec.py": 'SPEC = {\n    "schema_version": 1,\n    "digest": "",\n    "problem": {},\n    "plan": {},\n}\n',
        **extra,
    }
    files["spec.py"] = files["spec.py"].replace('"digest": ""', f'"digest": "{content_digest(files)}"')
    return files


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_package_reads_back(tmp_path: Path) -> None:
    files = small_package()
    written = write_package(files, tmp_path / "new" / "clip")
    assert written == tmp_path / "new" / "clip"
    assert entries(written.parent) == ["clip"]
    read = read_package(written)
    assert {path: content.decode() for path, content in read.files.items() if path != "manifest.json"} == files
    assert read.digest == content_digest(files) == json.loads((written / "manifest.json").read_text())["digest"]
    assert (written / "spec.py").stat().st_mode & 0o444 == 0o444 & ~_umask()


def test_bytecode_caches_are_not_part_of_a_package(tmp_path: Path) -> None:
    written = write_package(small_package(), tmp_path / "clip")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import clip"], cwd=tmp_path, check=True, timeout=60, env=environment)
    assert (written / "__pycache__").exists()
    read_package(written)
    write_package(small_package(), written, force=True)


def test_existing_package_needs_force(tmp_path: Path) -> None:
    write_package(small_package(), tmp_path / "clip")
    changed = small_package(**{"loss.py": "x = 1\n"})
    with pytest.raises(InputError, match="--force"):
        write_package(changed, tmp_path / "clip")
    assert not (tmp_path / "clip" / "loss.py").exists()
    write_package(changed, tmp_path / "clip", force=True)
    assert read_package(tmp_path / "clip").files["loss.py"] == b"x = 1\n"
    assert entries(tmp_path) == ["clip"]


@pytest.mark.parametrize("kind", ["text", "home", "package_with_notes", "broken_manifest", "other_manifest"])
def test_force_never_replaces_what_is_not_a_package(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "package_with_notes":
        write_package(small_package(), target)
        (target / "notes.txt").write_text("mine")
    else:
        target.mkdir()
        name = {"text": "thesis.txt", "home": ".bashrc"}.get(kind, "manifest.json")
        (target / name).write_text('{"generator": "another"}' if kind == "other_manifest" else "{")
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="--output"):
        write_package(small_package(), target, force=True)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert entries(tmp_path) == ["target"]


@pytest.mark.parametrize(
    "place",
    ["__pycache__/notes.py", "_runtime/__pycache__/data.bin", "__pycache__/mine/x.pyc", "empty/", "_runtime/a/b/"],
)
def test_what_is_not_pythons_bytecode_is_the_users(tmp_path: Path, place: str) -> None:
    """Also where only caches are, and a folder without files: it is named, and stays."""
    root = write_package(small_package(), tmp_path / "clip")
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).mkdir() if place.endswith("/") else (root / place).write_text("mine")
    with pytest.raises(InputError, match=f"{place} was added"):
        read_package(root)
    with pytest.raises(InputError, match="not the package's"):
        write_package(small_package(), root, force=True)
    assert (root / place).exists()


def test_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    read_package(write_package(small_package(), tmp_path / "clip"))


@pytest.mark.parametrize("force", [False, True])
def test_output_must_be_a_plain_writable_place(tmp_path: Path, force: bool) -> None:
    real = write_package(small_package(), tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("text")
    for output in ("link", "dangling", "file", "file/inside"):
        with pytest.raises(InputError, match="--output"):
            write_package(small_package(), tmp_path / output, force)
    for output in ("", "  ", "a\0b", "a\nb", "a\x1b[31m", "/", "/proc/clip", "a" * 300):
        with pytest.raises(InputError, match="--output"):
            write_package(small_package(), output, force)
    assert entries(tmp_path) == ["dangling", "file", "link", "real"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_output(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(InputError, match="not writable"):
        write_package(small_package(), tmp_path / "clip")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("step", range(1, 12))
def test_killed_at_any_step_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, existing: bool
) -> None:
    """The write dies at its `step`-th file-system operation; the output is as before, or complete."""
    old, new = small_package(), small_package(**{"loss.py": "x = 1\n"})
    target = tmp_path / "clip"
    if existing:
        write_package(old, target)
    done = 0

    class Killed(BaseException):
        pass

    def dying(operation):  # type: ignore[no-untyped-def]
        def call(*arguments, **keywords):  # type: ignore[no-untyped-def]
            nonlocal done
            done += 1
            if done == step:
                raise Killed
            return operation(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename"):
            patch.setattr(files.os, name, dying(getattr(os, name)))
        with contextlib.suppress(Killed):
            write_package(new, target, force=True)
    if target.exists():
        written = {path: text.decode() for path, text in read_package(target).files.items()}
        written.pop("manifest.json")
        assert written in (([old] if existing else []) + [new])
    else:
        assert not existing


@pytest.mark.parametrize("rename", [1, 2])
def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path, rename: int) -> None:
    """Killed before its first rename (of the old package), or between the two; another's folder stays."""
    target = write_package(small_package(), tmp_path / "clip")
    child = os.fork()
    if not child:
        left, renamed = [rename], os.rename

        def dying(*paths: Path) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            renamed(*paths)

        os.rename = dying  # type: ignore[assignment]
        write_package(small_package(), target, force=True)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(entries(tmp_path)) == 2
    other = tmp_path / ".clip.infcl-gen-other"
    other.mkdir()
    held = os.open(other, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as a writer on another machine holds its own
    write_package(small_package(), target, force=True)
    assert entries(tmp_path) == [other.name, "clip"]
    os.close(held)
    write_package(small_package(), target, force=True)
    assert entries(tmp_path) == ["clip"]


def test_a_folder_that_fills_while_the_lock_is_waited_for_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def occupying(*_: object) -> Iterator[None]:
        (tmp_path / "clip").mkdir()
        (tmp_path / "clip" / "thesis.txt").write_text("mine")
        yield

    monkeypatch.setattr(package, "lock", occupying)
    with pytest.raises(InputError, match="is not a generated package"):
        write_package(small_package(), tmp_path / "clip")
    assert entries(tmp_path / "clip") == ["thesis.txt"]


def test_every_file_is_on_the_disk_before_the_package_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync, rename = os.fsync, os.rename

    def noting(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def checking(fresh: Path, target: Path) -> None:
        inner = {str(path) for path in fresh.rglob("*")}
        assert len(inner) == 5 and inner | {str(fresh)} <= synced
        rename(fresh, target)

    monkeypatch.setattr(files.os, "fsync", noting)
    monkeypatch.setattr(files.os, "rename", checking)
    write_package(small_package(), tmp_path / "clip")
    assert str(tmp_path) in synced


def test_the_digest_is_of_paths_and_of_text() -> None:
    one = {"spec.py": "", "a.py": "x = 1\n", "b.py": "x = 2\n"}
    for other in ({**one, "a.py": one["b.py"], "b.py": one["a.py"]}, {**one, "b.py": "x = 3\n"}, {"spec.py": ""}):
        assert content_digest(other) != content_digest(one)


def test_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_package(small_package(), tmp_path / "clip")
    assert entries(tmp_path) == []


def test_two_writers_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.2)
    lock_file = files.lock_file_of(tmp_path / "clip")
    lock_file.parent.mkdir(exist_ok=True)
    with filelock.FileLock(lock_file), pytest.raises(LockTimeoutError, match="another process") as raised:
        write_package(small_package(), tmp_path / "clip")
    assert raised.value.exit_code == 6
    write_package(small_package(), tmp_path / "clip")


def _forge_digest(root: Path) -> None:
    """A digest that is not the files', in SPEC and, with spec.py's own checksum, in the manifest."""
    text = (root / "spec.py").read_text().replace(read_package(root).digest, "0" * 64)
    (root / "spec.py").write_text(text)
    files = json.loads((root / "manifest.json").read_text())["files"]
    _edit_manifest(root, digest="0" * 64, files=files | {"spec.py": hashlib.sha256(text.encode()).hexdigest()})


SPOILED = {
    "truncated": lambda root: (root / "spec.py").write_bytes((root / "spec.py").read_bytes()[:40]),
    "emptied": lambda root: (root / "__init__.py").write_bytes(b""),
    "edited": lambda root: (root / "__init__.py").write_text("import os\n"),
    "removed": lambda root: (root / "_runtime/__init__.py").unlink(),
    "added": lambda root: (root / "extra.py").write_text(""),
    "linked": lambda root: [(root / "__init__.py").unlink(), (root / "__init__.py").symlink_to(root / "spec.py")],
    "a pipe": lambda root: [(root / "__init__.py").unlink(), os.mkfifo(root / "__init__.py")],
    "no manifest": lambda root: (root / "manifest.json").unlink(),
    "manifest cut": lambda root: (root / "manifest.json").write_bytes((root / "manifest.json").read_bytes()[:-20]),
    "manifest is a list": lambda root: (root / "manifest.json").write_text("[]"),
    "manifest nested": lambda root: (root / "manifest.json").write_text("[" * 100_000),
    "manifest binary": lambda root: (root / "manifest.json").write_bytes(b"\xff\xfe\0"),
    "other schema": lambda root: _edit_manifest(root, schema_version=99),
    "outside": lambda root: _edit_manifest(root, files={"spec.py": "0", "../../etc/passwd": "0"}),
    "absolute": lambda root: _edit_manifest(root, files={"spec.py": "0", "/etc/passwd": "0"}),
    "both digests forged": lambda root: _forge_digest(root),
    "digests of the wrong type": lambda root: _edit_manifest(root, files={"spec.py": 7}),
}


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_package_is_refused(tmp_path: Path, how: str) -> None:
    root = write_package(small_package(), tmp_path / "clip")
    SPOILED[how](root)
    with pytest.raises(InputError) as raised:
        read_package(root)
    assert "\n" not in str(raised.value)


HOSTILE_SPECS = [
    "",
    "SPEC = __import__('os').system('false')\n",
    "SPEC = 1\n",
    "SPEC = {}\n",
    "SPEC = {'schema_version': 1, 'digest': 'x', 'problem': {}, 'plan': {}}\nSPEC = {}\n",
    "SPEC: dict\n",
    "SPEC = " + "[" * 5000 + "]" * 5000 + "\n",
    "SPEC = {" * 3 + "\n",
    "\0",
    "a, SPEC = 1, {}\n",
    "SPEC = {'schema_version': 1, 'digest': 'x', 'problem': {}, 'plan': {}}\n",  # the digest is not the content's
]


@pytest.mark.parametrize("text", HOSTILE_SPECS, ids=range(len(HOSTILE_SPECS)))
def test_hostile_spec_is_parsed_never_run(tmp_path: Path, text: str) -> None:
    """The manifest fits the files, as one who edits both would make it."""
    root = write_package({**small_package(), "spec.py": text}, tmp_path / "clip")
    with pytest.raises(InputError) as raised:
        read_package(root)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1.5, None, True], "c": (), "d": (1,), "e": {}},
        {"long": ["x" * 30] * 20, "nested": {"more": [{"k": "v" * 100}]}},
        {'quote"': 'a"b', "escape": "a\\b", "newline": "a\nb", "braces": "{{ x }}{% endif %}", "unicode": "ü\u202e"},
        {"float": 1e-30, "negative": -0.0, "big": 2**70},
        "'''\"\"\"",
    ],
)  # fmt: skip
def test_literal_reads_back_and_is_ascii(value: object) -> None:
    import ast

    text = literal(value)
    assert ast.literal_eval(text) == value
    assert text.isascii()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"x", Path("x")])
def test_literal_refuses_what_is_none(value: object) -> None:
    with pytest.raises(TypeError):
        literal({"key": value})


def _edit_manifest(root: Path, **changes: object) -> None:
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
