"""InfoNCE over a gather by rows of panels: forward has the gradients, over the keys of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import infcl_gen
from infcl_gen.emission import import_package
from infcl_gen.verification.gate import failures, gate, truth_of
from infcl_gen.verification.properties import Case, tensors
from infcl_gen.verification.worker import averaged
from tests.runtime.conftest import SMOOTH
from tests.runtime.pool import Pool
from tests.tiers import LONG

SHARDS = {1: [[150]], 2: [[150, 10], [0, 70]], 3: [[60, 0, 90], [140, 5, 0]]}
SHARDS_OF_CI = {2: [[140, 10]], 3: [[60, 0, 30]]}
SMALL = {
    "strategy": "rows", "panel_rows": "128", "gradient.rows": "32", "gradient.keys": "64", "gradient.depth": "16",
    "forward.rows": "32", "forward.keys": "64", "forward.depth": "16",
    "product.rows": "64", "product.depth": "32", "product.keys": "16",
}  # fmt: skip


def test_rows_of_panels_over_gloo(tmp_path: Path) -> None:
    """On one rank to three, in CI on two and three, in uneven shards, one of them empty, and two rows of panels; keys
    lie on the ranks in the other order."""
    pool = Pool(max(SHARDS), tmp_path, backend="gloo-interpreted", groups=[tuple(range(world)) for world in SHARDS])
    (tmp_path / "smooth.py").write_text(SMOOTH)
    try:
        for world, shards in (SHARDS if LONG else SHARDS_OF_CI).items():
            over_gloo(pool, tmp_path, "infonce", world, shards)
        over_gloo(pool, tmp_path, f"{tmp_path}/smooth.py:INFONCE", 2, [[140, 10]])  # with the mean of all logits
    finally:
        pool.close()


def over_gloo(pool: Pool, folder: Path, loss: str, world: int, shards: list[list[int]]) -> None:
    settings = SMALL | ({"transport": "gather"} if world > 1 else {})
    output = folder / f"rows_{len(list(folder.iterdir()))}_of_{world}"
    generated = infcl_gen.generate(
        output=output, loss=loss, batch_size=512, dim=16, dtype="bf16", devices=world, device_profile="h200",
        set=settings,
    )  # fmt: skip
    package, ranks = import_package(generated), tuple(range(world))
    assert package.SPEC["plan"]["schedule"]["whole"] == (world > 1)
    for number, rows in enumerate(shards):
        keys, case = rows[::-1], Case(sum(rows), sum(rows), 16, dtype="bf16", scale=14.3, seed=number)
        flags: dict[str, Any] = {"rows": rows, "keys": keys, "case": case, "repeats": 2}
        found = pool.run("case_results", ranks, package=generated.name, ranks=ranks, **flags)
        assert all(kind == "ok" for kind, _ in found), found
        judged = gate(averaged([parts for _, parts in found]), truth_of(package, tensors(case, "label", "cpu")))
        assert all(row.passed for row in judged), f"rows {rows}: {failures(judged)}"
