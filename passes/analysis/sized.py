"""A program whose shapes are polynomials in batch, sequence and mesh sizes instead of numbers.

The same program captured at a few batch sizes and sequence lengths determines every dimension as
``a + b * batch + c * sequence + d * batch * sequence`` with integer coefficients. The dependence of parameter shards on
the mesh is known from the passes that shard them. FLOPs, bytes and live memory follow, by the same analyses that count
them in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from sympy.polys.rings import PolyElement, ring
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph import ir
from shardgraph.errors import ShardGraphError
from shardgraph.ir import Parameter, Role, copy_graph, outputs, placeholders
from shardgraph.ir.attributes import MEMORY_KIND, REDUCES, SUBJECT
from shardgraph.mesh import Mesh
from shardgraph.passes.base import Context

Point = tuple[int, int]
"""Batch size and sequence length of one capture; the length is 0 for a model without sequences."""


class NotSizedError(ShardGraphError):
    """The sizes of a program are not polynomials in batch and sequence."""


class Sizes:
    """The ring of polynomials in batch, sequence, mesh axes and the rows of shards, and their sympy symbols."""

    def __init__(self, mesh: Mesh, cut: Sequence[tuple[int, str]]) -> None:
        """``cut`` are the rows of sharded parameters, each with its mesh axis."""
        self.batch, self.sequence = sympy.symbols("batch sequence", positive=True, integer=True)
        self.axes = {axis: sympy.Symbol(axis, positive=True, integer=True) for axis, _ in mesh}
        self._cut = list(dict.fromkeys(cut))
        longest = [sympy.ceiling(sympy.Integer(rows) / self.axes[axis]) for rows, axis in self._cut]
        self._meaning = [self.batch, self.sequence, *self.axes.values(), *longest]
        names = [f"x{i}" for i in range(len(self._meaning))]
        self.ring, *self._generators = ring(names, sympy.ZZ)
        self._expressions: dict[PolyElement, sympy.Expr] = {}

    def constant(self, value: int) -> PolyElement:
        """A constant size."""
        return self.ring(value)

    def axis(self, name: str) -> PolyElement:
        """The size of a mesh axis."""
        return self._generators[2 + list(self.axes).index(name)]

    def longest(self, rows: int, axis: str) -> PolyElement:
        """The rows of the longest shard of ``rows`` rows sharded over an axis."""
        return self._generators[2 + len(self.axes) + self._cut.index((rows, axis))]

    def expression(self, size: Any) -> sympy.Expr:
        """A polynomial as a sympy expression; numbers are converted too."""
        if not isinstance(size, PolyElement):
            return sympy.sympify(size)
        if size not in self._expressions:
            self._expressions[size] = size.as_expr(*self._meaning)
        return self._expressions[size]

    def through(self, values: Sequence[int], points: Sequence[Point]) -> PolyElement:
        """The polynomial through ``values`` at ``points``: four points, or two without a sequence, and one to check.

        Raises:
            NotSizedError: there is no such polynomial.
        """
        if len(set(values)) == 1:
            return self.ring(values[0])
        (b0, s0), (b1, _) = points[:2]
        by_batch = (values[1] - values[0]) // (b1 - b0)
        both = by_sequence = 0
        if s0:
            s1 = points[2][1]
            both = (values[3] - values[2] - values[1] + values[0]) // ((b1 - b0) * (s1 - s0))
            by_batch -= both * s0
            by_sequence = (values[2] - values[0]) // (s1 - s0) - both * b0
        rest = values[0] - by_batch * b0 - by_sequence * s0 - both * b0 * s0
        for (b, s), value in zip(points, values, strict=True):
            if rest + by_batch * b + by_sequence * s + both * b * s != value:
                raise NotSizedError(
                    f"a size of the program is {', '.join(map(str, values))} at (batch, sequence) of "
                    f"{', '.join(map(str, points))}: no sum of multiples of batch, sequence and their product"
                )
        batch, sequence = self._generators[:2]
        return rest + by_batch * batch + by_sequence * sequence + both * batch * sequence


class SizedTensor(torch.Tensor):
    """A placeholder for a value of a program; its ``shape`` and ``nbytes`` are polynomials."""

    sizes: tuple[Any, ...]
    held: _SizedStorage
    place: torch.device

    @staticmethod
    def of(value: torch.Tensor, sizes: tuple[Any, ...], held: _SizedStorage) -> SizedTensor:
        """Like ``value``, with these sizes and this storage."""
        tensor = torch.empty(0, dtype=value.dtype, device="meta").as_subclass(SizedTensor)
        tensor.sizes, tensor.held, tensor.place = sizes, held, value.device
        return tensor

    # The analyses read these; torch's own signatures promise numbers.

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.sizes

    @property
    def device(self) -> Any:  # type: ignore[override]
        return self.place

    @property
    def nbytes(self) -> Any:  # type: ignore[override]
        return self.numel() * self.element_size()

    def numel(self) -> Any:
        return math.prod(self.sizes)

    def untyped_storage(self) -> Any:
        return self.held


@dataclass(frozen=True, eq=False)
class _SizedStorage:
    """One storage, shared by all values in it."""

    real: torch.UntypedStorage  # kept alive, so that no later storage has its address
    size: Any

    def nbytes(self) -> Any:
        return self.size


def size_program(
    samples: Sequence[Mapping[str, fx.GraphModule]], points: Sequence[Point], sizes: Sizes, context: Context
) -> dict[str, fx.GraphModule]:
    """Copies of the first sample's graphs whose values are :class:`SizedTensor`.

    ``samples`` are the graphs of one program by name, captured at each of ``points``.

    Raises:
        NotSizedError: the samples are not the same operations, or a size is no polynomial.
    """
    saved: dict[Role, _Part] = {}
    storages: dict[int, _SizedStorage] = {}
    sized: dict[str, fx.GraphModule] = {}
    for name, first in samples[0].items():
        copy = copy_graph(first)
        columns = [_in_order_of(first, each[name]) for each in samples]
        if any([n.target for n in column] != [n.target for n in columns[0]] for column in columns):
            raise NotSizedError("the model runs other operations at another batch size or sequence length")
        parts = _parts(first, context, sizes, saved)
        for node, same in zip(copy.graph.nodes, zip(*columns, strict=True), strict=True):
            if "val" in node.meta:
                node.meta["val"] = _sized([n.meta["val"] for n in same], points, sizes, parts.get(same[0]), storages)
        saved |= {role: parts[value] for role, value in outputs(first) if role is not None and value in parts}
        sized[name] = copy
    return sized


def _in_order_of(first: fx.GraphModule, gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a graph in the order of those of the first sample, if they have the same names.

    What is scheduled by times and sizes may come elsewhere in a program of other sizes.
    """
    named = {node.name: node for node in gm.graph.nodes}
    names = [node.name for node in first.graph.nodes]
    return [named[name] for name in names] if named.keys() == set(names) else list(gm.graph.nodes)


def _sized(
    values: Sequence[Any],
    points: Sequence[Point],
    sizes: Sizes,
    part: _Part | Sequence[_Part | None] | None,
    storages: dict[int, _SizedStorage],
) -> Any:
    """The sized value for a value's samples; ``storages`` are those of earlier values."""
    if isinstance(part, list):
        return [_sized(each, points, sizes, own, storages) for *each, own in zip(*values, part, strict=True)]

    def sized(leaf: Any, *others: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        column = (leaf, *others)
        dims = tuple(sizes.through(each, points) for each in zip(*(t.shape for t in column), strict=True))
        stored = dims if part is None else (part.rows, *dims[1:])
        real = leaf.untyped_storage()
        if real._cdata not in storages:
            held = [t.untyped_storage().nbytes() for t in column]
            dense = all(t.numel() * t.element_size() == size for t, size in zip(column, held, strict=True))
            size = math.prod(stored, start=leaf.element_size()) if dense else sizes.through(held, points)
            storages[real._cdata] = _SizedStorage(real, size)
        shape = stored if part is not None and part.shard else dims
        return SizedTensor.of(leaf, shape, storages[real._cdata])

    return pytree.tree_map(sized, *values)


class _Part(NamedTuple):
    """A value whose rows depend on the mesh: a shard or a bucket, or an unsharded parameter padded to equally long
    shards, of which the memory alone depends on it.
    """

    rows: PolyElement
    shard: bool


def _parts(
    gm: fx.GraphModule, context: Context, sizes: Sizes, saved: Mapping[Role, _Part]
) -> dict[fx.Node, _Part | list[_Part | None]]:
    """The values whose rows depend on the mesh; of what is unpacked of a bucket, those of each tensor."""
    shards, wholes = {}, {}
    for fqn, entry in context.parameters.items():
        if entry.shard_axis is not None:
            axis = context.plan.axes[entry.shard_axis]
            longest = sizes.longest(context.shapes[fqn][0], axis)
            shards[fqn], wholes[fqn] = _Part(longest, True), _Part(longest * sizes.axis(axis), False)
    parts: dict[fx.Node, Any] = {}
    for role, node in placeholders(gm).items():
        if isinstance(role, Parameter) and role.fqn in shards:
            parts[node] = shards[role.fqn]
        elif role in saved:
            parts[node] = saved[role]
    buckets: set[fx.Node] = set()
    for node in gm.graph.nodes:
        name = REDUCES.get(node) or (SUBJECT.get(node) if MEMORY_KIND.get(node) == "gathered" else None)
        source = parts.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is ir.buckets.pack:
            (start,) = node.users
            among = {ir.ALL_GATHER: shards, ir.REDUCE_SCATTER: wholes}.get(start.target, {})
            packed = zip(node.args[0], _names(node), strict=True)
            parts[node] = _Part(sum(_elements(each, among.get(name), sizes) for each, name in packed), True)
            buckets.add(node)
        elif node.args and node.args[0] in buckets:
            parts[node] = _of_bucket(node, source, sizes, shards, wholes)
            if not isinstance(parts[node], list):
                buckets.add(node)
        elif isinstance(source, list):
            parts[node] = source[node.args[1]]
        elif name not in shards or node in parts or node.target is ir.SQUARED_NORM:
            continue
        elif node.target in (ir.REDUCE_SCATTER, ir.local_chunk, ir.trim_shard):
            parts[node] = shards[name]
        elif node.target is ir.ALL_GATHER or (node.target is ir.pad_shard and source is None):
            parts[node] = wholes[name]
        elif source is not None and source.shard:
            parts[node] = source  # a wait, an all-reduce over replicas, a division: the shape of the operand
    return {node: part for node, part in parts.items() if part is not None}


def _of_bucket(
    node: fx.Node, bucket: Any, sizes: Sizes, shards: Mapping[str, _Part], wholes: Mapping[str, _Part]
) -> Any:
    """What an operation on a bucket gives: another, or the parts of the tensors that are unpacked."""
    if node.target is ir.ALL_GATHER:
        return _Part(bucket.rows * sizes.axis(ir.group_of(node)), True)
    if node.target is ir.REDUCE_SCATTER:
        return _Part(bucket.rows.exquo(sizes.axis(ir.group_of(node))), True)
    if node.target is ir.buckets.unpack_parts:
        return [wholes.get(name) for name in _names(node)]
    if node.target is ir.buckets.unpack:
        scattered = node.args[0].meta["val"].shape != ir.buckets.packing(node).meta["val"].shape
        return [shards.get(name) if scattered else None for name in _names(node)]
    return bucket


def _names(node: fx.Node) -> list[str]:
    """The parameters in a bucket, in order."""
    while node.target not in (ir.buckets.unpack, ir.buckets.unpack_parts):
        node = next(iter(node.users))
    names = {item.args[1]: str(REDUCES.get(item) or SUBJECT.get(item)) for item in node.users}
    return [names[i] for i in range(len(names))]


def _elements(tensor: fx.Node, part: _Part | None, sizes: Sizes) -> PolyElement:
    """The elements of a tensor with the rows of a part; without one it is the same on every mesh."""
    rows, *others = tensor.meta["val"].shape or (1,)
    return (sizes.constant(rows) if part is None else part.rows) * math.prod(others)
