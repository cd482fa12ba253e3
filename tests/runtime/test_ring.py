"""The ring on real gloo processes: a pool of ten, started once."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from infcl_gen.runtime import group as groups
from infcl_gen.runtime.table import planned_table
from infcl_gen.verification.properties import Case, tensors
from tests.planning.tables import ring_table
from tests.planning.walk import walk
from tests.tiers import combined, nightly
from tests.verification.dense import dense

from . import ring_worker
from .pool import Packages, Pool, assert_equal, average, results

SQUARE = (64, 0)  # of a loss of one side
WORLD = 10  # so that also a ring of 8 is a sub-group, beside another
GROUPS = (
    *ring_worker.GROUPS, (3, 1), (0, 2, 4, 6), (7, 5, 3, 1), (8, 9),
    (0, 1, 2, 3, 4, 5, 6, 7), (5, 2, 7, 0, 3, 6, 1, 4), (9, 1, 8, 3, 2, 6, 5, 4), (7, 0),
)  # fmt: skip


@pytest.fixture(scope="module")
def names(packages: Packages) -> dict[str, str]:
    """Import names of the packages that the pool uses; its processes import them from the same folder."""
    made = {
        "clip": packages("clip"),
        "infonce": packages("infonce"),
        "siglip": packages("siglip"),
        "siglip on 2 x 2": packages("siglip", devices=4, nodes=2),
        "other": packages("clip", panel=(128, 64)),
        "bf16": packages("clip", dtype="bf16"),
        "clip on 2 x 2": packages("clip", devices=4, nodes=2, keeps="on"),
        "infonce on 2 x 2": packages("infonce", devices=4, nodes=2, keeps="on"),
        "infonce gather of 3": packages("infonce", devices=3, transport="gather"),
        "ntxent": packages("ntxent", panel=SQUARE),
        "ntxent, kept": packages("ntxent", panel=SQUARE, devices=4, nodes=2, keeps="on"),
    }
    for devices, (loss, panel) in itertools.product(
        (2, 3, 4), {"clip": (64, 64), "siglip": (64, 64), "ntxent": SQUARE}.items()
    ):
        made[f"{loss} gather of {devices}"] = packages(loss, panel=panel, devices=devices, transport="gather")
    return {key: module.__name__ for key, module in made.items()}


@pytest.fixture(scope="module")
def pool(names: dict[str, str], packages: Packages, folder_of: Callable[[ModuleType], Path]) -> Iterator[Pool]:
    pool = Pool(WORLD, folder_of(packages("clip")).parent, groups=GROUPS)
    yield pool
    pool.close()


SHARDS = [
    ((0,), [9]),
    ((0, 1), [8, 8]),
    ((0, 1), [1, 70]),
    ((0, 1), [0, 5]),
    ((0, 1, 2), [6, 6, 6]),
    ((0, 1, 2), [65, 0, 3]),
    ((0, 1, 2, 3), [16, 16, 16, 16]),
    ((0, 1, 2, 3), [3, 64, 1, 20]),
    ((0, 1, 2, 3), [0, 0, 7, 0]),
    ((1, 3), [4, 9]),
    ((3, 1), [2, 40]),
    ((3, 0, 2), [5, 1, 0]),
    ((2, 3, 1, 0), [5, 9, 0, 70]),
    ((0, 1, 2, 3, 4, 5, 6, 7), [5] * 8),
    ((0, 1, 2, 3, 4, 5, 6, 7), [3, 64, 1, 20, 7, 2, 65, 5]),
    ((0, 1, 2, 3, 4, 5, 6, 7), [0, 0, 9, 0, 0, 70, 0, 1]),
    ((5, 2, 7, 0, 3, 6, 1, 4), [5, 9, 0, 70, 1, 2, 8, 3]),
    ((9, 1, 8, 3, 2, 6, 5, 4), [2, 0, 66, 1, 0, 4, 4, 13]),
]


# Of one loss all worlds; of the others one rank, two with an empty one, a permuted sub-group, four and eight.
OTHER_SHARDS = [SHARDS[0], SHARDS[3], SHARDS[11], SHARDS[12], SHARDS[14]]
GLOBAL = [("clip", *world) for world in SHARDS]
GLOBAL += [(loss, *world) for loss in ("infonce", "siglip") for world in OTHER_SHARDS]


@pytest.mark.parametrize(
    ("loss", "ranks", "rows"),
    nightly(((loss, *world) for loss in ("clip", "infonce", "siglip") for world in SHARDS), GLOBAL),
)
def test_averaged_gradients_are_those_of_the_global_loss(
    pool: Pool, packages: Packages, names: dict[str, str], loss: str, ranks: tuple[int, ...], rows: list[int]
) -> None:
    """Parameters, scale and bias, for any world size, uneven and empty ranks, sub-groups and permuted ranks."""
    labelled = loss == "infonce"
    keys = [n + 3 for n in reversed(rows)] if labelled else rows
    arguments = {"package": names[loss], "ranks": ranks, "rows": rows, "keys": keys, "labelled": labelled}
    truth = ring_worker.reference_gradients(packages(loss), rows, keys, labelled)
    assert_equal(average(results(pool.run("gradients", ranks, repeats=2, **arguments))), truth)
    summed = results(pool.run("gradients", ranks, grad_sync="sum", **arguments))
    assert_equal([value * len(ranks) for value in average(summed)], truth)


ROWS = [
    ((0, 1), [40, 25]),
    ((0, 1), [0, 26]),
    ((0, 1, 2), [24, 0, 17]),
    ((3, 0, 2), [5, 21, 70]),
    ((0, 1, 2, 3), [40, 17, 0, 33]),
    ((2, 3, 1, 0), [16, 16, 16, 16]),
    ((0, 1, 2, 3, 4, 5, 6, 7), [3, 64, 1, 20, 0, 16, 65, 5]),
]


@pytest.mark.parametrize(("ranks", "rows"), ROWS)
def test_rows_of_one_side(pool: Pool, names: dict[str, str], ranks: tuple[int, ...], rows: list[int]) -> None:
    """By ring, by one over nodes that keeps rows, and by gather; the same bits each time."""
    case = Case(sum(rows), sum(rows), 8, "fp64", 3.0, -1.0, seed=1)
    given = tensors(case, positives="label", one_sided=True)
    truth = [x for x in dense("ntxent", *given) if x is not None]
    for way in ("ntxent", "ntxent, kept", f"ntxent gather of {len(ranks)}"):
        if way not in names:
            continue
        arguments = {"package": names[way], "ranks": ranks, "rows": rows, "keys": rows, "case": case}
        parts, again = (results(pool.run("own_gradients", ranks, **arguments)) for _ in range(2))
        for one, other in zip(itertools.chain(*parts), itertools.chain(*again), strict=True):
            assert torch.equal(one, other)
        loss, dq, dscale, dbias = zip(*parts, strict=True)
        assert_equal(
            [torch.cat(dq) / len(ranks), *average(list(zip(loss, dscale, dbias, strict=True)))],
            [truth[1], truth[0], *truth[2:]],
        )


AT_ONCE = [
    [((0, 1), [3, 9]), ((3, 0, 2), [0, 9, 4])],  # rank 0 is in both, and takes part in one after the other
    [((0, 2, 4, 6), [4, 0, 66, 1]), ((7, 5, 3, 1), [9, 2, 0, 5]), ((8, 9), [30, 1])],
    [((9, 1, 8, 3, 2, 6, 5, 4), [1, 9, 64, 3, 0, 0, 2, 30]), ((7, 0), [6, 0])],
]


@pytest.mark.parametrize("rings", AT_ONCE)
def test_rings_at_once_do_not_meet(
    pool: Pool, packages: Packages, names: dict[str, str], rings: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    for loss in ("clip", "infonce", "siglip"):
        cases = [
            (ranks, {"rows": rows, "keys": rows[::-1] if loss == "infonce" else rows, "labelled": loss == "infonce"})
            for ranks, rows in rings
        ]
        for ranks, case in cases:
            pool.start("gradients", ranks, package=names[loss], ranks=ranks, repeats=3, **case)
        for ranks, case in cases:
            ours = results([pool.receive(rank) for rank in ranks])
            assert_equal(average(ours), ring_worker.reference_gradients(packages(loss), **case))


@pytest.mark.parametrize(
    ("ranks", "rows"), [((0, 1, 2, 3), [16, 16, 16, 16]), ((2, 3, 1, 0), [5, 9, 0, 70]), ((0, 1, 2), [65, 0, 3])]
)
@pytest.mark.parametrize("loss", ["clip", "infonce", "siglip"])
def test_a_package_planned_for_two_nodes_of_two(
    pool: Pool, packages: Packages, names: dict[str, str], loss: str, ranks: tuple[int, ...], rows: list[int]
) -> None:
    """In a group of another size the ring is flat."""
    labelled = loss == "infonce"
    keys = [n + 3 for n in reversed(rows)] if labelled else rows
    truth = ring_worker.reference_gradients(packages(loss), rows, keys, labelled)
    arguments = {"package": names[f"{loss} on 2 x 2"], "ranks": ranks, "rows": rows, "keys": keys}
    assert_equal(average(results(pool.run("gradients", ranks, labelled=labelled, **arguments))), truth)


def test_peers_of_two_nodes_of_two(pool: Pool, names: dict[str, str]) -> None:
    """What each of four processes asks torch.distributed for, hop by hop: the planned schedule's peers."""
    ranks, table = (0, 1, 2, 3), ring_table(2, 2)
    seen = results(pool.run("peers", ranks, package=names["clip on 2 x 2"], ranks=ranks, rows=[4] * 4))
    for rank in ranks:
        expected = []
        for step in (*table.steps("forward"), *table.steps("backward")):
            for back in (False, True):
                expected += [table.rank(rank, sent.to, back) for sent in step.sends]
        assert seen[rank] == expected


@pytest.mark.parametrize(
    ("loss", "ranks", "rows"),
    [
        ("clip", (0, 1), [8, 8]),
        ("clip", (1, 3), [0, 5]),
        ("clip", (0, 1, 2), [65, 0, 3]),
        ("siglip", (0, 1), [8, 8]),
        ("siglip", (1, 3), [0, 5]),
        ("siglip", (0, 1, 2), [65, 0, 3]),
        ("siglip", (2, 3, 1, 0), [5, 9, 0, 70]),
        ("infonce", (3, 0, 2), [5, 1, 0]),
        ("infonce", (0, 1, 2), [6, 6, 6]),
        ("clip", (0, 1, 2, 3), [0, 0, 7, 0]),
        ("clip", (2, 3, 1, 0), [5, 9, 0, 70]),
    ],
)
def test_a_gather(
    pool: Pool, packages: Packages, names: dict[str, str], loss: str, ranks: tuple[int, ...], rows: list[int]
) -> None:
    labelled = loss == "infonce"
    keys = [n + 3 for n in reversed(rows)] if labelled else rows
    truth = ring_worker.reference_gradients(packages(loss), rows, keys, labelled)
    arguments = {"package": names[f"{loss} gather of {len(ranks)}"], "ranks": ranks, "rows": rows, "keys": keys}
    ours = pool.run("gradients", ranks, labelled=labelled, repeats=2, **arguments)
    assert_equal(average(results(ours)), truth)


@pytest.mark.parametrize(
    ("how", "package"), combined(["function", "compiled", "loss_and_grads"], ["infonce gather of 3", "infonce"])
)
def test_own_labels_with_hard_negatives_behind_the_positives(
    pool: Pool, packages: Packages, names: dict[str, str], package: str, how: str
) -> None:
    rows, keys, ranks = [5, 0, 3], [12, 1, 3], (0, 1, 2)
    truth = ring_worker.reference_gradients(packages("infonce"), rows, keys, "own")
    arguments = {"package": names[package], "ranks": ranks, "rows": rows, "keys": keys, "labelled": "own"}
    assert_equal(average(results(pool.run("gradients", ranks, how=how, **arguments))), truth)


HOWS = ["ddp", "compiled", "loss_and_grads", "no_grad", "traced"]
OF_FOUR = [f"{loss}{way}" for loss in ("clip", "siglip") for way in ("", " on 2 x 2", " gather of 4")]
# Graphs know what each transport keeps; all else of a call is known before there is one.
OF_FOUR_IN_CI = [*combined(HOWS, OF_FOUR), ("traced", "clip gather of 4"), ("compiled", "siglip gather of 4")]


@pytest.mark.parametrize(("how", "package"), nightly(itertools.product(HOWS, OF_FOUR), OF_FOUR_IN_CI))
def test_other_ways(pool: Pool, packages: Packages, names: dict[str, str], how: str, package: str) -> None:
    """A graph holds what is kept between forward and backward; nothing, if it was traced without gradients."""
    rows, ranks = [3, 0, 8, 2], (0, 1, 2, 3)
    truth = ring_worker.reference_gradients(packages(package.split()[0]), rows, rows, False)
    arguments = {"package": names[package], "ranks": ranks, "rows": rows, "keys": rows}
    assert_equal(average(results(pool.run("gradients", ranks, how=how, **arguments))), truth)


def test_a_package_planned_for_a_gather_of_others_is_a_ring(
    pool: Pool, packages: Packages, names: dict[str, str]
) -> None:
    rows, ranks = [3, 4, 8], (0, 1, 2)
    truth = ring_worker.reference_gradients(packages("clip"), rows, rows, False)
    arguments = {"package": names["clip gather of 4"], "ranks": ranks, "rows": rows}
    assert_equal(average(results(pool.run("gradients", ranks, keys=rows, **arguments))), truth)
    for peers in results(pool.run("peers", ranks, **arguments)):
        # Keys and statistics; backward keys with statistics to where they come first, then on, and gradients.
        assert len(peers) == 2 * (2 + 3 + 2 + 2 + 2)


def test_messages_of_a_gather(pool: Pool, names: dict[str, str]) -> None:
    """Three batches; what belongs to an owner has as many rows as it has keys, and nothing is sent for nothing."""
    ranks, rows = (0, 1, 2), [2, 9, 0]
    sent, pairs = {"keys": 0, "sums": 1, "gradients": 2}, 16 * sum(rows)
    found = results(pool.run("traffic", ranks, package=names["clip gather of 3"], ranks=ranks, rows=rows))
    for rank, other in ((0, 1), (1, 0)):
        own, theirs = rows[rank], rows[other]
        assert found[rank] == [
            ("send", sent["keys"], 64 * own), ("receive", sent["keys"], 64 * theirs),
            ("send", sent["sums"], pairs), ("receive", sent["sums"], pairs),
            ("send", sent["gradients"], 64 * theirs), ("receive", sent["gradients"], 64 * own),
        ]  # fmt: skip
    assert found[2] == []


def test_keys_and_queries_may_be_sharded_differently(pool: Pool, packages: Packages, names: dict[str, str]) -> None:
    rows, keys = [10, 0, 2, 3], [0, 7, 7, 1]
    truth = ring_worker.reference_gradients(packages("clip"), rows, keys, False)
    ours = pool.run("gradients", (0, 1, 2, 3), package=names["clip"], ranks=(0, 1, 2, 3), rows=rows, keys=keys)
    assert_equal(average(results(ours)), truth)


def test_a_mesh(pool: Pool, packages: Packages, names: dict[str, str]) -> None:
    rows, ranks = [3, 0, 8, 2], (0, 1, 2, 3)
    truth = ring_worker.reference_gradients(packages("clip"), rows, rows, False)
    ours = pool.run("gradients", ranks, package=names["clip"], ranks=ranks, rows=rows, keys=rows, how="mesh")
    assert_equal(average(results(ours)), truth)


@pytest.mark.parametrize("ranks", [(0, 1), (3, 0, 2), (2, 3, 1, 0)])
def test_the_side_group_of_nccl_groups(pool: Pool, names: dict[str, str], ranks: tuple[int, ...]) -> None:
    packages = [names["clip"], names["infonce"]]
    assert all(results(pool.run("headers", ranks, packages=packages, ranks=ranks)))


def test_sum_reduction(pool: Pool, packages: Packages, names: dict[str, str]) -> None:
    rows, ranks = [3, 5], (0, 1)
    truth = ring_worker.reference_gradients(packages("clip"), rows, rows, False)
    ours = pool.run("gradients", ranks, package=names["clip"], ranks=ranks, rows=rows, keys=rows, reduction="sum")
    assert_equal(average(results(ours)), [value * 8 for value in truth])


def test_a_group_of_one_does_not_communicate(pool: Pool, packages: Packages, names: dict[str, str]) -> None:
    (alone,) = results(pool.run("alone", (2,), package=names["clip"]))
    q, k = torch.arange(80.0).double().sin().view(10, 8), torch.arange(80.0).double().cos().view(10, 8)
    assert alone.pop()
    assert_equal(alone, list(packages("clip").loss_and_grads(q, k, 3.0)))


def test_messages_have_a_constant_size(pool: Pool, names: dict[str, str]) -> None:
    """Always the largest shard: keys W - 1 times, what accumulates W times, backward one time less; where nothing is
    kept, keys as often again."""
    ranks, rows, size = (0, 1, 2), [2, 9, 0], 9
    keys, pair = size * 8 * 8, 2 * size * 8
    forward = [[(0, keys)], [(1, pair), (0, keys)], [(1, pair)], [(1, pair)]]
    finished = [(0, keys), (1, pair)]
    backward = [finished, finished, [(2, keys)], [(2, keys)]]
    expected = [(what, *message) for batch in forward + backward for what in ("send", "receive") for message in batch]
    for seen in results(pool.run("traffic", ranks, package=names["clip"], ranks=ranks, rows=rows)):
        assert seen == expected


def test_labels_may_name_keys_of_other_ranks(pool: Pool, names: dict[str, str]) -> None:
    results(
        pool.run(
            "call",
            (0, 1),
            each={0: {"labels": [7, 6, 5, 4]}},
            package=names["infonce"],
            ranks=(0, 1),
            labels=[3, 2, 1, 0],
        )
    )


def test_unchecked_ranks_still_know_each_others_sizes(pool: Pool, names: dict[str, str]) -> None:
    arguments = {"package": names["clip"], "ranks": (0, 1), "check_ranks": "never"}
    first, second = results(pool.run("call", (0, 1), each={1: {"rows": 7}}, **arguments))
    checked = results(pool.run("call", (0, 1), each={1: {"rows": 7}}, package=names["clip"], ranks=(0, 1)))
    assert [first, second] == checked


@pytest.mark.parametrize("how", ["group", "mesh"])
def test_a_process_outside_the_group_is_told_so(pool: Pool, names: dict[str, str], how: str) -> None:
    answers = pool.run("outside", (0, 1, 2, 3), package=names["clip"], ranks=(1, 2), how=how)
    assert [kind for kind, _ in answers] == ["ValueError", "ok", "ok", "ValueError"], answers
    assert "not a member" in answers[0][1] and "not a member" in answers[3][1]


def test_a_table_survives_its_package_and_a_group_of_another_size() -> None:
    """It is planned as text, and flat where there are more or fewer ranks than planned."""
    for nodes, devices in itertools.product(range(1, 5), repeat=2):
        table, size = ring_table(nodes, devices), nodes * devices
        again = planned_table(ast.literal_eval(repr(dataclasses.asdict(table))))
        assert again == table and again.over(size) == table
        flat = again.over(size + 1)
        assert flat == dataclasses.replace(ring_table(1, size + 1), keeps=table.keeps)
        walk(flat)
        assert again.over(1).transport == "none" and not again.over(1).keeps


def test_headers_survive_the_trip() -> None:
    for accepted, text, number in itertools.product([True, False], ["", "2.13.0+cpu", "x" * 14], [0, -1, 2**62]):
        header = {field: {bool: accepted, str: text, int: number}[kind] for field, kind in groups._HEADER.items()}
        assert groups._decode(groups._encode(header)) == header


class Work:
    """A message of gloo's, which is dropped if nobody waits for it."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waited, self.timeout = error, False, datetime.timedelta()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        self.waited, self.timeout = True, timeout
        if self.error:
            raise RuntimeError(self.error)


class Control:
    """Of rank 3 of 4, where rank 2 has died, which is noticed when it is addressed or waited for."""

    def __init__(self, addressing: bool) -> None:
        self.addressing = addressing
        self.sent: dict[int, Work] = {}

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if peer == 2 and self.addressing:
            raise RuntimeError("Connection closed by peer")
        return Work("Connection closed by peer" if peer == 2 else "")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.sent[peer] = Work("Connection closed by peer" if peer == 2 else "")
        return self.sent[peer]


def test_every_rank_takes_part_in_the_first_batch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with a message to the next and one from the rank before. Planted: at each call; on CPUs, too."""
    monkeypatch.setattr(torch, "zeros", lambda count, device: torch.ones(count))

    class Ring(groups.Group):
        rank, size = 3, 4  # type: ignore[assignment]
        _connected = False

        def __init__(self) -> None: ...

    ring = Ring()
    assert ring.first_messages(torch.device("cpu")) == ([], [])
    (sent,), (got,) = ring.first_messages(torch.device("cuda"))
    assert (sent.peer, got.peer) == (0, 2)
    assert ring.first_messages(torch.device("cuda")) == ([], [])


@pytest.mark.parametrize("addressing", [True, False])
def test_who_notices_a_death_still_tells_the_others(addressing: bool) -> None:
    """Or one that calls late waits for this rank's header until the timeout, and names this rank, not the dead one."""
    control = Control(addressing)

    class Ring(groups.Group):
        rank, size, trips = 3, 4, 0  # type: ignore[assignment]
        _timeout = datetime.timedelta(seconds=5)  # type: ignore[assignment]

        def __init__(self) -> None: ...

        def _control_group(self) -> Control:
            return control

    with pytest.raises(RuntimeError, match=r"rank 3 of 4 failed (addressing|waiting for) rank 2 .*Connection closed"):
        Ring().exchange({field: kind() for field, kind in groups._HEADER.items()})
    for peer in (0, 1):
        assert control.sent[peer].waited
        assert 4 < control.sent[peer].timeout.total_seconds() <= 5, "each wait begins the timeout again"
