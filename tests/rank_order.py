"""The deadlock check of any ranks' sequences of collectives: what the check of a program's text is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx

from shardgraph import ir
from shardgraph.errors import DeadlockError
from shardgraph.mesh import Mesh, group_along
from shardgraph.passes.analysis.collective_order import check_program
from shardgraph.passes.analysis.rows import operation_of


@dataclass(frozen=True)
class Collective:
    """One call of a collective by one rank.

    ``id`` describes it in errors; ``group`` are the global ranks that must all call it, ascending; ``signature`` is
    the shape and dtype of its input.
    """

    id: str
    operation: str
    group: tuple[int, ...]
    signature: str


def collectives_of(gm: fx.GraphModule, mesh: Mesh, rank: int) -> list[Collective]:
    """The collectives that ``rank`` issues when it runs the symbolic graph on ``mesh``, in program order.

    Ranks are numbered row-major over the mesh, the last axis fastest, as in a DeviceMesh.

    Raises:
        DeadlockError: a collective names an axis that the mesh does not have, or expects another number of members.
    """
    check_program(gm, mesh)
    groups: dict[str, tuple[int, ...]] = {}
    calls = []
    for node in ir.collectives(gm):
        if (axis := ir.group_of(node)) not in groups:
            groups[axis] = group_along(mesh, axis, rank)
        tensor = node.args[0].meta["val"]
        calls.append(
            Collective(
                id=ir.describe_collective(node),
                operation=operation_of(node),
                group=groups[axis],
                signature=f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}",
            )
        )
    return calls


def check_collective_order(sequences: Mapping[int, Sequence[Collective]]) -> None:
    """Check that the calls of all ranks, each rank's in its program order, can complete.

    Sufficient for any backend: a cycle between groups counts as a deadlock even if calls are asynchronous, because
    NCCL may run out of the resources needed to have all of them in flight.

    Raises:
        DeadlockError: members of a group disagree about its k-th call, a member does not make it, or the orders of
            calls across groups form a cycle.
    """
    by_group: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    for rank, calls in sequences.items():
        for call in calls:
            if rank not in call.group:
                raise DeadlockError(
                    f"rank {rank} issues {call.id} on the ranks {call.group}, to which it does not belong: "
                    "only members of a group may use it"
                )
            by_group.setdefault(call.group, {}).setdefault(rank, []).append(call)
    for group, calls_of in by_group.items():
        _check_members_agree(group, calls_of)
    _check_no_circle(sequences)


def _check_members_agree(group: tuple[int, ...], calls_of: Mapping[int, Sequence[Collective]]) -> None:
    speaker = next(iter(calls_of))
    for rank in group:
        ours, theirs = calls_of[speaker], calls_of.get(rank, [])
        for k, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if (a.operation, a.signature) != (b.operation, b.signature):
                raise DeadlockError(
                    f"the ranks {group} disagree about their collective number {k}: rank {speaker} issues {a.id} "
                    f"[{a.operation} {a.signature}], rank {rank} issues {b.id} [{b.operation} {b.signature}]; "
                    "all members must issue the same operation on the same shape"
                )
        if len(ours) != len(theirs):
            k = min(len(ours), len(theirs))
            caller, silent, more = (speaker, rank, ours) if len(ours) > k else (rank, speaker, theirs)
            raise DeadlockError(
                f"rank {caller} would wait for ever for rank {silent}: on the ranks {group}, rank {caller} issues "
                f"{more[k].id} as collective number {k} and rank {silent} issues only {k}"
            )


def _check_no_circle(sequences: Mapping[int, Sequence[Collective]]) -> None:
    """Events are (group, k-th call of it); an edge means that some rank issues one before the other."""
    order: nx.DiGraph = nx.DiGraph()
    for rank, calls in sequences.items():
        counts: dict[tuple[int, ...], int] = {}
        previous = None
        for call in calls:
            k = counts.get(call.group, 0)
            counts[call.group] = k + 1
            order.add_node((call.group, k), id=call.id)
            if previous is not None and not order.has_edge(previous, (call.group, k)):
                order.add_edge(previous, (call.group, k), rank=rank)
            previous = (call.group, k)
    try:
        circle = nx.find_cycle(order)
    except nx.NetworkXNoCycle:
        return
    steps = "; ".join(
        f"rank {order.edges[a, b]['rank']} issues {order.nodes[a]['id']} on the ranks {a[0]} "
        f"before {order.nodes[b]['id']} on the ranks {b[0]}"
        for a, b in circle
    )
    raise DeadlockError(f"collectives wait for each other in a circle: {steps}; give all ranks one common order")
