"""A plan of a step for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infcl_gen.inputs.text import bytes_text, table_text, time_text
from infcl_gen.step.plan import DEALT


def step_text(plan: dict[str, Any]) -> str:
    """The plan from its literals, as `StepPlan.as_dict` gives them."""
    towers = [
        (tower["name"], treatment, str(part["samples"]), str(part["micro_batch"]))
        for tower in plan["towers"]
        for treatment in DEALT
        if (part := tower[treatment])["samples"]
    ]
    happening = [each["name"] for each in plan["phases"] if each["time_s"]]
    items = [
        (each["name"], bytes_text(each["size_bytes"]), _phases_text(each["phases"], happening), each["why"])
        for each in plan["items"]
        if each["size_bytes"]
    ]
    peak_bytes = plan["predicted_peak_bytes"]
    phases = [
        (each["name"], time_text(each["time_s"]), bytes_text(each["bytes"]), "peak" * (each["bytes"] == peak_bytes))
        for each in plan["phases"]
        if each["name"] in happening
    ]
    others = [
        (
            f"{' and '.join(each['treatments'])} alone",
            time_text(each["time_s"]) if each["time_s"] is not None else "does not fit",
            bytes_text(each["peak_bytes"]),
        )
        for each in plan["alternatives"]
    ]
    devices = f"{plan['devices']} device" + "s" * (plan["devices"] > 1)
    asked, batch = plan["asked_batch_size"], plan["batch_size"]
    rounded = f"; {asked} is rounded up to equal parts" if asked not in (None, batch) else ""
    measured = f"\nCosts of towers: {plan['measured']}" if plan["measured"] else ""
    parts = [
        f"A step of {' and '.join(tower['name'] for tower in plan['towers'])}: a batch of {batch} on {devices} "
        f"({plan['device']}){rounded}{measured}",
        "Towers, per device\n" + table_text(("tower", "treatment", "samples", "micro-batch"), towers),
        f"Memory per device\n{table_text(('item', 'size', 'in', 'why'), items)}\n"
        f"peak {bytes_text(peak_bytes)} of {bytes_text(plan['memory_bytes'])}; "
        f"largest batch for this memory {plan['largest_batch']}{_host_text(plan)}",
        f"Phases\n{table_text(('phase', 'time', 'memory', ''), phases)}\n"
        f"predicted {time_text(plan['predicted_time_s'])}",
    ]
    if others:
        parts.append("Other plans\n" + table_text(("treatments", "time", "peak"), others))
    return "\n\n".join(parts)


def _host_text(plan: dict[str, Any]) -> str:
    if not plan["host_memory_bytes"]:
        return ""
    allowed = bytes_text(plan["host_memory_bytes"])
    if not plan["host_bytes"]:
        return f"\non the host nothing of {allowed}: offloaded graphs make no step faster that fits"
    taken, lock = bytes_text(plan["host_bytes"]), time_text(plan["host_lock_s"])
    return (
        f"\non the host {taken} of {allowed}, for offloaded graphs; to lock it the first step takes about {lock} more"
    )


def _phases_text(phases: Sequence[str], happening: Sequence[str]) -> str:
    found = [each for each in happening if each in phases]
    return "all" if found == happening else " ".join(found)
