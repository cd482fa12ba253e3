"""The loss without sizes: packages are made at the first call, grown for larger batches, and shared by ranks."""

import copy
import gc
import importlib.util
import io
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infcl_gen
from infcl_gen import LossSpec, lazy, triton_start
from infcl_gen.files import load_file
from infcl_gen.losses import language
from infcl_gen.processes import Worker, run_ranks
from tests import lazy_rank


@pytest.fixture(autouse=True)
def _nothing_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_alone", lazy._Shelf())


def features(rows: int, dim: int = 16, dtype: torch.dtype = torch.float32, keys: int | None = None) -> list[Any]:
    generator = torch.Generator().manual_seed(rows)
    sizes = (rows, rows if keys is None else keys)
    return [
        torch.nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=1).to(dtype).requires_grad_()
        for n in sizes
    ]


def printed_elsewhere(code: str, program: Path) -> str:
    """What a program prints that is written there, in a process of its own (the fixture `forked`)."""
    program.write_text(code)
    log = program.with_suffix(".log")
    worker = Worker("tests.documents:run_example", [str(program)], log)
    try:
        assert worker.answer(120.0) == {"done": True}, log.read_text()
    finally:
        worker.kill()
    return log.read_text()


def planned() -> list[int]:
    return [package.SPEC["problem"]["batch_size"] for package in lazy._alone.packages.values()]


def value(loss: torch.Tensor) -> float:
    return loss.detach().item()


def truth(q: Any, k: Any, scale: float) -> float:
    x = scale * q.detach().double() @ k.detach().double().T
    each = torch.arange(len(q))
    entropy = torch.nn.functional.cross_entropy
    return float((entropy(x, each) + entropy(x.T, each)) / 2)


def test_numbers_of_single_queries_are_passed_on() -> None:
    q, k = features(6)
    ids, negatives = torch.arange(6), features(18)[0].reshape(6, 3, 16)
    given = {"query_ids": ids, "key_ids": ids, "negatives": negatives}
    expected = torch.cat((q @ k.T, torch.einsum("id,ild->il", q, negatives)), 1).mul(5.0)
    expected = torch.nn.functional.cross_entropy(expected, ids)
    for loss in (infcl_gen.contrastive_loss(q, k, 5.0, loss="gemini", **given),
                 infcl_gen.ContrastiveLoss("gemini")(q, k, 5.0, **given)):  # fmt: skip
        assert value(loss) == pytest.approx(value(expected), rel=1e-5)


def test_it_grows_and_does_not_shrink(caplog: pytest.LogCaptureFixture) -> None:
    criterion = infcl_gen.ContrastiveLoss()
    with caplog.at_level(logging.INFO, "infcl_gen"):
        for rows, size in ((5, 8), (20, 32), (3, 32), (32, 32), (33, 64)):
            q, k = features(rows)
            loss = criterion(q, k, 10.0)
            loss.backward()
            assert value(loss) == pytest.approx(truth(q, k, 10.0), rel=1e-5)
            assert planned() == [size]
    assert len([line for line in caplog.messages if "batches of up to" in line]) == 3


def test_a_package_that_has_grown_gives_its_recordings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold a stash, whose memory the larger package has planned."""
    criterion, given_up = infcl_gen.ContrastiveLoss(), []
    criterion(*features(5), 10.0)
    (package,) = lazy._alone.packages.values()
    monkeypatch.setattr(package._api.replay, "give_up_all", lambda: given_up.append(package))
    criterion(*features(4), 10.0)
    assert not given_up
    criterion(*features(20), 10.0)
    assert given_up == [package]


def test_each_kind_has_a_package() -> None:
    """Planted: the loss, the budget, D, the dtype or autocast left out of what tells kinds apart."""
    criterion = infcl_gen.ContrastiveLoss()
    for dim, dtype in ((16, torch.float32), (8, torch.float32), (16, torch.bfloat16), (16, torch.float32)):
        q, k = features(9, dim, dtype)
        criterion(q, k, torch.tensor([10.0])).backward()
        assert q.grad.dtype == dtype
    assert planned() == [16, 16, 16]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k = features(9)
        criterion(q, k, 10.0).backward()
        rounded = value(criterion(q.bfloat16(), k.bfloat16(), 10.0))
        assert value(criterion(q, k, 10.0)) == value(infcl_gen.contrastive_loss(q, k, 10.0)) == rounded
    assert q.grad.dtype == torch.float32 and planned() == [16, 16, 16]
    assert value(criterion(q, k, 10.0)) == value(infcl_gen.contrastive_loss(q, k, 10.0)) != rounded
    criterion.memory_budget = "1GiB"
    criterion(q, k, 10.0)
    criterion.loss = "infonce"
    assert value(criterion(q, k, 10.0)) == value(infcl_gen.contrastive_loss(q, k, 10.0, loss="infonce"))
    assert planned() == [16] * 6


def test_more_keys_than_queries() -> None:
    q, k = features(6, keys=30)
    loss = infcl_gen.contrastive_loss(q, k, 5.0, loss="infonce", labels="own")
    x = 5.0 * q.double() @ k.double().T
    expected = torch.nn.functional.cross_entropy(x, torch.arange(6))
    assert value(loss) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_no_garbage_is_collected_while_the_first_call_makes_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(eager_loss=lambda *_: gc.get_threshold()[0])
    monkeypatch.setattr(lazy, "_load", lambda *_: SimpleNamespace(_api=api, _package=None))
    assert lazy._load_and_run(None, (None, None)) == 0 < gc.get_threshold()[0]


def test_wrong_arguments_say_what_is_right() -> None:
    q, k = features(4)
    with pytest.raises(TypeError, match="q must be a tensor"):
        infcl_gen.contrastive_loss([1.0], k)
    with pytest.raises(ValueError, match="int64"):
        infcl_gen.contrastive_loss(q.long(), k)
    with pytest.raises(infcl_gen.InfeasibleError, match="budget"):
        infcl_gen.contrastive_loss(q, k, memory_budget="1KiB")
    for wrong in ([8, 2], [], {}):
        with pytest.raises(infcl_gen.InputError, match=r"^prefixes: "):
            infcl_gen.contrastive_loss(q, k, prefixes=wrong)
    for none in ((), None):
        assert torch.equal(infcl_gen.contrastive_loss(q, k, prefixes=none), infcl_gen.contrastive_loss(q, k))
    with pytest.raises(ValueError, match=r"^q must be \(rows, D\) of .*, not 1-D of torch.float32$"):
        infcl_gen.contrastive_loss(q[0], k)
    for given in ((q, k.double()), (q.double(), k)):
        dtypes = f"image_features has dtype {given[0].dtype}, text_features has dtype {given[1].dtype}"
        with pytest.raises(ValueError, match=f"^image_features and text_features must have one dtype; {dtypes}$"):
            infcl_gen.ContrastiveLoss()(*given, 1.0)
    with pytest.raises(infcl_gen.InputError, match="nonsense"):
        infcl_gen.contrastive_loss(q, k, loss="nonsense")
    _, longer = features(20)
    for rows in (8, 40):
        with pytest.raises(
            ValueError, match=f"^clip pairs query i with key i, but there are {rows - 4} queries and 20 "
        ):
            infcl_gen.contrastive_loss(features(rows)[0][4:], longer)
        infcl_gen.contrastive_loss(*features(4))
    _, other = features(4, 24)
    with pytest.raises(ValueError, match=r"^k has embedding dimension 24, but q has 16$"):
        infcl_gen.contrastive_loss(q, other)
    with pytest.raises(ValueError, match=r"q and k must have one embedding dimension .* q has D = 24 .* k has D = 16"):
        infcl_gen.contrastive_loss(other, k)
    criterion = infcl_gen.ContrastiveLoss()
    with pytest.raises(TypeError, match=r"^image_features must be a tensor, not list$"):
        criterion([1.0], k, 1.0)
    with pytest.raises(
        ValueError, match=r"^image_features and text_features must have one embedding dimension .* has D"
    ):
        criterion(other, k, 1.0)
    with pytest.raises(TypeError, match=r"^logit_scale must be a number"):
        criterion(q, k, "big")


def own_loss(factor: float = 1.0) -> LossSpec:
    x = language.scale * language.z
    row = language.logsumexp_over_keys(x) - language.positive(x)
    return LossSpec("own", factor * language.mean_over_queries(row))


def test_a_module_is_refused_where_it_is_made() -> None:
    """Not at its first call. Planted: each of the checks of its constructor left out."""
    row = language.logsumexp_over_keys(language.z) * language.logsumexp_over_queries(language.z)
    for error, message, loss in (
        (
            infcl_gen.InputError,
            r"^loss: 'clp' is neither a built-in loss nor FILE\.py:NAME; did you mean 'clip'\?$",
            "clp",
        ),
        (infcl_gen.InputError, r"^loss: no Python file '.*own\.py'$", "own.py:own"),
        (
            infcl_gen.InputError,
            "^loss bad: .*write logsumexp_over_keys",
            LossSpec("bad", language.mean_over_queries(row)),
        ),
        (infcl_gen.InputError, r"^loss: '\{clip' must be a name or FILE\.py:NAME", "{clip"),
        (infcl_gen.InputError, r"^loss: \[1\] is no name, FILE.py:NAME or LossSpec$", [1]),
    ):
        with pytest.raises(error, match=message):
            infcl_gen.ContrastiveLoss(loss)
    for error, message, given in (
        (infcl_gen.InputError, "^memory_budget: '1 GBit' is not a size; .* GiB or TiB", {"memory_budget": "1 GBit"}),
        (infcl_gen.InputError, "^memory_budget: 0 is out of range", {"memory_budget": 0}),
        (infcl_gen.InputError, "^memory_budget: None is not a size", {"memory_budget": None}),
        (TypeError, "no argument 'memory_bugdet'; did you mean 'memory_budget'", {"memory_bugdet": "1GiB"}),
        (TypeError, "no argument 'sizes'; valid: local_loss, .*memory_budget, prefixes, renormalise$", {"sizes": 3}),
        (infcl_gen.InputError, "^prefixes: 8, 2 do not grow", {"prefixes": [8, 2]}),
        (infcl_gen.InputError, r"^prefixes: \[\] are no counts of columns", {"prefixes": []}),
        (infcl_gen.InputError, "^renormalise: cosines are of prefixes; give prefixes", {"renormalise": True}),
        (TypeError, "^ContrastiveLoss is the mean over the batch", {"reduction": "none"}),
        (infcl_gen.InputError, "; did you mean 'infonce'[?]$", {"loss": "infoNCE"}),
        (infcl_gen.InputError, "a state is of one length", {"loss": "sogclr", "prefixes": [2, 8]}),
        (ValueError, "^grad_sync must be one of", {"grad_sync": "avg"}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            infcl_gen.ContrastiveLoss(**given)


@pytest.mark.usefixtures("forked")
def test_a_file_may_make_the_module_of_its_own_loss(tmp_path: Path) -> None:
    """Also where that is not kept from who reads the file for its loss."""
    lines = (
        "import torch, infcl_gen", "from infcl_gen.losses.language import *",
        "row = logsumexp_over_keys(scale * z) - positive(scale * z)", "own = LossSpec('own', mean_over_queries(row))",
        "criterion = infcl_gen.ContrastiveLoss(f'{__file__}:own')", "if __name__ == '__main__':",
        "    print(criterion(torch.ones(4, 8), torch.ones(4, 8), 1.0).exp().item())",
    )  # fmt: skip
    assert float(printed_elsewhere("\n".join(lines), tmp_path / "train.py")) == pytest.approx(4)


@pytest.mark.usefixtures("forked")
def test_a_loss_is_given_itself(tmp_path: Path) -> None:
    """Planted: a LossSpec in the fields by which compiled code is guarded."""
    q, k = features(7)
    criterion = infcl_gen.ContrastiveLoss(own_loss(3.0))
    assert repr(criterion).startswith("ContrastiveLoss('own', ")
    expected = 3 * torch.nn.functional.cross_entropy(5.0 * q @ k.T, torch.arange(7))
    compiled = torch.compile(criterion, fullgraph=True, backend="eager")
    by_function = infcl_gen.contrastive_loss(q, k, 5.0, loss=own_loss(3.0))
    for found in (criterion(q, k, 5.0), criterion(q, k, 5.0), by_function, compiled(q, k, 5.0)):
        assert value(found) == pytest.approx(value(expected), rel=1e-5)
    assert len(planned()) == 1
    criterion.loss = own_loss(2.0)
    assert value(criterion(q, k, 5.0)) == pytest.approx(2 / 3 * value(expected), rel=1e-5)
    (tmp_path / "criterion").write_bytes(pickle.dumps(infcl_gen.ContrastiveLoss(own_loss(3.0))))
    torch.save((q, k), tmp_path / "features")
    code = (
        f"import pickle, torch; q, k = torch.load({str(tmp_path / 'features')!r})\n"
        f"print(pickle.load(open({str(tmp_path / 'criterion')!r}, 'rb'))(q, k, 5.0).item())"
    )
    assert float(printed_elsewhere(code, tmp_path / "program.py")) == pytest.approx(value(expected), rel=1e-5)


def test_a_formula_that_is_too_long_to_be_written_is_refused() -> None:
    """By a call, too, after the other ranks have heard of it."""
    terms = [language.logsumexp_over_negatives(n * language.positives_of_query) for n in range(2, 240)]
    spec = LossSpec("long", language.mean_over_queries(sum(terms)))
    with pytest.raises(infcl_gen.InputError, match="more than 10000 characters"):
        infcl_gen.contrastive_loss(*features(4), loss=spec)


def test_open_clips_arguments_are_taken_by_name() -> None:
    q, k = features(4)
    criterion = infcl_gen.ContrastiveLoss("clip", local_loss=True, gather_with_grad=True, rank=0, world_size=1)
    assert (criterion.loss, criterion.local_loss, criterion.world_size) == ("clip", True, 1)
    assert torch.equal(criterion(q, k, 10.0, None, True)["contrastive_loss"], criterion(q, k, 10.0))
    for arguments in ((True,), (True, True, False, 0, 1, False), ("clip", True, True)):
        with pytest.raises(TypeError, match=r"^ContrastiveLoss\(loss\) takes open_clip's arguments by name: "):
            infcl_gen.ContrastiveLoss(*arguments)
    with pytest.raises(TypeError, match="local_los"):
        infcl_gen.ContrastiveLoss(local_los=True)


def test_a_warm_loss_is_one_graph_and_a_cold_one_says_what_to_do() -> None:
    criterion = infcl_gen.ContrastiveLoss()

    def step(q: Any, k: Any) -> Any:
        return criterion(q, k, 10.0)

    q, k = features(12)
    with pytest.raises(Exception, match=r"call the loss once outside torch\.compile"):
        torch.compile(step, fullgraph=True, backend="eager")(q, k)
    expected = criterion(q, k, 10.0)
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(step)(q, k)
    assert explanation.graph_count == 1 and explanation.graph_break_count == 0
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="eager")(q, k), expected)


def test_a_traced_graph_says_what_is_wrong_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: errors of groups that are told as a package that is missing."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    criterion = infcl_gen.ContrastiveLoss()
    criterion.options = criterion.options._replace(group_name="gone")
    with pytest.raises(RuntimeError, match="'gone' does not exist"):
        criterion(*features(5), 10.0)


def test_groups_are_looked_up_in_torchs_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each call of a rank loads again. Planted: the table there was at import, where a world of threads has
    another."""
    assert not lazy._GROUPS
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert lazy._GROUPS
    finally:
        dist.destroy_process_group()
    assert not lazy._GROUPS
    infcl_gen.contrastive_loss(*features(5), 10.0)
    asked = list[str]()
    monkeypatch.setattr(lazy, "find_group", asked.append)
    infcl_gen.contrastive_loss(*features(5), 10.0)
    assert asked == []
    monkeypatch.setattr(
        dist.distributed_c10d, "_world", SimpleNamespace(pg_map={"of this thread": ""}, default_pg=None)
    )
    infcl_gen.contrastive_loss(*features(5), 10.0)
    assert asked == [""]


def test_without_torchs_private_names_the_public_ones_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an AttributeError in each call, which is told as features of no kind."""
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    monkeypatch.setattr(dist, "distributed_c10d", SimpleNamespace())
    assert lazy.__file__
    spec = importlib.util.spec_from_file_location("lazy_elsewhere", lazy.__file__)
    assert spec and spec.loader
    other: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, other)
    spec.loader.exec_module(other)
    q, k = features(5)
    asked = list[str]()
    for _ in range(2):
        assert value(other.contrastive_loss(q, k, 10.0)) == pytest.approx(truth(q, k, 10.0), rel=1e-5)
    assert len(other._alone.packages) == 1
    monkeypatch.setattr(other, "find_group", asked.append)
    other.contrastive_loss(q, k, 10.0)
    assert asked == [""]


def test_a_compiled_step_does_not_trace_the_sweep() -> None:
    """Its graph breaks at a cold loss, and `backward` runs where the compiler looks at every frame."""
    places = set[str]()

    def backend(module: Any, _: Any) -> Any:
        places.update(node.stack_trace or "" for node in module.graph.nodes)
        return module

    criterion, (q, k) = infcl_gen.ContrastiveLoss(), features(12)
    q.requires_grad_()

    @torch.compile(backend=backend)
    def step(q: Any, k: Any) -> Any:
        loss = criterion(q * 2, k, 10.0)
        loss.backward()
        return loss

    step(q, k)
    assert q.grad is not None
    assert not [place for place in places if "_runtime" in place or "schedule" in place]


def test_numbers_as_scale_do_not_make_a_graph_each() -> None:
    from torch._dynamo.testing import CompileCounter

    q, k = features(12)
    criterion, graphs = infcl_gen.ContrastiveLoss(), CompileCounter()
    criterion(q, k, 1.0)
    torch._dynamo.reset()
    step = torch.compile(lambda scale: criterion(q, k, scale), fullgraph=True, backend=graphs)
    for index in range(12):
        torch.testing.assert_close(step(1.0 + 0.37 * index), criterion(q, k, 1.0 + 0.37 * index))
    assert graphs.frame_count <= 2


@pytest.mark.usefixtures("forked")
def test_process_groups_may_begin_after_the_module_was_made(tmp_path: Path) -> None:
    found = run_ranks("tests.lazy_rank:early", {"cache": str(tmp_path)}, 2, 120.0)
    q, k = (torch.cat(side) for side in zip(*(lazy_rank._features(4, 16, rank) for rank in (0, 1)), strict=True))
    assert found[0] == found[1] == [pytest.approx(truth(q, k, lazy_rank.SCALE), rel=1e-5)] * 3


def test_compiled_code_takes_the_larger_package() -> None:
    criterion = infcl_gen.ContrastiveLoss()
    step = torch.compile(lambda q, k: criterion(q, k, 10.0), fullgraph=True, backend="eager")
    for rows in (6, 7, 40):  # the second makes the number of rows a symbol
        q, k = features(rows)
        torch.testing.assert_close(criterion(q, k, 10.0), step(q, k))


def test_threads_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a thread that has waited for the lock loads again what another thread has loaded."""
    loads, load, together = [], lazy.load_cached, threading.Barrier(3)

    def counted(problem: infcl_gen.Problem) -> Any:
        loads.append(problem)
        time.sleep(0.3)  # the others come meanwhile
        return load(problem)

    def run() -> None:
        together.wait()
        infcl_gen.contrastive_loss(*features(8))

    monkeypatch.setattr(lazy, "load_cached", counted)
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


@pytest.mark.parametrize("how", [{}, {"reduction": "none"}, {"prefixes": [8, 16]}], ids=["plain", "none", "prefixes"])
def test_a_loss_is_the_file_of_the_folder_of_the_call(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what was made of a loss is remembered by its relative path."""
    term = "mean_over_queries(logsumexp_over_keys(scale * z) - positive(scale * z))"
    found = list[torch.Tensor]()
    for times in (1, 3):
        folder = tmp_path / str(times)
        folder.mkdir()
        (folder / "own.py").write_text(
            f"from infcl_gen.losses.language import *\nOWN = LossSpec('own', {times} * {term}, positives='label')\n"
        )
        monkeypatch.chdir(folder)
        found.append(lazy.contrastive_loss(*features(4), loss="own.py:OWN", **how))
    torch.testing.assert_close(found[1], 3 * found[0])


@pytest.mark.parametrize("how", [{}, {"reduction": "none"}, {"prefixes": [8, 16]}], ids=["plain", "none", "prefixes"])
def test_a_loss_that_cannot_be_hashed_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"loss must be a name, FILE\.py:NAME or a LossSpec, not list"):
        lazy.contrastive_loss(*features(4), loss=["clip"], **how)  # type: ignore[arg-type]


def test_triton_starts_beside_other_work_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step that begins twice; a package that is used before Triton has started; a thread without a GPU; a
    fork beside a thread."""
    begun, may_end = list[str](), threading.Event()

    def step() -> None:
        begun.append("begun")
        may_end.wait(60.0)
        begun.append("ended")

    def soon() -> None:
        threading.Timer(0.5, may_end.set).start()

    monkeypatch.setattr(triton_start, "_STEPS", {"key": step, "driver": step})
    monkeypatch.setattr(triton_start, "_begun", {})
    for driver, build in ((False, "13.0"), (True, None)):
        monkeypatch.setattr(triton_start, "has_driver", lambda driver=driver: driver)
        monkeypatch.setattr(torch.version, "cuda", build)
        load_file(Path(lazy.__file__))
        assert begun == []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for _ in range(2):
        imported: Any = load_file(Path(lazy.__file__))
    load = imported.load_cached
    imported.load_cached = lambda problem: (load(problem), soon())[0]
    imported.contrastive_loss(*features(4))
    assert begun == ["begun", "ended"]  # the driver's step would use the GPU
    may_end.clear()
    triton_start.start_triton("driver")
    soon()
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    assert begun == ["begun", "ended"] * 2


def test_a_budget_that_the_next_power_of_two_exceeds_serves_the_batch() -> None:
    kind, tried = lazy.Kind("clip", "1GiB", 16, torch.float32, "cpu"), []

    def work(problem: infcl_gen.Problem) -> infcl_gen.Problem:
        tried.append((problem.batch_size, problem.keys))
        if problem.batch_size > 40_000:
            raise infcl_gen.InfeasibleError("too large")
        return problem

    assert lazy._fitting(work, kind, None, (33_000, 33_000), 1).batch_size == 33 * 1024
    assert tried == [(65_536, None), (33 * 1024, None)]
    tried.clear()
    with pytest.raises(infcl_gen.InfeasibleError):
        lazy._fitting(work, kind._replace(loss="infonce"), None, (65_000, 100), 1)
    assert tried == [(65_536, 128)]


def test_a_warm_call_makes_few_calls_beyond_one_through_load() -> None:
    """After other work each costs 0.5 us of host time or more. A call may take 5 us more than one through `load`.
    Planted: `find_group` where there are no groups; a package that asks again whether a graph is traced."""
    q, k = features(8)
    package = infcl_gen.load(batch_size=8, dim=16, dtype="fp32", target="cpu")

    def calls(criterion: Any) -> list[str]:
        """The Python functions that its third call runs."""
        found: list[str] = []
        criterion(q, k, 10.0)
        criterion(q, k, 10.0)
        sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
        try:
            criterion(q, k, 10.0)
        finally:
            sys.setprofile(None)
        return found

    for lazily, loaded in (
        (infcl_gen.ContrastiveLoss(), package.ContrastiveLoss()),
        (infcl_gen.contrastive_loss, package.contrastive_loss),
    ):
        beyond = Counter(calls(lazily)) - Counter(calls(loaded))
        assert beyond.total() == 1, beyond


def test_modules_are_copied_and_pickled() -> None:
    q, k = features(7)
    criterion = infcl_gen.ContrastiveLoss()
    expected = value(criterion(q, k, 10.0))
    saved = io.BytesIO()
    torch.save(criterion, saved)
    saved.seek(0)
    copies = (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion)), torch.load(saved, weights_only=False))
    assert [value(other(q, k, 10.0)) for other in copies] == [expected] * 3


@pytest.mark.usefixtures("forked")
def test_a_loaded_module_unpickles_in_another_process(tmp_path: Path) -> None:
    package = infcl_gen.load(batch_size=8, dim=16, dtype="fp32", target="cpu")
    (tmp_path / "criterion").write_bytes(pickle.dumps(package.ContrastiveLoss(grad_sync="sum")))
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'criterion')!r}, 'rb')).options.grad_sync)"
    assert printed_elsewhere(code, tmp_path / "program.py") == "sum\n"


@pytest.mark.usefixtures("forked")
def test_uneven_ranks_grow_together(tmp_path: Path) -> None:
    argument = {"cache": str(tmp_path), "rows": [(5, 3), (20, 3), (1, 0), (4, 4)], "cold": [1]}
    first, second = run_ranks("tests.lazy_rank:batches", argument, 2, 120.0)
    assert first["digests"] == second["digests"] and first["sizes"] == [64]  # 20 on each
    for index, rows in enumerate(argument["rows"]):
        parts = [lazy_rank._features(count, 16, 10 * index + rank) for rank, count in enumerate(rows)]
        q, k = (torch.cat(side) for side in zip(*parts, strict=True))
        for found in (first, second):
            assert found["steps"][index][0] == pytest.approx(truth(q, k, lazy_rank.SCALE), rel=1e-5)


# What one of two ranks does otherwise, and the errors of rank 0 and of rank 1.
INVALID, ABSENT, UNPLANNED = (
    "the arguments of rank 1 are invalid", "RuntimeError: rank 1 could not load the package", "rank 0 cannot plan for"
)  # fmt: skip
DIMS = r"embedding dimension differs \(rank 0: 16, rank 1: 24\)"
TROUBLES = {
    "none": ("^$", "^$"),
    "no tensor": (INVALID, "TypeError: q must be a tensor"),
    "no tensor, cold": (INVALID, "TypeError: q must be a tensor"),
    "another D of keys": (INVALID, "ValueError: q and k must have one .* q has D = 24 .* k has D = 16"),
    "no loss": (INVALID, "TypeError: loss must be a name, FILE.py:NAME or a LossSpec, not list"),
    "meta": (INVALID, "ValueError: q is on the meta device"),
    "dim": ("embedding dimension differs", "embedding dimension differs"),
    "dim, one rank warm": (rf"^RuntimeError: ranks disagree: {DIMS}$", rf"^RuntimeError: ranks disagree: {DIMS}$"),
    "formula": (ABSENT, "ranks disagree: loss differs"),
    "given": ("^$", "^$"),
    "formula, given": (ABSENT, "ranks disagree: loss differs"),
    "loss": (r"loss differs \(rank 0: first, rank 1: second", r"loss differs \(rank 0: first, rank 1: second"),
    "budget": (ABSENT, r"memory_budget differs \(rank 0: 64000000, here: 67108864\)"),
    "wrong budget": ("InputError: memory_budget: 'foo'", f"{UNPLANNED}.*foo"),
    "small budget": ("InfeasibleError", UNPLANNED),
    "unpaired": ("ValueError: clip pairs query i with key i, but .* 16 queries and 32 keys", f"{UNPLANNED}.*pairs"),
    "one rank unpaired": (
        r"there are 16 queries and 24 keys \(rank 1 has 8 and 16\); infonce",
        rf"{UNPLANNED}.*\(rank 1 has 8 and 16\)",
    ),
    "unwritable": (ABSENT, "InputError|NotADirectory|not a folder"),
    "broken": ("OSError: the driver", f"{UNPLANNED}.*the driver does not answer"),
}


@pytest.mark.usefixtures("forked")
def test_ranks_that_cannot_load_stop_all_of_them_and_stay_in_step(tmp_path: Path) -> None:
    """Planted: a trip that ends before ranks are compared; a budget read on rank 0 outside of what tells the others; a
    shelf by group name; fields compared that a rejecting rank does not know."""
    found = run_ranks("tests.lazy_rank:troubles", {"cache": str(tmp_path)}, 2, 120.0)
    for name, patterns in TROUBLES.items():
        for answer, pattern in zip(found, patterns, strict=True):
            message, after = answer[name]
            assert re.search(pattern, message), (name, message)
            assert after == pytest.approx(found[0]["none"][1]), name


@pytest.mark.usefixtures("forked")
def test_loads_depend_on_no_order_and_no_single_machine(tmp_path: Path) -> None:
    """Planted: one lock for all groups; a tuning record that each rank looks up; a problem under a key of the store."""
    found = run_ranks("tests.lazy_rank:orders", {"cache": str(tmp_path)}, 2, 120.0)
    for answer in found:
        assert answer == {"threads": 2, "records": [["panel_rows", "64"], ["records", "measured"]], "again": [16, 64]}
