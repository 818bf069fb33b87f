"""Kernels that inductor compiles of each region of a graph. What is between regions stays where it is scheduled.

inductor decomposes operations as it needs them, and fuses what is between collectives. Random numbers are drawn as in
eager mode, so that dropout is the original's. A region that it cannot compile runs eagerly, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import torch_api
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import SOURCE
from shardgraph.runtime.backends import eager
from shardgraph.runtime.backends.regions import Region, Run, call_regions
from shardgraph.runtime.watch import flight


def backend(gm: fx.GraphModule) -> Run:
    """The graph as Python that calls kernels of its regions; equal ones share them."""
    eager.suit(gm)
    with flight.noting(gm):
        return torch_api.boxed(call_regions(gm, lambda region: _kernels(region, gm)))


def _kernels(region: Region, gm: fx.GraphModule) -> Run:
    """Kernels of a region, compiled for inputs of each layout as they come: ranks have shards of unequal sizes."""
    graph, name = region.graph(gm), _name(region)
    compiled: dict[Any, Run] = {}

    def kernels(inputs: list[torch.Tensor]) -> Sequence[Any]:
        layouts = tuple([(each.shape, each.stride()) for each in inputs])
        run = compiled.get(layouts)
        if run is None:
            run = compiled[layouts] = _compiled(graph, inputs, name)
        return run(inputs)

    return kernels


def _compiled(graph: fx.GraphModule, inputs: list[torch.Tensor], name: str) -> Run:
    """A region as kernels, or as Python, with a warning, if inductor cannot compile it."""
    try:
        return torch_api.compile_by_inductor(graph, inputs)
    except Exception as error:  # whatever a compiler raises
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else repr(error)
    warnings.warn(f"backend='inductor': {name} run eagerly, since {reason}", stacklevel=2)
    return torch_api.boxed(graph)


def _name(region: Region) -> str:
    """What a region is, for people."""
    lines = list(dict.fromkeys(filter(None, map(SOURCE.get, region.nodes))))
    where = f" of {lines[0]}" + (f" to {lines[-1]}" if len(lines) > 1 else "") if lines else ""
    return f"{len(region.nodes)} operations{where}"


def check(device: torch.device) -> None:
    """Raise ShardGraphError if there is no compiler for the device."""
    if device.type == "cpu" and (error := torch_api.cxx_compiler_error()) is not None:
        raise ShardGraphError(
            f"backend='inductor' compiles C++ for CPUs, and there is no compiler here ({error}): install one, such as "
            "the package g++ (Debian, Ubuntu), gcc-c++ (Fedora) or Xcode's command line tools (macOS), or name it in "
            "the environment variable CXX; backend='eager' needs none"
        )
