"""Rules of the operations around experts, computed whole and by parts in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardgraph.proof import experts  # noqa: F401
from shardgraph.proof.held import UntypedError, of_term
from shardgraph.proof.labels import apply
from shardgraph.proof.rules import RULES
from shardgraph.proof.shards import part
from shardgraph.proof.terms import Terms

aten = torch.ops.aten


def divided(target: Any, args: list[Any], tensors: list[torch.Tensor], cuts: list[int | None]) -> tuple[Any, Any]:
    """How two ranks hold the result by the rule, and what they compute, of tensors cut along ``cuts``."""
    terms = Terms()
    held = [of_term(terms.make("input", [str(k)], tensor.shape)) for k, tensor in enumerate(tensors)]
    held = [part(each, cut, 1, "tp", 2) if cut is not None else each for each, cut in zip(held, cuts, strict=True)]
    (result,) = apply(terms, target, *RULES[target](*_filled(args, held)))
    ranks = [
        [each if cut is None else each.chunk(2, cut)[rank] for each, cut in zip(tensors, cuts, strict=True)]
        for rank in range(2)
    ]
    return result, [target(*_filled(args, own)) for own in ranks]


def _filled(args: list[Any], tensors: list[Any]) -> list[Any]:
    """Arguments, with tensors in the places of their numbers ``"0"``, ``"1"``."""
    put = {str(k): each for k, each in enumerate(tensors)}
    return [[put[a] for a in each] if isinstance(each, list) else put.get(each, each) for each in args]


CASES = {
    "looked up, columns divided": (aten.index_select.default, ["0", 0, "1"], [(5, 4), 6], [1, None], 1),
    "looked up, places divided": (aten.index_select.default, ["0", 0, "1"], [(5, 4), 6], [None, 0], 0),
    "added, columns divided": (aten.index_add.default, ["0", 0, "2", "1"], [(5, 4), (6, 4), 6], [1, 1, None], 1),
    "put, columns divided": (aten.index_put.default, ["0", ["2"], "1", True], [(5, 4), (6, 4), 6], [1, 1, None], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_rows_by_index_are_parts_of_the_whole_result(case):
    target, args, sizes, cuts, along = CASES[case]
    torch.manual_seed(0)
    tensors = [
        torch.randint(0, 5, (size,)) if isinstance(size, int) else torch.randn(size, dtype=torch.float64)
        for size in sizes
    ]
    result, found = divided(target, args, tensors, cuts)
    dim = next(k for k, atoms in enumerate(result.dims) if any(atom.axis == "tp" for atom in atoms))
    assert dim == along and not result.partial
    assert torch.equal(torch.cat(found, dim), target(*_filled(args, tensors)))


@pytest.mark.parametrize(
    ("target", "args", "cuts", "sizes"),
    [
        (aten.index_select.default, ["0", 0, "1"], [0, None], [(4, 4), (6,)]),
        (aten.index_add.default, ["0", 0, "2", "1"], [None, 0, 0], [(4, 4), (6, 4), (6,)]),
        (aten.index_put.default, ["0", ["2"], "1", True], [None, 0, 0], [(4, 4), (6, 4), (6,)]),
        (aten.index_put.default, ["0", ["2"], "1", False], [1, 1, None], [(4, 4), (6, 4), (6,)]),
    ],
)
def test_divided_rows_and_values_that_replace_others_are_not_known(target, args, cuts, sizes):
    terms = Terms()
    held = [of_term(terms.make("input", [str(k)], size)) for k, size in enumerate(sizes)]
    held = [part(each, cut, 1, "tp", 2) if cut is not None else each for each, cut in zip(held, cuts, strict=True)]
    with pytest.raises(UntypedError):
        apply(terms, target, *RULES[target](*_filled(args, held)))
