"""Shards of a bucket lie side by side: a gather reads them where they are, and never what is stale."""

from __future__ import annotations

import pytest
import torch

from shardgraph.ir import buckets
from shardgraph.runtime.side_by_side import together, view_of
from tests import stored
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


def test_shards_are_in_one_buffer_which_is_gathered_without_a_copy():
    first, second = on_ranks(stored.side_by_side, 2)
    assert first["storages before"] == 6  # the last bias has one element, and all are divided
    for facts in (first, second):
        assert facts["storages"] == 1
        assert facts["the same tensors"]
        assert facts["packed"] == 0
        assert facts["error"] < 1e-12


@pytest.mark.parametrize("how", ["set_", "data", "load"])
def test_a_shard_that_is_moved_or_changed_later_is_gathered_as_it_is_now(how):
    for facts in on_ranks(stored.moved_later, 2, args=(how,)):
        assert facts["error"] < 1e-12
        assert facts["storages"] == (1 if how == "load" else 2)


def test_a_state_dict_of_before_the_first_call_stays_that_of_the_parameters():
    for facts in on_ranks(stored.held_elsewhere, 2):
        assert facts["error"] < 1e-12
        assert facts["same"]


def test_what_does_not_lie_side_by_side_is_packed():
    flat = torch.arange(20.0)
    a, b, c = flat[2:6].view(2, 2), flat[6:9], flat[10:15]
    assert together([a, b], [4, 4]).data_ptr() == a.data_ptr()
    assert torch.equal(together([a, b], [4, 3]), buckets.pack([a, b], 1))
    assert together([a, b, c], [4, 4, 5]).data_ptr() == a.data_ptr()
    assert together([flat[:0], a, b], [2, 4, 3]).data_ptr() == flat.data_ptr()  # a rank's shard may be empty
    for tensors, elements in [
        ([b, a], [3, 4]),  # in another order
        ([a, b, c], [4, 3, 5]),  # with a gap
        ([a, b, c], [4, 4, 11]),  # beyond the end
        ([a.t(), b], [4, 3]),  # not contiguous
    ]:
        assert view_of(tensors, elements) is None
        padded = [
            torch.cat([t.reshape(-1), t.new_zeros(n - t.numel())]) for t, n in zip(tensors, elements, strict=True)
        ]
        assert torch.equal(together(tensors, elements), torch.cat(padded))
