"""What a plan may be made of: the strategies that a problem allows, with their blocks and transports, and the sizes
that each may have. What does not apply, or cannot be, is refused here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from infcl_gen.errors import InputError
from infcl_gen.planning.cost import CostModel, Sizes
from infcl_gen.planning.levels import (
    FUSED_DIM_LIMIT,
    KERNELS_OF,
    PANEL_UNIT,
    Block,
    Specialisation,
    default_blocks,
    violations,
)
from infcl_gen.planning.schedule import Schedule, gather_schedule, ring_schedule
from infcl_gen.planning.terms import Variant
from infcl_gen.problem import BLOCK_FIELDS, DTYPE_BYTES, parse_count

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


@dataclasses.dataclass(frozen=True)
class Option:
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


def options_of(problem: Problem, derivation: Derivation, cluster: Cluster) -> list[Option]:
    """The strategies that problem, device and settings allow, in order of preference at equal predicted time.

    Raises InputError for a setting that is impossible here, or that applies to none of them.
    """
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
    found: list[Option] = []
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


def _option(name: str, problem: Problem, derivation: Derivation, cluster: Cluster) -> Option:
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
    return Option(specialisation, products, False, "ring", False, blocks, derivation, cluster)


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
