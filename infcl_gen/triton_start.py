"""What Triton does once in a process, done in threads beside other work, where this machine has a GPU.

A fork waits for them: a thread that is importing would leave its locks to the child for ever.

key      hashes Triton's own library of 400 MB, which is part of every key in its cache: 0.3 to 0.5 s
driver   loads what asks the GPU's driver, which on the first use of a machine a C compiler builds: 0.3 s
"""

import contextlib
import os
import threading

import torch

from infcl_gen.hardware.detection import has_driver
from infcl_gen.runtime.launch import INTERPRETED

_begun: dict[str, threading.Thread] = {}
_lock = threading.Lock()


def start_triton(*steps: str) -> None:
    """Begin these steps, unless they have begun. The driver is for a process that uses a GPU already."""
    if INTERPRETED or not (torch.version.cuda or torch.version.hip) or not has_driver():
        return
    with _lock:
        for step in steps:
            if step not in _begun:
                # No daemon: a process that ends sooner would end it amid an import, and might crash.
                _begun[step] = threading.Thread(target=_STEPS[step], name=f"infcl_gen {step}")
                _begun[step].start()


def wait_for_triton() -> None:
    """Wait for what has begun: a kernel that is compiled meanwhile would do it again."""
    with _lock:
        threads = [thread for thread in _begun.values() if thread is not threading.current_thread()]
    for thread in threads:
        thread.join(10.0)  # steps take a second; a fork amid an import that one needs, too, would wait for ever


os.register_at_fork(before=wait_for_triton)


def _key() -> None:
    with contextlib.suppress(Exception):  # the first kernel raises it again
        from triton.runtime.cache import triton_key

        triton_key()


def _driver() -> None:
    with contextlib.suppress(Exception):  # as above
        from triton.runtime import driver

        driver.active.get_current_device()


_STEPS = {"key": _key, "driver": _driver}
