"""A job goes on under another plan, on another number of devices, from its checkpoint, with the same global batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardgraph
from shardgraph import Plan
from shardgraph.plans.batch import Batch
from tests import replanned
from tests.machines import toy_cluster
from tests.standing import on_ranks


def planned(devices: int, samples: int) -> Plan:
    inputs = (torch.zeros(1, 8),)
    return shardgraph.plan(replanned.net(), inputs, cluster=toy_cluster(1, 4), devices=devices, global_batch=samples)


@pytest.mark.slow
def test_the_losses_of_a_job_that_goes_on_on_half_the_ranks_are_those_of_one_that_never_stopped(tmp_path):
    before = planned(4, replanned.SAMPLES)
    before.save(tmp_path / "plan.yaml")
    first = on_ranks(replanned.continued, 4, args=(before.to_yaml(), str(tmp_path / "ckpt"), range(3), False))

    samples = Plan.load(tmp_path / "plan.yaml").batch.samples
    after = planned(2, samples)
    assert after.world_size == 2 and after.batch == Batch(replanned.SAMPLES, after.calls)
    after = replace(after, batch=Batch(samples, calls=4))  # as it is where larger calls do not fit
    rest = on_ranks(replanned.continued, 2, args=(after.to_yaml(), str(tmp_path / "ckpt"), range(3, 6), True))

    model = replanned.net()
    whole = replanned.trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(6))
    for losses in first:
        assert losses == pytest.approx(whole[:3], rel=1e-5)
    for losses in rest:
        assert losses == pytest.approx(whole[3:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_calls_that_add_to_gradients_hold_them(name):
    for calls in (1, 2):
        for measured, predicted in on_ranks(replanned.peaks_of_calls, 2, args=(name, calls)):
            assert measured == pytest.approx(predicted, abs=64)
