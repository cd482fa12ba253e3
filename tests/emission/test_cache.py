"""The cache of packages beside other processes that prune it, and where it can only be read."""

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.emission import cache
from infcl_gen.garbage import uncollected

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


def test_no_garbage_is_collected_while_a_package_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while one is read. Where that fails it is collected later. Planted: collections that are left off."""
    collects, before, read = list[int](), gc.get_threshold(), cache.read_package
    monkeypatch.setattr(cache, "read_package", lambda *given: (collects.append(gc.get_threshold()[0]), read(*given))[1])
    assert cache._intact(folder) and collects == [0]
    shutil.rmtree(folder)
    monkeypatch.setattr(cache, "write_package", lambda *_: collects.append(gc.get_threshold()[0]))
    with pytest.raises(FileNotFoundError):
        infcl_gen.load(**FLAGS)
    assert set(collects) == {0} and gc.get_threshold() == before


def test_garbage_is_collected_while_another_process_makes_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take two minutes. Planted: collections that are off around the lock, too."""
    shutil.rmtree(folder)
    collects, lock = list[bool](), cache.lock

    def waiting(*arguments: Any) -> contextlib.AbstractContextManager[None]:
        collects.append(gc.isenabled() and gc.get_threshold()[0] > 0)
        return lock(*arguments)

    monkeypatch.setattr(cache, "lock", waiting)
    infcl_gen.load(**FLAGS)
    assert collects == [True]


def test_the_last_of_several_threads_restores_collections() -> None:
    """And only its own setting. Planted: one that is done sooner does so; a caller's `gc.disable` is undone."""
    before, first, second = gc.get_threshold(), uncollected(), uncollected()
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert gc.get_threshold()[0] == 0
        gc.disable()
        second.__exit__(None, None, None)
        assert gc.get_threshold() == before and not gc.isenabled()
        with uncollected():
            gc.set_threshold(5)
        assert gc.get_threshold()[0] == 5
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_what_was_imported_without_collections_is_old_afterwards() -> None:
    """Unless a caller has frozen objects, which stay so. Planted: no promotion; a caller's objects that thaw."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        with uncollected(import_only=True):
            made: list[list[int]] = [[] for _ in range(1000)]
        assert any(each is made for each in gc.get_objects(generation=2))
        gc.freeze()
        with uncollected(import_only=True):
            pass
        assert not any(each is made for each in gc.get_objects())  # which leaves out what is frozen
    finally:
        if not frozen:
            gc.unfreeze()
