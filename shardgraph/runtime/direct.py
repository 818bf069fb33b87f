"""A training step's gradients without autograd: the two graphs, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardgraph import ir
from shardgraph.runtime.autograd import Differentiable


def is_direct(executor: Any, leaves: Sequence[Any]) -> bool:
    """Whether a program's output is one loss, whose gradients nobody but parameters wants."""
    if not isinstance(executor, Differentiable) or not executor.program.differentiable:
        return False
    roles = [executor.results[i] for i, _ in executor.returned]
    if ir.Output(0) not in roles or executor.program.joint.out_spec.num_leaves != 1 or executor.program.joint.results:
        return False
    return not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def loss_and_gradients(
    executor: Differentiable,
    leaves: Sequence[Any],
    tangent: Callable[[torch.Tensor], torch.Tensor],
    updater: ir.Updates | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients of this rank's shards by parameter.

    ``tangent`` is given the loss, and gives the gradient of what is differentiated with respect to it. The ``updater``
    is given gradients as soon as nothing reads their parameters; these are not returned.
    """
    position = next(i for i, _ in executor.returned if executor.results[i] == ir.Output(0))
    with torch.no_grad():
        results = executor.run_forward(executor.values(leaves), leaves)
    saved, loss = [results[i] for i in executor.saved], results[position]
    del results
    tangents: dict[ir.Tangent, Any] = {role: tangent(loss) if i == position else None for i, role in executor.returned}
    with torch.no_grad():
        values = executor.run_backward(saved, tangents, sync=True, updater=updater)
    return loss.detach(), {
        role.fqn: value for role, value in values.items() if isinstance(role, ir.Parameter) and value is not None
    }
