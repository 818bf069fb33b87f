"""Graphs with roles, and the captured joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

import torch
from torch import fx

from shardgraph.ir.attributes import ROLE, ROLES
from shardgraph.ir.fake_values import Propagation
from shardgraph.ir.generators import random_choices
from shardgraph.ir.roles import Buffer, Role, Tangent
from shardgraph.ir.shortened_rows import ShortenedRows
from shardgraph.mesh import Mesh
from shardgraph.torch_api import append_node, negated


class UnboundGraph(fx.GraphModule):
    """A graph module that is data: it is rewritten, analysed and interpreted, but has no Python code of its own.

    Generating and compiling code takes as long as all else that happens to a graph. A backend does so once
    (:mod:`shardgraph.runtime.backends`), when the graph is bound; :attr:`code` and ``print_readable`` generate code on
    demand, for reading.
    """

    def recompile(self) -> Any:
        """Do nothing: there is no code to update."""

    @property
    def code(self) -> str:
        """The graph as Python code, generated on access."""
        return self.graph.python_code("self").src

    def forward(self, *args: Any) -> Any:
        """Interpret the graph."""
        return fx.Interpreter(self).run(*args)


def placeholders(gm: fx.GraphModule) -> dict[Role, fx.Node]:
    """The graph's inputs by role, in calling order."""
    return {ROLE.of(node): node for node in gm.graph.nodes if node.op == "placeholder"}


def outputs(gm: fx.GraphModule) -> list[tuple[Role | None, Any]]:
    """The graph's results as ``(role, node or constant)``, in order; a role of None has no meaning outside."""
    node = gm.graph.output_node()
    return list(zip(ROLES.of(node), node.args[0], strict=True))


def set_outputs(gm: fx.GraphModule, results: list[tuple[Role | None, Any]]) -> None:
    """Make ``results`` what the graph returns."""
    node = gm.graph.output_node()
    node.args = (tuple(value for _, value in results),)
    ROLES.set(node, [role for role, _ in results])


def copy_graph(gm: fx.GraphModule) -> UnboundGraph:
    """A copy of the graph with the same nodes, names and roles; attributes are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    return UnboundGraph(gm, graph)


def copy_node(graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any] = lambda read: read) -> fx.Node:
    """``graph.node_copy``: a copy of ``node`` that reads ``value_of`` what the node reads."""
    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    copy = append_node(graph, node.op, node.target, args, kwargs, node.name)
    copy.meta.update(node.meta)
    if node.type is not None:
        copy.type = node.type
    return copy


def add_output(graph: fx.Graph, results: Sequence[tuple[Role | None, Any]]) -> fx.Node:
    """End ``graph`` with ``results``, as ``(role, node of the graph or constant)``."""
    node = graph.output(tuple(value for _, value in results))
    ROLES.set(node, [role for role, _ in results])
    return node


@dataclass(frozen=True)
class OutputAlias:
    """How an output aliases another tensor, so that the view can be recreated outside autograd.

    ``base`` is ``Input(i)``, ``Output(i)`` or ``IntermediateBase(i)``; the output is
    ``base.as_strided(size, stride, offset)``, or the base itself when ``size`` is None. If ``detached``, it requires no
    gradient even if the base does. ``real``: it is of the real and imaginary parts in the memory of a complex base. If
    ``conjugate`` or ``negative``, its values are the other ones of the same memory; of a ``real`` one, ``conjugate``
    says that the base's are.
    """

    base: Role
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    offset: int = 0
    detached: bool = False
    real: bool = False
    conjugate: bool = False
    negative: bool = False

    @property
    def plain(self) -> bool:
        """Whether the output has the values of its memory, as the base's dtype has them."""
        return not (self.real or self.conjugate or self.negative)

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The output, from the base."""
        if self.size is None:
            return base
        if self.real:
            base = torch.view_as_real((base.conj() if self.conjugate else base).resolve_conj())
        view = base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)
        if self.conjugate and not self.real:
            view = view.conj()
        return negated(view) if self.negative else view


@dataclass(frozen=True)
class _Attribute:
    """An attribute of the module ``path``: ``keys[0]``, or ``keys[1]`` of that."""

    path: str
    keys: tuple[str, ...]

    @property
    def fqn(self) -> str:
        """Its name in the model."""
        return ".".join(filter(None, (self.path, *self.keys)))

    def get(self, model: torch.nn.Module) -> Any:
        """Its value on ``model``, None if it has none."""
        return getattr(self._owner(model), self.keys[-1], None)

    def put(self, model: torch.nn.Module, value: Any) -> None:
        """Set it on ``model``."""
        setattr(self._owner(model), self.keys[-1], value)

    def _owner(self, model: torch.nn.Module) -> Any:
        owner: Any = model.get_submodule(self.path)
        for key in self.keys[:-1]:
            owner = getattr(owner, key)
        return owner


@dataclass(frozen=True)
class AttributeSet(_Attribute):
    """An attribute that forward sets to a constant."""

    value: Any

    def repeat(self, model: torch.nn.Module) -> None:
        """Set it on ``model``."""
        self.put(model, self.value)


@dataclass(frozen=True)
class AttributeResult(_Attribute):
    """An attribute that forward sets to tensors of the call, or to containers of them, at ``source``.

    ``number``: a Python number that forward counts up, in the graph a 0-dimensional tensor. ``buffer``: a buffer that
    gets a tensor of its shape and dtype, in the graph the mutation of that buffer.
    """

    number: bool
    buffer: bool
    source: str

    def set(self, model: torch.nn.Module, value: Any) -> None:
        """Set it on ``model`` to a result of a call."""
        self.put(model, value.item() if self.number else value)


@dataclass(frozen=True)
class RowNumber:
    """A number that forward computes from the length of the batch and gives to an operation on elements.

    ``function`` is the operation's name, such as ``"div"``. ``longer`` is the number for a batch of one row more.
    ``also_constant``: elsewhere the same function takes an equal number that does not depend on the rows.
    """

    function: str
    number: float
    longer: float
    also_constant: bool


@dataclass(frozen=True)
class Condition:
    """A value of a call's inputs by which forward took its way, at ``line``.

    ``function`` computes it, a tensor, of the flattened ``inputs`` with these positions. ``key`` is equal for equal
    functions that were asked for at one line, and ``value`` what it was in the call that was captured.
    """

    key: str
    line: str
    value: Any
    function: Callable[..., Any]
    inputs: tuple[int, ...]

    def of(self, leaves: Sequence[Any]) -> Any:
        """The value in a call with these flattened inputs, as numbers; an error's name if it has none there."""
        try:
            with torch.no_grad():
                return self.function(*(leaves[i].detach().clone() for i in self.inputs)).tolist()
        except (RuntimeError, IndexError, ValueError) as error:
            return type(error).__name__


@dataclass(frozen=True)
class Sameness(Condition):
    """Whether two inputs of a call are one tensor."""

    def of(self, leaves: Sequence[Any]) -> bool:
        one, other = (leaves[i] for i in self.inputs)
        return bool(self.function(one, other))


@dataclass(frozen=True)
class Origin:
    """What a graph was traced from: ``code``, Python that was traced through, and ``called``, functions that it calls
    and that were not. ``guards(model)`` are conditions, as :attr:`JointGraph.guards`, as data for JSON.
    """

    code: Sequence[CodeType]
    called: Sequence[Any]
    guards: Callable[..., Any]


@dataclass(eq=False)
class JointGraph:
    """A captured program.

    ``module`` is the forward and backward computation as one FX graph with roles, or the forward alone if nothing
    requires a gradient. ``out_spec`` is the pytree spec of the model's output, and ``aliases`` are the outputs that are
    views of something else, by output index. ``fake_mode`` is the mode of the graph's ``meta["val"]`` tensors.
    ``stored`` is the dtype in which each parameter is stored between steps, by name; in the graph it has the dtype of
    the computation. ``attributes`` are those that forward sets to constants, and ``results`` those that it sets to
    results of the graph: ``out_spec`` is then that of the model's output and a list of their values. ``replaced`` are
    the buffers that forward replaces, rather than writes in place. ``repeats``: after a call, the next one is this
    graph again. ``guards(model)`` makes the conditions under which ``model``, as it is now, is captured as this graph;
    see :class:`shardgraph.torch_api.Guards`. ``rows`` is the length of the batch, dimension 0 of the first input that
    has one, and ``row_numbers()`` are the numbers that forward computes from it, or None if that cannot be told.
    ``conditions`` are those values of inputs by which forward took its way, and ``shortened`` the rows of parameters
    that whoever runs the graph shortens before, in this order.
    ``origin`` is what it was traced from, if that can be told, and ``kept`` its name on disk, if it is there.
    ``placed`` has results of :mod:`shardgraph.passes.placing` for this graph. ``propagations`` have computed values of
    nodes on ranks of a mesh, which all programs on such a mesh share.
    """

    module: fx.GraphModule
    out_spec: Any
    fake_mode: Any
    aliases: dict[int, OutputAlias] = field(default_factory=dict)
    stored: dict[str, torch.dtype] = field(default_factory=dict)
    attributes: tuple[AttributeSet, ...] = ()
    results: tuple[AttributeResult, ...] = ()
    replaced: frozenset[str] = frozenset()
    repeats: bool = True
    guards: Callable[..., Any] | None = None
    rows: int = 0
    row_numbers: Callable[[], list[RowNumber] | None] = lambda: []
    conditions: tuple[Condition, ...] = ()
    shortened: tuple[ShortenedRows, ...] = ()
    origin: Origin | None = None
    kept: str = ""
    placed: dict[Any, Any] = field(default_factory=dict)
    propagations: dict[Mesh, Propagation] = field(default_factory=dict, repr=False)

    def values(self, mesh: Mesh) -> Propagation:
        """Computes the values of new nodes on a rank of ``mesh``."""
        found = self.propagations.get(mesh)
        if found is None or found.fake_mode is not self.fake_mode:
            found = self.propagations[mesh] = Propagation(self.fake_mode, mesh)
        return found

    @property
    def differentiable(self) -> bool:
        """Whether the graph has a backward half."""
        return any(isinstance(role, Tangent) for role in placeholders(self.module))

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The lines at which it chooses by random numbers alone between what it has computed."""
        return random_choices(self.module)

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The buffers, and attributes that are tensors, whose values it reads."""
        inputs = placeholders(self.module).items()
        return frozenset(role.fqn for role, node in inputs if isinstance(role, Buffer) and node.users)

    @property
    def returned(self) -> int:
        """How many leaves the model's output has."""
        return int(self.out_spec.child(0).num_leaves if self.results else self.out_spec.num_leaves)

    def take_guards(self, model: torch.nn.Module) -> Any:
        """The guards, once: what they are made of is released."""
        assert self.guards is not None
        guards, self.guards = self.guards(model), None
        return guards
