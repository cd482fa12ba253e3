"""The kernel of triton issue 11047 for sm_90: prints what `races` finds in it without and with the missing barriers.

Two products are in flight. A barrier stands between the issue of the first and the wait for it, so Triton 3.7 takes its
reads for done there, and puts none between that wait and the copy into the buffer that it reads. Gluon has `barrier`
from Triton 3.7 on; where it is unknown nothing is found, and "unknown" names it.

    python -m tests.verification.overlapped
"""

import json

import triton
import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from infcl_gen.verification.races import races


@gluon.jit
def overlapped(a, b, out, TRIPS: gl.constexpr, GROUPS: gl.constexpr, BARRIERS: gl.constexpr):
    ROWS: gl.constexpr = 64 * GROUPS
    DEPTH: gl.constexpr = 64
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4 * GROUPS, 1], instr_shape=[16, 64, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    a_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], gl.bfloat16)
    b_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH, DEPTH], gl.bfloat16)
    own = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DEPTH], a_tile)
    even = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, DEPTH], b_tile)
    odd = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, DEPTH], b_tile)
    columns = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, copied))[None, :]
    places = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, copied))[:, None] * DEPTH + columns
    own_places = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied))[:, None] * DEPTH + columns
    async_copy.async_copy_global_to_shared(own, a + own_places)
    async_copy.async_copy_global_to_shared(even, b + places)
    async_copy.commit_group()
    async_copy.async_copy_global_to_shared(odd, b + places)
    async_copy.commit_group()
    first = gl.zeros([ROWS, DEPTH], gl.float32, sums)
    second = gl.zeros([ROWS, DEPTH], gl.float32, sums)
    for trip in range(TRIPS):
        async_copy.wait_group(1)
        hopper.fence_async_shared()
        gl.barrier()
        first = hopper.warpgroup_mma(own, even, first, is_async=True)
        async_copy.wait_group(0)
        hopper.fence_async_shared()
        gl.barrier()
        second = hopper.warpgroup_mma(own, odd, second, is_async=True)
        first = hopper.warpgroup_mma_wait(1, deps=[first])
        if BARRIERS:
            gl.barrier()
        async_copy.async_copy_global_to_shared(even, b + (trip + 1) * DEPTH * DEPTH + places)
        async_copy.commit_group()
        second = hopper.warpgroup_mma_wait(0, deps=[second])
        if BARRIERS:
            gl.barrier()
        async_copy.async_copy_global_to_shared(odd, b + (trip + 1) * DEPTH * DEPTH + places)
        async_copy.commit_group()
    async_copy.wait_group(0)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))[:, None]
    gl.store(out + rows * DEPTH + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, sums))[None, :], first + second)


def found(groups: int, barriers: bool) -> list[str]:
    pointers = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}
    constants = {"TRIPS": 16, "GROUPS": groups, "BARRIERS": barriers}
    source = GluonASTSource(
        overlapped,
        pointers | dict.fromkeys(constants, "constexpr"),
        constants,
        {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))},
    )
    options = {"num_warps": 4 * groups}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return races(compiled.asm["ptx"], 4 * groups)


if __name__ == "__main__":
    cases = {"missing": (2, False), "there": (2, True), "one group": (1, False)}
    known = hasattr(gl, "barrier")
    print(json.dumps({name: found(*case) for name, case in cases.items()} if known else {"unknown": "barrier"}))
