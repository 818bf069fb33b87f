"""The executor: what it waits for, whose failures are whose, what a switch of programs costs, and what a step reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import shardgraph
from shardgraph import Offload, preset
from shardgraph.capture.capture import capture
from shardgraph.errors import CollectiveError, RankFailedError, RankMismatchError
from shardgraph.ir import collectives
from shardgraph.passes.lowering import lower
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime import host
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.executor import Bound
from shardgraph.runtime.layout import Layout
from shardgraph.torch_api import boxed
from tests.standing import on_ranks
from tests.zoo import Deep

pytestmark = pytest.mark.timeout(280)


# -- copies ----------------------------------------------------------------------------------------------------


def bound(model: nn.Module, plan: Any, name: str) -> Bound:
    joint = capture(model, (torch.randn(2, 4, 32),), {}, device=torch.device("cpu"))
    program = lower(joint, plan, named_shapes(model))
    return Bound(program.graph(name), None, after=program.forward)


def test_a_graph_without_copies_does_not_wait_for_those_of_others(monkeypatch):
    waits = []
    monkeypatch.setattr(host, "settle", lambda: waits.append(1))
    model = Deep(2)
    sharded = shardgraph.compile(model, "single", example_inputs=(torch.randn(2, 4, 32),))
    sharded(torch.randn(2, 4, 32)).sum().backward()
    assert waits == []


@pytest.mark.parametrize("offload", [Offload(parameters=True), Offload(activations=True)])
def test_the_last_graph_of_a_step_with_copies_waits_for_them(offload):
    plan = replace(preset("single", ()), offload=offload)
    assert not bound(Deep(2), plan, "forward").settles
    assert bound(Deep(2), plan, "backward").settles


# -- failures --------------------------------------------------------------------------------------------------


def failing(error: BaseException) -> str:
    """What is raised when a collective of a bound graph raises ``error``."""

    def fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise error

    program = lower(
        capture(nn.Linear(4, 4), (torch.ones(2, 4),), {}, device=torch.device("cpu")),
        preset("fsdp", {"dp": 2}),
        named_shapes(nn.Linear(4, 4)),
    )
    run = Bound(program.forward, None)
    gather = next(iter(collectives(run.module)))
    target, gather.target = gather.target, fails
    run._call = boxed(run.module)
    gather.target = target
    inputs = [torch.zeros(node.meta["val"].shape) for node in run.module.graph.nodes if node.op == "placeholder"]
    with pytest.raises(CollectiveError) as caught:
        run(inputs)
    return str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321"),
        RuntimeError("Connection reset by peer"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1234, remote process exited or network error"),
    ],
)
def test_a_connection_that_ends_is_another_rank_s_failure(error):
    assert "another rank" in failing(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("input tensor must be the same type as the output tensor."),
        RuntimeError("tensor sizes of dim 0 must be divisible by the group's size"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1234, invalid usage"),
    ],
)
def test_a_call_that_is_wrong_itself_is_not_called_the_failure_of_another_rank(error):
    told = failing(error)
    assert str(error) in told and "this rank's own call" in told and "another rank died" not in told


# -- switching -------------------------------------------------------------------------------------------------


class Rounds:
    """Counts the agreements that ranks make."""

    def __init__(self, agreement: Agreement) -> None:
        self.made, self._agree = 0, agreement.agree
        agreement.agree = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.made += 1
        self._agree(*args, **kwargs)

    def of(self, call: Callable[[], Any]) -> int:
        before = self.made
        call()
        return self.made - before


def rounds_of_switches() -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    sharded = shardgraph.compile(model, "fsdp", timeout=20)
    rounds = Rounds(sharded._setup.agreement)

    def step(rows: int = 2) -> None:
        sharded(torch.ones(rows, 4)).sum().backward()

    def without_gradients() -> None:
        with torch.no_grad():
            sharded(torch.ones(2, 4))

    def all_four() -> int:
        before = rounds.made
        for training in (True, False):
            sharded.train(training)
            step(2)
            step(3)
        return rounds.made - before

    return {
        "compiled": all_four(),
        "again": all_four(),
        "forward alone, compiled": rounds.of(without_gradients),
        "back to training": rounds.of(step),
        "forward alone": rounds.of(without_gradients),
    }


@pytest.mark.slow
def test_programs_that_send_the_same_switch_without_a_round_and_others_are_agreed_on():
    for rounds in on_ranks(rounds_of_switches):
        # What the first sends is agreed on, then the order in which it does. The other three send the same, and each
        # rank compiles them by itself. Forward alone lacks the reductions of backward: a switch to it, and back, is
        # agreed on.
        assert rounds == {
            "compiled": 2,
            "again": 0,
            "forward alone, compiled": 2,
            "back to training": 1,
            "forward alone": 1,
        }


def alone_to_what_sends_something_else() -> str:
    """One rank alone goes back to a program that sends other shapes than the one that all agreed on last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    mesh = {"tp": dist.get_world_size()}
    sharded = shardgraph.compile(model, "tp", mesh=mesh, example_inputs=(torch.ones(2, 4),), timeout=60)
    for rows in (2, 3):
        sharded(torch.ones(rows, 4)).sum().backward()
    if dist.get_rank():
        return "waited for nobody"
    sharded._setup.agreement._timeout = 2
    try:
        sharded(torch.ones(2, 4))
    except (RankMismatchError, RankFailedError) as error:
        return str(error)
    return "went on alone"


def test_one_rank_that_switches_alone_to_what_sends_something_else_is_told_so_and_does_not_hang():
    told, _ = shardgraph.launch(alone_to_what_sends_something_else, 2, timeout=90)
    assert "rank 1 has ended: its function returned" in told


# -- what a call reads -----------------------------------------------------------------------------------------


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def changes() -> dict[str, Callable[[Read], None]]:
    def replaced(model: Read) -> None:
        model.first = nn.Linear(2, 2)

    def own(model: Read) -> None:
        model.first.weight = nn.Parameter(torch.ones(2, 2))

    def added(model: Read) -> None:
        model.third = nn.Linear(2, 2)

    def removed(model: Read) -> None:
        del model.second

    def frozen(model: Read) -> None:
        model.second.requires_grad_(False)

    def evaluated(model: Read) -> None:
        model.second.eval()

    return {change.__name__: change for change in (replaced, own, added, removed, frozen, evaluated)}


@pytest.mark.parametrize("change", changes())
def test_what_is_remembered_of_a_model_follows_its_changes(change):
    model = Read()
    layout = Layout(model)
    assert layout.parameter("first.weight") is model.first.weight
    changes()[change](model)
    layout.refresh()
    assert layout.modes == tuple(module.training for module in model.modules())
    assert layout.trained == tuple(parameter.requires_grad for parameter in model.parameters())
    assert all(layout.parameter(name) is parameter for name, parameter in model.named_parameters())


def test_a_step_walks_no_graph_and_finds_no_parameter_by_its_path(monkeypatch):
    model = Read()
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "single", example_inputs=(torch.ones(3, 2),))
    sharded(torch.ones(3, 2)).sum().backward()
    sharded.zero_grad()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("this was known when the graph was bound")

    monkeypatch.setattr(fx.Graph, "nodes", property(refuse))
    monkeypatch.setattr(nn.Module, "get_submodule", refuse)
    monkeypatch.setattr(nn.Module, "named_modules", refuse)
    sharded(torch.ones(3, 2)).sum().backward()
    monkeypatch.undo()
    original(torch.ones(3, 2)).sum().backward()
    for mine, theirs in zip(sharded.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
