"""``tune=``: the best candidates of a search run for some steps on the real ranks, and the fastest is taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from shardgraph.api.timed_steps import TimedSteps, fastest_of, in_turns, largest
from shardgraph.calibration import MeasuredStep, learn
from shardgraph.calibration.correction import fitted
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.plan import Plan
from shardgraph.sizes import format_seconds

CANDIDATES = 4
"""How many are run."""


def fastest(
    chosen: Plan,
    timed: Callable[[Plan], TimedSteps],
    seconds: float,
    memory: int,
    *,
    here: bool,
) -> Plan:
    """The candidate of ``chosen`` and its alternatives whose measured step takes least per sample; ``chosen`` unless
    another one does for sure (:func:`~shardgraph.api.timed_steps.fastest_of`).

    All ranks call it, with the same plan. ``timed(plan)`` has compiled a copy of the model; ``seconds`` are those that
    all candidates are run for together, without that. They run in turns if all fit into ``memory`` bytes at once.
    A step is that of the slowest rank, with AdamW. If they were priced on the machine ``here``, its prices are
    corrected for next time.
    """
    candidates = (chosen, *chosen.alternatives)[:CANDIDATES]
    if len(candidates) == 1:
        return chosen
    predicted = [chosen.considered[0], *(each for each in chosen.considered[1:] if each.fits and each.plan is not None)]
    together = sum(each.memory for each in predicted[: len(candidates)])
    if largest(float(together - memory)) <= 0:  # on every rank, so all measure in the same order
        turns = in_turns([timed(plan) for plan in candidates], seconds)
    else:
        each = seconds / len(candidates)
        turns = [tuple(timed(plan).median(each) for plan in candidates)]
    measured = [statistics.median(taken) for taken in zip(*turns, strict=True)]
    sizes = [1 if plan.batch else plan.data_size for plan in candidates]  # a global batch is that of each
    best = fastest_of([[value / size for value, size in zip(turn, sizes, strict=True)] for turn in turns])
    remarks = tuple(
        f"measured: {plan.name} on {dict(plan.whole_mesh)}{_schedule(plan)} takes {format_seconds(value)} a step"
        for plan, value in zip(candidates, measured, strict=True)
    )
    steps = [_step_of(each, value) for each, value in zip(predicted, measured, strict=False)]  # more may be predicted
    remarks = (*remarks, _learned(steps, here))
    taken = predicted[best]
    considered = (taken, *(each for each in chosen.considered if each is not taken))
    per_sample = [value / size for value, size in zip(measured, sizes, strict=True)]
    why = "the fastest as measured"
    if best == 0 and per_sample[0] > min(per_sample):
        why = "the first, which none is faster than for sure"
    note = f"{chosen.note}; of the {len(candidates)} best by prediction {why}, {format_seconds(measured[best])} a step"
    return replace(candidates[best], note=note, considered=considered, remarks=(*chosen.remarks, *remarks))


def _schedule(plan: Plan) -> str:
    """What tells apart plans of one mesh: a pipeline's schedule, or the calls of a step."""
    if plan.pipeline is not None:
        return f", {plan.pipeline.schedule} of {plan.pipeline.parts} microbatches"
    return f", {plan.calls} calls" if plan.calls > 1 else ""


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
