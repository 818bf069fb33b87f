"""``x[mask] = value`` in a captured graph, of one value for all elements, as a choice for each element.

The gradient of the value would be the elements that the mask chooses, as many as it finds.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardgraph.torch_api import traced_value


def choose_masked(gm: fx.GraphModule) -> None:
    """Replace these writes in a traced graph."""
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        x, mask, value = node.args
        if _is_choice(x, mask, value):
            with gm.graph.inserting_before(node):
                gm.graph.call_function(_masked_write, (x, mask, value))
            node.replace_all_uses_with(x)
            gm.graph.erase_node(node)
            changed = True
    if changed:
        gm.recompile()


def _masked_write(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    each = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    return x.copy_(torch.where(each, value.to(x.dtype), x))


def _is_choice(x: Any, mask: Any, value: Any) -> bool:
    """Whether a mask chooses elements, or rows of them, that all become one value."""
    tensors = [traced_value(each) if isinstance(each, fx.Node) else each for each in (x, mask, value)]
    if not all(isinstance(each, torch.Tensor) for each in tensors) or tensors[1].dtype is not torch.bool:
        return False
    rest = tensors[0].dim() - tensors[1].dim()
    return rest >= 0 and tensors[2].dim() <= rest and tensors[1].shape == tensors[0].shape[: tensors[1].dim()]
