"""DTensor's registries of strategies: which placements of an operation are legal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Placement


def single_dim_strategies() -> Mapping[Any, Any]:
    """Tables of legal placements over one mesh dimension, by operator."""
    return DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs


def op_strategies() -> Mapping[Any, Any]:
    """Functions that return the legal placements, by operator."""
    return DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs


def is_shard_placeholder(entry: Any) -> bool:
    """Whether an entry of a table is a cut of a dimension, in any number of blocks."""
    return isinstance(entry, _ShardingPlaceholder)


def mesh_without_group(parts: int) -> DeviceMesh:
    """A mesh of one dimension to ask strategies about; it needs no process group and cannot communicate."""
    return DeviceMesh("cpu", torch.arange(parts, device="cpu"), _init_backend=False, _rank=0)


def tensor_meta(value: torch.Tensor) -> TensorMeta:
    """A tensor as strategies see it."""
    return TensorMeta(value.shape, value.stride(), value.dtype)


def strategy_of(mesh: DeviceMesh, placement: Placement, meta: TensorMeta) -> OpStrategy:
    """An operand with this placement."""
    return OpStrategy([OpSpec(DTensorSpec(mesh, (placement,), meta))])


def ask_strategy(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[OpSpec]:
    """The result of the operator's strategy function for operands from :func:`strategy_of`."""
    answer = op_strategies()[target](OpSchema(target, args, dict(kwargs)))
    return answer.strategies if isinstance(answer, OpStrategy) else []


def size_arguments() -> dict[Any, int]:
    """Which positional argument of an operator is the size of its result."""
    aten = torch.ops.aten
    known = DTensor._op_dispatcher.sharding_propagator.op_to_shape_and_stride_idx
    found = {target: at for target, at in known.items() if isinstance(at, int)}
    return found | {aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0, aten.empty.memory_format: 0}
