"""Signatures of kernels, and their launches in a schedule, as Python source.

The tables hold the schedule's expression for each argument. An argument without one is a variable of its own name.
"""

from collections.abc import Callable, Mapping, Sequence

from infcl_gen.emission.render import ABSENT, literal, wrapped
from infcl_gen.kernels import Family, Kernel, families
from infcl_gen.kernels.arguments import parts_of
from infcl_gen.kernels.choice import Choice, embedding_parts

WIDTH = 112  # of a line: some launches stand deeper

_ALL = {
    "scale_ptr": "scale", "bias_ptr": "bias", "queries": "m", "keys": "n",
    "labels": "block.positives", "key_labels": "block.key_labels", "first_query": "block.first_query",
    "key_positive_z": "block.key_positive[0]", "key_positive_reference": "block.key_positive[1]",
    "partner_exponent": "positive[3]", "partner_mantissa": "positive[4]",
    "key_positive_g": "block.key_positive[0]", "kept_z": "positive[4]", "key_kept_z": "block.key_positive[4]",
    "DIAGONAL": "block.diagonal",
    "first_positive": "block.positives", "first_key": "block.first_key",
    "sum_of_positives": "block.positive[0]", "number_of_positives": "block.positive[1]",
    "exponent_of_positives": "block.positive[4]",
    "key_sum_of_positives": "block.key_positive[0]", "key_exponent_of_positives": "block.key_positive[4]",
    "query_ids": "block.query_ids", "key_ids": "block.key_ids",
    "guide_queries": "block.guide_queries", "guide_keys": "block.guide_keys", "thresholds": "block.thresholds",
    "totals": "block.queries.total", "factors": "block.queries.factor", "key_thresholds": "block.key_thresholds",
    "guide_sum": "block.positive[0]", "guided": "block.positive[1]", "guide_exponent": "block.positive[4]",
    "pooled_ptr": "pooled", "vectors": "block.vectors", "vectors_stride": "block.vectors.stride(0)",
    "g_of_slabs": "g.flatten(0, 1)",
    **{x: f"block.{x}" for x in ("query_factors", "key_factors")},
    **{f"{x}_stride": f"block.{x}.stride(0)" for x in ("query_factors", "key_factors")},
    **{x: f"scratch.{x}" for x in ("row_radial", "key_radial", "prefix_g")}, "radial_stride": "radial.stride(0)",
    "positive_stride": "scratch.prefix_g.stride(0)", "radial_rows": "scratch.row_radial.stride(1)",
    "radial_keys": "scratch.key_radial.stride(1)",
    "flags": "scratch.flags", "positive_g": "scratch.positive_g", "g_stride": "g.stride(0)",
    "rows_stride": "scratch.row_parts[0].stride(0)", "keys_stride": "scratch.key_parts[0].stride(0)",
    "turn": "scratch.turn", "FRESH": "fresh", "MASKED": "masked", "DESCRIPTORS": "descriptors", "WIDEN": "INTERPRETED",
}  # fmt: skip
_ALL |= {f"{x}_{way}_stride": f"{x}.stride({axis})" for x in "qkx" for axis, way in enumerate(("row", "depth"))}
_ALL |= {f"{side}second_{x}": f"block.{side}second.{x}" for side in ("", "key_") for x in ("exponent", "mantissa")}
for side, of in (("q", "queries"), ("k", "keys")):
    _ALL |= {f"guide_{side}_{way}_stride": f"block.guide_{of}.stride({i})" for i, way in enumerate(("row", "depth"))}
for one, many in (("query", "queries"), ("key", "keys")):
    _ALL |= {f"{one}_{x}": f"block.{many}.{x}" for x in ("exponent", "mantissa", "ratio", "reference", "lowest")}
_ALL |= {f"positive_{x}": f"positive[{i}]" for i, x in enumerate(("z", "row_reference", "key_reference"))}

_PARTS = {
    f"{side}_{x}": f"scratch.{side}_parts[{i}]" for side in ("row", "key") for i, x in enumerate(("exponent", "sum"))
}
_PARTS |= {
    f"{side}_second_{x}": f"scratch.{side}_second[{i}]"
    for side in ("row", "key") for i, x in enumerate(("exponent", "sum"))
}  # fmt: skip
_BY_GUIDE = ("guided", "guide_sum", "guide_exponent")
_PARTS |= {f"{side}_{x}": f"scratch.{side}_guide[{i}]" for side in ("row", "key") for i, x in enumerate(_BY_GUIDE)}
_PARTS["reference"] = "scratch.reference"
_PARTS["own_reference"] = "scratch.own_reference"
_COMBINED = {x: f"positive[{i}]" for i, x in enumerate(("positive_g", "scale_parts", "bias_parts", "query_terms"))}
_COMBINED |= {"all_queries": "block.counts[0]", "all_keys": "block.counts[1]"}
_DESCRIBED = {x: f"{x}_side.source" for x in "qk"}
_DESCRIBED |= {f"{x}_{way}": f"{x}_side.{way}" for x in "qk" for way in ("row_stride", "depth_stride")}
_OF_BOTH = "(cdiv(m, {0}) + cdiv(n, {0}),)"

_LAUNCHES: dict[str, tuple[str, dict[str, str]]] = {  # grid, and values before those of all kernels
    "references": ("(cdiv(n, columns),)", _PARTS),
    "row_references": ("(cdiv(m, kernels.WIDE_ROWS.value),)", _PARTS),
    "shares": ("(cdiv(m, rows),)", _PARTS | _COMBINED),
    "row_positives": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", _COMBINED),
    "weighted_queries": ("(cdiv(m, FINISH_ROWS),)", {"out": "weighted", "rows": "m"}),
    "forward": ("grid", _PARTS | _DESCRIBED | {
        "MASKED": "m % rows != 0 or n % columns != 0", "STASH": "scratch.kept is not None",
        "stash_reference": "kept_reference", "stash_stride": "kept.stride(0)",
        "reference_stride": "kept_reference.stride(0)",
    }),
    "forward_wide": ("grid", _PARTS),
    "merge": (_OF_BOTH.format("kernels.MERGE_ROWS.value"), _PARTS | {
        "row_parts": "cdiv(n, kernels.FORWARD_KEYS.value)",
        "key_parts": "cdiv(cdiv(m, kernels.FORWARD_ROWS.value), _strip(m, n))",
        "queries_written": "0 if fresh_queries and key0 == 0 else m",
        "keys_written": "0 if fresh_keys and row0 == 0 else n",
        "query_exponent": "part.queries.exponent", "query_mantissa": "part.queries.mantissa",
        "key_totals_exponent": "part.keys.exponent", "key_totals_mantissa": "part.keys.mantissa",
    }),
    "merge_guided": ("(cdiv(rows, kernels.MERGE_ROWS.value),)", {
        **{f"part_{x}": f"partial[{i}]" for i, x in enumerate(_BY_GUIDE)}, "part_stride": "partial[0].stride(0)",
        **{x: f"guide[{i}]" for i, x in enumerate(_BY_GUIDE)},
    }),
    "positives": ("(cdiv(m, kernels.POSITIVE_ROWS.value),)", _PARTS | {"strip": "_strip(m, n)", "width": "q.shape[1]"}),
    "loss_terms": ("(parts,)", {
        "queries": "block.q.shape[0]", "keys": "block.k.shape[0]", "query_weight": "weight", "key_weight": "weight",
        "BLOCK": "LOSS_ROWS",
    }),
    "partners": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", {}),
    "combine": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", _COMBINED),
    "row_loss": ("(1,)", _COMBINED | {"BLOCK": "1024"}),
    "total_loss": ("(1,)", {"BLOCK": "1024"}),
    "ratios": ("(blocks,)", {
        "exponent": "statistics.exponent", "mantissa": "statistics.mantissa", "count": "rows", "SHARE": "share",
        "ROWS": "block",
    }),
    "gradient": ("grid", _DESCRIBED | {"MASKED": "m % rows != 0 or n % columns != 0"}),
    "gradient_wide": ("grid", {}),
    "row_gradient_wide": ("grid", {}),
    "gradient_from_stash": ("grid", {
        "stash_reference": "reference", "stash_stride": "stash.stride(0)", "reference_stride": "reference.stride(0)",
    }),
    "pairs": ("grid", _DESCRIBED | {"parts": "sums.shape[1]"}),
    "pair_terms": ("grid", _DESCRIBED | {
        "row_sum": "row_sums", "rows_stride": "row_sums.stride(0)", "parts": "sums.shape[1]",
    }),
    "pair_positives": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", {"parts": "sums.shape[1]"}),
    "pair_positive_terms": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", {}),
    "pair_loss": ("(1,)", {"parts": "sums.shape[-1]", "BLOCK": "1024"}),
    "rescale": ("(cdiv(kept.shape[0], FINISH_ROWS),)", {"rows": "kept.shape[0]"}),
    "gradient_positives": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", _COMBINED),
    "fused_positives": ("(cdiv(m, kernels.VECTOR_ROWS.value),)", {}),
    "fused_queries": ("(cdiv(m, rows),)", _DESCRIBED),
    "fused_queries_wide": ("(cdiv(m, rows),)", {}),
    "fused_keys": ("(cdiv(n, columns),)", _DESCRIBED),
    "fused_keys_wide": ("(cdiv(n, columns),)", {}),
    "product": ("grid", {
        "g": "rest_g", "x": "rest_x", "inner": "inner - whole", "x_inner_stride": "x.stride(0)",
        "g_row_stride": "g.stride(0)", "g_inner_stride": "g.stride(1)",
    }),
    "finish": ("(cdiv(total.shape[0], FINISH_ROWS),)", {
        "weight": "weight * 2.0**-GRADIENT_EXPONENT", "rows": "total.shape[0]", "DOTS": "dots is not None",
        "SHARED": "share is not None",
    }),
    "scalars": ("(1,)", {
        "parts": "dots.shape[0]", "count": "slopes.shape[-1]", "scale_parts": "slopes[0]", "bias_parts": "slopes[1]",
        "BLOCK": "1024",
    }),
    "copy_inputs": (_OF_BOTH.format("FINISH_ROWS"), {}),
    "split": ("(cdiv(rows, FINISH_ROWS),)", {"out_stride": "out.stride(0)", "KEYS": "keys"}),
    "merge_ranks": ("(cdiv(n, kernels.MERGE_ROWS.value),)", {
        "part_exponent": "exponents", "part_sum": "sums", "part_stride": "parts.stride(0)",
        "exponent": "keys.exponent", "mantissa": "keys.mantissa",
    }),
}  # fmt: skip
_OF_IDS: dict[str, tuple[str, dict[str, str]]] = dict.fromkeys(  # where positives are found by them
    ("positives", "gradient_positives"), ("(cdiv(m, kernels.POSITIVE_ROWS.value),)", {})
)
_OF_TRIANGLE: dict[str, tuple[str, dict[str, str]]] = {  # where they differ
    "positives": (_OF_BOTH.format("kernels.POSITIVE_ROWS.value"), _PARTS | {"strip": "_strip(m, n)"}),
    "mirror": ("(blocks, blocks)", {"g": "tiles", "g_stride": "tiles.stride(0)"}),
    "gradient_positives": (_OF_BOTH.format("kernels.VECTOR_ROWS.value"), _COMBINED),
}  # fmt: skip
_OF_SIDES: dict[str, tuple[str, dict[str, str]]] = {  # of sums that are merged one by one
    "merge": ("(cdiv(rows, kernels.MERGE_ROWS.value),)", {
        "row_exponent": "exponents", "row_sum": "sums", "query_exponent": "statistics.exponent",
        "query_mantissa": "statistics.mantissa", "queries": "rows", "row_parts": "count",
        "rows_stride": "exponents.stride(0)", "queries_written": "written",
    }),
}  # fmt: skip


_OF_GUIDED_SIDES = {  # of all kernels, where a guide's softmaxes have sums of both sides
    "positive_guide": "block.positive[-4]",
    **{x: f"block.positive[{i - 3}]" for i, x in enumerate(_BY_GUIDE)},
    **{f"key_{x}": f"block.key_guide[{i}]" for i, x in enumerate(_BY_GUIDE)},
}  # fmt: skip
_OF_SLABS = {  # of all kernels, where statistics and g have a further dimension
    "slab_stride": "g.stride(0)", "g_stride": "g.stride(1)", "query_stride": "block.queries.exponent.stride(0)",
    "key_stride": "block.keys.exponent.stride(0)", "width": "x.shape[1]",
}  # fmt: skip


def openings(choice: Choice) -> Callable[..., str]:
    """The function that templates call, `kernel(name)`: the decorator and signature of one of the choice's kernels."""
    kernels = {each.name: (each, family.gluon) for family in families(choice) for each in family.kernels(choice)}

    def kernel(name: str, unaligned: Sequence[str] = ()) -> str:
        """`unaligned`: pointers to any element, as to a panel's part of a vector."""
        taken, gluon = kernels[name]
        module, constant = ("gluon", ": gl.constexpr") if gluon else ("triton", ": tl.constexpr")
        general = [each.name for each in taken.arguments if each.type in ("i32", "i64") and not each.multiple]
        words = [f"do_not_specialize={literal(general)}"] * bool(general)
        words += [f"do_not_specialize_on_alignment={literal(list(unaligned))}"] * bool(unaligned)
        decorator = wrapped(f"@{module}.jit(", words, ")", WIDTH, 8) if words else f"@{module}.jit"
        words = [each.name + constant * each.name.isupper() for each in taken.arguments]
        return f"{decorator}\n" + wrapped(f"def {name}(", words, "):", WIDTH, 8)

    return kernel


def launches(choice: Choice, options: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """The statement that launches each kernel, by its name; ABSENT for a kernel that the choice lacks."""
    values = _ALL | (_OF_GUIDED_SIDES if choice.traits.guided_sides else {})
    for index, part in enumerate(parts_of(embedding_parts(choice.inner_dim))):
        values |= {f"{x}{part.name}": f"sides[{index}][{side}].source" for side, x in enumerate("qk") if part.name}
    found = dict.fromkeys(_LAUNCHES | _OF_TRIANGLE, ABSENT)
    own_launches = _LAUNCHES | (_OF_TRIANGLE if choice.traits.triangle else {})
    if choice.traits.sorted_ids:
        own_launches |= _OF_IDS
    if choice.merges_sides:
        own_launches |= _OF_SIDES
    for family in families(choice):
        for kernel in family.kernels(choice):
            replaced = kernel.replaces or kernel.name
            grid, own = own_launches[replaced]
            own = values | (_OF_SLABS if choice.slabs else {}) | own
            if kernel.replaces:
                own |= _given_to_variant(family, kernel)
            if kernel.name == "merge" and not (choice.both_axes or choice.merges_sides):
                grid = "(cdiv(m, kernels.MERGE_ROWS.value),)"
            if kernel.name == "forward":
                own["stash"] = "tiles" if choice.descriptors else "kept"
            if choice.split and any(each.name == "g_low" for each in kernel.arguments):
                own |= {"g": "g[0]", "g_low": "g[1]", "g_stride": "g.stride(1)"}
            words = [f"{each.name}={own.get(each.name, each.name)}" for each in kernel.arguments]
            words.append(f"num_warps={options[kernel.name]['warps']}")
            stages = f"num_stages={options[kernel.name]['stages']}"
            words.append(f"maxnreg={family.module}.{kernel.registers}" if kernel.registers else stages)
            text = f"launch({family.module}.{kernel.name}, {grid},\n" + wrapped(" " * 8, words, ")", WIDTH, 8)
            found[replaced] = _instead(family, kernel, text, found[replaced]) if kernel.replaces else text
    return found


def _given_to_variant(family: Family, kernel: Kernel) -> dict[str, str]:
    """What a variant takes unlike the kernel that it replaces: features or descriptors of its own blocks, and MASKED
    where its programs walk several row blocks at once, or look for the diagonal."""
    found = {name: _ALL.get(name, name) for name in _DESCRIBED}
    if kernel.row_blocks > 1:
        found["MASKED"] = f"m % ({kernel.row_blocks} * rows) != 0 or n % columns != 0"
    if any(each.name == "first_positive" for each in kernel.arguments):
        found["MASKED"] += " or block.meets_diagonal()"
    for each in (argument for argument in kernel.arguments if argument.block):
        sizes = f"[{', '.join(_size(family.module, word) for word in each.block)}]"
        name = each.block[0].removesuffix("[0]")
        if each.block == (f"{name}[0]", f"{name}[1]"):  # a whole list
            sizes = f"{family.module}.{name}"
        layout = f", {family.module}.{each.layout}" if each.layout else ""
        found[each.name] = f"descriptor({_ALL.get(each.name, each.name)}, {sizes}{layout})"
    return found


def _size(module: str, word: str) -> str:
    """An extent of a block as an expression: a number, an item of a list in the module, or a constant there."""
    return word if word.isdigit() else f"{module}.{word}" + ".value" * (not word.endswith("]"))


def _instead(family: Family, kernel: Kernel, text: str, ordinary: str) -> str:
    """The launch of a variant on its GPU, of the ordinary kernel elsewhere."""
    here = f'runs_variant({kernel.arguments[0].name}.device, "{family.arch}", "{family.gluon}")'
    if any(each.block for each in kernel.arguments):
        here = f"descriptors and {here}"
    inner, other = (each.replace("\n", "\n    ") for each in (text, ordinary))
    return f"if {here}:\n        from . import {family.module}\n\n        {inner}\n    else:\n        {other}"
