"""Other conditions: ``shardgraph.what_if`` and the front of memory, time and devices, from ``shardgraph.front``."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import PlanError, ShardGraphError
from shardgraph.plans.adapted import adapted
from shardgraph.plans.batch import Batch
from shardgraph.plans.candidate import Candidate
from shardgraph.report.parts import parts_of
from shardgraph.search.front import Front
from tests.machines import GIB, toy_cluster

pytestmark = pytest.mark.usefixtures("shared_captures")

DDP = shardgraph.preset("ddp", {"dp": 2})
INPUTS = (torch.zeros(4, 6, 8),)


class Net(nn.Module):
    """Few operations, on sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def what_if(plan: shardgraph.Plan = DDP, **conditions) -> shardgraph.api.what_if.WhatIf:
    return shardgraph.what_if(plan, Net(), INPUTS, cluster=toy_cluster(1, 4), **conditions)


# -- this plan, and the best one, under other conditions ---------------------------------------------------------------


def test_longer_sequences_take_more_time_and_memory_under_the_same_plan():
    answer = what_if(sequence=24)
    assert answer.now.samples == answer.same.samples == 8 and answer.fits
    assert answer.same.flops == 4 * answer.now.flops and answer.same.peak_memory > answer.now.peak_memory
    assert answer.best.time.total <= answer.same.time.total
    assert "if sequences had 24:" in str(answer) and "best plan" in str(answer)


def test_the_same_plan_has_more_data_ranks_on_more_devices():
    answer = what_if(devices=4)
    assert answer.same.plan.mesh == (("dp", 4),) and answer.same.samples == answer.now.samples == 8
    assert answer.best.plan.world_size == 4 and answer.best.samples == 8


def test_larger_steps_are_more_calls_of_the_same_size():
    answer = what_if(global_batch=24)
    assert answer.same.plan.batch == Batch(24, 3) and answer.same.samples == 24 == 3 * answer.now.samples
    assert answer.best.plan.batch.samples == 24


def test_a_slower_network_exposes_more():
    answer = what_if(network=0.1)
    now, same = (each.time.exposed for each in (answer.now, answer.same))
    assert same == pytest.approx(10 * now, rel=0.01)


@pytest.mark.slow
def test_what_the_best_plan_has_in_any_case():
    answer = what_if(devices=4, recompute="full")
    assert answer.best.plan.recompute == "full" and answer.same.plan.recompute == "none"
    priced = shardgraph.front(Net(), INPUTS, (2,), cluster=toy_cluster(1, 4), recompute="full").considered
    assert {each.recompute for each in priced} == {"full"}


def test_a_plan_that_cannot_be_says_why():
    answer = what_if(devices=3)
    assert answer.same is None and answer.best is None and answer.difference is None
    assert "8 samples cannot be divided over the 3 data ranks" in str(answer)
    assert "cannot be divided over the data ranks of any layout of 3 devices" in str(answer)


@pytest.mark.parametrize(
    ("conditions", "words"),
    [({}, "needs a condition"), ({"network": 0}, "network is 0"), ({"sequence": "long"}, "sequence is 'long'")],
)
def test_malformed_conditions_are_refused(conditions, words):
    with pytest.raises(PlanError, match=words):
        what_if(**conditions)


@pytest.mark.parametrize(
    ("preset", "mesh", "ranks", "samples", "expected"),
    [
        ("fsdp", {"dp": 4}, 2, 32, ({"dp": 2}, 4, 1)),
        ("hsdp", {"dp_replicate": 2, "dp_shard": 4}, 16, 64, ({"dp_replicate": 4, "dp_shard": 4}, 1, 1)),
        ("fsdp+tp", {"dp": 2, "tp": 2}, 8, 16, ({"dp": 4, "tp": 2}, 1, 1)),
        ("pp+fsdp", {"pp": 2, "dp": 2}, 8, 64, ({"pp": 2, "dp": 4}, 1, 16)),
    ],
)
def test_a_plan_on_other_devices_keeps_its_calls_or_microbatches(preset, mesh, ranks, samples, expected):
    pipeline = shardgraph.Pipeline(4) if preset.startswith("pp") else None
    plan = adapted(shardgraph.preset(preset, mesh, pipeline), ranks, samples, 4)
    assert (dict(plan.whole_mesh), plan.calls, plan.pipeline.parts if plan.pipeline else 1) == expected


def test_a_plan_without_data_ranks_is_for_as_many_ranks():
    with pytest.raises(PlanError, match="no axis of data"):
        adapted(shardgraph.preset("tp", {"tp": 2}), 4, 8, 4)


# -- the front ---------------------------------------------------------------------------------------------------------


@functools.cache
def front() -> Front:
    return shardgraph.front(Net(), INPUTS, (1, 2), cluster=toy_cluster(1, 4), global_batch=256)


def point(devices: int, memory: int, seconds: float, fits: bool = True) -> Candidate:
    return Candidate("fsdp", (("dp", devices),), memory, seconds, fits, devices, 16)


def test_the_front_is_what_no_other_plan_beats():
    beaten, twin = point(4, 200, 2.0), point(8, 100, 1.0)
    kept = (point(2, 100, 4.0), point(4, 100, 2.0), point(4, 200, 1.0), twin)
    assert Front((*kept, beaten), GIB, "toy").points == tuple(
        sorted(kept, key=lambda each: (each.devices, each.seconds))
    )


@pytest.mark.slow
def test_the_front_of_a_job_has_plans_that_run_on_each_number_of_devices():
    assert {each.devices for each in front().points} == {1, 2}
    for each in front().points:
        assert each.plan.world_size == each.devices and each.plan.batch.samples == each.samples == 256
    best = shardgraph.plan(Net(), INPUTS, cluster=toy_cluster(1, 4), devices=2, global_batch=256)
    fastest = min(each.per_sample for each in front().points if each.devices == 2)
    assert fastest == best.considered[0].per_sample
    assert "device time" in str(front())


@pytest.mark.slow
def test_a_plan_of_several_calls_is_priced_as_it_runs():
    several = next(each for each in front().considered if each.plan.calls > 1 and not each.plan.operators)
    x = torch.zeros(several.plan.samples_per_call, 6, 8)
    parts = parts_of(shardgraph.analyze(Net(), (x,), several.plan, cluster=toy_cluster(1, 4)))
    assert parts.step == pytest.approx(several.seconds) and parts.peak == several.memory
    assert parts.memory["gradients"] > 0  # of earlier calls


def test_the_front_is_drawn(tmp_path):
    drawn = shardgraph.visualize(replace(front(), budget=front().points[-1].memory), tmp_path / "front.svg").read_text()
    texts = set(ET.fromstring(drawn).itertext())
    assert {"1 device", "2 devices", "memory at the peak of a rank"} <= texts
    assert drawn.count("<circle") == len(front().points) + 2
    assert "device time" in shardgraph.visualize(front(), tmp_path / "front.html").read_text()


def test_a_front_of_one_point_and_a_png_that_cannot_be(tmp_path):
    one = Front((point(2, 100, 1.0, fits=False),), GIB, "toy")
    assert "#fff" in shardgraph.visualize(one, tmp_path / "one.svg").read_text()
    with pytest.raises(ShardGraphError, match=r"as \.svg or \.html"):
        shardgraph.visualize(one, tmp_path / "one.png")


@pytest.mark.parametrize("devices", [(), (0,), ("8",)])
def test_a_front_needs_numbers_of_devices(devices):
    with pytest.raises(PlanError, match="devices is"):
        shardgraph.front(Net(), INPUTS, devices, cluster=toy_cluster())
