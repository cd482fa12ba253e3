"""The public functions and the module: autograd, arguments, autocast, compilation."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import math
import pickle
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import infcl_gen
from infcl_gen.runtime.package import Call, Options
from tests.verification.dense import dense_loss

Packages = Callable[..., ModuleType]


def features(
    rows: int = 20, dim: int = 8, dtype: torch.dtype = torch.float64, grad: bool = True
) -> tuple[Tensor, Tensor]:
    q, k = (torch.randn(rows, dim, dtype=torch.float64).to(dtype) for _ in range(2))
    return q.requires_grad_(grad), k.requires_grad_(grad)


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_equal_the_reference(packages: Packages, reduction: str) -> None:
    package = packages("clip")
    leaves = (*features(), scalar(3.0), scalar(-1.0))
    loss = package.contrastive_loss(*leaves, reduction=reduction)
    ours = torch.autograd.grad(loss, leaves)
    reference = dense_loss("clip", *leaves) * (20 if reduction == "sum" else 1)
    torch.testing.assert_close(loss, reference, rtol=1e-13, atol=1e-13)
    for a, b in zip(ours, torch.autograd.grad(reference, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_scalars_have_their_dtype(packages: Packages, dtype: torch.dtype) -> None:
    package = packages("clip", dtype="fp32")
    q, k = features(dtype=torch.float32)
    scale, bias = scalar(2.0, dtype), scalar(0.5, dtype)
    package.contrastive_loss(q, k, scale, bias).backward()
    assert scale.grad is not None and scale.grad.dtype == dtype and scale.grad != 0
    assert bias.grad is not None and bias.grad.dtype == dtype


@pytest.mark.parametrize("compiled", [False, True])
def test_scale_and_bias_of_one_element_have_gradients_in_their_shape(packages: Packages, compiled: bool) -> None:
    package = packages("clip")
    q, k = features()
    (flat, bias), plain = ([scalar(3.0).reshape(1), scalar(-1.0).reshape(1)], [scalar(3.0), scalar(-1.0)])
    leaves = [flat.detach().requires_grad_(), bias.detach().requires_grad_()]
    run = torch.compile(package.contrastive_loss, fullgraph=True, backend="aot_eager") if compiled else None
    loss = (run or package.contrastive_loss)(q, k, *leaves)
    assert loss.shape == ()
    expected = torch.autograd.grad(package.contrastive_loss(q, k, *plain), plain)
    for found, right in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert found.shape == (1,) and torch.equal(found[0], right)
    assert torch.equal(package.loss_and_grads(q, k, *leaves)[3], expected[0])
    torch.testing.assert_close(package.reference(q, k, *leaves), loss, rtol=1e-13, atol=0)


def test_forward_mode_and_vmap_are_refused_in_words(packages: Packages) -> None:
    """A derivative that is silently missing would count as zero."""
    package = packages("clip")
    q, k = features(grad=False)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives: use backward"):
        torch.func.jvp(lambda x: package.contrastive_loss(x, k), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        package.contrastive_loss(forward_ad.make_dual(q, q), k)
    for function in (package.contrastive_loss, torch.func.grad(package.contrastive_loss)):
        with pytest.raises(RuntimeError, match=r"vmap over batches .* call it once for each"):
            torch.vmap(lambda x, function=function: function(x, k))(torch.stack([q, q]))
    shared = torch.vmap(lambda factor: factor * package.contrastive_loss(q, k))(torch.ones(2))
    assert torch.equal(shared[0], package.contrastive_loss(q, k))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_tensors_in_parts_are_refused_in_words(packages: Packages) -> None:
    package = packages("clip")
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([X[:2], X[2:]], layout=layout)
        with pytest.raises(ValueError, match=r"q must be a dense tensor, not a nested one: pass torch.cat"):
            package.contrastive_loss(nested, nested)

    class Distributed(Tensor):
        full_tensor = None

    parts = X.as_subclass(Distributed)
    with pytest.raises(TypeError, match=r"k is a DTensor: pass .*k\.to_local\(\), and its mesh as group"):
        package.contrastive_loss(X, parts)
    with pytest.raises(TypeError, match=r"scale is a DTensor: pass scale\.full_tensor\("):
        package.contrastive_loss(X, X, torch.tensor(2.0).as_subclass(Distributed))


def test_torch_func_differentiates_it(packages: Packages) -> None:
    package = packages("clip")
    q, k = features(grad=False)
    theirs = torch.func.grad(lambda x: package.contrastive_loss(x, k, 3.0))(q)
    q.requires_grad_()
    package.contrastive_loss(q, k, 3.0).backward()
    assert q.grad is not None and torch.equal(q.grad, theirs)


def test_numbers_made_under_a_transform_are_not_kept(packages: Packages) -> None:
    package = packages("clip")
    q, k = features(grad=False)
    torch.func.grad(lambda x: package.contrastive_loss(x, k, 3.28125))(q)
    api = importlib.import_module(f"{package.__name__}._runtime.api")
    kept = api._constant(3.28125, torch.float64, q.device, 0)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept)


def test_numbers_of_inference_serve_training(packages: Packages) -> None:
    """A number is kept for later calls, and autograd saves no inference tensors."""
    package, (q, k) = packages("clip"), features()
    with torch.inference_mode():
        package.contrastive_loss(q.detach(), k.detach(), 3.140625)
    package.contrastive_loss(q, k, 3.140625).backward()
    assert q.grad is not None


@pytest.mark.parametrize("wanted", range(1, 16))
def test_only_what_is_wanted_gets_a_gradient(packages: Packages, wanted: int) -> None:
    package = packages("clip")
    leaves = [*features(), scalar(3.0), scalar(-1.0)]
    for bit, leaf in enumerate(leaves):
        leaf.requires_grad_(bool(wanted >> bit & 1))
    package.contrastive_loss(*leaves).backward()
    assert [leaf.grad is not None for leaf in leaves] == [bool(wanted >> bit & 1) for bit in range(4)]


def test_nothing_is_kept_and_no_gradient_computed_without_need(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = packages("clip")
    engine = sys.modules[f"{package.__name__}._runtime.engine"]
    monkeypatch.setattr(engine, "backward", None)  # must not be called
    replay, wanted = sys.modules[f"{package.__name__}._runtime.replay"], list[int]()
    forward = replay.forward

    def noting(package: Any, call: Any, gradients: int) -> Any:
        wanted.append(gradients)
        return forward(package, call, gradients)

    monkeypatch.setattr(replay, "forward", noting)
    q, k = features()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail("a tensor was saved"), lambda x: x):
        with torch.no_grad():
            assert package.contrastive_loss(q, k, 2.0).grad_fn is None
        assert package.contrastive_loss(q.detach(), k.detach(), 2.0).grad_fn is None
        assert not package.ContrastiveLoss().eval()(q.detach(), k.detach(), 2.0).requires_grad
    assert wanted == [0, 0, 0]


def test_labels_are_copied_before_the_device_starts(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory the copy would wait for the first kernels, and the host with it."""
    package = packages("infonce")
    sweep, order = sys.modules[f"{package.__name__}._runtime.sweep"], list[str]()
    for where, name in ((sweep, "_positives"), (package._schedule, "forward_block")):
        inner = getattr(where, name)
        noted = lambda *args, name=name, inner=inner, **how: (order.append(name), inner(*args, **how))[1]  # noqa: E731
        monkeypatch.setattr(where, name, noted)
    package.contrastive_loss(*features(), 2.0, labels=torch.arange(len(features()[0])))
    assert order == ["_positives", "forward_block"]


@pytest.mark.parametrize("shape", ["expanded", "scaled", "double"])
def test_incoming_gradients_of_any_stride(packages: Packages, shape: str) -> None:
    package = packages("clip", dtype="fp32")
    q, k = features(dtype=torch.float32)
    loss = package.contrastive_loss(q, k, 2.0)
    if shape == "expanded":
        loss.expand(5, 3).mean().backward()
        factor = 1.0
    elif shape == "scaled":
        torch.stack([loss, loss]).sum().backward()
        factor = 2.0
    else:
        (loss.double() * 3.0).backward()
        factor = 3.0
    expected = package.loss_and_grads(q, k, 2.0)
    torch.testing.assert_close(q.grad, expected[1] * factor, rtol=1e-5, atol=1e-8)


def test_second_backward_and_second_derivative_raise(packages: Packages) -> None:
    package = packages("clip")
    q, k = features()
    scale = scalar(2.0)
    loss = package.contrastive_loss(q, k, scale)
    loss.backward(retain_graph=True)
    once = q.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    assert torch.equal(q.grad, 2 * once)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    (dq,) = torch.autograd.grad(package.contrastive_loss(q, k, scale), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(
            torch.autograd.grad(package.contrastive_loss(q.detach(), k.detach(), scale), scale, create_graph=True)[0],
            scale,
        )


def test_a_changed_input_is_noticed(packages: Packages) -> None:
    q, k = features()
    loss = packages("clip").contrastive_loss(q, k)
    with torch.no_grad():
        q.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_casts_features_and_rounds_nothing_else(packages: Packages) -> None:
    """A peer's positive logit is rounded to bf16 under autocast: at scale 100 the loss is off in the third digit."""
    package = packages("clip", dtype="bf16")
    q, k = (nn.functional.normalize(x.detach(), dim=1).requires_grad_() for x in features(100, dtype=torch.float32))
    scale = scalar(100.0, torch.float32)
    outside = package.contrastive_loss(q.bfloat16(), k.bfloat16(), scale)
    grads = torch.autograd.grad(outside, (q, k, scale))
    with torch.autocast("cpu", torch.bfloat16):
        inside = package.contrastive_loss(q, k, scale)
        assert torch.equal(inside, outside) and inside.dtype == torch.float32
        for a, b in zip(torch.autograd.grad(inside, (q, k, scale)), grads, strict=True):
            assert a.dtype == torch.float32 and torch.equal(a.bfloat16(), b.bfloat16())
    truth = package.reference(q.bfloat16(), k.bfloat16(), 100.0)
    assert inside.item() == pytest.approx(truth.item(), rel=1e-5)
    for wrong in (torch.float64, torch.int64):
        with pytest.raises(ValueError, match=f"q has dtype {wrong}"):
            package.contrastive_loss(q.to(wrong), k, scale)
    exact = packages("clip", dtype="fp32")
    with torch.autocast("cpu", torch.bfloat16):
        q32, k32 = q.detach(), k.detach()
        assert float(exact.contrastive_loss(q32, k32, 100.0)) == pytest.approx(
            float(exact.reference(q32, k32, 100.0)), rel=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_of_any_dtype_enter_any_package(packages: Packages, dtype: torch.dtype) -> None:
    for planned in ("fp32", "bf16"):
        package = packages("clip", dtype=planned)
        q, k = features(12, dtype=dtype)
        loss = package.contrastive_loss(q, k, torch.tensor([4.0]))
        dq, dk = torch.autograd.grad(loss, (q, k))
        assert dq.dtype == dk.dtype == dtype
        computed = package.SPEC["problem"]["dtype"]
        cast = [x.detach().to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[computed])) for x in (q, k)]
        assert loss.item() == pytest.approx(float(package.reference(*cast, 4.0)), rel=1e-3)


def test_a_group_of_its_own_is_this_device_alone(packages: Packages) -> None:
    package = packages("clip", dtype="fp32")
    q, k = features(dtype=torch.float32)
    assert torch.equal(package.contrastive_loss(q, k, 2.0, group="local"), package.contrastive_loss(q, k, 2.0))
    assert package.ContrastiveLoss(group="local", rank=0, world_size=1)(q, k, 2.0).isfinite()


# The arguments of open_clip's ClipLoss (open_clip_torch 3.3), and of its forward, in their order.
CLIP_LOSS = ["local_loss", "gather_with_grad", "cache_labels", "rank", "world_size", "use_horovod"]
CLIP_FORWARD = ["image_features", "text_features", "logit_scale", "logit_bias", "output_dict"]


def test_arguments_of_open_clip_are_attributes(packages: Packages) -> None:
    package = packages("clip", dtype="fp32")
    with pytest.warns(UserWarning, match="gather_with_grad"):
        criterion = package.ContrastiveLoss(local_loss=True, cache_labels=True, rank=0, world_size=1)
    assert [getattr(criterion, name) for name in CLIP_LOSS] == [True, False, True, 0, 1, False]
    criterion = package.ContrastiveLoss(True, True, False, 0, 1, False)
    assert [getattr(criterion, name) for name in CLIP_LOSS] == [True, True, False, 0, 1, False]
    with pytest.raises(ValueError, match="wrong world size: world_size=2"):
        package.ContrastiveLoss(True, True, False, 0, 2, False)


@pytest.mark.parametrize(("loss", "products"), [("infonce", 4), ("siglip", 3), ("siglip_multi", 3), ("clip_ids", 4)])
def test_flops_are_counted(packages: Packages, loss: str, products: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    package = packages(loss, dtype="fp32")
    keys = 31 if loss == "infonce" else 12
    q, k = features(12, dtype=torch.float32)[0], features(keys, dtype=torch.float32)[1]
    ids = torch.arange(12)
    given = {"query_ids": ids, "key_ids": ids} if package.SPEC["loss"]["traits"]["classes"] else {}
    with FlopCounterMode(display=False) as counter:
        package.contrastive_loss(q, k, 2.0, **given).backward()
    assert counter.get_total_flops() == products * 2 * len(q) * len(k) * q.shape[1]


def test_flops_of_rows_against_themselves_are_half() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    package = infcl_gen.load(loss="ntxent", batch_size=64, dim=8, dtype="fp32", target="cpu")
    q = features(12, dtype=torch.float32)[0]
    with FlopCounterMode(display=False) as counter:
        package.contrastive_loss(q, None, 2.0).backward()
    assert counter.get_total_flops() == 2 * 2 * 12 * 12 * q.shape[1]


def test_what_torch_negates_as_it_reads_it_is_copied(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels read memory as it is: features, scale, bias and the gradient of the loss."""

    def negated(x: Tensor) -> Tensor:
        found = torch.complex(x, -x).conj().imag
        assert found.is_neg() and torch.equal(found, x)
        return found

    package = packages("infonce", dtype="fp32")
    plain = Call(*(x.detach() for x in features(dtype=torch.float32)), torch.tensor(2.0), torch.tensor(0.5))
    call = package._api.accepted(package._package, Call(*map(negated, plain[:4]))).cast(package._package)
    assert not any(x.is_neg() for x in call[:4])
    engine, seen = importlib.import_module(f"{package.__name__}._runtime.engine"), []
    backward = engine.backward

    def watched(*arguments: Any) -> Any:
        seen.append(arguments[3].is_neg())
        return backward(*arguments)

    monkeypatch.setattr(engine, "backward", watched)
    q = plain.q.requires_grad_()
    torch.autograd.grad(package.contrastive_loss(q, plain.k), q, negated(torch.ones(())))
    assert seen == [False]


def test_a_default_device_changes_nothing(packages: Packages) -> None:
    package = packages("clip", dtype="fp32")
    with torch.device("meta"):
        assert package.selftest("cpu")


def test_numbers_as_scale_make_two_graphs_at_most(packages: Packages) -> None:
    from torch._dynamo.testing import CompileCounter

    package = packages("clip", dtype="fp32")
    q, k = features(dtype=torch.float32)
    graphs = CompileCounter()
    step = torch.compile(lambda scale: package.contrastive_loss(q, k, scale), fullgraph=True, backend=graphs)
    for index in range(12):
        scale = 1.0 + 0.37 * index
        torch.testing.assert_close(step(scale), package.contrastive_loss(q, k, scale))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_wider_features_are_not_rounded_under_autocast(packages: Packages, compiled: bool) -> None:
    """Rounding to bf16 is 1.7e-3 by itself: most of the error, and all of a peer's gradients have it."""
    package = packages("clip", dtype="bf16")
    q, k = (nn.functional.normalize(x.detach(), dim=1).bfloat16() for x in features(300, dtype=torch.float32))
    scale = scalar(14.3, torch.float32)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return package.contrastive_loss(q, k, scale)  # type: ignore[no-any-return]

    def relative(found: Tensor, truth: Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm())

    exact = [x.double().requires_grad_() for x in (q, k)]
    truth = torch.autograd.grad(dense_loss("clip", *exact, scale.double()), exact)
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    wide, narrow = torch.float32, torch.bfloat16
    for dtypes in ((wide, wide), (wide, narrow), (narrow, wide), (narrow, narrow)):
        leaves = [x.detach().to(dtype).requires_grad_() for x, dtype in zip((q, k), dtypes, strict=True)]
        for leaf, found, right in zip(leaves, torch.autograd.grad(run(*leaves), leaves), truth, strict=True):
            assert found.dtype == leaf.dtype
            assert (relative(found, right) < 1e-3) == (found.dtype == torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, dq, dk, *_ = package.loss_and_grads(q.float(), k, 14.3)
    assert dq.dtype == torch.float32 and dk.dtype == torch.bfloat16
    assert relative(dq, truth[0]) < 1e-3 < relative(dk, truth[1])


def test_wider_features_have_one_derivative_and_are_watched(packages: Packages) -> None:
    package = packages("clip", dtype="bf16")
    q, k = features(30, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = package.contrastive_loss(q, k, 3.0)
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(dq.norm(), q)
    with torch.autocast("cpu", torch.bfloat16):
        loss = package.contrastive_loss(q, k, 3.0)
    with torch.no_grad():
        q.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_labels(packages: Packages) -> None:
    package = packages("infonce")
    q, _ = features(20)
    _, k = features(31)
    labels = torch.randint(31, (20,))
    ours = torch.autograd.grad(package.contrastive_loss(q, k, 3.0, labels=labels), (q, k))
    for a, b in zip(ours, torch.autograd.grad(dense_loss("infonce", q, k, 3.0, labels=labels), (q, k)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_own_labels_of_one_device_are_the_first_keys(packages: Packages) -> None:
    package = packages("infonce")
    q, k = features(20)[0], features(31)[1]
    step = lambda q, k: package.contrastive_loss(q, k, 3.0, labels="own")  # noqa: E731
    expected = package.loss_and_grads(q, k, 3.0, labels=torch.arange(20))[:3]
    for ours in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = ours(q, k)
        assert all(map(torch.equal, (loss, *torch.autograd.grad(loss, (q, k))), expected))
    assert all(map(torch.equal, package.loss_and_grads(q, k, 3.0, labels="own")[:3], expected))
    torch.testing.assert_close(package.reference(q, k, 3.0, labels="own"), expected[0], rtol=1e-13, atol=0)


def test_an_unchecked_wrong_label_gives_nan_everywhere(packages: Packages) -> None:
    """Labels on a device are looked at once only: afterwards a wrong one must not give finite numbers."""
    package = packages("infonce")
    agreement = sys.modules[f"{package.__name__}._runtime.agreement"]
    q, k = features(20, grad=False)
    labels = torch.arange(20)
    labels[7] = 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_label_range", lambda *_: (0, -1))
        loss, dq, dk, dscale, _ = package.loss_and_grads(q, k, 2.0, labels=labels)
    assert loss.isnan() and dscale.isnan() and dk.isnan().all()
    assert dq[7].isnan().all()


def test_which_calls_look_at_labels_on_a_device(packages: Packages) -> None:
    """The first call of each package, and every call with check_ranks="always".

    Planted: check_ranks ignored; a package that counts as checked by another one's call.
    """
    package = packages("infonce")
    runtime = {name: sys.modules[f"{package.__name__}._runtime.{name}"] for name in ("agreement", "package")}
    record = package.ContrastiveLoss._package

    class OnADevice(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    labels = torch.tensor([3, 1, 2]).as_subclass(OnADevice)
    for checked, check_ranks, seen in (
        (set(), "first", (1, 3)),
        ({"of another package"}, "first", (1, 3)),
        ({record.digest}, "first", (0, -1)),
        ({record.digest}, "never", (0, -1)),
        ({record.digest}, "always", (1, 3)),
    ):
        options = runtime["package"].Options(check_ranks=check_ranks)
        call = runtime["package"].Call(*[torch.zeros(())] * 4, labels=labels, options=options)
        assert runtime["agreement"]._label_range(record, call, checked) == seen, (checked, check_ranks)


def test_module_is_a_drop_in_for_open_clip(packages: Packages) -> None:
    package = packages("clip")
    q, k = features()
    module = package.ContrastiveLoss(
        local_loss=True, gather_with_grad=True, cache_labels=True, rank=0, world_size=1, use_horovod=False
    )
    loss = module(q, k, torch.tensor(2.0), logit_bias=torch.tensor(-10.0))
    assert torch.equal(loss, package.contrastive_loss(q, k, 2.0, -10.0))
    assert torch.equal(module(q, k, 2.0, -10.0, True)["contrastive_loss"], loss)
    result = module(image_features=q, text_features=k, logit_scale=2.0, logit_bias=-10.0, output_dict=True)
    assert list(result) == ["contrastive_loss"] and torch.equal(result["contrastive_loss"], loss)
    assert copy.deepcopy(module)(q, k, 2.0).isfinite()
    assert pickle.loads(pickle.dumps(module))(q, k, 2.0).isfinite()
    assert list(module.parameters()) == [] and package.__name__.split("_")[0] in repr(module)


def test_an_editor_shows_what_a_package_exports(packages: Packages) -> None:
    """Functions and the class stand in `__init__` with signatures and docstrings, and pickle by name."""
    package = packages("clip")
    tree = ast.parse(Path(str(package.__file__)).read_text())
    written = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(written) == set(package.__all__) - {"SPEC", "reference"}
    for name, node in written.items():
        exported = getattr(package, name)
        assert ast.get_docstring(node), name
        assert pickle.loads(pickle.dumps(exported)) is exported
    assert list(inspect.signature(package.contrastive_loss).parameters) == [
        "q", "k", "scale", "bias", "labels", "query_ids", "key_ids", "query_weight", "key_weight", "negatives",
        "query_state", "key_state", "query_scale", "key_scale", "guide_queries", "guide_keys", "group", "grad_sync",
        "reduction", "check_ranks",
    ]  # fmt: skip
    parameters = list(inspect.signature(package.ContrastiveLoss).parameters)
    assert parameters == [*CLIP_LOSS, "group", "grad_sync", "check_ranks"]
    assert list(inspect.signature(package.ContrastiveLoss.forward).parameters)[1:-13] == CLIP_FORWARD


BAD_MODULES = [
    ({"use_horovod": True}, ValueError, "horovod"),
    ({"world_size": 4}, ValueError, "wrong world size"),
    ({"world_size": 1, "rank": 3}, ValueError, "wrong rank"),
    ({"grad_sync": "average"}, ValueError, "grad_sync must be one of 'mean', 'sum'"),
    ({"check_ranks": True}, ValueError, "check_ranks"),
    ({"group": "world"}, TypeError, "group must be a ProcessGroup"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_MODULES)
def test_bad_module_arguments(
    packages: Packages, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        packages("clip").ContrastiveLoss(**arguments)


def test_a_module_looks_at_its_world_at_each_call(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be made before the process group is."""
    package = packages("clip")
    module = package.ContrastiveLoss(world_size=1)
    monkeypatch.setattr(sys.modules[f"{package.__name__}._runtime.api"], "_place", lambda group: (0, 2))
    with pytest.raises(ValueError, match="world_size=1 was given, but the process group has 2"):
        module(X, X, 2.0)


X = torch.randn(6, 8, dtype=torch.float64)
BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("clip", ([[1.0]], X), {}, TypeError, "q must be a tensor, not list"),
    ("clip", (X, None), {}, TypeError, "k must be a tensor"),
    ("clip", (X[0], X), {}, ValueError, r"q must have shape \(rows, 8\)"),
    ("clip", (X, X[:, :7]), {}, ValueError, "k has embedding dimension 7, but q has 8$"),
    ("clip", (X.float(), X), {}, ValueError, "q and k must have one dtype; q has dtype torch.float32, k has .*64$"),
    ("clip", (X.float(), X.float()), {}, ValueError, "q has dtype torch.float32, but .* for torch.float64: cast it"),
    ("clip", (X, X.bfloat16()), {}, ValueError, "one dtype; .* k has dtype torch.bfloat16$"),
    ("clip", (X.long(), X), {}, ValueError, "dtype torch.int64"),
    ("clip", (X, X.to_sparse()), {}, ValueError, "dense"),
    ("clip", (X, X.to("meta")), {}, ValueError, "on one device"),
    ("clip", (X, X[:5]), {}, ValueError, "pairs query i with key i.*6 queries and 5 keys"),
    ("clip", (X[:0], X[:0]), {}, ValueError, "at least one query"),
    ("clip", (X.repeat(51, 1), X.repeat(51, 1)), {}, ValueError, "at most 300.*infcl-gen generate.*--batch-size 306"),
    ("infonce", (X, X.repeat(51, 1)), {}, ValueError, "and 300 keys, but .* 6 queries and 306 keys.*--keys 306"),
    ("clip", (X, X, "big"), {}, TypeError, "scale must be a number or a tensor of one, not str"),
    ("clip", (X, X, True), {}, TypeError, "scale"),
    ("clip", (X, X, torch.ones(1, 1)), {}, ValueError, r"scale must be a tensor of one .* \(1, 1\)"),
    ("clip", (X, X, torch.tensor(True)), {}, ValueError, "scale must be a tensor of one real number"),
    ("clip", (X, X, torch.tensor(1j)), {}, ValueError, "scale must be a tensor of one real number"),
    ("infonce", (X, X), {"labels": torch.arange(6, device="meta")}, ValueError, "on the host or on cpu, not on meta"),
    ("clip", (X, X, 10**400), {}, ValueError, "scale must be a number that torch.float64 can hold"),
    ("clip", (X, X, 1.0, torch.ones(2)), {}, ValueError, r"bias must be a tensor of one .* \(2,\)"),
    ("clip", (X.to("meta"), X.to("meta")), {}, ValueError, "on the meta device, which holds no values: move"),
    ("clip", (X, X), {"labels": torch.arange(6)}, ValueError, "labels are not supported"),
    ("infonce", (X, X), {"labels": [0, 1]}, TypeError, 'labels must be an int64 tensor, "own" or None, not list'),
    ("infonce", (X, X), {"labels": "mine"}, ValueError, "\"own\" or None, not 'mine'"),
    ("infonce", (X, X[:5]), {"labels": "own"}, ValueError, 'labels="own" .* there are 6 queries and 5 keys'),
    ("clip", (X, X), {"labels": "own"}, ValueError, "labels are not supported"),
    ("infonce", (X, X), {"labels": torch.arange(6).int()}, ValueError, "int64"),
    ("infonce", (X, X), {"labels": torch.arange(5)}, ValueError, r"shape \(6,\)"),
    ("infonce", (X, X), {"labels": torch.arange(6) + 1}, ValueError, "labels range from 1 to 6; there are 6 keys"),
    ("infonce", (X, X), {"labels": torch.arange(6) - 1}, ValueError, "labels range from -1"),
    ("infonce", (X, X[:5]), {}, ValueError, "labels are needed"),
    ("clip", (X, X), {"grad_sync": "none"}, ValueError, "grad_sync"),
    (
        "clip",
        (X, X),
        {"reduction": "none"},
        ValueError,
        "has one loss for all queries: reduction='none' takes a package",
    ),
    ("clip", (X, X), {"reduction": "max"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', not 'max'"),
    ("clip", (X, X), {"check_ranks": "maybe"}, ValueError, "check_ranks"),
    ("clip", (X, X), {"group": -100}, (TypeError, ValueError), "group|member"),  # type: ignore[list-item]
    ("clip", (X, X), {"group": object()}, TypeError, "group"),
]


@pytest.mark.parametrize(("loss", "arguments", "keywords", "error", "message"), BAD_CALLS)
def test_bad_arguments(
    packages: Packages,
    loss: str,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message) as caught:
        packages(loss).contrastive_loss(*arguments, **keywords)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]], X, 1.0), "^image_features must be a tensor, not list$"),
        ((X, X[:, :7], 1.0), "^text_features has embedding dimension 7, but image_features has 8$"),
        ((X, X.to("meta"), 1.0), "^image_features and text_features must be on one device"),
        ((X.to("meta"), X.to("meta"), 1.0), "^image_features and text_features are on the meta device"),
        ((X, X.half(), 1.0), "^image_features and text_features must have one dtype; .* text_features has dtype .*16$"),
        ((X, X, "big"), "^logit_scale must be a number or a tensor of one, not str$"),
        ((X, X, 1.0, torch.ones(2)), "^logit_bias must be a tensor of one"),
    ],
)
def test_a_module_names_its_own_arguments(packages: Packages, arguments: tuple[Any, ...], message: str) -> None:
    package = packages("clip")
    with pytest.raises((TypeError, ValueError), match=message):
        package.ContrastiveLoss()(*arguments)
    accepted = importlib.import_module(f"{package.__name__}._runtime.api").accepted
    calls = [accepted(_bound(package), Call(X, X, 2.0, None, options=options))
             for options in (Options(), package.ContrastiveLoss().options)]  # fmt: skip
    assert calls[0].options == calls[1].options  # and share what is recorded


def test_a_module_has_no_reduction_and_says_what_has(packages: Packages) -> None:
    """Planted: any other name refused with the same words; names that no call has, let through."""
    module = packages("clip").ContrastiveLoss()
    with pytest.raises(
        TypeError, match=r"^ContrastiveLoss is the mean over the batch; contrastive_loss\(\.\.\., reduction=\.\.\.\)"
    ):
        module(X, X, 1.0, reduction="none")
    with pytest.raises(TypeError, match=r"^ContrastiveLoss has no argument 'label' in a call$"):
        module(X, X, 1.0, label=None)


def test_what_is_left_out_of_a_call(packages: Packages) -> None:
    """No bias is one of 0, which the losses of these packages would not show."""
    package = packages("infonce")
    module = importlib.import_module(f"{package.__name__}._runtime.api")
    call = module.accepted(_bound(package), module.Call(X, X, 2, None, options=module.Options()))
    assert (float(call.scale), float(call.bias), call.labels, call.options.labelling) == (2.0, 0.0, None, "none")


def test_more_rows_per_rank_than_planned_are_announced(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    package = packages("clip")
    agreement = sys.modules[f"{package.__name__}._runtime.agreement"]
    monkeypatch.setattr(agreement, "_warned", set())
    layout = agreement.Layout(0, (200,), (200,))
    planned = agreement.Package(**{**vars(_bound(package)), "rows_per_rank": 100})
    with pytest.warns(UserWarning, match="may take more memory than predicted"):
        agreement._check_sizes(planned, layout, "none")


def _bound(package: ModuleType) -> Any:
    return package.ContrastiveLoss._package


@pytest.mark.parametrize("loss", ["clip", "infonce"])
def test_compiles_without_a_graph_break(packages: Packages, loss: str) -> None:
    package = packages(loss)
    module = package.ContrastiveLoss()
    q, k = features()
    scale = scalar(2.0)
    extra = {"labels": torch.arange(20).flip(0)} if loss == "infonce" else {}

    def step(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
        return module(nn.functional.normalize(q, dim=1), nn.functional.normalize(k, dim=1), scale.exp(), **extra)  # type: ignore[no-any-return]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, expected = (torch.autograd.grad(f(q, k, scale), (q, k, scale)) for f in (compiled, step))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    plain = torch.compile(
        lambda q, k: package.contrastive_loss(q, k, 2.0, -1.0, **extra), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(plain(q, k), package.contrastive_loss(q, k, 2.0, -1.0, **extra))


WRONG_IN_A_GRAPH = {
    "dimension": ((X[:, :7], X), ValueError, "embedding dimension 7, .*generate one for dim 7$"),
    "dtype": (
        (X, X.float()),
        ValueError,
        "image_features and text_features must have one dtype; .* text_features has dtype torch.float32",
    ),
    "scale": ((X, X, "big"), TypeError, "logit_scale must be a number or a tensor of one, not str"),
}


@pytest.mark.parametrize("kind", WRONG_IN_A_GRAPH)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_wrong_in_a_full_graph_is_said_in_the_same_words(
    packages: Packages, kind: str, dynamic: bool | None
) -> None:
    arguments, error, message = WRONG_IN_A_GRAPH[kind]
    module = packages("clip").ContrastiveLoss()
    run = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(error, match=message):
        run(*arguments, *([1.0] if len(arguments) == 2 else []))


def test_compiles_under_autocast(packages: Packages) -> None:
    package = packages("clip", dtype="bf16")
    q, k = features(dtype=torch.float32)

    def step(q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return package.contrastive_loss(q, k, 2.0)  # type: ignore[no-any-return]

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q, k), step(q, k))


def test_the_same_package_may_be_imported_twice(
    packages: Packages, folder_of: Callable[[ModuleType], Path], tmp_path: Path
) -> None:
    package = packages("clip")
    shutil.copytree(folder_of(package), tmp_path / "copied")
    spec = importlib.util.spec_from_file_location("copied", tmp_path / "copied" / "__init__.py")
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    sys.modules["copied"] = again
    try:
        spec.loader.exec_module(again)
        q, k = features()
        ours = torch.autograd.grad(again.contrastive_loss(q, k, 2.0), q)[0]
        assert torch.equal(ours, torch.autograd.grad(package.contrastive_loss(q, k, 2.0), q)[0])
        assert all(
            torch.equal(a, b) for a, b in zip(again.loss_and_grads(q, k), package.loss_and_grads(q, k), strict=True)
        )
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "copied"]:
            del sys.modules[name]


def test_accumulation_does_not_multiply_the_gradient_of_the_scale(packages: Packages) -> None:
    package = packages("clip")
    scale, halves = scalar(2.0), [features(10) for _ in range(2)]
    for q, k in halves:
        (package.contrastive_loss(q, k, scale) / 2).backward()
    expected = sum(package.loss_and_grads(q, k, 2.0)[3] for q, k in halves) / 2
    torch.testing.assert_close(scale.grad, expected, rtol=1e-12, atol=0)


def test_threads_share_a_package(packages: Packages) -> None:
    package = packages("clip")
    q, k = features(100, grad=False)
    expected, results = package.loss_and_grads(q, k, 2.0), []
    threads = [threading.Thread(target=lambda: results.append(package.loss_and_grads(q, k, 2.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(a, b) for r in results for a, b in zip(r, expected, strict=True))


def test_python_floats_need_not_be_finite(packages: Packages) -> None:
    q, k = features()
    assert packages("clip").contrastive_loss(q, k, math.inf).isnan()


@pytest.fixture
def switch() -> Iterator[Any]:
    """torch's switch for fp32 products on CPUs, as it is in a process that has them rounded to bf16."""
    switch: Any = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    yield switch
    switch.fp32_precision = before


def test_users_of_the_precision_switch_that_overlap_give_back_the_processs_own(packages: Packages, switch: Any) -> None:
    """Planted: what was there before is noted by every user, and not by the first alone."""
    module = sys.modules[f"{packages('clip').__name__}._runtime.device_state"]
    precision = module.Precision(torch.backends.mkldnn)
    first, second = precision.of_products("ieee"), precision.of_products("ieee")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert switch.fp32_precision == "ieee", "the second is still at work"
    second.__exit__(None, None, None)
    assert switch.fp32_precision == "bf16"


def test_threads_that_need_other_precisions_take_turns(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the switch is set though another thread is at work; a thread waits for itself; nobody is woken."""
    module, switch = (
        sys.modules[f"{packages('clip').__name__}._runtime.device_state"],
        SimpleNamespace(fp32_precision="bf16"),
    )
    precision, seen = module.Precision(SimpleNamespace(matmul=switch)), list[str]()

    def other() -> None:
        with precision.of_products("tf32"):
            seen.append(switch.fp32_precision)

    thread = threading.Thread(target=other)
    with precision.of_products("ieee"):
        thread.start()
        thread.join(0.2)
        assert not seen and switch.fp32_precision == "ieee"
    thread.join(10.0)
    assert seen == ["tf32"] and switch.fp32_precision == "bf16"
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    with precision.of_products("ieee"):
        with precision.of_products("tf32"):
            assert switch.fp32_precision == "tf32"
        assert switch.fp32_precision == "ieee"
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="of different precision from one thread"):
            pool.submit(other).result()
    assert switch.fp32_precision == "bf16"


@pytest.mark.parametrize("held", ["ieee", "tf32"])
def test_the_precision_switch_goes_on_following_the_global_one(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Planted: the switch is set to a value that it already has, or back to the value that it has followed."""
    module = sys.modules[f"{packages('clip').__name__}._runtime.device_state"]
    library, everything = torch.backends.mkldnn, cast(Any, torch.backends)
    monkeypatch.setattr(everything, "fp32_precision", "ieee")
    with module.Precision(library).of_products(held):
        assert library.matmul.fp32_precision == held
    assert library.matmul.fp32_precision == "ieee"
    everything.fp32_precision = "tf32"
    assert library.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_on_cpus_are_never_rounded_as_the_process_has_them(
    packages: Packages, switch: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Also of bf16 packages, which multiply in fp32 there. Planted: the switch is set for fp32 packages alone."""
    package, seen = packages("clip", dtype=dtype), []
    for name in ("forward_block", "backward_block"):
        block = getattr(package._schedule, name)

        def noting(*args: Any, block: Any = block, **how: Any) -> Any:
            seen.append(switch.fp32_precision)
            return block(*args, **how)

        monkeypatch.setattr(package._schedule, name, noting)
    q, k = (x.to(_bound(package).dtype) for x in features(grad=False))
    package.loss_and_grads(q, k, 2.0)
    assert seen == ["ieee", "ieee"] and switch.fp32_precision == "bf16"


def test_a_number_is_put_on_a_device_once_for_each_stream(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream does not wait for the launch that puts it there. Planted: one constant for all streams."""
    package = packages("clip")
    api = importlib.import_module(f"{package.__name__}._runtime.api")
    streams = iter((1, 1, 2))
    monkeypatch.setattr(api, "traced", lambda *_: False)
    monkeypatch.setattr(api.replay, "capturing", lambda device: False)
    monkeypatch.setattr(api.replay, "raw_stream", lambda device: next(streams))
    q: Any = types.SimpleNamespace(device=torch.device("cpu"), is_cuda=True)
    first, again, other = (api._scalar("scale", 2.71875, _bound(package), q) for _ in range(3))
    assert first is again and first is not other and torch.equal(first, other)
