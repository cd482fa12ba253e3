"""Imports of generated packages in less time: they have one runtime, which is compiled once."""

from __future__ import annotations

import _imp
import collections
import dataclasses
import functools
import inspect
import marshal
import sys
import typing
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import infcl_gen.runtime

RUNTIME = Path(str(infcl_gen.runtime.__file__)).parent
compile_source = SourceFileLoader.source_to_code


@functools.cache
def compiled(source: bytes) -> bytes:
    return marshal.dumps(compile(source, "", "exec", dont_inherit=True))


def source_to_code(self: Any, data: bytes, path: str, **options: Any) -> Any:
    """That of a package's runtime is known, unless a test has edited it."""
    if Path(path).parent.name != "_runtime":
        return compile_source(self, data, path, **options)
    code = marshal.loads(compiled(data))
    _imp._fix_co_filename(code, path)  # as is done with what __pycache__ holds
    return code


@functools.cache
def known(text: str, mode: str) -> CodeType:
    """What dataclasses, named tuples and annotations are made of: the same texts in each package, 20 % of an import."""
    return compile(text, "<string>", mode)


def executed(text: str, *names: Any) -> None:
    exec(known(text, "exec"), *names)


def evaluated(text: str, *names: Any) -> Any:
    return eval(known(text, "eval"), *names)


def source_of(stacklevel: int) -> str:
    """Where an operator was registered, for errors. torch's own also searches all modules for the line's text."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of(frame: Any) -> ModuleType | None:
    """`inspect.getmodule` of a frame, without a search of all modules for its file."""
    return sys.modules.get(frame.f_globals["__name__"])


def quicken() -> None:
    """In this process, and in those that are forked from it later."""
    for file in RUNTIME.glob("*.py"):
        compiled(file.read_bytes())
    SourceFileLoader.source_to_code = source_to_code
    vars(dataclasses)["exec"], vars(collections)["eval"] = executed, evaluated
    vars(typing)["compile"] = lambda text, _, mode: known(text, mode)
    if "torch" in sys.modules:
        import torch._library.utils

        torch._library.utils.get_source = source_of
        torch.library.inspect = SimpleNamespace(**{**vars(inspect), "getmodule": module_of})
