"""The files of a program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardgraph import ir
from shardgraph.emission import prelude
from shardgraph.emission.expressions import Spelling
from shardgraph.emission.functions import Text, Writer
from shardgraph.emission.graphs import Both, Signature, parameters_of
from shardgraph.emission.lines import WIDTH, indented, quoted, wrapped
from shardgraph.emission.names import Names, identifier
from shardgraph.emission.refusals import check, gives_loss
from shardgraph.emission.segments import Units
from shardgraph.emission.sources import Copied, import_lines
from shardgraph.emission.tables import in_loops, layout, name_lines
from shardgraph.emission.training import (
    LOAD,
    MAIN,
    START,
    UNSEEDED,
    Outputs,
    loop,
    step_of_loss,
    step_of_outputs,
    with_seeds,
)
from shardgraph.errors import ShardGraphError
from shardgraph.passes.program import Program

GIVEN = frozenset({"MESH", "DEVICE", "GROUPS", "ON_HOST", "Tensor", "aten"})
"""Names that files define themselves."""
_FREQUENCY = 4


@dataclass(frozen=True)
class Emission:
    """A program to be written: its model by name, the names of its inputs by index, and whether as scheduled.

    ``by_tokens``: the losses of data ranks are weighed by the elements that they are means of.
    """

    program: Program
    model: str
    inputs: Mapping[int, str]
    scheduled: bool
    versions: str
    by_tokens: bool = False

    def file(self) -> str:
        """The program without a pipeline as one file.

        Raises:
            ShardGraphError: it has what cannot be written in torch alone.
        """
        program = self.program
        check(program, self.by_tokens)
        copied = Copied(given=GIVEN)
        names = Names({"forward", "backward", "main", "criterion", "model", "Run", "Saved", *self.inputs.values()})
        for each in (
            prelude.join_ranks,
            prelude.leave_ranks,
            prelude.shard,
            prelude.within,
            prelude.named,
            prelude.place_among,
        ):
            copied.add(each)
        writer = Writer(Spelling(copied), names)
        inputs = "".join(f", {name}: Tensor" for name in self.inputs.values())
        outputs = None if gives_loss(program) else Outputs(program)
        signature = Signature(self.inputs)
        if outputs is not None:
            signature = Signature(self.inputs, outputs.names, outputs.gradient_names)
        both = Both(writer, Units([program.forward]), signature, self.scheduled)
        tensors = "Tensor, " * len(signature.outputs)
        forward = both.forward(
            program.forward,
            program.backward,
            f"def forward(state: Mapping[str, Tensor]{inputs}) -> tuple[{tensors}Saved]:",
        )
        forward_functions = list(writer.functions.values())
        assert program.backward is not None
        taken = [role for role in ir.placeholders(program.backward) if isinstance(role, ir.Tangent)]
        gradients = "".join(f", {signature.gradients[role]}: Tensor" for role in taken)
        backward = both.backward(
            program.backward,
            f"def backward(state: Mapping[str, Tensor], saved: Saved{gradients}) -> dict[str, Tensor]:",
        )
        backward_functions = list(writer.functions.values())[len(forward_functions) :]
        classes = [text for _, text in writer.classes.values()]
        blocks = [
            *classes,
            "\n".join(both.saved_class),
            *(text for _, text in forward_functions),
            "\n".join(forward),
            *(text for _, text in backward_functions),
            "\n".join(backward),
        ]
        seeded, counted = with_seeds(program, copied), []
        if outputs is not None:
            step = step_of_outputs(outputs, seeded, copied)
        else:
            grad_loss = "torch.ones_like(loss)"
            if self._weighs:
                counted = self._counted(copied)
                grad_loss += (
                    f" * {self.scale(copied, 'counted(state, inputs)' if counted else f'{float(program.joint.rows)}')}"
                )
            step = step_of_loss(seeded, grad_loss)
        main, start = (MAIN.replace("{fused}", self.fused) + loop(program, copied, seeded != UNSEEDED)).split(START)
        begin, class_, end = self.tables(copied)
        code = "\n\n\n".join(
            [
                begin,
                class_,
                end,
                _rule("the model"),
                *blocks,
                _rule("training"),
                *counted,
                self.load(),
                step,
                main.strip(),
                _rule("ranks, collectives and kernels"),
                *copied.texts.values(),
                f"{START}{start}\n",
            ]
        )
        return assembled(self.title(), code, copied.imports)

    def _counted(self, shared: Copied) -> list[str]:
        """The function that counts what the loss is a mean of, if that depends on the batch.

        Raises:
            ShardGraphError: it adds up several means.
        """
        (term, *others) = self.program.losses[0].terms
        if others:
            raise ShardGraphError(
                f"the loss at {self.program.losses[0].source} adds up several means, whose elements emitted files do "
                "not compare: emit it without loss_weight, or reduce the loss by one mean"
            )
        return [self.counted(term, shared)] if term.kind == "counted" else []

    def load(self, skipped: str = "") -> str:
        """``load_state``, in which parameters are put where they stay, without what lines of it have ``skipped``; and
        ``batch``."""
        placed = "placed(name, tensor)" if self._hosted else "tensor.to(DEVICE)"
        return LOAD.replace("{placed}", placed).replace("{skipped}", skipped)

    def counted(self, term: Any, shared: Copied) -> str:
        """The function that counts what the loss of a (micro)batch is a mean of."""
        text = Text(Spelling(shared), Names({"state", "inputs"}), "", "")
        places = {index: place for place, index in enumerate(self.inputs)}
        given_by: Any = ir.placeholders(term.count)
        for role, node in given_by.items():
            text.env[node] = (
                f"inputs[{places[role.index]}]" if isinstance(role, ir.Input) else f"state[{quoted(role.fqn)}]"
            )
        nodes = [node for node in term.count.graph.nodes if node.op == "call_function"]
        output = term.count.graph.output_node().args[0]
        value = output[0] if isinstance(output, (tuple, list)) else output
        text.write(nodes, [value])
        head = "def counted(state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> float:"
        what = '"""How many elements the loss of these inputs is a mean of."""'
        return "\n".join([head, *indented([what, *text.lines, f"return float({text.env[value]})"])])

    def scale(self, copied: Copied, elements: str) -> str:
        """What the gradient of this rank's loss, a mean of so many ``elements``, is multiplied with, as an expression.

        Raises:
            ShardGraphError: the loss is no mean.
        """
        if not self._weighs:
            return "1.0"
        reduction = self.program.losses[0]
        reduction.elements([1], [[1.0] for _ in reduction.terms])  # which refuses sums
        copied.add(prelude.rank_weight)
        return f"rank_weight({elements}, {quoted('+'.join(self._data_axes))}, {self.program.plan.data_size})"

    @property
    def _weighs(self) -> bool:
        return self.by_tokens and self.program.plan.data_size > 1

    @property
    def _data_axes(self) -> list[str]:
        return [axis for axis, _ in self.program.plan.data_mesh]

    @property
    def title_line(self) -> str:
        """What is written, in one line."""
        plan = self.program.plan
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.whole_mesh) or "one rank"
        return f"{self.model} under the plan {plan.name} on the mesh {mesh}"

    def title(self) -> str:
        """The description at the top of the file that is run."""
        ranks = self.program.plan.world_size
        return _TITLE.format(
            what=self.title_line,
            versions=self.versions,
            start="python program.py" if ranks == 1 else f"torchrun --nproc-per-node {ranks} program.py",
            order=_SCHEDULED if self.scheduled else _WRITTEN,
            needs="torch and numpy" if self.program.draws_on_host else "torch",
        )

    def tables(self, copied: Copied) -> tuple[str, str, str]:
        """The mesh, the class of parameters' layouts, taken out of ``copied``, and the parameters."""
        program = self.program
        mesh = dict(program.plan.whole_mesh)
        device = _device(program)
        graphs = program.graphs.values()
        stages = [] if program.plan.pipeline is None else [program.plan.pipeline.axis]
        replicas = [axis for axis, _ in program.plan.replicas]
        weighed = ["+".join(self._data_axes)] if self._weighs else []
        collectives = (ir.group_of(node) for gm in graphs for node in ir.collectives(gm))
        groups = dict.fromkeys([*stages, *replicas, *collectives, *weighed])
        data = replicas + [axis for axis, _ in program.plan.mesh if axis not in dict(program.plan.operators)]
        where = (
            'torch.device("cpu")'
            if device == "cpu"
            else f'torch.device("{device}", int(os.environ.get("LOCAL_RANK", "0")))'
        )
        lines = [
            f"MESH = {_dict(mesh)}",
            '"""Ranks along each axis, the last of which counts fastest."""',
            *wrapped(f"AXES = {_tuple(groups)}"),
            '"""The axes along which ranks communicate; ``a+b`` is both together."""',
            f"DATA_AXES = {_tuple(data)}",
            '"""The axes along which ranks have batches of their own."""',
            f"DEVICE = {where}",
            "GROUPS: dict[str, dist.ProcessGroup] = {}",
            "HERE = Path(__file__).parent",
            *wrapped(f"INPUTS = {_tuple(self.inputs.values())}"),
        ]
        names = [
            "PARAMETERS: dict[str, Layout] = {",
            *self._parameters(),
            "}",
            '"""How each parameter is stored."""',
            *self._names_of("FROZEN", self._frozen(), "Parameters that are not trained."),
        ]
        if self._hosted:
            names += self._names_of(
                "ON_HOST", self._hosted, "Parameters that stay in host memory, with their gradients."
            )
            copied.add(prelude.placed)
        if replicas:
            names += [f"FREQUENCY = {_FREQUENCY}", '"""Steps of each replica between two averages of all."""']
        copied.add(prelude.shard)
        return "\n".join(lines), copied.texts.pop("Layout"), "\n".join(names)

    @property
    def _hosted(self) -> list[str]:
        return [fqn for fqn, entry in self.program.parameters.items() if entry.offload]

    @property
    def fused(self) -> str:
        """The optimizer's option for parameters in host memory: the kernels that update those of a compiled module."""
        return ", fused=True" if self._hosted and self.program.trained <= {*self._hosted} else ""

    def _frozen(self) -> list[str]:
        return [fqn for fqn in self.program.parameters if fqn not in self.program.trained]

    def _names_of(self, table: str, names: Sequence[str], meaning: str) -> list[str]:
        lines = [f"{table}: set[str] = set()"]
        if names:
            short = f"{table} = {{{', '.join(map(quoted, names))}}}"
            lines = [short] if len(short) <= WIDTH else [f"{table} = {{", *indented(name_lines(names)), "}"]
        return [*lines, f'"""{meaning}"""']

    def _parameters(self) -> list[str]:
        program, plan = self.program, self.program.plan
        rows: list[tuple[str, str]] = []
        for fqn, entry in program.parameters.items():
            rows.append((fqn, layout(program.shapes[fqn], entry, [axis for axis, _ in plan.mesh])))
        return in_loops(rows)


def assembled(title: str, code: str, imports: Mapping[str, str], local: Sequence[str] = ()) -> str:
    """A file: its title, what it imports, of which ``local`` are lines for files beside it, and its code."""
    lines = [
        "from __future__ import annotations",
        *(line for name, line in {**_IMPORTS, **imports}.items() if re.search(rf"(?<![\w.]){name}\b", code)),
    ]
    aten = "\n\naten = torch.ops.aten" if re.search(r"(?<![\w.])aten\.", code) else ""
    beside = "\n\n" + "\n".join(local) if local else ""
    return f'"""{title}\n"""\n\n{import_lines(lines)}{beside}{aten}\n\n{code}'


def _device(program: Program) -> str:
    values = (node.meta.get("val") for gm in program.graphs.values() for node in gm.graph.nodes)
    return next(value.device.type for value in values if isinstance(value, torch.Tensor))


def _tuple(names: Any) -> str:
    texts = [quoted(each) for each in names]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _dict(sizes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{quoted(axis)}: {size}" for axis, size in sizes.items()) + "}"


def _rule(title: str) -> str:
    return f"# -- {title} {'-' * (100 - len(title))}"


def input_names(names: Sequence[str]) -> list[str]:
    """Names for the inputs of a call that are arguments in Python."""
    scope = Names({"received", "returned", "gathered"})
    return [scope.new(identifier(name)) for name in names]


def used_state(program: Program) -> dict[str, torch.Tensor]:
    """The buffers that a program reads, by name, as fake tensors; parameters are in ``program.parameters``."""
    graphs = list(program.graphs.values())
    return {fqn: node.meta["val"] for fqn, node in parameters_of(graphs).items() if fqn not in program.parameters}


_IMPORTS = {
    "functools": "import functools",
    "math": "import math",
    "re": "import re",
    "os": "import os",
    "Path": "from pathlib import Path",
    "Any": "from typing import Any",
    "NamedTuple": "from typing import NamedTuple",
    "Sequence": "from collections.abc import Sequence",
    "Mapping": "from collections.abc import Mapping",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "Tensor": "from torch import Tensor",
}

_TITLE = """{what}, as plain PyTorch.

    {start}

trains it on batch.pt, from weights.pt, with AdamW. Where ranks have batches of their own, the one of rank N along
DATA_AXES may be in batchN.pt. {order}

Written by {versions}. It needs {needs} alone."""

_WRITTEN = """Operations are in the order in which the model has them; the
compiled module merges collectives and starts them earlier."""
_SCHEDULED = """Operations are in the order in which the compiled
module runs them; here each collective is waited for at once."""
