"""Recomputation of a whole stage: FairScale's ``Pipe(checkpoint=...)``, after GPipe."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardgraph.ir import copy_graph, of_backward, placeholders
from shardgraph.ir.attributes import CHUNK, MEMORY_KIND, RECOMPUTE
from shardgraph.passes.base import Context, Graphs, GraphsPass, Pass, of_kind
from shardgraph.passes.partition.split import forward_nodes
from shardgraph.passes.recompute.values import computed_once


@dataclass(frozen=True)
class CopyToRecompute(GraphsPass):
    """Takes the joint graphs of stages; adds a copy ``recompute/joint`` for each one that is trained.

    It is lowered to the graphs of microbatches that recompute forward in backward. Must not change: the others.
    """

    name = "copy-to-recompute"
    provides = frozenset({"copies-to-recompute"})
    excludes = frozenset({"copies-to-recompute", "split"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "joint"):
            if any(of_backward(role) for role in placeholders(graphs[name])):
                graphs[name.replace("/joint", "/recompute/joint")] = copy_graph(graphs[name])


@dataclass(frozen=True)
class RecomputeStage(Pass):
    """Takes the joint graph of a stage; marks all that forward computes from the stage's inputs with ``RECOMPUTE``.

    Saved for backward are then the stage's inputs (Huang et al., 2019, https://arxiv.org/abs/1811.06965), random
    numbers, and results computed from buffers that forward writes; a chunked loss still saves one number per row,
    without which one chunk would need the others. Must not change: the computation.
    """

    name = "recompute-stage"
    requires = frozenset({"copies-to-recompute"})
    provides = frozenset({"recomputed-stage"})
    excludes = frozenset({"split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        inside, once = forward_nodes(gm), computed_once(gm)
        for node in gm.graph.nodes:
            pinned = node in MEMORY_KIND or node in CHUNK
            if node.op == "call_function" and node in inside and not pinned:
                RECOMPUTE.set(node, node not in once)
