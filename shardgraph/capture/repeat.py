"""The joint graph of a model with many equal layers, from that of the same model with few.

In a joint graph the operations of a unit of layers follow on each other, once in forward and once in backward. Between
two such units, as many copies are inserted as there are units that the model with few layers does without. What an
operation of a copy reads is known from both units: the same value outside of them, a value of its own unit, of the one
before it, or of the one after it (in backward, which runs from the last unit to the first). Where the two units give no
such account, nothing is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.capture.insertion import in_a_row, pairs
from shardgraph.capture.repeated_results import RETURNED, RepeatedResults
from shardgraph.capture.returned import Order
from shardgraph.capture.stacks import Stack, UnequalLayersError
from shardgraph.ir.attributes import (
    FORWARD_MODULES,
    MADE_BY,
    MODULES,
    PARTITIONER_TAG,
    ROLE,
    SEQUENCE,
    SOURCE,
    SUBJECT,
    VALUE,
)
from shardgraph.torch_api import append_node, is_valid, pytree

_INPUTS, _FORWARD, _BACKWARD = range(3)


def repeat(gm: fx.GraphModule, stack: Stack) -> fx.GraphModule:
    """``gm``, a joint graph with ``stack.few`` layers of a stack, with all of them.

    Raises:
        UnequalLayersError: one more unit of layers would not insert just one more segment into each half.
    """
    return _Repetition(gm, stack).graph()


def repeat_joint(joint: ir.JointGraph, stack: Stack, returned: Order | None = None) -> ir.JointGraph:
    """The same of a captured program: what layers return, all of them return. Its output is a list, ``returned`` in
    this order.

    Raises:
        UnequalLayersError: as :func:`repeat`.
    """
    repetition = _Repetition(joint.module, stack, returned)
    module, aliases = repetition.graph(), repetition.results.aliases(joint.aliases)
    results, leaves = len(joint.results), sum(isinstance(role, ir.Output) for role, _ in ir.outputs(module))
    if any(unit is not None for unit in repetition.results.returned_by[leaves - results :]):
        raise UnequalLayersError("forward sets attributes to what layers compute")
    output = [0] * (leaves - results)
    spec = pytree.tree_structure((output, [0] * results) if results else output)
    return replace(joint, module=module, aliases=aliases, out_spec=spec)


@dataclass(frozen=True)
class _Place:
    """A node of one of the two units: the ``offset``-th in its part of the unit."""

    part: int
    second: bool
    offset: int


@dataclass(frozen=True)
class _Read:
    """What a copy reads: a node of the unit that is ``further`` units on (by its node in the first unit), or a value
    that all read."""

    value: Any
    further: int | None = None


class _Repetition:
    """The two units in a graph, what copies of them read, and the graph with all units.

    There, the first unit has the number 0, copies have 1 and more, and the second unit has the last number. A node of
    a unit is known by its node in the first unit and the unit's number.
    """

    def __init__(self, gm: fx.GraphModule, stack: Stack, returned: Order | None = None) -> None:
        self._gm, self._stack, self._last = gm, stack, stack.repeats + 1
        self._nodes = list(gm.graph.nodes)
        self._same: dict[int, int] = {}  # numbers of modules of nodes, by the object and by what is in it
        self._equal: dict[Any, int] = {}
        self._moved: dict[tuple[int, str], dict[str, Any]] = {}  # those in other units
        self._numbered = re.compile(rf"^((?:module )?{re.escape(stack.prefix)})(\d+)(?=[.,]|$)")
        # The nodes of the first and of the second unit, in the inputs, in forward and in backward.
        forward = self._forward()
        self.results = self._returned_by(forward, returned)
        self._units = (self._inputs(), forward, self._backward())
        self._places = {
            node: _Place(part, second, offset)
            for part, units in enumerate(self._units)
            for second, unit in zip((False, True), units, strict=True)
            for offset, node in enumerate(unit)
        }
        self._reads = {one: self._alike(one, other) for units in self._units for one, other in pairs(*units)}
        self._step = self._sequence_step()
        self._next_sequence = min(SEQUENCE.get(node, 0) for node in self._units[_FORWARD][1])
        self._check_outside()

    # Where the units are

    def _returned_by(self, forward: Sequence[Sequence[fx.Node]], returned: Order | None) -> RepeatedResults:
        """The results: values of units, and what names them, as gradients of their parameters."""
        made = {node: unit for unit, nodes in enumerate(forward) for node in nodes}
        results = ir.outputs(self._gm)
        units = [
            made.get(value) if isinstance(role, RETURNED) else self._unit(_name_of(role)) for role, value in results
        ]
        roles, values = zip(*results, strict=True)
        return RepeatedResults(roles, values, units, self._stack.repeats, returned)

    def _inputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        roles = [(node, ROLE.of(node)) for node in self._nodes if node.op == "placeholder"]
        inputs = [
            (node, self.results.unit(role) if isinstance(role, ir.Tangent) else self._unit(_name_of(role)))
            for node, role in roles
        ]
        return [node for node, unit in inputs if unit == 0], [node for node, unit in inputs if unit == 1]

    def _forward(self) -> tuple[list[fx.Node], list[fx.Node]]:
        nodes, units = self._half(MODULES, backward=False)
        first, second = (units.index(unit) if unit in units else len(units) for unit in (0, 1))
        after = units.index(2) if 2 in units else 2 * second - first
        if not first < second < after:
            raise UnequalLayersError("layers are not one after the other in forward")
        return nodes[first:second], nodes[second:after]

    def _backward(self) -> tuple[list[fx.Node], list[fx.Node]]:
        nodes, units = self._half(FORWARD_MODULES, backward=True)
        if 0 not in units and 1 not in units:
            return [], []
        first, second = (units.index(unit) if unit in units else -1 for unit in (0, 1))
        if not 0 <= second < first:
            raise UnequalLayersError("layers are not one after the other in backward")
        return nodes[first : 2 * first - second], nodes[second:first]

    def _half(self, modules: Any, backward: bool) -> tuple[list[fx.Node], list[int | None]]:
        """The operations of a half, and the unit that the module of each is in."""
        operations = [node for node in self._nodes if node.op not in ("placeholder", "output")]
        begun = [PARTITIONER_TAG.get(node) == "is_backward" for node in operations]
        # From where a gradient comes in, all is backward, also what the tracer does not mark, as of the backward of a
        # torch.autograd.Function. What a pass does with results comes after both.
        end = len(operations)
        given = next((i for i, node in enumerate(operations) if any(map(_is_tangent, node.all_input_nodes))), end)
        first = min(begun.index(True) if True in begun else end, given)
        if not all(of or node in MADE_BY for node, of in zip(operations[first:given], begun[first:given], strict=True)):
            raise UnequalLayersError("forward and backward are not one after the other")
        nodes = operations[first:] if backward else operations[:first]
        paths = [[path for path, _ in (modules.get(node) or MODULES.get(node) or {}).values()] for node in nodes]
        return nodes, [next((unit for path in of if (unit := self._unit(path)) is not None), None) for of in paths]

    def _unit(self, path: str) -> int | None:
        """The unit that something in the model is in: 0, 1, or -1 and 2 for the layers before and after them."""
        found = self._numbered.match(path)
        return None if found is None else self._stack.unit_of(int(found[2]))

    # That they are alike

    def _alike(self, one: fx.Node, other: fx.Node) -> tuple[list[_Read], Any]:
        """What copies of ``one`` read, from what it reads and what its equal in the second unit reads; and in which
        structure of arguments, None if there is none."""
        (values, spec), (others, other_spec) = (pytree.tree_flatten((n.args, n.kwargs)) for n in (one, other))
        alike = (
            one.op == other.op
            and (one.target == other.target or one.op == "placeholder" or self._same_constant(one, other))
            and (spec, one.meta.keys()) == (other_spec, other.meta.keys())
            and all(
                self._comparable(key, value, 1) == self._comparable(key, other.meta[key], 0)
                for key, value in one.meta.items()
            )
        )
        if not alike:
            raise UnequalLayersError(f"{one.name} and {other.name} are not alike")
        flat = not one.kwargs and len(values) == len(one.args)  # as nearly all are: each argument is a value
        flat = flat and not any(isinstance(arg, (list, tuple, dict)) for arg in one.args)
        return [self._read(*each) for each in zip(values, others, strict=True)], None if flat else spec

    def _same_constant(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two units make equal tensors in Python, as ``torch.tensor(-1)`` does."""
        first, second = self._constant(one), self._constant(other)
        if type(first) is not torch.Tensor or type(second) is not torch.Tensor or first.is_meta:
            return False
        alike = (first.dtype, first.device, first.shape) == (second.dtype, second.device, second.shape)
        return alike and torch.equal(first, second)

    def _constant(self, node: fx.Node) -> Any:
        """What Python made, which the tracer names as the node; None if it is none such."""
        return attrgetter(str(node.target))(self._gm) if node.op == "get_attr" and node.name == node.target else None

    def _comparable(self, key: str, value: Any, units: int) -> Any:
        """An attribute of a node, as its equal ``units`` further on has it."""
        if key == VALUE.key:
            return _described(value)
        if key in (MODULES.key, FORWARD_MODULES.key):
            return [(self._further(path, units), kind) for path, kind in value.values()]
        if key in (ROLE.key, SOURCE.key, SUBJECT.key):
            return self._further(value, units)
        return None if key == SEQUENCE.key else value

    def _read(self, one: Any, other: Any) -> _Read:
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            if type(one) is type(other) and one == other:
                return _Read(one)
            raise UnequalLayersError(f"{one} and {other} are not alike")
        a, b = self._places.get(one), self._places.get(other)
        if a is None and one is other:
            return _Read(one)
        if a and b and not a.second and b == replace(a, second=True):
            return _Read(one, 0)
        if a is None and b and not b.second:
            return _Read(other, -1)
        if b is None and a and a.second:
            return _Read(self._units[a.part][0][a.offset], 1)
        raise UnequalLayersError(f"{one.name} and {other.name} are not what equal layers read")

    def _sequence_step(self) -> int:
        """By how much the sequence numbers of a unit are above those of the unit before."""
        forward, backward = (
            {SEQUENCE.get(other, 0) - SEQUENCE.get(one, 0) for one, other in pairs(*self._units[part])}
            for part in (_FORWARD, _BACKWARD)
        )
        if len(forward) != 1 or not backward <= forward | {0}:
            raise UnequalLayersError("the operations of two layers are not numbered alike")
        return int(forward.pop())

    def _check_outside(self) -> None:
        """Check that what is outside of the units only reads the unit that it is beside."""
        backward, after = self._units[_BACKWARD], False
        for node in self._nodes:
            after |= bool(backward[1]) and node is backward[1][0]
            for read in node.all_input_nodes if node not in self._places and node.op != "output" else ():
                if read in self._places and self._places[read].second == after:
                    raise UnequalLayersError(f"{node.name} reads {read.name}, of a layer that it is not beside")

    # The graph with all of them

    def graph(self) -> fx.GraphModule:
        """The graph with all units."""
        graph, names = fx.Graph(), _Names()
        made: dict[tuple[fx.Node, int], fx.Node] = {}
        attributes: dict[str, Any] = {}

        def add(node: fx.Node, unit: int, arguments: Any, name: str, meta: dict[str, Any]) -> None:
            target = name if node.op == "placeholder" or self._constant(node) is not None else node.target
            if node.op == "get_attr":
                attributes[str(target)] = attrgetter(str(node.target))(self._gm)
            args, kwargs = arguments
            made[node, unit] = append_node(graph, node.op, target, args, kwargs, name)
            made[node, unit].meta.update(meta)

        runs = self._runs()
        for node in self._nodes[:-1]:
            place = self._places.get(node)
            arguments = fx.map_arg((node.args, node.kwargs), lambda read, of=place: made[self._kept(read, of)])
            add(*self._kept(node, place), arguments, names.of(node), self._kept_meta(node))
            for number in range(1, self._last) if node in runs else ():
                for ahead, behind in runs[node]:
                    backwards = self._places[ahead].second
                    one, unit = (behind, self._last - number) if backwards else (ahead, number)
                    arguments = self._arguments(one, unit, made)
                    add(one, unit, arguments, names.between(ahead, behind, number), self._copied_meta(one, unit))
            names.skip(runs.get(node, ()), self._stack.repeats)
        graph.output(()).meta = dict(self._nodes[-1].meta)
        repeated = ir.UnboundGraph(attributes, graph)
        repeated.training = self._gm.training
        ir.set_outputs(repeated, self._results(made))
        if not is_valid(repeated):
            repeated.graph.lint()  # which says why
        return repeated

    def _runs(self) -> dict[fx.Node, list[tuple[fx.Node, fx.Node]]]:
        """The nodes of the unit that runs first, each with its equal in the other, by the last of those in a row."""
        inputs, forward, backward = self._units
        runs = [[*pairs(*forward)], [*pairs(*backward[::-1])], *in_a_row(self._nodes, pairs(*inputs))]
        return {run[-1][0]: run for run in runs if run}

    def _kept(self, node: fx.Node, reader: _Place | None) -> tuple[fx.Node, int]:
        """A node of the graph with few layers, as another node of that graph reads it."""
        if (place := self._places.get(node)) is None:
            return node, 0
        unit = self._last if place.second else 0
        if reader is not None and reader.second != place.second:  # its neighbour, which is a copy now
            unit = 1 if place.second else self._last - 1
        return self._units[place.part][0][place.offset], unit

    def _arguments(self, one: fx.Node, unit: int, made: Mapping[tuple[fx.Node, int], fx.Node]) -> Any:
        """Those of a copy."""

        def read(each: _Read) -> Any:
            if not isinstance(each.value, fx.Node):
                return each.value
            return made[each.value, 0 if each.further is None else unit + each.further]

        reads, spec = self._reads[one]
        if spec is None:
            return tuple(map(read, reads)), {}
        return pytree.tree_unflatten(map(read, reads), spec)

    def _results(self, made: Mapping[tuple[fx.Node, int], fx.Node]) -> list[tuple[ir.Role | None, Any]]:
        """The roles and values of the new graph's results: copies' are between those of the two units."""
        results, kept = ir.outputs(self._gm), (0, self._last)
        for (_, value), of in zip(results, self.results.units, strict=True):
            place = self._places.get(value) if isinstance(value, fx.Node) else None
            # A result outside of layers is what all layers share: a gradient that the first one completes.
            if place and (place.second != (of == 1) or (of not in (0, 1) and place.part != _BACKWARD)):
                raise UnequalLayersError(f"the value {value.name} of a layer is a result")
        repeated: list[tuple[ir.Role | None, Any]] = []
        for (i, number), new in zip(self.results.order, self.results.roles, strict=True):
            role, value = results[i]
            if number in kept:
                result = made[self._kept(value, None)] if isinstance(value, fx.Node) else value
                repeated.append((new or self._settled(role), result))
                continue
            other_role, other = results[self.results.second[i]]
            read = self._read(value, other)
            if read.further or self._further(role, 1) != self._further(other_role, 0):
                raise UnequalLayersError("two layers give different results")
            copy = made[read.value, number if read.further == 0 else 0] if read.value is not None else None
            repeated.append((self._further(role, number), copy))
        return repeated

    # Names and numbers of layers

    def _further(self, value: Any, units: int) -> Any:
        """A name or a role in a unit, as it is ``units`` further on."""
        if isinstance(value, _RETURNED):
            return self.results.moved(value, units)
        stack = self._stack
        return self._renumbered(value, lambda n: n + units * stack.period if n >= stack.head else n)

    def _settled(self, value: Any) -> Any:
        """A name or a role in the graph with few layers, as it is in the new one."""
        if isinstance(value, _RETURNED):
            return self.results.moved(value, None)
        stack = self._stack
        return self._renumbered(value, lambda n: n + stack.omitted if n >= stack.head + stack.period else n)

    def _renumbered(self, value: Any, number: Callable[[int], int]) -> Any:
        if isinstance(value, str):
            found = self._numbered.match(value)
            return f"{found[1]}{number(int(found[2]))}{value[found.end() :]}" if found else value
        if isinstance(value, (ir.Parameter, ir.Buffer)):
            return type(value)(self._renumbered(value.fqn, number))
        return replace(value, of=self._renumbered(value.of, number)) if isinstance(value, _OF) else value

    def _kept_meta(self, node: fx.Node) -> dict[str, Any]:
        if (place := self._places.get(node)) is not None and place.second:
            return self._copied_meta(self._units[place.part][0][place.offset], self._last)
        meta = self._meta(node, self._settled, "")
        if node in SEQUENCE:
            meta[SEQUENCE.key] = self._settled_sequence(node)
        return meta

    def _copied_meta(self, one: fx.Node, unit: int) -> dict[str, Any]:
        meta = self._meta(one, lambda value: self._further(value, unit), f"+{unit}")
        place = self._places[one]
        other = self._units[place.part][1][place.offset]
        if one in SEQUENCE:
            ahead = SEQUENCE.of(other) != SEQUENCE.of(one)
            meta[SEQUENCE.key] = SEQUENCE.of(one) + unit * self._step if ahead else self._settled_sequence(one)
        if unit == self._last:
            meta[VALUE.key] = VALUE.get(other)
        elif one.op == "placeholder":  # memory of its own; a value that an operation makes stands for its kind
            meta[VALUE.key] = _like(VALUE.of(one))
        return meta

    def _settled_sequence(self, node: fx.Node) -> int:
        number = SEQUENCE.of(node)
        return number + self._stack.repeats * self._step if number >= self._next_sequence else number

    def _meta(self, node: fx.Node, moved: Callable[[Any], Any], suffix: str) -> dict[str, Any]:
        meta = dict(node.meta)
        for attribute in (MODULES, FORWARD_MODULES):
            if modules := attribute.get(node):
                meta[attribute.key] = self._calls(modules, moved, suffix)
        for key in (ROLE.key, SOURCE.key, SUBJECT.key):
            if key in meta:
                meta[key] = moved(meta[key])
        return meta

    def _calls(self, modules: Mapping[str, Any], moved: Callable[[Any], Any], suffix: str) -> dict[str, Any]:
        """The modules that a node is from in another unit, one object for all nodes there that are from the same."""
        if (same := self._same.get(id(modules))) is None:
            same = self._same[id(modules)] = self._equal.setdefault(tuple(modules.items()), len(self._equal))
        if (calls := self._moved.get((same, suffix))) is None:
            named = {call: (moved(path), path, kind) for call, (path, kind) in modules.items()}
            # A call of a copied layer is another one.
            calls = {call if new == old else call + suffix: (new, kind) for call, (new, old, kind) in named.items()}
            self._moved[same, suffix] = calls
        return calls


_OF = (ir.Gradient, ir.Mutation)
_RETURNED = (*RETURNED, ir.Tangent)


class _Names:
    """Names as the tracer gives them: nodes of one kind are numbered in the order in which they are made."""

    def __init__(self) -> None:
        self._inserted: dict[str, int] = {}

    def of(self, node: fx.Node) -> str:
        """The name of a node that was there."""
        return self._written(*_split(node.name))

    def between(self, ahead: fx.Node, behind: fx.Node, number: int) -> str:
        """The name of the ``number``-th copy between two equal nodes."""
        (kind, first), (_, second) = _split(ahead.name), _split(behind.name)
        return self._written(kind, first + number * (second - first))

    def skip(self, run: Iterable[tuple[fx.Node, fx.Node]], repeats: int) -> None:
        """Copies of a run were inserted."""
        for kind, step in {(_split(a.name)[0], _split(b.name)[1] - _split(a.name)[1]) for a, b in run}:
            self._inserted[kind] = self._inserted.get(kind, 0) + repeats * step

    def _written(self, kind: str, number: int) -> str:
        number += self._inserted.get(kind, 0)
        if "#" in kind:
            return kind.replace("#", str(number))
        return f"{kind}_{number}" if number else kind


@lru_cache(1 << 14)  # of a unit's nodes, for every unit
def _split(name: str) -> tuple[str, int]:
    """A name without its number, and that; inputs of a graph without gradients have it in the middle, and tensors that
    Python made at once after their kind."""
    for kind, numbered in (("arg#_1", r"arg(\d+)_1"), ("_tensor_constant#", r"_tensor_constant(\d+)")):
        if found := re.fullmatch(numbered, name):
            return kind, int(found[1])
    kind, _, number = name.rpartition("_")
    return (kind, int(number)) if kind and number.isdecimal() else (name, 0)


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(ROLE.get(node), ir.Tangent)


def _name_of(role: Any) -> str:
    """The parameter or buffer that a role is about; empty if none."""
    return str(getattr(role.of if isinstance(role, _OF) else role, "fqn", ""))


def _described(value: Any) -> Any:
    return [
        (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in pytree.tree_leaves(value)
    ]


def _like(value: Any) -> Any:
    with value.fake_mode, torch.no_grad():
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)
