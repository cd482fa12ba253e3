"""The process in which `infcl-gen bench` measures: points are asked for on stdin, rows answered on stdout.

    {"do": "absent", "peers": [NAME, ...]}     answers {"absent": {NAME: why}}
    {"do": "point", ...}                       the fields of a `bench.Point`; answers {"running": NAME or null} and
                                               {"name": NAME, "row": {...}}, many of them, then {"done": true}; or
                                               {"refused": why}, where this machine cannot measure it

It goes from point to point with the same kernels and libraries loaded, until its stdin is closed.
"""

from __future__ import annotations

import warnings

from infcl_gen.errors import ToolchainError
from infcl_gen.tuning.bench import Point, measure_point
from infcl_gen.tuning.peers import PEERS
from infcl_gen.tuning.process import Answer, Requests, serve


def work(requests: Requests, answer: Answer) -> None:
    warnings.simplefilter("ignore")  # of the peers, to their own users; the log is for what goes wrong
    while True:
        request = requests.get()
        if request.pop("do") == "absent":
            found = {name: PEERS[name].absent() for name in request["peers"]}
            answer(absent={name: why for name, why in found.items() if why is not None})
            continue
        request |= {name: tuple(request[name]) for name in ("packages", "peers")}
        try:
            measure_point(
                Point(**request),
                report=lambda name, row: answer(name=name, row=row),
                announce=lambda name: answer(running=name),
            )
        except ToolchainError as error:
            answer(refused=str(error))
        else:
            answer(done=True)


if __name__ == "__main__":
    serve(work)
