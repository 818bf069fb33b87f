"""What trains wrongly without a word elsewhere, shown to be right under divided operators."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardgraph
from shardgraph.ir import collectives
from shardgraph.ir.attributes import REDUCES
from shardgraph.passes.lowering import build_program
from shardgraph.plans.resolve import resolve_plan
from tests import ranks
from tests.standing import on_ranks
from tests.test_analysis import llama, text
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")


def check(model: nn.Module, plan: str, mesh: dict[str, int], *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
    report = shardgraph.verify(model, args, plan, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True)
    assert report.ok, str(report)


class Language(nn.Module):
    """An embedding, a layer that predicts from it, and the loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(("vocabulary", "degree"), [(61, 2), (50, 4), (3, 4)])
def test_a_vocabulary_that_the_ranks_do_not_divide_gives_the_same_loss(vocabulary, degree):
    check(Language(vocabulary), "tp", {"tp": degree}, torch.arange(24).view(4, 6) % vocabulary)


@pytest.mark.slow
def test_norm_weights_get_the_gradients_of_all_parts_of_the_sequence():
    model = llama(2, hidden_size=256, intermediate_size=512, vocab_size=512)
    program = build_program(model, resolve_plan("tp+sp", (("tp", 2),)), (), text(2, 256))
    reduced = [str(REDUCES.get(node, "")).split(", ") for node in collectives(program.backward)]
    norm = "model.layers.1.input_layernorm.weight"
    assert program.parameters[norm].placements == ("replicate",)
    assert sum(norm in names for names in reduced) == 1, "with others, of its bucket"
    model, (args, kwargs) = make("bert", 2)
    check(model, "tp+sp", {"tp": 3}, *args, **kwargs)  # 9 tokens


@pytest.mark.slow  # the norms that test_gradient_norm has, by another function of torch
@pytest.mark.timeout(280)
def test_norms_of_gradients_over_a_mixed_mesh_are_those_of_the_unsharded_model():
    norms = (1.0, 2.0, math.inf)
    for found in on_ranks(ranks.gradient_norms, 4, args=("gpt2", "fsdp+tp", {"dp": 2, "tp": 2}, norms)):
        for ours, expected in found:
            assert ours == pytest.approx(expected, rel=1e-5)


class Channels(nn.Module):
    """Two convolutions wide enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.norm(self.first(x)))).square().mean()


def test_convolutions_are_cut_along_their_channels():
    images = torch.randn(2, 4, 8, 8)
    placed = build_program(Channels(), resolve_plan("tp", (("tp", 2),)), (images,)).parameters
    assert placed["first.weight"].placements == ("split(0)",) and placed["second.weight"].placements == ("split(1)",)
    check(Channels(), "tp", {"tp": 2}, images)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [pytest.param("tp", marks=pytest.mark.slow), "tp+sp"])
def test_eight_ranks_for_four_heads_are_right(plan):
    model, (args, kwargs) = make("llama", 2)
    check(model, plan, {"tp": 8}, *args, **kwargs)


@pytest.mark.slow
def test_one_row_for_each_rank_is_enough():
    model, (_, kwargs) = make("gpt2", 2)
    check(model, "fsdp+tp", {"dp": 2, "tp": 2}, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_with_sequences_cut_what_is_kept_for_backward_falls_by_the_degree(degree):
    def kept(plan: str, ranks: int) -> int:
        model = llama(
            4, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=8, vocab_size=64
        )
        cluster = shardgraph.Cluster.of("H100")
        found = shardgraph.analyze(
            model, plan=plan, example_kwargs=text(4, 256), mesh={"tp": ranks}, cluster=cluster, fold=False
        )
        return max(row.memory.get("saved", 0) for row in found.rows)

    masks = 4 * (4 * 256 * 256 * 4)  # each layer's float mask, which all heads share, does not fall
    assert kept("tp+sp", degree) == pytest.approx((kept("single", 1) - masks) / degree + masks, rel=0.1)
