"""Graphs that are made from backward when they are needed are proved with it: of ``no_sync``, and of updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.capture.capture import capture
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.presets import preset
from shardgraph.plans.shards import named_shapes
from shardgraph.proof.prove import prove
from tests.zoo import make


def program(name: str, plan: str, mesh: dict[str, int], **changes: Any) -> Program:
    model, (args, kwargs) = make(name, 4)
    joint = capture(model, args, kwargs, device=torch.device("cpu"))
    return lower(joint, replace(preset(plan, mesh), **changes), named_shapes(model))


@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        ("odd-mlp", "ddp", {"dp": 2}),
        ("odd-mlp", "fsdp", {"dp": 3}),
        ("tied-transformer", "zero2", {"dp": 2}),
        ("tied-transformer", "zero2+tp+sp", {"dp": 2, "tp": 2}),
        ("conv-batch-norm", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_gradients_that_are_kept_added_and_reduced_later_are_proved(name, plan, mesh):
    made = program(name, plan, mesh)
    found, backward = prove(made), prove(made, derived=False)
    assert found.ok, str(found)
    assert found.results == backward.results + 4 * len(made.trained)  # handed over, kept, added, and reduced alone


def test_squared_norms_of_what_is_reduced_at_last_are_proved():
    made = program("tied-transformer", "fsdp", {"dp": 2}, gradient_statistics=True)
    found = prove(made)
    assert found.ok, str(found)


def _total(made: Program) -> fx.Node:
    """The sum of a gradient and the earlier ones."""
    inputs = ir.placeholders(made.graph("accumulate"))
    (total,) = next(node for role, node in inputs.items() if isinstance(role, ir.Accumulated)).users
    return total


def forgets_earlier_ones(made: Program) -> None:
    """The gradients of this batch alone are reduced."""
    total = _total(made)
    total.replace_all_uses_with(total.args[0])


def adds_its_own_twice(made: Program) -> None:
    total = _total(made)
    total.args = (total.args[0], total.args[0])


def reduces_what_it_keeps(made: Program) -> None:
    """The graph of no_sync divides by the number of ranks."""
    gm = made.graph("local")
    role, value = next((r, v) for r, v in ir.outputs(gm) if isinstance(r, ir.Gradient) and isinstance(v, fx.Node))
    with gm.graph.inserting_after(value):
        half = gm.graph.call_function(torch.ops.aten.div.Tensor, (value, 2))
    half.meta.update(value.meta)
    ir.set_outputs(gm, [(r, half if r == role else v) for r, v in ir.outputs(gm)])


def leaves_summands(made: Program) -> None:
    """What was kept is returned as it is."""
    gm = made.graph("reduce")
    given = {role.of: node for role, node in ir.placeholders(gm).items() if isinstance(role, ir.Accumulated)}
    ir.set_outputs(gm, [(role, given[role.of]) for role, _ in ir.outputs(gm)])


def swaps_two_names(made: Program) -> None:
    """The optimizer is given the gradients of two parameters for each other."""
    gm = made.graph("update")
    for node in gm.graph.find_nodes(op="call_function", target=ir.update):
        names = list(node.args[1])
        node.args = (node.args[0], (*names[1:], names[0]), node.args[2])


@pytest.mark.parametrize(
    "fault", [forgets_earlier_ones, adds_its_own_twice, reduces_what_it_keeps, leaves_summands, swaps_two_names]
)
def test_a_derived_graph_with_a_fault_is_not_proved(fault: Callable[[Program], None]):
    made = program("odd-mlp", "ddp", {"dp": 2})
    fault(made)
    assert prove(made, derived=False).ok
    assert not prove(made).ok


def test_a_later_microbatch_that_forgets_the_gradients_of_earlier_ones_is_not_proved(monkeypatch: pytest.MonkeyPatch):
    made = program("tied-transformer", "pp", {"pp": 2}, pipeline=Pipeline(2))
    assert prove(made).ok
    monkeypatch.setattr("shardgraph.proof.prove.adding_to_earlier", ir.copy_graph)
    assert prove(made, derived=False).ok
    assert not prove(made).ok
