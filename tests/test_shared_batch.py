"""Ranks that share a batch under a plan of operators, and plan="auto" that is tuned on the real ranks."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import ShardGraphError
from shardgraph.api import tune
from shardgraph.api.timed_steps import fastest_of, in_turns
from shardgraph.calibration.remembered import measured_file
from tests import shared_batches
from tests.standing import on_ranks


def test_ranks_that_share_a_batch_may_be_called_with_it():
    assert on_ranks(shared_batches.first_call, 2, args=("same",)) == ["", ""]


@pytest.mark.parametrize("kind", ["other", "shuffled"])
def test_ranks_that_share_a_batch_are_told_if_each_has_its_own(kind):
    for error in on_ranks(shared_batches.first_call, 2, args=(kind,)):
        assert "the 2 ranks along 'dp' share a batch" in error and "plan.data_rank(r)" in error


def test_tuning_takes_the_candidate_that_is_measured_fastest_and_corrects_the_prices(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_file().parent.mkdir()
    shardgraph.Cluster.detect().save(measured_file())
    (name, measured, same, priced), (other, told, _, _) = on_ranks(
        shared_batches.tuned, 2, args=(str(tmp_path),), timeout=200
    )
    assert name == other and measured == told and same
    assert len(measured) >= 3 and any(name in line for line in measured)
    found = re.search(r"took (\S+) times the predicted computation", measured[-1])
    assert found and priced == pytest.approx(1 / float(found[1]), rel=0.02)


class Contender:
    """Steps of so many seconds each, on a machine that becomes slower from one step to the next."""

    machine = itertools.count(1000)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def step(self) -> float:
        return self.seconds * next(self.machine) / 1000


def test_candidates_take_turns_so_that_a_machine_that_becomes_slower_does_not_decide():
    """Run one after the other, the one that is measured last would seem the slowest."""
    turns = in_turns([Contender(1.05), Contender(1.0)], 600.0)
    assert fastest_of(turns) == 1
    assert sum(map(sum, turns)) < 600 and len(turns) > 50
    assert len(in_turns([Contender(1.1), Contender(1.0)], 0.1)) == 1, "one turn at least"


def test_the_one_that_is_expected_to_be_the_fastest_is_taken_unless_another_is_for_sure():
    assert fastest_of([(1.0, 0.99, 1.2)]) == 1
    assert fastest_of([(1.0, 1.01, 1.2)]) == 0
    assert fastest_of([(1.0, 0.95, 1.2), (1.1, 1.05, 1.2), (0.9, 0.85, 1.2)]) == 1
    assert fastest_of([(1.0, 0.9, 1.2), (1.1, 1.3, 1.2), (0.9, 0.88, 1.2), (1.0, 1.1, 1.2), (1.0, 0.8, 1.2)]) == 0


@pytest.mark.parametrize("enough", [True, False])
def test_candidates_take_turns_where_all_fit_at_once(enough, monkeypatch):
    asked: list[float] = []

    class Timed(Contender):
        def __init__(self, plan: shardgraph.Plan) -> None:
            super().__init__(1.0)

        def median(self, seconds: float) -> float:
            asked.append(seconds)
            return 1.0

    chosen = shardgraph.plan(nn.Linear(8, 8), (torch.ones(4, 8),), cluster="A100", devices=4)
    number = len((chosen, *chosen.alternatives)[: tune.CANDIDATES])
    tune.fastest(chosen, Timed, 60.0, 2**40 if enough else 0, here=False)
    assert number > 1 and asked == ([] if enough else [60 / number] * number)


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([(1.0, 0.9), (1.0, 1.4), (1.0, 0.8), (1.0, 1.3), (1.0, 0.7)], "the first, which none is faster than for sure"),
        ([(1.0, 1.1), (2.0, 1.8), (3.0, 2.7)], "the fastest as measured"),
        ([(1.0, 1.1)], "the fastest as measured"),
    ],
)
def test_the_plan_says_whether_it_is_the_fastest_as_measured(turns, kept, monkeypatch):
    chosen = shardgraph.plan(nn.Linear(8, 8), (torch.ones(4, 8),), cluster="A100", devices=4)
    first, second, *_ = (chosen, *chosen.alternatives)
    scale = [first.data_size, second.data_size]
    times = [tuple(seconds * size for seconds, size in zip(turn, scale, strict=True)) for turn in turns]
    monkeypatch.setattr(tune, "CANDIDATES", 2)
    monkeypatch.setattr(tune, "in_turns", lambda contenders, seconds: times)
    assert kept in tune.fastest(chosen, lambda plan: plan, 1.0, 2**40, here=False).note


@pytest.mark.parametrize(("plan", "seconds"), [("single", 1.0), ("auto", -1), ("auto", "long")])
def test_tuning_needs_a_choice_and_a_time(plan, seconds):
    with pytest.raises(ShardGraphError, match="tune is"):
        shardgraph.compile(nn.Linear(2, 2), plan, example_inputs=(torch.ones(1, 2),), tune=seconds)
