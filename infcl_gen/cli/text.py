"""Results as text, for stdout without --json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infcl_gen.inputs.problem import Problem
from infcl_gen.inputs.text import bytes_text, count_text, table_text, time_text

if TYPE_CHECKING:
    from infcl_gen.planning.planner import Plan
    from infcl_gen.tuning.search import Outcome


def record_text(problem: Problem) -> str:
    """Which tuning record the package uses, or why none."""
    from infcl_gen.emission.pipeline import case_of, find_record
    from infcl_gen.planning.records import Found

    found = find_record(case_of(problem))
    if isinstance(found, Found):
        chosen = ", ".join(f"{key}={value}" for key, value in found.record.settings)
        return f"measured settings of {found.file}: {chosen or 'the defaults'}"
    return f"no measured settings: {found}"


def bench_text(rows: Sequence[dict[str, Any]], absent: Mapping[str, str], *files: Path | None) -> str:
    from infcl_gen.bench.results import absences, table

    header, lines = table(list(rows))
    return "\n".join([table_text(header, lines), *absences(absent), *wrote(*files)])


def wrote(*files: Path | None) -> list[str]:
    return [f"wrote {file}" for file in files if file is not None]


def campaign_text(result: Mapping[str, Any], *files: Path | None) -> str:
    more = [f"{result['left']} points left: run it again"] * bool(result["left"])
    return "\n".join([bench_text(result["rows"], result["absent"], *files), *more, *result["broken"]])


def tuning_text(outcome: Outcome) -> str:
    import statistics

    record = outcome.record
    rows = []
    for candidate in record.candidates:
        if candidate.status not in ("illegal", "not timed"):
            chosen = " ".join(f"{key}={value}" for key, value in candidate.settings) or "default"
            times = candidate.times_ms
            median = f"{statistics.median(times):.4g} ms" if times else "-"
            rows.append((candidate.family, chosen, candidate.status, median, candidate.detail))
    winner = " ".join(f"{key}={value}" for key, value in record.settings) or "the defaults"
    more = "" if record.complete else "; the time was up: run it again to go on"
    table = table_text(("family", "settings", "status", "median", "detail"), rows)
    return f"{table}\nfastest: {winner}{more}\nwrote {outcome.package} and {outcome.file}"


def plan_text(plan: Plan) -> str:
    from infcl_gen.kernels import launched

    problem = plan.problem
    counts = plan.traits.counted(problem.batch_size, problem.total_keys, " x ")
    sizes = f"{counts} x {problem.dim}, {plan.dtype}"
    devices = f"{plan.world_size} device" + "s" * (plan.world_size > 1)
    reasons = [(str(r.level), r.decision, r.why) for r in plan.reasons]
    blocks = [
        (name, f"{b.rows} rows x {b.keys} keys x {b.depth} deep, {b.warps} warps, {b.stages} stages")
        for name, b in launched(plan).values()
    ]
    buffers = [
        (b.name, b.phase, bytes_text(b.bytes), "x".join(map(str, b.shape)), b.dtype, b.why) for b in plan.buffers
    ]
    phases = [
        (p.name, time_text(p.time_s), p.bound, count_text(p.flops) + "FLOP", bytes_text(round(p.bytes)))
        for p in plan.phases
    ]
    automatic = f" (auto: a part of {problem.device_profile}'s memory)" * (problem.memory_budget_bytes is None)
    queued = f", {time_text(plan.predicted_queued_s)} behind other work" * bool(plan.blocks)
    parts = [
        f"{problem.loss}: {sizes}, on {devices} ({plan.target}); strategy {plan.strategy}",
        "Tiles\n" + table_text(("level", "decision", "why"), reasons),
        *["Blocks\n" + table_text(("kernel", "block"), blocks)] * bool(blocks),
        "Memory per device, beyond the inputs\n"
        + table_text(("buffer", "phase", "size", "shape", "dtype", "why"), buffers)
        + f"\npeak {bytes_text(plan.predicted_peak_bytes)} of a budget of {bytes_text(plan.allowed_bytes)}{automatic}"
        + f"; smallest budget for this problem {bytes_text(plan.smallest_budget_bytes)}"
        + f"; largest batch for this budget {plan.largest_batch}",
        "Time\n"
        + table_text(("phase", "time", "bound by", "work", "traffic"), phases)
        + f"\npredicted {time_text(plan.predicted_time_s)} for forward and backward{queued}",
    ]
    return "\n\n".join(parts)


def package_text(
    spec: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], missing: Sequence[str] = ()
) -> str:
    sizes_of = spec.get("problem", {})
    queries = sizes_of.get("batch_size")
    command = str(spec.get("regenerate", "")).format(queries=queries, keys=sizes_of.get("keys") or queries)
    spec = {**spec, "regenerate": command} if command else spec
    parts = [table_text((), [(key, _cell(value)) for key, value in spec.items() if not isinstance(value, Mapping)])]
    for key, value in spec.items():
        if isinstance(value, Mapping):
            parts.append(f"{key}\n" + table_text((), list(_flatten(value))))
            for name, items in value.items():
                if _is_table(items):
                    rows = [[_cell(item[column]) for column in items[0]] for item in items]
                    parts.append(f"{key}: {name}\n" + table_text(tuple(items[0]), rows))
    if kernels:
        lines = [(kernel["name"], str(kernel["line"]), kernel["summary"]) for kernel in kernels]
        parts.append("kernels\n" + table_text(("kernel", "line", "what it does"), lines))
    parts.append("files\n" + table_text((), [(path, str(size)) for path, size in sizes.items()]))
    if missing:
        parts.append(f"partial: cannot be imported; left out: {', '.join(missing)}")
    return "\n\n".join(parts)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The scalars of nested tables, by their dotted paths."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif not _is_table(value):
            yield f"{prefix}{key}", _cell(value)


def _is_table(value: object) -> bool:
    """Whether `value` is a list of records with the same fields, such as a plan's buffers."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Mapping):
        return False
    return all(isinstance(item, Mapping) and item.keys() == value[0].keys() for item in value)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
