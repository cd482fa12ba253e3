"""Processes of `infcl_gen.processes`, forked from one that has imported torch: 2 s less for each, or 4 s.

They are this process's children, and in all else (session, environment, standard streams, exit codes) as if started.
Their command line is that of the server, and what tests have patched here is not patched there. Where Triton
is to interpret, it is the faster interpreter of tests.kernels.interpreter.

Servers are forked in turn: from the first, without Triton, one whose Triton interprets kernels and one that compiles
them. From these come the servers of `multiprocessing`, too. Each with its own imports they took 20 s.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import IO, Any
from unittest import mock

from infcl_gen import processes
from infcl_gen.emission import build
from infcl_gen.inputs.problem import make_problem
from tests.imports import quicken

# None of these imports triton or our runtime, which read then whether kernels are interpreted.
FIRST = ("torch.distributed", "torch.profiler", "torch.fx.experimental.proxy_tensor", "infcl_gen.emission.lower")
PRELOADED = ("infcl_gen.verification.worker", "infcl_gen.bench.contest", "tests.runtime.ring_worker")
INTERPRETING = (*PRELOADED, "tests.kernels.interpreter")
# What wrappers of modules import in 1 s, what compiles kernels, and what deterministic mode imports.
COMPILING = (
    *PRELOADED, "torch._dynamo", "tests.step.ranks", "tests.compiled", "infcl_gen.verification.aot",
    "triton.experimental.gluon.nvidia.hopper", "torch._inductor.config",
)  # fmt: skip
LARGEST_MESSAGE = 1 << 17
PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """What `processes` uses of a Popen."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class Server:
    """The other end of a process that forks what it is asked to, itself started or forked from another server."""

    def __init__(self, origin: Server | None = None, interprets: bool = False) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if origin is not None:
                origin.fork({"serves": interprets}, [theirs.fileno()])
                return
            # Orphans become this process's children: a forked process's parent ends at once.
            if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
            words = [sys.executable, "-P", "-m", "tests.forks", str(theirs.fileno())]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=processes.own_environment())

    def fork(self, job: Mapping[str, Any], handles: Sequence[int]) -> int:
        """The process that does the job with these open files."""
        socket.send_fds(self._socket, [json.dumps(job).encode()], handles)
        return int(self._socket.recv(64))


class Servers:
    """`start` stands for `processes._start`."""

    @functools.cached_property
    def first(self) -> Server:
        return Server()

    @functools.cached_property
    def compiling(self) -> Server:
        return Server(self.first)

    @functools.cached_property
    def interpreting(self) -> Server:
        return Server(self.first, interprets=True)

    def start(self, words: Sequence[str], log: Any, environment: Mapping[str, str]) -> Forked:
        server = self.interpreting if environment.get("TRITON_INTERPRET") == "1" else self.compiling
        job = {"words": list(words), "environment": environment, "folder": os.getcwd()}
        (read, requests), (answers, write) = os.pipe(), os.pipe()
        pid = server.fork(job, [read, write, log.fileno()])
        for handle in (read, write):
            os.close(handle)
        return Forked(pid, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))


SERVERS = Servers()


class PoolServer(forkserver.ForkServer):
    """That of `multiprocessing`, forked."""

    def __init__(self, interprets: bool) -> None:
        super().__init__()
        self._interprets = interprets

    def ensure_running(self) -> None:
        def forked(path: bytes, words: Sequence[str], handles: Sequence[int]) -> int:
            server = SERVERS.interpreting if self._interprets else SERVERS.compiling
            return server.fork({"environment": dict(os.environ)}, handles)

        resource_tracker.ensure_running()  # or it would be forked, too
        with mock.patch.object(multiprocessing.util, "spawnv_passfds", forked):
            super().ensure_running()


def fork(words: Sequence[str], log: Any, environment: Mapping[str, str]) -> Forked:
    """For `processes._start` of a process that is itself forked, and has computed nothing with torch."""
    job = {"words": words, "environment": environment, "folder": os.getcwd()}
    (read, requests), (answers, write), (begun, begins) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()  # before others hear of it, who may end the process group
        os.write(begins, b"!")
        run(job, [read, write, log.fileno()])
    for handle in (read, write, begins):
        os.close(handle)
    os.read(begun, 1)
    os.close(begun)
    return Forked(pid, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))


def serve(handle: int, names: Sequence[str]) -> None:
    for name in names:
        __import__(name)
    if names == INTERPRETING:
        sys.modules["tests.kernels.interpreter"].accelerate()
    elif names == COMPILING:
        build(make_problem(batch_size=8, dim=8, target="cpu"))  # templates and CLIP's formulas stay: 0.3 s for each
    quicken()
    gc.freeze()  # a collection in a forked process would copy these pages
    with socket.socket(fileno=handle) as requests:
        while True:
            message, handles, *_ = socket.recv_fds(requests, LARGEST_MESSAGE, 3)
            if not message:
                return
            read, write = os.pipe()
            parent = os.fork()
            if not parent:
                if os.fork():
                    os._exit(0)
                job = json.loads(message)
                if "words" in job:
                    os.setsid()  # as in `fork`
                os.write(write, str(os.getpid()).encode())
                requests.close()
                do(job, handles)
            os.waitpid(parent, 0)
            requests.send(os.read(read, 64))
            for each in (read, write, *handles):
                os.close(each)


def do(job: dict[str, Any], handles: list[int]) -> None:
    """Never returns."""
    if "words" in job:
        run(job, handles)
    code = 1
    try:
        if "serves" in job:
            assert not sys.modules.keys() & {"triton", "infcl_gen.runtime.launch"}, "they have read it"
            os.environ["TRITON_INTERPRET"] = str(int(job["serves"]))
            serve(*handles, INTERPRETING if job["serves"] else COMPILING)
        else:
            os.environ.update(job["environment"])
            forkserver.main(*handles, [])
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(job: dict[str, Any], streams: list[int]) -> None:
    """Never returns."""
    code = 1
    try:
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        for number, handle in enumerate(streams):
            os.dup2(handle, number)
        os.closerange(3, 1 << 16)  # pipes of other processes, which would not see their ends
        folders = job["environment"]["PYTHONPATH"].split(os.pathsep)
        sys.path[:0] = [path for path in folders if path not in sys.path]
        for file in (os.path.join(path, "sitecustomize.py") for path in folders):
            if os.path.exists(file):  # a test's
                runpy.run_path(file)
        sys.argv = ["processes", *job["words"]]
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        processes.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]), FIRST)
