"""Rows of activations stay in the order in which they are gathered, where that copies less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import shardgraph
from shardgraph import ir
from shardgraph.ir.attributes import ROW_ORDER
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.passes.sharding.order_rows import OrderRows
from shardgraph.plans.resolve import resolve_plan
from tests.test_analysis import llama, text
from tests.zoo import make

WIDTH = 64
aten = torch.ops.aten


class Perceptron(nn.Module):
    """A residual layer, whose activations ``between`` are given too."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh, hidden: int = WIDTH) -> None:
        super().__init__()
        self.between = between
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


def layers(*between: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Perceptron(), *map(Perceptron, between), Perceptron())


def program(module: nn.Module, sequences: int, ranks: int = 4, positions: int = 16) -> Program:
    x = torch.randn(sequences, positions, WIDTH)
    return build_program(module, resolve_plan("tp+sp", (("tp", ranks),)), (x,))


def nodes(made: Program) -> list[fx.Node]:
    return [node for half in (made.forward, made.backward) for node in half.graph.nodes]


def copied(made: Program) -> int:
    """Bytes that a step copies for the order of rows alone."""
    copies = (node for node in nodes(made) if node.target is aten.clone.default)
    return sum(node.meta["val"].nbytes for node in copies if node.args[0].target is aten.permute.default)


@pytest.fixture
def as_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Program]:
    """Makes programs whose rows are always in the order of the batch."""

    def made(*args: int, **kwargs: int) -> Program:
        with monkeypatch.context() as patch:
            patch.setattr(OrderRows, "run", lambda self, gm, context: None)
            return program(*args, **kwargs)

    return made


@pytest.mark.quick("4")
@pytest.mark.parametrize("sequences", [2, 4])
def test_between_a_gather_and_a_scatter_no_rows_are_copied(sequences, as_in_the_batch):
    inner = [node for node in nodes(program(layers(torch.sin), sequences)) if node in ROW_ORDER]
    assert {aten.mm.default, aten.sin.default} <= {node.target for node in inner}
    assert not any(aten.permute.default in (user.target, node.target) for node in inner for user in node.users)
    assert copied(program(layers(torch.sin), sequences)) < copied(as_in_the_batch(layers(torch.sin), sequences)) / 2


def by_position(hidden: Tensor) -> Tensor:
    return hidden * torch.linspace(0, 1, hidden.shape[1]).unsqueeze(-1)


def test_what_needs_the_order_of_the_batch_has_it():
    made = program(nn.Sequential(*(Perceptron(by_position, WIDTH // 4) for _ in range(2))), 4)
    weighted = [node for node in nodes(made) if any("linspace" in operand.name for operand in node.all_input_nodes)]
    assert weighted and any(node in ROW_ORDER for node in nodes(made))
    assert not any(operand in ROW_ORDER for node in weighted for operand in node.all_input_nodes)


@pytest.mark.parametrize(("sequences", "positions"), [(1, 16), (4, 4), (6, 16)], ids=["one sequence", "one row", "six"])
def test_rows_stay_in_the_order_of_the_batch(sequences, positions):
    """If there is one sequence, if a rank has a row of each, or if ranks' rows end inside of what others have."""
    assert not any(node in ROW_ORDER for node in nodes(program(layers(), sequences, positions=positions)))


def test_nothing_is_saved_twice_for_backward(as_in_the_batch):
    def saved(made: Program) -> int:
        roles = ir.placeholders(made.backward).items()
        return sum(node.meta["val"].nbytes for role, node in roles if isinstance(role, ir.Saved))

    assert saved(program(layers(torch.sin), 4)) <= saved(as_in_the_batch(layers(torch.sin), 4))


def test_attention_reads_the_order_of_the_batch_from_products_of_rows_as_gathered():
    plan, call = resolve_plan("tp+sp", (("tp", 2),)), text(4, 16)
    made = build_program(llama(2), plan, (), call)
    attentions = [node for node in nodes(made) if node.target is ir.fused.ATTENTION]
    assert attentions and not any(operand in ROW_ORDER for node in attentions for operand in node.all_input_nodes)
    assert any(node in ROW_ORDER and node.target is aten.mm.default for node in nodes(made))


def dropped(hidden: Tensor) -> Tensor:
    return torch.nn.functional.dropout(hidden, 0.5)


def summed_up(hidden: Tensor) -> Tensor:
    return hidden.cumsum(1)


def of_the_next_sequence(hidden: Tensor) -> Tensor:
    return hidden.tanh() + hidden.flip(0)


def scaled_by_the_largest(hidden: Tensor) -> Tensor:
    return hidden / hidden.abs().amax()


def in_the_order_of_positions(hidden: Tensor) -> Tensor:
    return hidden.transpose(0, 1).flatten(0, 1).tanh().unflatten(0, (-1, len(hidden))).transpose(0, 1)


def by_sequence(hidden: Tensor) -> Tensor:
    return torch.bmm(hidden, hidden.transpose(1, 2)) @ hidden


@pytest.mark.quick("4-*", "2-tanh")
@pytest.mark.parametrize(
    "between",
    [
        torch.tanh,
        dropped,
        summed_up,
        of_the_next_sequence,
        scaled_by_the_largest,
        in_the_order_of_positions,
        by_sequence,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("sequences", [2, 4, 8, 6])
def test_training_equals_the_unsharded_model_and_is_proved(sequences, between):
    x = torch.randn(sequences, 16, WIDTH)
    report = shardgraph.verify(layers(between), (x,), "tp+sp", mesh={"tp": 4}, fp64=True, steps=2)
    assert report.ok and report.proof.ok, str(report)


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("fsdp+tp+sp", {"dp": 2, "tp": 2}),
        ("pp+tp+sp", {"pp": 2, "tp": 2}),
    ],
)
@pytest.mark.parametrize("options", [{"recompute": "full"}, {"offload": "activations"}], ids=str)
def test_it_goes_with_other_rewrites(plan, mesh, options):
    options = dict(options)
    if "pp" in mesh:
        options |= {"pipeline": shardgraph.Pipeline(2, "1f1b"), "loss_fn": lambda output: output.square().mean()}
    x = torch.randn(8, 16, WIDTH)
    report = shardgraph.verify(layers(torch.sin, torch.cos), (x,), plan, mesh=mesh, **options)
    assert report.ok and report.proof.ok, str(report)


def test_rows_read_in_the_wrong_order_are_found_and_not_proved(monkeypatch):
    module = nn.Sequential(*(Perceptron(by_position, WIDTH // 4) for _ in range(2)))
    assert any(node in ROW_ORDER for node in nodes(program(module, 4)))
    monkeypatch.setattr("shardgraph.passes.sharding.order_rows._Ordering._move", lambda *_: None)
    report = shardgraph.verify(module, (torch.randn(4, 16, WIDTH),), "tp+sp", mesh={"tp": 4}, fp64=True)
    assert not report.ok and not report.proof.ok, str(report)


def test_a_matrix_whose_columns_are_rows_of_the_batch_stays_in_their_order():
    """It is read so by a product that makes gradients of a weight, which ranks have whole; it was copied as rows."""
    model, (args, kwargs) = make("tied-transformer", 2)
    shardgraph.annotate(model, {"**.weight": shardgraph.replicate()})
    proof = shardgraph.prove(model, args, "tp+sp", mesh={"tp": 2}, example_kwargs=kwargs)
    assert proof.ok, str(proof)
