"""DTensors from shards that exist, and shards of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that this rank holds of a DTensor, outside of autograd; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_placed(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor placed as ``like``; it has the dtype and this rank's local shape of ``like``.

    ``DTensor.from_local`` would derive both anew, and calling the class its ``__init__``, which does nothing slowly:
    for every gradient of every step that is time that a user feels.
    """
    return _wrapped(local, like._spec)


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """The DTensor of global ``shape`` of which this rank holds ``local``, wherever that is.

    ``DTensor.from_local`` would move it to the device of the mesh.
    """
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return _wrapped(local, DTensorSpec(mesh, tuple(placements), meta))


def _wrapped(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # A wrapper takes over its shard's offset in memory, though it has none itself: copy.deepcopy would fail.
    if not local.storage_offset():
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)
    wrapper = DTensor.__new__(DTensor, _without_offset(local), spec, requires_grad=False)
    wrapper._local_tensor = local
    return wrapper


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _without_offset(local: torch.Tensor) -> torch.Tensor:
    """A tensor of the dtype and the device of ``local``; always the same, unless it is a fake one."""
    kind = local.dtype, local.device
    if type(local) is not torch.Tensor or kind not in _EMPTY:
        empty = local.new_empty(0)
        if type(empty) is not torch.Tensor:
            return empty
        _EMPTY[kind] = empty
    return _EMPTY[kind]


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides: itself, if it has them, else a copy."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def is_viewed(tensor: torch.Tensor) -> bool:
    """Whether other tensors are in the memory of a tensor, or autograd keeps it."""
    alone = torch.empty(0)
    return _holders(tensor) > _holders(alone) or tensor.untyped_storage().nbytes() > tensor.nbytes


def _holders(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def explain_mixed_tensors(explained: Callable[[RuntimeError], Exception]) -> None:
    """From now on, where an operation takes DTensors together with plain tensors, raise what ``explained`` makes of
    torch's error."""
    take = OpDispatcher._try_replicate_spec_for_scalar_tensor

    @functools.wraps(take)
    def taking(*args: Any) -> DTensorSpec:
        try:
            return take(*args)
        except RuntimeError as error:
            raise explained(error) from error

    OpDispatcher._try_replicate_spec_for_scalar_tensor = taking  # type: ignore[method-assign]
