"""The files of a program with a pipeline: one for each stage, and one that runs their actions as scheduled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.emission import prelude
from shardgraph.emission.expressions import Spelling
from shardgraph.emission.functions import Text, Writer
from shardgraph.emission.graphs import Both, Signature
from shardgraph.emission.lines import indented, quoted, wrapped
from shardgraph.emission.names import Names
from shardgraph.emission.program import GIVEN, Emission, assembled
from shardgraph.emission.refusals import check
from shardgraph.emission.segments import Units
from shardgraph.emission.sources import Copied
from shardgraph.emission.tables import folded, name_lines
from shardgraph.emission.training import loop, random_helpers
from shardgraph.errors import ShardGraphError
from shardgraph.passes.program import Halves, StageProgram
from shardgraph.runtime.pipeline.messages import empty_like_traced

_LAST = "_last"  # ends the names of what the last microbatch runs, if it is not recomputed and all others are


@dataclass(frozen=True)
class Pipelined:
    """The files of an :class:`Emission` whose plan has a pipeline, of ``rows`` rows in a rank's batch."""

    emission: Emission
    rows: int

    def files(self) -> dict[str, str]:
        """All files by name.

        Raises:
            ShardGraphError: it has what cannot be written in torch alone, or not yet.
        """
        program = self.emission.program
        check(program, self.emission.by_tokens)
        self._check()
        shared = Copied(given=GIVEN)
        files = {}
        for stage in program.stages:
            files[f"stage{stage.number}.py"] = self._stage(stage, shared)
        files["program.py"] = self._main(shared)
        files["ranks.py"] = self._ranks(shared)
        return files

    def _check(self) -> None:
        program, pipeline = self.emission.program, self.emission.program.plan.pipeline
        assert pipeline is not None
        if any(stage.written for stage in program.stages):
            raise ShardGraphError(
                "the model writes buffers, such as the running statistics of a batch norm, which microbatches of a "
                "pipeline combine, and emitted files do not: use another norm, or a plan without a pipeline"
            )
        if self.rows % pipeline.parts:
            raise ShardGraphError(
                f"a batch of {self.rows} rows has {pipeline.parts} microbatches of unlike sizes, and an emitted file "
                f"has one size: give it a multiple of {pipeline.parts} rows"
            )
        if len(program.losses[0].terms) > 1:
            raise ShardGraphError(
                f"the loss at {program.losses[0].source} adds up several terms, whose weights in a batch of "
                "microbatches emitted files do not compare: give the stages one term, or use a plan without a pipeline"
            )

    def _stage(self, stage: StageProgram, shared: Copied) -> str:
        emission, spelling, pipeline = self.emission, Spelling(shared), self.emission.program.plan.pipeline
        assert pipeline is not None
        names = Names({"gather", "reduce", "RECEIVED", "RETURNED"})
        for name in ("forward", "backward", "Saved"):
            names.new(name), names.new(f"{name}{_LAST}")
        for each in (prelude.within, prelude.named, prelude.Format):
            shared.add(each)
        halves = {"": stage.kept if pipeline.checkpoint == "never" else stage.again}
        if pipeline.checkpoint == "except_last":
            halves[_LAST] = stage.kept
        blocks = [
            self._formats("RECEIVED", stage.received, "What comes of the stage before, as shape, strides and dtype."),
            self._formats("RETURNED", stage.returned, "The gradients that come of the next stage."),
            *(block for of, each in halves.items() for block in self._halves(each, stage.number, of, spelling, names)),
            self._once("gather", "state", stage.gather, spelling),
            self._once("reduce", "gradients", stage.reduce, spelling),
        ]
        code = "\n\n\n".join(block for block in blocks if block) + "\n"
        title = f"Stage {stage.number} of {emission.title_line}: what program.py runs on its ranks."
        return assembled(title, code, shared.imports, local=_from_ranks({*shared.texts, "DEVICE"}, code))

    def _halves(self, halves: Halves, stage: int, of: str, spelling: Spelling, names: Names) -> list[str]:
        """Forward and backward of a microbatch in a stage, whose names end with ``of``."""
        emission, writer = self.emission, Writer(spelling, names)
        inputs = {i: f"inputs[{place}]" for place, i in enumerate(emission.inputs)}
        saved = f"Saved{of}"
        both = Both(writer, Units([halves.forward]), Signature(inputs), emission.scheduled, saved)
        result = "Tensor" if stage == len(emission.program.stages) - 1 else "list[Tensor]"
        trained = halves.backward is not None
        forward = both.forward(
            halves.forward,
            halves.backward,
            f"def forward{of}(state: Mapping[str, Tensor], gathered: Mapping[str, Tensor], inputs: Sequence[Tensor], "
            f"received: Sequence[Tensor]) -> tuple[{result}, {saved if trained else 'None'}]:",
        )
        functions = list(writer.functions.values())
        backward: list[str] = []
        if halves.backward is not None:
            sends = any(isinstance(role, ir.Returned) for role, _ in ir.outputs(halves.backward))
            backward = both.backward(
                halves.backward,
                f"def backward{of}(state: Mapping[str, Tensor], gathered: Mapping[str, Tensor], saved: {saved}, "
                "grad_loss: Tensor, returned: Sequence[Tensor]) -> "
                + ("tuple[dict[str, Tensor], list[Tensor]]:" if sends else "dict[str, Tensor]:"),
            )
        return [
            *(text for _, text in writer.classes.values()),
            "\n".join(both.saved_class),
            *(text for _, text in functions),
            "\n".join(forward),
            *(text for _, text in list(writer.functions.values())[len(functions) :]),
            "\n".join(backward),
        ]

    def _formats(self, name: str, values: Sequence[torch.Tensor], meaning: str) -> str:
        lines = [f"{name}: list[Format] = ["]
        for value in values:
            like = empty_like_traced(value, torch.device("meta"))
            lines.append(f"    Format({tuple(like.shape)}, {tuple(like.stride())}, {like.dtype}),")
        return "\n".join([*lines, "]", f'"""{meaning}"""'])

    def _once(self, name: str, given: str, gm: fx.GraphModule | None, spelling: Spelling) -> str:
        """What a step does once on a stage, parameter by parameter: ``gather``, or ``reduce``."""
        if gm is None:
            return ""
        text = Text(spelling, Names({"gradients", "state"}), "", "")
        given_by: Any = ir.placeholders(gm)
        for role, node in given_by.items():
            fqn = role.of.fqn if isinstance(role, ir.Accumulated) else role.fqn
            text.env[node] = f"{given}[{quoted(fqn)}]"
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        lines = ["result: dict[str, Tensor] = {}"]
        results = [
            (role.of.fqn if isinstance(role, ir.Gradient) else role.fqn, value)
            for role, value in ir.outputs(gm)
            if isinstance(value, fx.Node) and isinstance(role, (ir.Gradient, ir.Gathered))
        ]
        if all(len(node.all_input_nodes) == 1 and len(node.users) == 1 for node in nodes):
            for node in nodes:
                text.env[node] = spelling.operation(node, text.argument)
            lines += folded([f"result[{quoted(fqn)}] = {text.env[value]}" for fqn, value in results])
        else:
            text.write(nodes, [value for _, value in results])
            lines += text.lines + [f"result[{quoted(fqn)}] = {text.env[value]}" for fqn, value in results]
        what = {
            "gather": "Parameters that are gathered once for all microbatches.",
            "reduce": "The gradients of all microbatches, reduced over ranks.",
        }[name]
        head = f"def {name}({given}: Mapping[str, Tensor]) -> dict[str, Tensor]:"
        return "\n".join([head, *indented([f'"""{what}"""', *lines, "return result"])])

    def _ranks(self, shared: Copied) -> str:
        begin, layout, end = self.emission.tables(shared)
        title = f"The ranks of {self.emission.title_line}: meshes, parameters, collectives and kernels."
        code = "\n\n\n".join([begin, layout, end, *shared.texts.values()]) + "\n"
        return assembled(title, code, shared.imports)

    def _main(self, shared: Copied) -> str:
        emission, program = self.emission, self.emission.program
        plan, pipeline = program.plan, program.plan.pipeline
        assert pipeline is not None
        for each in (
            prelude.join_ranks,
            prelude.leave_ranks,
            prelude.shard,
            prelude.place,
            prelude.place_among,
            prelude.send_values,
            prelude.receive_values,
            prelude.group_among,
        ):
            shared.add(each)
        alone = pipeline.count == 1 and plan.data_size == 1
        random = program.random and not alone
        if random:
            random_helpers(shared)
            if program.draws_on_host:
                shared.add(prelude.seeded_numpy)
        order = [f'    "{" ".join(map(str, actions))}",' for actions in program.actions]
        owners = {fqn: pipeline.places_of(program.owners[fqn]) for fqn in program.parameters}
        of_rank = [
            "PARAMETERS_OF = {",
            *(
                line
                for place in range(pipeline.ranks)
                for line in (f"    {place}: {{", *indented(name_lines(_at(owners, place)), 8), "    },")
            ),
            "}",
            '"""The parameters of each place along the axis of stages."""',
        ]
        trained = sorted(fqn for fqn in program.trained if len(owners[fqn]) > 1)
        shares = ", ".join(f"{quoted(fqn)}: {owners[fqn]}" for fqn in trained)
        numbers = range(pipeline.count)
        stages = ", ".join(f"stage{i}" for i in numbers)
        (term,) = program.losses[0].terms
        kinds = {action.kind for actions in program.actions for action in actions}
        apart = pipeline.checkpoint == "except_last"
        tail = (
            (f"{emission.load(_SKIPPED)}\n\n\n{_MAIN}" + loop(program, shared, random))
            .replace("{seeded}", (_SEEDED_ON_HOST if program.draws_on_host else _SEEDED) if random else _UNSEEDED)
            .replace("{backward}", _DIVIDED if "W" in kinds else _WHOLE)
            .replace("{made}", _MADE if "W" in kinds else "")
            .replace("{forward_of}", _OF_LAST.format("forward") if apart else "stage.forward")
            .replace("{backward_of}", _OF_LAST.format("backward") if apart else "stage.backward")
            .replace("{fused}", emission.fused)
            .replace("{axis}", quoted(pipeline.axis))
            .replace("{last}", str(pipeline.rank_of(pipeline.count - 1)))
            .replace("{count}", str(pipeline.count))
            .replace("{parts}", str(pipeline.parts))
            .replace("{data}", str(plan.data_size))
            .replace("{common}", "\n    common = common_draw()" if random else "")
            .replace("{weights}", _WEIGHTS[term.kind])
            .replace("{scale}", emission.scale(shared, "float(sum(counts))"))
            .replace("{dtype}", str(_loss_dtype(program)))
        )
        counted = emission.counted(term, shared) if term.kind == "counted" else ""
        tables = [
            f"STAGES = ({stages}{',' if len(numbers) == 1 else ''})",
            "ORDER = (",
            *order,
            ")",
            f'"""{_ORDER}{_ORDER_DIVIDED if "W" in kinds else "."}"""',
            *of_rank,
            *wrapped(f"SHARED: dict[str, tuple[int, ...]] = {{{shares}}}"),
            '"""Parameters of several stages, with the places whose gradients are added up."""',
        ]
        code = "\n\n\n".join(["\n".join(tables), *([counted] if counted else []), tail.strip()]) + "\n"
        fixed = {"AXES", "DATA_AXES", "DEVICE", "FROZEN", "GROUPS", "HERE", "INPUTS", "PARAMETERS"}
        local = [*(f"import stage{i}" for i in numbers), *_from_ranks({*shared.texts, *fixed}, code)]
        return assembled(emission.title(), code, shared.imports, local=local)


def _from_ranks(names: set[str], code: str) -> list[str]:
    """The lines that import what code uses of ranks.py."""
    used = sorted(name for name in names if re.search(rf"(?<![\w.\"]){name}\b", code))
    (first, *rest) = wrapped(f"from ranks import ({', '.join(used)})")
    return [first, *rest] if rest else [first.replace("(", "").replace(")", "")]


def _loss_dtype(program: Any) -> torch.dtype:
    (value,) = [v.meta["val"] for role, v in ir.outputs(program.joint.module) if role == ir.Output(0)]
    return value.dtype


def _at(owners: Mapping[str, tuple[int, ...]], place: int) -> list[str]:
    return [fqn for fqn, places in owners.items() if place in places]


_WEIGHTS = {
    "mean": "[len(part[0]) for part in parts]",
    "counted": "[counted(state, part) for part in parts]",
    "sum": "None",
}
_ORDER = "What each place along the axis of stages does in a step: 1F0 is forward of microbatch 0 in stage 1"
_ORDER_DIVIDED = """, 1B0 its
backward. 1I0 is a backward whose gradients are added up later, at 1W0."""
_OF_LAST = "(stage.{0}_last if number == {{parts}} - 1 else stage.{0})"
_SEEDED = """            with seeded(rank_seed(common, (number * {count} + i) * {data} + place_among(DATA_AXES))):
                result, saved[i, number] = {forward_of}(state, gathered[i], parts[number], received)"""
_SEEDED_ON_HOST = """            seed = rank_seed(common, (number * {count} + i) * {data} + place_among(DATA_AXES))
            with seeded(seed), seeded_numpy(seed):
                result, saved[i, number] = {forward_of}(state, gathered[i], parts[number], received)"""
_UNSEEDED = "            result, saved[i, number] = {forward_of}(state, gathered[i], parts[number], received)"
_BACKWARD = """            returned = take(stage.RETURNED, i + 1, i, "B", number) if i < last else []
            weight = torch.full((), weights[number] * scale, dtype={dtype}, device=DEVICE)
            results = {backward_of}(state, gathered[i], saved.pop((i, number)), weight, returned)
            own, sent = results if isinstance(results, tuple) else (results, [])
            if sent:
                give(sent, STAGES[i - 1].RETURNED, i - 1, "B", number)"""
_ADD = """            for name, gradient in own.items():
                gradient = gradient if weights[number] else torch.zeros_like(gradient)
                before = gradients[i].get(name)
                gradients[i][name] = gradient if before is None else before + gradient"""
_MADE = "\n    made: dict[Any, dict[str, Tensor]] = {}  # gradients, until they are added up"
_IF_TRAINED = '        elif hasattr(stage, "backward"):\n'
_WHOLE = f"{_IF_TRAINED}{_BACKWARD}\n{_ADD}"
_DIVIDED = (
    _IF_TRAINED
    + '            if kind == "W":\n'
    + "                own = made.pop((i, number))\n"
    + "            else:\n"
    + "\n".join(indented(_BACKWARD.splitlines()))
    + '\n            if kind == "I":\n'
    + "                made[i, number] = own\n"
    + "                continue\n"
    + _ADD
)
_SKIPPED = """        if name in PARAMETERS and name not in PARAMETERS_OF[place({axis})]:
            continue  # of another stage
"""
_MAIN = '''def microbatches(inputs: list[Tensor], count: int) -> list[list[Tensor]]:
    """The rows of a batch in equal parts."""
    rows = next(len(tensor) for tensor in inputs if tensor.dim())
    cut = [tensor.dim() > 0 and len(tensor) == rows for tensor in inputs]
    parts = [tensor.chunk(count) if own else [tensor] * count for tensor, own in zip(inputs, cut, strict=True)]
    return [[part[i].contiguous() for part in parts] for i in range(count)]


@torch.no_grad()
def train_step(state: Mapping[str, Tensor], inputs: list[Tensor]) -> Tensor:
    """The loss of this pipeline's batch; gradients become those of the parameters."""
    here, axis, last = place({axis}), {axis}, {count} - 1
    parts = microbatches(inputs, {parts})
    counts: Any = {weights}
    weights = [1.0] * {parts} if counts is None else [count / sum(counts) for count in counts]
    scale = {scale}{common}
    actions = [(int(a), kind, int(b)) for a, kind, b in (re.split("([A-Z])", each) for each in ORDER[here].split())]
    mine = sorted({i for i, _, _ in actions})
    gathered = {i: STAGES[i].gather(state) if hasattr(STAGES[i], "gather") else {} for i in mine}
    place_of = {int(each.split("F")[0]): at for at, order in enumerate(ORDER) for each in order.split() if "F" in each}
    saved: dict[Any, Any] = {}
    arrived: dict[Any, list[Tensor]] = {}  # of another stage of this rank
    gradients: dict[int, dict[str, Tensor]] = {i: {} for i in mine}{made}
    losses, sends = [], []

    def give(values: list[Tensor], formats: list[Any], stage: int, kind: str, number: int) -> None:
        if place_of[stage] == here:
            arrived[stage, kind, number] = values
        else:
            tag = (number * {count} + stage) * 2 + (kind == "B")
            sends.extend(send_values(values, formats, axis, place_of[stage], tag))

    def take(formats: list[Any], source: int, stage: int, kind: str, number: int) -> list[Tensor]:
        if place_of[source] == here:
            return arrived.pop((stage, kind, number))
        return receive_values(formats, axis, place_of[source], (number * {count} + stage) * 2 + (kind == "B"))

    for i, kind, number in actions:
        stage = STAGES[i]
        if kind == "F":
            received = take(stage.RECEIVED, i - 1, i, "F", number) if i else []
{seeded}
            if i == last:
                losses.append(result)
            else:
                give(result, STAGES[i + 1].RECEIVED, i + 1, "F", number)
{backward}
    for work, _ in sends:
        work.wait()

    totals: dict[str, Tensor] = {}
    for i in mine:
        own = gradients[i]
        if hasattr(STAGES[i], "reduce"):
            own = {**own, **STAGES[i].reduce(own)}
        for name, gradient in own.items():
            totals[name] = totals[name] + gradient if name in totals else gradient
    for name in sorted(SHARED):
        if here in SHARED[name]:
            total = totals.get(name, torch.zeros_like(state[name])).clone()
            dist.all_reduce(total, group=GROUPS[shared_group(name)])
            totals[name] = total
    for name, gradient in totals.items():
        state[name].grad = gradient
    loss = torch.zeros((), dtype={dtype}, device=DEVICE)
    if losses:
        loss = torch.stack([each * weight for each, weight in zip(losses, weights, strict=True) if weight]).sum(0)
    if {axis} in GROUPS:
        dist.broadcast(loss, group=GROUPS[axis], group_src={last})
    return loss


def shared_group(name: str) -> str:
    """The name of the group of the ranks that have a parameter of several stages."""
    return {axis} + ":" + ",".join(map(str, SHARED[name]))


def main(steps: int = 5) -> list[float]:
    """Train; returns the losses."""
    for name in sorted(SHARED):
        if shared_group(name) not in GROUPS:
            GROUPS[shared_group(name)] = group_among({axis}, SHARED[name])
    state = load_state()
    trained = [name for name in PARAMETERS if name in state and name not in FROZEN]
    optimizer = torch.optim.AdamW([state[name] for name in trained], lr=1e-3{fused})
'''
