"""Parameters get the gradients that autograd would give them, however one asks for them."""

from __future__ import annotations

import pytest

from tests import leaf_gradients
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "zero2", "ddp"])
def test_each_way_to_ask_for_gradients_gives_those_of_the_original_and_no_others(plan):
    for errors in on_ranks(leaf_gradients.errors_by_way, 2, args=(plan,)):
        assert set(errors) == {way.__name__ for way in leaf_gradients.WAYS}
        assert {way: error for way, error in errors.items() if isinstance(error, str) or not error < 1e-12} == {}
