"""A step whose graphs are run node by node, and what was not finite in it on this rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from shardgraph import ir, torch_api
from shardgraph.runtime.executor import Bound
from shardgraph.torch_api import pytree

_UNWRITTEN = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
"""Operations whose values are whatever the memory held."""


@dataclass(frozen=True)
class Value:
    """What is not finite in a value: NaN, infinities, or both."""

    nan: bool
    inf: bool

    def __bool__(self) -> bool:
        return self.nan or self.inf


FINITE = Value(False, False)

_STAGE = re.compile(r"stage(\d+)/(?:recompute/)?(\w+)")
_ORDER = {"gather": 0, "forward": 1, "backward": 2, "inputs": 2, "weights": 2, "reduce": 3}

Message = tuple[str, int, int, int]
"""What one stage of a pipeline gives to another: "forward" or "backward", the stage that takes it, the microbatch, and
the number of the value."""


@dataclass
class Run:
    """One graph as it ran: its number in this rank's step, its name, and the nodes whose values were not finite.

    ``sources`` are the nodes of earlier graphs that gave its inputs. In a pipeline it is of a ``stage``, and of a
    ``microbatch`` if it is not run once for all.
    """

    number: int
    name: str
    module: fx.GraphModule
    stage: int | None = None
    microbatch: int | None = None
    values: dict[fx.Node, Value] = field(default_factory=dict)
    sources: dict[fx.Node, Place] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, ...]:
        """Its place in the step, in which what a graph takes comes before it; the same on ranks of one program."""
        if self.stage is None:
            return self.number, 0, 0, 0
        when, half = _ORDER.get(self.name, len(_ORDER)), self.name == "weights"
        return when, self.microbatch or 0, self.stage if when < 2 else -self.stage, int(half)

    def of(self, node: fx.Node) -> Value:
        """What is not finite in the value of a node."""
        return self.values.get(node, FINITE)

    @cached_property
    def positions(self) -> dict[fx.Node, int]:
        """The place of each node in the graph."""
        return {node: position for position, node in enumerate(self.module.graph.nodes)}


@dataclass(frozen=True)
class Place:
    """A node of a graph that ran."""

    run: Run
    node: fx.Node

    def __hash__(self) -> int:
        return hash((self.run.number, self.node))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.run.number, self.node) == (other.run.number, other.node)

    @property
    def order(self) -> tuple[int, ...]:
        """Its place in the step; the same on ranks that run the same program."""
        return *self.run.order, self.run.positions[self.node]

    @property
    def value(self) -> Value:
        """What is not finite in it."""
        return self.run.of(self.node)

    def inputs(self) -> Iterator[Place]:
        """Where it takes its values from."""
        if self.node in self.run.sources:
            yield self.run.sources[self.node]
        for node in self.node.all_input_nodes:
            yield Place(self.run, node)

    def makes_nan(self) -> bool:
        """Whether it has a NaN that none of its inputs has."""
        return self.value.nan and not any(each.value.nan for each in self.inputs()) and not self._given()[0]

    def makes_inf(self) -> bool:
        """Whether it has an infinity and nothing that it is computed from has one."""
        return self.value.inf and not any(each.value for each in self.inputs()) and not any(self._given())

    def _given(self) -> tuple[bool, bool]:
        """Whether a NaN, or an infinity, is among the numbers that it is called with."""
        numbers = [each for each in pytree.tree_leaves((self.node.args, self.node.kwargs)) if isinstance(each, float)]
        return any(map(math.isnan, numbers)), any(map(math.isinf, numbers))


class Observer:
    """Runs the graphs of one model node by node, in place of :class:`Bound`'s own way, and keeps what is not finite."""

    def __init__(self, model: Any) -> None:
        self.runs: list[Run] = []
        self._model = model
        self._given: dict[Any, Place] = {}
        self._sent: dict[Message, Place] = {}

    def __call__(self, bound: Bound, inputs: list[Any], microbatch: int | None = None) -> Sequence[Any]:
        """As ``Bound.observer``."""
        if bound.model is not self._model:
            return torch_api.boxed(bound.module)(inputs)
        found = _STAGE.fullmatch(bound.name)
        stage, name = (None, bound.name) if found is None else (int(found[1]), found[2])
        run = Run(len(self.runs), name, bound.module, stage, microbatch)
        self.runs.append(run)
        for given, node in ir.placeholders(bound.module).items():
            message = _message(run, given)
            source = self._given.get(_key(run, given)) if message is None else self._sent.get(message)
            if source is not None:
                run.sources[node] = source
        results: Sequence[Any] = _Interpreter(run).run(*inputs)
        inputs.clear()
        for result, value in ir.outputs(bound.module):
            role: Any = result
            if not isinstance(value, fx.Node):
                continue
            if (message := _message(run, role, sends=True)) is not None:
                self._sent[message] = Place(run, value)
            elif isinstance(role, (ir.Saved, ir.Gathered)):
                self._given[_key(run, role)] = Place(run, value)
            elif isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter):  # which the next one may add to
                self._given[_key(run, ir.Accumulated(role.of))] = Place(run, value)
        return results

    def sent(self, messages: Iterable[Sequence[Any]]) -> list[Place]:
        """What this rank gave to other stages, of these."""
        return [self._sent[each] for each in map(tuple, messages) if each in self._sent]

    def received(self, places: Iterable[Place]) -> set[Message]:
        """Of these, what other ranks gave to this one's stages."""
        arrived = [each for each in places if each.node.op == "placeholder" and each.node not in each.run.sources]
        messages = (_message(each.run, ir.attributes.ROLE.of(each.node)) for each in arrived)
        return {message for message in messages if message is not None}

    def ends(self) -> list[Place]:
        """The outputs and gradients that are not finite."""
        return [
            Place(run, value)
            for run in self.runs
            for role, value in ir.outputs(run.module)
            if isinstance(role, (ir.Output, ir.Gradient)) and isinstance(value, fx.Node) and run.of(value)
        ]


def _key(run: Run, role: ir.Role) -> Any:
    """What is kept from one graph to another, of this stage and, if it is not of all, of this microbatch."""
    return run.stage, None if isinstance(role, (ir.Gathered, ir.Accumulated)) else run.microbatch, role


def _message(run: Run, role: ir.Role, sends: bool = False) -> Message | None:
    """The message between stages that an input of a graph is, or with ``sends`` a result."""
    if run.stage is None or run.microbatch is None or not isinstance(role, (ir.Forwarded, ir.Returned)):
        return None
    forward = isinstance(role, ir.Forwarded)
    taker = run.stage + sends * (1 if forward else -1)
    return "forward" if forward else "backward", taker, run.microbatch, role.index


class _Interpreter(fx.Interpreter):
    """Runs a graph and looks at every value once it is there."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.module)
        self._run = run

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target in _UNWRITTEN:
            return result.zero_()
        if n.op == "output":
            return result
        if ir.is_collective(n) or ir.is_copy(n):  # its value is on its way: what this rank gives to it counts
            given = [self._run.of(each) for each in n.all_input_nodes]
            found = Value(any(each.nan for each in given), any(each.inf for each in given))
        else:
            found = _looked_at(result)
        if found:
            self._run.values[n] = found
        return result


def _looked_at(result: Any) -> Value:
    tensors = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    values = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    kinds = [each for each in values if each.is_floating_point() or each.is_complex()]
    nan = any(bool(torch.isnan(each).any()) for each in kinds)
    return Value(nan, any(bool(torch.isinf(each).any()) for each in kinds))
