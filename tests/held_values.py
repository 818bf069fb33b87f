"""What a ``Held`` says that each rank has, as tensors: the meaning that the rules of the proof are tested against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardgraph.proof.held import Held
from shardgraph.proof.terms import Dims, Term, View


class Values:
    """The value of every term on every rank of a mesh; of a term that varies along data, that of the rank's batch."""

    def __init__(self, mesh: dict[str, int]) -> None:
        self.mesh = mesh
        self.ranks = [
            dict(zip(mesh, at, strict=True)) for at in itertools.product(*(range(size) for size in mesh.values()))
        ]
        self._known: dict[Term, list[Tensor]] = {}

    def number(self, rank: dict[str, int], **changed: int) -> int:
        """The position of a rank, at other coordinates."""
        return self.ranks.index({**rank, **changed})

    def along(self, rank: dict[str, int], axis: str) -> list[int]:
        """The ranks of a group."""
        return [self.number(rank, **{axis: index}) for index in range(self.mesh[axis])]

    def give(self, term: Term, values: list[Tensor]) -> None:
        """Say what a term is."""
        self._known[term] = values

    def learn(self, held: Held, values: list[Tensor]) -> None:
        """Say what the term is of which ranks have ``values``, whole; if it is known, they are only to be compared."""
        whole = len(
            {*self._picked([_places(held.term)] * len(self.ranks), held.dims, self.ranks[0]).flatten().tolist()}
        )
        if self.of(held.term) is None and held.factor and whole == math.prod(held.term.shape):
            self._known[held.term] = [self._scattered(held, value) for value in values]

    def _scattered(self, held: Held, value: Tensor) -> Tensor:
        dtype = torch.float64 if value.is_floating_point() else value.dtype
        result = torch.zeros(held.term.shape, dtype=dtype).flatten()
        where = self._picked([_places(held.term)] * len(self.ranks), held.dims, self.ranks[0])
        result[where.flatten()] = (value if held.factor == 1 else value / held.factor).to(dtype).flatten()
        return result.reshape(held.term.shape)

    def of(self, term: Term) -> list[Tensor] | None:
        """The value of a term on every rank, or None if nobody has said it."""
        if term not in self._known:
            meaning = self._meaning(term)
            if meaning is None:
                return None
            self._known[term] = meaning
        return self._known[term]

    def _meaning(self, term: Term) -> list[Tensor] | None:
        """Terms that no operation has alone."""
        if term.operation == "one":
            return [torch.tensor(float(*term.operands or [1]), dtype=torch.float64) for _ in self.ranks]
        if term.operation == "sum over batches":
            view, axes = term.operands
            return self.held(Held(view.term, view.factor, view.dims, summed=frozenset(axes)))
        if term.operation == "padded rows":
            view, own, rows = term.operands
            values = self.viewed(view)
            if values is None:
                return None
            blocks = [value.unflatten(0, (-1, own)) for value in values]
            return [torch.cat([b, b.new_zeros(b.shape[0], rows - own, *b.shape[2:])], 1).flatten(0, 1) for b in blocks]
        return None

    def viewed(self, view: View) -> list[Tensor] | None:
        """A whole value on every rank."""
        return self.held(Held(view.term, view.factor, view.dims))

    def held(self, held: Held) -> list[Tensor] | None:
        """What each rank has, after the sum or maximum along the axes along which it is partial."""
        values = self.of(held.term)
        if values is None:
            return None
        for axis in held.summed:
            values = [sum(values[other] for other in self.along(rank, axis)) for rank in self.ranks]
        local = [self._picked(values, held.dims, rank) for rank in self.ranks]
        return local if held.factor == 1 else [value * held.factor for value in local]

    def _picked(self, values: Sequence[Tensor], dims: Dims, rank: dict[str, int]) -> Tensor:
        """The elements of which each dimension's digits are the index."""
        shape = [math.prod(atom.size for atom in dim if atom.axis is None) for dim in dims]
        index: dict[int | str, Tensor] = {k: torch.zeros(shape, dtype=torch.long) for k in range(values[0].dim())}
        index |= {axis: torch.full(shape, at) for axis, at in rank.items()}
        for k, dim in enumerate(dims):
            place = torch.arange(shape[k]).reshape([-1 if j == k else 1 for j in range(len(dims))])
            for atom in reversed(dim):
                if atom.axis is None:
                    digit, place = place % atom.size, place // atom.size
                else:
                    digit = torch.tensor(rank[atom.axis])
                if isinstance(atom.source, str):
                    index[atom.source] = digit.expand(shape)
                elif atom.source is not None:
                    index[atom.source] = index[atom.source] + digit * atom.stride
        batch = torch.zeros(shape, dtype=torch.long)
        for axis, size in self.mesh.items():
            batch = batch * size + index[axis]
        return torch.stack(list(values))[(batch, *(index[k] for k in range(values[0].dim())))]

    def combined(self, held: Held, local: Sequence[Tensor]) -> list[Tensor]:
        """What ranks have, summed or maximized along the axes along which it is partial."""
        for axis, how in held.partial:
            groups = [torch.stack([local[other] for other in self.along(rank, axis)]) for rank in self.ranks]
            local = [{"sum": g.sum, "max": g.amax, "min": g.amin}[how](0) for g in groups]
        return list(local)

    def placed(self, held: Held, seed: int) -> list[Tensor]:
        """Tensors that ranks may have: random summands, or numbers below the maximum, where a value is partial."""
        local = self.held(held)
        assert local is not None and len(held.partial) <= 1
        for axis, how in held.partial:
            noise = [self._noise(held, rank, seed, local[0].shape) for rank in self.ranks]
            groups = [self.along(rank, axis) for rank in self.ranks]
            if how == "sum":
                others = [sum(noise[other] for other in group) for group in groups]
                local = [
                    mine if rank[axis] else value - (rest - mine)
                    for rank, value, mine, rest in zip(self.ranks, local, noise, others, strict=True)
                ]
            else:
                first = seed % self.mesh[axis]  # the rank that has the extremum
                local = [
                    value if rank[axis] == first else value - mine.abs()
                    for rank, value, mine in zip(self.ranks, local, noise, strict=True)
                ]
        return local

    def _noise(self, held: Held, rank: dict[str, int], seed: int, shape: Sequence[int]) -> Tensor:
        """Numbers of the rank's own, equal on ranks that differ only along axes along which the value does not."""
        at = [rank[axis] if held.on(axis) else 0 for axis in self.mesh]
        random = torch.Generator().manual_seed(hash((seed, *at)) % 2**32)
        return torch.randn(tuple(shape), generator=random, dtype=torch.float64)

    def alike(self, held: Held, local: Sequence[Tensor]) -> bool:
        """Whether ranks that differ only along axes along which the value does not have equal tensors."""
        first = {}
        for rank, value in zip(self.ranks, local, strict=True):
            at = tuple(rank[axis] for axis in self.mesh if held.on(axis))
            if not torch.allclose(first.setdefault(at, value), value, equal_nan=True):
                return False
        return True


def _places(term: Term) -> Tensor:
    """The number of each element."""
    return torch.arange(math.prod(term.shape)).reshape(term.shape)
