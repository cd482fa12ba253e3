"""The command cache: packages that `load` and `ContrastiveLoss` have generated."""

import time
from typing import Any

import click

from infcl_gen.cli import options
from infcl_gen.cli.group import show
from infcl_gen.cli.options import NUMBER, command, option
from infcl_gen.errors import InputError
from infcl_gen.files import cache_folder
from infcl_gen.inputs.text import bytes_text, check_word, table_text

LONGEST_DAYS = 36500
_NAMED = ("loss", "batch_size", "dim", "dtype", "devices", "device_profile")
_HEADER = ("package", "loss", "batch", "D", "dtype", "devices", "for", "size", "not used for")


@command(
    click.argument("action", metavar="list|prune|path"),
    option("--days", "N", "prune: remove what was not used for N days [30].", NUMBER),
    option("--all", None, "prune: remove everything.", bool),
)
def cache(flags: dict[str, Any]) -> None:
    """List the cached packages, remove old ones, or print the folder; $INFCL_GEN_CACHE moves it."""
    action = flags["action"]
    check_word("ACTION", action, ("list", "prune", "path"))
    if action != "prune" and (flags["all"] or flags["days"] is not None):
        raise InputError(f"--days, --all: are of infcl-gen cache prune, not of cache {action}")
    if action == "path":
        return show(flags, {"path": str(cache_folder())}, lambda: str(cache_folder()))
    days = options.number(flags, "days", 30.0, LONGEST_DAYS, "number of days")
    from infcl_gen.emission import cache as cached

    found = cached.entries() if action == "list" else cached.prune(0 if flags["all"] else days)
    rows: list[dict[str, Any]] = [
        {"package": entry.folder.name, **{name: entry.problem.get(name) for name in _NAMED}}
        | {"bytes": entry.bytes, "unused_days": (time.time() - entry.used) / 86400}
        for entry in found
    ]
    result = {"path": str(cache_folder()), "packages": rows}
    said = f"{cache_folder()}: {'removed' if action == 'prune' else 'holds'} {len(rows)}"
    show(flags, result, lambda: f"{table_text(_HEADER, [_cells(row) for row in rows])}\n{said}" if rows else said)


def _cells(row: dict[str, Any]) -> list[str]:
    named = [str(row[name] or "damaged") for name in _NAMED]
    return [row["package"], *named, bytes_text(row["bytes"]), f"{row['unused_days']:.1f} days"]
