"""Decisions that a model's Python makes by values of its inputs: a mask's ``any()``, the largest label.

A captured graph is the way that forward took for the values of one call. What it asked of them is a
:class:`~shardgraph.ir.Condition`: a function of the inputs, which is computed before each call and chooses the program,
as shapes do. What depends on parameters or random numbers is known only within the graph, and decides nothing.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph import torch_api
from shardgraph.arguments import BOOL, NONE, TEXT, checked
from shardgraph.capture.answered import Answers
from shardgraph.capture.input_values import InputValues, is_empty
from shardgraph.capture.numbers import is_number
from shardgraph.errors import ArgumentError
from shardgraph.ir import Condition, Sameness
from shardgraph.torch_api import unset_fake_temporarily

_LARGEST = 4096
"""Elements of the largest value that decides: lists of numbers are lengths and the like."""

_EMPTY = "the value is one of the inputs': give example inputs that have values, not on the device meta"
_RANDOM = (
    "a random number decides what is computed, as a number of Python: compare the tensor itself, without item(), of "
    "which both ways are computed; or set its probability to 0 (layerdrop=0.0 in the config of a model of "
    "transformers), with which it is captured"
)
_UNEQUAL = (
    "both ways of a branch on random numbers are computed, and one is chosen: both must leave behind tensors of the "
    "same shapes and dtypes, and else the same. Or set its probability to 0, with which it is captured"
)
_IN_THE_GRAPH = (
    "values of inputs may decide, but this one depends on parameters, buffers or earlier layers: compute both ways and "
    "choose with torch.where, write buffers that it changes in place (self.mean.copy_(...), which is computed both "
    "ways), or, if it is always the same, say so with shardgraph.assume({place!r}, False)"
)

_assumed: dict[str, bool] = {}


@checked(place=TEXT, value=BOOL | NONE)
def assume(place: str, value: bool | None) -> None:
    """Have models captured as if the condition of a branch were always ``value``; each call checks that it is.

    For a branch on a value that is known only within the graph, such as one for numbers that have overflowed. It
    applies to all that is captured from now on in this process, and must be the same on all ranks.

    Args:
        place: the branch, as an error of capture names it: the file's name and the line, ``"modeling.py:312"``. Of
            ``a and b`` each is a branch of its own.
        value: whether the condition is true; None takes back what was said.

    Raises:
        ArgumentError, a ValueError: ``place`` is no file and line.
        ModelCheckError: later, in a call in which it is not as assumed.
    """
    if not re.fullmatch(r"[^/\\:]+:\d+", place):
        raise ArgumentError(
            f"assume({place!r}, ...): place names a branch by its file and line, such as 'modeling.py:312'"
        )
    if value is None:
        _assumed.pop(place, None)
    else:
        _assumed[place] = bool(value)


def assumptions() -> list[tuple[str, bool]]:
    """All that is assumed, sorted."""
    return sorted(_assumed.items())


class Decisions:
    """What is asked while a call with these ``leaves`` is traced, with ``fakes`` in their place."""

    def __init__(self, leaves: Sequence[Any], fakes: Sequence[Any]) -> None:
        self.conditions: list[Condition] = []
        self.remedy = ""  # what would help with the latest value that is not known
        self.raised: dict[Any, tuple[str, list[tuple[str, int, str, str]]]] = {}
        self.answers = Answers()
        self._unequal: dict[str, str] = {}  # what would help, by line, if both ways of a branch are too unlike
        self._leaves, self._fakes = leaves, fakes
        self._position = {
            id(fake): i
            for i, (leaf, fake) in enumerate(zip(leaves, fakes, strict=True))
            if isinstance(leaf, torch.Tensor) and not is_number(leaf)
        }

    def value(self, node: fx.Node, line: str) -> Any:
        """See :class:`shardgraph.torch_api.Decider`."""
        value = self._value(node, line)
        if value is not None:
            self.answers.told(line, value)
        return value

    def size(self, node: fx.Node, line: str) -> Any:
        """See :class:`shardgraph.torch_api.Decider`."""
        remedy = self.remedy
        value = self._of_inputs(node, line)
        self.remedy = remedy
        return value

    def _value(self, node: fx.Node, line: str) -> Any:
        if (certain := _of_random(node)) is not None:
            return certain
        self.remedy = _IN_THE_GRAPH.format(place=_place(line))
        traced = torch_api.traced_value(node)
        if not isinstance(traced, torch.Tensor) or traced.numel() > _LARGEST:
            return None
        return self._of_inputs(node, line)

    def _of_inputs(self, node: fx.Node, line: str) -> Any:
        """The value of a node that is computed from inputs alone, which becomes a condition."""
        found = self._function(node)
        if found is None:
            if _draws(node):
                self.remedy = _RANDOM
            return None
        function, used = found
        if any(map(is_empty, (self._leaves[i] for i in used))):
            self.remedy = _EMPTY
            return None
        condition = Condition(f"{line}\n{function.graph}", line, None, function, used)
        for known in self.conditions:
            if known.key == condition.key:
                return known.value
        try:
            with unset_fake_temporarily(), _NothingRandom():
                value = condition.of(self._leaves)
        except _RandomError:
            self.remedy = _RANDOM
            return None
        if isinstance(value, str):
            return None  # an error, which is told where it happens
        self.conditions.append(replace(condition, value=value))
        return value

    def input_values(self) -> InputValues:
        """A mode in which fake tensors that are computed from inputs alone have the values by which forward decided."""
        return InputValues(self._fakes, self._leaves)

    def raised_at(self, message: str) -> list[tuple[str, int, str, str]]:
        """The lines that led to the exception of the traced code that a message of the tracer's is about, if known."""
        found = [frames for text, frames in self.raised.values() if text and text in message]
        return found[-1] if found else []

    def checked(self, line: str, value: bool) -> None:
        """See :class:`shardgraph.torch_api.Decider`."""
        self.answers.told(line, value)

    def both(self, node: fx.Node, line: str) -> bool:
        """See :class:`shardgraph.torch_api.Decider`: of random numbers, either way might have been taken."""
        self.answers.took_both(line)
        drawn = _draws(node)
        self._unequal[line] = _UNEQUAL if drawn else self.remedy
        self.remedy = ""
        return drawn

    def unequal(self, line: str) -> None:
        """See :class:`shardgraph.torch_api.Decider`."""
        self.remedy = self._unequal[line]

    def same(self, one: fx.Node, other: fx.Node, line: str) -> bool | None:
        """See :class:`shardgraph.torch_api.Decider`."""
        found = [self._position.get(id(torch_api.example_of(node))) for node in (one, other)]
        if None in found:
            return None
        first, second = sorted(position for position in found if position is not None)
        value = self._leaves[first] is self._leaves[second]
        condition = Sameness(f"{line}\n{first} is {second}", line, value, operator.is_, (first, second))
        if condition not in self.conditions:
            self.conditions.append(condition)
        return value

    def assumed(self, line: str) -> bool | None:
        """See :class:`shardgraph.torch_api.Decider`."""
        value = _assumed.get(_place(line))
        if value is not None:
            self.answers.told(line, value)
        return value

    def _function(self, node: fx.Node) -> tuple[fx.GraphModule, tuple[int, ...]] | None:
        """How ``node`` is computed from inputs alone, and from which; None if it is not."""
        known, writing, cast = self._known(node.graph)
        if node not in known:
            return None
        needed = {node, *writing}
        for each in reversed(known):
            if each in needed:
                needed.update(each.all_input_nodes)
        if not needed <= known.keys():
            return None
        positions = [self._position[known[each]] for each in known if each in needed and each.op == "placeholder"]
        if cast and any(self._leaves[i].is_floating_point() for i in positions):
            return None  # autocast decides what such operations give
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for each in known:
            if each in needed:
                copies[each] = graph.node_copy(each, copies.__getitem__)
                copies[each].meta = {}
        graph.output(copies[node])
        return fx.GraphModule(torch.nn.Module(), graph), tuple(positions)

    def _known(self, graph: fx.Graph) -> tuple[dict[fx.Node, Any], list[fx.Node], bool]:
        """The nodes that are computed from inputs alone, placeholders with what they are in the call, those of them
        that write in place, and whether there is a change of autocast."""
        known: dict[fx.Node, Any] = {}
        writing: list[fx.Node] = []
        cast = False
        for node in graph.nodes:
            if node.op == "placeholder":
                example = torch_api.example_of(node)
                if id(example) in self._position:
                    known[node] = id(example)
                continue
            cast = cast or "autocast" in getattr(node.target, "__name__", "")
            if node.op not in ("call_function", "call_method") or node.target in _MODES:
                continue
            if all(each in known for each in node.all_input_nodes):
                known[node] = None
                if _writes(node):
                    writing.append(node)
            elif _writes(node) and any(each in known for each in (*node.args[:1], node.kwargs.get("out"))):
                known.clear()  # it depends on more from here on, and so may what shares its memory
                writing.clear()
        return known, writing, cast


_MODES = {torch._C._set_grad_enabled}


def _place(line: str) -> str:
    """``file:line`` of a line as the tracer tells it."""
    found = re.match(r"(.*?):(\d+), in ", line)
    return f"{Path(found[1]).name}:{found[2]}" if found else ""


_NAMES = ("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_OPERATORS = {*(getattr(operator, f"i{name}") for name in _NAMES), operator.setitem}


def _writes(node: fx.Node) -> bool:
    """Whether an operation of the tracer's graph may write to a tensor that it is given."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or node.target in _OPERATORS or name == "__setitem__" or name.startswith("__i") or "out" in node.kwargs:
        return True
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a method, or a function of C
        given = node.kwargs
    return bool(given.get("inplace"))


def _draws(node: fx.Node) -> bool:
    """Whether a value is computed from random numbers alone."""
    needed, queue, drawn = {node}, [node], False
    while queue:
        each = queue.pop()
        drawn = drawn or each.target in _RANDOM_FUNCTIONS
        if each.target in (torch.rand_like, torch.randn_like):
            continue  # of its operand it has the shape alone
        if each.op not in ("call_function", "call_method"):
            return False
        fresh = {*each.all_input_nodes} - needed
        needed |= fresh
        queue += fresh
    return drawn


_RANDOM_FUNCTIONS = (torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.bernoulli)


def _of_random(node: fx.Node) -> bool | None:
    """What a comparison of ``torch.rand`` gives, whose numbers are in [0, 1), where it gives the same for all: a layer
    that is dropped with probability 0 is never dropped."""
    if node.target not in (operator.lt, operator.le, operator.gt, operator.ge) or len(node.args) != 2:
        return None
    number, bound = node.args
    drawn = isinstance(number, fx.Node) and number.target is torch.rand
    if not drawn or not isinstance(bound, (int, float)):
        return None
    below = node.target in (operator.lt, operator.le)
    if bound >= 1:
        return below
    return not below if bound < 0 or (bound == 0 and node.target in (operator.lt, operator.ge)) else None


class _RandomError(Exception):
    pass


class _NothingRandom(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _RandomError
        return func(*args, **(kwargs or {}))
