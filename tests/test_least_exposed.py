"""The bound of exposed communication, and the bytes that programs put on the wire beside the algorithm's minimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from shardgraph import ir, preset
from shardgraph.cost_models.timeline import COMPUTE
from shardgraph.passes.analysis.rows import node_wire_bytes
from shardgraph.passes.lowering import build_program
from shardgraph.report.analysis import analyze_program
from shardgraph.report.bound import Job, least_exposed, least_seconds, one_machine
from tests.machines import toy_cluster

MESH = {"dp": 4}


def model() -> nn.Sequential:
    """Rows that divide by four."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def build(plan: str, **fields):
    return build_program(model(), replace(preset(plan, MESH), **fields), (torch.zeros(64, 64),))


def test_one_machine_takes_what_has_the_longest_tail():
    assert one_machine([Job(0.0, 2.0, 1.0), Job(0.0, 1.0, 5.0)]) == 6.0


def test_one_machine_waits_for_what_comes_late():
    assert one_machine([Job(3.0, 2.0, 1.0), Job(0.0, 1.0, 0.0)]) == 6.0


def beside() -> tuple[fx.GraphModule, tuple[fx.Node, fx.Node, fx.Node], dict[fx.Node, str]]:
    """A gather, an operation that does not depend on it and one that does, and the machine of each."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    start, other = graph.call_function(ir.ALL_GATHER, (x, 2, "dp")), graph.call_function(torch.neg, (x,))
    last = graph.call_function(torch.add, (graph.call_function(ir.WAIT, (start,)), other))
    graph.output(last)
    gm = fx.GraphModule({}, graph)
    return gm, (start, other, last), {start: "link", other: COMPUTE, last: COMPUTE}


def test_what_does_not_depend_on_a_collective_hides_it_in_any_order():
    gm, (start, other, last), machines = beside()
    assert least_seconds(gm, {start: 2.0, other: 1.5, last: 1.0}, machines) == 3.0
    assert least_seconds(gm, {start: 1.0, other: 1.5, last: 1.0}, machines) == 2.5


def test_what_slows_the_computation_is_work_of_its_machine():
    gm, (start, other, last), machines = beside()
    seconds = {start: 1.0, other: 2.0, last: 1.0}
    assert least_seconds(gm, seconds, machines) == 3.0
    assert least_seconds(gm, seconds, machines, {start: 0.5}) == 3.5


def test_all_computation_between_two_collectives_comes_after_the_first():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(ir.ALL_GATHER, (x, 2, "tp"))
    gathered = graph.call_function(ir.WAIT, (first,))
    branches = [graph.call_function(torch.neg, (gathered,)) for _ in range(3)]
    last = graph.call_function(ir.ALL_GATHER, (graph.call_function(torch.cat, (branches,)), 2, "tp"))
    graph.output(graph.call_function(ir.WAIT, (last,)))
    machines = {first: "link", last: "link", **dict.fromkeys(branches, COMPUTE)}
    seconds = {first: 1.0, last: 1.0, **dict.fromkeys(branches, 2.0)}
    assert least_seconds(fx.GraphModule({}, graph), seconds, machines) == 1.0 + 3 * 2.0 + 1.0


@pytest.mark.quick("0.6-*", "1.0-1-fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "zero2", "ddp"])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("overlap", [1.0, 0.6, 0.0])
def test_no_schedule_exposes_less_than_the_bound(plan, prefetch, overlap):
    program, cluster = build(plan, prefetch=prefetch), toy_cluster(overlap=overlap)
    assert analyze_program(program, cluster).time.exposed >= least_exposed(program, cluster) * (1 - 1e-9) > 0


@pytest.mark.parametrize(
    ("plan", "mesh"), [("hsdp", {"dp_replicate": 2, "dp_shard": 2}), ("tp", {"tp": 4}), ("tp+sp", {"tp": 4})]
)
@pytest.mark.parametrize("overlap", [1.0, 0.6, 0.0])
def test_no_schedule_over_other_axes_exposes_less_than_the_bound(plan, mesh, overlap):
    program, cluster = build_program(model(), preset(plan, mesh), (torch.zeros(64, 64),)), toy_cluster(overlap=overlap)
    assert analyze_program(program, cluster).time.exposed >= least_exposed(program, cluster) * (1 - 1e-9) > 0


@pytest.mark.parametrize("bucket", [0, 64 * 1024])
@pytest.mark.parametrize(
    ("plan", "gathers", "reduced"), [("ddp", 0, 2), ("zero1", 1, 2), ("zero2", 1, 1), ("fsdp", None, 1)]
)
def test_a_step_sends_the_least_bytes_that_its_plan_needs(plan, gathers, reduced, bucket):
    """In units of three quarters of the parameters: an all-reduce is two, a gather or a reduce-scatter one."""
    program, module = build(plan, bucket=bucket), model()
    sent = sum(
        node_wire_bytes(node, program.plan.mesh) for gm in program.graphs.values() for node in ir.collectives(gm)
    )
    whole = sum(p.nbytes for p in module.parameters()) * 3 // 4
    if gathers is None:  # again in backward, but for biases and the first weight, which it does not multiply by
        needed = sum(layer[0].weight.nbytes for layer in list(module)[1:]) * 3 // 4
        assert sent == whole + needed + whole
    else:
        assert sent == (gathers + reduced) * whole


def test_rows_that_do_not_divide_are_sent_with_their_padding():
    program = build_program(nn.Linear(8, 7, bias=False), preset("fsdp", MESH), (torch.zeros(2, 8),))
    sent = [node_wire_bytes(n, program.plan.mesh) for gm in program.graphs.values() for n in ir.collectives(gm)]
    assert sent == [8 * 8 * 4 * 3 // 4] * 2  # eight rows in place of seven; no input needs a gradient


@pytest.mark.parametrize("plan", ["fsdp", "zero2"])
def test_nothing_is_copied_after_a_gather_of_one_parameter_whose_rows_divide(plan):
    for gm in build(plan, bucket=0).graphs.values():
        for start in ir.collectives(gm):
            if start.target is ir.ALL_GATHER:
                (wait,) = start.users
                assert not {user.target for user in wait.users} & {
                    torch.ops.aten.clone.default,
                    ir.buckets.unpack_parts,
                }
