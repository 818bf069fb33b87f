"""States as ``torch.distributed.checkpoint.state_dict`` gets and sets them, with its options, under every plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardgraph
from tests import torch_states
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-9  # double precision


@pytest.mark.quick("fsdp-what is trained")
@pytest.mark.parametrize("how", torch_states.OPTIONS)
@pytest.mark.parametrize("plan", ["FSDP2", "ddp", "zero2", "fsdp", "tp", "fsdp+tp", "pp"])
def test_another_model_goes_on_from_a_state(plan, how):
    if plan == "pp" and how == "of rank 0":
        pytest.skip("torch's functions have the state of a rank's stages: see the next test")
    for error, unknown in on_ranks(torch_states.handed_over, 4 if plan == "fsdp+tp" else 2, args=(plan, how)):
        assert error < EXACT
        assert unknown == (["more"] if how == "not strict" else [])


def test_a_pipeline_takes_the_whole_state_that_rank_0_has():
    assert max(on_ranks(torch_states.taken_by_a_pipeline)) < EXACT


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "tp"])
def test_a_model_trains_on_while_its_state_is_written(plan, tmp_path):
    assert max(on_ranks(torch_states.saved_beside_training, 2, args=(plan, str(tmp_path)))) < EXACT


def test_tensors_that_are_to_be_assigned_are_copied_into_shards():
    sharded = shardgraph.compile(nn.Linear(3, 2), "single")
    before = sharded.weight
    state = {name: torch.full_like(value, 2.0) for name, value in sharded.state_dict().items()}
    sharded.load_state_dict(state, assign=True)
    assert sharded.weight is before and torch.equal(sharded.weight, state["weight"])


def test_tensors_of_another_dtype_are_not_assigned():
    sharded = shardgraph.compile(nn.Linear(3, 2), "single")
    before = copy.deepcopy(sharded.state_dict())
    with pytest.raises(shardgraph.CheckpointError, match=r"assign=True\) asks for.*\n.*'weight' is torch\.float64.*\n"):
        sharded.load_state_dict({name: value.double() + 1 for name, value in before.items()}, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in sharded.state_dict().items())
