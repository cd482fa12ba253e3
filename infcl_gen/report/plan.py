"""The page of a plan: each number is the plan's, the cost model's, the simulated step's, or of the rows of `scale`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infcl_gen.inputs.text import bytes_text, count_text, time_text
from infcl_gen.kernels import launched
from infcl_gen.kernels.elementwise import FinishTile
from infcl_gen.planning import Plan
from infcl_gen.planning.model import CostModel
from infcl_gen.planning.timeline import RESOURCES, Timeline
from infcl_gen.version import __version__

from infcl_gen.report.figures import (  # isort: skip
    WIDTH, Axes, Bar, Figure, Mark, Page, Section, Series, Table, bars, dot, line, lines, rect, stacked,
    text, ticks, tone,
)  # fmt: skip

LEVELS = ("0 cluster", "1 node", "2 device", "3 multiprocessor", "4 warps")
BOUNDS = ("product", "memory", "exponentials", "launches", "link")
PHASES = ("forward", "backward", "finish", "after")
MOST_DRAWN = 16  # nodes, or devices of a node
MOST_PANELS = 1024
MOST_EVENTS = 4000
NEAR_HOPS = 3  # of a phase, in the close-up


def plan_page(
    plan: Plan, model: CostModel, step: Timeline, scaling: Sequence[Mapping[str, Any]] | str, command: str
) -> Page:
    """`model` chose the plan, `step` is its simulation behind other work. `scaling`: rows of `infcl-gen scale`, or why
    there are none."""
    problem, queued = plan.problem, plan.predicted_queued_s
    devices = f"{plan.world_size} device" + "s" * (plan.world_size > 1) + f" ({model.profile.name})"
    nodes = f" on {problem.nodes} nodes" * (problem.nodes > 1)
    counts = plan.traits.counted(problem.batch_size, problem.total_keys, " x ")
    sizes = f"{counts} x {problem.dim}, {plan.dtype}"
    return Page(
        title=f"Plan: {problem.loss}, {sizes}",
        lead=(f"Strategy {plan.strategy} on {devices}{nodes}. Times are predicted and simulated; none was measured.",),
        facts=(
            ("forward and backward", time_text(plan.predicted_time_s)),
            ("behind other work", time_text(queued)),
            ("peak beyond the inputs", bytes_text(plan.predicted_peak_bytes)),
            ("memory budget", bytes_text(plan.allowed_bytes)),
            ("smallest budget", bytes_text(plan.smallest_budget_bytes)),
            ("largest batch for the budget", str(plan.largest_batch)),
        ),
        sections=(
            _tiles(plan),
            _memory(plan, model),
            _time(plan),
            _roofline(plan, model),
            _step(plan, step),
            _scaling(scaling),
        ),
        origin=(f"Made by infcl_gen {__version__}: {command}",),
    )


def _tiles(plan: Plan) -> Section:
    figures = [_ring(plan)] if plan.world_size > 1 else []
    figures += [_batch(plan), _hop(plan)]
    if plan.blocks:
        figures += [_panels(plan), _blocks(plan)]
    reasons = [(LEVELS[reason.level], reason.decision, reason.why) for reason in plan.reasons]
    table = Table("Decisions and their reasons", ("level", "decision", "why"), reasons)
    own, compared = plan.traits.sides
    notes = (f"{own.capitalize()} go down, {compared} go across. Rectangles of one figure have one scale.",)
    return Section("Tiles", notes, figures, [table])


def _ring(plan: Plan) -> Figure:
    """Nodes on a circle, with their devices; a single node's devices on the circle."""
    nodes, inside = plan.schedule.nodes, plan.schedule.devices_per_node
    outer = nodes if nodes > 1 else inside
    drawn, marks = min(outer, MOST_DRAWN), list[Mark]()
    places = list(_circle(WIDTH / 2, 130, 100, drawn))
    pairs = (
        [(a, b) for a in range(drawn) for b in range(a)]
        if plan.gather
        else [(a, (a + 1) % drawn) for a in range(drawn)]
    )
    marks += [line(*places[a], *places[b], "grid" if plan.gather else "") for a, b in pairs]
    for number, (x, y) in enumerate(places):
        if nodes > 1:
            marks.append(dot(x, y, 19, "soft", f"node {number}", node=number))
            marks += [dot(*at, 3, "t0") for at in _circle(x, y, 12, min(inside, MOST_DRAWN))]
        else:
            marks.append(dot(x, y, 9, "t0", f"device {number}", device=number))
    _, compared = plan.traits.sides
    who = f"all {compared} to everybody" if plan.gather else f"{compared} go round"
    marks.append(text(WIDTH / 2, 134, who, "muted", "middle"))
    words = f"{nodes} nodes of {inside} devices each. " if nodes > 1 else f"{inside} devices of one node. "
    words += f"Transport: {plan.transport}."
    if max(outer, inside) > MOST_DRAWN:
        words += f" At most {MOST_DRAWN} of each are drawn."
    return Figure(f"Level 0 and 1: who exchanges {compared}", words, 260, marks)


def _batch(plan: Plan) -> Figure:
    rows, keys = plan.problem.batch_size, plan.problem.total_keys
    own, visiting = plan.rows_per_rank, plan.keys_per_rank
    scale = min(WIDTH / keys, 300 / rows)
    marks = [
        _tile(0, 0, rows, keys, scale, "soft", "whole matrix"),
        _tile(0, 0, own, keys, scale, "t0 faint", "one device"),
        _tile(0, 0, own, visiting, scale, "t0", "one hop"),
    ]
    words = f"The matrix of {rows} x {keys} logits, which is never stored."
    if plan.world_size > 1:
        names = plan.traits.sides
        words += f" A device has {own} {names[0]} and meets {visiting} {names[1]} at a hop;"
        words += f" there are {plan.schedule.visits('forward')} hops."
    key = [("soft", "whole matrix"), ("t0 faint", "one device"), ("t0", "one hop")]
    key = key if plan.world_size > 1 else [("t0", "the one device")]
    return Figure("Level 1: the device's share", words, rows * scale + 2, marks, key)


def _hop(plan: Plan) -> Figure:
    rows, keys, (height, width) = plan.rows_per_rank, plan.keys_per_rank, _panel(plan)
    scale, across, down = min(WIDTH / keys, 300 / rows), -(-keys // width), -(-rows // height)
    marks, places = list[Mark](), [(i, j) for i in range(down) for j in range(across)]
    if len(places) > MOST_PANELS:
        places = [(i, 0) for i in range(min(down, MOST_PANELS))] + [(0, j) for j in range(1, min(across, MOST_PANELS))]
    marks.append(_tile(0, 0, rows, keys, scale, "soft", "one hop"))
    for i, j in places:
        y, x = i * height, j * width
        kind = "t1 cell" if (i, j) == (0, 0) else "t0 faint cell"
        marks.append(_tile(y, x, min(height, rows - y), min(width, keys - x), scale, kind, f"panel {i}, {j}"))
    key = [("t1", "first panel of backward"), ("t0 faint", "further panels")][: 1 + (len(places) > 1)]
    if plan.stash_rows:
        marks.append(_tile(0, 0, min(plan.stash_rows, rows), keys, scale, "t2 faint", "stash"))
        key.append(("t2 faint", "rows whose tiles are kept"))
    forward = min(plan.forward_rows, rows), min(plan.forward_keys, keys)
    marks.append(_tile(0, 0, *forward, scale, "outline", "forward panel"))
    count = f"{down * across} panels" if down * across > 1 else "one panel"
    own, compared = plan.traits.sides
    words = f"{rows} {own} x {keys} {compared} in {count} of {height} x {width};"
    words += f" the outline is the forward panel, {forward[0]} x {forward[1]}."
    words += " The first row and column of panels are drawn." * (len(places) < down * across)
    return Figure("Level 2: panels of a hop", words, rows * scale + 2, marks, key)


def _panels(plan: Plan) -> Figure:
    """Both panels, each with one block of the kernel that fills it."""
    rows, keys = plan.rows_per_rank, plan.keys_per_rank
    inner = "fused" if plan.strategy == "fused" else "gradient"
    sides = (("forward", min(plan.forward_rows, rows), min(plan.forward_keys, keys)), (inner, *_panel(plan)))
    scale = min(0.48 * WIDTH / max(side[2] for side in sides), 240 / max(side[1] for side in sides))
    marks, said = list[Mark](), []
    for number, (tile_of, height, width) in enumerate(sides):
        (kernel, block), x = launched(plan)[tile_of], number * WIDTH / 2
        marks.append(text(x, 11, f"{kernel}: {height} x {width}"))
        marks.append(_tile(0, 0, height, width, scale, "soft", f"panel of {kernel}", x, 16))
        tile = min(block.rows, height), min(block.keys, width)
        marks.append(_tile(0, 0, tile[0], width, scale, "t8", f"row of blocks of {kernel}", x, 16))
        marks.append(_tile(0, 0, height, tile[1], scale, "t8", f"column of blocks of {kernel}", x, 16))
        marks.append(_tile(0, 0, *tile, scale, "t3", f"block of {kernel}", x, 16))
        said.append(f"{-(-height // block.rows) * -(-width // block.keys)} blocks of {kernel}")
    words = (
        f"A block in the corner of its panel, with its row and its column of blocks. A panel has {' or '.join(said)}."
    )
    return Figure("Level 2 and 3: a block in its panel", words, scale * max(side[1] for side in sides) + 20, marks)


def _blocks(plan: Plan) -> Figure:
    """Each kernel's block beside the slices of queries and keys that it multiplies."""
    blocks, gap = launched(plan).values(), 6.0
    scale = (WIDTH / 2 - 3 * gap) / max(b.keys + b.depth for _, b in blocks)
    marks, y, height = list[Mark](), 0.0, 0.0
    for number, (kernel, block) in enumerate(blocks):
        column = number % 2
        y, height = (y, height) if column else (y + height, 0.0)
        x, top, deep = column * WIDTH / 2, y + 28, block.depth * scale + gap
        marks.append(text(x, y + 11, f"{kernel}: {block.rows} x {block.keys} x {block.depth}"))
        marks.append(text(x, y + 23, f"{block.warps} warps, {block.stages} stage" + "s" * (block.stages > 1), "muted"))
        if kernel == FinishTile.name:  # rows x depth of a sum, and no product
            marks.append(_tile(0, 0, block.rows, block.depth, scale, "t3", f"block of {kernel}", x, top))
            deep = 0.0
        else:
            marks.append(_tile(0, 0, block.rows, block.depth, scale, "t0", f"left operand of {kernel}", x, top + deep))
            marks.append(_tile(0, 0, block.depth, block.keys, scale, "t1", f"right operand of {kernel}", x + deep, top))
            marks.append(_tile(0, 0, block.rows, block.keys, scale, "t3", f"block of {kernel}", x + deep, top + deep))
        height = max(height, 28 + deep + block.rows * scale + 14)
    words = "rows x keys x depth: a program holds its block and walks the operands, slices of that depth at a time."
    words += " finish has rows x depth of a sum."
    key = [("t3", "block"), ("t0", "slice of the left operand"), ("t1", "slice of the right operand")]
    return Figure("Level 3 and 4: blocks of the kernels", words, y + height, marks, key)


def _memory(plan: Plan, model: CostModel) -> Section:
    """Stacks of what is allocated at once: buffers of "both" and of the phase, and the allocator's slack."""
    memory = model.memory(plan)._asdict()
    tones = {name: tone(number) for number, name in enumerate(dict.fromkeys(b.name for b in plan.buffers))}
    slack = {phase: size - sum(b.bytes for b in plan.buffers if b.phase == phase) for phase, size in memory.items()}
    stacks = []
    for phase in PHASES[: 3 + (memory["after"] > 0)]:
        own = [buffer for buffer in plan.buffers if buffer.phase in ("both", phase)]
        parts = [Bar(b.name, b.bytes, bytes_text(b.bytes), f"{tones[b.name]} cell") for b in own]
        rest = slack["both"] + slack[phase]
        parts.append(Bar("slack", rest, bytes_text(rest), "rest cell"))
        stacks.append((phase, bytes_text(memory["both"] + memory[phase]), parts))
    words = (
        "What a device holds at once beyond the inputs; the table names the colours. Slack is what torch's allocator"
    )
    words += " may round up. finish: the gradients are written, and no buffer of a hop is left."
    words += " after: they are returned, and torch makes those of what they depend on." * (memory["after"] > 0)
    limit = f"budget {bytes_text(plan.allowed_bytes)}"
    figure = stacked("Memory by phase", words, stacks, plan.allowed_bytes, limit)
    rows = [(b.name, b.phase, bytes_text(b.bytes), " x ".join(map(str, b.shape)), b.dtype, b.why) for b in plan.buffers]
    rows += [
        ("slack", phase, bytes_text(size), "", "", "rounding of the allocator") for phase, size in slack.items() if size
    ]
    colours = [tones.get(row[0], "rest") for row in rows]
    note = f"The peak is {bytes_text(plan.predicted_peak_bytes)}, an upper bound: both + the largest of the phases."
    table = Table("Buffers", ("buffer", "phase", "size", "shape", "dtype", "why"), rows, colours)
    return Section("Memory", (note,), [figure], [table])


def _time(plan: Plan) -> Section:
    tones = {bound: tone(number) for number, bound in enumerate(BOUNDS)}
    items = [Bar(p.name, p.time_s, f"{time_text(p.time_s)}, {p.bound}", tones[p.bound]) for p in plan.phases]
    key = [(tones[bound], bound) for bound in BOUNDS if any(p.bound == bound for p in plan.phases)]
    words = (
        f"The phases add up to {time_text(plan.predicted_time_s)} from an idle device. The colour is what bounds them."
    )
    figure = bars("Predicted time by phase", words, items)._replace(key=key)
    rows = [
        (p.name, time_text(p.time_s), p.bound, count_text(p.flops) + "FLOP", bytes_text(round(p.bytes)))
        for p in plan.phases
    ]
    return Section("Time", (), [figure], [Table("Phases", ("phase", "time", "bound by", "work", "traffic"), rows)])


def _roofline(plan: Plan, model: CostModel) -> Section:
    kind, gbs = model.product_kind, model.profile.bandwidth_gbs
    peak = model.profile.matmul_tflops[kind]
    notes = (
        f"Ceilings of {model.profile.name}: {peak.value:g} TFLOP/s of {kind} ({peak.source});"
        f" {gbs.value:g} GB/s of memory ({gbs.source}).",
    )
    ridge = peak.value * 1e3 / gbs.value  # FLOP per byte
    points = [
        (p.name, p.flops / p.bytes if p.bytes else math.inf, p.flops / p.time_s / 1e12) for p in plan.phases if p.flops
    ]
    finite = [intensity for _, intensity, _ in points if intensity < math.inf]
    low, high = min([ridge, *finite]) / 10, max([ridge, *finite]) * 4
    bottom = min([low * gbs.value / 1e3, *(rate for *_, rate in points)]) / 2
    axes = Axes((low, high), (bottom, peak.value * 2))
    marks = axes.frame("FLOP per byte of memory traffic", "TFLOP/s")
    marks.append(axes.curve([(low, low * gbs.value / 1e3), (ridge, peak.value), (high, peak.value)], "limit"))
    for number, (name, intensity, rate) in enumerate(points):
        at = axes.x(min(intensity, high)), axes.y(rate)
        radius = 3.0 + 1.3 * (len(points) - number)  # equal points become rings
        marks.append(dot(*at, radius, tone(number), f"{name}: {rate:.4g} TFLOP/s", intensity=intensity, rate=rate))
    words = "Kernels with matrix products, at their predicted rates; the dashed line is the device's ceiling."
    words += " At the right edge: the model counts no traffic for these products." * (len(finite) < len(points))
    figure = Figure("Roofline", words, axes.height, marks, [(tone(n), name) for n, (name, *_) in enumerate(points)])
    rows = [
        (name, f"{intensity:.4g}" if intensity < math.inf else "-", f"{rate:.4g}", f"{rate / peak.value:.0%}")
        for name, intensity, rate in points
    ]
    return Section(
        "Roofline", notes, [figure], [Table("Kernels", ("kernel", "FLOP per byte", "TFLOP/s", "of the peak"), rows)]
    )


def _step(plan: Plan, step: Timeline) -> Section:
    used = [name for name in RESOURCES if step.busy_s[name]]
    notes = [
        f"One rank, simulated behind other work: {time_text(step.step_s)}, forward {time_text(step.forward_s)} of it."
        f" Efficiency {step.efficiency:.3f} against the same work without communication; bound by {step.bound}."
    ]
    figures, hops, back = [], *map(plan.schedule.hops, ("forward", "backward"))
    if len(step.intervals) <= MOST_EVENTS:
        words = "Each bar is an event: kernels, messages over links, and the host's work that the lead does not hide."
        figures.append(_lanes("The whole step", words, step, used, 0.0, step.step_s))
    else:
        notes.append(f"The step has {len(step.intervals)} events; {'only the turn is' if back else 'none are'} drawn.")
    if hops > 2 * NEAR_HOPS and back:
        last, first = f"forward, hop {hops - NEAR_HOPS}", f"backward, hop {NEAR_HOPS - 1}"
        kernels = [each for each in step.intervals if each.resource == "compute"]
        begin = min(each.start_s for each in kernels if each.name == last)
        end = max(each.end_s for each in kernels if each.name == first)
        words = f"The last {NEAR_HOPS} hops of forward and the first {NEAR_HOPS} of backward."
        figures.append(_lanes("The turn from forward to backward", words, step, used, begin, end))
    rows = [(name, time_text(step.busy_s[name]), time_text(step.critical_s[name])) for name in used]
    table = Table("Resources", ("resource", "busy", "on the longest chain of events"), rows)
    return Section("Timeline of a step", notes, figures, [table])


def _lanes(title: str, words: str, step: Timeline, used: Sequence[str], begin_s: float, end_s: float) -> Figure:
    marks, scale, height = list[Mark](), WIDTH / (end_s - begin_s), 40.0 * len(used)
    for value, name in ticks(1e3 * begin_s, 1e3 * end_s, log=False).items():
        x = (value * 1e-3 - begin_s) * scale
        anchor = "start" if x < 12 else "middle" if x < WIDTH - 12 else "end"
        marks += [line(x, 0, x, height, "grid"), text(x, height + 13, name, "muted", anchor)]
    marks.append(text(WIDTH, height + 26, "ms", "muted", "end"))
    marks += [text(0, 40.0 * lane + 12, name) for lane, name in enumerate(used)]
    for each in step.intervals:
        start_s, stop_s = max(each.start_s, begin_s), min(each.end_s, end_s)
        if stop_s >= start_s:
            width, lane = max((stop_s - start_s) * scale, 0.4), used.index(each.resource)
            kind = ("t0" if each.name.startswith("forward") else "t1") + " cell" * (width > 2)
            hint = f"{each.name}: {time_text(each.end_s - each.start_s)}"
            times = {"start": each.start_s, "end": each.end_s, "resource": each.resource}
            marks.append(rect((start_s - begin_s) * scale, 40.0 * lane + 17, width, 18.0, kind, hint, **times))
    return Figure(title, words, height + 28, marks, [("t0", "forward"), ("t1", "backward")])


def _scaling(rows: Sequence[Mapping[str, Any]] | str) -> Section:
    if isinstance(rows, str):
        return Section("Scaling", (rows,))
    good = [row for row in rows if row["error"] is None]
    sizes = {row["devices"]: str(row["devices"]) for row in good}
    figures = []
    if len(good) > 1:
        steps, shares = ([(row["devices"], row[name]) for row in good] for name in ("step_ms", "efficiency"))
        ideal = [(count, steps[0][0] * steps[0][1] / count) for count, _ in steps]
        series = [Series("simulated", steps, "t0"), Series("ideal, from the first", ideal, "t8", "dashed")]
        words = "Forward and backward of the same batch, planned and simulated for each number of devices."
        figures.append(lines("Time", words, series, ("devices", "ms"), sizes))
        words = "Speed relative to the same work without communication."
        figures.append(
            lines("Efficiency", words, [Series("simulated", shares, "t0")], ("devices", ""), sizes, (0, 1.05))
        )
    cells = []
    for row in rows:
        least = row["smallest_budget_bytes"]
        found = ("-", "-", "-", f"at least {bytes_text(least)}" if least else "-", "no plan fits the budget")
        if row["error"] is None:
            step, share = time_text(row["step_ms"] / 1e3), f"{row['efficiency']:.3f}"
            found = (row["transport"], step, share, bytes_text(row["peak_bytes"]), row["bound"])
        cells.append((str(row["devices"]), str(row["nodes"]), *found))
    header = ("devices", "nodes", "transport", "step", "efficiency", "memory of a device", "bound by")
    notes = ("Simulated by the code of infcl-gen scale; nothing here was measured.",)
    return Section("Scaling", notes, figures, [Table("Numbers of devices", header, cells)])


def _panel(plan: Plan) -> tuple[int, int]:
    """Queries and keys that backward has in work at once."""
    rows, keys = plan.rows_per_rank, plan.keys_per_rank
    if plan.strategy == "fused":
        return (rows if plan.world_size > 1 else min(plan.panel_rows, rows)), keys
    return min(plan.panel_rows, rows), min(plan.panel_keys, keys)


def _tile(
    row: int, key: int, rows: int, keys: int, scale: float, kind: str, name: str, x: float = 0.0, y: float = 0.0
) -> Mark:
    hint = f"{name}: {rows} x {keys}"
    return rect(
        x + key * scale, y + row * scale, keys * scale, rows * scale, kind, hint, tile=name, rows=rows, keys=keys
    )


def _circle(x: float, y: float, radius: float, count: int) -> Iterator[tuple[float, float]]:
    for number in range(count):
        angle = 2 * math.pi * number / count - math.pi / 2
        yield x + radius * math.cos(angle), y + radius * math.sin(angle)
