"""A compilation that fails leaves the model as it was: the same tensors with the same values, and it still trains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import (
    CaptureError,
    ClusterError,
    DeadlockError,
    GraphInvariantError,
    InitializationError,
    OffloadError,
    PassOrderError,
    PlanError,
    Precision,
    RandomStateError,
    RankMismatchError,
    ShardGraphError,
)

X = torch.arange(8.0).view(2, 4) / 8


class Net(nn.Module):
    """A tied layer, and buffers that a plan casts."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second.weight = self.first.weight
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        if self.branch and x.sum() > 0:
            x = -x
        return self.second(x).square().mean()


class Uninitialised(nn.Module):
    """A layer that writes its parameter at initialisation, after which another one's own is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale + self.shift).square().mean()


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Checks afterwards that every tensor of ``model`` is the same object with the same values, and that it trains."""
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in state.items()}
    yield
    after = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert list(after) == list(state)
    for name, tensor in after.items():
        assert tensor is state[name], name
        assert tensor.is_meta or torch.equal(tensor.detach(), values[name]), name
    if not any(tensor.is_meta for tensor in state.values()):
        trains(model, model)


def trains(compiled: nn.Module, model: nn.Module) -> None:
    """A step changes every parameter of ``model``."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    compiled(X).backward()
    optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    assert not any(torch.equal(old, new.detach()) for old, new in pairs)


BUFFERS = Precision(buffers="float64")


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardgraph.module.parameter_memory.host_memory", lambda: 0)


def fails_to_lower(error: type[ShardGraphError]) -> Callable[[pytest.MonkeyPatch], None]:
    def fail(*_: object) -> None:
        raise error("from a pass")

    return lambda monkeypatch: monkeypatch.setattr("shardgraph.module.remembered.lower", fail)


@pytest.mark.parametrize(
    ("error", "options", "before"),
    [
        pytest.param(CaptureError, {"branch": True}, None, id="capture"),
        pytest.param(PlanError, {"plan": "fspd"}, None, id="plan"),
        pytest.param(PlanError, {"memory": 64}, None, id="nothing fits"),
        pytest.param(ClusterError, {"cluster": "H1000"}, None, id="cluster"),
        pytest.param(ShardGraphError, {"memory": "plenty"}, None, id="size"),
        pytest.param(OffloadError, {"offload": "parameters"}, no_room, id="no room in host memory"),
        pytest.param(
            OffloadError,
            {"offload": shardgraph.Offload(parameters=True, disk="/no/such/folder")},
            None,
            id="no folder",
        ),
        *(
            pytest.param(each, {}, fails_to_lower(each), id=each.__name__)
            for each in (GraphInvariantError, DeadlockError, RandomStateError, PassOrderError)
        ),
    ],
)
def test_an_error_leaves_the_model_as_it_was(error, options, before, monkeypatch):
    options = {"plan": "single"} | options
    model = Net(options.pop("branch", False))
    if before is not None:
        before(monkeypatch)
    with left_as_it_was(model):
        with pytest.raises(error):
            shardgraph.compile(model, example_inputs=(X,), precision=BUFFERS, **options)
        monkeypatch.undo()


def test_an_initialisation_that_leaves_something_out_changes_nothing():
    with torch.device("meta"):
        model = Uninitialised()
    with left_as_it_was(model), pytest.raises(InitializationError, match="writes nothing to 'scale'"):
        shardgraph.compile(model, "single", example_inputs=(X,))
    model.scale, model.shift = nn.Parameter(torch.ones(4)), torch.ones(4)
    trains(shardgraph.compile(model, "single"), model)


def test_an_initialisation_that_fails_half_way_changes_nothing():
    class Failing(Uninitialised):
        def init_weights(self) -> None:
            self.shift = torch.zeros(4)
            self.scale = nn.Parameter(torch.zeros(4))
            raise ValueError("no such file")

    with torch.device("meta"):
        model = Failing()
    with left_as_it_was(model), pytest.raises(ValueError, match="no such file"):
        shardgraph.compile(model, "single")


def test_the_memory_running_out_for_one_parameter_leaves_all_as_they_were(monkeypatch):
    from shardgraph.module.parameter_memory import ParameterMemory

    filled = ParameterMemory.filled

    def run_out(self: ParameterMemory, fqn: str, part: torch.Tensor) -> torch.Tensor:
        if fqn == "second.bias":
            raise torch.OutOfMemoryError("out of memory")
        return filled(self, fqn, part)

    monkeypatch.setattr(ParameterMemory, "filled", run_out)
    model = Net()
    with left_as_it_was(model), pytest.raises(torch.OutOfMemoryError):
        shardgraph.compile(model, "single", precision=BUFFERS)


def test_the_same_model_compiles_after_an_error(monkeypatch):
    model = Net()
    with pytest.raises(PlanError):
        shardgraph.compile(model, "single", memory=64, example_inputs=(X,))
    trains(shardgraph.compile(model, "single", example_inputs=(X,)), model)


def test_nothing_holds_the_whole_parameters_after_a_compilation():
    model = Net()
    whole = [weakref.ref(parameter) for parameter in model.parameters()]
    sharded = shardgraph.compile(model, "single", example_inputs=(X,))
    gc.collect()
    assert sharded.plan.name == "single" and not any(ref() is not None for ref in whole)


def test_a_model_whose_initialisation_ties_parameters_is_compiled_as_they_are_then():
    class Tying(Net):
        def init_weights(self) -> None:
            for layer in (self.first, self.second, self.norm):
                layer.reset_parameters()
            self.second.weight = self.first.weight

    with torch.device("meta"):
        model = Tying()
        model.second.weight = nn.Parameter(torch.ones(4, 4))
    sharded = shardgraph.compile(model, "single", example_inputs=(X,))
    assert model.second.weight is model.first.weight
    assert "second.weight" not in sharded.program.parameters
    trains(sharded, model)


# -- several ranks -----------------------------------------------------------------------------------------------------


def failing_on_two_ranks() -> list[str]:
    """What each rank sees where weights differ, and where rank 1 fails when rank 0 has all its shards."""
    seen = []
    torch.manual_seed(dist.get_rank())
    model = Net()
    with left_as_it_was(model):
        seen.append(failure(model, "fsdp"))

    torch.manual_seed(0)
    model = Net()
    if dist.get_rank() == 1:  # no shard of its own by then: all others of rank 0 are there
        fail_at("second.bias")
    with left_as_it_was(model):
        seen.append(failure(model, "fsdp"))
    return seen


def failure(model: nn.Module, plan: str) -> str:
    try:
        shardgraph.compile(model, plan, example_inputs=(X,), precision=BUFFERS, timeout=20)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "compiled"


def fail_at(name: str) -> None:
    from shardgraph.module.parameter_memory import ParameterMemory

    filled = ParameterMemory.filled

    def run_out(self: ParameterMemory, fqn: str, part: torch.Tensor) -> torch.Tensor:
        if fqn == name:
            raise torch.OutOfMemoryError("out of memory")
        return filled(self, fqn, part)

    ParameterMemory.filled = run_out  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def two_ranks() -> list[list[str]]:
    return shardgraph.launch(failing_on_two_ranks, 2, timeout=100)


def test_ranks_with_other_weights_keep_their_models(two_ranks):
    for seen in two_ranks:
        assert seen[0].startswith(f"{RankMismatchError.__name__}: the ranks differ in the model and the plan")


def test_a_failure_of_another_rank_leaves_the_model_as_it_was(two_ranks):
    assert two_ranks[1][1] == "OutOfMemoryError: out of memory"
    assert two_ranks[0][1].startswith("RankMismatchError: rank 1 failed at the sharded parameters: OutOfMemoryError")
