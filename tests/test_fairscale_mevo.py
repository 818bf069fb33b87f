"""FairScale's MEVO: its losses, computed in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardgraph
from shardgraph import ShardGraphError, preset
from shardgraph.fairscale import MEVO
from shardgraph.passes.lowering import build_program

WORDS, WIDTH = 48, 8


class Tied(nn.Module):
    """An embedding, and MEVO with its table."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.output = MEVO(self.table.weight, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.layer(self.table(ids))), ids)


def ids() -> Tensor:
    return torch.randint(0, WORDS, (4, 12), generator=torch.Generator().manual_seed(0))


OPTIONS = {"plain": {}, "mean": {"reduction": "mean"}, "cosines": {"scale": 5.0, "margin": 0.1}}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_loss_is_that_of_its_definition(options):
    model = Tied(**OPTIONS[options])
    scale, margin = model.output.scale, model.output.margin
    hidden, weight = torch.tanh(model.layer(model.table(ids()))).flatten(0, 1), model.table.weight
    if scale is not None:
        hidden, weight = hidden / hidden.norm(dim=1, keepdim=True), weight / weight.norm(dim=1, keepdim=True)
    scores = hidden @ weight.T
    if scale is not None:
        scores = scale * (scores - margin * F.one_hot(ids().flatten(), WORDS))
    losses = scores.logsumexp(1) - scores.gather(1, ids().view(-1, 1)).flatten()
    expected = losses.mean() if options == "mean" else losses.sum()
    torch.testing.assert_close(model(ids()), expected)


@pytest.mark.quick("mean")
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_computed_in_chunks_and_trains_like_the_whole(options):
    model = Tied(**OPTIONS[options])
    chunk = 8 * WORDS * 4  # eight rows of scores
    report = shardgraph.verify(model, (ids(),), "fsdp", mesh={"dp": 2}, loss_chunk=chunk, steps=3)
    assert report.ok and report.proof.ok, str(report)
    program = build_program(model, replace(preset("fsdp", {"dp": 2}), loss_chunk=chunk), (ids()[:2],), {})
    assert program.notes[-1].endswith("are computed 8 rows at a time, in 3 chunks")


def test_without_a_target_it_gives_scores_in_evaluation_and_is_refused_in_training():
    model, x = Tied(), torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(model.eval().output(x), x @ model.table.weight.T)
    with pytest.raises(ShardGraphError, match="give it the target"):
        model.train().output(x)


def test_another_reduction_is_refused():
    with pytest.raises(ShardGraphError, match="reduction is 'none'; it may be 'sum' or 'mean'"):
        Tied(reduction="none")
