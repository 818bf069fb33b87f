"""Pipeline schedules: torch's orders as data, and their time and memory against the published closed forms."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shardgraph.cost_models.actions import Action
from shardgraph.cost_models.schedules import SimulatedSchedule, StageCost, most_in_flight, simulate_schedule
from shardgraph.errors import PlanError
from shardgraph.plans.orders import SCHEDULES, check, find_schedule, pipeline_order, rank_of_stage
from shardgraph.torch_api import pipeline_actions

PIPELINES = Path(__file__).parent.parent / "docs" / "pipeline.md"
NAMES = pytest.mark.parametrize("schedule", SCHEDULES)
RANKS_AND_ROUNDS = pytest.mark.parametrize("ranks, rounds", [(2, 4), (4, 2), (4, 4), (8, 3)])


def run(
    schedule: str, ranks: int, microbatches: int, cost: StageCost, *, each: int | None = None, prefetch: bool = True
) -> SimulatedSchedule:
    """Uniform stages, ``each`` on a rank."""
    stages = ranks * (each or find_schedule(schedule).least)
    return simulate_schedule(pipeline_order(schedule, ranks, stages, microbatches), [cost] * stages, prefetch=prefetch)


def idle(simulated: SimulatedSchedule) -> list[float]:
    """Seconds of the step in which each rank waits."""
    return [simulated.bubble(rank) * simulated.seconds for rank in range(len(simulated.ranks))]


# -- orders ----------------------------------------------------------------------------------------


def test_1f1b_forwards_as_many_microbatches_as_stages_follow_before_its_first_backward():
    first, last = pipeline_order("1f1b", 2, 2, 3)
    assert " ".join(map(str, first)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, last)) == "1F0 1B0 1F1 1B1 1F2 1B2"


@NAMES
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_stage_runs_every_microbatch_once_on_its_rank(schedule, ranks):
    for each in {find_schedule(schedule).least, min(3, SCHEDULES[schedule].most)}:
        stages, microbatches = ranks * int(each), 2 * ranks * int(each)
        place = rank_of_stage(schedule, ranks, stages)
        order = pipeline_order(schedule, ranks, stages, microbatches)
        for stage, microbatch in itertools.product(range(stages), range(microbatches)):
            done = [a.kind for a in order[place[stage]] if (a.stage, a.microbatch) == (stage, microbatch)]
            assert done in (["F", "B"], ["F", "I", "W"])
        assert sum(map(len, order)) == sum(2 + (a.kind == "I") for each in order for a in each if a.kind in "BI")


@NAMES
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_check_refuses_what_torch_refuses_and_nothing_else(schedule, ranks):
    stages = ranks * find_schedule(schedule).least
    for microbatches in range(1, 15):
        try:
            pipeline_actions(SCHEDULES[schedule].torch_name, ranks, stages, microbatches)
        except ValueError:
            with pytest.raises(PlanError, match="would do"):
                check(schedule, ranks, stages, microbatches)
        else:
            check(schedule, ranks, stages, microbatches)


def test_wrong_microbatches_are_told_with_the_nearest_that_work():
    with pytest.raises(PlanError, match=r"cannot run 9 microbatches: .* so 8 or 10 would do"):
        check("interleaved-1f1b", 4, 8, 9)


def test_wrong_stages_are_told_with_those_that_work_and_who_runs_them():
    with pytest.raises(PlanError, match=r"each rank has 2 of its stages, so 8 would do; 12 stages are run by inter"):
        check("zbv", 4, 12, 8)


def test_an_unknown_schedule_is_told_with_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'interleaved-1f1b'"):
        check("interleaved1f1b", 2, 4, 4)


# -- time: uniform stages, messages that take no time -----------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (3.0, 1.0)])
@RANKS_AND_ROUNDS
def test_the_bubble_is_p_minus_1_of_m_plus_p_minus_1(schedule, forward, backward, ranks, rounds):
    """Of the step, whatever forward and backward take.

    GPipe: Huang et al. 2019, arXiv:1811.06965, section 2.2; 1F1B, whose bubble is the same: Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2.1, who give it as (p - 1) / m of the ideal time.
    """
    m = ranks * rounds
    simulated = run(schedule, ranks, m, StageCost(forward, backward))
    assert simulated.seconds == pytest.approx((m + ranks - 1) * (forward + backward))
    assert simulated.bubble_fraction == pytest.approx((ranks - 1) / (m + ranks - 1))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("each", [2, 3])
@RANKS_AND_ROUNDS
def test_stages_that_interleave_divide_the_bubble(schedule, each, ranks, rounds):
    """(p - 1) / (v m) of the ideal time for v stages per rank and m a multiple of p.

    Narayanan et al. 2021, section 2.2.2; the same for breadth first, Lamy-Poirier 2022, arXiv:2211.05953.
    """
    m = ranks * rounds
    simulated = run(schedule, ranks, m, StageCost(1.0, 2.0), each=each)
    assert idle(simulated) == pytest.approx([(ranks - 1) * (1.0 + 2.0)] * ranks)
    assert simulated.bubble_fraction == pytest.approx((ranks - 1) / (each * m + ranks - 1))


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("forward, inputs, weights", [(1.0, 1.0, 1.0), (1.5, 1.0, 1.0), (1.0, 1.5, 0.5)])
@RANKS_AND_ROUNDS
def test_weights_gradients_fill_bubbles_of_one_backward(each, forward, inputs, weights, ranks, rounds):
    """(p - 1)(F + I - W) idle seconds of a rank: ZB-H1, Qi et al. 2023, arXiv:2401.10241, table 2.

    Exact where W takes no longer than I.
    """
    cost = StageCost(forward, inputs + weights, inputs, weights)
    simulated = run("interleaved-zero-bubble", ranks, ranks * rounds, cost, each=each)
    assert idle(simulated) == pytest.approx([(ranks - 1) * (forward + inputs - weights)] * ranks)


@RANKS_AND_ROUNDS
def test_zbv_has_no_bubble_between_a_ranks_first_action_and_its_last(ranks, rounds):
    """Where F = I = W and m >= 2 p - 1: Qi et al. 2024, arXiv:2405.15362, and section 6 of arXiv:2401.10241.

    Ranks begin one forward after each other, so over the step each of them waits (p - 1) F.
    """
    simulated = run("zbv", ranks, ranks * rounds, StageCost(1.0, 2.0))
    assert [spans[-1].end - spans[0].start for spans in simulated.ranks] == [6.0 * ranks * rounds] * ranks
    assert idle(simulated) == pytest.approx([ranks - 1] * ranks)


@pytest.mark.parametrize("weights", [1.0, 0.5])
@RANKS_AND_ROUNDS
def test_dualpipev_waits_as_published(weights, ranks, rounds):
    """(PP / 2 - 1)(F&B + B - 3 W) idle seconds of a rank, PP = 2 p: DeepSeek, github.com/deepseek-ai/DualPipe.

    F&B, a forward and a backward that overlap, is their sum here: torch runs one after the other. Exact where F = I
    and W takes no longer, from m = 2 p on.
    """
    backward = 1.0 + weights
    simulated = run("dualpipev", ranks, ranks * rounds, StageCost(1.0, backward, 1.0, weights))
    assert max(idle(simulated)) == pytest.approx((ranks - 1) * ((1.0 + backward) + backward - 3 * weights))


def test_the_slowest_stage_sets_the_pace():
    costs = [StageCost(1.0, 2.0), StageCost(2.0, 4.0), StageCost(1.0, 2.0)]
    simulated = simulate_schedule(pipeline_order("gpipe", 3, 3, 10), costs)
    assert simulated.seconds == (10 - 1) * 6.0 + (3.0 + 6.0 + 3.0)


# -- time: messages --------------------------------------------------------------------------------


def test_messages_that_are_asked_for_ahead_travel_behind_computation():
    """The first forward crosses p - 1 links, the last backward too; all others are hidden."""
    cost = StageCost(1.0, 2.0, send_output=0.25, send_gradient=0.5)
    assert run("gpipe", 4, 8, cost).seconds == pytest.approx((8 + 3) * 3.0 + 3 * 0.25 + 3 * 0.5)


def test_messages_that_are_asked_for_when_needed_are_waited_for_each_time():
    """A rank that receives takes a forward and a message for each microbatch."""
    cost = StageCost(1.0, 2.0, send_output=0.25)
    late = run("gpipe", 2, 8, cost, prefetch=False)
    assert late.seconds == pytest.approx(run("gpipe", 2, 8, cost).seconds + 7 * 0.25)


def test_messages_of_a_link_go_one_after_the_other():
    cost = StageCost(1.0, 1.0, send_output=5.0)
    assert run("gpipe", 2, 4, cost).seconds == 1.0 + 4 * 5.0 + 1.0 + 4 * 1.0 + 1.0


def test_stages_of_one_rank_send_nothing():
    cost = StageCost(1.0, 2.0, send_output=9.0, send_gradient=9.0)
    assert run("zbv", 1, 4, cost).bubble_fraction == 0.0


def test_1f1b_waits_for_every_round_trip_of_messages():
    """Rank 0 has p microbatches under way; each is back after p (F + B) and 2 (p - 1) messages.

    So p microbatches take that long in the steady state, where those of GPipe flow without a return.
    """
    few, many = (run("1f1b", 4, m, StageCost(1.0, 1.0, send_output=0.5, send_gradient=0.5)) for m in (16, 32))
    assert many.seconds - few.seconds == pytest.approx((32 - 16) / 4 * (4 * 2.0 + 2 * 3 * 0.5))


# -- memory ----------------------------------------------------------------------------------------


@RANKS_AND_ROUNDS
def test_gpipe_holds_all_microbatches_and_1f1b_as_many_as_stages_follow(ranks, rounds):
    """m, and min(m, p - rank): Narayanan et al. 2021, section 2.2.1."""
    m = ranks * rounds
    assert most_in_flight(pipeline_order("gpipe", ranks, ranks, m)) == (m,) * ranks
    assert most_in_flight(pipeline_order("1f1b", ranks, ranks, m)) == tuple(min(m, ranks - r) for r in range(ranks))


@RANKS_AND_ROUNDS
def test_schedules_that_interleave_hold_what_they_forward_before_the_first_backward(ranks, rounds):
    """In stages of microbatches: (v - 1) p + 2 (p - rank - 1) + 1 of v m.

    Narayanan et al. 2021, as Megatron-LM warms up; breadth first holds them all.
    """
    m, each = ranks * rounds, 3
    order = pipeline_order("interleaved-1f1b", ranks, ranks * each, m)
    warm = [(each - 1) * ranks + 2 * (ranks - rank - 1) + 1 for rank in range(ranks)]
    assert most_in_flight(order) == tuple(min(each * m, count) for count in warm)
    assert most_in_flight(pipeline_order("looped-bfs", ranks, ranks * each, m)) == (each * m,) * ranks


@RANKS_AND_ROUNDS
def test_zero_bubble_schedules_hold_as_much_on_every_rank(ranks, rounds):
    """What the first rank of 1F1B holds, p microbatches; DualPipeV one stage of one microbatch more.

    In stages of microbatches, of which a rank of a V has two: 2 p for ZBV (Qi et al. 2023, section 6), PP + 1 with PP =
    2 p for DualPipeV (DeepSeek), p for ZB-H1, of which late ranks put off the gradients of weights.
    """
    m = ranks * rounds
    assert most_in_flight(pipeline_order("zbv", ranks, 2 * ranks, m)) == (2 * ranks,) * ranks
    assert most_in_flight(pipeline_order("dualpipev", ranks, 2 * ranks, m)) == (2 * ranks + 1,) * ranks
    assert most_in_flight(pipeline_order("interleaved-zero-bubble", ranks, ranks, m)) == (ranks,) * ranks


def test_the_peak_is_what_is_fixed_and_what_is_in_flight():
    simulated = run("1f1b", 4, 8, StageCost(1.0, 2.0, saved=100, fixed=7))
    assert [simulated.peak(rank) for rank in range(4)] == [(407, 3.0), (307, 3.0), (207, 3.0), (107, 3.0)]


def test_what_only_the_inputs_gradient_needs_is_freed_with_it():
    whole, part = StageCost(1.0, 2.0, saved=100), StageCost(1.0, 2.0, saved=100, kept=10)
    peaks = [run("interleaved-zero-bubble", 4, 8, cost).peak(3)[0] for cost in (whole, part)]
    assert peaks == [4 * 100, 100 + 3 * 10]


@NAMES
def test_all_that_was_saved_is_freed(schedule):
    simulated = run(schedule, 3, 6, StageCost(1.0, 2.0, saved=100, kept=40, fixed=7))
    assert {changes[-1][1] for changes in simulated.memory} == {7 * find_schedule(schedule).least}


# -- what comes of it ------------------------------------------------------------------------------


def test_an_order_that_waits_for_itself_is_told_with_where_it_stands():
    order = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0), Action(1, "F", 0)))
    with pytest.raises(PlanError, match="rank 0 at 0B0, rank 1 at 1B0"):
        simulate_schedule(order, [StageCost()] * 2)


def test_the_trace_has_a_track_for_every_rank_and_link():
    trace = run("1f1b", 2, 2, StageCost(1.0, 2.0)).timeline.to_chrome_trace()
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "rank 0 to 1", "rank 1 to 0"}


@NAMES
def test_the_document_has_the_figures_of_the_simulator(schedule):
    row = next(line for line in PIPELINES.read_text().splitlines() if line.startswith(f"| `{schedule}` |"))
    waits, holds = (cell.strip() for cell in row.split("|")[-3:-1])
    each = find_schedule(schedule).least
    assert waits == f"{run(schedule, 4, 8, StageCost(1.0, 2.0)).bubble_fraction:.1%}"
    held = most_in_flight(pipeline_order(schedule, 4, 4 * each, 8))
    assert [float(number) for number in holds.split(",")] == [count / each for count in held]
