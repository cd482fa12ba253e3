"""Blocks: the defaults are legal everywhere, and the predicate names what is not."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infcl_gen.errors import InputError
from infcl_gen.hardware import load_profile, profile_names
from infcl_gen.kernels import LARGE, TILES, default_blocks, hopper_slabs, tiles
from infcl_gen.kernels.choice import Block, Choice, embedding_parts, padded_dim
from infcl_gen.kernels.forward import keeps_keys
from infcl_gen.kernels.hopper import stages as hopper_stages
from infcl_gen.runtime.traits import Traits
from tests.tiers import examples

GPUS = [name for name in profile_names() if load_profile(name).target != "cpu"]


def choice(strategy: str, dtype: str, dim: int, descriptors: bool) -> Choice:
    """Of operands as they are: fp32 is not split."""
    precision = "exact" if dtype == "fp32" else "default"
    return Choice(strategy=strategy, dtype=dtype, precision=precision, dim=dim, descriptors=descriptors)


def special(strategy: str, dim: int) -> Choice:
    return choice(strategy, "bf16", dim, True)


def registers(kernel: str, block: Block, dim: int, warp_size: int) -> int:
    return TILES[kernel].registers(block, special("panel", dim), warp_size)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_defaults_are_legal(name: str, dtype: str) -> None:
    profile = load_profile(name)
    for dim in (1, 3, 16, 17, 64, 96, 100, 128, 200, 256, 257, 384, 640, 768, 1152, 4096):
        descriptors = profile.tensor_descriptors and dim * (2 if dtype != "fp32" else 4) % 16 == 0
        for strategy in ("panel", "stash", *(["fused"] if dim <= 256 and dtype != "fp32" else [])):
            for size in (1, 512, 1024, 2048, LARGE):
                made_for = choice(strategy, dtype, dim, descriptors)
                blocks = default_blocks(profile, made_for, size, size)
                assert tuple(blocks) == tuple(tile.name for tile in tiles(strategy, Traits()))
                for kernel, block in blocks.items():
                    assert TILES[kernel].violations(block, made_for, profile) == ()
        split = Choice(strategy="panel", dtype="fp32", dim=dim, descriptors=profile.tensor_descriptors)
        assert split.split and split.operand_dtype == "bf16"
        for kernel, block in default_blocks(profile, split).items():
            assert TILES[kernel].violations(block, split, profile) == ()


def test_measured_defaults() -> None:
    h200 = load_profile("h200")
    assert default_blocks(h200, special("panel", 768))["gradient"] == Block(128, 128, 64, 4, 3)
    assert default_blocks(h200, special("panel", 768))["forward"] == Block(256, 128, 64, 8, 4)
    assert default_blocks(h200, special("panel", 512))["forward"] == Block(128, 128, 64, 4, 3)
    assert default_blocks(h200, special("stash", 768))["forward"] == Block(256, 128, 64, 8, 3)
    assert default_blocks(h200, special("fused", 128))["fused"] == Block(64, 128, 128, 4, 2)
    assert default_blocks(h200, special("fused", 256))["fused"] == Block(64, 64, 256, 4, 2)


def test_pairs_have_wide_tiles_where_registers_allow() -> None:
    h200, wide, narrow = load_profile("h200"), Block(128, 256, 64, 8, 3), Block(128, 128, 64, 8, 4)
    siglip = Traits(query_statistics=(), key_statistics=(), known="before", softplus=True)
    fits = dataclasses.replace(special("panel", 768), traits=siglip)
    found = default_blocks(h200, fits)
    assert found["gradient"] == wide and "positive" not in found
    labels, other = (dataclasses.replace(siglip, **each) for each in ({"positives": "label"}, {"softplus": False}))
    for change in ({"dim": 64}, {"descriptors": False}, {"dtype": "fp32"}, {"traits": labels}, {"traits": other}):
        choice = dataclasses.replace(fits, **change)
        assert default_blocks(h200, choice)["gradient"] == narrow, change
    assert default_blocks(load_profile("b200"), fits)["gradient"] == Block(128, 128, 64, 8, 3)
    tried = TILES["gradient"].options(wide, fits)
    assert all(getattr(block, name) in values for block in (wide, narrow) for name, values in tried.items())


def test_small_batches_have_tiles_for_the_whole_board() -> None:
    h200 = load_profile("h200")
    for rows, keys, forward in (
        (512, 512, Block(64, 64, 64, 4, 4)),
        (1024, 1024, Block(64, 64, 64, 4, 4)),
        (1024, 4096, Block(128, 128, 64, 4, 4)),
        (2048, 2048, Block(128, 128, 64, 4, 4)),
        (4096, 4096, Block(256, 128, 64, 8, 4)),
    ):
        found = default_blocks(h200, special("panel", 768), rows, keys)
        assert found["forward"] == forward
    assert found["product"] == default_blocks(h200, special("panel", 768))["product"]
    one = default_blocks(h200, special("panel", 768), 1024, 1024, {"forward"})
    assert one["forward"] == Block(256, 128, 64, 8, 4) and one["gradient"] == Block(64, 64, 64, 4, 3)


@pytest.mark.parametrize("size", [512, 2048, LARGE])
@pytest.mark.parametrize("descriptors", [True, False])
def test_a_stash_has_one_tile_whatever_is_chosen(size: int, descriptors: bool) -> None:
    def found(*chosen: str) -> dict[str, Block]:
        stash = choice("stash", "bf16", 768, descriptors)
        return default_blocks(load_profile("h200"), stash, size, size, chosen)

    for chosen in ((), ("forward",), ("gradient",), ("forward", "gradient")):
        blocks = found(*chosen)
        assert (blocks["forward"].rows, blocks["forward"].keys) == (blocks["gradient"].rows, blocks["gradient"].keys)
    assert found("forward") == found() and found("gradient") == found("forward", "gradient")
    assert found("gradient")["gradient"] == (Block(256, 128, 64, 8, 3) if descriptors else Block(128, 128, 64, 4, 3))


def test_fused_needs_a_small_embedding() -> None:
    with pytest.raises(InputError, match="no legal block"):
        default_blocks(load_profile("h200"), choice("fused", "bf16", 257, False))
    with pytest.raises(InputError, match="valid: bf16, fp16"):
        default_blocks(load_profile("h200"), choice("fused", "fp32", 128, False))


@examples(ci=8, long=500)
@example("h100", {"shared_bytes_per_block": 65536, "max_warps_per_block": 8, "registers_per_thread": 128}, 769, "bf16")
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
    descriptors = profile.tensor_descriptors and dim % 8 == 0
    for strategy, described in (("panel", False), ("panel", descriptors), ("stash", descriptors)):
        made_for = choice(strategy, dtype, dim, described)
        blocks = default_blocks(profile, made_for)
        for kernel, block in blocks.items():
            assert TILES[kernel].violations(block, made_for, profile) == ()
            assert TILES[kernel].shared_bytes(block, made_for) <= profile.shared_bytes_per_block
        if strategy == "stash":
            assert len({(blocks[kernel].rows, blocks[kernel].keys) for kernel in ("forward", "gradient")}) == 1


def test_tiles_of_a_stash_are_stored_through_shared_memory() -> None:
    h200, block = load_profile("h200"), Block(256, 128, 64, 8, 4)
    panel, stash = special("panel", 768), special("stash", 768)
    assert TILES["forward"].shared_bytes(block, stash) == TILES["forward"].shared_bytes(block, panel) + 256 * 128
    deep = dataclasses.replace(block, depth=64, keys=256, warps=16, stages=3)
    assert TILES["forward"].violations(deep, panel, h200) == ()
    found = TILES["forward"].violations(deep, stash, h200)
    assert len(found) == 1 and "262144 bytes of shared memory" in found[0]
    # Warps side by side: the compiler takes 172056 bytes for these tiles, 163864 of them beside the operands' stages.
    split = Block(64, 256, 64, 8, 3)
    assert TILES["forward"].shared_bytes(split, stash) == 3 * (64 + 256) * 64 * 2 + 3 * 64 * 256 == 172032


def test_keys_are_read_once_where_one_step_covers_their_depth() -> None:
    h200 = load_profile("h200")
    for strategy in ("fused", "panel"):
        for dim, held, tile in (
            (128, 128, (64, 256, 128, 4, 3)),
            (72, 80, (64, 256, 128, 4, 3)),
            (64, 64, (64, 128, 64, 4, 4)),
        ):
            block = default_blocks(h200, special(strategy, dim))["forward"]
            assert block == Block(*tile)
            assert keeps_keys(block, special(strategy, dim))
            shared = (block.stages * 64 + block.keys) * held * 2
            assert TILES["forward"].shared_bytes(block, special(strategy, dim)) == shared
    kept = default_blocks(h200, special("panel", 128))["forward"]
    for other in (special("panel", 256), choice("panel", "bf16", 100, False)):
        assert not keeps_keys(kept, other)
        assert TILES["forward"].shared_bytes(kept, other) == 3 * (64 + 256) * 128 * 2
    exact = choice("panel", "fp32", 16, True)
    assert not keeps_keys(default_blocks(h200, exact)["forward"], exact)
    assert TILES["gradient"].shared_bytes(kept, special("panel", 128)) == 3 * (64 + 256) * 128 * 2


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
        ("product", Block(64, 1024, 64, 8, 1), "more than the padded embedding, 512"),
        ("fused", Block(128, 64, 256, 8, 3), "--dim at most 256"),
    ],
)
def test_violations(kernel: str, block: Block, message: str) -> None:
    found = TILES[kernel].violations(block, special("panel", 512), load_profile("h200"))
    assert any(message in text for text in found)


def test_accumulators_of_a_thread() -> None:
    """One tile of fp32 numbers over the threads; of fused also its gradient rows, of finish a strip of features."""

    block = Block(64, 128, 256, 4, 2)
    assert registers("forward", block, 256, 32) == 64 * 128 // 128 == registers("gradient", block, 256, 32)
    assert registers("fused", block, 256, 32) == 64 * (128 + 256) // 128
    assert registers("finish", Block(16, 16, 256, 4, 1), 256, 32) == 16 * 256 // 128
    assert registers("forward", block, 256, 64) == 32  # AMD's warps have 64 threads
    assert registers("forward", Block(16, 16, 16, 4, 2), 256, 64) == 1
    # Three quarters of 255 registers hold 128, and not 256; fp32 operands take half of them again.
    board = load_profile("h200")
    for dtype, most in (("bf16", 128), ("fp32", 64)):
        pointers = choice("panel", dtype, 512, False)
        for keys, legal in ((most, True), (2 * most, False)):
            found = TILES["gradient"].violations(Block(64, keys, 16, 2, 2), pointers, board)
            assert (found == ()) == legal, (dtype, keys, found)


def test_programs_that_a_board_runs_at_once() -> None:
    """As many an SM as its shared memory holds and its registers suffice for; at least one."""
    board, made_for = load_profile("h200"), special("panel", 512)
    assert (board.multiprocessors, board.shared_bytes_per_block) == (132, 232448)
    for block, each in (
        (Block(64, 64, 64, 4, 4), 3),  # 64 KiB of shared memory, 128 x 128 registers
        (Block(64, 64, 32, 4, 2), 4),  # 16 KiB
        (Block(128, 128, 32, 8, 2), 1),  # 32 KiB, 160 x 256 registers
        (Block(256, 128, 128, 8, 4), 1),  # more than an SM has
    ):
        assert TILES["gradient"].resident_programs(block, made_for, board) == 132 * each, block


def test_descriptors_need_aligned_rows() -> None:
    block = Block(64, 64, 64, 4, 2)
    pointers = choice("panel", "bf16", 100, False)
    assert TILES["forward"].violations(block, pointers, load_profile("h200")) == ()
    assert "16 bytes" in TILES["forward"].violations(block, special("panel", 100), load_profile("h200"))[0]


def test_embeddings_in_parts() -> None:
    """Powers of two that cover the embedding; at most three, so of 240 columns one of 256."""
    parts = {dim: embedding_parts(dim) for dim in (1, 16, 40, 64, 96, 100, 128, 200, 240, 256)}
    assert parts == {
        1: (16,), 16: (16,), 40: (32, 16), 64: (64,), 96: (64, 32), 100: (64, 32, 16), 128: (128,),
        200: (128, 64, 16), 240: (256,), 256: (256,),
    }  # fmt: skip
    fused = {dim: default_blocks(load_profile("h200"), special("fused", dim))["fused"] for dim in (64, 96, 128)}
    assert TILES["fused"].shared_bytes(fused[96], special("fused", 96)) == (64 + 3 * 128) * 96 * 2
    assert registers("fused", fused[96], 96, 32) == 64 * (128 + 96) // 128
    assert [(block.rows, block.keys) for block in fused.values()] == [(128, 64), (64, 128), (64, 128)]


def test_where_the_kernels_for_hopper_are() -> None:
    """In panels of 2-byte features that descriptors address, of 129 to 256 columns, in tiles of 128 x 128."""

    def stages(made_for: Choice, board: str = "h200", rows: int = 65536) -> int:
        blocks = default_blocks(load_profile(board), made_for, rows, rows)
        return hopper_stages(dataclasses.replace(made_for, arch=load_profile(board).arch, blocks=blocks))

    found = {dim: stages(special("panel", dim)) for dim in (128, 136, 192, 200, 256, 264)}
    assert found == {128: 0, 136: 3, 192: 3, 200: 2, 256: 2, 264: 0}
    assert stages(choice("panel", "fp16", 256, True)) == 2
    for other in (
        special("stash", 256),
        choice("panel", "bf16", 200, False),
        choice("panel", "fp32", 256, True),
        Choice(strategy="panel", dtype="fp32", dim=200, descriptors=True),  # split
        dataclasses.replace(special("panel", 256), traits=Traits(key_statistics=(), known="row")),
    ):
        assert stages(other) == 0, other
    assert not stages(special("panel", 256), board="b200")
    assert not stages(special("panel", 256), rows=1024)  # of smaller tiles
    tiles = dict.fromkeys(("forward", "gradient"), Block(128, 128, 64, 8, 3))  # set by the user
    alike = {dim: dataclasses.replace(special("panel", dim), arch="sm_90", blocks=tiles) for dim in (128, 136)}
    assert {dim: hopper_stages(each) for dim, each in alike.items()} == {128: 0, 136: 3}
    for dim in (192, 256):  # keys, the stages' queries, and the tiles of g that two groups store
        held = 128 * (1 + found[dim]) * dim * 2 + 128 * 128 * 2
        assert held + 1024 <= load_profile("h200").shared_bytes_per_block


def test_where_the_kernels_of_prefixes_for_hopper_are() -> None:
    """Of two to four prefixes of 2-byte features that descriptors address; all but the last are multiples of 32."""

    def stages(
        *prefixes: int, board: str = "h200", rows: int = 65536, cosines: str = "", sides: int = 2, **given: Any
    ) -> int:
        slabs = tuple(b - a for a, b in itertools.pairwise((0, *prefixes)))
        traits = Traits(slabs=slabs, renormalised=bool(cosines), positives=cosines or "diagonal")
        traits = dataclasses.replace(traits, key_statistics=("logsumexp",) * (sides - 1))
        made_for = dataclasses.replace(special("panel", prefixes[-1]), arch=load_profile(board).arch, traits=traits)
        made_for = dataclasses.replace(made_for, **given)
        blocks = default_blocks(load_profile(board), made_for, rows, rows)
        return hopper_slabs.stages(dataclasses.replace(made_for, blocks=blocks))

    assert stages(96, 192, 384, 768) == stages(32, 200) == stages(64, 128, dtype="fp16") == hopper_slabs.STAGES
    assert stages(96, 768, sides=1) == hopper_slabs.STAGES
    assert not stages(48, 96) and not stages(32, 64, 96, 128, 160)
    assert (
        not stages(96, 768, board="b200") and not stages(96, 768, rows=1024) and not stages(96, 768, descriptors=False)
    )
    held = 2 * hopper_slabs.STAGES * hopper_slabs.DEPTH * 256 + 2 * 128 * 128  # features of all stages, tiles of g
    beside = 4 * 128 * (hopper_slabs.MOST_PREFIXES + 1) + 16 * hopper_slabs.STAGES  # shares of keys, ranges, barriers
    assert held + beside <= load_profile("h200").shared_bytes_per_block
    assert stages(96, 192, 384, 768, cosines="diagonal") == hopper_slabs.COSINE_STAGES
    for positives, sides in (("diagonal", 2), ("label", 1), ("diagonal", 1)):
        assert stages(96, 768, cosines=positives, sides=sides) == hopper_slabs.COSINE_STAGES + 2
    assert not stages(96, 768, cosines="diagonal", rows=1024)
    beside += 4 * 128 * hopper_slabs.MOST_PREFIXES  # factors of keys
    held = 2 * hopper_slabs.FORWARD_STAGES * hopper_slabs.DEPTH * 256
    programs, of_an_sm = hopper_slabs.FORWARDS, load_profile("h200").shared_bytes_per_block + 1024
    assert programs * (held + 2 * beside + 1024) <= of_an_sm  # of which each program takes 1 KiB more; and sums of keys
    for prefixes in ((96, 768), (96, 192, 768), (96, 192, 384, 768)):  # g of shorter prefixes waits beside the stages
        slabs = tuple(b - a for a, b in itertools.pairwise((0, *prefixes)))
        made_for = dataclasses.replace(special("panel", 768), traits=Traits(slabs=slabs, renormalised=True))
        held = 2 * stages(*prefixes, cosines="diagonal") * hopper_slabs.DEPTH * 256
        held += 2 * 64 * 64 * hopper_slabs.g_tiles(made_for)
        assert held + beside <= load_profile("h200").shared_bytes_per_block < held + beside + 2**15


def test_slabs_in_stages() -> None:
    """Each column of a slab is in one walk; the last slab fills its stage."""
    for prefixes in ((96, 192, 384, 768), (32, 64, 96, 136), (32, 200), (128, 160, 168)):
        slabs = tuple(b - a for a, b in itertools.pairwise((0, *prefixes)))
        made_for = dataclasses.replace(special("panel", prefixes[-1]), traits=Traits(slabs=slabs))
        columns = [
            [stage * 64 + column for walk in walks for stage in range(walk.first, walk.end)
             for column in range(walk.start, walk.stop)]
            for walks in hopper_slabs.walks_of(made_for)
        ]  # fmt: skip
        stops = (*prefixes[:-1], -(-prefixes[-1] // 64) * 64)
        assert columns == [list(range(a, b)) for a, b in itertools.pairwise((0, *stops))]


def test_sums_of_g_leave_from_two_places_in_turn() -> None:
    """Each waits for all copies but the last, so its place is not that of the last, also from one tile to the next."""
    for prefixes in ((96, 192, 384, 768), (32, 64, 200), (32, 200)):
        slabs = tuple(b - a for a, b in itertools.pairwise((0, *prefixes)))
        made_for = dataclasses.replace(special("panel", prefixes[-1]), traits=Traits(slabs=slabs))
        halves = hopper_slabs.values(dataclasses.replace(made_for, hopper_stages=hopper_slabs.STAGES))["halves"]
        sent = [slab for half in halves for slab in half["longest_first"]]
        assert [slab["number"] for slab in sent] == 2 * list(range(len(slabs)))[::-1]
        assert all(a["place"] != b["place"] for a, b in itertools.pairwise([*sent, sent[0]]))


def test_loops_over_prefixes_walk_the_same_stages() -> None:
    """What `longer` prints: each prefix's whole stages, between a half that it shares with the prefix before and one
    that it shares with the next."""
    for prefixes in ((96, 192, 384, 768), (32, 64, 96, 136), (32, 64, 200), (32, 200), (128, 160, 168), (96, 768)):
        slabs = tuple(b - a for a, b in itertools.pairwise((0, *prefixes)))
        made_for = dataclasses.replace(special("panel", prefixes[-1]), traits=Traits(slabs=slabs, renormalised=True))
        printed = hopper_slabs.values(dataclasses.replace(made_for, hopper_stages=hopper_slabs.COSINE_STAGES))
        for prefix, walks in enumerate(hopper_slabs.walks_of(made_for)):
            first, stop, before, behind = (
                eval(printed[name] or "False", {"prefix": prefix})
                for name in ("first_stages", "stop_stages", "half_before", "half_behind")
            )
            found = [hopper_slabs.Walk(first - 1, first, 32, 64)] * before
            found += [hopper_slabs.Walk(first, stop, 0, 64)] * (first < stop)
            found += [hopper_slabs.Walk(stop, stop + 1, 0, 32)] * behind
            assert found == walks


@pytest.mark.parametrize("values", [[1, 1, 1], [0, 1, 1], [1, 0], [3, 3, 2], [2, 3, 2], [0.5, 0.25, 0.125, 1.0]])
def test_a_number_by_prefix(values: list[float]) -> None:
    texts = hopper_slabs.code_by_prefix(values), f"2 * {hopper_slabs.code_by_prefix(values, in_a_term=True)}"
    for factor, text in enumerate(texts, 1):
        assert [eval(text, {"prefix": prefix}) for prefix in range(len(values))] == [factor * x for x in values]


def test_padded_dim() -> None:
    assert [padded_dim(dim) for dim in (1, 16, 17, 96, 128, 129, 768)] == [16, 16, 32, 128, 128, 256, 1024]
