"""What a process of the test ring does: it takes jobs from a pipe and answers with results or the error it met.

Jobs are the functions below; all processes of a group get the same job at the same time. Uninitialised memory is
filled with NaN throughout, so that reading past the valid rows of a buffer shows.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import inspect
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from infcl_gen.verification.properties import Case, Inputs, autograd_results, inputs_of
from tests.verification.dense import dense_loss

HIDDEN = 5
GROUPS = (
    (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3), (3, 0, 2), (2, 3, 1, 0),
)  # fmt: skip
HANG_S = 50.0  # of one job; below what a test waits for an answer
BESIDE = "INFCL_TEST_CONTROL_BESIDE"  # in the environment: pretend that the group carries no host tensors
_groups: dict[tuple[int, ...], Any] = {}
_device = torch.device("cpu")


class Seat(NamedTuple):
    """What a process is told when it starts. It makes those of the groups that the world has the ranks for."""

    rank: int
    world: int
    port: int  # of the store
    folders: tuple[str, ...]  # where packages are imported from
    timeout_s: float
    backend: str
    environment: Mapping[str, str]
    groups: tuple[tuple[int, ...], ...]
    log: str  # the file that stderr goes to


def main(seat: Seat, pipe: Connection) -> None:
    global _device
    os.dup2(os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    # cuBLAS is repeatable only with a workspace of its own for each stream.
    os.environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **seat.environment})
    torch.set_num_threads(1)
    gpu = seat.backend == "nccl"
    # Here it is for the NaNs; on GPUs some operations of the reference have no deterministic version.
    torch.use_deterministic_algorithms(True, warn_only=gpu)
    if gpu:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # torch's watchdog ends processes by an abort
        _device = take_gpu(seat.rank, seat.world)
        torch.cuda.set_device(_device)
        square = torch.eye(2, dtype=torch.float64, device=_device)
        torch.cuda.synchronize(square.mm(square).device)  # what takes seconds, before a timeout counts
    sys.path[:0] = seat.folders
    timeout = datetime.timedelta(seconds=seat.timeout_s)
    store = dist.TCPStore("127.0.0.1", seat.port, is_master=False, timeout=timeout)
    dist.init_process_group(seat.backend, store=store, rank=seat.rank, world_size=seat.world, timeout=timeout)
    renew([ranks for ranks in seat.groups if max(ranks) < seat.world], seat.timeout_s)
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the test session has ended
            os._exit(1)
        if job is None:
            break
        name, arguments = job
        faulthandler.dump_traceback_later(HANG_S)  # into the log, which the test that waits shows
        try:
            pipe.send(("ok", globals()[name](**arguments)))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))
        faulthandler.cancel_dump_traceback_later()
    pipe.close()
    os._exit(0)  # destroy_process_group would wait for ranks that a test has killed


def take_gpu(rank: int, world: int) -> torch.device:
    """The GPU of an NCCL rank. Where ranks outnumber GPUs they share, and the environment makes NCCL take those that
    share one to be on different hosts: it refuses two ranks on one GPU of a host. Between hosts it uses sockets."""
    gpus = torch.cuda.device_count()
    if world > gpus:
        os.environ.update({"NCCL_HOSTID": f"host{rank // gpus}", "NCCL_SOCKET_IFNAME": "lo"})
    return torch.device("cuda", rank % gpus)


def renew(groups: list[tuple[int, ...]], timeout_s: float) -> None:
    """Makes groups of these ranks, in this order, instead of those there were: a failure leaves one broken. Every
    process must take part."""
    timeout = datetime.timedelta(seconds=timeout_s)
    # A thread of each group of gloo wakes up 100 times a second, or never sleeps where it has a message that nobody
    # takes: those of 80 tests took a core. What is pending in a group is waited for, up to its timeout; NCCL would wait
    # for ranks that are gone.
    for ranks in list(_groups) if _device.type == "cpu" else ():
        dist.destroy_process_group(_groups.pop(ranks))
    for ranks in groups:
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            _groups[ranks] = dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
        else:  # before torch 2.12: always in ascending order, unless it cannot sort
            with mock.patch.object(dist.distributed_c10d, "sorted", list, create=True):
                _groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank() in ranks:
            assert dist.get_process_group_ranks(_groups[ranks]) == list(ranks), "not in the order asked for"


def connect(ranks: tuple[int, ...], timeout_s: float) -> None:
    """Makes NCCL's connections to the neighbours in this group within another timeout than the group's own."""
    if _device.type == "cpu" or len(ranks) == 1:
        return
    group, rank, words = _groups[ranks], ranks.index(dist.get_rank()), torch.zeros(2, device=_device)
    backend = group._get_backend(_device)
    own_timeout = backend.options._timeout
    backend._set_default_timeout(datetime.timedelta(seconds=timeout_s))
    send = dist.P2POp(dist.isend, words[:1], ranks[(rank + 1) % len(ranks)], group)
    receive = dist.P2POp(dist.irecv, words[1:], ranks[rank - 1], group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    torch.cuda.synchronize(_device)
    backend._set_default_timeout(own_timeout)


def group_of(ranks: tuple[int, ...]) -> Any:
    """The group of these global ranks, in this order."""
    return _groups[ranks]


class Model(nn.Module):
    """Two linear encoders and learnable scalars: every kind of parameter that a wrapper averages."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.image, self.text = (
            nn.Parameter(torch.randn(HIDDEN, dim, generator=generator, dtype=torch.float64).to(dtype)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(-0.3, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        image, text = x @ self.image, (self.text.T @ y.T).T  # the second one is transposed in memory
        return image, text, self.log_scale.exp(), self.bias


class Unpacked(nn.Module):
    """A module that takes its arguments as one tuple, so that it can follow another in a Sequential."""

    def __init__(self, inner: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.inner, self.keywords = inner, keywords

    def forward(self, arguments: tuple[Any, ...]) -> Any:
        return self.inner(*arguments, **self.keywords)


def batch(
    rows: list[int], keys: list[int], labelled: bool | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The global batch: inputs of both encoders, and labels: drawn, or as labels="own" means them."""
    generator = torch.Generator().manual_seed(sum(rows))
    x, y = (torch.randn(sum(n), HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for n in (rows, keys))
    if labelled == "own":
        starts = [sum(keys[:rank]) for rank in range(len(keys))]
        return x, y, torch.cat([torch.arange(at, at + m) for at, m in zip(starts, rows, strict=True)])
    return x, y, torch.randint(sum(keys), (sum(rows),), generator=generator) if labelled else None


def ids_of(kind: str, rows: list[int], keys: list[int]) -> dict[str, Tensor]:
    """Ids of the global batch: "shared" by a few, of which half the pairs (i, i), or positives of each query
    "elsewhere": on other ranks only."""
    if kind == "shared":
        generator = torch.Generator().manual_seed(sum(rows) + 1)
        found = [torch.randint(max(2, sum(keys) // 3), (sum(each),), generator=generator) for each in (rows, keys)]
        paired = min(map(len, found))
        found[1][:paired:2] = found[0][:paired:2]
    else:  # keys of rank r + 1 belong to queries of rank r
        found = [
            torch.cat([(rank + shift) % len(each) * 1000 + torch.arange(count) for rank, count in enumerate(each)])
            for each, shift in ((rows, 1), (keys, 0))
        ]
    query_ids, key_ids = (number // 2 + (number % 2 << 40) for number in found)  # 2 n and 2 n + 1: high halves differ
    return {"query_ids": query_ids, "key_ids": key_ids}


def shard(x: Tensor | None, sizes: list[int], rank: int) -> Tensor | None:
    return None if x is None else x[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def reference_gradients(
    package: ModuleType, rows: list[int], keys: list[int], labelled: bool | str, ids: str = ""
) -> list[Tensor]:
    """loss and its gradients by Model's parameters, for the whole batch in one process, dense, in fp64."""
    model = Model(package.SPEC["problem"]["dim"], torch.float64)
    x, y, labels = batch(rows, keys, labelled, torch.float64)
    found = ids_of(ids, rows, keys) if ids else {}
    loss = dense_loss(package.ContrastiveLoss._package.loss_name, *model(x, y), labels=labels, **found)
    return [loss.detach(), *gradients_or_zeros(loss, model)]


def gradients_or_zeros(loss: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def gradients(
    package: str,
    ranks: tuple[int, ...],
    rows: list[int],
    keys: list[int],
    labelled: bool | str = False,
    repeats: int = 1,
    how: str = "function",
    ids: str = "",
    **options: Any,
) -> list[Tensor]:
    """This rank's loss and gradients by the parameters. `rows` and `keys` are in group-rank order."""
    module = importlib.import_module(package)
    group = group_of(ranks)
    rank = dist.get_rank(group)
    model = Model(module.SPEC["problem"]["dim"], torch.float64).to(_device)
    x, y, labels = (
        None if whole is None else whole.to(_device) for whole in batch(rows, keys, labelled, torch.float64)
    )
    x_own, y_own = shard(x, rows, rank), shard(y, keys, rank)
    own_labels = labelled if labelled == "own" else shard(labels, rows, rank)
    assert x_own is not None and y_own is not None
    given: dict[str, Any] = {"labels": own_labels}
    if ids:
        whole_ids = ids_of(ids, rows, keys)
        sizes_of = (("query_ids", rows), ("key_ids", keys))
        given |= {name: shard(whole_ids[name].to(_device), sizes, rank) for name, sizes in sizes_of}
    results: list[list[Tensor]] = []
    for _ in range(repeats):
        if how == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
            loss = module.ContrastiveLoss(group=group, **options)(*wrapped(x_own, y_own), **given)
            model.zero_grad()
            loss.backward()
            found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        elif how == "compiled":
            loss_module = module.ContrastiveLoss(group=group, **options)
            whole = nn.Sequential(Unpacked(model), Unpacked(loss_module, **given))
            loss = torch.compile(whole, fullgraph=True, backend="aot_eager")((x_own, y_own))
            found = gradients_or_zeros(loss, model)
        elif how == "traced":  # without gradients, which the graph then keeps nothing for
            with torch.no_grad():
                features = model(x_own, y_own)

            def called(*features: Tensor) -> Tensor:
                value: Tensor = module.contrastive_loss(*features, **given, group=group, **options)
                return value

            loss = make_fx(called)(*features)(*model(x_own, y_own))
            found = gradients_or_zeros(loss, model)
        elif how == "loss_and_grads":
            with torch.no_grad():
                features = model(x_own, y_own)
            loss, *feature_gradients = module.loss_and_grads(*features, **given, group=group, **options)
            features = model(x_own, y_own)
            found = list(torch.autograd.grad(features, list(model.parameters()), feature_gradients))
        else:
            mesh = dist.DeviceMesh("cpu", list(ranks)) if how == "mesh" else group
            loss = module.contrastive_loss(*model(x_own, y_own), **given, group=mesh, **options)
            found = gradients_or_zeros(loss, model)
            if how == "no_grad":  # the same value, where nothing is kept
                with torch.no_grad():
                    loss = module.contrastive_loss(*model(x_own, y_own), **given, group=mesh, **options)
        results.append([loss.detach().clone(), *(g.clone() for g in found)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True)), "not repeatable"
    return [result.cpu() for result in results[0]]


def case_results(
    package: str, ranks: tuple[int, ...], rows: list[int], keys: list[int], case: Case, repeats: int = 3
) -> list[Tensor]:
    """This rank's loss, dq, dk, dscale and dbias for its rows and keys of the case: the same bits each time."""
    module = importlib.import_module(package)
    group = group_of(ranks)
    rank = dist.get_rank(group)
    whole = inputs_of(module, case, _device)
    q, k = shard(whole.q, rows, rank), shard(whole.k, keys, rank)
    of_queries = (shard(x, rows, rank) for x in (whole.labels, whole.query_ids))
    own = Inputs(q, k, whole.scale, whole.bias, *of_queries, shard(whole.key_ids, keys, rank))
    results = [autograd_results(module, own, group=group) for _ in range(repeats)]
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True)), "not repeatable"
    return [result.cpu() for result in results[0]]


def carrier(package: str, ranks: tuple[int, ...]) -> str:
    """What has carried the messages of the package's last call."""
    groups = importlib.import_module(f"{package}._runtime.group")
    return "NCCL" if groups.find_group(group_of(ranks).group_name)._mailboxes is None else "copy engines"


def abandoned(package: str, ranks: tuple[int, ...], absent: int) -> float:
    """Messages among ranks of which `absent` sends none."""
    groups, mailboxes = (importlib.import_module(f"{package}._runtime.{name}") for name in ("group", "mailboxes"))
    group = groups.find_group(group_of(ranks).group_name)
    group.connect(ranks)
    if group.rank == absent:
        return 0.0
    sent, found = torch.ones(1 << 20, device=_device), torch.zeros(1 << 20, device=_device)
    ends = (mailboxes.Message(buffer, absent, 0) for buffer in (sent, found))
    for work in group.post(*([end] for end in ends)):
        work.wait()
    return float(found.sum())


def own_gradients(
    package: str, ranks: tuple[int, ...], rows: list[int], keys: list[int], case: Case, without: bool = False
) -> list[Tensor]:
    """This rank's loss and gradients by features, scale, bias, and own numbers of its queries and keys, and the next
    states; `without` these."""
    module = importlib.import_module(package)
    rank = dist.get_rank(group_of(ranks))
    whole = inputs_of(module, case, _device)
    at = (slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in (rows, keys))
    own = whole.of_rank(*at)
    leaves = {
        name: torch.as_tensor(x, dtype=torch.float64).detach().clone().requires_grad_()
        for name, x in own._asdict().items()
        if isinstance(x, float)
        or (x is not None and x.is_floating_point() and "_state" not in name and "guide" not in name)
    }
    given = own._replace(**leaves)
    keywords = {} if without else given.given
    loss = module.contrastive_loss(*given[:4], **keywords, group=group_of(ranks))
    states = [x for name, x in keywords.items() if "_state" in name]  # the next ones
    return [loss.detach(), *torch.autograd.grad(loss, list(leaves.values())), *states]


def call(package: str, ranks: tuple[int, ...], **arguments: Any) -> float:
    """The loss of one call with arguments that may be wrong on some ranks."""
    return float(loss_of(package, ranks, **arguments))


def loss_of(
    package: str,
    ranks: tuple[int, ...],
    dtype: str = "float64",
    dim: int = 8,
    rows: int = 4,
    keys: int | None = None,
    labels: list[int] | str | None = None,
    grad: bool = False,
    device: str = "cpu",
    scale: Any = 2.0,
    listed: bool = False,
    nested: bool = False,
    lacks_memory: bool = False,
    torch_version: str | None = None,
    protocol: int | None = None,
    trips: int | None = None,
    **options: Any,
) -> Tensor:
    """The loss of ones. What `torch_version`, `protocol` and `trips` are given for, this rank pretends."""
    module = importlib.import_module(package)
    groups = importlib.import_module(f"{package}._runtime.group")
    form: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": grad}
    q, k = torch.ones(rows, dim, **form), torch.ones(rows if keys is None else keys, dim, **form)
    given = torch.tensor(labels) if isinstance(labels, list) else labels
    with contextlib.ExitStack() as pretence:
        for place, name, value in (
            (torch, "__version__", torch_version),
            (groups, "PROTOCOL", protocol),
            (groups.Group, "trips", trips),
            (importlib.import_module(f"{package}._runtime.package").Call, "cast", _lacking if lacks_memory else None),
        ):
            if value is not None:
                pretence.enter_context(mock.patch.object(place, name, value))
        features: Any = q.tolist() if listed else torch.nested.nested_tensor([*q.split(2)]) if nested else q
        loss = module.contrastive_loss(features, k, scale, labels=given, group=group_of(ranks), **options)
    assert isinstance(loss, Tensor)
    return loss


def _lacking(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory for features of another dtype")


def of_parts(package: str, ranks: tuple[int, ...], which: str | None) -> float:
    """The loss where the argument of this name is a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = dist.DeviceMesh.from_group(group_of(ranks), "cpu")
    features = torch.arange(16.0, dtype=torch.float64).sin().view(2, 8)
    given = {"q": features, "k": features, "scale": torch.tensor(2.0), "labels": torch.arange(2)}
    if which is not None:
        placement = Replicate() if which == "scale" else Shard(0)
        given[which] = DTensor.from_local(given[which], mesh, [placement])
    return float(importlib.import_module(package).contrastive_loss(**given, group=mesh))


def refused(package: str, ranks: tuple[int, ...], steps: list[str], **arguments: Any) -> tuple[str, str, int]:
    """Takes steps, of which the last must fail: "forward", or "backward 0" of the first forward. Returns its error's
    type and message, and how many transfers this rank had begun by then."""
    losses: list[Tensor] = []
    for number, step in enumerate(steps, start=1):
        verb, _, which = step.partition(" ")
        with posts_of(package) as posts:
            try:
                if verb == "forward":
                    losses.append(loss_of(package, ranks, **arguments))
                else:
                    losses[int(which)].backward()
            except (RuntimeError, ValueError, TypeError) as error:
                assert number == len(steps), f"{step} failed: {error}"
                return type(error).__name__, str(error), len(posts)
    raise AssertionError(f"{steps[-1]} was not refused")


def outside(package: str, ranks: tuple[int, ...], how: str) -> float:
    """A call by a process that is not in the group."""
    module = importlib.import_module(package)
    # All processes take part in making it; those outside get a marker.
    group: Any = dist.DeviceMesh("cpu", list(ranks)) if how == "mesh" else group_of(ranks)
    return float(module.contrastive_loss(torch.ones(2, 8).double(), torch.ones(2, 8).double(), group=group))


def alone(package: str) -> list[Tensor]:
    """Results in a group of one, with every way to communicate taken away."""
    module = importlib.import_module(package)
    group = group_of((dist.get_rank(),))
    with Silence():
        q, k = torch.arange(80.0).double().sin().view(10, 8), torch.arange(80.0).double().cos().view(10, 8)
        return [*module.loss_and_grads(q, k, 3.0, group=group), torch.tensor(module.selftest()["ok"])]


def headers(packages: list[str], ranks: tuple[int, ...]) -> bool:
    """Whether everybody's header arrives in group-rank order over the gloo group that stands beside an NCCL group and
    has its timeout, for several packages in one process, each of which has its own copy of the runtime."""
    group, right = group_of(ranks), True
    for package in [*packages, *packages]:
        groups = importlib.import_module(f"{package}._runtime.group")
        made = groups.Group(group)
        made._backends = {"cuda": "nccl"}
        header = {field: {bool: True, str: "", int: dist.get_rank()}[kind] for field, kind in groups._HEADER.items()}
        right &= [header["rows"] for header in made.exchange(header)] == dist.get_process_group_ranks(group)
        own, beside = (pg.options._timeout for pg in (group._get_backend(torch.device("cpu")), made._control_group()))
        right &= own == beside
    return right


class Silence:
    """Any communication inside is an error."""

    def __enter__(self) -> None:
        self.refusals = contextlib.ExitStack()
        places = [(dist, name) for name in ("all_gather", "batch_isend_irecv", "isend", "irecv", "new_group")]
        for place, name in (*places, (dist.ProcessGroup, "send"), (dist.ProcessGroup, "recv")):
            self.refusals.enter_context(mock.patch.object(place, name, self.refuse))

    def __exit__(self, *_: object) -> None:
        self.refusals.close()

    @staticmethod
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("communication in a group of one")


def traffic(package: str, ranks: tuple[int, ...], rows: list[int]) -> list[tuple[str, int, int]]:
    """(operation, tag, bytes) of each message of this rank, in order, over forward and backward."""
    return [(kind, message.tag, message.buffer.nbytes) for kind, message in messages_of(package, ranks, rows)]


def peers(package: str, ranks: tuple[int, ...], rows: list[int]) -> list[int]:
    """The group rank at the other end of each message of this rank, in order, over forward and backward."""
    return [message.peer for _, message in messages_of(package, ranks, rows)]


def messages_of(package: str, ranks: tuple[int, ...], rows: list[int]) -> list[tuple[str, Any]]:
    """("send" or "receive", Message) of what this rank posts."""
    module = importlib.import_module(package)
    n = rows[dist.get_rank(group_of(ranks))]
    with posts_of(package) as posts:
        module.loss_and_grads(torch.ones(n, 8).double(), torch.ones(n, 8).double(), group=group_of(ranks))
    kinds = ("send", "receive")
    return [(kind, m) for post in posts for kind, some in zip(kinds, post, strict=True) for m in some]


@contextlib.contextmanager
def posts_of(package: str) -> Iterator[list[tuple[Sequence[Any], Sequence[Any]]]]:
    """What the package's rings post while this lasts: messages sent and received."""
    ring = importlib.import_module(f"{package}._runtime.group").Group
    post, posts = ring.post, []

    def noting(self: Any, sends: Sequence[Any], receives: Sequence[Any]) -> Any:
        posts.append((sends, receives))
        return post(self, sends, receives)

    with mock.patch.object(ring, "post", noting):
        yield posts


def struggle(
    package: str,
    ranks: tuple[int, ...],
    victim: int | None = None,
    act: str = "",
    place: str = "",
    turn: int = 0,
    seconds: float = 0.0,
    mark: str = "",
) -> tuple[str, str, float, list[Tensor]]:
    """One forward and backward in which the victim does something in its `turn`-th "exchange", or at that hop of
    "forward" or "backward", and notes when in the file `mark`. Returns the error's type and message ("" if there was
    none), the seconds that the whole took, of an error those since the victim did it (on a busy machine what was
    healthy before may take long), and the results as `gradients` has them."""
    acts: dict[str, Callable[[], Any]] = {
        "kill": lambda: os._exit(1),
        "sleep": lambda: time.sleep(seconds),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": lambda: 1 // 0,
    }
    rows = [4] * len(ranks)
    groups = importlib.import_module(f"{package}._runtime.group")
    start = time.monotonic()
    with contextlib.ExitStack() as trouble:
        if BESIDE in os.environ:
            trouble.enter_context(mock.patch.object(groups, "_backends", lambda group: {"cuda": "nccl"}))
            trouble.enter_context(mock.patch.object(groups.Group, "check_device", lambda *_: None))
        if dist.get_rank() == victim:
            schedule = importlib.import_module(f"{package}.schedule")
            owner, name = (groups.Group, "exchange") if place == "exchange" else (schedule, f"{place}_block")
            original, calls = getattr(owner, name), itertools.count()

            def acting(*arguments: Any, **options: Any) -> Any:
                if next(calls) == turn:
                    if mark:
                        Path(mark).write_text(str(time.monotonic()))  # one clock for all processes
                    acts[act]()
                return original(*arguments, **options)

            trouble.enter_context(mock.patch.object(owner, name, acting))
        try:
            found = gradients(package, ranks, rows, rows)
        except Exception as error:
            end = time.monotonic()
            if mark and Path(mark).exists():
                start = max(start, float(Path(mark).read_text()))
            return type(error).__name__, str(error), end - start, []
    return "", "", time.monotonic() - start, found
