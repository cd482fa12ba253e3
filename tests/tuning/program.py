"""A short tuning run as a process of its own: python -m tests.tuning.program PACKAGE RECORDS"""

import sys
import unittest.mock
from pathlib import Path

from infcl_gen.planning.records import Settings
from infcl_gen.tuning import search
from infcl_gen.tuning.family import Limits
from infcl_gen.tuning.search import Outcome

LIMITS = Limits(minutes=1, rounds=2, repeats=1)
OTHER: Settings = (("panel_keys", "64"), ("panel_rows", "64"))


def short_run(package: Path, records: Path) -> Outcome:
    """The default against one other candidate."""
    with unittest.mock.patch.object(search, "proposals", lambda *_: [OTHER]):
        return search.tune(package, records, LIMITS)


if __name__ == "__main__":
    short_run(Path(sys.argv[1]), Path(sys.argv[2]))
