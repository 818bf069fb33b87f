"""The operations of a program that copy between the memories of host and device.

``shardgraph::to_host`` and ``shardgraph::to_device`` start a copy and return the tensor that it fills;
``shardgraph::wait_copy`` returns that tensor once it is filled. The wait also takes the source, which therefore lives,
by the rules that hold for every value, until it has been read. What any other operation makes of tensors on the
host is on the host, as PyTorch's device rules have it. :mod:`shardgraph.runtime.host` implements them.
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
