"""Views of values whose strides are not those that were traced.

PyTorch's fake tensors and its kernels do not agree on the strides of many elementwise results of operands that are laid
out differently (the backward of softplus, of losses and of dropout, ``xlogy`` and more), and devices do not among
themselves. Most operations take any strides. A view does not, and may need a copy then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_SUITED: dict[Any, Any] = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)


def suited(target: Any) -> Any:
    """What gives the same as ``target`` whatever strides it finds."""
    return _SUITED.get(target, target)


def suit_layouts(gm: fx.GraphModule) -> None:
    """Have the views of a graph copy where the strides that they find need it."""
    for node in gm.graph.nodes:
        if (target := suited(node.target)) is not node.target:
            node.target = target
