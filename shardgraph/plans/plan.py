"""The partition plan: the decisions of a compilation, as data that refers to no live object."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch

from shardgraph.arguments import (
    ANYTHING,
    NONE,
    NOT_NEGATIVE,
    PATH,
    TEXT,
    WHOLE,
    Kind,
    check_fields,
    checked,
    instance,
    of_plan,
    sequence_of,
)
from shardgraph.errors import PlanError, expect, nearest
from shardgraph.mesh import Mesh, coordinates
from shardgraph.plans import parameter_plan
from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.annotations import kinds
from shardgraph.plans.annotations.match import Annotated, annotations_by_name, matches, written
from shardgraph.plans.batch import Batch, divided
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.explanation import bounds_told, explained
from shardgraph.plans.offload_plan import NOTHING, Offload
from shardgraph.plans.parameter_plan import AUTO, GRADIENTS, OWN, REPLICATE, SHARD, ParameterPlan
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan_file import SCHEMA, read_plan, written_plan
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.sizes import format_bytes, is_whole

RECOMPUTE = ("none", "full", "selective", "budget")
Recomputation = str | tuple[tuple[str, tuple[str, ...]], ...]

_STYLES = ("whole", "sequence", "context")
_PLACEMENTS = {
    "whole": (REPLICATE, AUTO),  # or split(d)
    "sequence": (REPLICATE, AUTO),  # or split(d)
    "context": (REPLICATE,),
    "experts": (REPLICATE, AUTO, parameter_plan.split_text(0)),
    "data": (REPLICATE, SHARD),
}
"""The placements that parameters may have along an axis, by its style."""


@dataclass(frozen=True)
class Plan:
    """A partition plan, which prints as readable text and round-trips exactly through YAML (docs/plans.md).

    ``mesh``
        ``(axis name, size)`` pairs, outermost first; empty for one process without a group. With a pipeline it is the
        mesh of a stage.
    ``parameters``
        ``(pattern, ParameterPlan)`` pairs; the last matching pattern wins.
    ``operators``
        ``(axis name, style)`` pairs: the axes whose ranks share a batch and shard its computation. Activations between
        sharded matrix products are replicated (style ``"whole"``) or sharded along the sequence (``"sequence"``). With
        ``"context"`` only sequences are sharded, and parameters are ``"replicate"`` along the axis.
    ``experts``
        The axis whose ranks, each with a batch of its own, shard the experts; ``""`` for none. It lies outside of the
        axes of operators, which divide what a rank has of the experts as they divide all else.
    ``pipeline``
        The stages and schedule of a pipeline, whose axis is outside of ``mesh``; None for none.
    ``prefetch``
        The number of parameter all-gathers that may be in flight ahead of the computation, and of gradient reductions
        behind it. More overlaps more and holds more memory. Twice as many of either may be in flight where the step's
        peak of live bytes has room for them; 0: nothing is reordered. See :mod:`shardgraph.passes.schedule.schedule`.
    ``bucket``
        Bytes at most of a buffer in which all-gathers of several parameters, or reductions of several gradients, are
        one collective; 0: each has its own. See :mod:`shardgraph.passes.schedule.merge`.
    ``annotations``
        ``(pattern, annotation)`` pairs of :mod:`shardgraph.plans.annotations`: constraints that override the other
        fields. They apply to all that they match; two that contradict each other are an error.
    ``precision``
        The dtypes of computation, reduction and buffers; see :class:`shardgraph.Precision`.
    ``recompute``
        What backward recomputes instead of saving it in forward: ``"none"``, ``"full"`` (every layer), ``"selective"``
        (what is cheap for its bytes), ``"budget"`` (to be chosen for a memory budget), or rules, ``(pattern of
        modules, names of operations)`` pairs; see :mod:`shardgraph.passes.recompute`. Annotations take precedence.
    ``loss_chunk``
        Bytes of a cross-entropy's logits per chunk of rows; None: all at once. See
        :mod:`shardgraph.passes.chunking.chunk_loss`.
    ``activations``
        Placements of operands and results of operations along axes of operators and experts; None: still to be chosen.
        See :class:`shardgraph.plans.activation_plan.Activations`.
    ``offload``
        What is kept in host memory while it is not used; see :class:`shardgraph.Offload`.
    ``gradient_statistics``
        Whether backward measures gradients before and after they are reduced over data-parallel ranks, which
        :class:`shardgraph.AdaScale` needs.
    ``replicas``
        The axis outside of ``mesh`` along which copies of the model train by themselves, without communication, as
        ``(axis name, size)``; :class:`shardgraph.LocalSGD` averages them. Empty for a single copy.
    ``batch``
        The global batch that it was chosen for, and the calls of a rank in which it is computed; None: of any size, in
        one call. It is for the loop that trains: see :attr:`calls`, :attr:`samples_per_call` and :meth:`reduces`.
    ``note``
        Why this plan was chosen, for display only.
    ``considered``
        The candidates that it was chosen from, if it was, and itself among them; see :meth:`explain`.
    ``remarks``
        What the search found out beside: what was not searched, and what other devices would do. For display only.
    ``bounds``
        Plans by name and mesh that were not priced, with the seconds that a sample takes at least. For display only.
    """

    name: str
    mesh: Mesh
    parameters: tuple[tuple[str, ParameterPlan], ...]
    prefetch: int = 4
    bucket: int = 0
    operators: tuple[tuple[str, str], ...] = ()
    annotations: tuple[Annotated, ...] = ()
    recompute: Recomputation = "none"
    loss_chunk: int | None = None
    experts: str = ""
    pipeline: Pipeline | None = None
    precision: Precision = AS_STORED
    offload: Offload = NOTHING
    gradient_statistics: bool = False
    replicas: Mesh = ()
    activations: Activations | None = None
    batch: Batch | None = None
    note: str = ""
    considered: tuple[Candidate, ...] = ()
    remarks: tuple[str, ...] = ()
    schema: int = SCHEMA
    bounds: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "plan: ", **_FIELDS)
        _check_plan(self)

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return math.prod(size for _, size in self.whole_mesh)

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks: the axis of a pipeline or of replicas, if any, outside that of a stage or replica."""
        outside = ((self.pipeline.axis, self.pipeline.ranks),) if self.pipeline else self.replicas
        return (*outside, *self.mesh)

    @property
    def copies(self) -> int:
        """Number of replicas, which train with batches of their own."""
        return math.prod(size for _, size in self.replicas)

    @property
    def of_stage(self) -> Plan:
        """The plan of one stage, without the pipeline."""
        return replace(self, pipeline=None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes, outermost first."""
        return tuple(name for name, _ in self.mesh)

    @property
    def data_mesh(self) -> Mesh:
        """The axes along which every rank has a batch of its own."""
        return tuple((name, size) for name, size in self.mesh if name not in dict(self.operators))

    @property
    def data_size(self) -> int:
        """Number of ranks with a batch of their own."""
        return math.prod(size for _, size in self.data_mesh)

    @property
    def is_of_data(self) -> bool:
        """Whether every rank computes its own batch by itself, so that only parameters and gradients are sent."""
        return not self.operators and not self.experts and self.pipeline is None

    @cached_property
    def ignores_any(self) -> bool:
        """Whether it may leave a parameter to each rank."""
        unreduced = any(entry.gradient == OWN for _, entry in self.parameters)
        return unreduced or any(isinstance(each, kinds.ignored) for _, each in self.annotations)

    def ignores(self, fqn: str) -> bool:
        """Whether the plan leaves the parameter of this name to each rank, with its own gradient."""
        entry = next((entry for pattern, entry in reversed(self.parameters) if fnmatch.fnmatchcase(fqn, pattern)), None)
        if entry is not None and entry.gradient == OWN:
            return True
        return any(isinstance(each, kinds.ignored) and matches(pattern, fqn) for pattern, each in self.annotations)

    @property
    def calls(self) -> int:
        """Number of calls of a rank in one step, whose gradients are added up before the optimizer's step."""
        return self.batch.calls if self.batch else 1

    @property
    def reduces_once(self) -> bool:
        """Whether data ranks reduce the gradients of a step in the last of several calls alone."""
        return self.batch is not None and self.batch.once and self.data_size > 1

    def reduces(self, call: int) -> bool:
        """Whether a call of a step, counted from 0, reduces gradients over data ranks; the others are under
        ``no_sync()``."""
        return not self.reduces_once or call % self.calls == self.calls - 1

    @property
    def samples_per_call(self) -> int | None:
        """Samples of one call of a rank; None if the plan was not chosen for a global batch."""
        return self.batch.samples // self.data_size // self.calls if self.batch else None

    @property
    def division(self) -> str:
        """How the samples of a step are divided, as text; empty if it was not chosen for a global batch."""
        return divided(self.batch, self.data_size, self.pipeline.parts if self.pipeline else 1) if self.batch else ""

    @property
    def measures_gradients(self) -> bool:
        """Whether gradients are measured: those of a single data-parallel rank are not reduced."""
        return self.gradient_statistics and self.data_size > 1

    def data_rank(self, rank: int) -> int:
        """The index of the batch of ``rank``."""
        batch = 0
        for (axis, size), coordinate in zip(self.mesh, coordinates(self.mesh, rank), strict=True):
            if axis not in dict(self.operators):
                batch = batch * size + coordinate
        return batch

    @property
    def decided(self) -> bool:
        """Whether placements of operations are assigned along all axes that need them, so compiling needs no search."""
        chosen = dict(self.activations.along) if self.activations else {}
        axes = {*dict(self.operators), *filter(None, [self.experts])}
        return {axis for axis in axes if dict(self.mesh)[axis] > 1} <= chosen.keys()

    def undecided(self, shapes: Mapping[str, torch.Size]) -> list[str]:
        """The parameters whose placement along an axis of operators or experts is still to be chosen."""
        return [fqn for fqn, entry in self.resolve(shapes).items() if AUTO in entry.placements]

    def storable(self, fqn: str, entry: ParameterPlan) -> ParameterPlan:
        """``entry``, unsharded along data axes if its part along operator axes cannot be sharded.

        Raises:
            PlanError: an annotation requires that shard.
        """
        storable = parameter_plan.without_shards_of_blocks(entry)
        for pattern, annotation in self.annotations if storable != entry else ():
            stores = isinstance(annotation, kinds.shard) and annotation.mesh_dim not in dict(self.operators)
            if stores and matches(pattern, fqn):
                raise PlanError(
                    f"{written((pattern, annotation))} cannot be for {fqn!r}: its rows are divided in blocks, as "
                    f"{list(entry.placements)}, and what is left of each block cannot be stored in shards"
                )
        return storable

    def resolve(self, shapes: Mapping[str, torch.Size]) -> dict[str, ParameterPlan]:
        """The plan of every parameter by name.

        A parameter without rows to shard (a scalar, or one of 0 elements) is replicated whatever its rule. Annotations
        are applied last.

        Raises:
            PlanError: a pattern matches no parameter, a parameter matches no pattern, or an annotation cannot be met.
        """
        resolved: dict[str, ParameterPlan] = {}
        for pattern, entry in self.parameters:
            matched = fnmatch.filter(shapes, pattern)
            if not matched and not (pattern == "*" and not shapes):
                raise PlanError(
                    f"plan {self.name!r} names the parameter {pattern!r}, which this model does not have"
                    f"{nearest(pattern, shapes) or f'; it has {_some(shapes)}'}"
                )
            resolved |= dict.fromkeys(matched, entry)
        if unmatched := [fqn for fqn in shapes if fqn not in resolved]:
            raise PlanError(
                f"plan {self.name!r} says nothing of {_some(unmatched)}: add a pattern that matches, such as '*'"
            )
        resolved = {fqn: parameter_plan.fitted(resolved[fqn], fqn, shape, self.mesh) for fqn, shape in shapes.items()}
        if self.offload.parameters:
            resolved = {fqn: parameter_plan.offloaded(entry) for fqn, entry in resolved.items()}
        return resolved | _annotated(self, resolved, shapes)

    @checked(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the YAML form to ``path``."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @classmethod
    @checked(path=PATH)
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: there is no such file, or a field has a value that is not allowed.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan file {str(path)!r}: {error.strerror}") from error
        return cls.from_yaml(text, source=str(path))

    def to_yaml(self) -> str:
        """The YAML form; ``Plan.from_yaml`` of it equals this plan."""
        return written_plan({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    @checked(text=of_plan(TEXT), source=TEXT)
    def from_yaml(cls, text: str, source: str = "the plan") -> Plan:
        """Parse the YAML form; ``source`` names it in errors."""
        values = read_plan(text, source)
        for key, each in enumerate(considered := list(values.get("considered", ()))):
            if each.plan is not None:
                considered[key] = replace(each, plan=cls(**each.plan))
        return cls(**values | ({"considered": tuple(considered)} if considered else {}))

    @property
    def recomputed(self) -> str:
        """What backward recomputes, as text."""
        if isinstance(self.recompute, str):
            return self.recompute
        return "; ".join(f"{', '.join(names)} of {pattern or 'the model'}" for pattern, names in self.recompute)

    @property
    def alternatives(self) -> tuple[Plan, ...]:
        """The best of the other candidates that fit, the fastest first: plans that run."""
        others = [each for each in self.considered[1:] if each.fits and each.plan is not None]
        return tuple(each.plan for each in others)

    def explain(self, *, bounds: bool = False) -> str:
        """Why the plan was chosen: the predicted costs of all candidates, and what was found out beside, as text; with
        ``bounds``, also what a sample takes at least on each mesh that was not priced."""
        why = explained(self.name, self.note, self.division, self.considered, self.remarks)
        return "\n".join([why, *bounds_told(self.bounds)]) if bounds else why

    def _repr_html_(self) -> str:
        """What a notebook shows: the plan as text, and why it was chosen, if it was."""
        why = f"<details><summary>why</summary><pre>{escape(self.explain())}</pre></details>" if self.considered else ""
        return f"<pre>{escape(str(self))}</pre>{why}"

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.whole_mesh) or "one process"
        lines = [f"plan {self.name} on {mesh}, prefetch {self.prefetch}" + (f": {self.note}" if self.note else "")]
        if self.batch:
            lines.append(f"  {self.division}")
        if self.pipeline:
            lines.append(f"  pipeline {self.pipeline}")
        if self.replicas:
            lines.append(f"  replicas along {self.replicas[0][0]!r}, which an optimizer averages now and then")
        width = max((len(pattern) for pattern, _ in self.parameters), default=0)
        for pattern, entry in self.parameters:
            lines.append(f"  {pattern:<{width}}  {entry.on(self.axes)}")
        if self.offload != NOTHING:
            lines.append(f"  offloaded to host memory: {self.offload}")
        if dtypes := str(self.precision):
            lines.append(f"  precision: {dtypes}")
        if self.recompute != "none":
            lines.append(f"  computed again in backward: {self.recomputed}")
        if self.loss_chunk is not None:
            lines.append(f"  scores of a loss in chunks of {format_bytes(self.loss_chunk)}")
        if self.gradient_statistics:
            lines.append("  gradients measured before and after their reduction")
        lines += [f"  annotated {written(each)}" for each in self.annotations]
        return "\n".join(lines)


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _annotated(
    plan: Plan, entries: Mapping[str, ParameterPlan], shapes: Mapping[str, torch.Size]
) -> dict[str, ParameterPlan]:
    """The entries of annotated parameters, with the annotations applied."""
    changed: dict[str, ParameterPlan] = {}
    for pattern, annotation in plan.annotations:
        if isinstance(annotation, kinds.offload):
            changed |= {fqn: parameter_plan.offloaded(entries[fqn]) for fqn in shapes if matches(pattern, fqn)}
    of: type[kinds.Annotation] = kinds.keep_gathered  # without a mesh nothing is sharded
    if plan.mesh:
        of = kinds.ParameterAnnotation
        for annotated in plan.annotations:
            _check_axis(plan, annotated)
    for fqn, together in annotations_by_name(plan.annotations, of, shapes, "parameters").items():
        entry = changed.get(fqn, entries[fqn])
        for annotated in sorted(together, key=lambda each: not isinstance(each[1], kinds.Placement)):
            annotation = annotated[1]
            assert isinstance(annotation, kinds.ParameterAnnotation)
            try:
                entry = annotation.changed(entry, shapes[fqn], plan)
            except PlanError as error:
                raise PlanError(
                    f"{written(annotated)} cannot be for {fqn!r} of shape {list(shapes[fqn])} on the mesh "
                    f"{dict(plan.mesh)}: {error}"
                ) from None
        changed[fqn] = plan.storable(fqn, entry)
    return changed


def _check_axis(plan: Plan, annotated: Annotated) -> None:
    annotation = annotated[1]
    placement = annotation.placement if isinstance(annotation, (kinds.output, kinds.input)) else annotation
    if not isinstance(placement, kinds.Placement) or placement.mesh_dim is None:
        return
    if placement.mesh_dim not in plan.axes:
        raise PlanError(
            f"{written(annotated)} names the mesh axis {placement.mesh_dim!r}, and plan {plan.name!r} has the mesh "
            f"{dict(plan.mesh)}: name one of its axes, or use a plan and mesh that have {placement.mesh_dim!r}"
        )
    of_activation = placement is not annotation and isinstance(placement, kinds.shard)
    if of_activation and placement.mesh_dim not in dict(plan.operators):
        raise PlanError(
            f"{written(annotated)}: {placement.mesh_dim!r} is an axis of data in plan {plan.name!r}, along which every "
            "rank has a batch of its own: activations are placed along an axis of operators, as 'tp' and 'fsdp+tp' have"
        )


def _are_rules(value: object) -> bool:
    """Whether a value is a tuple of recompute rules: ``(("layers.*.mlp", ("silu", "mul")),)``."""
    pairs = isinstance(value, tuple) and all(isinstance(rule, tuple) and len(rule) == 2 for rule in value)
    return pairs and all(
        isinstance(pattern, str) and isinstance(names, tuple) and all(isinstance(name, str) for name in names)
        for pattern, names in value  # type: ignore[attr-defined]
    )


def _pairs(allowed: str, second: Kind) -> Kind:
    """A tuple of pairs of a text and what ``second`` is."""

    def is_pair(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and second.fits(value[1])

    return sequence_of(f"pairs of {allowed}", Kind("", is_pair))


_FIELDS = {
    "name": of_plan(TEXT),
    "mesh": _pairs("a mesh axis and its size, such as (('dp', 4),)", ANYTHING),
    "parameters": _pairs("a pattern of names and a ParameterPlan", instance("", parameter_plan.ParameterPlan)),
    "operators": _pairs("a mesh axis and its style", TEXT),
    "annotations": _pairs("a pattern and an annotation", ANYTHING),
    "experts": of_plan(TEXT),
    "pipeline": of_plan(instance("a Pipeline", Pipeline) | NONE),
    "replicas": _pairs("a mesh axis and its size", ANYTHING),
    "note": of_plan(TEXT),
    "considered": sequence_of("candidates", instance("", Candidate)),
    "remarks": sequence_of("texts", TEXT),
    "bounds": _pairs("a plan's name and mesh and its seconds", NOT_NEGATIVE),
    "schema": of_plan(WHOLE),
}


def _check_plan(plan: Plan) -> None:
    def check(allowed: bool, field: str, value: object, expected: str) -> None:
        expect(allowed, f"plan {plan.name!r}: {field}", value, expected)

    axis_of_mesh = f"an axis of the mesh {dict(plan.mesh)}"
    check(plan.schema == SCHEMA, "schema", plan.schema, f"{SCHEMA}, the one that this version of shardgraph reads")
    check(is_whole(plan.prefetch, 0), "prefetch", plan.prefetch, "a whole number from 0")
    check(is_whole(plan.bucket, 0), "bucket", plan.bucket, "a whole number of bytes, or 0 for no buckets")
    check(len(set(plan.axes)) == len(plan.axes), "mesh", dict(plan.mesh), "axes with different names")
    for axis, size in plan.mesh:
        check(is_whole(size, 1), f"mesh.{axis}", size, "a whole number from 1")
    for axis, style in plan.operators:
        check(axis in plan.axes, "operators", axis, axis_of_mesh)
        check(style in _STYLES, f"operators.{axis}", style, " or ".join(map(repr, _STYLES)))
    if plan.pipeline:
        axis = plan.pipeline.axis
        check(axis not in plan.axes, "pipeline.axis", axis, "an axis outside of the mesh, which is that of a stage")
    axes = dict(plan.replicas)
    check(len(plan.replicas) <= 1 and not axes.keys() & {*plan.axes}, "replicas", axes, "one axis outside of the mesh")
    check(all(is_whole(size, 1) for size in axes.values()), "replicas", axes, "an axis of a whole number of ranks")
    expected = "given without a pipeline, whose stages are of one replica: use a plan without 'pp'"
    check(not (plan.replicas and plan.pipeline), "replicas", axes, expected)
    if plan.experts:
        check(plan.experts in plan.axes, "experts", plan.experts, axis_of_mesh)
        inside = plan.axes[plan.axes.index(plan.experts) :]
        ordered = all(axis in inside for axis, _ in plan.operators)
        expected = f"outside of the axes of operators, {list(dict(plan.operators))}: give the mesh in that order"
        check(ordered, "experts", plan.experts, expected)  # experts are divided first, and then what each rank has
    check(isinstance(plan.offload, Offload), "offload", plan.offload, "an Offload, such as Offload(parameters=True)")
    statistics = plan.gradient_statistics
    check(isinstance(statistics, bool), "gradient_statistics", statistics, "true or false")
    expected = "False in a pipeline, which sums over microbatches first: use a plan without 'pp', such as 'fsdp'"
    check(not (statistics and plan.pipeline), "gradient_statistics", statistics, expected)
    expected = "False with experts, of which no rank has a gradient of its batch alone: use a plan without 'ep'"
    check(not (statistics and plan.experts), "gradient_statistics", statistics, expected)
    if plan.activations is not None:
        chosen = isinstance(plan.activations, Activations)
        check(chosen, "activations", plan.activations, "an Activations, or None to have them chosen")
        for axis, _ in plan.activations.along:
            known = axis in (*dict(plan.operators), plan.experts)
            check(known, "activations", axis, "given for axes of operators or experts")
    if plan.batch is not None:
        check(isinstance(plan.batch, Batch), "batch", plan.batch, "a Batch, such as Batch(samples=64, calls=2)")
        calls = plan.data_size * plan.calls
        expected = f"a multiple of the {calls} calls of all data ranks in a step"
        check(plan.batch.samples % calls == 0, "batch.samples", plan.batch.samples, expected)
        expected = "'each' with a pipeline, which reduces once for all microbatches of a call"
        check(not (plan.batch.once and plan.pipeline), "batch.reduce", plan.batch.reduce, expected)
    expected = "a Precision, such as Precision('bfloat16', reduce='float32')"
    check(isinstance(plan.precision, Precision), "precision", plan.precision, expected)
    for annotated in plan.annotations:
        pair = isinstance(annotated, tuple) and len(annotated) == 2 and isinstance(annotated[1], kinds.Annotation)
        check(pair, "annotations", annotated, "pairs of a pattern and an annotation")
    rules = plan.recompute in RECOMPUTE if isinstance(plan.recompute, str) else _are_rules(plan.recompute)
    check(rules, "recompute", plan.recompute, f"{', '.join(map(repr, RECOMPUTE))} or operations by module")
    expected = "a whole number of bytes from 1, or None for all logits at once"
    check(plan.loss_chunk is None or is_whole(plan.loss_chunk, 1), "loss_chunk", plan.loss_chunk, expected)
    styles = dict.fromkeys(plan.axes, "data") | dict(plan.operators) | {plan.experts: "experts"}
    for pattern, entry in plan.parameters:
        here, placements = f"parameters.{pattern}", list(entry.placements)
        expected = f"one for each of the {len(plan.mesh)} mesh axes"
        check(len(placements) == len(plan.mesh), f"{here}.placements", placements, expected)
        for axis, placement in zip(plan.axes, placements, strict=True):
            options, splits = _PLACEMENTS[styles[axis]], styles[axis] in ("whole", "sequence")
            expected = " or ".join(map(repr, (*options, "split(d)") if splits else options)) + f" for the axis {axis!r}"
            expected += ", along which sequences are sharded" if styles[axis] == "context" else ""
            allowed = placement in options or (splits and parameter_plan.parse_split(placement) is not None)
            check(allowed, f"{here}.placements", placement, expected)
        check(placements.count(SHARD) <= 1, f"{here}.placements", placements, "sharded over one mesh axis at most")
        check(entry.gradient in GRADIENTS, f"{here}.gradient", entry.gradient, " or ".join(map(repr, GRADIENTS)))
        scattered = entry.gradient == "reduce_scatter" and entry.shard_axis is None and plan.mesh
        expected = "'all_reduce' for a parameter that is not sharded"
        check(not scattered, f"{here}.gradient", entry.gradient, expected)
        for flag in ("reshard_after_forward", "offload"):
            value = getattr(entry, flag)
            check(isinstance(value, bool), f"{here}.{flag}", value, "true or false")
