"""Flags from a TOML file."""

from __future__ import annotations

import os
from typing import Any

from infcl_gen.errors import InputError
from infcl_gen.inputs.text import read_toml, show, suggestion

CONFIG_FLAGS: dict[str, Any] = {
    "loss": str,
    "batch_size": int | str,
    "keys": int | str,
    "dim": int | str,
    "devices": int | str,
    "nodes": int | str,
    "memory_budget": int | str,
    "dtype": str,
    "precision": str,
    "target": str,
    "device_profile": str,
    "set": dict[str, int | str] | list[str],
    "cluster": str,
    "output": str,
    "force": bool,
    "ranks": int | str,
    "aot": str | list[str],
    "minutes": int | float | str,
    "records": str,
    "against": str | list[str],
    "batches": int | str | list[int | str],
    "dims": int | str | list[int | str],
    "package": list[str],
    "campaign": str,
    "scale": int | float | str,
    "repeats": int | str,
    "errors": int | str,
    "plot": str,
    "json": bool,
    "quiet": bool,
    "verbose": bool,
}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The flags given in a TOML file, by their names with underscores (dashes are accepted as well).

    One file may serve every command: a flag that the running command does not have is checked, and unused.
    Raises InputError naming the key that is unknown, given twice, or has a wrong type.
    """
    import msgspec

    table, where = read_toml("--config", path), show(os.fspath(path))
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in CONFIG_FLAGS:
            raise InputError(f"--config: unknown key {show(key)} in {where}{suggestion(name, CONFIG_FLAGS)}")
        if name in values:
            raise InputError(f"--config: {show(key)} is given twice in {where}")
        try:
            values[name] = msgspec.convert(value, CONFIG_FLAGS[name], strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"--config: key {show(key)} in {where}: {error}") from None
    return values
