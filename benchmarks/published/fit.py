"""What a training step sustains of a device's rates, fitted to published runs through the graphs of their programs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.published.runs import Run
from benchmarks.published.work import Operation, PipelineWork, Work, computed
from shardgraph.cost_models.device import FLOP_KINDS, MEMORY, Device

CONSTANTS = ("matmul", "attention", "memory")
_ROUNDS = 3


def fit(
    runs: Sequence[tuple[Run, Work | PipelineWork]], start: Mapping[str, float], most: Mapping[str, float]
) -> dict[str, float]:
    """The constants of the runs' programs, ``most`` of each at most, with the least mean of
    ``|log(predicted / published)|``.

    What communication and bubbles add is that of the round before: they follow the computation, and change little.
    """
    from scipy.optimize import minimize

    parts = {kind: start.get(kind, 1.0) for kind in CONSTANTS}
    for _ in range(_ROUNDS):
        steps = [_Step(run, work, parts) for run, work in runs]

        def loss(values: Sequence[float], steps: Sequence[_Step] = steps) -> float:
            trial = _within(values, most)
            return statistics.fmean(abs(math.log(step.predicted(trial) / step.run.seconds)) for step in steps)

        found = minimize(loss, [parts[kind] for kind in CONSTANTS], method="Nelder-Mead", options={"xatol": 1e-3})
        parts = _within(found.x, most)
    return parts


def attaining(device: Device, parts: Mapping[str, float]) -> Device:
    """The device with kernels that attain other parts of its rates."""
    rates = {
        name: replace(rate, per_second=rate.per_second * parts.get(_constant(name), 1.0))
        for name, rate in device.rates.items()
    }
    return replace(device, rates=rates, sustained={})


def _constant(name: str) -> str:
    kind = name.partition("/")[0]
    return kind if kind in FLOP_KINDS else MEMORY


def _within(values: Sequence[float], most: Mapping[str, float]) -> dict[str, float]:
    return {kind: min(max(float(value), 0.05), most[kind]) for kind, value in zip(CONSTANTS, values, strict=True)}


class _Step:
    """A run's step on a device, of which only the computation changes with the constants."""

    def __init__(self, run: Run, work: Work | PipelineWork, parts: Mapping[str, float]) -> None:
        self.run = run
        self.operations = _counted(work)
        self.compute = self._computed(parts)
        self.seconds = run.seconds_on(work, attaining(run.cluster.device, parts))

    def predicted(self, parts: Mapping[str, float]) -> float:
        """Seconds with other constants."""
        time = self._computed(parts) / self.compute
        # Exposed communication and the update keep their seconds; a bubble grows as the computation does.
        return self.seconds * time if self.run.pipeline else self.seconds + (time - 1) * self._share()

    def _share(self) -> float:
        return min(self.seconds, self.run.accumulated * self.compute)

    def _computed(self, parts: Mapping[str, float]) -> float:
        device = attaining(self.run.cluster.device, parts)
        return sum(count * operation.on(device) for operation, count in self.operations.items())


def _counted(work: Work | PipelineWork) -> Mapping[Operation, int]:
    counts: dict[Operation, int] = defaultdict(int)
    for half in computed(work):
        for index in half.order:
            if not half.operations[index].stream:
                counts[half.operations[index]] += 1
    return counts
