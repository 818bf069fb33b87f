"""FairScale's mixture of experts: its results, and trained under plans."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardgraph
from shardgraph import ShardGraphError
from shardgraph.fairscale import MOELayer, Top2Gate
from shardgraph.passes.lowering import build_program
from shardgraph.plans.resolve import resolve_plan

WIDTH, EXPERTS = 8, 4


def expert(hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))


def experts() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(expert() for _ in range(EXPERTS))


def tokens(sequences: int = 4) -> Tensor:
    return torch.randn(sequences, 6, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A residual around experts, and their auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MOELayer(Top2Gate(WIDTH, EXPERTS), experts())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.moe(self.norm(x)), self.moe.l_aux


class First(nn.Module):
    """A gate that sends every token to one expert, with room for all."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.zeros(len(x), EXPERTS, len(x))
        weights[range(len(x)), self.chosen, range(len(x))] = 0.5
        return x.new_zeros(()), weights, weights.bool()


@pytest.mark.parametrize("chosen", range(EXPERTS))
def test_a_token_has_the_weighted_result_of_its_own_expert(chosen):
    each = experts()
    torch.testing.assert_close(MOELayer(First(chosen), each)(tokens()), 0.5 * each[chosen](tokens()))


def test_the_gate_gives_the_masks_and_the_loss_of_its_definition():
    torch.manual_seed(0)
    gate, x = Top2Gate(WIDTH, EXPERTS).eval(), tokens().flatten(0, 1)
    loss, weights, there = gate(x)
    chances = F.softmax(x @ gate.weight.T, -1)
    first = F.one_hot(chances.argmax(-1), EXPERTS).float()
    torch.testing.assert_close(loss, (chances.mean(0) * first.mean(0)).mean())
    assert weights.shape == (24, EXPERTS, 12) and torch.equal(there, weights > 0)
    assert there.sum((1, 2)).max() == 2 and there.sum(0).max() == 1  # two places of a token, one token at a place
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(24))  # there is room for all


def test_a_gate_loads_what_fairscale_saved():
    gate, weight = Top2Gate(WIDTH, EXPERTS), torch.randn(EXPERTS, WIDTH)
    gate.load_state_dict({"wg.weight": weight})
    assert torch.equal(gate.weight, weight)


@pytest.mark.quick("fsdp-mesh1")
@pytest.mark.parametrize(("plan", "mesh"), [("ep", {"ep": 2}), ("fsdp", {"dp": 2}), ("fsdp+ep", {"dp": 2, "ep": 2})])
def test_experts_of_any_modules_are_divided_and_proved(plan, mesh):
    model = Block().eval()
    report = shardgraph.verify(model, (tokens(8),), plan, mesh=mesh, steps=3, fp64=True)
    assert report.ok and report.proof.ok, str(report)


def test_each_rank_has_its_own_experts_under_the_plan_ep():
    program = build_program(Block(), resolve_plan("ep", (("ep", 2),)), (tokens(),), {})
    placed = {fqn for fqn, entry in program.parameters.items() if entry.placements == ("split(0)",)}
    assert placed == {f"moe.experts.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}


REFUSED = {
    "experts that are not alike": (lambda: MOELayer(First(0), nn.ModuleList([expert(), expert(8)])), "expert 1 of"),
    "experts with buffers": (lambda: MOELayer(First(0), nn.BatchNorm1d(WIDTH)), "has buffers"),
    "the experts of one rank alone": (lambda: MOELayer(Top2Gate(WIDTH, 8), experts())(tokens()), "among 8 experts"),
    "tokens without sequences": (lambda: MOELayer(First(0), experts())(tokens().flatten(0, 1)), r"takes \[sequences"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_words(what):
    make, words = REFUSED[what]
    with pytest.raises(ShardGraphError, match=words):
        make()
