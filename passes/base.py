"""The pass interface, and the contract that every pass keeps.

A pass is a frozen dataclass with a ``name``; its options are its fields, so its repr is the code that constructs it,
and a pass pipeline is a tuple of passes. Most passes change graphs one by one in place (:class:`Pass`). A pass that
makes several graphs from one, or needs several together, works on a set of named graphs (:class:`GraphsPass`). The
contract, checked after each pass by :func:`run_on_graphs`:

* every graph is valid (it lints; every value has ``meta["val"]``, and nodes have no metadata besides the attributes of
  :mod:`shardgraph.ir.attributes`);
* a graph's inputs and results keep their roles, and a result that a pass does not own keeps its shape and dtype;
* what one graph of the set takes from another is a result of that graph, with the same shape and dtype;
* the facts that a pass ``requires`` hold, none that it ``excludes`` does, and afterwards those it ``provides`` hold.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from shardgraph.errors import GraphInvariantError, PassOrderError
from shardgraph.ir import Forwarded, Gathered, Gradient, Returned, Role, Saved, SquaredNorm, outputs
from shardgraph.ir.attributes import MADE_BY, REGISTRY, ROLE
from shardgraph.ir.fake_values import Propagation
from shardgraph.mesh import Mesh
from shardgraph.plans.activation_plan import Rules
from shardgraph.plans.plan import ParameterPlan, Plan
from shardgraph.torch_api import is_valid, parts_of_nodes

Graphs = dict[str, fx.GraphModule]
"""Graphs by name. The last part of a name is its kind: ``"forward"``, ``"stage0/forward"``."""


@dataclass(frozen=True)
class Context:
    """The input of passes besides the graph: what does not change, and what passes record for later passes.

    ``plan`` and ``fake_mode`` (in which values of new nodes are computed) do not change, nor does ``stored``: the dtype
    in which each parameter is stored between steps, which may differ from the graph's.

    ``parameters`` is the plan of each parameter by its (first) name, ``shapes`` their shapes as data axes see them:
    whole, or the part that operators use once a pass has split them. ``facts`` are what passes have provided. ``notes``
    are decisions that users should know of. ``sums`` has the operator axes over which a parameter's gradient is still
    partial. ``activations`` has the placement rules of operations by axis, once a pass has assigned them.
    ``batch_norms`` are those of each pipeline stage whose running statistics a step updates. ``values_on`` a mesh, if
    given, computes values for other programs of the graph too.
    """

    plan: Plan
    fake_mode: Any
    parameters: dict[str, ParameterPlan]
    shapes: dict[str, torch.Size]
    stored: Mapping[str, torch.dtype] = field(default_factory=lambda: MappingProxyType({}))
    facts: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    sums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    activations: dict[str, Rules] = field(default_factory=dict)
    batch_norms: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    values_on: Callable[[Mesh], Propagation] | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        fake_mode: Any,
        stored: Mapping[str, torch.dtype] | None = None,
        values_on: Callable[[Mesh], Propagation] | None = None,
    ) -> Context:
        """The context before the first pass, for a model whose parameters have ``shapes``.

        Raises:
            PlanError: the plan does not fit the parameters.
        """
        entries, dtypes = dict(plan.resolve(shapes)), MappingProxyType(dict(stored or {}))
        return cls(plan, fake_mode, entries, dict(shapes), dtypes, values_on=values_on)

    def copy(self, plan: Plan | None = None) -> Context:
        """An independent copy, with ``plan`` if given; the entries that passes record are immutable and shared."""
        records = {name: copy.copy(value) for name, value in vars(self).items() if isinstance(value, (dict, list, set))}
        return replace(self, plan=plan or self.plan, **records)

    def of_graph(self, *facts: str) -> Context:
        """A context that shares these records but has its own facts, for passes on one graph of several."""
        return replace(self, facts={*self.facts, *facts})

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis sizes by name."""
        return dict(self.plan.mesh)

    @cached_property
    def values(self) -> Propagation:
        """Computes the values of new nodes."""
        mesh = self.plan.mesh
        return Propagation(self.fake_mode, mesh) if self.values_on is None else self.values_on(mesh)


class GraphsPass(ABC):
    """A pass on a set of named graphs."""

    name: str
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()

    @abstractmethod
    def run_on(self, graphs: Graphs, context: Context) -> None:
        """Change, add and remove graphs of the set in place."""


class Pass(GraphsPass):
    """A pass that changes each graph of a set by itself."""

    @abstractmethod
    def run(self, gm: fx.GraphModule, context: Context) -> None:
        """Change ``gm`` in place."""

    def run_on(self, graphs: Graphs, context: Context) -> None:
        """Run the pass on every graph."""
        for gm in graphs.values():
            self.run(gm, context)


@dataclass(frozen=True)
class Only(GraphsPass):
    """Runs ``step`` on the graphs of one ``kind`` of a set."""

    kind: str
    step: Pass

    def __post_init__(self) -> None:
        for contract in ("name", "requires", "provides", "excludes"):
            object.__setattr__(self, contract, getattr(self.step, contract))

    def run_on(self, graphs: Graphs, context: Context) -> None:
        """Run the pass on those graphs."""
        for name in of_kind(graphs, self.kind):
            self.step.run(graphs[name], context)


def of_kind(graphs: Mapping[str, fx.GraphModule], kind: str) -> list[str]:
    """The names of the graphs of a kind, in order; ``"recompute/joint"`` is a kind too."""
    return [name for name in graphs if name == kind or name.endswith(f"/{kind}")]


def sibling(name: str, kind: str) -> str:
    """The name of the graph of another kind beside ``name``: ``"stage0/backward"`` beside ``"stage0/forward"``."""
    return name[: name.rfind("/") + 1] + kind


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass], context: Context) -> None:
    """Run ``passes`` in order on one graph, with the checks and errors of :func:`run_on_graphs`."""
    run_on_graphs({"": gm}, passes, context)


def run_on_graphs(graphs: Graphs, passes: Sequence[GraphsPass], context: Context) -> None:
    """Run ``passes`` in order on a set of graphs, which they change, checking the contract before and after each.

    Raises:
        PassOrderError: a pass requires what no earlier pass provided, or excludes what one did.
        GraphInvariantError: a pass left a graph invalid, or with an input that no other graph returns.
    """
    before = {name: _Snapshot.of(gm) for name, gm in graphs.items()}
    for step in passes:
        _check_order(step, context.facts)
        step.run_on(graphs, context)
        after = {name: _Snapshot.of(gm) for name, gm in graphs.items()}
        for name, gm in graphs.items():
            same = before[name] if name in before and before[name].gm is gm else None
            changed = same is None or same.nodes != after[name].nodes
            if same is not None and changed:
                _mark_new(step, gm, {node.name for node in same.nodes[::4]})
            _check_graph(step, gm, changed)
            if same is not None:
                _check_results(step, same.results, after[name].results)
            for check in _checks:
                check(step, gm, context)
        _check_given(step, graphs)
        context.facts.update(step.provides)
        before = after


@dataclass(frozen=True)
class _Snapshot:
    """What tells whether a pass changed a graph: most passes leave most graphs alone."""

    gm: fx.GraphModule
    nodes: list[Any]
    results: list[tuple[Role | None, Any]]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> _Snapshot:
        # One flat list: ten thousand tuples for every pass would keep the garbage collector busy.
        nodes = parts_of_nodes(gm.graph)
        # Rewrite passes change the form of gradients; their shape is checked against the shard instead.
        # Squared norms are measurements that passes add, and drop with what they are of.
        results = [(role, value) for role, value in outputs(gm) if not isinstance(role, SquaredNorm)]
        forms = [(role, None if isinstance(role, Gradient) else _form(value)) for role, value in results]
        return cls(gm, nodes, forms)


Check = Callable[[GraphsPass, fx.GraphModule, Context], None]
_checks: list[Check] = []


@contextmanager
def checking(check: Check) -> Iterator[None]:
    """Within, also run ``check`` on every graph after every pass: for checks too slow for every compilation."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


def _check_order(step: GraphsPass, facts: set[str]) -> None:
    if missing := step.requires - facts:
        raise PassOrderError(
            f"the pass {step.name!r} requires {', '.join(sorted(missing))}, which no pass before it provides; "
            f"so far: {', '.join(sorted(facts)) or 'nothing'}"
        )
    if clash := step.excludes & facts:
        raise PassOrderError(
            f"the pass {step.name!r} must run before {', '.join(sorted(clash))} is provided: move it earlier"
        )


def _form(value: Any) -> Any:
    """The shape and dtype of a tensor; anything else is its own form."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else value
    return (tensor.shape, tensor.dtype) if isinstance(tensor, torch.Tensor) else tensor


def _mark_new(step: GraphsPass, gm: fx.GraphModule, known: set[str]) -> None:
    for node in gm.graph.nodes:
        if node.name not in known:
            MADE_BY.set(node, MADE_BY.get(node, step.name))


def _check_graph(step: GraphsPass, gm: fx.GraphModule, changed: bool) -> None:
    try:
        if changed and not is_valid(gm):
            gm.graph.lint()  # which says why
    except RuntimeError as error:
        raise GraphInvariantError(f"the pass {step.name!r} left an invalid graph: {error}") from error
    known = frozenset(REGISTRY)
    for node in gm.graph.nodes:
        meta = node.meta
        if "val" not in meta and node.op == "call_function":
            raise GraphInvariantError(f"the pass {step.name!r} made the node {node.name!r} without meta['val']")
        if not known.issuperset(meta):
            unknown = min(node.meta.keys() - REGISTRY.keys())
            raise GraphInvariantError(
                f"the pass {step.name!r} wrote meta[{unknown!r}] of the node {node.name!r}, which is no "
                "attribute: register it in shardgraph.ir.attributes"
            )


def _check_results(
    step: GraphsPass, before: list[tuple[Role | None, Any]], after: list[tuple[Role | None, Any]]
) -> None:
    for (role, old), (new_role, new) in zip(before, after, strict=True):
        if role != new_role or old != new:
            raise GraphInvariantError(
                f"the pass {step.name!r} changed the result {role} from {old} to {new_role} {new}"
            )


def _check_given(step: GraphsPass, graphs: Graphs) -> None:
    """Check that what a graph takes from other graphs of the set is a result of one, with the same shape and dtype."""
    results: dict[str, dict[Role | None, Any]] = {}
    for name, gm in graphs.items():
        for node in gm.graph.find_nodes(op="placeholder"):
            givers = list(_givers(name, role := ROLE.of(node)))
            if not givers or not graphs.keys() >= set(givers):
                continue
            for giver in givers:
                if giver not in results:
                    results[giver] = {role: _form(value) for role, value in outputs(graphs[giver])}
            forms = [results[giver][role] for giver in givers if role in results[giver]]
            if _form(node) not in forms:
                raise GraphInvariantError(
                    f"the pass {step.name!r} left {name!r} taking {role} as {_form(node)}, and "
                    f"{' and '.join(map(repr, givers))} gives it as {', '.join(map(str, forms)) or 'nothing'}"
                )


def _givers(name: str, role: Role) -> Iterator[str]:
    """The names of the graphs one of which returns the value that graph ``name`` takes for ``role``."""
    stage, kind = name.split("/")[0], name.rpartition("/")[2]
    if isinstance(role, Saved):
        yield sibling(name, "forward")
        if kind == "weights":
            yield sibling(name, "inputs")
    elif isinstance(role, Gathered):
        yield f"{stage}/gather"
    elif isinstance(role, (Forwarded, Returned)) and stage.startswith("stage"):
        before = -1 if isinstance(role, Forwarded) else 1
        yield f"stage{int(stage.removeprefix('stage')) + before}/{kind}"
