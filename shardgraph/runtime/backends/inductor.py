"""Kernels that inductor compiles of each graph. Collectives stay where the schedule has put them.

inductor decomposes operations as it needs them, and fuses what is between collectives. Random numbers are drawn as in
eager mode, so that dropout is the original's. A graph that it cannot compile runs eagerly, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import ir, torch_api
from shardgraph.errors import ShardGraphError
from shardgraph.runtime.backends import eager
from shardgraph.runtime.backends.gloo import suit_gloo


def backend(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph as kernels, compiled for inputs of each layout as they come: ranks have shards of unequal sizes."""
    suit_gloo(gm, gathers=False)  # it makes the tensors that gathers write to
    compiled: dict[Any, Callable[[list[Any]], Sequence[Any]]] = {}

    def run(inputs: list[Any]) -> Sequence[Any]:
        layouts = tuple((each.shape, each.stride()) for each in inputs if isinstance(each, torch.Tensor))
        if layouts not in compiled:
            compiled[layouts] = _compiled(gm, inputs)
        return compiled[layouts](inputs)

    return run


def _compiled(gm: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph as kernels, or as Python, with a warning, if inductor cannot compile it."""
    reason = _obstacle(gm, inputs)
    if reason is None:
        try:
            return torch_api.compile_by_inductor(gm, inputs)
        except Exception as error:  # whatever a compiler raises
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else repr(error)
    graph = f"a graph of {len(gm.graph.nodes)} nodes"
    warnings.warn(f"backend='inductor': {graph} runs eagerly, since {reason}", stacklevel=2)
    return eager.backend(gm)


def _obstacle(gm: fx.GraphModule, inputs: list[Any]) -> str | None:
    """What inductor would not keep as it is, if the graph has it."""
    for node in filter(ir.is_copy, gm.graph.nodes):
        return f"{ir.describe_collective(node)} is beside computation, on a stream of its own"
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            return f"its input {node.name!r} is not a tensor"
    return None


def check(device: torch.device) -> None:
    """Raise ShardGraphError if there is no compiler for the device."""
    if device.type == "cpu" and (error := torch_api.cxx_compiler_error()) is not None:
        raise ShardGraphError(
            f"backend='inductor' compiles C++ for CPUs, and there is no compiler here ({error}): install one, such as "
            "the package g++ (Debian, Ubuntu), gcc-c++ (Fedora) or Xcode's command line tools (macOS), or name it in "
            "the environment variable CXX; backend='eager' needs none"
        )
