"""What runs on each rank of the tests of a compiled module's methods, submodules and state; at module level, so that a
new process finds it. Models are in double precision, and each rank has its part of one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

import shardgraph
from shardgraph.module import sharded as module
from shardgraph.module.remembered import lowered
from tests.ranks import difference, whole


class Retriever(nn.Module):
    """Other methods than forward, one of which uses a parameter by itself, and state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        self.projection = nn.Parameter(torch.randn(5, 3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).square().mean()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) + self.encoder(2 * x)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) @ self.projection

    def reset(self, to: torch.Tensor) -> None:
        self.projection.copy_(to)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def pair(plan: str, make: Callable[[], nn.Module] = Retriever, **options: Any) -> tuple[Any, Any]:
    """A compiled model, and the original."""
    torch.manual_seed(0)
    original = make().double()
    if divided := _divided(plan):
        mesh = {"dp": dist.get_world_size() // divided, "tp": divided} if plan == "fsdp+tp" else {"tp": divided}
        options = {"mesh": mesh, "example_inputs": batch(plan)[:1], **options}
    return shardgraph.compile(copy.deepcopy(original), plan, progress=False, **options), original


def batch(plan: str = "fsdp") -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch, and all of it."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    share = _divided(plan) or 1
    return whole.chunk(dist.get_world_size() // share)[dist.get_rank() // share], whole


def _divided(plan: str) -> int:
    """By how many ranks operators are divided, which share a batch."""
    return {"tp": dist.get_world_size(), "fsdp+tp": 2}.get(plan, 0)


def raised(call: Callable[[], Any]) -> str:
    """What the error of a call says."""
    try:
        call()
    except shardgraph.ShardGraphError as error:
        return str(error)
    return "it ran"


def differentiated(plan: str, of: str) -> float:
    """The largest error of gradients through a method, a submodule, or the original that was compiled."""
    sharded, original = pair(plan)
    compute: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
        "a method": lambda model, x: model.encode(x).square(),
        "a submodule": lambda model, x: model.encoder(x).square(),
        "a layer": lambda model, x: model.encoder[0](x).square(),
        "the original": lambda model, x: getattr(model, "original", model)(x),
    }
    part, whole = batch(plan)
    worst = 0.0
    for _ in range(2):  # gradients add up
        for model, x in ((sharded, part), (original, whole)):
            compute[of](model, x).mean().backward()
    for name, parameter in original.named_parameters():
        if parameter.grad is not None:
            worst = max(worst, (sharded.get_parameter(name).grad.full_tensor() - parameter.grad).abs().max().item())
    return worst


def calls_of_ranks_that_differ(plan: str) -> bool:
    """A method that calls a submodule more often on one rank than on the other."""
    sharded, original = pair(plan)
    part, _ = batch()

    def repeatedly(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + dist.get_rank()):
            x = self.encoder[0](x)[:, :6]
        return x

    Retriever.repeatedly = repeatedly  # type: ignore[attr-defined]
    return torch.equal(sharded.repeatedly(part), original.repeatedly(part))


def with_parameters_by_themselves(plan: str) -> tuple[float, str, float, str]:
    """Errors of a method that uses a parameter by itself and of its gradients; what one says that writes a tensor to
    it; and the same inside of ``unsharded``: the error, and what backward says."""
    sharded, original = pair(plan)
    part, whole = batch(plan)
    for model, x in ((sharded, part), (original, whole)):
        model.project(x).square().mean().backward()
    trained = difference(sharded, original, gradients=True)
    with torch.no_grad():
        told = raised(lambda: sharded.reset(torch.ones(5, 3, dtype=torch.float64)))
    with sharded.unsharded():
        error = (sharded.project(part) - original.project(part)).abs().max().item()
        refused = raised(lambda: sharded.project(part).sum().backward())
    return trained, told, error, refused


class Narrow(nn.Module):
    """A policy with a method, as a part of another module; its last layer has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(6, 3), nn.Linear(6, 1)
        self.log_std = nn.Parameter(torch.zeros(3))

    def evaluate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.distributions.Normal(self.mean(x), self.log_std.exp())
        return found.log_prob(x[:, :3]).mean(), self.value(x).square().mean()


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Narrow()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.policy.evaluate(x))


def outside_of_methods(plan: str) -> float:
    """The error of weights after steps by a loss that is computed outside: a part's method, penalties, a scale."""
    sharded, original = pair(plan, Agent)
    part, whole = batch(plan)
    for model, x in ((sharded, part), (original, whole)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with model.as_written() if model is sharded else nullcontext():
                surprise, value = model.policy.evaluate(x)
                sizes = sum(parameter.abs().sum() for parameter in model.parameters())
                scaled = (x[:, :3] * model.policy.log_std).mean()
                loss = value - surprise + 0.01 * sizes + scaled + model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return difference(sharded, original, gradients=False)


def told_of_shards() -> dict[str, str]:
    """What is said of operations on shards that torch does not have, outside of methods and within ``as_written``."""
    sharded, _ = pair("fsdp", Agent)
    part, _ = batch()
    weight = sharded.policy.mean.weight
    with torch.no_grad():
        told = {
            "method of a part": raised(lambda: sharded.policy.evaluate(part)),
            "initialised": raised(lambda: nn.init.normal_(weight)),
            "noise": raised(lambda: torch.randn_like(weight)),
            "renormed": raised(lambda: weight.renorm_(2, 0, 1.0)),
        }
        with sharded.as_written():
            weight.mul_(2.0)
        try:
            with sharded.as_written():
                weight.add_(torch.ones(3, 6).double())
        except shardgraph.ShardGraphError as error:
            told["written"] = str(error)
    return told


def mixed_and_not_caught() -> None:
    sharded, _ = pair("fsdp")
    batch()[0][:, :5] @ sharded.projection


def gradient_penalty(plan: str) -> float:
    """The error of gradients through the slope of a critic by its inputs, through the original."""
    sharded, original = pair(plan, lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)))
    part, whole = batch(plan)
    for model, called, x in ((sharded, sharded.original, part), (original, original, whole)):
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(called(at).sum(), at, create_graph=True)
        ((slope.norm(dim=1) - 1).square().mean() + model(x).mean()).backward()
    return difference(sharded, original, gradients=True)


def written_whole(plan: str) -> tuple[float, float]:
    """Errors after parameters were written, and a call made, inside of ``unsharded``; and of a step after that."""
    sharded, original = pair(plan)
    part, whole = batch(plan)
    with sharded.unsharded(), torch.no_grad():
        for model in (sharded, original):
            model.projection.fill_(2.0)
            model.encoder[0].weight.mul_(3.0)
    first = difference(sharded, original, gradients=False)
    optimizers = [model.optimizer() for model in (sharded, original)]
    sharded.unshard()
    sharded(part).backward()  # which needs shards
    original(whole).backward()
    for optimizer in optimizers:
        optimizer.step()
    return first, difference(sharded, original, gradients=False)


def trained_while_whole(plan: str, what: str) -> float:
    """The error of weights where a part of a training step comes inside of ``unsharded``."""
    sharded, original = pair(plan)
    part, whole = batch()
    mine, theirs = sharded.optimizer(), original.optimizer()

    def backward() -> None:
        sharded(part).backward()
        original(whole).backward()

    backward()
    with sharded.unsharded():
        if what == "step":
            mine.step()
        elif what == "step of both":
            sharded.step(part, optimizer=mine)
        elif what == "clip":
            norm = sharded.clip_grad_norm_(1e-2)
        elif what == "clear":
            sharded.zero_grad()
        else:
            mine = torch.optim.SGD(sharded.parameters(), lr=0.1)
    if what == "step of both":
        original(whole).backward()
    elif what == "clip":
        assert abs(norm - nn.utils.clip_grad_norm_(original.parameters(), 1e-2)) < 1e-9
    elif what == "clear":
        original.zero_grad()
        backward()
    if not what.startswith("step"):
        mine.step()
    theirs.step()
    return difference(sharded, original, gradients=False)


def added(plan: str, how: str) -> tuple[float, bool]:
    """The error of training after a head was added, and whether it is sharded as the others are."""
    sharded, original = pair(plan, lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)))
    part, whole = batch(plan)
    sharded(part), original(whole)
    torch.manual_seed(1)
    head = nn.Linear(7, 9).double()
    for model in (sharded, original):
        if how == "replaced":
            model[1] = copy.deepcopy(head)
        elif how == "one parameter":
            model[1].weight = nn.Parameter(head.weight[:5].detach().clone())
        else:
            model.append(nn.Linear(5, 3).double())
            with torch.no_grad():
                model[2].weight.fill_(0.1), model[2].bias.fill_(0.2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (sharded, original)]
    for _ in range(2):
        for model, optimizer, x in zip((sharded, original), optimizers, (part, whole), strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    alike = {type(parameter).__name__ for parameter in sharded.parameters()}
    placed = {parameter.placements for parameter in sharded.parameters() if isinstance(parameter, DTensor)}
    return difference(sharded, original, gradients=False), len(alike) == len(placed) == 1


def added_where_it_cannot_be() -> dict[str, str]:
    """What is said of a head without values, and of one under a plan with a pipeline."""
    sharded, _ = pair("fsdp", lambda: nn.Sequential(nn.Linear(6, 7)))
    part, _ = batch()
    sharded(part)
    with torch.device("meta"):
        sharded.append(nn.Linear(7, 2).double())
    told = {"meta": raised(lambda: sharded(part))}
    model, x = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)), torch.randn(8, 6)
    options: dict[str, Any] = {"pipeline": shardgraph.Pipeline(2, balance=(1, 1)), "example_inputs": (x,)}
    sharded = shardgraph.compile(model, "pp", progress=False, loss_fn=nn.functional.mse_loss, **options)
    model[1].register_parameter("late", nn.Parameter(torch.ones(5)))
    told["pipeline"] = raised(lambda: sharded.train_step(x, target=torch.zeros(8, 5)))
    return told


def told_of_inputs() -> dict[str, str]:
    """What is said of an input in shards, and of a call inside of a transformation."""
    sharded, _ = pair("fsdp", lambda: nn.Linear(6, 3))
    part, _ = batch()
    return {
        "shards": raised(lambda: sharded(DTensor.from_local(part, sharded.mesh, [Shard(0)]))),
        "vmap": raised(lambda: torch.func.vmap(sharded)(part)),
    }


def added_with_other_values() -> str:
    """What is said of a head that each rank has initialised for itself."""
    sharded, _ = pair("fsdp", lambda: nn.Sequential(nn.Linear(6, 7)))
    part, _ = batch()
    sharded(part)
    torch.manual_seed(dist.get_rank())
    sharded.append(nn.Linear(7, 2).double())
    return raised(lambda: sharded(part))


def as_a_vector(plan: str) -> float:
    """The error of all parameters as one vector, that is set again at twice its size, and of gradients through it."""
    sharded, original = pair(plan)
    with sharded.as_written():
        vector = parameters_to_vector(sharded.parameters())
        vector.square().sum().backward()
    expected = parameters_to_vector(original.parameters())
    expected.square().sum().backward()
    error = max(float((whole(vector) - expected).abs().max()), difference(sharded, original, gradients=True))
    with sharded.unsharded():
        vector_to_parameters(2 * parameters_to_vector(sharded.parameters()).detach(), sharded.parameters())
    vector_to_parameters(2 * expected.detach(), original.parameters())
    return max(error, difference(sharded, original, gradients=False))


def registered_as_with_fsdp2(plan: str) -> float:
    """The error of a method that was registered as FSDP2's users do."""
    sharded, original = pair(plan)
    register_fsdp_forward_method(sharded, "encode")
    part, _ = batch()
    return float((sharded.encode(part) - original.encode(part)).abs().max())


LANGUAGE: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=50, max_position_embeddings=32, pad_token_id=0, eos_token_id=49,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32, pad_token_id=0, eos_token_id=49)
    ),
}  # fmt: skip


def of_transformers(plan: str, name: str, folder: str) -> dict[str, Any]:
    """What methods of a model of transformers do after it was compiled."""
    torch.manual_seed(0)
    original = LANGUAGE[name]().eval()
    number = 0 if plan == "tp" else dist.get_rank()  # of this rank's own text and its length
    ids = torch.arange(8).reshape(2, 4) + 3 * number
    options: dict[str, Any] = {"mesh": {"tp": 2}, "example_kwargs": {"input_ids": ids}} if plan == "tp" else {}
    sharded = shardgraph.compile(copy.deepcopy(original), plan, progress=False, **options)
    facts: dict[str, Any] = {}
    sharded(input_ids=ids)
    words = dict(max_new_tokens=2 + 3 * number, do_sample=False, attention_mask=torch.ones_like(ids))
    facts["generated"] = torch.equal(sharded.generate(ids, **words), original.generate(ids, **words))
    embedded = sharded.get_input_embeddings()(ids) - original.get_input_embeddings()(ids)
    facts["embedded"] = embedded.abs().max().item()
    with sharded.unsharded():
        sharded.resize_token_embeddings(58, mean_resizing=False)
    facts["rows"] = sharded.get_input_embeddings().weight.shape[0]
    logits = sharded(input_ids=ids).logits
    sharded.save_pretrained(folder)
    loaded = type(original).from_pretrained(folder)
    facts["saved"] = (loaded(input_ids=ids).logits - logits).abs().max().item()
    facts["files"] = sorted(path.suffix for path in Path(folder).iterdir())
    return facts


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor of transformers": lambda parameters: Adafactor(parameters),
    "its first moments": lambda parameters: Adafactor(
        parameters, lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9
    ),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=1e-2),
    "LBFGS with a line search": lambda parameters: torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=5, line_search_fn="strong_wolfe"
    ),
}


def compiled_once(plan: str) -> int:
    """How often a model is lowered that is compiled for the inputs with which it is called."""
    made = []
    with mock.patch.object(module, "lowered", lambda *args: made.append(args) or lowered(*args)):
        part, _ = batch()
        sharded, _ = pair(plan, lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)), example_inputs=(part,))
        for _ in range(3):
            sharded(part)
    return len(made)


def stepped(plan: str, name: str) -> float:
    """The error of weights after three steps with closures, of shards that are not even."""
    sharded, original = pair(
        plan, lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 5))
    )
    part, whole = batch(plan)
    for model, x in ((sharded, part), (original, whole)):
        optimizer = OPTIMIZERS[name](model.parameters())

        def closure(model: Any = model, x: Any = x, optimizer: Any = optimizer) -> torch.Tensor:
            with torch.enable_grad():  # transformers' Adafactor calls it without
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    return difference(sharded, original, gradients=False)


def lbfgs_of_stages() -> str:
    """What is said of an optimizer that needs all parameters of a pipeline."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 3))
    x = torch.randn(8, 6)
    options: dict[str, Any] = {"pipeline": shardgraph.Pipeline(2, balance=(2, 2)), "example_inputs": (x,)}
    sharded = shardgraph.compile(model, "pp", progress=False, loss_fn=nn.functional.mse_loss, **options)
    optimizer = torch.optim.LBFGS(sharded.parameters())
    return raised(lambda: optimizer.step(lambda: sharded.train_step(x, target=torch.zeros(8, 3))))


def method_of_stages() -> tuple[str, str]:
    """What is said of submodules and whole parameters of a pipeline."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    x = torch.randn(8, 6)
    options: dict[str, Any] = {"pipeline": shardgraph.Pipeline(2, balance=(1, 1)), "example_inputs": (x,)}
    sharded = shardgraph.compile(model, "pp", progress=False, **options)
    return raised(lambda: sharded.original(x)), raised(sharded.unshard)


def compiled_by_torch(plan: str) -> float:
    """The error of a step under ``torch.compile``, of the module and of a function that calls it."""
    sharded, original = pair(plan)
    part, whole = batch()
    loss = torch.compile(sharded)(part)
    twice = torch.compile(lambda x: 2 * sharded(x))(part)
    (loss + twice).backward()
    (3 * original(whole)).backward()
    return difference(sharded, original, gradients=True)
