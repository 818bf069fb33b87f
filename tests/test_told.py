"""What cannot be, where it is found late: in the second call of a model, with the ranks that run, in a pipeline."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.errors import CaptureError, CheckpointError, PlanError, ShardGraphError
from shardgraph.module.optimizer_state import sharded_state
from tests.standing import on_ranks
from tests.zoo import Deep


class Once(nn.Module):
    """Takes a number from a list, which has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(4, 4), [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, self.left = self.left[0], self.left[1:]
        return self.layer(x) * first


def test_a_model_whose_next_call_fails_is_refused_with_its_error():
    with pytest.raises(CaptureError, match=r"its next call fails then: IndexError: list index out of range"):
        shardgraph.compile(Once(), "single", example_inputs=torch.ones(2, 4), progress=False)


class Beside(nn.Module):
    """Adds two rows for each row of the batch, which a pipeline does not know to be of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).repeat(2, 1) + pairs).square().mean()


def test_an_input_that_is_not_cut_with_the_batch_is_told_with_what_to_give():
    with pytest.raises(CaptureError, match=r"(?s)the whole of inputs .*16, 4.* may be: give that one rows"):
        shardgraph.analyze(Beside(), (torch.ones(8, 4), torch.ones(16, 4)), "pp", mesh={"pp": 2}, cluster="H100")


def test_a_model_inside_of_data_parallel_is_refused_with_what_to_compile():
    with pytest.raises(ShardGraphError, match=r"DataParallel divides or replicates .* compile the module inside of it"):
        shardgraph.compile(nn.DataParallel(nn.Linear(4, 4)), "single")


def test_a_mesh_without_ranks_is_told_how_to_start_them():
    with pytest.raises(PlanError, match=r"needs 2 ranks and there is no process group: start with shardgraph\.launch"):
        shardgraph.compile(nn.Linear(4, 4), "fsdp", mesh={"dp": 2})


def said_on_two_ranks() -> dict[str, str]:
    """What is said of meshes that are not of two ranks, of a pipeline's one graph, and of draws inside of join()."""

    def said(of: object) -> str:
        with pytest.raises(ShardGraphError) as error:
            of()
        return str(error.value)

    x = torch.ones(4, 32)
    piped = shardgraph.compile(Deep(2), "pp", example_inputs=x, progress=False)
    drawn = shardgraph.compile(nn.Sequential(nn.Linear(32, 4), nn.Dropout()), "ddp", random="samples", progress=False)

    def joined() -> None:
        with drawn.join():
            drawn(x)

    return {
        "another size": said(lambda: shardgraph.compile(nn.Linear(4, 4), "fsdp", mesh={"dp": 3})),
        "one node": said(lambda: shardgraph.compile(nn.Linear(4, 4), "hsdp")),
        "one graph": said(lambda: piped.forward_graph),
        "draws": said(joined),
    }


def test_ranks_are_told_what_they_cannot_be_or_do():
    for said in on_ranks(said_on_two_ranks):
        assert "is for 3 ranks and 2 are running: axis sizes must multiply to 2" in said["another size"]
        assert "say how to divide them, such as mesh={'dp_replicate': 2, 'dp_shard': 1}" in said["one node"]
        assert "a pipeline has a forward graph for every stage: sharded.program.stages[i]" in said["one graph"]
        assert "compile with random='ranks'" in said["draws"]


def test_a_state_of_other_groups_is_refused_with_both():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [layer.weight]}, {"params": [layer.bias]}])
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, and this optimizer has groups of \[1, 1\]"):
        sharded_state(optimizer, {"state": {}, "param_groups": [{"params": [0, 1]}]})


class Prints(nn.Module):
    """Shows what it computes, as one does to look for a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        print(y.shape)
        return y


class Times(Prints):
    """Measures itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        return self.layer(x) * (1 + 0 * start)


class Waits(Prints):
    """Waits for a GPU, as one does to measure."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        torch.cuda.synchronize()
        return y


class Branches(Prints):
    """Decides by the value of an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if float(y.sum()) > 0 else y.relu()


class Assigns(Prints):
    """Doubles an activation behind the back of autograd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y.data = 2 * y.data
        return y


def refused(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as error:
        shardgraph.compile(model, "single", example_inputs=torch.ones(2, 4), progress=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "function", "line"), [(Prints(), "print", "print(y.shape)"), (Times(), "time.perf_counter", "start = ")]
)
def test_what_prints_or_measures_in_forward_is_told_with_its_line_and_where_it_can_be(
    model: nn.Module, function: str, line: str
):
    said = refused(model)
    assert f"forward calls {function}, which is no operation of torch" in said and line in said
    assert "a forward hook of the compiled module" in said
    assert "PyTorch" not in said and "_dynamo" not in said  # what torch's tracer advises those who work on it


def test_a_wait_for_the_device_in_forward_is_refused_with_its_line():
    assert "synchronize" in (said := refused(Waits())) and "leave it out of forward" in said and "test_told.py:" in said


def test_an_assignment_to_data_in_forward_is_refused_with_what_to_write():
    said = refused(Assigns())
    assert "y.copy_(other)" in said and "test_told.py:" in said and "torch.compile" not in said


def test_a_model_without_a_place_for_a_cut_is_told_so():
    with pytest.raises(PlanError, match=r"2 stages take 1 cuts .* the model has none: use fewer ranks along 'pp'"):
        shardgraph.analyze(nn.Linear(4, 4), torch.ones(8, 4), "pp", mesh={"pp": 2}, cluster="H100")


def test_a_branch_is_refused_without_the_checks_of_torch_that_are_refused_too():
    said = refused(Branches())
    assert "torch._check" not in said and "torch.where" in said
