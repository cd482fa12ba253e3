"""A short tuning run as a process of its own: python -m tests.tuning.program PACKAGE RECORDS"""

import sys
from pathlib import Path

from infcl_gen.planning.records import Settings
from infcl_gen.tuning.family import Case, Limits
from infcl_gen.tuning.search import Outcome, tune

LIMITS = Limits(minutes=1, rounds=2, repeats=1)
OTHER: Settings = (("panel_keys", "64"), ("panel_rows", "64"))


def one_other(case: Case, family: str, best: Settings) -> list[Settings]:
    return [OTHER]


def short_run(package: Path, records: Path) -> Outcome:
    """The default against one other candidate."""
    return tune(package, records, LIMITS, propose=one_other)


if __name__ == "__main__":
    short_run(Path(sys.argv[1]), Path(sys.argv[2]))
