"""Values of nodes are those that their operations give: computed when nodes are made, and checked between passes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from shardgraph import GraphInvariantError, ir, preset
from shardgraph.capture.capture import capture
from shardgraph.ir.attributes import VALUE
from shardgraph.ir.fake_values import Propagation
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.builder import Builder
from shardgraph.plans.shards import named_shapes

aten = torch.ops.aten
MESH = (("dp", 4),)


@pytest.fixture
def turned():
    """A builder, and an input of shape [10, 8] whose columns lie in order."""
    mode = FakeTensorMode()
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        VALUE.set(x, torch.empty(8, 10).t())
    return Builder(graph, Propagation(mode, MESH)), x


def layout(node):
    return tuple(node.meta["val"].shape), node.meta["val"].stride()


def test_a_new_node_has_the_strides_that_its_operation_gives(turned):
    build, x = turned
    assert layout(build.call(aten.neg.default, x)) == ((10, 8), (1, 10))


@pytest.mark.parametrize(
    ("collective", "shape"),
    [("all_gather", (40, 8)), ("all_reduce", (10, 8)), ("reduce_scatter", (2, 8))],
)
def test_a_collective_fills_a_tensor_whose_elements_lie_in_order(turned, collective, shape):
    build, x = turned
    assert layout(getattr(build, collective)(x, "dp")) == (shape, (8, 1))


def test_what_a_rank_cuts_has_the_shape_of_the_longest_part(turned):
    build, x = turned
    assert layout(build.call(ir.local_chunk, x, 10, "dp")) == ((3, 8), (1, 10))
    assert layout(build.call(ir.local_part, x, 1, 1, "dp")) == ((10, 2), (2, 1))


def test_a_copy_to_the_host_is_there(turned):
    build, x = turned
    assert build.to_host(x).meta["val"].device == torch.device("cpu")


@dataclass(frozen=True)
class _WritesAWrongStride(Pass):
    name = "writes-a-wrong-stride"

    def run(self, gm, context):
        node = next(node for node in gm.graph.nodes if node.target is aten.tanh.default)
        shape = tuple(node.meta["val"].shape)
        with context.fake_mode:
            node.meta["val"] = torch.empty(shape[::-1]).t()


def test_a_pass_that_writes_a_wrong_stride_is_named():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    joint = capture(model, (torch.randn(3, 4),), {}, device=torch.device("cpu"))
    context = Context.of(preset("single", {}), named_shapes(model), joint.fake_mode)
    wrong = r"'writes-a-wrong-stride' left a wrong value: %tanh .* strides \[1, 3\], and .* strides \[6, 1\]"
    with pytest.raises(GraphInvariantError, match=wrong):
        run_passes(joint.module, (_WritesAWrongStride(),), context)


# -- what passes share --------------------------------------------------------------------------------


def test_a_copied_context_has_findings_of_its_own():
    plan = preset("fsdp", {"dp": 2})
    context = Context.of(plan, {"weight": torch.Size([4])}, None, {"weight": torch.float32})
    other = context.copy(preset("ddp", {"dp": 2}))
    other.notes.append("a note")
    other.facts.add("split")
    other.shapes["weight"] = torch.Size([2])
    assert (context.notes, context.facts, context.shapes["weight"]) == ([], set(), torch.Size([4]))
    assert (context.plan.name, other.plan.name) == ("fsdp", "ddp")


def test_what_passes_do_not_change_cannot_be_changed():
    context = Context.of(preset("ddp", {"dp": 2}), {}, None, {"weight": torch.float32})
    with pytest.raises(TypeError):
        context.stored["weight"] = torch.float64


def test_graphs_of_one_context_share_notes_and_have_facts_of_their_own():
    context = Context.of(preset("ddp", {"dp": 2}), {}, None)
    other = context.of_graph("split")
    other.notes.append("a note")
    assert (context.notes, context.facts) == (["a note"], set())
