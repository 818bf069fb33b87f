"""Blocks divided among pipeline stages: the partition against every other one, and what a memory limit does to it."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from shardgraph.cost_models.actions import Order
from shardgraph.cost_models.balance import balance, merge
from shardgraph.cost_models.partitions import Chain
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.errors import PlanError
from shardgraph.plans.orders import pipeline_order


def chain(seed: int, blocks: int) -> list[StageCost]:
    """Blocks that differ in everything."""
    draw = random.Random(seed)
    return [
        StageCost(
            forward=draw.uniform(0.2, 2),
            backward=draw.uniform(0.5, 4),
            backward_weight=draw.uniform(0.2, 2),
            send_output=draw.uniform(0, 0.5),
            send_gradient=draw.uniform(0, 0.5),
            saved=draw.randrange(1, 100),
            kept=draw.randrange(1, 100),
            fixed=draw.randrange(300),
        )
        for _ in range(blocks)
    ]


def every_partition(blocks: int, stages: int) -> np.ndarray:
    return np.array([(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)])


def stages_of(blocks: list[StageCost], cuts: tuple[int, ...]) -> list[StageCost]:
    return [merge(blocks[begin:end]) for begin, end in pairwise(cuts)]


ORDERS = {
    "gpipe": pipeline_order("gpipe", 4, 4, 8),
    "1f1b": pipeline_order("1f1b", 4, 4, 8),
    "interleaved-1f1b": pipeline_order("interleaved-1f1b", 2, 4, 4),
    "zbv": pipeline_order("zbv", 3, 6, 6),
}
EACH = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@EACH
@pytest.mark.parametrize("prefetch", [True, False])
def test_many_partitions_are_simulated_as_one_is(order: Order, prefetch: bool):
    blocks = chain(0, 9)
    problem = Chain(blocks, order, prefetch)
    cuts = every_partition(9, problem.stages)[::7]
    alone = [simulate_schedule(order, stages_of(blocks, tuple(row)), prefetch=prefetch) for row in cuts]
    assert problem.seconds(cuts) == pytest.approx([each.seconds for each in alone])
    peaks = [[each.peak(rank)[0] for rank in range(len(order))] for each in alone]
    assert (problem.memory(cuts) == peaks).all()


@EACH
@pytest.mark.parametrize("room", [None, 0.1, 0.4])
def test_the_step_is_within_5_percent_of_the_best_partition_that_fits(order: Order, room: float | None):
    """Of 20 random chains; ``room`` is how far the limit is from the least memory that does to the most."""
    for seed in range(20):
        blocks = chain(seed, 11)
        problem = Chain(blocks, order, prefetch=True)
        cuts = every_partition(11, problem.stages)
        peaks = problem.memory(cuts).max(axis=1)
        limit = np.inf if room is None else peaks.min() + room * (peaks.max() - peaks.min())
        found = balance(blocks, order, limit=limit)
        assert max(found.simulated.peak(rank)[0] for rank in range(len(order))) <= limit
        assert found.simulated.seconds <= 1.05 * problem.seconds(cuts[peaks <= limit]).min()


def test_equal_blocks_make_equal_stages():
    found = balance([StageCost(1.0, 2.0)] * 12, ORDERS["1f1b"])
    assert found.cuts == (0, 3, 6, 9, 12)


def test_one_stage_has_all_blocks():
    assert balance([StageCost(1.0, 2.0)] * 5, pipeline_order("gpipe", 1, 1, 2)).cuts == (0, 5)


def test_a_slow_last_block_has_fewer_beside_it():
    """As the head of a language model over a large vocabulary."""
    found = balance([StageCost(1.0, 2.0)] * 12 + [StageCost(2.0, 4.0)], pipeline_order("1f1b", 4, 4, 32))
    assert [b - a for a, b in pairwise(found.cuts)] == [4, 4, 3, 2]


def test_a_cut_with_a_long_message_is_avoided():
    blocks = [StageCost(1.0, 2.0, send_output=9.0 * (i % 2)) for i in range(8)]
    found = balance(blocks, pipeline_order("gpipe", 2, 2, 4))
    assert found.cuts in ((0, 3, 8), (0, 5, 8))  # the even cut, after block 3, would send for 9 s


def test_the_first_stage_of_1f1b_has_fewer_blocks_where_activations_are_what_fills_memory():
    """It holds four microbatches, the last one."""
    blocks = [StageCost(1.0, 2.0, saved=10)] * 12
    assert balance(blocks, ORDERS["1f1b"]).simulated.peak(0)[0] == 4 * 30
    found = balance(blocks, ORDERS["1f1b"], limit=80)
    assert [b - a for a, b in pairwise(found.cuts)] == [2, 2, 4, 4]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_what_does_not_fit_is_told_with_the_least_memory_that_would_do(name: str):
    for seed in range(5):
        blocks, order = chain(seed, 11), ORDERS[name]
        least = int(Chain(blocks, order, prefetch=True).memory(every_partition(11, 4)).max(axis=1).min())
        with pytest.raises(PlanError, match=rf"\({least} bytes\) is the least that would do"):
            balance(blocks, order, limit=least - 1)
        assert max(balance(blocks, order, limit=least).simulated.peak(rank)[0] for rank in range(4)) == least


def test_fewer_blocks_than_stages_are_an_error():
    with pytest.raises(PlanError, match="3 blocks cannot be divided among 4 stages"):
        balance([StageCost(1.0, 2.0)] * 3, ORDERS["gpipe"])


def test_200_blocks_in_16_stages_are_balanced_by_simulating_few_of_their_partitions(monkeypatch):
    simulated = []
    simulate = Chain.seconds
    monkeypatch.setattr(Chain, "seconds", lambda self, cuts: simulated.append(len(cuts)) or simulate(self, cuts))
    balance(chain(0, 200), pipeline_order("1f1b", 16, 16, 64))
    assert 0 < sum(simulated) < 5_000  # of some 10^22; each is a part of a millisecond
