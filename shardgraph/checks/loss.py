"""The loss of a verification, where the caller has none: one that every output takes part in."""

from __future__ import annotations

from typing import Any

import torch

from shardgraph.capture.capture import own_loss
from shardgraph.torch_api import pytree

_PRIME = 65537


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss``, an output that is one number, or else a projection of all floating tensors in ``output``.

    A projection on fixed directions, so that every parameter of which an output depends has a gradient. (The mean
    square of what a layer norm returns does not depend on the weights before it, nor does a sum over rows on those
    before a batch norm: hence the sine.) It is a mean over rows, as a loss is: parts of a batch may be weighted by
    their rows.
    """
    loss = own_loss(output)
    if isinstance(loss, torch.Tensor) and not loss.dim():
        return loss
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return torch.stack([_projection(tensor, number) for number, tensor in enumerate(floating)]).sum()


def _projection(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """The mean over rows of ``row @ one + sin(row @ other)``, in single precision at least; a number as it is.

    A number beside other outputs is most often a loss, which parts of a batch have their share of: its sine has not.
    """
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not tensor.dim():
        return tensor
    rows = tensor.reshape(tensor.shape[0], -1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    one, other = (_along(rows, 2 * number + kind) for kind in range(2))
    return (one + other.sin()).mean()


def _along(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Every row's product with a direction of length about one."""
    positions, features = rows.shape[1:]
    return (rows @ _direction(features, 2 * number, rows)) @ _direction(positions, 2 * number + 1, rows)


def _direction(size: int, number: int, like: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of a size between 0.5 and 1.5 and of both signs, over the root of ``size``."""
    scrambled = (torch.arange(1, size + 1, device=like.device) * 48271 + number * 16807) % _PRIME
    even = scrambled % 2 * 2 - 1
    return (scrambled.to(like.dtype) / _PRIME + 0.5) * even * size**-0.5
