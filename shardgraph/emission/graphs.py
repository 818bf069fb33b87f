"""The forward and the backward graph of a program, or of one of its stages, as functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardgraph import ir
from shardgraph.emission.expressions import constant
from shardgraph.emission.functions import Graph, Outside, Writer, class_lines
from shardgraph.emission.lines import indented, wrapped
from shardgraph.emission.segments import ROOT, Segment, Units
from shardgraph.emission.whole import Whole
from shardgraph.ir.attributes import ROLE

_ROOT_KEY = (ROOT, 0)


@dataclass(frozen=True)
class Signature:
    """What ``forward`` and ``backward`` take and give: each input of a call by its index, the ``outputs`` by role, and
    what backward calls their ``gradients``."""

    inputs: Mapping[int, str]
    outputs: Collection[ir.Role] = (ir.Output(0),)
    gradients: Mapping[ir.Role, str] = field(default_factory=lambda: {ir.Tangent(0): "grad_loss"})

    def text(self, role: ir.Role) -> str:
        """A value that a caller gives, as an expression.

        Raises:
            AssertionError: no caller gives it.
        """
        if isinstance(role, ir.Input):
            return self.inputs[role.index]
        if isinstance(role, ir.Tangent):
            return self.gradients[role]
        if isinstance(role, ir.Forwarded):
            return f"received[{role.index}]"
        if isinstance(role, ir.Returned):
            return f"returned[{role.index}]"
        if isinstance(role, ir.Gathered):
            return f'gathered["{role.fqn}"]'
        if isinstance(role, ir.Accumulated):
            return f'gradients["{role.of.fqn}"]'
        raise AssertionError(f"{role} is not given by a caller")


class Both:
    """Writes a forward graph and its backward, between which a class called ``saved`` has what is kept."""

    def __init__(self, writer: Writer, units: Units, signature: Signature, inline: bool, saved: str = "Saved") -> None:
        self.writer, self.units, self.signature, self.inline, self.saved = writer, units, signature, inline, saved

    def forward(self, gm: fx.GraphModule, backward: fx.GraphModule | None, head: str) -> list[str]:
        """``head`` and its body: it returns the outputs, what goes to the next stage, and what backward needs."""
        segments = self._segments(gm, backward=False)
        saved = self._saved(gm, backward)
        graph = Graph(segments, self._source(gm), self._needed(gm), self._owners(segments, saved, backward))
        whole = Whole(self.writer, graph, False, {*self.signature.inputs.values(), "received", "gathered"})
        lines = whole.write()
        env = whole.text.env
        for role, value in ir.outputs(gm):
            if isinstance(role, ir.Checked) and isinstance(value, fx.Node):
                lines += [f"if not bool({env[value]}):", f'    raise RuntimeError("a condition fails at {role.line}")']
        for role, value in ir.outputs(gm):
            if isinstance(role, ir.Mutation) and isinstance(value, fx.Node):
                written = role.of
                target = self.signature.text(written) if isinstance(written, ir.Input) else f'state["{written.fqn}"]'
                lines.append(f"{target}.copy_({env[value]})")
        returned = [self._result(value, env) for role, value in ir.outputs(gm) if role in self.signature.outputs]
        sent = [self._result(value, env) for role, value in ir.outputs(gm) if isinstance(role, ir.Forwarded)]
        if sent:
            returned.append(f"[{', '.join(sent)}]")
        fields, values = self._root_fields(graph, whole)
        body = [f'"""{_FORWARD}"""', *lines]
        if backward is not None:
            body += wrapped(f"return {', '.join([*returned, f'{self.saved}({values})'])}")
            self.saved_class = [f"class {self.saved}(NamedTuple):", '    """What backward needs of forward."""', ""]
            self.saved_class += indented(fields) if fields else ["    pass"]
        else:
            body += wrapped(f"return {', '.join([*returned, 'None'])}")
            self.saved_class = []
        return [*wrapped(head), *indented(body)]

    def backward(self, gm: fx.GraphModule, head: str) -> list[str]:
        """``head`` and its body: it returns the gradients of parameters, and what goes to the previous stage."""
        segments = self._segments(gm, backward=True)
        own = {
            role.of.fqn: value
            for role, value in ir.outputs(gm)
            if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter) and isinstance(value, fx.Node)
        }
        needed = [v for role, v in ir.outputs(gm) if isinstance(role, ir.Returned) and isinstance(v, fx.Node)]
        of_units = {segment.unit: set(segment.nodes) for segment in segments if segment.unit != ROOT}
        apart = {
            fqn: value
            for fqn, value in own.items()
            if not any(fqn.startswith(f"{unit}.") and value in nodes for unit, nodes in of_units.items())
        }
        graph = Graph(segments, self._source(gm), [*needed, *apart.values()], {}, own)
        whole = Whole(self.writer, graph, True, {*self.signature.gradients.values(), "returned"})
        lines = whole.write()
        env = whole.text.env
        for fqn, value in apart.items():
            lines.append(f'gradients["{fqn}"] = {env[value]}')
        sent = [self._result(value, env) for role, value in ir.outputs(gm) if isinstance(role, ir.Returned)]
        returned = ["gradients", f"[{', '.join(sent)}]"] if sent else ["gradients"]
        first = "gradients: dict[str, Tensor] = {}"
        body = [f'"""{_BACKWARD}"""', first, *lines, *wrapped(f"return {', '.join(returned)}")]
        return [*wrapped(head), *indented(body)]

    def _segments(self, gm: fx.GraphModule, backward: bool) -> list[Segment]:
        if not self.inline:
            return self.units.segments(gm, backward)
        return [Segment(ROOT, "", tuple(node for node in gm.graph.nodes if node.op == "call_function"))]

    def _saved(self, gm: fx.GraphModule, backward: fx.GraphModule | None) -> dict[int, Any]:
        results = {role.index: value for role, value in ir.outputs(gm) if isinstance(role, ir.Saved)}
        self._given = results
        if backward is None:
            return {}
        read = [role.index for role in ir.placeholders(backward) if isinstance(role, ir.Saved)]
        return {index: results[index] for index in read}

    def _owners(
        self, segments: list[Segment], saved: Mapping[int, Any], backward: fx.GraphModule | None
    ) -> dict[fx.Node, tuple[str, int]]:
        """The segment of forward that has each saved value: that whose backward reads it, if it can, else its own."""
        if backward is None:
            return {}
        own = {node: segment for segment in segments for node in segment.nodes}
        reach: defaultdict[tuple[str, int], set[fx.Node]] = defaultdict(set)
        for segment in segments:
            reach[_key(segment)].update(segment.nodes, *(node.all_input_nodes for node in segment.nodes))
        reader = {node: _key(s) for s in self._segments(backward, backward=True) for node in s.nodes}
        owners: dict[fx.Node, tuple[str, int]] = {}
        for role, placeholder in ir.placeholders(backward).items():
            value = saved.get(role.index) if isinstance(role, ir.Saved) else None
            if not isinstance(value, fx.Node) or self._is_state(value):
                continue
            readers = {reader[user] for user in placeholder.users if user in reader}
            owners[value] = _key(own[value]) if value in own else _ROOT_KEY
            if len(readers) == 1 and value in reach[read := readers.pop()]:
                owners[value] = read
        return owners

    def _is_state(self, value: fx.Node) -> bool:
        if value.op == "get_attr":
            return True
        return value.op == "placeholder" and isinstance(ROLE.get(value), (ir.Parameter, ir.Buffer, ir.Gathered))

    def _needed(self, gm: fx.GraphModule) -> list[fx.Node]:
        """What of a forward graph is read outside of it, saved values not counted."""
        kinds, given = (ir.Forwarded, ir.Mutation, ir.Checked), self.signature.outputs
        results = ir.outputs(gm)
        return [v for role, v in results if (isinstance(role, kinds) or role in given) and isinstance(v, fx.Node)]

    def _source(self, gm: fx.GraphModule) -> Any:
        def source(node: fx.Node) -> Outside:
            if node.op == "get_attr":
                return Outside(state=f"constant.{node.target}")
            role = ROLE.of(node)
            if isinstance(role, ir.Saved):
                value = self._given[role.index]
                if not isinstance(value, fx.Node):
                    return Outside(text=constant(value))
                return source(value) if self._is_state(value) else Outside(saved=value)
            if isinstance(role, (ir.Parameter, ir.Buffer)):
                return Outside(state=role.fqn)
            return Outside(text=self.signature.text(role))

        return source

    def _root_fields(self, graph: Graph, whole: Whole) -> tuple[list[str], str]:
        """The fields of what the whole saves, and their values."""
        env = whole.text.env
        fields: dict[str, tuple[str, Any]] = {}
        for value, key in graph.saves.items():
            if key == _ROOT_KEY:
                text = env[value]
                known = next((name for name, (other, _) in fields.items() if other == text), "")
                name = known or self.writer.field_names.new(text if text.isidentifier() else "value")
                fields[name] = text, value.meta.get("val")
                self.writer.fields.of[value] = _ROOT_KEY, name
        lines = [f"{name}: {kind}" for name, kind in whole.saved.items()] + class_lines(fields)
        values = {**whole.saved_values, **{name: text for name, (text, _) in fields.items()}}
        return lines, ", ".join(f"{name}={text}" for name, text in values.items())

    @staticmethod
    def _result(value: Any, env: Mapping[fx.Node, str]) -> str:
        return env[value] if isinstance(value, fx.Node) else constant(value)


def _key(segment: Segment) -> tuple[str, int]:
    """What a segment saves is known by this; what the whole saves, by one."""
    return _ROOT_KEY if segment.unit == ROOT else segment.key


_FORWARD = "The model's outputs, and what backward needs."
_BACKWARD = "The gradients of this rank's parameters by name."


def parameters_of(graphs: Sequence[fx.GraphModule]) -> dict[str, fx.Node]:
    """The parameters and buffers that graphs read, with a placeholder of each."""
    found: dict[str, fx.Node] = {}
    for gm in graphs:
        for role, node in ir.placeholders(gm).items():
            if isinstance(role, (ir.Parameter, ir.Buffer)):
                found.setdefault(role.fqn, node)
    return found
