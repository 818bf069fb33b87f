"""What runs on each rank of the tests of copies, averages and checkpoints of a compiled module; as in
:mod:`tests.as_written`, models are in double precision, and each rank has its part of one batch."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import shardgraph
from tests.as_written import batch, pair, raised
from tests.ranks import difference


def copied(plan: str) -> tuple[float, float, bool, float]:
    """The error of a copy while the module trains, that of the module, whether the copy trains as it does, and the
    error of a copy of both the module and its optimizer that trains on."""
    sharded, original = pair(plan)
    part, whole = batch(plan)
    sharded(part)
    twin, before = copy.deepcopy(sharded), copy.deepcopy(original)
    optimizers = []
    for model, x in ((sharded, part), (original, whole)):
        optimizers.append(optimizer := torch.optim.AdamW(model.parameters(), lr=0.1))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    errors = difference(twin, before, gradients=False), difference(sharded, original, gradients=False)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    twin(part).backward()
    optimizer.step()
    alike = difference(twin, original, gradients=False) < 1e-12
    both = [copy.deepcopy(each) for each in zip((sharded, original), optimizers, strict=True)]
    for (model, optimizer), x in zip(both, (part, whole), strict=True):
        for _ in range(2):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return *errors, alike, difference(both[0][0], both[1][0], gradients=False)


class Normed(nn.Module):
    """With buffers, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(self.norm(x)).tanh()).square().mean()


AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "equal, of buffers too": {"use_buffers": True},
    "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "exponential, of buffers too": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
}


def averaged(plan: str, how: str) -> float:
    """The error of torch's averages of a compiled module, of their buffers, of what they compute, also after batch
    statistics were made anew, and of what was loaded of them. All ranks have the whole batch, and its statistics."""
    sharded, original = pair(plan, Normed, example_inputs=batch()[1:])
    _, x = batch()
    means, outputs = [AveragedModel(model, **AVERAGES[how]) for model in (sharded, original)], []
    for model, mean in zip((sharded, original), means, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for number in range(3):
            model(x + number).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(model)
        again = AveragedModel(model)
        again.load_state_dict(mean.state_dict())
        outputs += [mean.eval()(x), again.eval()(x)]
        update_bn([x, 2 * x], getattr(mean.module, "original", mean.module))
        outputs.append(mean.eval()(x))
    pairs = [*zip(outputs[:3], outputs[3:], strict=True), *zip(means[0].buffers(), means[1].buffers(), strict=True)]
    worst = max((one - other).abs().max().item() for one, other in pairs)
    return max(worst, difference(means[0].module, means[1].module, gradients=False))


def loaded_its_own_way(plan: str, folder: str) -> tuple[int, float, str, float]:
    """Extra state after a round trip through a whole checkpoint, errors of its values, what is said of a checkpoint
    of another model, and what that has changed."""
    sharded, original = pair(plan)
    sharded.calls = original.calls = 3
    state = sharded.full_state_dict()
    path = Path(folder) / "state.pt"
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    state = torch.load(path)
    sharded.calls = 0
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    sharded.load_state_dict(state)
    error = difference(sharded, original, gradients=False)
    told = raised(lambda: sharded.load_state_dict({**state, "projection": torch.zeros(9)}))
    return sharded.calls, error, told, difference(sharded, original, gradients=False)


def renamed(plan: str) -> float:
    """The error after loading a checkpoint with names of before, which the model's hook translates."""
    sharded, original = pair(plan, lambda: nn.Sequential(nn.Linear(6, 7)))

    def translate(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    sharded[0].register_load_state_dict_pre_hook(translate)
    with torch.no_grad():
        original[0].weight.fill_(0.5)
    sharded.load_state_dict({"0.kernel": original[0].weight.detach(), "0.bias": original[0].bias.detach()})
    return difference(sharded, original, gradients=False)


class Renaming(nn.Linear):
    """A layer whose state has its weight under another name, and state that is no tensor."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.calls = 0
        self.register_state_dict_post_hook(_renamed)
        self.register_load_state_dict_pre_hook(_named_again)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def _renamed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def _named_again(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


class Counted(nn.Sequential):
    """With state that is a tensor, and no buffer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.count = torch.tensor(0)

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state.clone()


def of_its_own(plan: str, kind: str, folder: str) -> tuple[float, int, int]:
    """The error of weights, and extra state of a layer and of the model, after a checkpoint of one kind of a compiled
    module was loaded into another of the same model."""
    make = lambda: Counted(Renaming(6, 7), nn.Linear(7, 3))  # noqa: E731
    (sharded, original), (fresh, _) = pair(plan, make), pair(plan, make)
    sharded.original[0].calls, sharded.original.count = 5, torch.tensor(7)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    if kind == "of shards":
        fresh.load_state_dict(sharded.state_dict())
    elif kind == "whole":
        states = [sharded.full_state_dict()]
        dist.broadcast_object_list(states)
        fresh.load_state_dict(states[0])
    elif kind == "local":
        fresh.load_local_state_dict(sharded.local_state_dict())
    elif kind == "saved":
        shardgraph.save_checkpoint(folder, 1, sharded)
        shardgraph.load_checkpoint(folder, fresh)
    else:
        dcp.save(sharded.state_dict(), checkpoint_id=folder)
        state = fresh.state_dict()
        dcp.load(state, checkpoint_id=folder)
        fresh.load_state_dict(state)
    return difference(fresh, original, gradients=False), fresh.original[0].calls, int(fresh.original.count)


def written_under_hooks(plan: str) -> float:
    """The error after whole parameters were written, of a model whose state has another name for one."""
    sharded, original = pair(plan, lambda: nn.Sequential(Renaming(6, 7)))
    with sharded.unsharded(), torch.no_grad():
        for model in (sharded, original):
            model[0].weight.fill_(2.0), model[0].bias.fill_(3.0)
    return difference(sharded, original, gradients=False)


def parts_in_files() -> dict[str, str]:
    """What is said of pickling a part of a compiled module, and its original; and of a copy that shares everything."""
    sharded, _ = pair("fsdp")
    return {
        "a part": raised(lambda: pickle.dumps(sharded.encoder)),
        "the original": raised(lambda: torch.save(sharded.original, io.BytesIO())),
        "shallow": raised(lambda: copy.copy(sharded)),
    }


def part_copied(plan: str) -> tuple[float, float]:
    """Errors of what a copy of a submodule computes, while the submodule trains, and of its weights after a step."""
    sharded, original = pair(plan)
    part, whole_batch = batch(plan)
    twins = [copy.deepcopy(model.encoder) for model in (sharded, original)]
    for model, x in ((sharded, part), (original, whole_batch)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).backward()
        optimizer.step()
    outputs = []
    for twin, x in zip(twins, (part, whole_batch), strict=True):
        optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
        with sharded.as_written():
            outputs.append(twin(part))
            loss = twin(x).square().mean()
        loss.backward()
        optimizer.step()
    return (outputs[0] - outputs[1]).abs().max().item(), difference(twins[0], twins[1], gradients=False)


class Grown(nn.Linear):
    """A layer that loads a checkpoint of before, which had half of its values."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, *rest)


def grown(plan: str) -> float:
    """The error after loading into a layer that overrides how it loads."""
    sharded, original = pair(plan, lambda: nn.Sequential(Grown(6, 7)))
    state = {name: 0.25 * value for name, value in original.state_dict().items()}
    for model in (sharded, original):
        model.load_state_dict(dict(state))
    return difference(sharded, original, gradients=False)


def hooked(plan: str) -> tuple[list[str], list[str]]:
    """What hooks of the root see, and the names of a state whose hook renames them, of a compiled module and of the
    original."""
    found = []
    for model, x in zip(pair(plan, lambda: nn.Sequential(nn.Linear(6, 7))), batch(), strict=True):
        seen: list[str] = []
        model.register_forward_pre_hook(lambda module, args, seen=seen: seen.append("before"))
        model.register_forward_hook(lambda module, args, output, seen=seen: seen.append("after"))
        model.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}kernel": state.pop(f"{prefix}0.weight")})
        )
        model(x)
        found.append(seen + sorted(model.state_dict()))
    return found[0], found[1]
