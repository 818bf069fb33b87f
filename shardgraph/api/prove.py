"""``shardgraph.prove``: that a program is the model, by its text alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.options import OPTIONS
from shardgraph.api.unsharded import check_unsharded
from shardgraph.arguments import MODEL, checked, instance
from shardgraph.cost_models.cluster import Cluster
from shardgraph.module.sharded import ShardedModule
from shardgraph.passes.program import Program
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.proof.prove import Proof
from shardgraph.proof.prove import prove as proved
from shardgraph.search.machine import resolve_axes
from shardgraph.search.question import Question
from shardgraph.search.source import Source

_PROGRAM = instance("the Program of a compiled module", Program)


@checked(OPTIONS, model=MODEL | _PROGRAM)
def prove(
    model: nn.Module | Program,
    example_inputs: tuple[Any, ...] = (),
    plan: str | Path | Plan = "fsdp",
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | None = None,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    recompute: str | None = None,
    memory: int | str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
) -> Proof:
    """Prove that ``model``'s program under ``plan`` computes what the model does, on every rank and for all weights.

    Every value of the program is typed: which value of the captured graph it is, and how the ranks of the mesh hold it
    (whole, divided, as summands, or each for its own batch). Outputs must be the captured graph's, and each gradient
    the mean of the captured one over data-parallel ranks, held as its parameter is: then an optimizer that updates
    elements by their gradients updates the shards as it would the whole, and a norm over shards counts each element
    once. Nothing runs, so the size of the model and the number of devices hardly matter.

    What is only numeric is not proved: dtypes, the order of a sum. :func:`shardgraph.verify` compares numbers.

    Args:
        model: any module, also on ``meta``; or what ``shardgraph.compile`` returned, or the :class:`Program` of it,
            with no other argument.
        example_inputs: positional inputs of one rank's call, real or on ``meta``.
        plan: as for ``shardgraph.compile``; the other arguments are as for :func:`shardgraph.analyze`.

    Returns:
        the proof. Where it is not ``ok``, it names what is wrong, or not known, by node, pass and line of the model.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: the plan does not exist or does not fit the model or the mesh.
        ClusterError: the cluster is unknown, malformed or smaller than the mesh.
        ShardGraphError: the model is sharded by other means than this library's.
    """
    if isinstance(model, ShardedModule):
        return proved(model.program)
    if isinstance(model, Program):
        return proved(model)
    check_unsharded(model)
    mesh_of = partial(resolve_axes, mesh=mesh, cluster=cluster)
    options = (recompute, memory, loss_chunk, offload)
    question = Question.of(model, plan, mesh_of, mesh is None, pipeline, precision, *options, cluster=cluster)
    return proved(Source(question.about_step(example_inputs, dict(example_kwargs or {}), loss_fn)).program())
