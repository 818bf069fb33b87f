"""A finding, and all findings of a program as a list that reads as text."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What a rule found.

    ``severity`` is ``"warning"`` for what trains otherwise than on one device, or not at all, and ``"note"`` for what
    only costs time or memory. ``where`` is the module, parameter or line; ``remedy`` what to do about it.
    """

    rule: str
    severity: Literal["warning", "note"]
    message: str
    where: str
    remedy: str

    @property
    def place(self) -> str:
        """``where``, with a file's path from the folder that it is imported from, which differs between machines."""
        folders = [os.path.join(os.path.abspath(each), "") for each in sys.path]
        return self.where[max((len(each) for each in folders if self.where.startswith(each)), default=0) :]

    def __str__(self) -> str:
        return f"{self.severity} {self.rule} at {self.where}: {self.message}\n    {self.remedy}"


class Findings(list[Finding]):
    """Findings, warnings first, which print one after the other."""

    @classmethod
    def sorted(cls, found: list[Finding]) -> Findings:
        """``found``, warnings first, otherwise in their order."""
        return cls(sorted(found, key=lambda each: each.severity != "warning"))

    @property
    def warnings(self) -> list[Finding]:
        """Those that are warnings."""
        return [each for each in self if each.severity == "warning"]

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "nothing found"

    __repr__ = __str__
