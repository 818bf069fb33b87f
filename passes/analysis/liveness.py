"""Predicted peak memory: exact liveness of the storages of a program, in execution order.

The allocations of the eager executor are known before it runs: each node's results, once per storage however many
views it has, freed after the last node that uses any of them. What kernels take for themselves is included if asked for
(:mod:`shardgraph.passes.analysis.workspaces`); the allocator's fragmentation is not. Host memory
(:mod:`shardgraph.passes.analysis.places`) is counted separately.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir import Role
from shardgraph.ir.attributes import IN_PLACE, MEMORY_KIND, ON_DISK, REDUCES, ROLE
from shardgraph.passes.analysis.overwrites import overwrites
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.analysis.workspaces import workspace

KINDS = {
    ir.Parameter: "parameters",
    ir.Buffer: "buffers",
    ir.Input: "inputs",
    ir.Tangent: "gradients",
    ir.Gradient: "gradients",
    ir.Accumulated: "gradients",
    ir.SquaredNorm: "gradients",
    ir.Returned: "gradients",
    ir.Gathered: "gathered parameters",
    ir.Forwarded: "activations",
    ir.Saved: "saved",
    ir.Mutation: "buffers",
    ir.Output: "activations",
    ir.Checked: "activations",
    ir.IntermediateBase: "activations",
    ir.Updater: "optimizer state",
}

# Alias their first argument although their schema does not declare it.
_UNDECLARED_VIEWS = {
    ir.WAIT,
    ir.WAIT_COPY,
    ir.trim_shard,
    ir.local_chunk,
    ir.buckets.unpack,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}


@dataclass(frozen=True)
class MemoryProfile:
    """The memory of one run of a program on one rank (rank 0 unless its values have another rank's shapes).

    ``timeline`` has the live bytes at the end of each node, before the tensors of which it is the last user are freed;
    ``nodes`` are its points, as ``(graph, node)`` names. ``compositions`` is the timeline by kind: parameters, gathered
    parameters (also those that are only cast for the computation), buffers, inputs, saved (for backward), activations
    (outputs of the model), gradients, communication buffers, optimizer state, temporaries (everything else). ``host``
    is like ``compositions``, for host memory without files; everything else here is device memory.
    """

    timeline: tuple[int, ...]
    compositions: dict[str, tuple[int, ...]]
    nodes: tuple[tuple[str, str], ...]
    host: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are live at a time."""
        return max(self.timeline)


@dataclass(frozen=True)
class UpdateMemory:
    """The memory of an optimizer in bytes: ``state`` all the time, ``temporaries`` only during the update."""

    state: int = 0
    temporaries: int = 0


def profile_memory(
    gm: fx.GraphModule, granule: int = 1, *, workspaces: bool = False, gloo: bool = True
) -> MemoryProfile:
    """Follow every storage of ``gm`` from the node that allocates it to the last one that uses a view of it.

    Inputs are live from the start. Parameters, buffers and the user's inputs belong to the caller and stay live; saved
    values and tangents belong to the graph and die after their last use. Results live to the end. The input of a
    collective lives until its wait, unless the collective works on a copy. Every allocation is rounded up to
    ``granule`` bytes. With ``workspaces``, CPU kernels' own memory is counted as temporaries, with ``gloo`` what a
    reduce-scatter of tensors on the CPU takes: False for another device's program that was captured on a CPU.
    """
    return _profile({"graph": gm}, granule, (), workspaces, gloo)


def profile_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    granule: int = 1,
    update: UpdateMemory = UpdateMemory(),
    host_update: UpdateMemory = UpdateMemory(),
    *,
    workspaces: bool = False,
    gloo: bool = True,
) -> MemoryProfile:
    """The memory of a training step: forward, backward and the optimizer's update, one after the other.

    Saved values live until their last use in backward. The caller is assumed to hold the outputs that the loss depends
    on until backward ends, and to drop the others after forward. Gradients do not exist before backward
    (``zero_grad(set_to_none=True)``), but for those that backward adds to. ``update`` is the optimizer's memory on the
    device, ``host_update`` on the host; it updates at the end, and in backward wherever gradients are handed over
    there.
    ``granule``, ``workspaces`` and ``gloo`` are as for :func:`profile_memory`.
    """
    graphs = {"forward": forward} | ({"backward": backward} if backward is not None else {})
    return _profile(graphs, granule, (update, host_update), workspaces, gloo)


def _profile(
    graphs: dict[str, fx.GraphModule], granule: int, updates: tuple[UpdateMemory, ...], workspaces: bool, gloo: bool
) -> MemoryProfile:
    storages: list[Storage] = []
    points: list[tuple[str, str]] = []
    left: dict[Role, list[Storage]] = {}  # storages of previous graphs that later ones use
    for name, gm in graphs.items():
        storages += _follow(gm, len(points), left, granule)
        if workspaces:
            storages += _workspaces(gm, len(points))
        if gloo:
            storages += _received(gm, len(points))
        if workspaces and gloo:
            storages += _flattened(gm, len(points))
        points += [(name, node.name) for node in gm.graph.nodes]
    if len(graphs) > 1:  # the caller holds the outputs that the loss depends on
        tangents = {role.index for role in ir.placeholders(graphs["backward"]) if isinstance(role, ir.Tangent)}
        for role, held in left.items():
            if isinstance(role, _OF_CALLER) or (isinstance(role, ir.Output) and role.index in tangents):
                _extend(held, len(points) - 1)
    if any(update.state or update.temporaries for update in updates):
        points.append(("optimizer", "update"))
        end = len(points) - 1
        for role, held in left.items():
            if isinstance(role, (*_OF_CALLER, ir.Gradient)):
                _extend(held, end)
        for place, update in zip(("device", "host"), updates, strict=True):
            storages.append(Storage(update.state, 0, end, "optimizer state", place))
            storages.append(Storage(update.temporaries, end, end, "temporaries", place))
        nodes = (node for gm in graphs.values() for node in gm.graph.nodes)
        at = [i for i, node in enumerate(nodes) if node.target is ir.update]
        storages += [Storage(updates[0].temporaries, i, i) for i in at]

    compositions, host = (
        _compositions([each for each in dict.fromkeys(storages) if each.place == place], len(points))
        for place in ("device", "host")
    )
    timeline = tuple(map(sum, zip(*compositions.values(), strict=True)))
    return MemoryProfile(timeline, compositions, tuple(points), host)


def _workspaces(gm: fx.GraphModule, start: int) -> Iterator[Storage]:
    """What kernels take for themselves while they run."""
    for i, node in enumerate(gm.graph.nodes, start):
        if nbytes := workspace(node):
            yield Storage(nbytes, i, i)


def _received(gm: fx.GraphModule, start: int) -> Iterator[Storage]:
    """What reduce-scatters of tensors on the CPU receive beside their results until they are awaited: the parts of all
    ranks, which are added up then."""
    index = {node: i for i, node in enumerate(gm.graph.nodes, start)}
    for node in gm.graph.find_nodes(op="call_function", target=ir.REDUCE_SCATTER):
        operand, result = node.args[0].meta["val"], node.meta["val"]
        if result.device.type == "cpu":
            until = max(index[user] for user in node.users)
            yield Storage(operand.nbytes - result.nbytes, index[node], until, "communication buffers")


def _flattened(gm: fx.GraphModule, start: int) -> Iterator[Storage]:
    """What gloo gathers tensors on the CPU into, on a thread of its own, before it copies to the result: for one gather
    of a group at a time, of those that have started and are not awaited."""
    index = {node: i for i, node in enumerate(gm.graph.nodes, start)}
    gathers: dict[str, list[tuple[int, int, int]]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=ir.ALL_GATHER):
        if node.meta["val"].device.type == "cpu":
            until = max(index[user] for user in node.users)
            gathers.setdefault(ir.group_of(node), []).append((index[node], until, node.meta["val"].nbytes))
    for each in gathers.values():
        for begin, end in pairwise(sorted({point for first, until, _ in each for point in (first, until)})):
            if largest := max((nbytes for first, until, nbytes in each if first <= begin < until), default=0):
                yield Storage(largest, begin, end - 1, "communication buffers")


_OF_CALLER = (ir.Parameter, ir.Buffer, ir.Input)


def _extend(storages: list[Storage], death: int) -> None:
    for storage in storages:
        storage.death = death


def _compositions(storages: list[Storage], points: int) -> dict[str, tuple[int, ...]]:
    """Live bytes at each point, by kind."""
    lines: dict[str, list[int]] = {}
    for storage in storages:
        if storage.kind not in lines:
            lines[storage.kind] = [0] * (points + 1)
        line = lines[storage.kind]
        line[storage.birth] += storage.nbytes
        line[storage.death + 1] -= storage.nbytes
    return {kind: tuple(accumulate(line[:-1])) for kind, line in lines.items()}


@dataclass(eq=False)
class Storage:
    """One allocation; it is live from node ``birth`` to node ``death``, both included.

    Its ``place`` is the ``"device"``, the ``"host"``, or the ``"disk"``, where it uses no memory.
    """

    nbytes: int
    birth: int
    death: int = 0
    kind: str = "temporaries"
    place: str = "device"
    bucket: tuple[int, int] | None = None  # the shard of a parameter: which bucket it is stored in, and where


def _follow(gm: fx.GraphModule, start: int, left: dict[Role, list[Storage]], granule: int) -> list[Storage]:
    """The storages of one graph, whose first node is point ``start``; updates ``left`` for later graphs."""
    known = {storage for held in left.values() for storage in held}
    held = storages_as_run(gm, granule, start, left)
    for node in on_host(gm):
        for storage in held[node]:
            if storage.place == "device":  # a storage of an earlier graph may be on disk already
                storage.place = "disk" if ON_DISK.get(node) else "host"
    for node, kind in _kinds(gm):
        for storage in held[node]:
            if storage not in known:
                storage.kind = kind
    for role, node in ir.placeholders(gm).items():
        left.setdefault(role, held[node])
    for result, value in ir.outputs(gm):
        if result is not None and isinstance(value, fx.Node):
            left[result] = held[value]
    return [storage for each in held.values() for storage in each]


def kinds_of(gm: fx.GraphModule) -> dict[fx.Node, list[str]]:
    """The kinds of each node's storages, one per tensor in its value; views have those of their base."""
    held = storages_of(gm)
    for node, kind in _kinds(gm):
        for storage in held[node]:
            storage.kind = kind
    return {node: [storage.kind for storage in storages] for node, storages in held.items()}


def storages_of(
    gm: fx.GraphModule, granule: int = 1, start: int = 0, left: Mapping[Role, list[Storage]] = MappingProxyType({})
) -> dict[fx.Node, list[Storage]]:
    """The storages of each node's value, one per tensor in it, with deaths; views share those of their base.

    That is if nothing works in place. ``start`` is the point of the first node, ``left`` are storages of earlier
    graphs.
    """
    held: dict[fx.Node, list[Storage]] = {}
    inputs: dict[torch.UntypedStorage, Storage] = {}
    stored: dict[fx.Node, fx.Node] | None = None
    for index, node in enumerate(gm.graph.nodes, start):
        if stored is None and node.op not in ("placeholder", "get_attr"):
            stored = _stored(gm, held, granule)
        if node.op == "placeholder" and ROLE.of(node) in left:
            held[node] = left[ROLE.of(node)]
        elif isinstance(ROLE.get(node), ir.Accumulated):  # memory of its own; equal layers may have one fake tensor
            held[node] = [Storage(_rounded(node.meta["val"].nbytes, granule), 0)]  # there before forward
        elif node.op in ("placeholder", "get_attr"):
            # Inputs whose values share a storage are views of each other: a saved tensor and its transpose.
            tensors = _tensors(node.meta.get("val"))
            held[node] = [inputs.setdefault(t.untyped_storage(), Storage(_nbytes(t, granule), start)) for t in tensors]
        elif node.op == "output":
            held[node] = []
        elif node.target is operator.getitem:
            held[node] = _element(node, held)
        elif stored and node in stored:
            held[node] = held[stored[node]]
        else:
            held[node] = [
                held[base][0] if base is not None and held[base] else Storage(_nbytes(tensor, granule), index)
                for value, base in _results(node)
                for tensor in _tensors(value)
            ]
    _set_deaths(list(gm.graph.nodes), held, start)
    return held


def storages_as_run(
    gm: fx.GraphModule, granule: int = 1, start: int = 0, left: Mapping[Role, list[Storage]] = MappingProxyType({})
) -> dict[fx.Node, list[Storage]]:
    """As :func:`storages_of`, but what works in place takes over the memory of its operand."""
    held = storages_of(gm, granule, start, left)
    for _, operand in list(overwrites(gm, held, start)):
        held[operand][0].death -= 1
    return held


def _stored(gm: fx.GraphModule, held: Mapping[fx.Node, list[Storage]], granule: int) -> dict[fx.Node, fx.Node]:
    """The packs whose shards lie side by side, and what pads these, each with an input that is in the same memory.

    A shard is stored in the bucket of the first pack that has it (:mod:`shardgraph.runtime.side_by_side`).
    """
    stored: dict[fx.Node, fx.Node] = {}
    for pack in gm.graph.find_nodes(op="call_function", target=ir.buckets.pack):
        shards = ir.buckets.stored(pack)
        storages = [held[shard][0] for shard, _ in shards]
        if shards and all(storage.bucket is None and storage.place == "device" for storage in storages):
            begins = 0
            for storage, (shard, elements) in zip(storages, shards, strict=True):
                storage.bucket = id(storages[0]), begins
                storage.nbytes = elements * shard.meta["val"].itemsize
                begins += storage.nbytes
            storages[0].nbytes += -begins % granule  # they are one allocation
        places = [storage.bucket for storage in storages]
        if shards and None not in places and _follow_on(places, shards):
            stored |= {each: shards[0][0] for each in (pack, *pack.args[0]) if each.op == "call_function"}
    return stored


def _follow_on(places: list[Any], shards: list[tuple[fx.Node, int]]) -> bool:
    """Whether shards are in one bucket, each behind the one before it."""
    bucket, expected = places[0]
    for (other, at), (shard, elements) in zip(places, shards, strict=True):
        if (other, at) != (bucket, expected):
            return False
        expected += elements * shard.meta["val"].itemsize
    return True


def settle_memory(gm: fx.GraphModule) -> frozenset[Role]:
    """Note which operations of a bound graph work in place, in their first operand (``IN_PLACE``); returns the results
    that have a storage of their own and fill it: no input and no other result is in it."""
    held = storages_of(gm)
    for node, operand in overwrites(gm, held):
        IN_PLACE.set(node, True)
        if node.args[0] is not operand:
            node.args = (operand, *(arg for arg in node.args if arg is not operand))
    results = [(role, value) for role, value in ir.outputs(gm) if isinstance(value, fx.Node)]
    uses = Counter(storage for _, value in results for storage in held[value])
    given = {storage for node in gm.graph.nodes if node.op in ("placeholder", "get_attr") for storage in held[node]}

    def is_own(value: Any) -> bool:
        tensor = value.meta["val"]
        if not isinstance(tensor, torch.Tensor):
            return False
        (storage,) = held[value]
        return uses[storage] == 1 and storage not in given and storage.nbytes == tensor.nbytes

    return frozenset(role for role, value in results if role is not None and is_own(value))


def _element(node: fx.Node, held: dict[fx.Node, list[Storage]]) -> list[Storage]:
    source, position = node.args
    values = source.meta.get("val")
    before = len(_tensors(values[:position]))
    return held[source][before : before + len(_tensors(values[position]))]


def _results(node: fx.Node) -> list[tuple[Any, fx.Node | None]]:
    """The results of the node's operation, each with the argument whose storage it shares, if any."""
    value = node.meta.get("val")
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if node.target in _UNDECLARED_VIEWS:
        return [(value, first)]
    if node.target is ir.buckets.unpack_parts:  # which are copies, but for those that lie together
        return [(value, first if 1 in (len(node.args[1]), node.args[2]) else None)]
    if node.target is ir.pad_shard:
        whole = first is not None and first.meta["val"].shape[0] == value.shape[0]
        return [(value, first if whole else None)]
    aliased = _aliased(node.target)
    if aliased is None or not isinstance(value, (tuple, list, torch.Tensor)):
        return [(value, None)]
    values = [value] if len(aliased) == 1 else value  # a single result may be a list of views, as of split
    if IN_PLACE.get(node):  # in a memory that is no more that of its operand
        return [(each, None) for each in values]
    return [(v, _argument(node, *place) if place else None) for v, place in zip(values, aliased, strict=True)]


@lru_cache(4096)
def _aliased(target: Any) -> tuple[tuple[int, str] | None, ...] | None:
    """For each result of an operation the position and name of the argument that it may be in the memory of, if any;
    None if the operation has no schema."""
    schema = getattr(target, "_schema", None)
    return None if schema is None else tuple(_aliased_argument(schema, result) for result in schema.returns)


def _aliased_argument(schema: Any, result: Any) -> tuple[int, str] | None:
    if result.alias_info is None:
        return None
    names = result.alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and (not names or names & info.before_set):
            return position, argument.name
    return None


def _argument(node: fx.Node, position: int, name: str) -> fx.Node | None:
    value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return value if isinstance(value, fx.Node) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _nbytes(tensor: torch.Tensor, granule: int) -> int:
    return _rounded(tensor.untyped_storage().nbytes(), granule)


def _rounded(nbytes: int, granule: int) -> int:
    return nbytes if granule == 1 else -(-nbytes // granule) * granule


def _set_deaths(nodes: list[fx.Node], storages: dict[fx.Node, list[Storage]], start: int) -> None:
    """A storage dies after the last use of any value in it."""
    index = {node: i for i, node in enumerate(nodes, start)}
    end = start + len(nodes) - 1
    until = {node: max((index[user] for user in node.users), default=i) for node, i in index.items()}
    read = {node: i for node, i in until.items() if ir.is_collective(node) and not _works_on_a_copy(node)}
    for node in nodes:
        last = until[node]
        if node.op in ("placeholder", "get_attr"):
            # A pipeline's schedule holds messages (ir.Forwarded, ir.Returned) until the next ones.
            handed_over = isinstance(ROLE.get(node), (ir.Saved, ir.Tangent, ir.Accumulated)) and node.users
            last = last if handed_over else end
        elif read:  # what a collective reads is needed until it has been awaited
            last = max([last, *(read[user] for user in node.users if user in read)])
        for storage in storages[node]:
            if last > storage.death:
                storage.death = last


def _works_on_a_copy(node: fx.Node) -> bool:
    """Whether a collective releases its input once it has started.

    An all-reduce is functional: it first copies its input into its result.
    """
    return node.target is ir.ALL_REDUCE


def _kinds(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """The kinds of the storages of nodes; a storage is of the last kind, which is the most specific."""
    nodes = list(gm.graph.nodes)
    yield from ((node, "communication buffers") for node in nodes if node in REDUCES)
    results = [(role, value) for role, value in ir.outputs(gm) if role is not None and isinstance(value, fx.Node)]
    yield from sorted(((value, KINDS[type(role)]) for role, value in results), key=lambda rule: rule[1] == "saved")
    for memory_kind, kind in (("saved", "saved"), ("gathered", "gathered parameters")):
        yield from ((node, kind) for node in nodes if MEMORY_KIND.get(node) == memory_kind)
    yield from ((node, "buffers") for node in nodes if node.op == "get_attr")
    yield from ((node, KINDS[type(role)]) for role, node in ir.placeholders(gm).items())
