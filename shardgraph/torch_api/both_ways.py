"""Both ways of a branch traced into one graph, which chooses between what they leave behind.

The way that is not taken is computed too. Where it might not be, as on values rather than on random numbers, it may
give infinities, of which ``torch.where`` keeps results free and gradients not: there both ways must leave behind the
same but for tensors without a gradient, such as statistics of activations.

torch's tracer takes one way at each branch. Here it takes one as far as the place where both meet, goes back, takes
the other, and goes on with a ``torch.where`` for each variable, attribute and tensor that is not the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.symbolic_convert import ReturnValueOp
from torch._dynamo.variables import LazyVariableTracker, TensorVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import BaseListVariable

_END = -1
"""In place of an instruction: the return from the function."""


class UnequalWaysError(Exception):
    """What two ways leave behind cannot be chosen between."""


def take_both(tx: Any, condition: Any, instruction: Any, on_true: bool, always_valid: bool) -> None:
    """Trace both ways of a jump that is made if ``condition``, taken off the stack already, is ``on_true``. Either way
    may be taken whatever the values are if ``always_valid``.

    Random numbers are drawn as if the way that is not taken were not computed. What one way adds where the other has
    nothing, such as a layer's part of a cache, is there in any case. A variable that is of another kind after each is
    unbound.

    Raises:
        UnequalWaysError: the ways do not meet, or leave behind attributes or results that are of other kinds; or, not
            being always valid, some with a gradient, or make checks.
    """
    onward, jumped = tx.indexof[tx.next_instruction], tx.indexof[instruction.target]
    meeting = _meeting(tuple(tx.instructions), tx.indexof, onward, jumped)
    first, second = (jumped, onward) if on_true else (onward, jumped)
    before, flag = _Frame.of(tx), _call(tx, torch.reshape, condition, ())
    draws, known = _Draws(tx), _objects(tx)
    memory = _Memory(tx, draws.node)
    with _logged(tx, known) as original:
        one = _walked(tx, first, meeting)
    draws.back()
    memory.back()
    written = original.back()
    before.restore(tx)

    with _logged(tx, known) as log:
        other = _walked(tx, second, meeting)
    flag = draws.as_if(flag)
    if not always_valid and memory.has_checks():
        raise UnequalWaysError
    memory.choose(flag, always_valid)
    choice = _Choice(tx, flag, always_valid)
    log.choose(tx, choice, written, original)
    choice.frame(one, other).restore(tx)
    if meeting == _END:
        tx.instruction_pointer = None
        raise ReturnValueOp
    tx.instruction_pointer = tx.start_point = meeting


def _call(tx: Any, target: Any, *args: Any) -> Any:
    """A function's or method's call in the graph, as the tracer's variable."""
    kind = "call_method" if isinstance(target, str) else "call_function"
    given = tuple(each.as_proxy() if isinstance(each, TensorVariable) else each for each in args)
    return wrap_fx_proxy(tx, tx.output.create_proxy(kind, target, given, {}))


# Where the ways meet.


def _meeting(instructions: tuple[Any, ...], index: dict[Any, int], *starts: int) -> int:
    """The first instruction that all ways from ``starts`` to the return come by."""

    def onward(at: int) -> list[int]:
        each = instructions[at]
        if each.opname.startswith("RETURN_"):
            return [_END]
        if each.opname in ("RAISE_VARARGS", "RERAISE"):
            return []
        target = [index[each.target]] if each.target is not None else []
        always = target and each.opname in _ALWAYS
        return target if always else [*target, at + 1]

    def reached(start: int, without: int | None = None) -> list[int]:
        found, queue = dict.fromkeys([start]), [start]
        while queue:
            at = queue.pop(0)
            for each in onward(at) if at not in (_END, without) else ():
                if each not in found:
                    found[each] = None
                    queue.append(each)
        return list(found)

    common = set.intersection(*(set(reached(start)) for start in starts))
    for at in reached(starts[0]):
        if at in common and all(start == at or at == _END or _END not in reached(start, at) for start in starts):
            return at
    raise UnequalWaysError


_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_NO_INTERRUPT", "JUMP")


@dataclass(frozen=True)
class _Frame:
    """The variables of a function while it is traced, and what it returned."""

    locals: dict[str, Any]
    stack: list[Any]
    blocks: list[Any]
    result: Any = None

    @classmethod
    def of(cls, tx: Any) -> _Frame:
        return cls(dict(tx.symbolic_locals), list(tx.stack), list(tx.block_stack), getattr(tx, "symbolic_result", None))

    def restore(self, tx: Any) -> None:
        tx.symbolic_locals = dict(self.locals)
        tx.stack = list(self.stack)
        tx.block_stack = list(self.blocks)
        if hasattr(tx, "symbolic_result"):
            tx.symbolic_result = self.result


def _walked(tx: Any, start: int, meeting: int) -> _Frame:
    """The frame after one way."""
    tx.instruction_pointer = tx.start_point = start
    while tx.instruction_pointer != meeting and tx.step():
        pass
    if tx.instruction_pointer != (None if meeting == _END else meeting):
        raise UnequalWaysError
    return _Frame.of(tx)


class _Choice:
    """What is so after one of two ways: the first if a flag is true."""

    def __init__(self, tx: Any, flag: Any, always_valid: bool) -> None:
        self._tx, self._flag, self._always_valid = tx, flag, always_valid

    def __call__(self, one: Any, other: Any) -> Any:
        """Raises UnequalWaysError if there is no choice between two variables."""
        one, other = map(_realized, (one, other))
        if one is other:
            return one
        if isinstance(one, TensorVariable) and isinstance(other, TensorVariable):
            return self._tensor(one, other)
        if type(one) is type(other) and isinstance(one, BaseListVariable) and len(one.items) == len(other.items):
            return one.clone(items=[self(*each) for each in zip(one.items, other.items, strict=True)])
        if _same(one, other):
            return other
        raise UnequalWaysError

    def _tensor(self, one: Any, other: Any) -> Any:
        values = [each.as_proxy().node.meta["example_value"] for each in (one, other)]
        if len({(each.shape, each.dtype, each.device, each.layout) for each in values}) > 1:
            raise UnequalWaysError
        if one.as_proxy().node is other.as_proxy().node:
            return other
        if not self._always_valid and any(each.requires_grad for each in values):
            raise UnequalWaysError
        return _call(self._tx, torch.where, _call(self._tx, "to", self._flag, values[0].device), one, other)

    def frame(self, one: _Frame, other: _Frame) -> _Frame:
        """The frame where both ways meet, without variables that differ in kind."""
        if len(one.stack) != len(other.stack) or len(one.blocks) != len(other.blocks):
            raise UnequalWaysError
        stack = [self(*each) for each in zip(one.stack, other.stack, strict=True)]
        chosen = {}
        for name in one.locals.keys() & other.locals.keys():
            ways = one.locals[name], other.locals[name]
            try:
                chosen[name] = self(*ways)
            except UnequalWaysError:
                if not self._always_valid and all(isinstance(_realized(each), TensorVariable) for each in ways):
                    raise
        result = None if one.result is None and other.result is None else self(one.result, other.result)
        return _Frame({name: chosen[name] for name in other.locals if name in chosen}, stack, other.blocks, result)


def _realized(variable: Any) -> Any:
    return variable.realize() if isinstance(variable, LazyVariableTracker) else variable


def _same(one: Any, other: Any) -> bool:
    """Whether two variables of the tracer's are one object or constant."""
    if one.is_python_constant() and other.is_python_constant():
        one, other = one.as_python_constant(), other.as_python_constant()
        return type(one) is type(other) and bool(one == other)
    sources = [getattr(each, "source", None) for each in (one, other)]
    if None not in sources and sources[0] == sources[1]:
        return True
    return hasattr(one, "value") and one.value is getattr(other, "value", None)


# Random numbers.


class _Draws:
    """The states of random generators, with which the way that is not taken draws nothing."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        devices = {value.device.type for _, value in _tensors(tx)} - {"meta"} | {"cpu"}
        self._start = self._states(sorted(devices))
        self._after: dict[str, Any] = {}
        self._again: list[Any] = []
        self.node: fx.Node = next(iter(self._start.values())).as_proxy().node

    def _states(self, devices: Any) -> dict[str, Any]:
        state = torch.ops.shardgraph.generator_state.default
        return {device: _call(self._tx, state, device) for device in devices}

    def _set(self, flag: Any, states: dict[str, Any]) -> Any:
        for device, state in states.items():
            flag = _call(self._tx, torch.ops.shardgraph.set_generator_state.default, flag, state, device)
        return flag

    def back(self) -> None:
        """Between the ways: to the states before them."""
        self._after = self._states(self._start)
        self._again = [self._set(_call(self._tx, torch.full, (), True), self._start)]

    def as_if(self, flag: Any) -> Any:
        """After both ways: to the states after the first if ``flag`` is true; gives ``flag``."""
        return self._set(_call(self._tx, torch.logical_and, flag, *self._again), self._after)


# Tensors that are written in place.


def _tensors(tx: Any) -> list[tuple[fx.Node, torch.Tensor]]:
    """The nodes of the graph so far that give a tensor, with that."""
    values = ((node, node.meta.get("example_value")) for node in tx.output.graph.nodes)
    return [(node, value) for node, value in values if isinstance(value, torch.Tensor)]


_UNWRITTEN = 0
"""The version of a tensor of the model as the tracer has made it."""

_STATISTICS = {torch.batch_norm: (3, 5), torch.instance_norm: (3, 5), F.batch_norm: (1, 3), F.instance_norm: (1, 3)}
"""Positions of arguments that are written without their versions telling it."""


class _Memory:
    """Tensors that exist before both ways and that one of them writes in place."""

    def __init__(self, tx: Any, before: fx.Node) -> None:
        self._tx, self._before = tx, before
        self._versions = {node: value._version for node, value in _tensors(tx)}
        self._seen = {*tx.output.graph.nodes}
        self._at_first = frozenset(self._seen)
        self._saved: dict[Any, tuple[Any, Any]] = {}  # a tensor as it is, and as it was before
        self._first: dict[Any, Any] = {}  # and as it is after the first way
        self._statistics: list[dict[fx.Node, Any]] = []  # of each way, by the tensor that they are kept in

    def _variable(self, node: fx.Node) -> Any:
        proxy = fx.Proxy(node, self._tx.output.current_tracer)
        return wrap_fx_proxy(self._tx, proxy, example_value=node.meta["example_value"])

    def _written(self) -> list[Any]:
        """The memories written since the last call, each by its largest tensor, which are saved as they were before."""
        written = []
        for node, value in _tensors(self._tx):
            if node.op == "placeholder":  # also of the model's tensors that were met since
                self._versions.setdefault(node, _UNWRITTEN)
            if self._versions.get(node, value._version) != value._version:
                written.append((node, value))
        keys = []
        for node, value in sorted(written, key=lambda each: -each[1].numel()):
            key = value.untyped_storage()._cdata
            if key in keys:
                continue
            keys.append(key)
            if key not in self._saved:
                tensor = self._variable(node)
                with self._tx.output.graph.inserting_before(self._before):
                    self._saved[key] = tensor, _call(self._tx, "clone", tensor)
        return keys

    def _keep_statistics(self) -> None:
        """Have the normalizations of a way write copies of their statistics."""
        copies: dict[fx.Node, Any] = {}
        for node in [node for node in self._tx.output.graph.nodes if node not in self._seen]:
            self._seen.add(node)
            for position in range(*_STATISTICS.get(node.target, (0, 0))):
                if isinstance(kept := node.args[position], fx.Node):
                    with self._tx.output.graph.inserting_before(node):
                        copies[kept] = _call(self._tx, "clone", copies.get(kept) or self._variable(kept))
                    node.update_arg(position, copies[kept].as_proxy().node)
        self._statistics.append(copies)

    def back(self) -> None:
        """Between the ways: write back what was before them."""
        self._keep_statistics()
        for key in self._written():
            tensor, saved = self._saved[key]
            self._first[key] = _call(self._tx, "clone", tensor)
            _call(self._tx, "copy_", tensor, saved)
        self._versions |= {node: value._version for node, value in _tensors(self._tx) if node in self._versions}

    def has_checks(self) -> bool:
        """Whether a way has checked something, which need not hold where it is not taken."""
        nodes = self._tx.output.graph.find_nodes(op="call_function", target=torch._assert_async)
        return any(node not in self._at_first for node in nodes)

    def choose(self, flag: Any, always_valid: bool) -> None:
        """After both ways: write what is after the first if ``flag`` is true."""
        self._keep_statistics()
        choice = _Choice(self._tx, flag, always_valid)
        for key in dict.fromkeys([*self._written(), *self._first]):
            tensor, saved = self._saved[key]
            _call(self._tx, "copy_", tensor, choice(self._first.get(key, saved), tensor))
        first, second = self._statistics
        for kept in dict.fromkeys([*first, *second]):
            tensor = self._variable(kept)
            _call(self._tx, "copy_", tensor, choice(first.get(kept, tensor), second.get(kept, tensor)))


# Objects that are written.

_ABSENT = object()
_Contents = dict[str, Any]


@dataclass
class _Log:
    """What a way writes to objects of the tracer's: attributes with what they were before, contents likewise."""

    effects: Any
    known: frozenset[Any]
    attributes: dict[tuple[Any, str], Any] = field(default_factory=dict)
    contents: dict[Any, _Contents] = field(default_factory=dict)

    def attribute(self, item: Any, name: str) -> Any:
        return self.effects.store_attr_mutations.get(item, {}).get(name, _ABSENT)

    def _is_of_one_way(self, variable: Any) -> bool:
        """Whether an object was made in one of the ways."""
        is_new = isinstance(variable.mutation_type, (ValueMutationNew, AttributeMutationNew))
        return is_new and variable not in self.known

    def _set(self, item: Any, name: str, value: Any) -> None:
        held = self.effects.store_attr_mutations.setdefault(item, {})
        if value is _ABSENT:
            held.pop(name, None)
        else:
            held[name] = value

    def back(self) -> _Log:
        """Undo what is logged; gives the same with what was there instead."""
        after = _Log(
            self.effects,
            self.known,
            {key: self.attribute(*key) for key in self.attributes},
            {variable: _contents(variable) for variable in self.contents},
        )
        for key, value in self.attributes.items():
            self._set(*key, value)
        for variable, before in self.contents.items():
            vars(variable).update(before)
        return after

    def choose(self, tx: Any, choice: _Choice, first: _Log, before: _Log) -> None:
        """After the second way, which is logged here: choose between that and the ``first``; ``before`` has what was
        there of that."""
        for key in dict.fromkeys([*before.attributes, *self.attributes]):
            if self._is_of_one_way(key[0]):
                self._set(*key, first.attributes.get(key, self.attribute(*key)))
                continue
            was = before.attributes[key] if key in before.attributes else self.attributes[key]
            other = self.attribute(*key)
            one = first.attributes.get(key, was)
            if was is _ABSENT:
                self._set(*key, _ABSENT)
                was = _own(tx, *key)
                one, other = (was if each is _ABSENT else each for each in (one, other))
            self._set(*key, _added(choice, was, one, other))
        for variable in dict.fromkeys([*before.contents, *self.contents]):
            if self._is_of_one_way(variable):
                vars(variable).update(first.contents.get(variable, {}))
                continue
            was = before.contents[variable] if variable in before.contents else self.contents[variable]
            one, other = first.contents.get(variable, was), _contents(variable)
            vars(variable).update({name: _held(choice, was.get(name), one[name], other[name]) for name in one})


@contextmanager
def _logged(tx: Any, known: frozenset[Any]) -> Iterator[_Log]:
    """Log what is written inside; ``known`` are the objects that exist before both ways."""
    effects = tx.output.side_effects
    log = _Log(effects, known)
    store, mutation = effects.store_attr, effects.mutation
    start = {variable: _contents(variable) for variable in known}

    @functools.wraps(store)
    def storing(item: Any, name: str, *args: Any, **kwargs: Any) -> None:
        log.attributes.setdefault((item, name), log.attribute(item, name))
        store(item, name, *args, **kwargs)

    @functools.wraps(mutation)
    def mutating(variable: Any) -> None:
        # The tracer says so of some writes, as of an item of a list, after it has made them.
        log.contents.setdefault(variable, start[variable] if variable in start else _contents(variable))
        mutation(variable)

    effects.store_attr, effects.mutation = storing, mutating
    try:
        yield log
    finally:
        effects.store_attr, effects.mutation = store, mutation


def _objects(tx: Any) -> frozenset[Any]:
    """The tracer's variables that functions on the stack can reach."""
    found: set[Any] = set()
    frames = []
    for variable in (*tx.symbolic_locals.values(), *tx.stack):
        if isinstance(variable, LazyVariableTracker) and type(getattr(variable._cache, "value", None)) in (list, dict):
            variable.realize()
    while tx is not None:
        frames.append([list(tx.symbolic_locals.values()), list(tx.stack)])
        effects, tx = tx.output.side_effects, getattr(tx, "parent", None)
    stored = [list(held.values()) for held in effects.store_attr_mutations.values()]
    VariableTracker.visit(found.add, [frames, stored, list(effects.id_to_variable.values())])
    return frozenset(found)


def _contents(variable: Any) -> _Contents:
    """What a list, a dictionary or an iterator of the tracer's holds."""
    held = {name: vars(variable)[name] for name in ("items", "index") if name in vars(variable)}
    return {name: value.copy() if hasattr(value, "copy") else value for name, value in held.items()}


def _own(tx: Any, item: Any, name: str) -> Any:
    """What an attribute is that has not been written; None in place of none."""
    try:
        return item.var_getattr(tx, name)
    except Exception:  # the tracer's, of many kinds
        return None


def _added(choice: _Choice, was: Any, one: Any, other: Any) -> Any:
    """What an attribute is afterwards: where there was nothing, what one of the ways alone has added."""
    if _is_nothing(was):
        for added, left in ((other, one), (one, other)):
            if left is None or left is was or (was is not None and _same(*map(_realized, (left, was)))):
                return added
    return choice(one, other)


def _is_nothing(variable: Any) -> bool:
    """Whether a cache, say, had nothing yet: None, False, a count of 0."""
    if variable is None:
        return True
    variable = _realized(variable)
    return variable.is_python_constant() and variable.as_python_constant() in (None, False)


def _held(choice: _Choice, was: Any, one: Any, other: Any) -> Any:
    """What is held afterwards."""
    if isinstance(one, dict) and isinstance(other, dict):
        return type(one)({key: _added(choice, was.get(key), one.get(key), other.get(key)) for key in {**one, **other}})
    if isinstance(one, list) and isinstance(other, list):
        before = [*was, *[None] * max(len(one), len(other))]
        chosen = [_added(choice, *each) for each in zip(before, one, other, strict=False)]
        return chosen + max(one, other, key=len)[len(chosen) :]
    if one != other:
        raise UnequalWaysError
    return other
