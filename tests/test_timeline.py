"""The simulated streams: order, waits, overlap and the exported trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardgraph.cost_models.timeline import COMPUTE, Task, simulate


def compute(seconds, after=()):
    return Task("c", COMPUTE, seconds, after)


def test_tasks_of_a_stream_run_one_after_the_other():
    assert simulate([compute(1.0), compute(2.0)]).seconds == 3.0


def test_a_collective_hides_behind_computation_that_does_not_wait_for_it():
    timeline = simulate([compute(1.0), Task("gather", "dp", 2.0, (0,)), compute(3.0), compute(0.0, (1,))])
    assert timeline.seconds == 4.0 and timeline.exposed == 0.0


def test_what_is_waited_for_is_exposed():
    timeline = simulate([compute(1.0), Task("gather", "dp", 2.0, (0,)), compute(0.5), compute(1.0, (1,))])
    assert timeline.seconds == 4.0 and timeline.exposed == pytest.approx(1.5)


def test_collectives_of_one_axis_queue_and_those_of_two_axes_do_not():
    def total(first, second):
        return simulate([Task("a", first, 1.0), Task("b", second, 1.0), compute(0.0, (0, 1))]).seconds

    assert (total("dp", "dp"), total("dp", "tp")) == (2.0, 1.0)


def test_without_engines_of_its_own_communication_slows_the_computation():
    beside = [compute(4.0), compute(0.0, (0,))]
    assert simulate([Task("gather", "dp", 2.0), *beside]).seconds == 4.0
    assert simulate([Task("gather", "dp", 2.0, slows=1.5), *beside]).seconds == 5.5


def test_a_wait_costs_no_more_than_the_collective_even_without_overlap():
    assert simulate([Task("gather", "dp", 2.0, slows=2.0), compute(0.0, (0,)), compute(1.0)]).seconds == 3.0


def test_computation_that_waits_for_a_collective_goes_on_once_it_is_awake_again():
    waiting = [compute(0.5), compute(0.0, (0,)), compute(1.0)]
    assert simulate([Task("gather", "dp", 2.0), *waiting], sync=0.25).seconds == 3.25
    assert simulate([Task("gather", "dp", 2.0), *waiting], sync=0.25).exposed == 1.75
    assert simulate([Task("gather", "dp", 2.0, slows=2.0), *waiting], sync=0.25).seconds == 3.75


@pytest.mark.parametrize("started", [Task("gather", "dp", 2.0), Task("copy", "to device", 4.0)])
def test_what_is_not_waited_for_and_a_copy_need_no_synchronizing(started):
    for slows in (0.0, 1.0, 2.0) if started.stream == "dp" else (0.0,):
        tasks = [replace(started, slows=slows), compute(3.0), compute(0.0, (0,))]
        assert simulate(tasks, sync=0.25).seconds == simulate(tasks).seconds


def test_the_trace_has_a_track_per_stream_and_microseconds():
    trace = simulate([compute(1e-3), Task("gather", "dp", 2e-3, (0,))]).to_chrome_trace()
    events = trace["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [COMPUTE, "dp"]
    assert [(e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [(0, 1000), (1000, 2000)]


def test_small_operations_wait_for_python_to_call_them():
    assert simulate([compute(1.0), compute(1.0), compute(1.0)], call=2.0).seconds == 7.0


def test_calls_are_hidden_behind_large_operations():
    assert simulate([compute(8.0), compute(1.0), compute(1.0)], call=2.0).seconds == 12.0
