"""FairScale's skippable layers: their commands are carried out in one forward, in a Pipe and without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardgraph import ShardGraphError
from shardgraph.fairscale import Namespace, Pipe, pop, skippable, stash, verify_skippables
from tests import skipping
from tests.standing import on_ranks


@pytest.mark.parametrize("balance", [[2, 3], [4, 1]])
def test_skips_over_stages_train_as_the_layers_one_after_the_other(balance):
    for losses, weights in on_ranks(skipping.training, 2, args=(balance,)):
        assert losses < 1e-12 and weights < 1e-12


def test_layers_compute_what_they_say_without_a_pipe():
    model, x = skipping.layers(), torch.randn(2, 6).double()
    first, second, third, fourth, fifth = model
    one = nn.functional.linear(x, first.weight, first.bias).tanh()
    two = nn.functional.linear(one, second.weight, second.bias).tanh()
    four = nn.functional.gelu(nn.functional.linear(third(two), fourth.weight, fourth.bias)) + 2 * one
    five = nn.functional.gelu(nn.functional.linear(four, fifth.weight, fifth.bias)) + 2 * x
    torch.testing.assert_close(model(x), five)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("ST", None),
        ("S", "no layer takes 'input', which layer 0 sets aside"),
        ("TS", "layer 0 takes 'input', which no layer before it has set aside"),
        ("STT", "layer 2 takes 'input', which no layer before it"),
        ("SST", "layer 1 sets 'input' aside, as one before it does: isolate them"),
    ],
)
def test_what_is_set_aside_is_taken_once_by_a_later_layer(names, message):
    sequence = nn.Sequential(*({"S": skipping.Sets, "T": skipping.Takes}[name](6, 6) for name in names))
    if message is None:
        verify_skippables(sequence)
        return
    with pytest.raises(TypeError, match=message):
        verify_skippables(sequence)
    with pytest.raises(TypeError, match=message):
        Pipe(sequence, [len(names)])


@skippable(stash=["a"])
class Other(nn.Module):
    def forward(self, input):
        yield stash("b", input)
        return input


def test_a_name_that_is_not_declared_is_refused():
    with pytest.raises(ShardGraphError, match=r"Other does not declare 'b': name it in @skippable"):
        Other()(torch.ones(2))
    with pytest.raises(ShardGraphError, match="Other neither sets 'c' aside nor takes it"):
        Other().isolate(Namespace(), only=["c"])


def test_a_forward_with_a_decorator_is_refused():
    class Layer(nn.Module):
        @torch.no_grad()
        def forward(self, input):
            return (yield pop("a"))

    with pytest.raises(ShardGraphError, match="forward of Layer is to be a function of self and input, without"):
        skippable(pop=["a"])(Layer)
