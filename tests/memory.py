"""What goes by itself, without the garbage collector."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[Callable[[], int]]:
    """Nothing is collected meanwhile; says how many bytes are held of those allocated since it began."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
