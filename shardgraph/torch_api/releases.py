"""Workarounds for bugs in earlier torch releases, applied on import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def _by_greedy_steps(found: Callable[..., Any]) -> Callable[..., Any]:
    """Redistribution of placements that are no order of shards, such as a dimension cut in blocks, step by step."""

    def wrapper(source: DTensorSpec, target: DTensorSpec, by_graph: bool | None = None) -> Any:
        try:
            return found(source, target, by_graph)
        except ValueError as error:
            if "unable to be interpreted" not in str(error):
                raise
            assert source.tensor_meta is not None
            planner = _redistribute.get_redistribute_planner(source.mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)

    return wrapper


if torch.__version__ < "2.12":
    # What 2.12 does where its search cannot read the placements; this release gives up.
    redistribution: Any = _redistribute
    redistribution._gen_transform_infos_non_cached = _by_greedy_steps(_redistribute._gen_transform_infos_non_cached)
    # Its tracer knows no value of it. What a device has does not change, so it can be asked while tracing.
    torch.compiler.assume_constant_result(torch.amp.is_autocast_available)
