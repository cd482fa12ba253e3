"""Blocks: the defaults are legal everywhere, and the predicate names what is not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.errors import InputError
from infcl_gen.hardware import load_profile, profile_names
from infcl_gen.planning.levels import (
    KERNELS_OF,
    LARGE,
    Block,
    default_blocks,
    padded_dim,
    shared_bytes,
    stores_tiles,
    violations,
)

GPUS = [name for name in profile_names() if load_profile(name).target != "cpu"]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_defaults_are_legal(name: str, dtype: str) -> None:
    profile = load_profile(name)
    for dim in (1, 3, 16, 17, 64, 96, 100, 128, 200, 256, 257, 384, 640, 768, 1152, 4096):
        descriptors = profile.tensor_descriptors and dim * (2 if dtype != "fp32" else 4) % 16 == 0
        for strategy in ("panel", "stash", *(["fused"] if dim <= 256 and dtype != "fp32" else [])):
            for size in (1, 512, 1024, 2048, LARGE):
                blocks = default_blocks(strategy, profile, dtype, dim, descriptors, False, size, size)
                assert tuple(blocks) == KERNELS_OF[strategy]
                for kernel, block in blocks.items():
                    stored = stores_tiles(kernel, strategy, descriptors)
                    assert violations(kernel, block, profile, dtype, dim, descriptors, stored=stored) == ()
        split = default_blocks("panel", profile, "fp32", dim, profile.tensor_descriptors, split=True)
        for kernel, block in split.items():
            assert (
                violations(kernel, block, profile, "fp32", dim, profile.tensor_descriptors, split=True) == ()
            )


def test_measured_defaults() -> None:
    h200 = load_profile("h200")
    assert default_blocks("panel", h200, "bf16", 768, True)["gradient"] == Block(128, 128, 64, 4, 3)
    assert default_blocks("panel", h200, "bf16", 768, True)["forward"] == Block(256, 128, 64, 8, 4)
    assert default_blocks("panel", h200, "bf16", 512, True)["forward"] == Block(128, 128, 64, 4, 3)
    assert default_blocks("stash", h200, "bf16", 768, True)["forward"] == Block(256, 128, 64, 8, 3)
    assert default_blocks("fused", h200, "bf16", 128, True)["fused"] == Block(64, 128, 128, 4, 2)
    assert default_blocks("fused", h200, "bf16", 256, True)["fused"] == Block(64, 64, 256, 4, 2)


def test_small_batches_have_tiles_for_the_whole_board() -> None:
    h200 = load_profile("h200")
    for rows, keys, forward in (
        (512, 512, Block(64, 64, 64, 4, 4)),
        (1024, 1024, Block(64, 64, 64, 4, 4)),
        (1024, 4096, Block(128, 128, 64, 4, 4)),
        (2048, 2048, Block(128, 128, 64, 4, 4)),
        (4096, 4096, Block(256, 128, 64, 8, 4)),
    ):
        found = default_blocks("panel", h200, "bf16", 768, True, False, rows, keys)
        assert found["forward"] == forward
    assert found["product"] == default_blocks("panel", h200, "bf16", 768, True)["product"]
    one = default_blocks("panel", h200, "bf16", 768, True, False, 1024, 1024, {"forward"})
    assert one["forward"] == Block(256, 128, 64, 8, 4) and one["gradient"] == Block(64, 64, 64, 4, 3)


@pytest.mark.parametrize("size", [512, 2048, LARGE])
@pytest.mark.parametrize("descriptors", [True, False])
def test_a_stash_has_one_tile_whatever_is_chosen(size: int, descriptors: bool) -> None:
    def found(*chosen: str) -> dict[str, Block]:
        return default_blocks(
            "stash", load_profile("h200"), "bf16", 768, descriptors, False, size, size, chosen
        )

    for chosen in ((), ("forward",), ("gradient",), ("forward", "gradient")):
        blocks = found(*chosen)
        assert (blocks["forward"].rows, blocks["forward"].keys) == (
            blocks["gradient"].rows,
            blocks["gradient"].keys,
        )
    assert found("forward") == found() and found("gradient") == found("forward", "gradient")
    assert found("gradient")["gradient"] == (
        Block(256, 128, 64, 8, 3) if descriptors else Block(128, 128, 64, 4, 3)
    )


def test_fused_needs_a_small_embedding() -> None:
    with pytest.raises(InputError, match="no legal block"):
        default_blocks("fused", load_profile("h200"), "bf16", 257, False)
    with pytest.raises(InputError, match="valid: bf16, fp16"):
        default_blocks("fused", load_profile("h200"), "fp32", 128, False)


@given(
    st.sampled_from(GPUS),
    st.builds(
        dict,
        shared_bytes_per_block=st.integers(16384, 300000),
        max_warps_per_block=st.sampled_from([4, 8, 16, 32]),
        registers_per_thread=st.sampled_from([128, 168, 255, 512]),
    ),
    st.integers(1, 2048),
    st.sampled_from(["bf16", "fp32"]),
)
def test_defaults_shrink_to_smaller_boards(name: str, limits: dict[str, int], dim: int, dtype: str) -> None:
    profile = dataclasses.replace(load_profile(name), **limits)
    for kernel, block in default_blocks("panel", profile, dtype, dim, False).items():
        assert violations(kernel, block, profile, dtype, dim, False) == ()
        assert shared_bytes(kernel, block, dtype) <= profile.shared_bytes_per_block
    descriptors = profile.tensor_descriptors and dim % 8 == 0
    kept = default_blocks("stash", profile, dtype, dim, descriptors)
    assert (kept["forward"].rows, kept["forward"].keys) == (kept["gradient"].rows, kept["gradient"].keys)
    stored = stores_tiles("forward", "stash", descriptors)
    assert shared_bytes("forward", kept["forward"], dtype, stored) <= profile.shared_bytes_per_block


def test_tiles_of_a_stash_are_stored_through_shared_memory() -> None:
    h200, block = load_profile("h200"), Block(256, 128, 64, 8, 4)
    assert (
        shared_bytes("forward", block, "bf16", stored=True)
        == shared_bytes("forward", block, "bf16") + 256 * 128
    )
    deep = dataclasses.replace(block, depth=64, keys=256, warps=16, stages=3)
    assert violations("forward", deep, h200, "bf16", 768, True) == ()
    found = violations("forward", deep, h200, "bf16", 768, True, stored=True)
    assert len(found) == 1 and "262144 bytes of shared memory" in found[0]
    # Warps side by side: the compiler takes 172056 bytes for these tiles, 163864 of them beside the operands' stages.
    split = Block(64, 256, 64, 8, 3)
    assert (
        shared_bytes("forward", split, "bf16", stored=True)
        == 3 * (64 + 256) * 64 * 2 + 3 * 64 * 256
        == 172032
    )


@pytest.mark.parametrize(
    ("kernel", "block", "message"),
    [
        ("gradient", Block(100, 256, 64, 8, 3), "rows = 100 is not a power of two"),
        ("gradient", Block(8, 256, 64, 8, 3), "rows = 8"),
        ("gradient", Block(128, 256, 1024, 8, 1), "more than the padded embedding, 512"),
        ("gradient", Block(128, 256, 64, 3, 3), "warps = 3"),
        ("gradient", Block(128, 256, 64, 64, 3), "warps = 64"),
        ("gradient", Block(128, 256, 64, 8, 0), "stages = 0"),
        ("gradient", Block(128, 256, 128, 8, 3), "bytes of shared memory; h200 has 232448"),
        ("gradient", Block(256, 256, 16, 4, 2), "accumulator registers"),
        ("gradient", Block(16, 512, 16, 4, 2), "box of 256"),
        ("positive", Block(32, 64, 64, 4, 2), "square"),
        ("fused", Block(128, 64, 256, 8, 3), "wider than 256"),
        ("elsewhere", Block(128, 64, 64, 8, 3), "unknown kernel"),
    ],
)
def test_violations(kernel: str, block: Block, message: str) -> None:
    assert any(message in text for text in violations(kernel, block, load_profile("h200"), "bf16", 512, True))


def test_descriptors_need_aligned_rows() -> None:
    block = Block(64, 64, 64, 4, 2)
    assert violations("forward", block, load_profile("h200"), "bf16", 100, False) == ()
    assert "16 bytes" in violations("forward", block, load_profile("h200"), "bf16", 100, True)[0]


def test_padded_dim() -> None:
    assert [padded_dim(dim) for dim in (1, 16, 17, 96, 128, 129, 768)] == [16, 16, 32, 128, 128, 256, 1024]
