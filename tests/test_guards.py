"""A program is of the model as it was traced: whatever forward reads may change, and the next call does what the
original would."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

import shardgraph
from tests import ranks
from tests.standing import on_ranks

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
FACTOR: Any = torch.ones(4)


class Reads(nn.Module):
    """A forward that reads attributes, containers, buffers, a global, and what hooks and submodules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation, self.dropout = nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale, self.mask, self.shift, self.unread = 2.0, torch.ones(4), None, 0
        self.options, self.weights = {"offset": 1.0}, [torch.ones(4), torch.ones(4)]
        self.function = torch.sin
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.dropout(self.linear(x))) * self.scale * self.kept * FACTOR
        for layer, weight in zip(self.layers, self.weights, strict=False):
            y = layer(y) * weight
        if self.mask is not None:
            y = y * self.mask
        if self.shift is not None:
            y = y + self.shift
        return self.function(y) + self.options["offset"] + getattr(self, "late", 0.0)


def set_to(name: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, copy.deepcopy(value))

    return change


CHANGES: dict[str, Callable[[Reads], Any]] = {
    "a number": set_to("scale", 3.0),
    "the type of a number": set_to("scale", 2),
    "a submodule's number": set_to("dropout.p", 1.0),
    "an attribute that was not there": set_to("late", 5.0),
    "a value in a dictionary": lambda model: model.options.update(offset=4.0),
    "a function": set_to("function", torch.cos),
    "a submodule": set_to("activation", nn.Tanh()),
    "a list that is shorter": lambda model: model.weights.pop(),
    "a list of modules that is shorter": lambda model: model.layers.__delitem__(1),
    "a forward": lambda model: set_to("activation.forward", torch.sigmoid)(model),
    "the model's forward": lambda model: set_to("forward", model.linear.forward)(model),
    "a tensor to none": set_to("mask", None),
    "none to a tensor": set_to("shift", torch.ones(2, 4)),
    "none to a number": set_to("shift", 1.5),
    "a tensor": set_to("mask", torch.full((4,), 3.0)),
    "a tensor of another shape": set_to("mask", torch.full((2, 4), 3.0)),
    "a tensor in place": lambda model: model.mask.mul_(3),
    "a tensor in a list": lambda model: model.weights.__setitem__(0, torch.full((4,), 3.0)),
    "a tensor in a list in place": lambda model: model.weights[0].mul_(3),
    "a buffer": set_to("kept", torch.full((4,), 3.0)),
    "a buffer of another shape": set_to("kept", torch.full((2, 4), 3.0)),
    "a buffer of another dtype": set_to("kept", torch.full((4,), 3)),
    "a hook of a submodule": lambda model: model.linear.register_forward_hook(lambda module, args, output: output * 2),
    "a hook before a submodule": lambda model: model.linear.register_forward_pre_hook(lambda module, args: args[0] * 2),
    "a hook of the model": lambda model: model.register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.mark.quick(
    "a number",
    "a tensor to none",
    "a buffer of another dtype",
    "a buffer of another shape",
    "a hook before a submodule",
    "a tensor in a list",
    "a submodule",
    "a value in a dictionary",
    "a function",
    "an attribute that was not there",
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_next_call_sees_a_change_of_what_forward_reads(change):
    model = Reads()
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "single", progress=False)
    torch.testing.assert_close(sharded(X), original(X))
    for each in (model, original):
        change(each)
    torch.testing.assert_close(sharded(X), original(X))
    sharded(X).sum().backward()
    original(X).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


@pytest.fixture
def doubling() -> Iterator[None]:
    hook = register_module_forward_hook(lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None)
    yield
    hook.remove()


def test_the_next_call_sees_a_hook_of_all_modules(request):
    model = nn.Linear(4, 4)
    sharded = shardgraph.compile(model, "single", progress=False)
    before = sharded(X)
    request.getfixturevalue("doubling")
    torch.testing.assert_close(sharded(X), before * 2)


@pytest.mark.quick("a number")
@pytest.mark.parametrize("value", [2.5, torch.full((4,), 3.0)], ids=["a number", "a tensor"])
def test_the_next_call_sees_a_change_of_a_global(monkeypatch, value):
    model = Reads()
    sharded = shardgraph.compile(model, "single", progress=False)
    sharded(X)
    monkeypatch.setattr(f"{__name__}.FACTOR", value)
    torch.testing.assert_close(sharded(X), model.forward(X))


def test_the_next_call_sees_the_default_dtype():
    class Makes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(2) + x.sum()

    sharded = shardgraph.compile(Makes(4, 4), "single", progress=False)
    assert sharded(X).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert sharded(X).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_next_call_sees_the_default_device():
    class Makes(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), torch.ones(2)

    sharded = shardgraph.compile(Makes(4, 4), "single", progress=False)
    assert sharded(X)[1].device.type == "cpu"
    with torch.device("meta"):
        assert sharded(X)[1].device.type == "meta"
    assert sharded(X)[1].device.type == "cpu"


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


def test_the_next_call_sees_a_mode_that_changes_functions():
    class Squashes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x))

    model = Squashes(4, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    torch.testing.assert_close(sharded(X), model(X))
    with Doubles():
        torch.testing.assert_close(sharded(X), model(X))
    torch.testing.assert_close(sharded(X), model(X))


def test_tensors_in_place_of_parameters_are_refused_and_neither_they_nor_the_model_changed():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", progress=False)
    before = sharded(X)
    values = {name: 2 * parameter for name, parameter in sharded.named_parameters()}
    with pytest.raises(shardgraph.ShardGraphError, match=r"functional_call\(sharded\.original"):
        torch.func.functional_call(sharded, values, (X,))
    assert all(value.grad_fn is not None for value in values.values())
    torch.testing.assert_close(sharded(X), before)
    torch.func.functional_call(sharded.original, values, (X,)).sum().backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


def test_what_forward_does_not_read_may_change_freely():
    model = Reads()
    sharded = shardgraph.compile(model, "single", progress=False)
    for value in range(3):
        model.unread, model.new = value, value
        sharded(X)
    assert [len(variants) for variants in sharded._programs.kept.values()] == [1]


def test_hooks_are_seen_on_modules_whose_precision_is_hooked_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    annotated = shardgraph.Precision("bfloat16", outputs="float32")
    sharded = shardgraph.compile(model, "single", precision=annotated, progress=False)
    before = sharded(X)
    assert torch.equal(sharded(X), before)
    assert [len(variants) for variants in sharded._programs.kept.values()] == [1]
    model.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(sharded(X), before * 2)


def test_a_hook_is_seen_on_a_module_that_has_taken_the_place_of_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    sharded = shardgraph.compile(model, "single", progress=False)
    before = sharded(X)
    model[1] = nn.Sequential(nn.ReLU())
    assert torch.equal(sharded(X), before)
    model[1][0] = nn.ReLU()
    model[1][0].register_forward_hook(lambda module, args, output: output * 2)
    first = next(iter(sharded._programs.kept.values()))[0]
    assert first.guards.failing == "not model.1.0._forward_hooks"
    torch.testing.assert_close(sharded(X), before * 2)


def test_a_value_that_comes_back_gets_its_program_back():
    model = Reads()
    sharded = shardgraph.compile(model, "single", progress=False)
    for scale in (2.0, 3.0, 2.0, 3.0):
        model.scale = scale
        sharded(X)
    assert [len(variants) for variants in sharded._programs.kept.values()] == [2]


def test_an_attribute_that_never_stays_the_same_is_warned_of_by_its_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    sharded = shardgraph.compile(model, "single", progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(9):
            model[1].beta = 1.0 + step
            sharded(X)
    (warned,) = [str(each.message) for each in caught if "programs have been compiled" in str(each.message)]
    assert "model.1.beta == 1.0" in warned


def test_an_attribute_set_on_the_compiled_module_is_the_models():
    model = Reads()
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "single", progress=False)
    sharded.scale = original.scale = 5.0
    assert model.scale == 5.0
    torch.testing.assert_close(sharded(X), original(X))
    sharded.late = original.late = 1.0
    torch.testing.assert_close(sharded(X), original(X))
    del sharded.late
    assert not hasattr(model, "late")
    sharded.training = False
    assert not model.training


# -- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a parameter", "'0.weight' was replaced after shardgraph.compile by a DTensor"),
        ("its data", "data of the parameter '0.weight'"),
        ("the dtype", "data of the parameter '0.weight'"),
    ],
)
def test_parameters_that_are_not_the_shards_are_refused(change, message):
    for texts in on_ranks(ranks.calls_after_replacing, args=(change,)):
        assert all(message in text for text in texts), texts


def test_a_compiled_module_is_not_copied_with_parameters_in_host_memory():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", offload="parameters", progress=False)
    with pytest.raises(shardgraph.ShardGraphError, match="copy the model before"):
        copy.deepcopy(sharded)


def test_a_call_before_values_are_loaded_computes_no_number():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    sharded = shardgraph.compile(model, "single", initialize=False, progress=False)
    assert sharded(X.to(sharded._state.device)).isnan().all()
    sharded.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict())
    assert sharded(X).isfinite().all()


# -- ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_ranks_change_what_forward_reads_together(plan):
    for differences in on_ranks(ranks.ranks_change_an_attribute_together, args=(plan,)):
        assert max(differences) < 1e-6
