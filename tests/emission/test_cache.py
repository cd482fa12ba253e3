"""The cache of packages beside other processes that prune it, and where it can only be read."""

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.emission import cache

FLAGS: dict[str, Any] = {"batch_size": 8, "dim": 16, "dtype": "fp32", "target": "cpu"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package that this process has not imported."""
    monkeypatch.setenv("INFCL_GEN_CACHE", str(tmp_path))
    forget_packages()  # another test may have loaded it from another folder
    made = Path(infcl_gen.load(**FLAGS).__path__[0])
    forget_packages()
    yield made
    forget_packages()


def forget_packages() -> None:
    for module in [each for each in sys.modules if each.startswith("infcl_gen.packages.")]:
        del sys.modules[module]


def test_a_cache_that_can_only_be_read_serves_its_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.os, "utime", refuse)
    assert infcl_gen.load(**FLAGS).__path__[0] == str(folder)


@pytest.mark.parametrize("removed", ["all", "loss.py"])
def test_a_package_that_is_pruned_before_its_import_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """Planted: no second attempt; or one after FileNotFoundError alone, where a part is gone."""

    def prune(path: Path) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("INFCL_GEN_CACHE", str(folder.parents[1]))
        shutil.rmtree(path) if removed == "all" else (path / removed).unlink()

    monkeypatch.setattr(cache.os, "utime", prune)
    assert infcl_gen.load(**FLAGS).__path__[0] == str(folder)


def test_a_package_that_is_used_while_prune_waits_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: its last use is read before the lock is held, and not again."""
    os.utime(folder, (0, 0))
    lock = cache.lock

    @contextlib.contextmanager
    def late(*arguments: Any) -> Iterator[None]:
        os.utime(folder)
        with lock(*arguments):
            yield

    monkeypatch.setattr(cache, "lock", late)
    assert cache.prune(30) == [] and folder.is_dir()
    monkeypatch.setattr(cache, "lock", lock)
    os.utime(folder, (0, 0))
    assert [entry.folder for entry in cache.prune(30)] == [folder] and not folder.is_dir()


def test_the_runtime_of_a_new_package_is_not_compiled_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is an edited one run as it was. Planted: bytecode that Python does not compare with the text."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))  # none in the checkout
    shutil.rmtree(folder)
    infcl_gen.load(**FLAGS)
    compiled = list[str]()
    monkeypatch.setattr(
        SourceFileLoader, "source_to_code", lambda self, data, path, **_: compiled.append(Path(path).name)
    )
    for file in (folder / "_runtime").glob("*.py"):
        code = SourceFileLoader("again", str(file)).get_code("again")
        assert code is not None and code.co_consts[0] is not None
    assert compiled == []
    (folder / "_runtime" / "api.py").write_text("edited = True\n")
    SourceFileLoader("again", str(folder / "_runtime" / "api.py")).get_code("again")
    assert compiled == ["api.py"]


def test_no_garbage_is_collected_while_a_package_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that fails it is collected later. Planted: collections that are left off."""
    shutil.rmtree(folder)
    collects = list[bool]()
    monkeypatch.setattr(cache, "write_package", lambda *_: collects.append(gc.isenabled()))
    with pytest.raises(FileNotFoundError):
        infcl_gen.load(**FLAGS)
    assert collects and not any(collects) and gc.isenabled()
