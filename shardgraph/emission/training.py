"""The training loop at the end of a file: of a loss that the program gives, or of one that the loop computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from shardgraph import ir, torch_api
from shardgraph.emission import prelude
from shardgraph.emission.lines import indented, wrapped
from shardgraph.emission.names import Names, identifier
from shardgraph.emission.sources import Copied
from shardgraph.passes.program import Program
from shardgraph.runtime.pipeline.messages import empty_like_traced
from shardgraph.torch_api import pytree

START = 'if __name__ == "__main__":'


@dataclass(frozen=True)
class Outputs:
    """What ``forward`` returns to a loop that computes the loss: the tensors of the model's output, and those that
    outputs are views of."""

    program: Program

    @cached_property
    def names(self) -> dict[ir.Role, str]:
        """A name for each, in the order in which forward returns them."""
        scope = Names({"inputs", "trained", "ctx"})
        return {
            role: scope.new(self._name(role.index) if isinstance(role, ir.Output) else f"viewed_{_number(role)}")
            for role in self._values
        }

    @cached_property
    def returned(self) -> dict[str, str]:
        """The model's outputs that are tensors by name, as expressions of what forward returns and of ``inputs``."""
        aliases, found, scope = self.program.joint.aliases, {}, Names({"inputs"})
        for index in range(self.program.joint.returned):
            if (text := self.names.get(ir.Output(index))) is None and index in aliases:
                alias = aliases[index]
                text = self.names.get(alias.base) or self._given(alias.base)
                if alias.size is not None:
                    value = self._values.get(alias.base)
                    base = text if value is None else f"with_strides({text}, {tuple(value.stride())})"
                    text = f"view_of({base}, {tuple(alias.size)}, {tuple(alias.stride or ())}, {alias.offset})"
                text = f"{text}.detach()" if alias.detached else text
            if text is not None:
                found[scope.new(self._name(index))] = text
        return found

    @property
    def loss(self) -> str | None:
        """The name of an output that is one number with a gradient, if there is one."""
        numbers = (role for role, value in self._values.items() if not value.dim() and self.differentiable(role))
        return next((self.names[role] for role in numbers if isinstance(role, ir.Output)), None)

    @property
    def gradients(self) -> list[str]:
        """What backward is called with, in the layout in which it takes the gradient of each result."""
        assert self.program.backward is not None
        texts = []
        for role, placeholder in ir.placeholders(self.program.backward).items():
            for of, name in self.names.items():
                if _tangent(of) == role:
                    strides = tuple(empty_like_traced(placeholder.meta["val"], torch.device("meta")).stride())
                    texts.append(f"with_strides(grad_{name}, {strides})")
        return texts

    @property
    def gradient_names(self) -> dict[ir.Role, str]:
        """What backward calls the gradients of results, by their roles as its inputs."""
        return {_tangent(role): f"grad_{name}" for role, name in self.names.items()}

    def differentiable(self, role: ir.Role) -> bool:
        """Whether backward takes the gradient of a result."""
        return _tangent(role) in self.program.reached

    def _given(self, role: ir.Role) -> str:
        if isinstance(role, ir.Buffer):
            return f'state["{role.fqn}"]'
        assert isinstance(role, ir.Input)
        return f"inputs[{role.index}]"

    def _name(self, index: int) -> str:
        """What an output is called, after its place in what the model returns."""
        spec = self.program.joint.out_spec
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        (path,) = (path for path, each in pytree.tree_flatten_with_path(tree)[0] if each == index)
        return re.sub(r"^(module_(?=\d)|module_$)", "output_", identifier("".join(map(str, path)))).rstrip("_")

    @cached_property
    def _values(self) -> dict[ir.Role, torch.Tensor]:
        joint = self.program.joint
        found: dict[ir.Role, torch.Tensor] = {}
        for role, value in ir.outputs(joint.module):
            shown = isinstance(role, ir.IntermediateBase) or (
                isinstance(role, ir.Output) and role.index < joint.returned and role.index not in joint.aliases
            )
            if role is not None and shown and isinstance(value, fx.Node):
                found[role] = value.meta["val"]
        return found


def _tangent(role: ir.Role) -> ir.Tangent:
    """The incoming gradient of an output, or of what outputs are views of."""
    return ir.Tangent(_number(role) if isinstance(role, ir.Output) else -1 - _number(role))


def _number(role: ir.Role) -> int:
    assert isinstance(role, (ir.Output, ir.IntermediateBase))
    return role.index


def step_of_loss(seeded: str, grad_loss: str) -> str:
    """``train_step`` of a program that gives its loss."""
    return _STEP.replace("{seeded}", seeded.format(outputs="loss")).replace("{grad_loss}", grad_loss)


def step_of_outputs(outputs: Outputs, seeded: str, copied: Copied) -> str:
    """``train_step`` of a program whose loss the training loop computes, with what it takes for that."""
    names, returned, gradients = list(outputs.names.values()), outputs.returned, outputs.gradients
    for helper in (torch_api.with_strides, prelude.view_of):
        if any(f"{helper.__name__}(" in text for text in (*gradients, *returned.values())):
            copied.add(helper)
    detached = [name for role, name in outputs.names.items() if not outputs.differentiable(role)]
    all_names = ", ".join(names)
    takes = ", ".join(f"{name}: Tensor" for name in returned)
    lines = {
        "criterion": f"def criterion({takes}, inputs: list[Tensor]) -> Tensor:",
        "gradients": f"gradients = backward({', '.join(['ctx.state', 'saved', *gradients])})",
        "compute": f"loss = criterion({', '.join(returned.values())}, inputs)",
        "grads": f"def backward(ctx: Any, {', '.join(f'grad_{name}: Tensor' for name in names)}) -> Any:",
    }
    text = _STEP_OF_OUTPUTS
    for name, line in lines.items():
        margin = text.partition(f"{{{name}}}")[0].rpartition("\n")[2]
        text = text.replace(f"{margin}{{{name}}}", "\n".join(indented(wrapped(line), len(margin))))
    return (
        text.replace("{seeded}", "\n".join(indented(seeded.format(outputs=all_names).splitlines())))
        .replace("{meaning}", _OPEN if outputs.loss is None else _GIVEN)
        .replace("{loss}", outputs.loss or f"{next(iter(returned))}.float().square().mean()")
        .replace("{mark}", f"        ctx.mark_non_differentiable({', '.join(detached)})\n" if detached else "")
        .replace("{outputs}", all_names)
    )


def loop(program: Program, copied: Copied, seeded: bool) -> str:
    """The text of ``main``, and what runs it; ``seeded``: each batch's random numbers are made in its step."""
    text = TRAINING_LOOP
    if program.draws_on_host and not seeded:
        copied.imports["numpy"] = "import numpy"
        text = text.replace("torch.manual_seed(0)\n", "torch.manual_seed(0)\n    numpy.random.seed(0)\n")
    if not program.plan.replicas:
        return text
    ((axis, _),) = program.plan.replicas
    copied.add(prelude.average_replicas)
    together = f'        if (step + 1) % FREQUENCY == 0:\n            average_replicas(state, PARAMETERS, "{axis}")\n'
    return text.replace("optimizer.step()\n", f"optimizer.step()\n{together}")


def with_seeds(program: Program, copied: Copied) -> str:
    """The lines that call forward, in which each batch draws random numbers apart from those of others."""
    plan = program.plan
    on_host = program.draws_on_host and plan.world_size > 1
    if not program.random or not (plan.copies * plan.data_size > 1 or on_host):
        return UNSEEDED
    random_helpers(copied)
    if not program.draws_on_host:
        return _SEEDED
    copied.add(prelude.seeded_numpy)
    return _SEEDED_ON_HOST


def random_helpers(copied: Copied) -> None:
    """Copy what draws random numbers apart for every batch."""
    for each in (prelude.rank_seed, prelude.common_draw, prelude.seeded):
        copied.add(each)


UNSEEDED = "    {outputs}, saved = forward(state, *inputs)"
"""The line that calls forward where nothing is drawn, or by one rank."""
_SEEDED = """    with seeded(rank_seed(common_draw(), place_among(DATA_AXES))):  # batches of all ranks draw apart
        {outputs}, saved = forward(state, *inputs)"""
_SEEDED_ON_HOST = """    seed = rank_seed(common_draw(), place_among(DATA_AXES))  # batches of all ranks draw apart
    with seeded(seed), seeded_numpy(seed):
        {outputs}, saved = forward(state, *inputs)"""

_STEP = '''@torch.no_grad()
def train_step(state: Mapping[str, Tensor], inputs: list[Tensor]) -> Tensor:
    """The loss of this rank's batch; gradients become those of the parameters."""
{seeded}
    for name, gradient in backward(state, saved, {grad_loss}).items():
        state[name].grad = gradient
    return loss'''

_OPEN = """The loss of a batch: put here what the training loop computes. The mean square only shows that it trains."""
_GIVEN = "The loss of a batch, which the model gives: put here what the training loop makes of its outputs."
_STEP_OF_OUTPUTS = '''{criterion}
    """{meaning}"""
    return {loss}


class Run(torch.autograd.Function):
    """``forward`` and ``backward`` as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, state: Mapping[str, Tensor], inputs: list[Tensor], *trained: Tensor) -> Any:
{seeded}
        ctx.state, ctx.saved = state, saved
{mark}        return {outputs}

    @staticmethod
    {grads}
        saved, ctx.saved = ctx.saved, None
        {gradients}
        return None, None, *(gradients.get(name) for name in PARAMETERS if name not in FROZEN)


def train_step(state: Mapping[str, Tensor], inputs: list[Tensor]) -> Tensor:
    """The loss of this rank's batch; gradients become those of the parameters."""
    trained = [state[name] for name in PARAMETERS if name not in FROZEN]
    {outputs} = Run.apply(state, inputs, *trained)
    {compute}
    loss.backward()
    return loss.detach()'''

LOAD = '''def load_state() -> dict[str, Tensor]:
    """This rank's parameters, of which those that are trained require a gradient, and all buffers."""
    state = {}
    for name, whole in torch.load(HERE / "weights.pt", mmap=True).items():
{skipped}        tensor = shard(whole, PARAMETERS[name]) if name in PARAMETERS else whole.clone()
        state[name] = {placed}.requires_grad_(name in PARAMETERS and name not in FROZEN)
    return state


def batch(step: int) -> list[Tensor]:
    """The inputs of a step: here those of a file, in every step."""
    own = HERE / f"batch{place_among(DATA_AXES)}.pt"
    tensors = torch.load(own if own.exists() else HERE / "batch.pt")
    return [tensors[name].to(DEVICE, copy=True) for name in INPUTS]'''

MAIN = '''def main(steps: int = 5) -> list[float]:
    """Train; returns this rank's losses."""
    state = load_state()
    optimizer = torch.optim.AdamW([state[name] for name in PARAMETERS if name not in FROZEN], lr=1e-3{fused})
'''
TRAINING_LOOP = """    torch.manual_seed(0)
    losses = []
    for step in range(steps):
        loss = train_step(state, batch(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(f"rank {rank} step {step} loss {losses[-1]}\\n", end="", flush=True)  # at once: ranks print beside it
    return losses


if __name__ == "__main__":
    join_ranks(AXES)
    main()
    leave_ranks()
"""
"""The end of ``main``, and what runs it."""
