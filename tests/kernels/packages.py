"""The packages under test: generated on first use into one folder for all processes, imported, made small, or spoilt.

A `Made` says what to generate; the same one always gives the same module. `small` gives it tiles and panels so little
that a hundred rows make several of each, with ragged last ones: for the interpreter. `bug` plants one of
`planted.BUGS`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.files import lock
from infcl_gen.kernels.choice import padded_dim
from infcl_gen.losses import BUILTIN_LOSSES
from tests.kernels import losses

FUSED_DIMS = (1, 3, 16, 64, 96, 100)


@dataclasses.dataclass(frozen=True)
class Made:
    strategy: str = "panel"  # torch, panel, fused, stash, or auto: the planner's choice
    loss: str = "clip"
    dtype: str = "bf16"
    dim: int = 16
    rows: int = 512  # the batch that it is planned for
    small: bool = True
    settings: tuple[tuple[str, str], ...] = ()
    precision: str = "default"
    profile: str = "h200"
    devices: int = 1
    frozen: str = "none"
    bug: str = ""

    @property
    def name(self) -> str:
        return f"made_{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"


_folder: list[Path] = []


def use_folder(folder: Path) -> None:
    """Where this process finds and generates its packages; others may use it, too."""
    _folder[:] = [folder]


def folder() -> Path:
    return _folder[0]


@functools.cache
def generated(made: Made) -> Path:
    """The folder of a package, generated (and spoilt) on first use."""
    target = folder() / made.name
    with lock(folder() / f"{made.name}.lock", f"making {made}"):
        if not target.exists():
            _make(made, target)
    return target


def _make(made: Made, target: Path) -> None:
    if made.bug:
        from tests.kernels.planted import BUGS, plant

        spoilt = target.with_suffix(".spoilt")
        original = generated(dataclasses.replace(made, bug=""))
        shutil.copytree(original, spoilt, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        plant(made.bug, BUGS[made.bug].edits, spoilt)
        spoilt.rename(target)
        return
    cpu = made.strategy == "torch"
    infcl_gen.generate(
        output=target,
        loss=made.loss if made.loss in BUILTIN_LOSSES else getattr(losses, made.loss),
        batch_size=made.rows,
        dim=made.dim,
        dtype=made.dtype,
        precision=made.precision,
        devices=made.devices,
        frozen=made.frozen,
        target="cpu" if cpu else None,
        device_profile="cpu" if cpu else made.profile,
        settings=_settings(made),
    )


@functools.cache
def module(made: Made) -> ModuleType:
    """The package, imported."""
    loaded = import_package(generated(made), made.name)
    if made.small:
        schedule: Any = loaded._schedule
        # Of panels that are not square some have positives of a part of their rows.
        schedule.PANEL_ROWS, schedule.PANEL_KEYS = (96 if made.strategy == "panel" else 64), 64
        if made.strategy == "stash":  # its forward panels are those of the backward; one is kept, the others are not
            schedule.FORWARD_ROWS, schedule.FORWARD_KEYS, schedule.STASH_ROWS = 64, 64, 64
        elif made.strategy == "torch":
            schedule.FORWARD_ROWS, schedule.FORWARD_KEYS, schedule.FINISH_ROWS = 64, 64, 64
        else:
            schedule.FORWARD_ROWS, schedule.FORWARD_KEYS = 96, 128
        if loaded._package.traits.triangle:  # its panels are square
            schedule.PANEL_ROWS = schedule.PANEL_KEYS = schedule.FORWARD_ROWS = schedule.FORWARD_KEYS = 64
    return loaded


def _settings(made: Made) -> tuple[tuple[str, str], ...]:
    chosen = {} if made.strategy in ("auto", "torch") else {"strategy": made.strategy}
    if made.small and made.strategy != "torch":
        wide = str(min(64, padded_dim(made.dim)))
        deep = "16" if "_prefixes" in made.loss else wide  # which divides the prefixes
        chosen |= {"forward.depth": deep}
        # Sums over pairs have no such kernel, nor has a guide.
        if not made.loss.startswith(("siglip", "squares", "pairs", "spectral")) and made.loss != "distill":
            chosen |= {"positive.rows": "32", "positive.keys": "32", "positive.depth": wide}
        if made.strategy in ("stash", "rows"):
            chosen |= {"gradient.rows": "32", "gradient.keys": "64"}
        if made.strategy != "stash":  # whose tiles are those of the gradient
            chosen |= {"forward.rows": "32", "forward.keys": "64"}
        if made.strategy == "panel":
            chosen |= {"gradient.rows": "64", "gradient.keys": "32"}
        if made.strategy == "fused":
            chosen |= {"fused.rows": "32", "fused.keys": "64"}
        else:
            chosen |= {"gradient.depth": deep, "product.rows": "64", "product.depth": "32"}
            chosen |= {"product.keys": str(min(64, padded_dim(made.dim)))}
    return tuple((chosen | dict(made.settings)).items())
