"""The request of a caller of ``compile``, ``analyze`` or ``verify``, parsed and checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Call
from shardgraph.capture.casting import computed_dtypes
from shardgraph.capture.subclasses import check_tensors
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.mesh import Mesh
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import named_or_loaded, resolve_plan
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.pipeline.microbatches import microbatches
from shardgraph.search.machine import machine_for
from shardgraph.sizes import parse_bytes


@dataclass(frozen=True)
class Question:
    """Which plan a model is to have; :func:`shardgraph.search.decide.decide` answers it.

    ``plan`` is the requested plan on its mesh, with the model's annotations and the options below; for ``"auto"`` what
    the candidates have in common. If ``automatic``, it is chosen among the presets, with a ``free_mesh`` on any mesh
    with as many ranks. ``recompute``, ``memory``, ``loss_chunk`` and ``offload`` override the plan's own, sizes in
    bytes. ``cluster`` is the cluster on which plans are priced, by default this machine; ``optimizer`` the one whose
    state and update are counted; ``call`` one rank's call, None without example inputs. ``total`` are the samples of a
    step over all ranks, however these are to divide them; None: those of the call on every data rank.
    """

    model: nn.Module
    plan: Plan
    automatic: bool = False
    free_mesh: bool = False
    recompute: str | None = None
    memory: int | None = None
    loss_chunk: int | None = None
    offload: Offload | None = None
    cluster: Cluster | None = None
    optimizer: str = "adamw"
    call: Call | None = None
    total: int | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: str | Path | Plan,
        mesh_of: Callable[[str | Plan], Mesh],
        free_mesh: bool = False,
        pipeline: Pipeline | None = None,
        precision: str | Precision | None = None,
        recompute: str | None = None,
        memory: int | str | None = None,
        loss_chunk: int | str | None = None,
        offload: str | Offload | None = None,
        cluster: Cluster | str | Path | None = None,
        optimizer: str = "adamw",
        *,
        gradient_statistics: bool = False,
        total: int | None = None,
    ) -> Question:
        """The question of a caller; see :func:`shardgraph.compile`.

        ``mesh_of`` returns the mesh for a plan, given its name or, for a plan file, the loaded plan.

        Raises:
            PlanError: the plan or an option does not exist, is malformed, or does not fit the model or the mesh.
            ShardGraphError: a size cannot be parsed.
            ClusterError: the cluster is unknown or malformed.
        """
        named = named_or_loaded(plan)
        mesh = mesh_of(named)
        ranks = math.prod(size for _, size in mesh)
        check_tensors(model)
        automatic = named == "auto" and (ranks > 1 or total is not None)
        if named == "auto" and pipeline is not None:
            raise PlanError("'auto' chooses no pipeline: ask for 'pp', or 'pp+' and a plan for the other axes")
        if automatic:
            requested = Plan("auto", mesh, (), precision=Precision.of(precision or AS_STORED))
        else:
            requested = resolve_plan(named, mesh, pipeline, precision)
        if gradient_statistics:
            requested = replace(requested, gradient_statistics=True)
        budget, chunk = (None if size is None else parse_bytes(size) for size in (memory, loss_chunk))
        offloaded = None if offload is None else Offload.of(offload)
        machine = None if cluster is None else machine_for(cluster, ranks)
        question = cls(model, requested, automatic, free_mesh, recompute, budget, chunk, offloaded, machine, optimizer)
        question = replace(question, plan=annotated(question.with_options(requested), model), total=total)
        computed_dtypes(model, question.plan.precision, question.plan.annotations)
        if not automatic:
            question.plan.resolve(question.shapes)
        return question

    def about(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_fn: Callable[..., torch.Tensor] | None = None,
        training: bool = True,
    ) -> Question:
        """The same question for one rank's call; see :class:`shardgraph.capture.captures.Call`."""
        return replace(self, call=Call(self.model, tuple(args), dict(kwargs), loss_fn, training))

    def about_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor] | None
    ) -> Question:
        """As :meth:`about`; a pipeline, whose last stage has the loss, takes the model's own where it has labels."""
        own = self.plan.pipeline is not None and "labels" in kwargs
        return self.about(args, kwargs, loss_fn or (own_loss if own else None))

    def settled(self, plan: Plan) -> Question:
        """The question that requests ``plan``, the answer to this one, without further options; of a total, about the
        call that a rank makes under it."""
        call = self.call
        if self.total is not None and call is not None and plan.samples_per_call is not None:
            loss_fn = call.loss_fn or (own_loss if plan.pipeline is not None else None)
            call = replace(call.repeated(plan.samples_per_call), loss_fn=loss_fn)
        options: Any = {"recompute": None, "memory": None, "loss_chunk": None, "offload": None}
        return replace(self, plan=plan, automatic=False, call=call, **options)

    def with_options(self, plan: Plan) -> Plan:
        """``plan`` with what the requested one has whatever is chosen, and this question's options.

        ``memory`` alone means ``"budget"``.
        """
        options: dict[str, Any] = {"recompute": self.recompute, "loss_chunk": self.loss_chunk, "offload": self.offload}
        if self.recompute is None and self.memory is not None and plan.recompute == "none":
            options["recompute"] = "budget"
        options = {name: value for name, value in options.items() if value is not None}
        common = {name: getattr(self.plan, name) for name in ("annotations", "precision", "gradient_statistics")}
        return replace(plan, **common, **options)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The unsharded shapes of the model's parameters by name."""
        return named_shapes(self.model)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the model's parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def has_loss(self) -> bool:
        """Whether the call has its loss, which stages of a pipeline need: of a function, or of the model's labels."""
        return self.call is not None and (self.call.loss_fn is not None or "labels" in self.call.kwargs)

    @property
    def budgeted(self) -> bool:
        """Whether to find a recomputation with which the predicted peak fits."""
        return self.memory is not None or self.plan.recompute == "budget"

    @property
    def undecided(self) -> bool:
        """Whether any placements of parameters are still to be assigned."""
        return bool(self.plan.undecided(self.shapes))

    @property
    def open(self) -> bool:
        """Whether any choice is open that depends on the captured graph."""
        # Without inputs each rank assigns placements of operations at its first call, if the plan has the parameters'.
        placed = self.plan.decided or self.call is None
        return self.automatic or self.plan.pipeline is not None or self.budgeted or self.undecided or not placed

    @cached_property
    def machine(self) -> Cluster:
        """The cluster on which plans are priced."""
        return self.cluster or machine_for(None, self.plan.world_size)

    @property
    def budget(self) -> int:
        """Bytes that a rank may use."""
        return self.machine.device.memory if self.memory is None else self.memory

    @property
    def captured(self) -> Call:
        """The call to capture: with a pipeline, that of the first microbatch.

        Raises:
            PlanError: the batch cannot be cut into the plan's microbatches.
        """
        assert self.call is not None
        if self.plan.pipeline is None:
            return self.call
        args, kwargs = microbatches((self.call.args, dict(self.call.kwargs)), self.plan.pipeline.parts)[0]
        return replace(self.call, args=args, kwargs=kwargs)

    @property
    def text(self) -> str:
        """What must be equal on all ranks, as lines."""
        return (
            f"{self.plan.to_yaml()}memory: {self.memory}\nexample inputs: {self.call is not None}\n"
            f"global batch: {self.total}"
        )
