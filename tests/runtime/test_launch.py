"""How kernels start, under the installed Triton and without a GPU: what its launchers are given."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from infcl_gen.runtime import launch, warmup
from infcl_gen.runtime.launch import descriptor, descriptor_legal, library_legal, operands, strip_blocks
from infcl_gen.runtime.warmup import key_functions

pytest.importorskip("triton")


@dataclasses.dataclass
class Compiled:
    """What Triton gives for a kernel that it has compiled, and keeps what it is launched with."""

    function: str = "function"
    packed_metadata: str = "metadata"
    runs: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    through_triton: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def run(self, *given: Any) -> None:
        self.runs.append(given)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.through_triton.append((grid, *given))


class Kernel:
    def __init__(self, *arg_names: str) -> None:
        self.arg_names = [*(arg_names or ("x", "k", "n", "MASKED", "WIDEN"))]
        self.compiled: list[Compiled] = []
        self.given: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_start(**given: Any) -> Compiled:
            assert threading.get_ident() in Event.recorded, "a thread without a context"
            self.given.append(tuple(given[name] for name in self.arg_names[:3]))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile_and_start


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7 + device, raising=False)
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.recorded.clear()
    yield


class Event:
    """One of CUDA's, which a thread that records it has a context for."""

    recorded: ClassVar[list[int]] = []  # by which thread

    def record(self) -> None:
        self.recorded.append(threading.get_ident())


OPTIONS = {"WIDEN": False, "MASKED": True, "num_warps": 4}


def begin(kernel: Kernel, x: Any, k: Any, n: Any, grid: tuple[int, ...] = (5,), **options: Any) -> None:
    launch.launch(kernel, grid, x=x, k=k, n=n, **OPTIONS | options)


def test_the_second_launch_takes_addresses_and_calls_nobody() -> None:
    kernel, x, k = Kernel(), torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        begin(kernel, x, k, 48)
    (compiled,) = kernel.compiled
    assert kernel.given == [(x, k, 48)] and not compiled.through_triton
    constants = (True, False)  # in the order of the kernel's arguments
    start = ((5, 1, 1), 7, "function", "metadata", None, None, None)
    wanted = (*start[0], *start[1:], x.data_ptr(), k.data_ptr(), 48, *constants)
    assert compiled.runs == [wanted] * 2


def test_a_thread_has_a_context_before_its_first_launch_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the backward of `distill` began with a tensor map, in a thread of autograd without a context."""
    kernel, x = Kernel(), torch.zeros(64)

    def twice() -> None:
        for _ in range(2):
            begin(kernel, x, x, 48)

    twice()
    other = threading.Thread(target=twice)
    other.start()
    other.join()
    for device in (1, 0):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
        twice()
    assert Event.recorded == [(own := threading.get_ident()), other.ident, own]
    assert len(kernel.compiled) == 2 and sum(len(each.runs) for each in kernel.compiled) == 6


def test_arguments_by_name_may_come_in_any_order() -> None:
    kernel, x, k = Kernel(), torch.zeros(64), torch.zeros(64)
    begin(kernel, x, k, 48)
    launch.launch(kernel, (5,), n=48, k=k, **OPTIONS, x=x)
    (compiled,) = kernel.compiled
    assert compiled.runs[0][-5:] == (x.data_ptr(), k.data_ptr(), 48, True, False)


def test_a_constant_before_other_arguments_is_refused() -> None:
    """The launcher goes by the place. Planted: constants taken on trust, so that `n` would be read as MASKED."""
    with pytest.raises(
        AssertionError, match=r"constants must come last: \['x', 'k', 'n'\], then \['MASKED', 'WIDEN'\]"
    ):
        begin(Kernel("x", "k", "MASKED", "n", "WIDEN"), torch.zeros(64), torch.zeros(64), 48)


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(64, dtype=torch.float64), 48, 32),
        (torch.zeros(65)[1:], 48, 32),
        (torch.zeros(66)[2:], 48, 32),
        (torch.zeros(64), 1, 47),
        (torch.zeros(64), 47, 48),
        (torch.zeros(64), 1 << 36, 48),
        (torch.zeros(64), 1 << 31, (1 << 31) - 48),
        (torch.zeros(64), -(1 << 31) - 16, -(1 << 31)),
        (torch.zeros(64), -(1 << 36), 48),
        (torch.zeros(64), 48.0, 48),
    ],
    ids=[
        "dtype",
        "alignment",
        "alignment to 8 bytes",
        "one",
        "divisibility",
        "wide",
        "wide and negative",
        "just wide",
        "just wide and negative",
        "float",
    ],
)
def test_what_triton_specialises_on_is_compiled_anew(other: tuple[Any, Any, int]) -> None:
    kernel, k = Kernel(), torch.zeros(64)
    x, n, before = other
    begin(kernel, torch.zeros(64), k, before)
    begin(kernel, torch.zeros(32), k, before + 32)
    assert len(kernel.compiled) == 1, "alike"
    begin(kernel, x, k, n)
    assert len(kernel.compiled) == 2


def test_options_and_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    begin(kernel, x, x, 48)
    begin(kernel, x, x, 48, MASKED=False)
    other = Kernel()
    begin(other, x, x, 48)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    for _ in range(2):
        begin(kernel, x, x, 48)
    assert len(kernel.compiled) == 3 and len(other.compiled) == 1
    assert kernel.compiled[-1].runs[0][3] == 8, "that of the device"


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_profilers_hook_goes_through_triton(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(2):
        begin(kernel, x, x, 48, grid=(5, 2))
    (compiled,) = kernel.compiled
    if plain:  # as older profilers set it
        monkeypatch.setattr(knobs.runtime, name, print)
    else:
        monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    begin(kernel, x, x, 48, grid=(5, 2))
    assert len(compiled.runs) == 1
    assert compiled.through_triton == [((5, 2, 1), x.data_ptr(), x.data_ptr(), 48, True, False)]


def test_a_descriptor_is_compiled_for_as_tritons_own() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel, x = Kernel(), torch.zeros(64, 32, dtype=torch.bfloat16)
    q_side, k_side, legal = operands(x, [16, 32], x, [32, 32], True)
    assert legal
    for _ in range(2):
        begin(kernel, q_side.source, k_side.source, 48)
    assert kernel.given == [(TensorDescriptor.from_tensor(x, [16, 32]), TensorDescriptor.from_tensor(x, [32, 32]), 48)]
    assert kernel.compiled[0].runs[0][-5:-2] == (q_side.source, k_side.source, 48)


def test_a_descriptor_has_what_this_tritons_launchers_read() -> None:
    from triton.backends.nvidia import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    ours, theirs = descriptor(x, [16, 32]), TensorDescriptor.from_tensor(x, [16, 32])
    assert type(ours) is TensorDescriptor and ours == theirs
    plain, given = (driver.make_tensordesc_arg(one, None) for one in (theirs, ours))
    assert plain[0] is given[0] and plain[1:] == given[1:]


@pytest.mark.parametrize(
    ("arch", "gluon", "there"),
    [
        ("sm_90", "", True),
        ("sm_90", "language:nothing.here", False),
        ("sm_90", "nothing:here", False),
        ("sm_90", "language.nvidia.hopper:tma.async_copy_global_to_shared", True),
        ("sm_100", "", False),
    ],
)
def test_where_variants_run(arch: str, gluon: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On their own architecture, in Gluon if this Triton knows the name; in the interpreter if they are not Gluon's."""
    decide = launch.runs_variant.__wrapped__
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert decide(torch.device("cuda"), arch, gluon) == there
    assert not decide(torch.device("cpu"), arch, gluon)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert decide(torch.device("cpu"), arch, gluon) == (not gluon)


def test_what_the_matrix_library_takes_in_place() -> None:
    """Planted: rows that overlap, of which torch would make a copy beside the plan."""
    memory = torch.zeros(400)

    def legal(stride: int, depth_stride: int = 1) -> set[bool]:
        """Of such rows on a GPU, and of their transpose."""
        x = memory.as_strided((8, 16), (stride, depth_stride))
        both = (types.SimpleNamespace(is_cuda=True, shape=each.shape, stride=each.stride) for each in (x, x.T))
        return {library_legal(each) for each in both}  # type: ignore[arg-type]

    assert legal(16) == legal(24) == {True}
    assert legal(15) == legal(0) == legal(40, 2) == {False}


def test_what_a_descriptor_addresses() -> None:
    """Planted: a base that is not aligned to 16 bytes."""
    memory = torch.zeros(400, dtype=torch.bfloat16)

    def rows(stride: int, start: int = 0, depth_stride: int = 1, count: int = 8) -> torch.Tensor:
        return memory.as_strided((count, 16), (stride, depth_stride), start)

    for legal in (rows(16), rows(24), rows(16, start=8)):
        assert descriptor_legal(legal)
    for illegal in (rows(16, start=1), rows(20), rows(0), rows(40, depth_stride=2), rows(16, count=0)):
        assert not descriptor_legal(illegal)


def test_what_a_matrix_product_reads_in_place() -> None:
    x = torch.zeros(64, 32)
    for one in (x, x.T, x[:, :16], x[::2], x[:1]):
        assert launch.read_in_place(one) and not launch.library_legal(one), one.stride()
    for one in (x[:1].expand(64, 32), x[:, ::2], x.as_strided((8, 8), (4, 1))):
        assert not launch.read_in_place(one), one.stride()


def test_no_block_of_keys_gets_more_strips_than_there_is_room_for() -> None:
    """Planted: the shortest strip rounded down, whose partial sums are written out of bounds."""
    for row_blocks in range(1, 70):
        for most in (1, 2, 3, 7, 64):
            for key_blocks, programs in ((1, 1), (5, 132), (64, 264)):
                strip = strip_blocks(row_blocks, key_blocks, most, programs)
                assert 1 <= strip <= row_blocks and -(-row_blocks // strip) <= most


def test_the_longest_kernel_is_compiled_first_and_tritons_library_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads build launchers, and one thread loads them. Planted: kernels in the order of their launches; the hash, or
    the loading, left to the threads."""
    done: list[tuple[str, bool]] = []

    class Kernel:
        def __init__(self, src: str) -> None:
            self.src, self.fn, self.device_caches = src, types.FunctionType((lambda: None).__code__, {}), {0: None}

        def warmup(self, grid: object, **given: object) -> Any:
            return Compiled(f"{self.src} {given['WIDE']}")

    class Compiled:
        metadata = None

        def __init__(self, src: str) -> None:
            self.src = src
            record(src)

        @property
        def run(self) -> None:
            record(f"load {self.src}")

    def record(what: str) -> None:
        done.append((what, threading.current_thread() is threading.main_thread()))

    active = types.SimpleNamespace(get_current_device=lambda: 0)
    active.launcher_cls = lambda src, metadata: record(f"build {src}")
    monkeypatch.setattr("triton.runtime.driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: record("key"))
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    short, long = Kernel("short"), Kernel("the longest")
    launches = [launch.Launch(each, (1,), {"WIDE": wide}) for wide in (1, 2) for each in (short, long)]
    warmup._compile(launches, torch.device("cuda"))
    kernels = [f"{each} {wide}" for each in ("the longest", "short") for wide in (1, 2)]
    threads = [(f"{step}{kernel}", False) for kernel in kernels for step in ("", "build ")]
    assert done == [("key", True), *threads, *((f"load {kernel}", True) for kernel in kernels)]


@pytest.mark.parametrize("of", ["pairs", "triangle"])
def test_a_later_call_that_leaves_the_diagonal_is_rehearsed(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the first call of one panel counts for larger ones, for those of a group, or for other gradients."""

    class OnGpu(list[int]):
        is_cuda, device = True, torch.device("cuda", 0)

    compiled = list[tuple[int, str, int]]()
    monkeypatch.setattr(warmup, "_done", set())
    monkeypatch.setattr(
        warmup, "rehearsed", lambda _, call, wanted: compiled.append((len(call.q), call.options.group_name, wanted))
    )
    monkeypatch.setattr(warmup, "_compile", lambda launches, device: None)
    monkeypatch.setattr(warmup.replay, "capturing", lambda device: False)
    monkeypatch.setattr(warmup, "find_group", lambda name: name or None)
    panels = {"PANEL_ROWS": 8, "PANEL_KEYS": 8, "FORWARD_ROWS": 16, "FORWARD_KEYS": 16}
    traits = types.SimpleNamespace(**{"pairs": False, "triangle": False, of: True})
    schedule = types.SimpleNamespace(**panels)
    package: Any = types.SimpleNamespace(digest="d", any_device=False, traits=traits, schedule=schedule)
    for rows, group, wanted in [(8, "", 3), (6, "", 3), (9, "", 3), (20, "", 3), (8, "", 3), (20, "g", 3), (8, "g", 0),
                                (8, "", 0), (8, "", 2), (8, "g", 2)]:  # fmt: skip
        x = OnGpu(range(rows))
        call: Any = types.SimpleNamespace(q=x, k=x, options=types.SimpleNamespace(group_name=group))
        warmup.warm_up(package, call, wanted)
    assert compiled == [(8, "", 3), (9, "", 3), (8, "g", 0), (8, "", 2), (8, "g", 2)]


def test_keys_of_kernels_do_not_depend_on_which_thread_is_first() -> None:
    """Else a second process compiles again. Planted: kernels asked for their keys without an order."""
    from triton.runtime.jit import JITFunction

    path = Path(__file__).parents[2] / "generated" / "clip_h200_d768" / "kernels.py"

    def keys(ordered: bool, reverse: bool) -> dict[str, str]:
        spec = importlib.util.spec_from_file_location("infcl_kernels_of_a_process", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if ordered:
            key_functions(vars(module))
        kernels = [name for name, value in vars(module).items() if isinstance(value, JITFunction)]
        return {name: getattr(module, name).cache_key for name in sorted(kernels, reverse=reverse)}

    assert keys(ordered=True, reverse=True) == keys(ordered=True, reverse=False)
    assert keys(ordered=False, reverse=True) != keys(ordered=False, reverse=False)
