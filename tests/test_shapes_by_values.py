"""Shapes that depend on values of inputs are those of the call, and another value is another program."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.capture import capture

MASK, REPEATS = torch.tensor([True, False, True, True]), torch.tensor([2, 0, 1, 3])
SIZES = torch.tensor([[2, 2], [1, 4]])


class Rows(nn.Module):
    """What a function makes of a layer's four rows and an input."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), given).square().mean()


def written(y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = 2 * y
    z[mask, :] = 3 * y[mask, :]
    return z


def in_groups(y: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    groups = [(key, len(list(each))) for key, each in itertools.groupby(enumerate(given.tolist()), lambda x: x[1] > 1)]
    return torch.cat([part * (1 + key) for (key, _), part in zip(groups, y.split([n for _, n in groups]), strict=True)])


CASES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], torch.Tensor]] = {
    "rows of a mask": (lambda y, mask: y[mask], MASK),
    "a mask among other indices": (lambda y, mask: y[None, mask, 1:], MASK),
    "columns of a mask": (lambda y, mask: y[:, mask], MASK),
    "a mask of two dimensions": (lambda y, mask: y[mask[:, None] & mask], MASK),
    "masked_select": (lambda y, mask: y.masked_select(mask), MASK),
    "nonzero": (lambda y, mask: y[mask.nonzero()[:, 0]], MASK),
    "nonzero as a tuple": (lambda y, mask: y[torch.nonzero(mask, as_tuple=True)], MASK),
    "argwhere": (lambda y, mask: y[torch.argwhere(mask).squeeze(1)], MASK),
    "where of a condition alone": (lambda y, mask: y[torch.where(mask)[0]], MASK),
    "what is written where a mask is": (written, MASK),
    "rows repeated": (lambda y, times: y.repeat_interleave(times, dim=0), REPEATS),
    "rows repeated by a function": (lambda y, times: torch.repeat_interleave(y, times, 0), REPEATS),
    "numbers repeated": (lambda y, times: y[torch.repeat_interleave(times)], REPEATS),
    "all rows as often": (lambda y, times: y.repeat_interleave(times[:1], dim=0), REPEATS),
    "unique": (lambda y, rows: y[rows.unique()], REPEATS),
    "unique_consecutive": (lambda y, rows: y[torch.unique_consecutive(rows)], REPEATS),
    "a view of sizes": (lambda y, sizes: y.view(sizes[0][0], sizes[0][1], 4), SIZES),
    "parts by sizes": (lambda y, sizes: y.split([sizes[0, 0], sizes[0, 1]])[0], SIZES),
    "parts by differences of offsets": (
        lambda y, sizes: torch.cat([2 * part for part in y.split(torch.cat([sizes[0] * 0, sizes[0]]).tolist())]),
        SIZES,
    ),
    "zeros of a size": (lambda y, sizes: y.sum() + torch.ones(sizes[0, 0], 3), SIZES),
    "a slice to a size": (lambda y, sizes: y[: sizes[0, 0]], SIZES),
    "rows in groups": (in_groups, REPEATS),
}


@pytest.mark.parametrize("case", CASES)
def test_a_shape_that_inputs_decide_is_that_of_each_call(case):
    function, given = CASES[case]
    torch.manual_seed(0)
    model, x = Rows(function), torch.randn(4, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    for value in (given, given.flip(0)):
        model.zero_grad(), sharded.zero_grad()
        try:
            expected = model(x, value)
        except RuntimeError:
            continue  # sizes that are not those of the rows
        loss = sharded(x, value)
        torch.testing.assert_close(loss, expected)
        expected.backward(), loss.backward()
        torch.testing.assert_close(sharded.layer.weight.grad, model.layer.weight.grad)


def test_a_shape_that_parameters_decide_is_refused():
    model = Rows(lambda y, mask: y[(y[:, 0] > 0) & mask])
    with pytest.raises(shardgraph.CaptureError, match=r"whose shape depends on values, at .*test_shapes_by_values"):
        shardgraph.compile(model, "single", example_inputs=(torch.ones(4, 4), MASK), progress=False)


def test_rows_of_a_mask_are_sharded():
    model = Rows(lambda y, mask: y[mask].tanh())
    report = shardgraph.verify(model, (torch.randn(8, 4), MASK.repeat(2)), "fsdp")
    assert report.ok, str(report)


def test_where_parts_of_a_batch_decide_otherwise_each_rank_has_the_whole_batch():
    model = Rows(lambda y, mask: y[mask].tanh())
    report = shardgraph.verify(model, (torch.randn(4, 4), MASK), "fsdp")
    assert report.ok and "the whole batch, of whose parts forward takes other ways" in str(report), str(report)


class Remembering(nn.Module):
    """It keeps what it makes of its input's values, and asks for them at the next call too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        starts = [sum(lengths.tolist()[:i]) for i in range(len(lengths))]
        self.last = torch.tensor([lengths[0] - start for start in starts]).unsqueeze(1)
        return torch.cat([part.sum(0) for part in self.layer(x).split(lengths.tolist())]).sum() + self.last.sum()


def test_an_attribute_is_set_to_what_values_of_inputs_give():
    model = Remembering()
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    for lengths in (torch.tensor([1, 3]), torch.tensor([2, 2]), torch.tensor([1, 3])):
        x = torch.randn(4, 4)
        torch.testing.assert_close(sharded(x, lengths), model(x, lengths))
        assert torch.equal(sharded.original.last, model.last)


@pytest.fixture
def lengths(monkeypatch) -> list[int]:
    """How many layers each model had that was traced."""
    traced, found = capture._traced, list[int]()
    monkeypatch.setattr(capture, "_traced", lambda few, asked: (found.append(len(few.layers)), traced(few, asked))[1])
    return found


class Deep(nn.Module):
    """Layers behind a check and a value of an input."""

    def __init__(self, layers: int, check: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.check = check

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if self.check == "torch's":
            torch._check_tensor_all(given < 4)
        elif self.check == "a branch":
            if (given >= 4).any():
                raise ValueError("too large")
        elif self.check == "a value":
            x = x[: given.max()]
        for i, layer in enumerate(self.layers):
            if self.check == "in a layer" and given[0] > 0:
                x = x + 1
            if self.check == "by number" and given[0] > i:
                x = x + 1
            x = layer(x).tanh()
        return x.sum()


@pytest.mark.parametrize("check", ["torch's", "a branch", "a value", "in a layer", "by number"])
def test_layers_behind_values_of_inputs_are_traced_once_where_they_do_the_same(check, lengths):
    model, x = Deep(12, check), torch.randn(4, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    for first in (3, 2):
        given = torch.tensor([first, 0, 1])
        torch.testing.assert_close(sharded(x, given), model(x, given))
    assert (12 in lengths) == (check == "by number")


@pytest.mark.parametrize("check", ["torch's", "a branch"])
def test_a_check_of_values_is_made_at_each_call_and_needs_none_to_be_analysed(check):
    model, x, given = Deep(3, check), torch.randn(4, 4), torch.tensor([3, 0, 1])
    sharded = shardgraph.compile(model, "single", progress=False)
    sharded(x, given)
    with pytest.raises(shardgraph.ModelCheckError, match="check"):
        sharded(x, given + 1)
    call = (x.to("meta"), given.to("meta"))
    assert shardgraph.analyze(Deep(12, check), call, plan="single", cluster="H100").peak_memory > 0


class Keeping(nn.Module):
    """It keeps a tensor that it computes before, behind or in its layers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers, self.where = nn.ModuleList(nn.Linear(4, 4) for _ in range(12)), where
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.where == "before":
            self.kept = x.cumsum(0) * length
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if self.where == "in the last layer" and number == 11:
                self.kept = x
        if self.where == "behind":
            self.kept = 2 * x.sum(0)
        return x[:length].sum(), x


@pytest.mark.parametrize("where", ["before", "behind", "in the last layer"])
def test_layers_are_traced_once_where_forward_keeps_tensors_outside_of_them(where, lengths):
    model = Keeping(where)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    for length in map(torch.tensor, (3, 2, 3)):
        x = torch.randn(4, 4)
        results, expected = sharded(x, length), model(x, length)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(sharded.original.kept, model.kept)
        results[0].backward(), expected[0].backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert (12 in lengths) == (where == "in the last layer")


class Counting(nn.Module):
    """Its last layer but one gives the result, of as many as its configuration says, the others None."""

    class Config:
        num_hidden_layers = 12

    def __init__(self) -> None:
        super().__init__()
        self.config, self.layers = self.Config(), nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.config.num_hidden_layers = 12

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        chosen, states = self.config.num_hidden_layers - 2, []
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            states.append(x if number == chosen else None)
        return {"loss": states[-2].sum(), "states": states}


def test_layers_that_a_configuration_counts_are_traced_once(lengths):
    model, x = Counting(), torch.randn(2, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    result, expected = sharded(x), model(x)
    assert [state is None for state in result["states"]] == [state is None for state in expected["states"]]
    torch.testing.assert_close(result["states"][-2], expected["states"][-2])
    result["loss"].backward(), expected["loss"].backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert 12 not in lengths


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.tanh else result


class Within(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return torch.tanh(super().forward(x))


class Entering(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Doubling().__enter__()
        return torch.tanh(super().forward(x))


def test_a_mode_of_functions_that_forward_leaves_again_is_part_of_the_program():
    model, x = Within(4, 4), torch.randn(2, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    torch.testing.assert_close(sharded(x), model(x))


def test_a_mode_of_functions_that_forward_does_not_leave_is_refused():
    before = torch._C._len_torch_function_stack()
    try:
        with pytest.raises(shardgraph.CaptureError, match=r"enters a mode of functions .* does not leave it"):
            shardgraph.compile(Entering(4, 4), "single", example_inputs=(torch.randn(2, 4),), progress=False)
    finally:
        while torch._C._len_torch_function_stack() > before:
            torch._C._pop_torch_function_stack()
