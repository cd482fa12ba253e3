"""Planning: from a problem, a derivation and a cluster to a plan, with neither torch nor triton."""

from __future__ import annotations

from infcl_gen.planning.planner import Plan, Reason, plan
from infcl_gen.planning.schedule import walk

__all__ = ["Plan", "Reason", "plan", "walk"]
