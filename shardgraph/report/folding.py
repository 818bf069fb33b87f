"""Models with many equal layers are analysed with a few of them, and the rows of the others are extrapolated.

A stack of equal layers has a periodic program: one more layer inserts one more segment of operations into forward and
one into backward, with the same costs, and shifts the live bytes by the same amount each time. Three shallow programs
determine the segment and the shifts; :func:`extend` repeats them, or raises if the three programs disagree, so that
the caller can analyse the whole model instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardgraph.capture.private_copy import private_copy
from shardgraph.passes.analysis.rows import Row
from shardgraph.plans.annotations.match import matches
from shardgraph.plans.plan import Plan

SHALLOW = (3, 4, 5)
"""Numbers of layers of the programs that are analysed: the first and the last layer differ from those between, and so
may their neighbours, whose all-gathers start early."""


@dataclass(frozen=True)
class Stack:
    """A ``ModuleList`` of ``layers`` equal layers, by name."""

    path: str
    layers: int


class NotPeriodicError(Exception):
    """The shallow programs do not differ by one repeated segment; the whole model must be analysed."""


def find_stack(model: nn.Module, least: int = sum(SHALLOW)) -> Stack | None:
    """The longest ``ModuleList`` of more than ``least`` layers with equal modules and parameter shapes, if any."""
    stacks = [
        Stack(path, len(module))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > least and len({_form(m) for m in module}) == 1
    ]
    return max(stacks, key=lambda stack: stack.layers, default=None)


def treats_alike(plan: Plan, model: nn.Module, stack: Stack) -> bool:
    """Whether ``plan`` treats all layers of a stack of ``model`` equally."""
    layers: dict[str, set[object]] = {str(number): set() for number in range(stack.layers)}
    names = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    rules = plan.recompute if not isinstance(plan.recompute, str) else ()
    constraints: tuple[tuple[str, object], ...] = (*plan.annotations, *rules)
    for name in names if constraints else ():
        if name.startswith(f"{stack.path}."):
            number, _, rest = name.removeprefix(f"{stack.path}.").partition(".")
            layers[number] |= {(rest, *each) for each in constraints if matches(each[0], name)}
    alike = all(layer == layers["0"] for layer in layers.values())
    return alike and all(pattern == "*" for pattern, _ in plan.parameters)


def _form(layer: nn.Module) -> tuple[object, ...]:
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = tuple((name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors)
    return modules, shapes, tuple(module.training for module in layer.modules())


def shortened(model: nn.Module, stack: Stack, layers: int) -> nn.Module:
    """A copy of the model with the same tensors, of whose stack there are only the first ``layers`` layers."""
    copy = private_copy(model)
    owner, _, name = stack.path.rpartition(".")
    whole = copy.get_submodule(stack.path)
    assert isinstance(whole, nn.ModuleList)
    setattr(copy.get_submodule(owner), name, nn.ModuleList(list(whole)[:layers]))
    return copy


def extend(shallow: Sequence[Sequence[Row]], layers: int) -> list[Row]:
    """The rows of the program with ``layers`` layers, from those of the programs with ``SHALLOW`` numbers of layers.

    Raises:
        NotPeriodicError: the shallow programs do not differ by one repeated segment in each of forward and backward.
    """
    halves = list(dict.fromkeys(row.half for row in shallow[0]))
    rows: list[Row] = []
    for half in halves:
        programs = [[row for row in program if row.half == half] for program in shallow]
        rows += _extend_update(programs, layers) if half == "optimizer" else _extend_half(programs, layers)
    return rows


def _extend_half(programs: Sequence[Sequence[Row]], layers: int) -> list[Row]:
    first, second, third = programs
    marks = [[_mark(row) for row in program] for program in programs]
    length = len(second) - len(first)
    differ = next((i for i, (a, b) in enumerate(zip(marks[0], marks[1], strict=False)) if a != b), len(first))
    # One segment earlier: tensors that all layers share die in the last layer that runs, which looks the same.
    start, end = differ - length, differ
    if length <= 0 or start < 0:
        raise NotPeriodicError("one more layer does not insert operations")
    segment = marks[1][start:end]
    if (
        marks[0][:start] + segment + marks[0][start:] != marks[1]
        or marks[1][:end] + segment + marks[1][end:] != marks[2]
    ):
        raise NotPeriodicError("one more layer does not insert the same operations each time")
    more = layers - SHALLOW[0]

    rows = [_shifted(a, b, c, more) for a, b, c in zip(first[:start], second[:start], third[:start], strict=True)]
    for repeat in range(more):
        for j in range(length):
            one, two, last = second[start + j], third[start + j], third[end + j]
            # Live bytes grow from one repetition to the next, and with the number of layers.
            memory, host = (
                _plus(_plus(a, _minus(c, b), repeat), _minus(b, a), more - 1)
                for a, b, c in ((one.memory, two.memory, last.memory), (one.host, two.host, last.host))
            )
            layer = repeat * (_layer(last) - _layer(two)) + (more - 1) * (_layer(two) - _layer(one))
            repeated = replace(last, memory=memory, host=host, node=f"{one.node}+{repeat}")
            rows.append(_in_layer(repeated, _layer(one) + layer))
    tails = zip(first[start:], second[end:], third[end + length :], strict=True)
    return rows + [_shifted(a, b, c, more) for a, b, c in tails]


def _extend_update(programs: Sequence[Sequence[Row]], layers: int) -> list[Row]:
    more = layers - SHALLOW[0]
    return [
        replace(
            _shifted(first, second, third, more),
            read=first.read + more * (second.read - first.read),
            written=first.written + more * (second.written - first.written),
            seconds=first.seconds + more * (second.seconds - first.seconds),
        )
        for first, second, third in zip(*programs, strict=True)
    ]


def _mark(row: Row) -> tuple[object, ...]:
    """Equal for two rows that are the same operation in two layers."""
    label = re.sub(r"\d+", "#", row.label)
    module = re.sub(r"\.\d+\b", ".#", row.module)
    return row.operation, module, label, row.flops, row.read, row.written, row.sent, row.seconds, row.waits


def _shifted(first: Row, second: Row, third: Row, more: int) -> Row:
    """A row outside the repeated segment, whose live bytes grow by the same amount with every layer."""
    base, of_host = _minus(second.memory, first.memory), _minus(second.host, first.host)
    if (base, of_host) != (_minus(third.memory, second.memory), _minus(third.host, second.host)):
        raise NotPeriodicError(f"the bytes live at {first.node} do not grow evenly with the layers")
    layer = _layer(first) + more * (_layer(second) - _layer(first))
    grown = replace(first, memory=_plus(first.memory, base, more), host=_plus(first.host, of_host, more))
    return _in_layer(grown, layer)


def _minus(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    difference = {kind: a.get(kind, 0) - b.get(kind, 0) for kind in {*a, *b}}
    return {kind: nbytes for kind, nbytes in difference.items() if nbytes}


def _plus(a: Mapping[str, int], b: Mapping[str, int], times: int) -> dict[str, int]:
    total = {kind: a.get(kind, 0) + times * b.get(kind, 0) for kind in {*a, *b}}
    return {kind: nbytes for kind, nbytes in total.items() if nbytes}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _layer(row: Row) -> int:
    """The layer number of a row: the first number in its module's name; 0 if there is none."""
    number = _NUMBER.search(row.module)
    return int(number[0]) if number else 0


def _in_layer(row: Row, layer: int) -> Row:
    """The row with the names of another layer."""
    if not _NUMBER.search(row.module):
        return row
    module, label = (_NUMBER.sub(str(layer), text, count=1) for text in (row.module, row.label))
    return replace(row, module=module, label=label)
