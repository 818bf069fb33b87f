"""Some parameters of a plan kept gathered, or whole on every rank, and the rest not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.search.parameter_choices import with_kept, with_vectors_replicated
from tests.machines import GIB, toy_cluster

pytestmark = pytest.mark.usefixtures("shared_captures")

UNIT = (64 * 64 + 64) * 4  # bytes of a layer's parameters


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def fsdp() -> shardgraph.Plan:
    return shardgraph.preset("fsdp", {"dp": 2})


def entries(plan: shardgraph.Plan) -> dict[str, object]:
    return plan.resolve({name: parameter.shape for name, parameter in layers().named_parameters()})


@pytest.mark.parametrize(("room", "kept"), [(UNIT // 2, ["3"]), (UNIT, ["2", "3"]), (UNIT * 3 // 2, ["1", "2", "3"])])
def test_the_last_layers_stay_gathered_of_which_the_other_ranks_parts_fit(room, kept):
    plan = with_kept(fsdp(), layers(), room)
    assert {name for name, entry in entries(plan).items() if not entry.reshard_after_forward} == {
        f"{layer}.{name}" for layer in kept for name in ("weight", "bias")
    }


@pytest.mark.parametrize("room", [UNIT // 2 - 4, 2 * UNIT], ids=["none fits", "all fit, as zero2 has it"])
def test_there_is_no_plan_if_none_or_all_of_them_fit(room):
    assert with_kept(fsdp(), layers(), room) is None


def test_vectors_are_whole_on_every_rank():
    found = entries(with_vectors_replicated(fsdp(), layers()))
    assert {name for name, entry in found.items() if entry.shard_axis is None} == {f"{i}.bias" for i in range(4)}
    assert with_vectors_replicated(shardgraph.preset("ddp", {"dp": 2}), layers()) is None


@pytest.mark.parametrize("changed", ["kept", "vectors"])
def test_such_plans_train_as_the_model(changed):
    model = layers()
    plan = with_kept(fsdp(), model, UNIT) if changed == "kept" else with_vectors_replicated(fsdp(), model)
    assert shardgraph.verify(model, (torch.randn(4, 64),), plan, steps=3).ok


def test_no_other_choice_of_layers_to_keep_is_faster():
    """Of all, priced one by one, at links that are slow and in a memory for some."""
    model, x = layers(), torch.zeros(2, 64)
    cluster = toy_cluster(1, 2, memory=GIB)
    cluster = replace(cluster, intra=replace(cluster.intra, bandwidth=1e8))
    options = {"mesh": {"dp": 2}, "cluster": cluster}
    least, most = (shardgraph.analyze(model, (x,), name, **options).peak_memory for name in ("fsdp", "zero2"))
    memory = (least + most) // 2
    ((_, entry),) = fsdp().parameters
    fitting = []
    for count in range(4):
        for kept in itertools.combinations(range(4), count):
            rules = tuple((f"{layer}.*", replace(entry, reshard_after_forward=False)) for layer in kept)
            plan = replace(fsdp(), parameters=(("*", entry), *rules), bucket=0)
            analysis = shardgraph.analyze(model, (x,), plan, cluster=cluster)
            if analysis.peak_memory <= memory:
                fitting.append(analysis.time.total / analysis.samples)
    found = shardgraph.plan(model, (x,), cluster=cluster, devices=2, memory=memory)
    assert found.considered[0].memory <= memory
    assert found.considered[0].per_sample <= min(fitting) * (1 + 1e-9)
