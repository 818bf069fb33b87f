"""Moving averages of weights, as shards, against torch's of the unsharded model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import AveragedWeights, CheckpointError, ShardGraphError
from tests import averages
from tests.standing import on_ranks


@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2}), ("tp", {"tp": 2}), ("pp", {"pp": 2})])
def test_averages_are_torchs_of_the_unsharded_model_and_weights_come_back(plan, mesh):
    for error, restored in on_ranks(averages.against_torch, 2, args=(plan, mesh)):
        assert error < 1e-12
        assert restored


def test_averages_load_under_another_plan():
    for error, updates in on_ranks(averages.loaded_under_another_plan, 2):
        assert error < 1e-12
        assert updates == 5


def test_the_first_updates_weigh_more_with_a_warmup():
    sharded = shardgraph.compile(nn.Linear(1, 1, bias=False), "single")
    with torch.no_grad():
        sharded.weight.fill_(0.0)
        average = AveragedWeights(sharded, 0.999, warmup=True)
        sharded.weight.fill_(1.0)
    average.update()  # with a decay of 1/10
    average.update()  # of 2/11
    assert average.state_dict()["averages"]["weight"].item() == pytest.approx(1 - 2 / 110)


def test_a_module_that_is_not_compiled_is_refused():
    with pytest.raises(ShardGraphError, match="Linear is not compiled, and its weights are whole"):
        AveragedWeights(nn.Linear(2, 2))


def test_averages_of_other_parameters_are_refused():
    average = AveragedWeights(shardgraph.compile(nn.Linear(2, 2), "single"))
    with pytest.raises(CheckpointError, match="'head' is in one of them only"):
        average.load_state_dict({"averages": {**average.state_dict()["averages"], "head": 1}, "updates": 0})


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"averages": {}}, "has 'averages' and 'updates', and this has not"),
        (
            {"averages": {"weight": torch.ones(3, 2), "bias": torch.ones(2)}, "updates": 1},
            r"'weight' is \[3, 2\]",
        ),
        ({"averages": {"weight": torch.ones(2, 2).int(), "bias": torch.ones(2)}, "updates": 1}, "is torch.int32"),
    ],
)
def test_what_is_no_state_of_these_averages_is_refused_and_changes_nothing(state, told):
    average = AveragedWeights(sharded := shardgraph.compile(nn.Linear(2, 2), "single"))
    before = {name: value.clone() for name, value in average.state_dict()["averages"].items()}
    with pytest.raises(CheckpointError, match=told):
        average.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict()["averages"].items())
    assert all(torch.equal(value, before[name]) for name, value in sharded.named_parameters())


class Doubling(nn.Linear):
    """Translates a checkpoint of before as it loads."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, *rest)


def test_averages_are_loaded_as_they_were_saved_however_the_model_loads():
    average = AveragedWeights(shardgraph.compile(Doubling(2, 2), "single"))
    saved = {name: value.clone() for name, value in average.state_dict()["averages"].items()}
    average.load_state_dict({"averages": saved, "updates": 1})
    assert all(torch.equal(value, saved[name]) for name, value in average.state_dict()["averages"].items())
