"""An interrupt of the command line is heeded between imports of libraries, not amid one.

Libraries take any exception while they are loaded for a missing dependency, or are left half loaded: the interrupt
would be lost, or end in a traceback about something else.
"""

from __future__ import annotations

import _thread
import os
import sysconfig
import time
from types import FrameType

_IMPORT = "<frozen importlib"
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
_LOOK = 0.05  # seconds until it is looked again whether an import has ended
_PATIENCE = 10.0  # seconds after which the interrupt is heeded anyhow


class Deferred:
    """A handler of SIGINT that raises KeyboardInterrupt as soon as no library is being imported."""

    def __init__(self) -> None:
        self._since: float | None = None  # when an interrupt came that has not been heeded yet

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if imports_a_library(frame) and now - self._since < _PATIENCE:
            _thread.start_new_thread(_again, (number,))  # takes no lock, which the interrupted thread might hold
            return
        self._since = None
        raise KeyboardInterrupt


def _again(number: int) -> None:
    time.sleep(_LOOK)
    os.kill(os.getpid(), number)


def imports_a_library(frame: FrameType | None) -> bool:
    """Whether the innermost import that ``frame`` is part of is a library's; a user's own module may run for long."""
    module = None
    while frame is not None and not frame.f_code.co_filename.startswith(_IMPORT):
        module, frame = frame, frame.f_back
    if frame is None:
        return False
    if module is None or module.f_code.co_filename.startswith("<"):
        return True  # it is machine code, or what that calls of Python's own
    own = str(module.f_globals.get("__name__")).partition(".")[0] == "shardgraph"
    return own or any(each in module.f_code.co_filename for each in _LIBRARIES)
