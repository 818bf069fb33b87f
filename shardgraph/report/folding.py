"""Models with many equal layers are analysed with a few of them, and the rows of the others are extrapolated.

The first layers may be unlike the others, and layers of several kinds may follow each other in turns: what is repeated
is then a unit of layers, one of each kind. What is said of layers here holds for units of them.

One more layer of a stack inserts one more segment of operations into forward and one into backward, with the same
costs, and shifts the live bytes by the same amount. Two shallow programs determine the segment and the shifts, where
their graphs are one traced graph in which an equal layer is repeated. Of graphs that were traced one by one a third
program must show that the layers are alike. Of a model with several stacks, as an encoder and a decoder are, each
program of a few layers of one is written down from such programs with a few of the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shardgraph.capture.private_copy import private_copy
from shardgraph.capture.stacks import Stack, count_layers
from shardgraph.cost_models.optimizers import UPDATED_TOGETHER, optimizer_cost
from shardgraph.passes.analysis.rows import Row
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import dtype_of
from shardgraph.report.update import MOST_COPIES

SHALLOW = ((5, 6, 7), (11, 12, 13))
"""Numbers of layers of the programs that are analysed, of which the last two determine and the first one checks: the
first and the last layer differ from those between, and so do their neighbours, whose all-gathers start early, and two
more have to be alike. The second numbers are tried if the first do not fold: where
communication takes longer than computation, each layer's backward leaves more reductions to be awaited later, until as
many are late as may be, and only from then on are layers scheduled alike."""

_OF_SEVERAL = ((3, 4, 5), (6, 7, 8))
"""Likewise numbers of units of several layers, in which neighbours are of the same unit."""

_PERIODS = 4
"""Layers that a unit has at most: of larger ones, programs of a few units are no shorter than those of most models."""

_TINY = 0.001
"""The part of a step's peak to which what an update takes for itself has to be known."""


def shallow(stack: Stack) -> tuple[tuple[int, int, int], ...]:
    """The numbers of units of the programs of a stack."""
    return SHALLOW if stack.period == 1 else _OF_SEVERAL


def numbers_for(stack: Stack) -> Iterator[tuple[int, int, int]]:
    """Those that are tried for a stack: further ones if two of them are together fewer than it has."""
    first, *others = shallow(stack)
    if first[-1] <= stack.units:
        yield first
    yield from (each for each in others if sum(each[1:]) <= stack.units)


def is_deep(stack: Stack) -> bool:
    """Whether it has more units than the two programs that determine the rest have together."""
    return stack.units > sum(shallow(stack)[0][1:])


class NotPeriodicError(Exception):
    """The shallow programs differ by more than a segment in each of forward and backward; analyse the whole model."""


def stack_of_forms(model: nn.Module) -> Stack | None:
    """The longest ``ModuleList`` whose layers have equal modules and parameter shapes, if any, but for the first ones,
    or for those of a few kinds in turns."""
    return max(_stacks_of_forms(model), key=lambda stack: stack.layers, default=None)


def _stacks_of_forms(model: nn.Module) -> Iterator[Stack]:
    for path, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and (stack := _stack(path, list(layers))) is not None:
            yield stack


def find_stack(model: nn.Module) -> Stack | None:
    """The longest ``ModuleList`` of which few layers tell of the others, if any: that of :func:`stack_of_forms`, of
    which layers of equal form are of two kinds too if their attributes (:func:`unlike`) differ in turns."""
    longest = stack_of_forms(model)
    if longest is None or not unlike(model, longest):
        return longest
    in_turns = _aligned(longest, longest.head, 2 * longest.period)
    return in_turns if _is_long(in_turns) and not unlike(model, in_turns) else longest


def find_others(model: nn.Module, longest: Stack) -> list[Stack]:
    """The further stacks of which few layers tell of the others, the longest first, such as an encoder's beside a
    decoder's: deep ones, not inside another."""
    found = [longest]
    for stack in sorted(_stacks_of_forms(model), key=lambda stack: -stack.layers):
        apart = not any(stack.prefix.startswith(each.prefix) or each.prefix.startswith(stack.prefix) for each in found)
        if apart and is_deep(stack) and not unlike(model, stack):
            found.append(stack)
    return found[1:]


def _stack(path: str, layers: Sequence[nn.Module]) -> Stack | None:
    """The layers as units of the fewest kinds; None if they are not, or too few."""
    kinds: dict[Any, int] = {}
    forms = [kinds.setdefault(_form(layer), len(kinds)) for layer in layers]
    for period in range(1, _PERIODS + 1):
        unequal = (number + 1 for number in range(len(forms) - period) if forms[number] != forms[number + period])
        stack = _aligned(Stack(path, len(forms)), max(unequal, default=0), period)
        if _is_long(stack):
            return stack
    return None


def _aligned(stack: Stack, head: int, period: int) -> Stack:
    """The stack with units of so many layers up to its end, after a head of at least so many."""
    return replace(stack, head=head + (stack.layers - head) % period, period=period)


def _is_long(stack: Stack) -> bool:
    return stack.period <= _PERIODS and stack.units > shallow(stack)[0][-1]


def merges_layers(plan: Plan, model: nn.Module, stack: Stack) -> bool:
    """Whether buckets of collectives hold several layers, so that one more layer does not insert the same again."""
    reduce = plan.precision.reduce
    item = dtype_of(reduce).itemsize if reduce is not None else 0

    def nbytes(layer: nn.Module) -> int:
        return sum(parameter.numel() * max(parameter.itemsize, item) for parameter in layer.parameters())

    return plan.data_size > 1 and min(nbytes(model.get_submodule(name)) for name in stack.unit(0)) <= plan.bucket


def _form(layer: nn.Module) -> tuple[object, ...]:
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = tuple((name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors)
    return modules, shapes, tuple(module.training for module in layer.modules())


def unlike(model: nn.Module, stack: Stack) -> str:
    """The plain attributes in which layers of a stack differ from those of the same kind in its second unit, so that
    they may compute something else; ``""`` if there are none.

    The first unit is looked at by itself. Numbers that count layers, and positive ones such as rates of dropout,
    whichever they are, change no cost.
    """
    children = list(model.get_submodule(stack.path).children())
    differ: dict[str, set[int]] = {}  # the layers, by the attribute; none where some layers lack it
    for first in range(stack.up_to(1), stack.up_to(2)):
        numbers = range(first, stack.layers, stack.period)
        values: dict[str, dict[int, Any]] = {}
        for number in numbers:
            for name, value in _attributes(children[number]):
                values.setdefault(name, {})[number] = value
        for name, found in values.items():
            if len(found) < len(numbers):
                differ.setdefault(name, set())
            elif others := _others(found):
                differ.setdefault(name, set()).update(others)
    return "; ".join(f"{name}{_of_layers(sorted(layers))}" for name, layers in differ.items())


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a layer and what is in it, by name."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if type(value) in (bool, int, float, str, type(None)) and not name.startswith("_"):
                yield f"{path}.{name}".removeprefix("."), value


def _others(values: Mapping[int, Any]) -> list[int]:
    """The layers whose value is another than the first one's, if they do not count layers."""
    (first, value), *_ = values.items()
    if all(type(each) is int and each - number == value - first for number, each in values.items()):
        return []
    return [number for number, each in values.items() if _effect(each) != _effect(value)]


def _of_layers(numbers: Sequence[int]) -> str:
    if not numbers:
        return ", which some layers lack"
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f" of layers {', '.join(map(str, numbers[:3]))}{more}"


def _effect(value: Any) -> Any:
    return value > 0 if isinstance(value, float) else value


def shortened(model: nn.Module, *few: tuple[Stack, int], counted: bool = False) -> nn.Module:
    """A copy of the model with the same tensors, with only the head and the first units of each stack, so many; with
    ``counted`` its configuration has their numbers."""
    copy = private_copy(model)
    for stack, units in few:
        if counted:
            count_layers(copy, stack, stack.up_to(units))
        owner, _, name = stack.path.rpartition(".")
        whole = copy.get_submodule(stack.path)
        assert isinstance(whole, nn.ModuleList)
        setattr(copy.get_submodule(owner), name, nn.ModuleList(list(whole)[: stack.up_to(units)]))
    return copy


def extend(few: Sequence[Sequence[Row]], least: int, layers: int) -> list[Row]:
    """The rows of the program with ``layers`` layers, from those of programs with ``least`` layers and one more each.

    The last two determine them; a third one, before, is checked to differ from these in the same way.

    Raises:
        NotPeriodicError: one more layer does not insert the same operations, or not shift live bytes evenly.
    """
    more = layers - (least + len(few) - 2)
    rows: list[Row] = []
    peak = max(sum(row.memory.values()) for row in few[-1])
    for half in dict.fromkeys(row.half for row in few[0]):
        programs = [[row for row in program if row.half == half] for program in few]
        rows += _extend_update(programs, more, peak) if half == "optimizer" else _extend_half(programs, more)
    return rows


def check_insertion(first: Sequence[Row], second: Sequence[Row]) -> None:
    """Check what two shallow programs tell, before another one is made.

    Raises:
        NotPeriodicError: one more layer does not insert operations in each of forward and backward.
    """
    for half in {row.half for row in first} - {"optimizer"}:
        _insertion(*([mark(row) for row in program if row.half == half] for program in (first, second)))


Mark = tuple[Any, ...]  # ends with the distance to what is waited for


def _insertion(few: Sequence[Mark], some: Sequence[Mark]) -> tuple[int, int]:
    """Where the second program has a segment that the first has not: from which row to which."""
    length = len(some) - len(few)
    differ = next((i for i, (a, b) in enumerate(zip(few, some, strict=False)) if a != b), len(few))
    # One segment earlier: tensors that all layers share die in the last layer that runs, which looks the same.
    start, end = differ - length, differ
    if length <= 0 or start < 0:
        raise NotPeriodicError("one more layer does not insert operations")
    if not _is_tail(few[start:], some[end:], length):
        raise NotPeriodicError("one more layer does not insert the same operations each time")
    return start, end


def _is_tail(few: Sequence[Mark], some: Sequence[Mark], length: int) -> bool:
    """Whether these are the same operations behind a segment, and behind it with ``length`` rows more: what waits for a
    transfer that is started before the segment, as for what all layers read, has started it as many rows earlier."""

    def alike(place: int, one: Mark, other: Mark) -> bool:
        return one[:-1] == other[:-1] and other[-1] == one[-1] + length and one[-1] > place

    pairs = enumerate(zip(few, some, strict=False))
    return len(few) == len(some) and all(a == b or alike(place, a, b) for place, (a, b) in pairs)


def _extend_half(programs: Sequence[Sequence[Row]], more: int) -> list[Row]:
    *before, first, second = programs
    few, some = ([mark(row) for row in program] for program in (first, second))
    start, end = _insertion(few, some)
    length = end - start
    for shorter in before:
        _check_like(shorter, first, second)
    start, end = start - length, end - length  # of two equal segments in the first program, the other may be the last
    if start < 0 or few[start:end] != few[end : end + length]:
        raise NotPeriodicError("the layers of the first program are not yet alike")
    for at in range(start, end):
        _check_even((first[at], second[at + length]), (first[at + length], second[at + 2 * length]))
    rows = [_grown(a, a, (more, a, b)) for a, b in zip(first[:start], second[:start], strict=True)]
    segments = zip(first[start:end], second[start:end], second[end : end + length], strict=True)
    repeated = [_Repeated(one, two, last, more) for one, two, last in segments]
    rows += [each.row(repeat) for repeat in range(more) for each in repeated]
    return rows + [_grown(a, a, (more, a, b)) for a, b in zip(first[start:], second[end:], strict=True)]


def _extend_update(programs: Sequence[Sequence[Row]], more: int, peak: int) -> Iterator[Row]:
    for rows in zip(*programs, strict=True):
        temporaries = _temporaries(rows, more, peak)
        *before, first, second = (
            replace(row, memory={kind: n for kind, n in row.memory.items() if kind != "temporaries"}) for row in rows
        )
        for shorter in before:
            _check_even((shorter, first), (first, second))
        read, written, seconds = (
            getattr(first, name) + more * (getattr(second, name) - getattr(first, name))
            for name in ("read", "written", "seconds")
        )
        row = replace(_grown(first, first, (more, first, second)), read=read, written=written, seconds=seconds)
        yield replace(row, memory={**row.memory, **({"temporaries": temporaries} if temporaries else {})})


def _temporaries(rows: Sequence[Row], more: int, peak: int) -> Any:
    """What the update takes for itself with ``more`` layers: as with a few, or of all that is updated at once."""
    few = [row.memory.get("temporaries", 0) for row in rows]
    cost = optimizer_cost(rows[0].operation)
    if all(nbytes * (cost.states + 1) == row.written * cost.at_once for nbytes, row in zip(few, rows, strict=True)):
        return few[-2] + more * (few[-1] - few[-2])
    # How small shards fall into what is updated together changes with their number, by less than one such update.
    unknown = (cost.temporaries + MOST_COPIES) * UPDATED_TOGETHER
    if any(nbytes != few[0] for nbytes in few) and unknown > _TINY * peak:
        raise NotPeriodicError("more layers are updated together, up to a limit that these few do not reach")
    return max(few)


def mark(row: Row) -> Mark:
    """Equal for two rows that are the same operation in two layers."""
    label = _DIGITS.sub("#", _COUNT.sub("", row.label))  # the first of several names has no number
    module = _LAYER.sub(".#", row.module)
    return row.operation, module, label, row.flops, row.read, row.written, row.sent, row.seconds, row.waits


def _check_like(shorter: Sequence[Row], first: Sequence[Row], second: Sequence[Row]) -> None:
    """Check that a third, ``shorter`` program differs from the first as that from the second."""
    few, some, many = ([mark(row) for row in program] for program in (shorter, first, second))
    start, end = _insertion(few, some)
    length = end - start
    repeated = many[: end + length] == some[:end] + some[start:end]
    if not repeated or not _is_tail(some[end:], many[end + length :], length):
        raise NotPeriodicError("one more layer does not insert the same operations each time")
    heads = zip(shorter[:start], first[:start], second[:start], strict=True)
    tails = zip(shorter[start:], first[end:], second[2 * end - start :], strict=True)
    for one, two, three in (*heads, *tails):
        _check_even((one, two), (two, three))


def _check_even(before: tuple[Row, Row], after: tuple[Row, Row]) -> None:
    """Check that two rows differ in their live bytes as two other ones."""
    if _growth(*before) != _growth(*after):
        raise NotPeriodicError(f"the bytes live at {before[0].node} do not grow evenly with the layers")


def _growth(before: Row, after: Row) -> dict[tuple[str, str], int]:
    """The difference in live bytes between two rows, by place (``"memory"`` or ``"host"``) and kind."""
    growth = {
        (place, kind): getattr(after, place).get(kind, 0) - getattr(before, place).get(kind, 0)
        for place in ("memory", "host")
        for kind in {**getattr(before, place), **getattr(after, place)}
    }
    return {key: nbytes for key, nbytes in growth.items() if nbytes}


_DIGITS, _COUNT, _LAYER = re.compile(r"\d+"), re.compile(r"_+\d*\b"), re.compile(r"\.\d+\b")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _grown(row: Row, base: Row, *growths: tuple[int, Row, Row]) -> Row:
    """``row`` with the live bytes, layer number and distance to what it waits for of ``base``, plus ``growths``: how
    many times, from and to a row."""
    layer = _layer(base) + sum(times * (_layer(after) - _layer(before)) for times, before, after in growths)
    memory, host = _with_growth(base, *((times, _growth(before, after)) for times, before, after in growths))
    module, label = _in_layer(row.module, row.label, layer)
    waits = base.waits + sum(times * (after.waits - before.waits) for times, before, after in growths)
    return row.but(memory=memory, host=host, module=module, label=label, waits=waits)


def _with_growth(row: Row, *growths: tuple[int, dict[tuple[str, str], int]]) -> list[dict[str, int]]:
    """The live bytes of a row on the device and on the host, plus ``growths``, each so many times."""
    live = {"memory": dict(row.memory), "host": dict(row.host)}
    for times, growth in growths:
        for (place, kind), nbytes in growth.items():
            live[place][kind] = live[place].get(kind, 0) + times * nbytes
    return [{kind: nbytes for kind, nbytes in each.items() if nbytes} for each in live.values()]


def _in_layer(module: str, label: str, layer: int) -> Iterator[str]:
    """A module's name and a label with the number of another layer, if the module is of one."""
    if not _NUMBER.search(module):
        return iter((module, label))
    return (_NUMBER.sub(str(layer), text, count=1) for text in (module, label))


class _Repeated:
    """A row of the repeated segment, as ``one`` of it in the first program, ``two`` in the second and ``last`` in the
    repetition after that: live bytes grow from one repetition to the next, and with the number of layers."""

    def __init__(self, one: Row, two: Row, last: Row, more: int) -> None:
        self._node, self._first = one.node, _grown(last, one, (more, one, two))
        self._growth, self._layers = _growth(two, last), _layer(last) - _layer(two)
        self._numbered = _NUMBER.search(self._first.module) is not None and self._layers
        self._layer = _layer(self._first)
        self._module, self._label = (_NUMBER.split(text, 1) for text in (self._first.module, self._first.label))

    def row(self, repeat: int) -> Row:
        """The row in repetition ``repeat``."""
        changed: dict[str, Any] = {"node": f"{self._node}+{repeat}"}
        if self._growth:
            changed["memory"], changed["host"] = _with_growth(self._first, (repeat, self._growth))
        if self._numbered:
            number = str(self._layer + repeat * self._layers)
            changed |= {"module": number.join(self._module), "label": number.join(self._label)}
        return self._first.but(**changed)


def _layer(row: Row) -> int:
    """The layer number of a row: the first number in its module's name; 0 if there is none."""
    number = _NUMBER.search(row.module)
    return int(number[0]) if number else 0
