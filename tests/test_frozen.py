"""Parameters are frozen, and trained again, between the steps of a pipeline."""

from __future__ import annotations

import pytest

import shardgraph
from tests import frozen
from tests.standing import on_ranks


@pytest.mark.quick("by name-called-compiled at the first call")
@pytest.mark.parametrize("stages", [[], ["2"]], ids=["compiled before", "compiled at the first call"])
@pytest.mark.parametrize("step", frozen.STEPS)
@pytest.mark.parametrize("freeze", frozen.FREEZES)
def test_frozen_parameters_have_no_gradients_and_the_others_those_of_the_whole_model(freeze, step, stages):
    for far, alone in on_ranks(frozen.frozen, 2, args=(freeze, step, stages)):
        assert far < 1e-12
        assert alone == set()


def test_a_parameter_that_one_rank_alone_trains_again_is_refused_with_what_works():
    with pytest.raises(shardgraph.ShardGraphError, match=r"requires_grad_\(\) of modules, on all ranks"):
        shardgraph.launch(frozen.trained_by_name_alone, 2, timeout=100)
