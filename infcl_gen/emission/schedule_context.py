"""What the templates of a Triton schedule read: constants, buffers, launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infcl_gen.emission.launches import launches
from infcl_gen.emission.render import ABSENT
from infcl_gen.hardware import DeviceProfile
from infcl_gen.inputs.problem import TORCH_DTYPES
from infcl_gen.kernels import TILES, families, forward, hopper_slabs
from infcl_gen.kernels.elementwise import EXACT_DEPTH, LIBRARY_MULTIPLE
from infcl_gen.kernels.pairs import small_beside_masks
from infcl_gen.kernels.statistics import LOSS_ROWS
from infcl_gen.planning.planner import Plan

# What the gradients of scale and bias take besides products of features.
ABOUT_SLOPES = ("parts of the sum of M * dL/dx", "what queries add to them (2, M)")
ABOUT_POOLED = """\
pooled (2,), fp64: over the positives of all queries the log-sum-exp, and the sum of the terms' slopes by it."""
ABOUT_MEAN = "mean (D,) is added to each row of total, times the share of the mean of all logits."
ABOUT_RADIAL = "radial (slabs, rows): a row of total loses so many times its x, after the dots, slab by slab."
RING_WAVES = 4  # of programs with several ranks: communication occupies SMs, and one wave takes 1.2 to 1.6 % longer

_ROOM_OF_FORWARD = "rows, keys, device = min(q.shape[0], FORWARD_ROWS), min(most_keys, FORWARD_KEYS), q.device"
_TURN = ("turn", "which of two rows of sizes the last launch has read", "0")


def schedule_context(
    name: str,
    plan: Plan,
    profile: DeviceProfile,
    options: Mapping[str, Mapping[str, int]],
    exponent: int,
    weights: Sequence[float] = (),
) -> dict[str, Any]:
    """The names in triton/schedule*.py.jinja. `options`: warps and stages by kernel; `exponent`: of the gradient;
    `weights`: of the prefixes."""
    panels = plan.strategy != "fused"
    variants = [each for family in families(plan) for each in family.kernels(plan) if each.replaces]
    described = any(argument.block for kernel in variants for argument in kernel.arguments)
    triangle = plan.traits.triangle
    first_key = "row0 * block.own" if triangle else "0"  # of a row of panels
    launch = launches(plan, options)
    sweep = f"panels of {plan.panel_rows} queries x {plan.panel_keys} keys of g -> dq += g k, dk += g^T q"
    longest = ", LONGEST_STRIP" if _longest_strip(plan)[0] else ""
    together = max((kernel.row_blocks for kernel in variants), default=1)  # row blocks of a program
    times, row_blocks, walks = "", "cdiv(m, rows)", "row_blocks"
    if together > 1:
        times, row_blocks, walks = f"{together} * ", f"cdiv(m, {together} * rows)", f"cdiv(row_blocks, {together})"
    of_gradient = "" if plan.rows else longest
    own_strip = f"{times}strip_blocks({row_blocks}, cdiv(n, columns), GRADIENT_STRIPS, GRADIENT_PROGRAMS{of_gradient})"
    ratios = "ratios" in options
    imports = {
        "INTERPRETED": True,
        "cdiv": True,
        "descriptor": described or (plan.keeps_tiles and plan.descriptors),
        "launch": True,
        "library_legal": panels,
        "operands": True,
        "panel": panels or ratios,
        "panel_columns": panels,
        "runs_variant": bool(variants),
        "strip_blocks": True,
    }
    words = ", ".join(word for word, used in imports.items() if used)
    pieces = {
        "ratios": ratios and not plan.slabs, "halves": plan.split, "triangle": triangle, "merge": plan.merges_sides,
        "several": plan.traits.sorted_ids, "guided": plan.traits.by_guide,
    }  # fmt: skip
    flagged = "gradient_wide" in options
    backward_buffers = _gradient_buffers(plan, ratios, flagged) if panels else _fused_buffers(ratios)
    return {
        "name": name,
        "operand_dtype": TORCH_DTYPES[plan.operand_dtype],
        "part_as_halves": f"part = _as_halves(part, scratch.halves, written=key0 > {first_key})"
        if plan.split
        else ABSENT,
        "part_of_stash": "scratch.kept = _stash_panel(stash, block.k.shape[0], row0, key0)" if plan.stash else ABSENT,
        "placed": plan.traits.placed,
        "apart": plan.traits.apart,
        "triangle": triangle,
        "and_of_columns": ", and to those of its columns" * triangle,
        "noted_positives": _BY_GUIDED_SIDES
        if plan.traits.guided_sides
        else _BY_GUIDE
        if plan.traits.by_guide
        else "_positives(part)"
        if plan.traits.sorted_ids
        else "_positives(part, scratch)",
        "positives_of_panel": "_gradient_positives(block, g)"
        if plan.traits.apart and not plan.traits.renormalised
        else ABSENT,
        "positives_first": "_gradient_positives(block, scratch)" if plan.traits.renormalised else ABSENT,
        "about_left_of_positives": _G_OF_POSITIVES[plan.traits.renormalised],
        "left_of_positives": "scratch" if plan.traits.renormalised else "g",
        "renormalised": plan.traits.renormalised,
        "radial_of_queries": _RADIAL_OF_QUERIES if plan.traits.renormalised else ABSENT,
        "radial_of_keys": _RADIAL_OF_KEYS if plan.traits.renormalised else ABSENT,
        "no_positives": _NO_POSITIVES if plan.traits.sorted_ids else ABSENT,
        "ids_of_forward": _SORTED_IDS.format("FORWARD_ROWS, FORWARD_KEYS") if plan.traits.sorted_ids else ABSENT,
        "ids_of_backward": _SORTED_IDS.format("PANEL_ROWS, PANEL_KEYS") if plan.traits.sorted_ids else ABSENT,
        "unless_it_has_positives": ABSENT if plan.traits.sorted_ids else _UNLESS_IT_HAS_POSITIVES,
        "combined": plan.traits.combined,
        "and_pooled": ", pooled" * bool(plan.traits.pooled) + ", columns" * plan.traits.columns_of_ids,
        "about_pooled": f"\n\n    {ABOUT_POOLED}\n    " if plan.traits.pooled else "",
        "terms_of_queries": "block.positive[3].numel(), block.positive.flatten(1).contiguous()"
        if plan.slabs
        else "block.q.shape[0], block.positive",
        "combine_block": "combine(block)" if plan.traits.combined else ABSENT,
        "read_for_positives": _WITH_FEATURES
        if plan.traits.sorted_ids
        else _POSITIVES_ALONE
        if plan.traits.combined and not triangle
        else _WITH_NUMBERS,
        "rows_or_slopes": "slopes" if plan.traits.sums_slopes else "rows",
        "and_slopes": f", and {ABOUT_SLOPES[plan.traits.combined]}" * plan.traits.sums_slopes,
        "and_mean": ", *, mean" * plan.traits.means + ", *, radial" * plan.traits.renormalised,
        "about_mean": ABOUT_MEAN if plan.traits.means else ABOUT_RADIAL if plan.traits.renormalised else ABSENT,
        "and_share": ", share=None" * plan.rows,
        "about_share": "share (m,): what each row of total is multiplied by, before all that." if plan.rows else ABSENT,
        "or_positives": "block.meets_diagonal() or " * plan.traits.placed,
        "rows_of_positives": f"rows = {_ROWS}" if plan.traits.placed else ABSENT,
        "and_rows": "rows," if plan.traits.placed else ABSENT,
        "stash": plan.stash,
        "rows": plan.rows,
        "at_once": plan.at_once,
        "rows_sweep": f"{plan.panel_rows} queries x all keys of p -> sums of the rows -> dq = g k, dk += g^T q",
        "split": plan.split,
        "descriptors": plan.descriptors,
        "keeps_keys": forward.keeps_keys(plan.blocks["forward"], plan),
        "ratios": ratios,
        "replay": "copy_inputs" in options,
        "gather": "merge_ranks" in options,
        "guided_sides": plan.traits.guided_sides,
        "forward_panel": f"{plan.forward_rows} queries x {plan.forward_keys} keys",
        "backward_sweep": sweep if panels else "fused: g never leaves the SM; one launch for dq, one for dk",
        "most_terms": "max(block.q.shape[0], block.k.shape[0])" if plan.traits.has_keys else "block.q.shape[0]",
        # The constant of kernels.py: how many rows share a reference.
        "visiting_rows": "GRADIENT_KEYS" if panels else "FUSED_KEYS",
        "add_product": "_add_split_product" if plan.split else "_add_products" if plan.slabs else "_add_product",
        "keys_of_product": "part.k[:, :DIM], part.k[:, DIM : 2 * DIM]" if plan.split else "part.k",
        "queries_of_product": "part.q[:, DIM : 2 * DIM], part.q[:, :DIM]" if plan.split else "part.q",
        "shorter_strip": _SHORTER_STRIP if triangle else ABSENT,
        "mirrored": "_mirror(block, g)" if triangle else ABSENT,
        "strip_of_slabs": f"{times}strip_blocks({walks}, key_blocks, FORWARD_STRIPS, FORWARD_PROGRAMS)",
        "gradient_strip": "_strip(m, n)  # as the forward kept it" if plan.stash else own_strip,
        # Further arguments of a call.
        "longest_strip": longest,
        "wide_result": "" if plan.operand_bytes > 2 else "out_dtype=torch.float32, ",
        "imports": f"(\n    {words},\n)" if len(words) > 90 else words,
        "constants": _constants(plan, profile, exponent) + _of_prefixes(plan, weights),
        "forward_buffers": _forward_buffers(plan),
        **(_OF_ALL_QUERIES if plan.traits.at_once else _OF_EACH_QUERY),
        **(dict.fromkeys(("of_scratch", "and_fresh"), ", scratch") if plan.traits.small_first else {}),
        "for_each_program": f"{'four' if plan.traits.small_first else 'two'} for each program of a panel",
        "next_turn": f"scratch.turn ^= {'1' if small_beside_masks(plan) else 'not masked'}"
        if plan.traits.small_first
        else ABSENT,
        "room_of_forward": ABSENT if plan.traits.at_once and not plan.split else _ROOM_OF_FORWARD,
        "numbers_of_programs": 2 + 2 * plan.traits.small_first,
        "backward_buffers": backward_buffers,
        "rows_buffers": _rows_buffers(plan),
        "walked": "key" if plan.rows else "row",
        "owned": "row" if plan.rows else "key",
        "strip_of_panel": "_strip(m, n) if strip is None else strip" if plan.rows else "_strip(m, n)",
        "grid_of_strips": _GRIDS[plan.rows],
        "and_parts": ", strip=None, referenced=False" * plan.rows,
        "about_parts": _ABOUT_PARTS * plan.rows,
        "own_references": _OWN_REFERENCES + launch["row_references"].replace("\n", "\n    ") if plan.rows else ABSENT,
        "inner_of_library": _WHOLE if plan.narrow_products else f"inner if g.stride(1) != 1 else {_WHOLE}",
        "pieces": [f"triton/schedule_{piece}.py.jinja" for piece, used in pieces.items() if used],
        "launch": launch,
        "both_axes": plan.both_axes,
        "product_columns": "x.shape[1]" if plan.traits.slabs else "DIM",
        "wide_launch": launch["gradient_wide"],
        "first_key": first_key,
        "sizes_of_part": ABSENT if triangle or plan.traits.second else "m, n = part.q.shape[0], part.k.shape[0]",
        "merged": _merged(plan) or launch["merge"],
        "second_of_rows": _SECOND_OF_ROWS if plan.traits.second else ABSENT,
        "second_of_columns": _SECOND_OF_COLUMNS if plan.traits.second else ABSENT,
        "whole_on_the_diagonal": _WHOLE_ON_THE_DIAGONAL if triangle else ABSENT,
    }


_POSITIVES_ALONE = "positive = block.positive.unbind()"
_WITH_NUMBERS = "scale, bias, positive = block.scale, block.bias, block.positive.unbind()"
_WITH_FEATURES = "q, k, scale, bias = block[:4]"
_G_OF_POSITIVES = (
    "Puts g of this panel's positives in the place of what `gradient` takes them for.",
    "g of this panel's positives, of each prefix, which `gradient` reads.",
)
_RADIAL_OF_QUERIES = """\
_add_radial(part.query_radial, scratch.row_radial, cdiv(part.k.shape[0], kernels.GRADIENT_KEYS.value),
                        fresh_dq and key0 == 0)"""
_RADIAL_OF_KEYS = """\
_add_radial(part.key_radial, scratch.key_radial, cdiv(part.q.shape[0], kernels.GRADIENT_ROWS.value),
                        fresh_dk and row0 == 0)"""
_GRIDS = "(cdiv(n, columns) * cdiv(cdiv(m, rows), strip),)", "(cdiv(m, rows) * cdiv(cdiv(n, columns), strip),)"
_ABOUT_PARTS = """ strip: key blocks that a program walks, given where this panel is part
    of a larger one, whose strips it keeps. referenced: its queries have their references."""
_OWN_REFERENCES = "if not referenced:\n        "
_UNLESS_IT_HAS_POSITIVES = """\
if not block.meets_diagonal():
    return"""
_BY_GUIDE = """\
parts, guide = cdiv(n, kernels.FORWARD_KEYS.value), [part.positive[row] for row in (1, 0, 4)]
_merge_guided(scratch.row_guide, parts, guide, fresh_queries and key0 == 0)"""
_BY_GUIDED_SIDES = """\
parts, strips = cdiv(n, kernels.FORWARD_KEYS.value), cdiv(cdiv(m, kernels.FORWARD_ROWS.value), _strip(m, n))
_merge_guided(scratch.row_guide, parts, part.positive[-3:], fresh_queries and key0 == 0)
_merge_guided(scratch.key_guide, strips, part.key_guide, fresh_keys and row0 == 0)
_positives(part, scratch)"""
_SORTED_IDS = "block = _with_sorted_ids(block, {})"
_NO_POSITIVES = """\
if fresh_queries:
    block.positive.zero_()"""
_MERGED = "_merge_sides(part, scratch, fresh_queries and key0 == 0, fresh_keys and row0 == 0)"
_MERGED_BY_ROWS = """\
parts = cdiv(cdiv(n, kernels.FORWARD_KEYS.value), _strip(m, n))
    _merge(scratch.row_parts, parts, part.queries, fresh_queries and key0 == 0)"""  # indented as launches are
_MERGED_TWICE = """\
fresh, parts = fresh_queries and key0 == 0, cdiv(part.k.shape[0], kernels.FORWARD_KEYS.value)
    _merge(scratch.row_parts, parts, part.queries, fresh)
    _merge(scratch.row_second, parts, part.second, fresh)"""  # indented as launches are
_SECOND_OF_ROWS = "_merge(scratch.row_second, cdiv(n, kernels.FORWARD_KEYS.value), block.second, fresh_rows)"
_SECOND_OF_COLUMNS = "_merge(scratch.key_second, strips, block.key_second, fresh)"
_SHORTER_STRIP = """\
if block.diagonal:  # half of the strips are shorter, or empty
    strip = max(cdiv(cdiv(m, rows), GRADIENT_STRIPS), strip // DIAGONAL_STRIPS)"""
_WHOLE_ON_THE_DIAGONAL = """\
if part.diagonal:  # panels there are whole
    continue"""


def _merged(plan: Plan) -> str:
    """How a panel's partial sums are merged where `merges_sides` is true; else ""."""
    if plan.traits.triangle:
        return _MERGED
    return _MERGED_TWICE if plan.traits.second else _MERGED_BY_ROWS * plan.rows


def _constants(plan: Plan, profile: DeviceProfile, exponent: int) -> list[tuple[str, Any, str]]:
    panels, (longest, why) = plan.strategy != "fused", _longest_strip(plan)
    combined = plan.traits.combined
    slow = "others run on kernels for old GPUs, up to 6 times as slow"
    found: list[tuple[str, Any, str, bool]] = [
        ("GRADIENT_EXPONENT", exponent, "gradients of logits are kept times 2 to this power", True),
        ("DIM", plan.dim, "of the embedding", True),
        (
            "POSITIVE_PARTS",
            plan.positive_parts,
            "nothing is kept of a query's positive"
            if plan.traits.pairs
            else "of each query's positive: z, and the references of its sums"
            + "; then what `combine` leaves" * combined,
            not plan.traits.at_once,
        ),
        (
            "SUMS_LACK_SHIFT",
            True,
            "statistics are of what a logit has by z, and nothing else",
            plan.traits.pooled > 0 or plan.traits.columns_of_ids,
        ),
        ("FORWARD_ROWS", plan.forward_rows, "forward panel", True),
        ("FORWARD_KEYS", plan.forward_keys, "of the same", True),
        ("PANEL_ROWS", plan.panel_rows, "backward panel; on one device dq accumulates over this many rows", True),
        ("PANEL_KEYS", plan.panel_keys, "of the same", panels),
        ("STASH_ROWS", plan.stash_rows, "whole panels: their tiles are kept", plan.stash),
        ("FINISH_ROWS", plan.blocks["finish"].rows, "of one program", True),
        ("LOSS_ROWS", LOSS_ROWS, "queries, and keys, that one program takes the terms of", not plan.traits.pairs),
        ("LONGEST_STRIP", longest, f"{'key' if plan.rows else 'row'} blocks: {why}", longest > 0),
        ("DESCRIPTORS", plan.descriptors, "tensor descriptors, where address and strides allow them", True),
        ("LIBRARY_PRODUCTS", plan.library, "g times features, where the matrix library takes the strides", panels),
        ("EXACT_DEPTH", EXACT_DEPTH, "of one product: tensor cores cut what they add to a long sum", plan.split),
        ("LIBRARY_MULTIPLE", LIBRARY_MULTIPLE, f"of keys in a library product: {slow}", plan.library),
        ("DIAGONAL_STRIPS", 4, "for one, in a panel whose tiles below the diagonal are left out", plan.traits.triangle),
        ("LIBRARY_MULTIPLE", 1, "no library products", not plan.library),
    ]
    at_once = "that run at once"
    if plan.world_size > 1:
        at_once = f"{RING_WAVES} times as many as run at once: messages take multiprocessors from them"
    walked = [("forward", plan.forward_rows, plan.forward_keys), ("gradient", plan.panel_rows, plan.panel_keys)]
    for kernel, rows, keys in walked[: 1 + ("gradient" in plan.blocks and not plan.stash)]:
        block = plan.blocks[kernel]
        if plan.hopper_stages:
            programs = profile.multiprocessors * hopper_slabs.programs(plan, kernel)
        else:
            programs = TILES[kernel].resident_programs(block, plan, profile)
        programs *= RING_WAVES if plan.world_size > 1 else 1
        strips = TILES[kernel].strips(rows, keys, block, plan)
        owned = "queries" if plan.rows and kernel == "forward" else "keys"
        found.append((f"{kernel.upper()}_STRIPS", strips, f"at most, for each block of {owned}", True))
        found.append((f"{kernel.upper()}_PROGRAMS", programs, at_once, True))
    return [(name, value, note) for name, value, note, wanted in found if wanted]


def _of_prefixes(plan: Plan, weights: Sequence[float]) -> list[tuple[str, Any, str]]:
    slabs = ", ".join(f"slice({slab.start}, {slab.stop})" for slab in plan.slabs)
    found = [
        ("PREFIXES", plan.traits.prefixes, "columns of the features, of which each has a loss"),
        ("WEIGHTS", tuple(weights), "of these losses in their sum"),
        ("SLABS", f"({slabs},)", "what a prefix adds to the one before"),
    ]
    return found if plan.slabs else []


def _longest_strip(plan: Plan) -> tuple[int, str]:
    """Blocks that one program of the forward walks at most (0: no limit), and why."""
    alone = max(family.longest_strip for family in families(plan))
    if alone:
        return alone, "one program an SM hides no other's start"
    if forward.keeps_keys(plan.blocks["forward"], plan):
        return forward.KEEPING_STRIP, "a program reads its keys once"
    if plan.rows and plan.world_size > 1:
        own = plan.keys_per_rank // plan.blocks["forward"].keys
        longest = max(1, min(forward.ROWS_STRIP, own // forward.EARLY_STRIPS))
        return longest, "a rank begins with whole strips of its own keys"
    if plan.rows:
        return forward.ROWS_STRIP, "longer strips are not faster"
    return 0, ""


_WHOLE = "inner // LIBRARY_MULTIPLE * LIBRARY_MULTIPLE"
_ROWS = "cdiv(min(q.shape[0], max(FORWARD_ROWS, PANEL_ROWS)), kernels.VECTOR_ROWS.value)"
_WIDE_RANGE = "of each strip, whether its range is wide"
_HALVES = "of the features of queries and keys"
_KEPT = "tiles and references of this panel, if they are kept"
_RATIOS = "room for what `_with_ratios` gives"


def _fields(found: list[tuple[str, str, str, bool]]) -> list[str]:
    """What makes the fields of a scratch, each below its comment. `found`: name, comment, value, whether it exists."""
    return [f"# {note}\n        {name}={value}," for name, note, value, wanted in found if wanted]


def _new(shape: str, dtype: str = "torch.float32") -> str:
    return f"torch.empty({shape}, dtype={dtype}, device=device)"


def _forward_buffers(plan: Plan) -> list[str]:
    kept = ("kept", "none: only `rows_block` keeps tiles" if plan.rows else _KEPT, "None", plan.keeps_tiles)
    return _fields([*_sums_of_a_panel(plan), kept, (*_TURN, plan.traits.small_first)])


# Where the terms of a sum over pairs are added up.
_OF_ALL_QUERIES: dict[str, Any] = {
    "summed": "terms and slopes",
    "totals": "block.sums",
    "about_fresh": "Nothing is fresh here, and nothing kept.",
    "of_scratch": "",
    "and_fresh": "",
    "sizes_and_sums": "m, n, sums = q.shape[0], k.shape[0], block.sums",
    "row_sums": ABSENT,
    "added_to_totals": ABSENT,
}
_OF_EACH_QUERY: dict[str, Any] = {
    "summed": "slopes",
    "totals": "block.queries.total",
    "about_fresh": "What is fresh was never written.",
    "of_scratch": ", scratch, fresh_queries and key0 == 0",
    "and_fresh": ", scratch, fresh",
    "sizes_and_sums": "m, n = q.shape[0], k.shape[0]",
    "row_sums": "row_sums = scratch.row_sums[: cdiv(n, columns), :m]",
    "added_to_totals": """\
added, total = row_sums.sum(0, dtype=torch.float64), block.queries.total
total.copy_(added) if fresh else total.add_(added)""",
}


def _sums_of_a_panel(plan: Plan) -> list[tuple[str, str, str, bool]]:
    if plan.traits.pairs:
        shape = "cdiv(keys, kernels.FORWARD_KEYS.value), rows"
        row_sums = ("row_sums", "of terms (key blocks, rows)", _new(shape), not plan.traits.at_once)
        return [row_sums, ("halves", _HALVES, "_halves(rows, keys, device)", plan.split)]
    if plan.rows:
        strips = "min(tiles[1], FORWARD_STRIPS)"
        return [
            ("own_reference", "of each query", _new("rows"), True),
            ("row_parts", "exponents and sums (strips, rows)", _new(f"2, {strips}, rows") + ".unbind()", True),
            ("flags", _WIDE_RANGE, _new(f"tiles[0] * {strips}", "torch.int32"), True),
        ]
    strips, of_each = "min(tiles[0], FORWARD_STRIPS)", f" * {plan.losses}" * bool(plan.slabs)
    shapes = f"tiles[1]{of_each}, rows", f"{strips}{of_each}, keys"
    row_parts, key_parts = (_new(f"2, {shape}") + ".unbind()" for shape in shapes)
    return [
        ("row_parts", "exponents and sums (key blocks, rows)", row_parts, True),
        ("key_parts", "the same (strips, keys)", key_parts, plan.both_axes),
        ("row_second", "of the second log-sum-exps (key blocks, rows)", row_parts, plan.traits.second),
        ("key_second", "the same (strips, keys)", key_parts, plan.traits.second and plan.both_axes),
        ("row_guide", "by the guide (key blocks, rows)", _new(f"3, {shapes[0]}") + ".unbind()", plan.traits.by_guide),
        ("key_guide", "the same (strips, keys)", _new(f"3, {shapes[1]}") + ".unbind()", plan.traits.guided_sides),
        ("reference", "of each block of keys", _new(f"tiles[1]{of_each}"), not plan.exact),
        ("flags", _WIDE_RANGE, _new(f"{strips} * tiles[1]", "torch.int32"), not plan.exact),
        ("halves", _HALVES, "_halves(rows, keys, device)", plan.split),
    ]


def _rows_buffers(plan: Plan) -> list[str]:
    kept = _new("shape", "OPERAND_DTYPE")
    found = [
        *_sums_of_a_panel(plan),
        ("kept", "p of each pair, in whole tiles: no store needs a mask", kept, True),
        ("begun", "the keys that `begin_rows` has seen: the first, and the last + 1", "None", True),
        ("share", "of each query: g = share * p", _new("rows"), True),
        ("weighted", "queries times their shares", _new("rows, DIM", "OPERAND_DTYPE"), plan.of_keys),
    ]
    return _fields(found) if plan.rows else []


def _gradient_buffers(plan: Plan, ratios: bool, flagged: bool) -> list[str]:
    strips = "FORWARD_STRIPS" if plan.stash else "GRADIENT_STRIPS"
    shape, what = ("2, *shape", "halves of a panel's") if plan.split else ("shape", "of a panel")
    shape, what = (f"({plan.losses}, *shape)", "of each slab of a panel") if plan.slabs else (shape, what)
    found = [
        ("g", f"{what}, in whole tiles: no store needs a mask", _new(shape, "OPERAND_DTYPE"), True),
        ("flags", _WIDE_RANGE, _new(f"min(tiles[0], {strips}) * tiles[1]", "torch.int32"), flagged),
        (
            "prefix_g",
            "of each positive, (prefixes, rows)",
            _new(f"{plan.losses}, panel_rows"),
            plan.traits.renormalised,
        ),
        (
            "row_radial",
            "radial sums (key blocks, prefixes, rows)",
            _new(f"tiles[1], {plan.losses}, shape[0]"),
            plan.traits.renormalised,
        ),
        (
            "key_radial",
            "the same (row blocks, prefixes, keys)",
            _new(f"tiles[0], {plan.losses}, shape[1]"),
            plan.traits.renormalised,
        ),
        ("halves", _HALVES, "_halves(panel_rows, panel_keys, device)", plan.split),
        ("kept", _KEPT, "None", plan.stash),
        (*_TURN, plan.traits.small_first),
        ("ratios", _RATIOS, "_ratios_scratch(keys, device)", ratios and not plan.stash),
    ]
    return _fields(found)


def _fused_buffers(ratios: bool) -> list[str]:
    flags = _new("cdiv(max(rows, keys), kernels.FUSED_ROWS.value)", "torch.int32")
    found = [
        ("positive_g", "of each query", _new("rows"), True),
        ("flags", "of each block of rows, whether its range is wide", flags, ratios),
        ("ratios", _RATIOS, "_ratios_scratch(max(rows, keys), device)", ratios),
    ]
    return _fields(found)
