"""FairScale's model-parallel layers: divided as they say, and trained like whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardgraph
from shardgraph import ShardGraphError
from shardgraph.fairscale import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_model_parallel,
)
from shardgraph.ir import collectives
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import resolve_plan

WIDTH = 16


class Model(nn.Module):
    """An embedding and a feed-forward network."""

    def __init__(self, table: type = VocabParallelEmbedding, gather: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = table(32, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, bias, gather_output=gather)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, bias, input_is_parallel=not gather)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.table(ids))))


def ids() -> Tensor:
    return torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))


def program(model: nn.Module, example: Tensor) -> Program:
    return build_program(model, annotated(resolve_plan("tp", (("tp", 2),)), model), (example,), {})


def placed(model: nn.Module) -> dict[str, str]:
    return {fqn: entry.placements[0] for fqn, entry in program(model, ids()).parameters.items()}


@pytest.mark.parametrize("table", [VocabParallelEmbedding, ParallelEmbedding])
@pytest.mark.parametrize("gather", [False, True])
def test_layers_train_like_whole_ones(table, gather):
    report = shardgraph.verify(Model(table, gather), (ids(),), "tp", mesh={"tp": 2}, steps=3, fp64=True)
    assert report.ok and report.proof.ok, str(report)


def test_layers_are_divided_as_they_say():
    assert placed(Model()) == {
        "table.weight": "split(0)",
        "up.weight": "split(0)",
        "up.bias": "split(0)",
        "down.weight": "split(1)",
        "down.bias": "replicate",
    }
    assert placed(Model(ParallelEmbedding))["table.weight"] == "split(1)"


def test_parts_that_are_not_gathered_are_passed_on():
    def sent(gather: bool) -> int:
        return len(list(collectives(program(Model(gather=gather), ids()).forward)))

    assert sent(gather=False) == 2 < sent(gather=True)  # the sums of the embedding and of the second layer


def test_blocks_of_a_fused_projection_are_each_divided():
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ColumnParallelLinear(WIDTH, 2 * WIDTH, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.layer(x).chunk(2, -1)
            return torch.sigmoid(gate) * value

    model, x = Fused(), torch.randn(4, WIDTH)
    assert program(model, x).parameters["layer.weight"].placements == ("split(0, blocks=2)",)
    assert shardgraph.verify(model, (x,), "tp", mesh={"tp": 2}, steps=2, fp64=True).ok


def test_layers_begin_as_they_are_told():
    layer = ColumnParallelLinear(4, 8, init_method=lambda weight: nn.init.constant_(weight, 3.0))
    assert torch.equal(layer.weight, torch.full((8, 4), 3.0)) and not layer.bias.any()


def test_one_rank_for_each_layer_has_plain_layers_and_a_plan_without_such_ranks_is_refused():
    mesh = {**initialize_model_parallel(1), "dp": 2}
    report = shardgraph.verify(Model(), (ids(),), "ddp+tp", mesh=mesh, steps=2, fp64=True)
    assert report.ok and report.proof.ok
    with pytest.raises(ShardGraphError, match="use a plan and mesh that have 'tp'"):
        shardgraph.analyze(Model(), (ids(),), "ddp", mesh={"dp": 2})


def test_more_ranks_than_there_are_cannot_share_a_layer():
    assert initialize_model_parallel(1) == {"dp": 1, "tp": 1}
    with pytest.raises(ShardGraphError, match="layers cannot be shared by 8 of 1 ranks"):
        initialize_model_parallel(8)
    with pytest.raises(ShardGraphError, match="pipeline_length=2"):
        initialize_model_parallel(1, 2)
