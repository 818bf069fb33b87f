"""Values of nodes: an operation runs once for operands of one layout, and its results are made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardgraph.ir import buckets
from shardgraph.ir.fake_values import Propagation, layout_of
from shardgraph.torch_api import FakeTensorMode

aten = torch.ops.aten


@pytest.fixture
def values() -> Propagation:
    return Propagation(FakeTensorMode(), (("dp", 2),))


def node(values: Propagation, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    made = fx.Graph().placeholder("x")
    made.meta["val"] = values.empty(shape, torch.empty(0, dtype=dtype))
    return made


def memory(value: Any) -> int:
    return value.untyped_storage()._cdata


def test_an_equal_operation_has_an_equal_result_in_memory_of_its_own(values):
    one, other = (values.value(aten.mul.Tensor, (node(values, 4, 6), 2.0), {}) for _ in range(2))
    assert layout_of(one) == layout_of(other) and memory(one) != memory(other)


def test_a_view_is_in_the_memory_of_its_operand(values):
    for operand in (node(values, 4, 6), node(values, 4, 6)):
        view = values.value(aten.slice.Tensor, (operand, 0, 1, 3), {})
        assert memory(view) == memory(operand.meta["val"]) and view.storage_offset() == 6


@pytest.mark.parametrize("other", [(8, 6), (4, 3)])
def test_operands_of_another_shape_have_their_own_result(values, other):
    values.value(aten.sum.dim_IntList, (node(values, 4, 6), [0]), {})
    assert values.value(aten.sum.dim_IntList, (node(values, *other), [0]), {}).shape == (other[1],)


def test_numbers_of_another_type_have_their_own_result(values):
    whole = values.value(aten.mul.Tensor, (node(values, 4, dtype=torch.int64), 1), {})
    real = values.value(aten.mul.Tensor, (node(values, 4, dtype=torch.int64), 1.0), {})
    assert (whole.dtype, real.dtype) == (torch.int64, torch.float32)


def test_operands_that_share_memory_are_not_like_those_that_do_not(values):
    """A sum in place is in the memory of the first operand, whether the second is another one or not."""
    one, other = node(values, 4), node(values, 4)
    apart = values.value(aten.add_.Tensor, (one, other), {})
    together = values.value(aten.add_.Tensor, (other, other), {})
    assert memory(apart) == memory(one.meta["val"]) and memory(together) == memory(other.meta["val"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("arrange", "operands", "options"),
    [
        (buckets.pack, [(4, 3), (2,)], 1),
        (buckets.pack, [(4, 3), (2,)], 2),
        (buckets.unpack, (14,), [(4, 3), (2,)]),
        (buckets.unpack_parts, (14,), ([(4, 3), (2,)], 2)),
        (buckets.unpack_parts, (14,), ([(4, 3), (2,)], 1)),  # views: one part is in place
    ],
)
def test_what_is_arranged_lies_as_the_operation_itself_lays_it(values, arrange, operands, options, device):
    with values.fake_mode:
        several = isinstance(operands, list)
        tensors = [torch.empty(shape, device=device) for shape in (operands if several else [operands])]
        args = (tensors if several else tensors[0], *(options if isinstance(options, tuple) else (options,)))
        expected = tree_leaves(arrange(*args))
    made = tree_leaves(values.value(arrange, args, {}))
    assert layout_of(made) == layout_of(expected) and {each.fake_mode for each in made} == {values.fake_mode}
    assert [memory(each) == memory(tensors[0]) for each in made] == [
        memory(each) == memory(tensors[0]) for each in expected
    ]
    assert [each.storage_offset() for each in made] == [each.storage_offset() for each in expected]
    with values.fake_mode:
        assert (made[0] + 1).device == torch.device(device)
