"""When Python collects no garbage: each collection walks all objects of torch and SymPy."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_counting = threading.Lock()
_threads, _thresholds = 0, gc.get_threshold()


@contextlib.contextmanager
def uncollected(import_only: bool = False) -> Iterator[None]:
    """Without collections of garbage: they take 0.4 s of a new problem's 1.5 s, and 8 % of the import of torch.

    The process has them again when the last thread is done. `gc.disable` stays the caller's own. With `import_only` no
    tensor is made meanwhile, and all objects count as old afterwards: the next two collections would walk torch again,
    0.17 s together. A caller's garbage with tensors in it must not wait for a collection of old objects.
    """
    global _threads, _thresholds
    with _counting:
        _threads += 1
        if _threads == 1:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0)
    try:
        yield
    finally:
        if import_only and not gc.get_freeze_count():  # else what a caller has frozen would thaw, too
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        with _counting:
            _threads -= 1
            if not _threads and gc.get_threshold()[0] == 0:  # nobody has set others since
                gc.set_threshold(*_thresholds)
