"""Training steps that are timed on the real ranks, of one module or of several in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shardgraph.capture.capture import own_loss
from shardgraph.module.sharded import ShardedModule
from shardgraph.torch_api import map_tensors, pytree

_WARM = 2
_LEAST = 3  # timed steps of a module at least
_OF_A_TURN = 2  # timed steps, after one that brings back into caches what other modules displaced


class TimedSteps:
    """Steps of a module with AdamW, whose learning rate of 0 leaves the weights as they are.

    ``inputs`` are the arguments and keyword arguments of a call; where ranks share a batch, all take the first rank's.
    All ranks take the same steps, of as many calls as the plan has.
    """

    def __init__(self, sharded: ShardedModule, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
        self.sharded = sharded
        args, kwargs = map_tensors(_real, inputs)
        shared = sharded.plan.data_size < sharded.plan.world_size
        self.inputs = _of_first_rank(args, kwargs) if shared else (args, kwargs)
        self.optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0)
        for _ in range(_WARM):  # compiles the backward graph, and makes the optimizer's state
            self.step()

    def step(self) -> float:
        """The seconds of a step on the slowest rank. Of many calls two are made, and the last one if it alone reduces
        gradients; the second one stands for the others."""
        calls = self.sharded.plan.calls
        alike = calls if self.sharded.plan.reduces(0) else calls - 1
        started = time.perf_counter()
        self._call(0)
        again = 0.0
        if alike > 1:
            second = _now()
            self._call(1)
            again = _now() - second
        if alike < calls:
            self._call(calls - 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return largest(_now() - started + again * max(0, alike - 2))

    def _call(self, number: int) -> None:
        """Make a call of this number in its step."""
        args, kwargs = self.inputs
        with nullcontext() if self.sharded.plan.reduces(number) else self.sharded.no_sync():
            _forward_and_backward(self.sharded, args, kwargs)

    def median(self, seconds: float) -> float:
        """The median of the steps that ``seconds`` are enough for, and of some steps at least."""
        taken = [self.step()]
        steps = max(_LEAST, int(seconds / max(taken[0], 1e-6)))  # as many on every rank
        taken += [self.step() for _ in range(steps - 1)]
        return statistics.median(taken)


def in_turns(contenders: Sequence[TimedSteps], seconds: float) -> list[tuple[float, ...]]:
    """The mean seconds of a step of each contender, turn by turn, so that what else slows a machine slows all of them.

    The turns take about ``seconds`` together, and there is at least one. Each begins with another contender.
    """
    turns: list[tuple[float, ...]] = []
    spent = 0.0  # as the slowest rank measures it, so all ranks take as many turns
    while not turns or spent * (1 + 1 / len(turns)) <= seconds:
        means: dict[int, float] = {}
        for turned in range(len(contenders)):
            at = (turned + len(turns)) % len(contenders)
            first, *timed = (contenders[at].step() for _ in range(1 + _OF_A_TURN))
            means[at] = statistics.fmean(timed)
            spent += first + sum(timed)
        turns.append(tuple(means[at] for at in range(len(contenders))))
    return turns


def fastest_of(turns: Sequence[Sequence[float]]) -> int:
    """Which contender is fastest: the first, which is expected to be, unless another one is for sure.

    That is by more than the standard error of the median of their turns' ratios; of one turn, by any difference. Of a
    normal distribution, the standard deviation is 1.48 of the median absolute deviation (P. Rousseeuw and C. Croux,
    "Alternatives to the Median Absolute Deviation", 1993), and a median's standard error 1.25 of a mean's.
    """

    def ratios(at: int) -> list[float]:
        return [turn[at] / turn[0] for turn in turns]

    best = min(range(len(turns[0])), key=lambda at: statistics.median(ratios(at)))
    middle = statistics.median(ratios(best))
    spread = statistics.median(abs(each - middle) for each in ratios(best))
    return best if middle + 1.48 * 1.25 * spread / math.sqrt(len(turns)) < 1 else 0


def _now() -> float:
    """The time in seconds at which all that was begun has been computed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def largest(number: float) -> float:
    """The largest of all ranks' numbers."""
    if not dist.is_initialized():
        return number
    value = torch.tensor(number, dtype=torch.float64, device="cpu")
    if dist.get_backend() == "nccl":
        value = value.cuda()
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _forward_and_backward(sharded: ShardedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if sharded.plan.pipeline is not None or "target" in kwargs:
        sharded.train_step(*args, **kwargs)
        return
    output = own_loss(sharded(*args, **kwargs))
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward([leaf.float().square().mean() for leaf in leaves])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Values for an input that has none."""
    if not tensor.is_meta:
        return tensor
    made = torch.zeros if not tensor.is_floating_point() else torch.randn
    return made(tensor.shape, dtype=tensor.dtype)


def _of_first_rank(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The inputs of the first rank on all of them, where each has its own."""
    shared = [map_tensors(torch.Tensor.cpu, (args, dict(kwargs)))]
    dist.broadcast_object_list(shared)

    def moved(own: Any, other: Any) -> Any:
        return other.to(own.device) if isinstance(own, torch.Tensor) else other

    return pytree.tree_map(moved, (args, dict(kwargs)), shared[0])
