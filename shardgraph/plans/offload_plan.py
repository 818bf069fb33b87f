"""Offloading as data: what a plan keeps in host memory, or on disk, rather than on the device."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardgraph.errors import PlanError, nearest

_NAMES = {"parameters": ("parameters",), "activations": ("activations",), "all": ("parameters", "activations")}


@dataclass(frozen=True)
class Offload:
    """What is in host memory while the computation does not use it.

    ``parameters``
        Parameters, with their gradients and the optimizer's state, which is updated there (Ren et al., "ZeRO-Offload",
        2021, https://arxiv.org/abs/2101.06840). Each is copied to the device before it is used, in forward and again in
        backward, unless it is kept; its gradient is copied back.
    ``activations``
        What forward keeps for backward.
    ``disk``
        A folder: parameters are in files there, mapped into memory, instead of in host memory (Rajbhandari et al.,
        "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857).
    """

    parameters: bool = False
    activations: bool = False
    disk: str | None = None

    def __post_init__(self) -> None:
        for field in ("parameters", "activations"):
            if not isinstance(getattr(self, field), bool):
                raise PlanError(f"offload.{field} is {getattr(self, field)!r}; it may be True or False")
        if self.disk is not None:
            if not isinstance(self.disk, (str, os.PathLike)) or not str(self.disk):
                raise PlanError(f"offload.disk is {self.disk!r}; it may be the path of a folder")
            object.__setattr__(self, "disk", str(self.disk))

    @classmethod
    def of(cls, given: str | Offload) -> Offload:
        """The offloading that is meant: ``"parameters"``, ``"activations"`` or ``"all"``.

        Raises:
            PlanError: there is none of that name.
        """
        if isinstance(given, cls):
            return given
        if given not in _NAMES:
            raise PlanError(
                f"there is no offloading {given!r}{nearest(str(given), _NAMES)}; there are "
                f"{', '.join(map(repr, _NAMES))}, and shardgraph.Offload(parameters=..., activations=..., disk=...)"
            )
        named = _NAMES[str(given)]
        return cls("parameters" in named, "activations" in named)

    def __str__(self) -> str:
        what = " and ".join(name for name in _NAMES["all"] if getattr(self, name))
        return f"{what or 'what is annotated'}{f', parameters in files in {self.disk}' if self.disk else ''}"


NOTHING = Offload()
"""All on the device."""
