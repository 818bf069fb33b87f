"""DTensors from shards that exist, and shards of DTensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph.errors import MIXED


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
    alone = torch.empty(0, device="cpu")
    return _holders(tensor) > _holders(alone) or tensor.untyped_storage().nbytes() > tensor.nbytes


def _holders(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_STEPS = (
    "_try_replicate_spec_for_scalar_tensor",
    "_propagate_op_sharding_dispatch_slow_path",
    "_dispatch_fast_path_python_tail",
)
"""What DTensor calls for an operation's plain tensors, for the placements of its results, and, where torch 2.11 refuses
to write, with the results."""
_REFUSED = re.compile(f"{MIXED}|sharding strategy|Sharding propagation|in-place operations that require placement")
_RUN = "_dispatch_get_local_results_slow_path"
"""What it calls to compute on shards, for all that draws random numbers."""


@functools.cache
def explain_refusals(explained: Callable[[RuntimeError], Exception]) -> None:
    """From now on, where DTensor does not have an operation, or not together with plain tensors, or draws other numbers
    than for the whole tensor, as on CPUs, raise what ``explained`` makes of the error that says so."""

    def explaining(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def taking(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except RuntimeError as error:
                if not _REFUSED.search(str(error)):
                    raise
                raise explained(error) from error

        return taking

    def checking(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def running(self: Any, operation: Any, args: Any, info: Any) -> Any:
            if operation in self._random_ops and _is_divided_on_cpu(args[0]):
                raise explained(RuntimeError(f"{operation} of shards on CPUs would draw the same numbers for each"))
            return run(self, operation, args, info)

        return running

    for name, wrapped in (*((step, explaining) for step in _STEPS), (_RUN, checking)):
        setattr(OpDispatcher, name, wrapped(getattr(OpDispatcher, name)))


def _is_divided_on_cpu(tensor: Any) -> bool:
    on_cpu = isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu"
    return on_cpu and not all(placement.is_replicate() for placement in tensor.placements)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with ``function`` of each tensor in its place. What is one tensor stays one: forward may ask."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, once, tree)
