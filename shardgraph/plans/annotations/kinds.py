"""The kinds of annotations: frozen dataclasses, registered with ``@kind``, that print as the call that creates them.

An annotation of parameters defines the resulting plan of the parameter; one of modules is read from the plan by the
code that applies it.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform

import torch

from shardgraph.arguments import NAME
from shardgraph.errors import PlanError, expect, nearest
from shardgraph.mesh import Mesh
from shardgraph.plans.parameter_plan import AUTO, OWN, REPLICATE, SHARD, ParameterPlan, split_text, unsharded
from shardgraph.plans.precision import dtype_name
from shardgraph.sizes import is_whole


class Axes(Protocol):
    """The part of a plan that annotations read: its name and its mesh, with axes for data, operators or experts."""

    @property
    def name(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def operators(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def experts(self) -> str: ...


class Annotation:
    """A constraint on the plan of the parameters or modules that a pattern matches."""

    opposite: ClassVar[str] = ""
    """The kind that no plan can satisfy together with this one."""

    def contradicts(self, other: Annotation) -> bool:
        """Whether no plan can satisfy both annotations."""
        return type(other).__name__ == self.opposite or (type(self) is type(other) and self != other)

    def _expect(self, allowed: bool, field: str, expected: str) -> None:
        expect(allowed, f"{field} of {type(self).__name__}()", getattr(self, field), expected)

    def __repr__(self) -> str:
        arguments = []
        for position, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            text = json.dumps(value) if isinstance(value, str) else repr(value)
            if field.default is MISSING or value != field.default:
                arguments.append(text if field.default is MISSING or not position else f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(arguments)})"


class ParameterAnnotation(Annotation):
    """An annotation of parameters."""

    def changed(self, entry: ParameterPlan, shape: Sequence[int], plan: Axes) -> ParameterPlan:
        """The plan of a parameter of global ``shape`` for which ``plan`` has ``entry``, with this annotation applied.

        Raises:
            PlanError: the annotation cannot be satisfied; the message says why and what would work.
        """
        raise TypeError(f"{self} does not define what it changes")


class ModuleAnnotation(Annotation):
    """An annotation of modules."""


KINDS: dict[str, type[Annotation]] = {}

_Kind = TypeVar("_Kind", bound=type[Annotation])


@dataclass_transform(frozen_default=True)
def kind(cls: _Kind) -> _Kind:
    """A kind of annotation: a frozen dataclass, registered under its name."""
    KINDS[cls.__name__] = dataclass(frozen=True, repr=False)(cls)
    return cls


class Placement(ParameterAnnotation):
    """The placement of a tensor along a mesh axis; ``mesh_dim`` None means every axis."""

    mesh_dim: str | None

    def contradicts(self, other: Annotation) -> bool:
        if not isinstance(other, Placement) or self == other:
            return False
        differ = type(self) is not type(other) or isinstance(self, shard)
        return differ and (None in (self.mesh_dim, other.mesh_dim) or self.mesh_dim == other.mesh_dim)


@kind
class shard(Placement):
    """Each rank along ``mesh_dim`` has a shard of dimension ``dim``, or of each of ``blocks`` equal blocks of it.

    Along an operator axis the rank computes with its shard. Along a data axis, with ``dim`` 0, a parameter is stored
    sharded and all-gathered before use.
    """

    dim: int
    mesh_dim: str
    blocks: int = 1

    def __post_init__(self) -> None:
        self._expect(
            isinstance(self.dim, int) and not isinstance(self.dim, bool),
            "dim",
            "a dimension of the tensor, such as 0 or -1",
        )
        self._expect(NAME.fits(self.mesh_dim), "mesh_dim", "the name of a mesh axis, such as 'tp'")
        self._expect(is_whole(self.blocks, 1), "blocks", "a whole number from 1")

    def part(self, shape: Sequence[int], ranks: int) -> int:
        """The sharded dimension of a tensor of ``shape``, as a non-negative number.

        Raises:
            PlanError: there is no such dimension, or it does not divide by the number of ranks.
        """
        if not -len(shape) <= self.dim < len(shape):
            raise PlanError(f"it has {len(shape)} dimensions: dim may be {-len(shape)} to {len(shape) - 1}")
        dim, least = self.dim % len(shape), self.blocks * ranks
        if not shape[dim] or shape[dim] % least:
            raise PlanError(
                f"{self.mesh_dim!r} has {ranks} ranks and dimension {dim} is {shape[dim]}: a multiple of {least} "
                f"works, such as {max(1, math.ceil(shape[dim] / least)) * least}"
            )
        return dim

    def changed(self, entry: ParameterPlan, shape: Sequence[int], plan: Axes) -> ParameterPlan:
        """``split(dim)`` along an axis of operators or experts, ``shard(0)`` along a data axis."""
        position = plan.axes.index(self.mesh_dim)
        if dict(plan.operators).get(self.mesh_dim) == "context":
            raise PlanError(
                f"{self.mesh_dim!r} shards sequences, along which parameters are whole: "
                f"replicate({self.mesh_dim!r}) works"
            )
        if self.mesh_dim in (*dict(plan.operators), plan.experts):
            dim = self.part(shape, plan.mesh[position][1])
            if self.mesh_dim == plan.experts and (dim or self.blocks > 1):
                raise PlanError(
                    f"{self.mesh_dim!r} divides experts, which lie along dimension 0: shard(0, {self.mesh_dim!r}) works"
                )
            return _placed(entry, position, split_text(dim, self.blocks))
        if not shape or not math.prod(shape):
            raise PlanError("it has no rows to shard; replicate() works")
        if self.dim % len(shape) or self.blocks > 1:
            raise PlanError(
                f"{self.mesh_dim!r} is a data axis, along which parameters are sharded on dimension 0: "
                f"shard(0, {self.mesh_dim!r}) works, and so does an axis of operators, as in plan 'tp'"
            )
        if entry.shard_axis is None:
            entry = replace(entry, gradient="reduce_scatter", reshard_after_forward=True)
        placements = [REPLICATE if placement == SHARD else placement for placement in entry.placements]
        placements[position] = SHARD
        return replace(entry, placements=tuple(placements))


@kind
class replicate(Placement):
    """Replicated along ``mesh_dim``; without one, along every axis."""

    mesh_dim: str | None = None

    def __post_init__(self) -> None:
        self._expect(self.mesh_dim is None or NAME.fits(self.mesh_dim), "mesh_dim", "the name of a mesh axis")

    def changed(self, entry: ParameterPlan, shape: Sequence[int], plan: Axes) -> ParameterPlan:
        for position, axis in enumerate(plan.axes):
            if self.mesh_dim in (None, axis):
                if axis in (*dict(plan.operators), plan.experts):
                    entry = _placed(entry, position, REPLICATE)
                elif entry.shard_axis == position:
                    entry = unsharded(entry)
        return entry


def _placed(entry: ParameterPlan, position: int, text: str) -> ParameterPlan:
    now = entry.placements[position]
    if now not in (AUTO, text):
        raise PlanError(f"the plan's own entry places it as {now!r}: make that {AUTO!r}, or take back one of the two")
    return replace(entry, placements=(*entry.placements[:position], text, *entry.placements[position + 1 :]))


@kind
class keep_gathered(ParameterAnnotation):
    """A sharded parameter stays gathered from forward to backward: fewer all-gathers, more memory."""

    opposite = "reshard"

    def changed(self, entry: ParameterPlan, shape: Sequence[int], plan: Axes) -> ParameterPlan:
        """Not resharded after forward; no effect on a parameter that is not sharded."""
        return replace(entry, reshard_after_forward=False)


@kind
class ignored(ParameterAnnotation):
    """A parameter that the plan leaves alone: a plain tensor, whole on every rank, whose gradient is each rank's own.

    As FSDP's ``ignored_params``. Clipping and ``join()`` leave it out.
    """

    def contradicts(self, other: Annotation) -> bool:
        """It is not placed, gathered or offloaded either."""
        return isinstance(other, (Placement, keep_gathered, reshard, offload))

    def changed(self, entry: ParameterPlan, shape: Sequence[int], plan: Axes) -> ParameterPlan:
        if plan.operators or plan.experts:
            raise PlanError(
                f"plan {plan.name!r} divides operators or experts, of which every parameter has a part: a plan of data "
                "alone works, and so does replicate(), whose gradient is reduced"
            )
        return replace(unsharded(entry), gradient=OWN)


@kind
class reshard(ParameterAnnotation):
    """A sharded parameter is resharded after forward and all-gathered again in backward."""

    opposite = "keep_gathered"

    def changed(self, entry: ParameterPlan, shape: Sequence[int], plan: Axes) -> ParameterPlan:
        if entry.shard_axis is None:
            raise PlanError(
                f"plan {plan.name!r} does not store it in shards: annotate it shard(0, ...) along an axis of data too"
            )
        return replace(entry, reshard_after_forward=True)


class _OfValue(ModuleAnnotation):
    placement: Placement
    at: int | str

    def __post_init__(self) -> None:
        self._expect(isinstance(self.placement, Placement), "placement", "shard(...) or replicate(...)")
        by_name = isinstance(self, input)
        expected = "a number from 0" + (", or the name of an argument" if by_name else "")
        self._expect(is_whole(self.at, 0) or (by_name and isinstance(self.at, str)), "at", expected)

    def contradicts(self, other: Annotation) -> bool:
        return type(self) is type(other) and self.at == other.at and self.placement.contradicts(other.placement)


@kind
class output(_OfValue):
    """The placement of a module's output, and of its gradient, along an operator axis.

    ``at`` is the index among the tensors that the module returns, in order.
    """

    placement: Placement
    at: int = 0


@kind
class input(_OfValue):
    """The placement of a module's input, and of its gradient, along an operator axis.

    ``at`` is the index among the tensors that the module is called with, in order, or the name of an argument of its
    forward. The inputs of the model are those of the module ``""``.
    """

    placement: Placement
    at: int | str = 0


@kind
class recompute(ModuleAnnotation):
    """What a module computes is not saved for backward, but recomputed there from the module's inputs.

    Of several modules around an operation with ``recompute()`` or ``save()``, the innermost takes precedence.
    """

    opposite = "save"


@kind
class save(ModuleAnnotation):
    """The values of a module that backward needs are saved, also inside ``recompute()`` and instead of a second
    all-gather."""

    opposite = "recompute"


@kind
class stage(ModuleAnnotation):
    """The module is in stage ``index`` of the pipeline, and so is everything after it until the next stage begins.

    Stage 0 begins with forward. Without effect if the plan has no pipeline.
    """

    index: int

    def __post_init__(self) -> None:
        self._expect(is_whole(self.index, 0), "index", "a whole number from 0")


@kind
class offload(Annotation):
    """A parameter is in host memory while it is not in use, with its gradient and the optimizer's state.

    For a module, what it saves for backward is in host memory until backward; if it is recomputed, what it is
    recomputed from.
    """


@kind
class precision(Annotation):
    """A module computes in ``dtype`` whatever the plan's precision is, or a parameter is cast to it before its use.

    A module's inputs are cast to ``dtype``, and its outputs to ``outputs``, by default to the dtype of the surrounding
    module. Of several annotated modules around a parameter, the innermost takes precedence.
    """

    dtype: str | torch.dtype
    outputs: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype, "dtype of precision()"))
        if self.outputs is not None:
            object.__setattr__(self, "outputs", dtype_name(self.outputs, "outputs of precision()"))


def parse(text: str) -> Annotation:
    """The annotation that prints as ``text``.

    Raises:
        PlanError: the text is no annotation; the message lists the kinds.
    """
    try:
        annotation = _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise PlanError(
            f'{text!r} is no annotation ({error}): write one as in Python, such as shard(0, "tp")'
        ) from None
    if not isinstance(annotation, Annotation):
        raise PlanError(f"{text!r} is no annotation; there are {', '.join(KINDS)}, each written as a call")
    return annotation


def _built(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = ast.unparse(node.func)
    if name not in KINDS:
        raise PlanError(f"there is no annotation {name!r}; there are {', '.join(KINDS)}{nearest(name, KINDS)}")
    arguments = [_built(argument) for argument in node.args]
    return KINDS[name](*arguments, **{str(each.arg): _built(each.value) for each in node.keywords})
