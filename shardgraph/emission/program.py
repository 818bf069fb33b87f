"""The files of a program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shardgraph import ir
from shardgraph.emission import prelude
from shardgraph.emission.expressions import Spelling
from shardgraph.emission.functions import Text, Writer
from shardgraph.emission.graphs import Both, Signature, parameters_of
from shardgraph.emission.lines import generalized, indented, quoted, wrapped
from shardgraph.emission.names import Names, identifier
from shardgraph.emission.segments import Units
from shardgraph.emission.sources import Copied, import_lines
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import SOURCE
from shardgraph.passes.program import Program
from shardgraph.plans.parameter_plan import ParameterPlan

_GIVEN = frozenset({"MESH", "DEVICE", "GROUPS", "Tensor", "aten"})


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
        check(program)
        copied = Copied(given=_GIVEN)
        names = Names({"forward", "backward", "main", "Saved", *self.inputs.values()})
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
        inputs = ", ".join(f"{name}: Tensor" for name in self.inputs.values())
        both = Both(writer, Units([program.forward]), Signature(self.inputs), self.scheduled)
        given = f", {inputs}" if inputs else ""
        forward = both.forward(
            program.forward,
            program.backward,
            f"def forward(state: Mapping[str, Tensor]{given}) -> tuple[Tensor, Saved]:",
        )
        forward_functions = list(writer.functions.values())
        assert program.backward is not None
        backward = both.backward(
            program.backward,
            "def backward(state: Mapping[str, Tensor], saved: Saved, grad_loss: Tensor) -> dict[str, Tensor]:",
        )
        backward_functions = list(writer.functions.values())[len(forward_functions) :]
        random = program.random and program.plan.copies * program.plan.data_size > 1
        if random:
            random_helpers(copied)
        classes = [text for _, text in writer.classes.values()]
        blocks = [
            *classes,
            "\n".join(both.saved_class),
            *(text for _, text in forward_functions),
            "\n".join(forward),
            *(text for _, text in backward_functions),
            "\n".join(backward),
        ]
        tail = (_TAIL + TRAINING_LOOP).replace("{seeded}", _SEEDED if random else _UNSEEDED)
        grad_loss, counted = "torch.ones_like(loss)", []
        if self._weighs:
            (term, *others) = program.losses[0].terms
            elements = "counted(state, inputs)" if term.kind == "counted" else f"{float(program.joint.rows)}"
            grad_loss = f"{grad_loss} * {self.scale(copied, elements)}"
            if others:
                raise ShardGraphError(
                    f"the loss at {program.losses[0].source} adds up several means, whose elements emitted files do "
                    "not compare: emit it without loss_weight, or reduce the loss by one mean"
                )
            counted = [self.counted(term, copied)] if term.kind == "counted" else []
        tail = tail.replace("{grad_loss}", grad_loss)
        training, start = tail.strip().split(_START)
        begin, layout, end = self.tables(copied)
        code = "\n\n\n".join(
            [
                begin,
                layout,
                end,
                _rule("the model"),
                *blocks,
                _rule("training"),
                *counted,
                training.strip(),
                _rule("ranks, collectives and kernels"),
                *copied.texts.values(),
                f"{_START}{start}\n",
            ]
        )
        return assembled(self.title(), code, copied.imports)

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
        )

    def tables(self, copied: Copied) -> tuple[str, str, str]:
        """The mesh, the class of parameters' layouts, taken out of ``copied``, and the parameters."""
        program = self.program
        mesh = dict(program.plan.whole_mesh)
        device = _device(program)
        graphs = program.graphs.values()
        stages = [] if program.plan.pipeline is None else [program.plan.pipeline.axis]
        weighed = ["+".join(self._data_axes)] if self._weighs else []
        groups = dict.fromkeys(
            [*stages, *(ir.group_of(node) for gm in graphs for node in ir.collectives(gm)), *weighed]
        )
        data = [axis for axis, _ in program.plan.mesh if axis not in dict(program.plan.operators)]
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
        copied.add(prelude.shard)
        return "\n".join(lines), copied.texts.pop("Layout"), "\n".join(names)

    def _frozen(self) -> list[str]:
        return [fqn for fqn in self.program.parameters if fqn not in self.program.trained]

    def _names_of(self, table: str, names: Sequence[str], meaning: str) -> list[str]:
        return [
            *wrapped(f"{table} = {{{', '.join(map(quoted, names))}}}" if names else f"{table}: set[str] = set()"),
            f'"""{meaning}"""',
        ]

    def _parameters(self) -> list[str]:
        program, plan = self.program, self.program.plan
        rows: list[tuple[str, str]] = []
        for fqn, entry in program.parameters.items():
            layout = _layout(program.shapes[fqn], entry, [axis for axis, _ in plan.mesh])
            rows.append((fqn, layout))
        return in_loops(rows)


def random_helpers(copied: Copied) -> None:
    """Copy what draws random numbers apart for every batch."""
    for each in (prelude.rank_seed, prelude.common_draw, prelude.seeded):
        copied.add(each)


def assembled(title: str, code: str, imports: Mapping[str, str], local: Sequence[str] = ()) -> str:
    """A file: its title, what it imports, of which ``local`` are lines for files beside it, and its code."""
    lines = [
        "from __future__ import annotations",
        *(line for name, line in {**_IMPORTS, **imports}.items() if re.search(rf"(?<![\w.]){name}\b", code)),
    ]
    aten = "\n\naten = torch.ops.aten" if re.search(r"(?<![\w.])aten\.", code) else ""
    beside = "\n\n" + "\n".join(local) if local else ""
    return f'"""{title}\n"""\n\n{import_lines(lines)}{beside}{aten}\n\n{code}'


def check(program: Program) -> None:
    """Raise ShardGraphError if a program has what an emitted file cannot do."""
    plan = program.plan
    if plan.offload.parameters or any(ir.is_copy(n) for gm in program.graphs.values() for n in gm.graph.nodes):
        raise ShardGraphError(
            f"plan {plan.name!r} keeps tensors in host memory or on disk, and an emitted program has no copies of its "
            "own to move them: emit it without offload, such as with recompute='full' instead"
        )
    if plan.replicas:
        raise ShardGraphError(
            f"plan {plan.name!r} has replicas that an optimizer averages, which is not in the program: emit the plan "
            "of one replica"
        )
    if not program.trained:
        raise ShardGraphError("the program has no backward: emit a call that is trained, with a loss and gradients")
    roles = [role for role, _ in ir.outputs(program.joint.module)]
    outputs = [role for role in roles if isinstance(role, ir.Output) and role.index < program.joint.returned]
    values = dict(ir.outputs(program.joint.module))
    if len(outputs) != 1 or program.joint.aliases or getattr(values[outputs[0]], "meta", {"val": 0})["val"].dim():
        raise ShardGraphError(
            "the program gives something else than a loss, which an emitted file trains on: give a loss_fn and a "
            "target, or call a model that returns its loss; of a compiled module, use train_step before save_program"
        )
    own = (ir.GENERATOR_STATE, ir.SET_GENERATOR_STATE, ir.DRAWN_MASK)
    if node := next((n for n in program.joint.module.graph.nodes if n.target in own), None):
        raise ShardGraphError(
            f"what is drawn at {SOURCE.get(node) or 'a line of the model'} (of a layer that is dropped, or by NumPy) "
            "takes operations that an emitted file does not have: set its probability to 0, or use the compiled module"
        )
    if program.joint.shortened:
        raise ShardGraphError(
            f"the embedding of {program.joint.shortened[0].fqn!r} has max_norm, and rows are shortened before the "
            "program runs, which an emitted file does not do: leave max_norm out, or use the compiled module"
        )
    if program.joint.results:
        name = program.joint.results[0].fqn
        raise ShardGraphError(
            f"forward sets the attribute {name!r} of the model, which an emitted file does not have: return it instead"
        )


def in_loops(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Entries of a dictionary, those of equal layers as one."""
    shown: list[str] = []
    done: set[str] = set()
    values = dict(rows)
    for name, value in rows:
        if name in done:
            continue
        match = re.search(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name)
        alike = [name]
        if match:
            head, tail = name[: match.start()], name[match.end() :]
            number = int(match[0])
            while (following := f"{head}{number + len(alike)}{tail}") in values and values[following] == value:
                alike.append(following)
        if match and len(alike) > 1:
            first = int(match[0])
            numbers = f"range({first + len(alike)})" if not first else f"range({first}, {first + len(alike)})"
            key = generalized([quoted(each) for each in alike], range(first, first + len(alike)), "i")
            shown.append(f"    **{{{key}: {value} for i in {numbers}}},")
        else:
            shown.append(f"    {quoted(name)}: {value},")
        done.update(alike)
    return shown


def _layout(shape: torch.Size, entry: ParameterPlan, axes: Sequence[str]) -> str:
    parts = [str(tuple(shape))]
    if entry.shard_axis is not None:
        parts.append(f"rows={quoted(axes[entry.shard_axis])}")
    if entry.splits:
        split = ", ".join(f"{quoted(axes[position])}: {split}" for position, split in entry.splits.items())
        parts.append(f"split={{{split}}}")
    return f"Layout({', '.join(parts)})"


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


def write(directory: Path, files: Mapping[str, str], tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write text and tensors to a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    for name, each in tensors.items():
        save_file({key: value.detach().cpu().contiguous().clone() for key, value in each.items()}, directory / name)


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
    "load_file": "from safetensors.torch import load_file",
}

_START = 'if __name__ == "__main__":'

_TITLE = """{what}, as plain PyTorch.

    {start}

trains it on batch.safetensors, from weights.safetensors, with AdamW. Where ranks have batches of their own, the one of
rank N along DATA_AXES may be in batchN.safetensors. {order}

Written by {versions}. It needs torch and safetensors alone."""

_WRITTEN = """Operations are in the order in which the model has them; the
compiled module merges collectives and starts them earlier."""
_SCHEDULED = """Operations are in the order in which the compiled
module runs them; here each collective is waited for at once."""

_TAIL = '''
def load_state() -> dict[str, Tensor]:
    """This rank's parameters, of which those that are trained require a gradient, and all buffers."""
    state = {}
    for name, whole in load_file(HERE / "weights.safetensors").items():
        tensor = shard(whole, PARAMETERS[name]) if name in PARAMETERS else whole
        state[name] = tensor.to(DEVICE).requires_grad_(name in PARAMETERS and name not in FROZEN)
    return state


def batch(step: int) -> list[Tensor]:
    """The inputs of forward in a step: here those of a file, in every step."""
    own = HERE / f"batch{place_among(DATA_AXES)}.safetensors"
    tensors = load_file(own if own.exists() else HERE / "batch.safetensors")
    return [tensors[name].to(DEVICE) for name in INPUTS]


@torch.no_grad()
def train_step(state: Mapping[str, Tensor], inputs: list[Tensor]) -> Tensor:
    """The loss of this rank's batch; gradients become those of the parameters."""
{seeded}
    for name, gradient in backward(state, saved, {grad_loss}).items():
        state[name].grad = gradient
    return loss


def main(steps: int = 5) -> list[float]:
    """Train; returns this rank's losses."""
    state = load_state()
    optimizer = torch.optim.AdamW([state[name] for name in PARAMETERS if name not in FROZEN], lr=1e-3)
'''
TRAINING_LOOP = """    torch.manual_seed(0)
    losses = []
    for step in range(steps):
        loss = train_step(state, batch(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"rank {dist.get_rank() if dist.is_initialized() else 0} step {step} loss {losses[-1]}", flush=True)
    return losses


if __name__ == "__main__":
    join_ranks(AXES)
    main()
    leave_ranks()
"""
"""The end of ``main``, and what runs it."""
_SEEDED = """    with seeded(rank_seed(common_draw(), place_among(DATA_AXES))):  # batches of all ranks draw apart
        loss, saved = forward(state, *inputs)"""
_UNSEEDED = "    loss, saved = forward(state, *inputs)"
