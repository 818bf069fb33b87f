"""Operations that copy between host and device memory.

``shardgraph::to_host`` and ``shardgraph::to_device`` start a copy and return its destination;
``shardgraph::wait_copy`` returns that tensor once it is filled. The source is an operand of the wait too, which keeps
it alive, as any operand, until it has been read. Results of all other operations on host tensors are on the host, as by
PyTorch's device rules. :mod:`shardgraph.runtime.host` implements these operations.
"""

from __future__ import annotations

import torch

library = torch.library.Library("shardgraph", "FRAGMENT")
library.define("to_host(Tensor source) -> Tensor")
library.define("to_device(Tensor source, Device device) -> Tensor")
library.define("wait_copy(Tensor copy, Tensor source) -> Tensor")

TO_HOST = torch.ops.shardgraph.to_host.default
TO_DEVICE = torch.ops.shardgraph.to_device.default
WAIT_COPY = torch.ops.shardgraph.wait_copy.default
DIRECTIONS = {TO_HOST: "to host", TO_DEVICE: "to device"}
"""The stream that a copy runs on."""


@torch.library.register_fake("shardgraph::to_host", lib=library)
def _(source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(source, device="cpu")


@torch.library.register_fake("shardgraph::to_device", lib=library)
def _(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(source, device=device)


@torch.library.register_fake("shardgraph::wait_copy", lib=library)
def _(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return copy.view_as(copy)
