"""Writes the README's table of measurements from tune/bench/*.json, between its two markers.

python tune/readme_figures.py            rewrites README.md
python tune/readme_figures.py --check    exits with 1 if the README does not show what the files hold
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
COLUMNS = (
    "| loss | B | D | dtype | strategy | ms (median ± std) | product floor, ms | budget, MiB | predicted peak, MiB "
    "| measured peak, MiB | error of dq |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}\n{tables()}{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    readme.write_text(fresh, encoding="utf-8")
    return 0


def tables() -> str:
    """One table per file, in the order of their names. Raises ValueError for a file whose checksum is wrong."""
    parts = []
    for path in sorted((ROOT / "tune" / "bench").glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        rows = json.dumps(results["rows"], sort_keys=True)
        if hashlib.sha256(rows.encode()).hexdigest() != results["checksum"]:
            raise ValueError(f"{path.name}: its rows do not match its checksum")
        versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
        parts.append(
            f"\n`{path.relative_to(ROOT)}`: {results['board']}; {versions}; `{results['command']}`\n\n{COLUMNS}\n"
        )
        parts += [_line(row) for row in results["rows"]]
    return "".join(parts)


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"| {row.get('loss', '')} | no figure: {row['error']} |\n"
    sizes = (f"{row[name] / 2**20:.1f}" for name in ("budget_bytes", "predicted_peak_bytes", "peak_bytes"))
    error = f"{row['err']['dq']:.1e}" if row["err"] else ""
    cells = (
        row["loss"], row["batch"], row["dim"], row["dtype"], row["strategy"],
        f"{row['median_ms']:.2f} ± {row['std_ms']:.2f}", f"{row['floor_ms']:.2f}", *sizes, error,
    )  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


if __name__ == "__main__":
    sys.exit(main())
