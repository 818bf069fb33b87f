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


def test_candidates_take_turns_so_that_a_machine_that_becomes_slower_does_not_decide(monkeypatch):
    """Run one after the other, the one that is measured last would seem the slowest."""
    slower = itertools.count(10)
    monkeypatch.setattr(tune, "measured_step", lambda module, inputs, seconds: module * next(slower) / 10)
    first, second = tune.measured_in_turns([1.1, 1.0], ((), {}), 1000.0)
    assert second < first
    assert len(tune.measured_in_turns([1.1, 1.0, 0.9], ((), {}), 0.1)) == 3, "one turn at least"


@pytest.mark.parametrize("enough", [True, False])
def test_candidates_take_turns_where_all_fit_at_once(enough, monkeypatch):
    asked: list[float] = []
    chosen = shardgraph.plan(nn.Linear(8, 8), (torch.ones(4, 8),), cluster="A100", devices=4)
    monkeypatch.setattr(tune, "measured_step", lambda module, inputs, seconds: asked.append(seconds) or 1.0)
    tune.fastest(chosen, lambda plan: plan, (), {}, 60.0, 2**40 if enough else 0, here=False)
    assert len(asked) > 1 and all((seconds == 0.0) == enough for seconds in asked)


@pytest.mark.parametrize(("plan", "seconds"), [("single", 1.0), ("auto", -1), ("auto", "long")])
def test_tuning_needs_a_choice_and_a_time(plan, seconds):
    with pytest.raises(ShardGraphError, match="tune is"):
        shardgraph.compile(nn.Linear(2, 2), plan, example_inputs=(torch.ones(1, 2),), tune=seconds)
