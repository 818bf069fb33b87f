"""What a pass is, and the contract that every pass keeps.

A pass is a frozen dataclass with a ``name`` and one method, ``run``, which changes a graph in place; its
options are its fields, so that a pass prints as the text that makes it again and a pipeline is a tuple
of passes. The contract, checked between passes by :func:`run_passes`:

* the graph is valid before and after (it lints; every value has ``meta["val"]``);
* what the graph takes and returns keeps its roles, and a result that a pass does not own keeps its
  shape and dtype;
* a pass finds the facts that it ``requires``, none that it ``excludes``, and leaves those it ``provides``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from shardgraph.errors import GraphInvariantError, PassOrderError
from shardgraph.ir import Gradient, Role, outputs
from shardgraph.plans.plan import ParameterPlan, Plan


@dataclass(frozen=True)
class Context:
    """What passes may know besides the graph.

    ``parameters`` is the plan of each parameter by its (first) name, ``shapes`` their shapes as axes of data see them:
    whole, or the part that operators use once a pass has split them. ``fake_mode`` is the mode in which new
    ``meta["val"]`` tensors are made. ``notes`` are decisions that people should know of. ``sums`` has the axes of
    operators over which a parameter's gradient is yet to be summed. ``stored`` is the dtype in which each parameter is
    kept between steps, where it may be another than the graph's.
    """

    plan: Plan
    parameters: dict[str, ParameterPlan]
    shapes: dict[str, torch.Size]
    fake_mode: Any
    facts: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    sums: dict[str, list[str]] = field(default_factory=dict)
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis sizes by name."""
        return dict(self.plan.mesh)


class Pass(Protocol):
    """The type of every rewrite pass."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]]
    provides: ClassVar[frozenset[str]]
    excludes: ClassVar[frozenset[str]]

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        """Change ``gm`` in place."""
        ...


def run_passes(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    context: Context,
    after_each: Callable[[Pass, fx.GraphModule], None] | None = None,
) -> None:
    """Run ``passes`` in order on ``gm``, checking the contract before and after each.

    ``after_each`` sees the graph after every pass (dumps and progress hang on it).

    Raises:
        PassOrderError: a pass requires what no earlier pass provided, or excludes what one did.
        GraphInvariantError: a pass left the graph invalid.
    """
    for step in passes:
        _check_order(step, context.facts)
        before = _signature(gm)
        known = {node.name for node in gm.graph.nodes}
        step.run(gm, context)
        for node in gm.graph.nodes:
            if node.name not in known:
                node.meta.setdefault("made_by", step.name)
        _check_graph(step, gm, before)
        context.facts.update(step.provides)
        if after_each is not None:
            after_each(step, gm)


def _check_order(step: Pass, facts: set[str]) -> None:
    if missing := step.requires - facts:
        raise PassOrderError(
            f"the pass {step.name!r} requires {', '.join(sorted(missing))}, which no pass before it provides; "
            f"so far: {', '.join(sorted(facts)) or 'nothing'}"
        )
    if clash := step.excludes & facts:
        raise PassOrderError(
            f"the pass {step.name!r} must run before {', '.join(sorted(clash))} is provided: move it earlier"
        )


def _signature(gm: fx.GraphModule) -> list[tuple[Role | None, Any]]:
    def shape(value: Any) -> Any:
        tensor = value.meta.get("val") if isinstance(value, fx.Node) else value
        return (tensor.shape, tensor.dtype) if isinstance(tensor, torch.Tensor) else tensor

    # Gradients are what rewrite passes change the form of; their shape is checked against the shard instead.
    return [(role, None if isinstance(role, Gradient) else shape(value)) for role, value in outputs(gm)]


def _check_graph(step: Pass, gm: fx.GraphModule, before: list[tuple[Role | None, Any]]) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise GraphInvariantError(f"the pass {step.name!r} left an invalid graph: {error}") from error
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise GraphInvariantError(f"the pass {step.name!r} made the node {node.name!r} without meta['val']")
    for (role, old), (new_role, new) in zip(before, _signature(gm), strict=True):
        if role != new_role or old != new:
            raise GraphInvariantError(
                f"the pass {step.name!r} changed the result {role} from {old} to {new_role} {new}"
            )
