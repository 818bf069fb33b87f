"""Python's garbage collector while a program is compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Inside, no cyclic garbage is looked for.

    A compilation makes millions of objects, and most live to its end: collections would visit all of them again and
    again, for a quarter of the time that a model of 126 layers takes. Afterwards they count as old ones, lest the next
    collections, of young objects, visit them all.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what the caller has frozen would be old again too
            gc.freeze()
            gc.unfreeze()
        if running:
            gc.enable()
