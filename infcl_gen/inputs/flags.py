"""The flags of a problem as keywords of Python functions, for editors and for `inspect.signature`."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, get_type_hints

from infcl_gen.errors import in_python_words
from infcl_gen.inputs.problem import Formula

F = TypeVar("F", bound=Callable[..., Any])


class Flags(TypedDict, total=False):
    """What `make_problem` takes; sizes are global, budgets per device. `batch_size` and `dim` are required."""

    loss: str | os.PathLike[str] | Formula  # a built-in loss, FILE.py:NAME, or a LossSpec
    batch_size: int | str  # 65536, "64k"
    keys: int | str | None
    dim: int
    devices: int
    nodes: int
    memory_budget: int | str  # bytes, "1GiB", "auto"
    dtype: str  # "bf16", "fp16", "fp32", "fp64"
    precision: str  # "default", "tf32", "exact"
    frozen: str  # the side that needs no gradient: "none", "query", "key"
    prefixes: str | list[int] | Mapping[int, float]  # first columns of the features: a loss of each, added up
    renormalise: bool  # similarities of a prefix are cosines of its columns
    negatives: int | str  # of each query, or of each pair of rows, of a loss that has them
    target: str  # "auto", "cpu", "cuda", "rocm"
    device_profile: str | os.PathLike[str]
    cluster: str | os.PathLike[str] | Mapping[str, Any]
    set: Mapping[str, Any] | list[str]  # choices of the planner


def python_function(function: F) -> F:
    """Lists the `Flags` in the signature of a function that takes them as **flags; its errors name keywords."""
    shown = inspect.signature(function)
    kept = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in get_type_hints(Flags).items()
    ]
    wrapped: Any = functools.wraps(function)(in_python_words()(function))
    wrapped.__signature__ = shown.replace(parameters=[*kept, *named])
    return wrapped  # type: ignore[no-any-return]
