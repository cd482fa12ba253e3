"""Each bug that a peer has had is noticed: the check passes on the package as generated and fails once the bug is in it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.kernels.planted import BUGS
from tests.kernels.worker import Interpreter


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(interpreted: Interpreter, name: str) -> None:
    bug = BUGS[name]
    interpreted(bug.check, bug.made, *bug.arguments)
    with pytest.raises(AssertionError) as caught:
        interpreted(bug.check, dataclasses.replace(bug.made, bug=name), *bug.arguments)
    assert re.search(bug.says, str(caught.value)), caught.value
