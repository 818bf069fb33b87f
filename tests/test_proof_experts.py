"""Rules of the operations around experts, computed whole and by parts in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from shardgraph.proof.definitions import DEFINED
from shardgraph.proof.held import UntypedError, of_term
from shardgraph.proof.labels import apply
from shardgraph.proof.rules import RULES
from shardgraph.proof.shards import part
from shardgraph.proof.terms import Terms
from shardgraph.proof.typing import Typing

aten = torch.ops.aten


def divided(target: Any, args: list[Any], tensors: list[torch.Tensor], cuts: list[int | None]) -> tuple[Any, Any]:
    """How two ranks hold the result by the rule, and what they compute, of tensors cut along ``cuts``."""
    terms = Terms()
    held = [of_term(terms.make("input", [str(k)], tensor.shape)) for k, tensor in enumerate(tensors)]
    held = [part(each, cut, 1, "tp", 2) if cut is not None else each for each, cut in zip(held, cuts, strict=True)]
    result = _typed(terms, target, _filled(args, held))
    ranks = [
        [each if cut is None else each.chunk(2, cut)[rank] for each, cut in zip(tensors, cuts, strict=True)]
        for rank in range(2)
    ]
    return result, [target(*_filled(args, own)) for own in ranks]


def _typed(terms: Terms, target: Any, args: list[Any]) -> Any:
    typing, graph = Typing(terms, {"tp": 2}.__getitem__, frozenset()), fx.Graph()
    if target in DEFINED:
        return DEFINED[target](typing, graph.call_function(target), *args)
    (result,) = apply(terms, target, *RULES[target](*args))
    return result


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


def test_a_product_of_own_experts_with_their_bias_is_the_part_of_all_experts_product():
    typing, node = Typing(Terms(), {"ep": 2}.__getitem__, frozenset()), fx.Graph().placeholder("x")
    sizes = [(4, 1, 5), (4, 6, 3), (4, 3, 5)]
    held = [of_term(typing.terms.make("input", [str(k)], size)) for k, size in enumerate(sizes)]
    numbers = {"beta": 0.5, "alpha": 2.0}
    defined = DEFINED[aten.baddbmm.default]
    whole = defined(typing, node, *held, **numbers)
    found = defined(typing, node, *(part(each, 0, 1, "ep", 2) for each in held), **numbers)
    assert found == part(whole, 0, 1, "ep", 2)

    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    ranks = [torch.baddbmm(*own, **numbers) for own in zip(*(each.chunk(2) for each in tensors), strict=True)]
    assert torch.allclose(torch.cat(ranks), torch.baddbmm(*tensors, **numbers), rtol=1e-12)


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
        _typed(terms, target, _filled(args, held))
