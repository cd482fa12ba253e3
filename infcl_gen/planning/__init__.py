"""Planning: from a problem, a derivation and a cluster to a plan, with neither torch nor triton.

    problem, derivation, cluster
      -> candidates   what is possible: strategies with their blocks and transports, and sizes of panels
      -> memory       buffers of one rank, and those of the table of communication
      -> work         FLOPs, bytes, exponentials and launches, term by term
      -> model        both in numbers: the peak of every candidate, and the time of those that fit
      -> planner      the fastest that keeps the budget
      -> reasons      why, for people

`timeline` executes a plan's table of communication over `events`. `records` finds plans that were measured.
"""

from __future__ import annotations

from infcl_gen.planning.planner import Plan, Reason, plan

__all__ = ["Plan", "Reason", "plan"]
