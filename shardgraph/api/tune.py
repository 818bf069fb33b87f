"""``tune=``: the best candidates of a search run for some steps on the real ranks, and the fastest is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardgraph.calibration import MeasuredStep, learn
from shardgraph.calibration.correction import fitted
from shardgraph.capture.capture import own_loss
from shardgraph.module.sharded import ShardedModule
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.plan import Plan
from shardgraph.sizes import format_seconds
from shardgraph.torch_api import pytree

_CANDIDATES = 4
_WARM = 2
_LEAST = 3  # measured steps of a candidate at least


def fastest(
    chosen: Plan,
    build: Callable[[Plan], ShardedModule],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seconds: float,
    memory: int,
    *,
    here: bool,
) -> Plan:
    """The candidate of ``chosen`` and its alternatives whose measured step takes least per sample.

    All ranks call it, with the same plan. ``build(plan)`` compiles a copy of the model; ``seconds`` are those that all
    candidates are run for together, without compiling them. They run in turns if all fit into ``memory`` bytes at once.
    A step is that of the slowest rank, with AdamW. If they were priced on the machine ``here``, its prices are
    corrected for next time.
    """
    candidates = (chosen, *chosen.alternatives)[:_CANDIDATES]
    if len(candidates) == 1:
        return chosen
    predicted = [chosen.considered[0], *(each for each in chosen.considered[1:] if each.fits and each.plan is not None)]
    inputs = pytree.tree_map_only(torch.Tensor, _real, (args, dict(kwargs)))
    together = sum(each.memory for each in predicted[: len(candidates)])
    if _largest(float(together - memory)) <= 0:  # on every rank, so all measure in the same order
        measured = measured_in_turns([build(plan) for plan in candidates], inputs, seconds)
    else:
        measured = [measured_step(build(plan), inputs, seconds / len(candidates)) for plan in candidates]
    per_sample = [value / plan.data_size for value, plan in zip(measured, candidates, strict=True)]
    best = min(range(len(candidates)), key=per_sample.__getitem__)
    remarks = tuple(
        f"measured: {plan.name} on {dict(plan.whole_mesh)} takes {format_seconds(value)} a step"
        for plan, value in zip(candidates, measured, strict=True)
    )
    steps = [_step_of(each, value) for each, value in zip(predicted, measured, strict=False)]  # more may be predicted
    remarks = (*remarks, _learned(steps, here))
    taken = predicted[best]
    considered = (taken, *(each for each in chosen.considered if each is not taken))
    note = f"{chosen.note}; of the {len(candidates)} best by prediction the fastest as measured, "
    note += f"{format_seconds(measured[best])} a step"
    return replace(candidates[best], note=note, considered=considered, remarks=(*chosen.remarks, *remarks))


def _step_of(candidate: Candidate, measured: float) -> MeasuredStep:
    """A measured step beside its prediction; all that is not communication is computation."""
    return MeasuredStep(candidate.seconds - candidate.exposed, candidate.exposed, measured)


def _learned(steps: Sequence[MeasuredStep], here: bool) -> str:
    """Corrects the prices of this machine, once for all of its ranks, if those made the predictions; says how far they
    were off."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    found = learn(steps) if here and first else fitted(steps)
    off = f"measured steps took {found.computation:.2f} times the predicted computation and {found.communication:.2f} "
    off += "times the communication"
    return f"{off}, by which this machine's prices are corrected next time" if here else off


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Values for an input that has none."""
    if not tensor.is_meta:
        return tensor
    made = torch.zeros if not tensor.is_floating_point() else torch.randn
    return made(tensor.shape, dtype=tensor.dtype)


def measured_in_turns(modules: Sequence[ShardedModule], inputs: tuple[Any, Any], seconds: float) -> list[float]:
    """The median seconds of a step of each module over turns of a few steps, so that what else slows a machine slows
    all of them; the turns take about ``seconds`` together, and there is at least one."""
    turns: list[list[float]] = []
    spent = 0.0  # as the slowest rank measures it, so all ranks take as many turns
    while not turns or spent * (1 + 1 / len(turns)) <= seconds:
        turns.append([measured_step(module, inputs, 0.0) for module in modules])
        spent += (_WARM + _LEAST) * sum(turns[-1])
    return [statistics.median(taken) for taken in zip(*turns, strict=True)]


def measured_step(sharded: ShardedModule, inputs: tuple[Any, Any], seconds: float) -> float:
    """The median seconds of a step on the slowest rank."""
    args, kwargs = inputs
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0)
    taken: list[float] = []
    left = _WARM + _LEAST
    while left:
        started = time.perf_counter()
        _step(sharded, args, kwargs)
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(_largest(time.perf_counter() - started))
        left -= 1
        if len(taken) == _WARM + 1:  # as many as the slowest rank has time for, so all ranks run as many
            left = max(left, int(seconds / max(taken[-1], 1e-6)))
    return statistics.median(taken[_WARM:])


def _step(sharded: ShardedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if sharded.plan.pipeline is not None or "target" in kwargs:
        sharded.train_step(*args, **kwargs)
        return
    output = own_loss(sharded(*args, **kwargs))
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward([leaf.float().square().mean() for leaf in leaves])


def _largest(number: float) -> float:
    """The largest of all ranks' numbers."""
    if not dist.is_initialized():
        return number
    value = torch.tensor(number, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        value = value.cuda()
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)
