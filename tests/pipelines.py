"""What runs on each rank of the tests of pipelines; at module level, so that a new process finds it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardgraph
from shardgraph import Cluster, Pipeline, preset
from shardgraph.report.pipeline import analyze_pipeline
from shardgraph.runtime.measure import PeakMemory
from tests.ranks import deterministic, part, prepared, whole
from tests.test_analysis import gpt2
from tests.zoo import make, scalar


def batch_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss of any output, and a mean over ``target``, which is 0 where that is 1."""
    return scalar(output) + (target - 1).mean()


def pipelined(
    name: str, plan: str, mesh: dict[str, int], pipeline: Pipeline, rows: int = 8, **more: Any
) -> tuple[Any, Any, Any]:
    """``(sharded, original, call)``, where ``call`` is this rank's part of a batch with a target."""
    model, call = prepared(name, rows)
    original = copy.deepcopy(model)
    args, kwargs = part(call, preset(plan, mesh, pipeline))
    kwargs = {
        **kwargs,
        "target": torch.ones(args[0].shape[0] if args else next(iter(kwargs.values())).shape[0]).double(),
    }
    sharded = shardgraph.compile(
        model,
        plan,
        mesh=mesh,
        pipeline=pipeline,
        loss_fn=batch_loss,
        example_inputs=args,
        example_kwargs=kwargs,
        **more,
    )
    return sharded, original, (args, kwargs, call)


def pipeline_errors(
    name: str,
    plan: str,
    mesh: dict[str, int],
    pipelines: list[Pipeline],
    rows: int = 8,
    steps: int = 5,
    called: bool = False,
) -> list[float]:
    """For each pipeline the largest difference of any loss, gradient or weight from the unsharded model's.

    Steps are ``train_step`` or, if ``called``, calls of the module with a loss that the caller computes.
    """
    return [_pipeline_error(*pipelined(name, plan, mesh, each, rows), steps, called) for each in pipelines]


def _step(sharded: Any, called: bool, *args: Any, target: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if not called:
        return sharded.train_step(*args, target=target, **kwargs)
    loss = batch_loss(sharded(*args, **kwargs), target)
    loss.backward()
    return loss.detach()


def _pipeline_error(sharded: Any, original: nn.Module, calls: Any, steps: int, called: bool = False) -> float:
    args, kwargs, (whole_args, whole_kwargs) = calls
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, original)]
    theirs, worst = dict(original.named_parameters()), 0.0
    for _ in range(steps):
        loss = _step(sharded, called, *args, **kwargs)
        reference = scalar(original(*whole_args, **whole_kwargs))
        reference.backward()
        dist.all_reduce(loss)
        worst = max(worst, abs(loss.item() / dist.get_world_size() - reference.item()))
        for fqn, parameter in sharded.named_parameters():
            assert (parameter.grad is None) == (theirs[fqn].grad is None), fqn
            if parameter.grad is not None and parameter.numel():
                worst = max(worst, (whole(parameter.grad) - theirs[fqn].grad).abs().max().item())
        norms = sharded.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(original.parameters(), 0.5)
        worst = max(worst, (norms[0] - norms[1]).abs().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for fqn, parameter in sharded.named_parameters():
        if parameter.numel():
            worst = max(worst, (whole(parameter.detach()) - theirs[fqn].detach()).abs().max().item())
    return worst


def outputs_in_eval(name: str, pipeline: Pipeline) -> float:
    """How far outputs are from the unsharded model's in eval mode."""
    sharded, original, (*_, call) = pipelined(name, "pp", {"pp": 2}, pipeline)
    mine, theirs = sharded.eval()(*call[0], **call[1]), original.eval()(*call[0], **call[1])
    pairs = zip(torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(theirs), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if isinstance(b, torch.Tensor) and b.numel())


class TwoOutputs(nn.Module):
    """A stack of layers with a head for each of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.one, self.other = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers(x)
        return {"one": self.one(hidden), "other": self.other(hidden)}


def two_outputs(schedule: str = "1f1b") -> tuple[Any, nn.Module, torch.Tensor]:
    """``(sharded, original, batch)`` of a model that is compiled at its first call."""
    torch.manual_seed(0)
    model = TwoOutputs().double()
    original = copy.deepcopy(model)
    batch = torch.randn(8, 6, dtype=torch.float64)
    pipeline = Pipeline(4, schedule, stages=("layers.2",))
    return shardgraph.compile(model, "pp", pipeline=pipeline, example_inputs=(batch,)), original, batch


def two_calls_before_backward() -> float:
    """How far gradients are from the unsharded model's when a loss is of the outputs of two calls."""
    sharded, original, batch = two_outputs()
    batches = batch, batch + 1
    for model in (sharded, original):
        first, second = (model(each) for each in batches)
        (first["one"].square().mean() + (second["one"].sum() * first["other"].mean())).backward()
    theirs = dict(original.named_parameters())
    return max((whole(p.grad) - theirs[fqn].grad).abs().max().item() for fqn, p in sharded.named_parameters())


def a_loss_of_one_output() -> list[str]:
    """The parameters that have no gradient after a loss of one output, and after one of both."""
    sharded, _, batch = two_outputs()
    sharded(batch)["one"].sum().backward()
    without = [fqn for fqn, parameter in sharded.named_parameters() if parameter.grad is None]
    sharded(batch)["other"].sum().backward()
    return without + [fqn for fqn, parameter in sharded.named_parameters() if parameter.grad is None]


def gradient_of_the_input() -> float:
    """How far the gradient of what the batch was computed from is from the unsharded model's."""
    sharded, original, batch = two_outputs()
    gradients = []
    for model in (sharded, original):
        scale = torch.full((6,), 2.0, dtype=torch.float64, requires_grad=True)
        sum(each.square().sum() for each in model(batch * scale).values()).backward()
        gradients.append(scale.grad)
    return (gradients[0] - gradients[1]).abs().max().item()


def refused_backward() -> list[str]:
    """The errors of a second backward of one call, and of weights changed before backward."""
    sharded, _, batch = two_outputs()

    def message(loss: torch.Tensor) -> str:
        try:
            loss.backward(retain_graph=True)
        except shardgraph.BackwardError as error:
            return str(error)
        return ""

    loss = sum(each.sum() for each in sharded(batch).values())
    loss.backward(retain_graph=True)
    messages = [message(loss)]
    loss = sum(each.sum() for each in sharded(batch).values())
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.mul_(2)
    return [*messages, message(loss)]


class Contrast(nn.Module):
    """Combines the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x).tanh())
        return hidden @ hidden.t()


def rows_that_are_combined() -> tuple[float, list[str]]:
    """How far the gradients of a model that combines rows are from the unsharded model's, and what it warns of."""
    torch.manual_seed(0)
    model = Contrast().double()
    original, batch = copy.deepcopy(model), torch.randn(8, 6, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Guards may run slower")  # torch's, on Python 3.13.0
        sharded = shardgraph.compile(
            model, "pp", pipeline=Pipeline(4, stages=("second",)), example_inputs=(batch,), progress=False
        )
        for each in (sharded, original):
            each(batch).square().mean().backward()
    theirs = dict(original.named_parameters())
    worst = max((whole(p.grad) - theirs[fqn].grad).abs().max().item() for fqn, p in sharded.named_parameters())
    return worst, [str(each.message) for each in told]


def running_statistics(pipeline: Pipeline) -> float:
    """How far a first batch norm's statistics are from those of one that sees the whole batch."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    batch = torch.randn(8, 3, 8, 8) * 3 + 1
    model = copy.deepcopy(original)
    sharded = shardgraph.compile(
        model, "pp", pipeline=pipeline, loss_fn=batch_loss, example_inputs=(batch,), example_kwargs={"target": batch}
    )
    for _ in range(3):
        sharded.train_step(batch, target=batch)
        original(batch)
    state = sharded.full_state_dict()
    if dist.get_rank():
        return 0.0
    expected = original.state_dict()
    assert state["0.num_batches_tracked"] == expected["0.num_batches_tracked"] == 3
    assert state["2.num_batches_tracked"] == 3
    return max((state[f"0.{n}"] - expected[f"0.{n}"]).abs().max().item() for n in ("running_mean", "running_var"))


def save_under_pipeline(folder: str, name: str, plan: str, mesh: dict[str, int], pipeline: Pipeline) -> Any:
    """Train a step, save model and optimizer; gives the whole state."""
    sharded, _, (args, kwargs, _) = pipelined(name, plan, mesh, pipeline)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    sharded.train_step(*args, **kwargs)
    optimizer.step()
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder)
    sharded.save_safetensors(f"{folder}/model.safetensors")
    return sharded.full_state_dict()


def load_under(folder: str, name: str, plan: str, mesh: dict[str, int], pipeline: Pipeline | None) -> Any:
    """Load the checkpoint into a model of another seed under a plan; gives the whole state."""
    model, (args, kwargs) = make(name, 8, seed=1)
    model = deterministic(model)
    example: dict[str, Any] = {}
    if pipeline is not None:
        kwargs = {**kwargs, "target": torch.ones(8).double()}
        example = {"pipeline": pipeline, "example_inputs": args, "example_kwargs": kwargs, "loss_fn": batch_loss}
    sharded = shardgraph.compile(model, plan, mesh=mesh, **example)
    state = sharded.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    sharded.load_state_dict(state)
    return sharded.full_state_dict()


class Leaves(Exception):
    """Ends a rank's step in the middle."""


def left_in_a_step(name: str, pipeline: Pipeline, victim: int) -> str:
    """One rank ends in the middle of a step without a word; gives what the others are told."""
    sharded, _, (args, kwargs, _) = pipelined(name, "pp", {"pp": dist.get_world_size()}, pipeline)
    sharded.train_step(*args, **kwargs)
    if dist.get_rank() == victim:

        def leave(*args: Any, **kwargs: Any) -> None:
            raise Leaves

        sharded._running.stages[0].backward_one_chunk = leave
        sharded._setup.agreement.first_failure = lambda text: text
    try:
        sharded.train_step(*args, **kwargs)
    except Leaves:
        return ""
    except shardgraph.CollectiveError as error:
        return str(error)
    return "the step went through"


def accumulated(name: str, pipeline: Pipeline) -> float:
    """Two steps of which one is under ``no_sync``, against the unsharded model's summed gradients."""
    sharded, original, (args, kwargs, call) = pipelined(name, "pp+fsdp", {"pp": 2, "dp": 2}, pipeline)
    with sharded.no_sync():
        sharded.train_step(*args, **kwargs)
        sharded.zero_grad()  # which clears the first of three steps
        sharded.train_step(*args, **kwargs)
    assert all(p.grad is None for p in sharded.parameters())
    sharded.train_step(*args, **kwargs)
    (2 * scalar(original(*call[0], **call[1]))).backward()
    theirs = dict(original.named_parameters())
    return max(
        (whole(p.grad) - theirs[n].grad).abs().max().item() for n, p in sharded.named_parameters() if p.grad is not None
    )


class Mixes(nn.Module):
    """Uses rows in its first layer and again in its last, and one vector for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(rows).tanh() * rows + shift)


def input_gradients(pipeline: Pipeline) -> float:
    """How far the gradients of inputs, of which one is computed, are from those for the undivided batch."""
    torch.manual_seed(0)
    original, target = Mixes(), torch.randn(6, 8)
    inputs = [torch.randn(6, 8, requires_grad=True), torch.randn(1, 8, requires_grad=True)]
    loss_fn = nn.functional.mse_loss
    expected = torch.autograd.grad(loss_fn(original(inputs[0] * 2, inputs[1]), target), inputs)
    sharded = shardgraph.compile(
        original,
        "pp",
        pipeline=pipeline,
        loss_fn=loss_fn,
        example_inputs=tuple(inputs),
        example_kwargs={"target": target},
        progress=False,
    )
    sharded.train_step(inputs[0] * 2, inputs[1], target=target)
    return max((mine.grad - theirs).abs().max().item() for mine, theirs in zip(inputs, expected, strict=True))


class Summed(nn.Module):
    """Two parameters whose gradients are one tensor, and one whose gradient repeats one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + (self.a + self.b)).square().mean() + self.c.sum()


def shared_gradients_error() -> float:
    """The largest difference of a gradient of ``Summed``, added up over microbatches, from the unsharded model's."""
    torch.manual_seed(0)
    model, x = Summed().double(), torch.randn(8, 4, dtype=torch.float64)
    original = copy.deepcopy(model)
    pipeline = Pipeline(4, "1f1b", stages=("second",))
    sharded = shardgraph.compile(model, "pp", pipeline=pipeline, loss_fn=lambda loss, _: loss,
                                 example_inputs=(x,), example_kwargs={"target": x})  # fmt: skip
    sharded.train_step(x, target=x)
    sum(original(part) / 4 for part in x.chunk(4)).backward()
    gradients = {fqn: parameter.grad for fqn, parameter in original.named_parameters()}
    return max((mine.grad - gradients[fqn]).abs().max().item() for fqn, mine in sharded.named_parameters())


def offloaded_error(schedule: str) -> float:
    """How far training with offloaded activations is from the unsharded model's."""
    mesh, pipeline = {"pp": 2}, Pipeline(4, schedule)
    return _pipeline_error(*pipelined("tied-transformer", "pp", mesh, pipeline, offload="activations"), steps=2)


def offloaded_peaks() -> tuple[int, int]:
    """As :func:`peaks`, with offloaded activations."""
    return peaks(Pipeline(4, "1f1b"), offload="activations")


def peaks(pipeline: Pipeline, vocabulary: int = 300, dropout: float = 0.0, **more: Any) -> tuple[int, int]:
    """The most bytes that this rank has live in a step: measured and predicted."""
    torch.manual_seed(0)
    model = gpt2(4, vocab_size=vocabulary).to_empty(device="cpu")
    model.init_weights()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    ids = torch.randint(vocabulary, (8, 16))
    call = {"input_ids": ids, "labels": ids}
    sharded = shardgraph.compile(model, "pp", pipeline=pipeline, example_kwargs=call, **more)
    optimizer = torch.optim.AdamW(sharded.parameters())

    def step() -> None:
        sharded.train_step(**call)
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    with PeakMemory().track([*sharded.parameters(), *sharded.buffers(), *state, ids]) as memory:
        step()
    machine = replace(Cluster.detect(), devices_per_node=2)
    return memory.peak_bytes, analyze_pipeline(sharded.program, machine).peak(dist.get_rank())


def other_shapes(one_rank_only: bool) -> float:
    """A step with another batch size, on all ranks or on the last alone."""
    sharded, original, (_, kwargs, call) = pipelined("odd-mlp", "pp", {"pp": 2}, Pipeline(2, "1f1b"))
    if one_rank_only:
        sharded._setup.agreement._timeout = 4.0
    sharded.train_step(*call[0], **call[1], target=kwargs["target"])
    for parameter in sharded.parameters():
        parameter.grad = None
    if dist.get_rank() or not one_rank_only:
        call = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t[:6].contiguous(), call)
    target = torch.ones(call[0][0].shape[0]).double()
    loss = sharded.train_step(*call[0], **call[1], target=target)
    return abs(loss.item() - scalar(original(*call[0], **call[1])).item())


def own_losses(name: str, plan: str) -> tuple[float, float]:
    """``train_step`` without ``loss_fn`` of a model that returns its loss: the loss, and the unsharded model's."""
    model, call = prepared(name, 4)
    original = copy.deepcopy(model)
    args, kwargs = part(call)
    sharded = shardgraph.compile(model, plan)
    loss = sharded.train_step(*args, **kwargs)
    assert all(p.grad is not None for p in sharded.parameters() if p.requires_grad)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), scalar(original(*call[0], **call[1])).item()


class Times(nn.Module):
    """A product with a square matrix of equal elements."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Overflowing(nn.Module):
    """Its second layer multiplies numbers of ten thousands, so that the gradient of its weight is the first to
    overflow, while that of its input stays small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Times(0.25), Times(1e-5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) * 1e4)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean square difference, in single precision."""
    return (output.float() - target).square().mean()


def scaled_steps(plan: str, mesh: dict[str, int]) -> list[tuple[bool, bool, float]]:
    """Of each step whether this rank's gradients were finite, whether its weights changed, and the scale after it."""
    x, target = torch.ones(4, 4), torch.zeros(4, 4)
    sharded = shardgraph.compile(
        Overflowing(), plan, mesh=mesh, pipeline=Pipeline(2, stages=("layers.1",)), precision="fp16",
        loss_fn=mean_square, example_inputs=(x,), example_kwargs={"target": target},
    )  # fmt: skip
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-5)
    scaler, found = shardgraph.GradScaler("cpu", init_scale=2.0**8), []
    for _ in range(4):
        (weight,) = sharded.parameters()
        before = weight.detach().clone()
        loss = sharded.train_step(x, target=target, scaler=scaler)
        assert found or abs(loss.item() - 0.16) < 0.01, "the loss is given as it is, not scaled"
        finite = bool(weight.grad.isfinite().all())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((finite, not torch.equal(before, weight), scaler.get_scale()))
    return found


def scaled_and_plain_gradients(plan: str, mesh: dict[str, int], pipeline: Pipeline) -> float:
    """The largest difference between gradients of a loss that is scaled, once unscaled, and of one that is not."""
    sharded, _, (args, kwargs, _) = pipelined("tied-transformer", plan, mesh, pipeline)
    sharded.eval()  # dropout would differ
    sharded.train_step(*args, **kwargs)
    plain = [whole(p.grad) for p in sharded.parameters()]
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
    optimizer.zero_grad()
    scaler = shardgraph.GradScaler("cpu", init_scale=2.0**10)
    sharded.train_step(*args, scaler=scaler, **kwargs)
    assert not torch.equal(whole(next(sharded.parameters()).grad), plain[0])
    scaler.unscale_(optimizer)
    found = [whole(p.grad) for p in sharded.parameters()]
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, plain, strict=True))
