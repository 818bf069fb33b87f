"""A limit on how long a search takes."""

from __future__ import annotations

import math
import time


class Limit:
    """So many ``seconds`` from now on, or without end if None. ``cut`` is whether anything was left out for it."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.cut = False

    @property
    def over(self) -> bool:
        """Whether the time is over, so that what asks leaves something out."""
        self.cut = self.cut or time.monotonic() > self._deadline
        return self.cut


UNLIMITED = Limit()
"""No limit."""
