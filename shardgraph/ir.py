"""The intermediate representation: an FX graph whose inputs and outputs know what they are.

Every placeholder carries ``meta["role"]`` and the output node carries ``meta["roles"]``, one entry per
returned value. A role says what a value *means* (a parameter by name, a gradient of it, a tangent),
so no code depends on positions. A captured parameter also has ``meta["stored"]``, the dtype in which it is kept between
steps; its value has the one that it is computed with. The same representation serves the joint graph and, after the
split, the forward and the backward graph. A placeholder whose value is in host memory has ``meta["host"]``; what else
is there follows (:mod:`shardgraph.passes.analysis.places`).

Until :mod:`shardgraph.bind` runs, a graph is the same text on every rank: groups are named by mesh axis and
what depends on the rank is written with the symbolic operations below. That is what makes
"all ranks issue the same collectives" a comparison of two strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardgraph.host import DIRECTIONS, WAIT_COPY

# -- roles -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """The parameter ``fqn`` (its local shard, once a pass has sharded it)."""

    fqn: str


@dataclass(frozen=True)
class Buffer:
    """The buffer ``fqn``, replicated on every rank."""

    fqn: str


@dataclass(frozen=True)
class Input:
    """The ``index``-th leaf of the flattened ``(args, kwargs)`` of a call."""

    index: int


@dataclass(frozen=True)
class Tangent:
    """The incoming gradient of the :class:`Output` of the same index."""

    index: int


@dataclass(frozen=True)
class Saved:
    """The ``index``-th value that forward keeps for backward."""

    index: int


@dataclass(frozen=True)
class Output:
    """The ``index``-th leaf of what the model returns."""

    index: int


@dataclass(frozen=True)
class IntermediateBase:
    """A hidden output, of which user outputs are views (``index`` counts the hidden ones)."""

    index: int


@dataclass(frozen=True)
class Mutation:
    """The new value of an input that the model writes in place."""

    of: Buffer | Input | Parameter


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter or of an input."""

    of: Parameter | Buffer | Input


@dataclass(frozen=True)
class Accumulated:
    """The unreduced gradient of a parameter, summed over earlier microbatches under ``no_sync``."""

    of: Parameter


@dataclass(frozen=True)
class Gathered:
    """The whole parameter ``fqn``, gathered once for all microbatches of a step."""

    fqn: str


@dataclass(frozen=True)
class Forwarded:
    """The ``index``-th value that a pipeline stage gives the next in forward: a result of the one, an input of the
    other."""

    index: int


@dataclass(frozen=True)
class Returned:
    """The ``index``-th value that a pipeline stage gives the one before in backward, where it is as a tangent."""

    index: int


Role = (
    Parameter
    | Buffer
    | Input
    | Tangent
    | Saved
    | Output
    | IntermediateBase
    | Mutation
    | Gradient
    | Accumulated
    | Gathered
    | Forwarded
    | Returned
)


def of_backward(role: Role | None) -> bool:
    """Whether an input or a result with this role is backward's and not forward's."""
    return isinstance(role, (Tangent, Gradient, Returned))


def placeholders(gm: fx.GraphModule) -> dict[Role, fx.Node]:
    """The graph's inputs by role, in calling order."""
    return {node.meta["role"]: node for node in gm.graph.nodes if node.op == "placeholder"}


def outputs(gm: fx.GraphModule) -> list[tuple[Role | None, Any]]:
    """The graph's results as ``(role, node or constant)``, in order; ``None`` has no meaning outside."""
    node = gm.graph.output_node()
    return list(zip(node.meta["roles"], node.args[0], strict=True))


def set_outputs(gm: fx.GraphModule, results: list[tuple[Role | None, Any]]) -> None:
    """Make ``results`` what the graph returns."""
    node = gm.graph.output_node()
    node.args = (tuple(value for _, value in results),)
    node.meta["roles"] = [role for role, _ in results]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module of its own with the same nodes, names and roles; attributes are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


CHUNK = "chunk"
"""``meta[CHUNK]`` is the number of the chunk of rows that an operation is done for, where rows are done in chunks."""


# -- the joint graph -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputAlias:
    """How an output aliases another tensor, so that it can be re-made outside of autograd.

    ``base`` is ``Input(i)``, ``Output(i)`` or ``IntermediateBase(i)``; the output is
    ``base.as_strided(size, stride, offset)``, or the base itself when ``size`` is None.
    """

    base: Role
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    offset: int = 0


@dataclass(eq=False)
class JointGraph:
    """A captured program.

    ``module``
        The forward and backward computation as one FX graph with roles. When nothing requires a
        gradient it is the forward alone.
    ``out_spec``
        The pytree of what the model returns.
    ``aliases``
        Outputs that are views of something else, by output index.
    ``fake_mode``
        The mode that the graph's ``meta["val"]`` tensors belong to.
    ``stored``
        The dtype in which each parameter is kept between steps, by name; in the graph it has the one that it is
        computed with.
    """

    module: fx.GraphModule
    out_spec: Any
    fake_mode: Any
    aliases: dict[int, OutputAlias] = field(default_factory=dict)
    stored: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def differentiable(self) -> bool:
        """Whether the graph has a backward half."""
        return any(isinstance(role, Tangent) for role in placeholders(self.module))


# -- operations that a rank gives its meaning to ---------------------------------------------------


def pad_shard(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero-pad dim 0 of a rank's shard to ``rows``: every rank's is then equally long."""
    missing = rows - shard.shape[0]
    return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard


def trim_shard(padded: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    """The part of a padded shard of a ``rows``-long tensor that this rank of mesh ``axis`` owns.

    Symbolic: :mod:`shardgraph.bind` replaces it by a slice of known length.
    """
    raise RuntimeError(f"trim_shard({rows}, {axis!r}) has no meaning before the graph is bound to a rank")


def local_chunk(full: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    """This rank's rows of a tensor of ``rows`` rows, by DTensor's chunking. Symbolic, as above."""
    raise RuntimeError(f"local_chunk({rows}, {axis!r}) has no meaning before the graph is bound to a rank")


def local_part(full: torch.Tensor, dim: int, blocks: int, axis: str, back: int = 0) -> torch.Tensor:
    """This rank's part of a tensor that every rank of mesh ``axis`` has; see :func:`take_part`. Symbolic, as above.

    With ``back``, the part of the rank that is so many places before this one, round the ring.
    """
    raise RuntimeError(f"local_part({dim}, {blocks}, {axis!r}) has no meaning before the graph is bound to a rank")


def take_part(full: torch.Tensor, dim: int, blocks: int, parts: int, index: int) -> torch.Tensor:
    """A copy of part ``index`` of ``parts`` of every one of ``blocks`` equal blocks of ``dim``.

    No view: one that is kept would keep all of ``full``, and some kernels want their operands contiguous.
    """
    size = full.shape[dim] // (blocks * parts)
    apart = full.unflatten(dim, (blocks, parts, size)).select(dim + 1, index)
    return apart.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def first_only(full: torch.Tensor, axis: str) -> torch.Tensor:
    """``full`` on the first rank of mesh ``axis``, zeros on the others: what the ranks hold sums to it. Symbolic."""
    raise RuntimeError(f"first_only({axis!r}) has no meaning before the graph is bound to a rank")


def first_row(rows: int, axis: str) -> int:
    """The number of this rank's first row where every rank of mesh ``axis`` has ``rows``. Symbolic, as above."""
    raise RuntimeError(f"first_row({rows}, {axis!r}) has no meaning before the graph is bound to a rank")


def from_later(steps: int, axis: str) -> int:
    """1 if what has gone ``steps`` places round the ring of mesh ``axis`` to this rank comes from a later rank, else 0.

    Symbolic, as above.
    """
    raise RuntimeError(f"from_later({steps}, {axis!r}) has no meaning before the graph is bound to a rank")


def chunk_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First and past-last row of chunk ``index`` when ``rows`` are cut in ``parts`` as DTensor does.

    Every chunk has ``ceil(rows / parts)`` rows, but for the last non-empty one and empty ones after it.
    """
    size = -(-rows // parts)
    start = min(index * size, rows)
    return start, min(start + size, rows)


# -- collectives -----------------------------------------------------------------------------------

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_TO_ALL = _c10d.all_to_all_single.default
WAIT = _c10d.wait_tensor.default


def send(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """The tensor of the rank before this one, to the next of which this rank's goes, round the ring of mesh ``axis``.

    Symbolic: :mod:`shardgraph.bind` replaces it by an all-to-all in which a rank sends all to one other.
    """
    raise RuntimeError(f"send({axis!r}) has no meaning before the graph is bound to a rank")


COLLECTIVES = frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, send})


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective (its wait is a node of its own)."""
    return node.op == "call_function" and node.target in COLLECTIVES


def collectives(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that start a collective, in program order."""
    return (node for node in gm.graph.nodes if is_collective(node))


def is_copy(node: fx.Node) -> bool:
    """Whether the node starts a copy between host and device (its wait is a node of its own)."""
    return node.op == "call_function" and node.target in DIRECTIONS


def is_started(node: fx.Node) -> bool:
    """Whether the node starts what goes on beside the computation: a collective or a copy."""
    return is_collective(node) or is_copy(node)


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for what its first argument has started."""
    return node.op == "call_function" and node.target in (WAIT, WAIT_COPY)


def group_of(node: fx.Node) -> str:
    """The group argument of a collective: a mesh axis before binding, a process group's name after."""
    return str(node.args[-1])


def describe_collective(node: fx.Node) -> str:
    """The id of a collective, or a copy, for people: what it does, for which value, at which line."""
    what = node.target.__name__.split(".")[0] if callable(node.target) else str(node.target)
    tensor = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    shape = f" {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" if tensor is not None else ""
    where = f" ({node.meta['source']})" if node.meta.get("source") else ""
    over = f" over {node.meta.get('axis', group_of(node))!r}" if is_collective(node) else ""
    return f"{what} of {node.meta.get('subject', node.name)}{shape}{over}{where}"
