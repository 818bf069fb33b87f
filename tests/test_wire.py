"""Bytes on the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.cost_models.collectives import wire_bytes as price
from shardgraph.errors import ShardGraphError
from shardgraph.ir import collectives, group_of
from shardgraph.ir.attributes import SUBJECT
from shardgraph.mesh import group_along, size_along
from shardgraph.passes.analysis.rows import node_wire_bytes, operation_of
from shardgraph.passes.lowering import build_program
from shardgraph.plans.resolve import resolve_plan
from tests.test_analysis import llama, text

pytestmark = pytest.mark.usefixtures("shared_captures")

MESH = (("replica", 2), ("shard", 4))


def program() -> fx.GraphModule:
    """Two gathers and a reduce-scatter of 4 x 64 floats over ``shard``, an all-reduce of 64 over ``replica``."""
    graph = fx.Graph()

    def call(target, args, size):
        start = graph.call_function(target, args)
        start.meta["val"] = torch.empty(size, device="meta")
        return start

    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, device="meta")
    for _ in range(2):
        full = call(ir.WAIT, (call(ir.ALL_GATHER, (x, 4, "shard"), 256),), 256)
    part = call(ir.WAIT, (call(ir.REDUCE_SCATTER, (full, "sum", 4, "shard"), 64),), 64)
    call(ir.WAIT, (call(ir.ALL_REDUCE, (part, "sum", "replica"), 64),), 64)
    graph.output(())
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("operation", "given", "gotten", "sent"),
    [
        ("all_gather_into_tensor", 100, 400, 300),
        ("reduce_scatter_tensor", 400, 100, 300),
        ("all_reduce", 400, 400, 600),
        ("all_to_all_single", 400, 400, 300),
        ("send", 400, 400, 400),
    ],
)
def test_ring_formulas_for_four_ranks(operation: str, given: int, gotten: int, sent: int) -> None:
    assert price(operation, given, gotten, 4) == sent


def test_an_all_reduce_sends_what_its_reduce_scatter_and_all_gather_send() -> None:
    halves = price("reduce_scatter_tensor", 800, 100, 8) + price("all_gather_into_tensor", 100, 800, 8)
    assert price("all_reduce", 800, 800, 8) == halves


def test_one_rank_alone_sends_nothing() -> None:
    assert price("all_reduce", 400, 400, 1) == 0


def test_bytes_that_do_not_divide_are_rounded_up() -> None:
    assert price("all_reduce", 4, 4, 3) == 6  # 5.33


def test_an_operation_without_formula_is_named() -> None:
    with pytest.raises(ShardGraphError, match=r"'all_gather' sends: .* WIRE_RULES.*mean 'all_gather_into_tensor'"):
        price("all_gather", 4, 16, 4)


def test_every_collective_of_the_representation_has_a_formula() -> None:
    for target in ir.COLLECTIVES:
        assert price(target.__name__.split(".")[0].rstrip("_").removesuffix("_out"), 8, 8, 2) > 0


def test_bytes_are_summed_per_operation_and_axis() -> None:
    count: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for node in collectives(program()):
        key = (operation_of(node), group_of(node))
        count[key] += 1
        sent[key] += node_wire_bytes(node, MESH)
    assert {key: (count[key], sent[key]) for key in count} == {
        ("all_gather_into_tensor", "shard"): (2, 2 * 768),
        ("reduce_scatter_tensor", "shard"): (1, 768),
        ("all_reduce", "replica"): (1, 256),
    }


def test_a_group_along_several_axes_has_the_ranks_that_differ_along_them_only():
    mesh = (("a", 2), ("b", 3), ("c", 2))
    assert group_along(mesh, "b", 7) == (7, 9, 11)
    assert group_along(mesh, "a+c", 3) == (2, 3, 8, 9)
    assert size_along(mesh, "a+c") == 4


@pytest.mark.quick("ddp-mesh0")
@pytest.mark.parametrize(("plan", "mesh"), [("ddp", {"a": 2, "b": 2}), ("ddp+tp+sp", {"dp": 2, "tp": 2})])
def test_gradients_that_two_axes_add_up_are_reduced_once_over_both(plan, mesh):
    model = llama(2, hidden_size=256, intermediate_size=512, vocab_size=512)
    alone = replace(resolve_plan(plan, tuple(mesh.items())), bucket=0)
    made = build_program(model, alone, (), text(2, 256))
    norm = "model.layers.1.input_layernorm.weight"
    sent = [node for node in collectives(made.backward) if SUBJECT.get(node) == f"gradient of {norm}"]
    assert [group_of(node) for node in sent] == ["+".join(mesh)]
