"""Whole training programs as people write them give the numbers of the plain program; what cannot is told at once."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardgraph
from shardgraph.errors import CaptureError, ModelCheckError
from shardgraph.runtime.watch import place
from shardgraph.runtime.watch.stacks import Stack
from shardgraph.torch_api import mesh_without_group
from tests import whole_programs
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


@pytest.mark.quick(
    *("fsdp-[!l]*", "fsdp-losses_in_methods"),  # the language model's is of the slow ones
    *("pp-hooked_gradients", "pp-batches_of_a_class", "pp-*_all_ranks", "pp-gradient_*"),
)
@pytest.mark.parametrize("program", whole_programs.PROGRAMS)
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "tp", "pp"])
def test_a_program_gives_the_numbers_of_the_plain_one(plan, program):
    if plan == "pp" and program in ("losses_in_methods", "momentum_contrast", "sharpness_aware"):
        pytest.skip("in a pipeline layers are on several ranks: methods say so, and optimizers see their own")
    for error, unlike in on_ranks(whole_programs.both, 2, args=(program, plan)):
        assert error < 1e-9
        assert unlike == []


def test_a_loss_with_a_parameter_a_norm_that_is_written_to_and_a_hook_without_a_gradient_are_refused():
    for said in on_ranks(whole_programs.refused_after_forward, 2):
        assert "penalty.backward()" in said["loss"]
        assert "take the result of clamp() instead of clamp_()" in said["norm"]
        assert "register_post_accumulate_grad_hook" in said["hook"]


def test_a_rank_of_a_pipeline_loads_its_own_state_and_not_that_of_another():
    for loaded, said in on_ranks(whole_programs.states_of_stages, 2):
        assert loaded == ([], [])
        assert "missing in it" in said and "its own state_dict(), or full_state_dict()" in said


def test_a_transformation_is_of_the_original_with_whole_parameters():
    for said, error, trained in on_ranks(whole_programs.for_each_sample, 2):
        assert "sharded.unsharded()" in said
        assert error == 0 and trained


def test_a_pipeline_refuses_what_combines_parameters_of_two_stages():
    for said in on_ranks(whole_programs.averaged_across_stages, 2):
        assert "has no values on this rank" in said


class Does(nn.Module):
    """A layer whose output goes through ``how``."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.layer(x)) if isinstance(self.how, nn.Module) else self.how(self.layer, x)


def _ctc(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scores = layer(x).log_softmax(-1).unsqueeze(1)
    return F.ctc_loss(scores, torch.ones(1, 2, dtype=torch.long), torch.tensor([3]), torch.tensor([2]))


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        (lambda layer, x: layer(x) * random.uniform(0, 1), r"torch\.rand"),
        (lambda layer, x: layer(x)[:, : random.randint(1, 3)], r"torch\.rand"),
        (lambda layer, x: layer(x) * random.random(), r"torch\.rand"),
        (_ctc, "log-probabilities"),
        (lambda layer, x: checkpoint_sequential(nn.Sequential(layer, layer), 2, x, use_reentrant=False), "recompute="),
        (nn.BatchNorm1d(4, momentum=None), "give it a momentum"),
    ],
    ids=["uniform", "randint", "random", "ctc", "checkpoint_sequential", "cumulative batch norm"],
)
def test_what_a_graph_cannot_have_is_refused_with_what_can_be_done(how, advice):
    with pytest.raises(CaptureError, match=advice):
        shardgraph.compile(Does(how), "single", example_inputs=(torch.randn(3, 4),))


def test_a_checkpoint_that_leaves_its_layer_untrained_says_so():
    def recomputed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(checkpoint(layer, x, use_reentrant=True))

    with pytest.warns(UserWarning, match=r"nothing inside of the checkpoint is trained; .*\s.*checkpoint\(layer, x"):
        shardgraph.compile(Does(recomputed), "single", example_inputs=(torch.randn(3, 4),))


def test_distributions_check_their_arguments_at_each_call():
    def likelihood(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(layer(x), x.abs().sum(1, keepdim=True)).log_prob(x)

    model = shardgraph.compile(Does(likelihood), "single", example_inputs=(torch.randn(3, 4),))
    assert model(torch.ones(3, 4)).shape == (3, 4)
    with pytest.raises(ModelCheckError, match=r"Normal\(layer\(x\)"):
        model(torch.zeros(3, 4))


def test_the_watch_passes_over_meshes_without_groups():
    def asks_for_layouts(mesh: Any) -> str:
        return place._group_of(Stack.of(sys._getframe()).variables(0, 1))

    assert asks_for_layouts(mesh_without_group(2)) == ""
