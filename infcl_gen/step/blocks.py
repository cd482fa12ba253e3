"""The blocks of a tower that are computed again in backward, so that only what enters them is kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from infcl_gen.step.state import RandomState, changed_buffers, restore_buffers

FEWEST_BLOCKS = 2  # modules of one class behind one another


def blocks_of(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The outermost lists of equal layers, as transformers have them: all children of a ModuleList or a Sequential,
    where there are several of one class that have parameters. Empty where there is none."""
    found: dict[int, nn.Module] = {}
    for module in modules:
        children = list(module.children())
        kinds = {type(child) for child in children}
        repeated = len(children) >= FEWEST_BLOCKS and len(kinds) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and repeated and list(children[0].parameters()):
            found |= {id(child): child for child in children}
        else:
            found |= {id(block): block for block in blocks_of(children)}
    return tuple(found.values())


@contextlib.contextmanager
def recomputed(blocks: Sequence[nn.Module], state: Callable[[], RandomState]) -> Iterator[None]:
    """Inside, a block's forward keeps its inputs alone; backward computes the rest from the same random numbers."""
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block, block.forward, state)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _checkpointed(
    block: nn.Module, forward: Any, state: Callable[[], RandomState], *arguments: Any, **named: Any
) -> Any:
    """`checkpoint` replays torch's own generators only; here also others, and buffers that the block changes."""
    before = state()

    @contextlib.contextmanager
    def replay() -> Iterator[None]:
        now, after = state(), [(buffer, buffer.clone()) for buffer, _ in changed]
        before.restore()
        restore_buffers(changed)
        try:
            yield
        finally:
            now.restore()
            restore_buffers(after)

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), replay()

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    with changed_buffers(block.buffers()) as changed:
        return checkpoint(forward, *arguments, **options, **named)
