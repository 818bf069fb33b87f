"""plan="auto" merges small collectives where their latency costs more than copies, and no others."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Cluster, Plan, preset
from shardgraph.capture.capture import capture
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.device import Link
from shardgraph.passes.lowering import lower
from shardgraph.plans.shards import named_shapes
from shardgraph.report.analysis import analyze_program
from shardgraph.search.buckets import bucket_bytes
from tests.machines import GIB, toy_cluster

NODE = Cluster.of("A100", devices_per_node=4)


def small() -> nn.Module:
    """Many parameters of few bytes."""
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(6)))


def chosen(model: nn.Module, width: int, cluster: Cluster, budget: int = GIB) -> Plan:
    options = {"mesh": {"dp": 4}, "cluster": cluster, "memory": budget, "recompute": "none"}
    plan = shardgraph.analyze(model, (torch.randn(4, width),), "auto", **options).plan
    return next(each.plan for each in plan.considered if each.name == "fsdp")


@functools.cache
def times(bucket: int) -> tuple[float, int]:
    model = small()
    joint = capture(model, (torch.randn(4, 8),), {}, device=torch.device("cpu"))
    plan = replace(preset("fsdp", {"dp": 4}), bucket=bucket)
    analysis = analyze_program(lower(joint, plan, named_shapes(model)), NODE)
    return analysis.time.total, analysis.peak_memory


@pytest.mark.slow
def test_small_parameters_go_in_buckets():
    plan = chosen(small(), 8, NODE)
    assert plan.bucket and times(plan.bucket)[0] < times(0)[0]


def test_parameters_larger_than_a_bucket_s_part_do_not():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    cluster = toy_cluster(1, devices_per_node=4)  # with little latency
    size = bucket_bytes(preset("fsdp", {"dp": 4}), cluster)
    assert all(parameter.nbytes * 8 > size for parameter in model.parameters())
    assert chosen(model, 512, cluster).bucket == 0


def test_a_plan_that_fits_only_with_buckets_or_only_without_is_so():
    nbytes = sum(parameter.nbytes for parameter in small().parameters())
    size = bucket_bytes(preset("fsdp", {"dp": 4}), NODE, nbytes)
    assert size > nbytes, "one for all"
    least = min((0, size), key=lambda bucket: times(bucket)[1])
    assert times(0)[1] != times(size)[1]
    assert chosen(small(), 8, NODE, times(least)[1]).bucket == least


@pytest.mark.parametrize("name", ["A100", "H100"])
def test_latency_is_a_tenth_of_the_time_of_a_bucket(name):
    cluster, plan = Cluster.of(name), preset("fsdp", {"dp": 8})
    group = cluster.group_of(plan.mesh, "dp")

    def part(nbytes: int) -> float:
        empty, full = (
            collective_seconds("all_gather_into_tensor", each // 8, each, group, cluster.efficiency)
            for each in (0, nbytes)
        )
        return empty / full

    size = bucket_bytes(plan, cluster)
    assert part(size) <= 0.1 < part(size // 2)


def test_of_a_small_model_something_is_left_to_be_hidden():
    plan = preset("zero2", {"dp": 4})
    filling, half = bucket_bytes(plan, NODE), bucket_bytes(plan, NODE, 2 * bucket_bytes(plan, NODE))
    assert half < filling == bucket_bytes(plan, NODE, 1000 * filling)


def test_where_communication_slows_computation_less_is_left_to_be_hidden():
    """A collective that lengthens the computation that it overlaps with is hidden for nothing, and has its latency."""
    plan = preset("zero2", {"dp": 4})
    total = bucket_bytes(plan, NODE)
    sizes = [bucket_bytes(plan, replace(NODE, overlap=overlap), total) for overlap in (1.0, 0.5, 0.1, 0.0)]
    assert sizes[0] == sizes[1] < sizes[2] <= sizes[3] <= bucket_bytes(plan, NODE)


@pytest.mark.quick("1024-4-64-0.5")
@pytest.mark.parametrize(("width", "layers", "rows", "overlap"), [(512, 8, 4, 1.0), (1024, 4, 64, 0.5)])
def test_neither_half_nor_twice_the_buckets_is_faster(width, layers, rows, overlap):
    model, args = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), (torch.zeros(rows, width),)
    cluster = replace(NODE, overlap=overlap)
    options = {"plan": "auto", "mesh": {"dp": 4}, "cluster": cluster, "recompute": "none"}
    plan = shardgraph.analyze(model, args, **options).plan

    def seconds(bucket: int) -> float:
        return shardgraph.analyze(model, args, replace(plan, bucket=bucket), cluster=cluster).time.total

    assert plan.bucket
    assert seconds(plan.bucket) <= min(seconds(2 * plan.bucket), seconds(plan.bucket // 2), seconds(0))


def test_no_bucket_on_a_cpu_is_a_buffer_that_the_system_gives_anew_each_time():
    """Its latency asks for larger ones, but from 32 MiB on a buffer is new pages, which takes ten times as long."""
    slow = Link(bandwidth=1e9, latency=1.0)
    cpu, other = (replace(NODE, device=replace(NODE.device, name=name), intra=slow) for name in ("cpu", "other"))
    assert bucket_bytes(preset("ddp", {"dp": 4}), other) > 2**25
    assert bucket_bytes(preset("ddp", {"dp": 4}), cpu) == 2**24
    model, args = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12))), (torch.zeros(4, 1024),)
    options = {"mesh": {"dp": 4}, "recompute": "none"}
    sizes = [shardgraph.analyze(model, args, "auto", cluster=each, **options).plan.bucket for each in (cpu, other)]
    assert sizes[0] <= 2**24 < sizes[1]


def test_one_rank_has_no_buckets():
    assert bucket_bytes(preset("fsdp", {"dp": 1}), NODE) == 0


def test_ranks_that_divide_operators_alone_have_buckets_for_what_they_do_not_divide():
    assert bucket_bytes(preset("tp", {"tp": 4}), NODE) > 0


@pytest.mark.slow
def test_auto_chooses_them():
    analysis = shardgraph.analyze(small(), (torch.randn(4, 8),), "auto", mesh={"dp": 4}, cluster=NODE)
    assert analysis.plan.bucket
