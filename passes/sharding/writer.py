"""Writing a graph over local parts: operations with the values that they have, and changes of placement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph import ir
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, cut_of, is_cut, local_shape

aten = torch.ops.aten


class Writer:
    """Appends operations to ``graph``, computing the value of each from those of its arguments.

    ``axis`` is the mesh axis along which there are ``parts`` ranks. ``meta`` is what new nodes are labelled with.
    """

    maker: ClassVar[str] = "shard-operators"
    """The pass that new nodes are of."""

    def __init__(self, graph: fx.Graph, fake_mode: Any, axis: str, parts: int) -> None:
        self.graph, self.fake_mode, self.axis, self.parts = graph, fake_mode, axis, parts
        self.meta: Mapping[str, Any] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One operation; its value is computed on the values of its arguments."""
        return self._append(target, args, kwargs, self._value(target, args, kwargs))

    def again(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The operation of ``node``, under its name, on other arguments."""
        return self.named(node.name, node.target, args, kwargs)

    def named(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """One operation under a name of the caller's."""
        return self._append(target, args, kwargs, self._value(target, args, kwargs), name)

    def symbolic(self, node: fx.Node, tensor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """What ``node`` does along another axis, on another tensor; it gives a tensor of ``shape``."""
        tensor = self.contiguous(tensor) if ir.is_collective(node) else tensor
        value = self.empty(shape, tensor.meta["val"])
        copy = self._append(node.target, (tensor, *node.args[1:]), {}, value, node.name)
        if "axis" in node.meta:
            copy.meta["axis"] = node.meta["axis"]
        return copy

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        given, named = pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], (args, kwargs))
        with self.fake_mode:
            return target(*given, **named)

    def placeholder(self, node: fx.Node, placement: Placement) -> fx.Node:
        """A copy of a placeholder or constant whose value lies so."""
        copy, value = self.graph.node_copy(node), node.meta.get("val")
        if is_cut(placement):
            copy.meta["val"] = self.empty(local_shape(placement, value.shape, self.parts), value)
        elif node.op == "get_attr" and isinstance(value, torch.Tensor):  # its value is of no mode, or of another
            copy.meta["val"] = self.empty(tuple(value.shape), value)
        return copy

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A value of another shape."""
        with self.fake_mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def contiguous(self, tensor: fx.Node) -> fx.Node:
        """A tensor whose elements lie in order, as collectives want them."""
        if tensor.meta["val"].is_contiguous():
            return tensor
        return self.call(aten.clone.default, tensor, memory_format=torch.contiguous_format)

    def laid_out(self, tensor: fx.Node, like: torch.Tensor) -> fx.Node:
        """The tensor in the memory order of another: what random numbers are drawn in."""
        value = tensor.meta["val"]
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        if order == sorted(range(value.dim()), key=value.stride, reverse=True):
            return tensor
        dense = self.contiguous(self.call(aten.permute.default, tensor, order))
        return self.call(aten.permute.default, dense, [order.index(dim) for dim in range(value.dim())])

    def view(self, tensor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """The elements in another shape, copied where they do not lie in order."""
        if tuple(tensor.meta["val"].shape) == tuple(shape):
            return tensor
        return self.call(aten.view.default, self.contiguous(tensor), list(shape))

    def _append(self, target: Any, args: Any, kwargs: Any, value: Any, name: str = "") -> fx.Node:
        # What is new has the axis in its name, so that it never takes the name of what was there.
        name = name or f"{self.axis}_{target.__name__.partition('.')[0]}"
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(self.meta)
        node.meta["val"] = value
        return node

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: fx.Node, operation: str = "sum") -> fx.Node:
        """What all ranks' tensors come to."""
        return self._collective(ir.ALL_REDUCE, (operation, self.axis), tensor, tuple(tensor.meta["val"].shape))

    def all_gather(self, tensor: fx.Node) -> fx.Node:
        """The ranks' tensors, one after the other along dim 0."""
        rows, *rest = tensor.meta["val"].shape
        return self._collective(ir.ALL_GATHER, (self.parts, self.axis), tensor, (rows * self.parts, *rest))

    def reduce_scatter(self, tensor: fx.Node) -> fx.Node:
        """This rank's rows of the sum."""
        rows, *rest = tensor.meta["val"].shape
        return self._collective(ir.REDUCE_SCATTER, ("sum", self.parts, self.axis), tensor, (rows // self.parts, *rest))

    def all_to_all(self, tensor: fx.Node) -> fx.Node:
        """Row ``r`` of every rank's tensor, of which each has a row for every rank."""
        splits = [1] * self.parts
        return self._collective(ir.ALL_TO_ALL, (splits, splits, self.axis), tensor, tuple(tensor.meta["val"].shape))

    def send(self, tensor: fx.Node) -> fx.Node:
        """Start to send a tensor to the next rank of the ring; :meth:`wait` gives that of the rank before."""
        return self._start(ir.send, (self.axis,), tensor, tuple(tensor.meta["val"].shape))

    def wait(self, start: fx.Node) -> fx.Node:
        """What a started collective gives."""
        value = start.meta["val"]
        return self._append(ir.WAIT, (start,), {}, self.empty(tuple(value.shape), value))

    def _start(self, target: Any, rest: tuple[Any, ...], tensor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        tensor = self.contiguous(tensor)
        start = self._append(target, (tensor, *rest), {}, self.empty(shape, tensor.meta["val"]))
        start.meta["axis"] = self.axis
        return start

    def _collective(self, target: Any, rest: tuple[Any, ...], tensor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        return self.wait(self._start(target, rest, tensor, shape))

    # -- placements --------------------------------------------------------------------------------

    def place(self, tensor: fx.Node, before: Placement, after: Placement, shape: torch.Size) -> fx.Node:
        """Bring a tensor of global ``shape`` from one placement to another."""
        if before == after:
            return tensor
        if before == REPLICATE:
            return self.first_only(tensor) if after == PARTIAL else self.part(tensor, after)
        if before == PARTIAL:
            return self.all_reduce(tensor) if after == REPLICATE else self._scatter(tensor, after)
        if after == REPLICATE:
            return self._gather(tensor, before, shape)
        if cut_of(before)[0] == cut_of(after)[0]:
            return self.part(self._gather(tensor, before, shape), after)
        return self._exchange(tensor, before, after, shape)

    def gradient(self, placement: Placement) -> Placement:
        """How the gradient of a parameter lies that lies as ``placement``."""
        return placement

    def part(self, tensor: fx.Node, cut: Placement, back: int = 0) -> fx.Node:
        """This rank's part of a tensor that every rank has, or that of the rank ``back`` places before it."""
        dim, count = cut_of(cut)
        with self.fake_mode:
            value = ir.take_part(tensor.meta["val"], dim, count, self.parts, 0)
        return self._append(ir.local_part, (tensor, dim, count, self.axis, *([back] if back else [])), {}, value)

    def first_only(self, tensor: fx.Node) -> fx.Node:
        """A tensor that every rank has, as the sum of what the ranks then hold."""
        value = tensor.meta["val"]
        return self._append(ir.first_only, (tensor, self.axis), {}, self.empty(tuple(value.shape), value))

    def first_row(self, rows: int) -> fx.Node:
        """The number of this rank's first row where every rank has ``rows``."""
        return self._append(ir.first_row, (rows, self.axis), {}, 0)

    def from_later(self, steps: int) -> fx.Node:
        """1 on the ranks to which what is sent ``steps`` places round the ring comes from a later rank, 0 on others."""
        return self._append(ir.from_later, (steps, self.axis), {}, 0)

    def _gather(self, tensor: fx.Node, before: Placement, shape: torch.Size) -> fx.Node:
        dim, count = cut_of(before)
        run = shape[dim] // count // self.parts
        gathered = self.all_gather(self.view(tensor, (1, *tensor.meta["val"].shape)))
        apart = self.view(gathered, (self.parts, math.prod(shape[:dim]) * count, run, math.prod(shape[dim + 1 :])))
        return self.view(self.call(aten.permute.default, apart, [1, 0, 2, 3]), tuple(shape))

    def _scatter(self, tensor: fx.Node, after: Placement) -> fx.Node:
        shape = tensor.meta["val"].shape
        dim, count = cut_of(after)
        run = shape[dim] // count // self.parts
        apart = self.view(tensor, (math.prod(shape[:dim]) * count, self.parts, run, math.prod(shape[dim + 1 :])))
        mine = self.reduce_scatter(self.call(aten.permute.default, apart, [1, 0, 2, 3]))
        return self.view(mine, local_shape(after, shape, self.parts))

    def _exchange(self, tensor: fx.Node, before: Placement, after: Placement, shape: torch.Size) -> fx.Node:
        """Another dimension is cut: every rank sends each other its part of what it has."""
        (old, had), (new, gets) = cut_of(before), cut_of(after)
        local = tensor.meta["val"].shape
        run = shape[new] // gets // self.parts
        sizes = (math.prod(local[:new]) * gets, self.parts, run, math.prod(local[new + 1 :]))
        parcels = self.call(aten.permute.default, self.view(tensor, sizes), [1, 0, 2, 3])
        received = self.all_to_all(parcels)
        whole = local_shape(after, shape, self.parts)
        run = shape[old] // had // self.parts
        apart = self.view(received, (self.parts, math.prod(whole[:old]) * had, run, math.prod(whole[old + 1 :])))
        return self.view(self.call(aten.permute.default, apart, [1, 0, 2, 3]), whole)
