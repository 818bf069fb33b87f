"""Proofs of models with many equal layers: derived for a few of them, and no fault of any one layer gets through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from shardgraph import ir
from shardgraph.capture.capture import capture
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.presets import preset
from shardgraph.plans.shards import named_shapes
from shardgraph.proof.prove import prove
from shardgraph.proof.typing import Typing

aten = torch.ops.aten
LAYERS = 12
PLANS = [("fsdp", {"dp": 4}), ("fsdp+tp", {"dp": 2, "tp": 2})]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu()) * 0.5


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@cache
def captured(layers: int) -> tuple[Any, Any]:
    model = Deep(layers)
    return capture(model, (torch.randn(4, 6, 8),), {}, device=torch.device("cpu")), named_shapes(model)


def program(plan: str, mesh: dict[str, int], layers: int = LAYERS) -> Program:
    joint, shapes = captured(layers)
    return lower(joint, replace(preset(plan, mesh), bucket=0), shapes)  # one bucket has parameters of all these layers


def of_layer(gm: fx.GraphModule, number: int, target: Any) -> fx.Node:
    """The node of this target that belongs to a layer: they follow on each other, in backward from the last one."""
    return gm.graph.find_nodes(op="call_function", target=target)[number]


def other_factor(made: Program, number: int) -> None:
    of_layer(made.forward, number, aten.mul.Tensor).update_arg(1, 0.25)


def other_factor_in_backward(made: Program, number: int) -> None:
    of_layer(made.backward, number, aten.mul.Tensor).update_arg(1, 0.25)


def weight_of_another_layer(made: Program, number: int) -> None:
    names = {role: node for role, node in ir.placeholders(made.forward).items() if isinstance(role, ir.Parameter)}
    own, other = (names[ir.Parameter(f"layers.{n}.up.weight")] for n in (number, (number + 1) % LAYERS))
    own.replace_all_uses_with(other)


def value_before_another_layer(made: Program, number: int) -> None:
    sums = made.forward.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    sums[number].update_arg(0, sums[number - 2])


def gradient_of_another_layer(made: Program, number: int) -> None:
    results = dict(ir.outputs(made.backward))
    roles = [ir.Gradient(ir.Parameter(f"layers.{n}.up.weight")) for n in (number, (number + 1) % LAYERS)]
    results[roles[0]], results[roles[1]] = results[roles[1]], results[roles[0]]
    ir.set_outputs(made.backward, list(results.items()))


FAULTS: list[Callable[[Program, int], None]] = [
    other_factor,
    other_factor_in_backward,
    weight_of_another_layer,
    value_before_another_layer,
    gradient_of_another_layer,
]


@pytest.mark.quick("fsdp-mesh0-gradient_of_another_layer-10")
@pytest.mark.parametrize("number", [2, LAYERS - 2])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("plan", "mesh"), PLANS)
def test_a_fault_in_one_layer_of_many_is_found(plan, mesh, fault, number):
    made = program(plan, mesh)
    assert prove(made).ok
    fault(made, number)
    assert not prove(made).ok


@pytest.mark.quick("fsdp+tp-mesh1")
@pytest.mark.parametrize(("plan", "mesh"), PLANS)
def test_more_equal_layers_need_no_more_derivations(monkeypatch, plan, mesh):
    derived: list[fx.Node] = []
    called = Typing._called

    def counted(self: Typing, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is not ir.update:  # of which nothing is derived
            derived.append(node)
        return called(self, node, args, kwargs)

    monkeypatch.setattr(Typing, "_called", counted)
    counts = []
    for layers in (LAYERS, 2 * LAYERS):
        derived.clear()
        assert prove(program(plan, mesh, layers)).ok
        counts.append(len(derived))
    assert counts[0] == counts[1]


def test_a_program_that_mixes_what_two_layers_do_is_proved_without_recalling():
    """The sum of two layers in another order: what goes from the one to the other is no value of the program."""
    made = program("fsdp", {"dp": 4})
    sums = made.forward.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    first, second = sums[5], sums[6]
    with made.forward.graph.inserting_before(second):
        both = made.forward.graph.call_function(aten.add.Tensor, (first.args[1], second.args[1]))
    both.meta["val"] = second.meta["val"]
    second.args = (first.args[0], both)
    assert prove(made).ok
