"""Planning: from a problem, a derivation and a cluster to a plan, with neither torch nor triton.

    candidates   possible strategies with their blocks and transports, and sizes of panels
    memory       buffers of one rank, as expressions and from the table of communication
    work         FLOPs, bytes, exponentials and launches, as expressions
    model        memory and work in numbers: the peak and the time of a candidate
    planner      the fastest candidate that keeps the budget
    reasons      the explanation of each decision

`timeline` executes a plan's table of communication over `events`. `records` finds plans that were measured.
"""

from infcl_gen.planning.planner import Plan, Reason, plan

__all__ = ["Plan", "Reason", "plan"]
