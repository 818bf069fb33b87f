"""What a pass is, and the contract that every pass keeps.

A pass is a frozen dataclass with a ``name`` and one method, ``run``, which changes a graph in place; its
options are its fields, so that a pass prints as the text that makes it again and a pipeline is a tuple
of passes. The contract, checked between passes by :func:`run_passes`:

* the graph is valid before and after (it lints; every value has ``meta["val"]``, and nodes have no other facts than
  the attributes of :mod:`shardgraph.ir.attributes`);
* what the graph takes and returns keeps its roles, and a result that a pass does not own keeps its
  shape and dtype;
* a pass finds the facts that it ``requires``, none that it ``excludes``, and leaves those it ``provides``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from shardgraph.errors import GraphInvariantError, PassOrderError
from shardgraph.ir import Gradient, Role, outputs
from shardgraph.ir.attributes import MADE_BY, REGISTRY
from shardgraph.ir.fake_values import Propagation
from shardgraph.plans.plan import ParameterPlan, Plan


@dataclass
class Findings:
    """What passes add to and change, for passes after them: all that is mutable in a :class:`Context`.

    ``parameters`` is the plan of each parameter by its (first) name, ``shapes`` their shapes as axes of data see them:
    whole, or the part that operators use once a pass has split them. ``facts`` are what passes have provided. ``notes``
    are decisions that people should know of. ``sums`` has the axes of operators over which a parameter's gradient is
    yet to be summed.
    """

    parameters: dict[str, ParameterPlan] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    sums: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def copy(self) -> Findings:
        """The same, to add to on its own; every entry is immutable and shared."""
        return Findings(dict(self.parameters), dict(self.shapes), set(self.facts), list(self.notes), dict(self.sums))


@dataclass(frozen=True)
class Context:
    """What passes may know besides the graph.

    ``fake_mode`` is the mode in which values of new nodes are computed. ``stored`` is the dtype in which each parameter
    is kept between steps, where it may be another than the graph's. These and the ``plan`` do not change; ``findings``
    is what passes add, and the names below are short for its entries.
    """

    plan: Plan
    fake_mode: Any
    findings: Findings = field(default_factory=Findings)
    stored: Mapping[str, torch.dtype] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(
        cls,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        fake_mode: Any,
        stored: Mapping[str, torch.dtype] | None = None,
    ) -> Context:
        """What is known before the first pass, of a model whose parameters have ``shapes``.

        Raises:
            PlanError: the plan does not fit them.
        """
        findings = Findings(dict(plan.resolve(shapes)), dict(shapes))
        return cls(plan, fake_mode, findings, MappingProxyType(dict(stored or {})))

    def copy(self, plan: Plan | None = None) -> Context:
        """The same with findings of its own, and with another plan if one is given."""
        return replace(self, plan=plan or self.plan, findings=self.findings.copy())

    def of_graph(self, *facts: str) -> Context:
        """The same findings, but for facts: those of one graph of several that further passes run on."""
        return replace(self, findings=replace(self.findings, facts={*self.facts, *facts}))

    @property
    def parameters(self) -> dict[str, ParameterPlan]:
        """See :class:`Findings`."""
        return self.findings.parameters

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """See :class:`Findings`."""
        return self.findings.shapes

    @property
    def facts(self) -> set[str]:
        """See :class:`Findings`."""
        return self.findings.facts

    @property
    def notes(self) -> list[str]:
        """See :class:`Findings`."""
        return self.findings.notes

    @property
    def sums(self) -> dict[str, tuple[str, ...]]:
        """See :class:`Findings`."""
        return self.findings.sums

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis sizes by name."""
        return dict(self.plan.mesh)

    @property
    def values(self) -> Propagation:
        """What computes values of new nodes."""
        return Propagation(self.fake_mode, self.plan.mesh)


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
                MADE_BY.set(node, MADE_BY.get(node, step.name))
        _check_graph(step, gm, before)
        for check in _checks:
            check(step, gm, context)
        context.facts.update(step.provides)
        if after_each is not None:
            after_each(step, gm)


Check = Callable[[Pass, fx.GraphModule, Context], None]
_checks: list[Check] = []


@contextmanager
def checking(check: Check) -> Iterator[None]:
    """Within, ``check`` also sees the graph after every pass: what takes too long to check in every compilation."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


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
        if unknown := node.meta.keys() - REGISTRY.keys():
            raise GraphInvariantError(
                f"the pass {step.name!r} wrote meta[{min(unknown)!r}] of the node {node.name!r}, which is no "
                "attribute: register it in shardgraph.ir.attributes"
            )
    for (role, old), (new_role, new) in zip(before, _signature(gm), strict=True):
        if role != new_role or old != new:
            raise GraphInvariantError(
                f"the pass {step.name!r} changed the result {role} from {old} to {new_role} {new}"
            )
