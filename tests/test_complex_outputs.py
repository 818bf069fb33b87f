"""Outputs that are views of complex tensors, whose values are not those of their memory."""

import copy

import pytest
import torch
from torch import nn

import shardgraph
from tests.ranks import whole

X = torch.randn(2, 4)


class Transforms(nn.Module):
    def __init__(self, returned) -> None:
        super().__init__()
        self.linear, self.filter, self.returned = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), returned

    def forward(self, x: torch.Tensor):
        return self.returned(torch.fft.fft(self.linear(x)) * self.filter)


RETURNED = {
    "the real part of an inverse": lambda z: torch.fft.ifft(z).real,
    "both parts": lambda z: (z.real, z.imag),
    "as real": lambda z: (torch.view_as_real(z), z),
    "beside its conjugate": lambda z: (z.conj(), z),
    "the conjugate alone": lambda z: z.conj(),
    "parts of a conjugate": lambda z: (z.conj().imag, z.conj().real),
    "a row of a conjugate": lambda z: (z, z[1].conj()),
    "its negative imaginary part": lambda z: (z, z.conj().imag[:, 1:]),
    "bits": lambda z: (z.abs().view(torch.int32), z.abs()),
}


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_they_have_the_values_and_gradients_of_the_originals(returned):
    model = Transforms(returned)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    mine, theirs = sharded(X), model(X)
    torch.testing.assert_close(mine, theirs)
    for outputs in (mine, theirs):
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(part.abs().square().sum() for part in parts if part.requires_grad).backward()
    for parameter, original in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), original.grad)


def test_a_conjugate_shares_memory_with_what_it_is_of():
    sharded = shardgraph.compile(Transforms(RETURNED["beside its conjugate"]), "single")
    with torch.no_grad():
        conjugate, z = sharded(X)
        z.mul_(2)
    torch.testing.assert_close(conjugate.resolve_conj(), z.conj().resolve_conj())


def test_an_emitted_file_does_not_return_them(tmp_path):
    with pytest.raises(shardgraph.ShardGraphError, match="returns a view of a complex tensor"):
        shardgraph.emit(
            Transforms(RETURNED["both parts"]), tmp_path / "program", "fsdp", mesh={"dp": 2}, example_inputs=(X,)
        )
