"""Operations along one dimension of what two divided layers have between them, counted from the front or the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardgraph

_ORDER = torch.tensor([5, 2, 9, 0, 7, 1, 15, 3, 12, 4, 11, 6, 8, 14, 10, 13])

ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumprod": lambda x, dim: (0.1 * x + 1).cumprod(dim),
    "cummax": lambda x, dim: x.cummax(dim).values,
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "any": lambda x, dim: x * (x > 0.5).any(dim, keepdim=True),
    "all": lambda x, dim: x * (x > -0.5).all(dim, keepdim=True),
    "count": lambda x, dim: x * (x > 0).sum(dim, keepdim=True),
    "sort": lambda x, dim: x.sort(dim).values,
    "topk": lambda x, dim: x - x.topk(2, dim).values.sum(dim, keepdim=True),
    "argmax": lambda x, dim: x * x.argmax(dim, keepdim=True),
    "largest": lambda x, dim: x - x.amax(dim, keepdim=True),
    "softmax": lambda x, dim: x.softmax(dim),
    "norm": lambda x, dim: x / x.norm(dim=dim, keepdim=True),
    "variance": lambda x, dim: x / x.var(dim, keepdim=True),
    "product": lambda x, dim: x * (0.1 * x + 1).prod(dim, keepdim=True),
    "gather": lambda x, dim: x.gather(dim, _ORDER[: x.shape[dim]].argsort().expand_as(x) if dim % 2 else _rows(x)),
    "index_select": lambda x, dim: x.index_select(dim, _ORDER[: x.shape[dim]].argsort()),
    "index_fill": lambda x, dim: x.index_fill(dim, torch.tensor([1, 3]), 0.0),
    "select": lambda x, dim: x * x.select(dim, 3).unsqueeze(dim),
    "roll": lambda x, dim: x.roll(3, dim),
    "flip": lambda x, dim: x.flip(dim),
}


def _rows(x: Tensor) -> Tensor:
    return torch.arange(len(x)).flip(0).unsqueeze(1).expand_as(x)


class Along(nn.Module):
    """A function of a hidden layer along a dimension."""

    def __init__(self, function: Callable[[Tensor, int], Tensor], dim: int) -> None:
        super().__init__()
        self.up, self.down, self.function, self.dim = nn.Linear(8, 16, False), nn.Linear(16, 8), function, dim

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x), self.dim)).square().mean()


@pytest.mark.quick("cumsum--1", "any--1", "any-0")
@pytest.mark.parametrize("dim", [-1, 1, -2, 0])
@pytest.mark.parametrize("name", ALONG)
def test_an_operation_along_a_dimension_is_that_of_the_whole_tensor(name, dim):
    torch.manual_seed(0)
    report = shardgraph.verify(Along(ALONG[name], dim).double(), (torch.randn(4, 8).double(),), "tp", mesh={"tp": 2})
    assert report.ok, str(report)
