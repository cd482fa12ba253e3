"""How many examples hypothesis draws: few in CI, many in the nightly tier (HYPOTHESIS_PROFILE=long)."""

from __future__ import annotations

import os

import hypothesis


def examples(ci: int, long: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=long if os.environ.get("HYPOTHESIS_PROFILE") == "long" else ci)
