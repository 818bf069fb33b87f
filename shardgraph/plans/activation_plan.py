"""Where a plan's operations have their operands and results, along axes that divide the computation."""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.errors import PlanError

Rules = tuple[tuple[str, str], ...]
"""``(pattern of operations, placements)`` pairs; the last pattern that matches wins."""


@dataclass(frozen=True)
class Activations:
    """What was decided of operations, so that compiling the plan again solves nothing.

    ``call``
        The call that it was decided for, as text: which halves its graph has, and dtypes and shapes of its inputs.
    ``along``
        ``(axis, rules)`` pairs. A rule is a pattern of operations, ``"model.layers.*.mlp.up_proj/mm.1"`` being the
        first ``mm`` of such a module, and placements of operands and results, ``"replicate, split(1) -> split(1)"``. An
        operation that none names follows its operands (:mod:`shardgraph.passes.sharding.activations`).
    """

    call: str
    along: tuple[tuple[str, Rules], ...]

    def __post_init__(self) -> None:
        for axis, rules in self.along:
            for pattern, text in rules:
                if "->" not in text:
                    raise PlanError(
                        f"activations.{axis}.{pattern} is {text!r}; it may be placements of operands and results, such "
                        "as 'replicate, split(1) -> split(1)'"
                    )

    def rules(self, axis: str) -> Rules | None:
        """The rules along ``axis``; None where nothing was decided."""
        return dict(self.along).get(axis)
