"""The candidates for a plan: strategies with their blocks and transports, and the sizes of their panels. Settings that
are impossible, or that apply to no strategy, are refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from infcl_gen.errors import InputError
from infcl_gen.hardware import Cluster
from infcl_gen.inputs.overrides import Overrides
from infcl_gen.inputs.problem import Problem
from infcl_gen.kernels import TILES, default_blocks, fused, hopper, hopper_slabs, tiles
from infcl_gen.kernels.choice import Choice
from infcl_gen.losses import Derivation
from infcl_gen.losses.printers import display
from infcl_gen.planning.model import CostModel, Sizes
from infcl_gen.runtime.table import Table
from infcl_gen.runtime.traits import Traits

SLAB_UNIT = 16  # columns: the smallest depth of a tile
PANEL_UNIT = 128  # rows per program of kernels that only touch vectors; panels are multiples of it
PANEL_CAP = 16384  # larger panels are hardly faster: 80 rows of overhead in 16 384
# Forward keeps no panel. At B = 65 536, D = 128 an H200 takes 10.5 ms, 11.9 ms by panels of 16 384.
FORWARD_CAP = 32768
PANEL_LIMIT = 1 << 22  # kernels address a tile of a panel with 32 bits: 256 rows of this length stay below 2^31
SPLIT_CAP = 4096  # tensor cores truncate sums: errors of 6e-6 in 145 ms (B = 65 536, D = 768); 2e-5 in 129 at 16 384
FUSED_CAP = 65536  # fused has no scratch; many rows fill the SMs evenly
# Predicted product times below which CUDA graphs are tried. They save 0.3 to 1.1 ms of a step up to 5 ms, and 0.1 ms of
# 7.7 to 16 ms; with a stash, which takes far more memory than graphs keep, 0.6 ms of 12 ms.
REPLAY_LIMIT_S, STASH_REPLAY_LIMIT_S = 5e-3, 50e-3
TORCH_CAP = 2048  # on a CPU a panel should stay near the caches
# Time that a gather must save, as its memory grows with the ranks. On 2 H200s with 64k rows each it saves 0.9 % from an
# idle device, and nothing behind other work; with 16k rows it costs 5 to 6 %.
GATHER_GAIN = 0.01
SATURATED = 512  # rows or keys of a rank per SM; more do not change a block, as a test proves
NVLINK_GBS = 100.0  # below it, over PCIe, GPUs may not reach each other's memory; unmeasured there
GATHER_LIMIT = 16  # ranks that may send to all at once, over the switch of their node


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice with sizes and their predicted peak. `order`: the choice's rank by preference."""

    order: int
    model: CostModel
    sizes: Sizes
    peak_bytes: int

    @functools.cached_property
    def time_s(self) -> float:
        """Predicted time from an idle device. Computed late, as memory excludes most candidates."""
        return math.fsum(phase.time_s for phase in self.model.phases(self.sizes))


class Choices:
    """The choices that problem, device and settings allow; equal choices are made once, for any number of rows."""

    def __init__(self, problem: Problem, derivation: Derivation, cluster: Cluster) -> None:
        self._problem, self._derivation, self._cluster = problem, derivation, cluster
        self._settings, self._profile = problem.settings, cluster.profile
        self._variants = functools.cache(self._make_variants)

    def models(self, queries: int, keys: int) -> list[CostModel]:
        """The cost models for this many queries and keys of all ranks, in order of preference at equal time.

        Raises InputError for a setting that is impossible, or that applies to no choice.
        """
        usable = self._usable(keys)
        rank_rows, rank_keys = (-(-total // self._cluster.devices) for total in (queries, keys))
        saturated = SATURATED * self._profile.multiprocessors
        variants: list[Choice] = []
        for name in usable:
            try:
                variants += self._variants(name, min(rank_rows, saturated), min(rank_keys, saturated))
            except InputError:
                if name == usable[-1] and not variants:
                    raise
        found = [choice for choice in variants if self._may_replay(choice, queries, keys)]
        if not found:
            own = " and ".join(self._derivation.traits.vectors)
            raise InputError(
                f"--set replay: on needs {f'a loss without {own}, ' if own else ''}kernels, an NVIDIA GPU and "
                "--devices 1, not"
                f" {' or '.join(usable)} on {self._cluster.devices} x {self._profile.name}; valid: off"
            )
        sizes = rank_rows, rank_keys, self._problem.negatives
        return [
            CostModel(choice, self._cluster, *sizes, self._table(choice, by_engines))
            for choice in found
            for by_engines in self._copy_engines
        ]

    def _table(self, choice: Choice, by_engines: bool) -> Table:
        shape = self._cluster.nodes, self._cluster.devices_per_node
        travelling = self._derivation.travelling(choice.dim, 2 + choice.positive_parts)
        how = {"triangle": choice.traits.triangle, "copy_engines": by_engines}
        table = Table(choice.transport, *shape, choice.keeps, travelling, **how)
        table = table.as_whole() if choice.rows and choice.gather else table
        return table if choice.of_keys else table.without_key_gradients()

    def _usable(self, keys: int) -> list[str]:
        wanted, given = self._settings.strategy, self._settings.keys
        names = ("torch",) if self._profile.target == "cpu" else ("fused", "panel", "stash", "rows")
        reasons = {name: self.impossible(name, keys) for name in ((wanted,) if wanted else names)}
        possible = [name for name, reason in reasons.items() if not reason]
        if not possible:
            flag = f"--set strategy: {wanted}" if wanted else f"--loss: {self._profile.name}"
            raise InputError(f"{flag} {reasons[wanted or 'panel']}")
        traits = self._derivation.traits
        usable = [name for name in possible if given <= _settings_of(name, traits)]
        if not usable:
            name = possible[0] if len(possible) == 1 else "panel"
            extra = sorted(given - _settings_of(name, traits)) or sorted(given)
            valid = set[str]().union(*(_settings_of(each, traits) for each in possible))
            raise InputError(
                f"--set {extra[0]}: does not apply to the strategies possible here"
                f" ({', '.join(possible)}); valid: {', '.join(sorted(valid))}"
            )
        if self._settings.stash_rows:
            usable = [name for name in usable if name == "stash"]
        elif self._problem.memory_budget_bytes is None and wanted is None:
            usable = [name for name in usable if name != "stash"]
        return usable

    def impossible(self, name: str, keys: int) -> str | None:
        """Why a strategy cannot be used, as the end of a sentence; None if it can."""
        problem, derivation = self._problem, self._derivation
        if name == "torch":
            return None
        if self._profile.target == "cpu":
            return "needs a GPU target; on the CPU the strategy is torch"
        if derivation.traits.triangle and name != "panel":
            return f"has no kernels for losses of one side, as {derivation.spec.name}; valid: panel, torch"
        if derivation.traits.pairs and name != "panel":
            return f"has no kernels for sums over pairs, as in the loss {derivation.spec.name}; valid: panel, torch"
        if derivation.prefixes and (reason := self._without_slabs(name)):
            return reason
        if problem.dtype == "fp16" and math.isinf(derivation.largest_slope):
            where = f"in fp16 for the loss {derivation.spec.name}, whose slopes may overflow"
            return f"has no kernels {where}; valid: bf16, fp32"
        if derivation.slope is None:
            logit = f"the loss {derivation.spec.name}: its logit {display(derivation.logit)} is not slope * z + shift"
            return f"has no kernels for {logit}; use --target cpu or --set strategy=torch"
        if derivation.traits.ids and name != "panel":
            return f"has no kernels that tell ids apart, as in the loss {derivation.spec.name}; valid: panel, torch"
        if derivation.traits.second and name != "panel":
            return f"has no kernels for two sums of a query, as in the loss {derivation.spec.name}; valid: panel, torch"
        if derivation.traits.guide and name != "panel":
            return f"has no kernels with a guide, as in the loss {derivation.spec.name}; valid: panel, torch"
        if derivation.traits.thresholds and name != "panel":
            of_loss = f"as in the loss {derivation.spec.name}"
            return f"has no kernels that leave pairs above a threshold out, {of_loss}; valid: panel, torch"
        if derivation.traits.without_positives and name != "panel":  # a sample may take a positive for the reference
            return (
                f"has no kernels that leave positives out, as in the loss {derivation.spec.name}; valid: panel, torch"
            )
        if derivation.traits.combined and name in ("fused", "stash"):
            what = f"where a query's term combines its sum and its positive, as in the loss {derivation.spec.name}"
            rows = "rows, " * (derivation.traits.known == "row")
            return f"has no kernels {what}; valid: panel, {rows}torch"
        if name == "fused" and (reason := fused.impossible(problem.dim, problem.dtype)):
            return reason
        if name == "rows" and (reason := self._without_rows(keys)):
            return reason
        if name == "stash" and self._cluster.devices > 1:
            return "keeps tiles of the rank's own keys, and needs --devices 1"
        if name == "stash" and keys > PANEL_LIMIT:
            return f"addresses its rows with 32 bits: --keys at most {PANEL_LIMIT}, not {keys}"
        if name == "stash" and problem.dtype != "bf16":
            return f"keeps 8 bits of each probability, which would lose the accuracy of {problem.dtype}; valid: bf16"
        return None

    def _without_slabs(self, name: str) -> str | None:
        """Why kernels cannot sweep all prefixes at once, as the end of a sentence; None if they can."""
        if name != "panel":
            return "has no kernels for losses over prefixes; valid: panel, torch"
        if self._problem.dtype == "fp32":
            return "has kernels for losses over prefixes in bf16 and fp16, not in fp32: give --dtype bf16"
        if self._problem.dtype == "fp16" and self._derivation.traits.renormalised:
            return "has no kernels for cosines in fp16, whose range gradients over norms leave: give --dtype bf16"
        for prefix in self._derivation.prefixes[:-1]:
            if prefix % SLAB_UNIT:
                below = prefix // SLAB_UNIT * SLAB_UNIT
                near = " or ".join(str(each) for each in (below, below + SLAB_UNIT) if each)
                return f"needs prefixes in multiples of {SLAB_UNIT}, not {prefix}: give --prefixes with {near} there"
        return None

    def _without_rows(self, keys: int) -> str | None:
        """Why gradients cannot follow a row of panels in forward, as the end of a sentence; None if they can."""
        if self._derivation.traits.known != "row":
            return f"needs gradients that follow from the sums of queries alone, unlike those of {self._problem.loss}"
        if self._cluster.devices > 1 and "gather" not in dict(self._transports):
            return "needs all keys on each device: --devices 1, or a gather"
        if self._problem.dtype != "bf16":
            return (
                f"keeps 8 bits of each probability, which would lose the accuracy of {self._problem.dtype}; valid: bf16"
            )
        if keys > PANEL_LIMIT:
            return f"addresses its rows with 32 bits: --keys at most {PANEL_LIMIT}, not {keys}"
        return None

    def _make_variants(self, name: str, rows: int, keys: int) -> list[Choice]:
        transports, choice = self._transports, self._choice(name, rows, keys)
        if choice.rows:
            transports = tuple(way for way in transports if way[0] != "ring")
        found = [dataclasses.replace(choice, transport=transport, keeps=keeps) for transport, keeps in transports]
        # Sums over pairs and losses of one side are launched one by one, and no graph reads numbers of single queries,
        # such as thresholds, or the features of a guide.
        traits = choice.traits
        single = traits.pairs or traits.triangle or traits.vectors or traits.guided or traits.slabs
        recordable = name != "torch" and not single and not traits.thresholds
        if recordable and self._profile.target == "cuda" and self._cluster.devices == 1:
            found.append(dataclasses.replace(choice, replay=True))
        if choice.at_once and choice.separate:
            found += [dataclasses.replace(each, wider=False) for each in found]
        return found

    def _may_replay(self, choice: Choice, queries: int, keys: int) -> bool:
        """Whether a choice uses CUDA graphs as set or, without a setting, only in short steps: graphs keep memory."""
        if self._settings.replay is not None:
            return choice.replay == self._settings.replay
        flops = 8 * queries * keys * choice.dim
        limit_s = STASH_REPLAY_LIMIT_S if choice.strategy == "stash" else REPLAY_LIMIT_S
        return not choice.replay or flops < limit_s * self._profile.matmul_tflops[choice.dtype].value * 1e12

    @functools.cached_property
    def _transports(self) -> tuple[tuple[str, bool], ...]:
        """The possible pairs of `Choice.transport` and `Choice.keeps`."""
        wanted, keeps, devices = self._settings.transport, self._settings.keeps, self._cluster.devices
        if keeps is not None and (devices == 1 or wanted == "gather"):
            raise InputError("--set keeps: is for a ring of several devices; give --devices, and no other transport")
        if wanted is not None and devices == 1:
            raise InputError("--set transport: keys travel between devices, and there is one; give --devices")
        impossible = f"at most {GATHER_LIMIT} devices, not {devices}" if devices > GATHER_LIMIT else ""
        impossible = f"not between {self._cluster.nodes} nodes" if self._cluster.nodes > 1 else impossible
        if wanted == "gather" and impossible:
            raise InputError(f"--set transport: gather is for the devices of one node, {impossible}; valid: ring")
        if devices == 1:
            return (("none", False),)
        traits, name = self._derivation.traits, self._derivation.spec.name
        if keeps and traits.at_once:
            raise InputError(f"--set keeps: keys stay for backward, which needs none of them in {name}; valid: off")
        if keeps and traits.crossed:
            raise InputError(f"--set keeps: in {name} keys travel with their factors in backward; valid: off")
        usable = [keep for keep in (True, False) if keeps in (None, keep) and (traits.keeps_keys or not keep)]
        rings = tuple(("ring", keep) for keep in usable)
        gathers = () if impossible or keeps is not None else (("gather", False),)
        return {"ring": rings, "gather": gathers, None: rings + gathers}[wanted]

    @functools.cached_property
    def _copy_engines(self) -> tuple[bool, ...]:
        """Whether these may carry messages. It takes memory, and saves two H200s 0.3 to 1.3 % at B = 65 536."""
        wanted, cluster = self._settings.copy_engines, self._cluster
        lacking = "" if cluster.devices > 1 else "messages need several devices; give --devices"
        lacking = lacking if cluster.nodes == 1 else "they reach the GPUs of one node; valid: off"
        lacking = lacking if self._profile.target == "cuda" else f"{self._profile.name} is no NVIDIA GPU; valid: off"
        if wanted and lacking:
            raise InputError(f"--set copy_engines: {lacking}")
        if wanted is not None:
            return (wanted,)
        return (True, False) if not lacking and cluster.link_gbs.value >= NVLINK_GBS else (False,)

    def _choice(self, name: str, rows: int, keys: int) -> Choice:
        problem, derivation, profile = self._problem, self._derivation, self._profile
        choice = Choice(
            strategy=name,
            dim=problem.dim,
            dtype=problem.dtype,
            precision=problem.precision,
            frozen=problem.frozen,
            target=profile.target,
            arch=profile.arch,
            traits=derivation.traits,
            product_by=self._product_by(name),
            world_size=self._cluster.devices,
        )
        choice = dataclasses.replace(choice, descriptors=self._descriptors(choice))
        blocks = default_blocks(profile, choice, rows, keys, {kernel for kernel, _, _ in problem.settings.blocks})
        for kernel, field, count in problem.settings.blocks:
            blocks[kernel] = dataclasses.replace(blocks[kernel], **{field: count})
        if choice.stash:  # the forward keeps the gradient's tiles
            if {"rows", "keys"} & problem.settings.block("forward").keys():
                raise InputError(
                    f"--set forward.rows, forward.keys: {name} keeps the gradient's tiles; set gradient.* instead"
                )
            tile = blocks["gradient"]
            blocks["forward"] = dataclasses.replace(blocks["forward"], rows=tile.rows, keys=tile.keys)
        for kernel, field, _ in problem.settings.blocks:
            for changed in ("gradient", "forward") if kernel == "gradient" and choice.stash else (kernel,):
                if found := TILES[changed].violations(blocks[changed], choice, profile):
                    raise InputError(f"--set {kernel}.{field}: the {changed} block is illegal: {'; '.join(found)}")
        choice = dataclasses.replace(choice, blocks=blocks)
        return dataclasses.replace(choice, hopper_stages=hopper.stages(choice) or hopper_slabs.stages(choice))

    def _product_by(self, name: str) -> str:
        wanted, target = self._settings.products, self._profile.target
        if name in ("torch", "fused"):
            return {"torch": "torch", "fused": "triton"}[name]
        if wanted == "library" and target != "cuda":
            raise InputError(f"--set products: {target} has no library product with fp32 output; valid: triton")
        return wanted or ("library" if target == "cuda" else "triton")

    def _descriptors(self, choice: Choice) -> bool:
        wanted, profile, row = self._settings.descriptors, self._profile, f"a row of {choice.dim} {choice.dtype}"
        if wanted and not profile.tensor_descriptors:
            raise InputError(f"--set descriptors: {profile.name} has no tensor descriptors; valid: off")
        if wanted and not choice.aligned:
            raise InputError(f"--set descriptors: {row} is not a multiple of 16 bytes; valid: off")
        by_default = profile.architecture.products_read_shared and choice.strategy != "torch"
        return (by_default if wanted is None else wanted) and profile.tensor_descriptors and choice.aligned


@functools.cache
def _settings_of(name: str, traits: Traits) -> frozenset[str]:
    """The keys of `--set` that apply to a strategy for a loss."""
    of_tiles = (each.settings for each in tiles(name, traits))
    keys = {"strategy", "panel_rows", "records", "transport", "keeps", "copy_engines"}.union(*of_tiles)
    if name not in ("fused", "rows") and not traits.triangle:  # whose panels are square
        keys |= {"panel_keys"}
    if name != "torch":
        single = traits.triangle or traits.guide or traits.thresholds or traits.slabs
        keys |= {"descriptors"} if single else {"descriptors", "replay"}
    return frozenset(keys | {"stash_rows"} if name == "stash" else keys)


def sizes_of(model: CostModel, settings: Overrides, smallest: bool = False) -> Iterator[tuple[Sizes, int]]:
    """The sizes to consider with their peaks, or only the smallest: the peak grows with each size."""
    strategy = model.choice.strategy
    row_unit, key_unit = _units(model.choice)
    cap = SPLIT_CAP if model.choice.split else {"fused": FUSED_CAP, "torch": TORCH_CAP}.get(strategy, PANEL_CAP)
    all_rows = _sides(settings, "panel_rows", model.rows, row_unit, cap, smallest)
    keys = model.keys * (model.choice.world_size if model.choice.rows else 1)
    all_keys = [
        _padded(keys, key_unit)
    ]  # a fused program walks all of a hop, and a row of panels has those of all hops
    if strategy not in ("fused", "rows"):
        all_keys = _sides(settings, "panel_keys", model.keys, key_unit, cap, smallest)
    if strategy == "stash":
        # The stash is a third dimension: take every other panel, and the smallest.
        all_rows, all_keys = (sorted({*sides[::2], sides[-1]}, reverse=True) for sides in (all_rows, all_keys))
    if model.choice.traits.triangle:
        for side in _sides(settings, "panel_rows", model.rows, max(row_unit, key_unit), cap, smallest):
            yield _with_forward(model, side, side, 0)
        return
    least = all_rows[-1], all_keys[-1]
    for rows, keys in itertools.product(all_rows, all_keys):
        # Near-square panels do the most work per byte; one side is longer only where the other cannot grow.
        lean = (keys > 4 * rows and rows < all_rows[0]) or (rows > 4 * keys and keys < all_keys[0])
        if not lean or (rows, keys) == least or strategy in ("fused", "rows"):
            for stash_rows in _stashes(model, settings, rows, smallest):
                yield _with_forward(model, rows, keys, stash_rows)


def _units(choice: Choice) -> tuple[int, int]:
    """Units of panel rows and panel keys: whole blocks of every kernel that walks a backward panel."""
    if choice.strategy == "torch":
        return 64, 64
    b = choice.blocks
    if choice.strategy == "fused":
        return max(PANEL_UNIT, b["fused"].rows), b["fused"].keys
    walked = [b["gradient"].rows, *[b["forward"].rows] * choice.rows]
    rows = max(PANEL_UNIT, *walked, b["product"].rows, b["product"].depth)
    return rows, max(b["gradient"].keys, b["product"].rows, b["product"].depth)


def _stashes(model: CostModel, settings: Overrides, rows: int, smallest: bool) -> list[int]:
    """Rows of the stash to consider with panels of `rows`, or only the smallest stash; 0 for other strategies."""
    if model.choice.strategy != "stash":
        return [0]
    slices, stash = -(-model.rows // rows), settings.stash_rows
    if stash is None:
        return sorted({rows * (slices * step // 6 or 1) for step in range(1 if smallest else 7)})
    asked = settings.panel_rows or rows  # `rows` are cut to the problem
    if smallest and stash % asked:
        raise InputError(f"--set stash_rows: {stash} must be a multiple of the panel rows, {asked}")
    return [] if stash % asked else [min(stash, slices * rows)]


def _with_forward(model: CostModel, rows: int, keys: int, stash_rows: int) -> tuple[Sizes, int]:
    """Sizes with the largest forward panel that needs no more memory than backward, and their peak."""
    if model.choice.strategy in ("torch", "stash", "rows"):  # forward takes the backward panel
        sizes = Sizes(rows, keys, rows, keys, stash_rows)
        return sizes, model.memory(sizes).peak_bytes
    block = model.choice.blocks["forward"]
    if model.choice.traits.at_once:  # without gradients it has no scratch but for halves
        cap = SPLIT_CAP if model.choice.split else FORWARD_CAP
        sizes = Sizes(_split(model.rows, block.rows, cap), _split(model.keys, block.keys, cap), rows, keys)
        return sizes, model.memory(sizes).peak_bytes
    row_cap = key_cap = FORWARD_CAP
    square = max(block.rows, block.keys) if model.choice.traits.triangle else 0
    while True:
        forward = _split(model.rows, block.rows, row_cap), _split(model.keys, block.keys, key_cap)
        if square:
            row_cap = min(row_cap, key_cap)
            forward = (_split(model.rows, square, max(square, row_cap)),) * 2
        sizes = Sizes(*forward, rows, keys)
        memory = model.memory(sizes)
        fits = memory.forward <= max(memory.backward, memory.finish)
        if fits or (row_cap, key_cap) == (block.rows, block.keys) or row_cap <= square:
            return sizes, memory.peak_bytes
        if key_cap >= row_cap and key_cap > block.keys:
            key_cap = max(block.keys, key_cap // 2)
        else:
            row_cap = max(block.rows, row_cap // 2)


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _split(count: int, unit: int, cap: int) -> int:
    """Rows of equal panels, each at most `cap` (a multiple of `unit`), that cover `count` rows."""
    panels = -(-count // cap)
    return _padded(-(-count // panels), unit)


def _sides(settings: Overrides, key: str, count: int, unit: int, cap: int, smallest: bool) -> list[int]:
    """Panel sizes to consider, from the largest to the unit: equal panels, whose number grows by a third.

    Sizes are multiples of an eighth of a power of two: whole waves of blocks suit matrix products. A size that is set
    is the only one, cut to the padded problem. Raises InputError if it is impossible.
    """
    value: int | None = getattr(settings, key)
    if value is not None:
        if value % unit:
            raise InputError(f"--set {key}: {value} must be a multiple of {unit}, the blocks that walk a panel")
        if min(value, count) > PANEL_LIMIT:
            raise InputError(f"--set {key}: at most {PANEL_LIMIT}; {PANEL_CAP} is already as fast")
        return [min(value, _padded(count, unit))]
    found, rows, panels = {unit}, 0, -(-count // cap)
    while rows != unit and not smallest:
        even = -(-count // panels)
        rows = min(_padded(even, max(unit, (1 << even.bit_length() - 1) // 8)), _padded(count, unit))
        found.add(rows)
        panels = max(panels + 1, panels * 4 // 3)
    return sorted(found, reverse=True)
