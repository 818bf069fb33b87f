"""Parameter offloading: parameters are in host memory, and are copied to the device where they are used.

As in ZeRO-Offload (Ren et al., 2021, https://arxiv.org/abs/2101.06840) gradients go to the host too, and the optimizer
updates the parameters there. Parameters that are copied again in backward are on the device a few at a time, so a model
can be larger than device memory (Rajbhandari et al., "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from shardgraph.ir import Gradient, Parameter, Role, outputs, placeholders, set_outputs
from shardgraph.ir.attributes import (
    CAST_OF,
    EQUALS,
    MEAN_OF,
    MEMORY_KIND,
    ON_DISK,
    ON_HOST,
    PLACEMENTS,
    RECOMPUTE,
    REDUCES,
    SOURCE,
    SUBJECT,
)
from shardgraph.passes.base import Context
from shardgraph.passes.builder import Builder

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadParameters:
    """Takes a joint graph over stored parameters, or shards of them; moves those that the plan offloads to host memory.

    A copy to the device and its wait are inserted before the first use of such a placeholder; the parameter's users (a
    cast, an all-gather) use the copy instead. Both nodes have the ``MEMORY_KIND`` ``"gathered"``, and are repeated in
    backward if the parameter is resharded after forward (``RECOMPUTE``).

    Must not change: the values that the computation sees.
    """

    name: ClassVar[str] = "offload-parameters"
    requires: ClassVar[frozenset[str]] = frozenset({"mixed-precision"})
    provides: ClassVar[frozenset[str]] = frozenset({"offloaded-parameters"})
    excludes: ClassVar[frozenset[str]] = frozenset({"offloaded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        for role, node in placeholders(gm).items():
            if isinstance(role, Parameter) and context.parameters[role.fqn].offload:
                _load(gm, context, role.fqn, node, order)


@dataclass(frozen=True)
class OffloadGradients:
    """Takes a joint graph that returns gradients in their stored form; returns those of offloaded parameters in host
    memory.

    The copies are marked with ``REDUCES``, the parameter's name, too: ``no_sync`` leaves them out and accumulates on
    the device.

    Must not change: other results.
    """

    name: ClassVar[str] = "offload-gradients"
    requires: ClassVar[frozenset[str]] = frozenset({"offloaded-parameters", "reduced-gradients"})
    provides: ClassVar[frozenset[str]] = frozenset({"offloaded-gradients"})
    excludes: ClassVar[frozenset[str]] = frozenset({"offloaded-gradients", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        results: list[tuple[Role | None, object]] = []
        for role, value in outputs(gm):
            of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
            if of_parameter and isinstance(value, fx.Node) and context.parameters[role.of.fqn].offload:
                mean_of, fqn = MEAN_OF.get(value, CAST_OF.get(value, value.name)), role.of.fqn
                labels = {SUBJECT: f"gradient of {fqn}", SOURCE: SOURCE.get(value, ""), REDUCES: fqn}
                value = Builder(gm.graph, context.values, labels, after=value).to_host(value)
                MEAN_OF.set(value, mean_of)
            results.append((role, value))
        set_outputs(gm, results)


def _load(gm: fx.GraphModule, context: Context, fqn: str, node: fx.Node, order: dict[fx.Node, int]) -> None:
    """Move the placeholder to the host, and copy it to the device before its first use."""
    value, users = node.meta["val"], list(node.users)
    ON_HOST.set(node, True)
    ON_DISK.set(node, context.plan.offload.disk is not None)
    with context.fake_mode:
        node.meta["val"] = torch.empty_like(value, device=_HOST)
    if users:
        first = min(users, key=order.__getitem__)
        again = context.parameters[fqn].reshard_after_forward
        labels = {SUBJECT: fqn, SOURCE: SOURCE.get(first, ""), MEMORY_KIND: "gathered", RECOMPUTE: again}
        copy = Builder(gm.graph, context.values, labels, after=first.prev).to_device(node, value.device)
        if not any(EQUALS.get(each) == node.name for each in gm.graph.nodes):
            EQUALS.set(copy, node.name)
            PLACEMENTS.set(copy, PLACEMENTS.get(node, {}))
        for user in users:
            user.replace_input_with(node, copy)
