"""The norm, of any order, of gradients that are sharded over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph.arguments import BOOL, Kind, number, one_of
from shardgraph.module.parameters import is_each_ranks_own
from shardgraph.runtime.watch import translated
from shardgraph.torch_api import local_tensor


@translated
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters of any placement, on one mesh or several, and any order.

    Torch's own returns the same on most plans; it fails for parameters on different meshes, and for orders for which
    DTensor has no reduction or a rank's empty shard has no norm. All ranks of the meshes must call this. Parameters
    that are ``ignored()`` do not count, and are not clipped: their gradients differ between ranks.

    Returns:
        the norm of the gradients before clipping, a scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    check_clipping(max_norm, norm_type)
    if type(error_if_nonfinite) is not bool:
        BOOL.check("clip_grad_norm_(): error_if_nonfinite", error_if_nonfinite)
    parameters = _PARAMETERS.check("clip_grad_norm_(): parameters", parameters)
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    _PARAMETERS.check("clip_grad_norm_(): parameters", listed)  # also what an iterator has given
    gradients = [each.grad for each in listed if each.grad is not None and not is_each_ranks_own(each)]
    norm = total_norm(gradients, float(norm_type))
    clip_by(gradients, norm, max_norm, error_if_nonfinite)
    return norm


def check_clipping(max_norm: float, norm_type: float = 2.0) -> None:
    """Raise ArgumentError for a norm that gradients cannot be clipped to. It is called in every step."""
    if type(max_norm) is not float or not max_norm >= 0:
        _MAX_NORM.check("max_norm", max_norm)
    if type(norm_type) is not float or norm_type != norm_type:
        _ORDER.check("norm_type", norm_type)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _are_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, (torch.Tensor, Iterator)) or (
        isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, nn.Module))
    )


_MAX_NORM = number("a number from 0", lambda value: value >= 0) | Kind("a tensor with one", _is_scalar)
_ORDER = number("the order of a norm: a number", lambda value: not math.isnan(value)) | one_of(["inf", "-inf"])
_PARAMETERS = Kind(
    "a tensor or several",
    _are_tensors,
    lambda value: "; give module.parameters()" if isinstance(value, nn.Module) else "",
)


def clip_by(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float, error_if_nonfinite: bool) -> None:
    """Scale gradients of total ``norm`` down to ``max_norm``, in place."""
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of the gradients is {norm.item()}, so they cannot be clipped; to scale them by it all the "
            "same leave error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_tensor(gradient)
        local.mul_(factor.to(local.device, local.dtype))


def total_norm(gradients: list[torch.Tensor], order: float, device: torch.device | None = None) -> torch.Tensor:
    """The norm of the norms of ``gradients``, which may be sharded; a scalar on ``device``, the same on every rank.

    As in torch, order 0 counts the gradients that are not zero, and infinity and its negative are the largest and the
    smallest absolute value of any element. NaN in any shard results in NaN.
    """
    full = [gradient for gradient in gradients if gradient.numel()]
    if not full:
        return torch.tensor(0.0, device=device)
    norms = torch.stack([_norm_of_part(gradient, order).to(full[0].device) for gradient in full])
    for (mesh, dim), among in _axes(full).items():
        norms[among] = combined(norms[among], order, mesh.get_group(dim))
    dtype = torch.promote_types(full[0].dtype, torch.float32)
    return torch.linalg.vector_norm(norms, order).to(device or norms.device, dtype)


def combined(norms: torch.Tensor, order: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norms of tensors that are sharded over ``group``, from the norms of this rank's shards."""
    if math.isinf(order):
        # Backends do not agree on the maximum of a number and NaN, so NaN is reduced separately.
        missing, sign = norms.isnan(), math.copysign(1.0, order)
        both = torch.cat([torch.where(missing, -math.inf, sign * norms), missing.to(norms.dtype)])
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
        values, anywhere = both.chunk(2)
        return torch.where(anywhere > 0, math.nan, sign * values)
    powers = norms if order == 0 else norms.pow(order)
    dist.all_reduce(powers, group=group)
    return powers if order == 0 else powers.pow(1 / order)


def nothing(order: float, device: torch.device) -> torch.Tensor:
    """The norm of no elements, the neutral element of :func:`combined`."""
    return torch.tensor(0.0 if order >= 0 else math.inf, dtype=torch.float64, device=device)


def _norm_of_part(gradient: torch.Tensor, order: float) -> torch.Tensor:
    local = local_tensor(gradient)
    if not local.numel():
        return nothing(order, local.device)
    dtype = torch.promote_types(local.dtype, torch.float32)
    return torch.linalg.vector_norm(local, order, dtype=dtype).double()


def _axes(gradients: list[torch.Tensor]) -> dict[tuple[DeviceMesh, int], list[int]]:
    """The mesh axes over which gradients are sharded, each with the indices of those gradients."""
    axes: dict[tuple[DeviceMesh, int], list[int]] = {}
    for position, gradient in enumerate(gradients):
        for dim, placement in enumerate(gradient.placements if isinstance(gradient, DTensor) else ()):
            if not placement.is_replicate():
                axes.setdefault((gradient.device_mesh, dim), []).append(position)  # type: ignore[attr-defined]
    return axes
