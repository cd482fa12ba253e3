"""The command step: a whole training step planned from a profile of its towers, without a GPU."""

from typing import Any

from infcl_gen.cli import options
from infcl_gen.cli.group import show
from infcl_gen.cli.options import COUNT, NAMES, command, option
from infcl_gen.errors import InputError
from infcl_gen.inputs.problem import MAX_BATCH, MAX_DEVICES
from infcl_gen.inputs.text import check_word, flag_name, parse_bytes


@command(
    option("--profile", "NAME|FILE.toml", "What the towers cost: vit_l_14-h200, or what plan_step measured.", str),
    options.batch_size,
    options.devices,
    options.loss,
    option("--memory-budget", "SIZE", "Per device, for everything: 80GB, 139GiB.", COUNT),
    option("--host-memory", "SIZE", "Of the host per device, for offloaded graphs: 64GiB [0].", COUNT),
    option("--optimizer", "NAME|SIZE", "Its state: none, sgd, momentum, adamw, lion, muon, or a size [adamw]."),
    option("--wrapper", "none|ddp|fsdp2", "What reduces gradients over devices [ddp if there are several]."),
    option("--inputs", "host|device", "Where the batch is [host, but on a CPU device]."),
    option("--treatments", "NAME,...", "That the plan may use [cached,offloaded,checkpointed,kept].", NAMES),
    option("--micro-batch", "N", "Overrides the plan's sizes.", COUNT),
)
def step(flags: dict[str, Any]) -> None:
    """Plan a training step: micro-batches, memory by item, time by phase, the largest batch for the memory."""
    for name, example in (
        ("profile", "a name, for example vit_l_14-h200, or a FILE.toml"),
        ("memory_budget", "a size, for example 80GB"),
    ):
        if flags[name] is None:
            raise InputError(f"{flag_name(name)}: is required; give {example}")
    from infcl_gen.hardware.profile import find_profile
    from infcl_gen.step.costs import read_costs
    from infcl_gen.step.plan import TREATMENTS
    from infcl_gen.step.planner import PlannedLoss, check_treatments, optimizer_bytes, plan_from_costs

    costs = read_costs(flags["profile"])
    if costs.with_targets and (flags["loss"] or flags["treatments"]):
        raise InputError("--loss, --treatments: are of a contrastive step; the profile has a loss with targets")
    memory_bytes = parse_bytes(flags["memory_budget"], "--memory-budget")
    if device := find_profile(costs.device):
        device.check_budget("--memory-budget", memory_bytes)
    devices = options.count(flags, "devices", 1, 1, MAX_DEVICES)
    named = TREATMENTS if flags["treatments"] is None else tuple(map(str, options.parts(flags["treatments"])))
    inputs = flags["inputs"] or ("host" if costs.host_to_device_gbs else "device")
    check_word("--inputs", inputs, ("host", "device"))
    batch = None if flags["batch_size"] is None else options.count(flags, "batch_size", 1, 1, MAX_BATCH)
    plan = plan_from_costs(
        costs, memory_bytes,
        None if costs.with_targets else PlannedLoss(flags["loss"] or "clip", costs, devices),
        batch_size=batch, world_size=devices,
        wrapper=flags["wrapper"] or ("ddp" if devices > 1 else "none"), inputs=inputs,
        optimizer_bytes=optimizer_bytes(flags["optimizer"] or "adamw", costs.gradient_bytes),
        treatments=check_treatments(named),
        host_memory_bytes=parse_bytes(flags["host_memory"], "--host-memory") if flags["host_memory"] else 0,
        micro_batch=None if flags["micro_batch"] is None else options.count(flags, "micro_batch", 1, 1, MAX_BATCH),
    )  # fmt: skip
    show(flags, {"plan": plan.as_dict()}, lambda: str(plan))
