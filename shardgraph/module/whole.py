"""The parameters of a sharded model as whole tensors: for a while, or from now on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.module.checkpoint import copy_into
from shardgraph.module.parameters import like, tied_names
from shardgraph.module.replaced import remember
from shardgraph.torch_api import list_weights


def unshard(model: nn.Module) -> None:
    """Give ``model`` whole parameters again, for optimizers that were made before too. All ranks must call it."""
    remember(_made_whole(model, [names[0] for names in tied_names(model)]))


@contextmanager
def whole_parameters(model: nn.Module, names: Collection[str] | None = None, keep: bool = True) -> Iterator[None]:
    """Parameters are whole, plain tensors inside: all, or those of ``names``. All ranks must call it.

    Afterwards each rank keeps its shard of what it has written to them, unless not ``keep``; gradients are not whole.
    """
    chosen = [tied[0] for tied in tied_names(model) if names is None or tied[0] in names]
    replaced = _made_whole(model, chosen)
    try:
        yield
    finally:
        # What was removed, or has another name or shape now, has no shard to go back to: the next call shards it.
        present = dict(model.named_parameters())
        kept = {present[name] for name in chosen if name in present}
        back = {whole: sharded for sharded, whole in replaced.items() if whole in kept and whole.shape == sharded.shape}
        _put(model, back)
        if keep:  # by parameter: the names of a state may be others, by hooks
            for whole, sharded in back.items():
                copy_into(sharded, whole)
            remember(back)  # for optimizers that were made meanwhile


@torch.no_grad()
def _made_whole(model: nn.Module, names: Collection[str]) -> dict[nn.Parameter, nn.Parameter]:
    """Put a whole parameter in the place of each that is named; returns the new ones by the old ones."""
    replaced = {}
    for name in names:
        sharded = model.get_parameter(name)
        whole = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded.detach().clone()
        replaced[sharded] = like(whole, sharded)
    _put(model, replaced)
    return replaced


def _put(model: nn.Module, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = replaced.get(parameter, parameter)
        list_weights(module)
