"""The partition plan: the decisions of a compilation, as data.

A :class:`Plan` is frozen, refers to no live object, prints as readable text and round-trips exactly through YAML.
Whatever ``plan="auto"`` can choose can also be written by hand::

    schema: 1
    name: fsdp
    mesh: {dp: 2}
    prefetch: 4
    parameters:
      '*': {placements: [shard(0)], gradient: reduce_scatter, reshard_after_forward: true}
      lm_head.weight: {placements: [replicate], gradient: all_reduce, reshard_after_forward: false}

``parameters`` maps patterns of parameter names (shell wildcards) to placements; the last pattern that matches wins.
``operators`` names the mesh axes whose ranks share one batch and shard its computation::

    mesh: {dp: 2, tp: 4}
    operators: {tp: sequence}
    parameters:
      '*': {placements: [shard(0), auto], gradient: reduce_scatter, reshard_after_forward: true}

``annotations`` are constraints on the plan, from :func:`shardgraph.annotate` or written here by hand::

    annotations:
      - {'model.layers.*.mlp.up_proj.weight': "shard(0, 'tp')"}
      - {'model.layers.*': recompute()}

``pipeline`` cuts the model into stages. Each rank along a further axis has one or more of them; ``mesh`` is then the
mesh of a stage::

    mesh: {dp: 2}
    pipeline: {ranks: 2, schedule: 1f1b, microbatches: 8, stages: [model.layers.4]}

``precision`` sets the dtypes of computation and of gradient reduction; parameters are stored in their own dtype::

    precision: {parameters: bfloat16, reduce: float32}

``offload`` sets what is kept in host memory while unused; for single parameters, write ``offload: true`` there::

    offload: {parameters: true, disk: /scratch}

``recompute`` sets what backward recomputes: ``none``, ``full``, ``selective``, ``budget`` (chosen to fit the available
memory), or operations by module::

    recompute:
      'model.layers.*.mlp': [silu, mul]
      'model.layers.[0-5].self_attn': ['*']

``activations`` assigns placements to operands and results of operations along axes of operators or experts, for the
call that they were chosen for, so that compiling the plan again needs no search. For operations without an entry,
placements follow from the operands::

    activations:
      call: forward and backward of int64[4, 2048], int64[4, 2048]
      tp:
        model.embed_tokens/embedding.1: split(0), replicate -> partial by embedding
        model.layers.*.mlp.up_proj/mm.1: replicate, split(1) -> split(1)

``loss_chunk`` is the number of bytes of a cross-entropy's logits per chunk, if it is computed in chunks::

    loss_chunk: 67108864

``experts`` names an axis whose ranks have batches of their own and shard the experts of a mixture of experts::

    mesh: {dp: 2, ep: 4}
    experts: ep
    parameters:
      '*': {placements: [shard(0), replicate], gradient: reduce_scatter, reshard_after_forward: true}
      '*.experts.*': {placements: [shard(0), split(0)], gradient: reduce_scatter, reshard_after_forward: true}
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from shardgraph.errors import PlanError, nearest
from shardgraph.mesh import Mesh, coordinates
from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.annotations.kinds import (
    Annotation,
    ParameterAnnotation,
    Placement,
    input,
    keep_gathered,
    offload,
    output,
    shard,
)
from shardgraph.plans.annotations.match import Annotated, annotations_by_name, matches, written
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.offload_plan import NOTHING, Offload
from shardgraph.plans.parameter_plan import (
    AUTO,
    GRADIENTS,
    REPLICATE,
    SHARD,
    ParameterPlan,
    offloaded,
    parse_split,
    split_text,
    unsharded,
    without_shards_of_blocks,
)
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan_file import SCHEMA, read_plan, written_plan
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.sizes import divisors, format_bytes, format_seconds

RECOMPUTE = ("none", "full", "selective", "budget")
Recomputation = str | tuple[tuple[str, tuple[str, ...]], ...]
_STYLES = ("whole", "sequence", "context")


@dataclass(frozen=True)
class Plan:
    """A partition plan; see the module's docstring for its YAML form.

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
        The axis whose ranks, each with a batch of its own, shard the experts; ``""`` for none.
    ``pipeline``
        The stages and schedule of a pipeline, whose axis is outside of ``mesh``; None for none.
    ``prefetch``
        The number of parameter all-gathers that may be in flight ahead of the computation, and of gradient reductions
        behind it. More overlaps more and holds more memory.
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
    ``note``
        Why this plan was chosen, for display only.
    ``considered``
        The candidates that it was chosen from, if it was; see :meth:`explain`.
    """

    name: str
    mesh: Mesh
    parameters: tuple[tuple[str, ParameterPlan], ...]
    prefetch: int = 4
    operators: tuple[tuple[str, str], ...] = ()
    annotations: tuple[Annotated, ...] = ()
    recompute: Recomputation = "none"
    loss_chunk: int | None = None
    experts: str = ""
    pipeline: Pipeline | None = None
    precision: Precision = AS_STORED
    offload: Offload = NOTHING
    activations: Activations | None = None
    note: str = ""
    considered: tuple[Candidate, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_plan(self)

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return math.prod(size for _, size in self.whole_mesh)

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks: the pipeline axis, if any, outside the mesh of a stage."""
        return ((self.pipeline.axis, self.pipeline.ranks), *self.mesh) if self.pipeline else self.mesh

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
        divided = dict(self.operators)
        return tuple((name, size) for name, size in self.mesh if name not in divided)

    @property
    def data_size(self) -> int:
        """Number of ranks with a batch of their own."""
        return math.prod(size for _, size in self.data_mesh)

    def data_rank(self, rank: int) -> int:
        """The index of the batch of ``rank``."""
        divided, found = dict(self.operators), 0
        for (name, size), here in zip(self.mesh, coordinates(self.mesh, rank), strict=True):
            found = found if name in divided else found * size + here
        return found

    @property
    def decided(self) -> bool:
        """Whether placements of operations are assigned along all axes that need them, so compiling needs no search."""
        dividing = {axis for axis, _ in self.operators} | ({self.experts} if self.experts else set())
        return dividing <= {axis for axis, _ in (self.activations.along if self.activations else ())}

    def undecided(self, shapes: Mapping[str, torch.Size]) -> list[str]:
        """The parameters whose placement along an axis of operators or experts is still to be chosen."""
        return [fqn for fqn, entry in self.resolve(shapes).items() if AUTO in entry.placements]

    def storable(self, fqn: str, entry: ParameterPlan) -> ParameterPlan:
        """``entry``, unsharded along data axes if its part along operator axes cannot be sharded.

        Raises:
            PlanError: an annotation requires that shard.
        """
        found = without_shards_of_blocks(entry)
        for pattern, annotation in self.annotations if found != entry else ():
            stores = isinstance(annotation, shard) and annotation.mesh_dim not in dict(self.operators)
            if stores and matches(pattern, fqn):
                raise PlanError(
                    f"{written((pattern, annotation))} cannot be for {fqn!r}: its rows are divided in blocks, as "
                    f"{list(entry.placements)}, and what is left of each block cannot be stored in shards"
                )
        return found

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
        fitted = {fqn: _fit(fqn, resolved[fqn], shape, self.mesh) for fqn, shape in shapes.items()}
        fitted |= {fqn: offloaded(entry) for fqn, entry in fitted.items() if self.offload.parameters}
        return fitted | _annotated(self, fitted, shapes)

    def save(self, path: str | Path) -> None:
        """Write the YAML form to ``path``."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @classmethod
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
    def from_yaml(cls, text: str, source: str = "the plan") -> Plan:
        """Parse the YAML form; ``source`` names it in errors."""
        return cls(**read_plan(text, source))

    def explain(self) -> str:
        """The predicted costs by which the plan was chosen, as text."""
        if not self.considered:
            return (
                f"plan {self.name!r} was not chosen among others: plan='auto' with example inputs prices every preset"
            )
        lines = [
            f"plan {self.name!r}: {self.note}",
            f"  {'plan':<12}{'mesh':<34}{'memory of a rank':>18}{'step':>12}{'batches':>9}",
        ]
        for candidate in self.considered:
            mesh = " x ".join(f"{axis}={size}" for axis, size in candidate.mesh)
            chosen = "  <- chosen" if (candidate.name, candidate.mesh) == (self.name, self.mesh) else ""
            cells = f"{format_bytes(candidate.memory):>18}{format_seconds(candidate.seconds):>12}{candidate.batches:>9}"
            lines.append(
                f"  {candidate.name:<12}{mesh:<34}{cells}{chosen or ('' if candidate.fits else '  too large')}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.whole_mesh) or "one process"
        lines = [f"plan {self.name} on {mesh}, prefetch {self.prefetch}" + (f": {self.note}" if self.note else "")]
        if self.pipeline:
            lines.append(f"  pipeline {self.pipeline}")
        width = max((len(pattern) for pattern, _ in self.parameters), default=0)
        for pattern, entry in self.parameters:
            where = ", ".join(f"{p} over {axis}" for p, axis in zip(entry.placements, self.axes, strict=True))
            again = ""
            if entry.shard_axis is not None:
                again = "; gathered again in backward" if entry.reshard_after_forward else "; kept for backward"
            again += "; in host memory" if entry.offload else ""
            lines.append(f"  {pattern:<{width}}  {where or 'whole'}; gradient {entry.gradient}{again}")
        if self.offload != NOTHING:
            lines.append(f"  offloaded to host memory: {self.offload}")
        if said := str(self.precision):
            lines.append(f"  precision: {said}")
        if self.recompute != "none":
            lines.append(f"  computed again in backward: {self._again()}")
        if self.loss_chunk is not None:
            lines.append(f"  scores of a loss in chunks of {format_bytes(self.loss_chunk)}")
        lines += [f"  annotated {written(each)}" for each in self.annotations]
        return "\n".join(lines)

    def _again(self) -> str:
        if isinstance(self.recompute, str):
            return self.recompute
        return "; ".join(f"{', '.join(names)} of {pattern or 'the model'}" for pattern, names in self.recompute)


def in_patterns(entries: Mapping[str, ParameterPlan]) -> tuple[tuple[str, ParameterPlan], ...]:
    """The entries as few patterns: the most common one for all, then the exceptions, layers together."""
    if not entries:
        return ()
    common, _ = Counter(entries.values()).most_common(1)[0]
    together: dict[str, set[ParameterPlan]] = {}
    for fqn, entry in entries.items():
        together.setdefault(_any_layer(fqn), set()).add(entry)
    found = {"*": common}
    for fqn, entry in entries.items():
        pattern = _any_layer(fqn) if len(together[_any_layer(fqn)]) == 1 else fqn
        if entry != common:
            found[pattern] = entry
    plan = tuple(found.items())
    wrong = {fqn: entry for fqn, entry in entries.items() if _last(plan, fqn) != entry}
    return (*plan, *wrong.items())


def _any_layer(fqn: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", fqn)


def _last(plan: tuple[tuple[str, ParameterPlan], ...], fqn: str) -> ParameterPlan:
    return [entry for pattern, entry in plan if fnmatch.fnmatchcase(fqn, pattern)][-1]


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _fit(fqn: str, entry: ParameterPlan, shape: torch.Size, mesh: Mesh) -> ParameterPlan:
    for position, (dim, blocks) in entry.splits.items():
        axis, parts = mesh[position]
        if dim >= len(shape) or not shape[dim] or shape[dim] % (blocks * parts):
            raise PlanError(
                f"{fqn!r} of shape {list(shape)} cannot be {entry.placements[position]!r} over {axis!r}, which has "
                f"{parts} ranks: the dimension must be a multiple of {blocks * parts}. "
                f"Use {_sizes(shape, dim, blocks)}, another dimension, or 'replicate'"
            )
    if entry.shard_axis is not None and not (len(shape) and math.prod(shape)):
        return unsharded(entry)
    return without_shards_of_blocks(entry)


def _sizes(shape: torch.Size, dim: int, blocks: int) -> str:
    """The sizes of an axis that divide a dimension of a parameter."""
    rows = shape[dim] if dim < len(shape) else 0
    works = [] if rows % blocks else divisors(rows // blocks)
    return f"an axis of {' or '.join(map(str, works))} ranks" if works else "another size of the axis"


def _annotated(
    plan: Plan, entries: Mapping[str, ParameterPlan], shapes: Mapping[str, torch.Size]
) -> dict[str, ParameterPlan]:
    """The entries of annotated parameters, with the annotations applied."""
    changed: dict[str, ParameterPlan] = {}
    for pattern, annotation in plan.annotations:
        if isinstance(annotation, offload):
            changed |= {fqn: offloaded(entries[fqn]) for fqn in shapes if matches(pattern, fqn)}
    of_parameters: type[Annotation] = ParameterAnnotation
    if not plan.mesh:  # nothing is sharded
        of_parameters = keep_gathered
    for annotated in plan.annotations if plan.mesh else ():
        _check_axis(plan, annotated)
    for fqn, together in annotations_by_name(plan.annotations, of_parameters, shapes, "parameters").items():
        entry = changed.get(fqn, entries[fqn])
        for annotated in sorted(together, key=lambda each: not isinstance(each[1], Placement)):
            annotation = annotated[1]
            assert isinstance(annotation, ParameterAnnotation)
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
    activation = isinstance(annotation, (output, input))
    placement = annotation.placement if isinstance(annotation, (output, input)) else annotation
    if not isinstance(placement, Placement) or placement.mesh_dim is None:
        return
    if placement.mesh_dim not in plan.axes:
        raise PlanError(
            f"{written(annotated)} names the mesh axis {placement.mesh_dim!r}, and plan {plan.name!r} has the mesh "
            f"{dict(plan.mesh)}: name one of its axes, or use a plan and mesh that have {placement.mesh_dim!r}"
        )
    if activation and isinstance(placement, shard) and placement.mesh_dim not in dict(plan.operators):
        raise PlanError(
            f"{written(annotated)}: {placement.mesh_dim!r} is an axis of data in plan {plan.name!r}, along which every "
            "rank has a batch of its own: activations are placed along an axis of operators, as 'tp' and 'fsdp+tp' have"
        )


# -- validation ------------------------------------------------------------------------------------


def _are_rules(value: object) -> bool:
    """Whether a value is a tuple of recompute rules: ``(("layers.*.mlp", ("silu", "mul")),)``."""
    pairs = isinstance(value, tuple) and all(isinstance(rule, tuple) and len(rule) == 2 for rule in value)
    return pairs and all(
        isinstance(pattern, str) and isinstance(names, tuple) and all(isinstance(name, str) for name in names)
        for pattern, names in value  # type: ignore[attr-defined]
    )


def _check_plan(plan: Plan) -> None:
    def refuse(field: str, value: object, allowed: str) -> None:
        raise PlanError(f"plan {plan.name!r}: {field} is {value!r}; it may be {allowed}")

    if plan.schema != SCHEMA:
        refuse("schema", plan.schema, f"{SCHEMA}, the one that this version of shardgraph reads")
    if not isinstance(plan.prefetch, int) or isinstance(plan.prefetch, bool) or plan.prefetch < 0:
        refuse("prefetch", plan.prefetch, "a whole number from 0")
    if len(set(plan.axes)) != len(plan.axes):
        refuse("mesh", dict(plan.mesh), "axes with different names")
    for axis, size in plan.mesh:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            refuse(f"mesh.{axis}", size, "a whole number from 1")
    for axis, style in plan.operators:
        if axis not in plan.axes:
            refuse("operators", axis, f"an axis of the mesh {dict(plan.mesh)}")
        if style not in _STYLES:
            refuse(f"operators.{axis}", style, " or ".join(map(repr, _STYLES)))
    if plan.pipeline and plan.pipeline.axis in plan.axes:
        refuse("pipeline.axis", plan.pipeline.axis, "an axis outside of the mesh, which is that of a stage")
    if plan.experts and plan.experts not in plan.axes:
        refuse("experts", plan.experts, f"an axis of the mesh {dict(plan.mesh)}")
    if plan.experts and plan.operators:
        refuse("experts", plan.experts, "given beside axes of data, not of operators: 'ep' or 'tp', not both")
    if not isinstance(plan.offload, Offload):
        refuse("offload", plan.offload, "an Offload, such as Offload(parameters=True)")
    if plan.activations is not None and not isinstance(plan.activations, Activations):
        refuse("activations", plan.activations, "an Activations, or None to have them chosen")
    for axis, _ in plan.activations.along if plan.activations else ():
        if axis not in (*dict(plan.operators), plan.experts):
            refuse("activations", axis, "given for axes of operators or experts")
    if not isinstance(plan.precision, Precision):
        refuse("precision", plan.precision, "a Precision, such as Precision('bfloat16', reduce='float32')")
    for annotated in plan.annotations:
        if not (isinstance(annotated, tuple) and len(annotated) == 2 and isinstance(annotated[1], Annotation)):
            refuse("annotations", annotated, "pairs of a pattern and an annotation")
    if plan.recompute not in RECOMPUTE and not _are_rules(plan.recompute):
        refuse("recompute", plan.recompute, f"{', '.join(map(repr, RECOMPUTE))} or operations by module")
    chunk = plan.loss_chunk
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        refuse("loss_chunk", chunk, "a whole number of bytes from 1, or None for all scores at once")
    styles = [dict(plan.operators).get(axis) for axis in plan.axes]
    for pattern, entry in plan.parameters:
        here = f"parameters.{pattern}"
        if len(entry.placements) != len(plan.mesh):
            refuse(f"{here}.placements", list(entry.placements), f"one for each of the {len(plan.mesh)} mesh axes")
        for axis, placement, along in zip(plan.axes, entry.placements, styles, strict=True):
            if along == "context":
                if placement != REPLICATE:
                    refuse(f"{here}.placements", placement, f"{REPLICATE!r}: along {axis!r} sequences are cut")
            elif along and placement not in (REPLICATE, AUTO) and parse_split(placement) is None:
                refuse(f"{here}.placements", placement, f"{REPLICATE!r}, {AUTO!r} or 'split(d)' for the axis {axis!r}")
            elif axis == plan.experts and placement not in (REPLICATE, AUTO, split_text(0)):
                refuse(f"{here}.placements", placement, f"{REPLICATE!r}, {AUTO!r} or 'split(0)' for the axis {axis!r}")
            elif not along and axis != plan.experts and placement not in (REPLICATE, SHARD):
                refuse(f"{here}.placements", placement, f"{REPLICATE!r} or {SHARD!r} for the axis {axis!r}")
        if sum(p == SHARD for p in entry.placements) > 1:
            refuse(f"{here}.placements", list(entry.placements), "sharded over one mesh axis at most")
        if entry.gradient not in GRADIENTS:
            refuse(f"{here}.gradient", entry.gradient, " or ".join(map(repr, GRADIENTS)))
        if entry.gradient == "reduce_scatter" and entry.shard_axis is None and plan.mesh:
            refuse(f"{here}.gradient", entry.gradient, "'all_reduce' for a parameter that is not sharded")
        for flag in ("reshard_after_forward", "offload"):
            if not isinstance(getattr(entry, flag), bool):
                refuse(f"{here}.{flag}", getattr(entry, flag), "true or false")
