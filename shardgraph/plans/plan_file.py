"""Writes and reads the YAML form of a plan: the fields of :class:`shardgraph.Plan` by name, as in docs/plans.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import yaml

from shardgraph.errors import FieldError, PlanError, nearest, shown
from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.annotations.kinds import parse
from shardgraph.plans.annotations.match import Annotated
from shardgraph.plans.batch import REDUCED_IN, Batch
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.orders import SCHEDULES
from shardgraph.plans.parameter_plan import AUTO, GRADIENTS, REPLICATE, SHARD, ParameterPlan
from shardgraph.plans.pipeline_plan import CHECKPOINTS, Pipeline
from shardgraph.plans.precision import Precision
from shardgraph.yaml_text import parsed

SCHEMA = 1
"""The version of the form."""

_REQUIRED = ("schema", "name", "mesh", "parameters")


def written_plan(plan: Mapping[str, Any]) -> str:
    """The YAML form of a plan whose fields are given by name."""
    data, last = _data(plan)
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    if not last:
        return text
    return text + yaml.safe_dump(last, sort_keys=False, default_flow_style=False, width=200, allow_unicode=True)


def _data(plan: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that are written, and those that are written last, with one line each."""
    recompute, pipeline = plan["recompute"], plan["pipeline"]
    converted = {
        "mesh": dict(plan["mesh"]),
        "operators": dict(plan["operators"]),
        "replicas": dict(plan["replicas"]),
        "annotations": [{pattern: str(annotation)} for pattern, annotation in plan["annotations"]],
        "recompute": recompute if isinstance(recompute, str) else {key: list(names) for key, names in recompute},
        "pipeline": _written(pipeline, ("schedule", "checkpoint", "ranks")) if pipeline else None,
        "batch": _written(plan["batch"]) if plan["batch"] else None,
        "precision": _written(plan["precision"]),
        "offload": _written(plan["offload"]),
        "considered": [_candidate(candidate) for candidate in plan["considered"]],
        "remarks": list(plan["remarks"]),
        "bounds": dict(plan["bounds"]),
        "parameters": {
            pattern: _written(entry, ("placements", "gradient", "reshard_after_forward"))
            for pattern, entry in plan["parameters"]
        },
    }
    data = {key: converted.get(key, plan[key]) for key in _PLAN if key != "activations"}
    data = {key: value for key, value in data.items() if value or key in (*_REQUIRED, "note", "prefetch", "bucket")}
    if recompute == "none":
        del data["recompute"]
    if (activations := plan["activations"]) is None:
        return data, {}
    rules = {axis: dict(rules) for axis, rules in activations.along}
    return data, {"activations": {"call": activations.call, **rules}}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    values = _written(candidate, ("name", "mesh", "memory", "seconds", "fits")) | {"mesh": dict(candidate.mesh)}
    if candidate.over:
        values["over"] = dict(candidate.over)
    if candidate.plan is not None:
        data, last = _data({field.name: getattr(candidate.plan, field.name) for field in fields(candidate.plan)})
        values["plan"] = data | last
    return values


def _written(record: Any, always: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that differ from their default, and those that are ``always`` written."""
    kept = [each for each in fields(record) if each.name in always or getattr(record, each.name) != each.default]
    values = {field.name: getattr(record, field.name) for field in kept}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_plan(text: str, source: str) -> dict[str, Any]:
    """Parse the YAML form of a plan into its fields by name; ``source`` names the text in errors.

    Raises:
        PlanError: it is not YAML, or a field has a value that is not allowed.
    """
    try:
        data = parsed(text)
    except ValueError as error:
        raise PlanError(f"{source} is not YAML: {error}") from error
    try:
        return _read("", _PLAN, _REQUIRED, data)
    except RecursionError:
        raise PlanError(f"{source} has itself inside") from None
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


class _Field(NamedTuple):
    """A field of the file: the YAML types of its value, what errors say is allowed, and its conversion."""

    types: type | tuple[type, ...]
    allowed: str
    convert: Callable[[Any], Any] = lambda value: value
    least: float = -math.inf

    def fits(self, value: Any) -> bool:
        """Whether a value is of these types, which do not have booleans for numbers, and not below the ``least``."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and self.types is not bool):
            return False
        return not isinstance(value, (int, float)) or self.least <= value < math.inf


def _read(path: str, known: Mapping[str, _Field], required: Collection[str], data: Any) -> dict[str, Any]:
    """The mapping at ``path`` of the file, checked and with its values converted."""
    if not isinstance(data, dict):
        raise FieldError(f"{path or 'the file'} is {shown(data)}; it may be a mapping of {', '.join(known)}")
    prefix = f"{path}." if path else ""
    for key in data:
        if key not in known:
            hint = nearest(str(key), known) or f"; the fields are {', '.join(known)}"
            raise PlanError(f"unknown field {prefix}{key}{hint}")
    for key, field in known.items():
        if key not in data and key in required:
            raise PlanError(f"the field {prefix}{key} is missing; it may be {field.allowed}")
        if key in data and not field.fits(data[key]):
            raise FieldError(f"{prefix}{key} is {shown(data[key])}; it may be {field.allowed}")
    return {key: known[key].convert(value) for key, value in data.items()}


def _pairs(data: Mapping[Any, Any]) -> tuple[tuple[str, Any], ...]:
    if strange := [key for key in data if not isinstance(key, str)]:
        raise PlanError(f"the name {strange[0]!r} is no text: write it in quotes")
    return tuple(data.items())


def _parameters(data: Mapping[Any, Any]) -> tuple[tuple[str, ParameterPlan], ...]:
    return tuple((pattern, _parameter(f"parameters.{pattern}", entry)) for pattern, entry in _pairs(data))


def _parameter(field: str, entry: Any) -> ParameterPlan:
    """An entry, whose gradient, where the file does not say it, is scattered if the parameter is sharded."""
    fields = _read(field, _PARAMETER, ("placements",), entry)
    scattered = SHARD in fields["placements"] or not fields["placements"]
    return ParameterPlan(**{"gradient": "reduce_scatter" if scattered else "all_reduce"} | fields)


def _considered(data: list[Any]) -> tuple[Candidate, ...]:
    required = ("name", "mesh", "memory", "seconds", "fits")
    return tuple(Candidate(**_read(f"considered.{i}", _CANDIDATE, required, each)) for i, each in enumerate(data))


def _nested(data: dict[Any, Any]) -> dict[str, Any]:
    return _read("considered.plan", _PLAN, _REQUIRED, data)


def _recompute(data: str | dict[Any, Any]) -> str | tuple[tuple[str, tuple[str, ...]], ...]:
    if isinstance(data, str):
        return data or "none"
    if not data:
        return "none"
    for pattern, names in _pairs(data):
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise PlanError(f"recompute.{pattern} is {names!r}; it may be a list of operations, such as [silu, mul]")
    return tuple((pattern, tuple(names)) for pattern, names in data.items())


def _activations(data: dict[Any, Any]) -> Activations:
    call, along = data.get("call"), {axis: rules for axis, rules in data.items() if axis != "call"}
    if not isinstance(call, str):
        raise PlanError(f"activations.call is {call!r}; it may be the call that the placements were chosen for")
    for axis, rules in along.items():
        if not isinstance(rules, dict) or not all(isinstance(text, str) for text in rules.values()) or axis is None:
            raise PlanError(
                f"activations.{axis} is {rules!r}; it may be a mapping of operations to the placements of their "
                "operands and results"
            )
    return Activations(call, tuple((str(axis), _pairs(rules)) for axis, rules in along.items()))


def _annotations(data: list[Any]) -> tuple[Annotated, ...]:
    annotations = []
    for each in data:
        if not isinstance(each, dict) or len(each) != 1:
            raise PlanError(f"annotations has {each!r}; it may have one pattern with its annotation")
        ((pattern, text),) = each.items()
        try:
            if not isinstance(pattern, str) or not isinstance(text, str):
                raise PlanError(f"{shown(text)} is no annotation: write one as a text, such as 'shard(0, \"tp\")'")
            annotations.append((pattern, parse(text)))
        except PlanError as error:
            raise PlanError(f"annotations.{pattern}: {error}") from None
    return tuple(annotations)


def _pipeline(data: Any) -> Pipeline:
    return Pipeline(**_read("pipeline", _PIPELINE, ("ranks",), data))


def _batch(data: Any) -> Batch:
    return Batch(**_read("batch", _BATCH, ("samples",), data))


def _precision(data: Any) -> Precision:
    return Precision(**_read("precision", _PRECISION, (), data))


def _offload(data: Any) -> Offload:
    return Offload(**_read("offload", _OFFLOAD, (), data))


_TEXT = _Field(str, "a text")
_BOOL = _Field(bool, "true or false")
_COUNT = _Field(int, "a whole number from 0", least=0)
_SECONDS = _Field((int, float), "a number of seconds from 0", least=0)
_MESH = _Field(dict, "a mapping of axis names to sizes, such as {dp: 2}", _pairs)
_DTYPE = _Field(str, "the name of a dtype")
_PARAMETER = {
    "placements": _Field(list, f"a list of {REPLICATE!r}, {SHARD!r}, 'split(d)' or {AUTO!r}, one per mesh axis", tuple),
    "gradient": _Field(str, " or ".join(map(repr, GRADIENTS))),
    "reshard_after_forward": _BOOL,
    "offload": _BOOL,
}
_PIPELINE = {
    "ranks": _Field(int, "a whole number from 1"),
    "schedule": _Field(str, " or ".join(map(repr, SCHEDULES))),
    "microbatches": _Field(int, "a whole number from 1"),
    "stages": _Field(list, "a list of the modules with which stages begin"),
    "balance": _Field(list, "a list of the number of layers of each stage"),
    "checkpoint": _Field(str, " or ".join(map(repr, CHECKPOINTS))),
    "axis": _Field(str, "the name of a mesh axis"),
}
_BATCH = {
    "samples": _Field(int, "a whole number from 1"),
    "calls": _Field(int, "a whole number from 1"),
    "reduce": _Field(str, " or ".join(map(repr, REDUCED_IN))),
}
_PRECISION = {
    "parameters": _DTYPE,
    "reduce": _DTYPE,
    "buffers": _DTYPE,
    "outputs": _DTYPE,
    "inputs": _BOOL,
    "products": _Field(str, "'float8'"),
}
_OFFLOAD = {
    "parameters": _BOOL,
    "activations": _BOOL,
    "disk": _Field(str, "the path of a folder"),
    "optimizer_state": _BOOL,
}
_CANDIDATE = {
    "name": _TEXT,
    "mesh": _MESH,
    "memory": _Field(int, "a number of bytes", least=0),
    "seconds": _SECONDS,
    "fits": _BOOL,
    "batches": _Field(int, "a whole number from 1", least=1),
    "samples": _COUNT,
    "compute": _SECONDS,
    "exposed": _SECONDS,
    "bubble": _SECONDS,
    "calls": _SECONDS,
    "again": _SECONDS,
    "over": _Field(dict, "a mapping of what is exposed to seconds", _pairs),
    "recompute": _TEXT,
    "plan": _Field(dict, "a whole plan", _nested),
}
_PLAN = {  # in the order in which they are written
    "schema": _Field(int, f"{SCHEMA}"),
    "name": _TEXT,
    "note": _TEXT,
    "mesh": _MESH,
    "prefetch": _COUNT,
    "bucket": _Field(int, "a whole number of bytes, or 0 for no buckets"),
    "operators": _Field(dict, "a mapping of mesh axes to 'whole', 'sequence' or 'context'", _pairs),
    "annotations": _Field(list, "a list of patterns, each with an annotation", _annotations),
    "recompute": _Field(
        (str, dict), "none, full, selective, budget, or a mapping of modules to operations", _recompute
    ),
    "loss_chunk": _Field(int, "the bytes of logits per chunk"),
    "experts": _Field(str, "the mesh axis that shards experts"),
    "pipeline": _Field(dict, "a mapping of ranks, schedule, microbatches and stages", _pipeline),
    "batch": _Field(dict, "a mapping of a step's samples, the calls of a rank in it, and which of them reduce", _batch),
    "precision": _Field(dict, "a mapping of parameters, reduce, buffers and outputs to dtypes", _precision),
    "offload": _Field(dict, "a mapping of parameters, activations, disk and optimizer_state", _offload),
    "gradient_statistics": _BOOL,
    "replicas": _Field(dict, "the axis of ranks that train copies of their own, such as {replicas: 2}", _pairs),
    "activations": _Field(dict, "a mapping of 'call' and mesh axes to the placements of operations", _activations),
    "considered": _Field(list, "a list of the candidates that were compared", _considered),
    "remarks": _Field(list, "a list of texts", tuple),
    "bounds": _Field(dict, "a mapping of plans and their meshes to seconds", _pairs),
    "parameters": _Field(dict, "a mapping of name patterns to the plans of those parameters", _parameters),
}
