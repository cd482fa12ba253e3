"""The planner: one problem, one derivation, one cluster -> one `Plan` with every level of tiling decided and explained.

It enumerates candidates (strategy, panel, stash), drops those whose predicted peak exceeds the budget, and takes the
fastest by the cost model; among those within 0.1 % of it, the smallest. So more budget never gives a slower plan, and
what is feasible is decided by the same figures that the plan reports.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infcl_gen.errors import InfeasibleError, InputError
from infcl_gen.planning.cost import Buffer, CostModel, PhaseTime, Sizes, Variant
from infcl_gen.planning.levels import (
    FUSED_DIM_LIMIT,
    KERNELS,
    KERNELS_OF,
    PANEL_UNIT,
    Block,
    Specialisation,
    default_blocks,
    shared_bytes,
    violations,
)
from infcl_gen.planning.schedule import Schedule, gather_schedule, ring_schedule
from infcl_gen.problem import BLOCK_FIELDS, DTYPE_BYTES, MAX_BATCH, SETTINGS, bytes_text, parse_count

if TYPE_CHECKING:
    from infcl_gen.hardware import Cluster
    from infcl_gen.losses import Derivation
    from infcl_gen.problem import Problem

PANEL_CAP = 16384  # larger panels are hardly faster: 80 rows of overhead in 16 384
# Of the forward, which keeps no panel: a quarter of its launches. At B = 65 536, D = 128 on an H200 from an idle device
# 10.5 ms for 11.9 of panels of 16 384, behind other work 10.0 for 10.1.
FORWARD_CAP = 32768
# Kernels address a tile of a panel with 32 bits: 256 rows of this many elements stay below 2^31.
PANEL_LIMIT = 1 << 22
SPLIT_CAP = 4096  # tensor cores cut sums: gradients good to 6e-6, in 145 ms at B = 65 536, D = 768; 2e-5, 129 at 16 384
FUSED_CAP = 65536  # fused has no scratch; many rows fill the multiprocessors evenly
# Their products read shared memory; elsewhere a tile must pass through registers.
DESCRIPTOR_PRODUCTS = ("sm_90", "sm_100")
# Of products: recorded graphs save 0.3 ms of such a step, and up to 1.1 ms of a short one; of 7.7 to 16 ms (B = 32 768,
# D = 512 to 1 152) only 0.1, and nothing behind other work. A stash has taken far more memory than they keep, and its
# steps begin later: of 12 ms they saved 0.6.
REPLAY_LIMIT_S, STASH_REPLAY_LIMIT_S = 5e-3, 50e-3
TORCH_CAP = 2048  # on a CPU a panel should stay near the caches
GATHER_LIMIT = 16  # ranks that may all send to all at once: one node's, whose switch they share
AUTO_FRACTION = 8  # "auto" takes at most this part of the device's memory
_TOLERANCE = 1.001
# What a gather must be predicted to save, since its memory grows with the number of ranks. On 2 H200s with 64k rows
# each it took 0.9 % less than a ring from an idle device, and as much behind other work; with 16k rows 5 to 6 % more.
_GATHER_GAIN = 0.01


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a level is tiled as it is. Levels: 0 cluster, 1 node, 2 device, 3 multiprocessor, 4 warps."""

    level: int
    decision: str
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that emission needs to know. Bytes and times are per rank.

    `predicted_peak_bytes` bounds what the loss allocates beyond its inputs and never exceeds `budget_bytes`.
    `predicted_time_s` begins on an idle device, `predicted_queued_s` behind other work, where the host costs nothing.
    `largest_batch` is feasible under the same `--memory-budget` ("auto": 1/8 of the device's memory), and the next
    larger one is not. `stash_rows` is 0 without a stash; `blocks` is empty for torch.
    """

    problem: Problem
    strategy: str
    target: str
    dtype: str
    products: str
    split: bool
    descriptors: bool
    replay: bool
    rows_per_rank: int
    keys_per_rank: int
    world_size: int
    forward_rows: int
    forward_keys: int
    panel_rows: int
    panel_keys: int
    stash_rows: int
    blocks: dict[str, Block]
    buffers: tuple[Buffer, ...]
    predicted_peak_bytes: int
    phases: tuple[PhaseTime, ...]
    predicted_time_s: float
    predicted_queued_s: float
    reasons: tuple[Reason, ...]
    budget_bytes: int  # what is promised: the budget given, or without one the predicted peak
    allowed_bytes: int  # what the plan might have taken: that budget, or a part of the device's memory
    smallest_budget_bytes: int
    largest_batch: int  # within what is allowed
    schedule: Schedule

    @property
    def specialisation(self) -> Specialisation:
        return Specialisation(self.strategy, self.dtype, self.problem.dim, self.descriptors, self.split)

    def as_dict(self) -> dict[str, Any]:
        """The plan as literals: dictionaries, lists, text and numbers."""
        literals = _literals(dataclasses.asdict(self) | {"problem": self.problem.as_dict()})
        assert isinstance(literals, dict)
        return literals


def plan(problem: Problem, derivation: Derivation, cluster: Cluster) -> Plan:
    """The fastest plan by the cost model whose predicted peak keeps the budget.

    Raises InputError (a flag or setting is invalid for this loss or device) or InfeasibleError (nothing fits; it
    carries the smallest feasible budget and the largest feasible batch).
    """
    _check(problem, derivation, cluster)
    ceiling = problem.memory_budget_bytes
    if ceiling is None:
        ceiling = cluster.profile.memory_bytes // AUTO_FRACTION
    options = _options(problem, derivation, cluster)
    smallest = min(option.smallest_peak(problem) for option in options)
    largest = _largest_batch(problem, derivation, cluster, ceiling)
    if smallest > ceiling:
        raise InfeasibleError(
            _infeasible_message(problem, cluster, ceiling, smallest, largest), smallest, largest
        )
    everything = _candidates(problem, options)
    candidates = [candidate for candidate in everything if candidate.peak_bytes <= ceiling]
    best = _best(candidates, _fastest_ring_s(everything))
    option, sizes, peak = best.option, best.sizes, best.peak_bytes
    model = option.model(problem)
    return Plan(
        problem=problem,
        strategy=option.specialisation.strategy,
        target=cluster.profile.target,
        dtype=problem.dtype,
        products=option.products,
        split=option.specialisation.split,
        descriptors=option.specialisation.descriptors,
        replay=option.replay,
        rows_per_rank=model.rows,
        keys_per_rank=model.keys,
        world_size=model.world_size,
        forward_rows=sizes.forward_rows,
        forward_keys=sizes.forward_keys,
        panel_rows=sizes.panel_rows,
        panel_keys=sizes.panel_keys,
        stash_rows=sizes.stash_rows,
        blocks=dict(option.blocks),
        buffers=model.buffers(sizes),
        predicted_peak_bytes=peak,
        phases=model.phases(sizes),
        predicted_time_s=best.time_s,
        predicted_queued_s=model.queued_s(sizes),
        reasons=_reasons(problem, best, candidates, ceiling),
        budget_bytes=peak if problem.memory_budget_bytes is None else ceiling,
        allowed_bytes=ceiling,
        smallest_budget_bytes=smallest,
        largest_batch=problem.batch_size if largest is None else largest,
        schedule=option.schedule,
    )


def cost_model(plan: Plan, derivation: Derivation, cluster: Cluster) -> CostModel:
    """The cost model that a plan was chosen by."""
    transport, keeps = plan.schedule.transport, plan.schedule.keeps
    option = _Option(
        plan.specialisation, plan.products, plan.replay, transport, keeps, plan.blocks, derivation, cluster
    )
    return option.model(plan.problem)


def _as_many_keys(derivation: Derivation) -> bool:
    """Whether the loss needs as many keys as queries."""
    return derivation.has_keys or derivation.spec.positives == "diagonal"


def _check(problem: Problem, derivation: Derivation, cluster: Cluster) -> None:
    if _as_many_keys(derivation) and problem.total_keys != problem.batch_size:
        paired = derivation.spec.positives == "diagonal"
        why = (
            "pairs query i with key i"
            if paired
            else "reduces over queries as well, so each key needs its query"
        )
        raise InputError(
            f"--keys: the loss {problem.loss!r} {why}:"
            f" --keys {problem.total_keys} must equal --batch-size {problem.batch_size} (or be left out)"
        )
    if problem.dtype != "fp32" and problem.precision != "default":
        raise InputError(
            f"--precision: {problem.precision} applies to --dtype fp32 only, not to {problem.dtype}; leave it out"
        )
    if problem.dtype == "fp64" and cluster.profile.target != "cpu":
        raise InputError("--dtype: fp64 is supported with --target cpu only; valid here: bf16, fp16, fp32")
    if problem.precision == "tf32" and cluster.profile.vendor != "nvidia":
        raise InputError(f"--precision: tf32 needs an NVIDIA GPU, not {cluster.profile.name}")
    kernels = {key.partition(".")[0] for key in problem.setting if "." in key}
    for kernel in sorted(kernels - set(KERNELS)):
        raise InputError(f"--set {kernel}: unknown kernel {kernel!r}; valid: {', '.join(KERNELS)}")
    known = {*SETTINGS, *(f"{kernel}.{field}" for kernel in KERNELS for field in BLOCK_FIELDS)}
    for key in sorted(set(problem.setting) - known):
        raise InputError(f"--set {key}: unknown; valid: {', '.join(sorted(known))}")


# ---------------------------------------------------------------------------------------------- strategies


@dataclasses.dataclass(frozen=True)
class _Option:
    """One strategy with its blocks, before sizes are chosen."""

    specialisation: Specialisation
    products: str
    replay: bool
    transport: str
    keeps: bool
    blocks: dict[str, Block]
    derivation: Derivation
    cluster: Cluster

    @property
    def schedule(self) -> Schedule:
        has_keys = bool(self.derivation.has_keys)
        if self.transport == "gather":
            return gather_schedule(self.cluster.devices, has_keys)
        return ring_schedule(self.cluster.nodes, self.cluster.devices_per_node, has_keys, self.keeps)

    def model(self, problem: Problem) -> CostModel:
        world = self.cluster.devices
        variant = Variant(
            strategy=self.specialisation.strategy,
            has_keys=self.derivation.has_keys,
            labels=self.derivation.spec.positives == "label",
            ring=world > 1,
            separate=DTYPE_BYTES[problem.dtype] < 4,
            library=self.products == "library",
            affine=self.derivation.slope is not None,
            replay=self.replay,
            split=self.specialisation.split,
            gather=self.transport == "gather",
            keeps=self.keeps,
        )
        return CostModel(
            variant, self.cluster, -(-problem.batch_size // world), -(-problem.total_keys // world),
            problem.dim, problem.dtype, problem.precision, self.blocks,
        )  # fmt: skip

    @property
    def units(self) -> tuple[int, int]:
        """What panel rows and panel keys are multiples of: whole blocks of every kernel that walks a panel."""
        if self.specialisation.strategy == "torch":
            return 64, 64
        # The forward's do not count: it has panels of its own, or, with a stash, the gradient's tiles.
        b = self.blocks
        if self.specialisation.strategy == "fused":
            return max(PANEL_UNIT, b["fused"].rows), b["fused"].keys
        rows = max(PANEL_UNIT, b["gradient"].rows, b["product"].rows, b["product"].depth)
        return rows, max(b["gradient"].keys, b["product"].rows, b["product"].depth)

    def smallest_peak(self, problem: Problem) -> int:
        """The least memory that any sizes need: the peak grows with each of them."""
        model = self.model(problem)
        row_unit, key_unit = self.units
        rows = _fixed(problem, "panel_rows", row_unit, model.rows) or row_unit
        keys = _fixed(problem, "panel_keys", key_unit, model.keys) or key_unit
        keys = _padded(model.keys, key_unit) if self.specialisation.strategy == "fused" else keys
        return min(
            model.peak_bytes(sizes) for sizes in self._with_stash(problem, model, rows, keys, smallest=True)
        )

    def sizes(self, problem: Problem) -> Iterator[Sizes]:
        """All candidates, the smallest among them."""
        model = self.model(problem)
        row_unit, key_unit = self.units
        cap = {"fused": FUSED_CAP, "torch": TORCH_CAP}.get(self.specialisation.strategy, PANEL_CAP)
        cap = SPLIT_CAP if self.specialisation.split else cap
        fixed_rows = _fixed(problem, "panel_rows", row_unit, model.rows)
        fixed_keys = _fixed(problem, "panel_keys", key_unit, model.keys)
        all_rows = [fixed_rows] if fixed_rows else _splits(model.rows, row_unit, cap)
        if self.specialisation.strategy == "fused":
            all_keys = [_padded(model.keys, key_unit)]  # a program walks all keys
        else:
            all_keys = [fixed_keys] if fixed_keys else _splits(model.keys, key_unit, cap)
        if self.specialisation.strategy == "stash":
            # A third dimension: coarser steps in the other two, the smallest kept.
            all_rows, all_keys = (
                sorted({*sides[::2], sides[-1]}, reverse=True) for sides in (all_rows, all_keys)
            )
        for rows in all_rows:
            for keys in all_keys:
                # Near-square panels do the most work per byte; a longer side only where the other has no more to give.
                lean = (keys > 4 * rows and rows < all_rows[0]) or (rows > 4 * keys and keys < all_keys[0])
                smallest = (rows, keys) == (all_rows[-1], all_keys[-1])
                if not lean or smallest or self.specialisation.strategy == "fused":
                    yield from self._with_stash(problem, model, rows, keys, smallest=False)

    def _with_stash(
        self, problem: Problem, model: CostModel, rows: int, keys: int, smallest: bool
    ) -> Iterator[Sizes]:
        if self.specialisation.strategy != "stash":
            yield self._with_forward(model, rows, keys, 0)
            return
        slices = -(-model.rows // rows)
        if "stash_rows" in problem.setting:
            stash = parse_count(problem.setting["stash_rows"], "--set stash_rows")
            # A panel as set may be longer than the problem, and is cut to it: what was set counts.
            asked = parse_count(problem.setting.get("panel_rows", str(rows)), "--set panel_rows")
            if stash % asked == 0:
                yield self._with_forward(model, rows, keys, min(stash, slices * rows))
            elif smallest or "panel_rows" in problem.setting:
                raise InputError(f"--set stash_rows: {stash} must be a multiple of the panel rows, {asked}")
        else:
            counts = {1} if smallest else {1, slices, *(slices * step // 6 or 1 for step in range(1, 6))}
            for count in sorted(counts):
                yield self._with_forward(model, rows, keys, count * rows)

    def _with_forward(self, model: CostModel, rows: int, keys: int, stash_rows: int) -> Sizes:
        """The largest forward panel whose buffers take no more than the backward phase, which is there anyway.

        A stash is filled by whole panels of the backward sweep; the torch strategy uses one panel for both.
        """
        if self.specialisation.strategy in ("torch", "stash"):
            return Sizes(rows, keys, rows, keys, stash_rows)
        row_unit, key_unit = self.blocks["forward"].rows, self.blocks["forward"].keys
        row_cap = key_cap = FORWARD_CAP
        while True:
            forward = (_split(model.rows, row_unit, row_cap), _split(model.keys, key_unit, key_cap))
            sizes = Sizes(*forward, rows, keys, 0)
            if model.forward_fits(sizes) or (row_cap, key_cap) == (row_unit, key_unit):
                return sizes
            row_cap, key_cap = (
                (row_cap, max(key_unit, key_cap // 2)) if key_cap >= row_cap and key_cap > key_unit
                else (max(row_unit, row_cap // 2), key_cap)
            )  # fmt: skip


def _options(problem: Problem, derivation: Derivation, cluster: Cluster) -> list[_Option]:
    """The strategies that problem, device and settings allow, in order of preference at equal predicted time."""
    wanted = problem.setting.get("strategy")
    profile = cluster.profile
    if wanted is None:
        names = ("torch",) if profile.target == "cpu" else ("fused", "panel", "stash")
    else:
        names = (wanted,)
        reason = _impossible(wanted, problem, derivation, cluster)
        if reason:
            raise InputError(f"--set strategy: {wanted} {reason}")
    possible = [name for name in names if not _impossible(name, problem, derivation, cluster)]
    usable = [name for name in possible if set(problem.setting) <= _settings_of(name)]
    if not usable:
        name = possible[-1] if wanted is None and len(possible) == 1 else wanted or "panel"
        extra = sorted(set(problem.setting) - _settings_of(name))
        raise InputError(
            f"--set {extra[0] if extra else sorted(problem.setting)[0]}: does not apply to the strategies possible here"
            f" ({', '.join(possible)}); valid: {', '.join(sorted(set().union(*map(_settings_of, possible))))}"
        )
    if "stash_rows" in problem.setting:
        usable = [name for name in usable if name == "stash"]
    elif problem.memory_budget_bytes is None and wanted is None:
        usable = [name for name in usable if name != "stash"]
    found: list[_Option] = []
    transports = _transports(problem, cluster)
    replay = problem.setting.get("replay")
    for name in usable:
        try:
            option = _option(name, problem, derivation, cluster)
        except InputError:
            if name == usable[-1] and not found:
                raise
            continue
        if replay != "on":
            found += (
                dataclasses.replace(option, transport=transport, keeps=keeps)
                for transport, keeps in transports
            )
        if _recordable(name, cluster) and (
            replay == "on" or (replay is None and _short(name, problem, cluster))
        ):
            found.append(dataclasses.replace(option, replay=True))
    if not found:
        raise InputError(
            "--set replay: on needs kernels, an NVIDIA GPU and --devices 1, not"
            f" {' or '.join(usable)} on {cluster.devices} x {cluster.profile.name}; valid: off"
        )
    return found


def _transports(problem: Problem, cluster: Cluster) -> tuple[tuple[str, bool], ...]:
    """How keys may travel, by a ring or all at once among few devices of one node; and whether a ring keeps those that
    visit last."""
    wanted, devices = problem.setting.get("transport"), cluster.devices
    keeps = problem.setting.get("keeps")
    if keeps is not None and (devices == 1 or wanted == "gather"):
        raise InputError(
            "--set keeps: is for a ring of several devices; give --devices, and no other transport"
        )
    if wanted is not None and devices == 1:
        raise InputError("--set transport: keys travel between devices, and there is one; give --devices")
    impossible = None
    if cluster.nodes > 1:
        impossible = f"not between {cluster.nodes} nodes"
    elif devices > GATHER_LIMIT:
        impossible = f"at most {GATHER_LIMIT} devices, not {devices}"
    if wanted == "gather" and impossible:
        raise InputError(f"--set transport: gather is for the devices of one node, {impossible}; valid: ring")
    if devices == 1:
        return (("ring", False),)
    rings = tuple(("ring", keep) for keep in (True, False) if keeps is None or keep == (keeps == "on"))
    gathers = () if impossible or keeps is not None else (("gather", False),)
    return {"ring": rings, "gather": gathers, None: rings + gathers}[wanted]


def _short(name: str, problem: Problem, cluster: Cluster) -> bool:
    """Whether the host's start is so much of a step that recordings, which keep their memory, are worth a thought."""
    flops = 8 * problem.batch_size * problem.total_keys * problem.dim
    limit_s = STASH_REPLAY_LIMIT_S if name == "stash" else REPLAY_LIMIT_S
    return flops < limit_s * cluster.profile.matmul_tflops[problem.dtype].value * 1e12


def _recordable(name: str, cluster: Cluster) -> bool:
    """Whether CUDA graphs may be recorded: of kernels, on one NVIDIA GPU."""
    return name != "torch" and cluster.profile.target == "cuda" and cluster.devices == 1


def _option(name: str, problem: Problem, derivation: Derivation, cluster: Cluster) -> _Option:
    split = _split_operands(name, problem, cluster)
    descriptors = _descriptors(problem, cluster, split) if name != "torch" else False
    rows, keys = (-(-total // cluster.devices) for total in (problem.batch_size, problem.total_keys))
    chosen = {kernel for kernel, dot, _ in (key.partition(".") for key in problem.setting) if dot}
    specialisation = Specialisation(name, problem.dtype, problem.dim, descriptors, split)
    blocks = default_blocks(cluster.profile, specialisation, rows, keys, chosen)
    for key, word in problem.settings:
        kernel, dot, field = key.partition(".")
        if dot:
            value = parse_count(word, f"--set {key}")
            blocks[kernel] = dataclasses.replace(blocks[kernel], **{field: value})
    if name == "stash":  # the forward keeps the backward's tiles
        if "forward.rows" in problem.setting or "forward.keys" in problem.setting:
            raise InputError(
                "--set forward.rows, forward.keys: a stash keeps the gradient's tiles; set gradient.* instead"
            )
        tile = blocks["gradient"]
        blocks["forward"] = dataclasses.replace(blocks["forward"], rows=tile.rows, keys=tile.keys)
    for key in (key for key, _ in problem.settings if "." in key):
        kernel = key.partition(".")[0]
        for changed in ("gradient", "forward") if kernel == "gradient" and name == "stash" else (kernel,):
            found = violations(changed, blocks[changed], cluster.profile, specialisation)
            if found:
                raise InputError(f"--set {key}: the {changed} block is illegal: {'; '.join(found)}")
    products = _products(name, problem, cluster)
    return _Option(specialisation, products, False, "ring", False, blocks, derivation, cluster)


def _impossible(name: str, problem: Problem, derivation: Derivation, cluster: Cluster) -> str | None:
    """Why a strategy cannot be used, as the end of a sentence; None if it can."""
    if name == "torch":
        return None
    if cluster.profile.target == "cpu":
        return "needs a GPU target; on the CPU the strategy is torch"
    if derivation.slope is None:
        return "has kernels only for logits of the form slope * z + shift; use --target cpu for this loss"
    if name == "fused" and problem.dim > FUSED_DIM_LIMIT:
        return f"holds the whole embedding in one block: --dim at most {FUSED_DIM_LIMIT}, not {problem.dim}"
    if name == "fused" and DTYPE_BYTES[problem.dtype] != 2:
        return f"keeps a whole gradient row in registers, too many of them for {problem.dtype}; valid: bf16, fp16"
    if name == "stash" and cluster.devices > 1:
        return "keeps tiles of the rank's own keys, and needs --devices 1"
    if name == "stash" and problem.total_keys > PANEL_LIMIT:
        return f"addresses its rows with 32 bits: --keys at most {PANEL_LIMIT}, not {problem.total_keys}"
    if name == "stash" and problem.dtype != "bf16":
        return (
            f"keeps 8 bits of each probability, which would lose the accuracy of {problem.dtype}; valid: bf16"
        )
    return None


def _settings_of(name: str) -> set[str]:
    """The keys of `--set` that mean something to a strategy."""
    keys = {"strategy", "panel_rows", "records", "transport", "keeps"}
    keys |= {f"{kernel}.{field}" for kernel in KERNELS_OF[name] for field in BLOCK_FIELDS}
    if name != "fused":
        keys |= {"panel_keys"}
    if name != "torch":
        keys |= {"descriptors", "replay"}
    if name in ("panel", "stash"):
        keys |= {"products"}
    return keys | {"stash_rows"} if name == "stash" else keys


def _products(name: str, problem: Problem, cluster: Cluster) -> str:
    if name in ("torch", "fused"):
        return {"torch": "torch", "fused": "triton"}[name]
    wanted = problem.setting.get("products")
    if wanted == "library" and cluster.profile.target != "cuda":
        raise InputError(
            f"--set products: {cluster.profile.target} has no library product with fp32 output; valid: triton"
        )
    return wanted or ("library" if cluster.profile.target == "cuda" else "triton")


def _split_operands(name: str, problem: Problem, cluster: Cluster) -> bool:
    """Whether fp32 features are multiplied as bf16 halves: 16 bits, twice as fast as three products in tf32."""
    return (problem.dtype, problem.precision, name, cluster.profile.target) == (
        "fp32",
        "default",
        "panel",
        "cuda",
    )


def _descriptors(problem: Problem, cluster: Cluster, split: bool) -> bool:
    aligned = split or problem.dim * DTYPE_BYTES[problem.dtype] % 16 == 0  # split operands are padded
    wanted = problem.setting.get("descriptors")
    if wanted == "on" and not cluster.profile.tensor_descriptors:
        raise InputError(f"--set descriptors: {cluster.profile.name} has no tensor descriptors; valid: off")
    if wanted == "on" and not aligned:
        raise InputError(
            f"--set descriptors: a row of {problem.dim} {problem.dtype} is not a multiple of 16 bytes; valid: off"
        )
    by_default = cluster.profile.arch in DESCRIPTOR_PRODUCTS
    return (
        (by_default if wanted is None else wanted == "on") and cluster.profile.tensor_descriptors and aligned
    )


# ---------------------------------------------------------------------------------------------- sizes


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _split(count: int, unit: int, cap: int) -> int:
    """Rows of equal panels, each at most `cap` (a multiple of `unit`), that cover `count` rows."""
    panels = -(-count // cap)
    return _padded(-(-count // panels), unit)


def _splits(count: int, unit: int, cap: int) -> list[int]:
    """Panel sizes to consider, largest first, down to the unit: equal panels, in ever larger steps of their number.

    Large panels are rounded to an eighth of the next lower power of two: whole waves of blocks suit matrix products.
    """
    found = []
    panels = -(-count // cap)
    while True:
        rows = -(-count // panels)
        rows = min(_padded(rows, max(unit, (1 << rows.bit_length() - 1) // 8)), _padded(count, unit))
        found.append(rows)
        if rows == unit:
            return sorted(set(found), reverse=True)
        panels = max(panels + 1, panels * 4 // 3)


def _fixed(problem: Problem, key: str, unit: int, count: int) -> int | None:
    """The panel size that `--set` asks for, never more than the padded problem; None if it does not."""
    if key not in problem.setting:
        return None
    value = parse_count(problem.setting[key], f"--set {key}")
    if value % unit:
        raise InputError(f"--set {key}: {value} must be a multiple of {unit}, the blocks that walk a panel")
    if min(value, count) > PANEL_LIMIT:
        raise InputError(f"--set {key}: at most {PANEL_LIMIT}; {PANEL_CAP} is already as fast")
    return min(value, _padded(count, unit))


@dataclasses.dataclass(frozen=True)
class _Candidate:
    time_s: float
    peak_bytes: int
    order: int
    option: _Option
    sizes: Sizes


def _candidates(problem: Problem, options: list[_Option]) -> list[_Candidate]:
    """Everything, whatever the budget."""
    found = []
    for order, option in enumerate(options):
        model = option.model(problem)
        for sizes in option.sizes(problem):
            found.append(_Candidate(model.time_s(sizes), model.peak_bytes(sizes), order, option, sizes))
    return found


def _fastest_ring_s(everything: list[_Candidate]) -> float:
    """With any budget: what a gather is compared with must not change with it, or more budget, which makes rings
    faster, would turn down a gather that was better than they are."""
    return min((c.time_s for c in everything if c.option.transport == "ring"), default=math.inf)


def _best(candidates: list[_Candidate], ring_s: float) -> _Candidate:
    """The smallest of the candidates within the tolerance of the fastest; ties by a fixed order."""
    worthwhile = (1 - _GATHER_GAIN) * ring_s
    rest = [c for c in candidates if c.option.transport != "gather" or c.time_s <= worthwhile]
    candidates = rest or candidates  # a gather alone may keep the budget, or be what was set
    limit = min(candidate.time_s for candidate in candidates) * _TOLERANCE
    return min(
        (candidate for candidate in candidates if candidate.time_s <= limit),
        key=lambda c: (c.peak_bytes, c.time_s, c.order, dataclasses.astuple(c.sizes)),
    )


def _largest_batch(problem: Problem, derivation: Derivation, cluster: Cluster, ceiling: int) -> int | None:
    """The largest global batch that some option can plan within the ceiling; None if not even one row fits."""

    @functools.cache
    def fits(batch: int) -> bool:
        # With --keys the keys stay, unless the loss needs them equal to the queries.
        keys = batch if problem.keys is not None and _as_many_keys(derivation) else problem.keys
        other = dataclasses.replace(problem, batch_size=batch, keys=keys)
        try:
            options = _options(other, derivation, cluster)
        except (
            InputError
        ):  # what another batch does not allow, such as a stash of too many keys, does not fit
            return False
        return any(option_fits(option, other) for option in options)

    def option_fits(option: _Option, other: Problem) -> bool:
        try:
            return option.smallest_peak(other) <= ceiling
        except InputError:  # a panel as set
            return False

    if not fits(1):
        return None
    low, high = 1, MAX_BATCH + 1  # low fits, high does not
    probe = problem.batch_size
    while high - low > 1:
        low, high = (probe, high) if fits(probe) else (low, probe)
        probe = (low + high) // 2 if high <= MAX_BATCH else min(2 * low, MAX_BATCH)
    return low


# ---------------------------------------------------------------------------------------------- explanation


def _infeasible_message(
    problem: Problem, cluster: Cluster, ceiling: int, smallest: int, largest: int | None
) -> str:
    budget = f"--memory-budget {bytes_text(ceiling)}"
    if problem.memory_budget_bytes is None:
        budget += f" (auto: 1/{AUTO_FRACTION} of {cluster.profile.name}'s memory)"
    return (
        f"{budget}: no plan fits --batch-size {problem.batch_size}, --dim {problem.dim} on {cluster.devices} device(s);"
        f" the smallest feasible budget is {smallest} bytes ({bytes_text(smallest)}), "
        + (f"the largest feasible batch is {largest}" if largest else "no batch fits this budget")
    )


def _reasons(
    problem: Problem, best: _Candidate, candidates: list[_Candidate], ceiling: int
) -> tuple[Reason, ...]:
    option, sizes = best.option, best.sizes
    model = option.model(problem)
    cluster = option.cluster
    measured = problem.setting.get("records") == "measured"
    by_setting = f"measured on {cluster.profile.name}" if measured else "set by --set"
    found = [*_transport_reasons(problem, best, candidates)]
    found.append(
        Reason(2, f"strategy {option.specialisation.strategy}", _strategy_why(problem, best, candidates))
    )
    tiles = -(-model.rows // sizes.panel_rows) * -(-model.keys // sizes.panel_keys)
    if option.specialisation.strategy == "fused":
        why = "gradients of logits never leave the multiprocessor; these rows of dq accumulate at once"
        rows = sizes.panel_rows
        if cluster.devices > 1:
            why, rows = "gradients of logits never leave the multiprocessor", model.rows
        found.append(Reason(2, f"{rows} query rows x all keys", why))
    else:
        area = sizes.panel_rows * sizes.panel_keys
        larger = any(
            c.order == best.order and c.sizes.panel_rows * c.sizes.panel_keys > area for c in candidates
        )
        if {"panel_rows", "panel_keys"} & set(problem.setting):
            why = by_setting
        else:
            why = (
                "larger ones are not faster"
                if larger
                else "larger ones exceed the budget, the problem or the cap"
            )
        why = f"{tiles} panel(s) a hop, peak {bytes_text(best.peak_bytes)} of {bytes_text(ceiling)}; {why}"
        found.append(Reason(2, f"panel {sizes.panel_rows} x {sizes.panel_keys}", why))
    as_backward = option.specialisation.strategy in ("torch", "stash")
    why = "as the backward panel" if as_backward else "its partial sums fit where backward needs more"
    found.append(Reason(2, f"forward panel {sizes.forward_rows} x {sizes.forward_keys}", why))
    if sizes.stash_rows:
        why = "kept tiles need no recomputation in backward"
        found.append(
            Reason(2, f"stash of {min(sizes.stash_rows, model.rows)} of {model.rows} query rows", why)
        )
    if option.replay:
        why = "set by --set" if "replay" in problem.setting else "kernels start sooner than one by one"
        found.append(Reason(2, "recorded CUDA graphs", why))
    if option.specialisation.strategy in ("panel", "stash"):
        library = "the library's product with fp32 output is the fastest here"
        why = library if option.products == "library" else "no library product with fp32 output here"
        why = by_setting if "products" in problem.setting else why
        found.append(Reason(3, f"products by {option.products}", why))
    if option.specialisation.split:
        why = "three bf16 products each: 16 bits, faster than tf32 and 64 times as accurate"
        found.append(Reason(3, "fp32 features as bf16 halves", why))
    for_many = default_blocks(cluster.profile, option.specialisation)
    for kernel, block in option.blocks.items():
        changed = sorted(key for key in problem.setting if key.startswith(kernel + "."))
        size = shared_bytes(kernel, block, option.specialisation)
        why = f"{size} of {cluster.profile.shared_bytes_per_block} bytes of shared memory"
        if measured:
            why = f"{by_setting}; {why}"
        elif changed:
            why = f"set by {', '.join(changed)}; {why}"
        elif block.rows * block.keys < for_many[kernel].rows * for_many[kernel].keys:
            why = (
                f"small: the batch has few tiles for {cluster.profile.multiprocessors} multiprocessors; {why}"
            )
        found.append(Reason(3, f"{kernel} block {block.rows} x {block.keys} x {block.depth}", why))
        registers = f"a register budget of {cluster.profile.registers_per_thread} per thread"
        found.append(
            Reason(4, f"{kernel}: {block.warps} warps, {block.stages} stages", f"keeps to {registers}")
        )
    if option.blocks:
        on = option.specialisation.descriptors
        why = "rows are multiples of 16 bytes" if on else "not on this board, for this row size, or by --set"
        found.append(Reason(4, f"tensor descriptors {'on' if on else 'off'}", why))
    return tuple(found)


def _transport_reasons(
    problem: Problem, best: _Candidate, candidates: list[_Candidate]
) -> tuple[Reason, Reason]:
    """Levels 0 and 1: how keys get to the queries."""
    option, model, cluster = best.option, best.option.model(problem), best.option.cluster
    world, nodes = model.world_size, cluster.nodes
    outer = Reason(0, "one node", "nothing crosses the network")
    if nodes > 1:
        inside = cluster.devices_per_node
        why = f"the network is crossed at one hop of {inside}, by all {inside} devices of a node at once"
        why = why if inside > 1 else "each device is a node"
        outer = Reason(0, f"ring of {nodes} nodes; keys visit, queries stay", why)
    if world == 1:
        return outer, Reason(1, "one device", "a group of one runs without communication")
    exposed = sum(phase.time_s for phase in model.phases(best.sizes) if phase.bound == "link")
    hidden = f"{1e3 * exposed:.3g} ms are not hidden"
    others = [c.time_s for c in candidates if c.option.transport != option.transport]
    other = {"ring": "gather", "gather": "ring"}[option.transport]
    choice = f"{1e3 * best.time_s:.3g} ms against {1e3 * min(others):.3g} by {other}; " if others else ""
    if option.transport == "ring" and others and min(others) < best.time_s:
        choice += f"that is not {_GATHER_GAIN:.1%} less, for more memory; "
    if "transport" in problem.setting:
        choice = "set by --set; "
    elif not others and nodes == 1 and world <= GATHER_LIMIT:
        choice = "a gather exceeds the budget; "
    if option.transport == "gather":
        text = f"gather among {world} devices: all keys at once"
        why = f"{choice}3 batches of messages a step at most, {hidden}"
    else:
        text = f"ring of {cluster.devices_per_node} devices, {world} hops in all"
        why = f"{choice}keys travel beside the work, {model.keys} at a time, and sums after it: {hidden}"
    return outer, Reason(1, text, why)


def _strategy_why(problem: Problem, best: _Candidate, candidates: list[_Candidate]) -> str:
    if "strategy" in problem.setting:
        return "set by --set"
    if best.option.specialisation.strategy == "torch":
        return "no GPU: panels with torch's matrix products"
    times: dict[str, float] = {}
    for candidate in candidates:
        if candidate.order != best.order and candidate.option.transport == best.option.transport:
            name = candidate.option.specialisation.strategy + " replayed" * candidate.option.replay
            times[name] = min(candidate.time_s, times.get(name, candidate.time_s))
    others = ", ".join(f"{name} {1e3 * time_s:.3g} ms" for name, time_s in times.items())
    text = f"predicted {1e3 * best.time_s:.3g} ms" + (f" against {others}" if others else "")
    if problem.dim > FUSED_DIM_LIMIT:
        text += f"; fused needs --dim at most {FUSED_DIM_LIMIT}"
    return text


def _literals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _literals(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_literals(inner) for inner in value]
    return value
