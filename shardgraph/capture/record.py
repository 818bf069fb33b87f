"""What a forward does in each layer of a stack, operation for operation, and which layers do the same.

The model's own Python runs once, for all layers, on fake tensors: whatever decides what a layer does, such as its
attributes, its hooks, its number in a loop or a configuration, shows in the operations that run. This takes a small
part of the time that tracing takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph.capture.answered import Answered, Answers
from shardgraph.capture.input_values import InputValues, memory_of
from shardgraph.capture.loops import RunAround
from shardgraph.capture.pytrees import register_types
from shardgraph.capture.side_effects import LeftBehind
from shardgraph.capture.stacks import LEAST, Stack, UnequalLayersError, layer_of, numbered_modules
from shardgraph.ir.fake_values import Make, again
from shardgraph.torch_api import FakeTensor, FakeTensorMode, outside_modes, pytree

_PERIODS = 8  # layers after which kinds of layers may repeat, at most
_FIRST = 4  # layers that may differ from those after them, or that all of those may read, at most
_DEVICE = torch.ops.prim.device.default


class Value(NamedTuple):
    """A value of the run, by where it was first seen: in a layer of a stack, or outside (``stack`` -1).

    ``name`` is its number there or, for a tensor of the model, its name in the layer.
    """

    stack: int
    number: int
    name: int | str


Leaf = Value | int | float | str | None
"""A leaf of the output: a tensor, by what it is, or another value."""


@dataclass
class _Segment:
    """The operations from one layer's start to the next one's, or outside of stacks."""

    stack: int
    number: int
    operations: list[tuple[Any, tuple[Value, ...]]] = field(default_factory=list)
    values: int = 0


@dataclass
class Record:
    """The segments of a forward, in order; values outside of stacks that are ``differentiated`` get a gradient.

    ``left`` is what it changed on the model: the values of attributes by the path of a module and their keys, and
    ``kept`` are the tensors among these, by what they are.
    ``around`` are the instructions of Python that ran around each layer, by its stack's position and its number.
    ``returned`` are the leaves of its output, and ``out_spec`` is how these are put together.
    """

    stacks: Sequence[Stack]
    segments: list[_Segment]
    differentiated: Set[Value]
    left: Mapping[tuple[str, tuple[str, ...]], Any]
    kept: Mapping[tuple[str, tuple[str, ...]], Value | None]
    around: Mapping[tuple[int, int], Set[Any]]
    returned: Sequence[Leaf]
    out_spec: Any

    def kinds(self, table: dict[Any, int], heads: Sequence[int]) -> list[int]:
        """A number for each segment, equal for segments that do the same.

        Segments refer to those before them in a stack by distance, but for the ``heads`` first layers of the stack.
        """
        return [table.setdefault((segment.stack, self._done(segment, heads)), len(table)) for segment in self.segments]

    def alike(self, stack: int) -> bool:
        """Whether all layers of a stack but the first do the same, in backward too.

        They do not if the last one is a case of its own: it is the only one that does not add to a gradient of what all
        read from outside, or of what it returns, which a layer reads that comes after another one.
        """
        layers = [segment for segment in self.segments if segment.stack == stack][1:]
        read = {value for segment in layers for _, of in segment.operations for value in of}
        if any(value in self.differentiated or value.stack not in (-1, stack) for value in read):
            return False
        returned = {value for value in self.returned if isinstance(value, Value)}
        passed = (v for layer in layers for _, of in layer.operations for v in of if v.number != layer.number)
        if not returned.isdisjoint(passed):
            return False
        heads = [0] * len(self.stacks)
        return len({self._done(segment, heads) for segment in layers}) == 1

    def _done(self, segment: _Segment, heads: Sequence[int]) -> tuple[Any, ...]:
        return tuple((what, tuple(self._seen(v, segment, heads) for v in of)) for what, of in segment.operations)

    def _seen(self, value: Value, segment: _Segment, heads: Sequence[int]) -> tuple[Any, ...]:
        if value.stack < 0 or value.number < heads[value.stack]:
            return ("at", *value)
        if value.stack == segment.stack:
            return ("before", segment.number - value.number, value.name)
        return ("last", value.stack, self.stacks[value.stack].layers - value.number, value.name)


def record(
    run: Callable[[], Any],
    model: nn.Module,
    mode: FakeTensorMode,
    inputs: Sequence[Any],
    stacks: Sequence[Stack],
    real: Sequence[Any],
) -> Record:
    """The record of ``run()``, a call of ``model`` on ``inputs`` whose tensors are fake ones of ``mode``, in place of
    ``real`` ones.

    Raises:
        UnequalLayersError: the layers of a stack are not called once each, in order, or Python asks for a value that
            another layer has computed.
    """
    recorder, around = _Recorder(model, mode, inputs, stacks), RunAround()
    values = InputValues(inputs, real, recorder.place, recorder.told)
    for position, number, layer in numbered_modules(model, stacks):

        def enter(*_: Any, position: int = position, number: int = number) -> None:
            recorder.enter(position, number)
            around.enter((position, number))

        def leave(*_: Any, position: int = position, number: int = number) -> None:
            recorder.leave(position, number)
            around.leave(last=number == stacks[position].layers - 1)

        layer.register_forward_pre_hook(enter, prepend=True)
        layer.register_forward_hook(leave)
    left = LeftBehind(model)
    with Answered(Answers()), recorder, around, values:
        output = run()
    returned, out_spec = recorder.returned(output)
    changed = left.now()
    kept = {place: recorder.known(value) for place, value in changed.items() if isinstance(value, torch.Tensor)}
    return Record(
        stacks, recorder.segments, recorder.differentiated, changed, kept, around.by_layer, returned, out_spec
    )


class _Recorder(TorchDispatchMode):
    """Records operations as they run. One that is equal to an earlier one gets results made like that one's."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, inputs: Sequence[Any], stacks: Sequence[Stack]) -> None:
        super().__init__()
        self._mode, self._stacks = mode, stacks
        self._made: dict[Any, Make] = {}
        self._held: list[torch.Tensor] = []  # so that no id is used twice
        self._values: dict[Any, Value] = {}
        self.segments = [_Segment(-1, 0)]
        self.differentiated: set[Value] = set()
        for name, tensor in _tensors(model):
            if not self.known(tensor):
                found = layer_of(name, stacks)
                self._keep(tensor, Value(*found) if found else Value(-1, -1, name))
        for leaf in inputs:
            if isinstance(leaf, torch.Tensor):
                self._new(leaf)

    def enter(self, stack: int, number: int) -> None:
        now = self.segments[-1]
        if (now.stack, now.number) != (stack, number - 1) if number else now.stack != -1:
            raise UnequalLayersError(f"layer {number} of {self._stacks[stack].path!r} is not called in order, once")
        self.segments.append(_Segment(stack, number))

    def leave(self, stack: int, number: int) -> None:
        now = self.segments[-1]
        if (now.stack, now.number) != (stack, number):
            raise UnequalLayersError(f"{self._stacks[stack].path!r} has layers that call others")
        if number == self._stacks[stack].layers - 1:
            self.segments.append(_Segment(-1, sum(segment.stack < 0 for segment in self.segments)))

    def place(self) -> Any:
        """The layer that runs; None outside of stacks."""
        now = self.segments[-1]
        return None if now.stack < 0 else (now.stack, now.number)

    def told(self, func: Any, args: Any, value: Any, places: Set[Any]) -> None:
        """Note an operation that is given the ``value`` of what inputs decide, computed in these places."""
        if not places <= {None, self.place()}:
            raise UnequalLayersError("Python asks for a value that layers compute one after the other")
        operands: list[torch.Tensor] = []
        what = func, _written(args, operands), repr(value)
        self.segments[-1].operations.append((what, self._used(operands)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # as torch asks again and again; it is part of every operand
            return args[0].device
        operands: list[torch.Tensor] = []
        what = func, _written(args, operands), _written(kwargs or {}, operands), torch.is_grad_enabled()
        used = self._used(operands)
        result = self._result(what, operands, args, kwargs or {})
        self.segments[-1].operations.append((what, used))
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(leaf, torch.Tensor):
                self._new(leaf)
        return result

    def _result(self, what: Any, operands: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The result of an operation, whose layout follows from its operands' and the memory that these share."""
        func = what[0]
        if func._schema.is_mutable or not all(map(_is_layout, operands)):
            return func(*args, **kwargs)
        memories = [operand.untyped_storage()._cdata for operand in operands]
        places = [
            (each.storage_offset(), memories.index(memory)) for each, memory in zip(operands, memories, strict=True)
        ]
        key = what, tuple(places)
        if (make := self._made.get(key)) is not None:
            with outside_modes():
                return make(operands)
        result = func(*args, **kwargs)
        if (made := again(self._mode, result, operands)) is not None:
            self._made[key] = made
        return result

    def returned(self, output: Any) -> tuple[list[Leaf], Any]:
        """Note the model's output: what a layer has made as something that this layer does, all else at the end.

        Raises:
            UnequalLayersError: it is an object that may hold anything.
        """
        register_types(output)
        leaves, spec = pytree.tree_flatten(output)
        if not all(isinstance(leaf, (torch.Tensor, int, float, str, type(None))) for leaf in leaves):
            raise UnequalLayersError("the output has parts that are not tensors")
        layers = {(segment.stack, segment.number): segment for segment in self.segments}
        returned: list[Leaf] = []
        for leaf in leaves:
            operands: list[torch.Tensor] = []
            what, used = ("returned", _written(leaf, operands)), self._used(operands)
            returned.append(used[0] if used else leaf)
            if leaf is None:  # of which as many may be as there are layers
                continue
            segment = layers.get(used[0][:2]) if used and used[0].stack >= 0 else None
            (segment or self.segments[-1]).operations.append((what, used))
        return returned, spec

    def _used(self, operands: list[torch.Tensor]) -> tuple[Value, ...]:
        return tuple([self.known(operand) or self._new(operand) for operand in operands])

    def _new(self, tensor: torch.Tensor) -> Value:
        segment = self.segments[-1]
        segment.values += 1
        return self._keep(tensor, Value(segment.stack, segment.number, segment.values))

    def known(self, tensor: torch.Tensor) -> Value | None:
        """What a tensor is; None if it was not made by an operation."""
        return self._values.get(id(tensor)) or self._values.get(memory_of(tensor))

    def _keep(self, tensor: torch.Tensor, value: Value) -> Value:
        self._held.append(tensor)
        if value.stack < 0 and tensor.requires_grad:
            self.differentiated.add(value)
        self._values[id(tensor)] = self._values[memory_of(tensor)] = value
        return value


def _written(value: Any, operands: list[torch.Tensor]) -> Any:
    """An argument as something that can be compared; its tensors are appended to ``operands``."""
    if isinstance(value, torch.Tensor):
        operands.append(value)
        # Asking a view makes autograd compute its function anew where its base was written, which it may be doing
        # right now: it would wait for itself.
        function = None if value._is_view() else type(value.grad_fn)
        layout = value.shape, value.stride(), value.dtype, value.device, value.requires_grad, function
        made = value.constant if isinstance(value, FakeTensor) else value  # in Python
        return (*layout, _values(made)) if type(made) is torch.Tensor else layout
    if isinstance(value, (list, tuple)):
        return tuple([_written(each, operands) for each in value])
    if isinstance(value, dict):
        return tuple([(key, _written(each, operands)) for key, each in value.items()])
    return (type(value), value) if isinstance(value, (bool, int, float)) else value


def _values(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, none of one on ``meta``, as something that can be compared."""
    with outside_modes():
        plain = tensor.detach().resolve_conj().resolve_neg()
        return b"" if plain.is_meta else plain.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_layout(operand: torch.Tensor) -> bool:
    """Whether a result's layout depends on an operand's layout alone: neither on its value nor on bits of its own."""
    return type(operand) is FakeTensor and operand.constant is None and not operand.is_complex()


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, buffers and plain tensor attributes of all modules, by their first names."""
    return [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers, vars(module))
        for name, value in held.items()
        if isinstance(value, torch.Tensor)
    ]


def repeated_layers(recorded: Record, table: dict[Any, int], alike: Set[int]) -> tuple[list[Stack], list[int]]:
    """The stacks of a forward in which layers repeat, and for each of ``recorded.stacks`` how many first layers all
    others may read.

    ``table`` numbers the kinds of segments. Of stacks whose layers are all ``alike`` the first and the last are kept.
    """
    stacks, heads = list(recorded.stacks), [0] * len(recorded.stacks)
    for position, stack in enumerate(stacks):
        if position in alike:
            stacks[position] = replace(stack, repeats=stack.layers - 2)
            continue
        here = [i for i, segment in enumerate(recorded.segments) if segment.stack == position]
        best = stack, 0
        for head in range(_FIRST) if here else ():
            kinds = recorded.kinds(table, [*heads[:position], head, *heads[position + 1 :]])
            best = max(
                best, (_periodic(stack, [kinds[i] for i in here], max(head, 1)), head), key=lambda each: each[0].omitted
            )
            if best[0].few <= 4:
                break
        stacks[position], heads[position] = best
    return [stack for stack in stacks if stack.omitted >= LEAST], heads


def check_same(
    whole: Record, few: Record, stacks: Sequence[Stack], heads: Sequence[int], table: dict[Any, int]
) -> None:
    """Check that a forward of few layers does what that of the whole model does, without the layers that are left out.

    Raises:
        UnequalLayersError: it does not.
    """
    by_path = {stack.path: stack for stack in stacks}
    omitted = set[tuple[int, int]]()
    for position, each in enumerate(whole.stacks):
        if (stack := by_path.get(each.path)) is not None:
            first = stack.head + stack.period
            omitted |= {(position, number) for number in range(first, first + stack.omitted)}
            for traced in range(first - stack.period, first):
                left_out = {(position, number) for number in stack.stands_for(traced)} & omitted
                if any(whole.around[layer] != whole.around[position, traced] for layer in left_out):
                    raise UnequalLayersError("Python does something else around a layer that is left out")
    kinds = zip(whole.segments, whole.kinds(table, heads), strict=True)
    kept = [kind for segment, kind in kinds if (segment.stack, segment.number) not in omitted]
    if kept != few.kinds(table, heads):
        raise UnequalLayersError("what is outside of the layers depends on their number")


def _periodic(stack: Stack, kinds: Sequence[int], least: int) -> Stack:
    """The stack with as many layers left out as repeat, after the first ``least``; the last layer is kept."""
    best = replace(stack, repeats=0)
    for period in range(1, _PERIODS + 1):
        for head in range(least, least + _FIRST):
            end = head + period
            while end < len(kinds) - 1 and kinds[end] == kinds[end - period]:
                end += 1
            units = (end - head) // period
            if units > 2 and (units - 2) * period > best.omitted:
                best = replace(stack, head=head, period=period, repeats=units - 2)
    return best
