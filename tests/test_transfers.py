"""What a step waits for: expected by the schedule, and measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import ShardGraphError, WaitTracker, preset
from shardgraph.cost_models.timeline import COMPUTE, Task, simulate
from shardgraph.passes.lowering import build_program
from shardgraph.report.analysis import analyze_program
from shardgraph.report.pipeline import message_seconds
from tests import tracking
from tests.machines import toy_cluster
from tests.standing import on_ranks


def analysed(overlap: float = 1.0, plan: str = "fsdp", sync: float = 0.0) -> shardgraph.report.analysis.Analysis:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    program = build_program(model, preset(plan, {"dp": 4}), (torch.zeros(64, 64),))
    return analyze_program(program, replace(toy_cluster(overlap=overlap), sync=sync))


def test_a_task_waited_for_what_it_comes_after() -> None:
    gather, beside = Task("gather", "dp", 2.0), Task("c", COMPUTE, 0.5)
    timeline = simulate([gather, beside, Task("wait", COMPUTE, 0.0, (0,)), Task("c", COMPUTE, 1.0)])
    assert [span.waited for span in timeline.spans] == [0.0, 0.0, 1.5, 0.0]


def test_what_is_waited_for_is_all_exposed_time_where_nothing_slows_the_computation() -> None:
    analysis = analysed()
    assert sum(each.exposed for each in analysis.transfers) == pytest.approx(analysis.time.exposed)
    assert sum(each.seconds for each in analysis.transfers) == pytest.approx(analysis.time.communication)


def test_what_is_waited_for_and_what_slows_the_computation_is_all_exposed_time() -> None:
    slowed = analysed(overlap=0.5)
    assert sum(each.slows for each in slowed.transfers) == pytest.approx(0.5 * slowed.time.communication)
    assert sum(each.exposed for each in slowed.transfers) == pytest.approx(slowed.time.exposed)


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize(("plan", "awaited"), [("ddp", 1), ("zero2", 2), ("fsdp", 3)])
def test_a_step_takes_longer_by_the_synchronizing_of_each_collective_that_it_waits_for(
    plan: str, awaited: int, overlap: float
) -> None:
    analysis = analysed(overlap, plan, sync=1.0)
    assert analysis.time.total - analysed(overlap, plan).time.total == pytest.approx(awaited)
    assert sum(each.exposed for each in analysis.transfers) == pytest.approx(analysis.time.exposed)


def test_a_message_between_stages_takes_longer_by_the_synchronizing_of_its_receiver() -> None:
    plan, cluster = replace(preset("pp", {"pp": 2}), pipeline=shardgraph.Pipeline(2)), toy_cluster()
    alone, after = (message_seconds([torch.zeros(10)], plan, replace(cluster, sync=sync)) for sync in (0.0, 1.0))
    assert after - alone == pytest.approx(1.0)
    assert message_seconds([], plan, replace(cluster, sync=1.0)) == 0.0


def test_the_table_has_the_longest_waits_and_the_sums() -> None:
    analysis = analysed()
    header, longest, *_, total = analysis.transfer_table(limit=3).splitlines()
    most = max(analysis.transfers, key=lambda each: each.exposed)
    assert header.split()[-2:] == ["slows", "waits"] and most.label[:40] in longest
    assert total.startswith(f"all {len(analysis.transfers)} ")


def test_waits_of_another_program_are_refused() -> None:
    with pytest.raises(ShardGraphError, match="analyse the program that was measured"):
        analysed().transfer_table({("forward", "wait_tensor"): 1.0})


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "zero2"])
def test_every_wait_of_a_program_is_measured(plan: str) -> None:
    for waits, times, table, same in on_ranks(tracking.of_waits, args=(plan,)):
        assert sorted(waits) == sorted(name for name, _ in times) and all(seconds > 0 for _, seconds in times)
        assert table.splitlines()[0].split()[-1] == "measured"
        assert same


def test_what_was_not_measured_is_said() -> None:
    tracker = WaitTracker(shardgraph.compile(tracking.Net(), "single"))
    with pytest.raises(ShardGraphError, match="nothing has been measured yet"):
        _ = tracker.times
    with tracker, pytest.raises(ShardGraphError, match="one tracker measures at a time"), tracker:
        pass
