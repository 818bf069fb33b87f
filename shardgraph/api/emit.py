"""``shardgraph.emit``: a program as source, for a model and a plan, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.options import OPTIONS
from shardgraph.api.unsharded import check_unsharded
from shardgraph.arguments import checked
from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.emission.saved import save
from shardgraph.errors import NoLossError, ShardGraphError
from shardgraph.module.input_names import input_names
from shardgraph.passes.lowering import lower
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.search.answer import answer
from shardgraph.search.machine import resolve_axes
from shardgraph.search.question import Question
from shardgraph.torch_api import pytree


@checked(OPTIONS)
def emit(
    model: nn.Module,
    directory: str | Path,
    plan: str | Path | Plan = "fsdp",
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    mesh: Mapping[str, int] | None = None,
    pipeline: Pipeline | None = None,
    precision: str | Precision | None = None,
    cluster: Cluster | str | Path | None = None,
    recompute: str | None = None,
    memory: int | str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    loss_weight: str = "ranks",
    scheduled: bool = False,
) -> list[Path]:
    """Write the program of ``model`` under ``plan`` as source that trains without shardgraph; returns its files.

    ``program.py`` is plain PyTorch: it has a function for each module of the model, one for all equal layers, with
    their backward and their collectives, and trains under ``torchrun`` with the losses of the compiled module to the
    bit. Beside it are the weights, unsharded, and the batch of the example. Nothing runs, and no process group is
    needed.

    Args:
        model: a module, which is unchanged. If it is on ``meta``, no weights are written.
        directory: where to write; made if it does not exist, and files of the same names are replaced.
        plan: as for :func:`shardgraph.compile`.
        example_inputs: positional inputs of one rank's call.
        example_kwargs: keyword inputs of the same call; ``target`` goes to ``loss_fn``.
        loss_fn: ``loss_fn(output, target) -> scalar``; else the loss is what the model returns, alone or as
            ``output.loss``, or what the function ``criterion`` of the file makes of its outputs, yours to write.
        mesh: axis sizes by name; default: the plan's, else one rank for each device of ``cluster``, and for
            ``"single"`` one.
        pipeline: for a preset with ``"pp"``, as for ``shardgraph.compile``.
        precision: likewise.
        cluster: the hardware for which plans and stages are priced; None: this machine.
        recompute: likewise.
        memory: likewise.
        loss_chunk: likewise.
        offload: likewise, in host memory.
        loss_weight: likewise.
        scheduled: write the operations in the order in which the compiled module runs them, its collectives merged and
            started early, instead of the order in which the model has them.

    Raises:
        CaptureError, PlanError: as ``shardgraph.compile``.
        ShardGraphError: the model is compiled already; only one of ``loss_fn`` and its target is given, or the
            program has what plain PyTorch does not have, such as parameters on disk or operators of the user's own; or
            a file in ``directory`` was edited since it was emitted.
    """
    check_unsharded(model)
    kwargs, captures = dict(example_kwargs or {}), Captures(torch.device("cpu"))
    mesh_of = partial(resolve_axes, mesh={} if mesh is None and plan == "single" else mesh, cluster=cluster)
    options = precision, recompute, memory, loss_chunk, offload, cluster
    question = Question.of(model, plan, mesh_of, mesh is None, pipeline, *options)
    if (loss_fn is None) == ("target" in kwargs):
        raise ShardGraphError(
            "loss_fn(output, target) and a target go together, and one was given without the other: give both "
            "loss_fn=... and example_kwargs={..., 'target': ...}, or neither for a loss that the training loop computes"
        )
    # As compile decides it, for the call itself: a plan's placements depend on what is returned.
    asked = question.about(example_inputs, kwargs, own_loss if loss_fn is None and question.plan.pipeline else loss_fn)
    decided = answer(asked, captures)
    try:
        question = question.about(example_inputs, kwargs, loss_fn or own_loss).settled(decided)
        joint = captures.take(question.captured, decided)
    except NoLossError:
        if loss_fn is not None or question.plan.pipeline is not None:
            raise
        question = asked.settled(decided)
        joint = captures.take(question.captured, decided)
    program = lower(joint, decided, question.shapes, scheduled=scheduled)
    leaves, spec = pytree.tree_flatten((example_inputs, kwargs))
    return save(
        program, model, directory, leaves, input_names(model, spec), scheduled, by_tokens=loss_weight == "tokens"
    )
