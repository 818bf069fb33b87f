"""FairScale's balances of a Sequential: how many of its children each stage of a Pipe has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from shardgraph.arguments import DEVICE, NOT_NEGATIVE, SECONDS, WHOLE, Kind, checked, instance
from shardgraph.cost_models.partitions import even_runs
from shardgraph.errors import ShardGraphError
from shardgraph.runtime.device import accelerator
from shardgraph.torch_api import pytree

_LAYERS = instance("an nn.Sequential", nn.Sequential)
_CALL = Kind(
    "an input with a tensor, or a tuple of inputs",
    lambda value: any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)),
)


@checked(partitions=WHOLE, module=_LAYERS, sample=_CALL, timeout=SECONDS, device=DEVICE)
def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """The balance whose slowest stage is fastest, by the measured seconds of each child's forward and backward.

    Without a ``balance``, a pipeline is divided by predicted seconds and needs no measurement.

    Args:
        partitions: number of stages.
        module: is copied child by child, and stays as it is.
        sample: the input, or a tuple of inputs.
        timeout: seconds of measurement of all children together, at least.
        device: where to measure; default: the accelerator, or the CPU.

    Raises:
        ShardGraphError: there are fewer children than stages, or no children.
    """

    def seconds(step: Callable[[], Any], _: nn.Module) -> float:
        timing: float = (
            Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=timeout / len(module)).median
        )
        return timing

    return _balance([seconds(*each) for each in _steps(partitions, module, sample, device)], partitions)


@checked(partitions=WHOLE, module=_LAYERS, input=_CALL, chunks=WHOLE, param_scale=NOT_NEGATIVE, device=DEVICE)
def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """The balance whose largest stage is smallest, by the bytes of each child's parameters and saved activations.

    Args:
        partitions: number of stages.
        module: is copied child by child, and stays as it is.
        input: the batch, or a tuple of inputs.
        chunks: microbatches, of which a stage is taken to save one.
        param_scale: bytes for each byte of parameters: 2 with gradients, 4 with Adam's moments too.
        device: where to run the children; default: the accelerator, or the CPU.

    Raises:
        ShardGraphError: there are fewer children than stages, or no children.
    """

    def size(step: Callable[[], Any], child: nn.Module) -> float:
        parameters = {each.data_ptr(): each.nbytes for each in child.parameters()}
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in parameters:
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            step()
        return sum(parameters.values()) * param_scale + sum(saved.values()) / chunks

    return _balance([size(*each) for each in _steps(partitions, module, input, device)], partitions)


def _steps(
    partitions: int, module: nn.Sequential, sample: Any, device: torch.device | str | None
) -> Iterator[tuple[Callable[[], Any], nn.Module]]:
    """Forward and backward of each child on the results of the one before, and the child."""
    if partitions > len(module):
        raise ShardGraphError(
            f"a balance of {partitions} stages was asked for of {len(module)} children: each stage has at least one"
        )
    where = torch.device(device) if device is not None else accelerator() or torch.device("cpu")
    inputs = sample if isinstance(sample, tuple) else (sample,)
    for child in module:
        child = copy.deepcopy(child).to(where)
        inputs = pytree.tree_map_only(Tensor, lambda each: each.detach().to(where), inputs)
        inputs = pytree.tree_map_only(
            Tensor, lambda each: each.requires_grad_() if each.is_floating_point() else each, inputs
        )

        def step(child: nn.Module = child, inputs: tuple[Any, ...] = inputs) -> Any:
            output = child(*inputs)
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if leaves:
                torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
            return output

        yield step, child
        output = step()
        inputs = output if isinstance(output, tuple) else (output,)


def _balance(costs: Sequence[float], partitions: int) -> list[int]:
    """Numbers of neighbours, of which the most expensive group costs least."""
    return [end - begin for begin, end in pairwise([*even_runs(costs, partitions), len(costs)])]
