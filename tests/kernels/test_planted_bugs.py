"""Each bug that a peer has had is noticed: its check passes on the package as generated, and fails on the bug."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.kernels.planted import BUGS, ON_A_GPU
from tests.kernels.worker import Interpreter


@pytest.mark.parametrize("name", [name for name in BUGS if name not in ON_A_GPU])
def test_a_planted_bug_is_noticed(interpreted: Interpreter, name: str) -> None:
    bug = BUGS[name]
    interpreted(bug.check, bug.made, *bug.arguments)
    with pytest.raises(AssertionError) as caught:
        interpreted(bug.check, dataclasses.replace(bug.made, bug=name), *bug.arguments)
    assert re.search(bug.says, str(caught.value)), caught.value
