"""Python's garbage collector, kept out of work that makes very many small objects and no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection inside; also a decorator, but not of generators.

    Each full collection walks every object of torch and megatron: 0.1 to 0.3 s, and planning for 10,000
    tensors sets off several.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
