"""The command step: a whole training step planned from a profile of its towers, without a GPU."""

from typing import Any

from infcl_gen.cli import options, text
from infcl_gen.cli.group import show
from infcl_gen.cli.options import COUNT, NAMES, command, option
from infcl_gen.errors import InputError
from infcl_gen.inputs.problem import MAX_BATCH, MAX_DEVICES
from infcl_gen.inputs.text import bytes_text, check_word, flag_name, parse_bytes, time_text


@command(
    option("--profile", "FILE.toml", "What the towers cost, as plan_step measured it.", str),
    options.batch_size,
    options.devices,
    options.loss,
    option("--memory-budget", "SIZE", "Per device, for everything: 80GB, 139GiB.", COUNT),
    option("--optimizer", "NAME|SIZE", "What holds state for the parameters [adamw]."),
    option("--wrapper", "none|ddp|fsdp2", "What reduces gradients over devices [ddp if there are several]."),
    option("--inputs", "host|device", "Where the batch is [host, but on a CPU device]."),
    option("--treatments", "NAME,...", "That the plan may use [cached,checkpointed,kept].", NAMES),
    option("--micro-batch", "N", "Overrides the plan's sizes.", COUNT),
)
def step(flags: dict[str, Any]) -> None:
    """Plan a training step: micro-batches, memory by item, time by phase, the largest batch for the memory."""
    for name, example in (("profile", "the FILE.toml of the towers"), ("memory_budget", "a size, for example 80GB")):
        if flags[name] is None:
            raise InputError(f"{flag_name(name)}: is required; give {example}")
    from infcl_gen.step.costs import read_costs
    from infcl_gen.step.plan import TREATMENTS
    from infcl_gen.step.planner import OPTIMIZERS, PlannedLoss, check_treatments, optimizer_bytes, plan_from_costs

    costs = read_costs(flags["profile"])
    devices = options.count(flags, "devices", 1, 1, MAX_DEVICES)
    optimizer = flags["optimizer"] or "adamw"
    state = optimizer if optimizer in OPTIMIZERS else parse_bytes(optimizer, "--optimizer")
    named = TREATMENTS if flags["treatments"] is None else tuple(map(str, options.parts(flags["treatments"])))
    inputs = flags["inputs"] or ("host" if costs.host_to_device_gbs else "device")
    check_word("--inputs", inputs, ("host", "device"))
    loss = {"loss": flags["loss"] or "clip", "dim": costs.dim, "dtype": costs.dtype, "device_profile": costs.device}
    batch = None if flags["batch_size"] is None else options.count(flags, "batch_size", 1, 1, MAX_BATCH)
    plan = plan_from_costs(
        costs, parse_bytes(flags["memory_budget"], "--memory-budget"), PlannedLoss(loss, devices),
        batch_size=batch, world_size=devices, wrapper=flags["wrapper"] or ("ddp" if devices > 1 else "none"),
        optimizer_bytes=optimizer_bytes(state, costs.gradient_bytes), inputs=inputs, treatments=check_treatments(named),
        micro_batch=None if flags["micro_batch"] is None else options.count(flags, "micro_batch", 1, 1, MAX_BATCH),
    )  # fmt: skip
    show(flags, {"plan": plan.as_dict()}, lambda: step_text(plan.as_dict()))


def step_text(plan: dict[str, Any]) -> str:
    """The plan for people, from its literals."""
    towers = [
        (tower["name"], treatment, str(part["samples"]), str(part["micro_batch"]))
        for tower in plan["towers"]
        for treatment in ("kept", "checkpointed", "cached")
        if (part := tower[treatment])["samples"]
    ]
    items = [(each["name"], bytes_text(each["size"]), " ".join(each["phases"]), each["why"]) for each in plan["items"]]
    phases = [(name, time_text(value)) for name, value in plan["seconds"].items() if value]
    others = [
        (
            f"{' and '.join(each['treatments'])} alone",
            time_text(each["time_s"]) if each["time_s"] is not None else "does not fit",
            bytes_text(each["peak_bytes"]),
        )
        for each in plan["alternatives"]
    ]
    devices = f"{plan['devices']} device" + "s" * (plan["devices"] > 1)
    parts = [
        f"{plan['model'] or 'step'}: a batch of {plan['batch_size']} on {devices} ({plan['device']})",
        "Towers, per device\n" + text.table_text(("tower", "treatment", "samples", "micro-batch"), towers),
        "Memory per device\n"
        + text.table_text(("item", "size", "in", "why"), items)
        + f"\npeak {bytes_text(plan['predicted_peak_bytes'])} of {bytes_text(plan['memory_bytes'])}; "
        f"largest batch for this memory {plan['largest_batch']}",
        "Time\n" + text.table_text(("phase", "time"), phases) + f"\npredicted {time_text(plan['predicted_time_s'])}",
    ]
    if others:
        parts.append("Other plans\n" + text.table_text(("treatments", "time", "peak"), others))
    return "\n\n".join(parts)
