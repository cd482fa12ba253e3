"""Work counted in calls of functions: a limit that holds on a slow or a busy machine as it does on a fast one."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(function: Callable[[], Any]) -> int:
    """How many functions `function` calls, of Python and of C. Some 10 million take a second, unobserved."""
    count = 0

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
