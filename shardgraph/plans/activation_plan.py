"""Placements of operands and results of a plan's operations, along axes that shard the computation."""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.errors import expect

Rules = tuple[tuple[str, str], ...]
"""``(pattern of operations, placements)`` pairs; the last pattern that matches wins."""


@dataclass(frozen=True)
class Activations:
    """The placements assigned to operations, so that compiling the plan again needs no search.

    ``call``
        The call that they were chosen for, as text: which halves its graph has, its inputs' dtypes and shapes, and what
        training does beside, which are buffers that it writes and random numbers that it draws.
    ``along``
        ``(axis, rules)`` pairs. A rule is a pattern of operations, such as ``"model.layers.*.mlp.up_proj/mm.1"`` for
        the first ``mm`` of such a module, and placements of operands and results, ``"replicate, split(1) ->
        split(1)"``. Without a rule, placements follow from the operands
        (:mod:`shardgraph.passes.sharding.activations`).
    """

    call: str
    along: tuple[tuple[str, Rules], ...]

    def __post_init__(self) -> None:
        for axis, rules in self.along:
            for pattern, text in rules:
                expected = "placements of operands and results, such as 'replicate, split(1) -> split(1)'"
                expect("->" in text, f"activations.{axis}.{pattern}", text, expected)

    def rules(self, axis: str) -> Rules | None:
        """The rules along ``axis``; None if no placements are assigned."""
        return dict(self.along).get(axis)
