"""Parameter offloading: parameters are in host memory, and are copied to the device where they are used.

As in ZeRO-Offload (Ren et al., 2021, https://arxiv.org/abs/2101.06840) gradients go to the host too, and the optimizer
updates the parameters there. Parameters that are copied again in backward are on the device a few at a time, so a model
can be larger than device memory (Rajbhandari et al., "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Gradient, Parameter, placeholders
from shardgraph.ir.attributes import CAST_OF, EQUALS, MEAN_OF, ON_DISK, ON_HOST, REDUCES, SOURCE, SUBJECT
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.parameters.rewrite import insert_before_use, replace_results


@dataclass(frozen=True)
class OffloadParameters(Pass):
    """Takes a joint graph over stored parameters, or shards of them; moves those that the plan offloads to host memory.

    A copy to the device and its wait are inserted before the first use of such a placeholder; the parameter's users (a
    cast, an all-gather) use the copy instead. Both nodes have the ``MEMORY_KIND`` ``"gathered"``, and are repeated in
    backward if the parameter is resharded after forward (``RECOMPUTE``).

    Must not change: the values that the computation sees.
    """

    name = "offload-parameters"
    requires = frozenset({"mixed-precision"})
    provides = frozenset({"offloaded-parameters"})
    excludes = frozenset({"offloaded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for role, node in placeholders(gm).items():
            if isinstance(role, Parameter) and context.parameters[role.fqn].offload:
                _load(gm, context, role.fqn, node)


@dataclass(frozen=True)
class OffloadGradients(Pass):
    """Takes a joint graph that returns gradients in their stored form; returns those of offloaded parameters in host
    memory.

    The copies are marked with ``REDUCES``, the parameter's name, too: ``no_sync`` leaves them out and accumulates on
    the device.

    Must not change: other results.
    """

    name = "offload-gradients"
    requires = frozenset({"offloaded-parameters", "reduced-gradients"})
    provides = frozenset({"offloaded-gradients"})
    excludes = frozenset({"offloaded-gradients", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        def to_host(fqn: str, gradient: fx.Node) -> fx.Node:
            if not context.parameters[fqn].offload:
                return gradient
            labels = {SUBJECT: f"gradient of {fqn}", SOURCE: SOURCE.get(gradient, ""), REDUCES: fqn}
            copy = Builder(gm.graph, context.values, labels, after=gradient).to_host(gradient)
            MEAN_OF.set(copy, MEAN_OF.get(gradient, CAST_OF.get(gradient, gradient.name)))
            return copy

        replace_results(gm, Gradient, Parameter, to_host)


def _load(gm: fx.GraphModule, context: Context, fqn: str, node: fx.Node) -> None:
    """Move the placeholder to the host, and copy it to the device before its first use."""
    device = node.meta["val"].device
    ON_HOST.set(node, True)
    ON_DISK.set(node, context.plan.offload.disk is not None)
    with context.fake_mode:
        node.meta["val"] = torch.empty_like(node.meta["val"], device="cpu")
    whole = not any(EQUALS.get(each) == node.name for each in gm.graph.nodes)  # else its all-gather or cast is
    users = list(node.users)
    insert_before_use(gm, context, fqn, node, users, lambda build: build.to_device(node, device), equal=whole)
