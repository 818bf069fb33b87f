"""Python numbers among a module's inputs: as in the original, whether they change or not."""

import copy

import pytest
import torch
from torch import nn

import shardgraph


class Body(nn.Module):
    def __init__(self, body, dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.body = body

    def forward(self, x, n):
        return self.body(self.linear(x), n)


def compiled(body, dtype=torch.float32):
    torch.manual_seed(0)
    model = Body(body, dtype)
    return shardgraph.compile(copy.deepcopy(model), "single"), model, torch.randn(3, 4, dtype=dtype)


def same(mine, theirs) -> bool:
    if isinstance(theirs, tuple):
        return all(map(same, mine, theirs))
    if isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and mine.device == theirs.device and torch.equal(mine, theirs)
    return type(mine) is type(theirs) and mine == theirs


FLOATS = [0.1, 0.3, 2.7, 0.0]
INTS = [3, 1, 2**40 + 1]

BODIES = {
    "times a tensor": lambda h, n: h * n,
    "times a sum": lambda h, n: h.sum() * n,
    "plus integers": lambda h, n: (h > 0).long() + n,
    "arithmetic of its own": lambda h, n: h * (1 - n) + (h * 2) * n,
    "divides": lambda h, n: h / (n + 1.5),
    "divided": lambda h, n: n / (h.abs() + 1),
    "compared with a tensor": lambda h, n: torch.where(h > n, h, n),
    "decides a branch": lambda h, n: h if n > 2 else -h,
    "returned": lambda h, n: (h * n, n),
    "computed and returned": lambda h, n: (h, n + 1),
    "made a tensor": lambda h, n: h.double() * torch.tensor(n),
    "an exponent": lambda h, n: h.abs() ** n,
}


@pytest.mark.quick("a*-floats-dtype0", "[c-e]*-floats-dtype0", "*tensor-floats-dtype0", "divided-ints-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [FLOATS, INTS], ids=["floats", "ints"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_number_that_changes_computes_what_it_does_in_the_original(body, numbers, dtype):
    sharded, model, x = compiled(body, dtype)
    for n in numbers[:3]:
        assert same(sharded(x, n), model(x, n))


@pytest.mark.parametrize("body", [lambda h, n: h[n], lambda h, n: h.repeat(n + 1, 1)], ids=["index", "size"])
def test_an_index_or_a_size_that_changes_is_a_constant_of_each_program(body):
    sharded, model, x = compiled(body)
    for n in (0, 1, 2, 1):
        torch.testing.assert_close(sharded(x, n), model(x, n))
    assert len(sharded._programs.kept) == 3


@pytest.mark.parametrize("body", ["times a tensor", "times a sum", "arithmetic of its own", "divides"])
def test_values_of_a_float_that_changes_share_a_program(body):
    sharded, _, x = compiled(BODIES[body])
    for n in FLOATS:
        sharded(x, n)
    assert len(sharded._programs.kept) == 2  # of the first value, and of all


def test_gradients_are_those_of_the_original():
    sharded, model, x = compiled(BODIES["arithmetic of its own"], torch.float64)
    for n in FLOATS[:3]:
        for module in (sharded, model):
            module(x, n).sum().backward()
    assert torch.equal(sharded.linear.weight.grad, model.linear.weight.grad)


def test_numbers_of_equal_value_and_other_types_have_other_programs():
    sharded, model, x = compiled(lambda h, n: (h > 0).long() * n)
    for n in (1, 1.0, True):
        assert same(sharded(x, n), model(x, n))
    assert len(sharded._programs.kept) == 3


def test_a_tensor_in_the_place_of_a_number_has_a_program_of_its_own():
    sharded, model, x = compiled(lambda h, n: h.sum() * n)
    for n in (torch.tensor(0.5, dtype=torch.float64), 0.1, 0.3, torch.tensor(0.7, dtype=torch.float64), 0.2):
        assert same(sharded(x, n), model(x, n)), n


def test_a_number_that_is_not_a_number_is_compiled_once():
    sharded, _, x = compiled(lambda h, n: h * n)
    for _ in range(2):
        sharded(x, float("nan"))
    assert len(sharded._programs.kept) == 1
