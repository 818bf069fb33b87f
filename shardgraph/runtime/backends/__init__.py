"""What runs bound graphs. A backend is a function of a graph module; another one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from shardgraph.errors import ShardGraphError
from shardgraph.runtime.backends import eager, inductor
from shardgraph.runtime.backends.regions import Run

Backend = Callable[[fx.GraphModule], Run]
"""Makes what runs a graph that is bound to this rank; called when the graph is first needed."""

BACKENDS: dict[str, tuple[Backend, Callable[[torch.device], None]]] = {
    "eager": (eager.backend, eager.check),
    "inductor": (inductor.backend, inductor.check),
}
"""By name, with what raises ShardGraphError if it cannot compile for a device on this machine."""


def backend_of(name: str, device: torch.device) -> Backend:
    """The backend of this name.

    Raises:
        ShardGraphError: there is none, or it cannot compile for the device on this machine.
    """
    if name not in BACKENDS:
        raise ShardGraphError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    backend, check = BACKENDS[name]
    check(device)
    return backend
