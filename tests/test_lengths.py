"""Losses over prefixes that no package has at once: the sum of a call for each length."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import infcl_gen
from infcl_gen.lengths import _Directions
from infcl_gen.processes import run_ranks

PREFIXES = {4: 1.0, 8: 0.5, 16: 2.0}
ROWS = 12
IDS = torch.arange(ROWS) // 3
OTHERS, TEACHER = (
    torch.randn(ROWS, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)
)


def siglip(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """arXiv 2303.15343, algorithm 1, without a bias."""
    signs = 2 * torch.eye(len(q), dtype=q.dtype, device=q.device) - 1
    return -logsigmoid(signs * scale * (q @ k.T)).sum() / len(q)


def ntxent(q: Tensor, k: None, scale: Tensor) -> Tensor:
    """arXiv 2002.05709, equation 1: rows i and i + M/2 are a pair."""
    rows = len(q)
    logits = (scale * (q @ q.T)).masked_fill(torch.eye(rows, dtype=torch.bool, device=q.device), -torch.inf)
    return torch.nn.functional.cross_entropy(logits, (torch.arange(rows, device=q.device) + rows // 2) % rows)


def supcon(q: Tensor, k: None, scale: Tensor) -> Tensor:
    """arXiv 2004.11362, equation 2."""
    itself = torch.eye(len(q), dtype=torch.bool)
    logs = torch.log_softmax((scale * (q @ q.T)).masked_fill(itself, -torch.inf), 1)
    positives = (IDS[:, None] == IDS[None, :]) & ~itself
    return -(logs.masked_fill(~positives, 0.0).sum(1) / positives.sum(1)).mean()


def gemini(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """arXiv 2503.07891, section 3, of distinct ids: a query has negatives of its own, of as many columns."""
    of_keys, own = scale * (q @ k.T), scale * torch.einsum("md,mhd->mh", q, OTHERS[..., : q.shape[1]])
    return torch.nn.functional.cross_entropy(torch.cat([of_keys, own], 1), torch.arange(len(q)))


def distill(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """arXiv 1503.02531, section 2: the teacher has all of its columns at each length."""
    target = torch.softmax(TEACHER[:, 0] @ TEACHER[:, 1].T, 1)
    return torch.nn.functional.cross_entropy(scale * (q @ k.T), target)


DIRECTIONS = normalize(TEACHER, dim=2)


def cwcl(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """arXiv 2309.14580, equation 5, of queries; weights are those of whole guides."""
    weights = (1 + DIRECTIONS[:, 0] @ DIRECTIONS[:, 1].T) / 2
    logs = torch.log_softmax(scale * (q @ k.T), 1)
    return -((weights * logs).sum(1) / weights.sum(1)).mean()


CASES: dict[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = {
    "siglip": (siglip, {}),
    "ntxent": (ntxent, {}),
    "supcon_out": (supcon, {"query_ids": IDS}),
    "gemini": (gemini, {"negatives": OTHERS, "query_ids": torch.arange(ROWS), "key_ids": torch.arange(ROWS)}),
    "cwcl": (cwcl, {"guide_queries": DIRECTIONS[:, 0], "guide_keys": DIRECTIONS[:, 1]}),
    "distill": (distill, {"guide_queries": TEACHER[:, 0], "guide_keys": TEACHER[:, 1]}),
}
# Of negatives only features are renormalised by hand.
HOW = [(name, renormalise) for name in CASES for renormalise in (False, True) if not renormalise or name != "gemini"]


def leaves(name: str, device: str = "cpu", dtype: torch.dtype = torch.float64, rows: int = ROWS) -> list[Any]:
    """q, k (None of a loss of rows) and scale."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(rows, 16, dtype=torch.float64, generator=generator).to(device, dtype) for _ in "qk")
    scale = torch.tensor(1.5, dtype=torch.float64, device=device)
    rows_alone = name in ("ntxent", "supcon_out")
    return [x if x is None else x.requires_grad_() for x in (q, None if rows_alone else k, scale)]


def cut(x: Tensor | None, columns: int, renormalise: bool) -> Tensor | None:
    first = None if x is None else x.double()[:, :columns]
    return normalize(first, dim=1) if renormalise and first is not None else first


def summed(one: Callable[..., Tensor], given: list[Any], renormalise: bool) -> Tensor:
    q, k, scale = given
    losses = [w * one(cut(q, d, renormalise), cut(k, d, renormalise), scale) for d, w in PREFIXES.items()]
    return torch.stack(losses).sum()


def close(loss: Tensor, wanted: Tensor, given: list[Any], tolerance: float = 1e-7) -> None:
    inputs = [x for x in given if x is not None]
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    for value, truth in zip(found, [wanted.detach(), *torch.autograd.grad(wanted, inputs)], strict=True):
        assert float((value.double() - truth.double()).norm()) <= tolerance * float(truth.double().norm())


@pytest.mark.parametrize(("name", "renormalise"), HOW)
def test_the_loss_is_the_sum_of_those_of_the_lengths(name: str, renormalise: bool) -> None:
    """Against formulas by hand, in fp64, by function and by module. Planted: a weight that is left out; cosines of all
    columns; negatives, or a guide, of another length."""
    dense, more = CASES[name]
    given = leaves(name)
    how: dict[str, Any] = {"loss": name, "prefixes": PREFIXES, "renormalise": renormalise}
    close(infcl_gen.contrastive_loss(*given, **how, **more), summed(dense, given, renormalise), given)
    module = infcl_gen.ContrastiveLoss(**how)
    close(module(*given, **more), summed(dense, given, renormalise), given)


def test_directions_are_those_of_normalize() -> None:
    """Also of rows that are 0 or nearly so, in fp64. In bf16 only the features themselves and norms are kept."""
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in "xu")
    x[1], x[2] = 0.0, x[2] * 1e-14
    (found, norms), wanted = _Directions.apply(x.requires_grad_()), normalize(x, dim=1)
    assert not norms.requires_grad
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, upstream)[0] for each in (found, wanted)))
    features, kept = x.detach().bfloat16().requires_grad_(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        _Directions.apply(features[:, :3])
    assert sorted(each.nbytes for each in kept if each.data_ptr() != features.data_ptr()) == [6 * 4]


def test_losses_of_queries_are_added_up() -> None:
    q, k, scale = leaves("siglip")
    found = infcl_gen.contrastive_loss(q, k, scale, loss="siglip", prefixes=PREFIXES, reduction="none")
    of_batch = infcl_gen.contrastive_loss(q, k, scale, loss="siglip", prefixes=PREFIXES)
    assert found.shape == (ROWS,)
    torch.testing.assert_close(found.double().mean(), of_batch.double())


@pytest.mark.parametrize("renormalise", [False, True], ids=["products", "cosines"])
def test_a_module_runs_in_a_graph_and_under_transforms(renormalise: bool) -> None:
    q, k, scale = leaves("siglip")
    criterion = infcl_gen.ContrastiveLoss("siglip", prefixes=PREFIXES, renormalise=renormalise)
    expected = summed(siglip, [q, k, scale], renormalise)
    close(criterion(q, k, scale), expected, [q, k, scale])
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(criterion, fullgraph=True, backend=backend)
        close(compiled(q, k, scale), summed(siglip, [q, k, scale], renormalise), [q, k, scale])
    found = torch.func.grad(criterion)(q.detach(), k.detach(), scale.detach())
    (wanted,) = torch.autograd.grad(summed(siglip, [q, k, scale], renormalise), [q])
    torch.testing.assert_close(found, wanted)


def test_a_call_in_a_graph_breaks_it() -> None:
    """As one with prefixes of a package does: calls are traced with what is at hand."""
    q, k, scale = leaves("siglip")

    def call(q: Tensor, k: Tensor) -> Tensor:
        return infcl_gen.contrastive_loss(q, k, scale, loss="siglip", prefixes=PREFIXES)

    torch.testing.assert_close(torch.compile(call, backend="eager")(q, k), call(q, k))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"prefixes are given to infcl_gen\.ContrastiveLoss, made outside"):
        torch.compile(call, backend="eager", fullgraph=True)(q, k)


def test_a_file_of_the_folder_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a loss is remembered by its relative path."""
    q, k, scale = leaves("siglip")
    found = list[Tensor]()
    for times in (1, 3):
        folder = tmp_path / str(times)
        folder.mkdir()
        (folder / "own.py").write_text(
            "from infcl_gen.losses.language import *\n"
            f"OWN = LossSpec('own', {times} * sum_over_pairs(sigmoid(scale * z)) / queries, positives='diagonal')\n"
        )
        monkeypatch.chdir(folder)
        found.append(infcl_gen.contrastive_loss(q, k, scale, loss="own.py:OWN", prefixes=[8, 16]))
    torch.testing.assert_close(found[1], 3 * found[0])


def test_a_file_that_makes_a_module_of_its_own_loss_gives_the_loss(tmp_path: Path) -> None:
    """By its name it would be read without end."""
    file, q, k = tmp_path / "own.py", *leaves("siglip")[:2]
    for word, error in ((f"{str(file)!r} + ':OWN'", "is being read: .* give the LossSpec itself"), ("OWN", None)):
        file.write_text(
            "import infcl_gen\nfrom infcl_gen.losses.language import *\n"
            "OWN = LossSpec('own', sum_over_pairs(sigmoid(scale * z)) / queries, positives='diagonal')\n"
            f"criterion = infcl_gen.ContrastiveLoss({word}, prefixes=[8, 16])\n"
        )
        how: dict[str, Any] = {"loss": f"{file}:OWN", "prefixes": [8, 16]}
        if error is not None:
            with pytest.raises(infcl_gen.InputError, match=error):
                infcl_gen.contrastive_loss(q, k, 2.0, **how)
    assert infcl_gen.contrastive_loss(q, k, 2.0, **how).isfinite()


def test_what_has_no_sum_of_lengths_is_refused() -> None:
    q, k, scale = leaves("siglip")
    for error, message, loss, prefixes in (
        (infcl_gen.InputError, "^loss sogclr: a state is of one length .*add up losses of sliced", "sogclr", [8, 16]),
        (infcl_gen.InputError, "^prefixes: 8, 4 do not grow", "siglip", [8, 4]),
        (ValueError, "^prefixes: 4, 8 must end with D = 16: add it, or pass fewer columns$", "siglip", [4, 8]),
        (ValueError, "^prefixes: 4, 32 must end with D = 16: add it", "siglip", [4, 32]),
    ):
        with pytest.raises(error, match=message):
            infcl_gen.contrastive_loss(q, k, scale, loss=loss, prefixes=prefixes)
    with pytest.raises(
        infcl_gen.InputError, match="not for sums over pairs: write the loss without, and pass prefixes"
    ):
        infcl_gen.load(loss="siglip", prefixes=[8, 16], batch_size=8, dim=16, dtype="fp32", target="cpu")


@pytest.mark.usefixtures("forked")
def test_uneven_ranks_have_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    """What one rank does otherwise is an error on both, and the next call is in step. Planted: the shortest first;
    an error of one rank's cut that the other does not hear of; lengths that are not compared."""
    argument = {"cache": str(tmp_path), "rows": [7, 5], "prefixes": PREFIXES}
    found = run_ranks("tests.lazy_rank:lengths", argument, 2, 120.0)
    q, k, scale = leaves("siglip")
    wanted = summed(siglip, [q, k, scale], renormalise=False)
    dq, dk = torch.autograd.grad(wanted, [q, k])
    for rank, rows in enumerate((slice(0, 7), slice(7, 12))):
        answer = found[rank]
        assert answer["value"] == pytest.approx(wanted.item(), rel=1e-5)
        for name, whole in (("dq", dq), ("dk", dk)):
            torch.testing.assert_close(torch.tensor(answer[name]) / 2, whole[rows].float(), rtol=1e-4, atol=1e-6)
        assert re.search(("rank 1 are invalid", "^TypeError: q must")[rank], answer["no tensor"])
        assert re.search(("rank 1 are invalid", "^ValueError: q must be a dense tensor")[rank], answer["sparse"])
        assert re.search(("rank 1 are invalid", "^OutOfMemoryError")[rank], answer["no memory"])
        assert "dimension differs (rank 0: 16, rank 1: 24)" in answer["another width"]
        for name in ("other prefixes", "another weight", "cosines"):
            assert re.search(r"digest of prefixes differs \(rank 0: (\w{8}), rank 1: (?!\1)\w{8}\)", answer[name])
        assert re.search(r"digest of prefixes differs \(rank 0: \w{8}, rank 1: none\)", answer["all columns"])


@pytest.mark.gpu
@pytest.mark.parametrize("renormalise", [False, True], ids=["products", "cosines"])
@pytest.mark.parametrize("name", ["siglip", "ntxent"])
def test_on_a_gpu(name: str, renormalise: bool) -> None:
    """In bf16, whose roundings of gradients are 2^-9 each. Lengths of 16-bit features are no multiples of 16 bytes."""
    dense, more = CASES[name]
    given = leaves(name, "cuda", torch.bfloat16, rows=500)
    how: dict[str, Any] = {"loss": name, "prefixes": PREFIXES, "renormalise": renormalise}
    close(infcl_gen.contrastive_loss(*given, **how, **more), summed(dense, given, renormalise), given, 2.0**-6)
