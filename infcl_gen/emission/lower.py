"""Plan -> the package's files, with their templates and the names in them.

The names stand for literals and printed expressions: templates compute nothing, and rendering is a pure function.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from typing import Any

from infcl_gen.emission.combined_context import OF_STATE
from infcl_gen.emission.kernel_context import gradient_exponent, kernels_context
from infcl_gen.emission.launches import openings
from infcl_gen.emission.package import SCHEMA_VERSION
from infcl_gen.emission.render import ABSENT, File, wrapped
from infcl_gen.emission.schedule_context import ABOUT_MEAN, ABOUT_POOLED, ABOUT_RADIAL, ABOUT_SLOPES, schedule_context
from infcl_gen.hardware import DeviceProfile, load_profile, profile_names
from infcl_gen.inputs.problem import TORCH_DTYPES, Problem
from infcl_gen.inputs.text import prefixes_text
from infcl_gen.kernels import TILES, families
from infcl_gen.losses import Derivation, formulas_of, is_builtin, left_out, loss_context, spec_as_dict
from infcl_gen.planning.memory import STRIP_ROWS
from infcl_gen.planning.planner import Plan, literals_of
from infcl_gen.planning.records import own_settings
from infcl_gen.runtime.traits import SIDES, Traits
from infcl_gen.version import __version__


def lower(plan: Plan, derivation: Derivation, profile: DeviceProfile) -> list[File]:
    """The files of a plan made for `profile`. SPEC holds all that is needed to generate them again."""
    device = _identifier(plan.problem.device_profile)
    name = f"{_identifier(derivation.spec.name)}_{device}_d{plan.dim}"
    spec = spec_literals(plan, derivation, profile, name)
    package = _package_context(plan, derivation) | {"name": name, "device": device}
    files = [
        File("__init__.py", ["package/__init__.py.jinja"], package),
        File("spec.py", ["package/spec.py.jinja"], {"name": name, "spec": spec}),
        File("loss.py", [loss_template(plan.traits)], loss_context(derivation)),
    ]
    pairs = "_pairs" if plan.traits.pairs else "_triangle" if plan.traits.triangle else ""
    if plan.strategy == "torch":
        second = "_guided" if plan.traits.by_guide and plan.traits.several else "_several" * plan.traits.several
        kind = second or ("_combined" if plan.traits.combined else pairs)
        parent = "_slabs" if plan.slabs else pairs
        kind = kind if plan.traits.combined else parent
        names = _torch_context(plan, derivation) | {"parent": f"torch/schedule{parent}.py.jinja"}
        return [*files, File("schedule.py", [f"torch/schedule{kind}.py.jinja"], names)]
    context = kernels_context(name, plan, derivation, profile) | {"kernel": openings(plan)}
    templates, variants = ["triton/header.py.jinja"], []
    for family in families(plan):
        if family.file == "kernels.py":
            templates += family.templates(plan)
        else:
            variants.append(File(family.file, family.templates(plan), context | family.values(plan)))
    sweep = "pairs" if plan.traits.pairs else plan.strategy if plan.strategy in ("fused", "rows") else "panel"
    sweep = "slabs" if plan.slabs else sweep
    weights = derivation.prefix_weights
    schedule = schedule_context(name, plan, profile, spec["launches"], spec["gradient_exponent"], weights)
    of_schedule = File("schedule.py", [f"triton/schedule_{sweep}.py.jinja"], schedule)
    return [*files, File("kernels.py", templates, context), *variants, of_schedule]


def loss_template(traits: Traits) -> str:
    """The template of loss.py."""
    kind = "_pairs" if traits.pairs else "_combined" if traits.combined else ""
    return f"torch/loss{kind}.py.jinja"


def spec_literals(plan: Plan, derivation: Derivation, profile: DeviceProfile, name: str) -> dict[str, Any]:
    """SPEC of the package: literals only, in a fixed order."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "digest": "",
        "versions": {"generator": __version__},
        "problem": plan.problem.as_dict(),
        "positives": derivation.spec.positives,
        "gradient_exponent": gradient_exponent(plan, derivation),
        "descriptors": plan.descriptors,
        "loss": {**spec_as_dict(derivation.spec), "traits": literals_of(derivation.traits)},
        "device": dataclasses.asdict(profile),
        "regenerate": _regenerate(plan.problem, derivation, profile),
        "derivation": formulas_of(derivation),
        "launches": _launch_options(plan, profile),
        "predicted": {
            "peak_bytes": plan.predicted_peak_bytes,
            "time_s": plan.predicted_time_s,
            "queued_s": plan.predicted_queued_s,
        },
        "plan": {key: value for key, value in plan.as_dict().items() if key not in ("problem", "traits")},  # see above
    }


def _regenerate(problem: Problem, derivation: Derivation, profile: DeviceProfile) -> str:
    """The command that makes the package for {queries} queries and {keys} keys. A word in capitals stands for a user's
    file, whose path means nothing on another machine."""
    builtin = is_builtin(spec_as_dict(dataclasses.replace(derivation.spec, prefixes=(), renormalise=False)))
    shipped = problem.device_profile in profile_names() and load_profile(problem.device_profile) == profile
    flags = [
        ("--loss", problem.loss if builtin else "FILE.py:NAME"),
        ("--dim", problem.dim),
        ("--dtype", problem.dtype),
        ("--devices", problem.devices),
        ("--nodes", problem.nodes),
        ("--device-profile", problem.device_profile if shipped else "PROFILE.toml"),
        ("--cluster", None if problem.links is None else "CLUSTER.toml"),
        ("--memory-budget", problem.memory_budget_bytes),
        ("--precision", None if problem.precision == "default" else problem.precision),
        ("--frozen", None if problem.frozen == "none" else problem.frozen),
        ("--prefixes", prefixes_text(derivation.spec.prefixes) or None),
        ("--renormalise", derivation.spec.renormalise or None),
        ("--negatives", None if problem.negatives == 1 else problem.negatives),
        *(("--set", f"{key}={value}") for key, value in own_settings(problem.settings).pairs),
    ]
    words = (((flag,) if value is True else (flag, str(value))) for flag, value in flags if value is not None)
    given = shlex.join(word for pair in words for word in pair)
    literal = given.replace("{", "{{").replace("}", "}}")
    keys = "" if derivation.traits.triangle else " --keys {keys}"
    return f"infcl-gen generate --batch-size {{queries}}{keys} {literal} -o DIR"


def _launch_options(plan: Plan, profile: DeviceProfile) -> dict[str, dict[str, int]]:
    """Warps and stages of the package's kernels, in the order of kernels.py."""
    found = {}
    for kernel in (kernel for family in families(plan) for kernel in family.kernels(plan)):
        launched = plan.blocks[kernel.block] if kernel.block else kernel
        warps, stages = launched.warps, launched.stages
        if kernel.wide:
            warps, stages = TILES[kernel.block].wide_warps(plan.blocks[kernel.block], plan, profile), 2
        found[kernel.name] = {"warps": warps, "stages": stages}
    return found


def _package_context(plan: Plan, derivation: Derivation) -> dict[str, Any]:
    problem, formulas = plan.problem, formulas_of(derivation)
    of_plan = {field: getattr(plan, field) for field in ("dim", "dtype", "strategy", "rows_per_rank")}
    of_keys = plan.of_keys and not plan.traits.triangle
    return of_plan | {
        "logit": formulas["logit"],
        "loss": formulas["loss"],
        "queries": problem.batch_size,
        "keys": problem.total_keys,
        "counted": plan.traits.counted(problem.batch_size, problem.total_keys),
        "compared": plan.traits.sides[1],
        "devices": "1 device" if problem.devices == 1 else f"{problem.devices} devices",
        "alone": problem.devices == 1,
        "triangle": plan.traits.triangle,
        "of_classes": plan.traits.triangle and plan.traits.ids,
        "paired": plan.traits.paired,
        "labels": plan.traits.labels,
        "k_type": "None" if plan.traits.triangle else "Tensor",
        "kernels": "kernels.py computes tiles, " * (plan.strategy != "torch"),
        "frozen": ABSENT if plan.frozen == "none" else f"The {plan.frozen} side is frozen: it has no gradient.",
        "gradients": ", ".join("Tensor" if wanted else "None" for wanted in (plan.of_queries, of_keys)),
        "results": f"{'dq (M, D)' if plan.of_queries else 'None'}, {'dk (N, D)' if of_keys else 'None'}",
        "mib": f"{plan.predicted_peak_bytes / 2**20:.1f}",
    }


def _torch_context(plan: Plan, derivation: Derivation) -> dict[str, Any]:
    formulas, affine = formulas_of(derivation), plan.traits.affine
    traits = plan.traits
    own = enumerate(derivation.form.vectors.values())
    numbers = _OF_ROWS | {str(symbol): f"own[{place}].double()" for place, symbol in own}
    if traits.columns_of_ids:
        numbers["cp"] = "columns[rows]"
    in_place, of_panel = "logits_(z[strip], block.scale, block.bias)", "logits_(z, part.scale, part.bias)"
    x2_of_strip = in_place if affine else "formulas.logit(z[strip], block.scale, block.bias) * LOG2E"
    if traits.masked and not traits.triangle:
        of_panel = f"kept_({of_panel}, part{', above' * traits.thresholds})"
        x2_of_strip = f"{x2_of_strip}, block.panel(first, LOGIT_ROWS, 0, len(block.k))"
        x2_of_strip = _KEPT_BY_THRESHOLD.format(x2_of_strip) if traits.thresholds else f"kept_({x2_of_strip})"
    of_plan = ("dim", "both_axes", "labels", "forward_rows", "forward_keys", "panel_rows", "panel_keys")
    return {field: getattr(plan, field) for field in of_plan} | {
        "loss_formula": formulas["loss"],
        "gradient_formula": formulas["dL/dx"],
        "feature_dtype": TORCH_DTYPES[plan.dtype],
        "statistics_dtype": TORCH_DTYPES[plan.statistics_dtype],
        "upcast": plan.separate,  # features are converted panel by panel
        "logit_strips": traits.strips,
        "ids": traits.ids,
        "panels": 2 + len(traits.slabs),
        "placed": traits.placed,
        "compared": traits.sides[1],
        "import_math": "import math" if traits.masked or traits.triangle or traits.softmax_of_positives else ABSENT,
        "sums_of_keys": traits.has_keys,
        "triangle": traits.triangle,
        "times_slope": "" if affine else " * dx/dz",
        **_torch_vectors(traits),
        "and_pooled": ", pooled: Tensor" * bool(traits.pooled),
        "about_pooled": ABOUT_POOLED if traits.pooled else ABSENT,
        "whole_sums": "SUMS_LACK_SHIFT = False  # statistics are of whole logits"
        if traits.pooled or traits.columns_of_ids
        else ABSENT,
        "and_mean": " *, mean: Tensor," * traits.means + " *, radial: Tensor," * traits.renormalised,
        "about_mean": (ABOUT_MEAN if traits.means else ABOUT_RADIAL).replace("total", "acc")
        if traits.means or traits.renormalised
        else ABSENT,
        "without_radial": _WITHOUT_RADIAL if traits.renormalised else ABSENT,
        "renormalised": traits.renormalised,
        "similarities": "cosines_(x2.copy_(z), of_prefix)" if traits.renormalised else "x2.copy_(z)",
        "added_mean": "acc.add_(mean, alpha=formulas.MEAN_SHARE)" if traits.means else ABSENT,
        "plus_mean": " + formulas.MEAN_SHARE" * (traits.means or traits.weighted),
        "strip_of_mask": _about_strips(traits) if affine and not traits.pairs else ABSENT,
        **_torch_classes(traits),
        **_torch_thresholds(traits),
        **_torch_masks(traits, derivation.through_z != 0),
        **_torch_second(traits),
        **_torch_columns(traits),
        **_torch_guided_sides(traits),
        "partnered": traits.partnered,
        "noted_partners": "note_partners_(block)" if traits.partnered else ABSENT,
        **(
            _torch_several(traits, x2_of_strip.replace("[strip]", "[rows]"))
            if traits.several and not traits.by_guide
            else {}
        ),
        "sums_slopes": traits.sums_slopes,
        "logits_of_panel": of_panel,
        "affine": affine,  # x = slope * z + shift; otherwise the logit is evaluated in strips of rows
        "positive_parts": plan.positive_parts,
        "about_slopes": ABOUT_SLOPES[traits.combined],
        "parts_of_queries": wrapped(
            "formulas.of_queries(", ["r", "p", *(numbers[name] for name in derivation.of_rows)], ")", 104, 12
        ),
        "finish_strips": "2 strips" if plan.separate else "1 strip",
        "gradient_of_logits": "M * dL/dx" if affine else "M * dL/dx * dx/dz",
        "strip_rows": STRIP_ROWS,
        "logit_rows": "PANEL_ROWS" if affine and not traits.second else "STRIP_ROWS",
        "z_after_softmaxes": "becomes x2" if affine else "stays",
        "x2_of_strip": x2_of_strip,
        "statistics": f"LOG2E, Statistics, {'' if traits.combined else 'excess, '}log, merge"
        + ", merge_parts" * (traits.has_keys or traits.triangle)
        + ", view" * ((traits.second and traits.triangle) or traits.partnered),
        "most_terms": "max(len(block.q), len(block.k))" if traits.has_keys else "len(block.q)",
    }


_WITHOUT_RADIAL = """\
for slab, multiple in zip(SLABS, radial, strict=True):
    for first in range(0, len(acc), STRIP_ROWS):
        rows = slice(first, first + STRIP_ROWS)
        acc[rows, slab] -= multiple[rows, None] * x[rows, slab]"""
_OF_ROWS = {
    "positive_z": "positive[0, rows].double()", "scale": "scale", "bias": "bias",
    "queries": "r.new_tensor(block.counts[0])", "keys": "r.new_tensor(block.counts[1])", "positives_of_query": "n",
    "r2": "r2", "rp": "log(view(positive[3:, rows]))", "cp": "cp", "pc": "pc",
    "pooled": "pooled[0]", "pooled_slope": "pooled[1]",
}  # fmt: skip
_ALONE = """excess(own.queries, slice(None), own.positive[1:3])
        alone.mul_(formulas.QUERY_SHARE).add_(formulas.POSITIVE_REST)"""
_ABOUT_MASK = "1 strip of STRIP_ROWS rows, for which of its pairs are left out"


def _torch_vectors(traits: Traits) -> dict[str, Any]:
    """What `combine` has of a query's own numbers."""
    found = {
        "about_vectors": "vectors           the derivatives of the query's part of M * L by them"
        + OF_STATE[traits.states],
        "own_of_rows": "own = block.vectors[:, rows]",
        "stored_vectors": "own.copy_(torch.stack(of_own))",
    }
    absent = dict.fromkeys(found, ABSENT)
    return (found if traits.vectors else absent) | {"and_slopes": ", *of_own" * bool(traits.vectors)}


_KEPT_BY_THRESHOLD = """kept_(
            {}, above[strip]
        )"""
_ABOVE_BY_GUIDE = """\
y, _ = panels.products(u, converted(part.guide_keys, panels.k))
            above = panels.above(y, part.thresholds)"""


def _torch_thresholds(traits: Traits) -> dict[str, Any]:
    """What the sweeps have of pairs that are left out above a threshold of their query."""
    guide, found = traits.guide and traits.thresholds, traits.thresholds and not traits.triangle
    return {
        "thresholds": found,
        "legend_of_thresholds": _LEGEND_OF_THRESHOLDS[guide] if traits.thresholds else ABSENT,
        "mask_of_panel": "1 mask of a panel, of the pairs that are above their thresholds" if found else ABSENT,
        "guide_of_rows": "u = converted(own.guide_queries, panels.u)"
        if guide
        else "u = converted(own.guide_queries, guides.q)"
        if traits.guided_sides
        else ABSENT,
        "above_by_guide": _ABOVE_BY_GUIDE if guide else ABSENT,
        "above": "above = panels.above(z, part.thresholds)" if found and not guide else ABSENT,
        "room_for_guide": "self.u = torch.empty_like(self.q)" if guide else ABSENT,
        "room_for_masks": _MASKS.format("mask", "rows * columns") if found else ABSENT,
        "and_above": ", above" * found,
        "above_type": ", above: Tensor" * found,
        "without_rows": ABSENT,
        "without_columns": "",
        **_torch_masks_of_sides(traits),
    }


_MASKS = "self.{} = torch.empty({}, dtype=torch.bool, device=q.device)"


def _torch_masks_of_sides(traits: Traits) -> dict[str, Any]:
    """What a triangle's sweeps have of pairs that are left out by thresholds, or by sides, where rows are pairs."""
    if not traits.triangle:
        return {}
    if not traits.own_references:
        return {"own_references": False, "left_out_of_sides": ABSENT, "summed": "x2"}
    return {
        "own_references": True,
        "mask_of_panel": f"{traits.masks_of_sides} masks of a panel, of the pairs that are left out",
        "room_for_masks": _MASKS.format("masks", f"({traits.masks_of_sides}, rows * columns)"),
        "left_out_of_sides": "of_rows, of_columns = left_out(z, part, panels.masks)",
        "summed": "e",
        "and_above": ", of_rows, of_columns",
        "above_type": ", of_rows: Tensor, of_columns: Tensor",
        "without_rows": "g[strip].masked_fill_(of_rows[strip], 0.0)",
        "without_columns": ".masked_fill_(of_columns[strip], 0.0)",
        "further_room": "both" if traits.by_side else "_",
        "thresholds_of_sides": traits.thresholds,
        "by_side": traits.by_side,
        "left_out_sides": str(tuple(SIDES[name] for name in traits.classes if name in SIDES)),
    }


_LEGEND_OF_THRESHOLDS = (
    "t_i  threshold of the similarities z_i of row i",
    "u, v (m and n, D)   features of the guide, y_ij  u_i . v_j; t_i  threshold of the similarities y_i of row i",
)


def _torch_masks(traits: Traits, by_z: bool) -> dict[str, Any]:
    """What depends on which pairs the log-sum-exps leave out, and on how a query's term combines its sum."""
    without, combined, triangle = traits.without_positives, traits.combined, traits.triangle
    of_id, above = "has the query's id", "is above the query's threshold"
    which = left_out(traits.classes, of_id, "is the positive", "is not the positive", above, " and ", " or ")
    apart = by_z and not traits.affine
    noted = "z, then exponent and term, as a wide float, in each sum that holds it."
    included = (
        "# Of a positive p - 1 = (its term - the sum) / the sum: rounded once, 0 where the sum holds nothing else."
    )
    return {
        "masked": traits.masked and not triangle,
        "combined": combined,
        "apart": apart,
        "without_positives": without,
        "about_left_out": f"a key {which}",
        "also_above": "left_out |= above[rows]" if traits.thresholds else ABSENT,
        "about_parts": _ABOUT_PARTS if combined else noted,
        "about_positives": ABSENT if combined else included,
        "alone": "own.positive[0]" if combined else _ALONE,
        "nothing": "nothing = mantissa[rows] == 0  # in the sum: the row has no weight" if without else ABSENT,
        "weight_of_nothing": "weight = weight.masked_fill(nothing, 0.0)" if without else ABSENT,
        "g_of_positives": "slope"
        + " + through_z" * (by_z and traits.affine)
        + " + weight * torch.exp(p - r)" * (not without)
        + " + second_weight * torch.exp(formulas.MULTIPLE * p - r2)" * (traits.second and not without)
        + " + key_weight * torch.exp(pc - cp)" * traits.in_columns,
        # An affine logit has one factor; others may have a factor of 0, by which nothing can be divided.
        "kept_through_z": f"positive[{4 + triangle}, rows] = through_z" if apart else ABSENT,
        "positives_by_z": (_BY_Z_OF_BOTH if triangle else _BY_Z) if apart else ABSENT,
        "and_z": "; its z" * triangle + "; of the positive by its z" * apart,
        "kept_z": "positive[4, rows] = positive[0, rows]" if triangle else ABSENT,
        **_torch_sides(traits),
        "weighted_mantissa": "(mantissa[rows] / weight)" + ".masked_fill(nothing, torch.inf)" * without,
    }


def _about_strips(traits: Traits) -> str:
    of_mask = [_ABOUT_MASK] * traits.ids
    return "\n    ".join([*of_mask, *[_ABOUT_SECOND] * traits.second]) or ABSENT


_ABOUT_SECOND = "2 strips of STRIP_ROWS rows, for multiples of logits and their exponentials"
_ADDED_SECOND = "add_({}, torch.mul(x2, formulas.MULTIPLE, out=e), e, {})"
_SHARES_OF_SECOND = """\
multiple = x2 * formulas.MULTIPLE
g[strip].add_((multiple - block.second.exponent[strip, None]).exp2_().div_(block.second.mantissa[strip, None]))"""
_SHARES_OF_BOTH = f"""{_SHARES_OF_SECOND}
g[strip].add_(multiple.sub_(block.key_second.exponent).exp2_().div_(block.key_second.mantissa))"""
_SECOND_THERE = """\
second = view(noted_there[-2:, there])
softmax += torch.exp2(formulas.MULTIPLE * y - second.exponent).div_(second.mantissa)"""


def _torch_second(traits: Traits) -> dict[str, str]:
    """What the sweeps have of a second log-sum-exp."""
    found = {
        "fresh_second": "block.second.mantissa.zero_()",
        "second_of_rows": _ADDED_SECOND.format("part.second", 1),
        "second_of_columns": _ADDED_SECOND.format("part.key_second", 0),
        "second_shares": _SHARES_OF_BOTH if traits.triangle else _SHARES_OF_SECOND,
        "second_there": _SECOND_THERE,
        "about_second": "second.mantissa    that of the second sum over a2_i",
        "second_of_query": "r2 = log(block.second, rows)",
        "second_of_nothing": "second_weight = second_weight.masked_fill(nothing, 0.0)"
        if traits.without_positives
        else ABSENT,
        "divided_second": "block.second.mantissa[rows] = (block.second.mantissa[rows] / second_weight)"
        + ".masked_fill(nothing, torch.inf)" * traits.without_positives,
    }
    return {name: text if traits.second else ABSENT for name, text in found.items()} | {
        "and_further_weights": ", second_weight" * traits.second + ", key_weight" * traits.crossed,
        "plus_second": " + second_weight" * traits.second,
    }


_GUIDED_SIDES = {
    "legend_of_guide": """\
u, v (m and n, D)   features of the guide, y_ij  u_i . v_j
    tq_i, tk_j  means of x over row i and column j, by the softmaxes of y over them""",
    "fresh_guides": """\
if fresh_queries:
        block.positive[-3:].zero_()
    if fresh_keys:
        block.key_guide.zero_()""",
    "guides_of_forward": "guides = Panels(block.guide_queries, block.guide_keys, FORWARD_ROWS, FORWARD_KEYS)",
    "guides_of_backward": "guides = Panels(block.guide_queries, block.guide_keys, PANEL_ROWS, PANEL_KEYS)",
    "means_by_guide": """\
y, t = guides.products(u, converted(part.guide_keys, guides.k))
            y.mul_(LOG2E)
            add_means_(part.positive[-3:], x2, e, y, t, 1)
            add_means_(part.key_guide, x2, e, y, t, 0)""",
    "shares_by_guide": """\
y, t = guides.products(u, converted(part.guide_keys, guides.k))
            add_shares_(g, y.mul_(LOG2E), t, part)""",
}


def _torch_guided_sides(traits: Traits) -> dict[str, Any]:
    """What the sweeps have of means by the softmaxes of a guide over both axes."""
    both = traits.guided_sides
    return {name: text if both else ABSENT for name, text in _GUIDED_SIDES.items()} | {
        "guided_sides": both,
        "scratch_panels": "4 panels (z, y and their exponentials)" if both else "2 panels (z and the exponentials)",
        "and_sequences": ", Sequence" * traits.by_guide,
        "and_guided_query": ", positive[-3, panel].double() / LOG2E" * both,
        "and_guided_key": ", block.key_guide[0, panel].double() / LOG2E" * both,
        "and_nothing": ", nothing" * both,
    }


_NOTED_COLUMNS = "part.positive[3, row], part.positive[4, row] = exponent[column], e[row, column]"
_POSITIVE_OF_COLUMN = "pc = positive_logit(positive[0, rows], positive[3, rows], positive[4, rows], scale, bias)"
_DIVIDED_COLUMNS = """\
of_columns = block.keys.mantissa[rows]
        block.keys.mantissa[rows] = (of_columns / key_weight).masked_fill(of_columns == 0, torch.inf)"""


def _torch_columns(traits: Traits) -> dict[str, Any]:
    """What the sweeps have of sums over queries: positives in them, or weights of their keys."""
    found = {
        "about_columns": "keys.mantissa      that of the column of its positive over ac_i",
        "column_of_nothing": "key_weight = key_weight.masked_fill(block.keys.mantissa[rows] == 0, 0.0)",
        "divided_columns": _DIVIDED_COLUMNS,
        "sum_of_column": "cp = log(block.keys, rows)",
        "fresh_columns": "",
    }
    if traits.columns_of_ids:
        found |= {
            "about_columns": "columns            fp64 (m,), cp of each query; becomes ac_i",
            "divided_columns": "columns[rows] = key_weight",
            "fresh_columns": "if fresh_keys:\n        block.keys.mantissa.zero_()",
        }
    noted = traits.in_columns or not traits.crossed
    return {name: text if traits.crossed else ABSENT for name, text in found.items()} | {
        "and_columns": ", columns: Tensor" * traits.columns_of_ids,
        "positive_of_column": _POSITIVE_OF_COLUMN if traits.in_columns else ABSENT,
        "added_columns": ("exponent = " * noted + "add_(part.keys, x2, e, 0)") * traits.has_keys or ABSENT,
        "noted_columns": _NOTED_COLUMNS if noted else ABSENT,
        "sums_of_positives": traits.has_keys and not traits.combined,
        "plus_column": " + key_weight" * traits.crossed,
    }


_MEANS_LEFT = "positive[0, rows] = slope / n"
_SOFTMAX_LEFT = """\
positive[0, rows] = (positive[0, rows] / slope).masked_fill(~found, torch.inf)
positive[4, rows] = positive[4, rows].masked_fill(~found, torch.finfo(STATISTICS_DTYPE).max)"""


def _torch_several(traits: Traits, x2: str) -> dict[str, Any]:
    """What the sweeps have of any number of positives; `x2` is a strip's."""
    triangle, softmax = traits.triangle, traits.softmax_of_positives
    own = "positive[0][:, None]"
    if softmax:
        of_sides = [
            f"(x2 - strip.{side}positive[4]{at}).exp2_().div_(strip.{side}positive[0]{at})"
            for side, at in [("", "[:, None]"), ("key_", "")][: 1 + triangle]
        ]
        shares = f"shares = {of_sides[0]}" + "".join(f"\nshares += {each}" for each in of_sides[1:])
        merged = "add_(Statistics(positive[4], positive[0]), e, e, axis)"
    else:
        of_both = f"strip.{own} + strip.key_positive[0]"
        shares = f"shares = {of_both if triangle else f'strip.{own}.expand(others.shape).clone()'}"
        merged = "positive[0] += e.sum(axis)"
    return {
        "first_key": "i if block.own else 0" if triangle else "0",
        "about_p": "log-sum-exp" if softmax else "mean logit",
        "about_parts": "sum, number, and of a log-sum-exp exponent; then what `combine` leaves.",
        "about_left": "the mantissa of positives over b_i" if softmax else "g of each positive, b_i / n_i",
        "positive_of_axis": "block.positive if axis else block.key_positive" if triangle else "block.positive",
        "without_itself": "if block.diagonal:\n    same_id.diagonal(first).fill_(False)" if triangle else ABSENT,
        "counted": "rows if axis else slice(None)" if triangle else "rows",
        "nothing": "-math.inf" if softmax else "0.0",
        "merged_positives": merged,
        "p_of_rows": "log(Statistics(positive[4], positive[0]), rows)"
        if softmax
        else "positive[0, rows] / (LOG2E * n)",
        "left_of_positives": _SOFTMAX_LEFT if softmax else _MEANS_LEFT,
        "and_off_the_diagonal": " and not part.diagonal" * triangle,  # where panels are whole
        "of_sides": "both sides'" if triangle else "queries'",
        "gradient_of_pair": "M * (dL/dx_ij + dL/dx_ji)" if triangle else "M * dL/dx",
        "z_after_shares": "is overwritten" if traits.affine else "stays",
        "x2_of_rows": x2,
        "shares_of_positives": shares,
    }


_BY_Z, _BY_Z_OF_BOTH = "g[row, column] += own.positive[4, row]", "add_by_z_(g, part)"
_OF_ROWS_ALONE = """\
of_positives = x2[row, column]
x2[row, column] = -math.inf"""
_OF_COLUMNS_ALONE = """\
x2[row, column] = of_positives
x2[visible[::-1]] = -math.inf"""
_G_OF_INCLUDED = """\
Where j is the positive of i, p_i - 1 = (its term - the sum) / the sum: rounded once, 0 where the sum holds nothing
    else."""
_G_OF_COMBINED = """\
Where j is the positive of i, `combine` has left g of it.
   """
_ABOUT_PARTS = "z, and its exponent and term in a sum; then what `combine` leaves."


def _torch_sides(traits: Traits) -> dict[str, Any]:
    """What a triangle's sweeps have of positives, which each axis of a panel has its own."""
    if not traits.triangle:
        return {}
    without, combined = traits.without_positives, traits.combined
    masked = traits.own_references
    of_rows, of_columns = (f"e.copy_(x2).masked_fill_(of_{side}, -math.inf)" for side in ("rows", "columns"))
    return {
        "without_positives_of_rows": of_rows if masked else _OF_ROWS_ALONE if without else ABSENT,
        "without_positives_of_columns": of_columns if masked else _OF_COLUMNS_ALONE if without else ABSENT,
        "g_of_own_positive": _G_OF_COMBINED if combined else _G_OF_INCLUDED,
        "part_of_z": 4 if combined else 0,
        "share_there": "noted_there[0, there]" if combined else "lacking(sums_there, noted_there, there)",
        "own_sums": "_" if combined else "sums",
        "own_share": "noted[0, at]" if combined else "lacking(sums, noted, at)",
    }


# Where the terms of a sum over pairs are added up.
_OF_ALL_QUERIES: dict[str, Any] = {
    "totals": "block.sums[0]",
    "summed": "terms, and the slopes,",
    "fresh_totals": ABSENT,
    "times_factor": ABSENT,
    "about_fresh": "The other arguments are for other losses.",
    "about_room": "Adds a panel's terms to `block.sums[0]`. With room for g, writes g, and adds M * dL/dx to "
    "`block.sums[1]`.",
}
_OF_EACH_QUERY: dict[str, Any] = {
    "totals": "block.queries.total",
    "summed": "slopes",
    "fresh_totals": "if fresh_queries:\n    block.queries.total.zero_()",
    "times_factor": "slopes *= strip.queries.factor[:, None]",
    "about_fresh": "What is fresh was never written. The other arguments are for other losses.",
    "about_room": "Adds a panel's terms to the totals of its queries. With room for g, writes g, and adds M * dL/dx to"
    "\n`block.sums[1]`, both times the factors of queries.",
}


def _torch_classes(traits: Traits) -> dict[str, str]:
    """The statements of a sum over pairs for the classes that its traits have."""
    own = "The positive's own term takes the place of what `pair_term` would give it: a difference of two would cancel."
    placed = {
        "places": "row, column = positive_places(strip)",
        "positive_logits": "p = x[row, column]",
        "positive_terms": "terms[row, column] = formulas.positive_term(p)",
        "positive_slopes": "slopes[row, column] = formulas.positive_slope(p)",
    }
    same = "same_id" if traits.placed else "positive"
    ids = {
        "same_id": "same_id = strip.query_ids[:, None] == strip.key_ids",
        "same_id_terms": f"torch.where(same_id, formulas.{same}_term(x), terms, out=terms)",
        "same_id_slopes": f"torch.where(same_id, formulas.{same}_slope(x), slopes, out=slopes)",
    }
    return {
        **(_OF_ALL_QUERIES if traits.at_once else _OF_EACH_QUERY),
        "at_once": traits.at_once,
        "same_id_again": ids["same_id"] if traits.ids and not traits.at_once else ABSENT,
        "about_classes": own if traits.placed else "Each pair has the term of its class.",
        **{name: text if traits.placed else ABSENT for name, text in placed.items()},
        **{name: text if traits.ids else ABSENT for name, text in ids.items()},
    }


def _identifier(name: str) -> str:
    """ASCII of at most 40 characters; other names, as of users' files, enter as a digest."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", name):
        return name
    return "file" + hashlib.sha256(name.encode()).hexdigest()[:8]
