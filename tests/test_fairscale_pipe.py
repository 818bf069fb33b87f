"""FairScale's Pipe: its script, and its layers trained on ranks, without example inputs, as on one."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Pipeline, PlanError
from tests import piped
from tests.example_scripts import ROUNDED, loaded, losses_in, printed_by
from tests.standing import on_ranks


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_the_example_has_the_losses_of_one_rank():
    example, printed = loaded("pipe"), printed_by("pipe")
    model = example.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, target = example.batch()
    expected = []
    for _ in range(example.STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = losses_in(printed)
    assert found == pytest.approx(expected, abs=ROUNDED) and found[-1] < found[0]


@pytest.mark.parametrize("checkpoint", ["never", pytest.param("except_last", marks=pytest.mark.slow)])
def test_layers_train_as_on_one_rank_with_an_optimizer_made_before_the_first_call(checkpoint):
    found = on_ranks(piped.training, 2, args=([3, 3], 8, checkpoint))
    for losses, weights, _ in found:
        assert losses < 1e-12 and weights < 1e-12
    first, last = (names for *_, names in found)
    assert first == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert last == ["0.weight", "3.weight", "3.bias", "5.bias"]  # of the first layer, which it shares


def test_each_stage_may_be_on_several_ranks():
    for losses, weights, _ in on_ranks(piped.training, 4, args=([2, 4], 16, "always")):
        assert losses < 1e-12 and weights < 1e-12


def test_tuples_of_unequal_rows_come_out_whole():
    for rows, error in on_ranks(piped.tuples_of_unequal_rows, 2):
        assert rows == [8, 2]
        assert error < 1e-12


def test_statistics_move_by_a_batch_of_fewer_rows_than_chunks():
    assert max(on_ranks(piped.statistics_of_fewer_rows_than_chunks, 2)) < 1e-12


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ([3, 2], r"stages of \[3, 2\] layers are of 5 in all, and the model is a sequence of 6"),
        ([2, 2, 2], "3 stages run on 3 ranks or a multiple, and this run has 2"),
    ],
)
def test_a_balance_that_does_not_fit_is_refused(balance, message):
    for told in on_ranks(piped.refused, 2, args=(balance,)):
        assert re.search(message, told)


def test_stages_of_what_is_no_sequence_need_a_call():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = piped.layers()

    with pytest.raises(PlanError, match=r"give example_inputs or example_kwargs; or, for an nn.Sequential"):
        shardgraph.compile(Model(), "pp", pipeline=Pipeline(2, stages=("layers.3",)))
