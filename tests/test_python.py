"""What Python callers see: keywords in signatures, and errors that name keywords and not flags."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import infcl_gen
from infcl_gen import cli
from infcl_gen.errors import InputError, in_python_words
from infcl_gen.inputs.flags import Flags
from infcl_gen.inputs.problem import Problem, make_problem

FUNCTIONS = (infcl_gen.plan, infcl_gen.simulate, infcl_gen.generate, infcl_gen.load)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_signatures_list_the_flags_of_a_problem(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {"loss", "batch_size", "dim", "keys", "devices", "memory_budget", "set", "cluster"} <= parameters.keys()
    assert set(Flags.__annotations__) <= parameters.keys() and "flags" not in parameters
    assert str(parameters["batch_size"]) == "batch_size: int | str = None"
    assert function.__doc__ and "Problem" in function.__doc__ and function.__name__ in repr(function)


def test_there_is_a_keyword_for_each_flag_and_each_is_taken() -> None:
    fields = {field.name for field in dataclasses.fields(Problem)} - {"memory_budget_bytes", "settings", "links"}
    assert set(Flags.__annotations__) == fields | {"memory_budget", "set", "cluster"} == set(cli.options.PROBLEM)
    with pytest.raises(InputError, match="--batches: unknown option"):
        make_problem(batches=3)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": -1}, "batch_size: -1 is out of range"),
    ({"batch_sizes": 8}, "batch_sizes: unknown option"),
    ({"memory_budget": "2 GX"}, "memory_budget: '2 GX' is not a size"),
    ({"precision": "tf32", "dtype": "bf16"}, "precision: tf32 is for dtype fp32, not bf16"),
    ({"nodes": 3, "devices": 4}, "devices (the total) must be a multiple of nodes"),
    ({"device_profile": "nonsense"}, "device_profile"),
    ({"loss": "nonsense"}, "loss"),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_errors_name_keywords(function: Callable[..., Any], flags: dict[str, Any], words: str) -> None:
    output = {"output": "p"} if function is infcl_gen.generate else {}
    with pytest.raises(InputError) as caught:
        function(**{"batch_size": 8, "dim": 8, "target": "cpu"} | flags | output)
    assert words in str(caught.value) and "--" not in str(caught.value)


def test_errors_of_the_loss_without_sizes_name_keywords() -> None:
    q = torch.randn(4, 8)
    for flags in ({"memory_budget": "2 GX"}, {"memory_budget": "1KiB"}, {"loss": "nonsense"}):
        with pytest.raises(infcl_gen.InfclError, match=next(iter(flags)).partition("_")[0]) as caught:
            infcl_gen.ContrastiveLoss(**flags)(q, q, 1.0)
        assert "--" not in str(caught.value)


def test_the_command_line_names_flags_and_commands_keep_theirs() -> None:
    done = CliRunner().invoke(cli.main, ["plan", "--batch-size=-1", "--dim=8"])
    assert done.exit_code == 2 and "--batch-size: " in done.stderr
    with pytest.raises(InputError, match=r"^dim: take infcl-gen plan --dim 8; or batch_size$"), in_python_words():
        raise InputError("--dim: take infcl-gen plan --dim 8; or --batch-size")
