"""Attributes of nodes: every fact about a node that passes write and read, with its type and propagation.

An attribute is stored in ``node.meta`` under its ``key``, where ``fx`` copies it with the node. When new nodes are
derived from old ones in any other way (:class:`Change`), :func:`carried` returns the attributes that also hold for the
new ones. Anything in ``meta`` that is not an attribute is an error there, so that nothing is lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, cast

import torch
from torch import fx

from shardgraph.errors import GraphInvariantError
from shardgraph.ir.roles import Parameter

T = TypeVar("T")

Labels = Mapping["Attribute[Any]", Any]
"""Attributes and their values."""

Modules = Mapping[str, tuple[str, Any]]
"""Nested modules, as torch records them."""


class Change(Enum):
    """How new nodes are derived from an old one."""

    COPIED = "the same operation, in another graph or another place"
    PASSED = "an input of another graph stands for the value"
    REWRITTEN = "other operations compute the same value"
    DIVIDED = "a rank does a part of the operation"
    CHUNKED = "the operation is done for some rows at a time"
    MERGED = "one node has the sum of several values"


_ALL = frozenset(Change)
_COMPUTED = frozenset({Change.COPIED, Change.REWRITTEN, Change.DIVIDED, Change.CHUNKED})
_WHOLE = _COMPUTED - {Change.CHUNKED}
_SINGLE = _ALL - {Change.MERGED}
_COPIED = frozenset({Change.COPIED})
_PASSED = _COPIED | {Change.PASSED}


class Attribute(Generic[T]):
    """A fact about a node.

    ``kept`` are the changes after which it holds for the new nodes; after others it is dropped, and the code that makes
    the change writes the new value. A copy has all attributes.
    """

    def __init__(self, key: str, type_: type | tuple[type, ...], meaning: str, kept: frozenset[Change]) -> None:
        assert key not in REGISTRY and Change.COPIED in kept
        self.key, self.type, self.meaning, self.kept = key, type_, meaning, kept
        REGISTRY[key] = self

    def __repr__(self) -> str:
        return f"<attribute {self.key}: {self.meaning}>"

    def __contains__(self, node: fx.Node) -> bool:
        return self.key in node.meta

    def of(self, node: fx.Node) -> T:
        """The attribute of a node; GraphInvariantError if it has none."""
        if self.key not in node.meta:
            raise GraphInvariantError(f"the node {node.name!r} has no {self.key!r}, {self.meaning}")
        return cast(T, node.meta[self.key])

    def get(self, node: fx.Node, default: Any = None) -> Any:
        """The attribute of a node, or ``default``."""
        return node.meta.get(self.key, default)

    def set(self, node: fx.Node, value: T) -> None:
        """Write the attribute of a node; TypeError if ``value`` has another type."""
        if not isinstance(value, self.type):
            raise TypeError(f"{self.key!r} of {node.name!r} is {self.meaning}, not {value!r}")
        node.meta[self.key] = value


@dataclass(frozen=True)
class Part:
    """The slice ``cut`` (dim, start, end and step) of the value of a captured ``node``, viewed in ``shape``."""

    node: str
    shape: tuple[int, ...]
    cut: tuple[Any, ...]

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The part of ``value``, which is the node's."""
        part: torch.Tensor = torch.ops.aten.slice.Tensor(value.reshape(self.shape), *self.cut)
        return part


REGISTRY: dict[str, Attribute[Any]] = {}
"""All attributes by key."""

# The meaning of a value
ROLE = Attribute[Any]("role", object, "what an input means (shardgraph.ir.roles)", _COPIED)
ROLES = Attribute[list[Any]]("roles", list, "what each of a graph's results means, on its output", _COPIED)
SOURCE = Attribute[str]("source", str, "the user's line that it serves, as file:line", _ALL)
SUBJECT = Attribute[str]("subject", str, "the value that a node made by a pass moves or reduces, in words", _SINGLE)
MADE_BY = Attribute[str]("made_by", str, "the pass that made the node; captured nodes have none", _WHOLE)

# Equality with values of the captured graph, for comparisons
EQUALS = Attribute[str]("equals", str, "the captured node whose value it has", _PASSED)
PART_OF = Attribute[Part]("part_of", Part, "the part of a captured value that it is, in some shape", _PASSED)
SHARD_OF = Attribute[str]("shard_of", str, "the parameter whose shard it is on every rank", _PASSED)
PADDED = Attribute[str]("padded", str, "the parameter that it is, but for rows of padding after it", _PASSED)
PADDED_SHARD = Attribute[str]("padded_shard", str, "the parameter whose shard it is, but for such rows", _PASSED)
GIVEN_BY = Attribute[str]("given_by", str, "the node of another graph whose value an input is", _COPIED)
MEAN_OF = Attribute[str]("mean_of", str, "the captured node whose mean over ranks it has", _COPIED)
CAST_OF = Attribute[str]("cast_of", str, "the captured gradient that it casts", _COPIED)
PLACEMENTS = Attribute[Mapping[str, Any]](
    "placements", Mapping, "how it lies along mesh axes of operators, by axis", _PASSED | {Change.REWRITTEN}
)

ROW_ORDER = Attribute[tuple[int, int]](
    "row_order",
    tuple,
    "of how many sequences, on how many ranks, its rows are, if those of a rank are together",
    _PASSED,
)

# Decisions
RECOMPUTE = Attribute[bool]("recomputed", bool, "whether backward recomputes it, or it is saved", _WHOLE)
OFFLOADED_BY = Attribute[frozenset[str]](
    "offloaded_by", frozenset, "the annotations by which it is saved in host memory, as patterns", _COMPUTED
)
SYNCHRONIZED = Attribute[bool](
    "synchronized", bool, "whether a batch norm, or a statistic, is over the rows of all data-parallel ranks", _WHOLE
)
UNSCALED = Attribute[str]("unscaled", str, "a product that could be one of float8 values, and why it is not", _WHOLE)
SCORES = Attribute[int]("scores", int, "which loss's scores it normalises, in the order of the graph", _WHOLE)
CHUNK = Attribute[int]("chunk", int, "the number of the chunk of rows that it is done for", _WHOLE)

# Parameters and gradients
MEMORY_KIND = Attribute[str](
    "memory_kind", str, "what its memory counts as: 'gathered' for parameters, 'saved' for backward", _COMPUTED
)
REDUCES = Attribute[str]("reduces", str, "the parameter whose gradient it reduces", _COPIED)
AVERAGES = Attribute[tuple[str, ...]]("averages", tuple, "the buffers whose values on all ranks it combines", _COPIED)
ON_HOST = Attribute[bool]("on_host", bool, "whether an input is in host memory", _COPIED)
ON_DISK = Attribute[bool]("on_disk", bool, "whether host memory of an input is a mapped file", _COPIED)
IN_PLACE = Attribute[bool]("in_place", bool, "whether it may give its result in the memory of its operand", _COPIED)
AXIS = Attribute[str]("axis", str, "the mesh axis of a collective that is bound to a process group", _COPIED)

# Those of torch
VALUE = Attribute[Any]("val", object, "the value on fake tensors", _PASSED)
MODULES = Attribute[Modules]("nn_module_stack", Mapping, "the modules that it is in, outermost first", _SINGLE)
FORWARD_MODULES = Attribute[Modules]("fwd_nn_module_stack", Mapping, "the modules whose derivative it is in", _SINGLE)
SEQUENCE = Attribute[int]("seq_nr", int, "the number that an operation and its derivative have in common", _COMPUTED)
STACK_TRACE = Attribute[str]("stack_trace", (str, type(None)), "the user's lines, as Python has them", _ALL)
PARTITIONER_TAG = Attribute[str]("partitioner_tag", str, "forward or backward, by the tracer", _COMPUTED)


def carried(change: Change, *nodes: fx.Node) -> dict[Attribute[Any], Any]:
    """The attributes that hold after ``change`` for nodes derived from ``nodes``; if several have one, the first's.

    GraphInvariantError if a node has something in ``meta`` that is not an attribute.
    """
    attributes: dict[Attribute[Any], Any] = {}
    for node in nodes:
        for key, value in node.meta.items():
            if key not in REGISTRY:
                raise GraphInvariantError(f"the node {node.name!r} has meta[{key!r}], which is no attribute")
            if change in REGISTRY[key].kept:
                attributes.setdefault(REGISTRY[key], value)
    return attributes


def captured_name(node: fx.Node) -> str | None:
    """The captured node whose value ``node`` has: by its attribute, or itself if no pass has made it."""
    name: str | None = EQUALS.get(node, None if node in MADE_BY else node.name)
    return name


def write(node: fx.Node, labels: Labels) -> None:
    """Write attributes of a node; TypeError if one has another type."""
    for attribute, value in labels.items():
        attribute.set(node, value)


def new_placeholder(graph: fx.Graph, name: str, role: Any, like: fx.Node) -> fx.Node:
    """An input of ``graph`` that stands for the value of ``like``, a node of another graph."""
    node = graph.placeholder(name)
    node.target = node.name  # code is generated from targets, and fx makes names alone unique
    stored = ROLE.get(like)
    meaning: Labels = {} if like in MADE_BY else {EQUALS: like.name}
    if isinstance(stored, Parameter):
        meaning = {SHARD_OF: stored.fqn}
    write(node, {**meaning, **carried(Change.PASSED, like), ROLE: role, GIVEN_BY: like.name})
    return node


def forget_unknown(gm: fx.GraphModule) -> None:
    """Drop entries of ``meta`` from a tracer that are not attributes, or that are empty."""
    for node in gm.graph.nodes:
        node.meta = {
            key: value for key, value in node.meta.items() if key in REGISTRY and (value is not None or key == "val")
        }
