"""Triton's interpreter in a fraction of its time: most of it goes into Python that finds the same answers again.

What a function of the language does depends on the types of its tensors and on its other arguments, as in a compiler:
so its first call records what it asks of the interpreter's builder, and later ones do that alone (`Recorded`).
What is left out computes nothing that is used. Results are the same to the bit, but for conversions to bf16. These
round, as GPUs do; Triton's own cut numbers off, and get subnormal ones wrong.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import TensorHandle

BUILDER: Any = interpreter.interpreter_builder
SEMANTIC: Any = interpreter.interpreter_semantic


# ---------------------------------------------------------------------------------------------- keys of calls


class Code:
    """Of all tensors of a type: compared by identity."""


codes: dict[Any, Code] = {}


def code_of(value: Any) -> Code:
    """By all that is known of a tensor but its numbers."""
    known: Code | None = value.__dict__.get("code")
    if known is None:
        handle = value.handle
        seen = (str(value.type), str(handle.dtype), handle.data.dtype.char, handle.data.shape)
        known = value.code = codes.setdefault(seen, Code())
    return known


class Unknown(Exception):
    """An argument that makes no key."""


def key_of(value: Any, given: list[Any]) -> Any:
    """`given`: gets the tensors."""
    kind = type(value)
    if kind is tl.tensor:
        given.append(value)
        return value.__dict__.get("code") or code_of(value)
    if value is None or kind is str:
        return value
    if kind in (int, float, bool):
        return kind, value
    if kind is tl.constexpr:
        return kind, key_of(value.value, given)
    if kind is tl.dtype:
        return kind, value.name
    if kind is slice:
        return kind, value.start, value.stop, value.step
    if kind in (tuple, list, tl.tuple):
        return kind, *[key_of(each, given) for each in value]
    raise Unknown


# ---------------------------------------------------------------------------------------------- recording


def handle(data: Any, dtype: Any) -> Any:
    """A TensorHandle, of a type that its recording has found right."""
    made = object.__new__(TensorHandle)
    made.data, made.dtype, made.attr = data, dtype, {}
    return made


class Spy:
    """Finds which NumPy function a method of the builder hands to which of its general ones."""

    def __getattr__(self, how: str) -> Any:
        return lambda *arguments: (how, arguments)


@functools.cache
def general(name: str) -> tuple[str, Any]:
    """("binary_op", np.add) of "create_fadd", and ("", None) of methods with code of their own."""
    method = getattr(interpreter.InterpreterBuilder, name)
    try:
        how, arguments = method(Spy(), *[None] * (len(inspect.signature(method).parameters) - 1))
    except Exception:  # a method that does more than hand on fails in its own way, and is called as it is
        return "", None
    return (how, arguments[-1]) if how in ("binary_op", "unary_op", "ternary_op", "cast_impl") else ("", None)


@dataclasses.dataclass
class Step:
    """A call of the builder. Handles have numbers: first those given, then those that were made."""

    name: str
    arguments: tuple[Any, ...]
    result: Any
    takes: list[int]

    @property
    def broadcasts(self) -> bool:
        """Whether its NumPy function does so by itself."""
        return general(self.name)[0] in ("binary_op", "ternary_op") or self.name == "create_addptr"

    def again(self) -> Callable[..., Any]:
        """What gives the same, of other handles of the same types."""
        how, function = general(self.name)
        kind = getattr(self.result, "dtype", None)
        if how == "unary_op":
            return lambda x: handle(function(x.data), kind)
        if how in ("binary_op", "ternary_op"):
            wide = self.result.data.dtype
            if function(*(each.data.reshape(-1)[:1] for each in self.arguments)).dtype != wide:
                return lambda *xs: handle(function(*[x.data for x in xs]).astype(wide), kind)
            if how == "ternary_op":
                return lambda x, y, z: handle(function(x.data, y.data, z.data), kind)
            return lambda x, y: handle(function(x.data, y.data), kind)
        if how == "cast_impl" and tl.bfloat16 not in (self.arguments[0].dtype.scalar, self.arguments[1].scalar):
            wide = self.result.data.dtype
            return lambda x: handle(x.data.astype(wide), kind)
        if self.name == "create_expand_dims":
            index = (*[slice(None)] * self.arguments[1], None)
            return lambda x: handle(x.data[index], kind)
        method, (places, rest) = getattr(BUILDER, self.name), self._places()
        if places == list(range(len(places))):
            return lambda *handles: method(*handles, *rest)
        return lambda *handles: method(*placed(self.arguments, iter(handles)))

    def _places(self) -> tuple[list[int], tuple[Any, ...]]:
        """Where handles are among the arguments, if all are on their own, and what follows them."""
        places = [place for place, each in enumerate(self.arguments) if isinstance(each, TensorHandle)]
        return (places if len(places) == len(self.takes) else [-1]), self.arguments[len(places) :]


def placed(arguments: Any, handles: Iterator[Any]) -> Any:
    """The arguments with other handles, also in lists."""
    if isinstance(arguments, (list, tuple)):
        return [placed(each, handles) for each in arguments]
    return next(handles) if isinstance(arguments, TensorHandle) else arguments


def handles_in(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in handles_in(each)]
    return [value] if isinstance(value, TensorHandle) else []


class Recorder:
    """Stands for the builder while a function runs for the first time with arguments of such types."""

    def __init__(self, given: list[Any]) -> None:
        self.numbers = {id(each.handle): number for number, each in enumerate(given)}
        self.kept = [each.handle for each in given]  # by number, so that no other object gets its id
        self.steps: list[Step] = []
        self.constants: dict[int, Any] = {}
        self.makers: dict[int, Step] = {}
        self.distinct = len(self.numbers) == len(given)  # or it would not be known which of them a step takes
        self.valid = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(BUILDER, name)
        return functools.partial(self._call, name, found) if inspect.ismethod(found) else found

    def _call(self, name: str, method: Any, *arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        if isinstance(result, tl.dtype):
            return result
        found = handles_in(arguments)
        # A step whose handles come from elsewhere is not known.
        self.valid &= not options and all(id(each) in self.numbers for each in found)
        step = Step(name, arguments, result, [self.numbers.get(id(each), 0) for each in found])
        number = len(self.kept)
        for each in result if isinstance(result, tuple) else (result,):
            self.numbers[id(each)] = len(self.kept)
            self.kept.append(each)
        if name.startswith("get_"):
            self.constants[number] = result
        else:
            self.steps.append(step)
            self.makers[number] = step
        return result

    def recorded(self, given: list[Any], result: Any) -> Recorded | None:
        """Nothing of what depends on more than types, or gives more than a tensor."""
        known = result is None or (type(result) is tl.tensor and id(result.handle) in self.numbers)
        return Recorded(self, given, result) if self.valid and known else None

    def simplified(self, last: int | None) -> list[tuple[Step, list[int]]]:
        """What was called and where its results go, without blocks of one number, or of one row, that NumPy makes out
        of it by itself. `last`: the number of the result."""
        for step in self.steps:
            if step.broadcasts:
                takes = [self._narrow(number) for number in step.takes]
                shapes = [self.kept[number].data.shape for number in takes]
                if np.broadcast_shapes(*shapes) == step.result.data.shape:
                    step.takes = takes
        used, steps = {last}, []
        for number, step in reversed(self.makers.items()):
            numbers = range(number, number + (len(step.result) if isinstance(step.result, tuple) else 1))
            if step.name not in ("create_splat", "create_broadcast") or used & {*numbers}:
                steps.append((step, [*numbers]))
                used |= {*step.takes}
        return steps[::-1]

    def _narrow(self, number: int) -> int:
        """The number or row of which a block is made."""
        maker = self.makers.get(number)
        if maker is None or maker.name not in ("create_splat", "create_broadcast"):
            return number
        same = self.kept[maker.takes[0]].data.dtype == maker.result.data.dtype
        return maker.takes[0] if same else number


class Recorded:
    """What a function does with arguments of certain types."""

    def __init__(self, recorder: Recorder, given: list[Any], result: Any) -> None:
        self.same = next((number for number, each in enumerate(given) if each is result), None)
        self.template: dict[str, Any] | None = None
        self.last = None
        if isinstance(result, tl.tensor):
            self.last = recorder.numbers[id(result.handle)]
            if result.handle is not None:  # as of a store
                code_of(result)
            self.template = {name: value for name, value in result.__dict__.items() if name != "handle"}
        steps = recorder.simplified(self.last)
        self.start = [None] * len(recorder.kept)
        for number, constant in recorder.constants.items():
            self.start[number] = constant
        self.given = len(given)
        self.steps = [(step.again(), step.takes, gives) for step, gives in steps]
        # The common case: one step.
        self.only, self.sources = None, []
        if len(steps) == 1 and self.last == steps[0][1][0] and not isinstance(steps[0][0].result, tuple):
            self.only = self.steps[0][0]
            self.sources = [(number, recorder.constants.get(number)) for number in steps[0][0].takes]

    def __call__(self, given: list[Any]) -> Any:
        if self.same is not None:
            return given[self.same]
        if self.only is not None:
            found = self.only(*[given[number].handle if known is None else known for number, known in self.sources])
        else:
            handles = self.start.copy()
            handles[: self.given] = [each.handle for each in given]
            for step, takes, gives in self.steps:
                made = step(*[handles[number] for number in takes])
                if len(gives) == 1:
                    handles[gives[0]] = made
                else:
                    handles[gives[0] : gives[-1] + 1] = made
            if self.template is None:
                return None
            found = handles[self.last]
        result = object.__new__(tl.tensor)
        result.__dict__ = {**self.template, "handle": found}
        return result


missing: Any = object()
recording: list[Recorder] = []


def truth(self: Any) -> bool:
    """Of a tensor: of one number, what follows depends on more than types."""
    data = self.handle.data
    if data.size != 1:
        return True
    if recording:
        recording[0].valid = False
    return bool(data)


def index(self: Any) -> int:
    if recording:
        recording[0].valid = False
    return int(self.handle.data.squeeze())


@functools.cache
def interpreted(builtin: Any) -> Any:
    function = getattr(builtin, "__wrapped__", builtin)  # a wrapper only asks for `_semantic`

    records: dict[Any, Recorded | None] = {}

    def run(*arguments: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        if recording:  # a function that calls others is recorded as a whole
            return function(*arguments, **options, _semantic=SEMANTIC)
        key, given = [], []
        try:
            for each in arguments:
                if type(each) is tl.tensor:
                    given.append(each)
                    key.append(each.__dict__.get("code") or code_of(each))
                else:
                    key.append(key_of(each, given))
            for name, each in options.items():
                key += name, key_of(each, given)
        except Unknown:
            return function(*arguments, **options, _semantic=SEMANTIC)
        known = records.get(tuple(key), missing)
        if known is None:
            return function(*arguments, **options, _semantic=SEMANTIC)
        if known is not missing:
            return known(given)
        recorder = Recorder(given)
        SEMANTIC.builder = recorder
        recording.append(recorder)
        try:
            result = function(*arguments, **options, _semantic=SEMANTIC)
        finally:
            recording.clear()
            SEMANTIC.builder = BUILDER
        if not given or recorder.distinct:
            records[tuple(key)] = recorder.recorded(given, result)
        return result

    return run


# ---------------------------------------------------------------------------------------------- what is put in place


def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    for name, member in inspect.getmembers(module):
        if tl.core.is_builtin(member):
            scope.set_attr(module, name, interpreted(member))


class Scope(interpreter._LangPatchScope):
    """The interpreter's functions are in place of the language's: for good, and not for each launch anew."""

    kept: Scope | None = None

    def restore(self) -> None:
        pass

    def end(self) -> None:
        super().restore()
        Scope.kept = None


class Everything:
    """A function that sees all of the language."""

    __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012


patch_all = interpreter._patch_lang


def patch_language(function: Any) -> Scope:
    if Scope.kept is None:
        with unittest.mock.patch.object(interpreter, "_LangPatchScope", Scope):
            Scope.kept = patch_all(Everything)
        Scope.kept.set_attr(tl.tensor, "__bool__", truth)
        Scope.kept.set_attr(tl.tensor, "__index__", index)
    return Scope.kept


def call(self: Any, *arguments: Any, **options: Any) -> Any:
    """A device function."""
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


class Transformer(interpreter.ASTTransformer):
    """That knows where its new nodes are, and need not look for it in the whole function."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        value, node = node.value, super().visit_Assign(node)
        made: Any = node.value
        for each in (made, made.func, made.func.value, made.args[1]):
            ast.copy_location(each, value)
        return node


FUNCTION = re.compile(r"^def (\w+)\(.*?(?=^[^\s)]|\Z)", re.DOTALL | re.MULTILINE)


@functools.cache
def functions(file: str, changed: int) -> dict[str, tuple[str, int]]:
    """Text and first line of the functions of a file, which is read once for all of them."""
    text = Path(file).read_text()
    return {found[1]: (found[0], text.count("\n", 0, found.start()) + 1) for found in FUNCTION.finditer(text)}


@functools.cache
def compiled(text: str) -> CodeType:
    """A function's definition without its decorators, once for all packages that have it."""
    code = compile(Transformer().visit(ast.parse(text)), "", "exec")
    (found,) = (each for each in code.co_consts if isinstance(each, CodeType))
    return found


def rewritten(self: Any) -> Any:
    file = self.filename = self.fn.__code__.co_filename
    text, line = functions(file, Path(file).stat().st_mtime_ns)[self.fn.__name__]
    code = compiled(text).replace(co_filename=file, co_firstlineno=line)
    names = self.fn.__globals__
    for name, value in vars(interpreter).items():
        names.setdefault(name, value)
    made = FunctionType(code, names, self.fn.__name__, self.fn.__defaults__)
    made.__annotations__ = self.fn.__annotations__
    return made


def arguments_of(function: Any, *given: Any, **named: Any) -> dict[str, Any]:
    """`inspect.getcallargs` of a kernel, whose call complains of what is missing."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    default = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(default) :], default, strict=True))
    return found | dict(zip(names, given, strict=False)) | named


INSPECT = SimpleNamespace(**vars(inspect))
INSPECT.getfullargspec, INSPECT.getcallargs = functools.cache(inspect.getfullargspec), arguments_of
make_tensor = interpreter._implicit_cvt
like: dict[Any, tl.tensor] = {}  # an argument of each type


def argument(value: Any) -> Any:
    """A kernel's argument as a tensor of one number, or of an address."""
    if type(value) is int and -(2**31) <= value < 2**31:
        kind, number = "i32", np.array([value], np.int32)
    elif isinstance(value, torch.Tensor):
        kind, number = value.dtype, np.array([value.data_ptr()], np.uint64)
    else:
        return make_tensor(value)
    if kind not in like:
        like[kind] = make_tensor(value)
        code_of(like[kind])
    made = object.__new__(tl.tensor)
    made.__dict__ = {**like[kind].__dict__, "handle": handle(number, like[kind].type)}
    return made


find_np_dtype = interpreter._get_np_dtype
np_dtypes: dict[str, Any] = {}


def np_dtype(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = find_np_dtype(kind.scalar)
    return np_dtypes[name]


convert_any = interpreter._convert_float


def rounded(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """bf16 is the upper half of fp32. Triton's interpreter cuts the lower one off; here it is rounded, as by GPUs."""
    if rounding is not None or (source, target) != (tl.float32, tl.bfloat16):
        return convert_any(x, source, target, rounding)
    bits = x.view(np.uint32)
    to_even = (bits >> 16 & 1) + np.uint32(0x7FFF)
    return np.where(np.isnan(x), bits >> 16 | 0x40, bits + to_even >> 16).astype(np.uint16)


def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """`rounded`, and faster from bf16."""
    if rounding is None and (source, target) == (tl.bfloat16, tl.float32):
        return x.view(np.uint16).astype(np.uint32) << 16
    return rounded(x, source, target, rounding)


FAST: list[tuple[Any, str, Any]] = [
    # Each sum and product of int32 is computed in int64, too, for assertions that without `debug` are dropped.
    (BUILDER, "options", dataclasses.replace(BUILDER.options, sanitize_overflow=BUILDER.options.debug)),
    (interpreter, "_patch_builtin", patch_builtin),
    (interpreter, "_patch_lang", patch_language),
    (interpreter.InterpretedFunction, "__call__", call),
    (interpreter.FunctionRewriter, "rewrite_ast", rewritten),
    (interpreter, "inspect", INSPECT),
    (interpreter, "_implicit_cvt", argument),
    (interpreter, "_get_np_dtype", np_dtype),
    (interpreter, "_convert_float", convert),
]
# That of Triton, which rounds.
ORIGINAL = [(owner, name, rounded if new is convert else getattr(owner, name)) for owner, name, new in FAST]


def put(attributes: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)
    if Scope.kept is not None:
        Scope.kept.end()
    interpreter.InterpretedFunction.rewritten_fn.clear()


def accelerate() -> None:
    """For this process, in which TRITON_INTERPRET was 1 as triton was imported."""
    put(FAST)
