"""The comparison of a step whose ranks make several calls, of which gradients are added up."""

from __future__ import annotations

from typing import Any

from shardgraph.checks.bisect import Divergence
from shardgraph.checks.comparison import Comparison, Outputs, Tensors
from shardgraph.runtime.rng import HostState


class CallsComparison(Comparison):
    """The comparison of a program that each data-parallel rank runs for several parts of its batch, one after the
    other, before it updates. ``parts`` has those of each rank, ``programs`` are those of each part."""

    def _weights(self, rank: int, parts: int) -> list[float]:
        return [1 / parts] * parts

    def _reference(self, step: int) -> list[Outputs]:
        """As of one call, with the original called for the first part of all ranks, and then for the next."""
        states = dict(zip(self.batch_of, self._generators(step), strict=True))
        results: list[Outputs] = [[] for _ in self.parts]
        for number, weight in enumerate(self._weights(0, len(self.programs))):
            after = []
            for rank, parts in enumerate(self.parts):
                states[rank].set()
                outputs, written = self._reference_part(parts[number], weight, rank)
                states[rank] = HostState.now()
                results[rank].append(outputs)
                after.append(written)
            self._average(after)
        return results

    def _compare_outputs(self, rank: int, where: str, results: list[Any], expected: list[Any]) -> None:
        for number, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
            super()._compare_outputs(rank, f"{where}, call {number}", [mine], [theirs])

    def _bisect(self, step: int, parameters: Tensors, buffers: Tensors, limit: float) -> Divergence | None:
        """The first node of the first call that differs, if it were the only one."""
        first = [parts[:1] for parts in self.parts]
        how = self.loss_fn, self.seed, self.exact, self.loss_in_program
        alone = Comparison(self.original, self.plan, self.programs[:1], first, *how)
        return alone._bisect(step, parameters, buffers, limit)
