"""The static deadlock check of a program's collectives, before anything is launched.

A collective returns once every member of its group has issued it, so ranks deadlock if members of a group disagree on
the next collective, or if they wait for each other in a cycle of groups.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardgraph import ir
from shardgraph.errors import DeadlockError, nearest
from shardgraph.mesh import Mesh, axes_of, size_along

_GROUP_SIZE_ARGUMENT: dict[Any, int] = {ir.ALL_GATHER: 1, ir.REDUCE_SCATTER: 2}


def check_program(gm: fx.GraphModule, mesh: Mesh) -> None:
    """Check the collectives of a symbolic graph on all ranks of ``mesh``, in time independent of their number.

    Every rank runs the same text, so this is as strong as comparing the sequences of collectives of all ranks:

    * The groups of a mesh axis partition the ranks, and members of a group differ only in that coordinate. The text
      determines which calls go to "my group along the axis", so all members make the same calls in the same order with
      the same signatures. Ranks could only disagree on whether the axis exists and on its size; that is checked, once
      per call in the text.
    * A call has one position in the text, the same for all members. Positions increase along a rank's program order,
      so the relation "is issued before" has no cycle, through whatever groups.

    Raises:
        DeadlockError: a collective names an axis that the mesh does not have, or expects another number of members.
    """
    sizes = dict(mesh)
    for node in ir.collectives(gm):
        group, call = ir.group_of(node), ir.describe_collective(node)
        if unknown := [axis for axis in axes_of(group) if axis not in sizes]:
            raise DeadlockError(
                f"{call} names the mesh axis {unknown[0]!r}, and the mesh is {sizes}: nobody would answer; "
                f"give the collective an axis of the mesh{nearest(unknown[0], sizes)}"
            )
        position = _GROUP_SIZE_ARGUMENT.get(node.target)
        if position is not None and node.args[position] != size_along(mesh, group):
            raise DeadlockError(
                f"{call} expects {node.args[position]} ranks, and the mesh axis {group!r} has "
                f"{size_along(mesh, group)}: compile the program for the mesh that it runs on"
            )


def check_waits(gm: fx.GraphModule) -> None:
    """Check that each started collective or copy has exactly one wait, and that its result is used only through it.

    Raises:
        DeadlockError: one is never awaited, is awaited twice, or its result is used or returned unawaited.
    """
    for node in filter(ir.is_started, gm.graph.nodes):
        others = [user for user in node.users if not ir.is_wait(user)]
        if others:
            use = "returned" if others[0].op == "output" else f"used by {others[0].name!r}"
            raise DeadlockError(
                f"the result of {ir.describe_collective(node)} is {use} without being awaited: use the value of its "
                "wait"
            )
        if len(node.users) != 1:
            raise DeadlockError(
                f"{ir.describe_collective(node)} is awaited {len(node.users)} times: each one that is started needs "
                "one wait"
            )
