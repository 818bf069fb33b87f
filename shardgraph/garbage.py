"""Python's garbage collector while a program is compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_caller_freezes = False
_MANY = 6_000_000  # objects, a gigabyte or two


@contextmanager
def collected_later() -> Iterator[None]:
    """Inside, no cyclic garbage is looked for.

    A compilation makes millions of objects, and most live to its end: collections would visit all of them again and
    again, for a quarter of the time that a model of 126 layers takes. Afterwards they count as old ones, lest the next
    collections, of young objects, visit them all.
    """
    global _caller_freezes
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # What the caller has frozen would be old again too. It is looked for until it is found: it may be millions of
        # objects, which are counted one by one.
        _caller_freezes = _caller_freezes or bool(gc.get_freeze_count())
        if not _caller_freezes:
            gc.freeze()
            gc.unfreeze()
        if running:
            gc.enable()


def collect_if_many() -> None:
    """Where no garbage is looked for, do so once there are millions of new objects: a search makes programs one after
    the other, whose graphs are cycles, and drops most of them."""
    if not gc.isenabled() and gc.get_count()[0] > _MANY:
        gc.collect()
