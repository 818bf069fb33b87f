"""Mixed precision: parameters stored in one dtype are computed with, gathered and reduced in others.

As in ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054, section 3.1) a rank keeps its parameter shard in
full precision for the optimizer, and communicates in the compute precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Gradient, Parameter, placeholders
from shardgraph.ir.attributes import CAST_OF, SOURCE, SUBJECT
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.parameters.rewrite import insert_before_use, replace_results
from shardgraph.plans.precision import dtype_of


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Takes a joint graph over parameters, or shards, in their compute dtype; makes them those in their stored dtype.

    A placeholder gets the dtype of ``context.stored``, and a cast back to the compute dtype is inserted before its
    first use: ahead of the padding and the all-gather, so that those run in the compute dtype. Backward repeats the
    cast where it repeats the gather (``reshard_after_forward``). Gradients are cast to ``plan.precision.reduce``, in
    which later passes reduce them and ``no_sync`` accumulates them.

    Must not change: the values that the computation sees.
    """

    name = "mixed-precision"
    requires = frozenset({"sharded-parameters"})
    provides = frozenset({"mixed-precision"})
    excludes = frozenset({"mixed-precision", "reduced-gradients", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for role, node in placeholders(gm).items():
            if isinstance(role, Parameter) and context.stored.get(role.fqn) not in (None, node.meta["val"].dtype):
                _store(gm, context, role.fqn, node)
        if context.plan.precision.reduce is not None:
            _cast_gradients(gm, context, dtype_of(context.plan.precision.reduce))


def _store(gm: fx.GraphModule, context: Context, fqn: str, node: fx.Node) -> None:
    """Give the placeholder the stored dtype, and cast it before its first use."""
    computed, whole = node.meta["val"], context.parameters[fqn].shard_axis is None
    with context.fake_mode:
        node.meta["val"] = torch.empty_like(computed, dtype=context.stored[fqn])
    users = list(node.users)
    insert_before_use(gm, context, fqn, node, users, lambda build: build.cast(node, computed.dtype), equal=whole)


def _cast_gradients(gm: fx.GraphModule, context: Context, dtype: torch.dtype) -> None:
    def cast(fqn: str, gradient: fx.Node) -> fx.Node:
        if gradient.meta["val"].dtype == dtype:
            return gradient
        labels = {SUBJECT: f"gradient of {fqn}", SOURCE: SOURCE.get(gradient, ""), CAST_OF: gradient.name}
        return Builder(gm.graph, context.values, labels, after=gradient).cast(gradient, dtype)

    replace_results(gm, Gradient, Parameter, cast)
