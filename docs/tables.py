"""Tables of measured and simulated rows, written from the .json files of tune/bench between markers of pages; plans of
training steps beside those of Inf-CL's paper; and the built-in losses.

python docs/tables.py            rewrites the tables of PAGES
python docs/tables.py --check    exits with 1 if they do not show what the files hold
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import infcl_gen
from infcl_gen import cli
from infcl_gen.bench.results import named
from infcl_gen.cli.scaling import HEADER, cells
from infcl_gen.files import checksum
from infcl_gen.inputs.problem import make_problem
from infcl_gen.losses import BUILTIN_LOSSES, LossSpec, aligned, derive, latex_of
from infcl_gen.losses.texts import SLOPES
from infcl_gen.planning.planner import Plan
from infcl_gen.step.account import PHASES, Account, LossCosts, StepProblem, account
from infcl_gen.step.choose import largest_samples
from infcl_gen.step.costs import PassCosts, StepCosts, profile_names, read_costs
from infcl_gen.step.plan import Part, TowerPlan
from infcl_gen.step.planner import PlannedLoss, optimizer_bytes

ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, Any]]
COMPARED = (65536, 768)  # batch and dim
PAGES = {
    "README.md": ("compared",),
    "docs/benchmarks.md": ("measured", "simulated"),
    "docs/gradients.md": ("conventions",),
    "docs/losses.md": ("built_in",),
    "docs/trust.md": ("oracles",),
    "docs/steps.md": ("pair_costs", "step_plan", "largest_batches", "step_memory"),
}
CONVENTIONS = "cpu-conventions.json"  # by docs/conventions.py
ORACLES = "cpu-oracles.json"  # by tests/outside/other_losses.py
STEP = "h200-step.json"  # by examples/training_step.py
STEP_SHOWN = 32768, {"planned": "`plan_step`", "accum_freq": "open_clip's `--accum-freq`"}
SHOWN = ("infcl", "open_clip-compiled", "liger-kernel", "cut-cross-entropy", "open_clip", "inf_cl")
BESIDE_PEERS = ("h200-grid.json", "h200-scale100.json", "h200-autocast-speed.json")
MIB = 2**20
PAPER_MEMORY = 80 * 10**9  # of an A800
PAPER_MICRO_BATCH = 128  # "accumulation batch size"
PAPER_K = 1024
# arXiv 2410.17243, Table 2: the largest batch of Inf-CL in k, and its loss in GB; None where there is no figure.
PAPER_LARGEST: dict[tuple[str, str], dict[int, tuple[int, float] | None]] = {
    ("vit_b_32", "device"): {8: None, 32: None}, ("vit_b_32", "host"): {8: None, 32: None},
    ("vit_b_16", "device"): {8: (800, 3.01), 32: (3456, 3.27)}, ("vit_b_16", "host"): {8: None, 32: None},
    ("vit_l_14", "device"): {8: (448, 2.52), 32: (2048, 2.89)},
    ("vit_l_14", "host"): {8: (4096, 26.12), 32: (12288, 19.59)},
}  # fmt: skip
# Table 1: loss (peak) in GB of ViT-L/14 by batch in k; "host" is its data offload, "x" exceeds the device.
PAPER_BATCHES = (32, 64, 128, 256, 1024)
PAPER_STEPS = {
    (8, "device", "OpenCLIP"): ("2.27 (43.97)", "8.63 (46.38)", "33.64 (51.23)", "x", "x"),
    (8, "device", "Inf-CL"): ("0.18 (44.20)", "0.36 (46.63)", "0.72 (51.46)", "1.45 (61.13)", "x"),
    (8, "host", "Inf-CL"): ("0.18 (42.40)", "0.36 (42.49)", "0.72 (42.69)", "1.45 (43.07)", "6.53 (45.40)"),
    (32, "device", "OpenCLIP"): ("0.71 (42.46)", "2.45 (43.06)", "8.98 (44.26)", "34.35 (46.71)", "x"),
    (32, "device", "Inf-CL"): ("0.05 (42.48)", "0.09 (43.08)", "0.18 (44.30)", "0.35 (46.71)", "1.44 (61.20)"),
}
STASH_BUDGET = "40GiB"
POSITIVES = {
    "diagonal": "key i of query i",
    "label": "one key of a query, which `labels` names; without labels key i of query i",
    "id": "all keys of a query's id",
    "none": "none",
}
HALVES = "without labels rows i and i + M/2 of the M rows of a rank belong together"
OF_ROWS = f"one other row, which `labels` names; {HALVES}"
PAIRS = f"the other row of its pair, on the same rank, which `labels` names; {HALVES}"
WEIGHED = "all keys, each with its weight"
OTHER_ROWS = "all other rows of a row's id"
WHEN_KNOWN = {
    "before": "computed in forward, pair by pair",
    "row": "computed in backward, from statistics of queries",
    "all": "computed in backward, from statistics of both sides",
}
BY_ROWS = "computed in forward by rows of panels, where `rows` is planned; else in backward, from statistics of queries"
FROM_ROWS = "computed in backward, from statistics of both rows of a pair"
SAME = 1e-4  # of the true loss: ranks whose values differ by less return the same


def main() -> int:
    check, stale = "--check" in sys.argv[1:], []
    for name, kinds in PAGES.items():
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        fresh = text
        for kind in kinds:
            begin, end = f"<!-- {kind}:begin -->", f"<!-- {kind}:end -->"
            before, _, rest = fresh.partition(begin)
            held = fresh
            fresh = f"{before}{begin}\n{tables(kind)}{end}{rest.partition(end)[2]}"
            stale += [f"{name}: {kind}"] * (fresh != held)
        if not check:
            page.write_text(fresh, encoding="utf-8")
    if check and stale:
        print(f"not what their files hold: {', '.join(stale)}; python docs/tables.py writes them", file=sys.stderr)
    return int(check and bool(stale))


def tables(kind: str) -> str:
    """Those of each measured or simulated file, in the order of their names; that of one file, for the README
    ("compared"), "conventions" and "oracles"; that of plans; or the sections of built-in losses.

    Raises ValueError for a wrong checksum.
    """
    if kind in PAGES["docs/steps.md"]:
        made: dict[str, Callable[[], str]] = {
            "pair_costs": pair_costs, "step_plan": step_plan, "largest_batches": largest_batches,
            "step_memory": step_memory,
        }  # fmt: skip
        return made[kind]()
    if kind == "built_in":
        return "".join(map(section, BUILTIN_LOSSES.values()))
    if kind == "compared":
        losses, step = (json.loads((ROOT / "tune" / "bench" / name).read_text()) for name in (BESIDE_PEERS[0], STEP))
        return compared(losses["rows"], step["rows"])
    parts = []
    for path in sorted((ROOT / "tune" / "bench").glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        rows = results["rows"]
        if checksum(rows) != results["checksum"]:
            raise ValueError(f"{path.name}: its rows do not match its checksum")
        own = {CONVENTIONS: ("conventions", conventions), ORACLES: ("oracles", oracles)}
        if path.name in own or kind in ("conventions", "oracles"):
            if path.name in own and kind == own[path.name][0]:
                parts.append(own[path.name][1](rows, results["absent"]) + _origin(path, results))
            continue
        if results.get("simulated", False) != (kind == "simulated"):
            continue
        parts.append(_origin(path, results))
        if path.name in BESIDE_PEERS:
            parts.append(beside_peers(rows))
        parts += _tables(rows, results.get("absent", {}), kind == "simulated")
    return "".join(parts)


def _origin(path: Path, results: dict[str, Any]) -> str:
    versions = (f"{name} {version}" for name, version in sorted(results["versions"].items()) if version)
    return f"\n`tune/bench/{path.name}`: {results['board']}; {', '.join(versions)}; `{results['command']}`\n"


def _tables(rows: Rows, absent: dict[str, str], simulated: bool) -> list[str]:
    if simulated:
        return [_table(HEADER, map(cells, rows))]
    if "way" in rows[0]:
        return [training_steps(rows)]
    if "plain_ms" in rows[0]:
        return [mean_steps(rows)]
    if "kernel" in rows[0]:
        return [counters(rows)]
    if "joules" in rows[0]:
        return [power(rows)]
    if all(row["median_ms"] is None and row["error"] is None for row in rows):
        return [accuracies(rows)]
    rings = [efficiencies(rows)] if any(row["package"] == "no communication" for row in rows) else []
    if not rings and all(row["impl"] == "infcl" for row in rows):
        return [budgets(rows)]
    return [*rings, comparisons(rows, absent)]


def _table(head: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    rows = [head, ["---"] * len(head), *lines]
    return "\n" + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def compared(rows: Rows, steps: Rows) -> str:
    """The README's table: packages and the best-known peers at the point to compare at; then a whole training step."""
    shown = [row for row in rows if (row["batch"], row["dim"]) == COMPARED and row["impl"] in SHOWN]
    lines = [
        (_who(row), f"{row['queued_ms']:.1f}", f"{row['peak_bytes'] / MIB:,.0f}")
        for row in sorted(shown, key=lambda row: row["queued_ms"])
    ]
    batch, named = STEP_SHOWN
    for row in steps:
        if row["batch"] == batch and row["way"] in named:
            what = f"a step of {row['model']}, {batch:,} pairs: {named[row['way']]}"
            lines.append((what, f"{row['median_ms']:,.0f}", f"{row['peak_bytes'] / MIB:,.0f}"))
    return _table(("who", "ms", "MiB"), lines)


def section(spec: LossSpec) -> str:
    """What the page of losses says of one: source, formulas, traits, products, and when to use it."""
    derivation = derive(spec)
    traits, formulas = derivation.traits, latex_of(derivation)
    hidden = {"dq", "dk", "dscale", "dbias", *(name for name, _ in SLOPES.values())}
    shown = (text for name, text in formulas.items() if name not in hidden)
    source = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", spec.source)
    kinds = {
        "logsumexp": "log-sum-exp of each {}",
        "logsumexp_of_multiple": "log-sum-exp of a multiple of each {}'s logits",
        "logsumexp_of_positive": "log-sum-exp of the positive of each {}",
        "logsumexp_of_column": "that of the column of each {}'s positive",
        "mean_over_positives": "mean logit of each {}'s positives, and their number",
        "mean_by_guide": "mean logit of each {} by its guide's softmax, and the sum of that",
        "logsumexp_over_positives": "log-sum-exp of each {}'s positives, and their number",
    }
    reduced = [
        kinds[kind].format(side)
        for side, found in (("query", traits.query_statistics), ("key", traits.key_statistics))
        for kind in found
    ]
    reduced += ["log-sum-exp over the positives of all queries"] * bool(traits.pooled)
    keys = "as many as queries" if traits.paired else "any number"
    planned = plans(spec)
    by_rows = any(plan.strategy == "rows" for plan in planned)
    by_panels = f"{plans(spec, strategy='panel')[0].products:.3g}" if by_rows else ""
    of_rows = PAIRS if traits.partnered else OF_ROWS if traits.labels else OTHER_ROWS
    ids = "`query_ids`" if traits.triangle else "`query_ids`, `key_ids`"
    lines = [
        (
            "positives",
            of_rows if traits.triangle else WEIGHED if derivation.form.weight else POSITIVES[traits.positives],
        ),
        ("keys", "all other queries: a call has one side, `k = None`" if traits.triangle else keys),
        ("ids", ids if traits.ids else "none"),
        *[("of single queries", ", ".join(f"`{name}`" for name in traits.vectors))] * bool(traits.vectors),
        *[("guide", "`guide_queries`, `guide_keys`")] * traits.guided,
        *[("factors of similarities", ", ".join(f"`{name}`" for name in traits.scaled))] * bool(traits.scaled),
        ("statistics", ", ".join(reduced) or "none"),
        ("gradients", FROM_ROWS if traits.triangle else BY_ROWS if by_rows else WHEN_KNOWN[traits.known]),
        (
            "products",
            products(planned) + f"; {by_panels} without `rows`" * by_rows + "; 1 without gradients" * traits.at_once,
        ),
    ]
    table = _table(("trait", spec.name), lines)
    formula = f"$$\n{aligned(shown, 'aligned')}\n$$\n"
    return f"\n## {spec.name}\n\n{spec.doc}\n\nSource: {source}.\n\n{formula}{table}\n{spec.use}\n"


def plans(spec: LossSpec, **settings: str) -> list[Plan]:
    """The plan of `COMPARED` on an H200, and the one with a budget that has room for a stash."""
    batch, dim = COMPARED
    sizes = {"batch_size": batch, "dim": dim, "device_profile": "h200", "loss": spec.name, "set": settings}
    return [infcl_gen.plan(make_problem(**sizes, memory_budget=budget)) for budget in ("auto", STASH_BUDGET)]


def products(planned: Iterable[Plan]) -> str:
    """How many matrix products `plans` take."""
    without, stash = (f"{plan.products:.3g}" for plan in planned)
    return without if stash == without else f"{without}; {stash} with a stash"


def pair_costs() -> str:
    """What a pair takes by each of the built-in profiles, in the largest micro-batches that were measured."""
    head = (
        "model", "parameters, gradients, AdamW: GB", "graph of a pair: MB", "checkpointed: MB",
        "features and their gradients: KB", "loss: KB", "kept: µs", "checkpointed: µs", "cached: µs",
    )  # fmt: skip
    held = "kept", "checkpointed"
    lines = []
    for name in profile_names():
        costs = read_costs(name)
        loss_bytes = PlannedLoss("clip", costs, 1).smallest_bytes(COMPARED[0]) / COMPARED[0]
        state_bytes = costs.parameter_bytes + costs.gradient_bytes + optimizer_bytes("adamw", costs.gradient_bytes)

        def summed(kind: str, cost: Callable[[PassCosts, int], float], costs: StepCosts = costs) -> float:
            passes: list[PassCosts] = [getattr(tower, kind) for tower in costs.towers]
            return sum(cost(each, each.sizes[-1]) / each.sizes[-1] for each in passes)

        kept_s = summed("kept", PassCosts.seconds)
        times_s = kept_s, summed("checkpointed", PassCosts.seconds), kept_s + summed("without_graph", PassCosts.seconds)
        lines.append((
            name, f"{state_bytes / 1e9:.1f}",
            *(f"{summed(kind, lambda each, size: each.at('kept_bytes', size)) / 1e6:.1f}" for kind in held),
            f"{2 * sum(tower.feature_bytes for tower in costs.towers) / 1e3:.1f}", f"{loss_bytes / 1e3:.1f}",
            *(f"{1e6 * time_s:.0f}" for time_s in times_s),
        ))  # fmt: skip
    return _table(head, lines)


def step_plan() -> str:
    """What the command that stands before it on the page prints."""
    page = (ROOT / "docs" / "steps.md").read_text(encoding="utf-8")
    command = page.partition("<!-- step_plan:begin -->")[0].rpartition("```sh\ninfcl-gen ")[2].partition("\n")[0]
    printed = CliRunner().invoke(cli.main, command.split(), catch_exceptions=False).stdout
    return f"\n```text\n{printed}```\n"


def paper_step(model: str, devices: int, inputs: str, batch: int | None) -> Account:
    """A step in the paper's setting, with the smallest memory of its loss; without a batch, of the largest that fits.

    DDP, AdamW, and a gradient cache in micro-batches of 128.
    """
    costs = read_costs(f"{model}-h200")
    # An A800 is an A100 with fewer links.
    losses = PlannedLoss("clip", dataclasses.replace(costs, device="a100"), devices)
    problem = StepProblem(
        costs, (batch or 0) // devices, PAPER_MEMORY, losses, optimizer_bytes("adamw", costs.gradient_bytes), devices,
        "ddp", inputs, ("cached",), PAPER_MICRO_BATCH,
    )  # fmt: skip
    samples = problem.samples or largest_samples(problem)
    towers = [TowerPlan(tower.name, Part(samples, PAPER_MICRO_BATCH)) for tower in costs.towers]
    found = LossCosts(losses.smallest_bytes(samples), 0.0)
    return account(dataclasses.replace(problem, samples=samples), towers, found)


def largest_batches() -> str:
    """Table 2 of the paper: the largest batches, what fills the device there, and the plans of the paper's batches."""
    head = (
        "model", "GPUs", "batch on", "Inf-CL: largest batch", "its loss, GB", "plan of it: loss (peak), GB",
        "plan: largest batch", "largest items at its peak, GB",
    )  # fmt: skip
    lines = []
    for (model, inputs), figures in PAPER_LARGEST.items():
        for devices, figure in figures.items():
            largest = paper_step(model, devices, inputs, None)
            peak = max(PHASES, key=largest.bytes_in)
            items = sorted((item for item in largest.items if peak in item.phases), key=lambda item: -item.size_bytes)
            batch, loss_gb = figure or (0, 0.0)
            theirs = ("not given", "not given", "")
            if figure:
                own = _loss_and_peak(paper_step(model, devices, inputs, batch * PAPER_K))
                theirs = (f"{batch}k", f"{loss_gb:.2f}", own)
            lines.append((
                model, devices, inputs, *theirs, f"{largest.towers[0].samples * devices // PAPER_K}k",
                ", ".join(f"{item.name} {item.size_bytes / 1e9:.1f}" for item in items[:2]),
            ))  # fmt: skip
    return _table(head, lines)


def step_memory() -> str:
    """Table 1 of the paper: loss (peak) of a step of ViT-L/14."""
    lines: list[tuple[Any, ...]] = []
    for (devices, inputs, who), figures in PAPER_STEPS.items():
        lines.append((devices, inputs, who, *figures))
        if who == "Inf-CL":
            steps = (paper_step("vit_l_14", devices, inputs, batch * PAPER_K) for batch in PAPER_BATCHES)
            lines.append((devices, inputs, "plan", *map(_loss_and_peak, steps)))
    return _table(("GPUs", "batch on", "loss (peak), GB", *(f"{batch}k" for batch in PAPER_BATCHES)), lines)


def _loss_and_peak(step: Account) -> str:
    gb = step.loss.peak_bytes / 1e9, step.peak_bytes / 1e9
    return "x" if step.peak_bytes > PAPER_MEMORY else "{:.2f} ({:.2f})".format(*gb)


def training_steps(rows: Rows) -> str:
    """A line for each model, batch, budget and way."""
    lines = []
    for row in rows:
        budget, size = row.get("memory_bytes"), row.get("micro_batch")
        way = f"{row['way']} by {size}" if size else row["way"]
        lines.append((
            row["model"], f"{row['batch']:,}", str(row["ranks"]), way, f"{budget / 2**30:.0f} GiB" if budget else "",
            *((_failure(row), "") if row.get("error") else (f"{row['median_ms']:,.0f}", f"{row['std_ms']:.0f}")),
            f"{row['peak_bytes'] / MIB:,.0f}" if row["peak_bytes"] else "",
            f"{row['predicted_ms']:,.0f}" if "predicted_ms" in row else "",
            f"{row['predicted_peak_bytes'] / MIB:,.0f}" if "predicted_ms" in row else "",
        ))  # fmt: skip
    head = "model", "pairs", "GPUs", "way", "budget", "ms", "std", "MiB", "predicted ms", "predicted MiB"
    return _table(head, lines)


def mean_steps(rows: Rows) -> str:
    """A line for each model, batch and place of the inputs: a planned step of a mean over samples beside the plain one.

    Gradients differ by the rounding of the plain step's own sums, too: "reversed" is that of the batch in reverse.
    """
    lines = [
        (
            row["model"], f"{row['batch']:,}", row["side"], row["inputs"], row["micro_batch"],
            *(f"{row[name]:,.0f}" for name in ("plain_ms", "median_ms")), f"{row['median_ms'] / row['plain_ms']:.3f}",
            *(f"{row[name] / MIB:,.0f}" for name in ("plain_peak_bytes", "peak_bytes")),
            f"{row['difference']:.1e}", f"{row['rounding']:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    head = ("model", "batch", "side", "inputs", "micro-batch", "plain ms", "planned ms", "ratio", "plain MiB")
    return _table((*head, "planned MiB", "gradients", "reversed"), lines)


def beside_peers(rows: Rows) -> str:
    """How much longer than the fastest package the peers take at the point to compare at."""
    one = [row for row in rows if (row["batch"], row["dim"]) == COMPARED and row["error"] is None]
    least_ms = min(row["queued_ms"] for row in one if row["impl"] == "infcl")
    peers = sorted((row for row in one if row["impl"] != "infcl"), key=lambda row: row["queued_ms"])
    beside = ", ".join(f"{row['impl']} {row['queued_ms'] / least_ms:.1f}" for row in peers)
    return (
        f"\n* At B = {COMPARED[0]}, D = {COMPARED[1]}, scale {one[0]['scale']:g}, behind other work, relative to the "
        f"fastest package ({least_ms:.1f} ms): {beside}.\n"
    )


def comparisons(rows: Rows, absent: dict[str, str]) -> str:
    """A table for each loss, dim, dtype with precision, and scale: who by batch, milliseconds and MiB; below, who was
    not there."""
    groups: dict[tuple[str, int, str, float], Rows] = {}
    for row in rows:
        numbers = row["dtype"] if row["precision"] == "default" else f"{row['dtype']}, {row['precision']}"
        groups.setdefault((row["loss"], row["dim"], numbers, row["scale"]), []).append(row)
    parts = []
    for (loss, dim, numbers, scale), group in groups.items():
        batches = sorted({row["batch"] for row in group})
        by_name: dict[str, dict[int, dict[str, Any]]] = {}
        for row in group:
            by_name.setdefault(_who(row), {})[row["batch"]] = row
        lines, floors = [], []
        for who, points in by_name.items():
            errors = [row["err"]["dq"] for row in points.values() if row["err"] and row["err"]["dq"] is not None]
            error = f"{max(errors):.1e}" if errors else ""
            lines.append((who, *(_cell(points.get(batch)) for batch in batches), error))
            bare = {batch: row for batch, row in points.items() if row.get("floor_ms") is not None}
            if bare:
                times = {batch: _times(row, "floor_ms", "queued_floor_ms") for batch, row in bare.items()}
                floors.append((f"products of {who}", *(times.get(batch, "") for batch in batches), ""))
        what = f"{loss}, D = {dim}, {numbers}, scale {scale:g}: ms (queued), MiB"
        parts.append(_table((what, *batches, "error of dq"), [*lines, *floors]))
    if absent:
        parts.append(f"\nAbsent: {'; '.join(f'{name} ({why})' for name, why in sorted(absent.items()))}.\n")
    return "".join(parts)


def efficiencies(rows: Rows) -> str:
    """A line for each loss, transport and size: beside the same work without communication, without overlap, and beside
    peers if there are some."""
    head = ["loss", "GPUs", "rows each", "keys travel by", "work alone / this (queued)", "no overlap / this (queued)"]
    of_peers = ["Inf-CL / this (queued)", "OpenCLIP / this (queued)", "memory, OpenCLIP / this"]
    beside = any(row["impl"] != "infcl" for row in rows)
    lines = []
    alike: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        who = row["package"] or "as it is" if row["impl"] == "infcl" else row["impl"]
        key = (row["loss"], row["ranks"], row["batch"], row["transport"], row["budget_bytes"])
        alike.setdefault(key, {})[who] = row
    for (loss, ranks, batch, *_), found in alike.items():
        if "as it is" not in found:
            continue
        own = found["as it is"]
        peers = {x["impl"]: x for x in rows if (x["loss"], x["ranks"], x["batch"]) == (loss, ranks, batch)}

        def times(other: dict[str, Any] | None, own: dict[str, Any] = own, digits: int = 1) -> str:
            if other is None:
                return ""
            both = (f"{other[name] / own[name]:.{digits}f}" for name in ("median_ms", "queued_ms"))
            return "{} ({})".format(*both)

        how = _who(own).removeprefix("infcl, by ").removesuffix(f", {ranks} GPUs")
        alone, waiting = (times(found.get(f"no {what}"), digits=3) for what in ("communication", "overlap"))
        line = [loss, ranks, batch // ranks, how, alone, waiting]
        if beside:
            compared = [peers.get(name) for name in ("inf_cl", "open_clip")]
            memory = f"{compared[1]['peak_bytes'] / own['peak_bytes']:.1f}" if compared[1] else ""
            line += [*map(times, compared), memory]
        lines.append(line)
    return _table(head + of_peers * beside, lines)


def _who(row: dict[str, Any]) -> str:
    package, ranks = row.get("package"), row.get("ranks", 1)
    who = row["impl"] if package in (None, "generated") else f"{row['impl']}, {package}"
    who += named(row)
    how = f", by {row['transport']}" if row.get("transport") else ""
    if how and row["budget_bytes"] != row["predicted_peak_bytes"]:  # else the plan without a budget
        how += f", {row['budget_bytes'] / 1e6:.0f} MB"
    return who if ranks == 1 else f"{who}{how}, {ranks} GPUs"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["error"]:
        return _failure(row)
    return f"{_times(row, 'median_ms', 'queued_ms', 'std_ms')}, {row['peak_bytes'] / MIB:.0f}"


def _failure(row: dict[str, Any]) -> str:
    """ "out of memory": the error without its details; "refused" for sizes that a peer does not take."""
    kind = str(row["error"]).partition(":")[0]
    return "refused" if kind in ("ValueError", "NotImplementedError") else kind


def _times(row: dict[str, Any], idle: str, queued: str, spread: str | None = None) -> str:
    """ "11.15 ± 0.67 (10.48)": from an idle device, and where it was measured behind other work."""
    text = f"{row[idle]:.2f}" + (f" ± {row[spread]:.2f}" if spread else "")
    return text + (f" ({row[queued]:.2f})" if row.get(queued) is not None else "")


def counters(rows: Rows) -> str:
    """A line for each kernel of a step: medians of its launches; what was not counted is blank."""
    figures = {
        "us": "time_us", "GHz": "clock_ghz", "tensor cores, %": "tensor_percent",
        "special functions, %": "special_percent", "shared memory, %": "shared_percent", "L2, %": "l2_percent",
        "memory, %": "dram_percent", "issue slots, %": "issue_percent", "warps, %": "occupancy_percent",
    }  # fmt: skip
    kernels: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        kernels.setdefault(tuple(row[name] for name in ("batch", "dim", "strategy", "kernel")), []).append(row)

    def medians(launches: Rows) -> list[str]:
        names = [name if name in launches[0] else None for name in figures.values()]
        return [f"{statistics.median(row[name] for row in launches):.4g}" if name else "" for name in names]

    head = ("B", "D", "strategy", "kernel", "launches", *figures)
    return _table(head, ((*kernel, len(own), *medians(own)) for kernel, own in kernels.items()))


def power(rows: Rows) -> str:
    """A line for each plan, and for its products."""
    head = ("B", "D", "plan", "of it", "W allowed", "ms", "J", "W", "MHz", "held down for power, %")
    figures = {"limit_w": 0, "median_ms": 1, "joules": 1, "watts": 0, "clock_mhz": 0}
    return _table(head, (
        (row["batch"], row["dim"], row["strategy"], row["what"],
         *(f"{row[name]:.{digits}f}" for name, digits in figures.items()), f"{100 * row['held_down']:.0f}")
        for row in rows
    ))  # fmt: skip


def accuracies(rows: Rows) -> str:
    """Errors alone."""
    names = ("loss", "dq", "dk", "dscale")
    return _table(("errors: loss", "B", "D", "scale", "who", *names), (
        (row["loss"], row["batch"], row["dim"], row["scale"], _who(row), *(f"{row['err'][name]:.1e}" for name in names))
        for row in rows
    ))  # fmt: skip


def conventions(rows: Rows, absent: dict[str, str]) -> str:
    """A line for each loss of a library; cells have a figure for each number of ranks."""
    calls: dict[tuple[str, str, str], Rows] = {}
    for row in rows:
        calls.setdefault((row["impl"], row["call"], row["loss"]), []).append(row)

    def each(own: Rows, figure: Callable[[dict[str, Any]], float]) -> str:
        return ", ".join("-" if row["error"] else f"{figure(row):.3g}" for row in own)

    lines, failed = [], []
    for (who, call, loss), own in calls.items():
        ran = [row for row in own if not row["error"]]
        failed += [f"{who}, W = {row['ranks']} ({row['error']})" for row in own if row["error"]]
        learned = any(row["dscale"] for row in ran)
        alike = all(max(row["values"]) - min(row["values"]) < SAME for row in ran)
        lines.append((
            who, f"`{call}`", loss, each(own, lambda row: row["features"]["ratio"]),
            f"{max(row['features']['error'] for row in ran):.0e}" if ran else "",
            each(own, lambda row: row["dscale"]["ratio"]) if learned else "",
            each(own, lambda row: statistics.fmean(row["values"])), "the whole" if alike else "its share",
        ))  # fmt: skip
    ranks = ", ".join(map(str, sorted({row["ranks"] for row in rows})))
    head = ("library", "call", "loss", f"features, W = {ranks}", "error", "scale", "mean of values", "a rank returns")
    missing = [f"{name} ({why})" for name, why in sorted(absent.items())] + failed
    return _table(head, lines) + (f"\nAbsent: {'; '.join(missing)}.\n" if missing else "")


def oracles(rows: Rows, absent: dict[str, str]) -> str:
    """A line for each loss of a library: the largest error of value and gradients, over all numbers of ranks."""
    calls: dict[tuple[str, str, str], Rows] = {}
    for row in rows:
        negatives = " with hard negatives" * (row["keys"] > row["batch"])
        calls.setdefault((row["impl"], f"`{row['call']}`", row["loss"] + negatives), []).append(row)

    def largest(own: Rows, dtype: str, names: Sequence[str]) -> str:
        found = [row["err"][name] for row in own if row["dtype"] == dtype for name in names]
        return f"{max(error for error in found if error is not None):.0e}"

    lines = []
    for call, own in calls.items():
        ranks = ", ".join(map(str, sorted({row["ranks"] for row in own})))
        compared = [name for name, error in own[0]["err"].items() if error is not None]
        figures = (largest(own, dtype, names) for dtype in ("fp32", "fp64") for names in (("loss",), compared[1:]))
        lines.append((*call, ranks, ", ".join(compared), *figures))
    head = ("library", "call", "loss", "W", "compared", "fp32: loss", "gradients", "fp64: loss", "gradients")
    missing = "; ".join(f"{name} ({why})" for name, why in sorted(absent.items()))
    return _table(head, lines) + (f"\nAbsent: {missing}.\n" if missing else "")


def budgets(rows: Rows) -> str:
    """Packages alone: times beside their products, memory beside the plan."""
    head = (
        "loss", "B", "D", "dtype", "strategy", "ms (median ± std; queued)", "product floor, ms", "budget, MiB",
        "predicted peak, MiB", "measured peak, MiB", "error of dq",
    )  # fmt: skip

    def line(row: dict[str, Any]) -> Sequence[Any]:
        start = [row["loss"] + named(row), *(row[name] for name in ("batch", "dim", "dtype", "strategy"))]
        if row["error"] is not None:
            return [*start, f"no figure: {row['error']}", "", "", "", "", ""]
        sizes = (f"{row[name] / MIB:.1f}" for name in ("budget_bytes", "predicted_peak_bytes", "peak_bytes"))
        floor = "" if row["floor_ms"] is None else _times(row, "floor_ms", "queued_floor_ms")
        error = f"{row['err']['dq']:.1e}" if row["err"] else ""
        return [*start, _times(row, "median_ms", "queued_ms", "std_ms"), floor, *sizes, error]

    return _table(head, map(line, rows))


if __name__ == "__main__":
    sys.exit(main())
