"""Offloading as data: the tensors that a plan keeps in host memory, or on disk, instead of on the device."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardgraph.errors import PlanError, expect, nearest

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
    ``optimizer_state``
        The optimizer's state of offloaded parameters is in files in ``disk`` too.

    Raises:
        PlanError: a field has a value that is not allowed.
    """

    parameters: bool = False
    activations: bool = False
    disk: str | None = None
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        for field in ("parameters", "activations", "optimizer_state"):
            value = getattr(self, field)
            expect(isinstance(value, bool), f"offload.{field}", value, "True or False")
        if self.disk is not None:
            path = isinstance(self.disk, (str, os.PathLike)) and bool(str(self.disk))
            expect(path, "offload.disk", self.disk, "the path of a folder")
            object.__setattr__(self, "disk", str(self.disk))
        elif self.optimizer_state:
            raise PlanError(
                "offload.optimizer_state is True, and offload.disk names no folder for it: give one, or leave "
                "optimizer_state out, with which the state of offloaded parameters is in host memory"
            )

    @classmethod
    def of(cls, offload: str | Offload) -> Offload:
        """The offloading of a name: ``"parameters"``, ``"activations"`` or ``"all"``.

        Raises:
            PlanError: there is no offloading of that name.
        """
        if isinstance(offload, cls):
            return offload
        if not isinstance(offload, str) or offload not in _NAMES:
            raise PlanError(
                f"there is no offloading {offload!r}; there are "
                f"{', '.join(map(repr, _NAMES))}, and shardgraph.Offload(parameters=..., activations=..., disk=..., "
                f"optimizer_state=...){nearest(str(offload), _NAMES)}"
            )
        named = _NAMES[str(offload)]
        return cls("parameters" in named, "activations" in named)

    def __str__(self) -> str:
        tensors = " and ".join(name for name in _NAMES["all"] if getattr(self, name))
        files = "parameters and optimizer state" if self.optimizer_state else "parameters"
        return f"{tensors or 'what is annotated'}{f', {files} in files in {self.disk}' if self.disk else ''}"


NOTHING = Offload()
"""Everything is on the device."""
