"""The text of a graph: a function for each kind of unit, and one that calls them, equal layers in a loop."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.emission.expressions import RESULTS, VIEWS, Spelling, constant
from shardgraph.emission.lines import indented, wrapped
from shardgraph.emission.names import Names, camel, identifier, snake
from shardgraph.emission.segments import Segment, modules_of
from shardgraph.ir.attributes import MADE_BY, MODULES, SOURCE, SUBJECT

aten = torch.ops.aten

OUTSIDE = ("placeholder", "get_attr")
"""Nodes that are values from outside of a graph: its inputs, and constants beside it."""

Source = Callable[[fx.Node], "Outside"]


def readers(node: fx.Node) -> list[fx.Node]:
    """The operations that read a value."""
    return [user for user in node.users if user.op != "output"]


@dataclass(frozen=True)
class Outside:
    """A value from outside of a graph: the parameter or buffer ``state``, what forward ``saved``, or a ``text``."""

    state: str = ""
    saved: fx.Node | None = None
    text: str = ""


@dataclass
class Fields:
    """What forward saves, by value: the segment that has it, by key, and its field there."""

    of: dict[fx.Node, tuple[tuple[str, int], str]] = field(default_factory=dict)
    places: dict[tuple[str, int], str] = field(default_factory=dict)  # of each segment's, as an expression

    def text(self, value: fx.Node, here: tuple[str, int] | None = None) -> str:
        """A saved value as an expression, in the function of a segment or of the whole."""
        key, name = self.of[value]
        if key == here:
            return f"saved.{name}"
        return f"{self.places.get(key, 'saved')}.{name}"


@dataclass
class Written:
    """The function of a segment: its ``text`` with ``{name}`` and ``{class_}`` still to be chosen, and its interface:
    what it is called with and what it returns, in order."""

    segment: Segment
    text: str
    class_text: str
    uses_state: bool
    uses_saved: bool
    slots: list[Outside | fx.Node]
    flows: list[fx.Node]
    flow_names: list[str]
    saves: bool
    gradients: bool
    name: str = ""

    def same(self) -> tuple[str, str, str]:
        """Equal for segments that one function is enough for."""
        return self.segment.stack or self.segment.unit, self.text, self.class_text


class Text:
    """Writes the operations of one function: ``env`` has the expression of every value, ``names`` those taken."""

    def __init__(self, spelling: Spelling, names: Names, unit: str, prefix: str) -> None:
        self.spelling, self.names, self.unit, self.prefix = spelling, names, unit, prefix
        self.env: dict[fx.Node, str] = {}
        self.labels: dict[fx.Node, str] = {}  # names of values that are gradients of parameters
        self.lines: list[str] = []
        self._said = ""

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.env[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.argument, value))}]"
        return constant(value)

    def write(self, nodes: Sequence[fx.Node], kept: Iterable[fx.Node]) -> None:
        """Add the statements of nodes; the values of ``kept`` get names."""
        kept = set(kept)
        within = self._within(nodes, kept)
        ends = {self._module(node): node for node in nodes if node not in within and _alias(node) is None}
        for node in nodes:
            if node in self.env:
                continue
            alias = _alias(node)
            if alias is not None and alias in self.env:  # not if it is of a function beside this one
                self.env[node] = self.env[alias]
                continue
            text = self.spelling.operation(node, self.argument)
            if ir.is_collective(node) or node not in within:
                self._comment(node)
            if node in within:
                self.env[node] = text
                continue
            end = ends.get(self._module(node))
            targets = self._targets(
                node, end is node or (end is not None and end.args[:1] == (node,) and _is_part(end))
            )
            self.lines += wrapped(f"{targets} = {text}")

    def _within(self, nodes: Sequence[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
        """The values that are written where they are read: views, and what is done next with a collective's result."""
        found, inside = set(), set(nodes)
        for i, node in enumerate(nodes):
            value, reads = node, readers(node)
            if ir.is_collective(node) and len(reads) == 1:
                value, reads = reads[0], readers(reads[0])
            if {node, value} & kept or len(reads) != 1 or reads[0] not in inside:
                continue
            if node.target in VIEWS or node.target is ir.pad_shard:
                found.add(node)
            elif ir.is_collective(node) and value in inside and [value, reads[0]] == list(nodes[i + 1 : i + 3]):
                found |= {node} if MADE_BY.get(reads[0]) and not _continues(reads[0]) else set()
        return found

    def _targets(self, node: fx.Node, last: bool) -> str:
        base = self.hint(node, last)
        value = node.meta.get("val")
        if not isinstance(value, (tuple, list)):
            self.env[node] = self.names.new(base)
            return self.env[node]
        named = RESULTS.get(node.target) or tuple(str(i) for i in range(len(value)))
        used = {user.args[1]: user for user in node.users if _is_part(user)}
        if len(used) < len(readers(node)) or not all(isinstance(i, int) for i in used):
            self.env[node] = self.names.new(base)
            return self.env[node]
        targets = []
        for i in range(len(value)):
            if i not in used or not used[i].users:
                targets.append("_")
                continue
            local = "local" if any(SUBJECT.get(user, "").startswith("gradient") for user in used[i].users) else ""
            name = self.names.new("_".join(filter(None, (base, named[i] if i < len(named) else str(i), local))))
            for user in node.users:
                if user.args[1] == i:
                    self.env[user] = name
            targets.append(name)
        return ", ".join(targets) + ("," if len(targets) == 1 else "")

    def hint(self, node: fx.Node, last: bool) -> str:
        """A name for a value."""
        start = node.args[0] if node.target is ir.WAIT_COPY else node
        if isinstance(start, fx.Node) and _is_kept_on_host(start):
            source: fx.Node = start.args[0]  # type: ignore[assignment]
            name = self.env.get(source, "").rpartition(".")[2]
            name = name if name.isidentifier() else self.hint(source, last)
            return f"{name}_on_host" if start.target is ir.TO_HOST else name.removesuffix("_on_host")
        if node in self.labels:
            return identifier(self.relative(self.labels[node]))
        subject = SUBJECT.get(node, "")
        if subject and not self._module(node) and re.fullmatch(r"(gradient of )?[\w.]+", subject):
            return identifier(self.relative(subject).replace("gradient of ", "grad_"))
        module, operation = self._module(node), _operation(node)
        base = module if module and last else "_".join(filter(None, (module, operation)))
        return identifier(base if node in MODULES else self.prefix + base)

    def _module(self, node: fx.Node) -> str:
        """The path of the module of a node, in the unit."""
        path = next((path for path, _ in reversed(modules_of(node))), "")
        return self.relative(path) if path != self.unit else ""

    def relative(self, text: str) -> str:
        """Text in which names are those in the unit."""
        return text.replace(f"{self.unit}.", "") if self.unit else text

    def _comment(self, node: fx.Node) -> None:
        module = self._module(node)
        source = (SOURCE.get(node) or "").rpartition("/")[2]
        where = ", ".join(filter(None, (module, source)))
        if ir.is_collective(node):
            name = node.target.__name__.partition(".")[0].rstrip("_").removesuffix("_out")
            kind = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}.get(name, name)
            kind = kind.removesuffix("_single").replace("_", "-")
            subject = re.sub(r"^(?!gradient)(\w+?)(_(default|tensor|int|\d+))* of ", r"\1 of ", SUBJECT.get(node, ""))
            of = f" of {self.relative(subject)}" if subject else ""
            self.lines.append(f"# {kind}{of} over {ir.group_of(node)}" + (f" ({where})" if where else ""))
            self._said = where
        elif ir.is_copy(node):
            what = "kept for backward" if _is_kept_on_host(node) else self.relative(SUBJECT.get(node, ""))
            self.lines.append(f"# {what}, {ir.DIRECTIONS[node.target]}")
            self._said = ""
        elif where and where != self._said and (module or node not in MADE_BY):
            self.lines.append(f"# {where}")
            self._said = where


def gradient_names(gradients: Mapping[str, fx.Node]) -> dict[fx.Node, str]:
    """A name for what becomes the gradient of each parameter: this rank's own, before it is reduced."""
    names = {}
    for fqn, value in gradients.items():
        own = value
        while own.all_input_nodes and (MADE_BY.get(own) or _alias(own) is not None or own.target in VIEWS):
            own = own.all_input_nodes[0]
        names[own] = f"grad.{fqn}" + ("" if own is value or not MADE_BY.get(value) else ".local")
    return names


def _operation(node: fx.Node) -> str:
    if ir.is_collective(node):
        return "sum" if node.target is ir.ALL_REDUCE else "exchanged" if node.target is ir.ALL_TO_ALL else "gathered"
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0].strip("_")
    for ending in ("_default", "_data", "_backward", "_forward"):
        name = name.removesuffix(ending)
    name = name.removeprefix("native_")
    return {"to_copy": "cast", "unsafe_view": "view", "t": "transposed"}.get(name, name)


def _is_kept_on_host(node: fx.Node) -> bool:
    """Whether a node copies what forward keeps for backward, to the host or back."""
    return ir.is_copy(node) and MADE_BY.get(node) == "offload-activations"


def _alias(node: Any) -> fx.Node | None:
    """The value that a node is, where it says nothing to a reader: outside of autograd, a detached one is the same."""
    if node.target in (ir.WAIT, ir.WAIT_COPY, aten.detach.default, aten.alias.default):
        operand: fx.Node = node.args[0]
        return operand
    inner: Any = node.args[0] if node.target is aten.t.default else None
    if isinstance(inner, fx.Node) and inner.target is aten.t.default:
        original: fx.Node = inner.args[0]  # type: ignore[assignment]
        return original
    return None


def _continues(node: fx.Node) -> bool:
    """Whether a node is a collective, or only another name of a value."""
    return _alias(node) is not None or ir.is_collective(node)


def _is_part(node: fx.Node) -> bool:
    """Whether a node is one of several results of an operation."""
    return node.target is operator.getitem


@dataclass
class Graph:
    """A graph to be written: ``segments``, where values of placeholders come from, and what of it is needed.

    ``saves`` are the values that backward needs, each with the key of the segment that has it. ``gradients`` are
    values by the parameters whose gradients they are.
    """

    segments: list[Segment]
    source: Source
    results: list[fx.Node]
    saves: dict[fx.Node, tuple[str, int]] = field(default_factory=dict)
    gradients: dict[str, fx.Node] = field(default_factory=dict)


class Writer:
    """Writes the functions of graphs; ``functions`` has all, each once, ``classes`` what they save."""

    def __init__(self, spelling: Spelling, names: Names) -> None:
        self.spelling, self.names = spelling, names
        self.fields = Fields()
        self.field_names = Names()  # of what the whole saves
        self.stacks: dict[str, tuple[str, str]] = {}  # the field and the variable of what layers of a stack save
        self.functions: dict[tuple[str, ...], tuple[str, str]] = {}  # by what is the same, the name and text
        self.classes: dict[tuple[str, ...], tuple[str, str]] = {}
        self.class_of: dict[tuple[str, int], str] = {}  # the class that a segment of this key saves in

    def segment(self, segment: Segment, graph: Graph, carried: set[fx.Node], backward: bool) -> Written:
        """Write the function of a segment; values ``carried`` from layer to layer are called alike in all."""
        inside = set(segment.nodes)
        unit = segment.unit
        names = Names({"p"})
        text = Text(self.spelling, names, unit, "grad_" if backward else "")
        text.labels = gradient_names(graph.gradients)
        own = {f: v for f, v in graph.gradients.items() if v in inside and f.startswith(f"{unit}.")}
        wanted = set(graph.results) - set(own.values())
        flows = [n for n in segment.nodes if n in wanted or any(user not in inside for user in readers(n))]
        saves = [value for value, key in graph.saves.items() if key == segment.key]
        slots: list[Outside | fx.Node] = []
        parameters: dict[Outside | fx.Node, str] = {}
        uses_state = uses_saved = False
        for value in [*dict.fromkeys(each for node in segment.nodes for each in node.all_input_nodes), *saves]:
            if value in inside or value in text.env:
                continue
            outside: Outside | fx.Node = value
            if value.op in OUTSIDE:
                outside = graph.source(value)
                if outside.state.startswith(f"{unit}."):
                    text.env[value], uses_state = f'p["{outside.state.removeprefix(unit + ".")}"]', True
                    continue
                if outside.saved is not None and self.fields.of[outside.saved][0] == segment.key:
                    text.env[value], uses_saved = self.fields.text(outside.saved, segment.key), True
                    continue
            if outside not in parameters:
                parameters[outside] = names.new(_slot_name(outside, value, carried, backward, text))
                slots.append(outside)
            text.env[value] = parameters[outside]
        text.write(segment.nodes, {*flows, *saves, *own.values()})
        lines, returned, of_class = text.lines, [text.env[n] for n in flows], list[str]()
        if saves:
            fields = self._fields(saves, text, segment.key)
            of_class = class_lines(fields)
            returned.append(f"{{class_}}({', '.join(f'{name}={value}' for name, (value, _) in fields.items())})")
        if own:
            entries = ", ".join(f'"{f.removeprefix(unit + ".")}": {text.env[v]}' for f, v in own.items())
            returned.append("{" + entries + "}")
        lines += wrapped(f"return {', '.join(returned)}")
        types = ["Tensor"] * len(flows) + ["{class_}"] * bool(saves) + ["dict[str, Tensor]"] * bool(own)
        result = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
        taken = ["p: Mapping[str, Tensor]"] * uses_state + ["saved: {saved_class}"] * uses_saved
        taken += [f"{parameters[slot]}: Tensor" for slot in slots]
        what = "Backward" if backward else "Forward"
        kind = f"a {segment.kind}" if segment.stack else f"{segment.kind}, {unit}"
        body = [f'"""{what} of {kind}."""', *lines]
        head = wrapped(f"def {{name}}({', '.join(taken)}) -> {result}:")
        return Written(
            segment,
            "\n".join([*head, *indented(body)]),
            "\n".join(of_class),
            uses_state,
            uses_saved,
            slots,
            flows,
            [text.env[n] for n in flows],
            bool(saves),
            bool(own),
        )

    def _fields(self, saves: Sequence[fx.Node], text: Text, key: tuple[str, int]) -> dict[str, tuple[str, Any]]:
        """The fields of saved values: each with its expression and its value as traced."""
        fields: dict[str, tuple[str, Any]] = {}
        names, by_text = Names(), dict[str, str]()
        for value in saves:
            expression = text.env[value]
            if expression not in by_text:
                wanted = expression if expression.isidentifier() else text.hint(value, last=False)
                by_text[expression] = names.new(wanted)
            fields[by_text[expression]] = expression, value.meta.get("val")
            self.fields.of[value] = key, by_text[expression]
        return fields

    def named(self, written: Written, backward: bool) -> str:
        """The name of a written function, which is kept if it is new."""
        segment, key = written.segment, (*written.same(), str(backward))
        base = snake(segment.kind) if segment.stack else identifier(segment.unit)
        if key not in self.functions:
            name = self.names.new(f"{base}_{'backward' if backward else 'forward'}")
            text = written.text.replace("{name}", name)
            if written.saves:
                class_ = self.names.new_class(f"{camel(base)}Saved")
                what = f"a {segment.kind}" if segment.stack else segment.unit
                body = [f'"""What backward needs of {what}."""', "", *written.class_text.splitlines()]
                self.classes[key] = class_, "\n".join([f"class {class_}(NamedTuple):", *indented(body)])
                text = text.replace("{class_}", class_)
            text = text.replace("{saved_class}", self.class_of.get(segment.key, "Any"))
            lines = (part for line in text.splitlines() for part in wrapped(line))  # longer with names
            self.functions[key] = name, "\n".join(lines)
        if written.saves:
            self.class_of[segment.key] = self.classes[key][0]
        return self.functions[key][0]


def _slot_name(outside: Outside | fx.Node, value: fx.Node, carried: set[fx.Node], backward: bool, text: Text) -> str:
    if isinstance(outside, fx.Node):
        if outside in carried:
            return "grad" if backward else "x"
        return text.hint(outside, last=True)
    if outside.state:
        return identifier(outside.state)
    if outside.saved is not None:
        return text.hint(outside.saved, last=True).removeprefix("grad_")
    return identifier(outside.text.rpartition(".")[2])


def class_lines(fields: Mapping[str, tuple[str, Any]]) -> list[str]:
    lines = []
    for name, (_, value) in fields.items():
        if isinstance(value, torch.Tensor):
            lines.append(f"{name}: Tensor  # {list(value.shape)} {str(value.dtype).removeprefix('torch.')}")
        else:
            lines.append(f"{name}: {type(value).__name__ if isinstance(value, (int, float)) else 'Any'}")
    return lines
