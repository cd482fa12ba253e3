"""Losses of a user's own as packages: generated and checked against their reference, or refused in a sentence."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infcl_gen
from infcl_gen.emission.kernel_context import gradient_exponent
from infcl_gen.errors import InputError
from infcl_gen.hardware import resolve_cluster
from infcl_gen.inputs.problem import make_problem
from infcl_gen.losses import derive, load_loss
from infcl_gen.planning import plan
from tests.planning.test_memory import measured_peak_bytes

SOURCE = """
from infcl_gen.losses.language import *

def infonce(x, positives="label", name="mine"):
    return LossSpec(name, mean_over_queries(logsumexp_over_keys(x) - positive(x)), positives)

CAPPED = infonce(30 * tanh(scale * z / 30))
RICH = infonce(scale * z + tanh(scale * z) / 7 + (scale * z) ** 2 / (3 + (scale * z) ** 2))
SOFT = infonce(softplus(scale * z) - softplus(-scale * z) / 3)
PLAIN = infonce(z)
BIASED = infonce(z + bias)
PAIRED = infonce(scale * z, "diagonal")
LIGHT = LossSpec("light", mean_over_queries(logsumexp_over_keys(scale * z) - positive(scale * z)) / 10**6, "label")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("losses") / "losses.py"
    path.write_text(SOURCE)
    return path


def package(file: Path, name: str, **flags: Any) -> ModuleType:
    flags = {"batch_size": 130, "dim": 8, "dtype": "fp32", "target": "cpu"} | flags
    return infcl_gen.load(loss=f"{file}:{name}", **flags)


@pytest.mark.parametrize("profile", ["h200", "a100", "b200", "mi300x"])
@pytest.mark.parametrize("settings", [{}, {"strategy": "panel"}, {"panel_rows": 512}], ids=str)
def test_a_logit_that_is_not_affine_has_no_kernels(file: Path, profile: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no kernels for the loss mine: its logit 30 ") as error:
        infcl_gen.plan(
            loss=f"{file}:CAPPED", batch_size=4096, dim=64, device_profile=profile, dtype="bf16", set=settings
        )
    assert "\n" not in str(error.value)


def test_what_that_sentence_offers_is_possible(file: Path) -> None:
    problem = {"loss": f"{file}:CAPPED", "batch_size": 64, "dim": 8, "dtype": "bf16"}
    assert infcl_gen.plan(**problem, target="cpu").strategy == "torch"
    assert infcl_gen.plan(**problem, device_profile="h200", set={"strategy": "torch"}).strategy == "torch"


@pytest.mark.parametrize("name", ["CAPPED", "RICH", "SOFT"])
@pytest.mark.parametrize("panel_rows", ["64", "256"])
def test_terms_of_a_logit_that_is_not_affine_are_planned(file: Path, name: str, panel_rows: str) -> None:
    """Strips of rows, as many as the expression's temporaries."""
    settings = {"panel_rows": panel_rows, "panel_keys": "1024"}
    capped = package(file, name, batch_size=1000, dim=16, dtype="fp64", set=settings)
    predicted = capped.SPEC["predicted"]["peak_bytes"]
    q, k = torch.randn(2, 1000, 16, dtype=torch.float64)
    measured = measured_peak_bytes(lambda: capped.loss_and_grads(q, k, 3.0))
    assert measured <= predicted <= 1.05 * measured


@pytest.mark.parametrize("name", ["PLAIN", "BIASED", "CAPPED", "PAIRED"])
def test_a_loss_without_scale_tests_itself(file: Path, name: str) -> None:
    result = package(file, name).selftest()
    assert result["ok"], result


def test_a_diagonal_loss_takes_as_many_keys_as_queries(file: Path) -> None:
    """Also one that has no statistics of the keys."""
    with pytest.raises(InputError, match=r"keys: .* pairs query i with key i"):
        package(file, "PAIRED", keys=131)
    paired = package(file, "PAIRED")
    q = torch.randn(5, 8)
    for call in (paired.contrastive_loss, paired.loss_and_grads, paired.reference):
        with pytest.raises(ValueError, match="5 queries and 6 keys"):
            call(q, torch.randn(6, 8))


def test_a_light_loss_keeps_its_gradient_in_fp16(file: Path) -> None:
    """Gradients of logits are stored times a power of two that brings the largest of them near fp16's."""
    problem = make_problem(loss=f"{file}:LIGHT", batch_size=4096, dim=64, dtype="fp16", device_profile="h200")
    derivation = derive(load_loss(problem.loss))
    planned = plan(problem, derivation, resolve_cluster(problem))
    exponent = gradient_exponent(planned, derivation)
    assert 2**13 < 2e-6 * 2.0**exponent <= 2**15
