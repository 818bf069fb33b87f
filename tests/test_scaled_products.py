"""Products of float8 values: FP8 training, against the same in plain torch."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Plan, PlanError, Precision, precision
from shardgraph.ir import ALL_GATHER, ALL_REDUCE, collectives
from shardgraph.ir.attributes import MEMORY_KIND, SUBJECT
from shardgraph.passes.analysis.rows import node_wire_bytes
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import resolve_plan
from tests.scaled import SCALED, Net, against_plain_torch, emulated
from tests.standing import on_ranks

pytestmark = pytest.mark.usefixtures("shared_captures")

aten = torch.ops.aten
IDS = torch.arange(32).view(4, 8)


def built(plan: str = "fsdp", given: str | Precision | None = "fp8", net: nn.Module | None = None) -> Program:
    net = net or Net()
    mesh = (("dp", 2), ("tp", 2)) if "+" in plan else (("tp", 2),) if plan == "tp" else (("dp", 2),)
    return build_program(net, annotated(resolve_plan(plan, mesh, precision=given), net), (IDS,))


def scaled(program: Program) -> list[torch.fx.Node]:
    nodes = [*program.forward.graph.nodes, *program.backward.graph.nodes]
    return [node for node in nodes if node.target is aten._scaled_mm.default]


# -- that it trains as the same in plain torch does -------------------------------------------------


@pytest.mark.quick("ddp-mesh0", "zero2-mesh2")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [("ddp", {"dp": 2}), ("fsdp", {"dp": 2}), ("zero2", {"dp": 2}), ("tp", {"tp": 2}), ("fsdp+tp", {"dp": 2, "tp": 2})],
)
def test_training_equals_the_same_products_in_plain_torch(plan, mesh):
    ranks = 4 if "+" in plan else 2
    for worst in on_ranks(against_plain_torch, ranks, args=(plan, mesh)):
        assert worst["loss"] < 1e-5 and worst["gradients"] < 1e-4 and worst["weights"] < 1e-5, worst


@pytest.mark.quick("hsdp-None")
@pytest.mark.parametrize(
    ("plan", "mesh"), [("fsdp", {"dp": 3}), ("hsdp", None), ("fsdp+tp+sp", {"dp": 2, "tp": 2}), ("cp", {"cp": 2})]
)
def test_verify_compares_with_the_original_in_the_same_products(plan, mesh):
    ids = torch.arange(96).view(12, 8) % 48
    ranks = None if mesh else 4
    report = shardgraph.verify(Net(), (ids,), plan, mesh=mesh, world_size=ranks, precision=SCALED, steps=2)
    assert report.ok, report


# -- what is in the graph --------------------------------------------------------------------------


def test_a_product_and_the_two_of_its_derivative_are_of_scaled_values():
    products = scaled(built("ddp"))
    formats = Counter(tuple(operand.meta["val"].dtype for operand in node.args[:2]) for node in products)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert formats == {(e4m3, e4m3): 3, (e5m2, e4m3): 6}
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


def test_gathers_send_bytes_and_a_reduction_of_the_largest_magnitude():
    def gathered(given: str | None) -> int:
        program = built(given=given)
        nodes = [*collectives(program.forward), *collectives(program.backward)]
        weights = [n for n in nodes if MEMORY_KIND.get(n) == "gathered" and "gate.weight" in SUBJECT.get(n, "")]
        return sum(node_wire_bytes(node, program.plan.mesh) for node in weights)

    program = built()
    largest = [n for n in collectives(program.forward) if n.target is ALL_REDUCE]
    assert len(largest) == 3 and all(n.args[1] == "max" and n.args[0].meta["val"].numel() == 1 for n in largest)
    assert not [n for n in collectives(program.backward) if n.target is ALL_REDUCE]
    sent = 3 * 32 * 64 // 2  # of the bytes of up, gate and down half are another rank's, in forward and in backward
    (bucket,) = (n for n in collectives(program.forward) if n.target is ALL_GATHER and "gate" in SUBJECT.of(n))
    assert bucket.args[0].meta["val"].dtype == torch.uint8 and gathered("fp8") == 2 * sent
    plan = resolve_plan("fsdp", (("dp", 2),))
    assert node_wire_bytes(bucket, plan.mesh) == sent


def test_what_is_left_as_it_is_is_told():
    net = Net()
    shardgraph.annotate(net, {"gate": precision("bf16")})
    program = built("ddp", net=net)
    assert len(scaled(program)) == 6
    (note,) = program.notes
    assert "gate.weight (its precision is annotated)" in note
    assert "head.weight (its sizes 32 x 32 x 8 are not all multiples of 16)" in note


def test_a_batch_whose_rows_are_no_multiple_of_sixteen_is_multiplied_as_it_is():
    plan = resolve_plan("ddp", (("dp", 2),), precision="fp8")
    program = build_program(Net(), plan, (IDS[:1],))
    assert not scaled(program) and "its sizes 8 x 32 x 64" in program.notes[0]


def test_a_parameter_that_is_used_in_another_way_too_is_gathered_as_it_is():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    program = built(net=Tied())
    (gather,) = (n for n in collectives(program.forward) if n.target is ALL_GATHER)
    assert gather.args[0].meta["val"].dtype == torch.bfloat16 and len(scaled(program)) == 3
    assert shardgraph.verify(Tied(), (IDS,), "fsdp", world_size=2, precision=SCALED, steps=2).ok


def test_no_rank_multiplies_parts_that_kernels_cannot():
    net = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32))  # half of 16 is too narrow
    program = build_program(net, resolve_plan("tp", (("tp", 2),), precision="fp8"), (torch.zeros(32, 32),))
    sizes = {size for node in scaled(program) for operand in node.args[:2] for size in operand.meta["val"].shape}
    assert scaled(program) and not [size for size in sizes if size % 16]


def test_without_gradients_forward_is_scaled_alone():
    original = Net()
    sharded = shardgraph.compile(copy.deepcopy(original), "single", precision=SCALED)
    with torch.no_grad():
        torch.testing.assert_close(sharded(IDS), emulated(original)(IDS))


# -- what it costs ---------------------------------------------------------------------------------


def test_an_analysis_prices_products_at_the_rate_of_8_bits():
    net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False))

    def analysed(given: str):
        with torch.device("meta"):
            x = torch.empty(4096, 4096)
        return shardgraph.analyze(net, (x,), "fsdp", mesh={"dp": 8}, cluster="H100", precision=given)

    half, eight = analysed("bf16"), analysed("fp8")
    assert {row.dtype for row in eight.rows if row.flops} == {"float8_e4m3fn", "float8_e5m2"}
    assert eight.flops == half.flops

    products = [sum(row.seconds for row in analysis.rows if row.flops) for analysis in (eight, half)]
    assert products[0] < 0.6 * products[1]


# -- where it cannot be ----------------------------------------------------------------------------


def test_a_described_device_without_float8_is_told_with_what_it_has():
    with pytest.raises(PlanError, match=r"computes in float8, which device 'A100'.* cannot: it can in .*'bf16'"):
        shardgraph.analyze(Net(), (IDS,), "fsdp", mesh={"dp": 2}, cluster="A100", precision="fp8")


def test_a_present_device_without_float8_is_told_with_what_it_has(monkeypatch):
    monkeypatch.setattr("shardgraph.plans.dtype_support._multiplies_scaled", lambda device: False)
    with pytest.raises(PlanError, match=r"computes in float8, which this cpu cannot: it can in bfloat16"):
        shardgraph.compile(Net(), "single", precision="fp8")


def test_a_pipeline_is_refused():
    with pytest.raises(PlanError, match=r"products of float8 values.* scale of a microbatch"):
        shardgraph.verify(Net(), (IDS,), "pp", mesh={"pp": 2}, precision="fp8")


# -- as data ---------------------------------------------------------------------------------------


def test_a_plan_with_scaled_products_round_trips_and_prints_them():
    plan = resolve_plan("fsdp", (("dp", 2),), precision="fp8")
    assert plan.precision == Precision("bfloat16", reduce="float32", products="float8")
    assert Plan.from_yaml(plan.to_yaml()) == plan and "products float8" in str(plan)


def test_other_products_are_refused():
    with pytest.raises(PlanError, match=r"precision\.products is 'int8'.*'float8'"):
        Precision(products="int8")
