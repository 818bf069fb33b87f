"""The function of the whole model: operations of its own, and calls of its units, those of equal layers in a loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import fx

from shardgraph.emission.functions import OUTSIDE, Graph, Outside, Text, Writer, Written, gradient_names, readers
from shardgraph.emission.lines import generalized, indented, wrapped
from shardgraph.emission.names import Names, identifier
from shardgraph.emission.segments import ROOT, Segment


class Whole:
    """Writes the body of one function: of ``forward``, or of ``backward``."""

    def __init__(self, writer: Writer, graph: Graph, backward: bool, taken: Iterable[str]) -> None:
        self.writer, self.graph, self.backward = writer, graph, backward
        self.names = Names({*taken, "gradients", "p", "i"})
        self.text = Text(writer.spelling, self.names, "", "grad_" if backward else "")
        self.text.labels = gradient_names(graph.gradients)
        self._grads = ""
        self.saved: dict[str, str] = {}  # fields of what forward saves, with their types
        self.saved_values: dict[str, str] = {}
        self._where = {node: segment for segment in graph.segments for node in segment.nodes}
        self._wanted = {*graph.results, *(v for v, key in graph.saves.items() if key[0] == ROOT)}

    def write(self) -> list[str]:
        """The statements."""
        for node in self._placeholders():
            self.text.env[node] = self._outside(self.graph.source(node))
        carried = carried_values(self.graph)
        written = {
            segment: self.writer.segment(segment, self.graph, carried, self.backward)
            for segment in self.graph.segments
            if segment.unit != ROOT
        }
        names = {segment: self.writer.named(each, self.backward) for segment, each in written.items()}
        segments = self.graph.segments
        i = 0
        while i < len(segments):
            if segments[i].unit == ROOT:
                self.text.write(segments[i].nodes, self._kept(segments[i]))
                i += 1
                continue
            run = self._run(segments[i:], names)
            self._call([written[each] for each in run], names[run[0]])
            i += len(run)
        return self.text.lines

    def _placeholders(self) -> Iterable[fx.Node]:
        values = (each for s in self.graph.segments for node in s.nodes for each in node.all_input_nodes)
        every = dict.fromkeys([*values, *self.graph.results, *self.graph.saves])
        return [each for each in every if each.op in OUTSIDE]

    def _outside(self, outside: Outside) -> str:
        if outside.state:
            return f'state["{outside.state}"]'
        return outside.text if outside.saved is None else self.writer.fields.text(outside.saved)

    def _kept(self, segment: Segment) -> set[fx.Node]:
        inside = set(segment.nodes)
        return {n for n in segment.nodes if n in self._wanted or any(user not in inside for user in readers(n))}

    def _run(self, segments: Sequence[Segment], names: dict[Segment, str]) -> list[Segment]:
        """The layers, from the first segment on, that one function is called for one after the other."""
        run = [segments[0]]
        for before, after in pairwise(segments):
            if not before.stack or after.stack != before.stack or names.get(after) != names[run[0]]:
                break
            step = -1 if self.backward else 1
            if after.number != before.number + step:
                break
            run.append(after)
        return run

    def _call(self, run: Sequence[Written], name: str) -> None:
        first, numbers = run[0], [each.segment.number if each.segment.stack else 0 for each in run]
        variables = self._variables(first)
        kept_all = self._kept_of_all(run)
        lists = {k: self.names.new(f"{variables[k]}_of") for k in kept_all} if len(run) > 1 else {}
        for each, number in zip(run, numbers, strict=True):
            for k, flow in enumerate(each.flows):
                self.text.env[flow] = f"{lists[k]}[{number}]" if k in lists and each is not run[-1] else variables[k]
        carried = self._carried(run)
        before, arguments = [], []
        for j, slot in enumerate(first.slots):
            if j in carried:
                variable, start = variables[carried[j]], self._text(slot)
                if start != variable:
                    before.append(f"{variable} = {start}")
                arguments.append([variable] * len(run))
            else:
                arguments.append([self._text(each.slots[j]) for each in run])
        units = [each.segment.unit for each in run]
        if first.uses_saved:
            arguments.insert(0, [self.writer.fields.places[each.segment.key] for each in run])
        if first.uses_state:
            arguments.insert(0, [f'within(state, "{unit}")' for unit in units])
        targets = [[variables[k]] * len(run) for k in range(len(first.flows))]
        if first.saves:
            targets.append([self._saves(each) for each in run])
        after: list[list[str]] = []
        if first.gradients:
            self._grads = own = self._grads or self.names.new("grads")
            targets.append([own] * len(run))
            after.append([f'gradients |= named({own}, "{unit}")' for unit in units])
        for k, name_of in lists.items():
            before.append(f"{name_of} = {{}}")
            after.append([f"{name_of}[{number}] = {variables[k]}" for number in numbers])
        index = "i"
        general = [generalized(each, numbers, index) for each in (*arguments, *targets, *after)]
        self.text.lines += before
        if len(run) == 1 or None in general:
            for t in range(len(run)):
                self._statements(name, *([each[t] for each in part] for part in (arguments, targets, after)))
            return
        self.text.lines.append(f"for {index} in {_range(numbers)}:")
        outer, self.text.lines = self.text.lines, []
        texts = iter(general)
        self._statements(name, *([str(next(texts)) for _ in part] for part in (arguments, targets, after)))
        self.text.lines = outer + indented(self.text.lines)

    def _statements(self, name: str, arguments: list[str], targets: list[str], after: list[str]) -> None:
        call = f"{name}({', '.join(arguments)})"
        self.text.lines += wrapped(f"{', '.join(targets)} = {call}" if targets else call)
        self.text.lines += after

    def _variables(self, written: Written) -> list[str]:
        """What the results of a function are called here."""
        segment = written.segment
        base = identifier((segment.stack or segment.unit).rpartition(".")[2])
        base = f"grad_{base}" if self.backward else base
        made = []
        for k, local in enumerate(written.flow_names):
            made.append(self.names.new(base if k == 0 else f"{base}_{local.removeprefix('grad_')}"))
        return made

    def _kept_of_all(self, run: Sequence[Written]) -> list[int]:
        """The results that something but the next layer reads."""
        found = []
        for k in range(len(run[0].flows)):
            for each, following in pairwise(run):
                flow = each.flows[k]
                others = [
                    user for user in readers(flow) if self._where.get(user) not in (each.segment, following.segment)
                ]
                slots = [j for j, slot in enumerate(following.slots) if slot is flow]
                read = any(self._where.get(user) is following.segment for user in readers(flow))
                if others or flow in self._wanted or (read and not any(j in self._carried(run) for j in slots)):
                    found.append(k)
                    break
        return found

    def _carried(self, run: Sequence[Written]) -> dict[int, int]:
        """The arguments that are a result of the layer before, by position, each with the result's."""
        found: dict[int, int] = {}
        for j in range(len(run[0].slots)):
            results = {
                before.flows.index(after.slots[j]) if after.slots[j] in before.flows else None
                for before, after in pairwise(run)
            }
            k = results.pop() if len(results) == 1 else None
            alike = [run[0].slots[j] == run[0].slots[other] for other, result in found.items() if result == k]
            if k is not None and all(alike):  # one variable cannot begin as two values
                found[j] = k
        return found

    def _text(self, slot: Outside | fx.Node) -> str:
        return self.text.env[slot] if isinstance(slot, fx.Node) else self._outside(slot)

    def _saves(self, written: Written) -> str:
        """Where forward keeps what a segment saves, until it returns it."""
        segment = written.segment
        class_ = self.writer.class_of[segment.key]
        wanted = identifier((segment.stack or segment.unit).rpartition(".")[2])
        if segment.stack:
            known = self.writer.stacks
            if segment.stack not in known:
                known[segment.stack] = self._field(wanted), self.names.new(f"saved_{wanted}")
                self.text.lines.append(f"{known[segment.stack][1]} = {{}}")
            name, local = known[segment.stack]
            classes = self.saved.get(name, "")[len("dict[int, ") : -1]
            if class_ not in classes.split(" | "):
                classes = f"{classes} | {class_}" if classes else class_
            self.saved[name], self.saved_values[name] = f"dict[int, {classes}]", local
            self.writer.fields.places[segment.key] = f"saved.{name}[{segment.number}]"
            return f"{local}[{segment.number}]"
        name, local = self._field(wanted), self.names.new(f"saved_{wanted}")
        self.saved[name], self.saved_values[name] = class_, local
        self.writer.fields.places[segment.key] = f"saved.{name}"
        return local

    def _field(self, wanted: str) -> str:
        return self.writer.field_names.new(wanted)


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    counted = f"range({most + 1})" if least == 0 else f"range({least}, {most + 1})"
    return counted if numbers[0] == least else f"reversed({counted})"


def carried_values(graph: Graph) -> set[fx.Node]:
    """What layers of a stack take of the layer before, and what the first takes in its place."""
    found: set[fx.Node] = set()
    stacks: dict[str, list[list[fx.Node]]] = {}
    where = {node: segment for segment in graph.segments for node in segment.nodes}
    for segment in graph.segments:
        if segment.stack:
            values = (each for node in segment.nodes for each in node.all_input_nodes)
            taken = [v for v in dict.fromkeys(values) if v.op not in OUTSIDE and where[v] is not segment]
            stacks.setdefault(segment.stack, []).append(taken)
    for stack, layers in stacks.items():
        for j in range(max(map(len, layers))):
            here = [taken[j] for taken in layers if j < len(taken)]
            if any(where[value].stack == stack for value in here):
                found.update(here)
    return found
