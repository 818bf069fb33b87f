"""What HiGHS prints whatever it is told, kept off the output of the program that uses it."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTER = b"HighsMipSolverData::"  # a trace of some of its releases
_STDOUT = 1
_one_at_a_time = threading.Lock()


@contextmanager
def without_chatter() -> Iterator[None]:
    """Inside, lines of the solver's own are left out of standard output; all else arrives there at the end."""
    if os.name != "posix" or not _is_open(_STDOUT):
        yield
        return
    with _one_at_a_time, tempfile.TemporaryFile() as file:
        _flush()
        kept = os.dup(_STDOUT)
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(kept, _STDOUT)
            os.close(kept)
            file.seek(0)
            lines = [line for line in file if not line.startswith(_CHATTER)]
            if lines:
                os.write(_STDOUT, b"".join(lines))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _flush() -> None:
    """Write out what Python and C hold back."""
    if sys.stdout is not None:
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
