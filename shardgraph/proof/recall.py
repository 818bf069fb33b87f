"""What has been derived of a node, for nodes that are equal but for which inputs they are of: those of equal layers.

A rule gives the same for operands of one form (:mod:`.forms`) that ranks hold alike, with other inputs in it: it knows
nothing of an input but its shape and the axes along which it varies. So a derivation is recalled only for a node of the
same operation on operands of these forms, that have the same inputs in common.

Of what goes from layer to layer, such as a sum to which each layer adds, every layer has more. It is *cut* there: it
becomes an input, of which the next layer's values are made. What is proved so is proved, since it holds for all values
of the inputs; it may just not be provable, if a program mixes what two layers do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import fx

from shardgraph.ir.attributes import FORWARD_MODULES, MODULES
from shardgraph.proof.forms import Forms, Leaves, places_of
from shardgraph.proof.held import Held
from shardgraph.proof.packed import Packed
from shardgraph.proof.terms import Terms

_LEAST = 4
"""Layers of a stack from which on it pays to look for equal ones."""


class _Written(NamedTuple):
    """A value as a number for all but its inputs, and these."""

    number: int
    leaves: Leaves


class Call(NamedTuple):
    """A node as a number for all but the inputs of its operands, and these."""

    key: int
    leaves: Leaves


Template = Callable[[Leaves], Any]
"""A value for the inputs of a call."""


class Recall:
    """What has been derived for nodes of graphs that have ``terms`` in common."""

    def __init__(self, terms: Terms) -> None:
        self._terms, self._forms = terms, Forms(terms)
        self._written: dict[int, tuple[Any, _Written | None]] = {}  # the values are kept, so that no id is used twice
        self._held: dict[_Written, Held] = {}
        self._kinds: dict[int, tuple[Any, int]] = {}
        self._results: dict[int, Template] = {}
        self._targets: dict[int, tuple[Any, bool]] = {}

    def call(self, node: fx.Node, original: fx.Node | None, operands: Sequence[Any]) -> Call | None:
        """What decides what a node gives; None if that is not only what it is computed from."""
        target: Any = node.target
        if id(target) not in self._targets:
            self._targets[id(target)] = target, _follows(target)
        if not self._targets[id(target)][1] or (read := self._read(operands)) is None:
            return None
        numbers, leaves = read
        inputs = node.all_input_nodes
        kinds = self._kinds_of((node, *inputs))
        before = {each: number for number, each in enumerate(inputs)}
        arguments = _argument(node.args, before), _argument(node.kwargs, before) if node.kwargs else ()
        placing = None if original is None else self._placing(node, inputs, original)
        # By its id, since the hash of an operator is a call of Python.
        key = id(target), arguments, kinds, placing, numbers, _order(operands)
        return Call(self._forms.number(key), leaves)

    def result(self, call: Call) -> Any:
        """What has been derived for an equal call, for this one's inputs; None if nothing has."""
        template = self._results.get(call.key)
        return None if template is None else template(call.leaves)

    def keep(self, call: Call, value: Any) -> None:
        """Keep what has been derived."""
        places = {leaf: place for place, leaf in enumerate(call.leaves)}
        if (template := self._template(value, places)) is not None:
            self._results.setdefault(call.key, template)

    def _write(self, value: Any) -> _Written | None:
        if id(value) not in self._written:
            self._written[id(value)] = value, self._written_anew(value)
        return self._written[id(value)][1]

    def _written_anew(self, value: Any) -> _Written | None:
        if isinstance(value, Held):
            formed = self._forms.of(value.term)
            if formed is None:
                return None
            layout = formed.form, value.factor, value.dims, value.partial, value.summed, value.uneven
            written = _Written(self._forms.number(("held", layout)), formed.leaves)
            self._held.setdefault(written, value)
            return written
        if isinstance(value, Packed):
            return self._written_list(("packed", value.parts), value.tensors)
        if isinstance(value, (list, tuple)):
            return self._written_list(type(value), value)
        if value is None or isinstance(value, (bool, int, float)):
            return _Written(self._forms.number((type(value), repr(value))), ())
        return None

    def _written_list(self, kind: Any, values: Sequence[Any]) -> _Written | None:
        if (read := self._read(values)) is None:
            return None
        numbers, leaves = read
        return _Written(self._forms.number((kind, numbers)), leaves)

    def _read(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """Several values: the number of each with the places of its inputs among those of all, and these inputs."""
        if len(values) == 1:
            alone = self._write(values[0])
            return None if alone is None else (((alone.number, _first(len(alone.leaves))),), alone.leaves)
        read, places = [], dict[Any, int]()
        for each in values:
            written = self._write(each)
            if written is None:
                return None
            read.append((written.number, places_of(written.leaves, places)))
        return tuple(read), tuple(places)

    def _template(self, value: Any, places: Mapping[Any, int]) -> Template | None:
        """A value as a function of the inputs of a call; None if it is none."""
        if isinstance(value, Held):
            if value.term not in places:  # it may be cut, and then is not one of the inputs, but of them
                value = replace(value, term=self._terms.before_cut(value.term))
            written = self._write(value)
            if written is None or not all(leaf in places for leaf in written.leaves):
                return None
            return partial(self._held_with, value, written.number, [places[leaf] for leaf in written.leaves])
        if isinstance(value, (Packed, list)):
            parts = [self._template(each, places) for each in (value if isinstance(value, list) else value.tensors)]
            made = [part for part in parts if part is not None]
            return partial(_with_parts, value, made) if len(made) == len(parts) else None
        return None

    def _held_with(self, like: Held, number: int, places: Sequence[int], leaves: Leaves) -> Held:
        written = _Written(number, tuple([leaves[place] for place in places]))
        held = self._held.get(written)
        if held is None or self._terms.current(held.term) is not held.term:
            term = self._forms.term(like.term, written.leaves)
            held = Held(term, like.factor, like.dims, like.partial, like.summed, like.uneven)
            self._held[written] = held
        return held

    def _kinds_of(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """A number for each node: for what rules read of its value on fake tensors."""
        kinds, known = [], self._kinds
        for node in nodes:
            value = node.meta.get("val")
            if (kind := known.get(id(value))) is None:
                kind = known[id(value)] = value, self._forms.number(("value", _described(value)))
            kinds.append(kind[1])
        return tuple(kinds)

    def _placing(self, node: fx.Node, inputs: Sequence[fx.Node], original: fx.Node) -> Any:
        """What the captured graph says of where ranks' coordinates stand."""
        read = original.all_input_nodes
        same = original.target == node.target and len(read) == len(inputs)
        return self._kinds_of((original, *read) if same else (original,)), same


def _follows(target: Any) -> bool:
    """Whether what an operation gives follows from its operands alone."""
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    schema = getattr(target, "_schema", None)
    return schema is None or not schema.is_mutable  # which depends on what else reads the value


_first = lru_cache(lambda count: tuple(range(count)))


def _with_parts(like: Any, parts: Sequence[Template], leaves: Leaves) -> Any:
    values = [part(leaves) for part in parts]
    return values if isinstance(like, list) else replace(like, tensors=tuple(values))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, str(value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), repr(value)


def _argument(value: Any, nodes: Mapping[fx.Node, int]) -> Any:
    """An argument as something that can be compared, with nodes by their numbers."""
    if isinstance(value, fx.Node):
        return "node", nodes[value]
    if isinstance(value, (list, tuple)):
        return tuple([_argument(each, nodes) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _argument(each, nodes)) for name, each in value.items()])
    return (type(value), repr(value)) if isinstance(value, (int, float, slice)) else value


def _order(operands: Sequence[Any]) -> tuple[int, ...]:
    """The order in which the terms of operands were made, by which rules put them."""
    numbers = [each.term.number for each in operands if isinstance(each, Held)]
    if len(numbers) < 2 or numbers == sorted(numbers):
        return _first(len(numbers))
    return tuple(sorted(range(len(numbers)), key=numbers.__getitem__))


# -- where layers meet -----------------------------------------------------------------------------------------


def between_layers(gm: fx.GraphModule) -> set[fx.Node]:
    """The values of a captured graph that a layer of a stack computes and another one reads."""
    units: dict[fx.Node, _Unit] = {}
    *nodes, output = gm.graph.nodes
    units[output] = None
    for node in nodes:
        modules = [path for each in (MODULES, FORWARD_MODULES) for path, _ in (each.get(node) or {}).values()]
        units[node] = next(filter(None, map(_unit, modules)), None)
        if not modules and node.all_input_nodes:  # a sum of gradients: of where the last of them is from
            units[node] = units[max(node.all_input_nodes)]
    layers: dict[str, set[str]] = defaultdict(set)
    for unit in filter(None, units.values()):
        layers[unit[0]].add(unit[1])
    return {
        node
        for node, unit in units.items()
        if unit is not None
        and len(layers[unit[0]]) >= _LEAST
        and any((other := units[user]) is not None and other[0] == unit[0] and other != unit for user in node.users)
    }


_Unit = tuple[str, str] | None
"""A stack and the number of a layer of it."""
_NUMBERED = re.compile(r"(.*?)(?<![^.\s])(\d+)(?=[.,]|$)")


def _unit(path: str) -> _Unit:
    found = _NUMBERED.match(path)
    return (found[1], found[2]) if found else None
