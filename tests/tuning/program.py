"""A short tuning run, also as a process of its own: `tuned` is a task of `infcl_gen.processes`."""

import unittest.mock
from pathlib import Path

from infcl_gen import processes
from infcl_gen.planning.records import Settings
from infcl_gen.processes import Answer, Requests
from infcl_gen.tuning import search
from infcl_gen.tuning.family import Limits
from infcl_gen.tuning.search import Outcome
from tests import forks

LIMITS = Limits(minutes=1, rounds=2, repeats=1)
OTHER: Settings = (("panel_keys", "64"), ("panel_rows", "64"))


def short_run(package: Path, records: Path) -> Outcome:
    """The default against one other candidate."""
    with unittest.mock.patch.object(search, "proposals", lambda *_: [OTHER]):
        return search.tune(package, records, LIMITS)


def tuned(requests: Requests, answer: Answer, package: str, records: str, start: str) -> None:
    """Its candidates are forked from it, as it may be itself, or started."""
    if start == "forked":
        processes._start = forks.fork
    short_run(Path(package), Path(records))
    answer(done=True)
