"""``torch.nn.SyncBatchNorm``: traced as a batch norm of this rank's rows, and marked for the pass that makes it one of
all ranks' rows.

Its own forward communicates, and only on GPUs: a graph would have a collective outside of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import fx, nn

from shardgraph.errors import CaptureError
from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, SYNCHRONIZED
from shardgraph.torch_api import BatchNorm


class SyncBatchNorm(BatchNorm):
    """Stands for a module of that name while it is traced."""

    _check_input_dim = nn.SyncBatchNorm._check_input_dim


def of_this_rank(copied: nn.Module) -> nn.Module:
    """The private copy of a model, with every ``SyncBatchNorm`` in it replaced by a batch norm."""
    for module in copied.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]
    return copied


def check_synchronized(module: nn.SyncBatchNorm, where: str) -> None:
    """Raise CaptureError if a module has statistics over other ranks than those of the plan, or is of a subclass."""
    if type(module) is not nn.SyncBatchNorm:
        raise CaptureError(f"{where} is a {type(module).__name__}: of a SyncBatchNorm only torch's own class is known")
    if module.process_group not in (None, dist.group.WORLD):
        raise CaptureError(
            f"{where} is a SyncBatchNorm of a process group of its own, and a plan has statistics of all data-parallel "
            "ranks: convert the model without process_group, or use a BatchNorm, as for DDP"
        )


def synchronized_batch_norms(model: nn.Module) -> Iterator[str]:
    """The names of the modules that normalize over the rows of all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            yield name


def mark_synchronized(gm: fx.GraphModule, model: nn.Module) -> None:
    """Mark the batch norms of a captured graph, and their derivatives, that are of a ``SyncBatchNorm`` in training."""
    names = set(synchronized_batch_norms(model))
    for node in gm.graph.nodes:
        stack = MODULES.get(node) or FORWARD_MODULES.get(node)
        if names and stack and "batch_norm" in str(node.target) and list(stack.values())[-1][0] in names:
            SYNCHRONIZED.set(node, True)
