"""Lookups and losses over a divided vocabulary: each rule on small tensors of all ranks, and faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from shardgraph import ir
from shardgraph.capture.capture import capture
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.presets import preset
from shardgraph.plans.shards import named_shapes
from shardgraph.proof.prove import prove
from tests.mutants import chosen
from tests.mutation import Case, Subject
from tests.proof_values import AXIS, Small

aten = torch.ops.aten

RANKS, ROWS, WIDTH = 3, 4, 5
CLASSES = RANKS * ROWS
INDEX = torch.tensor([[0, 11, 5], [3, 4, 7]])
TARGET = torch.tensor([0, 11, -100, 4])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def own(small: Small, index: fx.Node, rows: int = ROWS, first: int = 0, last: int | None = None) -> list[fx.Node]:
    """Whether an index is among a rank's rows, and its row; with faults, if asked for."""
    below = small.call(aten.sub.Tensor, index, small.call(ir.first_row, rows, AXIS))
    after = small.call(aten.ge.Scalar, below, first)
    before = small.call(aten.lt.Scalar, below, rows if last is None else last)
    inside = small.call(aten.logical_and.default, after, before)
    return [inside, small.call(aten.mul.Tensor, below, inside)]


# -- rules -----------------------------------------------------------------------------------------------------


def test_lookups_of_a_ranks_own_rows_are_summands():
    small = Small(RANKS)
    inside, row = own(small, small.input(INDEX))
    rows = small.call(aten.embedding.default, small.input(random(CLASSES, WIDTH), 0), row)
    held = small.check(small.call(aten.sum.default, small.call(aten.mul.Tensor, rows, small.call(
        aten.unsqueeze.default, inside, -1
    ))))  # fmt: skip
    assert held.partial == {(AXIS, "sum")}


def test_gradients_of_a_ranks_own_rows_are_its_rows_of_the_gradient():
    small = Small(RANKS)
    index, gradient = small.input(INDEX), small.input(random(*INDEX.shape, WIDTH))
    inside, row = own(small, index)
    outside = small.call(aten.mul.Scalar, small.call(aten.logical_not.default, inside), ROWS)
    row = small.call(aten.add.Tensor, row, outside)
    made = small.call(aten.embedding_dense_backward.default, gradient, row, ROWS + 1, -1, False)
    assert AXIS in small.check(small.call(aten.slice.Tensor, made, 0, 0, ROWS)).marks


def test_scores_at_a_ranks_own_targets_are_summands():
    small = Small(RANKS)
    target = small.input(TARGET)
    inside, column = own(small, target)
    inside = small.call(aten.logical_and.default, inside, small.call(aten.ne.Scalar, target, -100))
    column = small.call(aten.unsqueeze.default, column, 1)
    picked = small.call(aten.gather.default, small.input(random(len(TARGET), CLASSES), 1), 1, column)
    picked = small.call(aten.mul.Tensor, small.call(aten.squeeze.dim, picked, 1), inside)
    assert small.check(small.call(aten.sum.default, picked)).partial == {(AXIS, "sum")}


def test_values_placed_at_a_ranks_own_targets_are_its_columns():
    small = Small(RANKS)
    target = small.input(TARGET)
    inside, column = own(small, target)
    inside = small.call(aten.logical_and.default, inside, small.call(aten.ne.Scalar, target, -100))
    values = small.call(aten.mul.Tensor, inside, small.input(random(len(TARGET))))
    zeros = small.call(aten.zeros_like.default, small.input(random(len(TARGET), CLASSES), 1))
    at = [small.call(aten.unsqueeze.default, each, 1) for each in (column, values)]
    assert AXIS in small.check(small.call(aten.scatter.src, zeros, 1, *at)).marks


def test_a_log_softmax_over_ranks_is_one_of_the_whole():
    small = Small(RANKS)
    scores = random(4, CLASSES)
    mine = small.input(scores, 1)
    largest = small.call(ir.ALL_REDUCE, small.call(aten.amax.default, mine, [1], True), "max", AXIS)
    shifted = small.call(aten.sub.Tensor, mine, largest)
    total = small.call(aten.sum.dim_IntList, small.call(aten.exp.default, shifted), [1], True)
    total = small.call(ir.ALL_REDUCE, total, "sum", AXIS)
    held = small.check(small.call(aten.sub.Tensor, shifted, small.call(aten.log.default, total)))
    whole = Small(1)
    whole.terms, whole.wholes = small.terms, {}
    right = whole.typed(whole.call(aten._log_softmax.default, whole.input(scores), 1, False))
    assert held.view == right.view
    torch.testing.assert_close(small.view(held.view), scores.log_softmax(1))


# -- what is not the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"first": 1}, {"last": ROWS + 1}, {"last": ROWS - 1}, {"rows": ROWS - 1}])
def test_bounds_that_are_off_by_one_are_not_known(fault):
    small = Small(RANKS)
    inside, row = own(small, small.input(torch.tensor([1, 11, 5, 3, 7, 2])), **fault)
    rows = small.call(aten.embedding.default, small.input(random(CLASSES, WIDTH), 0), row)
    made = small.call(aten.mul.Tensor, rows, small.call(aten.unsqueeze.default, inside, -1))
    assert small.typed(small.call(aten.sum.default, made)) is None


def test_a_lookup_without_its_mask_is_not_known():
    small = Small(RANKS)
    _, row = own(small, small.input(INDEX))
    rows = small.call(aten.embedding.default, small.input(random(CLASSES, WIDTH), 0), row)
    assert small.typed(small.call(ir.ALL_REDUCE, rows, "sum", AXIS)) is None


def test_a_lookup_with_the_mask_of_another_index_is_not_known():
    small = Small(RANKS)
    _, row = own(small, small.input(INDEX))
    other, _ = own(small, small.input(INDEX.flip(0)))
    rows = small.call(aten.embedding.default, small.input(random(CLASSES, WIDTH), 0), row)
    made = small.call(aten.mul.Tensor, rows, small.call(aten.unsqueeze.default, other, -1))
    assert small.typed(small.call(aten.sum.default, made)) is None


def test_rows_that_are_not_the_ranks_own_are_not_known():
    small = Small(RANKS)
    inside, row = own(small, small.input(INDEX))
    rows = small.call(aten.embedding.default, small.input(random(CLASSES, WIDTH), 0, 2), row)  # two blocks of rows
    made = small.call(aten.mul.Tensor, rows, small.call(aten.unsqueeze.default, inside, -1))
    assert small.typed(small.call(aten.sum.default, made)) is None


def test_a_shift_that_differs_between_ranks_is_not_known():
    small = Small(RANKS)
    mine = small.input(random(4, CLASSES), 1)
    shifted = small.call(aten.sub.Tensor, mine, small.call(aten.amax.default, mine, [1], True))
    total = small.call(aten.sum.dim_IntList, small.call(aten.exp.default, shifted), [1], True)
    assert small.typed(small.call(ir.ALL_REDUCE, total, "sum", AXIS)) is None


def test_a_mask_of_one_dimension_times_a_number_is_no_sum():
    small = Small(RANKS)
    inside, _ = own(small, small.input(INDEX))
    made = small.call(aten.mul.Tensor, inside, small.input(random(1).view(())))
    assert small.typed(small.call(aten.sum.default, made)) is None


# -- programs --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model whose scores are products with the embedding, and its loss."""

    def __init__(self, tied: bool, ignored: int, reduction: str) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(512, 16, padding_idx=3), nn.Linear(16, 16)
        self.head = self.embedding if tied else nn.Linear(16, 512)
        self.options = {"ignore_index": ignored, "reduction": reduction}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.embedding(ids)).tanh()
        scores = F.linear(hidden, self.head.weight, getattr(self.head, "bias", None))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), **self.options)


def subject(plan: str, mesh: dict[str, int], tied: bool = True, ignored: int = -100, kind: str = "mean",
            chunk: int | None = None) -> Subject:  # fmt: skip
    torch.manual_seed(0)
    model, ids = Tied(tied, ignored, kind).double(), torch.randint(0, 512, (8, 9))
    joint = capture(model, (ids,), {}, device=torch.device("cpu"))
    made = lower(joint, replace(preset(plan, mesh), loss_chunk=chunk), named_shapes(model))
    assert any(node.target is ir.first_row for node in made.forward.graph.nodes)  # the vocabulary is divided
    return Subject(Case("tied", plan, tuple(mesh.items())), model, (ids,), {}, program=made)


@pytest.mark.parametrize(
    ("plan", "mesh", "options"),
    [
        ("tp", {"tp": 2}, {}),
        ("tp", {"tp": 4}, {"tied": False}),
        ("tp+sp", {"tp": 2}, {"ignored": 5, "kind": "sum"}),
        ("fsdp+tp", {"dp": 2, "tp": 2}, {}),
        ("tp", {"tp": 2}, {"tied": False, "chunk": 16 * 512 * 8}),  # in chunks of rows as well
    ],
)
def test_programs_of_a_divided_vocabulary_are_proved(plan, mesh, options):
    found = prove(subject(plan, mesh, **options).program)
    assert found.ok, str(found)


def _replaced(made: Program, target: object, change: object) -> Program:
    """The program with one call of an operation changed in each graph that has it."""
    for gm in (made.forward, made.backward):
        for node in gm.graph.find_nodes(op="call_function", target=target)[:1]:
            change(node)
    return made


def _argument(position: int, value: object) -> object:
    def change(node: fx.Node) -> None:
        node.update_arg(position, value)

    return change


FAULTS = {
    "the first row is one too far": (ir.first_row, _argument(0, 255)),
    "the last row is one too far": (aten.lt.Scalar, _argument(1, 257)),
    "the first row is left out": (aten.ge.Scalar, _argument(1, 1)),
    "another target is ignored": (aten.ne.Scalar, _argument(1, -99)),
    "the mask is forgotten": (aten.logical_and.default, lambda node: node.replace_all_uses_with(node.args[0])),
    "the greatest instead of the sum": (ir.ALL_REDUCE, _argument(1, "min")),
    "a sum is not combined": (aten.log.default, lambda node: node.update_arg(0, node.args[0].args[0].args[0])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_divided_vocabulary_is_not_proved(fault):
    found = prove(_replaced(subject("tp", {"tp": 2}).program, *FAULTS[fault]))
    assert not found.ok


def test_no_mutant_of_a_divided_vocabulary_is_proved():
    made = subject("tp", {"tp": 2})
    mutants = chosen(made.program, 0, 20)
    proved = [mutant for mutant in mutants if prove(mutant.of(made.program)).ok and "bfloat16" not in mutant.fault]
    assert len(mutants) - len(proved) > 10
    wrong = [str(mutant) for mutant in proved if made.differs(mutant.of(made.program))]
    assert wrong == []  # another number may be subtracted before the exponentials, for one
