"""Norms of gradients of every order and clipping by them, whatever lies where, beside the unsharded model's."""

from __future__ import annotations

import math

import pytest

from tests import clipping
from tests.clipping import Case, Found
from tests.standing import on_ranks

DATA: list[Case] = [
    ("odd-mlp", "ddp", {"dp": 4}),
    ("odd-mlp", "zero1", {"dp": 4}),
    ("odd-mlp", "zero2", {"dp": 4}),
    ("odd-mlp", "fsdp", {"dp": 4}),  # three rows on four ranks
    ("odd-mlp", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
]
DIVIDED: list[Case] = [("gpt2", "fsdp+tp", {"dp": 2, "tp": 2})]
FURTHER: list[Case] = [("tied-transformer", "tp", {"tp": 4}), ("mixture", "fsdp+ep", {"dp": 2, "ep": 2})]
STAGES: list[Case] = [
    ("unet", "pp", {"pp": 4}),
    ("odd-mlp", "pp+fsdp", {"pp": 2, "dp": 2}),
    ("gpt2", "pp+tp", {"pp": 2, "tp": 2}),  # whose first and last stage share a weight
]


def check(found: list[list[Found]], what: str) -> None:
    """Every rank has the unsharded model's norm of each order and its clipped gradients."""
    for rank, results in enumerate(found):
        for order, (norm, expected, worst) in zip(clipping.ORDERS, results, strict=False):
            where = f"{what}, order {order}, rank {rank}"
            assert norm == pytest.approx(expected, rel=1e-6, abs=1e-12) and expected >= 0, where
            assert worst < 1e-6 * clipping.MAX_NORM, where


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "cases",
    [DATA, DIVIDED, STAGES, FURTHER],
    ids=["data", "divided operators", "stages", "operators and experts"],
)
def test_clipping_by_any_order_is_that_of_the_unsharded_model(cases):
    found = on_ranks(clipping.clipped, 4, args=(cases, ("ddp", "fsdp+tp")))
    for what in found[0]:
        check([each[what] for each in found], what)


@pytest.mark.timeout(280)
def test_parameters_of_several_meshes_are_clipped_in_one_call():
    cases = [DATA[3], DATA[4]]
    check(on_ranks(clipping.clipped_together, 4, args=(cases,)), "two meshes")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2})])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_an_error_on_all_if_asked(plan, mesh):
    values = [math.nan, math.inf]
    for found in on_ranks(clipping.not_finite, 2, args=(plan, mesh, values)):
        for value, (*norms, raised) in zip(values, found, strict=True):
            assert raised and all(norm == value or (math.isnan(norm) and math.isnan(value)) for norm in norms)
