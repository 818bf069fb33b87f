"""Training programs as people write them. What is ours in each is one line, with ``run.compile``.

A program is called twice on every rank: with :class:`Plain`, where that line does nothing, and with :class:`Sharded`.
"""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import shardgraph
from tests.research_programs import RESEARCH


class Plain:
    """The program as it was, on the whole batch."""

    def __init__(self) -> None:
        self.noted: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.models: list[nn.Module] = []

    def compile(self, model: nn.Module, *example: torch.Tensor) -> Any:
        self.models.append(model)
        return model

    def rows(self, *batch: torch.Tensor) -> Any:
        """What of the batch this rank is given."""
        return batch if len(batch) > 1 else batch[0]

    def note(self, **values: torch.Tensor) -> None:
        """Numbers that are means over the batch."""
        for name, value in values.items():
            self.noted[name].append(value.detach().clone())

    def state(self) -> dict[str, torch.Tensor]:
        """The weights and buffers at the end."""
        return {f"{i}.{k}": v for i, model in enumerate(self.models) for k, v in _whole_state(model).items()}


class Sharded(Plain):
    """The program under a plan of two ranks."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan

    def compile(self, model: nn.Module, *example: torch.Tensor) -> Any:
        mesh = {"pp": 2} if self.plan == "pp" else {"tp": 2} if self.plan == "tp" else None
        examples = None if mesh is None else example
        return super().compile(shardgraph.compile(model, self.plan, mesh=mesh, example_inputs=examples, progress=False))

    def rows(self, *batch: torch.Tensor) -> Any:
        mine: Any = self.models[0]
        return super().rows(*(each[mine.rows_of(len(each))] for each in batch))

    def note(self, **values: torch.Tensor) -> None:
        for value in values.values():
            if self.plan not in ("tp", "pp"):
                torch.distributed.all_reduce(value.data.div_(torch.distributed.get_world_size()))
        super().note(**values)


def _step(run: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.note(loss=loss)


def _whole_state(model: Any) -> dict[str, torch.Tensor]:
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def both(program: str, plan: str) -> tuple[float, list[str]]:
    """The largest difference of what a program notes and of its weights at the end, and what differs in kind."""
    results = []
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for run in (Plain(), Sharded(plan)):
            torch.manual_seed(0)
            PROGRAMS[program](run)
            results.append({**{k: torch.stack(v) for k, v in run.noted.items()}, **run.state()})
    finally:
        torch.set_default_dtype(before)
    plain, sharded = results
    if sharded.keys() != plain.keys():  # the state of a pipeline is on the first rank
        sharded |= {name: plain[name] for name in plain.keys() - sharded.keys() if torch.distributed.get_rank()}
    unlike = sorted(plain.keys() ^ sharded.keys())
    return max((plain[k] - sharded[k]).abs().max().item() for k in plain.keys() & sharded.keys()), unlike


def _batch(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def adversaries(run: Any) -> None:
    """A generator and a discriminator, each with its optimizer; the generator's loss goes through the other."""
    generator = run.compile(
        nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 8)), _batch(0, 8, 4)
    )
    critic = run.compile(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), _batch(0, 8, 8))
    ours = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    theirs = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    loss_of = nn.BCEWithLogitsLoss()
    for step in range(3):
        noise, real = run.rows(_batch(step, 8, 4), _batch(100 + step, 8, 8))
        theirs.zero_grad()
        found, made = critic(real), generator(noise)
        loss = loss_of(found, torch.ones_like(found))
        loss.backward()
        found = critic(made.detach())
        other = loss_of(found, torch.zeros_like(found))
        other.backward()
        theirs.step()
        ours.zero_grad()
        found = critic(made)
        fooled = loss_of(found, torch.ones_like(found))
        fooled.backward()
        ours.step()
        run.note(real=loss, fake=other, fooled=fooled)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, seen: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        policy = D.Independent(D.Normal(self.actor(seen), self.log_std.exp()), 1)
        return policy.log_prob(action), self.critic(seen).squeeze(-1), policy.entropy()


def proximal_policy(run: Any) -> None:
    """The old policy without gradients, then epochs of a clipped ratio to it; ``torch.distributions`` in forward."""
    policy = run.compile(Policy(), _batch(0, 8, 6), _batch(0, 8, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-5)
    seen, action, advantage, returns = run.rows(_batch(1, 8, 6), _batch(2, 8, 3), _batch(3, 8), _batch(4, 8))
    with torch.no_grad():
        old, _, _ = policy(seen, action)
    for _ in range(3):
        new, value, entropy = policy(seen, action)
        ratio = (new - old).exp()
        gained = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        loss = 0.5 * F.mse_loss(value, returns) - gained - 0.01 * entropy.mean()
        _step(run, optimizer, loss)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, width = self.encoder(x).chunk(2, dim=-1)
        found = D.Normal(mean, F.softplus(width))
        code = found.mean + found.stddev * noise
        return self.decoder(code), D.kl_divergence(found, D.Normal(0.0, 1.0)).sum(-1)


def variational(run: Any) -> None:
    """A variational encoder, whose loss has a divergence of two distributions."""
    coder = run.compile(Coder(), _batch(0, 8, 6), _batch(0, 8, 4))
    optimizer = torch.optim.SGD(coder.parameters(), lr=0.1)
    for step in range(3):
        x, noise = run.rows(_batch(step, 8, 6), _batch(10 + step, 8, 4))
        again, divergence = coder(x, noise)
        loss = F.mse_loss(again, x) + 0.1 * divergence.mean()
        _step(run, optimizer, loss)


@dataclass
class Batch:
    x: torch.Tensor
    kind: str
    mask: torch.Tensor | None = None


class OfBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2)])
        self.out = nn.Linear(6, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = batch.x
        for weight in self.layers:
            x = torch.tanh(x @ weight)
        return self.out(x if batch.mask is None else x * batch.mask) * (1.0 if batch.kind == "train" else 0.5)


def batches_of_a_class(run: Any) -> None:
    """Batches are a dataclass of the program's own, with a part that is there or not."""
    example: Any = Batch(_batch(0, 8, 6), "train", None)
    model = run.compile(OfBatches(), example)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, mask = run.rows(_batch(step, 8, 6), (_batch(20 + step, 8, 6) > 0).double())
        loss = model(Batch(x, "train" if step < 3 else "last", mask if step % 2 else None)).square().mean()
        _step(run, optimizer, loss)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))


def best_state(run: Any) -> None:
    """The best state is kept as a copy and in a file, and is what is used in the end."""
    model, best, file = run.compile(_layers(), _batch(0, 8, 6)), None, io.BytesIO()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = model(run.rows(_batch(step, 8, 6))).square().mean()
        _step(run, optimizer, loss)
        if step == 1:
            best = copy.deepcopy(model.state_dict())
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    optimizer.load_state_dict(saved["optimizer"])
    for name, value in saved["model"].items():
        there = best[name]
        assert torch.equal(*(v.to_local() if isinstance(v, DTensor) else v for v in (value, there)))
    model.load_state_dict(best)


def hooked_gradients(run: Any) -> None:
    """Hooks of parameters clip gradients, and one of them steps and frees as soon as a gradient is there."""
    model = run.compile(_layers(), _batch(0, 8, 6))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.5) for parameter in model.parameters()}

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step in range(3):
        loss = model(run.rows(_batch(step, 8, 6))).square().mean()
        loss.backward()
        run.note(loss=loss)


def adversarial_inputs(run: Any) -> None:
    """Gradients of inputs make the inputs of the step."""
    model = run.compile(_layers(), _batch(0, 8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = run.rows(_batch(step, 8, 6)).clone().requires_grad_()
        (towards,) = torch.autograd.grad(model(x).square().sum(), x)
        loss = model(x.detach() + 0.1 * towards.sign()).square().mean()
        _step(run, optimizer, loss)


def penalty_by_itself(run: Any) -> None:
    """A penalty on parameters has a backward of its own."""
    model = run.compile(_layers(), _batch(0, 8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(run.rows(_batch(step, 8, 6))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        (0.01 * sum(parameter.norm() for parameter in model.parameters())).backward()
        optimizer.step()
        run.note(loss=loss)


class Tasks(nn.Module):
    """Two losses that learned widths weigh, and a policy's distribution, in methods that use parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5)
        self.widths, self.scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x)

    def weigh(self, *losses: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            least = (torch.stack(losses) + self.widths).min()
        return (torch.exp(-self.widths) * torch.stack(losses) + self.widths).sum() - least

    def surprise(self, found: torch.Tensor) -> torch.Tensor:
        return -D.Normal(found[:, :2], self.widths.exp()).log_prob(found[:, 2:4]).mean() * self.scale.exp()

    def penalty(self) -> torch.Tensor:
        return sum(parameter.norm() for parameter in self.parameters())

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [self.widths, self.scale], "lr": 0.05}, {"params": self.trunk.parameters()}])


def losses_in_methods(run: Any) -> None:
    """Parameters weigh losses outside of forward, in methods of the model."""
    tasks = run.compile(Tasks(), _batch(0, 8, 6))
    optimizer = tasks.optimizer()
    for step in range(3):
        found = tasks(run.rows(_batch(step, 8, 6)))
        loss = tasks.weigh(found.square().mean(), found.abs().mean()) + tasks.surprise(found) + 0.1 * tasks.penalty()
        _step(run, optimizer, loss)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return checkpoint(self.layers[1], self.head(x), use_reentrant=True)


def reentrant_checkpoints(run: Any) -> None:
    """The inputs need no gradient, so that autograd reaches nothing inside of the first checkpoints."""
    model = run.compile(Recomputed(), _batch(0, 8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(run.rows(_batch(step, 8, 6))).square().mean()
        _step(run, optimizer, loss)


class OfCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 1))
        self.layers[0].compile(backend="eager")
        self.layers[2] = torch.compile(self.layers[2], backend="eager")  # type: ignore[assignment]
        self.act = torch.compile(lambda x: F.gelu(x) * 2, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x


def compiled_parts(run: Any) -> None:
    """Some layers, and a function between them, were given to ``torch.compile``."""
    model = run.compile(OfCompiled(), _batch(0, 8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(run.rows(_batch(step, 8, 6))).square().mean()
        _step(run, optimizer, loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.cell(x, state)
        return self.head(state), state


def states_like_parameters(run: Any) -> None:
    """The first state is made with the dtype and on the device of a parameter."""
    model = run.compile(Recurrent(), _batch(0, 8, 6), torch.zeros(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = next(model.parameters()).new_zeros(len(run.rows(_batch(0, 8, 6))), 5)
    for step in range(3):
        found, state = model(run.rows(_batch(step, 8, 6)), state.detach())
        loss = found.square().mean()
        _step(run, optimizer, loss)


PROGRAMS = {
    program.__name__: program
    for program in (
        adversaries,
        proximal_policy,
        variational,
        batches_of_a_class,
        best_state,
        hooked_gradients,
        adversarial_inputs,
        penalty_by_itself,
        losses_in_methods,
        reentrant_checkpoints,
        compiled_parts,
        states_like_parameters,
        *RESEARCH,
    )
}


def _refusal(of: Any) -> str:
    try:
        of()
    except shardgraph.ShardGraphError as error:
        return str(error)
    return ""


def refused_after_forward() -> dict[str, str]:
    """What is said of a loss that takes a parameter along, of a norm of a shard that is written to, and of a hook that
    would be called without a gradient."""
    torch.manual_seed(0)
    model: Any = shardgraph.compile(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0), nn.LogSoftmax(0)), "fsdp")
    x = torch.randn(4, 6)
    said = {"loss": _refusal(lambda: (model(x)[0] + model[0].weight.norm()).backward())}
    said["norm"] = _refusal(lambda: model[0].bias.detach().norm().clamp_(min=1e-3))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with model.no_sync():
        said["hook"] = _refusal(lambda: model(x)[0].backward())
    return said


def for_each_sample() -> tuple[str, float, bool]:
    """What is said of a gradient for each sample through a compiled module; the error as it advises; and whether the
    module trains afterwards."""
    torch.manual_seed(0)
    original, x = _layers(), torch.randn(4, 6)
    model: Any = shardgraph.compile(copy.deepcopy(original), "fsdp", progress=False)
    model(x)

    def of(called: Any, values: Any) -> Any:
        def loss(values: Any, sample: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = functional_call(called, values, (sample.unsqueeze(0),))
            return output.square().mean()

        return vmap(grad(loss), in_dims=(None, 0))({name: value.detach() for name, value in values}, x)

    said = _refusal(lambda: of(model, model.named_parameters()))
    with model.unsharded():
        found = of(model.original, model.named_parameters())
    expected = of(original, original.named_parameters())
    model(x).mean().backward()
    return said, max((found[k] - expected[k]).abs().max().item() for k in expected), model[0].weight.grad is not None


def states_of_stages() -> tuple[Any, str]:
    """What loading a rank's own state returns, and what is said of that of the other stage."""
    torch.manual_seed(0)
    model: Any = shardgraph.compile(_layers(), "pp", mesh={"pp": 2}, example_inputs=(torch.randn(8, 6),))
    mine = model.state_dict()
    loaded = model.load_state_dict(mine)
    other = {name: value for name, value in _layers().state_dict().items() if name not in mine}
    return tuple(loaded), _refusal(lambda: model.load_state_dict(other))


def averaged_across_stages() -> str:
    """What is said where a stage has the teacher, and another one the student."""
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    model: Any = shardgraph.compile(_layers(), "pp", mesh={"pp": 2}, example_inputs=(x,))
    average = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (0, 2, 4):
            for mine, new in zip(average[layer].parameters(), model[layer].parameters(), strict=True):
                mine.mul_(0.9).add_(new, alpha=0.1)  # of one layer each: nothing is missing on any rank
    return _refusal(lambda: _mix(model[4].bias, model[0].bias)) or _refusal(lambda: _mix(model[0].bias, model[4].bias))


def _mix(one: torch.Tensor, other: torch.Tensor) -> None:
    with torch.no_grad():
        one.data.add_(other.data[:1])
