"""Attributes of nodes: what each is, and what becomes of it when nodes are copied, divided, chunked and added up."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardgraph
from shardgraph import GraphInvariantError, Pipeline, ir, preset
from shardgraph.capture.capture import capture
from shardgraph.ir.attributes import RECOMPUTE, REGISTRY, ROLE, SOURCE, SUBJECT, VALUE, Change, Part, carried
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.lowering import build_program, lower
from shardgraph.passes.sharding.shard_operators import ShardOperators
from shardgraph.plans.plan import Offload
from shardgraph.plans.shards import named_shapes

EVERYWHERE = {"PASSED", "REWRITTEN", "DIVIDED", "CHUNKED"}
KEPT = {  # besides by copies, which keep everything
    "role": set(),
    "roles": set(),
    "source": EVERYWHERE | {"MERGED"},
    "subject": EVERYWHERE,
    "made_by": {"REWRITTEN", "DIVIDED"},
    "equals": {"PASSED"},
    "part_of": {"PASSED"},
    "shard_of": {"PASSED"},
    "padded": {"PASSED"},
    "padded_shard": {"PASSED"},
    "given_by": set(),
    "mean_of": set(),
    "cast_of": set(),
    "placements": {"PASSED", "REWRITTEN"},
    "row_order": {"PASSED"},
    "recomputed": {"REWRITTEN", "DIVIDED"},
    "offloaded_by": {"REWRITTEN", "DIVIDED", "CHUNKED"},
    "synchronized": {"REWRITTEN", "DIVIDED"},
    "scores": {"REWRITTEN", "DIVIDED"},
    "unscaled": {"REWRITTEN", "DIVIDED"},
    "chunk": {"REWRITTEN", "DIVIDED"},
    "memory_kind": {"REWRITTEN", "DIVIDED", "CHUNKED"},
    "reduces": set(),
    "averages": set(),
    "on_host": set(),
    "on_disk": set(),
    "in_place": set(),
    "axis": set(),
    "val": {"PASSED"},
    "nn_module_stack": EVERYWHERE,
    "fwd_nn_module_stack": EVERYWHERE,
    "seq_nr": {"REWRITTEN", "DIVIDED", "CHUNKED"},
    "stack_trace": EVERYWHERE | {"MERGED"},
    "partitioner_tag": {"REWRITTEN", "DIVIDED", "CHUNKED"},
}
SAMPLES = {
    "roles": [None],
    "part_of": Part("linear", (4, 8), (0, 0, 3)),
    "placements": {},
    "row_order": (4, 2),
    "recomputed": False,
    "offloaded_by": frozenset({"a"}),
    "synchronized": True,
    "averages": ("a", "b"),
    "scores": 7,
    "chunk": 7,
    "on_host": True,
    "on_disk": True,
    "in_place": True,
    "nn_module_stack": {"a": ("head", nn.Linear)},
    "fwd_nn_module_stack": {"a": ("head", nn.Linear)},
    "seq_nr": 7,
}


def stamped(node: fx.Node) -> fx.Node:
    """A node with every attribute, its value as it is."""
    for key, attribute in REGISTRY.items():
        if attribute not in (VALUE, ROLE):
            attribute.set(node, SAMPLES.get(key, f"any {key}"))
    return node


def one_node() -> fx.Node:
    graph = fx.Graph()
    return stamped(graph.call_function(torch.ops.aten.neg.default, (1,)))


def test_the_table_of_what_is_kept_has_every_attribute():
    assert KEPT.keys() == REGISTRY.keys()


@pytest.mark.parametrize("key", REGISTRY)
def test_an_attribute_is_kept_by_the_changes_it_says(key):
    assert {change.name for change in REGISTRY[key].kept} == KEPT[key] | {"COPIED"}


@pytest.mark.parametrize("change", Change)
def test_carried_gives_the_attributes_that_a_change_keeps(change):
    given = carried(change, one_node())
    wanted = {key for key in REGISTRY if change.name in KEPT[key] | {"COPIED"}} - {"val", "role"}
    assert {attribute.key for attribute in given} == wanted


def test_a_sum_has_the_attributes_of_its_first_term():
    first, second = one_node(), one_node()
    SOURCE.set(second, "other.py:1")
    assert carried(Change.MERGED, first, second)[SOURCE] == "any source"


def test_what_is_no_attribute_is_refused_and_not_dropped():
    node = one_node()
    node.meta["mine"] = 1
    with pytest.raises(GraphInvariantError, match=r"has meta\['mine'\], which is no attribute"):
        carried(Change.DIVIDED, node)


def test_an_attribute_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"'recomputed' of .* is whether backward recomputes it"):
        RECOMPUTE.set(one_node(), 1)


def test_a_missing_attribute_is_named():
    with pytest.raises(GraphInvariantError, match="has no 'subject', the value that a node made by a pass"):
        SUBJECT.of(fx.Graph().placeholder("x"))


# -- what passes do with them ------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 16), nn.Linear(16, 64, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.trunk(x).tanh()), labels)


def captured(plan):
    model = Classifier()
    call = (torch.randn(8, 8), torch.randint(0, 64, (8,)))
    joint = capture(model, call, {}, device=torch.device("cpu"))
    return joint.module, Context.of(plan, named_shapes(model), joint.fake_mode)


def named(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


def unchanged(before, after):
    """The attributes, but for the value, that two nodes have in common."""
    return {key for key in before.keys() - {"val"} if after.get(key) == before[key]}


def test_a_copied_graph_keeps_every_attribute():
    gm, _ = captured(preset("single", {}))
    stamped(named(gm, "tanh"))
    assert named(ir.copy_graph(gm), "tanh").meta == named(gm, "tanh").meta


def test_a_divided_operation_keeps_what_holds_for_its_parts():
    gm, context = captured(preset("tp", {"tp": 2}))
    before = dict(stamped(named(gm, "tanh")).meta)
    run_passes(gm, (ShardOperators("tp"),), context)
    after = named(gm, "tanh").meta
    assert after["placements"] != before["placements"]  # along the axis, besides
    kept = {key for key in KEPT if "DIVIDED" in KEPT[key]} - {"placements"}
    assert unchanged(before, after) == kept


# -- nothing else is written ------------------------------------------------------------------------


@dataclass(frozen=True)
class _WritesItsOwn(Pass):
    name = "writes-its-own"

    def run(self, gm, context):
        named(gm, "tanh").meta["mine"] = 1


def test_a_pass_that_writes_what_is_no_attribute_is_refused_by_name():
    gm, context = captured(preset("single", {}))
    with pytest.raises(GraphInvariantError, match=r"'writes-its-own' wrote meta\['mine'\] of the node 'tanh'"):
        run_passes(gm, (_WritesItsOwn(),), context)


PLANS = {
    "fsdp": (preset("fsdp", {"dp": 2}), {}),
    "zero1+tp": (preset("zero1+tp", {"dp": 2, "tp": 2}), {}),
    "chunks": (preset("single", {}), {"loss_chunk": 1024}),
    "recomputed": (preset("ddp", {"dp": 2}), {"recompute": "full"}),
    "offloaded": (preset("fsdp", {"dp": 2}), {"offload": Offload(parameters=True, activations=True)}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_nodes_of_a_program_have_attributes_alone(plan):
    chosen, changes = PLANS[plan]
    model, call = Classifier(), (torch.randn(8, 8), torch.randint(0, 64, (8,)))
    program = build_program(model, replace(chosen, **changes), call)
    assert not {key for gm in program.graphs.values() for node in gm.graph.nodes for key in node.meta} - REGISTRY.keys()


def test_the_nodes_of_a_pipeline_have_attributes_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    joint = capture(model, (torch.randn(4, 8),), {}, device=torch.device("cpu"))
    plan = preset("pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(2, stages=["2"]))
    graphs = lower(joint, plan, named_shapes(model)).graphs.values()
    assert not {key for gm in graphs for node in gm.graph.nodes for key in node.meta} - REGISTRY.keys()


def test_no_code_reads_or_writes_meta_by_a_key_of_its_own():
    package = Path(shardgraph.__file__).parent
    sources = {path: path.read_text() for root in (package, package / "passes") for path in root.rglob("*.py")}
    # What the tracer leaves is read there.
    tracers = {"capture.py", "canonical.py", "matrix_checks.py", "shortened_rows.py", "torch_api", "attributes.py"}
    found = [
        f"{path.name}: {match}"
        for path, text in sources.items()
        if not tracers & {path.name, path.parent.name}
        for match in re.findall(r"""\.meta(?:\.\w+\(|\[)["'](?!val["'])\w+["']""", text)
    ]
    assert not found
