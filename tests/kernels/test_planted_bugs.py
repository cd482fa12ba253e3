"""Each bug that a peer has had is noticed: its check passes on the package as generated, and fails on the bug."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from tests.kernels.packages import generated
from tests.kernels.planted import BUGS, ON_A_GPU, can_be_planted
from tests.kernels.worker import Interpreter
from tests.tiers import nightly

# CI plants all of them, and runs the check of the first that each check notices.
HERE = [name for name in BUGS if name not in ON_A_GPU]
FIRST = {BUGS[name].check: name for name in reversed(HERE)}.values()
NOTICED = nightly(HERE, FIRST)


@pytest.mark.parametrize("name", NOTICED)
def test_a_planted_bug_is_noticed(interpreted: Interpreter, shared_folder: Path, name: str) -> None:
    bug = BUGS[name]
    planted = dataclasses.replace(bug.made, bug=name)
    interpreted(generated, planted)  # or the check would fail for want of the text to edit
    passes = shared_folder / hashlib.sha256(repr((bug.check.__name__, bug.made, bug.arguments)).encode()).hexdigest()
    if not passes.exists():  # several bugs are noticed by the same check
        interpreted(bug.check, bug.made, *bug.arguments)
        passes.touch()
    with pytest.raises(AssertionError) as caught:
        interpreted.apart(bug.check, planted, *bug.arguments)
    assert re.search(bug.says, str(caught.value)), caught.value
    assert "process ended with -9" not in str(caught.value), "killed from outside"  # -6 and -11 are of its own writes


@pytest.mark.parametrize("name", [name for name in BUGS if name not in NOTICED])
def test_a_bug_whose_check_is_not_run_here_can_be_planted(interpreted: Interpreter, name: str) -> None:
    interpreted(can_be_planted, name)
