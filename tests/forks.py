"""Processes of `infcl_gen.processes`, forked from one that has imported torch: 2 s less for each, or 4 s.

They are this process's children, and in all else (session, environment, standard streams, exit codes) as if started.
Their command line is that of the server, and what tests have patched here is not patched there. Where Triton
is to interpret, it is the faster interpreter of tests.kernels.interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any

from infcl_gen import processes
from infcl_gen.emission import build
from infcl_gen.inputs.problem import make_problem
from tests.imports import quicken

PRELOADED = ("torch.distributed", "torch.profiler", "infcl_gen.verification.worker", "infcl_gen.bench.contest")
# Both import triton, which reads then whether kernels are interpreted.
INTERPRETING = (*PRELOADED, "tests.kernels.interpreter")
# What wrappers of modules import in 2 s, and what compiles kernels in 0.3 s.
COMPILING = (
    *PRELOADED, "torch._dynamo", "tests.step.ranks",
    "tests.compiled", "infcl_gen.verification.aot", "triton.experimental.gluon.nvidia.hopper",
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


class Servers:
    """`start` stands for `processes._start`. One server for processes that interpret kernels, and one for others."""

    def __init__(self) -> None:
        self._servers: dict[bool, Server] = {}

    def start(self, words: Sequence[str], log: Any, environment: Mapping[str, str]) -> Forked:
        interprets = environment.get("TRITON_INTERPRET") == "1"
        if interprets not in self._servers:
            self._servers[interprets] = Server(interprets)
        return self._servers[interprets].start(words, log, environment)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


class Server:
    def __init__(self, interprets: bool) -> None:
        # Orphans become this process's children: a forked process's parent ends at once.
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-P", "-m", "tests.forks", str(theirs.fileno()), str(int(interprets))]
            environment = {**processes.own_environment(), "TRITON_INTERPRET": str(int(interprets))}
            self._server = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environment)

    def start(self, words: Sequence[str], log: Any, environment: Mapping[str, str]) -> Forked:
        job = {"words": list(words), "environment": environment, "folder": os.getcwd()}
        (read, requests), (answers, write) = os.pipe(), os.pipe()
        socket.send_fds(self._socket, [json.dumps(job).encode()], [read, write, log.fileno()])
        pid = int(self._socket.recv(64))
        for handle in (read, write):
            os.close(handle)
        return Forked(pid, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))

    def close(self) -> None:
        self._socket.close()
        self._server.wait()


def fork(words: Sequence[str], log: Any, environment: Mapping[str, str]) -> Forked:
    """For `processes._start` of a process that is itself forked, and has computed nothing with torch."""
    job = {"words": words, "environment": environment, "folder": os.getcwd()}
    (read, requests), (answers, write) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        run(job, [read, write, log.fileno()])
    for handle in (read, write):
        os.close(handle)
    return Forked(pid, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))


def serve(handle: int, interprets: bool) -> None:
    for name in INTERPRETING if interprets else COMPILING:
        __import__(name)
    if interprets:
        sys.modules["tests.kernels.interpreter"].accelerate()
    else:
        build(make_problem(batch_size=8, dim=8, target="cpu"))  # templates and CLIP's formulas stay: 0.3 s for each
    quicken()
    gc.freeze()  # a collection in a forked process would copy these pages
    with socket.socket(fileno=handle) as requests:
        while True:
            message, streams, *_ = socket.recv_fds(requests, LARGEST_MESSAGE, 3)
            if not message:
                return
            read, write = os.pipe()
            parent = os.fork()
            if not parent:
                child = os.fork()
                if child:
                    os.write(write, str(child).encode())
                    os._exit(0)
                requests.close()
                run(json.loads(message), streams)
            os.waitpid(parent, 0)
            requests.send(os.read(read, 64))
            for each in (read, write, *streams):
                os.close(each)


def run(job: dict[str, Any], streams: list[int]) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
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
    serve(int(sys.argv[1]), sys.argv[2] == "1")
