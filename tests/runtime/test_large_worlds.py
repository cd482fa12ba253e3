"""One rank of a very large world through the whole runtime and torch.distributed, whose "fake" backend carries nothing:
whom it talks to, in which order, and what it allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planning.tables import ring_table
from tests.tiers import LONG

ROOT = Path(__file__).resolve().parents[2]
NODES, RANK = (512, 1237) if LONG else (16, 77)  # of 8 devices each

# In a process of its own: a default group is one of the whole process.
PROGRAM = """
import gc, importlib, json, sys, weakref
from unittest import mock
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import infcl_gen
from tests.planning.test_memory import measured_peak_bytes

def step(nodes, devices, rank, rows=2, dim=8):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=nodes * devices)
    package = infcl_gen.load(
        target="cpu", batch_size=rows * nodes * devices, dim=dim, devices=nodes * devices, nodes=nodes, dtype="fp64",
        set={"keeps": "on"},
    )
    q = torch.linspace(-1, 1, rows * dim, dtype=torch.float64).view(rows, dim)
    return package, package.SPEC["predicted"]["peak_bytes"], lambda: package.loss_and_grads(q, q, 3.0)

torch.set_num_threads(1)
batches = []

def noting(package):
    ring = importlib.import_module(f"{package.__name__}._runtime.group").Group
    post = ring.post

    def noted(self, *messages):  # sent, and received
        batches.append([[message.peer for message in some] for some in messages])
        return post(self, *messages)

    return mock.patch.object(ring, "post", noted)

nodes, devices, rank = map(int, sys.argv[1:])
package, _, work = step(nodes, devices, rank)
with noting(package):
    work()
del package, work
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
kept = group() is not None
_, predicted, work = step(nodes // 8, devices, rank // 8)  # a profiler takes 8 s for the hops of 4 096 ranks
print(json.dumps({"batches": batches, "peak": measured_peak_bytes(work), "predicted": predicted, "kept": kept}))
"""


def test_a_rank_of_hundreds_of_nodes_follows_the_schedule(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rank of an eighth of them allocates what is planned; and a destroyed group is not held."""
    command = [sys.executable, "-c", PROGRAM, str(NODES), "8", str(RANK)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    table, expected = ring_table(NODES, 8), []
    for step in (*table.steps("forward"), *table.steps("backward")):
        if step.sends:
            expected.append([[table.rank(RANK, sent.to, back) for sent in step.sends] for back in (False, True)])
    assert found["batches"] == expected
    # Beyond the plan, on the host: the sizes of all ranks, and everybody's header of 32 numbers, forward and back.
    assert found["peak"] <= found["predicted"] + NODES * (24 + 2 * 32 * 8)
    assert not found["kept"]
