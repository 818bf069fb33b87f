"""Offloading as data: the tensors that a plan keeps in host memory, or on disk, instead of on the device."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardgraph.errors import PlanError, nearest

_NAMES = {"parameters": ("parameters",), "activations": ("activations",), "all": ("parameters", "activations")}


@dataclass(frozen=True)
class Offload:
    """The tensors that are kept in host memory while the computation does not use them.

    ``parameters``
        Parameters, with their gradients and the optimizer's state, which is updated there (Ren et al., "ZeRO-Offload",
        2021, https://arxiv.org/abs/2101.06840). Each is copied to the device before its use, in forward and again in
        backward unless it stays gathered; its gradient is copied to the host.
    ``activations``
        Activations saved for backward.
    ``disk``
        A folder: parameters are in memory-mapped files there instead of in host memory (Rajbhandari et al.,
        "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857).

    Raises:
        PlanError: a field has a value that is not allowed.
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
        """The offloading of a name: ``"parameters"``, ``"activations"`` or ``"all"``.

        Raises:
            PlanError: there is no offloading of that name.
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
"""Everything is on the device."""
